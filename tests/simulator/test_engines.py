"""Rules of SGLang and TensorRT-LLM: by hand, and TensorRT-LLM's against a small twin of its
scheduler (SGLang's: `test_sglang_scheduler.py`).

The twin is one co-located engine written from the rules as docs/engines.md states them; it knows no
KV cache but counts of tokens, and requests that come to an engine at work are seen when the next
step has been planned, as overlapped scheduling sees them.
"""

import dataclasses
import json
import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eldr_sim.cli.api import options_of
from eldr_sim.cli.run import run
from eldr_sim.cli.run_options import config_from_options
from eldr_sim.errors import EldrSimWarning, InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.step_cost import step_parts
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.planning.compare.what_if import change_fields
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config import launch_options
from eldr_sim.simulator.setup.config.engine_rules import (
    EngineRules,
    captured_steps,
    default_budget,
    prompt_graphs,
    rules_of,
)
from eldr_sim.simulator.setup.config.groups import SchedulerConfig
from eldr_sim.simulator.setup.config.launch_options import NAMES
from eldr_sim.simulator.setup.config.run_config import make_config, read_config
from eldr_sim.simulator.setup.prepare import prepare

from ..on_each import on_each
from .test_engine_by_hand import by_hand
from .test_vllm_scheduler import with_paths

STEP_S, TOKEN_S, CHUNK_STEP_S = 1.0, 0.03125, 0.25


def options(**given):
    names = (
        "enable_mixed_chunk", "scheduler_recv_interval", "schedule_conservativeness",
        "enable_chunked_prefill", "capacity_scheduler_policy", "batch_wait_timeout_iters",
        "batch_wait_max_tokens_ratio", "piecewise_cuda_graph", "attention_dp_balance",
        "attention_dp_timeout_iters", "attention_dp_batching_wait_iters",
    )  # fmt: skip
    return SimpleNamespace(**dict.fromkeys(names) | given)


@pytest.mark.parametrize("given", [None, 0.3, 1.0, 2.0])
def test_sglang_reserves_three_tenths_where_engines_share_attention(given):
    """``_handle_data_parallelism`` multiplies what is given; 0.7 x it is at most 1."""
    told = options(schedule_conservativeness=given)
    one, many = (rules_of("sglang", told, 8192, n).first_share for n in (1, 2))
    assert one == pytest.approx(min(0.7 * (given or 1.0), 1.0))
    assert many == pytest.approx(min(0.7 * 0.3 * (given or 1.0), 1.0))


class Twin:
    """One engine of TensorRT-LLM, whose steps take what `by_hand` says."""

    def __init__(self, told, seats, budget, blocks, size):
        self.told = told
        self.seats, self.budget, self.blocks, self.size = seats, budget, blocks, size
        self.queue, self.running, self.part = [], [], []  # running: they decode; part: in chunks
        self.free, self.now, self.waited = blocks, 0.0, 0

    def run(self, requests):
        """Serve requests: dictionaries of ``at``, ``prompt``, ``output``; adds what happened."""
        coming = sorted(requests, key=lambda r: r["at"])
        for r in requests:
            r.update(done=0, computed=0, held=0)
        unseen = []  # came while a step ran
        while coming or unseen or self.queue or self.running or self.part:
            if not (self.queue or self.running or self.part):
                self.queue += unseen
                unseen = []
                if not self.queue:
                    self.now = max(self.now, coming[0]["at"])
                    while coming and coming[0]["at"] <= self.now:
                        self.queue.append(coming.pop(0))
            chunks, decoding = self.plan()
            self.queue += unseen
            unseen = []
            self.step(chunks, decoding)
            while coming and coming[0]["at"] < self.now:
                unseen.append(coming.pop(0))
        return requests

    def step(self, chunks, decoding):
        ends = [r for r, n in chunks if r["computed"] + n == r["target"]]
        tokens = sum(n - (r in ends) for r, n in chunks)  # the last one is decoded
        self.now += CHUNK_STEP_S * (tokens > 0) + TOKEN_S * tokens
        self.now += STEP_S * bool(ends or decoding)
        for r, n in chunks:
            r["computed"] += n
        for r in ends:
            self.part.remove(r)
            self.running.append(r)
        for r in [*ends, *decoding]:
            r["done"] += 1
            r.setdefault("first", self.now)
        for r in [r for r in self.running if r["done"] == r["output"]]:
            r["end"] = self.now
            self.running.remove(r)
            self.free += r.pop("held")

    def take(self, r, tokens):
        """Let a request begin: it computes all it has, in blocks for so many tokens."""
        r["target"], r["computed"] = r["prompt"] + r["done"], 0
        r["held"] = -(-tokens // self.size)
        self.free -= r["held"]
        self.part.append(r)

    def plan(self):
        decoding = list(self.running)
        budget, chunks = self.budget - len(decoding), []
        ready, left, free = [], budget, self.free
        for r in self.queue[: self.seats - len(decoding)]:  # what a step without waiting would do
            free -= -(-(r["prompt"] + r["output"]) // self.size)
            if r["prompt"] > left or free < 0:
                break
            ready.append(r)
            left -= r["prompt"]
        tokens = len(decoding) + sum(r["prompt"] for r in ready)
        ratio = self.told.batch_wait_max_tokens_ratio or 0.0
        if ready and decoding and ratio > 0:
            if self.waited < (self.told.batch_wait_timeout_iters or 0) and (
                tokens < ratio * self.budget
            ):
                self.waited += 1
                return [], decoding
            self.waited = 0
        for r in ready:
            self.queue.remove(r)
            self.take(r, r["prompt"] + r["output"])
            chunks.append((r, r["prompt"]))
        return chunks, decoding


@pytest.fixture
def one_engine(make_cluster, make_workload):
    """Run a co-located engine under rules; returns its record."""

    def run(requests, rules, seats=8, budget=64, blocks=100, size=4, shared=0, backend=None):
        columns = ([r[name] for r in requests] for name in ("at", "prompt", "output"))
        cluster = make_cluster(
            with_paths(make_workload(*columns), requests, shared),
            n_prefill=0,
            decode={
                "step_time": by_hand(STEP_S, TOKEN_S, CHUNK_STEP_S, seqs=seats),
                "max_num_seqs": seats, "max_num_batched_tokens": budget, "n_blocks": blocks,
                "rules": rules,
            },
            block_size=size,
            async_scheduling=True,
            enable_prefix_caching=shared > 0,
            prompts=False,
        )  # fmt: skip
        return cluster.run() if backend is None else backend(cluster.inputs).run()

    return run


def request(at, prompt, output):
    return {"at": at, "prompt": prompt, "output": output}


TOLD = [options(), options(batch_wait_timeout_iters=5, batch_wait_max_tokens_ratio=0.5)]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_an_engine_equals_its_twin(one_engine, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    n, told = int(rng.integers(1, 25)), data.draw(st.sampled_from(TOLD))
    seats, budget = int(rng.integers(1, 9)), int(rng.choice([24, 40, 64]))
    at = np.cumsum(rng.exponential(float(rng.choice([0.5, 2.0, 6.0])), n)) + 1e-4
    requests = [request(float(a), int(rng.integers(2, 24)), int(rng.integers(2, 40))) for a in at]
    size = int(rng.choice([1, 4]))
    most = max(-(-(r["prompt"] + r["output"]) // size) for r in requests)
    blocks = most + 2 + int(rng.choice([0, 3, 10, 500]))
    rules = rules_of("trtllm", told, budget, 1)
    record = one_engine(requests, rules, seats, budget, blocks, size)
    found = Twin(told, seats, budget, blocks, size).run(requests)
    for name, column in (("first", "first_token_s"), ("end", "finish_s")):
        np.testing.assert_allclose(record.requests[column], [r[name] for r in found], rtol=1e-12)
    assert not record.requests["preemptions"].any()


def test_the_twin_sees_waits():
    """The property above would be empty if nothing were put off."""
    twin = Twin(TOLD[1], 8, 64, 100, 4)
    _, second = twin.run([request(0.0, 8, 30), request(2.5, 8, 4)])
    assert second["first"] - second["at"] > 5 * STEP_S


def test_prompts_alone_hold_up_those_that_decode(one_engine):
    """SGLang: while the second prompt is computed, the first request gets no token; vLLM: it does.

    The first has its first token at 0.25 + 7/32 + 1 s. The second comes in its second step.
    """
    requests = [request(0.0, 8, 6), request(1.6, 17, 2)]
    start = 0.25 + 7 / 32 + 1
    alone = one_engine(requests, rules_of("sglang", options(), 64, 1)).requests
    mixed = one_engine(requests, EngineRules()).requests
    prompt_s = 0.25 + 16 / 32
    assert alone["finish_s"].tolist() == [start + 5 + prompt_s + 1, start + 3 + prompt_s + 1]
    assert mixed["finish_s"].tolist() == [start + 5 + prompt_s, start + 3 + prompt_s + 1]


@pytest.mark.parametrize(("every", "seen"), [(1, 3), (10, 10)])
def test_polls_come_every_so_many_steps(one_engine, every, seen):
    """Who comes in step 2 of decoding joins behind the step at whose launch the engine looks."""
    requests = [request(0.0, 2, 40), request(2.5, 2, 2)]
    start = 0.25 + 1 / 32 + 1
    told = options(scheduler_recv_interval=every)
    record = one_engine(requests, rules_of("sglang", told, 64, 1)).requests
    assert record["prefill_start_s"][1] == pytest.approx(start + seen)


def test_who_reserves_to_the_end_is_never_preempted(one_engine):
    """TensorRT-LLM: two of 10 + 30 tokens fit into 80, the third waits; vLLM lets all in."""
    requests = [request(0.0, 10, 30) for _ in range(3)]
    sure = one_engine(requests, rules_of("trtllm", options(), 64, 1), blocks=20).requests
    assert not sure["preemptions"].any()
    assert sure["prefill_start_s"][2] == pytest.approx(sure["finish_s"][0])
    told = options(capacity_scheduler_policy="MAX_UTILIZATION")
    bold = one_engine(requests, rules_of("trtllm", told, 64, 1), blocks=20).requests
    assert bold["prefill_start_s"][2] < bold["finish_s"][0]
    assert bold["preemptions"].sum() > 0


def test_the_fewest_outputs_are_retracted_first_and_go_to_the_back(one_engine):
    requests = [request(0.0, 4, 30), request(3.0, 4, 30)]
    told = options(schedule_conservativeness=0.01)
    record = one_engine(requests, rules_of("sglang", told, 64, 1), blocks=12, size=4).requests
    assert record["preemptions"].tolist() == [0, 1]


def test_gaps_of_those_that_sit_out_are_whole(one_engine):
    """Whatever the order of steps, the gaps between a request's tokens add up to its decoding."""
    from eldr_sim.simulator.outcome.window_steps import window_steps

    rng = np.random.default_rng(5)
    requests = [request(float(a), int(rng.integers(2, 30)), 12) for a in rng.random(30) * 40]
    record = one_engine(requests, rules_of("sglang", options(), 64, 1))
    steps = window_steps(record, np.array([True]), 0.0, math.inf)
    decoding = record.requests["finish_s"] - record.requests["first_token_s"]
    assert (steps.gaps * steps.carried).sum() == pytest.approx(decoding.sum())
    assert steps.carried.sum() == 11 * 30


def spec_of(**fields):
    fields = {"model": "Llama-3.1-8B", "topology": "1C", "gpu": "H200"} | fields
    return prepare(make_config(fields)).spec


def test_defaults_are_the_engines():
    sglang, trtllm = spec_of(engine="sglang").decode, spec_of(engine="trtllm").decode
    assert (sglang.max_num_batched_tokens, sglang.max_num_seqs) == (8192, 2048)
    assert spec_of(engine="sglang", gpu="B200").decode.max_num_batched_tokens == 16384
    assert (trtllm.max_num_batched_tokens, trtllm.max_num_seqs) == (8192, 2048)
    assert make_config({"engine": "trtllm"}).engine.block_size == 32
    # H200: 143,771 MiB, less 512 + 1.5 x 8192 + 2 x 256 + 128
    share = make_config({"engine": "sglang", "gpu": "H200"}).engine.gpu_memory_utilization
    assert share == pytest.approx(1 - 13440 / 143771, abs=0.01)


@pytest.mark.parametrize(
    ("gpu", "version", "budget"),
    [
        ("B200", None, 16384), ("MI300X", "0.32", 16384), ("B200", "0.28", 16384),
        ("B200", "0.24", 8192), ("H200", None, 8192), ("A100", None, 2048),
    ],
)  # fmt: skip
def test_vllms_budget_goes_by_memory_and_version(gpu, version, budget):
    assert default_budget("vllm", load_gpu(gpu), version=version) == budget


@on_each("engine", ["vllm", "sglang", "trtllm"])
@on_each("change", [{"engine": "sglang"}, {"engine": "trtllm"}, {"gpu": "B200"}])
def test_a_change_of_the_engine_brings_its_defaults(engine, change):
    """Of its share of the memory and its blocks, unless others were asked for."""
    for explicit_fields in ({}, {"gpu_memory_utilization": 0.5, "block_size": 64}):
        base = make_config({"engine": engine} | explicit_fields)
        wanted = make_config({"engine": engine} | explicit_fields | change)
        assert base.replace(**change) == wanted
        words = " ".join(f"{name}={value}" for name, value in change.items())
        assert make_config(change_fields(base.explicit_fields("json"), words)) == wanted


def test_launch_lines_are_read():
    line = "python -m sglang.launch_server --model-path Llama-3.1-8B --tp 2 --max-running-requests"
    line += " 64 --mem-fraction-static=0.8 --disable-radix-cache --chunked-prefill-size 4096"
    config = make_config({"engine": "sglang", "engine_args": line, "topology": "1C"})
    assert (config.engine.model, config.cluster.tensor_parallel_size) == ("Llama-3.1-8B", 2)
    assert (config.engine.max_num_seqs, config.engine.max_num_batched_tokens) == (64, 4096)
    assert (config.engine.gpu_memory_utilization, config.engine.enable_prefix_caching) == (
        0.8,
        False,
    )
    line = "vllm serve --max-num-seqs 32 --no-enable-prefix-caching -tp 4"
    config = make_config({"engine_args": line, "max_num_seqs": 8})
    assert (config.engine.max_num_seqs, config.engine.enable_prefix_caching) == (8, False)
    assert config.cluster.tensor_parallel_size == 4
    line = "--tp 8 --dp 8 --enable-dp-attention --ep-size 8 --chunked-prefill-size 16384"
    config = make_config({"engine": "sglang", "engine_args": line})
    assert (config.cluster.tensor_parallel_size, config.cluster.data_parallel_size) == (1, 8)
    assert config.cluster.enable_expert_parallel
    assert config.engine.max_num_batched_tokens == 2048


def test_prompts_run_eagerly_where_the_engine_captures_none(tmp_path):
    def launches(**fields):
        return spec_of(**fields).decode.step_time.cost.prompt_launch_s > 0

    file = tmp_path / "extra.yaml"
    file.write_text("torch_compile_config:\n  enable_piecewise_cuda_graph: true\n")
    assert launches()
    assert not launches(extra_llm_api_options=str(file))
    assert not launches(gpu="A100")
    assert not launches(engine="sglang")
    assert launches(engine="sglang", engine_args="--disable-piecewise-cuda-graph")
    assert launches(engine="trtllm")
    assert not launches(engine="trtllm", piecewise_cuda_graph=True)
    assert spec_of(engine="trtllm").decode.step_time.cost.launch_s == 0


@pytest.mark.parametrize(
    ("model", "gpu", "size", "about", "captured"),
    [
        ("DeepSeek-R1", "H200", (8, 1), {}, 2048),
        ("DeepSeek-R1", "B200", (8, 1), {}, 0),
        ("DeepSeek-R1", "H200", (1, 8), {}, 0),
        ("DeepSeek-R1", "H200", (8, 1), {"drafts": True}, 0),
        ("DeepSeek-V3.2", "H200", (8, 1), {}, 0),
        ("Qwen3-30B-A3B", "MI300X", (1, 1), {}, 0),
        ("Qwen3-30B-A3B", "H200", (1, 1), {}, None),
        ("Qwen3-30B-A3B", "H200", (1, 1), {"apart": True}, 0),
    ],
)
def test_sglang_captures_the_prompts_that_its_server_args_allow(model, gpu, size, about, captured):
    """``captured``: most tokens of a step with prompts that is a graph; None: any number."""
    parallelism = Parallelism(size[0], size[1] > 1, size[1])
    of = load_model(model), load_gpu(gpu), parallelism
    rules = prompt_graphs(*of, **{"drafts": False, "apart": False} | about)
    assert rules.get("prompt_graph_tokens") == captured


@pytest.mark.parametrize(
    ("gpu", "version", "decode_tokens", "given", "captured"),
    [
        ("H100", None, 1024, {}, 512),
        ("H100", "0.24", 1024, {}, 512),
        ("H100", "0.32", 1024, {}, 512),
        ("B200", "0.24", 1024, {}, 512),
        ("B200", "0.32", 1024, {}, 1024),
        ("GB300", "0.32", 1024, {}, 1024),
        ("RTX PRO 6000", "0.32", 1024, {}, 512),
        ("H100", "0.32", 100, {}, 200),
        ("H100", "0.32", 100, {"max_cudagraph_capture_size": 2048}, 2048),
        ("H100", None, 100, {"max_cudagraph_capture_size": 2048}, 2048),
    ],
)
def test_vllm_captures_steps_of_at_most_its_capture_size(
    gpu, version, decode_tokens, given, captured
):
    options = SchedulerConfig(**given)
    rules = captured_steps(options, load_gpu(gpu), version, decode_tokens)
    assert rules.get("graph_tokens") == rules.get("prompt_graph_tokens") == captured
    decoding = options.model_copy(update={"piecewise_cuda_graph": False})
    rules = captured_steps(decoding, load_gpu(gpu), version, decode_tokens)
    assert (rules.get("graph_tokens"), rules["prompt_graph_tokens"]) == (captured, 0)


def test_a_step_of_more_tokens_than_its_graphs_hold_waits_for_the_host():
    built = build_step_time_model(
        "Qwen3-30B-A3B", "H200", max_num_seqs=8, max_model_len=4096, graph_tokens=4,
        prompt_graph_tokens=256,
    )  # fmt: skip
    none, host_s = np.zeros(1, np.int64), []
    for tokens in (256, 257):
        new = np.full(1, tokens, np.int64)
        host_s.append(step_parts(built.cost, 0, 0, 0, none, new, 1, np.zeros(1), True).host)
    for decoding in (4, 5):
        empty, experts = np.zeros(0, np.int64), np.full(48, 40)
        step = step_parts(built.cost, decoding, decoding, 99, empty, empty, 1, experts, False)
        host_s.append(step.host)
    assert host_s[0] == host_s[2] == built.cost.host_s < min(host_s[1], host_s[3])
    built = build_step_time_model("Qwen3-30B-A3B", "H200", max_num_seqs=8, max_model_len=4096)
    assert built.cost.launch_s == built.cost.prompt_launch_s == 0.0


def test_stages_wait_for_their_launches():
    """A prompt of 16 tokens through two stages takes no less than its 32 x 8 launches."""

    def prompt_s(graphs):
        config = make_config({
            "engine": "trtllm", "topology": "1P", "model": "Llama-3.1-8B", "gpu": "H200",
            "prefill": {"pipeline_parallel_size": 2}, "num_requests": 1, "input_len": 16,
            "piecewise_cuda_graph": graphs, "request_rate": "inf",
        })  # fmt: skip
        requests = simulate(config).record.requests
        return float(requests["prefill_end_s"][0] - requests["prefill_start_s"][0])

    launches_s = 32 * 8 * 90e-6
    assert prompt_s(True) < launches_s
    assert launches_s < prompt_s(False) < 1.2 * launches_s


def test_the_model_behind_a_command_is_read():
    for command in ("vllm serve", "trtllm-serve"):
        engine = {"vllm serve": "vllm", "trtllm-serve": "trtllm"}[command]
        line = f"{command} Llama-3.1-8B --port 8000"
        assert make_config({"engine": engine, "engine_args": line}).engine.model == "Llama-3.1-8B"
    with pytest.raises(InputError, match="model"):
        prepare(make_config({"engine_args": "vllm serve no/such-model --max-num-seqs 8"}))
    line = "--tp-size 8 --attn-dp-size 4 --ep-size 8 --chunked-prefill-size 8192"
    config = make_config({"engine": "sglang", "engine_args": line})
    assert (config.cluster.tensor_parallel_size, config.cluster.data_parallel_size) == (2, 4)
    assert config.engine.max_num_batched_tokens == 2048


def test_what_is_taken_for_something_else_is_said(tmp_path):
    with pytest.warns(EldrSimWarning, match="KV cache of nvfp4$"):
        assert (
            make_config({"engine_args": "--kv-cache-dtype nvfp4"}).engine.kv_cache_dtype == "auto"
        )
    line = "--tp 8 --ep-size 4"
    with pytest.warns(EldrSimWarning, match="spread over 4 GPUs"):
        assert make_config({"engine": "sglang", "engine_args": line}).cluster.enable_expert_parallel
    file = tmp_path / "eager.yaml"
    file.write_text("cuda_graph_config: null\n")
    assert make_config({"extra_llm_api_options": str(file)}).steps.enforce_eager


@on_each("changes", [{"gpu": "H200"}, {"engine": "trtllm"}, {"engine": "vllm"},
     {"max_num_batched_tokens": 16384},
     {"gpu": "H200", "tensor_parallel_size": 8, "data_parallel_size": 8}])  # fmt: skip
@on_each("engine", ["vllm", "sglang", "trtllm"])
def test_other_fields_bring_their_own_defaults(engine, changes):
    """Plans, what-ifs and Python change a run's GPU, engine and sizes."""
    changed = make_config({"engine": engine}).replace(**changes)
    assert changed == make_config({"engine": engine} | changes)
    explicit_fields = {"gpu_memory_utilization": 0.7, "block_size": 64}
    changed = make_config({"engine": engine} | explicit_fields).replace(**changes)
    assert changed == make_config({"engine": engine} | explicit_fields | changes)


def test_a_result_brings_no_defaults_of_its_engine(tmp_path):
    fields = {"topology": "1C", "model": "Llama-3.1-8B", "engine": "sglang", "block_size": 64}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"config": make_config(fields).model_dump(mode="json")}))
    read = make_config(read_config(path) | {"gpu": "H200"})
    assert read == make_config(fields | {"gpu": "H200"})
    for config in (make_config(fields), str(path)):
        values = options_of(run, config, {"gpu": "H200"})
        assert config_from_options(values) == read


def test_each_pool_has_its_own_default_share_of_the_memory():
    fields = {"engine": "sglang", "topology": "1P1D", "gpu": "H100"}
    spec = spec_of(**fields, decode={"gpu": "H200"}, prefill={"gpu": "H100"})
    for pool, gpu in zip(spec.pools, ("H100", "H200"), strict=True):
        alone = make_config(fields | {"gpu": gpu}).engine.gpu_memory_utilization
        assert pool.engine.memory_share == alone
    explicit_fields = spec_of(**fields, decode={"gpu": "H200"}, gpu_memory_utilization=0.7)
    assert {pool.engine.memory_share for pool in explicit_fields.pools} == {0.7}


def test_what_is_not_simulated_is_said_in_one_line():
    line = "--swa-prefix-tails 4 --mamba-backend triton --quantisation-x 3 --host 0.0.0.0"
    line += " --max-loras-per-batch 4"
    with pytest.warns(EldrSimWarning) as explicit_fields:
        make_config({"engine": "sglang", "engine_args": line})
    assert [str(each.message) for each in explicit_fields] == [
        "of the launch line, no options of SGLang 0.5.23, so ignored: quantisation_x",
        "not simulated of the launch line, and may change the answer: swa_prefix_tails",
        "of the launch line, kernels timed as those of the tables: mamba_backend",
        "of the launch line, without effect on the answer: host, max_loras_per_batch",
    ]


def test_memory_for_swapping_changes_nothing_and_swapping_is_refused():
    """vLLM computes preempted requests again; before 0.8 it swapped on request."""
    for line in ("--swap-space 16", "--swap-space=0", "--preemption-mode recompute"):
        with pytest.warns(EldrSimWarning) as told:
            made = make_config({"engine": "vllm", "engine_args": line})
        assert made.replace(engine_args=None) == make_config({"engine": "vllm"})
        assert [str(each.message).split(":")[0] for each in told] == [
            "of the launch line, without effect on the answer"
        ]
    with pytest.raises(InputError, match="--preemption-mode swap is not simulated"):
        make_config({"engine": "vllm", "engine_args": "--preemption-mode swap"})


def fields_of(line, engine="sglang", **more):
    """Return the fields that a launch line gives, but for defaults of the engine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = make_config({"engine": engine, "engine_args": line} | more)
    usual = make_config({"engine": engine} | more).model_dump()
    explicit_fields = made.model_dump()
    skipped = ("gpu_memory_utilization", "max_num_batched_tokens")
    return {k: v for k, v in explicit_fields.items() if v != usual[k] and k not in skipped}


DEEPEP = "--tp 8 --dp 8 --enable-dp-attention --moe-a2a-backend deepep"
SPREAD = {"data_parallel_size": 8, "enable_expert_parallel": True}


@on_each("line, more, wanted", [
        (f"{DEEPEP} --deepep-mode low_latency", {}, SPREAD | {"all2all_backend": "deepep_ll"}),
        (f"{DEEPEP} --deepep-mode normal", {}, SPREAD | {"all2all_backend": "deepep_ht"}),
        (DEEPEP, {"topology": "2C"}, SPREAD | {"all2all_backend": "deepep_ll"}),
        ("--tp 16 --nnodes 4", {}, {"tensor_parallel_size": 16, "gpus_per_node": 4}),
        ("--tp 8 --nnodes 1", {}, {"tensor_parallel_size": 8}),
        ("--disable-radix", {}, {"enable_prefix_caching": False}),
        ("--tensor-parallel 4 --page-s 32", {}, {"tensor_parallel_size": 4, "block_size": 32}),
        ("--tp 2 --enable-hier --hicache-size 30 --hicache-write-policy write_back", {},
         {"tensor_parallel_size": 2, "kv_tier": ("host:60GB,load=50GB/s,write=back",)}),
        ("--cpu-offload-gb 0 --attn-cp-size 1 --hicache-ratio 2", {}, {}),
    ])  # fmt: skip
def test_what_changes_the_answer_is_a_field(line, more, wanted):
    assert fields_of(line, **more) == wanted


@on_each(
    "line, wanted",
    [
        ("--kv-offloading-size 40", {"kv_tier": ("host:40GiB,load=50GB/s",)}),
        ("--disable-prefix-caching", {"enable_prefix_caching": False}),
        ("--no-enable-prefix-c", {"enable_prefix_caching": False}),
        ("-ep -tp 4", {"enable_expert_parallel": True, "tensor_parallel_size": 4}),
        ("--device-mem 0.5 --gpu-m 0.6", {}),
        ("--no-enable-lora --max-lora-rank 32 --cpu-offload-gb 0 -dcp 1", {}),
        ("--stream-interval 1 --hf-overrides {}", {}),
        ("""--kv-transfer-config '{"kv_connector": "NixlConnector"}'""", {}),
    ],
)
def test_vllms_other_spellings_are_fields(line, wanted):
    assert fields_of(line, "vllm") == wanted


def test_short_options_of_drafts_are_the_configuration():
    long = """--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'"""
    assert fields_of("--spec-method ngram --spec-tok 3", "vllm") == fields_of(long, "vllm") != {}


def test_the_lists_of_options_name_what_is_mapped():
    """What stands for a field is an option of the parser, or an abbreviation of several."""
    for engine in ("vllm", "sglang"):
        names = {name.partition(".")[0] for name in NAMES[engine]}
        left = names - launch_options.OPTIONS[engine] - {"tp", "dp", "pp", "dpl", "q"}
        assert left <= {
            "num_redundant_experts", "disable_piecewise_cuda_graph", "enable_piecewise_cuda_graph",
            "enforce_piecewise_cuda_graph", "VLLM_MOE_DP_CHUNK_SIZE",
        }  # fmt: skip
    assert not launch_options.EARLIER & launch_options.WITHOUT_EFFECT
    assert not launch_options.EARLIER & launch_options.OPTIONS["vllm"]


@on_each(
    "engine, line, allowed",
    [
        ("vllm", "--enable-lora --lora-modules a=b", "without LoRA"),
        ("sglang", "--lora-paths a b", "without LoRA"),
        ("vllm", "--cpu-offload-gb 10", "all weights on the GPUs"),
        ("sglang", "--offload-group-size 4", "all weights on the GPUs"),
        ("sglang", "--enable-lmcache", "--kv-tier"),
        ("sglang", "--enable-hierarchical-cache --hicache-ratio 2", "--kv-tier"),
        ("vllm", """--hf-overrides '{"num_hidden_layers": 4}'""", "config.json"),
        ("vllm", "--hf-overrides.num_hidden_layers 4", "config.json"),
        ("sglang", """--json-model-override-args '{"num_hidden_layers": 4}'""", "config.json"),
        ("vllm", "-dcp 2", "--tensor-parallel-size"),
        ("vllm", """--kv-transfer-config '{"kv_connector": "LMCacheConnectorV1"}'""", "--kv-tier"),
    ],
)
def test_mechanisms_that_are_not_simulated_are_refused(engine, line, allowed):
    with pytest.raises(InputError, match=allowed):
        make_config({"engine": engine, "engine_args": line, "topology": "1C"})


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        ("vllm", """--hf-overrides '{"rope_scaling": {"factor": 4.0}}'"""),
        ("vllm", "--stream-interval 10"),
        ("sglang", "--stream-interval 10"),
    ],
)
def test_what_is_not_simulated_and_may_change_the_answer_is_named(engine, line):
    with pytest.warns(EldrSimWarning, match="may change the answer: (hf_over|stream_int)"):
        make_config({"engine": engine, "engine_args": line, "topology": "1C"})


def test_deepep_in_its_own_modes_for_prompts_and_decoding():
    found = fields_of(DEEPEP, topology="1P1D")
    assert found["all2all_backend"] == "deepep_ll"
    assert found["prefill"]["all2all_backend"] == "deepep_ht"


def test_abbreviations_of_drafts_are_those_of_the_whole_option():
    drafts = "--speculative-{} EAGLE --speculative-num-steps 3 --speculative-num-draft-tokens 4"
    short, whole = (fields_of(drafts.format(name)) for name in ("algo", "algorithm"))
    assert short == whole != {}


@on_each(
    "engine, line, message",
    [
        ("sglang", "--tp 8 --moe-a2a-backend deepep", "DeepEP between the GPUs of one"),
        ("sglang", DEEPEP.replace("deepep", "mooncake"), "--moe-a2a-backend mooncake"),
        ("sglang", "--tp 6 --nnodes 4", "--nnodes 4, but 6 GPUs"),
        ("sglang", "--disaggregation-mode prefill", "--topology xPyD"),
        ("vllm", "-dp 8 --enable-expert-parallel --all2all-backend nixl_ep", "nixl_ep"),
        ("vllm", "--max-num 8", "--max_num may be"),
        ("sglang", "--page 32", "page_size or paged_experts"),
        ("vllm", "--quantization fp8", "weights of Qwen3-30B-A3B are bfloat16"),
        ("vllm", "--served-model-name 'a", "No closing quotation"),
        ("sglang", "-m sglang.bench_serving --dataset-name sharegpt", "--dataset-name sharegpt"),
    ],
)
def test_what_changes_the_answer_and_is_not_simulated_is_refused(engine, line, message):
    with pytest.raises(InputError, match=message):
        make_config({"engine": engine, "engine_args": line, "topology": "1C"})


@pytest.mark.parametrize(
    ("engine", "command", "ratio", "shortest", "longest"),
    [
        ("vllm", "vllm bench serve", "0.25", 750, 1250),
        ("vllm", "vllm bench serve", "", 1000, 1000),
        ("sglang", "python -m sglang.bench_serving", "0.25", 250, 1000),
        ("sglang", "python -m sglang.bench_serving", "1.0", 1000, 1000),
        ("sglang", "python -m sglang.bench_serving", "", 1, 1000),
    ],
)
def test_a_range_has_the_meaning_of_its_benchmark(engine, command, ratio, shortest, longest):
    line = f"{command} --random-input-len 1000 --random-output-len 100 --num-prompts 9"
    line += f" --random-range-ratio {ratio}" if ratio else ""
    found = {"random_range_ratio": 0.0} | fields_of(line, engine)
    middle, share = found["input_len"], found["random_range_ratio"]
    assert found["num_requests"] == 9
    assert abs(max(1, middle * (1 - share)) - shortest) <= 1
    assert abs(middle * (1 + share) - longest) <= 1


def test_an_option_file_is_read(tmp_path):
    file = tmp_path / "extra.yaml"
    file.write_text(
        "kv_cache_config:\n  free_gpu_memory_fraction: 0.8\n  enable_block_reuse: false\n"
        "  dtype: fp8\nbatch_wait_timeout_iters: 20\nbatch_wait_max_tokens_ratio: 0.9\n"
        "enable_attention_dp: true\ntensor_parallel_size: 4\n"
        "attention_dp_config:\n  enable_balance: true\n  timeout_iters: 60\n"
    )
    config = make_config({"extra_llm_api_options": str(file)})
    assert config.engine.engine == "trtllm"
    assert (config.engine.gpu_memory_utilization, config.engine.kv_cache_dtype) == (0.8, "fp8")
    assert (config.scheduler.batch_wait_timeout_iters, config.engine.enable_prefix_caching) == (
        20,
        False,
    )
    assert (config.cluster.tensor_parallel_size, config.cluster.data_parallel_size) == (1, 4)
    assert not config.cluster.enable_expert_parallel  # its default cuts the experts
    rules = rules_of("trtllm", config.scheduler, 8192, 4)
    assert (rules.balance_steps, rules.batching_steps) == (60, 10)
    assert rules_of("trtllm", config.scheduler, 8192, 1).balance_steps == 0
    assert dataclasses.asdict(spec_of(engine="trtllm").decode.rules)["whole_prompts"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engine": "tgi"}, "engine"),
        ({"scheduler_recv_interval": 4}, "scheduler_recv_interval.*--engine sglang"),
        ({"engine": "sglang", "engine_args": "--xyz c"}, None),
        ({"extra_llm_api_options": "missing.yaml"}, "missing.yaml"),
    ],
)
def test_bad_engines_are_refused(fields, message):
    if message is None:
        with pytest.warns(EldrSimWarning, match="xyz$"):
            make_config(fields)
        return
    with pytest.raises((InputError, FileNotFoundError), match=message):
        spec_of(**fields)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_the_first_token_is_generated_wherever_it_is(engine):
    """A prefill worker's, where it comes with the KV cache: 20 requests have 60 tokens."""
    summary = simulate(make_config({
        "engine": engine, "topology": "1P1D", "model": "Qwen3-8B", "num_requests": 20,
        "request_rate": 20, "input_len": 200, "output_len": 3,
    })).summary  # fmt: skip
    assert summary["output_throughput"] * summary["duration"] == pytest.approx(60)
    assert summary["gpu_hours_per_million_output_tokens"] == pytest.approx(
        2 * summary["duration"] / 3600 / 60e-6
    )


@on_each("run", ["vllm", "sglang", "trtllm"])
@on_each("own", ["vllm", "sglang", "trtllm"])
def test_a_pool_of_another_engine_has_the_kv_blocks_of_that_engine(run, own):
    """In blocks of one size: what the engine would have if all of the run were it."""

    def blocks(**fields):
        given = {"topology": "1P1D", "num_requests": 5, "block_size": 16} | fields
        pools = prepare(make_config(given)).spec.pools
        return [pool.engine.n_blocks for pool in pools]

    mixed = blocks(engine=run, decode={"engine": own})
    assert mixed == [blocks(engine=run)[0], blocks(engine=own)[1]]
    share = {"gpu_memory_utilization": 0.8}
    mixed = blocks(engine=run, decode={"engine": own}, **share)
    assert mixed[1] == blocks(engine=own, **share)[1]


def test_blocks_are_reserved_early_where_sglang_decodes_and_the_router_can():
    chat = {"topology": "1P1D", "engine": "sglang", "policy": "jsq", "model": "Qwen3-30B-A3B"}
    assert spec_of(**chat).reserves_early
    for other in ({"policy": "eldr"}, {"engine": "vllm"}, {"decode": {"engine": "vllm"}},
                  {"kv_reserve": "prompt_end"}, {"topology": "1C"},
                  {"conditional_disagg": "noncached:9"}):  # fmt: skip
        assert not spec_of(**chat | other).reserves_early, other
    early = {"engine": "vllm", "kv_reserve": "arrival"}
    assert spec_of(**chat | early).reserves_early
    for other in ({"policy": "eldr"}, {"conditional_disagg": "noncached:9"}):
        with pytest.raises(InputError) as refused:
            spec_of(**chat | early | other)
        assert refused.value.field == "kv_reserve"


def test_a_full_decode_worker_stalls_prompts_where_blocks_are_reserved_early(
    make_cluster, make_workload, make_step_time
):
    """Blocks for one request: the second one's prompt waits until the first has ended."""
    work = make_workload(np.array([0.0, 0.25]), np.array([12, 12]), np.array([8, 2]))
    step_time = make_step_time(8, 1, 8, constant=0.5, prefill=(1.0, 0.0))
    begins = {}
    for early in (False, True):
        requests = (
            make_cluster(work, step_time=step_time, decode={"n_blocks": 5}, reserves_early=early)
            .run()
            .requests
        )
        begins[early] = requests["prefill_start_s"].tolist()
        # The transfer takes no time, each of the 8 tokens a step.
        assert requests["finish_s"][0] == 1.0 + 8 * 0.5
        assert requests["finish_s"][1] == {False: 5.0 + 2 * 0.5, True: 5.0 + 1.0 + 2 * 0.5}[early]
    assert begins == {False: [0.0, 1.0], True: [0.0, 5.0]}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("blocks", [400, 700])
def test_intervals_between_tokens_add_up_to_the_time_of_all_outputs(engine, blocks):
    """Also of sequences that sit out steps of prompts, and of those that are preempted then."""
    config = make_config({
        "trace": "reference-moe", "topology": "1C", "engine": engine, "policy": "jsq",
        "num_requests": 80, "warmup": 0, "input_len": 100, "output_len": 80, "request_rate": 200,
        "num_gpu_blocks_override": blocks if engine == "sglang" else blocks // 14,
        "schedule_conservativeness": 0.01 if engine == "sglang" else None,
    })  # fmt: skip
    result = simulate(config)
    requests = result.record.requests
    assert requests["preemptions"].sum() > 10
    whole = (requests["finish_s"] - requests["first_token_s"]).sum()
    intervals = (requests["output_len"] - 1).sum()
    assert 1e-3 * result.summary["mean_itl_ms"] * intervals == pytest.approx(whole, rel=1e-9)
