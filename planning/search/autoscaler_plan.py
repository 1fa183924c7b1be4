"""The cheapest autoscaling rule and fleet for a load that changes: ``plan --load``. A fleet is a
rule, its fewest and most workers and its `Autoscaler.aims`; it costs the GPU-hours, or their price,
of workers that start, serve or drain."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import product
from typing import Any

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.errors import InputError
from eldr_sim.inputs import within
from eldr_sim.planning.runs.run_cache import RunCache, Search, Summary, side_by_side
from eldr_sim.planning.search import candidates
from eldr_sim.planning.search.answer import Answer, Gain, Question, Row
from eldr_sim.planning.search.axes import Axes, Space
from eldr_sim.planning.search.bounds import bounds
from eldr_sim.planning.search.monotone_search import cheapest, fewest, smallest
from eldr_sim.planning.search.rates import check_requests
from eldr_sim.planning.search.shapes import capacity, estimate
from eldr_sim.planning.search.trial import Trial, try_cluster
from eldr_sim.planning.slo import Objective, Verdict, paired_percent, t_interval
from eldr_sim.policies import registry
from eldr_sim.policies.choice import Parameters, parse, spell
from eldr_sim.policies.scaling.base import Autoscaler
from eldr_sim.simulator.run import load_of
from eldr_sim.simulator.setup.config.groups import RUN_FIELDS
from eldr_sim.simulator.setup.config.run_config import RunConfig

#: Rules that are tried where none is named: they know no future.
RULES = ("seconds", "hpa", "keda", "llmd_saturation", "dynamo_load", "dynamo_throughput")
_BESIDE = "timetable"  #: stands beside every rule: it knows the day, as one knows yesterday's
_MORE = 1.5  #: rules may have up to this many times the workers of the best fixed fleet
_LINES = 12
_MINUTE_S = 60.0

Workers = tuple[int, int]  #: of prefill and decode, or of none and co-located
_Place = tuple[int, int]  #: of a list of settings, and of a setting in it


@dataclass(frozen=True)
class FleetBounds:
    """Fleets of one shape of workers, of at most ``box`` workers of either kind."""

    template: candidates.ClusterTemplate
    box: Workers
    peak: Workers  #: workers that the busiest minute likely takes
    first: Workers  #: and the first one, with which every rule begins
    span_s: float  #: from 0 to the last arrival

    def fixed(self, x: int, y: int) -> RunConfig:
        """Return a fixed fleet."""
        return self.of(f"none:n={','.join(map(str, _pools((x, y))))}", (x, y), (1, 1))

    def of(self, rule: str, most: Workers, least: Workers) -> RunConfig:
        """Return what a rule does between ``least`` and ``most`` workers."""
        bounded = zip(most, least, self.first, strict=True)
        x, y = (min(n, max(low, now)) for n, low, now in bounded)
        together = most[0] == 0
        update = {
            "autoscale": rule,
            "min_workers": _pools((0, least[1]) if together else least),
            "initial_workers": _pools((0 if together else x, y)),
        }
        return self.template.at(*most).model_copy(update=update)


def cheapest_fleet(
    space: Space,
    objective: Objective,
    runs: RunCache,
    *,
    rules: Sequence[str] = (),
    bounded: bool = False,
) -> Answer:
    """Find the cheapest rule and fleet that meet an objective on a load that changes.

    The cheapest fixed fleet bounds the workers: every rule is tried with at most that number or
    half as many again, at least one or half of them, with and without switches between pools; the
    leanest setting under one seed is found by bisection, the cheapest judged over seeds. Rows: a
    rule each, the cheapest first; ``gains`` on the fixed fleet, percent, paired over seeds.
    ``rules``: `RULES` if empty; ``bounded``: whether the topology says how many workers there may
    be. Raises InputError if a value is not valid, or no shape fits."""
    config, max_gpus = space.config, space.max_gpus
    within("max_gpus", max_gpus, candidates.MOST_GPUS)
    if not config.cluster.generates:
        raise InputError(
            "topology", f"{config.cluster.topology}", "xPyD or xC, for the load of a day"
        )
    if any(pool.is_elastic for pool in config.pools):
        problem = "in a plan, fleets change by whole workers"
        raise InputError("enable_elastic_ep", problem, "not given, or compare --autoscale")
    names = [registry.canonical("scaling", rule) for rule in rules or RULES]
    if len(set(names)) < len(names) or any(parse(n, "autoscale").name == "none" for n in names):
        problem = f"{', '.join(names)} names a value twice, or a fixed fleet, which is always tried"
        raise InputError("autoscale", problem, "rules, such as seconds,hpa:target=8")
    for field in ("min_workers", "initial_workers"):
        if config.value(field) != RUN_FIELDS[field].default:
            raise InputError(field, "a plan chooses the number of workers itself", "none")
    asked, level = config, {"goodput": objective.level, "autoscale": "none"}
    config = config.model_copy(update=level)
    most_workers = min(
        config.n_gpus if bounded else max_gpus, config.scaling.gpu_budget or candidates.MOST_GPUS
    )
    wanted, sizes = space.wanted, (space.tensor_parallel_sizes, space.data_parallel_sizes)
    configs = candidates.clusters_to_plan(config, wanted, space.prices, given=bounded)
    every = list(dict.fromkeys([*names, registry.canonical("scaling", _BESIDE)]))
    runs.report_start()
    found: list[FleetBounds | str] = []
    for each in configs:
        if bounded:
            found.append(_bounded(each, objective, most_workers))
        else:
            found.append(_likely(each, wanted, objective, most_workers, sizes))
    rate = next((f.template.bounds.rate for f in found if isinstance(f, FleetBounds)), math.nan)
    check_requests(config, rate)
    searches = [
        _search(each, fleets, every, wanted, objective)
        for each, fleets in zip(configs, found, strict=True)
    ]
    together = runs.together(searches)
    rows = [row for each in together for row in each]
    rows.sort(key=lambda row: math.inf if row.figure is None else row.figure.mean)
    question = Question("day", asked, objective, most_workers, rate, axes=wanted)
    gains = tuple(gain for each in together for gain in _gains(each))
    return Answer(question, tuple(rows), runs, gains=gains)


def _fleets(template: candidates.ClusterTemplate, box: Workers, arrival_s: Floats) -> FleetBounds:
    """Return the fleets of a shape; of short loads a fifteenth is the minute."""
    span = float(arrival_s[-1]) if len(arrival_s) else 0.0
    minute = max(1e-9, min(_MINUTE_S, span / 15.0))
    rates = np.bincount((arrival_s // minute).astype(np.int64)) / minute
    begin, peak = (
        estimate(template.capacity, float(rate), colocated=template.config.cluster.n_prefill == 0)
        for rate in (rates[0], rates.max())
    )
    return FleetBounds(template, box, peak, begin, span)


def _bounded(config: RunConfig, objective: Objective, max_gpus: int) -> FleetBounds | str:
    """Return the fleets within a topology; as text, why there is none."""
    load = load_of(config)
    least = bounds(config, objective, load)
    if least.impossible:
        return least.impossible
    served = capacity(config, objective, load[0])
    template = candidates.ClusterTemplate(config, least, max_gpus, capacity=served)
    return _fleets(template, (config.cluster.n_prefill, config.cluster.n_decode), load[0].arrival_s)


def _likely(
    config: RunConfig,
    axes: Axes,
    objective: Objective,
    max_gpus: int,
    sizes: tuple[Sequence[int], Sequence[int]],
) -> FleetBounds | str:
    """Return the fleets of the shape that likely serves the busiest minute at the least cost."""
    candidate = candidates.make_candidate(config, axes, objective, max_gpus, *sizes)
    arrival_s = load_of(config)[0].arrival_s
    able = [
        _fleets(template, (max_gpus, max_gpus), arrival_s)
        for template in candidate.templates
        if not template.bounds.impossible
    ]
    if not able:
        refused = [t.bounds.impossible for t in candidate.templates]
        return [*refused, *candidate.reasons, "no shape fits"][0]
    return min(able, key=lambda each: each.template.cost(*each.peak))


def _search(
    config: RunConfig,
    fleets: FleetBounds | str,
    rules: Sequence[str],
    axes: Axes,
    objective: Objective,
) -> Search[list[Row]]:
    """Return the row of the best fixed fleet, and one of each rule."""
    gpu, label = candidates.gpu_label(config), axes.label(config)
    if isinstance(fleets, str):
        return [Row(gpu, label, without="refused", reasons=[fleets])]
    fixed = Row(gpu, label, without="none")
    best = yield from _best_fixed(fleets, objective, fixed)
    if best is None:
        return [fixed]
    found = yield from side_by_side([_best_of(rule, fleets, best, objective) for rule in rules])
    rows = [fixed, *found]
    for row in rows:
        row.gpu = gpu
        if row.trial is not None:
            row.policy = axes.label(row.trial.config)
            spent = [_spent(summary) for summary in row.trial.summaries]
            row.by_seed, row.figure = tuple(spent), t_interval(spent)
        elif len(axes.values.get("policy", ())) > 1:
            row.policy += f", {label}"
    return rows


def _best_fixed(fleets: FleetBounds, objective: Objective, row: Row) -> Search[Workers | None]:
    """Find the cheapest fleet that stays as it is, and write it into its row."""
    template, (x_most, y_most) = fleets.template, fleets.box
    trials: dict[Workers, Trial] = {}

    def judge(x: int, y: int) -> Search[Verdict]:
        trials[x, y] = yield from try_cluster(fleets.fixed(x, y), objective)
        return trials[x, y].verdict

    def priced(x: int, y: int) -> float:
        return template.cost(x, y) if x <= x_most and y <= y_most else math.inf

    search_space = template.search_space(math.inf)
    space = dataclasses.replace(search_space, cost=priced)
    if template.config.cluster.n_prefill == 0:
        state = yield from fewest(space, judge, fleets.peak[1])
    else:
        start = min(fleets.peak[0], x_most), min(fleets.peak[1], y_most)
        state = yield from cheapest(space, judge, start)
    row.trials += trials.values()
    if state.best is None:
        most = max(trials, key=lambda point: (sum(point), point), default=None)
        row.reasons.append(
            "the load takes more workers by arithmetic"
            if most is None
            else f"even {trials[most].config.cluster.topology}, always, {trials[most].falls_short}"
        )
        return None
    row.trial, row.without = trials[state.best], ""
    return state.best


def _best_of(rule: str, fleets: FleetBounds, fixed: Workers, objective: Objective) -> Search[Row]:
    """Find the cheapest fleet of a rule: by its bounds and settings, first under one seed."""
    row, shares = Row("", rule, without="none"), list[float]()
    lists: list[list[RunConfig]] = []  # the leanest setting first
    spent: dict[_Place, float] = {}  # under one seed; infinite where that misses the objective

    def meets(number: int, n: int) -> Search[bool]:
        summary = (yield [lists[number][n]])[0]
        shares.append(summary["slo_attainment"])
        fine = summary["slo_attainment"] >= objective.attainment
        spent[number, n] = _spent(summary) if fine else math.inf
        return bool(fine)

    if max(fixed) == 1:
        row.reasons.append("one worker of each kind serves all, and none can go")
        return row
    searches = []
    together = fixed[0] == 0
    for settings, most, least in product(
        _settings(rule, objective, fleets.span_s, together), _mosts(fleets, fixed), _leasts(fixed)
    ):
        if least == most:
            continue
        lists.append([fleets.of(word, most, least) for word in settings])
        ask = partial(meets, len(lists) - 1)
        searches.append(smallest(0, len(settings) - 1, ask, len(settings) // 2))
    yield from side_by_side(searches)
    waiting = sorted((hours, place) for place, hours in spent.items() if hours < math.inf)
    while waiting:
        _, (number, n) = heappop(waiting)
        trial = yield from try_cluster(lists[number][n], objective)
        row.trials.append(trial)
        if trial.verdict is Verdict.MEETS:
            row.trial, row.without = trial, ""
            return row
        after = number, n + 1  # more seeds may ask for a more generous setting
        if after[1] < len(lists[number]) and after not in spent and (yield from meets(*after)):
            heappush(waiting, (spent[after], after))
    best = max(shares, default=0.0)
    row.reasons.append(
        f"no setting meets the objective over seeds; the best attains {100 * best:.1f}% of one"
    )
    return row


def _settings(rule: str, objective: Objective, span_s: float, together: bool) -> list[list[str]]:
    """Return words of a rule, the leanest first, in a list for each of its `ways`.

    TTFT and ITL are the objective's, a timetable has at least `_LINES` lines, and `aims` make it
    leaner, where the rule does not say them."""
    choice = parse(rule, "autoscale")
    kind = registry.find("scaling", choice.name)
    assert issubclass(kind, Autoscaler)
    level, fields = objective.level, kind.Parameters.model_fields
    overrides: dict[str, Any] = {}
    for name, bound in (("ttft", level.ttft), ("itl", level.tpot)):
        if name in fields and name not in choice.given and bound is not None:
            overrides[name] = bound
    if "period" in fields and "period" not in choice.given:
        overrides["period"] = min(fields["period"].default, float(math.ceil(span_s / _LINES)))
        if "interval" not in choice.given:
            overrides["interval"] = min(fields["interval"].default, overrides["period"])
    parameters = registry.parameters("scaling", rule).model_copy(update=overrides)
    aims = [name for name in kind.aims if name not in choice.given]
    lists = []
    open_ones = [name for name in kind.ways if name not in choice.given]
    open_ones = [name for name in open_ones if not (together and name == "switch")]
    for way in product([False, True], repeat=len(open_ones)):
        words = [
            _spelled(
                kind.name,
                parameters.model_copy(update=dict(zip(open_ones, way, strict=True))),
                dict.fromkeys(aims, factor),
            )
            for factor in (kind.factors if aims else (1.0,))
        ]
        lists.append(list(dict.fromkeys(words)))
    return lists


def _spelled(name: str, known: Parameters, factors: Mapping[str, float]) -> str:
    changed = {key: float(f"{getattr(known, key) * by:.3g}") for key, by in factors.items()}
    return spell(name, known.model_copy(update=changed))


def _mosts(fleets: FleetBounds, fixed: Workers) -> list[Workers]:
    """Return the most workers that rules are tried with: those of the fixed fleet, and more."""
    x, y = (min(most, math.ceil(_MORE * n)) for n, most in zip(fixed, fleets.box, strict=True))
    more, space = (x, y), fleets.template.search_space(math.inf)
    fits = space.has_room(*more) and more != fixed
    return [fixed, more] if fits else [fixed]


def _leasts(fixed: Workers) -> list[Workers]:
    """Return the fewest workers that rules are tried with: one of each kind, and half of all."""
    half = math.ceil(fixed[0] / 2), math.ceil(fixed[1] / 2)
    return list(dict.fromkeys([(min(1, fixed[0]), 1), half]))


def _spent(summary: Summary) -> float:
    """Return the GPU-hours of a run, or their price where GPUs have one."""
    scaling = summary["scaling"]
    hours, price = float(scaling["gpu_hours"]), scaling["cost_per_1000_good"]
    if price is None or not scaling["gpu_hours_per_1000_good"]:
        return hours
    return hours * float(price) / float(scaling["gpu_hours_per_1000_good"])


def _gains(rows: Sequence[Row]) -> list[Gain]:
    """Return what each rule takes of what the fixed fleet takes, in percent, less 100."""
    fixed, *others = rows
    gains = []
    for row in others:
        n = min(len(row.by_seed), len(fixed.by_seed))
        if n:
            ours, theirs = row.by_seed[:n], fixed.by_seed[:n]
            percent = paired_percent(ours, theirs)
            gains.append(Gain(row.gpu, row.policy, fixed.policy, ours, theirs, percent))
    return gains


def _pools(workers: Workers) -> tuple[int, ...]:
    return workers if workers[0] else workers[1:]
