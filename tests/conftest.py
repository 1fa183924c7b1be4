"""Small synthetic models, workloads and clusters, so that the simulator is tested without tables.

The fixtures are factories of session scope: hypothesis may call them many times within a test.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings

from .paths import ROOT, SHARED

# The suite has a cache of its own, which lasts: kernels are compiled where it is first imported.
os.environ["ELDR_SIM_CACHE"] = str(ROOT / ".pytest_cache" / "eldr-sim")
os.environ.pop("ELDR_SIM_CACHE_SIZE", None)

from eldr_sim.cli.main import main
from eldr_sim.kernel_profiles import tables
from eldr_sim.kernel_profiles.step_time import StepCost
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext
from eldr_sim.simulator import cluster as cluster_module
from eldr_sim.simulator import loop
from eldr_sim.simulator.cluster import Cluster, ClusterSpec, EngineSpec
from eldr_sim.simulator.config import make_config
from eldr_sim.simulator.expert_union import PromptRows
from eldr_sim.simulator.replay import Replay
from eldr_sim.simulator.results import write_json, write_result, write_table
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.transfer import TransferModel
from eldr_sim.traces.importers import import_trace
from eldr_sim.traces.workload import Workload
from eldr_sim.traces.writer import write_trace
from eldr_sim.validation.live.calibrated import Calibrated, CalibrationInfo
from eldr_sim.validation.live.recording import REQUESTS, STEPS, LiveRun, RunInfo
from eldr_sim.validation.live.replay import replay_run

# The same examples on every run and every machine, however slow; look for new ones with
# ``pytest --hypothesis-profile explore``.
settings.register_profile("default", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile("default")

#: A transfer that takes no time: set-up and posting cost nothing, the link is never a limit.
FREE_TRANSFER = TransferModel(0.0, 0.0, 1e30, "test")


@dataclass
class FakeStepTime:
    """What the simulator reads of a ``StepTimeModel``: the tables that a test has made up."""

    cost: StepCost
    n_experts: int

    @property
    def n_moe_layers(self):
        return self.cost.n_moe_layers


@pytest.fixture(scope="session")
def make_step_time():
    """Step times: all tables random, or ``constant`` seconds a step that decodes.

    With ``constant`` nothing but the number of tokens counts. Computing ``n`` tokens of contexts
    takes ``prefill = (base, slope)``: ``base + slope * n`` seconds, on a prefill worker as a step
    of its own, on a decode worker (what preemption lost) in addition to ``constant``. A step of a
    co-located worker that holds prompts takes ``base + slope * n`` for its ``n`` tokens, the
    decoded ones among them. Exact in binary where base, slope and ``constant`` are, with one or
    two layers.

    The tables end at ``max_num_seqs`` sequences, ``max_tokens`` tokens a step and ``max_context``
    tokens a sequence.
    """

    def make(
        max_num_seqs=8,
        n_layers=2,
        n_experts=70,
        *,
        seed=0,
        constant=None,
        prefill=(1e-3, 1e-4),
        max_tokens=256,
        max_context=256,
        stride=16,
    ):
        rng = np.random.default_rng(seed)
        sequences, tokens = max_num_seqs + 1, max(max_tokens, max_num_seqs) + 1
        knots = -(-max_context // stride) + 2

        def rising(*shape):
            return np.cumsum(rng.random(shape), -1)

        if constant is None:
            cost = StepCost(
                n_moe_layers=n_layers,
                n_experts=n_experts,
                moe_s=rising(sequences, n_experts + 1) * 1e-5,
                mixed_moe_s=rising(tokens, n_experts + 1) * 1e-5,
                uniform_moe_s=rising(tokens) * 2e-5,
                dense_s=rising(tokens) * 1e-4 + 1e-4,
                collectives_s=rng.random(tokens) * 1e-4,
                host_s=float(rng.random()) * 1e-4,
                head_s=rng.random(sequences) * 1e-4,
                attention_s=rising(sequences, knots) * 1e-5,
                context_stride=stride,
                prompt_alone_s=rising(max_context + 1) * 2e-6,
                prompt_share_s=rising(max_context + 1) * 1e-6,
                prompt_floor_s=1e-5,
                prompt_token_s=5e-7,
            )
        else:
            base, slope = prefill
            chunk_s = base + slope * np.arange(float(tokens))
            cost = StepCost(
                n_moe_layers=n_layers,
                n_experts=n_experts,
                moe_s=np.full((sequences, n_experts + 1), constant / n_layers),
                mixed_moe_s=np.tile(chunk_s[:, None] / n_layers, n_experts + 1),
                uniform_moe_s=chunk_s / n_layers,
                dense_s=np.zeros(tokens),
                collectives_s=np.zeros(tokens),
                host_s=0.0,
                head_s=np.zeros(sequences),
                attention_s=np.zeros((sequences, knots)),
                context_stride=stride,
                prompt_alone_s=np.zeros(max_context + 1),
                prompt_share_s=np.zeros(max_context + 1),
                prompt_floor_s=0.0,
                prompt_token_s=0.0,
            )
        return FakeStepTime(cost, n_experts)

    return make


@pytest.fixture(scope="session")
def make_workload():
    """A workload of given arrivals and lengths over ``windows`` trace requests."""

    def make(arrival_s, prompt_len, output_len, *, windows=5, seed=0):
        n = len(arrival_s)
        rng = np.random.default_rng(seed)
        which = rng.integers(windows, size=n).astype(np.int32)
        return Workload(
            arrival_s=np.asarray(arrival_s, float),
            prompt_len=np.broadcast_to(prompt_len, n).astype(np.int32),
            output_len=np.broadcast_to(output_len, n).astype(np.int32),
            trace_request=which,
            decode_request=which,
            replay_offset=rng.integers(3, size=n).astype(np.int32),
            domain=np.zeros(n, np.int16),
            session=np.arange(n, dtype=np.int32),
            prefix_hash=np.empty(0, np.uint64),
            prefix_indptr=np.zeros(n + 1, np.int64),
            prefix_trace_request=np.empty(0, np.int32),
            prefix_block_tokens=0,
            description={},
        )

    return make


@pytest.fixture(scope="session")
def make_cluster(make_step_time):
    """A cluster over a workload; every engine setting can be given.

    ``prefill`` and ``decode`` hold what an ``EngineSpec`` of that pool has of its own. Policies
    are names or objects. ``prompts`` are ``PromptRows``, True for random ones or False for none;
    by default co-located workers (``n_prefill=0``) have random ones. By default a prompt's
    signature is a zero matrix that stands for the trace request of its first token.
    """

    def make(
        workload,
        *,
        step_time=None,
        n_prefill=1,
        n_decode=1,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=1 << 20,
        block_size=4,
        n_blocks=1 << 20,
        prefill=None,
        decode=None,
        transfer=FREE_TRANSFER,
        load_report_delay_s=0.0,
        async_scheduling=False,
        max_concurrency=None,
        enable_prefix_caching=True,
        decode_policy="jsq",
        prefill_policy="least_loaded",
        signatures=None,
        prompts=None,
        expert_masks=None,
        window=(0.0, np.inf),
        time_limit_s=np.inf,
        kv_bytes_per_token=1,
        n_kv_tensors=2,
        seed=0,
        **rest,
    ):
        if step_time is None:
            longest = int((workload.prompt_len + workload.output_len).max(initial=1))
            step_time = make_step_time(
                max_num_seqs, seed=seed, max_tokens=max_num_batched_tokens, max_context=longest
            )
        rng = np.random.default_rng([seed, 1])
        windows = 1 + max(
            int(getattr(workload, name).max(initial=0))
            for name in ("trace_request", "decode_request", "prefix_trace_request")
        )
        length = rng.integers(3, 9, size=windows)
        first = np.cumsum(length) - length
        layers, experts = step_time.n_moe_layers, step_time.n_experts
        bits = random_rows(rng, int(length.sum()), layers, experts)
        if prompts is True or (prompts is None and n_prefill == 0):
            prompts = random_prompts(rng, workload, windows, layers, experts)
        elif prompts is False:
            prompts = None
        engine = EngineSpec(step_time, max_num_seqs, max_num_batched_tokens, n_blocks)
        spec = ClusterSpec(
            n_prefill=n_prefill,
            n_decode=n_decode,
            prefill=replace(engine, **(prefill or {})),
            decode=replace(engine, **(decode or {})),
            max_model_len=max_model_len,
            block_size=block_size,
            transfer=transfer,
            load_report_delay_s=load_report_delay_s,
            async_scheduling=async_scheduling,
            max_concurrency=max_concurrency,
            enable_prefix_caching=enable_prefix_caching,
            **rest,
        )
        check_tables(spec, workload)
        counts = {q: np.zeros((1, 1), np.int64) for q in range(windows)}
        routers = []
        for policy, make_policy, n, stream in (
            (prefill_policy, registry.prefill_policy, n_prefill, 2),
            (decode_policy, registry.decode_policy, n_decode, 3),
        ):
            if isinstance(policy, str) and n > 0:
                policy = make_policy(
                    policy, PolicyContext(n, np.random.default_rng([seed, stream]))
                )
            routers.append(policy if n > 0 else None)
        return Cluster(
            spec,
            SimpleNamespace(n_kv_tensors=n_kv_tensors, kv_bytes_per_token=kv_bytes_per_token),
            workload,
            Replay(bits, first, length),
            signatures or (lambda ranges: (ranges[0][0], counts[ranges[0][0]])),
            *routers,
            window,
            time_limit_s,
            expert_masks,
            prompts,
        )

    return make


def random_rows(rng, n, n_layers, n_experts):
    """``n`` bit sets of three (or all) random experts a layer."""
    words = -(-n_experts // 64)
    bits = np.zeros((n, n_layers * words), np.uint64)
    for row in bits.reshape(-1, words):
        for expert in rng.choice(n_experts, min(3, n_experts), replace=False):
            row[expert // 64] |= np.uint64(1) << np.uint64(expert % 64)
    return bits


def random_prompts(rng, workload, windows, n_layers, n_experts):
    """Recorded prompts of 2 to 9 random rows, which longer ones replay again and again."""
    length = rng.integers(2, 10, size=windows)
    bits = random_rows(rng, int(length.sum()), n_layers, n_experts)
    bits.flags.writeable = False
    return PromptRows(
        bits,
        np.cumsum(length) - length,
        length.astype(np.int32),
        workload.prefix_indptr,
        workload.prefix_trace_request,
        workload.prefix_block_tokens,
        np.zeros(bits.shape[1], np.uint64),
    )


def check_tables(spec, workload):
    """Compiled code reads beyond the end of a table without a word."""
    served = workload.prompt_len.astype(int) + workload.output_len
    capacity = min(spec.max_model_len, spec.decode.n_blocks * spec.block_size)
    longest = int(served[served <= capacity].max(initial=0))
    for engine in (spec.prefill, spec.decode):
        cost = engine.step_time.cost
        sequences = min(engine.max_num_seqs, len(workload))
        tokens = min(engine.max_num_batched_tokens, int(served.sum()))
        assert len(cost.moe_s) == len(cost.attention_s) == len(cost.head_s) > sequences
        assert len(cost.dense_s) == len(cost.collectives_s) == len(cost.uniform_moe_s)
        assert len(cost.dense_s) > max(tokens, sequences), "make_step_time(max_tokens=...)"
        assert len(cost.mixed_moe_s) == len(cost.dense_s)
        assert len(cost.prompt_alone_s) == len(cost.prompt_share_s)
        assert len(cost.prompt_alone_s) > longest, "make_step_time(max_context=...)"


@pytest.fixture(scope="session")
def run_to_rest():
    """Run a cluster and then its leftovers: requests not measured, load reports on their way.

    The record is that of the whole time; a run without an end fails.
    """

    def run(cluster, max_pauses=2):
        pauses = 0

        def paused(share):
            nonlocal pauses
            pauses += share < 1.0
            assert pauses <= max_pauses, f"no end in sight at {clock['now']} s"

        clock = cluster.arrays.clock[0]
        cluster.run(paused)
        clock["open_measured"] += 1 << 40
        while clock["n_events"] > 0:
            if cluster.advance(np.inf) == loop.PAUSED:
                paused(0.0)
        clock["open_measured"] -= 1 << 40
        return cluster._record(float(clock["now"]))

    return run


@pytest.fixture(scope="session")
def run_watched():
    """Run a cluster one event at a time; ``watch()`` is called in between and at the end.

    Now and then two events pass, where a router is asked between them.
    """

    def run(cluster, watch):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cluster_module, "_EVENTS_A_CALL", 1)
            return cluster.run(lambda _share: watch())

    return run


@pytest.fixture(scope="session")
def earlier_recording(tmp_path_factory):
    """An earlier recording of a reference model, 6 layers, as imported; with it its archive."""
    source = SHARED / "data" / "routing" / "reference_moe" / "sampled.npz"
    if not source.is_file():
        pytest.skip("the archive of the earlier recording is not here")
    trace = import_trace(
        source,
        tmp_path_factory.mktemp("earlier") / "trace",
        model="reference model of 6 layers",
        captured_by="forward passes of the model",
        source_data="held-out chunks of eight domains",
        tool_versions={},
    )
    return trace, source


@pytest.fixture
def serve_app():
    """Serve aiohttp applications on an event loop of its own thread; gives their URLs."""
    pytest.importorskip("aiohttp", reason="pip install 'eldr-sim[live]'")
    from aiohttp.test_utils import TestServer

    loop, servers = asyncio.new_event_loop(), []
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(timeout=30)

    async def start(app):
        server = TestServer(app)
        await server.start_server()
        return server

    def serve(app):
        servers.append(run(start(app)))
        return str(servers[-1].make_url("/")).rstrip("/")

    yield serve
    for server in reversed(servers):
        run(server.close())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def run_cli(capsys, monkeypatch):
    """Run the command line in this process; returns exit code, standard output and error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["eldr-sim", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="session")
def report_folders(tmp_path_factory):
    """What ``eldr-sim report`` reads.

    The runs ``jsq`` and ``eldr`` and a ``comparison`` as the commands write them; a ``sweep``, a
    ``plan`` of a cluster and one of ``rates`` in their formats, with figures made up from a run's.
    """
    folder = tmp_path_factory.mktemp("report")
    for policy in ("jsq", "eldr"):
        fields = {"topology": "2P3D", "request_rate": 20, "duration": 3, "warmup": 1}
        fields |= {"output_len": 20, "goodput": {"ttft": 500, "tpot": 40}}
        config = make_config({**fields, "policy": policy, "price_per_gpu_hour": 2.5})
        result = simulate(config)
        write_result(result, folder / policy)
    command = "compare --policies jsq --seeds 2 --topology 1P2D --request-rate 10 --duration 2"
    command += f" --warmup 1 --output-len 10 --out {folder / 'comparison'}"
    arguments = [sys.executable, "-m", "eldr_sim.cli.main", *command.split()]
    subprocess.run(arguments, check=True, capture_output=True)
    _write_sweep(folder / "sweep", result.summary)
    _write_plans(folder, result)
    return folder


def _write_sweep(folder, summary):
    """Two policies at three rates, two runs each; the run of one point under one seed failed."""
    points, aggregate = [], []
    scalars = {k: v for k, v in summary.items() if isinstance(v, int | float) and k != "seed"}
    nested = {k: json.dumps(v) for k, v in summary.items() if isinstance(v, dict | list)}
    texts = {k: v for k, v in summary.items() if isinstance(v, str)}
    for index, (policy, rate) in enumerate(itertools.product(["jsq", "eldr"], [10.0, 20.0, 40.0])):
        point = {"point": index, "name": f"policy={policy}, request_rate={rate:g}"}
        point |= {"policy": policy, "request_rate": rate}
        figures = [
            {key: value * (1 + 0.1 * index + 0.01 * run) for key, value in scalars.items()}
            for run in range(2)
        ]
        for run in range(2):
            row = {**point, "run": run, "seed": run, "status": "completed", "reason": ""}
            row |= {k: v for k, v in (texts | figures[run] | nested).items() if k not in point}
            if (index, run) == (5, 1):
                row = dict.fromkeys(row) | {k: row[k] for k in (*point, "run", "seed")}
                row |= {"status": "failed", "reason": "model: no room <for> it"}
            points.append(row)
        done = 1 if index == 5 else 2
        row = {**point, "runs_completed": done, "runs_failed": 2 - done}
        for key in scalars.keys() - point.keys():
            mean = sum(f[key] for f in figures[:done]) / done
            ends = (None, None) if done == 1 else (0.9 * mean, 1.1 * mean)
            row |= {key: mean, f"{key}_low": ends[0], f"{key}_high": ends[1]}
        aggregate.append(dict(sorted(row.items())))
    folder.mkdir()
    write_table(folder / "points.parquet", pa.Table.from_pylist(points))
    write_table(folder / "aggregate.parquet", pa.Table.from_pylist(aggregate))
    parameters = {"policy": ["jsq", "eldr"], "request_rate": [10, 20, 40]}
    document = {
        "sweep": {"sweep": {"type": "grid", "parameters": parameters}, "multiRun": {"numRuns": 2}},
        "parameters": list(parameters),
        "points": 6,
        "runs": 12,
        "failed_runs": 1,
        "confidence_level": 0.9,
        "versions": {"eldr-sim": "0.1.0"},
    }
    write_json(folder / "sweep.json", document)


def _write_plans(folder, result):
    """A plan with an answer, a policy without one, and a plan of rates."""

    def cluster(policy, decode, tpot_ms, verdict="meets"):
        share = {"mean": 0.995, "low": 0.99, "high": 1.0}
        return {
            "policy": policy,
            "gpu": "H100",
            "topology": f"2P{decode}D",
            "tensor_parallel_size": 1,
            "enable_expert_parallel": False,
            "gpus": 2 + decode,
            "price_per_hour": 2.5 * (2 + decode),
            "request_rate": 20.0,
            "verdict": verdict,
            "weakest_provenance": "derived" if policy == "jsq" else "published",
            "hopeless": False,
            "seeds": 3,
            "slo_attainment": share,
            "slo_attainment_by_metric": {"ttft": 1.0, "tpot": 0.995},
            "median_ttft_ms": 60.0,
            "p99_ttft_ms": 90.0,
            "median_tpot_ms": tpot_ms,
            "p99_tpot_ms": 1.1 * tpot_ms,
            "output_throughput": 2000.0,
            "mean_decode_batch": 12.0,
            "mean_active_experts_per_step": 60.0,
            "cost_per_million_output_tokens": 1.5,
            "tokens_per_s_per_gpu": 2000.0 / (2 + decode),
            "tokens_per_s_per_user": 1e3 / tpot_ms,
        }

    summary = result.summary
    keys = ("weakest_provenance", "provenance", "lookups_outside_tables", "decode_steps")
    keys += ("latency_warnings", "kv_transfer", "trace")
    common = {
        "slo_ms": {"ttft": 500.0, "tpot": 12.0},
        "attainment": 0.99,
        "confidence": 0.95,
        "looks": [3, 5],
        "config": result.config["config"],
        "assumptions": {key: summary[key] for key in keys},
        "simulated_runs": 42,
        "versions": {"eldr-sim": "0.1.0"},
    }
    eldr, larger, jsq = cluster("eldr", 3, 10.0), cluster("eldr", 5, 8.0), cluster("jsq", 4, 11.0)
    lost = cluster("eldr", 2, 14.0, "misses")
    span = {"mean": 1.25, "low": 0.5, "high": 2.0}
    candidate = {"gpu": "H100", "fewest_prefill_workers": 2, "fewest_decode_workers": 3}
    plan = common | {
        "kind": "cluster",
        "request_rate": 20.0,
        "max_gpus": 16,
        "cheapest_by": "price_per_hour",
        "answer": eldr,
        "runner_up": jsq,
        "margin": {
            "highest_rate": {"mean": 24.0, "low": 22.0, "high": 26.0},
            "percent_above_load": {"mean": 20.0, "low": 10.0, "high": 30.0},
            "highest_rate_is_a_lower_bound": False,
            "one_decode_worker_lost": lost,
            "one_prefill_worker_lost": None,
        },
        "candidates": [
            {"policy": "eldr", "cluster": eldr, "reasons": [], "notes": ["not monotone"]},
            {"policy": "jsq", "cluster": jsq, "reasons": [], "notes": []},
            {"policy": "random", "cluster": None, "reasons": ["too <slow>"], "notes": []},
        ],
        "savings": [
            {
                "gpu": "H100",
                "policy": "eldr",
                "reference": "jsq",
                "gpus_saved": span,
                "gpus_by_seed": [5, 5],
                "reference_gpus_by_seed": [6, 7],
            }
        ],
        "pareto_front": [larger, eldr],
        "clusters": [eldr, larger, lost, jsq],
    }
    plan["candidates"] = [candidate | each for each in plan["candidates"]]
    named = ("policy", "gpu", "topology", "tensor_parallel_size", "gpus")
    rates = common | {
        "kind": "rate",
        "rates": [
            {k: eldr[k] for k in named}
            | {"highest_rate": span, "by_seed": [1.0, 1.5], "reason": ""},
            {k: jsq[k] for k in named}
            | {"highest_rate": None, "by_seed": [None, 1.0], "reason": "seed 0 carries none"},
        ],
        "gains": [{"gpu": "H100", "policy": "eldr", "reference": "jsq", "percent": span}],
    }
    for name, document in (("plan", plan), ("rates", rates)):
        (folder / name).mkdir()
        write_json(folder / name / "plan.json", document)
        write_table(folder / name / "points.parquet", pa.table({"seed": [0]}))


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
    return Calibrated(info, made)


@pytest.fixture(scope="session")
def make_live_run(tmp_path_factory, live_calibration):
    """A recording that a simulation made: of a set-up, what a live run of it would leave.

    Distinct experts and the parts of a step are not taken from the simulator: the former are
    counted token by token, the latter follow the formulas of ``live_calibration``.
    """

    def make(
        setup="1P1D", *, n=30, rate=100.0, seed=0, repeat=0, policy="round_robin", budget=48,
        load="poisson", n_blocks=1000, artifact=None, prefilled=False,
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
                "num_requests": n, "seed": seed,
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
        replayed = replay_run(bare, live_calibration, artifact)
        return _as_recorded(bare, replayed, live_calibration), replayed

    return make


def _as_recorded(run, replayed, calibrated):
    """Write a simulation down as a live run."""
    moments, requests, trace = replayed.milestones, run.requests, run.trace
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
        run.info,
        pa.table(columns).cast(REQUESTS),
        pa.Table.from_pylist(steps, schema=STEPS),
        trace,
    )
