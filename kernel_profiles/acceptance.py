"""How many drafts are accepted: shipped acceptances with their sources, and rates from lengths.

Rates are unconditional, by position, as vLLM counts them: rate ``i`` is the share of verify steps
that accept at least ``i`` drafts, so they never rise. The acceptance length is the tokens that a
step yields, the sampled one included: one more than the sum of the rates.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

from eldr_sim.errors import InputError

#: Of a published mean alone nobody knows the distribution.
_CONSTANT = "each draft accepted alike, given the one before"


class Acceptance(NamedTuple):
    """The acceptance of so many drafts."""

    rates: tuple[float, ...]  #: by position
    source: str

    @property
    def length(self) -> float:
        """Mean tokens that a step yields."""
        return 1.0 + sum(self.rates)


def rates_of_length(length: float, n: int) -> tuple[float, ...]:
    """Return the rates of ``n`` drafts that make an acceptance length, 1 to ``n + 1``.

    Each draft is accepted with one probability ``a``, given the one before, so the length is
    ``(1 - a ** (n + 1)) / (1 - a)``.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        a = (low + high) / 2
        low, high = (a, high) if sum(a**i for i in range(n + 1)) < length else (low, a)
    return tuple(high**i for i in range(1, n + 1))


def shipped(name: str | None, model: str, method: str, n: int) -> Acceptance:
    """Return a published acceptance of ``n`` drafts.

    Raises InputError if there is no such acceptance.

    Parameters
    ----------
    name
        Of one that ships; None takes that of the model and method.
    model, method, n
        What drafts for what, and how many tokens a step. Positions beyond the published rates are
        accepted like the last one, given the one before; a length is taken at its own number of
        drafts, or else the acceptance of each draft at the next number that was published.
    """
    field = "speculative_config.acceptance"
    if name is None:
        own = [e for e in _entries().values() if e.get("model") == model and e["method"] == method]
        if not own:
            problem = f"nobody has published that of {method} for {model}"
            allowed = "synthetic_acceptance_rates, synthetic_acceptance_length, or acceptance: "
            raise InputError(field, problem, allowed + ", ".join(_entries()))
        entry = own[0]
    elif name in _entries():
        entry = _entries()[name]
    else:
        raise InputError(field, f"unknown acceptance {name!r}", ", ".join(_entries()))
    source = f"{entry['name']} ({entry['text']}): {entry['source']}"
    if "rates" in entry:
        rates = list(entry["rates"][:n])
        if len(rates) < n:
            source += f"; drafts after the {len(rates)}th like it, given the one before"
        while len(rates) < n:
            rates.append(rates[-1] ** 2 / rates[-2])
        return Acceptance(tuple(rates), source)
    lengths = {int(drafts): length for drafts, length in entry["lengths"].items()}
    nearest = min(lengths, key=lambda drafts: (abs(drafts - n), drafts))
    a = rates_of_length(lengths[nearest], nearest)[0]
    if nearest != n:
        source += f"; of {nearest} drafts, taken for {n}"
    return Acceptance(tuple(a**i for i in range(1, n + 1)), f"{source}; {_CONSTANT}")


@lru_cache(maxsize=1)
def _entries() -> dict[str, dict[str, Any]]:
    text = resources.files("eldr_sim.kernel_profiles").joinpath("data/acceptance.json").read_text()
    return {entry["name"]: entry for entry in json.loads(text)["acceptances"]}
