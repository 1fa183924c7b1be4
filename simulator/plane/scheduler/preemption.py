"""Who goes when running sequences lack KV blocks, and when who went comes back."""

from typing import Any

import numpy as np

from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.kv.kv_cache import blocks_of, n_free, release
from eldr_sim.simulator.plane.kv.kv_manager import (
    Engines,
    fits,
    keep_tokens,
    only_prompts,
    publish_tokens,
    release_context,
    side_of,
    slots_of,
    take_slots,
)
from eldr_sim.simulator.plane.state import OF_SHARE

_NONE = np.int64(0)
#: Tokens: no limit.
ANY = np.int64(1 << 60)
_RETRACTED = np.int64(20)  # tokens that SGLang reserves for each sequence when it retracts some


@compiled()
def budget_left(engines: Engines, w: int) -> Any:
    """Return the tokens that the next step has room for; of its own who sits out takes none."""
    worker, pool = engines.workers[w], engines.pools[engines.pool_of[w]]
    tokens = worker.tokens if pool.mixed_steps else worker.joined
    return pool.max_num_batched_tokens - tokens - worker.chunk_tokens - worker.riding_tokens


@compiled()
def longest_chunk(engines: Engines, w: int) -> Any:
    """Return the most prompt tokens of the next step of one request (vLLM's threshold)."""
    worker, requests = engines.workers[w], engines.requests
    threshold = engines.pools[engines.pool_of[w]].long_prefill_token_threshold
    if threshold <= 0:
        return ANY
    n = worker.batch + worker.prefilling + worker.leaving + worker.riding + worker.n_waiting
    n += worker.ended_places
    late: Any = np.int64(worker.late_head)
    while late >= 0:  # they came when the step had been scheduled
        n -= not requests[late].kv_here
        late = np.int64(requests[late].next)
    return threshold if n > 1 else ANY


@compiled()
def lookahead_slots(engines: Engines, w: int, tokens: int) -> Any:
    """Return the KV slots of a context's first tokens, with those that drafts may take."""
    slots = tokens + engines.pools[engines.pool_of[w]].lookahead
    return min(slots, engines.settings[0].max_model_len)


@compiled()
def padding(engines: Engines, w: int, cached: int) -> Any:
    """Return the placeholder drafts of a request that is admitted with one token to compute behind
    ``cached`` ones: to the size of a verify step, if running sequences decode and none computes
    its context (vLLM's ``pad_spec_decode``)."""
    worker, pool = engines.workers[w], engines.pools[engines.pool_of[w]]
    n, beside = pool.placeholders, cached > 0 or worker.riding > 0
    if n == 0 or pool.always_pads:
        return n
    for i in range(worker.batch + worker.prefilling):
        sequence = engines.sequences[w, i]
        if sequence.ticket > worker.last_admitted:  # admitted in this plan
            continue
        joins = worker.batch - worker.joined <= i < worker.batch
        if sequence.chunk > 0 or joins:
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
    return not fits(engines, w, needed)


@compiled()
def preempt(clock: Any, engines: Engines, w: int, prompts: bool) -> None:
    """Take sequences back until the others have the blocks they need, see `lacks_blocks`."""
    worker, sequences, preempts = engines.workers[w], engines.sequences, False
    while lacks_blocks(engines, w, prompts):
        preempts = True
        if engines.pools[engines.pool_of[w]].allocates_chunks:
            _take_in_order(engines, w)
        victim = _victim(engines, w)
        if worker.ended_head >= 0 and _free_one_ended(engines, w, victim):
            continue
        request = sequences[w, victim].request
        worker.chunk_tokens -= sequences[w, victim].chunk
        record = engines.requests[request]
        if victim >= worker.batch:
            chunk = sequences[w, victim].chunk
            worker.filled -= chunk > 0 and chunk == sequences[w, victim].todo
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
            if not engines.pools[engines.pool_of[w]].forgets_outputs:
                unknown = unprocessed(engines, w, sequences[w, victim].got)
                publish_tokens(engines, w, request, context - unknown)
            keep_tokens(engines, w, request, context, clock[0].now)
            release_context(engines, w, request, context + sequences[w, victim].free_slots)
        for i in range(victim, worker.batch + worker.prefilling):
            sequences[w, i] = sequences[w, i + 1]
        record.preemptions += 1
        worker.n_waiting += 1
        worker.waiting_tokens += record.prompt_len + record.generated
        append_preempted(engines, w, request)
    if preempts and engines.pools[engines.pool_of[w]].reserve == OF_SHARE:
        _raise_share(engines, w)


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
def _take_in_order(engines: Engines, w: int) -> None:
    """Take the blocks of the batch's sequences as they were admitted, up to the first that lacks
    some: before those of a victim are free, which may be taken first."""
    worker, sequences, last = engines.workers[w], engines.sequences[w], np.int64(-1)
    lookahead = engines.pools[engines.pool_of[w]].lookahead
    while True:
        i: Any = np.int64(-1)
        for k in range(worker.batch):
            if sequences[k].ticket > last and (i < 0 or sequences[k].ticket < sequences[i].ticket):
                i = np.int64(k)
        if i < 0:
            return
        last = np.int64(sequences[i].ticket)
        lacking = slots_of(sequences[i], lookahead) - sequences[i].free_slots
        if lacking > 0 and blocks_of(lacking, engines.settings[0].block_size) > n_free(
            engines.workers, w
        ):
            return
        take_slots(engines, w, i)


@compiled()
def _free_one_ended(engines: Engines, w: int, victim: int) -> Any:
    """Free the completed sequence that comes behind all others, as vLLM preempts it where its
    output has not been processed; False if the running ``victim`` comes behind it."""
    worker, requests, sequence = engines.workers[w], engines.requests, engines.sequences[w, victim]
    by_key = engines.pools[engines.pool_of[w]].preempt_by_key
    last, before, previous = np.int64(-1), np.int64(-1), np.int64(-1)
    at: Any = np.int64(worker.ended_head)
    while at >= 0:
        behind = False
        if requests[at].ticket < 0:  # the next step has been scheduled with it
            pass
        elif by_key:
            behind = _comes_first(requests, sequence.request if last < 0 else last, at)
        else:
            ticket = np.int64(sequence.ticket if last < 0 else requests[last].ticket)
            behind = ticket < requests[at].ticket
        if behind:
            last, before = at, previous
        previous, at = at, np.int64(requests[at].next)
    if last < 0:
        return False
    if before < 0:
        worker.ended_head = requests[last].next
    else:
        requests[before].next = requests[last].next
    worker.ended_places -= 1
    requests[last].preemptions += 1
    release(engines.kv, engines.tables, engines.workers, w, side_of(engines, w), last)
    return True


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
    """Return the running sequence to preempt: the last one joined, that of the highest key, or,
    where one stays, of the fewest outputs and then the longest prompt."""
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
    pool = engines.pools[engines.pool_of[w]]
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
def comes_back_first(engines: Engines, w: int, lost: int, new: int) -> Any:
    """Whether who was preempted comes before who is new: by key, or by when it was queued."""
    requests, pool = engines.requests, engines.pools[engines.pool_of[w]]
    if pool.preempt_by_key:
        return _comes_first(requests, lost, new)
    return requests[lost].ticket < requests[new].ticket


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
