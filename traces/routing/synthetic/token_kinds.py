"""Kinds of tokens: clusters of tokens that choose alike in all layers."""

import numpy as np

from eldr_sim.arrays import Array, Floats, Ints
from eldr_sim.jit import njit

_COMPONENTS = 48  #: principal components of the tokens' choices in which distances are measured
_SUBSET = 16_384  #: tokens from which clusters are made; the others join the nearest
_TURNS = 12


def token_kinds(experts: Array, n_experts: int, n_kinds: int, seed: int) -> Array:
    """Cluster tokens, ``[tokens, layers, top_k]``, by their choices in all layers; return the kind
    of each.

    K-means (at most ``n_kinds``) on first principal components of the indicators ``[layers,
    experts]``, by subspace iteration (Halko, Martinsson and Tropp 2011, SIAM Review 53:217)."""
    rng = np.random.default_rng(seed)
    tokens, layers, _ = experts.shape
    some = np.arange(tokens)
    if tokens > _SUBSET:
        some = np.sort(rng.choice(tokens, _SUBSET, replace=False))
    ids = np.ascontiguousarray(experts[some], dtype=np.uint16)
    mean = count_groups(ids, np.zeros(len(ids), np.int64), 1, n_experts)[0] / len(ids)
    basis = rng.standard_normal((layers, n_experts, min(_COMPONENTS, len(ids))))
    for _ in range(3):
        scores, _ = np.linalg.qr(_projected(ids, basis, mean))
        basis = _back(ids, scores, n_experts) - mean[:, :, None] * scores.sum(axis=0)
    flat, _ = np.linalg.qr(basis.reshape(layers * n_experts, -1))
    basis = flat.reshape(layers, n_experts, -1)
    every = _projected(np.ascontiguousarray(experts, dtype=np.uint16), basis, mean)
    scores = every[some]
    centre = scores[rng.choice(len(scores), min(n_kinds, len(scores)), replace=False)]
    for _ in range(_TURNS):
        nearest = _nearest(scores, centre)
        for kind in range(len(centre)):
            mine = nearest == kind
            centre[kind] = (
                scores[mine].mean(axis=0) if mine.any() else scores[rng.integers(len(scores))]
            )
    found: Array = np.unique(_nearest(every, centre), return_inverse=True)[1]
    return found


def _nearest(points: Floats, centre: Floats) -> Ints:
    return np.asarray(((centre**2).sum(axis=1) - 2 * points @ centre.T).argmin(axis=1))


def _projected(ids: Array, basis: Floats, mean: Floats) -> Floats:
    """Return ``(H - mean) basis`` of the indicators H, ``[tokens, components]``."""
    out = np.zeros((len(ids), basis.shape[2]))
    _gather(ids, basis, out)
    return np.asarray(out - np.einsum("le,lep->p", mean, basis))


def _back(ids: Array, scores: Floats, n_experts: int) -> Floats:
    """Return ``H^T scores``, ``[layers, experts, components]``."""
    out = np.zeros((ids.shape[1], n_experts, scores.shape[1]))
    _scatter(ids, np.ascontiguousarray(scores), out)
    return out


def count_groups(ids: Array, group: Ints, n_groups: int, n_experts: int) -> Floats:
    """Count how often the tokens of each group chose each expert, ``[groups, layers, experts]``."""
    out = np.zeros((n_groups, ids.shape[1], n_experts))
    _count(ids, group, out)
    return out


@njit()
def _gather(ids: Array, basis: Floats, out: Floats) -> None:
    for t in range(len(ids)):
        for layer in range(ids.shape[1]):
            for slot in range(ids.shape[2]):
                out[t] += basis[layer, ids[t, layer, slot]]


@njit()
def _scatter(ids: Array, scores: Floats, out: Floats) -> None:
    for t in range(len(ids)):
        for layer in range(ids.shape[1]):
            for slot in range(ids.shape[2]):
                out[layer, ids[t, layer, slot]] += scores[t]


@njit()
def _count(ids: Array, group: Ints, out: Floats) -> None:
    for t in range(len(ids)):
        for layer in range(ids.shape[1]):
            for slot in range(ids.shape[2]):
                out[group[t], layer, ids[t, layer, slot]] += 1
