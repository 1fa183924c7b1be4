"""Predicting real serving runs: the measured rows that ``aiconfigurator-core`` publishes.

``silicon_sample.csv`` of the package holds end-to-end runs (InferenceX scripts) with measured mean
TTFT and TPOT. This module reads those of GPT-OSS-120B on vLLM, one engine on one worker of 1 to 8
GPUs, and predicts each from its configuration alone. Nothing here or below is fitted on them:
:func:`predict` gets a :class:`Case`, which has no measured figure.

The load of a row: closed loop, as many requests in flight as the row says, ten times as many
prompts, input and output lengths uniform on [0.8 L, L], end-of-sequence ignored, no prefix cache,
8,192 tokens a step, GPU memory 0.9. The routing of its random prompts is not known: uniform.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.marlin import derive_marlin_table
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.simulator.config import make_config
from eldr_sim.simulator.metrics import request_times
from eldr_sim.simulator.run import build_cluster, prepare
from eldr_sim.traces.workload import Workload
from eldr_sim.traces.writer import write_trace

MODEL = "GPT-OSS-120B"
GPUS = {"h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200"}

#: Median and 90th percentile of AIConfigurator 0.12's absolute errors on these rows, %, by GPU:
#: TPOT and TTFT. Its own predictions, made and scored with the package itself, filtered rows.
AICONFIGURATOR = {
    "H100": {"tpot": (5.7, 14.0), "ttft": (33.0, 64.0)},
    "H200": {"tpot": (6.1, 11.8), "ttft": (30.0, 57.0)},
    "B200": {"tpot": (13.1, 44.8), "ttft": (47.0, 82.0)},
}
#: Median and 90th percentile of how far 54 runs repeated on other dates differ, %.
REPEATABILITY = {"tpot": (0.8, 8.7), "ttft": (3.9, 15.0)}

_PROMPTS_PER_SEAT = 10
_TRACE_REQUESTS, _TRACE_PROMPT, _TRACE_OUTPUT = 32, 128, 96


@dataclass(frozen=True, order=True)
class Case:
    """The configuration of a measured run."""

    gpu: str
    tensor_parallel_size: int
    input_len: int
    output_len: int
    concurrency: int


@dataclass(frozen=True)
class Row:
    """A measured run.

    Attributes
    ----------
    case
        Its configuration.
    ttft_ms, tpot_ms
        Means over its requests.
    version, date
        Of vLLM (empty where the file does not say), and of the measurement.
    excluded
        Why the row is left out of the filtered errors; empty where it is not. The reasons use
        measurements only, never a prediction.
    """

    case: Case
    ttft_ms: float
    tpot_ms: float
    version: str
    date: str
    excluded: str = ""


def read_rows(path: Path | None = None) -> list[Row]:
    """Read the rows, each configuration with the same figures once, and mark the doubtful ones.

    Parameters
    ----------
    path
        The CSV; None takes that of the installed package ``aiconfigurator-core``.

    Raises
    ------
    InputError
        The package is not installed, or the file has no such rows.
    """
    if path is None:
        try:
            root = Path(str(resources.files("aiconfigurator_core")))
        except ModuleNotFoundError:
            raise InputError(
                "aiconfigurator",
                "the package aiconfigurator-core, which has the measured runs, is not installed",
                "pip install 'eldr-sim[aiconfigurator]'",
            ) from None
        path = root / "systems" / "silicon_sample.csv"
    with path.open(encoding="utf-8", newline="") as file:
        found = {row for record in csv.DictReader(file) if (row := _row(record)) is not None}
    if not found:
        raise InputError("silicon", f"{path} has no vLLM row of {MODEL}")
    return _marked(sorted(found, key=lambda r: (r.case, r.date, r.tpot_ms)))


def _row(record: dict[str, str]) -> Row | None:
    concurrency = re.search(r"silicon_concurrency=(\d+)", record["silicon_data_source"])
    wanted = (record["model_path"], record["backend"], record["mode"])
    if wanted != ("openai/gpt-oss-120b", "vllm", "agg") or record["system"] not in GPUS:
        return None
    if concurrency is None or record["attention_dp_size"] != "1":
        return None
    date = re.search(r"measured=([\d-]+)", record["silicon_data_source"])
    lengths = int(record["isl"]), int(record["osl"])
    return Row(
        Case(GPUS[record["system"]], int(record["tp_size"]), *lengths, int(concurrency[1])),
        round(float(record["silicon_ttft_ms"]), 3),
        round(float(record["silicon_tpot_ms"]), 3),
        record["backend_version"],
        date[1] if date else "",
    )


def _marked(rows: Sequence[Row]) -> list[Row]:
    """Say which rows contradict themselves or their neighbours."""
    fallen: set[Row] = set()
    for i, row in enumerate(rows):
        for other in rows[i + 1 :]:
            same = (row.case.gpu, row.case.tensor_parallel_size, row.case.input_len) == (
                other.case.gpu,
                other.case.tensor_parallel_size,
                other.case.input_len,
            )
            if not same or row.case.output_len != other.case.output_len:
                continue
            if other.case.concurrency != 2 * row.case.concurrency or other.date != row.date:
                continue
            if other.tpot_ms < 0.9 * row.tpot_ms:
                fallen |= {row, other}

    def reason(row: Row) -> str:
        if row.case.gpu == "H100" and row.case.concurrency == 512:
            return "H100 at concurrency 512: TTFT of minutes beside TPOT of milliseconds"
        if row.ttft_ms > 0.25 * row.tpot_ms * row.case.output_len:
            return "TTFT over a quarter of the decode time"
        if row in fallen:
            return "TPOT falls by over 10% as concurrency doubles"
        return ""

    return [Row(**(vars(row) | {"excluded": reason(row)})) for row in rows]


def predict(case: Case, trace: Path, tables: Path | None) -> tuple[float, float]:
    """Return the mean TTFT and TPOT, ms, of a run of this configuration.

    Parameters
    ----------
    case
        The configuration.
    trace
        Routing trace folder that its tokens replay, see :func:`uniform_trace`.
    tables
        Folder of latency tables that take precedence; None takes the shipped ones alone.
    """
    seats = case.concurrency
    config = make_config(
        {
            "topology": "1C",
            "policy": "round_robin",
            "model": MODEL,
            "gpu": case.gpu,
            "tensor_parallel_size": case.tensor_parallel_size,
            "trace": str(trace),
            "tables": None if tables is None else str(tables),
            "num_requests": _PROMPTS_PER_SEAT * seats,
            "request_rate": "inf",
            "max_concurrency": seats,
            "max_num_seqs": 512 if case.gpu == "B200" else seats,
            "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.9,
            "enable_prefix_caching": False,
        }
    )
    workload = _closed_loop(case)
    cluster = build_cluster(config, prepare(config), workload, (0.0, np.inf))
    times = request_times(cluster.run())
    return 1e3 * float(times["ttft"].mean()), 1e3 * float(np.nanmean(times["tpot"]))


def _closed_loop(case: Case) -> Workload:
    n = _PROMPTS_PER_SEAT * case.concurrency
    rng = np.random.default_rng([case.input_len, case.output_len, case.concurrency])

    def lengths(longest: int) -> np.ndarray:
        return rng.integers(int(0.8 * longest), longest + 1, n).astype(np.int32)

    which = rng.integers(_TRACE_REQUESTS, size=n).astype(np.int32)
    return Workload(
        arrival_s=np.zeros(n),
        prompt_len=lengths(case.input_len),
        output_len=lengths(case.output_len),
        trace_request=which,
        decode_request=which,
        replay_offset=rng.integers(_TRACE_OUTPUT, size=n).astype(np.int32),
        domain=np.zeros(n, np.int16),
        session=np.arange(n, dtype=np.int32),
        prefix_hash=np.empty(0, np.uint64),
        prefix_indptr=np.zeros(n + 1, np.int64),
        prefix_trace_request=np.empty(0, np.int32),
        prefix_block_tokens=0,
        description={},
    )


def uniform_trace(folder: Path, seed: int = 0) -> Path:
    """Write a trace whose tokens choose the model's experts uniformly at random."""
    model = load_model(MODEL)
    rng = np.random.default_rng(seed)
    n = _TRACE_REQUESTS
    shape = (n * (_TRACE_PROMPT + _TRACE_OUTPUT), model.n_moe_layers, model.n_experts)
    draws = rng.random(shape, dtype=np.float32)
    write_trace(
        folder,
        experts=np.argpartition(draws, model.top_k, axis=-1)[..., : model.top_k],
        request_id=[str(i) for i in range(n)],
        domain=["random"] * n,
        prompt_len=np.full(n, _TRACE_PROMPT),
        output_len=np.full(n, _TRACE_OUTPUT),
        is_calibration=np.zeros(n, bool),
        model=MODEL,
        n_experts=model.n_experts,
        domains=["random"],
        captured_by="drawn uniformly, no model",
        source_data="none",
        tool_versions={},
        provenance="synthetic",
    )
    return folder


def marlin_tables(folder: Path, cases: Iterable[Case]) -> Path:
    """Write the derived Marlin tables that H100 and H200 cases need."""
    folder.mkdir()
    model = load_model(MODEL)
    for gpu, size in sorted({(c.gpu, c.tensor_parallel_size) for c in cases if c.gpu != "B200"}):
        table = derive_marlin_table(gpu, model, Parallelism(size))
        table.save(folder / f"{gpu.lower()}_marlin_{size}.parquet")
    return folder


def predict_rows(
    rows: Sequence[Row],
    *,
    moe_kernel: str = "marlin",
    progress: Callable[[float], None] = lambda _share: None,
) -> pa.Table:
    """Predict every row and set the figures beside each other.

    Parameters
    ----------
    rows
        The measured runs.
    moe_kernel
        ``marlin``: what vLLM ran on H100 and H200 up to 0.18, derived, see
        :mod:`~eldr_sim.kernel_profiles.marlin`. ``newest``: the shipped tables.
    progress
        Called with the share of configurations done.

    Returns
    -------
    table
        One row a measured run, in order: the fields of :class:`Case` and :class:`Row`,
        ``predicted_ttft_ms``, ``predicted_tpot_ms``, and ``ttft_error``, ``tpot_error`` in %.
    """
    cases = sorted({row.case for row in rows})
    predicted: dict[Case, tuple[float, float]] = {}
    with ExitStack() as stack:
        work = Path(stack.enter_context(TemporaryDirectory()))
        trace = uniform_trace(work / "trace")
        marlin = [c for c in cases if moe_kernel == "marlin" and c.gpu != "B200"]
        tables = marlin_tables(work / "tables", marlin) if marlin else None
        for done, case in enumerate(cases, 1):
            predicted[case] = predict(case, trace, tables if case.gpu != "B200" else None)
            progress(done / len(cases))
    records: list[dict[str, Any]] = []
    for row in rows:
        ttft, tpot = predicted[row.case]
        measured = {k: v for k, v in vars(row).items() if k != "case"}
        records.append(
            vars(row.case)
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
        Which rows, ``tpot`` or ``ttft``.
    rows, median, p90, bias
        Rows that are not marked, and their errors; ``bias`` is the mean with its sign.
    all_rows, all_median, all_p90
        The same with the marked rows.
    """

    group: str
    metric: str
    rows: int
    median: float
    p90: float
    bias: float
    all_rows: int
    all_median: float
    all_p90: float


def silicon_errors(
    table: pa.Table,
    groups: Sequence[Sequence[str]] = (
        (),
        ("gpu",),
        ("gpu", "tensor_parallel_size"),
        ("concurrency",),
    ),
) -> list[Errors]:
    """Return the errors over groups of rows.

    Parameters
    ----------
    table
        From :func:`predict_rows`.
    groups
        Sets of columns; each makes a group of every combination of their values.
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
                        len(every),
                        float(sizes[len(every)].median()),
                        float(sizes[len(every)].quantile(0.9)),
                    )
                )
    return found


def worst_rows(table: pa.Table, n: int = 10) -> pa.Table:
    """Return the n rows, of those not marked, with the largest TPOT error.

    ``why`` says that an older vLLM ran it where that is the case (the tables are of 0.24); where it
    is empty the error is unexplained.
    """
    frame = table.to_pandas()
    frame = frame[frame.excluded == ""]
    frame = frame.reindex(frame.tpot_error.abs().sort_values(ascending=False).index)[:n].copy()
    frame["why"] = (frame.date < "2026").map({True: "run of 2025, vLLM 0.11", False: ""})
    columns = ["gpu", "tensor_parallel_size", "input_len", "output_len", "concurrency"]
    columns += ["date", "tpot_ms", "predicted_tpot_ms", "tpot_error", "why"]
    return pa.Table.from_pandas(frame[columns], preserve_index=False)


def growth_error(table: pa.Table, metric: str) -> float:
    """Mean error, %, of how a metric grows with concurrency from each setting's lowest one.

    Settings are (GPU, GPUs of the worker, lengths) over the rows that are not marked.
    """
    frame = table.to_pandas()
    frame = frame[frame.excluded == ""]
    sizes: list[float] = []
    for _, rows in frame.groupby(["gpu", "tensor_parallel_size", "input_len", "output_len"]):
        mean = rows.groupby("concurrency")[[f"{metric}_ms", f"predicted_{metric}_ms"]].mean()
        grown = mean / mean.iloc[0]
        ratio = grown[f"predicted_{metric}_ms"] / grown[f"{metric}_ms"]
        sizes += (100.0 * (ratio.iloc[1:] - 1.0)).abs().tolist()
    return float(np.mean(sizes)) if sizes else float("nan")
