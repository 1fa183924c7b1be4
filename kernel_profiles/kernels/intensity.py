"""Operational intensity of a decode step: FLOPs for each byte read from memory, in closed form.

A GPU is bound by memory while a step's intensity lies below the GPU's own FLOPs a byte (Williams et
al. 2009, Roofline). Weights are read once a step, however many tokens share them; of the experts
those that uniform routing is expected to activate
(`kernel_profiles.kernels.moe_latency.uniform_distinct`): skewed routing reads fewer. Each
token reads its own KV cache. Nothing but weights, caches and, where it says so, the hidden states
around a MoE layer is counted: what kernels really move is more.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_sim.kernel_profiles.gpus import GPU
from eldr_sim.kernel_profiles.kernels.moe_latency import uniform_distinct
from eldr_sim.kernel_profiles.models import ModelDims

FloatArray = NDArray[np.float64]


def gpu_intensity(gpu: GPU, *, fp8: bool = False) -> float:
    """Peak FLOPs of a GPU for each byte of its memory bandwidth."""
    return gpu.peak_flops(fp8=fp8) / gpu.memory_bandwidth


def pair_flops(model: ModelDims, sliding: bool = False, *, decode: bool = True) -> float:
    """FLOPs of one query token against one cached token in one layer, all heads.

    MLA decodes against the compressed cache (kv_lora_rank + rope per score, kv_lora_rank per
    value) and prefills against the expanded one.
    """
    if model.attention == "mla" and decode:
        width = 2 * model.kv_lora_rank + model.qk_rope_head_dim
    elif model.attention == "mla":
        width = model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim
    else:
        full = not sliding and model.global_head_dim
        width = 2 * (model.global_head_dim if full else model.head_dim)
    return 2.0 * model.n_heads * width


def index_flops(model: ModelDims) -> float:
    """FLOPs of one query token against one cached token's index key in one layer.

    Of compressed attention the mean of all layers.
    """
    ratio, layers = min(model.compressed_layers, default=(1, model.n_layers))
    return 2.0 * model.index_heads * model.index_head_dim * layers / ratio / model.n_layers


def state_flops(model: ModelDims) -> float:
    """FLOPs of one token against the states of one layer of linear attention.

    Three products of a vector and the ``d x d`` state of each value head: what the key reads from
    it, the update, and what the query reads (Gated DeltaNet, arXiv 2412.06464, Eq. 10).
    """
    return 6.0 * model.linear_value_heads * model.linear_head_dim**2


def expert_bytes(model: ModelDims, batch: ArrayLike) -> FloatArray:
    """Bytes of the expert weights that one MoE layer is expected to read."""
    distinct = uniform_distinct(batch, model.n_experts, model.top_k)
    return model.bytes_per_expert * distinct


def decode_intensity(model: ModelDims, batch: ArrayLike, context: int = 0) -> FloatArray:
    """FLOPs a byte of a whole decode step.

    ``model``: what is served; ``batch``: tokens of the step, 1 or more: one of each sequence;
    ``context``: cached tokens of each sequence. At 0 attention is its projections alone.
    """
    tokens = np.asarray(batch, dtype=np.float64)
    # The embedding is looked up, not multiplied, but where it serves as lm_head too.
    looked_up = 0 if model.tie_word_embeddings else model.embedding_params
    multiplied = model.active_params - looked_up
    experts = model.n_moe_layers * model.n_experts * model.bytes_per_expert
    always_on = model.weight_bytes - experts - 2 * looked_up
    weights = always_on + model.n_moe_layers * expert_bytes(model, tokens)
    window = min(context, model.sliding_window)
    pairs = model.n_sliding_layers * window * pair_flops(model, sliding=True)
    attended = min(context, model.index_topk or context)
    pairs += model.n_full_layers * attended * pair_flops(model)
    pairs += model.n_full_layers * context * index_flops(model)
    pairs += model.n_linear_layers * state_flops(model)
    flops = tokens * (2.0 * multiplied + pairs)
    return np.asarray(flops / (weights + tokens * model.kv_bytes(context)), dtype=np.float64)


def activation_share(model: ModelDims, batch: ArrayLike) -> FloatArray:
    """Bytes of a MoE layer's hidden states over those of its experts' weights.

    Every token's bfloat16 hidden state is read once and written once.
    """
    tokens = np.asarray(batch, dtype=np.float64)
    return 2 * 2 * model.hidden_size * tokens / expert_bytes(model, tokens)
