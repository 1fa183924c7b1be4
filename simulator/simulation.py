"""A cluster under the hand of SimPy processes: the public face of a run.

::

    sim = Simulation(RunConfig(topology="2P4D", policy="jsq", num_requests=500), arrivals=False)

    def user(think_s):
        while True:
            ended = yield sim.cluster.request()
            yield sim.env.timeout(think_s)

    for _ in range(64):
        sim.env.process(user(1.0))
    result = sim.run(until=60)

``sim.env`` is a plain `simpy.Environment`; its time is that of the cluster, whose engines, routers
and transfers run compiled between two of its events. At one instant processes come first.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import simpy

from eldr_sim.errors import InputError
from eldr_sim.simulator.control.actions import Actions
from eldr_sim.simulator.control.arrays import check_tables
from eldr_sim.simulator.control.clock import Clock
from eldr_sim.simulator.control.cluster import Cluster
from eldr_sim.simulator.control.fault_processes import start_faults
from eldr_sim.simulator.control.record import RunRecord
from eldr_sim.simulator.plane import loop, state
from eldr_sim.simulator.run import Result, build_cluster, offered_load, result_of
from eldr_sim.simulator.setup.config import RunConfig
from eldr_sim.simulator.setup.fault_plan import FaultPlan
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.traces.requests.lengths import told_lengths

#: A worker that is to leave its pool is looked at so often whether it has nothing left, s.
_LOOK_S = 0.01


class Worker(NamedTuple):
    """A worker: all its engines, where they share experts."""

    pool: str
    number: int

    def __str__(self) -> str:
        return f"{self.pool}:{self.number}"


class Ended(NamedTuple):
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


#: Picks what `Ended` tells from a record of a request.
_TOLD = itemgetter(
    *map(
        (state.REQUEST.names or ()).index,
        ("outcome", "prompt_len", "output_len", "sent_s", "first_token_s", "finish_s"),
    )
)


class Pool:
    """The workers of a pool as they are now, by their engines where several are a worker."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self._cluster = cluster
        pool = cluster.arrays.engines.pools[number]
        self._size = int(pool["group_size"])
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
    """What processes may do to a cluster; `Simulation.cluster`."""

    def __init__(self, cluster: Cluster, plan: FaultPlan) -> None:
        self._cluster, self._env = cluster, cluster.env
        self._clock, self._arrived = cluster.arrays.clock, cluster.arrays.clock["arrived"]
        self.acts = Actions(plan, cluster)
        start_faults(self.acts)
        self.acted = bool(plan.faults) or plan.cancel_s is not None
        self._waited: dict[int, simpy.Event] = {}
        self._drained: set[Worker] = set()
        self._switching: set[Worker] = set()  # workers that leave their pool, and places kept
        cluster.on_end = self._ended

    def request(
        self, *, prompt_len: int | None = None, output_len: int | None = None
    ) -> simpy.Event:
        """Send a request now; returns an event whose value is the request as it `Ended`.

        It is the next one of the configuration's workload, which begins again when it ends, with
        prefixes of its own.

        ``prompt_len``, ``output_len``: tokens, in place of the workload's. Raises InputError if a
        length is given where the workload's prefixes or the queue order hang on it.
        """
        number = self.submit(prompt_len, output_len)
        self._cluster.requests["watched"][number] = True
        event = self._waited[number] = simpy.Event(self._env)
        return event

    def submit(self, prompt_len: int | None = None, output_len: int | None = None) -> int:
        """Send a request as `request` does, that nobody waits for; returns its number."""
        cluster, clock = self._cluster, self._clock
        number, now = int(self._arrived[0]), float(self._env.now)
        if number == len(cluster.requests):
            cluster.grow()
        if prompt_len is not None or output_len is not None:
            cluster.set_lengths(number, prompt_len, output_len)
        start, end = cluster.window
        cluster.requests["arrival_s"][number] = cluster.workload.arrival_s[number] = now
        if start <= now < end:
            cluster.requests["measured"][number] = True
            clock["open_measured"] += 1
        else:
            cluster.requests["measured"][number] = False
        self._arrived[0] = number + 1
        return number

    def coming(self) -> tuple[int, int]:
        """Return the lengths of prompt and output of the workload's next request."""
        number = int(self._arrived[0])
        if number == len(self._cluster.requests):
            self._cluster.grow()
        record = self._cluster.requests[number]
        return int(record["prompt_len"]), int(record["output_len"])

    def cancel(self, number: int) -> None:
        """Let the client of a request that `submit` has sent give up."""
        self.acted = True
        self.acts.cancel(number)

    @property
    def requests(self) -> Any:
        """All requests, by their numbers: `state.REQUEST`, of which ``[:sent]`` have been sent."""
        return self._cluster.requests

    def generating(self) -> Iterator[tuple[float, Any, Any]]:
        """Yield of each engine with a batch when its last step ends or has ended, s, and the
        batch: the numbers of its requests, and the tokens that they have got then.
        """
        engines = self._cluster.arrays.engines
        here = engines.pools["then"][engines.pool_of] == state.HERE
        for w in np.flatnonzero(here & (engines.workers["batch"] > 0)).tolist():
            batch = engines.sequences[w][: int(engines.workers[w]["batch"])]
            numbers = batch["request"]
            got = self._cluster.requests["output_len"][numbers] - batch["tokens_left"]
            yield float(engines.workers[w]["next_start"]), numbers, got

    def engines(self) -> list[tuple[int, int, float]]:
        """Return of each engine the requests that run and that wait, and its share of KV in use."""
        engines = self._cluster.arrays.engines
        blocks, told = engines.pools["n_blocks"][engines.pool_of], engines.workers
        running = told["batch"] + told["prefilling"] + told["leaving"]
        used = 1.0 - (told["n_blank"] + told["n_idle"]) / np.maximum(blocks, 1)
        return list(zip(running.tolist(), told["n_waiting"].tolist(), used.tolist(), strict=True))

    def kv_blocks(self) -> list[int]:
        """Return the KV blocks of each engine."""
        engines = self._cluster.arrays.engines
        blocks: list[int] = engines.pools["n_blocks"][engines.pool_of].tolist()
        return blocks

    def _ended(self, number: int) -> None:
        outcome, prompt_len, output_len, *at = _TOLD(self._cluster.requests[number].item())
        times = [time if time >= 0.0 else math.nan for time in at]
        ended = Ended(number, state.OUTCOMES[outcome], prompt_len, output_len, *times)
        self._waited.pop(number).succeed(ended)

    def pool(self, name: str) -> Pool:
        """Return a pool: ``prefill``, ``decode`` (the co-located workers too), or a file's."""
        names = self._cluster.spec.names
        if name not in names:
            raise InputError("pool", repr(name), ", ".join(names))
        return Pool(self._cluster, names.index(name))

    def start(self, worker: Worker) -> None:
        """Let a worker serve that does not: a new, empty one, or one that drained.

        Routers know of a new one ``health_delay_ms`` later.
        """
        engines = self._engines(worker)
        if worker in self._switching:
            raise InputError("start", f"{worker} is part of a switch", "a worker that is not")
        if worker in self._drained:
            self._drained.remove(worker)
            self.acts.avoid(engines, -1)
        elif engines[0] in self.acts.dead:
            self.acts.start(engines)
            self.acts.later(self.acts.avoid, engines, -1)
        else:
            raise InputError("start", f"{worker} serves", "a worker that died, drains or is absent")

    def drain(self, worker: Worker) -> None:
        """Let routers send a worker nothing new; it finishes what it has."""
        engines = self._engines(worker)
        if worker in self._drained or engines[0] in self.acts.dead:
            raise InputError("drain", f"{worker} does not serve", "a worker that serves")
        self._drained.add(worker)
        self.acts.avoid(engines, 1)

    def fail(self, worker: Worker) -> None:
        """Let a worker die, with all it has; routers know of it ``health_delay_ms`` later."""
        engines = self._engines(worker)
        if engines[0] in self.acts.dead:
            raise InputError("fail", f"{worker} is not there", "a worker that is")
        if worker in self._drained:
            self._drained.remove(worker)
            self.acts.avoid(engines, -1)
        self._check_may_go("fail", worker)
        self.acts.die(engines)
        self.acts.later(self.acts.hear_of_death, engines)

    def switch(self, worker: Worker, pool: str, seconds: float = 0.0) -> simpy.Event:
        """Let a worker drain, and serve in another pool ``seconds`` after it has nothing left.

        It has nothing left when its requests have ended or, where it hands them over, when their
        KV caches have been fetched, which is looked at every 10 ms. It takes the first place of
        the other pool where nobody is, and leaves its own; its KV cache is empty then.

        Returns simpy.Event: its value is the `Worker` that it is in the other pool, which serves;
        None if it has died on the way. Raises InputError if it does not serve, the other pool has
        no place or workers of other GPUs, or a worker that leaves is not simulated (as in `fail`).
        """
        engines, other = self._engines(worker), self.pool(pool)
        if not 0.0 <= seconds < math.inf:
            raise InputError("switch", f"{seconds:g} s", "0 s or more")
        if worker.pool == pool:
            raise InputError("switch", f"{worker} is in {pool}", "another pool")
        sizes = {
            (each.engine.step_time.gpu.name, each.engine.parallelism.n_gpus)
            for each in self._cluster.spec.pools
            if each.name in (worker.pool, pool)
        }
        if len(sizes) > 1:
            raise InputError("switch", f"workers of {pool} have other GPUs than {worker}")
        self._check_may_go("switch", worker)
        free = [place for place in other if self._is_free(place)]
        if not free:
            raise InputError("switch", f"{pool} has no place free", 'absent=("decode:4",)')
        self.drain(worker)
        self._switching |= {worker, free[0]}
        return self._env.process(self._switch(worker, engines, free[0], seconds))

    def _is_free(self, place: Worker) -> bool:
        return self._engines(place)[0] in self.acts.dead and place not in self._switching

    def _switch(
        self, worker: Worker, engines: range, place: Worker, seconds: float
    ) -> Generator[simpy.Event, Any, Worker | None]:
        try:
            while engines[0] not in self.acts.dead and not self.acts.is_empty(engines):
                yield self._env.timeout(_LOOK_S)
            if engines[0] in self.acts.dead:
                return None
            self._drained.remove(worker)
            self.acts.avoid(engines, -1)
            self.acts.die(engines)
            self.acts.hear_of_death(engines)
            self._switching.remove(worker)
            yield self._env.timeout(seconds)
            target = self._engines(place)
            self.acts.start(target)
            self.acts.avoid(target, -1)
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
        cluster, problem = self._cluster, None
        if cluster.relocations is not None:
            problem = "dead workers beside experts that move (eplb_interval) are not simulated"
        layout = cluster.spec.pools[cluster.spec.names.index(worker.pool)].engine.layout
        if layout is not None and layout.has_steps_of_its_own:
            problem = "dead workers that stream weights or have stages are not simulated"
        if problem is not None:
            raise InputError(field, f"{worker}: {problem}")

    def absent(self, worker: Worker) -> None:
        """Let a worker not be there from the beginning; see `Simulation`."""
        self._check_may_go("absent", worker)
        self.acts.remove(self._engines(worker))

    def _engines(self, worker: Worker) -> range:
        spec = self._cluster.spec
        known = worker.pool in spec.names and worker.number >= 0
        engines = self.acts.engines(worker.pool, worker.number) if known else range(0)
        own = spec.workers_of(worker.pool) if known else range(0)
        if not engines or engines.stop > own.stop:
            raise InputError("worker", f"{worker} is not in the topology")
        self.acted = True
        return engines


class Simulation:
    """One run of a configuration, whose time SimPy processes share.

    Parameters
    ----------
    config
        The cluster, and the workload that requests are taken from.
    arrivals
        Whether the configuration's load arrives, as in `simulate`. Without it all requests come
        from processes, and each that arrives after the warm-up is measured.
    absent
        Workers that the topology counts and that are not there before `Control.start`:
        ``("decode:4",)``.

    Raises
    ------
    InputError
        As `simulate`.
    """

    def __init__(
        self, config: RunConfig, *, arrivals: bool = True, absent: Sequence[str] = ()
    ) -> None:
        self._config, self._prepared = config, prepare(config)
        workload, window = offered_load(config, self._prepared.trace)
        if not arrivals:
            window = (window[0], math.inf)
        cluster = build_cluster(config, self._prepared, workload, window)
        for pool in cluster.spec.pools:
            check_tables(pool.engine, cluster.spec.max_model_len)
        self._cluster, self._stopped = cluster, False
        clock = cluster.arrays.clock
        clock["n_events"] = 0  # arrivals are a process, or none
        if not arrivals:
            clock["open_measured"] = 0
        self.env: Clock = cluster.env
        health = config.health_delay_ms / 1e3
        plan = cluster.faults or FaultPlan((), None, health, config.retry, config.max_retries)
        self.cluster = Control(cluster, plan)
        for text in absent:
            name, _, number = text.partition(":")
            if name not in cluster.spec.names or not number.isdecimal():
                raise InputError("absent", repr(text), "decode:4")
            self.cluster.absent(Worker(name, int(number)))
        self._open_load = arrivals
        if arrivals:
            self.env.process(self._arrivals(workload.arrival_s.copy()))

    def _arrivals(self, arrival_s: Any) -> Generator[simpy.Event, Any, None]:
        """Send the configuration's requests when they arrive."""
        start, end = self._cluster.window
        clock = self._cluster.arrays.clock
        for at in arrival_s.tolist():
            if at > self.env.now:
                yield self.env.at(at)
            self.cluster.submit()
            clock["open_measured"] -= start <= at < end  # it has counted since the beginning

    def run(self, until: float | None = None) -> Result:
        """Let things happen; returns the result so far, with what is open as unserved.

        Parameters
        ----------
        until
            Simulated time, s. None runs to the end of the measured requests of the
            configuration's load, as `simulate` does, or, without arrivals, until nothing is left.

        Raises
        ------
        ProcessError
            If a process fails: names it.
        InputError
            If ``until`` is not ahead.
        """
        self.advance(until)
        prepared = replace(self._prepared, spec=self._cluster.spec)
        result = result_of(self._config, prepared, self._cluster.workload, self._record())
        if not self._open_load:
            requests = result.record.requests
            result.summary["request_rate"] = None
            result.summary["trace"]["arrivals"] = "of processes"
            if len(requests):
                lengths = told_lengths(requests["prompt_len"], requests["output_len"])
                result.summary["trace"] |= lengths
        return result

    def advance(self, until: float | None = None) -> None:
        """Let things happen as `run` does, without a result: for who looks at them as they go."""
        cluster, env = self._cluster, self.env
        if until is not None and not until > env.now:
            raise InputError("until", f"{until:g} s", f"above {env.now:g} s, the time now")
        clock = cluster.arrays.clock
        holds = 0 if until is None and self._open_load else 1
        limit = until
        if limit is None:
            limit = cluster.time_limit_s if self._open_load else math.inf
        clock["open_measured"] += holds
        try:
            while (why := cluster.advance(float(limit))) == loop.PAUSED:
                pass
        finally:
            clock["open_measured"] -= holds
            env.move(float(clock["now"][0]))
        if why == loop.UNTIL:
            if limit < math.inf:
                clock["now"] = limit
            elif int(clock["open_measured"][0]) and self._open_load:
                cluster.check_left(self.cluster.acts)
            env.move(float(clock["now"][0]))

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest context."""
        return self._cluster.spec.max_model_len

    @property
    def next_s(self) -> float:
        """When the next thing happens, s; infinite where nothing is left."""
        arrays = self._cluster.arrays
        due = float(arrays.events[0]["time"]) if int(arrays.clock["n_events"][0]) else math.inf
        return min(due, float(self.env.peek()))

    def _record(self) -> RunRecord:
        record = self._cluster.record(float(self.env.now), self.cluster.acts)
        return self.cluster.acts.recorded(record) if self.cluster.acted else record
