"""The compiled inner loop: every decode step between two events of the cluster.

A decode step is bound by the weights it reads, so its time needs the number of *distinct* experts
that the tokens of its batch select in each MoE layer. The routing trace is therefore held as bit
sets, one row a token: ``uint64 [rows, moe_layers * words]``. A step ORs the rows of its batch,
counts the bits layer by layer, looks the layer times up and adds attention and the fixed part.

Nothing here knows queues or policies: the loop stops a worker as soon as its batch could change
(a request ends, KV blocks run out, a single step was asked for) and leaves the decision to
:mod:`eldr_sim.simulator.decode`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

# Why a worker stopped; kept in ``PoolState.stop``.
RUNNING, FINISHED, OUT_OF_BLOCKS, SINGLE_STEP = 0, 1, 2, 3


class PoolState(NamedTuple):
    """Arrays of a pool of ``W`` decode workers with ``S`` batch slots each.

    Slots ``0 .. batch[w]-1`` of a worker are its running requests in the order of admission.
    """

    batch: NDArray[np.int64]  #: [W] running requests
    next_start: NDArray[np.float64]  #: [W] when the next step may begin, s
    stop: NDArray[np.int64]  #: [W] RUNNING or why the worker waits for its engine
    joined: NDArray[np.int64]  #: [W] requests at the end of the slots that joined since last step
    context: NDArray[np.int64]  #: [W] tokens of KV cache of the running requests
    free_blocks: NDArray[np.int64]  #: [W] KV blocks that nobody holds
    extra_s: NDArray[np.float64]  #: [W] time added to the next step (recomputed prompts), s
    extra_tokens: NDArray[np.int64]  #: [W] tokens of that recomputation
    request: NDArray[np.int32]  #: [W, S] request index
    row: NDArray[np.int64]  #: [W, S] bit-set row of the token that the next step feeds
    row_end: NDArray[np.int64]  #: [W, S] one past the last row of the replay window
    row_span: NDArray[np.int64]  #: [W, S] length of the replay window: after row_end, wrap
    left: NDArray[np.int64]  #: [W, S] output tokens still to generate
    room: NDArray[np.int64]  #: [W, S] tokens that fit into the blocks already held
    first_token: NDArray[np.float64]  #: [requests] end of a request's first decode step, s
    resumed: NDArray[np.float64]  #: [requests] end of its first step after a preemption, s


class StepTables(NamedTuple):
    """Step times of one model on one GPU, see :class:`~eldr_sim.kernel_profiles.step_time`."""

    moe_s: NDArray[np.float64]  #: [batch, distinct experts] one MoE layer
    fixed_s: NDArray[np.float64]  #: [batch] all but MoE and attention
    attention_s: NDArray[np.float64]  #: [batch, knots] attention of all layers
    context_stride: int  #: tokens between two knots


class StepLog(NamedTuple):
    """One row a decode step, filled by the kernel."""

    worker: NDArray[np.int32]
    start: NDArray[np.float64]  #: s
    end: NDArray[np.float64]  #: s
    batch: NDArray[np.int32]
    joined: NDArray[np.int32]  #: requests for which this was the first step since they joined
    context: NDArray[np.int64]  #: KV tokens that attention read, summed over the batch
    active: NDArray[np.int32]  #: distinct experts, summed over the MoE layers
    recomputed: NDArray[np.int32]  #: prompt tokens recomputed beside the decode tokens


def new_log(capacity: int) -> StepLog:
    """Return an empty step log with room for ``capacity`` steps."""
    return StepLog(
        *(np.zeros(capacity, t) for t in ("i4", "f8", "f8", "i4", "i4", "i8", "i4", "i4"))
    )


@intrinsic  # type: ignore[untyped-decorator]
def _popcount(_typing: Any, _word: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen


@njit(cache=True)  # type: ignore[untyped-decorator]
def union_rows(bits: Any, rows: Any, n: int, union: Any) -> None:
    """OR ``bits[rows[:n]]`` into ``union``; eight rows a pass keep the union in registers."""
    width = bits.shape[1]
    for k in range(width):
        union[k] = 0
    i = 0
    while i + 8 <= n:
        a, b, c, d = bits[rows[i]], bits[rows[i + 1]], bits[rows[i + 2]], bits[rows[i + 3]]
        e, f, g, h = bits[rows[i + 4]], bits[rows[i + 5]], bits[rows[i + 6]], bits[rows[i + 7]]
        for k in range(width):
            union[k] |= a[k] | b[k] | c[k] | d[k] | e[k] | f[k] | g[k] | h[k]
        i += 8
    while i < n:
        a = bits[rows[i]]
        for k in range(width):
            union[k] |= a[k]
        i += 1


@njit(cache=True)  # type: ignore[untyped-decorator]
def moe_time(union: Any, layer_s: Any, layers: int) -> tuple[float, int]:
    """Return the time of all MoE layers, s, and the distinct experts summed over them.

    ``layer_s[d]`` is the time of one layer with ``d`` distinct experts at the step's batch.
    """
    words = union.shape[0] // layers
    total, active = 0.0, 0
    for layer in range(layers):
        distinct = 0
        for w in range(layer * words, (layer + 1) * words):
            distinct += _popcount(union[w])
        total += layer_s[distinct]
        active += distinct
    return total, active


@njit(cache=True)  # type: ignore[untyped-decorator]
def attention_time(knots: Any, stride: int, context: int, batch: int) -> float:
    """Interpolate the attention time, s, at the mean context ``context / batch``."""
    x = context / batch / stride
    i = min(int(x), knots.shape[0] - 2)
    return knots[i] + (knots[i + 1] - knots[i]) * (x - i)


@njit(cache=True)  # type: ignore[untyped-decorator]
def advance(
    pool: PoolState,
    bits: Any,
    layers: int,
    tables: StepTables,
    block_size: int,
    until: float,
    union: Any,
    log: StepLog,
    logged: int,
    stopped: Any,
) -> tuple[int, int, float]:
    """Run every step that starts before ``until``, in the order of their start.

    A step after which a batch may change moves ``until`` back to its end, so no worker starts a
    step that an effect of this change could still reach.

    Returns
    -------
    logged, n_stopped, next_start
        Rows of ``log`` filled so far; how many workers stopped (in ``stopped``); the earliest
        start of a step that is still to run, s. A full log returns early: grow it, call again.
    """
    n_stopped = 0
    while True:
        w, start = -1, np.inf
        for i in range(pool.batch.shape[0]):
            if pool.stop[i] == RUNNING and pool.next_start[i] < start:
                if pool.batch[i] > 0 or pool.extra_s[i] > 0.0:
                    w, start = i, pool.next_start[i]
        if w < 0 or start >= until or logged == log.end.shape[0]:
            return logged, n_stopped, start
        n = pool.batch[w]

        needed = 0
        for i in range(n):
            if pool.room[w, i] == 0:
                needed += 1
        if needed > pool.free_blocks[w]:
            pool.stop[w] = OUT_OF_BLOCKS
            stopped[n_stopped] = w
            n_stopped += 1
            until = start
            continue
        pool.free_blocks[w] -= needed

        duration, active = pool.extra_s[w], 0
        if n > 0:
            union_rows(bits, pool.row[w], n, union)
            moe, active = moe_time(union, tables.moe_s[n], layers)
            pool.context[w] += n
            duration += tables.fixed_s[n] + moe
            duration += attention_time(
                tables.attention_s[n], tables.context_stride, pool.context[w], n
            )
        end = start + duration
        ended = False
        for i in range(n):
            room = pool.room[w, i]
            pool.room[w, i] = (block_size if room == 0 else room) - 1
            pool.left[w, i] -= 1
            if pool.left[w, i] == 0:
                ended = True
            row = pool.row[w, i] + 1
            pool.row[w, i] = row - pool.row_span[w, i] if row == pool.row_end[w, i] else row
        for i in range(n - pool.joined[w], n):
            request = pool.request[w, i]
            if pool.first_token[request] < 0.0:
                pool.first_token[request] = end
            else:
                pool.resumed[request] = end

        log.worker[logged] = w
        log.start[logged] = start
        log.end[logged] = end
        log.batch[logged] = n
        log.joined[logged] = pool.joined[w]
        log.context[logged] = pool.context[w]
        log.active[logged] = active
        log.recomputed[logged] = pool.extra_tokens[w]
        logged += 1

        single = pool.extra_s[w] > 0.0
        pool.joined[w] = 0
        pool.extra_s[w] = 0.0
        pool.extra_tokens[w] = 0
        pool.next_start[w] = end
        if ended or single:
            pool.stop[w] = FINISHED if ended else SINGLE_STEP
            stopped[n_stopped] = w
            n_stopped += 1
            until = min(until, end)


@njit(cache=True)  # type: ignore[untyped-decorator]
def add_request(
    pool: PoolState,
    w: int,
    request: int,
    row: int,
    row_end: int,
    row_span: int,
    left: int,
    room: int,
    context: int,
) -> None:
    """Append a request to the batch of worker ``w``; ``context`` tokens are in its KV cache."""
    i = pool.batch[w]
    pool.request[w, i] = request
    pool.row[w, i] = row
    pool.row_end[w, i] = row_end
    pool.row_span[w, i] = row_span
    pool.left[w, i] = left
    pool.room[w, i] = room
    pool.context[w] += context
    pool.batch[w] = i + 1
    pool.joined[w] += 1


@njit(cache=True)  # type: ignore[untyped-decorator]
def drop_finished(pool: PoolState, w: int, finished: Any) -> int:
    """Take the finished requests out of the batch of ``w``; the others keep their order.

    Their indices go to ``finished``; their KV tokens are the caller's to subtract. Returns how
    many there were.
    """
    kept, gone = 0, 0
    for i in range(pool.batch[w]):
        if pool.left[w, i] == 0:
            finished[gone] = pool.request[w, i]
            gone += 1
            continue
        if kept != i:
            pool.request[w, kept] = pool.request[w, i]
            pool.row[w, kept] = pool.row[w, i]
            pool.row_end[w, kept] = pool.row_end[w, i]
            pool.row_span[w, kept] = pool.row_span[w, i]
            pool.left[w, kept] = pool.left[w, i]
            pool.room[w, kept] = pool.room[w, i]
        kept += 1
    pool.batch[w] = kept
    return gone
