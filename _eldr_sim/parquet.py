"""Reading Parquet without pandas.

``pyarrow.parquet.read_table`` and ``to_numpy`` import pandas, half a second of every command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

__all__ = ["numbers", "read_table"]


def read_table(path: Path) -> pa.Table:
    """Read a file; raises OSError or ``pyarrow.ArrowException``."""
    with pq.ParquetFile(path) as file:
        return file.read()


def numbers(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return a column of numbers without nulls as an array."""
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return np.array(column.to_pylist())
    nothing = np.empty(0, column.type.to_pandas_dtype())
    return np.concatenate([nothing, *(np.from_dlpack(chunk) for chunk in column.chunks)])
