"""The requests that a run is offered."""

from dataclasses import fields, replace
from typing import Any, Literal

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.simulator.setup.config.log_part import check_window, log_of, part_of
from eldr_sim.simulator.setup.config.requests import RoutingConfig, WorkloadConfig
from eldr_sim.simulator.setup.run_routing import texts_of
from eldr_sim.traces.requests.load import Load
from eldr_sim.traces.requests.logs.log_window import describe_part
from eldr_sim.traces.requests.request_columns import make_requests
from eldr_sim.traces.requests.session_shape import PRESETS as SESSIONS
from eldr_sim.traces.requests.session_shape import session_shape
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.workload import Workload, join_routing

#: Arrivals go on for this many measured windows after the warm-up, so that the requests measured
#: last still see the load; the run stops when they have ended.
_WINDOWS_OF_ARRIVALS = 2.0


def make_load(
    asked: WorkloadConfig,
    routing: RoutingConfig,
    output_len: int | Literal["recorded"],
    block_size: int,
    trace: RoutingTrace | None,
    *,
    generates: bool,
) -> tuple[Workload, tuple[float, float]]:
    """Return the requests of a run and the window, s, in which those that count arrive.

    ``generates``: whether requests generate tokens; where they end with their prompts, each has
    one. Raises InputError for a load that cannot be, or of which nothing is measured."""
    warmup, duration = asked.warmup_s, asked.duration_s
    window = (warmup, np.inf if duration is None else warmup + duration)
    # The load of a day ends with it: what is left is served, and counts.
    ends = asked.load is not None and asked.duration is None
    windows = 1.0 if ends else _WINDOWS_OF_ARRIVALS
    horizon = None if duration is None else warmup + windows * duration
    check_window(asked)
    log = log_of(asked, output_len)
    part = part_of(asked, log)
    if part is not None and asked.chooses_part:
        window = part.window
    if asked.arrivals == "agentx":
        horizon = None
    values: dict[str, Any] = {
        field.name: getattr(group, field.name)
        for group in (asked, routing)
        for field in fields(Load)
        if field.name in type(group).model_fields
    }
    values |= {"request_rate": asked.effective_rate, "output_len": output_len}
    if asked.n_sessions is not None:
        values["num_requests"] = asked.n_sessions
    ratio = asked.random_range_ratio
    shape = {name: getattr(asked, name) for name in SESSIONS["chat"]}
    load = Load(
        **values,
        horizon_s=horizon,
        lanes_s=0.0 if duration is None else duration,
        drift_s=None if duration is None else window[1],
        # Requests that end with their prompts have one output token, whatever the range.
        range_ratios=(ratio, ratio if generates else 0.0),
        part=part,
        session=session_shape(asked.workload, block_size, asked.history, **shape),
    )
    try:
        requests = make_requests(texts_of(asked.workload, routing, trace), load)
    except InputError as error:
        if error.field != "horizon_s":
            raise
        allowed = error.allowed.replace("horizon", "duration")
        raise InputError("duration", error.problem, allowed) from None
    workload = join_routing(requests, trace, trace_replay=routing.trace_replay, seed=asked.seed)
    arrivals = workload.arrival_s
    if not ((arrivals >= window[0]) & (arrivals < window[1])).any():
        raise InputError(
            "warmup" if asked.duration is None else "duration",
            f"none of {len(arrivals)} requests arrives in the measured window "
            f"[{window[0]:g} s, {window[1]:g} s)",
            "a shorter warm-up, a longer duration or a higher rate",
        )
    if log is not None:
        measured = describe_part(log, arrivals, window, part, asked.request_rate)
        workload = replace(workload, description=workload.description | {"log_window": measured})
    return workload, window
