"""MoE-Prefill's router: workers are filled until their work hides the transfers of weights.

Algorithm 1 and App. B of arXiv 2605.02960; the formulas are rebuilt from the prose. Of each
worker g the router knows the blocks that its prefix cache holds (committed), those that requests on
their way will compute (pending), and W_g, the FLOPs still to compute: from the end of the prefix
that a request will find cached (Eq. 2), less the tokens that the engine reports. Requests go in the
order of arrival, or the longest held first, to workers with W_g below F_sat: to the one with the
longest prefix, the least W_g among equals. When none is left the router holds; a worker without
requests may always take one. F_sat is Eq. 1 (all layers' transfers at peak FLOPs), Eq. 3 (a
reference batch scaled by its slowest layer over its first), or a number."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field

from eldr_sim.policies.base import LOADS, Needs, PolicyContext, RequestInfo, RouterPolicy, Workers
from eldr_sim.policies.choice import Parameters


class SaturationParameters(Parameters):
    """Parameters of ``saturation``."""

    threshold: Literal["eq1", "eq3"] | float = "eq3"
    """F_sat: the paper's Eq. 1 or Eq. 3, or FLOPs."""
    margin: float = Field(default=0.1, ge=0)
    """Safety margin on top of Eq. 1 or Eq. 3; the paper's values are lost in its text."""
    unit: Literal["flops", "tokens"] = "flops"
    """What load is counted in: true FLOPs with attention (Sec. 7.3), or as the paper's
    implementation does one constant a token (App. B.2)."""
    order: Literal["arrival", "longest"] = "arrival"
    """Which held request goes first; ``longest`` is ours: long prompts with much in common meet
    while their prefix is cached, and short ones fill what is left at the end."""


class SaturationPolicy(RouterPolicy):
    """The longest cached prefix among workers that are not saturated; holds when all are.

    Tokens that an engine reports are taken from its requests in the order of sending; what is left
    of W_g where a worker has no requests, as after evictions, is dropped."""

    name = "saturation"
    decision = "prefill"
    needs = Needs(costs=True, blocks=True, in_order=True, columns=LOADS)
    Parameters = SaturationParameters

    def __init__(self, context: PolicyContext, parameters: SaturationParameters) -> None:
        work = context.require_prefill_work(self)
        self.needs = self.needs._replace(longest_first=parameters.order == "longest")
        match parameters.threshold:
            case "eq1":
                self.threshold = (1 + parameters.margin) * work.saturation_eq1
            case "eq3":
                self.threshold = (1 + parameters.margin) * work.saturation_eq3
            case given:
                self.threshold = float(given)
        if parameters.unit == "tokens":
            work = work._replace(pair_flops=0.0, sliding_pair_flops=0.0)
        self._work = work
        self._block_tokens = context.prefix_block_tokens
        #: W_g, FLOPs.
        self.load = [0.0] * context.n_workers
        self._queues: list[deque[_Sent]] = [deque() for _ in self.load]
        # By block: the workers that hold it, and those that will, a bit each.
        self._committed: dict[int, int] = {}
        self._pending: dict[int, int] = {}

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return the worker of the longest prefix among those not saturated, None where all are."""
        open_ = self._open(workers)
        if not open_:
            return None
        length, blocks = request.prompt_len, self._blocks(request)
        # As in vLLM the last token is computed in any case, and with it its block.
        matches = self._matches(blocks[: (length - 1) // self._block_tokens], open_)
        worker = max(open_, key=lambda g: (matches[g], -self.load[g]))
        cached = matches[worker] * self._block_tokens
        self._queues[worker].append(_Sent(cached, length))
        self.load[worker] += self._work.flops(length - cached, cached)
        bit = 1 << worker
        for block in blocks[matches[worker] :]:
            if not self._committed.get(block, 0) & bit:
                self._pending[block] = self._pending.get(block, 0) | bit
        return worker

    def on_blocks(self, worker: int, stored: Sequence[int], evicted: Sequence[int]) -> None:
        """Take note of the blocks that a worker's prefix cache has got and lost."""
        bit = 1 << worker
        for block in stored:
            _clear(self._pending, block, bit)
            self._committed[block] = self._committed.get(block, 0) | bit
        for block in evicted:
            _clear(self._committed, block, bit)

    def on_tokens(self, worker: int, tokens: int) -> None:
        """Take the tokens that a worker has computed from its load, the earliest request first."""
        queue = self._queues[worker]
        while tokens > 0 and queue:
            sent = queue[0]
            done = min(tokens, sent.end - sent.done)
            self.load[worker] -= self._work.flops(done, sent.done)
            sent.done += done
            tokens -= done
            if sent.done == sent.end:
                queue.popleft()
        if not queue:
            self.load[worker] = 0.0  # but for rounding it is already

    def matches(self, request: RequestInfo) -> list[int]:
        """Return the blocks of a prompt's start that each worker holds or will."""
        return self._matches(self._blocks(request), range(len(self.load)))

    def _blocks(self, request: RequestInfo) -> list[int]:
        full = request.prompt_len // self._block_tokens
        return [int(block) for block in request.prefix_hash[:full]]

    def _open(self, workers: Workers) -> list[int]:
        open_workers = []
        for worker in workers.usable():
            if workers.loads[worker] == 0:
                self._forget(worker)
            elif self.load[worker] >= self.threshold:
                continue
            open_workers.append(worker)
        return open_workers

    def _forget(self, worker: int) -> None:
        """Drop what was expected of a worker that has no requests."""
        if self._queues[worker]:
            self._queues[worker].clear()
            self.load[worker] = 0.0
            for block in [b for b, mask in self._pending.items() if mask >> worker & 1]:
                _clear(self._pending, block, 1 << worker)

    def _matches(self, blocks: Sequence[int], workers: Sequence[int]) -> list[int]:
        """Blocks from the first on that each of some workers holds or will; 0 for the others."""
        matches = [0] * len(self.load)
        left = sum(1 << worker for worker in workers)
        for number, block in enumerate(blocks):
            have = left & (self._committed.get(block, 0) | self._pending.get(block, 0))
            for worker in _bits(left ^ have):
                matches[worker] = number
            left = have
            if not left:
                break
        for worker in _bits(left):
            matches[worker] = len(blocks)
        return matches


class _Sent:
    """A request's tokens that a worker will compute: ``done`` of ``end`` are cached or computed."""

    __slots__ = ("done", "end")

    def __init__(self, done: int, end: int) -> None:
        self.done, self.end = done, end


def _clear(table: dict[int, int], block: int, bit: int) -> None:
    left = table.get(block, 0) & ~bit
    if left:
        table[block] = left
    else:
        table.pop(block, None)


def _bits(mask: int) -> Iterator[int]:
    """Return the numbers of the bits that are set, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
