"""What was read of a log or a benchmark's result: rows, what was left out, times, models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.arrays import Ints
from eldr_sim.errors import InputError
from eldr_sim.traces.requests.logs.table_columns import UNITS_NS

#: A log whose unit of time is a custom alone is doubted below this span, s, and beyond these mean
#: rates, requests/s, of that many requests or more: in a unit a thousand times as large or as
#: small, no log whose rate is between them stays between them.
_SHORTEST_S, _SLOWEST, _FASTEST, _MANY = 1.0, 0.05, 50.000001, 10
_NEVER = 1e-3  #: mean requests/s below which a unit that was named is doubted, too


@dataclass(frozen=True)
class LogHeader:
    """What a file says of itself, and what was taken of it."""

    file: str
    format: str
    rows: int  #: requests that it holds, those left out among them
    left_out: Mapping[str, int] = field(default_factory=dict)  #: how many, by the reason
    #: What the times are: a unit, ``dates``, or where they come from; empty: there are none.
    times: str = ""
    span_s: float = 0.0
    rate: float | None = None  #: mean requests per second; None where all come at once
    prompts: tuple[int, int, float] = (0, 0, 0.0)  #: shortest, longest, mean, tokens
    outputs: tuple[int, int, float] = (0, 0, 0.0)
    block_tokens: int = 0  #: of a prefix block; 0: prompts have no hashes
    models: tuple[str, ...] = ()  #: that served or were asked for
    engine: str = ""
    max_concurrency: int | None = None  #: with which the file says that it was sent
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}


def header_in_words(header: Mapping[str, Any]) -> str:
    """Return `LogHeader.as_dict` as a sentence."""
    said = [f"{header['rows']:,} requests of {header['file']} ({header['format']})"]
    if header["left_out"]:
        total = sum(header["left_out"].values())
        reasons = ", ".join(f"{n:,} {why}" for why, n in header["left_out"].items())
        said.append(f"{total:,} left out ({reasons})")
    if header["times"]:
        rate = "" if header["rate"] is None else f", {_number(header['rate'])}/s"
        said.append(f"times {header['times']}: {_number(header['span_s'])} s{rate}")
    else:
        said.append("no times")
    for name in ("prompts", "outputs"):
        low, high, mean = header[name]
        said.append(f"{name} {low:,}-{high:,} tokens, mean {mean:,.0f}")
    if header["block_tokens"]:
        said.append(f"prefix blocks of {header['block_tokens']:,} tokens")
    if header["models"]:
        more = ", ..." if len(header["models"]) > 3 else ""
        said.append("model " + ", ".join(header["models"][:3]) + more)
    if header["engine"]:
        said.append(f"engine {header['engine']}")
    if header["max_concurrency"]:
        said.append(f"sent with {header['max_concurrency']} in flight")
    return "; ".join([*said, *header["notes"]])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def check_unit(
    file: Path, when_ns: Ints, unit: str, column: str, longest_s: float, *, asks: bool
) -> str:
    """Check that a log's span fits its unit of time; return a doubt, or none.

    ``asks``: whether nothing but custom says the unit; then a doubt raises InputError."""
    n = len(when_ns)
    if n < 2 or not unit:
        return ""
    begin = int(when_ns.min()) / 1e9
    span = int(when_ns.max()) / 1e9 - begin
    if span <= 0.0:
        return f"all requests come at once: does {column!r} say when they come?"
    rate = (n - 1) / span
    doubt = ""
    # Milliseconds since 1970 are no whole nanoseconds as floating-point numbers.
    off_ns = np.abs((when_ns + 500_000) % 1_000_000 - 500_000)
    if asks and unit == "ms" and (off_ns > 999).any():
        doubt = "is a fraction of a millisecond"
    elif span < _SHORTEST_S:
        doubt = f"spans {span:.3g} s"
    elif span > longest_s:
        doubt = f"spans {span / 86400.0:,.3g} days"
    elif n >= _MANY and not _SLOWEST <= rate <= _FASTEST:
        doubt = f"spans {span:,.4g} s, {rate:.3g} requests/s,"
    if not doubt:
        written = begin / UNITS_NS[unit]
        dates = (other for other, ns in UNITS_NS.items() if _is_date(written * ns))
        other = "" if _is_date(begin) else next(dates, "")
        return f"{column!r} holds dates if it is in {other}: is it in {unit}?" if other else ""
    if asks:
        problem = f"{column!r} {doubt} if it is in {unit}, which nothing in the file says"
        allowed = f"--time-unit s, ms, us or ns (or --columns time_UNIT={column}, with its unit)"
        raise InputError(str(file), problem, allowed)
    if span < _SHORTEST_S or span > longest_s or not _NEVER < rate < 1.0 / _NEVER:
        return f"the log {doubt.rstrip(',')}: is {column!r} in {unit}?"
    return ""


def _is_date(seconds: float) -> bool:
    """Whether seconds since 1970 are a time from 2001 to 2096."""
    return 1e9 <= seconds < 4e9


def told_lengths(lengths: Ints) -> tuple[int, int, float]:
    """Return the shortest, the longest and the mean length."""
    return int(lengths.min()), int(lengths.max()), round(float(np.mean(lengths)), 3)
