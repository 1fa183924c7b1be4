"""What a reproduced figure is: a table, a picture, and the paper's claims beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from eldr_sim.simulator.config import make_config
from eldr_sim.simulator.run import simulate


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


@dataclass
class Runner:
    """Runs configurations once each, on several processes, and keeps their summaries.

    Parameters
    ----------
    base
        Fields common to all runs.
    processes
        Worker processes; 1 runs in this one.
    progress
        Called with the share of the current batch of runs that is done.
    """

    base: dict[str, Any]
    processes: int = 1
    progress: Callable[[float], None] = lambda _share: None
    _summaries: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the summary of each case (fields that differ from the base), in order."""
        configs = [self.base | case for case in cases]
        keys = [repr(sorted(config.items(), key=lambda item: item[0])) for config in configs]
        todo = {key: c for key, c in zip(keys, configs, strict=True) if key not in self._summaries}
        if self.processes > 1 and len(todo) > 1:
            with ProcessPoolExecutor(self.processes) as pool:
                futures = {pool.submit(_summary, config): key for key, config in todo.items()}
                try:
                    for done, future in enumerate(as_completed(futures), 1):
                        self._summaries[futures[future]] = future.result()
                        self.progress(done / len(todo))
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        else:
            for done, (key, config) in enumerate(todo.items(), 1):
                self._summaries[key] = _summary(config)
                self.progress(done / len(todo))
        return [self._summaries[key] for key in keys]


def _summary(config: dict[str, Any]) -> dict[str, Any]:
    return simulate(make_config(config)).summary


def percent(value: float, reference: float) -> float:
    """Return how much ``value`` differs from ``reference``, %."""
    return 100.0 * (value / reference - 1.0)
