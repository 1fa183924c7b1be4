"""Which prompts share tokens, and which texts a prompt consists of.

A request log may identify the blocks of its prompts (``hash_ids``): equal ids, equal tokens. The
tokens of a block are then of the text that the block has, whichever request it is in, so that
requests with a common prefix have the same tokens for it: `assign_blocks`.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.traces.streams import stream

Ranges = tuple[tuple[int, int, int], ...]
"""Consecutive token ranges ``(text, start, stop)`` of a prompt."""


def clip_ranges(ranges: Ranges, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Return the parts of ``ranges`` that lie in tokens ``start`` to ``stop``."""
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


def share_prefixes(
    text: NDArray[np.int64], num_prefixes: int, seed: int
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    """Give each request one of some prefixes, all equally likely.

    Returns one block a request, the number of its prefix; ``indptr`` as in `Requests`; and the text
    that the prefix is of, that of the first request with it. ``text``: int64 ``[n]``.
    """
    n = len(text)
    prefix = stream(seed, "prefix").integers(0, num_prefixes, n)
    _, first, number = np.unique(prefix, return_index=True, return_inverse=True)
    return prefix.astype(np.uint64), np.arange(n + 1, dtype=np.int64), text[first][number]


def assign_blocks(
    blocks: NDArray[np.uint64], indptr: NDArray[np.int64], drawn: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[str, Any]]:
    """Assign to each prefix block the text that its tokens are of.

    In order of arrival, a request has blocks that were seen before, then new ones. New blocks that
    make up half of the prompt or more are a text of its own: the one ``drawn`` for it, with its
    domain. Otherwise the request continues an earlier prompt, and its new blocks are of the text of
    the last block that it shares. So requests with a common system prompt keep domains of their
    own, and a conversation keeps one.

    Returns the text of each block, int64, as long as ``blocks``; the text of each prompt's last
    block, int64 ``[requests]``, the most specific one; and how much of the prompts is shared.
    ``blocks``, ``indptr``: of `request_logs.chain_blocks`, in order of arrival.
    """
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
