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
  not in the prefix cache are fetched. Requests whose KV cache has arrived come before others. Where
  blocks are reserved early, a prompt goes to who computes it when it has them (SGLang).
- With asynchronous scheduling the next step is scheduled when one starts, so a request that comes
  meanwhile joins the one after.

- Other engines are values of this one (`setup.engines`): prompts alone in a step while the others
  sit out, polls every few steps, prompts that wait for others, prompts that are computed whole,
  blocks reserved for tokens to come, other victims.

There is one engine; a request says where its KV cache comes from, and the pool of its worker who
goes on when a prompt is computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.simulator.plane import kv_loads
from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.events import schedule, schedule_step
from eldr_sim.simulator.plane.kv_cache import blocks_of, n_free, release
from eldr_sim.simulator.plane.kv_loads import WAITS
from eldr_sim.simulator.plane.kv_manager import (
    Engines,
    allocate,
    cached_tokens,
    can_join,
    fits,
    keep_tokens,
    publish_tokens,
    release_context,
    side_of,
)
from eldr_sim.simulator.plane.queues import line_add, line_remove, queue_add, queue_remove
from eldr_sim.simulator.plane.state import (
    BOUNDARY,
    HERE,
    LOADED,
    OF_SHARE,
    PROMPT_END,
    TO_THE_END,
    TRANSFER_START,
    WORKER,
)

#: What a boundary leaves to be done, beside the request: see `loop.drain`.
PENDING_END, PENDING_HAND_OVER, PENDING_PROMPT = map(np.int64, (0, 1, 4))
_NONE = np.int64(0)
_RETRACTED = np.int64(20)  # tokens that SGLang reserves for each sequence when it retracts some


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
    pool = engines.pools[engines.pool_of[w]]
    if (pool.async_scheduling or pool.poll_steps > 1) and busy:
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


# --- a boundary ---


@compiled()
def boundary(clock: Any, events: Any, engines: Engines, w: int) -> None:
    """Do what an engine does between two steps: end, preempt, admit, plan."""
    worker, pool = engines.workers[w], engines.pools[engines.pool_of[w]]
    worker.wake = -1.0
    worker.next_start = clock[0].now
    worker.computed_tokens = worker.begun_tokens
    if worker.ended:
        worker.ended = False
        if _only_prompts(engines, w):
            _end_prompts(clock, events, engines, w)
        else:
            _finish(clock, engines, w)
    balances = pool.balance_steps > 0 and _waits_for_engines(engines, w)
    if _is_idle(worker):
        worker.share = pool.first_share
        _append_late(engines.requests, worker)  # no step has been scheduled yet
    defers = balances or _defers_prompts(engines, w)
    if pool.mixed_steps and not fits(engines, w, _NONE):
        _preempt(clock, engines, w)
        defers = defers and worker.batch > 0
        if not defers:
            _fill(engines, w)
        # Nobody is admitted in this step if there is one, but perhaps in the next.
        worker.one_step = _has_step(worker)
    if not worker.one_step:
        _admit(clock, events, engines, w, defers)
    if not pool.mixed_steps and worker.joined == 0 and worker.chunk_tokens == 0:
        _preempt(clock, engines, w)  # a step of prompts needs nothing for those that decode
    if defers and _has_step(worker):
        worker.one_step = True  # look again before the next step
    if _has_step(worker):
        schedule_step(clock, events, engines.workers, w)
    if worker.late_head >= 0:
        if worker.polled % pool.poll_steps == 0 or not _has_step(worker):
            _append_late(engines.requests, worker)
        if _has_step(worker):
            worker.one_step = True
        else:  # the last sequence was preempted: nothing is scheduled after all
            wake(clock, events, engines.workers, w)


@compiled()
def _defers_prompts(engines: Engines, w: int) -> Any:
    """Whether an engine leaves prompts alone in this step: others decode meanwhile."""
    pool, worker = engines.pools[engines.pool_of[w]], engines.workers[w]
    if worker.batch == 0:
        return False
    if pool.wait_steps > 0:
        return _waits_for_others(engines, w)
    if pool.prefill_schedule_interval == 1:
        return False
    return engines.workers[worker.leader].n_group_steps % pool.prefill_schedule_interval != 0


@compiled()
def _waits_for_others(engines: Engines, w: int) -> Any:
    """Whether prompts wait for more to compute with (TensorRT-LLM's batch_wait_timeout_iters).

    They do so for as many steps, until the step's tokens reach the share of its budget.
    """
    pool, worker, requests = engines.pools[engines.pool_of[w]], engines.workers[w], engines.requests
    budget, places = _budget(engines, w), pool.max_num_seqs - worker.batch - worker.prefilling
    tokens, request = _NONE, worker.oldest
    for i in range(worker.batch, worker.batch + worker.prefilling):
        tokens += min(engines.sequences[w, i].todo, budget - tokens)
    size, free = engines.settings[0].block_size, n_free(engines.workers, w)
    while request >= 0 and places > 0 and tokens + requests[request].prompt_len <= budget:
        held = requests[request].prompt_len
        if pool.reserve == TO_THE_END:
            held += requests[request].output_len
        free -= blocks_of(held, size)
        if free < 0:
            break
        tokens += requests[request].prompt_len
        request, places = requests[request].newer, places - 1
    if tokens == 0:
        return False
    if worker.waited < pool.wait_steps and worker.tokens + tokens < pool.wait_tokens:
        worker.waited += 1
        return True
    worker.waited = 0
    return False


@compiled()
def _waits_for_engines(engines: Engines, w: int) -> Any:
    """Whether prompts wait until all engines of the group have some and a place for them.

    They do so for ``balance_steps`` steps at most, counting the one that goes on, and for
    ``batching_steps`` once all have some, unless an engine decodes nothing (TensorRT-LLM's
    ``_balance_adp_requests``, `pyexecutor/py_executor.py`). The first engine that comes to the
    group's next step decides for all, when none of them has taken anybody in.
    """
    pool, workers = engines.pools[engines.pool_of[w]], engines.workers
    leader = workers[workers[w].leader]
    if leader.balanced_step == leader.n_group_steps:
        return leader.balances
    leader.balanced_step = leader.n_group_steps
    all_have, all_decode = True, True
    for member in range(workers[w].leader, workers[w].leader + leader.width):
        worker, decoding = workers[member], _NONE
        for i in range(worker.batch):
            decoding += engines.sequences[member, i].tokens_left > 0
        has = worker.prefilling > 0 or max(worker.new_head, worker.preempted_head) >= 0
        all_have = all_have and has and decoding < pool.max_num_seqs
        all_decode = all_decode and bool(decoding > 0)
    leader.balances = False
    if not all_have:
        leader.waited += 1
        leader.balances = all_decode and leader.waited < pool.balance_steps
    elif all_decode:
        leader.balances = leader.batched < pool.batching_steps
        leader.batched = leader.batched + 1 if leader.balances else 0
    if all_have or not leader.balances:
        leader.waited = 0
    return leader.balances


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
            publish_tokens(engines, w, request, context)
            keep_tokens(engines, w, request, context, clock[0].now)
            release_context(engines, w, request, context + sequences[w, i].free_slots)
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
    worker, sequences, preempts = engines.workers[w], engines.sequences, False
    while not fits(engines, w, _NONE):
        preempts = True
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
            elif victim < worker.rested:  # without a token for longer
                worker.rested -= 1
            else:
                record.last_token_s = clock[0].now
            context = record.prompt_len - 1 + record.generated
            worker.context -= context
            publish_tokens(engines, w, request, context)
            keep_tokens(engines, w, request, context, clock[0].now)
            release_context(engines, w, request, context + sequences[w, victim].free_slots)
        for i in range(victim, worker.batch + worker.prefilling):
            sequences[w, i] = sequences[w, i + 1]
        record.preemptions += 1
        worker.n_waiting += 1
        worker.waiting_tokens += record.prompt_len + record.generated
        _append_preempted(engines, w, request)
    if preempts and engines.pools[engines.pool_of[w]].reserve == OF_SHARE:
        _raise_share(engines, w)


@compiled()
def _raise_share(engines: Engines, w: int) -> None:
    """Reserve as much as the running sequences have needed so far, and 20 tokens of each more."""
    worker, got, wanted = engines.workers[w], 0.0, 1.0
    for i in range(worker.batch):
        most = engines.requests[engines.sequences[w, i].request].output_len
        got += float(most - engines.sequences[w, i].tokens_left + _RETRACTED)
        wanted += float(most)
    worker.share = min(1.0, got / wanted)


@compiled()
def _victim(engines: Engines, w: int) -> Any:
    """Return the running sequence to preempt.

    The last one joined, that of the highest key, or, where one stays, that of the fewest outputs,
    of equal ones the one of the longest prompt.
    """
    worker, sequences, requests = engines.workers[w], engines.sequences, engines.requests
    last = worker.batch + worker.prefilling - 1
    victim = last
    if engines.pools[engines.pool_of[w]].fewest_first and worker.batch > 1:
        victim, fewest, longest = _NONE, np.int64(-1), _NONE
        for i in range(worker.batch):
            record = requests[sequences[w, i].request]
            outputs, prompt = record.output_len - sequences[w, i].tokens_left, record.prompt_len
            if fewest < 0 or outputs < fewest or (outputs == fewest and prompt > longest):
                victim, fewest, longest = np.int64(i), outputs, prompt
        return victim
    if not engines.pools[engines.pool_of[w]].preempt_by_key:
        return last
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
def _comes_back_first(engines: Engines, w: int, lost: int, new: int) -> Any:
    """Whether who was preempted comes before who is new: by key, or by when it was queued."""
    requests, pool = engines.requests, engines.pools[engines.pool_of[w]]
    if pool.preempt_by_key:
        return _comes_first(requests, lost, new)
    return requests[lost].ticket < requests[new].ticket


@compiled()
def _append_preempted(engines: Engines, w: int, request: int) -> None:
    """Put a request before the other preempted ones, behind all, or where its key belongs."""
    worker, requests, pool = engines.workers[w], engines.requests, engines.pools[engines.pool_of[w]]
    before, behind = np.int64(-1), worker.preempted_head
    if pool.fewest_first:
        worker.n_queued += 1
        requests[request].ticket = worker.n_queued
        while behind >= 0:
            before, behind = behind, requests[behind].next
    elif pool.preempt_by_key:
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
    return bool(places > 0 and _budget(engines, w) > drafts)


@compiled()
def _budget(engines: Engines, w: int) -> Any:
    """Return the tokens that the next step has room for; of its own who sits out takes none."""
    worker, pool = engines.workers[w], engines.pools[engines.pool_of[w]]
    tokens = worker.tokens if pool.mixed_steps else worker.joined
    return pool.max_num_batched_tokens - tokens - worker.chunk_tokens


@compiled()
def _admit(clock: Any, events: Any, engines: Engines, w: int, defers: bool) -> None:
    """Fill the batch: who holds blocks already, then who lost them, then who is new."""
    worker, requests, now = engines.workers[w], engines.requests, clock[0].now
    pool = engines.pools[engines.pool_of[w]]
    if not defers:
        _fill(engines, w)
    while worker.arrived_head >= 0 and _is_open(engines, w, pool.lookahead):
        request = worker.arrived_head
        if worker.batch + worker.prefilling > 0 and not can_join(engines, w, request):
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
        _join(engines, w)
        if with_token:
            _carry_on(engines, w)
    by_key = pool.preempt_by_key or pool.fewest_first
    if worker.loading_head >= 0 and not defers and not _admit_loaded(clock, events, engines, w):
        return
    while _is_open(engines, w, _NONE):
        lost, new = worker.preempted_head, worker.new_head
        if new >= 0 and now - requests[worker.oldest].queued_s >= pool.aging_s:
            new = worker.oldest
        if lost >= 0 and (not by_key or new < 0 or _comes_back_first(engines, w, lost, new)):
            if defers or not _admit_preempted(clock, events, engines, w, lost):
                worker.blocked = worker.blocked or pool.reserve == OF_SHARE
                return  # nobody overtakes who is next
        elif new < 0 or (defers and not _fetches(engines, w, new)):
            return  # to fetch a KV cache computes nothing and is not put off
        elif not _admit_new(clock, events, engines, w, new):
            worker.blocked = pool.aging_s < np.inf and new != worker.oldest
            worker.blocked = (
                worker.blocked or pool.reserve == OF_SHARE
            )  # which falls with each step
            return


@compiled()
def _admit_preempted(clock: Any, events: Any, engines: Engines, w: int, request: int) -> Any:
    """Let a preempted request recompute its context; False if its blocks are not free."""
    worker, record = engines.workers[w], engines.requests[request]
    cached = allocate(engines, w, request, record.prompt_len + record.generated, False)
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
            cached = allocate(engines, w, request, tokens, False)
            if cached == -1:
                return False
        if before < 0:
            worker.loading_head = at
        else:
            requests[before].next = at
        _compute(clock, events, engines, w, request, cached)
    return True


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
    if not _only_prompts(engines, w):
        context -= 1
    _begin(engines, w, worker.batch + worker.prefilling, request, cached, context)
    worker.prefilling += 1
    _fill(engines, w)


@compiled()
def blocks_have_come(clock: Any, events: Any, engines: Engines, request: int) -> None:
    """Let a request whose KV blocks have come from tiers begin, with who waited for them."""
    load, w = engines.kv.tiers.loads[request], engines.requests[request].worker
    if load.loading and load.until_s == clock[0].now:
        kv_loads.have_come(engines, w, side_of(engines, w), request)
        wake(clock, events, engines.workers, w)


@compiled()
def blocks_are_pulled(clock: Any, events: Any, engines: Engines, request: int) -> None:
    """Let the blocks be here that a request pulls from a decode worker, which needs hold them no
    longer."""
    load, w = engines.kv.tiers.loads[request], engines.requests[request].worker
    load.pulling = False
    release(
        engines.kv, engines.tables, engines.workers, load.peer, side_of(engines, load.peer), request
    )
    if engines.workers[load.peer].new_head >= 0:
        wake(clock, events, engines.workers, load.peer)
    if load.until_s < 0.0:
        kv_loads.have_come(engines, w, side_of(engines, w), request)
        wake(clock, events, engines.workers, w)


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
def _admit_new(clock: Any, events: Any, engines: Engines, w: int, request: int) -> Any:
    """Let a request compute its prompt, or fetch it; False if its blocks are not free."""
    worker, requests = engines.workers[w], engines.requests
    pool, fetches = engines.pools[engines.pool_of[w]], _fetches(engines, w, request)
    prompt = requests[request].prompt_len + requests[request].generated
    whole = pool.whole_prompts and not fetches
    if whole and prompt - cached_tokens(engines, w, request, prompt) > _budget(engines, w):
        return False
    cached = allocate(engines, w, request, prompt, fetches)
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
    sequence.output_len = record.output_len
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
def _carry_on(engines: Engines, w: int) -> None:
    """Let the sequence that joined last stand before others that join: it has its first token."""
    worker, sequences = engines.workers[w], engines.sequences
    worker.joined -= 1
    at, new = worker.batch - 1 - worker.joined, worker.batch - 1
    spare = worker.batch + worker.prefilling
    sequences[w, spare] = sequences[w, new]
    for i in range(new, at, -1):
        sequences[w, i] = sequences[w, i - 1]
    sequences[w, at] = sequences[w, spare]


@compiled()
def _fill(engines: Engines, w: int) -> None:
    """Fill the next step's token budget with contexts to compute, the one begun first."""
    worker, only_prompts = engines.workers[w], _only_prompts(engines, w)
    while True:
        i = worker.filled if only_prompts else worker.batch
        budget = _budget(engines, w)
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
    workers["share"] = pools["first_share"][pool_of]
    size, first = pools["group_size"][pool_of], pools["first_worker"][pool_of]
    workers["width"] = size
    workers["leader"] = first + (np.arange(len(pool_of)) - first) // size * size
    for name in ("wake", "spare", "idle_head", "idle_tail", "new_head", "oldest", "newest",
                 "arrived_head", "preempted_head", "loading_head", "late_head",
                 "balanced_step"):  # fmt: skip
        workers[name] = -1
    return workers
