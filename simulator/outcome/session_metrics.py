"""Figures of prefix reuse, sessions and KV tiers: what the workload allows, and what was found
where."""

import math
from typing import Any

import numpy as np

from eldr_sim.arrays import Bools, Int32s, Records
from eldr_sim.simulator.control.record import RunRecord
from eldr_sim.simulator.outcome.metrics import request_times
from eldr_sim.simulator.plane.kv.kv_tiers import LOAD
from eldr_sim.simulator.plane.state import AFTER_WINDOW, OVERLOADED
from eldr_sim.simulator.setup.cluster_spec import ClusterSpec
from eldr_sim.traces.requests.caches.reuse import reuse_of
from eldr_sim.traces.requests.sessions import turn_numbers
from eldr_sim.traces.workload import Workload


def hits_by_tier(
    record: RunRecord, spec: ClusterSpec, mine: Bools
) -> dict[str, float]:  # fmt: skip
    """Return the share of prompt tokens found in caches and, of the rest, in each tier."""
    if record.tiers is None:
        return {}
    of = record.requests[mine & (record.requests["cached_tokens"] >= 0)]
    hits = record.tiers.hits[mine & (record.requests["cached_tokens"] >= 0)].sum(axis=0)
    tokens = max(1, int(of["prompt_len"].sum()))
    caches = int(of["cached_tokens"].sum()) - int(hits.sum())
    names = ["gpu", *(tier.name for tier in spec.tiers)]
    return dict(zip(names, (np.array([caches, *hits]) / tokens).tolist(), strict=True))


def tier_figures(record: RunRecord, spec: ClusterSpec, block_bytes: float) -> dict[str, Any]:
    """Return what KV tiers did in a run, if there are any: hit rates and waits of measured
    requests, blocks and bytes of the whole run. ``block_bytes``: of a KV block on all GPUs of an
    engine."""
    tiers = record.tiers
    if tiers is None:
        return {}
    measured = record.requests["measured"]
    loads: Records = tiers.loads[measured].view(LOAD)
    waited = loads["waited_s"][loads["waited_s"] > 0.0]
    rates = hits_by_tier(record, spec, measured)
    held = [int(n) * blocks * block_bytes for n, blocks in
            zip(tiers.stores, tiers.capacity, strict=True)]  # fmt: skip
    saved = math.fsum(tiers.loads["saved_s"].tolist())
    return {
        "kv_tiers": {
            "hit_rate": rates,
            "tiers": {
                tier.name: {
                    "stores": tiers.stores[t],
                    "blocks_per_store": tiers.capacity[t],
                    "loaded_gb": int(tiers.loaded[t]) * block_bytes / 1e9,
                    "stored_gb": int(tiers.stored[t]) * block_bytes / 1e9,
                    "evicted_gb": int(tiers.evicted[t]) * block_bytes / 1e9,
                }
                for t, tier in enumerate(spec.tiers)
            },
            "requests_that_waited": len(waited),
            "mean_load_wait_ms": 1e3 * math.fsum(waited.tolist()) / len(waited)
            if len(waited)
            else None,
            "prefill_seconds_saved": saved,
            "prefill_seconds_saved_per_gb": saved / (sum(held) / 1e9) if sum(held) else None,
        }
    }


_MOST_TURNS = 10  #: rows of the table by turn; the last one has all later turns


def reuse_figures(
    workload: Workload, record: RunRecord, block_size: int, caching: bool
) -> dict[str, float | None]:
    """Return the prefix hit rate of a cache without bounds, and the part that all have in common,
    of all admitted requests in order, but those that warm caches; None where prompts share
    nothing."""
    served = np.zeros(len(workload), bool)
    served[record.numbers[record.requests["cached_tokens"] >= 0]] = True
    if not (caching and workload.prefix_block_tokens and served.any()):
        return {"ideal_prefix_cache_hit_rate": None, "common_prefix_share": None}
    found = reuse_of(workload, block_size, served)
    own = served & (np.arange(len(workload)) >= workload.n_warming)
    tokens = int(workload.prompt_len[own].sum(dtype=np.int64))
    return {
        "ideal_prefix_cache_hit_rate": int(found.ideal[own].sum()) / tokens if tokens else None,
        "common_prefix_share": found.common_share,
    }


def session_figures(workload: Workload, record: RunRecord, spec: ClusterSpec) -> dict[str, Any]:
    """Return figures of a run's sessions, if any, and a row a turn. One is completed when all its
    requests are, else abandoned; it lasts from first arrival to last end."""
    if workload.parent is None:
        return {}
    own = record.numbers >= workload.n_warming
    numbers, requests, done = record.numbers[own], record.requests[own], record.completed[own]
    turn, session = turn_numbers(workload.parent), workload.session
    begun, kind = session[numbers], requests["outcome"]
    size = np.bincount(session[workload.n_warming :], minlength=len(session))
    complete = (np.bincount(begun[done], minlength=len(size)) == size) & (size > 0)
    over = ~done & (kind != AFTER_WINDOW) & (kind != OVERLOADED)
    lost = np.bincount(begun[over], minlength=len(size)) > 0
    first, last = np.full(len(size), np.inf), np.zeros(len(size))
    np.minimum.at(first, begun, requests["arrival_s"])
    np.maximum.at(last, begun, np.where(done, requests["finish_s"], 0.0))
    served = np.zeros(len(size))
    np.add.at(served, begun[done], (requests["finish_s"] - requests["arrival_s"])[done])
    seconds = (last - first)[complete]
    total, n = math.fsum(seconds.tolist()), len(seconds)
    return {
        "sessions": {
            "begun": len(np.unique(begun)),
            "completed": int(complete.sum()),
            "abandoned": int(lost.sum()),
            "turns_begun": len(numbers),
            "turns_completed": int(done.sum()),
            "turns_unfinished": int((~done & ~over).sum()),
            "turns_abandoned": int(over.sum()),
            "mean_duration_s": total / n if n else None,
            "served_share_of_duration": math.fsum(served[complete].tolist()) / total
            if total
            else None,
            "by_turn": _by_turn(record, turn[record.numbers], spec),
        }
    }


def _by_turn(
    record: RunRecord, turn: Int32s, spec: ClusterSpec
) -> list[dict[str, Any]]:  # fmt: skip
    """Return what measured requests of each turn met."""
    times, measured = request_times(record), record.requests["measured"] & record.completed
    rows = []
    for number in range(1, min(_MOST_TURNS, int(turn.max(initial=0))) + 1):
        mine = measured & ((turn == number) if number < _MOST_TURNS else (turn >= number))
        if not mine.any():
            continue
        of = record.requests[mine]
        tokens = int(of["prompt_len"].sum())
        cached = int(np.maximum(of["cached_tokens"], 0).sum())
        ttft, tpot = times["ttft"][mine], times["tpot"][mine]
        tpot = tpot[~np.isnan(tpot)]
        rows.append(
            {
                "turn": number,
                "requests": len(of),
                "mean_prompt_tokens": tokens / len(of),
                "mean_ttft_ms": 1e3 * math.fsum(ttft.tolist()) / len(of),
                "p99_ttft_ms": 1e3 * float(np.percentile(ttft, 99)),
                "mean_tpot_ms": 1e3 * math.fsum(tpot.tolist()) / len(tpot) if len(tpot) else None,
                "prefix_cache_hit_rate": cached / tokens,
            }
            | ({} if (rates := hits_by_tier(record, spec, mine)) == {} else {"hit_rate": rates})
        )
    return rows
