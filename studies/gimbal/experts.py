"""Gimbal's Figures 3 and 4: load and inter-layer affinity of experts, and what placements cross."""

import math
from typing import Any

import numpy as np

from eldr_sim.charts import bars, lines
from eldr_sim.planning.studies.figures import Claim, Reproduction, percent
from eldr_sim.policies.placement.gimbal import anchored, linked_experts
from eldr_sim.traces.routing.format import RoutingTrace, open_trace
from eldr_sim.traces.routing.structure import transitions
from studies.expert_traffic import decode_batches, measure
from studies.grace.settings import Cluster, calibration_of, place, replica_choice

#: Traces, and the layers of the model that each is replayed as.
TRACES = {"qwen3-30b-a3b": 48, "gpt-oss-20b": 24, "reference-moe": 48}
_REAL = "qwen3-30b-a3b"
#: Layers that the paper names as skewed (Sec. III-D).
SKEWED = (16, 18, 44, 45, 46)
_PAIRS = (64, 128, 256)
_PLACEMENTS = ("linear", "eplb", "gimbal", "gimbal:pairs=128", "affinity")


def _load(trace: RoutingTrace) -> Any:
    """Return tokens that chose each expert, all requests, [layers, E]."""
    return trace.decode_activation(np.arange(trace.n_requests)).sum(axis=0, dtype=np.float64)


def recorded_load() -> tuple[Any, Any]:
    """Return load, [layers, E], and transitions, [layers - 1, E, E], of recorded Qwen3."""
    trace = open_trace(_REAL)
    return _load(trace), transitions(trace, np.arange(trace.n_requests))


def _even(load: Any, placement: Any, n_ranks: int) -> float:
    """Return the load of the busiest GPU over the mean, mean over layers."""
    layers, experts = load.shape
    rank = np.zeros((layers, experts), np.int64)
    np.put_along_axis(rank, placement.expert, placement.rank, axis=1)
    of = np.stack([np.bincount(r, w, n_ranks) for r, w in zip(rank, load, strict=True)])
    return float((of.max(axis=1) / of.mean(axis=1)).mean())


def figure_3() -> Reproduction:
    """Load of experts by layer: which layers are skewed, and what two GPUs feel of it."""
    rows: list[dict[str, Any]] = []
    n_found = 0
    for name in TRACES:
        trace = open_trace(name)
        load = _load(trace)
        skew = load.std(axis=1) / load.mean(axis=1)
        calibration = calibration_of(trace, np.arange(trace.n_requests))
        if name == _REAL:
            most = np.argsort(-skew, kind="stable")[: len(skew) // 4].tolist()
            n_found = sum(layer in most for layer in SKEWED)
        two = Cluster(1, 2)
        even = {w: _even(load, place(trace, calibration, w, two, 0), 2) for w in ("linear", "eplb")}
        for layer, value in enumerate(skew.tolist()):
            rows.append(
                {"trace": name, "layer": layer, "cv": value}
                | {"busiest_expert": float(load[layer].max() / load[layer].mean())}
                | {f"busiest_of_2_gpus_{word}": value for word, value in even.items()}
            )
    first = {name: next(r for r in rows if r["trace"] == name) for name in TRACES}
    gain = [r["busiest_of_2_gpus_linear"] - 1 for r in first.values()]
    claims = [
        Claim("layers 16, 18, 44, 45, 46 are skewed: how many are in our most skewed quarter", 5, 5,
              n_found, "layers", 0.0, "Qwen3-30B-A3B, 4,010 prompt tokens; 1.25 by chance"),
        Claim("load over the mean on the busier of 2 GPUs, linear: largest of our traces", 1.0,
              100.0, 100 * max(gain), "%", 0.0, stated=False, neutral=None,
              reason=", ".join(f"{n} {100 * g:.1f}%" for n, g in zip(TRACES, gain, strict=True))),
    ]  # fmt: skip

    draw = lines(rows, "layer", "cv", "trace", ylabel="variation of the experts' load")
    title = "Expert activation by layer"
    return Reproduction("figure_3", title, rows, claims, draw)


def figure_4() -> Reproduction:
    """Inter-layer affinity: how much the most frequent pairs carry, and what an anchor does."""
    rows: list[dict[str, Any]] = []
    for name, layers in TRACES.items():
        trace = open_trace(name)
        counts = transitions(trace, np.arange(trace.n_requests))
        load, experts = _load(trace), trace.n_experts
        share = counts / counts.sum(axis=(1, 2), keepdims=True)
        chance = share.sum(axis=2)[:, :, None] * share.sum(axis=1)[:, None]
        flat = np.sort(share.reshape(len(share), -1), axis=1)[:, ::-1]
        often = counts >= 100
        lift = np.where(often & (chance > 0), share / np.where(chance > 0, chance, 1.0), 0.0)
        for pairs in _PAIRS:
            linked = linked_experts(counts, pairs)
            wanted = (linked > 0).sum(axis=1)
            rows.append(
                {"trace": name, "pairs": pairs, "share_%": 100 * flat[:, :pairs].sum(1).mean()}
                | {"share_of_all_pairs_%": 100 * pairs / experts**2}
                | {"largest_lift": float(lift.max())}
                | {"linked_experts": float(wanted.mean()), "most": int(wanted.max())}
                | {"room": experts // 2}
                | {"left_out": float(np.maximum(0, wanted - experts // 2).mean())}
                | {"busier_gpu": _even(load, anchored(load, linked, 2, 0), 2)}
                | {"seams": -(-layers // trace.n_layers) - 1}
            )
    own = {(row["trace"], row["pairs"]): row for row in rows}
    real = own[_REAL, 128]
    claims = [
        Claim("affinity is sparse: the top 128 pairs carry ten times their share of pairs or more",
              10.0, math.inf, real["share_%"] / real["share_of_all_pairs_%"], "x", 0.0,
              f"{real['share_%']:.1f}% of transitions", stated=False, neutral=None),
        Claim("an anchor keeps the load balanced: the busier of 2 GPUs at 64, 128 and 256 pairs",
              1.0, 1.05, own[_REAL, 256]["busier_gpu"], "x", 0.0,
              ", ".join(f"{p}: {own[_REAL, p]['busier_gpu']:.3f}" for p in _PAIRS),
              stated=False, neutral=None),
    ]  # fmt: skip

    draw = lines(rows, "pairs", "busier_gpu", "trace", xlabel="pairs of M a layer")
    title = "Inter-layer affinity"
    return Reproduction("figure_4", title, rows, claims, draw)


def crossings(quick: bool) -> Reproduction:
    """Token-expert pairs that leave their engine's GPU: k (G - 1) / G under every placement."""
    rows: list[dict[str, Any]] = []
    steps = 2 if quick else 12
    for name in TRACES:
        trace = open_trace(name)
        requests = np.arange(trace.n_requests)
        calibration = calibration_of(trace, requests)
        for gpus in (2, 4):
            cluster = Cluster(1, gpus)
            batches = decode_batches(trace, requests, gpus, 128, steps)
            for word in _PLACEMENTS:
                placement = place(trace, calibration, word, cluster, 0)
                counted = measure(batches, placement, replica_choice("source"), np.zeros(gpus, int))
                expected = trace.top_k * (gpus - 1) / gpus
                rows.append(
                    {"trace": name, "gpus": gpus, "placement": word, "expected": expected}
                    | {"a_copy_an_expert": counted.per_token(counted.inside_pairs)}
                    | {"a_copy_a_gpu": counted.per_token(counted.inside)}
                )
    off = [percent(r["a_copy_an_expert"], r["expected"]) for r in rows]
    both = ([r["a_copy_a_gpu"] for r in rows if r["placement"] == w] for w in ("gimbal", "linear"))
    deduplicated = list(map(percent, *both))
    claims = [
        Claim("co-location of linked experts cuts traffic (pplx): copies against k (G - 1) / G, "
              "farthest of all placements", -50.0, -5.0, max(off, key=abs), tolerance=0.0,
              reason="a token returns home after every layer; sampling error", stated=False),
        Claim("the same with a copy a GPU (deepep_ht): Gimbal against linear, farthest",
              -50.0, -5.0, max(deduplicated, key=abs), tolerance=0.0,
              reason="pairs within a layer alone could change it", stated=False),
    ]  # fmt: skip

    over = [r | {"over_expected": r["a_copy_an_expert"] / r["expected"]} for r in rows]
    draw = bars(over, ("trace", "placement"), "over_expected", "gpus")
    title = "Crossings of token-expert pairs"
    return Reproduction("crossings", title, rows, claims, draw)
