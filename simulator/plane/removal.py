"""Taking a request out of an engine between two steps: its worker died, or its client left."""

from typing import Any

import numpy as np

from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.events import wake
from eldr_sim.simulator.plane.kv_cache import blocks_of, release
from eldr_sim.simulator.plane.kv_loads import have_come
from eldr_sim.simulator.plane.kv_manager import Engines, side_of
from eldr_sim.simulator.plane.queues import line_remove, queue_remove
from eldr_sim.simulator.plane.state import HERE


@compiled()
def give_back(clock: Any, events: Any, engines: Engines, w: int, request: int) -> None:
    """Give a request's KV blocks back, and let the engine look who can have them."""
    release(engines.kv, engines.tables, engines.workers, w, side_of(engines, w), request)
    if engines.workers[w].next_start < np.inf:
        wake(clock, events, engines.workers, w)


@compiled()
def remove(clock: Any, events: Any, engines: Engines, w: int, request: int) -> None:
    """Take a request out of an engine, between two of its steps: its queues, batch and KV blocks.

    What it has generated is noted, so that another engine can go on from there.
    """
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
        if place < worker.batch:
            context = record.prompt_len - 1 + record.generated
            worker.batch -= 1
            worker.tokens -= engines.sequences[w, place].tokens
            worker.context -= context
            table = engines.tables[request, side_of(engines, w)]
            slots = context + engines.sequences[w, place].free_slots
            held = blocks_of(slots, engines.settings[0].block_size)
            table.private = held + record.window_blocks - table.listed
        else:
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
    """Take a request out of a linked queue.

    Returns the queue's head, and who came before it: -1 nobody, -2 it is not there.
    """
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
