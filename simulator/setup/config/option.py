"""How a field of a configuration is typed and shown: a mark beside the field's declaration."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from pydantic.fields import FieldInfo

#: Units that a field's name ends with.
_SUFFIXES = {"_ms": "ms", "_s": "s"}


@dataclass(frozen=True)
class Option:
    """A mark on a field, or on a type that several fields have, which a field's own overrides."""

    common: bool = False  #: shown in the help of commands; `eldr-sim options` lists the others
    metavar: str = ""  #: what stands for the value in help
    names: str = ""  #: names that the shell completes: ``module:attribute`` of ``eldr_sim``
    path: Literal["file", "dir"] | None = None  #: a path may be given, which the shell completes
    aliases: tuple[str, ...] = ()  #: further spellings of the flag
    unit: str = ""  #: unit of the value
    repeated: bool = False  #: the flag may be given several times


_NONE = Option()


def option_of(name: str, field: FieldInfo) -> Option:
    """Return the mark of a field, from its type and its declaration.

    Args:
        name: name of the field.
        field: its declaration.

    Returns:
        How the field is typed and shown.
    """
    option = _NONE
    for mark in [*_marks(field.annotation), *(m for m in field.metadata if isinstance(m, Option))]:
        option = replace(option, **{k: v for k, v in vars(mark).items() if v != vars(_NONE)[k]})
    if not option.unit:
        unit = next((unit for end, unit in _SUFFIXES.items() if name.endswith(end)), "")
        option = replace(option, unit=unit)
    return option


def words_of(field: FieldInfo) -> tuple[str, ...]:
    """Return the words that a field may be, where it is nothing else; otherwise nothing."""
    kinds = [field.annotation, *get_args(field.annotation)]
    literals = [kind for kind in kinds if getattr(kind, "__origin__", None) is Literal]
    others = [k for k in get_args(field.annotation) if k is not type(None) and k not in literals]
    if field.annotation in literals:
        return get_args(field.annotation)
    return get_args(literals[0]) if len(literals) == 1 and not others else ()


def _marks(annotation: Any) -> Iterator[Option]:
    """Yield the marks inside a type, the innermost first."""
    for inner in get_args(annotation):
        if not isinstance(inner, Option):
            yield from _marks(inner)
    for mark in getattr(annotation, "__metadata__", ()):
        if isinstance(mark, Option):
            yield mark
