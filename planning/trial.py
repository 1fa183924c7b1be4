"""Trials of clusters: a short pre-run, then seeds until the attainment is decided."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eldr_sim.planning.intervals import Interval, mean_known
from eldr_sim.planning.paired import with_seed
from eldr_sim.planning.runs import Search, Summary
from eldr_sim.planning.slo import Objective, Verdict
from eldr_sim.simulator.config import RunConfig

#: Length of the pre-run, as a share of the measured window or of the requests.
_PRE_RUN = 0.25


@dataclass(frozen=True)
class Trial:
    """Verdict on one cluster under one load, with its runs.

    Attributes
    ----------
    config
        The cluster, with the first seed.
    verdict
        Whether it meets the objective.
    attainment
        Share of good requests with its interval at the last look.
    summaries
        Summary of each seed's run; of the pre-run alone if that was hopeless.
    hopeless
        Whether the pre-run decided the verdict.
    """

    config: RunConfig
    verdict: Verdict
    attainment: Interval
    summaries: tuple[Summary, ...]
    hopeless: bool

    def mean(self, key: str) -> float | None:
        """Return the mean of a metric over the seeds, see `mean_known`."""
        return mean_known([summary[key] for summary in self.summaries])

    def attained(self, metric: str) -> float:
        """Return the mean attainment of one bound alone."""
        shares = [summary["slo_attainment_by_metric"][metric] for summary in self.summaries]
        return math.fsum(shares) / len(shares)


def try_cluster(config: RunConfig, objective: Objective) -> Search[Trial]:
    """Judge a cluster.

    First a pre-run of a quarter of the length: a cluster that attains at most half of the target
    there is dropped, as queues only grow with time. Then one run per seed, the same seeds for
    every cluster, until the confidence interval lies on one side of the target.

    Parameters
    ----------
    config
        The cluster and its load; ``goodput`` must be the objective's level.
    objective
        Service level and attainment.
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


def passes(config: RunConfig, seed: int, objective: Objective) -> Search[bool]:
    """Return whether one seed attains the target, after the pre-run."""
    first = (yield [pre_run(config)])[0]
    if first["slo_attainment"] <= objective.hopeless:
        return False
    return (yield from attains(config, seed, objective))


def attains(config: RunConfig, seed: int, objective: Objective) -> Search[bool]:
    """Return whether one seed attains the target, without a pre-run."""
    summary = (yield [with_seed(config, seed)])[0]
    return bool(summary["slo_attainment"] >= objective.attainment)


def pre_run(config: RunConfig) -> RunConfig:
    """Return the configuration of the short pre-run."""
    if config.num_requests is not None:
        return config.model_copy(
            update={"num_requests": max(1, int(_PRE_RUN * config.num_requests))}
        )
    return config.model_copy(update={"duration": _PRE_RUN * config.duration})
