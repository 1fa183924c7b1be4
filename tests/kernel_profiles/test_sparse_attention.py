"""Models with sparse attention (DeepSeek-V3.2, GLM-5): counts, caches and times of the indexer."""

import json

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels import roofline
from eldr_sim.kernel_profiles.kernels.flops import prefill_flops
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.sources.aiconfigurator import attention_tables
from eldr_sim.kernel_profiles.steps.parts import Parts
from eldr_sim.kernel_profiles.tables.library import Engine, shipped_tables

from ..on_each import on_each

#: A small GLM-5.
CONFIG = {
    "model_type": "glm_moe_dsa", "num_hidden_layers": 3, "first_k_dense_replace": 1,
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "vocab_size": 1000,
    "n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "n_shared_experts": 1, "max_position_embeddings": 8192, "q_lora_rank": 96, "kv_lora_rank": 64,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "index_n_heads": 4,
    "index_head_dim": 24, "index_topk": 100,
}  # fmt: skip


def model_of(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG | changes))
    return load_model(path)


DENSE = {"index_topk": 0, "index_n_heads": 0, "index_head_dim": 0}


def test_the_indexer_adds_three_matrices_and_a_norm_and_is_whole_on_every_gpu(tmp_path):
    model, dense = model_of(tmp_path), model_of(tmp_path, **DENSE)
    index = 96 * 4 * 24 + 512 * 24 + 512 * 4 + 2 * 24
    assert model.attention_params - dense.attention_params == 3 * index
    shard = Parallelism(4).shard(model)
    assert shard.index_heads == 4
    assert shard.index_linears == [(4 * 24, 96), (24, 512), (4, 512)]


def test_a_token_keeps_its_index_key_too(tmp_path):
    """An FP8 value a feature and one scale, whatever the type of the latent."""
    model = model_of(tmp_path)
    assert model.kv_bytes_per_token == 3 * (2 * (64 + 16) + 24 + 4)
    fp8 = model.model_copy(update={"kv_cache_dtype": "fp8"})
    assert fp8.kv_bytes_per_token == 3 * (64 + 16 + 24 + 4)


def test_flops_of_a_far_token_grow_by_the_index_alone(tmp_path):
    model = model_of(tmp_path)
    far, farther = (prefill_flops(model, 1, cached) for cached in (1000, 3000))
    assert farther - far == 3 * 2000 * 2 * 4 * 24
    near, nearer = (prefill_flops(model, 1, cached) for cached in (50, 60))
    pair = 2 * 8 * (32 + 16 + 32)
    assert nearer - near == 3 * 10 * (pair + 2 * 4 * 24)


def test_decode_reads_all_index_keys_and_no_more_latents_than_are_attended_to(tmp_path):
    model, gpu = model_of(tmp_path), load_gpu("H100")
    dense = model_of(tmp_path, **DENSE)
    sparse, whole = (roofline.decode_attention(gpu, m, False) for m in (model, dense))
    one = np.array([1.0])
    context = np.array([50.0, 100.0, 4000.0, 8000.0])
    (times,), (of_all,) = sparse.time_s(one, context), whole.time_s(one, context)
    floor = roofline.efficiency_of(gpu).attention_floor_s
    index_s = (times[3] - times[2]) / 4000
    bandwidth = roofline.efficiency_of(gpu).bandwidth * gpu.memory_bandwidth
    assert index_s == pytest.approx(28 / bandwidth)
    assert times[0] == pytest.approx(of_all[0] + 50 * index_s)
    assert times[3] == pytest.approx(of_all[1] + 8000 * index_s)
    assert of_all[1] > floor


@pytest.mark.parametrize("changes", [{"index_n_heads": 0}, {"index_head_dim": 0}])
def test_what_cannot_be(tmp_path, changes):
    with pytest.raises(InputError, match="index_topk, heads and width"):
        model_of(tmp_path, **changes)


def test_rows_that_the_package_measured():
    """An eighth of GLM-5 on H200 under SGLang: dense attention up to 2,048 tokens, then sparse."""
    pytest.importorskip("aiconfigurator_core")
    from eldr_sim.validation.published.silicon_rows import MEASURED_MODELS

    model = Parallelism(8).shard(MEASURED_MODELS["glm-5-sglang"].dims())
    decode, prefill = attention_tables("H200", model, "sglang")
    assert decode.metadata.shape["index_heads"] == 32
    assert "dense" in prefill.metadata.kernel_source
    assert "sparse" in prefill.metadata.kernel_source
    assert prefill.columns["new_tokens"].max() > 2048


def test_compressed_layers_keep_an_entry_for_several_tokens():
    """DeepSeek-V4-Pro: 30 layers an entry and an index key for 4 tokens, 31 an entry for 128."""
    model = load_model("DeepSeek-V4-Pro")
    bytes_of_all = 30 * (584 + 132) / 4 + 31 * 584 / 128
    assert model.kv_bytes_per_token == round(bytes_of_all)
    assert model.total_params == pytest.approx(1.6e12, rel=0.02)
    assert model.active_params == pytest.approx(49e9, rel=0.05)


def test_compressed_layers_are_those_of_the_model():
    model = load_model("DeepSeek-V4-Pro").model_dump() | {"compressed_layers": ((4, 30),)}
    with pytest.raises(ValueError, match="compressed_layers 30 of 61"):
        type(load_model("DeepSeek-V4-Pro"))(**model)


def test_rows_of_compressed_attention_are_the_mean_of_both_kinds_of_layers():
    """Of one B200 that decodes 8 sequences: rows of 65,536 tokens, with the hyper-connections."""
    pytest.importorskip("aiconfigurator_core")
    model = load_model("DeepSeek-V4-Pro").model_copy(update={"kv_cache_dtype": "fp8"})
    decode, prefill = attention_tables("B200", model)
    row = (decode.columns["batch"] == 8) & (decode.columns["context"] == 65537)
    mean = (30 * 0.1415 + 31 * 0.109) / 61 + 0.0229 + 0.0106
    assert decode.columns["latency_s"][row] == pytest.approx([mean / 1e3], rel=0.01)
    assert prefill.metadata.shape["compression"] == 4


@on_each("gpu", ["H100", "H200", "B200", "B300", "GB200", "GB300"])
@on_each("engine", ["vllm", "sglang", "trtllm"])
def test_block_sparse_attention_is_priced_by_its_own_modules(gpu, engine):
    """MiniMax-M3's 57 sparse layers by rows of MSA, not of GLM-5's modules of the same width."""
    for size in (4, 8, 16):
        if engine == "sglang" and size == 16:
            continue  # no rows of 4 heads
        parts = Parts(
            load_model("MiniMax-M3"), load_gpu(gpu), Parallelism(size), (), 4096,
            engine=Engine(engine),
        )  # fmt: skip
        (layers, decode, _), *_ = parts.attention
        assert layers == 57
        about = [
            one.metadata
            for one in shipped_tables()
            if one.gpu == gpu and '"index_topk": 2048' in one.shape
        ]
        assert all("/msa/" in one.origin for one in about)
        assert not any(one.framework.startswith("trtllm") for one in about)
        # Of a batch that reads 2,048 of 16,384 tokens time grows with the index keys alone.
        few, many = (
            decode.time_s(np.array([64.0]), np.array([n]))[0, 0] for n in (2048.0, 16384.0)
        )
        assert few < many < 8 * few
