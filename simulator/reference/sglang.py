"""SGLang's scheduler: prompts and decoding take turns, and a step is planned while one runs.

The rules are those of SGLang 0.5.9, ``srt/managers/scheduler.py`` (`get_next_batch_to_run`),
``schedule_policy.py`` (`PrefillAdder`) and ``schedule_batch.py`` (`retract_decode`). With overlap a
step's output is processed when the next one has been planned: a sequence that has ended rides in
the next step that decodes, and keeps its place until another one is planned later still. Where a
request has found no room, or no place, none is admitted before a sequence has left the batch. KV
blocks are taken for a whole step when it is planned, after its requests have been looked up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eldr_sim.simulator.reference.radix_cache import RadixCache
from eldr_sim.simulator.reference.requests import Request, Sequence
from eldr_sim.simulator.reference.scheduler import Scheduler

if TYPE_CHECKING:
    from eldr_sim.simulator.reference.worker import Worker

_CLIPPED = 4096  #: most tokens still to come that are counted (``CLIP_MAX_NEW_TOKENS``)
_RETRACT_STEPS = 20  #: tokens that each sequence gets room for when some are retracted


class SglangScheduler(Scheduler):
    """The scheduler of a worker that computes prompts and decodes."""

    kv: RadixCache
    kv_class = RadixCache

    def __init__(self, worker: Worker, *, only_prompts: bool) -> None:
        super().__init__(worker, only_prompts=only_prompts)
        self.threshold, self.mixed = 0, self.rules.mixed_steps
        self.share = self.rules.first_share  #: of outputs to come, reserved (``new_token_ratio``)
        self.full = False  #: a request found no room (``batch_is_full``)
        self.unfiltered = 0  #: places of sequences that have ended and ridden
        self.polled = 0  #: steps of decoding since one of prompts
        self.retracted = False

    @property
    def plans_prompts(self) -> bool:
        """Whether the next step computes prompts."""
        return bool(self.joined) or any(s.chunk for s in self.prefilling)

    @property
    def planned(self) -> list[Sequence]:
        """The sequences that the next step decodes: others sit out while prompts are computed."""
        alone = self.plans_prompts and not self.mixed
        return self.joined if alone else super().planned

    @property
    def held(self) -> int:
        """The places of the running batch, those of prompts in the next step left out."""
        return len(self.decoding) - len(self.joined) + len(self.ended) + self.unfiltered

    def known(self, sequence: Sequence) -> int:
        """Return the outputs of a sequence that have been processed when a step is planned."""
        return sequence.request.generated - sequence.got * self.frees_late

    # --- a step has ended, and its output is processed when the next one has been planned ---

    def finish_step(self) -> list[Sequence]:
        """Take out the sequences that have ended; with overlap they may still be retracted."""
        done = [s for s in self.decoding if s.request.generated == s.request.output_len]
        self.decoding = [s for s in self.decoding if s not in done]
        self.requests.difference_update(s.request for s in done)
        self.ended = done
        if self.frees_late:
            return []
        super().free_ended()
        self.unfiltered += len(done)
        return done

    def process_output(self) -> bool:
        """Free what has ended, and look for requests; returns whether to plan anew."""
        if self.frees_late:
            self.cache_prompts()
        if not (self.ended or self.late):
            return False
        self.free_ended()
        polled = 0 if self.plans_prompts and self.frees_late else self.polled + self.frees_late
        if polled % self.rules.poll_steps == 0 or not self.has_step():
            self.queue_late()
        self.closed = self.closed or self.has_step()
        return not self.has_step()

    def free_ended(self) -> None:
        """End what has ended; those that ride in a step of decoding keep their places, and have a
        block for its token."""
        for sequence in self.ended:
            self.worker.end(sequence.request)
            tokens = sequence.request.tokens - (sequence not in self.riding)
            self.kv.cache_blocks(sequence.request, tokens)
            self.kv.release(sequence.request)
        if not (self.mixed and self.plans_prompts):
            self.unfiltered += len(self.ended)
        self.ended = []

    def cache_prompts(self) -> None:
        """Let others find the contexts that have been computed (``cache_unfinished_req``)."""
        for sequence in self.decoding:
            if sequence not in self.joined:
                self.kv.cache_blocks(sequence.request, sequence.joined_at)

    def let_find(self, request: Request, tokens: int) -> None:
        """Do nothing: what a step computes can be found when its output has been processed."""

    # --- the next step ---

    def schedule(self, defers_prompts: bool) -> None:
        """Plan the next step: prompts, if any can be computed, else what runs decodes."""
        self.blocked = True  # each step is planned
        for sequence in self.prefilling:  # `stash_chunked_request`
            self.kv.cache_blocks(sequence.request, sequence.cached)
        if not self.frees_late:
            self.cache_prompts()
        self.open_batch()
        if not self.closed:
            self.admit(defers_prompts)
            if not (self.has_step() or self.ended) and (self.full or self.unfiltered):
                self.unfiltered = 0
                self.open_batch()  # nothing is launched, and the loop goes round once more
                self.admit(defers_prompts)
        if not self.plans_prompts:
            self.plan_decoding()
            return
        self.full = self.full and self.held > 0 and not self.mixed
        self.take({s: self.prompt_blocks(s) for s in self.running})
        if self.mixed:  # all that runs is in the batch with them
            self.riding, self.unfiltered = self.ended or self.riding, 0
            self.retract()

    def open_batch(self) -> None:
        """Let requests be admitted again where a chunk has left the last batch, or nothing runs."""
        if self.prefilling:
            self.full = False
        if self.running or self.riding or self.ended:
            return
        waiting = self.waits_for_blocks
        if self.full or not waiting:
            if not (waiting or self.late):
                self.share = self.rules.first_share
            self.full, self.unfiltered = False, 0
            self.queue_late()

    def plan_decoding(self) -> None:
        """Let those leave the batch that have ended and ridden, and decode
        (``update_running_batch``)."""
        leaves = not self.closed and self.unfiltered > 0
        self.riding = self.ended or self.riding
        self.retract()
        if self.retracted or leaves:
            self.full = False
            self.unfiltered *= self.closed
            self.closed = self.has_step()

    def retract(self) -> None:
        """Take back the sequences with the fewest outputs, and of those with the longest prompts,
        while KV blocks lack; one stays where none computes its prompt. They wait behind all others;
        what the step under way computes for them is lost. As much is reserved as the others have
        needed so far, and a little more."""
        running = [s for s in self.decoding if s not in self.joined] + self.riding
        running.sort(key=lambda s: (self.known(s), -s.request.prompt_len, -s.ticket))
        while len(running) + self.plans_prompts > 1 and not self.has_room():
            self.retracted = True
            self.take_back(running.pop(0))
            self.kv.make_room(-(-len(running) * _RETRACT_STEPS // self.kv.size))
        self.take({s: self.kv.needed(s) for s in self.planned})
        if self.retracted:
            got = sum(self.known(sequence) + _RETRACT_STEPS for sequence in running)
            self.share = min(1.0, got / (1 + sum(s.request.output_len for s in running)))

    def has_room(self) -> bool:
        """Whether there are blocks for all that is to decode (``check_decode_mem``)."""
        needed = sum(map(self.kv.needed, self.planned))
        self.kv.make_room(needed)
        return self.kv.blank >= needed

    def take(self, blocks: dict[Sequence, int]) -> None:
        """Take KV blocks for a step, all at once."""
        self.kv.make_room(sum(blocks.values()))
        for sequence, n in blocks.items():
            self.kv.grow(sequence.request, n)

    def prompt_blocks(self, sequence: Sequence) -> int:
        """Return the blocks that a sequence lacks for what the next step computes of its context,
        the last token included."""
        tokens = sequence.cached + sequence.chunk + (sequence in self.joined)
        return max(0, -(-tokens // self.kv.size) - self.kv.held(sequence.request))

    def take_back(self, victim: Sequence) -> None:
        """Take the KV blocks of a sequence, which computes its context anew."""
        request = victim.request
        request.preemptions += 1
        if self.frees_late and victim.got:
            self.worker.take_back(victim)
        elif not victim.rested:
            request.last_token_s = self.worker.env.now
        for sequences in (self.decoding, self.riding, self.ended):
            if victim in sequences:
                sequences.remove(victim)
        self.kv.release(request)
        self._taken += 1
        request.ticket = self._taken
        self.requests.add(request)
        self.preempted.append(request)

    # --- prompts ---

    def admit(self, defers_prompts: bool) -> None:
        """Admit requests in the order in which they came or were retracted (`PrefillAdder`)."""
        before = self._admitted
        self.fill()
        while self.goes_on(before):
            self.sort_waiting()
            queues = [queue for queue in (self.preempted, self.waiting) if queue]
            queue = min(queues, key=lambda queue: self.place(queue[0]))
            if self.budget() <= 0:
                self.full = self.lacks_room(queue[0])
                return
            rule = self.admit_preempted if queue is self.preempted else self.admit_new
            if not rule(queue[0]):
                self.full = True
                return
            queue.pop(0)

    def place(self, request: Request) -> tuple[float, int]:
        """Return the place of a request among those that wait."""
        return request.priority if self.spec.preempt_by_key else (0.0, request.ticket)

    def goes_on(self, before: int) -> bool:
        """Whether it looks at the next request, ``before`` having been admitted when it began; it
        notes where the batch is full (``budget_state``)."""
        begins = self._admitted == before
        if not begins and not self.prefilling:
            self.full = self.full or self.promised() >= self.free_tokens
        if self.full or not self.waits_for_blocks or (self.budget() <= 0 and not begins):
            return False
        prompts = len(self.prefilling) + len(self.joined)
        self.full = prompts + self.held >= self.engine.max_num_seqs
        return not self.full

    def budget(self, before: float = 0.0) -> int:
        """Return the prompt tokens that the next step has room for, ``before`` aside; a mixed one
        has room for all that has a place in the running batch."""
        tokens = sum(s.chunk for s in self.running) + len(self.joined) + self.held * self.mixed
        return self.engine.max_num_batched_tokens - tokens

    @property
    def free_tokens(self) -> int:
        """Tokens that the free KV blocks hold, beside what the prompts of the next step take."""
        return (self.kv.n_free - sum(map(self.prompt_blocks, self.running))) * self.kv.size

    def lacks_room(self, request: Request) -> bool:
        """Whether too little KV is free for the context of a request and its output, beside what is
        promised to others (``add_one_req``)."""
        found, idle = self.kv.look_up(request)
        new = -(-request.tokens // self.kv.size) - found + idle + request.window_blocks
        wanted = new * self.kv.size + self.to_come(request)
        return bool(wanted >= self.free_tokens - self.promised())

    def to_come(self, request: Request) -> int:
        """Return the outputs that a request has room for when it is admitted."""
        return min(request.output_len - request.generated, _CLIPPED)

    def promised(self) -> float:
        """Return the tokens that outputs are expected to take: a share of what is to come, and
        whole outputs of those that join."""
        tokens = self.share * len(self.ended) + self.held * self.mixed
        for sequence in self.decoding:
            output = sequence.request.output_len
            if sequence in self.joined:
                tokens += min(output, _CLIPPED)
            else:
                tokens += self.share * min(output - self.known(sequence), _CLIPPED)
        return tokens

    def allocate(self, request: Request, tokens: int, fetches: bool) -> int | None:
        """Hold what is cached of a context; returns those tokens, None if it lacks room."""
        return None if self.lacks_room(request) else self.kv.admit(request)

    def join(self, sequence: Sequence) -> None:
        """Let a sequence get a token in the next step."""
        sequence.joined_at = sequence.context + 1
        self.decoding.append(sequence)
        self.joined.append(sequence)

    # --- a step begins ---

    def begin_step(self) -> tuple[list[Sequence], list[Sequence]]:
        """Return what decodes, and what computes a chunk: the others sit a step of prompts out."""
        prompts, batch = self.plans_prompts, list(self.planned)
        batch = self.riding + [s for s in batch if s not in self.riding]
        if prompts:
            self.polled = 0
        elif batch:
            self.polled += 1
            if not self.retracted:
                self.share = max(self.rules.least_share, self.share - self.rules.share_step)
        self.retracted = False
        self.take({s: self.kv.needed(s) for s in self.decoding if s in batch})
        for sequence in self.decoding:
            if sequence not in batch and not sequence.rested:
                sequence.request.last_token_s, sequence.rested = self.worker.env.now, True
            sequence.got *= sequence in batch  # else all its outputs are known
        return batch, [s for s in self.running if s.chunk]
