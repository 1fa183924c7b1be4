"""Options of engines' launch lines and of benchmarks' by what they do to the answer.

Names as in vLLM 0.33 (``engine/arg_utils.py``, ``entrypoints/openai/cli_args.py``), SGLang 0.5.23
(``srt/server_args.py``, ``bench_serving.py``) and TensorRT-LLM's ``trtllm-serve``."""

import json
from collections.abc import Iterable
from pathlib import Path

_LISTS = json.loads(Path(__file__).with_name("launch_options.json").read_text(encoding="utf-8"))
#: What changes no latency that is simulated here: addresses, logs, names, parsers, loading.
WITHOUT_EFFECT = frozenset(_LISTS["without_effect"])
#: What changes the answer and is not simulated, or is taken for something else.
CHANGES = frozenset(_LISTS["changes"])
#: Of vLLM's all-to-all backends and SGLang's: ours.
VLLM_BACKENDS = {
    "allgather_reducescatter": "allgather_reducescatter", "naive": "allgather_reducescatter",
    "pplx": "pplx", "deepep_low_latency": "deepep_ll", "deepep_high_throughput": "deepep_ht",
}  # fmt: skip
SGLANG_MODES = {"normal": "deepep_ht", "low_latency": "deepep_ll", "auto": "auto"}
#: Words of a benchmark's line as fields of a run.
BENCH = {
    "random_input_len": "input_len", "random_input": "input_len", "input_len": "input_len",
    "random_output_len": "output_len", "random_output": "output_len", "output_len": "output_len",
    "random_prefix_len": "prefix_len", "num_prompts": "num_requests",
    "num_prompt": "num_requests", "request_rate": "request_rate", "burstiness": "burstiness",
    "max_concurrency": "max_concurrency",
}  # fmt: skip


def full_name(name: str, known: Iterable[str], fields: dict[str, str]) -> str | list[str]:
    """Return the option that a name abbreviates, as argparse has it; several where it may be any of
    them, and the name itself where it is none. ``fields``: what options stand for."""
    every = set(known)
    if name in every or len(name) < 2:
        return name
    fit = sorted(each for each in every if each.startswith(name))
    if len({fields.get(each, each) for each in fit}) == 1:
        return fit[0]
    return fit or name
