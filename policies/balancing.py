"""The least loaded of a fixed set of workers, with ties shared out fairly."""

from __future__ import annotations

from collections.abc import Sequence

from eldr_sim.policies.base import Loads


class LeastLoaded:
    """Picks the least loaded of ``workers``; equal loads are served in turn.

    Ties go to the first tied worker after the one picked last, as nginx's ``least_conn`` tries
    equal servers in turn. Taking the lowest index instead would pile an idle cluster's requests
    on worker 0.

    Parameters
    ----------
    workers
        Indices to choose from, at least one.
    """

    __slots__ = ("_next", "workers")

    def __init__(self, workers: Sequence[int]) -> None:
        self.workers = tuple(workers)
        self._next = 0

    def pick(self, loads: Loads) -> int:
        """Return the chosen worker's index into ``loads``."""
        everyone = loads.tolist()
        order = self.workers[self._next :] + self.workers[: self._next]
        turn = [everyone[worker] for worker in order]
        chosen = turn.index(min(turn))
        self._next = (self._next + chosen + 1) % len(order)
        return order[chosen]
