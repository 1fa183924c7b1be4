"""The engine of a worker: vLLM's v1 scheduler (``vllm/v1/core/sched/scheduler.py``), compiled.

At a step boundary the engine takes out what has ended, gives running sequences the KV blocks that
their next tokens need, admits waiting requests, and so plans the next step: sequences that get
their next token, and chunks of contexts that are still being computed.

- A request is admitted, first come or in a queue order, which may let the oldest go first when it
  has waited long enough, if there is a place in the batch, a token of the step's budget, and free
  KV blocks for its whole prompt, of which it takes those of each chunk as that is scheduled; no
  request passes the next in the order.
- Running sequences come first. When blocks lack, the one that joined last, or of the lowest
  priority, is preempted: it goes to the front of the queue, or by its priority, and recomputes its
  context; no request is admitted in that step.
- A context is computed in chunks, as the token budget allows. Its last token is decoded, in the
  step of its last chunk, except on a prefill worker, which hands the request over or ends it.
- With a KV connector blocks are reserved before the transfer starts, and only those that are not
  cached are fetched; requests with an arrived KV cache come before others. Where blocks are
  reserved early, a prompt goes to its prefill worker when it has them (SGLang).
- With asynchronous scheduling the next step is scheduled when one starts: requests that come
  meanwhile join the one after, and completed sequences keep their places and blocks until it has
  been scheduled. Other engines are values of this one (`setup.engines`)."""

from typing import Any

import numpy as np

from eldr_sim.arrays import Ints, Records
from eldr_sim.simulator.plane import state
from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.events import leave, schedule, schedule_step, wake
from eldr_sim.simulator.plane.kv import kv_manager
from eldr_sim.simulator.plane.kv.kv_cache import blocks_of, n_free, release
from eldr_sim.simulator.plane.scheduler.admission import admit, what_stopped
from eldr_sim.simulator.plane.scheduler.chunks import budget_left, decodes_in_turn
from eldr_sim.simulator.plane.scheduler.preemption import (
    goes_before,
    lacks_blocks,
    preempt,
    retract,
    unprocessed,
)
from eldr_sim.simulator.plane.scheduler.queues import line_add, queue_add, waits_for_blocks
from eldr_sim.simulator.plane.steps.executor import has_step

_NONE = np.int64(0)


@compiled()
def defers_prompts(engines: kv_manager.Engines, w: int) -> Any:
    """Whether an engine leaves prompts alone in this step: others decode meanwhile."""
    pool, worker = engines.pools[engines.pool_of[w]], engines.workers[w]
    if worker.batch + worker.riding == 0:
        return False
    if pool.wait_steps > 0:
        return _waits_for_others(engines, w)
    if pool.prefill_schedule_interval == 1:
        return False
    return engines.workers[worker.leader].n_group_steps % pool.prefill_schedule_interval != 0


@compiled()
def _waits_for_others(engines: kv_manager.Engines, w: int) -> Any:
    """Whether prompts wait, so many steps, for more to compute with, until tokens reach the share
    of the step's budget (TensorRT-LLM's batch_wait_timeout_iters)."""
    pool, worker, requests = engines.pools[engines.pool_of[w]], engines.workers[w], engines.requests
    budget, places = budget_left(engines, w), pool.max_num_seqs - worker.batch - worker.prefilling
    tokens, request = _NONE, worker.oldest
    for i in range(worker.batch, worker.batch + worker.prefilling):
        tokens += min(engines.sequences[w, i].todo, budget - tokens)
    size, free = engines.settings[0].block_size, n_free(engines.workers, w)
    while request >= 0 and places > 0 and tokens + requests[request].prompt_len <= budget:
        held = requests[request].prompt_len
        if pool.reserve == state.TO_THE_END:
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
def waits_for_engines(engines: kv_manager.Engines, w: int) -> Any:
    """Whether prompts wait until all engines of the group have some and a place for them.

    For ``balance_steps`` steps at most, counting the one that goes on, and ``batching_steps`` once
    all have some, unless an engine decodes nothing (TensorRT-LLM's ``_balance_adp_requests``,
    `pyexecutor/py_executor.py`). The first engine that comes to the group's next step decides for
    all."""
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


# --- queues ---


@compiled()
def _append(engines: kv_manager.Engines, w: int, request: int) -> None:
    """Put a request into the queue for those like it."""
    requests, worker = engines.requests, engines.workers[w]
    requests[request].next = -1
    if requests[request].kv_here:  # in the queue order, or in that of their reserved blocks
        before, behind = np.int64(-1), worker.arrived_head
        while behind >= 0 and goes_before(engines, w, behind, request):
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
def _append_late(engines: kv_manager.Engines, w: int) -> None:
    """Queue the requests that came too late for the step that is scheduled."""
    worker = engines.workers[w]
    request = worker.late_head
    while request >= 0:
        behind = engines.requests[request].next
        _append(engines, w, request)
        request = behind
    worker.late_head = -1


@compiled()
def take(clock: Any, events: Any, engines: kv_manager.Engines, w: int, request: int) -> None:
    """Take a request: a new one, or one with a KV cache that has arrived."""
    worker, requests = engines.workers[w], engines.requests
    if not requests[request].kv_here:
        worker.n_waiting += 1
        worker.waiting_tokens += requests[request].prompt_len + requests[request].generated
        requests[request].queued_s = clock[0].now
    busy = worker.batch + worker.prefilling + worker.riding > 0
    busy = busy or worker.next_start > clock[0].now
    pool = engines.pools[engines.pool_of[w]]
    if (pool.async_scheduling or pool.poll_steps > 1) and busy:
        requests[request].next = -1
        if worker.late_head < 0:
            worker.late_head = request
        else:
            requests[worker.late_tail].next = request
        worker.late_tail = request
    else:
        _append(engines, w, request)
    wake(clock, events, engines.workers, w)


@compiled()
def publish_signals(engines: kv_manager.Engines, first: int, n: int, signals: Any) -> None:
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
def boundary(
    clock: Any, events: Any, engines: kv_manager.Engines, w: int, log: Any, gaps: Any
) -> None:  # fmt: skip
    """Do what an engine does between two steps: end, preempt, admit, plan."""
    worker, pool = engines.workers[w], engines.pools[engines.pool_of[w]]
    worker.wake = -1.0
    worker.next_start, worker.planned = clock[0].now, True
    worker.computed_tokens = worker.begun_tokens
    if worker.ended:
        worker.ended = False
        if kv_manager.only_prompts(engines, w):
            _end_prompts(clock, events, engines, w)
        else:
            _finish(clock, engines, w)
    if pool.caches_late:
        _publish_known(engines, w, not pool.frees_late)
    balances = pool.balance_steps > 0 and waits_for_engines(engines, w)
    if pool.fills_up:
        _open_batch(engines, w)
    elif _is_idle(worker):
        _free_ended(clock, engines, w)
        worker.share = pool.first_share
        _append_late(engines, w)  # no step has been scheduled yet
    defers = balances or defers_prompts(engines, w)
    in_turn = decodes_in_turn(pool) and (
        worker.prefilling > 0 or pool.long_prefill_token_threshold > 0
    )
    if engines.kv.groups > 0:  # windows move
        in_turn = in_turn or not kv_manager.slide_batch(engines, w)
    mixed = pool.mixed_steps and not pool.fills_up
    while mixed and (in_turn or lacks_blocks(engines, w, not (defers or worker.one_step))):
        if not preempt(clock, engines, w, not (defers or worker.one_step)):
            break
        # No request is admitted in this step if there is one; else the engine replans at once.
        worker.one_step, worker.stopped = has_step(worker), what_stopped(engines, w, defers)
        if worker.one_step:
            break
        defers = defers and worker.batch > 0
        _free_ended(clock, engines, w)
        _append_late(engines, w)
        for i in range(worker.batch + worker.prefilling):  # their outputs are known now
            sequence = engines.sequences[w, i]
            sequence.got = sequence.rejected = sequence.flying = 0
            sequence.slides_at = sequence.output_len
    if mixed:
        kv_manager.take_all_slots(engines, w)
    if not worker.one_step:
        admit(clock, events, engines, w, defers)
        none = not has_step(worker) and worker.ended_places == 0
        if none and (worker.full or worker.unfiltered > 0):
            worker.unfiltered = 0
            _open_batch(engines, w)  # nothing is launched, and the loop goes round once more
            admit(clock, events, engines, w, defers)
        worker.stopped = what_stopped(engines, w, defers)
    if pool.fills_up:
        _close_batch(clock, engines, w, log, gaps)
    elif not pool.mixed_steps and worker.joined == 0 and worker.chunk_tokens == 0:
        preempt(clock, engines, w, False)  # a step of prompts needs nothing for those that decode
    if defers and has_step(worker):
        worker.one_step = True  # look again before the next step
    if has_step(worker):
        schedule_step(clock, events, engines.workers, w)
    if pool.caches_late and pool.frees_late:
        _publish_known(engines, w, True)
    if worker.ended_places > 0 or max(worker.ended_head, worker.fetched_head) >= 0:
        if pool.fills_up and kv_manager.only_prompts(engines, w):
            _free_prompts(engines, w)
        else:
            _free_ended(clock, engines, w)
        if has_step(worker):
            worker.one_step = True  # others may take their places in the step after it
        else:
            wake(clock, events, engines.workers, w)
    if worker.late_head >= 0:
        if _looks(worker, pool) or not has_step(worker):
            _append_late(engines, w)
        if has_step(worker):
            worker.one_step = True
        else:  # the last sequence was preempted: nothing is scheduled after all
            wake(clock, events, engines.workers, w)


@compiled()
def _open_batch(engines: kv_manager.Engines, w: int) -> None:
    """Let SGLang admit requests again where a chunk has left the last batch
    (`get_next_batch_to_run`), or nothing runs and its loop goes round once more."""
    worker = engines.workers[w]
    if worker.prefilling > 0 or kv_manager.only_prompts(engines, w):
        worker.full = False
    if worker.batch + worker.prefilling + worker.riding + worker.ended_places > 0:
        return
    waiting = waits_for_blocks(worker)
    if worker.full or not waiting:
        if not waiting and worker.late_head < 0:
            worker.share = engines.pools[engines.pool_of[w]].first_share
        worker.full, worker.unfiltered = False, 0
        _append_late(engines, w)


@compiled()
def _close_batch(
    clock: Any, engines: kv_manager.Engines, w: int, log: Any, gaps: Any
) -> None:  # fmt: skip
    """Let those leave SGLang's batch that have ended before the last step, when a step of decoding
    is planned, those of the last step ride in it, and some be retracted for others' KV
    (`update_running_batch`). Prompts beside no running sequences are a new batch, and with mixed
    chunks prompts and all that runs are."""
    worker, mixed = engines.workers[w], engines.pools[engines.pool_of[w]].mixed_steps
    if kv_manager.plans_prompts(worker):
        worker.full = worker.full and kv_manager.n_held(worker) > 0 and not mixed
        worker.blocked = True  # others may leave in the step after it
        if kv_manager.takes_late(engines, w):
            kv_manager.take_for_prompts(engines, w)
        if mixed:  # all that runs is in the batch with them
            _let_ride(worker)
            worker.unfiltered = 0
            retract(clock, engines, w, log, gaps)
        return
    if kv_manager.only_prompts(engines, w):
        return
    leaves = not worker.one_step and worker.unfiltered > 0  # else it has been planned already
    _let_ride(worker)
    if retract(clock, engines, w, log, gaps) or leaves:
        worker.full = False
        worker.unfiltered = worker.unfiltered if worker.one_step else _NONE
        worker.one_step = has_step(worker)  # others are looked at before the step after it


@compiled()
def _let_ride(worker: Any) -> None:
    """Let the sequences that the last step has ended ride in the next one."""
    if worker.ended_places > 0:
        worker.riding = worker.riding_tokens = worker.ended_places


@compiled()
def _publish_known(engines: kv_manager.Engines, w: int, prompts: bool) -> None:
    """Let others find the chunks of contexts that are still being computed and, where the output
    of the last step has been processed, the ``prompts`` (SGLang's `cache_unfinished_req`)."""
    worker = engines.workers[w]
    for i in range(worker.batch + worker.prefilling):
        request = engines.sequences[w, i].request
        known = engines.sequences[w, i].computed
        if i < worker.batch:
            prompts = prompts and i < worker.batch - worker.joined
            known = known + 1 if prompts else _NONE  # all that it computed before it decoded
        kv_manager.publish_tokens(engines, w, request, known)


@compiled()
def _looks(worker: Any, pool: Any) -> Any:
    """Whether the engine looks for requests now, a step having been planned, as SGLang's overlapped
    loop does; a step of prompts lets it look at once, for those that came before
    (`SchedulerRecvSkipper`)."""
    polled = worker.polled
    if pool.async_scheduling:
        polled = np.int64(0) if kv_manager.plans_prompts(worker) else polled + 1
    return bool(polled % pool.poll_steps == 0)


@compiled()
def _is_idle(worker: Any) -> Any:
    """Whether the worker has nothing to do, but perhaps for who has just come."""
    waiting = max(worker.new_head, worker.arrived_head, worker.preempted_head)
    running = worker.batch + worker.prefilling + worker.riding
    return bool(running == 0 and waiting < 0)


@compiled()
def _end_prompts(clock: Any, events: Any, engines: kv_manager.Engines, w: int) -> None:
    """Take out sequences whose prompts are computed; places stay until the last stage."""
    worker, sequences = engines.workers[w], engines.sequences
    pool, kept = engines.pools[engines.pool_of[w]], 0
    frees_late = pool.frees_late
    for i in range(worker.prefilling):
        if sequences[w, i].todo == 0:
            request = sequences[w, i].request
            if not (pool.fills_up and frees_late and worker.exit_s <= clock[0].now):
                kv_manager.publish_tokens(engines, w, request, sequences[w, i].computed)
            if pool.then >= 0:
                kv_manager.slide_context(engines, w, request, sequences[w, i].computed)
            if worker.exit_s > clock[0].now:
                worker.leaving += 1
                worker.leaving_tokens += sequences[w, i].computed
                schedule(clock, events, worker.exit_s, state.PROMPT_END, request)
            else:
                worker.ended_places += frees_late
                engines.requests[request].ticket = sequences[w, i].ticket  # while it waits
                end_prompt(clock, engines, w, request, frees_late)
            continue
        if kept != i:
            sequences[w, kept] = sequences[w, i]
        kept += 1
    worker.prefilling = kept


@compiled()
def leave_stages(
    clock: Any, events: Any, engines: kv_manager.Engines, w: int, request: int
) -> None:
    """Let a prompt leave the last stage: its place, and perhaps its KV blocks, are free."""
    worker, record = engines.workers[w], engines.requests[request]
    worker.leaving -= 1
    worker.leaving_tokens -= record.prompt_len + record.generated
    end_prompt(clock, engines, w, request, False)
    if waits_for_blocks(worker):
        wake(clock, events, engines.workers, w)


@compiled()
def end_prompt(
    clock: Any, engines: kv_manager.Engines, w: int, request: int, frees_late: bool
) -> None:
    """Hand over a request with a computed prompt, or end it."""
    record, pool = engines.requests[request], engines.pools[engines.pool_of[w]]
    record.prefill_end_s = clock[0].now
    if pool.then >= 0:
        if pool.fills_up and frees_late:
            _release(engines, w, request, True)
        leave(clock, engines, state.PENDING_HAND_OVER, request)
        return
    record.first_token_s = record.finish_s = clock[0].now
    _release(engines, w, request, frees_late)
    leave(clock, engines, state.PENDING_END, request)


@compiled()
def _release(engines: kv_manager.Engines, w: int, request: int, late: bool) -> None:
    """Release the KV blocks of a completed request, now or when the next step is planned."""
    if late:
        engines.requests[request].next = engines.workers[w].ended_head
        engines.workers[w].ended_head = request
    else:
        side = kv_manager.side_of(engines, w)
        release(engines.kv, engines.tables, engines.workers, w, side, request)


@compiled()
def _free_ended(clock: Any, engines: kv_manager.Engines, w: int) -> None:
    """Free the places and KV blocks of the sequences that the last step completed."""
    worker, side = engines.workers[w], kv_manager.side_of(engines, w)
    pool, before = engines.pools[engines.pool_of[w]], _in_order(engines, w)
    while before >= 0:
        behind = np.int64(engines.requests[before].next)
        record = engines.requests[before]
        if pool.fills_up:
            _end(clock, engines, before)
        if not kv_manager.only_prompts(engines, w):
            context = record.prompt_len - 1 + record.output_len
            context += pool.fills_up and worker.riding > 0  # with the token that it rides for
            kv_manager.publish_tokens(engines, w, before, context)
        release(engines.kv, engines.tables, engines.workers, w, side, before)
        before = behind
    if pool.fills_up and not (pool.mixed_steps and kv_manager.plans_prompts(worker)):
        worker.unfiltered += worker.ended_places
    worker.ended_head, worker.ended_places = np.int64(-1), np.int64(0)


@compiled()
def _in_order(engines: kv_manager.Engines, w: int) -> Any:
    """Return the first of the sequences that the last step completed; the last one stood first."""
    before: Any = np.int64(-1)
    at: Any = np.int64(engines.workers[w].ended_head)
    while at >= 0:
        behind = np.int64(engines.requests[at].next)
        engines.requests[at].next = before
        before, at = at, behind
    return before


@compiled()
def _free_prompts(engines: kv_manager.Engines, w: int) -> None:
    """Let others find the prompts that the last step of an SGLang's prefill worker completed, and
    free what has been fetched, or is not (`process_disagg_prefill_inflight_queue`)."""
    worker, requests, first = engines.workers[w], engines.requests, _in_order(engines, w)
    at: Any = np.int64(first)
    while at >= 0:
        tokens = requests[at].prompt_len + requests[at].generated
        kv_manager.publish_tokens(engines, w, at, tokens)
        at = np.int64(requests[at].next)
    at = np.int64(worker.fetched_head)
    while at >= 0:
        kv_manager.free_prompt(engines, w, at)
        at = np.int64(requests[at].newer)
    at = np.int64(first if engines.pools[engines.pool_of[w]].then < 0 else -1)
    while at >= 0:
        kv_manager.free_prompt(engines, w, at)
        at = np.int64(requests[at].next)
    worker.ended_head = worker.fetched_head = np.int64(-1)
    worker.ended_places = np.int64(0)


@compiled()
def _finish(clock: Any, engines: kv_manager.Engines, w: int) -> None:
    """Take the sequences out that have all their tokens; others keep their order. With asynchronous
    scheduling only those whose drafts might all have been rejected (vLLM 0.32); any other rides
    on."""
    worker, sequences = engines.workers[w], engines.sequences
    pool, places = engines.pools[engines.pool_of[w]], sequences.shape[1] // 2
    kept = 0
    for i in range(worker.batch):
        if sequences[w, i].tokens_left == 0:
            request = sequences[w, i].request
            record = engines.requests[request]
            context = record.prompt_len - 1 + record.output_len
            worker.context -= context
            worker.tokens -= sequences[w, i].tokens
            unknown = unprocessed(engines, w, sequences[w, i].got)
            if not (pool.caches_late and pool.frees_late):
                kv_manager.publish_tokens(engines, w, request, context - unknown)
            kv_manager.keep_tokens(engines, w, request, context, clock[0].now)
            kv_manager.count_context(engines, w, request, context + sequences[w, i].free_slots)
            rides = 0 < pool.rides_from <= sequences[w, i].got
            record.ticket = sequences[w, i].ticket  # while it waits to be freed
            _release(engines, w, request, pool.frees_late)
            if not (pool.fills_up and pool.frees_late):  # which may still retract it
                _end(clock, engines, request)
            if pool.fills_up and pool.frees_late:
                sequences[w, places + worker.ended_places] = sequences[w, i]
                worker.ended_places += 1
            elif pool.fills_up:
                worker.unfiltered += 1
            elif not rides:
                worker.ended_places += pool.frees_late
            else:
                sequences[w, places + worker.riding] = sequences[w, i]
                worker.riding += 1
                worker.riding_tokens += sequences[w, i].tokens
            continue
        if kept != i:
            sequences[w, kept] = sequences[w, i]
        kept += 1
    gone = worker.batch - kept
    for i in range(worker.batch, worker.batch + worker.prefilling):
        sequences[w, i - gone] = sequences[w, i]
    worker.batch = kept


@compiled()
def _end(clock: Any, engines: kv_manager.Engines, request: int) -> None:
    """Let a request be completed."""
    record = engines.requests[request]
    record.finish_s = clock[0].now
    if record.source < 0:  # it has computed its prompt here
        record.prefill_end_s = record.decode_start_s = record.first_token_s
    leave(clock, engines, state.PENDING_END, request)


# --- from outside ---


def make_workers(pools: Records, pool_of: Ints) -> Records:
    """Return workers as they begin, ``WORKER [workers]``: without requests and KV contents."""
    workers = np.zeros(len(pool_of), state.WORKER)
    workers["n_blank"] = pools["n_blocks"][pool_of]
    workers["slowdown"] = 1.0
    workers["share"] = pools["first_share"][pool_of]
    size, first = pools["group_size"][pool_of], pools["first_worker"][pool_of]
    workers["width"] = size
    workers["leader"] = first + (np.arange(len(pool_of)) - first) // size * size
    for name in ("wake", "spare", "idle_head", "idle_tail", "new_head", "oldest", "newest",
                 "arrived_head", "preempted_head", "loading_head", "late_head", "ended_head",
                 "fetched_head", "fetched_tail", "balanced_step"):  # fmt: skip
        workers[name] = -1
    return workers
