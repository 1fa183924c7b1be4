"""Prefix blocks that requests bring with them, where no workload knew of them before."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from eldr_sim.simulator.plane.router import grown
from eldr_sim.traces.workload import Workload

if TYPE_CHECKING:
    from eldr_sim.simulator.control.compiled_cluster import CompiledCluster

#: Blocks that there is room for before the first request.
_ROOM = 1024


def without_prefixes(workload: Workload, block_size: int) -> Workload:
    """Return requests with prompts that share nothing until they are sent, with room for blocks."""
    return replace(
        workload,
        prefix_hash=np.zeros(_ROOM, np.uint64),
        prefix_text=np.full(_ROOM, workload.text[0], np.int32),
        prefix_indptr=np.zeros(len(workload) + 1, np.int64),
        prefix_block_tokens=block_size,
        answered=np.ones(len(workload), bool),
    )


class SentPrefixes:
    """Numbers the blocks of prompts as they come, as `chain_blocks`; a distinct one takes 0.1
    kB."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Hashable], int] = {}
        self._texts: list[int] = []  # whose rows of the trace a block's tokens replay

    def add(self, cluster: CompiledCluster, request: int, prefix: Sequence[Hashable]) -> None:
        """Note the whole blocks of the request that is sent next, of prompt and answer."""
        size = cluster.workload.prefix_block_tokens
        tokens = cluster.workload.prompt_len[request] + cluster.workload.output_len[request] - 1
        n = min(len(prefix), int(tokens) // size)
        begin = int(cluster.workload.prefix_indptr[request])
        while begin + n > len(cluster.workload.prefix_hash):
            _make_room(cluster)
        workload, own, number = cluster.workload, int(cluster.workload.text[request]), -1
        for at, block in enumerate(prefix[:n], begin):
            number = self._numbers.setdefault((number, block), len(self._numbers))
            if number == len(self._texts):
                self._texts.append(own)
            workload.prefix_hash[at], workload.prefix_text[at] = number, self._texts[number]
        workload.prefix_indptr[request + 1 :] = begin + n
        cluster.arrays.engines.kv.first_listed[request + 1 :] = begin + n
        for router in cluster.routers:
            router.arrays.class_of[request] = -1  # a prefix of its own: ask


def kept(workload: Workload, repeated: Workload) -> Workload:
    """Return more requests of a workload, with the blocks that were sent and no others."""
    sent = workload.prefix_indptr
    return replace(
        repeated,
        prefix_hash=workload.prefix_hash,
        prefix_text=workload.prefix_text,
        prefix_indptr=np.append(sent, np.full(len(repeated) + 1 - len(sent), sent[-1])),
    )


def _make_room(cluster: CompiledCluster) -> None:
    """Have room for twice as many blocks."""
    arrays, workload = cluster.arrays, cluster.workload
    workload = replace(
        workload, prefix_hash=grown(workload.prefix_hash), prefix_text=grown(workload.prefix_text)
    )
    kv = arrays.engines.kv
    more = np.zeros((2, len(workload.prefix_hash)), kv.listed.dtype)
    more[:, : kv.listed.shape[1]] = kv.listed
    kv = kv._replace(prefix_hash=workload.prefix_hash, listed=more)
    if cluster.policy_calls.reports is not None:
        cluster.policy_calls.reports.kv = kv
    prompts = arrays.prompts
    if prompts.prefix_block_tokens:
        prompts = prompts._replace(prefix_trace_request=workload.prefix_text)
    cluster.workload = workload
    cluster.arrays = arrays._replace(engines=arrays.engines._replace(kv=kv), prompts=prompts)
