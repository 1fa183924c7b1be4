"""What-ifs: one change at a time compared with a base run, paired over seeds."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from eldr_sim.errors import InputError
from eldr_sim.parquet import table_of
from eldr_sim.planning.compare.paired import PairedDifference, headline_of, run_paired
from eldr_sim.planning.runs.run_cache import Summary
from eldr_sim.simulator.outcome.catalogue import HEADLINE, PREFILL_HEADLINE, Headline
from eldr_sim.simulator.results import Written
from eldr_sim.simulator.setup.config import run_config
from eldr_sim.simulator.setup.config.spellings import parse_setting, parse_value

if TYPE_CHECKING:
    import pyarrow as pa

#: Metrics of a what-if.
FIGURES = (
    *HEADLINE, "slo_attainment", "request_goodput", "kv_blocks_per_worker",
    "gpu_hours_per_million_output_tokens", "cost_per_million_output_tokens",
)  # fmt: skip
#: The same where requests end with their prompts.
PREFILL_FIGURES = (*PREFILL_HEADLINE, "slo_attainment", "request_goodput", "kv_blocks_per_worker")
MARKER = "what_if.json"  #: a folder with this file holds a what-if, which ``force`` replaces
#: Fields that decide which requests a run serves; others change no arrivals, prompts or experts.
REQUEST_FIELDS = (
    "workload", "columns", "time_unit", "log_from", "log_to", "busiest", "arrivals", "length_shape",
    "input_len", "prompt_lengths", "random_range_ratio", "prefix_len", "num_prefixes",
    "domain_mix", "domain_mix_end", "trace", "routing_band", "routing", "trace_replay", "prompts",
    "request_rate", "burstiness", "load", "duration", "warmup", "num_requests", "output_len",
    "seed", "sessions", "max_active_sessions", "turns", "calls_per_turn", "think_time", "tool_time",
    "new_tokens", "history", "sessions_file", "recorded_ttft_ms", "recorded_tpot_ms",
)  # fmt: skip

#: What is in force of them, where that is not the field's own value.
_IN_FORCE: dict[str, Callable[[run_config.RunConfig], Any]] = {
    "request_rate": lambda config: config.requests.effective_rate,
    "duration": lambda config: config.requests.duration_s,
    "warmup": lambda config: config.requests.warmup_s,
    "output_len": lambda config: config.effective_output_len,
    "sessions": lambda config: config.requests.n_sessions,
}


def _in_force(config: run_config.RunConfig, field: str) -> Any:
    return _IN_FORCE[field](config) if field in _IN_FORCE else config.value(field)


def _figures(config: run_config.RunConfig) -> tuple[str, ...]:
    return FIGURES if config.cluster.generates else PREFILL_FIGURES


@dataclass(frozen=True)
class Change:
    """A change and its effects."""

    name: str  #: the change as given, such as ``decode.gpu=h200``
    config: run_config.RunConfig  #: the changed run, under the first seed
    effects: list[PairedDifference]  #: differences from the base run, one per metric
    #: Changed fields that give other requests than the base run's: pairs then share their seed
    #: only.
    other_requests: tuple[str, ...]
    summaries: tuple[Summary, ...]  #: summary of the changed run under each seed

    def record(self) -> dict[str, Any]:
        """Return the change as plain values, ready for JSON."""
        return {
            "name": self.name,
            "config": self.config.model_dump(mode="json"),
            "other_requests": list(self.other_requests),
            "effects": [
                {"metric": e.metric, "base": e.reference_mean, "changed": e.mean, **e.record()}
                for e in self.effects
            ],
            "provenance": self.summaries[0]["provenance"],
        }


@dataclass(frozen=True, repr=False)
class WhatIf(Written):
    """Effects of changes to a base run; ``base`` holds its summary under each seed."""

    marker: ClassVar[str] = MARKER
    config: run_config.RunConfig
    base: tuple[Summary, ...]
    changes: list[Change]
    base_name: str = "base"

    def headline(self) -> Headline:
        """Return the means of the headline metrics of the base run and of each change."""
        title = f"{self.base[0]['topology']}, mean over seeds ({len(self.base)})"
        return headline_of(title, "change", self.named())

    @property
    def runs(self) -> pa.Table:
        """Metrics of every run, a row per change (``base`` for none) and seed."""
        keys = ("seed", "num_prompts", "completed", "failed", *_figures(self.config))
        rows = [
            {"change": name} | {key: summary[key] for key in keys}
            for name, summaries in self.named()
            for summary in summaries
        ]
        return table_of(rows)

    def named(self) -> list[tuple[str, tuple[Summary, ...]]]:
        """Return the names of the base run and of each change, with their summaries."""
        return [(self.base_name, self.base), *((c.name, c.summaries) for c in self.changes)]

    def record(self) -> dict[str, Any]:
        """Return base and changes as plain values, ready for JSON."""
        return {
            "config": self.config.model_dump(mode="json"),
            "base": self.base_name,
            "seeds": len(self.base),
            "changes": [change.record() for change in self.changes],
            "provenance": self.base[0]["provenance"],
            "summaries": {name: own[0] for name, own in self.named()},
        }

    def tables(self) -> dict[str, pa.Table]:
        """Return the metrics of every run."""
        return {"runs": self.runs}


def read_base(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a base run: a result folder, its ``config.json``, or YAML; raises InputError."""
    path = Path(path)
    if path.is_dir() and not (path / "config.json").exists():
        raise InputError("base", f"{path} holds no config.json", "a result of run")
    return run_config.read_config(path / "config.json" if path.is_dir() else path)


def change_fields(values: dict[str, Any], change: str) -> dict[str, Any]:
    """Return field values with a change: assignments to dot paths such as ``topology=8P12D
    policy.tau=0.2``. Raises InputError if the change is not ``FIELD=VALUE``."""
    changed = dict(values)
    try:
        parts = shlex.split(change)
    except ValueError as error:
        raise InputError("set", f"{change!r}: {error}", "FIELD=VALUE") from None
    if not parts:
        raise InputError("set", "an empty change", "FIELD=VALUE such as decode.gpu=h200")
    for part in parts:
        path, text = parse_setting(part)
        run_config.set_field(changed, path, parse_value(text, path))
    return changed


def what_if(
    base: run_config.RunConfig,
    changes: Sequence[str],
    *,
    n_seeds: int = 5,
    together: bool = False,
    jobs: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> WhatIf:
    """Compare changes of a base run with it, one by one and, if asked, ``together``; see
    `run_paired`.

    Raises InputError if a change (see `change_fields`) is not valid, has no effect, or if a run
    fails."""
    if not changes:
        raise InputError("set", "no change", "--set FIELD=VALUE, once or more")
    if len(set(changes)) < len(changes):
        raise InputError("set", "a change is given twice")
    wanted = list(changes)
    if together and len(changes) > 1:
        wanted.append(" ".join(changes))
    values = base.explicit_fields("json")
    configs = {name: run_config.make_config(change_fields(values, name)) for name in wanted}
    for name, config in configs.items():
        if config == base:
            raise InputError("set", f"{name} has no effect on the base run", "another value")
    paired = run_paired({"base": base, **configs}, n_seeds, jobs, progress)
    made = []
    for name, config in configs.items():
        other = [f for f in REQUEST_FIELDS if _in_force(config, f) != _in_force(base, f)]
        effects = paired.differences(name, "base", _figures(base))
        made.append(Change(name, config, effects, tuple(other), paired.summaries[name]))
    return WhatIf(base, paired.summaries["base"], made)


def vary(
    config: run_config.RunConfig,
    axes: Mapping[str, Sequence[Any]],
    *,
    n_seeds: int = 5,
    jobs: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> WhatIf:
    """Compare values of fields, in every combination, with the first combination.

    ``axes``: values by the dot path of their field. Raises InputError as `what_if` does, and where
    there is one combination only."""
    names = [
        " ".join(f"{path}={_typed(value)}" for path, value in zip(axes, combination, strict=True))
        for combination in product(*axes.values())
    ]
    if len(names) < 2:
        raise InputError("vary", f"{', '.join(names)}: one value", "two values or more")
    if len(set(names)) < len(names):
        raise InputError("vary", "a value is given twice", "each value once")
    base = run_config.make_config(change_fields(config.explicit_fields("json"), names[0]))
    found = what_if(base, names[1:], n_seeds=n_seeds, jobs=jobs, progress=progress)
    return replace(found, base_name=names[0])


def _typed(value: Any) -> str:
    """Return a value as ``--set`` takes it."""
    return shlex.quote(value if isinstance(value, str) else json.dumps(value))
