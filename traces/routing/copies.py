"""Copies: how often a decode batch holds one trace request twice, as a run longer than its trace
does. They choose much the same experts, so the union of such a batch is too small, most of all
under a router that sends similar requests to one worker."""

from collections.abc import Mapping

import numpy as np

from eldr_sim.arrays import Floats, Ints

WARN_ABOVE = 0.1  #: share of copies from which a result warns of them


def expected_copy_share(
    pools: Mapping[str, int], shares: Mapping[str, float], batch: float
) -> tuple[float, float]:
    """Return the expected share of a batch's requests that have a copy of themselves in it, for
    mixed batches and batches of one domain: ``sum_d p_d (1 - (1 - p_d / n_d)^(B - 1))``, with ``1 /
    n_d`` in place of ``p_d / n_d``.

    ``pools``: ``n_d``, trace requests by domain; ``shares``: ``p_d``, of the requests; ``batch``:
    B, may be a mean. Decks are shuffled, so small batches have fewer."""
    mixed = sum(p * (1 - (1 - p / pools[d]) ** (batch - 1)) for d, p in shares.items())
    alone = sum(p * (1 - (1 - 1 / pools[d]) ** (batch - 1)) for d, p in shares.items())
    return mixed, alone


def copy_share(worker: Ints, start_s: Floats, end_s: Floats, request: Ints) -> float:
    """Return the share of decode time that requests spent beside a copy of themselves, 0 where
    there is none.

    ``worker`` of each request; ``start_s``, ``end_s``: its time in the batch; ``request``: of the
    trace."""
    order = np.lexsort((start_s, request, worker))
    total = float((end_s - start_s).sum())
    beside = 0.0
    rows = zip(
        *(column[order].tolist() for column in (worker, request, start_s, end_s)), strict=True
    )
    before: tuple[int, int] | None = None
    # Sweep each group of copies on one worker: count the time in which two or more are there.
    changes: list[tuple[float, int]] = []
    for w, q, start, end in rows:
        if (w, q) != before:
            beside += _shared_time(changes)
            changes, before = [], (w, q)
        changes += [(start, 1), (end, -1)]
    beside += _shared_time(changes)
    return beside / total if total > 0 else 0.0


def _shared_time(changes: list[tuple[float, int]]) -> float:
    """Sum over copies the time that each spends together with another."""
    if len(changes) <= 2:
        return 0.0
    time, n, last = 0.0, 0, 0.0
    for at, change in sorted(changes):
        if n > 1:
            time += n * (at - last)
        n, last = n + change, at
    return time
