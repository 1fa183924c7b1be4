"""What a reproduced figure is: a table, a picture, and the paper's claims beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from eldr_sim.planning.runs import Runs, Summary
from eldr_sim.simulator.config import make_config


@dataclass(frozen=True)
class Claim:
    """One claim of a paper, and what the simulator says.

    Parameters
    ----------
    statement
        The claim, in the paper's terms.
    low, high
        Ends of the paper's range; equal for a single figure.
    ours
        Our figure; None where it could not be had.
    unit
        Of all three.
    tolerance
        How far outside the range ``ours`` may lie and still agree in size.
    reason
        Why it differs or is missing, measured; empty where it agrees.
    stated
        Whether the range is the paper's; False where the paper shows a picture or says it in
        words, and the range is how we read it.
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
        """Whether ours has the sign of the paper's range; None where there is none."""
        if self.ours is None:
            return None
        if self.low < 0.0 < self.high:
            return self.size_agrees
        return (self.ours > 0.0) == (self.low + self.high > 0.0)

    @property
    def size_agrees(self) -> bool | None:
        """Whether ours lies in the paper's range, give or take the tolerance."""
        if self.ours is None:
            return None
        return self.low - self.tolerance <= self.ours <= self.high + self.tolerance


@dataclass(frozen=True)
class Reproduction:
    """One figure or table of a paper, reproduced.

    ``draw`` paints on a matplotlib figure; ``table`` holds the numbers behind it.
    """

    name: str
    title: str
    table: pa.Table
    claims: list[Claim]
    draw: Callable[[Any], None]


class Runner:
    """Runs configurations once each, several side by side, and keeps their summaries.

    Parameters
    ----------
    base
        Fields common to all runs.
    jobs
        Processes, see :func:`~eldr_sim.planning.runner.run_points`.
    progress
        Called with the share of the runs asked for so far that are done.
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
        """Return the summary of each case (fields that differ from the base), in order."""
        return self._runs.summaries([make_config(self.base | case) for case in cases])


def percent(value: float, reference: float) -> float:
    """Return how much ``value`` differs from ``reference``, %."""
    return 100.0 * (value / reference - 1.0)
