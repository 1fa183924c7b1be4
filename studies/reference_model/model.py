"""The reference model: a small mixture-of-experts language model of Qwen3-MoE architecture. It
computes what ``transformers.Qwen3MoeForCausalLM`` does (every layer sparse, tied embeddings,
normalised top-k weights), experts over tokens sorted by expert, quick on a CPU, too."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LOSS_SLICE = 192
_ROWS = 8


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of the model."""

    vocab_size: int = 8192
    hidden_size: int = 192
    n_layers: int = 10
    n_heads: int = 6
    n_kv_heads: int = 2
    head_dim: int = 32
    n_experts: int = 128
    top_k: int = 8
    expert_size: int = 48  #: inner dimension of an expert
    context: int = 288  #: longest sequence, tokens; that of training
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6


class Routing(NamedTuple):
    """Output of one layer's gate for ``n`` tokens."""

    logits: Tensor  #: float32 ``[n, n_experts]``
    probabilities: Tensor  #: softmax of the logits, float32 ``[n, n_experts]``
    experts: Tensor  #: int64 ``[n, top_k]``, highest gate weight first


class KVCache:
    """Keys and values of ``batch`` sequences of equal ``length``, at most, of a type and on a
    device."""

    def __init__(
        self, config: ModelConfig, batch: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.n_layers, batch, config.n_kv_heads, length, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.filled = 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append new tokens of one layer and return all of its keys and values."""
        end = self.filled + keys.shape[2]
        self.keys[layer, :, :, self.filled : end] = keys
        self.values[layer, :, :, self.filled : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class _ExpertsFunction(torch.autograd.Function):
    """Experts over tokens sorted by expert, one matrix product an expert: on a CPU much faster than
    ``torch.bmm`` over equal groups and ``grouped_mm``. Rows are padded with zeros to a multiple of
    `_ROWS`: oneDNN compiles a kernel for every number of rows that it meets."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs, ``[n, d]`` in x's dtype."""
        (n, k), (n_experts, d, inner2) = chosen.shape, gate_up.shape
        inner, dtype = inner2 // 2, x.dtype
        flat = chosen.reshape(-1)
        counts = torch.bincount(flat, minlength=n_experts)
        room = (counts + _ROWS - 1) // _ROWS * _ROWS
        order = torch.argsort(flat, stable=True)
        shift = room.cumsum(0) - room - (counts.cumsum(0) - counts)
        place = torch.empty_like(order)  # row of each choice
        place[order] = torch.arange(n * k) + shift[flat[order]]
        groups = _groups(room.tolist())
        rows = groups[-1][2]
        token = torch.full((rows,), n)  # of each row; n is a token of zeros
        token[place] = torch.arange(n * k).div(k, rounding_mode="floor")
        row_weight = torch.zeros(rows, dtype=dtype)
        row_weight[place] = weights.reshape(-1).to(dtype)
        gate_up, down = gate_up.to(dtype), down.to(dtype)

        xs = _with_zeros(x).index_select(0, token)
        h = xs.new_empty(rows, inner2)
        for e, start, end in groups:
            torch.mm(xs[start:end], gate_up[e], out=h[start:end])
        a = F.silu(h[:, :inner]) * h[:, inner:]
        y = xs.new_empty(rows, d)
        for e, start, end in groups:
            torch.mm(a[start:end], down[e], out=y[start:end])
        y = y.index_select(0, place).view(n, k, d)
        ctx.save_for_backward(row_weight, place, token, gate_up, down, xs, h, a, y)
        ctx.groups, ctx.weights_dtype = groups, weights.dtype
        return torch.bmm(weights.to(dtype).unsqueeze(1), y).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weights, gate_up and down."""
        row_weight, place, token, gate_up, down, xs, h, a, y = ctx.saved_tensors
        (n, k, d), inner = y.shape, a.shape[1]
        grad = grads[0].to(xs.dtype)
        d_weights = torch.bmm(y, grad.unsqueeze(2)).squeeze(2).to(ctx.weights_dtype)
        dy = _with_zeros(grad).index_select(0, token) * row_weight.unsqueeze(1)
        da, d_gate_up, d_down = (torch.empty_like(t) for t in (a, gate_up, down))
        for e in set(range(len(down))) - {e for e, _, _ in ctx.groups}:
            d_gate_up[e].zero_()
            d_down[e].zero_()
        for e, start, end in ctx.groups:
            torch.mm(dy[start:end], down[e].t(), out=da[start:end])
            torch.mm(a[start:end].t(), dy[start:end], out=d_down[e])
        gate, up = h[:, :inner], h[:, inner:]
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        dh = torch.empty_like(h)
        torch.mul(da, silu, out=dh[:, inner:])
        torch.mul(da * up, sigmoid + silu * (1 - sigmoid), out=dh[:, :inner])
        dxs = torch.empty_like(xs)
        for e, start, end in ctx.groups:
            torch.mm(dh[start:end], gate_up[e].t(), out=dxs[start:end])
            torch.mm(xs[start:end].t(), dh[start:end], out=d_gate_up[e])
        dx = dxs.index_select(0, place).view(n, k, d).sum(1)
        return dx, d_weights, None, d_gate_up.float(), d_down.float()


def _with_zeros(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1, x.shape[1])])


def _groups(counts: list[int]) -> list[tuple[int, int, int]]:
    """Return (expert, first row, end row) of the experts that have rows."""
    out, start = [], 0
    for e, count in enumerate(counts):
        if count:
            out.append((e, start, start + count))
        start += count
    return out


class _TokenLossFunction(torch.autograd.Function):
    """Mean cross-entropy of tied-embedding logits, a slice of tokens at a time. The logits of a
    slice stay in the CPU's cache; the forward pass computes their gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of hidden states ``[n, d]`` against token ids ``[n]``."""
        low, weight = hidden.bfloat16(), embedding.bfloat16()
        d_hidden = torch.empty_like(low)
        d_embedding = torch.zeros_like(embedding)
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, len(targets), _LOSS_SLICE):
            end = start + _LOSS_SLICE
            p = (low[start:end] @ weight.t()).float()
            p -= p.amax(-1, keepdim=True)
            target = targets[start:end, None]
            total -= p.gather(1, target).sum()
            p.exp_()
            norm = p.sum(-1, keepdim=True)
            total += norm.log().sum()
            p /= norm
            p.scatter_add_(1, target, -torch.ones_like(target, dtype=p.dtype))
            grad = p.bfloat16()
            torch.mm(grad, weight, out=d_hidden[start:end])
            d_embedding += grad.t() @ low[start:end]
        ctx.save_for_backward(d_hidden, d_embedding)
        ctx.n = len(targets)
        return (total / len(targets)).float()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of the hidden states and the embedding."""
        d_hidden, d_embedding = ctx.saved_tensors
        scale = grads[0] / ctx.n
        return d_hidden.float() * scale, d_embedding * scale, None


def _experts_grouped(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Compute what `_ExpertsFunction` computes with grouped matrix products, for GPUs."""
    (n, k), dtype = chosen.shape, x.dtype
    flat = chosen.reshape(-1)
    order = torch.argsort(flat, stable=True)
    ends = torch.bincount(flat, minlength=gate_up.shape[0]).cumsum(0).to(torch.int32)
    xs = x[order.div(k, rounding_mode="floor")]
    gate, up = F.grouped_mm(xs, gate_up.to(dtype), offs=ends).chunk(2, -1)
    y = F.grouped_mm(F.silu(gate) * up, down.to(dtype), offs=ends)
    y = torch.zeros_like(y).index_copy(0, order, y).view(n, k, -1)
    return torch.bmm(weights.to(dtype).unsqueeze(1), y).squeeze(1)


class SparseMLP(nn.Module):
    """Gate and experts of one layer. ``gate_up`` is ``[n_experts, d, 2 * inner]`` (gate columns
    first), ``down`` ``[n_experts, inner, d]``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, inner, experts = config.hidden_size, config.expert_size, config.n_experts
        self.top_k = config.top_k
        self.gate = nn.Linear(d, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, d, 2 * inner) * 0.02)
        self.down = nn.Parameter(
            torch.randn(experts, inner, d) * (0.02 / math.sqrt(2 * config.n_layers))
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """Route float32 tokens ``[n, d]`` and return their output, float32 ``[n, d]``."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        with torch.autocast(kind, enabled=False):
            logits = F.linear(x, self.gate.weight)
            probabilities = F.softmax(logits, -1)
            weights, chosen = probabilities.topk(self.top_k, -1)
            weights = weights / weights.sum(-1, keepdim=True)
            experts = _ExpertsFunction.apply if kind == "cpu" else _experts_grouped
            y = experts(x.to(dtype or self.gate_up.dtype), weights, chosen, self.gate_up, self.down)
        return y.float(), Routing(logits, probabilities, chosen)


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys and rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, size = config.hidden_size, config.head_dim
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, size
        self.q_proj = nn.Linear(d, config.n_heads * size, bias=False)
        self.k_proj = nn.Linear(d, config.n_kv_heads * size, bias=False)
        self.v_proj = nn.Linear(d, config.n_kv_heads * size, bias=False)
        self.o_proj = nn.Linear(config.n_heads * size, d, bias=False)
        self.q_norm = RMSNorm(size, config.norm_eps)
        self.k_norm = RMSNorm(size, config.norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, cache: KVCache | None
    ) -> Tensor:
        """Attend from ``x`` ``[batch, tokens, d]`` to itself and to what is cached."""
        batch, tokens, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, tokens, self.n_heads, self.head_dim))
        k = self.k_norm(self.k_proj(x).view(batch, tokens, self.n_kv_heads, self.head_dim))
        v = self.v_proj(x).view(batch, tokens, self.n_kv_heads, self.head_dim).transpose(1, 2)
        q = _rotate(q.transpose(1, 2), cos, sin).to(v.dtype)
        k = _rotate(k.transpose(1, 2), cos, sin).to(v.dtype)
        if cache is not None:
            k, v = cache.extend(layer, k, v)
            q = q.to(k.dtype)
        if tokens == 1:
            # Heads that share keys take the place of tokens: nothing is masked or copied.
            grouped = q.reshape(batch, self.n_kv_heads, -1, self.head_dim)
            out = F.scaled_dot_product_attention(grouped, k, v)
        else:
            group = self.n_heads // self.n_kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        out = out.reshape(batch, tokens, -1)
        projected: Tensor = self.o_proj(out.to(x.dtype))
        return projected.float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Layer(nn.Module):
    """Attention and experts, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SparseMLP(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, cache: KVCache | None
    ) -> tuple[Tensor, Routing]:
        """Return the residual stream, float32 ``[batch, tokens, d]``, and the routing."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layer, cache)
        h = self.post_attention_layernorm(x)
        y, routing = self.mlp(h.reshape(-1, h.shape[-1]))
        return x + y.view(x.shape), routing


class Qwen3Moe(nn.Module):
    """The whole model; its weights are drawn from torch's global random generator."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        half = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        angle = torch.arange(config.context).float()[:, None] * config.rope_theta**-half
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                scale = math.sqrt(2 * config.n_layers) if "o_proj" in name else 1.0
                nn.init.normal_(weight, std=0.02 / scale)

    def forward(self, ids: Tensor, cache: KVCache | None = None) -> tuple[Tensor, list[Routing]]:
        """Return final hidden states, float32 ``[batch, tokens, d]``, and each layer's routing of
        ``batch * tokens`` tokens. ``ids``: int64 ``[batch, tokens]``, from the first on, or one
        after the cached; ``cache``: keys and values so far, to which the new are appended."""
        start = 0 if cache is None else cache.filled
        cos, sin = (table[start : start + ids.shape[1]] for table in (self.cos, self.sin))
        x = self.embed_tokens(ids).float()
        routing = []
        for i, layer in enumerate(self.layers):
            x, chosen = layer(x, cos, sin, i, cache)
            routing.append(chosen)
        if cache is not None:
            cache.filled += ids.shape[1]
        return self.norm(x), routing

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of final hidden states against the next tokens."""
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        if hidden.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            loss: Tensor = _TokenLossFunction.apply(hidden, self.embed_tokens.weight, targets)
            return loss
        return F.cross_entropy(self.logits(hidden).float(), targets)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the next token's logits, ``[..., vocab_size]``."""
        return F.linear(hidden, self.embed_tokens.weight)
