"""GRACE-MoE's placement: experts grouped by affinity, hot ones copied to idle GPUs (Han et al.,
"GRACE-MoE: Grouping and Replication with Locality-Aware Routing for Efficient Distributed MoE
Inference", Sec. 4.1 and 4.2), layer by layer:

1. *Hierarchical grouping*: experts are clustered over nodes, in groups of any size, and over a
   node's GPUs, in groups of ``E (1 - r)`` to ``E (1 + r)``, where E is an equal share. The ratio r
   is the knee of the curve (S(r), U(r)) over all layers unless given: the point farthest above the
   chord (ours). A node has as many experts as GPUs at least.
2. *Replication*: with ``W_i`` the load of group i and ``rho = max W / mean W``, the experts that
   carry most of the heaviest group, until their load exceeds ``max W n / (n + 1)``, are copied to
   the ``n = min(max(1, floor(rho)), ranks - 1)`` groups of least load; ``fixed`` copies once.
3. *Predicted loads*, by which replica choices weigh instances. The paper prints (Eq. 3) a share of
   ``max W / (n + 1)`` an instance, beside ``max W - W_r``: more than there was. ``W_r / (n + 1)``,
   with W_r the load of the copied experts, keeps the sum."""

from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from eldr_sim.arrays import Floats, Ints
from eldr_sim.errors import InputError
from eldr_sim.policies.base import Needs, PolicyContext
from eldr_sim.policies.choice import Parameters
from eldr_sim.policies.placement import grouping
from eldr_sim.policies.placement.base import EMPTY, ExpertGroup, Placement, PlacementPolicy
from eldr_sim.traces.routing.coactivation import Tokens, affinity_of

Replication = Literal["dynamic", "fixed", "none"]
RATIOS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)  #: candidates for the ratio r


class AffinityParameters(Parameters):
    """Parameters of placements that group experts by affinity."""

    tokens: Tokens = "all"
    """Which tokens of the calibration requests make affinity and load: all that are recorded,
    output tokens (``decode``) or ``prompt`` tokens."""


class GraceParameters(AffinityParameters):
    """Parameters of `GracePlacement`."""

    ratio: float | None = Field(default=None, ge=0, le=1)
    """How far the number of experts of a node's GPUs may lie from an equal share, as a part of it;
    the knee of affinity over deviation when not given."""
    replication: Replication = "dynamic"
    """How many GPUs get copies of the hot experts of a layer's heaviest one: as many as its load
    is times the mean (``dynamic``), one (``fixed``), or ``none``."""


class EqualGroupsParameters(AffinityParameters):
    """Parameters of `AffinityPlacement`."""

    resolution: float = Field(default=1.0, ge=0, le=100)
    """How much of what chance would give counts against co-activation: 0 keeps all copies that can
    be kept from being sent, and puts loaded experts together; the more, the evener the load."""


class GroupedPlacement(PlacementPolicy):
    """Groups of experts by the affinity of calibration requests, placed once for equal groups."""

    needs = Needs(experts=True)

    def __init__(self, context: PolicyContext, tokens: Tokens) -> None:
        self._calibration = context.require_calibration(self)
        self._tokens, self._rng = tokens, context.rng
        self._placed: dict[tuple[int, int], Placement] = {}

    def place(self, group: ExpertGroup) -> Placement:
        """Return the placement of a group.

        Raises InputError: there are redundant experts, fewer experts than ranks, ranks that do not
        fill nodes, or calibration requests of another shape."""
        if group.n_redundant:
            problem = f"{self.name!r} decides itself how many instances there are"
            raise InputError("num_redundant_experts", problem, "0")
        if group.n_ranks % group.n_nodes or group.n_ranks > group.n_experts:
            raise InputError(
                "expert_placement",
                f"{self.name!r} cannot spread {group.n_experts} experts over {group.n_ranks} GPUs "
                f"of {group.n_nodes} nodes",
                "full nodes, and at least one expert per GPU",
            )
        key = group.n_ranks, group.n_nodes
        if key not in self._placed:
            pairs = self._calibration.coactivation(self._tokens)
            group.check_shape(pairs.shape[:2], f"{self.name!r} knows")
            load = np.diagonal(pairs, axis1=1, axis2=2).astype(np.float64)
            self._placed[key] = self._place(affinity_of(pairs), load, group)
        return self._placed[key]

    def _place(self, affinity: Floats, load: Floats, group: ExpertGroup) -> Placement:
        raise NotImplementedError


class GracePlacement(GroupedPlacement):
    """Experts that tokens choose together on one GPU, and copies of the hot ones."""

    name = "grace"
    Parameters = GraceParameters

    def __init__(self, context: PolicyContext, parameters: GraceParameters) -> None:
        super().__init__(context, parameters.tokens)
        self._ratio, self._replication = parameters.ratio, parameters.replication

    def _place(self, affinity: Floats, load: Floats, group: ExpertGroup) -> Placement:
        clusters = [
            cluster_hierarchy(layer, group.n_ranks, group.n_nodes, self._rng) for layer in affinity
        ]
        ratio = self._ratio
        if ratio is None:
            ratio = RATIOS[knee(*ratio_curve(affinity, clusters))]
        groups = np.stack(
            [group_layer(a, c, ratio) for a, c in zip(affinity, clusters, strict=True)]
        )
        return replicated(groups, load, group.n_ranks, group.n_nodes, self._replication)


class AffinityPlacement(GroupedPlacement):
    """Experts that tokens choose together on one GPU, equally many on each.

    Clusters as of `GracePlacement`, brought to equal sizes, with swaps while these raise what is
    inside (`equal_groups`)."""

    name = "affinity"
    Parameters = EqualGroupsParameters

    def __init__(self, context: PolicyContext, parameters: EqualGroupsParameters) -> None:
        super().__init__(context, parameters.tokens)
        self._resolution = parameters.resolution

    def place(self, group: ExpertGroup) -> Placement:
        """Return the placement of a group; raises InputError also as `slots_per_rank`."""
        _ = group.slots_per_rank
        return super().place(group)

    def _place(self, affinity: Floats, load: Floats, group: ExpertGroup) -> Placement:
        ranks, nodes = group.n_ranks, group.n_nodes
        groups = [equal_groups(a, ranks, nodes, self._rng, self._resolution) for a in affinity]
        return replicated(np.stack(groups), load, ranks, nodes, "none")


class Hierarchy(NamedTuple):
    """Clusters of a layer's experts before their sizes are bounded."""

    n_nodes: int
    gpus: int  #: of a node
    node: Ints  #: [E]
    local: Ints  #: [E]: the cluster within the node


def cluster_hierarchy(
    affinity: Floats, n_ranks: int, n_nodes: int, rng: np.random.Generator
) -> Hierarchy:
    """Cluster experts over nodes, then over their GPUs, by ``affinity`` [E, E]."""
    gpus, n_experts = n_ranks // n_nodes, len(affinity)
    node = grouping.spectral_groups(affinity, n_nodes, rng)
    node = grouping.bounded_groups(affinity, node, n_nodes, gpus, n_experts)
    local = np.zeros(n_experts, np.int64)
    for n in range(n_nodes):
        mine = np.flatnonzero(node == n)
        local[mine] = grouping.spectral_groups(affinity[np.ix_(mine, mine)], gpus, rng)
    return Hierarchy(n_nodes, gpus, node, local)


def group_layer(affinity: Floats, clusters: Hierarchy, ratio: float) -> Ints:
    """Return the rank of each expert: clusters of a node's GPUs bounded by the ratio r, [E].

    As printed (Algorithm 2, lines 2 and 3): an equal share, rounded down, and a deviation of 1 at
    least. Where a node's experts do not divide, the upper bound has room for them."""
    ranks = np.empty(len(affinity), np.int64)
    for n in range(clusters.n_nodes):
        mine = np.flatnonzero(clusters.node == n)
        equal = len(mine) // clusters.gpus
        away = max(1, int(equal * ratio + 0.5))
        high = max(equal + away, -(-len(mine) // clusters.gpus))
        inner = affinity[np.ix_(mine, mine)]
        local = grouping.bounded_groups(
            inner, clusters.local[mine], clusters.gpus, max(1, equal - away), high
        )
        ranks[mine] = n * clusters.gpus + local
    return ranks


def equal_groups(
    affinity: Floats, n_ranks: int, n_nodes: int, rng: np.random.Generator, resolution: float = 1.0
) -> Ints:
    """Return the rank of each expert in groups of equal size, [E]; parameters as of
    `cluster_hierarchy`.

    Pairs swap while that raises the co-activation inside groups beyond chance, ``A[i, j] -
    resolution * d_i d_j / sum(d)`` with ``d_i = sum_j A[i, j]``: modularity (Newman, 2006;
    resolution of Reichardt and Bornholdt). Chance would put all loaded experts on one rank."""
    gpus, n_experts = n_ranks // n_nodes, len(affinity)
    degree = affinity.sum(axis=1)
    chance = np.outer(degree, degree) / max(degree.sum(), 1.0)
    beyond = np.rint(1000 * (affinity - resolution * chance))  # whole numbers: swaps end

    def split(mine: Ints, parts: int) -> Ints:
        within, size = np.ix_(mine, mine), len(mine) // parts
        start = grouping.spectral_groups(affinity[within], parts, rng)
        return grouping.swap_experts(
            beyond[within],
            grouping.bounded_groups(affinity[within], start, parts, size, size),
            parts,
        )

    node, ranks = split(np.arange(n_experts), n_nodes), np.empty(n_experts, np.int64)
    for n in range(n_nodes):
        mine = np.flatnonzero(node == n)
        ranks[mine] = n * gpus + split(mine, gpus)
    return ranks


def ratio_curve(affinity: Floats, clusters: list[Hierarchy]) -> tuple[Floats, Floats]:
    """Return (S, U) of GRACE-MoE's Eq. 1 at each of `RATIOS`, means over layers and nodes."""
    spread, inside = np.zeros(len(RATIOS)), np.zeros(len(RATIOS))
    for i, ratio in enumerate(RATIOS):
        for layer, found in zip(affinity, clusters, strict=True):
            ranks = group_layer(layer, found, ratio)
            inside[i] += grouping.utilization(layer, ranks)
            for n in range(found.n_nodes):
                mine = found.node == n
                spread[i] += grouping.size_deviation(ranks[mine] - n * found.gpus, found.gpus)
    return spread / (len(affinity) * clusters[0].n_nodes), inside / len(affinity)


def knee(x: Floats, y: Floats) -> int:
    """Return the point of a rising curve that lies farthest above its chord; ties: the first."""
    span = x[-1] - x[0], y[-1] - y[0]
    if span[0] <= 0 or span[1] <= 0:
        return 0
    return int(np.argmax(np.round((y - y[0]) / span[1] - (x - x[0]) / span[0], 9)))


class Copies(NamedTuple):
    """What is copied in a layer, see `hot_copies`."""

    experts: Ints  #: the hot experts of the heaviest rank
    ranks: Ints  #: those that get a copy of each
    load: Floats  #: predicted, of every rank


def hot_copies(load: Floats, ranks: Ints, n_ranks: int, replication: Replication) -> Copies:
    """Choose the copies of a layer (GRACE-MoE, Eq. 2 and 3) by ``load`` [E] in any unit and
    ``ranks`` [E]; ``replication``: ``dynamic``, ``fixed`` or ``none``."""
    of_rank = np.bincount(ranks, weights=load, minlength=n_ranks).astype(np.float64)
    none = np.zeros(0, np.int64)
    if replication == "none" or n_ranks == 1 or not load.any():
        return Copies(none, none, of_rank)
    rounded = np.round(of_rank, 9)
    heaviest = int(np.argmax(rounded))
    n = 1
    if replication == "dynamic":
        n = min(max(1, int(of_rank[heaviest] / of_rank.mean() + 1e-9)), n_ranks - 1)
    mine = np.flatnonzero(ranks == heaviest)
    mine = mine[np.argsort(-np.round(load[mine], 9), kind="stable")]
    carried = np.cumsum(load[mine])
    n_hot = 1 + int(np.searchsorted(np.round(carried, 9), rounded[heaviest] * n / (n + 1), "right"))
    hot = mine[:n_hot]
    targets = np.argsort(rounded, kind="stable")
    targets = targets[targets != heaviest][:n]
    share = float(load[hot].sum()) / (n + 1)
    predicted = of_rank.copy()
    predicted[heaviest] -= n * share
    predicted[targets] += share
    return Copies(hot, targets, predicted)


def replicated(
    groups: Ints, load: Floats, n_ranks: int, n_nodes: int, replication: Replication
) -> Placement:
    """Return the placement of ``groups`` of experts, [layers, E], with copies of hot ones
    (`hot_copies`), on balanced ranks; groups of a node are neighbours. ``load``: [layers, E]."""
    copies = [hot_copies(*layer, n_ranks, replication) for layer in zip(load, groups, strict=True)]
    extra = [len(c.experts) * len(c.ranks) for c in copies]
    n_experts = groups.shape[1]
    shape = len(groups), n_experts + max(extra)
    expert, rank = np.full(shape, EMPTY), np.zeros(shape, np.int64)
    expert[:, :n_experts], rank[:, :n_experts] = np.arange(n_experts), groups
    for layer, (found, more) in enumerate(zip(copies, extra, strict=True)):
        expert[layer, n_experts : n_experts + more] = np.tile(found.experts, len(found.ranks))
        rank[layer, n_experts : n_experts + more] = found.ranks.repeat(len(found.experts))
    placement = Placement(expert, rank, n_ranks, np.stack([c.load for c in copies]))
    return balance_ranks(placement, n_nodes)


def balance_ranks(placement: Placement, n_nodes: int) -> Placement:
    """Exchange nodes, and GPUs within nodes, so that all hold about equally many instances.

    Layer by layer the largest group goes to where the fewest are so far; among equals the largest
    load to the least. Only memory depends on it: the GPU with the most instances over all layers
    has the least left."""
    slots, gpus = placement.slots(), placement.n_ranks // n_nodes
    load = np.zeros(slots.shape) if placement.load is None else placement.load
    shape = len(slots), n_nodes, gpus
    slots, load = slots.reshape(shape), np.round(load, 9).reshape(shape)
    held, carried = np.zeros(shape[1:], np.int64), np.zeros(shape[1:])
    new = np.empty(shape, np.int64)  # the rank that takes each group
    for layer in range(len(slots)):
        sizes, loads = slots[layer], load[layer]
        takes = _matched(
            sizes.sum(axis=1), loads.sum(axis=1), held.sum(axis=1), carried.sum(axis=1)
        )
        for n, to in enumerate(takes):
            local = _matched(sizes[n], loads[n], held[to], carried[to])
            new[layer, n] = to * gpus + local
            held[to, local] += sizes[n]
            carried[to, local] += loads[n]
    to_rank = new.reshape(len(slots), -1)
    every = np.arange(len(slots))[:, None]
    moved = None
    if placement.load is not None:
        moved = np.empty_like(placement.load)
        moved[every, to_rank] = placement.load
    return Placement(placement.expert, to_rank[every, placement.rank], placement.n_ranks, moved)


def _matched(sizes: Ints, loads: Floats, held: Ints, carried: Floats) -> Ints:
    """Return the place for each group: the largest goes to where the least is."""
    largest = np.lexsort((-loads, -sizes))
    emptiest = np.lexsort((np.round(carried, 9), held))
    places = np.empty(len(sizes), np.int64)
    places[largest] = emptiest
    return places
