"""Request logs in the formats that serving traces are published in (docs/formats.md).

Azure CSV (2023, 2024); BurstGPT CSV (5.3 million rows, 246 MB, take 21 s and 1.9 GB of memory);
Mooncake JSONL: ``timestamp`` or ``timestamp_ms`` (ms), ``input_length``, ``output_length`` and
optionally ``hash_ids`` (equal ones mean equal prefixes; the block size is found from the data),
``session_id``, ``delay`` (ms from the answer before), ``request_id`` and ``wait_for``; Bailian
JSONL with ``chat_id``, ``parent_chat_id`` (-1: none) and seconds. All may have a ``priority``, as
in vLLM's API. Others: `agent_logs`, `conversation_files`, `multi_turn_files`, `benchmark_logs`, and
any table whose columns are named (`column_logs`)."""

import csv
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from eldr_sim.arrays import Array, Bools, Floats, Int32s, Ints, Words
from eldr_sim.errors import InputError
from eldr_sim.inputs import regular_file
from eldr_sim.traces.requests.logs import benchmark_logs
from eldr_sim.traces.requests.logs.agent_logs import agent_rows, is_agent_session
from eldr_sim.traces.requests.logs.column_logs import column_rows, likely_columns
from eldr_sim.traces.requests.logs.conversation_files import conversation_rows, is_conversations
from eldr_sim.traces.requests.logs.log_rows import (
    Row,
    read_sessions,
    scaled_ns,
    session_of,
    sessions_of,
    timestamp_ns,
)
from eldr_sim.traces.requests.logs.multi_turn_files import is_multi_turn, multi_turn_rows

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
_SESSION = "Session ID"
_PRIORITY = "priority"
_MOONCAKE = "timestamp or timestamp_ms, input_length, output_length, hash_ids"
_BAILIAN = "chat_id, parent_chat_id, timestamp, input_length, output_length, hash_ids"
_BLOCK_SIZES = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1, 1024, 2048)
_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, eq=False)
class RequestLog:
    """Requests as a serving system recorded them, in order of arrival."""

    #: Where it was read from, and as what: ``azure``, ``burstgpt``, ``mooncake``, ``bailian``,
    #: ``weka``, ``guidellm``, ``aiperf``, ``aiperf multi_turn``, ``vllm bench`` or
    #: ``conversations``, or a table.
    path: Path
    format: str
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
    #: Requests left out because they have no prompt or no output tokens: they failed.
    n_dropped: int
    checksum: str  #: SHA-256 of the file
    in_order: bool = True  #: whether the file's lines are in order of arrival
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


def read_request_log(
    path: str | os.PathLike[str], columns: str | None = None, output_len: int | None = None
) -> RequestLog:
    """Read a request log in the format that its first line shows, or by ``columns``
    (`column_logs`). ``output_len``: tokens of answers that a file leaves open (`multi_turn_files`).
    Raises InputError."""
    file = Path(path)
    try:
        source = regular_file(file, str(file))
        if columns is not None:
            return _assemble(file, *column_rows(file, columns))
        with source.open(encoding="utf-8-sig", newline="") as lines:
            first = lines.readline()
            if first.lstrip().startswith("{"):
                return _assemble(file, *_json_rows(file, first, lines, output_len))
            lines.seek(0)
            header = [cell.strip() for cell in first.split(",")]
            if all(name in header for name in _AZURE):
                return _assemble(file, "azure", _csv_rows(file, lines, _AZURE, timestamp_ns))
            if all(name in header for name in _BURSTGPT):
                rows = _csv_rows(file, lines, _BURSTGPT, lambda s: scaled_ns(float(s), 1e9))
                return _assemble(file, "burstgpt", rows)
    except OSError as error:
        raise InputError(str(file), error.strerror or "cannot be read") from None
    except csv.Error as error:
        raise InputError(str(file), f"not valid CSV: {error}") from None
    except UnicodeDecodeError:
        raise InputError(str(file), "is not UTF-8 text") from None
    allowed = (
        f"Azure CSV ({','.join(_AZURE)}), BurstGPT CSV ({','.join(_BURSTGPT)}), Mooncake JSONL, "
        "Weka's sessions, a result of vllm bench serve, AIPerf or GuideLLM, or any table with "
        f"--columns {likely_columns(header)}"
    )
    raise InputError(str(file), f"unknown format, first line {first.strip()!r:.80}", allowed)


def known_log(
    path: str | os.PathLike[str],
    columns: str | None = None,
    sessions: str | None = None,
    output_len: int | None = None,
) -> RequestLog:
    """Return a log as `read_request_log` does; not read again unless the file has changed.
    ``sessions``: a file that says which requests go on with which, see `log_rows`."""
    file = regular_file(Path(path), str(path))
    about = file.stat()
    stamp = about.st_mtime_ns, about.st_size
    log = _known(str(file), str(file.resolve()), columns, stamp, output_len)
    if sessions is None:
        return log
    return replace(log, **read_sessions(Path(sessions), log))


@lru_cache(maxsize=2)
def _known(
    path: str, _: str, columns: str | None, stamp: tuple[int, int], output_len: int | None
) -> RequestLog:
    return read_request_log(path, columns, output_len)


def _json_rows(
    file: Path, first: str, lines: TextIO, output_len: int | None
) -> tuple[str, Iterator[Row]]:
    """Return the format of a file of JSON, and its requests; ``first`` is its first line."""
    record = _json(first)
    if record is None:  # one result over many lines?
        record, whole = _json(first + lines.read()), True
    else:
        whole = False
    if benchmark_logs.is_vllm_result(record):
        if not whole and any(line.strip() for line in lines):
            raise InputError(str(file), "holds more than one result", "one result a file")
        return "vllm bench", benchmark_logs.vllm_rows(file, record)
    if is_conversations(record):
        return "vllm conversations", conversation_rows(file, record)
    if benchmark_logs.is_guidellm(record):
        return "guidellm", benchmark_logs.guidellm_rows(file, record)
    others = map(_json, filter(str.strip, lines))
    if benchmark_logs.is_aiperf(record):
        return "aiperf", benchmark_logs.aiperf_rows(file, chain([record], others))
    if is_agent_session(record):
        return "weka", agent_rows(file, chain([record], others))
    if is_multi_turn(record):
        return "aiperf multi_turn", multi_turn_rows(file, chain([record], others), output_len)
    lines.seek(0)
    if isinstance(record, dict) and "parent_chat_id" in record:
        return "bailian", _json_lines(file, lines, _BAILIAN, _bailian_row)
    return "mooncake", _json_lines(file, lines, _MOONCAKE, _mooncake_row)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _csv_rows(
    file: Path, lines: Iterator[str], columns: tuple[str, str, str], to_ns: Callable[[str], int]
) -> Iterator[Row]:
    rows = csv.reader(lines)
    header = [cell.strip() for cell in next(rows)]
    when, prompt, output = (header.index(name) for name in columns)
    session = header.index(_SESSION) if _SESSION in header else None
    priority = header.index(_PRIORITY) if _PRIORITY in header else None
    for row in rows:
        if not row:
            continue
        try:
            yield Row(
                to_ns(row[when]),
                int(row[prompt]),
                int(row[output]),
                (),
                "" if session is None else row[session],
                None if priority is None else int(row[priority]),
            )
        except (ValueError, IndexError, OverflowError):
            raise InputError(
                f"{file} line {rows.line_num}", f"got {','.join(row)!r:.80}", ",".join(columns)
            ) from None


def _json_lines(
    file: Path, lines: Iterator[str], fields: str, row: Callable[[Any], Row]
) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield row(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise InputError(f"{file} line {number}", f"got {line.strip()!r:.80}", fields) from None


def _mooncake_row(entry: Any) -> Row:
    when = entry["timestamp"] if "timestamp" in entry else entry["timestamp_ms"]
    priority, delay = entry.get(_PRIORITY), entry.get("delay")
    if priority is not None and type(priority) is not int:
        raise TypeError
    after = None if delay is None else float(delay) / 1e3
    session, name = session_of(entry.get("session_id")), session_of(entry.get("request_id"))
    joins = [str(other) for other in entry.get("wait_for") or ()]
    when_ns = scaled_ns(float(when), 1e6)
    return Row(when_ns, *_sizes(entry), session, priority, after, name, joins=joins)


def _bailian_row(entry: Any) -> Row:
    parent, name = str(entry["parent_chat_id"]), str(entry["chat_id"])
    when = scaled_ns(float(entry["timestamp"]), 1e9)
    return Row(when, *_sizes(entry), name=name, parent="" if parent == "-1" else parent)


def _sizes(entry: Any) -> tuple[int, int, list[int]]:
    """Return the tokens of prompt and answer, and the prompt's blocks."""
    hashes, lengths = entry.get("hash_ids", []), (entry["input_length"], entry["output_length"])
    if not all(type(n) is int for n in (*lengths, *hashes)):
        raise TypeError
    return *lengths, hashes


def _assemble(file: Path, kind: str, rows: Iterator[Row]) -> RequestLog:
    kept: list[Row] = []
    dropped = 0
    for row in rows:
        if min(row[1], row[2]) < 0 or max(row[1], row[2]) > _MAX_TOKENS:
            problem = f"{row[1]} prompt and {row[2]} output tokens"
            allowed = f"0..{_MAX_TOKENS}"
            raise InputError(f"{file} request {len(kept) + dropped + 1}", problem, allowed)
        if row[1] and row[2]:
            kept.append(row)
        else:
            dropped += 1
    if not kept:
        raise InputError(str(file), "holds no request with prompt and output tokens")
    in_order = all(one[0] <= other[0] for one, other in pairwise(kept))
    kept.sort(key=lambda row: row[0])
    when = np.array([row[0] for row in kept], dtype=np.int64)
    prompt = np.array([row[1] for row in kept], dtype=np.int32)
    blocks = np.array([len(row[3]) for row in kept], dtype=np.int64)
    indptr = np.concatenate([[0], np.cumsum(blocks)])
    try:
        hashes = np.fromiter(
            (h for row in kept for h in row[3]), dtype=np.uint64, count=int(indptr[-1])
        )
    except (OverflowError, ValueError):
        raise InputError(str(file), "a hash id is out of range", "0..2^64-1") from None
    return RequestLog(
        path=file,
        format=kind,
        arrival_s=(when - when[0]) / 1e9,
        prompt_len=prompt,
        output_len=np.array([row[2] for row in kept], dtype=np.int32),
        **sessions_of(kept),
        priority=_priorities(file, [row[5] for row in kept]),
        prefix_hash=hashes,
        prefix_indptr=indptr.astype(np.int64),
        prefix_block_tokens=_block_tokens(file, prompt, blocks),
        n_dropped=dropped,
        checksum=hashlib.sha256(file.read_bytes()).hexdigest(),
        in_order=in_order,
    )


def _priorities(file: Path, given: list[int | None]) -> Int32s | None:
    if all(priority is None for priority in given):
        return None
    try:
        return np.array([priority or 0 for priority in given], np.int32)
    except OverflowError:
        raise InputError(str(file), "a priority is out of range", "32 bits") from None


def _block_tokens(file: Path, prompt: Int32s, blocks: Ints) -> int:
    """Find the block size of which prompts have hashes, of their last partial one or not."""
    if not blocks.any():
        return 0
    for size in _BLOCK_SIZES:
        full = prompt // size
        if ((blocks == full) | (blocks == -(-prompt // size))).all():
            return size
    worst = int(np.argmax(blocks))
    problem = f"hash_ids fit no block size, e.g. {blocks[worst]} of {prompt[worst]} tokens"
    allowed = "one id per block of 512 tokens, or of another power of two up to 2048"
    raise InputError(str(file), problem, allowed)


def others_each_round(numbers: Array, rounds: int) -> Array:
    """Return numbers once for every round, in each of them others than before."""
    signed = numbers.astype(np.int64)
    begins = np.arange(rounds)[:, None] * (int(signed.max(initial=-1)) + 1)
    return (signed + begins).ravel().astype(numbers.dtype)


def chain_blocks(hash_ids: Words, indptr: Ints) -> Words:
    """Number prefix blocks so that equal numbers mean equal tokens from the prompt's start, by a
    block's id and the number of the one before; uint64 ``[n]``. Request ``i`` has
    ``hash_ids[indptr[i]:indptr[i + 1]]``."""
    numbers: dict[tuple[int, int], int] = {}
    chained: list[int] = []
    ids, edges = hash_ids.tolist(), indptr.tolist()
    for start, stop in pairwise(edges):
        number = -1
        for block in ids[start:stop]:
            number = numbers.setdefault((number, block), len(numbers))
            chained.append(number)
    return np.array(chained, np.uint64)
