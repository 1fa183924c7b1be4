"""Copies: how often a decode batch holds one trace request twice.

A run longer than its trace replays requests several times. Two copies in one batch choose much the
same experts, which requests of a real service do not: their union is too small, most of all under a
router that sends similar requests to one worker, since copies are the most similar.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

WARN_ABOVE = 0.1  #: share of copies from which a result warns of them


def expected_copy_share(
    pools: Mapping[str, int], shares: Mapping[str, float], batch: float
) -> tuple[float, float]:
    """Return the expected share of a batch's requests that have a copy of themselves in it.

    Domain ``d`` has a share ``p_d`` of the requests and ``n_d`` trace requests, and each of a batch
    of ``B`` is drawn at random. One of domain ``d`` has no copy if the others all miss it:

    - mixed batches: ``sum_d p_d (1 - (1 - p_d / n_d)^(B - 1))``;
    - batches of one domain: ``sum_d p_d (1 - (1 - 1 / n_d)^(B - 1))``.

    A run deals a domain's requests from a shuffled deck, so copies seldom arrive close to each
    other: a batch that is small compared with the deck has fewer.

    ``pools``: trace requests that are served, by domain; ``shares``: share of each domain among the
    requests; sums to 1; ``batch``: requests in the batch, at least 1; may be a mean.

    Returns mixed, one_domain.
    """
    mixed = sum(p * (1 - (1 - p / pools[d]) ** (batch - 1)) for d, p in shares.items())
    alone = sum(p * (1 - (1 - 1 / pools[d]) ** (batch - 1)) for d, p in shares.items())
    return mixed, alone


def copy_share(
    worker: NDArray[np.int64],
    start_s: NDArray[np.float64],
    end_s: NDArray[np.float64],
    request: NDArray[np.int64],
) -> float:
    """Return the share of decode time that requests spent beside a copy of themselves.

    ``worker``: decode worker of each request; ``start_s``, ``end_s``: when it was in the worker's
    batch; ``request``: trace request whose decode it replayed. 0 where there is no time.
    """
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
