"""Options of engines' launch lines and of benchmarks' by what they do to the answer.

``launch_options.json`` holds the options of the parsers of vLLM 0.33.0 (``vllm serve``, ``vllm
bench serve``) and SGLang 0.5.23 (``launch_server``, ``bench_serving``), read from these releases,
which of them have no effect here, those of earlier versions that change the answer, words of
options without effect and of those that choose kernels, the fields that options stand for, and
what is refused."""

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
#: Fields by each engine's names, and by those of benchmarks; ``!``: of the opposite.
NAMES: dict[str, dict[str, str]] = _LISTS["names"]
BENCH: dict[str, str] = _LISTS["bench"]
#: What works another way than anything simulated, and what to write instead.
_REFUSED = {name: way for way, names in _LISTS["refused"].items() for name in names}
#: The ways out of two of these: other dimensions of a model, and parallelism over a context.
_MODEL = "--model FILE, a config.json with these values"
_CONTEXT = "1, and --tensor-parallel-size or --data-parallel-size"
#: The values of options with a mechanism for which engines do what is simulated here.
_SIMULATED: dict[str, list[str]] = _LISTS["simulated"]
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
    if _REFUSED.get(name) == _MODEL and _of_positions(inner or value):
        return False
    values = _SIMULATED.get(name, [])
    if name in _REFUSED or values:
        off = value in (0, False, None, "", "none", "None", "null", "{}")
        off &= name not in _ON
        off |= str(value).lower() in map(str.lower, values)
        way_out = _REFUSED.get(name) or " or ".join(values)
        if off or (value == 1 and way_out == _CONTEXT):
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
