"""Compiled functions that only compiled code calls; calls by address, of Python and executors."""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from eldr_sim.jit import njit
from eldr_sim.references import Reference

#: The decorator of functions that only compiled code calls. Compiling takes time on a new machine,
#: and much of it goes into what such functions do not need: code that runs by itself, and counting
#: references to arrays that their caller holds.
compiled = partial(njit, inlined=True, _nrt=False)
_INTEGER, _FLOAT = ir.IntType(64), ir.DoubleType()


class Callback:
    """A Python function of two integers that returns one, for `ask`, in a microsecond (to return
    and enter a compiled function again takes fifty). It must not raise: that is lost."""

    def __init__(self, function: Callable[[int, int], int]) -> None:
        integer = ctypes.c_int64
        self._function = ctypes.CFUNCTYPE(integer, integer, integer)(function)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value or 0


def address_of(executor: Any, world: Reference) -> int:
    """Return where a compiled function of the world and an engine is, for `execute`."""
    return _address(executor, types.float64(world.type, types.int64))


def decision_address(function: Any, books: Reference, last: Any) -> int:
    """Return where a function of `policies.compiled` is, for `decide`; ``last``: the type of its
    last argument."""
    return _address(function, types.int64(books.type, types.int64, types.int64, last))


def _address(function: Any, signature: Any) -> int:
    result = function.get_compile_result(signature)
    return int(result.library.get_pointer_to_function(result.fndesc.llvm_cfunc_wrapper_name))


@intrinsic
def _ask(_typing: Any, _address: Any, _one: Any, _other: Any) -> Any:
    """Call what is at an address with two integers."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_INTEGER, [_INTEGER, _INTEGER])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def _execute(_typing: Any, _address: Any, world: Any, _leader: Any) -> Any:
    """Call the executor at an address, see `address_of`."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_FLOAT, [cgutils.voidptr_t, _INTEGER])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.float64(types.int64, world, types.int64), codegen


@intrinsic
def _decide(_typing: Any, _address: Any, _books: Any, _kind: Any, _tokens: Any, last: Any) -> Any:
    """Call the decision at an address, see `decision_address`."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        own = [cgutils.voidptr_t, _INTEGER, _INTEGER, args[4].type]
        where = builder.inttoptr(args[0], ir.FunctionType(_INTEGER, own).as_pointer())
        return builder.call(where, [builder.inttoptr(args[1], own[0]), *args[2:]])

    return types.int64(*[types.int64] * 4, last), codegen


#: As mypy cannot see them: without the first argument.
ask: Any = _ask
decide: Any = _decide
execute: Any = _execute
