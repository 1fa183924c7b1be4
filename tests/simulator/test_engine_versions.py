"""Versions of engines: what they choose, and the KV capacity that their logs print."""

import csv

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels.front_end import PARTS
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.tables.format import mla_shape
from eldr_sim.kernel_profiles.tables.library import Engine, find_table
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.engine_rules import fuses_shared_expert
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.engine_specs import make_engine_spec
from eldr_sim.simulator.setup.memory import windows_of
from eldr_sim.simulator.setup.prepare import _front_end

from ..on_each import on_each
from ..paths import ROOT

ROWS = list(csv.DictReader((ROOT / "validation/published/rows/memory.csv").open()))


def spec_of(config, pool, model):
    windows = windows_of(config.engine, config.pools, config.cluster.n_prefill > 0, model)
    return make_engine_spec(config, pool, model, windows)


def capacity_gib(row, engine):
    """KV cache of a GPU that one co-located worker of the row's launch has, GiB."""
    config = make_config({
        "engine": engine, "model": row["model"], "gpu": "H100", "topology": "1C",
        "tensor_parallel_size": int(row["gpus"]), "max_model_len": 8192,
        "gpu_memory_utilization": float(row["gpu_memory_utilization"]),
        "disable_hybrid_kv_cache_manager": True,
    })  # fmt: skip
    model = load_model(row["model"])
    blocks = spec_of(config, config.pools[0], model).n_blocks
    layout = config.pools[0].parallelism
    return blocks * config.engine.block_size * layout.kv_bytes_per_token(model) / 2**30


@on_each("row", ROWS[:10])
def test_kv_capacity_is_what_vllm_019_logged(row):
    """Ten launches on H100 (llm-d-planner): within 4%, none of them fitted."""
    assert capacity_gib(row, row["engine"]) == pytest.approx(float(row["kv_gib"]), rel=0.04)


def test_older_engines_hold_less():
    """Of Qwen3-235B on four H100 a vLLM of 2025 logged 8.11 GiB: 1.65 times as much by later
    rules, 1.23 by its own; what else it held has not been measured."""
    row = ROWS[10]
    later, own = (capacity_gib(row, engine) for engine in ("vllm", row["engine"]))
    assert later / float(row["kv_gib"]) == pytest.approx(1.65, abs=0.01)
    assert own / float(row["kv_gib"]) == pytest.approx(1.23, abs=0.01)


@on_each(
    "engine, topology, given, servers",
    [
        ("vllm", "2C", {}, 2), ("vllm", "2C", {"data_parallel_size": 4}, 8),
        ("vllm==0.14", "2C", {"data_parallel_size": 4}, 2),
        ("sglang", "2C", {"data_parallel_size": 4}, 2),
        ("vllm", "2P1D", {"data_parallel_size": 4}, 8),
        ("vllm", "2C", {"data_parallel_size": 4, "api_servers": 3}, 3),
    ],
)  # fmt: skip
def test_vllm_starts_an_api_server_for_each_engine(engine, topology, given, servers):
    """Since its pull request 32525 (January 2026)."""
    asked = {"topology": topology, "model": "Qwen3-30B-A3B", "engine": engine} | given
    config = make_config(asked | {"enable_expert_parallel": True})
    assert _front_end(config, load_model("Qwen3-30B-A3B")).n_servers == servers


def fields(**given):
    return make_config({"topology": "1C", "model": "Llama-3.1-8B"} | given)


@on_each(
    "engine, expected",
    [
        ("vllm", {"async_scheduling": True, "host_gap_ms": None}),
        ("vllm==0.33", {"async_scheduling": True}),
        ("vllm==0.24", {"tokenizer_mode": "thread_pool"}),
        ("vllm==0.16.1", {"tokenizer_mode": "microbatch_sequential", "async_scheduling": True}),
        ("vllm==0.13.0", {"async_scheduling": False, "host_gap_ms": 0.7}),
        ("sglang==0.5.9", {"piecewise_cuda_graph": False}),
        ("sglang==0.5.10", {"piecewise_cuda_graph": None}),
        ("trtllm==1.2", {"block_size": 32}),
        ("trtllm==1.3.0rc20", {"block_size": 32}),
    ],
)
def test_a_version_chooses_the_rules_that_changed(engine, expected):
    config = fields(engine=engine)
    assert {name: config.value(name) for name in expected} == expected
    assert config.engine.engine == engine.partition("==")[0]
    assert config.engine.engine_version == (engine.partition("==")[2] or None)


def test_what_is_given_holds_against_the_version():
    config = fields(engine="vllm==0.13", async_scheduling=True, cudagraph_padding="none")
    assert (config.engine.async_scheduling, config.steps.cudagraph_padding) == (True, "none")


def test_engines_wait_for_the_host_unless_they_schedule_ahead():
    assert fields(engine="vllm==0.13", async_scheduling=True).steps.host_gap_ms is None
    assert fields(engine="vllm==0.24", async_scheduling=False).steps.host_gap_ms == 0.7
    old = fields(engine="vllm==0.9", gpu="A100")
    assert old.steps.host_gap_ms == 3.1
    assert old.replace(gpu="H100").steps.host_gap_ms == 0.7
    assert old.replace(engine="vllm==0.11").steps.host_gap_ms == 0.7
    assert old.replace(host_gap_ms=2.0).steps.host_gap_ms == 2.0


@on_each(
    "engine, model, more_ms",
    [
        ("vllm", "Qwen3-8B", 0),
        ("vllm==0.10.2", "Qwen3-8B", 0),
        ("vllm==0.11.0", "Qwen3-8B", 20),
        ("vllm==0.11", "Qwen3-8B", 20),
        ("vllm==0.11.1", "Qwen3-8B", 0),
        ("sglang==0.11.0", "Qwen3-8B", 0),
        ("vllm==0.11.0", "GPT-OSS-20B", 0),
    ],
)
def test_one_version_compiles_a_chat_template_for_each_request(engine, model, more_ms):
    """Of `resolve_chat_template_kwargs` in the wheels of 0.10.2, 0.11.0 and 0.11.1; GPT-OSS has no
    template to compile."""
    config = fields(engine=engine, model=model, tokenizer_mode="thread_pool")
    front, plain = (_front_end(each, load_model(model)) for each in (config, fields(model=model)))
    tokens = np.array([1, 1000])
    for part in PARTS:
        more_s = front.latency.time_s(part, tokens) - plain.latency.time_s(part, tokens)
        assert more_s == pytest.approx(1e-3 * more_ms * (part == "event_loop")), part


def test_pools_have_versions_of_their_own():
    config = fields(topology="1P1D", engine="vllm==0.24", decode={"engine": "sglang==0.5.8"})
    prefill, decode = config.pools
    assert (prefill.engine, prefill.engine_version) == ("vllm", "0.24")
    assert (decode.engine, decode.engine_version) == ("sglang", "0.5.8")
    other = fields(topology="1P1D", engine="vllm==0.24", decode={"engine": "sglang"})
    assert [pool.engine_version for pool in other.pools] == ["0.24", None]


NEWEST = ["vllm==0.33", "sglang==0.5.23", "trtllm==1.3.0rc20"]


@pytest.mark.parametrize("engine", NEWEST)
def test_an_engine_without_a_version_is_the_newest_but_for_padding(engine):
    """One rule differs, and `engines.padding_of` says why: published runs were predicted so."""
    run = {"trace": "reference-moe", "topology": "1P1D", "policy": "jsq", "num_requests": 40}
    padded = run | {"engine": engine}
    plain = padded | {"cudagraph_padding": "none"}
    unversioned = simulate(make_config(run | {"engine": engine.partition("==")[0]})).record.requests
    assert simulate(make_config(plain)).record.requests.tobytes() == unversioned.tobytes()
    same = simulate(make_config(padded)).record.requests.tobytes() == unversioned.tobytes()
    assert same == (not engine.startswith("vllm"))


@on_each(
    "given, padding",
    [
        ({"engine": "vllm"}, ("none", "none")),
        ({"engine": "sglang==0.5.9"}, ("none", "none")),
        ({"engine": "vllm==0.33"}, ("dense", "dense")),
        ({"engine": "vllm==0.32.1"}, ("dense", "dense")),
        ({"engine": "vllm==0.31"}, ("experts", "experts")),
        ({"engine": "vllm==0.24", "cudagraph_padding": "none"}, ("none", "none")),
        ({"cudagraph_padding": "experts"}, ("experts", "experts")),
        ({"engine": "vllm==0.24", "decode": {"engine": "vllm==0.33"}}, ("experts", "dense")),
        ({"engine": "vllm==0.33", "decode": {"engine": "sglang"}}, ("dense", "none")),
        ({"engine": "vllm==0.33", "decode": {"data_parallel_size": 2}}, ("dense", "none")),
        ({"engine": "vllm==0.33", "data_parallel_size": 2}, ("none", "none")),
    ],
)
def test_graphs_are_padded_as_the_version_of_each_pool_does(given, padding):
    """Engines that share experts are not padded, whatever their version, and not refused for it."""
    expected = [step_times(padding[0]), step_times(padding[1])]
    config = make_config({"trace": "reference-moe", "topology": "1P1D"} | given)
    for pool, (name, padded) in zip(config.pools, zip(padding, expected, strict=True), strict=True):
        engine = spec_of(config, pool, load_model(config.engine.model))
        times = engine.step_time
        assert (times.cost is times.unpadded) == (name == "none")
        if pool.engine_version != "0.24" and pool.parallelism.n_gpus == 1:
            assert np.array_equal(times.cost.dense_s[:64], padded[:64])


def step_times(padding):
    fields = {"trace": "reference-moe", "topology": "1C", "cudagraph_padding": padding}
    config = make_config(fields)
    engine = spec_of(config, config.pools[0], load_model(config.engine.model))
    return engine.step_time.cost.dense_s


@pytest.mark.parametrize("engine", ["vllm==", "vllm==new", "vllm==0.24,0.25", "tgi==1.0", "==0.24"])
def test_versions_that_are_none_are_refused(engine):
    with pytest.raises(InputError, match="engine"):
        fields(engine=engine)


def test_kernels_are_the_engines_own_up_to_its_version():
    how = {"shape": mla_shape(16, 7168, 1536, 512), "dtype": "fp8_block"}
    for engine, framework in (
        (Engine("vllm"), "vllm 0.25.0"),
        (Engine("vllm", "0.24"), "vllm 0.25.0"),
        (Engine("vllm", "0.10"), "vllm 0.25.0"),
        (Engine("trtllm"), "trtllm 1.3.0rc20"),
        (Engine("sglang"), "vllm 0.25.0"),  # has measured none
    ):
        found = find_table("attention_decode", "H200", engine=engine, **how)
        assert found.metadata.framework == framework, engine


R1, WIDE = "deepseek-ai/DeepSeek-R1", {"enable_expert_parallel": True}


@on_each(
    "engine, model, gpu, given, fused",
    [
        ("vllm", R1, "H200", {}, False),
        ("trtllm", R1, "H200", {}, False),
        ("sglang", R1, "H200", {}, True),
        ("sglang", R1, "H200", {"enforce_eager": True}, True),
        ("sglang==0.5.9", R1, "H200", WIDE, False),
        ("sglang", R1, "B200", {}, False),  # TensorRT-LLM's kernels
        ("sglang", R1, "B200", {"engine_args": "--moe-runner-backend triton"}, True),
        ("sglang", R1, "H200", {"engine_args": "--disable-shared-experts-fusion"}, False),
        ("sglang", R1, "H200", {"engine_args": "--moe-runner-backend flashinfer_cutedsl"}, False),
        ("sglang", R1, "H200", {"engine_args": "--enforce-shared-experts-fusion"} | WIDE, True),
        ("sglang", R1, "MI300X", WIDE, True),
        ("sglang", "DeepSeek-V3.2", "H200", {}, False),
        ("sglang", "Kimi-K2.5", "H200", {}, False),
        ("sglang", "GLM-5-FP8", "H200", {}, True),
        ("sglang", "GLM-4.5", "H200", {}, True),
        ("sglang", "GLM-4.5", "MI300X", {}, False),
        ("sglang", "Qwen3.5-397B-A17B-FP8", "H200", {}, False),
        ("sglang", "Qwen3-30B-A3B", "H200", {"tensor_parallel_size": 1}, False),  # has none
        ("sglang", "ERNIE-4.5-21B-A3B", "H200", {"tensor_parallel_size": 1}, False),
    ],
)
def test_sglang_fuses_the_shared_experts_that_its_code_says(engine, model, gpu, given, fused):
    config = fields(**{"engine": engine, "model": model, "gpu": gpu, "tensor_parallel_size": 8}
                    | given)  # fmt: skip
    pool = config.pools[0]
    assert fuses_shared_expert(
        config.engine.engine, load_model(model), load_gpu(gpu), pool.parallelism, config.steps,
        config.scheduler.shared_experts_fusion,
    ) is fused  # fmt: skip


def test_a_run_takes_the_place_of_its_shared_experts():
    """Told to leave them apart, SGLang's steps take longer; the result says where they are."""

    def times(line):
        config = fields(engine="sglang", model=R1, gpu="H200", tensor_parallel_size=8,
                        engine_args=line)  # fmt: skip
        return spec_of(config, config.pools[0], load_model(R1)).step_time

    fused, apart = times(""), times("--disable-shared-experts-fusion")
    assert (fused.cost.dense_s[1:] < apart.cost.dense_s[1:]).all()
    assert "in the kernel of the routed ones" in fused.provenance["shared_experts"]["origin"]
    assert "shared_experts" not in apart.provenance
