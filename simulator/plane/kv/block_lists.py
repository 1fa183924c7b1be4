"""Blocks found by their hash, in the order in which they were used, of each cache or store:
``blocks [owners, blocks]`` of ``BLOCK``, a hash table ``slots [owners, slots]`` of block number + 1
(0 is empty), and ``owners``, with the list of blocks that may go."""

from typing import Any

import numpy as np

from eldr_sim.simulator.plane.compiled import compiled


@compiled()
def slot_of(slots: Any, blocks: Any, w: int, key: int) -> Any:
    """Return the slot of the hash table that holds ``key``, or the empty one where it belongs."""
    mask = slots.shape[1] - 1
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    slot = np.int64((mixed ^ (mixed >> np.uint64(29))) & np.uint64(mask))
    while slots[w, slot] != 0 and blocks[w, slots[w, slot] - 1].block_hash != key:
        slot = (slot + 1) & mask
    return slot


@compiled()
def forget(slots: Any, blocks: Any, w: int, slot: int) -> None:
    """Empty a slot and move back those behind it that it had pushed away."""
    mask = slots.shape[1] - 1
    hole = slot
    while True:
        slots[w, hole] = 0
        moved = hole
        while True:
            moved = (moved + 1) & mask
            if slots[w, moved] == 0:
                return
            key = blocks[w, slots[w, moved] - 1].block_hash
            mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
            home = np.int64((mixed ^ (mixed >> np.uint64(29))) & np.uint64(mask))
            if ((moved - home) & mask) >= ((moved - hole) & mask):
                break
        slots[w, hole] = slots[w, moved]
        hole = moved


@compiled()
def append(blocks: Any, owners: Any, w: int, block: int) -> None:
    """Put a block at the end of its owner's list: the most recently used."""
    tail = owners[w].idle_tail
    blocks[w, block].before, blocks[w, block].behind = tail, -1
    if tail < 0:
        owners[w].idle_head = block
    else:
        blocks[w, tail].behind = block
    owners[w].idle_tail = block
    owners[w].n_idle += 1


@compiled()
def take_out(blocks: Any, owners: Any, w: int, block: int) -> None:
    """Take a block out of its owner's list."""
    before, behind = blocks[w, block].before, blocks[w, block].behind
    if before < 0:
        owners[w].idle_head = behind
    else:
        blocks[w, before].behind = behind
    if behind < 0:
        owners[w].idle_tail = before
    else:
        blocks[w, behind].before = before
    owners[w].n_idle -= 1


@compiled()
def new_record(blocks: Any, owners: Any, w: int) -> Any:
    """Return a record of an owner's that is not in use."""
    block = owners[w].spare
    if block >= 0:
        owners[w].spare = blocks[w, block].behind
    else:
        block = owners[w].n_made
        owners[w].n_made += 1
    return block


@compiled()
def give_up_record(blocks: Any, owners: Any, w: int, block: int) -> None:
    """Let a record be in use no more."""
    blocks[w, block].behind = owners[w].spare
    owners[w].spare = block


@compiled()
def n_shared(kv: Any, request: int) -> Any:
    """Return how many of a request's first full KV blocks other requests may share."""
    return np.int64(kv.first_listed[request + 1] - kv.first_listed[request])


@compiled()
def block_hash(kv: Any, request: int, number: int, block_size: int, prefix_tokens: int) -> Any:
    """Return the hash of a full KV block: its number, and its last token's prefix block."""
    if number >= n_shared(kv, request):
        return (-np.int64(request) - 1) << 32 | number
    last = ((number + 1) * block_size - 1) // prefix_tokens
    return (np.int64(kv.prefix_hash[kv.prefix_indptr[request] + last]) << 32) | number


@compiled()
def note(kv: Any, w: int, writer: int, number: int, stored: int) -> None:
    """Note, for a router that listens to a worker, that a block of a prompt has come or gone with
    the full KV block that it ends with: the block ``number`` of its ``writer``."""
    end = (number + 1) * kv.block_size
    if end % kv.prefix_block_tokens != 0:
        return
    event = kv.events[kv.n_events[0]]
    event[0], event[2] = w, stored
    event[1] = kv.prefix_indptr[writer] + end // kv.prefix_block_tokens - 1
    kv.n_events[0] += 1


@compiled()
def holds(table: Any) -> Any:
    """Whether a request holds KV blocks."""
    return bool(table.listed + table.private > 0)
