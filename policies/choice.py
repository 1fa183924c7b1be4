"""A policy and its parameters as one word, ``eldr:tau=0.2,layer_mask=all``, or in files a mapping.

The canonical form has the registry's name, then the parameters that differ from their defaults, in
the order of the policy's own list: equal choices are equal words, in results too."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eldr_sim.errors import InputError

#: The decisions that a policy can make, and the field of a run's configuration that chooses it.
FIELDS: dict[str, str] = {
    "decode": "policy", "prefill": "prefill_policy", "queue": "queue_order",
    "placement": "expert_placement", "replica": "replica_choice", "scaling": "autoscale",
}  # fmt: skip
#: The same the other way round.
DECISION_OF = {field: decision for decision, field in FIELDS.items()}
#: A class and the one above it, or what it says of itself.
_SAID = re.compile(r'\n(?:class (\w+)\((?:\w+\.)?(\w+)|    (name|decision|also) = "(\w+)")')


def _built_in() -> dict[str, dict[str, str]]:
    """Find the built-in policies in the text of their modules, which take long to import."""
    above: dict[str, str] = {}
    attributes: dict[str, dict[str, str]] = {}
    places: dict[str, str] = {}
    for path in sorted(Path(__file__).parent.glob("*/*.py")):
        for match in _SAID.finditer(path.read_text(encoding="utf-8")):
            if match[1]:
                of_class = attributes[match[1]] = {}
                above[match[1]] = match[2]
                places[match[1]] = f"{path.parent.name}.{path.stem}:{match[1]}"
            else:
                of_class[match[3]] = match[4]

    def value_of(of: str, what: str) -> str | None:
        return (
            None if of not in attributes else attributes[of].get(what) or value_of(above[of], what)
        )

    built_in: dict[str, dict[str, str]] = {decision: {} for decision in FIELDS}
    for of, words in attributes.items():
        for decision in built_in:
            if "name" in words and decision in (value_of(of, "decision"), value_of(of, "also")):
                built_in[decision][words["name"]] = places[of]
    return {decision: dict(sorted(of_class.items())) for decision, of_class in built_in.items()}


#: The built-in policies of each decision: their names, and where their classes are.
BUILT_IN = _built_in()


class Parameters(BaseModel):
    """Parameters of a policy; a policy with parameters has a subclass as ``Parameters``."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False
    )


class SignatureParameters(Parameters):
    """Parameters of policies that read expert signatures; the defaults are ELDR's Table 1."""

    capture_overhead_ms: float = Field(default=0.71, ge=0)
    """What recording expert signatures adds to a prefill step, ms (record, reduce and copy on
    MI300X)."""
    routing_overhead_ms: float = Field(default=0.157, ge=0)
    """What fetching a signature and routing on it take per request, ms."""


class Choice(NamedTuple):
    """A policy's name, and its parameters as given."""

    name: str
    given: dict[str, Any]

    @property
    def mapping(self) -> dict[str, Any]:
        """The choice as files may spell it."""
        return {"name": self.name, **self.given}


def parse(value: object, field: str) -> Choice:
    """Read a policy and its parameters from a word or a mapping.

    Args:
        value: such as ``eldr:tau=0.2``, ``{"name": "eldr", "tau": 0.2}``, or a class in a file,
            ``./mine.py:Class`` or ``./mine.py:Class:n=3``. In a word, a part without ``=``
            continues the value before it: ``eldr:layer_mask=0,3,5``.
        field: the field of the configuration, for errors.

    Returns:
        Name and parameters, not yet checked against the policy.

    Raises:
        InputError: ``value`` has neither form.
    """
    if isinstance(value, Mapping):
        given = dict(value)
        name = given.pop("name", None)
        if not isinstance(name, str):
            raise InputError(field, f"{value!r} has no name", "such as {name: eldr, tau: 0.2}")
        return Choice(name, {str(key): what for key, what in given.items()})
    if not isinstance(value, str):
        raise InputError(field, f"{value!r}", "a policy, such as jsq or eldr:tau=0.2")
    in_file = re.match(r"(.*\.py:\w+)(?::(.*))?$", value.strip())
    name, _, text = value.strip().partition(":")
    if in_file is not None:
        name, text = in_file[1], in_file[2] or ""
    words: dict[str, str] = {}
    last = None
    for part in text.split(",") if text else []:
        key, equals, what = part.partition("=")
        if equals:
            last = key.strip()
            words[last] = what.strip()
        elif last is None:
            raise InputError(field, repr(value), "NAME or NAME:PARAMETER=VALUE,...")
        else:
            words[last] += f",{part.strip()}"
    return Choice(name, dict(words))


def split(text: str) -> list[str]:
    """Return the policies of a comma-separated list.

    Args:
        text: such as ``jsq,eldr:tau=0.2,layer_mask=0,3``. A part that gives a parameter or begins
            with a digit belongs to the policy before it.

    Returns:
        A word for each policy.
    """
    choices: list[str] = []
    for part in filter(None, map(str.strip, text.split(","))):
        head = part.partition(":")[0]
        if choices and ("=" in head or head[0].isdigit()) and not head.endswith(".py"):
            choices[-1] += f",{part}"
        else:
            choices.append(part)
    return choices


def parameters_of(
    name: str, kind: type[Parameters], given: Mapping[str, Any], field: str
) -> Parameters:
    """Validate a policy's parameters by its own list; raises InputError."""
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        where = f"{field}.{first['loc'][0]}"
        if first["type"] == "extra_forbidden":
            allowed = ", ".join(kind.model_fields) or "none"
            problem = f"{name!r} has no such parameter"
            raise InputError(where, problem, allowed) from None
        raise InputError(where, f"{first['input']!r}: {first['msg'].lower()}") from None


def spell(name: str, parameters: Parameters) -> str:
    """Return the canonical word for a policy with parameters."""
    changed = [
        f"{key}={_spelled(value)}"
        for key, value in parameters
        if value != type(parameters).model_fields[key].default
    ]
    return f"{name}:{','.join(changed)}" if changed else name


def _spelled(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ",".join(map(_spelled, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value}"


def per_pool(field: str, values: tuple[int, ...], pools: list[str]) -> dict[str, int]:
    """Return a value for each pool.

    Args:
        field: field of the configuration, for errors.
        values: one value for all pools, or one for each.
        pools: names of the pools.

    Returns:
        Values by pool name; empty if there are none.

    Raises:
        InputError: the number of values is neither 1 nor that of the pools, or one is negative.
    """
    if len(values) not in (0, 1, len(pools)) or any(value < 0 for value in values):
        problem = f"{','.join(map(str, values))} for {len(pools)} pools ({', '.join(pools)})"
        raise InputError(field, problem, "one number from 0 on, or one a pool")
    return dict(zip(pools, values * len(pools) if len(values) == 1 else values, strict=False))
