"""An engine: who waits, who runs, and its steps."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import partial

from .group import group_step
from .kv_blocks import KVBlocks
from .prompt_layers import prompt_step
from .requests import Sequence
from .step_seconds import draft_seconds, step_seconds

PREFILL, DECODE, COLOCATED = "prefill", "decode", "colocated"
PREFILL_ONLY = "prefill only"
ONLY_PROMPTS = PREFILL, PREFILL_ONLY
#: Steps start when all other events of their instant have happened, by worker.
LAST = 1 << 60


def place(request):
    """Its place in the queue order."""
    return request.queue_key, request.number


@dataclass
class Pool:
    """Settings of the workers of a pool."""

    role: str
    first: int
    size: int
    spec: object  #: EngineSpec
    prefix_caching: bool
    own_experts: bool
    async_scheduling: bool
    capture_s: float


class Worker:
    """vLLM's scheduler, ``vllm/v1/core/sched/scheduler.py``, ``Scheduler.schedule``."""

    def __init__(self, twin, pool, number):
        self.twin, self.pool, self.number = twin, pool, number
        self.role, self.cost = pool.role, pool.spec.step_time.cost
        self.blocks = KVBlocks(pool.spec.n_blocks)
        self.ranks = twin.ranks[number] if twin.ranks else None
        self.decoding, self.prefilling = [], []  # running: a token a step; contexts begun
        self.requests = set()  # those that it has not finished or handed over
        self.new, self.arrived, self.preempted, self.late = [], [], [], []
        self.taken = self.admitted = 0
        self.joined = []  # decode for the first time in the next step
        self.riding = []  # have ended, and the next step has been scheduled with them
        self.ended = []  # have ended, and hold their blocks until the next step is planned
        self.step_end = -math.inf
        self.boundary_at = None
        self.closed = False  # nobody joins the next step any more
        self.decided = False  # there has been a boundary since the last step
        self.due = False  # the start of a step is scheduled
        self.group = [self]  # the engines that step with it
        self.group_steps = 0  # of its group, where it is the first
        self.decided_for, self.balances, self.lacking, self.gathered = -1, False, 0, 0  # likewise
        self.alive, self.slowdown = True, 1.0
        self.last = None  # its last step: the record, who got a token, who for the first time
        self.exit_s = -math.inf  # when its last step has left the last stage
        self.leaving = []  # requests that later stages still have
        layout = pool.spec.layout
        self.whole_prompts = layout is not None and layout.whole_prompts
        self.threshold = twin.spec.scheduler.long_prefill_token_threshold
        self.lookahead, self.drafts = 0, None
        # vLLM with a KV connector and a head computes the last cached block again.
        hands_over = any(other.then >= 0 for other in twin.spec.pools)
        self.drops_block = hands_over and pool.spec.speculation is not None
        self.drops_block = self.drops_block and pool.spec.speculation.config.method != "ngram"
        if pool.spec.speculation is not None:
            self.drafts = pool.spec.speculation.drafts(pool.spec.max_num_seqs, self.cost)
            if self.role in (DECODE, COLOCATED):
                self.lookahead = pool.spec.speculation.lookahead

    # --- who waits ---

    def take(self, request):
        """Take a new request, or one whose KV cache has arrived."""
        self.requests.add(request)
        if not request.kv_here:
            request.queued_s = self.twin.now
        if self.pool.async_scheduling and (self.running() or self.riding):
            self.late.append(request)  # the next step is scheduled already
        else:
            self.queue(request)
        self.wake()

    def queue(self, request):
        if request.kv_here:  # in the order in which their blocks were reserved
            self.arrived.append(request)
            self.arrived.sort(key=lambda other: other.reserved)
        else:
            self.taken += 1
            request.ticket = self.taken
            self.new.append(request)

    def queue_late(self):
        for request in self.late:
            self.queue(request)
        self.late = []

    def wake(self):
        """Look at the queues at the end of the step in progress, or now if there is none."""
        if not self.alive:
            return
        at = max(self.twin.now, self.step_end)
        if at != self.boundary_at:
            self.boundary_at = at
            self.twin.schedule(at, self.boundary)

    def signals(self):
        """Return waiting and running requests, the tokens of both, and the KV usage."""
        running = [sequence.request for sequence in self.running()]
        waiting = [request for request in self.requests if request not in running]
        tokens = sum(request.prompt + request.generated for request in waiting)
        contexts = sum(sequence.context for sequence in self.running())
        contexts += sum(request.prompt + request.generated for request in self.leaving)
        usage = 1.0 - len(self.blocks.free) / self.pool.spec.n_blocks
        return len(waiting), len(running) + len(self.leaving), tokens, contexts, usage

    def running(self):
        return self.decoding + self.prefilling

    # --- between two steps ---

    def boundary(self):
        """End, preempt, admit, plan."""
        self.boundary_at, self.decided = None, True
        self.end_sequences()
        balances = self.group[0].balance()
        waiting = self.arrived or self.preempted or self.new
        if not (self.running() or self.riding or waiting):
            self.free_ended()
            self.queue_late()  # no step has been scheduled yet
        defers = balances or self.defers_prompts()
        if self.preempt():
            defers = defers and bool(self.decoding)  # else nothing at all would be computed
            if not defers:
                self.fill()
            self.closed = self.has_step()  # nobody is admitted in this step if there is one
        if not self.closed:
            self.admit(defers)
        if defers and self.has_step():
            self.closed = True  # there is a boundary before the next step
        if self.has_step():
            self.start_when_all_have_come()
        if self.ended:
            self.free_ended()
            if self.has_step():
                self.closed = True  # others may take their places in the step after it
            else:
                self.wake()
        if self.late:
            self.queue_late()
            if self.has_step():
                self.closed = True
            else:  # the last sequence was preempted: nothing is scheduled after all
                self.wake()

    def end_sequences(self):
        """Take out who has all tokens; on a prefill worker, whose prompt is computed."""
        now, twin = self.twin.now, self.twin
        if self.role in ONLY_PROMPTS:
            done = [s for s in self.prefilling if s.cached == s.context]
            self.prefilling = [s for s in self.prefilling if s not in done]
            for sequence in done:
                self.requests.remove(sequence.request)
                if self.exit_s > now:  # later stages still have it
                    self.leaving.append(sequence.request)
                    twin.schedule(self.exit_s, partial(self.leave_stages, sequence.request))
                else:
                    if self.frees_late():
                        self.ended.append(sequence)
                    self.end_prompt(sequence.request)
            return
        done = [s for s in self.decoding if s.request.generated == s.request.output]
        self.decoding = [s for s in self.decoding if s not in done]
        for sequence in done:
            sequence.request.finish_s = now
            if self.role == COLOCATED:
                request = sequence.request
                request.prefill_end_s = request.decode_start_s = request.first_token_s
            self.requests.remove(sequence.request)
            self.publish(sequence.request, sequence.request.prompt - 1 + sequence.request.output)
            twin.todo.append((twin.complete, sequence.request))
            if self.frees_late():
                self.ended.append(sequence)
            else:
                self.release(sequence.request)
            if self.pool.async_scheduling and self.pool.spec.rules.rides_on and sequence.got > 1:
                self.riding.append(sequence)  # it might have got one token alone

    def end_prompt(self, request):
        """Hand it over, whose blocks are held until the decode worker has them, or end it."""
        twin = self.twin
        request.prefill_end_s = twin.now
        if self.role == PREFILL:
            twin.todo.append((twin.hand_over, request))
            return
        request.first_token_s = request.finish_s = twin.now
        if request not in [sequence.request for sequence in self.ended]:
            self.release(request)
        twin.todo.append((twin.complete, request))

    def frees_late(self):
        """Whether the next step is scheduled before a completed sequence's output is processed."""
        return self.pool.async_scheduling and self.pool.spec.rules.frees_late

    def free_ended(self):
        """Free places and blocks, except those of prompts that a decode worker fetches."""
        for sequence in self.ended:
            if self.role != PREFILL:
                self.release(sequence.request)
        self.ended = []

    def leave_stages(self, request):
        self.leaving.remove(request)
        self.end_prompt(request)
        if self.new:  # they may wait for its place or its blocks
            self.wake()

    def preempt(self):
        """Take sequences back until the others have the blocks they need.

        Last joined first, or by priority the last in the queue order.
        """
        victims, by_key = 0, self.twin.spec.preempt_by_key
        while not self.fits(0):
            victims += 1
            victim = max(
                self.running() + [s for s in self.ended if s not in self.riding],
                key=lambda s: place(s.request) if by_key else s.ticket,
            )
            request = victim.request
            if victim in self.ended:  # it has all its tokens
                self.ended.remove(victim)
                self.release(request)
                continue
            if victim in self.prefilling:
                self.prefilling.remove(victim)
            else:
                self.decoding.remove(victim)
                self.publish(request, request.prompt - 1 + request.generated)
                if victim in self.joined:  # there has been no step since
                    self.joined.remove(victim)
                else:
                    request.last_token_s = self.twin.now
            self.release(request)
            request.preemptions += 1
            self.preempted.insert(0, request)
            if by_key:
                self.preempted.sort(key=place)
        return victims > 0

    def defers_prompts(self):
        """Whether it leaves prompts alone in this step of its group, which decodes meanwhile."""
        interval = self.twin.spec.scheduler.prefill_schedule_interval
        if len(self.group) == 1 or not (self.decoding or self.riding):
            return False
        return self.group[0].group_steps % interval != 0

    def balance(self):
        """Whether prompts of its group wait for engines that have none; decided once a step."""
        rules, seats = self.pool.spec.rules, self.pool.spec.max_num_seqs
        if self.role != COLOCATED or len(self.group) == 1 or not rules.balance_steps:
            return False
        if self.decided_for == self.group_steps:
            return self.balances
        self.decided_for = self.group_steps
        decoding = [
            sum(s.request.generated < s.request.output for s in e.decoding) for e in self.group
        ]
        with_prompts = [bool(e.prefilling or e.new or e.preempted) for e in self.group]
        if all(with_prompts) and max(decoding) < seats:
            self.lacking, self.balances = 0, False
            if min(decoding):
                self.balances = self.gathered < rules.batching_steps
                self.gathered = (self.gathered + 1) * self.balances
        else:
            self.lacking += 1
            self.balances = min(decoding) > 0 and self.lacking < rules.balance_steps
            self.lacking *= self.balances
        return self.balances

    def admit(self, defers):
        """First who holds blocks already, then who lost them, then who is new.

        By priority, who lost them and who is new wait in one queue.
        """
        if not defers:
            self.fill()
        while self.arrived and self.is_open(1 + self.lookahead):
            if not self.admit_arrived(self.arrived[0]):
                return
            self.arrived.pop(0)
        while (self.preempted or self.new) and self.is_open():
            self.sort_new()
            queue, rule = self.preempted, self.admit_preempted
            both = self.preempted and self.new and self.twin.spec.preempt_by_key
            if not self.preempted or (both and place(self.new[0]) < place(self.preempted[0])):
                queue, rule = self.new, self.admit_new
            computes = queue is self.preempted or self.role != DECODE
            if (defers and computes) or not rule(queue[0]):
                return  # nobody overtakes who is next
            queue.pop(0)

    def sort_new(self):
        """Sort who waits for the first time: by key, but the aged ones before, as they came."""

        def order(request):
            aged = self.twin.now - request.queued_s >= self.twin.spec.aging_s
            return (0, 0.0, request.ticket) if aged else (1, request.queue_key, request.ticket)

        self.new.sort(key=order)

    def admit_arrived(self, request):
        """Its KV cache is here but for the last prompt token, which is decoded."""
        context = request.prompt + request.generated - 1
        sequence = self.sequence(request, context, context)
        if self.lookahead and self.running() and not self.fits(self.needs_blocks(sequence)):
            return False  # its drafts have no room
        request.decode_start_s = self.twin.now
        self.join(sequence)
        return True

    def admit_preempted(self, request):
        """It recomputes its context but for the last token, which is decoded."""
        context = request.prompt - 1 + request.generated
        cached = self.allocate(request, context + 1, 2 * self.lookahead)
        if cached is None:
            return False
        self.prefilling.append(self.sequence(request, cached, context))
        self.fill()
        return True

    def sequence(self, request, cached, context):
        """Who computes no context is padded with placeholders to the size of a verify step."""
        placeholders = self.lookahead if cached == context else 0
        self.admitted += 1
        return Sequence(request, cached, context, tokens=1 + placeholders, ticket=self.admitted)

    def admit_new(self, request):
        """It computes its prompt, or fetches it into the blocks reserved for it."""
        tokens = request.prompt + request.generated  # those that it had where it has been before
        if self.whole_prompts and tokens > self.budget():
            return False
        cached = self.allocate(request, tokens, 0 if self.role == DECODE else 2 * self.lookahead)
        if cached is None:
            return False
        if self.role == DECODE:
            request.decode_cached_tokens = cached
            if request.prefill_end_s < 0:  # blocks are reserved early: who computes its prompt?
                self.twin.todo.append((lambda who: self.twin.dispatch(who, 0), request))
            else:
                self.twin.fetch(request)
            return True
        request.prefill_start_s = self.twin.now
        request.cached_tokens = cached
        if self.role == COLOCATED:
            request.prefill_worker = request.decode_worker
        context = tokens if self.role in ONLY_PROMPTS else tokens - 1
        self.prefilling.append(self.sequence(request, cached, context))
        self.fill()
        return True

    def is_open(self, tokens=1):
        """Whether the next step has a place and tokens of its budget left."""
        seats = self.pool.spec.max_num_seqs - len(self.leaving)
        seats -= len({id(sequence) for sequence in self.riding + self.ended})
        return len(self.running()) < seats and self.budget() >= tokens

    def budget(self):
        tokens = sum(s.chunk for s in self.running())
        tokens += sum(s.tokens for s in self.decoding + self.riding)
        return self.pool.spec.max_num_batched_tokens - tokens

    def longest_chunk(self):
        """A long prompt leaves the others room, if the engine has any."""
        others = len(self.requests) + len(self.leaving)
        others += len({id(sequence) for sequence in self.riding + self.ended})
        others -= sum(not request.kv_here for request in self.late)
        return self.threshold if self.threshold and others > 1 else math.inf

    def fill(self):
        """Fill the token budget with contexts to compute, the one begun first."""
        most = self.longest_chunk()
        for sequence in list(self.prefilling):
            left = sequence.context - sequence.cached - sequence.chunk
            n = min(left, self.budget(), most - sequence.chunk)
            if n > 0:
                sequence.chunk += n
                self.publish(sequence.request, sequence.cached + sequence.chunk)
            if sequence.cached + sequence.chunk < sequence.context or self.role in ONLY_PROMPTS:
                continue
            if sequence.chunk + sequence.tokens > most:
                continue
            if self.budget() < sequence.tokens:
                return  # too little left for what it decodes
            self.prefilling.remove(sequence)
            self.join(sequence)

    def join(self, sequence):
        """Let a sequence get a token in the next step."""
        self.decoding.append(sequence)
        self.joined.append(sequence)

    def has_step(self):
        return bool(self.decoding or self.riding) or any(s.chunk for s in self.prefilling)

    # --- KV blocks ---

    def needs_blocks(self, sequence):
        """Room for what it computes and for as many drafts again, up to the longest context."""
        spec, table = self.twin.spec, sequence.request.tables[self]
        slots = sequence.context + sequence.tokens + self.lookahead
        return max(0, -(-min(slots, spec.max_model_len) // spec.block_size) - len(table))

    def fits(self, n):
        """Whether ``n`` blocks are free beside those that the next tokens need."""
        needed = sum(self.needs_blocks(s) for s in self.decoding)
        return len(self.blocks.free) - n >= needed

    def allocate(self, request, tokens, ahead):
        """Take the blocks of a context and of ``ahead`` tokens more; return its cached tokens.

        None if too few are free.
        """
        size, found = self.twin.spec.block_size, []
        slots = min(tokens + ahead, self.twin.spec.max_model_len)
        if self.pool.prefix_caching:
            for key in self.keys(request, tokens - 1):  # one token must be computed
                block = self.blocks.find(key)
                if block is None:
                    break
                found.append(block)
        if self.drops_block:
            del found[-1:]
        new, windows = -(-slots // size) - len(found), request.window_blocks
        if not self.fits(new + windows + sum(block.holders == 0 for block in found)):
            return None
        for block in found:
            self.blocks.hold(block)
        request.tables[self] = found + [self.blocks.take() for _ in range(new)]
        request.windows[self] = [self.blocks.take() for _ in range(windows)]
        return len(found) * size

    def publish(self, request, tokens):
        """Let others find the full blocks of the first ``tokens`` tokens."""
        if self.pool.prefix_caching:
            full = self.keys(request, tokens)
            for key, block in zip(full, request.tables[self], strict=False):
                self.blocks.publish(block, key, request.number)

    def keys(self, request, tokens):
        """Return what tells the full blocks of its first tokens from all others."""
        n, shared = tokens // self.twin.spec.block_size, request.block_keys
        own = [(number, request) for number in range(len(shared), n)]
        return (shared + own)[:n]

    def release(self, request):
        self.blocks.give_back(request.tables.pop(self) + request.windows.pop(self))

    # --- a step ---

    def start_when_all_have_come(self):
        """Start the group's next step behind all other events of its instant."""
        leader = self.group[0]
        if not leader.due:
            leader.due = True
            at = max(self.twin.now, self.step_end)
            self.twin.schedule(at, leader.start, LAST + leader.number)

    def start(self):
        for worker in self.group:
            # Nothing was known to happen. (An engine that has nothing to do waits for its peers.)
            if not worker.decided and (len(self.group) == 1 or worker.running()):
                worker.boundary()
            while not worker.fits(0):  # who has just joined has more to hold than was reserved
                worker.boundary()
        self.due = False
        layers = self.twin.layers.get(self.number) if self.role in ONLY_PROMPTS else None
        if layers is not None:
            if any(worker.has_step() for worker in self.group):
                prompt_step(self.twin, self.group, layers)
        elif len(self.group) > 1:
            if any(worker.has_step() for worker in self.group):
                group_step(self.twin, self.group)
        elif self.has_step():
            self.step()

    def reserve(self):
        """Take the blocks of the next tokens; return who decodes and who computes a context.

        Who rides along stands before the others and has no blocks.
        """
        batch = self.riding + self.decoding
        for sequence in self.decoding:
            for _ in range(self.needs_blocks(sequence)):
                sequence.request.tables[self].append(self.blocks.take())
        return batch, [s for s in self.running() if s.chunk]

    def step(self):
        """Run the step that is planned, which starts now."""
        batch, chunked = self.reserve()
        chunks = [(s.cached, s.chunk) for s in chunked]
        active, activated = self.count(set().union(*self.token_experts(batch, chunked)))
        tokens = sum(s.tokens for s in batch)
        rows = tokens + sum(s not in batch for s in chunked)
        seconds = step_seconds(
            self.cost, self.pool.own_experts, *self.read(batch), tokens, chunks, rows, activated
        )
        plain, drafting = 0, 0.0
        if self.drafts is not None:
            firsts = [s.request.decode_experts(s.request.generated) for s in batch]
            n, by_layer = self.count(set().union(*firsts))
            plain = n if tokens > len(batch) else 0
            context = sum(s.context for s in batch)
            drafting = draft_seconds(
                self.drafts, self.pool.own_experts, len(batch), tokens, context, chunks,
                activated[-1:], by_layer[-1:],
            )  # fmt: skip
        end = self.twin.now + (seconds + drafting + self.pool.capture_s) * self.slowdown
        self.move(batch, chunked, end, active, sum(activated), plain)

    def read(self, batch):
        """Return the sequences that attention is priced for, and the tokens that these read."""
        tokens = sum(s.tokens for s in batch)
        context = sum(s.context for s in batch)
        if self.drafts is not None and self.drafts.reads_by_row and tokens > len(batch):
            each = tokens // len(batch)
            return tokens, context * tokens // len(batch) + tokens * (each + 1) // 2
        return len(batch), context + tokens

    def outputs(self, sequence):
        """Return what a sequence gets: one token, and those drafts that are accepted in turn."""
        request, found = sequence.request, 0
        if sequence.drafts:
            share = self.share(request, request.generated)
            found = sum(share < rate for rate in self.drafts.rates[0, : sequence.drafts].tolist())
            self.twin.accepted[found] += 1
        return min(1 + found, request.output - request.generated)

    def share(self, request, position):
        """SplitMix64 of seed, request and position."""
        x = int(self.drafts.key[0]) + request.number * 0x9E3779B97F4A7C15
        x = (x + position * 0xD1B54A32D192ED03) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return ((x ^ x >> 31) >> 11) / 2**53

    def proposed(self, request, batch):
        """Return the drafts of a next step, none where a look-up finds none."""
        if self.drafts is None or self.share(request, 2**40 + request.generated) >= (
            self.drafts.found
        ):
            return 0
        return int(self.drafts.k_of[batch])

    def move(self, batch, chunked, end, active, busiest, plain=0):
        """Go to the end of the step, whose tokens nobody gets of those that ride along."""
        twin, tokens, n = self.twin, sum(s.tokens for s in batch), len(batch)
        batch, self.riding = batch[len(self.riding) :], []
        for sequence in batch:
            sequence.got = self.outputs(sequence)
        twin.steps.append(
            {"start": twin.now, "end": end, "context": sum(s.context + s.got for s in batch)}
            | {"worker": self.number, "joined": len(self.joined), "sequences": len(batch)}
            | {"tokens": tokens, "outputs": sum(s.got for s in batch), "plain": plain}
            | {"active": active, "busiest": busiest, "chunks": len(chunked)}
            | {"chunk_tokens": sum(s.chunk for s in chunked)}
        )
        self.last = twin.steps[-1], batch, self.joined
        n_chunks = len(chunked)
        for sequence in chunked:
            sequence.cached += sequence.chunk
            sequence.chunk = 0
        for sequence in batch:
            sequence.cached = sequence.context = sequence.context + sequence.got
            sequence.request.generated += sequence.got
            sequence.request.token_s += [end] * sequence.got
            sequence.drafts = self.proposed(sequence.request, n)
            sequence.tokens = 1 + sequence.drafts
        for sequence in self.joined:
            request = sequence.request
            if request.first_token_s < 0:
                request.first_token_s = end
                if self.role == COLOCATED:
                    request.prefill_end_s = request.decode_start_s = end
            else:
                twin.gaps.append((request.last_token_s, end))
        self.step_end, self.decided, self.joined = end, False, []
        if self.role == PREFILL:
            ended = any(s.cached == s.context for s in self.prefilling)
        else:
            ended = any(s.request.generated == s.request.output for s in batch)
        if ended or n_chunks or self.closed or n > len(batch):
            self.wake()
        else:
            self.start_when_all_have_come()
        self.closed = False

    def token_experts(self, batch, chunked):
        """Return the (layer, expert) pairs of each token of a step."""
        tokens = [
            s.request.decode_experts(s.request.generated + i)
            for s in batch
            for i in range(s.tokens)
        ]
        if self.pool.own_experts:
            tokens += [
                sequence.request.experts(position)
                for sequence in chunked
                for position in range(sequence.cached, sequence.cached + sequence.chunk)
            ]
        return tokens

    def count(self, union):
        """Return the activated experts, and by layer those of the busiest rank."""
        by_rank = [union] if self.ranks is None else [union & held for held in self.ranks]
        counts = [Counter(layer for layer, _ in held) for held in by_rank]
        layers = range(self.cost.n_moe_layers)
        return len(union), [max(count[layer] for count in counts) for layer in layers]
