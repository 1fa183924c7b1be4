"""Service-level objectives, and the confidence intervals that decide whether one is met."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.planning.intervals import Interval, t_interval
from eldr_sim.simulator.setup.config.run_config import ServiceLevel, make_config


class Verdict(StrEnum):
    """Whether a cluster meets its objective."""

    MEETS = "meets"
    MISSES = "misses"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Objective:
    """A service level, the share of requests that must keep it, and the confidence required.

    ``level``: bounds of TTFT, TPOT and E2EL, ms; at least one; ``attainment``: share of the
    measured requests that must keep all, 0 to 1; ``looks``: numbers of seeds after which the
    interval is computed: the first that lies on one side of the target decides; ``confidence``:
    over all looks (Bonferroni): each uses an interval of ``1 - (1 - confidence) / len(looks)``.
    """

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

        A look shows it by the low end of Student's interval: the mean less t standard errors. That
        is highest where all further seeds have one share, as their spread lowers it, and concave in
        that share: here it is taken where the derivative is zero, or at 1. So one seed below the
        target is enough where three are the most, and one with twice the misses that are allowed
        where eight are.
        """
        from scipy.special import stdtrit  # takes long to import

        k, mean = len(shares), math.fsum(shares) / len(shares)
        square = math.fsum((share - mean) ** 2 for share in shares)
        for n in (n for n in self.looks if n > k):
            part, between = (n - k) / n, k * (n - k) / n
            factor = float(stdtrit(n - 1, (1 + self._each) / 2)) ** 2 / (n * (n - 1))
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
    """Return the looks for at most ``seeds`` seeds: 3, 5, 8, 13, ..., ``seeds``.

    Raises InputError if ``seeds`` is below 2: an interval needs two.
    """
    if seeds < 2:
        raise InputError("seeds", str(seeds), "2 or more: an interval needs them")
    looks, following = [3], 5
    while looks[-1] < seeds:
        looks.append(following)
        following += looks[-2]
    return (*(n for n in looks if n < seeds), seeds)


def parse_slo(texts: Iterable[str], field: str = "slo") -> ServiceLevel:
    """Parse bounds such as ``ttft:500,tpot:30``, in milliseconds, from one or more texts.

    Raises InputError if a bound is not ``METRIC:MS``, unknown, given twice, or not positive; names
    ``field``.
    """
    bounds: dict[str, str] = {}
    for text in (part.strip() for given in texts for part in given.split(",")):
        name, colon, bound = text.partition(":")
        if not colon or name in bounds:
            problem = "is given twice" if colon else "is no bound"
            raise InputError(field, f"{text!r} {problem}", "METRIC:MS such as ttft:500,tpot:30")
        bounds[name] = bound
    try:
        return make_config({"goodput": bounds}).goodput
    except InputError as error:
        metric = error.field.replace("goodput.", "").replace("goodput", "")
        problem = f"{metric}: {error.problem}" if metric else error.problem
        raise InputError(field, problem, "ttft, tpot and e2el in ms") from None


def attainment_interval(
    shares: Sequence[float], requests: int, confidence: float = 0.95
) -> Interval:
    """Return the mean attainment over seeds with an interval.

    Requests of one run depend on each other, so the sample is the seeds: Student's t over their
    shares. If these hardly differ, that interval is too narrow for the number of requests, so the
    result also covers Wilson's interval, which treats the requests of all seeds as independent
    (Wilson, JASA 22, 1927). ``shares``: of good requests under each seed; ``requests``: of all
    seeds.
    """
    return _widened(t_interval(shares, confidence), requests, confidence)


def block_interval(runs: Iterable[Sequence[tuple[int, int]]], confidence: float = 0.95) -> Interval:
    """Return the attainment of a log with an interval over its blocks.

    Seeds of a run share a log's arrivals, so their interval is that of the log itself. How much
    another stretch of such load may differ is in the log's blocks: the attainment is the ratio of
    their sums, and the interval Student's t with the variance of a ratio estimator (Cochran,
    Sampling Techniques, 3rd ed. 1977, eq. 6.13), widened as `attainment_interval`. It takes the
    blocks as independent and alike: a load that grows from one end to the other has no such blocks.

    ``runs``: of each seed, (good, all) requests of the blocks.
    """
    from scipy.special import stdtrit  # takes long to import

    counts = np.array(list(runs), np.float64).sum(axis=0)
    good, every = counts[counts[:, 1] > 0].T
    p, n = float(good.sum() / every.sum()), len(every)
    if n < 2:
        return Interval(p, math.nan, math.nan)
    off = good - p * every
    error = math.sqrt(float((off**2).sum()) * n / (n - 1)) / float(every.sum())
    half = error * float(stdtrit(n - 1, (1 + confidence) / 2))
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
