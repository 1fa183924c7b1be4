"""KV capacity against vLLM's own `get_kv_cache_configs`, for every model of the catalogue: with the
hybrid KV cache manager and without. Models with states and of compressed attention have no row
without it, because vLLM refuses that, or fails.

``vllm_kv_blocks.csv`` holds what vLLM 0.32.0 returned on 29 November and 1 December 2026;
``VLLM_PYTHON`` lets it do so again."""

import csv
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import list_models, load_model
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.memory import (
    NO_WINDOWS,
    WindowBlocks,
    block_bytes,
    compressed_blocks,
    least_block_size,
    state_blocks,
    window_blocks,
)
from eldr_sim.simulator.setup.prepare import prepare

from ..on_each import on_each

_HERE = Path(__file__).parent
_FREE, _SIZE, _LONGEST = 20 * 2**30, 16, 8192
_NAMES = ("block_size", "blocks", "groups", "tokens", "blocks_of_request")


def compared():
    return [load_model(name) for name in list_models()]


def layers_of(model):
    """Return the layers of a model as the script takes them, those of attention in turn."""
    if model.compressed_layers:
        width, window = model.head_dim, model.local_window
        ratios = [(1, model.n_sliding_layers), *model.compressed_layers]
        return [("compressed", ratio, width, model.index_head_dim, 1, window)
                for ratio, layers in ratios for _ in range(layers)]  # fmt: skip
    n, n_bytes = model.n_layers - model.n_linear_layers, 1 if model.kv_cache_dtype == "fp8" else 2
    layers = []
    for i in range(n):
        sliding = i * model.n_sliding_layers // n != (i + 1) * model.n_sliding_layers // n
        _, heads, keys = model.heads(sliding)
        values = model.value_width(sliding)
        if model.attention == "mla":
            heads, keys, values = 0, model.kv_lora_rank + model.qk_rope_head_dim, 0
        kind = "sliding" if sliding else "full"
        layers.append((kind, heads, keys, values, n_bytes, model.sliding_window))
    index = round(model.index_bytes_per_token * model.n_full_layers / max(model.n_indexers, 1))
    layers += [("index", 0, index, 0, 1, 0)] * (model.n_indexers if index else 0)
    return layers + [("state", 1, model.layer_state_bytes, 0, 1, 0)] * model.n_linear_layers


def our_tokens(model, hybrid):
    """Return the tokens of the blocks of full attention."""
    size = least_block_size(model, _SIZE)
    windows = window_blocks(model, size) if hybrid else NO_WINDOWS
    if model.compressed_layers:
        windows = compressed_blocks(model)
    return _FREE // block_bytes(model, size, windows=windows) * size


def recorded():
    with (_HERE / "vllm_kv_blocks.csv").open() as lines:
        return {row["model"]: row for row in csv.DictReader(lines)}


@on_each("model", compared())
def test_our_capacity_equals_vllms(model):
    row = recorded()[model.name]
    assert our_tokens(model, hybrid=True) == int(row["hybrid_tokens"])
    if not row["whole_tokens"]:
        size = least_block_size(model, _SIZE)
        assert size == int(row["hybrid_block_size"])
        of_request = -(-_LONGEST // size)
        of_request += state_blocks(model, size) if model.n_linear_layers else 0
        for small in compressed_blocks(model).small if model.compressed_layers else ():
            cap = WindowBlocks(window=small.window).cap(small.block_size, _LONGEST, _LONGEST)
            of_request += small.groups * cap
        assert of_request == int(row["hybrid_blocks_of_request"])
    else:
        assert our_tokens(model, hybrid=False) == int(row["whole_tokens"])


@pytest.mark.long
@pytest.mark.parametrize("model", ["DeepSeek-V4-Pro", "DeepSeek-V4-Flash"])
def test_a_request_takes_blocks_of_windows_and_compressors(model, drawn_routing):
    """At most, of a decoding request: 3 in each of two groups of windows, 3 and 17."""
    spec = prepare(make_config({"model": model, "gpu": "B300", "tensor_parallel_size": 8})).spec
    assert spec.block_size == 256
    assert spec.windows.of(np.array([1, 100, 10_000]), 256).tolist() == [4, 20, 26]


@pytest.mark.parametrize("model", ["Qwen3.6-27B-NVFP4", "DeepSeek-V4-Flash"])
def test_states_need_the_hybrid_manager(model):
    config = make_config({
        "model": model, "gpu": "B200", "topology": "1C", "disable_hybrid_kv_cache_manager": True,
    })  # fmt: skip
    with pytest.raises(InputError, match="keeps states beside its contexts"):
        prepare(config)


@pytest.mark.live
@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no Python with vLLM")
def test_vllm_does_what_was_recorded():
    models = {model.name: layers_of(model) for model in compared()}
    given = json.dumps({"free": _FREE, "block_size": _SIZE, "longest": _LONGEST, "models": models})
    command = [os.environ["VLLM_PYTHON"], str(_HERE / "vllm_kv_blocks.py")]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)["models"]
    header = ["model", *(f"{of}_{name}" for of in ("hybrid", "whole") for name in _NAMES)]
    rows = [header] + [[name, *map(str, on), *map(str, off)] for name, (on, off) in found.items()]
    text = "".join(",".join(row) + "\n" for row in rows)
    if "VLLM_RECORD" in os.environ:
        (_HERE / "vllm_kv_blocks.csv").write_text(text)
    assert text == (_HERE / "vllm_kv_blocks.csv").read_text()
