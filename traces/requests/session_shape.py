"""What drawn sessions are like, as options spell it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
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
    """Return a distribution, ``counts``: of whole numbers from 1; raises InputError."""
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


#: What ``chat`` and ``agent`` are by default (docs/conversations.md): turns, calls a turn, seconds
#: of users and of tools, new tokens of a turn, tokens of an answer.
PRESETS: dict[str, dict[str, str]] = {
    "chat": {
        "turns": "4,sd=2", "calls_per_turn": "1", "think_time": "lognormal:median=60,p95=600",
        "tool_time": "0", "new_tokens": "lognormal:median=100,p95=4500",
    },
    "agent": {
        "turns": "4,sd=2", "calls_per_turn": "8", "think_time": "lognormal:median=60,p95=600",
        "tool_time": "lognormal:median=3,p95=60", "new_tokens": "1500",
    },
}  # fmt: skip
ANSWER_TOKENS = {"chat": 343, "agent": 425}
LANES_S = 3600.0  #: length of the window in which lanes are measured (`lanes`), s
_HISTORY = re.compile(r"all|(last|reset):([1-9]\d*)|no_reasoning:(0?\.\d+|0|1)")


def rate_unit(workload: str) -> str:
    """Return what the rate of a workload counts per second.

    Args:
        workload: name of the workload.

    Returns:
        ``sessions/s`` or ``requests/s``.
    """
    return "sessions/s" if workload in PRESETS else "requests/s"


@dataclass(frozen=True)
class SessionShape:
    """What drawn sessions are like."""

    turns: Distribution
    calls_per_turn: Distribution  #: requests of a turn: a tool answers all but the last
    think_time: Distribution  #: ``think_time``, ``tool_time``: s after the answer
    tool_time: Distribution
    new_tokens: Distribution  #: tokens of a prompt beyond the context of the turn before
    history: str = "all"  #: see `check_history`
    block_tokens: int = 16  #: of the blocks whose hashes the requests get


def session_shape(
    workload: str, block_tokens: int, history: str, **given: str | None
) -> SessionShape | None:
    """Return the shape of a workload's sessions; None where it has none.

    ``given``: spelled distributions by the names of `SessionShape`; None: the workload's own."""
    own = PRESETS.get(workload)
    if own is None:
        return None
    words = {name: given.get(name) or word for name, word in own.items()}
    drawn = {name: parse_distribution(word, name) for name, word in words.items()}
    return SessionShape(**drawn, history=check_history(history), block_tokens=block_tokens)


def check_history(text: str) -> str:
    """Return what becomes of a context from turn to turn; raises InputError.

    ``all`` is kept. ``last:N``: its middle is cut to N tokens. ``no_reasoning:F``: a share F of
    each answer is dropped. ``reset:N``: when the next prompt would be longer, the session begins
    anew behind what all share."""
    if not _HISTORY.fullmatch(text):
        raise InputError("history", repr(text), "all, last:N, no_reasoning:SHARE, reset:N")
    return text
