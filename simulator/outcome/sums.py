"""Figures of long logs, read in parts: exact sums, which no machine changes, and percentiles."""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from eldr_sim.arrays import Array, Floats, Ints

_CHUNK = 1 << 16
_HALF = float(1 << 27)
#: The place of a mantissa's last bit: exponents are -1074 and more, mantissas have 53 bits.
_LAST = 1074 + 2 * 53
_DIGIT = 16  #: bits of a float64 by which values are told apart at once
_SIGN = np.uint64(1 << 63)  #: of a float64; with it turned, and all bits of the others, bits ascend


def exact_sum(values: Floats) -> float:
    """Return the correctly rounded sum of finite numbers, as ``math.fsum`` does."""
    return exact_sums((part,) for part in in_parts(values))[0]


def exact_sums(parts: Iterable[tuple[Floats, ...]]) -> list[float]:
    """Return `exact_sum` of several columns that come in parts, one at least: 53-bit mantissas of
    one exponent are added by halves, exact in float64, all exponents then as whole numbers."""
    found = [[_last_places(column) for column in part] for part in parts]
    totals = [sum(column) for column in zip(*found, strict=True)]
    return [total / (1 << _LAST) for total in totals]


def _last_places(part: Floats) -> int:
    """Return a sum in units of the last place that a float64 can have."""
    if not len(part):
        return 0
    total = 0
    mantissa, exponent = np.frexp(part)
    mantissa *= 2.0**53
    high = np.floor(mantissa / _HALF)
    places = exponent.astype(np.int64)
    first = int(places.min())
    places -= first
    halves = [np.bincount(places, half) for half in (high, mantissa - high * _HALF)]
    for place, (above, below) in enumerate(zip(*halves, strict=True), first + _LAST - 53):
        total += ((int(above) << 27) + int(below)) << place
    return total


def in_parts(log: Array) -> Iterator[Array]:
    """Yield a log's records in parts, one at least, that stay in the cache."""
    for at in range(0, max(1, len(log)), _CHUNK):
        yield log[at : at + _CHUNK]


def weighted_percentile(values: Floats, weights: Array, q: Sequence[float]) -> list[float]:
    """Return percentiles ``q``, [0, 100], of ``np.repeat(values, weights)`` (NumPy's linear
    method)."""
    ranks = [p / 100.0 * float(int(weights.sum()) - 1) for p in q]
    places = np.array([at(rank) for rank in ranks for at in (math.floor, math.ceil)])
    if len(values) > _CHUNK:
        percentiles = _at_places(values, weights, places)
    else:
        order = np.argsort(values)
        percentiles = values[order][np.searchsorted(np.cumsum(weights[order]) - 1, places)]
    return [
        float(low + (high - low) * (rank - math.floor(rank)))
        for rank, (low, high) in zip(ranks, percentiles.reshape(-1, 2), strict=True)
    ]


def _at_places(values: Floats, weights: Array, places: Ints) -> Floats:
    """Return the values at places in the order of all, digit by digit: a sort would copy them."""
    size, n = 1 << _DIGIT, len(places)
    known, below = np.zeros(n, np.uint64), np.zeros(n, np.int64)  # first digits; what is less
    for shift in range(64 - _DIGIT, -1, -_DIGIT):
        first, which = np.unique(known, return_inverse=True)
        counts = np.zeros(len(first) * size)
        for part, of in zip(in_parts(values), in_parts(weights), strict=True):
            bits = np.ascontiguousarray(part).view(np.uint64)
            bits = np.where(bits & _SIGN, ~bits, bits | _SIGN) >> np.uint64(shift)
            before = bits >> np.uint64(_DIGIT)
            at = np.searchsorted(first, before).clip(max=len(first) - 1)
            digits = (bits & np.uint64(size - 1)).astype(np.int64)
            counts += np.bincount(at * size + digits, of * (first[at] == before), len(counts))
        up_to = counts.astype(np.int64).reshape(-1, size).cumsum(axis=1)[which]
        digit = (up_to <= (places - below)[:, None]).sum(axis=1)
        below += np.where(digit > 0, up_to[np.arange(n), digit - 1], 0)
        known = (known << np.uint64(_DIGIT)) | digit.astype(np.uint64)
    return np.where(known & _SIGN, known ^ _SIGN, ~known).view(np.float64)
