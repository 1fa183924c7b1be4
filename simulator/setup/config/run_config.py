"""The configuration of a run: all that is needed to run it again."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from pydantic import BaseModel, ValidationError, model_validator

from eldr_sim.errors import InputError
from eldr_sim.inputs import parse_yaml, read_text
from eldr_sim.policies.choice import DECISION_OF, parse
from eldr_sim.simulator.setup.config.groups import (
    FORMER,
    GROUPS,
    WORKLOADS,
    ClusterConfig,
    EngineConfig,
    ExpertsConfig,
    FaultConfig,
    FrontEndConfig,
    OutputConfig,
    PolicyConfig,
    RoutingConfig,
    ScalingConfig,
    SchedulerConfig,
    ServiceLevel,
    StepConfig,
    WorkloadConfig,
)
from eldr_sim.simulator.setup.config.paths import resolved
from eldr_sim.simulator.setup.config.pools import (
    OwnPool,
    Pool,
    WorkerPool,
    parse_topology,
    pools_of,
)
from eldr_sim.traces.requests.session_shape import ANSWER_TOKENS, LANES_S
from eldr_sim.traces.requests.session_shape import PRESETS as SESSIONS

if TYPE_CHECKING:
    from eldr_sim.traces.requests.load_shapes import LoadShape

__all__ = [
    "WORKLOADS", "Pool", "RunConfig", "ServiceLevel", "flat", "get_field", "make_config",
    "parse_topology", "read_config", "set_field",
]  # fmt: skip


class RunConfig(
    OutputConfig,
    ScalingConfig,
    FaultConfig,
    ExpertsConfig,
    FrontEndConfig,
    EngineConfig,
    SchedulerConfig,
    StepConfig,
    ClusterConfig,
    RoutingConfig,
    WorkloadConfig,
    PolicyConfig,
):
    """One run of the simulator. Durations are seconds of simulated time unless named otherwise.

    A field is given by its own name, or in its group: ``engine={"block_size": 32}``."""

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        values = flat(values)
        if any(values.get(n) for n in ("engine", "engine_args", "extra_llm_api_options")):
            from eldr_sim.simulator.setup.config.launch import (
                with_launch,  # NumPy: --help does without
            )

            values = with_launch(values)
        return values

    def replace(self, **changes: Any) -> Self:
        """Return a configuration with other fields; raises InputError as `make_config` does.

        A mapping changes fields of a pool, service level or policy: ``replace(decode={"gpu":
        "H200"}, policy={"tau": 0.2})``."""
        values = self.said("python")
        for name, value in flat(changes).items():
            if isinstance(value, BaseModel):
                values[name] = value.model_dump()
            elif isinstance(value, dict) and name not in ("domain_mix", "domain_mix_end"):
                for inner, what in value.items():
                    set_field(values, f"{name}.{inner}", what)
            else:
                values[name] = value
        return cast("Self", make_config(values))

    def said(self, mode: Literal["json", "python"]) -> dict[str, Any]:
        """Return the fields, but for those that the engine has by default, so that another engine,
        GPU or width has its own. ``mode``: as of ``model_dump``."""
        from eldr_sim.simulator.setup.config.engines import (
            default_fields,  # NumPy: --help does without
        )

        values = self.model_dump(mode=mode)
        usual = default_fields(values)
        for name in ("gpu_memory_utilization", "block_size"):
            if values[name] == usual.get(name, type(self).model_fields[name].default):
                del values[name]
        return values

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy; ``update`` is validated, which pydantic's own method does not do."""
        return self.replace(**(update or {}))

    @property
    def effective_output_len(self) -> int | Literal["recorded"]:
        """Output tokens of every request, or ``recorded``; 1 where they end with their prompts."""
        if not self.generates:
            return 1
        if self.output_len is not None:
            return self.output_len
        if self.workload in ANSWER_TOKENS:
            return ANSWER_TOKENS[self.workload]
        return 512 if self.workload in ("task", "language") else "recorded"

    @property
    def warmup_s(self) -> float:
        """Time before the measured window, s."""
        if self.warmup is not None:
            return self.warmup
        all_count = self.num_requests is not None or self.measures_whole_log or bool(self.load)
        all_count = all_count or self.arrivals == "agentx"
        return 0.0 if all_count or self.n_sessions is not None else 30.0

    @property
    def duration_s(self) -> float | None:
        """Length of the measured window, s; None where a log or a number of requests says it."""
        if self.num_requests is not None or self.chooses_part or self.measures_whole_log:
            return None
        if self.duration is None and self.arrivals == "agentx":
            return LANES_S
        if self.duration is None and self.load is not None:
            return _shape_of(self.load).span_s
        if self.n_sessions is not None:
            return None
        return 120.0 if self.duration is None else self.duration

    @property
    def effective_rate(self) -> float | None:
        """Mean requests per second; None where a file's timestamps rule."""
        if self.request_rate is None and self.load is not None:
            return _shape_of(self.load).mean
        if self.request_rate is not None or self.from_file:
            return self.request_rate
        if self.workload not in SESSIONS:
            return 60.0
        return 1.0 if self.max_active_sessions is None else math.inf

    @property
    def n_sessions(self) -> int | None:
        """Sessions that are drawn, all of which are measured; None where there are none such."""
        if self.workload not in SESSIONS or self.duration is not None or self.load is not None:
            return None
        return self.num_requests or self.sessions or 500

    @property
    def n_gpus(self) -> int:
        """GPUs of all workers."""
        return sum(pool.workers * pool.own.parallelism.n_gpus for pool in self.pools)

    @cached_property
    def pools(self) -> tuple[WorkerPool, ...]:
        """The pools, in the order in which workers are numbered."""
        named = pools_of(self.topology)
        return tuple(
            WorkerPool(
                name,
                "co-located" if not self.n_prefill and isinstance(self.topology, str) else name,
                pool.workers,
                pool.takes_over,
                pool.then is None,
                self.pool("decode" if pool.then is None else "prefill", pool),
            )
            for names in named.routers
            for name in names
            for pool in [named.root[name]]
        )

    @property
    def n_prefill(self) -> int:
        """Number of workers that compute prompts alone; 0 where all workers are co-located."""
        pools = pools_of(self.topology).root.values()
        return sum(pool.workers for pool in pools if pool.then is not None)

    @property
    def n_decode(self) -> int:
        """Number of decode or co-located workers; 0 where requests end with their prompts."""
        return sum(pool.workers for pool in pools_of(self.topology).root.values()) - self.n_prefill

    @property
    def generates(self) -> bool:
        """Whether requests go on when their prompts are computed, and do not end."""
        return self.n_decode > 0

    @property
    def hands_over(self) -> bool:
        """Whether others than those that computed their prompts may decode requests."""
        return self.generates and self.n_prefill > 0

    def pool(self, role: str, named: OwnPool | None = None) -> OwnPool:
        """Return what holds for the workers of ``prefill`` or ``decode``, or of a named pool."""
        own: dict[str, Any] = getattr(self, role).model_dump(exclude_none=True)
        if named is not None:
            own |= named.model_dump(exclude_none=True)
        values = {name: own.get(name, getattr(self, name, None)) for name in OwnPool.model_fields}
        if role == "prefill" and "expert_placement" not in own and self.generates:
            values["expert_placement"] = "linear"
        return OwnPool(**values)

    @property
    def price_per_hour(self) -> float | None:
        """Price of the whole cluster for an hour; None unless every pool has a price."""
        total = 0.0
        for pool in self.pools:
            if pool.own.price_per_gpu_hour is None:
                return None
            total += pool.workers * pool.own.parallelism.n_gpus * pool.own.price_per_gpu_hour
        return total


def _shape_of(load: str) -> LoadShape:
    from eldr_sim.traces.requests.load_shapes import load_shape  # NumPy: --help does without

    return load_shape(load)


def _group(name: str) -> type[BaseModel] | None:
    return GROUPS.get(FORMER.get(name, name))


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return field values without groups; raises InputError if one is given twice."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        group = _group(name) if isinstance(value, Mapping) else None
        for field, what in value.items() if group is not None else ((name, value),):
            if group is not None and field not in group.model_fields:
                raise InputError(f"{name}.{field}", "no such field", ", ".join(group.model_fields))
            if field in found:
                raise InputError(field, "given twice", "once, by itself or in its group")
            found[field] = what
    return found


def _fields_of(path: str) -> list[str]:
    """Return the parts of a dot path without the group that may lead it."""
    parts = path.split(".")
    group = _group(parts[0])
    inside = group is not None and parts[1:2] and parts[1] in group.model_fields
    return parts[1:] if inside else parts


def make_config(values: dict[str, Any]) -> RunConfig:
    """Build a configuration; raises InputError, naming the first field that is not valid."""
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
    """Set a field by its dot path, such as ``decode.gpu``, in place; raises InputError."""
    *above, name = _fields_of(path)
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
    """Return the value at a dot path, or None; ``policy.tau``: what the policy has."""
    first, *rest = _fields_of(path)
    values: Any = config.model_dump()
    if first in DECISION_OF and rest and rest != ["name"]:
        from eldr_sim.policies import registry

        values = {first: registry.parameters(DECISION_OF[first], values[first]).model_dump()}
    for part in (first, *rest):
        values = values.get(part) if isinstance(values, dict) else None
    return values


#: pydantic names the branches of a union in the location of an error; users know none of them.
_UNION_TAGS = {"function-before[_number_or_inf(), constrained-float]", "constrained-int"}


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read field values from YAML, or a result's ``config.json``; raises InputError."""
    path = Path(path)
    values = parse_yaml(read_text(path, "config"), "config", str(path))
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InputError("config", f"{path} holds no mapping", "field: value lines")
    # A result's config.json keeps the fields under "config", beside checksums and versions.
    nested = values.get("config")
    if not isinstance(nested, dict):
        return flat(values)
    found = flat(resolved(nested, path.parent))
    said = make_config(found).said("json")  # but for what it ran with and nobody asked for
    return {name: value for name, value in found.items() if name in said}
