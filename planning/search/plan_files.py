"""A plan as plain values: for JSON, for Parquet and for printing."""

from __future__ import annotations

import dataclasses
import json
import math
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from eldr_sim.planning.intervals import Interval
from eldr_sim.planning.runs.shared_runs import Runs, Summary
from eldr_sim.planning.search.candidates import gpu_label, policy_label
from eldr_sim.planning.search.plan import CandidateResult, Plan, per_gpu, per_user
from eldr_sim.planning.search.rates import CarriedRate, RatePlan
from eldr_sim.planning.search.savings import Saving
from eldr_sim.planning.search.trial import Trial
from eldr_sim.planning.slo import Objective
from eldr_sim.simulator.results import result_folder, write_json, write_table
from eldr_sim.simulator.setup.config import RunConfig
from eldr_sim.simulator.setup.paths import portable

if TYPE_CHECKING:
    from eldr_sim.planning.search.prefill import FastestCluster, FastestPlan

#: A folder with this file holds a plan, which ``force`` replaces.
MARKER = "plan.json"
#: Metrics of a run in ``points.parquet`` and, as means over seeds, of a cluster in ``plan.json``.
FIGURES = (
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
    "output_throughput",
    "mean_decode_batch",
    "mean_active_experts_per_step",
    "mean_active_experts_per_token",
    "cost_per_million_output_tokens",
)
#: More of them where prompts are all that is computed.
PROMPT_FIGURES = ("prefill_throughput", "computed_prompt_throughput", "prefill_mfu")


def figures_of(config: RunConfig) -> tuple[str, ...]:
    """Return the metrics of a cluster."""
    return FIGURES + (PROMPT_FIGURES if config.prefill_only else ())


def write_plan(out: Path, record: dict[str, Any], runs: Runs, force: bool) -> None:
    """Write ``plan.json`` and ``points.parquet`` into a folder, whole or not at all."""
    with result_folder(out, force, MARKER) as folder:
        write_json(folder / MARKER, portable(record, out))
        write_table(folder / "points.parquet", points_table(runs))


def plan_record(plan: Plan) -> dict[str, Any]:
    """Return a plan without its runs, ready for JSON."""
    best, margin = plan.best, plan.margin
    return {
        "kind": "cluster",
        **_asked(plan.objective, plan.config),
        "request_rate": plan.rate,
        "max_gpus": plan.max_gpus,
        "cheapest_by": "price_per_hour" if plan.has_prices else "gpus",
        "answer": None if best is None or best.trial is None else cluster(best.trial),
        "runner_up": None if plan.runner_up is None else cluster(plan.runner_up),
        "margin": None
        if margin is None
        else {
            "highest_rate": interval(margin.rate),
            "percent_above_load": interval(margin.percent),
            "highest_rate_is_a_lower_bound": margin.is_bounded,
            "one_decode_worker_lost": _maybe(margin.lost_decode),
            "one_prefill_worker_lost": _maybe(margin.lost_prefill),
        },
        "candidates": [_candidate(each) for each in plan.candidates],
        "savings": [saving(each) for each in plan.savings],
        "pareto_front": [cluster(trial) for trial in plan.front],
        "clusters": [cluster(trial) for result in plan.candidates for trial in result.trials],
        "assumptions": None
        if best is None or best.trial is None
        else assumptions(best.trial.summaries[0]),
        **_made(plan.runs),
    }


def rate_record(plan: RatePlan) -> dict[str, Any]:
    """Return a rate plan without its runs, ready for JSON."""
    summaries = [each.summary for each in plan.rates if each.summary is not None]
    return {
        "kind": "rate",
        **_asked(plan.objective, plan.config),
        "rates": [carried_rate(each) for each in plan.rates],
        "gains": [
            {
                "gpu": gain.gpu,
                "policy": gain.policy,
                "reference": gain.reference,
                "percent": interval(gain.percent),
            }
            for gain in plan.gains
        ],
        "assumptions": assumptions(summaries[0]) if summaries else None,
        **_made(plan.runs),
    }


def fastest_record(plan: FastestPlan) -> dict[str, Any]:
    """Return how fast strategies compute prompts that come at once, ready for JSON."""
    best = plan.best
    return {
        "kind": "fastest",
        "config": plan.config.model_dump(mode="json"),
        "max_gpus": plan.max_gpus,
        "cheapest_by": "gpus" if best is None or best.price_of_tokens is None else "price_per_hour",
        "clusters": [_fastest(each) for each in plan.clusters],
        "assumptions": None if best is None or not best.summary else assumptions(best.summary),
        **_made(plan.runs),
    }


def _fastest(each: FastestCluster) -> dict[str, Any]:
    known = None if each.config is None else _cluster_of(each.config)
    return {
        "strategy": each.strategy,
        "gpu": each.gpu,
        "cluster": known,
        "prefill_throughput": None if each.rate is None else interval(each.rate),
        "prefill_mfu": each.mfu,
        "price_per_million_tokens": each.price_of_tokens,
        "weakest_provenance": each.summary and each.summary["weakest_provenance"],
        "reasons": list(each.reasons),
    }


def points_table(runs: Runs) -> pa.Table:
    """Return every run of a plan, a row each, in an order independent of the processes.

    Columns: policy, gpu, topology, tensor_parallel_size, prefill_tensor_parallel_size,
    enable_expert_parallel, data_parallel_size, max_num_batched_tokens, num_redundant_experts, gpus,
    price_per_hour, request_rate, duration, num_requests, seed,
    num_prompts, slo_attainment, attainment of each bound, the metrics, and the axes of the Pareto
    front: output tokens per second per GPU and of the median user.
    """
    rows = [_row(config, summary) for config, summary in runs.made()]
    rows.sort(key=lambda row: json.dumps(list(row.values())))
    return pa.Table.from_pylist(rows)


def cluster(trial: Trial) -> dict[str, Any]:
    """Return a cluster, its verdict and its metrics (means over its seeds)."""
    return {
        **_cluster_of(trial.config),
        "verdict": trial.verdict.value,
        "weakest_provenance": trial.summaries[0]["weakest_provenance"],
        "hopeless": trial.hopeless,
        "seeds": len(trial.summaries),
        "slo_attainment": interval(trial.attainment),
        "slo_attainment_by_metric": {
            metric: trial.attained(metric)
            for metric in trial.config.goodput.model_dump(exclude_none=True)
        },
        **{figure: trial.mean(figure) for figure in figures_of(trial.config)},
        "tokens_per_s_per_gpu": per_gpu(trial),
        "tokens_per_s_per_user": _finite(per_user(trial)),
    }


def carried_rate(each: CarriedRate) -> dict[str, Any]:
    """Return a cluster and its highest rate."""
    return {
        **_cluster_of(each.config),
        "highest_rate": None if each.rate is None else interval(each.rate),
        "by_seed": list(each.by_seed),
        "reason": each.reason,
    }


def saving(each: Saving) -> dict[str, Any]:
    """Return the GPUs that a policy saves."""
    return {
        "gpu": each.gpu,
        "policy": each.policy,
        "reference": each.reference,
        "gpus_saved": interval(each.gpus),
        "gpus_by_seed": list(each.by_seed),
        "reference_gpus_by_seed": list(each.reference_by_seed),
    }


def interval(value: Interval) -> dict[str, float | None]:
    """Return a mean and the ends of its interval; None for what does not exist."""
    return {
        "mean": _finite(value.mean),
        "low": _finite(value.low),
        "high": _finite(value.high),
    }


def assumptions(summary: Summary) -> dict[str, Any]:
    """Return the provenance of a run: step times, KV transfer, routing trace."""
    keys = (
        "weakest_provenance",
        "provenance",
        "lookups_outside_tables",
        "decode_steps",
        "latency_warnings",
        "latency_notes",
        "kv_transfer",
        "trace",
    )
    return {key: summary[key] for key in keys}


def _asked(objective: Objective, config: RunConfig) -> dict[str, Any]:
    return {
        "slo_ms": objective.level.model_dump(exclude_none=True),
        "attainment": objective.attainment,
        "confidence": objective.confidence,
        "looks": list(objective.looks),
        "config": config.model_dump(mode="json"),
    }


def _made(runs: Runs) -> dict[str, Any]:
    return {
        "simulated_runs": len(runs),
        "versions": {name: version(name) for name in ("eldr-sim", "numpy", "scipy", "pyarrow")},
    }


def _candidate(result: CandidateResult) -> dict[str, Any]:
    return {
        "gpu": result.gpu,
        "policy": result.policy,
        "cluster": _maybe(result.trial),
        "shapes": [dataclasses.asdict(shape) for shape in result.shapes],
        "reasons": result.reasons,
        "notes": result.notes,
    }


def _maybe(trial: Trial | None) -> dict[str, Any] | None:
    return None if trial is None else cluster(trial)


def _cluster_of(config: RunConfig) -> dict[str, Any]:
    return {
        "policy": policy_label(config) if config.prefill_only else config.policy,
        "gpu": gpu_label(config),
        "topology": config.topology,
        "tensor_parallel_size": config.tensor_parallel_size,
        "prefill_tensor_parallel_size": config.pool("prefill").tensor_parallel_size,
        "enable_expert_parallel": config.enable_expert_parallel,
        "data_parallel_size": config.data_parallel_size,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "num_redundant_experts": config.num_redundant_experts,
        "gpus": config.n_gpus,
        "price_per_hour": config.price_per_hour,
        "request_rate": config.request_rate,
        **(_prompts_of(config) if config.prefill_only else {}),
    }


def _prompts_of(config: RunConfig) -> dict[str, Any]:
    """Return what a plan of prefill workers alone chooses beside their GPUs."""
    return {
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "all2all_backend": config.all2all_backend,
        "expert_gather": config.expert_gather,
        "offload_window": config.offload_window,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "kv_cache_free": config.kv_cache_free,
    }


def _row(config: RunConfig, summary: Summary) -> dict[str, Any]:
    tpot_ms = summary["median_tpot_ms"]
    return {
        **_cluster_of(config),
        "duration": config.duration_s,
        "num_requests": config.num_requests,
        "seed": config.seed,
        "num_prompts": summary["num_prompts"],
        "slo_attainment": summary["slo_attainment"],
        **{
            f"slo_attainment_{metric}": share
            for metric, share in (summary["slo_attainment_by_metric"] or {}).items()
        },
        **{figure: summary[figure] for figure in figures_of(config)},
        "tokens_per_s_per_gpu": summary["output_throughput"] / config.n_gpus,
        "tokens_per_s_per_user": 1e3 / tpot_ms if tpot_ms else None,
        "weakest_provenance": summary["weakest_provenance"],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
