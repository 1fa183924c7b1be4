"""Command-line options of a run, made from the fields of its configuration."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from eldr_sim.cli.option import (
    ALIASES,
    Completer,
    Decorator,
    complete,
    front_ends,
    gpus,
    models,
    option,
    policies,
    presets,
    together,
    traces,
    with_pictures,
    workloads,
)
from eldr_sim.errors import InputError
from eldr_sim.policies.choice import BUILT_IN, DECISION_OF
from eldr_sim.simulator.setup.config.groups import GROUPS as CONFIG_GROUPS
from eldr_sim.simulator.setup.config.groups import RUN_FIELDS
from eldr_sim.simulator.setup.config.pools import Pool
from eldr_sim.simulator.setup.config.presets import preset_fields
from eldr_sim.simulator.setup.config.run_config import (
    RunConfig,
    make_config,
    read_config,
    set_field,
)

#: Sections of the help behind that of a long group, and their fields of it.
_APART: dict[str, dict[str, tuple[str, ...]]] = {
    "Cluster": {"Parallelism": (
        "tensor_parallel_size", "enable_expert_parallel", "data_parallel_size",
        "enable_elastic_ep", "micro_batches", "pipeline_parallel_size", "num_redundant_experts",
        "gpus_per_node", "all2all_backend",
    )},
    "Requests": {
        "Measured part": (
            "log_from", "log_to", "busiest", "duration", "warmup", "num_requests", "seed",
        ),
        "Sessions": (
            "sessions", "max_active_sessions", "turns", "calls_per_turn", "think_time", "tool_time",
            "new_tokens", "history", "sessions_file", "recorded_ttft_ms", "recorded_tpot_ms",
        ),
    },
    "Routing": {"Lengths": (
        "input_len", "prompt_lengths", "output_len", "random_range_ratio", "prefix_len",
        "num_prefixes", "length_shape",
    )},
}  # fmt: skip
#: The fields of a run's configuration by group, in the order of the help.
GROUPS: dict[str, tuple[str, ...]] = {}
for _name, _group in CONFIG_GROUPS.items():
    _title = "KV cache" if _name == "kv" else _name.replace("_", " ").capitalize()
    _sections = _APART.get(_title, {})
    _apart = {field for fields in _sections.values() for field in fields}
    GROUPS[_title] = tuple(field for field in _group.model_fields if field not in _apart)
    GROUPS |= _sections
GROUPS[POOLS := "Prefill and decode workers, where they differ"] = ()
#: Options of every command that makes a result.
_OUTPUT = (
    "preset", "config", "from_manifest", "out", "force", "plot", "timeline", "backend", "verbose",
    "help", "help_all",
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
    """A command whose help has the options of a run by group; ``--help-all`` the seldom ones,
    too."""

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


#: Fields that are mappings and have options of their own.
_MAPPINGS = ("goodput", "prefill", "decode")
#: Fields that are said in another option: ``--engine vllm==0.24``.
_SAID_ELSEWHERE = ("engine_version",)
#: Options of one pool's workers, such as ``prefill_gpu``, and the fields they stand for.
_POOL_OPTIONS = {
    f"{role}_{name}": (role, name)
    for role in ("prefill", "decode")
    for name in Pool.model_fields
    # A plan's, or a file's: help has room for a screen; the version is a part of the engine's word.
    if name not in ("all2all_backend", "engine_version")
}


def run_options(*, without: tuple[str, ...] = ()) -> Decorator:
    """Add an option for each field of :class:`RunConfig`, plus ``--config`` and ``--goodput``."""
    hidden = (*_MAPPINGS, *_SAID_ELSEWHERE, *without)
    options = [_option(name) for name in RUN_FIELDS if name not in hidden]
    options += [_pool_option(name) for name in _POOL_OPTIONS]
    bounds = (
        "Service level of a good request, ms: ttft:500,tpot:30 (also e2el); once with a list, or "
        "repeated."
    )
    somebody = (
        "A cluster that somebody ran (eldr-sim presets); other options and --config override its "
        "fields."
    )
    file = "Read fields from a file (or from the config.json of a result); options override it."
    if "goodput" not in without:
        options.append(option("--goodput", None, bounds, multiple=True, metavar="METRIC:MS,..."))
    if "preset" not in without:
        named = {"metavar": "NAME[:MODEL][+warm-up]", "shell_complete": complete(presets)}
        options.append(option("--preset", None, somebody, **named))
    options.append(option("--config config_file", Path, file, metavar="FILE.yaml"))
    return together(*options)


def _pool_option(name: str) -> Decorator:
    _, field = _POOL_OPTIONS[name]
    about = Pool.model_fields[field]
    return _made(name, field, about.annotation == bool | None, about.description)


def _option(name: str) -> Decorator:
    if several := {"fail": "POOL:N@S[+S]", "kv_tier": "NAME:BYTES,load=..."}.get(name):
        flag = "--" + name.replace("_", "-")
        return option(f"{flag} {name}", None, _help(name), multiple=True, metavar=several)
    switch = RUN_FIELDS[name].annotation in (bool, bool | None)
    return _made(name, name, switch, _help(name), *ALIASES.get(name, ()))


def _made(name: str, field: str, switch: bool, text: str | None, *aliases: str) -> Decorator:
    flag = name.replace("_", "-")
    if switch:
        return option(f"--{flag}/--no-{flag} {name}", None, text, default=None)
    named = {"metavar": _metavar(field), "shell_complete": _completer(field)}
    return option(" ".join([f"--{flag}", *aliases, name]), None, text, **named)


def _completer(name: str) -> Completer | None:
    if choices := _choices(name):
        return complete(lambda: choices)
    if name in DECISION_OF:
        return complete(policies(DECISION_OF[name]))
    return {
        "model": complete(models, "file"),
        "gpu": complete(gpus, "file"),
        "frontend": complete(front_ends, "file"),
        "trace": complete(traces, "dir"),
        "workload": complete(workloads, "file"),
        "tables": complete(tuple, "dir"),
        **dict.fromkeys(
            ("events", "load", "sessions_file", "extra_llm_api_options"), complete(tuple, "file")
        ),
    }.get(name)


def _choices(name: str) -> tuple[str, ...]:
    """Return the words that a field may be, where these are all that it may be."""
    field = RUN_FIELDS.get(name)
    annotation = None if field is None else field.annotation
    if get_origin(annotation) is not Literal:  # or one that may be None
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        annotation = kinds[0] if len(kinds) == 1 else None
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def config_from_options(options: dict[str, Any]) -> RunConfig:
    """Build the configuration from ``--config`` (a file or a mapping) and options, or
    InputError."""
    given = {name: value for name, value in options.items() if value not in (None, ())}
    file = given.pop("config_file", None)
    preset = given.pop("preset", None)
    bounds = given.pop("goodput", ())
    values = dict(file) if isinstance(file, Mapping) else read_config(file) if file else {}
    if preset is not None:
        values = preset_fields(preset, values | _known(given))
        if "+" in preset:  # its load has taken the rate up
            given.pop("request_rate", None)
    for name in given.keys() & _POOL_OPTIONS.keys():
        set_field(values, ".".join(_POOL_OPTIONS[name]), given.pop(name))
    values |= given
    if bounds:
        from eldr_sim.planning.slo import parse_slo  # NumPy: --help does without

        values["goodput"] = parse_slo(bounds, "goodput").model_dump(exclude_none=True)
    return make_config(values)


def _known(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are fields; a preset computes with the rate, where it is a number."""
    fields = {name: value for name, value in given.items() if name in RUN_FIELDS}
    with suppress(KeyError, ValueError):
        fields["request_rate"] = float(fields["request_rate"])
    return fields


def served(config: RunConfig, policies: list[str]) -> list[str]:
    """Return the decode policies that a model can have, and say which are left out."""
    from eldr_sim.simulator.setup.run_routing import servable  # takes long to import

    found = servable(config, policies)
    if left := [word for word in policies if word not in found]:
        why = f"{config.engine.model} is dense, and they need experts"
        click.echo(f"Left out: {', '.join(left)} ({why})", err=True)
    return found


def check_out(out: Path | None, force: bool, marker: str = "summary.json") -> None:
    """Raise InputError, before anything runs, if --out and --force will not do."""
    from eldr_sim.simulator.results import check_output  # takes long to import

    if out is not None:
        check_output(out, force, marker)
    elif force:
        raise InputError("force", "--force without --out", "--out DIR beside it")


def check_file(out: Path, force: bool, report: Path | None, what: str) -> None:
    """Raise InputError, before anything runs, if ``what``'s --out, --report and --force fail."""
    from eldr_sim.simulator.results import check_output  # takes long to import

    if out.exists() and not force:
        raise InputError("out", f"{out} exists", "a new file, or --force")
    with_pictures(report is not None)
    if report is not None:
        check_output(report, force)
        if report.resolve() in (out.resolve(), *out.resolve().parents):
            raise InputError("report", f"{report} would hold {out}", f"a folder beside the {what}")


def plot_extras(plot: bool, out: Path | None, name: str = "") -> list[Callable[[Path], None]]:
    """Return what draws a result's pictures beside it; raises InputError for --plot alone."""
    if not plot:
        return []
    if out is None:
        raise InputError("plot", "--plot without --out", "--out DIR beside it")
    from eldr_sim.reports.figures import png_writer  # takes long to import

    return [png_writer(name)]


def _metavar(name: str) -> str:
    if name == "engine":
        return "|".join(_choices(name)) + "[==VERSION]"
    if choices := _choices(name):
        return "|".join(choices)
    if name in DECISION_OF:
        return "NAME[:PARAMETER=VALUE,...]"
    return {
        "topology": "xPyD|xC|xP",
        "workload": "task|language|trace|FILE",
        "trace": "NAME|DIR",
        "tables": "DIR",
        "events": "FILE",
        "output_len": "N|recorded",
        "columns": "KEY=COLUMN,...",
        "load": "sine:|ladder:|FILE",
        **dict.fromkeys(("domain_mix", "domain_mix_end"), "NAME=WEIGHT,..."),
        "model": "NAME|PATH",
        "gpu": "NAME|PATH",
        "acceptance": "NAME|FILE",
        "speculative_config": "JSON",
        "price_per_gpu_hour": "$",
        "frontend": "CPU|FILE",
        **dict.fromkeys(("log_from", "log_to", "busiest", "duration", "warmup"), "TIME"),
        **dict.fromkeys(("turns", "calls_per_turn", "new_tokens"), "N|DRAWN"),
        **dict.fromkeys(("think_time", "tool_time"), "S|DRAWN"),
        "history": "all|RULE:VALUE",
        **dict.fromkeys(("sessions_file", "extra_llm_api_options"), "FILE"),
        "engine_args": "OPTIONS",
        "conditional_disagg": "RULE",
        "start_up": "S|NAME",
        **dict.fromkeys(("min_workers", "initial_workers"), "N[,N]"),
    }.get(name, "N" if int in (*get_args(_annotation(name)), _annotation(name)) else "NUMBER")


def _annotation(name: str) -> Any:
    return (RUN_FIELDS.get(name) or Pool.model_fields[name]).annotation


def _help(name: str) -> str:
    field = RUN_FIELDS[name]
    text = (field.description or "").replace("``", "")
    if name in DECISION_OF:
        own = ", or ./FILE.py:Class" if name == "policy" else ""
        text += f" Built in: {', '.join(BUILT_IN[DECISION_OF[name]])}{own}."
    if field.default in (None, ()):
        return text
    default = field.default if not isinstance(field.default, tuple) else field.default[0]
    return f"{text}  [default: {default}]"
