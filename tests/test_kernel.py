"""The compiled step loop against a twin that counts experts with Python sets."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.simulator import kernel
from eldr_sim.simulator.decode import DecodePool

# -- the twin ----------------------------------------------------------------------------------


def experts_of(bits, layers):
    """Return, per row and layer, the set of experts."""
    words = bits.shape[1] // layers
    return [
        [
            {
                64 * w + b
                for w in range(words)
                for b in range(64)
                if int(row[layer * words + w]) >> b & 1
            }
            for layer in range(layers)
        ]
        for row in bits
    ]


def one_step(worker, seats, times, sets, ranks, chunk, tables, block_size):
    """Run one step of one worker; return its log row, or None if blocks run out.

    ``ranks`` holds, per layer, the set of experts of each rank; ``chunk``, per layer, those of the
    prompt tokens in the step, or None where their time is the step's extra time.
    """
    batch = seats[: worker.batch]
    needed = sum(seat.room == 0 for seat in batch)
    if needed > worker.free_blocks:
        return None
    worker.free_blocks -= needed
    n, start, duration = len(batch), worker.next_start, worker.extra_s
    active = busiest = 0
    mixed = chunk is not None and worker.extra_tokens > 0
    if n or mixed:
        moe = 0.0
        for layer in range(len(sets[0])):
            chosen = set().union(*(sets[seat.row][layer] for seat in batch))
            layer_s = tables.moe_s[n]
            if mixed:
                chosen |= chunk[layer]
                layer_s = tables.mixed_moe_s[n + worker.extra_tokens]
            counts = [len(chosen & held) for held in ranks[layer]]
            moe += max(layer_s[count] for count in counts)
            active += len(chosen)
            busiest += max(counts)
        duration += tables.fixed_s[n] + moe
    if n:
        worker.context += n
        mean = worker.context / n / tables.context_stride
        knots = tables.attention_s[n]
        left = min(int(mean), len(knots) - 2)
        duration += knots[left] + (knots[left + 1] - knots[left]) * (mean - left)
    end = start + duration
    for seat in batch:
        seat.room = (seat.room or block_size) - 1
        seat.left -= 1
        seat.row += 1
        if seat.row == seat.row_end:
            seat.row -= seat.row_span
    for seat in batch[n - worker.joined :]:
        which = "first" if times[seat.request].first < 0 else "resumed"
        setattr(times[seat.request], which, end)
    row = (start, end, worker.context, n, worker.joined, active, busiest, worker.extra_tokens)
    ended = any(seat.left == 0 for seat in batch)
    single = worker.single or worker.extra_s > 0
    worker.single = worker.joined = worker.extra_tokens = 0
    worker.extra_s = 0.0
    worker.next_start = end
    if ended or single:
        worker.stop = kernel.FINISHED if ended else kernel.SINGLE_STEP
    return row


def slow_advance(
    workers, slots, times, sets, ranks, chunks, tables, block_size, until, room_in_log
):
    """Do what ``kernel.advance`` does, one worker's step at a time."""
    log, stopped = [], []
    while True:
        ready = [
            (w.next_start, i)
            for i, w in enumerate(workers)
            if w.stop == kernel.RUNNING and (w.batch or w.extra_s > 0)
        ]
        start, i = min(ready, default=(np.inf, -1))
        if start >= until or len(log) == room_in_log:
            return log, stopped, start
        row = one_step(workers[i], slots[i], times, sets, ranks[i], chunks[i], tables, block_size)
        if row is None:
            workers[i].stop = kernel.OUT_OF_BLOCKS
        else:
            log.append((*row[:3], i, *row[3:]))
        if workers[i].stop != kernel.RUNNING:
            stopped.append(i)
            until = min(until, workers[i].next_start)


# -- random pools ------------------------------------------------------------------------------


def records(array):
    """Return mutable twins of the rows of a structured array."""
    return [
        SimpleNamespace(**{name: row[name].item() for name in array.dtype.names}) for row in array
    ]


def rows(array):
    return [tuple(row) for row in array.tolist()]


def values(twins):
    return [tuple(vars(twin).values()) for twin in twins]


def random_pool(rng, n_workers, n_experts, layers, block_size, dyadic):
    """Return kernel arguments that an engine could have set up, but in any combination."""
    seats = 20
    words = -(-n_experts // 64)
    bits = np.zeros((40, layers, words), np.uint64)
    for row in bits.reshape(-1, words):
        for expert in rng.integers(n_experts, size=rng.integers(0, 5)):
            row[expert // 64] |= np.uint64(1) << np.uint64(expert % 64)
    workers = np.zeros(n_workers, kernel.WORKER)
    slots = np.zeros((n_workers, seats), kernel.SLOT)
    times = np.full(n_workers * seats, -1.0, kernel.TOKEN_TIMES)
    times["first"][rng.random(len(times)) < 0.3] = 0.125
    for w in range(n_workers):
        batch = int(rng.integers(0, seats + 1))
        recomputing = rng.random() < 0.2
        workers[w] = (
            batch,
            rng.integers(3) / 4,
            kernel.RUNNING if rng.random() < 0.9 else kernel.FINISHED,
            rng.integers(0, batch + 1),
            rng.integers(0, 400),
            rng.integers(0, 30),
            rng.integers(1, 5) / 8 if recomputing else 0.0,
            rng.integers(1, 9) if recomputing else 0,
            rng.random() < 0.2,
        )
        for i in range(batch):
            first, span = rng.integers(0, 30), rng.integers(1, 11)
            slots[w, i] = (
                w * seats + i,
                first + rng.integers(span),
                first + span,
                span,
                rng.integers(1, 25),
                rng.integers(0, block_size + 1),
            )
    # Whole eighths of a second make steps of several workers begin together.
    scale = (lambda shape: rng.integers(1, 4, shape) / 8.0) if dyadic else rng.random
    tables = kernel.StepTables(
        scale((seats + 1, n_experts + 1)),
        scale((seats + 10, n_experts + 1)),
        scale(seats + 1),
        scale((seats + 1, 4)),
        16,
    )
    return workers, slots, times, bits.reshape(40, -1), tables


def random_ranks(rng, n_workers, n_ranks, n_experts, layers):
    """Return the experts of each rank, as masks for the kernel and as sets for its twin."""
    words = -(-n_experts // 64)
    masks = np.zeros((n_workers, n_ranks, layers, words), np.uint64)
    owner = rng.integers(n_ranks, size=(n_workers, layers, n_experts))
    for (w, layer, expert), rank in np.ndenumerate(owner):
        masks[w, rank, layer, expert // 64] |= np.uint64(1) << np.uint64(expert % 64)
    held = [
        [[set(np.flatnonzero(of == rank).tolist()) for rank in range(n_ranks)] for of in worker]
        for worker in owner
    ]
    return masks.reshape(n_workers, n_ranks, -1), held


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n_workers=st.integers(1, 4),
    n_experts=st.sampled_from([1, 5, 64, 65, 130]),
    layers=st.integers(1, 3),
    block_size=st.sampled_from([1, 2, 16]),
    capacity=st.sampled_from([1, 3, 10, 1000]),
    dyadic=st.booleans(),
    n_ranks=st.integers(1, 4),
    colocated=st.booleans(),
)
def test_advance_equals_its_twin(
    seed, n_workers, n_experts, layers, block_size, capacity, dyadic, n_ranks, colocated
):
    rng = np.random.default_rng(seed)
    workers, slots, times, bits, tables = random_pool(
        rng, n_workers, n_experts, layers, block_size, dyadic
    )
    if n_ranks > 1:  # the slowest rank is the one with the most experts
        tables.moe_s.sort(axis=1)
        tables.mixed_moe_s.sort(axis=1)
    chunk_bits, chunks = np.zeros((n_workers, 0), np.uint64), [None] * n_workers
    if colocated:
        chunk_bits = bits[rng.integers(len(bits), size=n_workers)] | bits[0]
        chunks = experts_of(chunk_bits, layers)
    masks, ranks = random_ranks(rng, n_workers, n_ranks, n_experts, layers)
    sets = experts_of(bits, layers)
    twin_workers, twin_times = records(workers), records(times)
    twin_slots = [records(seats) for seats in slots]
    union = np.zeros(bits.shape[1], np.uint64)
    stopped = np.zeros(n_workers, np.int64)
    finished = np.zeros(slots.shape[1], np.int64)
    until = 0.0
    for _ in range(12):
        until = np.inf if rng.random() < 0.2 else until + 2 * rng.random()
        log, logged = np.zeros(capacity, kernel.STEP), int(rng.integers(0, capacity + 1))
        before = logged
        logged, n_stopped, next_start = kernel.advance(
            workers, slots, times, bits, masks, chunk_bits, layers, tables, block_size, until,
            union, log, logged, stopped,
        )  # fmt: skip
        expected = slow_advance(
            twin_workers, twin_slots, twin_times, sets, ranks, chunks, tables, block_size, until,
            capacity - before,
        )  # fmt: skip
        got = rows(log[before:logged]), stopped[:n_stopped].tolist(), next_start
        assert got == expected
        assert rows(workers) == values(twin_workers)
        assert [rows(seats) for seats in slots] == [values(seats) for seats in twin_slots]
        assert rows(times) == values(twin_times)
        for w in stopped[:n_stopped]:  # what the engine would do, roughly
            if workers[w]["stop"] == kernel.FINISHED:
                gone = kernel.drop_finished(workers, slots, w, finished)
                seats = twin_slots[w][: twin_workers[w].batch]
                assert finished[:gone].tolist() == [s.request for s in seats if s.left == 0]
                kept = [s for s in seats if s.left > 0]
                assert rows(slots[w, : workers[w]["batch"]]) == values(kept)
                twin_slots[w] = records(slots[w])
                twin_workers[w].batch = len(kept)
            else:
                workers[w]["free_blocks"] += 5
                twin_workers[w].free_blocks += 5
            workers[w]["stop"] = twin_workers[w].stop = kernel.RUNNING


@given(seed=st.integers(0, 2**32), words=st.integers(1, 3), layers=st.integers(1, 4))
def test_one_rank_that_holds_all_counts_as_no_ranks(seed, words, layers):
    rng = np.random.default_rng(seed)
    union = rng.integers(0, 2**64, layers * words, np.uint64)
    layer_s = np.sort(rng.random(64 * words + 1))
    everything = np.full((1, layers * words), ~np.uint64(0))
    total, active = kernel.moe_time(union, layer_s, layers)
    assert kernel.ranked_moe_time(union, everything, layer_s, layers) == (total, active, active)


def test_a_batch_of_one_by_hand():
    """Three tokens of one request: 2 + 1 + 2 distinct experts, a window that wraps, one block."""
    workers = np.zeros(1, kernel.WORKER)
    workers[0] = (1, 1.0, kernel.RUNNING, 1, 31, 1, 0.0, 0, 0)
    slots = np.zeros((1, 1), kernel.SLOT)
    slots[0, 0] = (0, 1, 2, 2, 3, 1)
    times = np.full(1, -1.0, kernel.TOKEN_TIMES)
    bits = np.array([[0b1], [0b110]], np.uint64)
    moe = np.array([[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    attention = np.array([[0.0, 0.0, 0.0], [0.0, 16.0, 32.0]])
    tables = kernel.StepTables(moe, moe, np.array([0.0, 0.5]), attention, 16)
    log, stopped = np.zeros(9, kernel.STEP), np.zeros(1, np.int64)
    logged, n_stopped, next_start = kernel.advance(
        workers, slots, times, bits, np.zeros((1, 1, 0), np.uint64), np.zeros((1, 0), np.uint64), 1,
        tables, 4, np.inf, np.zeros(1, np.uint64), log, 0, stopped,
    )  # fmt: skip
    # 0.5 fixed, 1 s an expert, 1 s a context token (32, 33, 34)
    assert log["end"][:logged].tolist() == [35.5, 70.0, 106.5]
    assert log["active"][:logged].tolist() == [2, 1, 2]
    assert times[0]["first"] == 35.5
    assert workers[0]["free_blocks"] == 0  # room for one token, then a new block
    assert (n_stopped, workers[0]["stop"], next_start) == (1, kernel.FINISHED, np.inf)


# -- many steps a call, or one -----------------------------------------------------------------

busy_cluster = {
    "seed": st.integers(0, 2**32),
    "n_decode": st.integers(1, 3),
    "n_blocks": st.integers(14, 60),
    "max_num_seqs": st.integers(1, 6),
}


def random_load(rng, make_workload, n=25):
    arrival = np.round(np.cumsum(rng.exponential(0.004, n)), 9)
    arrival[rng.random(n) < 0.2] = 0.0
    return make_workload(
        np.sort(arrival), rng.integers(1, 20, n), rng.integers(1, 30, n), seed=int(rng.integers(99))
    )


@settings(max_examples=40, deadline=None)
@given(**busy_cluster)
def test_macro_steps_equal_single_steps(
    make_cluster, make_workload, seed, n_decode, n_blocks, max_num_seqs
):
    workload = random_load(np.random.default_rng(seed), make_workload)

    def record(advance=DecodePool.advance, log_rows=1 << 14):
        cluster = make_cluster(
            workload, n_decode=n_decode, n_blocks=n_blocks, max_num_seqs=max_num_seqs, seed=seed
        )
        cluster.pool._log = np.zeros(log_rows, kernel.STEP)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DecodePool, "advance", advance)
            return cluster.run()

    def one_step_a_call(pool, until):
        asked, start = pool.state["single"].copy(), pool.state["next_start"].copy()
        pool.state["single"] = 1
        advance(pool, until)
        idle = pool.state["next_start"] == start
        pool.state["single"][idle] = asked[idle]

    advance = DecodePool.advance
    normal, single, short_log = record(), record(one_step_a_call), record(log_rows=1)
    assert len(normal.decode_steps) > len(workload)
    for other in (single, short_log):
        assert other.requests == normal.requests
        assert rows(other.decode_steps) == rows(normal.decode_steps)
        np.testing.assert_array_equal(other.first_token_s, normal.first_token_s)
        assert other.preempted_gaps == normal.preempted_gaps
        assert other.end_s == normal.end_s
