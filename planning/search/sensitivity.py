"""Sensitivity of a plan: which input, 10% off, would have had another answer.

The cheapest cluster is searched again, of the shapes of the answer and of the best other
candidates, under the same requests but where the input changes these."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eldr_sim.planning.runs.run_cache import Search, side_by_side
from eldr_sim.planning.search.bounds import bounds
from eldr_sim.planning.search.candidates import ClusterTemplate, cost
from eldr_sim.planning.search.monotone_search import SearchState, cheapest, fewest
from eldr_sim.planning.search.trial import Trial, try_cluster
from eldr_sim.planning.slo import Objective, Verdict
from eldr_sim.simulator.setup.config.groups import RUN_FIELDS
from eldr_sim.simulator.setup.config.run_config import RunConfig, ServiceLevel

OFF = 0.1  #: the change of an input, as a share of it
RIVALS = 3  #: candidates, the best first, that may become the answer


@dataclass(frozen=True)
class Effect:
    """The answer that a plan would have had with one input changed."""

    name: str  #: the input
    change: float  #: its change, as a share of it
    trial: Trial | None  #: the cheapest cluster then; None if none meets the objective
    changes: bool  #: whether that is another cluster than the answer


def effects(
    rivals: Sequence[tuple[ClusterTemplate, Trial]], objective: Objective, rate: float
) -> Search[list[Effect]]:
    """Return what each input, 10% lower and higher, makes of the answer: the rate, lengths that are
    given, each bound, the time of everything (a rate higher and bounds lower by it), and the price
    of each GPU.

    ``rivals``: the cheapest cluster of each candidate, the answer first; ``rate``: requests per
    second."""
    answer = rivals[0][1] if rivals else None
    if answer is None:
        return []
    changes: list[Effect] = []
    for name, change, factors in _inputs(answer.config, rate):
        level = _scaled(objective.level, factors)
        asked = dataclasses.replace(objective, level=level)
        searches = [_again(template, trial, factors, asked) for template, trial in rivals]
        trials = [trial for trial in (yield from side_by_side(searches)) if trial is not None]
        # Where a rival costs as much, the answer stays.
        best = min(trials, key=lambda trial: cost(trial.config), default=None)
        changes.append(Effect(name, change, best, best is None or not _same(best, answer)))
    return changes + list(_of_prices([trial for _, trial in rivals]))


def _inputs(config: RunConfig, rate: float) -> Iterator[tuple[str, float, dict[str, float]]]:
    """Yield the name of each input, its change, and values of fields and bounds then."""
    level = config.output.goodput.model_dump(exclude_none=True)
    given = {"request rate": {"request_rate": rate}}
    for field, name in (("input_len", "prompt tokens"), ("output_len", "output tokens")):
        if isinstance(length := config.value(field), int):
            given[name] = {field: float(length)}
    given |= {f"{bound.upper()} bound": {bound: value} for bound, value in level.items()}
    for name, fields in given.items():
        for sign in (-1, 1):
            yield name, sign * OFF, {k: v * (1 + sign * OFF) for k, v in fields.items()}
    for sign in (-1, 1):
        factor = 1 + sign * OFF
        shorter = {bound: value / factor for bound, value in level.items()}
        yield "time of everything", sign * OFF, {"request_rate": rate * factor, **shorter}


def _scaled(level: ServiceLevel, factors: dict[str, float]) -> ServiceLevel:
    known = level.model_dump()
    return ServiceLevel(**known | {k: v for k, v in factors.items() if k in known})


def _again(
    template: ClusterTemplate, trial: Trial, values: dict[str, float], objective: Objective
) -> Search[Trial | None]:
    """Search the cheapest cluster of a template under other inputs, from the one that was found."""
    fields = {
        name: round(value) if name.endswith("_len") else value
        for name, value in values.items()
        if name in RUN_FIELDS
    }
    config = template.config.model_copy(update={**fields, "goodput": objective.level})
    least = bounds(config, objective)
    if least.impossible:
        return None
    start = trial.config.cluster.n_prefill, trial.config.cluster.n_decode
    changed = dataclasses.replace(template, config=config, bounds=least, estimate=start)
    state, trials = yield from search_size(changed, objective, math.inf)
    return None if state.best is None else trials[state.best]


def _same(one: Trial, other: Trial) -> bool:
    """Whether two trials are of one cluster, under any load and objective."""
    asked = dict.fromkeys(("request_rate", "input_len", "output_len", "goodput"))
    return one.config.model_dump() | asked == other.config.model_dump() | asked


def _of_prices(trials: Sequence[Trial]) -> Iterator[Effect]:
    """Yield the effect of the price of each GPU, where some clusters have others."""
    spent = [_by_gpu(trial.config) for trial in trials]
    gpus = list(dict.fromkeys(gpu for each in spent for gpu in each))
    if len(gpus) < 2 or trials[0].config.price_per_hour is None:
        return
    for gpu in gpus:
        for change in (-OFF, OFF):
            costs = [sum(each.values()) + change * each.get(gpu, 0.0) for each in spent]
            best = min(range(len(trials)), key=costs.__getitem__)
            yield Effect(f"price of {gpu}", change, trials[best], best != 0)


def _by_gpu(config: RunConfig) -> dict[str, float]:
    """Return the price per hour of a cluster by GPU."""
    spent: dict[str, float] = {}
    for pool in config.pools:
        price = (pool.price_per_gpu_hour or 0.0) * pool.workers * pool.parallelism.n_gpus
        spent[pool.gpu or ""] = spent.get(pool.gpu or "", 0.0) + price
    return spent


def search_size(
    template: ClusterTemplate,
    objective: Objective,
    below: float,
    start: tuple[int, int] | None = None,
) -> Search[tuple[SearchState, dict[tuple[int, int], Trial]]]:
    """Find the cheapest cluster of a shape, first near its estimate or ``start``, then among all.

    Clusters on the way that meet the objective are known by one seed, and are no trials; what is
    found is judged by as many as it takes, and if it then misses the search goes on."""
    trials: dict[tuple[int, int], Trial] = {}
    likely: set[tuple[int, int]] = set()

    def judge(x: int, y: int) -> Search[Verdict]:
        if (x, y) in likely:
            return Verdict.MEETS
        if (x, y) not in trials:
            trial = yield from try_cluster(template.at(x, y), objective, surely=False)
            if trial.verdict is Verdict.MEETS:
                likely.add((x, y))
                return Verdict.MEETS
            trials[x, y] = trial
        return trials[x, y].verdict

    x, y = start or template.estimate
    near = template.cost(2 * x, 2 * y) + 1e-9
    for limit in (near, below) if near < below else (below,):
        space, prompts = template.search_space(limit), not template.config.cluster.generates
        while True:
            if template.config.cluster.n_prefill == 0 or prompts:
                state = yield from fewest(space, judge, x if prompts else y, prefill=prompts)
            else:
                state = yield from cheapest(space, judge, (x, y))
            if (best := state.best) is None or best in trials:
                break
            likely.discard(best)
            trials[best] = yield from try_cluster(template.at(*best), objective)
        if state.best is not None:
            break
    return state, trials
