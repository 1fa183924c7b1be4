"""vLLM's own scheduler and KV manager as the engines of the reference model.

Each worker has one scheduler of vLLM. The simulator gives it requests and the ends of steps, and
takes its decisions: which requests run, with how many tokens, which are preempted, which KV blocks
are found. Step times, accepted drafts, routing, links and faults stay the simulator's.

Each step is planned as in ``vllm/v1/engine/core.py``: with asynchronous scheduling
(`step_with_batch_queue`) the next step is planned when this one starts, when the output of the one
before has been processed; otherwise when this one has ended (`step`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from eldr_sim.simulator.control.run_inputs import RunInputs
from eldr_sim.simulator.engine_code.vllm_config import (
    load_vllm,
    make_scheduler,
    refuse,
    vllm_config,
)
from eldr_sim.simulator.reference.group import ExpertGroup
from eldr_sim.simulator.reference.requests import Request, Sequence
from eldr_sim.simulator.reference.worker import Batch, EngineGroup, Worker, worker_class


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
    """A step that vLLM has scheduled. ``output``: its ``SchedulerOutput``."""

    output: Any
    parts: list[Part]
    first: dict[str, int]  #: requests that run for the first time: tokens found in the cache
    loads: list[str] = field(default_factory=list)  #: requests whose KV cache is loaded


class VllmBlocks:
    """The KV blocks of an engine, as routers and clusters see them."""

    caching: bool
    groups = 0  #: of sliding layers, which move by themselves

    def __init__(self, scheduler: VllmScheduler, size: int, caching: bool) -> None:
        self._scheduler, self.size, self.caching = scheduler, size, caching
        self.pool = self
        self.writers: dict[bytes, int] = {}  #: the request that computed a block, by its hash

    def find(self, key: Any) -> Any | None:
        """Return the cached block of a shared key; None if there is none."""
        manager = self._scheduler.vllm.kv_cache_manager
        groups = list(range(len(manager.kv_cache_config.kv_cache_groups)))
        return manager.block_pool.get_cached_block(block_hash(key), groups)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold."""
        return float(self._scheduler.vllm.kv_cache_manager.usage)

    def release(self, request: Request) -> None:
        """Say that the blocks of a request which was handed over have been read."""
        self._scheduler.release(request)

    def cache_blocks(self, request: Request, tokens: int) -> None:
        """Do nothing: vLLM does so itself."""


class VllmScheduler:
    """vLLM's scheduler, called as `reference.scheduler.Scheduler` is."""

    config: Any  #: vLLM's configuration of the pool's engines
    window = 0  #: tokens that the sliding windows of the model see

    def __init__(self, worker: Worker, *, only_prompts: bool) -> None:
        self.worker, self.only_prompts, self.v = worker, only_prompts, load_vllm()
        spec, pool = worker.cluster.spec, worker.pool
        self.takes_over = pool.router in worker.cluster.handed_to
        self.vllm = make_scheduler(self.config, spec, pool, self.window)
        if self.vllm.connector is not None:
            self.vllm.connector.fetches = self.loads
        self.kv = VllmBlocks(self, spec.block_size, spec.enable_prefix_caching)
        self.ahead = spec.scheduler.async_scheduling
        self.speculates = worker.speculation is not None
        self.arrived: list[Request] = []  #: since the last step was planned
        self.ids: dict[Request, str] = {}  #: of the requests that the engine has
        self.of: dict[str, Request] = {}
        self.base: dict[str, int] = {}  #: output tokens that a request brought
        self.sequences: dict[str, Sequence] = {}
        self.plans: deque[Plan] = deque()  #: that have not started
        self.executing: Plan | None = None
        self.to_load: list[str] = []  #: loads that a step without tokens has begun
        self.sent: set[str] = set()  #: whose blocks have been read,
        self.received: set[str] = set()  #: and whose KV cache is here, since the last output
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

    # --- requests come and go ---

    def add_request(self, request: Request) -> None:
        """Take a new request, or one with a KV cache that has arrived."""
        if request.kv_here and request in self.ids:
            self.received.add(self.ids[request])
            return
        request.queued_s = self.worker.env.now
        self.arrived.append(request)

    def _add_arrived(self) -> None:
        arrived, self.arrived = self.arrived, []
        for request in arrived:
            self.n_added += 1
            name = f"{request.number}.{self.n_added}"
            self.ids[request], self.of[name] = name, request
            self.base[name] = request.generated
            request.tables[self.kv], request.windows[self.kv] = [], []
            request.found[self.kv] = 0
            wanted = 1 if self.only_prompts else request.output_len - request.generated
            self.vllm.add_request(self.v.Request(
                request_id=name, prompt_token_ids=[0] * request.tokens, pooling_params=None,
                sampling_params=self.v.SamplingParams(
                    max_tokens=wanted, min_tokens=wanted, ignore_eos=True
                ),
                arrival_time=self.worker.env.now, priority=self.priority_of(request),
                block_hasher=self.hasher(request) if self.kv.caching else None,
            ))  # fmt: skip

    def priority_of(self, request: Request) -> int:
        """Return a whole number that orders requests as their queue keys do."""
        keys = self.worker.cluster.inputs.queue_keys
        if keys is None:
            return 0
        ranks = getattr(self.worker.cluster, "queue_ranks", None)
        if ranks is None:
            ranks = np.unique(keys, return_inverse=True)[1]
            self.worker.cluster.queue_ranks = ranks  # type: ignore[attr-defined]
        return int(ranks[request.number])

    def hasher(self, request: Request) -> Callable[[Any], list[bytes]]:
        """Return what gives vLLM the hashes of a request's full blocks: those that prompts share
        by what they share, the others by the request."""
        shared, size, writers = request.block_keys, self.kv.size, self.kv.writers

        def new_hashes(of_vllm: Any) -> list[bytes]:
            numbers = range(len(of_vllm.block_hashes), of_vllm.num_tokens // size)
            block_hashes = [
                block_hash(shared[i] if i < len(shared) else (i, "request", request.number))
                for i in numbers
            ]
            for one in block_hashes:
                writers.setdefault(one, request.number)
            return block_hashes

        return new_hashes

    def loads(self, name: str, cached: int) -> bool:
        """Whether the KV cache of a request is loaded from another engine, where ``cached`` tokens
        are here already."""
        request = self.of[name]
        if not self.takes_over or request.source < 0 or request.kv_here:
            return False
        request.decode_cached_tokens = cached
        request.found[self.kv] = cached // self.kv.size
        return True

    def release(self, request: Request) -> None:
        """Say that the blocks of a request have been read; an idle engine frees them at once."""
        request.tables.pop(self.kv, None)
        request.windows.pop(self.kv, None)
        name = self.ids.pop(request, None)
        if name is None:
            return
        self.forget(name)
        if self.vllm.connector is not None and name in self.vllm.connector.held:
            self.vllm.connector.held.discard(name)
            self.sent.add(name)
            if not self.in_flight and not self.vllm.has_unfinished_requests():
                self.process_events()

    def abort(self, request: Request) -> None:
        """Take a request out, wherever it is, and its KV blocks."""
        if request in self.arrived:
            self.arrived.remove(request)
        if request in self.leaving:
            self.leaving.remove(request)
        name = self.ids.get(request)
        if name is not None and name in self.vllm.requests:
            loading = self.vllm.requests[name].status == self.v.RequestStatus.WAITING_FOR_REMOTE_KVS
            self.vllm.finish_requests(name, self.v.RequestStatus.FINISHED_ABORTED)
            if loading and name in self.vllm.requests:  # else its arrival has been processed
                self.received.add(name)
        self.release(request)

    def forget(self, name: str) -> None:
        """Drop what is kept of a request that has left."""
        for kept in (self.of, self.base, self.sequences):
            kept.pop(name, None)

    # --- how things stand ---

    @property
    def in_flight(self) -> bool:
        """Whether a step runs or has been planned."""
        return self.executing is not None or bool(self.plans)

    @property
    def running(self) -> list[Sequence]:
        """The sequences that have a place in the batch."""
        names = (each.request_id for each in self.vllm.running)
        return [self.sequences[name] for name in names if name in self.sequences]

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
        running = {each.request_id for each in self.vllm.running}
        queued = [
            request for request, name in self.ids.items()
            if name not in running and name in self.vllm.requests
            and not self.vllm.requests[name].is_finished()
        ]  # fmt: skip
        return queued + self.arrived

    def signals(self) -> tuple[int, int, int, int, float]:
        """Return waiting and running requests, the tokens of both, and the share of KV in use."""
        waiting, running = self.waiting, self.running
        contexts = sum(each.context for each in running)
        return (
            len(waiting), len(self.vllm.running), sum(r.tokens for r in waiting), contexts,
            self.kv.usage,
        )  # fmt: skip

    def has_step(self) -> bool:
        """Whether there may be something to compute."""
        if self.in_flight or self.arrived or self.sent or self.received:
            return True
        return bool(self.vllm.has_unfinished_requests())

    def fits(self, n: int) -> bool:
        """Return True: vLLM preempts as it plans."""
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
            if self.to_load:
                self.start_loads(self.to_load)
                self.to_load = []
            if self.sent or self.received:  # nothing ran that would have brought them
                self.process_events()
            if not self.plans:
                self.plan_one()
        return bool(self.plans)

    def plan_one(self) -> None:
        """Let vLLM schedule a step."""
        self._add_arrived()
        if not self.vllm.has_unfinished_requests():
            return
        output = self.vllm.schedule(throttle_prefills=self.defers)
        loads: list[str] = []
        if self.vllm.connector is not None:
            loads, self.vllm.connector.loading = self.vllm.connector.loading, []
        for name in output.preempted_req_ids or ():
            self.note_preemption(name)
        if not output.num_scheduled_tokens:
            self.vllm.update_from_output(output, self.v.ModelRunnerOutput([], {}))
            if self.in_flight:
                self.to_load += loads
            else:
                self.start_loads(loads)
            return
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        first = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        parts = []
        for name, tokens in output.num_scheduled_tokens.items():
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            samples = not self.vllm.requests[name].is_prefill_chunk
            if name not in self.sequences:
                self.sequences[name] = Sequence(self.of[name], 0, 0, 0)
            done = (computed | first)[name]
            parts.append(Part(name, self.sequences[name], tokens, drafts, samples, done))
        self.plans.append(Plan(output, parts, first, loads))

    def note_preemption(self, name: str) -> None:
        """Note that a request has lost its place."""
        request = self.of[name]
        request.preemptions += 1
        if request.token_s:
            request.last_token_s = request.token_s[-1]
        sequence = self.sequences.pop(name, None)
        if sequence in self.decoding:
            self.decoding.remove(sequence)

    def process_events(self) -> None:
        """Let an engine that computes nothing see which KV caches have arrived or been read: it
        makes steps without tokens meanwhile."""
        output = self.vllm.schedule()
        if output.num_scheduled_tokens:
            raise RuntimeError("vLLM schedules tokens in a step that has none")
        self.vllm.update_from_output(
            output, self.v.ModelRunnerOutput([], {}, kv_connector_output=self.events())
        )

    def events(self) -> Any:
        """Return what links have done since the last output."""
        sent, received = self.sent, self.received
        self.sent, self.received = set(), set()
        if not (sent or received):
            return None
        return self.v.KVConnectorOutput(finished_sending=sent, finished_recving=received)

    def start_loads(self, names: Iterable[str]) -> None:
        """Let KV caches come."""
        for name in names:
            if name in self.of:
                self.worker.blocks_reserved(self.of[name])

    # --- a step begins ---

    def begin_step(self) -> Batch:
        """Start the planned step, and plan the one after where the engine schedules ahead; returns
        the sequences that get a token, and those that compute a part of their context."""
        if not self.plans:
            return [], []
        plan = self.executing = self.plans.popleft()
        self.start_loads(plan.loads)
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
        self.decoding = decoding
        if self.ahead:
            self.plan_one()
        return self.riding + decoding, chunked

    def note_first(self, request: Request, cached: int) -> None:
        """Note that a request runs for the first time, ``cached`` tokens of which are here."""
        request.prefill_start_s, request.cached_tokens = self.worker.env.now, cached
        n = cached // self.kv.size
        request.found[self.kv] = n
        writers = self.kv.writers
        hashes = self.vllm.requests[self.ids[request]].block_hashes if self.kv.caching else []
        request.tables[self.kv] = [
            SimpleNamespace(writer=writers.get(each, request.number)) for each in hashes[:n]
        ]
        for each in hashes[n:]:
            writers[each] = request.number

    # --- a step has ended ---

    def finish_step(self) -> list[Sequence]:
        """Give vLLM the tokens of the step that has ended; returns the sequences that it ends."""
        plan = self.executing
        if plan is None or self.worker.step_end > self.worker.env.now:
            return []
        self.executing = None
        sampled, before = [], {}
        for part in plan.parts:
            gone = part.request_id not in self.of
            got = 1 if self.only_prompts or gone else part.sequence.got
            sampled.append([0] * got if part.samples else [])
            if not gone:
                before[part.request_id] = self.vllm.requests[part.request_id].num_output_tokens
        requests_before = {name: self.vllm.requests[name] for name in before}
        names = [part.request_id for part in plan.parts]
        self.vllm.update_from_output(plan.output, self.v.ModelRunnerOutput(
            names, {name: i for i, name in enumerate(names)}, sampled,
            kv_connector_output=self.events(),
        ))  # fmt: skip
        done, drafting = [], []
        for part, tokens in zip(plan.parts, sampled, strict=True):
            if part.request_id not in requests_before or not part.samples:
                continue
            request = requests_before[part.request_id]
            if lost := len(tokens) - (request.num_output_tokens - before[part.request_id]):
                self.take_back(part.sequence, lost)
            if request.is_finished():
                done.append(part.sequence)
                self.leave(part)
            elif part.sequence.drafts:
                drafting.append(part)
        if drafting and not self.ahead:
            drafts = [[0] * part.sequence.drafts for part in drafting]
            self.vllm.update_draft_token_ids(
                self.v.DraftTokenIds([part.request_id for part in drafting], drafts)
            )
        return done

    def leave(self, part: Part) -> None:
        """Forget a request that has ended here; the blocks of one that is handed over stay."""
        if part.sequence in self.decoding:
            self.decoding.remove(part.sequence)
        held = self.vllm.connector is not None and part.request_id in self.vllm.connector.held
        if held:
            self.of.pop(part.request_id)
            self.sequences.pop(part.request_id)
        else:
            self.release(part.sequence.request)

    def take_back(self, sequence: Sequence, lost: int) -> None:
        """Take tokens back that vLLM drops: the request was preempted while they were computed."""
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
        """Start the step that vLLM plans, if it plans any."""
        for engine in self.engines:
            engine.boundary()
        self.due = False
        planned = [engine.scheduler.plan() for engine in self.engines]  # each of them
        if any(planned):
            self.step()


class _Together(_Alone, ExpertGroup):
    """Engines that share experts."""


def block_hash(key: Any) -> bytes:
    """Return what vLLM takes for the hash of a block."""
    return repr(key).encode()


def vllm_version() -> str:
    """Return the version of the vLLM that is installed."""
    return str(load_vllm().version)


def vllm_workers(inputs: RunInputs) -> Mapping[str, type[Worker]]:
    """Return the class of each pool's workers, with vLLM's scheduler.

    Raises InputError where vLLM is not installed, and for what it is not given here."""
    spec, window = inputs.spec, inputs.shards[0].sliding_window
    load_vllm()
    keys = inputs.queue_keys
    refuse(spec, keys is not None and bool(np.any(keys != keys[:1])))
    made = {}
    for pool in spec.pools:
        takes_over = pool.router in {other.then for other in spec.pools}
        about = {"config": vllm_config(spec, pool, takes_over), "window": window}
        scheduler = type("PoolScheduler", (VllmScheduler,), about)
        group = _Alone if pool.engine.group is None else _Together
        about = {"scheduler_class": scheduler, "group_class": group}
        kind = worker_class(pool, takes_over)
        made[pool.name] = type(f"Vllm{kind.__name__}", (kind,), about)
    return made
