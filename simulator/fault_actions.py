"""Lets a `faults.FaultPlan` happen, between two calls of the compiled loop.

What happens at a fault's time happens after the fault, so no worker has planned a step that has not
begun. A worker that died has no next step (``next_start`` is infinite): it takes what routers send
that do not know yet, and does nothing. Its step in progress is cut: nobody gets its tokens.

What is bound to a dead worker is taken out of all that it waits in: requests that wait or run
there, those on the way to it, and those whose KV cache it still has. The routers hear of them with
the worker's death, ``health_delay_s`` later, and then send them again or give them up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.jit import njit
from eldr_sim.simulator import network, state
from eldr_sim.simulator.clock import Clock
from eldr_sim.simulator.faults import Fault, FaultPlan
from eldr_sim.simulator.removal import Removal

if TYPE_CHECKING:
    from eldr_sim.simulator.cluster import Cluster, RunRecord

#: Fields of a request that say how far it has come.
_PROGRESS = (
    "prefill_worker", "decode_worker", "prefill_start_s", "prefill_end_s", "transfer_start_s",
    "transfer_end_s", "decode_start_s", "cached_tokens", "decode_cached_tokens",
)  # fmt: skip
_QUEUES = ("new_head", "oldest", "newest", "arrived_head", "preempted_head", "late_head")
_NOTHING = (
    "batch", "prefilling", "joined", "filled", "chunk_tokens", "context", "n_idle", "n_made",
    "n_waiting", "waiting_tokens", "n_queued", "n_group_steps", "exit_s", "ended", "one_step",
    "blocked", "step_due",
)  # fmt: skip


@njit(_nrt=False)
def _scale_link(
    clock: Any, events: Any, net: Any, link: int, share: float, out_rate: float, in_rate: float
) -> None:  # fmt: skip
    network.scale(clock, events, net, link, share, out_rate, in_rate)


class FaultActions:
    """What a run's faults do; made when it begins.

    Parameters
    ----------
    plan, cluster
        What goes wrong, and where.
    env
        The clock on which it happens.
    """

    def __init__(self, plan: FaultPlan, cluster: Cluster, env: Clock) -> None:
        self.plan, self.cluster, self.env = plan, cluster, env
        engines = cluster.arrays.engines
        self.workers, self.pools = engines.workers, engines.pools
        self.clock, self.removal = cluster.arrays.clock, Removal(cluster)
        self.retries: Counter[int] = Counter()
        self.first_try: dict[int, Any] = {}  # request -> how it came to the first token that it has
        self.lost: dict[int, int] = {}  # request -> first engine of the worker that lost it
        self.dead: set[int] = set()  # first engines of dead workers
        self.known: set[int] = set()  # of those that the routers know to be dead
        self.troubles = np.zeros(len(self.workers), np.int64)  # why routers avoid an engine
        for fault in plan.faults:
            getattr(self, f"_plan_{fault.kind}")(fault)
        if plan.cancel_s is not None:
            for request in np.flatnonzero(np.isfinite(plan.cancel_s)).tolist():
                self.at(float(plan.cancel_s[request]), self._cancel, request)

    @property
    def requests(self) -> NDArray[np.void]:
        """The requests; more of them with time."""
        return self.cluster.requests

    def at(self, time_s: float, act: Callable[..., None], *args: Any) -> None:
        """Let something happen before all else of its instant."""
        if not np.isfinite(time_s):
            return

        def happen(_event: Any) -> None:
            self.clock["now"] = self.env.now
            self._make_room()
            act(*args)

        self.env.at(time_s, happen)

    def _make_room(self) -> None:
        """Have room for the events that requests schedule which are sent again."""
        arrays, n = self.cluster.arrays, len(self.requests)
        if len(arrays.events) < int(self.clock["n_events"][0]) + 6 * n + 64:
            events = np.zeros(2 * len(arrays.events) + 64, state.EVENT)
            events[: len(arrays.events)] = arrays.events
            self.cluster.arrays = arrays = arrays._replace(events=events)
        if len(arrays.reported) < int(self.clock["n_reported"][0]) + 2 * n:
            reported = np.zeros((2 * len(arrays.reported) + n, 2), np.int32)
            reported[: len(arrays.reported)] = arrays.reported
            self.cluster.arrays = arrays._replace(reported=reported)

    # --- what is planned ---

    def _engines(self, fault: Fault) -> range:
        pool = self.pools[fault.pool]
        first = int(pool["first_worker"] + fault.worker * pool["group_size"])
        return range(first, first + int(pool["group_size"]))

    def _plan_fail(self, fault: Fault) -> None:
        engines, delay = self._engines(fault), self.plan.health_delay_s
        self.at(fault.at_s, self.die, engines)
        self.at(fault.at_s + delay, self.hear_of_death, engines)
        self.at(fault.end_s, self.come_back, engines)
        self.at(fault.end_s + delay, self.avoid, engines, -1)

    def remove(self, engines: range) -> None:
        """Let a worker not be there from the beginning, as routers know."""
        self.dead.add(engines[0])
        self.known.add(engines[0])
        for w in engines:
            self.workers[w]["next_start"] = np.inf
        self.avoid(engines, 1)

    def later(self, act: Callable[..., None], *args: Any) -> None:
        """Let something happen when the routers know of what happens now."""
        if self.plan.health_delay_s == 0.0:
            act(*args)
        else:
            self.at(float(self.clock["now"][0]) + self.plan.health_delay_s, act, *args)

    def _plan_join(self, fault: Fault) -> None:
        engines = self._engines(fault)
        self.remove(engines)
        self.at(fault.end_s, self.come_back, engines)
        self.at(fault.end_s + self.plan.health_delay_s, self.avoid, engines, -1)

    def _plan_hang(self, fault: Fault) -> None:
        engines, delay = self._engines(fault), self.plan.health_delay_s
        self.at(fault.at_s, self._hang, engines, fault.for_s)
        if delay < fault.for_s:  # else it is over before anybody has noticed
            self.at(fault.at_s + delay, self.avoid, engines, 1)
            self.at(fault.end_s + delay, self.avoid, engines, -1)

    def _plan_drain(self, fault: Fault) -> None:
        engines = self._engines(fault)
        self.at(fault.at_s, self.avoid, engines, 1)
        self.at(fault.end_s, self.avoid, engines, -1)

    def _plan_slow(self, fault: Fault) -> None:
        engines = self._engines(fault)
        self.at(fault.at_s, self._slow, engines, fault.factor)
        self.at(fault.end_s, self._slow, engines, 1.0)

    def _plan_link(self, fault: Fault) -> None:
        engines = self._engines(fault)
        self.at(fault.at_s, self.scale, engines, fault.factor)
        self.at(fault.end_s, self.scale, engines, 1.0)

    # --- what happens ---

    def avoid(self, engines: range, more: int) -> None:
        """Let the router of a worker avoid it, or no longer."""
        pool = int(self.cluster.arrays.engines.pool_of[engines[0]])
        router = self.cluster.routers[pool].arrays
        for w in engines:
            self.troubles[w] += more
            router.healthy[w - self.pools[pool]["first_worker"]] = self.troubles[w] == 0
        self._ask_again(pool)

    def _slow(self, engines: range, factor: float) -> None:
        for w in engines:
            self.workers[w]["slowdown"] = factor

    def scale(self, engines: range, share: float) -> None:
        """Let a worker's link have a share of its bandwidth."""
        arrays, settings = self.cluster.arrays, self.cluster.arrays.engines.settings[0]
        n_prefill, n_decode = self.pools["n_workers"].tolist()
        for w in engines:
            link = w + n_decode if w < n_prefill else w - n_prefill
            _scale_link(
                self.clock, arrays.events, arrays.net, link, share, settings["egress"],
                settings["ingress"],
            )  # fmt: skip

    def _hang(self, engines: range, seconds: float) -> None:
        """Let a worker stand still: whatever it does ends later."""
        now, arrays = float(self.clock["now"][0]), self.cluster.arrays
        events = arrays.events[: int(self.clock["n_events"][0])]
        mine = np.isin(events["kind"], (state.BOUNDARY, state.STEP_START))
        mine &= np.isin(events["subject"], engines)
        events["time"][mine] += seconds
        events.sort(order=("time", "order"))  # sorted events are a heap
        for w in engines:
            worker = self.workers[w]
            worker["wake"] += seconds if worker["wake"] >= 0.0 else 0.0
            worker["next_start"] = max(worker["next_start"], now) + seconds
            last = self._steps_of(w)[-1:]
            if not last or last[0]["end"] <= now:
                continue
            end = last[0]["end"] + seconds
            for request, joined in self._running(w):
                if joined and request["first_token_s"] == last[0]["end"]:
                    request["first_token_s"] = end
                elif joined:
                    self._gap(request, last[0]["end"], end)
            last[0]["end"] = end
        pool = int(arrays.engines.pool_of[engines[0]])
        self._move_group_step(pool, engines, now, seconds)

    def die(self, engines: range) -> None:
        """Let a worker lose all it has."""
        cluster, arrays = self.cluster, self.cluster.arrays
        pool = int(arrays.engines.pool_of[engines[0]])
        if cluster.prefill_reports is not None:
            cluster.prefill_reports.tell(at_once=True)
        done: list[int] = []
        for w in engines:
            done += self._cut_step(w, pool)
        self._move_group_step(pool, engines, float(self.clock["now"][0]), np.inf)
        for request in done:
            self._complete(request, pool)
        bound = self._bound_to(engines, pool)
        self.removal.forget_events(bound, engines)
        dead = set(engines)
        for request in bound:
            self.removal.take_out(request, dead)
            self.lost[request] = engines[0]
        for w in engines:
            self._empty(w)
        self._tell_lost_work(engines, pool)
        self.dead.add(engines[0])

    def hear_of_death(self, engines: range) -> None:
        """Let the routers know that a worker has died, and send its requests again."""
        self.avoid(engines, 1)
        if engines[0] in self.dead:
            self.known.add(engines[0])
            self._lose_again(engines)
        self._send_again(engines[0])

    def come_back(self, engines: range) -> None:
        """Let a new worker take the place of a dead one."""
        self._lose_again(engines)
        self.removal.forget_events([], engines)
        for w in engines:
            self.workers[w]["next_start"], self.workers[w]["wake"] = self.clock["now"][0], -1.0
        self.dead.remove(engines[0])
        if engines[0] in self.known:
            self.known.remove(engines[0])
            self._send_again(engines[0])

    def _lose_again(self, engines: range) -> None:
        """Take out the requests that have come to a worker since it died."""
        pool = int(self.cluster.arrays.engines.pool_of[engines[0]])
        bound = self._bound_to(engines, pool)
        self._tell_lost_work(engines, pool)
        self.removal.forget_events(bound, range(0))
        for request in bound:
            self.removal.take_out(request, set())
            self.lost[request] = engines[0]

    def _cancel(self, request: int) -> None:
        """Let a client give up; who runs leaves at the end of the step in progress."""
        record = self.requests[request]
        if record["outcome"] != state.OPEN:
            return
        if request in self.lost:
            del self.lost[request]
        elif request < int(self.clock["sent"][0]):
            w = self.removal.engine_of(record)
            place = -1 if w is None else self.removal.place(w, request)
            if w is not None and place >= 0:
                if self.workers[w]["next_start"] > self.clock["now"][0]:
                    self.at(float(self.workers[w]["next_start"]), self._cancel, request)
                    return
                if self._is_done(w, place):
                    return  # it ends now
            self.removal.forget_events([request], range(0))
            self.removal.take_out(request, set())
        else:
            self._end(request, state.CANCELLED)
            return
        self._hear(request)
        self._give_up(request, state.CANCELLED)

    # --- a worker dies ---

    def _steps_of(self, w: int) -> list[Any]:
        """Return the last two steps of an engine, the last one behind; as records to change."""
        pool = int(self.cluster.arrays.engines.pool_of[w])
        log = self.cluster.logs[pool][: int(self.pools[pool]["n_steps"])]
        own = np.flatnonzero(log["worker"] == w - self.pools[pool]["first_worker"])
        return [log[i] for i in own[np.isfinite(log["end"][own])][-2:].tolist()]

    def _running(self, w: int) -> list[tuple[Any, bool]]:
        """Return the requests that got a token in an engine's last step, and which had joined."""
        last = self._steps_of(w)[-1:]
        if not last:
            return []
        sequences, batch = self.cluster.arrays.engines.sequences[w], int(self.workers[w]["batch"])
        joined = batch - int(last[0]["joined"])
        return [(self.requests[sequences[i]["request"]], i >= joined) for i in range(batch)]

    def _gap(self, request: Any, resumed_s: float, other_s: float) -> None:
        """Move the end of the gap that a request's last step closed."""
        gaps = self.cluster.gaps[: int(self.clock["n_gaps"][0])]
        same = (gaps["last_token_s"] == request["last_token_s"]) & (gaps["resumed_s"] == resumed_s)
        gaps["resumed_s"][np.flatnonzero(same)[-1:]] = other_s

    def _move_group_step(self, pool: int, engines: range, now: float, seconds: float) -> None:
        """Let the step in progress of engines that share experts end later; never, if infinite."""
        if len(engines) == 1:
            return
        log = self.cluster.group_logs[pool][: int(self.pools[pool]["n_group_steps"])]
        number = (engines[0] - int(self.pools[pool]["first_worker"])) // len(engines)
        last = np.flatnonzero(log["group"] == number)[-1:]
        if len(last) and log["end"][last[0]] > now:
            log["end"][last[0]] += seconds

    def _cut_step(self, w: int, pool: int) -> list[int]:
        """Take back what the step in progress of an engine has not brought; who has all tokens.

        Notes what each sequence has generated.
        """
        now, worker = float(self.clock["now"][0]), self.workers[w]
        sequences, batch = self.cluster.arrays.engines.sequences[w], int(worker["batch"])
        steps = self._steps_of(w)
        if not steps:
            return []
        end = float(steps[-1]["end"])
        if end > now:
            for i, (request, joined) in enumerate(self._running(w)):
                sequences[i]["tokens_left"] += 1
                if not joined:
                    request["last_token_s"] = steps[-2]["end"]
                elif request["first_token_s"] == end:
                    request["first_token_s"] = -1.0
                else:
                    self._gap(request, end, np.inf)
            steps[-1]["end"] = np.inf
        else:
            for i in range(batch):
                self.requests["last_token_s"][sequences[i]["request"]] = end
        done = []
        for i in range(batch + int(worker["prefilling"])):
            request = int(sequences[i]["request"])
            if end <= now and self._is_done(w, i):
                done.append(request)
            elif self.pools[pool]["role"] in (state.DECODE, state.COLOCATED):
                left = int(sequences[i]["tokens_left"])
                self.requests[request]["generated"] = self.requests[request]["output_len"] - left
        return done

    def _is_done(self, w: int, place: int) -> bool:
        """Whether a running sequence has got its last token with the step that ends now."""
        engines = self.cluster.arrays.engines
        sequence, role = engines.sequences[w, place], self.pools[engines.pool_of[w]]["role"]
        if role in (state.DECODE, state.COLOCATED):
            return bool(sequence["tokens_left"] == 0)
        return bool(role == state.PREFILL_ONLY and sequence["todo"] == 0)

    def _complete(self, request: int, pool: int) -> None:
        """End a request with the step whose last token it got."""
        record = self.requests[request]
        record["finish_s"] = self.clock["now"][0]
        role = self.pools[pool]["role"]
        if role == state.COLOCATED:
            record["prefill_end_s"] = record["decode_start_s"] = record["first_token_s"]
        if role == state.PREFILL_ONLY:
            record["prefill_end_s"] = record["first_token_s"] = record["finish_s"]
        self._hear_one(request, pool)
        self.clock["in_flight"] -= 1
        self._end(request, state.COMPLETED)

    def _bound_to(self, engines: range, pool: int) -> list[int]:
        """Return the requests that a worker's death would take along."""
        sent = self.requests[: int(self.clock["sent"][0])]
        worker = sent["decode_worker"] if pool else sent["prefill_worker"]
        first = int(self.pools[pool]["first_worker"])
        bound = (sent["outcome"] == state.OPEN) & np.isin(worker + first, engines) & (worker >= 0)
        if pool == 0:
            bound &= ~sent["kv_here"]
        return [r for r in np.flatnonzero(bound).tolist() if r not in self.lost]

    def _empty(self, w: int) -> None:
        """Leave an engine without requests, KV cache and next step."""
        cluster, worker = self.cluster, self.workers[w]
        kv, pool = cluster.arrays.engines.kv, cluster.arrays.engines.pool_of[w]
        if w < len(kv.hash_slots):
            if w < kv.listened:
                self._tell_lost_blocks(w)
            kv.hash_slots[w] = 0
        for name in _NOTHING:
            worker[name] = 0
        for name in (*_QUEUES, "spare", "idle_head", "idle_tail"):
            worker[name] = -1
        worker["n_blank"] = self.pools[pool]["n_blocks"]
        worker["computed_tokens"] = worker["begun_tokens"]
        worker["wake"], worker["next_start"] = -1.0, np.inf

    def _tell_lost_work(self, engines: range, pool: int) -> None:
        """Let a prefill router that counts tokens know that a worker has none to compute."""
        reports = self.cluster.prefill_reports
        if pool == 0 and reports is not None:
            reports.tell(at_once=True)
            for w in engines:
                reports.listener.on_tokens(w, 1 << 40)

    def _tell_lost_blocks(self, w: int) -> None:
        """Note for the prefill router that an engine's KV blocks are gone."""
        kv = self.cluster.arrays.engines.kv
        for slot in kv.hash_slots[w, np.flatnonzero(kv.hash_slots[w])].tolist():
            block = kv.blocks[w, slot - 1]
            end = ((int(block["block_hash"]) & 0xFFFFFFFF) + 1) * kv.block_size
            if end % kv.prefix_block_tokens == 0:
                at = int(kv.prefix_indptr[block["writer"]]) + end // kv.prefix_block_tokens - 1
                kv.events[int(kv.n_events[0])] = w, at, 0
                kv.n_events[0] += 1

    # --- a request goes on ---

    def _ask_again(self, pool: int) -> None:
        held = self.cluster.routers[pool].arrays.held[0]
        held["to_ask"] = held["n"]

    def _hear_one(self, request: int, pool: int) -> None:
        """Let a router know now that a worker has one request less."""
        record, arrays = self.requests[request], self.cluster.arrays
        worker = record["decode_worker"] if pool else record["prefill_worker"]
        arrays.routers[pool].loads[worker] -= 1
        self._ask_again(pool)
        if pool and arrays.engines.settings[0]["listens"]:
            arrays.reported[int(self.clock["n_reported"][0])] = request, worker
            self.clock["n_reported"] += 1

    def _hear(self, request: int) -> None:
        """Let the routers know that a request is nowhere any more."""
        record = self.requests[request]
        if self.pools[0]["n_workers"] and record["prefill_worker"] >= 0:
            n = int(self.clock["n_events"][0])
            events = self.cluster.arrays.events[:n]
            pending = (events["kind"] == state.REPORT) & (events["subject"] == 2 * request)
            if record["prefill_end_s"] < 0.0 or pending.any():
                self.removal.keep_events(~pending)
                self._hear_one(request, 0)
        if record["decode_worker"] >= 0:
            self._hear_one(request, 1)

    def _end(self, request: int, outcome: np.integer[Any]) -> None:
        record = self.requests[request]
        record["outcome"] = outcome
        self.clock["open_measured"] -= record["measured"]
        if outcome in (state.WORKER_LOST, state.CANCELLED):
            record["finish_s"] = self.clock["now"][0]
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
            if not self._may_retry(request):
                self._give_up(request, state.WORKER_LOST)
                continue
            self.retries[request] += 1
            record = self.requests[request]
            self._keep_first_try(request)
            for name in _PROGRESS:
                record[name] = -1
            record["kv_here"] = False
            pool = 0 if self.pools[0]["n_workers"] else 1
            held = self.cluster.routers[pool].arrays.held[0]
            record["next"] = -1
            if held["n"] == 0:
                held["head"] = request
            else:
                self.requests[held["tail"]]["next"] = request
            held["tail"] = request
            held["n"] += 1
            self._ask_again(pool)

    def _keep_first_try(self, request: int) -> None:
        """Note the workers and times of a request that has its first token, once."""
        record = self.requests[request]
        if record["first_token_s"] < 0.0 or request in self.first_try:
            return
        if not self.pools[0]["n_workers"]:  # a co-located worker notes them with the last token
            record["prefill_end_s"] = record["decode_start_s"] = record["first_token_s"]
        self.first_try[request] = tuple(record[name] for name in _PROGRESS)

    def _may_retry(self, request: int) -> bool:
        """Whether a request is sent again: as the rule says, and if its context fits."""
        plan, record = self.plan, self.requests[request]
        if plan.retry == "never" or self.retries[request] >= plan.max_retries:
            return False
        if plan.retry == "before_first_token" and record["first_token_s"] >= 0.0:
            return False
        size = self.cluster.arrays.engines.settings[0]["block_size"]
        context = record["prompt_len"] + record["generated"]
        return bool(context <= self.pools[0]["n_blocks"] * size)

    # --- the end of the run ---

    def nobody_left(self) -> bool:
        """End what no worker is left to serve; False if there is nothing that waits for one."""
        if not (self.troubles > 0).any():
            return False
        arrived = self.requests[: int(self.clock["arrived"][0])]
        waits = np.flatnonzero(arrived["outcome"] == state.OPEN).tolist()
        for request in waits:
            self._end(request, state.NO_WORKER)
        return bool(waits)

    def recorded(self, record: RunRecord) -> RunRecord:
        """Return a run's record without the steps that were cut, and with what was sent again.

        Workers and times of a request up to its first token are those of the try that gave it.
        """
        requests = record.requests.copy()
        for request, progress in self.first_try.items():
            for name, value in zip(_PROGRESS, progress, strict=True):
                requests[name][request] = value

        def whole(log: NDArray[np.void], end: str) -> NDArray[np.void]:
            return np.asarray(log[np.isfinite(log[end])])

        return replace(
            record,
            requests=requests,
            prefill_steps=whole(record.prefill_steps, "end"),
            decode_steps=whole(record.decode_steps, "end"),
            prefill_group_steps=whole(record.prefill_group_steps, "end"),
            decode_group_steps=whole(record.decode_group_steps, "end"),
            gaps=whole(record.gaps, "resumed_s"),
            retries=np.array([self.retries[r] for r in range(len(requests))], np.int32),
            faults=self.plan.faults,
        )
