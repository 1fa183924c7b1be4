"""KV blocks by vLLM's own `get_kv_cache_configs`, without a model or a GPU.

Run by a Python that has vLLM 0.32. Standard input holds JSON: ``free`` bytes, ``block_size``,
``longest`` and ``models``, each with its layers as (kind, KV heads, width of keys, width of values,
bytes of a value, window; no KV heads: MLA; a layer with a state: its bytes as width of keys; one of
compressed attention: its ratio as KV heads, the width of index keys as that of values). For each
model, the tokens of a block, the blocks, the groups of layers, the tokens that the blocks of full
attention hold, and the blocks that a request of ``longest`` tokens takes are written, with the
hybrid KV cache manager and without; nothing where vLLM fails."""

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

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
    set_current_vllm_config,
)
from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.v1.attention.backends.mla.indexer import DeepseekV4IndexerBackend
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend, DeepseekV4SWACache
from vllm.v1.attention.backends.utils import _DEFAULT_LAYOUT_PREFERENCE, resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity, get_kv_cache_configs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

try:
    from .vllm_scheduler import _MODEL
except ImportError:
    from vllm_scheduler import _MODEL

#: Tokens by which `Platform._align_hybrid_block_size` enlarges blocks, by whether they are MLA's.
_ALIGNMENT = {False: 16, True: 128}


def config_of(folder, size, longest, off):
    model = ModelConfig(
        model=folder, skip_tokenizer_init=True, max_model_len=longest, dtype="bfloat16"
    )
    scheduling = SchedulerConfig(
        max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=longest,
        is_encoder_decoder=False,
    )  # fmt: skip
    made = VllmConfig(
        model_config=model, scheduler_config=scheduling, parallel_config=ParallelConfig(),
        cache_config=CacheConfig(block_size=size), device_config=DeviceConfig("cpu"),
    )  # fmt: skip
    made.scheduler_config.disable_hybrid_kv_cache_manager = off  # a CPU has none
    return made


def spec_of(layer, size, padded=None):
    """Return vLLM's spec of a layer. ``padded``: bytes of a block, to which states are padded."""
    kind, heads, keys, values, n_bytes, window = layer
    if kind == "state":
        return MambaSpec(
            shapes=((keys,),), dtypes=(torch.uint8,), block_size=size, page_size_padded=padded
        )
    about = {"block_size": size, "head_size": keys}
    about["dtype"] = {1: torch.float8_e4m3fn, 2: torch.bfloat16}[n_bytes]
    if kind == "index":
        about["dtype"] = torch.uint8
    if not heads:
        return MLAAttentionSpec(**about, num_kv_heads=1)
    about |= {"num_kv_heads": heads, "head_size_v": values}
    if kind == "sliding":
        return SlidingWindowSpec(**about, sliding_window=window)
    return FullAttentionSpec(**about)


def compressed_specs(config, name, layer):
    """Return the specs of a layer of DeepSeek-V4, by vLLM's code of the model."""
    (_, ratio, width, index, _, window), cache, bytes_ = layer, config.cache_config, torch.uint8
    parts = [DeepseekV4SWACache(width, window, bytes_, f"{name}.swa_cache", cache)]
    states = [width] if ratio > 1 else []
    if ratio == 4:
        parts.append(DeepseekV4IndexerCache(index + 4, bytes_, f"{name}.indexer", cache, ratio))
        states.append(index)
    for dim in states:  # a value and a score; of two blocks where those of ratio 4 overlap
        dim *= 4 if ratio == 4 else 2
        parts.append(CompressorStateCache(dim, torch.float32, ratio, f"{name}.{dim}.state_cache"))
    layer = SimpleNamespace(compress_ratio=ratio, kv_cache_dtype=cache.cache_dtype, head_dim=width)
    specs = {name: DeepseekV4Attention.get_kv_cache_spec(layer, config)}
    specs |= {part.prefix: part.get_kv_cache_spec(config) for part in parts}
    return {name: spec for name, spec in specs.items() if spec is not None}


def block_of(layers, size):
    """Return the tokens and bytes of a block as large as a state, if there are any
    (`Platform._align_hybrid_block_size`)."""
    states = [spec_of(layer, 1).page_size_bytes for layer in layers if layer[0] == "state"]
    if not states:
        return size, None
    attention = next(layer for layer in layers if layer[0] == "full")
    token, by = spec_of(attention, 1).page_size_bytes, _ALIGNMENT[not attention[1]]
    size = max(size, by * -(-max(states) // (by * token)))
    return size, size * token


def blocks_of(config, layers, given):
    names = {f"model.layers.{i}.attn": layer for i, layer in enumerate(layers)}
    off = config.scheduler_config.disable_hybrid_kv_cache_manager
    config.cache_config.cache_dtype = "auto"
    if layers[0][0] == "compressed":
        if off:
            return [""] * 5  # vLLM fails: windows of MLA do not become whole contexts
        config.cache_config.cache_dtype = "fp8_ds_mla"  # what the model makes of "auto"
        config.cache_config.block_size = DeepseekSparseSWABackend.get_preferred_block_size(16)
        layouts = [layout.name for layout in DeepseekV4IndexerBackend.supported_kv_cache_layouts()]
        config.compilation_config.static_forward_context.clear()
        with set_current_vllm_config(config):
            parts = [compressed_specs(config, name, layer) for name, layer in names.items()]
        specs = {name: spec for part in parts for name, spec in part.items()}
    else:
        size, padded = block_of(layers, given["block_size"])
        specs = {name: spec_of(layer, size, padded) for name, layer in names.items()}
        if off and padded:
            return [""] * 5  # vLLM refuses it: states cannot be kept as contexts
        layouts = [layout.name for layout in _DEFAULT_LAYOUT_PREFERENCE]
        if padded and any(layer[0] == "index" for layer in layers):
            layouts.remove("LBNHC")  # states and index keys fit one pool in other layouts alone
            layouts.remove("LBHNC")
    config.cache_config.kv_cache_layout = None
    resolve_kv_cache_layout(config, [layouts], specs.values())
    found = get_kv_cache_configs(config, [specs], [given["free"]])[0]
    full = [g.kv_cache_spec.block_size for g in found.kv_cache_groups
            if not isinstance(g.kv_cache_spec, SlidingWindowSpec | MambaSpec)]  # fmt: skip
    of_request = round(found.num_blocks / get_kv_cache_capacity(config, found)[1])
    return [
        max(full), found.num_blocks, len(found.kv_cache_groups), found.num_blocks * max(full),
        of_request,
    ]  # fmt: skip


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr  # vLLM prints
    given = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        about = _MODEL | {"max_position_embeddings": given["longest"]}
        (Path(folder) / "config.json").write_text(json.dumps(about))
        configs = [
            config_of(folder, given["block_size"], given["longest"], off) for off in (False, True)
        ]
        found = {name: [blocks_of(config, layers, given) for config in configs]
                 for name, layers in given["models"].items()}  # fmt: skip
    json.dump({"version": vllm.__version__, "models": found}, out)
