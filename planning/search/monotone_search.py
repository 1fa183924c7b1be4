"""Searches: the cheapest xPyD, or the highest rate, that meets an objective, with few trials.

Both assume that more workers or a lower rate never turn a pass into a miss; the cluster search
reports verdicts that contradict this."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

from eldr_sim.planning.runs.run_cache import Search, side_by_side
from eldr_sim.planning.slo import Verdict

_FASTER = 1.5  #: each step of `highest_rate` from its start is longer by this exponent
#: Judges a cluster of x prefill and y decode workers.
Judge: TypeAlias = Callable[[int, int], Search[Verdict]]


@dataclass(frozen=True)
class SearchSpace:
    """Clusters that a search may choose from."""

    #: ``x_min``, ``y_min``: lower bounds on prefill and decode workers.
    x_min: int
    y_min: int
    max_workers: int  #: most workers of both kinds together, by their sizes
    cost: Callable[[int, int], float]  #: cost of x prefill and y decode workers; grows with both
    below: float = math.inf  #: only clusters that cost less than this are considered
    #: ``x_size``, ``y_size``: what a worker of each kind counts in ``max_workers``.
    x_size: int = 1
    y_size: int = 1

    def has_room(self, x: int, y: int) -> bool:
        """Whether x prefill and y decode workers are not too many."""
        return x * self.x_size + y * self.y_size <= self.max_workers

    def most_decode(self, x: int, below: float | None = None) -> int:
        """Return the most decode workers that ``x`` prefill workers allow, or 0."""
        limit = self.below if below is None else min(below, self.below)
        most = max(0, (self.max_workers - x * self.x_size) // self.y_size)
        return bisect_left(range(1, most + 1), limit, key=lambda y: self.cost(x, y))

    def most_prefill(self, y: int) -> int:
        """Return the most prefill workers that ``y`` decode workers allow, or 0."""
        most = max(0, (self.max_workers - y * self.y_size) // self.x_size)
        return bisect_left(range(1, most + 1), self.below, key=lambda x: self.cost(x, y))


@dataclass
class SearchState:
    """State of a search: the best cluster and every verdict so far."""

    #: Prefill and decode workers of the cheapest cluster that meets the objective, or None.
    best: tuple[int, int] | None = None
    #: Fewest prefill workers that do with the most decode workers, and vice versa, or None.
    x_least: int | None = None
    y_least: int | None = None
    #: Verdict of every cluster judged, by (x, y).
    verdicts: dict[tuple[int, int], Verdict] = field(default_factory=dict)

    def implied(self, x: int, y: int) -> bool | None:
        """Return whether a cluster meets the objective by verdicts on others; None: unknown."""
        good = any(
            a <= x and b <= y and verdict is Verdict.MEETS
            for (a, b), verdict in self.verdicts.items()
        )
        bad = any(
            a >= x and b >= y and verdict is not Verdict.MEETS
            for (a, b), verdict in self.verdicts.items()
        )
        return None if good == bad else good

    def contradictions(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Return clusters that meet the objective, each with a larger one that does not."""
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
    """Return the smallest n in [low, high] for which ``meets``, monotone, is true, or None: up or
    down from ``start`` in doubling steps, then by bisection."""
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
    space: SearchSpace, judge: Judge, start: tuple[int, int] | None = None, *, around: bool = True
) -> Search[SearchState]:
    """Find the cheapest cluster that meets the objective by ``judge``.

    From ``start`` with fewer workers of one kind, then of the other; if that misses, from the
    fewest decode workers with the most prefill workers, and vice versa, along the border; then
    cheaper ones, many by one trial: if one with as many of both as any of them has misses, all do.
    Last, if ``around``, one worker less. What verdicts imply is not judged again."""
    state = SearchState()

    def judged(x: int, y: int) -> Search[bool]:
        if (x, y) not in state.verdicts:
            state.verdicts[x, y] = yield from judge(x, y)
        return state.verdicts[x, y] is Verdict.MEETS

    def meets(x: int, y: int) -> Search[bool]:
        known = state.implied(x, y)
        return (yield from judged(x, y)) if known is None else known

    state.best = yield from _first(space, state, meets, start)
    if state.best is None:
        return state
    while (better := (yield from _cheaper(space, state, meets))) is not None:
        state.best = better
    while around:
        x, y = state.best
        beside = []
        for point in ((x - 1, y), (x, y - 1)):
            if min(point) > 0 and (yield from judged(*point)):
                beside.append(point)
        if not beside:
            break
        state.best = min(beside, key=lambda point: space.cost(*point))
    return state


def _first(
    space: SearchSpace,
    state: SearchState,
    meets: Callable[[int, int], Search[bool]],
    start: tuple[int, int] | None,
) -> Search[tuple[int, int] | None]:
    """Return some cluster of the space that meets the objective, no larger than it must be."""
    x_top, y_top = space.most_prefill(space.y_min), space.most_decode(space.x_min)
    if x_top < space.x_min or y_top < space.y_min:
        return None
    x, y = start or (None, None)
    if x is not None and y is not None:
        x, y = max(x, space.x_min), max(y, space.y_min)
        if y <= space.most_decode(x) and (yield from meets(x, y)):
            fewer = yield from smallest(space.y_min, y, lambda n: meets(x, n), y)
            y = y if fewer is None else fewer
            fewer = yield from smallest(space.x_min, x, lambda n: meets(n, y), x)
            return (x if fewer is None else fewer), y
    state.y_least = yield from smallest(space.y_min, y_top, lambda n: meets(x_top, n), y)
    if state.y_least is None:
        return None
    state.x_least = yield from smallest(space.x_min, x_top, lambda n: meets(n, y_top), x)
    if state.x_least is None:
        return None
    for n in range(state.x_least, x_top + 1):
        found = yield from smallest(state.y_least, space.most_decode(n), partial(meets, n))
        if found is not None:
            return n, found
    return None


def _cheaper(
    space: SearchSpace, state: SearchState, meets: Callable[[int, int], Search[bool]]
) -> Search[tuple[int, int] | None]:
    """Return a cluster that is cheaper than the best and meets the objective; None if none is."""
    assert state.best is not None
    cost = space.cost(*state.best)
    largest: dict[int, int] = {}  # prefill workers by decode workers: no cheaper one has more
    for x in range(space.x_min, space.most_prefill(space.y_min) + 1):
        y = space.most_decode(x, cost)
        if y < space.y_min:
            break
        largest[y] = x
    points = [(x, y) for y, x in largest.items()]  # x grows, y falls
    left = [point for point in points if point[0] < state.best[0]]
    todo = [points[len(left) :], left]
    while todo:
        known = [state.implied(*point) for point in todo[-1]]
        part = [point for point, good in zip(todo.pop(), known, strict=True) if good is not False]
        if not part:
            continue
        if (yield from meets(part[-1][0], part[0][1])):
            if len(part) == 1:
                return part[0]
            half = len(part) // 2
            todo += [part[half:], part[:half]]
    return None


def fewest(
    space: SearchSpace, judge: Judge, start: int | None = None, *, prefill: bool = False
) -> Search[SearchState]:
    """Find the fewest workers of one kind that meet the objective, as `cheapest`: co-located ones
    (x = 0), or such as compute prompts alone (``prefill``, y = 0)."""
    state = SearchState(x_least=0)
    least, most = (space.x_min, space.most_prefill) if prefill else (space.y_min, space.most_decode)

    def meets(n: int) -> Search[bool]:
        point = (n, 0) if prefill else (0, n)
        if point not in state.verdicts:
            state.verdicts[point] = yield from judge(*point)
        return state.verdicts[point] is Verdict.MEETS

    n = yield from smallest(least, most(0), meets, start)
    while n is not None and n > 1 and (yield from meets(n - 1)):
        n -= 1  # below the bound of the arithmetic, or not monotone
    if n is not None:
        state.best = (n, 0) if prefill else (0, n)
    state.x_least, state.y_least = (n, 0) if prefill else (0, n)
    return state


class RateRange(NamedTuple):
    """A rate that meets the objective, 0 where none is known, and one that does not."""

    good: float
    bad: float


def highest_rate(
    start: float,
    low: float,
    meets: Callable[[float], Search[bool]],
    *,
    factor: float = 2.0,
    tolerance: float = 0.01,
    high: float = math.inf,
    at_once: int = 1,
    is_dominated: Callable[[float], bool] = lambda rate: False,
) -> Search[RateRange | None]:
    """Find the highest rate, requests per second, that meets the objective, to within a relative
    ``tolerance``, and the next that does not (infinite at ``high``); None where ``low`` misses.

    ``meets``: monotone; ``factor``: step until one rate meets and the next misses, then the range
    is narrowed on a logarithmic scale; ``at_once``: rates evaluated side by side;
    ``is_dominated``: whether the search may stop early."""

    good, bad = 0.0, math.inf

    def ask(rates: Iterable[float]) -> Search[None]:
        nonlocal good, bad
        rising = sorted(set(rates))
        answers = yield from side_by_side([meets(rate) for rate in rising])
        for rate, fine in zip(rising, answers, strict=True):
            if not fine:
                bad = rate
                return
            good = rate

    rate = min(max(start, low), high)
    yield from ask(min(high, rate * factor**i) for i in range(at_once))
    while bad == math.inf and good < high:
        rate, factor = good * factor, factor**_FASTER
        yield from ask(min(high, rate * factor**i) for i in range(at_once))
    while good == 0.0 and bad > low and not is_dominated(bad):
        rate, factor = bad / factor, factor**_FASTER
        yield from ask(max(low, rate / factor**i) for i in range(at_once))
    if good == 0.0 and bad <= low:
        return None
    while good * (1.0 + tolerance) < bad < math.inf and not is_dominated(bad):
        ratio = (bad / good) ** (1.0 / (at_once + 1))
        yield from ask([good * ratio ** (i + 1) for i in range(at_once)])
    return RateRange(good, bad)
