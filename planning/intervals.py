"""Confidence intervals of means and of paired differences over seeds."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """A mean over seeds with its confidence interval; the ends are NaN for one seed."""

    mean: float
    low: float
    high: float


def t_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of independent values with Student's t interval, n - 1 degrees of freedom."""
    from scipy.special import stdtrit  # takes long to import

    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return Interval(mean, math.nan, math.nan)
    standard_error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    error = standard_error * float(stdtrit(len(values) - 1, (1 + confidence) / 2))
    return Interval(mean, mean - error, mean + error)


def paired_percent(
    values: Sequence[float | None], reference: Sequence[float | None], confidence: float = 0.95
) -> Interval:
    """Return the mean paired difference of two configurations in percent of the reference.

    One value per seed, in the same order. Seeds in which either side has none are left out; if no
    seed is left, the result is NaN.
    """
    pairs = [(v, r) for v, r in zip(values, reference, strict=True) if v is not None and r]
    if not pairs:
        return Interval(math.nan, math.nan, math.nan)
    ours, theirs = np.array(pairs, dtype=np.float64).T
    return t_interval((100.0 * (ours / theirs - 1.0)).tolist(), confidence)


def is_below(values: Sequence[float | None], reference: Sequence[float | None]) -> bool:
    """Whether values are below a reference in the mean, by the 95% interval of paired differences.

    Of the seeds that both have; not where none is.
    """
    n = min(len(values), len(reference))
    return paired_percent(values[:n], reference[:n]).high < 0.0


def mean_known(values: Iterable[float | None]) -> float | None:
    """Return the mean over the seeds that have a value; None if none has.

    Seeds without a value are left out, as they are from paired differences.
    """
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
