"""What routers know of prefix caches, as it is configured: ``approx:ttl=120,tokens=500000``."""

import math
from typing import NamedTuple

from eldr_sim.errors import InputError

_ALLOWED = "exact, or approx with ttl=SECONDS, tokens=N of a worker, routers=N: approx:ttl=120"


class KVSignal(NamedTuple):
    """Whether routers hear of blocks (exact), or go by what they have sent; the latter's limits."""

    approximate: bool = False
    ttl: float = 120.0  #: s after which a router forgets what it sent (Dynamo's approximate mode)
    tokens: float = 500_000.0  #: most that it remembers of a worker (llm-d: 31,250 blocks of 16)
    routers: float = 1.0  #: that take requests in turn, each of which knows its own alone


def parse_kv_signal(text: str) -> KVSignal:
    """Read a spelling; raises InputError."""
    word, _, rest = text.strip().partition(":")
    if word == "exact" and not rest:
        return KVSignal()
    values = {}
    for part in filter(None, rest.split(",")):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            values[name] = float(value)
        except ValueError:
            values[name] = math.nan
    named = values.keys() <= {"ttl", "tokens", "routers"}
    counts = [values.get(name, 1.0) for name in ("tokens", "routers")]
    whole = all(count >= 1.0 and count.is_integer() for count in counts)
    if word != "approx" or not (named and whole and values.get("ttl", 1.0) > 0.0):
        raise InputError("kv_signal", repr(text), _ALLOWED)
    return KVSignal(approximate=True, **values)
