"""The compiled event loop: everything that happens between two decisions of a router.

The life of a request, top to bottom::

    ARRIVAL          it waits at the client while --max-concurrency requests are in flight,
                     then it goes to an API server, where there are any         `_enter`
    READ             the server has read it, and tokenises it                   `front_end`
    TOKENIZED        a prefill router picks its prefill worker                  `drain`
    BOUNDARY         the engine admits it and plans its chunks                  `engine.boundary`
    STEP_START       its prompt is computed, step by step                       `executor.run_step`
    BOUNDARY         the prompt is computed: hand it over, or end it            `engine.boundary`
    PROMPT_END       the same, when the last of several stages has it done  `engine.leave_stages`
    DISPATCH         signature and router: the decode worker is picked          `drain`
    BOUNDARY         the decode worker's engine reserves its KV blocks          `engine.boundary`
    TRANSFER_START   its KV cache flows over shared links                       `network.begin`
    TRANSFER_END     the prefill worker's blocks are free, the request can join `network.end`
    BOUNDARY         it joins the decode batch                                  `engine.boundary`
    STEP_START       one token a step                                           `executor.run_step`
    BOUNDARY         it has all its tokens: its blocks are free, it has ended   `drain`
    REPORT           the routers hear of it                                     `drain`

A co-located worker is picked at the arrival and keeps the request to its end; without decode
workers a request ends with its prompt. A router may hold a
request and is asked again when it hears of an end or the engines publish their signals. Engines
that share experts start their steps together (`executor`).

A router whose rule is a `policies.shortlist.Shortlist` is asked once for each
class of requests that it treats alike and then applied here; any other is asked each time.

The control plane (faults, operators, users: SimPy processes) is a guest: the time of its next event
is one float of the clock, and the loop calls when that comes, before all else of its instant.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_sim.jit import njit
from eldr_sim.simulator.plane import network
from eldr_sim.simulator.plane.compiled import ask, compiled
from eldr_sim.simulator.plane.engine import (
    PENDING_END,
    PENDING_HAND_OVER,
    Engines,
    boundary,
    leave,
    leave_stages,
    publish_signals,
    publish_tokens,
    take,
    wake,
)
from eldr_sim.simulator.plane.events import drop_first, schedule
from eldr_sim.simulator.plane.front_end import (
    PENDING_ROUTE,
    FrontEnd,
    on_collected,
    on_read,
    on_tokenized,
    send,
)
from eldr_sim.simulator.plane.kv_cache import blocks_of, release
from eldr_sim.simulator.plane.removal import give_back, remove
from eldr_sim.simulator.plane.state import (
    ARRIVAL,
    BOUNDARY,
    COLLECTED,
    COMPLETED,
    DISPATCH,
    NO_KV_ROOM,
    OVER_BUDGET,
    PROMPT_END,
    PUBLISH,
    READ,
    REPORT,
    STEP_START,
    TOKENIZED,
    TOO_LONG,
    TRANSFER_END,
    TRANSFER_START,
)
from eldr_sim.simulator.plane.steps.executor import Scratch, run_step
from eldr_sim.simulator.plane.steps.group_state import Groups
from eldr_sim.simulator.plane.steps.streamed import PromptLayers

#: What the loop asks for besides decisions of routers and of `expert_loads`: that the control plane
#: does the next thing it has to, and hears of the end of a request that it watches.
WAKE, TELL = np.int64(4), np.int64(5)
_NOTHING = np.int64(-1)  # the event of a wake
#: Why `advance` returned: nothing is left before ``until``, all measured requests have ended,
#: enough has happened for now, a log is full, a router's arrays are others now, or it has failed.
UNTIL, ENDED, PAUSED, FULL, OTHERS, FAILED = map(np.int64, range(6))
#: What a router answers besides a worker's number: look at its shortlists again; the same, but
#: their arrays are others now, so return; it has failed, so return; hold the request.
LOOK, RETURN, FAIL, HOLD = np.int64(-1), np.int64(-2), np.int64(-3), np.int64(-4)
_PREFILL_POOL, _DECODE_POOL = np.int64(0), np.int64(1)
_PENDING_DISPATCH = np.int64(2)  # beside those of the engine: the decode router decides now


class Router(NamedTuple):
    """What the loop knows of a router; see `router.PolicyRouter`."""

    loads: NDArray[np.int64]  #: ``[workers]``: requests in flight, as the router knows
    signals: NDArray[np.void]  #: ``SIGNALS [workers]``, as old as ``CLOCK.signals_s``
    healthy: NDArray[np.bool_]  #: ``[workers]``: may be chosen, as the router knows
    held: NDArray[np.void]  #: ``HELD [1]``
    class_of: NDArray[np.int32]  #: ``[requests]``: requests of a class have one shortlist; -1: ask
    list_of: NDArray[np.int32]  #: ``[classes]``: shortlist of a class, -1 while unknown
    members: NDArray[np.int32]  #: ``[shortlists, workers]``
    size: NDArray[np.int32]  #: ``[shortlists]``
    by_load: NDArray[np.bool_]  #: ``[shortlists]``: the least loaded member, else the next one
    in_turn: NDArray[np.bool_]  #: ``[shortlists]``: begin behind the member picked last
    turn: NDArray[np.int32]  #: ``[shortlists]``: where to begin


class Run(NamedTuple):
    """Everything that the loop works on."""

    clock: NDArray[np.void]  #: ``CLOCK [1]``
    events: NDArray[np.void]  #: ``EVENT [capacity]``
    engines: Engines
    routers: tuple[Router, Router]  #: prefill, decode
    net: network.Network
    #: ``[requests, 2]``: requests that have left decode workers, and these, as they were reported.
    reported: NDArray[np.int32]
    bits: NDArray[np.uint64]  #: replay windows
    masks: NDArray[np.uint64]  #: ``[workers, ranks, layers * words]``
    prompts: Any  #: `expert_union.PromptRows`
    costs: tuple[Any, Any]  #: `StepCost` of the two pools
    scratch: Scratch


class World(NamedTuple):
    """All that compiled functions work on, by reference."""

    run: Run
    groups: Groups  #: what engines share, if any do
    layers: PromptLayers  #: of prefill workers whose layers stream or lie in stages
    front: FrontEnd  #: the API servers that requests go through before a router, if any
    logs: tuple[NDArray[np.void], ...]  #: ``STEP [capacity]`` of each pool
    group_logs: tuple[NDArray[np.void], ...]  #: ``GROUP_STEP [capacity]`` likewise
    gaps: NDArray[np.void]  #: ``GAP [capacity]``


@compiled()
def _choose(
    clock: Any, engines: Engines, router: Router, decide: Any, pool: int, request: int
) -> Any:
    """Return the worker that a router chooses, HOLD, RETURN or FAIL."""
    while True:
        kind = router.class_of[request]
        rule = router.list_of[kind] if kind >= 0 else np.int32(-1)
        if rule >= 0:
            return _pick(router, rule)
        if engines.settings[0].signal_interval_s == 0.0:
            publish_signals(engines, pool, router.signals)
            clock[0].signals_s = clock[0].now
        answer = ask(decide, pool, request)
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
    best = HOLD
    for worker in range(router.loads.shape[0]):
        if router.healthy[worker] and (best < 0 or router.loads[worker] < router.loads[best]):
            best = np.int64(worker)
    return best


@compiled()
def _refusal(engines: Engines, request: int) -> Any:
    """Say why a request can never be served; 0 if it can."""
    settings, pools, record = engines.settings[0], engines.pools, engines.requests[request]
    tokens = record.prompt_len + record.output_len
    if tokens > settings.max_model_len:
        return TOO_LONG
    if pools[0].whole_prompts and record.prompt_len > pools[0].max_num_batched_tokens:
        return OVER_BUDGET
    windows = record.window_blocks
    if (
        record.prompt_len > (pools[0].n_blocks - windows) * settings.block_size
        or tokens > (pools[1].n_blocks - windows) * settings.block_size
    ):
        return NO_KV_ROOM
    return 0


@compiled()
def _end(clock: Any, engines: Engines, decide: Any, request: int, outcome: int) -> None:
    engines.requests[request].outcome = outcome
    clock[0].open_measured -= engines.requests[request].measured
    if engines.requests[request].watched:
        ask(decide, TELL, request)


@compiled()
def _hear(
    clock: Any, engines: Engines, routers: Any, reported: Any, request: int, pool: int
) -> None:
    """Let a router know that a worker has one request less."""
    record = engines.requests[request]
    if pool == 0:
        routers[0].loads[record.prefill_worker] -= 1
        _ask_again(routers[0])
        return
    routers[1].loads[record.decode_worker] -= 1
    _ask_again(routers[1])
    if engines.settings[0].listens:
        reported[clock[0].n_reported, 0] = request
        reported[clock[0].n_reported, 1] = record.decode_worker
        clock[0].n_reported += 1


@compiled()
def _report(
    clock: Any, events: Any, engines: Engines, routers: Any, reported: Any, request: int, pool: int
) -> None:
    """Let a router know, as late as the configuration says."""
    delay = engines.settings[0].report_delay_s
    if delay == 0.0:
        _hear(clock, engines, routers, reported, request, pool)
    else:
        schedule(clock, events, clock[0].now + delay, REPORT, 2 * request + pool)


@compiled()
def _hold(router: Router, requests: Any, request: int) -> None:
    """Put a request behind the others that a router holds."""
    held = router.held[0]
    requests[request].next = -1
    if held.n == 0:
        held.head = request
    else:
        requests[held.tail].next = request
    held.tail = request
    held.n += 1


@compiled()
def _let_go(router: Router, requests: Any, request: int) -> None:
    """Take a request out of those that a router holds, if it is there."""
    held, before = router.held[0], np.int64(-1)
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
def detach(
    clock: Any, events: Any, engines: Engines, routers: Any, net: Any, request: int
) -> None:  # fmt: skip
    """Take a request out of all that it waits in: routers, links, engines; its KV cache is gone.

    The routers still count it. Between two events no worker has planned a step that has not begun.
    """
    settings, record = engines.settings[0], engines.requests[request]
    for pool in range(2):
        _let_go(routers[pool], engines.requests, request)
    if record.transfer_start_s >= 0.0 and not record.kv_here:
        network.drop(clock, events, net, request, settings.egress, settings.ingress)
    source, w = record.prefill_worker, np.int64(-1)
    if record.decode_worker >= 0:
        w = engines.pools[1].first_worker + record.decode_worker
    elif source >= 0 and record.prefill_end_s < 0.0:
        w = source
    if w >= 0:
        remove(clock, events, engines, w, request)
    if source >= 0 and w != source and engines.pools[0].n_workers > 0 and not record.kv_here:
        give_back(clock, events, engines, source, request)
    for pool in range(2):
        table = engines.tables[request, pool]
        table.found = table.listed = table.private = 0


@compiled()
def submit(router: Router, requests: Any, request: int) -> None:
    """Send a request again, as the last of those that the router of its first worker holds."""
    _hold(router, requests, request)
    _ask_again(router)


@compiled()
def _ask_again(router: Router) -> None:
    """Let a router be asked once more about all that it holds."""
    router.held[0].to_ask = router.held[0].n


@compiled()
def _place(
    clock: Any, events: Any, engines: Engines, routers: Any, request: int, pool: int, worker: int
) -> None:
    """Send a request to the worker that its router has chosen."""
    routers[pool].loads[worker] += 1
    if pool == 0:
        engines.requests[request].prefill_worker = worker
    else:
        engines.requests[request].decode_worker = worker
    take(clock, events, engines, engines.pools[pool].first_worker + worker, request)


@compiled()
def _ask_held(
    clock: Any, events: Any, engines: Engines, routers: Any, decide: Any, pool: int
) -> Any:
    """Ask a router about what it holds, the first that came first; RETURN, FAIL or 0."""
    router, requests = routers[pool], engines.requests
    held = router.held[0]
    while held.to_ask > 0:
        request = held.head
        worker = _choose(clock, engines, router, decide, pool, request)
        if worker < 0 and worker != HOLD:
            return worker
        if worker == HOLD and held.in_order:
            held.to_ask = 0
            return np.int64(0)
        held.head = requests[request].next
        held.n -= 1
        held.to_ask -= 1
        if worker == HOLD:
            _hold(router, requests, request)
        else:
            _place(clock, events, engines, routers, request, pool, worker)
    return np.int64(0)


@compiled()
def _route(
    clock: Any, events: Any, engines: Engines, routers: Any, decide: Any, request: int
) -> Any:
    """Let the first router place a request or hold it; RETURN, FAIL or 0."""
    pool = _PREFILL_POOL if engines.pools[0].n_workers > 0 else _DECODE_POOL
    worker = HOLD
    if routers[pool].held[0].n == 0 or not routers[pool].held[0].in_order:
        worker = _choose(clock, engines, routers[pool], decide, pool, request)
    if worker == HOLD:
        _hold(routers[pool], engines.requests, request)
    elif worker < 0:
        return worker
    else:
        _place(clock, events, engines, routers, request, pool, worker)
    return np.int64(0)


@compiled()
def _enter(clock: Any, events: Any, engines: Engines, front: FrontEnd, decide: Any) -> None:
    """Let the client send to the API servers what it may send."""
    limit = engines.settings[0].max_concurrency
    while clock[0].sent < clock[0].arrived and (limit < 0 or clock[0].in_flight < limit):
        request = clock[0].sent
        clock[0].sent += 1
        engines.requests[request].sent_s = clock[0].now
        reason = _refusal(engines, request)
        if reason:
            _end(clock, engines, decide, request, reason)
        else:
            clock[0].in_flight += 1
            send(clock, events, front, request)


@compiled()
def drain(
    clock: Any, events: Any, engines: Engines, routers: Any, reported: Any, decide: Any
) -> Any:
    """Do what the last event asks for: sends, hand-overs, ends.

    Returns 0, or what a router answered instead of a worker; called again it goes on there.
    """
    settings, pools, requests = engines.settings[0], engines.pools, engines.requests
    limit = settings.max_concurrency
    while True:
        may_send = limit < 0 or clock[0].in_flight < limit
        if clock[0].sent < clock[0].arrived and may_send and not settings.front_end:
            request = clock[0].sent
            if requests[request].outcome:  # its client has not waited for so long
                clock[0].sent += 1
                continue
            requests[request].sent_s = clock[0].now
            reason = _refusal(engines, request)
            if reason:
                clock[0].sent += 1
                _end(clock, engines, decide, request, reason)
                continue
            answer = _route(clock, events, engines, routers, decide, request)
            if answer < 0:
                return answer
            clock[0].sent += 1
            clock[0].in_flight += 1
            continue
        head = clock[0].pending_head
        if head == clock[0].pending_tail:
            clock[0].pending_head = clock[0].pending_tail = 0
            for p in range(2):
                if routers[p].held[0].to_ask > 0:
                    answer = _ask_held(clock, events, engines, routers, decide, np.int64(p))
                    if answer < 0:
                        return answer
            return 0
        what, request = engines.pending[head, 0], engines.pending[head, 1]
        if what == PENDING_END:
            last = _DECODE_POOL if pools[1].n_workers > 0 else _PREFILL_POOL
            _report(clock, events, engines, routers, reported, request, last)
            clock[0].in_flight -= 1
            _end(clock, engines, decide, request, COMPLETED)
        elif what == PENDING_HAND_OVER:
            _report(clock, events, engines, routers, reported, request, _PREFILL_POOL)
            delay = settings.routing_s + settings.routing_token_s * requests[request].prompt_len
            if delay == 0.0:
                engines.pending[head, 0] = _PENDING_DISPATCH
                continue
            schedule(clock, events, clock[0].now + delay, DISPATCH, request)
        elif what == PENDING_ROUTE:
            answer = _route(clock, events, engines, routers, decide, request)
            if answer < 0:
                return answer
        else:
            worker = _choose(clock, engines, routers[1], decide, _DECODE_POOL, request)
            if worker < 0 and worker != HOLD:
                return worker
            if worker == HOLD:
                _hold(routers[1], requests, request)
            else:
                _place(clock, events, engines, routers, request, _DECODE_POOL, worker)
        clock[0].pending_head += 1


@compiled()
def _publish(clock: Any, engines: Engines, routers: Any) -> None:
    """Let the engines publish their signals, and the routers reconsider what they hold."""
    clock[0].signals_s = clock[0].now
    for pool in range(2):
        publish_signals(engines, np.int64(pool), routers[pool].signals)
        _ask_again(routers[pool])


@compiled()
def _start_transfer(clock: Any, events: Any, engines: Engines, net: Any, request: int) -> None:
    """Let the bytes flow.

    NIXL moves whole blocks, one descriptor a block and KV tensor. The GPUs of a worker move their
    parts at the same time, each over its own NIC: one of them stands for all.
    """
    settings, record = engines.settings[0], engines.requests[request]
    context = record.prompt_len + record.generated
    blocks = blocks_of(context - record.decode_cached_tokens, settings.block_size)
    n_bytes = blocks * settings.block_size * settings.kv_bytes_per_token
    egress = engines.pools[1].n_workers + record.prefill_worker
    network.begin(
        clock, events, net, egress, record.decode_worker, n_bytes, request, settings.egress,
        settings.ingress,
    )  # fmt: skip


@compiled()
def _end_transfers(clock: Any, events: Any, engines: Engines, net: Any) -> None:
    """Free the prefill workers' blocks of the transfers that end now; the requests can join."""
    settings = engines.settings[0]
    for i in range(network.end(clock, events, net, settings.egress, settings.ingress)):
        request = net.done[i]
        record = engines.requests[request]
        record.transfer_end_s = clock[0].now
        w = record.prefill_worker
        release(engines.kv, engines.tables, engines.workers, w, _PREFILL_POOL, request)
        if engines.workers[w].new_head >= 0:
            wake(clock, events, engines.workers, w)
        record.kv_here = True
        w = engines.pools[1].first_worker + record.decode_worker
        publish_tokens(engines, w, request, record.prompt_len)
        take(clock, events, engines, w, request)


@njit(_nrt=False)
def advance(world: World, until: float, n_events: int) -> Any:
    """Let happen what happens before ``until`` seconds.

    Parameters
    ----------
    world
        The run.
    until
        Time limit, s.
    n_events
        Return PAUSED after so many events, that the caller may look around.

    Returns
    -------
    int
        Why it returned. After FULL grow the logs and ``gaps``, and tell the prefill router of the
        blocks, before the next call.
    """
    run = world.run
    clock, events, engines, routers = run.clock, run.events, run.engines, run.routers
    requests, pools, settings = engines.requests, engines.pools, engines.settings[0]
    interval, front_end, decide = settings.signal_interval_s, settings.front_end, settings.decide
    most_gaps = engines.sequences.shape[1] * max(pools[0].group_size, pools[1].group_size)
    answer = drain(clock, events, engines, routers, run.reported, decide)
    if answer:
        return OTHERS if answer == RETURN else FAILED
    if front_end:
        _enter(clock, events, engines, world.front, decide)
    while clock[0].open_measured > 0:
        due = events[0].time if clock[0].n_events > 0 else np.inf
        wakes = clock[0].guest_s <= due
        if not min(due, clock[0].guest_s) < until:
            return UNTIL
        if not wakes and (
            pools[0].n_steps + pools[0].group_size > world.logs[0].shape[0]
            or pools[1].n_steps + pools[1].group_size > world.logs[1].shape[0]
            or pools[0].n_group_steps == world.group_logs[0].shape[0]
            or pools[1].n_group_steps == world.group_logs[1].shape[0]
            or clock[0].n_gaps + most_gaps > world.gaps.shape[0]
            or engines.kv.n_events[0] > 2 * engines.kv.events.shape[0] // 3
        ):
            return FULL
        if n_events == 0:
            return PAUSED
        n_events -= 1
        kind, subject = _NOTHING, np.int64(0)
        if wakes:
            clock[0].now = clock[0].guest_s
            answer = ask(decide, WAKE, subject)
            if answer:
                return OTHERS if answer == RETURN else FAILED
        else:
            if interval > 0.0 and not clock[0].publish_due:  # while anything may change
                clock[0].publish_due = True
                schedule(clock, events, clock[0].now + interval, PUBLISH, np.int64(0))
            kind, subject = events[0].kind, events[0].subject
            clock[0].now = events[0].time
            drop_first(clock, events)
        if kind == STEP_START:
            if not run_step(world, subject):
                return FAILED
            continue
        if kind == BOUNDARY:
            boundary(clock, events, engines, subject)
            if engines.settings[0].prefill_listens and engines.pool_of[subject] == _PREFILL_POOL:
                _ask_again(routers[0])
        elif kind == ARRIVAL:
            clock[0].arrived += 1
            if subject + 1 < requests.shape[0]:
                schedule(clock, events, requests[subject + 1].arrival_s, ARRIVAL, subject + 1)
        elif kind == DISPATCH:
            leave(clock, engines, _PENDING_DISPATCH, subject)
        elif kind == REPORT:
            _hear(clock, engines, routers, run.reported, subject // 2, subject % 2)
        elif kind == PROMPT_END:
            w = pools[0].first_worker + requests[subject].prefill_worker
            leave_stages(clock, events, engines, w, subject)
        elif kind == TRANSFER_START:
            _start_transfer(clock, events, engines, run.net, subject)
        elif kind == PUBLISH:
            clock[0].publish_due = False
            _publish(clock, engines, routers)
        elif kind == TRANSFER_END and subject == clock[0].timer:
            _end_transfers(clock, events, engines, run.net)
        elif kind == READ:
            on_read(clock, events, engines, world.front, subject)
        elif kind == COLLECTED:
            on_collected(clock, events, engines, world.front, subject)
        elif kind == TOKENIZED:
            on_tokenized(clock, events, engines, world.front, subject)
        answer = drain(clock, events, engines, routers, run.reported, decide)
        if answer:
            return OTHERS if answer == RETURN else FAILED
        if front_end:
            _enter(clock, events, engines, world.front, decide)
    return ENDED
