"""Distributions of whole tokens, turns and seconds, spelled as words of an option.

``60``, ``4,sd=2`` (normal), ``uniform:10,50``, ``exponential:60``, ``lognormal:median=60,p95=600``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from eldr_sim.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_Z95 = 1.6448536269514722  #: the 95th percentile of the standard normal distribution
_ALLOWED = "60; 4,sd=2; uniform:10,50; exponential:60; lognormal:median=60,p95=600"


class Distribution(NamedTuple):
    """A kind, and its two parameters as `parse_distribution` reads them."""

    kind: str
    a: float
    b: float = 0.0

    def draw(self, rng: np.random.Generator, n: int) -> NDArray[np.float64]:
        """Draw ``n`` values, at least 0; the first ones are the same however many follow."""
        import numpy as np  # options are read without it

        if self.kind == "constant":
            return np.full(n, self.a)
        if self.kind == "uniform":
            return self.a + (self.b - self.a) * rng.random(n)
        if self.kind == "exponential":
            return np.array([-self.a * math.log1p(-u) for u in rng.random(n).tolist()])
        normal = rng.standard_normal(n)
        if self.kind == "normal":
            return np.maximum(self.a + self.b * normal, 0.0)
        spread = math.log(self.b / self.a) / _Z95
        return np.array([self.a * math.exp(spread * z) for z in normal.tolist()])

    def whole(self, rng: np.random.Generator, n: int, most: int = 2**30) -> NDArray[np.int64]:
        """Draw ``n`` whole numbers from 1 to ``most``."""
        return self.draw(rng, n).round().clip(1, most).astype("int64")


def parse_distribution(text: str, field: str, counts: bool = False) -> Distribution:
    """Return a distribution as it is spelled; raises InputError, naming ``field``.

    ``counts``: of whole numbers from 1 on, as `Distribution.whole` draws them.
    """
    name, _, rest = text.strip().rpartition(":")
    words = [word.strip().partition("=") for word in rest.split(",")]
    keys, names = [key if equals else "" for key, equals, _ in words], name.strip().lower()
    kind = {
        ("", ("",)): "constant",
        ("", ("", "sd")): "normal",
        ("uniform", ("", "")): "uniform",
        ("exponential", ("",)): "exponential",
        ("lognormal", ("median", "p95")): "lognormal",
    }.get((names, tuple(keys)))
    try:
        values = [float(value if equals else key) for key, equals, value in words]
    except ValueError:
        values = [math.nan]
    bad = kind is None or not all(math.isfinite(value) and value >= 0 for value in values)
    if not bad and kind in ("uniform", "lognormal"):
        bad = values[1] < values[0] or values[0] <= 0
    if bad:
        raise InputError(field, repr(text), _ALLOWED)
    if counts and (values[0] < 1 or (kind == "constant" and values[0] % 1)):
        raise InputError(field, repr(text), "whole numbers from 1 on, or a distribution of them")
    return Distribution(kind or "", *values)
