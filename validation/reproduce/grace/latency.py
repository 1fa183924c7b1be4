"""GRACE-MoE's Figure 4 as an ablation in one engine, and what its figures leave open.

The paper holds GRACE-MoE against five other systems' software, which cannot be had here. The same
steps are held against the vanilla placement in one engine instead, prefill and decode apart: what
the placement itself gives.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from eldr_sim.planning.intervals import paired_percent
from eldr_sim.planning.runs.shared_runs import Summary
from eldr_sim.validation.reproduce.grace.figures import TWO_BY_TWO
from eldr_sim.validation.reproduce.grace.settings import (
    AFFINITY,
    DR_TAR,
    HG,
    LADDER,
    SCHEMES,
    SOURCES,
    VANILLA,
    Cluster,
    Evaluation,
    Scheme,
    gpu_of,
)
from eldr_sim.validation.reproduce.reproduction import Claim, Reproduction, Runner, percent

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
        runs = _run(runner, cluster, SCHEMES, evaluation.seeds)
        for scheme in SCHEMES:
            layer = {
                phase: evaluation.timed(REFERENCE, scheme, cluster, phase)
                for phase in ("prefill", "decode")
            }
            rows.append(
                {
                    "gpus": str(cluster),
                    "scheme": scheme.label,
                    **{f"{phase}_layer_ms": 1e3 * t.total_s for phase, t in layer.items()},
                    **{f"{phase}_moe_ms": 1e3 * t.moe_s for phase, t in layer.items()},
                    **{
                        f"{phase}_all_to_all_ms": 1e3 * t.all_to_all_s for phase, t in layer.items()
                    },
                    "e2e_ms": _mean(runs[scheme], "mean_e2el_ms"),
                    "tpot_ms": _mean(runs[scheme], "mean_tpot_ms"),
                }
            )
        own = {row["scheme"]: row for row in rows if row["gpus"] == str(cluster)}
        grace, vanilla = own[DR_TAR.label], own[VANILLA.label]
        e2e = _change(runs, DR_TAR, VANILLA, "mean_e2el_ms")
        claims += [
            Claim(
                f"MoE layer, GRACE-MoE against others, {cluster}, {phase} steps",
                -75.5,
                -2.1,
                percent(grace[f"{phase}_layer_ms"], vanilla[f"{phase}_layer_ms"]),
                tolerance=0.0,
                reason=_OTHER_SOFTWARE,
            )
            for phase in ("prefill", "decode")
        ]
        claims.append(
            Claim(
                f"end to end, GRACE-MoE against others, {cluster}",
                -73.6,
                100 * (1 / 0.95 - 1),
                float(e2e.mean()),
                tolerance=0.0,
                reason=f"{_OTHER_SOFTWARE}; {np.round(e2e, 1).tolist()} by seed",
            )
        )
    return Reproduction(
        "figure_4",
        "Ablation in one engine: MoE layer and end to end",
        rows,
        claims,
        lambda figure: _draw_ladder(figure, rows),
    )


def pools(evaluation: Evaluation, runner: Runner) -> Reproduction:
    """Prefill and decode workers placed differently, on the paper's GPUs (no claim of its own).

    All pairs on the embedded trace, some on Qwen3-30B-A3B's own routing; differences are from
    Vanilla in both, paired by seed.
    """
    words = {scheme.label: scheme.placement for scheme in (VANILLA, HG, DR_TAR, AFFINITY)}
    some = [(VANILLA, VANILLA), (DR_TAR, DR_TAR), (DR_TAR, AFFINITY), (AFFINITY, AFFINITY)]
    cells = [("reference-moe", a, b) for a in words for b in words]
    cells += [("qwen3-30b-a3b", a.label, b.label) for a, b in some]
    with TemporaryDirectory() as folder:
        base = _fields(TWO_BY_TWO, Path(folder)) | {
            "topology": "1P1D",
            "replica_choice": "local_first",
        }
        of_trace: dict[str, dict[str, Any]] = {
            "reference-moe": {},
            "qwen3-30b-a3b": {"trace": "qwen3-30b-a3b", "workload": "trace"},
        }
        found = iter(
            runner.run(
                [
                    base
                    | of_trace[trace]
                    | {"prefill": {"expert_placement": words[a]}, "expert_placement": words[b]}
                    | {"seed": seed}
                    for trace, a, b in cells
                    for seed in evaluation.seeds
                ]
            )
        )
        runs = {cell: [next(found) for _ in evaluation.seeds] for cell in cells}
    rows = []
    for (trace, a, b), own in runs.items():
        row: dict[str, Any] = {"trace": trace, "prefill": a, "decode": b}
        reference = runs[trace, VANILLA.label, VANILLA.label]
        row |= {key: _mean(own, key) for key in _LATENCIES}
        for key in _LATENCIES:
            span = paired_percent([s[key] for s in own], [s[key] for s in reference])
            name = key.removeprefix("mean_").removesuffix("_ms")
            row |= {f"{name}_%": span.mean, f"{name}_low_%": span.low, f"{name}_high_%": span.high}
        rows.append(row)
    return Reproduction(
        "pools",
        "Prefill and decode workers placed apart, 2x2 + 2x2",
        rows,
        [],
        lambda figure: _draw_pools(figure, rows[: len(words) ** 2]),
    )


def _fields(cluster: Cluster, folder: Path) -> dict[str, Any]:
    """Return what the paper's runs have in common; the GPU's description lies in a folder."""
    gpu = gpu_of(cluster)
    path = folder / f"{cluster}.json"
    path.write_text(gpu.model_dump_json())
    return {
        "gpu": str(path),
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


def _run(
    runner: Runner, cluster: Cluster, schemes: tuple[Scheme, ...], seeds: range
) -> dict[Scheme, list[Summary]]:
    """Run 128 requests that come at once under each scheme and seed."""
    with TemporaryDirectory() as folder:
        base = _fields(cluster, Path(folder))
        cases = [
            base
            | {
                "expert_placement": scheme.placement,
                "replica_choice": scheme.choice,
                "seed": seed,
            }
            for scheme in schemes
            for seed in seeds
        ]
        found = runner.run(cases)
    n = len(seeds)
    return {scheme: found[i * n : (i + 1) * n] for i, scheme in enumerate(schemes)}


def _mean(runs: list[Summary], key: str) -> float:
    return float(np.mean([run[key] for run in runs]))


def _change(runs: dict[Scheme, list[Summary]], new: Scheme, old: Scheme, key: str) -> Any:
    """Return the difference of two schemes for each seed, %."""
    return np.array([percent(a[key], b[key]) for a, b in zip(runs[new], runs[old], strict=True)])


def _draw_ladder(figure: Any, rows: list[dict[str, Any]]) -> None:
    metrics = ("prefill_layer_ms", "decode_layer_ms", "e2e_ms")
    clusters = list(dict.fromkeys(row["gpus"] for row in rows))
    labels = [scheme.label for scheme in (*LADDER, AFFINITY)]
    for axes, metric in zip(figure.subplots(1, len(metrics)), metrics, strict=True):
        for i, label in enumerate(labels):
            own = [row for row in rows if row["scheme"] == label]
            base = [row for row in rows if row["scheme"] == VANILLA.label]
            share = [a[metric] / b[metric] for a, b in zip(own, base, strict=True)]
            axes.bar(np.arange(len(clusters)) + i / 7, share, 0.13, label=label)
        axes.set_xticks(np.arange(len(clusters)), clusters)
        axes.set_title(f"{metric} / Vanilla's", fontsize=8)
        axes.axhline(1.0, color="black", linewidth=0.6)
        axes.set_ylim(bottom=0.6)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncol=len(names), fontsize=7)


def _draw_pools(figure: Any, rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["prefill"] for row in rows))
    for axes, metric in zip(figure.subplots(1, 3), _LATENCIES, strict=True):
        values = np.array([row[metric] for row in rows]).reshape(len(names), -1)
        _annotated(axes, values, names, names, f"{metric}: prefill by decode", "{:.1f}".format)


def _annotated(
    axes: Any,
    values: Any,
    rows: list[str],
    columns: list[str],
    title: str,
    spell: Callable[[float], str],
) -> None:
    axes.imshow(values, cmap="viridis_r", aspect="auto")
    axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right", fontsize=6)
    axes.set_yticks(range(len(rows)), rows, fontsize=6)
    for (i, j), value in np.ndenumerate(values):
        axes.text(j, i, spell(value), ha="center", va="center", color="white", fontsize=6)
    axes.set_title(title, fontsize=8)
