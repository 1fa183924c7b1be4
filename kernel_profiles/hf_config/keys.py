"""The keys of a configuration: which were read, and which of the others may be left unread."""

import re
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError

MOST_LAYERS = 1024  #: of a model; lists have an entry for each
#: Keys of which no byte and no time of the text model depends: how values are initialised, scaled,
#: scored or rotated, how tokens are sampled, and what the library and other parts of it are.
NEUTRAL = frozenset(
    """
    activation_situ_beta activation_situ_linear_beta add_cross_attention architectures
    attention_dropout attention_multiplier attention_value_scale attn_implementation
    attn_logit_softcapping attn_pdrop attn_scale attn_temperature_tuning auto_map aux_loss_alpha
    base_model_ep_plan base_model_pp_plan base_model_tp_plan cache_implementation chunk_size
    chunk_size_feed_forward cla_share_factor compress_rope_scaling compress_rope_theta
    cross_attention_hidden_size decoder_start_token_id dense_list embd_pdrop embedding_multiplier
    ep_size final_logit_softcapping floor_scale for_llm_compressor freq_allocation
    fuse_attention_ffn fuse_attention_qkv fuse_rms_norm group_limited_greedy hc_eps
    hc_sinkhorn_iters hidden_act hidden_activation hidden_dropout ignore_index image_grid_pinpoints
    index_kpool_always_select_tail index_share_for_mtp_iteration index_skip_topk_offset
    indexer_rope_interleave init_method init_std initial_context_length initializer_range
    input_jitter_noise language_model_only layer_norm_eps layer_norm_epsilon layer_rope_theta
    layernorm_epsilon logit_scale logits_scaling mamba_chunk_size mamba_hidden_act max_length
    mla_use_nope moe_capacity moe_gate moe_group_expert_selection moe_norm_min moe_renormalize
    moe_router_activation moe_router_activation_func moe_router_dtype moe_router_scaling_factor
    moe_shared_expert_overlap moe_use_aux_free mrope_section mtp_hybrid_override_pattern
    mtp_layers_block_type mtp_num_hidden_layers mtp_transformer_layers mtp_use_dedicated_embeddings
    n_group _name_or_path need_fp32_gate no_rope_layers norm_eps norm_expert_weight norm_topk_prob
    norm_type num_expert_group num_hash_layers num_logits_to_keep num_mtp_modules
    num_nextn_predict_layers num_reward_heads org_vocab_size original_max_position_embeddings
    out_hidden_size output_attentions output_gate_type output_hidden_states output_multiplier
    output_router_logits output_scores partial_rotary_factor partial_rotary_factors
    pipeline_parallel_degree pool_type position_embedding_type post_norm_eps prefix pretraining_tp
    qk_scale_factor query_pre_attn_scalar rescale_prenorm_residual resid_pdrop residual_in_fp32
    residual_multiplier rms_norm_eps rope_interleave rope_local_base_freq rope_parameters rope_ratio
    rope_scaling rope_theta rotary_dim routed_scaling_factor router_aux_loss_coef
    router_jitter_noise router_z_loss_coef scoring_func seq_aux sliding_window_theta swa_rope_theta
    swiglu_alpha swiglu_limit swiglu_limits swiglu_limits_shared tensor_parallel_degree
    time_step_floor time_step_limit time_step_max time_step_min time_step_rank tokenizer_class top_k
    topk_group topk_method transformers_version type_vocab_size use_bidirectional_attention
    use_cache use_flash_attention use_flash_attn use_gemma_norm use_grouped_topk use_mamba_kernels
    use_mrope use_mtp use_rope_layers use_routing_bias vocab_size_per_layer_input yarn_only_types
    zero_centered
    """.split()  # noqa: SIM905
)
#: The same, by how names begin or end: other modalities, sampling, and drafts.
_NEUTRAL_NAMES = re.compile(
    r"(^|_)(vision|visual|image|img|video|audio|speech|talker|code2wav|projector|multimodal|mm"
    r"|media|vit|anyres|spatial|temporal|mtp|dspark|id2label|label2id|boi|eoi|boa|eoa|encoder|beam|beams)(_|$)"
    r"|_token_(id|index)s?$|_tokens?_ids?$|^num_return_|no_repeat_ngram_size$"
    r"|_(config_name|penalty|placeholder)$|_(dropout|pdrop|coef|alpha|eps|epsilon|theta)$"
)
#: Words of names of keys that shape attention, caches, experts, weights or layers.
_SHAPING = re.compile(
    r"(^|_)(attn|attention|attend|kv|k|v|q|qk|qkv|key|value|query|cache\w*|heads?|experts?|moe|mlp"
    r"|ffn|ff|feed|router?|routed|routing|gate|gated|topk|share\w*|index\w*|sparse|sparsity"
    r"|window|sliding|swa|local|global|chunk\w*|linear|conv\w*|recurrent|ssm|mamba\w*|delta|gdn|kda"
    r"|mla|dsa|msa|mhc|hc|lora|rank|latent|compress\w*|quant\w*|bits?|dtype|fp4|fp8|int4|int8"
    r"|layers?|blocks?|hybrid|pattern|types?|freq|interval|stride|group\w*|engram|ngram|memory"
    r"|hidden|size|dim|dims|width|intermediate|vocab|state|states|bias|norm|residual|depth|num|n|d"
    r"|o|candidate|pool|kpool|parallel|tie|tied)(_|$)"
)


class Keys:
    """A configuration, or an object within it, that notes which keys are read."""

    def __init__(self, values: dict[str, Any], path: Path, name: str = "") -> None:
        self.values, self.path, self.name = values, path, name
        self._known: set[str] = set()
        #: Keys that nothing depends on in a model like this, beside :data:`NEUTRAL`.
        self.without_effect: set[str] = set()
        self._inner: dict[str, Keys] = {}

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def __getitem__(self, key: str) -> Any:
        self._known.add(key)
        return self.values[key]

    def get(self, key: str, default: Any = None) -> Any:
        """Return a key's value; the default where it is missing or null."""
        self._known.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def one(self, *names: str, default: Any = None) -> Any:
        """Return the value of a key that families name differently; InputError: two disagree."""
        self._known.update(names)
        found = {name: self.values[name] for name in names if self.values.get(name) is not None}
        if not found:
            return default
        first, *others = found.items()
        for name, value in others:
            if value != first[1]:
                raise self.refusal(f"{first[0]} {first[1]!r:.40} but {name} {value!r:.40}")
        return first[1]

    def needed(self, *names: str) -> Any:
        """Return the value of a key that must be there; InputError: it is not."""
        found = self.one(*names)
        if found is None:
            raise InputError("model", f"{self.path} has no {self.name}{names[0]!r}")
        return found

    def n_layers(self) -> int:
        """Return the number of layers; raises InputError before anything is made for each."""
        n = self.needed("num_hidden_layers")
        if type(n) is not int or not 1 <= n <= MOST_LAYERS:
            raise self.refusal(f"num_hidden_layers {n!r:.40}", f"1 to {MOST_LAYERS}")
        return n

    def only(self, key: str, *allowed: Any) -> None:
        """Raise InputError if a key has another value than these; null is always allowed."""
        value = self.get(key)
        self.without_effect.add(key)
        if value is not None and value not in allowed:
            said = ", ".join(str(one).lower() if isinstance(one, bool) else str(one)
                             for one in allowed)  # fmt: skip
            raise InputError("model", f"{self.path}: {self.name}{key} {value!r:.80}", said)

    def ignore(self, *names: str) -> None:
        """Note keys on which nothing depends in a model like this one."""
        self._known.update(names)
        self.without_effect.update(names)

    def object(self, key: str) -> "Keys":
        """Return an object within the configuration; empty where there is none."""
        found = self.get(key, {})
        if not isinstance(found, dict):
            problem = f"{self.path}: {self.name}{key} is {found!r:.80}"
            raise InputError("model", problem, "a JSON object, or none")
        return self._inner.setdefault(key, Keys(found, self.path, f"{self.name}{key}."))

    def per_layer(self, key: str, n_layers: int) -> list[Any] | None:
        """Return the values of a list with one a layer, None where there is none. Those of layers
        beyond the last are of multi-token prediction. Raises InputError: fewer than layers."""
        values = self.get(key)
        if values is None:
            return None
        if not isinstance(values, list | str) or len(values) < n_layers:
            size = f" of {len(values)}" if isinstance(values, list | str) else f" {values!r:.40}"
            raise self.refusal(f"{key}{size} for {n_layers} layers")
        return list(values[:n_layers])

    def refusal(self, problem: str, allowed: str = "") -> InputError:
        """Return the error for a configuration that is not supported."""
        return InputError("model", f"{self.path}: {self.name}{problem}", allowed)

    def check_rest(self, *, strict: bool = False) -> None:
        """Raise InputError if a key was not read and its name says that it shapes the model.
        ``strict``: whatever its name says. Null, false, 0 and empty values switch nothing on."""
        for key, value in self.values.items():
            if key in self._known or key in NEUTRAL or _NEUTRAL_NAMES.search(key):
                continue
            off = value in (None, 0, "", [], {})  # False is 0
            if not off and (strict or _SHAPING.search(key)):
                raise self.refusal(f"{key} {value!r:.60} is not known: it may shape the model")
        for inner in self._inner.values():
            inner.check_rest(strict=True)

    def effective(self) -> list[str]:
        """Return the keys of this object that change bytes or times."""
        return [key for key in self.values
                if key in self._known and key not in self.without_effect | NEUTRAL
                and not _NEUTRAL_NAMES.search(key)]  # fmt: skip
