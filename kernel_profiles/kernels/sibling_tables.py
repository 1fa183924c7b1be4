"""Tables of a GPU that was not measured, from its sibling's: the same architecture, other peaks.

A100-40GB and A100 (80 GB) are one chip and one NVLink with 1.555 and 2.039 TB/s; H20 is an H100 of
15% of the FLOP/s. Each row takes longer, or shorter, by what its kernel's roofline
(`kernels.roofline`) does::

    t = t_sibling + max(bytes / bandwidth, FLOPs / peak)
                  - max(bytes / bandwidth_sibling, FLOPs / peak_sibling)

so that what memory bounds goes with the bandwidth and what FLOPs bound with these, at most by the
larger ratio of the two. Collectives, dispatch and combine go with the links where these are of one
kind: NVLink's kernels say nothing of PCIe's, which get roofline times. Host gaps stay. Norms and
whole engine steps are not derived. H100 and H200 are siblings too, both measured:
:data:`FIT_ERROR` is how far H100's rows lie from those derived of H200's; by the ratio of rooflines
7.5% (bfloat16 MoE layers), of bandwidths 13%. No pair with other FLOP/s has been measured."""

from typing import Any

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.kernel_profiles.gpus import GPU, load_gpu
from eldr_sim.kernel_profiles.kernels import roofline
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.tables.format import Kind, LatencyTable, has_projections, weakest
from eldr_sim.kernel_profiles.tables.library import find_table

FIT_ERROR: dict[str, float] = {
    "moe": 0.061,
    "gemm": 0.069,
    "attention_decode": 0.049,
    "attention_prefill": 0.029,
}
"""Mean relative error by kind: bfloat16 rows of H100 derived from H200's, 47 tables of MoE layers,
1 of GEMMs and 94 of attention."""

MLA_TILE = 64
"""Heads of a tile of FlashMLA on Hopper. Its tensor cores multiply 64 rows: the 16 heads of one of
eight GPUs take as long as 64, which shows on H20 with its few FLOP/s (arXiv 2506.01969; vLLM 0.12's
``flashmla_sparse.py`` pads queries so)."""

#: Links this many times slower than the sibling's are of another kind: PCIe beside NVLink.
_OTHER_LINKS = 4.0


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


def _ratios(kind: Kind, sibling: GPU, gpu: GPU) -> list[float]:
    """How many times as long a row may take: by the resources that may bound its kernel."""
    if kind in ("collective", "all_to_all"):
        return [sibling.intra_node_bandwidth / gpu.intra_node_bandwidth]
    fp8, both = sibling.peak_flops(fp8=True), gpu.peak_flops(fp8=True)
    return [
        sibling.memory_bandwidth / gpu.memory_bandwidth,
        sibling.bf16_flops / gpu.bf16_flops,
        fp8 / both,
    ]


def _derived(table: LatencyTable, sibling: GPU, gpu: GPU, more_s: Floats) -> LatencyTable:
    """The table with so much more time a row, labelled ``derived``."""
    metadata, columns = table.metadata, dict(table.columns)
    seconds = columns["latency_s"]
    ratios = [1.0, *_ratios(metadata.kind, sibling, gpu)]
    changed = np.clip(seconds + more_s, seconds * min(ratios), seconds * max(ratios))
    for name in ("latency_q1_s", "latency_q3_s"):
        if name in columns:
            columns[name] = columns[name] * (changed / seconds)
    columns["latency_s"] = changed
    how = "scaled by the ratio of rooflines" if more_s.any() else "taken over"
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
    bounds = [_bound_s(table, of, sibling, model) for of in (gpu, sibling)]
    here, there = bounds
    return None if here is None or there is None else here - there


def _bound_s(table: LatencyTable, of: GPU, sibling: GPU, model: ModelDims | None) -> Floats | None:
    """Each row's roofline on a GPU, fixed costs aside; None where none splits the kernel."""
    kind, shape = table.metadata.kind, table.metadata.shape
    columns = {name: np.asarray(values) for name, values in table.columns.items()}
    if kind == "host_gap":
        return np.zeros(len(table))
    if kind in ("collective", "all_to_all"):
        return _message_s(table, of, sibling)
    if kind == "gemm":
        sizes = columns["n"], columns["k"], columns["m"]
        return roofline.gemm_s(of, *sizes, table.metadata.dtype)
    if model is None:
        return None
    if kind == "moe":
        layer = roofline.moe_latency(of, model).on_rank(shape.get("expert_parallel_size", 1))
        return layer.time_s(columns["batch"], columns["distinct_experts"])
    if kind in ("attention_decode", "attention_prefill"):
        return _attention_s(table, of, model)
    return None


def _attention_s(table: LatencyTable, of: GPU, model: ModelDims) -> Floats:
    """Roofline of rows of attention; of whole modules with their projections."""
    shape, columns = table.metadata.shape, table.columns
    batch = columns["batch"].astype(np.float64)
    decode = table.metadata.kind == "attention_decode"
    length = columns["context" if decode else "new_tokens"].astype(np.float64)
    longest = int(length.max())
    sliding = bool(shape.get("window", 0))
    if "n_value_heads" in shape:
        step, prompt = roofline.linear_attention(of, model, longest)
    else:
        tiled, sparse = _tiled(model, of), model.attention == "mla" and model.index_topk > 0
        step = roofline.decode_attention(of, tiled, sliding)
        prompt = roofline.prefill_attention(
            of, tiled if sparse else model, sliding, longest, absorbed=sparse
        )
    if decode:
        lengths, at = np.unique(length, return_inverse=True)
        batches, row = np.unique(batch, return_inverse=True)
        seconds = step.time_s(batches, lengths)[row, at]
    else:
        seconds = batch * prompt.share_s[length.astype(np.intp)]
    if has_projections(shape):
        tokens = batch if decode else batch * length
        for n, k in [*model.attention_linears(), *model.index_linears]:
            seconds = seconds + roofline.gemm_s(of, n, k, tokens, model.linear_dtype)
    return np.asarray(seconds, dtype=np.float64)


def _tiled(model: ModelDims, of: GPU) -> ModelDims:
    """The model with as many heads as kernels of MLA compute on its compressed cache, on Hopper
    multiples of :data:`MLA_TILE`."""
    if model.attention != "mla" or not (of.sibling or of.name).startswith("H"):
        return model
    return model.model_copy(update={"n_heads": -(-model.n_heads // MLA_TILE) * MLA_TILE})


def _message_s(table: LatencyTable, of: GPU, sibling: GPU) -> Floats | None:
    """Time of rows' bytes on the links; None where the links are of another kind."""
    if of.intra_node_bandwidth * _OTHER_LINKS < sibling.intra_node_bandwidth:
        return None
    columns = table.columns
    if table.metadata.kind == "collective":
        sent = columns["message_bytes"].astype(np.float64)
        twice = 1 + (columns["operation"] == "all_reduce")
        sent = twice * sent * (columns["n_gpus"] - 1) / columns["n_gpus"]
    elif table.metadata.shape.get("n_nodes", 1) > 1:  # the network's, not the links'
        return np.zeros(len(table))
    else:
        sent = columns["tokens"].astype(np.float64) * columns["top_k"] * columns["hidden_size"]
    rate = roofline.efficiency_of(of).link_bandwidth * of.intra_node_bandwidth
    return np.asarray(sent / rate, dtype=np.float64)
