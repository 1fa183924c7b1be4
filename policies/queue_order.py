"""Queue orders: which waiting request an engine serves next.

An order gives every request a key. An engine admits the waiting request of the lowest key, and of
equal keys the one that came first. As in vLLM a request whose prompt has begun comes before those
that wait for the first time. When KV blocks run out, the sequence that joined last is preempted and
comes before those, too; an order whose attribute ``preempts`` is true preempts the sequence of the
highest key instead, which then waits by its key.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.policies.base import PolicyContext


class Waiting(NamedTuple):
    """What an engine knows of requests that wait, a column each."""

    prompt_len: NDArray[np.int64]
    """Prompt tokens."""
    priority: NDArray[np.int64] | None = None
    """Priorities that clients give, the lowest first; None where they give none."""


class QueueOrder(Protocol):
    """Gives requests their keys."""

    name: str

    def keys(self, requests: Waiting) -> NDArray[np.float64]:
        """Return the key of each request; no NaN."""
        ...


class FirstComeFirstServed:
    """The request that came first (vLLM's default)."""

    name = "fcfs"
    decision: ClassVar[str] = "queue"

    def __init__(self, context: PolicyContext) -> None:
        pass

    def keys(self, requests: Waiting) -> NDArray[Any]:
        """Return equal keys."""
        return np.zeros(len(requests.prompt_len))


class ShortestJobFirst:
    """The request of the shortest prompt."""

    name = "sjf"
    decision: ClassVar[str] = "queue"

    def __init__(self, context: PolicyContext) -> None:
        pass

    def keys(self, requests: Waiting) -> NDArray[Any]:
        """Return the prompts' lengths."""
        return requests.prompt_len.astype(np.float64)


class PriorityOrder:
    """The request of the lowest priority value (vLLM's ``--scheduling-policy priority``)."""

    name = "priority"
    decision: ClassVar[str] = "queue"
    preempts: ClassVar[bool] = True

    def __init__(self, context: PolicyContext) -> None:
        pass

    def keys(self, requests: Waiting) -> NDArray[Any]:
        """Return the priorities; raises InputError where requests have none."""
        if requests.priority is None:
            problem = "'priority' needs priorities, and the workload has none"
            raise InputError("queue_order", problem, "a request log with a column `priority`")
        return requests.priority.astype(np.float64)
