"""Options of engines' launch lines and of benchmarks' by what they do to the answer.

``launch_options.json`` holds the options of the parsers of vLLM 0.33.0 (``vllm serve``, ``vllm
bench serve``) and SGLang 0.5.23 (``launch_server``, ``bench_serving``), read from these releases,
which of them have no effect here, those of earlier versions that change the answer, and words of
options without effect, and of those that choose kernels."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.inputs import parse_json

_LISTS = json.loads(Path(__file__).with_name("launch_options.json").read_text(encoding="utf-8"))
#: What changes no latency that is simulated here: addresses, logs, names, parsers, loading.
WITHOUT_EFFECT = frozenset(_LISTS["without_effect"])
#: Options of engines' parsers, and of benchmarks'; without dashes, words joined by underscores.
OPTIONS: dict[str, frozenset[str]] = {
    engine: frozenset(_LISTS[engine]) for engine in ("vllm", "sglang")
}
BENCH_OPTIONS: dict[str, frozenset[str]] = {
    engine: frozenset(_LISTS[f"{engine}_bench"]) for engine in ("vllm", "sglang")
}
#: Options of earlier versions that are no longer in the parsers.
EARLIER = frozenset(_LISTS["earlier"])
#: The releases whose parsers these are.
VERSIONS = {"vllm": "vLLM 0.33.0", "sglang": "SGLang 0.5.23"}
#: vLLM's options of one dash, such as ``-tp``.
SHORT = dict(_LISTS["vllm_short"])
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
_LORA = "a line without LoRA adapters: all requests are the base model's"
_WEIGHTS = "all weights on the GPUs: more of them, or a quantized model"
_CACHE = "--kv-tier NAME:SIZE,load=RATE, and a launch line without it"
_MODEL = "--model FILE, a config.json with these values"
_CONTEXT = "1, and --tensor-parallel-size or --data-parallel-size"
_QUEUE = "no limit on the queue, and --max-concurrency for the load"
_ORDER = "--queue-order fcfs, sjf or priority (a log's column, lowest number first)"
_PLACE = "a line without it, and --expert-placement"
_GRAPHS = "FULL_AND_PIECEWISE, FULL_DECODE_ONLY, FULL, or NONE"
_CHUNKS = "a line without it, and --max-num-batched-tokens"
_ACCEPTS = "a line without it, and --acceptance FILE"
_OURS = "a line without it"
_TOKENS = "a model that generates token by token"
#: What works another way than anything simulated, and what to write instead.
_REFUSED = {
    "enable_lora": _LORA, "lora_modules": _LORA, "lora_paths": _LORA, "lora_config": _LORA,
    "cpu_offload_gb": _WEIGHTS, "offload_group_size": _WEIGHTS, "kt_weight_path": _WEIGHTS,
    "enable_paged_experts": _WEIGHTS, "enable_lmcache": _CACHE, "enable_flexkv": _CACHE,
    "kv_cache_config.host_cache_size": _CACHE, "decode_context_parallel_size": _CONTEXT,
    "prefill_context_parallel_size": _CONTEXT, "dcp_size": _CONTEXT, "attn_cp_size": _CONTEXT,
    "attention_context_parallel_size": _CONTEXT,
    "hf_overrides": _MODEL, "json_model_override_args": _MODEL,
    "is_embedding": "a line that generates tokens",
    "max_num_queued_reqs": _QUEUE, "max_num_queued_tokens": _QUEUE, "max_queued_requests": _QUEUE,
    "schedule_policy": _ORDER, "enable_priority_scheduling": _ORDER, "scheduler_cls": _ORDER,
    "load_balance_method": "round_robin, and --policy jsq or another of eldr-sim policies",
    "expert_placement_strategy": _PLACE, "init_expert_location": _PLACE, "eplb_algorithm": _PLACE,
    "eplb_config.policy": _PLACE, "moe_config.load_balancer": _PLACE,
    "eplb_rebalance_layers_per_chunk": "a line without it: all layers are rebalanced at once",
    "eplb_min_rebalancing_utilization_threshold": "1.0: experts are always rebalanced",
    "compilation_config.cudagraph_mode": _GRAPHS,
    "long_prefill_token_threshold_adaptive": "--long-prefill-token-threshold N",
    "max_num_partial_prefills": "--long-prefill-token-threshold N",
    "max_long_partial_prefills": "--long-prefill-token-threshold N",
    "enable_dynamic_chunking": _CHUNKS, "prefill_max_requests": _CHUNKS,
    "num_continuous_decode_steps": "1, and --scheduler-recv-interval N",
    "prefill_decode_interval": "0, and --prefill-schedule-interval N",
    "scheduler_reserve_full_isl": _OURS, "enable_unified_memory": _OURS,
    "diffusion_config": _TOKENS, "dllm_algorithm": _TOKENS,
    "prefill_only_disable_kv_cache": _TOKENS,
    "decoupled_spec_role": _OURS, "enable_hisparse": _OURS, "enable_pd_role_switch": _OURS,
    "moe_load_balancer": _PLACE,
    "kv_cache_dtype_skip_layers": "a line without it: all layers hold one type",
    "disable_decode_cuda_graph": "--disable-cuda-graph", "enable_prefill_delayer": _OURS,
    "enable_pdmux": _OURS, "kv_sharing_fast_prefill": _OURS,
    "enable_sliding_window": "--disable-hybrid-kv-cache-manager, which keeps full contexts",
    "ubatch_size": "two halves of a step: --enable-dbo",
    "enable_prefill_cp": _CONTEXT, "enable_nsa_prefill_context_parallel": _CONTEXT,
    "context_parallel_size": _CONTEXT, "cp_size": _CONTEXT,
    "speculative_adaptive": _ACCEPTS, "speculative_accept_threshold_single": _ACCEPTS,
    "speculative_accept_threshold_acc": _ACCEPTS, "model_impl": "the engine's own models: auto",
}  # fmt: skip
#: The values of options with a mechanism for which engines do what is simulated here.
_SIMULATED = {
    "schedule_policy": ("fcfs",), "expert_placement_strategy": ("linear",),
    "load_balance_method": ("auto", "round_robin", "follow_bootstrap_room"),
    "init_expert_location": ("trivial",), "eplb_algorithm": ("auto", "deepseek"),
    "eplb_config.policy": ("default",), "enable_sliding_window": ("true",),
    "eplb_min_rebalancing_utilization_threshold": ("1", "1.0"),
    "compilation_config.cudagraph_mode": ("full", "full_decode_only", "full_and_piecewise"),
    "max_num_partial_prefills": ("1",), "max_long_partial_prefills": ("1",),
    "num_continuous_decode_steps": ("1",), "num_scheduler_steps": ("1",),
    "radix_eviction_policy": ("lru",), "retraction_policy": ("length",), "watermark": ("0",),
    "dbo_decode_token_threshold": ("32",), "dbo_prefill_token_threshold": ("512",),
    "ubatch_size": ("2",), "max_beam_width": ("1",), "moe_dp_size": ("1",),
    "moe_data_parallel_size": ("1",), "dwdp_size": ("1",), "model_impl": ("auto", "vllm", "sglang"),
    "speculative_accept_threshold_single": ("1", "1.0"),
    "speculative_accept_threshold_acc": ("1", "1.0"),
    "scheduler_config.context_chunking_policy": ("FIRST_COME_FIRST_SERVED",),
    "runner": ("auto", "generate", "draft"), "task": ("auto", "generate"),
    "convert": ("auto", "none"), "device": ("auto", "cuda", "rocm"), "backend": ("pytorch",),
    "preemption_mode": ("recompute",), "scheduler_reserve_full_isl": ("true",),
}  # fmt: skip
#: Options with a mechanism that is simulated, and whose absence is not.
_ON = ("enable_sliding_window", "compilation_config.cudagraph_mode", "scheduler_reserve_full_isl")
#: Words of options that act only beside one that is refused, or that asks for a KV tier, and of
#: those that concern images, sound and video (prompts are text), what an answer holds beside
#: tokens, debugging, faults of a server, its sockets and where its processes run.
_BESIDE = tuple(_LISTS["beside"])
#: Words of options that choose how a step's kernels and collectives are computed.
_KERNELS = tuple(_LISTS["kernels"])


def chooses_kernels(name: str) -> bool:
    """Whether an option or a variable only chooses how kernels of a step are computed: a step
    takes the times of the kernels that the tables were measured with."""
    return any(word in name for word in _KERNELS)


def full_name(name: str, engine: str, bench: bool, fields: Mapping[str, str]) -> str | list[str]:
    """Return the option that a name abbreviates, as argparse has it; several where it may be any of
    them, and the name itself where it is none. ``fields``: what options stand for."""
    real = BENCH_OPTIONS[engine] if bench else OPTIONS[engine]
    if engine == "vllm" and name.startswith("no_"):  # 0.32 and before have one of each switch
        real = real | {f"no_{each}" for each in real}
    if name in {*real, *fields, *EARLIER, *WITHOUT_EFFECT} or not name:
        return name
    fit = sorted(each for each in real if each.startswith(name))
    if fit and len({fields.get(each, each) for each in fit}) == 1:
        return fit[0]
    return fit or name


def positive(engine: str, name: str, value: Any) -> tuple[str, Any]:
    """Return an option and its value without ``no_`` or, of vLLM, ``disable_`` for ``enable_``."""
    known = OPTIONS.get(engine, frozenset())
    if name.startswith("no_") and (name[3:] in known or engine == "vllm"):
        return name[3:], not value
    twin = "enable_" + name.removeprefix("disable_")
    if engine == "vllm" and name.startswith("disable_") and twin in known:
        return twin, not value
    return name, value


def has_no_effect(engine: str, name: str, value: Any) -> bool:
    """Whether an option has no effect on the answer. Raises InputError for one with a mechanism
    that is not simulated, unless it is turned off."""
    name, _, inner = name.partition(".") if name.startswith("hf_overrides.") else (name, "", "")
    if _REFUSED.get(name) is _MODEL and _of_positions(inner or value):
        return False
    values = _SIMULATED.get(name, ())
    if name in _REFUSED or values:
        off = value in (0, False, None, "", "none", "None", "null", "{}")
        off &= name not in _ON
        off |= str(value).lower() in map(str.lower, values)
        way_out = _REFUSED.get(name) or " or ".join(values)
        if off or (value == 1 and way_out is _CONTEXT):
            return True
        option = name.replace("_", "-") + ("" if value is True else f" {value}")
        raise InputError("engine_args", f"--{option} is not simulated", way_out)
    if name == "stream_interval":
        return str(value) == "1"  # the default; more tokens at once are not simulated
    if name == "dtype":
        return str(value).lower() in ("auto", "bfloat16", "bf16", "float16", "half", "fp16")
    if name == "enable_chunked_prefill":  # vLLM's engine has no other
        return engine == "vllm" and value is True
    if name in WITHOUT_EFFECT or name.startswith("mm_") or any(w in name for w in _BESIDE):
        return True
    twin = "disable_" + name.removeprefix("enable_")
    return twin in WITHOUT_EFFECT and name.startswith("enable_")


def _of_positions(overrides: Any) -> bool:
    """Whether overrides of a model concern its positions alone, which take no time."""
    text = str(overrides)
    names = parse_json(text, "engine_args", "model overrides") if text.startswith("{") else [text]
    return bool(names) and all(each.startswith(("rope_", "max_position_")) for each in names)


def is_known(engine: str, name: str) -> bool:
    """Whether an engine's parser has an option, or an earlier version's had."""
    return engine not in OPTIONS or name.partition(".")[0] in OPTIONS[engine] | EARLIER
