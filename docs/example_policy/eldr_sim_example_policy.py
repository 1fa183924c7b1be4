"""A decode policy outside eldr-sim: install this package and its name works like a built-in one.

    pip install ./docs/example_policy

The entry point in ``pyproject.toml`` is all that ties it to the simulator.
"""

from pydantic import Field

from eldr_sim.policies.base import LOADS, Needs, PolicyContext, RequestInfo, RouterPolicy, Workers
from eldr_sim.policies.choice import Parameters


class Choices(Parameters):
    """What users may tell the policy: ``--policy p3c:choices=4``."""

    choices: int = Field(default=3, ge=1)
    """Workers that are drawn for a request."""


class PowerOfThreeChoices(RouterPolicy):
    """The least loaded of some workers drawn at random."""

    name = "p3c"  # what users type
    decision = "decode"  # or "prefill"
    needs = Needs(columns=LOADS)  # what it decides by; see the page for the rest
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
