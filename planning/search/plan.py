"""The cheapest cluster that meets a service-level objective."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.inputs import within
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.planning.runs.run_cache import RunCache, Search, side_by_side
from eldr_sim.planning.search.answer import (
    Answer,
    Gain,
    Margin,
    Question,
    Row,
    ShapeResult,
    policy_pairs,
    rank,
)
from eldr_sim.planning.search.axes import Space
from eldr_sim.planning.search.candidates import (
    MOST_GPUS,
    Candidate,
    ClusterTemplate,
    check_ffn_ranks,
    clusters_to_plan,
    cost,
    make_candidate,
    shape_label,
)
from eldr_sim.planning.search.monotone_search import SearchState, cheapest, fewest
from eldr_sim.planning.search.prefill import by_speed, prefill_candidates
from eldr_sim.planning.search.race import MOST_CANDIDATES, Contender, race_candidates
from eldr_sim.planning.search.rates import carried_by_seed, check_requests
from eldr_sim.planning.search.sensitivity import RIVALS, Effect, effects, search_size
from eldr_sim.planning.search.shapes import usual_engines
from eldr_sim.planning.search.trial import PAIRED_SEEDS, Trial, attains, try_cluster
from eldr_sim.planning.search.why_not import named, why
from eldr_sim.planning.slo import Objective, Verdict, t_interval
from eldr_sim.simulator.setup.config.run_config import RunConfig

#: Shapes estimated to cost more than the best cluster (costs, or was estimated to) by this factor
#: are not simulated; under a further router those without a gain under the first one, by any.
ESTIMATE_FACTOR = 1.3
#: Token budgets of co-located workers that are tried beside the GPU's own, where they are cheapest.
COLOCATED_BUDGETS = (2048, 16384)
#: Runs that a candidate and a margin take, by experience, for the estimate of the time left.
_RUNS_OF_CANDIDATE, _RUNS_OF_MARGIN = 35, 21
#: More Pareto points: the best cluster of each candidate with its decode workers times these.
_LARGER = (1.25, 1.5, 2.0)


@dataclass
class CandidateRow(Row):
    """The cheapest cluster of a candidate, and how the search found it."""

    #: Size and policy of the workers; None if no cluster meets the objective.
    template: ClusterTemplate | None = None
    #: State of the search over xPyD at its end.
    search: SearchState = dataclasses.field(default_factory=SearchState)

    def beside(self, prefill: int = 0, decode: int = 0) -> Trial | None:
        """Return the trial of the cluster with this many more workers, or None if not tried."""
        if self.template is None or self.trial is None:
            return None
        before = self.trial.config.cluster.n_prefill, self.trial.config.cluster.n_decode
        x, y = before[0] + prefill, before[1] + decode
        pools = [n > 0 for n in (x, y)] == [n > 0 for n in before]  # neither is lost
        wanted = self.template.at(x, y) if pools and min(x, y) >= 0 else None
        return next((trial for trial in self.trials if trial.config == wanted), None)


def cheapest_cluster(
    space: Space,
    objective: Objective,
    runs: RunCache,
    *,
    why_not: Sequence[str] = (),
    sensitivity: bool = False,
) -> Answer:
    """Find the cheapest xPyD or xC cluster that meets an objective, for every policy and GPU.

    Shapes (see `shapes`) are searched in the order of an estimate. Those with an arithmetic bound
    above the best cluster, or an estimate above it by more than ``ESTIMATE_FACTOR``, are not
    simulated: `Row.shapes` says which. With prefill workers alone (as 1P), the cheapest xP for
    every way in which the GPUs of a worker may share the model, over its token budgets.

    Raises InputError if a value is not valid, or contradicts another. ``space``: topology, policy
    and GPU are searched, but ``prefill.gpu`` and ``decode.gpu`` kept; ``why_not``: clusters to
    explain why they are not the answer (`why_not.named`); ``sensitivity``: find which other inputs
    would change the answer (`sensitivity.effects`)."""
    config, max_gpus, engines, wanted = space.config, space.max_gpus, space.engines, space.wanted
    if space.strategies and config.cluster.generates:
        raise InputError(
            "strategy", "applies only to prefill workers alone", "together with --prefill-only"
        )
    _check(config, max_gpus)
    asked, config = config, config.model_copy(update={"goodput": objective.level})
    configs = clusters_to_plan(config, wanted, space.prices)
    if not space.data_parallel_sizes:
        usual = {n for config in configs for n in usual_engines(config)}
        space = dataclasses.replace(space, data_parallel_sizes=sorted(usual))
        engines = space.engines
    check_ffn_ranks(space.ffn_ranks, engines)
    if wanted.values.get("num_redundant_experts") and max(engines) == 1:
        problem = "redundant experts need engines that share experts"
        raise InputError("num_redundant_experts", problem, "--data-parallel-size 2 or more")
    runs.report_start()
    clusters = [named(each) for each in why_not]
    candidates = _candidates(configs, space, objective)
    sized = (template for candidate in candidates for template in candidate.templates)
    rate = next((template.bounds.rate for template in sized), math.nan)
    check_requests(config, rate)
    runs.expected = _RUNS_OF_CANDIDATE * len(candidates) + _RUNS_OF_MARGIN
    dominated: list[CandidateRow] = []
    if config.cluster.generates and len(candidates) > MOST_CANDIDATES:
        candidates, dominated = runs.ended(_race(candidates, objective, rate))
    if config.cluster.generates:
        results = runs.ended(_search_all(candidates, objective))
    else:
        results = runs.together([_search_sizes(candidate, objective) for candidate in candidates])
    runs.expected = len(runs) + _RUNS_OF_MARGIN + (10 * len(results) if results[1:] else 0)
    ranked = sorted(results, key=lambda result: (result.cost, rank(result.trial))) + dominated
    margin, savings, larger = runs.ended(_around(ranked, results, objective, rate))
    reasons = runs.together(
        [why(cluster, config, ranked, objective, max_gpus) for cluster in clusters]
    )
    input_effects: list[Effect] = []
    if sensitivity:
        rivals = [(row.template, row.trial) for row in ranked if row.template and row.trial]
        input_effects = runs.ended(effects(rivals[:RIVALS], objective, rate))
    trials = [trial for result in results for trial in result.trials] + larger
    front = () if not config.cluster.generates else _front(trials, max_gpus)
    question = Question("cluster", asked, objective, max_gpus, rate, tuple(engines), wanted)
    named_too = tuple(zip(why_not, reasons, strict=True))
    return Answer(
        question, tuple(ranked), runs, margin, savings, front, named_too, tuple(input_effects)
    )


def _around(
    ranked: Sequence[CandidateRow],
    results: Sequence[CandidateRow],
    objective: Objective,
    rate: float,
) -> Search[tuple[Margin | None, tuple[Gain, ...], list[Trial]]]:
    """Return the answer's margin, what policies save, and larger clusters for the Pareto front."""
    further: list[Search[Any]] = [
        _margin(ranked[0], objective, rate),
        _savings(results if _generates(ranked[0]) else [], objective),
        side_by_side([search for each in results for search in _larger(each, objective)]),
        _one_more(ranked[0], objective),
    ]
    margin, savings, larger, _ = yield from side_by_side(further)
    return margin, savings, larger


def _generates(row: CandidateRow) -> bool:
    return row.trial is not None and row.trial.config.cluster.generates


def _one_more(result: CandidateRow, objective: Objective) -> Search[None]:
    """Judge the answer with one worker more of either kind: it may come next, or contradict it."""
    template, trial = result.template, result.trial
    if template is None or trial is None:
        return
    space, x, y = (
        template.search_space(math.inf),
        trial.config.cluster.n_prefill,
        trial.config.cluster.n_decode,
    )
    more = [(x + (x > 0), y), (x, y + (y > 0))]
    configs = [template.at(*each) for each in more if each != (x, y) and space.has_room(*each)]
    for found in (yield from side_by_side([try_cluster(config, objective) for config in configs])):
        result.trials.append(found)
        if found.verdict is Verdict.MISSES:
            result.notes.append(_of_size(template, _contradiction(trial.config, found.config)))


def _race(
    candidates: Sequence[Candidate], objective: Objective, rate: float
) -> Search[tuple[list[Candidate], list[CandidateRow]]]:
    """Return the candidates whose likely cheapest shape carries most, and the others: see
    `race_candidates`."""
    able = [(t for t in candidate.templates if not t.bounds.impossible) for candidate in candidates]
    likely = [template for each in able if (template := next(each, None)) is not None]
    runners = [Contender(template, *template.estimate, likely=rate) for template in likely]
    kept, others = yield from race_candidates(candidates, runners, objective, rate / 4.0)
    dominated = []
    for each, runner in others:
        row = CandidateRow(each.gpu, each.policy, without="beaten", reasons=[*each.reasons])
        if runner is not None:
            name = runner.template.at(runner.x, runner.y).cluster.topology
            row.reasons.insert(0, f"{name} carries about {runner.likely:.3g}/s in short runs")
        dominated.append(row)
    return kept, dominated


def _candidates(
    configs: Sequence[RunConfig], space: Space, objective: Objective
) -> list[Candidate]:
    """Return the shapes of every candidate; of prefill workers alone, its sizes and budgets."""
    max_gpus, sizes = space.max_gpus, space.sizes
    if configs[0].cluster.generates:
        return [
            make_candidate(config, space.wanted, objective, max_gpus, *sizes) for config in configs
        ]
    return [
        candidate
        for config in configs
        for candidate in prefill_candidates(
            config, objective, max_gpus, sizes[0], space.strategies, apart=False
        )
    ]


def _check(config: RunConfig, max_gpus: int) -> None:
    """Raise InputError for a load, or for workers, that a plan cannot size: it has one size."""
    if max_gpus < (2 if config.cluster.generates else 1):
        raise InputError("max_gpus", str(max_gpus), "enough for one worker of each kind")
    within("max_gpus", max_gpus, MOST_GPUS)
    if config.requests.request_rate == math.inf:
        raise InputError("request_rate", "inf", "a finite rate")
    for role in ("prefill", "decode"):
        for name in ("tensor_parallel_size", "data_parallel_size"):
            if getattr(getattr(config.cluster, role), name) is not None:
                problem = "a plan gives all workers one size"
                raise InputError(f"{role}.{name}", problem, name)


def _search_all(
    candidates: Sequence[Candidate], objective: Objective
) -> Search[list[CandidateRow]]:
    """Search the first candidate of each GPU, and then the others, from where it ended."""
    first = {candidate.gpu: candidate for candidate in reversed(candidates)}
    leads = [candidate for candidate in candidates if first[candidate.gpu] is candidate]
    others = [candidate for candidate in candidates if first[candidate.gpu] is not candidate]
    found = yield from side_by_side([_search_sizes(each, objective) for each in leads])
    lead = {row.gpu: row for row in found}
    searches = [_search_sizes(each, objective, lead[each.gpu]) for each in others]
    found += yield from side_by_side(searches)
    known = dict(zip(map(id, leads + others), found, strict=True))
    return [known[id(candidate)] for candidate in candidates]


def _search_sizes(
    candidate: Candidate, objective: Objective, lead: CandidateRow | None = None
) -> Search[CandidateRow]:
    """Search the shapes, the likely cheapest (of ``lead``) first; each must beat those before."""
    without = "none" if candidate.templates else "refused"
    result = CandidateRow(candidate.gpu, candidate.policy, without=without)
    templates = list(candidate.templates)
    if templates and not templates[0].config.cluster.generates:
        templates = yield from by_speed(templates)
    layouts: list[Parallelism] | None = None
    start: tuple[int, int] | None = None
    without_gain: set[str] = set()
    if lead is not None and lead.template is not None:
        layouts, start = _workers(lead.template), lead.search.best
        templates.sort(key=lambda template: _workers(template) != layouts)
        own = templates[0].config.model_copy(
            update={"policy": lead.template.config.policies.policy}
        )
        if own == lead.template.config:  # routers alone differ
            without_gain = {shape.shape for shape in lead.shapes if shape.cost is None}
    for template in templates:
        near = start if _workers(template) == layouts else None
        factor = 1.0 if shape_label(template.config) in without_gain else ESTIMATE_FACTOR
        yield from _search_shape(result, template, objective, near, factor)
    for template in _other_budgets(result):
        yield from _search_shape(result, template, objective)
    result.reasons += candidate.reasons
    return result


def _workers(template: ClusterTemplate) -> list[Parallelism]:
    """Return how the workers of each pool of a shape share the model."""
    return [pool.parallelism for pool in template.config.pools]


def _search_shape(
    result: CandidateRow,
    template: ClusterTemplate,
    objective: Objective,
    start: tuple[int, int] | None = None,
    factor: float = ESTIMATE_FACTOR,
) -> Search[None]:
    """Search one shape, unless arithmetic or its estimate says that it is not the cheapest.

    ``start``: where to begin, in place of the estimate, which may be above the best by
    ``factor``."""
    reason, searched, trial = template.bounds.impossible, True, None
    best, near = result.template, result.cost
    if best is not None:
        near = max(near, best.estimated_cost)
    if not reason and template.least_cost >= result.cost:
        reason = f"takes at least {template.least_cost:g} by arithmetic"
    elif not reason and template.estimated_cost > factor * near:
        reason, searched = f"estimated at {template.estimated_cost:g}: not simulated", False
    elif not reason:
        state, trials = yield from search_size(template, objective, result.cost, start)
        result.trials += trials.values()
        reason = "" if state.best is not None else _why_none(template, state, trials)
        if not math.isinf(result.cost) and reason:
            reason = "no cheaper cluster meets the objective"
        if state.best is not None:
            trial = trials[state.best]
            result.template, result.search, result.trial = template, state, trial
            result.without = ""
        result.notes += _notes(template, state, trials, result.cost)
    if reason and result.trial is None:
        result.reasons.append(_of_size(template, reason))
    result.shapes.append(
        ShapeResult(
            shape_label(template.config),
            template.least_cost,
            template.estimated_cost,
            None if trial is None else cost(trial.config),
            "" if trial is None else str(trial.config.cluster.topology),
            reason,
            searched,
        )
    )


def _other_budgets(result: CandidateRow) -> list[ClusterTemplate]:
    """Return the best co-located workers with other token budgets."""
    template = result.template
    if template is None or template.config.cluster.n_prefill > 0:
        return []
    if template.config.pool("decode").max_num_batched_tokens is not None:
        return []
    return [
        dataclasses.replace(
            template, config=template.config.model_copy(update={"max_num_batched_tokens": budget})
        )
        for budget in COLOCATED_BUDGETS
        if budget >= (template.config.pool("decode").max_num_seqs or 1024)
    ]


def _of_size(template: ClusterTemplate, text: str) -> str:
    return f"{shape_label(template.config)}: {text}"


def _why_none(
    template: ClusterTemplate, state: SearchState, trials: dict[tuple[int, int], Trial]
) -> str:
    least, apart = template.bounds, template.config.cluster.n_prefill > 0
    if not trials:
        fewest = str(least.n_prefill if apart else least.n_decode)
        if apart and template.config.cluster.generates:
            fewest = f"{least.n_prefill} prefill and {least.n_decode} decode"
        return (
            f"the load takes at least {fewest} workers at full speed, more than "
            f"{template.max_gpus} GPUs"
        )
    if state.x_least is None or not apart:
        trial = trials[max(trials, key=lambda point: (sum(point), point))]
        parts = ", ".join(
            f"{100 * trial.attained(metric):.1f}% within the {metric.upper()} bound"
            for metric in trial.config.output.goodput.model_dump(exclude_none=True)
        )
        return f"even {trial.config.cluster.topology} {trial.falls_short} ({parts})"
    return (
        f"needs {state.x_least} prefill and {state.y_least} decode workers at least, and no such "
        f"cluster of up to {template.max_gpus} GPUs meets the objective"
    )


def _notes(
    template: ClusterTemplate, state: SearchState, trials: dict[tuple[int, int], Trial], best: float
) -> list[str]:
    cheaper = "" if math.isinf(best) else "would be cheaper and "
    notes = [
        _of_size(template, _contradiction(trials[p].config, trials[q].config))
        for p, q in state.contradictions()
        if p in trials and q in trials
    ]
    notes += [
        _of_size(
            template, f"{trial.config.cluster.topology} {cheaper}is undecided after {_seeds(trial)}"
        )
        for (x, y), trial in sorted(trials.items())
        if trial.verdict is Verdict.UNDECIDED
        and template.cost(x, y) < best
        and template.search_space(best).has_room(x, y)
    ]
    return notes


def _contradiction(smaller: RunConfig, larger: RunConfig) -> str:
    meets = f"{smaller.cluster.topology} meets the objective"
    return f"not monotone: {meets} and {larger.cluster.topology} does not"


def _seeds(trial: Trial) -> str:
    mean, low, high = (100 * end for end in trial.attainment)
    if trial.hopeless:
        return f"one seed, which no others could make good: {mean:.2f}%"
    return f"{len(trial.summaries)} seeds: {mean:.2f}% [{low:.2f}, {high:.2f}]"


def _margin(result: CandidateRow, objective: Objective, rate: float) -> Search[Margin | None]:
    """Find the highest rate of a cluster under each seed, up to four times the planned rate."""
    if result.trial is None:
        return None
    config = result.trial.config.model_copy(update={"request_rate": rate})
    n_seeds, high = min(PAIRED_SEEDS, objective.seeds), 4.0 * rate
    found = yield from carried_by_seed(
        config, n_seeds, objective, low=rate / 4.0, high=high, at_once=2
    )
    rates = [value or 0.0 for value in found]
    return Margin(
        t_interval(rates),
        t_interval([100.0 * (value / rate - 1.0) for value in rates]),
        max(rates) >= high,
        result.beside(decode=-1),
        result.beside(prefill=-1),
    )


def _larger(result: CandidateRow, objective: Objective) -> list[Search[Trial]]:
    """Return searches that try a result with more decode workers: faster per user, but dearer."""
    if result.trial is None or result.template is None or not result.trial.config.cluster.generates:
        return []
    x, y = result.trial.config.cluster.n_prefill, result.trial.config.cluster.n_decode
    sizes = {math.ceil(factor * y) for factor in _LARGER}
    template = result.template
    return [
        try_cluster(template.at(x, n), objective)
        for n in sorted(sizes)
        if template.search_space(math.inf).has_room(x, n)
    ]


def _front(trials: Sequence[Trial], max_gpus: int) -> tuple[Trial, ...]:
    good = {
        trial.config.model_dump_json(): trial
        for trial in trials
        if trial.verdict is Verdict.MEETS and trial.config.n_gpus <= max_gpus
    }
    front: list[Trial] = []
    for trial in sorted(good.values(), key=lambda trial: (-trial.per_user, -trial.per_gpu)):
        if not front or trial.per_gpu > front[-1].per_gpu:
            front.append(trial)
    return tuple(front)


def _savings(results: Sequence[CandidateRow], objective: Objective) -> Search[tuple[Gain, ...]]:
    """Find the GPUs of the cheapest cluster under each seed, and pair policies on the same GPU."""
    seeds = range(min(PAIRED_SEEDS, objective.seeds))
    pairs = list(policy_pairs(results))
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
            saved = t_interval([float(a - b) for a, b in kept])
            savings.append(Gain(other.gpu, other.policy, reference.policy, ours, theirs, saved))
    return tuple(savings)


def _fewest_gpus(result: CandidateRow, seed: int, objective: Objective) -> Search[int | None]:
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
    if template.config.cluster.n_prefill == 0:
        state = yield from fewest(space, judge, y)
    else:
        state = yield from cheapest(space, judge, (x, y), around=False)
    if state.best is None:
        return None
    return template.at(*state.best).n_gpus
