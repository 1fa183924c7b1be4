"""Where the experts of expert-parallel GPUs live: the rank (GPU) of every expert.

A layer takes the time of the rank that reads the most activated experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_sim.arrays import Array, Bools, Floats, Ints
from eldr_sim.errors import InputError
from eldr_sim.policies.base import Needs, Policy, PolicyContext

EMPTY = -1  #: stands in `Placement.expert` for no expert


@dataclass(frozen=True, eq=False)
class Placement:
    """Instances of experts on ranks, layer by layer.

    An expert has one or more, perhaps several on one rank, as EPLB's published algorithm gives;
    ranks may hold unequally many."""

    #: [layers, slots]: each instance's expert (``physical_to_logical_map``), ``EMPTY`` at the end.
    expert: Ints
    rank: Ints  #: shape [layers, slots]: the rank that holds it
    n_ranks: int  #: ranks of the group
    #: [layers, ranks]: load of ranks that it was made for, in any unit; None: for none.
    load: Floats | None = None

    @classmethod
    def of_ranks(cls, ranks: Ints, n_ranks: int) -> "Placement":
        """Return the placement of one instance of every expert, from its rank, [layers, E]."""
        return cls(np.broadcast_to(np.arange(ranks.shape[-1]), ranks.shape), ranks, n_ranks)

    def held(self, n_experts: int) -> Bools:
        """Return which rank holds an instance of which expert, [layers, ranks, experts]."""
        held = np.zeros((len(self.expert), self.n_ranks, n_experts), np.bool_)
        layer, slot = np.nonzero(self.expert != EMPTY)
        held[layer, self.rank[layer, slot], self.expert[layer, slot]] = True
        return held

    def behind(self, n: int) -> "Placement":
        """Return the placement on the ranks behind ``n`` others, which hold nothing."""
        load = None if self.load is None else np.pad(self.load, ((0, 0), (n, 0)))
        return Placement(self.expert, self.rank + n, self.n_ranks + n, load) if n else self

    def instances(self, n_experts: int) -> Ints:
        """Return how many instances each expert has, [layers, experts]."""
        counts = np.zeros((len(self.expert), n_experts), np.int64)
        layer, slot = np.nonzero(self.expert != EMPTY)
        np.add.at(counts, (layer, self.expert[layer, slot]), 1)
        return counts

    def slots(self) -> Ints:
        """Return how many instances each rank holds, [layers, ranks]."""
        counts = np.zeros((len(self.expert), self.n_ranks), np.int64)
        layer, slot = np.nonzero(self.expert != EMPTY)
        np.add.at(counts, (layer, self.rank[layer, slot]), 1)
        return counts


class ExpertGroup(NamedTuple):
    """What a placement is made for: the experts that engines spread over their GPUs."""

    engines: Sequence[int]
    """Indices of the decode engines that share them, as routers count them."""
    n_layers: int  #: layers to place, those of the routing trace
    n_experts: int  #: experts of a layer
    n_ranks: int  #: ranks to place them on
    n_redundant: int = 0
    """Instances of experts beyond one of each, vLLM's ``num_redundant_experts``."""
    n_nodes: int = 1  #: nodes of the ranks: equal runs of neighbouring ranks
    n_expert_groups: int = 1
    """Groups of neighbouring experts from which the gate chooses a few for each token, before it
    chooses experts in them: ``n_group`` of DeepSeek-V3's configuration, where it is 8."""

    @property
    def number(self) -> int:
        """The group's place among groups of its size, and so the number of its cluster."""
        return self.engines[0] // len(self.engines)

    @property
    def slots_per_rank(self) -> int:
        """Instances that each rank holds; raises InputError if they cannot hold equally many."""
        if not self.n_redundant:
            return _room(self.n_experts, self.n_ranks)
        slots = self.n_experts + self.n_redundant
        if self.n_redundant < 0 or slots % self.n_ranks:
            raise InputError(
                "num_redundant_experts",
                f"{self.n_ranks} ranks cannot hold {self.n_experts} experts and "
                f"{self.n_redundant} redundant ones equally",
                "a number that makes the sum a multiple of the ranks",
            )
        return slots // self.n_ranks

    def check_shape(self, shape: tuple[int, ...], knows: str) -> None:
        """Raise InputError unless what a placement ``knows`` is of these layers and experts."""
        if shape != (self.n_layers, self.n_experts):
            problem = (
                f"{knows} {shape[0]} layers of {shape[1]} experts, and is to place "
                f"{self.n_layers} layers of {self.n_experts}"
            )
            raise InputError("expert_placement", problem)


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
    room = _room(n_experts, n_ranks)
    rows = weights.reshape(-1, n_experts)
    order = np.argsort(-rows, axis=1, kind="stable")
    load = np.zeros((len(rows), n_ranks))
    held = np.zeros((len(rows), n_ranks), dtype=np.int64)
    found = np.full(rows.shape, -1) if placed is None else placed.reshape(rows.shape).copy()
    row, expert = np.nonzero(found >= 0)
    np.add.at(load, (row, found[row, expert]), rows[row, expert])
    np.add.at(held, (row, found[row, expert]), 1)
    every = np.arange(len(rows))
    for expert in order.T:
        new = found[every, expert] < 0
        rank = np.argmin(np.where(held < room, np.round(load, 9), np.inf), axis=1)
        found[every, expert] = np.where(new, rank, found[every, expert])
        load[every, rank] += np.where(new, rows[every, expert], 0.0)
        held[every, rank] += new
    return found.reshape(weights.shape)


def _room(n_experts: int, n_ranks: int) -> int:
    if n_ranks < 1 or n_experts % n_ranks:
        problem = f"{n_ranks} ranks cannot hold {n_experts} experts equally"
        raise InputError("n_ranks", problem, "a divisor of the experts")
    return n_experts // n_ranks
