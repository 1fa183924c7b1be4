"""Requests of benchmark results: ``vllm bench serve``, SGLang's, AIPerf and GuideLLM.

``vllm bench serve --save-result --save-detailed``: ``input_lens``, ``output_lens`` (none: failed)
and, in newer versions, ``start_times`` (s). Without these, and in SGLang's ``bench_serving
--output-details``, arrivals are drawn, once, as these benchmarks draw them: gamma-distributed gaps
at the file's ``request_rate`` and ``burstiness``, stretched to that mean. AIPerf's
``profile_export.jsonl``, a line a request: ``metadata.request_start_ns`` (or ``timestamp_ns``),
``metrics.input_sequence_length`` and ``output_sequence_length`` (none: failed), without the
warm-up. GuideLLM's ``run --output kind=json``: of its one benchmark the successful requests,
``request_start_time`` (s), ``prompt_tokens`` and ``output_tokens``."""

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Ints
from eldr_sim.errors import InputError
from eldr_sim.traces.requests.logs.log_rows import Row, scaled_ns, session_of
from eldr_sim.traces.streams import stream

_OF_RESULT = ("completed", "request_throughput", "request_rate", "backend")


def is_vllm_result(record: Any) -> bool:
    """Whether a JSON value is a result of ``vllm bench serve``; sums of tokens alone are none."""
    if not isinstance(record, dict):
        return False
    sums = "total_input_tokens" in record and not record.keys().isdisjoint(_OF_RESULT)
    return "input_lens" in record or sums


class StatedLoad(NamedTuple):
    """What a result of ``vllm bench serve`` or SGLang's says of its load."""

    rate: float  #: requests per second; infinite: all at once
    burstiness: float
    max_concurrency: int | None
    has_times: bool
    model: str
    engine: str

    @property
    def times(self) -> str:
        """Where the times of its requests come from, in words."""
        if self.has_times:
            return "as sent"
        if math.isinf(self.rate):
            return "all 0 (its request rate is inf)"
        return f"drawn at its request rate of {self.rate:g}/s"


def stated_load(file: Path, record: Mapping[str, Any]) -> StatedLoad:
    """Return what a result says of its load; raises InputError."""
    try:
        given = record.get("request_rate")
        rate = math.inf if given is None else float(given)
        burstiness = float(record.get("burstiness") or 1.0)
        limit = record.get("max_concurrency")
        most = None if limit in (None, "") else int(limit)
        if any(isinstance(v, bool) for v in (given, limit, record.get("burstiness"))):
            raise ValueError
        if most is not None and most != limit:
            raise ValueError
        if not rate > 0 or not 0 < burstiness < 1e9 or (most is not None and most < 1):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        names = ("request_rate", "max_concurrency", "burstiness")
        problem = ", ".join(f"{n} {record[n]!r:.20}" for n in names if n in record)
        raise InputError(str(file), problem, "numbers above 0, as its benchmark writes") from None
    has_times = record.get("start_times") is not None
    if record.get("ramp_up_strategy") and not has_times:
        problem = "its rate changed during the run, and it has no start_times"
        raise InputError(str(file), problem, "--save-detailed of a newer vLLM")
    model = record.get("model_id") or record.get("model")
    if not model and isinstance(info := record.get("server_info"), Mapping):
        model = info.get("model_path") or info.get("served_model_name")
    backend = record.get("backend") or record.get("endpoint_type") or ""
    return StatedLoad(rate, burstiness, most, has_times, str(model or ""), str(backend))


def drawn_times_ns(n: int, rate: float, burstiness: float) -> Ints:
    """Return ``n`` arrival times with gamma-distributed gaps and this mean rate."""
    gaps = stream(0, "arrivals of a file").gamma(burstiness, 1.0 / (rate * burstiness), n)
    when = np.cumsum(gaps)
    if when[-1] > 0:
        when *= n / rate / when[-1]
    return np.rint(when * 1e9).astype(np.int64)


def vllm_rows(file: Path, record: Mapping[str, Any], stated: StatedLoad) -> Iterator[Row]:
    """Return the requests of a result, in the order in which they were sent; raises InputError."""
    if "input_lens" not in record:
        allowed = "a result of vllm's --save-detailed, or SGLang's --output-details"
        raise InputError(str(file), "has no lengths of requests", allowed)
    columns = [record["input_lens"], record.get("output_lens"), record.get("start_times")]
    if columns[2] is None and isinstance(columns[0], list):
        n = len(columns[0])
        times = np.zeros(n, np.int64)
        if n and not math.isinf(stated.rate):
            times = drawn_times_ns(n, stated.rate, stated.burstiness)
        columns[2] = (times / 1e9).tolist()
    if len({len(c) if isinstance(c, list) else -1 for c in columns}) != 1:
        problem = "input_lens, output_lens and start_times differ in length"
        raise InputError(str(file), problem, "lists of equal length")
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
    if not isinstance(record, dict) or not isinstance(record.get("metadata"), dict):
        return False
    times = {"request_start_ns", "timestamp_ns", "benchmark_phase", "credit_phase"}
    return "metrics" in record or not times.isdisjoint(record["metadata"])


def aiperf_rows(file: Path, records: Iterable[Any], left_out: dict[str, int]) -> Iterator[Row]:
    """Return the requests of AIPerf's records, and count those of the warm-up in ``left_out``;
    raises InputError."""
    for number, record in enumerate(records, start=1):
        try:
            metadata, metrics = record["metadata"], record.get("metrics") or {}
            if metadata.get("benchmark_phase", metadata.get("credit_phase")) == "warmup":
                left_out["of the warm-up"] = left_out.get("of the warm-up", 0) + 1
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
    if not isinstance(record, dict) or not isinstance(record.get("benchmarks"), list):
        return False
    own = {"requests", "metrics", "config"}
    runs = record["benchmarks"]
    first = runs[0] if runs else {}
    return isinstance(first, dict) and (not first or not own.isdisjoint(first))


def guidellm_rows(file: Path, report: Mapping[str, Any], left_out: dict[str, int]) -> Iterator[Row]:
    """Return the requests of a report of one benchmark, and count those that failed in
    ``left_out``; raises InputError."""
    benchmarks = report["benchmarks"]
    if len(benchmarks) != 1:
        raise InputError(str(file), f"holds {len(benchmarks)} benchmarks", "a report of one rate")
    requests = benchmarks[0].get("requests") if isinstance(benchmarks[0], Mapping) else None
    for kind in ("errored", "incomplete"):
        if isinstance(requests, Mapping) and requests.get(kind):
            left_out[kind] = len(requests[kind])
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
