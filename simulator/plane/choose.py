"""What the compiled loop does with routers: asks them, or applies their rules, and holds requests.

A router whose rule is a `policies.shortlist.Shortlist` is asked once for each class of requests
that it treats alike and then applied here; any other is asked each time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_sim.simulator.plane.compiled import ask, compiled
from eldr_sim.simulator.plane.engine import Engines, publish_signals

#: What a router answers besides a worker's number: look at its shortlists again; the same, but
#: their arrays are others now, so return; it has failed, so return; hold the request.
LOOK, RETURN, FAIL, HOLD = np.int64(-1), np.int64(-2), np.int64(-3), np.int64(-4)


class Router(NamedTuple):
    """What the loop knows of a router; see `router.PolicyRouter`."""

    loads: NDArray[np.int64]  #: ``[workers]``, all of them: requests in flight, as routers know
    signals: NDArray[np.void]  #: ``SIGNALS [workers]``, as old as ``CLOCK.signals_s``
    healthy: NDArray[np.bool_]  #: ``[workers]``: may be chosen, as routers know
    record: NDArray[np.void]  #: ``ROUTER [1]``
    class_of: NDArray[np.int32]  #: ``[requests]``: requests of a class have one shortlist; -1: ask
    list_of: NDArray[np.int32]  #: ``[classes]``: shortlist of a class, -1 while unknown
    members: NDArray[np.int32]  #: ``[shortlists, its workers]``
    size: NDArray[np.int32]  #: ``[shortlists]``
    by_load: NDArray[np.bool_]  #: ``[shortlists]``: the least loaded member, else the next one
    in_turn: NDArray[np.bool_]  #: ``[shortlists]``: begin behind the member picked last
    turn: NDArray[np.int32]  #: ``[shortlists]``: where to begin


@compiled()
def publish(engines: Engines, router: Router) -> None:
    """Let the engines of a router's workers publish their signals."""
    own = router.record[0]
    publish_signals(engines, own.first_worker, own.n_workers, router.signals)


@compiled()
def choose(clock: Any, engines: Engines, routers: Any, r: int, request: int) -> Any:
    """Return the worker that a router chooses, HOLD, RETURN or FAIL."""
    router = routers[r]
    while True:
        kind = router.class_of[request]
        rule = router.list_of[kind] if kind >= 0 else np.int32(-1)
        if rule >= 0:
            return _pick(router, rule)
        if engines.settings[0].signal_interval_s == 0.0:
            publish(engines, router)
            clock[0].signals_s = clock[0].now
        answer = ask(engines.settings[0].decide, r, request)
        if answer != LOOK:
            return int(answer)


@compiled()
def _pick(router: Router, rule: int) -> Any:
    """Return the worker that a shortlist chooses, as `Shortlist.pick` does."""
    size = router.size[rule]
    best, place, least = -1, router.turn[rule], np.int64(0)
    for _ in range(size):
        worker = router.members[rule, place]
        if router.healthy[worker]:
            load = router.loads[worker]
            if best < 0 or load < least:
                best, least = place, load
            if not router.by_load[rule]:
                break
        place += 1
        if place == size:
            place = 0
    if best < 0:
        return _stand_in(router)
    if router.in_turn[rule]:
        router.turn[rule] = best + 1 if best + 1 < size else 0
    return int(router.members[rule, best])


@compiled()
def _stand_in(router: Router) -> Any:
    """Return the least loaded healthy worker, or HOLD."""
    best, own = HOLD, router.record[0]
    for worker in range(own.first_worker, own.first_worker + own.n_workers):
        if router.healthy[worker] and (best < 0 or router.loads[worker] < router.loads[best]):
            best = np.int64(worker)
    return best


@compiled()
def hold(router: Router, requests: Any, request: int) -> None:
    """Put a request behind the others that a router holds."""
    held = router.record[0]
    requests[request].next = -1
    if held.n == 0:
        held.head = request
    else:
        requests[held.tail].next = request
    held.tail = request
    held.n += 1


@compiled()
def let_go(router: Router, requests: Any, request: int) -> None:
    """Take a request out of those that a router holds, if it is there."""
    held, before = router.record[0], np.int64(-1)
    at = held.head
    for place in range(held.n):
        behind = requests[at].next
        if at == request:
            if before < 0:
                held.head = behind
            else:
                requests[before].next = behind
            if held.tail == request:
                held.tail = before
            held.n -= 1
            if place < held.to_ask:
                held.to_ask -= 1
            return
        before, at = at, behind


@compiled()
def submit(router: Router, requests: Any, request: int) -> None:
    """Send a request again, as the last of those that a router holds."""
    hold(router, requests, request)
    ask_again(router)


@compiled()
def ask_again(router: Router) -> None:
    """Let a router be asked once more about all that it holds."""
    router.record[0].to_ask = router.record[0].n
