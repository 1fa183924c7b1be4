"""More requests than a cluster began with, and requests of other lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from eldr_sim.arrays import with_more
from eldr_sim.errors import InputError
from eldr_sim.simulator.control.arrays import make_requests, padded
from eldr_sim.simulator.control.sent_prefixes import kept
from eldr_sim.simulator.plane.front_end import make_front_end
from eldr_sim.simulator.plane.kv.kv_cache import make_kv_cache

if TYPE_CHECKING:
    from eldr_sim.simulator.control.compiled_cluster import CompiledCluster


def grow(cluster: CompiledCluster) -> None:
    """Have room for twice as many requests: the workload's again, with separate prefixes."""
    workload = cluster.workload.repeated(2)
    if cluster.sent is not None:
        workload = kept(cluster.workload, workload)
    arrays, old, new = cluster.arrays, len(cluster.requests), len(workload)
    engines, kv = arrays.engines, arrays.engines.kv
    requests = make_requests(cluster.inputs, workload)
    requests["queue_key"] = np.resize(cluster.requests["queue_key"], new)
    requests[:old] = cluster.requests
    cluster.workload, cluster.requests = workload, requests
    for router in cluster.routers:
        router.grow(new)
    fresh = make_kv_cache(workload, cluster.spec.block_size, 1, 1)
    listed = kv.listed  # blocks that are sent have room there
    if cluster.sent is None:
        listed = fresh.listed
        listed[:, : kv.listed.shape[1]] = kv.listed
    tiers = kv.tiers
    if len(tiers.loads):
        tiers = tiers._replace(
            loads=with_more(tiers.loads, new - old),
            hits=with_more(tiers.hits, new - old),
            goes_on=with_more(tiers.goes_on, new - old),
        )
    kv = kv._replace(
        tiers=tiers, windows=with_more(kv.windows, (new - old) * (kv.groups > 0)),
        listed=listed, first_listed=fresh.first_listed, prefix_hash=workload.prefix_hash,
        prefix_indptr=workload.prefix_indptr,
    )  # fmt: skip
    if cluster.policy_calls.reports is not None:
        cluster.policy_calls.reports.kv = kv
    prompts = arrays.prompts
    if prompts.prefix_block_tokens:
        prompts = prompts._replace(
            prefix_indptr=workload.prefix_indptr, prefix_trace_request=workload.prefix_text
        )
    more = 6 * (new - old)
    cluster.arrays = arrays._replace(
        events=with_more(arrays.events, more),
        engines=engines._replace(
            requests=requests,
            tables=with_more(engines.tables, new - old),
            pending=with_more(engines.pending, new - old),
            kv=kv,
            sessions=engines.sessions._replace(order=with_more(engines.sessions.order, new - old)),
        ),
        routers=padded([router.arrays for router in cluster.routers]),
        net=arrays.net._replace(
            flows=with_more(arrays.net.flows, new - old), done=with_more(arrays.net.done, new - old)
        ),
        reported=with_more(arrays.reported, len(cluster.routers) * (new - old)),
        prompts=prompts,
    )
    servers = cluster.front_end
    if servers is not None:
        front = make_front_end(cluster.spec.front_end, requests["prompt_len"])
        assert front is not None
        cluster.front_end = front._replace(servers=servers.servers)


def set_lengths(
    cluster: CompiledCluster, request: int, prompt_len: int | None, output_len: int | None
) -> None:
    """Give a request that has not arrived other lengths. Raises InputError if one is below 1, or
    the workload's prefixes or the queue order hang on it."""
    keys, lengths = cluster.inputs.queue_keys, {"prompt_len": prompt_len, "output_len": output_len}
    for name, tokens in lengths.items():
        if tokens is None:
            continue
        if tokens < 1:
            raise InputError(name, f"{tokens}", "1 or more tokens")
        if name == "prompt_len" and cluster.workload.prefix_block_tokens and cluster.sent is None:
            raise InputError(name, "the workload's prompts share prefixes", "its own lengths")
        if keys is not None and keys.any():
            raise InputError(name, "the queue order uses the workload's lengths", "fcfs")
        getattr(cluster.workload, name)[request] = tokens
        cluster.requests[name][request] = tokens
    record = cluster.requests[request]
    tokens = record["prompt_len"] + record["output_len"]
    record["window_blocks"] = cluster.spec.windows.of(tokens, cluster.spec.block_size)
    for router in cluster.routers:
        router.arrays.class_of[request] = -1
    servers = cluster.front_end
    if servers is not None and cluster.spec.front_end is not None:
        front_end = make_front_end(
            cluster.spec.front_end, cluster.requests["prompt_len"][[request]]
        )
        assert front_end is not None
        for times, one in zip(servers[2:], front_end[2:], strict=True):
            times[request] = one[0]
