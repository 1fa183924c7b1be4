"""Time of one MoE layer from the tiles of its kernel: vLLM's Triton ``fused_moe``.

It multiplies blocks of ``block_m`` rows of one expert by ``block_n`` columns of its weights, read
whole whatever part of the rows is real::

    t(tokens, distinct) = floor + max(reads * read, blocks * compute)
    read    = bytes of an expert / bandwidth(tile)
    compute = block_m * FLOPs of a token on one expert / FLOP/s

Blocks run in groups of ``group_m`` on the same columns: those of one expert in a group read its
weights once (:func:`weight_reads`). Which tile runs depends on the tokens, CUDA graphs' padding
included: a tuned file of the layer (:func:`tuned_tiles`), or the default's changes at 33, 65, 97
and 513 tokens (:func:`default_tile`). So does ``bandwidth``: weights come in no faster than the
loads of as many workgroups as local memory holds. A step may get **faster** with more tokens."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from eldr_sim.arrays import Floats
from eldr_sim.kernel_profiles.kernels.moe_latency import MoELatency
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.rounding import each
from eldr_sim.kernel_profiles.shipped_data import shipped_json


class Tile(NamedTuple):
    """The block that a workgroup of the kernel computes."""

    block_m: int  #: rows of one expert
    block_n: int  #: columns of its weights
    block_k: int  #: of the inner dimension, at a time
    group_m: int = 1  #: blocks that run one after the other on the same columns

    @property
    def local_bytes(self) -> int:
        """Return the local memory of one stage: a tile of activations and one of weights."""
        return 2 * self.block_k * (self.block_m + self.block_n)


#: Tokens from which each of vLLM's default tiles runs (``get_default_config`` of
#: vllm/model_executor/layers/fused_moe/fused_moe.py since pull request 34846, February 2026,
#: unquantized and FP8 per tensor).
DEFAULT_TILES = {
    1: Tile(16, 64, 128),
    33: Tile(32, 64, 128),
    65: Tile(32, 128, 64),
    97: Tile(64, 128, 64),
    513: Tile(128, 128, 64),
}


TUNED_FILES = "vLLM 0.32.0's tuned files"
"""The version of the tuned files in ``data/moe_tiles.json``."""


def default_tile(tokens: int) -> Tile:
    """Return the tile that vLLM takes for a number of tokens without a tuned file."""
    return DEFAULT_TILES[max(first for first in DEFAULT_TILES if first <= max(tokens, 1))]


def tuned_tiles(gpu: str, experts: int, intermediate: int) -> dict[int, Tile]:
    """Return the tiles of vLLM's tuned file for a bfloat16 layer by tokens, or none. ``experts``,
    ``intermediate``: on a GPU, and columns of one there."""
    found = shipped_json("moe_tiles")["bfloat16"].get(gpu, {}).get(f"{experts},{intermediate}", {})
    return {int(tokens): Tile(*tile) for tokens, tile in found.items()}


def first_tokens(entries: Iterable[int]) -> list[int]:
    """Return from which tokens on each entry is the nearest, the lower of two that are as near."""
    return [1, *((low + high) // 2 + 1 for low, high in pairwise(entries))]


def workgroups(tile: Tile, local_bytes: int) -> int:
    """Return the workgroups that fit into a compute unit's local memory, one stage each: with
    ``num_stages`` 2, vLLM's on ROCm, the next waits in registers."""
    return max(1, local_bytes // tile.local_bytes)


def expert_blocks(rows: ArrayLike, distinct: ArrayLike, block_m: ArrayLike) -> Floats:
    """Expected blocks of ``block_m`` rows that ``rows`` token-expert pairs fill. Rows per expert
    are taken as geometric with the mean ``r = rows / distinct``, so an expert fills ``1 / (1 - (1 -
    1 / r) ** block_m)`` blocks: one, as long as its rows rarely exceed a block."""
    pairs, experts, size = (np.asarray(x, dtype=np.float64) for x in (rows, distinct, block_m))
    mean = np.maximum(pairs / np.maximum(experts, 1e-9), 1.0)
    missed = size * each(math.log1p, -1.0 / np.maximum(mean, 1 + 1e-12))
    return np.asarray(experts / -each(math.expm1, missed))


def weight_reads(blocks: Floats, distinct: ArrayLike, group_m: ArrayLike) -> Floats:
    """Expected reads of an expert's weights in groups of ``group_m``: a group ends after each block
    but the last with the chance ``1 / group_m``, and the next reads again."""
    again = 1.0 - 1.0 / np.asarray(group_m, dtype=np.float64)
    return np.asarray(blocks - (blocks - np.asarray(distinct, dtype=np.float64)) * again)


@dataclass(frozen=True, eq=False)
class TiledMoE(MoELatency):
    """One MoE layer by the tiles of its kernel."""

    #: int64 [tiles]: tokens from which each tile runs, ascending from 1.
    first_tokens: Floats = field(default_factory=lambda: np.ones(1))
    #: int64 [tiles]: its rows.
    block_m: Floats = field(default_factory=lambda: np.full(1, 16.0))
    group_m: Floats = field(default_factory=lambda: np.ones(1))  #: its blocks to a group
    #: float64 [tiles]: seconds of one expert's weights under each tile.
    read_s: Floats = field(default_factory=lambda: np.zeros(1))
    pair_s: float = 0.0  #: seconds to compute one token on one expert

    def _form_s(self, batch: Floats, distinct: Floats) -> Floats:
        """Seconds by the tiles."""
        tokens, experts = np.broadcast_arrays(batch, distinct)
        tile = np.clip(np.searchsorted(self.first_tokens, tokens, side="right") - 1, 0, None)
        size = self.block_m[tile]
        # A token that reaches fewer experts than it picks has the others on other ranks.
        blocks = expert_blocks(np.maximum(tokens * self.top_k, experts), experts, size)
        read_s = weight_reads(blocks, experts, self.group_m[tile]) * self.read_s[tile]
        compute_s = blocks * (size * self.pair_s)
        return np.asarray(self.expert_s[0] + np.maximum(read_s, compute_s), dtype=np.float64)

    def on_rank(self, n_ranks: int) -> MoELatency:
        """Return this layer as one of ``n_ranks`` GPUs computes it: tiles by the tokens of all
        ranks, its share of the experts and of the pairs."""
        if n_ranks == 1:
            return self
        own = self.n_experts // n_ranks
        return replace(
            self, n_experts=own, top_k=self.top_k / n_ranks, expert_s=self.expert_s[: own + 1]
        )


class TritonRates(NamedTuple):
    """How fast Triton's MoE kernels read weights on a GPU, by their tiles."""

    reference: Tile  #: where ``bandwidth`` holds; under others it goes with their `workgroups`
    bandwidth: float  #: of bfloat16 weights, bytes/s
    local_bytes: int  #: local memory of a compute unit
    most_bandwidth: float  #: of any tile, bytes/s: what tuned kernels reach
    mxfp4_bandwidth: float  #: of MXFP4 weights in ``triton_kernels``, whose tiles do not change
    mxfp4_block_m: int  #: rows of its blocks
    floor_s: float  #: a layer's other kernels: the gate's top-k, sort, activation, sum
    source: str  #: where the figures come from

    def tile_bandwidth(self, tile: Tile) -> float:
        """Return the bytes/s of weights under a tile: in proportion to the loads in flight."""
        flying = workgroups(tile, self.local_bytes) * tile.block_n * tile.block_k
        size = self.reference.block_n * self.reference.block_k
        return self.bandwidth * flying / (workgroups(self.reference, self.local_bytes) * size)

    def tuned_bandwidth(self, tile: Tile, tokens: int) -> float:
        """Return the bytes/s under the best tile for a number of tokens, at least the default's."""
        found = max(self.tile_bandwidth(tile), self.tile_bandwidth(default_tile(tokens)))
        return min(found, self.most_bandwidth)


TRITON = {
    "MI300X": TritonRates(
        reference=Tile(32, 64, 128),
        bandwidth=9.437e6 * 14.27 / 63e-6,
        local_bytes=65536,
        most_bandwidth=3.78e12,
        mxfp4_bandwidth=13.22e6 / (7.4e-6 * 119 / 79),
        mxfp4_block_m=32,
        floor_s=63e-6,
        source=(
            "derived from public figures without a row of ELDR's artifact: a layer has 7 small "
            "kernels of 9 us (roofline.MI300X); by ELDR Fig. 2 (16 to 128 experts at batch 64: "
            "4.7x) that floor is worth 14.27 experts under the tile of 64 rows, 2.1 TB/s; other "
            "tiles by the workgroups that 64 KiB of local memory hold (3 for 2 at 32 rows and "
            "less), at most 3.78 TB/s, AITER's; MXFP4: 7.4 us an expert from GPT-OSS-120B on one "
            "MI300X, vLLM 0.17, 64 to 128 streams (SemiAnalysisAI/InferenceX pull request 1061), "
            "times 119 / 79 us, the regression of Triton 3.7.1 on gfx942 (ROCm/triton issue 970)"
        ),
    )
}
"""By GPU; others are read at what their tuned kernels reach."""


def tiled_moe(
    n_experts: int,
    top_k: int,
    floor_s: float,
    tiles: Mapping[int, tuple[int, int, float]],
    pair_s: float,
) -> TiledMoE:
    """Make a layer with a kernel that changes its tile. ``floor_s``: seconds of its other kernels;
    ``tiles``: by the tokens from which a tile runs, lowest first: rows, blocks to a group, seconds
    to read one expert's weights; ``pair_s``: seconds to compute one token on one expert."""
    block_m, group_m, read_s = (
        np.array(column, dtype=np.float64) for column in zip(*tiles.values(), strict=True)
    )
    return TiledMoE(
        n_experts=n_experts,
        top_k=top_k,
        expert_s=floor_s + read_s.max() * np.arange(n_experts + 1.0),
        batch_knots=np.array([0.0, 1024.0]),
        batch_s=np.zeros(2),
        token_s=top_k * pair_s,
        first_tokens=np.array(list(tiles), dtype=np.float64),
        block_m=block_m,
        group_m=group_m,
        read_s=read_s,
        pair_s=pair_s,
    )


def triton_moe(
    model: ModelDims, rates: TritonRates, pair_s: float, tuned: Mapping[int, Tile] | None = None
) -> TiledMoE | None:
    """Return a layer under vLLM's tiles, ``tuned`` or default; None where its type has none."""
    size = model.bytes_per_expert
    if model.expert_dtype == "mxfp4":
        tiles = {1: (rates.mxfp4_block_m, 1, size / rates.mxfp4_bandwidth)}
    elif model.expert_dtype != "bfloat16":
        return None
    elif tuned:
        tiles = {
            first: (tile.block_m, tile.group_m, size / rates.tuned_bandwidth(tile, tokens))
            for first, (tokens, tile) in zip(first_tokens(tuned), tuned.items(), strict=True)
        }
    else:
        tiles = {
            first: (tile.block_m, tile.group_m, size / rates.tile_bandwidth(tile))
            for first, tile in DEFAULT_TILES.items()
        }
    return tiled_moe(model.n_experts, model.top_k, rates.floor_s, tiles, pair_s)
