"""Trials of clusters: seeds until the attainment is decided."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eldr_sim.planning.runs.run_cache import Search, Summary
from eldr_sim.planning.runs.runner import with_seed
from eldr_sim.planning.slo import Interval, Objective, Verdict, block_interval, mean_known
from eldr_sim.simulator.setup.config.run_config import RunConfig

LEAST_REQUESTS = 100  #: fewest expected requests of a run that estimates a share such as 99%
SHORTEST = 0.25  #: window of the shortest run, as a share of that of a plan
PAIRED_SEEDS = 3  #: seeds of what is searched seed by seed: margins, savings, the best splits


@dataclass(frozen=True)
class Trial:
    """Verdict on one cluster under one load, with its runs."""

    config: RunConfig  #: the cluster, with the first seed
    verdict: Verdict  #: whether it meets the objective
    #: Share of good requests with its interval at the last look; NaN where no bound was given.
    attainment: Interval
    #: Summary of each seed's run; of the first alone if that was hopeless.
    summaries: tuple[Summary, ...]
    hopeless: bool = False  #: whether the first seed decided the verdict

    def mean(self, key: str) -> float | None:
        """Return the mean of a metric over the seeds, see `mean_known`."""
        return mean_known([summary[key] for summary in self.summaries])

    @property
    def falls_short(self) -> str:
        """Say why this cluster, which is no answer, is none: it misses, or is undecided."""
        share, n = f"{100 * self.attainment.mean:.1f}%", len(self.summaries)
        if self.verdict is Verdict.UNDECIDED:
            return f"attains {share}, undecided after {n} seed{'s' * (n != 1)} of this length"
        return f"attains only {share}"

    def attained(self, metric: str) -> float:
        """Return the mean attainment of one bound alone."""
        shares = [summary["slo_attainment_by_metric"][metric] for summary in self.summaries]
        return math.fsum(shares) / len(shares)

    @property
    def by_blocks(self) -> Interval | None:
        """Attainment with its interval over the blocks of the log; None where none is replayed."""
        blocks = [summary["slo_blocks"] for summary in self.summaries if "slo_blocks" in summary]
        return block_interval(blocks) if blocks else None

    @property
    def per_user(self) -> float:
        """Output tokens per second of the median request."""
        tpot_ms = self.mean("median_tpot_ms")
        return 1e3 / tpot_ms if tpot_ms else math.nan

    @property
    def per_gpu(self) -> float:
        """Output tokens per second per GPU."""
        return (self.mean("output_throughput") or 0.0) / self.config.n_gpus


def found_by_seed(config: RunConfig, summaries: Sequence[Summary]) -> Trial:
    """Return a cluster with runs that satisfy the question, seed by seed, as a trial."""
    share = mean_known([summary["slo_attainment"] for summary in summaries])
    alone = Interval(math.nan if share is None else share, math.nan, math.nan)
    return Trial(config, Verdict.MEETS, alone, tuple(summaries))


def try_cluster(config: RunConfig, objective: Objective, *, surely: bool = True) -> Search[Trial]:
    """Judge a cluster by seeds, the same for every cluster, until the interval lies on one side of
    the target or no further seeds could bring it above: it stays undecided then, after a single
    seed unless the interval of its requests lies below.

    ``config``: its ``goodput`` must be the objective's level; ``surely``: else a first seed that
    attains the target is taken for all, and so is a run of a quarter of the window that misses it
    by more than luck: short windows favour clusters."""
    if not surely and (short := shortened(config, SHORTEST)) is not config:
        quick = (yield [short])[0]
        share = float(quick["slo_attainment"])
        # Half of the requests: those of one run depend on each other.
        of_requests = objective.interval([share, share], quick["num_prompts"] // 2)
        if objective.verdict(of_requests) is Verdict.MISSES and objective.is_out_of_reach([share]):
            alone = Interval(share, math.nan, math.nan)
            return Trial(config, Verdict.MISSES, alone, (quick,), hopeless=True)
    first = (yield [config])[0]
    share = float(first["slo_attainment"])
    alone = Interval(share, math.nan, math.nan)
    if objective.is_out_of_reach([share]):
        of_requests = objective.interval([share, share], first["num_prompts"])
        verdict = objective.verdict(of_requests)
        return Trial(config, verdict, alone, (first,), hopeless=True)
    if share >= objective.attainment and not surely:
        return Trial(config, Verdict.MEETS, alone, (first,))
    summaries: list[Summary] = [first]
    verdict, attainment = Verdict.UNDECIDED, Interval(math.nan, math.nan, math.nan)
    for seeds in objective.looks:
        summaries += yield [with_seed(config, i) for i in range(len(summaries), seeds)]
        shares = [summary["slo_attainment"] for summary in summaries]
        attainment = objective.interval(
            shares, sum(summary["num_prompts"] for summary in summaries)
        )
        verdict = objective.verdict(attainment)
        if verdict is not Verdict.UNDECIDED or objective.is_out_of_reach(shares):
            break
    return Trial(config, verdict, attainment, tuple(summaries))


def attains(config: RunConfig, seed: int, objective: Objective) -> Search[bool]:
    """Return whether one seed attains the target."""
    summary = (yield [with_seed(config, seed)])[0]
    return bool(summary["slo_attainment"] >= objective.attainment)


def shortened(config: RunConfig, share: float) -> RunConfig:
    """Return a run of a part of the window; a log is measured as it is."""
    if config.requests.num_requests is not None:
        n = max(LEAST_REQUESTS, math.ceil(share * config.requests.num_requests))
        return config.model_copy(update={"num_requests": min(n, config.requests.num_requests)})
    if config.requests.replays_log or config.requests.duration_s is None:
        return config
    rate = config.requests.request_rate or math.inf
    window = max(
        share * config.requests.duration_s, min(config.requests.duration_s, LEAST_REQUESTS / rate)
    )
    warm = max(share, 0.5) * config.requests.warmup_s
    return config.model_copy(update={"duration": window, "warmup": warm})
