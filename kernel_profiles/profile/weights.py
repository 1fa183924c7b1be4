"""Expert weights as they are stored: bfloat16, FP8 in blocks, MXFP4; and what they stand for.

- ``fp8_block``: E4M3 bytes, one float32 scale per 128 x 128 block (as DeepSeek-V3 and Qwen3's FP8
  checkpoints have it).
- ``mxfp4``: two E2M1 values a byte, one E8M0 scale byte per 32 columns (OCP Microscaling Formats
  1.0). Byte j of a row holds column j in its low nibble and column j + K / 2 in its high one: a
  reordering at load time, as deployed kernels have theirs.

Random weights are drawn as stored bytes; nothing is ever quantised."""

from dataclasses import dataclass
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.profile.timing import require_torch
from eldr_sim.kernel_profiles.stored_weights import FP8_BLOCK, WeightDtype, stored_bytes

_GROUP = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class MoEShape:
    """One GPU's part of a MoE layer."""

    #: Widths; the intermediate one is the shard's under tensor parallelism.
    hidden: int
    intermediate: int
    #: ``n_experts``, ``top_k``: of the whole layer.
    n_experts: int
    top_k: int
    n_ranks: int = 1  #: GPUs that whole experts are spread over
    dtype: WeightDtype = "bfloat16"  #: storage of the experts

    @property
    def owned(self) -> int:
        """Experts on this GPU."""
        return self.n_experts // self.n_ranks

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's matrices as stored, scales included."""
        sizes = ((2 * self.intermediate, self.hidden), (self.hidden, self.intermediate))
        return sum(stored_bytes(n, k, self.dtype) for n, k in sizes)


@dataclass(frozen=True, eq=False)
class Matrices:
    """The same matrix of all experts."""

    dtype: WeightDtype  #: storage
    stored: Any  #: tensor [experts, n, k]: bfloat16, or bytes (MXFP4: [experts, n, k / 2])
    #: Tensor: float32 [experts, n / 128, k / 128] rounded up, or bytes [experts, n, k / 32]; the
    #: stored weights again where there are no scales.
    scales: Any
    k: int  #: columns

    def dequantized(self, expert: int) -> Any:
        """One expert's matrix, float64 [n, k]."""
        torch = require_torch()
        stored, scales = self.stored[expert], self.scales[expert]
        if self.dtype == "bfloat16":
            return stored.double()
        if self.dtype == "fp8_block":
            n, k = stored.shape
            wide = scales.double().repeat_interleave(FP8_BLOCK, 0)[:n]
            wide = wide.repeat_interleave(FP8_BLOCK, 1)[:, :k]
            return stored.view(torch.float8_e4m3fn).double() * wide
        values = torch.tensor(_E2M1 + tuple(-v for v in _E2M1), dtype=torch.float64)
        values = values.to(stored.device)
        nibbles = torch.cat([stored & 15, stored >> 4], dim=1).long()
        return values[nibbles] * torch.exp2(scales.double() - 127).repeat_interleave(_GROUP, 1)


def random_matrices(
    experts: int, n: int, k: int, dtype: WeightDtype, device: str, generator: Any
) -> Matrices:
    """Draw matrices of values about ``k ** -0.5`` large. Raises InputError: MXFP4 rows must
    be whole groups in both halves: ``k`` divisible by 64."""
    torch = require_torch()
    make: dict[str, Any] = {"device": device, "generator": generator}
    if dtype == "bfloat16":
        stored = torch.empty((experts, n, k), dtype=torch.bfloat16, device=device)
        stored.normal_(0.0, k**-0.5, generator=generator)
        return Matrices(dtype, stored, stored, k)
    if dtype == "fp8_block":
        stored = torch.randint(0, 256, (experts, n, k), dtype=torch.uint8, **make)
        stored.bitwise_and_(0xBF)  # no NaN, nothing from 2 on; subnormal numbers are kept
        blocks = (experts, -(-n // FP8_BLOCK), -(-k // FP8_BLOCK))
        scales = torch.rand(blocks, **make).add_(0.5).mul_(1.5 * k**-0.5)
        return Matrices(dtype, stored, scales, k)
    if k % (2 * _GROUP):
        raise InputError("mxfp4", f"{k} columns", f"a multiple of {2 * _GROUP}")
    stored = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, **make)
    middle = 126 - (k.bit_length() // 2)
    scales = torch.randint(
        middle - 1, middle + 1, (experts, n, k // _GROUP), dtype=torch.uint8, **make
    )
    return Matrices(dtype, stored, scales, k)


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """One copy of a layer's experts: gate and up rows ``[E, 2 I, H]``, down rows ``[E, H, I]``."""

    up: Matrices
    down: Matrices

    @classmethod
    def random(cls, shape: MoEShape, device: str, seed: int) -> "ExpertWeights":
        """Draw the experts that this GPU holds."""
        generator = require_torch().Generator(device=device).manual_seed(seed)
        return cls(
            random_matrices(
                shape.owned, 2 * shape.intermediate, shape.hidden, shape.dtype, device, generator
            ),
            random_matrices(
                shape.owned, shape.hidden, shape.intermediate, shape.dtype, device, generator
            ),
        )


def reference_moe(x: Any, logits: Any, weights: ExpertWeights, shape: MoEShape) -> Any:
    """A MoE layer in float64, one token-expert pair after the other; returns [batch, hidden].

    ``x``: [batch, hidden]; ``logits``: [batch, n_experts] of the gate; their softmax over the
    chosen experts is the weights; ``weights``, ``shape``: experts of rank 0; pairs of other ranks
    contribute nothing."""
    torch = require_torch()
    best, ids = logits.double().topk(shape.top_k, dim=1)
    share = best.softmax(dim=1)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        if expert >= shape.owned:
            continue
        token, pick = (ids == expert).nonzero(as_tuple=True)
        up, down = weights.up.dequantized(expert), weights.down.dequantized(expert)
        gate, value = (x[token].double() @ up.T).chunk(2, dim=1)
        hidden = torch.nn.functional.silu(gate) * value
        out.index_add_(0, token, (hidden @ down.T) * share[token, pick, None])
    return out
