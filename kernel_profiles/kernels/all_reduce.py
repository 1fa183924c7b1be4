"""All-reduces that are one kernel with the norm after them: in which engines, up to which size."""

from eldr_sim.kernel_profiles.gpus import GPU
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.tables.library import Engine, version_numbers

ONE_KERNEL = Engine("trtllm")
"""Its rows stand for the kernel that vLLM and SGLang call, FlashInfer's
``trtllm_allreduce_fusion``. They time the all-reduce; the norm keeps its time alone."""

CUSTOM_ALL_REDUCE_BYTES = 8192 * 1024
"""Messages below this size use an engine's own all-reduce (vLLM's ``max_size``), others NCCL."""

_CAPABILITY = {
    "H100": "9.0", "H200": "9.0", "B200": "10.0", "GB200": "10.0", "B300": "10.3", "GB300": "10.3"
}  # fmt: skip
_SGLANG_TOKENS = 2048  # FUSE_ALLREDUCE_MAX_BATCH_SIZE of its layers/communicator.py
_VLLM_SINCE = {"9.0": "0.17", "10.0": "0.17", "10.3": "0.19"}
_MIB = 1 << 20
_VLLM_BYTES = {
    "9.0": {2: 64 * _MIB, 4: 2 * _MIB, 8: _MIB // 2},
    "10.0": {2: 64 * _MIB, 4: 32 * _MIB, 8: _MIB},
    "10.3": {2: 64 * _MIB, 4: 64 * _MIB, 8: 4 * _MIB},
}


def sglang_fuses(model: ModelDims, gpu: GPU) -> bool:
    """Whether SGLang does: DeepSeek-V3, GPT-OSS, GLM-4 and Qwen3 MoE on Hopper and Blackwell, H20
    aside (``server_args.py``); no dense models, linear attention, or norms over the heads of all
    GPUs (MiniMax)."""
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
        return _SGLANG_TOKENS if sglang_fuses(model, gpu) else 0
    capability = _capability(gpu)
    since = _VLLM_SINCE.get(capability, "")
    newer = not engine.version or version_numbers(engine.version) >= version_numbers(since)
    if engine.name != "vllm" or not since or not newer:
        return 0
    return _VLLM_BYTES[capability].get(n_gpus, 0) // token_bytes


def _capability(gpu: GPU) -> str:
    return _CAPABILITY.get(gpu.name, _CAPABILITY.get(gpu.sibling, ""))
