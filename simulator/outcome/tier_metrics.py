"""Figures of KV tiers: what was found where, what it took, and what it was worth."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.simulator.control.record import RunRecord
from eldr_sim.simulator.plane.kv_tiers import LOAD
from eldr_sim.simulator.setup.cluster_spec import ClusterSpec


def hits_by_tier(
    record: RunRecord, spec: ClusterSpec, mine: NDArray[np.bool_]
) -> dict[str, float]:  # fmt: skip
    """Return the share of some requests' prompt tokens found in caches and in each tier.

    ``mine``: bool ``[requests]``; what a cache holds counts there, and in no tier.
    """
    if record.tiers is None:
        return {}
    of = record.requests[mine & (record.requests["cached_tokens"] >= 0)]
    hits = record.tiers.hits[mine & (record.requests["cached_tokens"] >= 0)].sum(axis=0)
    tokens = max(1, int(of["prompt_len"].sum()))
    caches = int(of["cached_tokens"].sum()) - int(hits.sum())
    names = ["gpu", *(tier.name for tier in spec.tiers)]
    return dict(zip(names, (np.array([caches, *hits]) / tokens).tolist(), strict=True))


def tier_figures(record: RunRecord, spec: ClusterSpec, block_bytes: float) -> dict[str, Any]:
    """Return what KV tiers did in a run; nothing where there are none.

    ``block_bytes``: of a KV block on all GPUs of an engine. Hit rates and waits are those of
    measured requests, blocks and bytes those of the whole run.
    """
    tiers = record.tiers
    if tiers is None:
        return {}
    measured = record.requests["measured"]
    loads: NDArray[np.void] = tiers.loads[measured].view(LOAD)
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
