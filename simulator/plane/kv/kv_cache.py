"""KV blocks of the workers, with a prefix cache and a signature row beside each block.

The rules are vLLM's (``vllm/v1/core/block_pool.py``, ``kv_cache_manager.py``): a full block has a
hash that stands for its tokens and all before them, and is shared by reference. A free block keeps
its contents until it is needed: blocks without a hash are reused first, then the least recently
freed; those of a request are freed from its last to its first. A hit never covers the last token of
a context, because its logits are needed. ELDR's signature cache (Sec. 4.4) is a row a block: the
experts that its tokens chose, here kept as the request that computed its prompt into it.

Full blocks that no other request shares (generated tokens, the unshared end of a prompt) have a
hash, by which their request finds them again after a preemption. They are not listed one by one:
held, they are counted; freed, they are one run in the order of release, of which the last is reused
first.

Each group of sliding layers (``SlidingWindowManager``) has other blocks, with other hashes. A
request has no list of them: it holds the blocks from `state.WINDOW` ``begin`` on, and what it has
found or published of them is looked up by its hash. Where all engines are SGLang's, a tree stands
in (`radix_tree`): a request's ``listed`` blocks are in it, ``private`` ones beside it."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_sim.jit import njit
from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.kv import radix_tree
from eldr_sim.simulator.plane.kv.block_lists import (
    append,
    block_hash,
    forget,
    give_up_record,
    holds,
    n_shared,
    new_record,
    note,
    slot_of,
    take_out,
)
from eldr_sim.simulator.plane.kv.kv_tiers import Tiers, forget_stores, no_tiers, touch, write_back
from eldr_sim.simulator.plane.state import BLOCK, WINDOW
from eldr_sim.traces.workload import Workload

#: Runs of free blocks that a worker's cache has records of where prompts share nothing, for
#: requests that come back after a preemption.
_MOST_RUNS = 256
#: Of a block's number in its hash, where the group of sliding layers stands that it is of, from 1.
_GROUP_BIT = np.int64(24)


class KVCache(NamedTuple):
    """The arrays of all workers' prefix caches; blocks are numbered per worker, ``-1`` is none."""

    blocks: NDArray[np.void]  #: ``BLOCK [workers, blocks]``
    hash_slots: NDArray[
        np.int32
    ]  #: ``[workers, slots]`` hash table of block number + 1, 0 is empty
    listed: NDArray[np.int32]  #: ``[2, listed blocks]``: the blocks that each request holds
    first_listed: NDArray[np.int64]  #: ``[requests + 1]``: where its blocks begin in ``listed``
    prefix_hash: NDArray[np.uint64]  #: as in ``Workload``
    prefix_indptr: NDArray[np.int64]  #: as in ``Workload``
    #: What has happened to the blocks of the first ``listened`` workers since the listener last
    #: read it: the worker, the index of the prompt's block in ``prefix_hash``, and whether it was
    #: stored or evicted.
    events: NDArray[np.int64]  #: ``[capacity, 3]``
    n_events: NDArray[np.int64]  #: ``[1]``
    listened: int
    block_size: int
    prefix_block_tokens: int  #: as in ``Workload``; 0 where no pool caches prefixes
    tiers: Tiers  #: where blocks are kept beside these caches, if anywhere
    tree: radix_tree.Tree  #: that stands in for these caches, see `is_tree`
    windows: NDArray[np.void]  #: ``WINDOW [requests, 2]``; empty where there are no such groups
    groups: int  #: of sliding layers
    window: int  #: tokens that they see
    reach: int  #: blocks of them that the next token needs


def make_kv_cache(
    workload: Workload,
    block_size: int,
    n_blocks: int,
    n_workers: int,
    listened: int = 0,
    tiers: Tiers | None = None,
    groups: int = 0,
    window: int = 0,
    *,
    tree: bool = False,
) -> KVCache:
    """Return empty caches of at most ``n_blocks`` blocks a worker; memory is taken as they are
    written. ``n_workers``: 0 where no pool caches prefixes, so that nothing is ever found.
    ``listened``: the number of workers, from the first, with blocks noted in ``events``.
    ``groups``: of sliding layers, which see ``window`` tokens. ``tree``: they are SGLang's."""
    size, n_noted = workload.prefix_block_tokens if n_workers else 0, n_blocks
    context = workload.prompt_len.astype(np.int64)
    if workload.answered is not None:
        context += np.where(workload.answered, workload.output_len - 1, 0)
    covered = np.minimum(context, np.diff(workload.prefix_indptr) * size)
    first_listed = np.concatenate([[0], np.cumsum(covered // block_size)])
    room = len(workload.prefix_hash) if workload.prefixes_to_come else int(first_listed[-1])
    trees = radix_tree.make_tree(n_workers * tree, n_blocks)
    if tree:
        n_workers = n_blocks = 0
    elif size == 0 and not groups:  # a record stands for all full blocks of a request
        n_blocks = min(n_blocks, _MOST_RUNS)
    slots = 1 << max(2, int(2 * n_blocks - 1).bit_length())
    return KVCache(
        np.zeros((n_workers, n_blocks), BLOCK),
        np.zeros((n_workers, slots), np.int32),
        np.zeros((2, room), np.int32),
        first_listed,
        workload.prefix_hash,
        workload.prefix_indptr,
        np.zeros((6 * n_noted if listened else 0, 3), np.int64),
        np.zeros(1, np.int64),
        listened,
        block_size,
        size,
        no_tiers() if tiers is None else tiers,
        trees,
        np.zeros((len(workload) if groups else 0, 2), WINDOW),
        groups,
        window,
        -(-(window - 1) // block_size),
    )


@compiled()
def _note(kv: Any, w: int, block: int, stored: int) -> None:
    """Note that a block has come or gone, if it is none of a sliding window's."""
    if w >= kv.listened:
        return
    number = kv.blocks[w, block].block_hash & np.int64(0xFFFFFFFF)
    if number >> _GROUP_BIT == 0:
        note(kv, w, kv.blocks[w, block].writer, number, stored)


@compiled()
def is_tree(kv: Any) -> Any:
    """Whether the prefix caches are SGLang's trees."""
    return bool(kv.tree.nodes.shape[0] > 0)


@compiled()
def n_free(workers: Any, w: int) -> Any:
    """Return the KV blocks that no request holds, those with contents included."""
    return int(workers[w].n_blank + workers[w].n_idle)


@compiled()
def blocks_of(tokens: int, block_size: int) -> Any:
    """Return how many KV blocks hold ``tokens`` tokens."""
    return -(-tokens // block_size)


@compiled()
def _window_hash(kv: Any, request: int, number: int, group: int) -> Any:
    """Return the hash of a full KV block of a group of sliding layers."""
    key = block_hash(kv, request, number, kv.block_size, kv.prefix_block_tokens)
    return key | np.int64(group + 1) << _GROUP_BIT


@compiled()
def _in_window(kv: Any, w: int, request: int, number: int, group: int) -> Any:
    """Return the oldest cached block of a group with these contents, or -1."""
    key = _window_hash(kv, request, number, group)
    return np.int64(kv.hash_slots[w, slot_of(kv.hash_slots, kv.blocks, w, key)] - 1)


@compiled()
def window_end(kv: Any, w: int, request: int, most: int, reach: int) -> Any:
    """Return the end of the last ``reach`` blocks in a row that all groups of sliding layers have,
    of the first ``most``, or of those from the first on (``find_longest_cache_hit``)."""
    run: Any = np.int64(0)
    for number in range(most - 1, -1, -1):
        run += 1
        for group in range(kv.groups):
            if _in_window(kv, w, request, number, group) < 0:
                run = np.int64(0)
                break
        if run >= reach:
            return np.int64(number + run)
    return run


@compiled()
def idle_in_windows(kv: Any, w: int, request: int, begin: int, end: int) -> Any:
    """Return how many cached blocks of a request's windows are free."""
    idle: Any = np.int64(0)
    for group in range(kv.groups):
        for number in range(begin, end):
            block = _in_window(kv, w, request, number, group)
            idle += kv.blocks[w, block].n_held == 0
    return idle


@compiled()
def _is_kept(window: Any, number: int) -> Any:
    """Whether a block of a request's windows can be found when it is full."""
    return bool(
        window.everywhere
        or window.last - window.reach <= number < window.last
        or window.longer - window.reach <= number < window.longer
        or window.junction - window.reach <= number < window.junction
    )


@compiled()
def _free_windows(
    kv: Any, tables: Any, workers: Any, w: int, side: int, request: int, end: int
) -> None:  # fmt: skip
    """Free the blocks of a request's windows before ``end``, in each group the last one first."""
    table, window = tables[request, side], kv.windows[request, side]
    for group in range(kv.groups):
        for number in range(end - 1, window.begin - 1, -1):
            block = np.int64(-1)
            if number < table.found:
                block = _in_window(kv, w, request, number, group)
            elif number < table.full and _is_kept(window, number):
                copy = _in_window(kv, w, request, number, group)
                while copy >= 0:  # the last one that it has computed
                    if kv.blocks[w, copy].writer == request:
                        block = copy
                    copy = np.int64(kv.blocks[w, copy].copy)
            if block < 0:
                workers[w].n_blank += 1
                continue
            kv.blocks[w, block].n_held -= 1
            if kv.blocks[w, block].n_held == 0:
                append(kv.blocks, workers, w, block)
    window.begin = max(np.int64(window.begin), end)


@compiled()
def slide(
    kv: Any, tables: Any, workers: Any, w: int, side: int, request: int, computed: int, held: int
) -> None:  # fmt: skip
    """Free those of the ``held`` blocks of a request in each group of sliding layers that no window
    reaches any more, when ``computed`` tokens have KV (``remove_skipped_blocks``)."""
    end = max(np.int64(0), computed - kv.window + 1) // kv.block_size
    _free_windows(kv, tables, workers, w, side, request, min(end, held))


@compiled()
def find(
    kv: Any, w: int, side: int, request: int, parent: int, tokens: int, block_size: int,
    prefix_tokens: int,
) -> Any:  # fmt: skip
    """Note the cached blocks of a context; returns how many, and how many of them are free. Those
    that ``parent``, the turn before or -1, had are looked at first: most are still there."""
    first, shared = kv.first_listed[request], n_shared(kv, request)
    before = kv.first_listed[max(parent, 0)]
    known = n_shared(kv, parent) if parent >= 0 else np.int64(0)
    limit, idle = (tokens - 1) // block_size, 0
    for number in range(min(shared, limit)):
        key = block_hash(kv, request, number, block_size, prefix_tokens)
        block: Any = np.int64(kv.listed[side, before + number] if number < known else 0)
        if kv.blocks[w, block].block_hash != key or not kv.blocks[w, block].first:
            block = np.int64(kv.hash_slots[w, slot_of(kv.hash_slots, kv.blocks, w, key)] - 1)
        if block < 0:
            return number, idle
        kv.listed[side, first + number] = block
        if kv.blocks[w, block].n_held == 0:
            idle += 1
    if limit <= shared:
        return limit, idle
    end = _end_of_own(kv, w, request, shared, limit)
    return end, idle + end - shared


@compiled()
def _runs_of(kv: Any, w: int, request: int) -> Any:
    """Return the youngest run of a request's own blocks; ``copy`` leads to the older ones; or
    -1."""
    return kv.hash_slots[w, slot_of(kv.hash_slots, kv.blocks, w, _run_hash(request))] - 1


@compiled()
def _run_hash(request: int) -> Any:
    """Return the hash of all runs of a request: no block's number is so large."""
    return (-np.int64(request) - 1) << 32 | np.int64(0xFFFFFFFF)


@compiled()
def _end_of_own(kv: Any, w: int, request: int, first: int, limit: int) -> Any:
    """Return the block behind those from ``first`` on that runs of a request hold without a gap,
    at most ``limit``."""
    number: Any = np.int64(first)
    youngest = _runs_of(kv, w, request)
    run: Any = np.int64(youngest)
    while run >= 0 and number < limit:
        record = kv.blocks[w, run]
        if record.start <= number < record.start + record.run:
            number = np.int64(record.start + record.run)
            run = np.int64(youngest)
        else:
            run = np.int64(record.copy)
    return min(number, np.int64(limit))


@compiled()
def _oldest(kv: Any, w: int, request: int, number: int) -> Any:
    """Return the run that holds the oldest of the blocks ``number`` of a request."""
    run, oldest = np.int64(_runs_of(kv, w, request)), np.int64(-1)
    while run >= 0:
        record = kv.blocks[w, run]
        if record.start <= number < record.start + record.run:
            oldest = run
            if number < record.kept:  # it was older than the others when the run was begun
                return oldest
        run = np.int64(record.copy)
    return oldest


@compiled()
def matched_tokens(kv: Any, w: int, request: int, tokens: int) -> Any:
    """Return the tokens of a prompt that a worker's cache holds, never its last one."""
    if kv.prefix_block_tokens == 0:
        return np.int64(0)
    if is_tree(kv):
        return radix_tree.end_of(kv, w, request, (tokens - 1) // kv.block_size)[1] * kv.block_size
    begin, size = kv.first_listed[request], kv.block_size
    limit = min(kv.first_listed[request + 1] - begin, (tokens - 1) // size)
    number: Any = np.int64(0)
    while number < limit:
        key = block_hash(kv, request, number, size, kv.prefix_block_tokens)
        if kv.hash_slots[w, slot_of(kv.hash_slots, kv.blocks, w, key)] == 0:
            break
        number += 1
    return np.int64(number * size)


@njit(_nrt=False)
def match(kv: KVCache, first: int, request: int, tokens: int, out: Any) -> None:
    """Fill in ``out``, int64, with a prompt's cached tokens on workers from ``first`` on."""
    for i in range(out.shape[0]):
        out[i] = matched_tokens(kv, first + i, request, tokens)


@compiled()
def hold(kv: Any, tables: Any, workers: Any, w: int, side: int, request: int, new: int) -> None:
    """Hold ``found`` blocks of a request, and ``new`` free ones, the least recently freed first."""
    table = tables[request, side]
    workers[w].contexts += 1
    if is_tree(kv):
        last, found = radix_tree.end_of(kv, w, request, np.int64(table.found))
        radix_tree.hold_path(kv.tree, workers, w, last, np.int64(1))
        table.listed, table.private = found, new
        take_blank(kv, workers, w, new)
        return
    first = kv.first_listed[request]
    listed = min(np.int64(table.found), n_shared(kv, request))
    for place in range(listed):
        block = np.int64(kv.listed[side, first + place])
        if kv.blocks[w, block].n_held == 0:
            take_out(kv.blocks, workers, w, block)
        kv.blocks[w, block].n_held += 1
    number: Any = np.int64(listed)
    while number < table.found:
        run = _oldest(kv, w, request, number)
        stop: Any = number + 1
        if run == _runs_of(kv, w, request) and kv.blocks[w, run].copy < 0:  # there is no other
            stop = np.int64(table.found)
        _take_of_run(kv, workers, w, run, number, stop)
        number = stop
    table.private = table.found - listed + new
    table.listed, table.full = listed, table.found
    beside: Any = np.int64(0)
    if kv.groups > 0:
        begin = np.int64(kv.windows[request, side].begin)
        for group in range(kv.groups):
            for place in range(begin, table.found):
                block = _in_window(kv, w, request, place, group)
                if kv.blocks[w, block].n_held == 0:
                    take_out(kv.blocks, workers, w, block)
                kv.blocks[w, block].n_held += 1
        beside = kv.groups * max(np.int64(0), table.found + new - max(begin, table.found))
    take_blank(kv, workers, w, new + beside)


@compiled()
def _take_of_run(kv: Any, workers: Any, w: int, block: int, first: int, stop: int) -> None:
    """Take the blocks ``[first, stop)`` out of a run of free ones."""
    record = kv.blocks[w, block]
    end = np.int64(record.start + record.run)
    workers[w].n_idle -= stop - first
    if first == record.start and stop == end:
        take_out(kv.blocks, workers, w, block)
        workers[w].n_idle += 1  # it is not a block
        _lose_contents(kv, workers, w, block)
        return
    if first == record.start:
        record.start, record.run = stop, end - stop
        return
    record.run = first - record.start
    if stop == end:
        return
    if workers[w].spare < 0 and workers[w].n_made == kv.blocks.shape[1]:
        workers[w].n_idle -= end - stop  # there is no record for those behind
        workers[w].n_blank += end - stop
        return
    behind = new_record(kv.blocks, workers, w)
    kv.blocks[w, behind] = record
    kv.blocks[w, behind].start, kv.blocks[w, behind].run = stop, end - stop
    record.copy = behind
    kv.blocks[w, behind].behind = block  # it is evicted first
    if record.before < 0:
        workers[w].idle_head = behind
    else:
        kv.blocks[w, record.before].behind = behind
    record.before = behind


@compiled()
def take_blank(kv: Any, workers: Any, w: int, n: int) -> None:
    """Take ``n`` free blocks for contents that no lookup finds."""
    if is_tree(kv):
        radix_tree.make_room(kv, workers, w, n)
    elif n > workers[w].n_blank:
        _evict(kv, workers, w, n - workers[w].n_blank)
    workers[w].n_blank -= n


@compiled()
def publish(
    kv: Any, tables: Any, workers: Any, w: int, side: int, request: int, tokens: int,
    block_size: int, prefix_tokens: int,
) -> None:  # fmt: skip
    """Let others find the full blocks of a context's first ``tokens`` tokens, when these are
    scheduled: a layer writes all keys and values of a step before it reads any (vLLM)."""
    if is_tree(kv):
        _publish_in_tree(kv, tables[request, side], workers, w, request, tokens // block_size)
        return
    first = kv.first_listed[request]
    table = tables[request, side]
    full = np.int64(table.full)
    table.full = max(full, tokens // block_size)
    for number in range(table.listed, min(n_shared(kv, request), table.full)):
        key = block_hash(kv, request, number, block_size, prefix_tokens)
        kv.listed[side, first + number] = _store(kv, workers, w, key, request)
        table.listed += 1
        table.private -= 1
    if kv.groups > 0:
        window = kv.windows[request, side]
        for group in range(kv.groups):
            for number in range(max(full, np.int64(window.begin)), table.full):
                if _is_kept(window, number):
                    _store(kv, workers, w, _window_hash(kv, request, number, group), request)


@compiled()
def _publish_in_tree(kv: Any, table: Any, workers: Any, w: int, request: int, n: int) -> None:
    """Let the first ``n`` blocks of a context be in the tree (``cache_unfinished_req``): those that
    others have computed, too, are blank again."""
    before = np.int64(table.listed)
    if n <= before:
        return
    last, there = radix_tree.insert(kv, workers, w, request, n)
    workers[w].n_blank += max(np.int64(0), there - before)
    radix_tree.hold_path(kv.tree, workers, w, last, np.int64(1))
    last, _ = radix_tree.end_of(kv, w, request, before)
    radix_tree.hold_path(kv.tree, workers, w, last, np.int64(-1))
    table.private -= n - before
    table.listed = n


@compiled()
def _store(kv: Any, workers: Any, w: int, key: int, request: int) -> Any:
    """Let a block that a request holds be found by its hash; returns its record."""
    block = new_record(kv.blocks, workers, w)
    record = kv.blocks[w, block]
    record.block_hash, record.writer, record.n_held, record.copy = key, request, 1, -1
    record.loader, record.run, record.first = -1, 0, False
    slot = slot_of(kv.hash_slots, kv.blocks, w, key)
    known = kv.hash_slots[w, slot] - 1
    if known < 0:
        kv.hash_slots[w, slot], record.first = block + 1, True
        _note(kv, w, block, np.int64(1))
    else:  # as in vLLM a block that is computed twice is there twice
        while kv.blocks[w, known].copy >= 0:
            known = kv.blocks[w, known].copy
        kv.blocks[w, known].copy = block
    return block


@compiled()
def release(kv: Any, tables: Any, workers: Any, w: int, side: int, request: int) -> None:
    """Give the blocks of a request back; contents that can be found stay until evicted."""
    table = tables[request, side]
    workers[w].contexts -= holds(table)
    if is_tree(kv):
        last, _ = radix_tree.end_of(kv, w, request, np.int64(table.listed))
        radix_tree.hold_path(kv.tree, workers, w, last, np.int64(-1))
        workers[w].n_blank += table.private
        table.listed = table.private = table.found = 0
        return
    first, own = kv.first_listed[request], np.int64(0)
    if table.listed == n_shared(kv, request):
        own = np.int64(table.full - table.listed)
    if own > 0:
        _free_run(kv, table, workers, w, request, own)
    for number in range(table.listed - 1, -1, -1):
        block = np.int64(kv.listed[side, first + number])
        kv.blocks[w, block].n_held -= 1
        if kv.blocks[w, block].n_held == 0:
            append(kv.blocks, workers, w, block)
            if kv.tiers.links.shape[1] > 0:
                touch(kv.tiers, w, kv.blocks[w, block].block_hash, request)
    workers[w].n_blank += table.private - own
    if kv.groups > 0:
        held = np.int64(table.listed + table.private)
        _free_windows(kv, tables, workers, w, side, request, held)
        kv.windows[request, side].begin = 0
    table.listed = table.private = table.found = table.full = 0


@compiled()
def _free_run(kv: Any, table: Any, workers: Any, w: int, request: int, n: int) -> None:
    """Free the ``n`` full blocks of a request that no other shares: the most recently freed."""
    if workers[w].spare < 0 and workers[w].n_made == kv.blocks.shape[1]:
        _evict(kv, workers, w, kv.blocks[w, workers[w].idle_head].run)  # it is the next to go
    block = new_record(kv.blocks, workers, w)
    record = kv.blocks[w, block]
    record.run, record.writer, record.n_held = n, request, 0
    record.start, record.kept, record.block_hash = table.listed, table.found, _run_hash(request)
    append(kv.blocks, workers, w, block)
    workers[w].n_idle += n - 1
    slot = slot_of(kv.hash_slots, kv.blocks, w, record.block_hash)
    record.copy = kv.hash_slots[w, slot] - 1
    kv.hash_slots[w, slot] = block + 1
    if kv.tiers.links.shape[1] > 0:
        size, prefix = kv.block_size, kv.prefix_block_tokens
        for number in range(table.full - 1, table.full - 1 - n, -1):
            touch(kv.tiers, w, block_hash(kv, request, number, size, prefix), request)


@compiled()
def _evict(kv: Any, workers: Any, w: int, n: int) -> None:
    """Make the ``n`` least recently freed blocks blank, their signature rows with them."""
    left: Any = np.int64(n)
    tiers, size, prefix = kv.tiers.links.shape[1] > 0, kv.block_size, kv.prefix_block_tokens
    while left > 0:
        block = workers[w].idle_head
        record = kv.blocks[w, block]
        gone: Any = np.int64(1)
        if record.run > 0:  # its last blocks
            gone = min(left, np.int64(record.run))
            request, end = np.int64(record.writer), np.int64(record.start + record.run)
            _take_of_run(kv, workers, w, block, end - gone, end)
            for number in range(end - 1, end - 1 - gone if tiers else end - 1, -1):
                write_back(kv.tiers, w, block_hash(kv, request, number, size, prefix))
        else:
            take_out(kv.blocks, workers, w, block)
            key = record.block_hash
            if _lose_contents(kv, workers, w, block) and tiers:
                write_back(kv.tiers, w, key)
        workers[w].n_blank += gone
        left -= gone


@compiled()
def _lose_contents(kv: Any, workers: Any, w: int, block: int) -> Any:
    """Let a block not be found any more; returns whether there is no copy of it."""
    key = kv.blocks[w, block].block_hash
    slot = slot_of(kv.hash_slots, kv.blocks, w, key)
    known, copy = kv.hash_slots[w, slot] - 1, kv.blocks[w, block].copy
    last = known == block and copy < 0
    if known != block:
        while kv.blocks[w, known].copy != block:
            known = kv.blocks[w, known].copy
        kv.blocks[w, known].copy = copy
    elif copy >= 0:  # the copies take over in order of age
        kv.hash_slots[w, slot], kv.blocks[w, copy].first = copy + 1, True
    else:
        forget(kv.hash_slots, kv.blocks, w, slot)
        if kv.blocks[w, block].run == 0:
            _note(kv, w, block, np.int64(0))
    kv.blocks[w, block].first = False
    give_up_record(kv.blocks, workers, w, block)
    return last


@compiled()
def withdraw(kv: Any, tables: Any, workers: Any, w: int, side: int, request: int, n: int) -> None:
    """Let the last ``n`` blocks of a request have no contents, unless others hold them, too."""
    table, first = tables[request, side], kv.first_listed[request]
    for number in range(table.listed - 1, table.listed - 1 - n, -1):
        block = np.int64(kv.listed[side, first + number])
        if kv.blocks[w, block].n_held > 1:
            return
        _lose_contents(kv, workers, w, block)
        table.listed -= 1
        table.private += 1
        table.full = table.listed


def forget_blocks(kv: KVCache, w: int) -> None:
    """Let a worker's blocks have no contents any more, and note that for a router that listens."""
    if w < len(kv.tree.slots):
        radix_tree.forget_tree(kv, w)
    if w >= len(kv.hash_slots):
        return
    forget_stores(kv.tiers, w)
    if w < kv.listened:
        for slot in kv.hash_slots[w, np.flatnonzero(kv.hash_slots[w])].tolist():
            block = kv.blocks[w, slot - 1]
            if block["run"] or (int(block["block_hash"]) & 0xFFFFFFFF) >> _GROUP_BIT:
                continue
            end = ((int(block["block_hash"]) & 0xFFFFFFFF) + 1) * kv.block_size
            if end % kv.prefix_block_tokens == 0:
                at = int(kv.prefix_indptr[block["writer"]]) + end // kv.prefix_block_tokens - 1
                kv.events[int(kv.n_events[0])] = w, at, 0
                kv.n_events[0] += 1
    kv.hash_slots[w] = 0
    kv.blocks["run"][w] = 0
    kv.blocks["first"][w] = False
