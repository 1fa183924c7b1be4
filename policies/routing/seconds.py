"""A cost in seconds: what a request waits and takes, and what it does to others. No weights.

- Where prompts are computed, ``wait + load + prefill(new tokens behind the cached ones)``: the
  predicted work ahead, and its own, those in KV tiers loaded;
- where workers decode beside it, that prefill once more for each running request, and the expected
  tokens times ``(b + 1) t' - b t``: its own step time, and what it adds to the others'
  (`marginal_cost`), by the expected union of experts;
- where a KV cache is fetched, the seconds that its missing part takes alone.

A request of unknown experts counts as the mean of the calibration requests, as do all under
``experts=false``. Later turns go where their prefix is: the first turn of a session places all, and
what it adds to steps counts once for each expected turn (``horizon``)."""

import numpy as np
from pydantic import Field

from eldr_sim.arrays import Floats
from eldr_sim.errors import InputError
from eldr_sim.jit import njit
from eldr_sim.kernel_profiles.steps.cost_tables import StepCost
from eldr_sim.kernel_profiles.steps.step_cost import step_parts, total_s
from eldr_sim.policies.base import LOADS, Needs, PolicyContext, RequestInfo, RouterPolicy, Workers
from eldr_sim.policies.choice import Parameters, SignatureParameters
from eldr_sim.policies.routing.marginal_cost import MarginalCostPolicy
from eldr_sim.policies.routing.marginal_ranks import GreedyOnRanks

_EMPTY = np.zeros(1)


@njit()
def prompt_s(cost: StepCost, new: int, cached: int, budget: int) -> float:
    """Return the seconds of the steps that compute ``new`` tokens of a prompt by itself."""
    first, count, seconds = np.zeros(1, np.int64), np.zeros(1, np.int64), 0.0
    while new > 0:
        first[0], count[0] = cached, min(new, budget)
        seconds += total_s(step_parts(cost, 0, 0, 0.0, first, count, 1, _EMPTY, True))
        cached += count[0]
        new -= count[0]
    return seconds


class PromptParameters(Parameters):
    """Parameters of `SecondsPrefillPolicy`."""

    tiers: bool = True
    """Whether it knows what KV tiers hold, and how long a load takes."""


class SecondsPrefillPolicy(RouterPolicy):
    """The prefill worker where the prompt is computed first: wait and own work, in seconds.

    The router predicts the wait: what it has sent there, one prompt after the other."""

    name = "seconds"
    decision = "prefill"
    needs = Needs(costs=True, matched=True, columns=LOADS)
    Parameters = PromptParameters

    def __init__(self, context: PolicyContext, parameters: PromptParameters) -> None:
        cost = context.require_step_times(self)
        self._prompts = PromptSeconds(cost, context, parameters.tiers)
        self._turn = 0

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return the healthy worker of the least seconds; equal ones in turn."""
        if not workers.healthy.any():
            return None
        wait, own = self._prompts.of(request, workers)
        cost = np.where(workers.healthy, wait + own, np.inf)
        tied = np.flatnonzero(cost <= cost.min() * (1.0 + 1e-12))
        worker = int(tied[np.searchsorted(tied, self._turn) % len(tied)])
        self._turn = worker + 1
        self._prompts.send(worker, workers.now_s, float(wait[worker] + own[worker]))
        return worker


class PromptSeconds:
    """Predicted seconds until workers have computed the prompts that were sent there."""

    def __init__(self, cost: StepCost, context: PolicyContext, tiers: bool = True) -> None:
        self._cost, self._budget, self._tiers = cost, context.token_budget, tiers
        self._longest = len(cost.prompt_alone_s) - 1
        self._free_s = np.zeros(context.n_workers)

    def of(self, request: RequestInfo, workers: Workers) -> tuple[Floats, Floats]:
        """Return the wait at each worker, and what the prompt takes there."""
        wait = np.where(workers.loads > 0, np.maximum(self._free_s - workers.now_s, 0.0), 0.0)
        tiers = self._tiers and len(workers.reachable) > 0
        hits: list[int] = (workers.reachable if tiers else workers.matched).tolist()
        prompt = min(request.prompt_len, self._longest)
        known = {hit: min(hit, prompt - 1) for hit in hits}
        seconds = {
            hit: prompt_s(self._cost, prompt - cached, cached, self._budget)
            for hit, cached in known.items()
        }
        own = np.array([seconds[hit] for hit in hits])
        return wait, own + workers.load_s if tiers else own

    def send(self, worker: int, now_s: float, seconds: float) -> None:
        """Note the seconds of prompts that a worker has to compute from now on."""
        self._free_s[worker] = now_s + seconds


class SecondsParameters(SignatureParameters):
    """Parameters of `SecondsPolicy`."""

    experts: bool = True
    """Whether steps are predicted with the request's own experts, not those of the mean one."""
    tokens: float | None = Field(default=None, gt=0)
    """Output tokens that a request is expected to want; the mean of those asked for, or 300."""
    horizon: float = Field(default=1.0, ge=1, allow_inf_nan=False)
    """Turns that a session is expected to have, on co-located workers."""


class SecondsPolicy(MarginalCostPolicy):
    """The worker where a request costs all requests the fewest seconds, its own among them.

    Its prompt, or its KV transfer, included."""

    name = "seconds"
    decision = "decode"
    needs = Needs(experts=True, costs=True, ends=True, matched=True, columns=LOADS | {"running"})
    Parameters = SecondsParameters

    def __init__(self, context: PolicyContext, parameters: SecondsParameters) -> None:
        super().__init__(context, parameters)
        assert not isinstance(self._greedy, GreedyOnRanks)  # `_check`
        self._place = self._greedy.place
        self._own, self._kv_s = parameters, context.kv_token_s
        self._prompts = None
        if context.computes_prompts:
            self._prompts = PromptSeconds(context.require_step_times(self), context)
            self.needs = self.needs._replace(session_signature=parameters.experts)
        self._sessions: set[int | str] = set()  # that have begun

    def _check(self, context: PolicyContext) -> None:
        """Raise InputError where the experts of a worker lie on several GPUs. Co-located workers
        are allowed: their prompts are part of the cost."""
        if context.placements is not None:
            problem = f"{self.name!r} does not model experts that lie on several GPUs"
            raise InputError("policy", problem, "marginal_cost")

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return the worker of the fewest seconds, and count the request there."""
        if not self._own.experts:
            request = request._replace(signature=None)
        tokens = self._own.tokens or request.max_tokens or 300.0
        if self._prompts is None:
            before = np.asarray((request.prompt_len - workers.matched) * self._kv_s, np.float64)
            return self._place(request, self.usage(request), workers, (tokens, before))
        session = request.session
        if self._own.horizon > 1.0 and session is not None and session not in self._sessions:
            self._sessions.add(session)
            tokens *= self._own.horizon
        wait, own = self._prompts.of(request, workers)
        before = np.asarray(wait + own * (1.0 + workers.running), np.float64)
        worker = self._place(request, self.usage(request), workers, (tokens, before))
        if worker is not None:
            seconds = float(wait[worker] + own[worker])
            self._prompts.send(worker, workers.now_s, seconds)
        return worker
