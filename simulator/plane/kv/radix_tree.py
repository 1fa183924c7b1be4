"""SGLang's prefix cache, compiled: a tree of the contexts of each worker, of which whole leaves are
evicted (``srt/mem_cache/radix_cache.py``; readable: `reference.radix_cache`).

A node is a run of blocks of one request's context, however long: it is found by the hash of its
first block, and as a hash stands for all tokens before, what it has in common with another context
is found by bisection. Leaves that no request holds are listed in the order of their last use."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_sim.arrays import Ints
from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.kv.block_lists import (
    block_hash,
    forget,
    give_up_record,
    n_shared,
    new_record,
    note,
    slot_of,
    take_out,
)

#: A node of a tree: the blocks ``[start, start + run)`` of the context of its ``writer``.
NODE = np.dtype(
    [
        ("block_hash", np.int64),  # of its first block
        ("used", np.int64),  # its last use, as a number that grows
        ("start", np.int32),
        ("run", np.int32),
        ("writer", np.int32),
        ("n_held", np.int32),  # requests with contexts that end here or behind it
        ("parent", np.int32),  # -1: none
        ("n_children", np.int32),
        ("before", np.int32),  # neighbours among the leaves that no request holds
        ("behind", np.int32),  # (or the next spare record)
    ],
    align=True,
)


class Tree(NamedTuple):
    """The trees of all workers; empty arrays where the prefix cache is another."""

    nodes: NDArray[np.void]  #: ``NODE [workers, blocks]``
    slots: NDArray[np.int32]  #: ``[workers, slots]``: hash table of nodes + 1, 0 is empty
    clock: Ints  #: ``[workers]``: uses so far


def make_tree(n_workers: int, n_blocks: int) -> Tree:
    """Return empty trees of at most ``n_blocks`` blocks a worker."""
    slots = 1 << max(2, int(2 * n_blocks - 1).bit_length())
    return Tree(
        np.zeros((n_workers, n_blocks), NODE),
        np.zeros((n_workers, slots), np.int32),
        np.zeros(n_workers, np.int64),
    )


@compiled()
def _hash(kv: Any, request: int, number: int) -> Any:
    return block_hash(kv, request, number, kv.block_size, kv.prefix_block_tokens)


@compiled()
def _tick(tree: Any, w: int) -> Any:
    tree.clock[w] += 1
    return tree.clock[w]


@compiled()
def _child(kv: Any, w: int, request: int, number: int) -> Any:
    """Return the node that begins with the block ``number`` of a request's context, or -1."""
    key = _hash(kv, request, number)
    return np.int64(kv.tree.slots[w, slot_of(kv.tree.slots, kv.tree.nodes, w, key)] - 1)


@compiled()
def _common(kv: Any, node: Any, request: int, n: int) -> Any:
    """Return how many blocks of a node the first ``n`` blocks of a request's context have, one of
    which is its first."""
    most: Any = min(np.int64(node.run), n - node.start)
    if node.writer == request:
        return most
    least: Any = np.int64(1)
    while least < most:
        middle: Any = (least + most + 1) // 2
        number = node.start + middle - 1
        if _hash(kv, request, number) == _hash(kv, node.writer, number):
            least = middle
        else:
            most = np.int64(middle - 1)
    return least


@compiled()
def end_of(kv: Any, w: int, request: int, n: int) -> tuple[Any, Any]:
    """Return the last node that has any of the first ``n`` blocks of a request's context, -1:
    none, and how many of those the tree has."""
    last, found = np.int64(-1), np.int64(0)
    while found < n:
        node = _child(kv, w, request, found)
        if node < 0:
            break
        common = _common(kv, kv.tree.nodes[w, node], request, n)
        last, found = node, found + common
        if common < kv.tree.nodes[w, node].run:
            break
    return last, found


@compiled()
def use(kv: Any, workers: Any, w: int, request: int, n: int) -> tuple[Any, Any]:
    """Make what is there of the first ``n`` blocks of a context the last that was used; returns the
    same as `end_of`. A node of which it has a part is split (``match_prefix``)."""
    last, found = end_of(kv, w, request, n)
    nodes, now = kv.tree.nodes, _tick(kv.tree, w)
    at: Any = np.int64(last)
    while at >= 0:
        nodes[w, at].used = now
        at = np.int64(nodes[w, at].parent)
    if last >= 0:
        node = nodes[w, last]
        if node.n_children == 0 and node.n_held == 0:
            _take_leaf(kv.tree, workers, w, last)
            _put_leaf(kv.tree, workers, w, last)
        if found < node.start + node.run:
            last = _split(kv, workers, w, last, found - node.start)
    return last, found


@compiled()
def _split(kv: Any, workers: Any, w: int, lower: int, n: int) -> Any:
    """Let the first ``n`` blocks of a node be its parent; returns that."""
    tree, nodes = kv.tree, kv.tree.nodes
    upper = np.int64(new_record(nodes, workers, w))
    slot = slot_of(tree.slots, nodes, w, nodes[w, lower].block_hash)
    nodes[w, upper] = nodes[w, lower]
    tree.slots[w, slot] = upper + 1
    nodes[w, upper].run, nodes[w, upper].n_children = n, 1
    nodes[w, upper].used = _tick(tree, w)
    node = nodes[w, lower]
    node.parent, node.start, node.run = upper, node.start + n, node.run - n
    node.block_hash = _hash(kv, node.writer, node.start)
    tree.slots[w, slot_of(tree.slots, nodes, w, node.block_hash)] = lower + 1
    return upper


@compiled()
def insert(kv: Any, workers: Any, w: int, request: int, n: int) -> tuple[Any, Any]:
    """Put the first ``n`` blocks of a context into the tree; returns its last node, and how many of
    them have been there before."""
    parent, found = use(kv, workers, w, request, n)
    if found == n:
        return parent, found
    tree, nodes = kv.tree, kv.tree.nodes
    if parent >= 0:
        if nodes[w, parent].n_children == 0 and nodes[w, parent].n_held == 0:
            _take_leaf(tree, workers, w, parent)
        nodes[w, parent].n_children += 1
    new = np.int64(new_record(nodes, workers, w))
    node, key = nodes[w, new], _hash(kv, request, found)
    slot = slot_of(tree.slots, nodes, w, key)
    node.block_hash, node.used, node.start, node.run = key, _tick(tree, w), found, n - found
    node.writer, node.n_held, node.parent, node.n_children = request, 0, parent, 0
    tree.slots[w, slot] = new + 1
    workers[w].n_idle += n - found
    _put_leaf(tree, workers, w, new)
    _note(kv, w, node, np.int64(1))
    return new, found


@compiled()
def idle_blocks(tree: Any, w: int, last: int) -> Any:
    """Return how many blocks of a context no request holds, up to its node ``last``."""
    idle: Any = np.int64(0)
    at: Any = np.int64(last)
    while at >= 0:
        node = tree.nodes[w, at]
        idle += node.run if node.n_held == 0 else 0
        at = np.int64(node.parent)
    return idle


@compiled()
def hold_path(tree: Any, workers: Any, w: int, last: int, by: int) -> None:
    """Let one request more, or less (-1), hold a context that ends with the node ``last``."""
    at: Any = np.int64(last)
    while at >= 0:
        node = tree.nodes[w, at]
        if node.n_held == 0:
            workers[w].n_idle -= node.run
            if node.n_children == 0:
                _take_leaf(tree, workers, w, at)
        node.n_held += by
        if node.n_held == 0:
            workers[w].n_idle += node.run
            if node.n_children == 0:
                _put_leaf(tree, workers, w, at)
        at = np.int64(node.parent)


@compiled()
def make_room(kv: Any, workers: Any, w: int, n: int) -> None:
    """Evict ``n`` blocks, or more, if fewer are blank: whole leaves, the one first that was used
    before all others (``evict_from_tree_cache``)."""
    tree, nodes, gone = kv.tree, kv.tree.nodes, np.int64(0)
    if workers[w].n_blank >= n:
        return
    while gone < n and workers[w].idle_head >= 0:
        leaf = np.int64(workers[w].idle_head)
        node = nodes[w, leaf]
        _take_leaf(tree, workers, w, leaf)
        _note(kv, w, node, np.int64(0))
        gone += node.run
        workers[w].n_idle -= node.run
        workers[w].n_blank += node.run
        parent = np.int64(node.parent)
        forget(tree.slots, nodes, w, slot_of(tree.slots, nodes, w, node.block_hash))
        give_up_record(nodes, workers, w, leaf)
        if parent >= 0:
            nodes[w, parent].n_children -= 1
            if nodes[w, parent].n_children == 0 and nodes[w, parent].n_held == 0:
                _put_leaf(tree, workers, w, parent)


@compiled()
def _take_leaf(tree: Any, workers: Any, w: int, leaf: int) -> None:
    take_out(tree.nodes, workers, w, leaf)
    workers[w].n_idle += 1  # it is not a block


@compiled()
def _put_leaf(tree: Any, workers: Any, w: int, leaf: int) -> None:
    """List a leaf that no request holds: it was used last, or mostly before nearly all others."""
    nodes, worker, used = tree.nodes, workers[w], tree.nodes[w, leaf].used
    before, behind = np.int64(worker.idle_tail), np.int64(-1)
    if before >= 0 and nodes[w, before].used > used:
        before, behind = np.int64(-1), np.int64(worker.idle_head)
        while nodes[w, behind].used < used:
            before, behind = behind, np.int64(nodes[w, behind].behind)
    nodes[w, leaf].before, nodes[w, leaf].behind = before, behind
    if before < 0:
        worker.idle_head = leaf
    else:
        nodes[w, before].behind = leaf
    if behind < 0:
        worker.idle_tail = leaf
    else:
        nodes[w, behind].before = leaf


@compiled()
def _note(kv: Any, w: int, node: Any, stored: int) -> None:
    """Note the blocks of prompts that come or go with those of a node."""
    if w >= kv.listened:
        return
    end = min(np.int64(node.start + node.run), n_shared(kv, node.writer))
    for number in range(node.start, end):
        note(kv, w, node.writer, number, stored)


def shared_ends(kv: Any, w: int) -> tuple[Ints, Ints]:
    """Return of each block in a worker's tree that prompts share the tokens up to its end, and
    where the prompt's block that its last token lies in stands in ``prefix_hash``."""
    ends, at = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    slots = kv.tree.slots[w] if w < len(kv.tree.slots) else np.zeros(0, np.int32)
    for node in kv.tree.nodes[w : w + 1, slots[slots > 0] - 1].ravel():
        first, writer = int(node["start"]), int(node["writer"])
        shared = int(kv.first_listed[writer + 1] - kv.first_listed[writer])
        tokens = (np.arange(first, min(first + int(node["run"]), shared)) + 1) * kv.block_size
        ends.append(tokens)
        at.append(kv.prefix_indptr[writer] + (tokens - 1) // max(1, kv.prefix_block_tokens))
    return np.concatenate(ends), np.concatenate(at)


def shared_hashes(kv: Any, w: int) -> Ints:
    """Return the hashes of the blocks in a worker's tree that prompts share."""
    ends, at = shared_ends(kv, w)
    hashes: Ints = kv.prefix_hash[at].astype(np.int64) << 32 | (ends // kv.block_size - 1)
    return hashes


def forget_tree(kv: Any, w: int) -> None:
    """Let a worker's tree be empty, and note that for a router that listens."""
    if w < kv.listened:
        ends, at = shared_ends(kv, w)
        for index in at[ends % kv.prefix_block_tokens == 0].tolist():
            kv.events[int(kv.n_events[0])] = w, index, 0
            kv.n_events[0] += 1
    kv.tree.slots[w] = 0
