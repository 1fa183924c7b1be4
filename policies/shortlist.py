"""The rule that most routers end in: of some workers the least loaded, or the next in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeGuard, runtime_checkable

import numpy as np

from eldr_sim.policies.base import RequestInfo, Workers

#: What of a request decides on its shortlist. With ``prefix`` there is one for all requests whose
#: prompts share nothing.
ShortlistBy = Literal["nothing", "domain", "prefix", "signature"]


class Shortlist:
    """Picks one of ``workers``.

    Ties go to the first tied worker behind the one picked last, as nginx's ``least_conn`` tries
    equal servers in turn. Taking the lowest index instead would pile an idle cluster's requests
    on worker 0.

    Parameters
    ----------
    workers
        Indices to choose from, at least one.
    by_load
        Pick the least loaded one; else the one behind that picked last.
    in_turn
        Begin behind the worker picked last; else with the first of ``workers``, so that they are
        in order of preference among equals.
    rng
        Draws among equals, if given; the policy's ``shortlist_by`` must then be None.
    """

    __slots__ = ("by_load", "in_turn", "rng", "turn", "workers")

    def __init__(
        self,
        workers: Sequence[int],
        *,
        by_load: bool = True,
        in_turn: bool = True,
        rng: np.random.Generator | None = None,
    ) -> None:
        self.workers: tuple[int, ...] = tuple(workers)
        self.rng = rng
        if not self.workers:
            raise ValueError("a shortlist without workers")
        self.by_load = by_load
        self.in_turn = in_turn
        self.turn: int = 0

    def pick(self, workers: Workers) -> int | None:
        """Return the chosen worker's index; None where no worker of the pool is healthy.

        Where none of the list is, the least loaded healthy worker of the pool stands in.
        """
        usable = set(workers.usable())
        order: list[int] = [*range(self.turn, len(self.workers)), *range(self.turn)]
        order = [place for place in order if self.workers[place] in usable]
        loads: list[int] = workers.loads.tolist()
        if not order:
            return min(usable, key=lambda worker: (loads[worker], worker), default=None)
        place = order[0]
        if self.by_load:
            place = min(order, key=lambda i: loads[self.workers[i]])
            if self.rng is not None:
                least = loads[self.workers[place]]
                tied = [i for i in order if loads[self.workers[i]] == least]
                place = tied[int(self.rng.integers(len(tied)))]
        if self.in_turn:
            self.turn = (place + 1) % len(self.workers)
        return self.workers[place]


@runtime_checkable
class ShortlistPolicy(Protocol):
    """What a policy may be besides, if it always picks from a `Shortlist`.

    Unless ``shortlist_by`` is None, the simulator asks once for all requests that the policy treats
    alike, of many kinds in one call where it can, and applies the shortlists itself. ``select``
    must do the same.
    """

    shortlist_by: ShortlistBy | None

    def shortlists(self, requests: Sequence[RequestInfo]) -> list[Shortlist]:
        """Return the workers that each request may go to; the same object for equal requests."""
        ...


def picks_from_shortlists(policy: object) -> TypeGuard[ShortlistPolicy]:
    """Whether a policy is a `ShortlistPolicy`, and no subclass has given it another ``select``."""
    if not isinstance(policy, ShortlistPolicy) or policy.shortlist_by is None:
        return False
    for owner in (policy, *type(policy).__mro__):
        own = vars(owner)
        if "select" in own or "shortlists" in own:
            return "shortlists" in own
    return True
