"""Launch lines as they are copied: program, container, environment, options; read or refused."""

import warnings

import pytest

from eldr_sim.cli.run import run as main
from eldr_sim.errors import InputError
from eldr_sim.simulator.setup.config.launch_line import starts_one_server
from eldr_sim.simulator.setup.config.run_config import make_config

from ..on_each import on_each

MODEL = "Qwen/Qwen3-30B-A3B"
NAME = "Qwen3-30B-A3B"


def read(line, **given):
    """Return the run that a line makes, and what it warns of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        config = make_config({"engine_args": line} | given)
    return config, " ".join(str(one.message) for one in told)


PROGRAMS = [
    (f"vllm serve {MODEL} -tp 2", "vllm", None),
    (f"/opt/venv/bin/vllm serve {MODEL} --tensor-parallel-size 2", "vllm", None),
    (f"python -m vllm.entrypoints.openai.api_server --model {MODEL} -tp 2", "vllm", None),
    (f"python3 -m sglang.launch_server --model-path {MODEL} --tp 2", "sglang", None),
    (f"sglang serve --model-path {MODEL} --tp-size 2", "sglang", None),
    (f"trtllm-serve {MODEL} --tp_size 2", "trtllm", None),
    (f"trtllm-serve serve {MODEL} --tp_size 2", "trtllm", None),
    (f"CUDA_VISIBLE_DEVICES=0,1 nohup vllm serve {MODEL} -tp 2", "vllm", None),
    (f"vllm serve {MODEL} \\\n  --tensor-parallel-size 2", "vllm", None),
    (
        "docker run --gpus all -v /models/vllm:/x --name vllm -p 8000:8000 "
        f"vllm/vllm-openai:v0.14.0 --model {MODEL} --tensor-parallel-size 2",
        "vllm", "0.14.0",
    ),
    (
        "docker run -it --rm lmsysorg/sglang:v0.5.9-cu126 python3 -m sglang.launch_server "
        f"--model {MODEL} --tp 2",
        "sglang", "0.5.9",
    ),
    (f"podman run vllm/vllm-openai:latest {MODEL} -tp 2", "vllm", None),
]  # fmt: skip


@on_each("line, engine, version", PROGRAMS)
def test_the_program_says_the_engine(line, engine, version):
    """Another engine's line was read as vLLM's, and its options were left out."""
    config, told = read(line)
    assert (config.engine.engine, config.engine.engine_version) == (engine, version)
    assert config.pool("decode").parallelism.tensor_parallel_size == 2
    assert config.engine.model == MODEL
    assert "ignored" not in told


@on_each(
    "line, said",
    [
        ("ollama run qwen3", "'ollama' starts no engine"),
        (f"lmdeploy serve api_server {MODEL} --tp 2", "'lmdeploy' starts no engine"),
        (f"docker run ghcr.io/tgi:3 --model-id {MODEL}", "docker starts no image"),
        (f"vllm bench throughput --model {MODEL} --input-len 100", "sends no requests"),
        (f"vllm bench latency --model {MODEL} --batch-size 8", "sends no requests"),
        (f"vllm run-batch -i x --model {MODEL}", "vllm run-batch starts no server"),
        (f"python3 -m sglang.bench_one_batch --model {MODEL}", "starts no server"),
        ("python -m sglang_router.launch_router --worker-urls x", "starts no server"),
        (f"trtllm-bench --model {MODEL} throughput", "starts no server"),
        (f"vllm serve {MODEL} other --max-num-seqs 4", "'other' follows no option"),
        (f"vllm serve {MODEL} --max-num-seqs", "max_num_seqs without a value"),
        (f"vllm serve {MODEL} --gpu-memory-utilization", "without a value"),
        (f"vllm serve {MODEL} --tensor-parallel-sise 2", "no option of vLLM"),
        (f"vllm serve {MODEL} --config serve.yaml", "is a file of options"),
        (f"trtllm-serve {MODEL} --extra_llm_api_options x.yaml", "is a file of options"),
        (f"VLLM_USE_V1=0 vllm serve {MODEL}", "VLLM_USE_V1=0 is not simulated"),
        (f"python3 -m sglang.launch_server --model {MODEL} --chunked-prefill-size -1", "chunks"),
    ],
)
def test_what_is_no_server_that_is_known_is_refused(line, said):
    with pytest.raises(InputError, match="engine_args") as refused:
        read(line)
    assert said in str(refused.value)


def test_a_line_of_another_engine_than_the_runs_is_refused():
    with pytest.raises(InputError, match="engine: vllm, and the launch line is sglang's"):
        read(f"python3 -m sglang.launch_server --model {MODEL}", engine="vllm")


@pytest.mark.parametrize(
    ("line", "alone"),
    [
        (f"vllm serve {MODEL} -tp 2", True),
        (f"python3 -m sglang.launch_server --model-path {MODEL} --tp 2", True),
        ("docker run vllm/vllm-openai:v0.24.0 --model Qwen/Qwen3-8B", True),
        ("--max-num-seqs 4", False),
        ("vllm bench serve --request-rate 4", False),
        (f"python3 -m sglang.launch_server --model-path {MODEL} --disaggregation-mode prefill",
         False),
        (f"vllm serve {MODEL} --kv-transfer-config " + """'{"kv_role": "kv_producer"}'""", False),
    ],
)  # fmt: skip
def test_a_whole_line_starts_one_server(line, alone):
    assert starts_one_server(line) == alone


@pytest.mark.parametrize(
    ("options", "topology"),
    [
        (["--engine-args", "vllm serve --max-num-seqs 8"], "1C"),
        (["--engine-args", "vllm serve --max-num-seqs 8", "--topology", "2C"], "2C"),
        (["--engine-args", "--max-num-seqs 8"], "8P16D"),
    ],
)
def test_a_whole_line_is_one_worker_unless_options_say_more(monkeypatch, options, topology):
    class Stop(Exception):
        pass

    def simulate(config, *_, **__):
        assert config.cluster.topology == topology
        raise Stop

    monkeypatch.setattr("eldr_sim.simulator.run.simulate", simulate)
    with pytest.raises(Stop):
        main(["--model", "Llama-3.1-8B", *options], standalone_mode=False)


def test_the_environment_is_part_of_the_line():
    line = f"vllm serve {MODEL} -dp 2 --enable-expert-parallel"
    config, told = read(f"VLLM_ALL2ALL_BACKEND=deepep_low_latency NCCL_DEBUG=INFO {line}")
    assert config.cluster.all2all_backend == "deepep_ll"
    assert told == ""
    _, told = read(f"VLLM_ATTENTION_BACKEND=FLASHINFER VLLM_LOGGING_LEVEL=DEBUG {line}")
    assert "may change the answer: VLLM_ATTENTION_BACKEND" in told
    assert "LOGGING" not in told
    config, told = read(f"docker run -e VLLM_MOE_DP_CHUNK_SIZE=512 vllm/vllm-openai {MODEL}")
    assert (config.steps.moe_dp_chunk_size, told) == (512, "")


@on_each(
    "options, field, value",
    [
        ("--max-model-len 32k", "max_model_len", 32_000),
        ("--max-model-len 32K", "max_model_len", 32_768),
        ("--max-model-len 25.6k", "max_model_len", 25_600),
        ("--max-model-len auto", "max_model_len", None),
        ("--max-model-len -1", "max_model_len", None),
        ("--max-num-batched-tokens 8K", "max_num_batched_tokens", 8192),
        ("-O0", "enforce_eager", True),
        ("-O3", "enforce_eager", False),
        ("--moe-backend triton", "moe_backend", "triton"),
    ],
)
def test_values_are_read_as_vllms_parser_reads_them(options, field, value):
    config, told = read(f"vllm serve {MODEL} {options}")
    assert config.value(field) == value
    assert "may change" not in told


def test_what_no_acceptance_depends_on_is_named():
    drafts = '{"method":"ngram","num_speculative_tokens":2,"prompt_lookup_max":4}'
    config, told = read(f"vllm serve {MODEL} --speculative-config '{drafts}'", acceptance=None)
    assert config.pool("decode").speculative_config.num_speculative_tokens == 2
    assert "speculative_config.prompt_lookup_max" in told


def test_a_benchmarks_line_names_the_model():
    line = "vllm bench serve --model openai/gpt-oss-20b --dataset-name random --num-prompts 9"
    assert read(line)[0].engine.model == "openai/gpt-oss-20b"
    config, told = read(line, model=NAME)
    assert config.engine.model == NAME
    assert "model" in told


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": True}, {"request_rate": False}, {"max_num_seqs": True},
        {"decode": {"max_num_seqs": True}}, {"topology": {"a": {"workers": True}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_switch_is_no_number(fields):
    """YAML reads ``yes`` and ``on`` as switches: a 1 that nobody meant."""
    with pytest.raises(InputError, match=r"(true|false) \(allowed: a number\)"):
        make_config(fields)
