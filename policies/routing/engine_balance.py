"""Routers that balance the engines of a group by what these publish, as old as
``signal_interval_ms`` says: Gimbal's and vLLM's; of prefill workers, decode workers or co-located
engines alike."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from eldr_sim.arrays import Floats, Ints
from eldr_sim.policies.base import Needs, PolicyContext, RequestInfo, RouterPolicy, Workers
from eldr_sim.policies.choice import Parameters
from eldr_sim.policies.rule import Rule


class GimbalParameters(Parameters):
    """Parameters of `GimbalPolicy`; the defaults are the paper's where it gives them."""

    reading: Literal["printed", "prose", "queues"] = "printed"
    """``printed``: the load counts only where KV usage is above its threshold, as Algorithm 1 has
    it; ``prose``: whenever KV usage is balanced, as the text says; ``queues``: the same, of waiting
    tokens alone, the text's "prefill workload in their queues"."""
    kv: float = Field(default=0.9, ge=0, le=1)
    """KV usage from which on an engine is saturated."""
    kv_difference: float = Field(default=0.1, ge=0, le=1)
    """Difference of KV usage between engines that is an imbalance."""
    load_difference: float = Field(default=3000.0, ge=0)
    """Running and waiting tokens (``queues``: waiting) by which engines differ before that is an
    imbalance."""
    user_expiry: float = Field(default=600.0, ge=0)
    """How long after a user's last request the next one goes to the same engine, s (the paper has
    an expiry and no figure)."""


class GimbalPolicy(RouterPolicy):
    """Gimbal's Algorithm 1: least KV, least load, the user's engine, or the next in turn.

    Sun et al., Sec. III-B. A session stands for a user. Ties go to the first engine."""

    name = "gimbal"
    decision = "decode"
    also = "prefill"
    needs = Needs(columns=frozenset({"kv_usage", "running_tokens", "waiting_tokens"}))
    Parameters = GimbalParameters

    def __init__(self, context: PolicyContext, parameters: GimbalParameters) -> None:
        self.parameters = parameters
        self._in_turn = Rule(range(context.n_workers), {})
        self._user_engine: dict[int | str, tuple[int, float]] = {}

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return the engine for a request, and remember it for its user."""
        engine = self._in_turn.pick(workers)
        if engine is None:
            return None
        usable = np.flatnonzero(workers.healthy)
        kv = workers.kv_usage[usable]
        balanced = self._balance(usable, kv, workers)
        if balanced is not None:
            engine = balanced
        elif kv.max() < self.parameters.kv:
            engine = self._engine_of(request.session, workers, engine)
        if request.session is not None:
            self._user_engine[request.session] = engine, workers.now_s
        return engine

    def _balance(self, usable: Ints, kv: Floats, workers: Workers) -> int | None:
        """Return the engine of least KV usage or load; None where both are balanced."""
        parameters = self.parameters
        saturated = kv.max() >= parameters.kv
        if saturated and kv.max() - kv.min() >= parameters.kv_difference:
            return int(usable[np.argmin(kv)])
        if saturated or parameters.reading != "printed":
            load = workers.waiting_tokens[usable]
            if parameters.reading != "queues":
                load = load + workers.running_tokens[usable]
            if load.max() - load.min() > parameters.load_difference:
                return int(usable[np.argmin(load)])
        return None

    def _engine_of(self, user: int | str | None, workers: Workers, otherwise: int) -> int:
        """Return the engine that a user's last request went to, if that was not long ago."""
        if user is None or user not in self._user_engine:
            return otherwise
        engine, when = self._user_engine[user]
        expired = workers.now_s - when > self.parameters.user_expiry
        return otherwise if expired or not workers.healthy[engine] else engine


class VllmDpPolicy(RouterPolicy):
    """vLLM's internal balancer of data-parallel engines: the least ``4 x waiting + running``.

    ``DPLBAsyncMPClient.get_core_engine_for_request`` (``vllm/v1/engine/core_client.py``, v0.10.2),
    one API server: between reports, every 100 ms, its own requests count as waiting. Ties go to the
    first."""

    name = "vllm_dp"
    decision = "decode"
    also = "prefill"
    needs = Needs(columns=frozenset({"waiting", "running"}))

    rule_by = "nothing"

    def __init__(self, context: PolicyContext) -> None:
        weights = {"waiting": 4.0, "sent": 4.0, "running": 1.0}
        self._everyone = Rule(range(context.n_workers), weights, in_turn=False)

    def rules(self, requests: Sequence[RequestInfo]) -> Sequence[Rule]:
        """Return all engines, weighed."""
        return [self._everyone] * len(requests)


class VllmDpFirstPolicy(RouterPolicy):
    """vLLM's first balancer of data-parallel engines: least waiting, of these least running.

    ``DPAsyncMPClient.get_core_engine_for_request`` (``vllm/v1/engine/core_client.py``, v0.9.1):
    what a request adds until the next report counts as waiting where any wait, else as running.
    Ties go to the first engine."""

    name = "vllm_dp_first"
    decision = "decode"
    also = "prefill"
    needs = Needs(columns=frozenset({"waiting", "running"}))

    def __init__(self, context: PolicyContext) -> None:
        self._counts: list[list[int]] = []
        self._reported_s = -np.inf

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return the engine of the smallest (waiting, running)."""
        if workers.signals_s != self._reported_s or not self._counts:
            own = zip(workers.waiting.tolist(), workers.running.tolist(), strict=True)
            self._counts = [list(counts) for counts in own]
            self._reported_s = workers.signals_s
        usable = np.flatnonzero(workers.healthy).tolist()
        if not usable:
            return None
        engine: int = min(usable, key=lambda worker: (*self._counts[worker], worker))
        counts = self._counts[engine]
        counts[0 if counts[0] else 1] += 1
        return engine


class VllmDpKvPolicy(RouterPolicy):
    """vLLM's internal balancer since July 2026: KV usage makes waiting requests weigh more.

    As `VllmDpPolicy`, with the score of pull request 49204 of vLLM: the larger of the router's own
    requests in flight and the engine's waiting and running ones, and for each waiting one up to 3
    more, from none at a KV usage of 0.5. Ties go to the engines in turn."""

    name = "vllm_dp_kv"
    decision = "decode"
    also = "prefill"
    needs = Needs(columns=frozenset({"loads", "waiting", "running", "kv_usage"}))

    def __init__(self, context: PolicyContext) -> None:
        self._waiting = np.zeros(context.n_workers, np.int64)
        self._running = np.zeros(context.n_workers, np.int64)
        self._reported_s = -np.inf
        self._first = 0

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return the engine of the lowest score."""
        if workers.signals_s != self._reported_s:
            self._waiting[:], self._running[:] = workers.waiting, workers.running
            self._reported_s = workers.signals_s
        known = np.maximum(workers.loads, self._waiting + self._running)
        pressure = np.maximum(0.0, workers.kv_usage - 0.5)
        score = np.where(workers.healthy, known + 6.0 * self._waiting * pressure, np.inf)
        order = np.roll(np.arange(len(score)), -self._first)
        self._first = (self._first + 1) % len(score)
        engine = int(order[np.argmin(score[order])])
        if not workers.healthy[engine]:
            return None
        self._waiting[engine] += 1
        return engine
