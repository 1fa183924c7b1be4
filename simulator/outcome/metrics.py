"""Statistics of a run, under the names of ``vllm bench serve``.

A request is sent at ``s``, its first token leaves at ``f``, its last at ``e``; it generates ``n``
tokens. TTFT ``f - s`` (under disaggregation the decode worker's), TPOT ``(e - f) / (n - 1)`` (none
of one token) and E2EL ``e - s`` are those of requests that arrive in the measured window and
complete. ITL is every gap between two tokens, of the window's steps, weighted by their batch;
tokens of one step come at one instant: between them the gap is 0."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eldr_sim.arrays import Array, Bools, Floats, Ints
from eldr_sim.simulator.control.record import RunRecord
from eldr_sim.simulator.outcome.bottleneck import is_overload, load_growth
from eldr_sim.simulator.outcome.sums import exact_sums, in_parts, weighted_percentile
from eldr_sim.simulator.outcome.window_steps import (
    WindowSteps,
    computes_prompts,
    share,
    window_steps,
)
from eldr_sim.simulator.outcome.worker_hours import spent_hours
from eldr_sim.simulator.plane.state import NO_KV_ROOM, OUTCOMES, OVER_BUDGET, TOO_LONG
from eldr_sim.simulator.setup.config.groups import ServiceLevel
from eldr_sim.simulator.setup.config.pools import WorkerPool, gpus_of, price_of
from eldr_sim.simulator.setup.config.requests import WorkloadConfig
from eldr_sim.traces.requests.logs.log_window import part_warnings

N_BLOCKS = 10  # of a measured log
PERCENTILES = (50, 90, 99)


def describe(
    name: str,
    values_s: Floats,
    weights: Array | None = None,
    percentiles: Sequence[int] = PERCENTILES,
) -> dict[str, float | None]:
    """Return mean, median, standard deviation and percentiles of a metric, ms, under the keys of
    ``vllm bench serve`` (``mean_{name}_ms`` ...); None without values. Sums are exact, on any
    machine."""
    keys = [f"{k}_{name}_ms" for k in ("mean", "median", "std", *(f"p{p}" for p in percentiles))]
    if weights is None:
        weights = np.ones(len(values_s), np.int8)
    total = int(weights.sum())
    if total == 0:
        return dict.fromkeys(keys)

    def summed(around: float, power: int) -> float:
        parts = zip(in_parts(values_s), in_parts(weights), strict=True)
        return exact_sums((((part - around) ** power) * of,) for part, of in parts)[0]

    mean = summed(0.0, 1) / total
    variance = summed(mean, 2) / total
    median, *quantiles = weighted_percentile(values_s, weights, (50, *percentiles))
    figures = [mean, median, math.sqrt(variance), *quantiles]
    return {key: 1e3 * figure for key, figure in zip(keys, figures, strict=True)}


def request_times(record: RunRecord) -> dict[str, Floats]:
    """Return the latencies of each request of a run.

    Args:
        record: what a run recorded.

    Returns:
        ``ttft``, ``tpot`` and ``e2el`` in seconds, ``[requests]`` each; NaN where there is none.
    """
    requests = record.requests
    sent, first, finish = (requests[f"{at}_s"] for at in ("sent", "first_token", "finish"))
    tokens, done = requests["output_len"], record.completed
    gaps = np.where(tokens > 1, tokens - 1, np.nan)
    return {
        "ttft": np.where(first >= 0.0, first - sent, np.nan),
        "tpot": np.where(done, (finish - first) / gaps, np.nan),
        "e2el": np.where(done, finish - sent, np.nan),
    }


def streamed_by_prefill(record: RunRecord) -> dict[str, float | None]:
    """Return TTFT and TPOT where the first token is the prefill's, which a proxy may write at once
    (ELDR's does): hand-over, transfer and wait then lie in TPOT."""
    requests = record.requests[record.requests["measured"] & record.completed]
    answered, tokens = requests["prefill_end_s"], requests["output_len"]
    several = tokens > 1
    tpot = (requests["finish_s"] - answered)[several] / (tokens[several] - 1)
    at = (50, 95, 99)
    return describe("ttft", answered - requests["sent_s"], percentiles=at) | describe(
        "tpot", tpot, percentiles=at
    )


def good_requests(times: dict[str, Floats], level: ServiceLevel) -> Bools:
    """Return which requests complete within a service level; a TPOT that is none counts as 0."""
    good = ~np.isnan(times["e2el"])
    for name, values in times.items():
        bound = getattr(level, name)
        if bound is not None:
            good &= np.nan_to_num(values, nan=0.0) * 1e3 <= bound
    return good


def slo_blocks(record: RunRecord, level: ServiceLevel) -> list[tuple[int, int]]:
    """Return the good and all measured requests of ten blocks, equally long, by their arrivals."""
    measured = record.requests["measured"]
    arrival = record.requests["arrival_s"][measured]
    good = good_requests(request_times(record), level)[measured]
    inner = np.linspace(arrival.min(), arrival.max(), N_BLOCKS + 1)[1:-1]
    block = np.searchsorted(inner, arrival, side="right")
    counts = [np.bincount(block[of], minlength=N_BLOCKS) for of in (good, np.full(len(good), True))]
    return list(zip(*(count.tolist() for count in counts), strict=True))


def summarise(
    record: RunRecord,
    load: WorkloadConfig,
    pools: Sequence[WorkerPool],
    level: ServiceLevel,
    n_moe_layers: int,
    *,
    conditional: str | None = None,
    prefix_caching: bool = True,
) -> dict[str, Any]:
    """Return the figures of ``summary.json`` that the run itself yields.

    ``conditional``: of `computes_prompts`; ``prefix_caching``: whether prefix caches are used."""
    requests = record.requests
    measured, done = requests["measured"], record.completed
    reasons = Counter(requests["outcome"][measured & ~done].tolist())
    done = measured & done
    times = request_times(record)
    start = record.window[0]
    end = min(record.window[1], record.end_s)
    seconds = max(end - start, 1e-9)
    steps = window_steps(record, computes_prompts(pools, conditional), start, end)
    computed = requests["prefill_end_s"]
    computed_inside = (start <= computed) & (computed <= end)
    # Where it comes with the KV cache, a request has its first token when it joins the batch.
    brought = (requests["transfer_start_s"] >= 0.0) & (requests["first_token_s"] >= 0.0)
    brought &= requests["first_token_s"] == requests["decode_start_s"]
    tokens = steps.n["outputs"] + int((brought & computed_inside).sum())
    # The last request may end the run, so its end belongs to it.
    finish = requests["finish_s"]
    finished = int((record.completed & (start <= finish) & (finish <= end)).sum())
    prefills = record.prefill_steps
    begun = (prefills["start"] >= start) & (prefills["start"] < end)
    prompt_tokens = int(prefills["chunk_tokens"][begun].sum())
    prompt_tokens += steps.n["prompt_tokens"]
    prefilled = requests["prompt_len"][computed_inside]
    good = good_requests(times, level) & measured

    hours, price = seconds / 3600.0, price_of(pools)
    gpu_hours = gpus_of(pools) * hours
    dollars = None if price is None else price * hours
    if record.states is not None:
        *_, gpu_hours, dollars = spent_hours(record, pools, start, end)
    per_million = gpu_hours / tokens * 1e6 if tokens else None
    return {
        "num_prompts": int(measured.sum()),
        "completed": int(done.sum()),
        "failed": int(sum(reasons.values())),
        "failed_reasons": dict(sorted((OUTCOMES[code], n) for code, n in reasons.items())),
        "request_rate": load.effective_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "duration": seconds,
        "total_input_tokens": int(requests["prompt_len"][done].sum()),
        "total_output_tokens": int(requests["output_len"][done].sum()),
        "request_throughput": finished / seconds,
        "request_goodput": float(good.sum()) / seconds if level.given else None,
        "slo_attainment": (
            float(good.sum()) / max(1, int(measured.sum())) if level.given else None
        ),
        "slo_attainment_by_metric": _attained(times, level, measured),
        "output_throughput": tokens / seconds,
        "total_token_throughput": (tokens + prompt_tokens) / seconds,
        "prefill_throughput": int(prefilled.sum()) / seconds,
        "computed_prompt_throughput": prompt_tokens / seconds,
        "makespan_s": float(finish[done].max() - requests["arrival_s"][0]) if done.any() else None,
        "max_concurrent_requests": peak_concurrency(record),
        "in_flight_at_window_start": _in_flight(record, start),
        "in_flight_at_window_end": _in_flight(record, end),
        "load_growth": load_growth(
            requests["arrival_s"][~_refused(record)],
            np.where(record.completed, finish, np.nan)[~_refused(record)],
            (start, end),
        ),
        **describe("ttft", times["ttft"][done]),
        **describe("tpot", times["tpot"][done & ~np.isnan(times["tpot"])]),
        **describe("itl", steps.gaps, steps.carried),
        **describe("e2el", times["e2el"][done]),
        **_per_token(times["e2el"][done], requests["output_len"][done]),
        **(
            {"streamed_by_prefill": streamed_by_prefill(record)}
            if any(pool.takes_over for pool in pools)
            else {}
        ),
        **_activated_experts(steps, n_moe_layers),
        "mean_decode_batch": share(steps.n["sequences"], steps.n["decoding"]),
        "decode_steps": steps.n["decoding"],
        **_drafts(record, steps),
        **_prefix_cache(record, "", prefix_caching),
        **_prefix_cache(record, "decode_", prefix_caching),
        "preemptions": int(requests["preemptions"].sum()),
        **_relocations(record, start, end),
        "gpus": gpus_of(pools),
        "gpu_hours_per_million_output_tokens": per_million,
        "cost_per_million_output_tokens": (
            None if dollars is None or not tokens else dollars / tokens * 1e6
        ),
    }


def _per_token(e2el_s: Floats, tokens: Ints) -> dict[str, float | None]:
    """Return mean and 90th percentile of the end-to-end latency per output token, ms."""
    found = describe("e2el_per_token", e2el_s / tokens, percentiles=(90,))
    return {
        f"{key}_e2el_per_token_ms": found[f"{key}_e2el_per_token_ms"] for key in ("mean", "p90")
    }


def _attained(times: dict[str, Floats], level: ServiceLevel, measured: Bools) -> dict[str, float]:
    """Return the share of the measured requests within each bound alone."""
    n = max(1, int(measured.sum()))
    return {
        name: float((good_requests(times, ServiceLevel(**{name: bound})) & measured).sum()) / n
        for name, bound in level.model_dump(exclude_none=True).items()
    }


def _activated_experts(steps: WindowSteps, n_moe_layers: int) -> dict[str, float | None]:
    """Return the activated experts of the steps that decode, means over MoE layers."""
    layers = n_moe_layers or 1
    n = steps.n["decoding"] * layers if n_moe_layers else 0  # a dense model's: no figure
    median = p99 = None
    if n:
        experts = np.arange(len(steps.by_active)) / layers
        median, p99 = weighted_percentile(experts, steps.by_active, (50, 99))
    return {
        "mean_active_experts_per_step": share(steps.n["active"], n),
        "mean_active_experts_per_token": share(
            steps.n["active_outputs"], steps.n["outputs"] * layers if n else 0
        ),
        "median_active_experts_per_step": median,
        "p99_active_experts_per_step": p99,
        "mean_busiest_rank_experts_per_step": share(steps.n["busiest"], n),
    }


def _drafts(record: RunRecord, steps: WindowSteps) -> dict[str, float | None]:
    """Return what steps yield, and what of it is drafts'; some of them decode."""
    counts, length = record.drafted, None
    if counts is not None and counts[:-1].any():
        length = 1.0 + float((np.arange(len(counts) - 1) * counts[:-1]).sum() / counts[:-1].sum())
    return {
        "tokens_per_step": share(steps.n["outputs"], steps.n["sequences"]),
        "acceptance_length": length,
        "verify_experts_over_plain": share(steps.n["verified"], steps.n["plain"]),
        "draft_time_share": None if counts is None else share(steps.draft_s, steps.decoding_s),
    }


def draft_counters(record: RunRecord) -> dict[str, Any]:
    """Return vLLM's ``spec_decode`` counters of a whole run; nothing where none was drafted."""
    if record.drafted is None:
        return {}
    *by_accepted, tokens = record.drafted.tolist()
    at_least = np.cumsum(by_accepted[::-1])[::-1].tolist()
    return {
        "spec_decode_num_drafts": at_least[0],
        "spec_decode_num_draft_tokens": tokens,
        "spec_decode_num_accepted_tokens": sum(at_least[1:]),
        "spec_decode_num_accepted_tokens_per_pos": at_least[1:],
    }


def _prefix_cache(record: RunRecord, pool: str, used: bool) -> dict[str, float | None]:
    """Return the prompt tokens looked up in the prefix caches of a pool, and those found."""
    queries = hits = 0
    if used:
        requests, field = record.requests, f"{pool}cached_tokens"
        looked_up = requests[requests["measured"] & (requests[field] >= 0)]
        queries, hits = int(looked_up["prompt_len"].sum()), int(looked_up[field].sum())
    return {
        f"{pool}prefix_cache_queries": queries,
        f"{pool}prefix_cache_hits": hits,
        f"{pool}prefix_cache_hit_rate": hits / queries if queries else None,
    }


def _relocations(record: RunRecord, start: float, end: float) -> dict[str, float]:
    """Return what moved of the experts in the window, s."""
    log = record.relocations
    begun = log[(log["asked_s"] >= start) & (log["asked_s"] < end)]
    moved = begun["inside_bytes"].sum() + begun["between_bytes"].sum()
    return {
        "relocations": len(begun),
        "relocated_bytes": float(moved),
        "relocation_stall_s": math.fsum(begun["stall_s"].tolist()),
    }


def table_warnings(summary: Mapping[str, Any]) -> list[str]:
    """Return where a run's step times lie beyond what was measured, a line each."""
    return [
        f"{count} of {summary['decode_steps']} decode steps lie outside the latency table "
        f"({what.replace('_', ' ')}): extrapolated"
        for what, count in summary["lookups_outside_tables"].items()
        if count
    ] + list(summary["latency_warnings"])


def warnings_of(summary: Mapping[str, Any]) -> list[str]:
    """Return what a reader of a summary's figures must know.

    Args:
        summary: content of ``summary.json``.

    Returns:
        A sentence for each warning.
    """
    warnings = table_warnings(summary)
    warnings += summary.get("trace_warnings", [])  # older results have none, nor what follows
    warnings += summary.get("without_effect", [])
    if part := summary.get("trace", {}).get("log_window"):
        warnings += part_warnings(part)
    growth = summary.get("load_growth")
    if growth is not None and is_overload(growth) and summary["max_concurrency"] is None:
        warnings.append(
            f"the load is more than the cluster serves: from {growth['from_s']:.4g} to "
            f"{growth['to_s']:.4g} s {growth['arrived']} requests came and {growth['ended']} "
            "ended, so latencies grow with the window's length"
        )
    unserved = summary["failed_reasons"].get("unserved_at_time_limit", 0)
    if unserved:
        warnings.append(
            f"the cluster cannot serve this load: {unserved} of {summary['num_prompts']} requests "
            "had not ended at the time limit"
        )
    return warnings


def _in_flight(record: RunRecord, at: float) -> int:
    """Return how many requests had arrived and not ended at a time, s."""
    requests, finish = record.requests, record.requests["finish_s"]
    ended = (finish >= 0.0) & (finish <= at)
    return int(((requests["arrival_s"] <= at) & ~ended & ~_refused(record)).sum())


def _refused(record: RunRecord) -> Bools:
    return np.isin(record.requests["outcome"], (TOO_LONG, NO_KV_ROOM, OVER_BUDGET))


def peak_concurrency(record: RunRecord) -> int:
    """Return the most requests in flight in the measured window."""
    start, end = record.window
    sent = record.requests[(record.requests["sent_s"] >= 0.0) & ~_refused(record)]
    finish = np.where(sent["finish_s"] >= 0.0, sent["finish_s"], np.inf)
    # What went before shows in the state at the start; who leaves does so before who comes.
    at = np.maximum(np.concatenate([finish, sent["sent_s"]]), start)
    change = np.repeat([-1, 1], len(sent))
    order = np.argsort(at, kind="stable")
    in_flight = np.cumsum(change[order])[at[order] < end]
    return int(in_flight.max(initial=0))
