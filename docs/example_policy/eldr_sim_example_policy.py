"""A decode policy outside eldr-sim: install this package and its name works like a built-in one.

    pip install ./docs/example_policy

The entry point in ``pyproject.toml`` is all that ties it to the simulator.
"""

from eldr_sim.policies.base import Loads, PolicyContext, RequestInfo


class PowerOfThreeChoices:
    """The least loaded of three workers drawn at random."""

    name = "p3c"  # what users type
    decision = "decode"  # or "prefill"

    def __init__(self, context: PolicyContext) -> None:
        # Draw from context.rng only: then a run with the same seed gives the same result.
        self._rng = context.rng
        self._n = context.n_workers

    def select(self, request: RequestInfo, loads: Loads) -> int:
        """Return the index of the worker; ``loads`` is all that the router knows of them."""
        drawn = self._rng.choice(self._n, size=min(3, self._n), replace=False)
        return int(drawn[loads[drawn].argmin()])
