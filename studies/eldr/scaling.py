"""ELDR's overheads, prefix caching and expert parallelism (Table 1, Fig. 17 and 18)."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from eldr_sim.charts import bars, lines
from eldr_sim.planning.studies.figures import Claim, Reproduction, Runner, percent
from eldr_sim.policies.base import PolicyContext, RequestInfo, Workers
from eldr_sim.policies.eldr.artifact import fit
from eldr_sim.policies.eldr.router import EldrPolicy
from eldr_sim.traces.routing.calibration import calibration_set
from eldr_sim.traces.routing.format import RoutingTrace
from studies.eldr.results import P50, P99, TTFT, mean_difference, run_grid

_FREE = {"policy": "eldr:capture_overhead_ms=0,routing_overhead_ms=0"}


def table_1(runner: Runner, trace: RoutingTrace) -> Reproduction:
    """Overheads of signatures. The cost of the capture, which runs on a GPU, is the paper's and is
    charged to every prefill step; the router's decision is timed in this process."""
    case: dict[str, Any] = {"policy": "eldr", "request_rate": 60.0}
    with_costs, without = runner.run([case, case | _FREE])
    added = with_costs[TTFT] - without[TTFT]
    decision_ms = _decision_ms(trace)
    rows = [
        {"component": "capture and routing, paper's costs: added to median TTFT", "ms": added},
        {"component": "routing decision, this implementation, new signature", "ms": decision_ms},
        {"component": "median TTFT without the costs", "ms": without[TTFT]},
    ]
    claims = [
        Claim("added to the median TTFT (the costs charged are the paper's)", 0.86, 0.86, added,
              "ms", 0.4, given=True),
        Claim("share of the median TTFT (the costs charged are the paper's)", 1.2, 1.2,
              percent(with_costs[TTFT], without[TTFT]), tolerance=0.8, given=True),
        Claim("median TTFT at 60 requests/s", 69.0, 69.0, with_costs[TTFT], "ms", 7.0,
              "prompts as long as the data sets', without chat templates"),
        Claim("routing decision (tau-JSQ at the proxy)", 0.15, 0.15, decision_ms, "ms", 0.1,
              "the decision alone; the paper's is timed in its proxy"),
    ]  # fmt: skip
    draw = bars(rows, "component", "ms", scale="log")
    return Reproduction("table_1", "Overheads", rows, claims, draw)


def _decision_ms(trace: RoutingTrace) -> float:
    """Return the median time of a routing decision on a new signature, ms."""
    calibration = calibration_set(trace, workload="task")
    fitted = fit(calibration, 16, 0)
    policy = EldrPolicy(PolicyContext(16, np.random.default_rng(0), artifact=fitted))
    workers = Workers.idle(np.arange(16))
    taken = []
    for i, counts in enumerate(calibration.scores("count")):
        request = RequestInfo(i, 100, 0, signature=counts)
        start = time.perf_counter()
        policy.select(request, workers)
        taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken)


def figure_17(runner: Runner) -> Reproduction:
    """Prefix cache on and off at 100 requests/s with shared prompts (section 6.3)."""
    base = {"model": "GPT-OSS-120B", "request_rate": 100.0, "prompts": "shared"}
    cases = [
        base | {"policy": policy, "enable_prefix_caching": cache}
        for cache in (False, True)
        for policy in ("round_robin", "eldr")
    ]
    summaries = runner.run(cases)
    rows = [
        {"prefix_cache": case["enable_prefix_caching"], "policy": case["policy"]}
        | {m: summary[m] for m in (TTFT, P50, P99)}
        | {"hit_rate": summary["prefix_cache_hit_rate"]}
        for case, summary in zip(cases, summaries, strict=True)
    ]
    rr_off, eldr_off, rr_on, eldr_on = summaries
    reason = (
        f"hit rate {100 * rr_on['prefix_cache_hit_rate']:.0f}% of the prompts' tokens; a "
        "step for the uncached tokens still reads all experts, so TTFT does not collapse"
    )
    claims = [
        Claim("the cache does not change round_robin's median TPOT", 0.0, 0.0,
              percent(rr_on[P50], rr_off[P50])),
        *(
            Claim(f"eldr's {name} TPOT gain, cache {state}", gain, gain,
                  percent(eldr[metric], rr[metric]), tolerance=2.0,
                  reason="drawn requests of a task are alike to a degree that recordings are not")
            for name, metric, gain in (("median", P50, -13.0), ("p99", P99, -5.0))
            for state, eldr, rr in (("off", eldr_off, rr_off), ("on", eldr_on, rr_on))
        ),
        Claim("the cache collapses TTFT", -100.0, -50.0, percent(rr_on[TTFT], rr_off[TTFT]),
              reason=reason, stated=False),
    ]  # fmt: skip
    draw = bars(rows, ("policy", "prefix_cache"), (TTFT, P50, P99))
    return Reproduction("figure_17", "Prefix cache, GPT-OSS-120B", rows, claims, draw)


def figure_18(runner: Runner, rates: Sequence[float]) -> Reproduction:
    """Qwen3-235B-A22B at 2P8D with TP=4 and EP=4 per worker: 40 GPUs (section 6.4)."""
    fields = {
        "model": "Qwen3-235B-A22B",
        "topology": "2P8D",
        "tensor_parallel_size": 4,
        "enable_expert_parallel": True,
        "workload": "language",
    }
    reference = run_grid(runner, ("round_robin",), rates, **fields)
    rows: list[dict[str, Any]] = []
    claims = []
    for placement in ("eldr", "linear"):
        runs = reference | run_grid(runner, ("eldr",), rates, expert_placement=placement, **fields)
        ours = {m: mean_difference(runs, "eldr", "round_robin", m) for m in (P50, P99)}
        for rate in rates:
            eldr, other = runs["eldr", rate], runs["round_robin", rate]
            rows.append(
                {"placement": placement, "request_rate": rate}
                | {f"{m}_percent": percent(eldr[m], other[m]) for m in (P50, P99)}
                | {"busiest_rank_experts": eldr["mean_busiest_rank_experts_per_step"]}
            )
        reason = "routing of a preset that stretches Qwen3-30B-A3B's 48 layers"
        if placement == "eldr":
            claims += [
                Claim("median TPOT against round_robin", -4.3, -2.7, ours[P50], reason=reason),
                Claim("p99 TPOT against round_robin", -2.0, -0.6, ours[P99], reason=reason),
            ]
        else:
            own = sum(r[f"{P50}_percent"] for r in rows if r["placement"] == "eldr") / len(rates)
            claims.append(
                Claim("the placement by cluster helps: median TPOT against the linear one's",
                      -100.0, 0.0, own - ours[P50], "points", 0.0, stated=False)
            )  # fmt: skip

    draw = lines(rows, "request_rate", (f"{P50}_percent", f"{P99}_percent"), "placement")
    return Reproduction("figure_18", "235B under expert parallelism", rows, claims, draw)
