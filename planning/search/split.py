"""The best use of a number of GPUs: the shape and split that carry the highest rate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from eldr_sim.errors import InputError
from eldr_sim.inputs import within
from eldr_sim.planning.runs.run_cache import RunCache, Search, side_by_side
from eldr_sim.planning.search import race
from eldr_sim.planning.search.answer import Answer, Question, Row
from eldr_sim.planning.search.axes import Axes, Space
from eldr_sim.planning.search.candidates import (
    MOST_GPUS,
    Candidate,
    ClusterTemplate,
    check_ffn_ranks,
    clusters_to_plan,
    make_candidate,
)
from eldr_sim.planning.search.monotone_search import highest_rate
from eldr_sim.planning.search.rates import TOLERANCE, carried_row, fastest_first, lowest_rate
from eldr_sim.planning.search.trial import PAIRED_SEEDS, attains
from eldr_sim.planning.slo import Objective
from eldr_sim.simulator.setup.config.run_config import RunConfig

_TRIED = 8  #: splits that are simulated first, of each candidate
#: More race, in short runs, estimated at the best rate divided by this; at most this many.
ESTIMATED, _MOST = 1.3, 32
_RUNS_OF_RATE = 8


def best_use(space: Space, objective: Objective, n_gpus: int, runs: RunCache) -> Answer:
    """Find the clusters of up to ``n_gpus`` GPUs that carry the highest rates within an objective.
    Raises InputError if a value is not valid, or no shape fits. Rate and topology of
    ``space.config`` are ignored."""
    splits, config = splits_of(space, objective, n_gpus), space.config
    runs.report_start()
    candidates = splits.candidates(splits.space.wanted)
    if not any(candidate.templates for candidate in candidates):
        raise InputError("gpus", f"{n_gpus}: {candidates[0].reasons[-1]}", "more GPUs")
    runs.expected = len(candidates) * _RUNS_OF_RATE * (_TRIED + 2 + 2 * PAIRED_SEEDS)
    label = splits.space.wanted.label
    rows = runs.ended(best_splits(candidates, label, objective, n_gpus, splits.low))
    return Answer(Question("split", config, objective, n_gpus, axes=space.wanted), rows, runs)


@dataclass(frozen=True)
class Splits:
    """What the splits of up to ``n_gpus`` GPUs are chosen from."""

    space: Space
    objective: Objective
    n_gpus: int
    low: float  #: lowest rate that is looked for, requests per second

    def candidates(self, axes: Axes) -> list[Candidate]:
        """Return every combination of axes with the shapes that can serve it."""
        space = self.space
        return [
            make_candidate(each, axes, self.objective, self.n_gpus, *space.sizes)
            for each in clusters_to_plan(space.config, axes, space.prices)
        ]


def splits_of(space: Space, objective: Objective, n_gpus: int) -> Splits:
    """Return what splits are chosen from; raises InputError if a value is not valid."""
    if n_gpus < 1:
        raise InputError("gpus", str(n_gpus), "1 or more")
    within("gpus", n_gpus, MOST_GPUS)
    config = space.config.model_copy(update={"goodput": objective.level})
    low = lowest_rate(config)
    check_ffn_ranks(space.ffn_ranks, space.engines)
    config = config.model_copy(update={"request_rate": max(low, 1.0)})
    return Splits(replace(space, config=config), objective, n_gpus, low)


def best_splits(
    candidates: Sequence[Candidate],
    label: Callable[[RunConfig], str],
    objective: Objective,
    n_gpus: int,
    low: float,
) -> Search[tuple[Row, ...]]:
    """Find the splits of up to ``n_gpus`` GPUs that carry the highest rates, the best first; of
    more candidates than `race.MOST_CANDIDATES` those that are among the best in short runs.
    ``label``: names the candidate of a cluster; ``low``: lowest rate that matters."""
    groups, dominated = (
        [_likely(candidate.templates, n_gpus) for candidate in candidates],
        list[Row](),
    )
    if len(candidates) > race.MOST_CANDIDATES:
        runners = [each[0] for each in groups if each]
        guessed = {id(runner): runner.likely for runner in runners}
        _, others = yield from race.race_candidates(candidates, runners, objective, low)
        out = {id(each) for _, each in others}
        left = [each for each in groups if each and id(each[0]) not in out]
        for each in left:  # what the first carried says how far the estimate of the others is off
            for split in each[1:]:
                split.likely *= each[0].likely / guessed[id(each[0])]
        groups = [[split for each in left for split in each[: _MOST // len(left)]]]
        searches = [_beaten(each, label) for _, each in others if each is not None]
        dominated = yield from side_by_side(searches)
    found = yield from side_by_side(
        [_fastest(group, label, objective, n_gpus, low) for group in groups]
    )
    return fastest_first([row for each in found for row in each] + dominated)


def _likely(templates: Sequence[ClusterTemplate], n_gpus: int) -> list[race.Contender]:
    """Return the splits of shapes that are simulated, the likely best first by `capacity`."""
    splits = [
        _split(template, x, y)
        for template in templates
        if not template.bounds.impossible
        for x, y in _full_splits(template, n_gpus)
    ]
    splits.sort(key=lambda split: -split.likely)
    likely = [split for split in splits if split.likely >= splits[0].likely / ESTIMATED]
    return likely[:_MOST] if len(likely) > _TRIED else splits[:_TRIED]


def _fastest(
    runners: Sequence[race.Contender],
    label: Callable[[RunConfig], str],
    objective: Objective,
    n_gpus: int,
    low: float,
) -> Search[list[Row]]:
    """Find the best of splits, and of those beside it.

    They race in short runs (`race.run_halving_round`); the first are simulated under one seed,
    those that two others beat only until that is known; the best under more
    (`race.decide_winners`)."""
    tried: list[race.Contender] = []
    new, best = (yield from race.run_halving_round(runners, objective, low, _TRIED // 2)), None
    while new:
        tried += new
        yield from side_by_side([_race(split, tried, objective, low) for split in new])
        tried.sort(key=lambda split: -split.good)
        best, tried_keys = tried[0], {split.key for split in tried}
        beside = [
            _split(best.template, x, y, best.good)
            for x, y in _full_splits(best.template, n_gpus)
            if abs(x - best.x) == 1
        ]
        new = [split for split in beside if split.key not in tried_keys]
    rates = yield from race.decide_winners(tried, objective, low)
    result = []
    for split in tried:
        result.append((yield from _row(split, label, rates.get(split.key), low)))
    done = {split.key for split in tried}
    for split in (runner for runner in runners if runner.key not in done):
        result.append((yield from _beaten(split, label)))
    return result


def _beaten(split: race.Contender, label: Callable[[RunConfig], str]) -> Search[Row]:
    """Return what is known of a split from short runs."""
    config, why = split.template.at(split.x, split.y), f"about {split.likely:.4g} in short runs"
    return carried_row(config, label(config), (), why, is_dominated=True)


def _split(
    template: ClusterTemplate, x: int, y: int, likely: float | None = None
) -> race.Contender:
    """Return a split with the rate that the estimate says, or the one that is given."""
    prefill, decode = template.capacity
    estimate = min(x * prefill, y * decode) if x else y * decode
    return race.Contender(template, x, y, estimate if likely is None else likely)


def _race(
    split: race.Contender, against: Sequence[race.Contender], objective: Objective, low: float
) -> Search[None]:
    """Find the highest rate of a split, or that it is below those of the best others."""

    def meets(rate: float) -> Search[bool]:
        fine = yield from attains(split.at(rate), 0, objective)
        if fine:
            split.good = max(split.good, rate)
        return fine

    def is_dominated(rate: float) -> bool:
        return sum(other.good >= rate for other in against if other is not split) > 1

    found = yield from highest_rate(
        max(low, split.likely), low, meets,
        factor=split.step, tolerance=TOLERANCE, is_dominated=is_dominated,
    )  # fmt: skip
    split.bad = low if found is None else found.bad


def _row(
    split: race.Contender, label: Callable[[RunConfig], str], rates: race.Rates | None, low: float
) -> Search[Row]:
    """Return what is known of a split: its rates by seed, or that it is beaten under the first."""
    config = split.template.at(split.x, split.y)
    name = label(config)
    if rates is None and race.is_narrow(split, low):
        rates = [split.good or None]
    if rates is not None:
        why = f"{low:.3g} req/s is too much"
        return (yield from carried_row(config, name, rates, why))
    reason = f"{split.good:.4g} to {split.bad:.4g}, less than the best"
    return (yield from carried_row(config, name, (), reason, is_dominated=True))


def _full_splits(template: ClusterTemplate, n_gpus: int) -> list[tuple[int, int]]:
    """Return the clusters of a shape that leave no room for a decode worker more."""
    of_prefill, of_decode = template.worker_sizes
    if template.config.cluster.n_prefill == 0:
        return [(0, n_gpus // of_decode)]
    splits: list[tuple[int, int]] = []
    for x in count(1):
        y = (n_gpus - x * of_prefill) // of_decode
        if y < 1:
            return splits
        splits.append((x, y))
    return splits
