"""What the shell completes: names of policies, models, GPUs, traces and workloads, and files.

Each source imports its names when the shell asks for them, and none needs the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    """Return a completer of names, in any case of letters.

    ``names``: called for the names; ``paths``: which paths may be given instead; None for none;
    ``listed``: whether the option takes a list with commas, of which the last part is completed.
    """

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


def policies(decision: str) -> Callable[[], Iterable[str]]:
    """Return a source of the built-in policies of a decision."""

    def names() -> Iterable[str]:
        from eldr_sim.policies.choice import BUILT_IN

        return BUILT_IN[decision]

    return names


def models() -> Iterable[str]:
    """Return the names of the known models."""
    from eldr_sim.kernel_profiles.models import list_models

    return list_models()


def front_ends() -> Iterable[str]:
    """Return the names of the CPUs whose front end ships with the package."""
    from eldr_sim.kernel_profiles.kernels.front_end import list_front_ends

    return list_front_ends()


def presets() -> Iterable[str]:
    """Return the presets, with each of their models."""
    from eldr_sim.simulator.setup.presets import PRESETS

    return [f"{name}:{model}" for name, preset in PRESETS.items() for model in preset.models]


def gpus() -> Iterable[str]:
    """Return the names of the known GPUs."""
    from eldr_sim.kernel_profiles.gpus import list_gpus

    return list_gpus()


def traces() -> Iterable[str]:
    """Return the names of the embedded routing traces."""
    from eldr_sim.traces.routing.manifest import builtin_traces

    return builtin_traces()


def workloads() -> Iterable[str]:
    """Return the named workloads."""
    from eldr_sim.simulator.setup.config import WORKLOADS

    return WORKLOADS
