"""Which requests join an engine's next step: those that hold KV blocks, that lost theirs, that are
new.

It takes a place in the batch, a token of the step's budget, and KV blocks; no request passes the
next in the order."""

from typing import Any

import numpy as np

from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.events import leave, schedule, wake
from eldr_sim.simulator.plane.kv import kv_loads
from eldr_sim.simulator.plane.kv.kv_cache import blocks_of, release
from eldr_sim.simulator.plane.kv.kv_loads import WAITS
from eldr_sim.simulator.plane.kv.kv_manager import (
    Engines,
    allocate,
    cached_tokens,
    can_join,
    free_tokens,
    lacks_room,
    only_prompts,
    promised,
    publish_tokens,
    side_of,
    slide_context,
)
from eldr_sim.simulator.plane.scheduler.chunks import (
    ANY,
    budget_left,
    fill,
    join,
    longest_chunk,
    move,
)
from eldr_sim.simulator.plane.scheduler.preemption import goes_before, padding
from eldr_sim.simulator.plane.scheduler.queues import line_remove, queue_remove, waits_for_blocks
from eldr_sim.simulator.plane.state import (
    ADMITTED,
    HERE,
    LOADED,
    NO_BLOCKS,
    NO_SEAT,
    NO_TOKENS,
    OF_SHARE,
    PENDING_PROMPT,
    PUT_OFF,
    TRANSFER_START,
)

_NONE = np.int64(0)


@compiled()
def admit(clock: Any, events: Any, engines: Engines, w: int, defers: bool) -> None:
    """Fill the batch: requests that hold blocks, then preempted ones, then new ones."""
    worker, requests, now = engines.workers[w], engines.requests, clock[0].now
    pool = engines.pools[engines.pool_of[w]]
    if not defers:
        fill(engines, w)
    while worker.arrived_head >= 0:
        request = worker.arrived_head
        if not _is_open(engines, w, _NONE):
            break
        publish_tokens(engines, w, request, requests[request].prompt_len)
        context = requests[request].prompt_len + requests[request].generated - 1
        padded = padding(engines, w, context)
        if not _is_open(engines, w, padded):
            break
        slide_context(engines, w, request, context)
        if worker.batch + worker.prefilling > 0 and not can_join(engines, w, request, padded):
            return
        worker.arrived_head = requests[request].next
        requests[request].decode_start_s = now
        with_token = pool.token_with_kv and requests[request].generated == 0
        with_token = with_token and requests[request].output_len > 1
        if with_token:  # of the prompt, which came with its KV cache
            requests[request].generated = 1
            requests[request].first_token_s = now
            worker.waiting_tokens += 1
        first = worker.batch
        for i in range(worker.batch + worker.prefilling, first, -1):
            engines.sequences[w, i] = engines.sequences[w, i - 1]
        context = requests[request].prompt_len + requests[request].generated - 1
        _begin(engines, w, first, request, context, context)
        worker.prefilling += 1
        join(engines, w)
        if with_token:
            _carry_on(engines, w)
    by_key = pool.preempt_by_key or pool.fewest_first
    if worker.loading_head >= 0 and not defers and not _admit_loaded(clock, events, engines, w):
        return
    before = np.int64(worker.n_admitted)
    while _goes_on(engines, w, before):
        lost, new = worker.preempted_head, worker.new_head
        if new >= 0 and now - requests[worker.oldest].queued_s >= pool.aging_s:
            new = worker.oldest
        if lost >= 0 and (not by_key or new < 0 or goes_before(engines, w, lost, new)):
            if pool.fills_up and budget_left(engines, w) <= 0:
                worker.full = lacks_room(engines, w, lost)
                return
            if defers or not _admit_preempted(clock, events, engines, w, lost):
                worker.full = pool.fills_up
                worker.blocked = worker.blocked or pool.reserve == OF_SHARE
                return  # nobody overtakes who is next
        elif new < 0 or (defers and not _fetches(engines, w, new)):
            return  # to fetch a KV cache computes nothing and is not put off
        elif pool.fills_up and budget_left(engines, w) <= 0:
            worker.full = lacks_room(engines, w, new)
            return
        elif not _admit_new(clock, events, engines, w, new):
            worker.full = pool.fills_up
            worker.blocked = pool.aging_s < np.inf and new != worker.oldest
            worker.blocked = (
                worker.blocked or pool.reserve == OF_SHARE
            )  # which falls with each step
            return


@compiled()
def what_stopped(engines: Engines, w: int, defers: bool) -> Any:
    """Return why the next request was not admitted at a boundary, such as ``state.NO_BLOCKS``.

    Preempted requests do not count: they have begun."""
    worker, pool = engines.workers[w], engines.pools[engines.pool_of[w]]
    if worker.arrived_head < 0 and worker.new_head < 0:
        return ADMITTED
    left, new = budget_left(engines, w), np.int64(worker.new_head)
    if left <= (pool.placeholders if worker.arrived_head >= 0 else _NONE):
        return NO_TOKENS
    if pool.whole_prompts and new >= 0 and not _fetches(engines, w, new):
        prompt = engines.requests[new].prompt_len + engines.requests[new].generated
        if prompt - cached_tokens(engines, w, new, prompt) > left:
            return NO_TOKENS
    if _places(worker, pool) <= 0:
        return NO_SEAT
    return PUT_OFF if defers else NO_BLOCKS


@compiled()
def _admit_preempted(clock: Any, events: Any, engines: Engines, w: int, request: int) -> Any:
    """Let a preempted request recompute its context; False if its blocks are not free."""
    worker, record = engines.workers[w], engines.requests[request]
    tokens = record.prompt_len + record.generated
    cached = allocate(engines, w, request, tokens, False, _first_chunk(engines, w),
                      padding(engines, w, tokens - 1))  # fmt: skip
    if cached < 0 and cached != WAITS:
        return False
    worker.preempted_head = record.next
    _compute(clock, events, engines, w, request, cached)
    return True


@compiled()
def _admit_loaded(clock: Any, events: Any, engines: Engines, w: int) -> Any:
    """Let those begin whose KV blocks have come from tiers; False if one lacks room."""
    worker, requests, loads = engines.workers[w], engines.requests, engines.kv.tiers.loads
    before, at = np.int64(-1), np.int64(worker.loading_head)
    while at >= 0 and _is_open(engines, w, _NONE):
        request, at = at, np.int64(requests[at].next)
        if loads[request].loading:
            before = request
            continue
        cached: Any = np.int64(loads[request].cached)
        if loads[request].delayed:
            tokens = requests[request].prompt_len + requests[request].generated
            cached = allocate(engines, w, request, tokens, False, ANY, _NONE)
            if cached == -1:
                return False
        if before < 0:
            worker.loading_head = at
        else:
            requests[before].next = at
        _compute(clock, events, engines, w, request, cached)
    return True


@compiled()
def _admit_new(clock: Any, events: Any, engines: Engines, w: int, request: int) -> Any:
    """Let a request compute its prompt, or fetch it; False if its blocks are not free."""
    worker, requests = engines.workers[w], engines.requests
    pool, fetches = engines.pools[engines.pool_of[w]], _fetches(engines, w, request)
    prompt = requests[request].prompt_len + requests[request].generated
    whole = pool.whole_prompts and not fetches
    if whole and prompt - cached_tokens(engines, w, request, prompt) > budget_left(engines, w):
        return False
    cached = allocate(engines, w, request, prompt, fetches, _first_chunk(engines, w),
                      padding(engines, w, prompt - 1))  # fmt: skip
    if cached < 0 and cached != WAITS:
        return False
    worker.new_head = queue_remove(requests, worker.new_head, request)
    line_remove(requests, worker, request)
    if fetches:
        requests[request].decode_cached_tokens = cached
        if requests[request].source >= 0:
            fetch(clock, events, engines, w, request)
        else:  # who computes its prompt?
            requests[request].reserved, requests[request].worker = w, -1
            leave(clock, engines, PENDING_PROMPT, request)
        return True
    _compute(clock, events, engines, w, request, cached)
    return True


@compiled()
def _is_open(engines: Engines, w: int, drafts: int) -> Any:
    """Whether the next step has a place and tokens of its budget left: one, and ``drafts``."""
    worker, pool = engines.workers[w], engines.pools[engines.pool_of[w]]
    return bool(_places(worker, pool) > 0 and budget_left(engines, w) > drafts)


@compiled()
def _places(worker: Any, pool: Any) -> Any:
    """Return the places in the batch that are free; in SGLang's prefill workers a context holds one
    until it has been fetched."""
    if pool.fills_up and pool.then != HERE:
        return pool.max_num_seqs - worker.contexts
    held = worker.batch + worker.prefilling + worker.leaving
    return pool.max_num_seqs - held - worker.riding - worker.ended_places - worker.unfiltered


@compiled()
def _goes_on(engines: Engines, w: int, before: int) -> Any:
    """Whether the engine looks at the next request, ``before`` having been admitted when the step
    was planned. SGLang notes where its batch is full (`PrefillAdder.budget_state`), where a chunk
    has used up the budget, too."""
    worker, pool = engines.workers[w], engines.pools[engines.pool_of[w]]
    if not pool.fills_up:
        return _is_open(engines, w, _NONE)
    begins, left = worker.n_admitted == before, budget_left(engines, w)
    if not begins and worker.prefilling == 0:
        worker.full = worker.full or promised(engines, w) >= free_tokens(engines, w)
    if worker.full or not waits_for_blocks(worker) or (left <= 0 and not begins):
        return False
    begun = only_prompts(engines, w) and worker.prefilling > 0  # it counts twice
    begun = begun and engines.sequences[w, worker.batch].ticket <= worker.last_admitted
    worker.full = _places(worker, pool) <= begun
    return bool(not worker.full)


@compiled()
def _fetches(engines: Engines, w: int, request: int) -> Any:
    """Whether a request that is new to a worker gets blocks for a KV cache that comes later."""
    if engines.requests[request].source >= 0:
        return True
    decodes = engines.pools[engines.pool_of[w]].then == HERE
    return bool(decodes and engines.settings[0].reserves_early)


@compiled()
def fetch(clock: Any, events: Any, engines: Engines, w: int, request: int) -> None:
    """Let a request fetch its KV cache into the blocks reserved for it."""
    record, settings = engines.requests[request], engines.settings[0]
    pool, now = engines.pools[engines.pool_of[w]], clock[0].now
    record.transfer_start_s, record.ticket = now, clock[0].order
    tokens = record.prompt_len + record.generated - record.decode_cached_tokens
    blocks = blocks_of(tokens, settings.block_size)
    latency = settings.setup_s + blocks * pool.n_kv_tensors * pool.descriptor_s
    schedule(clock, events, now + latency, TRANSFER_START, request)


@compiled()
def _compute(
    clock: Any, events: Any, engines: Engines, w: int, request: int, cached: int
) -> None:  # fmt: skip
    """Let a request compute its context behind ``cached`` tokens, when these are here."""
    worker, record, now = engines.workers[w], engines.requests[request], clock[0].now
    if record.prefill_start_s < 0.0 and cached >= 0:
        record.cached_tokens = cached
    if engines.kv.tiers.loads.shape[0] > 0:
        load = engines.kv.tiers.loads[request]
        if cached == WAITS:
            load.loading = load.delayed = True
            load.until_s, load.since_s = -1.0, now
        if load.loading:
            if record.prefill_start_s < 0.0 and load.start_s == 0.0:
                load.start_s = now
            kv_loads.line_up(engines, w, request)
            if load.until_s >= 0.0:
                schedule(clock, events, load.until_s, LOADED, request)
            if load.pulling:
                settings, pool = engines.settings[0], engines.pools[engines.pool_of[w]]
                latency = settings.setup_s + load.pulled * pool.n_kv_tensors * pool.descriptor_s
                schedule(clock, events, now + latency, TRANSFER_START, request)
            return
    if record.prefill_start_s < 0.0:
        record.prefill_start_s = now
    context = record.prompt_len + record.generated
    if not only_prompts(engines, w):
        context -= 1
    _begin(engines, w, worker.batch + worker.prefilling, request, cached, context)
    worker.prefilling += 1
    fill(engines, w)


@compiled()
def blocks_have_come(clock: Any, events: Any, engines: Engines, request: int) -> None:
    """Let a request begin with its KV blocks from tiers, and requests that waited for them."""
    load, w = engines.kv.tiers.loads[request], engines.requests[request].worker
    if load.loading and load.until_s == clock[0].now:
        kv_loads.have_come(engines, w, side_of(engines, w), request)
        wake(clock, events, engines.workers, w)


@compiled()
def blocks_are_pulled(clock: Any, events: Any, engines: Engines, request: int) -> None:
    """Let the blocks be here that a request pulls, which their worker frees."""
    load, w = engines.kv.tiers.loads[request], engines.requests[request].worker
    load.pulling = False
    release(
        engines.kv, engines.tables, engines.workers, load.peer, side_of(engines, load.peer), request
    )
    if waits_for_blocks(engines.workers[load.peer]):
        wake(clock, events, engines.workers, load.peer)
    if load.until_s < 0.0:
        kv_loads.have_come(engines, w, side_of(engines, w), request)
        wake(clock, events, engines.workers, w)


@compiled()
def _begin(engines: Engines, w: int, i: int, request: int, computed: int, context: int) -> None:
    """Make a request the running sequence ``i``, with ``computed`` of ``context`` tokens."""
    sequence, record = engines.sequences[w, i], engines.requests[request]
    engines.workers[w].n_waiting -= 1
    engines.workers[w].waiting_tokens -= record.prompt_len + record.generated
    sequence.request = request
    sequence.row = record.window_row + (record.window_offset + record.generated) % record.window_len
    sequence.row_end = record.window_row + record.window_len
    sequence.row_span = record.window_len
    sequence.tokens, sequence.got, sequence.rejected, sequence.decodes = 1, 0, 0, False
    sequence.flying, sequence.slides_at = 0, record.output_len
    if computed == context:
        sequence.tokens += padding(engines, w, computed)
    sequence.drafts = 0
    sequence.room = engines.settings[0].max_model_len - context
    sequence.output_len = record.output_len
    sequence.tokens_left = record.output_len - record.generated
    table = engines.tables[request, side_of(engines, w)]
    held = table.listed + table.private - record.window_blocks
    sequence.free_slots = held * engines.settings[0].block_size - context
    sequence.computed = computed
    sequence.todo = context - computed
    sequence.chunk = 0
    engines.workers[w].n_admitted += 1
    sequence.ticket = engines.workers[w].n_admitted


@compiled()
def _carry_on(engines: Engines, w: int) -> None:
    """Let the sequence that joined last stand before others that join: it has its first token."""
    worker = engines.workers[w]
    worker.joined -= 1
    move(engines, w, worker.batch - 1, worker.batch - 1 - worker.joined)


@compiled()
def _first_chunk(engines: Engines, w: int) -> Any:
    """Return the most tokens that a request can compute in the step that admits it."""
    return min(budget_left(engines, w), longest_chunk(engines, w))
