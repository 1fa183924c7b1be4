"""Routers that know which worker has a prompt's KV blocks, as others publish them.

``matched``: prompt tokens in a worker's prefix cache, as the router knows; work is what it has sent
and is not computed. Sources, read in 2026: ai-dynamo/dynamo ``lib/kv-router``, llm-d's inference
scheduler, SGLang's ``sgl-model-gateway``, vllm-project/production-stack, Preble (arXiv
2407.00023)."""

from typing import Any

import numpy as np
from pydantic import Field

from eldr_sim.arrays import Floats, Ints
from eldr_sim.policies.base import Needs, PolicyContext, RequestInfo, RouterPolicy, Workers
from eldr_sim.policies.choice import Parameters

_READS = frozenset({"loads", "waiting", "waiting_tokens", "running_tokens", "kv_usage"})
_Scores = Floats


class KVAwarePolicy(RouterPolicy):
    """The worker of the smallest cost; ties go to the next of them in turn."""

    decision = "prefill"
    also = "decode"
    needs = Needs(matched=True, ends=True, columns=_READS)

    def __init__(self, context: PolicyContext, parameters: Any = None) -> None:
        self.parameters, self._turn = parameters, 0
        self._decodes = context.computes_prompts
        #: Tokens sent to each worker whose prompts are not computed, and of which request.
        self.queued = np.zeros(context.n_workers, np.int64)
        self._sent: dict[int, int] = {}

    def costs(self, request: RequestInfo, workers: Workers) -> _Scores:
        """Return the cost of each worker."""
        raise NotImplementedError

    def todo(self, workers: Workers) -> Ints:
        """Return the prompt tokens that each worker has still to compute, as the router knows; for
        co-located workers only those that wait, because completions are reported too late."""
        return workers.waiting_tokens if self._decodes else self.queued

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return the healthy worker of the smallest cost."""
        if not workers.healthy.any():
            return None
        cost = np.where(workers.healthy, self.costs(request, workers), np.inf)
        tied = np.flatnonzero(cost == cost.min())
        worker = int(tied[np.searchsorted(tied, self._turn) % len(tied)])
        self._turn = worker + 1
        self._sent[request.request_id] = new = request.prompt_len - int(workers.matched[worker])
        self.queued[worker] += new
        return worker

    def on_complete(self, request_id: int, worker: int) -> None:
        """Take a prompt that is computed from its worker's work."""
        self.queued[worker] -= self._sent.pop(request_id)


class DynamoParameters(Parameters):
    """Parameters of `DynamoPolicy`, with Dynamo's defaults."""

    credit: float = Field(default=1.0, ge=0)
    """Of matched tokens (overlap score weight)."""
    tier: float = Field(default=0.75, ge=0)
    """And of those in KV tiers, each as much of it (Dynamo: host memory .75, disk .25)."""
    load: float = Field(default=0.0, ge=0)
    """Blocks that a request in flight counts as."""
    block_tokens: int = Field(default=16, ge=1)
    """Tokens of a block."""


class DynamoPolicy(KVAwarePolicy):
    """Dynamo's cost: prompt blocks to compute, this request's among them, and blocks in use."""

    name = "dynamo_kv"
    Parameters = DynamoParameters

    def costs(self, request: RequestInfo, workers: Workers) -> _Scores:
        """Return blocks to compute and blocks that decode."""
        parameters: DynamoParameters = self.parameters
        known = workers.matched.astype(float)
        if len(workers.reachable):
            known += parameters.tier * (workers.reachable - workers.matched)
        blocks = self.todo(workers) + request.prompt_len - parameters.credit * known
        decoding = workers.running_tokens if self.decision == "decode" else 0
        cost: _Scores = (np.maximum(blocks, 0) + decoding) / parameters.block_tokens
        return cost + parameters.load * workers.loads


class LMetricPolicy(KVAwarePolicy):
    """Dynamo's ``lmetric``: tokens to compute times requests in flight, its own among both."""

    name = "lmetric"

    def costs(self, request: RequestInfo, workers: Workers) -> _Scores:
        """Return tokens to compute, this request's among them, times requests."""
        tokens = self.todo(workers) + request.prompt_len - workers.matched
        return np.asarray(tokens * (workers.loads + 1.0))


class LlmdParameters(Parameters):
    """Weights of llm-d's scorers, with its defaults."""

    prefix: float = Field(default=3.0, ge=0)
    """Of the share of the prompt that is matched."""
    tier: float = Field(default=0.4, ge=0)
    """Of the share that a worker has in KV tiers or cached; 0: it does not know of tiers."""
    queue: float = Field(default=2.0, ge=0)
    """Of how few requests wait, from 0 (most of all workers) to 1 (fewest)."""
    kv: float = Field(default=2.0, ge=0)
    """Of the share of KV blocks that are free."""


class LlmdPolicy(KVAwarePolicy):
    """llm-d's weighted scorers: matched prefix, queue and free KV blocks."""

    name = "llmd"
    Parameters = LlmdParameters

    def costs(self, request: RequestInfo, workers: Workers) -> _Scores:
        """Return the negative sum of the scores."""
        parameters: LlmdParameters = self.parameters
        waiting, seen = workers.waiting, workers.waiting[workers.healthy]
        span = max(1, int(seen.max() - seen.min()))
        score = parameters.prefix * workers.matched / request.prompt_len
        if len(workers.reachable) and (workers.reachable > workers.matched).any():
            score = score + parameters.tier * workers.reachable / request.prompt_len
        score = score + parameters.queue * (seen.max() - waiting) / span
        return np.asarray(-(score + parameters.kv * (1.0 - workers.kv_usage)))


class CacheAwareParameters(Parameters):
    """Parameters of `CacheAwarePolicy`, with SGLang's defaults on its command line."""

    threshold: float = Field(default=0.3, ge=0, le=1)
    """Share of the prompt from which on the best match decides."""
    absolute: float = Field(default=64, ge=0)
    """Requests between the most and the least loaded worker, and"""
    relative: float = Field(default=1.5, ge=1)
    """ratio of the two, above which the least loaded gets the request."""


class CacheAwarePolicy(KVAwarePolicy):
    """SGLang's cache-aware rule: the longest match, unless it is short or loads differ much."""

    name = "cache_aware"
    Parameters = CacheAwareParameters

    def costs(self, request: RequestInfo, workers: Workers) -> _Scores:
        """Return loads, or where a match is long enough the tokens that are not matched."""
        parameters: CacheAwareParameters = self.parameters
        loads = workers.loads[workers.healthy]
        uneven = loads.max() - loads.min() > parameters.absolute
        uneven = uneven and loads.max() > parameters.relative * loads.min()
        best = workers.matched[workers.healthy].max()
        if uneven or best <= parameters.threshold * request.prompt_len:
            return workers.loads.astype(float)
        return np.asarray(-workers.matched, np.float64)


class PreblePolicy(KVAwarePolicy):
    """Preble's E2: the longest match where more is matched than not, else the least work."""

    name = "preble"

    def costs(self, request: RequestInfo, workers: Workers) -> _Scores:
        """Return work; what the longest match does not share comes last where that is longer."""
        work = (self.todo(workers) + request.prompt_len - workers.matched).astype(float)
        best = int(workers.matched[workers.healthy].max())
        if 2 * best > request.prompt_len:
            work[workers.matched < best] += 1e15
        return work


class LoadAwareParameters(Parameters):
    """Parameters of `LoadAwarePolicy`."""

    beta: float = Field(default=1.0, ge=0)
    """Of the load above the mean one."""


class LoadAwarePolicy(KVAwarePolicy):
    """production-stack's: share of the prompt matched, less load above the mean one."""

    name = "load_aware"
    Parameters = LoadAwareParameters

    def costs(self, request: RequestInfo, workers: Workers) -> _Scores:
        """Return excess load less the share that is matched."""
        parameters: LoadAwareParameters = self.parameters
        mean = float(workers.loads.mean())
        excess = (workers.loads - mean) / max(1.0, mean)
        return np.asarray(parameters.beta * excess - workers.matched / request.prompt_len)


class SessionParameters(Parameters):
    """Parameters of `SessionPolicy`."""

    lifetime_s: float = Field(default=600.0, gt=0)
    """Seconds after its last request in which a session keeps its worker."""


class SessionPolicy(KVAwarePolicy):
    """A session's worker, for some time after its last request; else the least loaded one."""

    name = "session"
    needs = Needs(columns=frozenset({"loads"}), matched=True, ends=True)
    Parameters = SessionParameters

    def __init__(self, context: PolicyContext, parameters: SessionParameters) -> None:
        super().__init__(context, parameters)
        self._homes: dict[int | str | None, tuple[int, float]] = {}

    def costs(self, request: RequestInfo, workers: Workers) -> _Scores:
        """Return loads, below 0 for the session's worker."""
        cost = workers.loads.astype(float)
        home, since = self._homes.get(request.session, (-1, 0.0))
        if home >= 0 and workers.now_s - since <= self.parameters.lifetime_s:
            cost[home] = -1.0
        return cost

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return the session's worker, and note that it is."""
        worker = super().select(request, workers)
        if worker is not None:
            self._homes[request.session] = worker, workers.now_s
        return worker


class SplitParameters(Parameters):
    """Parameters of `SplitPolicy`."""

    tokens: int = Field(default=4096, ge=0)
    """Tokens from which on a prompt is long."""
    short: float = Field(default=0.5, gt=0, lt=1)
    """Share of the workers that short prompts go to, the first ones; at least one."""
    remaining: bool = True
    """Whether a prompt is as long as what no worker has cached of it, or as all of it."""


class SplitPolicy(KVAwarePolicy):
    """llm-d's split of prefill workers by length or remaining work: the least work of a part."""

    name = "split"
    Parameters = SplitParameters

    def costs(self, request: RequestInfo, workers: Workers) -> _Scores:
        """Return tokens to compute; the part that is for others comes last."""
        parameters: SplitParameters = self.parameters
        cached = workers.matched[workers.healthy].max() if parameters.remaining else 0
        first = max(1, round(parameters.short * len(workers.loads)))
        work = (self.todo(workers) + request.prompt_len - workers.matched).astype(float)
        is_short = request.prompt_len - cached < parameters.tokens
        work[first:] += 1e15 * is_short
        work[:first] += 1e15 * (not is_short)
        return work
