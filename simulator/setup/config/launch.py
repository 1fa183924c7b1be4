"""Launch lines and option files of vLLM, SGLang and TensorRT-LLM as fields of a run.

What changes the answer is a field, refused, or named in a warning; what changes nothing is named
apart. A line of ``vllm bench serve`` or SGLang's ``bench_serving`` gives the load, by its own
rules. Options may be abbreviated where the engine's parser takes that (argparse's)."""

import difflib
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from eldr_sim.errors import EldrSimWarning, InputError
from eldr_sim.inputs import parse_json, parse_yaml, read_text
from eldr_sim.kernel_profiles.gpus import GPU, load_gpu
from eldr_sim.kernel_profiles.parallel import MoEBackend
from eldr_sim.simulator.setup.config.engine_rules import (
    default_budget,
    default_fields,
    default_seats,
)
from eldr_sim.simulator.setup.config.groups import RUN_FIELDS
from eldr_sim.simulator.setup.config.launch_line import (
    ENVIRONMENTS,
    computes_all,
    cut,
    nested,
    options,
)
from eldr_sim.simulator.setup.config.launch_options import (
    BENCH,
    NAMES,
    OPTIONS,
    SGLANG_MODES,
    VERSIONS,
    VLLM_BACKENDS,
    WITHOUT_EFFECT,
    chooses_kernels,
    has_no_effect,
    is_known,
    positive,
)

_SHORT_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_LEVEL = re.compile(r"O[0-3]")
#: Options of a benchmark's line that give no load.
_OF_BENCH = ("goodput", "model", "backend", "dataset_name", "temperature", "top_p", "top_k")
_EIGHT, _SIXTEEN = ("fp8", "fp8_e4m3", "fp8_e5m2"), ("bfloat16", "bf16", "float16", "half", "fp16")


def fields_named(name: str) -> list[str]:
    """Return the fields that engines other than vLLM name so, ``no_`` before those of the opposite;
    none where that is vLLM's name."""
    found = {names[name] for names in NAMES.values() if name in names} - {name}
    fields = {field.replace("!", "no_") for field in found if field.strip("!") in RUN_FIELDS}
    also = {"enable_expert_parallel"} if "experts" in found else set()
    also |= {"data_parallel_size"} if "attention_dp" in found else set()
    return sorted(fields | also)


#: Fields that stand for others: a launch line, and a file of TensorRT-LLM's options.
LAUNCH = ("engine_args", "extra_llm_api_options")


def with_launch(values: dict[str, Any]) -> dict[str, Any]:
    """Return field values with what their launch line and engine say, unless given: a whole line
    of a server is one co-located worker. Raises InputError as `launch_fields`."""
    values = launch_fields(values)
    engine = values.get("engine") or "vllm"
    if not isinstance(engine, str) or engine not in NAMES:
        return values  # the field itself says what is allowed
    return default_fields(values) | values


def change_launch(values: dict[str, Any], name: str, line: Any) -> None:
    """Give ``values`` in place what a launch line says, over all that they have but a topology.
    Raises InputError as `launch_fields`."""
    usual = values.get("engine") or "vllm"
    named = cut(str(line)).engine if name == "engine_args" else "trtllm"
    said = launch_fields({name: line, "engine": named or usual})
    if said["engine"] != usual:
        said.setdefault("engine_version", None)
    values |= {k: v for k, v in said.items() if k != "topology" or not values.get(k)}


def launch_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return field values with what their launch line says, unless given. Warns of options that
    are not simulated, and of those without effect, in a line each. Raises InputError for a line
    that cannot be read, or asks for what is not simulated."""
    values = dict(values)
    line, file = values.pop("engine_args", None), values.pop("extra_llm_api_options", None)
    parts = None if line is None else cut(str(line))
    if parts is not None and parts.engine:
        if values.get("engine") not in (None, parts.engine):
            problem = f"{values['engine']}, and the launch line is {parts.engine}'s"
            raise InputError("engine", problem, parts.engine)
        values["engine"] = parts.engine
        if parts.version:
            values.setdefault("engine_version", parts.version)
        if computes_all(str(line), parts):
            values.setdefault("topology", "1C")
    engine = values.get("engine") or ("trtllm" if file else "vllm")
    if not isinstance(engine, str) or engine not in NAMES:
        return values
    given: list[tuple[str, Any]] = []
    if file is not None:
        if engine != "trtllm":
            raise InputError("extra_llm_api_options", "are TensorRT-LLM's", "--engine trtllm")
        if not isinstance(file, str | os.PathLike):
            raise InputError("extra_llm_api_options", repr(file), "a YAML file")
        read = parse_yaml(
            read_text(file, "extra_llm_api_options"), "extra_llm_api_options", str(file)
        )
        if not isinstance(read, Mapping):
            raise InputError(
                "extra_llm_api_options", f"{file} does not hold a mapping", "option: value"
            )
        given += nested(read)
        values["engine"] = engine
    bench = "" if parts is None else parts.bench
    if parts is not None:
        given += options(parts, engine)
    found = _bench_fields(bench, given, values) if bench else _fields(engine, given, values)
    for role in ("prefill", "decode"):
        if role in found and isinstance(values.get(role), Mapping):
            found[role] = found[role] | values[role]
            values.pop(role)
    return found | values


def _fields(engine: str, given: list[tuple[str, Any]], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that options stand for; warns of those that stand for none.

    ``values``: fields of the run that are given by themselves."""
    fields: dict[str, Any] = {}
    speculative: dict[str, Any] = {}
    changes: list[str] = []
    idle: list[str] = []
    unknown: list[str] = []
    kernels: list[str] = []
    for name, value in given:
        if name not in NAMES[engine]:
            name, value = positive(engine, name, value)
        field = NAMES[engine].get(name, "")
        if name.startswith(("speculative_config.", "speculative_")) and not field:
            if has_no_effect(engine, name, value):
                idle.append(name)
            elif name in _DRAFTS or "." in name or not is_known(engine, name):
                speculative[name.removeprefix("speculative_config.")] = value
            else:
                (kernels if chooses_kernels(name) else changes).append(name)
        elif field.startswith("speculative."):
            speculative[field.removeprefix("speculative.")] = value
        elif field:
            if field.startswith("!"):
                field, value = field[1:], not value
            fields[field] = value
        elif name in ("config", "extra_llm_api_options") and isinstance(value, str):
            allowed = "--extra-llm-api-options FILE" if engine == "trtllm" else "its options here"
            raise InputError("engine_args", f"--{name} {value} is a file of options", allowed)
        elif engine == "vllm" and (
            name in ("O", "optimization_level")
            or _LEVEL.fullmatch(name)
            or (name == "compilation_config" and isinstance(value, int))
        ):
            if name == "O0" or value == 0:
                fields["enforce_eager"] = True
            else:
                idle.append(f"-{name}")
        elif name == "compilation_config.cudagraph_mode" and str(value).upper() in ("NONE", "0"):
            fields["enforce_eager"] = True
        elif name == "compilation_config.cudagraph_mode" and str(value).upper() == _OF_DECODING:
            fields["piecewise_cuda_graph"] = False
        elif engine == "vllm" and name.rpartition(".")[2] in _CAPTURED:
            sizes = re.findall(r"\d+", str(value))
            if not sizes:
                raise InputError("engine_args", f"--{name.replace('_', '-')} {value}", "sizes")
            fields["max_cudagraph_capture_size"] = max(map(int, sizes))
        elif name in ("moe_backend", "moe_runner_backend") and value in get_args(MoEBackend):
            fields["moe_backend"] = value
        elif name == "moe_runner_backend" and value in _WITHOUT_FUSION:
            fields["shared_experts_fusion"] = False
            kernels.append(name)
        elif not name.startswith(ENVIRONMENTS) and has_no_effect(engine, name, value):
            idle.append(name)
        elif name.startswith(ENVIRONMENTS) or is_known(engine, name):
            (kernels if chooses_kernels(name) else changes).append(name)
        else:
            unknown.append(name)
    if engine == "sglang" and speculative and "speculative_algorithm" not in speculative:
        idle += speculative  # it reads them beside an algorithm alone
    elif speculative:
        if engine == "sglang" and not _COUNTS & speculative.keys():
            speculative |= _usual_tree(speculative, values.get("model") or fields.get("model"))
        fields["speculative_config"] = speculative
    if isinstance(drafts := fields.get("speculative_config"), str) and drafts.startswith("{"):
        drafts = fields["speculative_config"] = parse_json(
            drafts, "engine_args", "--speculative-config"
        )
    if isinstance(drafts, dict):
        changes += [f"speculative_config.{name}" for name in _OF_DRAFTS if name in drafts]
        fields["speculative_config"] = {n: v for n, v in drafts.items() if n not in _OF_DRAFTS}
    _check_values(engine, fields)
    mode = fields.pop("performance", None)
    if mode == "throughput":
        _double(fields, values)
    elif mode is not None:
        (idle if mode == "balanced" else changes).append("performance_mode")
    _bounds(engine, fields, values, idle)
    _rebalance(engine, fields, values, idle)
    kind = str(fields.get("kv_cache_dtype", "auto")).lower()
    if kind in _EIGHT:
        fields["kv_cache_dtype"] = "fp8"
    elif kind in _SIXTEEN:
        fields["kv_cache_dtype"] = "bfloat16"
    elif kind != "auto":
        del fields["kv_cache_dtype"]
        changes.append(f"KV cache of {kind}")
    _check_weights(fields, values, idle)
    _offload(fields, values, idle, changes)
    backend = _backend(engine, fields)
    nodes, local = fields.pop("nodes", None), fields.pop("local", None)
    disaggregation = fields.pop("disaggregation", None)
    _spread(engine, fields, changes, idle)
    topology = values.get("topology", "8P16D")
    together = isinstance(topology, str) and topology.upper().endswith("C")
    if disaggregation not in (None, "null", "none"):
        if together:
            problem = f"--disaggregation-mode {disaggregation} in a cluster of {topology}"
            raise InputError("engine_args", problem, "--topology xPyD, such as 1P1D")
        idle.append("disaggregation_mode")
    _place(fields, nodes, local, idle)
    _send(engine, fields, backend, together, changes, idle)
    for name in unknown:
        close = difflib.get_close_matches(name, sorted(NAMES[engine]), 1, 0.85)
        if close:
            problem = f"--{name.replace('_', '-')} is not an option of {VERSIONS[engine]}"
            raise InputError("engine_args", problem, f"--{close[0].replace('_', '-')}")
    if unknown:
        names = ", ".join(_meant(engine, name) for name in sorted(unknown))
        text = f"of the launch line, no options of {VERSIONS[engine]}, so ignored: {names}"
        warnings.warn(EldrSimWarning(text), stacklevel=3)
    _warn_of(changes, idle, kernels)
    return fields


#: Lists of the sizes of steps that vLLM captures as CUDA graphs, by its options of all versions.
_CAPTURED = ("cudagraph_capture_sizes", "cuda_graph_sizes")
_OF_DECODING = "FULL_DECODE_ONLY"
#: Kernels of experts, beside TensorRT-LLM's, for which SGLang sets disable_shared_experts_fusion.
_WITHOUT_FUSION = ("flashinfer_cutedsl", "flashinfer_trtllm_routed")


def _usual_tree(speculative: Mapping[str, Any], model: Any) -> dict[str, int]:
    """Return the tree of drafts that SGLang chooses for a Llama or Grok where a line says none, as
    its ``_auto_choose_speculative_params`` does; three drafts in a row for all other models."""
    eagle = str(speculative["speculative_algorithm"]).lower() in ("eagle", "eagle3", "nextn")
    if not eagle or not re.search(r"llama(?!.?4)|grok", str(model).lower()):
        return {}
    return dict(zip(sorted(_COUNTS), (4, 8, 5), strict=True))


def _check_values(engine: str, found: dict[str, Any]) -> None:
    """Read numbers as vLLM's parser does (``32k``: 32,000, ``32K``: 32,768), and raise InputError
    for an option without its value; in place."""
    for name, value in list(found.items()):
        annotation: Any = int if name in _BOUNDS else None
        if name in RUN_FIELDS:
            annotation = RUN_FIELDS[name].annotation
        elif annotation is None:
            continue
        kinds = get_args(annotation) or (annotation,)
        if value is True and bool not in kinds and {int, float} & {*kinds}:
            raise InputError("engine_args", f"{name} has no value", "--option value ...")
        short = _SHORT_NUMBER.fullmatch(value) if isinstance(value, str) else None
        if (engine == "vllm" or name in _BOUNDS) and int in kinds and short is not None:
            base = 1000 if short[2].islower() else 1024
            found[name] = round(float(short[1]) * base ** ("kmgt".index(short[2].lower()) + 1))
    if engine == "sglang" and found.get("max_num_batched_tokens") == -1:
        problem = "--chunked-prefill-size -1: prompts without chunks are not simulated"
        raise InputError("engine_args", problem, "tokens of a chunk, such as 16384")
    if found.get("max_model_len") in ("auto", -1):  # as long as the KV cache allows
        del found["max_model_len"]


#: Numbers of a line that bound fields, by no name of a field.
_BOUNDS = {"scheduled_tokens": "max_num_batched_tokens", "active_seqs": "max_num_seqs",
           "kv_tokens": "", "prefill_tokens": "", "servers": ""}  # fmt: skip


def _gpu(values: Mapping[str, Any]) -> GPU:
    """Return the GPU of the run's values, or the default one."""
    return load_gpu(str(values.get("gpu") or "H100"))


def _double(found: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Double the bounds of a step that neither line nor run gives, as vLLM's throughput mode does
    (``arg_utils.py``); in place."""
    gpu = _gpu(values)
    usual = {
        "max_num_seqs": default_seats("vllm", gpu),
        "max_num_batched_tokens": default_budget("vllm", gpu, version=values.get("engine_version")),
    }
    found |= {name: 2 * n for name, n in usual.items() if name not in found | dict(values)}


def _bounds(engine: str, found: dict[str, Any], values: Mapping[str, Any], idle: list[str]) -> None:
    """Turn numbers that bound others, or count tokens or processes, into fields; in place."""
    given = {name: found.pop(name) for name in _BOUNDS if name in found}
    for name, bound in given.items():
        if isinstance(bound, bool) or not isinstance(bound, int):
            if bound not in (None, "None", "none", "null"):
                raise InputError("engine_args", f"{name}: {bound!r}", "a whole number")
            continue
        if field := _BOUNDS[name]:
            found[field] = min(bound, int(found.get(field, bound)))
        elif name == "kv_tokens":  # and one is vLLM's null block
            size = values.get("block_size") or found.get("block_size")
            usual = default_fields(dict(values) | {"engine": engine}).get("block_size", 16)
            found["num_gpu_blocks_override"] = bound // int(size or usual) + 1
        elif name == "servers" and bound > 0:  # of each server that the line starts
            workers = re.match(r"\d+", str(values.get("topology", "")))
            found["api_servers"] = bound * int(workers[0] if workers else 1)
        elif name == "prefill_tokens":
            chunk = int(found.get("max_num_batched_tokens", 16384))
            if bound < chunk:
                problem = f"--max-prefill-tokens {bound} below chunks of {chunk} tokens"
                raise InputError("engine_args", problem, f"--chunked-prefill-size {bound}")
            idle.append("max_prefill_tokens")


def _rebalance(
    engine: str, found: dict[str, Any], values: Mapping[str, Any], idle: list[str]
) -> None:
    """Turn an engine's load balancer of experts into moving experts; in place.

    vLLM's ``EPLBConfig`` rebalances every 3,000 steps by the last 1,000, beside the steps; SGLang
    every 1,000 by as many, between them. Both start with experts in their order."""
    names = ("eplb_interval", "eplb_window", "eplb_async")
    if not found.pop("eplb", False):
        idle += [f"{name} (EPLB is off)" for name in names if found.pop(name, None) is not None]
        return
    usual = (3000, 1000, True) if engine == "vllm" else (found.get(names[0], 1000),) * 2 + (False,)
    found |= {n: v for n, v in zip(names, usual, strict=True) if found.get(n) in (None, "None")}
    found.setdefault("expert_placement", "eplb:load=none")


def _warn_of(changes: list[str], idle: list[str], kernels: Iterable[str] = ()) -> None:
    """Warn of options that are not simulated, that have no effect, and that choose kernels, in a
    line each."""
    for names, what in (
        (changes, "not simulated of the launch line, and may change the answer"),
        (kernels, "of the launch line, kernels timed as those of the tables"),
        (idle, "of the launch line, without effect on the answer"),
    ):
        if names:
            text = f"{what}: {', '.join(sorted(set(names)))}"
            warnings.warn(EldrSimWarning(text), stacklevel=4)


def _meant(engine: str, name: str) -> str:
    """Return an unknown option with the one that was probably meant."""
    close = difflib.get_close_matches(name, sorted(OPTIONS[engine]), 1, 0.85)
    return name + (f" (did you mean {close[0]}?)" if close else "")


def _offload(
    found: dict[str, Any], values: Mapping[str, Any], idle: list[str], changes: list[str]
) -> None:
    """Turn KV caches in host memory into a KV tier behind the GPU's host link; in place.

    vLLM's ``--kv-offloading-size`` is GiB of all tensor-parallel ranks, SGLang's
    ``--hicache-size`` GB of each. Raises InputError where the size or the link is unknown."""
    allowed = "--kv-tier NAME:SIZE,load=RATE, and a launch line without it"
    gib, connector = found.pop("host_gib", None), found.pop("connector", None)
    size, write = found.pop("hicache_size", None), found.pop("hicache_write", None)
    words = f"{gib}GiB" if gib else ""
    if found.pop("hicache", False):
        if not size:
            raise InputError("engine_args", "--enable-hierarchical-cache without a size", allowed)
        words = f"{size * int(found.get('tensor_parallel_size', 1)):g}GB"
    elif size is not None or write is not None:
        idle.append("hicache (not enabled)")
    if connector is not None:
        config = parse_json(connector, "engine_args", "--kv-transfer-config")
        kind = str(config.get("kv_connector", "")) if isinstance(config, Mapping) else ""
        if any(word in kind for word in ("Offloading", "LMCache", "Store", "SharedStorage")):
            raise InputError("engine_args", f"the connector {kind} is not simulated", allowed)
        (idle if kind.startswith("Nixl") else changes).append("kv_transfer_config")
    if not words:
        return
    if values.get("kv_tier"):
        idle.append("KV offloading (--kv-tier says it)")
        return
    rate = _gpu(values).host_bandwidth
    if not rate:
        raise InputError("engine_args", "the bandwidth of the host link is unknown", allowed)
    rule = {"write_back": ",write=back", "write_through_selective": ",write=selective"}
    found["kv_tier"] = (f"host:{words},load={rate / 1e9:g}GB/s{rule.get(str(write), '')}",)


def _check_weights(found: dict[str, Any], values: Mapping[str, Any], idle: list[str]) -> None:
    """Check that the model's weights are of the type that ``--quantization`` asks for; in place."""
    asked = found.pop("weights", None)
    if asked in (None, "None", "none", False):
        return
    from eldr_sim.kernel_profiles.models import load_model

    word = str(asked).lower()
    name = str(values.get("model") or found.get("model") or "Qwen3-30B-A3B")
    try:
        dims = load_model(name)
    except InputError:
        return  # the field itself says what is wrong
    stored = {str(dims.expert_dtype), str(dims.linear_dtype)}
    bits = "4" if "4" in word or word in ("awq", "gptq", "awq_marlin", "gptq_marlin") else "8"
    if word == "modelopt":
        bits = "8"
    if stored == {"bfloat16"} or not any(bits in kind for kind in stored):
        allowed = "a model stored in this format, such as X-FP8, or the config.json of one"
        problem = (
            f"--quantization {asked}, but weights of {name} are {' and '.join(sorted(stored))}"
        )
        raise InputError("engine_args", problem, allowed)
    idle.append("quantization")


def _backend(engine: str, found: dict[str, Any]) -> str | None:
    """Return how tokens reach experts, taken out of the fields: ours, ``auto`` or None."""
    if engine == "vllm":
        word = found.pop("all2all", None)
        if word is not None and word not in VLLM_BACKENDS:
            problem = f"--all2all-backend {word} is not simulated"
            raise InputError("engine_args", problem, ", ".join(VLLM_BACKENDS))
        return None if word is None else VLLM_BACKENDS[word]
    word, mode = found.pop("a2a", None), found.pop("deepep_mode", "auto")
    if word in (None, "none", "None"):
        return None
    if word == "pplx":
        return "pplx"
    if word != "deepep" or mode not in SGLANG_MODES:
        problem = f"--moe-a2a-backend {word}" + (f", mode {mode}" if word == "deepep" else "")
        allowed = f"none, deepep with --deepep-mode {', '.join(SGLANG_MODES)}, pplx"
        raise InputError("engine_args", f"{problem} is not simulated", allowed)
    return SGLANG_MODES[mode]


def _place(found: dict[str, Any], nodes: Any, local: Any, idle: list[str]) -> None:
    """Say how many GPUs a node has, by the nodes of a worker or its engines on one; in place."""
    per_engine = int(found.get("tensor_parallel_size", 1)) * int(
        found.get("pipeline_parallel_size", 1)
    )
    engines = int(found.get("data_parallel_size", 1))
    if nodes is not None and int(nodes) > 1:
        gpus = per_engine * engines
        if gpus % int(nodes):
            problem = f"--nnodes {nodes}, but {gpus} GPUs of a worker"
            raise InputError("engine_args", problem, "a number of nodes that divides them")
        found["gpus_per_node"] = gpus // int(nodes)
    elif local is not None and 0 < int(local) < engines:
        found["gpus_per_node"] = per_engine * int(local)
    elif nodes is not None or local is not None:
        idle.append("nnodes" if nodes is not None else "data_parallel_size_local")


def _send(
    engine: str,
    found: dict[str, Any],
    backend: str | None,
    together: bool,
    changes: list[str],
    idle: list[str],
) -> None:
    """Set how tokens reach the experts that engines share; in place."""
    if backend is None:
        return
    shares = int(found.get("data_parallel_size", 1)) > 1
    if engine == "vllm":
        if not shares or not found.get("enable_expert_parallel"):
            idle.append("all2all_backend")  # FusedMoEParallelConfig.use_all2all_kernels
            return
    elif not shares:
        problem = "DeepEP between the GPUs of one attention engine is not simulated"
        allowed = "--enable-dp-attention --dp-size N beside it, or --moe-a2a-backend none"
        raise InputError("engine_args", problem, allowed)
    else:
        found["enable_expert_parallel"] = True  # SGLang: ep_size is then tp_size
    if backend != "auto":
        found["all2all_backend"] = backend
        return
    found["all2all_backend"] = "deepep_ll"
    if together:
        changes.append("DeepEP's normal mode for prompts (taken as low_latency, as decoding)")
    else:
        found["prefill"] = {"all2all_backend": "deepep_ht"}


def _bench_fields(
    bench: str, given: list[tuple[str, Any]], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the load of a benchmark's line as fields; raises InputError.

    ``--random-range-ratio R``: vLLM draws lengths from N (1 - R) to N (1 + R), SGLang from R N to
    N (``bench_serving.py``, ``sample_random_requests``), which stands here as the range around its
    middle."""
    bench_fields: dict[str, Any] = {}
    changes: list[str] = []
    idle: list[str] = []
    ratio: Any = None
    for name, value in given:
        if name == "random_range_ratio":
            ratio = value
        elif name == "model" and values.get("model") is None:
            bench_fields["model"] = value
        elif name in BENCH:
            bench_fields[BENCH[name]] = value
        elif name in _OF_BENCH or name in WITHOUT_EFFECT:
            if name == "dataset_name" and value not in ("random", "random-ids"):
                problem = f"--dataset-name {value} of a benchmark's line"
                raise InputError("engine_args", problem, "random; --workload FILE for a data set")
            idle.append(name)
        else:
            changes.append(name)
    lengths = [name for name in ("input_len", "output_len") if name in bench_fields]
    if bench == "vllm" and ratio is not None:
        bench_fields["random_range_ratio"] = ratio
    if bench == "sglang" and lengths:
        share = 0.0 if ratio is None else ratio
        if isinstance(share, str) or not 0 <= share <= 1:
            raise InputError("engine_args", f"--random-range-ratio {share}", "0 to 1, as SGLang's")
        bench_fields["random_range_ratio"] = min((1.0 - share) / (1.0 + share), 0.999)
        for name in lengths:
            bench_fields[name] = max(1, round(int(bench_fields[name]) * (1.0 + share) / 2.0))
    _warn_of(changes, idle)
    return bench_fields


def _spread(engine: str, found: dict[str, Any], changes: list[str], idle: list[str]) -> None:
    """Turn SGLang's and TensorRT-LLM's words for data-parallel attention into vLLM's; in place."""
    experts, attention = int(found.pop("experts", 1) or 1), found.pop("attention_dp", False)
    width = int(found.get("tensor_parallel_size", 1))
    engines = int(found.get("data_parallel_size", width if engine == "trtllm" else 1))
    if not isinstance(attention, bool):  # SGLang's newer word says how many engines
        attention, engines = int(attention) > 1, int(attention)
    if attention and engines == 1 and engine == "sglang":
        idle.append("enable_dp_attention (of one engine)")
    if experts > 1:
        found["enable_expert_parallel"] = True
        if experts < width:
            changes.append(f"experts spread over {experts} GPUs (taken as over all)")
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
    elif "data_parallel_size" in found and engines > 1:
        del found["data_parallel_size"]
        changes.append("data parallelism without attention's (give more workers)")


#: Of vLLM's speculative configuration, what changes no acceptance here.
_OF_DRAFTS = ("prompt_lookup_max", "prompt_lookup_min", "max_model_len", "revision", "quantization",
              "draft_tensor_parallel_size", "tensor_parallel_size", "enforce_eager",
              "disable_padded_drafter_batch", "attention_backend", "moe_backend")  # fmt: skip
#: Of SGLang's drafts, the options that `speculative` reads.
_DRAFTS = (
    "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps",
    "speculative_eagle_topk", "speculative_num_draft_tokens",
)  # fmt: skip
_COUNTS = frozenset(_DRAFTS[2:])
