"""An engine core: when its steps start and end (vLLM: ``vllm/v1/engine/core.py``, `EngineCore`).

An engine looks at its queues between two steps, at a *boundary*: it takes out what has ended and
plans the next step, which starts when all else of that instant has happened. If no request comes or
ends, it makes step after step. A step's tokens are known when it starts, and noted then."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import simpy

from eldr_sim.arrays import Ints, Words
from eldr_sim.kernel_profiles.steps.step_cost import step_parts, total_s
from eldr_sim.simulator.plane.state import HERE
from eldr_sim.simulator.reference.clock import STEP
from eldr_sim.simulator.reference.requests import Request, Sequence
from eldr_sim.simulator.reference.scheduler import Scheduler
from eldr_sim.simulator.reference.sglang import SglangScheduler
from eldr_sim.simulator.reference.sglang_prefill import SglangPrefill
from eldr_sim.simulator.setup.cluster_spec import PoolSpec

if TYPE_CHECKING:
    from eldr_sim.simulator.reference.reference_cluster import ReferenceCluster

#: Sequences that decode, and that compute a part of their context.
Batch = tuple[list[Sequence], list[Sequence]]


@dataclass(eq=False)
class Step:
    """A step of an engine: the columns of ``state.STEP``."""

    start: float
    end: float
    worker: int
    context: int
    sequences: int
    tokens: int
    outputs: int
    joined: int
    active: int
    busiest: int
    chunks: int
    chunk_tokens: int
    plain: int = 0
    draft_s: float = 0.0
    stopped: int = -1  #: the reference does not note why requests wait


class Worker:
    """One engine, the worker ``number`` of a cluster. Its processes begin with it."""

    scheduler_class: type[Scheduler] | None = None  #: None: that of its engine
    group_class: type[EngineGroup] | None = None  #: None: `EngineGroup`, or that of shared experts
    follows: str = ""  #: the engine whose own code it runs

    def __init__(self, cluster: ReferenceCluster, pool: PoolSpec, number: int) -> None:
        self.cluster, self.pool, self.number, self.env = cluster, pool, number, cluster.env
        self.cost, layout = pool.engine.step_time.cost, pool.engine.layout
        self.capture_s = 0.0 if pool.decodes else cluster.spec.capture_s  # of signatures
        self.whole_prompts = layout is not None and layout.whole_prompts
        self.speculation = cluster.speculations.get(pool.name)
        its = self.scheduler_class or scheduler_class(pool)
        self.scheduler = its(self, only_prompts=not pool.decodes)
        self.group: EngineGroup  #: the engines that step with it
        self.alive, self.slowdown = True, 1.0
        self.step_end = -math.inf  #: of the step in progress, or the last one
        self.exit_s = -math.inf  #: when its last step has left the last stage
        self.last: tuple[Step, list[Sequence], list[Sequence]] | None = None
        self.boundary_at: float | None = None
        self.woken = self.env.event()
        self.process = self.env.process(self.run())

    def run(self) -> Generator[simpy.Event, Any, None]:
        """Look at the queues whenever there is something new to see."""
        while True:
            yield self.woken
            self.woken = self.env.event()
            self.boundary()

    def wake(self) -> None:
        """Look at the queues at the end of the step in progress, or now if there is none."""
        at = max(self.env.now, self.step_end)
        if self.alive and at != self.boundary_at:
            self.boundary_at = at
            self.env.trigger(self.woken, at)

    def take(self, request: Request) -> None:
        """Take a request that a router sends, or one with a KV cache that has arrived."""
        self.scheduler.add_request(request)
        self.wake()

    def fetches(self, request: Request) -> bool:
        """Whether a request that is new here takes over a KV cache that another computes."""
        return request.source >= 0 or (self.pool.decodes and self.cluster.spec.reserves_early)

    def blocks_reserved(self, request: Request) -> None:
        """Let the KV cache come of a request that has blocks for it (a KV connector's pull)."""
        if request.source >= 0:
            self.cluster.fetch(request)
        else:  # its prompt is computed now that there is room for it (SGLang)
            request.reserved, request.worker = self.number, -1
            self.cluster.todo.append((self.cluster.dispatch_prompt, request))

    # --- between two steps ---

    def boundary(self) -> None:
        """End what has ended, and plan the next step."""
        scheduler = self.scheduler
        self.boundary_at = None
        for sequence in scheduler.finish_step():
            self.end(sequence.request)
        scheduler.schedule(self.group.balances() or self.defers_prompts())
        if scheduler.has_step():
            self.group.start_later(self.step_end)
        if scheduler.process_output():
            self.wake()  # nothing is scheduled after all

    def defers_prompts(self) -> bool:
        """Whether it leaves prompts alone in this step of its group, which decodes meanwhile
        (vLLM: ``prefill_schedule_interval`` of data-parallel engines)."""
        interval = self.cluster.spec.scheduler.prefill_schedule_interval
        together = self.pool.engine.group is not None
        if not together or not (self.scheduler.decoding or self.scheduler.riding):
            return False
        return self.group.n_steps % interval != 0

    def end(self, request: Request) -> None:
        """Let a request leave with the step that has just ended."""
        request.finish_s = self.env.now
        if request.source < 0:  # it has computed its prompt here
            request.prefill_end_s = request.decode_start_s = request.first_token_s
        self.cluster.todo.append((self.cluster.complete, request))

    # --- a step ---

    def step(self) -> None:
        """Run the step that is planned, by itself, from now on."""
        batch, chunked = self.scheduler.begin_step()
        tokens = sum(s.tokens for s in batch)
        active, by_layer = 0, np.zeros(1, np.int64)
        if tokens or self.cluster.own_experts:
            active, by_layer = self.activated(np.concatenate(self.experts(batch, chunked)))
        seconds = self.seconds(batch, chunked, by_layer) + self.capture_s
        plain, draft_s = 0, 0.0
        if self.speculation is not None:
            plain, later = 0, np.zeros(1, np.int64)
            if batch:
                firsts = [self.decoded(s)[:1] for s in batch]
                n, of_first = self.activated(np.concatenate(firsts))
                plain, later = (n if tokens > len(batch) else 0), of_first[-1:]
            context, uniform = sum(s.context for s in batch), not self.cluster.own_experts
            draft_s = self.speculation.seconds(
                len(batch), tokens, context, chunk_columns(chunked), uniform, by_layer[-1:], later
            )
        end = self.env.now + (seconds + draft_s) * self.slowdown
        step = self.move(batch, chunked, end, active, int(by_layer.sum()))
        step.plain, step.draft_s = plain, draft_s

    def seconds(self, batch: list[Sequence], chunked: list[Sequence], activated: Ints) -> float:
        """Return what a step takes: `kernel_profiles.steps.step_cost`. ``activated``: experts of
        each MoE layer on its busiest rank."""
        tokens, context = sum(s.tokens for s in batch), sum(s.context for s in batch)
        rows = self.lm_head_rows(batch, chunked)
        sequences, read = self.attended(len(batch), tokens, context)
        return float(total_s(step_parts(
            self.cost, sequences, tokens, read, *chunk_columns(chunked), rows, activated,
            not self.cluster.own_experts,
        )))  # fmt: skip

    def lm_head_rows(self, batch: list[Sequence], chunked: list[Sequence]) -> int:
        """Return the rows of lm_head: of each decoded token, and each context that goes on."""
        return sum(s.tokens for s in batch) + sum(s not in batch for s in chunked)

    def attended(self, sequences: int, tokens: int, context: int) -> tuple[int, int]:
        """Return the sequences that attention is priced for, and the tokens that these read."""
        if self.speculation is not None:
            return self.speculation.attended(sequences, tokens, context)
        return sequences, context + tokens

    def decoded(self, sequence: Sequence) -> Words:
        """Return the experts of the tokens that a step decodes for a sequence."""
        request = sequence.request
        return self.cluster.experts.decoded(request, request.generated, sequence.tokens)

    def experts(self, batch: list[Sequence], chunked: list[Sequence]) -> list[Words]:
        """Return the experts of each token of a step; of prompts only where they are known."""
        decoded_rows = [self.decoded(sequence) for sequence in batch]
        if self.cluster.own_experts:
            decoded_rows += [
                self.cluster.experts.context(s.request, s.cached, s.cached + s.chunk)
                for s in chunked
            ]
        return decoded_rows

    def activated(self, tokens: Words) -> tuple[int, Ints]:
        """Return activated experts: of all layers, and by layer those of the busiest rank."""
        return self.cluster.experts.activated(tokens, self.number)

    def move(
        self, batch: list[Sequence], chunked: list[Sequence], end: float, active: int, busiest: int
    ) -> Step:
        """Note what a step yields, and when it is to be looked at. Discards the tokens of those
        that ride along."""
        scheduler, n = self.scheduler, len(batch)
        tokens = sum(s.tokens for s in batch)
        batch, scheduler.riding = batch[len(scheduler.riding) :], []
        joined, scheduler.joined = scheduler.joined, []
        for sequence in scheduler.running:
            sequence.flying = sequence.chunk * scheduler.frees_late
        for sequence in batch:
            sequence.got, sequence.decodes = 1, True
            if self.speculation is not None:
                sequence.got = self.speculation.outputs(sequence)
            sequence.rejected = sequence.tokens - sequence.got if scheduler.frees_late else 0
        outputs = sum(s.got for s in batch)
        step = Step(
            self.env.now, end, self.number, sum(s.context for s in batch) + outputs, len(batch),
            tokens, outputs, len(joined), active, busiest, len(chunked),
            sum(s.chunk for s in chunked),
        )  # fmt: skip
        self.cluster.steps.append(step)
        self.last = step, batch, joined
        for sequence in chunked:
            sequence.cached += sequence.chunk
            sequence.chunk = 0
        for sequence in scheduler.prefilling:  # the outputs of those that sat it out are known now
            sequence.got = sequence.rejected = 0
        for sequence in batch:
            request = sequence.request
            if sequence.rested:
                self.cluster.gaps.append((request.last_token_s, end))
                sequence.rested = False
            sequence.cached = sequence.context = sequence.context + sequence.got
            sequence.flying += sequence.got * scheduler.frees_late
            request.generated += sequence.got
            request.token_s += [end] * sequence.got
            if self.speculation is not None:
                sequence.drafts = self.speculation.proposed(request, n)
            sequence.tokens = 1 + sequence.drafts
        for sequence in joined:
            request = sequence.request
            if request.first_token_s < 0:
                request.first_token_s = end
            else:
                self.cluster.gaps.append((request.last_token_s, end))
        self.step_end = end
        ended = any(s.request.generated == s.request.output_len for s in batch)
        looks = scheduler.closed or scheduler.blocked or self.group.gathers_prompts
        looks = looks or scheduler.kv.groups > 0  # windows move with each step
        if self.speculation is not None:  # a step of fewer drafts may have room
            queued = scheduler.waiting or scheduler.kv_ready or scheduler.preempted
            looks = looks or bool(queued or scheduler.prefilling)
        if ended or chunked or looks or n > len(batch):
            self.wake()
        else:
            self.group.start_later(end)
        scheduler.closed = scheduler.blocked = False
        return step

    def take_back(self, sequence: Sequence) -> None:
        """Take back the token that a sequence has got with the last step."""
        assert self.last is not None
        step, _, joined = self.last
        request, gap = sequence.request, (sequence.request.last_token_s, self.last[0].end)
        step.outputs -= 1
        step.sequences -= 1
        step.joined -= sequence in joined
        request.generated -= 1
        request.token_s.pop()
        if not request.token_s:
            request.first_token_s = -1.0
        elif gap in self.cluster.gaps:  # it had no token for longer
            self.cluster.gaps.remove(gap)
        else:
            request.last_token_s = request.token_s[-1]


class Prefiller(Worker):
    """Computes prompts and hands them over, or ends with them (``max_tokens=1`` and a KV connector
    as ``kv_producer``)."""

    def end(self, request: Request) -> None:
        """Let the prompt leave, when the last of several stages has it: until then it keeps its
        place in the batch."""
        if self.exit_s > self.env.now:
            self.scheduler.leaving.append(request)
            self.env.call_at(self.exit_s, self.leave_stages, request)
        else:
            self.end_prompt(request)

    def leave_stages(self, request: Request) -> None:
        """Let a prompt leave the last stage."""
        self.scheduler.leaving.remove(request)
        self.end_prompt(request)
        if self.scheduler.waits_for_blocks:
            self.wake()

    def end_prompt(self, request: Request) -> None:
        """Hand over a request; its blocks stay until they have been fetched, or end it."""
        request.prefill_end_s = self.env.now
        if self.pool.then >= 0:
            self.cluster.todo.append((self.cluster.hand_over, request))
            return
        request.first_token_s = request.finish_s = self.env.now
        if request not in [sequence.request for sequence in self.scheduler.ended]:
            self.scheduler.kv.release(request)
        self.cluster.todo.append((self.cluster.complete, request))


class Decoder(Worker):
    """Reserves KV blocks for a prompt that another worker has computed, fetches its KV cache into
    them, and decodes (a KV connector as ``kv_consumer``)."""


class Colocated(Worker):
    """Computes prompts and decodes, in the same steps."""


class EngineGroup:
    """Engines that step together; one alone is a group by itself."""

    gathers_prompts = False  #: engines without prompts may let those of the others wait

    def __init__(self, cluster: ReferenceCluster, engines: list[Any]) -> None:
        self.cluster, self.env, self.engines = cluster, cluster.env, engines
        self.n_steps, self.due = 0, False
        self.ready = self.env.event()
        self.process = self.env.process(self.run())

    def run(self) -> Generator[simpy.Event, Any, None]:
        """Start steps when they are due."""
        while True:
            yield self.ready
            self.ready = self.env.event()
            self.start()

    def start_later(self, step_end: float) -> None:
        """Start the next step when that in progress has ended, behind all else of its instant."""
        if not self.due:
            self.due = True
            first = self.engines[0].number
            self.env.trigger(self.ready, max(self.env.now, step_end), STEP + first)

    def start(self) -> None:
        """Start the step that the engines have planned."""
        for engine in self.engines:
            while not engine.scheduler.fits(0):  # who has joined holds more than was reserved
                engine.boundary()
        self.due = False
        if any(engine.scheduler.has_step() for engine in self.engines):
            self.step()

    def step(self) -> None:
        """Run a step, which starts now."""
        self.engines[0].step()

    def balances(self) -> bool:
        """Whether prompts wait for engines of the group that have none."""
        return False


def chunk_columns(chunked: list[Sequence]) -> tuple[Ints, Ints]:
    """Return the cached and the new tokens of the chunks of a step."""
    return (
        np.array([s.cached for s in chunked], np.int64),
        np.array([s.chunk for s in chunked], np.int64),
    )


def worker_class(pool: PoolSpec, takes_over: bool) -> type[Worker]:
    """Return what a pool's workers are."""
    if pool.then != HERE:
        return Prefiller
    return Decoder if takes_over else Colocated


def scheduler_class(pool: PoolSpec) -> type[Scheduler]:
    """Return the scheduler of a pool's engines."""
    if not pool.engine.rules.fills_up:
        return Scheduler
    return SglangScheduler if pool.then == HERE else SglangPrefill
