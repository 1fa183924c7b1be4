"""Routing as engines' benchmarks force it, for the same texts: what a benchmark then measures.

In place of a gate's choice in every layer (token ``t`` of a step's batch, expert ``j`` of ``k``, of
``E``), by a token's place in its step where a ``period`` is named:

uniform
    Any ``k`` distinct experts, each token and layer anew (vLLM's
    ``VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random``).
balanced
    ``(t k + j) mod E``, each engine's batch from expert 0 (Megatron Bridge, prime-rl,
    vLLM-Ascend's forced balance).
round_robin
    ``(t + layer + j floor(E / k)) mod E`` (SGLang's ``SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS``).
dummy-weights
    One set of experts a request and layer, at random: with random weights a token's embedding
    decides, and greedy answers repeat one token."""

import hashlib
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.routing.manifest import SYNTHETIC
from eldr_sim.traces.streams import stream

Forced = Literal["uniform", "balanced", "round_robin", "dummy-weights"]


def forced(trace: RoutingTrace, how: Forced) -> RoutingTrace:
    """Return the trace's requests with forced experts, always the same; no gate scores."""
    apart = trace.calibration_apart
    checksum = hashlib.sha256(f"{how} {trace.top_k} {trace.manifest.checksum}".encode())
    changes: dict[str, object] = {
        "checksum": checksum.hexdigest(),
        "top_k": trace.top_k,
        "rank_groups": None,
        "provenance": "synthetic",
        "notes": f"{SYNTHETIC}routing forced as benchmarks do, {how}, for the requests of a trace.",
    }
    made = replace(
        trace,
        manifest=trace.manifest.model_copy(update=changes),
        gate_scores=None,
        kept_top_k=None,
        calibration_apart=None if apart is None else lambda: forced(apart(), how),
        period=_period(how, trace.n_experts, trace.top_k),
    )
    made.__dict__["experts"] = _experts(made, how)
    return made


def _period(how: Forced, n_experts: int, top_k: int) -> int:
    """Tokens after which their places in a batch choose the same again; 0: they do not matter."""
    if how == "balanced":
        return n_experts // int(np.gcd(n_experts, top_k))
    if how == "round_robin":
        return n_experts if n_experts % top_k else n_experts // top_k
    return 0


def _experts(trace: RoutingTrace, how: Forced) -> NDArray[np.uint16]:
    n, layers = trace.manifest.n_tokens, trace.n_layers
    n_experts, top_k = trace.n_experts, trace.top_k
    if trace.period:
        at = np.arange(trace.period)[:, None, None]
        place = at * top_k if how == "balanced" else at + np.arange(layers)[:, None]
        step = 1 if how == "balanced" else n_experts // top_k
        table = (place + np.zeros((layers, 1), np.int64) + np.arange(top_k) * step) % n_experts
        return np.resize(table.astype(np.uint16), (n, layers, top_k))
    sets = n if how == "uniform" else trace.n_requests
    rng, drawn = stream(0, f"forced {how}"), np.empty((sets, layers, top_k), np.uint16)
    # Floyd's sample without replacement (CACM 30 (9), 1987): what is drawn twice becomes the last.
    for i, last in enumerate(range(n_experts - top_k, n_experts)):
        chosen = rng.integers(last + 1, size=(sets, layers), dtype=np.uint16)
        for before in range(i):
            chosen[chosen == drawn[..., before]] = last
        drawn[..., i] = chosen
    if how == "uniform":
        return drawn
    order = np.argsort(trace.first_row, kind="stable")
    return np.repeat(drawn, trace.recorded_rows(order)[1], axis=0)
