"""Chrome trace of a run, for ui.perfetto.dev and chrome://tracing.

A track per worker with its steps, counters of batch and activated experts for each decode worker, a
track of overlapping slices per request, and an arrow from prefill to decode for each KV transfer.
Times are microseconds of simulated time.
"""

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

import pyarrow as pa

from eldr_sim.kinds import AnyPath
from eldr_sim.simulator.outcome.bottleneck import WITHOUT

_ROLES = {"prefill": 1, "decode": 2}
_REQUESTS = 3


def timeline_events(requests: pa.Table, steps: pa.Table) -> list[dict[str, Any]]:
    """Return the events of a run's tables (see :mod:`eldr_sim.simulator.outcome.tables`)."""
    events = [_meta("process_name", pid, 0, f"{role} workers") for role, pid in _ROLES.items()]
    events.append(_meta("process_name", _REQUESTS, 0, "requests"))
    named: set[tuple[int, int]] = set()
    for step in steps.to_pylist():
        pid, tid = _ROLES[step["role"]], step["worker"]
        if (pid, tid) not in named:
            named.add((pid, tid))
            events.append(_meta("thread_name", pid, tid, f"{step['role']} {tid}"))
        at = {"ts": _us(step["start_s"]), "pid": pid}
        args = {"batch": step["batch"], "tokens": step["tokens"]}
        if step["role"] == "decode":
            counters = {"batch": step["batch"]}
            if step["active_experts"] is not None:  # a dense model's
                counters["active_experts"] = round(step["active_experts"], 2)
            args |= {"context_tokens": step["context_tokens"]} | counters
            events.append({"name": f"decode {tid}", "ph": "C", **at, "args": counters})
        took = {"dur": _us(step["end_s"] - step["start_s"]), "tid": tid, "args": args}
        events.append({"name": "step", "cat": step["role"], "ph": "X", **at, **took})
    for request in requests.to_pylist():
        events.extend(_request_events(request))
    return events


def write_timeline(path: AnyPath, requests: pa.Table, steps: pa.Table) -> None:
    """Write the Chrome trace JSON of a run."""
    document = {"traceEvents": timeline_events(requests, steps), "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")


#: What a request does until it decodes, by the times that bound it.
PHASES = (
    ("front end", "sent_s", "tokenized_s"),
    ("prefill queue", "tokenized_s", "load_start_s"),
    ("KV load", "load_start_s", "prefill_start_s"),
    ("prefill", "prefill_start_s", "prefill_end_s"),
    ("handoff", "prefill_end_s", "transfer_start_s"),
    ("KV transfer", "transfer_start_s", "transfer_end_s"),
    ("decode queue", "transfer_end_s", "decode_start_s"),
)
DECODE = ("decode_start_s", "finish_s")


def phases_in(columns: Container[str]) -> list[tuple[str, str, str]]:
    """Return the `PHASES` of a run whose requests have these columns."""

    def own(key: str) -> str:
        return key if key in columns else WITHOUT.get(key, key)

    return [phase for phase in PHASES if own(phase[1]) != own(phase[2])]


def _request_events(request: dict[str, Any]) -> list[dict[str, Any]]:
    name, ident = f"request {request['request_id']}", request["request_id"]
    events: list[dict[str, Any]] = []
    phases = phases_in(request)
    request = {key: request[own] for key, own in WITHOUT.items()} | request
    for phase, start, end in (*phases, ("decode", *DECODE)):
        if request[start] is None or request[end] is None:
            continue
        common = {"cat": "request", "id": ident, "pid": _REQUESTS, "tid": 0, "name": phase}
        args = {"request": name, "domain": request["domain"], "tokens": request["output_len"]}
        events.append({**common, "ph": "b", "ts": _us(request[start]), "args": args})
        events.append({**common, "ph": "e", "ts": _us(request[end])})
        if phase == "KV transfer":
            flow = {"cat": "KV transfer", "id": ident, "name": "KV transfer"}
            source, target = request["prefill_worker"], request["decode_worker"]
            events.append({**flow, "ph": "s", "ts": _us(request[start]), "pid": 1, "tid": source})
            ends = {"ph": "f", "bp": "e", "ts": _us(request[end]), "pid": 2, "tid": target}
            events.append(flow | ends)
    return events


def _meta(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
