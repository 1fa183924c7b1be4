"""All files that launch a cluster, and the benchmark that holds it to its objective."""

import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.planning.launch.deployment import Deployment, deployment_of
from eldr_sim.planning.launch.engines import SGLANG, VLLM, script, trtllm_files
from eldr_sim.planning.launch.kubernetes import dynamo_graph, llm_d_values
from eldr_sim.planning.runs.points import config_key
from eldr_sim.planning.search.answer import Answer
from eldr_sim.simulator.results import result_folder
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.traces.requests.session_shape import rate_unit

MARKER = "bench.sh"  #: a folder with this file holds launch files, which ``force`` replaces


def launch_files(
    config: RunConfig, made_by: str, requests: tuple[float, float, float]
) -> dict[str, str]:
    """Return the text of every file by its name; of an engine that cannot do it, why.

    Raises InputError for a cluster that is none of xPyD and xC.

    ``config``: the cluster; ``made_by``: version of eldr-sim; ``requests``: mean prompt and output
    tokens of the requests, and how many come in a second.
    """
    rate, prompt, output = requests[2], round(requests[0]), round(requests[1])
    head = (
        f"Made by eldr-sim {made_by}, run {config_key(config)[:12]}:",
        f"{config.model}, {config.topology} under {config.policy}, {rate:.4g} requests/s of "
        f"{prompt} tokens in and {output} out (means).",
        "Nothing here was tried on a cluster; put your own in the place of REPLACE_ME.",
    )
    made = deployment_of(config, head)
    files: dict[str, str] = {}
    makers: dict[str, Callable[[], dict[str, str]]] = {
        "vllm.sh": lambda: {"vllm.sh": script(made, VLLM)},
        "sglang.sh": lambda: {"sglang.sh": script(made, SGLANG)},
        "trtllm": lambda: trtllm_files(made),
        "llm-d-values.yaml": lambda: {"llm-d-values.yaml": llm_d_values(made)},
        "dynamo.yaml": lambda: {"dynamo.yaml": dynamo_graph(made)},
    }
    for name, make in makers.items():
        try:
            files |= make()
        except InputError as error:
            files[f"{name}.txt"] = f"Not made: {error.problem} (there is {error.allowed}).\n"
    files["router.sh"] = _router(made)
    files[MARKER] = _bench(made, prompt, output, rate)
    return files


def launch_files_of(answer: Answer) -> dict[str, str]:
    """Return the files of an answer's best cluster; raises InputError where it has none."""
    trial = None if answer.best is None else answer.best.trial
    if answer.best is None or trial is None:
        raise InputError("emit", "no cluster answers the question", "an answer")
    known, figure = trial.summaries[0], answer.best.figure
    n = max(1, known["completed"])
    rate = answer.question.rate if figure is None else figure.mean
    if rate and rate_unit(trial.config.workload) == "sessions/s":
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
        urls = [f"http://{role.name}-{n}:{role.port}" for n in range(role.workers)]
        lines += [f"--{side} {url}" for url in urls]
    lines.append(f"--policy '{config.policy}'")
    if made.apart:
        lines.append(f"--prefill-policy '{config.prefill_policy}'")
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
    bounds: dict[str, Any] = config.goodput.model_dump(exclude_none=True)
    seconds = 60.0 if config.duration_s is None else config.duration_s
    own, n_prefixes = prompt - config.prefix_len, config.num_prefixes
    lengths = f"--dataset-name random --random-input-len {own} --random-output-len {output} "
    lengths += f"--random-prefix-len {config.prefix_len} " if config.prefix_len else ""
    lengths += f"--random-range-ratio {config.random_range_ratio:g}"
    if n_prefixes > 1:
        kind = "prefix-repetition"
        lengths = f"--dataset-name prefix_repetition --{kind}-num-prefixes {n_prefixes} "
        lengths += f"--{kind}-prefix-len {config.prefix_len} --{kind}-suffix-len {own} "
        lengths += f"--{kind}-output-len {output}"
    words = [
        'vllm bench serve --model "$MODEL" --base-url "${URL:-http://127.0.0.1:8000}"',
        lengths,
        f"--ignore-eos --request-rate {rate:.6g} --burstiness {config.burstiness:g}",
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
