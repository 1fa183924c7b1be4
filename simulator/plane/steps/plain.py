"""A step of an engine by itself: the experts that its tokens activate, and its time."""

from typing import Any

import numpy as np

from eldr_sim.jit import Entry
from eldr_sim.kernel_profiles.steps.step_cost import step_parts, total_s
from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.kv.kv_manager import Engines
from eldr_sim.simulator.plane.steps import expert_union
from eldr_sim.simulator.plane.steps.executor import list_chunks, list_rows
from eldr_sim.simulator.plane.steps.verify import attended, draft_s, last_layer


@Entry
def execute(world: Any, w: int) -> float:
    """Return when the step of worker ``w`` ends that starts now, s: see `executor`."""
    run, engines, scratch = world.run, world.run.engines, world.run.scratch
    worker, pool = engines.workers[w], engines.pools[engines.pool_of[w]]
    tokens, cost = worker.tokens, run.costs[engines.pool_of[w]]
    drafts = run.drafts[engines.pool_of[w]]
    n_chunks, rows = list_chunks(engines, w, scratch)
    scratch.active[w] = scratch.busiest[w] = scratch.plain[w] = 0
    if tokens > 0 or pool.own_experts:
        list_rows(engines, w, scratch, drafts, run.bits.shape[0])
        first = np.int64(0)
        if tokens > worker.batch:
            first = worker.batch
            expert_union.union_rows(run.bits, scratch.rows, np.int64(0), first, scratch.union)
            scratch.plain[w], _ = expert_union.count_experts(
                scratch.union, run.masks[w], scratch.activated
            )
            scratch.later[0] = scratch.activated[-1]
        expert_union.union_rows(run.bits, scratch.rows, first, tokens, scratch.union)
        if n_chunks > 0 and pool.own_experts:
            add_chunks(engines, w, run.bits, run.prompts, scratch.union)
        scratch.active[w], scratch.busiest[w] = expert_union.count_experts(
            scratch.union, run.masks[w], scratch.activated
        )
    sequences, context = attended(drafts, worker.batch, tokens, worker.context)
    parts = step_parts(
        cost, sequences, tokens, context, scratch.cached[:n_chunks], scratch.new[:n_chunks], rows,
        scratch.activated, not pool.own_experts,
    )  # fmt: skip
    seconds = total_s(parts) + pool.capture_s
    if drafts.rates.shape[1] > 0:
        if tokens == worker.batch:  # else counted above
            last_layer(run.bits, scratch.rows, worker.batch, run.masks[w], scratch)
        scratch.draft_s[w] = draft_s(
            drafts, worker.batch, tokens, worker.context, scratch, n_chunks, not pool.own_experts
        )
        seconds += scratch.draft_s[w]
    return float(worker.next_start + seconds * worker.slowdown)


@compiled()
def add_chunks(engines: Engines, w: int, bits: Any, prompts: Any, union: Any) -> None:
    """OR the experts of the contexts that the step computes into ``union``."""
    worker, sequences = engines.workers[w], engines.sequences[w]
    for i in range(worker.batch - worker.joined, worker.batch + worker.prefilling):
        if sequences[i].chunk == 0:
            continue
        request = sequences[i].request
        record = engines.requests[request]
        start = sequences[i].computed
        stop = start + sequences[i].chunk
        prompt = record.prompt_len
        if start < prompt:
            expert_union.add_prompt(
                prompts, request, record.trace_request, start, min(stop, prompt), union
            )
        for position in range(max(start, prompt), stop):
            # The window begins with the last prompt token.
            row = (record.window_offset + position - prompt + 1) % record.window_len
            for k in range(union.shape[0]):
                union[k] |= bits[record.window_row + row, k]
