"""Launch lines as they are copied: program, container, environment, options; read or refused."""

import json
import shlex
import warnings

import pytest

import eldr_sim as es
from eldr_sim.cli.main import cli
from eldr_sim.errors import InputError
from eldr_sim.planning.compare.what_if import change_fields
from eldr_sim.planning.runs.sweep_spec import make_spec
from eldr_sim.simulator.setup.config.launch_line import computes_all, cut
from eldr_sim.simulator.setup.config.launch_options import NAMES, OPTIONS
from eldr_sim.simulator.setup.config.run_config import RunConfig, make_config
from eldr_sim.simulator.setup.prepare import prepare

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
        ("ollama run qwen3", "'ollama' does not start a known engine"),
        (f"lmdeploy serve api_server {MODEL} --tp 2", "'lmdeploy' does not start a known engine"),
        (
            f"docker run ghcr.io/tgi:3 --model-id {MODEL}",
            "docker does not start a known engine image",
        ),
        (f"vllm bench throughput --model {MODEL} --input-len 100", "does not send requests"),
        (f"vllm bench latency --model {MODEL} --batch-size 8", "does not send requests"),
        (f"vllm run-batch -i x --model {MODEL}", "vllm run-batch does not start a server"),
        (
            f"python3 -m sglang.bench_one_batch --model {MODEL}",
            "starts a server that is not simulated",
        ),
        (
            "python -m sglang_router.launch_router --worker-urls x",
            "starts a server that is not simulated",
        ),
        (f"trtllm-bench --model {MODEL} throughput", "starts a server that is not simulated"),
        (f"vllm serve {MODEL} other --max-num-seqs 4", "'other' does not follow an option"),
        (f"vllm serve {MODEL} --max-num-seqs", "max_num_seqs has no value"),
        (f"vllm serve {MODEL} --gpu-memory-utilization", "has no value"),
        (f"vllm serve {MODEL} --tensor-parallel-sise 2", "not an option of vLLM"),
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


DISAGGREGATED = (
    "--disaggregation-mode prefill",
    '--kv-transfer-config \'{"kv_role": "kv_producer"}\'',
)


@pytest.mark.parametrize(
    ("line", "topology"),
    [
        (f"vllm serve {MODEL} -tp 2", "1C"),
        (f"python3 -m sglang.launch_server --model-path {MODEL} --tp 2", "1C"),
        ("docker run vllm/vllm-openai:v0.24.0 --model Qwen/Qwen3-8B", "1C"),
        ("--max-num-seqs 4", "8P16D"),
        ("vllm bench serve --request-rate 4", "8P16D"),
    ],
)
def test_a_whole_line_is_one_server_unless_a_topology_says_more(line, topology):
    assert read(line)[0].cluster.topology == topology
    assert read(line, topology="2C")[0].cluster.topology == "2C"


@pytest.mark.parametrize(
    ("program", "role"), [*zip(("sglang", "vllm"), DISAGGREGATED, strict=True)]
)
def test_a_line_that_hands_over_is_not_one_server(program, role):
    line = f"{program} serve {MODEL} {role}"
    assert not computes_all(line, cut(line))


class Stop(Exception):
    """Ends a command before it runs."""


LINE = "vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 8"
COMMANDS = {
    "run": [],
    "compare": ["--policy", "jsq", "--seeds", "2"],
    "compare --vary": ["--vary", "max_num_batched_tokens=2048,4096"],
    "compare --drafts": [
        "--drafts",
        "2",
        "--speculative-config",
        '{"method": "ngram", "num_speculative_tokens": 2}',
    ],
    "plan": ["--slo", "ttft:500", "--request-rate", "4"],
    "serve": [],
}
FUNCTIONS = {
    "run": {}, "compare": {"policy": ["jsq"]}, "Simulation": {},
    "plan": {"slo": {"ttft": 500}, "request_rate": 4},
}  # fmt: skip


@pytest.fixture
def one_server(monkeypatch):
    """Return a check: that what is called asks for one server, of eight sequences."""
    made = []

    def stop(*given, **named):
        made.append([one for one in (*given, *named.values()) if isinstance(one, RunConfig)])
        raise Stop

    monkeypatch.setattr(RunConfig, "pool", stop)

    def check(call):
        with pytest.raises(Stop):
            call()
        (config,) = made.pop()
        assert (config.cluster.topology, config.value("max_num_seqs")) == ("1C", 8)

    return check


@on_each("command", list(COMMANDS))
def test_every_command_takes_a_whole_line_as_one_server(command, one_server):
    words = [command.split()[0], *COMMANDS[command], "--engine-args", LINE]
    one_server(lambda: cli(words, standalone_mode=False))


@on_each("function", list(FUNCTIONS))
def test_every_function_takes_a_whole_line_as_one_server(function, one_server):
    one_server(lambda: getattr(es, function)(engine_args=LINE, **FUNCTIONS[function]))


@pytest.mark.parametrize("topology", [None, "3C"])
def test_a_launch_line_as_a_change_overrides_what_it_names(topology):
    base = {"model": "Qwen3-30B-A3B", "max_num_seqs": 4, "block_size": 32}
    base |= {} if topology is None else {"topology": topology}
    wanted = (topology or "1C", "meta-llama/Llama-3.1-8B", 8, 32)
    config, change = make_config(base), f"engine_args={shlex.quote(LINE)}"
    document = {"config": base, "sweep": {"type": "grid", "parameters": {"engine_args": [LINE]}}}
    (point,) = make_spec(document).points
    assert point.parameters == {"engine_args": LINE}
    for changed in (
        config.replace(engine_args=LINE),
        make_config(change_fields(config.explicit_fields("json"), change)),
        point.configs[0],
    ):
        names = ("topology", "model", "max_num_seqs", "block_size")
        assert tuple(changed.value(name) for name in names) == wanted
    sglang = config.replace(engine_args="python3 -m sglang.launch_server --tp 2")
    assert (sglang.engine.engine, sglang.engine.engine_version) == ("sglang", None)
    assert config.replace(engine_args="--block-size 16").value("block_size") == 16


def test_the_environment_is_part_of_the_line():
    line = f"vllm serve {MODEL} -dp 2 --enable-expert-parallel"
    config, told = read(f"VLLM_ALL2ALL_BACKEND=deepep_low_latency NCCL_DEBUG=INFO {line}")
    assert config.cluster.all2all_backend == "deepep_ll"
    assert told == ""
    _, told = read(f"VLLM_ATTENTION_BACKEND=FLASHINFER VLLM_LOGGING_LEVEL=DEBUG {line}")
    assert told.endswith("kernels timed as those of the tables: VLLM_ATTENTION_BACKEND")
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


#: What another value of an option does is nothing that is simulated: an embedding service, a CPU.
OTHER_SERVICES = [
    f"vllm serve {MODEL} --runner pooling",
    f"vllm serve {MODEL} --task embed",
    f"vllm serve {MODEL} --convert classify",
    f"vllm serve {MODEL} --device cpu",
    f"vllm serve {MODEL} --preemption-mode swap",
    f"python -m sglang.launch_server --model-path {MODEL} --is-embedding",
    f"python -m sglang.launch_server --model-path {MODEL} --device npu",
    f"trtllm-serve {MODEL} --backend tensorrt",
]


@on_each("line", OTHER_SERVICES)
def test_lines_of_other_services_are_refused(line):
    with pytest.raises(InputError, match="is not simulated"):
        read(line)


def test_usual_values_of_these_options_have_no_effect():
    told = read(f"vllm serve {MODEL} --runner generate --device cuda --task auto")[1]
    assert "without effect on the answer: device, runner, task" in told
    told = read(f"python -m sglang.launch_server --model-path {MODEL} --skip-tokenizer-init")[1]
    assert "may change the answer: skip_tokenizer_init" in told  # API servers take time


#: Options with a mechanism, of each engine, and the fields that they are.
MECHANISMS = [
    ("vllm", "--kv-cache-memory-bytes 4G", {"kv_cache_memory_bytes": 4 << 30}),
    ("vllm", "-cc.cudagraph_mode=NONE", {"enforce_eager": True}),
    ("vllm", """--compilation-config '{"cudagraph_mode": "NONE"}'""", {"enforce_eager": True}),
    ("vllm", "--optimization-level 0", {"enforce_eager": True}),
    ("vllm", "--scheduling-policy priority", {"queue_order": "priority"}),
    ("vllm", "--prefill-schedule-interval 4", {"prefill_schedule_interval": 4}),
    ("vllm", "--max-num-seqs 256 --max-num-active-seqs 64", {"max_num_seqs": 64}),
    ("vllm", "--max-num-scheduled-tokens 1k", {"max_num_batched_tokens": 1000}),
    ("vllm", "--api-server-count 4", {"api_servers": 4}),
    (
        "vllm", "-dp 8 -ep --enable-eplb --eplb-config '{\"window_size\": 9}'",
        {"expert_placement": "eplb:load=none", "eplb_interval": 3000, "eplb_window": 9,
         "eplb_async": True},
    ),
    (
        "sglang", "--tp 8 --dp 8 --enable-dp-attention --enable-eplb",
        {"expert_placement": "eplb:load=none", "eplb_interval": 1000, "eplb_window": 1000,
         "eplb_async": False},
    ),
    ("sglang", "--max-total-tokens 20k", {"num_gpu_blocks_override": 1251}),
    ("sglang", "--pipeline-parallel-size 2", {"pipeline_parallel_size": 2}),
    ("sglang", "--tokenizer-worker-num 4", {"api_servers": 4}),
    ("sglang", "--disable-hybrid-swa-memory", {"disable_hybrid_kv_cache_manager": True}),
    ("trtllm", "--kv_cache_config.max_tokens 3200", {"num_gpu_blocks_override": 101}),
]  # fmt: skip


@on_each("engine, options, fields", MECHANISMS)
def test_what_a_field_can_say_is_a_field(engine, options, fields):
    config, told = read(options, engine=engine, topology="1C")
    assert {name: config.value(name) for name in fields} == fields
    assert told == ""


@on_each(
    "engine, options, allowed",
    [
        ("vllm", """--compilation-config '{"cudagraph_mode": "PIECEWISE"}'""", "FULL_DECODE_ONLY"),
        ("vllm", "--expert-placement-strategy round_robin", "--expert-placement"),
        ("vllm", "--max-num-queued-reqs 9", "--max-concurrency"),
        ("vllm", "--disable-sliding-window", "--disable-hybrid-kv-cache-manager"),
        ("vllm", "--scheduler-cls a.B", "--queue-order"),
        ("vllm", "--max-num-partial-prefills 2", "--long-prefill-token-threshold"),
        ("sglang", "--schedule-policy lpm", "--queue-order"),
        ("sglang", "--enable-priority-scheduling", "--queue-order"),
        ("sglang", "--max-prefill-tokens 4096", "--chunked-prefill-size 4096"),
        ("sglang", "--load-balance-method total_tokens", "--policy"),
        ("sglang", "--num-continuous-decode-steps 4", "--scheduler-recv-interval"),
        ("trtllm", "--max_beam_width 4", "1"),
    ],
)
def test_a_mechanism_that_is_not_simulated_is_refused_with_a_way_out(engine, options, allowed):
    with pytest.raises(InputError, match="engine_args.*allowed: .*" + allowed):
        read(options, engine=engine, topology="1C")


@on_each(
    "engine, options",
    [
        ("vllm", "-cc.cudagraph_mode=FULL --max-num-partial-prefills 1"),
        ("vllm", "--expert-placement-strategy linear --limit-mm-per-prompt.image 0"),
        ("vllm", "--eplb-config.step_interval 9"),
        ("sglang", "--schedule-policy fcfs --radix-eviction-policy lru --max-prefill-tokens 32768"),
        ("trtllm", "--max_beam_width 1"),
    ],
)  # fmt: skip
def test_the_usual_values_of_mechanisms_change_nothing(engine, options):
    config, told = read(options, engine=engine, topology="1C")
    assert config.replace(engine_args=None) == make_config({"engine": engine, "topology": "1C"})
    assert told.startswith("of the launch line, without effect on the answer:")


@on_each("engine", list(OPTIONS))
def test_every_option_of_a_parser_has_one_meaning(engine):
    """It is a field, refused, without effect, a choice of kernels, or may change the answer; a word
    of a name decides for no option that has a field or a mechanism."""
    kinds = {"refused": 0, "without effect": 0, "kernels timed as": 0, "may change": 0}
    for name in sorted(OPTIONS[engine] - NAMES[engine].keys() - {"config", "speculative_config"}):
        if name in ("optimization_level", "compilation_config", "eplb_config"):
            continue
        try:
            told = read(f"--{name.replace('_', '-')}=7", engine=engine, topology="1C")[1]
        except InputError as refused:
            told = f"refused: {refused}".replace("may change", "")
        found = [kind for kind in kinds if kind in told]
        assert len(found) == (told != ""), (name, told)  # none: the opposite of a field
        if found:
            kinds[found[0]] += 1
    assert min(kinds.values()) > 20
    assert kinds["may change"] < 130


@on_each(
    "engine, options",
    [
        ("vllm", "--attention-backend FLASHINFER"), ("vllm", "--disable-cascade-attn"),
        ("vllm", "--mamba-backend triton"), ("vllm", "--disable-custom-all-reduce"),
        ("sglang", "--attention-backend fa3"), ("sglang", "--enable-symm-mem"),
        ("sglang", "--fp8-gemm-runner-backend cutlass"), ("sglang", "--enable-torch-compile"),
        ("sglang", "--speculative-attention-mode decode"),
        ("sglang", "--enforce-disable-flashinfer-allreduce-fusion"),
    ],
)  # fmt: skip
def test_a_choice_of_kernels_is_named_as_one(engine, options):
    told = read(options, engine=engine, topology="1C")[1]
    name = options.split()[0].strip("-").replace("-", "_").removeprefix("disable_")
    assert told.startswith("of the launch line, kernels timed as those of the tables")
    assert name in told


@on_each(
    "options, wanted",
    [
        ("--performance-mode throughput", (2048, 16384)),
        ("--performance-mode throughput --max-num-seqs 64", (64, 16384)),
        ("--performance-mode balanced", (1024, 8192)),
        ("--performance-mode interactivity", (1024, 8192)),
    ],
)
def test_throughput_mode_doubles_what_the_line_does_not_give(options, wanted):
    config, told = read(f"vllm serve {MODEL} {options}")
    seats, tokens = (config.value(name) for name in ("max_num_seqs", "max_num_batched_tokens"))
    assert (seats or 1024, tokens or 8192) == wanted
    assert ("may change the answer: performance_mode" in told) == ("interactivity" in options)


def blocks_of(**fields):
    config = make_config({"topology": "1C", "model": "Llama-3.1-8B"} | fields)
    (pool,) = prepare(config).spec.pools
    return pool.engine.n_blocks


def test_bytes_and_tokens_of_the_kv_cache_bound_its_blocks():
    fit = blocks_of()
    half = blocks_of(kv_cache_memory_bytes=4 << 30)
    assert blocks_of(kv_cache_memory_bytes=8 << 30) == pytest.approx(2 * half, abs=1)
    assert half < fit
    with pytest.raises(InputError, match=r"kv_cache_memory_bytes: .*weights leave"):
        blocks_of(kv_cache_memory_bytes=80 << 30)
    roomy = {"engine": "sglang", "num_gpu_blocks_override": 10**9}
    assert blocks_of(**roomy) == blocks_of(engine="sglang")
    assert blocks_of(**roomy | {"num_gpu_blocks_override": 101}) == 100


@pytest.mark.parametrize("engine", ["vllm --api-server-count", "sglang --tokenizer-worker-num"])
def test_every_server_of_a_cluster_has_the_processes_of_its_line(engine):
    name, option = engine.split()
    fields = {"engine": name, "engine_args": f"{option} 3", "topology": "4C"}
    assert make_config(fields).front_end.api_servers == 12


def test_a_line_of_sglang_without_numbers_drafts_as_sglang_chooses():
    """A line without them drafted nothing, without a word."""

    def drafting(model, algorithm):
        line = f"python -m sglang.launch_server --model-path {model} --speculative-algo {algorithm}"
        found = read(line, num_requests=2)[0].steps.speculative_config
        return found.depth, found.eagle_topk, found.num_speculative_tokens + 1

    assert drafting(MODEL, "EAGLE3") == drafting(MODEL, "NEXTN") == (3, 1, 4)
    assert drafting("Llama-3.3-70B-Instruct", "EAGLE3") == (5, 4, 8)
    assert drafting("Llama-4-Scout-17B-16E-Instruct", "EAGLE3") == (3, 1, 4)
    line = f"python -m sglang.launch_server --model-path {MODEL} --speculative-num-steps 3"
    config, told = read(line)
    assert config.steps.speculative_config is None
    assert "without effect on the answer: speculative_num_steps" in told


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("--max-cudagraph-capture-size 2048", {"max_cudagraph_capture_size": 2048}),
        ("--max-cudagraph-capture-size 2K", {"max_cudagraph_capture_size": 2048}),
        (
            """--compilation-config '{"max_cudagraph_capture_size": 1024}'""",
            {"max_cudagraph_capture_size": 1024},
        ),
        ("--cudagraph-capture-sizes 1 2 4 256", {"max_cudagraph_capture_size": 256}),
        ("--cuda-graph-sizes 2048", {"max_cudagraph_capture_size": 2048}),
        (
            """--compilation-config '{"cudagraph_capture_sizes": [8, 992]}'""",
            {"max_cudagraph_capture_size": 992},
        ),
        (
            """--compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}'""",
            {"piecewise_cuda_graph": False},
        ),
        ("""--compilation-config '{"cudagraph_mode": "FULL_AND_PIECEWISE"}'""", {}),
    ],
)
def test_what_vllm_captures_is_read(line, fields):
    found = read(f"vllm serve {MODEL} {line}")[0].scheduler
    assert found.model_dump(exclude_none=True) == fields


@pytest.mark.parametrize(
    ("name", "short", "inner"),
    [
        ("compilation-config", "cc", {"cudagraph_mode": "NONE"}),
        ("compilation-config", "O", {"cudagraph_mode": "NONE"}),
        ("compilation-config", "O", {"max_cudagraph_capture_size": 64, "cudagraph_mode": "FULL"}),
        ("speculative-config", "sc", {"method": "ngram", "num_speculative_tokens": 2,
                                      "synthetic_acceptance_length": 1.5}),
        ("kv-transfer-config", "", {"kv_connector": "NixlConnector", "kv_role": "kv_both"}),
        ("kv-transfer-config", "", {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}),
    ],
)  # fmt: skip
def test_a_configuration_within_an_option_is_read_however_it_is_written(name, short, inner):
    """As JSON, or key by key after dots, under its long and its short name: the same run, or the
    same refusal."""
    found = []
    for head in (f"--{name}", f"--{name.replace('-', '_')}", f"-{short}")[: 3 if short else 2]:
        for text in (
            f"{head} '{json.dumps(inner)}'",
            " ".join(f"{head}.{key}={value}" for key, value in inner.items()),
            " ".join(f"{head}.{key} {value}" for key, value in inner.items()),
        ):
            try:
                config, said = read(f"vllm serve {MODEL} {text}")
            except InputError as error:
                found.append(str(error))
            else:
                found.append((config.model_dump(exclude={"engine_args"}), said))
    assert all(each == found[0] for each in found), found


def test_capture_sizes_are_numbers():
    with pytest.raises(InputError, match="cuda-graph-sizes"):
        read(f"vllm serve {MODEL} --cuda-graph-sizes all")
