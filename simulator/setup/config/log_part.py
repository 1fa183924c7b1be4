"""The part of a request log that a configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from eldr_sim.errors import InputError
from eldr_sim.simulator.setup.config.requests import NO_PART, WorkloadConfig
from eldr_sim.traces.requests.load import named_log
from eldr_sim.traces.requests.logs.log_window import LogPart, choose_part

if TYPE_CHECKING:
    from eldr_sim.traces.requests.logs.request_logs import RequestLog


def check_window(asked: WorkloadConfig) -> None:
    """Raise InputError where fields that say which requests are measured contradict each other."""
    parts = [name for name in NO_PART if getattr(asked, name) is not None]
    if asked.arrivals == "agentx":
        others = ("num_requests", "request_rate", "warmup", *parts)
        for name in others:
            if getattr(asked, name) is not None:
                problem = "arrivals agentx opens the window when caches are warm"
                raise InputError(name, problem, "none, or --arrivals closed")
        if asked.max_active_sessions is None:
            raise InputError(
                "max_active_sessions", "missing: arrivals agentx needs it", "1 or more"
            )
        return
    if not parts:
        return
    name = parts[0]
    if not asked.from_file:
        problem = f"workload {asked.workload} is not a log"
        raise InputError(name, problem, "--workload with the path of a request log")
    if not asked.replays_log:
        raise InputError(name, "given together with arrivals that are drawn", "--arrivals recorded")
    for other in ("num_requests", "duration"):
        if getattr(asked, other) is not None:
            raise InputError(
                other, f"given together with {name}, which says how long it is", "one of the two"
            )
    if "busiest" in parts and len(parts) > 1:
        raise InputError("busiest", f"given together with {name}", "one of the two")


def log_of(asked: WorkloadConfig, output_len: int | Literal["recorded"]) -> RequestLog | None:
    """Return the log that a run replays with its arrivals; None where it replays none."""
    if not asked.replays_log or asked.length_shape is not None:
        return None
    log = named_log(asked.workload, asked.columns, asked.sessions_file, output_len, asked.time_unit)
    max_concurrency = log.header.max_concurrency
    if max_concurrency is not None and asked.max_concurrency is None and asked.request_rate is None:
        problem = (
            f"missing: {log.path.name} was sent with {max_concurrency} requests in flight at most"
        )
        raise InputError(
            "max_concurrency", problem, f"--max-concurrency {max_concurrency}, or another"
        )
    return log


def part_of(asked: WorkloadConfig, log: RequestLog | None) -> LogPart | None:
    """Return what a run replays of its log, or None; raises InputError."""
    if log is None or asked.duration_s is not None or asked.num_requests is not None:
        return None
    return choose_part(
        log,
        since=asked.log_from,
        until=asked.log_to,
        busiest=asked.busiest,
        warmup_s=asked.warmup_s,
        rate=asked.request_rate,
    )
