"""KV blocks of models with sliding-window layers: what the windows reach, and no more."""

import numpy as np
import pytest

from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.memory import NO_WINDOWS, kv_blocks, window_blocks
from eldr_sim.simulator.setup.prepare import prepare

from ..on_each import on_each

SIZE = 16
SLIDING = ["GPT-OSS-20B", "GPT-OSS-120B", "Llama-4-Scout"]


@on_each("name", SLIDING)
@on_each("tokens", [1, 100, 129, 5000, 60000])
def test_blocks_hold_what_the_layers_keep(name, tokens):
    """Against the bytes of each layer: the full context, or the window, in whole blocks."""
    model = load_model(name)
    windows = window_blocks(model, SIZE)
    block = SIZE * model.n_full_layers * model.kv_bytes_per_token_layer(False)
    taken = (-(-tokens // SIZE) + int(windows.reached(np.array([tokens]), SIZE)[0])) * block
    least = model.kv_bytes(tokens)
    a_block_more = SIZE * model.n_full_layers * model.kv_bytes_per_token_layer(False)
    a_block_more += 2 * SIZE * model.n_sliding_layers * model.kv_bytes_per_token_layer(True)
    assert least <= taken <= least + a_block_more + block


def test_models_without_windows_are_as_they_were():
    model, gpu = load_model("Qwen3-30B-A3B"), load_gpu("H100")
    assert window_blocks(model, SIZE) == NO_WINDOWS
    assert kv_blocks(model, gpu, 0.9, SIZE) == kv_blocks(
        model, gpu, 0.9, SIZE, windows=window_blocks(model, SIZE)
    )


def test_mla_keeps_one_latent_and_fp8_half_of_it():
    """DeepSeek-V3: 512 + 64 values a token and layer, whatever the heads."""
    model = load_model("DeepSeek-V3")
    assert model.kv_bytes_per_token == 2 * 576 * model.n_layers
    half = model.model_copy(update={"kv_cache_dtype": "fp8"})
    assert half.kv_bytes_per_token == 576 * model.n_layers


@pytest.mark.parametrize(
    ("engine", "kept"), [("vllm", True), ("vllm==0.22.0", True), ("vllm==0.21.1", False)]
)
def test_workers_that_hand_kv_caches_over_keep_windows_since_vllm_022(engine, kept):
    """vLLM 0.21.0 turns the hybrid manager off under any connector, 0.22.0 leaves it on under NIXL
    (pull request 41847)."""
    fields = {"model": "GPT-OSS-120B", "gpu": "H100", "engine": engine}

    def blocks(**more):
        spec = prepare(make_config(fields | more)).spec
        return spec.decode.n_blocks, spec.windows

    whole = blocks(topology="1C", disable_hybrid_kv_cache_manager=True)
    apart = blocks(topology="1C")
    assert apart[0] == pytest.approx(2 * whole[0], abs=2)  # 18 of 36 layers slide
    assert blocks(topology="1P1D") == (apart if kept else whole)
    for given, found in ((True, whole), (False, apart)):
        assert blocks(topology="1P1D", disable_hybrid_kv_cache_manager=given) == found


@pytest.mark.parametrize("older", ["vllm==0.21", "sglang"])
def test_one_pool_that_keeps_whole_contexts_decides_for_all(older):
    fields = {"model": "GPT-OSS-120B", "gpu": "H100", "topology": "1P1D", "engine": "vllm==0.32"}

    def windows(**more):
        return prepare(make_config(fields | more)).spec.windows

    assert windows(decode={"engine": older}) == NO_WINDOWS != windows()


def test_more_requests_run_at_once_where_blocks_are_few():
    """Long contexts, and KV blocks for a few: about twice as many with windows kept short."""
    fields = {
        "model": "GPT-OSS-120B", "gpu": "H100", "topology": "1C", "num_requests": 40,
        "request_rate": "inf", "output_len": 1500, "enable_prefix_caching": False,
    }  # fmt: skip

    def batch(whole, blocks):
        config = {"disable_hybrid_kv_cache_manager": whole, "num_gpu_blocks_override": blocks}
        steps = simulate(make_config(fields | config)).record.decode_steps
        return steps["sequences"].mean()

    assert batch(False, 2000) > 1.3 * batch(True, 1000)
