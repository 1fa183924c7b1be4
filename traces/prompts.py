"""Tokens of prompts: which rows of the trace they replay, and which prompts share them.

Token ``p`` of a prompt (0 is the first) replays prompt row ``p % prompt_len`` of a trace request:
a prompt as long as the recorded one replays it row by row, a longer one wraps around. A prompt may
consist of several trace requests, one after the other; a token's row follows from its position in
the prompt.

Prefix blocks
    A request log may identify the blocks of its prompts (``hash_ids``): equal ids, equal tokens.
    The tokens of a block then depend on the block alone, so that requests with a common prefix
    have the same trace rows for it and hence the same experts: `assign_blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count, pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_sim.traces.routing.bitsets import add_counts
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.routing.gate_scores import PromptScore

__all__ = [
    "PromptSignatures",
    "Ranges",
    "assign_blocks",
    "clip_ranges",
    "count_experts",
    "join_ranges",
    "sum_gate_scores",
]

Ranges = tuple[tuple[int, int, int], ...]
"""Consecutive token ranges ``(trace request, start, stop)`` of a prompt."""

_REMEMBERED = 4096


def clip_ranges(ranges: Ranges, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Return the parts of ``ranges`` that lie in tokens ``start`` to ``stop``."""
    return [
        (request, max(first, start), min(last, stop))
        for request, first, last in ranges
        if first < stop and last > start
    ]


def join_ranges(parts: Sequence[tuple[int, int, int]]) -> Ranges:
    """Join neighbouring ranges that continue one trace request."""
    joined: list[tuple[int, int, int]] = []
    for request, start, stop in parts:
        if joined and joined[-1][0] == request and joined[-1][2] == start:
            joined[-1] = (request, joined[-1][1], stop)
        else:
            joined.append((request, start, stop))
    return tuple(joined)


def count_experts(trace: RoutingTrace, ranges: Ranges) -> NDArray[np.uint32]:
    """Count how often each expert is chosen by the tokens of some ranges of a prompt.

    Returns
    -------
    counts
        uint32 ``[n_layers, n_experts]``.
    """
    trace.require_prompts("expert signatures")
    bits = trace.bits
    total = np.zeros((trace.n_layers, 64 * bits.shape[2]), np.uint32)
    for request, start, stop in ranges:
        first = int(trace.first_row[request])
        length = int(trace.prompt_len[request])
        rounds, rest = divmod(stop - start, length)
        if rounds:
            whole = np.zeros_like(total)
            add_counts(bits, first, first + length, whole)
            total += np.uint32(rounds) * whole
        begin = first + start % length
        end = begin + rest
        add_counts(bits, begin, min(end, first + length), total)
        if end > first + length:
            add_counts(bits, first, end - length, total)
    return np.ascontiguousarray(total[:, : trace.n_experts])


def sum_gate_scores(trace: RoutingTrace, ranges: Ranges, kind: PromptScore) -> NDArray[np.float32]:
    """Sum gate scores over some ranges of a prompt, float32 ``[n_layers, n_experts]``.

    A trace has the sums over whole prompts only; part of a prompt counts by its share of the
    tokens, which is exact for whole prompts alone.
    """
    total = np.zeros((trace.n_layers, trace.n_experts), np.float32)
    for request, start, stop in ranges:
        share = (stop - start) / int(trace.prompt_len[request])
        total += trace.prompt_scores([request], kind)[0] * share
    return total


class PromptSignatures:
    """Expert counts of prompts as routers see them, cached because prompts repeat.

    A call with a prompt's ranges returns ``(id, counts)``: `count_experts`, or `sum_gate_scores`
    where a policy asks for gate scores. Equal ids mean equal counts; the cache holds some thousands
    of prompts, the least recently used go first, and stays for the next run of this process. Counts
    of a decode-only trace are None.

    Parameters
    ----------
    trace
        Trace that the prompts replay.
    kind
        ``count``, ``prob`` or ``logit``.
    requests
        The trace requests that will occur in ranges.

    Raises
    ------
    InputError
        If the trace does not carry the gate's scores of all of ``requests``.
    """

    def __init__(
        self, trace: RoutingTrace, kind: PromptScore = "count", requests: ArrayLike = ()
    ) -> None:
        if kind != "count":
            trace.prompt_scores(requests, kind)
        self._summed = _remembered(trace, kind)

    def __call__(self, ranges: Ranges) -> tuple[int, NDArray[Any] | None]:
        """Return an id and the counts, ``[n_layers, n_experts]``, of ``ranges``."""
        return self._summed(ranges)


@lru_cache(maxsize=1)
def _remembered(
    trace: RoutingTrace, kind: PromptScore
) -> Callable[[Ranges], tuple[int, NDArray[Any] | None]]:
    """Return what sums the experts of a trace's prompts: runs of one trace have the same."""
    numbers = count()

    @lru_cache(maxsize=_REMEMBERED)
    def summed(ranges: Ranges) -> tuple[int, NDArray[Any] | None]:
        if kind != "count":
            return next(numbers), sum_gate_scores(trace, ranges, kind)
        return next(numbers), count_experts(trace, ranges) if trace.has_prompts else None

    return summed


def assign_blocks(
    blocks: NDArray[np.uint64], indptr: NDArray[np.int64], drawn: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[str, Any]]:
    """Assign to each prefix block the trace request that its tokens replay.

    In order of arrival, a request has blocks that were seen before, then new ones. New blocks that
    make up half of the prompt or more are a text of its own: they replay the trace request drawn
    for it, with its domain. Otherwise the request continues an earlier prompt (the next turn of a
    conversation, another question about a document), and its new blocks replay the trace request of
    the last block that it shares. So requests with a common system prompt keep domains of their
    own, and a conversation keeps one domain.

    Parameters
    ----------
    blocks, indptr
        Numbers of `request_logs.chain_blocks` of the requests in order of arrival.
    drawn
        int64 ``[requests]``: trace request drawn for each.

    Returns
    -------
    source
        int64, as long as ``blocks``: trace request that each block replays.
    request
        int64 ``[requests]``: trace request of each prompt's last block, the most specific one, or
        the one drawn where there are no blocks.
    description
        How much of the prompts is shared.
    """
    known: list[int] = []  # trace request of each block number
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
