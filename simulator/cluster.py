"""The cluster: client, routers, prefill workers, transfers and decode workers on one clock."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.step_time import StepTimeModel
from eldr_sim.policies.base import (
    CompletionListener,
    DecodePolicy,
    PrefillPolicy,
    RequestInfo,
)
from eldr_sim.simulator import request as outcomes
from eldr_sim.simulator.clock import Clock
from eldr_sim.simulator.decode import DecodePool
from eldr_sim.simulator.prefill import PrefillWorker
from eldr_sim.simulator.prefix_cache import Prompt
from eldr_sim.simulator.replay import Replay, prompt_experts
from eldr_sim.simulator.request import Request
from eldr_sim.simulator.transfer import TransferModel, TransferNetwork
from eldr_sim.traces.prompts import Ranges, clip_ranges
from eldr_sim.traces.workload import Workload

_NEVER = float("inf")


@dataclass(frozen=True)
class EngineSpec:
    """Step times and engine settings of each worker of a pool."""

    step_time: StepTimeModel
    max_num_seqs: int
    max_num_batched_tokens: int
    n_blocks: int


@dataclass(frozen=True)
class ClusterSpec:
    """Size and engine settings of a cluster; see :class:`~eldr_sim.simulator.config.RunConfig`.

    Without prefill workers the ``n_decode`` workers are co-located: they compute the prompts too.
    """

    n_prefill: int
    n_decode: int
    prefill: EngineSpec
    decode: EngineSpec
    max_model_len: int
    block_size: int
    transfer: TransferModel
    load_report_delay_s: float
    max_concurrency: int | None
    enable_prefix_caching: bool = True
    async_scheduling: bool = False
    #: What signatures cost, s: per prefill step, and per request at the router (ELDR Table 1).
    capture_s: float = 0.0
    routing_s: float = 0.0
    #: What a request's way through the router takes longer for each token of its prompt, s.
    routing_token_s: float = 0.0


@dataclass(frozen=True)
class RunRecord:
    """What happened: every request, every step.

    ``decode_steps`` are records of ``kernel.STEP``; ``prefill_steps`` holds one list a worker of
    (start s, end s, requests, tokens); ``window`` is the measured window, s. ``first_token_s`` is
    indexed by request and negative where there was no token.
    """

    requests: list[Request]
    first_token_s: NDArray[np.float64]
    decode_steps: NDArray[np.void]
    prefill_steps: list[list[tuple[float, float, int, int]]]
    preempted_gaps: list[tuple[float, float]]
    window: tuple[float, float]
    end_s: float


class Cluster:
    """One run of a cluster over a workload.

    Parameters
    ----------
    spec, model
        The cluster, and the part of its model on one GPU of a worker.
    workload, replay
        The requests, and the bit sets of the windows they replay.
    signatures
        Gives the prefill counts ``[layers, experts]`` of the trace rows that a prompt replays
        (summed gate scores where the decode policy asks for them), and a number that stands for
        them: the routers' view of a prompt.
    prefill_policy, decode_policy
        The two routers; co-located workers need the second only.
    window
        Requests that arrive in this window, s, are measured.
    time_limit_s
        Simulated time after which the run gives the rest up as unserved.
    expert_masks
        The experts on each expert-parallel GPU of each decode worker, see
        :func:`~eldr_sim.simulator.replay.rank_masks`; None where there is one such rank.
    prompt_replay
        The bit sets of the prompts; co-located workers need them, and prefill workers that have
        them take the time of the distinct experts of their steps.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        model: ModelDims,
        workload: Workload,
        replay: Replay,
        signatures: Callable[[Ranges], tuple[int, NDArray[Any] | None]],
        prefill_policy: PrefillPolicy | None,
        decode_policy: DecodePolicy,
        window: tuple[float, float],
        time_limit_s: float,
        expert_masks: NDArray[np.uint64] | None = None,
        prompt_replay: Replay | None = None,
    ) -> None:
        self.env = Clock()
        self.spec = spec
        self.model = model
        self.workload = workload
        self.signatures = signatures
        self.prefill_policy = prefill_policy
        self.decode_policy = decode_policy
        self._listener = decode_policy if isinstance(decode_policy, CompletionListener) else None
        self.window = window
        self.time_limit_s = time_limit_s
        self.requests = _requests(workload, replay, window)
        self.open_measured = sum(request.measured for request in self.requests)
        self.prefill_loads = np.zeros(spec.n_prefill, np.int64)
        self.decode_loads = np.zeros(spec.n_decode, np.int64)
        self.network = TransferNetwork(self.env, spec.transfer)
        self._replay, self._prompt_replay = replay, prompt_replay
        experts = None if prompt_replay is None else self._context_experts
        self.prefill_workers = [
            PrefillWorker(
                self.env,
                index,
                step_time=spec.prefill.step_time,
                max_num_batched_tokens=spec.prefill.max_num_batched_tokens,
                max_num_seqs=spec.prefill.max_num_seqs,
                block_size=spec.block_size,
                n_blocks=spec.prefill.n_blocks,
                on_prefilled=self._hand_off,
                capture_s=spec.capture_s,
                prompt_of=self._prompt,
                prompt_experts=experts,
            )
            for index in range(spec.n_prefill)
        ]
        self.pool = DecodePool(
            self.env,
            n_workers=spec.n_decode,
            max_num_seqs=spec.decode.max_num_seqs,
            block_size=spec.block_size,
            n_blocks=spec.decode.n_blocks,
            max_num_batched_tokens=spec.decode.max_num_batched_tokens,
            step_time=spec.decode.step_time,
            bits=replay.bits,
            n_requests=len(self.requests),
            start_transfer=self._transfer,
            on_finish=self._complete,
            expert_masks=expert_masks,
            async_scheduling=spec.async_scheduling,
            prompt_experts=experts if spec.n_prefill == 0 else None,
        )
        self.pool.requests = self.requests
        self._in_flight = 0
        self._at_client: deque[Request] = deque()
        self._arrived = 0

    def run(self, progress: Callable[[float], None] | None = None) -> RunRecord:
        """Run until every measured request has ended, or the time limit.

        ``progress`` is called now and then with the share of measured requests that have ended.
        """
        env, pool = self.env, self.pool
        total = max(1, self.open_measured)
        if self.requests:
            env.at(self.requests[0].arrival_s, self._arrive)
        gc.freeze()  # what exists now outlives the run: the collector need not walk it again
        try:
            self._run_events(total, progress)
        finally:
            gc.unfreeze()
        if progress is not None:
            progress(1.0)
        reason = outcomes.OVERLOADED if self.open_measured > 0 else outcomes.AFTER_WINDOW
        for request in self.requests[: self._arrived]:
            if not request.outcome:
                request.outcome = reason
        return RunRecord(
            requests=self.requests[: self._arrived],
            first_token_s=pool.token_times["first"],
            decode_steps=pool.steps(),
            prefill_steps=[worker.steps for worker in self.prefill_workers],
            preempted_gaps=pool.preempted_gaps,
            window=self.window,
            end_s=env.now,
        )

    def _run_events(self, total: int, progress: Callable[[float], None] | None) -> None:
        """Run until the measured requests, ``total`` of them, have ended, or the time limit."""
        env, pool = self.env, self.pool
        events = 0
        while self.open_measured > 0 and env.now <= self.time_limit_s:
            until = env.peek()
            if until > pool.next_start:
                pool.advance(until)
            if until == _NEVER and env.peek() == _NEVER:
                raise RuntimeError(
                    f"no event left at {env.now:.3f} s with {self.open_measured} requests open"
                )
            env.step()
            events += 1
            if progress is not None and events % 4096 == 0:
                progress(1.0 - self.open_measured / total)

    # --- the life of a request ---

    def _arrive(self, _event: object) -> None:
        request = self.requests[self._arrived]
        self._arrived += 1
        if self._arrived < len(self.requests):
            self.env.at(self.requests[self._arrived].arrival_s, self._arrive)
        self._at_client.append(request)
        self._send()

    def _send(self) -> None:
        limit = self.spec.max_concurrency
        while self._at_client and (limit is None or self._in_flight < limit):
            request = self._at_client.popleft()
            request.sent_s = self.env.now
            reason = self._refusal(request)
            if reason:
                self._end(request, reason)
                continue
            self._in_flight += 1
            if self.prefill_policy is None:
                self._route(request, self._info(request))
                continue
            worker = self.prefill_policy.select(self._info(request), self.prefill_loads)
            self.prefill_loads[worker] += 1
            self.prefill_workers[worker].enqueue(request)

    def _refusal(self, request: Request) -> str:
        """Say why a request can never be served; empty if it can."""
        spec, tokens = self.spec, request.prompt_len + request.output_len
        if tokens > spec.max_model_len:
            return outcomes.TOO_LONG
        if (
            request.prompt_len > spec.prefill.n_blocks * spec.block_size
            or tokens > spec.decode.n_blocks * spec.block_size
        ):
            return outcomes.NO_KV_ROOM
        return ""

    def _info(
        self,
        request: Request,
        signature: NDArray[Any] | None = None,
        signature_id: int | None = None,
    ) -> RequestInfo:
        start, end = self.workload.prefix_indptr[request.index : request.index + 2]
        return RequestInfo(
            request_id=request.index,
            prompt_len=request.prompt_len,
            domain=request.domain,
            prefix_hash=self.workload.prefix_hash[start:end].tolist() if end > start else (),
            signature=signature,
            signature_id=signature_id,
        )

    def _prompt(self, request: Request) -> Prompt:
        """Return what a prefill worker's cache knows of a prompt."""
        workload, caching = self.workload, self.spec.enable_prefix_caching
        if workload.prefix_block_tokens == 0:
            ranges = ((request.trace_request, 0, request.prompt_len),)
            return Prompt(request.prompt_len, (), ranges)
        return Prompt(
            request.prompt_len,
            workload.block_hashes(request.index, self.spec.block_size) if caching else (),
            workload.prompt_ranges(request.index),
        )

    def _hand_off(self, request: Request) -> None:
        self._report(self.prefill_loads, request.prefill_worker)
        delay_s = self.spec.routing_s + self.spec.routing_token_s * request.prompt_len
        if delay_s == 0.0:
            self._dispatch(request)
        else:
            self.env.at(self.env.now + delay_s, lambda _event: self._dispatch(request))

    def _dispatch(self, request: Request) -> None:
        assert request.block_table is not None
        number, counts = self.signatures(request.block_table.ranges(self.spec.block_size))
        self._route(request, self._info(request, counts, number))

    def _route(self, request: Request, info: RequestInfo) -> None:
        """Send a request to the decode or co-located worker that the policy picks."""
        worker = self.decode_policy.select(info, self.decode_loads)
        self.decode_loads[worker] += 1
        request.decode_worker = worker
        self.pool.workers[worker].enqueue(request)

    def _context_experts(self, request: Request, start: int, stop: int) -> NDArray[np.uint64]:
        """Return the experts of some tokens of a request's context, prompt and generated ones."""
        assert self._prompt_replay is not None
        ranges = self.workload.prompt_ranges(request.index)
        end = min(stop, request.prompt_len)
        union = prompt_experts(self._prompt_replay, tuple(clip_ranges(ranges, start, end)))
        first, span = request.window_row, request.window_len
        for position in range(max(start, request.prompt_len), stop):
            # The window begins with the last prompt token.
            row = (request.window_offset + position - request.prompt_len + 1) % span
            union |= self._replay.bits[first + row]
        return union

    def _transfer(self, request: Request) -> None:
        request.transfer_start_s = self.env.now
        model, spec = self.model, self.spec
        blocks = -(-request.prompt_len // spec.block_size)

        def arrived() -> None:
            request.transfer_end_s = self.env.now
            self.prefill_workers[request.prefill_worker].release(request)
            self.pool.workers[request.decode_worker].kv_arrived(request)

        # NIXL moves whole blocks, one descriptor a block and KV tensor. The GPUs of a worker move
        # their parts at the same time, each over its own NIC: one of them stands for all.
        self.network.start(
            request.prefill_worker,
            request.decode_worker,
            blocks * spec.block_size * model.kv_bytes_per_token,
            blocks * model.n_kv_tensors,
            arrived,
        )

    def _complete(self, request: Request) -> None:
        listener, index, worker = self._listener, request.index, request.decode_worker
        on_report = None if listener is None else lambda: listener.on_complete(index, worker)
        self._report(self.decode_loads, worker, on_report)
        self._in_flight -= 1
        self._end(request, outcomes.COMPLETED)
        self._send()

    def _end(self, request: Request, outcome: str) -> None:
        request.outcome = outcome
        self.open_measured -= request.measured

    def _report(
        self, loads: NDArray[np.int64], worker: int, on_report: Callable[[], None] | None = None
    ) -> None:
        """Tell a router that a worker has one request less, as late as the configuration says."""

        def arrived(_event: object = None) -> None:
            loads[worker] -= 1
            if on_report is not None:
                on_report()

        if self.spec.load_report_delay_s == 0.0:
            arrived()
        else:
            self.env.at(self.env.now + self.spec.load_report_delay_s, arrived)


def _requests(workload: Workload, replay: Replay, window: tuple[float, float]) -> list[Request]:
    measured = (workload.arrival_s >= window[0]) & (workload.arrival_s < window[1])
    columns = (
        workload.arrival_s,
        workload.prompt_len,
        workload.output_len,
        workload.domain,
        workload.trace_request,
        replay.first_row[workload.decode_request],
        replay.length[workload.decode_request],
        workload.replay_offset,
        measured,
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [Request(index, *row) for index, row in enumerate(rows)]
