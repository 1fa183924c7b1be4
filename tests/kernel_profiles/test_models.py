"""Model dimensions: our formulas against published counts, checkpoints and real configurations."""

import json
import re
from pathlib import Path

import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import ModelDims, list_models, load_model, shipped_json
from eldr_sim.kernel_profiles.tables.format import attention_shapes

from ..on_each import on_each
from ..paths import SHARED

COUNTS = SHARED / "data" / "models" / "model_dimensions.json"


@on_each("name", list_models())
def test_total_parameters_match_what_the_publisher_says(name):
    dims = load_model(name)
    # Kimi-K2's "1T" is a rounded figure, Llama-4-Scout's count has its vision tower, that of
    # DeepSeek-V4-Pro its multi-token-prediction layer; every other model lies within 1%.
    tolerance = {"Kimi-K2": 0.03, "Kimi-K2.5": 0.03, "Llama-4-Scout": 0.015}
    tolerance |= {"DeepSeek-V4-Pro": 0.02}
    # The counts of GLM-5.3-Flash have both; Kimi-Linear's repository holds 49.1B.
    tolerance |= {
        "GLM-5.3-Flash": 0.025,
        "GLM-5.3-Flash-NVFP4": 0.025,
        "Kimi-Linear-48B-A3B": 0.025,
    }
    tolerance = tolerance.get(name, 0.01)
    assert dims.total_params == pytest.approx(dims.published_total_params, rel=tolerance)


ACTIVE = {"MiniMax-M3": 23, "Nemotron-3-Super-120B-A12B-FP8": 12, "DeepSeek-V4-Flash": 13,
          "GLM-5.3-Flash": 18, "MiMo-V2-Flash": 15, "Granite-4.0-H-Small": 9}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_match_what_the_publisher_says(name):
    """Publishers count them with or without embedding and lm_head."""
    dims = load_model(name)
    without = dims.active_params - dims.embedding_params - dims.lm_head_params
    assert 0.94 * without <= 1e9 * ACTIVE[name] <= 1.06 * dims.active_params


@on_each("name", list_models())
def test_parameters_match_an_independent_count(name):
    """The oracle instantiated each architecture on torch's meta device and counted."""
    if not COUNTS.is_file():
        pytest.skip(f"no independent counts: {COUNTS} is missing")
    entries = {entry["name"]: entry["computed"] for entry in json.loads(COUNTS.read_text())}
    if name not in entries:
        pytest.skip("counted for the first 15 models")
    dims, oracle = load_model(name), entries[name]
    assert dims.total_params == oracle["total_params"]
    assert dims.active_params == oracle["active_params_all"]
    assert dims.attention_params == oracle["attention_params"]
    assert dims.params_per_expert == oracle["params_per_routed_expert"]
    assert dims.bytes_per_expert == oracle["bytes_per_routed_expert"]
    assert dims.kv_bytes_per_token == oracle["kv_bytes_per_token_total_bf16"]
    # The oracle counts the gates' fp32 correction biases (buffers, not parameters) of FP8 models.
    assert dims.weight_bytes == pytest.approx(oracle["weight_bytes_total"], rel=1e-6)


def test_checkpoint_sizes_are_exact_where_files_were_seen():
    assert load_model("Qwen3-30B-A3B").weight_bytes == 61_064_245_248
    assert load_model("Mixtral-8x7B").weight_bytes == 93_405_585_408


def test_one_expert_by_hand():
    qwen, gpt = load_model("Qwen3-30B-A3B"), load_model("gpt-oss-120b")
    assert qwen.bytes_per_expert == 3 * 2048 * 768 * 2 == 9_437_184
    weights = 3 * 2880 * 2880
    assert gpt.bytes_per_expert == weights // 2 + weights // 32 + 2 * (2 * 2880 + 2880)


def test_sliding_layers_cache_no_more_than_their_window():
    gpt = load_model("GPT-OSS-120B")
    assert gpt.kv_bytes(128) == 128 * gpt.kv_bytes_per_token
    growth = gpt.kv_bytes(10_001) - gpt.kv_bytes(10_000)
    assert growth == 36_864  # 18 full layers of 2,048 bytes
    assert gpt.kv_bytes(10_000) - 10_000 * growth == 4_718_592  # the windows' cap
    gemma = load_model("Gemma-4-26B-A4B")
    assert gemma.kv_bytes(5_001) - gemma.kv_bytes(5_000) == 20_480


@on_each("name", list_models())
def test_every_layer_caches_and_attends_once(name):
    """Windows and full attention share the layers out; a cache in windows holds their keys and
    values alone, with index keys beside those of full attention."""
    model = load_model(name)
    sliding, full = model.n_sliding_layers, model.n_full_layers
    assert sliding + full + model.n_linear_layers == model.n_layers
    shapes = attention_shapes(model)
    for kind, layers in ((True, sliding), (False, full)):
        assert sum(n for slides, n, _ in shapes if slides == kind) == layers
        windows = {shape.get("window", 0) for slides, _, shape in shapes if slides == kind}
        assert windows <= {model.sliding_window if kind else 0}
    per_layer = {
        kind: model.kv_lora_rank + model.qk_rope_head_dim
        if model.attention == "mla"
        else model.heads(kind)[1] * (model.heads(kind)[2] + model.value_width(kind))
        for kind in (True, False)
    }
    width = 1 if model.kv_cache_dtype == "fp8" else 2
    if model.compressed_layers:  # 448 values of FP8 and 8 bytes of scales, 64 of bfloat16
        per_layer = dict.fromkeys(per_layer, 584)
    assert model.cached_bytes_per_token(True) == sliding * width * per_layer[True]
    keys = model.cached_bytes_per_token(False) - full * width * per_layer[False]
    if not model.compressed_layers:
        assert (keys > 0) == (model.index_topk > 0)


def test_lookup_takes_names_and_hugging_face_ids_in_any_case():
    assert load_model("qwen3-30b-a3b") is load_model("Qwen/Qwen3-30B-A3B")


def _config(**changes):
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    }
    return {key: value for key, value in (config | changes).items() if value is not None}


def _same_dimensions(left: ModelDims, right: ModelDims) -> bool:
    skip = {"name", "hf_id", "source", "published_source"}
    skip |= {"published_total_params", "published_active_params"}
    return left.model_dump(exclude=skip) == right.model_dump(exclude=skip)


def test_a_hugging_face_configuration_gives_the_shipped_dimensions(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(_config()))
    shipped = load_model("Qwen3-30B-A3B")
    assert _same_dimensions(load_model(tmp_path), shipped)
    assert _same_dimensions(load_model(tmp_path / "config.json"), shipped)


def test_a_configuration_without_a_name_has_its_file_s_or_its_folder_s(tmp_path):
    for place, name in (("my-moe/config.json", "my-moe"), ("other.json", "other")):
        path = tmp_path / place
        path.parent.mkdir(exist_ok=True)
        config = {k: v for k, v in _config().items() if k != "_name_or_path"}
        path.write_text(json.dumps(config))
        assert load_model(path).name == name
        path.write_text(json.dumps(config | {"_name_or_path": "org/its-own"}))
        assert load_model(path).name == "org/its-own"
    assert load_model(tmp_path / "my-moe").name == "org/its-own"


REAL_CONFIGS = {
    "Qwen3-30B-A3B": "Qwen--Qwen3-30B-A3B",
    "Qwen3-235B-A22B": "Qwen--Qwen3-235B-A22B",
    "GPT-OSS-120B": "openai--gpt-oss-120b",
    "GPT-OSS-20B": "openai--gpt-oss-20b",
    "Gemma-4-26B-A4B": "google--gemma-4-26B-A4B",
    "DeepSeek-V3": "deepseek-ai--DeepSeek-V3",
    "Mixtral-8x7B": "mistralai--Mixtral-8x7B-v0.1",
    "Kimi-K2": "moonshotai--Kimi-K2-Instruct",
    "MiniMax-M2": "MiniMaxAI--MiniMax-M2.5",
    "MiniMax-M2.5": "MiniMaxAI--MiniMax-M2.5",
    "Qwen3-30B-A3B-FP8": "Qwen--Qwen3-30B-A3B-FP8",
    "Qwen3-235B-A22B-FP8": "Qwen--Qwen3-235B-A22B-FP8",
    "Qwen3-Coder-480B": "Qwen--Qwen3-Coder-480B-A35B-Instruct",
    "DeepSeek-R1": "deepseek-ai--DeepSeek-R1",
    "Kimi-K2.5": "moonshotai--Kimi-K2.5",
    "Mixtral-8x22B": "mistralai--Mixtral-8x22B-v0.1",
    "Llama-4-Scout": "meta-llama--Llama-4-Scout-17B-16E-Instruct",
    "Llama-4-Maverick": "meta-llama--Llama-4-Maverick-17B-128E-Instruct",
    "Llama-3.1-8B": "meta-llama--Meta-Llama-3.1-8B",
    "Llama-3.1-70B": "meta-llama--Meta-Llama-3.1-70B",
    "Qwen3-8B": "Qwen--Qwen3-8B",
    "Qwen3-32B": "Qwen--Qwen3-32B",
}


@on_each("name", REAL_CONFIGS)
def test_real_configurations_of_every_family_give_the_shipped_dimensions(name):
    package = pytest.importorskip("aiconfigurator_core", reason="real configurations ship there")
    folder = Path(package.__file__).parent / "model_configs"
    path = folder / f"{REAL_CONFIGS[name]}_config.json"
    assert _same_dimensions(load_model(path), load_model(name))


def test_fp8_halves_the_bytes_of_experts_and_linears(tmp_path):
    path = tmp_path / "config.json"
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path.write_text(json.dumps(_config(quantization_config=blocks)))
    fp8, bf16 = load_model(path), load_model("Qwen3-30B-A3B")
    assert fp8.total_params == bf16.total_params
    assert fp8.bytes_per_expert == bf16.bytes_per_expert // 2 + 3 * 4 * (768 // 128) * 16
    assert 0.5 < fp8.weight_bytes / bf16.weight_bytes < 0.52
    path.write_text(json.dumps(_config(quantization_config={"quant_method": "fp8"})))
    tensor = load_model(path)  # one scale a tensor
    assert tensor.bytes_per_expert == bf16.bytes_per_expert // 2
    assert tensor.weight_bytes < fp8.weight_bytes


def test_int4_experts_leave_the_rest_in_bfloat16():
    """Kimi-K2.5: 4 bits and a 16th of a bfloat16 scale a weight, in experts alone."""
    int4, fp8 = load_model("Kimi-K2.5"), load_model("Kimi-K2")
    assert int4.total_params == fp8.total_params
    assert int4.bytes_per_expert == 3 * 7168 * 2048 * (4 + 16 / 32) / 8
    experts = int4.n_moe_layers * int4.n_experts
    rest = int4.weight_bytes - experts * int4.bytes_per_expert
    assert rest == 2 * (int4.total_params - experts * int4.params_per_expert)


def test_llama4_alternates():
    maverick, scout = load_model("Llama-4-Maverick"), load_model("Llama-4-Scout")
    assert (maverick.n_moe_layers, maverick.n_dense_layers, scout.n_moe_layers) == (24, 24, 48)
    assert (maverick.n_sliding_layers, maverick.sliding_window) == (36, 8192)


@on_each(
    "content, message",
    [
        ("{", "not valid JSON"),
        ("[]", "JSON object"),
        (json.dumps(_config(num_experts=None)), "no routed experts"),
        (json.dumps(_config(model_type="mamba_moe")), "mamba_moe"),
        (json.dumps(_config(hidden_size=None)), "hidden_size"),
        (json.dumps(_config(num_experts_per_tok=129)), "129 of 128"),
        (json.dumps(_config(hidden_size=-5)), "hidden_size"),
        (json.dumps(_config(quantization_config={"quant_method": "gguf"})), "gguf"),
        (json.dumps(_config(quantization_config={"quant_method": "awq", "bits": 3})), "bits 3"),
        (
            json.dumps(_config(quantization_config={"quant_method": "compressed-tensors"})),
            "config_groups",
        ),
        (
            json.dumps(_config(quantization_config="fp8")),
            "quantization_config is 'fp8' (allowed: a",
        ),
        (json.dumps(_config(quantization_config=[8])), "quantization_config is [8] (allowed: a"),
        (
            json.dumps(
                _config(
                    quantization_config={"quant_method": "compressed-tensors", "config_groups": [1]}
                )
            ),
            "config_groups is [1]",
        ),
        (json.dumps(_config(text_config=3)), "text_config is 3"),
    ],
)
def test_bad_configurations_are_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        load_model(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@on_each(
    "written, name",
    [
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "Qwen3-235B-A22B-FP8"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "Qwen3-30B-A3B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("deepseek-ai/DeepSeek-R1-0528", "DeepSeek-R1"),
        ("deepseek-ai/DeepSeek-V3-0324", "DeepSeek-V3"),
        ("Kimi-K2-Instruct-0905", "Kimi-K2"),
        ("moonshotai/Kimi-K2-Thinking", "Kimi-K2.5"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B"),
        ("qwen3_30b_a3b", "Qwen3-30B-A3B"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Nemotron-3-Nano-30B-A3B"),
    ],
)
def test_names_are_taken_as_people_write_them(written, name):
    assert load_model(written).name == name


@on_each("name", list_models())
def test_no_name_is_taken_for_another_model_s(name):
    model = load_model(name)
    assert (model.name, load_model(model.hf_id or name).name) == (name, name)


@on_each(
    "written",
    ["Qwen/Qwen3-32B-EXL2", "Qwen3-30B", "DeepSeek-V3-INT8", "unsloth/gpt-oss-120b-BF16",
     "unsloth/DeepSeek-R1-BF16"],
)  # fmt: skip
def test_precisions_and_sizes_are_never_dropped(written):
    with pytest.raises(InputError, match="did you mean"):
        load_model(written)


def test_unknown_models_are_refused_with_the_nearest_and_the_way_out():
    with pytest.raises(InputError, match=r"did you mean GPT-OSS-120B.*config\.json"):
        load_model("gpt-oss-120")
    with pytest.raises(InputError, match=r"'zzz' \(allowed: .*config\.json"):
        load_model("zzz")


@on_each("name", list_models())
def test_mla_keeps_one_tensor_a_layer_others_two(name):
    model = load_model(name)
    attends = model.n_layers - model.n_linear_layers
    assert model.n_kv_tensors == attends * {"mla": 1, "gqa": 2}[model.attention]


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("Qwen/Qwen3-8B-FP8", "Qwen3-8B"), ("qwen3-14b-fp8", "Qwen3-14B"),
        ("zai-org/GLM-4.6-FP8", "GLM-4.5"), ("zai-org/GLM-4.5-Air-FP8", "GLM-4.5-Air"),
    ],
)  # fmt: skip
def test_a_checkpoint_in_fp8_is_its_model_at_half_the_bytes(name, base):
    found, whole = load_model(name), load_model(base)
    assert found.name == f"{base}-FP8"
    assert found.total_params == whole.total_params
    kept = 2 * (found.embedding_params + found.lm_head_params)
    assert (found.weight_bytes - kept) / (whole.weight_bytes - kept) == pytest.approx(0.5, abs=0.01)
    assert load_model(found.name) is load_model(found.name)


CHECKPOINTS = [entry["id"] for entry in shipped_json("checkpoints")["checkpoints"]]


@pytest.mark.parametrize("repository", CHECKPOINTS)
def test_a_checkpoint_is_found_by_its_id_and_has_the_size_in_its_name(repository):
    found = load_model(repository)
    assert load_model(repository.rpartition("/")[2].lower() + "-2507") == found
    if size := re.search(r"-(\d+\.?\d*)([BT])\b", repository):
        said = float(size[1]) * {"B": 1e9, "T": 1e12}[size[2]]
        # Some names leave out the embedding, others count the vision part.
        assert 0.8 * said < found.total_params < 1.26 * said
    assert found.weight_bytes < 2.01 * found.total_params
    if "NVFP4" in repository:
        assert found.weight_bytes < found.total_params


#: Names in launch lines of publishers, with parameters as their cards count them, 1e9, and how
#: linear layers, experts and cache are stored.
PUBLISHED = [
    ("Qwen/Qwen2.5-72B-Instruct", 72.7, "bfloat16 bfloat16 bfloat16"),
    ("Qwen/QwQ-32B", 32.8, "bfloat16 bfloat16 bfloat16"),
    ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 7.62, "bfloat16 bfloat16 bfloat16"),
    ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", 70.6, "bfloat16 bfloat16 bfloat16"),
    ("meta-llama/Llama-3.1-405B-Instruct-FP8", 406, "fp8_block bfloat16 bfloat16"),
    ("amd/Llama-3.1-405B-Instruct-FP8-KV", 406, "fp8 bfloat16 fp8"),
    ("meta-llama/Llama-3.2-3B-Instruct", 3.21, "bfloat16 bfloat16 bfloat16"),
    ("mistralai/Mistral-7B-Instruct-v0.3", 7.25, "bfloat16 bfloat16 bfloat16"),
    ("Qwen/Qwen3-4B", 4.02, "bfloat16 bfloat16 bfloat16"),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", 80, "bfloat16 bfloat16 bfloat16"),
    ("Qwen/Qwen3-Coder-30B-A3B-Instruct", 30.5, "bfloat16 bfloat16 bfloat16"),
    ("zai-org/GLM-4.7-FP8", 353, "fp8 fp8 bfloat16"),
    ("nvidia/DeepSeek-R1-0528-FP4-v2", 671, "bfloat16 nvfp4 fp8"),
    ("Qwen/Qwen3-32B-AWQ", 32.8, "int4_g128 bfloat16 bfloat16"),
    ("Qwen/Qwen3-30B-A3B-GPTQ-Int4", 30.5, "int4_g128 int4_g128 bfloat16"),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", 8.03, "int8 bfloat16 bfloat16"),
    ("nvidia/Qwen3-30B-A3B-FP8", 30.5, "fp8 fp8 fp8"),
    ("RedHatAI/Qwen3-30B-A3B-FP8", 30.5, "fp8 fp8 bfloat16"),
    ("Qwen/Qwen3-30B-A3B-FP8", 30.5, "fp8_block fp8_block bfloat16"),
    ("nvidia/Qwen3-30B-A3B-FP4", 30.5, "nvfp4 nvfp4 bfloat16"),
    ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8", 31.6, "fp8 fp8 fp8"),
    ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", 70.6, "fp8 bfloat16 bfloat16"),
    ("RedHatAI/Qwen3-32B-NVFP4", 32.8, "nvfp4 bfloat16 bfloat16"),
    ("amd/Qwen3-Coder-480B-A35B-Instruct-MXFP4", 480, "bfloat16 mxfp4 bfloat16"),
    ("amd/DeepSeek-R1-0528-MXFP4", 671, "fp8_block mxfp4 bfloat16"),
    ("moonshotai/Kimi-K2.6", 1026, "bfloat16 int4 bfloat16"),
    ("Qwen/Qwen3.6-35B-A3B", 35, "bfloat16 bfloat16 bfloat16"),
]


@pytest.mark.parametrize(("name", "parameters", "stored"), PUBLISHED)
def test_names_of_published_launch_lines_are_known(name, parameters, stored):
    found = load_model(name)
    assert found.total_params / 1e9 == pytest.approx(parameters, rel=0.012)
    assert f"{found.linear_dtype} {found.expert_dtype} {found.kv_cache_dtype}" == stored


@pytest.mark.parametrize("name", ["Nothing-8B-FP8", "GPT-OSS-120B-FP8", "-FP8", "Qwen3-8B-MXFP4"])
def test_what_has_no_bfloat16_model_is_no_fp8_one(name):
    with pytest.raises(InputError, match="unknown model"):
        load_model(name)
