"""Launch lines and option files of vLLM, SGLang and TensorRT-LLM as fields of a run."""

import shlex
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from eldr_sim.errors import EldrSimWarning, InputError
from eldr_sim.inputs import parse_yaml, read_text
from eldr_sim.simulator.setup.config.engines import default_fields

_SAME = (
    "max_num_seqs", "max_num_batched_tokens", "kv_cache_dtype", "block_size",
    "gpu_memory_utilization", "max_model_len", "tensor_parallel_size", "data_parallel_size",
    "pipeline_parallel_size", "enable_expert_parallel", "enable_elastic_ep",
    "num_redundant_experts", "enforce_eager", "enable_prefix_caching", "async_scheduling",
    "num_gpu_blocks_override", "speculative_config", "disable_hybrid_kv_cache_manager", "model",
    "long_prefill_token_threshold",
)  # fmt: skip
_PARALLEL = {"tp": "tensor_parallel_size", "dp": "data_parallel_size",
             "pp": "pipeline_parallel_size"}  # fmt: skip
#: Fields by each engine's names; ``!``: of the opposite.
_NAMES: dict[str, dict[str, str]] = {
    "vllm": {name: name for name in _SAME} | _PARALLEL,
    "sglang": {
        "model_path": "model", "model": "model", "context_length": "max_model_len",
        "chunked_prefill_size": "max_num_batched_tokens", "max_running_requests": "max_num_seqs",
        "mem_fraction_static": "gpu_memory_utilization", "page_size": "block_size",
        "kv_cache_dtype": "kv_cache_dtype", "disable_radix_cache": "!enable_prefix_caching",
        "disable_overlap_schedule": "!async_scheduling", "disable_cuda_graph": "enforce_eager",
        "disable_piecewise_cuda_graph": "!piecewise_cuda_graph",
        "enable_piecewise_cuda_graph": "piecewise_cuda_graph",
        "enforce_piecewise_cuda_graph": "piecewise_cuda_graph",
        "enable_mixed_chunk": "enable_mixed_chunk",
        "scheduler_recv_interval": "scheduler_recv_interval",
        "schedule_conservativeness": "schedule_conservativeness",
        "enable_dp_attention": "attention_dp", "attn_dp_size": "attention_dp",
        "ep": "experts", "ep_size": "experts",
        "expert_parallel_size": "experts", "ep_num_redundant_experts": "num_redundant_experts",
        "tp_size": _PARALLEL["tp"], "dp_size": _PARALLEL["dp"], "pp_size": _PARALLEL["pp"],
        _PARALLEL["tp"]: _PARALLEL["tp"], _PARALLEL["dp"]: _PARALLEL["dp"],
    } | _PARALLEL,
    "trtllm": {
        "model": "model", "max_seq_len": "max_model_len", "max_batch_size": "max_num_seqs",
        "max_num_tokens": "max_num_batched_tokens", "enable_attention_dp": "attention_dp",
        "kv_cache_free_gpu_memory_fraction": "gpu_memory_utilization",
        "free_gpu_memory_fraction": "gpu_memory_utilization",
        "kv_cache_config.free_gpu_memory_fraction": "gpu_memory_utilization",
        "kv_cache_config.enable_block_reuse": "enable_prefix_caching",
        "enable_block_reuse": "enable_prefix_caching",
        "kv_cache_config.dtype": "kv_cache_dtype", "kv_cache_dtype": "kv_cache_dtype",
        "kv_cache_config.tokens_per_block": "block_size", "tokens_per_block": "block_size",
        "enable_chunked_prefill": "enable_chunked_prefill",
        "scheduler_config.capacity_scheduler_policy": "capacity_scheduler_policy",
        "disable_overlap_scheduler": "!async_scheduling",
        "batch_wait_timeout_iters": "batch_wait_timeout_iters",
        "batch_wait_max_tokens_ratio": "batch_wait_max_tokens_ratio",
        "enforce_eager": "enforce_eager",
        "moe_expert_parallel_size": "experts", "ep_size": "experts",
        "tp_size": _PARALLEL["tp"], "pp_size": _PARALLEL["pp"],
        _PARALLEL["tp"]: _PARALLEL["tp"], _PARALLEL["pp"]: _PARALLEL["pp"],
        "torch_compile_config.enable_piecewise_cuda_graph": "piecewise_cuda_graph",
        "attention_dp_config.enable_balance": "attention_dp_balance",
        "attention_dp_config.timeout_iters": "attention_dp_timeout_iters",
        "attention_dp_config.batching_wait_iters": "attention_dp_batching_wait_iters",
        "speculative_config": "speculative_config",
    },
}  # fmt: skip
#: What changes nothing that is simulated here.
_ABOUT = {"host", "port", "trust_remote_code", "served_model_name", "print_iter_log", "log_level",
          "disable_log_requests", "backend", "tokenizer_path", "random_seed"}  # fmt: skip
#: Commands that a model's name may follow.
_COMMANDS = ("serve", "vllm", "trtllm-serve")
_EIGHT, _SIXTEEN = ("fp8", "fp8_e4m3", "fp8_e5m2"), ("bfloat16", "bf16", "float16", "half", "fp16")


def with_launch(values: dict[str, Any]) -> dict[str, Any]:
    """Return field values with what their launch line and engine say, unless given. Warns of
    options that are not simulated, in one line. Raises InputError for a line that cannot be
    read."""
    values = dict(values)
    line, file = values.pop("engine_args", None), values.pop("extra_llm_api_options", None)
    engine = values.get("engine") or ("trtllm" if file else "vllm")
    if engine not in _NAMES:
        return values  # the field itself says what is allowed
    said: list[tuple[str, Any]] = []
    if file is not None:
        if engine != "trtllm":
            raise InputError("extra_llm_api_options", "are TensorRT-LLM's", "--engine trtllm")
        options = parse_yaml(
            read_text(file, "extra_llm_api_options"), "extra_llm_api_options", str(file)
        )
        if not isinstance(options, Mapping):
            raise InputError("extra_llm_api_options", f"{file} holds no mapping", "option: value")
        said += _nested(options)
        values["engine"] = engine
    if line is not None:
        said += _options(str(line))
    found = _fields(engine, said)
    values = found | values
    return default_fields(values) | values


def _fields(engine: str, said: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields that options stand for; warns of those that stand for none."""
    found: dict[str, Any] = {}
    speculative: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in said:
        field = _NAMES[engine].get(name)
        if name.startswith(("speculative_config.", "speculative_")) and field is None:
            speculative[name.removeprefix("speculative_config.")] = value
        elif field is not None:
            if field.startswith("!"):
                field, value = field[1:], not value
            found[field] = value
        elif engine == "vllm" and name.startswith("no_") and name[3:] in _NAMES[engine]:
            found[name[3:]] = not value
        elif name not in _ABOUT:
            unknown.append(name)
    if speculative:
        found["speculative_config"] = speculative
    kind = str(found.get("kv_cache_dtype", "auto")).lower()
    if kind in _EIGHT:
        found["kv_cache_dtype"] = "fp8"
    elif kind in _SIXTEEN:
        found["kv_cache_dtype"] = "auto"
    elif kind != "auto":
        del found["kv_cache_dtype"]
        unknown.append(f"KV cache of {kind}")
    _spread(engine, found, unknown)
    if unknown:
        names = ", ".join(sorted(unknown))
        warnings.warn(EldrSimWarning(f"not simulated of the launch line: {names}"), stacklevel=2)
    return found


def _spread(engine: str, found: dict[str, Any], unknown: list[str]) -> None:
    """Turn SGLang's and TensorRT-LLM's words for data-parallel attention into vLLM's; in place."""
    experts, attention = int(found.pop("experts", 1) or 1), found.pop("attention_dp", False)
    width = int(found.get("tensor_parallel_size", 1))
    engines = int(found.get("data_parallel_size", width if engine == "trtllm" else 1))
    if not isinstance(attention, bool):  # SGLang's newer word says how many engines
        attention, engines = int(attention) > 1, int(attention)
    if experts > 1:
        found["enable_expert_parallel"] = True
        if experts < width:
            unknown.append(f"experts spread over {experts} GPUs (taken as over all)")
    if engine == "vllm":
        return
    if attention and engines > 1:
        if width % engines:
            problem = f"{engines} do not divide {width} GPUs"
            raise InputError("engine_args", f"data-parallel attention: {problem}")
        found |= {"data_parallel_size": engines, "tensor_parallel_size": width // engines}
        if engine == "sglang":  # shared by the engines
            for name in ("max_num_batched_tokens", "max_num_seqs"):
                if name in found:
                    found[name] = max(1, int(found[name]) // engines)
    elif "data_parallel_size" in found:
        del found["data_parallel_size"]
        unknown.append("data parallelism without attention's (give more workers)")


def _nested(options: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield options of a file by their dot paths."""
    for name, value in options.items():
        path = f"{above}{name}"
        if isinstance(value, Mapping) and path != "speculative_config":
            yield from _nested(value, f"{path}.")
        elif path == "cuda_graph_config" and value is None:
            yield "enforce_eager", True
        else:
            yield path, value


def _options(line: str) -> Iterator[tuple[str, Any]]:
    words = shlex.split(line)
    before: list[str] = []
    while words and (words[0] == "-m" or not words[0].startswith("-")):  # python -m sglang ...
        before.append(words.pop(0))
    if before[-1:] and before[-1] not in _COMMANDS and any(word in _COMMANDS for word in before):
        yield "model", before[-1]  # vllm serve MODEL
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            raise InputError("engine_args", f"{word!r} follows no option", "--option value ...")
        name, equals, value = word.lstrip("-").partition("=")
        if not equals and words and not _is_option(words[0]):
            value, equals = words.pop(0), "="
        while words and not _is_option(words[0]):
            value += " " + words.pop(0)
        yield name.replace("-", "_"), _value(value) if equals else True


def _is_option(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
