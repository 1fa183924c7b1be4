"""What the shell completes: names of policies, models, GPUs, traces and workloads, and files. Each
source imports its names when the shell asks for them, and none needs the compiler."""

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Literal

import click
from click.shell_completion import CompletionItem

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete(
    names: Callable[[], Iterable[str]],
    paths: Literal["file", "dir"] | None = None,
    *,
    listed: bool = False,
) -> Completer:
    """Return a completer of names, in any case of letters. ``names``: called for the names;
    ``paths``: which paths may be given instead; None for none; ``listed``: whether the option takes
    a list with commas, of which the last part is completed."""

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


def _names(place: str) -> Callable[[], Iterable[str]]:
    """Return a source of names: a function, or what holds them, as ``module:attribute``."""

    def names() -> Iterable[str]:
        module, _, attribute = place.partition(":")
        found = getattr(import_module(f"eldr_sim.{module}"), attribute)
        named: Iterable[str] = found() if callable(found) else found
        return named

    return names


models = _names("kernel_profiles.models:list_models")
gpus = _names("kernel_profiles.gpus:list_gpus")
front_ends = _names("kernel_profiles.kernels.front_end:list_front_ends")
traces = _names("traces.routing.manifest:builtin_traces")
workloads = _names("simulator.setup.config.run_config:WORKLOADS")


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
