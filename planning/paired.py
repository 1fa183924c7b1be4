"""The paired comparison: the same seeds, and so the same requests, for every configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from eldr_sim.errors import InputError
from eldr_sim.planning.intervals import paired_percent
from eldr_sim.planning.runs import Runs, Summary
from eldr_sim.simulator.catalogue import HEADLINE, label
from eldr_sim.simulator.config import RunConfig
from eldr_sim.simulator.headline import Headline, number


@dataclass(frozen=True)
class Difference:
    """Difference of one figure between a configuration and a reference, paired over seeds.

    Attributes
    ----------
    name, reference
        The two configurations.
    metric
        Tag of the figure, see :mod:`eldr_sim.simulator.catalogue`.
    by_seed, reference_by_seed
        The figure under each seed; None where a run has none.
    percent, low, high
        Mean of the paired differences in percent of the reference, and the ends of its 95% interval
        (Student's t over seeds); the ends are NaN for one seed.
    """

    name: str
    reference: str
    metric: str
    by_seed: tuple[float | None, ...]
    reference_by_seed: tuple[float | None, ...]
    percent: float
    low: float
    high: float

    @property
    def mean(self) -> float | None:
        """Mean of the figure over the seeds; None where a run has none."""
        return mean_of(self.by_seed)

    @property
    def reference_mean(self) -> float | None:
        """Mean of the reference's figure over the seeds; None where a run has none."""
        return mean_of(self.reference_by_seed)

    def record(self) -> dict[str, float | None]:
        """Return ``percent, low, high`` ready for JSON: None for what does not exist."""
        ends = {"percent": self.percent, "low": self.low, "high": self.high}
        return {key: None if math.isnan(value) else value for key, value in ends.items()}


@dataclass(frozen=True)
class PairedRuns:
    """Runs of several configurations under the same seeds: a summary a seed by name."""

    summaries: dict[str, tuple[Summary, ...]]

    def differences(self, name: str, reference: str, metrics: Sequence[str]) -> list[Difference]:
        """Return how a configuration differs from a reference, a figure each."""
        differences = []
        for metric in metrics:
            ours, theirs = (
                tuple(summary[metric] for summary in self.summaries[which])
                for which in (name, reference)
            )
            interval = paired_percent(ours, theirs)
            differences.append(Difference(name, reference, metric, ours, theirs, *interval))
        return differences


def run_paired(
    configs: Mapping[str, RunConfig],
    n_seeds: int,
    jobs: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> PairedRuns:
    """Run configurations under the same seeds.

    Parameters
    ----------
    configs
        By name; the seed of each is the first of its seeds.
    n_seeds
        Seeds, at least 1; two or more give intervals.
    jobs
        Processes, see :func:`~eldr_sim.planning.runner.run_points`.
    progress
        Called with the share of the runs that are done.

    Raises
    ------
    InputError
        If a run fails or ``n_seeds`` is below 1.
    """
    if n_seeds < 1:
        raise InputError("seeds", str(n_seeds), "1 or more")
    seeds = {
        name: [with_seed(config, i) for i in range(n_seeds)] for name, config in configs.items()
    }

    def share(done: int, asked: int) -> None:
        if progress is not None:
            progress(done / asked)

    runs = Runs(jobs, share)
    runs.summaries([config for own in seeds.values() for config in own])  # all side by side
    return PairedRuns({name: tuple(runs.summaries(own)) for name, own in seeds.items()})


def with_seed(config: RunConfig, index: int) -> RunConfig:
    """Return the run of seed number ``index``, counted from the configuration's own."""
    return config.model_copy(update={"seed": config.seed + index})


def headline_of(title: str, first: str, named: Iterable[tuple[str, Sequence[Summary]]]) -> Headline:
    """Return the means over seeds of the headline figures by name; ``first`` heads the names."""
    rows = [
        (name, *(number(mean_of([s[tag] for s in summaries])) for tag in HEADLINE))
        for name, summaries in named
    ]
    return Headline(title, (first, *map(label, HEADLINE)), rows)


def mean_known(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not missing; None where all are."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean; None where a value is missing."""
    return None if None in values else mean_known(values)
