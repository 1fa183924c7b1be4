"""KV tiers: stores of KV blocks beside the workers' own caches, compiled.

A tier is host memory, an SSD or a shared store, with one store a worker, a node or the cluster. A
store holds blocks by their hashes; the least recently used go first, or the first that came, or
whichever ARC lets go, or the last ones of the worst session. A block comes when it is computed
(``THROUGH``), when another request finds it in a worker's cache (``SELECTIVE``), or when that
evicts it (``BACK``); what a tier evicts goes to the next that is written back. Use in a cache
renews a block in all its tiers; a load from an exclusive tier takes it out.

ARC and eviction by session remember the hashes of as many blocks as they have room for. To ARC a
block is used again when another request uses it; by session a store receives requests and all
blocks of a step (`kv_loads`), and takes none where not enough may go. Copies of one direction over
a worker's link run one after the other, as those of a store with limited bandwidth. A block can
be loaded when it has been stored; a cache may reuse one that is still being stored."""

from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Floats, Int32s, Ints, Records
from eldr_sim.jit import njit
from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.kv.block_lists import (
    append,
    forget,
    give_up_record,
    new_record,
    slot_of,
    take_out,
)
from eldr_sim.simulator.plane.state import BLOCK, CLOCK
from eldr_sim.traces.requests.caches import session_lists
from eldr_sim.traces.requests.caches.arc import AGAIN, ArcLists, clear, make_lists, use
from eldr_sim.traces.requests.caches.linked import move, oldest

#: ``RULES.write``: when a block comes to a tier.
THROUGH, SELECTIVE, BACK = map(np.int64, range(3))
#: ``LOADING.in_flight``: who wants a block that is on its way to its worker for another request
#: waits for that one, and loads the others meanwhile; waits before it does anything (vLLM); or
#: loads it once more.
JOIN, DELAY, DUPLICATE = map(np.int64, range(3))
#: ``BLOCK.copy`` of a block in a tier that evicts as ARC does is the request that used it last; or
#: it was stored for one that has not used it since, or after the last that did.
_FRESH, _LEFT = map(np.int64, (-1, -2))
#: Tokens between two entries of ``Engines.prompt_s``.
GRAIN = 256

#: A tier.
RULES = np.dtype(
    [
        ("write", np.int64),
        ("exclusive", np.bool_),
        ("renews", np.bool_),  # use moves a block to the end: else first in, first out
        ("own", np.bool_),  # its stores are workers' own, and die with them
        ("latency_s", np.float64),  # before the bytes of a load flow
    ]
)
#: How blocks are loaded.
LOADING = np.dtype(
    [
        ("cheaper", np.bool_),  # only where that takes less time than to compute them
        ("layers", np.int64),  # a step waits for its loads layer by layer, of so many; 0: before it
        ("in_flight", np.int64),
        # Where prefill workers pull answers' blocks from decode workers: the tier that counts them,
        # -1: they do not; and what a block takes then by itself, s.
        ("pulls", np.int64),
        ("pull_s", np.float64),
    ]
)
#: A store; the names are those of a worker's cache.
STORE = np.dtype(
    [
        ("n_blank", np.int64),  # blocks that it has room for
        ("n_idle", np.int64),
        ("n_made", np.int64),
        ("spare", np.int64),
        ("idle_head", np.int64),
        ("idle_tail", np.int64),
        ("load_s", np.float64),  # that its own bandwidth gives a block,
        ("store_s", np.float64),
        ("load_free_s", np.float64),  # and when it will have done what it has to, s
        ("store_free_s", np.float64),
        ("evicted", np.int64),  # blocks
        ("arc", np.bool_),  # evicts as ARC does,
        ("by_session", np.bool_),  # or by session
    ]
)
#: What connects a worker with a tier.
LINK = np.dtype(
    [
        ("store", np.int64),  # -1: it has none
        ("load_s", np.float64),
        ("store_s", np.float64),
        ("load_free_s", np.float64),
        ("store_free_s", np.float64),
        ("loaded", np.int64),  # blocks
        ("stored", np.int64),
    ]
)
#: What a request takes from tiers.
LOAD = np.dtype(
    [
        ("loading", np.bool_),  # waits for blocks
        ("delayed", np.bool_),  # and has none itself
        ("until_s", np.float64),  # its own come; negative: have come
        ("waits_for", np.int64),  # request whose blocks on their way it shares, or -1
        ("pulling", np.bool_),  # some come from a decode worker,
        ("peer", np.int64),  # this one,
        ("pulled", np.int64),  # so many
        ("cached", np.int64),  # tokens of its context that it has then
        ("kept", np.int64),  # blocks of its context that have been offered to tiers
        ("start_s", np.float64),  # it began to wait, before its prompt was computed; 0: never
        ("since_s", np.float64),  # it waits, for this one
        ("waited_s", np.float64),
        ("saved_s", np.float64),  # that computing what it has loaded would have taken
    ]
)


class Tiers(NamedTuple):
    """The arrays of all tiers; all are empty where there are none."""

    clock: Records  #: ``CLOCK [1]``, the run's
    loading: Records  #: ``LOADING [1]``
    rules: Records  #: ``RULES [tiers]``: the one that is looked into first, first
    links: Records  #: ``LINK [workers, tiers]``
    stores: Records  #: ``STORE [stores]``
    blocks: Records  #: ``BLOCK [stores, blocks]``
    slots: Int32s  #: ``[stores, slots]``, see `block_lists`
    ready_s: Floats  #: ``[stores, blocks]``: when they have been stored
    arc: ArcLists  #: of the stores that evict so,
    by_session: session_lists.SessionLists  #: and of these
    goes_on: Ints  #: ``[requests, tiers]``: the session that it found blocks of, or -1
    counts: Ints  #: ``[tiers]``: scratch
    loads: Records  #: ``LOAD [requests]``
    hits: Int32s  #: ``[requests, tiers]``: tokens that they have loaded


def no_tiers() -> Tiers:
    """Return what stands for a cluster without tiers, of the same types: the loop is one."""
    loading = np.zeros(1, LOADING)
    loading["pulls"] = -1
    return Tiers(
        np.zeros(0, CLOCK), loading, np.zeros(0, RULES),
        np.zeros((0, 0), LINK), np.zeros(0, STORE), np.zeros((0, 0), BLOCK),
        np.zeros((0, 0), np.int32), np.zeros((0, 0)), make_lists(0, 0),
        session_lists.make_lists(0, 0, 0), np.zeros((0, 0), np.int64), np.zeros(0, np.int64),
        np.zeros(0, LOAD), np.zeros((0, 0), np.int32),
    )  # fmt: skip


@compiled()
def tier_of(tiers: Any, w: int, key: int) -> Any:
    """Return the first tier that worker ``w`` can load a block from now; -1: none."""
    for t in range(tiers.links.shape[1]):
        s = tiers.links[w, t].store
        if s >= 0:
            block = tiers.slots[s, slot_of(tiers.slots, tiers.blocks, s, key)] - 1
            if block >= 0 and tiers.ready_s[s, block] <= tiers.clock[0].now:
                return np.int64(t)
    return np.int64(-1)


@compiled()
def touch(tiers: Any, w: int, key: int, request: int) -> None:
    """Renew a block that a request uses in all tiers of a worker."""
    for t in range(tiers.links.shape[1]):
        s = tiers.links[w, t].store
        if s >= 0 and (tiers.rules[t].renews or tiers.stores[s].arc):
            block = tiers.slots[s, slot_of(tiers.slots, tiers.blocks, s, key)] - 1
            if block < 0:
                continue
            if not tiers.stores[s].arc:
                take_out(tiers.blocks, tiers.stores, s, block)
                append(tiers.blocks, tiers.stores, s, block)
            elif tiers.arc.lists.of[s, block] <= AGAIN:  # else it is only remembered
                record, at = tiers.blocks[s, block], np.int64(tiers.arc.lists.of[s, block])
                again = record.copy != request and record.copy != _FRESH
                move(tiers.arc.lists, s, block, AGAIN if again else at)
                record.copy = request


@compiled()
def _drop(tiers: Any, s: int, block: int) -> None:
    """Take a block out of a store."""
    take_out(tiers.blocks, tiers.stores, s, block)
    tiers.stores[s].n_blank += 1
    if tiers.stores[s].arc:
        move(tiers.arc.lists, s, block, np.int64(0))
    if tiers.stores[s].by_session:
        _forget_ghost(tiers, s, block)
    _forget(tiers, s, block)


@compiled()
def _forget(tiers: Any, s: int, block: int) -> None:
    """Let a store know nothing of a block that it holds no more."""
    slot = slot_of(tiers.slots, tiers.blocks, s, tiers.blocks[s, block].block_hash)
    forget(tiers.slots, tiers.blocks, s, slot)
    give_up_record(tiers.blocks, tiers.stores, s, block)


@compiled()
def _admit(tiers: Any, s: int, known: int, key: int) -> Any:
    """Give a block (``known``: its record, or -1) a place in a store that evicts as ARC does.
    Returns its record, whether another one has left, and the hash of that."""
    store, block = tiers.stores[s], np.int64(known)
    if block < 0:
        block = np.int64(new_record(tiers.blocks, tiers.stores, s))
        tiers.blocks[s, block].block_hash = key
        tiers.slots[s, slot_of(tiers.slots, tiers.blocks, s, key)] = block + 1
    out, gone = use(tiers.arc, s, block, store.n_blank + store.n_idle)
    left = np.int64(0)
    if out >= 0:
        left = np.int64(tiers.blocks[s, out].block_hash)
        take_out(tiers.blocks, tiers.stores, s, out)
        store.n_blank += 1
        tiers.ready_s[s, out] = np.inf  # nobody can load it
    if gone >= 0:
        _forget(tiers, s, gone)
    return block, out >= 0, left


@compiled()
def take(tiers: Any, w: int, t: int, key: int) -> None:
    """Take a block out of an exclusive tier."""
    s = tiers.links[w, t].store
    block = tiers.slots[s, slot_of(tiers.slots, tiers.blocks, s, key)] - 1
    if block >= 0:
        _drop(tiers, s, np.int64(block))


@compiled()
def _next_back(tiers: Any, w: int, t: int) -> Any:
    """Return the first tier from ``t`` on that a worker writes back to; -1: none."""
    for other in range(t, tiers.links.shape[1]):
        if tiers.rules[other].write == BACK and tiers.links[w, other].store >= 0:
            return np.int64(other)
    return np.int64(-1)


@compiled()
def write(tiers: Any, w: int, t: int, block: int, at_s: float) -> None:
    """Let a worker write a block into the place that its store has for it, from ``at_s`` on."""
    link = tiers.links[w, t]
    s, store = link.store, tiers.stores[link.store]
    tiers.blocks[s, block].writer = w
    append(tiers.blocks, tiers.stores, s, block)
    store.n_blank -= 1
    link.stored += 1
    link.store_free_s = max(at_s, link.store_free_s) + link.store_s
    store.store_free_s = max(at_s, store.store_free_s) + store.store_s
    tiers.ready_s[s, block] = max(link.store_free_s, store.store_free_s)


@compiled()
def put(tiers: Any, w: int, tier: int, block_hash: int, at_s: float) -> None:
    """Let a worker store a block in a tier, from ``at_s`` on; if it is there, renew it."""
    t, key = np.int64(tier), np.int64(block_hash)
    while t >= 0:
        link = tiers.links[w, t]
        s = link.store
        store = tiers.stores[s]
        block: Any = np.int64(tiers.slots[s, slot_of(tiers.slots, tiers.blocks, s, key)] - 1)
        if block >= 0 and not (store.arc and tiers.arc.lists.of[s, block] > AGAIN):
            if tiers.rules[t].renews:
                take_out(tiers.blocks, tiers.stores, s, block)
                append(tiers.blocks, tiers.stores, s, block)
            return
        if store.n_blank + store.n_idle == 0:
            return  # it has no room at all
        victim_hash, full = np.int64(0), store.n_blank == 0
        if store.arc:
            block, full, victim_hash = _admit(tiers, s, block, key)
            tiers.blocks[s, block].copy = _LEFT if tiers.rules[t].write == BACK else _FRESH
        else:
            if full:
                victim = np.int64(store.idle_head)
                victim_hash = np.int64(tiers.blocks[s, victim].block_hash)
                _drop(tiers, s, victim)
            block = np.int64(new_record(tiers.blocks, tiers.stores, s))
            tiers.blocks[s, block].block_hash = key
            tiers.slots[s, slot_of(tiers.slots, tiers.blocks, s, key)] = block + 1
        below = np.int64(-1)
        if full:
            below = _next_back(tiers, w, t + 1)
            store.evicted += 1
        write(tiers, w, t, block, at_s)
        t, key = below, victim_hash


@compiled()
def known(tiers: Any, s: int, key: int) -> Any:
    """Return the record of a block, there or not, in a store that evicts by session."""
    slot = slot_of(tiers.slots, tiers.blocks, s, key)
    block = np.int64(tiers.slots[s, slot] - 1)
    if block < 0:
        block = np.int64(new_record(tiers.blocks, tiers.stores, s))
        tiers.blocks[s, block].block_hash = key
        tiers.slots[s, slot] = block + 1
        tiers.ready_s[s, block] = np.inf
        move(tiers.by_session.lists, s, block, session_lists.GHOSTS)
    return block


@compiled()
def _forget_ghost(tiers: Any, s: int, block: int) -> None:
    tiers.by_session.ghost[s, block] = 0.0
    session_lists.leave(tiers.by_session, s, block, np.int64(0))


@compiled()
def forget_oldest(tiers: Any, s: int) -> None:
    """Let a store that evicts by session remember no more blocks than it has room for."""
    lists, store = tiers.by_session.lists, tiers.stores[s]
    while lists.sizes[s, session_lists.GHOSTS] > store.n_blank + store.n_idle:
        block = oldest(lists, s, session_lists.GHOSTS)
        _forget_ghost(tiers, s, block)
        _forget(tiers, s, block)


@compiled()
def let_go(tiers: Any, w: int, t: int, block: int, at_s: float) -> None:
    """Let a block leave a store that evicts by session, and perhaps go to the next tier."""
    s = tiers.links[w, t].store
    take_out(tiers.blocks, tiers.stores, s, block)
    tiers.stores[s].n_blank += 1
    tiers.stores[s].evicted += 1
    tiers.ready_s[s, block] = np.inf
    below = _next_back(tiers, w, t + 1)
    if below >= 0:
        put(tiers, w, below, tiers.blocks[s, block].block_hash, at_s)


@compiled()
def write_back(tiers: Any, w: int, key: int) -> None:
    """Store a block that a worker's cache evicts, where that is when it is stored."""
    t = _next_back(tiers, w, np.int64(0))
    if t >= 0:
        put(tiers, w, t, key, tiers.clock[0].now)


@compiled()
def load_end(tiers: Any, w: int, begins: bool) -> Any:
    """Return when ``counts`` blocks of each tier have come to a worker, s; and begin, if so."""
    now = tiers.clock[0].now
    latest = now
    for t in range(tiers.links.shape[1]):
        n, link = tiers.counts[t], tiers.links[w, t]
        if n == 0:
            continue
        store, start = tiers.stores[link.store], now + tiers.rules[t].latency_s
        own = max(start, link.load_free_s) + n * link.load_s
        shared = max(start, store.load_free_s) + n * store.load_s
        latest = max(latest, own, shared)
        if begins:
            link.load_free_s, store.load_free_s = own, shared
            link.loaded += n
    return latest


@compiled()
def prompt_seconds(prompt_s: Any, pool: int, tokens: int) -> Any:
    """Return what it takes to compute the first tokens of a prompt by itself, s, from ``prompt_s``,
    ``[pools, lengths / GRAIN]``; more goes on as the last."""
    at, last = tokens / GRAIN, prompt_s.shape[1] - 1
    below = min(np.int64(at), last - 1)
    low, high = prompt_s[pool, below], prompt_s[pool, below + 1]
    return low + (high - low) * (at - below)


@njit(_nrt=False)
def _lose_copies(tiers: Any, s: int, w: int) -> None:
    """Take out of a store what a worker has not stored whole, in order of use."""
    block: Any = np.int64(tiers.stores[s].idle_head)
    while block >= 0:
        behind = np.int64(tiers.blocks[s, block].behind)
        if tiers.blocks[s, block].writer == w and tiers.ready_s[s, block] > tiers.clock[0].now:
            _drop(tiers, s, block)
        block = behind


def forget_stores(tiers: Tiers, w: int) -> None:
    """Let a worker die: it takes its own stores along, and what is on its way to others."""
    for t, rule in enumerate(tiers.rules):
        link = tiers.links[w, t]
        s = int(link["store"])
        if s >= 0 and not rule["own"]:
            _lose_copies(tiers, s, w)
        elif s >= 0:
            store = tiers.stores[s]
            store["n_blank"] += store["n_idle"]
            store["n_idle"] = store["n_made"] = 0
            store["spare"] = store["idle_head"] = store["idle_tail"] = -1
            store["load_free_s"] = store["store_free_s"] = 0.0
            tiers.slots[s] = 0
            if store["arc"]:
                clear(tiers.arc, s)
            if store["by_session"]:
                session_lists.clear(tiers.by_session, s)
        link["load_free_s"] = link["store_free_s"] = 0.0
