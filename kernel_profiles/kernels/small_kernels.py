"""Small kernels of a step, and gates of float32: times where no table stands for them."""

from typing import Any

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.kernel_profiles.gpus import GPU
from eldr_sim.kernel_profiles.kernels.all_reduce import sglang_fuses
from eldr_sim.kernel_profiles.kernels.moe_latency import interpolate
from eldr_sim.kernel_profiles.kernels.roofline import efficiency_of
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.shipped_data import shipped_json
from eldr_sim.kernel_profiles.tables import format
from eldr_sim.kernel_profiles.tables.library import Engine

SMALL_KERNELS = shipped_json("small_kernels")
_ROUTER = shipped_json("router_gemm")
_FLOAT32_GATES = {"vllm": (0, 29), "sglang": (0, 5, 11)}
"""Versions since which gates of float32 run on tensor cores (vllm-project/vllm pull request 55899,
September 2026; sgl-project/sglang 22744, April 2026, which says what a gate took before: 9.1% of a
step of 64 sequences of MiniMax-M2.5, and 3.3% after); TensorRT-LLM's do (its 16705)."""


UNFUSED_TOP_K_S = 33e-6
"""SGLang's ``biased_grouped_topk_impl`` at decode: of Kimi-K2's 384 experts, on GPUs that
sgl-project/sglang pull request 13150 does not name."""

MLA_KERNELS = 8
"""Small kernels of multi-head latent attention beside others': two norms of the compressed queries
and KV, two splits, two rotations, keys and values put together."""


def layer_kernels(model: ModelDims, *, compiled: bool) -> int:
    """Kernels of a layer that are no GEMM, attention or part of its routed experts. Norms, rotary
    embedding, the write to the KV cache, and the activation of a dense or shared MLP, where most
    layers have one.

    ``compiled``: as vLLM compiles a step of its graphs, with native norms (``custom_ops`` "none" of
    its ``config/vllm.py``). Norms that follow each other, and the sum between, are one kernel of
    Inductor: all between attention and the MLPs, all from these to the next layer (Gemma's 4 or
    7)."""
    dense = model.shared_intermediate_size > 0 or model.n_dense_layers > model.n_moe_layers
    norms = min(model.norms_per_layer, 2) if compiled else model.norms_per_layer
    return norms + 2 + (model.qk_norm != "none") + dense


def dense_linears(model: ModelDims) -> int:
    """Matrices of dense linear layers, of all layers."""
    return sum(layers * len(own) for _, layers, own in model.matrices)


def unfused_kernels(model: ModelDims) -> int:
    """Kernels of all layers that only tables of modules and GEMMs hold: those of MLA, and the
    scales of what a block-FP8 linear reads."""
    scales = dense_linears(model) if model.linear_dtype == "fp8_block" else 0
    return scales + (model.n_layers * MLA_KERNELS if model.attention == "mla" else 0)


def quantized_inputs(model: ModelDims) -> int:
    """Inputs of linears that a kernel quantizes first, mean by layer: two of attention and two of a
    dense or shared MLP. Rows of block-FP8 GEMMs time DeepGEMM alone; SGLang and vLLM launch
    ``per_token_group_quant_fp8`` before it."""
    return round(2 * sum(layers for _, layers, _ in model.matrices) / model.n_layers)


def launched_kernels(model: ModelDims, gpu: GPU, n_gpus: int, engine: Engine) -> int:
    """Kernels of all layers that a host launches beside GEMMs, attention and what every layer has.

    Of FP8 and FP4 experts the quantization of tokens and of activations; conversion for a float32
    gate; SGLang's unfused top-k is one compiled call. Under tensor parallelism two all-reduces a
    layer, and beside norms over the heads of all GPUs a sum and an all-reduce (``minimax_m2.py`` of
    SGLang 0.5.8). TensorRT-LLM takes all-reduce and norm in one kernel, and so does SGLang
    (`sglang_fuses`); vLLM's prompts are above its limit.
    TensorRT-LLM's operator of experts quantizes inside, and what a launch costs is derived from
    it."""
    if engine.name == "trtllm":
        return unfused_kernels(model)
    gate = has_float32_gate(model, engine)
    quantized = 2 * (model.expert_dtype in ("fp8", "fp8_block", "nvfp4"))
    kernels = unfused_kernels(model) + model.n_moe_layers * (gate + quantized)
    full = model.qk_norm == "full_width"
    if n_gpus > 1 and not (engine.name == "sglang" and sglang_fuses(model, gpu, engine)):
        kernels += 2 * model.n_layers - model.n_bare_layers + 2 * full * model.n_full_layers
    return kernels


def elementwise_bytes(model: ModelDims) -> int:
    """Bytes that a layer's norms, rotary embedding and KV writes move a token (MLA: in its
    module)."""
    heads = 0 if model.attention == "mla" else model.n_heads + 2 * model.n_kv_heads
    return 4 * (4 * model.hidden_size + heads * model.head_dim)


def bytes_alone(model: ModelDims, gpu: GPU) -> format.LatencyTable:
    """Return a table of what these move alone, without `parts.NORMS_S`: a bound from below."""
    bandwidth = efficiency_of(gpu).bandwidth * gpu.memory_bandwidth
    tokens = (1, 1 << 20)
    metadata = format.TableMetadata(
        kind="elementwise",
        gpu=gpu.name,
        shape=format.elementwise_shape(model),
        dtype="bfloat16",
        kernel_source="none: bytes over bandwidth",
        framework="eldr-sim",
        provenance="roofline",
        origin="bytes that a token moves",
        device=gpu.name,
    )
    seconds = [elementwise_bytes(model) * n / bandwidth for n in tokens]
    return format.table_of([(n,) for n in tokens], seconds, metadata)


def residual_bytes(model: ModelDims) -> float:
    """Bytes that a token moves through residuals that are more than one stream, of all layers.

    Hyper-connections read all streams before attention or MLP, and read, mix and write them after
    it; attention residuals read the sums of the blocks of layers before, half of them on average
    (Kimi-K3)."""
    sites = 2 * model.n_layers - model.n_bare_layers
    vectors = 0.0
    if model.hyper_connections:
        vectors = 3 * model.hyper_connections + 2
    elif model.residual_block:
        vectors = 2 + model.n_layers / model.residual_block / 2
    return 2.0 * model.hidden_size * sites * vectors


def small_kernel_s(gpu: GPU) -> float:
    """Return what a small kernel takes in a CUDA graph: the GPU's, its sibling's, or H100's."""
    seconds: dict[str, float] = SMALL_KERNELS["seconds"]
    return seconds.get(gpu.name) or seconds.get(gpu.sibling, seconds["H100"])


def _is_glm(model: ModelDims) -> bool:
    return model.float32_gate and model.shared_intermediate_size > 0


def has_float32_gate(model: ModelDims, engine: Engine) -> bool:
    """Whether an engine computes the model's gate in float32: of GLM-4 neither SGLang before 0.5.10
    (``glm4_moe.py``) nor TensorRT-LLM (``modeling_glm.py``)."""
    bfloat16 = engine.name == "trtllm" or (engine.name == "sglang" and engine.before(0, 5, 10))
    return model.float32_gate and not (bfloat16 and _is_glm(model))


def unfused_gate_s(model: ModelDims, gpu: GPU, engine: Engine, *, fused: bool) -> float:
    """Return what GLM-4 takes to choose and add experts beside other models, s.

    Its experts are one group, for which SGLang's ``biased_grouped_topk_impl`` launches eight
    kernels instead of one (sgl-project/sglang pull request 13049 counts them); since 0.5.12 only
    where the shared expert is ``fused`` (``topk.py`` of 0.5.6 to 0.5.23). Another kernel adds the
    output of one that is not (``glm4_moe.py``). vLLM before 0.12 launches a sigmoid, a sum, two of
    ``grouped_topk`` and a conversion (its issue 28086 and
    the date of its fix), and adds the shared output."""
    if engine.name == "vllm" and engine.before(0, 12) and _is_glm(model):
        return 5 * small_kernel_s(gpu)
    if engine.name != "sglang" or not _is_glm(model):
        return 0.0
    added = 0.0 if fused else small_kernel_s(gpu)
    unfused = fused or engine.before(0, 5, 12)
    return added + (UNFUSED_TOP_K_S - small_kernel_s(gpu) if unfused else 0.0)


def float32_gate_s(
    gpu: GPU, hidden_size: int, rows: Floats, engine: Engine
) -> tuple[Floats, dict[str, Any]]:
    """Return what a gate with float32 weights takes, and its provenance.

    cuBLAS's kernels for few columns go through all rows of a matrix one after the other: times go
    with the hidden size, as measured on GB200; tokens are converted first, in a separate kernel
    (vllm-project/vllm pull request 38445)."""
    if engine.before(*_FLOAT32_GATES.get(engine.name, ())):
        kernel = "float32"
    else:
        kernel = "bf16x3" if engine.name == "vllm" else "tf32"
    tokens, taken = (
        np.array(each, np.float64) for each in (_ROUTER["tokens"], _ROUTER["microseconds"][kernel])
    )
    seconds = 1e-6 * interpolate(rows, tokens, taken) * hidden_size / _ROUTER["hidden_size"]
    if kernel != "bf16x3":
        seconds = seconds + small_kernel_s(gpu)
    return seconds, format.provenance_of("derived", _ROUTER["source"], kernel)
