"""Which placement is fastest where: by tokens of a step and network, on 2 nodes x 2 H100.

Times are the tables'; inside nodes NVLink's roofline, between them the NIC's line rate. Steps of up
to 128 tokens a GPU are decode steps, others compute prompts. Each seed clusters anew and draws
other steps."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.charts import Draw, Rows, field
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels.all_to_all import AllToAll, build_all_to_all
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.cost_tables import RankMoE
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.planning.slo import paired_percent
from eldr_sim.planning.studies.figures import Reproduction
from eldr_sim.policies.placement.base import Placement
from studies.expert_traffic import decode_batches, layer_times, measure, prompt_batches
from studies.grace.figures import TWO_BY_TWO
from studies.grace.settings import (
    AFFINITY,
    DR_TAR,
    HG,
    OTHERS,
    TRACES,
    VANILLA,
    Evaluation,
    Scheme,
    Source,
    place,
    replica_choice,
    requests_of,
)

#: Tokens of each GPU in a step, and line rates of a GPU's NIC, GB/s.
MAP_TOKENS = (8, 32, 128, 512, 2048, 8192)
MAP_NETWORK = (1.5, 3.0, 6.0, 12.5, 25.0, 50.0, 100.0)
#: Those for which placements are fitted one by one.
BOTTLENECK_TOKENS = (32, 128, 2048)
BOTTLENECK_NETWORK = (3.0, 12.5, 50.0)
SCHEMES = (
    VANILLA,
    Scheme("EPLB", "eplb"),
    HG,
    DR_TAR,
    AFFINITY,
    Scheme("affinity, 0", "affinity:resolution=0"),
)
_DECODE_TOKENS = 128  # a GPU's steps of up to so many are taken as decode steps
_TIME_AWARE = "time aware"


class _Hardware(NamedTuple):
    moe: RankMoE
    networks: dict[float, AllToAll]  #: by line rate, GB/s


def placement_map(evaluation: Evaluation) -> Reproduction:
    """Return the fastest placement by tokens a GPU and network."""
    rows = _rows(evaluation, MAP_TOKENS, MAP_NETWORK, fit=False)
    title = "Fastest placement by tokens a GPU and network, 2x2 H100"
    return Reproduction("map", title, rows, [], _drawn(rows))


def bottleneck(evaluation: Evaluation) -> Reproduction:
    """Return what placements gain that are fitted on the time of just such steps."""
    rows = _rows(evaluation, BOTTLENECK_TOKENS, BOTTLENECK_NETWORK, fit=True)
    title = "Experts placed by the time of a layer, 2x2 H100"
    return Reproduction("bottleneck", title, rows, [], _drawn(rows))


def _drawn(rows: Rows) -> Draw:
    return field(rows, "network_gb_s", "tokens_per_gpu", "fastest", "trace", "{}")


def _rows(
    evaluation: Evaluation, tokens: Sequence[int], rates: Sequence[float], *, fit: bool
) -> list[dict[str, Any]]:
    return [
        row
        for source in OTHERS
        for n in tokens
        for row in _cells(evaluation, source, n, _hardware(source, rates), fit=fit)
    ]


def _hardware(source: Source, rates: Sequence[float]) -> _Hardware:
    model, h100, cluster = load_model(TRACES[source.trace]), load_gpu("H100"), TWO_BY_TWO
    step_time = build_step_time_model(
        model,
        h100,
        max_num_seqs=1024,
        max_model_len=1024,
        parallelism=Parallelism(1, True, cluster.n_ranks),
    )
    networks = {
        rate: build_all_to_all(
            model,
            h100.model_copy(update={"name": "H100, NIC", "nic_bandwidth": 1e9 * rate}),
            "deepep_ht",
            cluster.n_ranks,
            gpus_per_node=cluster.gpus_per_node,
        )
        for rate in rates
    }
    moe = step_time.rank_moe(model.n_experts, 4 * MAP_TOKENS[-1] * model.top_k)
    return _Hardware(moe, networks)


def _cells(
    evaluation: Evaluation, source: Source, tokens: int, hardware: _Hardware, *, fit: bool
) -> list[dict[str, Any]]:
    """Return a row for each network: the time of each scheme against Vanilla's, and the fastest.
    With ``fit`` a placement is fitted for each network beside the others."""
    found: dict[tuple[str, float], list[float]] = {}
    for seed in evaluation.seeds:
        for key, seconds in _times(evaluation, source, tokens, hardware, seed, fit).items():
            found.setdefault(key, []).append(seconds)
    rows = []
    for rate in hardware.networks:
        own = {label: times for (label, at), times in found.items() if at == rate}
        change = {label: paired_percent(times, own[VANILLA.label]) for label, times in own.items()}
        best = min(own, key=lambda label: change[label].mean)
        level = [
            label
            for label, times in own.items()
            if label != best and not paired_percent(times, own[best]).low > 0
        ]
        rows.append(
            {"trace": source.label, "tokens_per_gpu": tokens, "network_gb_s": rate}
            | {"fastest": best, "not_told_apart": ", ".join(level)}
            | {f"{label}_against_vanilla": span.mean for label, span in change.items()}
            | {f"{label}_low": span.low for label, span in change.items()}
            | {f"{label}_high": span.high for label, span in change.items()}
            | {"vanilla_us": 1e6 * float(np.mean(own[VANILLA.label]))}
        )
    return rows


def _times(
    evaluation: Evaluation, source: Source, tokens: int, hardware: _Hardware, seed: int, fit: bool
) -> dict[tuple[str, float], float]:
    """Return the time of a layer by scheme and network, s."""
    cluster, trace = TWO_BY_TWO, evaluation.trace(source.trace)
    decode = tokens <= _DECODE_TOKENS
    make = decode_batches if decode else prompt_batches
    requests = requests_of(trace, False, None)
    batches = make(trace, requests, cluster.n_ranks, tokens, max(1, 256 // tokens), seed)

    def priced(placement: Placement, choice: str, rates: Sequence[float]) -> list[float]:
        traffic = measure(batches, placement, replica_choice(choice), cluster.node_of_rank)
        return [
            layer_times(traffic, hardware.moe, hardware.networks[r], prompts=not decode).total_s
            for r in rates
        ]

    found, rates = {}, list(hardware.networks)
    for scheme in SCHEMES:
        placements = evaluation.placements(source, scheme.placement, cluster)
        placement = placements[min(seed, len(placements) - 1)]
        times = priced(placement, scheme.choice, rates)
        found.update({(scheme.label, rate): t for rate, t in zip(rates, times, strict=True)})
    if fit:
        word = f"time_aware:tokens_per_rank={tokens},tokens={'decode' if decode else 'prompt'}"
        calibration = evaluation.calibration(source)
        for rate, network in hardware.networks.items():
            placement = place(trace, calibration, word, cluster, seed, hardware.moe, network)
            (found[_TIME_AWARE, rate],) = priced(placement, "source", [rate])
    return found
