"""Paired comparison of policies: the same requests under every policy, seed by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from eldr_sim.errors import InputError
from eldr_sim.simulator.catalogue import HEADLINE
from eldr_sim.simulator.config import RunConfig
from eldr_sim.simulator.run import simulate

#: Policies that balance load and know nothing of experts (ELDR section 6, baselines).
LOAD_BALANCERS = ("random", "round_robin", "jsq", "p2c")
#: Figures of a comparison.
METRICS = HEADLINE


@dataclass(frozen=True)
class Difference:
    """How a policy differs from a reference, over seeds that share their requests.

    ``percent`` is the mean of the paired differences in percent of the reference, ``low`` and
    ``high`` the ends of its 95% confidence interval (Student's t over seeds); NaN for one seed.
    """

    policy: str
    reference: str
    metric: str
    percent: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """The figures of every run, one row a policy and seed, and the differences."""

    runs: pa.Table
    best_load_balancer: str | None
    differences: list[Difference]
    summaries: dict[str, dict[str, Any]]


def paired_difference(
    values: Sequence[float], reference: Sequence[float], confidence: float = 0.95
) -> tuple[float, float, float]:
    """Return mean, lower and upper end of the paired differences, in percent of the reference.

    Parameters
    ----------
    values, reference
        One figure a seed, in the same order.
    confidence
        Of the interval, by Student's t with n - 1 degrees of freedom.
    """
    percent = 100.0 * (np.asarray(values) / np.asarray(reference) - 1.0)
    return mean_interval(percent.tolist(), confidence)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Return the mean of independent values and the ends of its confidence interval.

    Student's t with n - 1 degrees of freedom; the ends are NaN for one value.
    """
    from scipy.special import stdtrit  # takes long to import

    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan, math.nan
    standard_error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    error = standard_error * float(stdtrit(len(values) - 1, (1 + confidence) / 2))
    return mean, mean - error, mean + error


def paired_percent(
    values: Sequence[float | None], reference: Sequence[float | None], confidence: float = 0.95
) -> tuple[float, float, float]:
    """Return :func:`paired_difference` over the seeds in which both have a figure; else NaN."""
    pairs = [(v, r) for v, r in zip(values, reference, strict=True) if v is not None and r]
    if not pairs:
        return math.nan, math.nan, math.nan
    return paired_difference([v for v, _ in pairs], [r for _, r in pairs], confidence)


def compare(
    config: RunConfig,
    policies: Sequence[str],
    n_seeds: int,
    progress: Callable[[float], None] | None = None,
) -> Comparison:
    """Run every policy under every seed and pair the results.

    Parameters
    ----------
    config
        The run; its ``policy`` is ignored, its ``seed`` is the first of the seeds.
    policies
        Decode policies. ``round_robin`` is added where it is missing: it is a reference.
    n_seeds
        Seeds, at least 1; two or more give intervals.
    progress
        Called with the share of the work done.

    Raises
    ------
    InputError
        If a policy is unknown, listed twice, or ``n_seeds`` is below 1.
    """
    if n_seeds < 1:
        raise InputError("seeds", str(n_seeds), "1 or more")
    names = list(policies)
    if len(set(names)) != len(names):
        raise InputError("policies", f"{', '.join(names)} names one twice")
    if "round_robin" not in names:
        names.insert(0, "round_robin")
    seeds = range(config.seed, config.seed + n_seeds)
    rows: list[dict[str, Any]] = []
    summaries: dict[str, dict[str, Any]] = {}
    total = len(names) * n_seeds
    for seed in seeds:
        for name in names:
            update = {"policy": name, "seed": seed}

            def share(done: float, before: int = len(rows)) -> None:
                if progress is not None:
                    progress((before + done) / total)

            summary = simulate(config.model_copy(update=update), share).summary
            summaries.setdefault(name, summary)
            rows.append(
                update
                | {metric: summary[metric] for metric in METRICS}
                | {key: summary[key] for key in ("num_prompts", "completed", "failed")}
            )
    runs = pa.Table.from_pylist(rows)
    figures = {
        (name, metric): [row[metric] for row in rows if row["policy"] == name]
        for name in names
        for metric in METRICS
    }
    balancers = [name for name in names if name in LOAD_BALANCERS]
    best = min(
        balancers,
        key=lambda name: (sum(v or math.inf for v in figures[name, "median_tpot_ms"]), name),
    )
    differences = [
        Difference(
            name,
            reference,
            metric,
            *paired_percent(figures[name, metric], figures[reference, metric]),
        )
        for reference in dict.fromkeys(("round_robin", best))
        for name in names
        if name != reference
        for metric in METRICS
    ]
    return Comparison(runs, best, differences, summaries)
