"""What fields of a configuration hold and how that is spelled: seconds, mixes, distributions, and
``approx:ttl=120,tokens=500000``, what routers know of prefix caches."""

import math
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from eldr_sim.errors import InputError
from eldr_sim.inputs import seconds
from eldr_sim.simulator.setup.config.option import Option
from eldr_sim.traces.requests.session_shape import parse_distribution

_ALLOWED = "exact, or approx with ttl=SECONDS, tokens=N of a worker, routers=N: approx:ttl=120"


class KVSignal(NamedTuple):
    """Whether routers receive block events (exact), or go by what they have sent; the latter's
    limits."""

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


def _number_or_inf(value: Any) -> Any:
    if isinstance(value, str) and value.strip().lower() in {"inf", "infinity", ".inf"}:
        return math.inf
    return value


def _fail(value: Any) -> Any:
    from eldr_sim.simulator.setup.config.fault_spellings import spelled  # most runs have none

    return spelled(value) if value else ()


def _tiers(value: Any) -> Any:
    if not value:
        return ()
    from eldr_sim.simulator.setup.kv_tiers import parse_tier

    texts = (value,) if isinstance(value, str) else tuple(map(str, value))
    for text in texts:
        parse_tier(text)
    return texts


def _kv_signal(value: str) -> str:
    parse_kv_signal(value)
    return value


def _conditional(value: str | None) -> str | None:
    from eldr_sim.simulator.setup.config.conditional import parse_conditional

    if value is not None:
        parse_conditional(value)
    return value


def parse_mix(text: str, field: str = "domain_mix") -> dict[str, float]:
    """Return the weights of ``NAME=WEIGHT,...``; raises InputError."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = (word.strip() for word in part.partition("="))
        try:
            number = float(weight)
        except ValueError:
            number = math.nan
        if not name or math.isnan(number) or name in weights:
            raise InputError(field, repr(text), "NAME=WEIGHT,... such as code=2,math=1, each once")
        weights[name] = number
    return weights


def _seconds(value: Any, about: ValidationInfo) -> Any:
    return seconds(value, about.field_name or "") if isinstance(value, str) else value


def _mix(value: Any, about: ValidationInfo) -> Any:
    return parse_mix(value, about.field_name or "") if isinstance(value, str) else value


#: Weights by domain, as a mapping or spelled ``code=2,math=1``.
Mix = Annotated[dict[str, float] | None, BeforeValidator(_mix), Option(metavar="NAME=WEIGHT,...")]
Rate = Annotated[float, BeforeValidator(_number_or_inf), Field(gt=0)]
#: Seconds, or a time such as ``90s``, ``10m`` or ``2h``; 31 years are longer than any run.
Seconds = Annotated[
    float,
    BeforeValidator(_seconds),
    Field(le=1e9, allow_inf_nan=False),
    Option(metavar="TIME", unit="s"),
]
#: A delay; its sums stay finite.
Milliseconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
#: Highest price of a GPU-hour, $.
MOST_PRICE = 1e6
Price = Annotated[float, Field(ge=0, le=MOST_PRICE, allow_inf_nan=False)]


def _drawn(value: Any, about: ValidationInfo) -> Any:
    if value is not None:
        parse_distribution(str(value), about.field_name or "")
    return value if value is None else str(value)


def _counted(value: Any, about: ValidationInfo) -> Any:
    if value is not None:
        parse_distribution(str(value), about.field_name or "", counts=True)
    return value if value is None else str(value)


#: ``Drawn``, ``Counted``: a distribution as it is spelled, the latter of whole numbers from 1 on.
Drawn = Annotated[str | None, BeforeValidator(_drawn)]
Counted = Annotated[str | None, BeforeValidator(_counted)]
#: What goes wrong, KV tiers, what routers know of caches, and who computes where it decodes.
Faults = Annotated[tuple[str, ...], BeforeValidator(_fail)]
Tiers = Annotated[tuple[str, ...], BeforeValidator(_tiers)]
Signal = Annotated[str, AfterValidator(_kv_signal)]
Conditional = Annotated[str | None, AfterValidator(_conditional)]
