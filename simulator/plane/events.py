"""The event queue of the compiled loop: a binary heap of ``state.EVENT`` records; at one time in
the order of scheduling, the starts of steps last."""

from collections.abc import Collection
from typing import Any

import numpy as np

from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.state import ARRIVAL, BOUNDARY, STEP_ORDER, STEP_START


@compiled()
def _move(events: Any, i: int, j: int) -> None:
    """Move event ``j`` to place ``i``, field by field: a whole record goes byte by byte."""
    to, event = events[i], events[j]
    to.time, to.order, to.kind, to.subject = event.time, event.order, event.kind, event.subject


@compiled()
def _insert(clock: Any, events: Any, time: float, order: int, kind: int, subject: int) -> None:
    i = clock[0].n_events
    clock[0].n_events += 1
    while i > 0:
        above = (i - 1) >> 1
        if events[above].time < time or (
            events[above].time == time and events[above].order < order
        ):
            break
        _move(events, i, above)
        i = above
    events[i].time = time
    events[i].order = order
    events[i].kind = kind
    events[i].subject = subject


@compiled()
def schedule(clock: Any, events: Any, time: float, kind: int, subject: int) -> None:
    """Schedule an event at ``time`` seconds, behind those of the same time."""
    clock[0].order += 1
    _insert(clock, events, time, clock[0].order, kind, subject)


@compiled()
def schedule_step(clock: Any, events: Any, workers: Any, w: int) -> None:
    """Schedule the start of the next step of worker ``w``'s group, unless that has been done."""
    leader = workers[w].leader
    if not workers[leader].step_due:
        workers[leader].step_due = True
        _insert(clock, events, workers[w].next_start, STEP_ORDER + leader, STEP_START, leader)


@compiled()
def drop_first(clock: Any, events: Any) -> None:
    """Take the first event out of the queue."""
    clock[0].n_events -= 1
    n = clock[0].n_events
    time, order = events[n].time, events[n].order
    i = 0
    while True:
        below = 2 * i + 1
        if below >= n:
            break
        if below + 1 < n and (
            events[below + 1].time < events[below].time
            or (
                events[below + 1].time == events[below].time
                and events[below + 1].order < events[below].order
            )
        ):
            below += 1
        if time < events[below].time or (
            time == events[below].time and order < events[below].order
        ):
            break
        _move(events, i, below)
        i = below
    _move(events, i, n)


@compiled()
def wake(clock: Any, events: Any, workers: Any, w: int) -> None:
    """Schedule a boundary at the end of the step in progress, or now if the worker is idle."""
    at = max(clock[0].now, workers[w].next_start)
    if at != workers[w].wake:
        workers[w].wake = at
        schedule(clock, events, at, BOUNDARY, w)


@compiled()
def leave(clock: Any, engines: Any, what: int, request: int) -> None:
    """Leave something about a request to be done when the event is over: see `loop.drain`."""
    tail = clock[0].pending_tail
    engines.pending[tail, 0], engines.pending[tail, 1] = what, request
    clock[0].pending_tail = tail + 1


@compiled()
def reschedule_earlier(clock: Any, events: Any, session: Any, s: int) -> None:
    """Let what is to arrive of session ``s``, -1: of all, do so sooner, the first of it now."""
    n, first = np.int64(clock[0].n_events), np.inf
    for i in range(n):
        event = events[i]
        if event.kind == ARRIVAL and event.subject >= 0 and (s < 0 or session[event.subject] == s):
            first = min(first, event.time)
    sooner = first - clock[0].now
    if not 0.0 < sooner < np.inf:
        return
    clock[0].n_events = 0
    for i in range(n):  # each goes to a place before it, or its own
        time, order = float(events[i].time), np.int64(events[i].order)
        kind, subject = np.int64(events[i].kind), np.int64(events[i].subject)
        if kind == ARRIVAL and subject >= 0 and (s < 0 or session[subject] == s):
            time = max(time - sooner, clock[0].now)
        _insert(clock, events, time, order, kind, subject)


# --- from outside ---


def delay(
    clock: Any, events: Any, kinds: Collection[Any], subjects: Collection[int], seconds: float
) -> None:  # fmt: skip
    """Let events of some kinds and subjects come later; never, if ``seconds`` are infinite."""
    n = int(clock["n_events"][0])
    mine = np.isin(events["kind"][:n], list(kinds)) & np.isin(events["subject"][:n], list(subjects))
    if not mine.any():
        return
    events["time"][:n][mine] += seconds
    left = events[:n][np.isfinite(events["time"][:n])]
    left.sort(order=("time", "order"))  # sorted events are a heap
    events[: len(left)] = left
    clock["n_events"] = len(left)
