"""Gimbal's Figures 11 and 12: prefix-cache hits of users who return to their engine."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.charts import bars
from eldr_sim.planning.runs.run_cache import Summary
from eldr_sim.planning.slo import t_interval
from eldr_sim.planning.studies.figures import Claim, Reproduction, change, mean, percent
from studies.gimbal.settings import FIELDS, OUTPUTS, Experiment, lognormal

#: Figure 11: vLLM's hits in five runs, and Gimbal's, the same in all.
VLLM_HITS, GIMBAL_HITS = (19888, 17056, 18800, 16096, 20416), 18992
VLLM_RATES, GIMBAL_RATE = (3.90, 3.30, 3.70, 3.20, 4.10), 3.80
_BLOCK = 16
_NEW_TOKENS = (60.0, 110.0)  # median and mean of what a user writes
_TURNS = 2.0
_RATE = 8.0  # requests per second
_THINKS_S = 10.0
_POLICIES = ("round_robin", "vllm_dp", "gimbal", "gimbal:reading=queues")


def t_test() -> tuple[float, float]:
    """Return t and the two-sided p of vLLM's five runs against Gimbal's one value."""
    from scipy.special import stdtr

    hits = np.array(VLLM_HITS, np.float64)
    t = (GIMBAL_HITS - hits.mean()) / (hits.std(ddof=1) / np.sqrt(len(hits)))
    return float(t), float(2 * stdtr(len(hits) - 1, -abs(t)))


def write_conversations(path: Path, n: int, seed: int) -> None:
    """Write ``n`` requests of users whose prompts hold the conversation so far."""
    rng = np.random.default_rng([seed, 23])
    requests: list[tuple[float, dict[str, Any]]] = []
    starts = np.cumsum(rng.exponential(_TURNS / _RATE, n))
    fresh = 0
    for user, start in enumerate(starts.tolist()):
        turns = int(rng.geometric(1.0 / _TURNS))
        written, answers = lognormal(rng, *_NEW_TOKENS, turns), lognormal(rng, *OUTPUTS, turns)
        length, when, blocks = 0, start, list[int]()
        for new, answer in zip(written.tolist(), answers.tolist(), strict=True):
            length += new
            more = length // _BLOCK - len(blocks)
            blocks = blocks + list(range(fresh, fresh + more))
            fresh += more
            line = {"timestamp_ms": round(1e3 * when), "input_length": length}
            line |= {"output_length": answer, "hash_ids": blocks, "session_id": str(user)}
            requests.append((when, line))
            length += answer
            when += float(rng.exponential(_THINKS_S))
    requests.sort(key=lambda request: request[0])
    path.write_text("\n".join(json.dumps(line) for _, line in requests[:n]))


def _measured(experiment: Experiment) -> tuple[dict[str, list[Summary]], list[dict[str, Any]]]:
    """Run the conversations under every policy; runs, and a row a policy."""
    n, seeds = 2 * experiment.scale.requests, max(5, experiment.scale.few)
    groups: dict[str, list[dict[str, Any]]] = {policy: [] for policy in _POLICIES}
    for seed in range(seeds):
        path = experiment.folder / f"conversations-{seed}.jsonl"
        write_conversations(path, n, seed)
        for policy, cases in groups.items():
            cases.append(
                FIELDS | {"workload": str(path), "num_requests": n, "policy": policy, "seed": seed}
                | {"enable_prefix_caching": True}
            )  # fmt: skip
    runs = experiment.runner.groups(groups)
    rows = [
        {"policy": policy, "hit_rate_%": 100 * mean(own, "prefix_cache_hit_rate")}
        | {"hit_blocks": mean(own, "prefix_cache_hits") / _BLOCK}
        | {name: mean(own, name) for name in ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms")}
        for policy, own in runs.items()
    ]
    return runs, rows


_WHO = f"users of {_TURNS:g} turns on average, drawn"


def figure_11(experiment: Experiment) -> Reproduction:
    """Prefix-cache hits of users who return to their engine, and the paper's own t-test."""
    runs, rows = _measured(experiment)
    hits = change(runs["gimbal"], runs["round_robin"], "prefix_cache_hits")
    ttft = change(runs["gimbal"], runs["round_robin"], "mean_ttft_ms")
    t, p = t_test()
    paper = percent(GIMBAL_HITS, float(np.mean(VLLM_HITS)))
    claims = [
        Claim("the paper's own five runs: t of the difference in hits (2.78 is significant at 5%)",
              2.78, math.inf, t, "", 0.0, f"p = {p:.2f}", stated=False),
        Claim("hits, Gimbal against round robin", paper, paper, hits.mean,
              reason=f"{len(runs['gimbal'])} seeds; {_WHO}", interval=hits[1:]),
        Claim("mean TTFT of the same runs", -100.0, 0.0, ttft.mean, tolerance=0.0,
              stated=False, interval=ttft[1:]),
    ]  # fmt: skip
    draw = bars(rows, "policy", ("hit_blocks", "mean_ttft_ms"))
    return Reproduction("figure_11", "Prefix-cache hits of returning users", rows, claims, draw)


def figure_12(experiment: Experiment) -> Reproduction:
    """Prefix-cache hit rates of the same runs as Figure 11."""
    runs, rows = _measured(experiment)
    rates = t_interval([
        100 * (a["prefix_cache_hit_rate"] - b["prefix_cache_hit_rate"])
        for a, b in zip(runs["gimbal"], runs["round_robin"], strict=True)
    ])  # fmt: skip
    paper = GIMBAL_RATE - float(np.mean(VLLM_RATES))
    claims = [
        Claim("hit rate, Gimbal less round robin", paper, paper, rates.mean, "points", 0.1, _WHO,
              interval=rates[1:]),
    ]  # fmt: skip
    draw = bars(rows, "policy", ("hit_rate_%", "mean_ttft_ms"))
    return Reproduction("figure_12", "Hit rates of returning users", rows, claims, draw)
