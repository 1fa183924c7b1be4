"""An engine's own scheduler as the engines of the reference model.

Each worker has one scheduler of the engine. The simulator gives it requests and the ends of steps,
and takes its decisions: which requests run, with how many tokens, which are preempted, which KV
blocks are found. Step times, accepted drafts, routing, links and faults stay the simulator's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from eldr_sim.simulator.control.run_inputs import RunInputs
from eldr_sim.simulator.reference.group import ExpertGroup
from eldr_sim.simulator.reference.requests import Request, Sequence
from eldr_sim.simulator.reference.worker import Batch, EngineGroup, Worker, worker_class
from eldr_sim.simulator.setup.cluster_spec import ClusterSpec, PoolSpec
from eldr_sim.simulator.setup.config.pools import Engine


@dataclass
class Part:
    """What a step computes for a request."""

    request_id: str
    sequence: Sequence
    tokens: int  #: scheduled, prompt tokens and drafts among them
    drafts: int  #: drafts among them, or placeholders of drafts
    samples: bool  #: whether the request gets a token
    computed: int  #: tokens that have KV when the step starts, where it does not sample


@dataclass
class Plan:
    """A step that the engine has scheduled. ``output``: what its scheduler returned."""

    output: Any
    parts: list[Part]
    first: dict[str, int]  #: requests that run for the first time: tokens found in the cache
    loads: list[str] = field(default_factory=list)  #: requests whose KV cache is loaded


class EngineBlocks:
    """The KV blocks of an engine, as routers and clusters see them."""

    groups = 0  #: of sliding layers, which move by themselves

    def __init__(self, scheduler: EngineScheduler, size: int, caching: bool) -> None:
        self.scheduler, self.size, self.caching = scheduler, size, caching
        self.pool = self
        self.writers: dict[Any, int] = {}  #: the request that computed a block, by its key

    def find(self, key: Any) -> Any | None:
        """Return the cached block of a shared key; None if there is none."""
        raise NotImplementedError

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold."""
        raise NotImplementedError

    def release(self, request: Request) -> None:
        """Say that the blocks of a request which was handed over have been read."""
        self.scheduler.release(request)

    def cache_blocks(self, request: Request, tokens: int) -> None:
        """Do nothing: the engine does so itself."""


class EngineScheduler:
    """An engine's scheduler, called as `reference.scheduler.Scheduler` is.

    A subclass has what the engine does: the methods that raise NotImplementedError here, and
    ``kv``, its KV blocks as routers and clusters see them (`EngineBlocks`)."""

    engine: ClassVar[Engine]  #: whose scheduler it is
    kv: EngineBlocks

    def __init__(self, worker: Worker, *, only_prompts: bool) -> None:
        self.worker, self.only_prompts = worker, only_prompts
        self.ahead = worker.cluster.spec.scheduler.async_scheduling
        self.arrived: list[Request] = []  #: since the last step was planned
        self.ids: dict[Request, str] = {}  #: of the requests that the engine has
        self.of: dict[str, Request] = {}
        self.sequences: dict[str, Sequence] = {}
        self.plans: deque[Plan] = deque()  #: that have not started
        self.executing: Plan | None = None
        self.n_added, self.defers = 0, False
        # What a worker and a group look at beside the steps.
        self.riding: list[Sequence] = []
        self.joined: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.leaving: list[Request] = []
        self.ended: list[Sequence] = []
        self.preempted: list[Request] = []
        self.kv_ready: list[Request] = []
        self.closed = self.blocked = self.frees_late = False

    # --- what the engine does ---

    def give(self, name: str, request: Request) -> None:
        """Give the engine a new request."""
        raise NotImplementedError

    def names_running(self) -> list[str]:
        """Return the requests that have a place in the batch."""
        raise NotImplementedError

    def has(self, name: str) -> bool:
        """Whether the engine has a request that it has not finished."""
        raise NotImplementedError

    def has_unfinished(self) -> bool:
        """Whether there is any such request."""
        raise NotImplementedError

    def plan_one(self) -> None:
        """Let the engine schedule a step, and add it to ``plans`` if there is anything to run."""
        raise NotImplementedError

    def deliver(self, plan: Plan, sampled: list[list[int]]) -> dict[str, tuple[int, bool]]:
        """Give the engine the ``sampled`` tokens of each part of a step that has ended. Returns how
        many of them each request keeps, and whether it has finished, for those that the engine had
        not given up before."""
        raise NotImplementedError

    def take_out(self, name: str) -> None:
        """Take a request out of the engine, wherever it is there, and its KV blocks."""
        raise NotImplementedError

    def load(self, names: list[str]) -> None:
        """Let KV caches come, of requests that have blocks for them."""

    # --- requests come and go ---

    def add_request(self, request: Request) -> None:
        """Take a new request."""
        request.queued_s = self.worker.env.now
        self.arrived.append(request)

    def give_arrived(self) -> None:
        """Give the engine the requests that have come since it planned a step."""
        arrived, self.arrived = self.arrived, []
        for request in arrived:
            self.n_added += 1
            name = f"{request.number}.{self.n_added}"
            self.ids[request], self.of[name] = name, request
            request.tables[self.kv], request.windows[self.kv] = [], []
            request.found[self.kv] = 0
            self.give(name, request)

    def release(self, request: Request) -> None:
        """Forget a request that has left, and its KV blocks here."""
        request.tables.pop(self.kv, None)
        request.windows.pop(self.kv, None)
        name = self.ids.pop(request, None)
        if name is not None:
            self.of.pop(name, None)
            self.sequences.pop(name, None)

    def free_source(self, request: Request) -> None:
        """Free the KV cache of a request, which another worker has fetched."""
        self.release(request)
        if self.waits_for_blocks:
            self.worker.wake()

    def abort(self, request: Request) -> None:
        """Take a request out, wherever it is, and its KV blocks."""
        for queue in (self.arrived, self.leaving):
            if request in queue:
                queue.remove(request)
        name = self.ids.get(request)
        if name is not None:
            self.take_out(name)
        self.release(request)

    # --- how things stand ---

    @property
    def in_flight(self) -> bool:
        """Whether a step runs or has been planned."""
        return self.executing is not None or bool(self.plans)

    @property
    def running(self) -> list[Sequence]:
        """The sequences that have a place in the batch."""
        return [self.sequences[name] for name in self.names_running() if name in self.sequences]

    @property
    def prefilling(self) -> list[Sequence]:
        """Sequences with a context still being computed."""
        return [each for each in self.running if each not in self.decoding]

    @property
    def waits_for_blocks(self) -> bool:
        """Whether requests wait that KV blocks, when they become free, may let in."""
        return bool(self.waiting)

    @property
    def waiting(self) -> list[Request]:
        """The requests that wait, those that have just come among them."""
        running = set(self.names_running())
        queued = [r for r, name in self.ids.items() if name not in running and self.has(name)]
        return queued + self.arrived

    def signals(self) -> tuple[int, int, int, int, float]:
        """Return waiting and running requests, the tokens of both, and the share of KV in use."""
        waiting, running = self.waiting, self.running
        contexts = sum(each.context for each in running)
        return (
            len(waiting), len(self.names_running()), sum(r.tokens for r in waiting), contexts,
            self.kv.usage,
        )  # fmt: skip

    def has_step(self) -> bool:
        """Whether there may be something to compute."""
        return self.in_flight or bool(self.arrived) or self.has_unfinished()

    def fits(self, n: int) -> bool:
        """Return True: the engine preempts as it plans."""
        return True

    # --- a step is planned ---

    def schedule(self, defers_prompts: bool) -> None:
        """Note whether the next step leaves prompts alone; it is planned as it starts."""
        self.defers = defers_prompts

    def process_output(self) -> bool:
        """Return False: there is nothing to plan anew."""
        return False

    def plan(self) -> bool:
        """Plan the next step if none is planned; returns whether there is one."""
        if not self.plans:
            self.plan_one()
        return bool(self.plans)

    def note_preemption(self, name: str) -> None:
        """Note that a request has lost its place."""
        request = self.of[name]
        request.preemptions += 1
        if request.token_s:
            request.last_token_s = request.token_s[-1]
        sequence = self.sequences.pop(name, None)
        if sequence in self.decoding:
            self.decoding.remove(sequence)

    # --- a step begins ---

    def begin_step(self) -> Batch:
        """Start the planned step, and plan the one after where the engine schedules ahead; returns
        the sequences that get a token, and those that compute a part of their context."""
        if not self.plans:
            return [], []
        plan = self.executing = self.plans.popleft()
        self.load(plan.loads)
        was_decoding = set(map(id, self.decoding))
        self.riding, self.joined, decoding, chunked = [], [], [], []
        for part in plan.parts:
            sequence, request = part.sequence, part.sequence.request
            if part.request_id not in self.of:  # it has ended since
                sequence.tokens, sequence.chunk, sequence.drafts = part.tokens, 0, 0
                self.riding.append(sequence)
                continue
            if part.request_id in plan.first and not request.kv_here:
                self.note_first(request, plan.first[part.request_id])
            if self.only_prompts or not part.samples:
                sequence.cached, sequence.chunk = part.computed, part.tokens
                sequence.context, sequence.tokens = request.tokens, 1
                sequence.context -= not self.only_prompts
                chunked.append(sequence)
                continue
            sequence.tokens = 1 + part.drafts
            sequence.chunk = part.tokens - sequence.tokens
            sequence.context = request.tokens - 1
            sequence.cached = sequence.context - sequence.chunk
            if id(sequence) not in was_decoding:
                self.joined.append(sequence)
                if request.kv_here and request.decode_start_s < 0:
                    request.decode_start_s = self.worker.env.now
                sequence.drafts = 0  # placeholders
            sequence.drafts = min(sequence.drafts, part.drafts)
            decoding.append(sequence)
            if sequence.chunk:
                chunked.append(sequence)
        self.decoding = list(decoding)  # the step keeps those that planning preempts
        if self.ahead:
            self.plan_one()
        return self.riding + decoding, chunked

    def note_first(self, request: Request, cached: int) -> None:
        """Note that a request runs for the first time, ``cached`` tokens of which are here."""
        request.prefill_start_s, request.cached_tokens = self.worker.env.now, cached
        n = cached // self.kv.size
        request.found[self.kv] = n
        keys, writers = self.block_keys(request), self.kv.writers
        request.tables[self.kv] = [
            SimpleNamespace(writer=writers.get(key, request.number)) for key in keys[:n]
        ]
        for key in keys[n:]:
            writers[key] = request.number

    def block_keys(self, request: Request) -> list[Any]:
        """Return the keys of the blocks of a request that others may find."""
        return request.block_keys if self.kv.caching else []

    # --- a step has ended ---

    def finish_step(self) -> list[Sequence]:
        """Give the engine the tokens of the step that has ended; returns the sequences that it
        ends."""
        plan = self.executing
        if plan is None or self.worker.step_end > self.worker.env.now:
            return []
        self.executing = None
        sampled = []
        for part in plan.parts:
            gone = part.request_id not in self.of
            got = 1 if self.only_prompts or gone else part.sequence.got
            sampled.append([0] * got if part.samples else [])
        kept = self.deliver(plan, sampled)
        done = []
        for part, tokens in zip(plan.parts, sampled, strict=True):
            if part.request_id not in kept or not part.samples:
                continue
            n, finished = kept[part.request_id]
            if lost := len(tokens) - n:
                self.take_back(part.sequence, lost)
            if finished:
                done.append(part.sequence)
                self.leave(part)
        return done

    def leave(self, part: Part) -> None:
        """Forget a request that has ended here."""
        if part.sequence in self.decoding:
            self.decoding.remove(part.sequence)
        self.release(part.sequence.request)

    def take_back(self, sequence: Sequence, lost: int) -> None:
        """Take tokens back that the engine drops: the request was preempted meanwhile."""
        if self.only_prompts:
            return
        request = sequence.request
        request.generated -= lost
        del request.token_s[-lost:]
        if not request.token_s:
            request.first_token_s = -1.0
        assert self.worker.last is not None
        self.worker.last[0].outputs -= lost


class _Alone(EngineGroup):
    """An engine plans a step as it starts, when all else of the instant has happened."""

    def start(self) -> None:
        """Start the step that the engines plan, if they plan any."""
        for engine in self.engines:
            engine.boundary()
        self.due = False
        planned = [engine.scheduler.plan() for engine in self.engines]  # each of them
        if any(planned):
            self.step()


class _Together(_Alone, ExpertGroup):
    """Engines that share experts."""


def block_key(request: Request, block: int) -> Any:
    """Return what stands for the tokens of a block of a request and all before them: its key if
    others may share it, else one that no other request has."""
    shared = request.block_keys
    return shared[block] if block < len(shared) else (block, "request", request.number)


def has_queue_order(inputs: RunInputs) -> bool:
    """Whether requests wait in another order than they come."""
    keys = inputs.queue_keys
    return keys is not None and bool(np.any(keys != keys[:1]))


def pool_workers(
    spec: ClusterSpec,
    kind: type[EngineScheduler],
    about: Callable[[PoolSpec, bool], dict[str, Any]],
) -> Mapping[str, type[Worker]]:
    """Return the class of each pool's workers, with an engine's scheduler. ``about``: attributes of
    the scheduler's class by pool, and by whether it decodes prompts that others compute."""
    made = {}
    for pool in spec.pools:
        takes_over = pool.router in {other.then for other in spec.pools}
        scheduler = type("PoolScheduler", (kind,), about(pool, takes_over))
        group = _Alone if pool.engine.group is None else _Together
        attributes = {"scheduler_class": scheduler, "group_class": group, "follows": kind.engine}
        base = worker_class(pool, takes_over)
        made[pool.name] = type(f"Engine{base.__name__}", (base,), attributes)
    return made
