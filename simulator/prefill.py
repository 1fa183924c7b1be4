"""Prefill workers: a queue, chunked prefill batched to a token budget, and the prefix cache.

A prefill worker is a vLLM engine that gets prompts only: each step computes up to
``max_num_batched_tokens`` prompt tokens, first of the prompts already begun, then of the queue
(``vllm/v1/core/sched/scheduler.py``). Tokens whose KV blocks are in the prefix cache are skipped.
A prompt's KV blocks are held from its first step until the decode worker has pulled them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.simulator import kernel
from eldr_sim.simulator.prefix_cache import PrefixCache, Prompt
from eldr_sim.simulator.request import Request

if TYPE_CHECKING:
    from eldr_sim.kernel_profiles.step_time import StepTimeModel
    from eldr_sim.simulator.clock import Clock


def unshared(request: Request) -> Prompt:
    """Return the prompt of a request that shares no block with another."""
    return Prompt(request.prompt_len)


class PrefillWorker:
    """One prefill engine, a SimPy process.

    Parameters
    ----------
    env
        Clock of the run.
    index
        Number of the worker.
    step_time
        Step times of the model on the worker's GPU.
    max_num_batched_tokens, max_num_seqs, block_size, n_blocks
        Token budget and seats of a step; tokens a KV block; KV blocks of the worker.
    on_prefilled
        Called with a request whose prompt has been computed.
    capture_s
        Time that every step takes longer because it records expert signatures.
    prompt_of
        Called with a request at the head of the queue; returns what the prefix cache can know of
        its prompt.
    prompt_experts
        Returns the experts of the tokens ``[start, stop)`` of a prompt, ``uint64 [moe_layers *
        words]``: a step's MoE layers then take the time of the distinct experts that its tokens
        choose. None expects uniform routing.
    """

    def __init__(
        self,
        env: Clock,
        index: int,
        *,
        step_time: StepTimeModel,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        block_size: int,
        n_blocks: int,
        on_prefilled: Callable[[Request], None],
        capture_s: float = 0.0,
        prompt_of: Callable[[Request], Prompt] = unshared,
        prompt_experts: Callable[[Request, int, int], NDArray[np.uint64]] | None = None,
    ) -> None:
        self.env = env
        self.index = index
        self.step_time = step_time
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.cache = PrefixCache(n_blocks, block_size)
        self.on_prefilled = on_prefilled
        self.capture_s = capture_s
        self.prompt_of = prompt_of
        self.prompt_experts = prompt_experts
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        #: One row a step: start s, end s, requests, tokens.
        self.steps: list[tuple[float, float, int, int]] = []
        self._wake = env.event()
        env.process(self._run())

    @property
    def free_blocks(self) -> int:
        """KV blocks that no request holds."""
        return self.cache.n_free

    def enqueue(self, request: Request) -> None:
        """Take a request whose prompt has to be computed."""
        request.prefill_worker = self.index
        self.waiting.append(request)
        self._notify()

    def release(self, request: Request) -> None:
        """Free the KV blocks of a request whose cache has been pulled."""
        assert request.block_table is not None
        self.cache.free(request.block_table)
        request.block_table = request.prompt = None
        self._notify()

    def _notify(self) -> None:
        if not self._wake.triggered:
            self._wake.succeed()

    def _run(self) -> Generator[Any, None, None]:
        env = self.env
        while True:
            batch = self._schedule()
            if not batch:
                self._wake = env.event()
                yield self._wake
                continue
            start = env.now
            yield env.timeout(self._step_s(batch) + self.capture_s)
            tokens = sum(n for _, n in batch)
            self.steps.append((start, env.now, len(batch), tokens))
            for request, n in batch:
                request.computed += n
            done = [request for request, _ in batch if request.computed == request.prompt_len]
            self.running = [r for r in self.running if r.computed < r.prompt_len]
            for request in done:
                request.prefill_end_s = env.now
                self.on_prefilled(request)

    def _step_s(self, batch: list[tuple[Request, int]]) -> float:
        """Seconds of a step that computes these tokens of these requests."""
        tokens = [n for _, n in batch]
        contexts = [request.computed for request, _ in batch]
        if self.prompt_experts is None:
            return self.step_time.prefill_s(tokens, contexts)
        unions = [self.prompt_experts(r, r.computed, r.computed + n) for r, n in batch]
        union = np.bitwise_or.reduce(unions)
        layer_s = self.step_time.mixed_moe_s[sum(tokens)]
        moe_s, _ = kernel.moe_time(union, layer_s, self.step_time.n_moe_layers)
        return self.step_time.prefill_s(tokens, contexts, float(moe_s))

    def _schedule(self) -> list[tuple[Request, int]]:
        """Return the requests of the next step, each with the prompt tokens to compute."""
        budget = self.max_num_batched_tokens
        batch: list[tuple[Request, int]] = []
        for request in self.running:
            n = min(budget, request.prompt_len - request.computed)
            if n == 0:
                break
            self._begin(request, n)
            batch.append((request, n))
            budget -= n
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if not self._admit(request):
                break
            self.running.append(self.waiting.popleft())
            n = min(budget, request.prompt_len - request.computed)
            self._begin(request, n)
            batch.append((request, n))
            budget -= n
        return batch

    def _admit(self, request: Request) -> bool:
        """Take the blocks of a whole prompt, if there are enough, and skip its cached tokens."""
        if request.prompt is None:
            request.prompt = self.prompt_of(request)
        table = self.cache.allocate(request.prompt)
        if table is None:
            return False
        request.block_table = table
        request.computed = request.cached_tokens = table.n_cached
        request.prefill_start_s = self.env.now
        return True

    def _begin(self, request: Request, n: int) -> None:
        """Let others find the blocks that are full when the next ``n`` tokens are computed."""
        assert request.block_table is not None
        self.cache.publish(request.block_table, request.computed + n)
