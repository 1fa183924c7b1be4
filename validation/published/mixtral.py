"""Predictions of published Mixtral runs from their recorded requests; nothing is fitted on them.

Runs whose requests are not published take those of the run with the same load on 2 GPUs: the same
generator at the same rate. vLLM 0.15.1 tokenised in sequential micro-batches; its kernels are those
of the shipped tables (a later version's), routing is drawn for the model. The runs kept KV blocks
that fell out of the cache in host memory, too, which is not simulated; none falls out here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.inputs import parse_json, read_text
from eldr_sim.simulator.outcome.metrics import request_times
from eldr_sim.simulator.run import build_cluster
from eldr_sim.simulator.setup.config import make_config
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.traces.workload import Workload
from eldr_sim.validation.published import silicon_routing
from eldr_sim.validation.published.mixtral_rows import COMMIT, OUTPUT, RUNS, STAGE_S, MixtralRun
from eldr_sim.validation.published.silicon import Form
from eldr_sim.validation.published.silicon_rows import MeasuredModel

PROMPTS = 100  # different ones, sent in turn
BLOCK = 16
_OTHERS = ("blis_trained", "blis_evolved", "blis_roofline", "llm_optimizer")
Requests = tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.int32]]


def read_requests(folder: Path, load: str) -> Requests:
    """Return when the requests of a load came, s, and their prompt and output tokens.

    Raises
    ------
    InputError
        If the folder holds no such requests.
    """
    files = [p for p in sorted(folder.glob(f"*mixtral*-{load}.json")) if "truth" not in p.name]
    if not files:
        raise InputError(
            "requests",
            f"{folder} has no requests of the load {load}",
            f"replay_data of github.com/inference-sim/training at {COMMIT}",
        )
    document = parse_json(read_text(files[0], "requests"), "requests", files[0].name)
    try:
        rows = document["requests"]
        values = [(r["arrival_time_us"] / 1e6, r["input_tokens"], r["output_tokens"]) for r in rows]
        arrival, prompt, output = np.array(values, dtype=np.float64).T
    except (KeyError, TypeError, ValueError) as error:
        raise InputError("requests", f"{files[0].name}: {error}", "a file of that commit") from None
    return arrival, np.maximum(prompt, 1).astype(np.int32), np.maximum(output, 1).astype(np.int32)


def repeating_workload(requests: Requests, seed: int = 0) -> Workload:
    """Return requests whose prompts repeat in turn, each as one with all its blocks."""
    arrival, prompt, output = requests
    n, rng = len(arrival), np.random.default_rng(seed)
    which = np.arange(n) % PROMPTS
    trace = (which % silicon_routing.REQUESTS).astype(np.int32)
    blocks = prompt // BLOCK
    indptr = np.concatenate([[0], np.cumsum(blocks)]).astype(np.int64)
    place = np.arange(indptr[-1]) - np.repeat(indptr[:-1], blocks)
    plain = silicon_routing.plain_workload(
        arrival_s=arrival,
        prompt_len=prompt,
        output_len=output,
        text=trace,
        replay_offset=rng.integers(silicon_routing.OUTPUT, size=n).astype(np.int32),
    )
    changes: dict[str, Any] = {
        "prefix_hash": (np.repeat(which, blocks) * 2**20 + place + 1).astype(np.uint64),
        "prefix_indptr": indptr,
        "prefix_text": np.repeat(trace, blocks).astype(np.int32),
        "prefix_block_tokens": BLOCK,
    }
    return Workload(**(vars(plain) | changes))


def predict_mixtral(
    folder: Path,
    runs: Sequence[MixtralRun] = RUNS,
    *,
    form: Form | None = None,
    progress: Callable[[float], None] = lambda _share: None,
) -> pa.Table:
    """Predict the published stages.

    Parameters
    ----------
    folder
        The published requests, see :mod:`~eldr_sim.validation.published.mixtral_rows`.
    runs
        The stages.
    form
        What to take into account; everything when not given, graphs padded as vLLM 0.15 did.
    progress
        Called with the share of stages done.

    Returns
    -------
    table
        A row a stage and metric (``ttft``, ``tpot``, ``e2e``): measured and predicted mean, ms, the
        error in %, and those of published estimators.

    Raises
    ------
    InputError
        If the folder lacks requests.
    """
    form, rows = form or Form(graphs="experts"), []
    with TemporaryDirectory() as work:

        @lru_cache
        def simulated(model: str, size: int, load: str) -> tuple[NDArray[Any], ...]:
            return _simulate(Path(work), folder, model, size, load, form)

        for done, run in enumerate(runs, 1):
            arrival, counted, ttft, e2e = simulated(run.model, run.tensor_parallel_size, run.load)
            stage = arrival < STAGE_S[run.load]
            here = stage if run.stage == 0 else ~stage
            means = [1e3 * float(times[here].mean()) for times in (ttft, e2e)]
            means.insert(1, (means[1] - means[0]) / (float(counted[here].mean()) - 1.0))
            for k, metric in enumerate(("ttft", "tpot", "e2e")):
                measured, predicted = run.measured[k], means[k]
                others = {
                    f"{name}_error": 100.0 * (getattr(run, name)[k] / measured - 1.0)
                    for name in _OTHERS
                }
                rows.append(
                    {
                        "model": run.model,
                        "tensor_parallel_size": run.tensor_parallel_size,
                        "load": run.load,
                        "stage": run.stage,
                        "recorded": run.recorded,
                        "metric": metric,
                        "measured_ms": measured,
                        "predicted_ms": predicted,
                        "error": 100.0 * (predicted / measured - 1.0),
                        **others,
                    }
                )
            progress(done / len(runs))
    return pa.Table.from_pylist(rows)


def _simulate(
    work: Path, folder: Path, model: str, size: int, load: str, form: Form
) -> tuple[NDArray[Any], ...]:
    """Return arrival, s, counted output tokens, TTFT and E2E, s, of each request of a run."""
    target = MeasuredModel(model, model, ("newest",), "bf16")
    trace = work / model
    if not trace.exists():
        silicon_routing.make_routing(trace, form.routing, target)
    requests = read_requests(folder, load)
    config = make_config(
        {
            "topology": "1C",
            "policy": "round_robin",
            "model": model,
            "gpu": "H100",
            "tensor_parallel_size": size,
            "trace": str(trace),
            "num_requests": len(requests[0]),
            "max_model_len": 4096,
            "max_num_seqs": 128,
            "max_num_batched_tokens": 2048,
            "gpu_memory_utilization": 0.9,
            "cudagraph_padding": form.graphs,
            "frontend": form.frontend,
            **({"tokenizer_mode": "microbatch_sequential"} if form.frontend else {}),
        }
    )
    arrival, prompt, counted = requests
    workload = repeating_workload((arrival, prompt, np.full_like(counted, OUTPUT[load])))
    record = build_cluster(config, prepare(config), workload, (0.0, np.inf)).run()
    times = request_times(record)
    return arrival, counted, times["ttft"], times["e2el"]


def median_errors(table: pa.Table) -> pa.Table:
    """Return the median absolute errors of all stages by estimator and metric, %."""
    frame = table.to_pandas()
    names = ["error", *(f"{name}_error" for name in _OTHERS)]
    sizes = frame[names].abs().groupby(frame["metric"], sort=False).median()
    labels = ["eldr-sim", *_OTHERS]
    rows = [
        {"estimator": label} | sizes[n].to_dict() for label, n in zip(labels, names, strict=True)
    ]
    return pa.Table.from_pylist(rows)
