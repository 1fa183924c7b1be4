"""What a ``config.json`` says of a model, in the words of `models.ModelDims`."""

from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.inputs import parse_json, read_text
from eldr_sim.kernel_profiles.hf_config.attention import attention_fields
from eldr_sim.kernel_profiles.hf_config.keys import Keys
from eldr_sim.kernel_profiles.hf_config.layers import Layers, layers_of
from eldr_sim.kernel_profiles.hf_config.quantization import stored_as

_DENSE = (
    "ernie4_5", "gemma3", "gemma3_text", "granite", "hunyuan_v1_dense", "llama", "mimo", "mistral",
    "muse_glimmer_text", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text",
    "qwen3", "qwen3_5", "qwen3_5_text", "qwen3_vl_text",
)  # fmt: skip
_ROUTED = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "ernie4_5_moe", "glm4_moe",
    "glm4_moe_lite", "glm5_next_text", "glm_moe_dsa", "gpt_oss", "granitemoe", "hunyuan_v1_moe",
    "kimi_k2", "kimi_linear", "llama4", "llama4_text", "mimo_v2_flash", "minimax_m2", "minimax_m3",
    "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe",
    "qwen3_next", "qwen3_omni_moe_text", "qwen3_vl_moe", "qwen3_vl_moe_text", "step3p5", "step3p7",
)  # fmt: skip
_EITHER = ("gemma4", "gemma4_text", "granitemoehybrid", "nemotron_h")  # as their keys say
_SAME = {"deepseek_ref": "deepseek_v4", "minimax_m3_vl": "minimax_m3"}
#: Known architectures that are not supported, and why.
_REFUSED = {
    "nemotron-nas": "its layers have attention and MLPs of different widths, or none",
    "deepseek_v41_text": "its layers share KV caches and look up n-grams in a memory",
    "longcat_flash": "its layers have two attentions each, and experts that compute nothing",
    "gemma3n_text": "its layers share KV caches and embeddings",
    "qwen3_omni_moe": "its text model is in thinker_config",
}
_WRAPPERS = ("thinker_config", "llm_config", "language_config", "text_config")
_DTYPES = ("bfloat16", "float16", "float32", "auto")


def hf_fields(path: Path) -> dict[str, Any]:
    """Return the fields of a ``config.json``'s model; raises InputError if it is not described
    here, or has keys that shape the model and are not known."""
    return read_config(path)[0]


def read_config(path: Path) -> tuple[dict[str, Any], Keys]:
    """Return the fields of a ``config.json``'s model, and its keys as they were read."""
    raw = _json_object(path)
    beside = path.with_name(path.name.replace("config.json", "hf_quant_config.json"))
    if beside != path and not raw.get("quantization_config") and beside.is_file():
        # ModelOpt's checkpoints say it there.
        said = _json_object(beside).get("quantization")
        if isinstance(said, dict):
            raw |= {"quantization_config": said | {"quant_method": "modelopt"}}
    keys = Keys(_text_model(raw, path), path)
    try:
        fields = _fields_of(keys)
        keys.check_rest()
    except KeyError as error:
        raise InputError("model", f"{path} has no {error.args[0]!r}") from None
    except InputError:
        raise
    except (TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise InputError("model", f"{path}: invalid field: {error}") from None
    return fields, keys


def _text_model(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the configuration of the model that computes text, where others stand beside it."""
    config = raw
    for name in _WRAPPERS:
        inner = config.get(name)
        if inner is not None and not isinstance(inner, dict):
            raise InputError("model", f"{path}: {name} is {inner!r:.80}", "a JSON object, or none")
        config = {key: value for key, value in config.items() if key != name} | (inner or {})
    return config


def _fields_of(keys: Keys) -> dict[str, Any]:
    path = keys.path
    family = str(keys.get("model_type", ""))
    family = _SAME.get(family, family)
    if family in _REFUSED:
        problem = f"{path}: model_type {family!r} is not supported: {_REFUSED[family]}"
        raise InputError("model", problem)
    known = sorted({*_DENSE, *_ROUTED, *_EITHER})
    if family not in known:
        raise InputError("model", f"{path}: model_type {family!r}", ", ".join(known))
    for name in ("torch_dtype", "dtype"):
        keys.only(name, *_DTYPES)
    experts = _experts(keys, family)
    layers = layers_of(keys, family, bool(experts))
    n, hidden = len(layers.mixers), keys.needed("hidden_size")
    folder = path.resolve().parent.name if path.stem == "config" else ""
    gemma = family.startswith("gemma")
    norms = 7 if gemma and experts else 4 if gemma or family.startswith("muse") else 2
    fields: dict[str, Any] = {
        "name": str(keys.get("_name_or_path") or folder or path.stem),
        "source": str(path.name),
        "n_layers": n,
        "n_dense_layers": layers.mlps.count("dense"),
        "n_bare_layers": layers.mlps.count("none"),
        "hidden_size": hidden,
        "vocab_size": keys.needed("vocab_size"),
        "tie_word_embeddings": bool(keys.get("tie_word_embeddings", gemma)),
        "lm_head_bias": bool(keys.get("lm_head_bias")),
        "max_position_embeddings": keys.one("max_position_embeddings",
                                            default=131072 if gemma else None),
        "norms_per_layer": norms,
        "norm_bias": family == "phimoe",
    }  # fmt: skip
    if fields["max_position_embeddings"] is None:
        raise InputError("model", f"{path} has no 'max_position_embeddings'")
    fields |= experts | _mlps(keys, family, layers, experts)
    fields |= attention_fields(keys, family, layers)
    if "hc_mult" in keys:
        keys.only("mhc", True)
        fields["hyper_connections"] = keys["hc_mult"]
    if "attn_res_block_size" in keys:
        fields["residual_block"] = keys["attn_res_block_size"]
    keys.only("hidden_size_per_layer_input", 0)
    keys.only("use_double_wide_mlp", False)
    keys.only("mlp_bias", False)
    keys.only("compression_ratio", 1)
    keys.only("att_impl_type", "GQA")
    keys.only("use_mla", "kv_lora_rank" in keys)
    keys.only("language_model_only", False, True)
    shared = fields.get("shared_intermediate_size") and not gemma and "llama4" not in family
    fields |= stored_as(keys, layers, "shared" if shared else "dense")
    if fields.get("compressed_layers"):
        fields["kv_cache_dtype"] = "fp8"  # what vLLM 0.32 makes of its default
    return fields


def _experts(keys: Keys, family: str) -> dict[str, Any]:
    """Return the fields of routed experts; nothing where the model has none."""
    if family in _DENSE:
        return {}
    if family.startswith("gemma4") and keys.get("enable_moe_block") is False:
        keys.ignore("num_experts", "top_k_experts", "moe_intermediate_size",
                    "expert_intermediate_size")  # fmt: skip
        return {}
    count = keys.one("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    top_k = keys.one("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k",
                     "moe_top_k", "moe_topk", "experts_per_token")  # fmt: skip
    top_k = _same_everywhere(keys, "moe_topk", top_k)
    if family in _EITHER and not count and not keys.get("enable_moe_block"):
        return {}
    if not (count and top_k):
        raise keys.refusal("describes no routed experts", "those of its family")
    width = keys.one("moe_intermediate_size", "expert_intermediate_size")
    width = _same_everywhere(keys, "moe_intermediate_size", width)
    if width is None:
        width = keys.needed("intermediate_size")
    keys.only("zero_expert_num", 0)
    keys.only("moe_every_n_layer", 1)
    keys.only("moe_layer_num_skipped", 0)
    keys.only("use_moe", True)
    latent = keys.one("moe_latent_size", "routed_expert_hidden_size", default=0)
    return {
        "n_experts": count,
        "top_k": top_k,
        "expert_intermediate_size": width,
        "expert_hidden_size": latent,
        "expert_bias": family == "gpt_oss",
        # vLLM's glm4_moe.py, glm4_moe_lite.py and minimax_m2.py; SGLang's
        "float32_gate": family in ("glm4_moe", "glm4_moe_lite", "minimax_m2"),
    }


def _same_everywhere(keys: Keys, key: str, value: Any) -> Any:
    """Return the one value of a list with one a layer."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise keys.refusal(f"{key}: {sorted(set(value))} in different layers", "one value")
    return value[0]


def _mlps(keys: Keys, family: str, layers: Layers, experts: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of dense MLPs, of shared experts and of gates."""
    n_dense, hidden = layers.mlps.count("dense"), keys.needed("hidden_size")
    width = keys.get("intermediate_size")
    fields: dict[str, Any] = {"gated_mlp": keys.get("mlp_hidden_act") != "relu2"}
    if family.startswith("llama4"):
        fields |= {"shared_intermediate_size": width}
        width = keys.needed("intermediate_size_mlp")
    elif not experts and family == "granitemoehybrid":
        width = keys.needed("shared_intermediate_size")
        keys.ignore("num_local_experts", "num_experts_per_tok", "intermediate_size")
    elif "dense_intermediate_size" in keys:
        width = keys["dense_intermediate_size"]
        keys.only("intermediate_size", experts.get("expert_intermediate_size"))
    if n_dense:
        fields["dense_intermediate_size"] = width or keys.needed("intermediate_size")
    elif experts and not family.startswith("gemma"):
        keys.ignore("intermediate_size", "dense_intermediate_size", "intermediate_size_mlp")
    if not experts:
        return fields
    fields |= _shared_experts(keys, family, fields, experts)
    count = experts["n_experts"]
    extra = {"gpt_oss": count, "gemma4": hidden + count, "gemma4_text": hidden + count}
    extra |= {"nemotron_h": count, "step3p5": count, "step3p7": count}
    fields["router_extra_params"] = extra.get(family, 0)
    if keys.get("latent_moe_use_norm"):
        fields["router_extra_params"] += experts["expert_hidden_size"]
    keys.only("use_moe_router_bias", True, False)
    keys.only("use_mixed_mlp_moe", True)
    return fields


def _shared_experts(
    keys: Keys, family: str, fields: dict[str, Any], experts: dict[str, Any]
) -> dict[str, Any]:
    """Return the width of what every token passes beside its experts."""
    if "shared_intermediate_size" in fields:
        return {}
    if family.startswith("gemma"):  # a dense MLP runs beside the experts in every layer
        return {"shared_intermediate_size": keys.needed("intermediate_size")}
    width = keys.one("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
                     "share_expert_dim", "shared_intermediate_size", default=0)  # fmt: skip
    number = keys.one("n_shared_experts", "num_shared_experts", "num_shared_expert",
                      "moe_num_shared_experts")  # fmt: skip
    number = _same_everywhere(keys, "num_shared_expert", number)
    if width:
        keys.only("n_shared_experts", 1)
    else:
        width = (number or 0) * experts["expert_intermediate_size"]
    gated = bool(width) and family.startswith(("qwen2_moe", "qwen3_5", "qwen3_next"))
    return {"shared_intermediate_size": width, "shared_expert_gate": gated}


def _json_object(path: Path) -> dict[str, Any]:
    raw = parse_json(read_text(path, "model"), "model", str(path))
    if not isinstance(raw, dict):
        raise InputError("model", f"{path} does not hold a JSON object")
    return raw
