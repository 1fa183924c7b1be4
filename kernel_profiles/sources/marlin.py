"""MoE tables of vLLM's Marlin kernel for MXFP4 experts, derived from those of another shape.

Up to vLLM 0.18 GPT-OSS ran on Hopper with Marlin. ``aiconfigurator-core`` has GPT-OSS tables of a
later kernel only, over twice as fast in large batches; of Marlin it has an 896-expert layer (hidden
3584, expert width 3072, top-16). At equal *rows per expert*, ``k tokens / E``, an expert of one
shape costs as much per weight as one of the other, whether bound by reading or by computing::

    t(tokens) = a + (t'(tokens') - a') * (E h i) / (E' h' i')
    tokens'   = tokens * (k / E) / (k' / E')

``h`` and ``i`` are padded as vLLM does, to a hidden size that 256 and an intermediate size, of each
GPU, that 128 divides (``vllm/model_executor/layers/quantization/mxfp4.py``, ``create_weights``):
GPT-OSS's 2880 by 9.0% on one GPU, 13.8% on 2, 4 or 8; the source needs none on 1 to 8. The fixed
cost ``a'`` (sorting, launches) is the intercept of the source's rows over distinct experts, ``a``
that of the target's own table of the later kernel. Nothing here has seen an end-to-end run."""

import datetime

import numpy as np
import pandas as pd

from eldr_sim.arrays import Floats
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.parallel import SINGLE_GPU, Parallelism
from eldr_sim.kernel_profiles.sources.aiconfigurator import routed_distinct
from eldr_sim.kernel_profiles.sources.packages import Source, sources
from eldr_sim.kernel_profiles.tables import format
from eldr_sim.kernel_profiles.tables.library import find_table

_VERSION = "0.24.0"
_DTYPE = "w4a16_mxfp4"
_ROUTINGS = ("balanced", "power_law_1.01")
_TOKENS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)


def padded(hidden: int, intermediate: int) -> tuple[int, int]:
    """Return hidden size and a GPU's intermediate size as vLLM pads MXFP4 weights for Marlin."""
    return -(-hidden // 256) * 256, -(-intermediate // 128) * 128


def derive_marlin_table(
    gpu: str, model: ModelDims, parallelism: Parallelism = SINGLE_GPU, *, padding: bool = True
) -> format.LatencyTable:
    """Derive the Marlin table of one GPU's part of a model's MXFP4 MoE layer. Raises InputError: no
    Marlin rows for this GPU (``H100`` and ``H200`` have them) or number of GPUs, or another dtype.

    ``parallelism``: GPUs of a worker; the experts are cut, not spread; ``padding``: whether the
    kernel computes the zeros of vLLM's padding, too."""
    if format.MOE_DTYPES[model.expert_dtype] != _DTYPE:
        raise InputError("model", f"{model.name} has {model.expert_dtype} experts", "mxfp4")
    if gpu not in ("H100", "H200") or parallelism.n_expert_ranks > 1:
        problem = f"no Marlin rows of {gpu} with these ranks"
        raise InputError("gpu", problem, "H100 or H200, experts cut")
    files = sources(gpu, "moe", "vllm", "moe_perf.parquet")
    file = next(file for file in files if file.version == _VERSION)
    frame = _marlin_rows(file, parallelism.tensor_parallel_size)
    row = frame.iloc[0]
    shape = format.moe_shape_of(parallelism.shard(model))
    later = find_table("moe", gpu, shape=shape, dtype=_DTYPE)
    if later is None:
        problem = f"no MoE table of {model.name} on {gpu} to take the fixed cost of"
        raise InputError("model", problem)
    points = [
        (tokens, routed_distinct(routing, tokens, model), routing)
        for routing in _ROUTINGS
        for tokens in _TOKENS
    ]
    seconds = _carried_over(frame, later, model, parallelism.tensor_parallel_size, padding)
    return format.table_of(
        points,
        np.concatenate(seconds),
        format.TableMetadata(
            kind="moe",
            gpu=gpu,
            shape=shape,
            dtype=_DTYPE,
            kernel_source="vllm marlin mxfp4, carried over from a layer of 896 experts",
            framework=f"vllm {_VERSION} marlin",  # not the name of the later kernel's table
            provenance="derived",
            origin=f"{file.origin}, rows of {row.kernel_source}",
            device=str(row.device),
            date=datetime.date.today().isoformat(),
            notes="equal rows per expert; fixed cost of the later kernel's own table"
            + ("; weights padded as vLLM does" if padding else "; without vLLM's padding"),
        ),
    )


def _marlin_rows(file: Source, size: int) -> pd.DataFrame:
    frame = file.rows
    frame = frame[
        (frame.moe_dtype == _DTYPE)
        & frame.kernel_source.str.contains("marlin")
        & frame.distribution.isin(_ROUTINGS)
        & (frame.moe_tp_size == size)
        & (frame.moe_ep_size == 1)
    ]
    if frame.empty:
        raise InputError("tensor_parallel_size", f"no Marlin rows at {size} GPUs", "1, 2, 4, 8")
    return frame


def _carried_over(
    frame: pd.DataFrame, later: format.LatencyTable, model: ModelDims, size: int, padding: bool
) -> list[Floats]:
    """Seconds at :data:`_TOKENS` of the model's layer, by routing; see the module's formula."""
    row = frame.iloc[0]
    balanced = later.columns["routing"] == "balanced"
    fixed = _intercept(
        later.columns["distinct_experts"][balanced].astype(float),
        later.columns["latency_s"][balanced].astype(float),
    )
    sides = model.hidden_size, model.expert_intermediate_size // size
    hidden, width = padded(*sides) if padding else sides
    weights = model.n_experts * hidden * width * size
    scale = weights / (int(row.num_experts) * int(row.hidden_size) * int(row.inter_size))
    density = (model.top_k / model.n_experts) / (row.topk / row.num_experts)
    source = {
        routing: rows.groupby("num_tokens")["latency"].median() / 1e3
        for routing, rows in frame.groupby("distribution")
    }
    even = source["balanced"]
    even_distinct = np.minimum(row.num_experts, row.topk * even.index.to_numpy(float))
    source_fixed = _intercept(even_distinct, even.to_numpy(float))
    return [
        fixed + scale * (np.interp(np.array(_TOKENS) * density, curve.index, curve) - source_fixed)
        for curve in (source[routing] for routing in _ROUTINGS)
    ]


def _intercept(distinct: Floats, seconds: Floats) -> float:
    """Return the time at no expert by the line through counts up to 1/3, where reading rules."""
    few = distinct <= distinct.max() / 3
    slope, intercept = np.polyfit(distinct[few], seconds[few], 1)
    return float(max(intercept, 0.0)) if slope > 0 else float(seconds.min())
