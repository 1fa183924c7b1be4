"""The published runs, predicted by NVIDIA's AISimulate.

``python -m studies.peers.aisimulate PYTHON`` maps the launch line and load of each row that has a
kept prediction of ours to a configuration of AISimulate, runs that in the environment of
``PYTHON``, and writes ``aisimulate.json`` with what it says. Nothing that was measured is read:
``compare.py`` does that."""

import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.errors import EldrSimWarning, InputError
from eldr_sim.simulator.run import offered_load
from eldr_sim.simulator.setup.config.run_config import RunConfig, make_config
from eldr_sim.simulator.setup.prepare import PreparedRun, prepare
from eldr_sim.traces.workload import Workload
from eldr_sim.validation.published import judge
from eldr_sim.validation.published.freeze import freeze
from eldr_sim.validation.published.runs import PublishedRun, read_runs

#: The version that was asked, a pre-release on PyPI.
VERSION = "0.13.0.dev202610270000000085"
FROZEN = Path(__file__).with_name("aisimulate.json")
_SYSTEMS = {"A100": "a100_sxm", "H100": "h100_sxm", "H200": "h200_sxm", "B200": "b200_sxm"}
#: Checkpoints under the name of one of the same shape and precision in AISimulate's package.
_SAME = {
    "GPT-OSS-120B": "openai/gpt-oss-120b",
    "Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-235B-A22B-Instruct-2507": "Qwen/Qwen3-235B-A22B",
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8": "Qwen/Qwen3-235B-A22B-FP8",
    "deepseek-ai/DeepSeek-V3.1": "deepseek-ai/DeepSeek-V3",
    "google/gemma-4-26B-A4B-it": "google/gemma-4-26B-A4B",
}
_FP8 = {
    "activation_scheme": "dynamic", "quant_method": "fp8", "weight_block_size": [128, 128],
    "fmt": "e4m3",
}  # fmt: skip
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128,
    "hidden_act": "silu", "max_position_embeddings": 40960, "num_key_value_heads": 8,
    "rope_theta": 1000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 151936, "attention_bias": False, "rms_norm_eps": 1e-6, "rope_scaling": None,
}  # fmt: skip
_8B = _QWEN3 | {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_hidden_layers": 36,
}  # fmt: skip
_14B = _QWEN3 | {
    "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 40,
    "num_hidden_layers": 40,
}  # fmt: skip
_GLM4 = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe",
    "max_position_embeddings": 202752,
}  # fmt: skip
#: The config.json of other checkpoints, which AISimulate would download; of GLM-4 the lines that
#: decide are enough.
_CONFIGS = {
    "Qwen/Qwen3-8B-FP8": _8B | {"quantization_config": _FP8},
    "Qwen/Qwen3-14B": _14B,
    "Qwen/Qwen3-14B-FP8": _14B | {"quantization_config": _FP8},
    "zai-org/GLM-4.6": _GLM4, "zai-org/GLM-4.6-FP8": _GLM4, "GLM-4.5-Air": _GLM4,
}  # fmt: skip


class _Settled(Exception):
    pass


def settled(config: RunConfig) -> PreparedRun:
    """Return what a run's engines are, with their defaults, without drawing routing."""

    def check(prepared: PreparedRun) -> None:
        raise _Settled(prepared)

    try:
        return prepare(config, check)
    except _Settled as found:
        prepared: PreparedRun = found.args[0]
        return prepared


def configuration(run: PublishedRun, config: RunConfig, folder: Path) -> dict[str, Any]:
    """Return AISimulate's configuration of a row; its requests are written into ``folder``."""
    prepared = settled(config)
    pool = prepared.spec.pools[0]
    engine, layout = pool.engine, pool.engine.parallelism
    ranks = layout.tensor_parallel_size * layout.data_parallel_size
    moe, model = not prepared.model.is_dense, run.row["model"]
    policy = config.policies.policy
    if policy not in ("round_robin", "random"):
        raise InputError("policy", f"{policy}: the built-in stack routes round robin")
    if model in _CONFIGS:
        path = folder / model.replace("/", "--")
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(_CONFIGS[model]))
        model = str(path)
    launch = run.row["launch"].replace("=", " ").split()
    kv = config.engine.kv_cache_dtype
    found: dict[str, Any] = {
        "mode": "aggregated",
        "model": _SAME.get(model, model),
        "hardware": _SYSTEMS.get(run.row["gpu"], run.row["gpu"].lower()),
        "backend": engine.engine,
        "backend_version": "current",  # the oldest it has; no row ran a later one
        "kvcache_quant_mode": "bfloat16" if kv == "auto" else "fp8",
        "fmha_quant_mode": "bfloat16",
        "workers": {"aggregated": {
            "parallelism": {
                "replicas": 1 if layout.data_parallel_size > 1 else pool.n,
                "tensor": layout.tensor_parallel_size,
                "attention_data": layout.data_parallel_size,
                "moe_tensor": ranks if moe and not layout.expert_parallel else 1,
                "moe_expert": ranks if moe and layout.expert_parallel else 1,
            },
            "scheduler": {
                "max_batched_tokens": engine.max_num_batched_tokens,
                "max_sequences": engine.max_num_seqs,
            },
            "kv_cache": {
                "prefix_caching": config.engine.enable_prefix_caching,
                "capacity": {"memory_fraction": engine.memory_share},
            } | ({"block_size": config.engine.block_size} if engine.engine == "vllm" else {}),
        }},
    }  # fmt: skip
    if config.engine.max_model_len:
        found["context_length"] = config.engine.max_model_len
    if "--attention-backend" in launch:
        found["attention_backend"] = launch[launch.index("--attention-backend") + 1]
    if engine.engine == "trtllm":
        found["enable_chunked_prefill"] = "--enable_chunked_prefill" in launch
    if drafts := config.steps.speculative_config:
        found["nextn"] = drafts.num_speculative_tokens
        found["nextn_accepted"] = float(sum(drafts.synthetic_acceptance_rates or ()))
    load: dict[str, Any] = {"type": "trace_timestamps"}
    if config.requests.max_concurrency:
        load = {"type": "concurrency", "concurrency": config.requests.max_concurrency}
    trace = folder / "requests.jsonl"
    workload, _ = offered_load(config, None)
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in requests(workload)))
    source = {"type": "trace", "paths": [str(trace)], "format": "mooncake", "block_size": _BLOCK}
    return {"traffic": {"source": source, "load": load}, "engine": found}


#: Tokens of a block of its traces: equal hashes are equal prefixes.
_BLOCK = 500


def requests(workload: Workload) -> Iterator[dict[str, Any]]:
    """Yield our requests as AISimulate's trace has them."""
    fresh = 10**6
    for i, prompt in enumerate(workload.prompt_len.tolist()):
        shared: list[int] = []
        if workload.prefix_indptr[i + 1] > workload.prefix_indptr[i]:
            n = workload.prefix_block_tokens // _BLOCK
            first = int(workload.prefix_hash[workload.prefix_indptr[i]]) * n
            shared = list(range(first, first + n))
        own = -(-prompt // _BLOCK) - len(shared)
        yield {
            "timestamp": 1e3 * float(workload.arrival_s[i]),
            "input_length": prompt,
            "output_length": int(workload.output_len[i]),
            "hash_ids": [*shared, *range(fresh, fresh + own)],
        }
        fresh += own


#: What AISimulate's Python runs: a line of JSON in, a configuration; a line out, what it says.
_CHILD = """
import json, sys
from aisimulate.config.cli import CorePredictionConfig
from aisimulate.predict import run_prediction
from aisimulate.stack import resolve_runner_factory
from aisimulate.sweeper.replay import ReplayOutputRequirements
for line in sys.stdin:
    try:
        found = run_prediction(
            CorePredictionConfig.model_validate(json.loads(line)), stack="engine",
            runner_factory=resolve_runner_factory("engine"),
            output_requirements=ReplayOutputRequirements(
                include_raw_report=True, capture_per_request=True))
        said = found.native["per_request"]
    except Exception as error:
        said = str(error)
    print("SAID", json.dumps(said), flush=True)
"""


class AISimulate:
    """The other simulator in a process of its Python."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def requests(self, asked: dict[str, Any]) -> list[dict[str, Any]] | str:
        """Return the requests of a run, or why there is none."""
        to, back = self._process.stdin, self._process.stdout
        assert to is not None
        assert back is not None
        to.write(json.dumps(asked) + "\n")
        to.flush()
        line = next(line for line in back if line.startswith("SAID "))
        said: list[dict[str, Any]] | str = json.loads(line.removeprefix("SAID "))
        return said


#: Where the reason of a refusal goes on to lists and paths.
_ENDS = re.compile(r": tried lane_order|[.;] [Ss]upported arch|\. The selected")


def predict(run: PublishedRun, peer: AISimulate) -> dict[str, Any] | str:
    """Return AISimulate's TTFT and TPOT, ms, by the row's statistics, or why it has none. What it
    refuses as launched is asked without the attention backend, then with its own precision of KV
    and attention; ``without`` names what was left out."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore", EldrSimWarning)
        try:
            config = make_config(run.fields())
            asked = configuration(run, config, Path(name))
        except InputError as error:
            return f"{error.field}: {error.problem}"
        why, without = "", list[str]()
        for leave in ((), ("attention_backend",), ("kvcache_quant_mode", "fmha_quant_mode")):
            left = [each for each in leave if asked["engine"].pop(each, None)]
            if leave and not left:
                continue
            without += left
            said = peer.requests(asked)
            if isinstance(said, list):
                return figures(run, config, said) | {"without": " ".join(without)}
            why = why or _ENDS.split(said.replace(name, "").rpartition("Error: ")[2])[0][:200]
        return why


def figures(run: PublishedRun, config: RunConfig, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the requests that arrived in the measured window."""
    begin, length = config.requests.warmup_s, config.requests.duration_s
    end = np.inf if length is None else begin + length
    counted = [x for x in found if begin <= x["arrival_time_ms"] / 1e3 < end]
    values = {
        "ttft": [x["first_token_ms"] - x["arrival_time_ms"] for x in counted],
        "tpot": [
            (x["last_token_ms"] - x["first_token_ms"]) / (x["output_length"] - 1)
            for x in counted
            if x["output_length"] > 1
        ],
    }
    return {
        name: float((np.median if run.row[f"{name}_statistic"] == "median" else np.mean)(each))
        for name, each in values.items()
    }


def main() -> None:
    """Predict the rows that have a kept prediction of ours."""
    kept = judge.kept()["rows"]
    runs = [run for run in read_runs() if run.name in kept]
    found, peer = dict[str, Any](), AISimulate(sys.argv[1])
    for run in runs:
        found[run.name] = predict(run, peer)
        print(run.name, found[run.name], flush=True)
    date = datetime.now(UTC).strftime("%d %B %Y")
    freeze(FROZEN, runs, found, f"aisimulate {VERSION}", date)


if __name__ == "__main__":
    main()
