"""Beyond METRO's paper: expert-aware routing between groups, and redundant experts inside them.

Both reduce the activated experts of a group's busiest GPU, by different means. Requests that choose
the same experts, together in one group, make the union of its experts smaller; redundant experts
let the union be spread evenly. Neither alone does what both do: an even spread needs slack below
``experts / GPUs``, and a small union lies on the GPUs unevenly."""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.charts import bars
from eldr_sim.planning.runs.run_cache import Summary
from eldr_sim.planning.slo import t_interval
from eldr_sim.planning.studies.figures import Reproduction, Runner, change, mean, spread

#: Engines of a decode group, a GPU each, and groups.
_ENGINES, _GROUPS = 8, 4
#: 1.125 instances an expert.
_REDUNDANT = 16
_CLUSTER: dict[str, Any] = {
    "model": "Qwen3-30B-A3B",
    "gpu": "H100",
    "topology": f"8P{_GROUPS}D",
    "trace": "reference-moe",
    "all2all_backend": "allgather_alltoall",
    "output_len": 128,
    "warmup": 1.5,
    "duration": 2.5,
}
#: Requests/s by tokens in the batch of a group, roughly: steps take 7 to 8 ms.
_RATES = {64: 275.0, 256: 1035.0}
_POLICIES = {
    "jsq": "jsq",
    "domain": "domain",
    "eldr": "eldr:capture_overhead_ms=0,routing_overhead_ms=0,refit_s=0",
}
BUSIEST, MOE, TPOT, P99 = "busiest_experts", "moe_ms", "median_tpot_ms", "p99_tpot_ms"
_METRICS = (BUSIEST, MOE, TPOT, P99)


class Variant(NamedTuple):
    """Where the experts of a group lie, and which instance computes."""

    name: str
    placement: str = "eplb"
    choice: str = "even"
    redundant: int = _REDUNDANT


_NONE = Variant("no redundancy", "linear", redundant=0)
_FREE = tuple(
    Variant(name, choice=f"{name}:overhead_us=0") for name in ("metro", "metro_sorted", "optimal")
)
_VARIANTS = (_NONE, Variant("even"), *_FREE)
#: With what METRO's kernel took on an A100; the placements by ELDR's clusters need its router.
_CHARGED = Variant("metro, 26 us a layer", choice="metro")
_OF_CLUSTERS = (
    Variant("placed by cluster, no redundancy", "eldr", redundant=0),
    Variant("placed by cluster, metro_sorted", "eplb:load=cluster", "metro_sorted:overhead_us=0"),
    Variant("placed by cluster, optimal", "eplb:load=cluster", "optimal:overhead_us=0"),
)


class Setting(NamedTuple):
    """A load."""

    workload: str
    trace_replay: str
    batch: int


def locality(runner: Runner, quick: bool = False) -> Reproduction:
    """ELDR's routing between groups times METRO's choice inside, paired, four groups of 8 H100,
    from jsq without redundant experts. ``interaction``: of a pair less the sum of both, points."""
    seeds = range(2 if quick else 5)
    made = runner.paired({cell: _case(*cell) for cell in _cells(quick)}, seeds)
    runs = {cell: [_figures(run) for run in own] for cell, own in made.items()}
    rows = [_row(cell, runs) for cell in runs]
    panel, ends = Setting._fields, (f"{BUSIEST}_percent_low", f"{BUSIEST}_percent_high")
    draw = bars(rows, "redundancy", f"{BUSIEST}_percent", "policy", panel, ends=ends)
    title = "ELDR between groups, METRO inside them (Qwen3-30B-A3B, 4 groups of 8 H100)"
    return Reproduction("beyond_locality", title, rows, [], draw)


_Cell = tuple[Setting, str, Variant]


def _cells(quick: bool) -> Iterator[_Cell]:
    """Return what is simulated, the reference of a setting first."""
    if quick:
        yield from product([Setting("task", "own", 64)], ("jsq", "eldr"), (_NONE, _FREE[1]))
        return
    some = (_NONE, _FREE[1])
    for workload in ("task", "language"):
        own, other = (Setting(workload, replay, 64) for replay in ("own", "same_domain"))
        yield from product([own], ("jsq", "eldr"), (*_VARIANTS, _CHARGED))
        yield from product([own], ["domain"], some)
        yield from product([own], ["eldr"], _OF_CLUSTERS)
        yield from product([other], _POLICIES, some)
        yield other, "eldr", _OF_CLUSTERS[1]
    yield from product([Setting("task", "own", 256)], ("jsq", "eldr"), some)


def _case(setting: Setting, policy: str, variant: Variant) -> dict[str, Any]:
    return _CLUSTER | {
        "workload": setting.workload,
        "trace_replay": setting.trace_replay,
        "request_rate": _RATES[setting.batch],
        "policy": _POLICIES[policy],
        "replica_choice": variant.choice,
        "decode": {
            "data_parallel_size": _ENGINES,
            "enable_expert_parallel": True,
            "expert_placement": variant.placement,
            "num_redundant_experts": variant.redundant,
        },
    }


def _figures(summary: Summary) -> dict[str, float]:
    return {
        BUSIEST: summary["mean_busiest_rank_experts_per_step"],
        MOE: summary["group"]["mean_moe_ms"],
        TPOT: summary["median_tpot_ms"],
        P99: summary["p99_tpot_ms"],
        "batch": summary["mean_decode_batch"] * summary["group"]["mean_busy_engines"],
        "experts": summary["mean_active_experts_per_step"],
    }


def _row(cell: _Cell, runs: dict[_Cell, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the means of a cell, and how far it is from jsq without redundant experts."""
    setting, policy, variant = cell
    plain = runs[setting, "jsq", _NONE]
    apart = runs[setting, policy, _NONE], runs.get((setting, "jsq", variant), [])
    row: dict[str, Any] = {**setting._asdict(), "policy": policy, "redundancy": variant.name}
    row |= {"simulated_batch": mean(runs[cell], "batch")}
    row |= {"activated_experts": mean(runs[cell], "experts")}
    for metric in _METRICS:
        row[metric] = mean(runs[cell], metric)
        row |= spread(f"{metric}_percent", change(runs[cell], plain, metric))
        if metric in (BUSIEST, MOE) and policy != "jsq" and variant != _NONE and apart[1]:
            four = ([run[metric] for run in own] for own in (runs[cell], *apart, plain))
            both, routed, even, none = map(np.array, four)
            points = (100.0 * (both - routed - even + none) / none).tolist()
            row |= spread(f"{metric}_interaction", t_interval(points))
        elif metric in (BUSIEST, MOE):
            row |= dict.fromkeys(f"{metric}_interaction{end}" for end in ("", "_low", "_high"))
    return row
