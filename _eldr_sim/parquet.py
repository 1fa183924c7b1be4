"""Reading Parquet, and making its columns, without pandas. ``pyarrow.parquet.read_table``,
``to_numpy`` and ``pyarrow.array`` import pandas, half a second of every command."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.inputs import ARRAY_LIMIT, regular_file, within


@contextmanager
def text_errors() -> Iterator[None]:
    """Raise ``pyarrow.ArrowInvalid`` where a file's text, a column's name say, is not UTF-8."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid(str(error)) from None


def read_table(path: Path) -> pa.Table:
    """Read a file; raises OSError, ``pyarrow.ArrowException`` or InputError (no file, too
    large)."""
    with text_errors(), pq.ParquetFile(regular_file(path, str(path))) as file:
        groups = range(file.metadata.num_row_groups)
        unpacked = sum(file.metadata.row_group(i).total_byte_size for i in groups)
        within(str(path), unpacked, ARRAY_LIMIT, " bytes")
        return file.read()


def numbers(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return a column of numbers without nulls as an array; text raises InputError if damaged."""
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        try:
            return np.array(column.to_pylist())
        except UnicodeDecodeError:
            raise InputError("column", "holds text that is not UTF-8") from None
    nothing = np.empty(0, column.type.to_pandas_dtype())
    return np.concatenate([nothing, *(np.from_dlpack(chunk) for chunk in column.chunks)])


def column(values: NDArray[Any], kind: str | None = None, null: Any = None) -> pa.Array:
    """Return numbers or truth values as a column, as ``pa.array(values, kind, mask=null)`` does."""
    values = np.ascontiguousarray(values, kind)
    is_bool = values.dtype == np.bool_
    data = np.packbits(values, bitorder="little") if is_bool else values
    known = None if null is None else pa.py_buffer(np.packbits(~null, bitorder="little"))
    arrow = pa.bool_() if is_bool else pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(arrow, len(values), [known, pa.py_buffer(data)])


def texts(names: Sequence[str], codes: NDArray[np.integer]) -> pa.Array:
    """Return the texts that codes stand for as a column."""
    data = [name.encode() for name in names]
    lengths = np.array([len(text) for text in data], np.int32)
    ends = np.zeros(len(codes) + 1, np.int32)
    np.cumsum(lengths[codes], out=ends[1:])
    joined = b"".join([data[code] for code in codes.tolist()])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(joined)]
    return pa.Array.from_buffers(pa.string(), len(codes), buffers)
