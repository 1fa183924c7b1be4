"""The rule that most routers end in: of some workers the least loaded, or the next in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeGuard, runtime_checkable

from eldr_sim.policies.base import Loads, RequestInfo

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
    """

    __slots__ = ("by_load", "in_turn", "turn", "workers")

    def __init__(
        self, workers: Sequence[int], *, by_load: bool = True, in_turn: bool = True
    ) -> None:
        self.workers = tuple(workers)
        if not self.workers:
            raise ValueError("a shortlist without workers")
        self.by_load = by_load
        self.in_turn = in_turn
        self.turn = 0

    def pick(self, loads: Loads) -> int:
        """Return the chosen worker's index into ``loads``."""
        place = self.turn
        if self.by_load:
            everyone = loads.tolist()
            order = [*range(place, len(self.workers)), *range(place)]
            place = min(order, key=lambda i: everyone[self.workers[i]])
        if self.in_turn:
            self.turn = (place + 1) % len(self.workers)
        return self.workers[place]


@runtime_checkable
class ShortlistPolicy(Protocol):
    """What a policy may be besides, if it always picks from a `Shortlist`.

    The simulator then asks once for all requests that the policy treats alike, of many kinds in one
    call where it can, and applies the shortlists itself. ``select`` must do the same.
    """

    shortlist_by: ShortlistBy

    def shortlists(self, requests: Sequence[RequestInfo]) -> list[Shortlist]:
        """Return the workers that each request may go to; the same object for equal requests."""
        ...


def picks_from_shortlists(policy: object) -> TypeGuard[ShortlistPolicy]:
    """Whether a policy is a `ShortlistPolicy`, and no subclass has given it another ``select``."""
    if not isinstance(policy, ShortlistPolicy):
        return False
    for owner in (policy, *type(policy).__mro__):
        own = getattr(owner, "__dict__", {})
        if "select" in own or "shortlists" in own:
            return "shortlists" in own
    return True
