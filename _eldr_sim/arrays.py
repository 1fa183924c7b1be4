"""Arrays, by the type of their numbers."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Int32s = NDArray[np.int32]
Records = NDArray[np.void]
Words = NDArray[np.uint64]


def with_more(array: Array, n: int) -> Array:
    """Return an array with additional zero rows.

    Args:
        array: an array of any dtype, ``[rows, ...]``.
        n: number of rows to add.

    Returns:
        A copy, ``[rows + n, ...]``.
    """
    more = np.zeros((n, *array.shape[1:]), array.dtype)
    return np.concatenate([array, more])
