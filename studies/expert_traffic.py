"""What a placement and a replica choice make of steps' tokens: copies sent, pairs, experts, time.

Without requests or queues: tokens of a routing trace are spread over the ranks of a group, each
rank with tokens of its own (data-parallel attention), and one MoE layer after the other is counted
and priced as a step of the simulator is.

Copies are counted as `deepep_ht` and GRACE-MoE (Sec. 5.1) send them, one for each node that a token
needs, then one for each GPU there; and for each expert, as `pplx` and `deepep_ll` do."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_sim.arrays import Floats, Ints
from eldr_sim.kernel_profiles.kernels.all_to_all import AllToAll
from eldr_sim.kernel_profiles.kernels.all_to_all_cost import (
    busiest_forwarded,
    combine_s,
    dispatch_s,
)
from eldr_sim.kernel_profiles.steps.cost_tables import RankMoE
from eldr_sim.kernel_profiles.steps.step_cost import rank_moe_s
from eldr_sim.policies.placement.base import Placement
from eldr_sim.policies.replicas.base import ReplicaChoice
from eldr_sim.traces.routing.coactivation import ranges
from eldr_sim.traces.routing.format import RoutingTrace


class Batch(NamedTuple):
    """The tokens of one step."""

    experts: Ints  #: [tokens, layers, top_k]
    home: Ints  #: [tokens]: the rank of each, ascending


@dataclass(frozen=True, eq=False)
class Traffic:
    """What happens in each layer of each step; arrays [steps, layers] unless said otherwise."""

    tokens: Ints  #: shape [steps]: tokens of all ranks
    #: Copies between nodes and between GPUs of a node: once a node, then once a GPU.
    between: Ints
    inside: Ints
    #: ``between_pairs``, ``inside_pairs``: copies if one were sent for each expert.
    between_pairs: Ints
    inside_pairs: Ints
    #: Those of the GPU that sends or receives the most, once a node.
    busiest_between: Floats
    busiest_inside: Floats
    #: [steps, layers, ranks]: token-expert pairs and activated experts of each GPU.
    pairs: Ints
    activated: Ints

    def per_token(self, copies: NDArray[np.int64]) -> float:
        """Return copies per token and layer."""
        return float(copies.sum() / (self.tokens.sum() * copies.shape[1]))

    @property
    def load_std(self) -> float:
        """Standard deviation of the GPUs' pairs, mean over layers and steps (GRACE-MoE Fig. 5c)."""
        return float(self.pairs.std(axis=2).mean())

    @property
    def load_max(self) -> float:
        """Pairs of the busiest GPU over the mean, mean over layers and steps."""
        return float((self.pairs.max(axis=2) / self.pairs.mean(axis=2)).mean())

    @property
    def busiest_experts(self) -> float:
        """Activated experts of the GPU with the most, mean over layers and steps."""
        return float(self.activated.max(axis=2).mean())


class LayerTimes(NamedTuple):
    """Mean seconds of one MoE layer of a step."""

    moe_s: float  #: of the slowest GPU
    all_to_all_s: float  #: dispatch and combine
    idle_s: float  #: mean over GPUs of waiting for the slowest one

    @property
    def total_s(self) -> float:
        """Of dispatch, experts and combine."""
        return self.moe_s + self.all_to_all_s


def measure(
    batches: list[Batch], placement: Placement, choice: ReplicaChoice, node_of_rank: Ints
) -> Traffic:
    """Count what placement and choice make of steps; ``node_of_rank``: [ranks], equal runs."""
    n_ranks, node = placement.n_ranks, np.asarray(node_of_rank)
    n_nodes, gpus = int(node[-1]) + 1, n_ranks // (int(node[-1]) + 1)
    shape = len(batches), len(placement.expert)
    counts = np.zeros((6, *shape))
    pairs, activated = np.zeros((2, *shape, n_ranks), np.int64)
    for step, (experts, home) in enumerate(batches):
        n = len(home)
        every, own_node = np.arange(n), node[home]
        at_home = np.zeros((n_ranks, n), np.int64)
        at_home[home, every] = 1
        for layer in range(shape[1]):
            ids = experts[:, layer].astype(np.int64)
            slot = choice.choose(home, ids, placement, layer, node)
            rank = placement.rank[layer][slot]
            pairs[step, layer] = np.bincount(rank.ravel(), minlength=n_ranks)
            on = placement.rank[layer][np.unique(slot)]  # each instance has weights of its own
            activated[step, layer] = np.bincount(on, minlength=n_ranks)
            reached = np.zeros((n, n_ranks), np.int64)
            reached[every[:, None], rank] = 1
            nodes = reached.reshape(n, n_nodes, gpus).max(axis=2)
            copies, node_copies = at_home @ reached, at_home @ nodes
            far = node_copies.sum() - nodes[every, own_node].sum()
            # A copy lands on the GPU of the same place, which keeps it or forwards it.
            place = reached.reshape(n, n_nodes, gpus)[every, :, home % gpus]
            near = reached.sum() - place.sum()
            away = rank != home[:, None]
            remote = node[rank] != own_node[:, None]
            sent = copies.astype(np.float64), node_copies.astype(np.float64)
            busy_inside, busy_between = busiest_forwarded(*sent, gpus)
            within = (away & ~remote).sum()
            found = far, near, remote.sum(), within, busy_between, busy_inside
            counts[:, step, layer] = found
    whole = counts[:4].astype(np.int64)
    tokens = np.array([len(batch.home) for batch in batches])
    moved = whole[0], whole[1], whole[2], whole[3], counts[4], counts[5]
    return Traffic(tokens, *moved, pairs, activated)


def layer_times(
    traffic: Traffic, moe: RankMoE, all_to_all: AllToAll, *, prompts: bool
) -> LayerTimes:
    """Price the layers of steps with a GPU's MoE table and an all-to-all. ``all_to_all``:
    ``deepep_ht`` or whatever sends one copy a node, then a GPU; ``prompts``: whether the steps
    compute prompts."""
    slowest, moving, idle = [], [], []
    for step, layer in np.ndindex(*traffic.between.shape):
        seconds = [
            rank_moe_s(moe, float(p), float(a), prompts) if p else 0.0
            for p, a in zip(traffic.pairs[step, layer], traffic.activated[step, layer], strict=True)
        ]
        sent = traffic.busiest_inside[step, layer], traffic.busiest_between[step, layer]
        slowest.append(max(seconds))
        idle.append(max(seconds) - float(np.mean(seconds)))
        moving.append(dispatch_s(all_to_all.cost, *sent) + combine_s(all_to_all.cost, *sent))
    return LayerTimes(float(np.mean(slowest)), float(np.mean(moving)), float(np.mean(idle)))


def prompt_batches(
    trace: RoutingTrace, requests: Ints, n_ranks: int, per_rank: int, n_steps: int, seed: int = 0
) -> list[Batch]:
    """Return steps of prompt tokens: each rank computes whole prompts, one after the other. Prompts
    follow each other in an order that ``seed`` shuffles, and are read again when all have been."""
    trace.require_prompts("steps of prompt tokens")
    order = np.random.default_rng(seed).permutation(requests)
    rows = ranges(trace.first_row[order], trace.prompt_len[order])
    return _batches(trace, rows, n_ranks, per_rank, n_steps)


def decode_batches(
    trace: RoutingTrace, requests: Ints, n_ranks: int, per_rank: int, n_steps: int, seed: int = 0
) -> list[Batch]:
    """Return steps of generated tokens, drawn at random from those of the requests."""
    rows = np.random.default_rng(seed).permutation(ranges(*trace.decode_window(requests)))
    return _batches(trace, rows, n_ranks, per_rank, n_steps)


def _batches(
    trace: RoutingTrace, rows: Ints, n_ranks: int, per_rank: int, n_steps: int
) -> list[Batch]:
    size, home = n_ranks * per_rank, np.arange(n_ranks).repeat(per_rank)
    wanted = rows[np.arange(n_steps * size) % len(rows)].reshape(n_steps, size)
    return [Batch(np.asarray(trace.experts[at]), home) for at in wanted]
