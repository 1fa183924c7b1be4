"""Reproduction of a paper's figure: a table, a picture, and the paper's claims with our values."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
from pyarrow import csv

from eldr_sim.charts import write_picture
from eldr_sim.errors import InputError
from eldr_sim.kinds import Progress, no_progress
from eldr_sim.parquet import table_of
from eldr_sim.planning.runs.journal import Journal
from eldr_sim.planning.runs.run_cache import RunCache, Search, Summary
from eldr_sim.planning.slo import Interval, paired_percent
from eldr_sim.simulator.setup.config.run_config import make_config

T = TypeVar("T")
K = TypeVar("K")
Made: TypeAlias = dict[K, list[Summary]]
Row: TypeAlias = Mapping[str, Any]

#: The value of a unit that means no effect; in others a value has no direction of its own.
_NEUTRAL = {"%": 0.0, "points": 0.0, "x": 1.0}
#: Distances at which sizes agree in spite of more than a fifth of the effect: the scatter of p99
#: between repeated runs (studies/eldr_measured), and the digits that ratios are printed with.
_SCATTER = {"%": 3.0, "points": 3.0, "x": 0.06}


@dataclass(frozen=True)
class Claim:
    """One claim of a paper, and the simulator's value."""

    statement: str  #: the claim, in the paper's terms
    #: ``low``, ``high``: ends of the paper's range; equal for a single figure.
    low: float
    high: float
    ours: float | None  #: our value; None if not available
    unit: str = "%"  #: unit of all three
    tolerance: float = 1.0  #: largest distance of ``ours`` from the range at which the sizes agree;
    #: no more of it counts than :attr:`size` says
    reason: str = ""  #: measured reason for a difference or a missing value; may be empty
    #: Whether the paper states the range; False if we read it from a picture or from words.
    stated: bool = True
    #: The value of no effect, on either side of which a direction lies: by default 0 of a change
    #: (%, points) and 1 of a ratio (x). None: the claim has no direction (a count, a time, a share,
    #: or a figure that lies on one side by construction).
    neutral: float | Literal["by unit"] | None = "by unit"
    #: Whether the figure went into the simulator: an input is no claim, and has no verdict.
    given: bool = False
    interval: tuple[float, ...] | None = None  #: ends of the 95% interval of ``ours``; may be NaN
    #: Whether the claim is about how an effect changes with a setting. Its size judges it: a trend
    #: of the right sign and another size does not agree in direction.
    trend: bool = False

    @property
    def _neutral(self) -> float | None:
        return _NEUTRAL.get(self.unit) if self.neutral == "by unit" else self.neutral

    @property
    def direction(self) -> Literal["agrees", "no effect", "contradicts", "input", "-"]:
        """Whether our effect has the sign of the paper's. ``no effect``: ours is less than a tenth
        of the least that the paper claims, or its interval has the neutral value. A dash: the claim
        has no direction (no neutral value, or a range around it), no value of ours, or a trend's
        sign without its size."""
        if self.given:
            return "input"
        neutral = self._neutral
        if self.ours is None or neutral is None:
            return "-"
        low, high, ours = (value - neutral for value in (self.low, self.high, self.ours))
        if low < 0.0 < high or low == high == 0.0:
            return "-"
        ends = self.interval or (ours + neutral,) * 2
        if abs(ours) <= 0.1 * min(abs(low), abs(high)) or ends[0] <= neutral <= ends[1]:
            return "no effect"
        if (ours > 0.0) != (low + high > 0.0):
            return "contradicts"
        return "-" if self.trend and self.size == "differs" else "agrees"

    @property
    def size(self) -> Literal["agrees", "differs", "input", "-"]:
        """Whether our value lies in the paper's range, within the tolerance, of which no more
        counts than a fifth of the paper's effect or the scatter of repeated runs."""
        if self.given:
            return "input"
        if self.ours is None:
            return "-"
        neutral = self._neutral or 0.0
        effect = max(abs(self.low - neutral), abs(self.high - neutral))
        allowed = min(self.tolerance, max(0.2 * effect, _SCATTER.get(self.unit, 0.0)))
        within = self.low - allowed <= self.ours <= self.high + allowed
        return "agrees" if within else "differs"


@dataclass(frozen=True)
class Reproduction:
    """One figure or table of a paper: ``rows`` hold its numbers, ``draw`` draws on a figure."""

    name: str
    title: str
    rows: Sequence[Row] | pa.Table
    claims: Sequence[Claim]
    draw: Callable[[Any], None]

    @property
    def table(self) -> pa.Table:
        """The rows."""
        rows = self.rows
        return rows if isinstance(rows, pa.Table) else table_of(list(rows))


class Runner:
    """Runner of configurations: each runs once, ``jobs`` in parallel (`runner.run_points`);
    summaries are kept. ``base``: fields common to all; ``progress``: told the share of requested
    runs ended."""

    def __init__(
        self, base: dict[str, Any], jobs: int | None = None, progress: Progress = no_progress
    ) -> None:
        self.base = base
        self._runs = RunCache(jobs, lambda done, asked: progress(done / asked))

    def keep(self, journal: Journal | None) -> None:
        """Keep the runs that end in a journal, and take those that it has."""
        self._runs.journal = journal

    def expect(self, runs: int) -> None:
        """Set the number of runs that all figures take, for the progress."""
        self._runs.expected = runs

    def run(self, cases: Sequence[dict[str, Any]]) -> list[Summary]:
        """Return the summary of each case (fields that override the base), in order."""
        return self._runs.summaries([make_config(self.base | case) for case in cases])

    def groups(self, cases: Mapping[K, Sequence[dict[str, Any]]]) -> Made[K]:
        """Run groups of cases side by side; returns their summaries, in order."""
        found = iter(self.run([case for group in cases.values() for case in group]))
        return {name: [next(found) for _ in group] for name, group in cases.items()}

    def paired(self, cases: Mapping[K, dict[str, Any]], seeds: Sequence[int]) -> Made[K]:
        """Run each case under every seed; returns its summaries in their order."""
        return self.groups({key: [c | {"seed": s} for s in seeds] for key, c in cases.items()})

    def search(self, search: Search[T]) -> T:
        """Run a search to its end; its configurations are whole, without the base."""
        return self._runs.together([search])[0]


def write_requests(
    path: Path, at_ms: Iterable[int], prompts: Iterable[int], outputs: Iterable[int]
) -> str:
    """Write a request log, a line a request; returns its path."""
    names = ("timestamp_ms", "input_length", "output_length")
    rows = (dict(zip(names, row, strict=True)) for row in zip(at_ms, prompts, outputs, strict=True))
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def row_of(rows: Iterable[Row], **wanted: Any) -> Row:
    """Return the one row with these values."""
    (row,) = (row for row in rows if wanted.items() <= row.items())
    return row


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return items by what ``key`` says of them, in order of appearance."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def percent(value: float, reference: float) -> float:
    """Return the difference of ``value`` from ``reference``, %."""
    return 100.0 * (value / reference - 1.0)


def figure_of(run: Summary, name: str) -> float:
    """Return a figure of a run; ``group.steps`` is one of a part of its summary. None counts 0."""
    for part in name.split("."):
        run = run[part]
    return float(run or 0.0)  # type: ignore[arg-type]


def mean(runs: Sequence[Summary], name: str) -> float:
    """Return the mean of a figure over seeds."""
    return float(np.mean([figure_of(run, name) for run in runs]))


def change(ours: Sequence[Summary], theirs: Sequence[Summary], name: str) -> Interval:
    """Return the paired change of a figure, %, with its 95% interval over seeds."""
    return paired_percent([run[name] for run in ours], [run[name] for run in theirs])


def spread(name: str, found: Interval) -> dict[str, float]:
    """Return a mean and its interval as columns."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), found, strict=True))


def choose(names: tuple[str, ...], known: dict[str, Callable[[], Reproduction]]) -> list[str]:
    """Return the chosen figures, or all; raises InputError if unknown. ``11`` is ``figure_11``, and
    ``1`` all parts of it: ``figure_1a`` and ``figure_1b``."""
    chosen = []
    for name in names:
        full = f"figure_{name}" if name[:1].isdigit() else name.lower().replace("-", "_")
        found = [each for each in known if re.fullmatch(rf"{re.escape(full)}[a-z]?", each)]
        if not found:
            raise InputError("figure", repr(name), ", ".join(known))
        chosen += found
    return chosen or list(known)


def _ends(claim: Claim) -> tuple[float | None, ...]:
    """Return the ends of a claim's interval, if it has one."""
    found = claim.interval
    return (None, None) if found is None or math.isnan(found[0]) else found


def claims_table(reproductions: list[Reproduction]) -> pa.Table:
    """Return a row per claim, with verdicts, as in ``docs/claims.csv`` (`docs/render.py take`)."""
    return table_of(
        [
            {
                "figure": reproduction.name,
                "claim": claim.statement,
                "low": float(claim.low),
                "high": float(claim.high),
                "stated": "yes" if claim.stated else "no",
                "ours": claim.ours,
                **dict(zip(("ours_low", "ours_high"), _ends(claim), strict=True)),
                "unit": claim.unit,
                "neutral": "none" if claim.neutral is None else str(claim.neutral),
                "tolerance": claim.tolerance,
                "role": "input" if claim.given else "trend" if claim.trend else "claim",
                "direction": claim.direction,
                "size": claim.size,
                "reason": "" if claim.size == "agrees" else claim.reason,
            }
            for reproduction in reproductions
            for claim in reproduction.claims
        ]
    )


def write_reproduction(folder: Path, reproduction: Reproduction) -> None:
    """Write a figure's picture (PNG) and table (CSV) into a folder."""
    title = f"{reproduction.name.replace('_', ' ')}: {reproduction.title}"
    write_picture(folder / f"{reproduction.name}.png", reproduction.draw, (10.0, 4.0), title=title)
    csv.write_csv(reproduction.table, folder / f"{reproduction.name}.csv")
