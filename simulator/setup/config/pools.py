"""The pools of a cluster: spelled (``8P16D``, ``16C``, ``4P``, ``4P8A16F``) or named in a file.

Requests come to pools that no other hands over to; one router chooses among their workers.
``then``: the pool, or several behind one router, that goes on when a prompt is computed."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    RootModel,
    StringConstraints,
    ValidationError,
    model_serializer,
    model_validator,
)

from eldr_sim.errors import InputError
from eldr_sim.inputs import parse_yaml, read_text
from eldr_sim.kernel_profiles.parallel import Backend, Parallelism
from eldr_sim.simulator.setup.config import field_types
from eldr_sim.simulator.setup.config.option import Option
from eldr_sim.simulator.setup.config.speculative import Speculative


def _start_up(value: Any) -> Any:
    from eldr_sim.simulator.setup.config.start_up import check_start_up  # few runs have one

    return check_start_up(None if value is None else str(value))


#: How a new worker starts, as it is spelled.
StartUp = Annotated[str | None, BeforeValidator(_start_up), Option(metavar="S|NAME", unit="s")]
_TOPOLOGY = re.compile(r"([1-9]\d{0,3})P(?:([1-9]\d{0,3})D)?|([1-9]\d{0,3})C", re.IGNORECASE)
#: Prefill workers, decode workers if there are several, and engines and FFN GPUs of each.
_DISAGGREGATED = re.compile(
    r"([1-9]\d{0,3})P(?:([1-9]\d{0,3})x)?([1-9]\d{0,3})A([1-9]\d{0,3})F", re.IGNORECASE
)
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
#: Most pools of a cluster; the plane's tuples of pools have this length (`state.MAX_POOLS`).
MOST_POOLS = 8
NO_POOL = "none"  #: value of ``then``: the request ends when its prompt is computed
#: Engines with known rules, see `setup.engines`.
Engine = Literal["vllm", "sglang", "trtllm"]
#: What a pool's workers do: compute prompts for others, compute prompts only, or decode.
Role = Literal["prefill", "decode"]


#: A version of an engine: ``0.24``, ``1.3.0rc20``.
EngineVersion = Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)*(\.?(rc|post|dev)\d+)?$")]


def with_version(values: Any) -> Any:
    """Split ``engine: vllm==0.24`` into the engine and its version."""
    if isinstance(values, Mapping) and "==" in str(values.get("engine") or ""):
        engine, _, version = str(values["engine"]).partition("==")
        return {**values, "engine": engine.strip(), "engine_version": version.strip().lstrip("v")}
    return values


_MOST = 2**63 - 1  #: whole number that the arrays of a simulation hold


class Fields(BaseModel):
    """A group of fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _numbers(cls, values: Any) -> Any:
        """Refuse switches for numbers: YAML's ``yes`` would be a 1."""
        if isinstance(values, Mapping):
            for name, value in values.items():
                if isinstance(value, bool) and name in _numeric(cls):
                    raise InputError(name, str(value).lower(), "a number")
        return values

    @model_validator(mode="after")
    def _whole_numbers(self) -> Self:
        """Refuse what no array of the simulation holds; seeds are hashed."""
        for name in _numeric(type(self)) - {"seed"}:
            value = getattr(self, name)
            if isinstance(value, int) and value > _MOST:
                raise InputError(name, "the number is too large", f"at most {_MOST:,}")
        return self


@cache
def _numeric(group: type[Fields]) -> frozenset[str]:
    """Return the fields of a group that are numbers and no switches."""

    def kinds(of: Any) -> set[Any]:
        inside = () if get_origin(of) in (tuple, list, dict) else get_args(of)
        return {of}.union(*(kinds(each) for each in inside))

    of = {name: kinds(field.annotation) for name, field in group.model_fields.items()}
    return frozenset(n for n, found in of.items() if {int, float} & found and bool not in found)


def _path_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


PathText = Annotated[str, BeforeValidator(_path_text)]  #: a name or a path
#: A GPU, by its name or its file.
GPUName = Annotated[
    PathText, Option(metavar="NAME|PATH", names="kernel_profiles.gpus:list_gpus", path="file")
]


def policy_word(decision: str) -> BeforeValidator:
    """Make a policy's canonical word of whatever spelling."""

    def canonical(value: Any) -> str | None:
        if value is None:
            return None  # a pool's own, where it has none
        from eldr_sim.policies import registry  # takes long to import: it knows every policy

        return registry.canonical(decision, value)

    return BeforeValidator(canonical)


def parse_topology(text: str) -> tuple[int, int]:
    """Return (prefill, decode workers) of ``xPyD``, (0, x) of ``xC``, (x, 0) of ``xP``."""
    match = _TOPOLOGY.fullmatch(text.strip())
    if match is None and "," in text:
        allowed = f"one, or compare --topology {text}, which compares them"
        raise InputError("topology", f"{text!r}: several clusters", allowed)
    if match is None:
        allowed = (
            "xPyD with 1 to 9999 workers of each kind, such as 8P16D, xC, such as 8C, xP, xPyAzF, "
            "or a file of pools that ends with .yaml"
        )
        raise InputError("topology", repr(text), allowed)
    return (0, int(match[3])) if match[3] else (int(match[1]), int(match[2] or 0))


class Pool(Fields):
    """Overrides for the workers of one pool, prefill or decode; None: the run's value."""

    gpu: GPUName | None = None
    """A known GPU or a gpu.json."""
    engine: Engine | None = None
    """Engine to model; ``vllm==0.24`` gives the version, too."""
    engine_version: EngineVersion | None = None
    """Version of the engine."""
    tensor_parallel_size: int | None = Field(default=None, ge=1, le=1024)
    """GPUs per engine."""
    enable_expert_parallel: bool | None = None
    """Place whole experts on a worker's GPUs."""
    data_parallel_size: int | None = Field(default=None, ge=1, le=1024)
    """Engines per worker."""
    all2all_backend: Backend | None = None
    """Communication with shared experts."""
    pipeline_parallel_size: int | None = Field(default=None, ge=1, le=1024)
    """Pipeline stages; prefill workers only."""
    num_redundant_experts: int | None = Field(default=None, ge=0)
    """Expert replicas beyond one of each."""
    expert_placement: Annotated[str | None, policy_word("placement")] = None
    """Expert placement; prefill: linear."""
    max_num_seqs: int | None = Field(default=None, ge=1, le=65536)
    """Maximum number of running requests."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1, le=2**20)
    """Maximum tokens computed in one step."""
    enforce_eager: bool | None = None
    """Run without CUDA graphs."""
    speculative_config: Speculative = None
    """Speculative decoding."""
    price_per_gpu_hour: field_types.Price | None = None
    """Price of a GPU-hour, $."""
    start_up: StartUp = None
    """Time until a new worker serves."""

    @model_validator(mode="before")
    @classmethod
    def _versioned(cls, values: Any) -> Any:
        return with_version(values)

    @property
    def parallelism(self) -> Parallelism:
        """How a worker spreads the model over its GPUs; raises InputError if it cannot exist."""
        return Parallelism(
            self.tensor_parallel_size or 1,
            bool(self.enable_expert_parallel),
            self.data_parallel_size or 1,
            self.pipeline_parallel_size or 1,
        )


class WorkerPool(Pool):
    """A pool of workers: in a topology file with the settings that it overrides, in
    `RunConfig.pools` with all that hold for its workers."""

    ffn_ranks: int | None = Field(default=None, ge=1, le=1024)
    """GPUs of a worker that hold its experts, beside those of its engines; decode workers only."""
    enable_elastic_ep: bool | None = None
    """Whether its engines, if there are several, start and stop one by one."""
    workers: int = Field(ge=1, le=9999)
    """Workers of ``data_parallel_size`` engines each."""
    then: str | tuple[str, ...] | None = None
    """Where a request continues when its prompt is computed: in the named pool or pools, behind
    one router; ``none``: the request ends. Default: on the worker that computed the prompt."""
    _name: str = PrivateAttr("")
    _kind: str = PrivateAttr("")

    def named(self, name: str, kind: str) -> Self:
        """Return the pool with its name, and what kind it is: the same, or ``co-located``."""
        self._name, self._kind = name, kind
        return self

    @property
    def name(self) -> str:
        """Its key in the topology."""
        return self._name

    @property
    def kind(self) -> str:
        """Its name, or ``co-located`` of ``xC``."""
        return self._kind

    @property
    def parallelism(self) -> Parallelism:
        """How a worker spreads the model over its GPUs; raises InputError if it cannot exist."""
        return replace(super().parallelism, ffn_ranks=self.ffn_ranks or 0)

    @property
    def takes_over(self) -> tuple[str, ...]:
        """The pools that requests are handed over to."""
        named = (self.then,) if isinstance(self.then, str) else self.then or ()
        return () if named == (NO_POOL,) else named

    @property
    def decodes(self) -> bool:
        """Whether its workers generate, and not only compute prompts."""
        return self.then is None

    @property
    def is_elastic(self) -> bool:
        """Whether the engines of its worker start and stop one by one."""
        return bool(self.enable_elastic_ep) and self.parallelism.data_parallel_size > 1

    @property
    def units(self) -> tuple[int, int]:
        """What starts and stops by itself, and its GPUs: workers, or engines of an elastic one."""
        parallelism = self.parallelism
        engines = parallelism.data_parallel_size if self.is_elastic else 1
        return self.workers * engines, parallelism.n_gpus // engines

    @property
    def role(self) -> Role:
        """The role that gives the settings that it does not override."""
        return "decode" if self.decodes else "prefill"


def gpus_of(pools: Iterable[WorkerPool]) -> int:
    """Return the GPUs of all workers."""
    return sum(pool.workers * pool.parallelism.n_gpus for pool in pools)


def price_of(pools: Iterable[WorkerPool]) -> float | None:
    """Return the price of all workers for an hour; None unless every pool has a price."""
    total = 0.0
    for pool in pools:
        if pool.price_per_gpu_hour is None:
            return None
        total += pool.workers * pool.parallelism.n_gpus * pool.price_per_gpu_hour
    return total


class Pools(RootModel[dict[str, WorkerPool]]):
    """The pools of a cluster by name."""

    model_config = ConfigDict(frozen=True)

    def __str__(self) -> str:
        return "+".join(f"{pool.workers} {name}" for name, pool in self.root.items())

    @model_serializer
    def _given(self) -> dict[str, Any]:
        return {name: pool.model_dump(exclude_none=True) for name, pool in self.root.items()}

    @model_validator(mode="after")
    def _fit(self) -> Self:
        pools = self.root
        if not 1 <= len(pools) <= MOST_POOLS:
            raise InputError("topology", f"{len(pools)} pools", f"1 to {MOST_POOLS}")
        thens = {name: pool.takes_over for name, pool in pools.items()}
        for name, then in thens.items():
            field = f"topology.{name}.then"
            if not _NAME.fullmatch(name) or name == NO_POOL:
                raise InputError("topology", f"pool {name!r}", "a name such as decode-h200")
            for other in then:
                if other not in pools or other == name:
                    others = [pool for pool in pools if pool != name]
                    raise InputError(field, f"{other!r} is not another pool", ", ".join(others))
                if pools[other].then is not None:
                    problem = f"{other!r} hands over requests itself, or ends with their prompts"
                    raise InputError(field, problem, "a pool without then")
            for beside in thens.values():
                if set(then) & set(beside) and set(then) != set(beside):
                    problem = f"shares only some targets with another pool: {', '.join(beside)}"
                    raise InputError(field, problem, "the same pools, or none of them")
        ends = {pool.then == NO_POOL for pool in pools.values()}
        if len(ends) > 1:
            raise InputError(
                "topology", "some requests would end with their prompts, others not", "all, none"
            )
        return self

    @property
    def routers(self) -> list[list[str]]:
        """The pools of each router, as workers are numbered; requests come to the first."""
        after = list(dict.fromkeys(frozenset(pool.takes_over) for pool in self.root.values()))
        taking = frozenset[str]().union(*after)
        sets = [frozenset(self.root) - taking, *(names for names in after if names)]
        return [[name for name in self.root if name in names] for names in sets]


@lru_cache(maxsize=256)
def _spelled(text: str) -> Pools:
    if match := _DISAGGREGATED.fullmatch(text.strip()):
        n, workers, engines, ffn_ranks = (int(number or 1) for number in match.groups())
        decode = WorkerPool(
            workers=workers, data_parallel_size=engines, enable_expert_parallel=True,
            ffn_ranks=ffn_ranks,
        )  # fmt: skip
        return Pools({"prefill": WorkerPool(workers=n, then="decode"), "decode": decode})
    n_prefill, n_decode = parse_topology(text)
    pools: dict[str, WorkerPool] = {}
    if n_prefill:
        then = "decode" if n_decode else NO_POOL
        pools["prefill"] = WorkerPool(workers=n_prefill, then=then)
    if n_decode:
        pools["decode"] = WorkerPool(workers=n_decode)
    return Pools(pools)


def pools_of(topology: str | Pools) -> Pools:
    """Return the pools of a topology, spelled or read from a file."""
    return topology if isinstance(topology, Pools) else _spelled(topology)


def _topology(value: Any) -> Any:
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        if Path(text).suffix.lower() not in (".yaml", ".yml", ".json"):
            pools_of(text)
            return text
        value = parse_yaml(read_text(text, "topology"), "topology", text)
        if not isinstance(value, Mapping):
            raise InputError("topology", f"{text} does not hold a mapping", "pools by their names")
    if not isinstance(value, Mapping):
        return value
    try:
        return Pools.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        if isinstance(own := first.get("ctx", {}).get("error"), InputError):
            raise own from None
        where = ".".join(map(str, ("topology", *first["loc"][:2])))
        if first["type"] == "extra_forbidden":
            raise InputError(where, "no such field", ", ".join(WorkerPool.model_fields)) from None
        if first["type"] == "missing":
            raise InputError(where, "not given") from None
        raise InputError(where, f"{first['input']!r}: {first['msg'].lower()}") from None


#: ``8P16D``, ``16C``, ``4P`` or ``4P8A16F``; a file of pools is read at once.
Topology = Annotated[
    str | Pools, BeforeValidator(_topology), Option(metavar="xPyD|xC|xP", path="file")
]
