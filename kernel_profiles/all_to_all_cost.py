"""The time of dispatch and combine, compiled; see :mod:`~eldr_sim.kernel_profiles.all_to_all`.

What is sent is told by three counts of a layer's tokens:

- ``tokens[h]``: tokens at home on rank h;
- ``copies[h, r]``: what rank h has for rank r: token-expert pairs where a backend sends a copy for
  each expert, distinct tokens where it sends one for each rank or node;
- ``node_copies[h, n]``: distinct tokens of rank h with experts on node n.

Ranks are numbered node by node.
"""

from __future__ import annotations

from typing import Any

from eldr_sim.jit import njit
from eldr_sim.kernel_profiles.all_to_all import AllToAllCost


@njit()
def _curve_s(knots: Any, seconds: Any, sent: float) -> float:
    """Return the time at ``sent`` bytes; beyond the last knot the last slope goes on."""
    low, high = 0, knots.shape[0] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if knots[middle] <= sent:
            low = middle
        else:
            high = middle
    slope = (seconds[high] - seconds[low]) / (knots[high] - knots[low])
    return float(seconds[low] + slope * (sent - knots[low]))


@njit()
def dispatch_s(cost: AllToAllCost, inside: float, between: float) -> float:
    """Return the time of one layer's dispatch, s, by the busiest rank's copies."""
    near = _curve_s(cost.dispatch_knots, cost.dispatch_s, cost.dispatch_bytes * inside)
    far = 0.0
    if between > 0:
        far = _curve_s(cost.dispatch_far_knots, cost.dispatch_far_s, cost.dispatch_bytes * between)
    return float(max(near, far))


@njit()
def combine_s(cost: AllToAllCost, inside: float, between: float) -> float:
    """Return the time of one layer's combine, s, by the busiest rank's copies."""
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


@njit()
def busiest_direct(copies: Any, gpus_per_node: int) -> tuple[float, float]:
    """Return the busiest rank's copies (inside, between): straight from rank to rank.

    For a copy for each expert (``pplx``, ``deepep_ll``) or each rank (``nccl_alltoall``), by what
    ``copies`` counts.
    """
    inside = between = 0.0
    n_ranks = copies.shape[0]
    for rank in range(n_ranks):
        sent = received = sent_far = received_far = 0.0
        for other in range(n_ranks):
            if other == rank:
                continue
            if other // gpus_per_node == rank // gpus_per_node:
                sent += copies[rank, other]
                received += copies[other, rank]
            else:
                sent_far += copies[rank, other]
                received_far += copies[other, rank]
        inside = max(inside, sent, received)
        between = max(between, sent_far, received_far)
    return inside, between


@njit()
def busiest_forwarded(copies: Any, node_copies: Any, gpus_per_node: int) -> tuple[float, float]:
    """Return the busiest rank's copies (inside, between): once a node, then once a rank there.

    A copy for another node goes to the GPU of the same place there, which forwards it
    (``deepep_ht``); a node's own tokens go straight to their ranks.
    """
    inside = between = 0.0
    n_ranks, n_nodes = copies.shape[0], node_copies.shape[1]
    for rank in range(n_ranks):
        node, place = rank // gpus_per_node, rank % gpus_per_node
        sent = received = sent_far = received_far = 0.0
        for far in range(n_nodes):
            home = far * gpus_per_node + place
            if home < n_ranks and far != node:
                sent_far += node_copies[rank, far]
                received_far += node_copies[home, node]
        for home in range(n_ranks):
            for other in range(node * gpus_per_node, min((node + 1) * gpus_per_node, n_ranks)):
                if home % gpus_per_node == place and other != rank:
                    sent += copies[home, other]
            if home % gpus_per_node != place:
                received += copies[home, rank]
        inside = max(inside, sent, received)
        between = max(between, sent_far, received_far)
    return inside, between
