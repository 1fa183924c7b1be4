"""Lists of blocks, compiled: a block is in one of them at a time. The oldest is the first."""

from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Int32s, Ints
from eldr_sim.jit import njit


class LinkedLists(NamedTuple):
    """The lists of caches; blocks are numbered in each, lists from 1."""

    of: Int32s  #: ``[caches, blocks]``: the list that a block is in; 0: none
    #: ``[caches, blocks + lists + 1]``: neighbours; list ``l`` begins and ends at ``blocks + l``.
    before: Int32s
    behind: Int32s
    sizes: Ints  #: ``[caches, lists + 1]``


def make_lists(n_caches: int, n_blocks: int, n_lists: int, n_open: int) -> LinkedLists:
    """Return empty lists, of which the first ``n_open`` are `open_list`."""
    # Zeros take no memory before they are written: a store has room for millions.
    ends = np.zeros((2, n_caches, n_blocks + n_lists + 1), np.int32)
    first = np.arange(n_blocks + 1, n_blocks + n_open + 1)
    ends[:, :, first] = first
    of, sizes = (
        np.zeros((n_caches, n_blocks), np.int32),
        np.zeros((n_caches, n_lists + 1), np.int64),
    )
    return LinkedLists(of, ends[0], ends[1], sizes)


def clear(lists: LinkedLists, cache: int, n_open: int) -> None:
    """Let a cache have no blocks, as `make_lists` makes it."""
    first = np.arange(lists.of.shape[1] + 1, lists.of.shape[1] + n_open + 1)
    lists.of[cache], lists.sizes[cache] = 0, 0
    lists.before[cache, first] = lists.behind[cache, first] = first


@njit(inlined=True, _nrt=False)
def open_list(lists: Any, cache: int, of: int) -> None:
    """Let a list that has no blocks be used."""
    end = lists.of.shape[1] + of
    lists.before[cache, end] = lists.behind[cache, end] = end


@njit(inlined=True, _nrt=False)
def move(lists: Any, cache: int, block: int, to: int) -> None:
    """Put a block at the recent end of a list, out of the one that it is in; 0: of none."""
    at, before, behind = np.int64(lists.of[cache, block]), lists.before, lists.behind
    if at > 0:
        before[cache, behind[cache, block]] = before[cache, block]
        behind[cache, before[cache, block]] = behind[cache, block]
        lists.sizes[cache, at] -= 1
    lists.of[cache, block] = to
    if to > 0:
        end = lists.of.shape[1] + to
        last = before[cache, end]
        behind[cache, last], before[cache, block] = block, last
        behind[cache, block], before[cache, end] = end, block
        lists.sizes[cache, to] += 1


@njit(inlined=True, _nrt=False)
def oldest(lists: Any, cache: int, of: int) -> Any:
    """Return the first block of a list, which must have some."""
    return np.int64(lists.behind[cache, lists.of.shape[1] + of])
