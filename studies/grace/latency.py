"""GRACE-MoE's Figure 4 as an ablation in one engine, and what its figures leave open.

The paper holds GRACE-MoE against five other systems' software, which cannot be had here. The same
steps are held against the vanilla placement in one engine instead, prefill and decode apart: what
the placement itself gives."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from eldr_sim.charts import bars
from eldr_sim.planning.runs.run_cache import Summary
from eldr_sim.planning.studies.figures import Claim, Reproduction, Runner, change, mean, percent
from studies.grace.figures import TWO_BY_TWO, counted
from studies.grace.settings import (
    AFFINITY,
    DR_TAR,
    HG,
    PHASES,
    SCHEMES,
    SOURCES,
    VANILLA,
    Cluster,
    Evaluation,
    Scheme,
    write_gpu,
)

CLUSTERS = (Cluster(1, 8), Cluster(2, 2), Cluster(2, 4))
REFERENCE = SOURCES[-1]
_LATENCIES = ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")
_OTHER_SOFTWARE = (
    "the paper's reference is five other systems, whose software is not simulated; ours is the "
    "vanilla placement in the same engine"
)


def figure_4(evaluation: Evaluation, runner: Runner) -> Reproduction:
    """Time of a MoE layer by phase, and latency of 128 requests, step by step (Fig. 4)."""
    rows: list[dict[str, Any]] = []
    claims = []
    for cluster in CLUSTERS:
        runs = _run(runner, cluster, evaluation.seeds)
        for scheme in SCHEMES:
            layer = {p: counted(evaluation, REFERENCE, scheme, cluster, p) for p in PHASES}
            rows.append(
                {"gpus": str(cluster), "scheme": scheme.label}
                | {
                    f"{phase}_{part}": float(layer[phase][part].mean())
                    for part in ("layer_ms", "moe_ms", "all_to_all_ms")
                    for phase in PHASES
                }
                | {"e2e_ms": mean(runs[scheme], "mean_e2el_ms")}
                | {"tpot_ms": mean(runs[scheme], "mean_tpot_ms")}
            )
        own = {row["scheme"]: row for row in rows if row["gpus"] == str(cluster)}
        grace, vanilla = own[DR_TAR.label], own[VANILLA.label]
        both = zip(runs[DR_TAR], runs[VANILLA], strict=True)
        e2e = np.array([percent(a["mean_e2el_ms"], b["mean_e2el_ms"]) for a, b in both])
        claims += [
            Claim(f"MoE layer, GRACE-MoE against others, {cluster}, {phase} steps", -75.5, -2.1,
                  percent(grace[f"{phase}_layer_ms"], vanilla[f"{phase}_layer_ms"]),
                  tolerance=0.0, reason=_OTHER_SOFTWARE)
            for phase in PHASES
        ]  # fmt: skip
        claims.append(
            Claim(f"end to end, GRACE-MoE against others, {cluster}", -73.6, 100 * (1 / 0.95 - 1),
                  float(e2e.mean()), tolerance=0.0,
                  reason=f"{_OTHER_SOFTWARE}; {np.round(e2e, 1).tolist()} by seed")
        )  # fmt: skip
    draw = bars(rows, "gpus", ("prefill_layer_ms", "decode_layer_ms", "e2e_ms"), "scheme")
    title = "Ablation in one engine: MoE layer and end to end"
    return Reproduction("figure_4", title, rows, claims, draw)


def pools(evaluation: Evaluation, runner: Runner) -> Reproduction:
    """Pools placed differently, on the paper's GPUs (no claim), all pairs on the embedded trace,
    some on Qwen3-30B-A3B's; from Vanilla in both, paired by seed."""
    words = {scheme.label: scheme.placement for scheme in (VANILLA, HG, DR_TAR, AFFINITY)}
    some = [(VANILLA, VANILLA), (DR_TAR, DR_TAR), (DR_TAR, AFFINITY), (AFFINITY, AFFINITY)]
    cells = [("reference-moe", a, b) for a in words for b in words]
    cells += [("qwen3-30b-a3b", a.label, b.label) for a, b in some]
    of_trace: dict[str, dict[str, Any]] = {
        "reference-moe": {},
        "qwen3-30b-a3b": {"trace": "qwen3-30b-a3b", "workload": "trace"},
    }
    with TemporaryDirectory() as folder:
        base = _fields(TWO_BY_TWO, Path(folder))
        base |= {"topology": "1P1D", "replica_choice": "local_first"}
        cases = {
            (trace, a, b): base | of_trace[trace]
            | {"prefill": {"expert_placement": words[a]}, "expert_placement": words[b]}
            for trace, a, b in cells
        }  # fmt: skip
        runs = runner.paired(cases, evaluation.seeds)
    rows = []
    for (trace, a, b), own in runs.items():
        row: dict[str, Any] = {"trace": trace, "prefill": a, "decode": b}
        reference = runs[trace, VANILLA.label, VANILLA.label]
        row |= {key: mean(own, key) for key in _LATENCIES}
        for key in _LATENCIES:
            name = key.removeprefix("mean_").removesuffix("_ms")
            ends = (f"{name}_%", f"{name}_low_%", f"{name}_high_%")
            row |= zip(ends, change(own, reference, key), strict=True)
        rows.append(row)
    draw = bars(rows[: len(words) ** 2], "prefill", _LATENCIES, "decode")
    title = "Prefill and decode workers placed apart, 2x2 + 2x2"
    return Reproduction("pools", title, rows, [], draw)


def _fields(cluster: Cluster, folder: Path) -> dict[str, Any]:
    """Return what the paper's runs have in common; the GPU's description lies in a folder."""
    return {
        "gpu": write_gpu(folder / f"{cluster}.json", cluster),
        "topology": "1C",
        "data_parallel_size": cluster.n_ranks,
        "enable_expert_parallel": True,
        "gpus_per_node": cluster.gpus_per_node,
        "all2all_backend": "deepep_ht",
        "num_requests": 128,
        "request_rate": float("inf"),
        "output_len": 16,
        "policy": "round_robin",
        "enable_prefix_caching": False,
    }


def _run(runner: Runner, cluster: Cluster, seeds: range) -> dict[Scheme, list[Summary]]:
    """Run 128 requests that come at once under each scheme and seed."""
    with TemporaryDirectory() as folder:
        base = _fields(cluster, Path(folder))
        cases = {
            scheme: base | {"replica_choice": scheme.choice, "expert_placement": scheme.placement}
            for scheme in SCHEMES
        }
        return runner.paired(cases, seeds)
