"""FLOPs of prefill and their share of a GPU's peak (MFU); FLOPs a byte of a decode step.

Two FLOPs a weight that a token passes, and pairs under the causal mask: with A active parameters, L
layers of H heads of width d, ``s`` new and ``p`` cached tokens (MoE-Prefill, arXiv 2605.02960, Sec.
7.3)::

    F_lin(s) = 2 A s        F_self(s) = 2 L H d s^2        F_cross(s, p) = 4 L H d s p

``s^2 / 2`` pairs are ``s (s + 1) / 2`` here, so that chunks add up to the whole prompt. Sliding
windows stop it, MLA counts its expanded heads (`pair_flops`). What a kernel computes twice is not
work. The embedding and lm_head are left out: Qwen3-235B-A22B's A is 20.9e9, the paper's constant.

Operational intensity of a decode step: bound by memory below the GPU's own FLOPs a byte (Williams
et al. 2009, Roofline). Weights are read once a step, of the experts those that uniform routing is
expected to activate; each token reads its own KV cache. Nothing but weights, caches and, where
said, hidden states around a MoE layer is counted: what kernels really move is more."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from eldr_sim.arrays import Floats
from eldr_sim.kernel_profiles.gpus import GPU
from eldr_sim.kernel_profiles.kernels.moe_latency import uniform_distinct
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.stored_weights import is_fp8


def gpu_intensity(gpu: GPU, *, fp8: bool = False) -> float:
    """Peak FLOPs of a GPU for each byte of its memory bandwidth."""
    return gpu.peak_flops(fp8=fp8) / gpu.memory_bandwidth


def pair_flops(model: ModelDims, sliding: bool = False, *, decode: bool = True) -> float:
    """FLOPs of one query token against one cached token in one layer, all heads. MLA decodes
    against the compressed cache (kv_lora_rank + rope per score, kv_lora_rank per value) and
    prefills against the expanded one."""
    heads, _, width = model.heads(sliding)
    if model.attention == "mla" and decode:
        width = 2 * model.kv_lora_rank + model.qk_rope_head_dim
    elif model.attention == "mla":
        width = model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim
    else:
        width += model.value_width(sliding)
    return 2.0 * heads * width


def index_flops(model: ModelDims) -> float:
    """FLOPs of a query token on a cached token's index key, the mean of the layers that attend to
    the whole context, some of which may have no indexer."""
    if not model.index_topk:
        return 0.0
    ratio, _ = min(model.compressed_layers, default=(1, 0))
    share = model.n_indexers / model.n_full_layers / ratio / model.index_pool
    return 2.0 * model.index_heads * model.index_head_dim * share


def state_flops(model: ModelDims) -> float:
    """FLOPs of one token against the states of one layer of linear attention. Three products of a
    vector and the state of each value head: what the key reads from it, the update, and what the
    query reads (Gated DeltaNet, arXiv 2412.06464, Eq. 10; KDA, arXiv 2510.26692, Eq. 1). Mamba-2
    has two, the update and what is read (arXiv 2405.21060, Eq. 1)."""
    values = model.linear_widths[1]
    return (4.0 if model.linear_kind == "mamba2" else 6.0) * values * model.linear_head_dim


def expert_bytes(model: ModelDims, batch: ArrayLike) -> Floats:
    """Bytes of the expert weights that one MoE layer is expected to read."""
    distinct = uniform_distinct(batch, model.n_experts, model.top_k)
    return model.bytes_per_expert * distinct


def decode_intensity(model: ModelDims, batch: ArrayLike, context: int = 0) -> Floats:
    """FLOPs a byte of a decode step of ``batch`` tokens, one a sequence; ``context``: cached ones
    of each; at 0 attention is its projections alone."""
    tokens = np.asarray(batch, dtype=np.float64)
    # The embedding is looked up, not multiplied, but where it serves as lm_head too.
    looked_up = 0 if model.tie_word_embeddings else model.embedding_params
    multiplied = model.active_params - looked_up
    experts = model.n_moe_layers * model.n_experts * model.bytes_per_expert
    always_on = model.weight_bytes - experts - 2 * looked_up
    weights = always_on + model.n_moe_layers * expert_bytes(model, tokens)
    window = min(context, model.sliding_window)
    pairs = model.n_sliding_layers * window * pair_flops(model, sliding=True)
    chosen, choosing = min(context, model.index_topk), model.n_choosing_layers
    attended = choosing * chosen + (model.n_full_layers - choosing) * context
    pairs += attended * pair_flops(model)
    pairs += model.n_full_layers * context * index_flops(model)
    pairs += model.n_linear_layers * state_flops(model)
    flops = tokens * (2.0 * multiplied + pairs)
    return np.asarray(flops / (weights + tokens * model.kv_bytes(context)), dtype=np.float64)


def activation_share(model: ModelDims, batch: ArrayLike) -> Floats:
    """Bytes of a MoE layer's bfloat16 hidden states, read and written once, over its experts'."""
    tokens = np.asarray(batch, dtype=np.float64)
    return 2 * 2 * model.expert_width * tokens / expert_bytes(model, tokens)


class PrefillWork(NamedTuple):
    """What a model's prompts cost, and the work a worker needs at once to hide its transfers."""

    #: Of a token, attention's pairs left out: the one constant a token of the paper's App. B.
    token_flops: float
    #: ``pair_flops``, ``sliding_pair_flops``: of a query and a key, over all layers that attend to
    #: everything, and over those with a window.
    pair_flops: float
    sliding_pair_flops: float = 0.0
    window: int = 0  #: tokens of that window; 0 where no layer has one
    #: FLOPs at which a worker is saturated, by Eq. 1 and 3, margins left out; 0: nothing streams.
    saturation_eq1: float = 0.0
    saturation_eq3: float = 0.0

    def flops(self, new: int, cached: int = 0) -> float:
        """Return the FLOPs of ``new`` tokens after ``cached`` ones."""
        end = cached + new
        pairs = new * cached + new * (new + 1) // 2
        total = self.token_flops * new + self.pair_flops * pairs
        if self.window:
            total += self.sliding_pair_flops * (
                pairs - _beyond(end, self.window) + _beyond(cached, self.window)
            )
        return total


def _beyond(tokens: int, window: int) -> int:
    """Pairs of a prompt that lie farther apart than the window."""
    past = max(tokens - window, 0)
    return past * (past + 1) // 2


def prefill_work(model: ModelDims) -> PrefillWork:
    """Return what a model's prompts cost; it streams no weights. Sparse attention scores every pair
    and attends to a window's worth of each token's."""
    pair = pair_flops(model, decode=False)
    full = (model.n_full_layers - model.n_choosing_layers) * pair
    sliding = model.n_sliding_layers * pair_flops(model, sliding=True, decode=False)
    if model.index_topk:
        full += model.n_full_layers * index_flops(model)
        sliding += model.n_choosing_layers * pair
    return PrefillWork(
        2.0 * (model.active_params - model.embedding_params - model.lm_head_params)
        + model.n_linear_layers * state_flops(model),
        full,
        sliding,
        model.index_topk or model.sliding_window,
    )


def prefill_flops(model: ModelDims, new: int, cached: int = 0) -> float:
    """Return the FLOPs of ``new`` tokens of a prompt after ``cached`` ones. The cached tokens' own
    FLOPs are not among them: they were computed before."""
    return prefill_work(model).flops(new, cached)


def peak_flops(model: ModelDims, gpu: GPU) -> float:
    """Return the peak of one GPU for a model's experts, FLOP/s: FP8 where they are FP8, else BF16.
    Of a dense model for its matrices. Narrower weights (MXFP4, INT4) are computed in bfloat16."""
    dtype = model.dtype_of("mlp") if model.is_dense else model.expert_dtype
    return gpu.peak_flops(fp8=is_fp8(dtype))


def mfu(flops: float, seconds: float, peak_flops: float) -> float:
    """Return the share of ``peak_flops`` FLOPs a second that ``flops`` in ``seconds`` are. Model
    FLOPs utilisation (PaLM, arXiv 2204.02311, App. B). Several GPUs have the sum of their peaks. A
    value above 1 is no error here: what computed faster than the peak was not measured."""
    return flops / (seconds * peak_flops)
