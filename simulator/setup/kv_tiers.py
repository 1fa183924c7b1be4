"""KV tiers as they are configured, ``--kv-tier host:126GB,load=20GB/s``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from eldr_sim.errors import InputError
from eldr_sim.inputs import seconds

if TYPE_CHECKING:
    from eldr_sim.simulator.setup.config.groups import KVTierConfig
    from eldr_sim.simulator.setup.config.pools import WorkerPool

_UNITS = {unit: 1000.0**k for k, unit in enumerate(("b", "kb", "mb", "gb", "tb", "pb"))}
_UNITS |= {unit: 1024.0**k for k, unit in enumerate(("kib", "mib", "gib", "tib"), 1)}
_BYTES = re.compile(r"(\d+(?:\.\d+)?) ?([kmgtp]?i?b)(/s)?", re.IGNORECASE)
_SCOPES, WRITES = ("worker", "node", "cluster"), ("through", "selective", "back")
_EVICTIONS = ("lru", "fifo", "arc", "session")
#: Stands among the tiers for decode workers that answers' blocks are pulled from.
DECODE = "decode"
_ALLOWED = "NAME:BYTES,load=BYTES/s,... such as host:126GB,load=20GB/s,write=through"
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
        seconds(values.pop("latency", "0"), "kv_tier"), scope, one_of("write", WRITES),
        one_of("exclusive", ("no", "yes")) == "yes", one_of("evict", _EVICTIONS),
    )  # fmt: skip
    if values:
        allowed = "load, store, total, latency, scope, write, exclusive, evict"
        raise InputError("kv_tier", f"{next(iter(values))!r} is not a valid word", allowed)
    if min(load, store, total) <= 0.0:
        raise InputError("kv_tier", f"{text!r} moves no bytes", "bandwidths above 0")
    if tier.exclusive and tier.write != "back":
        raise InputError("kv_tier", f"{text!r}: exclusive", "together with write=back")
    if tier.evict == "session" and tier.write != "through":
        problem = f"{text!r}: evict=session needs blocks that are stored when computed"
        raise InputError("kv_tier", problem, "write=through beside evict=session")
    if tier.exclusive and tier.evict == "arc":
        problem = f"{text!r}: exclusive loads remove the block, but ARC needs to see its reuse"
        raise InputError("kv_tier", problem, "evict=lru or fifo with exclusive=yes")
    return tier


def tiers_of(config: KVTierConfig) -> tuple[Tier, ...]:
    """Return the tiers of a configuration, decode workers last; raises InputError."""
    tiers = tuple(map(parse_tier, config.kv_tier))
    if config.answer_kv == "pull":
        tiers += (Tier(DECODE, 0.0, math.inf, math.inf, math.inf),)
    if len({tier.name for tier in tiers}) < len(tiers):
        raise InputError("kv_tier", "two tiers have the same name", "a name for each")
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
    own = sum(pool.workers * pool.parallelism.data_parallel_size for pool in entry)
    gpus = sum(pool.workers * pool.parallelism.n_gpus for pool in entry)
    stores = {"worker": own, "node": -(-gpus // gpus_per_node), "cluster": 1}
    return math.fsum(tier.n_bytes * stores[tier.scope] for tier in tiers_of(config))
