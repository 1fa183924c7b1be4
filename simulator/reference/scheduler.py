"""vLLM's scheduler: which requests run in the next step, with how many tokens.

The rules are those of ``vllm/v1/core/sched/scheduler.py`` (`Scheduler`). What a worker calls is the
protocol of an engine's scheduler, so that another one, vLLM's too, can stand in its place:

- ``add_request``: a request comes, or the KV cache that it takes over does;
- ``schedule``: plan the next step; called again when something happens before it starts;
- ``begin_step``: what runs, which has its KV blocks now;
- ``finish_step``: take out what has ended with the step (vLLM: ``update_from_output``);
- ``abort``: a request leaves; ``has_step``, ``n_waiting`` and the like tell how things stand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from eldr_sim.simulator.reference.kv_blocks import KVCacheManager
from eldr_sim.simulator.reference.requests import Request, Sequence

if TYPE_CHECKING:
    from eldr_sim.simulator.reference.worker import Worker


class Scheduler:
    """The queues, running sequences and KV blocks of one engine.

    ``only_prompts``: it computes prompts and hands them over, or ends with them; else the last
    token of a context is decoded, in the step of its last chunk."""

    kv_class: type[KVCacheManager] = KVCacheManager

    def __init__(self, worker: Worker, *, only_prompts: bool) -> None:
        self.worker, self.only_prompts = worker, only_prompts
        self.spec, self.engine = worker.cluster.spec, worker.pool.engine
        self.rules, self.config = self.engine.rules, self.spec.scheduler
        speculation, whole = self.engine.speculation, worker.whole_prompts
        #: KV slots beyond a step's tokens, for drafts that are computed (``num_lookahead_tokens``).
        self.lookahead = 0
        if speculation is not None and worker.pool.decodes:
            self.lookahead = speculation.lookahead
        #: Placeholder drafts that vLLM pads new sequences with, see `padding`.
        self.placeholders = 0
        if speculation is not None and worker.pool.decodes and self.rules.pads_drafts:
            self.placeholders = speculation.placeholders
        hands_over = any(pool.then >= 0 for pool in self.spec.pools)
        heads = speculation is not None and speculation.has_head
        self.kv = self.kv_class(
            self.engine.n_blocks, self.spec.block_size, self.spec.max_model_len,
            caching=worker.cluster.caching and not whole, lookahead=self.lookahead,
            drops_block=self.rules.drops_block and hands_over and heads,
            windows=self.spec.windows, keeps_ends=self.rules.keeps_ends,
            in_flight=self.engine.max_num_batched_tokens * (1 + self.config.async_scheduling),
        )  # fmt: skip
        self.allocates_chunks = self.rules.allocates_chunks and not whole
        self.threshold = 0 if whole else self.config.long_prefill_token_threshold or 0
        self.requests: set[Request] = set()  #: that the engine has not finished or handed over
        self.decoding: list[Sequence] = []  #: get a token a step, or more with drafts
        self.prefilling: list[Sequence] = []  #: their context is still being computed
        self.waiting: list[Request] = []  #: wait for the first time
        self.kv_ready: list[Request] = []  #: the KV cache that they take over is here
        self.preempted: list[Request] = []  #: wait for blocks to recompute their context
        self.late: list[Request] = []  #: came when the next step had been scheduled
        self.leaving: list[Request] = []  #: later stages of the worker still have them
        self.joined: list[Sequence] = []  #: decode for the first time in the next step
        self.riding: list[Sequence] = []  #: have ended, and ride in the next step
        self.ended: list[Sequence] = []  #: keep their places and blocks, see `finish_step`
        self.frees_late = self.config.async_scheduling and self.rules.frees_late
        self.closed = False  #: no request joins the next step any more
        #: A request was refused that the step after may admit, though nothing ends before.
        self.blocked = False
        self._taken = self._admitted = 0
        self._last = 0  #: the last sequence that was admitted before this step was planned

    # --- requests come and go ---

    def add_request(self, request: Request) -> None:
        """Take a new request, or one with a KV cache that has arrived.

        With asynchronous scheduling the next step was scheduled when this one started: requests
        that come meanwhile join the one after."""
        self.requests.add(request)
        if not request.kv_here:
            request.queued_s = self.worker.env.now
        busy = self.running or self.riding or self.worker.step_end > self.worker.env.now
        if (self.config.async_scheduling or self.rules.poll_steps > 1) and busy:
            self.late.append(request)
        else:
            self._queue(request)

    def _queue(self, request: Request) -> None:
        if request.kv_here:  # in the queue order, or in that in which their blocks were reserved
            by_key = self.spec.preempt_by_key
            self.kv_ready.append(request)
            self.kv_ready.sort(key=lambda other: other.priority if by_key else other.fetched)
        else:
            self._taken += 1
            request.ticket = self._taken
            self.waiting.append(request)

    def queue_late(self) -> None:
        """Queue those that came too late for the step that is scheduled."""
        late, self.late = self.late, []
        for request in late:
            self._queue(request)

    def abort(self, request: Request) -> None:
        """Take a request out, wherever it is, and its KV blocks."""
        for queue in (self.waiting, self.kv_ready, self.preempted, self.late, self.leaving):
            if request in queue:
                queue.remove(request)
        for running in (self.decoding, self.prefilling, self.joined):
            running[:] = [s for s in running if s.request is not request]
        self.requests.discard(request)
        if self.kv in request.tables:
            self.kv.release(request)

    def free_source(self, request: Request) -> None:
        """Free the KV cache of a request, which another worker has fetched."""
        self.kv.release(request)
        if self.waits_for_blocks:
            self.worker.wake()

    # --- how things stand ---

    @property
    def running(self) -> list[Sequence]:
        """The sequences that have a place in the batch, those that decode first."""
        return self.decoding + self.prefilling

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do, except perhaps for new requests."""
        queued = self.kv_ready or self.preempted or self.waiting
        return not (self.running or self.riding or queued)

    @property
    def waits_for_blocks(self) -> bool:
        """Whether requests wait that KV blocks, when they become free, may let in."""
        return bool(self.waiting or self.preempted)

    @property
    def n_gone(self) -> int:
        """The sequences that have ended and still have a place."""
        return len({*self.riding, *self.ended})

    def has_step(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.decoding or self.riding) or any(s.chunk for s in self.prefilling)

    def signals(self) -> tuple[int, int, int, int, float]:
        """Return what the engine publishes: waiting and running requests, the tokens of both, and
        the share of its KV blocks in use."""
        running = {sequence.request for sequence in self.running}
        waiting = [request for request in self.requests if request not in running]
        contexts = sum(s.context for s in self.running) + sum(r.tokens for r in self.leaving)
        n_running = len(running) + len(self.leaving)
        return len(waiting), n_running, sum(r.tokens for r in waiting), contexts, self.kv.usage

    # --- a step has ended ---

    def finish_step(self) -> list[Sequence]:
        """Take out the sequences that have ended, and return them (``update_from_output``).

        The KV blocks of a prompt that is handed over stay until they have been fetched. With
        asynchronous scheduling the next step is planned before the output of this one is
        processed: a sequence that has ended keeps its place and its blocks until then; one that
        might have had a token more to go (its drafts were accepted, which was not known) is in
        the plan, and rides along."""
        if self.only_prompts:
            done = [s for s in self.prefilling if s.prompt_done]
            self.prefilling = [s for s in self.prefilling if not s.prompt_done]
            self.requests.difference_update(s.request for s in done)
            for sequence in done if self.worker.pool.then >= 0 else ():
                self.kv.slide(sequence.request, sequence.cached)
            if self.frees_late and self.worker.exit_s <= self.worker.env.now:
                self.ended += done
            return done
        done = [s for s in self.decoding if s.request.generated == s.request.output_len]
        self.decoding = [s for s in self.decoding if s not in done]
        for sequence in done:
            request = sequence.request
            self.requests.remove(request)
            self.kv.cache_blocks(request, request.tokens - 1 - self.unprocessed(sequence))
            if self.frees_late:
                self.ended.append(sequence)
            else:
                self.kv.release(request)
            if self.config.async_scheduling and 0 < self.rules.rides_from <= sequence.got:
                self.riding.append(sequence)
        return done

    # --- the next step ---

    def schedule(self, defers_prompts: bool) -> None:
        """Plan the next step: running requests first, then those that wait (``schedule``).

        ``defers_prompts``: prompts are left alone in it, engines of a group decode meanwhile."""
        if self.is_idle:  # no step has been scheduled yet
            self.free_ended()
            self.queue_late()
        while self.schedule_running(defers_prompts or self.closed):
            self.closed = self.has_step()  # after a preemption no request is admitted in the step
            if self.closed:
                break
            defers_prompts = defers_prompts and bool(self.decoding)
            self.free_ended()  # nothing is computed: it plans again at once, with what it knows now
            self.queue_late()
            for sequence in self.running:
                sequence.got = sequence.rejected = sequence.flying = 0
        if not self.closed:
            self.admit(defers_prompts)
        if defers_prompts and self.has_step():
            self.closed = True  # it is planned again before the step after

    def schedule_running(self, defers_prompts: bool) -> bool:
        """Give running sequences tokens and KV blocks, in the order of their admission; returns
        whether one was preempted.

        While blocks lack, the one that was admitted last goes, or under priority scheduling the
        last in the queue order. If that is the one that lacks them, all behind it sit the step
        out."""
        preempts, longest = False, self.longest_chunk()
        for sequence in sorted(self.planned + self.prefilling, key=lambda s: s.ticket):
            prompt = sequence in self.prefilling
            if (prompt and defers_prompts) or not (prompt or sequence in self.planned):
                continue
            if not prompt:
                left = min(self.budget(sequence.ticket), longest)
                if left <= 0:
                    self.sit_out(sequence.ticket - 1)
                    break
                sequence.tokens = int(min(sequence.tokens, left))
                sequence.drafts = min(sequence.drafts, sequence.tokens - 1)
            if not prompt or any(self.next_chunk(sequence, longest)):
                self.kv.slide(sequence.request, sequence.cached - sequence.flying)
            while self.lacking(sequence, longest) > self.kv.n_free:
                preempts, victim = True, self.victim()
                self.preempt(victim, scheduled=victim.ticket < sequence.ticket)
                if victim is sequence:
                    self.sit_out(sequence.ticket)
                    return True
            if prompt:
                self.compute(sequence, longest)
            else:
                self.take_slots(sequence)
        return preempts

    def victim(self) -> Sequence:
        """Return the sequence to preempt: that admitted last, or the last in the queue order."""
        victims = self.running
        if self.worker.pool.then < 0:  # the blocks of the others are still to be fetched
            victims = victims + self.ended
        by_key = self.spec.preempt_by_key
        return max(victims, key=lambda s: s.request.priority if by_key else s.ticket)

    def preempt(self, victim: Sequence, scheduled: bool) -> None:
        """Take a sequence's blocks; it waits before all others, or where its key belongs, and
        recomputes its context (``_preempt_request``). One that has ended goes for good.

        ``scheduled``: the step had been planned with it, and its next token may be looked up
        though it is never computed."""
        request = victim.request
        request.preemptions += 1
        if victim in self.ended:
            self.ended.remove(victim)
            self.riding = [s for s in self.riding if s is not victim]
            self.kv.release(request)
            return
        if victim in self.prefilling:
            self.prefilling.remove(victim)
            self.kv.cache_blocks(request, victim.cached)
        else:
            self.leave_batch(victim)
            unknown = victim.got * self.frees_late if scheduled else 1 + self.unprocessed(victim)
            self.kv.cache_blocks(request, request.tokens - unknown)
        self.kv.release(request)
        self.preempted.insert(0, request)
        if self.spec.preempt_by_key:
            self.preempted.sort(key=lambda other: other.priority)

    def leave_batch(self, sequence: Sequence) -> None:
        """Take out a sequence that was to decode in the next step."""
        self.decoding.remove(sequence)
        if sequence in self.joined:  # there has been no step since
            self.joined.remove(sequence)
        else:
            sequence.request.last_token_s = self.worker.env.now

    def sit_out(self, ticket: int) -> None:
        """Let the sequences that were admitted after one compute nothing in the next step."""
        for sequence in [s for s in self.decoding if s.ticket > ticket]:
            self.leave_batch(sequence)
            self.prefilling.append(sequence)
        self.riding = [s for s in self.riding if s.ticket <= ticket]
        self.prefilling.sort(key=lambda s: s.ticket)

    def process_output(self) -> bool:
        """Free what has ended, and queue those that came too late, once a step is planned, which
        no request joins any more; returns whether to plan anew, as there is none."""
        if not (self.ended or self.late):
            return False
        self.free_ended()
        self.queue_late()
        self.closed = self.closed or self.has_step()
        return not self.has_step()

    def free_ended(self) -> None:
        """Free the places and blocks of what has ended, but for those that are to be fetched."""
        ended, self.ended = self.ended, []
        for sequence in ended if self.worker.pool.then < 0 else ():
            self.kv.cache_blocks(sequence.request, sequence.request.tokens - 1)
            self.kv.release(sequence.request)

    def unprocessed(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence have KV in blocks that cannot be found yet: accepted
        drafts until the next step is planned, and where that is planned ahead, all tokens of the
        step that runs meanwhile (``cache_blocks``)."""
        return sequence.got if self.frees_late else max(0, sequence.got - 1)

    def admit(self, defers_prompts: bool) -> None:
        """Admit requests that hold KV blocks, then preempted ones, then new ones.

        It takes a place in the batch, tokens of the budget, and the KV blocks of its first chunk,
        if the whole context would fit; no request overtakes the next one. Under priority
        scheduling, preempted and new requests
        wait in one queue."""
        if not defers_prompts:
            self.fill()
        while self.kv_ready and self.is_open():
            request = self.kv_ready[0]
            self.kv.cache_blocks(request, request.prompt_len)  # `_update_waiting_for_remote_kv`
            if not self.is_open(1 + self.padding(request.tokens - 1)):
                break
            if not self.admit_kv_ready(request):
                return
            self.kv_ready.pop(0)
        while (self.preempted or self.waiting) and self.is_open():
            self.sort_waiting()
            queue, rule = self.preempted, self.admit_preempted
            if not queue or (
                self.waiting
                and self.spec.preempt_by_key
                and self.waiting[0].priority < queue[0].priority
            ):
                queue, rule = self.waiting, self.admit_new
            computes = queue is self.preempted or not self.worker.fetches(queue[0])
            if defers_prompts and computes:
                return
            if not rule(queue[0]):
                ages = self.spec.aging_s < math.inf and queue is self.waiting
                self.blocked |= ages and queue[0] is not min(queue, key=lambda r: r.ticket)
                return
            queue.pop(0)

    def sort_waiting(self) -> None:
        """Sort those that wait for the first time: by key, but the aged ones first, as they
        came."""

        def order(request: Request) -> tuple[int, float, int]:
            aged = self.worker.env.now - request.queued_s >= self.spec.aging_s
            return (0, 0.0, request.ticket) if aged else (1, request.queue_key, request.ticket)

        self.waiting.sort(key=order)

    def admit_kv_ready(self, request: Request) -> bool:
        """Let a request decode with its KV cache here, but for the last token of the prompt."""
        context = request.tokens - 1
        sequence = self.sequence(request, context, context)
        ahead = self.lookahead or sequence.tokens > 1
        self.kv.slide(request, context)
        if ahead and self.running and not self.fits(self.kv.needed(sequence)):
            return False  # there is no room for its drafts
        request.decode_start_s = self.worker.env.now
        self.join(sequence)
        return True

    def admit_preempted(self, request: Request) -> bool:
        """Let a preempted request recompute its context."""
        cached = self.allocate(request, request.tokens, False)
        if cached is None:
            return False
        context = request.tokens if self.only_prompts else request.tokens - 1
        self.prefilling.append(self.sequence(request, cached, context))
        self.fill()
        return True

    def admit_new(self, request: Request) -> bool:
        """Let a request compute its prompt, or reserve the KV blocks into which it is fetched.

        A retried request brings the tokens that it has got."""
        tokens, fetches = request.tokens, self.worker.fetches(request)
        if self.worker.whole_prompts and tokens > self.budget():
            return False
        cached = self.allocate(request, tokens, fetches)
        if cached is None:
            return False
        if fetches:
            request.decode_cached_tokens = cached
            self.worker.blocks_reserved(request)
            return True
        request.prefill_start_s, request.cached_tokens = self.worker.env.now, cached
        context = tokens if self.only_prompts else tokens - 1
        self.prefilling.append(self.sequence(request, cached, context))
        self.fill()
        return True

    def sequence(self, request: Request, cached: int, context: int) -> Sequence:
        """Let a request run."""
        tokens = 1 + (self.padding(cached) if cached == context else 0)
        self._admitted += 1
        return Sequence(request, cached, context, self._admitted, tokens)

    def padding(self, cached: int) -> int:
        """Return the placeholder drafts of a request that is admitted with one token to compute:
        it is padded to the size of a verify step if running sequences decode and none computes its
        context (vLLM: ``pad_spec_decode``). ``cached``: its tokens that have KV."""
        before = [s for s in self.running if s.ticket <= self._last]
        if any(s.chunk or (s in self.joined and not s.decodes) for s in before):
            return 0
        beside = bool(self.riding) or any(s in self.decoding for s in before)
        beside = beside or (cached > 0 and not self.rules.pads_beside)
        fits = cached + self.placeholders + 2 <= self.spec.max_model_len
        n = int(min(self.placeholders, self.longest_chunk() - 1))
        return n if beside and fits else 0

    def is_open(self, tokens: int = 1) -> bool:
        """Whether the next step has a place and ``tokens`` of its budget left."""
        places = self.engine.max_num_seqs - len(self.leaving) - self.n_gone
        return len(self.running) < places and self.budget() >= tokens

    def budget(self, before: float = math.inf) -> int:
        """Return the tokens that the next step has room for (``max_num_batched_tokens``), beside
        prompts and the sequences admitted ``before`` a ticket: those behind take what is left."""
        tokens = sum(s.chunk for s in self.running)
        tokens += sum(s.tokens for s in self.decoding + self.riding if s.ticket < before)
        return self.engine.max_num_batched_tokens - tokens

    def longest_chunk(self) -> float:
        """Return the most tokens of one prompt in a step: a long one leaves the others room
        (``long_prefill_token_threshold``)."""
        others = len(self.requests) + len(self.leaving) + self.n_gone
        others -= sum(not request.kv_here for request in self.late)
        cuts = self.threshold and (others > 1 or self.rules.cuts_alone)
        return self.threshold if cuts else math.inf

    def fill(self) -> None:
        """Fill the token budget with contexts to compute, the one begun first (chunked prefill)."""
        most = self.longest_chunk()
        for sequence in list(self.prefilling):
            self.compute(sequence, most)

    def compute(self, sequence: Sequence, most: float) -> None:
        """Compute a part of a context in the next step; with its last chunk, decode a token."""
        chunk, decodes = self.next_chunk(sequence, most)
        if chunk > 0:
            sequence.chunk += chunk
            if self.allocates_chunks:
                computed = sequence.cached + sequence.chunk
                self.kv.grow(sequence.request, self.kv.lacking(sequence, computed))
            self.let_find(sequence.request, sequence.cached + sequence.chunk)
        if decodes:
            self.prefilling.remove(sequence)
            self.join(sequence)

    def next_chunk(self, sequence: Sequence, most: float) -> tuple[int, bool]:
        """Return how many tokens more of a context the next step has room for, ``most`` of one
        prompt, and whether it decodes the next token then."""
        budget = self.budget(sequence.ticket)
        left = sequence.context - sequence.cached - sequence.chunk
        chunk = int(max(0, min(left, budget, most - sequence.chunk)))
        if chunk < left or self.only_prompts or sequence.chunk + chunk + sequence.tokens > most:
            return chunk, False
        return chunk, budget - chunk >= sequence.tokens

    def join(self, sequence: Sequence) -> None:
        """Let a sequence get a token in the next step."""
        self.take_slots(sequence)
        self.let_find(sequence.request, sequence.request.tokens)
        self.decoding.append(sequence)
        self.joined.append(sequence)

    # --- KV blocks ---

    def let_find(self, request: Request, tokens: int) -> None:
        """Let others find what the next step computes: in it no token is read before it is
        written."""
        self.kv.cache_blocks(request, tokens)

    @property
    def planned(self) -> list[Sequence]:
        """The sequences that the next step decodes and that have KV blocks: one that rides along
        has them until the step has been planned."""
        return [s for s in self.riding if s in self.ended] + self.decoding

    def fits(self, n: int) -> bool:
        """Whether ``n`` blocks are free beside those that the running sequences need."""
        free = self.kv.n_free - n
        return free >= 0 and free >= sum(map(self.kv.needed, self.planned))

    def lacking(self, sequence: Sequence, most: float) -> int:
        """Return the blocks that a running sequence lacks for what it computes next, ``most``
        tokens of one prompt."""
        if sequence not in self.prefilling:
            return self.kv.needed(sequence)
        if not self.allocates_chunks:  # it has taken those of its whole context
            return 0
        chunk, decodes = self.next_chunk(sequence, most)
        end = sequence.cached + sequence.chunk + chunk + decodes * sequence.tokens
        return self.kv.lacking(sequence, end)

    def take_slots(self, sequence: Sequence) -> None:
        """Take the blocks of a sequence's next step, if they are free, before others look up theirs
        in the prefix cache."""
        n = self.kv.needed(sequence)
        if n <= self.kv.n_free:
            self.kv.grow(sequence.request, n)

    def allocate(self, request: Request, tokens: int, fetches: bool) -> int | None:
        """Take the blocks of a context, or of its first chunk, beside those that running sequences
        need; returns its cached tokens, None if they are not free."""
        reserved = sum(map(self.kv.needed, self.planned))
        chunk = int(min(self.budget(), self.longest_chunk()))
        return self.kv.allocate(
            request, tokens, 0 if fetches else 2 * self.lookahead, reserved,
            chunk if self.allocates_chunks and not fetches else None, self.padding(tokens - 1),
            fetches,
        )  # fmt: skip

    # --- a step begins ---

    def begin_step(self) -> tuple[list[Sequence], list[Sequence]]:
        """Take the KV blocks of the next step's tokens; return the decoding sequences and those
        that compute a chunk of a context. Those that ride along stand first and have no blocks."""
        self._last = self._admitted
        for sequence in self.decoding:
            self.kv.grow(sequence.request, self.kv.needed(sequence))
        return self.riding + self.decoding, [s for s in self.running if s.chunk]
