"""Service-level objectives, and when a few seeds are enough to say that one is met."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from eldr_sim.errors import InputError
from eldr_sim.planning.intervals import Interval, t_interval
from eldr_sim.simulator.config import ServiceLevel, make_config


class Verdict(StrEnum):
    """Verdict on a cluster: does it meet its objective?"""

    MEETS = "meets"
    MISSES = "misses"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Objective:
    """A service level, the share of requests that must keep it, and how sure one has to be.

    Attributes
    ----------
    level
        Bounds of TTFT, TPOT and E2EL, ms; one at least.
    attainment
        Share of the measured requests that must keep all bounds, between 0 and 1.
    looks
        Seeds after which the interval is looked at: the first that clears the target decides.
    confidence
        Of the decision over all looks together (Bonferroni): each look takes an interval of
        ``1 - (1 - confidence) / len(looks)``.
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

    @property
    def hopeless(self) -> float:
        """Attainment of a short pre-run from which no cluster is given another chance."""
        return self.attainment / 2

    def interval(self, shares: Sequence[float], requests: int) -> Interval:
        """Return the attainment at one look, see :func:`attainment_interval`."""
        each = 1.0 - (1.0 - self.confidence) / len(self.looks)
        return attainment_interval(shares, requests, each)

    def verdict(self, interval: Interval) -> Verdict:
        """Say on which side of the target an interval lies."""
        if interval.low >= self.attainment:
            return Verdict.MEETS
        return Verdict.MISSES if interval.high < self.attainment else Verdict.UNDECIDED


def looks_up_to(seeds: int) -> tuple[int, ...]:
    """Return when to look at the interval if there are at most ``seeds`` seeds: 3, 5, 8, 13, ...

    Raises
    ------
    InputError
        With fewer than two seeds there is no interval.
    """
    if seeds < 2:
        raise InputError("seeds", str(seeds), "2 or more: an interval needs them")
    looks, following = [3], 5
    while looks[-1] < seeds:
        looks.append(following)
        following += looks[-2]
    return (*(n for n in looks if n < seeds), seeds)


def parse_slo(texts: Iterable[str], field: str = "slo") -> ServiceLevel:
    """Read bounds such as ``ttft:500,tpot:30``, in milliseconds, in one word or in several.

    Raises
    ------
    InputError
        Names ``field`` if a bound is no ``METRIC:MS``, unknown, given twice, or not positive.
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

    Requests of one run wait for each other, so the seeds are the sample: Student's t over their
    shares. Where these hardly differ (all of them 1, say) the seeds alone would look surer than
    their requests allow, so the interval also covers Wilson's, which takes the requests of all
    seeds as independent (Wilson, JASA 22, 1927): the lesser condition of the two.

    Parameters
    ----------
    shares
        Share of good requests of each seed.
    requests
        Requests of all seeds together.
    confidence
        Of both intervals.
    """
    from scipy.special import ndtri  # takes long to import

    by_seed = t_interval(shares, confidence)
    p, z = by_seed.mean, float(ndtri((1 + confidence) / 2))
    shrink = 1.0 + z * z / requests
    centre = (p + z * z / (2 * requests)) / shrink
    half = z / shrink * math.sqrt(p * (1 - p) / requests + (z / (2 * requests)) ** 2)
    return Interval(
        p,
        max(0.0, min(by_seed.low, centre - half)),
        min(1.0, max(by_seed.high, centre + half)),
    )
