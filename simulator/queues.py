"""The queue of those who wait for the first time: a pairing heap over the requests' records.

Fredman, Sedgewick, Sleator and Tarjan, *The pairing heap* (Algorithmica 1, 1986): adding takes
constant time, taking the first logarithmic time on average. Requests are ordered by
``REQUEST.queue_key``, equal ones by ``REQUEST.ticket``; a heap is its first request, or -1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eldr_sim.simulator.compiled import compiled


@compiled()
def queue_add(requests: Any, heap: int, request: int) -> Any:
    """Add a request; returns the heap."""
    requests[request].next = requests[request].child = -1
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
        requests[rest].next = -1
    return rest


@compiled()
def _meld(requests: Any, one: int, other: int) -> Any:
    """Return the first of two heaps' requests, the other a child of it."""
    first, second = requests[one], requests[other]
    if second.queue_key < first.queue_key or (
        second.queue_key == first.queue_key and second.ticket < first.ticket
    ):
        one, other = other, one
    requests[other].next = requests[one].child
    requests[one].child = other
    return one
