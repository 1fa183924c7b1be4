"""Unit vectors on a grid, compiled: see `signature.unit_rows`."""

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.jit import njit


@njit(nogil=True)
def scale(rows: Floats, work_grid: float, grid: float, found: Floats) -> None:
    """Write ``rows``, [n, d], at unit length to ``found`` (`signature.unit_rows`); ``work_grid``,
    ``grid``: inverses of what they are rounded to before, relative to the largest entry, and
    after."""
    for i in range(rows.shape[0]):
        row, unit, peak = rows[i], found[i], 0.0
        for d in range(row.shape[0]):
            peak = max(peak, abs(row[d]))
        if peak == 0.0:
            peak = 1.0
        squares = np.int64(0)
        for d in range(row.shape[0]):
            unit[d] = np.rint(row[d] / peak * work_grid)
            squares += np.int64(unit[d]) * np.int64(unit[d])
        length = np.sqrt(np.float64(squares)) if squares > 0 else 1.0
        for d in range(row.shape[0]):
            unit[d] = np.rint(unit[d] / length * grid) / grid
