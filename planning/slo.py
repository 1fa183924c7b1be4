"""Service-level objectives, and the confidence intervals that decide whether one is met."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.simulator.setup.config.groups import ServiceLevel


class Interval(NamedTuple):
    """A mean over seeds with its confidence interval; the ends are NaN for one seed."""

    mean: float
    low: float
    high: float


#: Student's t for 95% intervals, by degrees of freedom from 1 on: the values of SciPy, which takes
#: long to import.
_T = (
    12.706204736174694, 4.302652729749462, 3.1824463052837078, 2.7764451051977934,
    2.5705818356363146, 2.4469118511449786, 2.364624251592784, 2.306004135204166,
    2.262157162798205, 2.228138851986274, 2.200985160091639, 2.1788128296672284,
    2.1603686564627913, 2.144786687917804, 2.131449545559776, 2.1199052992212546,
    2.1098155778333156, 2.1009220402410382, 2.0930240544083087, 2.085963447265864,
)  # fmt: skip


def _t(freedom: int, confidence: float) -> float:
    """Return how many standard errors an interval reaches to each side."""
    if confidence == 0.95 and 0 < freedom <= len(_T):
        return _T[freedom - 1]
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + confidence) / 2))


def t_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of independent values with Student's t interval, n - 1 degrees of freedom."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return Interval(mean, math.nan, math.nan)
    standard_error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    error = standard_error * _t(len(values) - 1, confidence)
    return Interval(mean, mean - error, mean + error)


def paired_percent(
    values: Sequence[float | None], reference: Sequence[float | None], confidence: float = 0.95
) -> Interval:
    """Return the mean paired difference of two configurations in percent of the reference.

    One value per seed, in the same order; seeds in which either side has none are left out. NaN: no
    seed."""
    pairs = [(v, r) for v, r in zip(values, reference, strict=True) if v is not None and r]
    if not pairs:
        return Interval(math.nan, math.nan, math.nan)
    ours, theirs = np.array(pairs, dtype=np.float64).T
    return t_interval((100.0 * (ours / theirs - 1.0)).tolist(), confidence)


def is_below(values: Sequence[float | None], reference: Sequence[float | None]) -> bool:
    """Whether values are below a reference, by the 95% interval of paired differences."""
    n = min(len(values), len(reference))
    return paired_percent(values[:n], reference[:n]).high < 0.0


def mean_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are known.

    Args:
        values: one value for each seed, None where a run has none.

    Returns:
        The mean, or None if no value is known.
    """
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


class Verdict(StrEnum):
    """Whether a cluster meets its objective."""

    MEETS = "meets"
    MISSES = "misses"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Objective:
    """A service level, the share of requests that must keep it, and the confidence required.

    ``level``: bounds, ms; ``attainment``: share of the measured requests that must keep all;
    ``looks``: seeds after which the interval is computed: the first that lies on one side of the
    target decides; ``confidence``: over all looks (Bonferroni): each has ``1 - (1 - confidence) /
    len(looks)``."""

    level: ServiceLevel
    attainment: float = 0.99
    looks: tuple[int, ...] = (3, 5, 8)
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if not 0.0 < self.attainment < 1.0:
            raise InputError("attainment", f"{self.attainment:g}", "a share between 0 and 1")
        if self.level == ServiceLevel():
            raise InputError("slo", "no bound", "METRIC:MS such as ttft:500,tpot:30")

    @property
    def seeds(self) -> int:
        """Most seeds of a cluster."""
        return self.looks[-1]

    def is_out_of_reach(self, shares: Sequence[float]) -> bool:
        """Whether no luck of further seeds could show that the target is met.

        A look shows it by the mean less t standard errors. That is highest where all further seeds
        have one share, and concave in that share: taken where the derivative is zero, or at 1."""
        k, mean = len(shares), math.fsum(shares) / len(shares)
        square = math.fsum((share - mean) ** 2 for share in shares)
        for n in (n for n in self.looks if n > k):
            part, between = (n - k) / n, k * (n - k) / n
            factor = _t(n - 1, self._each) ** 2 / (n * (n - 1))
            above, steep = 1.0 - mean, factor * between - part**2
            if steep > 0.0:
                above = min(above, part * math.sqrt(square / (between * steep)))
            error = math.sqrt(factor * (square + between * above**2))
            if mean + part * above - error >= self.attainment - 1e-12:
                return False
        return True

    def interval(self, shares: Sequence[float], requests: int) -> Interval:
        """Return the attainment at one look, see :func:`attainment_interval`."""
        return attainment_interval(shares, requests, self._each)

    @property
    def _each(self) -> float:
        """Confidence of a look."""
        return 1.0 - (1.0 - self.confidence) / len(self.looks)

    def verdict(self, interval: Interval) -> Verdict:
        """Return on which side of the target an interval lies."""
        if interval.low >= self.attainment:
            return Verdict.MEETS
        return Verdict.MISSES if interval.high < self.attainment else Verdict.UNDECIDED


def looks_up_to(seeds: int) -> tuple[int, ...]:
    """Return the looks 3, 5, 8, 13, ..., ``seeds``; raises InputError below 2."""
    if seeds < 2:
        raise InputError("seeds", str(seeds), "2 or more: an interval needs them")
    looks, following = [3], 5
    while looks[-1] < seeds:
        looks.append(following)
        following += looks[-2]
    return (*(n for n in looks if n < seeds), seeds)


def attainment_interval(
    shares: Sequence[float], requests: int, confidence: float = 0.95
) -> Interval:
    """Return the mean attainment over seeds with Student's t interval, which also covers Wilson's
    of all ``requests`` (JASA 22, 1927), as shares that hardly differ make it too narrow."""
    return _widened(t_interval(shares, confidence), requests, confidence)


def block_interval(runs: Iterable[Sequence[tuple[int, int]]], confidence: float = 0.95) -> Interval:
    """Return the attainment of a log with an interval over its blocks, of which ``runs`` has each
    seed's (good, all), taken as independent and alike.

    The attainment is the ratio of their sums, the interval Student's t with the variance of a ratio
    estimator (Cochran, Sampling Techniques, 1977, eq. 6.13), widened as `attainment_interval`."""
    counts = np.array(list(runs), np.float64).sum(axis=0)
    good, every = counts[counts[:, 1] > 0].T
    p, n = float(good.sum() / every.sum()), len(every)
    if n < 2:
        return Interval(p, math.nan, math.nan)
    off = good - p * every
    error = math.sqrt(float((off**2).sum()) * n / (n - 1)) / float(every.sum())
    half = error * _t(n - 1, confidence)
    requests = int(every.sum())
    return _widened(Interval(p, p - half, p + half), requests, confidence)


def _widened(by_sample: Interval, requests: int, confidence: float) -> Interval:
    """Return an interval that covers Wilson's, too, for so many independent requests."""
    from scipy.special import ndtri  # takes long to import

    p, z = by_sample.mean, float(ndtri((1 + confidence) / 2))
    shrink = 1.0 + z * z / requests
    centre = (p + z * z / (2 * requests)) / shrink
    half = z / shrink * math.sqrt(p * (1 - p) / requests + (z / (2 * requests)) ** 2)
    return Interval(
        p, max(0.0, min(by_sample.low, centre - half)), min(1.0, max(by_sample.high, centre + half))
    )
