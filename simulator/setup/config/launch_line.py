"""The parts of a launch line: environment, container, program, model, and its options."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from eldr_sim.errors import InputError
from eldr_sim.inputs import parse_json
from eldr_sim.simulator.setup.config.launch_options import BENCH, NAMES, SHORT, full_name

_ALLOWED = "options alone, vllm serve, python -m sglang.launch_server, trtllm-serve, or a benchmark"
_BENCHES = "vllm bench serve, python -m sglang.bench_serving"
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
_CONTAINERS = ("docker", "podman", "nerdctl")
#: Images of engines, and where their tags name a version.
_IMAGES = {
    "vllm": re.compile(r"(?:^|/)vllm(?:-openai)?(?::v?(\d+\.\d+(?:\.\d+)?)?\S*)?$"),
    "sglang": re.compile(r"(?:^|/)sglang(?::v?(\d+\.\d+(?:\.\d+)?)?\S*)?$"),
    "trtllm": re.compile(r"(?:^|/)tensorrt-llm(?:/\w+)?(?::v?(\d+\.\d+(?:\.\d+)?)?\S*)?$"),
}
#: Words before the program that say nothing.
_BEFORE = ("env", "exec", "nohup", "sudo", "time", "export")
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*$|-m$|(?:.*/)?(?:ba)?sh$|-c$")
#: Programs that start an engine, and those that send it a load.
_ENGINES = {
    "vllm": ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server"),
    "sglang": ("sglang.launch_server",),
    "trtllm": ("trtllm-serve",),
}
#: What no simulated run answers to, of programs that are known.
_OTHERS = re.compile(r"(?:.*/)?(?:sglang[._]\S+|vllm\.\S+|trtllm-\S+|tensorrt_llm\S*)$")
#: Options whose JSON is read as options by dot paths.
_IN_JSON = ("eplb_config", "compilation_config")
#: Variables of vLLM's environment that were options, too.
_OF_ENVIRONMENT = {"VLLM_ALL2ALL_BACKEND": "all2all_backend"}
#: How those of engines begin, and words of such as change no answer.
ENVIRONMENTS = ("VLLM_", "SGLANG_", "SGL_", "TRTLLM_", "TLLM_")
_IDLE_VARIABLES = ("LOG", "HOST", "PORT", "CACHE", "API_KEY", "USAGE", "TIMEOUT", "MODELSCOPE",
                   "MULTIPROC", "USE_V1", "DEBUG", "TRACE", "METRICS")  # fmt: skip


class Line(NamedTuple):
    """A launch line, cut up."""

    engine: str  #: ``vllm``, ``sglang`` or ``trtllm``; empty where options stand alone
    version: str  #: of the container's image; empty if that does not say
    bench: str  #: whose benchmark it starts, ``vllm`` or ``sglang``; empty for an engine
    model: str  #: that follows the program; empty if none does
    environment: dict[str, str]
    options: list[str]


def cut(line: str) -> Line:
    """Return the parts of a launch line; raises InputError where no engine known starts."""
    try:
        words = shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise InputError("engine_args", f"{error}", "--option value ...") from None
    environment: dict[str, str] = {}
    engine = version = ""

    def assigned() -> None:
        while words and (_ASSIGNED.match(words[0]) or words[0] in _BEFORE):
            name, equals, value = words.pop(0).partition("=")
            if equals:
                environment[name] = value

    assigned()
    if words and words[0] in _CONTAINERS:
        engine, version = _container(words, environment)
        assigned()
    before: list[str] = []
    while words and (words[0] in ("-m", "-c") or not words[0].startswith("-")):
        before.append(words.pop(0))
    named = [word for word in before if not _PYTHON.match(word)]
    if not named:
        return Line(engine, version, "", "", environment, words)
    program, *rest = named
    bench = _bench(program, rest)
    if bench:
        return Line("", "", bench, "", environment, words)
    started = _started(program, rest)
    if not started:
        if engine and not rest:  # the image starts its engine: a model follows
            return Line(engine, version, "", program, environment, words)
        raise InputError("engine_args", f"{program!r} does not start a known engine", _ALLOWED)
    if engine and started != engine:
        raise InputError("engine_args", f"{program!r} in an image of {engine}", "one engine")
    if rest[:1] == ["serve"]:
        rest = rest[1:]
    if len(rest) > 1:
        raise InputError(
            "engine_args", f"{rest[1]!r} does not follow an option", "--option value ..."
        )
    return Line(started, version, "", "".join(rest), environment, words)


def computes_all(line: str, parts: Line) -> bool:
    """Whether a line, cut into parts, starts a server that computes prompts and answers: it is not
    options alone, nor one of those that hand over to others."""
    apart = "disaggregation" in line.replace("disaggregation-mode null", "") or "kv_role" in line
    return bool(parts.engine) and (not apart or "kv_both" in line)


def _container(words: list[str], environment: dict[str, str]) -> tuple[str, str]:
    """Return engine and version of an image; takes all up to it from the words."""
    program = words[0]
    for at, word in enumerate(words):
        if at and words[at - 1] in ("-e", "--env") and "=" in word:
            name, _, value = word.partition("=")
            environment[name] = value
        for engine, image in _IMAGES.items():
            match = image.search(word)
            spelled = ("/" in word or ":" in word) and ":/" not in word and "=" not in word
            if match and spelled and at > 1:
                del words[: at + 1]
                return engine, match[1] or ""
    problem = f"{program} does not start a known engine image"
    raise InputError("engine_args", problem, "vllm/vllm-openai, lmsysorg/sglang, tensorrt-llm")


def _bench(program: str, rest: list[str]) -> str:
    """Return whose benchmark of a server a program is, or an empty text."""
    name = program.rpartition("/")[2]
    if name in ("sglang.bench_serving", "bench_serving.py", "bench_serving"):
        return "sglang"
    if name in ("benchmark_serving.py", "benchmark_serving"):
        return "vllm"
    if name == "vllm" and rest[:1] == ["bench"]:
        if rest[1:2] != ["serve"]:
            problem = f"vllm {' '.join(rest[:2])} does not send requests to a server"
            raise InputError("engine_args", problem, _BENCHES)
        return "vllm"
    return ""


def _started(program: str, rest: list[str]) -> str:
    """Return the engine that a program starts, or an empty text; raises InputError where a known
    program starts none."""
    name = program.rpartition("/")[2]
    for engine, programs in _ENGINES.items():
        if name in programs:
            return engine
    if name == "serve" and len(rest) < 2:
        return "vllm"
    if name in ("vllm", "sglang"):
        if rest and rest[0] != "serve":
            problem = f"{name} {rest[0]} does not start a server"
            raise InputError("engine_args", problem, f"{name} serve")
        return name
    if _OTHERS.match(name):
        raise InputError("engine_args", f"{name} starts a server that is not simulated", _ALLOWED)
    return ""


def nested(given: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield options of a file by their dot paths."""
    for name, value in given.items():
        path = f"{above}{name}"
        if isinstance(value, Mapping) and path != "speculative_config":
            yield from nested(value, f"{path}.")
        elif path == "cuda_graph_config" and value is None:
            yield "enforce_eager", True
        else:
            yield path, value


def options(line: Line, engine: str) -> Iterator[tuple[str, Any]]:
    """Yield the options of a line, and what its environment says instead of one."""
    bench, words = line.bench, list(line.options)
    connector: dict[str, Any] = {}
    if line.model:
        yield "model", line.model
    if not bench:
        for name, value in line.environment.items():
            if engine == "vllm" and (name in _OF_ENVIRONMENT or name in NAMES["vllm"]):
                yield _OF_ENVIRONMENT.get(name, name), _value(value)
            elif (engine, name, value) == ("vllm", "VLLM_USE_V1", "0"):
                raise InputError("engine_args", "VLLM_USE_V1=0 is not simulated", "vLLM's V1")
            elif name.startswith(ENVIRONMENTS) and not any(w in name for w in _IDLE_VARIABLES):
                yield name, value
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            raise InputError(
                "engine_args", f"{word!r} does not follow an option", "--option value ..."
            )
        name, equals, value = word.lstrip("-").partition("=")
        if not equals and words and not _is_option(words[0]):
            value, equals = words.pop(0), "="
        while words and not _is_option(words[0]):
            value += " " + words.pop(0)
        name = name.replace("-", "_")
        if word.startswith("--"):
            name = _in_full(name, engine, bench)
        elif engine == "vllm" and not bench:
            head, dot, rest = name.partition(".")
            name = SHORT.get(head, head) + dot + rest
            if head == "O" and (dot or value.startswith("{")):  # its name before -cc
                name = _IN_JSON[-1] + dot + rest
        if name.startswith("kv_transfer_config."):
            connector[name.partition(".")[2]] = _value(value)
        elif name in _IN_JSON and value.startswith("{"):
            config = parse_json(value, "engine_args", f"--{name.replace('_', '-')}")
            yield from nested(config, f"{name}.") if isinstance(config, Mapping) else ()
        else:
            yield name, _value(value) if equals else True
    if connector:
        yield "kv_transfer_config", json.dumps(connector)


def _in_full(name: str, engine: str, bench: str) -> str:
    """Return an option's whole name; raises InputError where it may be several.

    TensorRT-LLM's parser takes no abbreviations."""
    if engine == "trtllm" and not bench:
        return name
    fields = BENCH | {"random_range_ratio": "ratio"} if bench else NAMES[engine]
    head, dot, rest = name.partition(".")
    whole = full_name(head, bench or engine, bool(bench), fields)
    if isinstance(whole, str):
        return whole + dot + rest
    raise InputError("engine_args", f"--{name} may be {' or '.join(whole)}", "the whole option")


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
