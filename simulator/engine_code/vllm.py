"""vLLM's own scheduler and KV manager as the engines of the reference model (`driver`).

Each step is planned as in ``vllm/v1/engine/core.py``: with asynchronous scheduling
(`step_with_batch_queue`) the next step is planned when this one starts, when the output of the one
before has been processed; otherwise when this one has ended (`step`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from eldr_sim.simulator.control.run_inputs import RunInputs
from eldr_sim.simulator.engine_code.driver import (
    EngineBlocks,
    EngineScheduler,
    Part,
    Plan,
    block_key,
    has_queue_order,
    pool_workers,
)
from eldr_sim.simulator.engine_code.vllm_config import (
    load_vllm,
    make_scheduler,
    refuse,
    vllm_config,
)
from eldr_sim.simulator.reference.requests import Request, Sequence
from eldr_sim.simulator.reference.worker import Worker


class VllmBlocks(EngineBlocks):
    """The KV blocks of vLLM's manager."""

    def find(self, key: Any) -> Any | None:
        """Return the cached block of a shared key; None if there is none."""
        manager = self._manager()
        groups = list(range(len(manager.kv_cache_config.kv_cache_groups)))
        return manager.block_pool.get_cached_block(block_hash(key), groups)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold."""
        return float(self._manager().usage)

    def _manager(self) -> Any:
        assert isinstance(self.scheduler, VllmScheduler)
        return self.scheduler.vllm.kv_cache_manager


class VllmScheduler(EngineScheduler):
    """vLLM's scheduler."""

    engine = "vllm"
    config: Any  #: vLLM's configuration of the pool's engines
    window = 0  #: tokens that the sliding windows of the model see

    def __init__(self, worker: Worker, *, only_prompts: bool) -> None:
        super().__init__(worker, only_prompts=only_prompts)
        self.v, spec, pool = load_vllm(), worker.cluster.spec, worker.pool
        self.takes_over = pool.router in worker.cluster.handed_to
        self.vllm = make_scheduler(self.config, spec, pool, self.window)
        if self.vllm.connector is not None:
            self.vllm.connector.fetches = self.loads
        self.kv = VllmBlocks(self, spec.block_size, spec.enable_prefix_caching)
        self.to_load: list[str] = []  #: loads that a step without tokens has begun
        self.sent: set[str] = set()  #: whose blocks have been read,
        self.received: set[str] = set()  #: and whose KV cache is here, since the last output

    # --- requests come and go ---

    def add_request(self, request: Request) -> None:
        """Take a new request, or one with a KV cache that has arrived."""
        if request.kv_here and request in self.ids:
            self.received.add(self.ids[request])
        else:
            super().add_request(request)

    def give(self, name: str, request: Request) -> None:
        """Give vLLM a new request."""
        wanted = 1 if self.only_prompts else request.output_len - request.generated
        self.vllm.add_request(self.v.Request(
            request_id=name, prompt_token_ids=[0] * request.tokens, pooling_params=None,
            sampling_params=self.v.SamplingParams(
                max_tokens=wanted, min_tokens=wanted, ignore_eos=True
            ),
            arrival_time=self.worker.env.now, priority=self.priority_of(request),
            block_hasher=self.hasher(request) if self.kv.caching else None,
        ))  # fmt: skip

    def priority_of(self, request: Request) -> int:
        """Return a whole number that orders requests as their queue keys do."""
        keys = self.worker.cluster.inputs.queue_keys
        if keys is None:
            return 0
        ranks = getattr(self.worker.cluster, "queue_ranks", None)
        if ranks is None:
            ranks = np.unique(keys, return_inverse=True)[1]
            self.worker.cluster.queue_ranks = ranks  # type: ignore[attr-defined]
        return int(ranks[request.number])

    def hasher(self, request: Request) -> Callable[[Any], list[bytes]]:
        """Return what gives vLLM the hashes of a request's full blocks: those that prompts share
        by what they share, the others by the request."""
        size, writers = self.kv.size, self.kv.writers

        def new_hashes(of_vllm: Any) -> list[bytes]:
            numbers = range(len(of_vllm.block_hashes), of_vllm.num_tokens // size)
            block_hashes = [block_hash(block_key(request, i)) for i in numbers]
            for one in block_hashes:
                writers.setdefault(one, request.number)
            return block_hashes

        return new_hashes

    def loads(self, name: str, cached: int) -> bool:
        """Whether the KV cache of a request is loaded from another engine, where ``cached`` tokens
        are here already."""
        request = self.of[name]
        if not self.takes_over or request.source < 0 or request.kv_here:
            return False
        request.decode_cached_tokens = cached
        request.found[self.kv] = cached // self.kv.size
        return True

    def release(self, request: Request) -> None:
        """Say that the blocks of a request have been read; an idle engine frees them at once."""
        name = self.ids.get(request)
        super().release(request)
        connector = self.vllm.connector
        if name is not None and connector is not None and name in connector.held:
            connector.held.discard(name)
            self.sent.add(name)
            if not self.in_flight and not self.vllm.has_unfinished_requests():
                self.process_events()

    def take_out(self, name: str) -> None:
        """Take a request out of vLLM, wherever it is there, and its KV blocks."""
        if name not in self.vllm.requests:
            return
        status = self.v.RequestStatus
        loading = self.vllm.requests[name].status == status.WAITING_FOR_REMOTE_KVS
        self.vllm.finish_requests(name, status.FINISHED_ABORTED)
        if loading and name in self.vllm.requests:  # else its arrival has been processed
            self.received.add(name)

    # --- how things stand ---

    def names_running(self) -> list[str]:
        """Return the requests that have a place in the batch."""
        return [each.request_id for each in self.vllm.running]

    def has(self, name: str) -> bool:
        """Whether vLLM has a request that it has not finished."""
        return name in self.vllm.requests and not self.vllm.requests[name].is_finished()

    def has_unfinished(self) -> bool:
        """Whether vLLM has work, or an arrival or a read of a KV cache to learn of."""
        return bool(self.sent or self.received or self.vllm.has_unfinished_requests())

    # --- a step is planned ---

    def plan(self) -> bool:
        """Plan the next step if none is planned; returns whether there is one."""
        if not self.plans:
            if self.to_load:
                self.load(self.to_load)
                self.to_load = []
            if self.sent or self.received:  # nothing ran that would have brought them
                self.process_events()
        return super().plan()

    def plan_one(self) -> None:
        """Let vLLM schedule a step."""
        self.give_arrived()
        if not self.vllm.has_unfinished_requests():
            return
        output = self.vllm.schedule(throttle_prefills=self.defers)
        loads: list[str] = []
        if self.vllm.connector is not None:
            loads, self.vllm.connector.loading = self.vllm.connector.loading, []
        for name in output.preempted_req_ids or ():
            self.note_preemption(name)
        if not output.num_scheduled_tokens:
            self.vllm.update_from_output(output, self.v.ModelRunnerOutput([], {}))
            if self.in_flight:
                self.to_load += loads
            else:
                self.load(loads)
            return
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        first = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        parts = []
        for name, tokens in output.num_scheduled_tokens.items():
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            samples = not self.vllm.requests[name].is_prefill_chunk
            if name not in self.sequences:
                self.sequences[name] = Sequence(self.of[name], 0, 0, 0)
            done = (computed | first)[name]
            parts.append(Part(name, self.sequences[name], tokens, drafts, samples, done))
        self.plans.append(Plan(output, parts, first, loads))

    def process_events(self) -> None:
        """Let an engine that computes nothing see which KV caches have arrived or been read: it
        makes steps without tokens meanwhile."""
        output = self.vllm.schedule()
        if output.num_scheduled_tokens:
            raise RuntimeError("vLLM schedules tokens in a step that has none")
        self.vllm.update_from_output(
            output, self.v.ModelRunnerOutput([], {}, kv_connector_output=self.events())
        )

    def events(self) -> Any:
        """Return what links have done since the last output."""
        sent, received = self.sent, self.received
        self.sent, self.received = set(), set()
        if not (sent or received):
            return None
        return self.v.KVConnectorOutput(finished_sending=sent, finished_recving=received)

    def load(self, names: Iterable[str]) -> None:
        """Let KV caches come, of requests that have blocks for them."""
        for name in names:
            if name in self.of:
                self.worker.blocks_reserved(self.of[name])

    def block_keys(self, request: Request) -> list[Any]:
        """Return the hashes of the blocks of a request."""
        return self.vllm.requests[self.ids[request]].block_hashes if self.kv.caching else []

    # --- a step has ended ---

    def deliver(self, plan: Plan, sampled: list[list[int]]) -> dict[str, tuple[int, bool]]:
        """Give vLLM the tokens of a step, and the drafts of the next one where it asks for them."""
        names = [part.request_id for part in plan.parts]
        had = {name: self.vllm.requests[name] for name in names if name in self.of}
        before = {name: request.num_output_tokens for name, request in had.items()}
        self.vllm.update_from_output(plan.output, self.v.ModelRunnerOutput(
            names, {name: i for i, name in enumerate(names)}, sampled,
            kv_connector_output=self.events(),
        ))  # fmt: skip
        kept = {
            name: (request.num_output_tokens - before[name], bool(request.is_finished()))
            for name, request in had.items()
        }
        drafting = [
            part for part in plan.parts
            if part.samples and part.sequence.drafts and not kept.get(part.request_id, (0, True))[1]
        ]  # fmt: skip
        if drafting and not self.ahead:
            drafts = [[0] * part.sequence.drafts for part in drafting]
            self.vllm.update_draft_token_ids(
                self.v.DraftTokenIds([part.request_id for part in drafting], drafts)
            )
        return kept

    def leave(self, part: Part) -> None:
        """Forget a request that has ended here; the blocks of one that is handed over stay."""
        connector = self.vllm.connector
        if connector is None or part.request_id not in connector.held:
            super().leave(part)
            return
        if part.sequence in self.decoding:
            self.decoding.remove(part.sequence)
        self.of.pop(part.request_id)
        self.sequences.pop(part.request_id)


def block_hash(key: Any) -> bytes:
    """Return what vLLM takes for the hash of a block."""
    return repr(key).encode()


def version() -> str:
    """Return the version of the vLLM that is installed."""
    return str(load_vllm().version)


def workers(inputs: RunInputs) -> Mapping[str, type[Worker]]:
    """Return the class of each pool's workers, with vLLM's scheduler.

    Raises InputError where vLLM is not installed, and for what it is not given here."""
    spec, window = inputs.spec, inputs.shards[0].sliding_window
    load_vllm()
    refuse(spec, has_queue_order(inputs))
    return pool_workers(spec, VllmScheduler, lambda pool, takes_over: {
        "config": vllm_config(spec, pool, takes_over), "window": window,
    })  # fmt: skip
