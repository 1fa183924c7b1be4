"""The highest rate that a given cluster carries within its objective."""

import math
from collections.abc import Callable, Sequence

from eldr_sim.errors import InputError
from eldr_sim.planning.runs.run_cache import RunCache, Search, side_by_side
from eldr_sim.planning.search.answer import Answer, Gain, Question, Row, policy_pairs
from eldr_sim.planning.search.axes import Space
from eldr_sim.planning.search.bounds import bounds
from eldr_sim.planning.search.candidates import clusters_to_plan, gpu_label
from eldr_sim.planning.search.monotone_search import RateRange, highest_rate
from eldr_sim.planning.search.shapes import capacity
from eldr_sim.planning.search.trial import LEAST_REQUESTS, attains, found_by_seed
from eldr_sim.planning.slo import Objective, paired_percent, t_interval
from eldr_sim.simulator.run import load_of
from eldr_sim.simulator.setup.config.requests import NO_PART
from eldr_sim.simulator.setup.config.run_config import RunConfig

TOLERANCE = 0.01  #: largest relative distance between the rate returned and one that misses
NEAR = 1.02  #: step by which a seed's highest rate is looked for from that of another seed
FROM_ESTIMATE = 1.25  #: step by which it is looked for from an estimate


def highest_rates(space: Space, objective: Objective, runs: RunCache) -> Answer:
    """Find the highest rate that a cluster carries within its objective, by bisection to 1%,
    further seeds from the rate of the first; the mean over ``objective.seeds`` has Student's t
    interval. Raises InputError if a value is not valid, or contradicts another. The rate of
    ``space.config`` is ignored."""
    asked, wanted = space.config, space.wanted
    config = asked.model_copy(update={"goodput": objective.level})
    configs = clusters_to_plan(config, wanted, space.prices, given=True)
    low = lowest_rate(config)
    runs.report_start()
    starts = [at_rate(config, _likely(config, objective, low)) for config in configs]
    impossible = [bounds(start, objective).impossible for start in starts]
    possible = [start for start, reason in zip(starts, impossible, strict=True) if not reason]
    at_once = 1 if len(possible) > 1 else 2  # else one process would wait
    searches = [
        carried_by_seed(start, objective.seeds, objective, low=low, at_once=at_once)
        for start in possible
    ]
    found = iter(runs.together(searches))
    rows = []
    for each, why in zip(configs, impossible, strict=True):
        by_seed = () if why else tuple(next(found))
        why = why or f"{low:.3g} req/s is too much"
        rows.append(runs.ended(carried_row(each, wanted.label(each), by_seed, why)))
    gains = tuple(
        Gain(
            row.gpu, row.policy, reference.policy, row.by_seed, reference.by_seed,
            paired_percent(row.by_seed, reference.by_seed),
        )
        for reference, row in policy_pairs(rows)
    )  # fmt: skip
    question = Question("rate", asked, objective, axes=wanted)
    return Answer(question, fastest_first(rows), runs, gains=gains)


def _likely(config: RunConfig, objective: Objective, low: float) -> float:
    """Return the rate that a cluster carries by `shapes.capacity`, or one a worker."""
    some = max(low, float(config.cluster.n_decode or config.cluster.n_prefill))
    if not config.cluster.generates:
        return some
    config = at_rate(config, some)
    workload, _ = load_of(config)
    prefill, decode = capacity(config, objective, workload)
    rate = decode * config.cluster.n_decode
    if config.cluster.n_prefill:
        rate = min(rate, prefill * config.cluster.n_prefill)
    return some if math.isinf(rate) else max(low, rate)


def at_rate(config: RunConfig, rate: float) -> RunConfig:
    """Return a run at another rate; its window is as long as a share of requests needs."""
    window = {}
    if config.requests.duration_s is not None and not config.requests.replays_log:
        window = {"duration": max(config.requests.duration_s, LEAST_REQUESTS / rate)}
    return config.model_copy(update={"request_rate": rate, **window})


def lowest_rate(config: RunConfig) -> float:
    """Return the lowest rate that is looked for; raises InputError where requests are too few."""
    if config.requests.duration_s is None:
        check_requests(config, math.inf)
    elif config.requests.replays_log:
        return LEAST_REQUESTS / config.requests.duration_s
    return 0.01


def check_requests(config: RunConfig, rate: float) -> None:
    """Raise InputError where a run measures too few requests to estimate a share such as 99%."""
    field, what, about = "num_requests", "requests", ""
    if config.requests.num_requests is not None and config.requests.n_sessions is None:
        expected = float(config.requests.num_requests)
    elif config.requests.duration_s is not None:
        field, expected, about = "duration", rate * config.requests.duration_s, "about "
    else:  # sessions, all of whose turns count, or a log, of which a part may be asked for
        field = next((name for name in NO_PART if config.value(name) is not None), "workload")
        workload, _ = load_of(config)
        if config.requests.n_sessions is not None:
            field, expected, what = "sessions", len(workload), "turns"
        else:
            expected, what = workload.description["log_window"]["measured"], "requests of the log"
    if expected < LEAST_REQUESTS:
        problem = (
            f"{about}{expected:.0f} {what} in the measured window are too few to estimate a share"
        )
        raise InputError(field, problem, f"{LEAST_REQUESTS} or more")


def carried(
    config: RunConfig,
    seed: int,
    objective: Objective,
    *,
    low: float,
    high: float = math.inf,
    factor: float = FROM_ESTIMATE,
    at_once: int = 1,
    is_dominated: Callable[[float], bool] = lambda rate: False,
) -> Search[RateRange | None]:
    """Find the highest rate of a cluster under one seed, from its own; see `highest_rate`."""
    assert config.requests.request_rate is not None

    def meets(rate: float) -> Search[bool]:
        return attains(at_rate(config, rate), seed, objective)

    return highest_rate(
        config.requests.request_rate, low, meets, factor=factor, tolerance=TOLERANCE, high=high,
        at_once=at_once, is_dominated=is_dominated,
    )  # fmt: skip


def carried_by_seed(
    config: RunConfig,
    n_seeds: int,
    objective: Objective,
    *,
    low: float,
    high: float = math.inf,
    at_once: int = 1,
) -> Search[list[float | None]]:
    """Find the highest rate of a cluster under each seed, further ones near the first's."""
    first = yield from carried(config, 0, objective, low=low, high=high, at_once=at_once)
    start, factor = (
        (config, FROM_ESTIMATE) if first is None else (at_rate(config, first.good), NEAR)
    )
    others = yield from side_by_side(
        [
            carried(start, seed, objective, low=low, high=high, factor=factor)
            for seed in range(1, n_seeds)
        ]
    )
    return [None if found is None else found.good for found in [first, *others]]


def carried_row(
    config: RunConfig,
    label: str,
    by_seed: Sequence[float | None],
    reason: str,
    *,
    is_dominated: bool = False,
) -> Search[Row]:
    """Return the highest rate of a cluster; where a seed has none, or others carry more, why."""
    known = [rate for rate in by_seed if rate is not None]
    if is_dominated or not known or len(known) < len(by_seed):
        without = "beaten" if is_dominated else "none"
        return Row(gpu_label(config), label, None, None, tuple(by_seed), without, [reason], config)
    best = at_rate(config, known[0])
    trial = found_by_seed(best, (yield [best]))
    return Row(gpu_label(config), label, trial, t_interval(known), tuple(by_seed))


def fastest_first(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return rows, the highest rate or speed first."""
    return tuple(sorted(rows, key=lambda row: -(row.figure.mean if row.figure else 0.0)))
