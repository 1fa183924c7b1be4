"""Dense parts of a layer: GEMMs, and the norms, rotary embedding and KV writes between them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.profile.device import Device
from eldr_sim.kernel_profiles.profile.timing import Call, randn, require_torch, rotation

EPSILON = 1e-6


def gemm_rounds(m: int, n: int, k: int, device: Device) -> Sequence[Sequence[Call]]:
    """Calls of ``[m, k] x [k, n]`` in bfloat16, each with a separate matrix."""
    linear = require_torch().nn.functional.linear
    calls, _ = rotation(2 * n * k, 2 * n * k, device.cache_bytes)
    x = randn(device.torch_device, m, k)
    return [[partial(linear, x, randn(device.torch_device, n, k)) for _ in range(calls)]]


class Elementwise:
    """What a layer does between its GEMMs, for a fixed number of tokens: two residual additions
    with RMS norm, norms of queries and keys, rotary embedding, and the write to the KV cache. Two
    Triton kernels on a GPU, torch's on the CPU."""

    def __init__(self, model: ModelDims, tokens: int, device: Device) -> None:
        torch = require_torch()
        self.device, self.model = device, model
        self.heads = model.n_heads + 2 * model.n_kv_heads
        self.hidden, self.dim = model.hidden_size, model.head_dim

        def tensor(*size: int, dtype: Any = torch.bfloat16) -> Any:
            return torch.randn(*size, dtype=dtype, device=device.torch_device)

        self.x, self.residual = tensor(tokens, self.hidden), tensor(tokens, self.hidden)
        self.qkv = tensor(tokens, self.heads, self.dim)
        self.cache = tensor(tokens, 2 * model.n_kv_heads, self.dim)
        self.weight, self.head_weight = tensor(self.hidden), tensor(self.dim)
        self.cos, self.sin = (tensor(4096, self.dim // 2, dtype=torch.float32) for _ in range(2))
        self.position = torch.randint(4096, (tokens,), device=device.torch_device)

    @property
    def touched(self) -> int:
        """Bytes read and written."""
        return int(2 * (4 * self.x.numel() + 2 * self.qkv.numel()))

    def norm(self) -> Any:
        """One residual addition with RMS norm."""
        if not self.device.is_cpu:
            import triton

            from eldr_sim.kernel_profiles.profile import triton_kernels

            triton_kernels.add_rms_norm_kernel[(len(self.x),)](
                self.x,
                self.residual,
                self.weight,
                self.hidden,
                EPSILON,
                BLOCK=triton.next_power_of_2(self.hidden),
                num_warps=8,
            )
            return self.x
        self.residual.add_(self.x)
        norm = require_torch().nn.functional.rms_norm
        return norm(self.residual, (self.hidden,), self.weight, EPSILON)

    def rotate(self) -> Any:
        """Norm and rotary embedding of queries and keys; keys and values go to the cache."""
        normed = self.model.qk_norm == "per_head"
        if not self.device.is_cpu:
            import triton

            from eldr_sim.kernel_profiles.profile import triton_kernels

            triton_kernels.rotary_kernel[(len(self.x), self.heads)](
                self.qkv,
                self.cache,
                self.cos,
                self.sin,
                self.head_weight,
                self.position,
                self.heads,
                self.model.n_heads,
                EPSILON,
                DIM=self.dim,
                HALF=triton.next_power_of_2(self.dim // 2),
                NORM=normed,
                num_warps=1,
            )
            return self.qkv
        torch = require_torch()
        turned = self.model.n_heads + self.model.n_kv_heads
        both = self.qkv[:, :turned]
        if normed:
            both = torch.nn.functional.rms_norm(both, (self.dim,), self.head_weight, EPSILON)
        low, high = both.float().chunk(2, dim=-1)
        cos, sin = self.cos[self.position][:, None], self.sin[self.position][:, None]
        turn = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
        turn = turn.to(self.x.dtype)
        self.cache[:, : self.model.n_kv_heads].copy_(turn[:, self.model.n_heads :])
        self.cache[:, self.model.n_kv_heads :].copy_(self.qkv[:, turned:])
        return turn

    def __call__(self) -> None:
        """Run one layer's part."""
        self.norm()
        self.rotate()
        self.norm()


def elementwise_rounds(model: ModelDims, tokens: int, device: Device) -> Sequence[Sequence[Call]]:
    """Calls of one layer's elementwise kernels for ``tokens`` tokens."""
    first = Elementwise(model, tokens, device)
    calls, _ = rotation(first.touched, first.touched, device.cache_bytes)
    return [[first, *(Elementwise(model, tokens, device) for _ in range(min(calls, 8) - 1))]]
