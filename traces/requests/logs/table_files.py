"""Tables of requests, CSV, JSON lines or Parquet, read in blocks by Arrow.

A block is columns from its bytes to its arrays. One that Arrow cannot read as a whole, or that
holds anything but plain numbers and times, is read row by row, which says what is wrong in which
line: results are the same, whichever way."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.json as pajson

from eldr_sim.arrays import Ints, Words
from eldr_sim.errors import InputError
from eldr_sim.parquet import filled, text_errors
from eldr_sim.traces.requests.logs.log_columns import NO_PRIORITY, Columns, Link, joined
from eldr_sim.traces.requests.logs.log_rows import Row, session_of
from eldr_sim.traces.requests.logs.table_columns import DATE, UNITS_NS, TableColumns, row_reader

BLOCK = 32 * 2**20  #: bytes of a block
_PARQUET_BATCH = 262_144
_ROWS_SHOWN = 200  #: rows on which a guess of the columns is tried
_MOST_NS = 2**62


class _Rows(Exception):
    """A block must be read row by row."""


class _AllRows(Exception):
    """The whole file must be read row by row."""


def sniff(file: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names of a CSV's columns, and its first rows."""
    with file.open("rb") as start:
        begin = start.read(1 << 18)
    text = begin.decode("utf-8-sig", errors="strict" if len(begin) < 1 << 18 else "ignore")
    names, delimiter = _header(text)
    lines = io.StringIO(text, newline="")
    rows = list(_with_limit(csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True)))
    found = [{str(k).strip(): v for k, v in row.items() if k is not None} for row in rows]
    return names, found


def _with_limit(rows: Iterable[Any]) -> Iterator[Any]:
    for _, row in zip(range(_ROWS_SHOWN), rows, strict=False):
        yield row


def _header(text: str) -> tuple[list[str], str]:
    first = text.partition("\n")[0]
    delimiter = max(",;\t|", key=first.count) if first else ","
    row = next(csv.reader(io.StringIO(first), delimiter=delimiter, skipinitialspace=True), [])
    return [name.strip() for name in row], delimiter


def read_csv(
    file: Path, columns: Callable[[list[str]], TableColumns], output_len: int | None
) -> tuple[TableColumns, Columns]:
    """Return the columns of a CSV and its requests; raises InputError.

    ``columns``: what makes the columns of the header."""
    made: TableColumns | None = None
    parts: list[Columns] = []
    for line, block in _blocks(file, quotes=True):
        if made is None:
            header, _, block = block.partition(b"\n")
            line += 1
            names, delimiter = _header(_decoded(header))
            made = columns(names)
            check_names(file, made, names)
            reader = row_reader(replace(made, strict=False), output_len)  # cells are texts
        if not block.strip():
            continue
        try:
            parts.append(_csv_block(block, names, delimiter, made))
        except (_Rows, pa.ArrowException):
            records = _csv_records(file, block, names, delimiter, line)
            allowed = ",".join(made.names)
            parts.append(rows_of(file, records, reader, made, allowed))
    if made is None:
        made = columns([])
    return made, joined(parts or [Columns.of_rows([])])


def read_json_lines(
    file: Path, columns: TableColumns, allowed: str, output_len: int | None
) -> Columns:
    """Return the requests of JSON lines; raises InputError."""
    reader = row_reader(columns, output_len)
    fast = not any("." in name for name in columns.names)
    while True:
        parts: list[Columns] = []
        try:
            for line, block in _blocks(file):
                if not block.strip():
                    continue
                try:
                    if not fast:
                        raise _Rows
                    parts.append(_json_block(block, columns))
                except (_Rows, pa.ArrowException):
                    parts.append(
                        rows_of(file, _json_records(file, block, line), reader, columns, allowed)
                    )
        except _AllRows:
            reader, fast = row_reader(columns, output_len), False
            continue
        return joined(parts or [Columns.of_rows([])])


def read_records(
    file: Path,
    records: Iterable[Any],
    columns: TableColumns,
    allowed: str,
    output_len: int | None,
    what: str,
) -> Columns:
    """Return the requests of JSON objects, each of which is a ``what`` of the file; raises
    InputError."""
    numbered = ((f"{what} {number}", record) for number, record in enumerate(records, start=1))
    return rows_of(file, numbered, row_reader(columns, output_len), columns, allowed)


def read_parquet(
    file: Path, columns: Callable[[list[str]], TableColumns], output_len: int | None
) -> tuple[TableColumns, Columns]:
    """Return the columns of a Parquet file and its requests; raises InputError."""
    import pyarrow.parquet as pq

    parts: list[Columns] = []
    row = 1
    try:
        with text_errors():
            table = pq.ParquetFile(file)
            made = columns(table.schema_arrow.names)
            check_names(file, made, table.schema_arrow.names)
            reader = row_reader(made, output_len)
            for batch in table.iter_batches(_PARQUET_BATCH, columns=list(made.names)):
                numbered = ((f"row {row + i}", r) for i, r in enumerate(batch.to_pylist()))
                parts.append(rows_of(file, numbered, reader, made, "as --columns says"))
                row += batch.num_rows
    except pa.ArrowException as error:
        raise InputError(str(file), f"no Parquet file: {str(error)[:60]}") from None
    return made, joined(parts or [Columns.of_rows([])])


def parquet_start(file: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names of a Parquet file's columns, and its first rows; raises InputError."""
    import pyarrow.parquet as pq

    try:
        with text_errors():
            table = pq.ParquetFile(file)
            first = next(table.iter_batches(_ROWS_SHOWN), None)
            return table.schema_arrow.names, [] if first is None else first.to_pylist()
    except pa.ArrowException as error:
        raise InputError(str(file), f"no Parquet file: {str(error)[:60]}") from None


def check_names(file: Path, columns: TableColumns, known: Iterable[str]) -> None:
    """Raise InputError where a table has no column of such a name."""
    there = list(known)
    absent = [name for name in columns.names if name not in there]
    if absent:
        raise InputError(str(file), f"has no column {absent[0]!r}", ", ".join(there)[:200])
    if twice := [name for name in columns.names if there.count(name) > 1]:
        problem = f"has {there.count(twice[0])} columns {twice[0]!r}"
        raise InputError(str(file), problem, "a column of each name")


def rows_of(
    file: Path,
    records: Iterable[tuple[str, Any]],
    reader: Callable[[Any], tuple[Row, Any]],
    columns: TableColumns,
    allowed: str,
) -> Columns:
    """Return the columns of records, each with what its place in the file is called."""
    rows: list[Row] = []
    failed: list[bool] = []
    models: set[str] = set()
    for place, record in records:
        try:
            row, (status, model) = reader(record)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            said = f"no {error}" if isinstance(error, KeyError) else str(error)
            shown = record if isinstance(record, Mapping) else {"": record}
            values = [shown.get(name, "") for name in columns.names] or list(shown.values())
            got = ",".join(str(value) for value in values if value != "")
            problem = f"got {got!r:.80}" + (f" ({said:.90})" if said else "")
            raise InputError(f"{file} {place}", problem, allowed) from None
        rows.append(row)
        failed.append(columns.status is not None and status not in columns.succeeded)
        if isinstance(model, str) and model:
            models.add(model)
    try:
        found = Columns.of_rows(rows)
    except (OverflowError, ValueError):
        raise InputError(str(file), "a hash id or a number is out of range", "0..2^64-1") from None
    found.failed = np.array(failed, np.bool_) if any(failed) else None
    found.models = models
    return found


def _blocks(file: Path, *, quotes: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yield whole lines of a file, in blocks, with the number of the first line of each."""
    line, rest = 1, b""
    with file.open("rb") as source:
        while more := source.read(BLOCK):
            if line == 1 and not rest:
                more = more.removeprefix(b"\xef\xbb\xbf")
            more = rest + more
            end = more.rfind(b"\n") + 1
            while quotes and end and more.count(b'"', 0, end) % 2:  # inside of a quoted cell
                end = more.rfind(b"\n", 0, end - 1) + 1
            block, rest = more[:end], more[end:]
            if block:
                yield line, block
                line += block.count(b"\n")
    if rest:
        yield line, rest


def _decoded(text: bytes) -> str:
    return text.decode("utf-8")


def csv_rows(file: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the rows of a CSV, each with its line; of a row that is short the cells it has."""
    names: list[str] = []
    for line, block in _blocks(file, quotes=True):
        if not names:
            header, _, block = block.partition(b"\n")
            line += 1
            names, delimiter = _header(_decoded(header))
        yield from _csv_records(file, block, names, delimiter, line)


def _csv_records(
    file: Path, block: bytes, names: list[str], delimiter: str, line: int
) -> Iterator[tuple[str, dict[str, str]]]:
    rows = csv.reader(
        io.StringIO(_decoded(block), newline=""), delimiter=delimiter, skipinitialspace=True
    )
    for row in rows:
        if row:
            yield f"line {line + rows.line_num - 1}", dict(zip(names, row, strict=False))


def _json_records(file: Path, block: bytes, line: int) -> Iterator[tuple[str, Any]]:
    for number, text in enumerate(_decoded(block).split("\n"), start=line):
        if text.strip():
            try:
                record = json.loads(text)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                problem = f"got {text.strip()!r:.60}"
                raise InputError(f"{file} line {number}", problem, "one JSON object per line")
            yield f"line {number}", record


def _csv_block(block: bytes, names: list[str], delimiter: str, columns: TableColumns) -> Columns:
    """Return the requests of a block of CSV; raises what sends it the other way."""
    if columns.links or columns.hashes or columns.text or columns.status or b"0x" in block.lower():
        raise _Rows
    wanted = {name: str(names.index(name)) for name in columns.names}
    quoted = b'"' in block
    table = pacsv.read_csv(
        pa.BufferReader(block),
        read_options=pacsv.ReadOptions(
            column_names=[str(i) for i in range(len(names))], block_size=len(block) + 1,
            use_threads=False,
        ),
        parse_options=pacsv.ParseOptions(
            delimiter=delimiter, newlines_in_values=quoted, quote_char='"' if quoted else False
        ),
        convert_options=pacsv.ConvertOptions(
            include_columns=list(wanted.values()),
            column_types=dict.fromkeys(wanted.values(), pa.string()),
            strings_can_be_null=False,
        ),
    )  # fmt: skip

    def text(name: str) -> Any:
        return pc.utf8_trim_whitespace(table[wanted[name]])

    n = table.num_rows
    assert columns.input is not None
    prompt = _numbers(pc.cast(text(columns.input), pa.int64()))
    if columns.output is None:
        raise _Rows
    output = _numbers(pc.cast(text(columns.output), pa.int64()))
    priority = sessions = None
    if columns.priority is not None:
        priority = _numbers(pc.cast(text(columns.priority), pa.int64()))
    if columns.session is not None:
        sessions = _coded(table[wanted[columns.session]])
    models: set[str] = set()
    if columns.model is not None:
        models = {model for model in pc.unique(table[wanted[columns.model]]).to_pylist() if model}
    when = np.zeros(n, np.int64)
    if columns.time is not None:
        when = _times(text(columns.time), columns.unit)
    none = np.zeros(n, np.int64)
    return Columns(when, prompt, output, np.empty(0, np.uint64), none, sessions, priority,
                   models=models)  # fmt: skip


def _json_block(block: bytes, columns: TableColumns) -> Columns:
    """Return the requests of a block of JSON lines; raises what sends it the other way."""
    if columns.text or columns.status or columns.output is None or columns.unit == DATE:
        raise _Rows
    try:
        first = json.loads(block.partition(b"\n")[0])
    except (ValueError, RecursionError):
        raise _Rows from None  # which says what is wrong with the line
    if not isinstance(first, dict):
        raise _Rows
    fields: list[tuple[str, Any]] = []

    def add(name: str | None, kind: Any) -> None:
        if name is not None:
            fields.append((name, kind))

    def kind_of(name: str | None) -> Any:
        value = first.get(name)
        return pa.int64() if type(value) is int else pa.string()

    add(columns.input, pa.int64())
    add(columns.output, pa.int64())
    add(columns.time, pa.int64() if columns.unit == "ns" else pa.float64())
    for name in (columns.session, columns.name, columns.parent, columns.model):
        add(name, kind_of(name))
    add(columns.priority, pa.int64())
    add(columns.hashes, pa.list_(pa.uint64()))
    add(columns.joins, pa.list_(pa.string()))
    for name in (columns.after_ms, columns.after_s):
        add(name, pa.float64())
    schema = pa.schema(dict(fields))
    if len(schema) != len(fields):
        raise _Rows
    table = pajson.read_json(
        pa.BufferReader(block),
        read_options=pajson.ReadOptions(use_threads=False, block_size=len(block) + 1),
        parse_options=pajson.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="ignore"
        ),
    )
    n = table.num_rows
    lines = block.count(b"\n") + (not block.endswith(b"\n"))
    if n != lines:  # blank lines, or several objects in one
        raise _Rows
    prompt, output = _numbers(table[columns.input]), _numbers(table[columns.output])
    when = np.zeros(n, np.int64)
    if columns.time is not None:
        if table[columns.time].null_count and (columns.after_ms or columns.after_s):
            raise _AllRows
        when = _scaled(_numbers(table[columns.time]), columns.unit)
    priority = None
    if columns.priority is not None and table[columns.priority].null_count < n:
        priority = _numbers(filled(table[columns.priority], NO_PRIORITY))
    hashes: Words = np.empty(0, np.uint64)
    blocks: Ints = np.zeros(n, np.int64)
    if columns.hashes is not None:
        ids = table[columns.hashes].combine_chunks()
        blocks = _numbers(filled(pc.list_value_length(ids), 0)).astype(np.int64)
        hashes = _numbers(ids.flatten())
    models = set()
    if columns.model is not None:
        models = {str(model) for model in pc.unique(table[columns.model]).to_pylist() if model}
    sessions = links = None
    linking = (columns.name, columns.parent, columns.joins, columns.after_ms, columns.after_s)
    if any(name is not None and table[name].null_count < n for name in linking):
        links = _links(table, columns)
    elif columns.session is not None and table[columns.session].null_count < n:
        sessions = _coded(pc.cast(table[columns.session], pa.string()))
    return Columns(when, prompt, output, hashes, blocks, sessions, priority, links, models=models)


def _links(table: Any, columns: TableColumns) -> list[Link]:
    n = table.num_rows

    def of(name: str | None) -> list[Any]:
        return [None] * n if name is None else table[name].to_pylist()

    after_ms, after_s = of(columns.after_ms), of(columns.after_s)
    links = []
    for session, name, parent, joins, ms, s in zip(
        of(columns.session), of(columns.name), of(columns.parent), of(columns.joins),
        after_ms, after_s, strict=True,
    ):  # fmt: skip
        after = s if ms is None else ms / 1e3
        before = session_of(parent)
        links.append(
            Link(session_of(session), after, session_of(name), "" if before == "-1" else before,
                 joins or ())
        )  # fmt: skip
    return links


def _numbers(values: Any) -> Any:
    """Return numbers as an array of NumPy's; raises what sends the block the other way."""
    if values.null_count:
        raise _Rows
    # By dlpack: to_numpy imports pandas, half a second.
    chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
    arrays = [np.from_dlpack(chunk) for chunk in chunks]
    return arrays[0] if len(arrays) == 1 else np.concatenate([*arrays, np.empty(0, np.int64)])


def _scaled(values: Any, unit: str) -> Ints:
    if values.dtype == np.int64 and unit == "ns":
        when: Ints = values
    else:
        scaled = values.astype(np.float64) * UNITS_NS[unit]
        if not np.isfinite(scaled).all() or (np.abs(scaled) >= _MOST_NS).any():
            raise _Rows
        when = np.rint(scaled).astype(np.int64)
    if len(when) and not (when.min() > -_MOST_NS and when.max() < _MOST_NS):
        raise _Rows
    return when


def _times(values: Any, unit: str) -> Ints:
    if unit == "ns":
        return _scaled(_numbers(pc.cast(values, pa.int64())), unit)
    if unit != DATE:
        return _scaled(_numbers(pc.cast(values, pa.float64())), unit)
    try:
        found = pc.cast(values, pa.timestamp("ns"))
    except pa.ArrowInvalid:
        found = pc.cast(values, pa.timestamp("ns", "UTC"))
    return _scaled(_numbers(pc.cast(found, pa.int64())), "ns")


def _coded(values: Any) -> tuple[Ints, list[str]]:
    """Return the numbers of names, -1 for none, and the names."""
    coded = pc.dictionary_encode(values)
    coded = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
    if isinstance(coded, pa.ChunkedArray):
        coded = coded.unify_dictionaries().chunk(0)
    names = ["" if name is None else name for name in coded.dictionary.to_pylist()]
    codes = _numbers(filled(coded.indices, -1)).astype(np.int64)
    if "" in names:
        codes = np.where(codes == names.index(""), -1, codes)
    return codes, names
