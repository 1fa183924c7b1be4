"""What a search looks for: goals as values, of one `find` over a `Space`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from eldr_sim.planning.runs.run_cache import RunCache
from eldr_sim.planning.search.answer import Answer
from eldr_sim.planning.search.autoscaler_plan import cheapest_fleet
from eldr_sim.planning.search.axes import Space
from eldr_sim.planning.search.knobs import gains_of_choices
from eldr_sim.planning.search.plan import cheapest_cluster
from eldr_sim.planning.search.prefill import fastest_prompts
from eldr_sim.planning.search.rates import highest_rates
from eldr_sim.planning.search.split import best_use
from eldr_sim.planning.slo import Objective


@dataclass(frozen=True)
class Cheapest:
    """The cheapest cluster for a load, see `plan.cheapest_cluster`."""

    objective: Objective
    why_not: Sequence[str] = ()  #: clusters to explain why they are not the answer
    sensitivity: bool = False  #: whether to find which other inputs would change the answer


@dataclass(frozen=True)
class HighestRate:
    """The highest rate within an objective: of the configuration's cluster, see
    `rates.highest_rates`, or of any of ``n_gpus`` GPUs, see `split.best_use`."""

    objective: Objective
    n_gpus: int | None = None
    knobs: bool = False  #: whether to find what each choice adds, see `knobs.gains_of_choices`


@dataclass(frozen=True)
class Fastest:
    """The cheapest computation of prompts that come at once, see `prefill.fastest_prompts`."""

    seeds: int = 3


@dataclass(frozen=True)
class CheapestFleet:
    """The cheapest autoscaler and fleet for a load that changes, see `day.cheapest_fleet`."""

    objective: Objective
    rules: Sequence[str] = ()  #: autoscalers, `day.RULES` if empty
    bounded: bool = False  #: whether the topology says how many workers there may be


Goal: TypeAlias = Cheapest | HighestRate | Fastest | CheapestFleet


def find(space: Space, goal: Goal, runs: RunCache | None = None) -> Answer:
    """Find what a goal looks for among the clusters of a space; raises InputError.

    ``runs``: processes, progress, and the journal of an interrupted search."""
    runs = RunCache() if runs is None else runs
    match goal:
        case Cheapest(objective, why_not, sensitivity):
            return cheapest_cluster(
                space, objective, runs, why_not=why_not, sensitivity=sensitivity
            )
        case HighestRate(objective, None):
            return highest_rates(space, objective, runs)
        case HighestRate(objective, n_gpus, knobs):
            assert n_gpus is not None
            return (gains_of_choices if knobs else best_use)(space, objective, n_gpus, runs)
        case Fastest(seeds):
            return fastest_prompts(space, seeds, runs)
        case CheapestFleet(objective, rules, bounded):
            return cheapest_fleet(space, objective, runs, rules=rules, bounded=bounded)
