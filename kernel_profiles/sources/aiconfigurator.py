"""Read the measured kernel tables of NVIDIA's packages (`sources.packages`). What it takes:

- MoE rows give tokens, not distinct experts. ``balanced`` routing activates ``min(E, k * tokens)``;
  ``power_law_*`` rows are unseeded draws: their expectation follows the package's generator.
- ``inter_size`` is the whole expert's: with ``moe_tp_size`` the kernel ran on its shard;
  ``moe_ep_size`` rows time one rank that gets all tokens: rank 0 of balanced routing, the rank with
  most pairs of skewed routing. Versions without balanced rows are left out there.
- ``balanced`` rows of gates that limit a token to a few groups (DeepSeek-V3) keep to half of the
  experts: those that would read faster than memory are left out.
- Attention ``step`` counts cached tokens: a decode step attends to ``step + 1``.
- Latencies are ms under CUDA graphs, L2 not flushed: points that fit into it read low."""

import datetime
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels.kernel_latency import GemmLatency
from eldr_sim.kernel_profiles.kernels.table_errors import left_out_errors
from eldr_sim.kernel_profiles.models import LONGEST, ModelDims
from eldr_sim.kernel_profiles.parallel import SINGLE_GPU, Parallelism
from eldr_sim.kernel_profiles.sources.packages import SYSTEMS, Source, first_rows, sources
from eldr_sim.kernel_profiles.tables.format import (
    MOE_DTYPES,
    Kind,
    LatencyTable,
    TableMetadata,
    attention_shapes,
    dtypes_of,
    linear_attention_shape,
    moe_shape_of,
)

#: Kinds of tables of attention, the package's word for each, and the column that tells its tokens.
_ATTENTION: tuple[tuple[Kind, str, str], ...] = (
    ("attention_decode", "generation", "step"),
    ("attention_prefill", "context", "isl"),
)
#: Kinds of layers of DeepSeek-V4 by their names, and tokens of an entry of their caches.
_COMPRESSED = (("csa", 4), ("hca", 128))
#: The package's folder and name of each kind of linear attention.
_LINEAR = {"gdn": ("linear_attention", "gdn"), "kda": ("kda", "kda")}
_BLACKWELL = ("B200", "B300", "GB200", "GB300", "RTX PRO 6000")
_MSA_HIDDEN = 6144  # of MiniMax-M3, the one model with MSA rows
_SMALL = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512]
_GEMM_ROWS = [*_SMALL, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384]
_SMALLEST, _LAUNCH_MS = 128, 0.01
_INTEGERS = {"int4_g128": "int4_wo", "int8_wo": "int8_wo", "int8": "sq"}
"""GEMMs of integers by the package's names: weights alone, and W8A8 as SmoothQuant has it."""
_CONVOLUTION_MS = 0.1  # of the smallest step: any longer is a launch
_LARGE_BYTES = 1e9  # no cache holds
_SLOWEST = 4.7  # times what reading takes
_FASTER = 1.2  # than the peak bandwidth
_NOTES = "CUDA graph timing, no L2 flush: points with data that fit the L2 cache read low"


def balanced_distinct(tokens: int, n_experts: int, top_k: int, n_ranks: int = 1) -> int:
    """Distinct experts on rank 0 under the package's balanced routing. With ``s = ceil(E / k)``
    token ``t`` picks ``t + i s`` for ``i < k``, modulo E; fewer than s tokens spread their first
    choices evenly, ``floor(t s / tokens)`` instead of ``t``."""
    if n_ranks == 1:
        return min(n_experts, tokens * top_k)
    stride = -(-n_experts // top_k)
    first = np.arange(tokens)
    first = first if tokens >= stride else first * stride // tokens
    chosen = np.unique((first[:, None] + stride * np.arange(top_k)) % n_experts)
    return int(np.count_nonzero(chosen < n_experts // n_ranks))


@lru_cache(maxsize=4096)
def expected_distinct(
    tokens: int, n_experts: int, top_k: int, alpha: float, n_ranks: int = 1
) -> float:
    """Expected number of distinct experts under the package's power-law routing, as its collector
    draws.

    Expert weights by inverse CDF of a power law with exponent ``alpha`` (on [1, 0.8 tokens] where
    ``tokens * top_k > n_experts``, else on [0.01, 2]), scaled to ``tokens * top_k`` choices,
    rounded, capped at ``tokens``; what is missing goes to the least loaded, what is too much comes
    off them. Mean of 200 draws of a fixed seed (standard error below 1). With ``n_ranks``: of the
    rank with most pairs, ties in random order."""
    rng = np.random.default_rng([tokens, n_experts, top_k, round(alpha * 1000)])
    low, high = (1.0, 0.8 * tokens) if tokens * top_k > n_experts else (0.01, 2.0)
    exponent = 1.0 - alpha
    target = tokens * top_k
    distinct = []
    for _ in range(200):
        span = high**exponent - low**exponent
        weights = (span * rng.random(n_experts) + low**exponent) ** (1 / exponent)
        counts = np.rint(weights / weights.sum() * target).astype(np.int64)
        overflow = int(np.maximum(counts - tokens, 0).sum())
        counts = np.minimum(counts, tokens)
        ascending = np.argsort(counts, kind="stable")
        for expert in ascending if overflow else ():  # the cap's fills the least loaded first
            taken = min(overflow, tokens - int(counts[expert]))
            counts[expert] += taken
            overflow -= taken
        missing = target - int(counts.sum())
        ascending = np.argsort(counts, kind="stable")
        while missing > 0:  # one each, from the least loaded on
            room = ascending[counts[ascending] < tokens][:missing]
            counts[room] += 1
            missing -= len(room)
        for turn in range(-missing):
            expert = ascending[turn % n_experts]
            counts[expert if counts[expert] > 0 else np.argmax(counts)] -= 1
        ranks = (rng.permutation(counts) if n_ranks > 1 else counts).reshape(n_ranks, -1)
        distinct.append(np.count_nonzero(ranks[np.argmax(ranks.sum(axis=1))]))
    return float(np.mean(distinct))


def median_rows(frame: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """One row per point: the median latency of repeated rows, sorted by point."""
    return frame.groupby(keys, sort=True)["latency"].median().reset_index()


def package_table(
    kind: Kind,
    source: Source,
    frame: pd.DataFrame,
    points: pd.DataFrame,
    *,
    shape: dict[str, int],
    dtype: str,
    latency_dtype: type = np.float64,
    **about: str,
) -> LatencyTable:
    """Table of some points; the rest of its source is of the package's rows. ``points``: the kind's
    columns, and ``latency``, ms, or ``latency_s``; ``about``: metadata."""
    said: dict[str, Any] = {
        "kernel_source": " + ".join(sorted(set(frame.get("kernel_source", ())))),
        "device": str(frame["device"].iloc[0]) if "device" in frame else SYSTEMS[source.gpu],
        "notes": _NOTES if kind not in ("collective", "all_to_all") else "",
    }
    seconds = points["latency_s"] if "latency_s" in points else points["latency"] / 1e3
    columns = {name: points[name].to_numpy(of) for name, of in dtypes_of(kind).items()}
    table = LatencyTable(
        TableMetadata(
            kind=kind,
            gpu=source.gpu,
            shape=shape,
            dtype=dtype,
            framework=f"{source.engine} {source.version}",
            provenance="imported",
            origin=source.origin,
            date=datetime.date.today().isoformat(),
            **(said | about),
        ),
        columns | {"latency_s": seconds.to_numpy(latency_dtype)},
    )
    return table.saying(fit_error=left_out_errors(table))


def moe_tables(
    gpu: str,
    model: ModelDims,
    parallelism: Parallelism = SINGLE_GPU,
    engine: str = "vllm",
    version: str = "",
) -> Iterator[LatencyTable]:
    """Fused-MoE tables of one GPU's part of a model's layer, the newest version of every kernel, of
    ``engine``: ``vllm``, ``sglang`` or ``trtllm``, where MXFP4 weights take MXFP8 activations on
    Blackwell (``get_mxfp4_quant_algo`` of ``tensorrt_llm/_torch/model_config.py``), as all
    DeepSeek-V4's do."""
    dtype = MOE_DTYPES[model.expert_dtype]
    fp8_activations = engine == "trtllm" or bool(model.compressed_layers)
    if fp8_activations and model.expert_dtype == "mxfp4" and gpu in _BLACKWELL:
        dtype = "w4a8_mxfp4_mxfp8"
    ranks = parallelism.n_expert_ranks
    shard = parallelism.shard(model)
    seen: set[str] = set()
    for file in sources(gpu, "moe", engine, "moe_perf.parquet", version):
        frame = file.chosen(
            hidden_size=model.expert_width, inter_size=model.expert_intermediate_size,
            num_experts=model.n_experts, topk=model.top_k, moe_dtype=dtype,
        )  # fmt: skip
        if frame.empty:
            continue
        limited = _reads_too_fast(frame, gpu, model)
        frame = frame[
            (frame.moe_tp_size == parallelism.n_gpus // ranks)
            & (frame.moe_ep_size == ranks)
            & ~(limited & (frame.distribution == "balanced"))
        ]
        for source, rows in frame.groupby("kernel_source", sort=True):
            named = {"distribution": "routing", "num_tokens": "batch"}
            points = median_rows(rows, list(named)).rename(columns=named)
            points["distinct_experts"] = [
                routed_distinct(routing, tokens, model, ranks)
                for routing, tokens in zip(points.routing, points.batch, strict=True)
            ]
            rate = points.distinct_experts * shard.bytes_per_expert / (points.latency / 1e3)
            cached = (points.routing == "balanced") & (rate > load_gpu(gpu).memory_bandwidth)
            points = points[~cached]
            if ranks > 1 and "balanced" not in set(points.routing):
                continue
            if source in seen or points.batch.nunique() < 10:
                continue
            if _is_untuned(str(source), points, gpu, shard, ranks):
                continue
            seen.add(str(source))
            notes = _NOTES
            if "balanced" not in set(points.routing):
                notes += "; distinct experts are expectations of the power laws"
            if dtype != MOE_DTYPES[model.expert_dtype]:
                notes += f"; rows of {dtype}"
            yield package_table(
                "moe",
                file,
                rows,
                points,
                shape=moe_shape_of(shard, ranks),
                dtype=MOE_DTYPES[model.expert_dtype],
                notes=notes,
            )


def _reads_too_fast(frame: pd.DataFrame, gpu: str, model: ModelDims) -> bool:
    """Whether balanced rows of all experts would read them faster than the GPU's memory can. Gates
    that limit a token to a few groups of experts (DeepSeek-V3: 4 of 8 groups) were timed through
    that limit: balanced routing then keeps to the same half of the experts."""
    rows = frame[
        (frame.moe_tp_size == 1) & (frame.moe_ep_size == 1) & (frame.distribution == "balanced")
    ]
    distinct = np.minimum(model.n_experts, model.top_k * rows.num_tokens)
    read = distinct * model.bytes_per_expert
    rate = read / (rows.latency / 1e3)
    large = read > _LARGE_BYTES
    return bool((rate[large] > _FASTER * load_gpu(gpu).memory_bandwidth).any())


def _is_untuned(kernel: str, points: pd.DataFrame, gpu: str, shard: ModelDims, ranks: int) -> bool:
    """Whether small batches take several times what reading their experts takes: a kernel that was
    timed before the engine tunes it (5 to 8 times: FlashInfer's CUTLASS of vLLM 0.24 on Hopper for
    FP8 scaled by tensors, MXFP4 of vLLM 0.19 on B200). Triton's for MXFP4 reads bfloat16."""
    if "triton" in kernel or shard.expert_intermediate_size % 64:
        return False
    fewest, experts = points.distinct_experts.min(), shard.n_experts // ranks
    few = points.batch * shard.top_k <= 8 * shard.n_experts
    read = points[few & (points.distinct_experts > 0.95 * experts)]
    more_s = (read.latency.min() - points.latency.min()) / 1e3  # than the smallest batch
    least_s = (experts - fewest) * shard.bytes_per_expert / load_gpu(gpu).memory_bandwidth
    return len(read) > 0 and bool(more_s > _SLOWEST * least_s)


def routed_distinct(routing: str, tokens: int, model: ModelDims, n_ranks: int = 1) -> float:
    """Distinct experts of a model's layer under ``balanced`` or ``power_law_*`` routing."""
    if routing == "balanced":
        return float(balanced_distinct(tokens, model.n_experts, model.top_k, n_ranks))
    alpha = float(routing.removeprefix("power_law_"))
    return expected_distinct(tokens, model.n_experts, model.top_k, alpha, n_ranks)


def attention_tables(
    gpu: str, model: ModelDims, engine: str = "vllm", version: str = ""
) -> Iterator[LatencyTable]:
    """Decode and prefill attention of every kind of layer of a model and its type of KV cache,
    newest version (up to ``version``). Of multi-head latent attention whole modules were measured,
    with the projections (``ModelDims.attention_linears``), of DeepSeek-V3's widths."""
    mla = model.attention == "mla"
    if model.compressed_layers:
        yield from _compressed_attention_tables(gpu, model, engine, version)
        return
    if model.index_topk and mla:
        yield from _sparse_attention_tables(gpu, model, engine, version)
        return
    if mla and (model.q_lora_rank, model.kv_lora_rank, model.hidden_size) != (1536, 512, 7168):
        return
    for kind, name, axis in _ATTENTION:
        name = f"mla_{name}_module" if mla else f"{name}_attention"
        part = "mla" if mla else "attention"
        for _, _, shape in attention_shapes(model, model.kv_cache_dtype):
            if "index_topk" in shape:
                yield from _block_sparse_tables(gpu, model, kind, axis, shape, engine, version)
                continue
            wanted: dict[str, Any] = {"num_heads": model.n_heads}
            wanted |= {"kv_cache_dtype": model.kv_cache_dtype}
            if mla:
                wanted |= {"model": "deepseek-ai/DeepSeek-V3", "gemm_type": model.linear_dtype}
            else:
                wanted |= {"num_key_value_heads": shape["n_kv_heads"]}
                wanted |= {"head_dim": shape["head_dim"], "window_size": shape["window"]}
            found = first_rows(gpu, part, engine, f"{name}_perf.parquet", version, **wanted)
            if found is not None:
                dtype = model.linear_dtype if mla else "bfloat16"
                yield _attention_table(kind, axis, *found, shape, dtype)
    yield from linear_attention_tables(gpu, model, engine, version)


def _attention_table(
    kind: Kind, axis: str, file: Source, rows: pd.DataFrame, shape: dict[str, int], dtype: str
) -> LatencyTable:
    """Return the table of rows by batch and ``axis``: tokens of a prompt, or cached ones."""
    points = median_rows(rows, ["batch_size", axis]).rename(columns={"batch_size": "batch"})
    decode = kind == "attention_decode"
    points["context" if decode else "new_tokens"] = points[axis] + decode
    return package_table(kind, file, rows, points, shape=shape, dtype=dtype)


def _sparse_attention_tables(
    gpu: str, model: ModelDims, engine: str, version: str
) -> Iterator[LatencyTable]:
    """Decode and prefill of whole modules of sparse attention, projections and indexer included.
    Prompts of no more tokens than are attended to take dense attention, as SGLang does."""
    names = {7168: "DeepseekV32ForCausalLM", 6144: "GlmMoeDsaForCausalLM"}
    (_, _, shape), *_ = attention_shapes(model, model.kv_cache_dtype)
    for kind, name, axis in _ATTENTION:
        found = first_rows(
            gpu, "sparse_attention", engine, f"dsa_{name}_module_perf.parquet", version,
            op_name=f"dsa_{name}_module", num_heads=model.n_heads,
            kv_cache_dtype=model.kv_cache_dtype, gemm_type=model.linear_dtype,
            architecture=names.get(model.hidden_size, ""),
        )  # fmt: skip
        if found is None:
            continue
        file, rows = found
        if kind == "attention_prefill":
            dense = rows.kernel_source.str.contains("dense")
            short = rows.isl <= model.index_topk
            rows = rows[(rows.step == 0) & ((dense == short) if dense.any() else ~dense)]
        if not rows.empty:
            yield _attention_table(kind, axis, file, rows, shape, model.linear_dtype)


def _block_sparse_tables(
    gpu: str,
    model: ModelDims,
    kind: Kind,
    axis: str,
    shape: dict[str, int],
    engine: str,
    version: str,
) -> Iterator[LatencyTable]:
    """Decode or prefill of whole modules of MiniMax-M3's sparse attention (MSA), projections and
    indexer included. None of TensorRT-LLM, whose rows attend to the whole context (130 times vLLM's
    time at batch 128 and 16,384 tokens on H200)."""
    if model.hidden_size != _MSA_HIDDEN or engine == "trtllm":
        return
    phase = "generation" if kind == "attention_decode" else "context"
    found = first_rows(
        gpu, "msa", engine, f"msa_{phase}_module_perf.parquet", version,
        num_heads=model.n_heads, kv_cache_dtype=model.kv_cache_dtype, gemm_type=model.linear_dtype,
    )  # fmt: skip
    if found is None:
        return
    file, rows = found
    rows = rows[rows.step == 0] if kind == "attention_prefill" else rows
    if not rows.empty:
        yield _attention_table(kind, axis, file, rows, shape, model.linear_dtype)


def _compressed_attention_tables(
    gpu: str, model: ModelDims, engine: str, version: str
) -> Iterator[LatencyTable]:
    """Decode and prefill of DeepSeek-V4's attention: the mean of its two kinds of layers. Of whole
    modules, projections included, with the hyper-connections around the layer (``mhc``) where their
    time is known for the tokens of a row."""
    (_, _, shape), *_ = attention_shapes(model, model.kv_cache_dtype)
    around = {
        name: first_rows(
            gpu, "mhc", engine, "mhc_module_perf.parquet", version,
            hidden_size=model.hidden_size, op_name=name,
        )
        for name in ("pre", "post")
    }  # fmt: skip
    for kind, phase, axis in _ATTENTION:
        keys, parts = ["batch_size", axis], []
        for (name, ratio), (_, layers) in zip(_COMPRESSED, model.compressed_layers, strict=True):
            named = f"dsv4_{name}_{phase}_module_perf.parquet"
            found = first_rows(
                gpu, "sparse_attention", engine, named, version,
                num_heads=model.n_heads, compress_ratio=ratio, tp_size=1,
                kv_cache_dtype=model.kv_cache_dtype, gemm_type=model.linear_dtype,
            )  # fmt: skip
            if found is not None:
                file, rows = found
                rows = rows[rows.step == 0] if kind == "attention_prefill" else rows
                latency = median_rows(rows, keys).set_index(keys)["latency"]
                parts.append((file, rows, latency * layers / model.n_layers))
        if len(parts) < len(_COMPRESSED) or None in around.values():
            continue
        (file, rows, csa), (_, _, hca) = parts
        mean = (csa + hca).dropna().reset_index()
        tokens = mean.batch_size * (mean[axis] if kind == "attention_prefill" else 1)
        for of_layer in around.values():
            assert of_layer is not None
            own = median_rows(of_layer[1], ["num_tokens"])
            mean["latency"] += np.interp(tokens, own.num_tokens, own.latency)
        said = rows.iloc[[0]].drop(columns=[*keys, "latency"])
        yield _attention_table(
            kind, axis, file, mean.merge(said, how="cross"), shape, model.linear_dtype
        )


def linear_attention_tables(
    gpu: str, model: ModelDims, engine: str = "vllm", version: str = ""
) -> Iterator[LatencyTable]:
    """Decode and prefill of a model's linear attention (Gated DeltaNet, Kimi Delta Attention),
    newest version. A row is the convolution and the delta rule together, the median over models of
    these heads. None of Mamba-2."""
    if not model.n_linear_layers or model.linear_kind not in _LINEAR:
        return
    part, named = _LINEAR[model.linear_kind]
    shape = linear_attention_shape(model)
    names = {"num_k_heads": "n_key_heads", "num_v_heads": "n_value_heads"}
    names |= {"head_k_dim": "head_dim", "head_v_dim": "head_dim"}
    for kind, phase, _ in _ATTENTION:
        wanted = {name: shape[own] for name, own in names.items()}
        found = first_rows(
            gpu, part, engine, f"{named}_perf.parquet", version, phase=phase, **wanted
        )
        if found is None:
            continue
        file, rows = found
        keys = ["batch_size", "seq_len"]
        points = median_rows(rows, ["kernel_source", *keys])
        if model.linear_kind == "kda":
            points = _kda_points(points, keys)
        else:
            whole = points.groupby(keys)["latency"].transform("size")
            both = points[whole == rows.kernel_source.nunique()]
            points = both.groupby(keys)["latency"].sum().reset_index()
        if points.empty:
            continue
        if kind == "attention_decode":  # as long for every context
            points = pd.concat([points.assign(seq_len=length) for length in (1, LONGEST)])
        axis = "context" if kind == "attention_decode" else "new_tokens"
        points = points.rename(columns={"batch_size": "batch", "seq_len": axis})
        yield package_table(kind, file, rows, points, shape=shape, dtype="bfloat16")


def _kda_points(points: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Return the convolution and the delta rule together. A prompt takes one of two kernels for
    each by its length; decode kernels that fuse both are left out, as the rows do not say which of
    them an engine runs. Empty where a convolution times its launch: .8 ms for one token (vLLM
    0.1.dev19262 on H200)."""
    first = points.kernel_source.str.startswith("causal_conv1d")
    fused = points.kernel_source.str.contains("kda_decode|kda_fused")
    convolution = points[first].groupby(keys)["latency"].min()
    if convolution.empty or convolution.min() > _CONVOLUTION_MS:
        return points[:0]
    rule = points[~first & ~fused].groupby(keys)["latency"].min()
    return (convolution + rule).dropna().rename("latency").reset_index()


def gemm_tables(
    gpu: str, dtype: str = "bfloat16", engine: str = "vllm", version: str = ""
) -> Iterator[LatencyTable]:
    """Dense GEMMs of one GPU in a type of weights: every (n, k) of the package, a subset of m.

    The newest vLLM that has rows, or SGLang (same kernels) where vLLM's rows time the launch: FP8
    takes 20 us on a B200 for a matrix of 128 x 128 (5 under SGLang), FP8 blocks 60 us on an H100 or
    H200, 150 and more on a B200, for that matrix as for one of 8192 x 8192. Blocks are always
    SGLang's; weights of 4 and 8 bits TensorRT-LLM's, on an A100 (:data:`_INTEGERS`)."""
    engines = ("sglang",) if dtype == "fp8_block" else ("vllm", "sglang", "trtllm")
    engines = engines if engine == "vllm" else (engine, *engines)
    frames = [
        file
        for name in engines
        for file in sources(
            gpu, "gemm", name, "gemm_perf.parquet", version if name == engine else ""
        )
    ]
    for file in frames:
        rows = file.chosen(gemm_dtype=_INTEGERS.get(dtype, dtype))
        if rows.empty:
            continue
        rows = rows[rows.m.isin(_GEMM_ROWS)]
        least = rows[(rows.m == 1) & (rows.n == _SMALLEST) & (rows.k == _SMALLEST)]
        if rows.empty or (least.latency > _LAUNCH_MS).any():
            continue
        points = median_rows(rows, ["n", "k", "m"])
        table = package_table(
            "gemm", file, rows, points, shape={}, dtype=dtype, latency_dtype=np.float32
        )
        try:
            GemmLatency.from_table(table)
        except InputError:  # versions of a few models' matrices
            continue
        yield table
        return
