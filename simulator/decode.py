"""Decode workers: admission, KV blocks and preemption around the compiled step loop.

The rules are those of vLLM's v1 scheduler (``vllm/v1/core/sched/scheduler.py``): first come, first
served; a request is admitted at a step boundary if the batch has a seat and the cache has blocks;
with a KV connector its blocks are reserved before the transfer starts; when a running request
needs a block and none is free, the request admitted last is preempted, goes to the front of the
queue and recomputes its context later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from eldr_sim.simulator import kernel
from eldr_sim.simulator.request import Request

if TYPE_CHECKING:
    from eldr_sim.kernel_profiles.step_time import StepTimeModel
    from eldr_sim.simulator.clock import Clock


class DecodePool:
    """The decode workers of a cluster, advanced together between two events.

    Parameters
    ----------
    env
        Clock of the run.
    n_workers, max_num_seqs, block_size, n_blocks
        Workers; seats in a batch; tokens a KV block; KV blocks a worker.
    step_time
        Step times of the model on the workers' GPU.
    max_num_batched_tokens
        Tokens that one step may compute: bounds the recomputation after a preemption.
    bits
        ``uint64 [rows, moe_layers * words]``, see :mod:`eldr_sim.simulator.replay`.
    n_requests
        Requests of the whole run.
    start_transfer
        Called with a request whose blocks have been reserved; the cluster then moves its KV cache
        and calls :meth:`DecodeWorker.kv_arrived`.
    on_finish
        Called with a request that has generated its last token.
    """

    def __init__(
        self,
        env: Clock,
        *,
        n_workers: int,
        max_num_seqs: int,
        block_size: int,
        n_blocks: int,
        max_num_batched_tokens: int,
        step_time: StepTimeModel,
        bits: NDArray[np.uint64],
        n_requests: int,
        start_transfer: Callable[[Request], None],
        on_finish: Callable[[Request], None],
    ) -> None:
        slots = (n_workers, max_num_seqs)
        self.state = kernel.PoolState(
            batch=np.zeros(n_workers, np.int64),
            next_start=np.zeros(n_workers),
            stop=np.zeros(n_workers, np.int64),
            joined=np.zeros(n_workers, np.int64),
            context=np.zeros(n_workers, np.int64),
            free_blocks=np.full(n_workers, n_blocks, np.int64),
            extra_s=np.zeros(n_workers),
            extra_tokens=np.zeros(n_workers, np.int64),
            request=np.zeros(slots, np.int32),
            row=np.zeros(slots, np.int64),
            row_end=np.zeros(slots, np.int64),
            row_span=np.zeros(slots, np.int64),
            left=np.zeros(slots, np.int64),
            room=np.zeros(slots, np.int64),
            first_token=np.full(n_requests, -1.0),
            resumed=np.full(n_requests, -1.0),
        )
        self.env = env
        self.block_size = block_size
        self.n_blocks = n_blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.step_time = step_time
        self.start_transfer = start_transfer
        self.on_finish = on_finish
        self.requests: list[Request] = []
        self.workers = [DecodeWorker(self, w) for w in range(n_workers)]
        #: Gaps between tokens that a preemption made longer than a step, s.
        self.preempted_gaps_s: list[float] = []
        self._bits = bits
        self._tables = kernel.StepTables(
            step_time.moe_s, step_time.fixed_s, step_time.attention_s, step_time.context_stride
        )
        self._layers = step_time.n_moe_layers
        self._union = np.zeros(bits.shape[1], np.uint64)
        self._log = kernel.new_log(1 << 14)
        self._logged = 0
        self._stopped = np.zeros(n_workers, np.int64)
        self.finished = np.zeros(max_num_seqs, np.int32)
        self.next_start = float("inf")  # earliest step that is still to run

    def advance(self, until: float) -> None:
        """Run every decode step that starts before ``until`` seconds, up to the first change."""
        n_stopped = 0
        while True:
            self._logged, n_stopped, self.next_start = kernel.advance(
                self.state,
                self._bits,
                self._layers,
                self._tables,
                self.block_size,
                until,
                self._union,
                self._log,
                self._logged,
                self._stopped,
            )
            for w in self._stopped[:n_stopped].tolist():
                self.workers[w].wake_at_boundary()
            if self._logged < len(self._log.end):
                return
            self._log = kernel.StepLog(
                *(np.concatenate([column, np.zeros_like(column)]) for column in self._log)
            )
            if n_stopped:  # a change came before ``until``: the caller looks at the clock again
                return

    def steps(self) -> kernel.StepLog:
        """Return the log of all decode steps run so far."""
        return kernel.StepLog(*(column[: self._logged] for column in self._log))


class DecodeWorker:
    """The engine of one decode worker: its queue and its KV blocks."""

    def __init__(self, pool: DecodePool, index: int) -> None:
        self.pool = pool
        self.index = index
        self.unreserved: deque[Request] = deque()  # wait for KV blocks; their KV is at the prefiller
        self.arrived: deque[Request] = deque()  # KV is here; wait for a seat
        self.preempted: deque[Request] = deque()  # wait for blocks to recompute their context
        self.in_transfer = 0
        self._recompute: deque[tuple[Request, int]] = deque()  # and tokens still to recompute
        self._wake_s = -1.0

    def enqueue(self, request: Request) -> None:
        """Take a request whose KV cache is still on its prefill worker."""
        self.unreserved.append(request)
        self.wake_at_boundary()

    def kv_arrived(self, request: Request) -> None:
        """Note that the KV cache of ``request`` is in the blocks reserved for it."""
        self.in_transfer -= 1
        self.arrived.append(request)
        self.wake_at_boundary()

    def wake_at_boundary(self) -> None:
        """Schedule the engine at the end of the step in progress, or now if it is idle."""
        env, state = self.pool.env, self.pool.state
        at = max(env.now, float(state.next_start[self.index]))
        if at != self._wake_s:
            self._wake_s = at
            env.at(at, self._boundary)

    def blocks_for(self, tokens: int) -> int:
        """Return how many KV blocks hold ``tokens`` tokens."""
        return -(-tokens // self.pool.block_size)

    def _boundary(self, _event: object) -> None:
        """Do what an engine does between two steps: finish, preempt, admit, reserve."""
        pool, state, w = self.pool, self.pool.state, self.index
        self._wake_s = -1.0
        why = int(state.stop[w])
        state.stop[w] = kernel.RUNNING
        state.next_start[w] = pool.env.now
        if why == kernel.FINISHED:
            self._finish()
        elif why == kernel.OUT_OF_BLOCKS:
            self._preempt()
        self._admit()
        if state.batch[w] > 0 or state.extra_s[w] > 0.0:
            pool.next_start = min(pool.next_start, pool.env.now)

    def _finish(self) -> None:
        pool, state, w = self.pool, self.pool.state, self.index
        now = pool.env.now
        for index in pool.finished[: kernel.drop_finished(state, w, pool.finished)].tolist():
            request = pool.requests[index]
            request.finish_s = now
            context = request.prompt_len - 1 + request.output_len
            state.context[w] -= context
            state.free_blocks[w] += self.blocks_for(context)
            self._note_resumption(request)
            pool.on_finish(request)

    def _note_resumption(self, request: Request) -> None:
        if request.last_token_s >= 0.0:  # it was preempted after its first token
            gap = float(self.pool.state.resumed[request.index]) - request.last_token_s
            self.pool.preempted_gaps_s.append(gap)

    def _preempt(self) -> None:
        """Take requests from the end of the batch until the others have the blocks they need."""
        pool, state, w = self.pool, self.pool.state, self.index
        while state.batch[w] > 0:
            n = int(state.batch[w])
            if np.count_nonzero(state.room[w, :n] == 0) <= state.free_blocks[w]:
                return
            request = pool.requests[int(state.request[w, n - 1])]
            request.generated = request.output_len - int(state.left[w, n - 1])
            self._note_resumption(request)
            request.last_token_s = pool.env.now if request.generated else -1.0
            request.preemptions += 1
            context = request.prompt_len - 1 + request.generated
            state.context[w] -= context
            state.free_blocks[w] += max(self.blocks_for(context), request.decode_blocks)
            state.batch[w] = n - 1
            state.joined[w] = max(0, int(state.joined[w]) - 1)
            self.preempted.appendleft(request)

    def _admit(self) -> None:
        pool, state, w = self.pool, self.pool.state, self.index
        self._continue_recomputation()
        while self.arrived and self._seats() > 0:
            request = self.arrived.popleft()
            request.decode_start_s = pool.env.now
            self._join(request)
        while self.preempted and self._seats() > 0:
            request = self.preempted[0]
            blocks = self.blocks_for(request.prompt_len + request.generated)
            if blocks > state.free_blocks[w]:
                return  # first come, first served: nobody overtakes a preempted request
            state.free_blocks[w] -= blocks
            request.decode_blocks = blocks
            self.preempted.popleft()
            self._recompute.append((request, request.prompt_len - 1 + request.generated))
            self._continue_recomputation()
        while self.unreserved and self._seats() > 0:
            request = self.unreserved[0]
            blocks = self.blocks_for(request.prompt_len)
            if blocks > state.free_blocks[w]:
                return
            state.free_blocks[w] -= blocks
            request.decode_blocks = blocks
            self.unreserved.popleft()
            self.in_transfer += 1
            pool.start_transfer(request)

    def _seats(self) -> int:
        return int(
            self.pool.max_num_seqs - self.pool.state.batch[self.index] - len(self._recompute)
        )

    def _continue_recomputation(self) -> None:
        """Fill the next step's token budget with contexts to recompute.

        The chunk's time comes on top of the decode step's, as the sum over kernels has it: a mixed
        step reads each expert once for both, so this is an upper bound for these rare steps.
        """
        pool, state, w = self.pool, self.pool.state, self.index
        while self._recompute:
            budget = int(
                pool.max_num_batched_tokens - state.batch[w] - 1 - state.extra_tokens[w]
            )
            if budget <= 0:
                return
            request, left = self._recompute[0]
            chunk = min(left, budget)
            done = request.prompt_len - 1 + request.generated - left
            state.extra_s[w] += pool.step_time.prefill_s([chunk], [done])
            state.extra_tokens[w] += chunk
            if chunk < left:
                self._recompute[0] = (request, left - chunk)
                return
            self._recompute.popleft()
            self._join(request)

    def _join(self, request: Request) -> None:
        pool = self.pool
        context = request.prompt_len - 1 + request.generated
        first = request.window_row
        kernel.add_request(
            pool.state,
            self.index,
            request.index,
            first + (request.window_offset + request.generated) % request.window_len,
            first + request.window_len,
            request.window_len,
            request.output_len - request.generated,
            request.decode_blocks * pool.block_size - context,
            context,
        )
