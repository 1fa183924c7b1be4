"""llm-d's workload variant autoscaler (github.com/llm-d/llm-d-workload-variant-autoscaler, November
2026): by saturation, by tokens (``saturation_v2``), and by latency (``queueingmodel``)."""

import math
from collections import defaultdict, deque

import numpy as np
from pydantic import Field

from eldr_sim.arrays import Floats
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.scaling import base

_AVERAGED = 10  #: observations of a capacity
_QUEUE = 10  #: requests that may wait, in batches: ``maxQueueToBatchRatio``


class VariantParameters(base.ScalingParameters):
    """Parameters of llm-d's rules; the defaults are llm-d's."""

    interval: float = Field(default=30.0, gt=0, le=86400)
    """Seconds from one look to the next."""
    idle: float = Field(default=600.0, gt=0)
    """Seconds without a request after which a pool has no worker, if ``min_workers`` is 0."""


class VariantAutoscaler(base.Autoscaler):
    """A rule for pools that have workers, and their way to none and back."""

    Parameters = VariantParameters
    parameters: VariantParameters

    def __init__(self, context: PolicyContext, parameters: VariantParameters | None = None) -> None:
        super().__init__(context, parameters)
        self._busy_s: dict[str, float] = defaultdict(float)

    def decide(self, fleet: base.Fleet) -> base.Decision:
        """Return the workers of each pool of which something is known."""
        wishes = [(pool.name, self._wanted(pool, fleet)) for pool in fleet.pools]
        return [base.Target(name, wish) for name, wish in wishes if wish is not None]

    def _wanted(self, pool: base.PoolView, fleet: base.Fleet) -> int | None:
        if pool.arrived or pool.in_flight:
            self._busy_s[pool.name] = fleet.now_s
            if not pool.workers:
                return 1
        if pool.minimum == 0 and fleet.now_s - self._busy_s[pool.name] >= self.parameters.idle:
            return 0
        return self._wish(pool, fleet) if pool.ready else None

    def _wish(self, pool: base.PoolView, fleet: base.Fleet) -> int | None:
        raise NotImplementedError


class SaturationParameters(VariantParameters):
    """Parameters of `LlmdSaturation`; the defaults are llm-d's."""

    kv: float = Field(default=0.8, gt=0, le=1)
    """A worker with more of its KV cache in use is saturated."""
    queue: float = Field(default=5.0, gt=0)
    """A worker with more waiting requests is saturated."""
    spare_kv: float = Field(default=0.1, ge=0, lt=1)
    """One more worker where others have less KV to spare on average."""
    spare_queue: float = Field(default=3.0, ge=0)
    """One more worker where others have less room in their queues on average."""


class LlmdSaturation(VariantAutoscaler):
    """llm-d's variant autoscaler: one more where workers are nearly full, one less if all fits."""

    name = "llmd_saturation"
    Parameters = SaturationParameters
    parameters: SaturationParameters
    aims, factors = ("spare_kv",), (0.5, 1.0, 2.0, 4.0, 6.0)

    def _wish(self, pool: base.PoolView, fleet: base.Fleet) -> int | None:
        return None if pool.starting else pool.workers + self._step(pool)

    def _step(self, pool: base.PoolView) -> int:
        parameters, n = self.parameters, pool.ready
        free = (pool.kv_usage <= parameters.kv) & (pool.waiting <= parameters.queue)
        if not free.any():
            return 1

        def fits(kv: float, queue: float) -> bool:
            return (
                parameters.kv - kv >= parameters.spare_kv
                and parameters.queue - queue >= parameters.spare_queue
            )

        kv, queue = float(pool.kv_usage[free].mean()), float(pool.waiting[free].mean())
        if not fits(kv, queue):
            return 1
        rest = n / (n - 1) if n > 1 else 0.0
        kv, queue = float(pool.kv_usage.mean()), float(pool.waiting.mean())
        return -1 if n > 1 and fits(kv * rest, queue * rest) else 0


class TokensParameters(VariantParameters):
    """Parameters of `LlmdTokens`; the defaults are llm-d's."""

    kv: float = Field(default=0.8, gt=0, le=1)
    """Share of a worker's KV cache that it can use."""
    queue: float = Field(default=5.0, gt=0)
    """With this number of waiting requests what a worker has in use is what it can do."""
    more: float = Field(default=0.85, gt=0, le=1)
    """Workers are added until demand is this share of what they can do."""
    less: float = Field(default=0.7, gt=0, le=1)
    """Workers go as long as demand stays below this share."""


class LlmdTokens(VariantAutoscaler):
    """llm-d's analyzer of tokens: those in use and waiting over those that workers have room for.

    That is ``kv`` of the cache, or less where steps bound it: the mean in use when requests waited,
    or ``n`` sequences of a prompt and half an output, ``n = min(budget * output / (prompt +
    output), max_num_seqs)``."""

    name = "llmd_tokens"
    Parameters = TokensParameters
    parameters: TokensParameters
    aims, factors = ("more", "less"), (1.15, 1.0, 0.8, 0.6, 0.4)

    def __init__(self, context: PolicyContext, parameters: TokensParameters | None = None) -> None:
        super().__init__(context, parameters)
        self._seen: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_AVERAGED))

    def _wish(self, pool: base.PoolView, fleet: base.Fleet) -> int | None:
        parameters, facts, seen = self.parameters, self.facts.of(pool.name), self._seen[pool.name]
        demand = float(pool.running_tokens.sum() + pool.waiting_tokens.sum())
        most = parameters.kv * facts.kv_tokens * facts.engines
        full = (pool.waiting >= parameters.queue) & (pool.running_tokens > 0)
        seen.extend(pool.running_tokens[full].tolist())
        usual = float(np.mean(seen)) if seen else _steady_tokens(pool, facts)
        each = np.minimum(np.where(full, pool.running_tokens, usual), most)
        capacity = float(np.median(each))
        if demand > parameters.more * capacity * pool.workers:
            return base.whole_workers(demand / parameters.more / capacity)
        spare = capacity * pool.ready - demand / parameters.less
        return max(1, pool.workers - math.floor(max(0.0, spare) / capacity))


def _steady_tokens(pool: base.PoolView, facts: base.PoolFacts) -> float:
    """Return the tokens of as many sequences as a worker's steps keep going; inf: none known."""
    prompt, output = pool.prompt_tokens, pool.output_tokens
    if math.isnan(prompt) or math.isnan(output):
        return math.inf
    n = min(facts.token_budget * output / (prompt + output), facts.max_num_seqs)
    return facts.engines * n * (prompt + output / 2.0)


class LatencyParameters(VariantParameters):
    """Parameters of `LlmdLatency`."""

    ttft: float = Field(default=500.0, gt=0)
    """TTFT aimed at, ms."""
    itl: float = Field(default=50.0, gt=0)
    """Time between tokens aimed at, ms."""


class LlmdLatency(VariantAutoscaler):
    """llm-d's queueing model: the rate of requests over the highest at which a worker keeps both
    targets.

    An M/M/1/k queue: ``n`` requests leave at ``n / (n * prompt + output * step(n))``, and ten
    batches may wait. Its speed is the cost model's, where llm-d learns it."""

    name = "llmd_latency"
    Parameters = LatencyParameters
    parameters: LatencyParameters
    aims, factors = ("ttft", "itl"), base.OF_TIMES

    def __init__(self, context: PolicyContext, parameters: LatencyParameters | None = None) -> None:
        super().__init__(context, parameters)
        #: What `highest_rate` has said: most intervals have the tokens of one before.
        self._highest: dict[tuple[str, float, float], float] = {}

    def _wish(self, pool: base.PoolView, fleet: base.Fleet) -> int | None:
        if math.isnan(pool.prompt_tokens) or math.isnan(pool.output_tokens):
            return None
        rate = pool.arrived / fleet.interval_s
        asked = pool.name, pool.prompt_tokens, pool.output_tokens
        if asked not in self._highest:
            self._highest[asked] = self.highest_rate(self.facts.of(pool.name), *asked[1:])
        return max(1, base.whole_workers(rate / self._highest[asked]))

    def highest_rate(self, facts: base.PoolFacts, prompt: float, output: float) -> float:
        """Return the requests/s of a worker that keep both targets, 1% of the most at least."""
        prompt_s = facts.prompt_s(max(1, round(prompt))) if facts.computes else 0.0
        output = output if facts.decodes else 0.0
        batches = np.arange(1.0, facts.max_num_seqs + 1)
        steps = np.array([facts.step_s(int(n), prompt + output / 2.0) for n in batches])
        prompts = np.asarray(batches * prompt_s, np.float64)
        leaves = batches / (prompts + output * steps)
        most_ttft_s, most_itl_s = self.parameters.ttft / 1e3, self.parameters.itl / 1e3
        low, high = 0.0, float(leaves.max())
        for _ in range(30):
            rate = (low + high) / 2.0
            ttft, itl = queue_latency(rate, leaves, prompts, steps)
            kept = ttft <= most_ttft_s and (not output or itl <= most_itl_s)
            low, high = (rate, high) if kept else (low, rate)
        return facts.engines * max(low, float(leaves.max()) / 100.0)


def queue_latency(
    rate: float, leaves: Floats, prompts: Floats, steps: Floats
) -> tuple[float, float]:
    """Return mean TTFT and time between tokens, s, of a server of batches, by a birth-and-death
    process and Little's law. ``leaves``: requests/s that leave a batch; ``prompts``, ``steps``: its
    seconds."""
    batch = np.minimum(np.arange(1, (1 + _QUEUE) * len(leaves) + 1), len(leaves))
    logs = np.concatenate([[0.0], np.cumsum(np.log(rate) - np.log(leaves[batch - 1]))])
    chance = np.exp(logs - logs.max())
    chance /= chance.sum()
    number = np.arange(len(chance))
    served = rate * (1.0 - chance[-1])
    waiting = float(chance @ np.maximum(number - len(leaves), 0))
    busy = chance[1:] / (1.0 - chance[0])
    prompt_s, step_s = (float(busy @ of[batch - 1]) for of in (prompts, steps))
    return waiting / served + prompt_s, step_s
