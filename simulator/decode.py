"""Decode workers: admission, KV blocks and preemption around the compiled step loop.

The rules are those of vLLM's v1 scheduler (``vllm/v1/core/sched/scheduler.py``): first come, first
served; a request is admitted at a step boundary if the batch has a seat and the cache has blocks;
with a KV connector its blocks are reserved before the transfer starts. Running requests come first:
what their next step needs is not given away, and when it is not free, the request that joined last
is preempted, goes to the front of the queue and recomputes its context later; nobody is admitted
in that step.
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
    expert_masks
        ``uint64 [workers, ranks, moe_layers * words]``: the experts on each expert-parallel GPU of
        each worker; None where there is one such rank.
    async_scheduling
        Whether the next step is scheduled when one starts, so that a request which comes meanwhile,
        or as it ends, joins the one after (vLLM's default since 0.14).
    prompt_experts
        Where the workers compute prompts too (co-located): returns the experts of the tokens
        ``[start, stop)`` of a request's context, ``uint64 [moe_layers * words]``.
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
        expert_masks: NDArray[np.uint64] | None = None,
        async_scheduling: bool = False,
        prompt_experts: Callable[[Request, int, int], NDArray[np.uint64]] | None = None,
    ) -> None:
        self.state = np.zeros(n_workers, kernel.WORKER)
        self.state["free_blocks"] = n_blocks
        self.slots = np.zeros((n_workers, max_num_seqs), kernel.SLOT)
        self.token_times = np.full(n_requests, -1.0, kernel.TOKEN_TIMES)
        self.env = env
        self.block_size = block_size
        self.n_blocks = n_blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.step_time = step_time
        self.start_transfer = start_transfer
        self.on_finish = on_finish
        self.requests: list[Request] = []
        self.async_scheduling = async_scheduling
        self.prompt_experts = prompt_experts
        width = 0 if prompt_experts is None else bits.shape[1]
        self.chunk_bits = np.zeros((n_workers, width), np.uint64)
        engine = DecodeWorker if prompt_experts is None else ColocatedWorker
        self.workers = [engine(self, w) for w in range(n_workers)]
        #: Last token before a preemption and first one after it, s, where both exist.
        self.preempted_gaps: list[tuple[float, float]] = []
        self._bits = bits
        one_rank = np.zeros((n_workers, 1, 0), np.uint64)
        self._masks = one_rank if expert_masks is None else np.ascontiguousarray(expert_masks)
        self._tables = kernel.StepTables(
            step_time.moe_s,
            step_time.mixed_moe_s,
            step_time.fixed_s,
            step_time.attention_s,
            step_time.context_stride,
        )
        self._layers = step_time.n_moe_layers
        self._union = np.zeros(bits.shape[1], np.uint64)
        self._log = np.zeros(1 << 14, kernel.STEP)
        self._logged = 0
        self._stopped = np.zeros(n_workers, np.int64)
        self.finished = np.zeros(max_num_seqs, np.int64)
        self.next_start = float("inf")  # earliest step that is still to run

    def advance(self, until: float) -> None:
        """Run every decode step that starts before ``until`` seconds, up to the first change."""
        while True:
            self._logged, n_stopped, self.next_start = kernel.advance(
                self.state,
                self.slots,
                self.token_times,
                self._bits,
                self._masks,
                self.chunk_bits,
                self._layers,
                self._tables,
                self.block_size,
                until,
                self._union,
                self._log,
                self._logged,
                self._stopped,
            )
            for i in range(n_stopped):
                self.workers[self._stopped[i]].wake_at_boundary()
            if self._logged < len(self._log):
                return
            self._log = np.concatenate([self._log, np.zeros_like(self._log)])
            until = min(until, self.env.peek())  # the boundary of a worker that stopped

    def steps(self) -> NDArray[np.void]:
        """Return the decode steps run so far, records of ``kernel.STEP``."""
        return self._log[: self._logged]


class DecodeWorker:
    """The engine of one decode worker: its queue and its KV blocks."""

    def __init__(self, pool: DecodePool, index: int) -> None:
        self.pool = pool
        self.index = index
        self.state = pool.state[index]  # a view: the kernel sees what is written here
        self.unreserved: deque[Request] = deque()  # their KV cache is still at the prefill worker
        self.arrived: deque[Request] = deque()  # KV cache is here; wait for a seat
        self.preempted: deque[Request] = deque()  # wait for blocks to recompute their context
        self._late: list[tuple[deque[Request], Request]] = []  # the next step is scheduled without
        self._recompute: deque[tuple[Request, int]] = deque()  # and tokens still to compute
        self._chunks: list[tuple[Request, int, int]] = []  # tokens [start, stop) of the next step
        self._wake_s = -1.0

    def enqueue(self, request: Request) -> None:
        """Take a request whose KV cache is still on its prefill worker."""
        self._take(self.unreserved, request)

    def kv_arrived(self, request: Request) -> None:
        """Note that the KV cache of ``request`` is in the blocks reserved for it."""
        self._take(self.arrived, request)

    def _take(self, queue: deque[Request], request: Request) -> None:
        busy = self.state["batch"] > 0 or self._recompute
        if self.pool.async_scheduling and busy:
            self._late.append((queue, request))
        else:
            queue.append(request)
        self.wake_at_boundary()

    def wake_at_boundary(self) -> None:
        """Schedule the engine at the end of the step in progress, or now if it is idle."""
        env = self.pool.env
        at = max(env.now, float(self.state["next_start"]))
        if at != self._wake_s:
            self._wake_s = at
            env.at(at, self._boundary)

    def blocks_for(self, tokens: int) -> int:
        """Return how many KV blocks hold ``tokens`` tokens."""
        return -(-tokens // self.pool.block_size)

    def _boundary(self, _event: object) -> None:
        """Do what an engine does between two steps: finish, preempt, admit, reserve."""
        pool, state = self.pool, self.state
        self._wake_s = -1.0
        why = state["stop"]
        state["stop"] = kernel.RUNNING
        state["next_start"] = pool.env.now
        if why == kernel.FINISHED:
            self._finish()
        if state["extra_tokens"] == 0:
            self._chunks.clear()  # the step that held them has run
        if state["batch"] == 0 and not self._recompute:
            self._queue_late()  # no step has been scheduled yet
        if not self._fits(0):
            self._preempt()
            self._continue_recomputation()
            # Nobody is admitted in this step if there is one, but perhaps in the next.
            state["single"] = self._has_work()
        if not state["single"]:
            self._admit()
        if self._chunks:
            self._price_chunks()
        if self._has_work():
            pool.next_start = min(pool.next_start, pool.env.now)
        if self._late:
            self._queue_late()
            if self._has_work():
                state["single"] = True
            else:  # the last request was preempted: nothing is scheduled after all
                self.wake_at_boundary()

    def _queue_late(self) -> None:
        for queue, request in self._late:
            queue.append(request)
        self._late.clear()

    def _has_work(self) -> bool:
        return bool(self.state["batch"] > 0 or self.state["extra_tokens"] > 0)

    def _price_chunks(self) -> None:
        """Add the time of the chunks to the next step.

        It comes on top of the decode step's, as the sum over kernels has it: a mixed step reads
        each expert once for both, so this is an upper bound for these rare steps.
        """
        self.state["extra_s"] = self.pool.step_time.prefill_s(
            [stop - start for _, start, stop in self._chunks],
            [start for _, start, _ in self._chunks],
        )

    def _finish(self) -> None:
        pool, state = self.pool, self.state
        n = kernel.drop_finished(pool.state, pool.slots, self.index, pool.finished)
        for i in range(n):
            request = pool.requests[int(pool.finished[i])]
            request.finish_s = pool.env.now
            self._note_end_of_prompt(request)
            context = request.prompt_len - 1 + request.output_len
            state["context"] -= context
            state["free_blocks"] += self.blocks_for(context)
            self._note_resumption(request)
            pool.on_finish(request)

    def _note_end_of_prompt(self, request: Request) -> None:
        """Note when a prompt was computed, where that was here."""

    def _note_resumption(self, request: Request) -> None:
        if request.last_token_s >= 0.0:  # it was preempted after its first token
            resumed = float(self.pool.token_times["resumed"][request.index])
            self.pool.preempted_gaps.append((request.last_token_s, resumed))

    def _preempt(self) -> None:
        """Take requests back, last joined first, until the others have the blocks they need."""
        while not self._fits(0):
            if self._recompute:  # not in the batch yet, so behind all that are
                request, _ = self._recompute.pop()
                self.state["free_blocks"] += request.decode_blocks
            else:
                request = self._leave()
            request.preemptions += 1
            self.preempted.appendleft(request)

    def _leave(self) -> Request:
        """Take the last request out of the batch; it has generated a token since it joined."""
        pool, state = self.pool, self.state
        seat = pool.slots[self.index, state["batch"] - 1]
        request = pool.requests[int(seat["request"])]
        self._note_resumption(request)
        request.generated = request.output_len - int(seat["left"])
        request.last_token_s = pool.env.now
        context = request.prompt_len - 1 + request.generated
        state["context"] -= context
        state["free_blocks"] += self.blocks_for(context)
        state["batch"] -= 1
        return request

    def _admit(self) -> None:
        """Fill the seats: who holds blocks already, then who lost them, then who is new."""
        pool = self.pool
        self._continue_recomputation()
        while self.arrived and self._is_open():
            request = self.arrived.popleft()
            request.decode_start_s = pool.env.now
            self._join(request)
        while self.preempted and self._is_open():
            request = self.preempted[0]
            if not self._reserve(request, request.prompt_len + request.generated):
                return  # first come, first served: nobody new overtakes a preempted request
            self.preempted.popleft()
            self._recompute.append((request, request.prompt_len - 1 + request.generated))
            self._continue_recomputation()
        while self.unreserved and self._is_open():
            request = self.unreserved[0]
            if not self._reserve(request, request.prompt_len):
                return
            self.unreserved.popleft()
            self._start(request)

    def _start(self, request: Request) -> None:
        """Fetch the KV cache of a request into the blocks reserved for it."""
        self.pool.start_transfer(request)

    def _reserve(self, request: Request, tokens: int) -> bool:
        """Take the KV blocks of ``tokens`` tokens if they are free."""
        blocks = self.blocks_for(tokens)
        if not self._fits(blocks):
            return False
        self.state["free_blocks"] -= blocks
        request.decode_blocks = blocks
        return True

    def _fits(self, blocks: int) -> bool:
        """Whether ``blocks`` are free beside those that the batch needs for its next step."""
        state = self.state
        spare = state["free_blocks"] - blocks
        if spare >= state["batch"]:  # a request needs one at most
            return True
        rooms = self.pool.slots["room"][self.index, : state["batch"]]
        return bool(np.count_nonzero(rooms == 0) <= spare)

    def _is_open(self) -> bool:
        """Whether the next step has a seat and a token of its budget left."""
        seats = self.pool.max_num_seqs - self.state["batch"] - len(self._recompute)
        return bool(seats > 0 and self._budget() > 0)

    def _budget(self) -> int:
        """Return how many tokens the next step can still take."""
        state = self.state
        return int(self.pool.max_num_batched_tokens - state["batch"] - state["extra_tokens"])

    def _continue_recomputation(self) -> None:
        """Fill the next step's token budget with contexts to recompute.

        The last token of a context is not recomputed but decoded, in the step of its last chunk.
        """
        while self._recompute and (budget := self._budget()) > 0:
            request, left = self._recompute[0]
            chunk = min(left, budget)
            if chunk > 0:
                done = request.prompt_len - 1 + request.generated - left
                self._chunks.append((request, done, done + chunk))
                self.state["extra_tokens"] += chunk
            if chunk == budget:  # none left for the token to decode
                self._recompute[0] = (request, left - chunk)
                return
            self._recompute.popleft()
            self._join(request)

    def _join(self, request: Request) -> None:
        """Give a request whose context is cached, but for its last token, the next seat."""
        pool, state = self.pool, self.state
        context = request.prompt_len - 1 + request.generated
        first, span = request.window_row, request.window_len
        pool.slots[self.index, state["batch"]] = (
            request.index,
            first + (request.window_offset + request.generated) % span,
            first + span,
            span,
            request.output_len - request.generated,
            request.decode_blocks * pool.block_size - context,
        )
        state["context"] += context
        state["batch"] += 1
        state["joined"] += 1


class ColocatedWorker(DecodeWorker):
    """An engine that computes prompts too, in chunks beside its decode batch (vLLM's default).

    Running requests come first; what is left of the step's token budget goes to prompts, the one
    begun first. A prompt's last token is decoded in the step of its last chunk, which so yields the
    first output token, as in an engine that computes them together.
    """

    def _start(self, request: Request) -> None:
        """Compute the prompt, from the next step on."""
        request.prefill_worker = self.index
        request.prefill_start_s = self.pool.env.now
        self._recompute.append((request, request.prompt_len - 1))
        self._continue_recomputation()

    def _price_chunks(self) -> None:
        """Make the next step one of all its tokens: every weight is read once for all of them."""
        pool, state = self.pool, self.state
        assert pool.prompt_experts is not None
        experts = pool.chunk_bits[self.index]
        experts[:] = 0
        for request, start, stop in self._chunks:
            experts |= pool.prompt_experts(request, start, stop)
        state["extra_s"] = pool.step_time.mixed_extra_s(
            int(state["batch"]),
            [stop - start for _, start, stop in self._chunks],
            [start for _, start, _ in self._chunks],
        )

    def _note_end_of_prompt(self, request: Request) -> None:
        first = float(self.pool.token_times["first"][request.index])
        request.prefill_end_s = request.decode_start_s = first
