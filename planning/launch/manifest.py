"""Manifests of deployments as configurations of a run: values of vLLM's production stack and of
llm-d's modelservice, Dynamo's DynamoGraphDeployment, and docker compose."""

import re
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

from eldr_sim.errors import EldrSimWarning, InputError
from eldr_sim.inputs import parse_yaml, read_text
from eldr_sim.kinds import AnyPath
from eldr_sim.planning.launch.deployment import REPLACE
from eldr_sim.planning.launch.engine_files import VLLM_BACKENDS
from eldr_sim.simulator.setup.config.launch import with_launch
from eldr_sim.simulator.setup.config.pools import Pool

#: What begins an engine's command, and the engine.
_ENGINES = {
    "vllm": "vllm", "vllm.entrypoints.openai.api_server": "vllm", "dynamo.vllm": "vllm",
    "sglang.launch_server": "sglang", "sglang_router.launch_server": "sglang", "sglang": "sglang",
    "dynamo.sglang": "sglang", "trtllm-serve": "trtllm", "dynamo.trtllm": "trtllm",
}  # fmt: skip
_IMAGES = {"vllm": "vllm", "sglang": "sglang", "tensorrt": "trtllm", "trtllm": "trtllm"}
#: Options that say which part of a deployment an engine is, and are no engine's settings.
_PLACES = {
    "--port", "--host", "--connector", "--router-mode", "--served-model-name", "--model-name",
    "--kv-transfer-config", "--kv-events-config", "--disaggregation-mode", "--namespace",
    "--disaggregation-transfer-backend", "--is-prefill-worker", "--is-decode-worker",
    "--kv_transfer_config", "--api-key", "--download-dir", "--uvicorn-log-level",
    "--disaggregation-bootstrap-port", "--disaggregation-strategy",
}  # fmt: skip
_BACKENDS = {own: name for name, own in VLLM_BACKENDS.items()}
_MODELS = ("--model", "--model-path", "--model_path")
#: Policies that routers of others name.
_POLICIES = {
    "roundrobin": "round_robin", "round-robin": "round_robin", "random": "random",
    "least-loaded": "jsq", "session": "session",
}  # fmt: skip
#: What ends a command in a shell.
_SHELL = re.compile(r"[&|;]|\d?>")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)|\$\((\w+)\)")
#: A value that Helm takes from the same file, and all that is filled in elsewhere.
_VALUE = re.compile(r'"?\{\{-? *\.Values\.([\w.]+) *-?\}\}"?')
_ELSEWHERE = re.compile(r"\$|\{\{")


@dataclass(frozen=True)
class Role:
    """Engines of one kind. ``place``: ``prefill``, ``decode`` or ``serve``; ``replicas``: workers;
    ``words``: options of an engine's command line; ``gpus``: of a worker, as resources say."""

    name: str
    place: str
    replicas: int
    engine: str
    words: tuple[str, ...]
    model: str | None = None
    gpus: int | None = None


@dataclass
class Manifest:
    """What a manifest says. ``format``: its kind; ``left_out``: what it says and is not simulated;
    ``values``: fields of a run."""

    format: str
    roles: list[Role]
    left_out: list[str] = field(default_factory=list)
    policy: str | None = None
    values: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yield what was read and what was left out, for the terminal."""
        for role in self.roles:
            options = shlex.join(role.words)
            what = f"{role.replicas} x {role.engine} ({role.place})"
            yield f"Read of {self.format}: {role.name}: {what}{': ' * bool(options)}{options}"
        for text in self.left_out:
            yield f"Left out of {self.format}: {text}"


def read_manifest(path: AnyPath) -> Manifest:
    """Read a deployment; raises InputError for a file of no known kind, or engines that no run has
    together."""
    text = read_text(path, "from_manifest")
    try:
        documents = [
            parse_yaml(part, "from_manifest", str(path))
            for part in re.split(r"^---[ \t]*(?:#.*)?$", text, flags=re.MULTILINE)
        ]
    except InputError:
        if re.search(r"^[^#\n]*\{\{", text, re.MULTILINE) is None:
            raise
        problem = f"{path} is a Helm template"
        raise InputError("from_manifest", problem, "values, or what helm template prints") from None
    for document in documents:
        if isinstance(document, Mapping):
            for fits, read in _KINDS:
                if fits(document):
                    return _finished(read(_rendered(document, document)))
    known = "values of production-stack or llm-d modelservice, DynamoGraphDeployment, compose"
    raise InputError("from_manifest", f"{path} is not a known kind of deployment file", known)


def _rendered(part: Any, values: Mapping[str, Any]) -> Any:
    """Return a part of Helm's values with what it takes from other values; the rest stays."""

    def value(match: re.Match[str]) -> str:
        found: Any = values
        for name in match[1].split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return match[0] if found is None or isinstance(found, Mapping | list) else str(found)

    if isinstance(part, Mapping):
        return {key: _rendered(each, values) for key, each in part.items()}
    if isinstance(part, list):
        return [_rendered(each, values) for each in part]
    return _VALUE.sub(value, part) if isinstance(part, str) else part


def _finished(found: Manifest) -> Manifest:
    """Return a manifest with the fields of a run."""
    roles = [role for role in found.roles if role.replicas > 0]
    if not roles:
        raise InputError("from_manifest", f"{found.format} has no engine", "an engine or more")
    counts: dict[str, int] = {}
    fields: dict[str, dict[str, Any]] = {}
    for role in roles:
        counts[role.place] = counts.get(role.place, 0) + role.replicas
        own = _fields(role, found.left_out)
        if fields.setdefault(role.place, own) != own:
            problem = f"engines of {role.name} differ from others of {role.place}"
            raise InputError("from_manifest", problem, "a file of pools (--topology FILE)")
    if ("serve" in counts) == (len(counts) > 1) or set(counts) == {"prefill"}:
        places = ", ".join(sorted(counts))
        raise InputError("from_manifest", f"engines of {places}", "prefill and decode, or neither")
    values = found.values
    if "serve" in counts:
        values |= {"topology": f"{counts['serve']}C"} | fields["serve"]
    else:
        values["topology"] = f"{counts['prefill']}P{counts['decode']}D"
        values |= _apart(fields)
    if found.policy is not None:
        values["policy"] = found.policy
    if "gpu" not in values:
        found.left_out.append("which GPU (--gpu)")
    found.left_out.append("the load (--request-rate, --workload)")
    return found


def _apart(fields: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return fields of two pools: those that pools have of their own, and those of the run."""
    values: dict[str, Any] = {}
    for place, own in fields.items():
        values[place] = {k: v for k, v in own.items() if k in Pool.model_fields}
        for name, value in own.items():
            if name in Pool.model_fields:
                continue
            if values.setdefault(name, value) != value:
                problem = f"{name} is {values[name]} and {value}"
                raise InputError("from_manifest", problem, "one value for prefill and decode")
    same = set(values["prefill"]) & set(values["decode"])
    for name in [n for n in same if values["prefill"][n] == values["decode"][n]]:
        values[name] = values["decode"].pop(name)
        del values["prefill"][name]
    return values


def _fields(role: Role, left_out: list[str]) -> dict[str, Any]:
    """Return what a role's options say; adds what is not simulated to ``left_out``."""
    words, model, backend = [], role.model, None
    if model is not None and _ELSEWHERE.search(model):
        left_out.append(f"{role.name}: model {model} (a variable)")
        model = None
    todo = list(role.words)
    while todo:
        word = todo.pop(0)
        name, equals, value = word.partition("=")
        taken = [value] if equals else []
        while not equals and todo and not _is_option(todo[0]):
            taken.append(todo.pop(0))
        if name in _MODELS or not name.startswith("-"):
            named = taken[0] if name.startswith("-") and taken else name
            if _ELSEWHERE.search(named):
                left_out.append(f"{role.name}: {word} {named}".strip() + " (a variable)")
            elif REPLACE not in named:
                model = model or named
        elif name == "--served-model-name" and taken and model is None:
            model = taken[0]
        elif name == "--all2all-backend" and taken and taken[0] in _BACKENDS:
            backend = _BACKENDS[taken[0]]
        elif name not in _PLACES:
            if any(map(_ELSEWHERE.search, taken)):
                left_out.append(f"{role.name}: {name} {' '.join(taken)} (a variable)")
            else:
                words += [name, *taken]
    line = {"engine": role.engine, "engine_args": shlex.join(words)}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", EldrSimWarning)
        fields = with_launch(line if words else {"engine": role.engine})
    usual = with_launch({"engine": role.engine})
    left_out += [f"{role.name}: {str(each.message).partition(': ')[2]}" for each in said]
    fields = {k: v for k, v in fields.items() if usual.get(k) != v or k == "engine"}
    if model is not None:
        fields["model"] = _model(model)
    if backend is not None:
        fields["all2all_backend"] = backend
    used = prod(
        int(fields.get(f"{kind}_parallel_size", 1)) for kind in ("tensor", "data", "pipeline")
    )
    if role.gpus is not None and role.gpus != used:
        left_out.append(f"{role.name}: asks for {role.gpus} GPUs and uses {used}")
    return fields


def _model(name: str) -> str:
    """Return this package's name of a model of Hugging Face's, or the name as it is."""
    from eldr_sim.kernel_profiles.models import list_models

    known = {one.lower(): one for one in list_models()}
    plain = name.removeprefix("hf://").rstrip("/").rpartition("/")[2]
    for end in ("", "-instruct", "-fp8", "-instruct-fp8", "-bf16", "-chat"):
        if plain.lower().endswith(end) and (short := plain.lower().removesuffix(end)) in known:
            return known[short]
    return name


def _is_option(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()


def _place(words: Sequence[str], hint: str = "") -> str:
    """Return which part of a deployment an engine is, by its options."""
    line = " ".join(words)
    if "--is-prefill-worker" in words or "kv_producer" in line:
        return "prefill"
    if "--is-decode-worker" in words or "kv_consumer" in line:
        return "decode"
    mode = re.search(r"--disaggregation-mode[= ](prefill(?!_and)|decode)\b", line)
    return mode[1] if mode else hint or "serve"


def _command(container: Mapping[str, Any], hint: str = "") -> tuple[str, tuple[str, ...]] | None:
    """Return the engine of a container and its options; None where it runs none."""
    words, known = [], _environment(container)
    for name in ("entrypoint", "command", "args"):
        part = container.get(name) or []
        words += shlex.split(_filled(part, known)) if isinstance(part, str) else [
            _filled(str(word), known) for word in part
        ]  # fmt: skip
    if len(words) > 2 and words[0].rpartition("/")[2] in ("sh", "bash"):
        script = next((word for word in words[1:] if not word.startswith("-")), "")
        words = shlex.split(script.replace("\\\n", " "), comments=True)
    for at, word in enumerate(words):
        engine = _ENGINES.get(word.rpartition("/")[2])
        if engine is not None:
            options = words[at + 1 :]
            if options[:1] == ["serve"]:
                options = options[1:]
            ends = [i for i, option in enumerate(options) if _SHELL.match(option)]
            return engine, tuple(options[: ends[0]] if ends else options)
    image = str(container.get("image", "")).lower()
    engine = hint or next((e for name, e in _IMAGES.items() if name in image), "")
    if engine and (hint or any(word in _MODELS or word.startswith("--") for word in words)):
        return engine, tuple(words)
    return None


def _environment(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that Kubernetes sets in a container."""
    listed = container.get("env") or []
    return {str(each["name"]): str(each["value"]) for each in listed
            if isinstance(each, Mapping) and "name" in each and "value" in each}  # fmt: skip


def _filled(text: str, known: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a text with its variables as ``known``, or their defaults; others stay."""

    def value(match: re.Match[str]) -> str:
        usual = match[0] if match[2] is None else match[2]
        return known.get(match[1] or match[3] or match[4], usual)

    return _VARIABLE.sub(value, text)


def _gpu(found: Manifest, selector: Any) -> None:
    """Note the GPU that a node selector names, the first one."""
    from eldr_sim.kernel_profiles.gpus import list_gpus

    words = set(
        re.findall(r"[a-z0-9]+", " ".join(map(str, _mapping(selector, "").values())).lower())
    )
    for gpu in list_gpus():
        if gpu.lower() in words:
            found.values.setdefault("gpu", gpu)


def _count(value: Any, name: str, usual: int = 1) -> int:
    if value is None:
        return usual
    try:
        return int(_filled(str(value)))
    except ValueError:
        raise InputError("from_manifest", f"{name} is {value!r}", "a whole number") from None


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError("from_manifest", f"{name} is not a mapping", "name: value")
    return value


def _list(value: Any, name: str) -> list[Mapping[str, Any]]:
    if not isinstance(value or [], list):
        raise InputError("from_manifest", f"{name} is not a list", "a list")
    return [_mapping(each, f"an item of {name}") for each in value or []]


def _production_stack(document: Mapping[str, Any]) -> Manifest:
    """Read values of vLLM's production stack: ``servingEngineSpec.modelSpec``."""
    manifest, spec = Manifest("vLLM production-stack", []), document["servingEngineSpec"]
    options = {
        "tensorParallelSize": "--tensor-parallel-size", "maxModelLen": "--max-model-len",
        "pipelineParallelSize": "--pipeline-parallel-size", "maxNumSeqs": "--max-num-seqs",
        "gpuMemoryUtilization": "--gpu-memory-utilization", "dtype": "--dtype",
        "maxNumBatchedTokens": "--max-num-batched-tokens",
    }  # fmt: skip
    models = _list(_mapping(spec, "servingEngineSpec").get("modelSpec"), "modelSpec")
    for each in models:
        name, config = str(each.get("name")), _mapping(each.get("vllmConfig"), "vllmConfig")
        words: list[str] = []
        for key, value in config.items():
            if key in options:
                words += [options[key], str(value)]
            elif key == "enablePrefixCaching":
                words.append("--enable-prefix-caching" if value else "--no-enable-prefix-caching")
            elif key not in ("extraArgs", "v1", "enableChunkedPrefill"):
                manifest.left_out.append(f"{name}: vllmConfig.{key}")
        words += [_filled(str(word)) for word in config.get("extraArgs") or ()]
        cache = _mapping(each.get("lmcacheConfig"), "lmcacheConfig")
        if cache.get("enabled") and not cache.get("kvRole"):
            manifest.left_out.append(f"{name}: lmcacheConfig (--kv-tier says what a tier is)")
        _gpu(manifest, each.get("nodeSelector"))
        gpus = each.get("requestGPU")
        if isinstance(gpus, float) and not gpus.is_integer():
            manifest.left_out.append(f"{name}: requestGPU {gpus:g} (a whole one)")
            gpus = None
        gpus = None if gpus is None else _count(gpus, "requestGPU")
        replicas = _count(each.get("replicaCount"), "replicaCount")
        ray = _mapping(each.get("raySpec"), "raySpec")
        if ray.get("enabled"):  # one engine over the nodes of a Ray cluster
            head = _count(_mapping(ray.get("headNode"), "headNode").get("requestGPU"), "requestGPU")
            gpus, replicas = None if gpus is None else gpus * replicas + head, 1
        place, model = _place([*words, str(cache.get("kvRole"))]), each.get("modelURL")
        role = Role(name, place, replicas, "vllm", tuple(words), model and str(model), gpus)
        manifest.roles.append(role)
    if len({role.model for role in manifest.roles}) > 1:
        raise InputError("from_manifest", "several models", "one model")
    _policy(manifest, _mapping(document.get("routerSpec"), "routerSpec").get("routingLogic"))
    return manifest


def _policy(found: Manifest, name: Any) -> None:
    if name is None:
        return
    policy = _POLICIES.get(str(name))
    if policy is None:
        found.left_out.append(f"routing {name} (--policy says how requests are routed)")
    else:
        found.policy = policy


def _llm_d(document: Mapping[str, Any]) -> Manifest:
    """Read values of llm-d's modelservice: ``prefill`` and ``decode``."""
    manifest = Manifest("llm-d modelservice", [])
    artifacts = _mapping(document.get("modelArtifacts"), "modelArtifacts")
    model = artifacts.get("name") or artifacts.get("uri")
    prefill = _mapping(document.get("prefill"), "prefill")
    apart = bool(prefill) and prefill.get("create", True) and prefill.get("replicas", 1)
    for place in ("prefill", "decode"):
        spec = _mapping(document.get(place), place)
        if not spec or not spec.get("create", True):
            continue
        _gpu(manifest, spec.get("nodeSelector"))
        parallel = _mapping(spec.get("parallelism"), "parallelism")
        words: list[str] = []
        for key, option in (("tensor", "tensor"), ("tensorParallel", "tensor"),
                            ("data", "data"), ("pipeline", "pipeline")):  # fmt: skip
            if _count(parallel.get(key), key) > 1:
                words += [f"--{option}-parallel-size", str(parallel[key])]
        containers = _list(spec.get("containers"), "containers")
        commands = [_command(one, "vllm" if n == 0 else "") for n, one in enumerate(containers)]
        given = [command for command in commands if command is not None]
        engine, options = given[0] if given else ("vllm", ())
        replicas = _count(spec.get("replicas"), "replicas")
        where, name = (place if apart else "serve"), None if model is None else str(model)
        manifest.roles.append(Role(place, where, replicas, engine, (*words, *options), name))
    manifest.left_out.append("plugins of the endpoint picker (--policy llmd is their usual rule)")
    return manifest


def _dynamo(document: Mapping[str, Any]) -> Manifest:
    """Read a DynamoGraphDeployment, of ``v1beta1`` (components) or ``v1alpha1`` (services)."""
    manifest, spec = Manifest("DynamoGraphDeployment", []), _mapping(document.get("spec"), "spec")
    listed = _list(spec.get("components"), "components")
    components = [(str(each.get("name")), each) for each in listed]
    services = _mapping(spec.get("services"), "services")
    components += [(str(name), _mapping(each, str(name))) for name, each in services.items()]
    backend = str(spec.get("backendFramework") or "vllm")
    for name, each in components:
        pod = _mapping(each.get("podTemplate") or each.get("extraPodSpec"), name)
        inner = _mapping(pod.get("spec", pod), name)
        containers = _list(inner.get("containers"), name)
        main = _mapping(inner.get("mainContainer"), name) or (containers or [{}])[0]
        kind = str(each.get("subComponentType") or each.get("componentType") or each.get("type"))
        command = None if kind in ("frontend", "planner", "main", "epp") else _command(main)
        if command is None:
            words = " ".join(map(str, [*(main.get("command") or []), *(main.get("args") or [])]))
            mode = re.search(r"--router-mode[= ](\S+)", words)
            _policy(manifest, mode[1] if mode else _environment(main).get("DYN_ROUTER_MODE"))
            if kind not in ("frontend", "main"):
                manifest.left_out.append(f"{name} ({kind})")
            continue
        engine, options = command
        place = _place(options, kind if kind in ("prefill", "decode") else "")
        replicas = _count(each.get("replicas"), "replicas")
        nodes = _count(_mapping(each.get("multinode"), name).get("nodeCount"), "nodeCount")
        resources = _mapping(each.get("resources") or main.get("resources"), name)
        limits = _mapping(resources.get("limits"), name)
        gpus = limits.get("gpu") or limits.get("nvidia.com/gpu")
        gpus = None if gpus is None else _count(gpus, "gpu") * nodes
        manifest.roles.append(Role(name, place, replicas, engine or backend, options, None, gpus))
    places = {role.place for role in manifest.roles}
    if places == {"serve", "prefill"}:  # what decodes is often named by nothing
        manifest.roles = [
            Role(**{**vars(role), "place": "decode"}) if role.place == "serve" else role
            for role in manifest.roles
        ]
    return manifest


def _compose(document: Mapping[str, Any]) -> Manifest:
    """Read a file of docker compose."""
    manifest = Manifest("docker compose", [])
    for name, each in _mapping(document.get("services"), "services").items():
        service = _mapping(each, str(name))
        command = _command(service)
        if command is None:
            manifest.left_out.append(f"service {name}")
            continue
        engine, options = command
        deploy = _mapping(service.get("deploy"), "deploy")
        replicas = _count(deploy.get("replicas", service.get("scale")), "replicas")
        resources = _mapping(deploy.get("resources"), "resources")
        devices = _list(_mapping(resources.get("reservations"), "reservations").get("devices"),
                        "devices")  # fmt: skip
        gpus = [len(d["device_ids"]) if d.get("device_ids") else _count(d.get("count"), "count")
                for d in devices if d.get("count") != "all"]  # fmt: skip
        total = sum(gpus) if gpus else None
        role = Role(str(name), _place(options), replicas, engine, options, None, total)
        manifest.roles.append(role)
    return manifest


_KINDS: tuple[tuple[Callable[[Mapping[str, Any]], bool], Callable[..., Manifest]], ...] = (
    (lambda d: "servingEngineSpec" in d, _production_stack),
    (lambda d: d.get("kind") == "DynamoGraphDeployment", _dynamo),
    (lambda d: "modelArtifacts" in d and ("decode" in d or "prefill" in d), _llm_d),
    (lambda d: isinstance(d.get("services"), Mapping) and "kind" not in d, _compose),
)
