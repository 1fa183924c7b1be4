"""Beyond METRO's paper: a placement gone stale, moved again while serving, or chosen around.

EPLB's placement is made for the domain mix at the start, which moves to another domain until the
run ends. EPLB can place the experts again by what its last steps chose, and pays for the bytes that
move; METRO takes the stale placement as it is.
"""

from collections.abc import Sequence
from typing import Any

from eldr_sim.charts import bars
from eldr_sim.traces.routing.format import REFERENCE_TRACE
from eldr_sim.validation.reproduce.metro.results import BUSIEST, CHARGED, REAL, TPOT
from eldr_sim.validation.reproduce.reproduction import Reproduction, Runner, change, mean

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
    """Serve a mix that moves from code to Chinese, paired over seeds."""
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
