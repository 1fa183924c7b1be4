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

``sim.env`` is a `simpy.Environment`; its time is that of the cluster; engines, routers and
transfers run compiled between two of its events, or are processes in it (``backend="simpy"``). At
one instant users' processes come first."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import simpy

from eldr_sim.errors import InputError
from eldr_sim.simulator.control.arrays import check_tables
from eldr_sim.simulator.control.clock import Clock
from eldr_sim.simulator.control.compiled_cluster import CompiledCluster
from eldr_sim.simulator.control.control_api import (
    Control,
    Pool,
    RequestOutcome,
    Worker,
    parse_worker,
)
from eldr_sim.simulator.control.record import RunRecord
from eldr_sim.simulator.control.sent_prefixes import SentPrefixes, without_prefixes
from eldr_sim.simulator.reference.reference_cluster import ReferenceCluster
from eldr_sim.simulator.reference.reference_control import ReferenceControl
from eldr_sim.simulator.run import (
    Backend,
    Result,
    fault_plan,
    make_inputs,
    offered_load,
    prepare_run,
    reference_of,
    result_of,
    scale,
)
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.traces.requests.lengths import told_lengths

__all__ = ["Control", "Pool", "RequestOutcome", "Simulation", "Worker"]


class Simulation:
    """One run of a configuration that shares its clock with SimPy processes.

    ``env`` is the `simpy.Environment` of the run; ``cluster`` sends requests and starts, stops and
    disturbs workers (`Control`).

    Args:
        config: the configuration.
        arrivals: whether its load arrives; without it all requests come from processes, and those
            after the warm-up are measured.
        prefixes: whether requests bring the prefix blocks of their prompts (`Control.request`)
            in place of the workload's; only without ``arrivals``.
        absent: workers of the topology that are missing until `Control.start`: ``("decode:4",)``.
        on_blocks: called with a worker's index, and the numbers of the prefix blocks that its cache
            has stored and evicted.
        backend: ``compiled``, ``simpy`` or ``vllm``, as of `simulate`.
        workers: for ``simpy``, classes in place of a pool's workers.

    Raises:
        InputError: as `simulate`; also for sessions, which need their own arrivals.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        arrivals: bool = True,
        prefixes: bool = False,
        absent: Sequence[str] = (),
        on_blocks: Callable[[int, Sequence[int], Sequence[int]], None] | None = None,
        backend: Backend = "compiled",
        workers: Mapping[str, type[Any]] | None = None,
    ) -> None:
        self._config, self._prepared = config, prepare_run(config)
        workload, window = offered_load(config, self._prepared.trace)
        if workload.parent is not None or config.requests.max_active_sessions is not None:
            named = config.requests.workload
            problem = f"sessions of workload {named} beside processes are not simulated"
            raise InputError("workload", problem, "users as processes, or simulate()")
        if not arrivals:
            window = (window[0], math.inf)
        elif prefixes:
            raise InputError(
                "prefixes", "arriving requests have no prefixes of their senders", "arrivals=False"
            )
        if prefixes:
            workload = without_prefixes(workload, self._prepared.spec.block_size)
        inputs = make_inputs(config, self._prepared, workload, window, on_blocks)
        for pool in inputs.spec.pools:
            check_tables(pool.engine, inputs.spec.max_model_len)
        self._backend = backend
        if backend != "compiled":
            if prefixes:
                raise InputError("prefixes", "the SimPy backend takes none", "backend compiled")
            reference = reference_of(config, inputs, workers, arrivals=False, backend=backend)
            self._cluster: CompiledCluster | ReferenceCluster = reference
            plan = fault_plan(config, reference)
            self.cluster: Control = ReferenceControl(reference, plan, arrivals)
        else:
            self._cluster = cluster = CompiledCluster(inputs)
            cluster.sent = SentPrefixes() if prefixes else None
            cluster.arrays.clock["n_events"] = 0  # arrivals are a process, or none
            self.cluster = Control(cluster, fault_plan(config, cluster), arrivals)
        if not arrivals:
            self._cluster.open_measured = 0
        self.env: Clock = self._cluster.env
        for text in absent:
            self.cluster.absent(parse_worker(text, "absent", inputs.spec.names))
        scale(config, self._prepared, workload, self.cluster)
        self._open_load = arrivals
        if arrivals:
            self.env.process(self._arrivals(workload.arrival_s.copy()))

    def _arrivals(self, arrival_s: Any) -> Generator[simpy.Event, Any, None]:
        """Send the configuration's requests when they arrive."""
        start, end = self._cluster.window
        for at in arrival_s.tolist():
            if at > self.env.now:
                yield self.env.at(at)
            self.cluster.submit()
            self._cluster.open_measured -= start <= at < end  # it has counted since the beginning

    def run(self, until: float | None = None) -> Result:
        """Advance the run and return its result so far, with open requests as unserved.

        Args:
            until: simulated time, s; None: to the end of the measured requests or, without
                arrivals, until no event is left.

        Returns:
            The result up to that time.

        Raises:
            InputError: ``until`` is not after the time now.
            ProcessError: a process failed; the error names it.
        """
        self.advance(until)
        prepared = replace(self._prepared, spec=self._cluster.spec)
        result = result_of(
            self._config, prepared, self._cluster.workload, self._record(), backend=self._backend
        )
        if not self._open_load:
            requests = result.record.requests
            result.summary["request_rate"] = None
            result.summary["trace"]["arrivals"] = "of processes"
            if len(requests):
                lengths = told_lengths(requests["prompt_len"], requests["output_len"])
                result.summary["trace"] |= lengths
        return result

    def advance(self, until: float | None = None) -> None:
        """Advance the run as `run` does, without a result, for observers during the run.

        Args:
            until: simulated time, s; None: as of `run`.

        Raises:
            InputError: ``until`` is not after the time now.
            ProcessError: a process failed; the error names it.
        """
        cluster, env = self._cluster, self.env
        if until is not None and not until > env.now:
            raise InputError("until", f"{until:g} s", f"above {env.now:g} s, the time now")
        holds = 0 if until is None and self._open_load else 1
        limit = until
        if limit is None:
            limit = cluster.time_limit_s if self._open_load else math.inf
        cluster.open_measured += holds
        try:
            cluster.advance_to(float(limit))
            ended = cluster.open_measured == 0
        finally:
            cluster.open_measured -= holds
        if not ended and limit < math.inf:
            cluster.move(limit)
        elif not ended and cluster.open_measured and self._open_load:
            cluster.check_left(self.cluster.acts)

    @property
    def max_model_len(self) -> int:
        """The longest context, tokens."""
        return self._cluster.spec.max_model_len

    @property
    def next_s(self) -> float:
        """The time of the next event, s; infinite where none is left."""
        return self._cluster.next_s

    def _record(self) -> RunRecord:
        return self.cluster.recorded(self._cluster.record(float(self.env.now), self.cluster.acts))
