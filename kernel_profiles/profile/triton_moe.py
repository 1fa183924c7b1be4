"""The fused MoE layer in Triton: top-k, sort, grouped GEMMs with SiLU, weighted sum.

Made for decode, where a layer is bound by reading its experts' weights: every weight tile is
streamed once, for blocks of 16 slots of one expert; several thread blocks a multiprocessor and
three to five pipeline stages keep enough bytes in flight. The few tile shapes of
:data:`DECODE_TILES` are tried on the device before measuring; larger batches take larger blocks.

Written against Triton's portable language: the same code is for NVIDIA and AMD. What it has run on
is said in docs/profiling.md."""

import os
from dataclasses import dataclass
from typing import Any

import triton

from eldr_sim.kernel_profiles.profile import triton_kernels as kernels
from eldr_sim.kernel_profiles.profile.timing import require_torch
from eldr_sim.kernel_profiles.profile.weights import ExpertWeights, Matrices, MoEShape

KERNEL_SOURCE = "eldr_sim_triton_fused_moe"


@dataclass(frozen=True)
class Tile:
    """Block sizes and launch options of a grouped GEMM."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


DECODE_TILES = (
    Tile(16, 64, 128, 4, 3),
    Tile(16, 32, 128, 4, 4),
    Tile(16, 64, 64, 4, 5),
    Tile(16, 128, 64, 4, 4),
    Tile(16, 128, 128, 8, 3),
    Tile(16, 32, 64, 2, 5),
)
"""Tried for few tokens an expert."""

PREFILL_TILES = (Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 8, 3), Tile(128, 64, 64, 8, 3))
"""Tried for many."""


def tile_class(batch: int, shape: MoEShape) -> str:
    """``decode`` or ``prefill``: which tiles suit the tokens that an expert gets in the mean."""
    return "decode" if batch * shape.top_k <= 24 * shape.n_experts else "prefill"


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class TritonMoE:
    """Buffers and launches of one (shape, batch) on a device; both tiles have one ``block_m``."""

    def __init__(
        self, shape: MoEShape, batch: int, device: str, up_tile: Tile, down_tile: Tile
    ) -> None:
        torch = require_torch()
        if up_tile.block_m != down_tile.block_m:
            raise ValueError("both GEMMs work on the same blocks of slots")
        self.shape, self.batch = shape, batch
        self.up_tile, self.down_tile = up_tile, down_tile
        pairs = self.n_pairs = batch * shape.top_k
        block_m = up_tile.block_m
        self.max_blocks = min(pairs, shape.owned + pairs // block_m)
        slots = self.max_blocks * block_m

        def empty(size: tuple[int, ...], dtype: Any) -> Any:
            return torch.empty(size, dtype=dtype, device=device)

        self.ids = empty((batch, shape.top_k), torch.int32)
        self.pair_weight = empty((batch, shape.top_k), torch.float32)
        self.slots = empty((slots,), torch.int32)
        self.block_expert = empty((self.max_blocks,), torch.int32)
        self.n_blocks = empty((1,), torch.int32)
        self.activated = empty((slots, shape.intermediate), torch.bfloat16)
        self.pairs = empty((pairs, shape.hidden), torch.bfloat16)
        self.out = empty((batch, shape.hidden), torch.bfloat16)
        rocm = torch.version.hip is not None
        self._most_stages = 2 if rocm else 8  # AMD's pipeliner, and 64 KB of shared memory
        capable = torch.cuda.is_available() and not rocm
        self._native_fp8 = capable and torch.cuda.get_device_capability() >= (8, 9)

    def poison(self) -> None:
        """Fill every buffer that a run must write with NaN, or with ids that do not exist."""
        for buffer in (self.pair_weight, self.activated, self.pairs, self.out):
            buffer.fill_(float("nan"))
        for buffer in (self.ids, self.slots, self.block_expert, self.n_blocks):
            buffer.fill_(1 << 20)

    def route(self, logits: Any) -> None:
        """Pick every token's experts and sort the pairs by expert."""
        shape = self.shape
        kernels.top_k_kernel[(self.batch,)](
            logits,
            self.ids,
            self.pair_weight,
            shape.n_experts,
            TOP_K=shape.top_k,
            K_PAD=triton.next_power_of_2(shape.top_k),
            E_PAD=triton.next_power_of_2(shape.n_experts),
            num_warps=1,
        )
        kernels.align_kernel[(shape.owned,)](
            self.ids,
            self.slots,
            self.block_expert,
            self.n_blocks,
            self.n_pairs,
            shape.owned,
            BLOCK_M=self.up_tile.block_m,
            E_PAD=triton.next_power_of_2(shape.owned + 1),
            CHUNK=128 if self.n_pairs <= 128 else 1024,
            num_warps=4,
        )

    def _gemm(self, a: Any, matrices: Matrices, out: Any, n: int, tile: Tile, gated: bool) -> None:
        decode = {"bfloat16": 0, "fp8_block": 2, "mxfp4": 3}[matrices.dtype]
        stored = matrices.stored
        if decode == 2 and self._native_fp8:
            decode, stored = 1, stored.view(require_torch().float8_e4m3fn)
        kernels.expert_kernel[(self.max_blocks * triton.cdiv(n, tile.block_n),)](
            a,
            stored,
            matrices.scales,
            out,
            self.slots,
            self.block_expert,
            self.n_blocks,
            self.pair_weight,
            self.n_pairs,
            self.max_blocks,
            n,
            matrices.k,
            stored.stride(0),
            matrices.scales.stride(0),
            matrices.scales.shape[2],
            TOP_K=self.shape.top_k,
            GATED=gated,
            DECODE=decode,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            UPCAST=interpreted(),
            num_warps=tile.warps,
            num_stages=min(tile.stages, self._most_stages),
        )

    def experts_up(self, x: Any, weights: ExpertWeights) -> None:
        """Gate and up matrices with SiLU, by slots."""
        self._gemm(x, weights.up, self.activated, self.shape.intermediate, self.up_tile, True)

    def experts_down(self, weights: ExpertWeights) -> None:
        """Down matrices, weighted, by pairs."""
        self._gemm(
            self.activated, weights.down, self.pairs, self.shape.hidden, self.down_tile, False
        )

    def combine(self) -> None:
        """Sum every token's pairs."""
        shape = self.shape
        kernels.sum_kernel[(self.batch, triton.cdiv(shape.hidden, 1024))](
            self.pairs, self.ids, self.out, shape.hidden, shape.owned, TOP_K=shape.top_k, BLOCK=1024
        )

    def __call__(self, x: Any, logits: Any, weights: ExpertWeights) -> Any:
        """Run the layer behind its gate; returns bfloat16 [batch, hidden], overwritten by the next
        run. ``x``: bfloat16 [batch, hidden]; ``logits``: float32 [batch, n_experts]; ``weights``:
        of the experts on this device."""
        self.route(logits)
        self.experts_up(x, weights)
        self.experts_down(weights)
        self.combine()
        return self.out
