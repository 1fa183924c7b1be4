"""The SimPy clock, with events at an exact time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import simpy
from simpy.events import NORMAL, Event


class Clock(simpy.Environment):
    """A SimPy environment that can schedule at an absolute time.

    ``timeout(t - now)`` fires at ``now + (t - now)``, which may miss ``t`` by a rounding error;
    a decode step that begins exactly at ``t`` would then be on the wrong side of it.
    """

    def at(self, time_s: float, callback: Callable[[Event], None]) -> Event:
        """Call ``callback`` at ``time_s`` seconds, which must not be in the past."""
        event = Event(self)
        event._ok = True
        event._value = None
        event.callbacks.append(callback)
        heapq.heappush(self._queue, (time_s, NORMAL, next(self._eid), event))
        return event
