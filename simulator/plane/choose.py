"""What the compiled loop does with routers: it applies their rules (`policies.rule.Rule`), given
once for each class of requests that a router treats alike, calls their policies' compiled decisions
(`policies.compiled`) or calls Python each time, and holds requests."""

from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Bools, Floats, Int32s, Ints, Records
from eldr_sim.policies.compiled import UNPREPARED
from eldr_sim.simulator.plane.compiled import ask, compiled, decide
from eldr_sim.simulator.plane.kv.kv_manager import Engines
from eldr_sim.simulator.plane.scheduler.engine import publish_signals

#: What a router answers besides a worker's number: look at its rules again; the same, but
#: their arrays are others now, so return; it has failed, so return; hold the request.
LOOK, RETURN, FAIL, HOLD = np.int64(-1), np.int64(-2), np.int64(-3), np.int64(-4)


class Router(NamedTuple):
    """What the loop knows of a router; see `router.PolicyRouter`."""

    loads: Ints  #: ``[workers]``, all of them: requests in flight, as routers know
    signals: Records  #: ``SIGNALS [workers]``, as old as ``CLOCK.signals_s``
    healthy: Bools  #: ``[workers]``: may be chosen, as routers know
    record: Records  #: ``ROUTER [1]``
    class_of: Int32s  #: ``[requests]``: requests of a class have one rule; -1: ask
    rule_of: Int32s  #: ``[classes]``: -1 while unknown
    home_of: Int32s  #: ``[classes]``: the worker that keeps them, or -1,
    factor_of: Floats  #: ``[classes]``: up to so many times the mean load
    rules: Records  #: ``RULE [rules]``
    members: Int32s  #: ``[rules, its workers]``
    weights: Floats  #: ``[rules, COLUMNS]``
    sent: Ints  #: ``[rules, workers]``: requests since its signals were published


@compiled()
def publish(engines: Engines, router: Router) -> None:
    """Let the engines of a router's workers publish their signals."""
    own = router.record[0]
    publish_signals(engines, own.first_worker, own.n_workers, router.signals)


@compiled()
def choose(
    clock: Any, engines: Engines, routers: Any, r: int, request: int, reported: Any
) -> Any:  # fmt: skip
    """Return the worker that a router chooses, HOLD, RETURN or FAIL."""
    router = routers[r]
    while True:
        kind = router.class_of[request]
        if router.record[0].choose:
            worker = _decided(clock, engines, router, request, reported)
            if worker != UNPREPARED:
                return worker
            answer = ask(engines.settings[0].decide, r, request)
            if answer != LOOK:
                return int(answer)
            continue
        rule = router.rule_of[kind] if kind >= 0 else np.int32(-1)
        if rule >= 0:
            home = router.home_of[kind]
            if home >= 0 and _keeps(router, home, router.factor_of[kind]):
                return int(home)
            if router.rules[rule].signals:
                _refresh(clock, engines, router, rule)
            return _pick(router, rule)
        if engines.settings[0].signal_interval_s == 0.0:
            publish(engines, router)
            clock[0].signals_s = clock[0].now
        answer = ask(engines.settings[0].decide, r, request)
        if answer != LOOK:
            return int(answer)


@compiled()
def _decided(clock: Any, engines: Engines, router: Router, request: int, reported: Any) -> Any:
    """Return the worker that a policy's compiled code chooses, HOLD or UNPREPARED."""
    own, requests = router.record[0], engines.requests
    while own.heard < clock[0].n_reported:
        gone, w = reported[own.heard, 0], reported[own.heard, 1] - own.first_worker
        own.heard += 1
        if own.forget and 0 <= w < own.n_workers:
            tokens, kind = requests[gone].prompt_len, np.int64(router.class_of[gone])
            decide(own.forget, own.books, kind, tokens, np.int64(w))
    kind, tokens = np.int64(router.class_of[request]), requests[request].prompt_len
    worker = decide(own.choose, own.books, kind, tokens, clock[0].now)
    if worker >= 0:
        return worker + own.first_worker
    return worker if worker == UNPREPARED else HOLD


@compiled()
def _keeps(router: Router, home: int, factor: float) -> Any:
    """Whether a worker keeps a request, as `StickyRule.pick` has it."""
    if not router.healthy[home]:
        return False
    own, total = router.record[0], np.int64(1)
    for worker in range(own.first_worker, own.first_worker + own.n_workers):
        total += router.loads[worker]
    return router.loads[home] <= factor * total / own.n_workers


@compiled()
def _refresh(clock: Any, engines: Engines, router: Router, rule: int) -> None:
    """Let a rule see what engines publish, and count anew what it has sent since."""
    record = router.rules[rule]
    if engines.settings[0].signal_interval_s == 0.0 and record.seen_s != clock[0].now:
        publish(engines, router)
        clock[0].signals_s = clock[0].now
    if record.seen_s != clock[0].signals_s:
        record.seen_s = clock[0].signals_s
        router.sent[rule] = 0


@compiled()
def _score(router: Router, rule: int, worker: int) -> Any:
    """Return a worker's weighted sum; additions as in `Rule.pick`, for the same last bit."""
    weight = router.weights[rule]
    total = weight[0] * router.loads[worker]
    if router.rules[rule].signals:
        signals = router.signals[worker]
        known = weight[2] * signals.waiting + weight[3] * signals.running
        known += weight[4] * signals.waiting_tokens
        known += weight[5] * signals.running_tokens
        known += weight[6] * signals.kv_usage
        total = total + weight[1] * router.sent[rule, worker] + known
    return total


@compiled()
def _pick(router: Router, rule: int) -> Any:
    """Return the worker that a rule chooses, as `Rule.pick` does."""
    record = router.rules[rule]
    best, place, least = -1, record.turn, 0.0
    for _ in range(record.size):
        worker = router.members[rule, place]
        if router.healthy[worker]:
            score = _score(router, rule, worker)
            if best < 0 or score < least:
                best, least = place, score
        place += 1
        if place == record.size:
            place = 0
    if best < 0:
        return _stand_in(router)
    if record.in_turn:
        record.turn = best + 1 if best + 1 < record.size else 0
    chosen = int(router.members[rule, best])
    router.sent[rule, chosen] += 1
    return chosen


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
    """Put a request behind the others that a router holds, or behind those no shorter."""
    held, before = router.record[0], router.record[0].tail
    if held.n == 0:
        before = -1
    elif held.longest_first and requests[request].prompt_len > requests[before].prompt_len:
        before, at = np.int64(-1), held.head
        while requests[at].prompt_len >= requests[request].prompt_len:
            before, at = at, requests[at].next
    behind = held.head if before < 0 else requests[before].next
    if held.n == 0 or before == held.tail:
        behind, held.tail = np.int64(-1), request
    requests[request].next = behind
    if before < 0:
        held.head = request
    else:
        requests[before].next = request
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
    """Let a router decide again on all that it holds."""
    router.record[0].to_ask = router.record[0].n
