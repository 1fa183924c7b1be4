"""A step of engines that share experts: data-parallel attention, experts on the GPUs of all.

The engines of a group have separate queues, KV caches and batches. In every layer the tokens of
all are dispatched to the ranks that hold their experts, and combined back, so a step takes::

    host + dense, attention, lm_head of the slowest engine
    + for each MoE layer: dispatch + choice of instances + MoE of the slowest rank + combine

Where a step is computed as two halves (SGLang's two-batch overlap, vLLM's dual-batch overlap) one
half computes while the other is sent. Of dispatch and combine there remain what outlasts computing,
the first half's first and last, which nothing hides (half a layer's), and what computing loses to
the communication kernels beside it. Halves read weights once each.

An engine without requests takes part with a dummy batch (vLLM's ``DPEngineCoreProc``): it waits.
The slowest rank is that of the longest time for its own pairs and activated experts, which are
counted exactly (`group_counting`)."""

from typing import Any, NamedTuple

import numpy as np

from eldr_sim.jit import Entry, njit
from eldr_sim.kernel_profiles.kernels.all_to_all_cost import (
    busiest,
    busiest_all,
    combine_s,
    dispatch_s,
    raise_to,
)
from eldr_sim.kernel_profiles.steps import step_cost
from eldr_sim.simulator.plane.compiled import ask, compiled
from eldr_sim.simulator.plane.steps.executor import list_chunks
from eldr_sim.simulator.plane.steps.expert_loads import begin_step, end_step
from eldr_sim.simulator.plane.steps.group_counting import count_rows, count_step
from eldr_sim.simulator.plane.steps.group_state import (
    ALL,
    ASKED,
    CHOOSE,
    EVEN,
    METRO,
    OPTIMAL,
    Counting,
    GroupCost,
    GroupScratch,
)
from eldr_sim.simulator.plane.steps.verify import Drafts, attended

_NONE = np.int64(0)


@Entry
def execute(world: Any, leader: int) -> float:
    """Return when the step of ``leader``'s group ends, s (`executor`); below 0: it failed."""
    run, engines, scratch = world.run, world.run.engines, world.run.scratch
    number, decide, loads = engines.pool_of[leader], engines.settings[0].decide, world.groups.loads
    workers, pool, start = engines.workers, engines.pools[number], run.clock[0].now
    cost, group = run.costs[number], world.groups.costs[number]
    work, size = world.groups.work, workers[leader].width
    if not begin_step(loads, leader, workers[leader].n_group_steps, start, decide):
        return -1.0
    ranks = size * group.ranks_per_engine
    tokens_max, rows_max, attention_max, n_busy = np.int64(0), np.int64(0), 0.0, 0
    wait, computes, slowdown = 0.0, False, 1.0
    drafts, passes_s, k = run.drafts[number], 0.0, _NONE
    for w in range(leader, leader + size):
        worker = workers[w]
        n_chunks, rows = list_chunks(engines, w, scratch)
        tokens = worker.tokens + worker.chunk_tokens
        slowdown = max(slowdown, worker.slowdown)  # all wait for it, whether it has tokens or not
        if tokens == 0:
            continue
        n_busy += 1
        computes = computes or n_chunks > 0
        sequences, context = attended(drafts, worker.batch, worker.tokens, worker.context)
        attention = step_cost.attention_s(
            cost, sequences, context, scratch.cached[:n_chunks], scratch.new[:n_chunks]
        )  # fmt: skip
        if drafts.rates.shape[1] > 0:
            k = max(k, drafts.k_of[worker.batch])
            passes_s = max(passes_s, _passes_s(drafts, worker, scratch, n_chunks))
        wait -= attention + cost.dense_s[tokens] + cost.head_s[rows] + cost.collectives_s[tokens]
        attention_max = max(attention_max, attention)
        tokens_max, rows_max = max(tokens_max, tokens), max(rows_max, rows)
    replaced = computes and METRO <= group.replica_choice <= OPTIMAL
    choice = EVEN if replaced else group.replica_choice
    counting = Counting(
        run.masks, world.groups.replicas, group, work, leader, ranks, choice, computes
    )
    asks = choice == ASKED and world.groups.replicas.multi.shape[0] > 0
    if asks and ask(decide, CHOOSE, leader) < 0:
        return -1.0
    count_step(engines, drafts, size, run.bits, run.prompts, counting, loads)
    shared = shared_layers(group, work, ranks, computes, 0, work.pairs.shape[1])
    choice_s = 0.0 if replaced else group.choice_s * work.pairs.shape[1]
    dense, collectives = cost.dense_s[tokens_max], cost.collectives_s[tokens_max]
    exposed = 1.0
    if _is_split(group, work, ranks, computes):
        half = (tokens_max + 1) // 2
        dense, collectives = 2.0 * cost.dense_s[half], 2.0 * cost.collectives_s[half]
        own = attention_max + dense + collectives + shared.moe_s + choice_s
        exposed = _exposed(group, own, shared.dispatch_s + shared.combine_s, work.pairs.shape[1])
    dispatched, combined = exposed * shared.dispatch_s, exposed * shared.combine_s
    slowest = attention_max + dense + cost.head_s[rows_max] + collectives
    host = cost.host_s + step_cost.launch_wait_s(
        cost, slowest + shared.moe_s + dispatched + combined + choice_s, tokens_max, computes,
        (_n_chunks(group, work, ranks) - 1) * group.chunk_launch_s,
    )  # fmt: skip
    parts = step_cost.StepParts(
        shared.moe_s, attention_max, dense, cost.head_s[rows_max], collectives, host, dispatched,
        combined, choice_s,
    )  # fmt: skip
    drafting = 0.0
    if k > 0:
        drafting = passes_s + _draft_layers_s(drafts, k, group, shared, work.pairs.shape[0])
    end = start + (step_cost.total_s(parts) + pool.capture_s + drafting) * slowdown
    workers[leader].n_group_steps += 1
    stall = end_step(loads, leader, workers[leader].n_group_steps, end, decide)
    if stall < 0.0:
        return -1.0
    end += stall

    row = world.group_log[run.clock[0].n_group_steps]
    run.clock[0].n_group_steps += 1
    row.start, row.end, row.leader = start, end, leader
    row.moe_s, row.dispatch_s, row.combine_s = shared.moe_s, dispatched, combined
    row.own_s, row.wait_s, row.n_busy = slowest, wait + n_busy * slowest, n_busy
    row.choice_s = choice_s
    row.inside_bytes, row.between_bytes = shared.inside_bytes, shared.between_bytes
    row.busiest_pairs, row.pairs = np.int64(shared.busiest_pairs), np.int64(shared.pairs)
    for w in range(leader, leader + size):
        scratch.active[w], scratch.busiest[w] = shared.active, shared.busiest
        scratch.draft_s[w] = drafting
    return float(end)


@compiled()
def _passes_s(drafts: Drafts, worker: Any, scratch: Any, n_chunks: int) -> Any:
    """Return what an engine's draft passes take but for their shared experts, s."""
    n, k, cost = worker.batch, drafts.k_of[worker.batch], drafts.cost
    if drafts.lookup_s >= 0.0:
        return drafts.lookup_s + n * drafts.request_s if min(k, n) > 0 else 0.0
    seconds, tokens, context = 0.0, worker.tokens + worker.chunk_tokens, worker.context
    chunks: Any = n_chunks
    wide, m = n * drafts.width, n
    for i in range(min(k, drafts.depth) if n > 0 else min(k, np.int64(1))):
        context += worker.tokens if i == 0 else wide
        seconds += step_cost.attention_s(
            cost, n, context, scratch.cached[:chunks], scratch.new[:chunks]
        )
        seconds += cost.dense_s[tokens] + cost.collectives_s[tokens] + cost.head_s[m] + cost.host_s
        tokens, m, chunks = wide, wide, _NONE
    return seconds + n * drafts.request_s


@compiled()
def _draft_layers_s(
    drafts: Drafts, k: int, group: GroupCost, shared: "SharedLayers", layers: int
) -> Any:
    """Return what the MoE layer of an MTP draft takes in its passes, s: first as the step's mean
    layer, then with pairs of one token a sequence, dispatched like the first (too much)."""
    if drafts.cost.n_moe_layers == 0 or drafts.lookup_s >= 0.0:
        return 0.0
    sent = (shared.dispatch_s + shared.combine_s) / layers
    pairs = shared.busiest_pairs / layers / (1 + k) * drafts.width
    experts = min(shared.busiest / layers, pairs)
    later = step_cost.rank_moe_s(group.moe, pairs, experts, False)
    return shared.moe_s / layers + sent + (min(k, drafts.depth) - 1) * (later + sent)


class SharedLayers(NamedTuple):
    """What the MoE layers of a group's step take, summed over the layers."""

    moe_s: float  #: of the slowest rank of each layer
    dispatch_s: float
    combine_s: float
    inside_bytes: float  #: that the busiest rank sends or receives in its node
    between_bytes: float  #: and between nodes
    active: int  #: activated experts of all ranks
    busiest: int  #: of the rank that has most
    pairs: float  #: token-expert pairs of all ranks
    busiest_pairs: float  #: of the rank that has most


@compiled()
def shared_layers(
    group: GroupCost, work: GroupScratch, ranks: int, computes: bool, first: int, end: int
) -> Any:
    """Return what the MoE layers ``first .. end - 1`` take, after their tokens were counted;
    ``computes``: with prompts. In chunks ranks exchange as many as the engine with most tokens
    has."""
    moe = dispatched = combined = 0.0
    inside_bytes, between_bytes = 0.0, 0.0
    active, most_active, busiest_pairs, pairs_sum = 0, 0, 0.0, 0.0
    gathers = group.gathers and not computes
    table = group.gathered if gathers else group.all_to_all
    split = _is_split(group, work, ranks, computes)
    n_chunks = np.int64(2) if split else _n_chunks(group, work, ranks)
    slowest, most, most_pairs, sent, sent_far = work.most
    work.most[:, first:end] = 0.0
    for r in range(ranks):
        pairs, instances = work.pairs[r], work.instances[r]
        raise_to(most[first:end], instances[first:end])
        raise_to(most_pairs[first:end], pairs[first:end])
        for layer in range(first, end):
            active += int(instances[layer])
            pairs_sum += pairs[layer]
            if pairs[layer] > 0 and n_chunks == 1:
                seconds = _rank_s(group, pairs[layer], instances[layer], computes)
                slowest[layer] = max(slowest[layer], seconds)
    all_inside, all_between = busiest_all(work.tokens[:ranks], group.gpus_per_node)
    if group.copy_per == ALL:
        sent[first:end], sent_far[first:end] = all_inside, all_between
    else:
        busiest(work.traffic, ranks, first, sent[first:end], sent_far[first:end])
    for layer in range(first, end):
        most_active += int(most[layer])
        busiest_pairs += most_pairs[layer]
        inside, between = sent[layer], sent_far[layer]
        out, out_far = (all_inside, all_between) if gathers else (inside, between)
        if n_chunks > 1:
            for chunk in range(n_chunks):
                part = 0.5 if split else _part(group, work, ranks, chunk)
                moe += _slowest_s(group.moe, work, layer, ranks, part, computes)
                combined += combine_s(table, part * inside, part * between)
                dispatched += dispatch_s(table, part * out, part * out_far)
        else:
            moe += slowest[layer]
            combined += combine_s(table, inside, between)
        inside_bytes += table.combine_bytes * inside
        between_bytes += table.combine_bytes * between
        if n_chunks == 1:
            dispatched += dispatch_s(table, out, out_far)
        inside_bytes += table.dispatch_bytes * out
        between_bytes += table.dispatch_bytes * out_far
    return SharedLayers(
        moe, dispatched, combined, inside_bytes, between_bytes, active, most_active, pairs_sum,
        busiest_pairs,
    )  # fmt: skip


@compiled()
def _rank_s(group: GroupCost, pairs: float, instances: float, computes: bool) -> Any:
    """Return the time of a layer on one rank, s: `rank_moe_s`, kept where both are whole."""
    kept, at, count = group.moe_s[1 if computes else 0], np.int64(pairs), np.int64(instances)
    if at >= kept.shape[0] or count >= kept.shape[1] or at != pairs or count != instances:
        return step_cost.rank_moe_s(group.moe, pairs, instances, computes)
    if kept[at, count] == 0.0:
        kept[at, count] = step_cost.rank_moe_s(group.moe, pairs, instances, computes)
    return kept[at, count]


@compiled()
def _is_split(group: GroupCost, work: GroupScratch, ranks: int, computes: bool) -> Any:
    """Return whether a step is computed as two halves; ``computes``: with prompts."""
    least = group.split_prompts if computes else group.split_decode
    return least > 0 and _most_tokens(group, work, ranks) >= least


@compiled()
def _exposed(group: GroupCost, own: float, sent: float, layers: int) -> Any:
    """Return the share of dispatch and combine, ``sent`` s, that a step of two halves waits for
    beside computing, ``own`` s; more than 1 where overlap costs more than it hides."""
    if sent <= 0.0:
        return 1.0
    left = max(sent - own, 0.0) + sent / (2.0 * layers)
    return (left + (group.overlap_slowdown - 1.0) * min(sent, own)) / sent


@compiled()
def _most_tokens(group: GroupCost, work: GroupScratch, ranks: int) -> Any:
    """Return the tokens of the engine that has most, 1 at the least."""
    most = np.int64(1)
    for first in range(0, ranks, group.ranks_per_engine):
        most = max(most, work.tokens[first : first + group.ranks_per_engine].sum())
    return most


@compiled()
def _n_chunks(group: GroupCost, work: GroupScratch, ranks: int) -> Any:
    """Return the chunks of the engine that has most tokens; 1 where steps are not cut."""
    if group.chunk == 0:
        return np.int64(1)
    return (_most_tokens(group, work, ranks) + group.chunk - 1) // group.chunk


@compiled()
def _part(group: GroupCost, work: GroupScratch, ranks: int, chunk: int) -> Any:
    """Return the part of a step's tokens that a chunk of every engine holds."""
    held, tokens = 0.0, 0.0
    for first in range(0, ranks, group.ranks_per_engine):
        own = work.tokens[first : first + group.ranks_per_engine].sum()
        tokens += own
        held += min(max(own - chunk * group.chunk, 0), group.chunk)
    return held / tokens


@compiled()
def _slowest_s(
    moe: Any, work: GroupScratch, layer: int, ranks: int, part: float, computes: bool
) -> Any:
    """Return the time of a layer's slowest rank for a part of the tokens, s: an expert is missed by
    all that chose it with chance ``(1 - part) ** (pairs / experts)``."""
    slowest = 0.0
    for r in range(ranks):
        pairs, experts = work.pairs[r, layer], work.instances[r, layer]
        if pairs > 0:
            missed = (1.0 - part) ** (pairs / experts)
            seconds = step_cost.rank_moe_s(moe, part * pairs, experts * (1.0 - missed), computes)
            slowest = max(slowest, seconds)
    return slowest


@njit(_nrt=False)
def route_tokens(bits: Any, rows: Any, c: Counting) -> Any:
    """Return what a step's MoE layers take for tokens that go to every rank (`count_rows`)."""
    count_rows(bits, rows, c)
    return shared_layers(c.group, c.work, c.ranks, c.computes, 0, c.work.pairs.shape[1])


@njit(_nrt=False)
def price_layers(group: GroupCost, work: GroupScratch, ranks: int, computes: bool) -> Any:
    """Return what the MoE layers of a step take, as `SharedLayers`; their work is in ``work``."""
    return shared_layers(group, work, ranks, computes, 0, work.pairs.shape[1])


@compiled()
def move_group_end(clock: Any, leader: int, seconds: float, log: Any) -> None:
    """Let the step in progress of a group end later; never, if ``seconds`` are infinite."""
    for i in range(clock[0].n_group_steps - 1, -1, -1):
        if log[i].leader == leader:
            if log[i].end > clock[0].now:
                log[i].end += seconds
            return
