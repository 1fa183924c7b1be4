"""Counting the bits of many rows at once: counters with their bits in planes, 64 in a word.

Plane ``p`` holds the bits of weight ``2^p`` of all counters. Rows are added eight at a time through
a tree of carry-save adders (Harley and Seal's population count), and counters summed up by
population counts of planes: no branches that depend on the data, all in vector registers."""

from typing import Any

import numpy as np

from eldr_sim.jit import popcount
from eldr_sim.simulator.plane.compiled import compiled

#: Rows that are added at once.
EIGHT = 8


@compiled()
def n_planes_for(rows: int) -> Any:
    """Return how many planes count this number of rows; `add_rows` writes the first three in any
    case."""
    n = np.int64(3)
    while 1 << n <= rows:
        n += 1
    return n


@compiled()
def add_rows(
    bits: Any, rows: Any, n: int, planes: Any, first: int, plane: int, n_planes: int, carry: Any,
    empty: Any,
) -> None:  # fmt: skip
    """Count the rows ``rows[:n]`` of ``bits``, uint64 ``[rows, words]``, each ``2^plane`` times.

    ``planes``, ``first``, ``n_planes``: uint64 ``[bits, words or more]``, added to from word
    ``first`` on, and how many are in use; ``carry``: ``[words or more]``, working memory;
    ``empty``: the same of zeros. No arrays overlap."""
    width = bits.shape[1]
    none = empty[:width]
    for i in range(0, n, EIGHT):
        left = n - i
        _add_eight(
            bits[rows[i]],
            bits[rows[i + 1]] if left > 1 else none, bits[rows[i + 2]] if left > 2 else none,
            bits[rows[i + 3]] if left > 3 else none, bits[rows[i + 4]] if left > 4 else none,
            bits[rows[i + 5]] if left > 5 else none, bits[rows[i + 6]] if left > 6 else none,
            bits[rows[i + 7]] if left > 7 else none,
            planes, first, width, plane, n_planes, carry[:width],
        )  # fmt: skip


@compiled()
def add_block(
    rows: Any, planes: Any, first: int, width: int, plane: int, n_planes: int, carry: Any
) -> None:
    """Count eight rows, uint64 ``[8, words or more]``; the rest as of `add_rows`."""
    _add_eight(
        rows[0], rows[1], rows[2], rows[3], rows[4], rows[5], rows[6], rows[7],
        planes, first, width, plane, n_planes, carry[:width],
    )  # fmt: skip


@compiled()
def _add_eight(
    r0: Any, r1: Any, r2: Any, r3: Any, r4: Any, r5: Any, r6: Any, r7: Any, planes: Any,
    first: int, width: int, plane: int, n_planes: int, carry: Any,
) -> None:  # fmt: skip
    end = first + width
    _add_tree(
        r0, r1, r2, r3, r4, r5, r6, r7, planes[plane, first:end], planes[plane + 1, first:end],
        planes[plane + 2, first:end], carry,
    )  # fmt: skip
    for p in range(plane + 3, n_planes):
        _add_carry(planes[p, first:end], carry)


@compiled(restrict=True)
def _add_tree(
    r0: Any, r1: Any, r2: Any, r3: Any, r4: Any, r5: Any, r6: Any, r7: Any, ones: Any, twos: Any,
    fours: Any, carry: Any,
) -> None:  # fmt: skip
    for k in range(carry.shape[0]):
        one, two, four = ones[k], twos[k], fours[k]
        a, b = r0[k], r1[k]
        u = one ^ a
        two_a = (one & a) | (u & b)
        one = u ^ b
        a, b = r2[k], r3[k]
        u = one ^ a
        two_b = (one & a) | (u & b)
        one = u ^ b
        u = two ^ two_a
        four_a = (two & two_a) | (u & two_b)
        two = u ^ two_b
        a, b = r4[k], r5[k]
        u = one ^ a
        two_a = (one & a) | (u & b)
        one = u ^ b
        a, b = r6[k], r7[k]
        u = one ^ a
        two_b = (one & a) | (u & b)
        ones[k] = u ^ b
        u = two ^ two_a
        four_b = (two & two_a) | (u & two_b)
        twos[k] = u ^ two_b
        u = four ^ four_a
        carry[k] = (four & four_a) | (u & four_b)
        fours[k] = u ^ four_b


@compiled(restrict=True)
def _add_carry(plane: Any, carry: Any) -> None:
    """Add a bit to each counter of a plane; ``carry`` holds what goes on to the next one."""
    for k in range(plane.shape[0]):
        word, held = carry[k], plane[k]
        plane[k] = held ^ word
        carry[k] = held & word


@compiled()
def add_planes(into: Any, planes: Any, n_planes: int, carry: Any) -> None:
    """Add counters to others, planes of uint64 ``[bits, words]``."""
    carry[:] = 0
    for p in range(n_planes):
        _add_plane(into[p], planes[p], carry)
    for p in range(n_planes, into.shape[0]):
        rest = np.uint64(0)
        for k in range(carry.shape[0]):
            rest |= carry[k]
        if rest == 0:
            return
        _add_carry(into[p], carry)


@compiled(restrict=True)
def _add_plane(into: Any, plane: Any, carry: Any) -> None:
    for k in range(carry.shape[0]):
        x, y, z = into[k], plane[k], carry[k]
        u = x ^ y
        into[k] = u ^ z
        carry[k] = (x & y) | (u & z)


@compiled(restrict=True)
def add_counts_of(planes: Any, n_planes: int, mask: Any, counts: Any) -> None:
    """Add up the counters that a mask holds, word by word, to uint64 ``counts [words]``."""
    for p in range(n_planes):
        plane, shift = planes[p], np.uint64(p)
        for k in range(counts.shape[0]):
            counts[k] += popcount(plane[k] & mask[k]) << shift


@compiled(restrict=True)
def union_of(planes: Any, n_planes: int, union: Any) -> None:
    """Write which counters are above zero to ``union``, uint64 ``[words]``."""
    union[:] = 0
    for p in range(n_planes):
        plane = planes[p]
        for k in range(union.shape[0]):
            union[k] |= plane[k]


@compiled(restrict=True)
def by_layer(counts: Any, sums: Any) -> None:
    """Sum up uint64 ``[layers * words]`` layer by layer, to ``sums [layers]``."""
    layers = sums.shape[0]
    words = counts.shape[0] // layers
    if words == 2:  # most models have 65 to 128 experts: in vector registers
        for layer in range(layers):
            sums[layer] = np.int64(counts[2 * layer] + counts[2 * layer + 1])
        return
    for layer in range(layers):
        n = np.uint64(0)
        for k in range(layer * words, (layer + 1) * words):
            n += counts[k]
        sums[layer] = np.int64(n)
