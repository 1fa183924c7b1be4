"""Command-line options of a run, made from the fields of its configuration."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import click
from click.shell_completion import CompletionItem
from pydantic.fields import FieldInfo

from eldr_sim.cli.decorators import (
    OUTPUT,
    OWN,
    Completer,
    Decorator,
    complete,
    names_from,
    option,
    policies,
    presets,
    together,
    with_pictures,
)
from eldr_sim.errors import InputError
from eldr_sim.policies.choice import BUILT_IN, DECISION_OF
from eldr_sim.simulator.setup.config.groups import GROUP_OF, GROUPS, RUN_FIELDS
from eldr_sim.simulator.setup.config.option import option_of, words_of
from eldr_sim.simulator.setup.config.pools import Pool
from eldr_sim.simulator.setup.config.run_config import (
    RunConfig,
    field_path,
    make_config,
    read_config,
    set_field,
)
from eldr_sim.simulator.setup.config.spellings import (
    PATHS,
    POOLS,
    parse_setting,
    parse_value,
    spellings,
)

#: The groups of fields, by their sections of the help.
TITLES = {
    name: "KV cache" if name == "kv" else name.replace("_", " ").capitalize() for name in GROUPS
}


_ALL = "`eldr-sim options` lists all options, `eldr-sim options WORD` those about a word."


class GroupedCommand(click.Command):
    """A command on a run's configuration: its help shows the common options, by group, and
    ``--set`` is the option of the field that it names."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        eager: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
        eager |= {"callback": _point_to_options, "hidden": True}
        self.params.append(click.Option(["--help-all"], **eager))
        self.epilog = f"{_ALL} --set and --config reach every field."

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse a command line; what ``--set`` says of fields with an option is that option's."""
        rest = super().parse_args(ctx, args)
        if ctx.params.get("settings"):
            ctx.params["settings"] = tuple(_spread(ctx.params))
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the common options, by group."""
        sections: dict[str, list[tuple[str, str]]] = {}
        sections |= {title: [] for title in (OWN, *TITLES.values(), OUTPUT)}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and getattr(param, "common", True):
                sections[getattr(param, "section", OUTPUT)].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _point_to_options(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        click.echo(_ALL)
        ctx.exit()


def run_options(*, without: tuple[str, ...] = (), seldom: str = "") -> Decorator:
    """Add an option for each field of :class:`RunConfig` except pools, which are set by path; and
    ``--set``, ``--config`` and ``--preset``. ``seldom``: a group that the help of this command does
    not show."""
    fields = [name for name in RUN_FIELDS if name not in (*POOLS, *without)]
    options = [_field_option(name, RUN_FIELDS[name], shown=GROUP_OF[name] != seldom)
               for name in fields]  # fmt: skip
    setting = (
        "Any field of a run: max_num_seqs=64, policy.tau=0.2; of the workers of a pool: "
        "decode.gpu=H200. Repeat for more."
    )
    preset = (
        "A published cluster (eldr-sim presets); other options and --config override its fields."
    )
    file = "Read fields from a file (or from the config.json of a result); options override it."
    last: dict[str, Any] = {"section": OUTPUT}
    options.append(
        option("--set settings", None, setting, multiple=True, metavar="FIELD=VALUE", **last,
               callback=_settings, shell_complete=complete_setting)
    )  # fmt: skip
    if "preset" not in without:
        named = {"metavar": "NAME[:MODEL][+warm-up]", "shell_complete": complete(presets)}
        options.append(option("--preset", None, preset, **named, **last))
    options.append(option("--config config_file", Path, file, metavar="FILE.yaml", **last))
    return together(*options)


def _settings(
    _ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    return tuple(parse_setting(text) for text in texts)


def _field_option(name: str, field: FieldInfo, *, shown: bool) -> Decorator:
    """Return the option of a field, from its declaration."""
    mark, flag = option_of(name, field), name.replace("_", "-")
    about: dict[str, Any] = {"section": TITLES[GROUP_OF[name]], "multiple": mark.repeated}
    about["common"] = mark.common and shown

    def text() -> str:
        default = default_of(field)
        return described(name, field) + (f"  [default: {default}]" if default else "")

    if is_switch(field):
        return option(f"--{flag}/--no-{flag} {name}", None, text, default=None, **about)
    about |= {"metavar": metavar_of(name, field), "shell_complete": completer_of(name, field)}
    return option(" ".join([f"--{flag}", *mark.aliases, name]), None, text, **about)


def is_switch(field: FieldInfo) -> bool:
    """Whether a field is true or false."""
    return field.annotation in (bool, bool | None)


def described(name: str, field: FieldInfo) -> str:
    """Return the description of a field, with the built-in policies where it names one."""
    from eldr_sim.docstrings import described_fields  # what it takes is long to import

    described_fields(GROUPS[GROUP_OF[name]])
    text = plain(field.description)
    if name not in DECISION_OF:
        return text
    own = ", or ./FILE.py:Class" if name == "policy" else ""
    return f"{text} Built in: {', '.join(BUILT_IN[DECISION_OF[name]])}{own}."


def plain(description: str | None) -> str:
    """Return a description as one line of help."""
    return " ".join((description or "").replace("``", "").split())


def default_of(field: FieldInfo) -> str:
    """Return the default of a field as one types it; empty where its description says it."""
    default = (
        field.default[0] if field.default and isinstance(field.default, tuple) else field.default
    )
    plain = isinstance(default, str | int | float) and default is not None
    return str(default) if plain else ""


def metavar_of(name: str, field: FieldInfo) -> str:
    """Return what stands for the value of a field."""
    if mark := option_of(name, field).metavar or "|".join(words_of(field)):
        return mark
    if name in DECISION_OF:
        return "NAME[:PARAMETER=VALUE,...]"
    return "N" if int in (field.annotation, *get_args(field.annotation)) else "NUMBER"


def completer_of(name: str, field: FieldInfo) -> Completer | None:
    """Return what completes the value of a field; None where nothing does."""
    mark, words = option_of(name, field), words_of(field)
    if words:
        return complete(lambda: words)
    if name in DECISION_OF:
        return complete(policies(DECISION_OF[name]))
    if mark.names or mark.path:
        return complete(names_from(mark.names) if mark.names else tuple, mark.path)
    return None


def complete_setting(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete a field by its path, and then its value."""
    path, equals, value = incomplete.partition("=")
    if not equals:
        known = spellings() if path.partition(".")[0] in GROUPS else PATHS
        return [CompletionItem(f"{name}=") for name in known if name.startswith(path)]
    name = spellings().get(path, path).rpartition(".")[2]
    field = Pool.model_fields.get(name) or RUN_FIELDS.get(name)
    if field is None:
        return []
    completer = completer_of(name, field)
    found = [] if completer is None else completer(ctx, param, value)
    if is_switch(field):
        found = complete(lambda: ("true", "false"))(ctx, param, value)
    return [CompletionItem(f"{path}={item.value}") for item in found if item.type == "plain"]


def _spread(given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Move what ``--set`` says of whole fields to their options, in place; yields the rest, the
    fields inside others. Raises InputError where an option says one, too."""
    said: set[str] = set()
    for path, text in given.pop("settings", None) or ():
        name = field_path(path)
        if "." in name:
            yield name, text
            continue
        repeated = name in RUN_FIELDS and option_of(name, RUN_FIELDS[name]).repeated
        if given.get(name) not in (None, ()) and not (repeated and name in said):
            twice = f"--{name.replace('_', '-')} and --set {path}"
            raise InputError(name, f"given twice: {twice}", "one of the two")
        given[name] = (*(given.get(name) or ()), text) if repeated else text
        said.add(name)


def _meaning(value: Any, field: str) -> Any:
    """Return what a typed value, or the only one of an option that may be repeated, means."""
    if isinstance(value, tuple) and len(value) == 1:
        value = value[0]
    return parse_value(value, field) if isinstance(value, str) else value


def config_from_options(options: dict[str, Any]) -> RunConfig:
    """Build the configuration from ``--config`` (a file or a mapping), options and ``--set``, or
    InputError."""
    given = {name: value for name, value in options.items() if value not in (None, ())}
    inside = list(_spread(given))
    file = given.pop("config_file", None)
    preset = given.pop("preset", None)
    given = {name: _meaning(value, name) for name, value in given.items()}
    values = dict(file) if isinstance(file, Mapping) else read_config(file) if file else {}
    if preset is not None:
        from eldr_sim.simulator.setup.config.presets import preset_fields

        values = preset_fields(preset, values | _known(given))
        if "+" in preset:  # its load has taken the rate up
            given.pop("request_rate", None)
    values |= given
    for path, text in inside:
        set_field(values, path, parse_value(text, path))
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

    found = servable(config.engine.model, policies)
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
        raise InputError("force", "--force without --out", "together with --out DIR")


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
        raise InputError("plot", "--plot without --out", "together with --out DIR")
    from eldr_sim.reports.figures import png_writer  # takes long to import

    return [png_writer(name)]
