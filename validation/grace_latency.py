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
import pyarrow as pa

from eldr_sim.kernel_profiles.all_to_all import build_all_to_all
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.step_time import build_step_time_model
from eldr_sim.planning.runs import Summary
from eldr_sim.validation.expert_traffic import (
    decode_batches,
    layer_times,
    measure,
    prompt_batches,
)
from eldr_sim.validation.grace_figures import TWO_BY_TWO
from eldr_sim.validation.grace_setup import (
    AFFINITY,
    DR_TAR,
    HG,
    LADDER,
    SCHEMES,
    SOURCES,
    TRACES,
    VANILLA,
    Cluster,
    Evaluation,
    Scheme,
    gpu_of,
    replica_choice,
    requests_of,
)
from eldr_sim.validation.reproduction import Claim, Reproduction, Runner, percent

CLUSTERS = (Cluster(1, 8), Cluster(2, 2), Cluster(2, 4))
REFERENCE = SOURCES[-1]
_OTHER_SOFTWARE = (
    "the paper's reference is five other systems, whose software is not simulated; ours is the "
    "vanilla placement in the same engine"
)
#: Tokens of each GPU in a step, and line rates of a GPU's NIC, GB/s.
MAP_TOKENS = (8, 32, 128, 512, 2048, 8192)
MAP_NETWORK = (1.5, 3.0, 6.0, 12.5, 25.0, 50.0, 100.0)
_DECODE_TOKENS = 128  # a GPU's steps of up to so many are taken as decode steps


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
        pa.Table.from_pylist(rows),
        claims,
        lambda figure: _draw_ladder(figure, rows),
    )


def pools(evaluation: Evaluation, runner: Runner) -> Reproduction:
    """Prefill and decode workers placed differently, on the paper's GPUs (no claim of its own)."""
    rows = []
    words = {scheme.label: scheme.placement for scheme in (VANILLA, HG, DR_TAR, AFFINITY)}
    with TemporaryDirectory() as folder:
        base = _fields(TWO_BY_TWO, Path(folder)) | {
            "topology": "1P1D",
            "replica_choice": "local_first",
        }
        pairs = [(a, b) for a in words for b in words]
        cases = [
            base | {"prefill": {"expert_placement": words[a]}, "expert_placement": words[b]}
            | {"seed": seed}
            for a, b in pairs
            for seed in evaluation.seeds
        ]  # fmt: skip
        found = runner.run(cases)
    n = len(evaluation.seeds)
    for i, (a, b) in enumerate(pairs):
        own = found[i * n : (i + 1) * n]
        rows.append(
            {
                "prefill": a,
                "decode": b,
                **{
                    key: _mean(own, key) for key in ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")
                },
            }
        )
    return Reproduction(
        "pools",
        "Prefill and decode workers placed apart, 2x2 + 2x2",
        pa.Table.from_pylist(rows),
        [],
        lambda figure: _draw_pools(figure, rows),
    )


def placement_map(evaluation: Evaluation) -> Reproduction:
    """Return the fastest placement by tokens a GPU and network, 2 nodes x 2 H100.

    Times are the tables'; inside nodes NVLink's roofline, between them the NIC's line rate.
    """
    rows: list[dict[str, Any]] = []
    even = Scheme("EPLB", "eplb")
    schemes = (VANILLA, even, HG, DR_TAR, AFFINITY, Scheme("affinity, 0", "affinity:resolution=0"))
    cluster, h100 = TWO_BY_TWO, load_gpu("H100")
    for source in SOURCES[3:]:
        trace, model = evaluation.trace(source.trace), load_model(TRACES[source.trace])
        step_time = build_step_time_model(
            model,
            h100,
            max_num_seqs=1024,
            max_model_len=1024,
            parallelism=Parallelism(1, True, cluster.n_ranks),
        )
        moe = step_time.rank_moe(model.n_experts, 4 * MAP_TOKENS[-1] * model.top_k)
        networks = {
            rate: build_all_to_all(
                model,
                h100.model_copy(update={"name": "H100, NIC", "nic_bandwidth": 1e9 * rate}),
                "deepep_ht",
                cluster.n_ranks,
                gpus_per_node=cluster.gpus_per_node,
            )
            for rate in MAP_NETWORK
        }
        requests = requests_of(trace, False, None)
        for tokens in MAP_TOKENS:
            decode = tokens <= _DECODE_TOKENS
            make = decode_batches if decode else prompt_batches
            batches = make(trace, requests, cluster.n_ranks, tokens, max(1, 256 // tokens))
            found = {}
            for scheme in schemes:
                placement = evaluation.placements(source, scheme.placement, cluster)[0]
                choice = replica_choice(scheme.choice)
                traffic = measure(batches, placement, choice, cluster.node_of_rank)
                for rate, network in networks.items():
                    times = layer_times(traffic, moe, network, prompts=not decode)
                    found[scheme.label, rate] = times.total_s
            for rate in MAP_NETWORK:
                own = {scheme.label: found[scheme.label, rate] for scheme in schemes}
                best = min(own, key=lambda label: own[label])
                rows.append(
                    {
                        "trace": source.label,
                        "tokens_per_gpu": tokens,
                        "network_gb_s": rate,
                        "fastest": best,
                        **{
                            f"{label}_against_vanilla": percent(value, own["Vanilla"])
                            for label, value in own.items()
                        },
                        "vanilla_us": 1e6 * own["Vanilla"],
                    }
                )
    return Reproduction(
        "map",
        "Fastest placement by tokens a GPU and network, 2x2 H100",
        pa.Table.from_pylist(rows),
        [],
        lambda figure: _draw_map(figure, rows),
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
    metrics = ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")
    for axes, metric in zip(figure.subplots(1, 3), metrics, strict=True):
        values = np.array([row[metric] for row in rows]).reshape(len(names), -1)
        _annotated(axes, values, names, names, f"{metric}: prefill by decode", "{:.1f}".format)


def _draw_map(figure: Any, rows: list[dict[str, Any]]) -> None:
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    labels = [key.removesuffix("_against_vanilla") for key in rows[0] if key.endswith("vanilla")]
    for axes, trace in zip(figure.subplots(1, len(traces)), traces, strict=True):
        own = [row for row in rows if row["trace"] == trace]
        values = np.array([labels.index(row["fastest"]) for row in own])
        axes.imshow(
            values.reshape(len(MAP_TOKENS), -1), cmap="tab10", vmin=0, vmax=9, aspect="auto"
        )
        for i, row in enumerate(own):
            y, x = divmod(i, len(MAP_NETWORK))
            gain = row[f"{row['fastest']}_against_vanilla"]
            axes.text(x, y, f"{row['fastest']}\n{gain:+.1f}%", ha="center", va="center", fontsize=5)
        axes.set_xticks(range(len(MAP_NETWORK)), [f"{rate:g}" for rate in MAP_NETWORK])
        axes.set_yticks(range(len(MAP_TOKENS)), MAP_TOKENS)
        axes.set(xlabel="NIC of a GPU, GB/s", ylabel="tokens a GPU")
        axes.set_title(trace, fontsize=8)


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
