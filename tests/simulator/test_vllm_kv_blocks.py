"""KV capacity against vLLM's own `get_kv_cache_configs`, for every model of the catalogue whose
layers keep keys and values alone: with the hybrid KV cache manager and without.

``vllm_kv_blocks.csv`` holds what vLLM 0.32.0 returned on 29 November 2026; ``VLLM_PYTHON`` lets it
do so again."""

import csv
import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from eldr_sim.kernel_profiles.models import list_models, load_model
from eldr_sim.simulator.setup.memory import NO_WINDOWS, window_blocks

from ..on_each import on_each

_HERE = Path(__file__).parent
_FREE, _SIZE = 20 * 2**30, 16


def compared():
    """Return the models without states, compressed contexts and index keys."""
    models = map(load_model, list_models())
    return [m for m in models if not (m.n_linear_layers or m.compressed_layers or m.index_topk)]


def layers_of(model):
    """Return the layers of a model as the script takes them, both kinds in turn."""
    n, n_bytes, layers = model.n_layers, 1 if model.kv_cache_dtype == "fp8" else 2, []
    for i in range(n):
        sliding = i * model.n_sliding_layers // n != (i + 1) * model.n_sliding_layers // n
        _, heads, keys = model.heads(sliding)
        values = model.value_width(sliding)
        if model.attention == "mla":
            heads, keys, values = 0, model.kv_lora_rank + model.qk_rope_head_dim, 0
        layers.append((sliding, heads, keys, values, n_bytes, model.sliding_window))
    return layers


def our_tokens(model, hybrid):
    """Return the tokens of the blocks of full attention."""
    windows = window_blocks(model, _SIZE) if hybrid else NO_WINDOWS
    token = model.kv_bytes_per_token
    if windows.most:
        token = math.ceil(token / (1.0 + windows.share))
    return _FREE // (_SIZE * token) * _SIZE


def recorded():
    with (_HERE / "vllm_kv_blocks.csv").open() as lines:
        return {row["model"]: row for row in csv.DictReader(lines)}


@on_each("model", compared())
def test_our_capacity_equals_vllms(model):
    row = recorded()[model.name]
    assert our_tokens(model, hybrid=True) == int(row["hybrid_tokens"])
    assert our_tokens(model, hybrid=False) == int(row["whole_tokens"])


@pytest.mark.live
@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no Python with vLLM")
def test_vllm_does_what_was_recorded():
    models = {model.name: layers_of(model) for model in compared()}
    given = json.dumps({"free": _FREE, "block_size": _SIZE, "models": models})
    command = [os.environ["VLLM_PYTHON"], str(_HERE / "vllm_kv_blocks.py")]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)["models"]
    names = ("blocks", "groups", "tokens")
    header = ["model", *(f"hybrid_{name}" for name in names), *(f"whole_{name}" for name in names)]
    rows = [header] + [[name, *map(str, on), *map(str, off)] for name, (on, off) in found.items()]
    text = "".join(",".join(row) + "\n" for row in rows)
    if "VLLM_RECORD" in os.environ:
        (_HERE / "vllm_kv_blocks.csv").write_text(text)
    assert text == (_HERE / "vllm_kv_blocks.csv").read_text()
