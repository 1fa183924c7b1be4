"""Metrics that a page shows, with their headings from the catalogue."""

from eldr_sim.simulator.outcome.catalogue import HEADLINE, label

#: Headings of a run's metrics by tag, in the order of the table.
RUN_FIGURES = {
    tag: label(tag)
    for tag in (
        "num_prompts", "completed", "failed", "slo_attainment", "request_goodput",
        "request_throughput", "output_throughput", "total_token_throughput",
        "max_concurrent_requests", "mean_decode_batch", "mean_active_experts_per_step",
        "mean_active_experts_per_token", "p99_active_experts_per_step",
        "mean_busiest_rank_experts_per_step", "prefix_cache_hit_rate", "preemptions", "gpus",
        "gpu_hours_per_million_output_tokens", "cost_per_million_output_tokens",
    )
}  # fmt: skip
#: Names of the latencies; their tags are ``{statistic}_{latency}_ms``.
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
STATISTICS = ("mean", "p50", "p90", "p99")
#: Headings of comparisons and sweeps by tag.
METRICS = {tag: label(tag) for tag in HEADLINE}
#: Headings of metrics that only some results have.
MORE_METRICS = {
    tag: label(tag)
    for tag in (
        "slo_attainment", "request_goodput", "kv_blocks_per_worker",
        "cost_per_million_output_tokens", "gpu_hours_per_million_output_tokens",
    )
}  # fmt: skip
#: Headings of a plan's clusters by key, in the order of its tables.
PLAN_COLUMNS = {
    "policy": "policy",
    "gpu": "GPU",
    "name": "cluster",
    "chunks": "tokens a step",
    "gpus": label("gpus"),
    "price_per_hour": "$/hour",
    "cost_per_million_output_tokens": "$ per M tokens",
    "price_per_million_prompt_tokens": "$ per M prompt tokens",
    "kv_blocks_per_worker": label("kv_blocks_per_worker"),
    "figure": "",
    "by_seed": "seed by seed",
    "slo_attainment": "SLO attainment, %",
    "seeds": "seeds",
    **{
        tag: label(tag)
        for tag in (
            "p99_ttft_ms", "p99_tpot_ms", "tokens_per_s_per_user", "tokens_per_s_per_gpu",
            "prefill_throughput", "prefill_mfu", "mean_active_experts_per_step",
            "mean_active_experts_per_token",
        )
    },
    "weakest_provenance": "step times",
    "verdict": "verdict",
}  # fmt: skip
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
    """Return a parameter's dot path with its unit, if any."""
    name = path.rpartition(".")[2]
    in_ms = name.endswith("_ms") or path.startswith("goodput.")
    unit = "ms" if in_ms else _PARAMETER_UNITS.get(name)
    return path if unit is None else f"{path}, {unit}"


def without_unit(heading: str) -> str:
    """Return a heading without its unit, as the title of a picture."""
    return heading.removesuffix(" (ms)")


def bounds_in_words(bounds_ms: dict[str, float | None]) -> list[str]:
    """Return bounds of latencies as text, such as ``TTFT ≤ 500 ms``."""
    return [f"{LATENCIES[k]} ≤ {v:g} ms" for k, v in bounds_ms.items() if v is not None]
