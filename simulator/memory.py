"""How many KV blocks a worker has."""

from __future__ import annotations

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import GPU
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.parallel import SINGLE_GPU, Parallelism


def kv_blocks(
    model: ModelDims,
    gpu: GPU,
    utilization: float,
    block_size: int,
    parallelism: Parallelism = SINGLE_GPU,
    instances: int | None = None,
) -> int:
    """Return the KV blocks of ``block_size`` tokens that fit beside the weights of a worker.

    Every GPU of the worker holds its heads' part of every block, so one GPU decides. ``instances``
    are the expert instances of all MoE layers on it, an equal share of the experts when not given.

    As vLLM sizes its cache at start-up (``vllm/v1/worker/gpu_worker.py``,
    ``determine_available_memory``). Layers with a sliding window are charged for their whole
    context.

    Raises
    ------
    InputError
        If the weights leave no room for a single block.
    """
    free = gpu.kv_cache_bytes(parallelism.weight_bytes(model, instances), utilization)
    token_bytes = parallelism.kv_bytes_per_token(model)
    blocks = free // (block_size * token_bytes)
    if blocks < 1:
        raise InputError(
            "block_size",
            f"a block of {block_size} tokens takes {block_size * token_bytes} bytes, "
            f"{model.name} leaves {free} on {gpu.name}",
            "a smaller block",
        )
    return blocks
