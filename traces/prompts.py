"""Experts of prompts: token ``p`` replays prompt row ``p % prompt_len`` of a trace request; a
prompt may consist of several texts (`requests.prefixes`)."""

from collections.abc import Callable
from functools import lru_cache
from itertools import count

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_sim.arrays import Array
from eldr_sim.traces.requests.prefixes import Ranges
from eldr_sim.traces.routing.bitsets import add_counts
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.routing.gate_scores import PromptScore

_REMEMBERED = 4096


def count_experts(trace: RoutingTrace, ranges: Ranges) -> NDArray[np.uint32]:
    """Count the experts that ranges of a prompt chose: uint32 ``[n_layers, n_experts]``."""
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
    """Sum gate scores over ranges of a prompt, float32 ``[n_layers, n_experts]``.

    Known of whole prompts only: part of a prompt counts by its share of the tokens."""
    total = np.zeros((trace.n_layers, trace.n_experts), np.float32)
    for request, start, stop in ranges:
        share = (stop - start) / int(trace.prompt_len[request])
        total += trace.prompt_scores([request], kind)[0] * share
    return total


class PromptSignatures:
    """Expert counts of prompts as routers see them, some thousands kept, for the next run of this
    process, too.

    A call with a prompt's ranges returns ``(id, counts)``: `count_experts`, or `sum_gate_scores`
    for another ``kind``; None of a decode-only trace. Equal ids mean equal counts. Raises
    InputError if the trace lacks gate scores of some of ``requests``, which will occur."""

    def __init__(
        self, trace: RoutingTrace, kind: PromptScore = "count", requests: ArrayLike = ()
    ) -> None:
        if kind != "count":
            trace.prompt_scores(requests, kind)
        self._summed = _remembered(trace, kind)

    def __call__(self, ranges: Ranges) -> tuple[int, Array | None]:
        """Return an id and the counts, ``[n_layers, n_experts]``, of ``ranges``."""
        return self._summed(ranges)


def no_signatures(ranges: Ranges) -> tuple[int, None]:
    """Return what a dense model's prompts are to routers: all the same."""
    return 0, None


@lru_cache(maxsize=1)
def _remembered(
    trace: RoutingTrace, kind: PromptScore
) -> Callable[[Ranges], tuple[int, Array | None]]:
    """Return what sums the experts of a trace's prompts: runs of one trace have the same."""
    numbers = count()

    @lru_cache(maxsize=_REMEMBERED)
    def summed(ranges: Ranges) -> tuple[int, Array | None]:
        if kind != "count":
            return next(numbers), sum_gate_scores(trace, ranges, kind)
        return next(numbers), count_experts(trace, ranges) if trace.has_prompts else None

    return summed
