"""Predictions of published runs with prefill and decode workers; nothing is fitted on them.

``rows/pd.csv`` holds llm-d's guide ``pd-disaggregation``, and a run beside it without a hand-over:
GPT-OSS-120B on 16 H200, prompts of 5,000 and outputs of 250 tokens, 45 requests/s. Figures alone
(``derived``: those that follow from others); what the guide does not say is in :data:`ASSUMED`.

Each is predicted without a hand-over, a bound from below, and with every preset, so that no TTFT
stands without its preset. The parts of the predicted TTFT show which one a miss can come from."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.sources.marlin import derive_marlin_table
from eldr_sim.kernel_profiles.tables.format import table_name
from eldr_sim.simulator.control.record import RunRecord
from eldr_sim.simulator.outcome.metrics import request_times
from eldr_sim.simulator.setup.transfer import HAND_OVERS
from eldr_sim.traces.workload import Workload
from eldr_sim.validation.published import silicon_rows
from eldr_sim.validation.published.predictions import PublishedRow, predict, shipped_rows, simulate
from eldr_sim.validation.published.silicon import Form, front_end, tokenizer_mode
from eldr_sim.validation.published.silicon_rows import MEASURED_MODELS

#: What the guide leaves open, and what is taken for it.
ASSUMED = (
    "arrivals are Poisson, all prompts differ, lengths are exact",
    "vLLM's server defaults for the GPU, bfloat16 KV cache, 0.9 of its memory",
    "the earlier vLLM ran Marlin and tokenised in sequential micro-batches (0.15 to 0.18)",
    "requests go to workers in turn",
)
GPU, MODEL = "H200", "gpt-oss-120b"
PROMPT, OUTPUT, RATE = 5000, 250, 45.0
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


class Workers(NamedTuple):
    """A published configuration under a hand-over preset; ``version`` may be empty; ``moe_kernel``:
    ``marlin``, or ``newest``, the shipped table's."""

    topology: str
    prefill_size: int
    decode_size: int
    version: str
    moe_kernel: str
    handover: str


def pd_rows() -> list[PublishedRow[Workers]]:
    """Return the published runs, each under every preset."""
    rows = []
    for lines in shipped_rows("pd"):
        one = lines[0]
        sizes = int(one["prefill_size"]), int(one["decode_size"])
        measured = {line["metric"]: float(line["measured_ms"]) for line in lines}
        for name in HAND_OVERS if "D" in one["topology"] else ("none",):
            case = Workers(one["topology"], *sizes, one["version"], one["moe_kernel"], name)
            rows.append(PublishedRow(case, {"run": one["run"], "handover": name}, measured, {}))
    return rows


def predict_pd(
    rows: Sequence[PublishedRow[Workers]],
    *,
    requests: int = _SENT,
    seed: int = 0,
    progress: Callable[[float], None] = lambda _share: None,
) -> pa.Table:
    """Predict published runs; see `predictions.predict`. The parts are those of the mean TTFT."""
    target, warm_up = MEASURED_MODELS[MODEL], min(_WARM_UP, requests // 4)

    def begin(work: Path) -> Callable[[Workers], dict[str, float | None]]:
        trace = silicon_rows.drawn_trace(work / "trace", target=target)

        def predicted(case: Workers) -> dict[str, float | None]:
            pool = {"tensor_parallel_size": case.prefill_size} if "D" in case.topology else {}
            tables = _tables(work / case.moe_kernel, case)
            early = "D" in case.topology and not case.version  # see `ASSUMED`
            fields = {
                "topology": case.topology,
                "prefill_policy": "round_robin",
                "model": target.model,
                "gpu": GPU,
                "tensor_parallel_size": case.decode_size,
                "prefill": pool,
                "handover": case.handover,
                "tables": None if tables is None else str(tables),
                "enable_prefix_caching": False,
                "disable_hybrid_kv_cache_manager": early or None,
                **front_end(Form(), tokenizer_mode(case.version or "0.18")),
            }
            return _figures(simulate(fields, trace, _workload(requests, seed)), warm_up)

        return predicted

    return predict(rows, begin, progress)


def _tables(folder: Path, case: Workers) -> Path | None:
    """Write Marlin's tables of a run's workers; None where the shipped tables are of its kernel."""
    if case.moe_kernel != "marlin":
        return None
    model = MEASURED_MODELS[MODEL].dims()
    for size in {case.prefill_size, case.decode_size}:
        table = derive_marlin_table(GPU, model, Parallelism(size))
        folder.mkdir(exist_ok=True)
        table.save(folder / table_name(table.metadata))
    return folder


def _workload(n: int, seed: int) -> Workload:
    """Return Poisson arrivals of requests of one length."""
    rng = np.random.default_rng(seed)
    which = rng.integers(silicon_rows.REQUESTS, size=n).astype(np.int32)
    arrival_s = np.cumsum(rng.exponential(1.0 / RATE, n))
    lengths = (np.full(n, tokens, np.int32) for tokens in (PROMPT, OUTPUT))
    offset = rng.integers(silicon_rows.OUTPUT, size=n).astype(np.int32)
    return Workload.plain(arrival_s, lengths, which, replay_offset=offset)


def _figures(record: RunRecord, warm_up: int) -> dict[str, float | None]:
    """Return figures and the parts of TTFT, ms, of the requests behind the warm-up."""
    requests, times = record.requests[warm_up:], request_times(record)
    figures: dict[str, float | None] = {}
    for latency in ("ttft", "tpot", "e2el"):
        values = 1e3 * times[latency][warm_up:]
        figures[f"mean_{latency}"] = float(np.nanmean(values))
        figures[f"p99_{latency}"] = float(np.nanpercentile(values, 99.0))
    for name, at, end in _PARTS:
        known = (requests[at] >= 0.0) & (requests[end] >= 0.0)
        taken = (requests[end] - requests[at])[known]
        figures[f"part_{name}"] = 1e3 * float(taken.mean()) if len(taken) else None
    return figures
