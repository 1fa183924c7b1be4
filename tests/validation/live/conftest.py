"""Recordings that simulations made."""

import itertools
import json

import numpy as np
import pyarrow as pa
import pytest

from eldr_sim.kernel_profiles.tables import format as tables
from eldr_sim.simulator.setup.transfer import TransferModel
from eldr_sim.traces.routing.writer import write_trace
from eldr_sim.validation.live.calibration.engine_calibration import (
    CalibrationInfo,
    EngineCalibration,
    device_of,
    write_calibration,
)
from eldr_sim.validation.live.live_run import REQUESTS, STEPS, LiveRun, RunInfo
from eldr_sim.validation.live.simulated.simulated_run import simulate_run

from ...app_server import serve_app  # noqa: F401 - a fixture

LIVE_MODEL = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 70,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "intermediate_size": 64,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}


def live_rest_s(tokens, sequences):
    """An engine step but for MoE layers and attention, as the live tests have it."""
    return 2e-3 + 2e-5 * tokens + 1e-4 * sequences


@pytest.fixture(scope="session")
def live_calibration():
    """A calibration whose tables follow formulas, for the model of ``LIVE_MODEL``."""
    shapes = {
        "moe": tables.moe_shape(64, 32, 70, 3),
        "attention_decode": tables.attention_shape(4, 2, 16, 0),
        "attention_prefill": tables.attention_shape(4, 2, 16, 0),
        "engine_step": tables.engine_step_shape(3, 64, 512),
    }
    batches = [1, 2, 4, 8, 16, 32, 64]
    points = {
        "moe": [(b, float(d)) for b in batches for d in (3, 10, 30, 70) if d <= 3 * b],
        "attention_decode": list(itertools.product([1, 4, 16], [16, 128, 1024])),
        "attention_prefill": list(itertools.product([1, 2], [16, 64, 256])),
        "engine_step": [(b, b) for b in batches] + [(8, 1), (32, 1), (64, 2), (128, 4)],
    }
    seconds = {
        "moe": lambda b, d: 3e-4 + 2e-5 * d + 1e-5 * b,
        "attention_decode": lambda b, c: 2e-5 + 1e-7 * b * c,
        "attention_prefill": lambda b, n: 3e-5 + 1e-7 * b * n**1.5,
        "engine_step": live_rest_s,
    }
    made = []
    for kind, shape in shapes.items():
        metadata = tables.TableMetadata(
            kind=kind, gpu="some machine", shape=shape, dtype="bfloat16", kernel_source="test",
            framework="vllm 0.32.0", provenance="measured", origin="a formula", device="CPU",
        )  # fmt: skip
        names = [name for name in tables._COLUMNS[kind] if name != "routing"]
        columns = {
            name: np.array(column)
            for name, column in zip(names, zip(*points[kind], strict=True), strict=True)
        }
        if kind == "moe":
            columns["routing"] = np.array(["forced"] * len(points[kind]))
        columns["latency_s"] = np.array([seconds[kind](*point) for point in points[kind]])
        made.append(tables.LatencyTable(metadata, columns))
    info = CalibrationInfo(
        ingress_s={"base_s": 2e-3, "per_token_s": 1e-5},
        egress_s=1e-3,
        handoff_s={"base_s": 4e-3, "per_token_s": 2e-5},
        transfer=TransferModel(1e-3, 1e-5, 1e8, "a formula"),
        seconds=1.0,
    )
    return EngineCalibration(info, made)


@pytest.fixture(scope="session")
def make_live_run(tmp_path_factory, live_calibration):
    """A recording that a simulation made: of a set-up, what a live run of it would leave.

    Distinct experts and the parts of a step are not taken from the simulator: the former are
    counted token by token, the latter follow the formulas of ``live_calibration``.
    """

    def make(
        setup="1P1D", *, n=30, rate=100.0, seed=0, repeat=0, policy="round_robin", budget=48,
        load="poisson", n_blocks=1000, artifact=None, prefilled=False, queue_order="fcfs",
    ):  # fmt: skip
        rng = np.random.default_rng(seed)
        prompt, output = rng.integers(1, 60, n), rng.integers(1, 25, n)
        prompt[:3] = 1, budget, budget + 1
        draws = rng.random((int((prompt + np.maximum(output - 1, 1)).sum()), 3, 70))
        trace = write_trace(
            tmp_path_factory.mktemp("live") / "trace",
            experts=np.argsort(draws, axis=-1)[..., :3],
            request_id=[str(i) for i in range(n)],
            domain=["a"] * n,
            prompt_len=prompt,
            output_len=np.maximum(output - 1, 1),  # the last token is never fed
            is_calibration=np.zeros(n, bool),
            model="tiny",
            n_experts=70,
            domains=["a"],
            captured_by="a test",
            source_data="random",
            tool_versions={},
            provenance="synthetic",
        )
        colocated = setup == "colocated"
        n_prefill, n_decode = (0, 1) if colocated else (int(setup[0]), int(setup[2]))
        role = "colocated" if colocated else "decode"
        engine = {"max_num_seqs": 8, "block_size": 4, "n_blocks": n_blocks}
        engine |= {"max_num_batched_tokens": budget}
        info = RunInfo(
            setup=setup,
            policy=policy,
            repeat=repeat,
            load={
                "name": load, "request_rate": rate, "burstiness": 1.0, "lengths": "recorded",
                "num_requests": n, "seed": seed, "queue_order": queue_order,
            },
            engines=[
                *({"name": f"prefill{i}", "role": "prefill"} | engine for i in range(n_prefill)),
                *({"name": f"{role}{i}", "role": role} | engine for i in range(n_decode)),
            ],
            prefilled=prefilled,
            model=LIVE_MODEL,
            max_model_len=512,
            versions={},
            machine={},
        )  # fmt: skip
        requests = pa.table(
            {
                "request_id": [str(i) for i in range(n)],
                "domain": ["a"] * n,
                "prompt_len": prompt,
                "output_len": output,
                "sent_s": np.cumsum(rng.exponential(1 / rate, n)),
                "prefilled_s": pa.nulls(n, "float64"),
                "routed_s": pa.nulls(n, "float64"),
                "engine": np.zeros(n, np.int16),
                "token_s": [[] for _ in range(n)],
            }
        ).cast(REQUESTS)
        bare = LiveRun(info, requests, pa.table([[]] * len(STEPS), schema=STEPS), trace)
        replayed = simulate_run(bare, live_calibration, artifact)
        return _as_recorded(bare, replayed, live_calibration), replayed

    return make


def _as_recorded(run, replayed, calibrated):
    """Write a simulation down as a live run."""
    moments, requests, trace = replayed.timestamps, run.requests, run.trace
    prompt = requests["prompt_len"].to_numpy()
    columns = {name: requests[name] for name in REQUESTS.names}
    columns["engine"] = replayed.engine
    columns["token_s"] = [times.tolist() for times in moments.token_s]
    prefills = {e.name for e in run.info.engines if e.role == "prefill"}
    if prefills:
        columns["routed_s"] = moments.handed_s - calibrated.info.ingress_s.of(prompt)
        columns["prefilled_s"] = columns["routed_s"]
    steps = []
    for step in replayed.steps.to_pylist():
        if run.info.prefilled and step["engine"] in prefills:
            continue  # the prompts were computed before
        own = list(zip(step["request"], step["position"], step["tokens"], strict=True))
        rows = [trace.first_row[r] + p + k for r, p, n in own for k in range(n)]
        distinct = [len(np.unique(trace.experts[rows, layer])) for layer in range(trace.n_layers)]
        tokens = len(rows)
        moe_s = sum(3e-4 + 2e-5 * d + 1e-5 * tokens for d in distinct)
        rest_s = live_rest_s(tokens, len(own))
        steps.append(
            {"engine": step["engine"], "start_s": step["start_s"], "end_s": step["end_s"]}
            | {"forward_start_s": step["start_s"], "forward_end_s": step["end_s"], "moe_s": moe_s}
            | {"attention_s": step["end_s"] - step["start_s"] - moe_s - rest_s}
            | {k: step[k] for k in ("request", "position", "tokens")}
            | {"distinct": distinct}
        )
    return LiveRun(
        run.info, pa.table(columns).cast(REQUESTS), pa.Table.from_pylist(steps, schema=STEPS), trace
    )


@pytest.fixture
def calibrated(live_calibration, tmp_path):
    """Write the calibration and the model that a check reads."""
    folder, model = tmp_path / "calibration", tmp_path / "model"
    folder.mkdir()
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LIVE_MODEL))
    write_calibration(folder, live_calibration.info, live_calibration.tables)
    gpu = device_of(live_calibration.tables[0].metadata.gpu)
    (folder / "gpu.json").write_text(gpu.model_dump_json())
    return {"calibration": folder, "calibrated": live_calibration, "model": str(model)}
