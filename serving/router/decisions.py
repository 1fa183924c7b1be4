"""A router over live engines: a policy object of the simulator, and what it sees of them."""

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.policies.base import PolicyContext, RequestInfo, RouterPolicy, Workers
from eldr_sim.policies.registry import decode_policy
from eldr_sim.serving.router.kv_events import CachedPrefixes
from eldr_sim.traces.streams import stream

_LOG = logging.getLogger(__name__)


class EngineSignals(NamedTuple):
    """The columns of :class:`~eldr_sim.policies.base.Workers` that an engine knows."""

    waiting: int  #: requests in the waiting queue (``vllm:num_requests_waiting``)
    running: int  #: running requests (``vllm:num_requests_running``)
    kv_usage: float  #: share of the KV blocks in use, 0 to 1 (``vllm:kv_cache_usage_perc``)
    #: Tokens of the blocks in use: the usage of all that ``vllm:cache_config_info`` names.
    kv_tokens: int


class NoEngine(Exception):
    """No engine that a request may go to is healthy."""


class Router:
    """Sends requests to engines and counts those in flight, as `cluster.CompiledCluster` does.

    ``prefixes``: what the engines' caches hold, for a policy that reads it. ``workers``: what the
    policy sees: ``loads`` from `dispatch` to `complete`, ``healthy`` as of `set_health`, the rest
    as of `publish`."""

    def __init__(
        self, policy: RouterPolicy, n_engines: int, prefixes: CachedPrefixes | None = None
    ) -> None:
        self.workers = Workers.idle(np.zeros(n_engines, np.int64))
        self._healthy = self.workers.usable()
        self._policy = policy
        self.prefixes = prefixes
        self._listener = policy if policy.needs.ends else None
        self._prompts: list[dict[int, int]] = [{} for _ in range(n_engines)]  # in flight, in order
        self._held: list[tuple[RequestInfo, Collection[int], asyncio.Future[int]]] = []

    @property
    def n_held(self) -> int:
        """Requests that the policy holds."""
        return len(self._held)

    def usable(self, without: Collection[int] = ()) -> list[int]:
        """Return the healthy engines but for some."""
        if not without:
            return self._healthy
        return [engine for engine in self._healthy if engine not in without]

    def dispatch(self, request: RequestInfo, without: Collection[int] = ()) -> int | None:
        """Return the index of the engine that gets a request; None if the policy holds it. Raises
        NoEngine if none is left but ``without``, which the policy sees as unhealthy; where it names
        one of these, the least loaded of the others stands in."""
        usable = self.usable(without)
        if not usable:
            raise NoEngine
        view = self.workers._replace(now_s=time.monotonic())
        if without:
            healthy = view.healthy.copy()
            healthy[list(without)] = False
            view = view._replace(healthy=healthy)
        if self.prefixes is not None:
            request = request._replace(prompt_len=max(1, request.prompt_len))
            matched = self.prefixes.matched(request.prefix_hash, request.prompt_len)
            view = view._replace(matched=matched)
        try:
            engine = self._policy.select(request, view)
        except InputError:
            raise
        except Exception as error:  # of any kind: a policy may be the user's
            what = f"{self._policy.name!r} failed: {type(error).__name__}: {error}"
            raise InputError("policy", what) from error
        if engine is None:
            return None
        if engine not in usable:
            engine = min(usable, key=lambda other: int(self.workers.loads[other]))
        self.workers.loads[engine] += 1
        self._prompts[engine][request.request_id] = request.prompt_len
        return engine

    async def route(self, request: RequestInfo, without: Collection[int] = ()) -> int:
        """Return the index of the engine that gets a request, as soon as the policy names one.
        Raises NoEngine if no engine is left, at once or while the policy holds the request."""
        engine = self.dispatch(request, without)
        return await self.hold(request, without) if engine is None else engine

    async def hold(self, request: RequestInfo, without: Collection[int] = ()) -> int:
        """Return the engine of a request that the policy has just held; raises NoEngine."""
        placed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._held.append((request, without, placed))
        try:
            return await placed
        except asyncio.CancelledError:  # its client has left
            self._held = [held for held in self._held if held[2] is not placed]
            if placed.done() and not placed.cancelled() and placed.exception() is None:
                self.complete(request.request_id, placed.result())
            raise

    def complete(self, request_id: int, engine: int) -> None:
        """Take note that an engine is done with a request (``RequestInfo.request_id``)."""
        self.workers.loads[engine] -= 1
        del self._prompts[engine][request_id]
        try:
            if self._listener is not None:
                self._listener.on_complete(request_id, engine)
        except Exception:  # a policy may be the user's; the request has its answer
            _LOG.exception("policy %r failed when a request ended", self._policy.name)
        finally:
            self._ask_again()

    def set_health(self, engine: int, healthy: bool) -> None:
        """Take note that an engine answers, or no longer does."""
        self.workers.healthy[engine] = healthy
        self._healthy = self.workers.usable()
        self._ask_again()

    def publish(self, signals: Sequence[EngineSignals | None]) -> None:
        """Note what the engines publish, or None. vLLM says no tokens of its waiting queue: they
        are the prompts sent last, as many as wait."""
        workers = self.workers
        for engine, signal in enumerate(signals):
            if signal is None:
                continue
            workers.waiting[engine], workers.running[engine] = signal.waiting, signal.running
            workers.kv_usage[engine] = signal.kv_usage
            workers.running_tokens[engine] = signal.kv_tokens
            last = list(self._prompts[engine].values())[-signal.waiting :]
            workers.waiting_tokens[engine] = sum(last) if signal.waiting else 0
        self.workers = workers._replace(signals_s=time.monotonic())
        self._ask_again()

    def _ask_again(self) -> None:
        """Ask the policy about what it holds, the first that came first."""
        if not self._held:
            return
        held, self._held = self._held, []
        for request, without, placed in held:
            if placed.done():
                continue
            try:
                engine = self.dispatch(request, without)
            except (NoEngine, InputError) as error:  # this request's, not of who is asking
                placed.set_exception(error)
                continue
            if engine is None:
                self._held.append((request, without, placed))
            else:
                placed.set_result(engine)


def build_decode_policy(
    policy: object, n_engines: int, *, seed: int = 0, computes_prompts: bool = False
) -> RouterPolicy:
    """Build a decode policy for live engines, with the random stream of a simulation. Raises
    InputError if there is none such, or it needs what a live router has not: calibration requests,
    step times, the future, an artifact not given. ``computes_prompts``: whether the engines do."""
    rng = stream(seed, "decode policy")
    context = PolicyContext(n_engines, rng, computes_prompts=computes_prompts)
    return decode_policy(policy, context)
