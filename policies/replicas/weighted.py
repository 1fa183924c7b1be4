"""Instances drawn by the predicted load of their ranks: GRACE-MoE's routing (Sec. 4.3).

``weighted`` (WRR, Algorithm 3) draws among all instances, in inverse proportion to the predicted
load of their ranks (`Placement.load`); ``local_first`` (TAR, Algorithm 4) takes the instance on the
token's own GPU, else one on its node, else any; among several the same draw. Draws are a hash of
the token's rank and position there, the layer and the expert: while a batch stays a sequence keeps
its copies, as with vLLM's hash."""

import numpy as np

from eldr_sim.arrays import Floats, Ints
from eldr_sim.errors import InputError
from eldr_sim.policies.base import Needs
from eldr_sim.policies.placement.base import Placement
from eldr_sim.policies.replicas.base import ReplicaChoice, place_among_equals, slots_of_experts

#: Constants of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), finaliser variant 13 of D.
#: Stafford.
SPLITMIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class WeightedInstances(ReplicaChoice):
    """An instance at random, the likelier the less load its rank is to have."""

    name = "weighted"
    needs = Needs(rank_loads=True)
    _local = False

    def choose(
        self,
        tokens_home: Ints,
        experts: Ints,
        placement: Placement,
        layer: int,
        node_of_rank: Ints,
        prompts: bool = False,
    ) -> Ints:
        """Return the slots; see `ReplicaChoice`. Raises InputError as `rank_weights`."""
        expert, rank = placement.expert[layer], placement.rank[layer]
        slots = slots_of_experts(expert)
        weight = np.where(slots >= 0, rank_weights(placement)[layer][rank[slots]], 0.0)[experts]
        home = np.asarray(tokens_home)
        if self._local:
            on = rank[slots][experts]
            node, here = np.asarray(node_of_rank), home[:, None, None]
            away = (on != here) + (node[on] != node[here]).astype(np.int64)
            away = np.where(weight > 0, away, 2)
            weight = np.where(away == away.min(axis=2, keepdims=True), weight, 0.0)
        sums = np.cumsum(weight, axis=2)
        wanted = draws(home, place_among_equals(home), layer, experts) * sums[..., -1]
        turn = (sums <= wanted[..., None]).sum(axis=2)
        return np.asarray(slots[experts, turn])


class LocalFirst(WeightedInstances):
    """The instance on the token's own GPU, else on its node, else any; among several `weighted`."""

    name = "local_first"
    _local = True


def rank_weights(placement: Placement) -> Floats:
    """Return the inverse of each rank's predicted load, [layers, ranks]; raises InputError."""
    if placement.load is None:
        raise InputError(
            "replica_choice",
            "it weights instances by the load of their ranks, and this placement has no loads",
            "--expert-placement grace or eplb, or a policy that gives its placements a load",
        )
    mean = placement.load.mean(axis=1, keepdims=True)
    return np.asarray(1.0 / np.maximum(placement.load, np.where(mean > 0, 1e-6 * mean, 1.0)))


def draws(home: Ints, place: Ints, layer: int, experts: Ints) -> Floats:
    """Return a number from 0 to 1 for each token and expert, [tokens, top_k]."""
    counter = (place[:, None] << 40) | (home[:, None] << 28) | (layer << 16) | experts
    add, first, second = (np.uint64(constant) for constant in SPLITMIX)
    z = counter.astype(np.uint64) + add
    z = (z ^ (z >> np.uint64(30))) * first
    z = (z ^ (z >> np.uint64(27))) * second
    return np.asarray(((z ^ (z >> np.uint64(31))) >> np.uint64(32)) / 2.0**32)
