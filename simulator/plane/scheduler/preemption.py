"""Which sequences are preempted when KV blocks run out, and when they return."""

from typing import Any

import numpy as np

from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.kv.kv_cache import blocks_of, n_free, release
from eldr_sim.simulator.plane.kv.kv_manager import (
    Engines,
    blocks_needed,
    count_context,
    fits,
    keep_tokens,
    make_room,
    only_prompts,
    plans_prompts,
    publish_tokens,
    release_context,
    side_of,
    slide_sequence,
    slots_of,
    take_all_slots,
    take_slots,
    takes_late,
)
from eldr_sim.simulator.plane.scheduler.chunks import (
    budget_before,
    budget_left,
    compute,
    decodes_in_turn,
    longest_chunk,
    lookahead_slots,
    next_chunk,
)
from eldr_sim.simulator.plane.state import OF_SHARE

_NONE = np.int64(0)
_KNOWN = -2.0
_RETRACTED = np.int64(20)  # tokens that SGLang reserves for each sequence when it retracts some


@compiled()
def padding(engines: Engines, w: int, cached: int) -> Any:
    """Return the placeholder drafts of a request that is admitted with one token to compute behind
    ``cached`` ones: to the size of a verify step, if running sequences decode and none computes
    its context (vLLM's ``pad_spec_decode``)."""
    worker, pool = engines.workers[w], engines.pools[engines.pool_of[w]]
    n, beside = pool.placeholders, worker.riding > 0 or (cached > 0 and not pool.pads_beside)
    if n == 0 or pool.always_pads:
        return n
    for i in range(worker.batch + worker.prefilling):
        sequence = engines.sequences[w, i]
        if sequence.ticket > worker.last_admitted:  # admitted in this plan
            continue
        joins = worker.batch - worker.joined <= i < worker.batch
        if sequence.chunk > 0 or (joins and not sequence.decodes):
            return _NONE
        beside = beside or i < worker.batch
    if not beside or cached + n + 2 > engines.settings[0].max_model_len:
        return _NONE
    return min(n, longest_chunk(engines, w) - 1)


@compiled()
def lacks_blocks(engines: Engines, w: int, prompts: bool) -> Any:
    """Whether the running sequences need more KV blocks in the next step than are free; with
    ``prompts``, those included that compute their contexts."""
    worker, pool = engines.workers[w], engines.pools[engines.pool_of[w]]
    if not (prompts and pool.allocates_chunks and worker.prefilling > 0):
        return not fits(engines, w, _NONE)
    budget, most = budget_left(engines, w), longest_chunk(engines, w)
    needed = _NONE
    for i in range(worker.batch, worker.batch + worker.prefilling):
        sequence = engines.sequences[w, i]
        chunk = min(sequence.todo - sequence.chunk, budget, most - sequence.chunk)
        if budget <= 0 or chunk < 0:
            continue
        planned = sequence.chunk + chunk
        slots = lookahead_slots(engines, w, sequence.computed + planned)
        budget -= chunk
        joins = planned == sequence.todo and not only_prompts(engines, w)
        if joins and planned + sequence.tokens <= most:
            if budget >= sequence.tokens:
                slots = lookahead_slots(engines, w, sequence.computed + planned + sequence.tokens)
            budget -= sequence.tokens
        lacking = slots - (sequence.computed + sequence.todo + sequence.free_slots)
        if lacking > 0:
            needed += blocks_of(lacking, engines.settings[0].block_size)
    return not fits(engines, w, needed * (1 + engines.kv.groups))


@compiled()
def preempt(clock: Any, engines: Engines, w: int, prompts: bool) -> Any:
    """Take sequences back until the others have the blocks they need, see `lacks_blocks`; returns
    whether any was."""
    pool = engines.pools[engines.pool_of[w]]
    if pool.mixed_steps and not pool.fewest_first:
        return _schedule_running(clock, engines, w, prompts)
    preempts = False
    while lacks_blocks(engines, w, prompts):
        preempts = True
        _take_back(clock, engines, w, _victim(engines, w), False)
    if preempts and pool.reserve == OF_SHARE:
        _raise_share(engines, w)
    return preempts


@compiled()
def retract(clock: Any, engines: Engines, w: int, log: Any, gaps: Any) -> Any:
    """Take back the sequences with the fewest outputs while KV blocks lack (SGLang's
    `retract_decode`); what the step under way computes for them, perhaps the last token, is lost.
    Returns whether any was."""
    worker = engines.workers[w]
    beside = plans_prompts(worker)  # then none has to stay
    while _n_known(worker) + beside > 1 and not _has_room(engines, w):
        victim = _victim(engines, w)
        request = engines.sequences[w, victim].request
        last_token_s = _lose_output(clock, engines, w, victim, log, gaps)
        if victim < worker.batch:
            worker.context -= last_token_s > _KNOWN
            _take_back(clock, engines, w, victim, False)
        else:
            _take_back_ended(engines, w, request)
        if last_token_s >= 0.0:
            engines.requests[request].last_token_s = last_token_s
        worker.retracts = True
        size = engines.settings[0].block_size
        make_room(engines, w, blocks_of(_n_known(worker) * _RETRACTED, size))
    if takes_late(engines, w):
        make_room(engines, w, blocks_needed(engines, w))
        take_all_slots(engines, w)
    if worker.retracts:
        _raise_share(engines, w)
    return worker.retracts


@compiled()
def _has_room(engines: Engines, w: int) -> Any:
    """Whether there are blocks for all that the next step decodes, others evicted for them."""
    needed = blocks_needed(engines, w)
    make_room(engines, w, needed)
    return needed <= n_free(engines.workers, w)


@compiled()
def _lose_output(clock: Any, engines: Engines, w: int, i: int, log: Any, gaps: Any) -> Any:
    """Take back the token that a sequence gets with the last step, whose output is processed when
    the next step has been planned; returns when it got the one before, s, -1: there is none,
    `_KNOWN`: all its tokens are known."""
    sequence = engines.sequences[w, i]
    record, now = engines.requests[sequence.request], clock[0].now
    last: Any = np.int64(clock[0].n_steps - 1)
    while last >= 0 and log[last].worker != w:
        last -= 1
    if not engines.pools[engines.pool_of[w]].frees_late or sequence.got == 0 or last < 0:
        return _KNOWN
    sequence.tokens_left += 1
    sequence.free_slots += 1
    sequence.got = 0
    step, last_token_s = log[last], np.float64(log[last].start)
    step.outputs -= 1
    step.sequences -= 1
    outputs = sequence.output_len - sequence.tokens_left
    step.joined -= record.prompt_len - 1 + outputs == sequence.computed
    if sequence.tokens_left == sequence.output_len:
        record.first_token_s = -1.0
        return -1.0
    for k in range(clock[0].n_gaps - 1, -1, -1):
        if gaps[k].last_token_s == record.last_token_s and gaps[k].resumed_s == now:
            for behind in range(k, clock[0].n_gaps - 1):
                gaps[behind] = gaps[behind + 1]
            clock[0].n_gaps -= 1
            step.rested -= step.rested > 0
            return record.last_token_s
    return last_token_s


@compiled()
def _n_known(worker: Any) -> Any:
    """Return the sequences that may be retracted: all but those that join, and those that ride."""
    return worker.batch - worker.joined + worker.riding


@compiled()
def _known_at(engines: Engines, w: int, k: int) -> Any:
    """Return the place of the sequence ``k`` of those."""
    running = engines.workers[w].batch - engines.workers[w].joined
    return np.int64(k) if k < running else np.int64(engines.sequences.shape[1] // 2 + k - running)


@compiled()
def _known_outputs(engines: Engines, w: int, i: int) -> Any:
    """Return the outputs of a sequence that its engine knows when it plans a step: where it plans
    ahead, without that of the step under way."""
    sequence = engines.sequences[w, i]
    unknown = engines.pools[engines.pool_of[w]].frees_late * sequence.got
    return sequence.output_len - sequence.tokens_left - unknown


@compiled()
def _schedule_running(clock: Any, engines: Engines, w: int, prompts: bool) -> Any:
    """Give running sequences tokens and KV blocks, in the order of their admission; while blocks
    lack, preempt (vLLM's `Scheduler.schedule`). If the one that lacks them goes itself, or no
    tokens are left, all behind it sit the step out. Returns whether one was preempted."""
    worker, sequences, ticket = engines.workers[w], engines.sequences, np.int64(-1)
    most, preempts = longest_chunk(engines, w), False
    in_turn = decodes_in_turn(engines.pools[engines.pool_of[w]])
    while True:
        i = _admitted_after(engines, w, ticket)
        if i < 0:
            return preempts
        ticket = np.int64(sequences[w, i].ticket)
        prompt = worker.batch <= i < worker.batch + worker.prefilling
        if prompt and not prompts:
            continue
        if in_turn and not prompt:
            left = min(budget_before(engines, w, ticket), most)
            if left <= 0:
                _sit_out(clock, engines, w, ticket - 1)
                return preempts
            _cut_drafts(engines, w, i, left)
        if not prompt or _is_computed(engines, w, i, most):
            slide_sequence(engines, w, i)
        lacking = _lacking(engines, w, i, most)
        while lacking > n_free(engines.workers, w):
            preempts = True
            victim = _victim(engines, w)
            gone = _free_one_ended(engines, w, victim)
            if gone < 0:
                gone = np.int64(sequences[w, victim].ticket)
                _take_back(clock, engines, w, victim, gone < ticket)
            if gone == ticket:
                _sit_out(clock, engines, w, ticket)
                return preempts
            i = _admitted_after(engines, w, ticket - 1)  # others may have moved
        if prompt:
            compute(engines, w, i, most)
        else:
            take_slots(engines, w, i)


@compiled()
def _is_computed(engines: Engines, w: int, i: int, most: int) -> Any:
    """Whether the next step computes anything of a context."""
    chunk, joins = next_chunk(engines, w, i, most)
    return bool(chunk > 0 or joins)


@compiled()
def _cut_drafts(engines: Engines, w: int, i: int, left: int) -> None:
    """Let a sequence that decodes, or rides in the step, compute ``left`` tokens at most."""
    worker, sequence = engines.workers[w], engines.sequences[w, i]
    cut = max(_NONE, sequence.tokens - left)
    sequence.tokens -= cut
    sequence.drafts = min(sequence.drafts, sequence.tokens - 1)
    if i < worker.batch:
        worker.tokens -= cut
    else:
        worker.riding_tokens -= cut


@compiled()
def _admitted_after(engines: Engines, w: int, ticket: int) -> Any:
    """Return the first sequence in the order of admission behind ``ticket``, those included that
    ride in the next step and hold blocks; -1: there is none."""
    worker, sequences, first = engines.workers[w], engines.sequences[w], np.int64(-1)
    places = len(sequences) // 2
    running = worker.batch + worker.prefilling
    for k in range(running + (worker.riding if worker.ended_head >= 0 else 0)):
        i = k if k < running else places + k - running
        if sequences[i].ticket > ticket and (
            first < 0 or sequences[i].ticket < sequences[first].ticket
        ):
            first = np.int64(i)
    return first


@compiled()
def _lacking(engines: Engines, w: int, i: int, most: int) -> Any:
    """Return the KV blocks that a running sequence lacks for what it computes next."""
    worker, sequence = engines.workers[w], engines.sequences[w, i]
    pool = engines.pools[engines.pool_of[w]]
    lacking = slots_of(sequence, pool.lookahead) - sequence.free_slots
    if worker.batch <= i < worker.batch + worker.prefilling:
        if not pool.allocates_chunks:  # it has taken those of its whole context
            return _NONE
        chunk, joins = next_chunk(engines, w, i, most)
        tokens = sequence.computed + sequence.chunk + chunk
        if joins:
            tokens += sequence.tokens
        lacking = lookahead_slots(engines, w, tokens)
        lacking -= sequence.computed + sequence.todo + sequence.free_slots
    blocks = blocks_of(max(_NONE, lacking), engines.settings[0].block_size)
    return blocks * (1 + engines.kv.groups)


@compiled()
def _take_back(clock: Any, engines: Engines, w: int, victim: int, scheduled: bool) -> None:
    """Take the blocks of a running sequence, which waits to recompute its context. ``scheduled``:
    the step had been planned with it, and its next token may be looked up though it is never
    computed."""
    worker, sequences = engines.workers[w], engines.sequences
    request, chunk = sequences[w, victim].request, sequences[w, victim].chunk
    record, pool = engines.requests[request], engines.pools[engines.pool_of[w]]
    worker.chunk_tokens -= chunk
    if victim >= worker.batch:
        worker.filled -= chunk > 0 and chunk == sequences[w, victim].todo
        worker.prefilling -= 1
        publish_tokens(engines, w, request, sequences[w, victim].computed)
        release(engines.kv, engines.tables, engines.workers, w, side_of(engines, w), request)
    else:
        context = _leave_batch(clock, engines, w, victim)
        if not pool.caches_late:
            known = context - unprocessed(engines, w, sequences[w, victim].got)
            if scheduled:
                known = context + 1 - (sequences[w, victim].got if pool.frees_late else _NONE)
            publish_tokens(engines, w, request, known)
        keep_tokens(engines, w, request, context, clock[0].now)
        release_context(engines, w, request, context + sequences[w, victim].free_slots)
    for i in range(victim, worker.batch + worker.prefilling):
        sequences[w, i] = sequences[w, i + 1]
    record.preemptions += 1
    worker.n_waiting += 1
    worker.waiting_tokens += record.prompt_len + record.generated
    append_preempted(engines, w, request)


@compiled()
def _leave_batch(clock: Any, engines: Engines, w: int, i: int) -> Any:
    """Count a sequence out that was to decode in the next step; returns its context's tokens."""
    worker, sequence = engines.workers[w], engines.sequences[w, i]
    record = engines.requests[sequence.request]
    worker.batch -= 1
    worker.tokens -= sequence.tokens
    record.generated = record.output_len - sequence.tokens_left
    if i > worker.batch - worker.joined:  # without a step since it joined
        worker.joined -= 1
    elif i < worker.rested:  # without a token for longer
        worker.rested -= 1
    else:
        record.last_token_s = clock[0].now
    context = record.prompt_len - 1 + record.generated
    worker.context -= context
    return context


@compiled()
def _sit_out(clock: Any, engines: Engines, w: int, ticket: int) -> None:
    """Let the sequences that were admitted after one compute nothing in the next step: they wait
    among those whose contexts are being computed, with nothing left to compute."""
    worker, sequences = engines.workers[w], engines.sequences
    places, i = sequences.shape[1] // 2, np.int64(0)
    while i < worker.batch:
        if sequences[w, i].ticket <= ticket:
            i += 1
            continue
        joined = i >= worker.batch - worker.joined
        context = _leave_batch(clock, engines, w, i)
        sequence = sequences[w, i]
        if not joined:
            sequence.computed, sequence.todo = context, _NONE
        count_context(engines, w, sequence.request, context + sequence.free_slots)
        worker.prefilling += 1
        n, to = worker.batch + worker.prefilling, i
        while to + 1 < n and (
            to < worker.batch or sequences[w, to + 1].ticket < sequences[w, i].ticket
        ):
            to += 1
        sequences[w, n] = sequences[w, i]
        for k in range(i, to):
            sequences[w, k] = sequences[w, k + 1]
        sequences[w, to] = sequences[w, n]
    kept = _NONE
    for k in range(places, places + worker.riding):
        if sequences[w, k].ticket <= ticket:
            sequences[w, places + kept] = sequences[w, k]
            kept += 1
        else:
            worker.riding_tokens -= sequences[w, k].tokens
    worker.ended_places += worker.riding - kept
    worker.riding = kept


@compiled()
def unprocessed(engines: Engines, w: int, got: int) -> Any:
    """Return how many tokens of a sequence, which got ``got`` with its last step, have KV in blocks
    that cannot be found yet: accepted drafts until the next step is planned, and where that is
    planned ahead, all tokens of the step that runs meanwhile (vLLM's ``cache_blocks``)."""
    pool = engines.pools[engines.pool_of[w]]
    if pool.frees_late:
        return got
    return _NONE if pool.always_pads else max(_NONE, got - 1)


@compiled()
def _free_one_ended(engines: Engines, w: int, victim: int) -> Any:
    """Free the completed sequence that comes behind all others, as vLLM preempts it where its
    output has not been processed; returns its ticket, -1 if the running ``victim`` comes behind
    it."""
    requests, sequences = engines.requests, engines.sequences
    worker, by_key = engines.workers[w], engines.pools[engines.pool_of[w]].preempt_by_key
    last: Any = np.int64(-1)
    at: Any = np.int64(worker.ended_head)
    while at >= 0:
        behind = last < 0 and victim < 0
        if not behind and by_key:
            behind = _comes_first(requests, sequences[w, victim].request if last < 0 else last, at)
        elif not behind:
            of = sequences[w, victim].ticket if last < 0 else requests[last].ticket
            behind = of < requests[at].ticket
        if behind:
            last = at
        at = np.int64(requests[at].next)
    if last < 0:
        return np.int64(-1)
    _drop_ended(engines, w, last)
    return np.int64(requests[last].ticket)


@compiled()
def _take_back_ended(engines: Engines, w: int, request: int) -> None:
    """Take back a sequence that rides in the next step: it has to compute its last token again."""
    worker, record = engines.workers[w], engines.requests[request]
    _drop_ended(engines, w, request)
    worker.ended_places -= 1
    record.generated = record.output_len - 1
    worker.n_waiting += 1
    worker.waiting_tokens += record.prompt_len + record.generated
    append_preempted(engines, w, request)


@compiled()
def _drop_ended(engines: Engines, w: int, last: int) -> None:
    """Free a completed sequence whose output has not been processed: it is preempted."""
    worker, requests, sequences = engines.workers[w], engines.requests, engines.sequences
    before, at = np.int64(-1), np.int64(worker.ended_head)
    while at != last:
        before, at = at, np.int64(requests[at].next)
    if before < 0:
        worker.ended_head = requests[last].next
    else:
        requests[before].next = requests[last].next
    places, kept = sequences.shape[1] // 2, _NONE
    for k in range(places, places + worker.riding):
        if sequences[w, k].request == last:
            worker.riding_tokens -= sequences[w, k].tokens
        else:
            sequences[w, places + kept] = sequences[w, k]
            kept += 1
    worker.ended_places -= kept == worker.riding
    worker.riding = kept
    requests[last].preemptions += 1
    release(engines.kv, engines.tables, engines.workers, w, side_of(engines, w), last)


@compiled()
def _raise_share(engines: Engines, w: int) -> None:
    """Reserve as much as the running sequences have needed so far, and 20 tokens of each more."""
    worker, got, wanted = engines.workers[w], 0.0, 1.0
    for k in range(_n_known(worker)):
        i = _known_at(engines, w, k)
        got += float(_known_outputs(engines, w, i) + _RETRACTED)
        wanted += float(engines.sequences[w, i].output_len)
    worker.share = min(1.0, got / wanted)


@compiled()
def _victim(engines: Engines, w: int) -> Any:
    """Return the running sequence to preempt: the last one joined, that of the highest key, or,
    where one stays, of the fewest outputs and then the longest prompt, the last of equal ones."""
    worker, sequences, requests = engines.workers[w], engines.sequences, engines.requests
    last = worker.batch + worker.prefilling - 1
    victim = last  # -1: none runs
    pool = engines.pools[engines.pool_of[w]]
    if pool.fewest_first and _n_known(worker) + pool.fills_up > 1:
        victim, fewest, longest = np.int64(-1), _NONE, _NONE
        for k in range(_n_known(worker)):
            i = _known_at(engines, w, k)
            outputs = _known_outputs(engines, w, i)
            prompt = requests[sequences[w, i].request].prompt_len
            goes = victim < 0 or outputs < fewest or (outputs == fewest and prompt > longest)
            if outputs == fewest and prompt == longest and not goes:
                goes = sequences[w, i].ticket > sequences[w, victim].ticket
            if goes:
                victim, fewest, longest = i, outputs, prompt
        return victim
    if not pool.preempt_by_key:
        for i in range(last):
            if sequences[w, i].ticket > sequences[w, victim].ticket:
                victim = np.int64(i)
        return victim
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
def goes_before(engines: Engines, w: int, one: int, other: int) -> Any:
    """Whether a queued request goes before another: by key, or by when it was queued."""
    requests, pool = engines.requests, engines.pools[engines.pool_of[w]]
    if pool.preempt_by_key:
        return _comes_first(requests, one, other)
    return requests[one].ticket < requests[other].ticket


@compiled()
def append_preempted(engines: Engines, w: int, request: int) -> None:
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
