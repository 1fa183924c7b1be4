"""Autoscalers that know what workers can do: Dynamo's, a timetable, an oracle, and ours, `Seconds`.

A pool's *work* is the seconds of a worker that the requests of a second take
(`PoolFacts.work_s`): so many workers are busy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.scaling.base import (
    Autoscaler,
    Decision,
    Fleet,
    PoolFacts,
    PoolView,
    ScalingParameters,
    Target,
    up,
    with_switches,
)
from eldr_sim.policies.scaling.metrics import Stabilised


class LoadParameters(ScalingParameters):
    """Parameters of `DynamoLoad`; the defaults are Dynamo's."""

    interval: float = Field(default=5.0, gt=0, le=86400)
    """Seconds from one look to the next."""
    ttft: float = Field(default=500.0, gt=0)
    """TTFT aimed at, ms."""
    itl: float = Field(default=50.0, gt=0)
    """Time between tokens aimed at, ms."""
    sensitivity: float = Field(default=0.8, gt=0, le=1)
    """One worker less where the others would still be so far within the targets."""


class DynamoLoad(Autoscaler):
    """Dynamo's load rule: one worker more where every worker misses its target, one less where
    those that stay would not.

    A worker's TTFT is that of the prompts that wait there and of one more, its ITL that of the
    sequences that run. Co-located workers: more if either is missed, less if both are kept. Nothing
    changes while a worker starts.
    """

    name = "dynamo_load"
    Parameters = LoadParameters
    told: LoadParameters
    aims, factors = ("ttft", "itl"), (1.0, 0.7, 0.5, 0.35, 0.2)

    def decide(self, fleet: Fleet) -> Decision:
        """Return one worker more, or less."""
        return [
            Target(pool.name, pool.workers + self._step(pool, self.facts.of(pool.name)))
            for pool in fleet.pools
            if not pool.starting
        ]

    def _step(self, pool: PoolView, facts: PoolFacts) -> int:
        own, n = self.told, pool.ready
        ttft, itl = own.ttft / 1e3, own.itl / 1e3
        prompt = pool.prompt_tokens
        rest = n / (n - 1) if n > 1 else 1.0
        more, less = False, n > 1
        if facts.computes:
            alone = 0.0 if math.isnan(prompt) else facts.prompt_s(max(1, round(prompt)))
            speed = facts.prompt_s(4096) / 4096 / facts.engines
            queue = pool.waiting_tokens * speed
            more |= bool((queue + alone > ttft).all())
            less &= bool((queue * rest < own.sensitivity * (ttft - alone)).all())
        if facts.decodes:
            steps = np.array([self._step_s(pool, facts, w, 1.0) for w in range(n)])
            more |= bool((steps > itl).all())
            less &= bool((pool.kv_usage * rest < 1.0).all()) and all(
                self._step_s(pool, facts, w, rest) < own.sensitivity * itl for w in range(n)
            )
        return 1 if more else -1 if less else 0

    @staticmethod
    def _step_s(pool: PoolView, facts: PoolFacts, w: int, share: float) -> float:
        running = int(pool.running[w])
        if not running:
            return 0.0
        batch = min(facts.max_num_seqs, up(running * share / facts.engines))
        return facts.step_s(batch, 64.0 * round(float(pool.running_tokens[w]) / running / 64.0))


class ThroughputParameters(ScalingParameters):
    """Parameters of `DynamoThroughput`."""

    interval: float = Field(default=180.0, gt=0, le=86400)
    """Seconds from one look to the next."""
    itl: float = Field(default=50.0, gt=0)
    """Time between tokens aimed at, ms."""
    forecast: Literal["constant", "trend", "kalman"] = "kalman"
    """The next interval's rate: the last one's, that and its change, or a Kalman filter of both
    (process noise 0.1 and 1, measurement noise 10, as Dynamo's)."""


class DynamoThroughput(Autoscaler):
    """Dynamo's throughput rule: the rate foreseen over what a worker serves within the target."""

    name = "dynamo_throughput"
    Parameters = ThroughputParameters
    told: ThroughputParameters
    aims, factors = ("itl",), (1.0, 0.8, 0.6, 0.45, 0.35)

    def __init__(self, context: PolicyContext, parameters: ThroughputParameters | None = None):
        super().__init__(context, parameters)
        self._forecast: dict[str, Forecast] = defaultdict(lambda: Forecast(self.told.forecast))

    def decide(self, fleet: Fleet) -> Decision:
        """Return the workers that the next interval needs, where something is known of it."""
        targets = []
        for pool in fleet.pools:
            rate = self._forecast[pool.name].next(pool.arrived / fleet.interval_s)
            if not math.isnan(pool.output_tokens) and not math.isnan(pool.prompt_tokens):
                work = self.facts.of(pool.name).work_s(
                    pool.prompt_tokens, pool.output_tokens, pool.cached_tokens, self.told.itl / 1e3
                )
                targets.append(Target(pool.name, max(1, up(rate * work))))
        return targets


class Forecast:
    """Foretells the next value of a series, at least 0.

    ``kalman``: a level and its change a step (local linear trend), Kalman 1960.
    """

    def __init__(self, kind: str) -> None:
        self._kind, self._last = kind, math.nan
        self._state, self._spread = np.zeros(2), np.diag([1e6, 1e2])

    def next(self, value: float, steps: float = 1.0) -> float:
        """Take a value, and return what is foreseen ``steps`` later."""
        last, self._last = self._last, value
        if self._kind == "constant" or math.isnan(last):
            self._state[0] = value
            return value
        if self._kind == "trend":
            return max(0.0, value + steps * (value - last))
        move = np.array([[1.0, 1.0], [0.0, 1.0]])
        state = move @ self._state
        spread = move @ self._spread @ move.T + np.diag([1.0, 0.1])
        gain = spread[:, 0] / (spread[0, 0] + 10.0)
        self._state = state + gain * (value - state[0])
        self._spread = spread - np.outer(gain, spread[0])
        return max(0.0, float(self._state[0] + steps * self._state[1]))


class TimetableParameters(ScalingParameters):
    """Parameters of `Timetable` and `Oracle`."""

    period: float = Field(default=1800.0, gt=0)
    """Seconds of a line of the timetable, each begun one start-up early; of the oracle, over which
    it averages what comes."""
    utilisation: float = Field(default=0.8, gt=0, le=1)
    """Share of the time that workers may be busy."""
    itl: float = Field(default=50.0, gt=0)
    """Time between tokens that full decode steps keep, ms."""
    switch: bool = False
    """Whether a pool that grows while another shrinks takes its workers, where that is faster than
    to start new ones."""


class Timetable(Autoscaler):
    """The workers that each half hour needs: its requests' work over the utilisation.

    It knows the day's load, as one knows yesterday's; a line begins one start-up early.
    """

    name = "timetable"
    Parameters = TimetableParameters
    told: TimetableParameters
    aims = ("utilisation",)
    factors: ClassVar[tuple[float, ...]] = (1.2, 1.1, 1.0, 0.85, 0.7, 0.55)

    def begin(self) -> Mapping[str, int]:
        """Return the first line."""
        return {
            facts.name: self._needed(facts, 0.0, facts.start_up_s) for facts in self.facts.pools
        }

    def decide(self, fleet: Fleet) -> Decision:
        """Return the line, or the next one where it is larger and has to be started now."""
        now = fleet.now_s
        due = {f.name: now + f.start_up_s + fleet.interval_s for f in self.facts.pools}
        wishes = {f.name: self._needed(f, now, due[f.name]) for f in self.facts.pools}
        if not self.told.switch:
            return [Target(name, wish) for name, wish in wishes.items()]
        for pool in fleet.pools:  # it waits for those that others still need until the line begins
            at, facts = due[pool.name], self.facts.of(pool.name)
            others = [other for other in fleet.pools if other is not pool]
            later = {
                other.name: self._needed(self.facts.of(other.name), at, at) for other in others
            }
            coming = sum(
                max(0, min(other.ready, wishes[other.name]) - max(other.minimum, later[other.name]))
                for other in others
            )
            short = wishes[pool.name] - pool.workers
            if facts.switch_s < facts.start_up_s and short > 0:
                wishes[pool.name] -= min(short, coming)
        return with_switches(fleet, wishes, self.facts)

    def _needed(self, facts: PoolFacts, begin: float, end: float) -> int:
        """Return the largest number of the periods from one time to another, s."""
        period = self.told.period
        lines = range(int(begin // period), int(end // period) + 1)
        return max(self._line(facts, line * period) for line in lines)

    def _line(self, facts: PoolFacts, begin: float) -> int:
        own = self.told
        coming = self.facts.known(begin, begin + own.period)
        if not coming.requests:
            return 1
        work = facts.work_s(coming.prompt_tokens, coming.output_tokens, 0.0, own.itl / 1e3)
        return max(1, up(coming.requests / own.period * work / own.utilisation))


class OracleParameters(TimetableParameters):
    """Parameters of `Oracle`."""

    interval: float = Field(default=5.0, gt=0, le=86400)
    """Seconds from one look to the next."""
    period: float = Field(default=30.0, gt=0)
    """Seconds over which it averages what comes."""
    utilisation: float = Field(default=0.9, gt=0, le=1)
    """Share of the time that workers may be busy."""


class Oracle(Timetable):
    """The fewest workers that serve what will come until one that is started now would be ready.

    It knows the future, which nobody does: what any rule could reach.
    """

    name = "oracle"
    Parameters = OracleParameters
    factors = (1.1, 1.0, 0.85, 0.7, 0.55)


class SecondsParameters(ScalingParameters):
    """Parameters of `Seconds`."""

    interval: float = Field(default=10.0, gt=0, le=86400)
    """Seconds from one look to the next."""
    utilisation: float = Field(default=0.9, gt=0, le=1)
    """Share of the time that workers may be busy, beside ``spare``."""
    spare: float = Field(default=0.5, ge=0)
    """Workers beyond the offered work, in square roots of it (square-root staffing)."""
    catch_up: float = Field(default=60.0, gt=0)
    """Seconds in which what waits, once new workers serve, is worked off."""
    itl: float = Field(default=50.0, gt=0)
    """Time between tokens that full decode steps keep, ms."""
    memory: float = Field(default=120.0, gt=0)
    """Seconds over which rates and their change are smoothed."""
    hold: float = Field(default=300.0, ge=0)
    """Seconds for which fewer workers must do before one goes; at least a start-up."""
    switch: bool = True
    """Whether workers change their pool where that is faster than to start one."""


class Seconds(Autoscaler):
    """The offered work in seconds, one start-up ahead, and what waits; no other figure is set.

    Offered work is the rate of arrivals, smoothed with its change (Holt's linear method) and
    foreseen to when a worker started now serves, times the seconds that a mean request takes a
    worker, by the cost model. Square-root staffing adds to it (Halfin & Whitt 1981), and so does
    the work that waits, over ``catch_up``. Where one pool needs a worker and another has one to
    spare, it changes its role if that is faster than to start one.
    """

    name = "seconds"
    Parameters = SecondsParameters
    told: SecondsParameters
    aims, factors = ("utilisation",), (1.1, 1.0, 0.85, 0.7, 0.55)

    def __init__(self, context: PolicyContext, parameters: SecondsParameters | None = None) -> None:
        super().__init__(context, parameters)
        self._rate: dict[str, tuple[float, float]] = {}
        self._mean: dict[str, tuple[float, float, float]] = {}
        self._down = {
            facts.name: Stabilised(max(self.told.hold, facts.start_up_s))
            for facts in self.facts.pools
        }

    def decide(self, fleet: Fleet) -> Decision:
        """Return the workers of each pool, and changes of roles that spare a start."""
        wishes = {pool.name: self._wish(pool, fleet) for pool in fleet.pools}
        if self.told.switch:
            return with_switches(fleet, wishes, self.facts)
        return [Target(name, wish) for name, wish in wishes.items()]

    def _wish(self, pool: PoolView, fleet: Fleet) -> int:
        own, facts = self.told, self.facts.of(pool.name)
        horizon = facts.start_up_s + fleet.interval_s / 2.0
        rate = self._foreseen(pool.name, pool.arrived / fleet.interval_s, fleet.interval_s, horizon)
        mean = self._means(pool, fleet.interval_s)
        if mean is None:
            return pool.workers
        work = rate * facts.work_s(*mean, itl_s=own.itl / 1e3)
        waits = float(pool.waiting.sum()) * facts.work_s(*mean, itl_s=own.itl / 1e3)
        needed = work / own.utilisation + own.spare * math.sqrt(work) + waits / own.catch_up
        wish = max(1, up(needed))
        steady = self._down[pool.name].of(pool.name, fleet.now_s, wish)
        return wish if wish > pool.workers else min(pool.workers, steady)

    def _foreseen(self, pool: str, rate: float, interval_s: float, ahead_s: float) -> float:
        """Return the rate so many seconds ahead, at least half of today's and at most twice."""
        level, change = self._rate.get(pool, (rate, 0.0))
        weight = 1.0 - math.exp(-interval_s / (self.told.memory / 2.0))
        new = max(0.0, weight * rate + (1.0 - weight) * (level + change * interval_s))
        change = (1.0 - weight / 4.0) * change + weight / 4.0 * (new - level) / interval_s
        self._rate[pool] = new, change
        return min(max(new + change * ahead_s, new / 2.0), 2.0 * new)

    def _means(self, pool: PoolView, interval_s: float) -> tuple[float, float, float] | None:
        """Return the smoothed tokens of prompts, outputs and cached prompts; None: none known."""
        seen = pool.prompt_tokens, pool.output_tokens, pool.cached_tokens
        known = self._mean.get(pool.name)
        if any(map(math.isnan, seen)):
            return known
        weight = 1.0 - math.exp(-interval_s / self.told.memory)
        if known is not None:
            prompt, output, cached = (
                old + weight * (new - old) for old, new in zip(known, seen, strict=True)
            )
            seen = prompt, output, cached
        self._mean[pool.name] = seen
        return seen
