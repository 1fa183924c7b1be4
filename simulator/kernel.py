"""The compiled inner loop: every decode step between two events of the cluster.

A decode step is bound by the weights it reads, so its time needs the number of *distinct* experts
that the tokens of its batch select in each MoE layer. The routing trace is therefore held as bit
sets, one row a token: ``uint64 [rows, moe_layers * words]``. A step ORs the rows of its batch,
counts the bits layer by layer, looks the layer times up and adds attention and the fixed part.

Under expert parallelism a layer waits for the GPU (rank) that reads the most distinct experts, so
the bits are also counted rank by rank, through the masks of the experts that each rank holds.

Nothing here knows queues or policies: the loop stops a worker as soon as its batch could change
(a request ends, KV blocks run out, a single step was asked for) and leaves the decision to
:mod:`eldr_sim.simulator.decode`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from eldr_sim.jit import njit

# Why a worker stopped; kept in ``PoolState.stop``.
RUNNING, FINISHED, OUT_OF_BLOCKS, SINGLE_STEP = 0, 1, 2, 3


#: One row a decode worker. Kept as records, so that a call hands over one array and not eight.
WORKER = np.dtype(
    [
        ("batch", np.int64),  # running requests
        ("next_start", np.float64),  # when the next step may begin, s
        ("stop", np.int64),  # RUNNING, or why the worker waits for its engine
        ("joined", np.int64),  # last slots of the batch, new since the last step
        ("context", np.int64),  # tokens of KV cache of the running requests
        ("free_blocks", np.int64),  # KV blocks that nobody holds
        ("extra_s", np.float64),  # time added to the next step (chunks of prompts), s
        ("extra_tokens", np.int64),  # tokens of those chunks
        ("single", np.int64),  # stop after the next step, whatever happens in it
    ]
)
#: One row a seat: slots ``[w, :batch]`` are the running requests in the order of admission.
SLOT = np.dtype(
    [
        ("request", np.int64),
        ("row", np.int64),  # bit-set row of the token that the next step feeds
        ("row_end", np.int64),  # one past the last row of the replay window
        ("row_span", np.int64),  # length of the window: at row_end, go back by it
        ("left", np.int64),  # output tokens still to generate
        ("room", np.int64),  # tokens that fit into the blocks already held
    ]
)
#: One row a request, negative while still to come.
TOKEN_TIMES = np.dtype(
    [
        ("first", np.float64),  # end of its first decode step, s
        ("resumed", np.float64),  # end of its first step after its last preemption, s
    ]
)
#: One row a decode step.
STEP = np.dtype(
    [
        ("start", np.float64),  # s
        ("end", np.float64),  # s
        ("context", np.int64),  # KV tokens that attention read, summed over the batch
        ("worker", np.int32),
        ("batch", np.int32),
        ("joined", np.int32),  # requests for which this was the first step since they joined
        ("active", np.int32),  # distinct experts, summed over the MoE layers
        ("busiest", np.int32),  # those of the layer's busiest rank, summed over the MoE layers
        ("chunked", np.int32),  # tokens of prompts (re)computed beside the decode tokens
    ]
)


class StepTables(NamedTuple):
    """Step times of one model on one GPU, see :mod:`eldr_sim.kernel_profiles.step_time`."""

    moe_s: NDArray[np.float64]  #: [batch, distinct experts of the busiest rank] one MoE layer
    mixed_moe_s: NDArray[
        np.float64
    ]  #: [tokens, distinct experts] where prompts are in the step too
    fixed_s: NDArray[np.float64]  #: [batch] all but MoE and attention
    attention_s: NDArray[np.float64]  #: [batch, knots] attention of all layers
    context_stride: int  #: tokens between two knots


@intrinsic
def popcount(_typing: Any, _word: Any) -> Any:
    """Count the set bits of a uint64."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen


@njit()
def union_rows(bits: Any, slots: Any, n: int, union: Any) -> None:
    """OR the bit-set rows of ``slots[:n]`` into ``union``; eight a pass to spare the stores."""
    width = bits.shape[1]
    for k in range(width):
        union[k] = 0
    i = 0
    while i + 8 <= n:
        a, b, c, d = (
            bits[slots[i].row],
            bits[slots[i + 1].row],
            bits[slots[i + 2].row],
            bits[slots[i + 3].row],
        )
        e, f, g, h = (
            bits[slots[i + 4].row],
            bits[slots[i + 5].row],
            bits[slots[i + 6].row],
            bits[slots[i + 7].row],
        )
        for k in range(width):
            union[k] |= a[k] | b[k] | c[k] | d[k] | e[k] | f[k] | g[k] | h[k]
        i += 8
    while i < n:
        a = bits[slots[i].row]
        for k in range(width):
            union[k] |= a[k]
        i += 1


@njit()
def moe_time(union: Any, layer_s: Any, layers: int) -> tuple[float, int]:
    """Return the time of all MoE layers, s, and the distinct experts summed over them.

    ``layer_s[d]`` is the time of one layer with ``d`` distinct experts at the step's batch.
    """
    words = union.shape[0] // layers
    total, active = 0.0, 0
    for layer in range(layers):
        distinct = 0
        for w in range(layer * words, (layer + 1) * words):
            distinct += popcount(union[w])  # type: ignore[call-arg]
        total += layer_s[distinct]
        active += distinct
    return total, active


@njit()
def ranked_moe_time(union: Any, masks: Any, layer_s: Any, layers: int) -> tuple[float, int, int]:
    """Return the time of all MoE layers, s, and the distinct experts: all, and the busiest ranks'.

    Both counts are sums over the layers. ``masks`` is ``uint64 [ranks, layers * words]``: every
    expert's bit is set for one rank. ``layer_s[d]`` is the time of one layer with ``d`` distinct
    experts on a rank; it does not fall with ``d``, so the rank with the most is the slowest.
    """
    words = union.shape[0] // layers
    ranks = masks.shape[0]
    total, active, busiest = 0.0, 0, 0
    for layer in range(layers):
        first, end = layer * words, (layer + 1) * words
        most = 0
        for r in range(ranks):
            distinct = 0
            for w in range(first, end):
                distinct += popcount(union[w] & masks[r, w])  # type: ignore[call-arg]
            active += distinct
            most = max(most, distinct)
        total += layer_s[most]
        busiest += most
    return total, active, busiest


@njit()
def attention_time(knots: Any, stride: int, context: int, batch: int) -> float:
    """Interpolate the attention time, s, at the mean context ``context / batch``."""
    x = context / batch / stride
    i = min(int(x), knots.shape[0] - 2)
    return float(knots[i] + (knots[i + 1] - knots[i]) * (x - i))


@njit()
def advance(
    workers: Any,
    slots: Any,
    token_times: Any,
    bits: Any,
    masks: Any,
    chunk_bits: Any,
    layers: int,
    tables: StepTables,
    block_size: int,
    until: float,
    union: Any,
    log: Any,
    logged: int,
    stopped: Any,
) -> tuple[int, int, float]:
    """Run every step that starts before ``until``, in the order of their start.

    A step after which a batch may change moves ``until`` back to its end, so no worker starts a
    step that an effect of this change could still reach.

    Parameters
    ----------
    workers, slots, token_times
        ``WORKER [workers]``, ``SLOT [workers, seats]`` and ``TOKEN_TIMES [requests]``.
    bits
        uint64 ``[rows, layers * words]``.
    masks
        uint64 ``[workers, ranks, layers * words]``, the experts that each rank holds; with one rank
        it holds them all and the mask is not read.
    chunk_bits
        uint64 ``[workers, layers * words]``: the experts of the prompt tokens in each worker's next
        step, whose MoE layers then take the time of all its tokens together. ``[workers, 0]`` where
        ``extra_s`` contains the MoE layers of the chunks.
    layers, tables, block_size
        MoE layers of the model, its step times, tokens a KV block.
    until
        Time limit, s.
    union
        uint64 ``[layers * words]``, scratch.
    log, logged
        ``STEP [capacity]`` and how many rows are filled.
    stopped
        int64 ``[workers]``, filled with the workers that stopped.

    Returns
    -------
    logged, n_stopped, next_start
        Rows of ``log`` filled now; how many workers stopped; the earliest start of a step that is
        still to run, s. A full log returns early: grow it and call again.
    """
    n_stopped = 0
    while True:
        w, start = -1, np.inf
        for i in range(workers.shape[0]):
            if (
                workers[i].stop == RUNNING
                and workers[i].next_start < start
                and (workers[i].batch > 0 or workers[i].extra_s > 0.0)
            ):
                w, start = i, workers[i].next_start
        if w < 0 or start >= until or logged == log.shape[0]:
            return logged, n_stopped, start
        worker, seats = workers[w], slots[w]
        n = worker.batch

        needed = 0
        for i in range(n):
            if seats[i].room == 0:
                needed += 1
        if needed > worker.free_blocks:
            worker.stop = OUT_OF_BLOCKS
            stopped[n_stopped] = w
            n_stopped += 1
            until = start
            continue
        worker.free_blocks -= needed

        duration, active, busiest = worker.extra_s, 0, 0
        mixed = worker.extra_tokens > 0 and chunk_bits.shape[1] > 0
        if n > 0 or mixed:
            union_rows(bits, seats, n, union)
            layer_s = tables.moe_s[n]
            if mixed:
                for k in range(union.shape[0]):
                    union[k] |= chunk_bits[w, k]
                layer_s = tables.mixed_moe_s[n + worker.extra_tokens]
            if masks.shape[1] == 1:
                moe, active = moe_time(union, layer_s, layers)
                busiest = active
            else:
                moe, active, busiest = ranked_moe_time(union, masks[w], layer_s, layers)
            duration += tables.fixed_s[n] + moe
        if n > 0:
            worker.context += n
            duration += attention_time(
                tables.attention_s[n], tables.context_stride, worker.context, n
            )
        end = start + duration
        ended = False
        for i in range(n):
            seat = seats[i]
            seat.room = (block_size if seat.room == 0 else seat.room) - 1
            seat.left -= 1
            if seat.left == 0:
                ended = True
            seat.row += 1
            if seat.row == seat.row_end:
                seat.row -= seat.row_span
        for i in range(n - worker.joined, n):
            times = token_times[seats[i].request]
            if times.first < 0.0:
                times.first = end
            else:
                times.resumed = end

        step = log[logged]
        step.start = start
        step.end = end
        step.context = worker.context
        step.worker = w
        step.batch = n
        step.joined = worker.joined
        step.active = active
        step.busiest = busiest
        step.chunked = worker.extra_tokens
        logged += 1

        single = worker.single != 0 or worker.extra_s > 0.0
        worker.single = 0
        worker.joined = 0
        worker.extra_s = 0.0
        worker.extra_tokens = 0
        worker.next_start = end
        if ended or single:
            worker.stop = FINISHED if ended else SINGLE_STEP
            stopped[n_stopped] = w
            n_stopped += 1
            until = min(until, end)


@njit()
def drop_finished(workers: Any, slots: Any, w: int, finished: Any) -> int:
    """Take the finished requests out of the batch of ``w``; the others keep their order.

    Their indices go to ``finished``; their KV tokens are the caller's to subtract. Returns how
    many there were.
    """
    kept, gone = 0, 0
    for i in range(workers[w].batch):
        if slots[w, i].left == 0:
            finished[gone] = slots[w, i].request
            gone += 1
            continue
        if kept != i:
            slots[w, kept] = slots[w, i]
        kept += 1
    workers[w].batch = kept
    return gone
