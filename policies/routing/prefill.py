"""Prefill policies: which prefill worker computes a prompt."""

from bisect import bisect
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from eldr_sim.policies.base import LOADS, Needs, PolicyContext, RequestInfo, RouterPolicy
from eldr_sim.policies.choice import Parameters
from eldr_sim.policies.routing.decode import JoinShortestQueuePolicy
from eldr_sim.policies.rule import Rule, StickyRule

_MASK64 = (1 << 64) - 1


class LeastLoadedPolicy(JoinShortestQueuePolicy):
    """The prefill worker with the fewest requests."""

    name = "least_loaded"
    decision = "prefill"


class PrefixHashPolicy(RouterPolicy):
    """Equal prompt prefixes go to one worker, unless it is overloaded.

    ELDR's prefill policy (Sec. 6: a least-loaded fallback above 1.25x average load), the rest as
    ``prefix_hash`` of SGLang's router: the first 256 tokens make the key, and the incoming request
    counts in the average. Rendezvous hashing spreads keys evenly, as the hash ring there does. A
    prompt without hashes goes to the least loaded worker."""

    name = "prefix_hash"
    decision = "prefill"
    needs = Needs(columns=LOADS)
    rule_by = "prefix"
    prefix_tokens: ClassVar[int] = 256
    load_factor: ClassVar[float] = 1.25

    def __init__(self, context: PolicyContext) -> None:
        self.prefix_blocks = -(-self.prefix_tokens // context.prefix_block_tokens)
        self._everyone = Rule(range(context.n_workers))
        self._salts = [_mix64(worker + 1) for worker in range(context.n_workers)]

    def home(self, key: int) -> int:
        """Return the worker that a prefix key belongs to, whatever the load."""
        weights = [_mix64((key ^ salt) & _MASK64) for salt in self._salts]
        return weights.index(max(weights))

    def rules(self, requests: Sequence[RequestInfo]) -> Sequence[Rule | StickyRule]:
        """Return the prefix's worker, unless overloaded; else, and without hashes, all workers."""
        return [
            StickyRule(self.home(key), self._everyone, self.load_factor)
            if (key := prefix_key(request, self.prefix_blocks)) is not None
            else self._everyone
            for request in requests
        ]


def prefix_key(request: RequestInfo, blocks: int) -> int | None:
    """Return the key that a prompt's first blocks make; None where it has no hashes."""
    # Block hashes are chained, so the last of the key's blocks stands for all of them.
    hashes = request.prefix_hash
    return int(hashes[min(len(hashes), blocks) - 1]) if len(hashes) else None


class HashRingParameters(Parameters):
    """Parameters of the hash ring; the defaults are those of ELDR's authors."""

    points: int = Field(default=160, ge=1, le=100_000)
    """Points of each worker on the ring."""
    prefix_tokens: int = Field(default=256, ge=1)
    """Tokens from a prompt's start that make its key. The authors take 1,024 bytes, four to a
    token."""
    load_factor: float = Field(default=1.25, ge=1, allow_inf_nan=False)
    """Most load of the key's worker, times the average one with this request."""


class HashRingPolicy(RouterPolicy):
    """The worker at the ring's next point after the prompt's key, unless it is overloaded.

    The prefill router of ELDR's authors (casys-kaist/ELDR): overloaded is above ``load_factor``
    times the average load, this prompt counted; then the least loaded of the lowest index. A prompt
    without block hashes is like no other."""

    name = "hash_ring"
    decision = "prefill"
    needs = Needs(columns=LOADS)
    Parameters = HashRingParameters

    def __init__(
        self, context: PolicyContext, parameters: HashRingParameters | None = None
    ) -> None:
        settings = parameters or HashRingParameters()
        self._load_factor = settings.load_factor
        self.prefix_blocks = -(-settings.prefix_tokens // context.prefix_block_tokens)
        self._everyone = Rule(range(context.n_workers), in_turn=False)
        ring = sorted(
            (_mix64(worker << 32 | point), worker)
            for worker in range(context.n_workers)
            for point in range(settings.points)
        )
        self._positions = [position for position, _ in ring]
        self._workers = [worker for _, worker in ring]

    def home(self, key: int) -> int:
        """Return the worker that a prefix key belongs to, whatever the load."""
        # Keys may be small numbers, as the points' are before they are scrambled.
        return self._workers[bisect(self._positions, _mix64(~key & _MASK64)) % len(self._workers)]

    def rules(self, requests: Sequence[RequestInfo]) -> Sequence[StickyRule]:
        """Return the key's worker, unless it is overloaded."""
        keys = [prefix_key(request, self.prefix_blocks) for request in requests]
        homes = [
            self.home(request.request_id if key is None else key)
            for request, key in zip(requests, keys, strict=True)
        ]
        return [StickyRule(home, self._everyone, self._load_factor) for home in homes]


def _mix64(value: int) -> int:
    """Scramble 64 bits (the finaliser of SplitMix64), the same on every machine."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
