"""What a router sees when it decides: the workers of a pool, and a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Workers(NamedTuple):
    """The workers of a pool as their router sees them: a column each, shape [n_workers].

    The router counts ``loads`` itself; the others are what the engines publish, as of
    ``signals_s``: vLLM's ``num_requests_waiting``, ``num_requests_running``,
    ``kv_cache_usage_perc``, and tokens."""

    #: int64: requests in flight, from the router's decision until it learns that they ended.
    loads: NDArray[np.int64]
    #: int64: requests that wait, their KV cache on its way or not, and that compute or decode.
    waiting: NDArray[np.int64]
    running: NDArray[np.int64]
    #: int64: tokens of prompts (after preemption: contexts) that wait, and of running contexts.
    waiting_tokens: NDArray[np.int64]
    running_tokens: NDArray[np.int64]
    kv_usage: NDArray[np.float64]  #: float64: share of the KV blocks that requests hold, 0 to 1
    healthy: NDArray[np.bool_]  #: bool: whether the worker answers
    #: The router's clock, and when the engines published what the columns say, s.
    now_s: float = 0.0
    signals_s: float = 0.0
    #: int64: cached tokens of the request's prompt, as the router knows; under ``needs.matched``.
    matched: NDArray[np.int64] = np.zeros(0, np.int64)
    #: int64: these and those that KV tiers could load; float64: what that would take now, s.
    reachable: NDArray[np.int64] = np.zeros(0, np.int64)
    load_s: NDArray[np.float64] = np.zeros(0)

    @classmethod
    def idle(cls, loads: ArrayLike) -> Workers:
        """Return healthy workers with these ``loads`` and engines that report nothing."""
        counted = np.asarray(loads, np.int64)
        n = len(counted)
        a, b, c, d = np.zeros((4, n), np.int64)
        return cls(counted, a, b, c, d, kv_usage=np.zeros(n), healthy=np.ones(n, np.bool_))

    def usable(self) -> list[int]:
        """Return the indices of the healthy workers."""
        found: list[int] = self.healthy.nonzero()[0].tolist()
        return found


COLUMNS = frozenset(Workers._fields[:6])
#: `Needs.columns` of policies that read loads alone, and of those that read nothing.
LOADS, NOTHING = frozenset({"loads"}), frozenset[str]()


class RequestInfo(NamedTuple):
    """A request as the router sees it at the moment of a decision."""

    request_id: int  #: number of the request within the run
    prompt_len: int  #: prompt length in tokens
    #: Oracle label, an index into ``CalibrationSet.domains``, which only ``DomainPolicy`` reads.
    domain: int
    #: Hashes of the prompt's blocks in order, chained as vLLM's; the last may be partial.
    prefix_hash: Sequence[int] = ()
    #: Prefill counts, [L, E], of the prompt tokens that chose each expert, or summed gate scores
    #: (``needs.signature``); None before prefill has ended, and of decode-only traces.
    signature: NDArray[Any] | None = None
    #: Two requests with the same id have equal counts; None: nothing is promised.
    signature_id: int | None = None
    #: Names the conversation or the user that the request belongs to; ``None`` where unknown.
    session: int | str | None = None
    #: Output tokens that the client has asked for; ``None`` where it has set no limit.
    max_tokens: int | None = None
