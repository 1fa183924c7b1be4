"""Groups of engines that share experts and change their width while they run (elastic EP), at their
end.

The group stands still for the capture of CUDA graphs and the move of experts (`relocation`), or
``width_pause``, as in vLLM (pull request 47288). Published: DeepSeek-V2-Lite from 4 to 8 engines
and back took 31 and 7 s, 3 s where all sleep, prepared (44994); at first 55 and 40 s (20775)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from eldr_sim.arrays import Records
from eldr_sim.policies.placement.base import Placement
from eldr_sim.simulator.control import relocation
from eldr_sim.simulator.plane.steps.group_state import GroupCost

if TYPE_CHECKING:
    from eldr_sim.simulator.control.actions import Actions


class Shape(NamedTuple):
    """A group of some width."""

    placement: Placement
    cost: GroupCost


@dataclass
class ElasticGroup:
    """A pool's group of engines that come and go: from ``first`` on, with ``shapes`` by width;
    ``experts`` of a layer, and MoE layers; ``pause_s``, None where moves and ``graphs_s`` say
    so."""

    pool: int
    first: int
    shapes: Mapping[int, Shape]
    experts: tuple[int, int]
    links: relocation.ExpertLinks
    graphs_s: float
    pause_s: float | None
    width: int = field(init=False)
    _log: list[tuple[float | int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.width = max(self.shapes)

    def most_instances(self) -> int:
        """Return the instances of an expert at any width."""
        shapes = self.shapes.values()
        return max(int(shape.placement.instances(self.experts[0]).max()) for shape in shapes)

    def moved(self, before: int, after: int) -> tuple[relocation.Transfer, float]:
        """Return what moves from one width to another, and for how long the group stands still."""
        placements = [self.shapes[width].placement for width in (before, after)]
        ranks = max(placement.n_ranks for placement in placements)
        old, new = (replace(placement, n_ranks=ranks) for placement in placements)
        moves = relocation.expert_moves(old, new, self.experts[0], self.links.gpus_per_node)
        moved = relocation.transfer_of(moves, self.links, self.experts[1])
        return moved, self.graphs_s + moved.seconds if self.pause_s is None else self.pause_s

    def change(self, acts: Actions) -> None:
        """Have the width of the engines that are there, after a pause unless the run begins."""
        cluster = acts.cluster
        width = sum(self.first + n not in acts.dead for n in range(max(self.shapes)))
        if width == self.width:
            return
        before, after = self.width, self.shapes[width]
        self.width, groups = width, cluster.groups
        assert groups is not None
        engines = slice(self.first, self.first + max(self.shapes))
        masks, replicas = cluster.arrays.masks, groups.replicas
        relocation.place_experts(masks, replicas, engines, after.placement, *self.experts)
        costs = list(groups.costs)
        costs[self.pool] = after.cost
        cluster.groups = groups._replace(costs=tuple(costs))
        acts.workers["width"][self.first] = width
        if acts.now == 0.0:
            return
        moved, pause = self.moved(before, width)
        acts.hang(range(self.first, self.first + width), pause)
        figures = moved.experts, moved.inside_bytes, moved.between_bytes
        self._log.append((acts.now, acts.now + pause, moved.seconds, pause, *figures, self.pool, 0))

    def pause_between(self, before: int, after: int) -> float:
        """Return the seconds for which the group stands still from one width to another."""
        least, most = min(self.shapes), max(self.shapes)
        return self.moved(*(min(max(width, least), most) for width in (before, after)))[1]

    def log(self) -> Records:
        """Return a record of each change but those with which the run begins: ``RELOCATION``."""
        return np.array(self._log, relocation.RELOCATION)
