"""The environment of SimPy processes, on the simulation's time."""

import heapq
from collections.abc import Callable
from typing import Any

import simpy
from simpy.events import NORMAL, Event

from eldr_sim.errors import ProcessError


class Clock(simpy.Environment):
    """A SimPy environment on the loop's time, which calls `step`."""

    def at(self, time_s: float, callback: Callable[[Event], None] | None = None) -> Event:
        """Return an event at exactly ``time_s``, not in the past, which calls ``callback``:
        ``timeout(t - now)`` may miss ``t`` by a rounding error, on the wrong side of a step."""
        event = Event(self)
        event._ok = True
        event._value = None
        if callback is not None:
            event.callbacks.append(callback)
        heapq.heappush(self._queue, (time_s, NORMAL, next(self._eid), event))
        return event

    def move(self, time_s: float) -> None:
        """Let it be as late as the loop is."""
        self._now = time_s

    def step(self) -> None:
        """Let the next event happen; raises ProcessError if it is a process that failed."""
        event = self._queue[0][3] if self._queue else None
        try:
            super().step()
        except Exception:
            if isinstance(event, simpy.Process):
                # SimPy raises a copy, which not every class of errors allows.
                cause: Any = event.value
                raise ProcessError(event.name, self.now, cause) from cause
            raise

    def run(self, until: Any = None) -> None:
        """Raise RuntimeError: alone it would leave the cluster behind."""
        raise RuntimeError("the loop drives this environment: call run of the simulation")
