"""Request logs as strangers write them: units, shapes, missing fields, sums, results of benchmarks.

``odd_log(seed, number, folder)`` writes one and says what its load is. The same numbers make the
same file on every machine."""

import csv
import datetime
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_EPOCH_S = 1_767_225_600.0
#: Formats by name: time column and the unit of the format, columns of lengths, other columns.
KNOWN: dict[str, tuple[str, str, str, str, dict[str, Any]]] = {
    "azure": ("TIMESTAMP", "date", "ContextTokens", "GeneratedTokens", {}),
    "burstgpt": ("Timestamp", "s", "Request tokens", "Response tokens", {"Model": "ChatGPT"}),
    "bailian": ("timestamp", "s", "input_length", "output_length", {"parent_chat_id": -1}),
    "mooncake": ("timestamp", "ms", "input_length", "output_length", {}),
    "dynamo replay": ("arrival_time_ms", "ms", "input_length", "output_length", {}),
    "splitwise": ("arrival_timestamp", "s", "prompt_size", "token_size", {"batch_size": 1}),
    "vidur": ("arrived_at", "s", "num_prefill_tokens", "num_decode_tokens", {}),
    "llmservingsim": ("arrival_time_ns", "ns", "input_toks", "output_toks", {}),
    "tracev2": ("arrival_time_us", "us", "input_tokens", "output_tokens", {"status": "ok"}),
    "litellm": ("startTime", "date", "prompt_tokens", "completion_tokens", {"model": "m"}),
    "langfuse": ("startTime", "date", "promptTokens", "completionTokens", {"model": "m"}),
}
#: Formats whose time has a unit by custom alone.
BY_CUSTOM = ("burstgpt", "bailian", "mooncake", "splitwise")
_TIMES = ("timestamp", "ts", "start_time", "created_at", "arrival_time", "sent", "Request Time",
          "arrival", "time")  # fmt: skip
_LENGTHS = (
    ("prompt_tokens", "completion_tokens"), ("inputTokens", "outputTokens"),
    ("prompt_len", "output_len"), ("ISL", "OSL"), ("n_prompt", "n_generated"), ("in", "out"),
    ("usage.prompt_tokens", "usage.completion_tokens"), ("Input Tokens", "Output Tokens"),
    ("context_tokens", "answer_tokens"), ("request.length", "response.length"),
)  # fmt: skip
_BESIDE = {"id": 7, "latency_ms": 812.5, "cached_tokens": 16, "user": "a", "e2e_latency": 2.25,
           "cost": 0.002, "total_time": 3.5, "status_code": 200}  # fmt: skip


@dataclass
class OddLog:
    """A file and its load."""

    path: Path
    what: str  #: what kind it is, in words
    when_s: list[float]  #: of each request
    lengths: list[tuple[int, int]]  #: of each request; 0: it has no answer
    options: dict[str, Any] = field(default_factory=dict)  #: of `read_request_log`
    rounded_s: float = 0.0  #: how far times in the file are from ``when_s``
    must_read: bool = False  #: whether a refusal is a fault
    must_refuse: bool = False  #: whether any load that is read is a fault
    timed: bool = True  #: whether the file says when requests come


def odd_log(seed: int, number: int, folder: Path) -> OddLog:
    """Write an odd log."""
    rng = np.random.default_rng([seed, number])
    made = [_known, _known, _strange, _strange, _strange, _result, _sums][rng.integers(7)]
    return made(rng, folder)


def _load(rng: Any) -> tuple[list[float], list[tuple[int, int]]]:
    n = int(rng.integers(12, 60))
    when = np.cumsum(rng.exponential(1.0 / rng.uniform(0.4, 8.0), n))
    lengths = [(int(a), int(b)) for a, b in rng.integers(5, 2000, (n, 2))]
    if rng.random() < 0.3:  # some have no answer
        for i in rng.choice(n, n // 5, replace=False):
            lengths[i] = (lengths[i][0], 0)
    return [float(at) for at in when], lengths


def _written(rng: Any, when: list[float], unit: str) -> tuple[list[Any], float]:
    """Return times as a file has them, and how far they are from the true ones."""
    if unit == "date":
        form = rng.integers(4)
        found = []
        for at in when:
            day = datetime.datetime.fromtimestamp(_EPOCH_S + at, datetime.UTC)
            text = day.isoformat(sep=" " if form == 0 else "T", timespec="microseconds")
            found.append([text, text.replace("+00:00", "Z"), text[:26], text][form])
        return found, 2e-6
    scale = _UNITS[unit]
    values = [at * scale for at in when]
    if rng.random() < 0.4:
        offset = _EPOCH_S * scale
        values = [value + offset for value in values]
    if unit == "s" and rng.random() < 0.7:
        return [round(value, 6) for value in values], 2e-6
    if unit == "ms" and rng.random() < 0.3:
        return [round(value, 3) for value in values], 2e-6
    return [int(value) for value in values], 1.0 / scale


def _file(rng: Any, folder: Path, rows: list[dict[str, Any]], kind: str) -> Path:
    path = folder / f"log.{kind.split()[0]}"
    if kind == "parquet":
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        try:
            pq.write_table(pa.table(columns), path)
        except pa.ArrowException:  # a column of several types
            kind = "csv"
        else:
            return path
    if kind.startswith("csv"):
        names = list(rows[0])
        text = io.StringIO(newline="")
        delimiter = [",", ",", ",", ";", "\t"][rng.integers(5)]
        quoting = [csv.QUOTE_MINIMAL, csv.QUOTE_ALL][int(rng.random() < 0.2)]
        ends = ["\n", "\r\n"][int(rng.random() < 0.3)]
        out = csv.writer(text, delimiter=delimiter, quoting=quoting, lineterminator=ends)
        out.writerow(names)
        out.writerows([["" if row[name] is None else row[name] for name in names] for row in rows])
        begin = "\ufeff" if rng.random() < 0.2 else ""
        path.write_text(begin + text.getvalue(), encoding="utf-8", newline="")
        return path
    nested = [_nested(row) for row in rows]
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, nested)) + ("\n" if rng.random() < 0.7 else ""))
    elif kind == "json array":
        path.write_text(json.dumps(nested, indent=[None, 1][rng.integers(2)]))
    else:
        path.write_text(json.dumps({"object": "list", "data": nested, "has_more": False}))
    return path


def _nested(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in row.items():
        inside = found
        *above, last = name.split(".")
        for part in above:
            inside = inside.setdefault(part, {})
        inside[last] = value
    return found


def _known(rng: Any, folder: Path) -> OddLog:
    """A format that is known, in its unit or another one."""
    name = [*KNOWN][rng.integers(len(KNOWN))]
    time, own, prompt, answer, beside = KNOWN[name]
    when, lengths = _load(rng)
    unit, asked = own, None
    if name in BY_CUSTOM:
        unit = ["s", "ms", "us", "ns"][rng.integers(4)] if rng.random() < 0.6 else own
        if rng.random() < 0.3:
            asked = unit
    times, rounded = _written(rng, when, unit)
    json_only = name in ("bailian", "mooncake", "dynamo replay", "llmservingsim")
    kind = "jsonl" if json_only else ["csv", "csv", "jsonl", "json array"][rng.integers(4)]
    rows = []
    for i, at in enumerate(times):
        row = {time: at, prompt: lengths[i][0], answer: lengths[i][1]} | beside
        rows.append(row | ({"chat_id": i} if name == "bailian" else {}))
    whole = all(isinstance(at, int) for at in times)
    span = max(when) - min(when)
    plain = unit == own and (unit != "ms" or whole or name == "dynamo replay") and span > 2.0
    plain = plain or asked is not None
    options: dict[str, Any] = {} if asked is None else {"time_unit": asked}
    what, timed = f"{name} in {unit}", True
    left = rng.random() if name == "mooncake" else 1.0
    if left < 0.15:  # optional fields of AIPerf's mooncake_trace
        lengths = [(one, 77) for one, _ in lengths]
        rows = [{key: value for key, value in row.items() if key != answer} for row in rows]
        options["output_len"], what = 77, f"{what}, no output lengths"
    elif left < 0.3:
        rows = [{key: value for key, value in row.items() if key != time} for row in rows]
        options, what, timed, plain = {}, f"{name}, no times", False, True
    path = _file(rng, folder, rows, kind)
    return OddLog(path, what, when, lengths, options, rounded, must_read=plain, timed=timed)


def _strange(rng: Any, folder: Path) -> OddLog:
    """A table of no known format, perhaps with faults."""
    when, lengths = _load(rng)
    unit = ["date", "s", "ms", "us", "ns"][rng.integers(5)]
    time = _TIMES[rng.integers(len(_TIMES))]
    if unit != "date" and rng.random() < 0.5:
        time += {"s": "_s", "ms": "_ms", "us": "_us", "ns": "_ns"}[unit]
    prompt, answer = _LENGTHS[rng.integers(len(_LENGTHS))]
    times, rounded = _written(rng, when, unit)
    beside = {name: _BESIDE[name] for name in _BESIDE if rng.random() < 0.3}
    rows: list[dict[str, Any]] = []
    for i, at in enumerate(times):
        row = dict(beside) | {time: at, prompt: lengths[i][0], answer: lengths[i][1]}
        names = list(row)
        rng.shuffle(names)
        rows.append({name: row[name] for name in (names if i == 0 else rows[0])})
    what, must_refuse = f"{time} in {unit}, {prompt}", False
    fault = rng.integers(12)
    bad = int(rng.integers(len(rows)))
    if fault < 5:
        value = ["n/a", -3, 12.5, True, "1e400"][fault]
        rows[bad][prompt if fault != 3 else answer] = value
        what, must_refuse = f"{what}, with {value!r}", True
    elif fault == 5:
        rows[bad][time] = "soon"
        what, must_refuse = f"{what}, with a time of 'soon'", True
    elif fault == 6:
        for i, row in enumerate(rows):
            if lengths[i][1] == 0:
                row[answer] = None
    elif fault == 7:
        order = rng.permutation(len(rows))
        rows = [rows[i] for i in order]
    kind = ["csv", "csv", "jsonl", "json array", "json list", "parquet"][rng.integers(6)]
    options: dict[str, Any] = {}
    if rng.random() < 0.4:
        key = "time" if unit == "date" else f"time_{unit}"
        options = {"columns": f"{key}={time},input={prompt},output={answer}"}
    elif rng.random() < 0.15:
        wrong = {"s": "ms", "ms": "us", "us": "s", "ns": "ms", "date": "s"}[unit]
        options = {"columns": f"time_{wrong}={time},input={prompt},output={answer}"}
        named = time.endswith(f"_{unit}")
        refused = named or unit == "date" or must_refuse
        path, what = _file(rng, folder, rows, kind), f"{what}, called {wrong}"
        return OddLog(path, what, when, lengths, options, rounded, must_refuse=refused)
    readable = bool(options) and not must_refuse
    return OddLog(_file(rng, folder, rows, kind), what, when, lengths, options, rounded,
                  must_read=readable, must_refuse=must_refuse)  # fmt: skip


def _result(rng: Any, folder: Path) -> OddLog:
    """A result of vllm's benchmark or SGLang's, with times or a rate."""
    _, lengths = _load(rng)
    n = len(lengths)
    rate = float(rng.uniform(0.5, 9.0))
    record: dict[str, Any] = {
        "backend": ["vllm", "sglang"][rng.integers(2)], "completed": n, "model_id": "org/model",
        "request_rate": rate, "max_concurrency": None, "total_input_tokens": 1,
        "input_lens": [a for a, _ in lengths], "output_lens": [b for _, b in lengths],
    }  # fmt: skip
    when = [i / rate for i in range(n)]
    what = "a result at a rate"
    if rng.random() < 0.4:
        record["start_times"] = [1000.0 + at for at in when]
        what = "a result with times"
    path = folder / "result.json"
    path.write_text(json.dumps(record, indent=[None, 2][rng.integers(2)]))
    # Gaps are drawn: the first and the last answer come when they come.
    return OddLog(path, what, when, lengths, {}, 0.35 * n / rate + 3.0 / rate, must_read=True)


def _sums(rng: Any, folder: Path) -> OddLog:
    """Sums over minutes, hours or days."""
    n = int(rng.integers(4, 30))
    step = [60, 300, 3600, 86400][rng.integers(4)]
    count = ["num_model_requests", "requests", "n_requests", "request_count", "api_requests",
             None][rng.integers(6)]  # fmt: skip
    prompt, answer = [("input_tokens", "output_tokens"), ("prompt_tokens", "completion_tokens")][
        rng.integers(2)
    ]
    dates = rng.random() < 0.5
    rows = []
    for i in range(n):
        at: Any = int(_EPOCH_S) + i * step
        if dates:
            at = datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat()
        row = {"start_time": at, prompt: 900 * (200 + i), answer: 150 * (200 + i)}
        rows.append(row | ({} if count is None else {count: 200 + i}))
    kind = ["csv", "jsonl", "json array", "json list"][rng.integers(4)]
    path = _file(rng, folder, rows, kind)
    key = "time" if dates else "time_s"
    options = {"columns": f"{key}=start_time,input={prompt},output={answer}"}
    given = options if rng.random() < 0.5 else {}
    return OddLog(path, f"sums by {step} s ({count})", [], [], given, must_refuse=True)
