"""The highest rate that a given cluster carries within its objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eldr_sim.errors import InputError
from eldr_sim.planning.bounds import bounds
from eldr_sim.planning.compare import paired_difference
from eldr_sim.planning.offers import clusters_to_plan, gpu_label
from eldr_sim.planning.search import highest_rate
from eldr_sim.planning.slo import Interval, Objective, t_interval
from eldr_sim.planning.tasks import Evaluator, Runs, Summary, Task, run_here
from eldr_sim.planning.trial import attains, with_seed
from eldr_sim.simulator.config import RunConfig

#: A run of fewer expected requests says nothing about a share such as 99%.
LEAST_REQUESTS = 100
#: Largest ratio, less 1, of a rate that fails to the rate told.
TOLERANCE = 0.01


@dataclass(frozen=True)
class CarriedRate:
    """The highest rate of one cluster.

    Attributes
    ----------
    config
        The cluster.
    gpu
        Its GPU, or those of the two pools.
    by_seed
        Highest rate of each seed, requests per second; None where even the lowest rate misses.
    rate
        Their mean with its 95% interval; None unless there is a rate for every seed.
    summary
        Of the first seed's run at its highest rate.
    reason
        Why there is no rate.
    """

    config: RunConfig
    gpu: str
    by_seed: tuple[float | None, ...]
    rate: Interval | None
    summary: Summary | None
    reason: str = ""


@dataclass(frozen=True)
class RateGain:
    """How much more a policy lets the same cluster carry than the first policy does, in percent.

    ``percent`` is the mean of the paired ratios of the seeds, less 1; ``low`` and ``high`` its 95%
    interval.
    """

    gpu: str
    policy: str
    reference: str
    percent: float
    low: float
    high: float


@dataclass(frozen=True)
class RatePlan:
    """The highest rates of a cluster, by GPU and policy, and what the policies gain."""

    objective: Objective
    rates: list[CarriedRate]
    gains: list[RateGain]
    runs: Runs


def plan_rate(
    config: RunConfig,
    objective: Objective,
    *,
    policies: Sequence[str] = (),
    gpus: Sequence[str] = (),
    prices: Mapping[str, float] | None = None,
    evaluate: Evaluator = run_here,
    progress: Callable[[int], None] | None = None,
) -> RatePlan:
    """Find the highest rate that a cluster carries within its objective, seed by seed.

    Each seed has its own highest rate, found by bisection to within 1%; under one seed all
    policies and rates see the same requests, at gaps that the rate stretches. Their mean over
    ``objective.seeds`` seeds comes with Student's t interval.

    Parameters
    ----------
    config
        The cluster and what the requests are like; its rate is ignored.
    objective
        What has to be met.
    policies, gpus
        Compared on the same topology; those of ``config`` when empty.
    prices
        Price of a GPU-hour by GPU.
    evaluate
        Makes the runs.
    progress
        Called with the number of runs so far.

    Raises
    ------
    InputError
        If the configuration does not exist or does not fit together.
    """
    config = config.model_copy(update={"goodput": objective.level})
    configs = clusters_to_plan(config, policies, gpus, prices or {})
    low = lowest_rate(config)
    runs = Runs(evaluate, progress)
    tasks = []
    impossible = []
    for each in configs:
        start = each.model_copy(update={"request_rate": max(low, float(each.n_decode))})
        impossible.append(bounds(start, objective).impossible)
        if not impossible[-1]:
            tasks += [carried(start, seed, objective, low=low) for seed in range(objective.seeds)]
    found = iter(runs.together(tasks))
    rates = []
    for each, reason in zip(configs, impossible, strict=True):
        by_seed = () if reason else tuple(next(found) for _ in range(objective.seeds))
        rates.append(_carried_rate(each, by_seed, reason or f"{low:.3g} req/s is too much", runs))
    return RatePlan(objective, rates, _gains(rates), runs)


def lowest_rate(config: RunConfig) -> float:
    """Return the lowest rate worth a run: below it there are too few requests in the window."""
    if config.num_requests is None:
        return LEAST_REQUESTS / config.duration
    if config.num_requests < LEAST_REQUESTS:
        raise InputError("num_requests", str(config.num_requests), f"{LEAST_REQUESTS} or more")
    return 0.01


def carried(
    config: RunConfig,
    seed: int,
    objective: Objective,
    *,
    low: float,
    high: float = float("inf"),
    factor: float = 2.0,
) -> Task[float | None]:
    """Find the highest rate that one seed of a cluster carries, from the configuration's rate on.

    ``low``, ``high`` and ``factor`` are those of
    :func:`~eldr_sim.planning.search.highest_rate`.
    """
    assert config.request_rate is not None

    def meets(rate: float) -> Task[bool]:
        return attains(config.model_copy(update={"request_rate": rate}), seed, objective)

    return highest_rate(
        config.request_rate, low, meets, factor=factor, tolerance=TOLERANCE, high=high
    )


def _carried_rate(
    config: RunConfig, by_seed: tuple[float | None, ...], reason: str, runs: Runs
) -> CarriedRate:
    known = [rate for rate in by_seed if rate is not None]
    if not known or len(known) < len(by_seed):
        return CarriedRate(config, gpu_label(config), by_seed, None, None, reason)
    at = with_seed(config.model_copy(update={"request_rate": known[0]}), 0)
    return CarriedRate(config, gpu_label(config), by_seed, t_interval(known), runs.summary(at), "")


def _gains(rates: Sequence[CarriedRate]) -> list[RateGain]:
    references: dict[str, CarriedRate] = {}
    gains = []
    for each in rates:
        reference = references.setdefault(each.gpu, each)
        if reference is each or reference.rate is None or each.rate is None:
            continue
        pairs = zip(each.by_seed, reference.by_seed, strict=True)
        ours, theirs = zip(*((a, b) for a, b in pairs if a and b), strict=True)
        gains.append(
            RateGain(
                each.gpu,
                each.config.policy,
                reference.config.policy,
                *paired_difference(ours, theirs),
            )
        )
    return gains
