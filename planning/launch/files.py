"""All files that launch a cluster, and the benchmark that holds it to its objective.

Sources: llm-d-modelservice ``values.schema.json``; Dynamo 1.6 operator ``api/v1beta1`` and
``examples/backends/vllm/deploy/v1beta1``; the operator adds which node runs which engine."""

import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from eldr_sim.errors import InputError
from eldr_sim.planning.launch.deployment import REPLACE, Deployment, Role, deployment_of
from eldr_sim.planning.launch.engine_files import SGLANG, VLLM, script, trtllm_files, vllm_arguments
from eldr_sim.planning.runs.runner import config_key
from eldr_sim.planning.search.answer import Answer
from eldr_sim.simulator.results import result_folder
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.traces.requests.session_shape import rate_unit

LLM_D, DYNAMO = "llm-d modelservice, vLLM 0.32.0", "Dynamo 1.6.1, vLLM 0.32.0"
#: llm-d's scorers that do what a decode policy does.
_SCORERS = {"jsq": "queue-scorer"}
_PARALLEL = ("--tensor-parallel-size", "--data-parallel-size")


def _gpus(role: Role) -> dict[str, Any]:
    return {"limits": {"nvidia.com/gpu": str(min(role.gpus, role.config.cluster.gpus_per_node))}}


def _without(arguments: list[str], options: tuple[str, ...]) -> list[str]:
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
        "modelArtifacts": {"name": deployment.config.engine.model, "uri": f"hf://{REPLACE}"},
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
            "replicas": role.pool.workers,
            "parallelism": {
                "tensor": role.layout.tensor_parallel_size,
                "data": role.layout.data_parallel_size,
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
    policy = deployment.config.policies.policy
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
        model = str(deployment.config.engine.model)
        arguments = ["--model", REPLACE, "--served-model-name", model]
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
            "replicas": role.pool.workers,
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
    policy = deployment.config.policies.policy
    said = f"# simulated, not launched: decode policy {policy}; see router.sh\n"
    return deployment.comment(DYNAMO) + said + yaml.safe_dump(graph, sort_keys=False)


MARKER = "bench.sh"  #: a folder with this file holds launch files, which ``force`` replaces


def launch_files(
    config: RunConfig, made_by: str, requests: tuple[float, float, float]
) -> dict[str, str]:
    """Return the text of every file by its name; of an engine that cannot do it, why.

    Raises InputError for a cluster that is none of xPyD and xC. ``made_by``: version of eldr-sim;
    ``requests``: mean tokens of prompts and of outputs, and how many come in a second."""
    rate, prompt, output = requests[2], round(requests[0]), round(requests[1])
    head = (
        f"Made by eldr-sim {made_by}, run {config_key(config)[:12]}:",
        f"{config.engine.model}, {config.cluster.topology} under {config.policies.policy}, "
        f"{rate:.4g} requests/s of {prompt} tokens in and {output} out (means).",
        "Nothing here was tried on a cluster; put your own in the place of REPLACE_ME.",
    )
    deployment = deployment_of(config, head)
    files: dict[str, str] = {}
    makers: dict[str, Callable[[], dict[str, str]]] = {
        "vllm.sh": lambda: {"vllm.sh": script(deployment, VLLM)},
        "sglang.sh": lambda: {"sglang.sh": script(deployment, SGLANG)},
        "trtllm": lambda: trtllm_files(deployment),
        "llm-d-values.yaml": lambda: {"llm-d-values.yaml": llm_d_values(deployment)},
        "dynamo.yaml": lambda: {"dynamo.yaml": dynamo_graph(deployment)},
    }
    for name, make in makers.items():
        try:
            files |= make()
        except InputError as error:
            files[f"{name}.txt"] = f"Not made: {error.problem} (there is {error.allowed}).\n"
    files["router.sh"] = _router(deployment)
    files[MARKER] = _bench(deployment, prompt, output, rate)
    return files


def launch_files_of(answer: Answer) -> dict[str, str]:
    """Return the files of an answer's best cluster; raises InputError where it has none."""
    trial = None if answer.best is None else answer.best.trial
    if answer.best is None or trial is None:
        raise InputError("emit", "no cluster answers the question", "an answer")
    known, figure = trial.summaries[0], answer.best.figure
    n = max(1, known["completed"])
    rate = answer.question.rate if figure is None else figure.mean
    if rate and rate_unit(trial.config.requests.workload) == "sessions/s":
        rate *= known["sessions"]["turns_begun"] / known["sessions"]["begun"]
    means = known["total_input_tokens"] / n, known["total_output_tokens"] / n
    return launch_files(trial.config, version("eldr-sim"), (*means, rate or 0.0))


def write_launch_files(
    files: dict[str, str], out: str | os.PathLike[str], *, force: bool = False
) -> None:
    """Write files into a folder, whole or not at all; raises InputError as `result_folder`."""
    with result_folder(Path(out), force, MARKER, ()) as folder:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            if name.endswith(".sh"):
                path.chmod(0o755)


def _router(made: Deployment) -> str:
    """Return the command of this package's router, which serves the policy that was simulated."""
    config, lines = made.config, []
    for role in made.roles:
        side = "prefill" if role.name == "prefill" else "decode"
        urls = [f"http://{role.name}-{n}:{role.port}" for n in range(role.pool.workers)]
        lines += [f"--{side} {url}" for url in urls]
    lines.append(f"--policy '{config.policies.policy}'")
    if made.apart:
        lines.append(f"--prefill-policy '{config.policies.prefill_policy}'")
    lines.append("--port 8000")
    return (
        "#!/usr/bin/env bash\n"
        + made.comment("eldr-sim router, before vLLM")
        + "# it chooses workers; engines of a group are chosen by vLLM's own balancer\n"
        + "exec eldr-sim router \\\n    "
        + " \\\n    ".join(lines)
        + "\n"
    )


def _bench(made: Deployment, prompt: int, output: int, rate: float) -> str:
    """Return a ``vllm bench serve`` line that holds the cluster to the objective."""
    config = made.config
    bounds: dict[str, Any] = config.output.goodput.model_dump(exclude_none=True)
    seconds = 60.0 if config.requests.duration_s is None else config.requests.duration_s
    unshared, n_prefixes = prompt - config.requests.prefix_len, config.requests.num_prefixes
    lengths = f"--dataset-name random --random-input-len {unshared} --random-output-len {output} "
    lengths += (
        f"--random-prefix-len {config.requests.prefix_len} " if config.requests.prefix_len else ""
    )
    lengths += f"--random-range-ratio {config.requests.random_range_ratio:g}"
    if n_prefixes > 1:
        kind = "prefix-repetition"
        lengths = f"--dataset-name prefix_repetition --{kind}-num-prefixes {n_prefixes} "
        lengths += (
            f"--{kind}-prefix-len {config.requests.prefix_len} --{kind}-suffix-len {unshared} "
        )
        lengths += f"--{kind}-output-len {output}"
    words = [
        'vllm bench serve --model "$MODEL" --base-url "${URL:-http://127.0.0.1:8000}"',
        lengths,
        f"--ignore-eos --request-rate {rate:.6g} --burstiness {config.requests.burstiness:g}",
        f"--num-prompts {max(100, round(rate * seconds))}",
        "--percentile-metrics ttft,tpot,itl,e2el",
    ]
    if bounds:
        words.append("--goodput " + " ".join(f"{name}:{ms:g}" for name, ms in bounds.items()))
    return (
        "#!/usr/bin/env bash\n"
        + made.comment("vllm bench serve (vLLM 0.32.0)")
        + "# random prompts choose other experts than served ones\n"
        + 'set -euo pipefail\n: "${MODEL:?}"\nexec '
        + " \\\n    ".join(words)
        + "\n"
    )
