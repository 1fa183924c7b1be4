"""Launch files: they parse, their options exist, and they use the GPUs that were planned."""

import json
import re
import shlex
from dataclasses import replace

import pytest
import yaml

from eldr_sim.errors import InputError
from eldr_sim.planning.launch.files import launch_files, write_launch_files
from eldr_sim.simulator.setup import run_routing
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.traces.routing.synthetic.drawn import drawn_trace

from ..on_each import on_each

#: Options that these versions have, of those that may be written.
VLLM = [
    "tensor-parallel-size",
    "data-parallel-size",
    "data-parallel-size-local",
    "data-parallel-start-rank",
    "data-parallel-hybrid-lb",
    "data-parallel-address",
    "data-parallel-rpc-port",
    "all2all-backend",
    "enable-expert-parallel",
    "enable-eplb",
    "eplb-config",
    "max-num-seqs",
    "max-num-batched-tokens",
    "block-size",
    "gpu-memory-utilization",
    "kv-cache-dtype",
    "no-enable-prefix-caching",
    "speculative-config",
    "kv-transfer-config",
    "port",
]  # vLLM 0.32.0, engine/arg_utils.py
VLLM_BACKENDS = ("allgather_reducescatter", "deepep_low_latency", "deepep_high_throughput")
SGLANG = [
    "model-path",
    "port",
    "tp-size",
    "attn-dp-size",
    "ep-size",
    "moe-a2a-backend",
    "deepep-mode",
    "nnodes",
    "node-rank",
    "dist-init-addr",
    "ep-num-redundant-experts",
    "enable-eplb",
    "max-running-requests",
    "chunked-prefill-size",
    "page-size",
    "mem-fraction-static",
    "kv-cache-dtype",
    "disable-radix-cache",
    "speculative-algorithm",
    "speculative-num-steps",
    "speculative-eagle-topk",
    "speculative-num-draft-tokens",
    "disaggregation-mode",
    "disaggregation-transfer-backend",
]  # SGLang 0.5.23, arg_groups/fields
TRTLLM = [
    "backend",
    "tensor_parallel_size",
    "moe_expert_parallel_size",
    "moe_tensor_parallel_size",
    "enable_attention_dp",
    "max_batch_size",
    "max_num_tokens",
    "max_seq_len",
    "enable_chunked_prefill",
    "kv_cache_config",
    "cache_transceiver_config",
    "disable_overlap_scheduler",
    "moe_config",
    "speculative_config",
]
#: What llm-d-modelservice 0.4.12 takes, of its values.schema.json (commit 3051935e): names and
#: types, a set where few values are allowed, `...` where others may stand, `!` what must be there.
LLM_D_POOL = {
    "create": bool, "replicas": int, "containers": [dict], "volumes": [dict], "autoscaling": dict,
    "parallelism": {"data": int, "dataLocal": int, "tensor": int, "workers": int}, ...: None,
}  # fmt: skip
LLM_D = {
    "modelArtifacts": {
        "name": str, "uri": re.compile("(hf|pvc)://.*"), "authSecretName": str, "labels": dict,
        "mountPath": str, "readOnly": bool, "size": str,
    },
    "multinode": bool,
    "accelerator": {"type": {"nvidia", "amd"}, "env": dict, "resources": dict},
    "routing": {
        "servicePort": int,
        "proxy": {"enabled": bool, "targetPort": int, "connector": str, ...: None},
    },
    "prefill": LLM_D_POOL, "decode": LLM_D_POOL, "common": dict, "extraObjects": list,
    "fullnameOverride": str, "serviceAccountOverride": str, "tracing": dict,
}  # fmt: skip
#: What Dynamo's operator takes as v1beta1: api/v1beta1/dynamo{graph,component}deployment_types.go
#: (commits 0fddc01b, 006b6e10), from which its CRD is made, and Kubernetes' container.
QUANTITIES = {"nvidia.com/gpu": re.compile("[1-9][0-9]*"), "cpu": str, "memory": str}
CONTAINER = {
    "name!": str, "image!": str, "command": [str], "args": [str], "env": [dict],
    "resources": {"limits": QUANTITIES, "requests": QUANTITIES},
}  # fmt: skip
COMPONENT = {
    "name!": re.compile("(?=.{1,63}$)[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?"),
    "type": {"frontend", "worker", "prefill", "decode"},
    "replicas": int, "minAvailable": int, "multinode": {"nodeCount!": int},
    "podTemplate!": {"metadata": dict, "spec!": {"containers!": [CONTAINER], ...: None}},
    "runtimeVersionOverride": str, "sharedMemorySize": str, "modelRef": dict,
    "scalingAdapter": dict, "compilationCache": dict, "topologyConstraint": dict,
}  # fmt: skip
DYNAMO = {
    "apiVersion!": {"nvidia.com/v1beta1"}, "kind!": {"DynamoGraphDeployment"},
    "metadata!": {"name!": str, ...: None},
    "spec!": {
        "backendFramework": {"vllm", "sglang", "trtllm"}, "components": [COMPONENT],
        "annotations": dict, "labels": dict, "env": [dict], "topologyConstraint": dict,
    },
}  # fmt: skip
WIDE = {
    "model": "Qwen3-235B-A22B", "gpu": "H200", "topology": "2P1D", "data_parallel_size": 16,
    "enable_expert_parallel": True, "all2all_backend": "deepep_ll", "goodput": {"tpot": 50},
    "num_redundant_experts": 16,
    "prefill": {"data_parallel_size": 8, "all2all_backend": "deepep_ht",
                "num_redundant_experts": 0},
}  # fmt: skip
PLAIN = {"topology": "3C", "tensor_parallel_size": 2, "goodput": {"ttft": 500, "tpot": 30}}
DRAFTS = {
    "topology": "1P1D", "tensor_parallel_size": 8, "kv_cache_dtype": "fp8",
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 2,
                           "synthetic_acceptance_length": 1.3},
}  # fmt: skip
CONFIGS = {"wide": WIDE, "plain": PLAIN, "drafts": DRAFTS}
#: The answers to the five questions of studies/advice.
H200 = {"gpu": "H200", "goodput": {"ttft": 2000, "tpot": 50}}
ADVICE = {
    "Llama": {"model": "Llama-3.1-70B-FP8", "topology": "2P1D", "tensor_parallel_size": 4,
              "prefill": {"tensor_parallel_size": 2}},
    "gpt-oss": {"model": "gpt-oss-120b", "topology": "2C", "tensor_parallel_size": 4,
                "enable_expert_parallel": True},
    "Qwen3-32B": {"model": "Qwen3-32B", "gpu": "H100", "topology": "1C", "tensor_parallel_size": 4},
    "Qwen3-235B": {"model": "Qwen3-235B-A22B-FP8", "topology": "2P3D", "data_parallel_size": 4,
                   "enable_expert_parallel": True,
                   "prefill": {"tensor_parallel_size": 2, "data_parallel_size": 1}},
    "R1": {"model": "DeepSeek-R1", "engine": "sglang", "topology": "2P1D",
           "data_parallel_size": 16, "enable_expert_parallel": True,
           "prefill": {"tensor_parallel_size": 8, "data_parallel_size": 1}},
}  # fmt: skip
GPUS = {"wide": 32, "plain": 6, "drafts": 16, "Llama": 8, "gpt-oss": 8, "Qwen3-32B": 4}
GPUS |= {"Qwen3-235B": 16, "R1": 32}
LAUNCHED = CONFIGS | {name: H200 | own for name, own in ADVICE.items()}


@pytest.fixture(params=LAUNCHED, scope="module")
def made(request):
    config = make_config({"request_rate": 20, "policy": "jsq"} | LAUNCHED[request.param])
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "R1":  # the embedded trace has half of its experts
            patch.setattr(run_routing, "drawn_trace", one_layer)
        return request.param, config, launch_files(config, "1", (1000.0, 300.0, 20.0))


def one_layer(model, shape, domains, band):
    return drawn_trace(model, replace(shape, n_layers=1), domains, band=band)


def commands(script):
    """The words of each role's command."""
    found = {}
    for role, body in re.findall(r"^(\w+)\)\n  exec (.*?)\n  ;;", script, re.M | re.S):
        found[role] = shlex.split(body.replace("\\\n", " "))
    return found


def options(words):
    """Values by option."""
    named, last = {}, None
    for word in words:
        if word.startswith("--"):
            named[last := word[2:]] = []
        elif last is not None:
            named[last].append(word)
    return named


@pytest.mark.long
@on_each("name, known", [("vllm.sh", VLLM), ("sglang.sh", SGLANG)])
def test_options_exist_and_gpus_are_those_of_the_plan(made, name, known):
    kind, config, files = made
    total = 0
    text = files[name]
    for role, words in commands(text).items():
        named = options(words)
        assert set(named) <= set(known)
        workers = int(re.search(rf"# {role}: (\d+) worker", text)[1])
        size = int(named.get("tensor-parallel-size", named.get("tp-size"))[0])
        total += workers * size * int(named.get("data-parallel-size", ["1"])[0])
        if "all2all-backend" in named:
            assert named["all2all-backend"][0] in VLLM_BACKENDS
        for option in ("kv-transfer-config", "eplb-config", "speculative-config"):
            if option in named:
                assert json.loads(named[option][0])
    assert total == GPUS[kind] == config.n_gpus
    assert f"total: {total} GPUs" in text


def test_wide_groups_are_launched_node_by_node(made):
    kind, _, files = made
    if kind != "wide":
        return
    words = options(commands(files["vllm.sh"])["decode"])
    assert words["data-parallel-size-local"] == ["8"]
    assert words["data-parallel-start-rank"] == ["$((8*node))"]
    assert json.loads(words["eplb-config"][0]) == {"num_redundant_experts": 16}
    words = options(commands(files["sglang.sh"])["decode"])
    assert (words["nnodes"], words["attn-dp-size"], words["ep-size"]) == (["2"], ["16"], ["16"])


def test_tensorrt_llm_has_its_keys(made):
    kind, config, files = made
    if not config.cluster.n_prefill:
        return
    if kind == "drafts":
        assert "no mapped speculative method ngram" in files["trtllm.txt"]
        return
    total = 0
    for role in ("prefill", "decode"):
        worker = yaml.safe_load(files[f"trtllm/{role}.yaml"])
        assert set(worker) <= set(TRTLLM)
        size = worker["tensor_parallel_size"]
        assert worker["moe_expert_parallel_size"] * worker["moe_tensor_parallel_size"] == size
        side = {"prefill": "context", "decode": "generation"}[role]
        servers = yaml.safe_load(files["trtllm/disagg.yaml"])[f"{side}_servers"]
        assert len(servers["urls"]) == servers["num_instances"]
        total += size * servers["num_instances"]
    assert total == GPUS[kind]


READ = (
    "tensor_parallel_size", "data_parallel_size", "enable_expert_parallel", "max_num_seqs",
    "max_num_batched_tokens", "block_size", "gpu_memory_utilization", "kv_cache_dtype",
    "enable_prefix_caching",
)  # fmt: skip


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.filterwarnings("ignore:not simulated of the launch line")
def test_what_is_launched_is_what_was_simulated(kind, engine, tmp_path):
    """The launch lines, read again as launch lines: the same engines."""
    given = {"request_rate": 20, "policy": "jsq", "engine": engine, "speculative_config": None}
    if engine == "trtllm" and kind == "drafts":
        given["tensor_parallel_size"] = 4
    config = make_config(CONFIGS[kind] | given)
    files, prepared = launch_files(config, "1", (1000.0, 300.0, 20.0)), prepare(config)
    for pool in config.pools:
        role = ("decode" if pool.decodes else "prefill") if config.cluster.n_prefill else "serve"
        name = "decode" if pool.decodes else "prefill"
        if engine == "trtllm":
            file = tmp_path / "options.yaml"
            file.write_text(files[f"trtllm/{role}.yaml"])
            line = {"extra_llm_api_options": str(file)}
        else:
            words = commands(files[f"{engine}.sh"])[role]
            line = {"engine_args": shlex.join(word for word in words if "$" not in word)}
        read = make_config(
            {"engine": engine, "model": config.engine.model, "gpu": config.cluster.gpu} | line
        )
        own = prepared.spec.pools[config.pools.index(pool)].engine
        known = {field: getattr(config.pool(name), field, config.value(field))
                 for field in READ}  # fmt: skip
        known |= {"max_num_seqs": own.max_num_seqs, "gpu_memory_utilization": own.memory_share}
        known["max_num_batched_tokens"] = own.max_num_batched_tokens
        if own.parallelism.n_gpus == 1 or engine == "sglang":
            known["enable_expert_parallel"] = own.parallelism.expert_parallel
        assert {field: read.value(field) for field in READ} == known, role


def test_other_engines_have_their_own_share_of_the_memory():
    """vLLM's share is of all memory, SGLang's of weights and KV cache, TensorRT-LLM's of the rest;
    a request may be as long as it was simulated to be at most, and its prompt comes in chunks."""
    config = make_config({"request_rate": 20, "policy": "jsq", "max_model_len": 9000} | PLAIN)
    files = launch_files(config, "1", (1000.0, 300.0, 20.0))
    assert "gpu-memory-utilization" in files["vllm.sh"]
    assert "mem-fraction-static" not in files["sglang.sh"]
    worker = yaml.safe_load(files["trtllm/serve.yaml"])
    assert "free_gpu_memory_fraction" not in worker["kv_cache_config"]
    assert worker["max_seq_len"] == 9000
    assert worker["enable_chunked_prefill"] is True
    tiers = ("host:1GB,load=20GB/s",)
    files = launch_files(config.replace(kv_tier=tiers), "1", (1000.0, 300.0, 20.0))
    assert f"# simulated, not launched: kv_tier {tiers}" in files["vllm.sh"]


def keeps(value, schema, where="file"):
    """Whether a value is as a schema says, see `LLM_D`; raises where it is not."""
    match schema:
        case dict():
            named = {str(key).rstrip("!"): each for key, each in schema.items()}
            needed = {str(key)[:-1] for key in schema if str(key).endswith("!")}
            assert ... in schema or set(value) <= set(named), (where, value)
            assert needed <= set(value), (where, needed)
            for key in set(value) & set(named):
                keeps(value[key], named[key], f"{where}.{key}")
        case list():
            assert isinstance(value, list), where
            for each in value:
                keeps(each, schema[0], f"{where}[]")
        case set():
            assert value in schema, (where, value)
        case re.Pattern():
            assert schema.fullmatch(value), (where, value)
        case _:
            assert type(value) is schema, (where, value)


def test_a_schema_refuses_what_it_does_not_know():
    values = {
        "modelArtifacts": {"name": "m", "uri": "hf://m"},
        "decode": {"replicas": 1, "more": 2},
    }
    keeps(values, LLM_D)
    for wrong in ({"more": 1}, {"multinode": "yes"}, {"decode": {"parallelism": {"pipe": 1}}}):
        with pytest.raises(AssertionError):
            keeps(values | wrong, LLM_D)
    with pytest.raises(AssertionError):
        keeps({"name": "Decode_1", "podTemplate": {"spec": {"containers": []}}}, COMPONENT)


def test_kubernetes_files_keep_their_schemas(made):
    """Names and types of llm-d's and Dynamo's schemas, and the rules that those cannot say."""
    kind, _, files = made
    values = yaml.safe_load(files["llm-d-values.yaml"])
    keeps(values, LLM_D)
    total = 0
    for role in ("prefill", "decode"):
        if values[role]["create"]:
            (container,) = values[role]["containers"]
            assert container["modelCommand"] in ("vllmServe", "imageDefault", "custom")
            gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
            split = values[role]["parallelism"]
            assert split["dataLocal"] * split["workers"] == split["data"]
            assert split["dataLocal"] * split["tensor"] == gpus
            total += values[role]["replicas"] * split["workers"] * gpus
    assert total == GPUS[kind]

    graph = yaml.safe_load(files["dynamo.yaml"])
    keeps(graph, DYNAMO)
    names = [each["name"].lower() for each in graph["spec"]["components"]]
    assert len(set(names)) == len(names) <= 25
    total = 0
    for each in graph["spec"]["components"]:
        (container,) = each["podTemplate"]["spec"]["containers"]
        assert container["name"] == "main"
        if each["type"] == "frontend":
            assert each["replicas"] == 1
            continue
        nodes = each.get("multinode", {"nodeCount": 1})["nodeCount"]
        assert nodes >= 2 or "multinode" not in each
        gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
        total += each["replicas"] * nodes * gpus
        if each["type"] == "prefill":
            assert "--kv-transfer-config" in container["args"]
    assert total == GPUS[kind]


def test_the_benchmark_asks_for_the_objective(made):
    kind, _, files = made
    words = options(shlex.split(files["bench.sh"].split("exec ")[1].replace("\\\n", " ")))
    assert words["request-rate"] == ["20"]
    if kind == "plain":
        assert words["goodput"] == ["ttft:500", "tpot:30"]


def test_the_benchmark_has_the_prefixes_of_the_load():
    def bench(**changes):
        config = make_config({"request_rate": 20, "policy": "jsq"} | PLAIN | changes)
        text = launch_files(config, "1", (1000.0, 300.0, 20.0))["bench.sh"]
        return options(shlex.split(text.split("exec ")[1].replace("\\\n", " ")))

    assert bench()["random-input-len"] == ["1000"]
    words = bench(prefix_len=600, input_len=400)
    assert (words["random-input-len"], words["random-prefix-len"]) == (["400"], ["600"])
    words = bench(prefix_len=600, input_len=400, num_prefixes=5)
    assert words["dataset-name"] == ["prefix_repetition"]
    assert words["prefix-repetition-num-prefixes"] == ["5"]
    assert words["prefix-repetition-suffix-len"] == ["400"]


def test_blocks_of_vllm_are_as_large_as_its_kernels_need(monkeypatch):
    monkeypatch.setattr(run_routing, "drawn_trace", one_layer)
    config = make_config({
        "model": "DeepSeek-V4-Flash", "gpu": "B200", "topology": "1C", "tensor_parallel_size": 2,
        "request_rate": 20,
    })  # fmt: skip
    files = launch_files(config, "1", (1000.0, 300.0, 20.0))
    assert "--block-size 256" in files["vllm.sh"]
    assert "--page-size 16" in files["sglang.sh"]


def test_what_an_engine_cannot_do_is_said():
    config = make_config(
        WIDE | {"all2all_backend": "nccl_alltoall", "prefill": {}, "request_rate": 1}
    )
    files = launch_files(config, "1", (100.0, 10.0, 1.0))
    assert "vLLM 0.32.0 has no all-to-all backend nccl_alltoall" in files["vllm.sh.txt"]
    assert "vllm.sh" not in files
    with pytest.raises(InputError, match="emit"):
        launch_files(make_config({"topology": "2P"}), "1", (100.0, 1.0, 1.0))


def test_experts_on_gpus_of_their_own_are_not_launched(run_cli, tmp_path):
    own = {"topology": "2P4A4F", "trace": "reference-moe"}
    with pytest.raises(InputError, match="separate FFN GPUs of 2P4A4F are not launched"):
        launch_files(make_config(own), "1", (100.0, 1.0, 1.0))
    words = ["plan", "--topology", "2P4A4F", "--slo", "tpot:30", "--emit", tmp_path / "files"]
    code, _, err = run_cli(*words)
    assert (code, "emit: 2P4A4F has no launch files" in err) == (2, True)
    asked = ["plan", "--request-rate", 20, "--slo", "tpot:30", "--dp", 4, "--ffn-ranks", "0,4"]
    code, _, err = run_cli(*asked, "--emit", tmp_path / "files")
    said = "emit: decode workers with separate FFN GPUs are not launched"
    assert (code, err.count("\n"), said in err) == (2, 1, True)  # before anything is simulated


def test_files_are_written_whole(tmp_path):
    config = make_config({"request_rate": 20, "policy": "jsq"} | PLAIN)
    files = launch_files(config, "1", (1000.0, 300.0, 20.0))
    write_launch_files(files, tmp_path / "launch")
    assert (tmp_path / "launch" / "vllm.sh").stat().st_mode & 0o100
    with pytest.raises(InputError, match="exists"):
        write_launch_files(files, tmp_path / "launch")


def test_a_plan_writes_what_launches_its_answer(run_cli, tmp_path):
    code, out, err = run_cli(
        "plan", "--slo", "ttft:500,tpot:50", "--request-rate", 20, "--policy", "jsq", "-tp", 1,
        "--max-gpus", 3, "--duration", 6, "--warmup", 1, "--output-len", 16, "--seeds", 2,
        "--attainment", 0.9, "--jobs", 1, "--trace", "reference-moe", "--emit", tmp_path / "run",
    )  # fmt: skip
    assert code == 0, err
    assert f"Wrote {tmp_path / 'run'}" in out
    bench = (tmp_path / "run" / "bench.sh").read_text()
    assert "--random-output-len 16" in bench
    assert "--request-rate 20 " in bench
    gpus = int(re.search(r"total: (\d+) GPUs", bench)[1])
    assert f", {gpus} GPU" in next(line for line in out.splitlines() if line.startswith("Answer"))
