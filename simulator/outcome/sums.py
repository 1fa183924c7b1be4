"""Sums that do not depend on the machine, and parts of long logs without copies."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 16
_HALF = float(1 << 27)
#: The place of a mantissa's last bit: exponents are -1074 and more, mantissas have 53 bits.
_LAST = 1074 + 2 * 53


def exact_sum(
    values: NDArray[np.float64],
    counts: NDArray[np.int64] | None = None,
    around: float | None = None,
) -> float:
    """Return the correctly rounded sum of finite numbers, as ``math.fsum`` does.

    ``counts``: how often each counts; ``around``: their squared distances from it are added.

    Mantissas are whole numbers of 53 bits. Those of one exponent are added by halves, which float64
    does exactly, and all exponents then as Python's whole numbers.
    """
    total = 0
    for at in range(0, len(values), _CHUNK):
        part = values[at : at + _CHUNK]
        if around is not None:
            part = (part - around) ** 2
        if counts is not None:
            part = part * counts[at : at + _CHUNK]
        if len(values) <= _CHUNK:
            return math.fsum(part.tolist())
        total += _last_places(part)
    return total / (1 << _LAST)


def exact_sums(parts: Iterable[tuple[NDArray[np.float64], ...]]) -> list[float]:
    """Return `exact_sum` of several columns that come in parts, one at least."""
    found = [[_last_places(column) for column in part] for part in parts]
    totals = [sum(column) for column in zip(*found, strict=True)]
    return [total / (1 << _LAST) for total in totals]


def _last_places(part: NDArray[np.float64]) -> int:
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


def in_parts(log: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield a log's records in parts, one at least.

    What is computed of a part stays in the cache. Of millions of records it would be memory that is
    had from the system and given back, which takes longer than to compute it.
    """
    for at in range(0, max(1, len(log)), _CHUNK):
        yield log[at : at + _CHUNK]


def within(log: NDArray[Any], inside: NDArray[np.bool_]) -> NDArray[Any]:
    """Return ``log[inside]``: a view where these lie in a row, as a log in order of time has them.

    Its records are long, and a copy takes longer than what is read of it.
    """
    n, first = int(np.count_nonzero(inside)), int(np.argmax(inside)) if len(inside) else 0
    return log[first : first + n] if inside[first : first + n].all() else log[inside]
