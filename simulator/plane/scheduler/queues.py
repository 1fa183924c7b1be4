"""The queue of requests that wait for the first time: a pairing heap over the requests' records
(Fredman, Sedgewick, Sleator and Tarjan, Algorithmica 1, 1986), by ``REQUEST.queue_key``, equal ones
by ``REQUEST.ticket``, and a line in the order in which they came, for orders that age.

A heap is its first request, or -1; ``REQUEST.before`` is an elder sibling, or the parent of a first
child."""

from typing import Any

import numpy as np

from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.events import wake
from eldr_sim.simulator.plane.kv.kv_cache import blocks_of, release
from eldr_sim.simulator.plane.kv.kv_loads import have_come
from eldr_sim.simulator.plane.kv.kv_manager import Engines, free_prompt, side_of
from eldr_sim.simulator.plane.state import HERE


@compiled()
def queue_add(requests: Any, heap: int, request: int) -> Any:
    """Add a request; returns the heap."""
    requests[request].next = requests[request].child = requests[request].before = -1
    if heap < 0:
        return request
    return _meld(requests, heap, request)


@compiled()
def queue_pop(requests: Any, heap: int) -> Any:
    """Take the first request out; returns the heap of the others, melded in pairs."""
    child, pairs = requests[heap].child, np.int64(-1)
    while child >= 0:
        other = requests[child].next
        if other < 0:
            pair, behind = child, np.int64(-1)
        else:
            behind = requests[other].next
            pair = _meld(requests, child, other)
        requests[pair].next = pairs
        pairs, child = pair, behind
    rest = np.int64(-1)
    while pairs >= 0:
        behind = requests[pairs].next
        rest = pairs if rest < 0 else _meld(requests, rest, pairs)
        pairs = behind
    if rest >= 0:
        requests[rest].next = requests[rest].before = -1
    return rest


@compiled()
def queue_remove(requests: Any, heap: int, request: int) -> Any:
    """Take any request out; returns the heap of the others."""
    if request == heap:
        return queue_pop(requests, heap)
    before, behind = requests[request].before, requests[request].next
    if requests[before].child == request:
        requests[before].child = behind
    else:
        requests[before].next = behind
    if behind >= 0:
        requests[behind].before = before
    rest = queue_pop(requests, request)
    return heap if rest < 0 else _meld(requests, heap, rest)


@compiled()
def line_add(requests: Any, worker: Any, request: int) -> None:
    """Put a request at the end of its worker's line."""
    requests[request].newer, requests[request].older = -1, worker.newest
    if worker.newest < 0:
        worker.oldest = request
    else:
        requests[worker.newest].newer = request
    worker.newest = request


@compiled()
def line_remove(requests: Any, worker: Any, request: int) -> None:
    """Take a request out of its worker's line."""
    older, newer = requests[request].older, requests[request].newer
    if older < 0:
        worker.oldest = newer
    else:
        requests[older].newer = newer
    if newer < 0:
        worker.newest = older
    else:
        requests[newer].older = older


@compiled()
def _meld(requests: Any, one: int, other: int) -> Any:
    """Return the first of two heaps' requests, the other a child of it."""
    first, second = requests[one], requests[other]
    if second.queue_key < first.queue_key or (
        second.queue_key == first.queue_key and second.ticket < first.ticket
    ):
        one, other = other, one
    eldest = requests[one].child
    requests[other].next, requests[other].before = eldest, one
    if eldest >= 0:
        requests[eldest].before = other
    requests[one].child = other
    return one


@compiled()
def waits_for_blocks(worker: Any) -> Any:
    """Whether requests wait that KV blocks, when they become free, may let in."""
    return bool(worker.new_head >= 0 or worker.preempted_head >= 0)


@compiled()
def free_source(clock: Any, events: Any, engines: Engines, w: int, request: int) -> None:
    """Free the KV cache of a request that another worker has fetched; SGLang's loop looks when it
    has processed a step's output."""
    worker, pool, requests = engines.workers[w], engines.pools[engines.pool_of[w]], engines.requests
    steps = worker.next_start > clock[0].now and worker.batch + worker.prefilling > 0
    if pool.fills_up and pool.frees_late and steps:  # in a group others step alone
        requests[request].newer = -1
        if worker.fetched_head < 0:
            worker.fetched_head = request
        else:
            requests[worker.fetched_tail].newer = request
        worker.fetched_tail = request
        return
    free_prompt(engines, w, request)
    if waits_for_blocks(worker):
        wake(clock, events, engines.workers, w)


@compiled()
def drop_fetched(engines: Engines, w: int, request: int) -> None:
    """Remove a request from the list of fetched KV caches; it may not be there."""
    worker, requests = engines.workers[w], engines.requests
    before, at = np.int64(-1), np.int64(worker.fetched_head)
    while at >= 0 and at != request:
        before, at = at, np.int64(requests[at].newer)
    if at < 0:
        return
    if before < 0:
        worker.fetched_head = requests[at].newer
    else:
        requests[before].newer = requests[at].newer
    if worker.fetched_tail == at:
        worker.fetched_tail = before


@compiled()
def give_back(clock: Any, events: Any, engines: Engines, w: int, request: int) -> None:
    """Give a request's KV blocks back, and wake the engine, which may admit others."""
    release(engines.kv, engines.tables, engines.workers, w, side_of(engines, w), request)
    if engines.workers[w].next_start < np.inf:
        wake(clock, events, engines.workers, w)


@compiled()
def remove(clock: Any, events: Any, engines: Engines, w: int, request: int) -> None:
    """Take a request out of an engine, between two steps; what it has generated is noted."""
    worker, record = engines.workers[w], engines.requests[request]
    decodes = engines.pools[engines.pool_of[w]].then == HERE
    if engines.kv.tiers.loads.shape[0] > 0 and engines.kv.tiers.loads[request].loading:
        engines.kv.tiers.loads[request].waits_for = -1  # what is on its way comes all the same
        have_come(engines, w, side_of(engines, w), request)
    n = worker.batch + worker.prefilling
    place: Any = np.int64(0)
    while place < n and engines.sequences[w, place].request != request:
        place += 1
    if place < n:
        if decodes:
            record.generated = record.output_len - engines.sequences[w, place].tokens_left
        if place < worker.rested:
            worker.rested -= 1
        chunk = engines.sequences[w, place].chunk
        worker.chunk_tokens -= chunk  # of a step that is planned and has not begun
        if place < worker.batch:
            worker.joined -= place >= worker.batch - worker.joined
            context = record.prompt_len - 1 + record.generated
            worker.batch -= 1
            worker.tokens -= engines.sequences[w, place].tokens
            worker.context -= context
            table = engines.tables[request, side_of(engines, w)]
            slots = context + engines.sequences[w, place].free_slots
            held = blocks_of(slots, engines.settings[0].block_size)
            table.private = held + record.window_blocks - table.listed
        else:
            worker.filled -= chunk > 0 and chunk == engines.sequences[w, place].todo
            worker.prefilling -= 1
        for i in range(place, n - 1):
            engines.sequences[w, i] = engines.sequences[w, i + 1]
    else:
        _leave_queues(engines, w, request, decodes)
    give_back(clock, events, engines, w, request)


@compiled()
def _leave_queues(engines: Engines, w: int, request: int, decodes: bool) -> None:
    """Take a request out of whichever queue of an engine it stands in, or of its later stages."""
    worker, requests = engines.workers[w], engines.requests
    record = requests[request]
    worker.late_head, before = _unlink(requests, worker.late_head, request)
    queued = before > -2
    if queued and worker.late_tail == request:
        worker.late_tail = before
    if not queued:
        worker.arrived_head, before = _unlink(requests, worker.arrived_head, request)
        queued = before > -2
    if not queued:
        worker.preempted_head, before = _unlink(requests, worker.preempted_head, request)
        queued = before > -2
    if not queued:
        worker.loading_head, before = _unlink(requests, worker.loading_head, request)
        queued = before > -2
    begun = record.prefill_start_s >= 0.0
    if record.source >= 0:
        begun = record.transfer_start_s >= 0.0
    if not queued and not begun:
        worker.new_head = queue_remove(requests, worker.new_head, request)
        line_remove(requests, worker, request)
    if queued or decodes or not begun:
        worker.n_waiting -= 1
        worker.waiting_tokens -= record.prompt_len + record.generated
    else:
        worker.leaving -= 1
        worker.leaving_tokens -= record.prompt_len + record.generated


@compiled()
def _unlink(requests: Any, head: int, request: int) -> Any:
    """Take a request out of a linked queue; returns the head, and who came before (-1, -2:
    none)."""
    before: Any = np.int64(-1)
    at = head
    while at >= 0 and at != request:
        before, at = at, requests[at].next
    if at < 0:
        return head, np.int64(-2)
    if before < 0:
        return requests[at].next, before
    requests[before].next = requests[at].next
    return head, before
