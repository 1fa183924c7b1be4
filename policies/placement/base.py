"""Where the experts of expert-parallel GPUs live: the rank (GPU) of every expert.

A layer takes the time of the rank that reads the most activated experts."""

import numpy as np
from numpy.typing import NDArray

from eldr_sim.arrays import Array, Ints
from eldr_sim.errors import InputError
from eldr_sim.policies.base import Needs, Policy, PolicyContext
from eldr_sim.policies.placement.expert_placement import EMPTY, ExpertGroup, Placement, room_of

__all__ = [
    "EMPTY",
    "EldrPlacement",
    "ExpertGroup",
    "LinearPlacement",
    "Placement",
    "PlacementPolicy",
    "cluster_activation",
    "greedy_placement",
]  # fmt: skip


class PlacementPolicy(Policy):
    """Chooses the ranks of the experts."""

    decision = "placement"

    def place(self, group: ExpertGroup) -> Placement:
        """Return the placement of a group."""
        raise NotImplementedError

    def update(self, group: ExpertGroup, load: Ints, current: Placement) -> Placement | None:
        """Return another placement of a group, with as many slots, ranks and instances, or None to
        leave it.

        Asked while engines run (``--eplb-interval``) of a policy that needs ``counts``. ``load``:
        [n_layers, n_experts]: the group's tokens that chose each expert of late."""
        raise NotImplementedError


class LinearPlacement(PlacementPolicy):
    """Neighbours together, equally many on each rank: vLLM's default.

    With redundant experts what vLLM starts from before EPLB
    (``EplbState.build_initial_global_physical_to_logical_map``): all experts in order, then again
    from the first on."""

    name = "linear"

    def place(self, group: ExpertGroup) -> Placement:
        """Return the placement of a group; raises InputError as `ExpertGroup.slots_per_rank`."""
        per_rank = group.slots_per_rank
        slots = np.arange(per_rank * group.n_ranks)
        shape = group.n_layers, len(slots)
        return Placement(
            np.broadcast_to(slots % group.n_experts, shape),
            np.broadcast_to(slots // per_rank, shape),
            group.n_ranks,
        )


class EldrPlacement(PlacementPolicy):
    """ELDR's placement (Sec. 5): the expected activation of a worker's cluster spread evenly.

    Engines that share experts have one cluster."""

    name = "eldr"
    needs = Needs(experts=True)

    def __init__(self, context: PolicyContext) -> None:
        self._activation = cluster_activation(context, "'eldr'")

    def place(self, group: ExpertGroup) -> Placement:
        """Return the placement of a group; raises InputError, as for redundant experts."""
        if group.n_redundant:
            problem = "'eldr' places one instance of every expert"
            allowed = "0, or an expert placement with redundant experts, such as eplb"
            raise InputError("num_redundant_experts", problem, allowed)
        ranks = greedy_placement(self._activation[group.number], group.n_ranks)
        return Placement.of_ranks(ranks, group.n_ranks)


def cluster_activation(context: PolicyContext, placement: str) -> NDArray[np.float32]:
    """Return the expected decode activation of the groups' ELDR clusters, or the mean of their
    engines', [groups, layers, E]. Raises InputError, naming ``placement``, without a fit of
    them."""
    if context.artifact is None or callable(context.artifact):
        problem = (
            f"{placement} places the experts of each decode worker's cluster, and the decode "
            "policy has no clusters"
        )
        raise InputError("expert_placement", problem, "--policy eldr, or the linear placement")
    activation = context.artifact.cluster_activation
    of_group = len(activation) // context.n_groups
    if of_group == 1:
        return activation
    shape = context.n_groups, of_group, *activation.shape[1:]
    return np.asarray(activation.reshape(shape).mean(axis=1))


def greedy_placement(activation: Array, n_ranks: int, placed: Ints | None = None) -> Ints:
    """Return the rank of every expert under ELDR's placement (Sec. 5), layer by layer, [..., E].

    The next most active expert goes to the rank with the least activation so far that has room;
    ties to the lower expert and rank, compared to 1e-9. ``activation``: [..., E], finite and not
    negative; ``placed``: [..., E]: ranks of experts placed beforehand, -1 for others. Raises
    InputError if ``n_ranks`` does not divide E."""
    weights = np.round(np.asarray(activation, dtype=np.float64), 9)
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise InputError("activation", "a value is negative or not finite", "0 or more")
    n_experts = weights.shape[-1]
    room = room_of(n_experts, n_ranks)
    rows = weights.reshape(-1, n_experts)
    order = np.argsort(-rows, axis=1, kind="stable")
    load = np.zeros((len(rows), n_ranks))
    held = np.zeros((len(rows), n_ranks), dtype=np.int64)
    slots = np.full(rows.shape, -1) if placed is None else placed.reshape(rows.shape).copy()
    row, expert = np.nonzero(slots >= 0)
    np.add.at(load, (row, slots[row, expert]), rows[row, expert])
    np.add.at(held, (row, slots[row, expert]), 1)
    every = np.arange(len(rows))
    for expert in order.T:
        new = slots[every, expert] < 0
        rank = np.argmin(np.where(held < room, np.round(load, 9), np.inf), axis=1)
        slots[every, expert] = np.where(new, rank, slots[every, expert])
        load[every, rank] += np.where(new, rows[every, expert], 0.0)
        held[every, rank] += new
    return slots.reshape(weights.shape)
