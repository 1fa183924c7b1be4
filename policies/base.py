"""What a routing policy is, what it may see, and what it is built from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_sim.errors import InputError

if TYPE_CHECKING:
    from eldr_sim.kernel_profiles.kernels.all_to_all import AllToAll
    from eldr_sim.kernel_profiles.kernels.flops import PrefillWork
    from eldr_sim.kernel_profiles.steps.cost_tables import RankMoE, StepCost
    from eldr_sim.policies.eldr.artifact import RoutingArtifact
    from eldr_sim.policies.eldr.signature import FitOptions
    from eldr_sim.policies.placement.base import Placement
    from eldr_sim.traces.routing.calibration import CalibrationSet


class Workers(NamedTuple):
    """The workers of a pool as their router sees them: a column each, shape [n_workers].

    The router counts ``loads`` itself. The other columns are what the engines publish, as of
    ``signals_s``: vLLM's metrics ``num_requests_waiting``, ``num_requests_running`` and
    ``kv_cache_usage_perc``, and tokens, which vLLM's data-parallel balancer counts in requests.

    Attributes
    ----------
    loads
        int64: requests in flight, from the router's decision until it hears of their end.
    waiting, running
        int64: requests in the waiting queue, those whose KV cache is on its way among them, and
        requests that compute or decode.
    waiting_tokens, running_tokens
        int64: tokens of the prompts (after preemption: contexts) that wait, and of the contexts of
        running requests.
    kv_usage
        float64: share of the KV blocks that requests hold, 0 to 1.
    healthy
        bool: whether the worker answers.
    now_s, signals_s
        The router's clock, and when the engines published what the columns say, s.
    """

    loads: NDArray[np.int64]
    waiting: NDArray[np.int64]
    running: NDArray[np.int64]
    waiting_tokens: NDArray[np.int64]
    running_tokens: NDArray[np.int64]
    kv_usage: NDArray[np.float64]
    healthy: NDArray[np.bool_]
    now_s: float = 0.0
    signals_s: float = 0.0

    @classmethod
    def idle(cls, loads: ArrayLike) -> Workers:
        """Return healthy workers with these ``loads`` whose engines report nothing."""
        counted = np.asarray(loads, np.int64)
        n = len(counted)
        a, b, c, d = np.zeros((4, n), np.int64)
        return cls(counted, a, b, c, d, kv_usage=np.zeros(n), healthy=np.ones(n, np.bool_))

    def usable(self) -> list[int]:
        """Return the indices of the healthy workers."""
        found: list[int] = np.flatnonzero(self.healthy).tolist()
        return found


class RequestInfo(NamedTuple):
    """A request as the router sees it at the moment of a decision.

    Attributes
    ----------
    request_id
        Number of the request within the run.
    prompt_len
        Prompt length in tokens.
    domain
        Oracle domain label, an index into ``CalibrationSet.domains``. No real router has it: only
        ``DomainPolicy`` reads it.
    prefix_hash
        Hashes of the prompt's blocks in order, each over its own tokens and all before them (as
        vLLM chains its block hashes); the last block may be partial. Empty where none is known.
    signature
        Prefill counts, shape [L, E]: prompt tokens that chose expert ``e`` at layer ``l``; or the
        summed gate scores that the policy's ``signature_score`` names. ``None`` before prefill has
        ended, and where the routing trace is decode-only.
    signature_id
        Names the content of ``signature``: two requests with the same id have equal counts, so
        that a policy may reuse what it computed. ``None``: nothing is promised.
    session
        Names the conversation or the user that the request belongs to; ``None`` where unknown.
    max_tokens
        Output tokens that the client has asked for; ``None`` where it has set no limit.
    """

    request_id: int
    prompt_len: int
    domain: int
    prefix_hash: Sequence[int] = ()
    signature: NDArray[Any] | None = None
    signature_id: int | None = None
    session: int | str | None = None
    max_tokens: int | None = None


@runtime_checkable
class DecodePolicy(Protocol):
    """Chooses the decode worker of a request when its prefill has ended.

    A policy whose attribute ``reads_signature`` is true makes the prefill workers record signatures
    and pays for it (ELDR Table 1). One whose attribute ``signature_score`` is ``"prob"`` or
    ``"logit"`` gets the gate's scores summed over the prompt as the request's signature, in the
    place of counts.
    """

    name: str

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return the index of the decode worker; None to hold the request.

        A held request is asked for again, in the order of arrival among those held, when the
        router hears of an end or of new signals.

        Parameters
        ----------
        request
            The request; ``signature`` is set.
        workers
            The decode workers; ``loads`` are in-flight decode requests, from dispatch to
            completion, as counted at the router (ELDR Sec. 4.3.2).
        """
        ...


@runtime_checkable
class CompletionListener(Protocol):
    """What a decode policy may be besides, if it keeps track of the requests on each worker.

    As SGLang's router calls ``on_request_complete`` of its policies.
    """

    def on_complete(self, request_id: int, worker: int) -> None:
        """Take note that a request has left the worker that ``select`` chose for it.

        Called when the router hears of it, together with the fall of the worker's load: once for
        every request that the policy has placed, unless the run ends before.
        """
        ...


@runtime_checkable
class PrefillPolicy(Protocol):
    """Chooses the prefill worker of a request when it arrives.

    One whose attribute ``in_order`` is true serves in the order of arrival: while it holds a
    request, it is not asked for those behind.
    """

    name: str

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return the index of the prefill worker; None to hold the request.

        Parameters
        ----------
        request
            The request; ``signature`` is ``None``.
        workers
            The prefill workers; ``loads`` are requests that are queued or running there.
        """
        ...


@runtime_checkable
class PrefillListener(Protocol):
    """What a prefill policy may be besides, if it keeps track of what the engines hold and do.

    As vLLM's KV cache events, and the tokens that an engine has scheduled. Both are told before the
    policy decides next, for each worker in the order in which they happened; where engines publish
    their signals now and then, before the first decision after each publication.
    """

    def on_blocks(self, worker: int, stored: Sequence[int], evicted: Sequence[int]) -> None:
        """Take note of the prompt blocks that a worker's prefix cache has got and lost.

        Parameters
        ----------
        worker
            Index of the worker.
        stored, evicted
            Hashes as in ``RequestInfo.prefix_hash``, full blocks only: of blocks that it holds and
            did not hold before, and of those that it holds no more. A block in both has come and
            gone.
        """
        ...

    def on_tokens(self, worker: int, tokens: int) -> None:
        """Take note that a worker has computed this many prompt tokens."""
        ...


@dataclass(frozen=True)
class PolicyContext:
    """All that a policy may be built from; a policy takes what it needs.

    Attributes
    ----------
    n_workers
        Workers to choose from, at least 1.
    group_size
        Neighbouring workers that share experts, and so one union of them: a divisor of
        ``n_workers``. Locality is between such groups.
    rng
        Random stream of the policy; a deterministic policy leaves it alone.
    calibration
        The calibration requests or a function that returns them, called only by policies that
        need them.
    artifact
        ELDR's offline fit, or a function that makes it with these options and so many clusters;
        called only by policies that need it.
    prefix_block_tokens
        Tokens covered by one entry of ``RequestInfo.prefix_hash``; vLLM's KV block by default.
    step_times
        Step times of the model on a decode worker.
    rank_moe
        Times of a MoE layer on a GPU that shares experts with others.
    prefill_work
        Function that returns what prompts cost a prefill worker and the work that it needs at
        once, called only by policies that need it.
    all_to_all
        Times of dispatch and combine between such GPUs.
    placements
        Function that returns where the experts of each group of decode workers lie, called only by
        policies that need it; None where every GPU holds all.
    future
        The future, which no real router has, for oracles only: a function of ``request_id`` that
        returns the share of the request's decode steps to come in which it will select each
        expert, float64 [MoE layers of the model, E].
    computes_prompts
        Whether the workers compute prompts beside their decode batches (co-located ones).

    Raises
    ------
    InputError
        If ``n_workers``, ``group_size`` or ``prefix_block_tokens`` is out of range.
    """

    n_workers: int
    rng: np.random.Generator
    calibration: CalibrationSet | Callable[[], CalibrationSet] | None = None
    artifact: RoutingArtifact | Callable[[FitOptions, int], RoutingArtifact] | None = None
    prefix_block_tokens: int = 16
    step_times: StepCost | None = None
    rank_moe: RankMoE | None = None
    prefill_work: Callable[[], PrefillWork] | None = None
    all_to_all: AllToAll | None = None
    placements: Callable[[], Sequence[Placement]] | None = None
    future: Callable[[int], NDArray[np.float64]] | None = None
    group_size: int = 1
    computes_prompts: bool = False

    def __post_init__(self) -> None:
        if self.n_workers < 1:
            raise InputError("n_workers", f"{self.n_workers} workers", "1 or more")
        if self.group_size < 1 or self.n_workers % self.group_size:
            problem = f"{self.n_workers} workers in groups of {self.group_size}"
            raise InputError("group_size", problem, "a divisor of the workers")
        if self.prefix_block_tokens < 1:
            raise InputError("prefix_block_tokens", f"{self.prefix_block_tokens}", "1 or more")

    @property
    def n_groups(self) -> int:
        """Groups of workers that share experts; as many as workers where none do."""
        return self.n_workers // self.group_size

    def members(self, groups: Iterable[int]) -> list[int]:
        """Return the workers of some groups, group by group."""
        size = self.group_size
        return [worker for group in groups for worker in range(group * size, (group + 1) * size)]

    def require_calibration(self, policy: str) -> CalibrationSet:
        """Return the calibration set; ``InputError`` naming ``policy`` if there is none."""
        if self.calibration is None:
            raise InputError(policy, "this policy needs calibration requests and none were given")
        return self.calibration() if callable(self.calibration) else self.calibration

    def require_step_times(self, policy: str) -> StepCost:
        """Return the step times; ``InputError`` naming ``policy`` if there are none."""
        if self.step_times is None:
            raise InputError(policy, "this policy needs decode step times and none were given")
        return self.step_times

    def require_prefill_work(self, policy: str) -> PrefillWork:
        """Return what prompts cost; ``InputError`` naming ``policy`` if that is not known."""
        if self.prefill_work is None:
            raise InputError(policy, "this policy needs the work of prompts and none was given")
        return self.prefill_work()

    def require_future(self, policy: str) -> Callable[[int], NDArray[np.float64]]:
        """Return the future; ``InputError`` naming ``policy`` if there is none."""
        if self.future is None:
            raise InputError(policy, "this oracle needs the future experts and none were given")
        return self.future
