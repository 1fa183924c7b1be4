"""Autoscalers that follow a number of requests: a fixed fleet, HPA, KEDA, Knative and llm-d's."""

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Literal

import numpy as np
from pydantic import Field, field_validator

from eldr_sim.policies import choice
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.scaling import base


class FixedParameters(base.ScalingParameters):
    """Parameters of `Fixed`."""

    n: tuple[int, ...] = ()
    """Workers of each pool, in order, or of all alike; those of the topology when not given."""

    @field_validator("n", mode="before")
    @classmethod
    def _counts(cls, value: object) -> object:
        words = value.split(",") if isinstance(value, str) else value
        return (words,) if isinstance(words, int) else words


class Fixed(base.Autoscaler):
    """A fleet that stays as it is: ``none``, or ``none:n=5``, ``none:n=2,4`` for two pools."""

    name = "none"
    Parameters = FixedParameters
    parameters: FixedParameters

    @property
    def interval_s(self) -> float:
        """No signal is read."""
        return float("inf")

    def begin(self) -> Mapping[str, int]:
        """Return ``n`` for each pool."""
        return choice.per_pool(
            "autoscale.n", self.parameters.n, [pool.name for pool in self.facts.pools]
        )

    def decide(self, fleet: base.Fleet) -> base.Decision:
        """Change nothing."""
        return ()


Metric = Literal["in_flight", "running", "waiting", "kv"]


def total(pool: base.PoolView, metric: Metric) -> float:
    """Return a metric's sum over the workers that serve."""
    if metric == "kv":
        return float(pool.kv_usage.sum())
    return float(pool.in_flight if metric == "in_flight" else getattr(pool, metric).sum())


class ScaleRequests:
    """The largest wish of the last seconds, as Kubernetes' HPA stabilises what goes down.

    The first stands beside the workers that there are (``recordInitialRecommendation``)."""

    def __init__(self) -> None:
        #: Of each pool, when how many workers were wished for, without those that a later one
        #: reaches.
        self._wishes: dict[str, list[tuple[float, int]]] = {}

    def note(self, pool: base.PoolView, now_s: float, wish: int) -> None:
        """Note a wish."""
        before = self._wishes.get(pool.name, [(0.0, pool.workers)])
        self._wishes[pool.name] = [each for each in before if each[1] > wish] + [(now_s, wish)]

    def largest(self, pool: base.PoolView, since_s: float) -> int:
        """Return the largest wish noted after a time, s, or the last one."""
        wishes = self._wishes[pool.name]
        return next((wish for at_s, wish in wishes if at_s > since_s), wishes[-1][1])


class HpaParameters(base.ScalingParameters):
    """Parameters of `HorizontalPodAutoscaler`; the defaults are Kubernetes'."""

    metric: Metric = "in_flight"
    """What is followed: requests in flight, running or waiting, or the share of KV in use."""
    target: float = Field(default=16.0, gt=0)
    """Its value for each worker (production-stack: 5 waiting)."""
    tolerance: float = Field(default=0.1, ge=0)
    """No change while the ratio to the target is so near 1."""
    down_s: float = Field(default=300.0, ge=0)
    """Time that a wish for fewer workers must last before it acts, s."""


class HorizontalPodAutoscaler(base.Autoscaler):
    """Kubernetes' HPA: ``ceil(n * metric / target)``.

    Up by the larger of doubling and 4 workers every 15 s, down to the largest wish of the last 300
    s; a starting worker counts with a metric of 0 (kubernetes.io, Horizontal Pod
    Autoscaling, algorithm details and default behaviour)."""

    name = "hpa"
    Parameters = HpaParameters
    parameters: HpaParameters
    aims, factors = ("target",), (4.0, 2.0, 1.0, 0.5, 0.25)

    def __init__(self, context: PolicyContext, parameters: HpaParameters | None = None) -> None:
        super().__init__(context, parameters)
        self._wishes = ScaleRequests()

    def decide(self, fleet: base.Fleet) -> base.Decision:
        """Return the wish of each pool, limited upwards and stabilised downwards."""
        return [base.Target(pool.name, self._wish(pool, fleet.now_s)) for pool in fleet.pools]

    def _wish(self, pool: base.PoolView, now_s: float) -> int:
        parameters, n = self.parameters, pool.workers
        load = total(pool, parameters.metric) / parameters.target
        wish = (
            n
            if n and abs(load / n - 1.0) <= parameters.tolerance
            else max(1, base.whole_workers(load))
        )
        self._wishes.note(pool, now_s, wish)
        steady = self._wishes.largest(pool, now_s - parameters.down_s)
        if wish > n:
            return min(wish, max(2 * n, n + 4))
        return min(n, steady)


class KedaParameters(base.ScalingParameters):
    """Parameters of `Keda`; the defaults are those of llm-d's guide."""

    queue: float = Field(default=1.0, gt=0)
    """Waiting requests of a worker."""
    running: float = Field(default=16.0, gt=0)
    """Running requests of a worker."""
    down_s: float = Field(default=300.0, ge=0)
    """Time that a wish for fewer workers must last before it acts, s."""


class Keda(base.Autoscaler):
    """llm-d with KEDA: the larger of what the queue and what the running requests ask for.

    Beyond the workers there are, demand counts less those that start."""

    name = "keda"
    Parameters = KedaParameters
    parameters: KedaParameters
    aims, factors = ("running",), (4.0, 2.0, 1.0, 0.5, 0.25)

    def __init__(self, context: PolicyContext, parameters: KedaParameters | None = None) -> None:
        super().__init__(context, parameters)
        self._wishes = ScaleRequests()

    def decide(self, fleet: base.Fleet) -> base.Decision:
        """Return the demand of each pool, guarded against overshoot."""
        targets = []
        for pool in fleet.pools:
            queue, running = total(pool, "waiting"), total(pool, "running")
            wish = max(
                1,
                base.whole_workers(queue / self.parameters.queue),
                base.whole_workers(running / self.parameters.running),
            )
            if wish > pool.workers:
                wish = max(wish - pool.starting, pool.workers)
            self._wishes.note(pool, fleet.now_s, wish)
            steady = self._wishes.largest(pool, fleet.now_s - self.parameters.down_s)
            targets.append(base.Target(pool.name, max(wish, min(steady, pool.workers))))
        return targets


class KnativeParameters(base.ScalingParameters):
    """Parameters of `Knative`; the defaults are Knative's."""

    interval: float = Field(default=2.0, gt=0, le=86400)
    """Seconds from one look to the next."""
    target: float = Field(default=100.0, gt=0)
    """Requests in flight of a worker."""
    utilisation: float = Field(default=0.7, gt=0, le=1)
    """Share of the target that is aimed at."""
    window: float = Field(default=60.0, gt=0)
    """Seconds over which requests in flight are averaged; a tenth of it to see a panic."""
    panic: float = Field(default=2.0, gt=1)
    """Panic where the short window wants this multiple of the serving workers."""


class Knative(base.Autoscaler):
    """Knative's KPA: requests in flight over 60 s, and panic over 6 s.

    In panic, until the short window has asked for less than twice the workers for 60 s, nothing
    goes down (knative.dev)."""

    name = "knative"
    Parameters = KnativeParameters
    parameters: KnativeParameters
    aims, factors = ("target",), (2.0, 1.0, 0.5, 0.25, 0.1)

    def __init__(self, context: PolicyContext, parameters: KnativeParameters | None = None) -> None:
        super().__init__(context, parameters)
        self._seen: dict[str, deque[tuple[float, int]]] = defaultdict(deque)
        self._panics_until: dict[str, float] = {}
        self._most: dict[str, int] = {}

    def in_panic_window(self, pool: str, now_s: float) -> bool:
        """Whether a pool is in panic."""
        return now_s < self._panics_until.get(pool, -1.0)

    def decide(self, fleet: base.Fleet) -> base.Decision:
        """Return what the window that counts asks for."""
        return [base.Target(pool.name, self._wish(pool, fleet.now_s)) for pool in fleet.pools]

    def _wish(self, pool: base.PoolView, now_s: float) -> int:
        parameters, seen = self.parameters, self._seen[pool.name]
        seen.append((now_s, pool.in_flight))
        while seen[0][0] <= now_s - parameters.window:
            seen.popleft()
        each = parameters.target * parameters.utilisation
        slow, fast = (
            max(
                1,
                base.whole_workers(
                    float(np.mean([n for at, n in seen if at > now_s - length])) / each
                ),
            )
            for length in (parameters.window, parameters.window / 10.0)
        )
        if fast >= parameters.panic * max(1, pool.ready):
            if not self.in_panic_window(pool.name, now_s):
                self._most[pool.name] = pool.workers
            self._panics_until[pool.name] = now_s + parameters.window
        if not self.in_panic_window(pool.name, now_s):
            return slow
        self._most[pool.name] = max(self._most[pool.name], fast)
        return self._most[pool.name]
