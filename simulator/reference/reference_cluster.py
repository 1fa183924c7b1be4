"""The cluster: arrivals, hand-overs, KV transfers and ends; all that is outside an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from types import MappingProxyType
from typing import Any

import simpy

from eldr_sim.errors import InputError
from eldr_sim.simulator.control.arrays import link_rates
from eldr_sim.simulator.control.fault_processes import start_faults
from eldr_sim.simulator.control.record import RunRecord
from eldr_sim.simulator.control.run_inputs import RunInputs
from eldr_sim.simulator.plane.state import HERE, OF_SHARE
from eldr_sim.simulator.reference.clock import ModelClock
from eldr_sim.simulator.reference.experts import Experts
from eldr_sim.simulator.reference.faults import Faults
from eldr_sim.simulator.reference.front_end import FrontEnd
from eldr_sim.simulator.reference.group import ExpertGroup
from eldr_sim.simulator.reference.links import Links
from eldr_sim.simulator.reference.record import record_of
from eldr_sim.simulator.reference.refusals import refuse
from eldr_sim.simulator.reference.requests import Request, make_requests
from eldr_sim.simulator.reference.router import Router
from eldr_sim.simulator.reference.speculation import Speculation
from eldr_sim.simulator.reference.worker import EngineGroup, Step, Worker, worker_class
from eldr_sim.simulator.setup.fault_plan import FaultPlan

#: Something about a request that an event leaves to be done when it is over.
Todo = tuple[Callable[[Request], None], Request]


class ReferenceCluster:
    """One run over a workload, as SimPy processes: takes what the compiled `CompiledCluster` takes.

    ``workers``: the class of a pool's workers, by the pool's name, in place of `Prefiller`,
    `Decoder` or `Colocated`; ``arrivals``: whether the workload's requests come by themselves.
    Raises InputError for what is not modelled (`refusals`)."""

    elastic: Mapping[str, Any] = MappingProxyType({})  # what `control.Control` asks of a cluster
    relocations = None

    def __init__(
        self, inputs: RunInputs, workers: Mapping[str, type[Worker]] | None = None,
        arrivals: bool = True,
    ) -> None:  # fmt: skip
        chosen = workers or {}
        refuse(inputs, chosen)
        self.inputs, self.spec, self.workload = inputs, inputs.spec, inputs.workload
        self.window, self.time_limit_s = inputs.window, inputs.time_limit_s
        self.faults = inputs.faults
        self.env = ModelClock(self.settle)
        self.requests = make_requests(inputs)
        self.open_measured = sum(request.measured for request in self.requests)
        self.arrived: list[Request] = []  #: in the order in which they came,
        self.sent = 0  #: number of them that have left the client
        self.in_flight = 0
        self.todo: list[Todo] = []
        self.steps: list[Step] = []
        self.group_steps: list[Any] = []
        self.gaps: list[tuple[float, float]] = []
        self.fetched = 0
        spec = self.spec
        #: Whether prompts' blocks are kept for others, and whether prompts' experts are known.
        self.caching = spec.enable_prefix_caching
        self.own_experts, self.experts = inputs.prompts is not None, Experts(inputs)
        self.pool_of = [pool for pool in spec.pools for _ in range(pool.n)]
        self.handed_to = {pool.then for pool in spec.pools}
        self.speculations = {
            pool.name: Speculation(pool.engine) for pool in spec.pools if pool.engine.speculation
        }
        self.classes = [
            chosen.get(pool.name) or worker_class(pool, pool.router in self.handed_to)
            for pool in self.pool_of
        ]
        self.workers: list[Worker] = []
        while (first := len(self.workers)) < spec.n_workers:
            self.workers += self.make_engines(first)
        early = spec.reserves_early
        self.routers = [
            Router(self, policy, own, number in self.handed_to and not early)
            for number, (policy, own) in enumerate(zip(inputs.policies, spec.routers, strict=True))
        ]
        self.publishes = any(router.reads_signals for router in self.routers)
        self.publish_due = False
        self.links = Links(self, link_rates(spec))
        self.front_end = None
        if spec.front_end is not None:
            self.front_end = FrontEnd(self, spec.front_end, self.workload.prompt_len)
        self.on_end: Callable[[int], None] | None = None
        self.acts: Faults | None = None
        if arrivals:
            self.env.process(self.arrive())

    def make_engines(self, first: int) -> list[Worker]:
        """Return new engines that step together, of which ``first`` is the first; they have
        nothing."""
        pool = self.pool_of[first]
        numbers = range(first, first + pool.engine.group_size)
        engines = [self.classes[number](self, pool, number) for number in numbers]
        steps = EngineGroup if pool.engine.group is None else ExpertGroup
        group = (engines[0].group_class or steps)(self, engines)
        for engine in engines:
            engine.group = group
        return engines

    # --- time ---

    def run(
        self, progress: Callable[[float], None] | None = None, acts: Faults | None = None
    ) -> RunRecord:  # fmt: skip
        """Run until every measured request has ended, or the time limit; arguments as of the
        compiled cluster's ``run``."""
        total = max(1, self.open_measured)
        if acts is None and self.faults is not None:
            acts = self.make_acts(self.faults)
            start_faults(acts)
        while self.advance(self.time_limit_s, 1 << 12):
            if progress is not None:
                progress(1.0 - self.open_measured / total)
        if progress is not None:
            progress(1.0)
        end_s = self.env.now if self.open_measured == 0 else self.time_limit_s
        if end_s == math.inf:
            self.check_left(acts)
            end_s = self.env.now
        record = self.record(end_s)
        return record if acts is None else acts.recorded(record)

    def record(self, end_s: float, acts: Faults | None = None) -> RunRecord:
        """Return what has happened up to ``end_s``, s."""
        return record_of(self, end_s)

    def make_acts(self, plan: FaultPlan) -> Faults:
        """Return what processes do to the cluster."""
        self.acts = Faults(plan, self)
        return self.acts

    @property
    def next_s(self) -> float:
        """When the next thing happens, s; infinite where nothing is left."""
        return float(self.env.peek())

    def advance_to(self, until: float) -> None:
        """Let happen what happens before ``until``, s."""
        self.advance(until)

    def move(self, time_s: float) -> None:
        """Let it be as late, nothing having happened."""
        self.env.move(time_s)

    def advance(self, until: float, n_events: float = math.inf) -> bool:
        """Let happen what happens before ``until``, s, or ``n_events``; returns whether more would
        happen before."""
        self.settle()
        while self.open_measured > 0 and self.env.peek() < until:
            if n_events == 0:
                return True
            n_events -= 1
            if self.publishes and self.spec.signal_interval_s > 0.0 and self.env.next_is_models:
                self.let_publish()
            self.env.step()
        return False

    def check_left(self, acts: Faults | None) -> None:
        """End what no worker is left to serve; raise if requests are open that nothing will end."""
        if acts is not None and acts.end_unserved():
            return
        for router in self.routers:
            if n := len(router.held):
                problem = f"{router.policy.name!r} holds {n} requests, and none is in flight"
                raise InputError("policy", problem, "a policy that also places the last requests")
        raise RuntimeError(f"no event left at {self.env.now:.3f} s with requests open")

    def let_publish(self) -> None:
        """Let the engines publish their signals a while from now, as long as anything happens."""
        if not self.publish_due:
            self.publish_due = True
            self.env.call_at(self.env.now + self.spec.signal_interval_s, self.publish)

    def publish(self) -> None:
        """Let all engines publish; policies decide again on what they hold."""
        self.publish_due = False
        for router in self.routers:
            router.publish()
            router.ask_again()

    # --- from the client to a worker ---

    def arrive(self) -> Generator[simpy.Event, Any, None]:
        """Let the requests of the workload arrive, each at its time."""
        for request in self.requests:
            yield self.env.trigger(self.env.event(), request.arrival_s)
            self.arrived.append(request)

    def settle(self) -> None:
        """Send what the client may send, then do the next thing that the last event has brought."""
        while True:
            if self.front_end is None:
                self.send_all()
            if not self.todo:
                break
            act, request = self.todo.pop(0)
            act(request)
        for router in self.routers:
            router.ask_held()
        if self.front_end is not None:
            self.send_all()

    def send_all(self) -> None:
        """Send what has arrived, while ``max_concurrency`` requests or fewer are in flight."""
        limit = self.spec.max_concurrency
        while self.sent < len(self.arrived) and (limit is None or self.in_flight < limit):
            self.sent += 1
            self.send(self.arrived[self.sent - 1])

    def send(self, request: Request) -> None:
        """Let a request leave the client, unless it can never be served."""
        if request.outcome:
            return  # its client has stopped waiting
        request.sent_s = self.env.now
        if reason := self.refusal(request):
            self.end(request, reason)
            return
        self.in_flight += 1
        if self.front_end is not None:
            self.front_end.send(request)
        else:
            self.route(request)

    def refusal(self, request: Request) -> str:
        """Say why a request can never be served, whatever worker gets it; empty if it can."""
        spec, tokens, reason = self.spec, request.prompt_len + request.output_len, ""
        if tokens > spec.max_model_len:
            return "exceeds_max_model_len"
        for pool in spec.pools:
            engine, needed = pool.engine, request.prompt_len
            whole = engine.layout is not None and engine.layout.whole_prompts
            if whole and pool.then != HERE and request.prompt_len > engine.max_num_batched_tokens:
                return "exceeds_token_budget"
            if pool.then < 0:
                needed = tokens
                if pool.decodes and engine.speculation is not None:
                    needed += engine.speculation.k + engine.speculation.lookahead
                needed = min(needed, spec.max_model_len)
            blocks, in_flight = -(-needed // spec.block_size), engine.max_num_batched_tokens
            in_flight *= 1 + spec.scheduler.async_scheduling
            cap = spec.windows.cap(spec.block_size, in_flight, spec.max_model_len)
            beside = request.window_blocks + spec.windows.groups * min(blocks, cap)
            beside += engine.rules.reserve == OF_SHARE  # SGLang never fills its KV cache up
            if blocks + beside > engine.n_blocks:
                reason = "exceeds_kv_cache"
        return reason

    def route(self, request: Request) -> None:
        """Ask the router of those that compute prompts, or, where KV blocks are reserved first, of
        those that decode."""
        self.routers[1 if self.spec.reserves_early else 0].place(request)

    def dispatch_prompt(self, request: Request) -> None:
        """Choose the worker of a prompt after its KV blocks have been reserved."""
        self.routers[0].place(request)

    # --- from where its prompt is computed to where it is decoded ---

    def hand_over(self, request: Request) -> None:
        """Send a request with a computed prompt on, when the router has had its time."""
        self.report(request)
        spec = self.spec
        delay = spec.routing_s + spec.handover_s + spec.routing_token_s * request.prompt_len
        if delay == 0.0:
            self.todo.insert(0, (self.dispatch, request))
        else:
            request.on_the_way = self.env.call_at(
                self.env.now + delay, lambda: self.todo.append((self.dispatch, request))
            )

    def dispatch(self, request: Request) -> None:
        """Choose the decode worker of a request, or fetch its KV cache into the blocks reserved
        early."""
        if request.reserved >= 0:
            request.source, request.worker, request.reserved = request.worker, request.reserved, -1
            self.fetch(request)
        else:
            self.routers[self.pool_of[request.worker].then].place(request)

    def fetch(self, request: Request) -> None:
        """Fetch a KV cache: NIXL posts one descriptor a block and KV tensor, then bytes flow. What
        the prefix cache of the receiver holds is not fetched."""
        request.transfer_start_s = self.env.now
        self.fetched += 1
        request.fetched = self.fetched
        pool, shard = self.pool_of[request.worker], self.shard_of(request.worker)
        transfer, blocks = pool.transfer or self.spec.transfer, self.blocks_to_fetch(request)
        tensors, drafting = shard.n_kv_tensors, pool.engine.speculation
        if drafting is not None:
            tensors += drafting.draft.n_kv_tensors
        latency = self.spec.transfer.setup_s + blocks * tensors * transfer.descriptor_s
        request.on_the_way = self.env.call_at(self.env.now + latency, self.start_transfer, request)

    def start_transfer(self, request: Request) -> None:
        """Let the bytes flow."""
        pool, shard = self.pool_of[request.worker], self.shard_of(request.worker)
        per_token, drafting = shard.kv_bytes_per_token, pool.engine.speculation
        if drafting is not None:
            per_token += drafting.draft.kv_bytes_per_token
        n_bytes = (
            self.blocks_to_fetch(request) * self.spec.block_size * (per_token * pool.kv_weight)
            + shard.state_bytes * pool.kv_weight
        )
        self.links.begin(request, request.source, request.worker, n_bytes)

    def blocks_to_fetch(self, request: Request) -> int:
        """Return how many KV blocks of a context its decode worker lacks."""
        return -(-(request.tokens - request.decode_cached_tokens) // self.spec.block_size)

    def shard_of(self, worker: int) -> Any:
        """Return the part of the model on one GPU of a worker, which moves its part of the KV."""
        return self.inputs.shards[self.spec.names.index(self.pool_of[worker].name)]

    def transferred(self, request: Request) -> None:
        """Free the blocks at the source; the request can decode."""
        request.transfer_end_s = self.env.now
        source, target = self.workers[request.source], self.workers[request.worker]
        source.scheduler.free_source(request)
        request.kv_here = True
        target.take(request)

    # --- the end ---

    def complete(self, request: Request) -> None:
        """End a request that has all its tokens."""
        self.report(request)
        self.in_flight -= 1
        self.end(request, "completed")

    def end(self, request: Request, outcome: str) -> None:
        """Every request ends once, with a reason."""
        assert not request.outcome, f"request {request.number} ends twice"
        request.outcome = outcome
        self.open_measured -= request.measured
        if request.watched and self.on_end is not None:
            self.on_end(request.number)

    def report(self, request: Request) -> None:
        """Let the router of a request's worker hear that it is done there, late perhaps."""
        worker, delay = request.worker, self.spec.load_report_delay_s
        if delay == 0.0:
            self.hear(request, worker)
        else:
            request.reports[worker] = self.env.call_at(
                self.env.now + delay, self.hear, request, worker
            )

    def hear(self, request: Request, worker: int) -> None:
        """Let a router know that a worker has one request less."""
        request.reports.pop(worker, None)
        self.routers[self.pool_of[worker].router].hear_of_end(request, worker)
