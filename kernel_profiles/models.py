"""Dimensions of models, MoE or dense (``data/models.json``, with sources), and derived counts."""

import math
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles import checkpoints
from eldr_sim.kernel_profiles.model_names import matching, nearest, says_bf16
from eldr_sim.kernel_profiles.shipped_data import shipped_json
from eldr_sim.kernel_profiles.stored_weights import WeightDtype, stored_bytes

KVDtype = Literal["bfloat16", "fp8"]
#: What a matrix is part of: attention, linear attention, or a dense or shared MLP.
MatrixPart = Literal["attention", "state", "mlp"]
LONGEST = 2**24  #: tokens of the longest context: tables have a row for each


class ModelDims(BaseModel):
    """All of a model that decides bytes and FLOPs, without multi-token prediction and vision."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  #: short name, as accepted by :func:`load_model`
    hf_id: str = ""  #: Hugging Face repository id, empty for a model read from a file
    n_layers: int = Field(ge=1, le=1024)  #: transformer layers
    #: Layers with a dense MLP in place of experts: first ones, every other (Llama 4) or all.
    n_dense_layers: int = Field(default=0, ge=0)
    #: Layers with neither experts nor an MLP (Nemotron-H: its blocks are one or the other).
    n_bare_layers: int = Field(default=0, ge=0)
    hidden_size: int = Field(ge=1)  #: width of the residual stream
    #: Routed experts per MoE layer; 0 where the model is dense.
    n_experts: int = Field(default=0, ge=0, le=65536)
    top_k: int = Field(default=0, ge=0)  #: routed experts per token
    #: Inner width of one routed expert.
    expert_intermediate_size: int = Field(default=0, ge=0)
    #: Width of what routed experts read and write where it is not ``hidden_size`` (latent experts:
    #: two matrices of a layer project to it and back); 0 otherwise.
    expert_hidden_size: int = Field(default=0, ge=0)
    #: Whether experts and MLPs have three matrices (gate, up and down), or two.
    gated_mlp: bool = True
    #: Inner width of the MLP of a dense layer; 0 when there is none.
    dense_intermediate_size: int = Field(default=0, ge=0)
    #: Combined inner width of the always-on experts; 0 when there is none.
    shared_intermediate_size: int = Field(default=0, ge=0)
    shared_expert_gate: bool = False  #: whether a learnt sigmoid gate scales the shared expert
    expert_bias: bool = False  #: whether the expert matrices carry biases
    float32_gate: bool = False  #: whether engines compute the gate in float32
    #: Parameters of the MoE gate per layer besides its matrix (bias, scales).
    router_extra_params: int = 0
    vocab_size: int = Field(ge=1)  #: rows of the embedding
    tie_word_embeddings: bool = False  #: whether lm_head shares the embedding
    lm_head_bias: bool = False  #: whether lm_head has a bias
    max_position_embeddings: int = Field(ge=1, le=LONGEST)  #: longest context
    #: Grouped-query (multi-head included) or multi-head latent attention.
    attention: Literal["gqa", "mla"] = "gqa"
    kv_cache_dtype: KVDtype = "bfloat16"  #: type of the KV cache
    n_heads: int = Field(ge=1)  #: query heads
    n_kv_heads: int = Field(ge=1)  #: key and value heads
    head_dim: int = Field(ge=1)  #: width of a head (MLA: of a query head, nope plus rope)
    #: Key and value heads of full-attention layers where they differ (Gemma 4); 0 otherwise.
    global_n_kv_heads: int = 0
    global_head_dim: int = 0  #: head width of full-attention layers where it differs; 0 otherwise
    #: Whether full-attention layers project K and V by one matrix (both are still cached).
    global_shared_kv_projection: bool = False
    #: Window of the sliding layers, tokens (Llama 4: its chunks, at most); 0: none.
    sliding_window: int = 0
    n_sliding_layers: int = 0  #: layers that attend only to the window
    sliding_n_heads: int = 0  #: query heads of sliding layers where they differ; 0 otherwise
    #: Layers that keep a state in place of KV: Gated DeltaNet (arXiv 2412.06464), Kimi Delta
    #: Attention (arXiv 2510.26692) or Mamba-2 (arXiv 2405.21060).
    n_linear_layers: int = 0
    linear_kind: Literal["gdn", "kda", "mamba2"] = "gdn"  #: which of them
    linear_key_heads: int = 0  #: query and key heads; Mamba-2: groups of B and C,
    linear_value_heads: int = 0  #: value heads, each with its own state,
    linear_head_dim: int = 0  #: width of keys; Mamba-2: ``ssm_state_size``,
    linear_value_head_dim: int = 0  #: width of values where it differs; 0 otherwise,
    linear_gate_rank: int = 0  #: KDA: rank of the gate of the output, 0 for a whole matrix,
    linear_conv: int = 0  #: tokens that the convolution before them reads,
    linear_conv_bias: bool = False  #: and whether it has a bias,
    linear_state_bytes_per_value: Literal[2, 4] = 4  #: and bytes of a value of the state
    attention_gate: bool = False  #: whether a gate as wide as the queries scales what heads return
    qk_norm: Literal["none", "per_head", "full_width"] = "none"  #: RMS norm on queries and keys
    #: Biases on the QKV projections, or on these and the output projection.
    attention_bias: Literal["none", "qkv", "all"] = "none"
    #: Layers with a learnt sink logit per head.
    attention_sinks: Literal["none", "sliding", "full", "all"] = "none"
    q_lora_rank: int = 0  #: MLA: rank of the query compression, 0 for none
    kv_lora_rank: int = 0  #: MLA: rank of the KV compression
    qk_nope_head_dim: int = 0  #: MLA: query-key width without rotary embedding
    qk_rope_head_dim: int = 0  #: MLA: query-key width with rotary embedding
    v_head_dim: int = 0  #: value width per head: of MLA; of others where it differs, 0 otherwise
    #: Sparse attention (DeepSeek-V3.2, arXiv 2512.02556; MiniMax-M3): cached tokens that a query
    #: attends to, 0 for all; ``index_heads`` of ``index_head_dim`` choose them by index keys.
    index_topk: int = 0
    index_heads: int = 0
    index_head_dim: int = 0
    n_sparse_layers: int = 0  #: full layers that choose where others attend to all; 0: every one
    n_index_layers: int = 0  #: layers with an indexer, whose choice the others share; 0: every one
    index_pool: int = Field(default=1, ge=1)  #: tokens that share an index key (GLM-5.3-Flash)
    index_bits: Literal[8, 16] = 8  #: of a value of the index keys; FP8 has a scale beside them
    #: Compressed attention (DeepSeek-V4): a cached entry stands for this many tokens, in this many
    #: layers; queries of the layers that compress least choose entries by ``index_topk``, those of
    #: the others attend to all.
    compressed_layers: tuple[tuple[int, int], ...] = ()
    #: Latest tokens that layers of compressed attention keep whole, too.
    local_window: int = 0
    output_groups: int = 0  #: of heads, each projected to ``output_rank`` first; 0: none
    output_rank: int = 0
    norms_per_layer: int = 2  #: norm vectors of width ``hidden_size`` per layer
    norm_bias: bool = False  #: whether norms carry a bias (LayerNorm)
    #: Streams of the residual that learnt matrices mix before and after attention and MLP
    #: (hyper-connections, arXiv 2409.19606; DeepSeek-V4 and GLM-5.3-Flash); 0: one plain residual.
    hyper_connections: int = 0
    #: Layers whose outputs are summed to one that later layers attend to (attention residuals,
    #: Kimi-K3); 0: none.
    residual_block: int = 0
    #: Storage of routed experts; ``fp8`` has one scale a tensor, ``fp8_block`` one a block.
    expert_dtype: WeightDtype = "bfloat16"
    #: Storage of the matrices of attention, and of all other ones but embedding, lm_head and MoE
    #: gate, which are bfloat16.
    linear_dtype: WeightDtype = "bfloat16"
    mlp_dtype: WeightDtype | None = None  #: of dense and shared MLPs where it differs
    state_dtype: WeightDtype | None = None  #: of the matrices of linear attention where it differs
    head_dtype: WeightDtype = "bfloat16"  #: of lm_head
    #: Parameter count that the publisher states; 0 when unknown.
    published_total_params: float = 0.0
    #: Active parameter count that the publisher states; conventions differ. 0 when unknown.
    published_active_params: float = 0.0
    source: str = ""  #: where the configuration comes from
    published_source: str = ""  #: where the published counts come from

    @model_validator(mode="after")
    def _check_combinations(self) -> "ModelDims":
        if self.top_k > self.n_experts:
            raise ValueError(f"top_k {self.top_k} of {self.n_experts} experts")
        routed = (self.n_experts, self.top_k, self.expert_intermediate_size)
        without = self.n_dense_layers + self.n_bare_layers
        if without > self.n_layers or any(routed) != (self.n_moe_layers > 0):
            raise ValueError(f"n_dense_layers {self.n_dense_layers} of {self.n_layers} layers")
        if any(routed) and not all(routed):
            raise ValueError(f"{self.n_experts} experts, top_k {self.top_k}, of width {routed[2]}")
        if self.n_sliding_layers > self.n_layers:
            raise ValueError(f"n_sliding_layers {self.n_sliding_layers} of {self.n_layers} layers")
        if self.n_linear_layers and self.n_linear_layers >= self.n_layers - self.n_sliding_layers:
            raise ValueError(f"n_linear_layers {self.n_linear_layers} of {self.n_layers} layers")
        linear = (self.linear_key_heads, self.linear_value_heads, self.linear_head_dim)
        if any(linear) != (self.n_linear_layers > 0) or any(linear) != all(linear):
            raise ValueError(f"{self.n_linear_layers} linear layers of heads {linear}")
        if bool(self.n_sliding_layers) != bool(self.sliding_window):
            raise ValueError("n_sliding_layers and sliding_window go together")
        index = (self.index_topk, self.index_heads, self.index_head_dim)
        if any(index) != all(index):
            raise ValueError(f"index_topk, heads and width {index}")
        for name in ("n_sparse_layers", "n_index_layers"):
            if not 0 <= getattr(self, name) <= (self.n_full_layers if self.index_topk else 0):
                raise ValueError(f"{name} {getattr(self, name)} of {self.n_full_layers} layers")
        compressed = sum(layers for _, layers in self.compressed_layers)
        if self.compressed_layers and (compressed != self.n_full_layers or not self.index_topk):
            raise ValueError(f"compressed_layers {compressed} of {self.n_full_layers} layers")
        return self

    @property
    def is_dense(self) -> bool:
        """Whether no layer has routed experts."""
        return not self.n_experts

    @property
    def n_moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.n_layers - self.n_dense_layers - self.n_bare_layers

    @property
    def n_full_layers(self) -> int:
        """Layers that attend to the whole context."""
        return self.n_layers - self.n_sliding_layers - self.n_linear_layers

    @property
    def n_choosing_layers(self) -> int:
        """Layers of sparse attention, of those that attend to the whole context."""
        return (self.n_sparse_layers or self.n_full_layers) if self.index_topk else 0

    @property
    def n_indexers(self) -> int:
        """Layers that have an indexer and cache its keys."""
        if self.compressed_layers:
            return min(self.compressed_layers)[1]
        return (self.n_index_layers or self.n_choosing_layers) if self.index_topk else 0

    @property
    def expert_width(self) -> int:
        """Width of what a routed expert reads and writes."""
        return self.expert_hidden_size or self.hidden_size

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an expert or MLP."""
        return 3 if self.gated_mlp else 2

    def dtype_of(self, part: MatrixPart) -> WeightDtype:
        """Storage of a part's matrices."""
        own = {"attention": None, "state": self.state_dtype, "mlp": self.mlp_dtype}[part]
        return own or self.linear_dtype

    @property
    def attention_kinds(self) -> list[tuple[bool, int]]:
        """Whether layers attend to a window, and how many; without those of linear attention."""
        kinds = ((True, self.n_sliding_layers), (False, self.n_full_layers))
        return [(sliding, layers) for sliding, layers in kinds if layers]

    # -- parameters -----------------------------------------------------------------------------

    def heads(self, sliding: bool) -> tuple[int, int, int]:
        """Query heads, KV heads and head width of a sliding or a full layer."""
        if not sliding and self.global_head_dim:
            return self.n_heads, self.global_n_kv_heads, self.global_head_dim
        heads = (self.sliding_n_heads if sliding else 0) or self.n_heads
        return heads, self.n_kv_heads, self.head_dim

    def value_width(self, sliding: bool) -> int:
        """Width of a head's values in a sliding or a full layer."""
        return self.v_head_dim or self.heads(sliding)[2]

    def attention_linears(self, sliding: bool = False) -> list[tuple[int, int]]:
        """Matrices of a layer's attention as vLLM fuses them: (out features n, in features k)."""
        hidden = self.hidden_size
        if self.attention == "mla":
            nope, rope, rank = self.qk_nope_head_dim, self.qk_rope_head_dim, self.kv_lora_rank
            heads, value = self.n_heads, self.v_head_dim
            query = (
                [(self.q_lora_rank, hidden), (heads * (nope + rope), self.q_lora_rank)]
                if self.q_lora_rank
                else [(heads * (nope + rope), hidden)]
            )
            latent = [(rank + rope, hidden), (heads * (nope + value), rank)]
            output = [(hidden, heads * value)]
            if self.output_groups:
                latent, width = latent[:1], self.output_groups * self.output_rank
                output = [(width, heads * value // self.output_groups), (hidden, width)]
            gate = [(heads * value, hidden)] if self.attention_gate else []
            return [*query, *latent, *output, *gate]
        heads, kv_heads, width = self.heads(sliding)
        value = self.value_width(sliding)
        keys = kv_heads * (width if self.global_shared_kv_projection and not sliding else
                           width + value)  # fmt: skip
        gate_width = heads * value if self.attention_gate else 0
        return [(heads * width + keys + gate_width, hidden), (hidden, heads * value)]

    @property
    def index_linears(self) -> list[tuple[int, int]]:
        """Matrices of one indexer (out features n, in features k): queries, key, and the weights of
        heads, which MiniMax-M3 has not."""
        if not self.index_topk:
            return []
        hidden, queries = self.hidden_size, self.index_heads * self.index_head_dim
        if self.attention == "mla":
            return [(queries, self.q_lora_rank), (self.index_head_dim, hidden),
                    (self.index_heads, hidden)]  # fmt: skip
        return [(queries + self.index_head_dim, hidden)]

    @property
    def linear_widths(self) -> tuple[int, int]:
        """Features of the keys and of the values of a layer of linear attention."""
        values = self.linear_value_heads * (self.linear_value_head_dim or self.linear_head_dim)
        return self.linear_key_heads * self.linear_head_dim, values

    @property
    def linear_attention_linears(self) -> list[tuple[int, int]]:
        """Matrices of one layer of linear attention (out features n, in features k).

        Gated DeltaNet: queries, keys, values and the gate of the output in one, decay and write
        strength of each value head in one (``vllm/model_executor/models/qwen3_next.py``). KDA has
        a decay for each channel by a matrix of the rank of a head, its gate by one of
        ``linear_gate_rank`` (``vllm/model_executor/layers/kda.py``). Mamba-2: gate, values, B, C
        and the step of each head in one (``mamba_mixer2.py``)."""
        keys, values = self.linear_widths
        hidden, heads, width = self.hidden_size, self.linear_value_heads, self.linear_head_dim
        output = (hidden, values)
        if self.linear_kind == "mamba2":
            return [(2 * (keys + values) + heads, hidden), output]
        if self.linear_kind == "gdn":
            return [(2 * (keys + values), hidden), (2 * heads, hidden), output]
        rank = self.linear_gate_rank
        gate = [(values, rank)] if rank else []
        whole = 2 * keys + values + (0 if rank else values)
        return [(whole, hidden), (heads + width + rank, hidden), (values, width), *gate, output]

    @property
    def _convolved(self) -> int:
        """Features that the convolution of a layer of linear attention runs over."""
        keys, values = self.linear_widths
        return 2 * keys + values

    @property
    def _state_params(self) -> int:
        """Parameters of one layer of linear attention."""
        params = sum(n * k for n, k in self.linear_attention_linears)
        params += self._convolved * (self.linear_conv + self.linear_conv_bias)
        heads, (_, values) = self.linear_value_heads, self.linear_widths
        match self.linear_kind:
            case "gdn":  # decay, bias of the step, norm
                return params + 2 * heads + self.linear_head_dim
            case "kda":  # a bias of the step for each channel
                return params + heads + values + self.linear_head_dim
            case "mamba2":  # decay, skip, bias of the step, norm
                return params + 3 * heads + values

    @property
    def matrices(self) -> list[tuple[MatrixPart, int, list[tuple[int, int]]]]:
        """Matrices that every token passes, but MoE gate, embedding and lm_head: what they are part
        of, how many layers have them, and those of one layer as vLLM fuses them, (out features n,
        in features k)."""
        shapes: list[tuple[MatrixPart, int, list[tuple[int, int]]]] = [
            ("attention", n, self.attention_linears(sliding)) for sliding, n in self.attention_kinds
        ]
        shapes.append(("attention", self.n_indexers, self.index_linears))
        if self.n_linear_layers:
            shapes.append(("state", self.n_linear_layers, self.linear_attention_linears))
        shapes.append(("mlp", self.n_moe_layers, self.shared_linears))
        shapes.append(("mlp", self.n_dense_layers, self._mlp(self.dense_intermediate_size)))
        hidden = self.hidden_size
        if self.expert_hidden_size:
            latent = self.expert_hidden_size
            shapes.append(("mlp", self.n_moe_layers, [(latent, hidden), (hidden, latent)]))
        return [one for one in shapes if one[1] and one[2]]

    @property
    def shared_linears(self) -> list[tuple[int, int]]:
        """Matrices of the shared experts of one MoE layer, (out features n, in features k)."""
        return self._mlp(self.shared_intermediate_size)

    def _mlp(self, width: int) -> list[tuple[int, int]]:
        up, hidden = self.mlp_matrices - 1, self.hidden_size
        return [(up * width, hidden), (hidden, width)] if width else []

    def _attention_params(self, sliding: bool) -> int:
        params = sum(n * k for n, k in self.attention_linears(sliding))
        if self.attention == "mla":
            return params + self.q_lora_rank + self.kv_lora_rank
        heads, kv_heads, width = self.heads(sliding)
        if self.attention_bias != "none":
            params += (heads + 2 * kv_heads) * width
            params += self.hidden_size if self.attention_bias == "all" else 0
        sinks = ("all", "sliding" if sliding else "full")
        params += heads if self.attention_sinks in sinks else 0
        if self.qk_norm == "per_head":
            params += 2 * width
        elif self.qk_norm == "full_width":
            params += (heads + kv_heads) * width
        return params

    @property
    def attention_params(self) -> int:
        """Parameters of attention over all layers."""
        own = sum(n * self._attention_params(sliding) for sliding, n in self.attention_kinds)
        # An indexer norms its keys (LayerNorm), MiniMax-M3's its queries and keys.
        index = sum(n * k for n, k in self.index_linears) + 2 * self.index_head_dim
        state = self.n_linear_layers * self._state_params if self.n_linear_layers else 0
        return own + self.n_indexers * index + state

    @property
    def params_per_expert(self) -> int:
        """Parameters of one routed expert: its matrices and their biases."""
        bias = 2 * self.expert_intermediate_size + self.hidden_size if self.expert_bias else 0
        return self.mlp_matrices * self.expert_width * self.expert_intermediate_size + bias

    @property
    def embedding_params(self) -> int:
        """Parameters of the input embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def lm_head_params(self) -> int:
        """Parameters of lm_head that are not shared with the embedding."""
        own = 0 if self.tie_word_embeddings else self.embedding_params
        return own + (self.vocab_size if self.lm_head_bias else 0)

    @property
    def _hyper_connection_params(self) -> int:
        """Parameters that mix the streams of the residual: before and after attention and MLP of
        each layer a matrix from all streams to the weights of reading, writing and mixing them, and
        one before lm_head (DeepSeek-V4's ``inference/model.py``)."""
        streams = self.hyper_connections
        if not streams:
            return 0
        mixes, width = streams * (streams + 2), streams * self.hidden_size
        sites = 2 * self.n_layers - self.n_bare_layers
        return sites * (mixes * width + mixes + 3) + streams * width + streams + 1

    @property
    def _always_on_params(self) -> int:
        """Parameters that every token touches, but embedding and lm_head."""
        hidden = self.hidden_size
        gate = self.n_moe_layers * (hidden * self.n_experts + self.router_extra_params)
        gate += self.n_moe_layers * hidden if self.shared_expert_gate else 0
        mlps = sum(
            layers * n * k
            for part, layers, linears in self.matrices
            for n, k in linears
            if part == "mlp"
        )
        norms = self.norms_per_layer * self.n_layers - self.n_bare_layers + 1
        norms *= hidden * (2 if self.norm_bias else 1)
        return self.attention_params + gate + mlps + norms + self._hyper_connection_params

    @property
    def total_params(self) -> int:
        """All parameters."""
        experts = self.n_moe_layers * self.n_experts * self.params_per_expert
        return self._always_on_params + experts + self.embedding_params + self.lm_head_params

    @property
    def active_params(self) -> int:
        """Parameters that one token touches, embedding and lm_head included."""
        experts = self.n_moe_layers * self.top_k * self.params_per_expert
        return self._always_on_params + experts + self.embedding_params + self.lm_head_params

    # -- bytes ----------------------------------------------------------------------------------

    @property
    def bytes_per_expert(self) -> int:
        """Bytes of one routed expert as stored, scales and biases included."""
        matrix, matrices = (self.expert_intermediate_size, self.expert_width), self.mlp_matrices
        bias = 2 * (self.params_per_expert - matrices * math.prod(matrix))
        return matrices * stored_bytes(*matrix, self.expert_dtype) + bias

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as stored."""
        total = 2 * (self._always_on_params + self.embedding_params + self.lm_head_params)
        total += self.n_moe_layers * self.n_experts * self.bytes_per_expert
        for part, layers, linears in self.matrices:
            dtype = self.dtype_of(part)
            if dtype != "bfloat16":
                stored = sum(stored_bytes(n, k, dtype) - 2 * n * k for n, k in linears)
                total += layers * stored
        if not self.tie_word_embeddings:
            head = self.vocab_size, self.hidden_size
            total += stored_bytes(*head, self.head_dtype) - 2 * math.prod(head)
        return total

    def cached_bytes_per_token(self, sliding: bool) -> int:
        """Bytes that one token inside the window adds to the KV cache of all layers of a kind."""
        value = 1 if self.kv_cache_dtype == "fp8" else 2
        layers = self.n_sliding_layers if sliding else self.n_full_layers
        if self.attention == "mla":
            entry: float = self.latent_bytes
        else:
            entry = value * self.heads(sliding)[1] * (self.heads(sliding)[2]
                                                      + self.value_width(sliding))  # fmt: skip
        if sliding:
            return round(layers * entry)
        if self.compressed_layers:
            layers, entry = 1, entry * sum(n / ratio for ratio, n in self.compressed_layers)
        return round(layers * entry + self._index_key_bytes * self.n_indexers)

    @property
    def latent_bytes(self) -> int:
        """Bytes of a cached latent; of compressed attention, FP8 values with their scales beside
        bfloat16 ones of the rotary embedding (vLLM 0.32, ``vllm/models/deepseek_v4/attention.py``).
        """
        if self.kv_cache_dtype != "fp8":
            return 2 * (self.kv_lora_rank + self.qk_rope_head_dim)
        if self.compressed_layers:
            return self.kv_lora_rank + 8 + 2 * self.qk_rope_head_dim
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def index_key_bytes(self) -> int:
        """Bytes of an index key: FP8 and a scale, or bfloat16."""
        return self.index_head_dim + 4 if self.index_bits == 8 else 2 * self.index_head_dim

    def kv_bytes_per_token_layer(self, sliding: bool = False) -> float:
        """Bytes that one token adds to one layer's KV cache, the mean of the layers of a kind."""
        layers = self.n_sliding_layers if sliding else self.n_full_layers
        return self.cached_bytes_per_token(sliding) / layers if layers else 0.0

    @property
    def _index_key_bytes(self) -> float:
        """Bytes of a token's share of an index key in a layer that has one."""
        if not self.index_topk:
            return 0.0
        ratio, _ = min(self.compressed_layers, default=(1, 0))
        return self.index_key_bytes / self.index_pool / ratio

    @property
    def index_bytes_per_token(self) -> float:
        """Bytes of a token's index keys, the mean of the layers without a window."""
        return self._index_key_bytes * self.n_indexers / max(self.n_full_layers, 1)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache of one token inside every window, over all layers."""
        return self.cached_bytes_per_token(True) + self.cached_bytes_per_token(False)

    @property
    def n_kv_tensors(self) -> int:
        """Regions of memory of the KV cache: K and V of every layer; MLA keeps one latent."""
        return (self.n_layers - self.n_linear_layers) * (1 if self.attention == "mla" else 2)

    @property
    def layer_state_bytes(self) -> int:
        """Bytes that a sequence keeps in one layer of linear attention, however long it is. A
        matrix for each value head, and the tokens that the next convolution reads, in bfloat16."""
        keys, width = self.linear_head_dim, self.linear_value_head_dim or self.linear_head_dim
        state = self.linear_value_heads * keys * width * self.linear_state_bytes_per_value
        return state + 2 * self._convolved * max(self.linear_conv - 1, 0)

    @property
    def state_bytes(self) -> int:
        """Bytes that a sequence keeps whatever its length: states of linear attention, and with
        compressed attention the latest tokens as they are."""
        local = self.local_window * self.latent_bytes
        return self.n_linear_layers * self.layer_state_bytes + self.n_full_layers * local

    def kv_bytes(self, context: int) -> int:
        """Bytes of KV cache of ``context`` tokens; sliding layers keep their window, as in vLLM."""
        return self.state_bytes + sum(
            min(context, self.sliding_window if sliding else context)
            * self.cached_bytes_per_token(sliding)
            for sliding, _ in self.attention_kinds
        )


@lru_cache(maxsize=1)
def _registry() -> dict[str, ModelDims]:
    return {entry["name"]: ModelDims(**entry) for entry in shipped_json("models")["models"]}


@lru_cache(maxsize=1)
def _spellings() -> dict[str, tuple[str, str]]:
    return {name: (name, dims.hf_id or name) for name, dims in _registry().items()}


def list_models() -> list[str]:
    """Names of the models that ship with the package."""
    return list(_registry())


@lru_cache(maxsize=32)
def _checkpoint(name: str) -> ModelDims | None:
    """Return a checkpoint of `checkpoints`, None for other names."""

    def shipped(wanted: str) -> dict[str, Any] | None:
        found = matching(wanted, _spellings())
        return _registry()[found].model_dump() if found else None

    fields = checkpoints.fields_of(name, shipped_json("checkpoints"), shipped)
    return None if fields is None else ModelDims(**fields)


def load_model(name: str | os.PathLike[str]) -> ModelDims:
    """Return the dimensions of a model.

    Args:
        name: a preset, a Hugging Face id (`model_names`), or the path of a ``config.json`` or of
            its folder, with ModelOpt's ``hf_quant_config.json`` beside it.

    Returns:
        Dimensions and data types of all parts of the model.

    Raises:
        InputError: ``name`` is neither a known model nor a readable configuration.
    """
    path, registry = Path(name), _registry()
    # A file is a configuration, and so is a folder that has one, whatever they are called.
    on_disk = path.is_file() or (path / "config.json").is_file()
    if not on_disk and (known := matching(os.fspath(name), _spellings())) is not None:
        dims, said = registry[known], os.fspath(name)
        plain = {dims.expert_dtype, dims.linear_dtype} == {"bfloat16"}
        if (plain or not says_bf16(said)) and not checkpoints.requantized(said, dims.hf_id):
            return dims
    if not on_disk and (checkpoint := _checkpoint(os.fspath(name))) is not None:
        return checkpoint
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        from eldr_sim.kernel_profiles.hf_config.fields import hf_fields  # of no preset

        try:
            return ModelDims(**hf_fields(path))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "model"
            raise InputError("model", f"{path}: {where}: {first['msg']}") from None
        except (TypeError, ArithmeticError) as error:
            raise InputError("model", f"{path}: invalid field: {error}") from None
    near = " or ".join(nearest(os.fspath(name), registry))
    problem = f"unknown model {os.fspath(name)!r}" + (f": did you mean {near}?" if near else "")
    allowed = "a name of `eldr-sim models`, or the path of a Hugging Face config.json"
    raise InputError("model", problem, allowed)
