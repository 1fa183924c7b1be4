"""Reproduction of a paper's figure: a table, a picture, and the paper's claims with our values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import csv

from eldr_sim.errors import InputError
from eldr_sim.planning.runs import Runs, Search, Summary
from eldr_sim.simulator.config import make_config

T = TypeVar("T")


@dataclass(frozen=True)
class Claim:
    """One claim of a paper, and the simulator's value.

    Parameters
    ----------
    statement
        The claim, in the paper's terms.
    low, high
        Ends of the paper's range; equal for a single figure.
    ours
        Our value; None if not available.
    unit
        Unit of all three.
    tolerance
        Largest distance of ``ours`` from the range at which the sizes agree.
    reason
        Measured reason for a difference or a missing value; may be empty.
    stated
        Whether the paper states the range; False if we read it from a picture or from words.
    """

    statement: str
    low: float
    high: float
    ours: float | None
    unit: str = "%"
    tolerance: float = 1.0
    reason: str = ""
    stated: bool = True

    @property
    def direction_agrees(self) -> bool | None:
        """Whether our value has the sign of the paper's range; None without a value."""
        if self.ours is None:
            return None
        if self.low < 0.0 < self.high:
            return self.size_agrees
        return (self.ours > 0.0) == (self.low + self.high > 0.0)

    @property
    def size_agrees(self) -> bool | None:
        """Whether our value lies in the paper's range, within the tolerance."""
        if self.ours is None:
            return None
        return self.low - self.tolerance <= self.ours <= self.high + self.tolerance


@dataclass(frozen=True)
class Reproduction:
    """One figure or table of a paper, reproduced.

    ``draw`` draws on a matplotlib figure; ``table`` holds its numbers.
    """

    name: str
    title: str
    table: pa.Table
    claims: list[Claim]
    draw: Callable[[Any], None]


class Runner:
    """Runner of configurations: each runs once, several in parallel; summaries are kept.

    Parameters
    ----------
    base
        Fields common to all runs.
    jobs
        Processes, see :func:`~eldr_sim.planning.runner.run_points`.
    progress
        Called with the share of the requested runs that have ended.
    """

    def __init__(
        self,
        base: dict[str, Any],
        jobs: int | None = None,
        progress: Callable[[float], None] = lambda _share: None,
    ) -> None:
        self.base = base
        self._runs = Runs(jobs, lambda done, asked: progress(done / asked))

    def run(self, cases: Sequence[dict[str, Any]]) -> list[Summary]:
        """Return the summary of each case (fields that override the base), in order."""
        return self._runs.summaries([make_config(self.base | case) for case in cases])

    def search(self, search: Search[T]) -> T:
        """Run a search to its end; its configurations are whole, without the base."""
        return self._runs.together([search])[0]


def percent(value: float, reference: float) -> float:
    """Return the difference of ``value`` from ``reference``, %."""
    return 100.0 * (value / reference - 1.0)


def choose(names: tuple[str, ...], known: dict[str, Callable[[], Reproduction]]) -> list[str]:
    """Return the names of the chosen figures, or all; ``11`` means ``figure_11``.

    Raises
    ------
    InputError
        The paper has no such figure here.
    """
    chosen = []
    for name in names:
        full = f"figure_{name}" if name.isdigit() else name.lower().replace("-", "_")
        if full not in known:
            raise InputError("figure", repr(name), ", ".join(known))
        chosen.append(full)
    return chosen or list(known)


def claims_table(reproductions: list[Reproduction]) -> pa.Table:
    """Return a row per claim: the paper's value, ours, and whether they agree."""
    return pa.Table.from_pylist(
        [
            {
                "figure": reproduction.name,
                "claim": claim.statement,
                "paper_low": claim.low if claim.stated else None,
                "paper_high": claim.high if claim.stated else None,
                "ours": claim.ours,
                "unit": claim.unit,
                "direction_agrees": claim.direction_agrees,
                "size_agrees": claim.size_agrees,
                "reason": claim.reason if not claim.size_agrees else "",
            }
            for reproduction in reproductions
            for claim in reproduction.claims
        ]
    )


def write_reproduction(folder: Path, reproduction: Reproduction) -> None:
    """Write a figure's picture (PNG) and table (CSV) into a folder."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    reproduction.draw(figure)
    figure.suptitle(f"{reproduction.name.replace('_', ' ')}: {reproduction.title}", fontsize=10)
    figure.savefig(folder / f"{reproduction.name}.png", dpi=120, metadata={"Software": None})
    csv.write_csv(reproduction.table, folder / f"{reproduction.name}.csv")
