"""Which layers of a configuration attend how, and which have experts."""

from typing import Any, Literal, NamedTuple

from eldr_sim.kernel_profiles.hf_config.keys import Keys

Mixer = Literal["full", "sliding", "state"]  #: how tokens of a layer see others
MLP = Literal["dense", "moe", "none"]  #: what a layer has after that

_MIXERS: dict[str, Mixer] = {
    "full_attention": "full", "attention": "full", "deepseek_sparse_attention": "full",
    "sliding_attention": "sliding", "chunked_attention": "sliding", "linear_attention": "state",
    "mamba": "state",
}  # fmt: skip
_MLPS: dict[str, MLP] = {"dense": "dense", "sparse": "moe", "0": "dense", "1": "moe"}
_BLOCKS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}  # of Nemotron-H


class Layers(NamedTuple):
    """The layers of a model, in order."""

    mixers: list[Mixer]
    mlps: list[MLP]


def layers_of(keys: Keys, family: str, routed: bool) -> Layers:
    """Return a model's layers. ``routed``: whether it has experts."""
    if family == "nemotron_h":
        return _blocks(keys)
    n = keys.n_layers()
    return Layers(_mixers(keys, family, n), _mlps(keys, family, n, routed))


def _named(keys: Keys, key: str, values: list[Any], known: dict[str, Any]) -> list[Any]:
    for value in values:
        if str(value) not in known:
            raise keys.refusal(f"{key} {value!r:.40}", ", ".join(known))
    return [known[str(value)] for value in values]


def _blocks(keys: Keys) -> Layers:
    """Layers of Nemotron-H, whose blocks are Mamba-2, attention, experts or an MLP: one of the last
    two belongs to the layer before it."""
    blocks = keys.get("layers_block_type")
    if blocks is None:
        pattern = keys.needed("hybrid_override_pattern")
        blocks = _named(keys, "hybrid_override_pattern", list(pattern), _BLOCKS)
    n = keys.get("num_hidden_layers", len(blocks))
    if n != len(blocks):
        raise keys.refusal(f"num_hidden_layers {n} for {len(blocks)} blocks")
    mixers: list[Mixer] = []
    mlps: list[MLP] = []
    for block in blocks:
        if block in ("mamba", "attention"):
            mixers.append(_MIXERS[block])
            mlps.append("none")
        elif block not in ("moe", "mlp"):
            raise keys.refusal(f"block {block!r:.40}", "mamba, attention, moe, mlp")
        elif not mlps or mlps[-1] != "none":
            raise keys.refusal(f"two blocks of {block!r:.40} after one another", "one a layer")
        else:
            mlps[-1] = "moe" if block == "moe" else "dense"
    return Layers(mixers, mlps)


def _mixers(keys: Keys, family: str, n: int) -> list[Mixer]:
    window = keys.one("sliding_window", "sliding_window_size")
    types = keys.per_layer("layer_types", n)
    if types is not None:
        keys.ignore("full_attention_interval", "sliding_window_pattern", "max_window_layers",
                    "use_sliding_window", "_sliding_window_pattern")  # fmt: skip
        return _named(keys, "layer_types", types, _MIXERS)
    pattern = keys.per_layer("hybrid_layer_pattern", n)  # MiMo-V2
    if pattern is not None:
        known: dict[str, Mixer] = {"0": "full", "1": "sliding"}
        return _named(keys, "hybrid_layer_pattern", pattern, known)
    kinds = keys.per_layer("attn_type_list", n)  # MiniMax
    if kinds is not None:
        return _named(keys, "attn_type_list", kinds, {"1": "full"})
    if family == "kimi_linear":
        keeps = set(keys.object("linear_attn_config").needed("kda_layers"))
        return ["state" if layer + 1 in keeps else "full" for layer in range(n)]
    if family.startswith(("qwen3_5", "qwen3_next")):
        every = keys.get("full_attention_interval", 4)
        return ["state" if (layer + 1) % every else "full" for layer in range(n)]
    if family.startswith("gemma3"):
        every = keys.get("sliding_window_pattern", 6)
        return ["sliding" if (layer + 1) % every else "full" for layer in range(n)]
    if family.startswith("llama4"):
        # No rotary embedding in every fourth layer, and no chunks (transformers' default).
        return ["full" if (layer + 1) % 4 == 0 else "sliding" for layer in range(n)]
    if family.startswith("deepseek_v4"):
        ratios = keys.per_layer("compress_ratios", n) or keys.needed("compress_ratios")
        return ["full" if ratio else "sliding" for ratio in ratios]
    if family == "mistral" and window:
        return ["sliding"] * n
    used = bool(keys.get("use_sliding_window"))
    first = int(keys.get("max_window_layers", n))
    if not (family.startswith(("qwen2", "qwen3")) and window and used):
        keys.ignore("sliding_window", "max_window_layers", "use_sliding_window")
        return ["full"] * n
    return ["sliding" if layer >= first else "full" for layer in range(n)]


def _mlps(keys: Keys, family: str, n: int, routed: bool) -> list[MLP]:
    if not routed:
        keys.ignore("mlp_only_layers", "decoder_sparse_step")
        return ["dense"] * n
    found = [one for one in _mlp_rules(keys, family, n) if one is not None]
    for one in found[1:]:
        if one != found[0]:
            raise keys.refusal("its keys disagree on which layers have experts")
    return found[0] if found else ["moe"] * n


def _mlp_rules(keys: Keys, family: str, n: int) -> list[list[MLP] | None]:
    """Return what each of the keys says that families write for it."""
    rules: list[list[MLP] | None] = []
    types = keys.per_layer("mlp_layer_types", n)
    rules.append(None if types is None else _named(keys, "mlp_layer_types", types, _MLPS))
    if isinstance(keys.get("moe_layer_freq"), list):
        rules.append(_named(keys, "moe_layer_freq", keys["moe_layer_freq"][:n], _MLPS))
    else:
        keys.only("moe_layer_freq", 1)
    if "first_k_dense_replace" in keys:
        first = keys["first_k_dense_replace"]
        rules.append(["dense" if layer < first else "moe" for layer in range(n)])
    if "moe_layers_enum" in keys:  # Step
        listed = {int(layer) for layer in str(keys["moe_layers_enum"]).split(",")}
        rules.append(["moe" if layer in listed else "dense" for layer in range(n)])
    if "moe_layer_start_index" in keys:  # ERNIE
        first, last = keys["moe_layer_start_index"], keys.get("moe_layer_end_index", n - 1)
        if last >= n:
            raise keys.refusal(f"moe_layer_end_index {last} of {n} layers", f"up to {n - 1}")
        last, every = (last if last >= 0 else n - 1), keys.get("moe_layer_interval", 1)
        rules.append(["moe" if first <= layer <= last and (layer + 1) % every == 0 else "dense"
                      for layer in range(n)])  # fmt: skip
    if family.startswith("llama4"):
        every = keys.needed("interleave_moe_layer_step")
        rules.append(["dense" if (layer + 1) % every else "moe" for layer in range(n)])
        keys.only("moe_layers", [at for at, kind in enumerate(rules[-1] or ()) if kind == "moe"])
    step, dense = keys.get("decoder_sparse_step", 1), set(keys.get("mlp_only_layers", ()))
    if step != 1 or dense:  # Qwen
        rules.append(["dense" if layer in dense or (layer + 1) % step else "moe"
                      for layer in range(n)])  # fmt: skip
    return rules
