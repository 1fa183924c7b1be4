"""Trying one cluster: a short run first, then seeds until its attainment is told."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eldr_sim.planning.intervals import Interval
from eldr_sim.planning.paired import with_seed
from eldr_sim.planning.runs import Summary, Task
from eldr_sim.planning.slo import Objective, Verdict
from eldr_sim.simulator.config import RunConfig

#: Share of the measured window (or of the requests) of the run that comes first.
_PRE_RUN = 0.25


@dataclass(frozen=True)
class Trial:
    """Verdict on one cluster under one load, and the runs that it rests on.

    Attributes
    ----------
    config
        The cluster, with the first seed.
    verdict
        Whether it meets the objective.
    attainment
        Share of good requests with its interval at the last look.
    summaries
        Of the runs, seed by seed; only the short pre-run's where that was hopeless.
    hopeless
        Whether the pre-run decided.
    """

    config: RunConfig
    verdict: Verdict
    attainment: Interval
    summaries: tuple[Summary, ...]
    hopeless: bool

    def mean(self, key: str) -> float | None:
        """Return the mean of a figure of the summaries; None where one has none."""
        values = [summary[key] for summary in self.summaries]
        return None if None in values else math.fsum(values) / len(values)

    def attained(self, metric: str) -> float:
        """Return the mean attainment of one bound alone."""
        shares = [summary["slo_attainment_by_metric"][metric] for summary in self.summaries]
        return math.fsum(shares) / len(shares)


def try_cluster(config: RunConfig, objective: Objective) -> Task[Trial]:
    """Judge a cluster.

    A pre-run of a quarter of the length comes first: a cluster that attains less than half of the
    target in it is given up (queues only grow with time). Then come seeds, the same for every
    cluster, until the interval clears the target.

    Parameters
    ----------
    config
        The cluster and its load; ``goodput`` must be the objective's level.
    objective
        What it has to meet.
    """
    first = (yield [pre_run(config)])[0]
    if first["slo_attainment"] <= objective.hopeless:
        share = float(first["slo_attainment"])
        alone = Interval(share, math.nan, math.nan)
        return Trial(config, Verdict.MISSES, alone, (first,), hopeless=True)
    summaries: list[Summary] = []
    verdict, attainment = Verdict.UNDECIDED, Interval(math.nan, math.nan, math.nan)
    for seeds in objective.looks:
        summaries += yield [with_seed(config, i) for i in range(len(summaries), seeds)]
        attainment = objective.interval(
            [summary["slo_attainment"] for summary in summaries],
            sum(summary["num_prompts"] for summary in summaries),
        )
        verdict = objective.verdict(attainment)
        if verdict is not Verdict.UNDECIDED:
            break
    return Trial(config, verdict, attainment, tuple(summaries), hopeless=False)


def passes(config: RunConfig, seed: int, objective: Objective) -> Task[bool]:
    """Say whether the run of one seed alone attains the target."""
    first = (yield [pre_run(config)])[0]
    if first["slo_attainment"] <= objective.hopeless:
        return False
    return (yield from attains(config, seed, objective))


def attains(config: RunConfig, seed: int, objective: Objective) -> Task[bool]:
    """Say whether one seed attains the target, without the pre-run of :func:`passes`."""
    summary = (yield [with_seed(config, seed)])[0]
    return bool(summary["slo_attainment"] >= objective.attainment)


def pre_run(config: RunConfig) -> RunConfig:
    """Return the short run that comes before the others."""
    if config.num_requests is not None:
        return config.model_copy(
            update={"num_requests": max(1, int(_PRE_RUN * config.num_requests))}
        )
    return config.model_copy(update={"duration": _PRE_RUN * config.duration})
