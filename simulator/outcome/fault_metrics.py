"""What faults do to a run's figures: before, during and after, and the time to recover."""

import math
from typing import Any

import numpy as np

from eldr_sim.arrays import Bools, Floats
from eldr_sim.simulator.control.record import RunRecord
from eldr_sim.simulator.outcome.metrics import good_requests, request_times
from eldr_sim.simulator.plane.state import CANCELLED, WORKER_LOST
from eldr_sim.simulator.setup.config.groups import ServiceLevel
from eldr_sim.simulator.setup.fault_plan import Fault

#: Requests that end in this many seconds are as good as before the fault if their share of good
#: ones is so large a part of that share.
_STRETCH_S, _AS_GOOD = 5.0, 0.95
#: If no request ends in this time although some did before, none is served.
_EXPECTED = 5


def fault_figures(
    record: RunRecord, level: ServiceLevel, faults: tuple[Fault, ...]
) -> dict[str, Any]:
    """Return ``faults`` of a summary: each event, and the measured requests that end in the window
    before it, while it lasts, and after it: completed, lost or given up; and retries."""
    requests, measured = record.requests, record.requests["measured"]
    good = good_requests(request_times(record), level)
    ended = np.where(requests["finish_s"] >= 0.0, requests["finish_s"], np.inf)
    start, end = record.window[0], min(record.window[1], record.end_s)
    retries = record.retries
    return {
        "retried": 0 if retries is None else int((retries[measured] > 0).sum()),
        "retries": 0 if retries is None else int(retries[measured].sum()),
        "worker_lost": int((requests["outcome"][measured] == WORKER_LOST).sum()),
        "cancelled": int((requests["outcome"][measured] == CANCELLED).sum()),
        "events": [_event(fault, ended, good, level.given, start, end) for fault in faults],
    }


def _event(
    fault: Fault, ended: Floats, good: Bools, judged: bool, start: float, end: float
) -> dict[str, Any]:
    """Return the figures of an event; goodput and attainment only where an SLO judges."""
    begin = 0.0 if fault.kind == "join" else fault.at_s
    begin, over = (min(max(at, start), end) for at in (begin, fault.end_s))
    figures: dict[str, Any] = {
        "event": str(fault),
        "kind": fault.kind,
        "worker": fault.where,
        "at_s": fault.at_s,
        "for_s": None if math.isinf(fault.for_s) else fault.for_s,
    }
    for name, since, until in (
        ("before", start, begin), ("during", begin, over), ("after", over, end),
    ):  # fmt: skip
        inside = good[(ended >= since) & (ended < until)]
        figures[f"throughput_{name}"] = len(inside) / (until - since) if until > since else None
        figures[f"goodput_{name}"] = (
            float(inside.sum()) / (until - since) if judged and until > since else None
        )
        figures[f"attainment_{name}"] = float(inside.mean()) if judged and len(inside) else None
    figures["time_to_recover_s"] = (  # nothing is seen of one that comes when the window is over
        time_to_recover(ended, good, start, begin, over, end) if begin < end else None
    )
    return figures


def time_to_recover(
    ended: Floats, good: Bools, start: float, begin: float, over: float, end: float
) -> float | None:
    """Return the s from a fault's begin until as large a share of requests is good as before it:
    95% of the share from ``start`` to ``begin``, of requests that end in 5 s from a whole second on
    (fewer than 5 expected are good). 0 where it never falls, None where it does not recover before
    ``over`` or ``end``, or nothing came before."""
    before = good[(ended >= start) & (ended < begin)]
    if len(before) == 0 or not before.any():
        return None
    busy = len(before) * _STRETCH_S >= _EXPECTED * (begin - start)
    dipped = False
    for second in range(max(0, math.floor(end - begin - _STRETCH_S)) + 1):
        since = begin + second
        inside = good[(ended >= since) & (ended < since + _STRETCH_S)]
        as_good = inside.mean() >= _AS_GOOD * before.mean() if len(inside) else not busy
        if not dipped and since > over:
            return 0.0
        if dipped and as_good:
            return float(second)
        dipped = dipped or not as_good
    return None if dipped else 0.0
