"""Where instances of experts lie, and the group of GPUs that they are placed on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eldr_sim.arrays import Bools, Floats, Ints
from eldr_sim.errors import InputError

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

    def has_expert(self, n_experts: int) -> Bools:
        """Return which rank holds an instance of which expert, [layers, ranks, experts]."""
        on_rank = np.zeros((len(self.expert), self.n_ranks, n_experts), np.bool_)
        layer, slot = np.nonzero(self.expert != EMPTY)
        on_rank[layer, self.rank[layer, slot], self.expert[layer, slot]] = True
        return on_rank

    def with_rank_offset(self, n: int) -> "Placement":
        """Return the placement on the ranks behind ``n`` others, which hold nothing."""
        load = None if self.load is None else np.pad(self.load, ((0, 0), (n, 0)))
        return Placement(self.expert, self.rank + n, self.n_ranks + n, load) if n else self

    def instances(self, n_experts: int) -> Ints:
        """Return how many instances each expert has, [layers, experts]."""
        return _counted(self.expert, self.expert != EMPTY, n_experts)

    def slots(self) -> Ints:
        """Return how many instances each rank holds, [layers, ranks]."""
        return _counted(self.rank, self.expert != EMPTY, self.n_ranks)


def _counted(values: Ints, counts: Bools, n: int) -> Ints:
    """Return how often each of ``n`` values is in each row, where it counts: [rows, n]."""
    rows, _ = np.nonzero(counts)
    return np.bincount(rows * n + values[counts], minlength=len(values) * n).reshape(-1, n)


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
            return room_of(self.n_experts, self.n_ranks)
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


def room_of(n_experts: int, n_ranks: int) -> int:
    """Return the experts of each rank; raises InputError if they cannot hold equally many."""
    if n_ranks < 1 or n_experts % n_ranks:
        problem = f"{n_ranks} ranks cannot hold {n_experts} experts equally"
        raise InputError("n_ranks", problem, "a divisor of the experts")
    return n_experts // n_ranks
