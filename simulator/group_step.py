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
from eldr_sim.policies.replicas import HASH_MULTIPLIER
from eldr_sim.simulator.compiled import compiled
from eldr_sim.simulator.engine import Engines, wake
from eldr_sim.simulator.events import schedule_step
from eldr_sim.simulator.kv_cache import n_free, take_blank
from eldr_sim.simulator.step import Scratch, blocks_needed, finish_step, list_chunks

#: What a copy of a token is sent for: see `kernel_profiles.all_to_all.COPY_PER`.
ALL, EXPERT, RANK, NODE = range(4)
#: Which instance of an expert computes a token: see `policies.replicas`.
EVEN, HASH, SOURCE = range(3)
REPLICA_CHOICES = {"even": EVEN, "hash": HASH, "source": SOURCE}
_PLANES = 20  # bits of a counter: a million tokens of an engine in a step


class GroupCost(NamedTuple):
    """What a step of a group costs beside its engines' own parts."""

    copy_per: int  #: ALL, EXPERT, RANK or NODE
    replica_choice: int  #: EVEN, HASH or SOURCE
    ranks_per_engine: int
    gpus_per_node: int
    moe: Any  #: `RankMoE`
    all_to_all: Any  #: `AllToAllCost`


def no_group() -> GroupCost:
    """Return what stands for the cost of a pool whose engines share nothing."""
    rows, table = np.arange(2.0), np.zeros((2, 2))
    knots = np.arange(2.0), np.zeros(2)
    return GroupCost(0, 0, 1, 1, RankMoE(1, rows, table, table), AllToAllCost(0.0, 0.0, *knots * 4))


class Replicas(NamedTuple):
    """The experts of groups that have several instances; those of `masks` have one.

    The layers are the routing trace's, which the model's layers take in turn.
    """

    multi: NDArray[np.uint64]  #: ``[workers, layers of the model * words]``; empty where none has
    rank: NDArray[np.int16]  #: ``[workers, layers, experts, instances]``
    n_instances: NDArray[np.int16]  #: ``[workers, layers, experts]``


def no_replicas() -> Replicas:
    """Return what stands for placements with one instance of every expert."""
    return Replicas(
        np.zeros((0, 0), np.uint64), np.zeros((0, 0, 0, 0), np.int16), np.zeros((0, 0, 0), np.int16)
    )


class GroupScratch(NamedTuple):
    """Working memory of a group's step, for the largest group."""

    planes: NDArray[np.uint64]  #: ``[bits, layers * words]``: experts of one instance, a home rank
    active: NDArray[np.uint64]  #: ``[ranks, layers * words]``: activated on each rank
    turn: NDArray[np.int64]  #: ``[layers, experts]``: tokens of experts of several instances
    pairs: NDArray[np.float64]  #: ``[layers, ranks]``
    sent: NDArray[np.float64]  #: ``[layers, ranks, ranks]``: copies by home and target
    sent_nodes: NDArray[np.float64]  #: ``[layers, ranks, nodes]``
    tokens: NDArray[np.int64]  #: ``[ranks]``: at home there
    reached: NDArray[np.bool_]  #: ``[ranks]``: by one token


def make_group_scratch(n_layers: int, width: int, ranks: int, n_experts: int) -> GroupScratch:
    """Return working memory for groups of so many ranks; nodes are ranks at most."""
    return GroupScratch(
        planes=np.zeros((_PLANES, width), np.uint64),
        active=np.zeros((ranks, width), np.uint64),
        turn=np.zeros((n_layers, n_experts), np.int64),
        pairs=np.zeros((n_layers, ranks)),
        sent=np.zeros((n_layers, ranks, ranks)),
        sent_nodes=np.zeros((n_layers, ranks, ranks)),
        tokens=np.zeros(ranks, np.int64),
        reached=np.zeros(ranks, np.bool_),
    )


class Groups(NamedTuple):
    """What the steps of groups need beside what every step needs."""

    costs: tuple[GroupCost, GroupCost]  #: of the two pools
    replicas: Replicas
    work: GroupScratch


class Counting(NamedTuple):
    """What counting a token needs, besides the token."""

    masks: Any  #: uint64 ``[workers, ranks, layers * words]``: experts of one instance
    replicas: Replicas
    group: GroupCost
    work: GroupScratch
    leader: int
    ranks: int


@compiled()
def group_step(
    clock: Any, events: Any, engines: Engines, leader: int, bits: Any, masks: Any,
    replicas: Replicas, prompts: Any, cost: Any, group: GroupCost, scratch: Scratch,
    work: GroupScratch, logs: Any, group_logs: Any, gaps: Any,
) -> None:  # fmt: skip
    """Run the step that the engines of a group have planned, which starts now.

    Parameters as of `step.step`; ``leader`` is the group's first engine, ``masks`` are the experts
    of one instance, ``group_logs`` are ``GROUP_STEP [capacity]`` of each pool.
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
    counting = Counting(masks, replicas, group, work, leader, ranks)
    _clear(work, ranks)
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
        _count_engine(engines, w, bits, prompts, scratch, counting)

    shared = _shared_layers(group, work, ranks, computes)
    slowest = attention_max + cost.dense_s[tokens_max] + cost.head_s[rows_max]
    slowest += cost.collectives_s[tokens_max]
    parts = StepParts(
        shared.moe_s, attention_max, cost.dense_s[tokens_max], cost.head_s[rows_max],
        cost.collectives_s[tokens_max], cost.host_s, shared.dispatch_s, shared.combine_s,
    )  # fmt: skip
    end = start + (total_s(parts) + pool.capture_s)
    workers[leader].n_group_steps += 1

    row = group_logs[engines.pool_of[leader]][pool.n_group_steps]
    pool.n_group_steps += 1
    row.start, row.end, row.group = start, end, (leader - pool.first_worker) // size
    row.moe_s, row.dispatch_s, row.combine_s = shared.moe_s, shared.dispatch_s, shared.combine_s
    row.wait_s, row.n_busy = wait + n_busy * slowest, n_busy
    copy_bytes = group.all_to_all.dispatch_bytes + group.all_to_all.combine_bytes
    row.inside_bytes, row.between_bytes = copy_bytes * shared.inside, copy_bytes * shared.between
    row.busiest_pairs, row.pairs = np.int64(shared.busiest_pairs), np.int64(shared.pairs)
    for w in range(leader, leader + size):
        n_chunks, _ = list_chunks(engines, w, scratch)
        if workers[w].batch + workers[w].chunk_tokens > 0:
            finish_step(
                clock, events, engines, w, end, n_chunks, shared.active, shared.busiest, logs, gaps
            )
        else:
            workers[w].next_start = end


class SharedLayers(NamedTuple):
    """What the MoE layers of a group's step take, summed over the layers."""

    moe_s: float  #: of the slowest rank of each layer
    dispatch_s: float
    combine_s: float
    inside: float  #: copies that the busiest rank sends or receives in its node
    between: float  #: and between nodes
    active: int  #: activated experts of all ranks
    busiest: int  #: of the rank that has most
    pairs: float  #: token-expert pairs of all ranks
    busiest_pairs: float  #: of the rank that has most


@compiled()
def _shared_layers(group: GroupCost, work: GroupScratch, ranks: int, computes: bool) -> Any:
    """Return what the MoE layers take whose tokens have been counted; ``computes``: prompts."""
    moe = dispatched = combined = 0.0
    inside_sum, between_sum = 0.0, 0.0
    active, busiest, busiest_pairs, pairs_sum = 0, 0, 0.0, 0.0
    layers = work.pairs.shape[0]
    words = work.active.shape[1] // layers
    for layer in range(layers):
        slowest, most, most_pairs = 0.0, 0, 0.0
        for r in range(ranks):
            count = 0
            for k in range(layer * words, (layer + 1) * words):
                count += popcount(work.active[r, k])  # type: ignore[call-arg]
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
    return SharedLayers(
        moe, dispatched, combined, inside_sum, between_sum, active, busiest, pairs_sum,
        busiest_pairs,
    )  # fmt: skip


@compiled()
def group_has_step(engines: Engines, leader: int) -> Any:
    """Whether any engine of a group has something to compute."""
    for w in range(leader, leader + engines.pools[engines.pool_of[leader]].group_size):
        if engines.workers[w].batch > 0 or engines.workers[w].chunk_tokens > 0:
            return True
    return False


@compiled()
def _clear(work: GroupScratch, ranks: int) -> None:
    work.turn[:] = 0
    work.tokens[:] = 0
    work.active[:ranks] = 0
    for layer in range(work.pairs.shape[0]):
        for r in range(ranks):
            work.pairs[layer, r] = 0.0
            for other in range(ranks):
                work.sent[layer, r, other] = work.sent_nodes[layer, r, other] = 0.0


@compiled()
def _count_engine(
    engines: Engines, w: int, bits: Any, prompts: Any, scratch: Scratch, counting: Counting
) -> None:
    """Count where the tokens go that an engine computes in its step.

    Its ranks take equal runs of them, the last one perhaps fewer (sequence parallel MoE).
    """
    worker, sequences = engines.workers[w], engines.sequences[w]
    work, tokens = counting.work, worker.batch + worker.chunk_tokens
    per_engine = counting.group.ranks_per_engine
    first = np.int64((w - counting.leader) * per_engine)
    run = (tokens + per_engine - 1) // per_engine
    n_planes = 1
    while 1 << n_planes <= run:
        n_planes += 1
    work.planes[:n_planes] = 0
    position = np.int64(0)
    for i in range(worker.batch):
        _begin_token(counting, first, position, run, n_planes)
        _count_row(bits, scratch.rows[i], np.int64(0), work.active.shape[1], counting,
                   first + position // run, position % run)  # fmt: skip
        position += 1
    for i in range(worker.batch - worker.joined, worker.batch + worker.prefilling):
        if sequences[i].chunk == 0:
            continue
        request = sequences[i].request
        record = engines.requests[request]
        begin, stop = sequences[i].computed, sequences[i].computed + sequences[i].chunk
        for at in range(begin, stop):
            _begin_token(counting, first, position, run, n_planes)
            home, place = first + position // run, position % run
            if at < record.prompt_len:
                _count_prompt_token(
                    prompts, request, record.trace_request, at, counting, home, place
                )
            else:  # the window begins with the last prompt token
                row = (record.window_offset + at - record.prompt_len + 1) % record.window_len
                row += record.window_row
                _count_row(bits, row, np.int64(0), work.active.shape[1], counting, home, place)
            position += 1
    _flush(counting, first + (position - 1) // run, n_planes)


@compiled()
def _begin_token(counting: Counting, first: int, position: int, run: int, n_planes: int) -> None:
    """Note a token at home; where another rank's run begins, settle the one before."""
    if position > 0 and position % run == 0:
        _flush(counting, first + position // run - 1, n_planes)
    counting.work.tokens[first + position // run] += 1


@compiled()
def _flush(counting: Counting, home: int, n_planes: int) -> None:
    """Add the pairs that the bit planes hold, of the tokens of a home rank, and empty them."""
    work, masks, leader = counting.work, counting.masks, counting.leader
    layers = work.pairs.shape[0]
    words = work.active.shape[1] // layers
    by_home = counting.group.copy_per == EXPERT
    for layer in range(layers):
        for k in range(layer * words, (layer + 1) * words):
            weight = 1.0
            for plane in range(n_planes):
                word = work.planes[plane, k]
                if word != 0:
                    for r in range(counting.ranks):
                        held = word & masks[leader, r, k]
                        work.active[r, k] |= held
                        pairs = weight * popcount(held)  # type: ignore[call-arg]
                        work.pairs[layer, r] += pairs
                        if by_home:
                            work.sent[layer, home, r] += pairs
                weight *= 2.0
    work.planes[:n_planes] = 0


@compiled()
def _count_prompt_token(
    prompts: Any, request: int, own: int, token: int, counting: Counting, home: int, place: int
) -> None:
    """Count a prompt token; layers beyond those of the trace are as `expert_union` has them."""
    size, source = prompts.prefix_block_tokens, np.int64(own)
    if size > 0:
        first, end = prompts.prefix_indptr[request], prompts.prefix_indptr[request + 1]
        if token // size < end - first:
            source = np.int64(prompts.prefix_trace_request[first + token // size])
    have, need = prompts.bits.shape[1], counting.work.active.shape[1]
    span, base = prompts.length[source], prompts.first_row[source]
    tiles = (need + have - 1) // have
    for tile in range(tiles):
        row = base + (token + tile * span // tiles) % span
        width = min(have, need - tile * have)
        _count_row(prompts.bits, row, np.int64(tile * have), width, counting, home, place)


@compiled()
def _count_row(
    bits: Any, row: int, first: int, width: int, counting: Counting, home: int, place: int
) -> None:
    """Count the experts of one token on the layers from bit-set word ``first`` on.

    ``home`` is the token's rank, ``place`` its position there.
    """
    work, replicas, leader = counting.work, counting.replicas, counting.leader
    per = counting.group.copy_per
    by_rank = per in (RANK, NODE)
    layers = work.pairs.shape[0]
    words = work.active.shape[1] // layers
    if not by_rank and replicas.multi.shape[0] == 0:
        for k in range(width):
            _add_word(work.planes, first + k, bits[row, k])
        return
    for layer in range(first // words, (first + width) // words):
        if by_rank:
            work.reached[: counting.ranks] = False
        for k in range(layer * words, (layer + 1) * words):
            word, many = bits[row, k - first], np.uint64(0)
            if replicas.multi.shape[0] > 0:
                many = word & replicas.multi[leader, k]
                word &= ~many
            if by_rank:
                for r in range(counting.ranks):
                    if word & counting.masks[leader, r, k]:
                        work.reached[r] = True
            _add_word(work.planes, k, word)
            while many != 0:
                bit = many & (~many + np.uint64(1))
                many ^= bit
                below: Any = popcount(bit - np.uint64(1))  # type: ignore[call-arg]
                expert = (k - layer * words) * 64 + np.int64(below)
                r = _instance(counting, layer, expert, home, place)
                work.active[r, k] |= bit
                work.pairs[layer, r] += 1.0
                if per == EXPERT:
                    work.sent[layer, home, r] += 1.0
                work.reached[r] = True
        if by_rank:
            node_before = np.int64(-1)
            for r in range(counting.ranks):
                if work.reached[r]:
                    work.sent[layer, home, r] += 1.0
                    node = np.int64(r // counting.group.gpus_per_node)
                    if node != node_before:
                        work.sent_nodes[layer, home, node] += 1.0
                        node_before = node


@compiled(inline="always")
def _add_word(planes: Any, k: int, word: Any) -> None:
    """Count the bits of a word in bit planes: carry-save addition."""
    plane = 0
    while word != 0:
        both = planes[plane, k] & word
        planes[plane, k] ^= word
        word = both
        plane += 1


@compiled()
def _instance(counting: Counting, layer: int, expert: int, home: int, place: int) -> Any:
    """Return the rank whose instance of an expert computes a token; see `policies.replicas`."""
    replicas, leader = counting.replicas, counting.leader
    at = layer % replicas.n_instances.shape[1]
    count = np.int64(replicas.n_instances[leader, at, expert])
    ranks = replicas.rank[leader, at, expert]
    choice = counting.group.replica_choice
    if choice == EVEN:
        turn = counting.work.turn[layer, expert]
        counting.work.turn[layer, expert] += 1
        return np.int64(ranks[turn % count])
    hashed = (place * HASH_MULTIPLIER) & 0xFFFFFFFF
    if choice == HASH:
        return np.int64(ranks[hashed % count])
    nodes = counting.group.gpus_per_node
    nearest, n_nearest = 2, 0
    for i in range(count):
        away = _away(np.int64(ranks[i]), home, nodes)
        if away < nearest:
            nearest, n_nearest = away, 0
        if away == nearest:
            n_nearest += 1
    skip = hashed % n_nearest
    for i in range(count):
        if _away(np.int64(ranks[i]), home, nodes) == nearest:
            if skip == 0:
                return np.int64(ranks[i])
            skip -= 1
    return np.int64(-1)  # not reached


@compiled()
def _away(rank: int, home: int, gpus_per_node: int) -> Any:
    """Return 0 for a token's own rank, 1 for its node, 2 elsewhere."""
    if rank == home:
        return 0
    return 1 if rank // gpus_per_node == home // gpus_per_node else 2


@compiled()
def _busiest(group: GroupCost, work: GroupScratch, layer: int, ranks: int) -> Any:
    """Return the copies that the busiest rank sends or receives, inside its node and between."""
    if group.copy_per == ALL:
        return busiest_all(work.tokens[:ranks], group.gpus_per_node)
    copies = work.sent[layer, :ranks, :ranks]
    if group.copy_per == NODE:
        nodes = (ranks + group.gpus_per_node - 1) // group.gpus_per_node
        return busiest_forwarded(
            copies, work.sent_nodes[layer, :ranks, :nodes], group.gpus_per_node
        )
    return busiest_direct(copies, group.gpus_per_node)
