"""Which prompts share tokens, and which texts a prompt consists of.

Where a log identifies blocks of prompts (``hash_ids``), the tokens of a block are of the text that
the block has, whichever request it is in: `assign_blocks`."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from eldr_sim.arrays import Ints, Words
from eldr_sim.traces.streams import stream

Ranges = tuple[tuple[int, int, int], ...]
"""Consecutive token ranges ``(text, start, stop)`` of a prompt."""


def clip_ranges(ranges: Ranges, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Return the parts of ``ranges`` within tokens ``start`` to ``stop``.

    Args:
        ranges: consecutive token ranges ``(text, start, stop)`` of a prompt.
        start: first token of the prompt to keep.
        stop: one past the last token to keep.

    Returns:
        The clipped ranges, in order.
    """
    return [
        (request, max(first, start), min(last, stop))
        for request, first, last in ranges
        if first < stop and last > start
    ]


def join_ranges(parts: Sequence[tuple[int, int, int]]) -> Ranges:
    """Join neighbouring ranges that continue one text."""
    joined: list[tuple[int, int, int]] = []
    for request, start, stop in parts:
        if joined and joined[-1][0] == request and joined[-1][2] == start:
            joined[-1] = (request, joined[-1][1], stop)
        else:
            joined.append((request, start, stop))
    return tuple(joined)


def share_prefixes(text: Ints, num_prefixes: int, seed: int) -> tuple[Words, Ints, Ints]:
    """Give each request one of some prefixes, all equally likely.

    Returns one block a request, the number of its prefix; ``indptr`` as in `Requests`; and the text
    that the prefix is of: that (int64 ``[n]``) of the first request with it."""
    n = len(text)
    prefix = stream(seed, "prefix").integers(0, num_prefixes, n)
    _, first, number = np.unique(prefix, return_index=True, return_inverse=True)
    return prefix.astype(np.uint64), np.arange(n + 1, dtype=np.int64), text[first][number]


def assign_blocks(blocks: Words, indptr: Ints, drawn: Ints) -> tuple[Ints, Ints, dict[str, Any]]:
    """Assign to each prefix block (``blocks``, ``indptr``: of `chain_blocks`) the text that its
    tokens are of.

    In order of arrival: new blocks that are half of the prompt or more are of the text ``drawn``
    for it, others of that of the last block that it shares, so that conversations keep one. Returns
    the text of each block, int64; that of each prompt's last block, int64 ``[requests]``; and how
    much of the prompts is shared."""
    known: list[int] = []  # text of each block number
    source: list[int] = []
    request = drawn.tolist()
    numbers, edges = blocks.tolist(), indptr.tolist()
    seen_before = going_on = 0
    for i, (start, stop) in enumerate(pairwise(edges)):
        mine = numbers[start:stop]
        seen = sum(number < len(known) for number in mine)
        if 2 * seen > len(mine):
            request[i] = known[mine[seen - 1]]
            going_on += 1
        known += [request[i]] * (len(mine) - seen)
        source += [known[number] for number in mine]
        if mine:
            request[i] = source[-1]
        seen_before += seen
    return (
        np.array(source, np.int64),
        np.array(request, np.int64),
        {
            "prefix_blocks": len(numbers),
            "prefix_blocks_seen_before_share": round(seen_before / max(1, len(numbers)), 6),
            "requests_going_on_share": round(going_on / max(1, len(request)), 6),
        },
    )
