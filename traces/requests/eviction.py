"""What a prefix cache of a size finds in requests with block hashes under other evictions.

Beside the least recently used (`reuse`): ARC, which keeps blocks that were used once and those that
were used again in two lists and learns how long each should be (Megiddo and Modha, FAST 2003), and
Belady's bound, which knows the future (IBM Systems Journal 1966): it keeps the blocks that a prompt
needs again first, and none that no prompt does. Nobody finds more. Requests come one after the
other, as there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eldr_sim.jit import njit
from eldr_sim.traces.requests.requests import Requests
from eldr_sim.traces.requests.reuse import blocks_of

#: Lists of ARC: used once, used again, and what was in these but is no more.
_ONCE, _AGAIN, _WAS_ONCE, _WAS_AGAIN = range(4)
_NEVER = np.int64(1) << 60


def hit_rates(requests: Requests, capacity: int) -> tuple[float, float]:
    """Return the shares of prompt tokens that ARC and Belady's bound find.

    ``capacity``: blocks of ``requests.prefix_block_tokens``, at least 1.
    """
    size = requests.prefix_block_tokens
    if size == 0:
        return 0.0, 0.0
    args = *blocks_of(requests), size, capacity
    total = int(requests.prompt_len.sum(dtype=np.int64))
    return _arc(*args) / total, _belady(*args) / total


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
        for k in range(indptr[i], indptr[i + 1]):
            following[k] = later[blocks[k]]
        for k in range(indptr[i], indptr[i + 1]):  # an answer's blocks are computed, held or not
            later[blocks[k]] = i if k < indptr[i] + n_prompt[i] else _NEVER
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
def _move(block: int, to: int, where: Any, before: Any, behind: Any, sizes: Any) -> None:
    """Put a block at the recent end of a list, out of the one that it is in; -1: of none.

    The ends of list ``l`` are the node ``n_blocks + l``.
    """
    if where[block] >= 0:
        before[behind[block]], behind[before[block]] = before[block], behind[block]
        sizes[where[block]] -= 1
    where[block] = to
    if to >= 0:
        end = where.shape[0] + to
        last = before[end]
        behind[last], before[block], behind[block], before[end] = block, last, end, block
        sizes[to] += 1


@njit()
def _make_room(
    was_again: bool, target: float, where: Any, before: Any, behind: Any, sizes: Any
) -> None:
    """Let the oldest block of one of the two lists go: ARC's REPLACE."""
    n, once = where.shape[0], sizes[_ONCE]
    if once > 0 and (once > target or (was_again and once == target) or sizes[_AGAIN] == 0):
        _move(behind[n + _ONCE], _WAS_ONCE, where, before, behind, sizes)
    elif sizes[_AGAIN] > 0:
        _move(behind[n + _AGAIN], _WAS_AGAIN, where, before, behind, sizes)


@njit()
def _arc(
    blocks: Any, indptr: Any, n_prompt: Any, context: Any, prompt: Any, size: int, capacity: int
) -> int:  # fmt: skip
    """Return the prompt tokens that an ARC finds."""
    n_blocks = blocks.max() + 1 if blocks.shape[0] else 0
    where, sizes = np.full(n_blocks, -1), np.zeros(4, np.int64)
    before, behind = np.arange(n_blocks + 4), np.arange(n_blocks + 4)
    held, reach = np.zeros(n_blocks, np.bool_), np.zeros(n_blocks, np.int64)
    total, target = 0, 0.0
    for i in range(prompt.shape[0]):
        for k in range(indptr[i], indptr[i] + n_prompt[i]):
            held[blocks[k]] = _ONCE <= where[blocks[k]] <= _AGAIN
        total += _found(blocks, indptr[i], n_prompt[i], prompt[i], size, held, reach)
        for k in range(indptr[i + 1] - 1, indptr[i] - 1, -1):  # the last one first, as engines do
            block = blocks[k]
            at = where[block]
            if at == _WAS_ONCE:
                more = max(1.0, sizes[_WAS_AGAIN] / sizes[_WAS_ONCE])
                target = min(target + more, float(capacity))
                _make_room(False, target, where, before, behind, sizes)
            elif at == _WAS_AGAIN:
                less = max(1.0, sizes[_WAS_ONCE] / sizes[_WAS_AGAIN])
                target = max(target - less, 0.0)
                _make_room(True, target, where, before, behind, sizes)
            elif at < 0:
                if sizes[_ONCE] + sizes[_WAS_ONCE] == capacity:
                    if sizes[_ONCE] < capacity:
                        _move(behind[n_blocks + _WAS_ONCE], -1, where, before, behind, sizes)
                        _make_room(False, target, where, before, behind, sizes)
                    else:
                        _move(behind[n_blocks + _ONCE], -1, where, before, behind, sizes)
                elif sizes.sum() >= capacity:
                    if sizes.sum() == 2 * capacity:
                        _move(behind[n_blocks + _WAS_AGAIN], -1, where, before, behind, sizes)
                    _make_room(False, target, where, before, behind, sizes)
            _move(block, _ONCE if at < 0 else _AGAIN, where, before, behind, sizes)
            reach[block] = max(reach[block], min(size, context[i] - (k - indptr[i]) * size))
    return total
