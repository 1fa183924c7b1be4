"""Attention by torch's scaled dot product: decode, whole prompts, and chunks after cached tokens.

A decode step's query heads that share a KV head are one group of query rows against that head's
keys: grouped-query attention without copying keys, in every back end. A sliding window is read
as just the window in decode; whole prompts are cut into blocks of one window that attend to
themselves and the block before. Attention sinks are left out: one term of a softmax."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from eldr_sim.kernel_profiles.profile.device import Device
from eldr_sim.kernel_profiles.profile.timing import Call, randn, require_torch, rotation

KERNEL_SOURCE = "torch_sdpa"


def attend(query: Any, key: Any, value: Any, mask: Any = None, causal: bool = False) -> Any:
    """Scaled dot-product attention; tensors [batch, heads, tokens, dim], KV heads may be fewer."""
    grouped = query.shape[1] != key.shape[1]
    return require_torch().nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped
    )


def kv_bytes(shape: Mapping[str, int], batch: int, context: int) -> int:
    """Bytes of keys and values that a decode step reads."""
    window = shape["window"] or context
    return 4 * batch * min(context, window) * shape["n_kv_heads"] * shape["head_dim"]


def decode_rounds(
    shape: Mapping[str, int], batch: int, context: int, device: Device
) -> Sequence[Sequence[Call]]:
    """Calls of one layer's attention in a decode step; context counts the new token."""
    heads, kv_heads, dim = shape["n_heads"], shape["n_kv_heads"], shape["head_dim"]
    read = min(context, shape["window"] or context)
    touched = kv_bytes(shape, batch, context)
    calls, _ = rotation(touched, touched, device.cache_bytes)
    tensor = partial(randn, device.torch_device)
    query = tensor(batch, kv_heads, heads // kv_heads, dim)
    caches = [
        (tensor(batch, kv_heads, read, dim), tensor(batch, kv_heads, read, dim))
        for _ in range(calls)
    ]
    return [[partial(attend, query, key, value) for key, value in caches]]


def prefill_rounds(
    shape: Mapping[str, int], batch: int, tokens: int, device: Device
) -> Sequence[Sequence[Call]]:
    """Calls of one layer's attention over whole prompts, causal."""
    heads, kv_heads, dim = shape["n_heads"], shape["n_kv_heads"], shape["head_dim"]
    window = shape["window"]
    touched = 2 * batch * tokens * (2 * heads + 2 * kv_heads) * dim
    calls, _ = rotation(touched, touched, device.cache_bytes)
    made = []
    for _ in range(min(calls, 8)):
        query, key, value = (
            randn(device.torch_device, batch, tokens, count, dim)
            for count in (heads, kv_heads, kv_heads)
        )
        run = sliding_prefill if window and tokens > window else full_prefill
        made.append(partial(run, query, key, value, window))
    return [made]


def full_prefill(query: Any, key: Any, value: Any, window: int = 0) -> Any:
    """Causal attention; tensors [batch, tokens, heads, dim], grouped KV heads."""
    out = attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=True)
    return out.transpose(1, 2)


def sliding_prefill(query: Any, key: Any, value: Any, window: int) -> Any:
    """Causal attention to the last ``window`` tokens, the own one included. Blocks of one window
    attend to themselves and the block before, so work grows with ``tokens * window``."""
    torch = require_torch()
    batch, tokens, n_heads, dim = query.shape
    blocks = -(-tokens // window)
    pad = (0, 0, 0, 0, 0, blocks * window - tokens)

    def cut(tensor: Any) -> Any:
        tensor = torch.nn.functional.pad(tensor, pad)
        return tensor.view(batch, blocks, window, tensor.shape[2], dim)

    def with_before(tensor: Any) -> Any:
        before = torch.nn.functional.pad(tensor[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
        return torch.cat([before, tensor], dim=2).flatten(0, 1).transpose(1, 2)

    rows = torch.arange(window, device=query.device)[:, None]
    columns = torch.arange(-window, window, device=query.device)[None, :]
    near = (columns <= rows) & (columns > rows - window)
    first = near & (columns >= 0)  # the first block has none before it
    mask = torch.stack([first] + [near] * (blocks - 1)).repeat(batch, 1, 1)[:, None]
    q, k, v = cut(query), cut(key), cut(value)
    out = attend(q.flatten(0, 1).transpose(1, 2), with_before(k), with_before(v), mask)
    return out.transpose(1, 2).reshape(batch, blocks * window, n_heads, dim)[:, :tokens]


def chunk_rounds(
    shape: Mapping[str, int], tokens: int, context: int, device: Device
) -> Sequence[Sequence[Call]]:
    """Calls of one full layer's attention of ``tokens`` new tokens; ``context`` counts the cache,
    too."""
    require_torch()
    from torch.nn.attention.bias import causal_lower_right

    heads, kv_heads, dim = shape["n_heads"], shape["n_kv_heads"], shape["head_dim"]
    tensor = partial(randn, device.torch_device, 1)
    mask = causal_lower_right(tokens, context)
    query = tensor(heads, tokens, dim)
    touched = kv_bytes(shape, 1, context)
    calls, _ = rotation(touched, touched, device.cache_bytes)
    made = []
    for _ in range(min(calls, 8)):
        key, value = (tensor(kv_heads, context, dim) for _ in range(2))
        made.append(partial(attend, query, key, value, mask))
    return [made]
