"""What drawn sessions are like, as options spell it."""

import re
from dataclasses import dataclass

from eldr_sim.errors import InputError
from eldr_sim.traces.requests.distributions import Distribution, parse_distribution

#: What ``chat`` and ``agent`` are where nothing is asked for, with where that is from
#: (docs/conversations.md): turns, calls a turn, seconds that a user thinks and a tool takes, tokens
#: that are new in a turn, and of an answer.
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
    """Return what a rate of a workload counts a second."""
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

    ``given``: spelled distributions by the names of `SessionShape`; None: the workload's own.
    """
    own = PRESETS.get(workload)
    if own is None:
        return None
    words = {name: given.get(name) or word for name, word in own.items()}
    drawn = {name: parse_distribution(word, name) for name, word in words.items()}
    return SessionShape(**drawn, history=check_history(history), block_tokens=block_tokens)


def check_history(text: str) -> str:
    """Return what becomes of a context from turn to turn; raises InputError.

    ``all`` is kept. ``last:N``: when it is longer than N tokens, its middle is cut so that N are
    left. ``no_reasoning:F``: a share F of each answer is dropped. ``reset:N``: when the next prompt
    would be longer, the session begins anew behind what all sessions share, as compaction does.
    """
    if not _HISTORY.fullmatch(text):
        raise InputError("history", repr(text), "all, last:N, no_reasoning:SHARE, reset:N")
    return text
