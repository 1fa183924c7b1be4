"""What the attention of each kind of layer has, in the words of `models.ModelDims`."""

from collections import Counter
from typing import Any

from eldr_sim.kernel_profiles.hf_config.keys import Keys
from eldr_sim.kernel_profiles.hf_config.layers import Layers


def attention_fields(keys: Keys, family: str, layers: Layers) -> dict[str, Any]:
    """Return the fields of attention, linear attention among it."""
    counts = Counter(layers.mixers)
    fields: dict[str, Any] = {
        "n_sliding_layers": counts["sliding"],
        "n_linear_layers": counts["state"],
        "qk_norm": _qk_norm(keys, family),
        "attention_bias": _bias(keys, family),
        "attention_sinks": _sinks(keys, family),
    }
    fields |= _heads(keys, family)
    window = keys.one("sliding_window", "sliding_window_size")
    if counts["sliding"]:
        if family.startswith("llama4"):
            window = keys.needed("attention_chunk_size")
        fields["sliding_window"] = keys.needed("sliding_window") if window is None else window
    else:
        keys.ignore("sliding_window", "sliding_window_size")
    keys.only("attention_chunk_size", window)
    keys.only("num_kv_shared_layers", 0)
    keys.only("use_cla", False)
    if counts["state"]:
        fields |= _states(keys, family)
    gate = keys.one("attn_output_gate", "mla_use_output_gate", "attention_output_gate",
                    default=family.startswith(("qwen3_5", "qwen3_next", "muse")))  # fmt: skip
    fields["attention_gate"] = bool(gate)
    keys.only("use_head_wise_attn_gate", False, True)  # a value a head: no matrix to speak of
    return fields


def _saved_sliding_heads(keys: Keys, known: int | None) -> dict[str, Any]:
    """Heads of sliding layers as transformers 5 saves Step's: once, and again for each layer."""
    each, heads = keys.object("per_layer_config"), keys.get("num_sliding_attention_heads", known)
    if known is not None:
        keys.only("num_sliding_attention_heads", known)
    types = keys.get("layer_types") or []
    for layer in each.values:
        if layer.isdecimal() and types[int(layer) : int(layer) + 1] == ["sliding_attention"]:
            each.only(layer, {"num_attention_heads": heads})
    if each.values and len(each.values) != types[: keys.n_layers()].count("sliding_attention"):
        raise keys.refusal("per_layer_config names other layers than the sliding ones")
    return {} if heads is None else {"sliding_n_heads": heads}


def _heads(keys: Keys, family: str) -> dict[str, Any]:
    """Fields of the heads of full and sliding layers."""
    heads, hidden = keys.needed("num_attention_heads"), keys.needed("hidden_size")
    if family.startswith("deepseek_v4"):
        return _compressed(keys, heads)
    if "kv_lora_rank" in keys:
        return _latent(keys, family, heads)
    kv_heads = keys.one("num_key_value_heads", "num_attention_groups", default=heads)
    width = keys.one("head_dim", "attention_head_dim", default=hidden // heads)
    fields = {"n_heads": heads, "n_kv_heads": kv_heads, "head_dim": width}
    value = keys.get("v_head_dim", width)
    if value != width:
        fields["v_head_dim"] = value
    if family.startswith("gemma4"):
        fields |= {
            "global_n_kv_heads": keys.one("num_global_key_value_heads", default=kv_heads),
            "global_head_dim": keys.get("global_head_dim", width),
            "global_shared_kv_projection": bool(keys.get("attention_k_eq_v")),
        }
    if "swa_num_key_value_heads" in keys:  # MiMo-V2: what is said without swa is of full layers
        fields |= {
            "sliding_n_heads": keys.get("swa_num_attention_heads", heads),
            "n_kv_heads": keys["swa_num_key_value_heads"],
            "head_dim": keys.get("swa_head_dim", width),
            "global_n_kv_heads": kv_heads,
            "global_head_dim": width,
        }
        keys.only("swa_v_head_dim", value)
    other = keys.object("attention_other_setting")  # Step: of its sliding layers
    if other.values:
        other.only("attention_type", "sliding_attention")
        fields |= {
            "sliding_n_heads": other.get("num_attention_heads", heads),
            "n_kv_heads": other.get("num_attention_groups", kv_heads),
            "head_dim": other.get("head_dim", width),
            "global_n_kv_heads": kv_heads,
            "global_head_dim": width,
        }
        other.ignore("true_head_dim")
    fields |= _saved_sliding_heads(keys, fields.get("sliding_n_heads"))
    if fields.get("sliding_n_heads") == heads:
        del fields["sliding_n_heads"]
    sparse = keys.object("sparse_attention_config")
    if sparse.get("use_sparse_attention"):
        fields |= _chosen_blocks(sparse, keys.n_layers())
    return fields


def _chosen_blocks(keys: Keys, n_layers: int) -> dict[str, Any]:
    """Fields of sparse attention by blocks (MiniMax-M3): index heads score one key of a token, and
    a query attends to the blocks that score best."""
    every = keys.per_layer("sparse_attention_freq", n_layers) or [1] * n_layers
    keys.ignore("sparse_score_type", "sparse_init_block", "sparse_local_block")  # of those blocks
    without = keys.per_layer("sparse_disable_index_value", n_layers)
    if without is not None and without != every:
        raise keys.refusal("sparse_disable_index_value: values of the index", "that of its layers")
    return {
        "index_topk": keys.needed("sparse_topk_blocks") * keys.needed("sparse_block_size"),
        "index_heads": keys.needed("sparse_num_index_heads"),
        "index_head_dim": keys.needed("sparse_index_dim"),
        "index_bits": 16,
        "n_sparse_layers": sum(map(bool, every)),
    }


def _latent(keys: Keys, family: str, heads: int) -> dict[str, Any]:
    """Fields of multi-head latent attention, and of the choice of tokens where it is sparse."""
    nope, rope = keys.needed("qk_nope_head_dim"), keys.needed("qk_rope_head_dim")
    keys.only("qk_head_dim", nope + rope)
    keys.ignore("head_dim", "num_key_value_heads")
    fields = {
        "attention": "mla",
        "n_heads": heads,
        "n_kv_heads": keys.get("num_key_value_heads", heads),
        "q_lora_rank": keys.get("q_lora_rank", 0),
        "kv_lora_rank": keys["kv_lora_rank"],
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": keys.needed("v_head_dim"),
        "head_dim": nope + rope,
    }
    if "index_topk" in keys:
        fields |= _indexers(keys, keys.n_layers())
    return fields


def _indexers(keys: Keys, n_layers: int) -> dict[str, Any]:
    """Fields of DeepSeek's sparse attention; GLM-5.2's layers share the choice of earlier ones."""
    fields = {
        "index_topk": keys["index_topk"],
        "index_heads": keys.needed("index_n_heads"),
        "index_head_dim": keys.needed("index_head_dim"),
        "index_pool": keys.get("index_kpool", 1),
    }
    keys.only("index_kpool_compress", fields["index_pool"] > 1)
    types = keys.per_layer("indexer_types", n_layers)
    every = keys.get("index_topk_freq", 1)
    pattern = keys.get("index_topk_pattern")
    offset = keys.get("index_skip_topk_offset", 0)
    if types is not None:
        unknown = set(types) - {"full", "shared"}
        if unknown:
            raise keys.refusal(f"indexer_types {sorted(map(str, unknown))}", "full, shared")
        keys.ignore("index_topk_freq", "index_topk_pattern")
        if "shared" in types:
            fields["n_index_layers"] = types.count("full")
    elif pattern is not None or every != 1:
        # vLLM's rule: layers up to the offset, and then every n-th, choose by themselves.
        if pattern is not None:
            raise keys.refusal(f"index_topk_pattern {pattern!r:.40}", "indexer_types")
        own = sum(layer < offset or (layer - offset + 1) % every == 0 for layer in range(n_layers))
        fields["n_index_layers"] = own
    return fields


def _compressed(keys: Keys, heads: int) -> dict[str, Any]:
    """Fields of DeepSeek-V4's attention: a head's width is the latent's; layers that compress by 0
    attend to the window alone."""
    width, rope = keys.needed("head_dim"), keys.needed("qk_rope_head_dim")
    n = keys.n_layers()
    ratios = Counter(ratio for ratio in keys.per_layer("compress_ratios", n) or () if ratio)
    if not {4} <= set(ratios) <= {4, 128}:
        raise keys.refusal(f"compress_ratios {sorted(ratios)}", "0, 4 and 128, 4 among them")
    keys.only("num_key_value_heads", 1)
    return {
        "attention": "mla",
        "n_heads": heads,
        "n_kv_heads": heads,
        "head_dim": width,
        "q_lora_rank": keys.needed("q_lora_rank"),
        "kv_lora_rank": width - rope,
        "qk_nope_head_dim": width - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": width,
        "index_topk": keys.needed("index_topk"),
        "index_heads": keys.needed("index_n_heads"),
        "index_head_dim": keys.needed("index_head_dim"),
        "compressed_layers": tuple(sorted(ratios.items())),
        "local_window": keys.needed("sliding_window"),
        "output_groups": keys.needed("o_groups"),
        "output_rank": keys.needed("o_lora_rank"),
    }


def _states(keys: Keys, family: str) -> dict[str, Any]:
    """Fields of the layers that keep a state."""
    if family.startswith(("qwen3_5", "qwen3_next")):
        widths = keys.needed("linear_key_head_dim"), keys.needed("linear_value_head_dim")
        return {
            "linear_key_heads": keys.needed("linear_num_key_heads"),
            "linear_value_heads": keys.needed("linear_num_value_heads"),
            "linear_head_dim": widths[0],
            "linear_value_head_dim": 0 if widths[1] == widths[0] else widths[1],
            "linear_conv": keys.needed("linear_conv_kernel_dim"),
            "linear_state_bytes_per_value": _width(keys, "mamba_ssm_dtype", "float32"),
        }
    if "linear_attn_config" in keys:
        return _kda(keys)
    mamba = {
        "linear_kind": "mamba2",
        "linear_key_heads": keys.needed("n_groups", "mamba_n_groups"),
        "linear_value_heads": keys.needed("mamba_num_heads", "mamba_n_heads"),
        "linear_head_dim": keys.needed("ssm_state_size", "mamba_d_state"),
        "linear_value_head_dim": keys.needed("mamba_head_dim", "mamba_d_head"),
        "linear_conv": keys.needed("conv_kernel", "mamba_d_conv"),
        "linear_conv_bias": bool(keys.one("use_conv_bias", "mamba_conv_bias", default=True)),
        # vLLM keeps states in the model's type where a configuration does not say otherwise, those
        # of Nemotron-H in float32.
        "linear_state_bytes_per_value": _width(
            keys, "mamba_ssm_cache_dtype", "float32" if family == "nemotron_h" else "bfloat16"
        ),
    }
    keys.only("mamba_proj_bias", False)
    keys.only("use_bias", False)
    keys.ignore("expand", "mamba_expand")  # heads and their width say the same
    return mamba


def _kda(keys: Keys) -> dict[str, Any]:
    """Fields of Kimi Delta Attention."""
    section = keys.object("linear_attn_config")
    heads, width = section.needed("num_heads"), section.needed("head_dim")
    conv = section.needed("short_conv_kernel_size")
    section.ignore("gate_lower_bound", "full_attn_layers", "kda_layers")
    for name, value in (("num_heads", heads), ("head_dim", width), ("conv_kernel_dim", conv)):
        keys.only(f"linear_{name}", value)
    keys.ignore("linear_lower_bound")
    return {
        "linear_kind": "kda",
        "linear_key_heads": heads,
        "linear_value_heads": heads,
        "linear_head_dim": width,
        "linear_gate_rank": 0 if section.get("use_full_rank_gate") else width,
        "linear_conv": conv,
    }


def _width(keys: Keys, key: str, default: str) -> int:
    """Return the bytes of a value of a state."""
    kind = str(keys.get(key, default))
    if kind not in ("float32", "bfloat16", "float16"):
        raise keys.refusal(f"{key} {kind!r:.40}", "float32, bfloat16, float16")
    return 4 if kind == "float32" else 2


def _sinks(keys: Keys, family: str) -> str:
    sliding = bool(keys.get("add_swa_attention_sink_bias", family == "gpt_oss"))
    full = bool(keys.get("add_full_attention_sink_bias", family == "gpt_oss"))
    return {(False, False): "none", (True, False): "sliding", (False, True): "full"}.get(
        (sliding, full), "all"
    )


def _qk_norm(keys: Keys, family: str) -> str:
    if family.startswith(("qwen3", "gemma3", "gemma4", "muse", "step3p")):
        keys.ignore("qk_norm_type", "use_qk_norm")
        return "per_head"
    if family in ("olmoe", "minimax_m2"):
        keys.ignore("qk_norm_type", "use_qk_norm")
        return "full_width"
    kind = keys.get("qk_norm_type")
    if not keys.get("use_qk_norm"):
        return "none"
    if kind not in (None, "per_head", "per_layer"):
        raise keys.refusal(f"qk_norm_type {kind!r:.40}", "per_head, per_layer")
    return "full_width" if kind == "per_layer" else "per_head"


def _bias(keys: Keys, family: str) -> str:
    said = keys.one("attention_bias", "qkv_bias")
    if family in ("gpt_oss", "phimoe"):
        return "none" if said is False else "all"
    if family.startswith("qwen2"):
        return "none" if said is False else "qkv"
    if family.startswith("ernie"):
        said = keys.get("use_bias")
    if not said:
        return "none"
    return "all" if family in ("llama", "mistral", "qwen3", "qwen3_5", "qwen3_5_text") else "qkv"
