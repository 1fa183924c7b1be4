"""How users name the fields of a configuration: paths, flags, and what was probably meant."""

from difflib import get_close_matches
from functools import cache
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.inputs import parse_yaml
from eldr_sim.simulator.setup.config.groups import GROUPS, RUN_FIELDS
from eldr_sim.simulator.setup.config.option import option_of
from eldr_sim.simulator.setup.config.pools import Pool

#: Fields that hold the overrides of a pool, whose own fields are set by their paths.
POOLS = tuple(name for name, field in RUN_FIELDS.items() if field.annotation is Pool)
#: The paths of all fields: those of a run, and of its pools as ``decode.gpu``.
PATHS = (
    *(name for name in RUN_FIELDS if name not in POOLS),
    *(f"{pool}.{name}" for pool in POOLS for name in Pool.model_fields),
)


@cache
def spellings() -> dict[str, str]:
    """Return the path of each field by every way to name it.

    Returns:
        Paths by spelling, with underscores between words: alone, within its group or pool, and by
        the aliases of its flag.
    """
    paths: dict[str, str] = {}
    for group, kind in GROUPS.items():
        for name, field in kind.model_fields.items():
            aliases = (a.lstrip("-").replace("-", "_") for a in option_of(name, field).aliases)
            own = (name, *aliases)
            paths |= dict.fromkeys((*own, *(f"{group}.{word}" for word in own)), name)
            if name in Pool.model_fields:
                for pool in POOLS:
                    words = [f"{pool}{dot}{word}" for dot in "._" for word in own]
                    words += [f"{GROUP_OF_POOLS}.{pool}.{word}" for word in own]
                    paths |= dict.fromkeys(words, f"{pool}.{name}")
    return paths


#: The group of the pools' overrides.
GROUP_OF_POOLS = next(group for group, kind in GROUPS.items() if POOLS[0] in kind.model_fields)


def meant(name: str) -> list[str]:
    """Return the paths of the fields that a name without a field probably means, at most three."""
    known, word = spellings(), name.strip("-").lower().replace("-", "_")
    if word in known:
        return [known[word]]
    return list(dict.fromkeys(known[near] for near in get_close_matches(word, known, 3, 0.75)))


def parse_setting(text: str) -> tuple[str, str]:
    """Return the path and the text of the value of ``FIELD=VALUE``; raises InputError."""
    path, equals, value = text.partition("=")
    if not (path.strip() and equals):
        raise InputError("set", repr(text), "FIELD=VALUE such as decode.gpu=H200")
    return path.strip(), value


def parse_value(text: str, field: str) -> Any:
    """Return what a typed value means: ``null``, a YAML list or mapping, or the text itself, which
    the field reads. Raises InputError, naming ``field``."""
    word = text.strip()
    if word in ("null", "~"):
        return None
    return parse_yaml(word, field, repr(text)) if word[:1] in ("[", "{") else text
