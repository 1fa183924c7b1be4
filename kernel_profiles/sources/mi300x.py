"""MI300X tables, from what is published about it: no public tables cover AMD GPUs.

**Triton's kernels**, which vLLM runs by default, as ELDR's authors measured them: a table for each
of their three models, ``fitted``. The fixed time of a layer, and the time of an expert under
each tile (`kernel_profiles.kernels.tiled_moe`), were fitted to ten round-robin cells each
(median TPOT at 20 to 100 requests/s on two loads, casys-kaist/ELDR, Figs. 10 and 11), with the
union that drawn routing has at the cell's batch and all but MoE layers at its derived time. The
other 150 cells and Figs. 13 to 16 were not used. :data:`PUBLISHED` holds the result;
``studies/eldr_measured/kernel_fit.py`` repeats the fit. Tiles that no cell ran in (97
tokens and more) keep the ratio to their neighbour that
:data:`~eldr_sim.kernel_profiles.kernels.tiled_moe.TRITON` derives.

**AITER's kernels**, which vLLM runs where ``VLLM_ROCM_USE_AITER`` says so: one layer of
Qwen3-30B-A3B, ``derived`` from two sources.

- ELDR (Sec. 3.1, Figure 2): on one MI300X at batch 64, going from 16 to 128 distinct experts
  raises the layer's time 4.7 times.
- ROCm/aiter (MIT, e404860): tuned fused-MoE times on MI300X (304 CUs), bf16, 128 experts, top 8,
  hidden 4096, intermediate 384: an expert of the same bytes and FLOPs. Top-k, sort and reduce
  are not in them.

AITER's rows fit ``13.7 + 2.495 d + 0.155 b`` us, 3.78 TB/s. ELDR's ratio ties the fixed time to
the cost of an expert, ``a + 128 e = 4.7 (a + 16 e)``, hence ``a = 14.27 e``: 35.6 us, of which
AITER shows 13.7. More tokens slow the layer in proportion, by what AITER's rows gain with all
experts. At batch 64 this gives 77.6 us for 16 experts and 365 for 128; AITER's kernels alone take
338."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels.moe_latency import uniform_distinct
from eldr_sim.kernel_profiles.kernels.roofline import moe_latency
from eldr_sim.kernel_profiles.kernels.tiled_moe import TRITON, TiledMoE, tiled_moe, triton_moe
from eldr_sim.kernel_profiles.models import ModelDims, load_model
from eldr_sim.kernel_profiles.tables import format

EXPERT_S = 2.495e-6  #: reading one expert of 9.437 MB (fit to AITER's rows): 3.78 TB/s
FLOOR_S = 14.27 * EXPERT_S  #: the layer's fixed time (ELDR's ratio)
TOKEN_S = 0.155e-6  #: one more token with all experts read, up to batch 128 (fit to AITER's rows)

#: AITER's tuned fused-MoE microseconds by tokens, MI300X, both stages.
AITER_US = {
    1: 34.0571, 2: 52.6583, 4: 84.4321, 8: 147.9434, 16: 218.2396, 32: 302.339, 64: 338.2867,
    128: 351.8764, 256: 356.6064, 512: 412.152, 1024: 525.1645, 2048: 719.6576, 4096: 1277.8145,
    8192: 2220.8408, 16384: 4216.914, 32768: 7767.4427,
}  # fmt: skip


def layer_s(batch: int, distinct: float) -> float:
    """Seconds of one Qwen3-30B-A3B MoE layer on MI300X."""
    tokens = TOKEN_S * min(batch, 128)
    if batch > 128:
        tokens += float(np.interp(batch, list(AITER_US), list(AITER_US.values()))) * 1e-6
        tokens -= AITER_US[128] * 1e-6
    return (FLOOR_S + EXPERT_S * distinct) * (1 + tokens / (FLOOR_S + EXPERT_S * 128))


def aiter_deviation() -> dict[str, float]:
    """How far above AITER's decode rows (random routing, fewer kernels) the formula lies."""
    batches = [batch for batch in AITER_US if batch <= 128]
    distinct = uniform_distinct(batches, 128, 8)
    above = [
        layer_s(batch, float(d)) / (AITER_US[batch] * 1e-6) - 1
        for batch, d in zip(batches, distinct, strict=True)
    ]
    return {"above_aiter_mean": float(np.mean(above)), "above_aiter_max": float(np.max(above))}


def _metadata(model: ModelDims, **source: Any) -> format.TableMetadata:
    """Describe a table of a model's MoE layer on this GPU; ``source``: whose kernel, from where."""
    return format.TableMetadata(
        kind="moe",
        gpu="MI300X",
        shape=format.moe_shape_of(model),
        dtype=format.MOE_DTYPES[model.expert_dtype],
        device="AMD Instinct MI300X",
        **source,
    )


def moe_table() -> format.LatencyTable:
    """The derived table: AITER's batches on the balanced diagonal, and ELDR's two points."""
    model = load_model("Qwen3-30B-A3B")
    points = [(batch, min(model.n_experts, model.top_k * batch)) for batch in AITER_US]
    points.append((64, 16))
    return format.table_of(
        [(*point, "derived") for point in points],
        [layer_s(*point) for point in points],
        _metadata(
            model,
            kernel_source="AITER fused MoE with ELDR's fixed time",
            framework="derived 1",
            provenance="derived",
            origin=(
                "ELDR Sec. 3.1 (16 to 128 experts: 4.7x at batch 64) and ROCm/aiter e404860 tuned "
                "fused-MoE rows (cu_num 304, bf16, 4096 x 384, E 128, top 8)"
            ),
            fit_error=aiter_deviation(),
            notes="(a + e * distinct) * (1 + c(batch)); see sources/mi300x.py",
        ),
    )


class FittedLayer(NamedTuple):
    """A MoE layer of one model as ELDR's cluster ran it, fitted to round-robin cells."""

    floor_s: float  #: of the layer's other kernels
    tiles: tuple[tuple[int, float], ...]  #: tokens from which a tile runs, seconds of an expert
    token_s: float  #: of each token beside, up to `FITTED_TOKENS`
    error: float  #: median error of the ten cells' TPOT


FITTED_TOKENS = 192  #: largest padded batch of a cell that a fit has seen

#: By model; two floors came out as 0: drawn experts grow too slowly with the batch.
PUBLISHED = {
    "Qwen3-30B-A3B": FittedLayer(0.0, ((1, 3.47e-6), (33, 4.48e-6), (65, 3.81e-6)), 0.0, 0.007),
    "GPT-OSS-120B": FittedLayer(70.0e-6, ((1, 10.38e-6),), 1.360e-6, 0.006),
    "Gemma-4-26B-A4B": FittedLayer(0.0, ((1, 4.45e-6), (33, 6.25e-6), (65, 5.09e-6)), 0.0, 0.027),
}

_TOKENS = (
    *(1, 2, 4, 8, 16, 24, 32, 33, 40, 48, 56, 64, 65, 72, 80, 88, 96, 97, 112, 128, 160, 192),
    *(256, 384, 512, 513, 768, 1024, 2048, 4096, 8192, 16384),
)  # both sides of each change of tile
_COUNTS = (1, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)


def derived_layer(name: str) -> TiledMoE:
    """Return a model's layer under Triton's default tiles, from public kernel figures alone."""
    model, gpu = load_model(name), load_gpu("MI300X")
    pair_s = moe_latency(gpu, model).token_s / model.top_k
    layer = triton_moe(model, TRITON["MI300X"], pair_s)
    assert layer is not None
    return layer


def published_layer(name: str) -> TiledMoE:
    """Return a model's layer as :data:`PUBLISHED` has it, without ``token_s``."""
    fitted, derived = PUBLISHED[name], derived_layer(name)
    seen = dict(fitted.tiles)
    tiles, last = {}, 0
    rows = zip(derived.first_tokens.astype(int), derived.block_m, derived.read_s, strict=True)
    for i, (first, block_m, read_s) in enumerate(rows):
        last = i if int(first) in seen else last
        ratio = read_s / derived.read_s[last]
        tiles[int(first)] = (int(block_m), 1, ratio * fitted.tiles[last][1])
    return tiled_moe(derived.n_experts, int(derived.top_k), fitted.floor_s, tiles, derived.pair_s)


def triton_table(name: str, fitted_to_cells: bool) -> format.LatencyTable:
    """Return the table of a layer of :data:`PUBLISHED` under Triton's default tiles, a grid of
    forced routing: fitted to cells of ELDR's cluster, or from kernel figures alone."""
    model, rates = load_model(name), TRITON["MI300X"]
    layer = published_layer(name) if fitted_to_cells else derived_layer(name)
    fitted = PUBLISHED[name]
    points = [
        (tokens, count)
        for tokens in _TOKENS
        for count in _COUNTS
        if count <= min(model.n_experts, model.top_k * tokens)
    ]
    batch, distinct = (np.array(column) for column in zip(*points, strict=True))
    seconds = layer.time_s(batch, distinct)
    if fitted_to_cells:
        seconds = seconds + fitted.token_s * np.minimum(batch, FITTED_TOKENS)
    return format.table_of(
        [(*point, "forced") for point in points],
        seconds,
        _metadata(
            model,
            kernel_source="Triton, vLLM's default tiles",
            framework="vllm 0.21.0",
            provenance="fitted" if fitted_to_cells else "derived",
            origin=(
                "fitted to the median TPOT of ten round-robin cells of ELDR's artifact "
                "(casys-kaist/ELDR, results/camera-ready-20261010-completed, Figs. 10 and 11)"
                if fitted_to_cells
                else rates.source
            ),
            date="2026-11-29" if fitted_to_cells else "2026-11-23",
            fit_error={"cells_median": fitted.error} if fitted_to_cells else {},
            notes="floor + blocks * expert(tile); see sources/mi300x.py",
        ),
    )


def write_tables(out_dir: Path, *, fitted_to_cells: bool = True) -> list[Path]:
    """Write the tables of Triton's kernels, and AITER's; the names of the files written."""
    tables = [triton_table(name, fitted_to_cells) for name in PUBLISHED]
    return format.save_tables([*tables, *([moe_table()] if fitted_to_cells else [])], out_dir)
