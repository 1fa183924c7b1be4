"""Gimbal's evaluation: all its figures by name, and what they leave open."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from eldr_sim.charts import bars, field, lines
from eldr_sim.planning.slo import t_interval
from eldr_sim.planning.studies.figures import Reproduction, Runner, change, mean, spread
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.traces.requests.length_shapes import LengthShape
from eldr_sim.traces.routing.format import REFERENCE_TRACE
from studies.gimbal import experts, latency
from studies.gimbal.latency import paired_figure
from studies.gimbal.optimum import gap
from studies.gimbal.prefix import figure_11, figure_12
from studies.gimbal.settings import (
    FULL,
    OUTPUTS,
    P99,
    PROMPTS,
    QUICK,
    SYSTEMS,
    TPOT,
    TTFT,
    VLLM,
    Experiment,
    System,
    paired_claim,
    write_log,
)

ORDERS = ("fcfs", "sjf", "sjf_aging:age=0.5", "sjf_residence", "oracle")
_LOAD = 0.9
_CORRELATIONS = (-0.8, 0.0, 0.8)
#: What binds: fields of the engine, and by what outputs are divided.
_BOUNDS: dict[str, tuple[dict[str, Any], float]] = {
    "prefill": ({}, 26.0),
    "seats": ({"max_num_seqs": 16}, 1.0),
    "KV blocks": ({"num_gpu_blocks_override": 1250}, 1.0),
}


def sjf_sign(experiment: Experiment) -> Reproduction:
    """Waits by queue order on one engine at 0.9 of the throughput of requests at once, by what
    binds and by correlation of lognormal lengths; ratios to FCFS; the longest prompts are the top
    5%."""
    n, seeds = 4 * experiment.scale.requests, experiment.scale.seeds
    rows: list[dict[str, Any]] = []
    for bound, (fields, divisor) in _BOUNDS.items():
        for r in _CORRELATIONS:
            base = {
                "frontend": "none",
                "topology": "1C",
                "gpu": "A100-80GB",
                "num_requests": n,
                **fields,
            }
            base |= {"enable_prefix_caching": False, "output_len": "recorded"}
            waits: dict[str, list[tuple[float, ...]]] = {order: [] for order in ORDERS}
            rate = 0.0
            for seed in range(seeds):
                path = experiment.folder / f"pairs-{bound}-{r}-{seed}.jsonl"
                rng = np.random.default_rng([seed, 29])
                scores = rng.multivariate_normal(np.zeros(2), [[1, r], [r, 1]], n)
                of = PROMPTS, (OUTPUTS[0] / divisor, OUTPUTS[1] / divisor)
                prompts, outputs = (
                    np.maximum(1, np.rint(median * np.exp(s * np.sqrt(2 * np.log(mean_ / median)))))
                    for s, (median, mean_) in zip(scores.T, of, strict=True)
                )
                write_log(path, prompts.astype(np.int64), outputs.astype(np.int64), rng)
                case = base | {"workload": str(path), "seed": seed}
                if seed == 0:
                    full = simulate(make_config(case | {"request_rate": "inf"})).record
                    # The last fifth is left out: its long outputs leave the batch half empty.
                    rate = _LOAD * 0.8 * n / float(np.quantile(full.requests["finish_s"], 0.8))
                for order in ORDERS:
                    config = make_config(case | {"request_rate": rate, "queue_order": order})
                    waits[order].append(_waits(simulate(config).record.requests))
            for order in ORDERS[1:]:
                ratio = np.array(waits[order]) / np.array(waits["fcfs"])
                intervals = [t_interval(ratio[:, i].tolist()) for i in range(4)]
                rows.append(
                    {"bound": bound, "correlation": r, "order": order, "rate": rate}
                    | {"fcfs_wait_ms": 1e3 * float(np.mean([w[0] for w in waits["fcfs"]]))}
                    | {
                        "wait": intervals[0].mean,
                        "low": intervals[0].low,
                        "high": intervals[0].high,
                    }
                    | {"ttft": intervals[1].mean, "p99_ttft": intervals[2].mean}
                    | {"longest_prompts_ttft": intervals[3].mean}
                )

    draw = field(rows, "correlation", "bound", "wait", "order")
    title = "Mean wait by queue order, by what binds and correlation of prompt and output"
    return Reproduction("sjf_sign", title, rows, [], draw)


def _waits(requests: Any) -> tuple[float, float, float, float]:
    """Return mean wait, mean and p99 TTFT, and the mean TTFT of the longest prompts, s."""
    wait = requests["prefill_start_s"] - requests["arrival_s"]
    ttft = requests["first_token_s"] - requests["arrival_s"]
    longest = ttft[requests["prompt_len"] >= np.quantile(requests["prompt_len"], 0.95)].mean()
    waited, p99 = max(float(wait.mean()), 1e-9), float(np.quantile(ttft, 0.99))
    return waited, float(ttft.mean()), p99, float(longest)


#: Balancers, and whether they read what engines publish (else completions, as old).
BALANCERS = (
    "round_robin", "p2c", "vllm_dp", "vllm_dp_kv", "gimbal", "gimbal:reading=prose",
    "gimbal:kv=0,kv_difference=0", "marginal_cost",
)  # fmt: skip
_AGES_MS = (0.0, 100.0, 1000.0)
_PD: dict[str, Any] = {
    "topology": "4P1D", "gpu": "A100-80GB", "all2all_backend": "pplx",
    "enable_prefix_caching": False, "output_len": "recorded",
    "decode": {"data_parallel_size": 4, "enable_expert_parallel": True},
}  # fmt: skip
_PD_RATE = 40.0


def old_signals(experiment: Experiment) -> Reproduction:
    """TPOT and lock-step tax (mean wait for the slowest) by balancer and age of signals: 4 engines
    of a group, four prefill workers, whose signatures `marginal_cost` reads."""
    seeds = experiment.scale.few
    groups = {
        (policy, age): [
            _PD | {"policy": policy, "signal_interval_ms": age, "load_report_delay_ms": age}
            | {"workload": experiment.workload("random", seed), "seed": seed}
            | {"num_requests": experiment.scale.requests, "request_rate": _PD_RATE}
            for seed in range(seeds)
        ]
        for policy in BALANCERS
        for age in _AGES_MS
    }  # fmt: skip
    runs = experiment.runner.groups(groups)
    rows = []
    for (policy, age), own in runs.items():
        rows.append(
            {"policy": policy, "age_ms": age, TPOT: mean(own, TPOT)}
            | {"p99_tpot_ms": mean(own, "p99_tpot_ms"), "idle_ms": mean(own, "group.mean_idle_ms")}
            | {"step_ms": mean(own, "group.mean_step_ms")}
            | spread("against_fresh", change(own, runs[policy, 0.0], TPOT))
            | spread("against_round_robin", change(own, runs["round_robin", age], TPOT))
        )

    draw = lines(rows, "age_ms", (TPOT, "idle_ms"), "policy", xscale="symlog")
    title = "Old signals and the lock-step tax by balancer, 4 decode engines"
    return Reproduction("old_signals", title, rows, [], draw)


_TOGETHER = ("round_robin", "vllm_dp", "vllm_dp_kv", "gimbal:reading=prose", "marginal_cost")


def colocated(experiment: Experiment) -> Reproduction:
    """Balancers of two and four co-located engines that step together, by age of the signals. At
    the knee of two engines under `round_robin`, for four at twice its rate."""
    scale = experiment.scale
    groups = dict[tuple[LengthShape, int, float, str], list[dict[str, Any]]]()
    for shape in (scale.shapes[0], scale.shapes[-1]):
        for engines in (2, 4):
            for age in _AGES_MS:
                for policy in _TOGETHER:
                    cases = experiment.cases(System(policy=policy), shape, 1.0, scale.few)
                    groups[shape, engines, age, policy] = [
                        case | {"data_parallel_size": engines, "signal_interval_ms": age}
                        | {"request_rate": case["request_rate"] * engines / 2}
                        for case in cases
                    ]  # fmt: skip
    runs = experiment.runner.groups(groups)
    rows = []
    for (shape, engines, age, policy), own in runs.items():
        plain = runs[shape, engines, age, "round_robin"]
        row: dict[str, Any] = {"shape": shape, "engines": engines, "age_ms": age, "policy": policy}
        for name, metric in (("ttft", TTFT), ("p99_ttft", P99), ("tpot", TPOT)):
            row |= {f"{name}_ms": mean(own, metric)}
            row |= spread(f"{name}_%", change(own, plain, metric))
        rows.append(row | {"idle_ms": mean(own, "group.mean_idle_ms")})

    shown = [row for row in rows if row["age_ms"] == _AGES_MS[1]]
    draw = bars(shown, ("shape", "engines", "policy"), ("ttft_%", "tpot_%"))
    title = "Balancers of co-located engines that step together"
    return Reproduction("colocated", title, rows, [], draw)


_PAIRS = System("gimbal:reading=queues,load_difference=500", "sjf_aging", "gimbal:pairs=2", 1)


def tpot(experiment: Experiment) -> Reproduction:
    """At what load does Gimbal lower TPOT? Fixed rates, recorded routing.

    A prototype of November 2026 lowered TPOT by 8.2% [5.6, 10.9] at 9.1 requests/s; what differs is
    the sample, not its rule of chunks (optimum.md).
    """
    shape, rows, claims = experiment.scale.shapes[0], [], []
    logs = [experiment.workload(shape, seed) for seed in range(experiment.scale.few)]
    for rate in (9.1, 7.5):
        base = experiment.base | _RECORDED | {"request_rate": rate}
        runs = experiment.runner.groups(
            {
                label: [
                    base | system.fields(experiment.scale.interval) | {"workload": log, "seed": n}
                    for n, log in enumerate(logs)
                ]
                for label, system in {"vLLM": VLLM, "Gimbal": _PAIRS}.items()
            }
        )
        tpot_cut = change(runs["Gimbal"], runs["vLLM"], TPOT)
        row: dict[str, Any] = {"rate": rate}
        row |= {metric: mean(runs["vLLM"], metric) for metric in (TTFT, P99, TPOT)}
        rows.append(row | spread("tpot_%", tpot_cut))
        cut = latency.TPOT_CUT[shape]
        claims.append(
            paired_claim(f"mean TPOT, Gimbal with two pairs and 500 tokens, {rate:g}/s", cut, cut,
                         tpot_cut,
                         f"vLLM: p99 TTFT {row[P99] / 1e3:.1f} s, TPOT {row[TPOT]:.0f} ms")
        )  # fmt: skip
    draw = bars(rows, "rate", "tpot_%")
    return Reproduction("tpot", "Gimbal's TPOT at fixed rates", rows, claims, draw)


#: What the gain in TPOT hangs on: the routing, and at how many waiting tokens engines differ.
_RECORDED = {"trace": "qwen3-30b-a3b"}
_ALONE = ("DPLB, queues", "SJFS", "EDR")


def recorded(experiment: Experiment) -> Reproduction:
    """Gimbal on Qwen3's recorded routing, whose experts' loads differ as the paper's may.

    At the knee of that routing. ``500``: engines differ from so many waiting prompt tokens on,
    where the paper's 3,000 are of requests seven times as rare.
    """
    near = SYSTEMS["Gimbal, queues"]._replace(policy="gimbal:reading=queues,load_difference=500")
    systems = {name: SYSTEMS[name] for name in ("vLLM", *_ALONE, "Gimbal, queues")}
    systems["Gimbal, queues, 500"] = near
    shape = experiment.scale.shapes[0]
    runs = experiment.runner.groups(
        {
            name: experiment.cases(system, shape, 1.0, experiment.scale.few, **_RECORDED)
            for name, system in systems.items()
        }
    )
    rows: list[dict[str, Any]] = []
    claims = []
    for name, own in runs.items():
        row: dict[str, Any] = {"system": name, "rate": experiment.knee(shape, **_RECORDED)}
        row |= {metric: mean(own, metric) for metric in (TTFT, P99, TPOT, "group.mean_idle_ms")}
        for metric, cut in ((TTFT, latency.TTFT_CUT), (P99, None), (TPOT, latency.TPOT_CUT)):
            found = change(own, runs["vLLM"], metric)
            row |= spread(f"{metric.removesuffix('_ms')}_%", found)
            if cut is not None and name.startswith("Gimbal"):
                said = f"mean {metric[5:9].upper()}, {name}, {shape}, recorded Qwen3"
                claims.append(paired_claim(said, cut[shape], cut[shape], found))
        rows.append(row)
    draw = bars(rows, "system", ("mean_ttft_%", "mean_tpot_%"))
    title = "Gimbal at the knee of recorded routing"
    return Reproduction("recorded", title, rows, claims, draw)


#: Placements of one instance of every expert, and whether experts move.
PLACEMENTS = (
    ("linear", False), ("eplb", False), ("eplb", True), ("affinity", False),
    ("grace:replication=none", False), ("gimbal:pairs=0", False), ("gimbal", False),
    ("gimbal", True), ("gimbal:pairs=128", False),
)  # fmt: skip
_CLUSTERED = ("linear", "eldr", "eplb", "eplb:load=cluster", "affinity", "gimbal")


def placements(experiment: Experiment) -> Reproduction:
    """Return every placement at equal slots, with what relocation moves and stops."""
    scale, groups = experiment.scale, dict[tuple[str, str, bool], list[dict[str, Any]]]()
    for trace in ("reference-moe", "qwen3-30b-a3b"):
        for word, moves in PLACEMENTS:
            system = VLLM._replace(expert_placement=word, eplb_interval=1 if moves else None)
            cases = experiment.cases(system, "random", 1.0, scale.few, trace=trace)
            groups[trace, word, moves] = cases
    for word in _CLUSTERED:
        groups["reference-moe, 2P2D eldr", word, False] = [
            _PD | {"topology": "2P2D", "policy": "eldr:refit_s=0"}
            | {"expert_placement": word, "seed": seed}
            | {"decode": {"data_parallel_size": 2, "enable_expert_parallel": True}}
            | {"workload": experiment.workload("random", seed), "request_rate": _PD_RATE}
            | {"num_requests": scale.requests}
            for seed in range(scale.few)
        ]  # fmt: skip
    runs = experiment.runner.groups(groups)
    rows = []
    for (where, word, moves), own in runs.items():
        found = change(own, runs[where, "linear", False], TPOT)
        rows.append(
            {"trace": where, "placement": word, "tau": scale.interval if moves else None}
            | {TPOT: mean(own, TPOT), TTFT: mean(own, TTFT)}
            | spread("tpot_%", found)
            | {f"{part}_ms": mean(own, f"group.mean_{part}_ms") for part in ("moe", "dispatch")}
            | {"busiest_pairs": mean(own, "group.busiest_rank_pairs_over_mean")}
            | {"relocations": mean(own, "relocations")}
            | {"moved_gb": mean(own, "relocated_bytes") / 1e9}
            | {"stall_ms": 1e3 * mean(own, "relocation_stall_s")}
        )

    draw = bars(rows, ("placement", "tau"), "tpot_%", panel="trace")
    title = "Placements at equal slots, and what relocation costs"
    return Reproduction("placements", title, rows, [], draw)


def figures(
    runner: Runner, quick: bool, log: str | None = None
) -> dict[str, Callable[[], Reproduction]]:
    """Return the functions that reproduce each figure; lengths are a log's, if one is given."""
    experiment = Experiment(runner, QUICK if quick else FULL, log)
    rows, runs = (
        cache(lambda: latency.ablations(experiment)),
        cache(lambda: latency.main_runs(experiment)),
    )
    return {
        "figure_3": experts.figure_3,
        "figure_4": experts.figure_4,
        "figure_6": lambda: latency.by_rate("figure_6", experiment, rows(), TTFT),
        "figure_7": lambda: paired_figure("figure_7", experiment, runs(), TTFT, latency.TTFT_CUT),
        "figure_8": lambda: latency.by_rate("figure_8", experiment, rows(), TPOT),
        "figure_9": lambda: paired_figure("figure_9", experiment, runs(), TPOT, latency.TPOT_CUT),
        "figure_10": lambda: latency.figure_10(experiment, runs()),
        "figure_11": lambda: figure_11(experiment),
        "figure_12": lambda: figure_12(experiment),
        "few_blocks": lambda: latency.few_blocks(experiment),
        "crossings": lambda: experts.crossings(quick),
        "sjf_sign": lambda: sjf_sign(experiment),
        "old_signals": lambda: old_signals(experiment),
        "colocated": lambda: colocated(experiment),
        "placements": lambda: placements(experiment),
        "recorded": lambda: recorded(experiment),
        "tpot": lambda: tpot(experiment),
        "milp": lambda: gap(*experts.recorded_load(), seconds=20 if quick else 120),
    }


def make_runner(quick: bool, progress: Callable[[float], None]) -> Runner:
    """Return the runner, with studies/gimbal's routing; ``quick`` is a matter of `Scale`."""
    return Runner({"frontend": "none", "trace": REFERENCE_TRACE}, progress=progress)
