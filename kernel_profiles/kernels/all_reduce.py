"""All-reduces that are one kernel with the norm after them: in which engines, up to which size."""

from eldr_sim.kernel_profiles.gpus import GPU
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.tables.library import Engine

ONE_KERNEL = Engine("trtllm")
"""Its rows stand for the kernel that vLLM and SGLang call, FlashInfer's
``trtllm_allreduce_fusion``. They time the all-reduce; the norm keeps its time alone."""

CUSTOM_ALL_REDUCE_BYTES = 8192 * 1024
"""Messages below this size use an engine's own all-reduce (vLLM's ``max_size``), others NCCL."""

LEAST_BYTES = 16
"""And so do those of less: ``should_custom_ar`` of vLLM and SGLang asks for multiples of it, which
larger batches of CUDA graphs are."""

_CAPABILITY = {
    "H100": "9.0", "H200": "9.0", "B200": "10.0", "GB200": "10.0", "B300": "10.3", "GB300": "10.3"
}  # fmt: skip
_SGLANG_TOKENS = 2048  # FUSE_ALLREDUCE_MAX_BATCH_SIZE of its layers/communicator.py
_VLLM_SINCE = {"9.0": (0, 17), "10.0": (0, 17), "10.3": (0, 19)}
_MIB = 1 << 20
_VLLM_BYTES = {
    "9.0": {2: 64 * _MIB, 4: 2 * _MIB, 8: _MIB // 2},
    "10.0": {2: 64 * _MIB, 4: 32 * _MIB, 8: _MIB},
    "10.3": {2: 64 * _MIB, 4: 64 * _MIB, 8: 4 * _MIB},
}


def sglang_fuses(model: ModelDims, gpu: GPU, engine: Engine) -> bool:
    """Whether SGLang does: DeepSeek-V3, GPT-OSS, GLM-4 and Qwen3 MoE on Hopper and Blackwell, H20
    aside, before 0.5.7 the first two on Blackwell (``server_args.py`` of 0.5.6.post2 and 0.5.7); no
    dense models, linear attention, or norms over the heads of all GPUs (MiniMax)."""
    first = model.attention == "mla" or model.name.lower().startswith("gpt-oss")
    if engine.before(0, 5, 7) and not (first and _capability(gpu).startswith("10")):
        return False
    plain = model.is_dense or model.n_linear_layers > 0 or model.qk_norm == "full_width"
    return not plain and bool(_capability(gpu)) and gpu.name not in ("H20", "H20-141GB")


def fused_tokens(model: ModelDims, gpu: GPU, n_gpus: int, engine: Engine) -> int:
    """Return the tokens of the largest step in which a kernel does all-reduce and norm; 0: none.

    TensorRT-LLM fuses those of all models (``AllReduceFusionOp.RESIDUAL_RMS_NORM``), SGLang some
    (`sglang_fuses`). vLLM does by default since 0.17 (``fuse_allreduce_rms``, vllm-project/vllm
    pull requests 34299 and 37755), up to a size that depends on capability and number of GPUs
    (``FI_ALLREDUCE_FUSION_MAX_SIZE_MB`` of its ``allreduce_rms_fusion.py``)."""
    token_bytes = 2 * model.hidden_size
    if engine.name == "trtllm":
        return CUSTOM_ALL_REDUCE_BYTES // token_bytes
    if engine.name == "sglang":
        return _SGLANG_TOKENS if sglang_fuses(model, gpu, engine) else 0
    capability = _capability(gpu)
    since = _VLLM_SINCE.get(capability)
    if engine.name != "vllm" or not since or engine.before(*since):
        return 0
    return _VLLM_BYTES[capability].get(n_gpus, 0) // token_bytes


def norm_reduces(engine: Engine) -> int:
    """Return the all-reduces of norms over the heads of all GPUs: queries' and keys' sums together,
    in vLLM before 0.14 and SGLang before 0.5.8 each (vllm-project/vllm pull request 31493 and the
    date of its merge; SGLang's ``minimax_m2.py`` of 0.5.7 and 0.5.8)."""
    since = {"vllm": (0, 14), "sglang": (0, 5, 8)}.get(engine.name)
    return 2 if since and engine.before(*since) else 1


def _capability(gpu: GPU) -> str:
    return _CAPABILITY.get(gpu.name, _CAPABILITY.get(gpu.sibling, ""))
