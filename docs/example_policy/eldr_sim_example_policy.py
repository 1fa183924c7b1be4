"""Policies outside eldr-sim, one for each decision: install this package and use their names.

    pip install ./docs/example_policy

The entry points in ``pyproject.toml`` are all that ties them to the simulator."""

import numpy as np
from pydantic import Field

from eldr_sim.policies.base import LOADS, Needs, PolicyContext, RequestInfo, RouterPolicy, Workers
from eldr_sim.policies.choice import Parameters
from eldr_sim.policies.placement.base import ExpertGroup, Placement, PlacementPolicy
from eldr_sim.policies.queue.orders import QueueOrder, Waiting
from eldr_sim.policies.replicas.base import ReplicaChoice, slots_of_experts
from eldr_sim.policies.scaling.base import Autoscaler, Fleet, Target


class Choices(Parameters):
    """What users may tell the policy: ``--policy p3c:choices=4``."""

    choices: int = Field(default=3, ge=1)
    """Workers that are drawn for a request."""


class PowerOfThreeChoices(RouterPolicy):
    """Decode: the least loaded of some workers drawn at random."""

    name = "p3c"  # what users type
    decision = "decode"
    needs = Needs(columns=LOADS)  # what it decides by
    Parameters = Choices  # a policy without parameters leaves this and the argument out

    def __init__(self, context: PolicyContext, parameters: Choices) -> None:
        self._choices = min(parameters.choices, context.n_workers)
        # Draw from context.rng only: then a run with the same seed gives the same result.
        self._rng = context.rng
        self._n = context.n_workers

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return the index of the worker; None would hold the request."""
        drawn = self._rng.choice(self._n, size=self._choices, replace=False)
        return int(drawn[workers.loads[drawn].argmin()])


class FewestPromptTokens(RouterPolicy):
    """Prefill: the worker with the fewest prompt tokens to compute, by its own books."""

    name = "fewest_tokens"
    decision = "prefill"
    needs = Needs(blocks=True)  # so that it is told of blocks and tokens

    def __init__(self, context: PolicyContext) -> None:
        self._left = np.zeros(context.n_workers)

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return the index of the worker."""
        self._left[workers.loads == 0] = 0.0  # tokens that were cached are not computed
        worker = int(np.where(workers.healthy, self._left, np.inf).argmin())
        self._left[worker] += request.prompt_len
        return worker

    def on_blocks(self, worker: int, stored: object, evicted: object) -> None:
        """Blocks that a prefix cache has got and lost do not matter here."""

    def on_tokens(self, worker: int, tokens: int) -> None:
        """Take note that a worker has computed some of them."""
        self._left[worker] -= tokens


class LongestPromptFirst(QueueOrder):
    """Queue: the waiting request of the longest prompt."""

    name = "longest"

    def keys(self, requests: Waiting) -> np.ndarray:
        """Return a key for each request; the lowest goes first."""
        return -requests.prompt_len


class Striped(PlacementPolicy):
    """Placement: experts are dealt out to the GPUs in turn, copies after the others."""

    name = "striped"

    def place(self, group: ExpertGroup) -> Placement:
        """Return the expert and the GPU of each slot, ``[layers, slots]``."""
        slot = np.arange(group.slots_per_rank * group.n_ranks)
        shape = group.n_layers, len(slot)
        expert = np.broadcast_to(slot % group.n_experts, shape)
        return Placement(expert, np.broadcast_to(slot % group.n_ranks, shape), group.n_ranks)


class OneForEight(Autoscaler):
    """Scaling: a worker for every eight requests in flight."""

    name = "one_for_eight"

    def decide(self, fleet: Fleet) -> list[Target]:
        """Return how many workers each pool should have."""
        return [Target(pool.name, 1 + pool.in_flight // 8) for pool in fleet.pools]


class OwnGpuFirst(ReplicaChoice):
    """Replica: the copy on the token's own GPU, else the first."""

    name = "own_gpu"

    def choose(self, tokens_home, experts, placement, layer, node_of_rank, prompts):
        """Return the slot for each token and expert, ``[tokens, top_k]``."""
        copies = slots_of_experts(placement.expert[layer])[experts]  # [tokens, top_k, copies], -1
        near = (placement.rank[layer][copies] == tokens_home[:, None, None]) & (copies >= 0)
        return np.take_along_axis(copies, near.argmax(2)[..., None], 2)[..., 0]
