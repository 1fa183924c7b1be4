"""What CUDA graphs add to a step: they were captured for some numbers of tokens, others are padded.

vLLM captures 1, 2, 4 tokens, every eighth up to 256 and every 16th beyond, up to ``min(2 *
max_num_seqs, 512)`` (``vllm/config/vllm.py``, ``_set_cudagraph_sizes``). A step replays the next
larger graph: GEMMs, gates, norms and collectives compute the padding rows too; attention (empty
sequences) and lm_head (outside) do not. Padding rows hold what an earlier step left
(``vllm/v1/worker/gpu_model_runner.py``): their gates choose like other tokens'; since pull request
46428 (``VLLM_MOE_SKIP_PADDING``, by default in 0.32) they choose none."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import numpy as np

from eldr_sim.arrays import Floats, Ints
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.parallel import Padding
from eldr_sim.kernel_profiles.rounding import rounded

if TYPE_CHECKING:
    from eldr_sim.kernel_profiles.steps.cost_tables import StepCost

_LARGEST = 512


def padded_sizes(
    max_num_seqs: int, max_num_batched_tokens: int, tokens_per_sequence: int = 1
) -> Ints:
    """Return the tokens of the graph that steps of 0, 1, 2, ... tokens replay. As many as vLLM
    captures graphs for; larger steps run without, as they are. Where sequences verify drafts,
    graphs are captured for whole sequences with all their tokens."""
    most = min(2 * max_num_seqs * tokens_per_sequence, _LARGEST, max_num_batched_tokens)
    captured = np.array([1, 2, 4, *range(8, 256, 8), *range(256, _LARGEST + 1, 16)])
    captured = captured * tokens_per_sequence
    captured = captured[captured <= most]
    tokens = np.arange(captured[-1] + 1)
    found: Ints = captured[np.searchsorted(captured, tokens)]
    found[0] = 0
    return found


def grown(activated: Floats, n_experts: int, growth: float) -> Floats:
    """Return the experts that a batch is expected to activate with ``growth`` times its rows. Each
    expert is missed by all rows of a batch with probability ``1 - activated / n_experts``, and by
    ``growth`` times as many that choose alike with that to the power of ``growth``."""
    missed = 1.0 - np.minimum(activated / n_experts, 1.0)
    return np.maximum(activated, rounded(n_experts * (1.0 - missed**growth)))


def pad(cost: StepCost, padding: Padding, sizes: Ints) -> StepCost:
    """Return a worker's step times as its graphs (:func:`padded_sizes`) run. ``dense``: padding
    rows choose no experts; ``experts``: as those of the batch. Raises InputError: no such
    padding."""
    if padding not in get_args(Padding):
        raise InputError("cudagraph_padding", repr(padding), ", ".join(get_args(Padding)))
    if padding == "none":
        return cost
    dense_s, collectives_s = cost.dense_s.copy(), cost.collectives_s.copy()
    n = min(len(sizes), len(dense_s))
    graph = np.minimum(sizes[:n], len(dense_s) - 1)
    dense_s[:n], collectives_s[:n] = dense_s[graph], collectives_s[graph]
    cost = cost._replace(dense_s=dense_s, collectives_s=collectives_s)
    if padding == "dense" or not cost.n_experts:
        return cost
    uniform_moe_s = cost.uniform_moe_s.copy()
    n = min(n, len(uniform_moe_s))
    uniform_moe_s[:n] = uniform_moe_s[np.minimum(sizes[:n], len(uniform_moe_s) - 1)]
    return cost._replace(
        moe_s=_padded_grid(cost.moe_s, sizes),
        mixed_moe_s=_padded_grid(cost.mixed_moe_s, sizes),
        uniform_moe_s=uniform_moe_s,
    )


def _padded_grid(grid: Floats, sizes: Ints) -> Floats:
    """Return a table ``[tokens + 1, experts + 1]`` whose padding rows choose experts, too."""
    n_experts = grid.shape[1] - 1
    counts = np.arange(n_experts + 1.0)
    padded_grid = grid.copy()
    for tokens in range(1, min(len(sizes), len(grid))):
        graph = min(sizes[tokens], len(grid) - 1)
        activated = grown(counts, n_experts, graph / tokens)
        padded_grid[tokens] = np.interp(activated, counts, grid[graph])
    return padded_grid
