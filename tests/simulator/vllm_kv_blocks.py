"""KV blocks by vLLM's own `get_kv_cache_configs`, without a model or a GPU.

Run by a Python that has vLLM 0.32. Standard input holds JSON: ``free`` bytes, ``block_size`` and
``models``, each with its layers as (sliding, KV heads, width of keys, width of values, bytes of a
value, window; no KV heads: MLA). For each model, the blocks, the groups of layers and the tokens
that the blocks of full attention hold are written, with the hybrid KV cache manager and without."""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import vllm
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

try:
    from .vllm_scheduler import _MODEL
except ImportError:
    from vllm_scheduler import _MODEL

_LONGEST = 8192


def config_of(folder, size, off):
    model = ModelConfig(
        model=folder, skip_tokenizer_init=True, max_model_len=_LONGEST, dtype="bfloat16"
    )
    scheduling = SchedulerConfig(
        max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=_LONGEST,
        is_encoder_decoder=False,
    )  # fmt: skip
    made = VllmConfig(
        model_config=model, scheduler_config=scheduling, parallel_config=ParallelConfig(),
        cache_config=CacheConfig(block_size=size), device_config=DeviceConfig("cpu"),
    )  # fmt: skip
    made.scheduler_config.disable_hybrid_kv_cache_manager = off  # a CPU has none
    made.cache_config.kv_cache_layout = "LBNHC"  # the engine core sets it; blocks are the same
    return made


def spec_of(layer, size):
    sliding, heads, keys, values, n_bytes, window = layer
    about = {"block_size": size, "head_size": keys}
    about["dtype"] = torch.float8_e4m3fn if n_bytes == 1 else torch.bfloat16
    if not heads:
        return MLAAttentionSpec(**about, num_kv_heads=1)
    about |= {"num_kv_heads": heads, "head_size_v": values}
    return (
        SlidingWindowSpec(**about, sliding_window=window) if sliding else FullAttentionSpec(**about)
    )


def blocks_of(config, layers, given):
    specs = {f"model.layers.{i}.attn": spec_of(layer, given["block_size"])
             for i, layer in enumerate(layers)}  # fmt: skip
    found = get_kv_cache_configs(config, [specs], [given["free"]])[0]
    full = [g.kv_cache_spec.block_size for g in found.kv_cache_groups
            if not isinstance(g.kv_cache_spec, SlidingWindowSpec)]  # fmt: skip
    return [found.num_blocks, len(found.kv_cache_groups), found.num_blocks * full[0]]


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr  # vLLM prints
    given = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        about = _MODEL | {"max_position_embeddings": _LONGEST}
        (Path(folder) / "config.json").write_text(json.dumps(about))
        configs = [config_of(folder, given["block_size"], off) for off in (False, True)]
        found = {name: [blocks_of(config, layers, given) for config in configs]
                 for name, layers in given["models"].items()}  # fmt: skip
    json.dump({"version": vllm.__version__, "models": found}, out)
