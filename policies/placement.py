"""Where the experts of an expert-parallel decode worker live: the rank (GPU) of every expert.

A layer takes the time of the rank that reads the most distinct experts, and every rank holds
equally many, so that weight memory is uniform.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.policies.signature import Ints

PLACEMENTS = ("linear", "eldr")
"""Names of the placements: :func:`linear_placement` and :func:`greedy_placement`."""


def linear_placement(n_experts: int, n_ranks: int) -> Ints:
    """Return the rank of every expert, shape [E]: equal runs of neighbours, as vLLM's default.

    Raises
    ------
    InputError
        ``n_ranks`` does not divide ``n_experts``.
    """
    return np.arange(n_experts) // _room(n_experts, n_ranks)


def greedy_placement(activation: NDArray[Any], n_ranks: int) -> Ints:
    """Return the rank of every expert under ELDR's placement (Sec. 5), layer by layer.

    The next most active expert goes to the rank with the least activation so far among those that
    still have room. Ties go to the lower expert and the lower rank; activations are compared to
    1e-9, so that the last bit of a mean does not decide.

    Parameters
    ----------
    activation
        Shape [..., E]: expected decode activation of every expert, finite and not negative.
    n_ranks
        Ranks to place on; must divide E.

    Returns
    -------
    Shape [..., E], every rank equally often along the last axis.

    Raises
    ------
    InputError
        ``n_ranks`` does not divide E, or an activation is negative or not finite.
    """
    weights = np.round(np.asarray(activation, dtype=np.float64), 9)
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise InputError("activation", "a value is negative or not finite", "0 or more")
    n_experts = weights.shape[-1]
    room = _room(n_experts, n_ranks)
    rows = weights.reshape(-1, n_experts)
    order = np.argsort(-rows, axis=1, kind="stable")
    load = np.zeros((len(rows), n_ranks))
    held = np.zeros((len(rows), n_ranks), dtype=np.int64)
    placed = np.empty(rows.shape, dtype=np.int64)
    every = np.arange(len(rows))
    for expert in order.T:
        rank = np.argmin(np.where(held < room, np.round(load, 9), np.inf), axis=1)
        placed[every, expert] = rank
        load[every, rank] += rows[every, expert]
        held[every, rank] += 1
    return placed.reshape(weights.shape)


def _room(n_experts: int, n_ranks: int) -> int:
    """Experts of every rank."""
    if n_ranks < 1 or n_experts % n_ranks:
        problem = f"{n_ranks} ranks cannot hold {n_experts} experts equally"
        raise InputError("n_ranks", problem, "a divisor of the experts")
    return n_experts // n_ranks
