"""SGLang's decode workers as a scheduler of the reference model, which the compiled plane does not
follow yet: KV blocks reserved before prompts are computed, and KV caches that come.

The rules are those of SGLang 0.5.9, ``srt/disaggregation/decode.py``. Each round of the loop looks:
it takes retracted sequences back, whose KV waits in the host's memory, reserves blocks for new
requests while every running sequence keeps room for some tokens more, and takes over what has been
transferred. Requests that join are a batch for which nothing is launched: the loop goes round once
more, knows the output of the last step then, and looks again. Nothing is cached."""

from __future__ import annotations

from eldr_sim.simulator.reference.requests import Request, Sequence
from eldr_sim.simulator.reference.sglang import _CLIPPED, SglangScheduler
from eldr_sim.simulator.reference.worker import Decoder, Worker

_JOINING = 1000  #: what a round of requests that join counts (`SchedulerRecvSkipper`)


class SglangDecode(SglangScheduler):
    """The scheduler of a worker that takes KV caches over and decodes."""

    plans_prompts = False

    def __init__(self, worker: Worker, *, only_prompts: bool) -> None:
        super().__init__(worker, only_prompts=only_prompts)
        self.looked = False  #: in the round that plans the next step
        self.rounds = 0  #: since it took requests in
        self.transfers: list[Request] = []  #: have blocks, and are not taken over yet
        self.done: list[Sequence] = []  #: have ended, and are in the batch
        self.resumed: list[Sequence] = []  #: join the next step after a retraction

    @property
    def batch(self) -> list[Sequence]:
        """The running batch, with sequences that have ended and not left it."""
        return self.decoding + self.ended + self.done

    def add_request(self, request: Request) -> None:
        """Take a new request, or one with a KV cache that has arrived, which it sees when it
        looks."""
        self.requests.add(request)
        if not request.kv_here:
            request.queued_s = self.worker.env.now
            self.late.append(request)

    def abort(self, request: Request) -> None:
        """Take a request out, wherever it is, and its KV blocks."""
        self.transfers = [other for other in self.transfers if other is not request]
        super().abort(request)

    # --- a round of the loop looks at its queues (`process_decode_queue`) ---

    def look(self, joining: int = 0) -> None:
        """Take requests in, reserve blocks and take over what has come. ``joining`` sequences are
        a batch that has not been merged."""
        self.rounds += _JOINING if joining else 1
        if self.rounds >= self.rules.poll_steps or not (joining or self.batch):
            self.rounds = 0
            self.queue_late()
        free = self.allocatable(joining)
        while self.preempted and self.has_slot() and self.kept(self.preempted[0]) <= free:
            request = self.preempted.pop(0)
            free -= self.kept(request)
            self.hold(request, request.tokens - 1)
            self.kv_ready.append(request)
        if self.preempted:
            return
        retractable = sum(s.request.tokens for s in self.batch)
        longest = max([0, *(self.longest(s.request) - retractable for s in self.batch)])
        free = self.allocatable(joining, longest)
        while self.waiting and self.has_slot():
            self.sort_waiting()
            request = self.waiting[0]
            wanted = max(self.kept(request), self.longest(request) - retractable)
            if wanted > free:
                break
            free -= self.kept(request)
            self.waiting.pop(0)
            self.hold(request, request.tokens)
            request.decode_cached_tokens = 0
            self.transfers.append(request)
            self.worker.blocks_reserved(request)
        self.kv_ready += [request for request in self.transfers if request.kv_here]
        self.transfers = [request for request in self.transfers if not request.kv_here]

    def allocatable(self, joining: int, longest: int = 0) -> int:
        """Return the tokens that may be reserved, where one sequence may need ``longest`` more
        (`_allocatable_tokens`)."""
        here = len(self.batch) + len(self.transfers) + len(self.kv_ready)
        held = max(self.worker.reserved_tokens * here, longest)
        return self.kv.n_free * self.kv.size - held - self.worker.reserved_tokens * joining

    def kept(self, request: Request) -> int:
        """Return the tokens of a request and of its next steps."""
        return request.tokens + self.worker.reserved_tokens

    def longest(self, request: Request) -> int:
        """Return the tokens that a request may come to."""
        return request.prompt_len + min(request.output_len, _CLIPPED)

    def has_slot(self) -> bool:
        """Whether one request more can have blocks: places, and as many again twice where they are
        few (`DecodeReqToTokenPool`)."""
        seats = self.engine.max_num_seqs
        return len(self.kv.last) < (3 * seats if seats <= 32 else seats)

    def hold(self, request: Request, tokens: int) -> None:
        """Take the blocks of the first tokens of a context."""
        self.kv.admit(request)
        self.kv.grow(request, -(-tokens // self.kv.size))

    # --- what joins, and what leaves ---

    def finish_step(self) -> list[Sequence]:
        """Take out the sequences that have ended; with overlap they may still be retracted."""
        self.ended = [s for s in self.decoding if s.request.generated == s.request.output_len]
        self.decoding = [s for s in self.decoding if s not in self.ended]
        if not self.frees_late:
            self.free_ended()
        return []

    def free_ended(self) -> None:
        """End what has ended; it is in the batch until a step is planned."""
        for sequence in self.ended:
            self.worker.end(sequence.request)
            self.kv.release(sequence.request)
            self.requests.discard(sequence.request)
        self.done += self.ended
        self.ended = []
        for sequence in self.decoding:
            sequence.got = 0  # its output is known

    def take_over(self) -> list[Request]:
        """Return the requests that join next, for which there are places
        (`get_new_prebuilt_batch`)."""
        places = max(0, self.engine.max_num_seqs - len(self.batch))
        joining, self.kv_ready = self.kv_ready[:places], self.kv_ready[places:]
        return joining

    def merge(self, joining: list[Request]) -> list[Sequence]:
        """Let requests decode; new ones have the first token, which came with the KV cache."""
        merged, now = [], self.worker.env.now
        for request in joining:
            request.decode_start_s, new = now, request.generated == 0
            if new:
                request.generated, request.first_token_s = 1, now
                request.token_s.append(now)
            merged.append(self.sequence(request, request.tokens - 1, request.tokens - 1))
            if not new:
                self.resumed.append(merged[-1])
        if not self.frees_late:
            self.end_at_once(merged)
        self.decoding += [s for s in merged if s.request in self.requests]
        return merged

    def end_at_once(self, merged: list[Sequence]) -> None:
        """End what needs no token more (`process_batch_result_prebuilt`)."""
        for sequence in [s for s in merged if s.request.generated == s.request.output_len]:
            if sequence.request in self.requests:
                self.decoding = [s for s in self.decoding if s is not sequence]
                self.ended.append(sequence)
        self.free_ended()

    # --- the next step ---

    def schedule(self, defers_prompts: bool) -> None:
        """Plan the next step, in rounds: one that finds requests to join launches nothing."""
        self.blocked = True
        if self.closed:
            return
        now = not self.looked
        if now:
            self.look()
        self.looked = False
        while True:
            joining = self.take_over()
            if joining:
                self.join_all(joining)
            else:
                self.plan_decoding()
            if self.has_step() or (now and not joining):
                return
            now = True
            self.look()

    def join_all(self, joining: list[Request]) -> None:
        """Let requests join, and those that come meanwhile; then decode."""
        self.free_ended()
        merged: list[Sequence] = []
        while joining:
            if self.frees_late:
                self.end_at_once(merged)
            self.look(len(joining))
            merged = self.merge(joining)
            joining = self.take_over()
        self.plan_decoding()
        if self.frees_late:
            self.end_at_once(merged)
            self.riding += [s for s in merged if s in self.done]

    def plan_decoding(self) -> None:
        """Let those leave the batch that have ended, and decode (``update_running_batch``)."""
        self.done, self.riding = [], list(self.ended)
        self.retract()

    def process_output(self) -> bool:
        """Process a step's output, and begin the next round; returns whether to plan anew."""
        if not self.has_step() or self.looked:
            return False
        self.closed = True
        if self.frees_late:
            self.free_ended()
            self.look()
            self.looked = True
        return False

    def begin_step(self) -> tuple[list[Sequence], list[Sequence]]:
        """Return what decodes."""
        self.joined, self.resumed = [s for s in self.resumed if s in self.decoding], []
        return super().begin_step()


class SglangDecoder(Decoder):
    """A decode worker of SGLang's."""

    scheduler_class = SglangDecode
    reserved_tokens = 512  #: for each request that it has (``--num-reserved-decode-tokens``)
