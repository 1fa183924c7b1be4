"""Reading Parquet, and making its columns, without pandas. ``pyarrow.parquet.read_table``,
``to_numpy``, ``fill_null`` and ``pyarrow.array`` import pandas, half a second of every command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.inputs import array_limit, regular_file, within
from eldr_sim.lazy import Lazy

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:
    pa, pq = Lazy("pyarrow"), Lazy("pyarrow.parquet")


@contextmanager
def text_errors() -> Iterator[None]:
    """Raise ``pyarrow.ArrowInvalid`` where a file's text, a column's name say, is not UTF-8."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid(str(error)) from None


def read_table(path: Path) -> pa.Table:
    """Read a Parquet file.

    Args:
        path: the file.

    Returns:
        The table, all columns.

    Raises:
        InputError: the file does not exist or is too large.
        OSError: the file cannot be read; also ``pyarrow.ArrowException``.
    """
    with text_errors(), pq.ParquetFile(regular_file(path, str(path))) as file:
        limit, about = array_limit(), file.metadata
        fixed, longest = _sizes(about)
        within(str(path), fixed, limit, " bytes")
        if about.num_rows * longest <= limit:
            return _plain(file.read(), path, limit)
        # A text that is kept once may stand in every row: unpacked in parts, which are measured.
        parts: list[pa.RecordBatch] = []
        size, rows = 0, int(limit / 4 / longest)
        for batch in file.iter_batches(max(1, min(rows, 1 << 16))):
            size += batch.nbytes
            within(str(path), size, limit, " bytes")
            parts.append(batch)
        return _plain(pa.Table.from_batches(parts, file.schema_arrow), path, limit)


def _plain(table: pa.Table, path: Path, limit: int) -> pa.Table:
    """Return a table whose texts stand in every row, where Arrow has kept each of them once."""
    for i, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            size = sum(map(_unpacked, table.column(i).chunks))
            within(str(path), size, limit, " bytes")
            table = table.set_column(i, field.name, table.column(i).cast(field.type.value_type))
    return table


def _unpacked(chunk: pa.DictionaryArray) -> int:
    """Return the bytes of the texts of a column's part, each in its row; 0 of numbers."""
    import pyarrow.compute as pc

    if pa.types.is_primitive(chunk.type.value_type):
        return 0
    return int(pc.sum(pc.binary_length(chunk.dictionary).take(chunk.indices)).as_py() or 0)


_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}


def _sizes(about: pq.FileMetaData) -> tuple[int, int]:
    """Return the bytes of a file's numbers, and of the longest text or list that a row may hold:
    runs of one value and values of a dictionary are kept once."""
    fixed = longest = 0
    for group in map(about.row_group, range(about.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            width = _WIDTHS.get(chunk.physical_type)
            fixed += max(chunk.total_uncompressed_size, (width or 0) * chunk.num_values)
            longest += chunk.total_uncompressed_size if width is None else 0
    return fixed, longest


def numbers(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return a column of numbers without nulls as an array.

    Args:
        column: the Arrow column.

    Returns:
        ``[rows]``.

    Raises:
        InputError: the column holds damaged text.
    """
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        try:
            return np.array(column.to_pylist())
        except UnicodeDecodeError:
            raise InputError("column", "holds text that is not UTF-8") from None
    nothing = np.empty(0, column.type.to_pandas_dtype())
    return np.concatenate([nothing, *(np.from_dlpack(chunk) for chunk in column.chunks)])


def column(values: NDArray[Any], kind: str | None = None, null: Any = None) -> pa.Array:
    """Return an Arrow column of numbers or truth values.

    Args:
        values: ``[rows]``.
        kind: Arrow type; None: that of ``values``.
        null: bool ``[rows]``, true where the value is null; None: nowhere.

    Returns:
        The same as ``pa.array(values, kind, mask=null)``.
    """
    values = np.ascontiguousarray(values, kind)
    is_bool = values.dtype == np.bool_
    data = np.packbits(values, bitorder="little") if is_bool else values
    known = None if null is None else pa.py_buffer(np.packbits(~null, bitorder="little"))
    arrow = pa.bool_() if is_bool else pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(arrow, len(values), [known, pa.py_buffer(data)])


def filled(values: pa.ChunkedArray, value: float) -> pa.ChunkedArray:
    """Return an Arrow column of numbers with ``value`` where it is null.

    Args:
        values: the column.
        value: what fills it, which ``fill_null`` takes to pandas to make an Arrow value of it.

    Returns:
        The column, without nulls.
    """
    return values.fill_null(column(np.array([value]), str(values.type))[0])


def texts(names: Sequence[str], codes: NDArray[np.integer]) -> pa.Array:
    """Return a text column from codes.

    Args:
        names: text of each code.
        codes: ``[rows]``.

    Returns:
        The column.
    """
    data = [name.encode() for name in names]
    lengths = np.array([len(text) for text in data], np.int32)
    ends = np.zeros(len(codes) + 1, np.int32)
    np.cumsum(lengths[codes], out=ends[1:])
    joined = b"".join([data[code] for code in codes.tolist()])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(joined)]
    return pa.Array.from_buffers(pa.string(), len(codes), buffers)


def table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return a table of rows.

    Args:
        rows: values by column, those of the first one.

    Returns:
        The same as ``pa.Table.from_pylist(rows)``.
    """
    names = rows[0] if rows else ()
    return pa.table({name: array_of([row.get(name) for row in rows]) for name in names})


def array_of(values: Sequence[Any]) -> pa.Array:
    """Return an Arrow column of numbers, truth values or texts, null where a value is None.

    Args:
        values: the values.

    Returns:
        The same as ``pa.array(values)``.
    """
    kinds = {type(value) for value in values if value is not None}
    if kinds == {str}:
        texts = pa.lib.StringBuilder()
        texts.append_values(values)
        return texts.finish()
    if not kinds:
        return pa.nulls(len(values))
    if not (kinds == {bool} or kinds <= {int, float}):
        return pa.array(values)
    null = np.array([value is None for value in values])
    numbers = [0 if value is None else value for value in values]
    kind = "float64" if float in kinds else "int64" if int in kinds else "bool"
    return column(np.array(numbers), kind, null if null.any() else None)
