"""Long lists of options, printed in groups by what they are about."""

from __future__ import annotations

import click

from eldr_sim.simulator.config import Pool

__all__ = ["GROUPS", "GroupedCommand"]

#: The fields of a run's configuration by group, in the order of the help.
GROUPS: dict[str, tuple[str, ...]] = {
    "Policies": ("policy", "prefill_policy", "queue_order", "expert_placement"),
    "Workload": (
        "workload", "domain_mix", "request_rate", "burstiness", "max_concurrency", "duration",
        "warmup", "num_requests", "output_len", "seed",
    ),
    "Routing trace": ("trace", "trace_replay", "prompts"),
    "Cluster": (
        "topology", "gpu", "tensor_parallel_size", "enable_expert_parallel", "kv_transfer",
        "load_report_delay_ms", "signal_interval_ms", "price_per_gpu_hour",
    ),
    "Prefill and decode workers, where they differ": ("prefill", "decode"),
    "Engine": (
        "model", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size",
        "enable_prefix_caching", "async_scheduling", "gpu_memory_utilization", "host_gap_ms",
        "tables",
    ),
    "Output": ("goodput",),
}  # fmt: skip
#: Options of every command that makes a result.
_OUTPUT = ("config", "out", "force", "plot", "timeline", "help")
_GROUP_OF = {name: title for title, names in GROUPS.items() for name in names}
_GROUP_OF |= dict.fromkeys(_OUTPUT, "Output")
for _role in ("prefill", "decode"):
    _GROUP_OF |= {f"{_role}_{name}": _GROUP_OF[_role] for name in Pool.model_fields}


class GroupedCommand(click.Command):
    """A command whose help prints the options of a run by group, after its own."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, by group."""
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *GROUPS)}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                groups[_group(param)].append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _group(param: click.Parameter) -> str:
    """Return the group of the field that an option is named after, or of a command's own."""
    names = (option.lstrip("-").replace("-", "_") for option in param.opts)
    return next((_GROUP_OF[name] for name in names if name in _GROUP_OF), "Options")
