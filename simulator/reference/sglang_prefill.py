"""SGLang's prefill workers: prompts alone, and KV caches that others fetch.

The rules are those of SGLang 0.5.9, ``srt/disaggregation/prefill.py``. No batch stays, so that none
is full for longer than a step, and a prompt needs room for itself and one token. The loop looks at
transfers when it has processed a step's output: a KV cache that has been fetched meanwhile is
free for the step that is planned then, the one after next. A request holds a place until that."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from eldr_sim.simulator.reference.requests import Request, Sequence
from eldr_sim.simulator.reference.scheduler import Scheduler
from eldr_sim.simulator.reference.sglang import SglangScheduler

if TYPE_CHECKING:
    from eldr_sim.simulator.reference.worker import Worker


class SglangPrefill(SglangScheduler):
    """The scheduler of a worker that computes prompts and hands them over, or ends with them."""

    held = 0  #: no sequence decodes here

    def __init__(self, worker: Worker, *, only_prompts: bool) -> None:
        super().__init__(worker, only_prompts=only_prompts)
        self.mixed = False
        self.rules = replace(self.rules, poll_steps=1)  # each step of prompts looks for requests
        self.fetched: list[Request] = []  #: their KV caches are free when the loop looks

    def finish_step(self) -> list[Sequence]:
        """Take out the prompts that have been computed."""
        done = Scheduler.finish_step(self)
        for sequence in done:
            if sequence not in self.ended:
                self.kv.cache_blocks(sequence.request, sequence.cached)
        return done

    def process_output(self) -> bool:
        """Let others find what has been computed, and free what has been fetched; returns whether
        to plan anew."""
        ended, self.ended, fetched, self.fetched = self.ended, [], self.fetched, []
        if not (ended or fetched or self.late):
            return False
        for sequence in ended:
            self.kv.cache_blocks(sequence.request, sequence.cached)
        done = [sequence.request for sequence in ended if self.worker.pool.then < 0]
        for request in fetched + done:
            self.release(request)
        self.queue_late()
        self.closed = self.closed or self.has_step()
        return not self.has_step()

    def release(self, request: Request) -> None:
        """Give the blocks of a request back: its context is the last that was used
        (``release_kv_cache``)."""
        if self.kv.caching:
            self.kv.use(self.kv.keys(request, request.tokens))
        self.kv.release(request)

    def free_source(self, request: Request) -> None:
        """Free the KV cache of a request, which has been fetched, when the loop looks."""
        steps = self.worker.step_end > self.worker.env.now and bool(self.running)
        if self.frees_late and steps:  # in a group others step alone
            self.fetched.append(request)
        else:
            self.release(request)
            if self.waits_for_blocks:
                self.worker.wake()

    def abort(self, request: Request) -> None:
        """Take a request out, wherever it is, and its KV blocks."""
        self.fetched = [other for other in self.fetched if other is not request]
        super().abort(request)

    # --- the next step ---

    def open_batch(self) -> None:
        """Let requests be admitted again (`get_next_disagg_prefill_batch_to_run`)."""
        self.full = False
        if not (self.running or self.ended):
            self.queue_late()

    def plan_decoding(self) -> None:
        """Do nothing: no sequence decodes here."""

    def goes_on(self, before: int) -> bool:
        """Whether it looks at the next request; a prompt that goes on counts twice among those
        that hold places (``req_to_token_pool``)."""
        begins = self._admitted == before
        self.full = self.full or not (begins or self.promised() < self.free_tokens)
        if self.full or not self.waits_for_blocks or (self.budget() <= 0 and not begins):
            return False
        begun = sum(sequence.ticket <= self._last for sequence in self.prefilling)
        self.full = len(self.kv.last) + begun >= self.engine.max_num_seqs
        return not self.full

    def to_come(self, request: Request) -> int:
        """Return the outputs that a request has room for: one (``_process_req``)."""
        return 1

    def promised(self) -> float:
        """Return the tokens of the prompts that end with the next step."""
        return sum(s.cached + s.chunk == s.context for s in self.prefilling)

    def begin_step(self) -> tuple[list[Sequence], list[Sequence]]:
        """Return what computes a chunk."""
        self._last = self._admitted
        return super().begin_step()
