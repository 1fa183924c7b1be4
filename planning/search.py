"""Searches: the cheapest xPyD, or the highest rate, that meets an objective, with few trials.

Both assume that more workers or a lower rate never turn a pass into a miss. The cluster search
reports the verdicts that contradict this.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from eldr_sim.planning.runs import Search
from eldr_sim.planning.slo import Verdict

#: Judges a cluster of x prefill and y decode workers.
Judge: TypeAlias = Callable[[int, int], Search[Verdict]]


@dataclass(frozen=True)
class SearchSpace:
    """Clusters that a search may choose from.

    Attributes
    ----------
    x_min, y_min
        Lower bounds on prefill and decode workers.
    max_workers
        Most workers of both kinds together, by their sizes.
    cost
        Cost of x prefill and y decode workers; grows with both.
    below
        Only clusters that cost less than this are considered.
    x_size, y_size
        What a worker of each kind counts in ``max_workers``.
    """

    x_min: int
    y_min: int
    max_workers: int
    cost: Callable[[int, int], float]
    below: float = math.inf
    x_size: int = 1
    y_size: int = 1

    def has_room(self, x: int, y: int) -> bool:
        """Whether x prefill and y decode workers are not too many."""
        return x * self.x_size + y * self.y_size <= self.max_workers

    def most_decode(self, x: int, below: float | None = None) -> int:
        """Return the most decode workers that ``x`` prefill workers allow, or 0."""
        limit = self.below if below is None else min(below, self.below)
        y = (self.max_workers - x * self.x_size) // self.y_size
        while y > 0 and not self.cost(x, y) < limit:
            y -= 1
        return max(y, 0)

    def most_prefill(self, y: int) -> int:
        """Return the most prefill workers that ``y`` decode workers allow, or 0."""
        x = (self.max_workers - y * self.y_size) // self.x_size
        while x > 0 and not self.cost(x, y) < self.below:
            x -= 1
        return max(x, 0)


@dataclass
class SearchState:
    """State of a search: the best cluster and every verdict so far.

    Attributes
    ----------
    best
        Prefill and decode workers of the cheapest cluster that meets the objective, or None.
    x_least, y_least
        Fewest prefill workers that meet the objective with the most decode workers, and vice
        versa; None if even the most do not.
    verdicts
        Verdict of every cluster judged, by (x, y).
    """

    best: tuple[int, int] | None = None
    x_least: int | None = None
    y_least: int | None = None
    verdicts: dict[tuple[int, int], Verdict] = field(default_factory=dict)

    def contradictions(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Return pairs of a cluster that meets the objective and a larger one that does not.

        Each smaller cluster is paired with the nearest larger one only.
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
    """Return the smallest n in [low, high] for which ``meets`` is true, or None.

    ``meets`` must be monotone. The search goes up or down from ``start`` in doubling steps, then
    bisects.
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


def cheapest(
    space: SearchSpace, judge: Judge, start: SearchState | None = None
) -> Search[SearchState]:
    """Find the cheapest cluster that meets the objective.

    1. The fewest decode workers with the most prefill workers, and vice versa: no cluster with
       fewer meets the objective.
    2. From that corner along the border: for each x, the smallest y that is cheaper than the best
       cluster so far.
    3. The neighbours of the best cluster. If it still meets the objective with one worker less,
       verdicts are not monotone, and the search continues from there.

    Parameters
    ----------
    space
        Clusters to choose from.
    judge
        Judges a cluster of x prefill and y decode workers; deterministic.
    start
        Final state of a similar search, where this one begins.
    """
    state = SearchState()

    def meets(x: int, y: int) -> Search[bool]:
        if (x, y) not in state.verdicts:
            state.verdicts[x, y] = yield from judge(x, y)
        return state.verdicts[x, y] is Verdict.MEETS

    x_top, y_top = space.most_prefill(space.y_min), space.most_decode(space.x_min)
    if x_top < space.x_min or y_top < space.y_min:
        return state
    state.y_least = yield from smallest(
        space.y_min, y_top, lambda y: meets(x_top, y), None if start is None else start.y_least
    )
    if state.y_least is None:
        return state
    state.x_least = yield from smallest(
        space.x_min, x_top, lambda x: meets(x, y_top), None if start is None else start.x_least
    )
    if state.x_least is None:
        return state
    cost = space.below
    for x in range(state.x_least, x_top + 1):
        most = space.most_decode(x, cost)
        if most < state.y_least:
            break
        y = yield from _fewest_beside(x, state, most, meets)
        if y is not None:
            state.best, cost = (x, y), space.cost(x, y)
    while state.best is not None:
        x, y = state.best
        below = [(x - 1, y), (x, y - 1)]
        better = []
        for point in below:
            if min(point) > 0 and (yield from meets(*point)):
                better.append(point)
        if not better:
            for point in ((x + 1, y), (x, y + 1)):
                if space.has_room(*point):
                    yield from meets(*point)
            break
        state.best = min(better, key=lambda point: space.cost(*point))
    return state


def fewest(
    space: SearchSpace, judge: Judge, start: SearchState | None = None, *, prefill: bool = False
) -> Search[SearchState]:
    """Find the fewest workers of one kind that meet the objective; as `cheapest`.

    They are co-located (x = 0), or compute prompts alone (``prefill``, y = 0).
    """
    state = SearchState(x_least=0)
    least, most = (space.x_min, space.most_prefill) if prefill else (space.y_min, space.most_decode)

    def meets(n: int) -> Search[bool]:
        point = (n, 0) if prefill else (0, n)
        if point not in state.verdicts:
            state.verdicts[point] = yield from judge(*point)
        return state.verdicts[point] is Verdict.MEETS

    begin = None if start is None else (start.x_least if prefill else start.y_least)
    n = yield from smallest(least, most(0), meets, begin)
    while n is not None and n > 1 and (yield from meets(n - 1)):
        n -= 1  # below the bound of the arithmetic, or not monotone
    if n is not None:
        state.best = (n, 0) if prefill else (0, n)
    state.x_least, state.y_least = (n, 0) if prefill else (0, n)
    return state


def _fewest_beside(
    x: int, state: SearchState, most: int, meets: Callable[[int, int], Search[bool]]
) -> Search[int | None]:
    """Return the fewest decode workers, up to ``most``, that suffice with x prefill workers."""
    assert state.y_least is not None
    if state.best is None:
        return (yield from smallest(state.y_least, most, lambda y: meets(x, y)))
    # Only a cheaper cluster counts. Usually there is none, and one trial shows it.
    if not (yield from meets(x, most)):
        return None
    return (yield from smallest(state.y_least, most, lambda y: meets(x, y), most))


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
        First rate, requests per second.
    low, high
        Range of rates; the result is None if ``low`` misses the objective, and ``high`` if that
        meets it.
    meets
        Whether a rate meets the objective; must be monotone.
    factor
        Step until one rate meets the objective and the next misses it; then both are bisected on
        a logarithmic scale.
    tolerance
        Largest relative distance between the rate returned and one that misses.
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
