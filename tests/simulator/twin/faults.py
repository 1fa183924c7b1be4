"""What goes wrong: takes what `Actions` take."""

import numpy as np

from .engine import COLOCATED, DECODE, PREFILL_ONLY, Worker

#: What a request has of each try.
PROGRESS = (
    "prefill_worker", "decode_worker", "prefill_start_s", "prefill_end_s", "transfer_start_s",
    "transfer_end_s", "decode_start_s", "cached_tokens", "decode_cached_tokens",
)  # fmt: skip


class TwinFaults:
    """Each fault in a function, by its name; what a death takes along in `lose`."""

    def __init__(self, twin, plan):
        self.twin, self.plan = twin, plan
        self.order = -(1 << 60)  # before all else of an instant
        self.lost, self.retries, self.spent = {}, {}, {}
        self.first = {}  # what a request had when it lost its place after its first token
        self.troubles = [np.zeros(pool.size, int) for pool in twin.pools]
        self.known = set()  # dead workers that the routers know of
        for fault in plan.faults:
            pool = ("prefill", "decode").index(fault.pool)
            size = twin.pools[pool].spec.parallelism.data_parallel_size
            places = pool, range(fault.worker * size, (fault.worker + 1) * size)
            getattr(self, fault.kind)(fault, places)
        for number, at in enumerate([] if plan.cancel_s is None else plan.cancel_s):
            self.at(at, lambda request=twin.requests[number]: self.cancel(request))

    def at(self, time, act):
        if time < np.inf:
            self.order += 1
            self.twin.schedule(time, act, self.order)

    def group(self, places):
        return [self.twin.workers[places[0]][i] for i in places[1]]

    # --- what happens ---

    def fail(self, fault, places):
        delay = self.plan.health_delay_s
        self.at(fault.at_s, lambda: self.die(places))
        self.at(fault.at_s + delay, lambda: self.notice(places))
        self.at(fault.end_s, lambda: self.come_back(places))
        self.at(fault.end_s + delay, lambda: self.trouble(places, -1))

    def join(self, fault, places):
        for worker in self.group(places):
            worker.alive = False
        self.known.add(places)
        self.trouble(places, 1)
        self.at(fault.end_s, lambda: self.come_back(places))
        self.at(fault.end_s + self.plan.health_delay_s, lambda: self.trouble(places, -1))

    def hang(self, fault, places):
        delay = self.plan.health_delay_s
        self.at(fault.at_s, lambda: self.stand_still(places, fault.for_s))
        if delay < fault.for_s:
            self.at(fault.at_s + delay, lambda: self.notice_hang(places, fault.resend))
            self.at(fault.end_s + delay, lambda: self.trouble(places, -1))

    def drain(self, fault, places):
        self.at(fault.at_s, lambda: self.trouble(places, 1))
        self.at(fault.end_s, lambda: self.trouble(places, -1))

    def slow(self, fault, places):
        def become(factor):
            for worker in self.group(places):
                worker.slowdown = factor

        self.at(fault.at_s, lambda: become(fault.factor))
        self.at(fault.end_s, lambda: become(1.0))

    def link(self, fault, places):
        def become(share):
            for i in places[1]:
                self.twin.links.scale((("out", "in")[places[0]], i), share)

        self.at(fault.at_s, lambda: become(fault.factor))
        self.at(fault.end_s, lambda: become(1.0))

    def trouble(self, places, more):
        pool, members = places
        self.troubles[pool][list(members)] += more
        self.twin.healthy[pool][:] = self.troubles[pool] == 0
        self.twin.to_ask[pool] = len(self.twin.held[pool])

    def stand_still(self, places, seconds):
        """All that its engines do ends later."""
        twin, group = self.twin, self.group(places)
        twin.events = [
            (time + seconds if getattr(act, "__self__", None) in group else time, order, act)
            for time, order, act in twin.events
        ]
        twin.events.sort(key=lambda event: event[:2])
        for worker in group:
            worker.step_end = max(worker.step_end, twin.now) + seconds
            if worker.boundary_at is not None:
                worker.boundary_at += seconds
            if worker.last and worker.last[0]["end"] > twin.now:
                self.move_end(worker, worker.last[0]["end"] + seconds)
        if len(group) > 1 and getattr(group[0], "last_group_step", {"end": 0})["end"] > twin.now:
            group[0].last_group_step["end"] += seconds

    def move_end(self, worker, end):
        """Let the last step of an engine end at another time."""
        step, batch, joined = worker.last
        for sequence in batch:
            request = sequence.request
            request.token_s[-sequence.got :] = [end] * sequence.got
            if sequence in joined and request.first_token_s == step["end"]:
                request.first_token_s = end
                if worker.role == COLOCATED:
                    request.prefill_end_s = request.decode_start_s = end
            elif sequence in joined:
                gap = request.last_token_s, step["end"]
                self.twin.gaps[self.twin.gaps.index(gap)] = gap[0], end
        step["end"] = end

    # --- a worker dies ---

    def die(self, places):
        twin, group = self.twin, self.group(places)
        if len(group) > 1 and getattr(group[0], "last_group_step", {"end": 0})["end"] > twin.now:
            twin.group_steps.remove(group[0].last_group_step)
        for worker in group:
            cut = worker.last is not None and worker.last[0]["end"] > twin.now
            if cut:
                self.cut_step(worker)
            for sequence in worker.running():
                request = sequence.request
                if request.token_s:
                    request.last_token_s = request.token_s[-1]
                if not cut and self.is_done(worker, sequence):
                    self.complete(request, worker)
        twin.events = [
            event for event in twin.events if getattr(event[2], "__self__", None) not in group
        ]
        self.lose(places, group)
        for i, worker in zip(places[1], group, strict=True):
            fresh = Worker(twin, worker.pool, worker.number)
            fresh.alive, fresh.slowdown = False, worker.slowdown
            twin.workers[places[0]][i] = fresh
        fresh = self.group(places)
        for worker in fresh:
            worker.group = fresh

    def cut_step(self, worker):
        """Nobody gets the tokens of the step in progress."""
        step, batch, joined = worker.last
        self.twin.steps[:] = [other for other in self.twin.steps if other is not step]
        for sequence in batch:
            request = sequence.request
            request.generated -= sequence.got
            del request.token_s[-sequence.got :]
            if sequence in joined and not request.token_s:
                request.first_token_s = -1.0
            elif sequence in joined:
                self.twin.gaps.remove((request.last_token_s, step["end"]))

    def is_done(self, worker, sequence):
        if worker.role in (DECODE, COLOCATED):
            return sequence.request.generated == sequence.request.output
        return worker.role == PREFILL_ONLY and sequence.cached == sequence.context

    def complete(self, request, worker):
        twin = self.twin
        request.finish_s = twin.now
        if worker.role == COLOCATED:
            request.prefill_end_s = request.decode_start_s = request.first_token_s
        if worker.role == PREFILL_ONLY:
            request.prefill_end_s = request.first_token_s = twin.now
        twin.hear(request, 0 if worker.role == PREFILL_ONLY else 1)
        twin.in_flight -= 1
        twin.end(request, "completed")

    def lose(self, places, dead=()):
        """Take out all that is bound to a worker: what it has, and what still needs its KV."""
        pool, members = places
        for request in self.twin.requests[: self.twin.sent]:
            needs = request.decode_worker in members if pool else (
                request.prefill_worker in members and not request.kv_here
            )  # fmt: skip
            if needs and not request.outcome and request not in self.lost:
                self.take_out(request, dead)
                self.lost[request] = places

    def notice(self, places):
        self.trouble(places, 1)
        if not self.group(places)[0].alive:
            self.known.add(places)
            self.lose(places)
        self.send_again(places)

    def notice_hang(self, places, resend):
        self.trouble(places, 1)
        group = self.group(places)
        for request in self.twin.requests[: self.twin.sent] if resend else ():
            worker = self.engine_of(request)
            if request.outcome or request in self.lost or worker not in group:
                continue
            computed = places[0] == 1 and request.prefill_worker >= 0
            running = any(s.request is request for s in worker.running())
            if not (computed or running or request.first_token_s >= 0 or self.refuses(request)):
                self.take_out(request)
                self.lost[request] = places
        self.send_again(places)

    def come_back(self, places):
        self.lose(places)
        for worker in self.group(places):
            worker.alive = True
        if places in self.known:
            self.known.remove(places)
            self.send_again(places)

    # --- requests ---

    def engine_of(self, request):
        """The engine that has it; None while it is between two."""
        if request.decode_worker >= 0:
            return self.twin.workers[1][request.decode_worker]
        if request.prefill_worker >= 0 and request.prefill_end_s < 0:
            return self.twin.workers[0][request.prefill_worker]
        return None

    def take_out(self, request, dead=()):
        twin = self.twin
        twin.events = [
            event
            for event in twin.events
            if not (
                getattr(event[2], "args", (None,))[0] is request
                and event[2].func in (twin.links.begin, twin.ask_for_decode)
            )
        ]
        for pool in range(2):
            if request in twin.held[pool]:
                place = twin.held[pool].index(request)
                twin.held[pool].remove(request)
                twin.to_ask[pool] -= place < twin.to_ask[pool]
        twin.links.drop(request)
        worker = self.engine_of(request)
        holders = [worker] if worker else []
        holders += [holder for holder in request.tables if holder is not worker]
        for holder in holders:
            if holder in dead:
                continue
            for queue in (holder.new, holder.arrived, holder.preempted, holder.late):
                if request in queue:
                    queue.remove(request)
            for queue in (holder.decoding, holder.prefilling):
                queue[:] = [s for s in queue if s.request is not request]
            holder.requests.discard(request)
            if holder in request.tables:
                holder.release(request)
            holder.wake()
        request.tables.clear()

    def forget(self, request):
        """The routers know that it is nowhere any more."""
        twin = self.twin
        if twin.spec.n_prefill and request.prefill_worker >= 0:
            reports = [
                event
                for event in twin.events
                if getattr(event[2], "func", None) == twin.hear and event[2].args == (request, 0)
            ]
            if request.prefill_end_s < 0 or reports:
                twin.events = [event for event in twin.events if event not in reports]
                twin.hear(request, 0)
        if request.decode_worker >= 0:
            twin.hear(request, 1)

    def give_up(self, request, outcome):
        self.twin.in_flight -= 1
        request.finish_s = self.twin.now
        self.twin.end(request, outcome)

    def send_again(self, places):
        twin, plan = self.twin, self.plan
        for request in twin.requests:
            if self.lost.get(request) != places:
                continue
            del self.lost[request]
            self.forget(request)
            if self.refuses(request):
                if plan.user_retry_s is None:
                    self.give_up(request, "worker_lost")
                else:
                    self.begin_anew(request)
                continue
            self.retries[request] = self.retries.get(request, 0) + 1
            if request.first_token_s >= 0:
                if not twin.spec.n_prefill:
                    request.prefill_end_s = request.decode_start_s = request.first_token_s
                had = {name: getattr(request, name) for name in PROGRESS}
                self.first.setdefault(request, had)
            self.send(request)

    def refuses(self, request):
        """Whether a request is not sent again."""
        plan, spec = self.plan, self.twin.spec
        tries = self.retries.get(request, 0) - self.spent.get(request, 0)
        refused = plan.retry == "before_first_token" and request.first_token_s >= 0
        refused |= plan.retry == "never" or tries >= plan.max_retries
        return (
            refused or request.prompt + request.generated > spec.prefill.n_blocks * spec.block_size
        )

    def send(self, request):
        for name in PROGRESS:
            setattr(request, name, -1)
        request.kv_here, pool = False, 0 if self.twin.spec.n_prefill else 1
        self.twin.held[pool].append(request)
        self.twin.to_ask[pool] = len(self.twin.held[pool])

    def begin_anew(self, request):
        """Its user sends it again, who has what it got no more."""
        self.first.pop(request, None)
        for name in (*PROGRESS, "first_token_s"):
            setattr(request, name, -1)
        request.kv_here, request.generated, request.token_s = False, 0, []

        def send():
            if not request.outcome:
                self.retries[request] = self.retries.get(request, 0) + 1
                self.spent[request] = self.retries[request]
                self.send(request)

        self.at(self.twin.now + self.plan.user_retry_s, send)

    def cancel(self, request):
        """Its client gives up; who runs leaves at the end of the step in progress."""
        twin = self.twin
        if request.outcome:
            return
        if request.number >= twin.sent:
            request.finish_s = twin.now
            twin.end(request, "cancelled")
            return
        if request in self.lost:
            del self.lost[request]
        else:
            worker = self.engine_of(request)
            running = [s for s in worker.running() if s.request is request] if worker else []
            if running and worker.step_end > twin.now:
                self.at(worker.step_end, lambda: self.cancel(request))
                return
            if running and self.is_done(worker, running[0]):
                return
            self.take_out(request)
        self.forget(request)
        self.give_up(request, "cancelled")

    def nobody_left(self):
        if any((troubles > 0).any() for troubles in self.troubles):
            for request in self.twin.requests[: self.twin.arrived]:
                if not request.outcome:
                    self.twin.end(request, "no_worker_left")

    def show_first_tries(self):
        """A request's record is that of the try which gave its first token."""
        for request, had in self.first.items():
            for name, value in had.items():
                setattr(request, name, value)
