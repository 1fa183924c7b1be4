"""Decode policies of ELDR's evaluation other than ELDR itself (Sec. 6, Routers and baselines)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.policies.base import PolicyContext, RequestInfo, Workers
from eldr_sim.policies.shortlist import Shortlist, ShortlistBy


class RandomPolicy:
    """A worker uniformly at random."""

    name = "random"
    decision: ClassVar[str] = "decode"

    def __init__(self, context: PolicyContext) -> None:
        self._rng = context.rng

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return a uniformly drawn healthy worker."""
        usable = workers.usable()
        return usable[int(self._rng.integers(len(usable)))] if usable else None


class RoundRobinPolicy:
    """The workers in turn, from worker 0."""

    name = "round_robin"
    decision: ClassVar[str] = "decode"

    shortlist_by: ClassVar[ShortlistBy] = "nothing"

    def __init__(self, context: PolicyContext) -> None:
        self._everyone = Shortlist(range(context.n_workers), by_load=False)

    def shortlists(self, requests: Sequence[RequestInfo]) -> list[Shortlist]:
        """Return all workers, in turn."""
        return [self._everyone] * len(requests)

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return the next worker in turn."""
        return self.shortlists([request])[0].pick(workers)


class JoinShortestQueuePolicy:
    """The worker with the fewest in-flight requests; ties in turn (see ``shortlist``)."""

    name = "jsq"
    decision: ClassVar[str] = "decode"
    shortlist_by: ClassVar[ShortlistBy] = "nothing"

    def __init__(self, context: PolicyContext) -> None:
        self._everyone = Shortlist(range(context.n_workers))

    def shortlists(self, requests: Sequence[RequestInfo]) -> list[Shortlist]:
        """Return all workers, the least loaded first."""
        return [self._everyone] * len(requests)

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return the least loaded worker."""
        return self.shortlists([request])[0].pick(workers)


class PowerOfTwoChoicesPolicy:
    """The less loaded of two distinct workers drawn uniformly (Mitzenmacher 2001).

    A tie goes to the worker drawn first, so that it is uniform too.
    """

    name = "p2c"
    decision: ClassVar[str] = "decode"

    def __init__(self, context: PolicyContext) -> None:
        self._rng = context.rng

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return the less loaded of two sampled healthy workers."""
        usable = workers.usable()
        if len(usable) < 2:
            return usable[0] if usable else None
        i = int(self._rng.integers(len(usable)))
        j = int(self._rng.integers(len(usable) - 1))
        first, second = usable[i], usable[j + (j >= i)]
        return second if workers.loads[second] < workers.loads[first] else first


class DomainPolicy:
    """Workers split among the domains by their calibration mix, JSQ inside the split.

    The naive locality-aware baseline of ELDR (Sec. 6): it routes on an oracle domain label that no
    real router has. A request of a domain without calibration requests joins the shortest queue
    of all workers. Workers that share experts are one to the split.
    """

    name = "domain"
    decision: ClassVar[str] = "decode"
    shortlist_by: ClassVar[ShortlistBy] = "domain"

    def __init__(self, context: PolicyContext) -> None:
        calibration = context.require_calibration(self.name)
        counts = np.bincount(calibration.domain, minlength=len(calibration.domains))
        self._pools = [
            Shortlist(context.members(groups) if groups else range(context.n_workers))
            for groups in split_workers(counts, context.n_groups)
        ]

    def shortlists(self, requests: Sequence[RequestInfo]) -> list[Shortlist]:
        """Return the workers of each request's domain."""
        for request in requests:
            if not 0 <= request.domain < len(self._pools):
                allowed = f"0 to {len(self._pools) - 1}"
                raise InputError("domain", f"no domain has the index {request.domain}", allowed)
        return [self._pools[request.domain] for request in requests]

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return the least loaded worker of the request's domain."""
        return self.shortlists([request])[0].pick(workers)


def split_workers(counts: NDArray[np.int64], n_workers: int) -> list[list[int]]:
    """Split the workers among domains in proportion to ``counts``.

    With at least as many workers as domains each domain owns a block of its own: one worker at
    least, the rest by largest remainder of ``n_workers * share`` (Hamilton's method; where the
    minimum of one has used up the pool, the most over-served domain gives a worker back). With
    fewer workers each domain owns one worker that it shares: domains from the largest to the
    smallest join the worker with the smallest share so far. Ties go to the lower index.

    Parameters
    ----------
    counts
        Shape [n_domains]: calibration requests of each domain, zero where it has none.
    n_workers
        Workers to split, at least 1.

    Returns
    -------
    list of list of int
        The workers of each domain; empty for a domain with a count of zero.
    """
    present = [int(domain) for domain in np.flatnonzero(counts)]
    owned: list[list[int]] = [[] for _ in counts]
    if not present:
        return owned
    if n_workers < len(present):
        carried = [0] * n_workers
        for domain in sorted(present, key=lambda d: (-int(counts[d]), d)):
            worker = carried.index(min(carried))
            carried[worker] += int(counts[domain])
            owned[domain] = [worker]
        return owned
    # Integers throughout: quota of a domain = n_workers * count / total.
    total = int(counts.sum())
    quota = {d: n_workers * int(counts[d]) for d in present}
    given = {d: max(1, quota[d] // total) for d in present}
    while sum(given.values()) < n_workers:
        given[max(present, key=lambda d: (quota[d] - given[d] * total, -d))] += 1
    while sum(given.values()) > n_workers:
        able = [d for d in present if given[d] > 1]
        given[max(able, key=lambda d: (given[d] * total - quota[d], -d))] -= 1
    first = 0
    for domain in present:
        owned[domain] = list(range(first, first + given[domain]))
        first += given[domain]
    return owned
