"""The control plane's clock: a SimPy environment that is a guest of the compiled loop."""

import heapq
from collections.abc import Callable
from typing import Any

import simpy
from simpy.events import NORMAL, Event

from eldr_sim.errors import ProcessError


class Clock(simpy.Environment):
    """A SimPy environment whose time is the loop's, with events at an exact time.

    The loop calls `step` when the environment's next event is due; `run` is `Simulation.run`.
    """

    def at(self, time_s: float, callback: Callable[[Event], None] | None = None) -> Event:
        """Return an event at ``time_s`` seconds, which must not be in the past.

        ``timeout(t - now)`` fires at ``now + (t - now)``, which may miss ``t`` by a rounding error;
        a step that begins exactly at ``t`` would then be on the wrong side of it. ``callback`` is
        called with the event.
        """
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
