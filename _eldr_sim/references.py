"""Named tuples of arrays that compiled functions pass on by reference: an address, and no more.
numba hands a tuple over as several numbers for each array, apart and together again at every call:
much of the time of compiling. A `Reference` lies in memory once, and a member is read where it is
named (`reference_types`)."""

import ctypes
import struct
from functools import cache, cached_property
from typing import Any

import numpy as np


class Layout:
    """The type of what is passed by reference, the same object for equal types; ``kinds``: types of
    all members, in order, and of arrays what numba tells apart."""

    def __init__(self, kinds: tuple[Any, ...]) -> None:
        self._kinds = kinds
        self.type: Any = None  #: numba's, once it was asked for

    @cached_property
    def text(self) -> str:
        """The same in words, equal in all processes."""
        return " ".join(map(_in_words, self._kinds))


@cache
def _in_words(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


_LAYOUTS: dict[tuple[Any, ...], Layout] = {}
#: Types that numba does not tell apart.
_SAME: dict[type, type] = {np.float64: float, np.int64: int}


class Reference:
    """A named tuple of arrays, numbers, callbacks and such tuples, for compiled functions.
    ``whole``: the tuple; its arrays and numbers are looked at now."""

    def __init__(self, whole: tuple[Any, ...]) -> None:
        self.whole = whole
        memory, kinds = bytearray(), list[Any]()
        _lay_out(whole, memory, kinds)
        key = tuple(kinds)
        if key not in _LAYOUTS:
            _LAYOUTS[key] = Layout(key)
        self.layout = _LAYOUTS[key]
        self._memory = ctypes.create_string_buffer(bytes(memory), len(memory))
        self.address = ctypes.addressof(self._memory)

    @property
    def type(self) -> Any:
        """numba's type of the reference."""
        if self.layout.type is None:
            from eldr_sim.reference_types import reference_type

            self.layout.type = reference_type(self.whole)
        return self.layout.type

    _numba_type_ = type


def _lay_out(value: Any, memory: bytearray, kinds: list[Any]) -> None:
    """Append a value as numba lays it out, see `numba.core.datamodel.models`; and what it is."""
    kinds.append(_SAME.get(type(value), type(value)))
    if isinstance(value, bool):
        memory += bytes([value])
        return
    memory += bytes(-len(memory) % 8)
    if isinstance(value, tuple):
        kinds.append(len(value))
        for member in value:
            _lay_out(member, memory, kinds)
        memory += bytes(-len(memory) % 8)
    elif isinstance(value, np.ndarray):
        flags = value.flags
        order = "C" if flags.c_contiguous else "F" if flags.f_contiguous else "A"
        kinds += value.dtype, f"{value.ndim}{order}{'rw'[flags.writeable]}"
        words = (0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides)
        memory += struct.pack(f"{len(words)}q", *words)
    else:
        memory += struct.pack("d" if isinstance(value, float) else "q", value)
