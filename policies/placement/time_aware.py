"""Experts grouped for the bottleneck that a group has: the time of a layer, from the tables.

Not a paper's. Steps of calibration tokens are drawn and priced as the group's are: the slowest
rank's time for its pairs and activated experts, dispatch and combine (`step_swaps`). In each layer
the fastest of neighbours, an even load and groups by affinity is taken, and pairs of experts swap
while that shortens it; every rank holds equally many. `HomePlacement` puts experts where the
requests are at home that use them: under ``--policy eldr:unit=engine`` an engine's tokens choose
similar experts, which are reached without a copy on their GPU."""

from typing import Literal

import numpy as np
from pydantic import Field

from eldr_sim.arrays import Floats, Ints
from eldr_sim.errors import InputError
from eldr_sim.policies.base import Needs, PolicyContext
from eldr_sim.policies.eldr.artifact import RoutingArtifact
from eldr_sim.policies.eldr.signature import score_of
from eldr_sim.policies.placement.base import (
    ExpertGroup,
    Placement,
    PlacementPolicy,
    greedy_placement,
)
from eldr_sim.policies.placement.grace import AffinityParameters, GroupedPlacement, equal_groups
from eldr_sim.traces.routing.calibration import CalibrationSet
from eldr_sim.traces.routing.coactivation import token_rows


class HomePlacement(PlacementPolicy):
    """As many tokens as can be on the GPUs, and nodes, of their experts, equally many on each.

    The best assignment; on an expert's GPU a token counts twice what one on its node does."""

    name = "home"
    needs = Needs(experts=True)

    def __init__(self, context: PolicyContext) -> None:
        self._context = context
        _artifact(context)

    def place(self, group: ExpertGroup) -> Placement:
        """Return the placement of a group. Raises InputError for redundant experts, ranks that
        cannot hold experts equally, or engines without separate clusters."""
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
    """Return the rank of the cluster most like each calibration request, [n]."""
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
    clusters = activation[first : first + group.n_ranks].astype(np.float64)
    if len(activation) != context.n_groups * group.n_ranks:
        raise InputError(
            "expert_placement",
            f"{len(activation)} clusters cannot be at home on {context.n_groups} x "
            f"{group.n_ranks} GPUs",
            "--policy eldr:unit=engine and engines of one GPU",
        )
    if clusters.shape[1:] != (group.n_layers, group.n_experts):
        problem = f"clusters of {clusters.shape[1]} layers of {clusters.shape[2]} experts"
        raise InputError("expert_placement", problem, "a fit on the run's trace")
    return np.asarray(clusters)


#: Tokens of a layer that are counted: steps of fewer are several, of more are sampled.
_TOKENS, _MOST_STEPS = 2048, 32


class TimeAwareParameters(AffinityParameters):
    """Parameters of `TimeAwarePlacement`."""

    tokens_per_rank: int = Field(default=128, ge=1)
    """Tokens of each GPU in the steps that are to be short."""
    homes: Literal["even", "clusters"] = "even"
    """Where tokens are at home: on any GPU, or on that of their request's ELDR cluster
    (``--policy eldr:unit=engine``)."""


class TimeAwarePlacement(GroupedPlacement):
    """Experts placed so that the layers of steps of calibration tokens are short."""

    name = "time_aware"
    needs = Needs(experts=True, costs=True)
    Parameters = TimeAwareParameters

    def __init__(self, context: PolicyContext, parameters: TimeAwareParameters) -> None:
        super().__init__(context, parameters.tokens)
        self._context, self._own = context, parameters

    def place(self, group: ExpertGroup) -> Placement:
        """Return the placement of a group; raises InputError as `HomePlacement.place`, or without
        times of a rank."""
        _ = group.slots_per_rank
        if self._context.rank_moe is None or self._context.all_to_all is None:
            problem = f"{self.name!r} needs the times of GPUs that share experts"
            allowed = "--data-parallel-size 2 or more with --enable-expert-parallel"
            raise InputError("expert_placement", problem, allowed)
        return super().place(group)

    def _place(self, affinity: Floats, load: Floats, group: ExpertGroup) -> Placement:
        from eldr_sim.policies.placement import step_swaps

        moe, all_to_all = self._context.rank_moe, self._context.all_to_all
        assert moe is not None
        assert all_to_all is not None
        priced = step_swaps.prices(moe, all_to_all, prompts=self._own.tokens == "prompt")
        experts, home, n_steps, each = self._sampled(group)
        slots = np.empty(load.shape, np.int64)
        for layer in range(group.n_layers):
            steps = step_swaps.Steps(experts[:, layer].astype(np.int64), home, n_steps, each)
            starts = self._starts(affinity[layer], load[layer], layer, group)
            times = [step_swaps.layer_s(ranks, group.n_ranks, steps, priced) for ranks in starts]
            best = starts[int(np.argmin(np.round(times, 12)))]
            slots[layer] = step_swaps.swap_for_time(best, group.n_ranks, steps, priced)
        carried = np.zeros((group.n_layers, group.n_ranks))
        np.add.at(carried, (np.arange(group.n_layers)[:, None], slots), load)
        every = np.broadcast_to(np.arange(group.n_experts), slots.shape)
        return Placement(every, slots, group.n_ranks, carried)

    def _starts(self, affinity: Floats, load: Floats, layer: int, group: ExpertGroup) -> list[Ints]:
        """Return placements of a layer to begin from."""
        ranks, nodes = group.n_ranks, group.n_nodes
        starts = [
            np.arange(group.n_experts) // (group.n_experts // ranks),
            greedy_placement(load, ranks),
            *(equal_groups(affinity, ranks, nodes, self._rng, r) for r in (1.0, 0.0)),
        ]
        if self._own.homes == "clusters":
            starts.append(home_ranks(self._context, group)[layer])
        return starts

    def _sampled(self, group: ExpertGroup) -> tuple[Ints, Ints, int, float]:
        """Return the experts and homes of the tokens of steps, how many steps, and their weight."""
        trace, requests = self._calibration.trace, self._calibration.requests
        assert trace is not None
        tokens_per_rank = self._own.tokens_per_rank
        per_rank = min(tokens_per_rank, max(1, _TOKENS // group.n_ranks))
        n_steps = min(_MOST_STEPS, max(1, _TOKENS // (per_rank * group.n_ranks)))
        wanted = n_steps * per_rank
        owner = np.zeros(len(requests), np.int64)
        pools = [np.arange(len(requests))] * group.n_ranks
        if self._own.homes == "clusters":
            owner = cluster_homes(self._context, self._calibration, group)
            pools = [np.flatnonzero(owner == rank) for rank in range(group.n_ranks)]
        drawn = []
        for pool in pools:
            rows = self._rng.permutation(token_rows(trace, requests[pool], self._own.tokens))
            if not len(rows):
                raise InputError("calibration", "no token is at home on one of the GPUs")
            drawn.append(rows[np.arange(wanted) % len(rows)].reshape(n_steps, per_rank))
        rows = np.stack(drawn, axis=1).ravel()
        home = np.tile(np.arange(group.n_ranks).repeat(per_rank), n_steps)
        return np.asarray(trace.experts[rows]), home, n_steps, tokens_per_rank / per_rank
