"""What processes may do to a cluster: send requests; start, drain, stop, switch, fail workers."""

import math
from collections.abc import Generator, Hashable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import simpy

from eldr_sim.arrays import Floats
from eldr_sim.errors import InputError
from eldr_sim.simulator.control.compiled_cluster import CompiledCluster
from eldr_sim.simulator.control.fault_processes import leave, start_faults
from eldr_sim.simulator.control.growth import grow, set_lengths
from eldr_sim.simulator.control.record import (
    DRAINING,
    OFF,
    READY,
    RESERVED,
    STARTING,
    STATE,
    RunRecord,
)
from eldr_sim.simulator.plane import state
from eldr_sim.simulator.setup.fault_plan import FaultPlan

#: A worker that is to leave its pool is looked at so often whether it has nothing left, s.
_LOOK_S, _LOOK_STOP_S = 0.01, 0.1


class Worker(NamedTuple):
    """A worker: all its engines, where they share experts."""

    pool: str
    number: int

    def __str__(self) -> str:
        return f"{self.pool}:{self.number}"


def parse_worker(text: str, field: str, pools: list[str]) -> Worker:
    """Read ``decode:4``, or ``worker:4`` where there is one pool; raises InputError."""
    name, _, number = text.partition(":")
    if name == "worker" and len(pools) == 1:
        name = pools[0]
    if name not in pools or not number.isdecimal():
        raise InputError(field, repr(text), "decode:4, of a cluster such as 8C worker:4")
    return Worker(name, int(number))


class RequestOutcome(NamedTuple):
    """A request that has ended; times in seconds, NaN where it never came so far."""

    number: int
    outcome: str  #: one of `state.OUTCOMES`
    prompt_len: int
    output_len: int
    sent_s: float
    first_token_s: float
    finish_s: float

    @property
    def ttft_s(self) -> float:
        """From leaving the client to the first token."""
        return self.first_token_s - self.sent_s


#: Picks what `RequestOutcome` tells from a record of a request.
_TOLD = itemgetter(
    *map(
        (state.REQUEST.names or ()).index,
        ("outcome", "prompt_len", "output_len", "sent_s", "first_token_s", "finish_s"),
    )
)


class Pool:
    """The workers of a pool as they are now, by their engines where several are a worker."""

    def __init__(self, cluster: CompiledCluster, number: int) -> None:
        self._cluster = cluster
        pool = cluster.arrays.engines.pools[number]
        self._size = cluster.spec.pools[number].engine.worker_size
        first, n = int(pool["first_worker"]), int(pool["n_workers"])
        self._engines = slice(first, first + n)
        self.name = cluster.spec.names[number]

    def __len__(self) -> int:
        return (self._engines.stop - self._engines.start) // self._size

    def __getitem__(self, worker: int) -> Worker:
        return Worker(self.name, range(len(self))[worker])

    def __iter__(self) -> Iterator[Worker]:
        return (Worker(self.name, number) for number in range(len(self)))

    @property
    def serving(self) -> list[Worker]:
        """The workers that routers may choose."""
        healthy = self._cluster.arrays.routers[0].healthy[self._engines][:: self._size]
        return [Worker(self.name, number) for number in np.flatnonzero(healthy).tolist()]

    @property
    def waiting(self) -> int:
        """Requests that engines have and that do not run."""
        return int(self._workers["n_waiting"].sum())

    @property
    def running(self) -> int:
        """Requests that run."""
        return sum(int(self._workers[name].sum()) for name in ("batch", "prefilling", "leaving"))

    @property
    def loads(self) -> list[int]:
        """Requests in flight to each engine, as the router knows."""
        loads: list[int] = self._cluster.arrays.routers[0].loads[self._engines].tolist()
        return loads

    @property
    def _workers(self) -> Any:
        return self._cluster.arrays.engines.workers[self._engines]


class Control:
    """What processes may do to a cluster. ``arrivals``: whether requests come, and clients give up,
    by the workload, or from when they are sent."""

    def __init__(self, cluster: CompiledCluster, plan: FaultPlan, arrivals: bool = True) -> None:
        self._patience_s: Floats | None = None
        if not arrivals and plan.cancel_s is not None:
            self._patience_s = plan.cancel_s - cluster.workload.arrival_s
            plan = replace(plan, cancel_s=None)
        self.cluster, self._env = cluster, cluster.env
        self._bind()
        self.acts: Any = cluster.make_acts(plan)
        start_faults(self.acts)
        self.acted = bool(plan.faults or self._patience_s is not None) or plan.cancel_s is not None
        self._waited: dict[int, simpy.Event] = {}
        self._drained: set[Worker] = set()
        self._switching: set[Worker] = set()  # workers that leave their pool, and places kept
        self._starting: dict[Worker, simpy.Event] = {}  # and what happens when they serve
        #: What each worker is, and since when: `record.STATE`.
        self.states = {name: [READY] * len(self.pool(name)) for name in cluster.spec.names}
        self._log: list[tuple[float, int, int, int]] = []
        cluster.on_end = self._ended

    def _bind(self) -> None:
        """Keep views of what each request changes: to make one takes a microsecond."""
        self._clock = self.cluster.arrays.clock
        self._arrived = self._clock["arrived"]

    def request(
        self,
        *,
        prompt_len: int | None = None,
        output_len: int | None = None,
        prefix: Sequence[Hashable] = (),
    ) -> simpy.Event:
        """Send a request now, the next of the workload; returns an event with the request as it
        `RequestOutcome`.

        ``prompt_len``, ``output_len``: tokens, in place of the workload's; ``prefix``: a name for
        each ``block_size`` tokens, shared by prompts that begin with the same names. Raises
        InputError if the workload's prefixes or the queue order hang on a length that is given, or
        for a prefix without ``Simulation(prefixes=True)``."""
        number = self.submit(prompt_len, output_len, prefix)
        self._watch(number)
        event = self._waited[number] = simpy.Event(self._env)
        return event

    def _watch(self, number: int) -> None:
        """Hear of the end of a request."""
        self.cluster.requests["watched"][number] = True

    def submit(
        self,
        prompt_len: int | None = None,
        output_len: int | None = None,
        prefix: Sequence[Hashable] = (),
    ) -> int:
        """Send a request as `request` does, without a waiting client; returns its number."""
        cluster, clock = self.cluster, self._clock
        number, now = int(self._arrived[0]), float(self._env.now)
        if number == len(cluster.requests):
            grow(cluster)
        if prompt_len is not None or output_len is not None:
            set_lengths(cluster, number, prompt_len, output_len)
        if cluster.sent is not None:
            cluster.sent.add(cluster, number, prefix)
        elif len(prefix):
            raise InputError("prefix", "the simulation takes none", "prefixes=True")
        start, end = cluster.window
        cluster.requests["arrival_s"][number] = cluster.workload.arrival_s[number] = now
        if start <= now < end:
            cluster.requests["measured"][number] = True
            clock["open_measured"] += 1
        else:
            cluster.requests["measured"][number] = False
        cluster.arrays.engines.sessions.order[number] = number
        self._arrived[0] = number + 1
        self._let_leave(number)
        return number

    def _let_leave(self, number: int) -> None:
        """Let the client of a request that comes now give up, if it ever does."""
        if self._patience_s is not None:
            client = number % len(self._patience_s)
            patience_s = float(self._patience_s[client])
            if patience_s < math.inf:
                at = float(self._env.now) + patience_s
                self._env.at(at, lambda _event: leave(self.acts, number, client))

    def coming(self) -> tuple[int, int]:
        """Return the lengths of prompt and output of the workload's next request."""
        number = int(self._arrived[0])
        if number == len(self.cluster.requests):
            grow(self.cluster)
        record = self.cluster.requests[number]
        return int(record["prompt_len"]), int(record["output_len"])

    def cancel(self, number: int) -> None:
        """Let the client of a request that `submit` has sent give up."""
        self.acted = True
        self.acts.cancel(number)

    @property
    def requests(self) -> Any:
        """All requests, by their numbers: `state.REQUEST`, of which ``[:sent]`` have been sent."""
        return self.cluster.requests

    def generating(self) -> Iterator[tuple[float, Any, Any]]:
        """Yield of each engine with a batch when its last step ends or has ended, s, and the
        batch: the numbers of its requests, and the tokens that they have got then."""
        engines = self.cluster.arrays.engines
        here = engines.pools["then"][engines.pool_of] == state.HERE
        for w in np.flatnonzero(here & (engines.workers["batch"] > 0)).tolist():
            batch = engines.sequences[w][: int(engines.workers[w]["batch"])]
            numbers = batch["request"]
            got = self.cluster.requests["output_len"][numbers] - batch["tokens_left"]
            yield float(engines.workers[w]["next_start"]), numbers, got

    def engines(self) -> list[tuple[int, int, float]]:
        """Return of each engine the requests that run and that wait, and its share of KV in use."""
        engines = self.cluster.arrays.engines
        blocks, workers = engines.pools["n_blocks"][engines.pool_of], engines.workers
        running = workers["batch"] + workers["prefilling"] + workers["leaving"]
        used = 1.0 - (workers["n_blank"] + workers["n_idle"]) / np.maximum(blocks, 1)
        return list(
            zip(running.tolist(), workers["n_waiting"].tolist(), used.tolist(), strict=True)
        )

    def kv_blocks(self) -> list[int]:
        """Return the KV blocks of each engine."""
        engines = self.cluster.arrays.engines
        blocks: list[int] = engines.pools["n_blocks"][engines.pool_of].tolist()
        return blocks

    def _ended(self, number: int) -> None:
        outcome, prompt_len, output_len, *at = _TOLD(self.cluster.requests[number].item())
        times = [time if time >= 0.0 else math.nan for time in at]
        ended = RequestOutcome(number, state.OUTCOMES[outcome], prompt_len, output_len, *times)
        self._waited.pop(number).succeed(ended)

    def pool(self, name: str) -> Pool:
        """Return a pool: ``prefill``, ``decode`` (the co-located workers too), or a file's."""
        names = self.cluster.spec.names
        if name not in names:
            raise InputError("pool", repr(name), ", ".join(names))
        return Pool(self.cluster, names.index(name))

    def _note(self, worker: Worker, what: int) -> None:
        """Note that a worker is something else now."""
        self.states[worker.pool][worker.number] = what
        pool = self.cluster.spec.names.index(worker.pool)
        self._log.append((float(self._env.now), pool, worker.number, what))

    def recorded(self, record: RunRecord) -> RunRecord:
        """Return a run's record with what was done to it."""
        if not self.acted:
            return record
        changed: RunRecord = self.acts.recorded(record)
        return replace(changed, states=np.array(self._log, STATE))

    def start(self, worker: Worker) -> simpy.Event:
        """Let a worker serve that does not: a new, empty one, when its start-up is over
        (``start_up``; routers know ``health_delay_ms`` later), or one that drained.

        Returns simpy.Event: it serves; its value is the worker, None if it was stopped before."""
        engines, done = self._engines(worker), simpy.Event(self._env)
        if worker in self._switching:
            raise InputError("start", f"{worker} is part of a switch", "a worker that is not")
        if worker in self._starting:
            raise InputError("start", f"{worker} is starting", "a worker that is not starting")
        self._check_order("start", worker)
        if worker in self._drained:
            self._drained.remove(worker)
            self.acts.avoid(engines, -1)
            self._note(worker, READY)
            return done.succeed(worker)
        if engines[0] not in self.acts.dead:
            raise InputError(
                "start", f"{worker} is serving", "a worker that died, drains or is absent"
            )
        spec = self.cluster.spec
        seconds = spec.pools[spec.names.index(worker.pool)].engine.start_up_s
        self._starting[worker] = done
        self._note(worker, STARTING)
        if seconds:
            self._env.at(self._env.now + seconds, lambda _event: self._serve(worker, done))
        else:
            self._serve(worker, done)
        return done

    def starts(self, worker: Worker) -> bool:
        """Whether a worker has been started and does not serve yet."""
        return worker in self._starting

    def _serve(self, worker: Worker, done: simpy.Event) -> None:
        """Let a worker that has started serve, unless it was stopped meanwhile."""
        if self._starting.get(worker) is done:
            del self._starting[worker]
            engines = self._engines(worker)
            self.acts.start(engines)
            self._reshape(worker.pool)
            self.acts.later(self.acts.avoid, engines, -1)
            self._note(worker, READY)
            done.succeed(worker)

    def stop(self, worker: Worker, timeout_s: float = math.inf) -> None:
        """Let a worker drain, and leave when it has nothing left, which is looked at every 0.1 s,
        or after ``timeout_s``: ``retry`` says what becomes of its requests. One that starts is not
        started. `start` lets it stay."""
        engines = self._engines(worker)
        if worker in self._starting:
            self._starting.pop(worker).succeed()
            self._note(worker, OFF)
            return
        self._check_may_go("stop", worker)
        self._check_order("stop", worker)
        self.drain(worker)
        if self.acts.is_empty(engines) and self._is_last(worker):
            self._leave(worker, engines)
        else:
            self._env.process(self._stop(worker, engines, self._env.now + timeout_s))

    def _stop(
        self, worker: Worker, engines: range, until: float
    ) -> Generator[simpy.Event, Any, None]:
        while worker in self._drained and engines[0] not in self.acts.dead:
            if self._is_last(worker) and (self.acts.is_empty(engines) or self._env.now >= until):
                self._leave(worker, engines)
                return
            yield self._env.timeout(_LOOK_STOP_S)

    def _leave(self, worker: Worker, engines: range) -> None:
        """Let a drained worker be there no more."""
        self._drained.remove(worker)
        self.acts.avoid(engines, -1)
        self.acts.die(engines)
        self.acts.hear_of_death(engines)
        self._note(worker, OFF)
        self._reshape(worker.pool)

    # Of engines that come and go at the end of a group:

    def _reshape(self, pool: str) -> None:
        """Change the width of a pool's group, once for all engines of this instant."""
        group = self.cluster.elastic.get(pool)
        if group is not None:
            self.acts.join_group(group.first)
            self._env.at(self._env.now, lambda _event: group.change(self.acts))

    def _is_last(self, worker: Worker) -> bool:
        """Whether nobody is behind a worker whose group shrinks from its end."""
        if worker.pool not in self.cluster.elastic:
            return True
        return all(what in (OFF, STARTING) for what in self._behind(worker))

    def _behind(self, worker: Worker) -> list[int]:
        return self.states[worker.pool][worker.number + 1 :]

    def _check_order(self, field: str, worker: Worker) -> None:
        """Raise InputError where engines of an elastic group would come or go in its midst."""
        before, there = self.states[worker.pool][: worker.number], {READY, STARTING}
        gap = there & set(self._behind(worker)) if field == "stop" else set(before) - there
        if worker.pool in self.cluster.elastic and gap:
            allowed = "the last engine to stop, the one behind the last to start"
            raise InputError(field, f"{worker} is in the middle of its group", allowed)

    def drain(self, worker: Worker) -> None:
        """Let routers send a worker nothing new; it finishes what it has."""
        engines = self._engines(worker)
        if worker in self._drained or engines[0] in self.acts.dead:
            raise InputError("drain", f"{worker} does not serve", "a worker that serves")
        self._drained.add(worker)
        self.acts.avoid(engines, 1)
        self._note(worker, DRAINING)

    def fail(self, worker: Worker) -> None:
        """Let a worker die, with all it has; routers know of it ``health_delay_ms`` later."""
        engines = self._engines(worker)
        if engines[0] in self.acts.dead:
            raise InputError("fail", f"{worker} is absent", "a worker that is present")
        if worker in self._drained:
            self._drained.remove(worker)
            self.acts.avoid(engines, -1)
        self._check_may_go("fail", worker)
        self.acts.die(engines)
        self.acts.later(self.acts.hear_of_death, engines)
        self._note(worker, OFF)

    def switch(self, worker: Worker, pool: str, seconds: float = 0.0) -> simpy.Event:
        """Let a worker drain (looked at every 10 ms), and serve in another pool ``seconds`` later.

        It takes the first free place there, with an empty KV cache. Returns simpy.Event: its value
        is the `Worker` there, None if it has died on the way. Raises InputError if it does not
        serve, there is no place or other GPUs, or a worker that leaves is not simulated (as in
        `fail`)."""
        engines, other = self._engines(worker), self.pool(pool)
        if not 0.0 <= seconds < math.inf:
            raise InputError("switch", f"{seconds:g} s", "0 s or more")
        if worker.pool == pool:
            raise InputError("switch", f"{worker} is in {pool}", "another pool")
        sizes = {
            (each.engine.step_time.gpu.name, each.engine.parallelism.n_gpus)
            for each in self.cluster.spec.pools
            if each.name in (worker.pool, pool)
        }
        if len(sizes) > 1:
            raise InputError("switch", f"workers of {pool} have other GPUs than {worker}")
        self._check_may_go("switch", worker)
        free = [place for place in other if self._is_free(place)]
        if not free:
            raise InputError("switch", f"{pool} has no free place", 'absent=("decode:4",)')
        self.drain(worker)
        self._switching |= {worker, free[0]}
        self._note(free[0], RESERVED)
        return self._env.process(self._switch(worker, engines, free[0], seconds))

    def _is_free(self, place: Worker) -> bool:
        taken = place in self._switching or place in self._starting
        return self._engines(place)[0] in self.acts.dead and not taken

    def _switch(
        self, worker: Worker, engines: range, place: Worker, seconds: float
    ) -> Generator[simpy.Event, Any, Worker | None]:
        try:
            while engines[0] not in self.acts.dead and not self.acts.is_empty(engines):
                yield self._env.timeout(_LOOK_S)
            if engines[0] in self.acts.dead:
                self._note(place, OFF)
                return None
            self._leave(worker, engines)
            self._switching.remove(worker)
            self._note(place, STARTING)
            yield self._env.timeout(seconds)
            target = self._engines(place)
            self.acts.start(target)
            self.acts.avoid(target, -1)
            self._note(place, READY)
            return place
        finally:
            self._switching -= {worker, place}

    def link(self, worker: Worker, share: float) -> None:
        """Let a worker's link for KV transfers have a share of its bandwidth, above 0."""
        if not 0.0 < share <= 1.0:
            raise InputError("link", f"{share:g} of the bandwidth", "above 0, up to 1")
        self.acts.scale(self._engines(worker), share)

    def _check_may_go(self, field: str, worker: Worker) -> None:
        """Raise InputError where it is not simulated that a worker is not there, as in `run`."""
        cluster, problem = self.cluster, None
        if cluster.relocations is not None:
            problem = "dead workers beside experts that move (eplb_interval) are not simulated"
        layout = cluster.spec.pools[cluster.spec.names.index(worker.pool)].engine.layout
        if worker.pool in cluster.elastic and field in ("fail", "switch"):
            problem = f"engines of an elastic group that {field} are not simulated"
        if layout is not None and layout.has_steps_of_its_own:
            problem = "dead workers that stream weights or have stages are not simulated"
        if problem is not None:
            raise InputError(field, f"{worker}: {problem}")

    def absent(self, worker: Worker) -> None:
        """Let a worker not be there from the beginning; see `Simulation`."""
        self._check_may_go("absent", worker)
        self.acts.remove(self._engines(worker))
        self._note(worker, OFF)
        self._reshape(worker.pool)

    def _engines(self, worker: Worker) -> range:
        spec = self.cluster.spec
        known = worker.pool in spec.names and worker.number >= 0
        engines = self.acts.engines(worker.pool, worker.number) if known else range(0)
        own = spec.workers_of(worker.pool) if known else range(0)
        if not engines or engines.stop > own.stop:
            raise InputError("worker", f"{worker} is not in the topology")
        self.acted = True
        return engines
