"""Compiled functions that only compiled code calls; calls by address, of Python and executors."""

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from eldr_sim.jit import Intrinsic, njit
from eldr_sim.references import Reference

#: The decorator of functions that only compiled code calls. Compiling takes time on a new machine,
#: and much of it goes into what such functions do not need: code that runs by itself, and counting
#: references to arrays that their caller holds.
compiled = partial(njit, inlined=True, _nrt=False)


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


def decision_address(function: Any, books: Reference, last: str) -> int:
    """Return where a function of `policies.compiled` is, for `decide`; ``last``: the type of its
    last argument."""
    from eldr_sim.compiler import pointer_to

    return pointer_to(function, books.type, "int64", "int64", last)


ask: Any = Intrinsic("ask")
decide: Any = Intrinsic("decide")
execute: Any = Intrinsic("execute")
