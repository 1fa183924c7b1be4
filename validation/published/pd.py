"""Predictions of published runs with prefill and decode workers; nothing is fitted on them.

Each is predicted without a hand-over, a bound from below, and with every preset, so that no TTFT
stands without its preset. The parts of the predicted TTFT show which one a miss can come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.sources.marlin import derive_marlin_table
from eldr_sim.kernel_profiles.tables.format import table_name
from eldr_sim.simulator.control.cluster import RunRecord
from eldr_sim.simulator.outcome.metrics import request_times
from eldr_sim.simulator.run import build_cluster
from eldr_sim.simulator.setup.config import RunConfig, make_config
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.simulator.setup.transfer import HAND_OVERS
from eldr_sim.traces.workload import Workload
from eldr_sim.validation.published import silicon_routing
from eldr_sim.validation.published.pd_rows import OUTPUT, PROMPT, RATE, RUNS, PublishedRun
from eldr_sim.validation.published.silicon import Form, tokenizer_mode
from eldr_sim.validation.published.silicon_rows import MEASURED_MODELS

GPU, MODEL = "H200", "gpt-oss-120b"
#: Requests that are sent, and those at the beginning that do not count.
_SENT, _WARM_UP = 4000, 900
#: Parts of TTFT by the times that bound them, prefill and decode workers.
_PARTS = (
    ("front_end", "sent_s", "tokenized_s"),
    ("prefill_queue", "tokenized_s", "prefill_start_s"),
    ("prefill", "prefill_start_s", "prefill_end_s"),
    ("hand_over", "prefill_end_s", "transfer_start_s"),
    ("transfer", "transfer_start_s", "transfer_end_s"),
    ("first_step", "transfer_end_s", "first_token_s"),
)


def predict_runs(
    runs: Sequence[PublishedRun] = RUNS,
    *,
    requests: int = _SENT,
    seed: int = 0,
    progress: Callable[[float], None] = lambda _share: None,
) -> pa.Table:
    """Predict published runs.

    Returns
    -------
    table
        A row a run, hand-over preset and metric: measured and predicted value, ms, the error in %,
        and the parts of the predicted mean TTFT, ms.
    """
    rows: list[dict[str, Any]] = []
    target = MEASURED_MODELS[MODEL]
    wanted = [
        (run, name) for run in runs for name in (HAND_OVERS if "D" in run.topology else ("none",))
    ]
    with TemporaryDirectory() as folder:
        trace = silicon_routing.drawn_trace(Path(folder) / "trace", target=target)
        for done, (run, handover) in enumerate(wanted, 1):
            tables = _tables(Path(folder) / run.moe_kernel, run)
            config = _config(run, handover, trace, tables)
            workload = _workload(requests, seed)
            record = build_cluster(config, prepare(config), workload, (0.0, np.inf)).run()
            rows += _rows(run, handover, record, min(_WARM_UP, requests // 4))
            progress(done / len(wanted))
    return pa.Table.from_pylist(rows)


def _config(run: PublishedRun, handover: str, trace: Path, tables: Path | None) -> RunConfig:
    form, disaggregated = Form(), "D" in run.topology
    return make_config(
        {
            "topology": run.topology,
            "policy": "round_robin",
            "prefill_policy": "round_robin",
            "model": MEASURED_MODELS[MODEL].model,
            "gpu": GPU,
            "tensor_parallel_size": run.decode_size,
            "prefill": {"tensor_parallel_size": run.prefill_size} if disaggregated else {},
            "handover": handover,
            "trace": str(trace),
            "tables": None if tables is None else str(tables),
            "num_requests": 1,
            "gpu_memory_utilization": 0.9,
            "enable_prefix_caching": False,
            "frontend": form.frontend,
            "tokenizer_mode": tokenizer_mode(run.version or "0.18"),
        }
    )


def _tables(folder: Path, run: PublishedRun) -> Path | None:
    """Write Marlin's tables of a run's workers; None where the shipped tables are of its kernel."""
    if run.moe_kernel != "marlin":
        return None
    model = MEASURED_MODELS[MODEL].dims()
    for size in {run.prefill_size, run.decode_size}:
        table = derive_marlin_table(GPU, model, Parallelism(size))
        folder.mkdir(exist_ok=True)
        table.save(folder / table_name(table.metadata))
    return folder


def _workload(n: int, seed: int) -> Workload:
    """Return Poisson arrivals of requests of one length."""
    rng = np.random.default_rng(seed)
    which = rng.integers(silicon_routing.REQUESTS, size=n).astype(np.int32)
    return silicon_routing.plain_workload(
        arrival_s=np.cumsum(rng.exponential(1.0 / RATE, n)),
        prompt_len=np.full(n, PROMPT, np.int32),
        output_len=np.full(n, OUTPUT, np.int32),
        text=which,
        replay_offset=rng.integers(silicon_routing.OUTPUT, size=n).astype(np.int32),
    )


def _rows(
    run: PublishedRun, handover: str, record: RunRecord, warm_up: int
) -> list[dict[str, Any]]:
    """Return measured beside predicted figures, of the requests behind the warm-up."""
    requests, times = record.requests[warm_up:], request_times(record)
    parts = {
        f"{name}_ms": _mean_ms(requests[end] - requests[at], requests[at], requests[end])
        for name, at, end in _PARTS
    }
    rows = []
    for metric, measured in run.measured.items():
        statistic, _, latency = metric.partition("_")
        values = 1e3 * times[latency][warm_up:]
        predicted = (
            float(np.nanmean(values))
            if statistic == "mean"
            else float(np.nanpercentile(values, float(statistic[1:])))
        )
        rows.append(
            {
                "run": run.name,
                "handover": handover,
                "metric": metric,
                "measured_ms": float(measured),
                "predicted_ms": predicted,
                "error": 100.0 * (predicted / measured - 1.0),
                **parts,
            }
        )
    return rows


def _mean_ms(seconds: NDArray[np.float64], *known: NDArray[np.float64]) -> float | None:
    """Return the mean of a part over the requests that have it; None without any."""
    there = np.logical_and.reduce([times >= 0.0 for times in known])
    return 1e3 * float(seconds[there].mean()) if there.any() else None
