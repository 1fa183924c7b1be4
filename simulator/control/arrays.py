"""The arrays of a run as it begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.simulator.plane import state
from eldr_sim.simulator.plane.sessions import Sessions
from eldr_sim.simulator.plane.steps.expert_loads import ExpertLoads, make_expert_loads
from eldr_sim.simulator.plane.steps.group_state import (
    Groups,
    Replicas,
    make_group_scratch,
    make_micro_batches,
    no_group,
    no_replicas,
)
from eldr_sim.simulator.plane.steps.verify import Drafts, no_drafts
from eldr_sim.simulator.setup.cluster_spec import ClusterSpec, EngineSpec
from eldr_sim.simulator.setup.config_groups import LOOP, EngineConfig
from eldr_sim.simulator.setup.replay import Replay
from eldr_sim.traces.workload import Workload

_T = TypeVar("_T")
_TYPES: dict[Any, type] = {bool: np.bool_, int: np.int64, float: np.float64}
#: `state.POOL`, and what the engine's configuration marks for the loop.
POOL = np.dtype(
    [(name, state.POOL[name]) for name in state.POOL.names or ()]
    + [
        (name, _TYPES[field.annotation])
        for name, field in EngineConfig.model_fields.items()
        if LOOP in field.metadata
    ],
    align=True,
)


def with_joins(sessions: Sessions, joins: NDArray[np.int32] | None) -> Sessions:
    """Return sessions in which requests also wait for others than their parents.

    ``joins``: int32 ``[k, 2]``: who waits, and for whom; None: nobody does.
    """
    if joins is None:
        return sessions
    n = len(sessions.waits)
    parents = np.repeat(np.arange(n), np.diff(sessions.first))
    edges = np.concatenate([np.stack([sessions.children, parents], axis=1), joins])
    edges = edges[np.argsort(edges[:, 1], kind="stable")]
    return sessions._replace(
        children=edges[:, 0].astype(np.int32),
        first=np.searchsorted(edges[:, 1], np.arange(n + 1)),
        waits=np.bincount(edges[:, 0], minlength=n).astype(np.int32),
    )


def make_requests(
    spec: ClusterSpec, workload: Workload, replay: Replay, window: tuple[float, float]
) -> NDArray[np.void]:
    """Return the requests of a workload before they arrive: ``REQUEST [requests]``."""
    requests = np.zeros(len(workload), state.REQUEST)
    for name in state.REQUEST.names or ():
        if name.endswith("_s"):
            requests[name] = -1.0
    for name in ("worker", "source", "reserved", "cached_tokens", "decode_cached_tokens"):
        requests[name] = -1
    roots = np.arange(len(workload))
    requests["parent"] = -1 if workload.parent is None else workload.parent
    if workload.parent is not None:
        roots = np.flatnonzero(workload.parent < 0)
    requests["next"] = -1
    requests["next"][roots[:-1]] = roots[1:]
    tokens = workload.prompt_len.astype(np.int64) + workload.output_len
    requests["window_blocks"] = spec.windows.of(tokens, spec.block_size)
    for name in ("arrival_s", "prompt_len", "output_len", "domain"):
        requests[name] = getattr(workload, name)
    requests["trace_request"] = workload.text
    requests["window_row"] = replay.first_row[workload.decode_request]
    requests["window_len"] = replay.length[workload.decode_request]
    requests["window_offset"] = workload.replay_offset
    requests["measured"] = (workload.arrival_s >= window[0]) & (workload.arrival_s < window[1])
    if workload.parent is not None:  # with the end of the window it is known who came in it
        requests["measured"][workload.parent >= 0] = np.isinf(window[1])
    return requests


def check_tables(engine: EngineSpec, longest: int) -> None:
    """Raise ValueError unless an engine's step times cover its steps.

    Compiled code reads whatever lies beyond the end of an array.
    """
    cost, places = engine.step_time.cost, engine.most_decoded
    budget = engine.max_num_batched_tokens
    needed = dict.fromkeys(("moe_s", "head_s", "attention_s"), places)
    needed |= dict.fromkeys(("mixed_moe_s", "uniform_moe_s"), budget)
    needed |= dict.fromkeys(("dense_s", "collectives_s"), max(places, budget))
    needed |= dict.fromkeys(("prompt_alone_s", "prompt_share_s"), longest)
    for name, last in needed.items():
        if len(getattr(cost, name)) <= last:
            raise ValueError(
                f"step times: {name} has {len(getattr(cost, name))} entries, not {last + 1}"
            )


def make_pools(
    spec: ClusterSpec, shards: Sequence[ModelDims], workload: Workload, own_experts: bool
) -> NDArray[np.void]:
    """Return the settings of the pools: ``POOL [pools]``."""
    pools, engines = np.zeros(len(spec.pools), POOL), [pool.engine for pool in spec.pools]
    pools["first_worker"] = [spec.workers_of(name).start for name in spec.names]
    pools["n_workers"] = [pool.n for pool in spec.pools]
    for name in ("then", "router"):
        pools[name] = [getattr(pool, name) for pool in spec.pools]
    _fill(pools, spec.scheduler)
    _fill(pools, spec)
    for number, engine in enumerate(engines):
        _fill(pools[number : number + 1], engine)
        _fill(pools[number : number + 1], engine.rules)
    pools["group_size"] = [engine.group_size for engine in engines]
    caching = spec.enable_prefix_caching and workload.prefix_block_tokens > 0
    whole = np.array([e.layout is not None and e.layout.whole_prompts for e in engines])
    pools["prefix_caching"] = caching & ~whole
    pools["whole_prompts"] |= whole
    takes_over = np.isin(pools["router"], pools["then"])  # who fetches KV caches
    pools["whole_prompts"] &= ~takes_over
    pools["mixed_steps"] |= takes_over
    pools["poll_steps"][takes_over], pools["wait_steps"][takes_over] = 1, 0
    decodes = pools["then"] == state.HERE
    pools["balance_steps"][takes_over | ~decodes | (pools["group_size"] == 1)] = 0
    pools["reserve"][pools["then"] != state.HERE] = state.OF_PROMPT
    pools["own_experts"] = own_experts
    pools["capture_s"][[pool.decodes for pool in spec.pools]] = 0.0
    pools["prefill_schedule_interval"][[engine.group is None for engine in engines]] = 1
    heads = np.array([e.speculation is not None and e.speculation.has_head for e in engines])
    pools["drops_block"] &= heads & bool((pools["then"] >= 0).any())
    for number, (pool, shard) in enumerate(zip(spec.pools, shards, strict=True)):
        n_bytes, n_tensors = shard.kv_bytes_per_token, shard.n_kv_tensors
        speculation = pool.engine.speculation
        if pool.decodes and speculation is not None:
            pools["drafts"][number] = speculation.k
            pools["lookahead"][number] = speculation.lookahead
            n_bytes += speculation.draft.kv_bytes_per_token
            n_tensors += speculation.draft.n_kv_tensors
        pools["kv_bytes_per_token"][number] = n_bytes * pool.kv_weight
        pools["kv_state_bytes"][number] = shard.state_bytes * pool.kv_weight
        pools["n_kv_tensors"][number] = n_tensors
        pools["descriptor_s"][number] = (pool.transfer or spec.transfer).descriptor_s
    return pools


def make_settings(spec: ClusterSpec, workload: Workload) -> NDArray[np.void]:
    """Return the constants of a run: ``SETTINGS [1]``; ``decide`` is still to be set."""
    settings = np.zeros(1, state.SETTINGS)
    _fill(settings, spec)
    _fill(settings, spec.transfer)
    settings["routing_s"] += spec.handover_s
    for name, value in spec.conditional._asdict().items():
        settings[name] = value
    settings["front_end"] = spec.front_end is not None
    settings["prefix_block_tokens"] = workload.prefix_block_tokens
    return settings


def _fill(records: NDArray[np.void], spec: Any) -> None:
    """Fill the fields that a specification has by the same name; what is None is negative."""
    for name in vars(spec).keys() & set(records.dtype.names or ()):
        value = vars(spec)[name]
        records[name] = -1 if value is None else value


def make_drafts(engine: EngineSpec) -> Drafts:
    """Return what the engines of a pool draft."""
    cost = engine.step_time.cost
    if engine.speculation is None:
        return no_drafts(cost)
    return engine.speculation.drafts(engine.max_num_seqs, cost)


def link_rates(spec: ClusterSpec) -> NDArray[np.float64]:
    """Return the bytes/s of each link, see `plane.network`."""
    own = [(pool.transfer or spec.transfer, pool.n) for pool in spec.pools]
    rates = [transfer.ingress for transfer, _ in own], [transfer.bandwidth for transfer, _ in own]
    return np.concatenate([np.repeat(each, [n for _, n in own]) for each in rates])


def of_all(items: Sequence[_T]) -> tuple[_T, ...]:
    """Return what each pool or router has, for as many as there may be."""
    return (*items, *(items[0] for _ in range(state.MAX_POOLS - len(items))))


def make_groups(
    spec: ClusterSpec, masks: NDArray[np.uint64], replicas: Replicas | None,
    loads: ExpertLoads | None, asks: bool, places: int,
) -> Groups:  # fmt: skip
    """Return what engines share.

    ``asks``: whether a policy in Python chooses instances; ``places``: sequences of an engine.
    """
    n_workers, ranks, width = masks.shape
    shared = replicas or no_replicas()
    engines = [pool.engine for pool in spec.pools]
    if asks:
        most = max(
            -(-max(e.most_decoded, e.max_num_batched_tokens) // e.group.ranks_per_engine)
            for e in engines
            if e.group is not None
        )
        instances = max(shared.rank.shape[3] - 1, 0)
        shared = shared._replace(asked=np.zeros((instances, ranks, most, width), np.uint64))
    nodes = [-(-ranks // e.group.gpus_per_node) for e in engines if e.group is not None]
    step_time, instances = spec.decode.step_time, shared.rank.shape[3]
    most = max(e.group.micro_batches if e.group and e.group.ffn_ranks else 0 for e in engines)
    return Groups(
        of_all([e.group or no_group() for e in engines]),
        shared,
        make_group_scratch(
            step_time.n_moe_layers, width, ranks, step_time.cost.n_experts, instances,
            max(nodes, default=0),
        ),
        make_expert_loads(n_workers, 0) if loads is None else loads,
        make_micro_batches(n_workers if most else 0, places, most, step_time.n_moe_layers),
    )  # fmt: skip
