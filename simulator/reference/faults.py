"""Workers that die, hang, slow down, drain and come back, slower links, clients that give up.

A worker that dies loses its step in progress and all that it has. Its requests, and those that
still need its KV cache, are nowhere until the routers know (``health_delay_s``); they are then sent
again or given up, as ``retry`` says. `control.fault_processes`, SimPy processes of both backends,
says when each happens; what happens then is here, as `control.actions` does it to arrays."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from eldr_sim.simulator.control.record import RunRecord
from eldr_sim.simulator.plane.state import HERE, TRY
from eldr_sim.simulator.reference.group import ExpertGroup
from eldr_sim.simulator.reference.requests import Request, Sequence
from eldr_sim.simulator.reference.worker import Worker
from eldr_sim.simulator.setup.fault_plan import FaultPlan

if TYPE_CHECKING:
    from eldr_sim.simulator.reference.reference_cluster import ReferenceCluster


class Faults:
    """What can be done to workers and requests; ``plan``: what routers do about deaths. Workers are
    named by the numbers of their engines."""

    of_sessions = False  # requests that go on with others are refused

    def __init__(self, plan: FaultPlan, cluster: ReferenceCluster) -> None:
        self.plan, self.cluster, self.env = plan, cluster, cluster.env
        self.retries: Counter[Request] = Counter()
        self.spent: Counter[Request] = Counter()  # of them, before the user sent it again
        self.first_try: dict[Request, dict[str, Any]] = {}  # how it came to the first token it has
        self.lost: dict[Request, int] = {}  # first engine of the worker that lost it
        self.dead: set[int] = set()  # first engines of dead workers,
        self.known: set[int] = set()  # and of those that the routers know to be dead
        self.troubles = np.zeros(len(cluster.workers), np.int64)  # why routers avoid an engine

    @property
    def now(self) -> float:
        """The time, s."""
        return self.env.now

    def engines(self, pool: str, worker: int) -> range:
        """Return the engines of a pool's worker."""
        spec = self.cluster.spec
        size = spec.pools[spec.names.index(pool)].engine.worker_size
        first = spec.workers_of(pool).start + worker * size
        return range(first, first + size)

    def _at(self, engines: range) -> list[Worker]:
        return self.cluster.workers[engines.start : engines.stop]

    def later(self, act: Callable[..., None], *args: Any) -> None:
        """Let something happen when the routers know of what happens now."""
        if self.plan.health_delay_s == 0.0:
            act(*args)
        else:
            self.env.at(self.now + self.plan.health_delay_s, lambda _event: act(*args))

    # --- what happens to workers ---

    def avoid(self, engines: range, more: int) -> None:
        """Let the router of a worker avoid it for one reason more, or less."""
        for w in engines:
            router = self.cluster.routers[self.cluster.pool_of[w].router]
            self.troubles[w] += more
            router.healthy[w - router.own.start] = self.troubles[w] == 0
            router.ask_again()

    def slow(self, engines: range, factor: float) -> None:
        """Multiply the time of a worker's steps."""
        for worker in self._at(engines):
            worker.slowdown = factor

    def scale(self, engines: range, share: float) -> None:
        """Let a worker's links have a share of their bandwidth."""
        for w in engines:
            self.cluster.links.scale(w, share)

    def is_empty(self, engines: range) -> bool:
        """Whether a worker has nothing to do, and no KV cache that a request needs."""
        return all(
            worker.scheduler.signals()[0] == 0 and worker.scheduler.kv.usage == 0.0
            for worker in self._at(engines)
        )

    def hang(self, engines: range, seconds: float) -> None:
        """Let a worker stand still: whatever it does ends later."""
        for worker in self._at(engines):
            self.env.postpone([worker.woken], seconds)
            worker.step_end = max(worker.step_end, self.now) + seconds
            if worker.boundary_at is not None:
                worker.boundary_at += seconds
            if worker.last is not None and worker.last[0].end > self.now:
                self._move_end(worker, worker.last[0].end + seconds)
        group = self._at(engines)[0].group
        self.env.postpone([group.ready], seconds)
        if isinstance(group, ExpertGroup) and group.last and group.last.end > self.now:
            group.last.end += seconds

    def _move_end(self, worker: Worker, end: float) -> None:
        """Let the step in progress of an engine end at another time."""
        assert worker.last is not None
        step, batch, joined = worker.last
        for sequence in batch:
            request = sequence.request
            request.token_s[-sequence.got :] = [end] * sequence.got
            if sequence in joined and request.first_token_s == step.end:
                request.first_token_s = end
            elif sequence in joined:
                at = self.cluster.gaps.index((request.last_token_s, step.end))
                self.cluster.gaps[at] = request.last_token_s, end
        step.end = end

    def remove(self, engines: range) -> None:
        """Let a worker not be there from the beginning, as routers know."""
        self.dead.add(engines[0])
        self.known.add(engines[0])
        for worker in self._at(engines):
            worker.alive = False
        self.avoid(engines, 1)

    def die(self, engines: range) -> None:
        """Let a worker lose all it has; what ends with a step at this instant has ended."""
        dying, group = self._at(engines), self._at(engines)[0].group
        if isinstance(group, ExpertGroup) and group.last and group.last.end > self.now:
            self.cluster.group_steps.remove(group.last)
        for worker in dying:
            cut = worker.last is not None and worker.last[0].end > self.now
            if cut:
                self._cut_step(worker)
            for sequence in worker.scheduler.running:
                request = sequence.request
                if request.token_s:
                    request.last_token_s = request.token_s[-1]
                if not cut and self._is_done(worker, sequence):
                    self._complete(request, worker)
            self.env.postpone([worker.woken], math.inf)
        self.env.postpone([group.ready], math.inf)
        self._lose(engines, dying)
        fresh = self.cluster.make_engines(engines[0])
        for worker, before in zip(fresh, dying, strict=True):
            worker.alive, worker.slowdown = False, before.slowdown
        self.cluster.workers[engines.start : engines.stop] = fresh
        self.dead.add(engines[0])

    def _cut_step(self, worker: Worker) -> None:
        """Discard the tokens of the step in progress."""
        assert worker.last is not None
        step, batch, joined = worker.last
        self.cluster.steps.remove(step)
        for sequence in batch:
            request = sequence.request
            request.generated -= sequence.got
            del request.token_s[-sequence.got :]
            if sequence in joined and not request.token_s:
                request.first_token_s = -1.0
            elif sequence in joined:
                self.cluster.gaps.remove((request.last_token_s, step.end))

    def _is_done(self, worker: Worker, sequence: Sequence) -> bool:
        """Whether a sequence has got its last token with the step that ends now."""
        if worker.pool.then == HERE:
            return sequence.request.generated == sequence.request.output_len
        return worker.pool.then < 0 and sequence.prompt_done

    def _complete(self, request: Request, worker: Worker) -> None:
        """End a request with the step whose last token it got."""
        request.finish_s = self.now
        if worker.pool.then != HERE:
            request.prefill_end_s = request.first_token_s = self.now
        elif request.source < 0:
            request.prefill_end_s = request.decode_start_s = request.first_token_s
        self.cluster.hear(request, worker.number)
        self._give_up(request, "completed")

    def _lose(self, engines: range, dying: list[Worker] | None = None) -> None:
        """Take out what is bound to a worker, until the routers know."""
        for request in self._bound_to(engines):
            self._take_out(request, dying or [])
            self.lost[request] = engines[0]

    def _bound_to(self, engines: range) -> list[Request]:
        """Return the requests that a worker has, or of which they need the KV cache."""
        return [
            request
            for request in self.cluster.arrived[: self.cluster.sent]
            if not request.outcome
            and request not in self.lost
            and (
                request.worker in engines
                or request.reserved in engines
                or (request.source in engines and not request.kv_here)
            )
        ]

    def hear_of_death(self, engines: range) -> None:
        """Let the routers know that a worker has died, and send its requests again."""
        self.avoid(engines, 1)
        if engines[0] in self.dead:
            self.known.add(engines[0])
            self._lose(engines)  # those that have come since
        self._send_again(engines[0])

    def hear_of_hang(self, engines: range, resend: bool) -> None:
        """Let the routers know that a worker hangs, and perhaps send on what it has not begun."""
        self.avoid(engines, 1)
        for request in self._bound_to(engines) if resend else ():
            begun = self._running(request) is not None or request.first_token_s >= 0.0
            begun |= request.source >= 0 or request.prefill_end_s >= 0.0
            if request.worker in engines and not begun and self._may_retry(request):
                self._take_out(request)
                self.lost[request] = engines[0]
        self._send_again(engines[0])

    def start(self, engines: range) -> None:
        """Let a new worker take the place of a dead one."""
        self._lose(engines)
        for worker in self._at(engines):
            worker.alive = True
        self.dead.remove(engines[0])
        if engines[0] in self.known:
            self.known.remove(engines[0])
            self._send_again(engines[0])

    # --- what happens to requests ---

    def _running(self, request: Request) -> Sequence | None:
        """Return the running sequence of a request; None: it does not run."""
        if request.worker < 0:
            return None
        running = self.cluster.workers[request.worker].scheduler.running
        return next((s for s in running if s.request is request), None)

    def _take_out(self, request: Request, dying: list[Worker] | None = None) -> None:
        """Take a request out of routers, links and engines; routers still count it."""
        self.env.postpone([request.on_the_way], math.inf)
        for router in self.cluster.routers:
            router.let_go(request)
        self.cluster.links.drop(request)
        of_kv = {worker.scheduler.kv: worker for worker in self.cluster.workers}
        holders = [of_kv[kv] for kv in request.tables if kv in of_kv]
        if request.worker >= 0 and self.cluster.workers[request.worker] not in holders:
            holders.insert(0, self.cluster.workers[request.worker])
        for worker in holders:
            if worker not in (dying or ()):
                worker.scheduler.abort(request)
                worker.wake()
        request.tables.clear()
        request.windows.clear()

    def _hear(self, request: Request) -> None:
        """Let the routers know that a request is nowhere any more."""
        for w in (request.source, request.worker, request.reserved):
            if w < 0:
                continue
            handed_over = self.cluster.pool_of[w].then >= 0 and request.prefill_end_s >= 0.0
            report = request.reports.pop(w, None)
            if report is not None or not handed_over:
                self.env.postpone([report], math.inf)
                self.cluster.hear(request, w)

    def _give_up(self, request: Request, outcome: str) -> None:
        self.cluster.in_flight -= 1
        if outcome != "completed":
            request.finish_s = self.now
        self.cluster.end(request, outcome)

    def _send_again(self, first: int) -> None:
        """Send the requests again that a worker has lost, or give them up."""
        mine = [request for request, by in self.lost.items() if by == first]
        for request in sorted(mine, key=lambda request: request.number):
            del self.lost[request]
            self._hear(request)
            if self._may_retry(request):
                self.retries[request] += 1
                self._keep_first_try(request)
                self._forget_try(request)
                self._submit(request)
            elif self.plan.user_retry_s is None:
                self._give_up(request, "worker_lost")
            else:
                self._begin_anew(request, self.now + self.plan.user_retry_s)

    def _submit(self, request: Request) -> None:
        router = self.cluster.routers[1 if self.cluster.spec.reserves_early else 0]
        router.hold(request)
        router.ask_again()

    def _may_retry(self, request: Request) -> bool:
        """Whether a request is sent again: as the rule says, and if its context fits."""
        plan, cluster = self.plan, self.cluster
        tries = self.retries[request] - self.spent[request]
        if plan.retry == "never" or tries >= plan.max_retries:
            return False
        if plan.retry == "before_first_token" and request.first_token_s >= 0.0:
            return False
        blocks = min(pool.engine.n_blocks for pool in cluster.spec.pools if pool.router == 0)
        return request.tokens <= blocks * cluster.spec.block_size

    def _keep_first_try(self, request: Request) -> None:
        """Note the workers and times of a request that has its first token, once."""
        if request.first_token_s >= 0.0 and request not in self.first_try:
            if request.source < 0:  # who stays notes them with the last token
                request.prefill_end_s = request.decode_start_s = request.first_token_s
            self.first_try[request] = {name: getattr(request, name) for name in TRY}

    def _forget_try(self, request: Request) -> None:
        """Let a request be nowhere."""
        for name in TRY:
            setattr(request, name, -1)
        request.kv_here = False

    def _begin_anew(self, request: Request, at_s: float) -> None:
        """Let the user of a request that has failed send it again, without what it has got."""
        self.first_try.pop(request, None)
        self._forget_try(request)
        request.generated, request.first_token_s, request.token_s = 0, -1.0, []

        def send(_event: object) -> None:
            if not request.outcome:
                self.retries[request] += 1
                self.spent[request] = self.retries[request]
                self._submit(request)

        self.env.at(at_s, send)

    def cancel(self, number: int) -> None:
        """Cancel a request; a running one leaves at the end of the step in progress."""
        request = self.cluster.requests[number]
        if request.outcome:
            return
        if request in self.lost:
            del self.lost[request]
        elif self.cluster.front_end is not None and request.tokenized_s < 0.0 <= request.sent_s:
            self._give_up(request, "cancelled")  # API servers compute it, and drop it then
            return
        elif request.sent_s >= 0.0:
            if (sequence := self._running(request)) is not None:
                worker = self.cluster.workers[request.worker]
                if worker.step_end > self.now:
                    self.env.at(worker.step_end, lambda _event: self.cancel(number))
                    return
                if self._is_done(worker, sequence):
                    return  # it ends now
            self._take_out(request)
        else:
            request.finish_s = self.now
            self.cluster.end(request, "cancelled")
            return
        self._hear(request)
        self._give_up(request, "cancelled")

    def first_token_s(self, number: int) -> float:
        """Return when a request got its first token, s."""
        return self.cluster.requests[number].first_token_s

    # --- the end of the run ---

    def end_unserved(self) -> bool:
        """End what no worker is left to serve; False if there is nothing that waits for one."""
        waits = [request for request in self.cluster.arrived if not request.outcome]
        if not (self.troubles > 0).any():
            return False
        for request in waits:
            self.cluster.end(request, "no_worker_left")
        return bool(waits)

    def recorded(self, record: RunRecord) -> RunRecord:
        """Return a run's record with what was done to it."""
        tries = [self.retries[self.cluster.requests[number]] for number in record.numbers]
        return replace(record, retries=np.array(tries, np.int32), faults=self.plan.faults)
