"""DeepSeek's expert-parallel load balancer (EPLB): copies of loaded experts, spread evenly.

From the README of ``github.com/deepseek-ai/EPLB`` (commit d52c72d): where nodes divide the groups
of experts that the gate chooses from, its *hierarchical* policy spreads whole groups over nodes,
and the rest takes place within each; elsewhere its *global* policy takes all ranks as one node.
Each redundant expert copies the one with the largest load per instance, an even share of the
expert's. Spreading is longest processing time first with equal counts (`greedy_placement`). The
README leaves ties open: here originals come before copies, then the lower expert, node or rank,
which gives its example to the letter."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from eldr_sim.arrays import Array, Floats, Ints
from eldr_sim.errors import InputError
from eldr_sim.policies.base import Needs, PolicyContext
from eldr_sim.policies.choice import Parameters
from eldr_sim.policies.placement import base
from eldr_sim.traces.routing.calibration import CalibrationSet


class EplbParameters(Parameters):
    """Parameters of `EplbPlacement`."""

    load: Literal["decode", "prompt", "cluster", "none"] = "decode"
    """Which tokens of the calibration requests make an expert's load: output tokens (each request
    counts the same), prompt tokens, or the output tokens of the requests of the workers' own ELDR
    cluster; with ``none`` experts lie linearly until ``eplb_interval``, as vLLM starts."""


class EplbPlacement(base.PlacementPolicy):
    """DeepSeek's load balancer: loaded experts on several GPUs, an even load on each."""

    name = "eplb"
    needs = Needs(experts=True, counts=True)
    Parameters = EplbParameters

    def __init__(self, context: PolicyContext, parameters: EplbParameters) -> None:
        load = parameters.load
        self._linear = base.LinearPlacement(context) if load == "none" else None
        self._by_cluster = load == "cluster"
        self._load: NDArray[np.floating[Any]]
        if load == "cluster":
            self._load = base.cluster_activation(context, "'eplb:load=cluster'")
        elif load != "none":
            self._load = calibration_load(context.require_calibration(self), load)

    def place(self, group: base.ExpertGroup) -> base.Placement:
        """Return the placement of a group; raises InputError as `balance`."""
        if self._linear is not None:
            return self._linear.place(group)
        load = self._load[group.number] if self._by_cluster else self._load
        group.check_shape(load.shape, "'eplb' knows the load of")
        return balance(load, group)

    def update(
        self, group: base.ExpertGroup, load: Ints, current: base.Placement
    ) -> base.Placement | None:
        """Return the placement for what the group's tokens chose; see `PlacementPolicy`."""
        return balance(load, group)


def balance(load: Array, group: base.ExpertGroup) -> base.Placement:
    """Return EPLB's placement for a load, [n_layers, n_experts]: slots by rank, there by falling
    load per instance. Raises InputError if ranks, nodes or groups cannot be equal, or a load is
    negative or not finite."""
    load, per_rank = np.asarray(load, np.float64), group.slots_per_rank
    n_layers, n_experts = load.shape
    _check_shares("n_nodes", group.n_nodes, group.n_ranks, "ranks")
    _check_shares("n_expert_groups", group.n_expert_groups, n_experts, "experts")
    n_nodes = group.n_nodes if group.n_expert_groups % group.n_nodes == 0 else 1
    of_node = _experts_of_nodes(load, group.n_expert_groups, n_nodes)
    # From here on each node of each layer is a row.
    rows = np.take_along_axis(load, of_node, axis=1).reshape(n_layers * n_nodes, -1)
    instance, count = replicate(rows, group.n_redundant // n_nodes)
    instance_load = np.take_along_axis(rows / count, instance, axis=1)
    rank = base.greedy_placement(instance_load, group.n_ranks // n_nodes)
    slot = np.lexsort((-np.round(instance_load, 9), rank))
    local = np.take_along_axis(instance, slot, axis=1).reshape(n_layers, n_nodes, -1)
    expert = np.take_along_axis(of_node.reshape(n_layers, n_nodes, -1), local, axis=2)
    expert = expert.reshape(n_layers, -1)
    ranks = np.arange(group.n_ranks).repeat(per_rank)
    of_rank = (
        np.take_along_axis(instance_load, slot, axis=1).reshape(n_layers, -1, per_rank).sum(axis=2)
    )
    return base.Placement(expert, np.broadcast_to(ranks, expert.shape), group.n_ranks, of_rank)


def replicate(load: Floats, n_redundant: int) -> tuple[Ints, Ints]:
    """Make redundant experts of ``load`` [rows, E]: each copies the one of the largest load per
    instance.

    Returns the expert of every instance, [rows, E + n_redundant]: the experts in order, then copies
    as they were made; and the instances of every expert, [rows, E]."""
    rows, n_experts = load.shape
    instance = np.empty((rows, n_experts + n_redundant), np.int64)
    instance[:, :n_experts] = np.arange(n_experts)
    count, every = np.ones(load.shape, np.int64), np.arange(rows)
    for slot in range(n_experts, n_experts + n_redundant):
        hottest = np.argmax(np.round(load / count, 9), axis=1)
        instance[:, slot] = hottest
        count[every, hottest] += 1
    return instance, count


def _experts_of_nodes(load: Floats, n_groups: int, n_nodes: int) -> Ints:
    """Return the experts of the first node in order, then the second's, shape [n_layers, E]."""
    per_group = load.shape[1] // n_groups
    node = base.greedy_placement(load.reshape(len(load), n_groups, per_group).sum(axis=2), n_nodes)
    return np.argsort(node.repeat(per_group, axis=1), axis=1, kind="stable")


def _check_shares(field: str, parts: int, whole: int, of: str) -> None:
    """Raise InputError where ``parts`` cannot have equal shares of ``whole``."""
    if parts < 1 or whole % parts:
        problem = f"{parts} cannot have equal shares of {whole} {of}"
        raise InputError(field, problem, f"a divisor of the {of}")


def calibration_load(calibration: CalibrationSet, tokens: Literal["decode", "prompt"]) -> Floats:
    """Return the load of every expert, [layers, experts]; raises InputError."""
    if tokens == "decode":
        return np.asarray(calibration.decode_activation.mean(axis=0, dtype=np.float64))
    if calibration.counts is None:
        problem = "'prompt': the trace is decode-only and has no experts of prompt tokens"
        raise InputError("expert_placement.load", problem, "decode")
    return np.asarray(calibration.counts.mean(axis=0, dtype=np.float64))
