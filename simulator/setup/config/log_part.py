"""The part of a request log that a configuration asks for."""

from eldr_sim.errors import InputError
from eldr_sim.simulator.setup.config.requests import NO_PART
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.traces.requests.load import named_log
from eldr_sim.traces.requests.logs.log_window import LogPart, choose_part
from eldr_sim.traces.requests.logs.request_logs import RequestLog


def check_window(config: RunConfig) -> None:
    """Raise InputError where fields that say which requests are measured contradict each other."""
    asked = [name for name in NO_PART if config.value(name) is not None]
    if config.requests.arrivals == "agentx":
        others = ("num_requests", "request_rate", "warmup", *asked)
        for name in others:
            if config.value(name) is not None:
                problem = "beside arrivals agentx, whose window opens when caches are warm"
                raise InputError(name, problem, "none, or --arrivals closed")
        if config.requests.max_active_sessions is None:
            raise InputError(
                "max_active_sessions", "missing: arrivals agentx needs it", "1 or more"
            )
        return
    if not asked:
        return
    name = asked[0]
    if not config.requests.from_file:
        problem = f"workload {config.requests.workload} is no log"
        raise InputError(name, problem, "--workload with the path of a request log")
    if not config.requests.replays_log:
        raise InputError(name, "beside arrivals that are drawn", "--arrivals recorded")
    for other in ("num_requests", "duration"):
        if config.value(other) is not None:
            raise InputError(other, f"beside {name}, which says how long it is", "one of the two")
    if "busiest" in asked and len(asked) > 1:
        raise InputError("busiest", f"beside {name}", "one of the two")


def log_of(config: RunConfig) -> RequestLog | None:
    """Return the log whose arrivals a run replays as they come; None where it replays none."""
    if not config.requests.replays_log or config.requests.length_shape is not None:
        return None
    output_len = config.effective_output_len
    asked = config.requests
    log = named_log(asked.workload, asked.columns, asked.sessions_file, output_len, asked.time_unit)
    most = log.header.max_concurrency
    if most is not None and asked.max_concurrency is None and asked.request_rate is None:
        problem = f"missing: {log.path.name} was sent with {most} requests in flight at most"
        raise InputError("max_concurrency", problem, f"--max-concurrency {most}, or another")
    return log


def part_of(config: RunConfig, log: RequestLog | None) -> LogPart | None:
    """Return what a run replays of its log, or None; raises InputError."""
    if (
        log is None
        or config.requests.duration_s is not None
        or config.requests.num_requests is not None
    ):
        return None
    return choose_part(
        log,
        since=config.requests.log_from,
        until=config.requests.log_to,
        busiest=config.requests.busiest,
        warmup_s=config.requests.warmup_s,
        rate=config.requests.request_rate,
    )
