"""Rows of request logs, and times in them."""

import math
import re
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?")


class Row(NamedTuple):
    """A request of a log."""

    when_ns: int  #: since any origin
    prompt: int  #: tokens
    output: int  #: tokens
    hashes: Sequence[int] = ()  #: of the prompt's blocks
    session: str = ""
    priority: int | None = None
    #: ``after_s``, ``name``, ``parent``: seconds that it comes after the end of the turn before,
    #: where a log says so; what it is called, and the request that it goes on with: the one before
    #: it of its session where the log does not name it.
    after_s: float | None = None
    name: str = ""
    parent: str = ""
    joins: Sequence[str] = ()  #: other requests whose ends it waits for


def session_of(value: object) -> str:
    """Return the name of a session; none of what is null, not a number or empty text."""
    return "" if value is None or value != value else str(value)


def timestamp_ns(text: str) -> int:
    """Return an ISO 8601 time, UTC unless it says otherwise, in ns; raises ValueError."""
    # By hand for the fraction: Azure writes 100 ns digits, which datetime would drop.
    match = _TIMESTAMP.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    seconds, fraction, zone = match.groups()
    moment = datetime.fromisoformat(seconds + (zone or "+00:00"))
    return _checked_ns(int(moment.timestamp()) * 10**9 + int((fraction or "").ljust(9, "0")))


def scaled_ns(value: float, unit_ns: float) -> int:
    """Return a time in units of so many ns; raises ValueError beyond 146 years from 1970."""
    if not math.isfinite(value):
        raise ValueError(value)
    return _checked_ns(round(value * unit_ns))


def _checked_ns(ns: int) -> int:
    if not abs(ns) < 2**62:  # what a difference of two can hold
        raise ValueError(ns)
    return ns
