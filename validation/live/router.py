"""A router over live engines: a policy object of the simulator, with the loads that it sees."""

from __future__ import annotations

import numpy as np

from eldr_sim.policies.base import (
    CompletionListener,
    DecodePolicy,
    PolicyContext,
    PrefillPolicy,
    RequestInfo,
)
from eldr_sim.policies.registry import decode_policy
from eldr_sim.traces.streams import stream

__all__ = ["Router", "build_decode_policy"]


class Router:
    """Sends requests to engines and counts those in flight, as `simulator.cluster.Cluster` does.

    Parameters
    ----------
    policy
        Chooses the engine.
    n_engines
        Engines to choose from.

    Attributes
    ----------
    loads
        int64 ``[n_engines]``: requests in flight, from `dispatch` to `complete`.
    """

    def __init__(self, policy: DecodePolicy | PrefillPolicy, n_engines: int) -> None:
        self.loads = np.zeros(n_engines, np.int64)
        self._policy = policy
        self._listener = policy if isinstance(policy, CompletionListener) else None

    def dispatch(self, request: RequestInfo) -> int:
        """Return the index of the engine that gets a request."""
        engine = self._policy.select(request, self.loads)
        self.loads[engine] += 1
        return engine

    def complete(self, request_id: int, engine: int) -> None:
        """Take note that an engine is done with a request (``RequestInfo.request_id``)."""
        self.loads[engine] -= 1
        if self._listener is not None:
            self._listener.on_complete(request_id, engine)


def build_decode_policy(policy: object, n_engines: int, *, seed: int = 0) -> DecodePolicy:
    """Build a decode policy for live engines, with the random stream that a simulation gives it.

    Parameters
    ----------
    policy
        The policy and its parameters, see `policies.choice`, such as ``eldr:artifact=fit.npz``.
    n_engines
        Engines to choose from.
    seed
        Of a policy that draws.

    Raises
    ------
    InputError
        If there is no such policy, or if it needs what a live router does not have: calibration
        requests, step times, the future, or an artifact that was not given.
    """
    return decode_policy(
        policy,
        PolicyContext(n_workers=n_engines, rng=stream(seed, "decode policy")),
    )
