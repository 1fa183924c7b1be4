"""Prediction of measured serving runs, the rows of `validation.published.silicon_rows`.

Load: a closed loop at the row's concurrency, ten times as many prompts (5,120 at most), lengths
uniform on [0.8 L, L], end-of-sequence ignored, no prefix cache, 8,192 tokens a step, GPU memory
0.9; prompts are text that one API server a worker tokenises as its version did. Their unknown
routing is drawn from the fit to real tokens nearest to the model. :class:`Form` says what else
counts.

Tables of all models but GPT-OSS and dense ones are imported for the run. Left out: quantising
activations before dense FP8 or FP4 GEMMs, FP8 KV caches of MoE models, FP4 dense and shared MLPs
(NVFP4 checkpoints), and MiniMax's norm of queries and keys over all heads, an all-reduce of 8 bytes
a token in every layer (vllm-project/vllm#31493). Drafts are a configuration's, accepted by
:data:`ACCEPTANCE`. Engines that share experts take vLLM's defaults: ``allgather_reducescatter``, a
node of 8 GPUs; on GB200 72."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels.small_kernels import bytes_alone
from eldr_sim.kernel_profiles.models import KVDtype, ModelDims
from eldr_sim.kernel_profiles.parallel import Padding, Parallelism
from eldr_sim.kernel_profiles.sources.aiconfigurator import (
    attention_tables,
    gemm_tables,
    moe_tables,
)
from eldr_sim.kernel_profiles.sources.marlin import derive_marlin_table
from eldr_sim.kernel_profiles.tables.format import (
    ATTENTION,
    LatencyTable,
    attention_shapes,
    table_name,
)
from eldr_sim.kernel_profiles.tables.library import find_table
from eldr_sim.simulator.outcome.metrics import request_times
from eldr_sim.simulator.plane.front_end import Mode
from eldr_sim.simulator.setup.config.engine_rules import HOST_WAIT_MS, default_fields
from eldr_sim.traces.workload import Workload
from eldr_sim.validation.published import silicon_rows
from eldr_sim.validation.published.launch_scripts import HOPPER, MOE_RUNNERS, Script
from eldr_sim.validation.published.predictions import PublishedRow, errors_of, predict, simulate
from eldr_sim.validation.published.silicon_rows import (
    MEASURED_MODELS,
    Case,
    MeasuredModel,
    MeasuredRun,
    Routing,
    redundant_experts,
)

#: Median and 90th percentile of AIConfigurator 0.12's absolute errors of TPOT and TTFT, %, by model
#: and GPU: predictions by the package itself, on the filtered rows.
AICONFIGURATOR: dict[str, dict[str, dict[str, tuple[float, float]]]] = {
    "gpt-oss-120b": {
        "H100": {"tpot": (5.7, 14.0), "ttft": (33.0, 64.0)},
        "H200": {"tpot": (6.1, 11.8), "ttft": (30.0, 57.0)},
        "B200": {"tpot": (13.1, 44.8), "ttft": (47.0, 82.0)},
    }
}
#: Median and 90th percentile of the differences of 54 runs repeated on other dates, %.
REPEATABILITY = {"tpot": (0.8, 8.7), "ttft": (3.9, 15.0)}

#: Columns whose values make a group of rows.
GROUPS: tuple[tuple[str, ...], ...] = (
    (), ("gpu",), ("gpu", "kind"), ("gpu", "tensor_parallel_size"), ("concurrency",),
)  # fmt: skip

#: Share of multi-token prediction's drafts that are accepted where the one before is. Nobody
#: published it for these prompts: that of each engine's row of 4 streams with 1k prompts and
#: outputs, which is not judged (DeepSeek-R1 FP8, 8 H200 under TensorRT-LLM, 8 B200 under SGLang).
ACCEPTANCE = {"trtllm": 0.774, "sglang": 0.631}

_PROMPTS_PER_SLOT, _MOST_PROMPTS = 10, 5120
_GPT_OSS = MEASURED_MODELS["gpt-oss-120b"]


@dataclass(frozen=True)
class Form:
    """What predictions take into account; none of it is chosen by the measurements."""

    routing: Routing = "drawn"  #: ``uniform``, or ``drawn`` for the model
    #: CPU of the API server, see `kernel_profiles.kernels.front_end`; None for no front end.
    frontend: str | None = "xeon-emerald-rapids"
    cpu_slowdown: float = 1.0  #: factor of its times over the table's
    padding: bool = True  #: whether Marlin computes the zeros that vLLM pads MXFP4 weights with
    #: Whether norms take `parts.NORMS_S` (chosen with five rows in view), or by bytes.
    norms: bool = True
    #: What the padding rows of CUDA graphs compute (`steps.cuda_graphs`).
    graphs: Padding = "none"


_BARE = Form(routing="uniform", frontend=None, padding=False)

#: Predictions by what they take into account. The last ones vary the complete one.
FORMS: dict[str, Form] = {
    "neither": _BARE,
    "padding": Form(routing="uniform", frontend=None),
    "drawn routing": Form(frontend=None, padding=False),
    "padding, drawn routing": Form(frontend=None),
    "front end": Form(routing="uniform", padding=False),
    "front end, padding": Form(routing="uniform"),
    "all": Form(),
    "all, CPU x 0.7": Form(cpu_slowdown=0.7),
    "all, CPU x 1.3": Form(cpu_slowdown=1.3),
    "all, norms by bytes alone": Form(norms=False),
    "all, padded graphs": Form(graphs="dense"),
    "all, padded graphs and experts": Form(graphs="experts"),
}


class Load(NamedTuple):
    """A configuration, its engine's version, and how the API servers of that version tokenise."""

    case: Case
    tokenizer_mode: Mode
    engine_version: str | None = None  #: None: rules and kernels of the newest


def load_of(run: MeasuredRun, target: MeasuredModel) -> Load:
    """Return a row's configuration. Nightly builds and rows without a version have the newest
    rules, and so has TensorRT-LLM, of which none depends on it."""
    numbered = re.match(r"\d+(\.\d+)+(\.post\d+)?", run.version)
    version = numbered[0] if numbered and target.backend != "trtllm" else None
    return Load(run.case, tokenizer_mode(run.version, target.tokenizes), version)


def case_fields(case: Case, target: MeasuredModel, form: Form) -> dict[str, Any]:
    """Return the fields of a configuration's run, less its tables and API servers."""
    pool, dims = case.prefill, target.dims()
    twice = redundant_experts(case.parallelism, dims)
    engine = {"engine": target.backend, "gpu": case.gpu,
              "tensor_parallel_size": case.tensor_parallel_size,
              "data_parallel_size": case.data_parallel_size}  # fmt: skip
    return (
        engine
        | {"gpu_memory_utilization": _memory_share(case, engine)}
        | launch_options(case, target)
        | {
            "topology": f"{pool.count}P{case.decode_workers}D" if pool.count else "1C",
            "model": target.model,
            "enable_expert_parallel": case.expert_parallel,
            "num_redundant_experts": twice,
            "prefill": {
                "tensor_parallel_size": pool.tensor_parallel_size,
                "enable_expert_parallel": pool.expert_parallel,
                "data_parallel_size": pool.data_parallel_size,
                "num_redundant_experts": redundant_experts(pool.parallelism, dims),
            }
            | _prefill_chunk(case, target)
            if pool.count
            else {},
            "prefill_policy": "round_robin" if pool.count else "prefix_hash",
            "gpus_per_node": 72 if case.gpu == "GB200" else 8,
            "request_rate": "inf",
            "max_concurrency": case.concurrency,
            "max_num_seqs": _seats(case, target),
            "kv_cache_dtype": "fp8"
            if _kv_dtype(case.gpu, target, case.script) == "fp8"
            else "auto",
            "enable_prefix_caching": False,
            "cudagraph_padding": form.graphs,
        }
        | _drafts(case, target)
    )


def _memory_share(case: Case, engine: dict[str, Any]) -> float:
    """Return the engine's default, or what SGLang's recipes of wide and of GB200's workers say.
    ``mem-fraction-static`` of NVIDIA/srt-slurm's ``recipes/gb200-fp8/1k1k``, ``mid-curve.yaml`` and
    ``low-latency.yaml``."""
    pool = case.prefill
    if engine["engine"] == "sglang" and pool.count:
        if case.gpu == "GB200" and min(case.parallelism.n_gpus, pool.parallelism.n_gpus) <= 4:
            return 0.95
        if case.data_parallel_size > 8:
            return 0.82
    return float(default_fields(engine).get("gpu_memory_utilization", 0.9))


def _kv_dtype(gpu: str, target: MeasuredModel, script: Script) -> KVDtype:
    """Return the type of the KV cache: SGLang's scripts of DeepSeek name FP8 on Blackwell alone."""
    if script.kv_dtype is not None:
        return script.kv_dtype
    hopper = gpu in HOPPER and target.backend == "sglang"
    return "bfloat16" if hopper else target.kv_cache_dtype


def _drafts(case: Case, target: MeasuredModel) -> dict[str, Any]:
    """Return the drafts of a run; each is accepted with the engine's share if those before are."""
    if not case.drafts:
        return {}
    rates = [ACCEPTANCE[target.backend] ** (i + 1) for i in range(case.drafts)]
    config = {"method": "mtp", "num_speculative_tokens": case.drafts}
    return {"speculative_config": config | {"synthetic_acceptance_rates": rates}}


def launch_options(case: Case, target: MeasuredModel) -> dict[str, Any]:
    """Return what the launch scripts of a row's engine said of its scheduler.

    InferenceX's (``benchmarks/*.sh`` of September 2025 to April 2026): on B200 SGLang polls every
    30 steps from 16 streams on (FP8: on 8 GPUs alone), else every 10, and its chunks of FP8 models
    are 32,768 tokens; TensorRT-LLM's ``max_num_tokens`` are 20,000 for GPT-OSS, 16,384 where
    Llama-70B waits (20 steps or nine tenths of them, 1k prompts and outputs on fewer than 8 GPUs),
    else a prompt's and a token for each stream, and what `launch_scripts` says; KV caches of
    co-located DeepSeek take .8 of the free memory, .75 on Hopper, of GPT-OSS .85."""
    generated = _generated(case, target)
    if generated:
        return generated
    trtllm, blackwell = target.backend == "trtllm", case.gpu not in HOPPER
    engines = case.data_parallel_size
    if target.backend == "sglang":
        chunk, script = _sglang_chunk(case, target), case.script
        verified = case.concurrency * (1 + case.drafts)  # the chunk does not bound these
        told: dict[str, Any] = {"max_num_batched_tokens": max(chunk // engines, verified)}
        told["piecewise_cuda_graph"] = script.piecewise_graphs  # SGLang's default since 0.5.10
        if script.memory_share:
            return told | {"gpu_memory_utilization": script.memory_share,
                           "scheduler_recv_interval": script.recv_interval}  # fmt: skip
        if target.inferencex and blackwell and engines == 1:
            rare = target.precision == "fp4" or case.tensor_parallel_size == 8
            told["scheduler_recv_interval"] = 30 if rare and case.concurrency >= 16 else 10
        return told
    if not (trtllm and target.inferencex):
        told = {"max_num_batched_tokens": case.script.chunk or 8192}
        captures = target.inferencex and target.backend == "vllm"
        return told | ({"max_cudagraph_capture_size": case.script.captured} if captures else {})
    balances = {"attention_dp_balance": True} if engines > 1 and not case.prefill.count else {}
    if target.dims().name.startswith("gpt-oss"):
        told = {"max_num_batched_tokens": 20000} | balances
        return told | ({} if case.prefill.count else {"gpu_memory_utilization": 0.85})
    short = case.input_len == case.output_len == 1024
    if target.dims().is_dense and short and case.tensor_parallel_size < 8:
        return {"max_num_batched_tokens": 16384, "batch_wait_timeout_iters": 20,
                "batch_wait_max_tokens_ratio": 0.9}  # fmt: skip
    verified = case.concurrency * (1 + case.drafts)
    tokens = (verified + case.input_len + 127) // 64 * 64
    told = {"max_num_batched_tokens": max(tokens, case.script.least_tokens)}
    if not (target.dims().is_dense or case.prefill.count):
        told["gpu_memory_utilization"] = 0.75 if case.gpu in HOPPER else 0.8
    if balances:
        told |= balances | {"attention_dp_timeout_iters": 60, "attention_dp_batching_wait_iters": 0}
    if case.script.piecewise_graphs:
        told["piecewise_cuda_graph"] = True
    if case.script.waits:
        told |= {"batch_wait_timeout_iters": 40, "batch_wait_max_tokens_ratio": 0.8}
    return told


def _generated(case: Case, target: MeasuredModel) -> dict[str, Any]:
    """Return what NVIDIA's own runs were launched with; nothing for others, and the oldest.

    AIConfigurator's ``eval`` launched what its generator wrote: of TensorRT-LLM 1.0.0rc3
    ``cli/backends/trtllm.py`` (ai-dynamo/aiconfigurator 961028348, August 2025), of vLLM 0.12 and
    SGLang 0.5.6 ``generator/rule_plugin`` (2063ee024, February 2026). A step has room for the
    batch, a prompt and 1,500 tokens; SGLang's prompts share the latter two with decoding. vLLM 0.12
    schedules a step when the last one has ended: :data:`HOST_WAIT_MS`."""
    room = case.input_len + 1500
    if target.inferencex or case.prefill.count:
        return {}
    told: dict[str, Any] = {"max_num_batched_tokens": case.concurrency + room}
    if target.backend == "trtllm":
        return told | {"gpu_memory_utilization": 0.8}
    if target.backend == "vllm":
        return told | {"async_scheduling": False, "host_gap_ms": HOST_WAIT_MS}
    if target.precision == "":  # SGLang 0.5.1, older than the generator
        return {}
    tokens = max(min(_sglang_chunk(case, target), room), case.concurrency)
    return {"max_num_batched_tokens": tokens, "enable_mixed_chunk": True}


def _sglang_chunk(case: Case, target: MeasuredModel) -> int:
    """Return ``--chunked-prefill-size``, which SGLang divides by its data-parallel engines."""
    if case.script.chunk:
        return case.script.chunk
    if target.inferencex and target.precision == "fp8":
        return 32768
    return 8192 if case.gpu in HOPPER else 16384


def _prefill_chunk(case: Case, target: MeasuredModel) -> dict[str, int]:
    """Return what bounds a step of a prefill worker where it is not what bounds a decode step."""
    if target.backend != "sglang":
        return {}
    chunk = _sglang_chunk(case, target) // case.prefill.data_parallel_size
    return {
        "max_num_batched_tokens": chunk,
        "max_num_seqs": min(case.concurrency, chunk // (1 + case.drafts)),
    }


def front_end(form: Form, mode: Mode) -> dict[str, Any]:
    """Return the fields of the API servers; a host of these GPUs has cores for each of a batch."""
    if form.frontend is None:
        return {"frontend": "none"}
    return {
        "frontend": form.frontend,
        "cpu_slowdown": form.cpu_slowdown,
        "tokenizer_mode": mode,
        "tokenizer_threads": 32 if mode == "microbatch_parallel" else 1,
    }


def tokenizer_mode(version: str, backend: str = "vllm") -> Mode:
    """Return how a version of an engine tokenises; rows without one are of 2025, vLLM 0.10 or 0.11.
    vLLM passes a maximum length since 0.15 (`vllm/renderers/params.py`), which forbids batches, and
    has had none since June 2026. SGLang and Dynamo tokenise one prompt after the other."""
    if backend != "vllm":
        return "thread_pool"
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return "microbatch_sequential" if version else "microbatch_parallel"
    number = int(match[1]), int(match[2])
    if number < (0, 15):
        return "microbatch_parallel"
    return "microbatch_sequential" if number < (0, 24) else "thread_pool"


def _seats(case: Case, target: MeasuredModel) -> int | None:
    """Return max_num_seqs: the scripts' on Hopper, GPT-OSS and Llama, vLLM's default elsewhere."""
    if target.backend != "vllm":
        return min(case.concurrency, case.script.seats or case.concurrency)
    if case.gpu in HOPPER or not target.inferencex:
        return case.concurrency
    return 512 if target is _GPT_OSS or target.dims().is_dense else None


def _closed_loop(case: Case, target: MeasuredModel) -> Workload:
    n = min(_PROMPTS_PER_SLOT * case.concurrency, _MOST_PROMPTS)
    rng = np.random.default_rng([case.input_len, case.output_len, case.concurrency])

    def lengths(longest: int) -> np.ndarray:
        least = int(0.8 * longest) if target.inferencex else longest
        return rng.integers(least, longest + 1, n).astype(np.int32)

    which = rng.integers(silicon_rows.REQUESTS, size=n).astype(np.int32)
    drawn = lengths(case.input_len), lengths(case.output_len)
    offset = rng.integers(silicon_rows.OUTPUT, size=n).astype(np.int32)
    if target.dims().is_dense:
        which, offset = 0 * which, 0 * offset
    return Workload.plain(np.zeros(n), drawn, which, replay_offset=offset)


def case_tables(
    folder: Path,
    cases: Iterable[Case],
    moe_kernel: str,
    target: MeasuredModel = _GPT_OSS,
    form: Form | None = None,
) -> Path | None:
    """Write tables beyond the shipped ones, if any; InputError where the package lacks one."""
    model, form = target.dims(), form or Form()
    found: list[LatencyTable] = []

    def need(kind: str, gpu: str, size: int, tables: list[LatencyTable]) -> list[LatencyTable]:
        if not tables:
            raise InputError("silicon", f"no {kind} table of {model.name} on {size} {gpu}")
        return tables

    pools = {(case.gpu, case.parallelism, case.script) for case in cases}
    pools |= {(c.gpu, c.prefill.parallelism, c.script) for c in cases if c.prefill.count}
    for gpu, parallelism, script in sorted(pools, key=str):
        size = parallelism.tensor_parallel_size
        shard = parallelism.shard(model)
        shard = shard.model_copy(update={"kv_cache_dtype": _kv_dtype(gpu, target, script)})
        if moe_kernel == "marlin":
            if gpu in HOPPER:
                found.append(derive_marlin_table(gpu, model, parallelism, padding=form.padding))
        elif target.imported:
            table = _moe_table(
                gpu, model, parallelism, target.backend, script.moe_runner, moe_kernel
            )
            found += need("MoE", gpu, size, [] if table is None else [table])
            if not _ships(gpu, shard):
                attention = list(attention_tables(gpu, shard, target.backend))
                attention = attention or list(attention_tables(gpu, shard))
                found += need("attention", gpu, size, attention)
            found += need("GEMM", gpu, size, list(gemm_tables(gpu, model.linear_dtype)))
        elif target.backend != "vllm":  # whose dense kernels ship
            if not _ships(gpu, shard):
                found += attention_tables(gpu, shard, target.backend)
            # TensorRT-LLM's NVFP4 rows take 1.7 times what vLLM's and SGLang's do: not used.
            for dtype in sorted({model.linear_dtype, "bfloat16"} - {"nvfp4"}):
                found += gemm_tables(gpu, dtype, target.backend)
        if not form.norms:
            found.append(bytes_alone(shard, load_gpu(gpu)))
    for table in found:
        table.save(folder / table_name(table.metadata))
    return folder if found else None


def _ships(gpu: str, shard: ModelDims) -> bool:
    """Return whether tables of a part's MLA ship: those that a run takes, the newest."""
    return shard.attention == "mla" and all(
        find_table(kind, gpu, shape=shape) is not None
        for _, _, shape in attention_shapes(shard)
        for kind in ATTENTION
    )


def _moe_table(
    gpu: str, model: ModelDims, spread: Parallelism, engine: str, runner: str, moe_kernel: str
) -> LatencyTable | None:
    """Return the MoE table of a pool: of its runner if it is known, else the engine's own rows
    before vLLM's, of the layout before those of a GPU with all experts, read at the rank's
    count."""
    shared = spread.data_parallel_size > 1
    layouts = [] if shared else [spread]
    if spread.expert_parallel:
        layouts.append(Parallelism())
    elif shared and spread.n_ranks <= 8:
        layouts.append(Parallelism(spread.n_ranks))
    instead: list[LatencyTable] = []
    for layout in layouts:
        for name in dict.fromkeys((engine, "vllm")):
            tables = list(moe_tables(gpu, model, layout, name))  # they come newest first
            sought = MOE_RUNNERS.get(runner, ("",))
            of_runner = [t for t in tables if any(n in t.metadata.kernel_source for n in sought)]
            if of_runner:
                return of_runner[-1 if moe_kernel == "oldest" else 0]
            instead = instead or tables
    return instead[0] if instead else None


def predict_rows(
    rows: Sequence[MeasuredRun],
    *,
    target: MeasuredModel = _GPT_OSS,
    moe_kernel: str | None = None,
    form: Form | None = None,
    progress: Callable[[float], None] = lambda _share: None,
) -> pa.Table:
    """Predict every run of ``target``, and return measured and predicted values.

    Returns table: from `predictions.predict`, ``tpot`` and ``ttft`` of each run; its labels are the
    fields of :class:`Case` and :class:`MeasuredRun`. Raises InputError if the model has no such MoE
    kernel. ``moe_kernel``: ``marlin``, derived (`sources.marlin`): what vLLM ran GPT-OSS with on
    H100 and H200 up to 0.18; ``oldest``: the table of vLLM 0.19 or 0.24, closest to the runs'
    (0.12 to 0.19); ``newest``; None takes the model's first choice."""
    moe_kernel = moe_kernel or target.moe_kernels[0]
    if moe_kernel not in target.moe_kernels:
        allowed = ", ".join(target.moe_kernels)
        raise InputError("moe_kernel", f"{moe_kernel!r} with {target.model_path}", allowed)
    form = form or Form()

    def begin(work: Path) -> Callable[[Load], dict[str, float]]:
        trace = None
        if not target.dims().is_dense:
            trace = silicon_rows.make_routing(work / "trace", form.routing, target)
        cases = sorted({row.case for row in rows})
        tables = case_tables(work / "tables", cases, moe_kernel, target, form)
        return lambda load: predict_load(load, target, form, tables, trace)

    return predict([_published(row, target, form) for row in rows], begin, progress)


def predict_load(
    load: Load, target: MeasuredModel, form: Form, tables: Path | None, trace: Path | None
) -> dict[str, float]:
    """Return the mean ``tpot`` and ``ttft`` of a configuration, ms. ``tables``: beyond the shipped
    ones, from :func:`case_tables`; ``trace``: routing of a MoE model."""
    fields = case_fields(load.case, target, form) | front_end(form, load.tokenizer_mode)
    fields["engine_version"] = load.engine_version
    fields |= {} if tables is None else {"tables": str(tables)}
    times = request_times(simulate(fields, trace, _closed_loop(load.case, target)))
    return {name: 1e3 * float(np.nanmean(times[name])) for name in ("tpot", "ttft")}


def _published(row: MeasuredRun, target: MeasuredModel, form: Form) -> PublishedRow[Load]:
    load = load_of(row, target)
    case, mode = load.case, load.tokenizer_mode
    labels = {k: v for k, v in vars(case).items() if k not in ("prefill", "script")}
    labels |= {"kind": case.kind, "prefill_workers": case.prefill.count}
    labels |= {"tokenizer_mode": mode if form.frontend else "", "version": row.version}
    labels |= {"date": row.date, "excluded": row.excluded}
    return PublishedRow(load, labels, {"tpot": row.tpot_ms, "ttft": row.ttft_ms}, {})


def worst_rows(table: pa.Table, n: int = 10) -> pa.Table:
    """Return the n unmarked rows with the largest TPOT error. ``why`` names runs of an older vLLM
    (the tables are of 0.24); if empty, the error is not explained."""
    frame = _unmarked(table, "tpot")
    frame = frame.reindex(frame.error.abs().sort_values(ascending=False).index)[:n].copy()
    old = frame.date.between("2025", "2026")
    frame["why"] = old.map({True: "run of 2025, vLLM 0.10 or 0.11", False: ""})
    columns = ["gpu", "tensor_parallel_size", "input_len", "output_len", "concurrency"]
    columns += ["date", "measured_ms", "predicted_ms", "error", "why"]
    return pa.Table.from_pandas(frame[columns], preserve_index=False)


def growth_error(table: pa.Table, metric: str) -> float:
    """Return the mean error, %, of a metric's growth from each setting's lowest concurrency, of
    unmarked rows; NaN without two concurrencies."""
    frame = _unmarked(table, metric)
    sizes: list[float] = []
    worker = ["gpu", "tensor_parallel_size", "expert_parallel", "data_parallel_size"]
    worker += ["decode_workers", "prefill_workers"]
    for _, rows in frame.groupby([*worker, "input_len", "output_len"]):
        mean = rows.groupby("concurrency")[["measured_ms", "predicted_ms"]].mean()
        grown = mean / mean.iloc[0]
        ratio = grown["predicted_ms"] / grown["measured_ms"]
        sizes += (100.0 * (ratio.iloc[1:] - 1.0)).abs().tolist()
    return float(np.mean(sizes)) if sizes else float("nan")


def _unmarked(table: pa.Table, metric: str) -> Any:
    frame = table.to_pandas()
    return frame[(frame.excluded == "") & (frame.metric == metric)]


def forms_table(
    rows: Sequence[MeasuredRun],
    target: MeasuredModel,
    moe_kernel: str | None = None,
    progress: Callable[[float], None] = lambda _share: None,
) -> pa.Table:
    """Predict all rows in every form. Returns table: a row a form, group (all, each GPU, each GPU
    and tensor-parallel size) and metric: the number of unmarked rows, and the median, 90th
    percentile and signed median of their errors."""
    records = []
    for done, (name, form) in enumerate(FORMS.items()):

        def part(share: float, done: int = done) -> None:
            progress((done + share) / len(FORMS))

        table = predict_rows(rows, target=target, moe_kernel=moe_kernel, form=form, progress=part)
        groups = ((), ("gpu",), ("gpu", "tensor_parallel_size"))
        records += [
            {"form": name}
            | {key: getattr(error, key) for key in ("group", "metric", "rows", "median", "p90")}
            | {"signed_median": error.middle}
            for error in errors_of(table, groups)
        ]
    return pa.Table.from_pylist(records)
