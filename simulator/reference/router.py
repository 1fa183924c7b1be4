"""A router: its policy chooses a worker for each request, or holds it.

A router knows what it has sent and has heard of (``loads``), which workers answer, and what the
engines publish: at once, or every ``signal_interval``, as a poll of vLLM's ``/metrics`` does."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from eldr_sim.arrays import Ints
from eldr_sim.policies.base import RequestInfo, RouterPolicy, Workers, gives_rules
from eldr_sim.simulator.reference.requests import Request
from eldr_sim.traces.requests.prefixes import Ranges, clip_ranges, join_ranges

if TYPE_CHECKING:
    from eldr_sim.simulator.reference.reference_cluster import ReferenceCluster


class Router:
    """Chooses among the workers ``own``. ``signed``: prompts that it places have been computed."""

    def __init__(
        self, cluster: ReferenceCluster, policy: RouterPolicy, own: range, signed: bool
    ) -> None:  # fmt: skip
        self.cluster, self.policy, self.own = cluster, policy, own
        self.needs, self._signed = policy.needs, signed
        self.loads = np.zeros(len(own), np.int64)  #: requests in flight, as it knows
        self.healthy = np.ones(len(own), np.bool_)
        self.held: list[Request] = []  #: no worker has been chosen yet
        self.to_ask = 0  #: number of them that the policy is asked about again
        self.view = Workers.idle(self.loads)

    @property
    def reads_signals(self) -> bool:
        """Whether its policy may read what engines publish."""
        return self.needs.signals or not gives_rules(self.policy)

    def publish(self) -> None:
        """See what the engines publish now."""
        told = zip(*(self.cluster.workers[w].scheduler.signals() for w in self.own), strict=True)
        names = "waiting", "running", "waiting_tokens", "running_tokens", "kv_usage"
        columns: dict[str, Any] = dict(zip(names, map(np.array, told), strict=True))
        self.view = self.view._replace(signals_s=self.cluster.env.now, **columns)

    def place(self, request: Request) -> None:
        """Send a request to a worker, or hold it."""
        worker = None
        if not (self.held and self.needs.in_order):  # else no request behind a held one is placed
            worker = self.choose(request)
        if worker is None:
            self.hold(request)
        else:
            self.send(request, worker)

    def choose(self, request: Request) -> int | None:
        """Ask the policy; the least loaded worker stands in for one that does not answer."""
        if not self.healthy.any():
            return None
        if self.cluster.spec.signal_interval_s == 0.0 and self.reads_signals:
            self.publish()
        view = self.view._replace(
            loads=self.loads, healthy=self.healthy.copy(), now_s=self.cluster.env.now
        )
        if self.needs.matched:
            matched = self._matched(request)
            view = view._replace(matched=matched, reachable=matched, load_s=np.zeros(len(self.own)))
        worker = self.policy.select(self._info(request), view)
        if worker is None:
            return None
        if not 0 <= worker < len(self.own):
            raise ValueError(f"policy {self.policy.name!r} chose worker {worker}")
        if not self.healthy[worker]:
            worker = min(view.usable(), key=lambda w: self.loads[w])
        return self.own[worker]

    def send(self, request: Request, worker: int) -> None:
        """Send a request to a worker; where it was has its KV cache."""
        self.loads[worker - self.own.start] += 1
        request.source, request.worker = request.worker, worker
        self.cluster.workers[worker].take(request)

    def hold(self, request: Request) -> None:
        """Hold a request, as the last one or behind those no shorter."""
        at = len(self.held)
        if self.needs.longest_first:
            shorter = (i for i, other in enumerate(self.held)
                       if other.prompt_len < request.prompt_len)  # fmt: skip
            at = next(shorter, at)
        self.held.insert(at, request)

    def let_go(self, request: Request) -> None:
        """Take a request out of those that are held."""
        if request in self.held:
            self.to_ask -= self.held.index(request) < self.to_ask
            self.held.remove(request)

    def ask_again(self) -> None:
        """Let the policy decide again on all that is held."""
        self.to_ask = len(self.held)

    def ask_held(self) -> None:
        """Ask again about those that are held, the first that came first."""
        while self.to_ask > 0:
            request = self.held[0]
            worker = self.choose(request)
            if worker is None and self.needs.in_order:
                self.to_ask = 0
                return
            self.held.pop(0)
            self.to_ask -= 1
            if worker is None:
                self.hold(request)
            else:
                self.send(request, worker)

    def hear_of_end(self, request: Request, worker: int) -> None:
        """Know that a worker has one request less."""
        self.loads[worker - self.own.start] -= 1
        self.ask_again()
        if self.needs.ends:
            self.policy.on_complete(request.number, worker - self.own.start)

    # --- what a policy sees of a request ---

    def _info(self, request: Request) -> RequestInfo:
        workload, number = self.cluster.workload, request.number
        which, signature = None, None
        if self._signed and (self.needs.signature or self.needs.future):
            which, signature = self.cluster.inputs.signatures(self._signature_rows(request))
        return RequestInfo(
            number, request.prompt_len, request.domain,
            workload.blocks(number).tolist() if len(workload.prefix_hash) else [],
            signature, which, int(workload.session[number]), self.cluster.spec.max_tokens,
        )  # fmt: skip

    def _matched(self, request: Request) -> Ints:
        """Return how many tokens of a prompt each worker's prefix cache holds, never its last."""
        matched = []
        for w in self.own:
            kv, n = self.cluster.workers[w].scheduler.kv, 0
            for key in request.block_keys[: (request.prompt_len - 1) // kv.size]:
                if not kv.caching or kv.find(key) is None:
                    break
                n += 1
            matched.append(n * kv.size)
        return np.array(matched, np.int64)

    def _signature_rows(self, request: Request) -> Ranges:
        """Return the trace rows that a prompt's expert signature is the sum of. Blocks that were
        found in the prefix cache bring those of the prompt that was computed into them (ELDR, Sec.
        4.4: a signature row beside each KV block)."""
        workload, size = self.cluster.workload, self.cluster.spec.block_size
        kv: Any = self.cluster.workers[request.worker].scheduler.kv
        shared = min(request.found[kv], len(request.block_keys))
        rows = request.tables[kv][:shared]
        if not rows:
            if workload.prefix_block_tokens == 0:
                return ((int(workload.text[request.number]), 0, request.prompt_len),)
            return workload.prompt_ranges(request.number)
        parts: list[tuple[int, int, int]] = []
        start = 0
        for writer, blocks in groupby(block.writer for block in rows):
            stop = start + size * sum(1 for _ in blocks)
            parts += clip_ranges(workload.prompt_ranges(writer, answer=True), start, stop)
            start = stop
        parts += clip_ranges(workload.prompt_ranges(request.number), start, request.prompt_len)
        return join_ranges(parts)
