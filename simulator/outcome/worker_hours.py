"""How long workers are there, and what that takes: GPU-hours and dollars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from eldr_sim.arrays import Floats, Ints
from eldr_sim.simulator.control.record import DRAINING, READY, RESERVED, STARTING, RunRecord

if TYPE_CHECKING:
    from eldr_sim.simulator.setup.config.pools import WorkerPool

#: The states in which a worker holds its GPUs.
PAID = {"starting": STARTING, "ready": READY, "draining": DRAINING}


class Spent(NamedTuple):
    """What the workers of a run take in a stretch of time."""

    workers: Floats  #: float64 ``[pools, states]``: hours of workers
    gpus: Ints  #: int64 ``[pools]``: of a worker
    gpu_hours: float
    dollars: float | None  #: None unless every pool has a price


def spent_hours(record: RunRecord, pools: Sequence[WorkerPool], begin: float, end: float) -> Spent:
    """Return what the workers of a run take from ``begin`` to ``end``, s."""
    units = np.array([pool.units for pool in pools], np.int64)
    gpus = units[:, 1]
    hours = worker_seconds(record, units[:, 0].tolist(), begin, end) / 3600.0
    by_pool = hours[:, list(PAID.values())].sum(axis=1) * gpus
    prices = [pool.price_per_gpu_hour for pool in pools]
    known = [price for price in prices if price is not None]
    dollars = float(by_pool @ np.array(known)) if len(known) == len(prices) else None
    return Spent(hours, gpus, float(by_pool.sum()), dollars)


def worker_seconds(record: RunRecord, workers: list[int], begin: float, end: float) -> Floats:
    """Return the seconds of pools' workers in each state, float64 ``[pools, states]``."""
    spent = np.zeros((len(workers), RESERVED + 1))
    spent[:, READY] = np.array(workers) * (end - begin)
    last: dict[tuple[int, int], int] = {}
    for at, pool, worker, what in [] if record.states is None else record.states.tolist():
        rest = end - min(max(at, begin), end)
        spent[pool, last.get((pool, worker), READY)] -= rest
        spent[pool, what] += rest
        last[pool, worker] = what
    return spent
