"""Which requests of a log go on with which: from its own lines, or from a file beside it."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.inputs import regular_file
from eldr_sim.traces.requests.log_rows import Row

if TYPE_CHECKING:
    from eldr_sim.traces.requests.request_logs import RequestLog

#: ``session``, ``parent``, ``gap_s``, ``after_end``, ``joins`` as in `request_logs.RequestLog`.
Sessions = dict[str, Any]


def sessions_of(rows: Sequence[Row]) -> Sessions:
    """Return the sessions of a log's requests, in order of arrival.

    A request goes on with the one that it names, or else with the one before it of its session.
    """
    numbers: dict[str | int, int] = {}
    last: dict[str, int] = {}
    session: list[int] = []
    parent, gap_s, after = [], [], []
    joins: list[tuple[int, int]] = []
    for i, row in enumerate(rows):
        before = last.get(row.parent or row.session, -1) if row.parent or row.session else -1
        others = {last[name] for name in row.joins if name in last}
        if before < 0 and others:
            before = max(others)
        joins += [(i, other) for other in sorted(others - {before})]
        if before >= 0 and not row.session:
            session.append(session[before])
        else:
            session.append(numbers.setdefault(row.session or i, len(numbers)))
        parent.append(before)
        since = (row.when_ns - rows[before].when_ns) / 1e9 if before >= 0 else 0.0
        gap_s.append(since if row.after_s is None else row.after_s)
        after.append(row.after_s is not None)
        last.update(dict.fromkeys(filter(None, (row.session, row.name)), i))
    found = {"session": np.array(session, np.int32)}
    if max(parent) < 0:
        return found
    more = {"parent": np.array(parent, np.int32), "gap_s": np.array(gap_s)}
    if joins:
        more["joins"] = np.array(joins, np.int32)
    return found | more | {"after_end": np.array(after)}


def read_sessions(path: Path, log: RequestLog) -> Sessions:
    """Read the sessions of a log from a CSV with ``request``, ``parent`` and ``gap_s``.

    ``request`` is the number of the log's line, from 0, and ``parent`` that of the one it goes on
    with, -1 where it begins a session; ``gap_s`` lies between their arrivals.

    Raises InputError if the file does not fit the log.
    """
    n, field = len(log.arrival_s), "sessions_file"
    if not log.in_order:
        problem = f"lines of {log.path.name} are not in order of arrival, and it numbers lines"
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
    if log.n_dropped or not np.isfinite(gap_s).all() or (gap_s < 0).any():
        raise InputError(field, f"{path.name} does not fit {log.path.name}", "a session file of it")
    session = np.arange(n)
    for request in np.flatnonzero(parent >= 0).tolist():
        session[request] = session[parent[request]]
    _, number = np.unique(session, return_inverse=True)
    found = {"session": number.astype(np.int32), "parent": parent, "gap_s": gap_s}
    return found | {"after_end": np.zeros(n, np.bool_)}
