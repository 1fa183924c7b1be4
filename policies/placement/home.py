"""Experts on the GPUs where the requests are at home that use them.

Not a paper's. ELDR routes similar requests to one engine (``--policy eldr:unit=engine``), so the
tokens of an engine of a group choose similar experts. An expert on the GPU of the cluster that uses
it most is reached without a copy.
"""

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.policies.base import Needs, PolicyContext
from eldr_sim.policies.eldr.artifact import RoutingArtifact
from eldr_sim.policies.eldr.signature import Floats, Ints, score_of
from eldr_sim.policies.placement.base import ExpertGroup, Placement, PlacementPolicy
from eldr_sim.traces.routing.calibration import CalibrationSet


class HomePlacement(PlacementPolicy):
    """As many tokens as can be on the GPUs, and nodes, of their experts, equally many on each.

    A token on the GPU of an expert counts twice what one on another GPU of its node does: it saves
    a copy between nodes and one within. The best assignment of experts to slots is taken.
    """

    name = "home"
    needs = Needs(experts=True)

    def __init__(self, context: PolicyContext) -> None:
        self._context = context
        _artifact(context)

    def place(self, group: ExpertGroup) -> Placement:
        """Return the placement of a group.

        Raises InputError: there are redundant experts, the ranks cannot hold the experts equally,
        or engines have no clusters of their own.
        """
        if group.n_redundant:
            problem = f"{self.name!r} places one instance of every expert"
            raise InputError("num_redundant_experts", problem, "0")
        return Placement.of_ranks(home_ranks(self._context, group), group.n_ranks)


def home_ranks(context: PolicyContext, group: ExpertGroup) -> Ints:
    """Return the rank of each expert by `HomePlacement`, [layers, E]; raises InputError as it."""
    from scipy.optimize import linear_sum_assignment  # takes long to import

    activation = _clusters(context, group)  # of the requests of each rank
    n_layers, slots, gpus = group.n_layers, group.slots_per_rank, group.n_ranks // group.n_nodes
    used = np.round(activation, 9).transpose(1, 2, 0)  # [layers, E, ranks]
    of_node = used.reshape(n_layers, group.n_experts, group.n_nodes, gpus).sum(axis=3)
    score = used + of_node.repeat(gpus, axis=2)
    found = np.empty((n_layers, group.n_experts), np.int64)
    for layer in range(n_layers):
        expert, slot = linear_sum_assignment(score[layer].repeat(slots, axis=1), maximize=True)
        found[layer, expert] = slot // slots
    return found


def cluster_homes(context: PolicyContext, calibration: CalibrationSet, group: ExpertGroup) -> Ints:
    """Return the rank of each calibration request, that of the most similar cluster, [n].

    Raises InputError as `HomePlacement.place`.
    """
    artifact = _artifact(context)
    _clusters(context, group)
    units = artifact.signatures(calibration.scores(score_of(artifact.transform)))
    first = group.number * group.n_ranks
    similar = np.einsum("nd,kd->nk", units, artifact.centroids[first : first + group.n_ranks])
    return np.asarray(np.argmax(np.round(similar, 9), axis=1))


def _artifact(context: PolicyContext) -> RoutingArtifact:
    if not isinstance(context.artifact, RoutingArtifact):
        problem = "experts placed by home need the clusters of the decode workers' engines"
        allowed = "--policy eldr:unit=engine, and decode workers"
        raise InputError("expert_placement", problem, allowed)
    return context.artifact


def _clusters(context: PolicyContext, group: ExpertGroup) -> Floats:
    """Return the activation of the clusters of a group's ranks, [ranks, layers, E]."""
    activation = _artifact(context).cluster_activation
    first = group.number * group.n_ranks
    found = activation[first : first + group.n_ranks].astype(np.float64)
    if len(activation) != context.n_groups * group.n_ranks:
        raise InputError(
            "expert_placement",
            f"{len(activation)} clusters cannot be at home on {context.n_groups} x "
            f"{group.n_ranks} GPUs",
            "--policy eldr:unit=engine and engines of one GPU",
        )
    if found.shape[1:] != (group.n_layers, group.n_experts):
        problem = f"clusters of {found.shape[1]} layers of {found.shape[2]} experts"
        raise InputError("expert_placement", problem, "a fit on the run's trace")
    return np.asarray(found)
