"""Dense models: counts, bytes and times by hand, from public configurations."""

import json

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels import roofline
from eldr_sim.kernel_profiles.kernels.flops import decode_intensity, peak_flops, prefill_work
from eldr_sim.kernel_profiles.models import ModelDims, load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model

_COMMON = {"tie_word_embeddings": False, "num_key_value_heads": 8, "quantization_config": None}
LLAMA = _COMMON | {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128256,
    "intermediate_size": 14336, "num_attention_heads": 32, "max_position_embeddings": 131072,
}  # fmt: skip
QWEN2 = LLAMA | {
    "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "vocab_size": 152064,
    "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
    "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28,
}  # fmt: skip
MISTRAL = LLAMA | {"model_type": "mistral", "vocab_size": 32000, "sliding_window": 4096}
QWEN3 = LLAMA | {
    "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "vocab_size": 151936,
    "intermediate_size": 3072, "num_attention_heads": 16, "head_dim": 128,
    "tie_word_embeddings": True,
}  # fmt: skip


def read(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return load_model(path)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA, 8_030_261_248),  # Llama-3.1-8B; each as its checkpoint's index counts
        (QWEN2, 7_615_616_512),  # Qwen2.5-7B
        (MISTRAL, 7_241_732_096),  # Mistral-7B-v0.1
        (QWEN3, 596_049_920),  # Qwen3-0.6B
    ],
    ids=["llama", "qwen2", "mistral", "qwen3"],
)
def test_a_config_json_of_each_family_has_its_checkpoint_s_parameters(tmp_path, config, parameters):
    model = read(tmp_path, config)
    assert model.is_dense
    assert model.total_params == model.active_params == parameters
    assert model.weight_bytes == 2 * parameters
    assert (model.n_moe_layers, model.bytes_per_expert) == (0, 0)


def test_windows_and_biases_follow_the_families_rules(tmp_path):
    mistral = read(tmp_path, MISTRAL)
    assert (mistral.n_sliding_layers, mistral.sliding_window) == (32, 4096)
    assert mistral.kv_bytes(10_000) == 4096 * 32 * 2 * 2 * 8 * 128
    assert read(tmp_path, MISTRAL | {"sliding_window": None}).n_sliding_layers == 0
    assert read(tmp_path, QWEN2).n_sliding_layers == 0
    slides = QWEN2 | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 21}
    assert read(tmp_path, slides).n_sliding_layers == 7
    assert read(tmp_path, QWEN2).attention_bias == "qkv"
    assert read(tmp_path, LLAMA | {"attention_bias": True}).attention_bias == "all"


@pytest.mark.parametrize(
    ("quantization", "dtype", "bytes_per_weight"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block", 1 + 4 / 128**2),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", 1),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", 0.5 + 1 / 16),
        (
            {"quant_method": "compressed-tensors",
             "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}}},
            "fp8",
            1,
        ),
    ],
)  # fmt: skip
def test_quantised_checkpoints_keep_embedding_and_head(
    tmp_path, quantization, dtype, bytes_per_weight
):
    model = read(tmp_path, LLAMA | {"quantization_config": quantization})
    assert model.linear_dtype == dtype
    linear = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    rest = 2 * (model.total_params - linear)
    assert model.weight_bytes == pytest.approx(rest + bytes_per_weight * linear, rel=1e-9)


def test_what_modelopt_says_beside_the_configuration(tmp_path):
    """Its checkpoints hold ``hf_quant_config.json``; weights were taken for 16 bits before."""
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    assert read(tmp_path, LLAMA).linear_dtype == "nvfp4"
    moe = {"model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 6}
    model = read(tmp_path, QWEN3 | moe | {"moe_intermediate_size": 1408})
    assert (model.expert_dtype, model.linear_dtype) == ("nvfp4", "nvfp4")
    said["quantization"] |= {"exclude_modules": ["model.layers.*.self_attn*", "lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    model = read(tmp_path, QWEN3 | moe | {"moe_intermediate_size": 1408})
    assert (model.expert_dtype, model.linear_dtype) == ("nvfp4", "bfloat16")
    (tmp_path / "hf_quant_config.json").write_text("[]")
    with pytest.raises(InputError, match="hf_quant_config"):
        read(tmp_path, LLAMA)
    stated = LLAMA | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    assert read(tmp_path, stated).linear_dtype == "fp8"  # the configuration's own goes first


def test_a_model_is_dense_or_has_whole_experts():
    fields = load_model("Llama-3.1-8B").model_dump()
    for change in ({"n_experts": 8}, {"top_k": 2}, {"n_dense_layers": 31}, {"n_dense_layers": 33}):
        with pytest.raises(ValueError, match=r"n_dense_layers|top_k"):
            ModelDims(**fields | change)


def test_flops_and_bytes_of_a_step_by_hand():
    model, batch, context = load_model("Llama-3.1-8B"), 16, 2000
    matrices = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    head, norms = 128256 * 4096, (2 * 32 + 1) * 4096
    pairs = 2 * 2 * 32 * 32 * 128  # scores and values, of all heads and layers
    flops = batch * (2 * (matrices + norms + head) + pairs * context)
    read = 2 * (matrices + norms + head) + batch * context * 2 * 2 * 32 * 8 * 128
    assert decode_intensity(model, batch, context) == pytest.approx(flops / read)
    work = prefill_work(model)
    assert work.token_flops == 2 * (matrices + norms)
    assert work.flops(100) == 100 * work.token_flops + pairs * 100 * 101 / 2
    h100 = load_gpu("H100")
    assert peak_flops(model, h100) == h100.bf16_flops
    eight = model.model_copy(update={"linear_dtype": "fp8"})
    assert peak_flops(eight, h100) == h100.fp8_flops


def test_a_step_without_tables_is_its_rooflines_by_hand():
    """MI300X has no GEMM or attention rows: every part is bytes or FLOPs, and fixed times."""
    model, gpu, batch, context = load_model("Llama-3.1-8B"), load_gpu("MI300X"), 8, 1000
    steps = build_step_time_model(model, gpu, max_num_seqs=64, max_model_len=8192)
    parts, how = steps.parts(batch, batch * context, activated=[]), roofline.efficiency_of(gpu)
    bandwidth = how.bandwidth * gpu.memory_bandwidth

    def gemm(n, k):
        moved = 2 * n * k + 2 * batch * (n + k)
        return how.gemm_floor_s + max(
            moved / bandwidth, 2 * batch * n * k / (how.gemm_flops * gpu.bf16_flops)
        )

    layer = gemm(6144, 4096) + gemm(4096, 4096) + gemm(2 * 14336, 4096) + gemm(4096, 14336)
    small = max(5 * how.small_kernel_s, 4 * batch * (4 * 4096 + 48 * 128) / bandwidth)
    assert parts.dense == pytest.approx(32 * (layer + small) + 4 * 4096 * batch / bandwidth)
    assert parts.head == pytest.approx(gemm(128256, 4096))
    read = batch * context * 2 * 2 * 8 * 128 / bandwidth
    assert parts.attention == pytest.approx(32 * (how.attention_floor_s + read))
    assert parts.moe == parts.collectives == 0.0
    assert steps.label == "derived"
    assert "moe" not in steps.provenance


def test_no_padding_of_graphs_and_no_kind_of_step_makes_experts():
    model = load_model("Qwen3-8B")
    for padding in ("none", "dense", "experts"):
        steps = build_step_time_model(
            model, "H100", max_num_seqs=8, max_model_len=1024, cudagraph_padding=padding
        )
        for made in (
            steps.parts(3, 900, activated=[]),
            steps.parts(chunks=[(0, 100)]),
            steps.parts(3, 900, chunks=[(0, 100)]),
        ):
            assert made.moe == 0.0
            assert np.isfinite(made).all()
    assert not steps.cost.moe_s.any()
    with pytest.raises(InputError, match="slots"):
        steps.rank_moe(1, 8)


def test_tensor_parallelism_divides_weights_and_work():
    model, whole = load_model("Llama-3.1-70B"), load_model("Llama-3.1-70B").weight_bytes
    norms = 2 * (2 * 80 + 1) * 8192
    for size in (2, 4, 8):
        layout = Parallelism(size)
        # Norms are on each GPU; the vocabulary divides.
        assert size * layout.weight_bytes(model) == whole + (size - 1) * norms
        assert size * layout.kv_bytes_per_token(model) == model.kv_bytes_per_token
    # Compute-bound GEMMs, fixed times aside: a half each.
    sizes = {"max_num_seqs": 8, "max_model_len": 4096, "max_num_batched_tokens": 16384}
    one, two = (
        build_step_time_model(model, "MI300X", parallelism=Parallelism(n), **sizes) for n in (1, 2)
    )

    def per_token(steps):
        return (steps.cost.dense_s[16384] - steps.cost.dense_s[8192]) / 8192

    moved = 80 * 4 * 4 * 8192 / (0.71 * 5.3e12)  # of norms, which every GPU computes whole
    assert per_token(one) - moved == pytest.approx(2 * (per_token(two) - moved), rel=0.03)


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (Parallelism(2, expert_parallel=True), "enable_expert_parallel"),
        (Parallelism(1, expert_parallel=True, data_parallel_size=2), "enable_expert_parallel"),
        (Parallelism(1, data_parallel_size=2), "data_parallel_size"),
        (Parallelism(3), "tensor_parallel_size"),
    ],
)
def test_layouts_that_a_dense_model_has_not_are_refused(layout, field):
    with pytest.raises(InputError, match=field):
        layout.check(load_model("Qwen3-14B"))
