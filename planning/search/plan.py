"""The cheapest cluster that meets a service-level objective."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.inputs import within
from eldr_sim.planning.intervals import Interval, t_interval
from eldr_sim.planning.runs.shared_runs import Runs, Search, side_by_side
from eldr_sim.planning.search.candidates import (
    MOST_GPUS,
    Candidate,
    ClusterTemplate,
    clusters_to_plan,
    cost,
    make_candidate,
    shape_label,
)
from eldr_sim.planning.search.prefill import by_speed, prefill_candidates
from eldr_sim.planning.search.rates import carried_by_seed, check_requests
from eldr_sim.planning.search.savings import PAIRED_SEEDS, Saving, savings_of
from eldr_sim.planning.search.search import SearchState, cheapest, fewest
from eldr_sim.planning.search.trial import Trial, try_cluster
from eldr_sim.planning.slo import Objective, Verdict
from eldr_sim.simulator.outcome.catalogue import label
from eldr_sim.simulator.outcome.headline import Headline, Shown, number
from eldr_sim.simulator.setup.config import RunConfig

#: Shapes that are estimated to cost more than the best cluster costs, or was estimated to, by this
#: factor are not simulated.
ESTIMATE_FACTOR = 1.3
#: Token budgets of co-located workers that are tried beside the GPU's own, where they are cheapest.
COLOCATED_BUDGETS = (2048, 16384)
#: Runs that a candidate and a margin take, by experience, for the estimate of the time left.
_RUNS_OF_CANDIDATE, _RUNS_OF_MARGIN = 35, 21
#: More Pareto points: the best cluster of each candidate with its decode workers times these.
_LARGER = (1.25, 1.5, 2.0)


@dataclass(frozen=True)
class ShapeResult:
    """What became of a shape of a candidate's clusters.

    Attributes
    ----------
    shape
        Sizes of its workers, and whether prefill is apart.
    least_cost, estimated_cost
        By arithmetic and by the estimate: price per hour, or GPUs.
    cost
        Of its cheapest cluster that meets the objective and is cheaper than those of the shapes
        before it, or None.
    topology
        That cluster; empty where there is none.
    reason
        Why there is none; where the shape was not simulated, why not.
    is_searched
        Whether it was simulated, or ruled out by arithmetic.
    """

    shape: str
    least_cost: float
    estimated_cost: float
    cost: float | None
    topology: str
    reason: str
    is_searched: bool


@dataclass
class CandidateResult:
    """The cheapest cluster of one candidate, and how the search found it.

    Attributes
    ----------
    gpu, policy
        The candidate; of prefill workers alone, how they share the model.
    refused
        Whether no worker of the candidate has memory.
    template
        Size and policy of the workers; None if no cluster meets the objective.
    search
        State of the search over xPyD at its end.
    trials
        Every cluster tried, of all worker sizes.
    trial
        The cheapest cluster that meets the objective, or None.
    reasons
        Why no cluster, or none of some worker size, meets the objective.
    notes
        Verdicts that contradict monotonicity, and cheaper clusters that stayed undecided.
    shapes
        What became of every shape.
    """

    gpu: str
    policy: str
    refused: bool = False
    template: ClusterTemplate | None = None
    search: SearchState = field(default_factory=SearchState)
    trials: list[Trial] = field(default_factory=list)
    trial: Trial | None = None
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    shapes: list[ShapeResult] = field(default_factory=list)

    @property
    def cost(self) -> float:
        """Price per hour, or GPUs; infinite if there is no cluster."""
        return math.inf if self.trial is None else cost(self.trial.config)

    def beside(self, prefill: int = 0, decode: int = 0) -> Trial | None:
        """Return the trial of the cluster with this many more workers, or None if not tried."""
        if self.template is None or self.trial is None:
            return None
        before = self.trial.config.n_prefill, self.trial.config.n_decode
        x, y = before[0] + prefill, before[1] + decode
        pools = [n > 0 for n in (x, y)] == [n > 0 for n in before]  # neither is lost
        wanted = self.template.at(x, y) if pools and min(x, y) >= 0 else None
        return next((trial for trial in self.trials if trial.config == wanted), None)


@dataclass(frozen=True)
class Margin:
    """Extra load and lost workers that the best cluster tolerates.

    Attributes
    ----------
    rate
        Highest rate within the objective, requests per second, mean over seeds with its 95%
        interval.
    percent
        The same rate relative to the planned load, less 1, in percent.
    is_bounded
        Whether a seed met the objective at the highest rate tried: the true rate is then higher.
    lost_decode, lost_prefill
        The cluster with one worker less; None if the pool has a single worker.
    """

    rate: Interval
    percent: Interval
    is_bounded: bool
    lost_decode: Trial | None
    lost_prefill: Trial | None


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """Result of :func:`plan`.

    Attributes
    ----------
    config, objective, rate, max_gpus
        The question; ``rate`` in requests per second.
    candidates
        The cheapest cluster of every policy and GPU, cheapest first.
    margin
        Margin of the cheapest cluster; None if no cluster meets the objective.
    front
        Pareto front over tokens/s per user and tokens/s per GPU of the clusters that meet the
        objective, fastest first.
    savings
        GPUs that policies save compared with the first one.
    runs
        All simulated runs.
    """

    config: RunConfig
    objective: Objective
    rate: float
    max_gpus: int
    candidates: list[CandidateResult]
    margin: Margin | None
    front: list[Trial]
    savings: list[Saving]
    runs: Runs

    def headline(self) -> Headline:
        """Return the cheapest cluster of each candidate."""
        rows = []
        last = "prefill_mfu" if self.config.prefill_only else "p99_tpot_ms"
        tags = ("slo_attainment", "p99_ttft_ms", last)
        for result in self.candidates:
            trial, cells = result.trial, ["none", "", "", "", ""]
            if trial is not None:
                cells = [trial.config.topology, number(trial.config.n_gpus)]
                cells += [number(trial.mean(tag)) for tag in tags]
            rows.append((result.policy, result.gpu, *cells))
        heads = map(label, ("gpus", *tags))
        title = f"{self.rate:g} requests/s, up to {self.max_gpus} GPUs, cheapest first"
        return Headline(title, ("policy", "GPU", "cluster", *heads), rows)

    @property
    def best(self) -> CandidateResult | None:
        """The candidate with the cheapest cluster; None if no cluster meets the objective."""
        return self.candidates[0] if self.candidates and self.candidates[0].trial else None

    @property
    def runner_up(self) -> Trial | None:
        """The best cluster of another policy or GPU, or else the next cheapest of the same."""
        if self.best is None:
            return None
        others = [result.trial for result in self.candidates[1:] if result.trial is not None]
        if others:
            return others[0]
        within = [t for t in self.best.trials if t.verdict is Verdict.MEETS]
        within = [t for t in within if t.config.n_gpus <= self.max_gpus]
        return min((t for t in within if t is not self.best.trial), key=_rank, default=None)

    @property
    def has_prices(self) -> bool:
        """Whether clusters are ranked by price; if not, by GPUs."""
        trials = [trial for result in self.candidates for trial in result.trials]
        return bool(trials) and trials[0].config.price_per_hour is not None

    def write(self, out: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write ``plan.json`` and ``points.parquet`` into a folder, whole or not at all.

        Parameters
        ----------
        out
            Folder to make.
        force
            Replace an earlier plan.

        Raises
        ------
        InputError
            If ``out`` exists and may not be replaced, or cannot be written.
        """
        from eldr_sim.planning.search.plan_files import plan_record, write_plan

        write_plan(Path(out), plan_record(self), self.runs, force)


def plan(
    config: RunConfig,
    objective: Objective,
    *,
    policies: Sequence[str] = (),
    gpus: Sequence[str] = (),
    max_gpus: int = 64,
    prices: Mapping[str, float] | None = None,
    tensor_parallel_sizes: Sequence[int] = (),
    redundant_experts: Sequence[int] = (),
    strategies: Sequence[str] = (),
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Find the cheapest xPyD or xC cluster that meets an objective, for every policy and GPU.

    The shapes of clusters (see `shapes`) are searched in the order of an estimate. Those whose
    arithmetic bound is above the best cluster, or whose estimate is by more than
    ``ESTIMATE_FACTOR``, are not simulated: `CandidateResult.shapes` says which.

    With prefill workers alone (a topology such as 1P), the cheapest xP for every way in which the
    GPUs of a worker may share the model, over its token budgets.

    Parameters
    ----------
    config
        The load and the engines; topology, policy and GPU are searched. ``prefill.gpu`` and
        ``decode.gpu`` fix the GPU of a pool.
    objective
        Service level and attainment.
    policies, gpus
        Candidates; those of ``config`` if empty.
    max_gpus
        Most GPUs of a cluster.
    prices
        Price of a GPU-hour by GPU. Without prices the cheapest cluster has the fewest GPUs.
    redundant_experts
        Numbers of redundant experts to choose from, where engines share experts
        (``data_parallel_size``): they cost KV blocks.
    tensor_parallel_sizes
        GPUs per engine to choose from, for each pool; all powers of two up to a node if empty.
    jobs
        Processes, see :func:`~eldr_sim.planning.runs.runner.run_points`.
    progress
        Called after every run with the numbers of runs done and asked for so far.

    Raises
    ------
    InputError
        If an argument is not valid, or the arguments contradict each other.
    """
    if max_gpus < (1 if config.prefill_only else 2):
        raise InputError("max_gpus", str(max_gpus), "room for one worker of each kind")
    within("max_gpus", max_gpus, MOST_GPUS)
    if strategies and not config.prefill_only:
        raise InputError("strategy", "a choice of prefill workers alone", "--prefill-only beside")
    if config.request_rate == math.inf:
        raise InputError("request_rate", "inf", "a finite rate")
    _check_workers(config)
    asked, config = config, config.model_copy(update={"goodput": objective.level})
    configs = clusters_to_plan(config, policies, gpus, prices or {}, redundant_experts)
    runs = Runs(jobs, progress)
    with runs.starting(configs[0]):
        candidates = _candidates(configs, objective, max_gpus, tensor_parallel_sizes, strategies)
        sized = (template for candidate in candidates for template in candidate.templates)
        rate = next((template.bounds.rate for template in sized), math.nan)
        check_requests(config, rate)
        runs.expected = _RUNS_OF_CANDIDATE * len(candidates) + _RUNS_OF_MARGIN
        results = runs.together([_search_sizes(each, objective) for each in candidates])
        runs.expected = len(runs) + _RUNS_OF_MARGIN + (10 * len(results) if results[1:] else 0)
        ranked = sorted(results, key=lambda result: (result.cost, _rank(result.trial)))
        further: list[Search[Any]] = [
            _margin(ranked[0], objective, rate),
            savings_of([] if config.prefill_only else results, objective),
            side_by_side([search for each in results for search in _larger(each, objective)]),
        ]
        margin, savings, larger = runs.together(further)
    trials = [trial for result in results for trial in result.trials] + larger
    front = [] if config.prefill_only else _front(trials, max_gpus)
    return Plan(asked, objective, rate, max_gpus, ranked, margin, front, savings, runs)


def _candidates(
    configs: Sequence[RunConfig],
    objective: Objective,
    max_gpus: int,
    sizes: Sequence[int],
    strategies: Sequence[str],
) -> list[Candidate]:
    """Return the shapes of every candidate; of prefill workers alone, its sizes and budgets."""
    if not configs[0].prefill_only:
        return [make_candidate(each, objective, max_gpus, sizes) for each in configs]
    return [
        candidate
        for each in configs
        for candidate in prefill_candidates(
            each, objective, max_gpus, sizes, strategies, apart=False
        )
    ]


def _check_workers(config: RunConfig) -> None:
    """Raise InputError for workers that a plan cannot size: it searches one size for all."""
    for role in ("prefill", "decode"):
        for name in ("tensor_parallel_size", "data_parallel_size"):
            if getattr(getattr(config, role), name) is not None:
                problem = "a plan searches one size of all workers"
                raise InputError(f"{role}.{name}", problem, name)


def _rank(trial: Trial | None) -> tuple[float, float, float]:
    """Return a sort key: cheapest, then fewest GPUs, then highest attainment."""
    if trial is None:
        return (math.inf, math.inf, 0.0)
    return cost(trial.config), trial.config.n_gpus, -trial.attainment.mean


def _search_sizes(candidate: Candidate, objective: Objective) -> Search[CandidateResult]:
    """Search the shapes, the likely cheapest first; each must beat those before it."""
    result = CandidateResult(
        candidate.gpu, candidate.policy, refused=not candidate.templates, reasons=[]
    )
    templates = list(candidate.templates)
    if templates and templates[0].config.prefill_only:
        templates = yield from by_speed(templates)
    for template in templates:
        yield from _search_shape(result, template, objective)
    for template in _other_budgets(result):
        yield from _search_shape(result, template, objective)
    result.reasons += candidate.reasons
    return result


def _search_shape(
    result: CandidateResult, template: ClusterTemplate, objective: Objective
) -> Search[None]:
    """Search one shape, unless arithmetic or its estimate says that it is not the cheapest."""
    reason, searched, found = template.bounds.impossible, True, None
    if not reason and template.least_cost >= result.cost:
        reason = f"takes at least {template.least_cost:g} by arithmetic"
    elif not reason and template.estimated_cost > ESTIMATE_FACTOR * _near(result):
        reason, searched = f"estimated at {template.estimated_cost:g}: not simulated", False
    elif not reason:
        state, trials = yield from _search_size(template, objective, result.cost)
        result.trials += trials.values()
        reason = "" if state.best is not None else _why_none(template, state, trials)
        if not math.isinf(result.cost) and reason:
            reason = "no cheaper cluster meets the objective"
        if state.best is not None:
            found = trials[state.best]
            result.template, result.search, result.trial = template, state, found
        result.notes += _notes(template, state, trials, result.cost)
    if reason and result.trial is None:
        result.reasons.append(_of_size(template, reason))
    result.shapes.append(
        ShapeResult(
            shape_label(template.config),
            template.least_cost,
            template.estimated_cost,
            None if found is None else cost(found.config),
            "" if found is None else found.config.topology,
            reason,
            searched,
        )
    )


def _near(result: CandidateResult) -> float:
    """Return the cost of the best cluster so far, or its estimate where that is higher."""
    return (
        result.cost if result.template is None else max(result.cost, result.template.estimated_cost)
    )


def _other_budgets(result: CandidateResult) -> list[ClusterTemplate]:
    """Return the best co-located workers with other token budgets."""
    template = result.template
    if template is None or not template.config.colocated:
        return []
    if template.config.pool("decode").max_num_batched_tokens is not None:
        return []
    return [
        dataclasses.replace(
            template,
            config=template.config.model_copy(update={"max_num_batched_tokens": budget}),
        )
        for budget in COLOCATED_BUDGETS
        if budget >= (template.config.pool("decode").max_num_seqs or 1024)
    ]


def _search_size(
    template: ClusterTemplate, objective: Objective, below: float
) -> Search[tuple[SearchState, dict[tuple[int, int], Trial]]]:
    """Find the cheapest cluster of a shape, first near its estimate, then among all."""
    trials: dict[tuple[int, int], Trial] = {}

    def judge(x: int, y: int) -> Search[Verdict]:
        if (x, y) not in trials:
            trials[x, y] = yield from try_cluster(template.at(x, y), objective)
        return trials[x, y].verdict

    x, y = template.estimate
    near = template.cost(2 * x, 2 * y) + 1e-9
    for limit in (near, below) if near < below else (below,):
        space, prompts = template.search_space(limit), template.config.prefill_only
        if template.config.colocated or prompts:
            state = yield from fewest(space, judge, x if prompts else y, prefill=prompts)
        else:
            state = yield from cheapest(space, judge, (x, y))
        if state.best is not None:
            break
    return state, trials


def _of_size(template: ClusterTemplate, text: str) -> str:
    return f"{shape_label(template.config)}: {text}"


def _why_none(
    template: ClusterTemplate, state: SearchState, trials: dict[tuple[int, int], Trial]
) -> str:
    least = template.bounds
    if not trials and template.config.prefill_only:
        return (
            f"the load takes at least {least.n_prefill} workers at full speed, more than "
            f"{template.max_gpus} GPUs"
        )
    apart = not template.config.colocated
    fewest = f"{least.n_prefill} prefill and {least.n_decode} decode" if apart else least.n_decode
    if not trials:
        return (
            f"the load takes at least {fewest} workers at full speed, more than "
            f"{template.max_gpus} GPUs"
        )
    if state.x_least is None or not apart:
        trial = trials[max(trials, key=lambda point: (sum(point), point))]
        parts = ", ".join(
            f"{100 * trial.attained(metric):.1f}% within the {metric.upper()} bound"
            for metric in trial.config.goodput.model_dump(exclude_none=True)
        )
        share = 100 * trial.attainment.mean
        return f"even {trial.config.topology} attains only {share:.1f}% ({parts})"
    return (
        f"needs {state.x_least} prefill and {state.y_least} decode workers at least, and no such "
        f"cluster of up to {template.max_gpus} GPUs meets the objective"
    )


def _notes(
    template: ClusterTemplate,
    state: SearchState,
    trials: dict[tuple[int, int], Trial],
    best: float,
) -> list[str]:
    cheaper = "" if math.isinf(best) else "would be cheaper and "
    notes = [
        _of_size(
            template,
            f"not monotone: {template.at(*p).topology} meets the objective and "
            f"{template.at(*q).topology} does not",
        )
        for p, q in state.contradictions()
    ]
    notes += [
        _of_size(
            template,
            f"{trial.config.topology} {cheaper}is undecided after {len(trial.summaries)} seeds: "
            f"{100 * trial.attainment.mean:.2f}% "
            f"[{100 * trial.attainment.low:.2f}, {100 * trial.attainment.high:.2f}]",
        )
        for (x, y), trial in sorted(trials.items())
        if trial.verdict is Verdict.UNDECIDED
        and template.cost(x, y) < best
        and template.search_space(best).has_room(x, y)
    ]
    return notes


def _margin(result: CandidateResult, objective: Objective, rate: float) -> Search[Margin | None]:
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


def _larger(result: CandidateResult, objective: Objective) -> list[Search[Trial]]:
    """Return searches that try a result with more decode workers: faster per user, but dearer."""
    if result.trial is None or result.template is None or result.trial.config.prefill_only:
        return []
    x, y = result.trial.config.n_prefill, result.trial.config.n_decode
    sizes = {math.ceil(factor * y) for factor in _LARGER}
    template = result.template
    return [
        try_cluster(template.at(x, n), objective)
        for n in sorted(sizes)
        if template.search_space(math.inf).has_room(x, n)
    ]


def per_user(trial: Trial) -> float:
    """Return the output tokens per second of the median request."""
    tpot_ms = trial.mean("median_tpot_ms")
    return 1e3 / tpot_ms if tpot_ms else math.nan


def per_gpu(trial: Trial) -> float:
    """Return the output tokens per second per GPU."""
    return (trial.mean("output_throughput") or 0.0) / trial.config.n_gpus


def _front(trials: Sequence[Trial], max_gpus: int) -> list[Trial]:
    good = {
        trial.config.model_dump_json(): trial
        for trial in trials
        if trial.verdict is Verdict.MEETS and trial.config.n_gpus <= max_gpus
    }
    ordered = sorted(good.values(), key=lambda trial: (-per_user(trial), -per_gpu(trial)))
    front: list[Trial] = []
    for trial in ordered:
        if not front or per_gpu(trial) > per_gpu(front[-1]):
            front.append(trial)
    return front
