"""A config.json is read whole or refused: every key that shapes a model counts, or is named."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.hf_config.fields import read_config
from eldr_sim.kernel_profiles.hf_config.keys import NEUTRAL
from eldr_sim.kernel_profiles.kernels.flops import prefill_flops
from eldr_sim.kernel_profiles.kernels.small_kernels import residual_bytes
from eldr_sim.kernel_profiles.models import ModelDims, load_model
from eldr_sim.kernel_profiles.parallel import Parallelism

from ..on_each import on_each
from ..paths import SHARED

COMMON = {"hidden_size": 512, "vocab_size": 1000, "max_position_embeddings": 8192,
          "num_attention_heads": 8, "torch_dtype": "bfloat16",
          "tie_word_embeddings": False}  # fmt: skip
GQA = COMMON | {"num_key_value_heads": 4, "head_dim": 64}
MLA = COMMON | {"num_key_value_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 64,
                "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}  # fmt: skip
DEEPSEEK = MLA | {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
                  "n_shared_experts": 1, "intermediate_size": 1024}  # fmt: skip
INDEXER = {"index_n_heads": 4, "index_head_dim": 24, "index_topk": 100}
QWEN = GQA | {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
GDN = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32,
       "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
       "mamba_ssm_dtype": "float32"}  # fmt: skip
KDA = {"num_heads": 8, "head_dim": 32, "short_conv_kernel_size": 4, "full_attn_layers": [2, 4]}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}

#: A small model of every kind of architecture, by the keys that its publishers write.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN | {
        "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3],
        "intermediate_size": 1024, "shared_expert_intermediate_size": 64,
        "quantization_config": BLOCKS},
    "qwen3_5_moe_text": QWEN | GDN | {
        "num_hidden_layers": 4, "full_attention_interval": 2, "attn_output_gate": True,
        "shared_expert_intermediate_size": 64},
    "glm_moe_dsa": DEEPSEEK | INDEXER | {
        "num_hidden_layers": 4, "first_k_dense_replace": 1,
        "indexer_types": ["full", "shared", "full", "shared"]},
    "glm5_next_text": DEEPSEEK | INDEXER | {
        "num_hidden_layers": 4, "index_kpool": 4, "hc_mult": 4,
        "layer_types": ["linear_attention", "deepseek_sparse_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "linear_attn_config": KDA | {"kda_layers": [0, 2]}},
    "kimi_linear": MLA | {
        "num_hidden_layers": 4, "num_experts": 16, "num_experts_per_token": 2,
        "moe_intermediate_size": 128, "num_shared_experts": 1, "intermediate_size": 1024,
        "first_k_dense_replace": 1, "routed_expert_hidden_size": 256,
        "latent_moe_use_norm": True, "mla_use_output_gate": True, "attn_res_block_size": 2,
        "linear_attn_config": KDA | {"kda_layers": [1, 3], "use_full_rank_gate": True}},
    "nemotron_h": GQA | {
        "hybrid_override_pattern": "MEM*EM-", "mamba_num_heads": 16, "mamba_head_dim": 32,
        "ssm_state_size": 64, "n_groups": 4, "conv_kernel": 4, "use_conv_bias": True,
        "mamba_ssm_cache_dtype": "float32", "n_routed_experts": 16, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128, "moe_latent_size": 256, "intermediate_size": 1024,
        "moe_shared_expert_intermediate_size": 64, "mlp_hidden_act": "relu2"},
    "minimax_m3": GQA | {
        "num_hidden_layers": 4, "num_local_experts": 16, "num_experts_per_tok": 2,
        "intermediate_size": 128, "dense_intermediate_size": 1024, "moe_layer_freq": [0, 1, 1, 1],
        "shared_intermediate_size": 64, "use_qk_norm": True, "qk_norm_type": "per_head",
        "sparse_attention_config": {
            "use_sparse_attention": True, "sparse_index_dim": 32, "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 4, "sparse_block_size": 32,
            "sparse_attention_freq": [0, 1, 1, 1]}},
    "deepseek_v4": COMMON | INDEXER | {
        "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 64, "qk_rope_head_dim": 16,
        "q_lora_rank": 96, "o_lora_rank": 32, "o_groups": 4, "sliding_window": 128,
        "compress_ratios": [0, 4, 128, 4, 0], "n_routed_experts": 16, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 128, "hc_mult": 4,
        "expert_dtype": "fp4", "quantization_config": BLOCKS},
    "mimo_v2_flash": GQA | {
        "num_hidden_layers": 4, "v_head_dim": 32, "hybrid_layer_pattern": [0, 1, 1, 0],
        "sliding_window": 128, "swa_num_attention_heads": 16, "swa_num_key_value_heads": 8,
        "swa_head_dim": 64, "n_routed_experts": 16, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128, "intermediate_size": 1024, "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False},
    "step3p5": COMMON | {
        "num_hidden_layers": 4, "num_attention_groups": 4, "head_dim": 64, "sliding_window": 128,
        "layer_types": ["full_attention", "sliding_attention"] * 2, "moe_num_experts": 16,
        "moe_top_k": 2, "moe_intermediate_size": 128, "share_expert_dim": 64,
        "intermediate_size": 1024, "moe_layers_enum": "1,2,3",
        "attention_other_setting": {"attention_type": "sliding_attention",
                                    "num_attention_heads": 12, "num_attention_groups": 2}},
    "step3p7": COMMON | {
        "num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 64, "sliding_window": 128,
        "layer_types": ["full_attention", "sliding_attention"] * 2, "n_routed_experts": 16,
        "num_experts_per_tok": 2, "moe_intermediate_size": 128, "share_expert_dim": 64,
        "intermediate_size": 1024, "mlp_layer_types": ["dense", *["sparse"] * 3],
        "num_sliding_attention_heads": 12,
        "per_layer_config": {f"0{layer}": {"num_attention_heads": 12} for layer in (1, 3)}},
    "granitemoehybrid": GQA | {
        "num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "num_local_experts": 16,
        "num_experts_per_tok": 2, "intermediate_size": 128, "shared_intermediate_size": 64,
        "mamba_n_heads": 16, "mamba_d_head": 32, "mamba_d_state": 64, "mamba_n_groups": 1,
        "mamba_d_conv": 4},
    "gemma4_text": GQA | {
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 128, "global_head_dim": 128, "num_global_key_value_heads": 2,
        "attention_k_eq_v": True, "enable_moe_block": False, "intermediate_size": 1024},
    "ernie4_5_moe": GQA | {
        "num_hidden_layers": 3, "moe_num_experts": 16, "moe_k": 2, "moe_intermediate_size": 128,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 2,
        "intermediate_size": 1024},
    "hunyuan_v1_moe": GQA | {
        "num_hidden_layers": 2, "num_experts": 16, "moe_topk": [2, 2],
        "moe_intermediate_size": [128, 128], "num_shared_expert": [1, 1],
        "use_qk_norm": True},
    "qwen2": GQA | {
        "num_hidden_layers": 2, "intermediate_size": 1024, "use_sliding_window": True,
        "sliding_window": 128, "max_window_layers": 1,
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
    "llama": GQA | {
        "num_hidden_layers": 2, "intermediate_size": 1024, "attention_bias": True,
        "quantization_config": {
            "quant_algo": "FP8", "kv_cache_scheme": "FP8",
            "ignore": ["lm_head", "re:.*self_attn.*"]}},
}  # fmt: skip


@dataclass
class Write:
    """Writes a configuration into a folder, and reads it."""

    folder: Path

    def __call__(self, family: str, **changes: Any) -> Path:
        path = self.folder / "config.json"
        config = {"model_type": family} | CONFIGS[family] | changes
        path.write_text(json.dumps(config))
        return path


@pytest.fixture
def write(tmp_path):
    return Write(tmp_path)


def figures(model: ModelDims) -> tuple[Any, ...]:
    """All that bytes and times come from."""
    return (
        model.weight_bytes, model.total_params, model.active_params, model.kv_bytes(100),
        model.kv_bytes(5000), prefill_flops(model, 1000), prefill_flops(model, 10, 5000),
        residual_bytes(model), model.max_position_embeddings, model.matrices, model.n_layers,
        model.top_k, model.n_moe_layers, model.kv_cache_dtype, model.expert_dtype,
    )  # fmt: skip


def changed(value: Any) -> list[Any]:
    """Other values of the same type."""
    match value:
        case bool():
            return [not value]
        case int():
            return [2 * value, value + 1]
        case str():
            other = {"float32": "bfloat16", "relu2": "silu", "fp4": "int4", "FP8": "NVFP4"}
            return [other[value]] if value in other else [value[:-1] or "x"]
        case list():
            others = [value[1:] + value[:1], [*value[:-1], value[0]], value[:1] * len(value)]
            if isinstance(value[0], int):
                others += [[one - 1 for one in value], [2 * one for one in value], [1] * len(value)]
            return others
        case _:
            return []


@on_each("family", CONFIGS)
def test_every_key_that_is_read_changes_a_figure_or_is_refused(write, family):
    """One key at a time; of lists the order does not count, so that one of the changes must."""
    before = figures(load_model(write(family)))
    _, keys = read_config(write(family))
    names = {"_name_or_path", "model_type"}
    for key in set(keys.effective()) - names:
        outcomes = []
        for value in changed(CONFIGS[family][key]) if key in CONFIGS[family] else []:
            try:
                outcomes.append(figures(load_model(write(family, **{key: value}))) != before)
            except InputError:
                outcomes.append(True)
        assert not outcomes or any(outcomes), key


@on_each("family", CONFIGS)
def test_every_value_within_an_object_changes_a_figure_or_is_refused(write, family):
    before = figures(load_model(write(family)))
    _, keys = read_config(write(family))
    for name, inner in CONFIGS[family].items():
        if not isinstance(inner, dict):
            continue
        effective = set(keys.object(name).effective()) - {"full_attn_layers", "quant_method"}
        for key in effective:
            outcomes = []
            for value in changed(inner[key]):
                try:
                    model = load_model(write(family, **{name: inner | {key: value}}))
                    outcomes.append(figures(model) != before)
                except InputError:
                    outcomes.append(True)
            assert any(outcomes), (name, key)


WORDS = st.sampled_from(
    ("attn", "attention", "kv_cache", "kv", "head", "expert", "experts", "moe", "router", "index",
     "shared_expert", "indexer", "sparse", "sliding", "window", "chunk", "linear_attn", "conv",
     "ssm", "mamba", "delta", "lora", "latent", "compress", "quantization", "quant", "bits",
     "layer", "block", "hybrid", "hidden", "state", "cache", "topk")
)  # fmt: skip
VALUES = st.one_of(st.integers(1, 512), st.just(True), st.just("fp8"), st.just([1, 2]),
                   st.just({"a": 1}), st.floats(0.1, 9.0))  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(family=st.sampled_from(sorted(CONFIGS)), word=WORDS, value=VALUES,
       rest=st.sampled_from(["size", "ratio", "stride", "mode", "num", "map", "window", "zz"]),
       first=st.booleans())  # fmt: skip
def test_an_unknown_key_that_shapes_a_model_is_refused_by_name(
    write, family, word, value, rest, first
):
    key = f"{word}_{rest}" if first else f"{rest}_{word}"
    if key in NEUTRAL or key in {"window_size", "hidden_size"}:
        return
    config = CONFIGS[family]
    with pytest.raises(InputError, match=key):
        load_model(write(family, **{key: value}))
    if "quantization_config" in config:
        inner = config["quantization_config"] | {key: value}
        with pytest.raises(InputError, match=key):
            load_model(write(family, quantization_config=inner))


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_what_is_switched_off_shapes_nothing(write, value):
    assert load_model(write("qwen3_moe", sparse_attention_stride=value))


def test_keys_of_the_text_model_are_checked_where_it_is_nested(write, tmp_path):
    inner = {"model_type": "qwen3_moe"} | CONFIGS["qwen3_moe"]
    for wrapper in ({"text_config": inner}, {"thinker_config": {"text_config": inner}}):
        path = tmp_path / "nested.json"
        path.write_text(
            json.dumps({"model_type": "x", "vision_config": {"hidden_size": 3}} | wrapper)
        )
        assert figures(load_model(path)) == figures(load_model(write("qwen3_moe")))
    path.write_text(json.dumps({"text_config": inner | {"moe_lanes": 4}}))
    with pytest.raises(InputError, match="moe_lanes 4"):
        load_model(path)


def test_step_as_published_and_as_transformers_saves_it_is_one_model(write):
    setting = CONFIGS["step3p5"]["attention_other_setting"] | {"num_attention_groups": 4}
    published = figures(load_model(write("step3p5", attention_other_setting=setting)))
    assert published == figures(load_model(write("step3p7")))


@pytest.mark.parametrize(
    "layers", [{"00": 12}, {"01": 12}, {"01": 12, "03": 10}, {"01": 12, "x": 12}]
)
def test_heads_of_single_layers_are_those_of_the_sliding_ones_or_refused(write, layers):
    each = {name: {"num_attention_heads": heads} for name, heads in layers.items()}
    with pytest.raises(InputError, match="per_layer_config"):
        load_model(write("step3p7", per_layer_config=each))


def test_two_names_of_one_thing_must_agree(write):
    with pytest.raises(InputError, match="num_experts 16 but n_routed_experts 8"):
        load_model(write("qwen3_moe", n_routed_experts=8))


def test_layers_that_share_an_indexer_cache_no_index_keys(write):
    """GLM-5.2's shape: 21 indexers of 78 layers make 92,628 bytes a token, where 78 make 100,152;
    llm-d measured about 93 KB (guides/p2p-kv-cache-sharing, glm-5.2-h200.md)."""
    real = {"num_hidden_layers": 78, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
            "index_head_dim": 128}  # fmt: skip
    types = ["full"] * 3 + ["shared", "shared", "shared", "full"] * 18 + ["shared"] * 3
    shared = load_model(write("glm_moe_dsa", **real, indexer_types=types))
    every = load_model(write("glm_moe_dsa", **real, indexer_types=["full"] * 78))
    assert (shared.kv_bytes_per_token, every.kv_bytes_per_token) == (92_628, 100_152)
    assert every.attention_params - shared.attention_params == 57 * (
        96 * 4 * 128 + 512 * 128 + 512 * 4 + 2 * 128
    )


def test_states_of_every_kind_by_hand(write):
    """Bytes of a sequence and parameters of a layer: KDA and Mamba-2."""
    kda = load_model(write("kimi_linear"))
    assert kda.layer_state_bytes == 8 * 32 * 32 * 4 + 2 * 3 * 3 * 256
    linears = 512 * 4 * 256 + 512 * (8 + 32) + 256 * 32 + 256 * 512
    assert sum(n * k for n, k in kda.linear_attention_linears) == linears
    mamba = load_model(write("nemotron_h"))
    assert (mamba.n_layers, mamba.n_linear_layers, mamba.n_moe_layers) == (4, 3, 2)
    assert (mamba.n_dense_layers, mamba.n_bare_layers) == (1, 1)
    assert mamba.layer_state_bytes == 16 * 32 * 64 * 4 + 2 * 3 * (16 * 32 + 2 * 4 * 64)
    assert mamba.linear_attention_linears[0] == (2 * 16 * 32 + 2 * 4 * 64 + 16, 512)
    assert mamba.bytes_per_expert == 2 * 2 * 256 * 128  # two matrices, at the latent width
    shard = Parallelism(8).shard(mamba)
    assert (shard.linear_key_heads, shard.linear_value_heads) == (1, 2)  # groups are copied


def test_checkpoints_say_how_their_parts_and_caches_are_stored(write):
    listed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
              "kv_cache_quant_algo": "FP8", "quantized_layers": {
                  "model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4"},
                  "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
                  "model.layers.0.mlp.shared_expert.up_proj": {"quant_algo": "MXFP8"}}}  # fmt: skip
    model = load_model(write("qwen3_moe", quantization_config=listed))
    assert (model.expert_dtype, model.linear_dtype, model.mlp_dtype) == ("nvfp4_wo", "fp8", "mxfp8")
    assert model.kv_cache_dtype == "fp8"
    groups = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]}  # fmt: skip
    model = load_model(write("kimi_linear", quantization_config=groups))
    assert (model.expert_dtype, model.linear_dtype, model.mlp_dtype) == ("int4", "bfloat16", None)
    assert model.state_dtype is None  # its layers name linear attention self_attn, too
    w8a8 = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "int"}}}}  # fmt: skip
    assert load_model(write("llama", quantization_config=w8a8)).linear_dtype == "int8"


@pytest.mark.parametrize(
    ("method", "stored", "bytes_"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4_g128", 0.5 + 20 / 128 / 8),
        ({"quant_method": "gptq", "bits": 8}, "int8_wo", 1.0),
        ({"quant_algo": "FP8"}, "fp8", 1.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", 0.5625),
    ],
)
def test_quantized_weights_take_their_bits(write, method, stored, bytes_):
    wide = load_model(write("llama", quantization_config=None))
    narrow = load_model(write("llama", quantization_config=method))
    assert narrow.linear_dtype == stored
    matrices = sum(layers * n * k for _, layers, own in wide.matrices for n, k in own)
    assert wide.weight_bytes - narrow.weight_bytes == pytest.approx(
        (2 - bytes_) * matrices, rel=0.01
    )


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("nemotron-nas", "different widths"),
        ("deepseek_v41_text", "n-grams"),
        ("longcat_flash", "two"),
    ],
)
def test_known_architectures_that_are_not_supported_say_why(tmp_path, family, says):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": family}))
    with pytest.raises(InputError, match=says):
        load_model(path)


CASES = SHARED / "research" / "cases_4"


@on_each("name, billions", [("ernie45_21b", 21.8), ("gemma3_27b", 27.0), ("glm47_flash", 29.9),
     ("granite4_small", 32.2),
     ("hunyuan_a13b", 80.4), ("nemotron_nano_30b", 31.6), ("qwen3_omni_30b", 30.5),
     ("step35_flash", 195.8), ("llama33_70b_w8a8", 70.6), ("qwen25_72b_gptq", 72.7),
     ("deepseek_r1_awq", 671.0)])  # fmt: skip
def test_parameters_of_public_configurations(name, billions):
    """As their publishers count them, vision and drafts left out."""
    path = CASES / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"{path} is missing")
    assert load_model(path).total_params == pytest.approx(1e9 * billions, rel=0.01)


@on_each("value", [10**9, 1e300, -1, 0, True, "7", [], {}])
@on_each("family", ["qwen3_moe", "glm_moe_dsa"])
def test_no_number_of_a_configuration_takes_the_memory_of_the_machine(write, family, value):
    """A model or one refusal: a billion layers took 16 GB and 45 s before they were refused."""
    numbers = [name for name, given in CONFIGS[family].items() if type(given) is int]
    assert "num_hidden_layers" in numbers
    for name in numbers:
        try:
            model = load_model(str(write(family, **{name: value})))
        except InputError:
            continue
        assert model.n_layers <= 1024
