"""The expert union that each decode worker's batch is expected to activate in a step.

Request ``r`` selects expert ``e`` of layer ``l`` with probability ``p_r(l, e)``; taken as
independent, a worker's activate ``D(l) = sum_e (1 - prod_r (1 - p_r(l, e)))`` experts on average,
and one more, ``q``, adds ``sum_e p_q(l, e) prod_r (1 - p_r(l, e))``. Probabilities are multiples of
2^-12, their logarithms and products of 2^-20: sums are exact in float64 in any order, so a worker
that its requests have left is back at zero, the same bits whatever came before."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_sim.arrays import Array, Bools, Floats, Ints
from eldr_sim.jit import njit

_PROBABILITY_GRID = float(1 << 12)
_LOG_GRID = float(1 << 20)


def on_grid(activation: Array) -> Floats:
    """Round probabilities to multiples of 2^-12, at most 1 - 2^-12: log(1 - p) stays finite."""
    whole = np.minimum(np.rint(activation * _PROBABILITY_GRID), _PROBABILITY_GRID - 1.0)
    return np.asarray(whole / _PROBABILITY_GRID)


class Query(NamedTuple):
    """A request that is to be placed on one of K workers."""

    loads: Ints  #: ``[K]``: requests in flight
    healthy: Bools  #: ``[K]``: who answers
    first: int  #: the worker that is preferred among equals; then those behind it
    dearer: Floats  #: ``[K]``: by how much more a growth counts, as a part of it
    prompt_len: int
    #: ``[L, E]``: on the grid of `on_grid`, and its `log_idle`; float32 holds both exactly.
    activation: NDArray[np.float32]
    log: NDArray[np.float32]


class ExpertUnions:
    """Expected expert unions of the workers, kept up to date as requests come and go.

    ``idle``: [K, L, E]: probability that no request of the worker selects the expert in a step;
    ``log_idle``: its logarithm; ``activated``: [K, L]: ``sum_e (1 - idle)``."""

    def __init__(self, n_workers: int, n_layers: int, n_experts: int) -> None:
        self.log_idle = np.zeros((n_workers, n_layers, n_experts))
        self.idle = np.ones(self.log_idle.shape, np.float32)  # exact, and half the memory to read
        self.activated = np.zeros((n_workers, n_layers))

    def add(self, worker: int, log_idle: NDArray[np.float32]) -> None:
        """Add a request, given by :func:`log_idle`, to a worker."""
        shift(self.log_idle, self.idle, self.activated, worker, log_idle, 1.0)

    def remove(self, worker: int, log_idle: NDArray[np.float32]) -> None:
        """Take a request that was added from its worker."""
        shift(self.log_idle, self.idle, self.activated, worker, log_idle, -1.0)

    def growth(self, activation: Floats) -> Floats:
        """Return the activated experts, shape [K, L], that a request would add to each worker.

        ``activation`` has shape [L, E] and comes from :func:`on_grid`."""
        added = np.empty_like(self.activated)
        for worker in range(len(added)):
            growth(self.idle, worker, activation, added[worker])
        return added


def log_idle(activation: Floats) -> NDArray[np.float32]:
    """Return ``log(1 - p)``, [L, E], of probabilities from :func:`on_grid`, in multiples of 2^-20:
    float32 holds these exactly down to the lowest, log(2^-12) = -8.3."""
    return np.asarray(np.rint(np.log1p(-activation) * _LOG_GRID) / _LOG_GRID, dtype=np.float32)


_LOGS = log_idle(np.arange(_PROBABILITY_GRID) / _PROBABILITY_GRID)


@njit()
def enter(activation: Floats, rounded: Any, log: Any) -> None:
    """Write `on_grid` of probabilities, [L, E], and its `log_idle`."""
    for layer in range(activation.shape[0]):
        for e in range(activation.shape[1]):
            whole = min(np.rint(activation[layer, e] * _PROBABILITY_GRID), _PROBABILITY_GRID - 1.0)
            rounded[layer, e] = whole / _PROBABILITY_GRID
            log[layer, e] = _LOGS[int(whole)]


# Reassociation lets the sums run in vector registers; on this grid the order changes no bit.
@njit(fastmath={"reassoc", "contract"})
def growth(idle: Any, worker: int, activation: Any, added: Any) -> None:
    """Write the activated experts that a request would add to a worker to ``added``, shape [L]."""
    for layer in range(idle.shape[1]):
        total = 0.0
        for e in range(idle.shape[2]):
            total += np.float64(idle[worker, layer, e]) * np.float64(activation[layer, e])
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
    """Return e^x of ``x <= 0`` to 1e-14, by its power series: the same bits on every machine."""
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
        total += 1.0 - np.float64(idle[e])
    return total


@njit()
def compared(grown: float, dearer: float) -> float:
    """Return a cost's growth, s, ``dearer`` by a part, rounded; it may be negative."""
    return float(np.rint((grown + dearer * abs(grown)) * 1e12))
