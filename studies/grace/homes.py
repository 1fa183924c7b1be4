"""ELDR beside GRACE-MoE: requests routed to the engine where their experts are at home.

With a cluster of requests for each engine of a group the tokens of an engine choose similar
experts, so experts can be placed by the home of the tokens that use them. Copies are counted on
tokens drawn from the requests that each engine has served, at the placement that it had."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_sim.charts import bars
from eldr_sim.planning.slo import paired_percent, t_interval
from eldr_sim.planning.studies.figures import Reproduction
from eldr_sim.policies.placement.base import Placement
from eldr_sim.simulator.outcome.summary import summary_of
from eldr_sim.simulator.run import build_cluster, offered_load
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.workload import Workload
from studies.expert_traffic import Batch, measure
from studies.grace.figures import TWO_BY_TWO
from studies.grace.settings import replica_choice

_FREE = "capture_overhead_ms=0,routing_overhead_ms=0"
_BY_ENGINE = f"eldr:{_FREE},refit_s=0,unit=engine"
#: Decode policy and placement; the first is the reference.
CASES = {
    "jsq, linear": ("jsq", "linear"),
    "jsq, affinity": ("jsq", "affinity"),
    "ELDR by engine, linear": (_BY_ENGINE, "linear"),
    "ELDR by engine, affinity": (_BY_ENGINE, "affinity"),
    "ELDR by engine, home": (_BY_ENGINE, "home"),
    "ELDR by engine, time aware": (
        _BY_ENGINE,
        "time_aware:tokens_per_rank=64,tokens=decode,homes=clusters",
    ),
    "ELDR by engine, tau 0.2, home": (f"{_BY_ENGINE},tau=0.2", "home"),
}
#: All-to-all, which sends a copy for each node and GPU, or for each expert.
BACKENDS = ("deepep_ht", "deepep_ll")
_FIELDS: dict[str, Any] = {
    "frontend": "none",
    "model": "Qwen3-30B-A3B",
    "trace": "reference-moe",
    "gpu": "H100",
    "topology": "4P1D",
    "decode": {"data_parallel_size": 4, "enable_expert_parallel": True},
    "gpus_per_node": TWO_BY_TWO.gpus_per_node,
    "request_rate": 120.0,
    "num_requests": 600,
    "warmup": 1.5,
    "output_len": 128,
}
_TOKENS, _STEPS = 32, 16  # of each GPU, that copies are counted on


class Served(NamedTuple):
    """Figures of a run."""

    remote_pairs: float  #: of a token and layer, whose experts lie on another GPU
    copies: float  #: sent to other GPUs, one for each
    node_copies: float  #: sent to other nodes, one for each
    load_max: float  #: pairs of the busiest GPU over the mean
    experts_max: float  #: activated experts of the busiest GPU
    requests_max: float  #: requests of the engine with most over the mean
    tpot_ms: float
    p99_tpot_ms: float


def homes(seeds: Sequence[int], quick: bool = False) -> Reproduction:
    """Requests and experts placed together, 2 nodes x 2 H100, paired; ``quick``: half of it."""
    rows = []
    for workload in ("task",) if quick else ("task", "language"):
        for backend in BACKENDS[-1:] if quick else BACKENDS:
            runs = {
                case: [serve(*policies, workload, backend, seed) for seed in seeds]
                for case, policies in CASES.items()
            }
            reference = next(iter(runs.values()))
            rows += [
                {"workload": workload, "all_to_all": backend, "case": case, **_row(own, reference)}
                for case, own in runs.items()
            ]
    shown = ("remote_pairs", "copies", "load_max", "tpot_ms")
    draw = bars(rows, ("workload", "all_to_all"), shown, "case")
    title = "Experts placed by the home of their requests, 2x2 H100"
    return Reproduction("homes", title, rows, [], draw)


def serve(policy: str, placement: str, workload: str, backend: str, seed: int) -> Served:
    """Run a decode group of four engines and count its copies; all as a run's fields."""
    own = {"policy": policy, "expert_placement": placement, "seed": seed}
    config = make_config(_FIELDS | own | {"workload": workload, "all2all_backend": backend})
    prepared = prepare(config)
    requests, window = offered_load(config, prepared.trace)
    cluster = build_cluster(config, prepared, requests, window)
    record = cluster.run()
    summary = summary_of(config, replace(prepared, spec=cluster.spec), requests, record)
    worker = np.asarray(record.requests["decode_worker"], np.int64)
    assert prepared.trace is not None, "a model of experts"
    batches = served_batches(prepared.trace, requests, worker, seed)
    placed = placed_by(cluster.arrays.masks[cluster.spec.n_prefill], prepared.trace)
    traffic = measure(batches, placed, replica_choice("source"), TWO_BY_TWO.node_of_rank)
    tokens = int(traffic.tokens.sum()) * traffic.pairs.shape[1]
    sent = reached(batches, placed)
    count = np.bincount(worker[worker >= 0], minlength=TWO_BY_TWO.n_ranks)
    remote = float(traffic.between_pairs.sum() + traffic.inside_pairs.sum()) / tokens
    copies = sent, float(traffic.between.sum()) / tokens
    most = traffic.load_max, traffic.busiest_experts, float(count.max() / count.mean())
    latencies = (float(summary[f"{which}_tpot_ms"]) for which in ("mean", "p99"))
    return Served(remote, *copies, *most, *latencies)


def placed_by(masks: NDArray[np.uint64], trace: RoutingTrace) -> Placement:
    """Return where experts of one instance lie, by an engine's `rank_masks`, [ranks, words]."""
    words = -(-trace.n_experts // 64)
    as_bytes = np.ascontiguousarray(masks).astype("<u8").view(np.uint8)
    bits = np.unpackbits(as_bytes, axis=-1, bitorder="little")
    held = bits.reshape(len(masks), -1, 64 * words)[:, : trace.n_layers, : trace.n_experts]
    return Placement.of_ranks(np.asarray(held.argmax(axis=0), np.int64), len(masks))


def served_batches(trace: RoutingTrace, requests: Workload, worker: Any, seed: int) -> list[Batch]:
    """Return steps of tokens drawn from those that the requests of each engine generated."""
    rng = np.random.default_rng(seed)
    first, length = trace.decode_window(requests.decode_request.astype(np.int64))
    drawn = []
    for engine in range(TWO_BY_TWO.n_ranks):
        mine = np.flatnonzero(worker == engine)
        which = rng.choice(mine, size=_STEPS * _TOKENS)
        step = rng.integers(requests.output_len[which])
        turn = (requests.replay_offset[which] + step) % length[which]
        drawn.append((first[which] + turn).reshape(_STEPS, _TOKENS))
    home = np.arange(len(drawn)).repeat(_TOKENS)
    return [
        Batch(np.asarray(trace.experts[np.concatenate(rows)]), home)
        for rows in zip(*drawn, strict=True)
    ]


def reached(batches: Sequence[Batch], placement: Placement) -> float:
    """Return how many other GPUs a token is sent to in a layer."""
    total = tokens = 0
    for experts, home in batches:
        rank = placement.rank[np.arange(experts.shape[1])[:, None], experts]
        others = [((rank == r).any(axis=2) & (home != r)[:, None]) for r in range(4)]
        total += int(np.sum(others))
        tokens += experts.shape[0] * experts.shape[1]
    return total / tokens


def _row(own: Sequence[Served], reference: Sequence[Served]) -> dict[str, float]:
    """Return means, and the paired differences of what has an interval, %."""
    columns = (zip(*runs, strict=True) for runs in (own, reference))
    mine, theirs = (dict(zip(Served._fields, column, strict=True)) for column in columns)
    found = {name: t_interval(values).mean for name, values in mine.items()}
    for name in ("copies", "node_copies", "tpot_ms", "p99_tpot_ms"):
        names = (f"{name}_change", f"{name}_low", f"{name}_high")
        found |= zip(names, paired_percent(mine[name], theirs[name]), strict=True)
    return found
