"""What MoE-Prefill's evaluation leaves open: thresholds, gathers, the map of strategies, pools."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from eldr_sim.charts import bars, field, lines
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.planning.runs.run_cache import Summary
from eldr_sim.planning.studies.figures import Reproduction, Runner, mean, percent
from eldr_sim.traces.routing.bitsets import count_rows
from eldr_sim.traces.routing.coactivation import ranges
from eldr_sim.traces.routing.format import open_trace
from studies.moe_prefill.results import Sizes, mean_and_interval
from studies.moe_prefill.settings import COMMON, H100_FP8, MFU, THROUGHPUT, Workloads
from studies.moe_prefill.steps import Strategy, each_rate

_ASYNC = Strategy("async_ep").fields(8)


def thresholds(runner: Runner, logs: Workloads, sizes: Sizes) -> Reproduction:
    """Eq. 1 and Eq. 3, their margins, and load in FLOPs or tokens, on 8 H100 in FP8."""
    budgets = (8192, 65_536)
    names = [
        f"saturation:threshold={equation},margin={margin:g},unit={unit}"
        for equation, margin, unit in product(("eq1", "eq3"), (0.1, 1.0, 3.0), ("flops", "tokens"))
    ]
    every = [*product(budgets, names), *product(budgets, ("prefix_hash", "least_loaded"))]
    runs = runner.groups({
        (budget, name): [
            COMMON | H100_FP8.fields | _ASYNC | logs.real(sizes.tuning_scale, 1.0, seed)
            | {"max_num_batched_tokens": budget, "prefill_policy": name}
            for seed in sizes.seeds
        ]
        for budget, name in every
    })  # fmt: skip
    rows = [
        {"budget": budget, "router": name.replace("saturation:threshold=", "")}
        | _rate(own)
        | {"mfu_%": 100 * mean(own, MFU)}
        | _shares(own)
        for (budget, name), own in runs.items()
    ]
    title = "saturation by Eq. 1 or 3, margin and unit; 8 H100 FP8"
    draw = bars(rows, ("budget", "router"), "tokens_per_s")
    return Reproduction("thresholds", title, rows, [], draw)


def _rate(own: Sequence[Summary]) -> dict[str, float]:
    """Return tokens a second, mean over seeds, and half its interval."""
    rate, half = mean_and_interval([run[THROUGHPUT] for run in own])
    return {"tokens_per_s": rate, "interval": half}


def _shares(own: Sequence[Summary]) -> dict[str, float]:
    """Return the shares of cached prompt tokens and of waits for weights, %."""
    cached = [run["prefix_cache_hits"] / run["total_input_tokens"] for run in own]
    waits = 100 * mean(own, "weight_streaming.wait_share")
    return {"cached_share_%": 100 * float(np.mean(cached)), "wait_share_%": waits}


_ROUTERS = {
    "saturation, FLOPs": "saturation",
    "saturation, tokens": "saturation:unit=tokens",
    "saturation, FLOPs, margin 3": "saturation:margin=3",
    "prefix hash": "prefix_hash",
    "least loaded": "least_loaded",
}
_AGES_MS = (0.0, 100.0, 1000.0, 10_000.0)


def routers(runner: Runner, logs: Workloads, sizes: Sizes) -> Reproduction:
    """Routers by unit of load, shared prefixes and age of signals (cached blocks, completions), on
    8 H100 in FP8, all requests at once; ratios to fresh signals. Who holds nothing places all
    first."""
    keys = [
        (sharing, label, age) for sharing in (0.0, 0.5, 1.0) for label in _ROUTERS
        for age in _AGES_MS if age == 0 or label.startswith("saturation")
    ]  # fmt: skip
    runs = runner.groups({
        (sharing, label, age): [
            COMMON | H100_FP8.fields | _ASYNC | logs.real(sizes.tuning_scale, sharing, seed)
            | {"max_num_batched_tokens": 65_536, "prefill_policy": _ROUTERS[label],
               "signal_interval_ms": age, "load_report_delay_ms": age}
            for seed in sizes.seeds
        ]
        for sharing, label, age in keys
    })  # fmt: skip
    rows = []
    for (sharing, label, age), own in runs.items():
        both = zip(own, runs[sharing, label, 0.0], strict=True)
        ratio, half = mean_and_interval([a[THROUGHPUT] / b[THROUGHPUT] for a, b in both])
        rows.append(
            {"sharing": sharing, "router": label, "age_ms": age}
            | _rate(own)
            | {"against_fresh_%": 100 * (ratio - 1), "against_fresh_interval": 100 * half}
            | _shares(own)
        )
    title = "routers by unit, sharing and age of signals; 8 H100 FP8"
    draw = lines(rows, "age_ms", "tokens_per_s", "router", "sharing", xscale="symlog")
    return Reproduction("routers", title, rows, [], draw)


def gathers(runner: Runner, logs: Workloads, sizes: Sizes) -> Reproduction:
    """Collective and one-sided gathers, by load and skew; and what interference costs."""
    kinds = {
        "8K prompts, all at once": logs.regime("medium", sizes.regime_tokens // 5),
        "Table 2, all at once": logs.real(sizes.tuning_scale, 0.0),
    }
    for r in (10.0, 40.0, 160.0):
        mixed = logs.real(sizes.tuning_scale / 5, 0.0, rate=r)
        kinds[f"Table 2, {r:g} requests/s"] = mixed
    keys = [
        (what, budget, gather, interference)
        for what in kinds for budget in (8192, 32_768)
        for gather, interference in (("one_sided", 0.0), ("collective", 0.0),
                                     ("one_sided", 0.1), ("one_sided", 0.25), ("one_sided", 0.5))
        if not interference or what.endswith("once")
    ]  # fmt: skip
    made = runner.run([
        COMMON | H100_FP8.fields | _ASYNC | kinds[what]
        | {"max_num_batched_tokens": budget, "expert_gather": gather,
           "gather_interference": interference}
        for what, budget, gather, interference in keys
    ])  # fmt: skip
    names = ("requests", "budget", "gather", "interference")
    rows = [
        dict(zip(names, key, strict=True))
        | {"tokens_per_s": summary[THROUGHPUT]}
        | {name: summary[name] for name in ("mean_ttft_ms", "p99_ttft_ms")}
        | {"wait_share_%": 100 * summary["weight_streaming"]["wait_share"]}
        for key, summary in zip(keys, made, strict=True)
    ]
    title = "collective against one-sided gathers, interference; 8 H100 FP8"
    return Reproduction("gathers", title, rows, [], bars(rows, names, "tokens_per_s"))


_MAP_TOKENS = (512, 2048, 8192, 16_384, 32_768)
_MAP_LINKS = (0.25, 0.5, 1.0, 2.0, 4.0)


def strategy_map() -> Reproduction:
    """Return the fastest strategy by tokens a step, links, GPUs and precision, in closed form."""
    rows: list[dict[str, Any]] = []
    bf16, fp8 = "Qwen3-235B-A22B", "Qwen3-235B-A22B-FP8"
    parts = ((bf16, "A100"), (bf16, "H100"), (fp8, "H100"), (fp8, "H200"))
    for (model, gpu), n_gpus, links, tokens in product(parts, (4, 8), _MAP_LINKS, _MAP_TOKENS):
        rates = each_rate(model, gpu, n_gpus, tokens, links)
        first, second = sorted(rates, key=lambda kind: -rates[kind])[:2]
        rows.append(
            {"model": model, "gpu": gpu, "gpus": n_gpus, "links": links, "tokens": tokens}
            | {"fastest": first, "over_second_%": percent(rates[first], rates[second])}
            | {"second": second}
            | {kind: rates.get(kind) for kind in ("async_ep", "dp_ep", "tp_ep", "tp", "pp")}
        )
    shown = [row for row in rows if row["gpus"] == 8]
    title = "fastest strategy by tokens a step and links, closed form"
    draw = field(shown, "tokens", "links", "fastest", ("gpu", "model"), "{}")
    return Reproduction("map", title, rows, [], draw)


def needed() -> Reproduction:
    """Experts that a step of few tokens needs (``expert_gather="needed"``), as shares of gathering
    a layer, and what resident ones would save."""
    rows: list[dict[str, Any]] = []
    rng = np.random.default_rng(0)
    dims = load_model(H100_FP8.model)
    for name in ("reference-moe", "qwen3-30b-a3b"):
        trace = open_trace(name)
        first, n = trace.recorded_rows(np.arange(trace.n_requests))
        owner, at = np.repeat(trace.domain, n), ranges(first, n)
        counts = count_rows(trace.bits[at], trace.n_experts)
        load = np.sort(counts / counts.sum(axis=1, keepdims=True), axis=1)[:, ::-1]
        for tokens in (256, 512, 1024, 2048, 4096):
            for mix in ("one domain", "all domains"):
                shares = []
                for domain in range(len(trace.domains)):
                    rows_of = at[owner == domain] if mix == "one domain" else at
                    if len(rows_of) < tokens:
                        continue
                    # Tokens of a prompt follow each other: whole stretches, not single tokens.
                    start = int(rng.integers(len(rows_of) - tokens + 1))
                    batch = rows_of[start : start + tokens]
                    if mix == "all domains":
                        batch = rng.choice(rows_of, tokens, replace=False)
                    used = count_rows(trace.bits[batch], trace.n_experts) > 0
                    shares.append(used.mean())
                if shares:
                    rows.append({"trace": name, "what": f"needed, {mix}", "tokens": tokens,
                                 "bytes_saved_%": 100 * (1 - float(np.mean(shares)))})  # fmt: skip
        for hot in (8, 16, 32):
            rows.append(
                {"trace": name, "what": f"{hot} hot experts resident", "tokens": None,
                 "bytes_saved_%": 100 * hot / trace.n_experts,
                 "load_share_%": 100 * float(load[:, :hot].sum(axis=1).mean()),
                 "GB_a_GPU": (dims.n_moe_layers - 1) * dims.bytes_per_expert * hot / 1e9}
            )  # fmt: skip
    table = [{"tokens": None, "load_share_%": None, "GB_a_GPU": None} | row for row in rows]
    title = "experts a small step needs, experts kept resident (analysis)"
    draw = bars(table, ("trace", "what", "tokens"), "bytes_saved_%")
    return Reproduction("needed", title, table, [], draw)


#: Decode pools of 2 x 8 GPUs: by load, by experts, and with METRO's choice among 16 more instances.
_METRO = {
    "decode": {"num_redundant_experts": 16, "expert_placement": "eplb"},
    "replica_choice": "metro",
    "all2all_backend": "allgather_alltoall",
}
_DECODE: dict[str, dict[str, Any]] = {
    "jsq": {"policy": "jsq"},
    "eldr": {"policy": "eldr:refit_s=0"},
    "jsq, METRO": _METRO | {"policy": "jsq"},
    "eldr, METRO": _METRO | {"policy": "eldr:refit_s=0"},
}
_TTFT_MS = 1000.0


def pools(runner: Runner, logs: Workloads, quick: bool) -> Reproduction:
    """A prefill pool of AsyncEP or DP+EP before two decode workers of 8 GPUs: TTFT by rate. Good
    requests have their first token within a second; means and 95% intervals over seeds."""
    tokens = (100 if quick else 300) * 1024
    shape = {"data_parallel_size": 8, "enable_expert_parallel": True}
    prefill = {
        "DP+EP": {"all2all_backend": "deepep_ht", "prefill_policy": "least_loaded"},
        "AsyncEP": {"expert_gather": "one_sided", "prefill_policy": "least_loaded"},
        "AsyncEP, saturation": {"expert_gather": "one_sided", "prefill_policy": "saturation"},
    }
    rates = (20.0, 100.0) if quick else (10.0, 40.0, 70.0, 100.0)
    seeds = range(1 if quick else 5)
    keys = [
        (name, decode, r) for name in prefill for decode in _DECODE for r in rates
        if name != "DP+EP" or "METRO" not in decode  # one backend serves both pools
    ]  # fmt: skip
    runs = runner.groups({
        (name, decode, r): [
            H100_FP8.fields | shape | prefill[name] | _DECODE[decode]
            | logs.regime("short", tokens, r, seed)
            | {"topology": "1P2D", "output_len": 16, "trace": COMMON["trace"], "seed": seed,
               "max_num_batched_tokens": 8192, "max_num_seqs": 256, "goodput": {"ttft": _TTFT_MS}}
            for seed in seeds
        ]
        for name, decode, r in keys
    })  # fmt: skip
    rows = []
    for (name, decode, r), own in runs.items():
        row: dict[str, Any] = {"prefill": name, "decode": decode, "requests_per_s": r}
        for tag in ("mean_ttft_ms", "p99_ttft_ms", "slo_attainment", "mean_tpot_ms"):
            row[tag], row[f"{tag}_interval"] = mean_and_interval([run[tag] for run in own])
        rows.append(row)
    title = "prefill pools of 8 H100 FP8 before 2 decode workers of 8, 1K prompts"
    draw = bars(rows, ("prefill", "decode", "requests_per_s"), "p99_ttft_ms")
    return Reproduction("pools", title, rows, [], draw)
