"""Request logs in the formats that serving traces are published in (docs/formats.md).

Tables with columns that a format (`formats`) or ``--columns`` names, are read by `table_files`;
`agent_logs`, `chat_files`, `conversation_files`, `multi_turn_files` and `benchmark_logs` read what
is no table. What a file holds and what was left out is its `LogHeader`. What is no log of requests
is refused in a sentence that says what it is, what is unknown with the columns that it may have."""

import csv
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.arrays import Bools, Floats, Int32s, Ints, Words
from eldr_sim.errors import InputError
from eldr_sim.inputs import regular_file
from eldr_sim.traces.requests.logs import aggregates, benchmark_logs, chat_files
from eldr_sim.traces.requests.logs.agent_logs import agent_rows, is_agent_session
from eldr_sim.traces.requests.logs.conversation_files import conversation_rows, is_conversations
from eldr_sim.traces.requests.logs.formats import LogFormat, refused_format, table_format
from eldr_sim.traces.requests.logs.log_columns import NO_PRIORITY, Columns, sessions_of
from eldr_sim.traces.requests.logs.log_header import LogHeader, check_unit, told_lengths
from eldr_sim.traces.requests.logs.log_rows import Row, read_sessions
from eldr_sim.traces.requests.logs.multi_turn_files import is_multi_turn, multi_turn_rows
from eldr_sim.traces.requests.logs.table_columns import (
    DATE,
    TableColumns,
    check_times,
    columns_of,
    guessed_columns,
    json_names,
    no_requests,
    parse_columns,
    parts_of_lengths,
    unread_times,
)

_BLOCK_SIZES = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1, 1024, 2048)
#: Smaller blocks than these must fit several lengths of prompts.
_LEAST_BLOCK, _LENGTHS = 16, 4
_MAX_TOKENS = 2**31 - 1
_FIRST_RECORDS = 100  #: of JSON lines, which say which columns there are
_FOUR_BYTES = "token counts estimated, four bytes each"


@dataclass(frozen=True, eq=False)
class RequestLog:
    """Requests as a serving system recorded them, in order of arrival."""

    path: Path
    format: str  #: a name of `formats.formats`, or the kind of table
    header: LogHeader  #: what the file says, and what of it was read
    #: float64 ``[n]``, seconds since the first request, rounded to 1 ns.
    arrival_s: Floats
    #: ``prompt_len``, ``output_len``: int32 ``[n]``, tokens, each at least 1.
    prompt_len: Int32s
    output_len: Int32s
    #: int32 ``[n]``; requests of one conversation share a number; without sessions each is its own.
    session: Int32s
    #: int32 ``[n]``, 0 where a line has none; None where no line has one.
    priority: Int32s | None
    #: Request ``i``'s block hashes (uint64) are
    #: ``prefix_hash[prefix_indptr[i]:prefix_indptr[i+1]]``.
    prefix_hash: Words
    prefix_indptr: Ints
    prefix_block_tokens: int  #: tokens of a prefix block; 0 without block hashes
    n_dropped: int  #: requests left out, as the header says
    checksum: str  #: SHA-256 of the file
    first_ns: int = 0  #: when the first request came, on the log's clock
    in_order: bool = True  #: whether the file's lines are in order of arrival
    #: Whether the file says when requests come; if not, arrivals are Poisson's at a rate of 1/s.
    timed: bool = True
    #: int32, float64 ``[n]``, or None: the request that one goes on with, -1: none; seconds from
    #: its arrival, or its end where the log says so (`after_end`).
    parent: Int32s | None = None
    gap_s: Floats | None = None
    after_end: Bools | None = None
    #: int32 ``[k, 2]``: a request, and one beside its parent whose end it waits for, too.
    joins: Int32s | None = None

    def gaps(self, ttft_ms: float, tpot_ms: float) -> Floats:
        """Return the seconds from the end of a parent to the arrival, float64 ``[n]``: of gaps
        between arrivals the TTFT and TPOT of the recording system are taken away."""
        assert self.parent is not None
        assert self.gap_s is not None
        assert self.after_end is not None
        tokens = np.where(self.parent >= 0, self.output_len[self.parent], 1)
        own = np.where(self.after_end, 0.0, (ttft_ms + tpot_ms * (tokens - 1)) / 1e3)
        return np.rint(np.maximum(self.gap_s - own, 0.0) * 1e9) / 1e9


@dataclass
class _Found:
    """What a reader found in a file."""

    kind: str
    columns: Columns
    times: str = ""  #: see `LogHeader`
    left_out: dict[str, int] = field(default_factory=dict)  #: of rows that are not in ``columns``
    engine: str = ""
    max_concurrency: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Asked:
    """How a file is to be read."""

    columns: str | None  #: what ``--columns`` says
    output_len: int | None  #: tokens of answers that a file leaves open
    time_unit: str | None  #: what ``--time-unit`` says

    def of_table(self, file: Path, known: LogFormat | None, names: list[str]) -> TableColumns:
        """Return the columns of a table; raises InputError."""
        given = {} if self.columns is None else parse_columns(self.columns)
        columns = columns_of(known, given, names, self.time_unit)
        if columns.output is None and self.output_len is None:
            problem = "has no output lengths"
            raise InputError(str(file), problem, "--output-len N, for all requests")
        return columns

    def only_tables(self, file: Path, kind: str) -> None:
        """Raise InputError where options name columns or units of what is no table."""
        for name in ("columns", "time_unit"):
            if getattr(self, name) is not None:
                raise InputError(name, f"{file.name} ({kind}) states its columns itself", "none")


def read_request_log(
    path: str | os.PathLike[str],
    columns: str | None = None,
    output_len: int | None = None,
    time_unit: str | None = None,
) -> RequestLog:
    """Read a request log in the format that its beginning shows, or by ``columns``.

    ``output_len``: tokens of answers that a file leaves open; ``time_unit``: ``s``, ``ms``, ``us``
    or ``ns``, where a file's times are numbers without a stated unit. Raises InputError."""
    file = Path(path)
    asked = _Asked(columns, output_len, time_unit)
    try:
        source = regular_file(file, str(file))
        with source.open("rb") as start:
            begins = start.read(64).lstrip(b"\xef\xbb\xbf \r\n\t")
        if begins.startswith(b"PAR1"):
            return _assemble(file, _parquet(file, asked))
        if begins.startswith((b"{", b"[")):
            return _assemble(file, _json_content(file, asked))
        return _assemble(file, _text_content(file, asked))
    except OSError as error:
        raise InputError(str(file), error.strerror or "cannot be read") from None
    except csv.Error as error:
        raise InputError(str(file), f"not valid CSV: {error}") from None
    except UnicodeDecodeError:
        raise InputError(str(file), _no_text(file)) from None


def rates_of_file(file: Path) -> tuple[Floats, Floats] | None:
    """Return the edges, s from 0, and the rates, 1/s, of a file of counts over time; None where it
    holds something else. Raises InputError for one that cannot be meant."""
    from eldr_sim.traces.requests.logs import table_files  # Arrow takes long to import

    source = regular_file(file, str(file))
    try:
        with source.open("rb") as start:
            begins = start.read(64).lstrip(b"\xef\xbb\xbf \r\n\t")
        if begins.startswith(b"PAR1"):
            return None
        if begins.startswith((b"{", b"[")):
            text = source.read_text(encoding="utf-8-sig")
            record = _json(text)
            if aggregates.is_prometheus(record):
                return aggregates.prometheus_rates(file, record)
            records = aggregates.unfolded(record)
            if records is None and record is not None:
                records = record if isinstance(record, list) else _inside(record)
            if records is None:
                records = [_json(line) for line in text.splitlines() if line.strip()]
            records = [record for record in records if isinstance(record, dict)]
            names = json_names(records)
        else:
            names, records = table_files.sniff(file)
            if aggregates.count_column(names, records) is not None:
                records = [record for _, record in table_files.csv_rows(file)]
    except OSError as error:
        raise InputError(str(file), error.strerror or "cannot be read") from None
    except UnicodeDecodeError:
        raise InputError(str(file), _no_text(file)) from None
    known = table_format(names)
    counts = None if known is not None else aggregates.count_column(names, records)
    return None if counts is None else aggregates.bucket_rates(file, names, records, counts)


def _text_content(file: Path, asked: _Asked) -> _Found:
    from eldr_sim.traces.requests.logs import table_files  # Arrow takes long to import

    names, records = table_files.sniff(file)
    with file.open(encoding="utf-8-sig", errors="replace") as lines:
        first = lines.readline()
    if (refused := refused_format(first, None)) is not None:
        raise _refusal(file, refused)
    known_table = _known_table(file, asked, names, records, first)
    if known_table is not None and known_table.name == "frontier sessions":
        asked.only_tables(file, known_table.name)
        numbered = table_files.csv_rows(file)
        rows = chat_files.frontier_rows(file, numbered)
        return _Found(known_table.name, _columns(file, rows), "s of sessions, then think times")
    made, found = table_files.read_csv(
        file, lambda header: asked.of_table(file, known_table, header), asked.output_len
    )
    return _table(file, "csv", known_table, made, found)


def _parquet(file: Path, asked: _Asked) -> _Found:
    from eldr_sim.traces.requests.logs import table_files  # Arrow takes long to import

    names, records = table_files.parquet_start(file)
    known_table = _known_table(
        file, asked, names, records, f"Parquet with columns {', '.join(names)}"
    )
    made, found = table_files.read_parquet(
        file, lambda header: asked.of_table(file, known_table, header), asked.output_len
    )
    return _table(file, "parquet", known_table, made, found)


def _json_content(file: Path, asked: _Asked) -> _Found:
    """Return what a file of JSON holds: a document, or a line for each request or session."""
    from eldr_sim.traces.requests.logs import table_files  # Arrow takes long to import

    with file.open(encoding="utf-8-sig") as lines:
        first = next(filter(str.strip, lines), "")
        record = _json(first)
        following = None if record is None else next(filter(str.strip, lines), None)
        if record is None:  # one document over many lines?
            record = _json(first + lines.read())
            if record is None and (refused := refused_format(first, None)) is not None:
                raise _refusal(file, refused)
            if record is None:
                problem = f"got {first.strip()!r:.80}"
                raise InputError(f"{file} line 1", problem, "JSON lines, or one JSON document")
        rest = [] if following is None else [following]
        if following is None:
            return _document(file, asked, record)
        if (refused := refused_format("", record)) is not None:
            raise _refusal(file, refused)
        if benchmark_logs.is_vllm_result(record):
            raise InputError(str(file), "holds more than one result", "one result a file")
        others = map(_json, chain(rest, filter(str.strip, lines)))
        head = list(islice(others, _FIRST_RECORDS))
        sessions = _sessions(file, asked, chain([record], head, others), record)
        if sessions is not None:
            return sessions
    if not isinstance(record, dict):
        problem = f"got {first.strip()!r:.60}"
        raise InputError(f"{file} line 1", problem, "one JSON object per line")
    records = [record, *(each for each in head if isinstance(each, dict))]
    names = json_names(records)
    known_table = _known_table(file, asked, names, records, first)
    made = asked.of_table(file, known_table, names)
    allowed = ", ".join(made.names) + ("" if asked.output_len else " (or --output-len)")
    found_rows = table_files.read_json_lines(file, made, allowed, asked.output_len)
    return _table(file, "json lines", known_table, made, found_rows)


def _document(file: Path, asked: _Asked, record: Any) -> _Found:
    """Return what a JSON document holds."""
    from eldr_sim.traces.requests.logs import table_files  # Arrow takes long to import

    if benchmark_logs.is_vllm_result(record):
        asked.only_tables(file, "vllm bench")
        stated = benchmark_logs.stated_load(file, record)
        found = _Found("vllm bench", _columns(file, benchmark_logs.vllm_rows(file, record, stated)))
        found.times, found.engine = stated.times, stated.engine
        found.columns.models = {stated.model} if stated.model else set()
        found.max_concurrency = None if stated.has_times else stated.max_concurrency
        return found
    if is_conversations(record):
        asked.only_tables(file, "vllm conversations")
        return _Found(
            "vllm conversations", _columns(file, conversation_rows(file, record)), "from 0 on"
        )
    if benchmark_logs.is_guidellm(record):
        asked.only_tables(file, "guidellm")
        left_out: dict[str, int] = {}
        rows = benchmark_logs.guidellm_rows(file, record, left_out)
        return _Found("guidellm", _columns(file, rows), "in s", left_out)
    if (buckets := aggregates.unfolded(record)) is not None:
        aggregates.refuse(file, buckets, "num_model_requests")
    if aggregates.is_prometheus(record):
        problem = "is a range of Prometheus's: rates, not requests"
        raise InputError(str(file), problem, f"--load {file.name}, --input-len and --output-len")
    if (refused := refused_format("", record)) is not None:
        raise _refusal(file, refused)
    if isinstance(record, dict) and (whole := _sessions(file, asked, [record], record)) is not None:
        return whole
    records = record if isinstance(record, list) else _inside(record)
    head = next((record for record in records if isinstance(record, dict)), None)
    if head is None:
        raise InputError(str(file), "holds no records", "JSON objects, one for each request")
    found_sessions = None if head is record else _sessions(file, asked, records, head)
    if found_sessions is not None:
        return found_sessions
    names = json_names(records)
    known_table = _known_table(file, asked, names, records[:_FIRST_RECORDS], json.dumps(head))
    made = asked.of_table(file, known_table, names)
    allowed = ", ".join(made.names) + ("" if asked.output_len else " (or --output-len)")
    what = "line" if head is record else "request"
    rows_found = table_files.read_records(file, records, made, allowed, asked.output_len, what)
    return _table(file, "json", known_table, made, rows_found)


def _sessions(file: Path, asked: _Asked, records: Iterable[Any], first: Any) -> _Found | None:
    """Return what records hold that are no rows of a table; None where they are."""
    left_out: dict[str, int] = {}
    if benchmark_logs.is_aiperf(first):
        asked.only_tables(file, "aiperf")
        rows = benchmark_logs.aiperf_rows(file, records, left_out)
        return _Found("aiperf", _columns(file, rows), "in ns", left_out)
    if is_agent_session(first):
        asked.only_tables(file, "weka")
        return _Found("weka", _columns(file, agent_rows(file, records)), "of sessions, in s")
    if is_multi_turn(first):
        asked.only_tables(file, "aiperf multi_turn")
        rows = multi_turn_rows(file, records, asked.output_len)
        note = (_FOUR_BYTES,)
        return _Found("aiperf multi_turn", _columns(file, rows), "of turns, in ms", notes=note)
    if chat_files.is_talk(first):
        asked.only_tables(file, "sharegpt")
        rows = chat_files.talk_rows(file, records, left_out)
        return _Found("sharegpt", _columns(file, rows), "", left_out, notes=(_FOUR_BYTES,))
    if chat_files.is_tool_session(first):
        asked.only_tables(file, "llmservingsim sessions")
        rows = chat_files.tool_session_rows(file, records)
        return _Found("llmservingsim sessions", _columns(file, rows), "of sessions, in ns")
    return None


def _inside(record: Any) -> list[Any]:
    """Return the records that a document holds: those of its one list of objects, or itself."""
    if not isinstance(record, dict):
        return []
    lists = [
        value
        for value in record.values()
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value)
    ]
    if table_format(json_names([record])) is None and len(lists) == 1:
        return list(lists[0])
    return [record]


def _columns(file: Path, rows: Iterable[Row]) -> Columns:
    try:
        return Columns.of_rows(rows)
    except (OverflowError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(str(file), "a hash id or a number is out of range", "0..2^64-1") from None


def _known_table(
    file: Path, asked: _Asked, names: list[str], records: list[Any], first: str
) -> LogFormat | None:
    """Return the format of a table, None where only ``--columns`` says it; raises InputError."""
    known = table_format(names)
    if known is not None:
        times = [some for key, some in known.columns.items() if key.startswith("time")]
        if times and not any({*some} & {*names} for some in times):
            check_times(file, asked.columns, names, records)
        return known
    if (counts := aggregates.count_column(names, records)) is not None:
        aggregates.refuse(file, records, counts)
    if asked.columns is not None:
        return None
    if why := no_requests(names, records):
        raise InputError(str(file), f"holds {why}", "a log of requests, with times")
    allowed = "eldr-sim trace formats lists those that are known"
    if unread := unread_times(names, records):
        allowed = f"{unread}; {allowed}"
    if part := parts_of_lengths(names, records):
        allowed = f"a column of the sum; {part}; {allowed}"
    elif (guess := guessed_columns(names, records)) is not None:
        unit = ", UNIT s, ms, us or ns" if "time_UNIT=" in guess else ""
        allowed = f"--columns {guess}{unit}; {allowed}"
    elif len(names) > 1:
        there = ", ".join(names)
        allowed = f"--columns time_UNIT=NAME,input=NAME,output=NAME of {there:.200}; {allowed}"
    raise InputError(str(file), f"unknown format, first line {first.strip()!r:.80}", allowed)


#: How files begin that are packed or not UTF-8, and what to do.
_PACKED = {
    b"\x1f\x8b": "is compressed: gunzip it first",
    b"\x28\xb5\x2f\xfd": "is compressed: unzstd it first",
    b"PK\x03\x04": "is a ZIP or Excel file: save its sheet as CSV",
    b"\xff\xfe": "is UTF-16 text, not UTF-8",
    b"\xfe\xff": "is UTF-16 text, not UTF-8",
}


def _no_text(file: Path) -> str:
    """Return what a file is that is not UTF-8 text, as far as its first bytes tell."""
    with file.open("rb") as start:
        begin = start.read(4)
    return next(
        (said for mark, said in _PACKED.items() if begin.startswith(mark)), "is not UTF-8 text"
    )


def _refusal(file: Path, known: LogFormat) -> InputError:
    return InputError(str(file), f"has no requests: {known.about}", known.way)


def _table(
    file: Path, kind: str, known: LogFormat | None, made: TableColumns, found: Columns
) -> _Found:
    """Return what a table holds; raises InputError where its times or rows cannot be meant."""
    notes: tuple[str, ...] = (_FOUR_BYTES,) if made.text else ()
    if made.time is None:
        return _Found(kind if known is None else known.name, found, notes=notes)
    if known is None and aggregates.is_even(found.when_ns, found.prompt):
        aggregates.refuse(file, [], None)
    if made.unit == DATE:
        times = "are dates"
    else:
        times = f"in {made.unit}"
        longest = 31 * 86400.0 if known is None else known.longest_s
        doubt = check_unit(file, found.when_ns, made.unit, made.time, longest, asks=made.ambiguous)
        notes += (doubt,) if doubt else ()
    return _Found(kind if known is None else known.name, found, times, notes=notes)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _assemble(file: Path, found: _Found) -> RequestLog:
    """Return the log of what was found, in order of arrival; raises InputError."""
    columns, left_out = found.columns, dict(found.left_out)
    lengths = (columns.prompt, columns.output)
    bad = np.zeros(len(columns), np.bool_)
    for length in lengths:
        bad |= (length < 0) | (length > _MAX_TOKENS)
    if bad.any():
        which = int(np.argmax(bad))
        problem = f"{lengths[0][which]} prompt and {lengths[1][which]} output tokens"
        raise InputError(f"{file} request {which + 1}", problem, f"0..{_MAX_TOKENS}")
    rows = len(columns) + sum(left_out.values())
    gone = np.zeros(len(columns), np.bool_)
    for why, which_ones in (
        ("without an answer", columns.output == 0),
        ("without a prompt", columns.prompt == 0),
        ("failed", np.zeros(len(columns), np.bool_) if columns.failed is None else columns.failed),
    ):
        if n := int((which_ones & ~gone).sum()):
            left_out[why] = left_out.get(why, 0) + n
        gone |= which_ones
    if gone.all():
        raise InputError(str(file), "holds no request with prompt and output tokens")
    if gone.any():
        columns = columns.taken(np.flatnonzero(~gone))
    timed = bool(found.times)
    if not timed:
        columns.when_ns = benchmark_logs.drawn_times_ns(len(columns), 1.0, 1.0)
    when = columns.when_ns
    in_order = bool((when[1:] >= when[:-1]).all())
    if not in_order:
        columns = columns.taken(np.argsort(when, kind="stable"))
        when = columns.when_ns
    span = (int(when[-1]) - int(when[0])) / 1e9
    n = len(columns)
    prompt = columns.prompt.astype(np.int32)
    block_tokens = _block_tokens(file, prompt, columns.blocks)
    header = LogHeader(
        file=file.name,
        format=found.kind,
        rows=rows,
        left_out=left_out,
        times=found.times,
        span_s=span if timed else 0.0,
        rate=(n - 1) / span if span > 0 and timed else None,
        prompts=told_lengths(columns.prompt),
        outputs=told_lengths(columns.output),
        block_tokens=block_tokens,
        models=tuple(sorted(columns.models)),
        engine=found.engine,
        max_concurrency=found.max_concurrency,
        notes=found.notes,
    )
    indptr = np.zeros(n + 1, np.int64)
    np.cumsum(columns.blocks, out=indptr[1:])
    with file.open("rb") as content:
        checksum = hashlib.file_digest(content, "sha256").hexdigest()
    return RequestLog(
        path=file,
        format=found.kind,
        header=header,
        arrival_s=(when - when[0]) / 1e9,
        prompt_len=prompt,
        output_len=columns.output.astype(np.int32),
        **sessions_of(columns),
        priority=_priorities(file, columns.priority),
        prefix_hash=columns.hashes.astype(np.uint64, copy=False),
        prefix_indptr=indptr,
        prefix_block_tokens=block_tokens,
        n_dropped=sum(left_out.values()),
        checksum=checksum,
        first_ns=int(when[0]) if timed else 0,
        in_order=in_order,
        timed=timed,
    )


def _priorities(file: Path, given: Ints | None) -> Int32s | None:
    if given is None or (given == NO_PRIORITY).all():
        return None
    known = np.where(given == NO_PRIORITY, 0, given)
    if (np.abs(known) >= 2**31).any():
        raise InputError(str(file), "a priority is out of range", "32 bits")
    return known.astype(np.int32)


def known_log(
    path: str | os.PathLike[str],
    columns: str | None = None,
    sessions: str | None = None,
    output_len: int | None = None,
    time_unit: str | None = None,
) -> RequestLog:
    """Return a log as `read_request_log` does; not read again unless the file has changed.
    ``sessions``: a file that says which requests go on with which, see `log_rows`."""
    file = regular_file(Path(path), str(path))
    about = file.stat()
    stamp = about.st_mtime_ns, about.st_size
    log = _known(str(file), str(file.resolve()), columns, stamp, output_len, time_unit)
    if sessions is None:
        return log
    found = read_sessions(
        Path(sessions), log.path, len(log.arrival_s),
        in_order=log.in_order, dropped=log.n_dropped > 0,
    )  # fmt: skip
    return replace(log, **found)


@lru_cache(maxsize=2)
def _known(
    path: str,
    _: str,
    columns: str | None,
    stamp: tuple[int, int],
    output_len: int | None,
    time_unit: str | None,
) -> RequestLog:
    return read_request_log(path, columns, output_len, time_unit)


def _block_tokens(file: Path, prompt: Int32s, blocks: Ints) -> int:
    """Find the block size of which prompts have hashes, of their last partial one or not.

    Engines rarely have blocks of fewer than 16 tokens: a few lengths that fit these by chance are
    no evidence of them."""
    if not blocks.any():
        return 0
    what = "no block size"
    for size in _BLOCK_SIZES:
        full = prompt // size
        if ((blocks == full) | (blocks == -(-prompt // size))).all():
            if size >= _LEAST_BLOCK or len(np.unique(prompt)) >= _LENGTHS:
                return size
            what = f"blocks of {size} tokens alone"
            break
    worst = int(np.argmax(blocks))
    problem = f"hash_ids fit {what}, e.g. {blocks[worst]} of {prompt[worst]} tokens"
    allowed = "one id per block of 512 tokens, or of another power of two of 16 to 2048"
    raise InputError(str(file), problem, allowed)
