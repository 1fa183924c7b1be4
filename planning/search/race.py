"""Successive halving: short runs of many clusters, longer ones of those that may be the best.

All see the same requests in a round, which finds the highest rate of each roughly; the better half
goes on, and whoever may be as good as its last. Short windows favour clusters in which requests
wait little, so what is within ``SLACK`` goes on, too. The last round, `decide_winners`, has several
seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from eldr_sim.planning.runs.run_cache import Search, side_by_side
from eldr_sim.planning.search.candidates import Candidate, ClusterTemplate
from eldr_sim.planning.search.monotone_search import RateRange, highest_rate
from eldr_sim.planning.search.rates import FROM_ESTIMATE, NEAR, TOLERANCE, at_rate, carried
from eldr_sim.planning.search.trial import SHORTEST, attains, shortened
from eldr_sim.planning.slo import Objective, is_below, t_interval
from eldr_sim.simulator.setup.config.run_config import RunConfig

#: Candidates that are searched whole; of more the best by short runs, `race_candidates`.
MOST_CANDIDATES = 8
ROUGH = 0.1  #: to which a round finds rates, relative
SLACK = 0.1  #: by which a short window may err, relative
_NEAR = 1.05  #: step by which a rate is looked for from that of a shorter window
#: Seeds of the last round: of the first two and of who may be as good, and while they tie.
_LOOKS = (3, 5)
Rates: TypeAlias = list[float | None]  #: highest rate under each seed, from the first on


@dataclass
class Contender:
    """A cluster, and what is known of its highest rate under the first seed."""

    template: ClusterTemplate
    x: int  #: prefill workers
    y: int  #: decode (or co-located) workers
    likely: float  #: highest rate by the estimate, or by shorter runs
    good: float = 0.0  #: the highest rate that meets the objective so far
    bad: float = math.inf  #: the lowest that does not
    step: float = FROM_ESTIMATE  #: how near the likely rate is

    @property
    def key(self) -> tuple[int, int, int]:
        """What tells a cluster from others."""
        return id(self.template), self.x, self.y

    @property
    def value(self) -> float:
        """Rate for each unit of cost."""
        return self.good / self.template.cost(self.x, self.y)

    def at(self, rate: float) -> RunConfig:
        """Return the cluster under a rate."""
        return at_rate(self.template.at(self.x, self.y), rate)


def run_halving_round(
    contenders: Sequence[Contender], objective: Objective, low: float, keep: int
) -> Search[list[Contender]]:
    """Return at least ``keep`` contenders with the most requests a second and cost, by rounds of
    short runs, the best first; ``likely`` is what they carried last. ``low``: lowest rate that
    matters."""
    left, share = list(contenders), SHORTEST
    while len(left) > keep and share < 1.0:
        yield from side_by_side([_rough(each, share, objective, low) for each in left])
        left.sort(key=lambda each: -each.value)
        bar = left[max(keep, math.ceil(len(left) / 2)) - 1].value
        left = [each for each in left if each.value * (1 + ROUGH) * (1 + SLACK) >= bar]
        share *= 2.0
    for each in contenders:
        each.good, each.bad = 0.0, math.inf  # those of short runs
    return left


def race_candidates(
    candidates: Sequence[Candidate], runners: Sequence[Contender], objective: Objective, low: float
) -> Search[tuple[list[Candidate], list[tuple[Candidate, Contender | None]]]]:
    """Return the candidates with a likely best cluster (``runners``) among the best, the first of
    a plan too, as all are compared with it, and the others with it. ``low``: lowest rate that
    matters."""
    ahead = {
        each.key
        for each in (yield from run_halving_round(runners, objective, low, MOST_CANDIDATES))
    }
    kept: list[Candidate] = []
    dominated: list[tuple[Candidate, Contender | None]] = []
    for candidate in candidates:
        own = set(map(id, candidate.templates))
        runner = next((r for r in runners if id(r.template) in own), None)
        if runner is None or (runner.key not in ahead and candidate is not candidates[0]):
            dominated.append((candidate, runner))
        else:
            kept.append(candidate)
    return kept, dominated


def decide_winners(
    tried: Sequence[Contender], objective: Objective, low: float
) -> Search[dict[tuple[int, int, int], Rates]]:
    """Find the highest rates of the best contenders under more seeds, by `Contender.key`: the first
    two by the first seed and those not below the interval of the best, then whoever is not below
    it, paired.

    ``tried``: with ``good`` and ``bad`` of the first seed, the highest first."""
    rates: dict[tuple[int, int, int], Rates] = {}
    left = [each for each in tried[:2] if each.good]

    def mean(each: Contender) -> float:
        return math.fsum(rate or 0.0 for rate in rates[each.key]) / len(rates[each.key])

    for n in sorted({min(look, objective.seeds) for look in _LOOKS}):
        if len(left) < 2 and rates:
            break
        yield from _seeds(left, rates, n, objective, low)
        if not left:
            break
        best = max(left, key=mean)
        bar = t_interval([rate or 0.0 for rate in rates[best.key]]).low
        near = [each for each in tried if each.key not in rates and _most(each) >= bar]
        yield from _seeds(near, rates, n, objective, low)
        left += near
        best = max(left, key=mean)
        left = [each for each in left if not is_below(rates[each.key], rates[best.key])]
    return rates


def _most(each: Contender) -> float:
    """Return the highest rate that the first seed leaves possible."""
    return each.good if each.bad == math.inf else each.bad


def _seeds(
    contenders: Sequence[Contender],
    rates: dict[tuple[int, int, int], Rates],
    n: int,
    objective: Objective,
    low: float,
) -> Search[None]:
    """Find the rates of contenders under so many seeds; that of the first where it is known."""
    asked: list[Search[RateRange | None]] = []
    for contender in contenders:
        by_seed = rates.setdefault(
            contender.key, [contender.good or None] if is_narrow(contender, low) else []
        )
        likely = contender.good or max(low, contender.bad / FROM_ESTIMATE)
        asked += [
            carried(contender.at(likely), seed, objective, low=low, factor=NEAR)
            for seed in range(len(by_seed), n)
        ]
    found = iter((yield from side_by_side(asked)))
    for contender in contenders:
        more = [next(found) for _ in range(len(rates[contender.key]), n)]
        rates[contender.key] += [None if rate is None else rate.good for rate in more]


def is_narrow(each: Contender, low: float) -> bool:
    """Whether the rate under the first seed is known to the precision of a plan."""
    return each.bad == math.inf or each.bad <= max(low, each.good * (1.0 + TOLERANCE))


def _rough(each: Contender, share: float, objective: Objective, low: float) -> Search[None]:
    """Find roughly the highest rate of a contender in a part of the window."""

    def meets(rate: float) -> Search[bool]:
        return attains(shortened(each.at(rate), share), 0, objective)

    found = yield from highest_rate(
        max(low, each.likely), low, meets, factor=each.step, tolerance=ROUGH
    )
    each.good, each.bad = (0.0, low) if found is None else found
    each.likely, each.step = each.good or low, _NEAR
