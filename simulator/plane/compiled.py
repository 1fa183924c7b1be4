"""Compiled functions that only compiled code calls; calls by address, of Python and executors."""

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
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
    and enter a compiled function again takes fifty). An exception cannot pass through compiled
    code: the first one is ``failure[0]``, and the callback returns ``failed``."""

    def __init__(self, function: Callable[[int, int], int], failed: int) -> None:
        waiting: list[Callable[[], object]] = []
        failure: list[BaseException] = []

        def call(one: int, other: int) -> int:
            try:
                while waiting:
                    waiting.pop()()
                return function(one, other)
            except BaseException as error:
                failure.append(error)
                return failed

        integer = ctypes.c_int64
        self._waiting, self._own, self.failure = waiting, call.__code__, failure
        self._function = ctypes.CFUNCTYPE(integer, integer, integer)(call)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value or 0

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """While compiled code runs that may call back: handlers of Ctrl-C and SIGTERM, which raise,
        wait where Python runs them on the way into the callback, too early to be caught."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        of = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        handlers = {number: handler for number, handler in of.items() if callable(handler)}

        def handle(number: int, frame: FrameType | None) -> None:
            handler = partial(handlers[signal.Signals(number)], number, frame)
            if frame is not None and frame.f_code is self._own:
                self._waiting.append(handler)
            else:
                handler()

        for number in handlers:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        while self._waiting:
            self._waiting.pop()()


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
