"""Queue orders: which waiting request an engine serves next.

An engine admits the waiting request of the lowest key, of equal keys the one that came first; as in
vLLM a request with a prompt already begun comes before those. When KV blocks run out, the sequence
that joined last is preempted and comes before all; an order that ``preempts`` does so with the
highest key, which then waits by its key. With a finite ``aging_s`` a request that has waited this
long goes first, the oldest of several: no later request begins more than ``aging_s`` after its
arrival."""

import math
from typing import NamedTuple

import numpy as np
from pydantic import Field

from eldr_sim.arrays import Array, Floats, Ints
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.steps.cost_tables import StepCost
from eldr_sim.kernel_profiles.steps.step_cost import step_parts, total_s
from eldr_sim.policies.base import Needs, Policy, PolicyContext
from eldr_sim.policies.choice import Parameters


class Waiting(NamedTuple):
    """What an engine knows of requests that wait, a column each."""

    prompt_len: Ints  #: prompt tokens
    priority: Ints | None = None
    """Priorities that clients give, the lowest first; None where they give none."""
    output_len: Ints | None = None
    """Output tokens that they will generate, which no engine knows. An oracle reads a request's
    own; a prediction reads what many have in common. None where unknown."""


class QueueOrder(Policy):
    """Gives requests their keys."""

    decision = "queue"
    preempts: bool = False
    """Whether the sequence of the highest key is preempted, not that which joined last."""
    aging_s: float = math.inf
    """How long a request waits at an engine before it goes first, s."""

    def keys(self, requests: Waiting) -> Array:
        """Return the key of each request, shape [n]; no NaN."""
        raise NotImplementedError


class FirstComeFirstServed(QueueOrder):
    """The request that came first (vLLM's default)."""

    name = "fcfs"

    def keys(self, requests: Waiting) -> Array:
        """Return equal keys."""
        return np.zeros(len(requests.prompt_len))


class ShortestJobFirst(QueueOrder):
    """The request of the shortest prompt."""

    name = "sjf"

    def keys(self, requests: Waiting) -> Array:
        """Return the prompts' lengths."""
        return requests.prompt_len.astype(np.float64)


class AgingParameters(Parameters):
    """Parameters of `AgingShortestJobFirst`."""

    age: float = Field(default=5.0, ge=0)
    """How long a request waits at an engine before it goes first, s."""


class AgingShortestJobFirst(ShortestJobFirst):
    """The request of the shortest prompt, but first the oldest that has waited ``age`` seconds.

    Gimbal's Algorithm 2 (Sec. III-C)."""

    name = "sjf_aging"
    Parameters = AgingParameters

    def __init__(self, context: PolicyContext, parameters: AgingParameters) -> None:
        super().__init__(context)
        self.aging_s = parameters.age


class ResidenceParameters(Parameters):
    """Parameters of orders by residence."""

    batch: int = Field(default=32, ge=1)
    """Sequences of the decode steps that a request's tokens are taken to be made in."""


class ShortestResidenceFirst(QueueOrder):
    """The request that is expected to hold its place in the batch for the shortest time.

    That is its prompt's steps, computed alone, and a decode step with all experts for each output
    token: the mean of requests with prompts of this length, within a factor of two."""

    name = "sjf_residence"
    needs = Needs(costs=True)
    Parameters = ResidenceParameters

    def __init__(self, context: PolicyContext, parameters: ResidenceParameters) -> None:
        self._batch = parameters.batch
        self._step_times = context.require_step_times(self)

    def keys(self, requests: Waiting) -> Array:
        """Return the expected residences, s."""
        if requests.output_len is None:
            raise InputError(
                "queue_order", f"{self.name!r} needs output lengths, and none were given"
            )
        return residence_s(
            self._step_times, requests.prompt_len, self._outputs(requests), self._batch
        )

    def _outputs(self, requests: Waiting) -> Array:
        assert requests.output_len is not None
        kind = np.frexp(requests.prompt_len.astype(np.float64))[1]
        total = np.bincount(kind, weights=requests.output_len)
        return np.asarray((total / np.maximum(np.bincount(kind), 1))[kind])


class OracleOrder(ShortestResidenceFirst):
    """The request of the shortest residence by the output tokens that it will generate.

    A bound for predictions."""

    name = "oracle"

    def _outputs(self, requests: Waiting) -> Array:
        return np.asarray(requests.output_len)


def residence_s(cost: StepCost, prompt_len: Ints, output_len: Array, batch: int) -> Floats:
    """Return how long requests hold their places in a batch, s.

    ``prompt_len``, ``output_len``: [n], outputs also fractions; prompts take separate steps, as
    long as the tables allow, at uniform routing; ``batch``: sequences of a decode step, at the mean
    context of requests halfway through."""
    batch = min(batch, len(cost.moe_s) - 1)
    context = max(1.0, float(np.mean(prompt_len + output_len / 2)))
    all_experts, none = np.full(1, float(cost.n_experts)), np.zeros(0, np.int64)
    step = total_s(
        step_parts(cost, batch, batch, batch * context, none, none, batch, all_experts, True)
    )
    longest = len(cost.uniform_moe_s) - 1
    known = np.minimum(prompt_len, len(cost.prompt_share_s) - 1)
    lengths, which = np.unique(known, return_inverse=True)
    prompt = np.zeros(len(lengths))
    for i, length in enumerate(lengths.tolist()):
        for first in range(0, length, longest):
            chunk = np.array([first]), np.array([min(longest, length - first)])
            parts = step_parts(cost, 0, 0, 0.0, *chunk, 1, all_experts, True)
            prompt[i] += total_s(parts)
    return np.asarray(prompt[which.ravel()] + step * output_len, np.float64)


class PriorityOrder(QueueOrder):
    """The request of the lowest priority value (vLLM's ``--scheduling-policy priority``)."""

    name = "priority"
    preempts = True

    def keys(self, requests: Waiting) -> Array:
        """Return the priorities; raises InputError where requests have none."""
        if requests.priority is None:
            problem = "'priority' needs priorities, and the workload has none"
            raise InputError("queue_order", problem, "a request log with a column `priority`")
        return requests.priority.astype(np.float64)
