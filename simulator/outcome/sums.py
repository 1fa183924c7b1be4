"""Sums that do not depend on the machine, and parts of long logs without copies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SHORT, _CHUNK = 1 << 12, 1 << 20
_HALF = float(1 << 27)


def exact_sum(values: NDArray[np.float64]) -> float:
    """Return the correctly rounded sum of finite numbers, as ``math.fsum`` does.

    Mantissas are whole numbers of 53 bits. Those of one exponent are added by halves, which float64
    does exactly for up to 2^26 of them, and all exponents then as Python's whole numbers.
    """
    if len(values) < _SHORT:
        return math.fsum(values.tolist())
    total = 0
    for at in range(0, len(values), _CHUNK):
        mantissa, exponent = np.frexp(values[at : at + _CHUNK])
        mantissa *= 2.0**53
        high = np.floor(mantissa / _HALF)
        least = -1074  # of all float64: exponents become places from here
        places = exponent.astype(np.int64) - (least - 53)
        first = int(places.min())
        halves = [np.bincount(places - first, part) for part in (high, mantissa - high * _HALF)]
        for place, (above, below) in enumerate(zip(*halves, strict=True)):
            total += ((int(above) << 27) + int(below)) << (place + first)
    return total / (1 << (1074 + 2 * 53))


def within(log: NDArray[Any], inside: NDArray[np.bool_]) -> NDArray[Any]:
    """Return ``log[inside]``: a view where these lie in a row, as a log in order of time has them.

    Its records are long, and a copy takes longer than what is read of it.
    """
    n, first = int(np.count_nonzero(inside)), int(np.argmax(inside)) if len(inside) else 0
    return log[first : first + n] if inside[first : first + n].all() else log[inside]
