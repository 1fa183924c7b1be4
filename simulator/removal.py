"""Takes requests out of all that they wait in: queues, batches, links and routers' hands.

For what compiled code never does: a request whose worker has died, or whose client gave up. Between
two calls of the compiled loop no worker has planned a step that has not begun, so none is undone.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.jit import njit
from eldr_sim.simulator import network, state
from eldr_sim.simulator.engine import wake
from eldr_sim.simulator.kv_cache import blocks_of, release
from eldr_sim.simulator.queues import line_remove, queue_remove

if TYPE_CHECKING:
    from eldr_sim.simulator.cluster import Cluster

#: Events about a request that is on its way to the next worker.
_OF_REQUESTS = state.DISPATCH, state.TRANSFER_START, state.PROMPT_END


@njit(_nrt=False)
def _give_back(engines: Any, w: int, pool: int, request: int, context: int) -> None:
    """Give KV blocks back; of a running sequence those of ``context`` tokens, else negative."""
    if context >= 0:
        table = engines.tables[request, pool]
        held = blocks_of(context, engines.settings[0].block_size)
        table.private = held + engines.requests[request].window_blocks - table.listed
    release(engines.kv, engines.tables, engines.workers, w, pool, request)


@njit(_nrt=False)
def _leave_queue(requests: Any, workers: Any, w: int, request: int) -> None:
    """Take a request out of the queue of those who wait for the first time."""
    worker = workers[w]
    worker.new_head = queue_remove(requests, worker.new_head, request)
    line_remove(requests, worker, request)


@njit(_nrt=False)
def _wake(clock: Any, events: Any, workers: Any, w: int) -> None:
    wake(clock, events, workers, w)


@njit(_nrt=False)
def _drop_flow(
    clock: Any, events: Any, net: Any, request: int, out_rate: float, in_rate: float
) -> None:  # fmt: skip
    network.drop(clock, events, net, request, out_rate, in_rate)


class Removal:
    """Removes requests from a cluster while it runs."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.clock = cluster, cluster.arrays.clock
        engines = cluster.arrays.engines
        self.workers, self.pools = engines.workers, engines.pools

    @property
    def requests(self) -> NDArray[np.void]:
        """The requests; more of them with time."""
        return self.cluster.requests

    def forget_events(self, requests: Collection[int], engines: range) -> None:
        """Take out the events of engines, and of requests on their way."""
        events, n = self.cluster.arrays.events, int(self.clock["n_events"][0])
        kind, subject = events["kind"][:n], events["subject"][:n]
        gone = np.isin(kind, _OF_REQUESTS) & np.isin(subject, list(requests))
        gone |= np.isin(kind, (state.BOUNDARY, state.STEP_START)) & np.isin(subject, engines)
        for request in subject[gone & (kind == state.PROMPT_END)].tolist():
            record = self.requests[request]
            worker = self.workers[record["prefill_worker"]]
            worker["leaving"] -= 1
            worker["leaving_tokens"] -= record["prompt_len"] + record["generated"]
        self.keep_events(~gone)

    def keep_events(self, kept: NDArray[np.bool_]) -> None:
        """Keep some of the events that wait, and no others."""
        events, n = self.cluster.arrays.events, int(self.clock["n_events"][0])
        left = events[:n][kept]
        left.sort(order=("time", "order"))  # sorted events are a heap
        events[: len(left)] = left
        self.clock["n_events"] = len(left)

    def engine_of(self, record: Any) -> int | None:
        """Return the engine that has a request; None while it is between two."""
        if record["decode_worker"] >= 0:
            return int(self.pools[1]["first_worker"] + record["decode_worker"])
        if record["prefill_worker"] >= 0 and record["prefill_end_s"] < 0.0:
            return int(record["prefill_worker"])
        return None

    def place(self, w: int, request: int) -> int:
        """Return a request's place among the running sequences of an engine; -1: none."""
        n = int(self.workers[w]["batch"] + self.workers[w]["prefilling"])
        mine = self.cluster.arrays.engines.sequences[w]["request"][:n] == request
        return int(np.flatnonzero(mine)[0]) if mine.any() else -1

    def take_out(self, request: int, dead: set[int]) -> None:
        """Take a request out of all that it waits in; its KV cache on dead engines is no more."""
        record, arrays = self.requests[request], self.cluster.arrays
        for router in self.cluster.routers:
            self._unhold(router.arrays.held[0], request)
        if record["transfer_start_s"] >= 0.0 and not record["kv_here"]:
            settings = arrays.engines.settings[0]
            _drop_flow(
                self.clock, arrays.events, arrays.net, request, settings["egress"],
                settings["ingress"],
            )  # fmt: skip
        w = self.engine_of(record)
        if w is not None and w not in dead:
            self._leave_engine(w, request)
        source = int(record["prefill_worker"])
        handed_over = source >= 0 and w != source and self.pools[0]["n_workers"] > 0
        if handed_over and not record["kv_here"] and source not in dead:
            self._release(source, request)
        arrays.engines.tables[request] = 0

    def _leave_engine(self, w: int, request: int) -> None:
        """Take a request out of an engine's queues or batch."""
        worker, record = self.workers[w], self.requests[request]
        role = self.pools[self.cluster.arrays.engines.pool_of[w]]["role"]
        place, context = self.place(w, request), -1
        if place >= 0:
            context = self._leave_batch(w, place)
            if role not in (state.DECODE, state.COLOCATED):
                context = -1
        else:
            queues = "late_head", "arrived_head", "preempted_head"
            begun = "transfer_start_s" if role == state.DECODE else "prefill_start_s"
            queued = any(self._unlink(worker, queue, request) for queue in queues)
            if not queued and record[begun] < 0.0:
                _leave_queue(self.requests, self.workers, w, request)
            if queued or role in (state.DECODE, state.COLOCATED) or record[begun] < 0.0:
                worker["n_waiting"] -= 1
                worker["waiting_tokens"] -= record["prompt_len"] + record["generated"]
        self._release(w, request, context)

    def _leave_batch(self, w: int, place: int) -> int:
        """Take a running sequence out; returns the context that it has blocks for, or -1."""
        worker, engines = self.workers[w], self.cluster.arrays.engines
        sequences, n = engines.sequences[w], int(worker["batch"] + worker["prefilling"])
        sequence = sequences[place].copy()
        context = -1
        record = self.requests[sequence["request"]]
        if self.pools[engines.pool_of[w]]["role"] in (state.DECODE, state.COLOCATED):
            record["generated"] = record["output_len"] - sequence["tokens_left"]
        if place < worker["batch"]:
            context = int(record["prompt_len"] - 1 + record["generated"])
            worker["batch"] -= 1
            worker["context"] -= context
        else:
            worker["prefilling"] -= 1
        sequences[place : n - 1] = sequences[place + 1 : n].copy()
        return context

    def _unlink(self, worker: Any, queue: str, request: int) -> bool:
        """Take a request out of a linked queue, if it is there."""
        before, at = -1, int(worker[queue])
        while at >= 0 and at != request:
            before, at = at, int(self.requests[at]["next"])
        if at < 0:
            return False
        behind = self.requests[at]["next"]
        if before < 0:
            worker[queue] = behind
        else:
            self.requests[before]["next"] = behind
        if queue == "late_head" and worker["late_tail"] == request:
            worker["late_tail"] = before
        return True

    def _unhold(self, held: Any, request: int) -> None:
        """Take a request out of those that a router holds, if it is there."""
        before, at = -1, int(held["head"]) if held["n"] else -1
        for place in range(int(held["n"])):
            behind = int(self.requests[at]["next"])
            if at == request:
                if before < 0:
                    held["head"] = behind
                else:
                    self.requests[before]["next"] = behind
                if held["tail"] == request:
                    held["tail"] = before
                held["n"] -= 1
                held["to_ask"] -= place < held["to_ask"]
                return
            before, at = at, behind

    def _release(self, w: int, request: int, context: int = -1) -> None:
        """Give a request's KV blocks back, and let the engine look who can have them."""
        arrays = self.cluster.arrays
        pool = arrays.engines.pool_of[w]
        _give_back(arrays.engines, w, pool, request, context)
        if np.isfinite(self.workers[w]["next_start"]):
            _wake(self.clock, arrays.events, self.workers, w)
