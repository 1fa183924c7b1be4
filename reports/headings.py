"""Headings of the figures on a page, with their units: the one place for them."""

from __future__ import annotations

#: Headings of a run's figures by tag of the summary, in the order of the table.
RUN_FIGURES = {
    "num_prompts": "Requests in the window",
    "completed": "Completed",
    "failed": "Failed",
    "slo_attainment": "SLO attainment, share of requests",
    "request_goodput": "Goodput, requests/s",
    "request_throughput": "Request throughput, requests/s",
    "output_throughput": "Output throughput, tokens/s",
    "total_token_throughput": "Total throughput, tokens/s",
    "max_concurrent_requests": "Peak requests in flight",
    "mean_decode_batch": "Mean decode batch, requests",
    "mean_active_experts_per_step": "Activated experts of a step, mean",
    "p99_active_experts_per_step": "Activated experts of a step, p99",
    "mean_busiest_rank_experts_per_step": "Activated experts, busiest GPU, mean",
    "prefix_cache_hit_rate": "Prefix cache hit rate",
    "preemptions": "Preemptions",
    "gpus": "GPUs",
    "gpu_hours_per_million_output_tokens": "GPU-hours per million output tokens",
    "cost_per_million_output_tokens": "Cost per million output tokens",
}
#: Names of the latencies; their tags are ``{statistic}_{latency}_ms``.
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
STATISTICS = ("mean", "p50", "p90", "p99")
#: Headings of comparisons and sweeps by tag.
METRICS = {
    "median_tpot_ms": "TPOT p50, ms",
    "p99_tpot_ms": "TPOT p99, ms",
    "median_ttft_ms": "TTFT p50, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "mean_active_experts_per_step": "activated experts a layer",
    "output_throughput": "output tokens/s",
}
#: Headings of those that only some results have.
MORE_METRICS = {
    "slo_attainment": "SLO attainment, share",
    "cost_per_million_output_tokens": "cost per million output tokens",
    "gpu_hours_per_million_output_tokens": "GPU-hours per million output tokens",
}
#: Headings of a plan's clusters by key, in the order of the table; prices only where one is known.
CLUSTER_PRICES = {
    "price_per_hour": "price/hour",
    "cost_per_million_output_tokens": "cost per million tokens",
}
CLUSTER_FIGURES = {
    "gpus": "GPUs",
    **CLUSTER_PRICES,
    "slo_attainment": "SLO attainment, %",
    "p99_ttft_ms": METRICS["p99_ttft_ms"],
    "p99_tpot_ms": METRICS["p99_tpot_ms"],
    "tokens_per_s_per_user": "tokens/s for a user",
    "tokens_per_s_per_gpu": "tokens/s of a GPU",
    "mean_active_experts_per_step": METRICS["mean_active_experts_per_step"],
    "weakest_provenance": "step times",
    "seeds": "seeds",
}
_PARAMETER_UNITS = {
    "request_rate": "requests/s",
    "output_len": "tokens",
    "max_num_batched_tokens": "tokens",
    "max_num_seqs": "requests",
    "max_concurrency": "requests",
    "num_requests": "requests",
    "duration": "s",
    "warmup": "s",
}


def parameter_label(path: str) -> str:
    """Return a parameter's dot path with its unit, where it has one."""
    name = path.rpartition(".")[2]
    in_ms = name.endswith("_ms") or path.startswith("goodput.")
    unit = "ms" if in_ms else _PARAMETER_UNITS.get(name)
    return path if unit is None else f"{path}, {unit}"


def without_unit(heading: str) -> str:
    """Return a heading as the title of a picture, whose axis has the unit."""
    name = heading.removesuffix(", ms").removesuffix(", share")
    return name[:1].upper() + name[1:]


def bounds_in_words(bounds_ms: dict[str, float | None]) -> list[str]:
    """Return bounds of latencies, such as ``TTFT ≤ 500 ms``."""
    return [f"{LATENCIES[k]} ≤ {v:g} ms" for k, v in bounds_ms.items() if v is not None]
