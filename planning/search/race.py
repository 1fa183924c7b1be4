"""Successive halving: short runs of many clusters, longer ones of those that may be the best.

All clusters see the same requests in a round (common random numbers). A round finds the highest
rate of each roughly; the better half goes on, and whoever may be as good as the last of them. Short
windows favour clusters in which requests wait little, so what is within ``SLACK`` goes on, too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eldr_sim.planning.runs.shared_runs import Search, side_by_side
from eldr_sim.planning.search.candidates import ClusterTemplate
from eldr_sim.planning.search.rates import FROM_ESTIMATE, at_rate
from eldr_sim.planning.search.search import highest_rate
from eldr_sim.planning.search.trial import attains
from eldr_sim.planning.slo import Objective
from eldr_sim.simulator.setup.config.run_config import RunConfig

_FEWEST = 30  #: measured requests of the shortest run
SHORTEST = 0.25  #: window of the first round, as a share of that of a plan
ROUGH = 0.1  #: to which a round finds rates, relative
SLACK = 0.1  #: by which a short window may err, relative
_NEAR = 1.05  #: step by which a rate is looked for from that of a shorter window


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


def halved(
    contenders: Sequence[Contender], objective: Objective, low: float, keep: int
) -> Search[list[Contender]]:
    """Return the contenders with the most requests a second and cost, by rounds of short runs.

    There are at least ``keep`` of them, the best first, if there were as many; ``likely`` is what
    all of them carried in their last round. ``low``: lowest rate that matters.
    """
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


def _rough(each: Contender, share: float, objective: Objective, low: float) -> Search[None]:
    """Find roughly the highest rate of a contender in a part of the window."""

    def meets(rate: float) -> Search[bool]:
        return attains(_shortened(each.at(rate), share), 0, objective)

    found = yield from highest_rate(
        max(low, each.likely), low, meets, factor=each.step, tolerance=ROUGH
    )
    each.good, each.bad = (0.0, low) if found is None else found
    each.likely, each.step = each.good or low, _NEAR


def _shortened(config: RunConfig, share: float) -> RunConfig:
    """Return a run of a part of the window; a log is measured as it is."""
    if config.num_requests is not None:
        n = max(_FEWEST, math.ceil(share * config.num_requests))
        return config.model_copy(update={"num_requests": min(n, config.num_requests)})
    if config.replays_log or config.duration_s is None:
        return config
    rate = config.request_rate or math.inf
    window = max(share * config.duration_s, min(config.duration_s, _FEWEST / rate))
    warm = max(share, 0.5) * config.warmup_s
    return config.model_copy(update={"duration": window, "warmup": warm})
