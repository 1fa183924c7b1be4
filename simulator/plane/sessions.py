"""Sessions in the compiled loop: requests that follow others, and which begins next.

A request that goes on with others arrives a gap after the last of them has completed; never, if one
does not. Those that go on with none arrive in their order, or, where sessions are limited, when
they may. Where lanes warm caches first, the measured window opens when that has ended; nothing is
sent when it closes, and what is in flight has a grace. Where nothing of a session is in flight for
`SESSION_IDLE_S` seconds, or nothing at all for `ALL_IDLE_S`, what waits comes sooner by the idle
time."""

from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Floats, Int32s, Ints, Records
from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.events import reschedule_earlier, schedule
from eldr_sim.simulator.plane.state import ABANDONED, ARRIVAL, COMPLETED, SESSIONS
from eldr_sim.traces.workload import Workload

#: What stands for a request in an ARRIVAL: the measured window ends, and the grace after it;
#: nothing has been in flight for long; and below that: nothing of a session.
WINDOW_ENDS, GRACE_ENDS, ALL_IDLE = np.int64(-1), np.int64(-2), np.int64(-3)
#: AgentX: seconds in which what is in flight may still complete,
GRACE_S = 30.0
#: and that lanes have nothing in flight at most: one, or all.
SESSION_IDLE_S, ALL_IDLE_S = 300.0, 10.0


class Sessions(NamedTuple):
    """Which request follows which; arrays are empty where none follows another."""

    record: Records  #: ``SESSIONS [1]``
    order: Int32s  #: ``[requests]``: the requests that have arrived, in their order
    #: ``first``, ``children``: who goes on with request ``i``: ``children[first[i]:first[i + 1]]``.
    first: Ints
    children: Int32s
    waits: Int32s  #: ``[requests]``: for so many others; -1: given up
    gap_s: Floats  #: ``[requests]``: from the end of the last of them
    session: Int32s  #: ``[requests]``
    left: Int32s  #: ``[sessions]``: requests that have not ended,
    busy: Int32s  #: ``[sessions]``: of them have come;
    idle_s: Floats  #: ``[sessions]``: or when none was left, s


def make_sessions(
    workload: Workload, window: tuple[float, float], most: int | None = None
) -> Sessions:
    """Return the sessions of a workload, none of which has begun; ``most``: active at a time."""
    n = len(workload)
    record = np.zeros(1, SESSIONS)
    record["most"], record["next"] = -1 if most is None else most, -1
    record["start"], record["end"] = window
    if workload.n_warming:
        record["n_warming"], record["lasts_s"] = workload.n_warming, window[1] - window[0]
        record["start"] = record["end"] = np.inf
    order, none = np.zeros(n, np.int32), np.zeros(0, np.int32)
    parent = workload.parent
    if parent is None and most is None:
        first, gaps = np.zeros(1, np.int64), np.zeros(0)
        return Sessions(record, order, first, none, none, gaps, none, none, none, gaps)
    parent = np.full(n, -1, np.int32) if parent is None else parent
    gap_s = np.zeros(n) if workload.gap_s is None else workload.gap_s
    children = np.argsort(parent, kind="stable")[int((parent < 0).sum()) :]
    first = np.searchsorted(parent[children], np.arange(n + 1))
    left = np.bincount(workload.session).astype(np.int32)
    return Sessions(
        record, order, first, children.astype(np.int32), (parent >= 0).astype(np.int32), gap_s,
        workload.session, left, np.zeros_like(left), np.zeros(len(left)),
    )  # fmt: skip


@compiled()
def arrive(clock: Any, events: Any, engines: Any, request: int) -> None:
    """Let a request arrive, and the next one in its turn, or the window or its grace end."""
    sessions = engines.sessions
    own = sessions.record[0]
    if request == WINDOW_ENDS:
        clock[0].open_measured -= 1
        if own.n_warming > 0:
            own.short = own.next < 0 and own.active < own.most
            own.next = -1
            schedule(clock, events, clock[0].now + GRACE_S, ARRIVAL, GRACE_ENDS)
        return
    if request == GRACE_ENDS:
        clock[0].open_measured = 0
        return
    if request <= ALL_IDLE:
        _pass_idle_time(clock, events, sessions, ALL_IDLE - request - 1)
        return
    if own.n_warming > 0 and clock[0].now >= own.end:
        return
    sessions.order[clock[0].arrived] = request
    clock[0].arrived += 1
    record = engines.requests[request]
    record.arrival_s = clock[0].now
    if sessions.waits.shape[0] > 0:
        own.busy += 1
        sessions.busy[sessions.session[request]] += 1
        measured = own.start <= clock[0].now < own.end
        clock[0].open_measured += measured - record.measured
        record.measured = measured
    if record.parent < 0:
        own.active += 1
        own.next = record.next
        _begin(clock, events, engines)


@compiled()
def _begin(clock: Any, events: Any, engines: Any) -> None:
    """Let the next request come that goes on with none, if it may."""
    own = engines.sessions.record[0]
    if own.next >= 0 and (own.most < 0 or own.active < own.most):
        at = max(clock[0].now, engines.requests[own.next].arrival_s)
        schedule(clock, events, at, ARRIVAL, own.next)
        own.next = -1


@compiled()
def go_on(clock: Any, events: Any, engines: Any, request: int) -> None:
    """Release the requests that wait for one that has ended, or give them up."""
    sessions, requests = engines.sessions, engines.requests
    if sessions.waits.shape[0] == 0:
        return
    own, s = sessions.record[0], sessions.session[request]
    own.busy -= 1
    sessions.busy[s] -= 1
    sessions.left[s] -= 1
    completed = requests[request].outcome == COMPLETED
    lost: Any = np.int64(-1)  # given up, linked by REQUEST.next, who goes on with them not yet
    at: Any = np.int64(request)
    while at >= 0:
        for i in range(sessions.first[at], sessions.first[at + 1]):
            child: Any = np.int64(sessions.children[i])
            if sessions.waits[child] < 0:
                continue
            if completed:
                sessions.waits[child] -= 1
                if sessions.waits[child] == 0:
                    if own.n_warming > 0 and child >= own.n_warming and own.end == np.inf:
                        own.start, own.end = clock[0].now, clock[0].now + own.lasts_s
                        schedule(clock, events, own.end, ARRIVAL, WINDOW_ENDS)
                    time = clock[0].now + sessions.gap_s[child]
                    schedule(clock, events, time, ARRIVAL, child)
                continue
            sessions.waits[child] = -1
            sessions.left[s] -= 1
            clock[0].open_measured -= requests[child].measured
            requests[child].outcome, requests[child].next = ABANDONED, lost
            lost = child
        at = lost
        if at >= 0:
            lost = requests[at].next
    if not completed and request < own.n_warming:
        clock[0].open_measured = 0  # nothing will be measured
    if sessions.left[s] == 0:
        own.active -= 1
        _begin(clock, events, engines)
    if own.n_warming > 0 and own.start <= clock[0].now < own.end:
        _watch_idle_time(clock, events, sessions, s)


@compiled()
def _watch_idle_time(clock: Any, events: Any, sessions: Any, s: int) -> None:
    """Look later whether a session, or all, still have nothing in flight."""
    own, now = sessions.record[0], clock[0].now
    if sessions.busy[s] == 0 and sessions.left[s] > 0:
        sessions.idle_s[s] = now
        schedule(clock, events, now + SESSION_IDLE_S, ARRIVAL, ALL_IDLE - 1 - s)
    if own.busy == 0:
        own.idle_s = now
        schedule(clock, events, now + ALL_IDLE_S, ARRIVAL, ALL_IDLE)


@compiled()
def _pass_idle_time(clock: Any, events: Any, sessions: Any, s: int) -> None:
    """Let what waits of session ``s``, -1: of all, come now, unless something has since."""
    own, now = sessions.record[0], clock[0].now
    if s < 0:
        idle = own.busy == 0 and now == own.idle_s + ALL_IDLE_S
    else:
        idle = sessions.busy[s] == 0 and now == sessions.idle_s[s] + SESSION_IDLE_S
    if idle:
        reschedule_earlier(clock, events, sessions.session, s)
