"""The cheapest xPyD that is good enough, and the highest rate that is, in few questions.

Both take for granted that more workers or a lower rate never make a good cluster bad. What the
answers say against that is collected and returned with the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from eldr_sim.planning.slo import Verdict

T = TypeVar("T")
Search: TypeAlias = Generator[Any, Any, T]
#: Judges a cluster of x prefill and y decode workers.
Judge: TypeAlias = Callable[[int, int], Search[Verdict]]


@dataclass(frozen=True)
class Space:
    """Clusters to choose from.

    Attributes
    ----------
    x_min, y_min
        Fewest prefill and decode workers that could do.
    max_workers
        Most workers of both kinds together.
    cost
        Cost of x prefill and y decode workers; grows with both.
    below
        Only clusters that cost less than this are of interest.
    """

    x_min: int
    y_min: int
    max_workers: int
    cost: Callable[[int, int], float]
    below: float = math.inf

    def most_decode(self, x: int, below: float | None = None) -> int:
        """Return the most decode workers beside ``x`` prefill workers, 0 if there are none."""
        limit = self.below if below is None else min(below, self.below)
        y = self.max_workers - x
        while y > 0 and not self.cost(x, y) < limit:
            y -= 1
        return max(y, 0)

    def most_prefill(self, y: int) -> int:
        """Return the most prefill workers beside ``y`` decode workers, 0 if there are none."""
        x = self.max_workers - y
        while x > 0 and not self.cost(x, y) < self.below:
            x -= 1
        return max(x, 0)


@dataclass
class Found:
    """State of a search: the best cluster and every verdict so far.

    Attributes
    ----------
    best
        Prefill and decode workers of the cheapest cluster that meets the objective, or None.
    x_least, y_least
        Fewest prefill workers that do beside as many decode workers as there can be, and the other
        way round; None where even the most do not.
    verdicts
        Of every cluster that was judged, by (x, y).
    """

    best: tuple[int, int] | None = None
    x_least: int | None = None
    y_least: int | None = None
    verdicts: dict[tuple[int, int], Verdict] = field(default_factory=dict)

    def contradictions(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Return pairs of clusters of which the smaller meets the objective, the larger does not.

        Of each smaller one only the pair with the nearest larger one is told.
        """
        good = sorted(p for p, verdict in self.verdicts.items() if verdict is Verdict.MEETS)
        bad = [p for p, verdict in self.verdicts.items() if verdict is Verdict.MISSES]
        pairs = []
        for p in good:
            above = [q for q in bad if q[0] >= p[0] and q[1] >= p[1]]
            if above:
                pairs.append((p, min(above, key=lambda q: (sum(q), q))))
        return pairs


def smallest(
    low: int, high: int, meets: Callable[[int], Search[bool]], start: int | None = None
) -> Search[int | None]:
    """Return the smallest n in [low, high] that meets, or None; n must be monotone.

    Goes up (or down) from ``start`` in steps that double, then bisects.
    """
    if low > high:
        return None
    n = min(max(low if start is None else start, low), high)
    step = 1
    if (yield from meets(n)):
        good, bad = n, low - 1
        while good > low:
            n = max(low, good - step)
            if not (yield from meets(n)):
                bad = n
                break
            good, step = n, 2 * step
    else:
        bad = n
        while True:
            if bad == high:
                return None
            n = min(high, bad + step)
            if (yield from meets(n)):
                good = n
                break
            bad, step = n, 2 * step
    while good - bad > 1:
        middle = (good + bad) // 2
        if (yield from meets(middle)):
            good = middle
        else:
            bad = middle
    return good


def cheapest(space: Space, judge: Judge, start: Found | None = None) -> Search[Found]:
    """Find the cheapest cluster that meets the objective.

    First the fewest decode workers beside as many prefill workers as there can be, and the other
    way round: no cluster with fewer meets the objective. From that corner the search goes along
    the border of those that do: for each x, the smallest y that is cheaper than the best so far.
    Last it looks at the neighbours of the answer; if one worker less still does, the answers are
    not monotone, and the search goes on from there.

    Parameters
    ----------
    space
        The clusters.
    judge
        Says whether x prefill and y decode workers meet the objective; asked again about a cluster
        it must give the same verdict.
    start
        What a like search has found, as the place to begin at.
    """
    found = Found()

    def meets(x: int, y: int) -> Search[bool]:
        if (x, y) not in found.verdicts:
            found.verdicts[x, y] = yield from judge(x, y)
        return found.verdicts[x, y] is Verdict.MEETS

    x_top, y_top = space.most_prefill(space.y_min), space.most_decode(space.x_min)
    if x_top < space.x_min or y_top < space.y_min:
        return found
    found.y_least = yield from smallest(
        space.y_min, y_top, lambda y: meets(x_top, y), None if start is None else start.y_least
    )
    if found.y_least is None:
        return found
    found.x_least = yield from smallest(
        space.x_min, x_top, lambda x: meets(x, y_top), None if start is None else start.x_least
    )
    if found.x_least is None:
        return found
    cost = space.below
    for x in range(found.x_least, x_top + 1):
        most = space.most_decode(x, cost)
        if most < found.y_least:
            break
        y = yield from _fewest_beside(x, found, most, meets)
        if y is not None:
            found.best, cost = (x, y), space.cost(x, y)
    while found.best is not None:
        x, y = found.best
        below = [(x - 1, y), (x, y - 1)]
        better = []
        for point in below:
            if min(point) > 0 and (yield from meets(*point)):
                better.append(point)
        if not better:
            for point in ((x + 1, y), (x, y + 1)):
                if sum(point) <= space.max_workers:
                    yield from meets(*point)
            break
        found.best = min(better, key=lambda point: space.cost(*point))
    return found


def _fewest_beside(
    x: int, found: Found, most: int, meets: Callable[[int, int], Search[bool]]
) -> Search[int | None]:
    """Return the fewest decode workers, at most ``most``, that do beside x prefill workers."""
    assert found.y_least is not None
    if found.best is None:
        return (yield from smallest(found.y_least, most, lambda y: meets(x, y)))
    # Only a cheaper cluster counts: mostly there is none, and one question says so.
    if not (yield from meets(x, most)):
        return None
    return (yield from smallest(found.y_least, most, lambda y: meets(x, y), most))


def highest_rate(
    start: float,
    low: float,
    meets: Callable[[float], Search[bool]],
    *,
    factor: float = 2.0,
    tolerance: float = 0.01,
    high: float = math.inf,
) -> Search[float | None]:
    """Return the highest rate that meets the objective, to within ``tolerance``.

    Parameters
    ----------
    start
        Rate to begin at, requests per second.
    low, high
        Lowest and highest rate of interest; None is returned if the lowest does not do, and the
        highest if it does.
    meets
        Whether a rate does; must be monotone.
    factor
        By which the rate changes until the border is between two rates, which are then bisected
        (on a logarithmic scale).
    tolerance
        Largest ratio, less 1, of a rate that does not to the one returned.
    """
    rate = min(max(start, low), high)
    if (yield from meets(rate)):
        good = rate
        while True:
            if good == high:
                return high
            bad = min(high, good * factor)
            if not (yield from meets(bad)):
                break
            good = bad
    else:
        bad = rate
        while True:
            if bad == low:
                return None
            good = max(low, bad / factor)
            if (yield from meets(good)):
                break
            bad = good
    while bad > good * (1.0 + tolerance):
        middle = math.sqrt(good * bad)
        if (yield from meets(middle)):
            good = middle
        else:
            bad = middle
    return good
