"""Tables of a GPU that was not measured, from its sibling's: the same chip, other memory.

A100-40GB and A100 (80 GB) are one chip and one NVLink with 1.555 and 2.039 TB/s. Each row takes
longer by what its kernel's roofline (`kernels.roofline`) does, at most by the ratio of bandwidths::

    t = t_sibling + max(bytes / bandwidth, FLOPs / peak)
                  - max(bytes / bandwidth_sibling, FLOPs / peak)

Prefill attention (bound by compute), collectives, dispatch and combine (the same links) and host
gaps stay. MLA modules, norms and whole engine steps are not derived. H100 and H200 are siblings
too, both measured: :data:`FIT_ERROR` is how far H100's rows lie from those derived of H200's; by
the ratio of rooflines 7.5% (bfloat16 MoE layers), of bandwidths 13%."""

from typing import Any

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.kernel_profiles.gpus import GPU, load_gpu
from eldr_sim.kernel_profiles.kernels import roofline
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.tables.format import Kind, LatencyTable, weakest
from eldr_sim.kernel_profiles.tables.library import find_table

FIT_ERROR: dict[str, float] = {
    "moe": 0.059,
    "gemm": 0.069,
    "attention_decode": 0.047,
    "attention_prefill": 0.022,
}
"""Mean relative error by kind: bfloat16 rows of H100 derived from H200's, 25 tables of MoE layers,
1 of GEMMs and 62 of attention."""

_UNCHANGED: tuple[Kind, ...] = ("attention_prefill", "collective", "all_to_all", "host_gap")


def gpu_table(
    kind: Kind, gpu: GPU, model: ModelDims | None = None, **asked: Any
) -> LatencyTable | None:
    """The GPU's own table, or else one derived from its sibling's, or None. ``model``: dimensions
    of the part that a GPU computes, for MoE and attention; ``asked``: as of
    `library.find_table`."""
    own = find_table(kind, gpu.name, **asked)
    if own is not None or not gpu.sibling:
        return own
    sibling = load_gpu(gpu.sibling)
    table = find_table(kind, sibling.name, **asked)
    if table is None:
        return None
    more_s = _more_s(table, sibling, gpu, model)
    return None if more_s is None else _derived(table, sibling, gpu, more_s)


def _derived(table: LatencyTable, sibling: GPU, gpu: GPU, more_s: Floats) -> LatencyTable:
    """The table with so much more time a row, labelled ``derived``."""
    metadata, columns = table.metadata, dict(table.columns)
    seconds = columns["latency_s"]
    bound = seconds * (sibling.memory_bandwidth / gpu.memory_bandwidth)
    changed = np.clip(seconds + more_s, np.minimum(seconds, bound), np.maximum(seconds, bound))
    for name in ("latency_q1_s", "latency_q3_s"):
        if name in columns:
            columns[name] = columns[name] * (changed / seconds)
    columns["latency_s"] = changed
    how = "what memory bounds by the ratio of bandwidths" if more_s.any() else "taken over"
    kind = metadata.kind
    changes = {
        "gpu": gpu.name,
        "provenance": weakest([metadata.provenance, "derived"]),
        "origin": f"{metadata.origin}; of {metadata.gpu}, {how}",
        "fit_error": {"h100_from_h200_mean": FIT_ERROR[kind]} if kind in FIT_ERROR else {},
    }
    return LatencyTable(metadata.model_copy(update=changes), columns)


def _more_s(table: LatencyTable, sibling: GPU, gpu: GPU, model: ModelDims | None) -> Floats | None:
    """How much longer each row's roofline is on ``gpu``; None where none splits the kernel."""
    kind, shape = table.metadata.kind, table.metadata.shape
    columns = {name: np.asarray(values) for name, values in table.columns.items()}
    if "kv_lora_rank" in shape or "n_value_heads" in shape:
        return None
    if kind in _UNCHANGED:
        return np.zeros(len(table))

    def bound_s(of: GPU) -> Floats | None:
        if kind == "gemm":
            width = 2.0 if table.metadata.dtype == "bfloat16" else 1.0
            return roofline.gemm_s(of, columns["n"], columns["k"], columns["m"], width)
        if model is None:
            return None
        if kind == "moe":
            layer = roofline.moe_latency(of, model).on_rank(shape.get("expert_parallel_size", 1))
            return layer.time_s(columns["batch"], columns["distinct_experts"])
        if kind == "attention_decode":
            window = shape["window"]
            read = columns["context"].astype(np.float64)
            read = np.minimum(read, window) if window else read
            return (
                roofline.decode_attention(of, model, window > 0).token_s * columns["batch"] * read
            )
        return None

    here, there = bound_s(gpu), bound_s(sibling)
    return None if here is None or there is None else here - there
