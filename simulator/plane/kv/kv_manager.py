"""The KV blocks of an engine's sequences, compiled: what a step needs, takes and gives back (vLLM's
``kv_cache_manager.py``)."""

from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Floats, Ints, Records
from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.kv import kv_loads, radix_tree
from eldr_sim.simulator.plane.kv.block_lists import n_shared
from eldr_sim.simulator.plane.kv.kv_cache import (
    KVCache,
    blocks_of,
    find,
    hold,
    idle_in_windows,
    is_tree,
    n_free,
    publish,
    release,
    slide,
    take_blank,
    window_end,
)
from eldr_sim.simulator.plane.sessions import Sessions
from eldr_sim.simulator.plane.state import HERE, OF_SHARE, TO_THE_END

_NONE = np.int64(0)
_CLIPPED = np.int64(4096)  # most tokens still to come that SGLang counts


class Engines(NamedTuple):
    """The arrays of all workers and their requests."""

    settings: Records  #: ``SETTINGS [1]``
    pools: Records  #: ``POOL [pools]``
    pool_of: Ints  #: ``[workers]``
    workers: Records  #: ``WORKER [workers]``
    sequences: Records  #: ``SEQUENCE [workers, max_num_seqs]``
    requests: Records  #: ``REQUEST [requests]``
    tables: Records  #: ``BLOCK_TABLE [requests, 2]``, see `side_of`
    kv: KVCache
    pending: Ints  #: ``[capacity, 2]``: what to do, request
    sessions: Sessions
    prompt_s: Floats  #: see `kv_tiers.prompt_seconds`


@compiled()
def side_of(engines: Engines, w: int) -> Any:
    """Return where a request's KV blocks on a worker stand: of its source, or where it decodes."""
    return np.int64(engines.pools[engines.pool_of[w]].then == HERE)


@compiled()
def only_prompts(engines: Engines, w: int) -> Any:
    """Whether a worker computes prompts and nothing else."""
    return bool(engines.pools[engines.pool_of[w]].then != HERE)


@compiled()
def fits(engines: Engines, w: int, blocks: int) -> Any:
    """Whether ``blocks`` are free beside those that the batch needs for its next tokens."""
    spare, worker = n_free(engines.workers, w) - blocks, engines.workers[w]
    pool = engines.pools[engines.pool_of[w]]
    most = worker.tokens + worker.batch * (pool.lookahead + pool.drafts)
    most *= 1 + engines.kv.groups
    if worker.riding == 0 and spare >= most:  # a token needs one at most
        return True
    if spare < 0:
        return False
    return blocks_needed(engines, w) <= spare


@compiled()
def blocks_needed(engines: Engines, w: int) -> Any:
    """Return the KV blocks that the batch needs beside its own for the next step's tokens."""
    sequences, size, needed = engines.sequences[w], engines.settings[0].block_size, _NONE
    lookahead = engines.pools[engines.pool_of[w]].lookahead
    for k in range(_n_planned(engines.workers[w])):
        i = _planned(engines, w, k)
        slots = slots_of(sequences[i], lookahead)
        if sequences[i].free_slots < slots:
            needed += blocks_of(slots - sequences[i].free_slots, size)
    return needed * (1 + engines.kv.groups)


@compiled()
def _n_planned(worker: Any) -> Any:
    """Return how many sequences the next step decodes that hold blocks: those that ride in it hold
    theirs until it has been planned."""
    return worker.batch + (worker.riding if worker.ended_head >= 0 else _NONE)


@compiled()
def _planned(engines: Engines, w: int, k: int) -> Any:
    """Return the place of the sequence ``k`` of those."""
    batch = engines.workers[w].batch
    return np.int64(k) if k < batch else np.int64(engines.sequences.shape[1] // 2 + k - batch)


@compiled()
def take_all_slots(engines: Engines, w: int) -> None:
    """Take the KV blocks of the next step's decoded tokens, as far as they are free."""
    for k in range(_n_planned(engines.workers[w])):
        take_slots(engines, w, _planned(engines, w, k))


@compiled()
def take_slots(engines: Engines, w: int, i: int) -> None:
    """Take the KV blocks that a sequence of the batch needs for its next step, if they are free:
    before others look up theirs in the prefix cache, of which these may be the oldest."""
    sequence, size = engines.sequences[w, i], engines.settings[0].block_size
    slots = slots_of(sequence, engines.pools[engines.pool_of[w]].lookahead)
    if sequence.free_slots < slots:
        more = blocks_of(slots - sequence.free_slots, size)
        if more * (1 + engines.kv.groups) <= n_free(engines.workers, w):
            take_blank(engines.kv, engines.workers, w, more * (1 + engines.kv.groups))
            sequence.free_slots += more * size
            worker = engines.workers[w]
            if i >= worker.batch + worker.prefilling:  # it rides: its blocks have been counted
                engines.tables[sequence.request, side_of(engines, w)].private += more


@compiled()
def slots_of(sequence: Any, lookahead: int) -> Any:
    """Return the KV slots that a sequence needs for its next step (vLLM's ``allocate_slots``)."""
    return min(sequence.tokens + sequence.rejected + lookahead, sequence.room)


@compiled()
def allocate(
    engines: Engines, w: int, request: int, tokens: int, fetches: bool, chunk: int, padded: int
) -> Any:  # fmt: skip
    """Take the KV blocks of a context of ``tokens`` tokens, and of drafts and what its engine
    reserves unless it fetches them; return how many are cached. An engine that allocates chunks
    takes those of the first ``chunk`` tokens that are not cached, if the whole context fits;
    ``padded``: placeholder drafts beside the last token, see `preemption.padding`. Without
    change: -1 if too few are free, WAITS of `kv_loads` where it waits for others' blocks."""
    pool, side = engines.pool_of[w], side_of(engines, w)
    found, idle, size = _NONE, _NONE, engines.settings[0].block_size
    more = pulled = junction = skipped = _NONE
    slots = tokens
    if not fetches:
        slots += 2 * engines.pools[pool].lookahead
        slots = min(slots, engines.settings[0].max_model_len)
    if engines.pools[pool].prefix_caching:
        found, idle, junction = _find(engines, w, request, tokens)
    kv, begin = engines.kv, max(_NONE, found - engines.kv.reach)
    if kv.groups > 0:
        if fetches:  # no window reaches its begin
            skipped = max(_NONE, tokens - kv.window + 1) // size
            begin = max(begin, skipped)
        idle += idle_in_windows(kv, w, request, begin, found)
    tiers = not fetches and engines.kv.tiers.links.shape[1] > 0
    if tiers:
        taken = kv_loads.lookup_blocks(engines, w, side, request, found)
        if taken == kv_loads.WAITS:
            return taken
        if taken < found:
            found, idle = taken, kv_loads.count_idle(engines, w, side, request, taken)
        more = kv_loads.loadable_tokens(engines, w, request, found, tokens)
        pulled = kv_loads.reach_peer(engines, w, request, found + more, tokens)
    record, reserve = engines.requests[request], engines.pools[pool].reserve
    if reserve == TO_THE_END:
        last = record.prompt_len + record.output_len + engines.pools[pool].lookahead
        slots = max(slots, min(last, engines.settings[0].max_model_len))
    if engines.pools[pool].allocates_chunks and not fetches:
        whole = blocks_of(tokens, size) - found + record.window_blocks
        most = min(blocks_of(tokens, size), engines.pools[pool].window_cap)
        whole += kv.groups * max(_NONE, most - max(skipped, found))
        if not fits(engines, w, whole + idle):
            return -1
        first = min(np.int64(tokens), found * size + chunk)
        slots = first + engines.pools[pool].lookahead
        if tokens == found * size + 1:
            if padded >= chunk and padded > 0:
                return -1  # it is not computed rather than computed without them
            slots += padded
        slots = min(slots, engines.settings[0].max_model_len)
    new = blocks_of(slots, size) - found + record.window_blocks
    apart = kv.groups * max(_NONE, blocks_of(slots, size) - max(skipped, found))
    if reserve == OF_SHARE:
        if _lacks_share(engines, w, request, new + idle):
            return -1
        if takes_late(engines, w):
            new = np.int64(record.window_blocks)
    elif not fits(engines, w, new + apart + idle):
        return -1
    engines.tables[request, side].found = found
    if kv.groups > 0:
        _set_window(engines, w, request, begin, junction)
    if tiers:
        kv_loads.reserve_blocks(engines, w, request, found, more)
    hold(engines.kv, engines.tables, engines.workers, w, side, request, new)
    if tiers:
        kv_loads.begin(engines, w, side, request, more, pulled)
    return int((found + more + pulled) * size)


@compiled()
def cached_tokens(engines: Engines, w: int, request: int, tokens: int) -> Any:
    """Return how many of a context's tokens are in a worker's prefix cache."""
    if not engines.pools[engines.pool_of[w]].prefix_caching:
        return _NONE
    return _find(engines, w, request, tokens)[0] * engines.settings[0].block_size


@compiled()
def _find(engines: Engines, w: int, request: int, tokens: int) -> Any:
    """Note the cached blocks of a context that are used; returns those, how many are idle, and the
    end of those that layers with full attention alone have, or 0."""
    size, prefix = engines.settings[0].block_size, engines.settings[0].prefix_block_tokens
    side, parent = side_of(engines, w), engines.requests[request].parent
    drop = np.int64(engines.pools[engines.pool_of[w]].drops_block)
    if is_tree(engines.kv):
        last, found = radix_tree.use(engines.kv, engines.workers, w, request, (tokens - 1) // size)
        return found, radix_tree.idle_blocks(engines.kv.tree, w, last), _NONE
    if engines.kv.groups > 0:
        limit = min((tokens - 1) // size + drop, tokens // size)
        known, idle = find(engines.kv, w, side, request, parent, limit * size + 1, size, prefix)
        known = max(_NONE, known - drop)
        reach = engines.kv.reach + drop
        end = window_end(engines.kv, w, request, min(known + drop, limit), reach)
        end = max(_NONE, end - drop)
        found, idle = find(engines.kv, w, side, request, parent, end * size + 1, size, prefix)
        return found, idle, known if known > found else _NONE
    found, idle = find(engines.kv, w, side, request, parent, tokens, size, prefix)
    if found > 0 and drop > 0:
        found, idle = find(
            engines.kv, w, side, request, parent, (found - 1) * size + 1, size, prefix
        )
    return found, idle, _NONE


@compiled()
def _set_window(engines: Engines, w: int, request: int, begin: int, junction: int) -> None:
    """Note where a request's windows begin, and where they can be found (``replay_boundaries``):
    where its prompt ends, and at the junction, where others have parted from it."""
    window = engines.kv.windows[request, side_of(engines, w)]
    pool, size = engines.pools[engines.pool_of[w]], engines.settings[0].block_size
    prompt, drop = engines.requests[request].prompt_len, np.int64(pool.drops_block)
    window.begin, window.everywhere = begin, not pool.keeps_ends
    window.reach = engines.kv.reach + drop
    window.last = window.longer = max(drop, (prompt - 1) // size)
    if drop > 0:
        window.longer = max(drop, prompt // size)
    window.junction = junction + drop if junction > 0 else _NONE


@compiled()
def slide_sequence(engines: Engines, w: int, i: int) -> None:
    """Free the blocks that no window of a running sequence reaches any more: its tokens count that
    are computed when the next step is planned."""
    if engines.kv.groups == 0:
        return
    worker, sequence = engines.workers[w], engines.sequences[w, i]
    computed, context = sequence.computed, sequence.computed + sequence.todo
    if not worker.batch - worker.joined <= i < worker.batch + worker.prefilling:
        context = engines.requests[sequence.request].prompt_len - 1
        context += sequence.output_len - sequence.tokens_left
        computed = context
    held = blocks_of(context + sequence.free_slots, engines.settings[0].block_size)
    _slide(engines, w, sequence.request, computed - sequence.flying, held)


@compiled()
def slide_batch(engines: Engines, w: int) -> Any:
    """Slide the windows of a batch that only decodes, and take the KV blocks of its next step, if
    enough are free to preempt nothing; returns whether that is so. Only sequences that pass the end
    of a block are looked at, in the order of admission where blocks that can be found again are
    freed, or blocks are evicted."""
    worker, pool = engines.workers[w], engines.pools[engines.pool_of[w]]
    most = worker.tokens + worker.batch * (pool.lookahead + pool.drafts)
    most *= 1 + engines.kv.groups
    if worker.prefilling + worker.joined + worker.riding > 0 or n_free(engines.workers, w) < most:
        return False
    evicts = worker.n_blank < most
    if evicts and (not pool.mixed_steps or pool.fewest_first):
        return False
    listed = _NONE
    for i in range(worker.batch):
        sequence = engines.sequences[w, i]
        slides = sequence.tokens_left <= sequence.slides_at
        if evicts:
            listed += slides or sequence.free_slots < slots_of(sequence, pool.lookahead)
        elif slides and _can_be_found(engines, w, i):
            listed += 1
        elif slides:
            window = engines.kv.windows[sequence.request, side_of(engines, w)]
            end = max(np.int64(window.begin), _begin(engines, w, i))
            worker.n_blank += engines.kv.groups * (end - window.begin)
            window.begin = end
            _set_next_slide(engines, w, i)
    ticket = np.int64(-1)
    while listed > 0:
        first = np.int64(-1)
        for i in range(worker.batch):
            sequence = engines.sequences[w, i]
            due = sequence.tokens_left <= sequence.slides_at
            due = due or (evicts and sequence.free_slots < slots_of(sequence, pool.lookahead))
            if (
                due
                and sequence.ticket > ticket
                and (first < 0 or sequence.ticket < engines.sequences[w, first].ticket)
            ):
                first = np.int64(i)
        ticket = np.int64(engines.sequences[w, first].ticket)
        slide_sequence(engines, w, first)
        _set_next_slide(engines, w, first)
        if evicts:
            take_slots(engines, w, first)
        listed -= 1
    return True


@compiled()
def _set_next_slide(engines: Engines, w: int, i: int) -> None:
    """Note when a sequence that decodes, and has slid, will have filled a block or left one behind:
    a step is planned ahead with one token at least in flight."""
    sequence, size = engines.sequences[w, i], engines.settings[0].block_size
    full = (_known(engines, w, i) // size + 1) * size
    left = (_begin(engines, w, i) + 1) * size + engines.kv.window - 1
    end = engines.requests[sequence.request].prompt_len - 1 + sequence.output_len
    late = np.int64(engines.pools[engines.pool_of[w]].frees_late)
    sequence.slides_at = end - min(full, left) - late


@compiled()
def _known(engines: Engines, w: int, i: int) -> Any:
    """Return the tokens of a sequence that decodes of which the KV is computed and known."""
    sequence = engines.sequences[w, i]
    generated = sequence.output_len - sequence.tokens_left
    return engines.requests[sequence.request].prompt_len - 1 + generated - sequence.flying


@compiled()
def _begin(engines: Engines, w: int, i: int) -> Any:
    """Return the first block that the windows of a sequence that decodes still reach."""
    unreached = _known(engines, w, i) - engines.kv.window + 1
    return max(_NONE, unreached) // engines.settings[0].block_size


@compiled()
def _can_be_found(engines: Engines, w: int, i: int) -> Any:
    """Whether a block of a sequence that its windows leave behind, or that is full now, can be
    found by its hash."""
    request, side = engines.sequences[w, i].request, side_of(engines, w)
    if not engines.pools[engines.pool_of[w]].prefix_caching:
        return False
    window, table = engines.kv.windows[request, side], engines.tables[request, side]
    kept = max(window.last, window.longer, window.junction)
    if _known(engines, w, i) // engines.settings[0].block_size > table.full and (
        window.everywhere or table.full < kept or table.listed < n_shared(engines.kv, request)
    ):
        return True
    return bool(
        _begin(engines, w, i) > window.begin
        and (window.everywhere or window.begin < max(kept, table.found))
    )


@compiled()
def slide_context(engines: Engines, w: int, request: int, computed: int) -> None:
    """The same of a request with all its blocks counted, of which ``computed`` tokens have KV."""
    if engines.kv.groups > 0:
        table = engines.tables[request, side_of(engines, w)]
        _slide(engines, w, request, computed, np.int64(table.listed + table.private))


@compiled()
def _slide(engines: Engines, w: int, request: int, computed: int, held: int) -> None:
    publish_tokens(engines, w, request, computed)
    side = side_of(engines, w)
    slide(engines.kv, engines.tables, engines.workers, w, side, request, computed, held)


@compiled()
def lacks_room(engines: Engines, w: int, request: int) -> Any:
    """Whether SGLang would find too little KV free for a request (`PrefillAdder.add_one_req`)."""
    record, size = engines.requests[request], engines.settings[0].block_size
    tokens, found, idle = record.prompt_len + record.generated, _NONE, _NONE
    if engines.pools[engines.pool_of[w]].prefix_caching:
        found, idle, _ = _find(engines, w, request, tokens)
    new = blocks_of(tokens, size) - found + record.window_blocks
    return _lacks_share(engines, w, request, new + idle)


@compiled()
def _lacks_share(engines: Engines, w: int, request: int, blocks: int) -> Any:
    """Whether too little is free for this number of ``blocks`` and the output of a request, beside
    what is promised to others."""
    record, size = engines.requests[request], engines.settings[0].block_size
    wanted = blocks * size + min(record.output_len - record.generated, _CLIPPED)
    if only_prompts(engines, w):
        wanted = blocks * size + 1
    return bool(wanted >= free_tokens(engines, w) - promised(engines, w))


@compiled()
def takes_late(engines: Engines, w: int) -> Any:
    """Whether blocks are taken for a whole step when it is planned, as SGLang does."""
    return bool(engines.pools[engines.pool_of[w]].fills_up and engines.kv.tiers.links.shape[1] == 0)


@compiled()
def free_tokens(engines: Engines, w: int) -> Any:
    """Return the tokens that free blocks hold, beside what the next step's prompts still take."""
    free = np.int64(n_free(engines.workers, w))
    if takes_late(engines, w):
        free -= _prompt_blocks(engines, w)
    return free * engines.settings[0].block_size


@compiled()
def _prompt_blocks(engines: Engines, w: int) -> Any:
    """Return the blocks that sequences lack for what the next step computes of their contexts."""
    worker, lacking = engines.workers[w], _NONE
    for i in range(worker.batch - worker.joined, worker.batch + worker.prefilling):
        lacking += _lacks(engines, w, i)
    return lacking


@compiled()
def _lacks(engines: Engines, w: int, i: int) -> Any:
    """Return the blocks that a sequence lacks for what the next step computes of its context: the
    last token is decoded."""
    sequence = engines.sequences[w, i]
    slots = slots_of(sequence, engines.pools[engines.pool_of[w]].lookahead)
    if i >= engines.workers[w].batch:
        slots = sequence.chunk - sequence.todo
    more = blocks_of(slots - sequence.free_slots, engines.settings[0].block_size)
    return max(_NONE, np.int64(more))


@compiled()
def take_for_prompts(engines: Engines, w: int) -> None:
    """Take the blocks of what the next step computes of contexts, all at once."""
    worker, size = engines.workers[w], engines.settings[0].block_size
    make_room(engines, w, _prompt_blocks(engines, w))
    for i in range(worker.batch - worker.joined, worker.batch + worker.prefilling):
        sequence, more = engines.sequences[w, i], _lacks(engines, w, i)
        take_blank(engines.kv, engines.workers, w, more)
        sequence.free_slots += more * size
        engines.tables[sequence.request, side_of(engines, w)].private += more


@compiled()
def make_room(engines: Engines, w: int, blocks: int) -> None:
    """Evict what SGLang's tree gives up for this number of ``blocks``."""
    if is_tree(engines.kv):
        radix_tree.make_room(engines.kv, engines.workers, w, blocks)


@compiled()
def plans_prompts(worker: Any) -> Any:
    """Whether the next step computes prompts."""
    return bool(worker.joined > 0 or worker.chunk_tokens > 0)


@compiled()
def n_held(worker: Any) -> Any:
    """Return the places of SGLang's running batch, those of prompts in the next step left out."""
    return worker.batch - worker.joined + worker.ended_places + worker.unfiltered


@compiled()
def promised(engines: Engines, w: int) -> Any:
    """Return the tokens that running sequences' outputs are expected to take (SGLang's
    `PrefillAdder`): a share of what is to come, as far as outputs are known, and whole outputs of
    those that join."""
    worker, late = engines.workers[w], engines.pools[engines.pool_of[w]].frees_late
    if only_prompts(engines, w):  # one of each
        return float(worker.filled)
    tokens = worker.share * float(worker.ended_places)
    if engines.pools[engines.pool_of[w]].mixed_steps:
        tokens += float(n_held(worker))
    for i in range(worker.batch):
        sequence = engines.sequences[w, i]
        if i >= worker.batch - worker.joined:
            tokens += float(min(sequence.output_len, _CLIPPED))
        else:
            left = sequence.tokens_left + late * sequence.got
            tokens += worker.share * float(min(left, _CLIPPED))
    return tokens


@compiled()
def publish_tokens(engines: Engines, w: int, request: int, tokens: int) -> None:
    """Let other requests find the first ``tokens`` tokens of a context on worker ``w``."""
    if engines.pools[engines.pool_of[w]].prefix_caching:
        size, prefix = engines.settings[0].block_size, engines.settings[0].prefix_block_tokens
        side = side_of(engines, w)
        publish(engines.kv, engines.tables, engines.workers, w, side, request, tokens, size, prefix)


@compiled()
def keep_tokens(engines: Engines, w: int, request: int, tokens: int, at_s: float) -> None:
    """Let tiers have the first ``tokens`` tokens of a context, computed at ``at_s``, s."""
    if engines.kv.tiers.links.shape[1] > 0:
        kv_loads.keep(engines, w, side_of(engines, w), request, tokens, at_s)


@compiled()
def count_context(engines: Engines, w: int, request: int, slots: int) -> None:
    """Note the blocks of a sequence that have room for ``slots`` tokens, to release them."""
    table = engines.tables[request, side_of(engines, w)]
    held = blocks_of(slots, engines.settings[0].block_size)
    table.private = held + engines.requests[request].window_blocks - table.listed


@compiled()
def release_context(engines: Engines, w: int, request: int, slots: int) -> None:
    """Give the blocks of a sequence back that have room for ``slots`` tokens."""
    count_context(engines, w, request, slots)
    release(engines.kv, engines.tables, engines.workers, w, side_of(engines, w), request)


@compiled()
def free_prompt(engines: Engines, w: int, request: int) -> None:
    """Give the blocks of a prompt back that another worker has, or needs not: in a tree it is the
    context that was used last (SGLang's ``release_kv_cache``)."""
    if is_tree(engines.kv) and engines.pools[engines.pool_of[w]].prefix_caching:
        record = engines.requests[request]
        n = (record.prompt_len + record.generated) // engines.settings[0].block_size
        radix_tree.use(engines.kv, engines.workers, w, request, n)
    release(engines.kv, engines.tables, engines.workers, w, side_of(engines, w), request)


@compiled()
def can_join(engines: Engines, w: int, request: int, padded: int) -> Any:
    """Whether there are blocks for the drafts of a request with a KV cache that has arrived, and
    for ``padded`` placeholders."""
    lookahead, record = engines.pools[engines.pool_of[w]].lookahead, engines.requests[request]
    if lookahead + padded == 0:
        return True
    size, context = engines.settings[0].block_size, record.prompt_len + record.generated - 1
    slots = min(context + 1 + padded + lookahead, engines.settings[0].max_model_len)
    table = engines.tables[request, side_of(engines, w)]
    held = table.listed + table.private - record.window_blocks
    return fits(engines, w, max(blocks_of(slots, size) - held, _NONE) * (1 + engines.kv.groups))
