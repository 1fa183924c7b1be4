"""The arrays of KV tiers, and of what prompts take, which decides whether blocks are loaded."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from eldr_sim.arrays import Floats, Ints, Records
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.policies.routing.seconds import prompt_s
from eldr_sim.simulator.plane.entry import SECONDS
from eldr_sim.simulator.plane.kv import kv_tiers as plane
from eldr_sim.simulator.plane.state import BLOCK
from eldr_sim.simulator.setup.cluster_spec import ClusterSpec
from eldr_sim.simulator.setup.kv_tiers import DECODE, WRITES, Tier
from eldr_sim.traces.requests.caches import session_lists
from eldr_sim.traces.requests.caches.arc import make_lists

_IN_FLIGHT = ("join", "delay", "duplicate")
#: Blocks of a store whose arrays are laid out at least; no more than a workload can fill.
_LEAST_BLOCKS = 1 << 20


def _members(spec: ClusterSpec, tier: Tier, gpus_per_node: int) -> Ints:
    """Return the number of each worker's store, ``[workers]``; -1: none."""
    numbers, gpu = list[int](), 0
    for pool in spec.pools:
        for _ in range(pool.n):
            at = {"worker": len(numbers), "node": gpu // gpus_per_node, "cluster": 0}[tier.scope]
            has = (pool.router == 0 or tier.scope == "cluster") and tier.name != DECODE
            numbers.append(at if has else -1)
            layout = pool.engine.parallelism
            gpu += layout.engine_gpus
    return np.array(numbers)


def make_tiers(
    spec: ClusterSpec, shards: Sequence[ModelDims], clock: Records, n_listed: int,
    n_requests: int, rates: Floats,
) -> plane.Tiers:  # fmt: skip
    """Return empty tiers: ``n_listed`` KV blocks that requests have, links of ``rates`` bytes/s."""
    config, n_tiers = spec.kv_tiers, len(spec.tiers)
    rules, loading = np.zeros(n_tiers, plane.RULES), np.zeros(1, plane.LOADING)
    links, stores = np.zeros((spec.n_workers, n_tiers), plane.LINK), list[Records]()
    token_bytes = np.repeat(
        [shard.kv_bytes_per_token for shard in shards], [pool.n for pool in spec.pools]
    )
    layout = spec.prefill.parallelism
    engine_gpus = layout.engine_gpus
    links["store"], n_stores = -1, 0
    for t, tier in enumerate(spec.tiers):
        renews, own_stores = tier.evict == "lru", tier.scope == "worker"
        rules[t] = WRITES.index(tier.write), tier.exclusive, renews, own_stores, tier.latency_s
        own = _members(spec, tier, spec.gpus_per_node)
        known, numbers = np.unique(own[own >= 0], return_inverse=True)
        links["store"][own >= 0, t] = n_stores + numbers
        links["load_s"][:, t] = token_bytes * spec.block_size / tier.load
        links["store_s"][:, t] = token_bytes * spec.block_size / tier.store
        block = float(token_bytes[0]) * spec.block_size
        blocks = min(tier.n_bytes / (block * engine_gpus), max(n_listed, _LEAST_BLOCKS))
        made = np.zeros(len(known), plane.STORE)
        made["n_blank"], made["arc"] = int(blocks), tier.evict == "arc"
        made["by_session"] = tier.evict == "session"
        made["load_s"] = made["store_s"] = block * engine_gpus / tier.total
        stores.append(made)
        n_stores += len(known)
    every = np.concatenate(stores)
    for name in ("spare", "idle_head", "idle_tail"):
        every[name] = -1
    # These remember as many blocks again, and have more while some come: one, or a context's.
    records = np.where(every["arc"], 2 * every["n_blank"] + 1, every["n_blank"])
    context = min(spec.max_model_len // spec.block_size + 1, max(n_listed, _LEAST_BLOCKS))
    records += np.where(every["by_session"], every["n_blank"] + context, 0)
    most_records = max(int(records.max(initial=0)), 1)
    in_lists = int(records[every["arc"]].max(initial=0))
    of_sessions = every["n_blank"][every["by_session"]]
    n_by_session = n_stores if len(of_sessions) else 0
    loading["cheaper"] = config.kv_load == "cheaper"
    loading["in_flight"] = _IN_FLIGHT.index(config.kv_in_flight)
    if config.kv_overlap == "layers":
        loading["layers"] = spec.n_layers
    loading["pulls"], loading["pull_s"] = -1, _pull_s(spec, shards, float(rates.min()))
    if spec.tiers[-1].name == DECODE:
        loading["pulls"] = n_tiers - 1
    return plane.Tiers(
        clock, loading, rules, links, every, np.zeros((n_stores, most_records), BLOCK),
        np.zeros((n_stores, 1 << max(2, (2 * most_records - 1).bit_length())), np.int32),
        np.zeros((n_stores, most_records)), make_lists(n_stores, in_lists),
        session_lists.make_lists(n_by_session, most_records, int(of_sessions.max(initial=0))),
        np.full((n_requests, n_tiers), -1), np.zeros(n_tiers, np.int64),
        np.zeros(n_requests, plane.LOAD), np.zeros((n_requests, n_tiers), np.int32),
    )  # fmt: skip


def _pull_s(spec: ClusterSpec, shards: Sequence[ModelDims], rate: float) -> float:
    """Return what a KV block takes from a decode worker over links of ``rate`` bytes/s, s."""
    pools = zip(spec.pools, shards, strict=True)
    return max(
        shard.kv_bytes_per_token * pool.kv_weight * spec.block_size / rate
        + shard.n_kv_tensors * (pool.transfer or spec.transfer).descriptor_s
        for pool, shard in pools
    )


def prompt_table(spec: ClusterSpec, longest: int) -> Floats:
    """Return what prompts up to ``longest`` tokens take in each pool, s, if asked for."""
    if not spec.tiers and spec.conditional.entry != SECONDS:
        return np.zeros((len(spec.pools), 2))
    return np.array([_prompts_s(pool.engine, longest) for pool in spec.pools])


def _prompts_s(engine: Any, longest: int) -> list[float]:
    """Return what prompts of each multiple of ``GRAIN`` take; those above ``longest`` go on."""
    cost, budget, seconds = engine.step_time.cost, engine.max_num_batched_tokens, [0.0]
    slope = 0.0
    for start in range(0, longest + plane.GRAIN, plane.GRAIN):
        tokens = min(start + plane.GRAIN, longest, len(cost.prompt_alone_s) - 1) - start
        if tokens > 0:  # else beyond what step times cover
            slope = (prompt_s(cost, start + tokens, 0, budget) - seconds[-1]) / tokens
        seconds.append(seconds[-1] + slope * plane.GRAIN)
    return seconds
