"""Statistics of a run, under the names of ``vllm bench serve``.

Symbols: a request is sent at ``s``, its first token leaves at ``f``, its last at ``e``; it
generates ``n`` tokens. TTFT, TPOT and E2EL are those of requests that arrive in the measured
window and complete; ITL is that of the window's steps, whoever's tokens they are.

- TTFT = ``f - s``. Under disaggregation the first token is the decode worker's.
- TPOT = ``(e - f) / (n - 1)``; requests of one token have none.
- ITL: every gap between two tokens of a request, pooled over requests. The requests of a batch
  share a step's gap, so the pool is the steps of the window weighted by their batch.
- E2EL = ``e - s``.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.simulator.cluster import RunRecord
from eldr_sim.simulator.config import RunConfig, ServiceLevel
from eldr_sim.simulator.request import COMPLETED, NO_KV_ROOM, TOO_LONG, Request

PERCENTILES = (50, 90, 99)


def weighted_percentile(
    values: NDArray[np.float64], weights: NDArray[np.int64], q: Sequence[float]
) -> list[float]:
    """Return percentiles of ``np.repeat(values, weights)`` (NumPy's linear method).

    Parameters
    ----------
    values, weights
        Shape [n]; weights are counts.
    q
        Percentiles in [0, 100].
    """
    order = np.argsort(values, kind="stable")
    ordered, last = values[order], np.cumsum(weights[order]) - 1
    result = []
    for p in q:
        rank = p / 100.0 * float(last[-1])
        low, high = ordered[np.searchsorted(last, [math.floor(rank), math.ceil(rank)])]
        result.append(float(low + (high - low) * (rank - math.floor(rank))))
    return result


def describe(
    name: str, values_s: NDArray[np.float64], weights: NDArray[np.int64] | None = None
) -> dict[str, float | None]:
    """Return mean, median, standard deviation and percentiles of a metric, in ms.

    The keys are those of ``vllm bench serve``: ``mean_{name}_ms`` and so on; all None where there
    is no value. Sums are exact (``math.fsum``), so that they do not depend on the machine.
    """
    keys = [f"{k}_{name}_ms" for k in ("mean", "median", "std", *(f"p{p}" for p in PERCENTILES))]
    counts = np.ones(len(values_s), np.int64) if weights is None else weights
    total = int(counts.sum())
    if total == 0:
        return dict.fromkeys(keys)
    mean = math.fsum((values_s * counts).tolist()) / total
    variance = math.fsum(((values_s - mean) ** 2 * counts).tolist()) / total
    quantiles = weighted_percentile(values_s, counts, PERCENTILES)
    figures = [mean, quantiles[0], math.sqrt(variance), *quantiles]
    return {key: 1e3 * figure for key, figure in zip(keys, figures, strict=True)}


def request_times(record: RunRecord) -> dict[str, NDArray[np.float64]]:
    """Return ``ttft, tpot, e2el`` in seconds per request; NaN where a request has none."""
    requests = record.requests
    sent = np.array([r.sent_s for r in requests])
    finish = np.array([r.finish_s for r in requests])
    tokens = np.array([r.output_len for r in requests])
    done = np.array([r.outcome == COMPLETED for r in requests], bool)
    first = record.first_token_s[: len(requests)]
    gaps = np.where(tokens > 1, tokens - 1, np.nan)
    return {
        "ttft": np.where(first >= 0.0, first - sent, np.nan),
        "tpot": np.where(done, (finish - first) / gaps, np.nan),
        "e2el": np.where(done, finish - sent, np.nan),
    }


def good_requests(times: dict[str, NDArray[np.float64]], level: ServiceLevel) -> NDArray[np.bool_]:
    """Return which requests complete within a service level; a TPOT that is none counts as 0."""
    good = ~np.isnan(times["e2el"])
    for name, values in times.items():
        bound = getattr(level, name)
        if bound is not None:
            good &= np.nan_to_num(values, nan=0.0) * 1e3 <= bound
    return good


def summarise(record: RunRecord, config: RunConfig, n_moe_layers: int) -> dict[str, Any]:
    """Return the figures of ``summary.json`` that the run itself yields."""
    requests = record.requests
    measured = np.array([r.measured for r in requests], bool)
    done = measured & np.array([r.outcome == COMPLETED for r in requests], bool)
    reasons = Counter(r.outcome for r in requests if r.measured and r.outcome != COMPLETED)
    times = request_times(record)
    start = record.window[0]
    end = min(record.window[1], record.end_s)
    seconds = max(end - start, 1e-9)
    steps = record.decode_steps
    inside = (steps["start"] >= start) & (steps["start"] < end)
    batch = steps["batch"][inside].astype(np.int64)
    decoding = batch > 0
    tokens = int(batch.sum())
    # The last request may end the run, so its end belongs to it.
    finished = sum(start <= r.finish_s <= end and r.outcome == COMPLETED for r in requests)
    prompt_tokens = sum(
        n for worker in record.prefill_steps for s, _, _, n in worker if start <= s < end
    )
    if config.colocated:
        prompt_tokens = int(steps["chunked"][inside].sum())
    good = good_requests(times, config.goodput) & measured

    carried = batch - steps["joined"][inside]
    gaps = (steps["end"] - steps["start"])[inside]
    preempted = [b - a for a, b in record.preempted_gaps if start <= b <= end]
    itl = np.concatenate([gaps, np.array(preempted)])
    itl_weights = np.concatenate([carried, np.ones(len(preempted), np.int64)])
    active = steps["active"][inside][decoding] / n_moe_layers
    busiest = steps["busiest"][inside][decoding] / n_moe_layers

    gpu_hours = config.n_gpus * seconds / 3600.0
    price = config.price_per_gpu_hour
    looked_up = [r for r in requests if r.measured and r.cached_tokens >= 0]
    queries = sum(r.prompt_len for r in looked_up) if config.enable_prefix_caching else 0
    hits = sum(r.cached_tokens for r in looked_up)
    per_million = gpu_hours / tokens * 1e6 if tokens else None
    return {
        "num_prompts": int(measured.sum()),
        "completed": int(done.sum()),
        "failed": int(sum(reasons.values())),
        "failed_reasons": dict(sorted(reasons.items())),
        "request_rate": config.effective_rate,
        "burstiness": config.burstiness,
        "max_concurrency": config.max_concurrency,
        "duration": seconds,
        "total_input_tokens": sum(r.prompt_len for r in itertools.compress(requests, done)),
        "total_output_tokens": sum(r.output_len for r in itertools.compress(requests, done)),
        "request_throughput": finished / seconds,
        "request_goodput": float(good.sum()) / seconds,
        "slo_attainment": float(good.sum()) / max(1, int(measured.sum())),
        "output_throughput": tokens / seconds,
        "total_token_throughput": (tokens + prompt_tokens) / seconds,
        "max_concurrent_requests": _peak_concurrency(record),
        "in_flight_at_window_start": _in_flight(record, start),
        "in_flight_at_window_end": _in_flight(record, end),
        **describe("ttft", times["ttft"][done]),
        **describe("tpot", times["tpot"][done & ~np.isnan(times["tpot"])]),
        **describe("itl", itl, itl_weights),
        **describe("e2el", times["e2el"][done]),
        "mean_active_experts_per_step": _mean(active),
        "median_active_experts_per_step": _percentile(active, 50),
        "p99_active_experts_per_step": _percentile(active, 99),
        "mean_busiest_rank_experts_per_step": _mean(busiest),
        "mean_decode_batch": _mean(batch[decoding].astype(float)),
        "decode_steps": int(decoding.sum()),
        "prefix_cache_queries": queries,
        "prefix_cache_hits": hits,
        "prefix_cache_hit_rate": hits / queries if queries else None,
        "preemptions": sum(r.preemptions for r in requests),
        "gpus": config.n_gpus,
        "gpu_hours_per_million_output_tokens": per_million,
        "cost_per_million_output_tokens": (
            None if price is None or per_million is None else price * per_million
        ),
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
    """Return what a reader of a summary's figures must know, a line each."""
    warnings = table_warnings(summary)
    warnings += summary.get("trace_warnings", [])  # older results have none
    before, after = summary["in_flight_at_window_start"], summary["in_flight_at_window_end"]
    if after - before > 0.25 * summary["num_prompts"] and summary["max_concurrency"] is None:
        warnings.append(
            f"the load is more than the cluster serves: {before} requests were in flight when the "
            f"window began and {after} when it ended, so latencies grow with its length"
        )
    unserved = summary["failed_reasons"].get("unserved_at_time_limit", 0)
    if unserved:
        warnings.append(
            f"the cluster cannot serve this load: {unserved} of {summary['num_prompts']} requests "
            "had not ended at the time limit"
        )
    return warnings


def _mean(values: NDArray[np.float64]) -> float | None:
    return math.fsum(values.tolist()) / len(values) if len(values) else None


def _percentile(values: NDArray[np.float64], q: float) -> float | None:
    if len(values) == 0:
        return None
    return weighted_percentile(values, np.ones(len(values), np.int64), [q])[0]


def _in_flight(record: RunRecord, at: float) -> int:
    """Return how many requests had arrived and not ended at a time, s."""
    return sum(
        r.arrival_s <= at and not 0.0 <= r.finish_s <= at and not _refused(r)
        for r in record.requests
    )


def _refused(request: Request) -> bool:
    return request.outcome in (TOO_LONG, NO_KV_ROOM)


def _peak_concurrency(record: RunRecord) -> int:
    """Return the most requests that were in flight at one time of the window."""
    start, end = record.window
    changes = sorted(
        (max(at, start), change)  # what went before shows in the state at the start
        for r in record.requests
        if r.sent_s >= 0.0 and not _refused(r)
        for at, change in ((r.sent_s, 1), (r.finish_s if r.finish_s >= 0.0 else math.inf, -1))
    )
    in_flight = itertools.accumulate(change for at, change in changes if at < end)
    return max(in_flight, default=0)
