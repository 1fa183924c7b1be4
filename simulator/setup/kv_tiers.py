"""KV tiers as they are configured, ``--kv-tier host:126GB,load=20GB/s``, and their arrays."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Floats, Ints, Records
from eldr_sim.errors import InputError
from eldr_sim.inputs import seconds
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.policies.routing.seconds import prompt_s
from eldr_sim.simulator.plane.entry import SECONDS
from eldr_sim.simulator.plane.kv import kv_tiers as plane
from eldr_sim.simulator.plane.state import BLOCK
from eldr_sim.traces.requests.caches import session_lists
from eldr_sim.traces.requests.caches.arc import make_lists

if TYPE_CHECKING:
    from eldr_sim.simulator.setup.cluster_spec import ClusterSpec
    from eldr_sim.simulator.setup.config.groups import KVTierConfig
    from eldr_sim.simulator.setup.config.pools import WorkerPool

_UNITS = {unit: 1000.0**k for k, unit in enumerate(("b", "kb", "mb", "gb", "tb", "pb"))}
_UNITS |= {unit: 1024.0**k for k, unit in enumerate(("kib", "mib", "gib", "tib"), 1)}
_BYTES = re.compile(r"(\d+(?:\.\d+)?) ?([kmgtp]?i?b)(/s)?", re.IGNORECASE)
_SCOPES, _WRITES = ("worker", "node", "cluster"), ("through", "selective", "back")
_EVICTIONS = ("lru", "fifo", "arc", "session")
_IN_FLIGHT = ("join", "delay", "duplicate")
#: Stands among the tiers for decode workers that answers' blocks are pulled from.
DECODE = "decode"
_ALLOWED = "NAME:BYTES,load=BYTES/s,... such as host:126GB,load=20GB/s,write=through"
#: Blocks of a store whose arrays are laid out at least; no more than a workload can fill.
_LEAST_BLOCKS = 1 << 20
_MOST_SIZES = 7  # of a range


class Tier(NamedTuple):
    """A tier; bandwidths are bytes/s."""

    name: str
    n_bytes: float  #: of each store
    load: float  #: to a GPU, which has its part of the KV cache
    store: float  #: from a GPU
    total: float  #: of a store, to and from all GPUs of its workers
    latency_s: float = 0.0  #: of a load
    scope: str = "worker"  #: who shares a store
    write: str = "through"
    exclusive: bool = False
    evict: str = "lru"


def _amount(text: str, rate: bool) -> float:
    if text.lower() in ("inf", "infinite"):
        return math.inf
    match = _BYTES.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or unit not in _UNITS or bool(match[3]) != rate:
        allowed = "bytes a second such as 20GB/s" if rate else "bytes such as 126GB or 100GiB"
        raise InputError("kv_tier", repr(text), allowed)
    return float(match[1]) * _UNITS[unit]


def parse_tier(text: str) -> Tier:
    """Read a tier's spelling; raises InputError."""
    first, *rest = (part.strip() for part in text.split(","))
    name, colon, size = first.partition(":")
    values: dict[str, str] = {}
    for part in rest:
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or key in values:
            raise InputError("kv_tier", repr(text), _ALLOWED)
        values[key] = value
    if not colon or not re.fullmatch(r"[a-z][a-z0-9_-]{0,31}", name) or "load" not in values:
        raise InputError("kv_tier", repr(text), _ALLOWED)

    def one_of(key: str, words: Sequence[str]) -> str:
        word = values.pop(key, words[0])
        if word not in words:
            raise InputError("kv_tier", f"{key}={word!r}", ", ".join(words))
        return word

    load = _amount(values.pop("load"), True)
    store = _amount(values.pop("store", "inf"), True) if "store" in values else load
    scope = one_of("scope", _SCOPES)
    total = _amount(values.pop("total"), True) if "total" in values else math.inf
    if scope == "node":
        total = min(total, load)
    tier = Tier(
        name, _amount(size, False), load, store, total,
        seconds(values.pop("latency", "0"), "kv_tier"), scope, one_of("write", _WRITES),
        one_of("exclusive", ("no", "yes")) == "yes", one_of("evict", _EVICTIONS),
    )  # fmt: skip
    if values:
        allowed = "load, store, total, latency, scope, write, exclusive, evict"
        raise InputError("kv_tier", f"{next(iter(values))!r} is no such word", allowed)
    if min(load, store, total) <= 0.0:
        raise InputError("kv_tier", f"{text!r} moves no bytes", "bandwidths above 0")
    if tier.exclusive and tier.write != "back":
        raise InputError("kv_tier", f"{text!r}: exclusive", "write=back beside it")
    if tier.evict == "session" and tier.write != "through":
        problem = f"{text!r}: sessions are what is stored when it is computed"
        raise InputError("kv_tier", problem, "write=through beside evict=session")
    if tier.exclusive and tier.evict == "arc":
        problem = f"{text!r}: a load removes the block, and ARC has to see it used again"
        raise InputError("kv_tier", problem, "evict=lru, fifo beside exclusive")
    return tier


def tiers_of(config: KVTierConfig) -> tuple[Tier, ...]:
    """Return the tiers of a configuration, decode workers last; raises InputError."""
    tiers = tuple(map(parse_tier, config.kv_tier))
    if config.answer_kv == "pull":
        tiers += (Tier(DECODE, 0.0, math.inf, math.inf, math.inf),)
    if len({tier.name for tier in tiers}) < len(tiers):
        raise InputError("kv_tier", "two tiers have one name", "a name for each")
    return tiers


def parse_sizes(text: str) -> list[list[str]]:
    """Return the tiers of a range, ``host:0GB..1TB,load=20GB/s``, the smallest first: halved from
    its end on, seven at most; from 0 on, first no tier. Raises InputError."""
    first, comma, words = text.partition(",")
    name, _, sizes = first.partition(":")
    least, most = (_amount(size.strip(), False) for size in sizes.split("..", 1))
    if not least < most < math.inf:
        raise InputError("kv_tier", repr(text), "a range such as host:0GB..1TB,load=20GB/s")
    found = [most / 2**k for k in range(_MOST_SIZES) if most / 2**k >= max(least, 1.0)]
    tiers = [[f"{name}:{size / 1e9:.12g}GB{comma}{words}"] for size in reversed(found)]
    return [[], *tiers] if least == 0.0 else tiers


def total_bytes(config: KVTierConfig, pools: Sequence[WorkerPool], gpus_per_node: int) -> float:
    """Return the bytes of all KV stores of a cluster."""
    entry = [pool for pool in pools if not pool.decodes] or list(pools)
    own = sum(pool.workers * pool.own.parallelism.data_parallel_size for pool in entry)
    gpus = sum(pool.workers * pool.own.parallelism.n_gpus for pool in entry)
    stores = {"worker": own, "node": -(-gpus // gpus_per_node), "cluster": 1}
    return math.fsum(tier.n_bytes * stores[tier.scope] for tier in tiers_of(config))


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
        rules[t] = _WRITES.index(tier.write), tier.exclusive, renews, own_stores, tier.latency_s
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
    most = max(int(records.max(initial=0)), 1)
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
        clock, loading, rules, links, every, np.zeros((n_stores, most), BLOCK),
        np.zeros((n_stores, 1 << max(2, (2 * most - 1).bit_length())), np.int32),
        np.zeros((n_stores, most)), make_lists(n_stores, in_lists),
        session_lists.make_lists(n_by_session, most, int(of_sessions.max(initial=0))),
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
