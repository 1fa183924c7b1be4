"""The arrays of a run as it begins."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.simulator.plane import state
from eldr_sim.simulator.plane.steps.verify import Drafts, no_drafts
from eldr_sim.simulator.setup.cluster_spec import ClusterSpec, EngineSpec
from eldr_sim.simulator.setup.replay import Replay
from eldr_sim.traces.workload import Workload


def make_requests(
    spec: ClusterSpec, workload: Workload, replay: Replay, window: tuple[float, float]
) -> NDArray[np.void]:
    """Return the requests of a workload before they arrive: ``REQUEST [requests]``."""
    requests = np.zeros(len(workload), state.REQUEST)
    for name in state.REQUEST.names or ():
        if name.endswith("_s"):
            requests[name] = -1.0
    for name in ("worker", "source", "cached_tokens", "decode_cached_tokens"):
        requests[name] = -1
    requests["next"] = -1
    tokens = workload.prompt_len.astype(np.int64) + workload.output_len
    requests["window_blocks"] = spec.windows.of(tokens, spec.block_size)
    for name in ("arrival_s", "prompt_len", "output_len", "domain"):
        requests[name] = getattr(workload, name)
    requests["trace_request"] = workload.text
    requests["window_row"] = replay.first_row[workload.decode_request]
    requests["window_len"] = replay.length[workload.decode_request]
    requests["window_offset"] = workload.replay_offset
    requests["measured"] = (workload.arrival_s >= window[0]) & (workload.arrival_s < window[1])
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


def make_pools(spec: ClusterSpec, workload: Workload, own_experts: bool) -> NDArray[np.void]:
    """Return the settings of the pools: ``POOL [2]``."""
    pools = np.zeros(2, state.POOL)
    pools["then"] = 1 if spec.n_prefill and spec.n_decode else state.NOBODY, state.HERE
    pools["router"] = 0, 1
    pools["first_worker"] = 0, spec.n_prefill
    pools["n_workers"] = spec.n_prefill, spec.n_decode
    _fill(pools, spec)
    for pool, engine in enumerate((spec.prefill, spec.decode)):
        _fill(pools[pool : pool + 1], engine)
    caching = spec.enable_prefix_caching and workload.prefix_block_tokens > 0
    whole = [e.layout is not None and e.layout.whole_prompts for e in (spec.prefill, spec.decode)]
    pools["whole_prompts"] = whole
    layout = spec.prefill.layout
    pools["by_layers"][0] = spec.n_prefill and layout is not None and layout.has_steps_of_its_own
    pools["prefix_caching"] = caching & ~np.array(whole)
    pools["own_experts"] = own_experts
    pools["capture_s"][1] = 0.0
    alone = np.array([engine.group is None for engine in (spec.prefill, spec.decode)])
    pools["prefill_schedule_interval"][alone] = 1
    pools["group_size"] = [e.group_size for e in (spec.prefill, spec.decode)]
    if (speculation := spec.decode.speculation) is not None:
        pools["drafts"][1] = speculation.k
        pools["lookahead"][1] = speculation.lookahead
    return pools


def make_settings(spec: ClusterSpec, model: ModelDims, workload: Workload) -> NDArray[np.void]:
    """Return the constants of a run: ``SETTINGS [1]``; ``decide`` is still to be set."""
    settings, speculation = np.zeros(1, state.SETTINGS), spec.decode.speculation
    _fill(settings, spec)
    _fill(settings, spec.transfer)
    settings["routing_s"] += spec.handover_s
    settings["front_end"] = spec.front_end is not None
    for part in (model,) if speculation is None else (model, speculation.draft):
        settings["kv_bytes_per_token"] += part.kv_bytes_per_token
        settings["n_kv_tensors"] += part.n_kv_tensors
    settings["prefix_block_tokens"] = workload.prefix_block_tokens
    settings["entry"] = 0 if spec.n_prefill else 1
    return settings


def _fill(records: NDArray[np.void], spec: Any) -> None:
    """Fill the fields that a specification has by the same name; what is None is negative."""
    for name in {own.name for own in fields(spec)}.intersection(records.dtype.names or ()):
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
    n_workers = spec.n_prefill + spec.n_decode
    return np.repeat([spec.transfer.ingress, spec.transfer.bandwidth], n_workers)
