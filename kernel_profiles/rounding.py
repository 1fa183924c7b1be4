"""Functions with the same values on any machine."""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

_BITS = 36


def each(function: Callable[[float], float], values: ArrayLike) -> NDArray[np.float64]:
    """Apply a function of the C library, as `math.exp`, to values of any shape, and round: NumPy's
    own differ in the last bits between processors, a result must not."""
    array = np.asarray(values, dtype=np.float64)
    found = np.fromiter(map(function, array.ravel().tolist()), np.float64, array.size)
    return rounded(found).reshape(array.shape)


def rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round values of any shape to 36 of their 53 bits, a part in 10^11."""
    mantissa, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.rint(mantissa * 2**_BITS) / 2**_BITS, exponent))
