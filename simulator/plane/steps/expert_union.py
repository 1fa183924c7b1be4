"""Which experts a step activates: unions of bit sets, and how many bits they have.

The trace is bit sets, ``uint64 [rows, moe_layers * words]``, a row a token: a step ORs its tokens'
rows and counts the bits layer by layer, and rank by rank under expert parallelism, where the
fullest rank counts."""

from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Bools, Int32s, Ints, Words
from eldr_sim.jit import njit, popcount, prefetch
from eldr_sim.simulator.plane.compiled import compiled

#: Smallest and largest number of prompt rows whose union is kept: a prompt is replayed by many
#: requests, in a few chunks; a context of prefix blocks, block by block.
_SMALLEST, _LARGEST = 16, 64


class PromptRows(NamedTuple):
    """Which trace row each prompt token replays, see :mod:`eldr_sim.traces.prompts`."""

    bits: Words  #: ``[trace rows, trace layers * words]``: the trace itself
    first_row: Ints  #: ``[trace requests]``: first prompt row
    length: Int32s  #: ``[trace requests]``: prompt rows
    prefix_indptr: Ints  #: as in ``Workload``
    prefix_trace_request: Int32s  #: ``prefix_text`` of ``Workload``
    prefix_block_tokens: int  #: as in ``Workload``
    block_rows: int  #: prompt rows of a kept union, those of a prefix block where known
    #: ``[trace requests]``: of ``block_rows`` prompt rows each; behind them, of all prompt rows
    first_block: Ints
    blocks: Words  #: ``[blocks, trace layers * words]``: their unions
    known: Bools  #: ``[blocks]``: whether the union has been computed


def make_prompt_rows(
    bits: Words,
    first_row: Ints,
    length: Int32s,
    prefix_indptr: Ints,
    prefix_trace_request: Int32s,
    prefix_block_tokens: int,
) -> PromptRows:
    """Return prompts without computed unions; arguments as of `PromptRows`."""
    size = min(max(prefix_block_tokens or _LARGEST, _SMALLEST), _LARGEST)
    blocks = -(-length.astype(np.int64) // size) + 1
    return PromptRows(
        bits, first_row, length, prefix_indptr, prefix_trace_request, prefix_block_tokens,
        size, np.cumsum(blocks) - blocks,
        np.zeros((blocks.sum(), bits.shape[1]), np.uint64), np.zeros(blocks.sum(), np.bool_),
    )  # fmt: skip


def no_prompts() -> PromptRows:
    """Return the rows where none are known."""
    bits = np.zeros((1, 1), np.uint64)
    bits.flags.writeable = False
    none = np.zeros(1, np.int64)
    return make_prompt_rows(bits, none, none.astype(np.int32), none, none.astype(np.int32), 0)


@njit(_nrt=False)
def union_rows(bits: Any, rows: Any, first: int, n: int, union: Any) -> None:
    """OR ``rows[first:n]`` of ``bits`` into ``union``, empty before the first; eight a pass, while
    the next eight are fetched: with many workers no cache holds the rows."""
    width, i = bits.shape[1], first
    if first == 0:
        for k in range(width):
            union[k] = 0
    while i + 8 <= n:
        for j in range(i + 8, min(i + 16, n)):
            row = bits[rows[j]]
            for k in range(0, width, 8):
                prefetch(row, k)
        a, b, c, d = bits[rows[i]], bits[rows[i + 1]], bits[rows[i + 2]], bits[rows[i + 3]]
        e, f, g, h = bits[rows[i + 4]], bits[rows[i + 5]], bits[rows[i + 6]], bits[rows[i + 7]]
        for k in range(width):
            union[k] |= a[k] | b[k] | c[k] | d[k] | e[k] | f[k] | g[k] | h[k]
        i += 8
    if i + 4 <= n:
        _add_four(bits[rows[i]], bits[rows[i + 1]], bits[rows[i + 2]], bits[rows[i + 3]], union)
        i += 4
    if i + 2 <= n:
        a, b = bits[rows[i]], bits[rows[i + 1]]
        for k in range(width):
            union[k] |= a[k] | b[k]
        i += 2
    if i < n:
        a = bits[rows[i]]
        for k in range(width):
            union[k] |= a[k]


@njit(_nrt=False)
def add_prompt(
    prompts: PromptRows, request: int, own_trace_request: int, start: int, stop: int, union: Any
) -> None:
    """OR the experts of the prompt tokens ``start`` to ``stop`` of a request into ``union``."""
    size = prompts.prefix_block_tokens
    if size > 0:
        first, end = prompts.prefix_indptr[request], prompts.prefix_indptr[request + 1]
        while start < stop and start // size < end - first:
            block = start // size
            source = prompts.prefix_trace_request[first + block]
            most = min(end - first, -(-stop // size))
            while block < most and prompts.prefix_trace_request[first + block] == source:
                block += 1
            until = min(stop, block * size)
            _add_rows(prompts, source, start, until - start, union)
            start = until
    if start < stop:
        _add_rows(prompts, own_trace_request, start, stop - start, union)


@compiled()
def _add_rows(prompts: PromptRows, source: int, start: int, n: int, union: Any) -> None:
    """OR ``n`` prompt rows of a request from ``start`` on, rotated in further layers."""
    have, need, size = prompts.bits.shape[1], union.shape[0], prompts.block_rows
    span: Any = np.int64(prompts.length[source])
    tiles = (need + have - 1) // have
    for tile in range(tiles):
        part = union[tile * have : min(tile * have + have, need)]
        if n >= span:
            _add_block(prompts, source, np.int64(0), span, -(-span // size), part)
        else:
            row = (start + tile * span // tiles) % span
            _add_range(prompts, source, row, min(row + n, span), part)
            _add_range(prompts, source, np.int64(0), row + n - span, part)


@compiled()
def _add_block(
    prompts: PromptRows, source: int, row: Any, stop: Any, block: int, union: Any
) -> None:  # fmt: skip
    """OR the union that is kept as a trace request's ``block`` into another one: of its prompt rows
    from ``row`` to ``stop``."""
    at = prompts.first_block[source] + block
    if not prompts.known[at]:
        base = prompts.first_row[source]
        _add_each(prompts.bits, base + row, base + stop, prompts.blocks[at])
        prompts.known[at] = True
    _add_each(prompts.blocks, at, at + 1, union)


@compiled()
def _add_range(prompts: PromptRows, source: int, row: Any, stop: Any, union: Any) -> None:
    """OR the prompt rows from ``row`` to ``stop`` of a trace request into ``union``."""
    base: Any = prompts.first_row[source]
    span: Any = np.int64(prompts.length[source])
    size: Any = prompts.block_rows
    while row < stop:
        begin = row // size * size
        end = min(begin + size, span)
        if row > begin or stop < end:
            _add_each(prompts.bits, base + row, base + min(end, stop), union)
        else:
            _add_block(prompts, source, begin, end, row // size, union)
        row = end


@compiled()
def _add_each(bits: Any, first: int, stop: int, union: Any) -> None:
    while first + 4 <= stop:
        _add_four(bits[first], bits[first + 1], bits[first + 2], bits[first + 3], union)
        first += 4
    while first < stop:
        row = bits[first]
        for k in range(union.shape[0]):
            union[k] |= row[k]
        first += 1


@compiled(restrict=True)
def _add_four(a: Any, b: Any, c: Any, d: Any, union: Any) -> None:
    for k in range(union.shape[0]):
        union[k] |= a[k] | b[k] | c[k] | d[k]


@njit(_nrt=False)
def count_experts(union: Any, masks: Any, activated: Any) -> tuple[int, int]:
    """Count the activated experts of each layer on its busiest rank, into ``activated``. ``masks``:
    uint64 ``[ranks, layers * words]``, not read with one. Returns sums over layers: all, and of
    busiest ranks."""
    layers, ranks = activated.shape[0], masks.shape[0]
    words = union.shape[0] // layers
    active, busiest = 0, 0
    for layer in range(layers):
        first, end = layer * words, (layer + 1) * words
        most = 0
        for r in range(ranks):
            count = 0
            for w in range(first, end):
                count += popcount(union[w] if ranks == 1 else union[w] & masks[r, w])
            active += count
            most = max(most, count)
        activated[layer] = most
        busiest += most
    return active, busiest
