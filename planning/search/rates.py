"""The highest rate that a given cluster carries within its objective."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.planning.intervals import Interval, paired_percent, t_interval
from eldr_sim.planning.runs.shared_runs import Runs, Search, Summary, side_by_side
from eldr_sim.planning.search.bounds import bounds
from eldr_sim.planning.search.candidates import clusters_to_plan, gpu_label, policy_label
from eldr_sim.planning.search.search import RateRange, highest_rate
from eldr_sim.planning.search.shapes import capacity
from eldr_sim.planning.search.trial import attains
from eldr_sim.planning.slo import Objective
from eldr_sim.simulator.outcome.headline import Headline, Shown, number
from eldr_sim.simulator.run import offered_load
from eldr_sim.simulator.setup.config import RunConfig
from eldr_sim.simulator.setup.config_groups import NO_PART
from eldr_sim.simulator.setup.prepare import routing_of

#: Fewest expected requests of a run that estimates a share such as 99%.
LEAST_REQUESTS = 100
#: Largest relative distance between the rate returned and one that misses.
TOLERANCE = 0.01
#: Step by which a seed's highest rate is looked for from that of another seed.
NEAR = 1.02
#: Step by which it is looked for from an estimate.
FROM_ESTIMATE = 1.25


@dataclass(frozen=True)
class CarriedRate:
    """The highest rate of one cluster.

    Attributes
    ----------
    config
        The cluster.
    gpu
        GPU of the cluster, or of its two pools.
    by_seed
        Highest rate under each seed, requests per second; None if even the lowest rate misses.
    rate
        Mean over the seeds with its 95% interval; None unless every seed has a rate.
    summary
        Summary of the first seed's run at its highest rate.
    reason
        Why there is no rate.
    is_beaten
        Whether there is none because other clusters carry more.
    """

    config: RunConfig
    gpu: str
    by_seed: tuple[float | None, ...]
    rate: Interval | None
    summary: Summary | None
    reason: str = ""
    is_beaten: bool = False


@dataclass(frozen=True)
class RateGain:
    """Gain in a cluster's highest rate under a policy, compared with the first policy.

    ``percent`` is the mean over seeds of the paired ratio less 1, with its 95% interval.
    """

    gpu: str
    policy: str
    reference: str
    percent: Interval


@dataclass(frozen=True, repr=False)
class RatePlan(Shown):
    """Highest rates of a cluster by GPU and policy, and the gains of the policies.

    ``config`` and ``objective`` are the question.
    """

    config: RunConfig
    objective: Objective
    rates: list[CarriedRate]
    gains: list[RateGain]
    runs: Runs

    def headline(self) -> Headline:
        """Return the highest rate of each candidate."""
        rows = [
            (
                policy_label(each.config),
                each.gpu,
                each.config.topology,
                each.reason if each.rate is None else number(each.rate.mean),
            )
            for each in self.rates
        ]
        title = f"Highest rate, mean over seeds ({self.objective.seeds})"
        return Headline(title, ("policy", "GPU", "cluster", "requests/s"), rows)

    def write(self, out: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write ``plan.json`` and ``points.parquet``; as `Plan.write`."""
        from eldr_sim.planning.search.plan_files import rate_record, write_plan

        write_plan(Path(out), rate_record(self), self.runs, force)


def plan_rate(
    config: RunConfig,
    objective: Objective,
    *,
    policies: Sequence[str] = (),
    gpus: Sequence[str] = (),
    prices: Mapping[str, float] | None = None,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RatePlan:
    """Find the highest rate that a cluster carries within its objective, seed by seed.

    The highest rate of each seed is found by bisection to 1%, those of further seeds from that of
    the first. Under one seed all policies and rates
    see the same requests; the rate scales the gaps between them. The mean over ``objective.seeds``
    seeds has Student's t interval.

    Parameters
    ----------
    config
        The cluster and the workload; its rate is ignored.
    objective
        Service level and attainment.
    policies, gpus
        Candidates on the same topology; those of ``config`` if empty.
    prices
        Price of a GPU-hour by GPU.
    jobs
        Processes, see :func:`~eldr_sim.planning.runs.runner.run_points`.
    progress
        Called after every run with the numbers of runs done and asked for so far.

    Raises
    ------
    InputError
        If an argument is not valid, or the arguments contradict each other.
    """
    asked, config = config, config.model_copy(update={"goodput": objective.level})
    configs = clusters_to_plan(config, policies, gpus, prices or {})
    low = lowest_rate(config)
    runs = Runs(jobs, progress)
    with runs.starting(configs[0]):
        starts = [_at(each, _likely(each, objective, low)) for each in configs]
        impossible = [bounds(start, objective).impossible for start in starts]
        possible = [start for start, reason in zip(starts, impossible, strict=True) if not reason]
        at_once = 1 if len(possible) > 1 else 2  # else one process would wait
        searches = [
            carried_by_seed(start, objective.seeds, objective, low=low, at_once=at_once)
            for start in possible
        ]
        found = iter(runs.together(searches))
        rates = []
        for each, why in zip(configs, impossible, strict=True):
            by_seed = () if why else tuple(next(found))
            rates.append(_carried_rate(each, by_seed, why or f"{low:.3g} req/s is too much", runs))
    return RatePlan(asked, objective, rates, _gains(rates), runs)


def _likely(config: RunConfig, objective: Objective, low: float) -> float:
    """Return the rate that a cluster carries by the estimate of `shapes.capacity`.

    One a worker where it says nothing.
    """
    some = max(low, float(config.n_decode or config.n_prefill))
    if config.prefill_only:
        return some
    config = _at(config, some)
    workload, _ = offered_load(config, routing_of(config, load_model(config.model)))
    prefill, decode = capacity(config, objective, workload)
    rate = decode * config.n_decode
    if config.n_prefill:
        rate = min(rate, prefill * config.n_prefill)
    return some if math.isinf(rate) else max(low, rate)


def _at(config: RunConfig, rate: float) -> RunConfig:
    return config.model_copy(update={"request_rate": rate})


def lowest_rate(config: RunConfig) -> float:
    """Return the lowest rate with enough requests in the measured window; raises InputError."""
    if config.duration_s is not None:
        return LEAST_REQUESTS / config.duration_s
    check_requests(config, math.inf)
    return 0.01


def check_requests(config: RunConfig, rate: float) -> None:
    """Raise InputError where a run measures too few requests to estimate a share such as 99%."""
    field, what, about = "num_requests", "requests", ""
    if config.num_requests is not None:
        expected = float(config.num_requests)
    elif config.duration_s is not None:
        field, expected, about = "duration", rate * config.duration_s, "about "
    else:  # a log, of which a part may be asked for
        field = next((name for name in NO_PART if getattr(config, name) is not None), "workload")
        workload, _ = offered_load(config, routing_of(config, load_model(config.model)))
        expected, what = workload.description["log_window"]["measured"], "requests of the log"
    if expected < LEAST_REQUESTS:
        problem = (
            f"{about}{expected:.0f} {what} in the measured window are too few to estimate a share"
        )
        raise InputError(field, problem, f"{LEAST_REQUESTS} or more")


def carried(
    config: RunConfig,
    seed: int,
    objective: Objective,
    *,
    low: float,
    high: float = math.inf,
    factor: float = FROM_ESTIMATE,
    at_once: int = 1,
    beaten: Callable[[float], bool] = lambda rate: False,
) -> Search[RateRange | None]:
    """Find the highest rate of a cluster under one seed, starting at the configuration's rate.

    For ``low`` and what follows see :func:`~eldr_sim.planning.search.search.highest_rate`.
    """
    assert config.request_rate is not None

    def meets(rate: float) -> Search[bool]:
        return attains(_at(config, rate), seed, objective)

    return highest_rate(
        config.request_rate, low, meets, factor=factor, tolerance=TOLERANCE, high=high,
        at_once=at_once, beaten=beaten,
    )  # fmt: skip


def carried_by_seed(
    config: RunConfig,
    n_seeds: int,
    objective: Objective,
    *,
    low: float,
    high: float = math.inf,
    at_once: int = 1,
) -> Search[list[float | None]]:
    """Find the highest rate of a cluster under each seed; of further seeds near that of the first.

    Starts at the configuration's rate. For ``low``, ``high`` and ``at_once`` (of the first seed)
    see :func:`~eldr_sim.planning.search.search.highest_rate`.
    """
    first = yield from carried(config, 0, objective, low=low, high=high, at_once=at_once)
    start, factor = (config, FROM_ESTIMATE) if first is None else (_at(config, first.good), NEAR)
    others = yield from side_by_side(
        [
            carried(start, seed, objective, low=low, high=high, factor=factor)
            for seed in range(1, n_seeds)
        ]
    )
    return [None if found is None else found.good for found in [first, *others]]


def _carried_rate(
    config: RunConfig, by_seed: tuple[float | None, ...], reason: str, runs: Runs
) -> CarriedRate:
    known = [rate for rate in by_seed if rate is not None]
    if not known or len(known) < len(by_seed):
        return CarriedRate(config, gpu_label(config), by_seed, None, None, reason)
    (summary,) = runs.summaries([_at(config, known[0])])
    return CarriedRate(config, gpu_label(config), by_seed, t_interval(known), summary)


def _gains(rates: Sequence[CarriedRate]) -> list[RateGain]:
    references: dict[str, CarriedRate] = {}
    gains = []
    for each in rates:
        reference = references.setdefault(each.gpu, each)
        if reference is each or reference.rate is None or each.rate is None:
            continue
        percent = paired_percent(each.by_seed, reference.by_seed)
        gains.append(RateGain(each.gpu, each.config.policy, reference.config.policy, percent))
    return gains
