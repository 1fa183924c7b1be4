"""Manifests of deployments become the clusters that they launch."""

from importlib.metadata import version

import pytest

from eldr_sim.errors import InputError
from eldr_sim.planning.launch.files import launch_files
from eldr_sim.planning.launch.manifest import read_manifest
from eldr_sim.simulator.setup.config.run_config import make_config

from ..on_each import on_each

PRODUCTION_STACK = """
servingEngineSpec:
  runtimeClassName: ""
  modelSpec:
  - name: llama
    repository: vllm/vllm-openai
    modelURL: meta-llama/Llama-3.1-8B-Instruct
    replicaCount: 3
    requestGPU: 2
    vllmConfig:
      tensorParallelSize: 2
      maxModelLen: 8192
      enablePrefixCaching: false
      gpuMemoryUtilization: 0.8
      extraArgs: ["--max-num-seqs", "64", "--disable-log-requests", "--seed=3"]
    lmcacheConfig: {enabled: true, cpuOffloadingBufferSize: "30"}
routerSpec: {routingLogic: roundrobin}
"""
LLM_D = """
modelArtifacts: {name: Qwen/Qwen3-32B, uri: "hf://Qwen/Qwen3-32B", size: 80Gi}
routing: {servicePort: 8000}
decode:
  replicas: 2
  parallelism: {tensor: 4, data: 1}
  containers:
  - name: vllm
    modelCommand: vllmServe
    args: ["--block-size", "64", "--kv-transfer-config",
    '{"kv_connector":"NixlConnector","kv_role":"kv_both"}']
prefill:
  create: true
  replicas: 6
  parallelism: {tensor: 1}
  containers:
  - name: vllm
    modelCommand: vllmServe
    args: ["--block-size", "64", "--max-num-batched-tokens", "16384"]
"""
DYNAMO = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: disagg}
spec:
  backendFramework: vllm
  services:
    Frontend:
      componentType: frontend
      replicas: 1
      extraPodSpec: {mainContainer: {image: x, args: ["-m", "dynamo.frontend", "--router-mode",
      "kv"]}}
    VllmDecodeWorker:
      componentType: worker
      replicas: 2
      resources: {limits: {gpu: "1"}}
      extraPodSpec:
        mainContainer:
          command: ["/bin/sh", "-c"]
          args:
          - python3 -m dynamo.vllm --model Qwen/Qwen3-30B-A3B --max-num-seqs 128 2>&1 | tee log
    VllmPrefillWorker:
      componentType: worker
      replicas: 1
      resources: {limits: {gpu: "1"}}
      extraPodSpec:
        mainContainer:
          command: [python3, -m, dynamo.vllm]
          args: [--model, Qwen/Qwen3-30B-A3B, --is-prefill-worker]
---
apiVersion: v1
kind: ConfigMap
"""
COMPOSE = """
services:
  web: {image: nginx}
  engine:
    image: lmsysorg/sglang:latest
    command: >
      python3 -m sglang.launch_server --model-path ${MODEL:-Qwen/Qwen3-30B-A3B} --tp-size 2
      --page-size 32 --host 0.0.0.0 --port 30000 --nonsense-option 3
    deploy:
      replicas: 2
      resources: {reservations: {devices: [{driver: nvidia, count: 2, capabilities: [gpu]}]}}
"""


def read(tmp_path, text):
    path = tmp_path / "manifest.yaml"
    path.write_text(text)
    return read_manifest(path)


def test_production_stack(tmp_path):
    found = read(tmp_path, PRODUCTION_STACK)
    config = make_config(found.values)
    assert config.cluster.topology == "3C"
    assert config.engine.model == "Llama-3.1-8B"
    assert config.n_gpus == 6
    for name, value in (("max_model_len", 8192), ("max_num_seqs", 64), ("policy", "round_robin"),
                        ("enable_prefix_caching", False), ("gpu_memory_utilization",
                        0.8)):  # fmt: skip
        assert config.value(name) == value
    said = "\n".join(found.lines())
    assert "lmcacheConfig" in said
    assert "3 x vllm (serve)" in said


def test_production_stack_with_prefill_and_decode_apart(tmp_path):
    one = """
  - {{name: {0}, modelURL: Qwen/Qwen3-8B, replicaCount: {1}, requestGPU: 0.5,
     lmcacheConfig: {{enabled: true, kvRole: kv_{0}}}, nodeSelector: {{gpu: NVIDIA-H200}}}}"""
    text = (
        "servingEngineSpec:\n  modelSpec:" + one.format("producer", 1) + one.format("consumer", 3)
    )
    found = read(tmp_path, text)
    config = make_config(found.values)
    assert config.cluster.topology == "1P3D"
    assert config.cluster.gpu == "H200"
    assert any("requestGPU 0.5" in text for text in found.left_out)


def test_llm_d(tmp_path):
    config = make_config(read(tmp_path, LLM_D).values)
    assert config.cluster.topology == "6P2D"
    assert [pool.parallelism.tensor_parallel_size for pool in config.pools] == [1, 4]
    assert config.engine.block_size == 64
    assert config.engine.model == "Qwen3-32B"


def test_dynamo(tmp_path):
    found = read(tmp_path, DYNAMO)
    config = make_config(found.values)
    assert config.cluster.topology == "1P2D"
    assert config.engine.model == "Qwen3-30B-A3B"
    assert config.pools[1].max_num_seqs == 128
    assert any("routing kv" in text for text in found.left_out)


def test_values_that_helm_takes_from_others(tmp_path):
    """llm-d's published values say ``uri: hf://"{{ .Values.modelArtifacts.name }}"``."""
    model = 'modelArtifacts: {name: Qwen/Qwen3-32B, uri: "hf://Qwen/Qwen3-32B", size: 80Gi}'
    assert model in LLM_D
    values = """
modelArtifacts:
  id: Qwen/Qwen3-32B
  uri: hf://"{{ .Values.modelArtifacts.id }}"
"""
    found = read(tmp_path, LLM_D.replace(model, values))
    assert found.values == read(tmp_path, LLM_D).values
    elsewhere = read(tmp_path, LLM_D.replace(model, values.replace(".id }}", ".other }}")))
    assert "model" not in elsewhere.values
    assert any(".Values.modelArtifacts.other" in line for line in elsewhere.left_out)


def test_variables_of_a_container(tmp_path):
    variables = "[{name: MODEL, value: Qwen/Qwen3-30B-A3B}, {name: IP, valueFrom: {}}]"
    text = f"""
kind: DynamoGraphDeployment
spec:
  components:
  - name: Frontend
    type: frontend
    podTemplate:
      spec: {{containers: [{{env: [{{name: DYN_ROUTER_MODE, value: round-robin}}]}}]}}
  - name: Worker
    type: worker
    replicas: 3
    podTemplate:
      spec:
        containers:
        - command: [python3]
          args: [-m, dynamo.vllm, --model, $(MODEL), --max-num-seqs, $(SEQS), --block-size, "32"]
          env: {variables}
"""
    found = read(tmp_path, text)
    assert found.values["model"] == "Qwen3-30B-A3B"
    assert (found.values["topology"], found.values["block_size"]) == ("3C", 32)
    assert found.policy == "round_robin"
    assert "Worker: --max-num-seqs $(SEQS) (a variable)" in found.left_out
    unknown = read(tmp_path, text.replace(variables, "[]"))
    assert "model" not in unknown.values
    assert any("$(MODEL) (a variable)" in line for line in unknown.left_out)


def test_an_engine_over_a_ray_cluster(tmp_path):
    text = """
servingEngineSpec:
  modelSpec:
  - name: wide
    modelURL: Qwen/Qwen3-32B
    replicaCount: 3
    requestGPU: 2
    vllmConfig: {tensorParallelSize: 2, pipelineParallelSize: 4}
    raySpec: {enabled: true, headNode: {requestGPU: 2}}
"""
    found = read(tmp_path, text)
    config = make_config(found.values)
    assert (config.cluster.topology, config.n_gpus) == ("1C", 8)
    assert not any("asks for" in line for line in found.left_out)


def test_compose(tmp_path):
    found = read(tmp_path, COMPOSE)
    config = make_config(found.values)
    assert (config.cluster.topology, config.engine.engine) == ("2C", "sglang")
    assert (config.engine.block_size, config.n_gpus) == (32, 4)
    assert any("nonsense" in text for text in found.left_out)
    assert any("service web" in text for text in found.left_out)


@on_each("fields", [
        {"topology": "3C", "tensor_parallel_size": 2},
        {"topology": "2P3D", "max_num_seqs": 96, "policy": "jsq"},
        {"topology": "2P1D", "decode": {"tensor_parallel_size": 4, "max_num_seqs": 64},
         "block_size": 32, "gpu_memory_utilization": 0.8},
        {"topology": "1P1D", "decode": {"data_parallel_size": 8, "enable_expert_parallel": True},
         "enable_prefix_caching": False},
        {"topology": "1C", "data_parallel_size": 16, "enable_expert_parallel": True,
         "all2all_backend": "deepep_ll"},
    ])  # fmt: skip
@on_each("name", ["llm-d-values.yaml", "dynamo.yaml"])
def test_what_plan_emits_is_read_as_what_was_planned(tmp_path, fields, name):
    config = make_config({"model": "Qwen3-30B-A3B", "num_requests": 50, "request_rate": 5} | fields)
    text = launch_files(config, version("eldr-sim"), (500.0, 100.0, 5.0))[name]
    found = make_config(
        read(tmp_path, text).values | {"num_requests": 50, "request_rate": 5}
        | {key: config.value(key) for key in ("policy", "prefill_policy")}
    )  # fmt: skip
    assert found.cluster.topology == config.cluster.topology
    assert found.engine.model == config.engine.model
    assert found.n_gpus == config.n_gpus
    for was, now in zip(config.pools, found.pools, strict=True):
        assert now.parallelism == was.parallelism
        assert now.workers == was.workers
    for key in ("block_size", "enable_prefix_caching"):
        assert found.value(key) == config.value(key)
    again = launch_files(found, version("eldr-sim"), (500.0, 100.0, 5.0))[name]
    assert [line for line in again.splitlines() if not line.startswith("#")] == [
        line for line in text.splitlines() if not line.startswith("#")
    ]


@on_each(
    "text, said",
    [
        ("a: 1", "not a known kind of deployment file"),
        ("x: {{ .Values.y }}", "Helm template"),
        ("services: {web: {image: nginx}}", "has no engine"),
        ("services: {a: {image: vllm, command: '--model x', scale: many}}", "replicas is 'many'"),
        (LLM_D.replace('"64", "--max', '"32", "--max'), "block_size is "),
        (LLM_D.replace("replicas: 2", "replicas: 0"), "engines of prefill"),
        ("servingEngineSpec: 3", "servingEngineSpec is not a mapping"),
        ("servingEngineSpec: {modelSpec: {a: 1}}", "modelSpec is not a list"),
        ("kind: DynamoGraphDeployment", "has no engine"),
        ("- a", "not a known kind of deployment file"),
        ("a: [", "not YAML"),
    ],
)
def test_what_is_none_is_one_line(tmp_path, text, said):
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@on_each(
    "image, engine",
    [
        ("vllm/vllm-openai:v0.14", "vllm"), ("lmsysorg/sglang:v0.5.9", "sglang"),
        ("nvcr.io/nvidia/tensorrt-llm/release:1.2", "trtllm"), ("me/trtllm:1", "trtllm"),
    ],
)  # fmt: skip
def test_an_image_names_the_engine_of_options_alone(image, engine, tmp_path):
    service = f"{{image: '{image}', command: '--model Qwen/Qwen3-30B-A3B'}}"
    assert read(tmp_path, f"services: {{a: {service}}}").values["engine"] == engine


def test_the_command_says_what_it_has_read(tmp_path, run_cli):
    path = tmp_path / "compose.yaml"
    path.write_text(COMPOSE)
    options = [
        "--trace",
        "reference-moe",
        "--num-prompts",
        "4",
        "--output-len",
        "3",
        "--warmup",
        "0",
    ]
    code, _, error = run_cli("run", "--from-manifest", str(path), *options)
    assert code == 0, error
    assert "Read of docker compose: engine: 2 x sglang (serve)" in error
    assert "Left out of docker compose: service web" in error
    assert run_cli("run", "--from-manifest", str(path), "--config", str(path))[0] == 2
