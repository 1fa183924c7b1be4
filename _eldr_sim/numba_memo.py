"""numba's front end, quicker: it compares and hashes its flags at every call of a function, field
by field, and tries the same templates for the same types again. What is compiled stays equal."""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

from numba.core.targetconfig import ConfigStack, TargetConfig
from numba.core.types.functions import BaseFunction

_config: Any = TargetConfig
_function: Any = BaseFunction


def _values(config: Any) -> dict[str, Any]:
    """Return the flags that differ from their defaults."""
    options = config.options
    return {k: v for k, v in config._values.items() if v != options[k].default}


def _equal(self: Any, other: Any) -> Any:
    if not isinstance(other, TargetConfig):
        return NotImplemented
    if type(self) is not type(other):
        return self.values() == other.values()
    return self is other or self._values == other._values or _values(self) == _values(other)


def _hash(self: Any) -> int:
    return hash(tuple(self.options))  # few flags differ: `_equal` tells them apart


_resolve = _function.get_call_type
_found: dict[Any, tuple[Any, Any]] = {}


def _call_type(self: Any, context: Any, args: Any, kws: Any) -> Any:
    """Return the signature of a call, from the last one with the same types and flags."""
    flags = ConfigStack.top_or_none()
    asked = self, id(context), tuple(args), tuple(kws.items()) if kws else ()
    try:
        known = _found.get((*asked, flags))
    except TypeError:  # what cannot be hashed
        return _resolve(self, context, args, kws)
    if known is not None:
        found, owner = known
        if owner is not self:
            self._impl_keys.setdefault(found.args, owner._impl_keys[found.args])
        return found
    found = _resolve(self, context, args, kws)
    if found is not None:
        _found[*asked, None if flags is None else flags.copy()] = found, self
    return found


def install() -> None:
    """Replace numba's own functions, in this process."""
    _config.__eq__, _config.__hash__ = _equal, _hash
    _function.get_call_type = _call_type
