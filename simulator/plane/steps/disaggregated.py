"""A step with attention and experts on separate GPUs: attention-FFN disaggregation (AFD).

The engines of a group have attention, dense layers, gates and shared experts; the routed experts
lie on FFN GPUs. Ranks are the GPUs of both: the engines' are home to all tokens and hold no expert,
the others hold all. So all is counted as of engines that share experts (`group_counting`).

A step is cut into micro-batches of whole sequences, which pass four stages in every MoE layer, so
that one is computed while others are sent (ping-pong)::

    attention, dense layers of the slowest engine -> dispatch -> experts of the slowest rank
      -> combine -> the next layer

A stage takes one at a time, in order; links send both ways at once. All meet at the step's end,
where lm_head and the host follow. With equal layers, times t of the stages, T = max t and m
micro-batches the L layers take ``sum t + (m L - 1) T`` where ``m T >= sum t`` (MegaScale-Infer's,
arXiv 2504.02263, Sec. 4), else ``L sum t + (m - 1) T``."""

from typing import Any, NamedTuple

import numpy as np

from eldr_sim.jit import Entry
from eldr_sim.kernel_profiles.steps.step_cost import attention_s, launch_wait_s
from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.kv.kv_manager import Engines
from eldr_sim.simulator.plane.steps.executor import list_chunks
from eldr_sim.simulator.plane.steps.group_counting import count_step
from eldr_sim.simulator.plane.steps.group_state import EVEN, METRO, OPTIMAL, Counting, MicroBatches
from eldr_sim.simulator.plane.steps.group_step import shared_layers

#: The stages of a layer.
ATTENTION, DISPATCH, FFN, COMBINE = range(4)


@Entry
def execute(world: Any, leader: int) -> float:
    """Return when the step of the group of ``leader`` ends that starts now, s: see `executor`."""
    run, engines, scratch = world.run, world.run.engines, world.run.scratch
    number, workers, start = engines.pool_of[leader], engines.workers, run.clock[0].now
    pool, cost, group = engines.pools[number], run.costs[number], world.groups.costs[number]
    work, micro, size = world.groups.work, world.groups.micro, pool.group_size
    ranks, layers = size * group.ranks_per_engine + group.ffn_ranks, work.pairs.shape[1]
    rows_max, most, n_busy, wait, slowdown, prompts = np.int64(0), np.int64(0), 0, 0.0, 1.0, False
    for w in range(leader, leader + size):
        n_chunks, rows = list_chunks(engines, w, scratch)
        slowdown = max(slowdown, workers[w].slowdown)
        tokens = workers[w].tokens + workers[w].chunk_tokens
        if tokens > 0:
            n_busy, most = n_busy + 1, max(most, tokens)
            prompts = prompts or n_chunks > 0
            rows_max, wait = max(rows_max, rows), wait - cost.head_s[rows]
    part = Engines(
        engines.settings, engines.pools, engines.pool_of, micro.workers, micro.sequences,
        engines.requests, engines.tables, engines.kv, engines.pending, engines.sessions,
        engines.prompt_s,
    )  # fmt: skip
    moe = dispatched = combined = choices = inside_bytes = between_bytes = pairs = busiest_pairs = (
        0.0
    )
    own, n, active, busiest = cost.head_s[rows_max], np.int64(0), np.int64(0), np.int64(0)
    for j in range(group.micro_batches):
        for w in range(leader, leader + size):
            _take_part(engines, micro, w, j, group.micro_batches)
        mine = _own_part(part, leader, size, cost, scratch)
        if mine.tokens == 0:
            continue
        own, wait = own + mine.slowest_s, wait - mine.sum_s
        replaced = mine.computes and METRO <= group.replica_choice <= OPTIMAL
        choice_s = 0.0 if replaced else group.choice_s
        counting = Counting(
            run.masks, world.groups.replicas, group, work, leader, ranks,
            EVEN if replaced else group.replica_choice, mine.computes,
        )  # fmt: skip
        count_step(
            part, run.drafts[number], size, run.bits, run.prompts, counting, world.groups.loads
        )
        for layer in range(layers):
            one = shared_layers(group, work, ranks, mine.computes, layer, layer + 1)
            micro.seconds[ATTENTION, n, layer] = mine.slowest_s / layers
            micro.seconds[DISPATCH, n, layer] = one.dispatch_s
            micro.seconds[FFN, n, layer] = choice_s + one.moe_s
            micro.seconds[COMBINE, n, layer] = one.combine_s
            moe, choices = moe + one.moe_s, choices + choice_s
            dispatched, combined = dispatched + one.dispatch_s, combined + one.combine_s
            inside_bytes, between_bytes = (
                inside_bytes + one.inside_bytes, between_bytes + one.between_bytes
            )  # fmt: skip
            pairs, busiest_pairs = pairs + one.pairs, busiest_pairs + one.busiest_pairs
            active, busiest = active + one.active, busiest + one.busiest
        n += 1
    seconds = ping_pong_s(micro, n, layers) + cost.head_s[rows_max]
    seconds += cost.host_s + launch_wait_s(cost, seconds, most, prompts)
    end = start + (seconds + pool.capture_s) * slowdown
    workers[leader].n_group_steps += 1

    row = world.group_log[run.clock[0].n_group_steps]
    run.clock[0].n_group_steps += 1
    row.start, row.end, row.leader = start, end, leader
    row.moe_s, row.dispatch_s, row.combine_s, row.choice_s = moe, dispatched, combined, choices
    row.own_s, row.wait_s, row.n_busy = own, wait + n_busy * own, n_busy
    row.inside_bytes, row.between_bytes = inside_bytes, between_bytes
    row.busiest_pairs, row.pairs = np.int64(busiest_pairs), np.int64(pairs)
    for w in range(leader, leader + size):
        scratch.active[w], scratch.busiest[w], scratch.draft_s[w] = active, busiest, 0.0
    return float(end)


@compiled()
def _take_part(engines: Engines, micro: MicroBatches, w: int, j: int, m: int) -> None:
    """Make ``micro`` have part ``j`` of ``m`` of an engine's sequences, as if it had no others."""
    worker, sequences = engines.workers[w], engines.sequences
    mine, n = micro.workers[w], worker.batch + worker.prefilling
    first, end = n * j // m, n * (j + 1) // m
    mine.batch, mine.joined, mine.tokens = np.int64(0), np.int64(0), np.int64(0)
    mine.chunk_tokens, mine.context = np.int64(0), np.int64(0)
    for i in range(first, end):
        micro.sequences[w, i - first] = sequences[w, i]
        mine.chunk_tokens += sequences[w, i].chunk
        if i < worker.batch:
            mine.batch += 1
            mine.joined += i >= worker.batch - worker.joined
            mine.tokens += sequences[w, i].tokens
            mine.context += engines.settings[0].max_model_len - sequences[w, i].room
    mine.prefilling = end - first - mine.batch


class _Own(NamedTuple):
    """What the engines compute themselves of a micro-batch, all layers."""

    tokens: Any  #: of all engines
    slowest_s: float  #: of the slowest of each kind of layer
    sum_s: float  #: of all engines
    computes: bool  #: whether it holds prompts


@compiled()
def _own_part(part: Engines, leader: int, size: int, cost: Any, scratch: Any) -> Any:
    """Return what attention and dense layers of a micro-batch take."""
    total, most, longest, sum_s, computes = np.int64(0), np.int64(0), 0.0, 0.0, False
    for w in range(leader, leader + size):
        worker = part.workers[w]
        n_chunks, _ = list_chunks(part, w, scratch)
        tokens = worker.tokens + worker.chunk_tokens
        if tokens == 0:
            continue
        context = worker.context + worker.tokens
        attention = attention_s(
            cost, worker.batch, context, scratch.cached[:n_chunks], scratch.new[:n_chunks]
        )  # fmt: skip
        sum_s += attention + cost.dense_s[tokens] + cost.collectives_s[tokens]
        total, most, longest = total + tokens, max(most, tokens), max(longest, attention)
        computes = computes or n_chunks > 0
    return _Own(total, longest + cost.dense_s[most] + cost.collectives_s[most], sum_s, computes)


@compiled()
def ping_pong_s(micro: MicroBatches, n: int, layers: int) -> Any:
    """Return what ``n`` micro-batches of ``micro.seconds`` take from first to last stage."""
    free, ready = micro.free, micro.ready
    free[:], ready[:] = 0.0, 0.0
    for layer in range(layers):
        for j in range(n):
            at = ready[j]
            for stage in range(4):
                at = max(at, free[stage]) + micro.seconds[stage, j, layer]
                free[stage] = at
            ready[j] = at
    return free[COMBINE]
