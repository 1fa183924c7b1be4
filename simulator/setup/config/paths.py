"""Paths in recorded configurations: relative to the folder that keeps the record, which can then be
run again from any folder, and moves together with the files that it names."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eldr_sim.policies.choice import DECISION_OF, parse

#: Fields that may be paths, or hold one as the policy's parameter ``artifact`` is.
_FIELDS = ("tables", "workload", "trace", "model", "gpu", "frontend", "artifact", "events",
           "acceptance", "load")  # fmt: skip


def portable(record: Mapping[str, Any], folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a record with paths in ``config`` from ``folder``, as ``./`` or ``../``."""

    def from_folder(field: str, text: str) -> str:
        if not _is_path(field, text):
            return text
        path = Path(os.path.relpath(text, folder)).as_posix()
        return path if path.startswith("../") else f"./{path}"

    return {**record, "config": _changed(record["config"], from_folder)}


def resolved(values: Mapping[str, Any], folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the fields of a record in a folder, with its relative paths made absolute."""

    def absolute(_: str, text: str) -> str:
        return os.path.abspath(Path(folder, text)) if text.startswith(("./", "../")) else text

    return _changed(values, absolute)


def _is_path(field: str, text: str) -> bool:
    """Say whether a field's value is a path; names win over paths, as where they are read."""
    if field in ("tables", "artifact", "events"):
        return True
    return text.lower() not in {name.lower() for name in _names(field)} and Path(text).exists()


def known_names() -> set[str]:
    """Return the names that win over paths, of all fields."""
    return {name for field in _FIELDS for name in _names(field)}


def _names(field: str) -> list[str]:
    from eldr_sim.kernel_profiles.acceptance import list_acceptances
    from eldr_sim.kernel_profiles.gpus import list_gpus
    from eldr_sim.kernel_profiles.kernels.front_end import NO_FRONT_END, list_front_ends
    from eldr_sim.kernel_profiles.models import list_models
    from eldr_sim.simulator.setup.config.requests import WORKLOADS
    from eldr_sim.traces.routing.manifest import builtin_traces

    sources: dict[str, Callable[[], list[str]]] = {
        "workload": lambda: list(WORKLOADS),
        "trace": builtin_traces,
        "model": list_models,
        "gpu": list_gpus,
        "frontend": lambda: [NO_FRONT_END, *list_front_ends()],
        "acceptance": list_acceptances,
    }
    return sources.get(field, list)()


def _changed(values: Mapping[str, Any], change: Callable[[str, str], str]) -> dict[str, Any]:
    """Return field values with ``change(field, text)`` in the place of each that may be a path."""
    changed = dict(values)
    for field in _FIELDS:
        if isinstance(text := changed.get(field), str):
            changed[field] = change(field, text)
    for name in ("prefill", "decode"):
        if isinstance(inner := changed.get(name), dict):
            changed[name] = _changed(inner, change)
    if isinstance(pools := changed.get("topology"), dict):
        changed["topology"] = {name: _changed(pool, change) for name, pool in pools.items()}
    for field in DECISION_OF.keys() & changed.keys():
        if isinstance(word := changed[field], str) and ".py:" in word:
            file, colon, rest = word.partition(":")
            changed[field] = f"{change('events', file)}{colon}{rest}"
    if isinstance(policy := changed.get("policy"), str | dict):
        name, given = parse(policy, "policy")
        if isinstance(given.get("artifact"), str):
            own = _changed(given, change)
            changed["policy"] = f"{name}:{','.join(f'{key}={own[key]}' for key in own)}"
    return changed
