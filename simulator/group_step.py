"""A step of engines that share experts: data-parallel attention, experts on the GPUs of all.

The engines of a group have queues, KV caches and batches of their own. In every layer the tokens of
all are dispatched to the ranks that hold their experts and their outputs are combined back, so a
step takes::

    host + dense, attention, lm_head of the slowest engine
         + for each MoE layer: dispatch + MoE of the slowest rank + combine

An engine without requests takes part with a dummy batch (vLLM's ``DPEngineCoreProc``): it computes
nothing here and waits. The slowest rank is that of the longest time for its own token-expert pairs
and activated experts. Pairs are counted exactly from the experts of the step's tokens, in bit
planes: one carry-save addition counts 64 experts at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_sim.jit import popcount
from eldr_sim.kernel_profiles.all_to_all import AllToAllCost
from eldr_sim.kernel_profiles.all_to_all_cost import (
    busiest_all,
    busiest_direct,
    busiest_forwarded,
    combine_s,
    dispatch_s,
)
from eldr_sim.kernel_profiles.step_cost import StepParts, attention_s, rank_moe_s, total_s
from eldr_sim.kernel_profiles.step_time import RankMoE
from eldr_sim.simulator.compiled import compiled
from eldr_sim.simulator.engine import Engines, wake
from eldr_sim.simulator.events import schedule_step
from eldr_sim.simulator.kv_cache import n_free, take_blank
from eldr_sim.simulator.step import Scratch, blocks_needed, finish_step, list_chunks

#: What a copy of a token is sent for: see `kernel_profiles.all_to_all.COPY_PER`.
ALL, EXPERT, RANK, NODE = range(4)
_PLANES = 20  # bits of a counter: a million tokens of an engine in a step


class GroupCost(NamedTuple):
    """What a step of a group costs beside its engines' own parts."""

    copy_per: int  #: ALL, EXPERT, RANK or NODE
    ranks_per_engine: int
    gpus_per_node: int
    moe: Any  #: `RankMoE`
    all_to_all: Any  #: `AllToAllCost`


def no_group() -> GroupCost:
    """Return what stands for the cost of a pool whose engines share nothing."""
    rows, table = np.arange(2.0), np.zeros((2, 2))
    knots = np.arange(2.0), np.zeros(2)
    return GroupCost(0, 1, 1, RankMoE(1, rows, table, table), AllToAllCost(0.0, 0.0, *knots * 4))


class GroupScratch(NamedTuple):
    """Working memory of a group's step, for the largest group."""

    planes: NDArray[np.uint64]  #: ``[bits, layers * words]``
    union: NDArray[np.uint64]  #: ``[layers * words]``
    pairs: NDArray[np.float64]  #: ``[layers, ranks]``
    sent: NDArray[np.float64]  #: ``[layers, engines, ranks]``: copies from an engine's tokens
    sent_nodes: NDArray[np.float64]  #: ``[layers, engines, nodes]``
    tokens: NDArray[np.float64]  #: ``[ranks]``
    copies: NDArray[np.float64]  #: ``[ranks, ranks]``
    node_copies: NDArray[np.float64]  #: ``[ranks, nodes]``


def make_group_scratch(n_layers: int, width: int, engines: int, ranks: int) -> GroupScratch:
    """Return working memory for groups of so many engines and ranks; nodes are ranks at most."""
    return GroupScratch(
        planes=np.zeros((_PLANES, width), np.uint64),
        union=np.zeros(width, np.uint64),
        pairs=np.zeros((n_layers, ranks)),
        sent=np.zeros((n_layers, engines, ranks)),
        sent_nodes=np.zeros((n_layers, engines, ranks)),
        tokens=np.zeros(ranks),
        copies=np.zeros((ranks, ranks)),
        node_copies=np.zeros((ranks, ranks)),
    )


@compiled()
def group_step(
    clock: Any, events: Any, engines: Engines, leader: int, bits: Any, masks: Any, prompts: Any,
    cost: Any, group: GroupCost, scratch: Scratch, work: GroupScratch, logs: Any, group_logs: Any,
    gaps: Any,
) -> None:  # fmt: skip
    """Run the step that the engines of a group have planned, which starts now.

    Parameters as of `step.step`; ``leader`` is the group's first engine, ``group_logs`` are
    ``GROUP_STEP [capacity]`` of each pool.
    """
    workers, pool = engines.workers, engines.pools[engines.pool_of[leader]]
    size, start = pool.group_size, clock[0].now
    short = False
    for w in range(leader, leader + size):
        workers[w].next_start = start
        if blocks_needed(engines, w, scratch) > n_free(workers, w):
            wake(clock, events, workers, w)  # this engine has to preempt, then all start
            short = True
    if short:
        schedule_step(clock, events, workers, leader)
        return
    ranks = size * group.ranks_per_engine
    _clear(work, ranks, size)
    tokens_max, rows_max, attention_max, n_busy = np.int64(0), np.int64(0), 0.0, 0
    wait, computes = 0.0, False
    for w in range(leader, leader + size):
        worker = workers[w]
        needed = blocks_needed(engines, w, scratch)
        if needed > 0:
            take_blank(engines.kv, workers, w, needed)
        n_chunks, rows = list_chunks(engines, w, scratch)
        tokens = worker.batch + worker.chunk_tokens
        if tokens == 0:
            continue
        n_busy += 1
        computes = computes or n_chunks > 0
        attention = attention_s(
            cost, worker.batch, worker.context + worker.batch, scratch.cached, scratch.new, n_chunks
        )
        wait -= attention + cost.dense_s[tokens] + cost.head_s[rows] + cost.collectives_s[tokens]
        attention_max = max(attention_max, attention)
        tokens_max, rows_max = max(tokens_max, tokens), max(rows_max, rows)
        _count_engine(engines, w, bits, masks[leader], prompts, group, scratch, work, leader)

    moe = dispatched = combined = 0.0
    inside_sum, between_sum = 0.0, 0.0
    active, busiest, busiest_pairs, pairs_sum = 0, 0, 0.0, 0.0
    layers = work.pairs.shape[0]
    words = work.union.shape[0] // layers
    for layer in range(layers):
        slowest, most, most_pairs = 0.0, 0, 0.0
        for r in range(ranks):
            count = 0
            for k in range(layer * words, (layer + 1) * words):
                count += popcount(work.union[k] & masks[leader, r, k])  # type: ignore[call-arg]
            pairs = work.pairs[layer, r]
            active += count
            pairs_sum += pairs
            most, most_pairs = max(most, count), max(most_pairs, pairs)
            if pairs > 0:
                slowest = max(slowest, rank_moe_s(group.moe, pairs, float(count), computes))
        busiest += most
        busiest_pairs += most_pairs
        moe += slowest
        inside, between = _busiest(group, work, layer, ranks)
        dispatched += dispatch_s(group.all_to_all, inside, between)
        combined += combine_s(group.all_to_all, inside, between)
        inside_sum += inside
        between_sum += between
    own = attention_max + cost.dense_s[tokens_max] + cost.head_s[rows_max]
    own += cost.collectives_s[tokens_max]
    parts = StepParts(
        moe, attention_max, cost.dense_s[tokens_max], cost.head_s[rows_max],
        cost.collectives_s[tokens_max], cost.host_s, dispatched, combined,
    )  # fmt: skip
    end = start + (total_s(parts) + pool.capture_s)

    row = group_logs[engines.pool_of[leader]][pool.n_group_steps]
    pool.n_group_steps += 1
    row.start, row.end, row.group = start, end, (leader - pool.first_worker) // size
    row.moe_s, row.dispatch_s, row.combine_s = moe, dispatched, combined
    row.wait_s, row.n_busy = wait + n_busy * own, n_busy
    copy_bytes = group.all_to_all.dispatch_bytes + group.all_to_all.combine_bytes
    row.inside_bytes, row.between_bytes = copy_bytes * inside_sum, copy_bytes * between_sum
    row.busiest_pairs, row.pairs = np.int64(busiest_pairs), np.int64(pairs_sum)
    for w in range(leader, leader + size):
        n_chunks, _ = list_chunks(engines, w, scratch)
        if workers[w].batch + workers[w].chunk_tokens > 0:
            finish_step(clock, events, engines, w, end, n_chunks, active, busiest, logs, gaps)
        else:
            workers[w].next_start = end


@compiled()
def group_has_step(engines: Engines, leader: int) -> Any:
    """Whether any engine of a group has something to compute."""
    for w in range(leader, leader + engines.pools[engines.pool_of[leader]].group_size):
        if engines.workers[w].batch > 0 or engines.workers[w].chunk_tokens > 0:
            return True
    return False


@compiled()
def _clear(work: GroupScratch, ranks: int, size: int) -> None:
    work.union[:] = 0
    for layer in range(work.pairs.shape[0]):
        for r in range(ranks):
            work.pairs[layer, r] = 0.0
            for e in range(size):
                work.sent[layer, e, r] = work.sent_nodes[layer, e, r] = 0.0
    work.tokens[:] = 0.0


@compiled()
def _count_engine(
    engines: Engines, w: int, bits: Any, masks: Any, prompts: Any, group: GroupCost,
    scratch: Scratch, work: GroupScratch, leader: int,
) -> None:  # fmt: skip
    """Count where the tokens go that an engine computes in its step."""
    worker, sequences = engines.workers[w], engines.sequences[w]
    e, width = w - leader, work.union.shape[0]
    ranks = engines.pools[engines.pool_of[w]].group_size * group.ranks_per_engine
    tokens, n_planes = worker.batch + worker.chunk_tokens, 1
    while 1 << n_planes <= tokens:
        n_planes += 1
    work.planes[:n_planes] = 0
    for i in range(worker.batch):
        _count_row(bits, scratch.rows[i], np.int64(0), width, masks, group, work, e, ranks)
    for i in range(worker.batch - worker.joined, worker.batch + worker.prefilling):
        if sequences[i].chunk == 0:
            continue
        request = sequences[i].request
        record = engines.requests[request]
        first, stop = sequences[i].computed, sequences[i].computed + sequences[i].chunk
        prompt = record.prompt_len
        for position in range(first, min(stop, prompt)):
            _count_prompt_token(
                prompts, request, record.trace_request, position, masks, group, work, e, ranks
            )
        for position in range(max(first, prompt), stop):
            row = (record.window_offset + position - prompt + 1) % record.window_len
            row += record.window_row
            _count_row(bits, row, np.int64(0), width, masks, group, work, e, ranks)
    for r in range(group.ranks_per_engine):
        work.tokens[e * group.ranks_per_engine + r] = tokens / group.ranks_per_engine
    layers = work.pairs.shape[0]
    words = width // layers
    for layer in range(layers):
        for r in range(ranks):
            pairs, weight = 0.0, 1.0
            for plane in range(n_planes):
                count = 0
                for k in range(layer * words, (layer + 1) * words):
                    count += popcount(work.planes[plane, k] & masks[r, k])  # type: ignore[call-arg]
                pairs += weight * count
                weight *= 2.0
            work.pairs[layer, r] += pairs
            if group.copy_per == EXPERT:
                work.sent[layer, e, r] = pairs


@compiled()
def _count_prompt_token(
    prompts: Any, request: int, own: int, position: int, masks: Any, group: GroupCost,
    work: GroupScratch, e: int, ranks: int,
) -> None:  # fmt: skip
    """Count a prompt token; layers beyond those of the trace are as `expert_union` has them."""
    size, source = prompts.prefix_block_tokens, np.int64(own)
    if size > 0:
        first, end = prompts.prefix_indptr[request], prompts.prefix_indptr[request + 1]
        if position // size < end - first:
            source = np.int64(prompts.prefix_trace_request[first + position // size])
    have, need = prompts.bits.shape[1], work.union.shape[0]
    span, base = prompts.length[source], prompts.first_row[source]
    tiles = (need + have - 1) // have
    for tile in range(tiles):
        row = base + (position + tile * span // tiles) % span
        width = min(have, need - tile * have)
        _count_row(prompts.bits, row, np.int64(tile * have), width, masks, group, work, e, ranks)


@compiled()
def _count_row(
    bits: Any, row: int, first: int, width: int, masks: Any, group: GroupCost, work: GroupScratch,
    e: int, ranks: int,
) -> None:  # fmt: skip
    """Add the experts of one token on the layers from bit-set word ``first`` on."""
    for k in range(width):
        word = bits[row, k]
        work.union[first + k] |= word
        plane = 0
        while word != 0:
            both = work.planes[plane, first + k] & word
            work.planes[plane, first + k] ^= word
            word = both
            plane += 1
    if group.copy_per != RANK and group.copy_per != NODE:
        return
    words = work.union.shape[0] // work.pairs.shape[0]
    for layer in range(first // words, (first + width) // words):
        node_before = np.int64(-1)
        for r in range(ranks):
            for k in range(layer * words, (layer + 1) * words):
                if bits[row, k - first] & masks[r, k]:
                    work.sent[layer, e, r] += 1.0
                    node = np.int64(r // group.gpus_per_node)
                    if node != node_before:
                        work.sent_nodes[layer, e, node] += 1.0
                        node_before = node
                    break


@compiled()
def _busiest(group: GroupCost, work: GroupScratch, layer: int, ranks: int) -> Any:
    """Return the copies that the busiest rank sends or receives, inside its node and between."""
    if group.copy_per == ALL:
        return busiest_all(work.tokens[:ranks], group.gpus_per_node)
    nodes = (ranks + group.gpus_per_node - 1) // group.gpus_per_node
    for home in range(ranks):
        e = home // group.ranks_per_engine
        for r in range(ranks):
            work.copies[home, r] = work.sent[layer, e, r] / group.ranks_per_engine
        for n in range(nodes):
            work.node_copies[home, n] = work.sent_nodes[layer, e, n] / group.ranks_per_engine
    copies = work.copies[:ranks, :ranks]
    if group.copy_per == NODE:
        return busiest_forwarded(copies, work.node_copies[:ranks, :nodes], group.gpus_per_node)
    return busiest_direct(copies, group.gpus_per_node)
