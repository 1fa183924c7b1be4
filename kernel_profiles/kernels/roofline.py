"""Kernel times from bytes and FLOPs alone, where no table exists.

Every kernel takes a fixed time plus the larger of its memory and its compute time at the fraction
of the peak that such kernels were measured to reach elsewhere. :class:`Efficiency` names those
fractions; ``data/efficiency.json`` holds them with their evidence."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from eldr_sim.arrays import Floats
from eldr_sim.kernel_profiles.gpus import GPU
from eldr_sim.kernel_profiles.kernels.bounds import causal_pairs
from eldr_sim.kernel_profiles.kernels.flops import index_flops, pair_flops, state_flops
from eldr_sim.kernel_profiles.kernels.kernel_latency import DecodeAttention, PrefillAttention
from eldr_sim.kernel_profiles.kernels.moe_latency import MoELatency
from eldr_sim.kernel_profiles.models import LONGEST, ModelDims
from eldr_sim.kernel_profiles.shipped_data import shipped_json
from eldr_sim.kernel_profiles.stored_weights import is_fp8, stored_width
from eldr_sim.kernel_profiles.tables.format import Provenance


@dataclass(frozen=True)
class Efficiency:
    """What fraction of the peak kernels reach on a GPU, and their fixed costs."""

    bandwidth: float  #: of peak memory bandwidth: GEMMs and attention
    moe_bandwidth: float  #: of peak memory bandwidth: expert weights in the fused MoE kernels
    #: ``gemm_flops``, ``attention_flops``, ``moe_flops``: of peak bfloat16 throughput.
    gemm_flops: float
    attention_flops: float
    moe_flops: float
    link_bandwidth: float  #: of the peak bandwidth between GPUs of a node: collectives
    #: Fixed time of one GEMM, attention call, layer's MoE kernels, collective.
    gemm_floor_s: float
    attention_floor_s: float
    moe_floor_s: float
    collective_floor_s: float
    #: ``provenance``, ``source``: label and evidence.
    provenance: Provenance
    source: str
    #: Time of a small kernel in a graph; None where a layer's are known (``parts.NORMS_S``).
    small_kernel_s: float | None = None
    #: Host time of an engine without graphs that a layer of MXFP4 experts adds.
    mxfp4_launch_s: float = 0.0


_KNOWN = {name: Efficiency(**values) for name, values in shipped_json("efficiency").items()}
GENERIC = _KNOWN["generic"]
"""Fractions measured on H100-class GPUs, used for any GPU without tables. Those of MI300X are
derived from what is published about it."""


def efficiency_of(gpu: GPU) -> Efficiency:
    """The fractions to use for a GPU: its own, its sibling's, or the generic ones."""
    return _KNOWN.get(gpu.name) or _KNOWN.get(gpu.sibling, GENERIC)


def gemm_s(
    gpu: GPU, n: ArrayLike, k: ArrayLike, rows: ArrayLike, dtype: str = "bfloat16"
) -> Floats:
    """Seconds of ``rows`` rows through an n x k matrix stored as ``dtype``. NVFP4 is computed at
    the rate of FP8 at least; what is widened first at that of bfloat16."""
    efficiency = efficiency_of(gpu)
    m, n, k = (np.asarray(size, dtype=np.float64) for size in (rows, n, k))
    memory = (stored_width(dtype) * n * k + 2 * m * (n + k)) / (
        efficiency.bandwidth * gpu.memory_bandwidth
    )
    peak = gpu.peak_flops(fp8=is_fp8(dtype) or dtype == "nvfp4")
    compute = 2 * m * n * k / (efficiency.gemm_flops * peak)
    return np.where(m > 0, efficiency.gemm_floor_s + np.maximum(memory, compute), 0.0)


def moe_latency(gpu: GPU, model: ModelDims) -> MoELatency:
    """One MoE layer: expert weights over bandwidth, and compute where it exceeds them. Only FP8
    experts compute in FP8: MXFP4 and INT4 are widened to bf16 but on GPUs with FP4 units."""
    efficiency = efficiency_of(gpu)
    experts = np.arange(model.n_experts + 1.0)
    bandwidth = efficiency.moe_bandwidth * gpu.memory_bandwidth
    expert_s = efficiency.moe_floor_s + experts * model.bytes_per_expert / bandwidth
    weights = model.mlp_matrices * model.expert_width * model.expert_intermediate_size
    flops = 2.0 * model.top_k * weights
    peak = gpu.peak_flops(fp8=is_fp8(model.expert_dtype))
    token_s = flops / (efficiency.moe_flops * peak)
    batches = np.array([0.0, 1024.0])
    return MoELatency(model.n_experts, model.top_k, expert_s, batches, np.zeros(2), token_s)


def decode_attention(gpu: GPU, model: ModelDims, sliding: bool) -> DecodeAttention:
    """One layer's decode attention: KV bytes over bandwidth, or FLOPs where MLA makes them more.
    Sparse attention reads all index keys, and what they choose."""
    efficiency = efficiency_of(gpu)
    token_s = _token_s(gpu, model, sliding)
    index_s = 0.0 if sliding else _index_s(gpu, model)
    limit = model.sliding_window if sliding else _chosen(model)
    last = float(max(model.max_position_embeddings, 2 * limit))
    context = np.unique([0.0, float(limit), last])
    batch = np.array([0.0, 1024.0])
    read = np.minimum(context, limit) if limit else context
    seconds = token_s * batch[:, None] * read + index_s * batch[:, None] * context
    seconds = efficiency.attention_floor_s + seconds
    token_s = index_s or token_s
    return DecodeAttention(batch, context, seconds, token_s, int(batch[-1] * context[-1]))


def _chosen(model: ModelDims) -> int:
    """Cached tokens that a query of sparse attention attends to; 0: all."""
    return model.index_topk and model.index_topk + model.local_window


def _token_s(gpu: GPU, model: ModelDims, sliding: bool) -> float:
    efficiency = efficiency_of(gpu)
    read = model.kv_bytes_per_token_layer(sliding)
    read -= 0.0 if sliding else model.index_bytes_per_token
    memory = read / (efficiency.bandwidth * gpu.memory_bandwidth)
    return max(memory, _pair_s(gpu, model, sliding, decode=True))


def _pair_s(gpu: GPU, model: ModelDims, sliding: bool, *, decode: bool) -> float:
    """Compute time of one query token against one cached token, all heads."""
    peak = efficiency_of(gpu).attention_flops * gpu.bf16_flops
    return pair_flops(model, sliding, decode=decode) / peak


def _index_s(gpu: GPU, model: ModelDims) -> float:
    """Time of one query token against one cached token's index key; 0 without sparse attention."""
    efficiency = efficiency_of(gpu)
    memory = model.index_bytes_per_token / (efficiency.bandwidth * gpu.memory_bandwidth)
    return max(memory, _index_pair_s(gpu, model))


def _index_pair_s(gpu: GPU, model: ModelDims) -> float:
    return index_flops(model) / (efficiency_of(gpu).attention_flops * gpu.peak_flops(fp8=True))


def prefill_attention(
    gpu: GPU, model: ModelDims, sliding: bool, max_tokens: int, *, absorbed: bool = False
) -> PrefillAttention:
    """One layer's prefill attention: the pairs under the causal mask (and the window). Sparse
    attention scores all of them by index keys and attends to those it chooses. ``absorbed``: MLA
    attends to the compressed cache, as it does when it decodes."""
    efficiency = efficiency_of(gpu)
    tokens = np.arange(max_tokens + 1.0)
    pairs = causal_pairs(tokens, model.sliding_window if sliding else _chosen(model))
    share = pairs * _pair_s(gpu, model, sliding, decode=absorbed)
    index_s = 0.0 if sliding else _index_pair_s(gpu, model)
    share = share + causal_pairs(tokens) * index_s
    floor = efficiency.attention_floor_s
    reread_s = (0.0 if sliding else _index_s(gpu, model)) or _token_s(gpu, model, sliding)
    return PrefillAttention(floor, floor + share, share, reread_s)


def linear_attention(
    gpu: GPU, model: ModelDims, max_tokens: int
) -> tuple[DecodeAttention, PrefillAttention]:
    """One layer's linear attention: states read and written, or FLOPs, whatever the context."""
    efficiency = efficiency_of(gpu)
    floor = efficiency.attention_floor_s
    bandwidth = efficiency.bandwidth * gpu.memory_bandwidth
    flops_s = state_flops(model) / (efficiency.attention_flops * gpu.bf16_flops)
    token_s = max(2 * model.layer_state_bytes / bandwidth, flops_s)
    batch, context = np.array([0.0, 1024.0]), np.array([0.0, float(LONGEST)])
    seconds = floor + token_s * np.tile(batch[:, None], (1, 2))
    share = flops_s * np.arange(max_tokens + 1.0)
    decode = DecodeAttention(batch, context, seconds, 0.0, int(batch[-1] * context[-1]))
    return decode, PrefillAttention(floor, floor + share, share, 0.0)


def all_reduce_s(gpu: GPU, n_gpus: int, message_bytes: ArrayLike) -> Floats:
    """Seconds to sum ``message_bytes`` bytes over GPUs of a node. Reduce-scatter and all-gather:
    each GPU sends ``2 (N - 1) / N`` of the message."""
    return 2 * _gather_s(gpu, n_gpus, message_bytes) + efficiency_of(gpu).collective_floor_s


def all_gather_s(gpu: GPU, n_gpus: int, message_bytes: ArrayLike) -> Floats:
    """Seconds until every GPU of a node has all ``message_bytes`` bytes; each had 1 / N of them."""
    return _gather_s(gpu, n_gpus, message_bytes) + efficiency_of(gpu).collective_floor_s


def _gather_s(gpu: GPU, n_gpus: int, message_bytes: ArrayLike) -> Floats:
    bandwidth = efficiency_of(gpu).link_bandwidth * gpu.peer_bandwidth(n_gpus)
    moved = np.asarray(message_bytes, dtype=np.float64) * (n_gpus - 1) / n_gpus
    return np.asarray(moved / bandwidth, dtype=np.float64)
