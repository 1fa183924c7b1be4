"""A step of an engine: the blocks its tokens need, the experts they activate, and its time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_sim.kernel_profiles.steps.step_cost import step_parts, total_s
from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.engine import Engines, wake
from eldr_sim.simulator.plane.events import schedule_step
from eldr_sim.simulator.plane.kv_cache import n_free, take_blank
from eldr_sim.simulator.plane.state import COLOCATED, DECODE
from eldr_sim.simulator.plane.steps import expert_union

_NONE = np.int64(0)


class Scratch(NamedTuple):
    """Working memory of a step."""

    rows: NDArray[np.int64]  #: ``[max_num_seqs]``
    cached: NDArray[np.int64]  #: ``[max_num_seqs]``
    new: NDArray[np.int64]  #: ``[max_num_seqs]``
    union: NDArray[np.uint64]  #: ``[layers * words]``
    activated: NDArray[np.int64]  #: ``[layers]``


@compiled()
def step(
    clock: Any, events: Any, engines: Engines, w: int, bits: Any, masks: Any, prompts: Any,
    cost: Any, scratch: Scratch, logs: Any, gaps: Any,
) -> None:  # fmt: skip
    """Run the step that worker ``w`` has planned, which starts now.

    Parameters
    ----------
    bits
        uint64 ``[rows, layers * words]``: the replay windows.
    masks
        uint64 ``[workers, ranks, layers * words]``, see `expert_union.count_experts`.
    prompts, cost, scratch
        Rows of the prompts, the worker's step times, working memory.
    logs, gaps
        ``STEP [capacity]`` of each pool, one of them free, and ``GAP [capacity]``, one a sequence.
    """
    worker, pool = engines.workers[w], engines.pools[engines.pool_of[w]]
    batch = worker.batch
    needed = blocks_needed(engines, w, scratch)
    if needed > n_free(engines.workers, w):
        wake(clock, events, engines.workers, w)  # the engine has to preempt
        return
    if needed > 0:
        take_blank(engines.kv, engines.workers, w, needed)
    n_chunks, rows = list_chunks(engines, w, scratch)
    active, busiest = 0, 0
    if batch > 0 or pool.own_experts:
        expert_union.union_rows(bits, scratch.rows, batch, scratch.union)
        if n_chunks > 0 and pool.own_experts:
            add_chunks(engines, w, bits, prompts, scratch.union)
        active, busiest = expert_union.count_experts(scratch.union, masks[w], scratch.activated)
    parts = step_parts(
        cost, batch, worker.context + batch, scratch.cached, scratch.new, n_chunks, rows,
        scratch.activated, not pool.own_experts,
    )  # fmt: skip
    end = worker.next_start + (total_s(parts) + pool.capture_s) * worker.slowdown
    finish_step(clock, events, engines, w, end, n_chunks, active, busiest, logs, gaps)


@compiled()
def blocks_needed(engines: Engines, w: int, scratch: Scratch) -> Any:
    """Return the KV blocks that a step's next tokens need, and list their rows."""
    sequences, needed = engines.sequences[w], _NONE
    for i in range(engines.workers[w].batch):
        scratch.rows[i] = sequences[i].row
        if sequences[i].free_slots == 0:
            needed += 1
    return needed


@compiled()
def list_chunks(engines: Engines, w: int, scratch: Scratch) -> tuple[Any, Any]:
    """List the chunks of contexts that a step computes.

    Returns how many there are, and the rows of lm_head: one a sequence of the step.
    """
    worker, sequences = engines.workers[w], engines.sequences[w]
    n_chunks, rows = _NONE, worker.batch
    if worker.chunk_tokens > 0:
        for i in range(worker.batch - worker.joined, worker.batch + worker.prefilling):
            if sequences[i].chunk > 0:
                scratch.cached[n_chunks] = sequences[i].computed
                scratch.new[n_chunks] = sequences[i].chunk
                n_chunks += 1
                if i >= worker.batch:
                    rows += 1
    return n_chunks, rows


@compiled()
def finish_step(
    clock: Any, events: Any, engines: Engines, w: int, end: float, n_chunks: int, active: int,
    busiest: int, logs: Any, gaps: Any,
) -> None:  # fmt: skip
    """Move worker ``w`` to the end of its step: tokens, contexts, log, and what comes next."""
    worker, sequences = engines.workers[w], engines.sequences[w]
    pool = engines.pools[engines.pool_of[w]]
    batch, ended = worker.batch, False
    worker.context += batch
    for i in range(batch):
        sequence = sequences[i]
        if sequence.free_slots == 0:
            sequence.free_slots = engines.settings[0].block_size
        sequence.free_slots -= 1
        sequence.tokens_left -= 1
        if sequence.tokens_left == 0:
            ended = True
        sequence.row += 1
        if sequence.row == sequence.row_end:
            sequence.row -= sequence.row_span
    for i in range(batch - worker.joined, batch):
        record = engines.requests[sequences[i].request]
        if record.first_token_s < 0.0:
            record.first_token_s = end
        else:
            gap = gaps[clock[0].n_gaps]
            clock[0].n_gaps += 1
            gap.last_token_s, gap.resumed_s = record.last_token_s, end
    if n_chunks > 0:
        for i in range(batch - worker.joined, batch + worker.prefilling):
            sequences[i].computed += sequences[i].chunk
            sequences[i].todo -= sequences[i].chunk
            sequences[i].chunk = 0
        ended = ended or worker.filled > 0

    row = logs[engines.pool_of[w]][pool.n_steps]
    pool.n_steps += 1
    row.start, row.end, row.context = worker.next_start, end, worker.context
    row.worker = w - pool.first_worker
    row.batch, row.joined, row.active, row.busiest = batch, worker.joined, active, busiest
    row.chunks, row.chunk_tokens = n_chunks, worker.chunk_tokens
    worker.begun_tokens += worker.chunk_tokens

    planned_ahead = worker.one_step or worker.blocked or n_chunks > 0
    worker.one_step = worker.blocked = False
    worker.joined = worker.chunk_tokens = worker.filled = 0
    worker.next_start = end
    if ended or planned_ahead:
        worker.ended = ended
        wake(clock, events, engines.workers, w)
    else:
        schedule_step(clock, events, engines.workers, w)


# --- from outside ---


@compiled()
def _last_steps(log: Any, n: int, own: int) -> tuple[Any, Any]:
    """Return the last two steps of a pool's engine that were not cut; -1 where there is none."""
    last = np.int64(-1)
    for i in range(n - 1, -1, -1):
        if log[i].worker == own and log[i].end < np.inf:
            if last >= 0:
                return last, np.int64(i)
            last = np.int64(i)
    return last, np.int64(-1)


@compiled()
def move_end(
    clock: Any, engines: Engines, w: int, seconds: float, logs: Any, gaps: Any
) -> None:  # fmt: skip
    """Let the step in progress end later; infinitely: nobody gets its tokens.

    Notes when each sequence of a step that is cut, or has just ended, got its last token, and how
    many it has generated.
    """
    worker, sequences, now = engines.workers[w], engines.sequences[w], clock[0].now
    pool = engines.pools[engines.pool_of[w]]
    log = logs[engines.pool_of[w]]
    last, before = _last_steps(log, pool.n_steps, w - pool.first_worker)
    if last < 0:
        return
    was, end, cut = log[last].end, log[last].end + seconds, seconds == np.inf
    first_joined = worker.batch - log[last].joined
    for i in range(worker.batch):
        record = engines.requests[sequences[i].request]
        if was <= now:
            if cut:
                record.last_token_s = was
            continue
        if cut:
            sequences[i].tokens_left += 1
        if i >= first_joined:
            if record.first_token_s == was:
                record.first_token_s = -1.0 if cut else end
            else:
                _move_gap(clock, gaps, record.last_token_s, was, end)
        elif cut:
            record.last_token_s = log[before].end
    if was > now:
        log[last].end = end
    if cut and pool.role in (DECODE, COLOCATED):
        for i in range(worker.batch + worker.prefilling):
            record, left = engines.requests[sequences[i].request], sequences[i].tokens_left
            if left > 0:
                record.generated = record.output_len - left


@compiled()
def _move_gap(clock: Any, gaps: Any, last_token: float, resumed: float, other: float) -> None:
    """Move the end of the gap that a sequence's last step closed."""
    for i in range(clock[0].n_gaps - 1, -1, -1):
        if gaps[i].last_token_s == last_token and gaps[i].resumed_s == resumed:
            gaps[i].resumed_s = other
            return


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
