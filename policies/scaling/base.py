"""What an autoscaler is, what it sees, and what a worker can do.

Every ``interval_s`` seconds it looks at a `Fleet` and says how many workers each pool should have,
or that workers change their pool; `simulator.control.autoscaling` starts and drains them."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from types import MappingProxyType
from typing import ClassVar, NamedTuple, TypeAlias

from pydantic import Field

from eldr_sim.arrays import Floats, Ints
from eldr_sim.policies.base import Policy, PolicyContext
from eldr_sim.policies.choice import Parameters

#: `Autoscaler.factors` of targets that are times, alike for all rules.
OF_TIMES = (4.0, 2.0, 1.0, 0.7, 0.5, 0.35, 0.2)


class PoolView(NamedTuple):
    """A pool as an autoscaler sees it. ``ready`` workers serve; what they report is of these."""

    name: str
    #: Workers that serve, do not yet, or finish; least and most of the first two together.
    ready: int
    starting: int
    draining: int
    minimum: int
    maximum: int
    #: Requests counted in the interval: that came (``--demand entry``) or were done (``exit``).
    arrived: int
    completed: int  #: requests that completed in the interval
    #: Means of the requests counted; from ``output_tokens`` on of those completed. NaN: none.
    prompt_tokens: float
    output_tokens: float
    cached_tokens: float
    ttft_s: float
    itl_s: float
    #: int64 ``[ready]``: of each worker that serves, see `policies.base.Workers`.
    waiting: Ints
    running: Ints
    waiting_tokens: Ints
    running_tokens: Ints
    kv_usage: Floats  #: float64 ``[ready]``

    @property
    def workers(self) -> int:
        """Workers that serve or will."""
        return self.ready + self.starting

    @property
    def in_flight(self) -> int:
        """Requests that wait or run."""
        return int(self.waiting.sum() + self.running.sum())


class Fleet(NamedTuple):
    """All pools at a time, s, and since the last time that they were looked at."""

    now_s: float
    interval_s: float
    pools: tuple[PoolView, ...]


class Target(NamedTuple):
    """A pool should have so many workers that serve or will."""

    pool: str
    workers: int


class Switch(NamedTuple):
    """So many workers of a pool should go to another one."""

    source: str
    target: str
    workers: int = 1


#: What an autoscaler says; a pool that it does not name stays as it is.
Decision: TypeAlias = Sequence[Target | Switch]


class Offered(NamedTuple):
    """Requests that come in a stretch of time, and means of their tokens."""

    requests: float
    prompt_tokens: float
    output_tokens: float


class PoolFacts(NamedTuple):
    """What is known of a pool beforehand: its part, its workers' speed, and how they start."""

    name: str
    computes: bool  #: prompts
    decodes: bool
    engines: int  #: of a worker
    gpus: int  #: of a worker
    max_num_seqs: int
    kv_tokens: int  #: that an engine has room for
    start_up_s: float
    switch_s: float
    #: Seconds that a prompt of so many tokens takes an engine, whose steps hold others like it.
    prompt_s: Callable[[int], float]
    #: Seconds of a step of so many sequences at a mean context, of uniform routing, or of the
    #: trace's shares where engines share experts.
    step_s: Callable[[int, float], float]
    token_budget: int = 8192  #: of a step
    #: Facts by the engines that are there, of a group whose engines come and go.
    widths: Mapping[int, "PoolFacts"] = MappingProxyType({})
    #: Seconds for which such a group stands still when it goes from a width to another.
    pause_s: Callable[[int, int], float] = lambda before, after: 0.0

    def decode_batch(self, context: float, itl_s: float, prompts_s: float = 0.0) -> int:
        """Return the most sequences whose steps take at most ``itl_s``, with ``prompts_s`` for each
        sequence's share of prompts, and whose KV fits; >= 1."""
        low, high = 1, max(1, min(self.max_num_seqs, int(self.kv_tokens // max(context, 1.0))))
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.step_s(middle, context) + middle * prompts_s <= itl_s
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def work_s(
        self,
        prompt: float,
        output: float,
        cached: float = 0.0,
        itl_s: float = 0.05,
        mixed: bool = True,
    ) -> float:
        """Return the seconds of a worker that a request of so many tokens takes in this pool: its
        prompt, and its share of decode steps as full as ``itl_s`` allows. A ``mixed`` worker's step
        of b sequences also computes the prompts of b / ``output`` others."""
        seconds = self.prompt_s(max(1, round(prompt - cached))) if self.computes else 0.0
        if self.decodes and output > 0.0:
            context = 64.0 * max(1, round((prompt + output / 2.0) / 64.0))
            batch = self.decode_batch(context, itl_s, seconds / output if mixed else 0.0)
            seconds += output * self.step_s(batch, context) / batch
        return seconds / self.engines

    def fewest(self, do: Callable[["PoolFacts", int], bool]) -> int:
        """Return the fewest workers, at least 1, that do; the most where none of a group's do."""
        if not self.widths:
            return next(n for n in count(1) if do(self, n))
        enough = (n for n, facts in sorted(self.widths.items()) if do(facts, n))
        return next(enough, max(self.widths))


class ScalingContext(NamedTuple):
    """What an autoscaler is built from: `PolicyContext.scaling`."""

    pools: tuple[PoolFacts, ...]
    #: The requests from one time, s, to another, which only a timetable and an oracle know.
    known: Callable[[float, float], Offered]

    def of(self, pool: str) -> PoolFacts:
        """Return what is known of a pool."""
        return next(facts for facts in self.pools if facts.name == pool)


class ScalingParameters(Parameters):
    """What every autoscaler may be told."""

    interval: float = Field(default=15.0, ge=0.001, le=86400)
    """Seconds from one look to the next."""


class Autoscaler(Policy):
    """Says how many workers each pool should have."""

    decision = "scaling"
    Parameters = ScalingParameters
    #: Parameters that a plan multiplies by ``factors``, the leanest first, unless told them.
    aims: ClassVar[tuple[str, ...]] = ()
    factors: ClassVar[tuple[float, ...]] = (1.0,)
    #: Parameters that are true or false, of which such a plan tries both.
    ways: ClassVar[tuple[str, ...]] = ()

    def __init__(self, context: PolicyContext, parameters: ScalingParameters | None = None) -> None:
        self.told = parameters if parameters is not None else type(self).Parameters()
        self.facts = context.require_scaling(self)

    @property
    def interval_s(self) -> float:
        """Seconds from one look to the next; infinite: only the beginning counts."""
        return float(getattr(self.told, "interval", 15.0))

    def begin(self) -> Mapping[str, int]:
        """Return the workers that pools have at time 0; as configured where a pool is missing."""
        return {}

    def decide(self, fleet: Fleet) -> Decision:
        """Return what should be, as of ``fleet``; bounds of pools are kept in any case."""
        raise NotImplementedError


def with_switches(
    fleet: Fleet,
    wishes: Mapping[str, int],
    facts: ScalingContext,
    least: Mapping[str, int] | None = None,
) -> Decision:
    """Return the targets of all pools, with changes of roles in place of starts where these are
    faster and another pool has a worker to spare. ``least``: workers that a pool keeps, ``wishes``
    when None."""
    said: list[Target | Switch] = []
    spare = {
        pool.name: min(pool.ready, pool.workers - max(pool.minimum, (least or wishes)[pool.name]))
        for pool in fleet.pools
    }
    left = dict(wishes)
    for pool in fleet.pools:
        short, own = wishes[pool.name] - pool.workers, facts.of(pool.name)
        for other in spare if own.switch_s < own.start_up_s else ():
            move = min(short, spare[other])
            if move > 0:  # who is on its way counts among the workers of where it goes
                said.append(Switch(other, pool.name, move))
                spare[other] -= move
                short -= move
                workers = next(each.workers for each in fleet.pools if each.name == other)
                left[other] = min(left[other], workers - move)
    return [*said, *(Target(name, wish) for name, wish in left.items())]


def up(workers: float) -> int:
    """Return the fewest whole workers that are so many, up to a rounding error; at least 0."""
    return max(0, math.ceil(workers - 1e-9))


def remembered(facts: PoolFacts) -> PoolFacts:
    """Return facts whose seconds are computed once for each argument."""
    return facts._replace(
        prompt_s=lru_cache(4096)(facts.prompt_s), step_s=lru_cache(65536)(facts.step_s)
    )
