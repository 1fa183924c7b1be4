"""The best use of a number of GPUs: the shape and split that carry the highest rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count

from eldr_sim.errors import InputError
from eldr_sim.planning.candidates import (
    Candidate,
    ClusterTemplate,
    clusters_to_plan,
    gpu_label,
    make_candidate,
)
from eldr_sim.planning.intervals import t_interval
from eldr_sim.planning.rates import NEAR, CarriedRate, RatePlan, carried, lowest_rate
from eldr_sim.planning.runs import Runs, Search, side_by_side
from eldr_sim.planning.savings import PAIRED_SEEDS
from eldr_sim.planning.slo import Objective
from eldr_sim.simulator.config import RunConfig

#: Splits that are simulated first, of each candidate, and those of them that all seeds decide.
_TRIED, _COMPARED = 8, 2
_RUNS_OF_RATE = 8
#: Step by which the highest rate is looked for from an estimate.
_FROM_ESTIMATE = 1.25


def plan_split(
    config: RunConfig,
    objective: Objective,
    n_gpus: int,
    *,
    policies: Sequence[str] = (),
    gpus: Sequence[str] = (),
    prices: Mapping[str, float] | None = None,
    tensor_parallel_sizes: Sequence[int] = (),
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RatePlan:
    """Find the clusters of up to so many GPUs that carry the highest rates within an objective.

    The estimate of `shapes.capacity` ranks every split of every shape. The first eight of each
    candidate, and what lies beside the best of them, are simulated under one seed; the best two
    under up to three.

    Parameters
    ----------
    config
        The workload and the engines; its rate and topology are ignored.
    objective
        Service level and attainment.
    n_gpus
        Most GPUs of the cluster.
    policies, gpus, prices, tensor_parallel_sizes, jobs, progress
        As `plan`.

    Returns
    -------
    RatePlan
        The best clusters of each candidate, highest rate first.

    Raises
    ------
    InputError
        If an argument is not valid, or no shape fits.
    """
    if n_gpus < 1:
        raise InputError("gpus", str(n_gpus), "1 or more")
    asked, config = config, config.model_copy(update={"goodput": objective.level})
    low = lowest_rate(config)
    config = config.model_copy(update={"request_rate": max(low, 1.0)})
    configs = clusters_to_plan(config, policies, gpus, prices or {})
    candidates = [
        make_candidate(each, objective, n_gpus, tensor_parallel_sizes) for each in configs
    ]
    if not any(candidate.templates for candidate in candidates):
        raise InputError("gpus", f"{n_gpus}: {candidates[0].reasons[-1]}", "more GPUs")
    runs = Runs(jobs, progress)
    runs.expected = len(candidates) * _RUNS_OF_RATE * (_TRIED + 2 + _COMPARED * PAIRED_SEEDS)
    found = runs.together([_best(each, objective, n_gpus, low) for each in candidates])
    rates = [rate for each in found for rate in each]
    rates.sort(key=lambda each: -(each.rate.mean if each.rate else 0.0))
    return RatePlan(asked, objective, rates, [], runs)


def _best(
    candidate: Candidate, objective: Objective, n_gpus: int, low: float
) -> Search[list[CarriedRate]]:
    """Find the best splits of a candidate."""
    splits: list[tuple[float, ClusterTemplate, int, int]] = []
    for template in candidate.templates:
        if not template.bounds.impossible:
            prefill, decode = template.capacity
            splits += [
                (min(x * prefill if x else decode * y, y * decode), template, x, y)
                for x, y in _full_splits(template, n_gpus)
            ]
    splits.sort(key=lambda split: -split[0])
    known: dict[tuple[int, int, int], float] = {}

    def rate_of(template: ClusterTemplate, x: int, y: int, start: float) -> Search[float]:
        key = (id(template), x, y)
        if key not in known:
            at = _at(template, x, y, max(low, start))
            found = yield from carried(at, 0, objective, low=low, factor=_FROM_ESTIMATE)
            known[key] = found or 0.0
        return known[key]

    first = splits[:_TRIED]
    rates = yield from side_by_side([rate_of(t, x, y, start) for start, t, x, y in first])
    tried = [(rate, *split[1:]) for rate, split in zip(rates, first, strict=True)]
    tried.sort(key=lambda split: -split[0])
    while tried:
        rate, template, x, y = tried[0]
        beside = [
            (a, b)
            for a, b in _full_splits(template, n_gpus)
            if abs(a - x) == 1 and (id(template), a, b) not in known
        ]
        rates = yield from side_by_side([rate_of(template, a, b, rate) for a, b in beside])
        better = [(found, template, *split) for found, split in zip(rates, beside, strict=True)]
        tried = sorted([*tried, *better], key=lambda split: -split[0])
        if tried[0][1:] == (template, x, y):
            break
    seeds = range(1, min(PAIRED_SEEDS, objective.seeds))
    compared = [split for split in tried[:_COMPARED] if split[0]]
    again = iter(
        (
            yield from side_by_side(
                [
                    carried(_at(t, x, y, rate), seed, objective, low=low, factor=NEAR)
                    for rate, t, x, y in compared
                    for seed in seeds
                ]
            )
        )
    )
    result = []
    for rate, template, x, y in tried:
        by_seed: list[float | None] = [rate or None]
        if (rate, template, x, y) in compared:
            by_seed += [next(again) for _ in seeds]
        values = [value for value in by_seed if value is not None]
        config, whole = template.at(x, y), len(values) == len(by_seed)
        summary = None
        if whole:
            summary = (yield [config.model_copy(update={"request_rate": values[0]})])[0]
        reason = "" if whole else f"{low:.3g} req/s is too much"
        interval = t_interval(values) if whole else None
        carried_rate = CarriedRate(
            config, gpu_label(config), tuple(by_seed), interval, summary, reason
        )
        result.append(carried_rate)
    return result


def _at(template: ClusterTemplate, x: int, y: int, rate: float) -> RunConfig:
    return template.at(x, y).model_copy(update={"request_rate": rate})


def _full_splits(template: ClusterTemplate, n_gpus: int) -> list[tuple[int, int]]:
    """Return the clusters of a shape that leave no room for a decode worker more."""
    of_prefill, of_decode = template.worker_sizes
    if template.config.colocated:
        return [(0, n_gpus // of_decode)]
    splits: list[tuple[int, int]] = []
    for x in count(1):
        y = (n_gpus - x * of_prefill) // of_decode
        if y < 1:
            return splits
        splits.append((x, y))
    return splits
