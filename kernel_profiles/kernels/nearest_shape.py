"""Time of a MoE layer that was not measured, from the nearest shape that was.

Kernels of one engine, GPU and precision read narrow experts at a lower rate than wide ones, which
no roofline knows. The measured layer is scaled by the weights of an expert: what reads and what
computes them, not the fixed cost. Tokens count by how many reach an expert.

Each of 894 shipped layers against the one derived without it, median error by tokens (1 to 2,048):
bfloat16 3 to 9% (roofline 9 to 40), FP8 in blocks 6 to 9 (8 to 63), MXFP4 1 to 11 (11 to 58), INT4
5 to 19 (47 to 128), NVFP4 8 to 31 (21 to 59)."""

import math
from collections.abc import Mapping

import numpy as np

from eldr_sim.kernel_profiles.kernels.moe_latency import MoELatency, fit_moe_latency
from eldr_sim.kernel_profiles.tables import format
from eldr_sim.kernel_profiles.tables.library import Engine, ShippedTable, rank, shipped_tables

#: Beyond this distance a shape says little (median error above 10%).
_FARTHEST = 2.0
#: How much a ratio counts: the width of an expert decides which tiles fit.
_WEIGHTS = {"expert_intermediate_size": 2.0, "hidden_size": 1.0, "top_k": 0.5, "n_experts": 0.5}


def _distance(shape: Mapping[str, int], other: Mapping[str, int]) -> float:
    """Return the weighted logarithms of the ratios of two shapes; infinite where they differ in
    anything else."""
    rest = [{k: v for k, v in each.items() if k not in _WEIGHTS} for each in (shape, other)]
    if rest[0] != rest[1]:
        return math.inf
    return math.fsum(w * abs(math.log(shape[k] / other[k])) for k, w in _WEIGHTS.items())


def nearest_moe(
    gpu: str, shape: Mapping[str, int], dtype: str, engine: Engine
) -> tuple[MoELatency, ShippedTable] | None:
    """Return a layer of all experts on one GPU, and the table that it is derived from, or None.

    Args:
        gpu: name.
        shape: of `format.moe_shape_of`, without expert parallelism.
        dtype: of the experts.
        engine: preferred source of kernels; vLLM's come next. Of bfloat16 kernels Triton's come
            first: SGLang takes others for the models alone that they were measured with
            (``server_args.py``).
    """
    candidates = []
    for table in shipped_tables():
        if table.kind != "moe" or table.gpu != gpu or table.metadata.dtype != dtype:
            continue
        far, name = _distance(shape, table.metadata.shape), table.metadata.framework.split()[0]
        if far <= _FARTHEST and table.metadata.provenance in ("measured", "imported"):
            source = table.metadata.kernel_source
            triton = dtype != "bfloat16" or ("trtllm" not in source and "cutlass" not in source)
            own = 2 * (name == engine.name) + (name == "vllm")
            candidates.append(((triton, own, -far, rank(table, engine)), table))
    if not candidates:
        return None
    table = max(candidates, key=lambda each: each[0])[1]
    return _scaled(fit_moe_latency(table.load()), table.metadata.shape, shape), table


def _scaled(layer: MoELatency, old: Mapping[str, int], new: Mapping[str, int]) -> MoELatency:
    """Return a measured layer at other dimensions."""
    ratio = {name: new[name] / old[name] for name in _WEIGHTS}
    weights = ratio["hidden_size"] * ratio["expert_intermediate_size"]
    counts, floor, read = np.arange(new["n_experts"] + 1.0), layer.expert_s[0], layer.expert_s
    beyond = np.maximum(counts - old["n_experts"], 0.0) * (read[-1] - read[-2])
    read = np.interp(counts, np.arange(len(read), dtype=float), read) + beyond
    read = floor + (read - floor) * weights
    tokens = ratio["n_experts"] / ratio["top_k"]  # that give an expert as many
    skewed = floor + (layer.unbalanced_s - floor) * weights * ratio["n_experts"]
    return MoELatency(
        new["n_experts"],
        new["top_k"],
        read,
        layer.batch_knots * tokens,
        layer.batch_s * (read[-1] / layer.expert_s[-1]),
        layer.token_s * weights * ratio["top_k"],
        layer.unbalanced_knots * tokens,
        skewed,
    )


def label(table: ShippedTable) -> dict[str, str]:
    """Return the provenance of a layer derived from a table."""
    source = table.metadata
    origin = f"{source.origin}; of the nearest shape {table.shape}, scaled by an expert's weights"
    said = format.provenance_of("derived", origin, source.kernel_source)
    return said | {"framework": source.framework}
