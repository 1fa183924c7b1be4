"""Autoscalers that know what workers can do: Dynamo's, a timetable, an oracle, and ours, `Seconds`.

A pool's *work* is the seconds of a worker that the requests of a second take
(`PoolFacts.work_s`)."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from eldr_sim.arrays import Floats
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.scaling import base
from eldr_sim.policies.scaling.metrics import ScaleRequests

_FILTERS = 12  #: of `Trend`
_DEARER = 1.1  #: work of a request from which a wider group counts as a dearer one


class LoadParameters(base.ScalingParameters):
    """Parameters of `DynamoLoad`; the defaults are Dynamo's."""

    interval: float = Field(default=5.0, gt=0, le=86400)
    """Seconds from one look to the next."""
    ttft: float = Field(default=500.0, gt=0)
    """TTFT aimed at, ms."""
    itl: float = Field(default=50.0, gt=0)
    """Time between tokens aimed at, ms."""
    sensitivity: float = Field(default=0.8, gt=0, le=1)
    """One worker less where the others would still be so far within the targets."""


class DynamoLoad(base.Autoscaler):
    """Dynamo's load rule: one worker more where every worker misses its target, one less where
    those that stay would not.

    TTFT is that of prompts that wait and one more, ITL that of the running sequences. Co-located:
    more if either is missed, less if both are kept. Nothing changes while a worker starts."""

    name = "dynamo_load"
    Parameters = LoadParameters
    parameters: LoadParameters
    aims, factors = ("ttft", "itl"), base.OF_TIMES

    def decide(self, fleet: base.Fleet) -> base.Decision:
        """Return one worker more, or less."""
        return [
            base.Target(pool.name, pool.workers + self._step(pool, self.facts.of(pool.name)))
            for pool in fleet.pools
            if not pool.starting
        ]

    def _step(self, pool: base.PoolView, facts: base.PoolFacts) -> int:
        parameters, n = self.parameters, pool.ready
        ttft, itl = parameters.ttft / 1e3, parameters.itl / 1e3
        prompt = pool.prompt_tokens
        rest = n / (n - 1) if n > 1 else 1.0
        more, less = False, n > 1
        if facts.computes:
            alone = 0.0 if math.isnan(prompt) else facts.prompt_s(max(1, round(prompt)))
            speed = facts.prompt_s(4096) / 4096 / facts.engines
            queue = pool.waiting_tokens * speed
            more |= bool((queue + alone > ttft).all())
            less &= bool((queue * rest < parameters.sensitivity * (ttft - alone)).all())
        if facts.decodes:
            steps = np.array([self._step_s(pool, facts, w, 1.0) for w in range(n)])
            more |= bool((steps > itl).all())
            less &= bool((pool.kv_usage * rest < 1.0).all()) and all(
                self._step_s(pool, facts, w, rest) < parameters.sensitivity * itl for w in range(n)
            )
        return 1 if more else -1 if less else 0

    @staticmethod
    def _step_s(pool: base.PoolView, facts: base.PoolFacts, w: int, share: float) -> float:
        running = int(pool.running[w])
        if not running:
            return 0.0
        batch = min(facts.max_num_seqs, base.whole_workers(running * share / facts.engines))
        return facts.step_s(batch, 64.0 * round(float(pool.running_tokens[w]) / running / 64.0))


class ThroughputParameters(base.ScalingParameters):
    """Parameters of `DynamoThroughput`."""

    interval: float = Field(default=180.0, gt=0, le=86400)
    """Seconds from one look to the next."""
    itl: float = Field(default=50.0, gt=0)
    """Time between tokens aimed at, ms."""
    forecast: Literal["constant", "trend", "kalman"] = "kalman"
    """The next interval's rate: the last one's, that and its change, or a Kalman filter of both
    (process noise 0.1 and 1, measurement noise 10, as Dynamo's)."""


class DynamoThroughput(base.Autoscaler):
    """Dynamo's throughput rule: the rate foreseen over what a worker serves within the target."""

    name = "dynamo_throughput"
    Parameters = ThroughputParameters
    parameters: ThroughputParameters
    aims, factors = ("itl",), (1.0, 0.8, 0.6, 0.45, 0.35)

    def __init__(self, context: PolicyContext, parameters: ThroughputParameters | None = None):
        super().__init__(context, parameters)
        self._forecast: dict[str, Forecast] = defaultdict(
            lambda: Forecast(self.parameters.forecast)
        )

    def decide(self, fleet: base.Fleet) -> base.Decision:
        """Return the workers that the next interval needs, where something is known of it."""
        targets = []
        for pool in fleet.pools:
            rate = self._forecast[pool.name].next(pool.arrived / fleet.interval_s)
            if not math.isnan(pool.output_tokens) and not math.isnan(pool.prompt_tokens):
                work = self.facts.of(pool.name).work_s(
                    pool.prompt_tokens,
                    pool.output_tokens,
                    pool.cached_tokens,
                    self.parameters.itl / 1e3,
                    False,
                )
                targets.append(base.Target(pool.name, max(1, base.whole_workers(rate * work))))
        return targets


class Forecast:
    """Foretells the next value of a series, at least 0.

    ``kalman``: a level and its change a step, Kalman 1960."""

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


class Trend:
    """Forecasts a rate from counts of Poisson arrivals, with their known noise.

    Kalman filters follow the rate and its change a second, as if that changed the rate by itself
    within T, in octaves from one interval on. They count by how well each foretold, shared anew by
    1 / t (Herbster & Warmuth 1998)."""

    def __init__(self) -> None:
        self._seen = 0
        self.level = self.change = 0.0  #: the rate that there is, events a second, and its change
        #: Of each filter: ``[filter]``, ``[filter, 2]`` and ``[filter, 2, 2]``.
        self._memory_s: Floats = np.zeros(0)
        self._weight: Floats = np.zeros(0)
        self._state: Floats = np.zeros((0, 2))
        self._spread: Floats = np.zeros((0, 2, 2))

    def next(self, count: int, interval_s: float, ahead_s: float) -> float:
        """Take a count; return the rate ``ahead_s`` later, from half of today's to twice."""
        rate, n, dt = count / interval_s, _FILTERS, interval_s
        self._seen += 1
        if self._seen == 1:
            self._memory_s = dt * np.exp2(np.arange(n, dtype=np.float64))
            self._weight = np.full(n, 1.0 / n)
            self._state = np.tile([rate, 0.0], (n, 1))
            self._spread = np.zeros((n, 2, 2))
            self._spread[:, 0, 0] = max(rate, 1.0 / dt) / dt
            self._spread[:, 1, 1] = (max(rate, 1.0 / dt) / self._memory_s) ** 2
            self.level = rate
            return rate
        scale = max(float(self._weight @ self._state[:, 0]), 1.0 / dt)
        move = np.array([[1.0, dt], [0.0, 1.0]])
        wander = np.array([[dt**3 / 3.0, dt**2 / 2.0], [dt**2 / 2.0, dt]])
        state = self._state @ move.T
        spread = move @ self._spread @ move.T
        spread += (scale**2 / self._memory_s**3)[:, None, None] * wander
        surprise, variance = rate - state[:, 0], spread[:, 0, 0] + scale / dt
        gain = spread[:, :, 0] / variance[:, None]
        self._state = state + gain * surprise[:, None]
        self._spread = spread - gain[:, :, None] * spread[:, None, 0]
        fit = np.log(self._weight) - (surprise**2 / variance + np.log(variance)) / 2.0
        likely = np.exp(fit - fit.max())
        self._weight = (1.0 - 1.0 / self._seen) * likely / likely.sum() + 1.0 / self._seen / n
        level, change = (self._weight @ self._state).tolist()
        self.level, self.change = level, change = max(0.0, level), change
        return float(min(max(level + change * ahead_s, level / 2.0), 2.0 * level))


class TimetableParameters(base.ScalingParameters):
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


class Timetable(base.Autoscaler):
    """The workers that each half hour needs: its requests' work over the utilisation.

    A start-up early: it knows the day's load, as one knows yesterday's."""

    name = "timetable"
    Parameters = TimetableParameters
    parameters: TimetableParameters
    aims, ways = ("utilisation",), ("switch",)
    factors: ClassVar[tuple[float, ...]] = (1.2, 1.1, 1.0, 0.85, 0.7, 0.55)

    def begin(self) -> Mapping[str, int]:
        """Return the first line."""
        return {
            facts.name: self._needed(facts, 0.0, facts.start_up_s) for facts in self.facts.pools
        }

    def decide(self, fleet: base.Fleet) -> base.Decision:
        """Return the line, or the next one where it is larger and has to be started now."""
        now = fleet.now_s
        due = {f.name: now + f.start_up_s + fleet.interval_s for f in self.facts.pools}
        wishes = {f.name: self._needed(f, now, due[f.name]) for f in self.facts.pools}
        if not self.parameters.switch:
            return [base.Target(name, wish) for name, wish in wishes.items()]
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
        return base.with_switches(fleet, wishes, self.facts)

    def _needed(self, facts: base.PoolFacts, begin: float, end: float) -> int:
        """Return the largest number of the periods from one time to another, s."""
        period = self.parameters.period
        lines = range(int(begin // period), int(end // period) + 1)
        return max(self._line(facts, line * period) for line in lines)

    def _line(self, facts: base.PoolFacts, begin: float) -> int:
        parameters = self.parameters
        coming = self.facts.known(begin, begin + parameters.period)
        if not coming.requests:
            return 1
        rate = coming.requests / parameters.period / parameters.utilisation
        means = coming.prompt_tokens, coming.output_tokens, 0.0, parameters.itl / 1e3
        return facts.fewest(lambda facts, n: rate * facts.work_s(*means) <= n + 1e-9)


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

    It knows the future, which no rule does: the best that any rule could reach."""

    name = "oracle"
    Parameters = OracleParameters
    factors = (1.1, 1.0, 0.85, 0.7, 0.55)


class SecondsParameters(base.ScalingParameters):
    """Parameters of `Seconds`."""

    interval: float = Field(default=10.0, gt=0, le=86400)
    """Seconds from one look to the next."""
    ttft: float = Field(default=500.0, gt=0)
    """TTFT aimed at, ms."""
    missed: float = Field(default=0.05, gt=0, lt=1)
    """Share of the requests that may wait longer than it allows."""
    spend: bool = False
    """Whether a start waits as long as what comes late by it is less than ``missed`` leaves of all
    requests so far; else each moment keeps the target."""
    catch_up: float = Field(default=60.0, gt=0)
    """Seconds in which what waits, once new workers serve, is worked off."""
    itl: float = Field(default=50.0, gt=0)
    """Time between tokens that full decode steps keep, ms."""
    memory: float = Field(default=120.0, gt=0)
    """Seconds over which the tokens of requests are smoothed."""
    hold: float = Field(default=0.0, ge=0)
    """Seconds for which fewer workers must do before one goes; at least as many as pay for its
    coming back."""
    switch: bool = True
    """Whether workers change their pool where that is faster than to start one."""


class Seconds(base.Autoscaler):
    """The fewest workers that keep the TTFT for the work expected one start-up ahead.

    Offered work is the rate of arrivals, foreseen to when a worker started now serves (`Trend`),
    times the seconds of a mean request by the cost model; what waits adds to it, over ``catch_up``.
    Workers are servers of one queue (`queues`); one to spare changes its pool if that is faster
    than a start."""

    name = "seconds"
    Parameters = SecondsParameters
    parameters: SecondsParameters
    aims, factors, ways = ("ttft",), base.OF_TIMES, ("switch", "spend")

    def __init__(self, context: PolicyContext, parameters: SecondsParameters | None = None) -> None:
        super().__init__(context, parameters)
        self._trends: dict[str, Trend] = defaultdict(Trend)
        self._mean: dict[str, tuple[float, float, float]] = {}
        self._wishes = ScaleRequests()
        self._may_miss: dict[str, float] = defaultdict(float)  # requests, so far

    def decide(self, fleet: base.Fleet) -> base.Decision:
        """Return the workers of each pool, and changes of roles that spare a start."""
        wishes, least = {}, {}
        for pool in fleet.pools:
            facts, wish = self.facts.of(pool.name), self._wish(pool, fleet)
            least[pool.name] = self._fewer(pool, fleet.now_s, wish, 2.0 * facts.switch_s)
            wishes[pool.name] = self._fewer(pool, fleet.now_s, wish, facts.start_up_s)
        if self.parameters.switch:
            return base.with_switches(fleet, wishes, self.facts, least)
        return [base.Target(name, wish) for name, wish in wishes.items()]

    def _wish(self, pool: base.PoolView, fleet: base.Fleet) -> int | None:
        parameters, facts = self.parameters, self.facts.of(pool.name)
        horizon = facts.start_up_s + fleet.interval_s / 2.0
        trend = self._trends[pool.name]
        rate = trend.next(pool.arrived, fleet.interval_s, horizon)
        mean = self._means(pool, fleet.interval_s)
        if mean is None:
            return None
        waits = float(pool.waiting.sum())

        def asked(facts: base.PoolFacts) -> tuple[float, float]:
            """Return the work of a request, and how long it may wait, s."""
            own_s = facts.prompt_s(max(1, round(mean[0] - mean[2]))) if facts.computes else 0.0
            return facts.work_s(*mean, itl_s=parameters.itl / 1e3), max(
                0.0, parameters.ttft / 1e3 - own_s
            )

        def keep(facts: base.PoolFacts, n: int) -> bool:
            each, rest_s = asked(facts)
            load = (rate + waits / parameters.catch_up) * each
            return load < n and queues(n, load, rest_s / each) <= parameters.missed

        wish = facts.fewest(keep)
        each, rest_s = asked(facts.widths.get(pool.workers, facts))
        late = pool.arrived if waits * each > rest_s * max(1, pool.ready) else 0
        self._may_miss[pool.name] += parameters.missed * pool.arrived - late
        if parameters.spend and wish > pool.workers:
            path = trend.level * each, trend.change * each, waits * each
            serves_s = facts.start_up_s + fleet.interval_s  # one that is started at the next look
            missed = late_work(path, (pool.workers, wish), rest_s, serves_s) / each
            wish = pool.workers if missed <= self._may_miss[pool.name] else wish
        if wish > pool.workers:  # requests that come while the group stands still wait, too
            waits += rate * facts.pause_s(pool.workers, wish)
            wish = facts.fewest(keep)
        wish = self._no_dearer(facts, wish, trend.level + waits / parameters.catch_up, mean)
        self._wishes.note(pool, fleet.now_s, wish)
        return wish

    def _no_dearer(
        self, facts: base.PoolFacts, wish: int, rate: float, mean: tuple[float, float, float]
    ) -> int:
        """Return the wish, or the widest group at which a request takes clearly less work, while
        that serves the rate there is: what is foreseen is no reason to have all requests take
        longer."""
        work = {
            n: own.work_s(*mean, itl_s=self.parameters.itl / 1e3)
            for n, own in facts.widths.items()
            if n <= wish
        }
        cheaper = [n for n in work if work[n] * _DEARER <= work[wish] and rate * work[n] < n]
        return max(cheaper, default=wish)

    def _fewer(self, pool: base.PoolView, now_s: float, wish: int | None, back_s: float) -> int:
        """Return the wish, or the fewest workers that have done for so long that the others have
        cost what they take to come back: ``back_s``, and the group's standing still (the break-even
        rule of the ski-rental problem)."""
        facts, n = self.facts.of(pool.name), pool.workers
        if wish is None or wish >= n:
            return n if wish is None else wish
        for fewer in range(wish, n):
            pauses_s = n * (facts.pause_s(n, fewer) + facts.pause_s(fewer, n))
            hold_s = max(self.parameters.hold, back_s + pauses_s / (n - fewer))
            if self._wishes.largest(pool, now_s - hold_s) <= fewer:
                return fewer
        return n

    def _means(self, pool: base.PoolView, interval_s: float) -> tuple[float, float, float] | None:
        """Return the smoothed tokens of prompts, outputs and cached prompts; None: none known."""
        seen = pool.prompt_tokens, pool.output_tokens, pool.cached_tokens
        means = self._mean.get(pool.name)
        if any(map(math.isnan, seen)):
            return means
        weight = 1.0 - math.exp(-interval_s / self.parameters.memory)
        if means is not None:
            prompt, output, cached = (
                old + weight * (new - old) for old, new in zip(means, seen, strict=True)
            )
            seen = prompt, output, cached
        self._mean[pool.name] = seen
        return seen


def late_work(
    path: tuple[float, float, float], workers: tuple[int, int], rest_s: float, serves_s: float
) -> float:
    """Return the work that arrives while waits exceed ``rest_s``: a fluid queue.

    ``path``: work a second, its change until more serve, and what waits; ``workers``: now, from
    ``serves_s`` on."""
    load, change, waits = path
    step_s, late = serves_s / 32.0, 0.0
    for n in range(128):
        now = workers[n >= 32]
        waits = max(0.0, waits + (load - now) * step_s)
        late += load * step_s * (waits > now * rest_s)
        load = max(0.0, load + change * step_s * (n < 32))
    return late


def queues(servers: int, load: float, services: float) -> float:
    """Return the share of requests that wait longer than ``services`` mean services: M/M/c, Erlang
    1917. ``load``: servers busy on average, fewer than there are."""
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    waits = servers * blocked / (servers - load * (1.0 - blocked))
    return waits * math.exp(-(servers - load) * services)
