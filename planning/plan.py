"""The cheapest cluster that meets a service-level objective."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eldr_sim.errors import InputError
from eldr_sim.planning.intervals import Interval, t_interval
from eldr_sim.planning.offers import Candidate, Offer, candidate, clusters_to_plan, cost
from eldr_sim.planning.rates import LEAST_REQUESTS, carried
from eldr_sim.planning.runs import Runs, Task
from eldr_sim.planning.search import Found, cheapest
from eldr_sim.planning.slo import Objective, Verdict
from eldr_sim.planning.trial import Trial, passes, try_cluster
from eldr_sim.simulator.catalogue import label
from eldr_sim.simulator.config import RunConfig
from eldr_sim.simulator.headline import Headline, Shown, number

#: Seeds of what is found seed by seed: the margin, and the GPUs that a policy saves.
PAIRED_SEEDS = 5
#: Pareto points beside each answer: so many times its decode workers.
_LARGER = (1.25, 1.5, 2.0)


@dataclass
class Answer:
    """The cheapest cluster of one policy on one GPU, and how it was found.

    Attributes
    ----------
    gpu, policy
        Which candidate.
    offer
        The workers of the cluster; None where no cluster meets the objective.
    found
        What the search along xPyD learned.
    trials
        Every cluster tried, of all sizes of worker.
    trial
        The cluster itself.
    reasons
        Why there is no cluster, or why some sizes of worker have none.
    notes
        Where the verdicts were not monotone, and cheaper clusters that stayed undecided.
    """

    gpu: str
    policy: str
    offer: Offer | None = None
    found: Found = field(default_factory=Found)
    trials: list[Trial] = field(default_factory=list)
    trial: Trial | None = None
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def cost(self) -> float:
        """Price an hour, or GPUs; infinite where there is no cluster."""
        return math.inf if self.trial is None else cost(self.trial.config)

    def beside(self, prefill: int = 0, decode: int = 0) -> Trial | None:
        """Return the trial of the cluster with so many more workers, if it was tried."""
        if self.offer is None or self.trial is None:
            return None
        x, y = self.trial.config.n_prefill + prefill, self.trial.config.n_decode + decode
        tried = (t for t in self.trials if (t.config.n_prefill, t.config.n_decode) == (x, y))
        return next(tried, None)


@dataclass(frozen=True)
class Margin:
    """Load and failures that the answer bears.

    Attributes
    ----------
    rate
        Highest rate that it carries within the objective, mean over seeds with 95% interval.
    percent
        The same as what it carries beyond the planned load, in percent.
    is_bounded
        Whether a seed carried the highest rate tried, so that the true figure is higher.
    lost_decode, lost_prefill
        The cluster with one worker less; None where none would be left.
    """

    rate: Interval
    percent: Interval
    is_bounded: bool
    lost_decode: Trial | None
    lost_prefill: Trial | None


@dataclass(frozen=True)
class Saving:
    """GPUs that a policy saves against the first policy on the same GPU, paired over seeds.

    ``by_seed`` and ``reference_by_seed`` are the GPUs of the cheapest cluster of each seed alone.
    """

    gpu: str
    policy: str
    reference: str
    by_seed: tuple[int, ...]
    reference_by_seed: tuple[int, ...]
    gpus: Interval


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """Result of :func:`plan`.

    Attributes
    ----------
    config, objective, rate, max_gpus
        What was asked for; ``rate`` in requests per second.
    answers
        The cheapest cluster of every policy and GPU, cheapest first.
    margin
        Of the first of them; None where there is none.
    front
        Clusters that meet the objective and that no other one beats both in tokens/s per user and
        in tokens/s per GPU, fastest first.
    savings
        What policies save against the first one.
    runs
        Every run that was made.
    """

    config: RunConfig
    objective: Objective
    rate: float
    max_gpus: int
    answers: list[Answer]
    margin: Margin | None
    front: list[Trial]
    savings: list[Saving]
    runs: Runs

    def headline(self) -> Headline:
        """Return the cheapest cluster of each candidate."""
        rows = []
        for answer in self.answers:
            trial, cells = answer.trial, ["none", "", "", "", ""]
            if trial is not None:
                cells = [trial.config.topology, number(trial.config.n_gpus)]
                tags = ("slo_attainment", "p99_ttft_ms", "p99_tpot_ms")
                cells += [number(trial.mean(tag)) for tag in tags]
            rows.append((answer.policy, answer.gpu, *cells))
        heads = map(label, ("gpus", "slo_attainment", "p99_ttft_ms", "p99_tpot_ms"))
        title = f"{self.rate:g} requests/s, up to {self.max_gpus} GPUs, cheapest first"
        return Headline(title, ("policy", "GPU", "cluster", *heads), rows)

    @property
    def best(self) -> Answer | None:
        """The answer; None where no cluster meets the objective."""
        return self.answers[0] if self.answers and self.answers[0].trial else None

    @property
    def runner_up(self) -> Trial | None:
        """The second best: of another policy or GPU where there is one, else the next cheapest."""
        if self.best is None:
            return None
        others = [answer.trial for answer in self.answers[1:] if answer.trial is not None]
        if others:
            return others[0]
        within = [t for t in self.best.trials if t.verdict is Verdict.MEETS]
        within = [t for t in within if t.config.n_gpus <= self.max_gpus]
        return min((t for t in within if t is not self.best.trial), key=_rank, default=None)

    @property
    def has_prices(self) -> bool:
        """True if cheap means a low price, False if it means few GPUs."""
        trials = [trial for answer in self.answers for trial in answer.trials]
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
        from eldr_sim.planning.plan_files import plan_record, write_plan

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
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Find the cheapest xPyD cluster that meets an objective, for every policy on every GPU.

    Parameters
    ----------
    config
        The load and the engines; topology, policy and GPU are what is searched. ``prefill.gpu`` and
        ``decode.gpu`` fix the GPU of a pool.
    objective
        What has to be met.
    policies, gpus
        Candidates; those of ``config`` when empty.
    max_gpus
        Most GPUs of a cluster.
    prices
        Price of a GPU-hour by GPU. Without prices the cheapest cluster has the fewest GPUs.
    tensor_parallel_sizes
        GPUs of a worker to choose from. When empty, the fewest (a power of two) that hold the
        model, and more only where no cluster of those meets the objective.
    jobs
        Processes, see :func:`~eldr_sim.planning.runner.run_points`.
    progress
        Called after every run with the numbers of runs done and asked for so far.

    Raises
    ------
    InputError
        If something asked for does not exist or does not fit together.
    """
    if max_gpus < 2:
        raise InputError("max_gpus", str(max_gpus), "2 or more: one worker of each kind")
    if config.request_rate == math.inf:
        raise InputError("request_rate", "inf", "a finite rate")
    asked, config = config, config.model_copy(update={"goodput": objective.level})
    configs = clusters_to_plan(config, policies, gpus, prices or {})
    candidates = [candidate(c, objective, max_gpus, tensor_parallel_sizes) for c in configs]
    rate = next((offer.bounds.rate for each in candidates for offer in each.offers), math.nan)
    _check_load(config, rate)
    runs = Runs(jobs, progress)
    answers = runs.together([_answer(each, objective) for each in candidates])
    savings = _savings(answers, objective, runs)
    ranked = sorted(answers, key=lambda answer: (answer.cost, _rank(answer.trial)))
    margin = None
    if ranked[0].trial is not None:
        margin = _margin(ranked[0], objective, rate, runs)
    larger = [task for answer in answers for task in _larger(answer, objective)]
    trials = [trial for answer in answers for trial in answer.trials] + runs.together(larger)
    front = _front(trials, max_gpus)
    return Plan(asked, objective, rate, max_gpus, ranked, margin, front, savings, runs)


def _check_load(config: RunConfig, rate: float) -> None:
    expected = config.num_requests or rate * config.duration
    if expected < LEAST_REQUESTS:
        raise InputError(
            "duration",
            f"about {expected:.0f} requests in the measured window tell little about a share",
            f"{LEAST_REQUESTS} or more",
        )


def _rank(trial: Trial | None) -> tuple[float, float, float]:
    """Order clusters: cheapest, then fewest GPUs, then highest attainment."""
    if trial is None:
        return (math.inf, math.inf, 0.0)
    return cost(trial.config), trial.config.n_gpus, -trial.attainment.mean


def _answer(each: Candidate, objective: Objective) -> Task[Answer]:
    """Search the sizes of worker one after the other; a larger one must beat the smaller ones."""
    answer = Answer(each.gpu, each.policy)
    for offer in each.offers:
        if each.larger_if_needed and answer.trial is not None:
            break
        if offer.bounds.impossible:
            answer.reasons.append(_of_size(offer, offer.bounds.impossible))
            continue
        found, trials = yield from _search(offer, objective, answer.cost)
        answer.trials += trials.values()
        if found.best is not None:
            answer.offer, answer.found, answer.trial = offer, found, trials[found.best]
        elif answer.trial is None:
            answer.reasons.append(_of_size(offer, _why_none(offer, found, trials)))
        answer.notes += _notes(offer, found, trials, answer.cost)
    answer.reasons += each.reasons
    return answer


def _search(
    offer: Offer, objective: Objective, below: float
) -> Task[tuple[Found, dict[tuple[int, int], Trial]]]:
    trials: dict[tuple[int, int], Trial] = {}

    def judge(x: int, y: int) -> Task[Verdict]:
        trials[x, y] = yield from try_cluster(offer.at(x, y), objective)
        return trials[x, y].verdict

    found = yield from cheapest(offer.space(below), judge)
    return found, trials


def _of_size(offer: Offer, text: str) -> str:
    size = offer.config.tensor_parallel_size
    return f"{size} GPU{'s' if size > 1 else ''} a worker: {text}"


def _why_none(offer: Offer, found: Found, trials: dict[tuple[int, int], Trial]) -> str:
    least = offer.bounds
    if not trials:
        return (
            f"the load takes at least {least.n_prefill} prefill and {least.n_decode} decode "
            f"workers at full speed, more than {offer.max_gpus} GPUs"
        )
    if found.x_least is None:
        x, y = max(trials, key=lambda point: (sum(point), point))
        trial = trials[x, y]
        parts = ", ".join(
            f"{100 * trial.attained(metric):.1f}% within the {metric.upper()} bound"
            for metric in trial.config.goodput.model_dump(exclude_none=True)
        )
        return f"even {x}P{y}D attains only {100 * trial.attainment.mean:.1f}% ({parts})"
    return (
        f"needs {found.x_least} prefill and {found.y_least} decode workers at least, and no such "
        f"cluster of up to {offer.max_gpus} GPUs meets the objective"
    )


def _notes(
    offer: Offer, found: Found, trials: dict[tuple[int, int], Trial], best: float
) -> list[str]:
    cheaper = "" if math.isinf(best) else "would be cheaper and "
    notes = [
        _of_size(
            offer,
            f"not monotone: {p[0]}P{p[1]}D meets the objective and {q[0]}P{q[1]}D does not",
        )
        for p, q in found.contradictions()
    ]
    notes += [
        _of_size(
            offer,
            f"{x}P{y}D {cheaper}is undecided after {len(trial.summaries)} seeds: "
            f"{100 * trial.attainment.mean:.2f}% "
            f"[{100 * trial.attainment.low:.2f}, {100 * trial.attainment.high:.2f}]",
        )
        for (x, y), trial in sorted(trials.items())
        if trial.verdict is Verdict.UNDECIDED
        and offer.cost(x, y) < best
        and x + y <= offer.max_workers
    ]
    return notes


def _margin(answer: Answer, objective: Objective, rate: float, runs: Runs) -> Margin:
    """Find how much more load the answer carries, seed by seed, up to four times as much."""
    assert answer.trial is not None
    config = answer.trial.config.model_copy(update={"request_rate": rate})
    high = 4.0 * rate
    tasks = [
        carried(config, seed, objective, low=rate / 4.0, high=high, factor=1.25)
        for seed in range(min(PAIRED_SEEDS, objective.seeds))
    ]
    rates = [value or 0.0 for value in runs.together(tasks)]
    return Margin(
        t_interval(rates),
        t_interval([100.0 * (value / rate - 1.0) for value in rates]),
        max(rates) >= high,
        answer.beside(decode=-1),
        answer.beside(prefill=-1),
    )


def _larger(answer: Answer, objective: Objective) -> list[Task[Trial]]:
    """Return trials of the answer with more decode workers: faster for each user, and dearer."""
    if answer.trial is None or answer.offer is None:
        return []
    x, y = answer.trial.config.n_prefill, answer.trial.config.n_decode
    sizes = {math.ceil(factor * y) for factor in _LARGER}
    clusters = [answer.offer.at(x, n) for n in sorted(sizes) if x + n <= answer.offer.max_workers]
    return [try_cluster(cluster, objective) for cluster in clusters]


def per_user(trial: Trial) -> float:
    """Return the tokens per second that the median request sees."""
    tpot_ms = trial.mean("median_tpot_ms")
    return 1e3 / tpot_ms if tpot_ms else math.nan


def per_gpu(trial: Trial) -> float:
    """Return the output tokens per second of each GPU."""
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


def _savings(answers: Sequence[Answer], objective: Objective, runs: Runs) -> list[Saving]:
    """Find the cheapest cluster of each seed alone, and pair policies on the same GPU."""
    seeds = range(min(PAIRED_SEEDS, objective.seeds))
    by_gpu: dict[str, list[Answer]] = {}
    for answer in answers:
        by_gpu.setdefault(answer.gpu, []).append(answer)
    pairs = [
        (group[0], other)
        for group in by_gpu.values()
        for other in group[1:]
        if group[0].trial is not None and other.trial is not None
    ]
    asked = {id(answer): answer for pair in pairs for answer in pair}
    tasks = [_alone(answer, seed, objective) for answer in asked.values() for seed in seeds]
    found = iter(runs.together(tasks))
    by_seed = {key: [next(found) for _ in seeds] for key in asked}
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


def _alone(answer: Answer, seed: int, objective: Objective) -> Task[int | None]:
    """Return the GPUs of the cheapest cluster that meets the objective under one seed."""
    offer = answer.offer
    assert offer is not None

    def judge(x: int, y: int) -> Task[Verdict]:
        good = yield from passes(offer.at(x, y), seed, objective)
        return Verdict.MEETS if good else Verdict.MISSES

    found = yield from cheapest(offer.space(math.inf), judge, answer.found)
    if found.best is None:
        return None
    return offer.at(*found.best).n_gpus
