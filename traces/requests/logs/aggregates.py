"""Files that hold counts of requests over time, not requests: usage exports, and Prometheus.

OpenAI's usage API (a page of buckets of ``start_time``, ``end_time`` and ``results``), LiteLLM's
daily activity, any table with a column that counts requests, and answers of Prometheus to
``query_range``. They say a rate (``--load``), and no lengths but means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.arrays import Floats, Ints
from eldr_sim.errors import InputError
from eldr_sim.traces.requests.logs.table_columns import (
    DATE,
    field_of,
    guessed_time,
    is_number,
    names_of,
    time_ns,
)

_COUNT = re.compile(
    r"(?:n|num|no|number|total|api|successful|failed|model|llm|count)*"
    r"(?:model|llm|api)?(?:requests?|calls|queries|observations|traces|generations|count)"
    r"(?:s?count|total|s)?"
)
_MEAN = re.compile(r"avg|average|mean|median|p50|per_?(?:request|call)", re.I)
#: Regular steps of time that no requests have, s; prompts this long are sums where times have no
#: day.
_STEP_S, _SUM_TOKENS = 60, 20_000
_DAY_NS = 86_400 * 10**9
_EPOCH_NS = 10**18


def count_column(names: Iterable[str], records: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the column that counts the requests of a row; None where rows are requests."""
    for name in names:
        plain = re.sub(r"[\W_]", "", name.rpartition(".")[2]).lower()
        if not _COUNT.fullmatch(plain):
            continue
        values = []
        for record in records:
            try:
                values.append(field_of(record, name))
            except KeyError:
                continue
        numbers = [float(value) for value in values if is_number(value)]
        known = [value for value in values if value not in (None, "")]
        whole = len(numbers) == len(known) and all(v == int(v) >= 0 for v in numbers)
        if whole and max(numbers, default=0) > 1:
            return name
    return None


def is_even(when_ns: Ints, prompt: Ints) -> bool:
    """Whether times are the even steps of sums: of a minute or more, on full ones of the clock."""
    steps = np.unique(when_ns)
    if len(steps) < 3:
        return False
    gaps = np.unique(np.diff(steps))
    gap = int(gaps[0])
    if len(gaps) > 1 or gap < _STEP_S * 10**9 or gap % (_STEP_S * 10**9):
        return False
    if int(steps[0]) % min(gap, _DAY_NS):
        return False
    return int(steps[0]) >= _EPOCH_NS or float(prompt.mean()) >= _SUM_TOKENS


def unfolded(record: Any) -> list[dict[str, Any]] | None:
    """Return the buckets of OpenAI's usage API, sums of each; None where it is none."""
    if not isinstance(record, Mapping) or not isinstance(record.get("data"), list):
        return None
    buckets = record["data"]
    if not buckets or not all(
        isinstance(b, Mapping) and isinstance(b.get("results"), list) and "start_time" in b
        for b in buckets
    ):
        return None
    rows = []
    for bucket in buckets:
        sums: dict[str, Any] = {"num_model_requests": 0}
        sums |= {name: bucket[name] for name in ("start_time", "end_time") if name in bucket}
        for result in bucket["results"]:
            for name, value in result.items():
                if type(value) is int:
                    sums[name] = sums.get(name, 0) + value
        rows.append(sums)
    return rows


def refuse(file: Path, records: Sequence[Mapping[str, Any]], counts: str | None) -> None:
    """Raise the InputError of a file of counts that is given as requests."""
    if counts is not None and guessed_time(names_of(records[0]), records) is None:
        problem = f"holds counts of requests ({counts!r}) without times, not requests"
        raise InputError(str(file), problem, "a log of requests, with times")
    what = "sums over even steps of time" if counts is None else f"counts of requests ({counts!r})"
    allowed = f"--load {file.name} for its rate" if counts is not None else "a log of requests"
    lengths = []
    if counts is not None:
        total = _sum(records, counts)
        for option, words in (("input", ("input", "prompt")), ("output", ("output", "completion"))):
            names = names_of(records[0])
            fit = [n for n in names if any(w in n.lower() for w in words) and "token" in n.lower()]
            fit = [n for n in fit if "cached" not in n.lower() and "audio" not in n.lower()]
            if fit and total and (tokens := _tokens(records, fit[0], counts)):
                lengths.append(f"--{option}-len {max(1, round(tokens / total))}")
    if lengths:
        allowed += f", its mean lengths by {' '.join(lengths)}"
    raise InputError(str(file), f"holds {what}, not requests: it is a usage export", allowed)


def _tokens(records: Sequence[Mapping[str, Any]], name: str, counts: str) -> float:
    """Return the tokens of all requests, of a column of sums or of means."""
    if not _MEAN.search(name):
        return _sum(records, name)
    return sum(_sum([record], name) * _sum([record], counts) for record in records)


def _sum(records: Sequence[Mapping[str, Any]], name: str) -> float:
    total = 0.0
    for record in records:
        try:
            value = field_of(record, name)
        except KeyError:
            continue
        total += float(value) if is_number(value) else 0.0
    return total


def bucket_rates(
    file: Path, names: Sequence[str], records: Sequence[Mapping[str, Any]], counts: str
) -> tuple[Floats, Floats]:
    """Return the edges, s from 0, and the rates between them, 1/s; raises InputError."""
    begins, ends = _bounds(file, names, records)
    numbers = np.array([float(field_of(record, counts) or 0) for record in records])
    starts, inverse = np.unique(begins, return_inverse=True)
    totals = np.bincount(inverse, weights=numbers)
    if ends is None:
        if len(starts) < 2:
            raise InputError(str(file), "has a single time step without an end", "two or more")
        widths = np.append(np.diff(starts), np.diff(starts)[-1])
        widths = np.minimum(widths, np.median(widths))
    else:
        widths = np.zeros(len(starts))
        np.maximum.at(widths, inverse, ends - begins)
    if not (widths > 0).all():
        raise InputError(str(file), "has a time step of length 0", "ends after starts")
    edges, rates = [0.0], []
    for begin, width, total in zip(starts - starts[0], widths, totals, strict=True):
        if begin > edges[-1] + 1e-6:  # nothing came between
            edges.append(float(begin))
            rates.append(0.0)
        if begin < edges[-1] - 1e-6:
            raise InputError(str(file), "has overlapping time steps", "one after the other")
        edges.append(float(begin + width))
        rates.append(float(total / width))
    return np.array(edges), np.array(rates)


def _bounds(
    file: Path, names: Sequence[str], records: Sequence[Mapping[str, Any]]
) -> tuple[Floats, Floats | None]:
    found = guessed_time(names, records)
    if found is None or found[0] == "time_UNIT":
        problem = "has no times" if found is None else f"{found[1]!r} has no known unit of time"
        raise InputError(str(file), problem, "a column of ISO 8601 times, or seconds since 1970")
    key, column = found
    unit = key.partition("_")[2] or DATE
    ending = next((n for n in names if n.lower() in ("end_time", "endtime", "end")), None)

    def seconds(name: str) -> Floats:
        try:
            return np.array([time_ns(unit, field_of(r, name)) / 1e9 for r in records])
        except (ValueError, TypeError, KeyError, OverflowError):
            raise InputError(str(file), f"{name!r} holds no times", "times") from None

    return seconds(column), None if ending is None else seconds(ending)


def is_prometheus(record: Any) -> bool:
    """Whether a JSON value is an answer of Prometheus's."""
    return (
        isinstance(record, Mapping)
        and isinstance(record.get("data"), Mapping)
        and "resultType" in record["data"]
    )


def prometheus_rates(file: Path, record: Mapping[str, Any]) -> tuple[Floats, Floats]:
    """Return the edges, s from 0, and the rates between them, 1/s; raises InputError.

    Series without a name are rates and add up; those of a counter of requests, ``..._total`` or
    ``..._count``, give what they grow by (a fall is an engine's start)."""
    data = record["data"]
    allowed = "query_range of rate(vllm:request_success_total[1m]), or of the counter"
    if data["resultType"] != "matrix" or not data.get("result"):
        raise InputError(str(file), f"holds a {data['resultType']} of Prometheus's", allowed)
    total: dict[float, float] = {}
    try:
        for series in data["result"]:
            name = str(series.get("metric", {}).get("__name__", ""))
            points = [(float(at), float(value)) for at, value in series["values"]]
            if name and "request" not in name:
                raise InputError(str(file), f"{name} counts no requests", allowed)
            if name and not name.endswith(("_total", "_count", "_sum")):
                raise InputError(str(file), f"{name} is neither a counter nor a rate", allowed)
            if name:
                grown = [
                    (at, (value - last if value >= last else value) / (at - before))
                    for (before, last), (at, value) in pairwise(points)
                ]
                points = [(at, rate) for (at, _), (_, rate) in zip(points[:-1], grown, strict=True)]
            for at, rate in points:
                total[at] = total.get(at, 0.0) + (rate if np.isfinite(rate) else 0.0)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError):
        raise InputError(str(file), "is not a range of Prometheus's", allowed) from None
    times = np.array(sorted(total))
    if len(times) < 2:
        raise InputError(str(file), "holds fewer than two times", allowed)
    rates = np.array([total[at] for at in times.tolist()])
    step = float(np.median(np.diff(times)))
    return np.append(times - times[0], times[-1] - times[0] + step), rates
