"""The autoscaler of a run: what it may ask for, and what it knows of the pools."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from eldr_sim.errors import InputError
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.registry import autoscaler, begins_as_configured
from eldr_sim.simulator.control import placing
from eldr_sim.simulator.control.autoscaling import Autoscaling, ScalingRule, check_budget
from eldr_sim.simulator.control.control_api import Control
from eldr_sim.simulator.control.elastic import ElasticGroup
from eldr_sim.simulator.setup.cluster_spec import PoolSpec
from eldr_sim.simulator.setup.config.groups import FaultConfig, ScalingConfig
from eldr_sim.simulator.setup.config.pools import WorkerPool
from eldr_sim.simulator.setup.expected_step import ExpectedStep, scaling_facts
from eldr_sim.simulator.setup.prepare import PreparedRun
from eldr_sim.traces.routing.calibration import CalibrationSet
from eldr_sim.traces.streams import stream
from eldr_sim.traces.workload import Workload


def check_scaling(scaling: ScalingConfig, faults: FaultConfig, pools: Sequence[WorkerPool]) -> None:
    """Raise InputError for bounds of an autoscaler that do not fit the pools."""
    if not scaling.scales:
        return
    if faults.fail or faults.events:
        problem = "workers that fail beside an autoscaler are not simulated"
        raise InputError("autoscale", problem, "none, or neither fail nor events")
    initial, least = scaling.first_workers(pools), scaling.least_workers(pools)
    for field, given in (("min_workers", least), ("initial_workers", initial)):
        for pool in pools:
            if given.get(pool.name, 0) > pool.units[0]:
                problem = f"{given[pool.name]} {pool.name} workers"
                raise InputError(field, problem, f"up to the topology's {pool.units[0]}")
    own, used = begins_as_configured(scaling.autoscale), 0
    for pool in pools:
        most, gpus = pool.units
        n = initial.get(pool.name, most) if own else 0
        used += max(n, least.get(pool.name, 0)) * gpus
    check_budget(scaling.gpu_budget, used)


def autoscale(
    scaling: ScalingConfig,
    pools: Sequence[WorkerPool],
    seed: int,
    prepared: PreparedRun,
    workload: Workload,
    calibration: Callable[[], CalibrationSet],
    control: Control,
) -> None:
    """Let the autoscaler of a run work on a cluster."""
    elastic = control.cluster.elastic
    works = [
        _works(prepared, seed, calibration, pool, elastic.get(pool.name))
        for pool in prepared.spec.pools
    ]
    pauses = {name: group.pause_between for name, group in elastic.items()}
    facts = scaling_facts(pools, scaling.switch_time, prepared, workload, works, pauses)
    rng = stream(seed, "autoscaler")
    policy = autoscaler(scaling.autoscale, PolicyContext(1, rng, scaling=facts))
    rule = ScalingRule(
        scaling.least_workers(pools),
        scaling.first_workers(pools),
        scaling.gpu_budget,
        scaling.demand == "exit",
        scaling.metric_delay,
        math.inf if scaling.drain_timeout is None else scaling.drain_timeout,
    )
    Autoscaling(control, policy, facts, rule)


def expected_step(
    prepared: PreparedRun, seed: int, calibration: Callable[[], CalibrationSet], pool: int
) -> ExpectedStep:
    """Return the mean work of a pool's groups, with linear placement in place of ELDR's fit."""
    spec, trace = prepared.spec.pools[pool], prepared.trace
    assert trace is not None, "dense models share no experts"
    try:
        placed = placing.place_pool(prepared, seed, spec.name, None, calibration)
    except InputError:
        placed = placing.place_pool(prepared, seed, spec.name, None, calibration, word="linear")
    return ExpectedStep(spec.engine, placed[0].placement, trace, pool == 0)


def _works(
    prepared: PreparedRun,
    seed: int,
    calibration: Callable[[], CalibrationSet],
    pool: PoolSpec,
    elastic: ElasticGroup | None,
) -> Mapping[int, Callable[[], ExpectedStep]]:
    """Return a pool's mean work by its number of engines; {} without groups."""
    engine, trace = pool.engine, prepared.trace
    if engine.group is None:
        return {}
    width = engine.parallelism.data_parallel_size
    if elastic is None:
        number = prepared.spec.names.index(pool.name)
        return {width: cache(partial(expected_step, prepared, seed, calibration, number))}
    assert trace is not None, "dense models share no experts"
    works: dict[int, Callable[[], ExpectedStep]] = {}
    for width, shape in elastic.shapes.items():
        layout = replace(engine.parallelism, data_parallel_size=width)
        narrow = replace(engine, parallelism=layout, group=shape.cost)
        works[width] = cache(
            partial(ExpectedStep, narrow, shape.placement, trace, elastic.pool == 0)
        )
    return works
