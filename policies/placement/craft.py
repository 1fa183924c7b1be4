"""Redundant experts by layer: copies go to the layers where they relieve the busiest GPU most.

After CRAFT (arXiv 2603.28768); its abstract says: replication that maximises balance under a
memory budget, layer by layer, by its estimated benefit. Its algorithm was not read; the
rule here is ours. A unit is one copy on each GPU. The next unit goes to the layer where the
greatest load of a GPU, over the mean, EPLB's placement with that unit lowers most."""

import numpy as np
from pydantic import Field

from eldr_sim.arrays import Floats
from eldr_sim.errors import InputError
from eldr_sim.policies.base import Needs, PolicyContext
from eldr_sim.policies.placement.base import EMPTY, ExpertGroup, Placement, PlacementPolicy
from eldr_sim.policies.placement.eplb import EplbParameters, balance, calibration_load

_MOST_UNITS = 16  #: copies on each GPU of one layer


class CraftParameters(EplbParameters):
    """Parameters of `CraftPlacement`."""

    budget: int = Field(default=16, ge=0)
    """Redundant experts a layer, mean of the layers; whole copies on each GPU are given out."""


class CraftPlacement(PlacementPolicy):
    """EPLB with more copies in layers where they even the load more."""

    name = "craft"
    needs = Needs(experts=True)
    Parameters = CraftParameters

    def __init__(self, context: PolicyContext, parameters: CraftParameters) -> None:
        load = parameters.load
        if load == "none" or load == "cluster":
            raise InputError("expert_placement.load", repr(load), "decode or prompt")
        self._load = calibration_load(context.require_calibration(self), load)
        self._budget = parameters.budget

    def place(self, group: ExpertGroup) -> Placement:
        """Return the placement of a group; raises InputError as `balance`, or if the engine has
        ``num_redundant_experts``."""
        if group.n_redundant:
            problem = "'craft' has its own, by layer"
            raise InputError("num_redundant_experts", problem, "0, and --expert-placement "
                             "craft:budget=N")  # fmt: skip
        load = np.asarray(self._load, np.float64)
        group.check_shape(load.shape, "'craft' knows the load of")
        return by_layer(load, group, self._budget)


def by_layer(load: Floats, group: ExpertGroup, budget: int) -> Placement:
    """Return EPLB's placement with ``budget`` copies a layer in the mean, given to the layers that
    they even most. ``load``: [layers, experts]. Raises InputError as `balance`."""
    n_layers, n_experts = load.shape
    units = n_layers * budget // group.n_ranks
    most_units = min(units, _MOST_UNITS, n_experts // group.n_ranks)
    choices = [
        balance(load, group._replace(n_redundant=n * group.n_ranks)) for n in range(most_units + 1)
    ]
    height = np.empty((most_units + 1, n_layers))  # of the fullest GPU, over the mean
    for n, placed in enumerate(choices):
        assert placed.load is not None
        height[n] = placed.load.max(axis=1) / np.maximum(placed.load.mean(axis=1), 1e-30)
    given, layers = np.zeros(n_layers, np.int64), np.arange(n_layers)
    for _ in range(units):
        after = np.minimum(given + 1, most_units)
        saved = np.where(given < most_units, height[given, layers] - height[after, layers], -np.inf)
        best = int(np.argmax(np.round(saved, 9)))
        if saved[best] <= 0.0:
            break
        given[best] += 1
    slots = n_experts + int(given.max()) * group.n_ranks
    expert = np.full((n_layers, slots), EMPTY)
    rank = np.zeros((n_layers, slots), np.int64)
    for layer, n in enumerate(given.tolist()):
        own = choices[n].expert.shape[1]
        expert[layer, :own], rank[layer, :own] = choices[n].expert[layer], choices[n].rank[layer]
    known = [placed.load for placed in choices if placed.load is not None]
    loads = np.stack([known[n][layer] for layer, n in enumerate(given.tolist())])
    return Placement(expert, rank, group.n_ranks, loads)
