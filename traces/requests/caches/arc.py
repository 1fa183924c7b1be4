"""ARC, the adaptive replacement cache (Megiddo and Modha, FAST 2003), compiled.

Blocks used once and those used again are in two lists; what leaves the cache is remembered in two
more, from which it learns how long the first should be. A list's oldest block is its first."""

from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.jit import njit
from eldr_sim.traces.requests.caches import linked
from eldr_sim.traces.requests.caches.linked import move, oldest

#: Lists: used once, used again, and what was in these but is no more.
ONCE, AGAIN, WAS_ONCE, WAS_AGAIN = map(np.int64, range(1, 5))


class ArcLists(NamedTuple):
    """The lists of caches."""

    lists: linked.LinkedLists
    target: Floats  #: ``[caches]``: blocks that should be in the list used once


def make_lists(n_caches: int, n_blocks: int) -> ArcLists:
    """Return the lists of empty caches."""
    return ArcLists(linked.make_lists(n_caches, n_blocks, 4, 4), np.zeros(n_caches))


def clear(arc: ArcLists, cache: int) -> None:
    """Let a cache be empty."""
    linked.clear(arc.lists, cache, 4)
    arc.target[cache] = 0.0


@njit(inlined=True, _nrt=False)
def _make_room(arc: Any, cache: int, capacity: int, was_again: bool) -> Any:
    """Let the oldest block of a list go, and return it (the paper's REPLACE); -1: there is room."""
    lists = arc.lists
    once, again = lists.sizes[cache, ONCE], lists.sizes[cache, AGAIN]
    if once + again < capacity:
        return np.int64(-1)
    target = arc.target[cache]
    if once > 0 and (once > target or (was_again and once == target) or again == 0):
        out = oldest(lists, cache, ONCE)
        move(lists, cache, out, WAS_ONCE)
    else:
        out = oldest(lists, cache, AGAIN)
        move(lists, cache, out, WAS_AGAIN)
    return out


@njit(inlined=True, _nrt=False)
def use(arc: Any, cache: int, block: int, capacity: int) -> Any:
    """Use a block of any list or none; it is in the cache then. Returns the block that leaves the
    cache and the one that is remembered no more, -1: none. ``capacity``: blocks, at least 1."""
    lists = arc.lists
    at, sizes = lists.of[cache, block], lists.sizes
    out, gone = np.int64(-1), np.int64(-1)
    was_once, was_again = sizes[cache, WAS_ONCE], sizes[cache, WAS_AGAIN]
    if at == WAS_ONCE:
        more = max(1.0, was_again / was_once)
        arc.target[cache] = min(arc.target[cache] + more, float(capacity))
        out = _make_room(arc, cache, capacity, False)
    elif at == WAS_AGAIN:
        arc.target[cache] = max(arc.target[cache] - max(1.0, was_once / was_again), 0.0)
        out = _make_room(arc, cache, capacity, True)
    elif at == 0:
        if sizes[cache, ONCE] + was_once == capacity:
            if sizes[cache, ONCE] < capacity:
                gone = oldest(lists, cache, WAS_ONCE)
                move(lists, cache, gone, np.int64(0))
                out = _make_room(arc, cache, capacity, False)
            else:
                out = gone = oldest(lists, cache, ONCE)
                move(lists, cache, gone, np.int64(0))
        elif sizes[cache].sum() >= capacity:
            if sizes[cache].sum() == 2 * capacity:
                gone = oldest(lists, cache, WAS_AGAIN)
                move(lists, cache, gone, np.int64(0))
            out = _make_room(arc, cache, capacity, False)
    move(lists, cache, block, ONCE if at == 0 else AGAIN)
    return out, gone
