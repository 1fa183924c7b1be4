"""Prediction of measured serving runs, the rows of `validation.published.silicon_rows`.

Each run is predicted from its configuration alone. Nothing is fitted to the measurements:
:func:`predict` gets a :class:`Case`, which holds no measured value.

The load of a row: closed loop at the row's concurrency, ten times as many prompts (5,120 at most,
which only rows beyond concurrency 512 notice), input and output lengths uniform on [0.8 L, L],
end-of-sequence ignored, no prefix cache, 8,192 tokens a step, GPU memory 0.9. Prompts are text that
one API server a worker tokenises, as its version of vLLM did. The routing of its random prompts is
unknown; it is drawn from the fit to real tokens that is nearest to the model. :class:`Form` says
what else may be taken into account or left out.

Of all models but GPT-OSS and dense ones the tables are imported for the run. Left out: quantising
activations before a dense FP8 or FP4 GEMM, FP8 KV caches of MoE models, FP4 dense and shared MLPs
(NVFP4 checkpoints of these), and what MiniMax's norm of queries and keys over all heads adds under
tensor parallelism, an all-reduce of 8 bytes a token in every layer (vllm-project/vllm#31493).
Multi-token prediction is taken to be off.

Engines that share experts take vLLM's defaults for what the file does not say:
``allgather_reducescatter``, and a node of 8 GPUs; on GB200 the NVLink domain, 72.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.parallel import Padding, Parallelism
from eldr_sim.kernel_profiles.sources.aiconfigurator import (
    attention_tables,
    gemm_tables,
    mla_tables,
    moe_tables,
)
from eldr_sim.kernel_profiles.sources.marlin import derive_marlin_table
from eldr_sim.kernel_profiles.steps.parts import bytes_alone
from eldr_sim.kernel_profiles.tables.format import LatencyTable, table_name
from eldr_sim.simulator.control.cluster import RunRecord
from eldr_sim.simulator.outcome.metrics import request_times
from eldr_sim.simulator.plane.front_end import Mode
from eldr_sim.simulator.run import build_cluster
from eldr_sim.simulator.setup.config import make_config
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.traces.workload import Workload
from eldr_sim.validation.published import silicon_routing
from eldr_sim.validation.published.silicon_routing import Routing
from eldr_sim.validation.published.silicon_rows import (
    MEASURED_MODELS,
    Case,
    MeasuredModel,
    MeasuredRun,
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
    (),
    ("gpu",),
    ("gpu", "kind"),
    ("gpu", "tensor_parallel_size"),
    ("concurrency",),
)

_PROMPTS_PER_SLOT, _MOST_PROMPTS = 10, 5120
_GPT_OSS = MEASURED_MODELS["gpt-oss-120b"]


@dataclass(frozen=True)
class Form:
    """What predictions take into account; none of it is chosen by the measurements.

    Attributes
    ----------
    routing
        ``uniform``, or ``drawn`` for the model.
    frontend
        CPU of the API server, see `kernel_profiles.kernels.front_end`; None for no front
        end.
    cpu_slowdown
        Its times are so much longer than the table's.
    padding
        Whether Marlin computes the zeros that vLLM pads MXFP4 weights with.
    norms
        Whether norms and the like take `parts.NORMS_S` a layer, which was
        chosen with five of the rows in view; else what their bytes take.
    graphs
        What the padding rows of CUDA graphs compute, see
        :mod:`~eldr_sim.kernel_profiles.steps.cuda_graphs`.
    """

    routing: Routing = "drawn"
    frontend: str | None = "xeon-emerald-rapids"
    cpu_slowdown: float = 1.0
    padding: bool = True
    norms: bool = True
    graphs: Padding = "none"


def predict(
    case: Case,
    trace: Path | None,
    tables: Path | None,
    target: MeasuredModel = _GPT_OSS,
    form: Form | None = None,
    tokenizer_mode: Mode = "microbatch_sequential",
) -> tuple[float, float]:
    """Return the predicted mean TTFT and TPOT of a configuration, ms; see `simulate_case`."""
    times = request_times(simulate_case(case, trace, tables, target, form, tokenizer_mode))
    return 1e3 * float(times["ttft"].mean()), 1e3 * float(np.nanmean(times["tpot"]))


def simulate_case(
    case: Case,
    trace: Path | None,
    tables: Path | None,
    target: MeasuredModel = _GPT_OSS,
    form: Form | None = None,
    tokenizer_mode: Mode = "microbatch_sequential",
) -> RunRecord:
    """Simulate a configuration.

    Parameters
    ----------
    case
        The configuration.
    trace
        Routing trace folder that its tokens replay; None for a dense model.
    tables
        Folder of latency tables that take precedence; None uses the shipped ones only.
    target
        The model.
    form
        What to take into account; everything when not given. Its front end and graphs are used
        here, the rest is in the trace and the tables.
    tokenizer_mode
        How the API server tokenises.
    """
    form = form or Form()
    concurrency = case.concurrency
    pool = case.prefill
    config = make_config(
        {
            "topology": f"{pool.count}P{case.decode_workers}D" if pool.count else "1C",
            "policy": "round_robin",
            "model": target.model,
            "gpu": case.gpu,
            "tensor_parallel_size": case.tensor_parallel_size,
            "enable_expert_parallel": case.expert_parallel,
            "data_parallel_size": case.data_parallel_size,
            "prefill": {
                "tensor_parallel_size": pool.tensor_parallel_size,
                "enable_expert_parallel": pool.expert_parallel,
                "data_parallel_size": pool.data_parallel_size,
            }
            if pool.count
            else {},
            "prefill_policy": "round_robin" if pool.count else "prefix_hash",
            "gpus_per_node": 72 if case.gpu == "GB200" else 8,
            "trace": None if trace is None else str(trace),
            "tables": None if tables is None else str(tables),
            "num_requests": _n_prompts(case),
            "request_rate": "inf",
            "max_concurrency": concurrency,
            "max_num_seqs": _seats(case, target),
            "max_num_batched_tokens": 8192,
            "kv_cache_dtype": "fp8" if target.kv_cache_dtype == "fp8" else "auto",
            "gpu_memory_utilization": 0.9,
            "enable_prefix_caching": False,
            "cudagraph_padding": form.graphs,
            **_front_end(form, tokenizer_mode),
        }
    )
    workload = _closed_loop(case, target)
    return build_cluster(config, prepare(config), workload, (0.0, np.inf)).run()


def _front_end(form: Form, mode: Mode) -> dict[str, Any]:
    """Return the fields of the API servers; a host of these GPUs has cores for each of a batch."""
    if form.frontend is None:
        return {}
    return {
        "frontend": form.frontend,
        "cpu_slowdown": form.cpu_slowdown,
        "tokenizer_mode": mode,
        "tokenizer_threads": 32 if mode == "microbatch_parallel" else 1,
    }


def tokenizer_mode(version: str, backend: str = "vllm") -> Mode:
    """Return how a version of an engine tokenises; rows without one are of 2025, vLLM 0.10 or 0.11.

    vLLM passes a maximum length since 0.15 (`vllm/renderers/params.py`), which keeps the tokeniser
    from taking prompts as a batch, and has had no batches since June 2026. SGLang tokenises one
    prompt after the other.
    """
    if backend != "vllm":
        return "thread_pool"
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return "microbatch_sequential" if version else "microbatch_parallel"
    number = int(found[1]), int(found[2])
    if number < (0, 15):
        return "microbatch_parallel"
    return "microbatch_sequential" if number < (0, 24) else "thread_pool"


def _n_prompts(case: Case) -> int:
    return min(_PROMPTS_PER_SLOT * case.concurrency, _MOST_PROMPTS)


def _seats(case: Case, target: MeasuredModel) -> int | None:
    """Return max_num_seqs: the scripts' on Hopper, GPT-OSS and Llama, vLLM's default elsewhere."""
    if not target.inferencex:
        return None
    if case.gpu in ("H100", "H200"):
        return case.concurrency
    return 512 if target is _GPT_OSS or target.dims().is_dense else None


def _closed_loop(case: Case, target: MeasuredModel) -> Workload:
    n = _n_prompts(case)
    rng = np.random.default_rng([case.input_len, case.output_len, case.concurrency])

    def lengths(longest: int) -> np.ndarray:
        least = int(0.8 * longest) if target.inferencex else longest
        return rng.integers(least, longest + 1, n).astype(np.int32)

    which = rng.integers(silicon_routing.REQUESTS, size=n).astype(np.int32)
    prompt_len, output_len = lengths(case.input_len), lengths(case.output_len)
    offset = rng.integers(silicon_routing.OUTPUT, size=n).astype(np.int32)
    if target.dims().is_dense:
        which, offset = 0 * which, 0 * offset
    return silicon_routing.plain_workload(
        arrival_s=np.zeros(n),
        prompt_len=prompt_len,
        output_len=output_len,
        text=which,
        replay_offset=offset,
    )


def case_tables(
    folder: Path,
    cases: Iterable[Case],
    moe_kernel: str,
    target: MeasuredModel = _GPT_OSS,
    form: Form | None = None,
) -> Path | None:
    """Write the tables that cases need beyond the shipped ones; return None if there are none.

    Raises
    ------
    InputError
        If the package lacks a MoE, attention or GEMM table of a case.
    """
    model, form = target.dims(), form or Form()
    found: list[LatencyTable] = []

    def need(kind: str, gpu: str, size: int, tables: list[LatencyTable]) -> list[LatencyTable]:
        if not tables:
            raise InputError("silicon", f"no {kind} table of {model.name} on {size} {gpu}")
        return tables

    pools = {(case.gpu, case.parallelism) for case in cases}
    pools |= {(case.gpu, case.prefill.parallelism) for case in cases if case.prefill.count}
    for gpu, parallelism in sorted(pools, key=str):
        size = parallelism.tensor_parallel_size
        shard = parallelism.shard(model)
        if moe_kernel == "marlin":
            if gpu in ("H100", "H200"):
                found.append(derive_marlin_table(gpu, model, parallelism, padding=form.padding))
        elif target.shipped is None and not model.is_dense:  # those tables ship
            # A rank that tokens are dispatched to is read as a GPU that holds all experts.
            shared = parallelism.data_parallel_size > 1
            moe = need(
                "MoE",
                gpu,
                size,
                list(moe_tables(gpu, model, Parallelism() if shared else parallelism)),
            )
            found.append(moe[-1 if moe_kernel == "oldest" else 0])  # they come newest first
            attention = [*attention_tables(gpu, shard), *mla_tables(gpu, shard)]
            found += need("attention", gpu, size, attention)
            found += need("GEMM", gpu, size, list(gemm_tables(gpu, model.linear_dtype)))
        if not form.norms:
            found.append(bytes_alone(shard, load_gpu(gpu)))
    for table in found:
        table.save(folder / table_name(table.metadata))
    return folder if found else None


def predict_rows(
    rows: Sequence[MeasuredRun],
    *,
    target: MeasuredModel = _GPT_OSS,
    moe_kernel: str | None = None,
    form: Form | None = None,
    progress: Callable[[float], None] = lambda _share: None,
) -> pa.Table:
    """Predict every run, and return measured and predicted values.

    Parameters
    ----------
    rows
        The measured runs.
    target
        Their model.
    moe_kernel
        ``marlin``: what vLLM ran GPT-OSS with on H100 and H200 up to 0.18, derived, see
        :mod:`~eldr_sim.kernel_profiles.sources.marlin`. ``oldest``: the table of the oldest vLLM
        (0.19 or 0.24), which is closest to that of the runs (0.12 to 0.19). ``newest``: the newest
        table. None takes the model's first choice.
    form
        What predictions take into account; everything when not given.
    progress
        Called with the share of configurations done.

    Returns
    -------
    table
        One row a measured run, in order: the fields of :class:`Case` and :class:`MeasuredRun`,
        ``predicted_ttft_ms``, ``predicted_tpot_ms``, and ``ttft_error``, ``tpot_error`` in %.

    Raises
    ------
    InputError
        If the model has no such MoE kernel.
    """
    moe_kernel = moe_kernel or target.moe_kernels[0]
    if moe_kernel not in target.moe_kernels:
        allowed = ", ".join(target.moe_kernels)
        raise InputError("moe_kernel", f"{moe_kernel!r} with {target.model_path}", allowed)
    form = form or Form()
    modes = {row: tokenizer_mode(row.version, target.backend) for row in rows}
    wanted = sorted({(row.case, modes[row]) for row in rows})
    predicted: dict[tuple[Case, Mode], tuple[float, float]] = {}
    with ExitStack() as stack:
        work = Path(stack.enter_context(TemporaryDirectory()))
        trace = None
        if not target.dims().is_dense:
            trace = silicon_routing.make_routing(work / "trace", form.routing, target)
        cases = [case for case, _ in wanted]
        tables = case_tables(work / "tables", cases, moe_kernel, target, form)
        for done, (case, mode) in enumerate(wanted, 1):
            predicted[case, mode] = predict(case, trace, tables, target, form, mode)
            progress(done / len(wanted))
    records: list[dict[str, Any]] = []
    for row in rows:
        ttft, tpot = predicted[row.case, modes[row]]
        measured = {k: v for k, v in vars(row).items() if k != "case"}
        records.append(
            {k: v for k, v in vars(row.case).items() if k != "prefill"}
            | {"kind": row.case.kind, "prefill_workers": row.case.prefill.count}
            | {"tokenizer_mode": modes[row] if form.frontend else ""}
            | measured
            | {
                "predicted_ttft_ms": ttft,
                "predicted_tpot_ms": tpot,
                "ttft_error": 100.0 * (ttft / row.ttft_ms - 1.0),
                "tpot_error": 100.0 * (tpot / row.tpot_ms - 1.0),
            }
        )
    return pa.Table.from_pylist(records)


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors of a group of rows, %.

    Attributes
    ----------
    group, metric
        Name of the group; ``tpot`` or ``ttft``.
    rows, median, p90, bias, middle
        Number of unmarked rows, and their errors; ``bias`` is the signed mean, ``middle`` the
        signed median.
    all_rows, all_median, all_p90
        The same including marked rows.
    """

    group: str
    metric: str
    rows: int
    median: float
    p90: float
    bias: float
    middle: float
    all_rows: int
    all_median: float
    all_p90: float


def silicon_errors(table: pa.Table, groups: Sequence[Sequence[str]] = GROUPS) -> list[Errors]:
    """Return the errors of groups of rows.

    Parameters
    ----------
    table
        From :func:`predict_rows`.
    groups
        Sets of columns; each combination of their values is a group.
    """
    frame = table.to_pandas()
    found = []
    for by in groups:
        parts = frame.groupby(list(by), sort=True) if by else [((), frame)]
        for key, every in parts:
            kept = every[every.excluded == ""]
            if kept.empty:
                continue
            values = key if isinstance(key, tuple) else (key,)
            name = ", ".join(f"{k} {v}" for k, v in zip(by, values, strict=True)) or "all"
            for metric in ("tpot", "ttft"):
                sizes = {len(rows): rows[f"{metric}_error"].abs() for rows in (kept, every)}
                found.append(
                    Errors(
                        name,
                        metric,
                        len(kept),
                        float(sizes[len(kept)].median()),
                        float(sizes[len(kept)].quantile(0.9)),
                        float(kept[f"{metric}_error"].mean()),
                        float(kept[f"{metric}_error"].median()),
                        len(every),
                        float(sizes[len(every)].median()),
                        float(sizes[len(every)].quantile(0.9)),
                    )
                )
    return found


def worst_rows(table: pa.Table, n: int = 10) -> pa.Table:
    """Return the n unmarked rows with the largest TPOT error.

    ``why`` names runs of an older vLLM (the tables are of 0.24); if empty, the error is not
    explained.
    """
    frame = table.to_pandas()
    frame = frame[frame.excluded == ""]
    frame = frame.reindex(frame.tpot_error.abs().sort_values(ascending=False).index)[:n].copy()
    old = frame.date.between("2025", "2026")
    frame["why"] = old.map({True: "run of 2025, vLLM 0.10 or 0.11", False: ""})
    columns = ["gpu", "tensor_parallel_size", "input_len", "output_len", "concurrency"]
    columns += ["date", "tpot_ms", "predicted_tpot_ms", "tpot_error", "why"]
    return pa.Table.from_pandas(frame[columns], preserve_index=False)


def growth_error(table: pa.Table, metric: str) -> float:
    """Return the mean error of a metric's growth with concurrency, %.

    Growth is relative to the lowest concurrency of each setting (GPU, parallelism, lengths) of the
    unmarked rows; NaN if no setting has two concurrencies.
    """
    frame = table.to_pandas()
    frame = frame[frame.excluded == ""]
    sizes: list[float] = []
    worker = ["gpu", "tensor_parallel_size", "expert_parallel", "data_parallel_size"]
    worker += ["decode_workers", "prefill_workers"]
    for _, rows in frame.groupby([*worker, "input_len", "output_len"]):
        mean = rows.groupby("concurrency")[[f"{metric}_ms", f"predicted_{metric}_ms"]].mean()
        grown = mean / mean.iloc[0]
        ratio = grown[f"predicted_{metric}_ms"] / grown[f"{metric}_ms"]
        sizes += (100.0 * (ratio.iloc[1:] - 1.0)).abs().tolist()
    return float(np.mean(sizes)) if sizes else float("nan")
