"""Experts of prompts: which rows of the trace their tokens replay, and their sums.

Token ``p`` of a prompt (0 is the first) replays prompt row ``p % prompt_len`` of a trace request:
a prompt as long as the recorded one replays it row by row, a longer one wraps around. A prompt may
consist of several texts, one after the other (`requests.prefixes`); a token's row follows from its
position in the prompt.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_sim.traces.requests.prefixes import Ranges
from eldr_sim.traces.routing.bitsets import add_counts
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.routing.gate_scores import PromptScore

_REMEMBERED = 4096


def count_experts(trace: RoutingTrace, ranges: Ranges) -> NDArray[np.uint32]:
    """Count how often each expert is chosen by the tokens of some ranges of a prompt.

    Returns counts: uint32 ``[n_layers, n_experts]``.
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
    for the other ``kind``; counts of a decode-only trace are None. Equal ids mean equal counts; the
    cache holds some thousands of prompts, the least recently used go first, and stays for the next
    run of this process.

    Raises InputError if the trace does not carry the gate's scores of all of ``requests``, the
    trace requests that will occur in ranges.
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


def no_signatures(ranges: Ranges) -> tuple[int, None]:
    """Return what a dense model's prompts are to routers: all the same."""
    return 0, None


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
