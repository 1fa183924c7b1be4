"""What every plan answers: a question, rows, the best of them, notes, and the runs behind it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.parquet import table_of
from eldr_sim.planning.runs.run_cache import RunCache
from eldr_sim.planning.search.axes import Axes
from eldr_sim.planning.search.candidates import cluster_label, cost, gpu_label
from eldr_sim.planning.search.day_workers import workers_by_period
from eldr_sim.planning.search.prefill_strategy import chunk_label
from eldr_sim.planning.search.sensitivity import Effect
from eldr_sim.planning.search.trial import Trial
from eldr_sim.planning.slo import Interval, Objective, Verdict, is_below
from eldr_sim.simulator.outcome.catalogue import Headline, label, number
from eldr_sim.simulator.outcome.error_band import one_line, relative
from eldr_sim.simulator.outcome.metrics import warnings_of
from eldr_sim.simulator.outcome.unused_options import NO_TOKEN
from eldr_sim.simulator.results import Written
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.simulator.setup.kv_tiers import total_bytes
from eldr_sim.traces.requests.session_shape import rate_unit

if TYPE_CHECKING:
    import pyarrow as pa

MARKER = "plan.json"  #: a folder with this file holds a plan, which ``force`` replaces
#: Metrics of a run in ``points.parquet`` and, as means over seeds, of a cluster in ``plan.json``.
FIGURES = (
    "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "output_throughput",
    "mean_decode_batch", "mean_active_experts_per_step", "mean_active_experts_per_token",
    "kv_blocks_per_worker", "cost_per_million_output_tokens",
)  # fmt: skip
#: More of them where prompts are all that is computed.
PROMPT_FIGURES = ("prefill_throughput", "computed_prompt_throughput", "prefill_mfu")
#: What a plan of prefill workers alone chooses beside their GPUs.
_PROMPT_FIELDS = (
    "pipeline_parallel_size", "all2all_backend", "expert_gather", "offload_window", "kv_cache_free",
)  # fmt: skip
_ASSUMED = (
    "weakest_provenance", "provenance", "lookups_outside_tables", "decode_steps",
    "latency_warnings", "latency_notes", "kv_transfer", "trace",
)  # fmt: skip

Kind = Literal["cluster", "rate", "split", "fastest", "day"]


def _kv_bytes(config: RunConfig) -> float:
    """Return the bytes of all KV stores of a cluster."""
    return total_bytes(config.kv, config.pools, config.cluster.gpus_per_node)


@dataclass(frozen=True)
class Question:
    """What a plan asks."""

    #: ``cluster``: the cheapest for a load; ``rate``: the highest of a cluster; ``split``: of any
    #: cluster of a number of GPUs; ``fastest``: the cheapest prompts at once; ``day``: rule and
    #: fleet for a load.
    kind: Kind
    config: RunConfig  #: the configuration as given
    objective: Objective | None = None  #: service level and attainment; None for ``fastest``
    max_gpus: int | None = None  #: most GPUs of a cluster; None for ``rate``
    rate: float | None = None  #: the load of ``cluster`` and ``day``, requests per second
    engines: tuple[int, ...] = (1,)  #: of a worker, of ``cluster``
    axes: Axes = dataclasses.field(default_factory=Axes)  #: what candidates differ by


@dataclass(frozen=True)
class ShapeResult:
    """What became of a shape of a candidate's clusters."""

    shape: str  #: sizes of its workers, and whether prefill is apart
    #: Price per hour, or GPUs: by arithmetic and by the estimate,
    least_cost: float
    estimated_cost: float
    #: and of its cheapest cluster that meets the objective and beats those before it, or None.
    cost: float | None
    topology: str  #: that cluster; empty where there is none
    reason: str  #: why there is none; where the shape was not simulated, why not
    is_searched: bool  #: whether it was simulated, or ruled out by arithmetic


@dataclass
class Row:
    """The best cluster of a candidate, or why it has none."""

    #: ``gpu``, ``policy``: the candidate; of prefill workers alone, how they share the model.
    gpu: str
    policy: str
    #: Its cluster with the runs that show it best; None if there is none.
    trial: Trial | None = None
    #: Requests per second (``rate``, ``split``), prompt tokens per second with cached ones
    #: (``fastest``) or GPU-hours or $ (``day``): mean over seeds with 95% interval; None unless all
    #: have one.
    figure: Interval | None = None
    by_seed: tuple[float | None, ...] = ()  #: the same under each seed; None where a seed has none
    #: ``none``, ``refused`` (memory) or ``beaten`` by clusters that carry more; empty: there is
    #: one.
    without: str = ""
    #: Why there is no cluster, or none of some size.
    reasons: list[str] = dataclasses.field(default_factory=list)
    #: The cluster, where the question names one that carries nothing.
    given: RunConfig | None = None
    #: Every cluster tried, of all sizes of workers, and what became of every shape.
    trials: list[Trial] = dataclasses.field(default_factory=list)
    shapes: list[ShapeResult] = dataclasses.field(default_factory=list)
    #: Verdicts that contradict monotonicity, and cheaper clusters that stayed undecided.
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def config(self) -> RunConfig | None:
        """The cluster; None if there is none."""
        return self.given if self.trial is None else self.trial.config

    @property
    def cost(self) -> float:
        """Price per hour, or GPUs; infinite if there is no cluster."""
        return math.inf if self.trial is None else cost(self.trial.config)

    def record(self, axes: Axes) -> dict[str, Any]:
        """Return the row as plain values, ready for JSON; ``axes``: of the question."""
        known = None if self.given is None else _cluster_of(self.given, axes)
        return {
            "gpu": self.gpu,
            "policy": self.policy,
            "cluster": known if self.trial is None else cluster(self.trial, axes),
            "figure": interval(self.figure),
            "by_seed": list(self.by_seed),
            "without": self.without,
            "reasons": list(self.reasons),
            "notes": list(self.notes),
            "shapes": [dataclasses.asdict(shape) for shape in self.shapes],
        }


@dataclass(frozen=True)
class Gain:
    """What a policy gains on the first one on the same GPU, paired over seeds.

    By seed: GPUs of the cheapest cluster (``cluster``), the highest rate (requests per second), or
    what a fleet of ``day`` takes. ``gain``: GPUs saved, or percent of the reference's, less 100."""

    gpu: str
    policy: str
    reference: str
    by_seed: tuple[float | None, ...]
    reference_by_seed: tuple[float | None, ...]
    gain: Interval


@dataclass(frozen=True)
class Margin:
    """Extra load and lost workers that the best cluster tolerates."""

    #: Highest rate within the objective, requests per second, mean over seeds with 95% interval.
    rate: Interval
    percent: Interval  #: the same rate relative to the planned load, less 1, in percent
    #: Whether a seed met the objective at the highest rate tried: the true rate is then higher.
    is_bounded: bool
    #: The cluster with one worker less; None if the pool has a single worker.
    lost_decode: Trial | None
    lost_prefill: Trial | None


@dataclass(frozen=True, repr=False)
class Answer(Written):
    """What a plan found."""

    marker: ClassVar[str] = MARKER
    question: Question  #: what was asked
    #: The best cluster of each candidate, the best first; of ``split``, every split simulated.
    rows: tuple[Row, ...]
    runs: RunCache  #: all simulated runs
    #: Margin of the cheapest cluster; None without one, and of other questions.
    margin: Margin | None = None
    gains: tuple[Gain, ...] = ()  #: what policies gain on the first one
    #: Pareto front over tokens/s per user and per GPU of clusters that meet it, fastest first.
    front: tuple[Trial, ...] = ()
    #: Clusters that were asked for, and why they are not the answer.
    why_not: tuple[tuple[str, str], ...] = ()
    #: What other inputs, 10% off, would have answered; empty unless asked for.
    sensitivity: tuple[Effect, ...] = ()

    @property
    def best(self) -> Row | None:
        """The row that answers the question; None if no cluster does."""
        return self.rows[0] if self.rows and self.rows[0].trial is not None else None

    @property
    def runner_up(self) -> Trial | None:
        """The best cluster of another candidate, or else the next cheapest of the same."""
        if self.best is None:
            return None
        others = [row.trial for row in self.rows[1:] if row.trial is not None]
        if others:
            return others[0]
        most = self.question.max_gpus or math.inf
        tried = [t for t in self.best.trials if t.verdict is Verdict.MEETS]
        tried = [t for t in tried if t.config.n_gpus <= most]
        return min((t for t in tried if t is not self.best.trial), key=rank, default=None)

    @property
    def ties(self) -> tuple[Trial, ...]:
        """Clusters that the seeds do not show to carry less than the best, of ``split``; of
        ``cluster``, those of other candidates that cost more by less than predictions may err."""
        if self.best is None:
            return ()
        if self.question.kind == "cluster":
            return tuple(
                row.trial
                for row in self.rows[1:]
                if row.trial is not None and row.cost < self.best.cost * _doubt(self.best, row)
            )
        if self.question.kind != "split":
            return ()
        return tuple(
            row.trial
            for row in self.rows[1:]
            if row.trial is not None
            and len(row.by_seed) > 1
            and not is_below(row.by_seed, self.best.by_seed)
        )

    @property
    def has_prices(self) -> bool:
        """Whether clusters are ranked by price; if not, by GPUs."""
        configs = [trial.config for row in self.rows for trial in row.trials]
        configs += [row.config for row in self.rows if row.config is not None]
        return bool(configs) and configs[0].price_per_hour is not None

    @property
    def notes(self) -> tuple[str, ...]:
        """What was not searched or found, and why, a line each."""
        said = [*_of_shapes(self)] if self.question.kind == "cluster" else []
        for row in self.rows:
            known = self.question.kind in ("rate", "split")  # they stand in the rows
            if not known and (row.trial is None or self.question.kind == "fastest"):
                said += [f"{row.policy} on {row.gpu}: {reason}" for reason in row.reasons]
            said += [f"{row.policy} on {row.gpu}: {note}" for note in row.notes]
        if self.best is not None and self.best.trial is not None:
            band = self.best.trial.summaries[0].get("error_band")  # a journal may be older
            said += [] if band is None else [f"Answer: {one_line(band)}"]
            if (bounds := self.best.trial.summaries[0].get("judged_by_ms")) is not None:
                kept = ", ".join(f"{name.upper()} {ms:.4g} ms" for name, ms in bounds.items())
                said.append(f"Judged at the bad end of the band: predictions keep {kept}")
        return tuple(said)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of the figures must know, a line each."""
        if self.best is None or self.best.trial is None:
            return ()
        labels = {row.trial.summaries[0]["weakest_provenance"] for row in self.rows if row.trial}
        mixed = f"the candidates' step times are {' and '.join(sorted(labels))}: differences "
        mixed += "between them are also differences between sources"
        # What one cluster has no use for may have decided between others.
        summary = self.best.trial.summaries[0]
        everywhere = [set(made.get("without_effect", ())) for _, made in self.runs.made()]
        idle = [
            line
            for line in summary.get("without_effect", ())
            if all(line in each for each in everywhere) and not line.endswith(NO_TOKEN)
        ]
        warnings = warnings_of({**summary, "without_effect": idle})
        return (*([mixed] if len(labels) > 1 else []), *_of_blocks(self), *warnings)

    def headline(self) -> Headline:
        """Return the best cluster of each candidate."""
        question, rows = self.question, []
        tags = ["slo_attainment", "p99_ttft_ms", "p99_tpot_ms"]
        if not question.config.cluster.generates or question.kind == "fastest":
            tags = [*tags[:2], "prefill_mfu"]
        asked = [FIGURE_NAMES[question.kind]] if question.kind in FIGURE_NAMES else []
        for row in self.rows:
            cells = [(row.reasons or ["none"])[0], *[""] * (1 + len(asked) + len(tags))]
            if row.trial is not None:
                cells = [str(row.trial.config.cluster.topology), number(row.trial.config.n_gpus)]
                cells += [number(row.figure.mean)] if row.figure is not None else []
                cells += [number(row.trial.mean(tag)) for tag in tags]
            rows.append((row.policy, row.gpu, *cells))
        unit = rate_unit(question.config.requests.workload)
        title = f"{question.rate:g} {unit}, " if question.rate is not None else ""
        title += "cheapest first" if question.kind == "cluster" else "best first"
        title += "" if question.max_gpus is None else f", up to {question.max_gpus} GPUs"
        heads = (label("gpus"), *asked, *map(label, tags))
        return Headline(title, ("policy", "GPU", "cluster", *heads), rows)

    def record(self) -> dict[str, Any]:
        """Return the answer without its runs, ready for JSON."""
        question, margin, best = self.question, self.margin, self.best
        axes = question.axes

        def maybe(trial: Trial | None) -> dict[str, Any] | None:
            return None if trial is None else cluster(trial, axes)

        known = best.trial.summaries[0] if best is not None and best.trial is not None else None
        known = known or next((summary for _, summary in self.runs.made()), None)
        return {
            "kind": question.kind,
            **_asked(question.objective),
            "config": question.config.model_dump(mode="json"),
            "request_rate": question.rate,
            "max_gpus": question.max_gpus,
            "cheapest_by": "price_per_hour" if self.has_prices else "gpus",
            "answer": None if best is None else maybe(best.trial),
            "runner_up": maybe(self.runner_up),
            "ties": [cluster(trial, axes) for trial in self.ties],
            "margin": None
            if margin is None
            else {
                "highest_rate": interval(margin.rate),
                "percent_above_load": interval(margin.percent),
                "highest_rate_is_a_lower_bound": margin.is_bounded,
                "one_decode_worker_lost": maybe(margin.lost_decode),
                "one_prefill_worker_lost": maybe(margin.lost_prefill),
            },
            "rows": [row.record(axes) for row in self.rows],
            "gains": [
                dataclasses.asdict(gain) | {"gain": interval(gain.gain)} for gain in self.gains
            ],
            "pareto_front": [cluster(trial, axes) for trial in self.front],
            "why_not": dict(self.why_not),
            "sensitivity": [
                {
                    "input": each.name,
                    "percent": round(100 * each.change),
                    "another_answer": each.changes,
                    "answer": maybe(each.trial),
                }
                for each in self.sensitivity
            ],
            "clusters": [cluster(trial, axes) for row in self.rows for trial in row.trials],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "day": [_over_day(row, axes) for row in _of_the_day(self)],
            "assumptions": None if known is None else {key: known[key] for key in _ASSUMED},
            "simulated_runs": len(self.runs),
            "versions": {name: version(name) for name in ("eldr-sim", "numpy", "scipy", "pyarrow")},
        }

    def tables(self) -> dict[str, pa.Table]:
        """Return every run of the plan."""
        return {"points": points_table(self.runs, self.question.axes)}


#: What `Row.figure` is, by the kind of question.
FIGURE_NAMES: dict[Kind, str] = {
    "rate": "requests/s", "split": "requests/s", "fastest": "prompt tokens/s", "day": "GPU-hours",
}  # fmt: skip

R = TypeVar("R", bound=Row)


def _doubt(best: Row, other: Row) -> float:
    """Return the factor by which the prices of two clusters may differ where neither is shown to be
    cheaper: how far the ratio of their TPOT may be off. Clusters that differ in policy alone share
    their errors: seeds decide. Others on the same GPUs err as pairs of published runs did, on other
    GPUs by half the widths of both bands together."""
    if other.gpu == best.gpu:
        policies = {
            None if row.trial is None else row.trial.config.policies.policy for row in (best, other)
        }
        return 1.0 if len(policies) > 1 else float(relative()["tpot"]["factor"])
    widths = []
    for row in (best, other):
        band = None if row.trial is None else row.trial.summaries[0].get("error_band")
        widths.append(0.0 if band is None else math.log(band["tpot"]["high"] / band["tpot"]["low"]))
    return math.exp(0.5 * math.hypot(*widths))


def rank(trial: Trial | None) -> tuple[float, float, float, float]:
    """Return a sort key: cheapest, then fewest GPUs, smallest KV tiers, highest attainment."""
    if trial is None:
        return (math.inf, math.inf, math.inf, 0.0)
    config = trial.config
    return cost(config), config.n_gpus, _kv_bytes(config), -trial.attainment.mean


def policy_pairs(rows: Sequence[R]) -> Iterator[tuple[R, R]]:
    """Yield the row of the first policy on a GPU and of every other one, if both have a cluster."""
    first: dict[str, R] = {}
    for row in rows:
        reference = first.setdefault(row.gpu, row)
        if reference is not row and reference.trial is not None and row.trial is not None:
            yield reference, row


def points_table(runs: RunCache, axes: Axes) -> pa.Table:
    """Return every run of a plan, a row each, in an order independent of the processes: its
    cluster's fields as in ``plan.json``, its window and seed, attainment, and the metrics."""
    rows = [
        {
            **_cluster_of(config, axes),
            "duration": config.requests.duration_s,
            "num_requests": config.requests.num_requests,
            "seed": config.requests.seed,
            "num_prompts": summary["num_prompts"],
            "slo_attainment": summary["slo_attainment"],
            **{
                f"slo_attainment_{metric}": share
                for metric, share in (summary["slo_attainment_by_metric"] or {}).items()
            },
            **_figures(config, summary.__getitem__),
            "weakest_provenance": summary["weakest_provenance"],
        }
        for config, summary in runs.made()
    ]
    rows.sort(key=lambda row: json.dumps(list(row.values())))
    return table_of(rows)


def _of_the_day(answer: Answer) -> list[Row]:
    """Return the rows that show workers over the day: the answer's, and a timetable's."""
    if answer.question.kind != "day" or answer.best is None:
        return []
    able = [row for row in answer.rows[1:] if row.trial is not None]
    return [answer.best, *[row for row in able if row.policy.startswith("timetable")][:1]]


def _over_day(row: Row, axes: Axes) -> dict[str, Any]:
    trial = row.trial
    assert trial is not None
    periods = workers_by_period(trial.summaries[0]["scaling"])
    return {"policy": axes.label(trial.config), "periods": periods}


def cluster(trial: Trial, axes: Axes) -> dict[str, Any]:
    """Return a cluster, its verdict and its metrics (means over its seeds)."""
    bounds = trial.config.output.goodput.model_dump(exclude_none=True)
    return {
        **_cluster_of(trial.config, axes),
        **({"kv_tiers_gb": gb} if (gb := _kv_bytes(trial.config) / 1e9) else {}),
        "verdict": trial.verdict.value,
        "weakest_provenance": trial.summaries[0]["weakest_provenance"],
        "hopeless": trial.hopeless,
        "seeds": len(trial.summaries),
        "slo_attainment": interval(trial.attainment),
        **({} if (blocks := trial.by_blocks) is None else {"slo_by_blocks": interval(blocks)}),
        "slo_attainment_by_metric": {metric: trial.attained(metric) for metric in bounds},
        **_figures(trial.config, trial.mean),
    }


def interval(value: Interval | None) -> dict[str, float | None] | None:
    """Return a mean and the ends of its interval; None for what does not exist."""
    if value is None or math.isnan(value.mean):
        return None
    return {name: end if math.isfinite(end) else None for name, end in value._asdict().items()}


def _asked(objective: Objective | None) -> dict[str, Any]:
    if objective is None:
        return dict.fromkeys(("slo_ms", "attainment", "confidence", "looks"))
    return {
        "slo_ms": objective.level.model_dump(exclude_none=True),
        "attainment": objective.attainment,
        "confidence": objective.confidence,
        "looks": list(objective.looks),
    }


def _cluster_of(config: RunConfig, axes: Axes) -> dict[str, Any]:
    prompts = not config.cluster.generates
    return {
        "name": cluster_label(config),
        "policy": axes.label(config),
        "gpu": gpu_label(config),
        "topology": str(config.cluster.topology),
        "tensor_parallel_size": config.cluster.tensor_parallel_size,
        "prefill_tensor_parallel_size": config.pool("prefill").tensor_parallel_size,
        "enable_expert_parallel": config.cluster.enable_expert_parallel,
        "data_parallel_size": config.cluster.data_parallel_size,
        "prefill_data_parallel_size": config.pool("prefill").data_parallel_size,
        "max_num_batched_tokens": config.engine.max_num_batched_tokens,
        "num_redundant_experts": config.cluster.num_redundant_experts,
        "gpus": config.n_gpus,
        **({"autoscale": config.scaling.autoscale} if config.scaling.scales else {}),
        "price_per_hour": None if config.scaling.scales else config.price_per_hour,
        "request_rate": config.requests.request_rate,
        **({name: config.value(name) for name in _PROMPT_FIELDS} if prompts else {}),
        **({"chunks": chunk_label(config)} if prompts else {}),
    }


def _figures(config: RunConfig, of: Callable[[str], float | None]) -> dict[str, float | None]:
    """Return the metrics of a cluster, and the axes of the Pareto front."""
    prompts, tpot_ms, price = (
        not config.cluster.generates,
        of("median_tpot_ms"),
        config.price_per_hour,
    )
    watts = [(p.workers * p.parallelism.n_gpus, p.gpu or "") for p in config.pools]
    power = [n * load_gpu(gpu).power_w for n, gpu in watts]
    figures = {name: of(name) for name in FIGURES + (PROMPT_FIGURES if prompts else ())}
    tokens = None if prompts else of("output_throughput")
    tokens = None if config.scaling.scales else tokens  # of a fleet that changes GPUs come and go
    figures["tokens_per_s_per_gpu"] = None if tokens is None else tokens / config.n_gpus
    figures["tokens_per_s_per_user"] = 1e3 / tpot_ms if tpot_ms else None
    speed = of("prefill_throughput")
    figures["price_per_million_prompt_tokens"] = None
    if price is not None and speed and not config.scaling.scales:
        figures["price_per_million_prompt_tokens"] = 1e6 * price / 3600 / speed
    figures["most_kwh_per_million_output_tokens"] = None  # all GPUs at their limit of power
    if tokens and all(power):
        figures["most_kwh_per_million_output_tokens"] = math.fsum(power) / tokens / 3.6
    return figures


def _of_blocks(answer: Answer) -> Iterator[str]:
    """Warn where the log's own blocks differ enough that a similar log may miss the target."""
    objective, best = answer.question.objective, answer.best
    blocks = best.trial.by_blocks if best is not None and best.trial is not None else None
    if objective is None or blocks is None or not blocks.low < objective.attainment:
        return
    yield (
        f"the answer attains {100 * blocks.mean:.2f}% on this log; over its blocks the interval is "
        f"{100 * blocks.low:.1f} to {100 * blocks.high:.1f}%, so a similar log may miss "
        f"{100 * objective.attainment:g}%"
    )


def _of_shapes(answer: Answer) -> Iterator[str]:
    """Say what became of the shapes of the clusters, and what was left out."""
    shapes = [shape for row in answer.rows for shape in row.shapes]
    cheaper = sum(bool(shape.topology) for shape in shapes)
    dear = sum(not shape.is_searched for shape in shapes)
    yield (
        f"cluster shapes: {len(shapes)} considered, {cheaper} improved on the best cost so far, "
        f"{len(shapes) - cheaper - dear} did not, {dear} estimated as too expensive to simulate "
        "(--verbose lists them)"
    )
    config, left = answer.question.config, []
    if not config.cluster.generates:
        left.append("other token budgets (--max-num-batched-tokens)")
    else:
        if max(answer.question.engines) == 1:
            left.append("engines that share experts (--data-parallel-size)")
        varied = [name.split(".")[-1] for name in answer.question.axes.values]
        if "enable_expert_parallel" not in varied:
            pool = "--vary decode.enable_expert_parallel=false,true"
            left.append(f"expert parallelism in one pool alone ({pool})")
        if config.engine.max_num_batched_tokens is None and "max_num_batched_tokens" not in varied:
            budgets = "--vary prefill.max_num_batched_tokens=4096,16384"
            left.append(f"token budgets of prefill workers ({budgets})")
    if dear:
        left.append("the shapes estimated too dear")
    yield f"Not searched: {', '.join(left)}"
