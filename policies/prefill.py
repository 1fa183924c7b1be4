"""Prefill policies: which prefill worker computes a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from eldr_sim.policies.base import PolicyContext, RequestInfo, Workers
from eldr_sim.policies.decode import JoinShortestQueuePolicy, RoundRobinPolicy
from eldr_sim.policies.shortlist import Shortlist, ShortlistBy

_MASK64 = (1 << 64) - 1


class PrefillRoundRobinPolicy(RoundRobinPolicy):
    """The prefill workers in turn, from worker 0."""

    decision: ClassVar[str] = "prefill"


class LeastLoadedPolicy(JoinShortestQueuePolicy):
    """The prefill worker with the fewest requests; ties in turn (see ``shortlist``)."""

    name = "least_loaded"
    decision: ClassVar[str] = "prefill"


class PrefixHashPolicy:
    """Equal prompt prefixes go to one worker, unless it is overloaded.

    ELDR's prefill policy (Sec. 6: PrefixHash with a least-loaded fallback above 1.25x average
    load). The details that the paper leaves open are those of ``prefix_hash`` in SGLang's router:
    the first 256 tokens make the key, the incoming request counts in the average load, and the
    prefix's worker is kept while its load is at most 1.25 times that average. The key picks its
    worker by rendezvous hashing, which spreads keys evenly and moves few of them when the pool
    changes, as the hash ring there does. A prompt without hashes goes to the least loaded worker.
    """

    name = "prefix_hash"
    decision: ClassVar[str] = "prefill"
    shortlist_by: ClassVar[ShortlistBy] = "prefix"
    prefix_tokens: ClassVar[int] = 256
    load_factor: ClassVar[float] = 1.25

    def __init__(self, context: PolicyContext) -> None:
        self._n = context.n_workers
        self._key_blocks = -(-self.prefix_tokens // context.prefix_block_tokens)
        self._everyone = Shortlist(range(context.n_workers))
        self._salts = [_mix64(worker + 1) for worker in range(context.n_workers)]

    def home(self, key: int) -> int:
        """Return the worker that a prefix key belongs to, whatever the load."""
        weights = [_mix64((key ^ salt) & _MASK64) for salt in self._salts]
        return weights.index(max(weights))

    def shortlists(self, requests: Sequence[RequestInfo]) -> list[Shortlist]:
        """Return all workers, the least loaded first: for prompts without hashes."""
        return [self._everyone] * len(requests)

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return the prefix's worker, or the least loaded one if that is overloaded."""
        hashes = request.prefix_hash
        if len(hashes) == 0:
            return self._everyone.pick(workers)
        # Block hashes are chained, so the last of the key's blocks stands for all of them.
        worker = self.home(int(hashes[min(len(hashes), self._key_blocks) - 1]))
        average = (int(workers.loads.sum()) + 1) / self._n
        if workers.healthy[worker] and workers.loads[worker] <= self.load_factor * average:
            return worker
        return self._everyone.pick(workers)


def _mix64(value: int) -> int:
    """Scramble 64 bits (the finaliser of SplitMix64), the same on every machine."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
