"""What happened to the workers of a real fleet, as events of a run (docs/faults.md): a CSV of
worker starts and stops, ``kubectl get events -o json``, or a range export of Prometheus."""

import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from eldr_sim.errors import InputError
from eldr_sim.inputs import parse_json, read_text
from eldr_sim.kinds import Row
from eldr_sim.traces.requests.logs.log_rows import scaled_ns, timestamp_ns

#: What a worker does from a moment on: ``up``: it serves; ``down``: it has died; ``leaves``: it
#: finishes what it has, and gets nothing new.
State = Literal["up", "down", "leaves"]

#: Words of a CSV.
_WORDS: dict[str, State] = {
    **dict.fromkeys(("start", "started", "ready", "up", "running", "1", "join", "healthy"), "up"),
    **dict.fromkeys(("fail", "failed", "crash", "crashed", "down", "dead", "killed", "kill", "0",
                     "unhealthy", "oomkilled", "evicted"), "down"),
    **dict.fromkeys(("stop", "stopped", "drain", "drained", "terminated", "scaledown"), "leaves"),
}  # fmt: skip
#: A restart is an end and, after ``--start-up``, a start.
_RESTARTS = ("restart", "restarted")
#: Reasons of Kubernetes' events of a pod (kubelet/events/event.go).
_REASONS: dict[str, State] = {
    "Started": "up", "Killing": "leaves", "BackOff": "down", "OOMKilling": "down",
    "Evicted": "down", "Preempting": "down", "NodeNotReady": "down", "TaintManagerEviction": "down",
}  # fmt: skip
#: Names of columns, and of labels of a series, in the order in which they are taken.
_TIMES = ("time", "timestamp", "ts", "when", "date")
_NAMES = ("worker", "pod", "engine", "instance", "replica", "host")
_STATES = ("event", "state", "status", "action", "type")
#: A series without a sample for this many of its steps is down.
_GAP = 2.5
_EPOCH_NS = 10**9 * 10**9  #: from here on a time is one since 1970: September 2001


class Change(NamedTuple):
    """A worker's new state."""

    when_ns: int
    worker: str
    state: State


class FleetEvents(NamedTuple):
    """The history of a fleet."""

    kind: str  #: the file's format, in words
    changes: list[Change]  #: in order of time
    left_out: dict[str, int]  #: how many rows, by the reason


def read_fleet_events(path: str | Path, start_up_s: float = 0.0) -> FleetEvents:
    """Read the history of a fleet.

    Args:
        path: A CSV with a time, a worker and an event in each row; a list of Kubernetes' events in
            JSON; or the answer of Prometheus' ``query_range``, a series for each worker with value
            0 where the worker is not ready (``up``, ``kube_pod_status_ready``).
        start_up_s: Seconds from a container's start, or the moment of a restart, until the worker
            serves; not added where the file says when a worker is ready.

    Raises:
        InputError: The file holds none of these.
    """
    text = read_text(path, "fleet")
    left_out: dict[str, int] = {}
    if text.lstrip("\ufeff \r\n\t").startswith(("{", "[")):
        content = parse_json(text, "fleet")
        series = _series(content)
        if series is not None:
            kind, changes = "Prometheus range", _of_series(series)
        else:
            kind, changes = "Kubernetes events", _of_pods(path, content, start_up_s, left_out)
    else:
        kind, changes = "CSV", _of_rows(path, text, start_up_s)
    made = sorted(changes)
    if not made:
        raise InputError("fleet", f"{path} holds no start or end of a worker", _ALLOWED)
    return FleetEvents(kind, made, left_out)


_ALLOWED = (
    "a CSV with columns time, worker, event; kubectl get events -o json; a Prometheus query_range"
)


def events_of(
    changes: Iterable[Change], pool: str, n_workers: int, origin_ns: int, end_s: float
) -> tuple[list[Row], dict[str, str]]:
    """Return the history of a fleet as events of a run.

    Args:
        changes: In order of time.
        pool: Name of the pool that the workers are in, as in ``decode:3``.
        n_workers: Workers of that pool.
        origin_ns: When the first request came: time 0 of the run.
        end_s: How long the requests come, s; what happens later is left out.

    Returns:
        Events as ``--events`` reads them, and the name of each worker in the file by its name in
        the run.

    Raises:
        InputError: There are more workers than the pool has.
    """
    by_worker: dict[str, list[tuple[float, State]]] = {}
    for change in changes:
        at = (change.when_ns - origin_ns) / 1e9
        by_worker.setdefault(change.worker, []).append((at, change.state))
    names = sorted(by_worker, key=_natural)
    if len(names) > n_workers:
        problem = f"{len(names)} workers: {', '.join(names[:8])}"
        raise InputError("topology", f"the file names {problem}", f"{n_workers} in {pool} now")
    events: list[Row] = []
    for number, name in enumerate(names):
        events += _of_worker(f"{pool}:{number}", by_worker[name], end_s)
    named = {f"{pool}:{number}": name for number, name in enumerate(names)}
    return sorted(events, key=lambda event: event["at_s"]), named


def _of_worker(where: str, history: list[tuple[float, State]], end_s: float) -> Iterator[Row]:
    """Yield the events of a worker. One that first comes up was away before."""
    spans: list[tuple[State, float, float]] = []
    begins: list[tuple[float, State]] = []
    if history[0][1] == "up":
        begins.append((-math.inf, "down"))
    for at, state in history:
        if begins and begins[-1][1] == state:
            continue
        if begins and state != "up" and begins[-1][1] != "up":
            continue  # it has ended already
        begins.append((at, state))
    ends = [*begins[1:], (math.inf, "up")]
    for (at, state), (until, _) in zip(begins, ends, strict=True):
        if state != "up" and until > 0.0 and at < end_s:
            spans.append((state, at, until))
    for state, at, until in spans:
        if at <= 0.0:
            # The run cannot begin without it in another way.
            start_up_s = until if until <= end_s else end_s + 1.0
            yield {"join": where, "at_s": 0.0, "start_up_s": _rounded(start_up_s)}
            continue
        event: dict[str, Any] = {"drain" if state == "leaves" else "fail": where}
        event["at_s"] = _rounded(at)
        if until < math.inf:
            event["for_s"] = _rounded(until - at)
        yield event


def _rounded(seconds: float) -> float:
    return max(1e-3, round(seconds, 3))


def _natural(name: str) -> tuple[Any, ...]:
    """Return a key that sorts ``pod-10`` behind ``pod-9``."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part)
                 for part in re.split(r"(\d+)", name) if part)  # fmt: skip


def _of_rows(path: str | Path, text: str, start_up_s: float) -> Iterator[Change]:
    rows = csv.DictReader(text.lstrip("\ufeff").splitlines(), skipinitialspace=True)
    known = {name.strip().lower(): name for name in rows.fieldnames or ()}
    time, worker, event = (
        next((known[name] for name in names if name in known), None)
        for names in (_TIMES, _NAMES, _STATES)
    )
    if time is None or worker is None or event is None:
        found = ", ".join(known) or "none"
        raise InputError("fleet", f"{path} has the columns {found}", _ALLOWED)
    for number, row in enumerate(rows, 2):
        at = _time_ns(path, number, row[time])
        name, word = (row[worker] or "").strip(), (row[event] or "").strip().lower()
        plain = re.sub(r"[^a-z0-9]", "", word)
        if not name:
            raise InputError("fleet", f"{path}, line {number}: no worker", "a name")
        if plain in _RESTARTS:
            yield Change(at, name, "down")
            yield Change(at + round(max(start_up_s, 1e-3) * 1e9), name, "up")
        elif plain in _WORDS:
            yield Change(at, name, _WORDS[plain])
        else:
            allowed = ", ".join((*_WORDS, _RESTARTS[0]))
            raise InputError("fleet", f"{path}, line {number}: event {word!r:.40}", allowed)


def _time_ns(path: str | Path, number: int, text: str | None) -> int:
    text = (text or "").strip()
    try:
        return scaled_ns(float(text), 1e9)
    except ValueError:
        pass
    try:
        return timestamp_ns(text)
    except ValueError:
        problem = f"{path}, line {number}: time {text!r:.40}"
        raise InputError("fleet", problem, "ISO 8601, or seconds") from None


def _of_pods(
    path: str | Path, content: Any, start_up_s: float, left_out: dict[str, int]
) -> Iterator[Change]:
    items = content.get("items") if isinstance(content, Mapping) else content
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise InputError("fleet", f"{path} does not hold a list of events", _ALLOWED)
    for number, item in enumerate(items):
        about = item.get("involvedObject") or item.get("regarding")
        reason = item.get("reason")
        if not isinstance(about, Mapping) or not isinstance(reason, str):
            raise InputError("fleet", f"{path} holds no events of Kubernetes", _ALLOWED)
        state = _REASONS.get(reason)
        if about.get("kind") != "Pod" or state is None:
            why = f"of reason {reason}" if about.get("kind") == "Pod" else f"of a {about['kind']}"
            left_out[why] = left_out.get(why, 0) + 1
            continue
        times = ("lastTimestamp", "eventTime", "firstTimestamp")
        text = next((item[name] for name in times if item.get(name)), None)
        at = _time_ns(path, number, text if isinstance(text, str) else "")
        late = start_up_s if state == "up" else 0.0
        yield Change(at + round(late * 1e9), str(about.get("name")), state)


def _series(content: Any) -> list[Any] | None:
    """Return the series of an answer of ``query_range``; None where it is none."""
    data = content.get("data", content) if isinstance(content, Mapping) else None
    result = data.get("result") if isinstance(data, Mapping) else None
    good = isinstance(result, list) and all(isinstance(one, Mapping) for one in result)
    return result if good else None


def _of_series(series: list[Any]) -> Iterator[Change]:
    last_ns = 0
    read: list[tuple[str, list[tuple[int, bool]]]] = []
    for one in series:
        labels, values = one.get("metric"), one.get("values")
        label = next((n for n in _NAMES if isinstance(labels, Mapping) and n in labels), None)
        if label is None or not isinstance(values, list):
            problem = "a series without values, or without a label of its worker"
            raise InputError("fleet", problem, f"one of {', '.join(_NAMES)}")
        try:
            samples = [(scaled_ns(float(at), 1e9), float(value) > 0.0) for at, value in values]
        except (TypeError, ValueError):
            raise InputError("fleet", "a sample is not a pair of time and number") from None
        read.append((str(labels[label]), samples))
        last_ns = max([last_ns, *(at for at, _ in samples)])
    if not any(samples for _, samples in read):
        return
    step = min((b[0] - a[0] for _, samples in read for a, b in pairwise(samples)), default=0)
    for worker, samples in read:
        before: tuple[int, bool] | None = None
        for at, ready in samples:
            if before is not None and before[1] and at - before[0] > _GAP * step:
                yield Change(before[0] + step, worker, "down")
                before = (at, False)
            if before is None or ready != before[1]:
                yield Change(at, worker, "up" if ready else "down")
            before = (at, ready)
        if before is not None and before[1] and last_ns - before[0] > _GAP * step:
            yield Change(before[0] + step, worker, "down")


def origin_of(first_ns: int, changes: Iterable[Change], start: str | None) -> int:
    """Return when the run begins, ns, on the clock of a fleet's events.

    Args:
        first_ns: When the first request came, on the clock of the log.
        changes: Of the fleet.
        start: What ``--start`` says: the time of the first request on the fleet's clock.

    Raises:
        InputError: One has dates and the other does not, and ``start`` is None.
    """
    if start is not None:
        return _time_ns("--start", 0, start)
    dated = [first_ns >= _EPOCH_NS, all(change.when_ns >= _EPOCH_NS for change in changes)]
    if dated[0] != dated[1]:
        without = "the log" if dated[1] else "the fleet's file"
        problem = f"times of {without} are not dates"
        raise InputError("start", problem, "--start: the fleet's time of the first request")
    return first_ns
