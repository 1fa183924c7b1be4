"""Gimbal's placement: experts of strong inter-layer affinity on one GPU, the others by load.

Sun et al., "Multi-Layer Scheduling for MoE-Based LLM Reasoning", Algorithm 3. Experts in the
affinity matrix M lie on an anchor GPU; the others go, by falling load, to the least loaded GPU,
again every tau steps (``--eplb-interval``) by the load of a window. The paper's M are pairs of
neighbouring layers that more than 100,000 tokens chose, of 200 requests of vLLM's random data set
(1,024 and 128 tokens): 43% of tokens. Here GPUs hold equally many experts: where M has more, the
most frequent pairs are anchored ("can be made more selective"). Under data-parallel attention which
experts of *different* layers share a GPU moves no byte: see `studies/gimbal`."""

import numpy as np
from pydantic import Field

from eldr_sim.arrays import Array, Ints
from eldr_sim.errors import InputError
from eldr_sim.policies.base import Needs, PolicyContext
from eldr_sim.policies.choice import Parameters
from eldr_sim.policies.placement import base
from eldr_sim.policies.placement.eplb import calibration_load
from eldr_sim.traces.routing.coactivation import Tokens


class GimbalPlacementParameters(Parameters):
    """Parameters of `GimbalPlacement`."""

    frequency: float = Field(default=0.43, ge=0, le=1)
    """Share of tokens that choose a pair of experts of two neighbouring layers from which on M
    keeps it."""
    pairs: int | None = Field(default=None, ge=0)
    """The most frequent pairs of each two layers that M keeps, whatever their frequency."""
    anchor: int = Field(default=0, ge=0)
    """The GPU that holds the experts of M."""
    tokens: Tokens = "all"
    """Which tokens of the calibration requests make M: all that are recorded, output tokens
    (``decode``) or ``prompt`` tokens."""


class GimbalPlacement(base.PlacementPolicy):
    """Experts that follow each other from layer to layer on one GPU, the others spread by load."""

    name = "gimbal"
    needs = Needs(experts=True, counts=True)
    Parameters = GimbalPlacementParameters

    def __init__(self, context: PolicyContext, parameters: GimbalPlacementParameters) -> None:
        self._own = parameters
        calibration = context.require_calibration(self)
        self._load = calibration_load(calibration, "decode")
        self._transitions = calibration.transitions(self._own.tokens)
        assert calibration.trace is not None  # its tokens have been counted
        self._top_k = calibration.trace.top_k

    def place(self, group: base.ExpertGroup) -> base.Placement:
        """Return the placement of a group by the load of the calibration requests. Raises
        InputError for redundant experts, no such anchor, or calibration requests of another
        shape."""
        if group.n_redundant:
            problem = "'gimbal' places one instance of every expert"
            raise InputError("num_redundant_experts", problem, "0, or a placement such as eplb")
        if self._own.anchor >= group.n_ranks:
            problem = f"no GPU {self._own.anchor} among {group.n_ranks}"
            raise InputError("expert_placement.anchor", problem, f"0 to {group.n_ranks - 1}")
        group.check_shape(self._load.shape, "'gimbal' knows")
        return self._placed(group, self._load)

    def update(
        self, group: base.ExpertGroup, load: Ints, current: base.Placement
    ) -> base.Placement | None:
        """Return the placement for what the group's tokens chose; see `PlacementPolicy`."""
        return self._placed(group, load)

    def _placed(self, group: base.ExpertGroup, load: Array) -> base.Placement:
        parameters, counts = self._own, self._transitions
        if parameters.pairs is not None:
            linked = linked_experts(counts, parameters.pairs)
        else:
            # A token counts once for each two of its experts.
            tokens = counts.sum(axis=(1, 2), keepdims=True) / self._top_k**2
            frequent = np.where(counts >= parameters.frequency * tokens, counts, 0)
            linked = linked_experts(frequent, counts[0].size)
        return anchored(load, linked, group.n_ranks, self._own.anchor)


def linked_experts(transitions: Ints, pairs: int) -> Ints:
    """Return how strongly each expert is linked to a neighbouring layer's (M of Algorithm 3),
    [layers, E]: tokens of its most frequent pair of the ``pairs`` that two layers keep; ties to the
    lower experts. ``transitions``: [layers - 1, E, E]."""
    between, n_experts, _ = transitions.shape
    links = np.zeros((between + 1, n_experts), np.int64)
    for layer, counts in enumerate(transitions):
        flat = counts.ravel()
        kept = np.argsort(-flat, kind="stable")[:pairs]
        before, after = np.divmod(kept, n_experts)
        np.maximum.at(links[layer], before, flat[kept])
        np.maximum.at(links[layer + 1], after, flat[kept])
    return links


def anchored(load: Array, linked: Ints, n_ranks: int, anchor: int) -> base.Placement:
    """Return Algorithm 3's placement: linked experts on GPU ``anchor``, the most strongly linked
    first, the others greedily by ``load``, [layers, E]; all GPUs hold equally many."""
    room = load.shape[1] // n_ranks
    order = np.argsort(-linked, axis=1, kind="stable")[:, :room]
    placed: Ints = np.full(load.shape, -1)
    np.put_along_axis(placed, order, anchor, axis=1)
    placed[linked == 0] = -1
    return base.Placement.of_ranks(base.greedy_placement(load, n_ranks, placed), n_ranks)
