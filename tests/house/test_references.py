"""Named tuples by reference: `_eldr_sim/references.py`."""

import ctypes
import gc
import signal
from typing import NamedTuple

import numba
import numpy as np
import pytest
from numba import typeof
from numba.core.registry import cpu_target

from eldr_sim.jit import njit
from eldr_sim.references import Reference
from eldr_sim.simulator.plane.compiled import Callback, ask

from ..on_each import on_each

RECORD = np.dtype([("n", np.int64), ("x", np.float64)])


class Inner(NamedTuple):
    scale: float
    flag: bool
    rows: np.ndarray


class Outer(NamedTuple):
    flag: bool
    other: bool
    number: int
    table: np.ndarray
    inner: Inner
    pair: tuple
    last: float
    records: np.ndarray


@njit(_nrt=False)
def _read(outer, i, k):
    inner, row = outer.pair[i], outer.records[k]
    row.n += outer.number
    flags = 8 * outer.flag + 4 * outer.other + 2 * outer.inner.flag + inner.flag
    return flags, outer.table[k, i] + inner.scale * inner.rows[k] + outer.last + outer.inner.scale


@njit(_nrt=False)
def _asks(address, one, other):
    return ask(address, one, other)


_RAISE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(("raise", ctypes.CDLL(None)))


@numba.njit
def _asks_after(address, number):
    """Ask after a signal has come; 0 is none."""
    return ask(address, _RAISE(number), 1)


def an_outer(table):
    rows = np.arange(4.0)
    pair = Inner(0.5, False, rows), Inner(2.0, True, 10 * rows)
    return Outer(
        True, False, 7, table, Inner(0.25, True, rows), pair, 100.0, np.zeros(4, RECORD)
    )  # fmt: skip


@on_each("i", [0, 1])
@on_each("k", range(4))
@on_each("strided", [False, True])
def test_members_are_what_the_tuple_has(i, k, strided):
    table = np.arange(16.0).reshape(4, 4)[:, ::2] if strided else np.arange(8.0).reshape(4, 2)
    outer = an_outer(table)
    flags, value = _read(Reference(outer), i, k)
    inner = outer.pair[i]
    assert flags == 8 + 2 + inner.flag
    assert value == table[k, i] + inner.scale * inner.rows[k] + 100.0 + 0.25
    assert outer.records["n"].tolist() == [7 * (place == k) for place in range(4)]


def test_memory_is_laid_out_as_numba_has_it():
    """The oracle is numba's own size of the tuple."""
    outer = an_outer(np.zeros((4, 2)))
    context = cpu_target.target_context
    reference = Reference(outer)
    kind = context.get_data_type(typeof(outer))
    assert len(reference._memory) == context.get_abi_sizeof(kind)


def test_types_follow_arrays_not_values():
    one, other = Reference(an_outer(np.zeros((4, 2)))), Reference(an_outer(np.ones((9, 5))))
    assert one.type is other.type
    numpys = an_outer(np.zeros((4, 2)))._replace(number=np.int64(7), last=np.float64(100.0))
    assert Reference(numpys).layout is one.layout  # no second compilation of the same code
    assert _read(Reference(numpys), 1, 2) == _read(one, 1, 2)
    assert Reference(an_outer(np.zeros((4, 2), np.float32))).type != one.type
    assert Reference(an_outer(np.zeros((4, 2), order="F"))).type != one.type


def test_python_is_called_by_address():
    callback = Callback(lambda one, other: 10 * one + other, -3)
    assert _asks(callback.address, 4, 2) == 42


def test_what_a_callback_raises_is_kept():
    callback = Callback(lambda one, other: one // other, -3)
    assert _asks(callback.address, 4, 0) == -3
    assert isinstance(callback.failure[0], ZeroDivisionError)


def test_a_signal_in_compiled_code_is_not_lost():
    """Its handler raises in the first Python code there is: the callback, before its first line."""

    class Terminated(BaseException):
        pass

    def terminate(_number, _frame):
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    callback = Callback(lambda one, other: one + other, -3)
    assert _asks_after(callback.address, 0) == 1  # compiles
    try:
        with callback.interruptible():
            assert _asks_after(callback.address, signal.SIGTERM.value) == -3
        assert isinstance(callback.failure[0], Terminated)
        assert signal.getsignal(signal.SIGTERM) is terminate
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_of_cycles_is_left_as_it_was(on):
    def fresh(x):
        return x + 1

    try:
        (gc.enable if on else gc.disable)()
        assert njit(_nrt=False)(fresh)(1) == 2
        assert gc.isenabled() == on
    finally:
        gc.enable()
