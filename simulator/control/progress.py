"""Whether a run gets further: its end does not depend on the event queue being empty.

Engines' signals, an autoscaler or a user's SimPy process can keep simulated time going for ever
while no request can end, and a fault of the loop could keep it from passing at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from eldr_sim.errors import StalledError
from eldr_sim.simulator.plane import state

if TYPE_CHECKING:
    from eldr_sim.simulator.control.compiled_cluster import CompiledCluster

#: Events in a row in which no request arrives, is sent or ends and no step begins.
PATIENCE = 1 << 22
_COUNTS = ("arrived", "sent", "in_flight", "open_measured", "n_steps", "n_group_steps")


class Progress:
    """Counts the events of a cluster's loop since a request or an engine last got further."""

    def __init__(self) -> None:
        self._seen: tuple[int, ...] = ()
        self._since_s, self._n_events = 0.0, 0

    def check(self, cluster: CompiledCluster, n_events: int, until: float) -> None:
        """Raise StalledError where nothing has got further for `PATIENCE` events. ``n_events``: how
        many have happened at most since the last call; ``until``: when the run ends anyway, s; then
        only a time that does not pass is a fault."""
        clock = cluster.arrays.clock[0]
        seen = tuple(int(clock[name]) for name in _COUNTS)
        if seen != self._seen or self._n_events == 0:
            self._seen, self._since_s, self._n_events = seen, float(clock["now"]), 1
            return
        self._n_events += n_events
        stands = float(clock["now"]) == self._since_s
        if self._n_events <= PATIENCE or (until < np.inf and not stands):
            return
        if stands or _open(cluster):
            raise StalledError(
                f"no progress since {self._since_s:.3f} s of simulated time, for "
                f"{self._n_events:,} events, at {left_open(cluster)}; a policy, a SimPy "
                "process or eldr-sim is at fault"
            )


def _open(cluster: CompiledCluster) -> int:
    arrived = cluster.arrays.engines.sessions.order[: int(cluster.arrays.clock["arrived"][0])]
    return int((cluster.requests["outcome"][arrived] == state.OPEN).sum())


def left_open(cluster: CompiledCluster) -> str:
    """Say what time it is, how many requests are open, and where they are."""
    clock, workers = cluster.arrays.clock[0], cluster.arrays.engines.workers
    held = sum(int(router.arrays.record["n"][0]) for router in cluster.routers)
    running = sum(int(workers[name].sum()) for name in ("batch", "prefilling", "leaving"))
    return (
        f"{clock['now']:.3f} s with {_open(cluster)} requests open: {held} held by routers, "
        f"{int(workers['n_waiting'].sum())} waiting, {running} running"
    )
