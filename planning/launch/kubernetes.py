"""Helm values of llm-d and a DynamoGraphDeployment for the pools of a deployment.

Sources: llm-d-modelservice ``values.schema.json``; Dynamo 1.6 operator ``api/v1beta1`` and
``examples/backends/vllm/deploy/v1beta1``. Under ``multinode`` Dynamo's operator adds which node
runs which engine.
"""

from typing import Any

import yaml

from eldr_sim.planning.launch.deployment import REPLACE, Deployment, Role
from eldr_sim.planning.launch.engines import vllm_arguments

LLM_D, DYNAMO = "llm-d modelservice, vLLM 0.32.0", "Dynamo 1.6.1, vLLM 0.32.0"
#: llm-d's scorers that do what a decode policy does.
_SCORERS = {"jsq": "queue-scorer"}
_PARALLEL = ("--tensor-parallel-size", "--data-parallel-size")


def _gpus(role: Role) -> dict[str, Any]:
    return {"limits": {"nvidia.com/gpu": str(min(role.gpus, role.gpus_per_node))}}


def _without(arguments: list[str], options: tuple[str, ...]) -> list[str]:
    """Return arguments without some options and their values."""
    left: list[str] = []
    skipped = False
    for word in arguments:
        if word in options:
            skipped = True
        elif skipped:
            skipped = False
        else:
            left.append(word)
    return left


def llm_d_values(deployment: Deployment) -> str:
    """Return Helm values for llm-d's modelservice chart, with the settings of its router."""
    values: dict[str, Any] = {
        "modelArtifacts": {"name": deployment.config.model, "uri": f"hf://{REPLACE}"},
        "multinode": any(role.nodes > 1 for role in deployment.roles),
        "accelerator": {"type": "nvidia"},
        "routing": {
            "servicePort": 8000,
            "proxy": {"enabled": deployment.apart, "targetPort": 8200, "connector": "nixlv2"},
        },
        "prefill": {"create": False},
    }
    for role in deployment.roles:
        arguments = vllm_arguments(role, deployment.apart, spread=False)
        values["prefill" if role.name == "prefill" else "decode"] = {
            "create": True,
            "replicas": role.workers,
            "parallelism": {
                "tensor": role.tensor_parallel_size,
                "data": role.data_parallel_size,
                "dataLocal": role.local_engines,
                "workers": role.nodes,
            },
            "containers": [
                {
                    "name": "vllm",
                    "image": REPLACE,
                    "modelCommand": "vllmServe",
                    "args": _without(arguments, _PARALLEL),
                    "resources": _gpus(role),
                    "mountModelVolume": True,
                }
            ],
        }
    policy = deployment.config.policy
    scorer = _SCORERS.get(policy)
    said = f"# decode policy {policy}: plugin {scorer} of the EndpointPickerConfig\n"
    if scorer is None:
        said = f"# simulated, not launched: llm-d has no scorer like {policy}; see router.sh\n"
    return deployment.comment(LLM_D) + said + yaml.safe_dump(values, sort_keys=False)


def dynamo_graph(deployment: Deployment) -> str:
    """Return a DynamoGraphDeployment, ``nvidia.com/v1beta1``."""

    def pod(container: dict[str, Any]) -> dict[str, Any]:
        return {"spec": {"containers": [{"name": "main", "image": REPLACE, **container}]}}

    frontend = {
        "command": ["python3"],
        "args": ["-m", "dynamo.frontend", "--router-mode", "least-loaded"],
    }
    components: list[dict[str, Any]] = [
        {"name": "Frontend", "type": "frontend", "replicas": 1, "podTemplate": pod(frontend)}
    ]
    for role in deployment.roles:
        arguments = ["--model", REPLACE]
        if deployment.apart:
            arguments += ["--disaggregation-mode", role.name]
        arguments += vllm_arguments(role, deployment.apart, spread=False)
        container = {
            "command": ["python3", "-m", "dynamo.vllm"],
            "args": arguments,
            "resources": _gpus(role),
        }
        component: dict[str, Any] = {
            "name": role.name.capitalize(),
            "type": "worker" if role.name == "serve" else role.name,
            "replicas": role.workers,
        }
        if role.nodes > 1:
            component["multinode"] = {"nodeCount": role.nodes}
        components.append(component | {"podTemplate": pod(container)})
    graph = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "eldr-sim-plan"},
        "spec": {"backendFramework": "vllm", "components": components},
    }
    said = f"# simulated, not launched: decode policy {deployment.config.policy}; see router.sh\n"
    return deployment.comment(DYNAMO) + said + yaml.safe_dump(graph, sort_keys=False)
