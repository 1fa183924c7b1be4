"""Experts that move while a run lasts: EPLB at run time.

A group of engines that share experts counts tokens by expert over a window of steps, and asks its
placement policy after every ``interval`` steps. Weights that a rank lacks move, layer by layer::

    transfer = sum over MoE layers of max(inside / links of a node, between / NIC)

``inside`` and ``between``: bytes that the busiest rank sends or receives, from its own node where
that holds the expert; receivers take turns among holders. The group waits at the end of the step
after which it asked, or goes on and has the new placement from the first step that starts when all
has arrived (asynchronous); until then it is not asked again.

So does vLLM (``vllm/distributed/eplb/eplb_state.py``, ``EplbState.step``, ``rearrange``;
``rebalance_execute.py``); the counter starts at three quarters of the interval. What differs: its
sender is one rank for a run of receivers, whatever the node; asynchronously it puts layer by layer
in force, and slows the steps beside; its counts, by instance, are read with the instances of now.
Planning, launches and copies are ``overhead_s``, in vLLM most of it: DeepSeek-R1 in NVFP4 on 32
GB200 with 32 redundant experts moves 12 GB to each rank, 0.02 to 0.03 s by this formula, and took
0.65 to 1.70 s (vLLM PR 43219)."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from eldr_sim.arrays import Ints, Records, Words
from eldr_sim.kernel_profiles.gpus import GPU
from eldr_sim.kernel_profiles.kernels.all_to_all import NETWORK_EFFICIENCY
from eldr_sim.kernel_profiles.kernels.roofline import efficiency_of
from eldr_sim.policies.placement.base import ExpertGroup, Placement, PlacementPolicy
from eldr_sim.policies.replicas.base import place_among_equals
from eldr_sim.policies.replicas.weighted import rank_weights
from eldr_sim.simulator.plane.steps import expert_loads
from eldr_sim.simulator.plane.steps.group_state import Replicas
from eldr_sim.simulator.setup.replay import make_replicas, rank_masks

#: One record a relocation: what moved, over all MoE layers of the model.
RELOCATION = np.dtype(
    [
        ("asked_s", np.float64),
        ("in_force_s", np.float64),  # negative: not before the run ended
        ("transfer_s", np.float64),  # with what it takes besides
        ("stall_s", np.float64),  # that the group waited for it
        ("experts", np.int64),  # the number of experts with weights that moved
        ("inside_bytes", np.float64),  # moved inside nodes, all ranks
        ("between_bytes", np.float64),
        ("pool", np.int64),
        ("group", np.int64),  # of its pool
    ]
)


#: Why to believe what a relocation takes.
PROVENANCE = {
    "label": "derived",
    "origin": "bytes over the links and NICs at what collectives and transfers reach, and "
    "eplb_overhead_ms",
    "kernel_source": "",
}
#: What a reader must know of relocations without ``overhead_s``.
BYTES_ALONE = (
    "relocations take no longer than the bytes of their experts: in vLLM they took 0.65 to 1.70 s "
    "where bytes take 0.03 s (PR 43219, DeepSeek-R1 on 32 GB200), see --eplb-overhead-ms"
)


class RelocationRule(NamedTuple):
    """When placements are made again, and whether steps wait for it."""

    interval: int  #: steps of a group
    window: int  #: steps, the last ones, whose tokens count
    asynchronous: bool = False  #: whether steps go on while weights move
    overhead_s: float = 0.0  #: what a relocation takes beside moving weights

    @property
    def first(self) -> int:
        """Steps before the first relocation: a quarter of the interval, as in vLLM."""
        return max(1, self.interval // 4)


class ExpertLinks(NamedTuple):
    """What expert weights move over."""

    expert_bytes: int  #: of one expert of one layer
    inside: float  #: bytes/s of a rank to and from the others of its node
    between: float  #: and to and from other nodes
    gpus_per_node: int


def expert_links(gpu: GPU, expert_bytes: int, n_ranks: int, gpus_per_node: int) -> ExpertLinks:
    """Return the links of a group's ranks: what collectives and transfers reach of the peak."""
    inside = efficiency_of(gpu).link_bandwidth * gpu.peer_bandwidth(
        max(2, min(n_ranks, gpus_per_node))
    )
    between = NETWORK_EFFICIENCY * gpu.nic_bandwidth
    return ExpertLinks(expert_bytes, inside, between, gpus_per_node)


def expert_moves(before: Placement, after: Placement, n_experts: int, gpus_per_node: int) -> Ints:
    """Return how many experts each rank sends to each other, ``[layers, from, to]``: to those that
    have one afterwards and no instance before, once."""
    had, has = before.has_expert(n_experts), after.has_expert(n_experts)
    layer, to, expert = np.nonzero(has & ~had)
    node = np.arange(before.n_ranks) // gpus_per_node
    holds = had[layer, :, expert]
    near = holds & (node == node[to][:, None])
    is_near = near.any(axis=1)
    holds[is_near] = near[is_near]
    askers = np.stack([layer, expert, np.where(is_near, node[to], -1)], axis=1)
    turn = place_among_equals(np.unique(askers, axis=0, return_inverse=True)[1].ravel())
    nth = np.cumsum(holds, axis=1)
    source = np.argmax(nth > (turn % nth[:, -1])[:, None], axis=1) if len(to) else to
    moves = np.zeros((len(had), before.n_ranks, before.n_ranks), np.int64)
    np.add.at(moves, (layer, source, to), 1)
    return moves


def place_experts(
    masks: Words,
    replicas: Replicas | None,
    engines: slice,
    placement: Placement,
    n_experts: int,
    n_layers: int,
) -> None:
    """Write where the experts of a group's engines are into what the compiled loop reads."""
    masks[engines, : placement.n_ranks] = rank_masks([placement], n_experts, n_layers)
    if replicas is None or not len(replicas.multi):
        return
    changed = make_replicas([placement], n_experts, n_layers, most=replicas.rank.shape[-1])
    assert changed is not None
    replicas.multi[engines], replicas.many[engines] = changed.multi, changed.many
    replicas.rank[engines] = changed.rank
    replicas.n_instances[engines] = changed.n_instances
    replicas.weight[engines] = changed.weight


class Transfer(NamedTuple):
    """What a relocation moves, over all MoE layers of the model."""

    experts: int
    inside_bytes: float
    between_bytes: float
    seconds: float


def transfer_of(moves: Ints, links: ExpertLinks, n_layers: int) -> Transfer:
    """Return what moves in a model of ``n_layers`` MoE layers, which take the trace's in turn."""
    layers, ranks, _ = moves.shape
    node = np.arange(ranks) // links.gpus_per_node
    same = node == node[:, None]
    times = np.bincount(np.arange(n_layers) % layers, minlength=layers)
    tiers = [links.expert_bytes * np.where(mask, moves, 0) for mask in (same, ~same)]
    busiest = [np.maximum(tier.sum(1).max(1), tier.sum(2).max(1)) for tier in tiers]
    seconds = np.maximum(busiest[0] / links.inside, busiest[1] / links.between)
    inside, between = (math.fsum(times * tier.sum((1, 2))) for tier in tiers)
    return Transfer(int(times @ moves.sum((1, 2))), inside, between, math.fsum(times * seconds))


@dataclass
class MovableGroup:
    """A group with experts that may move, and where they are."""

    first: int  #: its first engine, counted over both pools; ``size`` engines from there on
    size: int
    #: ``pool``, ``number``: its pool, and its number there.
    pool: int
    number: int
    #: ``group``, ``policy``, ``placement``: what is placed, by whom, and where it is now.
    group: ExpertGroup
    policy: PlacementPolicy
    placement: Placement
    links: ExpertLinks  #: what the weights move over
    slots: int  #: different experts that a rank has room for
    parts: deque[Ints] = field(default_factory=deque)  # of the intervals of a window
    under_way: tuple[Placement, int] | None = None  # and its place in the log


class Relocations:
    """The relocations of a run: when (``rule``), which groups; ``n_layers``: MoE layers of the
    model, ``n_experts``: of a layer; ``weighs``: whether the replica choice weighs instances by the
    load of their ranks, which each placement must then have."""

    def __init__(
        self,
        rule: RelocationRule,
        groups: Sequence[MovableGroup],
        n_workers: int,
        n_layers: int,
        n_experts: int,
        weighs: bool = False,
    ) -> None:
        self.rule, self.n_layers, self.n_experts = rule, n_layers, n_experts
        self._weighs = weighs
        self.groups = {group.first: group for group in groups}
        self.loads: expert_loads.ExpertLoads = expert_loads.make_expert_loads(
            n_workers, n_layers * -(-n_experts // 64)
        )
        whole = rule.window // rule.interval
        for group in groups:
            group.parts = deque(maxlen=whole + 1)
            self._plan(group.first, 0, rule.first)
        self._log: list[tuple[float | int, ...]] = []

    @property
    def most_instances(self) -> int:
        """Instances of an expert that a placement may come to have."""
        return 1 + max(group.group.n_redundant for group in self.groups.values())

    def bind(self, masks: Words, replicas: Replicas | None) -> None:
        """Take the arrays in which the compiled loop looks up where experts are."""
        self._masks, self._replicas = masks, replicas

    def answer(self, question: int, leader: int, now: float) -> None:
        """Do what the compiled loop asks for: `expert_loads.ASK` or ``PUT_IN_FORCE``."""
        if question == expert_loads.ASK:
            self._relocate(self.groups[leader], float(self.loads.end_s[leader]))
        else:
            self._put_in_force(self.groups[leader], now)

    def log(self) -> Records:
        """Return a record of each relocation, ``RELOCATION``."""
        return np.array(self._log, RELOCATION)

    def _plan(self, leader: int, after: int, steps: int) -> None:
        """Relocate a group ``steps`` steps after the first ``after``."""
        loads, rule = self.loads, self.rule
        due = after + steps
        loads.due[leader] = due
        loads.from_step[leader, expert_loads.LATE] = due - rule.window % rule.interval
        if rule.window >= rule.interval:
            loads.from_step[leader, expert_loads.EARLY] = after

    def _window(self, group: MovableGroup) -> Ints:
        """Return the tokens of each expert in the window, ``[trace layers, experts]``."""
        whole = self.rule.window // self.rule.interval
        group.parts.append(expert_loads.take_counts(self.loads, group.first, self.n_experts))
        parts = list(group.parts)
        counts = np.zeros((self.n_layers, self.n_experts), np.int64)
        for part in parts[len(parts) - min(whole, len(parts)) :]:
            counts += part[expert_loads.EARLY] + part[expert_loads.LATE]
        if len(parts) > whole:
            counts += parts[0][expert_loads.LATE]
        load = np.zeros((group.group.n_layers, self.n_experts), np.int64)
        np.add.at(load, np.arange(self.n_layers) % group.group.n_layers, counts)
        return load

    def _relocate(self, group: MovableGroup, end: float) -> None:
        """Ask for a placement at the end of a step, and move what has to."""
        loads, leader = self.loads, group.first
        load = self._window(group)
        self._plan(leader, int(loads.due[leader]), self.rule.interval)
        loads.stall_s[leader] = 0.0
        if group.under_way is not None:
            return
        placement = group.policy.update(group.group, load, group.placement)
        if placement is None:
            return
        self._check(group, placement)
        moves = expert_moves(group.placement, placement, self.n_experts, group.links.gpus_per_node)
        transfer = transfer_of(moves, group.links, self.n_layers)
        seconds = transfer.seconds + self.rule.overhead_s
        stall = 0.0 if self.rule.asynchronous else seconds
        figures = transfer.experts, transfer.inside_bytes, transfer.between_bytes
        self._log.append((end, -1.0, seconds, stall, *figures, group.pool, group.number))
        group.under_way = placement, len(self._log) - 1
        loads.stall_s[leader] = stall
        if self.rule.asynchronous:
            loads.arrival_s[leader] = end + seconds
        else:
            self._put_in_force(group, end + seconds)

    def _put_in_force(self, group: MovableGroup, now: float) -> None:
        """Let the next steps find experts where the placement under way has them."""
        assert group.under_way is not None
        group.placement, place = group.under_way
        group.under_way = None
        asked, _, *rest = self._log[place]
        self._log[place] = (asked, now, *rest)
        self.loads.arrival_s[group.first] = np.inf
        engines = slice(group.first, group.first + group.size)
        dims = self.n_experts, self.n_layers
        place_experts(self._masks, self._replicas, engines, group.placement, *dims)

    def _check(self, group: MovableGroup, placement: Placement) -> None:
        """Raise ValueError unless a policy's placement fits, InputError if it has no load that the
        replica choice weighs by: compiled code does not look."""
        now = group.placement
        fits = placement.n_ranks == now.n_ranks and placement.expert.shape == now.expert.shape
        if fits:
            held = placement.has_expert(self.n_experts)
            fits = bool(held.any(axis=1).all() and held.sum(axis=2).max() <= group.slots)
        if not fits:
            raise ValueError(f"placement policy {group.policy.name!r}: no placement of its group")
        if self._weighs:
            rank_weights(placement)
