"""The queue of those who wait for the first time: a pairing heap over the requests' records.

They also stand in line in the order in which they came, so that the oldest is known: an order that
ages lets it go first when it has waited long enough.

Fredman, Sedgewick, Sleator and Tarjan, *The pairing heap* (Algorithmica 1, 1986): adding takes
constant time, taking the first logarithmic time on average. Requests are ordered by
``REQUEST.queue_key``, equal ones by ``REQUEST.ticket``; a heap is its first request, or -1.
``REQUEST.before`` is a request's elder sibling, or the parent of a first child.
"""

from typing import Any

import numpy as np

from eldr_sim.simulator.plane.compiled import compiled


@compiled()
def queue_add(requests: Any, heap: int, request: int) -> Any:
    """Add a request; returns the heap."""
    requests[request].next = requests[request].child = requests[request].before = -1
    if heap < 0:
        return request
    return _meld(requests, heap, request)


@compiled()
def queue_pop(requests: Any, heap: int) -> Any:
    """Take the first request out; returns the heap of the others.

    Its children are melded in pairs, and the pairs, the last one first, into one.
    """
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
