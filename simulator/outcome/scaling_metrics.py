"""What a fleet of changing size takes and gives: GPU-hours by state, and service by time."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from eldr_sim.arrays import Bools
from eldr_sim.simulator.control.record import DRAINING, OFF, READY, RESERVED, STARTING, RunRecord
from eldr_sim.simulator.outcome.metrics import good_requests, request_times
from eldr_sim.simulator.outcome.worker_hours import PAID, spent_hours
from eldr_sim.simulator.setup.cluster_spec import ClusterSpec
from eldr_sim.simulator.setup.config.groups import ServiceLevel
from eldr_sim.simulator.setup.config.pools import WorkerPool

_MINUTE_S, _WELL = 60.0, 0.95


def scaling_figures(
    record: RunRecord,
    autoscale: str,
    level: ServiceLevel,
    pools: Sequence[WorkerPool],
    spec: ClusterSpec,
) -> dict[str, Any]:
    """Return ``scaling`` of a summary; nothing where no worker was started or stopped."""
    if record.states is None:
        return {}
    begin = record.window[0]
    end = record.window[1] if math.isfinite(record.window[1]) else 0.0
    end = max(end, record.end_s)
    spent = spent_hours(record, pools, begin, end)
    measured = record.requests["measured"]
    good = good_requests(request_times(record), level) & measured
    minutes = _by_minute(record, good)
    attainments = [minute["attainment"] for minute in minutes]
    seconds = max(end - begin, 1e-9)
    judged = level.given
    n_good = int(good.sum()) if judged else 0
    return {
        "scaling": {
            "autoscale": autoscale,
            "gpu_hours": spent.gpu_hours,
            "gpu_hours_by_state": {
                name: float((spent.workers[:, at] * spent.gpus).sum()) for name, at in PAID.items()
            },
            "mean_workers": {
                pool.name: float(spent.workers[number, READY]) * 3600.0 / seconds
                for number, pool in enumerate(pools)
            },
            "start_up_s": {pool.name: pool.engine.start_up_s for pool in spec.pools},
            "gpu_hours_per_1000_good": 1e3 * spent.gpu_hours / n_good if n_good else None,
            "cost_per_1000_good": (
                1e3 * spent.dollars / n_good if n_good and spent.dollars is not None else None
            ),
            "minutes": len(minutes),
            "minutes_below_95": sum(share < _WELL for share in attainments) if judged else None,
            **_events(record, spec),
            "by_minute": minutes
            if judged
            else [minute | {"attainment": None} for minute in minutes],
            "replicas": replicas(record, [pool.units[0] for pool in pools], spec.names),
        }
    }


def _by_minute(record: RunRecord, good: Bools) -> list[dict[str, float]]:
    """Return SLO attainment by minute of arrival; who was never served has missed it."""
    measured = record.requests["measured"]
    arrival_s = record.requests["arrival_s"][measured]
    minute, number = np.unique((arrival_s // _MINUTE_S).astype(np.int64), return_inverse=True)
    n, kept = np.bincount(number), np.bincount(number, good[measured])
    return [
        {"from_s": at * _MINUTE_S, "requests": count, "attainment": of / count}
        for at, count, of in zip(minute.tolist(), n.tolist(), kept.tolist(), strict=True)
    ]


def _events(record: RunRecord, spec: ClusterSpec) -> dict[str, int]:
    """Return how often workers were started, stopped and switched, and how often for nothing: a
    stop within twice the start-up, at least a minute, of a start of the pool. A switch is
    neither."""
    assert record.states is not None
    n = {"starts": 0, "stops": 0, "switches": 0, "reversals": 0}
    started: dict[int, float] = {}
    was: dict[tuple[int, int], int] = {}
    switches = np.flatnonzero(record.states["state"] == RESERVED)  # behind what drains for them
    for at, pool, worker, what in np.delete(record.states, switches - 1).tolist():
        before = was.get((pool, worker), READY)
        was[pool, worker] = what
        if what == RESERVED:
            n["switches"] += 1
        elif what == STARTING and before != RESERVED:
            n["starts"] += 1
            started[pool] = at
        elif what == DRAINING or (what, before) == (OFF, STARTING):
            n["stops"] += 1
            late = max(2.0 * spec.pools[pool].engine.start_up_s, _MINUTE_S)
            n["reversals"] += at - started.pop(pool, -math.inf) <= late
    return n


def replicas(
    record: RunRecord, workers: list[int], names: list[str]
) -> dict[str, dict[str, list[float]]]:
    """Return when each pool's numbers of workers change, and what they are from then on."""
    assert record.states is not None
    tables = {}
    for pool, (name, n) in enumerate(zip(names, workers, strict=True)):
        counts = [0] * (RESERVED + 1)
        counts[READY] = n
        state = [READY] * n
        rows: dict[float, tuple[int, ...]] = {}
        for at, of, worker, what in record.states.tolist():
            if of == pool:
                counts[state[worker]] -= 1
                counts[what] += 1
                state[worker] = what
                rows[at] = tuple(counts[each] for each in PAID.values())
        columns = zip(*rows.values(), strict=True) if rows else ([], [], [])
        tables[name] = {"at_s": list(rows)} | {
            each: list(column) for each, column in zip(PAID, columns, strict=True)
        }
    return tables
