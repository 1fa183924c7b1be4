"""A step, whatever computes it: plan, count the experts, add up the parts, finish.

The pool's executor, a compiled function of the world and of the first engine, counts the experts
that tokens choose and returns when the step ends: `plain` (an engine by itself), `group_step`
(engines that dispatch tokens to the experts of all), `disaggregated` (to experts on separate GPUs,
in micro-batches), `streamed` (layers come and go, or lie in stages). KV blocks, tokens, contexts
and a record of ``STEP`` are here."""

from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Floats, Ints, Words
from eldr_sim.simulator.plane.compiled import compiled, execute
from eldr_sim.simulator.plane.events import schedule_step, wake
from eldr_sim.simulator.plane.kv.kv_cache import blocks_of, take_blank
from eldr_sim.simulator.plane.kv.kv_manager import Engines, fits, keep_tokens, slide_batch, slots_of
from eldr_sim.simulator.plane.state import HERE
from eldr_sim.simulator.plane.steps.verify import Drafts, accepted, draft_row, found_drafts

_NONE = np.int64(0)


class Scratch(NamedTuple):
    """Working memory of a step."""

    rows: Ints  #: ``[tokens]``: of a batch
    cached: Ints  #: ``[max_num_seqs]``
    new: Ints  #: ``[max_num_seqs]``
    union: Words  #: ``[layers * words]``
    activated: Ints  #: ``[layers]``
    active: Ints  #: ``[workers]``: activated experts, summed over the layers,
    busiest: Ints  #: ``[workers]``: those of each layer's busiest rank,
    plain: Ints  #: ``[workers]``: and ``active`` without drafts
    later: Ints  #: ``[1]``: experts of a draft pass
    draft_s: Floats  #: ``[workers]``: what drafting takes


def make_scratch(
    n_workers: int, most_seqs: int, most_decoded: int, n_layers: int, width: int
) -> Scratch:
    """Return the memory of steps of engines that run and decode at most this number."""
    sizes: dict[str, int] = dict.fromkeys(Scratch._fields, n_workers)
    sizes |= {"rows": most_decoded, "cached": most_seqs, "new": most_seqs, "union": width}
    sizes |= {"activated": n_layers or 1, "later": 1}
    types = {"union": np.uint64, "draft_s": np.float64}
    return Scratch(**{name: np.zeros(n, types.get(name, np.int64)) for name, n in sizes.items()})


@compiled()
def run_step(world: Any, leader: int) -> Any:
    """Run the step that an engine, or ``leader``'s group, has planned; False: it failed."""
    run = world.run
    clock, events, engines, scratch = run.clock, run.events, run.engines, run.scratch
    workers, pool = engines.workers, engines.pools[engines.pool_of[leader]]
    engines_of = range(leader, leader + workers[leader].width)
    workers[leader].step_due = False
    busy, short = False, False
    for w in engines_of:
        busy = busy or has_step(workers[w])
    if not busy:
        return True
    for w in engines_of:
        workers[w].next_start = clock[0].now
        if not pool.mixed_steps:
            _sit_out(clock, engines, w)
        slides = engines.kv.groups > 0 and not workers[w].planned
        if (slides and not slide_batch(engines, w)) or not fits(engines, w, _NONE):
            wake(clock, events, workers, w)  # this engine has to preempt, then all start
            short = True
    if short:
        for w in engines_of:
            _come_back(engines, w)
        schedule_step(clock, events, workers, leader)
        return True
    for w in engines_of:
        _take_along(engines, w)
    end = execute(pool.executor, world, leader)
    if end < 0.0:
        return False
    for w in engines_of:
        _leave_behind(engines, w)
    if engines.kv.tiers.links.shape[1] > 0:
        end = _with_loads(clock, engines, engines_of, end)
    for w in engines_of:
        if has_step(workers[w]):
            drafts = run.drafts[engines.pool_of[w]]
            _finish(clock, events, engines, w, end, scratch, drafts, world.log, world.gaps)
            _come_back(engines, w)
        else:
            workers[w].next_start = end
    return True


@compiled()
def has_step(worker: Any) -> Any:
    """Whether an engine has anything to compute."""
    return bool(worker.batch > 0 or worker.chunk_tokens > 0 or worker.riding > 0)


@compiled()
def _with_loads(clock: Any, engines: Engines, engines_of: range, end: float) -> Any:
    """Return when a step ends that waits for KV blocks layer by layer."""
    seconds, longest = end - clock[0].now, end - clock[0].now
    for w in engines_of:
        load = engines.workers[w].load_end - clock[0].now
        if load > 0.0:
            layers = engines.kv.tiers.loading[0].layers
            longest = max(longest, max(seconds, load) + min(seconds, load) / layers)
    return clock[0].now + longest


@compiled()
def _sit_out(clock: Any, engines: Engines, w: int) -> None:
    """Set decoding sequences aside, behind all, if the step computes prompts (SGLang)."""
    worker, sequences, requests = engines.workers[w], engines.sequences, engines.requests
    n, places = worker.batch - worker.joined, sequences.shape[1] // 2
    if n == 0 or (worker.chunk_tokens == 0 and worker.joined == 0):
        return
    worker.resting, worker.batch = n, worker.joined
    for i in range(n):
        sequences[w, places + i] = sequences[w, i]
        sequences[w, places + i].got = 0
    for i in range(worker.rested, n):
        requests[sequences[w, i].request].last_token_s = clock[0].now
    worker.rested = n
    tokens, context = _NONE, _NONE
    for i in range(worker.batch + worker.prefilling):
        sequences[w, i] = sequences[w, n + i]
        if i < worker.batch:
            tokens += sequences[w, i].tokens
            context += sequences[w, i].computed + sequences[w, i].todo
    worker.resting_tokens, worker.resting_context = worker.tokens - tokens, worker.context - context
    worker.tokens, worker.context = tokens, context


@compiled()
def _come_back(engines: Engines, w: int) -> None:
    """Put the sequences back that sat a step out."""
    worker = engines.workers[w]
    if worker.resting == 0:
        return
    _stand_before(engines, w, worker.resting)
    worker.tokens += worker.resting_tokens
    worker.context += worker.resting_context
    worker.resting = 0


@compiled()
def _stand_before(engines: Engines, w: int, n: int) -> None:
    """Put ``n`` sequences from behind all places of a batch before the others."""
    worker, sequences = engines.workers[w], engines.sequences
    places = sequences.shape[1] // 2
    for i in range(worker.batch + worker.prefilling - 1, -1, -1):
        sequences[w, n + i] = sequences[w, i]
    for i in range(n):
        sequences[w, i] = sequences[w, places + i]
    worker.batch += n


@compiled()
def _take_along(engines: Engines, w: int) -> None:
    """Let sequences that ride in this step (`engine._finish`) stand before the others."""
    worker = engines.workers[w]
    if worker.riding == 0:
        return
    _stand_before(engines, w, worker.riding)
    for i in range(worker.riding):
        worker.context += _context(engines, engines.sequences[w, i].request)
    worker.tokens += worker.riding_tokens


@compiled()
def _leave_behind(engines: Engines, w: int) -> None:
    """Take the sequences out again that have ended: nobody gets their tokens."""
    worker, sequences = engines.workers[w], engines.sequences
    n = worker.riding
    if n == 0:
        return
    for i in range(n):
        worker.context -= _context(engines, sequences[w, i].request)
    worker.batch -= n
    worker.tokens -= worker.riding_tokens
    for i in range(worker.batch + worker.prefilling):
        sequences[w, i] = sequences[w, n + i]


@compiled()
def _context(engines: Engines, request: int) -> Any:
    """Return the tokens of a request that has ended which have been computed."""
    return engines.requests[request].prompt_len - 1 + engines.requests[request].output_len


@compiled()
def list_rows(engines: Engines, w: int, scratch: Scratch, drafts: Drafts, n_rows: int) -> Any:
    """List the bit-set rows, of ``n_rows``, of the batch's tokens, drafts last; return how many."""
    sequences, batch = engines.sequences[w], engines.workers[w].batch
    n = batch
    for i in range(batch):
        row = sequences[i].row
        scratch.rows[i] = row
        for j in range(1, sequences[i].tokens):
            row += 1
            if row == sequences[i].row_end:
                row -= sequences[i].row_span
            scratch.rows[n] = row
            if not drafts.in_a_row:
                record = engines.requests[sequences[i].request]
                scratch.rows[n] = draft_row(drafts, record, sequences[i], j, n_rows)
            n += 1
    if engines.settings[0].period > 0:
        for i in range(n):
            scratch.rows[i] = i % engines.settings[0].period
    return n


@compiled()
def list_chunks(engines: Engines, w: int, scratch: Scratch) -> tuple[Any, Any]:
    """List the chunks of contexts of a step; returns how many, and the rows of lm_head."""
    worker, sequences = engines.workers[w], engines.sequences[w]
    n_chunks, rows = _NONE, worker.tokens
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
def _finish(
    clock: Any, events: Any, engines: Engines, w: int, end: float, scratch: Scratch,
    drafts: Drafts, log: Any, gaps: Any,
) -> None:  # fmt: skip
    """Move worker ``w`` to the end of its step: tokens, contexts, log, and what comes next."""
    worker, sequences = engines.workers[w], engines.sequences[w]
    pool = engines.pools[engines.pool_of[w]]
    lookahead = pool.lookahead
    batch, outputs, ended = worker.batch, _NONE, False
    n_chunks, _ = list_chunks(engines, w, scratch)
    size, n_rates, next_drafts = engines.settings[0].block_size, drafts.rates.shape[1], _NONE
    next_tokens = blocks = _NONE
    if n_rates > 0:
        next_drafts = drafts.k_of[batch + worker.riding]
    for i in range(batch):
        sequence, got = sequences[i], np.int64(1)
        slots = slots_of(sequence, lookahead)
        if sequence.free_slots < slots:
            more = blocks_of(slots - sequence.free_slots, size)
            sequence.free_slots += more * size
            blocks += more
        if sequence.drafts > 0:
            found = accepted(drafts, engines.requests[sequence.request], sequence)
            drafts.counts[found] += 1
            drafts.counts[n_rates + 1] += sequence.drafts
            got = min(found + 1, sequence.tokens_left)
        outputs += got
        sequence.got, sequence.decodes = got, True
        sequence.rejected = sequence.tokens - got if pool.frees_late else _NONE
        sequence.flying = sequence.chunk + got if pool.frees_late else _NONE
        sequence.free_slots -= got
        sequence.room -= got
        sequence.tokens_left -= got
        if sequence.tokens_left == 0:
            ended = True
        sequence.row += got
        while sequence.row >= sequence.row_end:
            sequence.row -= sequence.row_span
        sequence.drafts = found_drafts(drafts, sequence, next_drafts)
        sequence.tokens = 1 + sequence.drafts
        next_tokens += sequence.tokens
    for i in range(batch, batch + worker.prefilling):  # those that sat it out are known now
        sequences[i].got = sequences[i].rejected = 0
        sequences[i].flying = sequences[i].chunk if pool.frees_late else _NONE
    worker.context += outputs
    if blocks > 0:
        take_blank(engines.kv, engines.workers, w, blocks * (1 + engines.kv.groups))
    if worker.resting == 0:
        for i in range(worker.rested):
            gap = gaps[clock[0].n_gaps]
            clock[0].n_gaps += 1
            gap.last_token_s = engines.requests[sequences[i].request].last_token_s
            gap.resumed_s = end
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
            if sequences[i].chunk > 0:
                keep_tokens(engines, w, sequences[i].request, sequences[i].computed, end)
            sequences[i].todo -= sequences[i].chunk
            sequences[i].chunk = 0
        ended = ended or worker.filled > 0

    row = log[clock[0].n_steps]
    clock[0].n_steps += 1
    row.start, row.end, row.context = worker.next_start, end, worker.context
    row.worker = w
    row.sequences, row.outputs = batch, outputs
    row.tokens = worker.tokens + worker.riding_tokens
    row.joined, row.rested = worker.joined, 0
    if worker.resting == 0:
        row.rested, worker.rested = worker.rested, 0
    if n_chunks > 0 or worker.joined > 0:
        worker.polled = 0  # who computes prompts looks at once
    else:
        worker.polled += 1
        if not worker.retracts:
            worker.share = max(pool.least_share, worker.share - pool.share_step)
    row.active, row.busiest = scratch.active[w], scratch.busiest[w]
    row.chunks, row.chunk_tokens = n_chunks, worker.chunk_tokens
    row.waiting, row.stopped = worker.n_waiting, worker.stopped
    row.plain, row.draft_s = scratch.plain[w], scratch.draft_s[w]
    worker.tokens = next_tokens
    worker.begun_tokens += worker.chunk_tokens

    planned_ahead = worker.one_step or worker.blocked or n_chunks > 0 or pool.balance_steps > 0
    planned_ahead = planned_ahead or worker.riding > 0  # whose places others may take
    if (
        n_rates > 0 or engines.kv.groups > 0
    ):  # fewer drafts, or windows that move, may let others in
        queued = max(worker.new_head, worker.arrived_head, worker.preempted_head) >= 0
        planned_ahead = planned_ahead or queued or worker.prefilling > 0
    worker.riding = worker.riding_tokens = 0
    worker.one_step = worker.blocked = worker.planned = worker.retracts = False
    worker.joined = worker.chunk_tokens = worker.filled = 0
    worker.last_admitted = worker.n_admitted
    worker.next_start = end
    if ended or planned_ahead:
        worker.ended = ended
        wake(clock, events, engines.workers, w)
    else:
        schedule_step(clock, events, engines.workers, w)


# --- from outside ---


@compiled()
def _last_steps(log: Any, n: int, w: int) -> tuple[Any, Any]:
    """Return the last two steps of an engine that were not cut; -1 where there is none."""
    last = np.int64(-1)
    for i in range(n - 1, -1, -1):
        if log[i].worker == w and log[i].end < np.inf:
            if last >= 0:
                return last, np.int64(i)
            last = np.int64(i)
    return last, np.int64(-1)


@compiled()
def move_end(
    clock: Any, engines: Engines, w: int, seconds: float, log: Any, gaps: Any
) -> None:  # fmt: skip
    """Let the step in progress end later; infinitely: its tokens are lost. Notes when sequences
    of a cut step got their last token, and how many."""
    worker, sequences, now = engines.workers[w], engines.sequences[w], clock[0].now
    last, before = _last_steps(log, clock[0].n_steps, w)
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
            sequences[i].tokens_left += sequences[i].got
            sequences[i].free_slots += sequences[i].got
        if i >= first_joined:
            if record.first_token_s == was:
                record.first_token_s = -1.0 if cut else end
            else:
                _move_gap(clock, gaps, record.last_token_s, was, end)
        elif cut:
            record.last_token_s = log[before].end
    if was > now:
        log[last].end = end
    if cut and engines.pools[engines.pool_of[w]].then == HERE:
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
