"""Caches that evict by session (SAE), compiled: a policy proposed for vLLM's KV offloading.

Facts of vllm-project/vllm#50422 (``v1/kv_offload/cpu/policies/sae.py``, 2026). Blocks stored
together make a session, with which a request that finds some and stores more goes on. The session
of the lowest score ``last use + 1500 uses + 30000 / (1 + depth / 8)`` loses its last block first.
Time counts requests, ``depth`` the blocks before the session's first one. A block's ghost says how
often it was requested: 1 each time, 12 where it is found, by its place in the prompt. A new session
begins with the twelfth of its blocks' ghosts as uses; where something has to go for it, it is
stored only if its score without uses is not below all others'. Uses and ghosts fade by a tenth
every 500 requests. A cache remembers ghosts of as many blocks as it has room for; vLLM's all."""

import math
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Bools, Floats, Ints, Records
from eldr_sim.jit import njit
from eldr_sim.traces.requests.caches import linked

_USE, _FIRST, _HALF = 1500.0, 30000.0, 8.0  # of a score
_FOUND, _MISSED, _SEED = 12.0, 1.0, 12.0  # of ghosts
_FADES, _LEFT = 500, 0.9
#: Lists: blocks that are not there, whose ghosts are remembered; from here on sessions.
GHOSTS, _SESSIONS = np.int64(1), np.int64(2)

#: A session.
SESSION = np.dtype(
    [
        ("serial", np.int64),
        ("uses", np.float64),
        ("last", np.int64),
        ("depth", np.int64),
        ("passed", np.int64),  # the last eviction that has come to it
        ("spare", np.int64),  # where it is over: the next such, or 0
    ]
)
#: A cache.
CACHE = np.dtype(
    [
        ("now", np.int64),  # requests that have come
        ("serial", np.int64),  # sessions that there have been
        ("made", np.int64),  # records of SESSION in use so far
        ("spare", np.int64),
        ("eviction", np.int64),  # which it is,
        ("at", np.int64),  # and the block that it comes to
    ]
)


class SessionLists(NamedTuple):
    """The sessions of caches; blocks are numbered in each."""

    lists: linked.LinkedLists
    caches: Records  #: ``CACHE [caches]``
    sessions: Records  #: ``SESSION [caches, lists + 1]``
    ghost: Floats  #: ``[caches, blocks]``
    kept: Bools  #: ``[caches, blocks]``: not to be evicted now
    own: Ints  #: ``[blocks]``: what `choose` is asked about,
    out: Ints  #: ``[blocks]``: and what goes for it


def make_lists(n_caches: int, n_blocks: int, capacity: int) -> SessionLists:
    """Return the lists of empty caches with room for ``capacity`` blocks, of ``n_blocks``."""
    most = min(capacity, n_blocks) + 3  # one may be begun, the last list has no blocks
    return SessionLists(
        linked.make_lists(n_caches, n_blocks, most, 1),
        np.zeros(n_caches, CACHE), np.zeros((n_caches, most + 1), SESSION),
        np.zeros((n_caches, n_blocks)), np.zeros((n_caches, n_blocks), np.bool_),
        *np.zeros((2, n_blocks), np.int64),
    )  # fmt: skip


def clear(lists: SessionLists, cache: int) -> None:
    """Let a cache be empty."""
    linked.clear(lists.lists, cache, 1)
    lists.caches[cache], lists.sessions[cache], lists.ghost[cache] = 0, 0, 0.0


@njit(inlined=True, _nrt=False)
def leave(lists: Any, cache: int, block: int, to: int) -> None:
    """Put a block out of the session that it is in, which may be over then, into another list."""
    at = np.int64(lists.lists.of[cache, block])
    linked.move(lists.lists, cache, block, to)
    if at >= _SESSIONS and lists.lists.sizes[cache, at] == 0:
        lists.sessions[cache, at].spare = lists.caches[cache].spare
        lists.caches[cache].spare = at


@njit(inlined=True, _nrt=False)
def come(lists: Any, cache: int) -> None:
    """Let a request come, which asks for blocks then, and `has_asked`."""
    lists.caches[cache].now += 1


@njit(inlined=True, _nrt=False)
def ask(lists: Any, cache: int, block: int, place: int, found: bool) -> None:
    """Let the request that came last ask for a block, ``place`` blocks into its context."""
    lists.ghost[cache, block] += (_FOUND if found else _MISSED) / math.log2(place + 2.0)
    at = np.int64(lists.lists.of[cache, block])
    if at >= _SESSIONS:
        session = lists.sessions[cache, at]
        if session.last < lists.caches[cache].now:
            session.uses += 1.0
            session.last = lists.caches[cache].now


@njit(inlined=True, _nrt=False)
def has_asked(lists: Any, cache: int, n_blocks: int) -> None:
    """Let uses and ghosts fade, of the first ``n_blocks`` blocks, every `_FADES` requests."""
    own = lists.caches[cache]
    if own.now % _FADES == 0:
        for slot in range(_SESSIONS, own.made):
            lists.sessions[cache, slot].uses *= _LEFT
        for block in range(n_blocks):
            lists.ghost[cache, block] *= _LEFT


@njit(inlined=True, _nrt=False)
def session_at(lists: Any, cache: int, block: int) -> Any:
    """Return what names the session of a block that is there, for `choose`."""
    at = np.int64(lists.lists.of[cache, block])
    return at << 32 | lists.sessions[cache, at].serial


@njit(inlined=True, _nrt=False)
def _go_on(lists: Any, cache: int, name: int) -> Any:
    """Return the list of a session that a request found blocks of; -1: it has none any more."""
    at = np.int64(name >> 32)
    if name < 0 or lists.lists.sizes[cache, at] == 0:
        return np.int64(-1)
    if lists.sessions[cache, at].serial != name & 0xFFFFFFFF:
        return np.int64(-1)
    return at


@njit(inlined=True, _nrt=False)
def _first(depth: int) -> Any:
    return _FIRST / (1.0 + depth / _HALF)


@njit(inlined=True, _nrt=False)
def _worst(lists: Any, cache: int, eviction: int) -> Any:
    """Return the session of the lowest score that an eviction has not come to, and its score."""
    own, worst, least = lists.caches[cache], np.int64(-1), np.inf
    for slot in range(_SESSIONS, own.made):
        session = lists.sessions[cache, slot]
        if lists.lists.sizes[cache, slot] == 0 or session.passed == eviction:
            continue
        score = session.last + session.uses * _USE + _first(session.depth)
        older = worst >= 0 and session.serial < lists.sessions[cache, worst].serial
        if score < least or (score == least and older):
            worst, least = np.int64(slot), score
    return worst, least


@njit(inlined=True, _nrt=False)
def _admits(lists: Any, cache: int, depth: int) -> Any:
    """Whether a new session ``depth`` blocks into a context may push others out."""
    _, least = _worst(lists, cache, np.int64(-1))
    return least == np.inf or lists.caches[cache].now + _first(depth) >= least


@njit(inlined=True, _nrt=False)
def _next_out(lists: Any, cache: int) -> Any:
    """Return the next block to go; there must be one that is not ``kept``."""
    own, before, end = lists.caches[cache], lists.lists.before, lists.lists.of.shape[1]
    while True:
        while own.at >= end:
            slot, _ = _worst(lists, cache, own.eviction)
            lists.sessions[cache, slot].passed = own.eviction
            own.at = before[cache, end + slot]
        block = np.int64(own.at)
        own.at = before[cache, block]
        if not lists.kept[cache, block]:
            return block


@njit(inlined=True, _nrt=False)
def _open(lists: Any, cache: int, depth: int) -> Any:
    """Return the list of a new session, whose first block is to come now."""
    own = lists.caches[cache]
    slot = np.int64(own.spare)
    if slot == 0:
        own.made = max(own.made, _SESSIONS)
        slot = np.int64(own.made)
        own.made += 1
    session = lists.sessions[cache, slot]
    own.spare, session.spare = session.spare, 0
    linked.open_list(lists.lists, cache, slot)
    own.serial += 1
    session.serial, session.last, session.depth = own.serial, own.now, depth
    session.uses, session.passed = 0.0, 0
    return slot


@njit(inlined=True, _nrt=False)
def choose(lists: Any, cache: int, n: int, before: int, name: int, room: int, there: int) -> Any:
    """Choose where the blocks ``own[:n]`` of a request are stored, and what goes for them
    (``out``).

    ``before``: blocks of its context before these; ``name``: of the session that it goes on with,
    or -1; ``room``, ``there``: free and held. Returns the session's list, or -1; if it is new; and
    how many go."""
    new, depth = np.int64(0), np.int64(-1)
    for k in range(n):
        block = lists.own[k]
        lists.kept[cache, block] = lists.lists.of[cache, block] >= _SESSIONS
        if not lists.kept[cache, block]:
            new += 1
            depth = np.int64(before + k) if depth < 0 else depth
    stores, lacking = new > 0, max(np.int64(new - room), np.int64(0))
    if stores and lacking > 0:
        stores = there - (n - new) >= lacking
        if stores and _go_on(lists, cache, name) < 0:
            stores = _admits(lists, cache, depth)
        if stores:
            lists.caches[cache].eviction += 1
            lists.caches[cache].at = lists.lists.of.shape[1]
            for k in range(lacking):
                lists.out[k] = _next_out(lists, cache)
                leave(lists, cache, lists.out[k], GHOSTS)
    for k in range(n):
        lists.kept[cache, lists.own[k]] = False
    if not stores:
        return np.int64(-1), False, np.int64(0)
    slot = _go_on(lists, cache, name)
    if slot < 0:
        return _open(lists, cache, depth), True, lacking
    lists.sessions[cache, slot].last = lists.caches[cache].now
    return slot, False, lacking


@njit(inlined=True, _nrt=False)
def place(lists: Any, cache: int, block: int, slot: int, fresh: bool) -> None:
    """Store a block in a session; ``fresh``: the session is new."""
    if fresh:
        lists.sessions[cache, slot].uses += lists.ghost[cache, block] / _SEED
    linked.move(lists.lists, cache, block, slot)
