"""How a launch line begins: environment, container, program, model. What follows are options."""

import re
import shlex
from typing import NamedTuple

from eldr_sim.errors import InputError

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
