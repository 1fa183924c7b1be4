"""What can be done to the workers and requests of a run, between two events of the loop.

A worker that died has an infinite ``next_start``, and takes what routers send that do not know yet.
Its step is cut; its requests, and those on the way to or from it, are detached, and
``health_delay_s`` later sent again or given up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from eldr_sim.arrays import Bools, Int32s, Records, with_more
from eldr_sim.jit import njit
from eldr_sim.simulator.control.record import RunRecord, within
from eldr_sim.simulator.plane import choose, events, loop, network, state
from eldr_sim.simulator.plane.kv.kv_cache import forget_blocks
from eldr_sim.simulator.plane.scheduler.engine import make_workers
from eldr_sim.simulator.plane.sessions import go_on
from eldr_sim.simulator.plane.steps.executor import move_end
from eldr_sim.simulator.plane.steps.group_step import move_group_end
from eldr_sim.simulator.setup.fault_plan import FaultPlan

if TYPE_CHECKING:
    from eldr_sim.simulator.control.compiled_cluster import CompiledCluster

_OF_REQUESTS = state.DISPATCH, state.TRANSFER_START, state.PROMPT_END, state.LOADED
_OF_ENGINES = state.BOUNDARY, state.STEP_START


@njit(_nrt=False)
def _detach(world: Any, request: int) -> None:
    run = world.run
    loop.detach(run.clock, run.events, run.engines, run.routers, run.net, request)


@njit(_nrt=False)
def _go_on(world: Any, request: int) -> None:
    go_on(world.run.clock, world.run.events, world.run.engines, request)


@njit(_nrt=False)
def _submit(world: Any, request: int) -> None:
    engines = world.run.engines
    entry = 1 if engines.settings[0].reserves_early else 0  # as `loop._first_router`
    choose.submit(world.run.routers[entry], engines.requests, request)


@njit(_nrt=False)
def _move_end(world: Any, first: int, n: int, seconds: float) -> None:
    clock, engines = world.run.clock, world.run.engines
    for w in range(first, first + n):
        move_end(clock, engines, w, seconds, world.log, world.gaps)
    if n > 1:
        move_group_end(clock, first, seconds, world.group_log)


@njit(_nrt=False)
def _scale(world: Any, w: int, share: float) -> None:
    network.scale(world.run.clock, world.run.events, world.run.net, w, share)


class Actions:
    """What processes do to a run; made when it begins. ``plan``: what routers do about deaths."""

    def __init__(self, plan: FaultPlan, cluster: CompiledCluster) -> None:
        self.plan, self.cluster, self.env = plan, cluster, cluster.env
        self.clock, engines = cluster.arrays.clock, cluster.arrays.engines
        self.workers, self.pools, self.pool_of = engines.workers, engines.pools, engines.pool_of
        self.retries: Counter[int] = Counter()
        self.spent: Counter[int] = Counter()  # of them, before the user sent the request again
        self.first_try: dict[int, Any] = {}  # request -> how it came to the first token that it has
        self.lost: dict[int, int] = {}  # request -> first engine of the worker that lost it
        self.dead: set[int] = set()  # first engines of dead workers
        self.known: set[int] = set()  # of those that the routers know to be dead
        self.troubles = np.zeros(len(self.workers), np.int64)  # why routers avoid an engine
        self._blank = make_workers(self.pools, self.pool_of)
        self._still_open, self._n_seen = np.empty(0, np.int32), 0  #: of the requests sent

    def engines(self, pool: str, worker: int) -> range:
        """Return the engines of a pool's worker."""
        size = self.cluster.spec.pools[self.cluster.spec.names.index(pool)].engine.worker_size
        first = self.cluster.spec.workers_of(pool).start + worker * size
        return range(first, first + size)

    @property
    def requests(self) -> Records:
        """The requests; more of them with time."""
        return self.cluster.requests

    @property
    def now(self) -> float:
        """The loop's time, s."""
        return float(self.clock["now"][0])

    def later(self, act: Callable[..., None], *args: Any) -> None:
        """Let something happen when the routers know of what happens now."""
        if self.plan.health_delay_s == 0.0:
            act(*args)
        else:
            self.env.at(self.now + self.plan.health_delay_s, lambda _event: act(*args))

    def make_room(self) -> None:
        """Have room for the events and reports of requests that are sent again."""
        arrays, n = self.cluster.arrays, len(self.requests)
        if len(arrays.events) < int(self.clock["n_events"][0]) + 6 * n + 64:
            arrays = arrays._replace(events=with_more(arrays.events, len(arrays.events) + 64))
        # Three reports when a request is taken out, and one by each router after it is sent again.
        if len(arrays.reported) < int(self.clock["n_reported"][0]) + 5 * n:
            more = len(arrays.reported) + 5 * n
            arrays = arrays._replace(reported=with_more(arrays.reported, more))
        if arrays is not self.cluster.arrays:
            self.cluster.arrays = arrays

    # --- workers ---

    def avoid(self, engines: range, more: int) -> None:
        """Let the router of a worker avoid it for one reason more, or less."""
        router = self._router_of(engines[0])
        for w in engines:
            self.troubles[w] += more
            router.healthy[w] = self.troubles[w] == 0
        self._ask_again(router)

    def slow(self, engines: range, factor: float) -> None:
        """Multiply the time of a worker's steps."""
        for w in engines:
            self.workers[w]["slowdown"] = factor

    def scale(self, engines: range, share: float) -> None:
        """Let a worker's links have a share of their bandwidth."""
        self.make_room()
        for w in engines:
            _scale(self.cluster.world(), w, float(share))

    def is_empty(self, engines: range) -> bool:
        """Whether a worker has nothing to do, and no KV cache that a request needs."""
        workers = self.workers[engines.start : engines.stop]
        free = workers["n_blank"] + workers["n_idle"]
        full = self.pools["n_blocks"][self.pool_of[engines.start]]
        return bool((workers["n_waiting"] == 0).all() and (free == full).all())

    def hang(self, engines: range, seconds: float) -> None:
        """Let a worker stand still: whatever it does ends later."""
        events.delay(self.clock, self.cluster.arrays.events, _OF_ENGINES, engines, seconds)
        for w in engines:
            worker = self.workers[w]
            worker["wake"] += seconds if worker["wake"] >= 0.0 else 0.0
            worker["next_start"] = max(worker["next_start"], self.now) + seconds
        self._move_end(engines, seconds)

    def remove(self, engines: range) -> None:
        """Let a worker not be there from the beginning, as routers know."""
        self.dead.add(engines[0])
        self.known.add(engines[0])
        for w in engines:
            self.workers[w]["next_start"] = np.inf
        self.avoid(engines, 1)

    def die(self, engines: range) -> None:
        """Let a worker lose all it has."""
        cluster = self.cluster
        self.make_room()
        cluster.policy_calls.hear(at_once=True)
        self._move_end(engines, np.inf)
        for request in [request for w in engines for request in self._done(w)]:
            self._complete(request)
        self._lose(engines)
        for w in engines:
            self._empty(w)
        self._tell_lost_work(engines)
        self.dead.add(engines[0])

    def hear_of_death(self, engines: range) -> None:
        """Let the routers know that a worker has died, and send its requests again."""
        self.make_room()
        self.avoid(engines, 1)
        if engines[0] in self.dead:
            self.known.add(engines[0])
            self._lose_again(engines)
        self._send_again(engines[0])

    def hear_of_hang(self, engines: range, resend: bool) -> None:
        """Let the routers know that a worker hangs, and perhaps send on what it has not begun."""
        self.make_room()
        self.avoid(engines, 1)
        for request in self._bound_to(engines) if resend else ():
            record = self.requests[request]
            w, place = self._place(request)
            begun = place >= 0 or record["first_token_s"] >= 0.0 or record["source"] >= 0
            begun |= record["prefill_end_s"] >= 0.0
            if w in engines and not begun and self._may_retry(request):
                self._forget(_OF_REQUESTS, (request,))
                self._detach(request)
                self.lost[request] = engines[0]
        self._send_again(engines[0])

    def start(self, engines: range) -> None:
        """Let a new worker take the place of a dead one."""
        self.make_room()
        self._lose_again(engines)
        self._forget(_OF_ENGINES, engines)
        for w in engines:
            self.workers[w]["next_start"], self.workers[w]["wake"] = self.now, -1.0
        self.dead.remove(engines[0])
        if engines[0] in self.known:
            self.known.remove(engines[0])
            self._send_again(engines[0])

    def join_group(self, leader: int) -> None:
        """Let engines that have come to a group wait for the end of its step in progress."""
        mine = self.workers["leader"] == leader
        came = mine & np.isfinite(self.workers["next_start"])
        self.workers["next_start"][came] = self.workers["next_start"][leader]

    def _move_end(self, engines: range, seconds: float) -> None:
        _move_end(self.cluster.world(), engines[0], len(engines), float(seconds))

    def _forget(self, kinds: Collection[Any], subjects: Collection[int]) -> None:
        events.delay(self.clock, self.cluster.arrays.events, kinds, subjects, np.inf)

    def _lose(self, engines: range) -> None:
        """Detach what is bound to a worker, until the routers know."""
        bound = self._bound_to(engines)
        self._forget(_OF_REQUESTS, bound)
        for request in bound:
            self._detach(request)
            self.lost[request] = engines[0]

    def _lose_again(self, engines: range) -> None:
        """Take out the requests that have come to a worker since it died."""
        self._tell_lost_work(engines)
        self._lose(engines)

    def _bound_to(self, engines: range) -> list[int]:
        requests = self._open()
        sent = self.requests[requests]
        bound = np.isin(sent["worker"], engines)
        bound |= np.isin(sent["source"], engines) & ~sent["kv_here"]
        bound |= np.isin(sent["reserved"], engines)
        loads = self.cluster.arrays.engines.kv.tiers.loads
        if len(loads):
            pulls = loads[requests]
            bound |= pulls["pulling"] & np.isin(pulls["peer"], engines)
        return [r for r in requests[bound].tolist() if r not in self.lost]

    def _open(self) -> Int32s:
        """Return the requests that have been sent and not ended, in order.

        One that has ended stays so and is not looked at again: deaths late in a run cost what is
        in flight, not what has ever been sent."""
        sent = self.came("sent")
        self._still_open = self._not_ended(np.append(self._still_open, sent[self._n_seen :]))
        self._n_seen = len(sent)
        return self._still_open

    def _not_ended(self, requests: Int32s) -> Int32s:
        still: Bools = self.requests["outcome"][requests] == state.OPEN
        return requests[still]

    def came(self, how_far: str) -> Int32s:
        """Return the requests that have ``arrived``, or been ``sent``, in order."""
        order = self.cluster.arrays.engines.sessions.order
        return order[: int(self.clock[how_far][0])]

    def _empty(self, w: int) -> None:
        """Leave an engine as it began, but for its speed and the tokens that it has computed."""
        worker, request = self.workers[w], int(self.workers[w]["fetched_head"])
        while request >= 0:  # whose KV caches are here no more
            self.cluster.arrays.engines.tables[request, 0] = 0
            request = int(self.requests["newer"][request])
        slowdown, begun = worker["slowdown"], worker["begun_tokens"]
        self.workers[w] = self._blank[w]
        worker["slowdown"], worker["next_start"] = slowdown, np.inf
        worker["begun_tokens"] = worker["computed_tokens"] = begun
        if (
            self.cluster.policy_calls.reports is not None
        ):  # the engine notes all blocks that it loses
            self.cluster.policy_calls.reports.collect()
        forget_blocks(self.cluster.arrays.engines.kv, w)
        self._forget(_OF_ENGINES, (w,))

    def _tell_lost_work(self, engines: range) -> None:
        """Let a router that counts tokens know that a worker has none to compute."""
        reports = self.cluster.policy_calls.reports
        if reports is not None and self.pools["reports"][self.pool_of[engines[0]]]:
            reports.tell(at_once=True)
            for w in engines:
                reports.listener.on_tokens(w, 1 << 40)

    # --- requests ---

    def cancel(self, request: int) -> None:
        """Cancel a request; a running one leaves at the end of the step in progress."""
        self.make_room()
        record = self.requests[request]
        if record["outcome"] != state.OPEN:
            return
        if request in self.lost:
            del self.lost[request]
        elif self.cluster.front_end is not None and record["tokenized_s"] < 0.0 <= record["sent_s"]:
            self._give_up(request, state.CANCELLED)  # API servers compute it, and drop it then
            return
        elif record["sent_s"] >= 0.0:
            w, place = self._place(request)
            if place >= 0:
                if self.workers[w]["next_start"] > self.now:
                    at = float(self.workers[w]["next_start"])
                    self.env.at(at, lambda _event: self.cancel(request))
                    return
                if self._is_done(w, place):
                    return  # it ends now
            self._forget(_OF_REQUESTS, (request,))
            self._detach(request)
        else:
            self._end(request, state.CANCELLED)
            return
        self._hear(request)
        self._give_up(request, state.CANCELLED)

    @property
    def of_sessions(self) -> bool:
        """Whether requests go on with others."""
        return len(self.cluster.arrays.engines.sessions.waits) > 0

    def first_token_s(self, request: int) -> float:
        """Return when a request got its first token, s."""
        return float(self.requests["first_token_s"][request])

    def _detach(self, request: int) -> None:
        _detach(self.cluster.world(), request)

    def _place(self, request: int) -> tuple[int, int]:
        """Return the engine that runs a request, and its place there; -1: it does not run."""
        w = int(self.requests["worker"][request])
        if w < 0:
            return w, -1
        n = int(self.workers[w]["batch"] + self.workers[w]["prefilling"])
        mine = self.cluster.arrays.engines.sequences[w]["request"][:n] == request
        return w, int(np.flatnonzero(mine)[0]) if mine.any() else -1

    def _is_done(self, w: int, place: int) -> bool:
        """Whether a running sequence has got its last token with the step that ends now."""
        sequence = self.cluster.arrays.engines.sequences[w, place]
        then = self._then(w)
        if then == state.HERE:
            return bool(sequence["tokens_left"] == 0)
        return bool(then == state.NO_POOL and sequence["todo"] == 0)

    def _done(self, w: int) -> list[int]:
        """Return the requests that have got their last token, if an engine's step ends now."""
        if self.workers[w]["next_start"] > self.now:
            return []
        n = int(self.workers[w]["batch"] + self.workers[w]["prefilling"])
        requests = self.cluster.arrays.engines.sequences[w]["request"][:n].tolist()
        return [request for place, request in enumerate(requests) if self._is_done(w, place)]

    def _complete(self, request: int) -> None:
        """End a request with the step whose last token it got."""
        record = self.requests[request]
        record["finish_s"] = self.now
        if self._then(record["worker"]) == state.NO_POOL:
            record["prefill_end_s"] = record["first_token_s"] = record["finish_s"]
        elif record["source"] < 0:
            record["prefill_end_s"] = record["decode_start_s"] = record["first_token_s"]
        self._hear_one(request, int(record["worker"]))
        self._give_up(request, state.COMPLETED)

    def _then(self, w: int) -> int:
        """Return who goes on when a worker has computed a prompt."""
        return int(self.pools["then"][self.pool_of[w]])

    def _router_of(self, w: int) -> choose.Router:
        router: choose.Router = self.cluster.arrays.routers[
            int(self.pools["router"][self.pool_of[w]])
        ]
        return router

    def _ask_again(self, router: choose.Router) -> None:
        router.record["to_ask"] = router.record["n"]

    def _hear_one(self, request: int, w: int) -> None:
        """Let a router know now that a worker has one request less."""
        router = self._router_of(w)
        router.loads[w] -= 1
        self._ask_again(router)
        if router.record["hears_ends"][0]:
            self.cluster.arrays.reported[int(self.clock["n_reported"][0])] = request, w
            self.clock["n_reported"] += 1

    def _hear(self, request: int) -> None:
        """Let the routers know that a request is nowhere any more."""
        record = self.requests[request]
        for w in map(int, (record["source"], record["worker"], record["reserved"])):
            if w < 0:
                continue
            report = request * len(self.workers) + w  # of a prompt that it has computed
            waiting = self.cluster.arrays.events[: int(self.clock["n_events"][0])]
            reports = (waiting["kind"] == state.REPORT) & (waiting["subject"] == report)
            handed_over = self._then(w) >= 0 and record["prefill_end_s"] >= 0.0
            if not handed_over or reports.any():
                self._forget((state.REPORT,), (report,))
                self._hear_one(request, w)

    def _end(self, request: int, outcome: np.integer[Any]) -> None:
        record = self.requests[request]
        record["outcome"] = outcome
        self.clock["open_measured"] -= record["measured"]
        if outcome in (state.WORKER_LOST, state.CANCELLED):
            record["finish_s"] = self.now
        _go_on(self.cluster.world(), request)
        if record["watched"]:
            self.cluster.tell_end(request)

    def _give_up(self, request: int, outcome: np.integer[Any]) -> None:
        self.clock["in_flight"] -= 1
        self._end(request, outcome)

    def _send_again(self, first: int) -> None:
        """Send the requests again that a worker has lost, or give them up."""
        for request in sorted(r for r, by in self.lost.items() if by == first):
            del self.lost[request]
            self._hear(request)
            if self._may_retry(request):
                self.retries[request] += 1
                self._keep_first_try(request)
                self._forget_try(request)
                _submit(self.cluster.world(), request)
            elif self.plan.user_retry_s is None:
                self._give_up(request, state.WORKER_LOST)
            else:
                self._begin_anew(request, self.now + self.plan.user_retry_s)

    def _forget_try(self, request: int) -> None:
        """Let a request be nowhere."""
        record, loads = self.requests[request], self.cluster.arrays.engines.kv.tiers.loads
        if len(loads) and request not in self.first_try:
            loads["start_s"][request] = 0.0
        for name in state.TRY:
            record[name] = -1
        record["kv_here"] = False

    def _begin_anew(self, request: int, at_s: float) -> None:
        """Let the user of a request that has failed send it again, without what it has got."""
        record = self.requests[request]
        self.first_try.pop(request, None)
        self._forget_try(request)
        record["generated"], record["first_token_s"] = 0, -1.0

        def send(_event: object) -> None:
            if self.requests["outcome"][request] == state.OPEN:
                self.retries[request] += 1
                self.spent[request] = self.retries[request]
                self.make_room()
                _submit(self.cluster.world(), request)

        self.env.at(at_s, send)

    def _keep_first_try(self, request: int) -> None:
        """Note the workers and times of a request that has its first token, once."""
        record = self.requests[request]
        if record["first_token_s"] < 0.0 or request in self.first_try:
            return
        if record["source"] < 0:  # who stays notes them with the last token
            record["prefill_end_s"] = record["decode_start_s"] = record["first_token_s"]
        self.first_try[request] = tuple(record[name] for name in state.TRY)

    def _may_retry(self, request: int) -> bool:
        """Whether a request is sent again: as the rule says, and if its context fits."""
        plan, record = self.plan, self.requests[request]
        tries = self.retries[request] - self.spent[request]
        if plan.retry == "never" or tries >= plan.max_retries:
            return False
        if plan.retry == "before_first_token" and record["first_token_s"] >= 0.0:
            return False
        size = self.cluster.arrays.engines.settings[0]["block_size"]
        context = record["prompt_len"] + record["generated"]
        blocks = self.pools["n_blocks"][self.pools["router"] == 0]
        return bool(context <= blocks.min() * size)

    # --- the end of the run ---

    def end_unserved(self) -> bool:
        """End what no worker is left to serve; False if there is nothing that waits for one."""
        if not (self.troubles > 0).any():
            return False
        came = self.came("arrived")
        waits = came[self.requests["outcome"][came] == state.OPEN].tolist()
        for request in waits:
            self._end(request, state.NO_WORKER)
        return bool(waits)

    def restore(self, requests: Records) -> None:
        """Give requests the workers and times of the try that gave their first token."""
        for request, progress in self.first_try.items():
            for name, value in zip(state.TRY, progress, strict=True):
                requests[name][request] = value

    def recorded(self, record: RunRecord) -> RunRecord:
        """Return a run's record without the steps that were cut, and with how often it retried."""

        def whole(log: Records, end: str) -> Records:
            return within(log, np.isfinite(log[end]))

        return replace(
            record,
            prefill_steps=whole(record.prefill_steps, "end"),
            decode_steps=whole(record.decode_steps, "end"),
            prefill_group_steps=whole(record.prefill_group_steps, "end"),
            decode_group_steps=whole(record.decode_group_steps, "end"),
            gaps=whole(record.gaps, "resumed_s"),
            retries=np.array([self.retries[r] for r in record.numbers.tolist()], np.int32),
            faults=self.plan.faults,
        )
