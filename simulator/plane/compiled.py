"""Compiled functions that only compiled code calls, and calls from there back to Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from numba import types

from eldr_sim.jit import njit

import_module("numba.experimental.function_type")  # makes callbacks an argument's type

#: The decorator of functions that only compiled code calls. Compiling takes time on a new machine,
#: and much of it goes into what such functions do not need: code that runs by itself, and counting
#: references to arrays that their caller holds.
compiled = partial(njit, inlined=True, _nrt=False)


class Callback(types.WrapperAddressProtocol):
    """A Python function of two integers that returns one, as an argument of compiled functions.

    A call takes a microsecond; to return to Python and enter a compiled function again, with all
    the arrays of a run, takes fifty. What the function raises is lost: it must not.
    """

    def __init__(self, function: Callable[[int, int], int]) -> None:
        integer = ctypes.c_int64
        self._function = ctypes.CFUNCTYPE(integer, integer, integer)(function)

    def __wrapper_address__(self) -> int:
        """Return where the function is."""
        return ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def signature(self) -> Any:
        """Return its type."""
        return types.int64(types.int64, types.int64)
