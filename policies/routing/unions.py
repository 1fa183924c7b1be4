"""The expert union that each decode worker's batch is expected to activate in a step.

Request ``r`` selects expert ``e`` of layer ``l`` in a step with probability ``p_r(l, e)``. Taking
the requests of a worker as independent, the expert stays idle with probability ``prod (1 - p_r)``,
so the layer activates ``D(l) = sum_e (1 - prod_r (1 - p_r(l, e)))`` experts on average,
and one more request ``q`` adds ``sum_e p_q(l, e) prod_r (1 - p_r(l, e))``.

Probabilities are multiples of 2^-12, their logarithms and the products of 2^-20. Sums of such
numbers are exact in float64 in whatever order they are taken: a worker that its requests have left
is back at zero, and every decision is the same bits whatever came and went before it.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_sim.jit import njit
from eldr_sim.policies.eldr.signature import Floats

_PROBABILITY_GRID = float(1 << 12)
_LOG_GRID = float(1 << 20)


def on_grid(activation: NDArray[Any]) -> Floats:
    """Round probabilities to multiples of 2^-12, at most 1 - 2^-12: log(1 - p) stays finite."""
    whole = np.minimum(np.rint(activation * _PROBABILITY_GRID), _PROBABILITY_GRID - 1.0)
    return np.asarray(whole / _PROBABILITY_GRID)


class Asked(NamedTuple):
    """A request that is to be placed on one of K workers."""

    loads: NDArray[np.int64]  #: ``[K]``: requests in flight
    healthy: NDArray[np.bool_]  #: ``[K]``: who answers
    first: int  #: the worker that is preferred among equals; then those behind it
    dearer: Floats  #: ``[K]``: by how much more a growth counts, as a part of it
    prompt_len: int
    activation: Floats  #: ``[L, E]``: on the grid of `on_grid`,
    log: NDArray[np.float32]  #: and its `log_idle`


class ExpertUnions:
    """Expected expert unions of the workers, kept up to date as requests come and go.

    ``idle``: shape [K, L, E]: probability that no request of the worker selects the expert in a
    step; ``log_idle``: its logarithm, the sum over the worker's requests; ``activated``: shape [K,
    L]: expected activated experts a step, ``sum_e (1 - idle)``.
    """

    def __init__(self, n_workers: int, n_layers: int, n_experts: int) -> None:
        self.log_idle = np.zeros((n_workers, n_layers, n_experts))
        self.idle = np.ones_like(self.log_idle)
        self.activated = np.zeros((n_workers, n_layers))

    def add(self, worker: int, log_idle: NDArray[np.float32]) -> None:
        """Add a request, given by :func:`log_idle`, to a worker."""
        shift(self.log_idle, self.idle, self.activated, worker, log_idle, 1.0)

    def remove(self, worker: int, log_idle: NDArray[np.float32]) -> None:
        """Take a request that was added from its worker."""
        shift(self.log_idle, self.idle, self.activated, worker, log_idle, -1.0)

    def growth(self, activation: Floats) -> Floats:
        """Return the activated experts, shape [K, L], that a request would add to each worker.

        ``activation`` has shape [L, E] and comes from :func:`on_grid`.
        """
        added = np.empty_like(self.activated)
        for worker in range(len(added)):
            growth(self.idle, worker, activation, added[worker])
        return added


def log_idle(activation: Floats) -> NDArray[np.float32]:
    """Return ``log(1 - p)``, shape [L, E], of probabilities from :func:`on_grid`.

    In multiples of 2^-20, which float32 holds exactly down to the lowest, log(2^-12) = -8.3.
    """
    return np.asarray(np.rint(np.log1p(-activation) * _LOG_GRID) / _LOG_GRID, dtype=np.float32)


# Reassociation lets the sums run in vector registers; on this grid the order changes no bit.
@njit(fastmath={"reassoc"})
def growth(idle: Any, worker: int, activation: Any, added: Any) -> None:
    """Write the activated experts that a request would add to a worker to ``added``, shape [L]."""
    for layer in range(idle.shape[1]):
        total = 0.0
        for e in range(idle.shape[2]):
            total += idle[worker, layer, e] * activation[layer, e]
        added[layer] = total


@njit()
def shift(log_idle: Any, idle: Any, activated: Any, worker: int, log: Any, sign: float) -> None:
    """Add a request to a worker, or take it away with ``sign`` -1; see `ExpertUnions`."""
    for layer in range(idle.shape[1]):
        for e in range(idle.shape[2]):
            total = log_idle[worker, layer, e] + sign * log[layer, e]
            log_idle[worker, layer, e] = total
            idle[worker, layer, e] = np.rint(_exp(total) * _LOG_GRID) * (1.0 / _LOG_GRID)
        activated[worker, layer] = _complement(idle[worker, layer])


@njit()
def _exp(x: float) -> float:
    """Return e^x of ``x <= 0`` to 1e-14, absolutely, in steps that vector registers know.

    The power series of ``x / 64``, squared six times. Unlike the exponential functions of C
    libraries it has the same bits on every machine.
    """
    t = max(x, -16.0) * (1.0 / 64)
    e = 1.0 + t * (1.0 / 8)
    e = 1.0 + t * (1.0 / 7) * e
    e = 1.0 + t * (1.0 / 6) * e
    e = 1.0 + t * (1.0 / 5) * e
    e = 1.0 + t * (1.0 / 4) * e
    e = 1.0 + t * (1.0 / 3) * e
    e = 1.0 + t * (1.0 / 2) * e
    e = 1.0 + t * e
    for _ in range(6):
        e *= e
    return e


@njit(fastmath={"reassoc"})
def _complement(idle: Any) -> float:
    total = 0.0
    for e in range(idle.shape[0]):
        total += 1.0 - idle[e]
    return total


@njit()
def compared(grown: float, dearer: float) -> float:
    """Return a cost's growth, s, as workers are compared by it: ``dearer`` by a part, and rounded.

    A growth is negative where a kernel gets faster with one more.
    """
    return float(np.rint((grown + dearer * abs(grown)) * 1e12))
