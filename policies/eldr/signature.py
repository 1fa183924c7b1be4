"""Expert signature: what a request's prefill says of the experts that its decode will use.

Construction (ELDR Sec. 4.2.2): count, reweight by inverse document frequency, keep the informative
layers, scale to unit length; other transforms (Sec. 4.2.3, Fig. 7) and layers may be chosen.
Quality (Eq. 1): Spearman's rho between the cosine distances of signatures and of decode-time
activation patterns, over pairs of calibration requests. Unit vectors are rounded to multiples of
2^-24: dot products are exact in float64 in any order, so fits and decisions are the same bits on
any machine and any BLAS."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast, get_args

import numpy as np

from eldr_sim.arrays import Array, Bools, Floats, Ints
from eldr_sim.errors import InputError
from eldr_sim.traces.routing.gate_scores import PromptScore

#: What a signature holds of an expert at a layer (ELDR Fig. 7). Of the prompt tokens that chose it:
#: their number times its IDF (ELDR's own choice), their number, its square root, or whether there
#: is any; of all prompt tokens: the sum of the gate's softmax probabilities, or of its raw scores.
Transform = Literal["count-idf", "count", "sqrt", "binary", "gate-prob", "gate-logit"]

TRANSFORMS: tuple[Transform, ...] = get_args(Transform)  #: all transforms, ELDR's own first

Method = Literal["balanced", "vanilla"]  #: how calibration requests are clustered

METHODS: tuple[Method, ...] = get_args(Method)  #: all methods, ELDR's own first

#: The layers of a signature: ELDR's greedy selection, all, or these numbers in ascending order.
LayerMask = Literal["greedy", "all"] | tuple[int, ...]


class FitOptions(NamedTuple):
    """How ELDR's router is fitted; the defaults are its authors' (casys-kaist/ELDR)."""

    transform: Transform = "count-idf"  #: what a signature holds of each expert
    layer_mask: LayerMask = "greedy"  #: which layers it keeps
    clustering: Method = "balanced"  #: how calibration signatures are clustered
    seedings: int = 1  #: starts of the clustering, of which the best is kept
    rounds: int = 50  #: most rounds of the clustering from one start
    #: Pairs of calibration requests that rho is measured on, see `sample_pairs`.
    mask_pairs: int = 30_000


_GRID = float(1 << 24)
_WORK_GRID = float(1 << 22)  # squares of up to 2^19 entries still sum exactly in int64


def unit_rows(rows: Array) -> Floats:
    """Scale each row to Euclidean length 1, rounded to multiples of 2^-24; zeros stay zero.

    ``rows``: shape [n, d] with d < 2^19, finite."""
    from eldr_sim.policies.eldr.unit import scale  # compiled: takes long to import

    found = np.empty(rows.shape)
    scale(np.ascontiguousarray(rows, np.float64), _WORK_GRID, _GRID, found)
    return found


def idf_weights(counts: Array) -> Floats:
    """Return the inverse document frequency of experts.

    Source: ELDR Sec. 4.2.2, step 2: ``log((|C| + 1) / (df(l, e) + 1))``, with ``df`` the number of
    requests that activate an expert.

    Args:
        counts: ``[requests, layers, experts]``.

    Returns:
        ``[layers, experts]``, rounded to 1e-9 because logarithms differ in the last bit between
        machines.
    """
    df = np.count_nonzero(counts, axis=0)
    return np.asarray(np.round(np.log((counts.shape[0] + 1) / (df + 1)), 9))


def score_of(transform: Transform) -> PromptScore:
    """Return a transform's prompt score: ``count``, ``prob`` or ``logit``; raises InputError."""
    if transform not in TRANSFORMS:
        raise InputError("signature", f"unknown transform {transform!r}", ", ".join(TRANSFORMS))
    return cast("PromptScore", transform[5:] if transform.startswith("gate-") else "count")


def transformed(scores: Array, transform: Transform, idf: Floats) -> Floats:
    """Return expert signatures from prompt scores.

    Args:
        scores: ``[requests, layers, experts]``, see :func:`score_of`.
        transform: the transform to apply.
        idf: ``[layers, experts]``, see `idf_weights`.

    Returns:
        ``[requests, layers, experts]``.
    """
    if transform == "count-idf":
        return np.asarray(scores * idf)
    if transform == "sqrt":
        return np.asarray(np.sqrt(scores, dtype=np.float64))
    if transform == "binary":
        return np.asarray(scores > 0, dtype=np.float64)
    return np.asarray(scores, dtype=np.float64)


def signatures(
    scores: Array, idf: Floats, layers: Ints, transform: Transform = "count-idf"
) -> Floats:
    """Turn prompt scores, [n, L, E], into signatures (ELDR Eq. 2), [n, len(layers) * E]: unit rows,
    zero where a request fires no expert of positive weight."""
    kept = transformed(scores[:, layers], transform, idf[layers])
    return unit_rows(kept.reshape(len(scores), -1))


def parse_layer_mask(value: object) -> LayerMask:
    """Read a layer mask: ``greedy``, ``all``, or layers (``0,3,5``); raises InputError."""
    if value in ("greedy", "all"):
        return cast("LayerMask", value)
    items = value.split(",") if isinstance(value, str) else value
    items = [items] if isinstance(items, int) else items
    allowed = "greedy, all, or layer numbers such as 0,3,5, each once"
    if not isinstance(items, list | tuple) or not items:
        raise InputError("layer_mask", f"{value!r}", allowed)
    texts = [str(item).strip() for item in items]
    if not all(text.isascii() and text.isdigit() for text in texts):
        raise InputError("layer_mask", f"{value!r}", allowed)
    layers = tuple(sorted(map(int, texts)))
    if len(set(layers)) < len(layers):
        raise InputError("layer_mask", f"{value!r} names a layer twice", allowed)
    return layers


def sample_pairs(n: int, n_pairs: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Draw pairs ``i > j`` of ``n`` items with replacement; all, where there are fewer."""
    if n * (n - 1) // 2 <= n_pairs:
        i, j = np.tril_indices(n, -1)
        return i.astype(np.int64), j.astype(np.int64)
    drawn = rng.integers(n, size=(n_pairs, 2))
    drawn = drawn[drawn[:, 0] != drawn[:, 1]]
    return drawn.max(axis=1), drawn.min(axis=1)


def centred_ranks(values: Array) -> Floats:
    """Twice the ranks of ``values`` about their mean; tied values share their average rank."""
    order = np.argsort(values)
    ordered = values[order]
    ranks = np.empty(len(values))
    ranks[order] = _shared_ranks(ordered[1:] != ordered[:-1])
    return ranks


def _sorted_ranks(values: Ints) -> tuple[Ints, Floats]:
    """Return the order that sorts whole numbers below 2^31, and their `centred_ranks` in it."""
    n, bits = len(values), len(values).bit_length()
    ordered = np.sort((values << bits) | np.arange(n))
    values = ordered >> bits
    return ordered & ((1 << bits) - 1), _shared_ranks(values[1:] != values[:-1])


def _shared_ranks(rises: Bools) -> Floats:
    """Return the centred ranks of sorted values, from where they rise from one to the next."""
    n = len(rises) + 1
    first = np.flatnonzero(np.concatenate(([True], rises)))
    last = np.append(first[1:], n) - 1
    # Ranks first + 1 .. last + 1 average to (first + last) / 2 + 1; the mean of all is (n + 1) / 2.
    return np.repeat(first + last + 1 - n, last - first + 1).astype(np.float64)


def _summed(a: Floats, b: Floats) -> float:
    # Not BLAS: sums of whole numbers are exact in any order, and its threads wait for each other.
    return float(np.einsum("p,p->", a, b))


def _scaled(ab: float, aa: float, bb: float) -> float:
    """Return a correlation from sums of products; 0 where either side is constant."""
    return ab / float(np.sqrt(aa * bb)) if aa * bb > 0 else 0.0


@dataclass(frozen=True, eq=False)
class DecodeOverlap:
    """What signatures must predict: pairs of calibration requests, ranked by decode overlap."""

    #: ``i``, ``j``: shape [n_pairs]: the requests of each pair.
    i: Ints
    j: Ints
    #: Shape [n_pairs]: :func:`centred_ranks` of the cosine distances of their decode patterns.
    ranks: Floats


def decode_overlap(
    decode_activation: Array, rng: np.random.Generator, n_pairs: int = FitOptions().mask_pairs
) -> DecodeOverlap:
    """Rank pairs of requests by the distance of their decode patterns, [n, L, E] (ELDR Sec. 4.2.1).
    Raises InputError with fewer than 3 requests."""
    n, n_layers, _ = decode_activation.shape
    if n < 3:
        raise InputError("calibration", f"{n} requests", "3 or more, to rank their pairs")
    i, j = sample_pairs(n, n_pairs, rng)
    patterns = unit_rows(decode_activation.reshape(n, -1).astype(np.float64))
    overlap = np.zeros(len(i))
    for layer in np.split(patterns, n_layers, axis=1):
        overlap += _products(layer, i, j)
    return DecodeOverlap(i, j, centred_ranks(-overlap))


def _products(rows: Floats, i: Ints, j: Ints) -> Floats:
    """Dot products of pairs of rows, parts of unit vectors: exact, so in whatever way is faster."""
    rows = np.ascontiguousarray(rows)
    if len(rows) ** 2 <= 64 * len(i):
        return np.asarray((rows @ rows.T)[i, j])
    return np.asarray(np.einsum("pe,pe->p", rows[i], rows[j]))


@dataclass(frozen=True, eq=False)
class LayerSelection:
    """The layers of a signature and the quality that they add one by one."""

    #: Shape [L]: all layers. The greedy selection has them in the order in which they were
    #: appended; for a given mask they ascend, those of the mask first.
    order: Ints
    #: Shape [L]: ``rho[i]`` is the signature quality with the first ``i + 1`` layers of ``order``.
    rho: Floats
    #: Layers kept. The greedy selection keeps N*, the number at which rho peaks; the smallest one
    #: on a tie.
    n_kept: int
    n_pairs: int  #: pairs of calibration requests that rho was measured on

    @property
    def layers(self) -> Ints:
        """The layers that are kept, in ascending order."""
        return np.sort(self.order[: self.n_kept])


def select_layers(
    features: Floats, overlap: DecodeOverlap, mask: LayerMask = "greedy"
) -> LayerSelection:
    """Choose the layers of a signature and measure its quality rho (ELDR Eq. 1): greedily the layer
    that most increases rho (Sec. 4.2.2, step 3), one ranking for each of the L (L + 1) / 2 masks.

    ``features``: [n, L, E], of :func:`transformed`. Raises InputError if the mask names a layer
    that is not there."""
    n, n_layers, n_experts = features.shape
    i, j = overlap.i, overlap.j
    unit = unit_rows(features.reshape(n, -1)).reshape(n, n_layers, n_experts)
    squares = np.einsum("nle,nle->ln", unit, unit)
    dots = np.empty((n_layers, len(i)))
    for layer in range(n_layers):
        dots[layer] = _products(unit[:, layer], i, j)

    dot, square = np.zeros(len(i)), np.zeros(n)
    spread = _summed(overlap.ranks, overlap.ranks)

    def rho_with(layer: int) -> float:
        cosine = _cosine(dot + dots[layer], square + squares[layer], i, j)
        order, ranks = _sorted_ranks(-cosine)
        return _scaled(_summed(ranks, overlap.ranks[order]), _summed(ranks, ranks), spread)

    given = None if mask == "greedy" else _order(mask, n_layers)
    left = list(range(n_layers))
    order: list[int] = []
    curve: list[float] = []
    with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as threads:
        while left:
            candidates = left if given is None else [given[len(order)]]
            rho = list(threads.map(rho_with, candidates))
            best = candidates[int(np.argmax(rho))]
            left.remove(best)
            order.append(best)
            curve.append(max(rho))
            dot += dots[best]
            square += squares[best]
    if mask == "greedy":
        n_kept = int(np.argmax(curve)) + 1
    else:
        n_kept = n_layers if mask == "all" else len(mask)
    return LayerSelection(np.array(order, dtype=np.int64), np.array(curve), n_kept, len(i))


def _order(mask: Literal["all"] | tuple[int, ...], n_layers: int) -> list[int]:
    """All layers in ascending order, those of the mask first."""
    kept = set(range(n_layers) if mask == "all" else mask)
    beyond = sorted(kept - set(range(n_layers)))
    if beyond or not kept:
        problem = f"no layer {beyond[0]}" if beyond else "no layer is named"
        raise InputError("layer_mask", problem, f"greedy, all, or numbers from 0 to {n_layers - 1}")
    return sorted(range(n_layers), key=lambda layer: (layer not in kept, layer))


def _cosine(dot: Floats, square: Floats, i: Ints, j: Ints) -> Ints:
    """Cosine of the pairs in whole numbers of 1e-9; 0 where either side is a row of zeros."""
    scale = square[i] * square[j]
    return np.rint(dot / np.sqrt(np.where(scale > 0, scale, 1.0)) * 1e9).astype(np.int64)
