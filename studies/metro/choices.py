"""Beyond METRO's paper: every choice of copies that serving systems have, on the same steps.

EPLB's placement, and steps without queues: recorded or drawn tokens spread over 8 H100 (DeepSeek-V3
on 16), each step a decode step, or one of prompts. Times are a MoE layer's: the slowest GPU's
experts, and dispatch and combine with DeepEP's copies. What choosing takes is not in them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from eldr_sim.charts import bars, field
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels.all_to_all import build_all_to_all
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.planning.slo import paired_percent
from eldr_sim.planning.studies.figures import (
    Claim,
    Reproduction,
    Runner,
    change,
    grouped,
    mean,
    spread,
)
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext
from eldr_sim.simulator.control.relocation import expert_links, expert_moves, transfer_of
from eldr_sim.traces.routing.format import REFERENCE_TRACE
from studies.expert_traffic import Batch, layer_times, measure
from studies.metro.results import BUSIEST, CHARGED, REAL, TPOT
from studies.metro.routing import Routing, rank_times

#: Choices, and what tables call them.
CHOICES = {
    "even": "EPLB's split", "hash": "vLLM's hash", "source": "own GPU first", "metro": "METRO",
    "metro_sorted": "METRO, sorted", "optimal": "fewest experts", "time_aware": "by time",
    "lplb": "LPLB", "waterfill": "waterfill", "capped": "capacity-limited",
}  # fmt: skip
#: METRO's kernel and its like choose in decode steps alone; prompts keep EPLB's split.
_DECODE_ONLY = ("metro", "metro_sorted", "optimal")
RATIO = 1.125
SEEDS = range(3)
_NONE = "no copies"


def choices(routings: Sequence[Routing], sizes: Sequence[tuple[int, bool]]) -> Reproduction:
    """Return every choice against no copies; ``sizes``: tokens of a step, and whether of
    prompts."""
    rows = [
        row for routing in routings for size, prompts in sizes
        for row in _rows(routing, size, prompts)
    ]  # fmt: skip
    cells = grouped(rows, lambda row: (row["routing"], row["tokens"], row["step"]))
    fastest = [
        {"routing": routing, "tokens": f"{size:,} ({step})"}
        | {"fastest": min(own, key=lambda row: row["layer_%"])["choice"]}
        for (routing, size, step), own in cells.items()
    ]
    claims = [
        _no_worse(rows, choice, size, prompts)
        for size, prompts in sizes
        for choice in CHOICES.values()
        if any(row["choice"] == choice and row["tokens"] == size for row in rows)
    ]
    draw = field(fastest, "tokens", "routing", "fastest", spell="{}")
    title = f"choices of copies at {RATIO} instances an expert (not in the paper)"
    return Reproduction("choices", title, rows, claims, draw)


def _rows(routing: Routing, size: int, prompts: bool) -> list[dict[str, Any]]:
    """Return a row for each choice: time, busiest GPU's experts and tokens, with intervals."""
    model, gpu, n = load_model(routing.model), load_gpu("H100"), routing.n_ranks
    home = np.arange(size) * n // size
    node = np.zeros(n, np.int64)
    network = build_all_to_all(model, gpu, "deepep_ht", n, gpus_per_node=n)
    found: dict[str, dict[str, list[float]]] = {}
    for name in (_NONE, *(c for c in CHOICES if not (prompts and c in _DECODE_ONLY))):
        placement = routing.placement(1.0 if name == _NONE else RATIO)
        slots = placement.expert.shape[1] // n
        moe = rank_times(routing.model, "H100", n, slots, size)
        context = PolicyContext(1, np.random.default_rng(0), rank_moe=moe)
        choice = registry.replica_choice("hash" if name == _NONE else name, context)
        own: dict[str, list[float]] = {}
        for seed in SEEDS:
            (rows,) = routing.batches(size, 1, seed)
            step = Batch(np.asarray(routing.trace.experts[rows]), home)
            traffic = measure([step], placement, choice, node)
            times = layer_times(traffic, moe, network, prompts=prompts)
            figures = {
                "layer": 1e6 * times.total_s, "moe": 1e6 * times.moe_s,
                "experts": traffic.busiest_experts, "tokens_over_mean": traffic.load_max,
            }  # fmt: skip
            for figure, value in figures.items():
                own.setdefault(figure, []).append(value)
        found[CHOICES.get(name, name)] = own
    return [
        {"routing": routing.name, "gpus": n, "tokens": size, "choice": name}
        | {"step": "prompts" if prompts else "decode"}
        | {f"{figure}_us": float(np.mean(own[figure])) for figure in ("layer", "moe")}
        | {f"busiest_{f}": float(np.mean(own[f])) for f in ("experts", "tokens_over_mean")}
        | spread("layer_%", paired_percent(own["layer"], found[_NONE]["layer"]))
        for name, own in found.items()
    ]


def _no_worse(rows: Sequence[dict[str, Any]], choice: str, size: int, prompts: bool) -> Claim:
    """Say whether a choice is no slower than no copies, as the median of routings."""
    own = {r["routing"]: r for r in rows if (r["choice"], r["tokens"]) == (choice, size)}
    each = sorted(own, key=lambda name: own[name]["layer_%"])
    median = own[each[len(each) // 2]]
    said = ", ".join(f"{name} {own[name]['layer_%']:+.1f}" for name in (each[0], each[-1]))
    what = "prompt tokens" if prompts else "sequences"
    return Claim(
        f"{choice}, {size:,} {what}: a layer takes less than without copies, median routing",
        -100.0, -0.1, median["layer_%"], "%", 0.0, said, stated=False,
        interval=(median["layer_%_low"], median["layer_%_high"]),
    )  # fmt: skip


_METRO = {"replica_choice": "metro:overhead_us=0", "all2all_backend": "allgather_alltoall"}
_MOVED = {"eplb_interval": 200, "eplb_window": 200}
#: Fields of each way to serve; all but the first two have 1.125 instances an expert.
VARIANTS: dict[str, dict[str, Any]] = {
    "no replicas, linear": {"expert_placement": "linear", "num_redundant_experts": 0},
    "no replicas, EPLB": {"num_redundant_experts": 0},
    "EPLB, stale": {},
    "EPLB, moved": _MOVED,
    "EPLB, moved meanwhile": _MOVED | {"eplb_async": True},
    "METRO, stale": _METRO,
    CHARGED + ", stale": _METRO | {"replica_choice": "metro"},
    "METRO, moved meanwhile": _METRO | _MOVED | {"eplb_async": True},
}
P99_ITL = "p99_itl_ms"


def drift(runner: Runner, seeds: Sequence[int], waves: int) -> Reproduction:
    """Serve a mix that moves from code to Chinese, paired over seeds: EPLB's placement of the start
    goes stale, is made again by its last steps' experts (and pays for the bytes), or stays, under
    METRO."""
    base = REAL.fields(1.125) | {
        "workload": "trace", "trace": REFERENCE_TRACE, "request_rate": "inf",
        "num_requests": waves * REAL.in_flight, "output_len": 256,
        "domain_mix": {"code": 1.0}, "domain_mix_end": {"zh": 1.0},
    }  # fmt: skip
    runs = runner.paired({name: base | fields for name, fields in VARIANTS.items()}, seeds)
    ends = ("tpot_vs_stale_%", "tpot_vs_stale_low_%", "tpot_vs_stale_high_%")
    rows = [
        {"variant": name, **{m: mean(own, m) for m in (TPOT, P99_ITL, BUSIEST)}}
        | dict(zip(ends, change(own, runs["EPLB, stale"], TPOT), strict=True))
        | {"relocations": mean(own, "relocations")}
        | {"stall_s": mean(own, "relocation_stall_s"), "seeds": len(own)}
        for name, own in runs.items()
    ]
    draw = bars(rows, "variant", ends[0], ends=ends[1:])
    return Reproduction("drift", "a placement gone stale (not in the paper)", rows, [], draw)


#: vLLM's step_interval, and the choices whose placement moves.
INTERVAL = 3000
_MOVING = ("even", "metro", "lplb")


def migration(routings: Sequence[Routing], sizes: Sequence[int]) -> Reproduction:
    """Return what moving experts costs the steps beside it, and what it gives, by choice.

    A placement fitted on calibration requests becomes that of the tokens which are served. While
    experts move, dispatch and combine have half of the links, so they take twice as long; nodes
    have 8 GPUs. ``repaid_after``: steps of the new placement that make good the time lost.
    """
    rows = [row for routing in routings for size in sizes for row in _moved(routing, size)]
    by_size = grouped(rows, lambda row: (row["tokens"], row["choice"]))
    claims = []
    for (size, choice), own in by_size.items():
        own.sort(key=lambda row: row["net_%"])
        row = own[len(own) // 2]
        ends = f"{own[0]['net_%']:+.2f} to {own[-1]['net_%']:+.2f}% over {len(own)} routings"
        claims.append(
            Claim(f"{choice}, {size:,} sequences: experts moved every {INTERVAL:,} steps, a layer "
                  "takes less than with the stale placement, median routing", -100.0, -0.1,
                  row["net_%"], tolerance=0.0, stated=False, reason=ends)
        )  # fmt: skip
    draw = bars(rows, ("routing", "tokens"), ("moving_%", "moved_%", "net_%"), "choice")
    title = "what steps pay while experts move, and gain when they have (not in the paper)"
    return Reproduction("migration", title, rows, claims, draw)


def _moved(routing: Routing, size: int) -> list[dict[str, Any]]:
    """Return a row for each choice: a layer while experts move and after, against before."""
    model, gpu, n = load_model(routing.model), load_gpu("H100"), routing.n_ranks
    before, after = routing.placement(RATIO), routing.placement(RATIO, routing.served)
    moves = expert_moves(before, after, model.n_experts, 8)
    links = expert_links(gpu, model.bytes_per_expert, n, 8)
    transfer = transfer_of(moves, links, model.n_moe_layers)
    network = build_all_to_all(model, gpu, "deepep_ht", n, gpus_per_node=min(n, 8))
    home, node = np.arange(size) * n // size, np.arange(n) // 8
    moe = rank_times(routing.model, "H100", n, before.expert.shape[1] // n, size)
    context = PolicyContext(1, np.random.default_rng(0), rank_moe=moe)
    rows = []
    for name in _MOVING:
        choice = registry.replica_choice(name, context)
        found: dict[str, list[float]] = {"stale": [], "moving": [], "moved": []}
        for seed in SEEDS:
            (drawn,) = routing.batches(size, 1, seed)
            step = Batch(np.asarray(routing.trace.experts[drawn]), home)
            for placement, keys in ((before, ("stale", "moving")), (after, ("moved",))):
                traffic = measure([step], placement, choice, node)
                times = layer_times(traffic, moe, network, prompts=False)
                for key in keys:
                    more = times.all_to_all_s if key == "moving" else 0.0
                    found[key].append(times.total_s + more)
        stale, moving, moved = (float(np.mean(own)) for own in found.values())
        steps = transfer.seconds / (moving * model.n_moe_layers)
        lost, won = steps * (moving - stale), stale - moved
        net = (lost + (INTERVAL - steps) * moved + steps * stale) / (INTERVAL * stale)
        rows.append(
            {"routing": routing.name, "gpus": n, "tokens": size, "choice": CHOICES[name]}
            | {"layer_us": 1e6 * stale, "moved_gb": transfer.inside_bytes / 1e9}
            | {"between_nodes_gb": transfer.between_bytes / 1e9}
            | {"transfer_ms": 1e3 * transfer.seconds, "steps_moving": steps}
            | spread("moving_%", paired_percent(found["moving"], found["stale"]))
            | spread("moved_%", paired_percent(found["moved"], found["stale"]))
            | {"net_%": 100 * (net - 1), "repaid_after": lost / won if won > 0 else None}
        )
    return rows
