"""Paired comparisons: every configuration runs under the same seeds, so on the same requests."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from eldr_sim.errors import InputError
from eldr_sim.inputs import within
from eldr_sim.planning.runs.run_cache import RunCache, Summary
from eldr_sim.planning.runs.runner import with_seed
from eldr_sim.planning.slo import mean_known, paired_percent
from eldr_sim.simulator.outcome.catalogue import Headline, headline_tags, label, number
from eldr_sim.simulator.run import check_run
from eldr_sim.simulator.setup.config.run_config import RunConfig

MOST_SEEDS = 10_000


@dataclass(frozen=True)
class PairedDifference:
    """Difference of one metric between a configuration and a reference, paired over seeds."""

    #: ``name``, ``reference``: names of the two configurations.
    name: str
    reference: str
    metric: str  #: tag of the metric, see :mod:`eldr_sim.simulator.outcome.catalogue`
    #: ``by_seed``, ``reference_by_seed``: the metric under each seed; None if a run has none.
    by_seed: tuple[float | None, ...]
    reference_by_seed: tuple[float | None, ...]
    #: Mean of the paired differences in percent of the reference, with its 95% interval (NaN: one
    #: seed).
    percent: float
    low: float
    high: float

    @property
    def mean(self) -> float | None:
        """Mean over the seeds, see `mean_known`."""
        return mean_known(self.by_seed)

    @property
    def reference_mean(self) -> float | None:
        """Mean of the reference over the seeds, see `mean_known`."""
        return mean_known(self.reference_by_seed)

    def record(self) -> dict[str, float | None]:
        """Return ``percent``, ``low`` and ``high`` ready for JSON: None instead of NaN."""
        ends = {"percent": self.percent, "low": self.low, "high": self.high}
        return {key: None if math.isnan(value) else value for key, value in ends.items()}


@dataclass(frozen=True)
class PairedRuns:
    """Runs of several configurations under the same seeds: by name, a summary per seed."""

    summaries: dict[str, tuple[Summary, ...]]

    def differences(
        self, name: str, reference: str, metrics: Sequence[str]
    ) -> list[PairedDifference]:
        """Return the difference of a configuration from a reference in each metric."""
        differences = []
        for metric in metrics:
            ours, theirs = (
                tuple(summary[metric] for summary in self.summaries[which])
                for which in (name, reference)
            )
            interval = paired_percent(ours, theirs)
            differences.append(PairedDifference(name, reference, metric, ours, theirs, *interval))
        return differences


def run_paired(
    configs: Mapping[str, RunConfig],
    n_seeds: int,
    jobs: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> PairedRuns:
    """Run configurations, by name, under the same seeds; the seed of each is its first.

    Raises InputError if a run fails or ``n_seeds`` is below 1. ``jobs``: see `runner.run_points`;
    ``progress``: called with the share of the runs that are done."""
    if n_seeds < 1:
        raise InputError("seeds", str(n_seeds), "1 or more")
    within("seeds", n_seeds, MOST_SEEDS)
    for config in configs.values():  # before anything waits
        check_run(config)
    seeds = {
        name: [with_seed(config, i) for i in range(n_seeds)] for name, config in configs.items()
    }

    def share(done: int, asked: int) -> None:
        if progress is not None:
            progress(done / asked)

    runs = RunCache(jobs, share)
    runs.summaries([config for seed in seeds.values() for config in seed])  # all side by side
    return PairedRuns({name: tuple(runs.summaries(own)) for name, own in seeds.items()})


def headline_of(title: str, first: str, named: Iterable[tuple[str, Sequence[Summary]]]) -> Headline:
    """Return the means over seeds of the headline metrics by name, under the heading ``first``."""
    known = list(named)
    tags = headline_tags(known[0][1][0].get("policy", "") is None)
    rows = [
        (name, *(number(mean_known([s[tag] for s in summaries])) for tag in tags))
        for name, summaries in known
    ]
    return Headline(title, (first, *map(label, tags)), rows)
