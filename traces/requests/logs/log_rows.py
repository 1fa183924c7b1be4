"""Rows of request logs, and times in them."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.inputs import regular_file

_TIMESTAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[ T](\d\d:\d\d(?::\d\d)?)(?:\.(\d{1,9}))? ?(Z|[+-]\d\d:?\d\d)?)?"
)


class Row(NamedTuple):
    """A request of a log."""

    when_ns: int  #: since any origin
    prompt: int  #: tokens
    output: int  #: tokens
    hashes: Sequence[int] = ()  #: of the prompt's blocks
    session: str = ""
    priority: int | None = None
    #: Seconds after the end of the turn before, where a log says so; its name, and whose turn it
    #: goes on with: the one before of its session where it is not named.
    after_s: float | None = None
    name: str = ""
    parent: str = ""
    joins: Sequence[str] = ()  #: other requests whose ends it waits for


def session_of(value: object) -> str:
    """Return the name of a session; none of what is null, not a number or empty text."""
    return "" if value is None or value != value else str(value)


def timestamp_ns(text: str) -> int:
    """Return an ISO 8601 time, UTC unless it says otherwise, in ns; raises ValueError."""
    # By hand for the fraction: Azure writes 100 ns digits, which datetime would drop.
    match = _TIMESTAMP.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r:.40} is not an ISO 8601 time")
    day, clock, fraction, zone = match.groups()
    if zone is not None and len(zone) == 5:
        zone = f"{zone[:3]}:{zone[3:]}"
    moment = datetime.fromisoformat(f"{day}T{clock or '00:00'}{zone or '+00:00'}")
    return _checked_ns(int(moment.timestamp()) * 10**9 + int((fraction or "").ljust(9, "0")))


def scaled_ns(value: float, unit_ns: float) -> int:
    """Return a time in a unit given in ns; raises ValueError beyond 146 years from 1970."""
    if not math.isfinite(value):
        raise ValueError(value)
    return _checked_ns(round(value * unit_ns))


def _checked_ns(ns: int) -> int:
    if not abs(ns) < 2**62:  # what a difference of two can hold
        raise ValueError(ns)
    return ns


#: ``session``, ``parent``, ``gap_s``, ``after_end``, ``joins`` as in `request_logs.RequestLog`.
Sessions = dict[str, Any]


def read_sessions(path: Path, log: Path, n: int, *, in_order: bool, dropped: bool) -> Sessions:
    """Read the sessions of a log from a CSV with ``request``, ``parent`` and ``gap_s``: line
    numbers of the log from 0 (-1: begins a session), and seconds between their arrivals.

    ``n``: requests of the log; its lines are ``in_order`` of arrival or not, some ``dropped`` or
    none. Raises InputError."""
    field = "sessions_file"
    if not in_order:
        problem = f"lines of {log.name} are not in order of arrival, and it numbers lines"
        raise InputError(field, problem, "a log sorted by time")
    file = regular_file(path, field)
    parent, gap_s = np.full(n, -1, np.int32), np.zeros(n)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines)
        for row in rows:
            try:
                request, before = int(row["request"]), int(row["parent"])
                if not (-1 <= before < request < n):
                    raise ValueError
                parent[request] = before
                gap_s[request] = float(row["gap_s"]) if before >= 0 else 0.0
            except (ValueError, KeyError, TypeError):
                problem = f"{path.name} line {rows.line_num} names no request before another"
                allowed = f"request,parent,gap_s of a log of {n} requests, none dropped"
                raise InputError(field, problem, allowed) from None
    if dropped or not np.isfinite(gap_s).all() or (gap_s < 0).any():
        raise InputError(field, f"{path.name} does not fit {log.name}", "a session file of it")
    session = np.arange(n)
    for request in np.flatnonzero(parent >= 0).tolist():
        session[request] = session[parent[request]]
    _, number = np.unique(session, return_inverse=True)
    found = {"session": number.astype(np.int32), "parent": parent, "gap_s": gap_s}
    return found | {"after_end": np.zeros(n, np.bool_)}
