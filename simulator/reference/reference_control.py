"""What users' SimPy processes may do to the reference model: the calls of `control.Control`."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.simulator.control.control_api import Control, Pool, RequestOutcome, Worker
from eldr_sim.simulator.reference.experts import Experts
from eldr_sim.simulator.reference.front_end import FrontEnd
from eldr_sim.simulator.reference.reference_cluster import ReferenceCluster
from eldr_sim.simulator.reference.requests import Request, make_requests
from eldr_sim.simulator.setup.fault_plan import FaultPlan


class ReferencePool(Pool):
    """The workers of a pool as they are now."""

    def __init__(self, cluster: ReferenceCluster, number: int) -> None:
        pool, self._model = cluster.spec.pools[number], cluster
        workers = cluster.spec.workers_of(pool.name)
        self._size, self._engines = pool.engine.worker_size, slice(workers.start, workers.stop)
        self.name, self._router = pool.name, cluster.routers[pool.router]
        self._at_router = slice(
            *(at - self._router.own.start for at in (workers.start, workers.stop))
        )

    @property
    def serving(self) -> list[Worker]:
        """The workers that routers may choose."""
        healthy = self._router.healthy[self._at_router][:: self._size]
        return [Worker(self.name, number) for number in np.flatnonzero(healthy).tolist()]

    @property
    def waiting(self) -> int:
        """Requests that engines have and that do not run."""
        return sum(each.scheduler.signals()[0] for each in self._model.workers[self._engines])

    @property
    def running(self) -> int:
        """Requests that run."""
        return sum(each.scheduler.signals()[1] for each in self._model.workers[self._engines])

    @property
    def loads(self) -> list[int]:
        """Requests in flight to each engine, as the router knows."""
        loads: list[int] = self._router.loads[self._at_router].tolist()
        return loads


class ReferenceControl(Control):
    """`Control` of the reference model."""

    def __init__(self, cluster: ReferenceCluster, plan: FaultPlan, arrivals: bool = True) -> None:
        self._model = cluster
        model: Any = cluster
        super().__init__(model, plan, arrivals)

    def _bind(self) -> None:
        pass

    def _watch(self, number: int) -> None:
        self._model.requests[number].watched = True

    def submit(
        self,
        prompt_len: int | None = None,
        output_len: int | None = None,
        prefix: Sequence[Hashable] = (),
    ) -> int:
        """Send the next request of the workload, without a waiting client; returns its number."""
        if len(prefix):
            raise InputError("prefix", "the SimPy backend takes none", "backend compiled")
        model, request = self._model, self._next()
        self._set_lengths(request, prompt_len, output_len)
        start, end = model.window
        request.arrival_s = model.workload.arrival_s[request.number] = float(model.env.now)
        request.measured = start <= request.arrival_s < end
        model.open_measured += request.measured
        model.arrived.append(request)
        self._let_leave(request.number)
        return request.number

    def coming(self) -> tuple[int, int]:
        """Return the lengths of prompt and output of the workload's next request."""
        request = self._next()
        return request.prompt_len, request.output_len

    def _next(self) -> Request:
        """Return the next request; when all have come they begin again, with their own prefixes."""
        model, number = self._model, len(self._model.arrived)
        if number == len(model.requests):
            workload, keys = model.workload.repeated(2), model.inputs.queue_keys
            prompts = model.inputs.prompts
            if prompts is not None and prompts.prefix_block_tokens:
                prompts = prompts._replace(
                    prefix_indptr=workload.prefix_indptr, prefix_trace_request=workload.prefix_text
                )
            keys = None if keys is None else np.resize(keys, len(workload))
            inputs = replace(model.inputs, workload=workload, prompts=prompts, queue_keys=keys)
            model.inputs, model.workload, model.experts = inputs, workload, Experts(inputs)
            model.requests += make_requests(inputs)[number:]
            if model.front_end is not None and model.spec.front_end is not None:
                servers = model.front_end.servers
                model.front_end = FrontEnd(model, model.spec.front_end, workload.prompt_len)
                model.front_end.servers = servers
        return model.requests[number]

    def _set_lengths(
        self, request: Request, prompt_len: int | None, output_len: int | None
    ) -> None:
        """Give a request other lengths; raises InputError as `growth.set_lengths`."""
        model, keys = self._model, self._model.inputs.queue_keys
        for name, tokens in {"prompt_len": prompt_len, "output_len": output_len}.items():
            if tokens is None:
                continue
            if tokens < 1:
                raise InputError(name, f"{tokens}", "1 or more tokens")
            if name == "prompt_len" and model.workload.prefix_block_tokens:
                raise InputError(name, "the workload's prompts share prefixes", "its own lengths")
            if keys is not None and keys.any():
                raise InputError(name, "the queue order uses the workload's lengths", "fcfs")
            getattr(model.workload, name)[request.number] = tokens
            setattr(request, name, tokens)
        context = np.array([request.prompt_len + request.output_len])
        request.window_blocks = int(model.spec.windows.of(context, model.spec.block_size)[0])
        front = model.front_end
        if prompt_len is not None and front is not None and model.spec.front_end is not None:
            front_end = FrontEnd(model, model.spec.front_end, np.array([prompt_len], np.int32))
            front.seconds[request.number] = front_end.seconds[0]

    @property
    def requests(self) -> Any:
        """All requests, by their numbers: `reference.requests.Request`."""
        return self._model.requests

    def generating(self) -> Iterator[tuple[float, Any, Any]]:
        """Yield of each engine with a batch when its last step ends or has ended, s, and the batch:
        the numbers of its requests, and the tokens that they have got then."""
        for worker in self._model.workers:
            if worker.pool.decodes and (batch := worker.scheduler.decoding):
                numbers = np.array([sequence.request.number for sequence in batch])
                got = np.array([sequence.request.generated for sequence in batch])
                yield worker.step_end, numbers, got

    def engines(self) -> list[tuple[int, int, float]]:
        """Return of each engine the requests that run and that wait, and its share of KV in use."""
        told = [worker.scheduler.signals() for worker in self._model.workers]
        return [(running, waiting, usage) for waiting, running, _, _, usage in told]

    def kv_blocks(self) -> list[int]:
        """Return the KV blocks of each engine."""
        return [pool.engine.n_blocks for pool in self._model.pool_of]

    def pool(self, name: str) -> Pool:
        """Return a pool: ``prefill``, ``decode`` (the co-located workers too), or a file's."""
        names = self._model.spec.names
        if name not in names:
            raise InputError("pool", repr(name), ", ".join(names))
        return ReferencePool(self._model, names.index(name))

    def _ended(self, number: int) -> None:
        request = self._model.requests[number]
        times = request.sent_s, request.first_token_s, request.finish_s
        told = [time if time >= 0.0 else math.nan for time in times]
        lengths = request.prompt_len, request.output_len
        self._waited.pop(number).succeed(RequestOutcome(number, request.outcome, *lengths, *told))
