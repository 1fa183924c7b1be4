"""Which of the things that happen at one instant happens first.

SimPy orders events by time, then by priority, then in the order in which they were scheduled. The
priorities of the model: users' processes and faults come first (SimPy's ``NORMAL``), then all that
the model does, and the steps of engines start last, by worker. So a request that arrives at the
very instant at which a step may start is in it."""

import heapq
from collections.abc import Callable, Iterable
from typing import Any

from simpy.events import NORMAL, Event

from eldr_sim.simulator.control.clock import Clock

MODEL, STEP = NORMAL + 1, NORMAL + 2


class ModelClock(Clock):
    """The environment of a run. ``settle``: called after every event."""

    def __init__(self, settle: Callable[[], None]) -> None:
        super().__init__()
        self._settle = settle

    def step(self) -> None:
        """Let the next event happen, and what it has brought."""
        super().step()
        self._settle()

    def trigger(self, event: Event, at_s: float, priority: int = MODEL) -> Event:
        """Let an event happen at exactly ``at_s``."""
        event._ok, event._value = True, None
        entry: Any = at_s, priority, next(self._eid), event
        heapq.heappush(self._queue, entry)
        return event

    def call_at(self, at_s: float, act: Callable[..., Any], *args: Any) -> Event:
        """Call ``act`` at exactly ``at_s``; returns the event."""
        event = Event(self)
        event.callbacks.append(lambda _event: act(*args))
        return self.trigger(event, at_s)

    @property
    def next_is_models(self) -> bool:
        """Whether the model does the next thing, and not a user's process or a fault."""
        return bool(self._queue) and self._queue[0][1] > NORMAL

    def postpone(self, events: Iterable[Event | None], seconds: float) -> None:
        """Let events that are scheduled happen later; never, if ``seconds`` are infinite."""
        moved = {id(event) for event in events}
        queue: list[Any] = [
            (time + seconds if id(event) in moved else time, priority, order, event)
            for time, priority, order, event in self._queue
        ]
        self._queue[:] = [entry for entry in queue if entry[0] < float("inf")]
        heapq.heapify(self._queue)
