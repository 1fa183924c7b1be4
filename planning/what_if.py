"""One change at a time against a base run, paired over seeds."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from eldr_sim.errors import InputError
from eldr_sim.planning.compare import METRICS, paired_percent
from eldr_sim.planning.tasks import Evaluator, Runs, Summary, run_here
from eldr_sim.planning.trial import with_seed
from eldr_sim.simulator.config import RunConfig, make_config, read_config, set_field

#: Figures told beside those of a comparison.
FIGURES = (
    *METRICS,
    "slo_attainment",
    "gpu_hours_per_million_output_tokens",
    "cost_per_million_output_tokens",
)
#: Fields that say which requests a run serves, and what they come to. Others leave arrivals,
#: prompts and experts alone.
REQUEST_FIELDS = {
    "workload": "workload",
    "domain_mix": "domain_mix",
    "trace": "trace",
    "trace_replay": "trace_replay",
    "prompts": "prompts",
    "request_rate": "effective_rate",
    "burstiness": "burstiness",
    "duration": "duration",
    "warmup": "warmup_s",
    "num_requests": "num_requests",
    "output_len": "effective_output_len",
    "seed": "seed",
}


@dataclass(frozen=True)
class Effect:
    """What a change does to one figure.

    ``base`` and ``changed`` are means over seeds, None where a run has no such figure; ``percent``
    is the mean of the paired differences in percent of the base, ``low`` and ``high`` the ends of
    its 95% interval (NaN for one seed).
    """

    metric: str
    base: float | None
    changed: float | None
    percent: float
    low: float
    high: float


@dataclass(frozen=True)
class Change:
    """A change and its effects.

    Attributes
    ----------
    name
        As it was given, such as ``decode.gpu=h200``.
    config
        The changed run, under the first seed.
    effects
        One a figure.
    other_requests
        Fields that make the changed run serve other requests than the base run: then pairs share
        no more than their seed.
    summaries
        Of the changed runs, seed by seed.
    """

    name: str
    config: RunConfig
    effects: list[Effect]
    other_requests: tuple[str, ...]
    summaries: tuple[Summary, ...]


@dataclass(frozen=True)
class WhatIf:
    """The base run and what each change does to it; ``base`` holds a summary a seed."""

    config: RunConfig
    base: tuple[Summary, ...]
    changes: list[Change]


def read_base(path: Path) -> dict[str, Any]:
    """Read the field values of a base run: a result folder, its ``config.json``, or YAML.

    Raises
    ------
    InputError
        If there is nothing to read.
    """
    if path.is_dir():
        path = path / "config.json"
        if not path.exists():
            raise InputError("base", f"{path.parent} holds no config.json", "a result of run")
    return read_config(path)


def change_fields(values: dict[str, Any], change: str) -> dict[str, Any]:
    """Return field values with a change such as ``policy=eldr`` or ``"topology=8P12D tau=0.2"``.

    Values are read as YAML; fields are dot paths such as ``decode.gpu``.

    Raises
    ------
    InputError
        If the change is no ``FIELD=VALUE``.
    """
    changed = dict(values)
    try:
        parts = shlex.split(change)
    except ValueError as error:
        raise InputError("set", f"{change!r}: {error}", "FIELD=VALUE") from None
    if not parts:
        raise InputError("set", "an empty change", "FIELD=VALUE such as decode.gpu=h200")
    for part in parts:
        path, equals, text = part.partition("=")
        if not (path and equals):
            raise InputError("set", repr(part), "FIELD=VALUE such as decode.gpu=h200")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        set_field(changed, path, value)
    return changed


def what_if(
    base: RunConfig,
    changes: Sequence[str],
    *,
    n_seeds: int = 5,
    together: bool = False,
    evaluate: Evaluator = run_here,
    progress: Callable[[float], None] | None = None,
) -> WhatIf:
    """Run the base and every change under the same seeds, and pair the results.

    Parameters
    ----------
    base
        The base run; its seed is the first of the seeds.
    changes
        One at a time, see :func:`change_fields`.
    n_seeds
        Seeds, at least 1; two or more give intervals.
    together
        Also make all the changes at once.
    evaluate
        Makes the runs.
    progress
        Called with the share of the work done.

    Raises
    ------
    InputError
        If a change names no field or gives a value that is not allowed, or changes nothing.
    """
    if n_seeds < 1:
        raise InputError("seeds", str(n_seeds), "1 or more")
    if not changes:
        raise InputError("set", "no change", "--set FIELD=VALUE, once or more")
    if len(set(changes)) < len(changes):
        raise InputError("set", "a change is given twice")
    wanted = list(changes)
    if together and len(changes) > 1:
        wanted.append(" ".join(changes))
    values = json.loads(base.model_dump_json())
    configs = {name: make_config(change_fields(values, name)) for name in wanted}
    for name, config in configs.items():
        if config == base:
            raise InputError("set", f"{name} is what the base run has", "another value")
    runs = Runs(evaluate)
    summaries: list[tuple[Summary, ...]] = []
    for config in (base, *configs.values()):
        asked = [with_seed(config, index) for index in range(n_seeds)]
        runs.make(asked)
        summaries.append(tuple(runs.summary(run) for run in asked))
        if progress is not None:
            progress(len(summaries) / (1 + len(configs)))
    ours = summaries[0]
    return WhatIf(
        base,
        ours,
        [
            Change(
                name,
                config,
                [_effect(metric, ours, theirs) for metric in FIGURES],
                tuple(
                    field
                    for field, value in REQUEST_FIELDS.items()
                    if getattr(config, value) != getattr(base, value)
                ),
                theirs,
            )
            for (name, config), theirs in zip(configs.items(), summaries[1:], strict=True)
        ],
    )


def _effect(metric: str, base: Sequence[Summary], changed: Sequence[Summary]) -> Effect:
    before, after = ([summary[metric] for summary in runs] for runs in (base, changed))
    return Effect(metric, _mean(before), _mean(after), *paired_percent(after, before))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if len(known) == len(values) else None


def to_record(found: WhatIf) -> dict[str, Any]:
    """Return the differences as plain values, ready for JSON."""
    return {
        "config": found.config.model_dump(mode="json"),
        "seeds": len(found.base),
        "changes": [
            {
                "name": change.name,
                "config": change.config.model_dump(mode="json"),
                "other_requests": list(change.other_requests),
                "effects": [
                    {
                        key: None if isinstance(value, float) and math.isnan(value) else value
                        for key, value in asdict(effect).items()
                    }
                    for effect in change.effects
                ],
                "provenance": change.summaries[0]["provenance"],
            }
            for change in found.changes
        ],
        "provenance": found.base[0]["provenance"],
    }


def runs_table(found: WhatIf) -> pa.Table:
    """Return a row a run: the change (``base`` for none), the seed, and every figure."""
    keys = ("seed", "num_prompts", "completed", "failed", *FIGURES)
    named = [("base", found.base), *((c.name, c.summaries) for c in found.changes)]
    return pa.Table.from_pylist(
        [
            {"change": name} | {key: summary[key] for key in keys}
            for name, summaries in named
            for summary in summaries
        ]
    )
