"""Decisions in compiled code: what a policy may give a simulator, which otherwise calls it in
Python for each request."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from eldr_sim.arrays import Bools, Ints
from eldr_sim.jit import njit
from eldr_sim.policies.seen import RequestInfo

#: What `CompiledDecisions.choose` returns besides the index of a worker: nobody is healthy; it has
#: to be prepared, and is asked again then.
HOLD, UNPREPARED = -1, -2


class CompiledDecisions(Protocol):
    """How a policy decides on requests of some kinds, bound to the columns of `Workers`."""

    #: Function of ``(books, kind, tokens, now_s)``: a request's kind, the tokens of its prompt, and
    #: the time; int64, the index of a worker, HOLD or UNPREPARED.
    choose: Any
    #: Function of ``(books, kind, tokens, worker)``, told of an end; int64, which says nothing.
    #: None where the policy does not want to hear.
    forget: Any

    @property
    def books(self) -> NamedTuple:
        """The arrays that they work on; others after `prepare` where these had no room."""

    def prepare(self, kinds: Sequence[int], requests: Sequence[RequestInfo], now_s: float) -> None:
        """Get ready to decide: on the first of the requests now, on the others perhaps soon."""


@njit()
def least_loaded(loads: Ints, healthy: Bools, first: int) -> int:
    """Return the healthy worker of the least load, the first of them from ``first`` on; HOLD where
    none is healthy."""
    best, n = HOLD, loads.shape[0]
    for i in range(n):
        w = (first + i) % n
        if healthy[w] and (best < 0 or loads[w] < loads[best]):
            best = w
    return best
