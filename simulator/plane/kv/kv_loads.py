"""What a request takes from KV tiers when an engine admits it, and what it gives them, compiled.

Behind its worker's cached blocks it loads the run that tiers hold, or computes it where that is
faster. It has all its blocks then, but no place in the batch, and begins first when they are there,
or, where loads and steps overlap, at once. A prefill worker may pull what the decode worker of the
turn before has, over the links of KV transfers."""

from typing import Any

import numpy as np

from eldr_sim.jit import njit
from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.kv import kv_tiers
from eldr_sim.simulator.plane.kv.block_lists import block_hash, n_shared
from eldr_sim.simulator.plane.kv.kv_cache import find, hold, matched_tokens, publish
from eldr_sim.simulator.plane.state import HERE
from eldr_sim.traces.requests.caches import session_lists

_NONE = np.int64(0)
#: What `lookup_blocks` returns where a request has to wait before it does anything.
WAITS = np.int64(-2)


@compiled()
def lookup_blocks(engines: Any, w: int, side: int, request: int, found: int) -> Any:
    """Return how many of ``found`` blocks a request takes, or WAITS for those on their way."""
    tiers, kv = engines.kv.tiers, engines.kv
    load, first = tiers.loads[request], kv.first_listed[request]
    taken: Any = np.int64(found)
    load.waits_for, load.delayed, load.kept = -1, False, 0
    if engines.workers[w].loading_head < 0:
        return taken
    in_flight = tiers.loading[0].in_flight
    for number in range(min(taken, n_shared(kv, request))):
        loader = kv.blocks[w, kv.listed[side, first + number]].loader
        if loader < 0:
            continue
        if in_flight == kv_tiers.DUPLICATE:
            return np.int64(number)
        load.waits_for = loader
        if in_flight == kv_tiers.DELAY:
            taken = WAITS
    return taken


@compiled()
def count_idle(engines: Any, w: int, side: int, request: int, found: int) -> Any:
    """Return how many of a request's first cached blocks are free."""
    kv, idle = engines.kv, _NONE
    for number in range(found):
        block = kv.listed[side, kv.first_listed[request] + number]
        if kv.blocks[w, block].n_held == 0:
            idle += 1
    return idle


@compiled()
def loadable_tokens(engines: Any, w: int, request: int, found: int, tokens: int) -> Any:
    """Count the blocks behind ``found`` ones that tiers hold; 0 if computing them is faster."""
    kv, tiers, settings = engines.kv, engines.kv.tiers, engines.settings[0]
    size, prefix = settings.block_size, settings.prefix_block_tokens
    n_listed = kv.first_listed[request + 1] - kv.first_listed[request]
    limit, number = min(n_listed, (tokens - 1) // size), found
    tiers.counts[:] = 0
    while number < limit:
        t = kv_tiers.tier_of(tiers, w, block_hash(kv, request, number, size, prefix))
        if t < 0:
            break
        tiers.counts[t] += 1
        number += 1
    more = np.int64(number - found)
    if more > 0 and tiers.loading[0].cheaper:
        seconds = kv_tiers.load_end(tiers, w, False) - tiers.clock[0].now
        if seconds >= _saved(engines, w, found, number):
            tiers.counts[:] = 0
            return _NONE
    return more


@compiled()
def reach_peer(engines: Any, w: int, request: int, found: int, tokens: int) -> Any:
    """Count the blocks behind ``found`` ones that a prefill worker pulls, and note the source; 0
    where no decode worker holds them, or it is faster to compute them."""
    kv, requests = engines.kv, engines.requests
    loading, load = kv.tiers.loading[0], kv.tiers.loads[request]
    load.pulled = 0
    parent = requests[request].parent
    if loading.pulls < 0 or parent < 0 or engines.pools[engines.pool_of[w]].then < 0:
        return _NONE
    peer = requests[parent].worker
    if peer < 0 or engines.pools[engines.pool_of[peer]].then != HERE:
        return _NONE
    size = engines.settings[0].block_size
    more = matched_tokens(kv, peer, request, tokens) // size - found
    if more <= 0:
        return _NONE
    seconds = engines.settings[0].setup_s + more * loading.pull_s
    if loading.cheaper and seconds >= _saved(engines, w, found, found + more):
        return _NONE
    load.peer, load.pulled = peer, more
    return np.int64(more)


@njit(_nrt=False)
def match_tiers(
    kv: Any, first: int, request: int, tokens: int, matched: Any, reachable: Any, load_s: Any
) -> None:
    """Fill in the tokens of a prompt that workers from ``first`` on have in caches (``matched``,
    int64) and tiers, and ``load_s``, float64: what it takes to load these, s."""
    size, prefix = kv.block_size, kv.prefix_block_tokens
    n_listed = kv.first_listed[request + 1] - kv.first_listed[request]
    limit = min(n_listed, (tokens - 1) // size)
    for i in range(matched.shape[0]):
        number: Any = np.int64(matched[i] // size)
        kv.tiers.counts[:] = 0
        while number < limit:
            key = block_hash(kv, request, number, size, prefix)
            t = kv_tiers.tier_of(kv.tiers, first + i, key)
            if t < 0:
                break
            kv.tiers.counts[t] += 1
            number += 1
        reachable[i] = number * size
        load_s[i] = kv_tiers.load_end(kv.tiers, first + i, False) - kv.tiers.clock[0].now


@compiled()
def _saved(engines: Any, w: int, found: int, end: int) -> Any:
    """Return what it takes to compute the blocks from ``found`` to ``end``, s."""
    size, pool = engines.settings[0].block_size, engines.pool_of[w]
    after = kv_tiers.prompt_seconds(engines.prompt_s, pool, end * size)
    return after - kv_tiers.prompt_seconds(engines.prompt_s, pool, found * size)


@compiled()
def reserve_blocks(engines: Any, w: int, request: int, found: int, more: int) -> None:
    """Renew the blocks that are to be loaded in their tiers, or take them out of exclusive ones."""
    kv, tiers, settings = engines.kv, engines.kv.tiers, engines.settings[0]
    size, prefix = settings.block_size, settings.prefix_block_tokens
    for number in range(found + more - 1, found - 1, -1):
        key = block_hash(kv, request, number, size, prefix)
        t = kv_tiers.tier_of(tiers, w, key)
        kv_tiers.touch(tiers, w, key, request)
        if t >= 0 and tiers.rules[t].exclusive:
            kv_tiers.take(tiers, w, t, key)


@compiled()
def begin(engines: Any, w: int, side: int, request: int, more: int, pulled: int) -> None:
    """Begin to load ``more`` blocks behind a request's cached ones, which it holds; ``pulled`` ones
    behind these come from a decode worker. Others find all of them in the cache from now on."""
    kv, tiers, settings = engines.kv, engines.kv.tiers, engines.settings[0]
    size, prefix = settings.block_size, settings.prefix_block_tokens
    load, found = tiers.loads[request], np.int64(engines.tables[request, side].found)
    for t in range(tiers.links.shape[1]):
        s = tiers.links[w, t].store
        if s >= 0 and tiers.stores[s].by_session:
            _ask_by_session(engines, s, t, request, found + more if more > 0 else _NONE)
    for t in range(tiers.links.shape[1]):
        if tiers.rules[t].write == kv_tiers.SELECTIVE and tiers.links[w, t].store >= 0:
            for number in range(min(found, n_shared(kv, request))):
                key = block_hash(kv, request, number, size, prefix)
                kv_tiers.put(tiers, w, t, key, tiers.clock[0].now)
    if engines.requests[request].prefill_start_s < 0.0:  # later ones are after a preemption
        for t in range(tiers.links.shape[1]):
            tiers.hits[request, t] = tiers.counts[t] * size
        if pulled > 0:
            tiers.hits[request, tiers.loading[0].pulls] = pulled * size
    now, end_of_all = tiers.clock[0].now, found + more + pulled
    load.cached, load.until_s, load.since_s, load.loading = end_of_all * size, -1.0, now, False
    if more > 0:
        end = kv_tiers.load_end(tiers, w, True)
        load.saved_s += _saved(engines, w, found, found + more)
        tokens = (found + more) * size
        publish(kv, engines.tables, engines.workers, w, side, request, tokens, size, prefix)
        if tiers.loading[0].layers > 0:
            engines.workers[w].load_end = max(engines.workers[w].load_end, end)
        elif end > now:
            load.until_s = end
            for number in range(found, found + more):
                kv.blocks[w, kv.listed[side, kv.first_listed[request] + number]].loader = request
    load.pulling = pulled > 0
    if load.pulling:
        load.saved_s += _saved(engines, w, found + more, end_of_all)
        tokens, peer = end_of_all * size, load.peer
        parent = engines.requests[request].parent
        publish(kv, engines.tables, engines.workers, w, side, request, tokens, size, prefix)
        for number in range(found + more, end_of_all):
            kv.blocks[w, kv.listed[side, kv.first_listed[request] + number]].loader = request
        held, _ = find(kv, peer, 1 - side, request, parent, tokens + 1, size, prefix)
        engines.tables[request, 1 - side].found = held
        hold(kv, engines.tables, engines.workers, peer, 1 - side, request, _NONE)
        tiers.links[w, tiers.loading[0].pulls].loaded += pulled
    load.loading = load.until_s >= 0.0 or load.waits_for >= 0 or load.pulling


@compiled()
def line_up(engines: Any, w: int, request: int) -> None:
    """Put a request behind the others that wait for blocks or for a place with theirs."""
    requests, worker = engines.requests, engines.workers[w]
    requests[request].next = -1
    if worker.loading_head < 0:
        worker.loading_head = request
        return
    at: Any = np.int64(worker.loading_head)
    while requests[at].next >= 0:
        at = np.int64(requests[at].next)
    requests[at].next = request


@compiled()
def have_come(engines: Any, w: int, side: int, request: int) -> None:
    """Let a request's blocks be here, and those of requests that waited for them alone."""
    kv, loads = engines.kv, engines.kv.tiers.loads
    worker = engines.workers[w]
    loads[request].until_s = -1.0
    done = loads[request].waits_for < 0 and not loads[request].pulling
    last: Any = np.int64(request)
    while done:
        load = loads[last]
        load.loading = False
        load.waited_s += kv.tiers.clock[0].now - load.since_s
        first = kv.first_listed[last]
        for number in range(engines.tables[last, side].listed):
            block = kv.blocks[w, kv.listed[side, first + number]]
            if block.loader == last:
                block.loader = -1
        at: Any = np.int64(worker.loading_head)
        while at >= 0:
            if loads[at].waits_for == last:
                loads[at].waits_for = -1
            at = np.int64(engines.requests[at].next)
        done, at = False, np.int64(worker.loading_head)
        while at >= 0 and not done:
            load = loads[at]
            waits = load.waits_for >= 0 or load.pulling
            if load.loading and not waits and load.until_s < 0.0:
                last, done = at, True
            at = np.int64(engines.requests[at].next)


@compiled()
def keep(engines: Any, w: int, side: int, request: int, tokens: int, at_s: float) -> None:
    """Store the full blocks of a context's first ``tokens`` tokens, that are computed, in tiers."""
    kv, tiers, settings = engines.kv, engines.kv.tiers, engines.settings[0]
    size, prefix = settings.block_size, settings.prefix_block_tokens
    load = tiers.loads[request]
    n = min(engines.tables[request, side].full, tokens // size)
    for t in range(tiers.links.shape[1]):
        s = tiers.links[w, t].store
        if s >= 0 and tiers.stores[s].by_session:
            if n > load.kept:
                _keep_by_session(engines, w, t, request, load.kept, n, at_s)
        elif tiers.rules[t].write == kv_tiers.THROUGH and s >= 0:
            for number in range(load.kept, n):
                kv_tiers.put(tiers, w, t, block_hash(kv, request, number, size, prefix), at_s)
    load.kept = max(load.kept, n)


@compiled()
def _ask_by_session(engines: Any, s: int, t: int, request: int, loads: int) -> None:
    """Tell a store that evicts by session which blocks a request asks for; ``loads``: the end of
    those loaded, with whose last one's session it goes on; 0: none."""
    kv, tiers, settings = engines.kv, engines.kv.tiers, engines.settings[0]
    lists, size, prefix = tiers.by_session, settings.block_size, settings.prefix_block_tokens
    record, listed = engines.requests[request], kv.first_listed
    n = (record.prompt_len + record.generated) // size
    n = min(n, listed[request + 1] - listed[request])
    session_lists.come(lists, s)
    tiers.goes_on[request, t] = -1
    for number in range(n):
        block = kv_tiers.known(tiers, s, block_hash(kv, request, number, size, prefix))
        found = tiers.ready_s[s, block] <= tiers.clock[0].now
        session_lists.ask(lists, s, block, number, found)
        if number == loads - 1 and found:
            tiers.goes_on[request, t] = session_lists.session_at(lists, s, block)
    session_lists.has_asked(lists, s, tiers.stores[s].n_made)
    kv_tiers.forget_oldest(tiers, s)


@compiled()
def _keep_by_session(
    engines: Any, w: int, t: int, request: int, first: int, end: int, at_s: float
) -> None:  # fmt: skip
    """Store a context's blocks in a store that evicts by session: all or none."""
    kv, tiers, settings = engines.kv, engines.kv.tiers, engines.settings[0]
    lists, size, prefix = tiers.by_session, settings.block_size, settings.prefix_block_tokens
    s = tiers.links[w, t].store
    room, there = np.int64(tiers.stores[s].n_blank), np.int64(tiers.stores[s].n_idle)
    if room + there == 0:
        return
    for number in range(first, end):
        key = block_hash(kv, request, number, size, prefix)
        lists.own[number - first] = kv_tiers.known(tiers, s, key)
    slot, fresh, n_out = session_lists.choose(
        lists, s, np.int64(end - first), np.int64(first), tiers.goes_on[request, t], room, there
    )
    for k in range(n_out):
        kv_tiers.let_go(tiers, w, t, lists.out[k], at_s)
    if slot >= 0:
        tiers.goes_on[request, t] = -1
        for k in range(end - first):
            block = lists.own[k]
            if not tiers.ready_s[s, block] < np.inf:
                session_lists.place(lists, s, block, slot, fresh)
                kv_tiers.write(tiers, w, t, block, at_s)
    kv_tiers.forget_oldest(tiers, s)
