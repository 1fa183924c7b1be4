"""The time of dispatch and combine, compiled; see `kernel_profiles.kernels.all_to_all`.

Three counts describe what is sent , over a layer's tokens:

- ``tokens[h]``: tokens at home on rank h;
- ``copies[h, r]``: what rank h has for rank r: token-expert pairs where a backend sends a copy for
  each expert, distinct tokens where it sends one for each rank or node;
- ``node_copies[h, n]``: distinct tokens of rank h with experts on node n.

Ranks are numbered node by node."""

from typing import Any

import numpy as np

from eldr_sim.jit import njit
from eldr_sim.kernel_profiles.kernels.all_to_all import AllToAllCost


@njit()
def _curve_s(knots: Any, seconds: Any, sent: float) -> float:
    """Return the time at ``sent`` bytes; beyond the last knot the last slope goes on."""
    low, n = 0, knots.shape[0] - 1
    while n > 1:
        low = low + n // 2 if knots[low + n // 2] <= sent else low  # a choice, not a jump
        n -= n // 2
    slope = (seconds[low + 1] - seconds[low]) / (knots[low + 1] - knots[low])
    return float(seconds[low] + slope * (sent - knots[low]))


@njit()
def dispatch_s(cost: AllToAllCost, inside: float, between: float) -> float:
    """Return the time of one layer's dispatch.

    Args:
        cost: rates of the exchange.
        inside: token copies of the busiest rank within its node.
        between: its token copies between nodes.

    Returns:
        Seconds.
    """
    near = _curve_s(cost.dispatch_knots, cost.dispatch_s, cost.dispatch_bytes * inside)
    far = 0.0
    if between > 0:
        far = _curve_s(cost.dispatch_far_knots, cost.dispatch_far_s, cost.dispatch_bytes * between)
    return float(max(near, far))


@njit()
def combine_s(cost: AllToAllCost, inside: float, between: float) -> float:
    """Return the time of one layer's combine.

    Args:
        cost: rates of the exchange.
        inside: token copies of the busiest rank within its node.
        between: its token copies between nodes.

    Returns:
        Seconds.
    """
    near = _curve_s(cost.combine_knots, cost.combine_s, cost.combine_bytes * inside)
    far = 0.0
    if between > 0:
        far = _curve_s(cost.combine_far_knots, cost.combine_far_s, cost.combine_bytes * between)
    return float(max(near, far))


@njit()
def busiest_all(tokens: Any, gpus_per_node: int) -> tuple[float, float]:
    """Return the busiest rank's copies (inside, between): every token to every rank."""
    total = tokens.sum()
    inside = between = 0.0
    own = 0
    for rank in range(tokens.shape[0]):
        inside = max(inside, float(total - tokens[rank]))
        own = tokens[rank] + (0 if rank % gpus_per_node == 0 else own)
        if (rank + 1) % gpus_per_node == 0 or rank + 1 == tokens.shape[0]:
            members = rank % gpus_per_node + 1
            between = max(between, (total - own) / members)
    return inside, between


#: Rows of traffic ``[4, ranks, layers]``: a rank's copies sent and received, near and far.
SENT, RECEIVED, SENT_FAR, RECEIVED_FAR = range(4)


@njit(inlined=True, _nrt=False)
def _add(traffic: Any, kind: int, rank: int, copies: Any) -> None:
    into = traffic[kind, rank]
    for layer in range(into.shape[0]):
        into[layer] += copies[layer]


@njit(inlined=True, _nrt=False)
def add_direct(traffic: Any, home: int, rank: int, copies: Any, gpus_per_node: int) -> None:
    """Add copies, ``[layers]``, that go straight from rank to rank."""
    if home == rank:
        return
    far = 0 if home // gpus_per_node == rank // gpus_per_node else SENT_FAR
    _add(traffic, far + SENT, home, copies)
    _add(traffic, far + RECEIVED, rank, copies)


@njit(inlined=True, _nrt=False)
def add_to_node(traffic: Any, home: int, there: int, copies: Any) -> None:
    """Add copies for another node, which go to the GPU ``there``, of the same place."""
    if there < traffic.shape[1]:
        _add(traffic, SENT_FAR, home, copies)
        _add(traffic, RECEIVED_FAR, there, copies)


@njit(inlined=True, _nrt=False)
def add_forwarded(traffic: Any, there: int, rank: int, copies: Any) -> None:
    """Add copies from the GPU of their home's place in the rank's node to the rank."""
    if there != rank:
        _add(traffic, RECEIVED, rank, copies)
        if there < traffic.shape[1]:
            _add(traffic, SENT, there, copies)


@njit(inlined=True, restrict=True, _nrt=False)
def raise_to(most: Any, values: Any) -> None:
    """Raise what is most so far, ``[layers]``, to ``values`` where these are more."""
    for layer in range(most.shape[0]):
        most[layer] = values[layer] if values[layer] > most[layer] else most[layer]


@njit(inlined=True, _nrt=False)
def busiest(traffic: Any, ranks: int, first: int, inside: Any, between: Any) -> None:
    """Raise ``inside`` and ``between``, of layers from the ``first`` on, to what the busiest rank
    of each layer sends or receives inside its node and between nodes."""
    end = first + inside.shape[0]
    for rank in range(ranks):
        raise_to(inside, traffic[SENT, rank, first:end])
        raise_to(inside, traffic[RECEIVED, rank, first:end])
        raise_to(between, traffic[SENT_FAR, rank, first:end])
        raise_to(between, traffic[RECEIVED_FAR, rank, first:end])


@njit()
def busiest_direct(copies: Any, gpus_per_node: int) -> tuple[float, float]:
    """Return the busiest rank's copies (inside, between): straight from rank to rank. For a copy
    for each expert (``pplx``, ``deepep_ll``) or each rank (``nccl_alltoall``), by what ``copies``
    counts."""
    n_ranks = copies.shape[0]
    traffic = np.zeros((4, n_ranks, 1))
    for home in range(n_ranks):
        for rank in range(n_ranks):
            add_direct(traffic, home, rank, copies[home, rank : rank + 1], gpus_per_node)
    inside, between = np.zeros(1), np.zeros(1)
    busiest(traffic, n_ranks, 0, inside, between)
    return inside[0], between[0]


@njit()
def busiest_forwarded(copies: Any, node_copies: Any, gpus_per_node: int) -> tuple[float, float]:
    """Return the busiest rank's copies (inside, between), ``deepep_ht``'s: once a node, to the GPU
    of the same place, which forwards them; a node's own tokens go straight."""
    n_ranks = copies.shape[0]
    traffic = np.zeros((4, n_ranks, 1))
    for home in range(n_ranks):
        place = home % gpus_per_node
        for node in range(node_copies.shape[1]):
            if node != home // gpus_per_node:
                there = node * gpus_per_node + place
                add_to_node(traffic, home, there, node_copies[home, node : node + 1])
        for rank in range(n_ranks):
            there = rank // gpus_per_node * gpus_per_node + place
            add_forwarded(traffic, there, rank, copies[home, rank : rank + 1])
    inside, between = np.zeros(1), np.zeros(1)
    busiest(traffic, n_ranks, 0, inside, between)
    return inside[0], between[0]
