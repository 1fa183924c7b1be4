"""What a Hugging Face ``config.json`` says of a model, in the words of `models.ModelDims`."""

from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.inputs import parse_json, read_text

#: ``model_type`` of the Hugging Face architectures whose layers are described here.
_FAMILIES = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "gemma4", "gemma4_text", "glm4_moe",
    "glm_moe_dsa", "gpt_oss", "granitemoe",
    "kimi_k2", "llama", "llama4", "llama4_text", "minimax_m2", "mistral", "mixtral", "olmoe",
    "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe", "qwen3_vl_moe_text",
)  # fmt: skip


_DENSE = ("llama", "mistral", "qwen2", "qwen3", "qwen3_5", "qwen3_5_text")


_LINEAR = ("qwen3_5", "qwen3_next")  # start of families with layers of linear attention


def hf_fields(path: Path) -> dict[str, Any]:
    """Return the fields of a ``config.json``'s model; raises InputError if it is not described
    here."""
    raw = _json_object(path)
    beside = path.with_name(path.name.replace("config.json", "hf_quant_config.json"))
    if beside != path and not raw.get("quantization_config") and beside.is_file():
        # ModelOpt's checkpoints say it there.
        said = _object(_json_object(beside), "quantization", beside)
        raw |= {"quantization_config": said | {"quant_method": "modelopt"}}
    try:
        return _fields_of(raw, path)
    except KeyError as error:
        raise InputError("model", f"{path} has no {error.args[0]!r}") from None
    except InputError:
        raise
    except (TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise InputError("model", f"{path}: a field cannot be: {error}") from None


def _fields_of(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """Translate a Hugging Face configuration; key names differ by family."""
    config: dict[str, Any] = raw | _object(raw, "text_config", path)
    family = str(config.get("model_type", ""))

    def first(*keys: str, default: Any = None) -> Any:
        return next((config[key] for key in keys if config.get(key) is not None), default)

    n_experts = first("num_experts", "n_routed_experts", "num_local_experts")
    top_k = first("num_experts_per_tok", "top_k_experts", "num_experts_per_token")
    if family not in _FAMILIES:
        raise InputError("model", f"{path}: model_type {family!r}", ", ".join(_FAMILIES))
    routed = family not in _DENSE
    if routed and not (n_experts and top_k):
        raise InputError("model", f"{path} describes no routed experts", "those of its family")
    layers, hidden, heads = (
        config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    expert_width = first("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
    gemma = family.startswith("gemma")
    shared = first("shared_expert_intermediate_size", "shared_intermediate_size", default=0)
    if not shared and config.get("n_shared_experts"):
        shared = config["n_shared_experts"] * expert_width
    if gemma:  # a dense MLP runs beside the experts in every layer
        shared = config["intermediate_size"]
    dense = first("first_k_dense_replace", default=0) if routed else layers
    mla = bool(config.get("kv_lora_rank"))
    sliding = _sliding_layers(family, config)
    folder = path.resolve().parent.name if path.stem == "config" else ""
    fields: dict[str, Any] = {
        "name": str(first("_name_or_path", default="") or folder or path.stem),
        "n_layers": layers,
        "n_dense_layers": dense,
        "hidden_size": hidden,
        "n_experts": n_experts if routed else 0,
        "top_k": top_k if routed else 0,
        "expert_intermediate_size": expert_width if routed else 0,
        "dense_intermediate_size": config["intermediate_size"] if dense else 0,
        "shared_intermediate_size": shared,
        "shared_expert_gate": family == "qwen2_moe",
        "expert_bias": family == "gpt_oss",
        "router_extra_params": (
            n_experts if family == "gpt_oss" else hidden + n_experts if gemma else 0
        ),
        "vocab_size": config["vocab_size"],
        "tie_word_embeddings": bool(first("tie_word_embeddings", default=gemma)),
        "lm_head_bias": bool(config.get("lm_head_bias")),
        "max_position_embeddings": config["max_position_embeddings"],
        "attention": "mla" if mla else "gqa",
        "n_heads": heads,
        "n_kv_heads": first("num_key_value_heads", default=heads),
        "head_dim": first("head_dim", default=hidden // heads),
        "sliding_window": config["sliding_window"] if sliding else 0,
        "n_sliding_layers": sliding,
        "qk_norm": _qk_norm(family, config),
        "attention_bias": _attention_bias(family, config),
        "attention_sinks": family == "gpt_oss",
        "norms_per_layer": 7 if gemma else 2,
        "norm_bias": family == "phimoe",
        "source": str(path.name),
    }
    if gemma and config.get("global_head_dim"):
        fields |= {
            "global_n_kv_heads": first("num_global_key_value_heads", "num_key_value_heads"),
            "global_head_dim": config["global_head_dim"],
            "global_shared_kv_projection": bool(config.get("attention_k_eq_v")),
        }
    if mla:
        fields |= _latent_attention(config)
    if family.startswith("llama4"):
        fields |= _llama4(config)
    if family.startswith(_LINEAR):
        fields |= _linear_attention(config, path)
    return fields | _dtypes(_object(config, "quantization_config", path), path, routed)


def _latent_attention(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of multi-head latent attention, and of the choice of tokens where it is sparse."""
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    return {
        "q_lora_rank": config.get("q_lora_rank") or 0,
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": config["v_head_dim"],
        "head_dim": nope + rope,
        "index_topk": config.get("index_topk") or 0,
        "index_heads": config.get("index_n_heads") or 0,
        "index_head_dim": config.get("index_head_dim") or 0,
    }


def _llama4(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of Llama 4: a shared expert, MoE in every n-th layer, local attention in 3 of 4."""
    layers = config["num_hidden_layers"]
    full = layers // 4  # no rotary embedding there, and no chunks (transformers' default)
    return {
        "n_dense_layers": layers - layers // config["interleave_moe_layer_step"],
        "dense_intermediate_size": config["intermediate_size_mlp"],
        "shared_intermediate_size": config["intermediate_size"],
        "sliding_window": config["attention_chunk_size"],
        "n_sliding_layers": layers - full,
    }


def _linear_attention(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Fields of Qwen3-Next and Qwen3.5: three layers of four keep a state, others have a gate."""
    layers, types = config["num_hidden_layers"], config.get("layer_types")
    every = config.get("full_attention_interval", 4)
    linear = types.count("linear_attention") if types else layers - layers // every
    widths = config["linear_key_head_dim"], config["linear_value_head_dim"]
    if widths[0] != widths[1]:
        problem = f"{path}: linear_value_head_dim {widths[1]}"
        raise InputError("model", problem, f"{widths[0]}, that of keys")
    return {
        "n_linear_layers": linear,
        "linear_key_heads": config["linear_num_key_heads"],
        "linear_value_heads": config["linear_num_value_heads"],
        "linear_head_dim": widths[0],
        "linear_conv": config["linear_conv_kernel_dim"],
        "linear_state_bytes_per_value": 2 if config.get("mamba_ssm_dtype") == "bfloat16" else 4,
        "attention_gate": bool(config.get("attn_output_gate", True)),
        "shared_expert_gate": bool(config.get("shared_expert_intermediate_size")),
    }


def _sliding_layers(family: str, config: dict[str, Any]) -> int:
    """Layers that attend to a window: by their types, else by the rule of older configurations."""
    types = config.get("layer_types")
    if types or not config.get("sliding_window"):
        return sum(kind == "sliding_attention" for kind in types or ())
    layers: int = config["num_hidden_layers"]
    if family == "mistral":
        return layers
    if family in ("qwen2", "qwen3") and config.get("use_sliding_window"):
        return layers - int(min(config.get("max_window_layers", layers), layers))
    return 0


def _qk_norm(family: str, config: dict[str, Any]) -> str:
    if family.startswith(("qwen3", "gemma4")):
        return "per_head"
    if family in ("olmoe", "minimax_m2"):
        return "full_width"
    return "per_head" if config.get("use_qk_norm") else "none"


def _attention_bias(family: str, config: dict[str, Any]) -> str:
    if family in ("gpt_oss", "phimoe") and config.get("attention_bias", True):
        return "all"
    if family == "qwen2" or (family == "qwen2_moe" and config.get("qkv_bias", True)):
        return "qkv"
    if family in _DENSE and config.get("attention_bias"):
        return "all"
    return "qkv" if config.get("attention_bias") else "none"


def _dtypes(quantization: dict[str, Any], path: Path, routed: bool) -> dict[str, str]:
    method = str(quantization.get("quant_method", ""))
    if not method:
        return {}
    if method == "mxfp4":
        return {"expert_dtype": "mxfp4"}
    if method == "fp8":
        stored = "fp8_block" if quantization.get("weight_block_size") else "fp8"
        return {"expert_dtype": stored, "linear_dtype": stored}
    groups = _object(quantization, "config_groups", path)
    weights = [_object(_object(groups, name, path), "weights", path) for name in groups]
    int4 = [w.get("num_bits") == 4 and w.get("type") == "int" for w in weights]
    fp8 = [w.get("num_bits") == 8 and w.get("type") == "float" for w in weights]
    if method == "compressed-tensors" and int4 and all(int4) and routed:
        return {"expert_dtype": "int4"}  # as Kimi-K2.5: experts alone
    if method == "modelopt" and quantization.get("quant_algo") == "NVFP4":
        # NVIDIA's MoE checkpoints keep attention in bfloat16; dense and shared MLPs are taken so,
        # too. Those of dense models have NVFP4 everywhere but in lm_head.
        return {"expert_dtype": "nvfp4"} if routed else {"linear_dtype": "nvfp4"}
    if not routed and (quantization.get("quant_algo") == "FP8" or (fp8 and all(fp8))):
        return {"linear_dtype": "fp8"}
    problem = f"quantization {method!r} is not modelled"
    raise InputError("model", problem, "none, fp8, mxfp4, INT4 or NVFP4 experts")


def _json_object(path: Path) -> dict[str, Any]:
    raw = parse_json(read_text(path, "model"), "model", str(path))
    if not isinstance(raw, dict):
        raise InputError("model", f"{path} does not hold a JSON object")
    return raw


def _object(config: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    """Return an object within a configuration; empty where there is none."""
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise InputError("model", f"{path}: {key} is {found!r:.80}", "a JSON object, or none")
    return found
