"""Structure in a trace's routing: between layers, between domains, between requests.

Next layer
    Entropy, bits, ``H(e')`` of the expert in layer ``l + 1`` and ``H(e' | e)`` given that of layer
    ``l``, over generated tokens: ``top-1``, the expert ranked first (where it is known), or
    ``any``, one drawn from each layer's ``top_k``, which adds entropy of the draw.
Domains
    Jensen-Shannon divergence, bits, between generated tokens' choices in a layer; for comparison
    between even and odd requests of a domain, which differ by their number alone.
Requests
    Share of requests where the nearest other one, by cosine distance of their prompts' expert
    counts (their decodes' in a decode-only trace), is of the same domain."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from eldr_sim.arrays import Array, Floats, Ints
from eldr_sim.jit import njit
from eldr_sim.traces.routing.coactivation import Tokens, token_rows
from eldr_sim.traces.routing.format import RoutingTrace

_CHUNK_ROWS = 1 << 14


@dataclass(frozen=True)
class NextLayer:
    """Entropy of a layer's expert, bits; one entry for each layer but the first."""

    of: str  #: ``top-1`` or ``any``, see the module
    entropy: list[float]  #: unconditional
    conditional: list[float]  #: given the expert of the layer before


@dataclass(frozen=True)
class DomainDivergence:
    """Jensen-Shannon divergence between domains, bits, mean over layers."""

    between: dict[str, dict[str, float]]  #: by domain and domain
    #: Between the halves of a domain, by domain; those of one request are left out.
    split_half: dict[str, float]
    by_layer: list[float]  #: mean over pairs of domains, for each layer


def next_layer_entropy(trace: RoutingTrace) -> list[NextLayer]:
    """Measure how well a layer's experts predict the next layer's; empty for a single layer."""
    if trace.n_layers < 2:
        return []
    groups = trace.manifest.rank_groups
    ranked = trace.top_k == 1 or (groups is not None and groups[0] == 1)
    shape = (trace.n_layers - 1, trace.n_experts, trace.n_experts)
    joints = {
        name: np.zeros(shape, np.int64) for name in (("top-1", "any") if ranked else ("any",))
    }
    rows = token_rows(trace, np.arange(trace.n_requests), "decode")
    for start in range(0, len(rows), _CHUNK_ROWS):
        ids = np.array(trace.experts[rows[start : start + _CHUNK_ROWS]])
        for name, joint in joints.items():
            _count_pairs(ids, 1 if name == "top-1" else trace.top_k, joint)
    entropies = []
    for name, joint in joints.items():
        share = joint / joint.sum(axis=(1, 2), keepdims=True)
        both = _entropy(share.reshape(len(share), -1))
        entropies.append(
            NextLayer(
                of=name,
                entropy=_entropy(share.sum(axis=1)).tolist(),
                conditional=(both - _entropy(share.sum(axis=2))).tolist(),
            )
        )
    return entropies


def transitions(trace: RoutingTrace, requests: ArrayLike, tokens: Tokens = "all") -> Ints:
    """Count the tokens that chose expert i in a layer and j in the next, ``[n_layers - 1, E, E]``:
    the recorded layers alone. ``requests``, ``tokens``: as of `coactivation`."""
    found = np.zeros((max(0, trace.n_layers - 1), trace.n_experts, trace.n_experts), np.int64)
    rows = token_rows(trace, requests, tokens)
    for start in range(0, len(rows), _CHUNK_ROWS):
        ids = np.array(trace.experts[rows[start : start + _CHUNK_ROWS]])
        _count_pairs(ids, trace.top_k, found)
    return found


@njit()
def _count_pairs(ids: Any, take: int, joint: Any) -> None:
    """Count the pairs of neighbouring layers' experts among each token's first ``take``."""
    for t in range(ids.shape[0]):
        for layer in range(ids.shape[1] - 1):
            for a in range(take):
                for b in range(take):
                    joint[layer, ids[t, layer, a], ids[t, layer + 1, b]] += 1


def domain_divergence(counts: Floats, domain: Array, names: list[str]) -> DomainDivergence:
    """Measure how far apart the domains' expert distributions are. ``counts``: of each request's
    generated tokens, ``[n, layers, experts]``; ``domain``: index into ``names``."""
    members = {name: np.flatnonzero(domain == d) for d, name in enumerate(names)}
    members = {name: q for name, q in members.items() if len(q)}
    share = {name: _distribution(counts[q]) for name, q in members.items()}
    layers = counts.shape[1]
    between = {a: {b: _divergence(share[a], share[b]) for b in share} for a in share}
    pairs = [between[a][b] for a in share for b in share if a < b]
    return DomainDivergence(
        between={a: {b: float(js.mean()) for b, js in row.items()} for a, row in between.items()},
        split_half={
            name: float(
                _divergence(_distribution(counts[q[::2]]), _distribution(counts[q[1::2]])).mean()
            )
            for name, q in members.items()
            if len(q) > 1
        },
        by_layer=(np.mean(pairs, axis=0) if pairs else np.zeros(layers)).tolist(),
    )


def nearest_neighbour_accuracy(features: Floats, domain: Array) -> float | None:
    """Return the share of requests with the nearest other one in their domain; None for fewer than
    2. ``features``: ``[n, ...]``, not all zero for any request."""
    flat = features.reshape(len(features), -1).astype(np.float32)
    if len(flat) < 2:
        return None
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    hits = 0
    for start in range(0, len(flat), 1024):
        near = flat[start : start + 1024] @ flat.T
        own = np.arange(len(near))
        near[own, start + own] = -np.inf
        hits += int((domain[near.argmax(axis=1)] == domain[start : start + 1024]).sum())
    return hits / len(flat)


def _distribution(counts: Floats) -> Floats:
    total = counts.sum(axis=0)
    share: Floats = total / total.sum(axis=-1, keepdims=True)
    return share


def _divergence(p: Floats, q: Floats) -> Floats:
    """Jensen-Shannon divergence of each layer, bits."""
    js: Floats = _entropy((p + q) / 2) - (_entropy(p) + _entropy(q)) / 2
    return np.maximum(js, 0.0)


def _entropy(share: Floats) -> Floats:
    """Entropy over the last axis, bits."""
    bits: Floats = -(share * np.log2(np.where(share > 0, share, 1.0))).sum(axis=-1)
    return bits
