"""Dimensions of models, MoE or dense (``data/models.json`` with sources), and the counts that
follow from them, so that a ``config.json`` alone gets the same treatment."""

import json
import math
import os
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.hf_config import hf_fields

KVDtype = Literal["bfloat16", "fp8"]
WeightDtype = Literal["bfloat16", "fp8", "fp8_block", "mxfp4", "int4", "nvfp4"]
FP8_BLOCK = 128  #: FP8 block scaling: one fp32 scale per 128 x 128 weights
_MXFP4_GROUP = 32  # MXFP4: one scale byte per 32 weights
_NVFP4_GROUP = 16  # NVFP4: one FP8 scale per 16 weights
_INT4_GROUP = 32  # INT4 of compressed-tensors: one bfloat16 scale per 32 weights


LONGEST = 2**24  #: tokens of the longest context: tables have a row for each


class ModelDims(BaseModel):
    """All of a model that decides bytes and FLOPs, without multi-token prediction and vision."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  #: short name, as accepted by :func:`load_model`
    hf_id: str = ""  #: Hugging Face repository id, empty for a model read from a file
    n_layers: int = Field(ge=1, le=1024)  #: transformer layers
    #: Layers with a dense MLP in place of experts: first ones, every other (Llama 4) or all.
    n_dense_layers: int = Field(default=0, ge=0)
    hidden_size: int = Field(ge=1)  #: width of the residual stream
    #: Routed experts per MoE layer; 0 where the model is dense.
    n_experts: int = Field(default=0, ge=0, le=65536)
    top_k: int = Field(default=0, ge=0)  #: routed experts per token
    #: Inner width of one routed expert (gated MLP: three matrices).
    expert_intermediate_size: int = Field(default=0, ge=0)
    #: Inner width of the MLP of a dense layer; 0 when there is none.
    dense_intermediate_size: int = Field(default=0, ge=0)
    #: Combined inner width of the always-on experts; 0 when there is none.
    shared_intermediate_size: int = Field(default=0, ge=0)
    shared_expert_gate: bool = False  #: whether a learnt sigmoid gate scales the shared expert
    expert_bias: bool = False  #: whether the expert matrices carry biases
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
    #: Layers of linear attention (Gated DeltaNet, arXiv 2412.06464): a state in place of KV.
    n_linear_layers: int = 0
    linear_key_heads: int = 0  #: of these layers: query and key heads,
    linear_value_heads: int = 0  #: value heads, each with a state of its own,
    linear_head_dim: int = 0  #: width of all of them,
    linear_conv: int = 0  #: tokens that the convolution before them reads,
    linear_state_bytes_per_value: Literal[2, 4] = 4  #: and bytes of a value of the state
    attention_gate: bool = False  #: whether a gate as wide as the queries scales what heads return
    qk_norm: Literal["none", "per_head", "full_width"] = "none"  #: RMS norm on queries and keys
    #: Biases on the QKV projections, or on these and the output projection.
    attention_bias: Literal["none", "qkv", "all"] = "none"
    attention_sinks: bool = False  #: one learnt sink logit per head
    q_lora_rank: int = 0  #: MLA: rank of the query compression, 0 for none
    kv_lora_rank: int = 0  #: MLA: rank of the KV compression
    qk_nope_head_dim: int = 0  #: MLA: query-key width without rotary embedding
    qk_rope_head_dim: int = 0  #: MLA: query-key width with rotary embedding
    v_head_dim: int = 0  #: MLA: value width per head
    #: Sparse attention (DeepSeek-V3.2, arXiv 2512.02556): cached tokens that a query attends to, 0
    #: for all; ``index_heads`` of ``index_head_dim`` choose them by keys of their own.
    index_topk: int = 0
    index_heads: int = 0
    index_head_dim: int = 0
    #: Compressed attention (DeepSeek-V4): a cached entry stands for so many tokens, in so many
    #: layers; queries of the layers that compress least choose entries by ``index_topk``, those of
    #: the others attend to all.
    compressed_layers: tuple[tuple[int, int], ...] = ()
    output_groups: int = 0  #: of heads, each projected to ``output_rank`` first; 0: none
    output_rank: int = 0
    norms_per_layer: int = 2  #: norm vectors of width ``hidden_size`` per layer
    norm_bias: bool = False  #: whether norms carry a bias (LayerNorm)
    #: Storage of routed experts; ``fp8`` has one scale a tensor, ``fp8_block`` one a block.
    expert_dtype: WeightDtype = "bfloat16"
    #: Storage of all other matrices but embedding, lm_head and MoE gate, which are bfloat16.
    linear_dtype: Literal["bfloat16", "fp8", "fp8_block", "nvfp4"] = "bfloat16"
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
        if self.n_dense_layers > self.n_layers or any(routed) != (self.n_moe_layers > 0):
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
        if any(index) != all(index) or (any(index) and self.attention != "mla"):
            raise ValueError(f"index_topk, heads and width {index} of {self.attention} attention")
        compressed = sum(layers for _, layers in self.compressed_layers)
        if self.compressed_layers and (compressed != self.n_layers or not self.index_topk):
            raise ValueError(f"compressed_layers {compressed} of {self.n_layers} layers")
        return self

    @property
    def is_dense(self) -> bool:
        """Whether no layer has routed experts."""
        return not self.n_experts

    @property
    def n_moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.n_layers - self.n_dense_layers

    @property
    def n_full_layers(self) -> int:
        """Layers that attend to the whole context."""
        return self.n_layers - self.n_sliding_layers - self.n_linear_layers

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
        return self.n_heads, self.n_kv_heads, self.head_dim

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
            index = [(self.index_heads * self.index_head_dim, self.q_lora_rank),
                     (self.index_head_dim, hidden), (self.index_heads, hidden)]  # fmt: skip
            latent = [(rank + rope, hidden), (heads * (nope + value), rank)]
            output = [(hidden, heads * value)]
            if self.output_groups:
                latent, width = latent[:1], self.output_groups * self.output_rank
                output = [(width, heads * value // self.output_groups), (hidden, width)]
            return [*query, *latent, *output, *(index if self.index_topk else ())]
        heads, kv_heads, width = self.heads(sliding)
        projections = 1 if self.global_shared_kv_projection and not sliding else 2
        queries = heads * (1 + self.attention_gate)
        return [((queries + projections * kv_heads) * width, hidden), (hidden, heads * width)]

    @property
    def linear_attention_linears(self) -> list[tuple[int, int]]:
        """Matrices of one layer of linear attention (out features n, in features k). Queries, keys,
        values and the gate of the output in one, decay and write strength of each value head in one
        (``vllm/model_executor/models/qwen3_next.py``)."""
        keys, values = (
            heads * self.linear_head_dim
            for heads in (self.linear_key_heads, self.linear_value_heads)
        )
        hidden = self.hidden_size
        return [
            (2 * (keys + values), hidden),
            (2 * self.linear_value_heads, hidden),
            (hidden, values),
        ]

    @property
    def _convolved(self) -> int:
        """Features that the convolution of a layer of linear attention runs over."""
        return (2 * self.linear_key_heads + self.linear_value_heads) * self.linear_head_dim

    @property
    def attention_layer_linears(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """Layers of each kind, and the matrices of one."""
        kinds = [(n, self.attention_linears(sliding)) for sliding, n in self.attention_kinds]
        linear = self.n_linear_layers
        return kinds + ([(linear, self.linear_attention_linears)] if linear else [])

    def _attention_params(self, sliding: bool) -> int:
        params = sum(n * k for n, k in self.attention_linears(sliding))
        if self.attention == "mla":
            return params + self.q_lora_rank + self.kv_lora_rank + 2 * self.index_head_dim
        heads, kv_heads, width = self.heads(sliding)
        if self.attention_bias != "none":
            params += (heads + 2 * kv_heads) * width
            params += self.hidden_size if self.attention_bias == "all" else 0
        params += heads if self.attention_sinks else 0
        if self.qk_norm == "per_head":
            params += 2 * width
        elif self.qk_norm == "full_width":
            params += (heads + kv_heads) * width
        return params

    @property
    def attention_params(self) -> int:
        """Parameters of attention over all layers."""
        own = sum(n * self._attention_params(sliding) for sliding, n in self.attention_kinds)
        linear = sum(n * k for n, k in self.linear_attention_linears)
        linear += self._convolved * self.linear_conv
        linear += 2 * self.linear_value_heads + self.linear_head_dim  # decay, step bias, norm
        return own + self.n_linear_layers * linear

    @property
    def params_per_expert(self) -> int:
        """Parameters of one routed expert: gate, up and down matrices, and their biases."""
        bias = 2 * self.expert_intermediate_size + self.hidden_size if self.expert_bias else 0
        return 3 * self.hidden_size * self.expert_intermediate_size + bias

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
    def _always_on_params(self) -> int:
        """Parameters that every token touches, but embedding and lm_head."""
        hidden = self.hidden_size
        gate = self.n_moe_layers * (hidden * self.n_experts + self.router_extra_params)
        shared = self.n_moe_layers * 3 * hidden * self.shared_intermediate_size
        shared += self.n_moe_layers * hidden if self.shared_expert_gate else 0
        dense = self.n_dense_layers * 3 * hidden * self.dense_intermediate_size
        norms = (self.norms_per_layer * self.n_layers + 1) * hidden * (2 if self.norm_bias else 1)
        return self.attention_params + gate + shared + dense + norms

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
        weights = 3 * self.hidden_size * self.expert_intermediate_size
        bias = 2 * (self.params_per_expert - weights)
        matrix = self.expert_intermediate_size, self.hidden_size
        return 3 * stored_bytes(*matrix, self.expert_dtype) + bias

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as stored."""
        total = 2 * (self._always_on_params + self.embedding_params + self.lm_head_params)
        total += self.n_moe_layers * self.n_experts * self.bytes_per_expert
        if self.linear_dtype != "bfloat16":
            linears = [pair for n, own in self.attention_layer_linears for pair in n * own]
            linears += self.n_moe_layers * 3 * [(self.shared_intermediate_size, self.hidden_size)]
            linears += self.n_dense_layers * 3 * [(self.dense_intermediate_size, self.hidden_size)]
            total += sum(stored_bytes(n, k, self.linear_dtype) - 2 * n * k for n, k in linears)
        return total

    def kv_bytes_per_token_layer(self, sliding: bool = False) -> int:
        """Bytes that one token adds to one layer's KV cache."""
        value = 1 if self.kv_cache_dtype == "fp8" else 2
        if self.attention == "mla":
            latent = value * (self.kv_lora_rank + self.qk_rope_head_dim)
            if self.compressed_layers:
                latent = round(latent * sum(n / ratio for ratio, n in self.compressed_layers)
                               / self.n_layers)  # fmt: skip
            return latent + self.index_bytes_per_token
        _, kv_heads, width = self.heads(sliding)
        return 2 * value * kv_heads * width

    @property
    def index_bytes_per_token(self) -> int:
        """Bytes of a token's index key in a layer: FP8 and a scale; compressed: the layers'
        mean."""
        key = self.index_head_dim + 4 if self.index_topk else 0
        if not self.compressed_layers:
            return key
        ratio, layers = min(self.compressed_layers)
        return round(key * layers / ratio / self.n_layers)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache of one token inside every window, over all layers."""
        return sum(n * self.kv_bytes_per_token_layer(kind) for kind, n in self.attention_kinds)

    @property
    def n_kv_tensors(self) -> int:
        """Regions of memory of the KV cache: K and V of every layer; MLA keeps one latent."""
        return (self.n_layers - self.n_linear_layers) * (1 if self.attention == "mla" else 2)

    @property
    def state_bytes(self) -> int:
        """Bytes that a sequence keeps in layers of linear attention, however long it is. A matrix
        for each value head, and the tokens that the next convolution reads, in bfloat16."""
        state = self.linear_value_heads * self.linear_head_dim**2
        state *= self.linear_state_bytes_per_value
        return self.n_linear_layers * (state + 2 * self._convolved * max(self.linear_conv - 1, 0))

    def kv_bytes(self, context: int) -> int:
        """Bytes of KV cache of ``context`` tokens; sliding layers keep their window, as in vLLM."""
        return self.state_bytes + sum(
            n * min(context, self.sliding_window if sliding else context)
            * self.kv_bytes_per_token_layer(sliding)
            for sliding, n in self.attention_kinds
        )  # fmt: skip


def stored_bytes(n: int, k: int, dtype: WeightDtype) -> int:
    """Bytes of an n x k matrix as stored, scales included."""
    match dtype:
        case "bfloat16":
            return 2 * n * k
        case "fp8":
            return n * k
        case "fp8_block":
            return n * k + 4 * math.ceil(n / FP8_BLOCK) * math.ceil(k / FP8_BLOCK)
        case "mxfp4":
            return n * k // 2 + n * k // _MXFP4_GROUP
        case "int4":
            return n * k // 2 + 2 * n * k // _INT4_GROUP
        case "nvfp4":
            return n * k // 2 + n * k // _NVFP4_GROUP


def shipped_json(name: str) -> Any:
    """Read ``data/NAME.json`` of this package."""
    return json.loads(resources.files(__package__).joinpath(f"data/{name}.json").read_text())


@lru_cache(maxsize=1)
def _registry() -> dict[str, ModelDims]:
    return {entry["name"]: ModelDims(**entry) for entry in shipped_json("models")["models"]}


def list_models() -> list[str]:
    """Names of the models that ship with the package."""
    return list(_registry())


def load_model(name: str | os.PathLike[str]) -> ModelDims:
    """Dimensions of a shipped model (or its Hugging Face id; case does not matter), or of a
    ``config.json`` on disk or its folder, with ModelOpt's ``hf_quant_config.json`` beside it.
    Raises InputError: neither a known name nor a readable configuration."""
    wanted = os.fspath(name).lower()
    for dims in _registry().values():
        if wanted in (dims.name.lower(), dims.hf_id.lower()):
            return dims
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        try:
            return ModelDims(**hf_fields(path))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "model"
            raise InputError("model", f"{path}: {where}: {first['msg']}") from None
        except (TypeError, ArithmeticError) as error:
            raise InputError("model", f"{path}: a field cannot be: {error}") from None
    raise InputError("model", f"unknown model {os.fspath(name)!r}", ", ".join(list_models()))
