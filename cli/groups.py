"""Long lists of options, printed in groups by what they are about."""

from typing import Any

import click

from eldr_sim.simulator.setup.config.groups import GROUPS as CONFIG_GROUPS
from eldr_sim.simulator.setup.config.pools import Pool

#: Of a long group: fields that the help prints behind it, in a section of their own.
_APART: dict[str, tuple[str, tuple[str, ...]]] = {
    "Cluster": ("Parallelism", (
        "tensor_parallel_size", "enable_expert_parallel", "data_parallel_size",
        "enable_elastic_ep", "micro_batches", "pipeline_parallel_size", "num_redundant_experts",
        "gpus_per_node", "all2all_backend",
    )),
    "Workload": ("Measured part", (
        "log_from", "log_to", "busiest", "duration", "warmup", "num_requests", "seed",
    )),
}  # fmt: skip
#: The fields of a run's configuration by group, in the order of the help.
GROUPS: dict[str, tuple[str, ...]] = {}
for _name, _group in CONFIG_GROUPS.items():
    _title = _name.replace("_", " ").capitalize()
    _behind, _apart = _APART.get(_title, ("", ()))
    GROUPS[_title] = tuple(field for field in _group.model_fields if field not in _apart)
    if _apart:
        GROUPS[_behind] = _apart
GROUPS[POOLS := "Prefill and decode workers, where they differ"] = ()
#: Options of every command that makes a result.
_OUTPUT = (
    "preset", "config", "out", "force", "plot", "timeline", "verbose", "help", "help_all",
)  # fmt: skip
_ALL = "eldr_sim.help_all"
_GROUP_OF = {name: title for title, names in GROUPS.items() for name in names}
for _role in ("prefill", "decode"):
    _GROUP_OF |= {f"{_role}_{name}": POOLS for name in Pool.model_fields}
_FIELDS = frozenset(_GROUP_OF)
_GROUP_OF |= dict.fromkeys(_OUTPUT, "Output")


#: The fields that ``--help`` shows; the others are for ``--help-all``.
_OFTEN = frozenset({
    "policy", "prefill_policy", "workload", "request_rate", "max_concurrency", "duration",
    "num_requests", "seed", "output_len", "topology", "gpu", "tensor_parallel_size",
    "data_parallel_size", "enable_expert_parallel", "model", "enable_prefix_caching", "goodput",
})  # fmt: skip


class GroupedCommand(click.Command):
    """A command whose help prints the options of a run by group, after its own. ``--help`` leaves
    out those that few people use, and ``--help-all`` does not."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        eager: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
        eager |= {"callback": _print_all, "help": "Show all options, in groups."}
        self.params.append(click.Option(["--help-all"], **eager))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, by group."""
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *GROUPS)}
        for param in self.get_params(ctx):
            record, names = param.get_help_record(ctx), _names(param)
            seldom = not _OFTEN.intersection(names) and any(name in _FIELDS for name in names)
            if record is not None and (_ALL in ctx.meta or not seldom):
                group = next((_GROUP_OF[name] for name in names if name in _GROUP_OF), "Options")
                groups[group].append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _print_all(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def _names(param: click.Parameter) -> list[str]:
    return [option.lstrip("-").replace("-", "_") for option in param.opts]
