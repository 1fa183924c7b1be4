"""The engine of a worker: vLLM's v1 scheduler (``vllm/v1/core/sched/scheduler.py``), compiled.

At a step boundary the engine takes out what has ended, gives running sequences the KV blocks that
their next tokens need, admits who waits, and so makes the plan of the next step: sequences that get
their next token, and chunks of contexts that are still being computed.

- First come, first served, or another queue order; where it ages, who has waited long enough at
  the engine comes first, the oldest before the others. A request is admitted if there is a place
  in the batch, a token of the step's budget, and KV blocks for its whole prompt; until the next in
  the order is, nobody behind it is.
- Running sequences come first. When their blocks are not free, the one that joined last, or that of
  the lowest priority, is preempted: it goes to the front of the queue, or by its priority, and
  recomputes its context later; nobody is admitted in that step.
- A context is computed in chunks, as the token budget allows. Its last token is not part of them
  but decoded, in the step of its last chunk, except on a prefill worker, which hands the request
  over when the prompt is computed, or ends it there.
- With a KV connector the blocks are reserved before the transfer starts, and only those that are
  not in the prefix cache are fetched. Requests whose KV cache has arrived come before others.
- With asynchronous scheduling the next step is scheduled when one starts, so a request that comes
  meanwhile joins the one after.

There is one engine; a request says where its KV cache comes from, and the pool of its worker who
goes on when a prompt is computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.events import schedule, schedule_step
from eldr_sim.simulator.plane.kv_cache import (
    KVCache,
    blocks_of,
    find,
    hold,
    n_free,
    publish,
    release,
)
from eldr_sim.simulator.plane.queues import line_add, line_remove, queue_add, queue_remove
from eldr_sim.simulator.plane.state import (
    BOUNDARY,
    HERE,
    PROMPT_END,
    TRANSFER_START,
    WORKER,
)

#: What a boundary leaves to be done, beside the request: see `loop.drain`.
PENDING_END, PENDING_HAND_OVER = np.int64(0), np.int64(1)
_NONE = np.int64(0)


class Engines(NamedTuple):
    """The arrays of all workers and their requests."""

    settings: NDArray[np.void]  #: ``SETTINGS [1]``
    pools: NDArray[np.void]  #: ``POOL [pools]``
    pool_of: NDArray[np.int64]  #: ``[workers]``
    workers: NDArray[np.void]  #: ``WORKER [workers]``
    sequences: NDArray[np.void]  #: ``SEQUENCE [workers, max_num_seqs]``
    requests: NDArray[np.void]  #: ``REQUEST [requests]``
    tables: NDArray[np.void]  #: ``BLOCK_TABLE [requests, 2]``, see `side_of`
    kv: KVCache
    pending: NDArray[np.int64]  #: ``[capacity, 2]``: what to do, request


# --- queues ---


@compiled()
def _append(requests: Any, worker: Any, request: int) -> None:
    """Put a request into the queue for those like it."""
    requests[request].next = -1
    if requests[request].kv_here:  # in the order in which their blocks were reserved
        before, behind = np.int64(-1), worker.arrived_head
        while behind >= 0 and requests[behind].ticket < requests[request].ticket:
            before, behind = behind, requests[behind].next
        requests[request].next = behind
        if before < 0:
            worker.arrived_head = request
        else:
            requests[before].next = request
    else:
        worker.n_queued += 1
        requests[request].ticket = worker.n_queued
        worker.new_head = queue_add(requests, worker.new_head, request)
        line_add(requests, worker, request)


@compiled()
def _append_late(requests: Any, worker: Any) -> None:
    """Queue those who came too late for the step that is scheduled."""
    request = worker.late_head
    while request >= 0:
        behind = requests[request].next
        _append(requests, worker, request)
        request = behind
    worker.late_head = -1


@compiled()
def wake(clock: Any, events: Any, workers: Any, w: int) -> None:
    """Schedule a boundary at the end of the step in progress, or now if the worker is idle."""
    at = max(clock[0].now, workers[w].next_start)
    if at != workers[w].wake:
        workers[w].wake = at
        schedule(clock, events, at, BOUNDARY, w)


@compiled()
def take(clock: Any, events: Any, engines: Engines, w: int, request: int) -> None:
    """Take a request: a new one, or one whose KV cache has arrived."""
    worker, requests = engines.workers[w], engines.requests
    if not requests[request].kv_here:
        worker.n_waiting += 1
        worker.waiting_tokens += requests[request].prompt_len + requests[request].generated
        requests[request].queued_s = clock[0].now
    busy = worker.batch + worker.prefilling > 0
    if engines.pools[engines.pool_of[w]].async_scheduling and busy:
        requests[request].next = -1
        if worker.late_head < 0:
            worker.late_head = request
        else:
            requests[worker.late_tail].next = request
        worker.late_tail = request
    else:
        _append(requests, worker, request)
    wake(clock, events, engines.workers, w)


@compiled()
def publish_signals(engines: Engines, first: int, n: int, signals: Any) -> None:
    """Fill in what the engines of ``n`` workers publish, ``SIGNALS [workers]``."""
    for w in range(first, first + n):
        worker, signal, pool = engines.workers[w], signals[w], engines.pools[engines.pool_of[w]]
        signal.waiting, signal.waiting_tokens = worker.n_waiting, worker.waiting_tokens
        signal.running = worker.batch + worker.prefilling + worker.leaving
        signal.running_tokens = worker.context + worker.leaving_tokens
        for k in range(worker.batch, worker.batch + worker.prefilling):
            sequence = engines.sequences[w, k]
            signal.running_tokens += sequence.computed + sequence.todo
        signal.kv_usage = 1.0 - n_free(engines.workers, w) / pool.n_blocks


# --- KV blocks ---


@compiled()
def side_of(engines: Engines, w: int) -> Any:
    """Return where a request's KV blocks on a worker stand: of its source, or where it decodes."""
    return np.int64(engines.pools[engines.pool_of[w]].then == HERE)


@compiled()
def _fits(engines: Engines, w: int, blocks: int) -> Any:
    """Whether ``blocks`` are free beside those that the batch needs for its next tokens."""
    spare, worker = n_free(engines.workers, w) - blocks, engines.workers[w]
    lookahead = engines.pools[engines.pool_of[w]].lookahead
    if spare >= worker.tokens + worker.batch * lookahead:  # a token needs one at most
        return True
    if spare < 0:
        return False
    return blocks_needed(engines, w) <= spare


@compiled()
def blocks_needed(engines: Engines, w: int) -> Any:
    """Return the KV blocks that the batch needs beside its own for the next step's tokens."""
    sequences, size, needed = engines.sequences[w], engines.settings[0].block_size, _NONE
    lookahead = engines.pools[engines.pool_of[w]].lookahead
    for i in range(engines.workers[w].batch):
        slots = slots_of(sequences[i], lookahead)
        if sequences[i].free_slots < slots:
            needed += blocks_of(slots - sequences[i].free_slots, size)
    return needed


@compiled()
def slots_of(sequence: Any, lookahead: int) -> Any:
    """Return the KV slots that a sequence needs for its next step (vLLM's ``allocate_slots``)."""
    return min(sequence.tokens + lookahead, sequence.room)


@compiled()
def _allocate(engines: Engines, w: int, request: int, tokens: int, fetches: bool) -> Any:
    """Take the KV blocks of a context of ``tokens`` tokens; return how many of them are cached.

    Who does not fetch them takes those of its first drafts, too. Returns -1, and changes nothing,
    if too few are free.
    """
    pool, side = engines.pool_of[w], side_of(engines, w)
    found, idle, size = _NONE, _NONE, engines.settings[0].block_size
    slots = tokens
    if not fetches:
        slots += 2 * engines.pools[pool].lookahead
        slots = min(slots, engines.settings[0].max_model_len)
    if engines.pools[pool].prefix_caching:
        prefix = engines.settings[0].prefix_block_tokens
        found, idle = find(engines.kv, w, side, request, tokens, size, prefix)
    new = blocks_of(slots, size) - found + engines.requests[request].window_blocks
    if not _fits(engines, w, new + idle):
        return -1
    engines.tables[request, side].found = found
    hold(engines.kv, engines.tables, engines.workers, w, side, request, new)
    return int(found * size)


@compiled()
def publish_tokens(engines: Engines, w: int, request: int, tokens: int) -> None:
    """Let other requests find the first ``tokens`` tokens of a context on worker ``w``."""
    if engines.pools[engines.pool_of[w]].prefix_caching:
        size, prefix = engines.settings[0].block_size, engines.settings[0].prefix_block_tokens
        side = side_of(engines, w)
        publish(engines.kv, engines.tables, engines.workers, w, side, request, tokens, size, prefix)


@compiled()
def _release_context(engines: Engines, w: int, request: int, slots: int) -> None:
    """Give the blocks of a sequence back that have room for ``slots`` tokens."""
    side = side_of(engines, w)
    table = engines.tables[request, side]
    held = blocks_of(slots, engines.settings[0].block_size)
    table.private = held + engines.requests[request].window_blocks - table.listed
    release(engines.kv, engines.tables, engines.workers, w, side, request)


# --- a boundary ---


@compiled()
def boundary(clock: Any, events: Any, engines: Engines, w: int) -> None:
    """Do what an engine does between two steps: end, preempt, admit, plan."""
    worker = engines.workers[w]
    worker.wake = -1.0
    worker.next_start = clock[0].now
    worker.computed_tokens = worker.begun_tokens
    if worker.ended:
        worker.ended = False
        if _only_prompts(engines, w):
            _end_prompts(clock, events, engines, w)
        else:
            _finish(clock, engines, w)
    if _is_idle(worker):
        _append_late(engines.requests, worker)  # no step has been scheduled yet
    defers = _defers_prompts(engines, w)
    if not _fits(engines, w, _NONE):
        _preempt(clock, engines, w)
        defers = defers and worker.batch > 0
        if not defers:
            _fill(engines, w)
        # Nobody is admitted in this step if there is one, but perhaps in the next.
        worker.one_step = _has_step(worker)
    if not worker.one_step:
        _admit(clock, events, engines, w, defers)
    if defers and _has_step(worker):
        worker.one_step = True  # look again before the next step
    if _has_step(worker):
        schedule_step(clock, events, engines.workers, w)
    if worker.late_head >= 0:
        _append_late(engines.requests, worker)
        if _has_step(worker):
            worker.one_step = True
        else:  # the last sequence was preempted: nothing is scheduled after all
            wake(clock, events, engines.workers, w)


@compiled()
def _defers_prompts(engines: Engines, w: int) -> Any:
    """Whether a group's engine leaves prompts alone in this step: others decode meanwhile."""
    pool, worker = engines.pools[engines.pool_of[w]], engines.workers[w]
    if pool.prefill_schedule_interval == 1 or worker.batch == 0:
        return False
    return engines.workers[worker.leader].n_group_steps % pool.prefill_schedule_interval != 0


@compiled()
def _is_idle(worker: Any) -> Any:
    """Whether the worker has nothing to do, but perhaps for who has just come."""
    waiting = max(worker.new_head, worker.arrived_head, worker.preempted_head)
    return bool(worker.batch + worker.prefilling == 0 and waiting < 0)


@compiled()
def _has_step(worker: Any) -> Any:
    return bool(worker.batch > 0 or worker.chunk_tokens > 0)


@compiled()
def leave(clock: Any, engines: Engines, what: int, request: int) -> None:
    """Leave something about a request to be done when the event is over: see `loop.drain`."""
    tail = clock[0].pending_tail
    engines.pending[tail, 0], engines.pending[tail, 1] = what, request
    clock[0].pending_tail = tail + 1


@compiled()
def _only_prompts(engines: Engines, w: int) -> Any:
    """Whether a worker computes prompts and nothing else."""
    return bool(engines.pools[engines.pool_of[w]].then != HERE)


@compiled()
def _end_prompts(clock: Any, events: Any, engines: Engines, w: int) -> None:
    """Take the sequences out whose prompts are computed; later stages may still have them.

    These keep their places until the last stage returns them, as in vLLM's batch queue.
    """
    worker, sequences = engines.workers[w], engines.sequences
    kept = 0
    for i in range(worker.prefilling):
        if sequences[w, i].todo == 0:
            request = sequences[w, i].request
            if worker.exit_s > clock[0].now:
                worker.leaving += 1
                worker.leaving_tokens += sequences[w, i].computed
                schedule(clock, events, worker.exit_s, PROMPT_END, request)
            else:
                end_prompt(clock, engines, w, request)
            continue
        if kept != i:
            sequences[w, kept] = sequences[w, i]
        kept += 1
    worker.prefilling = kept


@compiled()
def leave_stages(clock: Any, events: Any, engines: Engines, w: int, request: int) -> None:
    """Let a prompt leave the last stage: its place, and perhaps its KV blocks, are free."""
    worker, record = engines.workers[w], engines.requests[request]
    worker.leaving -= 1
    worker.leaving_tokens -= record.prompt_len + record.generated
    end_prompt(clock, engines, w, request)
    if worker.new_head >= 0:
        wake(clock, events, engines.workers, w)


@compiled()
def end_prompt(clock: Any, engines: Engines, w: int, request: int) -> None:
    """Hand a request over whose prompt is computed, or end it."""
    record = engines.requests[request]
    record.prefill_end_s = clock[0].now
    if engines.pools[engines.pool_of[w]].then >= 0:
        leave(clock, engines, PENDING_HAND_OVER, request)
        return
    record.first_token_s = record.finish_s = clock[0].now
    release(engines.kv, engines.tables, engines.workers, w, side_of(engines, w), request)
    leave(clock, engines, PENDING_END, request)


@compiled()
def _finish(clock: Any, engines: Engines, w: int) -> None:
    """Take the sequences out that have all their tokens; the others keep their order."""
    worker, sequences = engines.workers[w], engines.sequences
    kept = 0
    for i in range(worker.batch):
        if sequences[w, i].tokens_left == 0:
            request = sequences[w, i].request
            record = engines.requests[request]
            record.finish_s = clock[0].now
            if record.source < 0:  # it has computed its prompt here
                record.prefill_end_s = record.decode_start_s = record.first_token_s
            context = record.prompt_len - 1 + record.output_len
            worker.context -= context
            worker.tokens -= sequences[w, i].tokens
            _release_context(engines, w, request, context + sequences[w, i].free_slots)
            leave(clock, engines, PENDING_END, request)
            continue
        if kept != i:
            sequences[w, kept] = sequences[w, i]
        kept += 1
    gone = worker.batch - kept
    for i in range(worker.batch, worker.batch + worker.prefilling):
        sequences[w, i - gone] = sequences[w, i]
    worker.batch = kept


@compiled()
def _preempt(clock: Any, engines: Engines, w: int) -> None:
    """Take sequences back until the others have the blocks they need."""
    worker, sequences = engines.workers[w], engines.sequences
    while not _fits(engines, w, _NONE):
        victim = _victim(engines, w)
        request = sequences[w, victim].request
        worker.chunk_tokens -= sequences[w, victim].chunk
        record = engines.requests[request]
        if victim >= worker.batch:
            worker.prefilling -= 1
            release(engines.kv, engines.tables, engines.workers, w, side_of(engines, w), request)
        else:
            worker.batch -= 1
            worker.tokens -= sequences[w, victim].tokens
            record.generated = record.output_len - sequences[w, victim].tokens_left
            if victim > worker.batch - worker.joined:  # without a step since it joined
                worker.joined -= 1
            else:
                record.last_token_s = clock[0].now
            context = record.prompt_len - 1 + record.generated
            worker.context -= context
            _release_context(engines, w, request, context + sequences[w, victim].free_slots)
        for i in range(victim, worker.batch + worker.prefilling):
            sequences[w, i] = sequences[w, i + 1]
        record.preemptions += 1
        worker.n_waiting += 1
        worker.waiting_tokens += record.prompt_len + record.generated
        _append_preempted(engines, w, request)


@compiled()
def _victim(engines: Engines, w: int) -> Any:
    """Return the running sequence to preempt: the last one joined, or that of the highest key."""
    worker, sequences, requests = engines.workers[w], engines.sequences, engines.requests
    last = worker.batch + worker.prefilling - 1
    if not engines.pools[engines.pool_of[w]].preempt_by_key:
        return last
    victim = last
    for i in range(last):
        if _comes_first(requests, sequences[w, victim].request, sequences[w, i].request):
            victim = np.int64(i)
    return victim


@compiled()
def _comes_first(requests: Any, one: int, other: int) -> Any:
    """Whether a request comes before another in the queue order, then by arrival."""
    if requests[one].queue_key != requests[other].queue_key:
        return requests[one].queue_key < requests[other].queue_key
    return one < other


@compiled()
def _append_preempted(engines: Engines, w: int, request: int) -> None:
    """Put a request before the other preempted ones, or where its key belongs."""
    worker, requests = engines.workers[w], engines.requests
    before, behind = np.int64(-1), worker.preempted_head
    if engines.pools[engines.pool_of[w]].preempt_by_key:
        while behind >= 0 and _comes_first(requests, behind, request):
            before, behind = behind, requests[behind].next
    requests[request].next = behind
    if before < 0:
        worker.preempted_head = request
    else:
        requests[before].next = request


@compiled()
def _is_open(engines: Engines, w: int, drafts: int) -> Any:
    """Whether the next step has a place and tokens of its budget left: one, and ``drafts``."""
    worker, pool = engines.workers[w], engines.pools[engines.pool_of[w]]
    places = pool.max_num_seqs - worker.batch - worker.prefilling - worker.leaving
    budget = pool.max_num_batched_tokens - worker.tokens - worker.chunk_tokens
    return bool(places > 0 and budget > drafts)


@compiled()
def _admit(clock: Any, events: Any, engines: Engines, w: int, defers: bool) -> None:
    """Fill the batch: who holds blocks already, then who lost them, then who is new."""
    worker, requests, now = engines.workers[w], engines.requests, clock[0].now
    pool = engines.pools[engines.pool_of[w]]
    if not defers:
        _fill(engines, w)
    while worker.arrived_head >= 0 and _is_open(engines, w, pool.lookahead):
        request = worker.arrived_head
        if worker.batch + worker.prefilling > 0 and not _can_join(engines, w, request):
            return
        worker.arrived_head = requests[request].next
        requests[request].decode_start_s = now
        first = worker.batch
        for i in range(worker.batch + worker.prefilling, first, -1):
            engines.sequences[w, i] = engines.sequences[w, i - 1]
        context = requests[request].prompt_len + requests[request].generated - 1
        _begin(engines, w, first, request, context, context)
        worker.prefilling += 1
        _join(engines, w)
    by_key = pool.preempt_by_key
    while _is_open(engines, w, _NONE):
        lost, new = worker.preempted_head, worker.new_head
        if new >= 0 and now - requests[worker.oldest].queued_s >= pool.aging_s:
            new = worker.oldest
        if lost >= 0 and (not by_key or new < 0 or _comes_first(requests, lost, new)):
            if defers or not _admit_preempted(engines, w, lost):
                return  # nobody overtakes who is next
        elif new < 0 or (defers and requests[new].source < 0):
            return  # to fetch a KV cache computes nothing and is not put off
        elif not _admit_new(clock, events, engines, w, new):
            worker.blocked = pool.aging_s < np.inf and new != worker.oldest
            return


@compiled()
def _can_join(engines: Engines, w: int, request: int) -> Any:
    """Whether there are blocks for the drafts of a request whose KV cache has arrived."""
    lookahead, record = engines.pools[engines.pool_of[w]].lookahead, engines.requests[request]
    if lookahead == 0:
        return True
    size, context = engines.settings[0].block_size, record.prompt_len + record.generated - 1
    slots = min(context + 1 + 2 * lookahead, engines.settings[0].max_model_len)
    table = engines.tables[request, side_of(engines, w)]
    held = table.listed + table.private - record.window_blocks
    return _fits(engines, w, max(blocks_of(slots, size) - held, _NONE))


@compiled()
def _admit_preempted(engines: Engines, w: int, request: int) -> Any:
    """Let a preempted request recompute its context; False if its blocks are not free."""
    worker, record = engines.workers[w], engines.requests[request]
    context = record.prompt_len - 1 + record.generated
    cached = _allocate(engines, w, request, context + 1, False)
    if cached < 0:
        return False
    worker.preempted_head = record.next
    _begin(engines, w, worker.batch + worker.prefilling, request, cached, context)
    worker.prefilling += 1
    _fill(engines, w)
    return True


@compiled()
def _admit_new(clock: Any, events: Any, engines: Engines, w: int, request: int) -> Any:
    """Let a request compute its prompt, or fetch it; False if its blocks are not free."""
    worker, requests, now = engines.workers[w], engines.requests, clock[0].now
    pool = engines.pools[engines.pool_of[w]]
    prompt = requests[request].prompt_len + requests[request].generated
    if pool.whole_prompts and prompt > pool.max_num_batched_tokens - worker.chunk_tokens:
        return False
    cached = _allocate(engines, w, request, prompt, bool(requests[request].source >= 0))
    if cached < 0:
        return False
    worker.new_head = queue_remove(requests, worker.new_head, request)
    line_remove(requests, worker, request)
    if requests[request].source >= 0:  # fetch the KV cache into the blocks reserved for it
        requests[request].transfer_start_s = now
        requests[request].decode_cached_tokens = cached
        requests[request].ticket = clock[0].order
        settings = engines.settings[0]
        blocks = blocks_of(prompt - cached, settings.block_size)
        latency = settings.setup_s + blocks * pool.n_kv_tensors * pool.descriptor_s
        schedule(clock, events, now + latency, TRANSFER_START, request)
        return True
    requests[request].prefill_start_s = now
    requests[request].cached_tokens = cached
    context = prompt if _only_prompts(engines, w) else prompt - 1
    _begin(engines, w, worker.batch + worker.prefilling, request, cached, context)
    worker.prefilling += 1
    _fill(engines, w)
    return True


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
    sequence.tokens = 1
    if computed == context:  # padded to the size of the others (vLLM's placeholder drafts)
        sequence.tokens += engines.pools[engines.pool_of[w]].lookahead
    sequence.drafts = 0
    sequence.room = engines.settings[0].max_model_len - context
    sequence.tokens_left = record.output_len - record.generated
    table = engines.tables[request, side_of(engines, w)]
    held = table.listed + table.private - record.window_blocks
    sequence.free_slots = held * engines.settings[0].block_size - context
    sequence.computed = computed
    sequence.todo = context - computed
    sequence.chunk = 0


@compiled()
def _join(engines: Engines, w: int) -> None:
    """Let the first prefilling sequence decode in the next step."""
    worker = engines.workers[w]
    sequence = engines.sequences[w, worker.batch]
    worker.context += sequence.computed + sequence.todo
    worker.batch += 1
    worker.tokens += sequence.tokens
    worker.prefilling -= 1
    worker.joined += 1


@compiled()
def _fill(engines: Engines, w: int) -> None:
    """Fill the next step's token budget with contexts to compute, the one begun first."""
    worker, pool = engines.workers[w], engines.pools[engines.pool_of[w]]
    only_prompts = _only_prompts(engines, w)
    while True:
        i = worker.filled if only_prompts else worker.batch
        budget = pool.max_num_batched_tokens - worker.tokens - worker.chunk_tokens
        if i == worker.batch + worker.prefilling or budget <= 0:
            return
        sequence = engines.sequences[w, i]
        chunk = min(sequence.todo - sequence.chunk, budget)
        if chunk > 0:
            sequence.chunk += chunk
            worker.chunk_tokens += chunk
            publish_tokens(engines, w, sequence.request, sequence.computed + sequence.chunk)
        if sequence.chunk < sequence.todo:
            return
        if only_prompts:
            worker.filled += 1
        elif chunk + sequence.tokens > budget:  # too little left for what it decodes
            return
        else:
            _join(engines, w)


# --- from outside ---


def make_workers(pools: NDArray[np.void], pool_of: NDArray[np.int64]) -> NDArray[np.void]:
    """Return workers as they begin, ``WORKER [workers]``: without requests and KV contents."""
    workers = np.zeros(len(pool_of), WORKER)
    workers["n_blank"] = pools["n_blocks"][pool_of]
    workers["slowdown"] = 1.0
    size, first = pools["group_size"][pool_of], pools["first_worker"][pool_of]
    workers["leader"] = first + (np.arange(len(pool_of)) - first) // size * size
    for name in ("wake", "spare", "idle_head", "idle_tail", "new_head", "oldest", "newest",
                 "arrived_head", "preempted_head", "late_head"):  # fmt: skip
        workers[name] = -1
    return workers
