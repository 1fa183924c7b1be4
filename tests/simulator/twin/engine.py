"""A brute-force twin of the whole cluster: slow, plain Python, written to be read.

It takes what `Cluster` takes and shares no compiled code with it. Experts are sets of
``(layer, expert)``, a worker's KV blocks a list of objects, queues lists, events a sorted list. It
knows no macro-steps: before every step an engine looks at its queues and its blocks.

Each rule of the engine stands in one short function: what a step costs (`step_seconds`), whose
experts it reads (`Worker.experts`), who is admitted (`Worker.admit` and the three functions it
names), what happens when a context is computed (`Worker.end_sequences`), when a step starts
(`Worker.start_when_all_have_come`), which KV blocks can be shared (`Worker.allocate`), and what a
transfer moves (`Twin.transfer_blocks`).
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from eldr_sim.policies.base import RequestInfo

PREFILL, DECODE, COLOCATED = "prefill", "decode", "colocated"
#: Steps start when all other events of their instant have happened, by worker.
LAST = 1 << 60


# --- experts ----------------------------------------------------------------------------------


def expert_set(row, n_layers):
    """Return the (layer, expert) pairs of a bit set, uint64 ``[n_layers * words]``."""
    words = len(row) // n_layers
    return frozenset(
        (k // words, 64 * (k % words) + bit)
        for k, word in enumerate(row.tolist())
        for bit in range(64)
        if word >> bit & 1
    )


def prompt_token_experts(prompts, trace_sets, source, token, n_layers):
    """Return the experts of one prompt token, over all layers of the model.

    Token ``p`` replays prompt row ``p`` of a trace request, around its end. Layers beyond those of
    the trace take them again, each time from another part of the prompt.
    """
    span, base = int(prompts.length[source]), int(prompts.first_row[source])
    trace_layers = trace_sets.n_layers
    tiles = -(-n_layers // trace_layers)
    chosen = set()
    for tile in range(tiles):
        row = base + (token + tile * span // tiles) % span
        chosen |= {
            (tile * trace_layers + layer, expert)
            for layer, expert in trace_sets.rows[row]
            if tile * trace_layers + layer < n_layers
        }
    return frozenset(chosen)


@dataclass
class TraceSets:
    """The rows of a trace as sets."""

    rows: list
    n_layers: int


# --- the time of a step -----------------------------------------------------------------------


def moe_seconds(layer_s, activated):
    """Sum of the MoE layers, each by its activated experts on the busiest rank."""
    return sum(layer_s[count] for count in activated)


def decode_attention_seconds(cost, batch, context):
    """By the mean context, linear between the knots and beyond them."""
    knots = cost.attention_s[batch]
    x = context / batch / cost.context_stride
    left = min(int(x), len(knots) - 2)
    return knots[left] + (knots[left + 1] - knots[left]) * (x - left)


def chunk_attention_seconds(cost, chunks):
    """All chunks together, but no less than the slowest one alone."""
    together, alone = cost.prompt_floor_s, [cost.prompt_floor_s]
    for cached, n in chunks:
        end = cached + n
        pairs = cost.prompt_share_s[end] - cost.prompt_share_s[cached]
        together += max(pairs, cost.prompt_token_s * end)
        alone.append(cost.prompt_floor_s + cost.prompt_alone_s[end] - cost.prompt_alone_s[cached])
    return max(together, *alone)


def step_seconds(cost, own_experts, batch, context, chunks, rows, activated):
    """Seconds of a step: ``batch`` decodes and ``chunks``, pairs (cached tokens, new tokens).

    lm_head is computed for ``rows`` sequences.
    """
    tokens = batch + sum(new for _, new in chunks)
    seconds = cost.dense_s[tokens] + cost.collectives_s[tokens] + cost.host_s + cost.head_s[rows]
    if not chunks:
        seconds += moe_seconds(cost.moe_s[batch], activated)
    elif own_experts:
        seconds += moe_seconds(cost.mixed_moe_s[tokens], activated)
    else:
        seconds += cost.n_moe_layers * cost.uniform_moe_s[tokens]
    if batch:
        seconds += decode_attention_seconds(cost, batch, context)
    if chunks:
        seconds += chunk_attention_seconds(cost, chunks)
    return seconds


# --- KV blocks --------------------------------------------------------------------------------


@dataclass(eq=False)
class Block:
    """A KV block; ``key`` stands for its tokens and all before them."""

    key: object = None
    holders: int = 0
    writer: int = -1


class KVBlocks:
    """vLLM's block pool: a queue of free blocks, of which those with a key can still be found."""

    def __init__(self, n_blocks):
        self.free = [Block() for _ in range(n_blocks)]  # the first one is taken next
        self.published = []  # the oldest first
        self.evictions = 0

    def find(self, key):
        return next((block for block in self.published if block.key == key), None)

    def hold(self, block):
        if block.holders == 0:
            self.free.remove(block)
        block.holders += 1

    def take(self):
        """Take a free block; what was in it is lost."""
        block = self.free.pop(0)
        if block.key is not None:
            self.published.remove(block)
            block.key = None
            self.evictions += 1
        block.holders = 1
        return block

    def publish(self, block, key, writer):
        if block.key is None:
            block.key, block.writer = key, writer
            self.published.append(block)

    def give_back(self, table):
        """Free a table's blocks from the last to the first: those without contents go first."""
        blank, full = [], []
        for block in reversed(table):
            block.holders -= 1
            if block.holders == 0:
                (blank if block.key is None else full).append(block)
        self.free = blank + self.free + full


# --- requests ---------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    """A request and what it lives through; times that have not come are negative."""

    number: int
    arrival_s: float
    prompt: int
    output: int
    measured: bool
    token_experts: list  #: of each prompt token; empty where nobody asks
    window: list  #: experts of the tokens that it decodes, read round and round
    block_keys: list  #: of its full KV blocks that others may share
    info: RequestInfo
    sent_s: float = -1.0
    prefill_start_s: float = -1.0
    prefill_end_s: float = -1.0
    transfer_start_s: float = -1.0
    transfer_end_s: float = -1.0
    decode_start_s: float = -1.0
    first_token_s: float = -1.0
    finish_s: float = -1.0
    last_token_s: float = -1.0
    prefill_worker: int = -1
    decode_worker: int = -1
    preemptions: int = 0
    cached_tokens: int = -1
    decode_cached_tokens: int = -1
    reserved: int = -1  #: its place among those whose KV cache a decode worker fetches
    generated: int = 0
    outcome: str = ""
    kv_here: bool = False
    tables: dict = field(default_factory=dict)  #: worker -> its KV blocks there

    def experts(self, position):
        """Experts of the token at ``position`` of the context when a chunk computes it."""
        if position < self.prompt:
            return self.token_experts[position]
        return self.decode_experts(position - self.prompt + 1)

    def decode_experts(self, generated):
        """Experts of the token that is fed after ``generated`` tokens."""
        return self.window[generated % len(self.window)]


@dataclass(eq=False)
class Sequence:
    """A running request: ``cached`` of the ``context`` tokens before the next one have KV."""

    request: Request
    cached: int
    context: int
    chunk: int = 0  #: tokens that the next step computes


# --- an engine --------------------------------------------------------------------------------


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
        self.new, self.arrived, self.preempted, self.late = [], [], [], []
        self.joined = []  # decode for the first time in the next step
        self.step_end = -math.inf
        self.boundary_at = None
        self.closed = False  # nobody joins the next step any more
        self.decided = False  # there has been a boundary since the last step
        self.due = False  # the start of a step is scheduled

    # --- who waits ---

    def take(self, request):
        """Take a new request, or one whose KV cache has arrived."""
        if self.pool.async_scheduling and self.running():
            self.late.append(request)  # the next step is scheduled already
        else:
            self.queue(request)
        self.wake()

    def queue(self, request):
        if request.kv_here:  # in the order in which their blocks were reserved
            self.arrived.append(request)
            self.arrived.sort(key=lambda other: other.reserved)
        else:
            self.new.append(request)

    def queue_late(self):
        for request in self.late:
            self.queue(request)
        self.late = []

    def wake(self):
        """Look at the queues at the end of the step in progress, or now if there is none."""
        at = max(self.twin.now, self.step_end)
        if at != self.boundary_at:
            self.boundary_at = at
            self.twin.schedule(at, self.boundary)

    def running(self):
        return self.decoding + self.prefilling

    # --- between two steps ---

    def boundary(self):
        """End, preempt, admit, plan."""
        self.boundary_at, self.decided = None, True
        self.end_sequences()
        if not (self.running() or self.arrived or self.preempted or self.new):
            self.queue_late()  # no step has been scheduled yet
        if self.preempt():
            self.fill()
            self.closed = self.has_step()  # nobody is admitted in this step if there is one
        if not self.closed:
            self.admit()
        if self.has_step():
            self.start_when_all_have_come()
        if self.late:
            self.queue_late()
            if self.has_step():
                self.closed = True
            else:  # the last sequence was preempted: nothing is scheduled after all
                self.wake()

    def end_sequences(self):
        """Take out who has all tokens; on a prefill worker, whose prompt is computed."""
        now, twin = self.twin.now, self.twin
        if self.role == PREFILL:
            done = [s for s in self.prefilling if s.cached == s.context]
            self.prefilling = [s for s in self.prefilling if s not in done]
            for sequence in done:  # its blocks are held until the decode worker has them
                sequence.request.prefill_end_s = now
                twin.todo.append((twin.hand_over, sequence.request))
            return
        done = [s for s in self.decoding if s.request.generated == s.request.output]
        self.decoding = [s for s in self.decoding if s not in done]
        for sequence in done:
            sequence.request.finish_s = now
            self.release(sequence.request)
            twin.todo.append((twin.complete, sequence.request))

    def preempt(self):
        """Take sequences back, last joined first, until the others have the blocks they need."""
        victims = 0
        while not self.fits(0):
            if self.prefilling:
                request = self.prefilling.pop().request
            else:
                request = self.decoding.pop().request
                request.last_token_s = self.twin.now
            self.release(request)
            request.preemptions += 1
            self.preempted.insert(0, request)
            victims += 1
        return victims > 0

    def admit(self):
        """First who holds blocks already, then who lost them, then who is new."""
        self.fill()
        for queue, rule in (
            (self.arrived, self.admit_arrived),
            (self.preempted, self.admit_preempted),
            (self.new, self.admit_new),
        ):
            while queue and self.is_open():
                if not rule(queue[0]):
                    return  # first come, first served
                queue.pop(0)

    def admit_arrived(self, request):
        """Its KV cache is here but for the last prompt token, which is decoded."""
        request.decode_start_s = self.twin.now
        self.join(Sequence(request, request.prompt - 1, request.prompt - 1))
        return True

    def admit_preempted(self, request):
        """It recomputes its context but for the last token, which is decoded."""
        context = request.prompt - 1 + request.generated
        cached = self.allocate(request, context + 1)
        if cached is None:
            return False
        self.prefilling.append(Sequence(request, cached, context))
        self.fill()
        return True

    def admit_new(self, request):
        """It computes its prompt, or fetches it into the blocks reserved for it."""
        cached = self.allocate(request, request.prompt)
        if cached is None:
            return False
        if self.role == DECODE:
            request.decode_cached_tokens = cached
            self.twin.fetch(request)
            return True
        request.prefill_start_s = self.twin.now
        request.cached_tokens = cached
        if self.role == COLOCATED:
            request.prefill_worker = request.decode_worker
        context = request.prompt if self.role == PREFILL else request.prompt - 1
        self.prefilling.append(Sequence(request, cached, context))
        self.fill()
        return True

    def is_open(self):
        """Whether the next step has a place and a token of its budget left."""
        return len(self.running()) < self.pool.spec.max_num_seqs and self.budget() > 0

    def budget(self):
        chunks = sum(s.chunk for s in self.running())
        return self.pool.spec.max_num_batched_tokens - len(self.decoding) - chunks

    def fill(self):
        """Fill the token budget with contexts to compute, the one begun first."""
        for sequence in list(self.prefilling):
            n = min(sequence.context - sequence.cached - sequence.chunk, self.budget())
            sequence.chunk += n
            self.publish(sequence.request, sequence.cached + sequence.chunk)
            if sequence.cached + sequence.chunk < sequence.context:
                return
            if self.role != PREFILL:
                if self.budget() == 0:
                    return  # none left for the token to decode
                self.prefilling.remove(sequence)
                self.join(sequence)

    def join(self, sequence):
        """Let a sequence get a token in the next step."""
        self.decoding.append(sequence)
        self.joined.append(sequence)

    def has_step(self):
        return bool(self.decoding) or any(s.chunk for s in self.prefilling)

    # --- KV blocks ---

    def needs_block(self, sequence):
        table = sequence.request.tables[self]
        return sequence.context == len(table) * self.twin.spec.block_size

    def fits(self, n):
        """Whether ``n`` blocks are free beside those that the next tokens need."""
        needed = sum(self.needs_block(s) for s in self.decoding)
        return len(self.blocks.free) - n >= needed

    def allocate(self, request, tokens):
        """Take the blocks of a context; return its cached tokens, or None if too few are free."""
        size, found = self.twin.spec.block_size, []
        if self.pool.prefix_caching:
            for key in request.block_keys[: (tokens - 1) // size]:  # one token must be computed
                block = self.blocks.find(key)
                if block is None:
                    break
                found.append(block)
        new = -(-tokens // size) - len(found)
        if not self.fits(new + sum(block.holders == 0 for block in found)):
            return None
        for block in found:
            self.blocks.hold(block)
        request.tables[self] = found + [self.blocks.take() for _ in range(new)]
        return len(found) * size

    def publish(self, request, tokens):
        """Let others find the full blocks of the first ``tokens`` tokens."""
        if self.pool.prefix_caching:
            full = request.block_keys[: tokens // self.twin.spec.block_size]
            for key, block in zip(full, request.tables[self], strict=False):
                self.blocks.publish(block, key, request.number)

    def release(self, request):
        self.blocks.give_back(request.tables.pop(self))

    # --- a step ---

    def start_when_all_have_come(self):
        """Start the next step behind all other events of its instant."""
        if not self.due:
            self.due = True
            self.twin.schedule(max(self.twin.now, self.step_end), self.start, LAST + self.number)

    def start(self):
        if not self.decided:  # nothing was known to happen
            self.boundary()
        self.due = False
        if self.has_step():
            self.step()

    def step(self):
        """Run the step that is planned, which starts now."""
        twin, now = self.twin, self.twin.now
        batch = list(self.decoding)
        for sequence in batch:
            if self.needs_block(sequence):
                sequence.request.tables[self].append(self.blocks.take())
        chunked = [s for s in self.running() if s.chunk]
        chunks = [(s.cached, s.chunk) for s in chunked]
        context = sum(s.context + 1 for s in batch)
        active, activated = self.count(self.experts(batch, chunked))
        rows = len(batch) + sum(s not in batch for s in chunked)
        seconds = step_seconds(
            self.cost, self.pool.own_experts, len(batch), context, chunks, rows, activated
        )
        end = now + (seconds + self.pool.capture_s)
        twin.steps.append(
            {"start": now, "end": end, "context": context, "worker": self.number}
            | {"batch": len(batch), "joined": len(self.joined), "active": active}
            | {"busiest": sum(activated), "chunks": len(chunks)}
            | {"chunk_tokens": sum(n for _, n in chunks)}
        )
        for sequence in chunked:
            sequence.cached += sequence.chunk
            sequence.chunk = 0
        for sequence in batch:
            sequence.cached = sequence.context = sequence.context + 1
            sequence.request.generated += 1
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
        if ended or chunks or self.closed:
            self.wake()
        else:
            self.start_when_all_have_come()
        self.closed = False

    def experts(self, batch, chunked):
        """Return the (layer, expert) pairs that a step's tokens select."""
        union = set()
        for sequence in batch:
            union |= sequence.request.decode_experts(sequence.request.generated)
        if self.pool.own_experts:
            for sequence in chunked:
                for position in range(sequence.cached, sequence.cached + sequence.chunk):
                    union |= sequence.request.experts(position)
        return union

    def count(self, union):
        """Return the activated experts, and by layer those of the busiest rank."""
        by_rank = [union] if self.ranks is None else [union & held for held in self.ranks]
        counts = [Counter(layer for layer, _ in held) for held in by_rank]
        layers = range(self.cost.n_moe_layers)
        return len(union), [max(count[layer] for count in counts) for layer in layers]


# --- links ------------------------------------------------------------------------------------


def fair_rates(flows, capacity):
    """Max-min fair rates: all rise together, and those on a full link stop.

    ``flows`` are pairs of links, ``capacity`` a link's bytes/s.
    """
    rates, rising = {}, set(range(len(flows)))
    while rising:
        shares = {}
        for link in {link for i in rising for link in flows[i]}:
            on = [i for i in range(len(flows)) if link in flows[i]]
            taken = sum(rates[i] for i in on if i in rates)
            shares[link] = (capacity(link) - taken) / sum(i in rising for i in on)
        level = min(shares.values())
        full = {link for link, share in shares.items() if share == level}
        stopped = {i for i in rising if full & set(flows[i])}
        rates |= dict.fromkeys(stopped, level)
        rising -= stopped
    return [rates[i] for i in range(len(flows))]


@dataclass(eq=False)
class Flow:
    """A KV transfer whose bytes flow."""

    request: Request
    links: tuple
    bytes_left: float
    rate: float = 0.0


class Links:
    """The bytes in flight, and when the first transfer ends."""

    def __init__(self, twin):
        self.twin, self.flows, self.updated, self.timer = twin, [], 0.0, 0

    def begin(self, request, n_bytes):
        self.progress()
        links = ("out", request.prefill_worker), ("in", request.decode_worker)
        self.flows.append(Flow(request, links, n_bytes))
        self.share()

    def progress(self):
        elapsed, self.updated = self.twin.now - self.updated, self.twin.now
        for flow in self.flows:
            flow.bytes_left -= flow.rate * elapsed

    def share(self):
        self.timer += 1
        if not self.flows:
            return
        transfer = self.twin.spec.transfer
        bandwidth = {"out": transfer.bandwidth, "in": transfer.ingress}
        rates = fair_rates([flow.links for flow in self.flows], lambda link: bandwidth[link[0]])
        for flow, rate in zip(self.flows, rates, strict=True):
            flow.rate = rate
        soonest = min(flow.bytes_left / flow.rate for flow in self.flows)
        timer = self.timer
        self.twin.schedule(self.twin.now + max(0.0, soonest), lambda: self.end(timer))

    def end(self, timer):
        if timer != self.timer:
            return  # the rates have changed since
        self.progress()
        rounding = max(1e-9, math.ulp(self.twin.now))  # s: what flows in it is no data
        done = [flow for flow in self.flows if flow.bytes_left <= flow.rate * rounding]
        self.flows = [flow for flow in self.flows if flow not in done]
        self.share()
        for flow in done:
            self.twin.transferred(flow.request)


# --- the cluster ------------------------------------------------------------------------------


class Twin:
    """Takes what `Cluster` takes; `run` fills ``requests``, ``steps`` and ``gaps``."""

    def __init__(
        self, spec, model, workload, replay, prefill_policy, decode_policy, window, time_limit_s,
        expert_masks=None, prompts=None,
    ):  # fmt: skip
        self.spec, self.model, self.time_limit_s = spec, model, time_limit_s
        self.n_layers = spec.decode.step_time.n_moe_layers
        self.now, self.order, self.events, self.todo = 0.0, 0, [], []
        self.steps, self.gaps, self.reservations = [], [], 0
        self.arrived = self.sent = self.in_flight = 0
        self.requests = self.make_requests(workload, replay, window, prompts)
        self.open_measured = sum(request.measured for request in self.requests)
        self.ranks = expert_masks is not None and [
            [expert_set(rank, self.n_layers) for rank in worker] for worker in expert_masks
        ]
        self.pools = self.make_pools(workload, prompts is not None)
        self.workers = [
            [Worker(self, pool, pool.first + i) for i in range(pool.size)] for pool in self.pools
        ]
        self.policies = prefill_policy, decode_policy
        self.loads = [np.zeros(pool.size, np.int64) for pool in self.pools]
        self.links = Links(self)
        if self.requests:
            self.schedule(self.requests[0].arrival_s, lambda: self.arrive(0))

    def make_pools(self, workload, own_experts):
        spec = self.spec
        colocated = spec.n_prefill == 0
        caching = spec.enable_prefix_caching and workload.prefix_block_tokens > 0
        prefill = Pool(
            PREFILL, 0, spec.n_prefill, spec.prefill,
            prefix_caching=caching, own_experts=own_experts,
            async_scheduling=spec.async_scheduling, capture_s=spec.capture_s,
        )  # fmt: skip
        decode = Pool(
            COLOCATED if colocated else DECODE, spec.n_prefill, spec.n_decode, spec.decode,
            prefix_caching=caching, own_experts=own_experts,
            async_scheduling=spec.async_scheduling, capture_s=0.0,
        )  # fmt: skip
        return prefill, decode

    def make_requests(self, workload, replay, window, prompts):
        windows = [expert_set(row, self.n_layers) for row in replay.bits]
        trace = None
        if prompts is not None:
            trace_layers = len(prompts.bits[0]) * self.n_layers // len(replay.bits[0])
            rows = [expert_set(row, trace_layers) for row in prompts.bits]
            trace = TraceSets(rows, trace_layers)
        made = []
        for i in range(len(workload)):
            prompt, blocks = int(workload.prompt_len[i]), workload.blocks(i).tolist()
            replayed = int(workload.decode_request[i])
            first, span = int(replay.first_row[replayed]), int(replay.length[replayed])
            offset = int(workload.replay_offset[i])
            arrival = float(workload.arrival_s[i])
            request = Request(
                number=i,
                arrival_s=arrival,
                prompt=prompt,
                output=int(workload.output_len[i]),
                measured=window[0] <= arrival < window[1],
                token_experts=[],
                window=[windows[first + (offset + k) % span] for k in range(span)],
                block_keys=self.block_keys(workload, prompt, blocks),
                info=RequestInfo(i, prompt, int(workload.domain[i]), tuple(blocks)),
            )
            if trace is not None:
                request.token_experts = [
                    prompt_token_experts(prompts, trace, source, token, self.n_layers)
                    for token, (source, _) in enumerate(prompt_sources(workload, i))
                ]
            made.append(request)
        return made

    def block_keys(self, workload, prompt, prefix_blocks):
        """A full KV block is told by its number and the prefix block its last token lies in."""
        size, prefix = self.spec.block_size, workload.prefix_block_tokens
        keys = []
        for number in range(prompt // size):
            last = (number + 1) * size - 1
            if prefix == 0 or last // prefix >= len(prefix_blocks):
                break
            keys.append((number, prefix_blocks[last // prefix]))
        return keys

    # --- events ---

    def schedule(self, time, act, order=None):
        """Events of one time happen in the order in which they were scheduled."""
        if order is None:
            self.order += 1
            order = self.order
        insort(self.events, (time, order, act), key=lambda event: event[:2])

    def run(self):
        """Run until all measured requests have ended, or to the time limit."""
        while self.open_measured and self.events and self.events[0][0] < self.time_limit_s:
            self.now, _, act = self.events.pop(0)
            act()
            self.settle()
        for request in self.requests[: self.arrived]:
            if not request.outcome:
                request.outcome = (
                    "unserved_at_time_limit" if self.open_measured else "run_ended_after_window"
                )
        return self

    def arrive(self, number):
        self.arrived = number + 1
        if self.arrived < len(self.requests):
            at = self.requests[self.arrived].arrival_s
            self.schedule(at, lambda: self.arrive(number + 1))

    def settle(self):
        """Send whom the client may send, then do the next thing that the event has brought."""
        while True:
            limit = self.spec.max_concurrency
            while self.sent < self.arrived and (limit is None or self.in_flight < limit):
                self.send(self.requests[self.sent])
            if not self.todo:
                return
            act, request = self.todo.pop(0)
            act(request)

    def send(self, request):
        self.sent += 1
        request.sent_s = self.now
        reason = self.refusal(request)
        if reason:
            self.end(request, reason)
            return
        self.in_flight += 1
        self.dispatch(request, 0 if self.spec.n_prefill else 1)

    def refusal(self, request):
        """Say why a request can never be served."""
        size, tokens = self.spec.block_size, request.prompt + request.output
        if tokens > self.spec.max_model_len:
            return "exceeds_max_model_len"
        if (
            request.prompt > self.spec.prefill.n_blocks * size
            or tokens > self.spec.decode.n_blocks * size
        ):
            return "exceeds_kv_cache"
        return ""

    def dispatch(self, request, pool):
        """Let a router pick the worker."""
        worker = self.policies[pool].select(request.info, self.loads[pool])
        self.loads[pool][worker] += 1
        if pool == 0:
            request.prefill_worker = worker
        else:
            request.decode_worker = worker
        self.workers[pool][worker].take(request)

    def hand_over(self, request):
        """Its prompt is computed: tell the router, which takes its time to pick a decode worker."""
        self.report(request, 0)
        delay = self.spec.routing_s + self.spec.routing_token_s * request.prompt
        if delay == 0:
            self.dispatch(request, 1)
        else:
            later = (lambda who: self.dispatch(who, 1)), request
            self.schedule(self.now + delay, lambda: self.todo.append(later))

    def complete(self, request):
        self.report(request, 1)
        self.in_flight -= 1
        self.end(request, "completed")

    def end(self, request, outcome):
        request.outcome = outcome
        self.open_measured -= request.measured

    def report(self, request, pool):
        if self.spec.load_report_delay_s == 0:
            self.hear(request, pool)
        else:
            at = self.now + self.spec.load_report_delay_s
            self.schedule(at, lambda: self.hear(request, pool))

    def hear(self, request, pool):
        worker = request.decode_worker if pool else request.prefill_worker
        self.loads[pool][worker] -= 1
        if pool and hasattr(self.policies[1], "on_complete"):
            self.policies[1].on_complete(request.number, worker)

    # --- transfers ---

    def transfer_blocks(self, request):
        """How many KV blocks a decode worker fetches: those of the prompt that it lacks."""
        return -(-(request.prompt - request.decode_cached_tokens) // self.spec.block_size)

    def fetch(self, request):
        """Post the descriptors, one a block and KV tensor; then the bytes flow."""
        request.transfer_start_s = self.now
        self.reservations += 1
        request.reserved = self.reservations
        transfer, blocks = self.spec.transfer, self.transfer_blocks(request)
        latency = transfer.setup_s + blocks * self.model.n_kv_tensors * transfer.descriptor_s
        n_bytes = blocks * self.spec.block_size * self.model.kv_bytes_per_token
        self.schedule(self.now + latency, lambda: self.links.begin(request, n_bytes))

    def transferred(self, request):
        """The prefill worker's blocks are free, and the request can decode."""
        request.transfer_end_s = self.now
        source = self.workers[0][request.prefill_worker]
        source.release(request)
        if source.new:
            source.wake()
        request.kv_here = True
        target = self.workers[1][request.decode_worker]
        target.publish(request, request.prompt)
        target.take(request)


def prompt_sources(workload, request):
    """Return (trace request, token) of each prompt token: what it replays."""
    blocks = workload.prefix_trace_request[
        workload.prefix_indptr[request] : workload.prefix_indptr[request + 1]
    ].tolist()
    own, size = int(workload.trace_request[request]), workload.prefix_block_tokens
    return [
        (blocks[token // size] if size and token // size < len(blocks) else own, token)
        for token in range(int(workload.prompt_len[request]))
    ]
