"""Expert signature: what a request's prefill says of the experts that its decode will use.

Construction (ELDR Sec. 4.2.2): count, reweight by inverse document frequency, keep the informative
layers, scale to unit length. Quality (Eq. 1): Spearman's rho between the cosine distances of
signatures and those of decode-time activation patterns, over pairs of calibration requests.

Unit vectors here are rounded to multiples of 2^-24. Products of two entries are then multiples of
2^-48, and a dot product of two unit vectors is exact in float64 in whatever order it is summed, so
that the fit and every routing decision are the same bits on any machine and any BLAS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RHO_PAIRS = 20_000
"""Pairs of calibration requests that rho is measured on; all of them where there are fewer."""

_GRID = float(1 << 24)
_WORK_GRID = float(1 << 22)  # squares of up to 2^19 entries still sum exactly in int64


def unit_rows(rows: NDArray[Any]) -> Floats:
    """Scale each row to Euclidean length 1, rounded to multiples of 2^-24.

    Parameters
    ----------
    rows
        Shape [n, d] with d < 2^19, finite and non-negative.

    Returns
    -------
    ndarray of float64, shape [n, d]
        Unit rows; a row of zeros stays zero.
    """
    peak = rows.max(axis=1, keepdims=True, initial=0.0)
    whole = np.rint(rows / np.where(peak > 0, peak, 1.0) * _WORK_GRID)
    integers = whole.astype(np.int64)
    squares = np.einsum("nd,nd->n", integers, integers).astype(np.float64)
    length = np.sqrt(np.where(squares > 0, squares, 1.0))[:, None]
    return np.asarray(np.rint(whole / length * _GRID) / _GRID)


def idf_weights(counts: NDArray[Any]) -> Floats:
    """Inverse document frequency of every expert over the calibration requests.

    ``w(l, e) = log((|C| + 1) / (df(l, e) + 1))`` where ``df`` counts the requests in which expert
    ``e`` fires at least once at layer ``l`` (ELDR Sec. 4.2.2, step 2). Rounded to 1e-9, for
    logarithms differ in the last bit between machines.

    Parameters
    ----------
    counts
        Shape [n, L, E]: prompt tokens of each request that chose the expert.

    Returns
    -------
    ndarray of float64, shape [L, E]
        Zero for an expert that fires in every request, ``log(n + 1)`` for one that never does.
    """
    df = np.count_nonzero(counts, axis=0)
    return np.asarray(np.round(np.log((counts.shape[0] + 1) / (df + 1)), 9))


def signatures(counts: NDArray[Any], idf: Floats, layers: Ints) -> Floats:
    """Turn prefill counts into signatures (ELDR Eq. 2).

    Parameters
    ----------
    counts
        Shape [n, L, E]: prefill counts.
    idf
        Shape [L, E]: weights of :func:`idf_weights`.
    layers
        The layers to keep, in the order in which they are stacked.

    Returns
    -------
    ndarray of float64, shape [n, len(layers) * E]
        Unit rows; zero where a request fires no expert of positive weight on ``layers``.
    """
    kept = counts[:, layers] * idf[layers]
    return unit_rows(kept.reshape(len(counts), -1))


def sample_pairs(n: int, n_pairs: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Draw distinct unordered pairs ``i > j`` of ``n`` items without replacement.

    Returns all ``n (n - 1) / 2`` pairs where there are at most ``n_pairs``.
    """
    total = n * (n - 1) // 2
    index = np.arange(total) if total <= n_pairs else rng.choice(total, n_pairs, replace=False)
    # Pair number is i (i - 1) / 2 + j. The root is right for all n below 2^25: roots of perfect
    # squares are exact, and the next square is too far away for rounding to reach it.
    i = ((1 + np.sqrt(1.0 + 8.0 * index)) // 2).astype(np.int64)
    return i, index - i * (i - 1) // 2


def centred_ranks(values: NDArray[Any]) -> Floats:
    """Twice the ranks of ``values`` about their mean; tied values share their average rank.

    Whole numbers, so that sums of their products are exact.
    """
    n = len(values)
    order = np.argsort(values)
    ordered = values[order]
    first = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    last = np.append(first[1:], n) - 1
    ranks = np.empty(n)
    # Ranks first + 1 .. last + 1 average to (first + last) / 2 + 1; the mean of all is (n + 1) / 2.
    ranks[order] = np.repeat(first + last + 1 - n, last - first + 1)
    return ranks


def spearman(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Spearman's rank correlation, ties by average rank; 0 where either side is constant."""
    return _correlation(centred_ranks(a), centred_ranks(b))


def _correlation(a: Floats, b: Floats) -> float:
    scale = float(a @ a) * float(b @ b)
    return float(a @ b) / float(np.sqrt(scale)) if scale > 0 else 0.0


@dataclass(frozen=True, eq=False)
class LayerSelection:
    """Outcome of the greedy layer selection.

    Attributes
    ----------
    order
        Shape [L]: all layers in the order in which they were appended.
    rho
        Shape [L]: ``rho[i]`` is the signature quality with the first ``i + 1`` layers of ``order``.
    n_pairs
        Pairs of calibration requests that rho was measured on.
    """

    order: Ints
    rho: Floats
    n_pairs: int

    @property
    def n_kept(self) -> int:
        """N*, the number of layers at which rho peaks; the smallest one on a tie."""
        return int(np.argmax(self.rho)) + 1

    @property
    def layers(self) -> Ints:
        """The layers that are kept, in ascending order."""
        return np.sort(self.order[: self.n_kept])


def select_layers(
    counts: NDArray[Any],
    decode_activation: NDArray[Any],
    idf: Floats,
    rng: np.random.Generator,
    n_pairs: int = RHO_PAIRS,
) -> LayerSelection:
    """Order the layers greedily by the signature quality they add (ELDR Sec. 4.2.2, step 3).

    Dot products and squared lengths of reweighted counts are sums over layers: they are taken once
    for each pair and layer, and each of the L (L + 1) / 2 candidate masks costs one ranking.

    Parameters
    ----------
    counts
        Shape [n, L, E]: prefill counts.
    decode_activation
        Shape [n, L, E]: share of a request's decode steps in which the expert was chosen
        (Sec. 4.2.1).
    idf
        Shape [L, E]: weights of :func:`idf_weights`.
    rng
        Draws the pairs.
    n_pairs
        At most this many pairs.

    Raises
    ------
    InputError
        With fewer than 3 requests: no ranking of pairs exists.
    """
    n, n_layers, n_experts = counts.shape
    if n < 3:
        raise InputError("calibration", f"{n} requests", "3 or more, to rank their pairs")
    i, j = sample_pairs(n, n_pairs, rng)

    patterns = unit_rows(decode_activation.reshape(n, -1).astype(np.float64))
    overlap = np.zeros(len(i))
    for cell in range(0, patterns.shape[1], n_experts):
        block = patterns[:, cell : cell + n_experts]
        overlap += np.einsum("pe,pe->p", block[i], block[j])
    target = centred_ranks(-overlap)

    weighted = unit_rows((counts * idf).reshape(n, -1)).reshape(n, n_layers, n_experts)
    squares = np.einsum("nle,nle->ln", weighted, weighted)
    dots = np.empty((n_layers, len(i)))
    for layer in range(n_layers):
        block = np.ascontiguousarray(weighted[:, layer])
        dots[layer] = np.einsum("pe,pe->p", block[i], block[j])

    dot, square = np.zeros(len(i)), np.zeros(n)
    order: list[int] = []
    curve: list[float] = []
    left = list(range(n_layers))
    while left:
        rho = [
            _correlation(centred_ranks(-_cosine(dot + dots[c], square + squares[c], i, j)), target)
            for c in left
        ]
        best = left.pop(int(np.argmax(rho)))
        order.append(best)
        curve.append(max(rho))
        dot += dots[best]
        square += squares[best]
    return LayerSelection(np.array(order, dtype=np.int64), np.array(curve), len(i))


def _cosine(dot: Floats, square: Floats, i: Ints, j: Ints) -> Floats:
    """Cosine of the pairs, rounded to 1e-9; 0 where either side is a row of zeros."""
    scale = square[i] * square[j]
    return np.asarray(np.round(dot / np.sqrt(np.where(scale > 0, scale, 1.0)), 9))
