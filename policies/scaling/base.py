"""What an autoscaler is, what it sees, and what a worker can do.

Every ``interval_s`` seconds it looks at a `Fleet` and says how many workers each pool should have,
or that workers change their pool; `simulator.control.autoscaling` starts and drains them."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import ClassVar, NamedTuple, TypeAlias

from pydantic import Field

from eldr_sim.arrays import Floats, Ints
from eldr_sim.policies.base import Policy, PolicyContext
from eldr_sim.policies.choice import Parameters
from eldr_sim.policies.scaling.facts import Offered, PoolFacts, ScalingContext

__all__ = [
    "OF_TIMES", "Autoscaler", "Decision", "Fleet", "Offered", "PoolFacts", "PoolView",
    "ScalingContext", "ScalingParameters", "Switch", "Target", "remembered", "whole_workers",
    "with_switches",
]  # fmt: skip

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
    """Number of workers, serving or starting, that a pool should have."""

    pool: str
    workers: int


class Switch(NamedTuple):
    """Number of workers that should move from a pool to another."""

    source: str
    target: str
    workers: int = 1


#: What an autoscaler says; a pool that it does not name stays as it is.
Decision: TypeAlias = Sequence[Target | Switch]


class ScalingParameters(Parameters):
    """Parameters of every autoscaler."""

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
        self.parameters = parameters if parameters is not None else type(self).Parameters()
        self.facts = context.require_scaling(self)

    @property
    def interval_s(self) -> float:
        """Seconds from one look to the next; infinite: only the beginning counts."""
        return float(getattr(self.parameters, "interval", 15.0))

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
                workers = next(pool.workers for pool in fleet.pools if pool.name == other)
                left[other] = min(left[other], workers - move)
    return [*said, *(Target(name, wish) for name, wish in left.items())]


def whole_workers(workers: float) -> int:
    """Return the number of workers, rounded up but for a rounding error; at least 0."""
    return max(0, math.ceil(workers - 1e-9))


def remembered(facts: PoolFacts) -> PoolFacts:
    """Return facts that compute their seconds once for each argument."""
    return facts._replace(
        prompt_s=lru_cache(4096)(facts.prompt_s), step_s=lru_cache(65536)(facts.step_s)
    )
