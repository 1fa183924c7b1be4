"""Options of commands in short, those that several commands have, and what the shell completes."""

from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import click
from click.shell_completion import CompletionItem

from eldr_sim.errors import PLOT, needed
from eldr_sim.outputs import check_place

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete(
    names: Callable[[], Iterable[str]],
    paths: Literal["file", "dir"] | None = None,
    *,
    listed: bool = False,
) -> Completer:
    """Return a completer of names, in any case. ``paths``: which may be given instead; ``listed``:
    a comma-separated list; its last part is completed."""

    def found(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, word = incomplete.rpartition(",") if listed else ("", "", incomplete)
        items = [
            CompletionItem(f"{before}{comma}{name}")
            for name in names()
            if name.lower().startswith(word.lower())
        ]
        # The type stands first: the shell's part of click takes paths where no name fits.
        return [CompletionItem(incomplete, type=paths), *items] if paths else items

    return found


def names_from(place: str) -> Callable[[], Iterable[str]]:
    """Return a source of names: a function, or what holds them, as ``module:attribute``."""

    def names() -> Iterable[str]:
        module, _, attribute = place.partition(":")
        found = getattr(import_module(f"eldr_sim.{module}"), attribute)
        named: Iterable[str] = found() if callable(found) else found
        return named

    return names


models = names_from("kernel_profiles.models:list_models")
gpus = names_from("kernel_profiles.gpus:list_gpus")
traces = names_from("traces.routing.manifest:builtin_traces")
workloads = names_from("simulator.setup.config.requests:WORKLOADS")


def policies(decision: str) -> Callable[[], Iterable[str]]:
    """Return a source of the built-in policies of a decision."""

    def names() -> Iterable[str]:
        from eldr_sim.policies.choice import BUILT_IN

        return BUILT_IN[decision]

    return names


def presets() -> Iterable[str]:
    """Return the presets, with each of their models."""
    from eldr_sim.simulator.setup.config.presets import PRESETS

    return [f"{name}:{model}" for name, preset in PRESETS.items() for model in preset.models]


Decorator = Callable[[Any], Any]
TENSOR_PARALLEL_SIZE = "--tensor-parallel-size -tp --tp"

#: The sections of a command's help that are no group of fields: the first, and the last.
OWN, OUTPUT = "Options", "Output"


#: The help of an option, or what makes it.
Help = str | Callable[[], str] | None


class Option(click.Option):
    """An option with its section of the help. ``common``: whether ``--help`` shows it; `eldr-sim
    options` lists all."""

    def __init__(
        self,
        *arguments: Any,
        section: str = OWN,
        common: bool = True,
        help: Help = None,
        **named: Any,
    ) -> None:
        named["help"] = None if callable(help) else help
        super().__init__(*arguments, **named)
        self.section, self.common, self._help = section, common, help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option and its help, which is made when it is shown."""
        if callable(self._help):
            self.help = self._help()
        return super().get_help_record(ctx)


def _check_place(context: click.Context, parameter: click.Parameter, out: Path | None) -> Any:
    """Raise InputError, before anything runs, where ``out`` cannot be written."""
    if out is not None and not context.resilient_parsing:
        check_place(out, str(parameter.name))
    return out


def option(names: str, kind: Any = None, help: Help = None, **more: Any) -> Decorator:
    """Return ``click.option``. ``names``: spellings, and the parameter's name where that is
    another; ``kind``: bool for a flag, Path, choices, or a type of click's; ``more``: ``section``
    and ``common`` as of `Option`, and what ``click.option`` takes."""
    if kind is bool:
        more["is_flag"] = True
    elif kind is Path:
        more = {"type": click.Path(path_type=Path), "metavar": "DIR", **more}
    else:
        more["type"] = click.Choice(kind) if isinstance(kind, list) else kind
    return click.option(*names.split(), help=help, cls=Option, **more)


def writes(names: str, kind: Any, help: Help, **more: Any) -> Decorator:
    """Return an option that names what a command writes at its end; see `option`."""
    return option(names, kind, help, callback=_check_place, **more)


def together(*options: Decorator) -> Decorator:
    """Return a decorator that adds several options, in the order of the help."""

    def decorate(command: Any) -> Any:
        for each in reversed(options):
            command = each(command)
        return command

    return decorate


def with_pictures(given: bool) -> bool:
    """Raise InputError, before anything runs, if pictures are requested and cannot be drawn."""
    if given:
        needed("matplotlib", "plot", PLOT)
    return given


#: --plot of a command that writes a folder.
plot_option = option("--plot", bool, "Draw pictures (PNG) into --out; needs the extra [plot].",
                     section=OUTPUT,
                     callback=lambda _context, _option, given: with_pictures(given))  # fmt: skip


def output(help: str, replaced: str, *, plot: bool = False) -> Decorator:
    """Return --out and --force of a command that writes a folder and, where asked for, --plot."""
    return together(
        writes("--out", Path, help, section=OUTPUT),
        option("--force", bool, f"Replace {replaced}.", section=OUTPUT),
        *((plot_option,) if plot else ()),
    )


def model_option(help: str | None = None, default: str | None = "Qwen3-30B-A3B") -> Decorator:
    """Return the option that names a model."""
    named = {"default": default, "metavar": "NAME|PATH"}
    return option("--model", None, help, **named, shell_complete=complete(models, "file"))


def parallel_options(what: str) -> Decorator:
    """Return the options of a worker of several GPUs; ``what`` the command has of one of them."""
    spread = "Place whole experts on the GPUs of a worker instead of splitting each."
    both = "--enable-expert-parallel/--no-enable-expert-parallel"
    gpus = f"GPUs per engine; {what} are those of one GPU's part of the model."
    return together(
        option(TENSOR_PARALLEL_SIZE, int, gpus, default=1, metavar="N"),
        option(both, None, spread, default=False),
    )


jobs_option = option("--jobs", int, "Number of processes.  [default: number of CPUs]", metavar="N")
