"""ARC, the adaptive replacement cache (Megiddo and Modha, FAST 2003), compiled.

Blocks that were used once and those that were used again are in two lists. What leaves the cache is
remembered in two more, from which it learns how long the first should be. The oldest block of a
list is its first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_sim.jit import njit

#: Lists: used once, used again, and what was in these but is no more.
ONCE, AGAIN, WAS_ONCE, WAS_AGAIN = map(np.int64, range(4))


class ArcLists(NamedTuple):
    """The lists of caches; blocks are numbered in each."""

    where: NDArray[np.int8]  #: ``[caches, blocks]``: the list that a block is in; -1: none
    #: ``before``, ``behind``: ``[caches, blocks + 4]``: neighbours of blocks in lists; list ``l``
    #: begins and ends at the node ``blocks + l``.
    before: NDArray[np.int32]
    behind: NDArray[np.int32]
    sizes: NDArray[np.int64]  #: ``[caches, 4]``
    target: NDArray[np.float64]  #: ``[caches]``: blocks that should be in the list used once


def make_lists(n_caches: int, n_blocks: int) -> ArcLists:
    """Return the lists of empty caches."""
    # Zeros take no memory before they are written: a store has room for millions.
    before, behind = np.zeros((2, n_caches, n_blocks + 4), np.int32)
    before[:, n_blocks:] = behind[:, n_blocks:] = np.arange(n_blocks, n_blocks + 4)
    return ArcLists(
        np.full((n_caches, n_blocks), -1, np.int8), before, behind,
        np.zeros((n_caches, 4), np.int64), np.zeros(n_caches),
    )  # fmt: skip


def clear(lists: ArcLists, cache: int) -> None:
    """Let a cache be empty."""
    ends = np.arange(lists.where.shape[1], lists.where.shape[1] + 4)
    lists.where[cache], lists.sizes[cache], lists.target[cache] = -1, 0, 0.0
    lists.before[cache, ends] = lists.behind[cache, ends] = ends


@njit(inlined=True, _nrt=False)
def move(lists: Any, cache: int, block: int, to: int) -> None:
    """Put a block at the recent end of a list, out of the one that it is in; -1: of none."""
    where, before, behind = lists.where, lists.before, lists.behind
    if where[cache, block] >= 0:
        before[cache, behind[cache, block]] = before[cache, block]
        behind[cache, before[cache, block]] = behind[cache, block]
        lists.sizes[cache, where[cache, block]] -= 1
    where[cache, block] = to
    if to >= 0:
        end = where.shape[1] + to
        last = before[cache, end]
        behind[cache, last], before[cache, block] = block, last
        behind[cache, block], before[cache, end] = end, block
        lists.sizes[cache, to] += 1


@njit(inlined=True, _nrt=False)
def _oldest(lists: Any, cache: int, of: int) -> Any:
    return np.int64(lists.behind[cache, lists.where.shape[1] + of])


@njit(inlined=True, _nrt=False)
def _make_room(lists: Any, cache: int, capacity: int, was_again: bool) -> Any:
    """Let the oldest block of one of the two lists go, and return it: the paper's REPLACE.

    -1: there is room, as where blocks were lost.
    """
    once, again = lists.sizes[cache, ONCE], lists.sizes[cache, AGAIN]
    if once + again < capacity:
        return np.int64(-1)
    target = lists.target[cache]
    if once > 0 and (once > target or (was_again and once == target) or again == 0):
        out = _oldest(lists, cache, ONCE)
        move(lists, cache, out, WAS_ONCE)
    else:
        out = _oldest(lists, cache, AGAIN)
        move(lists, cache, out, WAS_AGAIN)
    return out


@njit(inlined=True, _nrt=False)
def use(lists: Any, cache: int, block: int, capacity: int) -> Any:
    """Use a block of any list or none; it is in the cache then.

    ``capacity``: blocks, at least 1. Returns the block that leaves the cache and the one that is
    remembered no more, -1: none; they are the same where it leaves for good.
    """
    at, sizes = lists.where[cache, block], lists.sizes
    out, gone = np.int64(-1), np.int64(-1)
    was_once, was_again = sizes[cache, WAS_ONCE], sizes[cache, WAS_AGAIN]
    if at == WAS_ONCE:
        more = max(1.0, was_again / was_once)
        lists.target[cache] = min(lists.target[cache] + more, float(capacity))
        out = _make_room(lists, cache, capacity, False)
    elif at == WAS_AGAIN:
        lists.target[cache] = max(lists.target[cache] - max(1.0, was_once / was_again), 0.0)
        out = _make_room(lists, cache, capacity, True)
    elif at < 0:
        if sizes[cache, ONCE] + was_once == capacity:
            if sizes[cache, ONCE] < capacity:
                gone = _oldest(lists, cache, WAS_ONCE)
                move(lists, cache, gone, np.int64(-1))
                out = _make_room(lists, cache, capacity, False)
            else:
                out = gone = _oldest(lists, cache, ONCE)
                move(lists, cache, gone, np.int64(-1))
        elif sizes[cache].sum() >= capacity:
            if sizes[cache].sum() == 2 * capacity:
                gone = _oldest(lists, cache, WAS_AGAIN)
                move(lists, cache, gone, np.int64(-1))
            out = _make_room(lists, cache, capacity, False)
    move(lists, cache, block, ONCE if at < 0 else AGAIN)
    return out, gone
