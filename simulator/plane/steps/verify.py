"""Drafts: how many a verify step accepts, and what drafting the next ones takes.

A decoding sequence computes its sampled token and ``k`` drafts in one step, and gets one token more
than were accepted. Rows are those of its next ``k + 1`` recorded tokens: a rejected draft takes
that of its place, with the overlap of a wrong token (docs/speculative.md); drafts of a tree
beyond its depth take another."""

from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Floats, Ints, Words
from eldr_sim.jit import popcount
from eldr_sim.kernel_profiles.steps.cost_tables import StepCost
from eldr_sim.kernel_profiles.steps.step_cost import step_parts, total_s
from eldr_sim.simulator.plane.compiled import compiled

#: Whose row a rejected draft takes: `SpeculativeConfig.rejected_experts`, in its order.
NEXT, PLACE, REQUEST, NO_OTHER = range(4)
_LOOK_UP = 1 << 40  # beyond all output positions: where draws of look-ups begin


class Drafts(NamedTuple):
    """What the engines of a pool draft; see `no_drafts`."""

    k_of: Ints  #: ``[sequences + 1]``: drafts of each, by the sequences of a step
    #: ``[domains or 1, k]``: of accepting at least so many; none: there is no speculative decoding.
    rates: Floats
    #: ``[k + 2]``: verify steps of sequences by the drafts accepted, and all drafts verified.
    counts: Ints
    key: Words  #: ``[1]``: of the random stream
    found: float  #: share of the steps before which there are drafts; 1 where passes compute them
    reads_by_row: bool  #: attention reads a context once for each token of a step
    cost: StepCost  #: of a draft pass
    lookup_s: float  #: of a step in the place of passes; negative where there are passes
    request_s: float  #: host of each request of a step
    depth: int  #: passes, and most drafts that are accepted
    width: int  #: drafts of a sequence that a pass computes, after the first
    rejected: int  #: `NEXT`, `PLACE`, `REQUEST` or `NO_OTHER`
    in_a_row: bool  #: whether all drafts take the rows behind the sampled token's


def no_drafts(cost: StepCost) -> Drafts:
    """Return what stands for engines that draft nothing."""
    none = np.zeros((1, 0))
    return Drafts(np.zeros(1, np.int64), none, np.zeros(0, np.int64), np.zeros(1, np.uint64), 1.0,
                  False, cost, 0.0, 0.0, 0, 1, NEXT, True)  # fmt: skip


@compiled()
def _drawn(drafts: Drafts, request: int, position: int) -> Any:
    """Return a random word of seed, request and position (SplitMix64: Steele, Lea, Flood 2014)."""
    x = drafts.key[0] + np.uint64(request) * np.uint64(0x9E3779B97F4A7C15)
    x += np.uint64(position) * np.uint64(0xD1B54A32D192ED03)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@compiled()
def _share(word: Any) -> Any:
    """Return a random word as a share, from 0 to less than 1."""
    return float(word >> np.uint64(11)) / 9007199254740992.0


@compiled()
def found_drafts(drafts: Drafts, sequence: Any, k: int) -> Any:
    """Return the drafts of a sequence's next step: ``k``, or none where a look-up finds nothing."""
    if drafts.found < 1.0:
        position = sequence.output_len - sequence.tokens_left
        if _share(_drawn(drafts, sequence.request, _LOOK_UP + position)) >= drafts.found:
            return np.int64(0)
    return np.int64(k)


@compiled()
def accepted(drafts: Drafts, record: Any, sequence: Any) -> Any:
    """Return how many of a sequence's drafts are accepted, under every policy the same."""
    word = _drawn(drafts, sequence.request, sequence.output_len - sequence.tokens_left)
    u, got, kind = _share(word), np.int64(0), np.int64(0)
    if drafts.rates.shape[0] > 1:
        kind = np.int64(record.domain)
    for i in range(sequence.drafts):  # rates do not rise, and no branch depends on the draw
        got += np.int64(u < drafts.rates[kind, i])
    return got


@compiled()
def draft_row(drafts: Drafts, record: Any, sequence: Any, i: int, n_rows: int) -> Any:
    """Return the row of draft ``i``, from 1 on, of all ``n_rows``; as of `accepted`."""
    if i <= drafts.depth and (drafts.rejected == NEXT or i <= accepted(drafts, record, sequence)):
        row = sequence.row + i
        while row >= sequence.row_end:
            row -= sequence.row_span
        return row
    if drafts.rejected == NO_OTHER:
        return sequence.row
    word = _drawn(drafts, sequence.request, -1 - 64 * sequence.row - i) >> np.uint64(1)
    if drafts.rejected == REQUEST:
        return np.int64(word) % n_rows
    return sequence.row_end - 1 - np.int64(word) % sequence.row_span


@compiled()
def attended(drafts: Drafts, sequences: int, tokens: int, context: int) -> tuple[Any, Any]:
    """Return the sequences that decode attention is priced for, and the tokens that these read, of
    ``context`` in the KV cache and ``tokens`` computed."""
    if drafts.reads_by_row and tokens > sequences:
        each = tokens // sequences
        return tokens, context * tokens // sequences + tokens * (each + 1) // 2
    return sequences, context + tokens


@compiled()
def draft_s(
    drafts: Drafts, sequences: int, tokens: int, context: int, scratch: Any, n_chunks: int,
    uniform: bool,
) -> Any:  # fmt: skip
    """Return what drafting takes behind a step, s.

    ``sequences`` ... ``uniform``: of the step (`step_cost.step_parts`); ``scratch``: the experts of
    its last layer count as those of the first pass, and of all of a tree; ``later``: of the
    others."""
    k = drafts.k_of[sequences]
    if drafts.lookup_s >= 0.0:
        return drafts.lookup_s + sequences * drafts.request_s if min(k, sequences) > 0 else 0.0
    if k == 0:
        return 0.0
    last = scratch.activated[scratch.activated.shape[0] - 1 :]
    seconds = total_s(
        step_parts(
            drafts.cost, sequences, tokens, context + tokens, scratch.cached[:n_chunks],
            scratch.new[:n_chunks], sequences, last, uniform,
        )
    )  # fmt: skip
    n = sequences * drafts.width
    experts = scratch.later if drafts.width == 1 else last
    for i in range(1, min(k, drafts.depth) if sequences > 0 else 1):
        seconds += total_s(
            step_parts(
                drafts.cost, sequences, n, context + tokens + i * n, scratch.cached[:0],
                scratch.new[:0], n, experts, False,
            )
        )  # fmt: skip
    return seconds + sequences * drafts.request_s


@compiled()
def last_layer(bits: Any, rows: Any, n: int, masks: Any, scratch: Any) -> None:
    """Count the last layer's experts of ``rows[:n]`` on its busiest rank, into `Scratch.later`."""
    width, ranks, most = bits.shape[1], masks.shape[0], 0
    for r in range(ranks):
        count = 0
        for k in range(width - width // scratch.activated.shape[0], width):
            union = np.uint64(0)
            for i in range(n):
                union |= bits[rows[i], k]
            count += popcount(union if ranks == 1 else union & masks[r, k])
        most = max(most, count)
    scratch.later[0] = most
