"""GPUs that a policy saves: the cheapest cluster under each seed, paired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eldr_sim.planning.intervals import Interval, t_interval
from eldr_sim.planning.runs.shared_runs import Search, side_by_side
from eldr_sim.planning.search.search import cheapest, fewest
from eldr_sim.planning.search.trial import attains
from eldr_sim.planning.slo import Objective, Verdict

if TYPE_CHECKING:
    from eldr_sim.planning.search.plan import CandidateResult

__all__ = ["PAIRED_SEEDS", "Saving", "savings_of"]

#: Seeds of the margin and of the savings, which are searched seed by seed.
PAIRED_SEEDS = 3


@dataclass(frozen=True)
class Saving:
    """GPUs that a policy saves compared with the first policy on the same GPU, paired over seeds.

    ``by_seed`` and ``reference_by_seed`` hold the GPUs of the cheapest cluster under each seed.
    """

    gpu: str
    policy: str
    reference: str
    by_seed: tuple[int, ...]
    reference_by_seed: tuple[int, ...]
    gpus: Interval


def savings_of(results: Sequence[CandidateResult], objective: Objective) -> Search[list[Saving]]:
    """Find the cheapest cluster under each seed, and pair policies on the same GPU."""
    seeds = range(min(PAIRED_SEEDS, objective.seeds))
    by_gpu: dict[str, list[CandidateResult]] = {}
    for result in results:
        by_gpu.setdefault(result.gpu, []).append(result)
    pairs = [
        (group[0], other)
        for group in by_gpu.values()
        for other in group[1:]
        if group[0].trial is not None and other.trial is not None
    ]
    asked = {id(result): result for pair in pairs for result in pair}
    searches = [_fewest_gpus(each, seed, objective) for each in asked.values() for seed in seeds]
    gpus = iter((yield from side_by_side(searches)))
    by_seed = {key: [next(gpus) for _ in seeds] for key in asked}
    savings = []
    for reference, other in pairs:
        both = zip(by_seed[id(reference)], by_seed[id(other)], strict=True)
        kept = [(a, b) for a, b in both if a is not None and b is not None]
        if kept:
            theirs, ours = zip(*kept, strict=True)
            savings.append(
                Saving(
                    other.gpu,
                    other.policy,
                    reference.policy,
                    ours,
                    theirs,
                    t_interval([float(a - b) for a, b in kept]),
                )
            )
    return savings


def _fewest_gpus(result: CandidateResult, seed: int, objective: Objective) -> Search[int | None]:
    """Return the GPUs of the cheapest cluster that meets the objective under one seed."""
    template = result.template
    assert template is not None

    def judge(x: int, y: int) -> Search[Verdict]:
        good = yield from attains(template.at(x, y), seed, objective)
        return Verdict.MEETS if good else Verdict.MISSES

    # A seed differs by a worker or two: far larger clusters need not be tried.
    space = template.search_space(1.5 * result.cost + 2 * template.unit)
    assert result.search.best is not None
    x, y = result.search.best
    if template.config.colocated:
        state = yield from fewest(space, judge, y)
    else:
        state = yield from cheapest(space, judge, (x, y), around=False)
    if state.best is None:
        return None
    return template.at(*state.best).n_gpus
