"""Request logs of any table, CSV, JSON lines or Parquet, by the names of its columns.

``time_s=start,input=prompt_tokens,output=completion_tokens`` says which column is what. ``input``
and ``output`` are tokens; ``time`` an ISO 8601 time (or Parquet's type for times), ``time_s``,
``time_ms``, ``time_us`` and ``time_ns`` a number since any origin; ``session`` and ``priority`` as
in every log. Without a time all requests come at once, unless arrivals are drawn."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.traces.requests.logs.log_rows import Row, scaled_ns, session_of, timestamp_ns

_UNITS_NS = {"time_s": 1e9, "time_ms": 1e6, "time_us": 1e3, "time_ns": 1.0}
KEYS = ("time", *_UNITS_NS, "input", "output", "session", "priority")  #: what a column may be
#: Words in the names of columns, of what they usually are.
_USUAL = {
    "time_s": ("time", "arriv", "start"),
    "input": ("prompt", "input", "context"),
    "output": ("completion", "output", "generated", "response"),
}
_PARQUET_BATCH = 65_536


def parse_columns(text: str) -> dict[str, str]:
    """Return the column of each key; raises InputError."""
    columns: dict[str, str] = {}
    for part in text.split(","):
        key, equals, column = (piece.strip() for piece in part.partition("="))
        if not equals or not column or key not in KEYS or key in columns:
            problem = f"{part.strip()!r}" + (" is given twice" if key in columns else "")
            raise InputError("columns", problem, f"KEY=COLUMN,... with keys {', '.join(KEYS)}")
        columns[key] = column
    missing = [key for key in ("input", "output") if key not in columns]
    if missing or sum(key.startswith("time") for key in columns) > 1:
        problem = f"no {missing[0]}" if missing else "more than one time"
        raise InputError("columns", problem, "input, output and at most one time")
    return columns


def likely_columns(header: Sequence[str]) -> str:
    """Return a guess of a table's columns by its header; ``NAME`` for what no name tells."""
    named = {
        key: next((name for name in header if any(w in name.lower() for w in words)), "NAME")
        for key, words in _USUAL.items()
    }
    return ",".join(f"{key}={name}" for key, name in named.items())


def column_rows(file: Path, text: str) -> tuple[str, Iterator[Row]]:
    """Return the kind of a table, told by how it begins, and its requests; raises InputError."""
    columns = parse_columns(text)
    with file.open("rb") as start:
        begins = start.read(64).lstrip(b"\xef\xbb\xbf \r\n\t")
    kind, read = "csv", _csv
    if begins.startswith(b"PAR1"):
        kind, read = "parquet", _parquet
    elif begins.startswith(b"{"):
        kind, read = "json lines", _json_lines
    return kind, _rows(file, columns, read(file, columns))


def _rows(
    file: Path, columns: Mapping[str, str], records: Iterator[Mapping[str, Any]]
) -> Iterator[Row]:
    when = next((key for key in columns if key.startswith("time")), None)
    session, priority = columns.get("session"), columns.get("priority")
    for number, record in enumerate(records, start=1):
        try:
            given = None if priority is None else record[priority]
            yield Row(
                0 if when is None else _time_ns(when, record[columns[when]]),
                _whole(record[columns["input"]]),
                _whole(record[columns["output"]]),
                (),
                "" if session is None else session_of(record[session]),
                None if given in (None, "") else _whole(given),
            )
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            said = f"no column {error}" if isinstance(error, KeyError) else str(error)
            raise InputError(f"{file} row {number}", f"{said:.80}", "as --columns says") from None


def _csv(file: Path, columns: Mapping[str, str]) -> Iterator[Mapping[str, Any]]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, skipinitialspace=True)
        _check_names(file, columns, rows.fieldnames or ())
        yield from rows


def _json_lines(file: Path, columns: Mapping[str, str]) -> Iterator[Mapping[str, Any]]:
    with file.open(encoding="utf-8-sig") as lines:
        for line in filter(str.strip, lines):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                raise InputError(str(file), f"got {line.strip()!r:.60}", "an object a line")
            yield record


def _parquet(file: Path, columns: Mapping[str, str]) -> Iterator[Mapping[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from eldr_sim.parquet import text_errors

    try:
        with text_errors():
            table = pq.ParquetFile(file)
            _check_names(file, columns, table.schema_arrow.names)
            for batch in table.iter_batches(_PARQUET_BATCH, columns=list(columns.values())):
                yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise InputError(str(file), f"no Parquet file: {error!s:.60}") from None


def _check_names(file: Path, columns: Mapping[str, str], names: Any) -> None:
    missing = [column for column in columns.values() if column not in names]
    if missing:
        listed = ", ".join(map(str, names))
        raise InputError("columns", f"{file} has no column {missing[0]!r}", f"{listed:.200}")


def _time_ns(key: str, value: Any) -> int:
    if key in _UNITS_NS:
        if key == "time_ns" and isinstance(value, str | int):
            return scaled_ns(int(value), 1)
        return scaled_ns(float(value), _UNITS_NS[key])
    if isinstance(value, datetime):
        value = value.isoformat(sep=" ")
    try:
        return timestamp_ns(str(value))
    except ValueError:
        if str(value).replace(".", "", 1).isdecimal():
            text = f"time {value!s:.18} is a number: time_s= or time_ms= names its unit"
            raise ValueError(text) from None
        raise


def _whole(value: Any) -> int:
    number = float(value)
    if number != int(number):
        raise ValueError(f"{value!r} is no whole number")
    return int(number)
