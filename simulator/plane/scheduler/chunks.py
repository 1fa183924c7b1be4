"""What of a context the next step computes: the token budget, and chunks (chunked prefill)."""

from typing import Any

import numpy as np

from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.kv.kv_cache import blocks_of, take_blank
from eldr_sim.simulator.plane.kv.kv_manager import (
    Engines,
    n_held,
    only_prompts,
    publish_tokens,
    side_of,
    take_slots,
    takes_late,
)

_NONE = np.int64(0)
#: Tokens: no limit.
ANY = np.int64(1 << 60)


@compiled()
def budget_left(engines: Engines, w: int) -> Any:
    """Return the tokens that the next step has room for; sequences that sit out take none."""
    worker, pool = engines.workers[w], engines.pools[engines.pool_of[w]]
    tokens = worker.tokens if pool.mixed_steps else worker.joined
    if pool.mixed_steps and pool.fills_up:  # all that has a place in SGLang's batch
        tokens = worker.joined + n_held(worker)
    return pool.max_num_batched_tokens - tokens - worker.chunk_tokens - worker.riding_tokens


@compiled()
def decodes_in_turn(pool: Any) -> Any:
    """Whether prompts may leave a decoding sequence too few tokens: behind a prompt that is delayed
    or that the threshold cuts, others are admitted, and later the prompt needs more, or they draft.
    """
    cuts = pool.drafts > 0 and pool.long_prefill_token_threshold > 0
    return bool(
        pool.mixed_steps and not pool.fewest_first and (cuts or pool.prefill_schedule_interval > 1)
    )


@compiled()
def budget_before(engines: Engines, w: int, ticket: int) -> Any:
    """Return the tokens that the next step has room for beside prompts and the sequences that were
    admitted before ``ticket``: those behind take what is left."""
    worker, sequences = engines.workers[w], engines.sequences[w]
    left = budget_left(engines, w)
    if decodes_in_turn(engines.pools[engines.pool_of[w]]):
        places = len(sequences) // 2
        for k in range(worker.batch + worker.riding):
            sequence = sequences[k if k < worker.batch else places + k - worker.batch]
            if sequence.ticket >= ticket:
                left += sequence.tokens
    return left


@compiled()
def longest_chunk(engines: Engines, w: int) -> Any:
    """Return the most prompt tokens of the next step of one request (vLLM's threshold)."""
    worker, requests = engines.workers[w], engines.requests
    pool = engines.pools[engines.pool_of[w]]
    threshold = pool.long_prefill_token_threshold
    if threshold <= 0:
        return ANY
    if pool.cuts_alone:
        return threshold
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
def next_chunk(engines: Engines, w: int, i: int, most: int) -> tuple[Any, Any]:
    """Return how many tokens more of a sequence's context the next step has room for, ``most`` of
    one prompt, and whether it decodes the next token then."""
    sequence = engines.sequences[w, i]
    budget = budget_before(engines, w, sequence.ticket)
    left = sequence.todo - sequence.chunk
    chunk = max(_NONE, min(left, min(budget, most - sequence.chunk)))
    joins = chunk == left and not only_prompts(engines, w)
    joins = joins and sequence.chunk + chunk + sequence.tokens <= most
    return chunk, joins and budget - chunk >= sequence.tokens


@compiled()
def compute(engines: Engines, w: int, i: int, most: int) -> None:
    """Compute a part of a sequence's context in the next step; with its last chunk it decodes."""
    worker, sequence = engines.workers[w], engines.sequences[w, i]
    chunk, joins = next_chunk(engines, w, i, most)
    if chunk > 0:
        sequence.chunk += chunk
        worker.chunk_tokens += chunk
        if engines.pools[engines.pool_of[w]].allocates_chunks:
            _extend(engines, w, i)
        if not engines.pools[engines.pool_of[w]].caches_late:
            publish_tokens(engines, w, sequence.request, sequence.computed + sequence.chunk)
    if only_prompts(engines, w):
        worker.filled += chunk > 0 and sequence.chunk == sequence.todo
    elif joins:
        if i > worker.batch:  # others of longer prompts have begun before
            move(engines, w, i, worker.batch)
        join(engines, w)


@compiled()
def fill(engines: Engines, w: int) -> None:
    """Fill the next step's token budget with contexts to compute, the one begun first."""
    worker, most = engines.workers[w], longest_chunk(engines, w)
    i = worker.batch
    if (
        only_prompts(engines, w)
        and engines.pools[engines.pool_of[w]].long_prefill_token_threshold <= 0
    ):
        i = worker.filled
    while i < worker.batch + worker.prefilling and budget_left(engines, w) > 0:
        compute(engines, w, i, most)
        i += 1


@compiled()
def join(engines: Engines, w: int) -> None:
    """Let the first prefilling sequence decode in the next step."""
    worker = engines.workers[w]
    sequence = engines.sequences[w, worker.batch]
    worker.context += sequence.computed + sequence.todo
    if engines.pools[engines.pool_of[w]].mixed_steps and not takes_late(engines, w):
        take_slots(engines, w, worker.batch)
        late = engines.pools[engines.pool_of[w]].caches_late
        if sequence.free_slots > 0 and not late:  # with the token that it decodes now
            tokens = sequence.computed + sequence.todo + 1
            publish_tokens(engines, w, sequence.request, tokens)
    worker.batch += 1
    worker.tokens += sequence.tokens
    worker.prefilling -= 1
    worker.joined += 1


@compiled()
def move(engines: Engines, w: int, of: int, to: int) -> None:
    """Let the running sequence ``of`` stand at ``to``, before those that stood there."""
    worker, sequences = engines.workers[w], engines.sequences
    spare = worker.batch + worker.prefilling
    sequences[w, spare] = sequences[w, of]
    for i in range(of, to, -1):
        sequences[w, i] = sequences[w, i - 1]
    sequences[w, to] = sequences[w, spare]


@compiled()
def _extend(engines: Engines, w: int, i: int) -> None:
    """Take the KV blocks of the tokens that a sequence computes in the next step."""
    sequence, request = engines.sequences[w, i], engines.sequences[w, i].request
    computed = sequence.computed + sequence.chunk
    lacking = lookahead_slots(engines, w, computed)
    lacking -= sequence.computed + sequence.todo + sequence.free_slots
    if lacking > 0:
        more = blocks_of(lacking, engines.settings[0].block_size)
        take_blank(engines.kv, engines.workers, w, more * (1 + engines.kv.groups))
        engines.tables[request, side_of(engines, w)].private += more
        sequence.free_slots += more * engines.settings[0].block_size
