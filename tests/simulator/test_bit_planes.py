"""Counters in bit planes against counting bit by bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.jit import njit
from eldr_sim.simulator.plane.steps.bit_planes import (
    add_counts_of,
    add_planes,
    add_rows,
    by_layer,
    n_planes_for,
    union_of,
)

PLANES = 20


@njit()
def counted(bits, rows, first, plane, planes, n_planes):
    """Count rows into planes."""
    carry, empty = np.zeros_like(planes[0]), np.zeros_like(planes[0])
    add_rows(bits, rows, len(rows), planes, first, plane, n_planes, carry, empty)


@njit()
def summed(planes, other, n_planes, mask, counts, union, sums):
    """Add other planes, and sum up what a mask holds."""
    add_planes(planes, other, n_planes, np.zeros_like(planes[0]))
    add_counts_of(planes, PLANES, mask, counts)
    union_of(planes, PLANES, union)
    by_layer(counts, sums)


def bit_by_bit(words):
    """uint64 ``[..., words]`` as 0 and 1, ``[..., words, 64]``."""
    return np.unpackbits(words[..., None].view(np.uint8), axis=-1, bitorder="little")


def values(planes):
    """The counters, ``[words, 64]``."""
    return np.einsum("p,pwb->wb", 1 << np.arange(PLANES), bit_by_bit(planes).astype(int))


SIZES = st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 200]))


@given(
    seed=st.integers(0, 2**32), n=SIZES, more=SIZES, words=st.integers(1, 9),
    first=st.integers(0, 3), plane=st.integers(0, 5),
)  # fmt: skip
def test_rows_are_counted(seed, n, more, words, first, plane):
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**64, (5, words), np.uint64)
    if seed % 3 == 0:
        bits[:] = ~np.uint64(0)  # every counter at its most
    planes = np.zeros((PLANES, first + words + 1), np.uint64)
    total = n + (more << plane)
    for rows, at in ((rng.integers(5, size=n), 0), (rng.integers(5, size=more), plane)):
        before = values(planes)
        counted(bits, rows, first, at, planes, n_planes_for.py_func(total))
        before[first : first + words] += (bit_by_bit(bits[rows]).sum(axis=0) << at).astype(int)
        assert (values(planes) == before).all()
    assert (planes[n_planes_for.py_func(total) :] == 0).all()


@given(
    seed=st.integers(0, 2**32), few=st.integers(1, 9), most=st.integers(9, 15),
    layers=st.integers(1, 3), words=st.integers(1, 3),
)  # fmt: skip
def test_counters_add_and_sum_up(seed, few, most, layers, words):
    rng = np.random.default_rng(seed)
    one, other = np.zeros((2, PLANES, layers * words), np.uint64)
    one[:most] = rng.integers(0, 2**64, (most, layers * words), np.uint64)
    other[:few] = rng.integers(0, 2**64, (few, layers * words), np.uint64)
    if seed % 3 == 0:
        one[:most] = ~np.uint64(0)  # carries run through
    expected = values(one) + values(other)
    mask = rng.integers(0, 2**64, layers * words, np.uint64)
    counts, union = np.zeros_like(mask), np.zeros_like(mask)
    sums = np.zeros(layers)
    summed(one, other, few, mask, counts, union, sums)
    assert (values(one) == expected).all()
    held = (expected * bit_by_bit(mask)).sum(axis=1)
    assert (counts == held).all()
    assert (sums == held.reshape(layers, words).sum(axis=1)).all()
    assert (bit_by_bit(union) == (expected > 0)).all()


@pytest.mark.parametrize(("rows", "bits"), [(0, 3), (7, 3), (8, 4), (255, 8), (256, 9)])
def test_planes_that_count_rows(rows, bits):
    assert n_planes_for.py_func(rows) == bits
