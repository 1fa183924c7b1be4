"""Requests of benchmark results: ``vllm bench serve``, AIPerf and GuideLLM.

``vllm bench serve --save-result --save-detailed``: ``input_lens``, ``output_lens`` (none: failed)
and, in newer versions, ``start_times`` (s). AIPerf's ``profile_export.jsonl``, a line a request:
``metadata.request_start_ns`` (or ``timestamp_ns``), ``metrics.input_sequence_length`` and
``output_sequence_length`` (none: failed), without the warm-up. GuideLLM's ``run --output
kind=json``: of its one benchmark the successful requests, ``request_start_time`` (s),
``prompt_tokens`` and ``output_tokens``."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.traces.requests.logs.log_rows import Row, scaled_ns, session_of


def is_vllm_result(record: Any) -> bool:
    """Whether a JSON value is a result of ``vllm bench serve``."""
    return isinstance(record, dict) and ("input_lens" in record or "total_input_tokens" in record)


def vllm_rows(file: Path, record: Mapping[str, Any]) -> Iterator[Row]:
    """Return the requests of a result, in the order in which they were sent; raises InputError."""
    if "input_lens" not in record:
        raise InputError(str(file), "has no lengths of requests", "a result of --save-detailed")
    columns = [record["input_lens"], record.get("output_lens"), record.get("start_times")]
    if columns[2] is None:
        columns[2] = [0.0] * len(columns[0])
    if len({len(c) if isinstance(c, list) else -1 for c in columns}) != 1:
        problem = "input_lens, output_lens and start_times differ in length"
        raise InputError(str(file), problem, "one of each for every request")
    for number, (prompt, output, start) in enumerate(zip(*columns, strict=True)):
        if type(prompt) is not int or type(output) is not int or not _is_number(start):
            problem = f"got {prompt!r:.20}, {output!r:.20}, {start!r:.20}"
            raise InputError(f"{file} request {number}", problem, "tokens, tokens, seconds")
        try:
            when_ns = scaled_ns(start, 1e9)
        except (ValueError, OverflowError):
            raise InputError(f"{file} request {number}", f"starts at {start!r:.30}", "s") from None
        yield Row(when_ns, prompt, output)


def is_aiperf(record: Any) -> bool:
    """Whether a JSON value is a record of AIPerf's ``profile_export.jsonl``."""
    return isinstance(record, dict) and isinstance(record.get("metadata"), dict)


def aiperf_rows(file: Path, records: Iterable[Any]) -> Iterator[Row]:
    """Return the requests of AIPerf's records; raises InputError."""
    for number, record in enumerate(records, start=1):
        try:
            metadata, metrics = record["metadata"], record.get("metrics") or {}
            if metadata.get("benchmark_phase", metadata.get("credit_phase")) == "warmup":
                continue
            when = metadata.get("request_start_ns", metadata.get("timestamp_ns"))
            lengths = [
                (metrics.get(f"{name}_sequence_length") or {"value": 0})["value"]
                for name in ("input", "output")
            ]
            if not all(map(_is_number, (when, *lengths))) or any(n != int(n) for n in lengths):
                raise TypeError
            # The conversation is the data set's, which many sessions may send.
            names = metadata.get("x_correlation_id"), metadata.get("conversation_id")
            session = next(filter(None, map(session_of, names)), "")
            yield Row(scaled_ns(when, 1), int(lengths[0]), int(lengths[1]), (), session)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise InputError(
                f"{file} line {number}",
                f"got {str(record)!r:.80}",
                "metadata.request_start_ns, metrics.input_sequence_length, "
                "metrics.output_sequence_length",
            ) from None


def is_guidellm(record: Any) -> bool:
    """Whether a JSON value is a report of GuideLLM."""
    return isinstance(record, dict) and isinstance(record.get("benchmarks"), list)


def guidellm_rows(file: Path, report: Mapping[str, Any]) -> Iterator[Row]:
    """Return the requests of a report of one benchmark; raises InputError."""
    benchmarks = report["benchmarks"]
    if len(benchmarks) != 1:
        raise InputError(str(file), f"holds {len(benchmarks)} benchmarks", "a report of one rate")
    return guidellm_requests(file, benchmarks[0])


def guidellm_requests(file: Path, benchmark: Mapping[str, Any]) -> Iterator[Row]:
    """Return the successful requests of one benchmark of GuideLLM's; raises InputError."""
    names = ("request_start_time", "prompt_tokens", "output_tokens")
    try:
        for request in benchmark["requests"]["successful"]:
            when, prompt, output = (request[name] for name in names)
            if not _is_number(when) or type(prompt) is not int or type(output) is not int:
                raise TypeError
            yield Row(scaled_ns(when, 1e9), prompt, output)
    except (ValueError, KeyError, TypeError, OverflowError):
        problem = "a benchmark lacks requests or their figures"
        raise InputError(
            str(file), problem, f"requests.successful with {', '.join(names)}"
        ) from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
