"""The configuration of a run: all that is needed to run it again."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.policies.choice import DECISION_OF, parse
from eldr_sim.simulator.paths import resolved

#: The named workloads; any other is a file.
WORKLOADS = ("task", "language")
_TOPOLOGY = re.compile(r"([1-9]\d*)P([1-9]\d*)D|([1-9]\d*)C", re.IGNORECASE)


def _number_or_inf(value: Any) -> Any:
    if isinstance(value, str) and value.strip().lower() in {"inf", "infinity", ".inf"}:
        return math.inf
    return value


def _policy(decision: str) -> BeforeValidator:
    """Make a policy's canonical word of whatever spelling."""

    def canonical(value: Any) -> str:
        from eldr_sim.policies import registry  # takes long to import: it knows every policy

        return registry.canonical(decision, value)

    return BeforeValidator(canonical)


def _path_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _topology(value: Any) -> Any:
    if isinstance(value, str):
        parse_topology(value)
    return value


#: A name or a path.
PathText = Annotated[str, BeforeValidator(_path_text)]
Rate = Annotated[float, BeforeValidator(_number_or_inf), Field(gt=0)]


class ServiceLevel(BaseModel):
    """Upper bounds that a good request keeps, as ``vllm bench serve --goodput`` has them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    ttft: float | None = Field(default=None, gt=0)
    """Time to first token, ms."""
    tpot: float | None = Field(default=None, gt=0)
    """Time per output token after the first, ms."""
    e2el: float | None = Field(default=None, gt=0)
    """End-to-end latency, ms."""


class Pool(BaseModel):
    """What the workers of one pool, prefill or decode, have of their own; the run's when None."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    gpu: PathText | None = None
    """Name of a known GPU."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Running requests of a worker."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens computed in one step."""
    price_per_gpu_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Price of a GPU-hour."""


class RunConfig(BaseModel):
    """One run of the simulator. Durations are seconds of simulated time unless named otherwise."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True
    )

    policy: Annotated[str, _policy("decode")] = "round_robin"
    """Decode policy: which decode worker gets a request after its prefill, or which co-located
    worker when it arrives. Parameters follow the name: ``eldr:tau=0.2,layer_mask=all``; ``eldr-sim
    policies`` lists them."""
    prefill_policy: Annotated[str, _policy("prefill")] = "prefix_hash"
    """Prefill policy: which prefill worker gets a request when it arrives."""
    queue_order: Annotated[str, _policy("queue")] = "fcfs"
    """Which waiting request an engine admits next: the first that came, or the shortest prompt."""
    topology: Annotated[str, BeforeValidator(_topology)] = "8P16D"
    """``xPyD``: x prefill and y decode WORKERS, each of ``tensor_parallel_size`` GPUs; or ``xC``: x
    co-located workers, which compute prompts in chunks beside their decode batch."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs of every worker. Attention heads, dense layers and lm_head are sharded over them, and
    so is every expert unless ``enable_expert_parallel``."""
    enable_expert_parallel: bool = False
    """Spread whole experts over a worker's GPUs; a layer then waits for the GPU that reads the most
    experts."""
    expert_placement: Literal["linear", "eldr"] = "linear"
    """Experts of each GPU under expert parallelism: neighbours together, or ELDR's placement, which
    spreads the expected activation of each decode worker's cluster evenly."""
    model: PathText = "Qwen3-30B-A3B"
    """Name of a known model, or a Hugging Face ``config.json`` (or its folder)."""
    gpu: PathText = "H100"
    """Name of a known GPU."""
    prefill: Pool = Pool()
    """What the prefill workers have of their own."""
    decode: Pool = Pool()
    """What the decode workers (or the co-located ones) have of their own."""
    tables: PathText | None = None
    """Folder of latency tables that take precedence over the embedded ones."""
    workload: PathText = "task"
    """``task``, ``language``, or a file of recorded requests (Azure, Mooncake, BurstGPT)."""
    domain_mix: dict[str, float] | None = None
    """Share of each domain among the requests; the workload's own when not given."""
    trace: PathText = "reference-moe"
    """Name of an embedded routing trace or a trace folder."""
    trace_replay: Literal["own", "same_domain"] = "own"
    """Whose generated tokens a request replays: its own, or those of another request of its domain
    (then no two requests with equal signatures replay equal tokens)."""
    prompts: Literal["unique", "shared"] = "unique"
    """Whether requests of the task and language workloads that replay the same trace request have
    the same prompt (``shared``, so that prefix caches find it) or each has one of its own. A file
    says itself which prompts share a prefix."""
    request_rate: Rate | None = None
    """Mean requests per second; ``inf`` sends all at once. 60 for the task and language workloads,
    the recorded timestamps for a file."""
    burstiness: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Shape of the gamma distribution of the gaps: 1 is Poisson, less is burstier."""
    duration: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    """Length of the measured window; requests that arrive in it make the statistics."""
    warmup: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Time before the measured window; 30, or 0 with ``num_requests``."""
    num_requests: int | None = Field(default=None, ge=1)
    """Send this many requests instead of sending for a duration; all of them that arrive after the
    warm-up are measured."""
    max_concurrency: int | None = Field(default=None, ge=1)
    """At most this many requests in flight; the others wait at the client."""
    output_len: Annotated[int, Field(ge=1)] | Literal["recorded"] | None = None
    """Output tokens of every request, ignoring end-of-sequence, or ``recorded``. 512 for the task
    and language workloads, ``recorded`` for a file."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Running requests of a worker; vLLM's server default for the GPU when not given."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens computed in one step; vLLM's server default for the GPU when not given."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Most tokens of a request, prompt and output together, that a worker accepts; the model's own
    limit when not given."""
    block_size: int = Field(default=16, ge=1)
    """Tokens of a KV block."""
    enable_prefix_caching: bool = True
    """Whether prefill workers keep KV blocks for prompts that begin alike."""
    async_scheduling: bool = True
    """Whether decode and co-located workers schedule one step ahead, so that a request which comes
    during a step joins the step after the next (vLLM's default since 0.14)."""
    gpu_memory_utilization: float = Field(default=0.92, gt=0, le=1, allow_inf_nan=False)
    """Share of the GPU's memory that an engine may use."""
    kv_transfer: Literal["ideal", "observed"] = "observed"
    """Cost of KV transfers: what NIXL's benchmark reaches, or what serving logs show."""
    host_gap_ms: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Time of a step that no kernel accounts for, ms; the profile's figure when not given."""
    load_report_delay_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Age of the completions that the routers have heard of, ms."""
    signal_interval_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """How often the engines publish what the routers see of them beside loads (waiting and running
    requests, tokens, KV usage), ms; 0: as of each decision. vLLM's data-parallel coordinator
    publishes every 100 ms."""
    goodput: ServiceLevel = ServiceLevel()
    """Service-level objective of good requests."""
    price_per_gpu_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Price of a GPU-hour, for the cost per million output tokens."""
    seed: int = Field(default=0, ge=0)
    """Seed of every random stream."""

    def replace(self, **changes: Any) -> Self:
        """Return a configuration with other fields; raises InputError as `make_config` does.

        A mapping changes the fields of a pool, of the service level or of a policy that it names:
        ``replace(decode={"gpu": "H200"}, policy={"tau": 0.2})``.
        """
        values = self.model_dump()
        for name, value in changes.items():
            if isinstance(value, BaseModel):
                values[name] = value.model_dump()
            elif isinstance(value, dict) and name != "domain_mix":
                for inner, what in value.items():
                    set_field(values, f"{name}.{inner}", what)
            else:
                values[name] = value
        return cast("Self", make_config(values))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy; ``update`` is validated, which pydantic's own method does not do."""
        return self.replace(**(update or {}))

    @property
    def n_prefill(self) -> int:
        """Number of prefill workers; 0 where all workers are co-located."""
        return parse_topology(self.topology)[0]

    @property
    def n_decode(self) -> int:
        """Number of decode or co-located workers."""
        return parse_topology(self.topology)[1]

    @property
    def colocated(self) -> bool:
        """Whether each worker computes prompts and decodes."""
        return self.n_prefill == 0

    @property
    def parallelism(self) -> Parallelism:
        """How a worker spreads the model over its GPUs; raises InputError if it cannot exist."""
        return Parallelism(self.tensor_parallel_size, self.enable_expert_parallel)

    @property
    def n_gpus(self) -> int:
        """GPUs of all workers."""
        return (self.n_prefill + self.n_decode) * self.tensor_parallel_size

    def pool(self, role: Literal["prefill", "decode"]) -> Pool:
        """Return what holds for the workers of a pool: its own where it says so, else the run's."""
        own: Pool = getattr(self, role)
        return Pool(
            **{
                name: getattr(self, name) if value is None else value
                for name, value in own.model_dump().items()
            }
        )

    @property
    def price_per_hour(self) -> float | None:
        """Price of the whole cluster for an hour; None unless every pool has a price."""
        pools = [(self.pool("decode").price_per_gpu_hour, self.n_decode)]
        if not self.colocated:
            pools.append((self.pool("prefill").price_per_gpu_hour, self.n_prefill))
        total = 0.0
        for price, workers in pools:
            if price is None:
                return None
            total += price * workers * self.tensor_parallel_size
        return total

    @property
    def warmup_s(self) -> float:
        """Time before the measured window, s."""
        if self.warmup is not None:
            return self.warmup
        return 30.0 if self.num_requests is None else 0.0

    @property
    def effective_rate(self) -> float | None:
        """Mean requests per second; None where a file's timestamps rule."""
        if self.request_rate is not None or self.from_file:
            return self.request_rate
        return 60.0

    @property
    def effective_output_len(self) -> int | Literal["recorded"]:
        """Output tokens of every request, or ``recorded``."""
        if self.output_len is not None:
            return self.output_len
        return "recorded" if self.from_file else 512

    @property
    def from_file(self) -> bool:
        """Whether the workload is a file of recorded requests."""
        return self.workload not in WORKLOADS


def parse_topology(text: str) -> tuple[int, int]:
    """Return (prefill workers, decode workers) of ``xPyD``, (0, x) of ``xC``; raises InputError."""
    match = _TOPOLOGY.fullmatch(text.strip())
    if match is None:
        raise InputError(
            "topology",
            repr(text),
            "xPyD with at least one worker of each kind, such as 8P16D, or xC, such as 8C",
        )
    return (0, int(match[3])) if match[3] else (int(match[1]), int(match[2]))


def make_config(values: dict[str, Any]) -> RunConfig:
    """Build a run's configuration from field values.

    Raises
    ------
    InputError
        Names the first field that is unknown or out of range.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part not in _UNION_TAGS)
        if first["type"] == "extra_forbidden":
            if where in _OF_POLICIES:
                hint = f"policy.{where}, as in --policy eldr:{where}=..."
                raise InputError(where, "is a parameter of the policy", hint) from None
            raise InputError(where, "no such field", ", ".join(RunConfig.model_fields)) from None
        if isinstance(own := first.get("ctx", {}).get("error"), InputError):
            raise own from None
        raise InputError(where, f"{first['input']!r}: {first['msg'].lower()}") from None


#: Fields of earlier versions that are parameters of a policy now.
_OF_POLICIES = {
    "tau", "artifact", "signature", "layer_mask", "clustering", "capture_overhead_ms",
    "routing_overhead_ms",
}  # fmt: skip


def set_field(values: dict[str, Any], path: str, value: Any) -> None:
    """Set a field by its dot path, such as ``decode.gpu``, in field values; in place.

    Raises
    ------
    InputError
        If the path leads through a field that holds no others.
    """
    *above, name = path.split(".")
    for part in above:
        inner: Any = values.get(part) or {}
        if part in DECISION_OF and not isinstance(inner, Mapping):
            inner = parse(inner, part).mapping
        elif part in DECISION_OF and not inner:
            inner = parse(RunConfig.model_fields[part].default, part).mapping
        if not isinstance(inner, dict):
            raise InputError(path, f"{part!r} has no fields of its own")
        values[part] = values = dict(inner)
    values[name] = value


def get_field(config: RunConfig, path: str) -> Any:
    """Return the value at a dot path; None where there is none.

    ``policy.tau`` is what the policy has, the default where that was not given.
    """
    first, _, rest = path.partition(".")
    values: Any = config.model_dump()
    if first in DECISION_OF and rest and rest != "name":
        from eldr_sim.policies import registry

        values = {first: registry.parameters(DECISION_OF[first], values[first]).model_dump()}
    for part in path.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


#: pydantic names the branches of a union in the location of an error; users know none of them.
_UNION_TAGS = {"function-before[_number_or_inf(), constrained-float]", "constrained-int"}


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read field values from YAML, or from a result's ``config.json``; raises InputError.

    Paths in YAML lead from the current folder, those of a result from the result's.
    """
    path = Path(path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError("config", f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())
        raise InputError("config", f"{path} is not YAML: {line}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InputError("config", f"{path} holds no mapping", "field: value lines")
    # A result's config.json keeps the fields under "config", beside checksums and versions.
    nested = values.get("config")
    return resolved(nested, path.parent) if isinstance(nested, dict) else values
