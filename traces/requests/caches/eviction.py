"""What a prefix cache of a size finds in requests with block hashes under other evictions than LRU
(`reuse`): ARC (`arc`), by session (`session_lists`), and Belady's bound, which keeps the blocks
that a prompt needs again first (IBM Systems Journal 1966). Requests come one after the other."""

from typing import Any

import numpy as np

from eldr_sim.jit import njit
from eldr_sim.traces.requests.caches import session_lists
from eldr_sim.traces.requests.caches.arc import AGAIN, ONCE, make_lists, use
from eldr_sim.traces.requests.caches.reuse import blocks_of
from eldr_sim.traces.requests.columns import Requests

_NEVER = np.int64(1) << 60


def hit_rates(requests: Requests, capacity: int) -> tuple[float, float, float]:
    """Return the shares of prompt tokens that three caches of ``capacity`` blocks find."""
    size = requests.prefix_block_tokens
    if size == 0:
        return 0.0, 0.0, 0.0
    of_blocks = blocks_of(requests)
    args = *of_blocks, size, capacity
    total = int(requests.prompt_len.sum(dtype=np.int64))
    n_blocks = int(of_blocks[0].max(initial=-1)) + 1
    arc = _arc(*args, make_lists(1, n_blocks))
    by_session = _by_session(*args, session_lists.make_lists(1, n_blocks, capacity))
    return arc / total, by_session / total, _belady(*args) / total


@njit()
def _found(
    blocks: Any, begin: int, n: int, prompt: int, size: int, held: Any, reach: Any
) -> int:  # fmt: skip
    """Return the tokens of a prompt's first blocks that are held."""
    got = 0
    for k in range(n):
        block = blocks[begin + k]
        known = min(reach[block], min(size, prompt - 1 - k * size))
        if not held[block] or known <= 0:
            break
        got = k * size + known
        if known < size:
            break
    return got


@njit()
def _belady(
    blocks: Any, indptr: Any, n_prompt: Any, context: Any, prompt: Any, size: int, capacity: int
) -> int:  # fmt: skip
    """Return the prompt tokens that are found where the farthest next use goes first."""
    n, n_blocks = prompt.shape[0], blocks.max() + 1 if blocks.shape[0] else 0
    following, later = np.empty(blocks.shape[0], np.int64), np.full(n_blocks, _NEVER)
    for i in range(n - 1, -1, -1):  # the next request whose prompt has a block
        sought = indptr[i] + min(n_prompt[i], (prompt[i] + size - 2) // size)  # not the last token
        for k in range(indptr[i], indptr[i + 1]):
            following[k] = later[blocks[k]]
        for k in range(indptr[i], indptr[i + 1]):  # an answer's blocks are computed, held or not
            later[blocks[k]] = i if k < sought else _NEVER
    held, reach = np.zeros(n_blocks, np.bool_), np.zeros(n_blocks, np.int64)
    uses = np.full(n_blocks, _NEVER)
    # Held blocks by their next use: a list for each request; the farthest goes first.
    first, behind = np.full(n + 1, -1), np.full(blocks.shape[0] + 1, -1)
    total, n_held, farthest = 0, 0, -1
    for i in range(n):
        total += _found(blocks, indptr[i], n_prompt[i], prompt[i], size, held, reach)
        for k in range(indptr[i], indptr[i + 1]):
            block, use = blocks[k], following[k]
            reach[block] = max(reach[block], min(size, context[i] - (k - indptr[i]) * size))
            n_held += int(use < _NEVER) - int(held[block])
            held[block], uses[block] = use < _NEVER, use
            if use < _NEVER:
                behind[k], first[use] = first[use], k
                farthest = max(farthest, use)
        while n_held > capacity:
            k = first[farthest]
            if k < 0:
                farthest -= 1
                continue
            first[farthest] = behind[k]
            block = blocks[k]
            if held[block] and uses[block] == farthest:  # else it has been used since
                held[block] = False
                n_held -= 1
    return total


@njit()
def _arc(
    blocks: Any, indptr: Any, n_prompt: Any, context: Any, prompt: Any, size: int, capacity: int,
    lists: Any,
) -> int:  # fmt: skip
    """Return the prompt tokens that an ARC finds, whose ``lists`` are empty."""
    n_blocks = lists.lists.of.shape[1]
    held, reach = np.zeros(n_blocks, np.bool_), np.zeros(n_blocks, np.int64)
    total = 0
    for i in range(prompt.shape[0]):
        for k in range(indptr[i], indptr[i] + n_prompt[i]):
            held[blocks[k]] = ONCE <= lists.lists.of[0, blocks[k]] <= AGAIN
        total += _found(blocks, indptr[i], n_prompt[i], prompt[i], size, held, reach)
        for k in range(indptr[i + 1] - 1, indptr[i] - 1, -1):  # the last one first, as engines do
            block = blocks[k]
            use(lists, 0, block, capacity)
            reach[block] = max(reach[block], min(size, context[i] - (k - indptr[i]) * size))
    return total


@njit()
def _by_session(
    blocks: Any, indptr: Any, n_prompt: Any, context: Any, prompt: Any, size: int, capacity: int,
    lists: Any,
) -> int:  # fmt: skip
    """Return the prompt tokens that a cache finds which evicts by session; ``lists`` are empty."""
    n_blocks, total, room = lists.lists.of.shape[1], 0, capacity
    held, reach = np.zeros(n_blocks, np.bool_), np.zeros(n_blocks, np.int64)
    for i in range(prompt.shape[0]):
        begin, end = indptr[i], indptr[i + 1]
        session_lists.come(lists, 0)
        name, run = np.int64(-1), True
        for k in range(begin, begin + n_prompt[i]):
            session_lists.ask(lists, 0, blocks[k], k - begin, held[blocks[k]])
            run = run and held[blocks[k]]
            if run:
                name = session_lists.session_at(lists, 0, blocks[k])
        session_lists.has_asked(lists, 0, n_blocks)
        total += _found(blocks, begin, n_prompt[i], prompt[i], size, held, reach)
        lists.own[: end - begin] = blocks[begin:end]
        slot, fresh, n_out = session_lists.choose(
            lists, 0, end - begin, 0, name, room, capacity - room
        )
        for k in range(n_out):
            held[lists.out[k]] = False
        room += n_out
        for k in range(begin, end):
            block = blocks[k]
            if slot >= 0 and not held[block]:
                session_lists.place(lists, 0, block, slot, fresh)
                held[block] = True
                room -= 1
            if held[block]:
                reach[block] = max(reach[block], min(size, context[i] - (k - begin) * size))
    return total
