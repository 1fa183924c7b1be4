"""Predictions of published Mixtral runs from their recorded requests; nothing is fitted on them.

inference-sim/training and inference-sim/sim-to-real-accuracy-validation publish means of
inference-perf's stages, ``rows/mixtral.csv``: vLLM 0.15.1, H100, bfloat16, 128 seats, 2,048 tokens
a step, prefix cache on, 100 different prompts in turn (figures alone: no licence). TPOT is mean E2E
less mean TTFT over mean output tokens less one. The requests of four runs of Mixtral-8x7B on 2 GPUs
lie in ``replay_data`` of commit c4f0340; ``reasoning`` is of no use: 3,294 of 4,800 failed. Other
runs (``recorded``: no) take those of the same load on 2 GPUs.

Tokenised in sequential micro-batches, kernels of a later version, drawn routing. KV blocks kept in
host memory are not simulated; none falls out here."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.inputs import parse_json, read_text
from eldr_sim.simulator.outcome.metrics import request_times
from eldr_sim.traces.workload import Workload
from eldr_sim.validation.published import silicon_rows
from eldr_sim.validation.published.predictions import PublishedRow, predict, shipped_rows, simulate
from eldr_sim.validation.published.silicon import Form, front_end
from eldr_sim.validation.published.silicon_rows import MeasuredModel

#: Commit whose ``replay_data`` holds the requests.
COMMIT = "c4f0340"
#: Other estimators that are published beside the runs.
OTHERS = ("blis_trained", "blis_evolved", "blis_roofline", "llm_optimizer")
PROMPTS = 100  # different ones, sent in turn
BLOCK = 16
#: Requests of stage 0 came within this many seconds.
_STAGE_S = {"general": 600.0, "codegen": 600.0, "roleplay": 1200.0}
#: Tokens that each request generated; the files count those of its text, tokenised again.
_OUTPUT = {"general": 248, "codegen": 247, "roleplay": 251}
Requests = tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.int32]]


class Stage(NamedTuple):
    """A stage of a run."""

    model: str
    tensor_parallel_size: int
    load: str
    stage: int


def mixtral_rows() -> list[PublishedRow[Stage]]:
    """Return the published stages."""
    rows = []
    for lines in shipped_rows("mixtral"):
        one = lines[0]
        stage = Stage(
            one["model"], int(one["tensor_parallel_size"]), one["load"], int(one["stage"])
        )
        measured, *others = (
            {line["metric"]: float(line[f"{name}_ms"]) for line in lines}
            for name in ("measured", *OTHERS)
        )
        labels = stage._asdict() | {"recorded": one["recorded"] == "yes"}
        rows.append(PublishedRow(stage, labels, measured, dict(zip(OTHERS, others, strict=True))))
    return rows


def read_requests(folder: Path, load: str) -> Requests:
    """Return a load's arrivals, s, prompt and output tokens; InputError if there are none."""
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
    """Return requests with prompts that repeat in turn, each as one with all its blocks."""
    arrival, prompt, output = requests
    n, rng = len(arrival), np.random.default_rng(seed)
    which = np.arange(n) % PROMPTS
    trace = (which % silicon_rows.REQUESTS).astype(np.int32)
    blocks = prompt // BLOCK
    indptr = np.concatenate([[0], np.cumsum(blocks)]).astype(np.int64)
    place = np.arange(indptr[-1]) - np.repeat(indptr[:-1], blocks)
    return Workload.plain(
        arrival, (prompt, output), trace,
        replay_offset=rng.integers(silicon_rows.OUTPUT, size=n).astype(np.int32),
        prefix_hash=(np.repeat(which, blocks) * 2**20 + place + 1).astype(np.uint64),
        prefix_indptr=indptr,
        prefix_text=np.repeat(trace, blocks).astype(np.int32),
        prefix_block_tokens=BLOCK,
    )  # fmt: skip


def predict_mixtral(
    folder: Path,
    rows: Sequence[PublishedRow[Stage]],
    *,
    form: Form | None = None,
    progress: Callable[[float], None] = lambda _share: None,
) -> pa.Table:
    """Predict published stages (`predictions.predict`) of the requests in ``folder``, or
    InputError. ``form``: what to take into account; by default all, graphs padded as vLLM 0.15
    did."""
    form = form or Form(graphs="experts")

    def begin(work: Path) -> Callable[[Stage], dict[str, float]]:
        @lru_cache
        def simulated(model: str, size: int, load: str) -> tuple[NDArray[Any], ...]:
            return _simulate(work, folder, model, size, load, form)

        def predicted(stage: Stage) -> dict[str, float]:
            arrival, counted, ttft, e2e = simulated(*stage[:3])
            here = (arrival < _STAGE_S[stage.load]) == (stage.stage == 0)
            first, last = (1e3 * float(times[here].mean()) for times in (ttft, e2e))
            tpot = (last - first) / (float(counted[here].mean()) - 1.0)
            return {"ttft": first, "tpot": tpot, "e2e": last}

        return predicted

    return predict(rows, begin, progress)


def _simulate(
    work: Path, folder: Path, model: str, size: int, load: str, form: Form
) -> tuple[NDArray[Any], ...]:
    """Return arrival, s, counted output tokens, TTFT and E2E, s, of each request of a run."""
    trace = work / model
    if not trace.exists():
        target = MeasuredModel(model, model, ("newest",), "bf16")
        silicon_rows.make_routing(trace, form.routing, target)
    arrival, prompt, counted = read_requests(folder, load)
    fields = {
        "topology": "1C",
        "model": model,
        "gpu": "H100",
        "tensor_parallel_size": size,
        "max_model_len": 4096,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
        "cudagraph_padding": form.graphs,
        **front_end(form, "microbatch_sequential"),
    }
    workload = repeating_workload((arrival, prompt, np.full_like(counted, _OUTPUT[load])))
    times = request_times(simulate(fields, trace, workload))
    return arrival, counted, times["ttft"], times["e2el"]
