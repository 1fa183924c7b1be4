"""The time of a step: from what it computes and the experts that it activates to seconds.

The one place where the formula stands, compiled; the engine, the policies that predict, the
planner's bounds and the comparisons with real engines all come here. A step computes

- ``tokens`` of ``sequences`` that decode, which attend to ``context`` tokens together, and
- chunks of contexts: ``count[i]`` tokens after ``first[i]`` that are cached.

Every weight is read once for all of them."""

from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Floats, Ints
from eldr_sim.jit import Entry, njit
from eldr_sim.kernel_profiles.steps.cost_tables import RankMoE, StepCost
from eldr_sim.references import Reference


class StepParts(NamedTuple):
    """Seconds of a step by component; their sum is the step."""

    moe: float  #: routed experts of all MoE layers
    attention: float  #: attention of all layers
    dense: float  #: GEMMs, gates, shared experts, dense layers, norms, embedding
    head: float  #: lm_head
    collectives: float  #: between the GPUs of a worker
    host: float  #: engine time that no kernel hides
    dispatch: float = 0.0  #: of tokens to the experts that engines share
    combine: float = 0.0  #: of what these return
    choice: float = 0.0  #: of the instances of redundant experts


@njit()
def total_s(parts: StepParts) -> float:
    """Return the time of a step.

    Args:
        parts: seconds by component.

    Returns:
        Seconds.
    """
    fixed = parts.dense + parts.collectives + parts.host + parts.head
    own = fixed + parts.moe + parts.attention
    return float(own + parts.dispatch + parts.combine + parts.choice)


@njit()
def moe_layers_s(layer_s: Any, activated: Any) -> float:
    """Return the time of MoE layers, s. ``layer_s``: float64 ``[experts + 1]``, by activated
    experts at the step's tokens; ``activated``: ``[layers]``, of the busiest rank, interpolated."""
    total = 0.0
    last = layer_s.shape[0] - 1
    for layer in range(activated.shape[0]):
        count = activated[layer]
        i = min(int(count), last)
        seconds = layer_s[i]
        if count > i and i < last:
            seconds += (layer_s[i + 1] - seconds) * (count - i)
        total += seconds
    return total


@njit()
def rank_moe_s(layer: RankMoE, pairs: float, activated: float, prompts: bool) -> float:
    """Return the time of one MoE layer on one rank.

    Args:
        layer: table of the layer.
        pairs: token-expert pairs that the rank computes; beyond the table its last slope continues.
        activated: experts of the rank that have tokens, interpolated, at most its slots.
        prompts: whether the step holds prompts.

    Returns:
        Seconds.
    """
    row = pairs / layer.top_k
    rows = layer.rows
    low, high = 0, rows.shape[0] - 1
    if row < high and rows[int(row)] == int(row):  # knots are 0, 1, 2 ... at first
        low = min(int(row), high - 1)
    else:
        while high - low > 1:
            middle = (low + high) // 2
            if rows[middle] <= row:
                low = middle
            else:
                high = middle
    part = (row - rows[low]) / (rows[low + 1] - rows[low])
    table = layer.mixed_s if prompts else layer.decode_s
    last = table.shape[1] - 1
    count = min(max(activated, 0.0), float(last))
    i = min(int(count), last - 1)
    share = count - i
    below = table[low, i] + share * (table[low, i + 1] - table[low, i])
    above = table[low + 1, i] + share * (table[low + 1, i + 1] - table[low + 1, i])
    return float(below + part * (above - below))


@njit()
def decode_attention_s(cost: StepCost, sequences: int, context: float) -> float:
    """Return the attention time, s, of sequences at the mean context ``context / sequences``."""
    knots = cost.attention_s[sequences]
    x = context / sequences / cost.context_stride
    i = min(int(x), knots.shape[0] - 2)
    return float(knots[i] + (knots[i + 1] - knots[i]) * (x - i))


@njit()
def chunk_attention_s(cost: StepCost, first: Any, count: Any) -> float:
    """Return the attention time, s, of chunks: by pairs under the causal mask the whole context's
    less its cached part's, no less than reading the cached KV, nor than the slowest chunk alone."""
    longest = together = cost.prompt_floor_s
    for i in range(count.shape[0]):
        cached, end = first[i], first[i] + count[i]
        read = cost.prompt_token_s * end
        pairs = cost.prompt_share_s[end] - cost.prompt_share_s[cached]
        together += pairs if pairs > read else read
        alone = cost.prompt_floor_s + cost.prompt_alone_s[end] - cost.prompt_alone_s[cached]
        longest = max(longest, alone)
    return float(max(together, longest))


@njit()
def attention_s(cost: StepCost, sequences: int, context: float, first: Any, count: Any) -> float:
    """Return the attention time of a step.

    Args:
        cost: tables of the engine.
        sequences: number of sequences that decode.
        context: tokens that they attend to.
        first: int64 ``[chunks]``, cached tokens before each prompt chunk.
        count: int64 ``[chunks]``, new tokens of each prompt chunk.

    Returns:
        Seconds.
    """
    attention = 0.0
    if sequences > 0:
        attention += decode_attention_s(cost, sequences, context)
    if count.shape[0] > 0:
        attention += chunk_attention_s(cost, first, count)
    return attention


@njit()
def step_parts(
    cost: StepCost,
    sequences: int,
    tokens: int,
    context: float,
    first: Any,
    count: Any,
    rows: int,
    activated: Any,
    uniform: bool,
) -> StepParts:
    """Return the time of one engine step by component.

    Args:
        cost: tables of the engine.
        sequences: number of sequences that decode.
        tokens: tokens of these sequences in this step.
        context: tokens that these attend to, themselves included.
        first: int64 ``[chunks]``, cached tokens before each prompt chunk.
        count: int64 ``[chunks]``, new tokens of each prompt chunk.
        rows: rows of lm_head.
        activated: experts of each MoE layer on its busiest rank; fewer layers stand for all in
            equal parts.
        uniform: whether the experts of the chunks are unknown; uniform routing of all tokens is
            then expected.

    Returns:
        Seconds by component.
    """
    n_chunks, chunk_tokens = count.shape[0], 0
    for i in range(n_chunks):
        chunk_tokens += count[i]
    computed = tokens + chunk_tokens
    if n_chunks > 0 and uniform:
        moe = cost.n_moe_layers * cost.uniform_moe_s[computed]
    else:
        layer_s = cost.moe_s[tokens] if n_chunks == 0 else cost.mixed_moe_s[computed]
        moe = moe_layers_s(layer_s, activated) * (cost.n_moe_layers / activated.shape[0])
    attention = attention_s(cost, sequences, context, first, count)
    dense, collectives = cost.dense_s[computed], cost.collectives_s[computed]
    head = cost.head_s[rows]
    kernels_s = moe + attention + dense + head + collectives
    host = cost.host_s + launch_wait_s(cost, kernels_s, computed, n_chunks > 0)
    return StepParts(moe, attention, dense, head, collectives, host, 0.0, 0.0, 0.0)


class StepPricer:
    """Prices steps for Python, without loading the compiler: `step_parts` on arrays that stay.
    ``cost``: tables of the engine; ``most``: prompt chunks of a step."""

    def __init__(self, cost: StepCost, most: int) -> None:
        first, count = np.zeros((2, most), np.int64)
        layers, found = np.zeros(max(cost.n_moe_layers, 1)), np.zeros(len(StepParts._fields))
        self._step, self._alone = _Step(cost, first, count, layers, found), Lock()
        self._reference = Reference(self._step)

    def parts(
        self,
        batch: int,
        context: float,
        chunks: Ints,
        rows: int,
        activated: Sequence[float] | Floats | None,
    ) -> StepParts:
        """Return the time of one engine step by component.

        Args:
            batch: sequences that decode a token each.
            context: tokens that these attend to, themselves included.
            chunks: int64 ``[chunks, 2]``, cached and new tokens of each prompt chunk.
            rows: rows of lm_head.
            activated: experts of each MoE layer on its busiest rank; empty: a dense model; None:
                uniform routing.

        Returns:
            Seconds by component.
        """
        step, n = self._step, len(chunks)
        with self._alone:
            step.first[:n], step.count[:n] = chunks[:, 0], chunks[:, 1]
            if activated is not None:
                step.activated[: len(activated)] = activated
            _write_parts(self._reference, batch, context, n, rows, activated is None)
            return StepParts(*step.found.tolist())

    def decodes(self, most: int, context: float, activated: Sequence[float]) -> Floats:
        """Return the times of decode steps of all batches: `parts` of each.

        Args:
            most: the largest batch.
            context: tokens that each sequence attends to, itself included.
            activated: experts of each MoE layer on its busiest rank.

        Returns:
            float64 ``[most, parts]``, seconds of batches of 1, 2, ...
        """
        layers, found = (
            np.zeros_like(self._step.activated),
            np.empty((most, len(StepParts._fields))),
        )
        layers[: len(activated)] = activated
        _write_decodes(Reference(self._step._replace(activated=layers, found=found)), context)
        return found


class _Step(NamedTuple):
    cost: Any
    first: Any
    count: Any
    activated: Any
    found: Any


@Entry
def _write_decodes(step: Any, context: float) -> int:
    first, count = step.first[:0], step.count[:0]
    for i in range(step.found.shape[0]):
        n = i + 1
        parts = step_parts(step.cost, n, n, n * context, first, count, n, step.activated, False)
        for k in range(len(parts)):
            step.found[i, k] = parts[k]
    return 0


@Entry
def _write_parts(
    step: Any, batch: int, context: float, n_chunks: int, rows: int, uniform: int
) -> int:
    first, count = step.first[:n_chunks], step.count[:n_chunks]
    parts = step_parts(
        step.cost, batch, batch, context, first, count, rows, step.activated, uniform != 0
    )
    for i in range(len(parts)):
        step.found[i] = parts[i]
    return 0


@njit()
def launch_wait_s(
    cost: StepCost, kernels_s: float, tokens: int, prompts: bool, again_s: float = 0.0
) -> float:
    """Return how long the kernels of a step wait for the host.

    Without CUDA graphs the host launches the next kernel while the last one runs.

    Args:
        cost: tables of the engine.
        kernels_s: time of the kernels alone, s.
        tokens: tokens that the step computes, of engines that step together the most of one.
        prompts: whether the step holds prompts.
        again_s: time of launching kernels again, such as those of further chunks, s.

    Returns:
        Seconds.
    """
    launch_s = cost.prompt_launch_s if prompts else cost.launch_s
    if tokens <= (cost.prompt_graph_tokens if prompts else cost.graph_tokens):
        launch_s = 0.0
    if launch_s > 0.0:
        launch_s += again_s
    return float(max(launch_s - kernels_s, 0.0))
