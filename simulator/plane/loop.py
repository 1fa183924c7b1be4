"""The compiled event loop: everything that happens between two decisions of a router.

The life of a request, top to bottom::

    ARRIVAL         by itself, or after the turn before it             `sessions`
                    it waits at the client while --max-concurrency
                    requests are in flight, then goes to an API server `_enter`
    READ            the server has read it, and tokenises it           `front_end`
    TOKENIZED       a router picks the worker that computes its prompt `drain`
    BOUNDARY        the engine admits it and plans its chunks          `engine.boundary`
    LOADED          what it takes from KV tiers has come, if it does   `kv_loads`
    STEP_START      its prompt is computed, step by step               `executor.run_step`
    BOUNDARY        the prompt is computed: hand it over, or end it    `engine.boundary`
    PROMPT_END      the same, when the last of several stages has it   `engine.leave_stages`
    DISPATCH        signature and router: its decode worker is picked  `drain`
    BOUNDARY        that worker's engine reserves its KV blocks        `engine.boundary`
    TRANSFER_START  its KV cache flows over shared links               `network.begin`
    TRANSFER_END    its blocks at the source are free, it can join     `network.end`
    BOUNDARY        it joins the decode batch                          `engine.boundary`
    STEP_START      one token a step                                   `executor.run_step`
    BOUNDARY        it has all its tokens: its blocks are free         `drain`
    REPORT          the routers learn of its end                       `drain`

Workers have one numbering, pool by pool. A request says which KV cache it takes over
(``REQUEST.source``; -1: it computes its own), and the pool of its worker says where it goes when
the prompt is computed (``POOL.then``): to another router's worker, to that worker, or nowhere.
Where blocks are reserved early, that router decides first (``REQUEST.reserved``). A router may hold
a request until it receives a completion or signals. Engines that share experts start their steps
together. The control plane (SimPy processes) is a guest: the time of its next event is one float of
the clock."""

from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Int32s, Records, Words
from eldr_sim.jit import Entry
from eldr_sim.simulator.plane import network, state
from eldr_sim.simulator.plane.choose import (
    HOLD,
    RETURN,
    Router,
    ask_again,
    choose,
    hold,
    let_go,
    publish,
)
from eldr_sim.simulator.plane.compiled import ask, compiled
from eldr_sim.simulator.plane.entry import stays
from eldr_sim.simulator.plane.events import drop_first, leave, schedule
from eldr_sim.simulator.plane.front_end import FrontEnd, on_collected, on_read, on_tokenized, send
from eldr_sim.simulator.plane.kv.block_lists import holds
from eldr_sim.simulator.plane.kv.kv_cache import blocks_of, withdraw
from eldr_sim.simulator.plane.kv.kv_manager import Engines, side_of
from eldr_sim.simulator.plane.scheduler.admission import blocks_are_pulled, blocks_have_come, fetch
from eldr_sim.simulator.plane.scheduler.engine import boundary, leave_stages, take
from eldr_sim.simulator.plane.scheduler.queues import drop_fetched, free_source, give_back, remove
from eldr_sim.simulator.plane.sessions import arrive, go_on
from eldr_sim.simulator.plane.steps.executor import Scratch, run_step
from eldr_sim.simulator.plane.steps.group_state import Groups
from eldr_sim.simulator.plane.steps.streamed import PromptLayers
from eldr_sim.simulator.plane.steps.verify import Drafts

#: What the loop asks for besides decisions of routers and of `expert_loads`: that the control plane
#: does the next thing it has to, and hears of the end of a request that it watches.
WAKE, TELL = np.int64(-3), np.int64(-4)
_NOTHING = np.int64(-1)  # the event of a wake
#: Why `advance` returned: nothing is left before ``until``, all measured requests have ended,
#: enough has happened for now, a log is full, a router's arrays are others now, or it has failed.
UNTIL, ENDED, PAUSED, LOG_FULL, ARRAYS_REPLACED, FAILED = map(np.int64, range(6))


class Run(NamedTuple):
    """Everything that the loop works on."""

    clock: Records  #: ``CLOCK [1]``
    events: Records  #: ``EVENT [capacity]``
    engines: Engines
    routers: tuple[Router, ...]
    net: network.Network
    #: ``[requests, 2]``: requests that have left workers, and these, as they were reported.
    reported: Int32s
    bits: Words  #: replay windows
    masks: Words  #: ``[workers, ranks, layers * words]``
    prompts: Any  #: `expert_union.PromptRows`
    costs: tuple[Any, ...]  #: `StepCost` of each pool,
    drafts: tuple[Drafts, ...]  #: and what it drafts
    scratch: Scratch


class World(NamedTuple):
    """All that compiled functions work on, by reference."""

    run: Run
    groups: Groups  #: what engines share, if any do
    layers: PromptLayers  #: of workers whose layers stream or lie in stages
    front: FrontEnd  #: the API servers that requests go through before a router, if any
    log: Records  #: ``STEP [capacity]``, in the order in which steps began
    group_log: Records  #: ``GROUP_STEP [capacity]``, likewise
    gaps: Records  #: ``GAP [capacity]``


@compiled()
def _refusal(engines: Engines, request: int) -> Any:
    """Say why a request can never be served, whatever worker gets it; 0 if it can."""
    settings, record = engines.settings[0], engines.requests[request]
    tokens = record.prompt_len + record.output_len
    if tokens > settings.max_model_len:
        return state.TOO_LONG
    reason = np.int64(0)
    for p in range(engines.pools.shape[0]):
        pool = engines.pools[p]
        if pool.whole_prompts and record.prompt_len > pool.max_num_batched_tokens:
            return state.OVER_BUDGET
        needed = record.prompt_len
        if pool.then < 0:
            needed = min(tokens + pool.drafts + pool.lookahead, settings.max_model_len)
        blocks = blocks_of(needed, settings.block_size) + record.window_blocks
        blocks += engines.kv.groups * min(blocks, pool.window_cap)
        blocks += pool.reserve == state.OF_SHARE  # SGLang never fills its KV cache up
        if blocks > pool.n_blocks:
            reason = state.NO_KV_ROOM
    return reason


@compiled()
def _end(clock: Any, events: Any, engines: Engines, request: int, outcome: int) -> None:
    engines.requests[request].outcome = outcome
    clock[0].open_measured -= engines.requests[request].measured
    go_on(clock, events, engines, request)
    if engines.requests[request].watched:
        ask(engines.settings[0].decide, TELL, request)


@compiled()
def _hear(
    clock: Any, engines: Engines, routers: Any, reported: Any, request: int, w: int
) -> None:  # fmt: skip
    """Let a router know that a worker has one request less."""
    router = routers[engines.pools[engines.pool_of[w]].router]
    router.loads[w] -= 1
    ask_again(router)
    if router.record[0].hears_ends:
        reported[clock[0].n_reported, 0] = request
        reported[clock[0].n_reported, 1] = w
        clock[0].n_reported += 1


@compiled()
def _report(
    clock: Any, events: Any, engines: Engines, routers: Any, reported: Any, request: int
) -> None:
    """Let the router of a request's worker know, as late as the configuration says."""
    delay, w = engines.settings[0].load_report_delay_s, engines.requests[request].worker
    if delay == 0.0:
        _hear(clock, engines, routers, reported, request, w)
    else:
        subject = request * engines.workers.shape[0] + w
        schedule(clock, events, clock[0].now + delay, state.REPORT, subject)


@compiled()
def detach(
    clock: Any, events: Any, engines: Engines, routers: Any, net: Any, request: int
) -> None:  # fmt: skip
    """Take a request out of routers' queues, links and engines; routers still count it."""
    record = engines.requests[request]
    for r in range(engines.settings[0].n_routers):
        let_go(routers[r], engines.requests, request)
    if record.transfer_start_s >= 0.0 and not record.kv_here:
        network.drop(clock, events, net, request)
    w, source = record.worker, record.source
    if engines.kv.tiers.loads.shape[0] > 0 and engines.kv.tiers.loads[request].pulling:
        load = engines.kv.tiers.loads[request]
        network.drop(clock, events, net, request)
        give_back(clock, events, engines, load.peer, request)
        withdraw(engines.kv, engines.tables, engines.workers, w, side_of(engines, w), request,
                 load.pulled)  # fmt: skip
        load.pulling = False
    if w >= 0:
        if engines.pools[engines.pool_of[w]].then >= 0 and record.prefill_end_s >= 0.0:
            give_back(clock, events, engines, w, request)  # nobody has taken it over yet
        else:
            remove(clock, events, engines, w, request)
    if source >= 0 and (not record.kv_here or holds(engines.tables[request, 0])):
        drop_fetched(engines, source, request)
        give_back(clock, events, engines, source, request)
    if record.reserved >= 0:
        engines.workers[record.reserved].n_waiting -= 1
        engines.workers[record.reserved].waiting_tokens -= record.prompt_len + record.generated
        give_back(clock, events, engines, record.reserved, request)
    for side in range(2):
        table = engines.tables[request, side]
        table.found = table.listed = table.private = table.full = 0
        if engines.kv.groups > 0:
            engines.kv.windows[request, side].begin = 0


@compiled()
def _place(
    clock: Any, events: Any, engines: Engines, router: Router, request: int, w: int
) -> None:  # fmt: skip
    """Send a request to the worker that its router has chosen; where it was has its KV cache."""
    router.loads[w] += 1
    record = engines.requests[request]
    record.source, record.worker = record.worker, w
    take(clock, events, engines, w, request)


@compiled()
def _ask_held(
    clock: Any, events: Any, engines: Engines, routers: Any, r: int, reported: Any
) -> Any:
    """Ask a router about what it holds, the first that came first; RETURN, FAIL or 0."""
    router, requests = routers[r], engines.requests
    held = router.record[0]
    while held.to_ask > 0:
        request = held.head
        worker = choose(clock, engines, routers, r, request, reported)
        if worker < 0 and worker != HOLD:
            return worker
        if worker == HOLD and held.in_order:
            held.to_ask = 0
            return np.int64(0)
        held.head = requests[request].next
        held.n -= 1
        held.to_ask -= 1
        if worker == HOLD:
            hold(router, requests, request)
        else:
            _place(clock, events, engines, router, request, worker)
    return np.int64(0)


@compiled()
def _route(
    clock: Any, events: Any, engines: Engines, routers: Any, r: int, request: int, reported: Any
) -> Any:
    """Let a router place a request or hold it; RETURN, FAIL or 0."""
    router, worker = routers[r], HOLD
    if router.record[0].n == 0 or not router.record[0].in_order:
        worker = choose(clock, engines, routers, r, request, reported)
    if worker == HOLD:
        hold(router, engines.requests, request)
    elif worker < 0:
        return worker
    else:
        _place(clock, events, engines, router, request, worker)
    return np.int64(0)


@compiled()
def _first_router(engines: Engines, routers: Any, net: Any, request: int) -> Any:
    """Return the router that a request comes to: of who computes its prompt, or decodes it."""
    if engines.settings[0].reserves_early:
        return np.int64(1)  # there are two routers then
    return np.int64(stays(engines, routers, net, request))


@compiled()
def _enter(clock: Any, events: Any, engines: Engines, front: FrontEnd) -> None:
    """Let the client send to the API servers what it may send."""
    limit = engines.settings[0].max_concurrency
    while clock[0].sent < clock[0].arrived and (limit < 0 or clock[0].in_flight < limit):
        request: Any = np.int64(engines.sessions.order[clock[0].sent])
        clock[0].sent += 1
        if engines.requests[request].outcome:  # its client has not waited for so long
            continue
        engines.requests[request].sent_s = clock[0].now
        reason = _refusal(engines, request)
        if reason:
            _end(clock, events, engines, request, reason)
        else:
            clock[0].in_flight += 1
            send(clock, events, front, request)


@compiled()
def drain(
    clock: Any, events: Any, engines: Engines, routers: Any, net: Any, reported: Any
) -> Any:  # fmt: skip
    """Do what the last event asks for: sends, hand-overs, ends. Returns 0, or what a router
    answered instead of a worker; called again it goes on."""
    settings, pools, requests = engines.settings[0], engines.pools, engines.requests
    limit = settings.max_concurrency
    while True:
        may_send = limit < 0 or clock[0].in_flight < limit
        if clock[0].sent < clock[0].arrived and may_send and not settings.front_end:
            request: Any = np.int64(engines.sessions.order[clock[0].sent])
            if requests[request].outcome:  # its client has not waited for so long
                clock[0].sent += 1
                continue
            requests[request].sent_s = clock[0].now
            reason = _refusal(engines, request)
            if reason:
                clock[0].sent += 1
                _end(clock, events, engines, request, reason)
                continue
            router: Any = _first_router(engines, routers, net, request)
            answer = _route(clock, events, engines, routers, router, request, reported)
            if answer < 0:
                return answer
            clock[0].sent += 1
            clock[0].in_flight += 1
            continue
        head = clock[0].pending_head
        if head == clock[0].pending_tail:
            clock[0].pending_head = clock[0].pending_tail = 0
            for r in range(engines.settings[0].n_routers):
                if routers[r].record[0].to_ask > 0:
                    answer = _ask_held(clock, events, engines, routers, r, reported)
                    if answer < 0:
                        return answer
            return 0
        what, request = engines.pending[head, 0], engines.pending[head, 1]
        if what == state.PENDING_END:
            _report(clock, events, engines, routers, reported, request)
            clock[0].in_flight -= 1
            _end(clock, events, engines, request, state.COMPLETED)
        elif what == state.PENDING_HAND_OVER:
            _report(clock, events, engines, routers, reported, request)
            delay = settings.routing_s + settings.routing_token_s * requests[request].prompt_len
            if delay == 0.0:
                engines.pending[head, 0] = state.PENDING_DISPATCH
                continue
            schedule(clock, events, clock[0].now + delay, state.DISPATCH, request)
        elif what == state.PENDING_DISPATCH and requests[request].reserved >= 0:
            requests[request].source = requests[request].worker
            requests[request].worker = requests[request].reserved
            requests[request].reserved = -1
            fetch(clock, events, engines, requests[request].worker, request)
        else:
            router = np.int64(0)
            if what == state.PENDING_ROUTE:
                router = _first_router(engines, routers, net, request)
            elif what != state.PENDING_PROMPT:
                router = pools[engines.pool_of[requests[request].worker]].then
            answer = _route(clock, events, engines, routers, router, request, reported)
            if answer < 0:
                return answer
        clock[0].pending_head += 1


@compiled()
def _start_transfer(clock: Any, events: Any, engines: Engines, net: Any, request: int) -> None:
    """Let the bytes flow: whole blocks, one descriptor a block and KV tensor (NIXL). The GPUs of a
    worker move their parts side by side, each over its NIC: one stands for all."""
    size, record = engines.settings[0].block_size, engines.requests[request]
    source, target = record.source, record.worker
    if source < 0:  # a prefill worker pulls from a decode worker
        load = engines.kv.tiers.loads[request]
        source, blocks = load.peer, load.pulled
        pool = engines.pools[engines.pool_of[source]]
    else:
        context = record.prompt_len + record.generated
        blocks = blocks_of(context - record.decode_cached_tokens, size)
        pool = engines.pools[engines.pool_of[target]]
    n_bytes = blocks * size * pool.kv_bytes_per_token + pool.kv_state_bytes
    network.begin(clock, events, net, source, target, n_bytes, request)


@compiled()
def _end_transfers(clock: Any, events: Any, engines: Engines, net: Any) -> None:
    """Free the blocks at the sources of transfers that end now; the requests can join."""
    for i in range(network.end(clock, events, net)):
        request = net.done[i]
        record = engines.requests[request]
        if record.source < 0:
            blocks_are_pulled(clock, events, engines, request)
            continue
        record.transfer_end_s = clock[0].now
        w = record.source
        free_source(clock, events, engines, w, request)
        record.kv_here = True
        take(clock, events, engines, record.worker, request)


@compiled()
def _is_full(world: World, event: Any) -> Any:
    """Whether a log may lack room for what the next event writes."""
    clock, engines = world.run.clock, world.run.engines
    if engines.kv.n_events[0] > 2 * engines.kv.events.shape[0] // 3:
        return True
    if event.kind != state.STEP_START:
        return False
    size = engines.pools[engines.pool_of[event.subject]].group_size
    return bool(
        clock[0].n_steps + size > world.log.shape[0]
        or clock[0].n_group_steps == world.group_log.shape[0]
        or clock[0].n_gaps + engines.sequences.shape[1] * size > world.gaps.shape[0]
    )


@Entry
def advance(world: World, until: float, n_events: int) -> np.int64:
    """Let happen what happens before ``until``, s, or ``n_events``; returns why it returned. After
    FULL grow the logs and ``gaps``, and call the router that reads blocks, before the next call."""
    run = world.run
    clock, events, engines, routers = run.clock, run.events, run.engines, run.routers
    requests, pools, settings = engines.requests, engines.pools, engines.settings[0]
    interval, front_end = settings.signal_interval_s, settings.front_end
    answer = drain(clock, events, engines, routers, run.net, run.reported)
    if answer:
        return ARRAYS_REPLACED if answer == RETURN else FAILED
    if front_end:
        _enter(clock, events, engines, world.front)
    while clock[0].open_measured > 0:
        due = events[0].time if clock[0].n_events > 0 else np.inf
        wakes = clock[0].guest_s <= due
        if not min(due, clock[0].guest_s) < until:
            return UNTIL
        if not wakes and _is_full(world, events[0]):
            return LOG_FULL
        if n_events == 0:
            return PAUSED
        n_events -= 1
        kind, subject = _NOTHING, np.int64(0)
        if wakes:
            clock[0].now = clock[0].guest_s
            answer = ask(settings.decide, WAKE, subject)
            if answer:
                return ARRAYS_REPLACED if answer == RETURN else FAILED
        else:
            if interval > 0.0 and not clock[0].publish_due:  # while anything may change
                clock[0].publish_due = True
                schedule(clock, events, clock[0].now + interval, state.PUBLISH, np.int64(0))
            kind, subject = events[0].kind, events[0].subject
            clock[0].now = events[0].time
            drop_first(clock, events)
        if kind == state.STEP_START:
            if not run_step(world, subject):
                return FAILED
            continue
        if kind == state.BOUNDARY:
            boundary(clock, events, engines, subject, world.log, world.gaps)
            if pools[engines.pool_of[subject]].reports:
                ask_again(routers[pools[engines.pool_of[subject]].router])
        elif kind == state.ARRIVAL:
            arrive(clock, events, engines, subject)
        elif kind == state.DISPATCH:
            leave(clock, engines, state.PENDING_DISPATCH, subject)
        elif kind == state.REPORT:
            n = engines.workers.shape[0]
            _hear(clock, engines, routers, run.reported, subject // n, subject % n)
        elif kind == state.PROMPT_END:
            leave_stages(clock, events, engines, requests[subject].worker, subject)
        elif kind == state.TRANSFER_START:
            _start_transfer(clock, events, engines, run.net, subject)
        elif kind == state.PUBLISH:
            clock[0].publish_due, clock[0].signals_s = False, clock[0].now
            for r in range(engines.settings[0].n_routers):
                publish(engines, routers[r])
                ask_again(routers[r])
        elif kind == state.TRANSFER_END and subject == clock[0].timer:
            _end_transfers(clock, events, engines, run.net)
        elif kind == state.LOADED:
            blocks_have_come(clock, events, engines, subject)
        elif kind == state.READ:
            on_read(clock, events, engines, world.front, subject)
        elif kind == state.COLLECTED:
            on_collected(clock, events, engines, world.front, subject)
        elif kind == state.TOKENIZED:
            on_tokenized(clock, events, engines, world.front, subject)
        answer = drain(clock, events, engines, routers, run.net, run.reported)
        if answer:
            return ARRAYS_REPLACED if answer == RETURN else FAILED
        if front_end:
            _enter(clock, events, engines, world.front)
    return ENDED
