"""Tables of one GPU, and of one model on it, written from what NVIDIA's packages measured.

Of what GPUs send each other:

- NCCL ``message_size`` counts elements, not bytes.
- ``wideep_deepep_*``: DeepEP's own benchmarks, run beside SGLang: the kernels alone. Low-latency
  rows count an average of both directions; of the normal (high-throughput) kernels the rows with 20
  SMs are taken, the default of DeepEP and vLLM. A dispatch moves FP8 with a scale per 128 values, a
  combine bfloat16. Version 0.5.6.post2 has 2, 4 and 8 nodes of 8 GPUs. Its
  high-throughput rows of 8 nodes are left out: they move 16 GB/s between nodes, where DeepEP's
  README measures 51.
- ``moe_a2a``: the same kernels as vLLM calls them, in one node. Small batches take 3 to 9 times as
  long as the kernels alone; the rows do not tell the type of what a dispatch moves, and do not
  grow as FP8 would: bfloat16 is assumed."""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd

from eldr_sim.kernel_profiles.models import KVDtype, ModelDims
from eldr_sim.kernel_profiles.parallel import SINGLE_GPU, Parallelism
from eldr_sim.kernel_profiles.sources import aiconfigurator, packages
from eldr_sim.kernel_profiles.tables.format import LatencyTable, save_tables
from eldr_sim.kernel_profiles.tables.library import Engine

#: Engines whose kernels were measured, those that stand in for others first.
ENGINES = ("vllm", "sglang", "trtllm")
_SMS = 20  # of the GPU, for DeepEP's high-throughput kernels
_POINT = ["backend", "phase", "n_gpus", "hidden_size", "top_k", "n_experts", "tokens"]
_NODE_GPUS = {"GB200": 4, "GB300": 4}  # others: 8


def collective_tables(gpu: str) -> Iterator[LatencyTable]:
    """NCCL collectives and engines' own all-reduces (under CUDA graphs) inside one node.

    Of SGLang also those of 0.5.10, before its kernel of 0.5.14."""
    own = "custom_allreduce_perf.parquet", "allreduce_dtype", "bfloat16"
    for backend, version, name, column, element, keep in (
        ("nccl", "", "nccl_perf.parquet", "nccl_dtype", "half", "NCCL"),
        ("vllm", "", *own, "vLLM_custom_graph"),
        ("sglang", "", *own, "SGLang_CustomAllReduce_graph"),
        ("sglang", "0.5.10", *own, "SGLang_CustomAllReduce_graph"),
        ("trtllm", "", *own, "TRTLLM"),
    ):
        files = [
            file
            for file in packages.sources(gpu, "comm", backend, name, version)
            if file.path.is_file()
        ]
        rows = pd.DataFrame()
        if files:
            rows = files[0].chosen(kernel_source=keep, **{column: element})
        if rows.empty:
            continue
        named = {"op_name": "operation", "num_gpus": "n_gpus", "message_size": "message_bytes"}
        points = aiconfigurator.median_rows(rows, list(named)).rename(columns=named)
        yield aiconfigurator.package_table(
            "collective",
            files[0],
            rows,
            points.assign(message_bytes=2 * points.message_bytes),  # 2-byte elements
            shape={},
            dtype="float16" if element == "half" else element,
        )


def all_to_all_tables(gpu: str) -> Iterator[LatencyTable]:
    """Dispatch and combine of DeepEP's kernels: newest version of each source and node count."""
    for framework, read in (("sglang", _benchmark_rows), ("vllm", _engine_rows)):
        seen: set[int] = set()
        for folder in packages.sources(gpu, "comm", framework):
            rows = read(folder, _NODE_GPUS.get(gpu, 8))
            if rows.empty:
                continue
            for nodes in sorted(set(rows.n_nodes) - seen):
                seen.add(nodes)
                own = rows[rows.n_nodes == nodes]
                points = own.groupby(_POINT, sort=True).latency_us.median().reset_index()
                yield aiconfigurator.package_table(
                    "all_to_all",
                    folder,
                    own,
                    points.assign(latency_s=points.latency_us / 1e6),
                    shape={"n_nodes": int(nodes)} if nodes > 1 else {},
                    dtype="fp8" if framework == "sglang" else "bfloat16",
                    kernel_source="DeepEP",
                    latency_dtype=np.float32,
                )


def _benchmark_rows(folder: packages.Source, node_gpus: int) -> pd.DataFrame:
    """Rows of DeepEP's own benchmarks, one a phase."""
    frames = []
    for backend, file, suffixes in (
        ("deepep_ll", "wideep_deepep_ll_perf.parquet", ("avg_t_us",)),
        ("deepep_ht", "wideep_deepep_normal_perf.parquet", ("transmit_us", "notify_us")),
    ):
        frame = folder._replace(file=file).rows
        if frame.empty:
            continue
        for phase in ("dispatch", "combine"):
            rows = frame
            if backend == "deepep_ht":
                rows = frame[(frame[f"{phase}_sms"] == _SMS) & (frame.node_num < 8)]
            taken = sum(rows[f"{phase}_{suffix}"] for suffix in suffixes)
            frames.append(
                rows.assign(
                    backend=backend, phase=phase, latency_us=taken, n_gpus=node_gpus * rows.node_num
                )
            )
    if not frames:
        return pd.DataFrame()
    names = {"node_num": "n_nodes", "num_token": "tokens", "num_topk": "top_k"}
    return pd.concat(frames).rename(columns=names | {"num_experts": "n_experts"})


def _engine_rows(folder: packages.Source, _node_gpus: int) -> pd.DataFrame:
    """Rows of DeepEP's kernels as vLLM calls them."""
    frame = folder._replace(file="moe_a2a_perf.parquet").rows
    if frame.empty:
        return frame
    frame = frame[frame.comm_backend.isin(("deepep_ll", "deepep_ht"))]
    names = {"node_num": "n_nodes", "num_tokens": "tokens", "topk": "top_k", "ep_size": "n_gpus"}
    names |= {"num_experts": "n_experts", "comm_backend": "backend", "latency": "latency_us"}
    return frame.rename(columns=names)


def import_tables(
    gpu: str,
    model: ModelDims | None,
    out_dir: Path,
    parallelism: Parallelism = SINGLE_GPU,
    kv_dtypes: tuple[KVDtype, ...] = get_args(KVDtype),
    engine: str = "vllm",
    version: str = "",
    parts: str = "all",
) -> list[Path]:
    """Write latency tables of one GPU into ``out_dir``; returns the files, none if the packages
    have no rows of the model. Raises InputError: no package, no such GPU in it, or the model cannot
    be spread so.

    ``model``: the model of the MoE and attention tables, and GEMMs of the types of its matrices;
    None: the GPU's bfloat16, FP8 and NVFP4 GEMMs, collectives, dispatch and combine;
    ``parallelism``: of one GPU's part; ``kv_dtypes``: of attention; ``engine``: ``vllm``,
    ``sglang`` or ``trtllm``; ``version``: of it, rows up to which come before newer ones;
    ``parts``: ``all``, ``attention``, ``linear`` attention or ``moe``."""
    if model is None:
        return save_tables(_gpu_tables(gpu, Engine(engine, version)), out_dir)
    tables = _model_tables(gpu, model, parallelism, kv_dtypes, Engine(engine, version), parts)
    return save_tables(tables, out_dir)


def best_tables(
    gpu: str,
    model: ModelDims | None,
    parallelism: Parallelism,
    kv_dtypes: tuple[KVDtype, ...],
    engine: Engine,
) -> list[LatencyTable]:
    """Return the same tables of an engine, and for kernels that it has no rows of those of vLLM,
    SGLang or TensorRT-LLM, in this order."""
    found: list[LatencyTable] = []
    for name in dict.fromkeys((engine.name, *ENGINES)):
        whose = engine if name == engine.name else Engine(name)
        kernels = {_kernel(table) for table in found}
        tables = (
            _gpu_tables(gpu, whose)
            if model is None
            else _model_tables(gpu, model, parallelism, kv_dtypes, whose, "all")
        )
        found += [table for table in tables if _kernel(table) not in kernels]
    return found


def _kernel(table: LatencyTable) -> tuple[object, ...]:
    """Return what a lookup asks for."""
    of = table.metadata
    return of.kind, of.dtype, *sorted(of.shape.items())


def _gpu_tables(gpu: str, engine: Engine) -> Iterator[LatencyTable]:
    for dtype in ("bfloat16", "fp8", "nvfp4", "int4_g128", "int8_wo", "int8"):
        yield from aiconfigurator.gemm_tables(gpu, dtype, *engine)
    yield from collective_tables(gpu)
    yield from all_to_all_tables(gpu)


def _model_tables(
    gpu: str,
    model: ModelDims,
    parallelism: Parallelism,
    kv_dtypes: tuple[KVDtype, ...],
    engine: Engine,
    parts: str,
) -> Iterator[LatencyTable]:
    shard = parallelism.shard(model)
    if parts == "linear":
        yield from aiconfigurator.linear_attention_tables(gpu, shard, *engine)
        return
    if parts != "attention":
        yield from aiconfigurator.moe_tables(gpu, model, parallelism, *engine)
    if parts != "moe":
        for kv_dtype in kv_dtypes:
            own = shard.model_copy(update={"kv_cache_dtype": kv_dtype})
            yield from aiconfigurator.attention_tables(gpu, own, *engine)
    stored = [model.dtype_of(part) for part, _, _ in model.matrices]
    for dtype in dict.fromkeys([*stored, model.head_dtype] if parts == "all" else ()):
        if dtype != "bfloat16":
            yield from aiconfigurator.gemm_tables(gpu, dtype, *engine)
