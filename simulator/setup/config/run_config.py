"""The configuration of a run: all that is needed to run it again."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from pydantic import (
    BaseModel,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from eldr_sim.errors import InputError
from eldr_sim.inputs import parse_yaml, read_text
from eldr_sim.policies.choice import DECISION_OF, parse
from eldr_sim.simulator.setup.config.groups import (
    GROUP_OF,
    GROUPS,
    RUN_FIELDS,
    ClusterConfig,
    EngineConfig,
    ExpertsConfig,
    FaultConfig,
    FrontEndConfig,
    KVTierConfig,
    OutputConfig,
    PolicyConfig,
    ScalingConfig,
    SchedulerConfig,
    ServiceLevel,
    StepConfig,
)
from eldr_sim.simulator.setup.config.paths import resolved
from eldr_sim.simulator.setup.config.pools import (
    Fields,
    Pool,
    WorkerPool,
    gpus_of,
    parse_topology,
    pools_of,
    price_of,
    with_version,
)
from eldr_sim.simulator.setup.config.requests import WORKLOADS, RoutingConfig, WorkloadConfig
from eldr_sim.simulator.setup.config.spellings import meant
from eldr_sim.traces.requests.session_shape import ANSWER_TOKENS

__all__ = [
    "WORKLOADS", "Pool", "RunConfig", "ServiceLevel", "flat", "get_field", "make_config",
    "parse_topology", "read_config", "set_field",
]  # fmt: skip


class RunConfig(Fields):
    """The configuration of a run: thirteen groups of fields that hold all that a run reads.

    A field is given by its name, ``max_num_seqs=64``, or within its group,
    ``engine={"block_size": 32}``; it is read as ``config.engine.block_size``, and written without
    its group. Durations are in seconds of simulated time unless the name has another unit. An
    instance does not change; `replace` returns a changed copy.

    Args:
        fields: values by name; ``eldr-sim options`` lists every field with unit, default and
            allowed values.

    Raises:
        InputError: a field does not exist, has an invalid value or contradicts another
            (`make_config`; pydantic's ValidationError wraps it where the class is called).

    Examples
    --------
    >>> config = RunConfig(topology="8P16D", policy="eldr", request_rate=80)
    >>> config.n_gpus, config.engine.block_size
    (24, 16)
    """

    policies: PolicyConfig
    requests: WorkloadConfig
    routing: RoutingConfig
    cluster: ClusterConfig
    engine: EngineConfig
    kv: KVTierConfig
    scheduler: SchedulerConfig
    steps: StepConfig
    front_end: FrontEndConfig
    experts: ExpertsConfig
    faults: FaultConfig
    scaling: ScalingConfig
    output: OutputConfig

    if TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _sorted(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        values = with_version(flat(values))
        if any(
            values.get(n)
            for n in ("engine", "engine_version", "engine_args", "extra_llm_api_options")
        ):
            from eldr_sim.simulator.setup.config.launch import (
                with_launch,  # NumPy: --help does without
            )

            values = with_launch(values)
        if values.get("trace") and not values.get("workload") and not values.get("domain_mix"):
            from eldr_sim.simulator.setup.config.workload_of_trace import (
                with_workload,  # NumPy: --help does without
            )

            values = with_workload(values)
        grouped: dict[str, dict[str, Any]] = {title: {} for title in GROUPS}
        for name, value in values.items():
            if name not in GROUP_OF:
                raise _unknown(name)
            grouped[GROUP_OF[name]][name] = value
        return grouped

    @model_serializer(mode="wrap")
    def _without_groups(self, groups: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for group in groups(self).values() for name, value in group.items()}

    def value(self, name: str) -> Any:
        """Return the value of a field.

        Args:
            name: of the field, without its group, such as ``block_size``.

        Returns:
            The value, in the unit of the field.
        """
        return getattr(getattr(self, GROUP_OF[name]), name)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with changed fields.

        Args:
            changes: values by field; a mapping changes fields of a pool, service level or policy:
                ``replace(decode={"gpu": "H200"}, policy={"tau": 0.2})``.

        Returns:
            The new, validated configuration.

        Raises:
            InputError: a field does not exist or is not valid.
        """
        values = self.explicit_fields("python")
        for name, value in flat(changes).items():
            if isinstance(value, BaseModel):
                values[name] = value.model_dump()
            elif isinstance(value, dict) and name not in ("domain_mix", "domain_mix_end"):
                for inner, what in value.items():
                    set_field(values, f"{name}.{inner}", what)
            else:
                set_field(values, name, value)
        return cast("Self", make_config(values))

    def explicit_fields(self, mode: Literal["json", "python"]) -> dict[str, Any]:
        """Return the fields without the engine's defaults, and without a topology not given.

        Built from these, a configuration of another engine, GPU, width or launch line takes that
        one's defaults.

        Args:
            mode: ``python`` for Python's values, ``json`` for what JSON holds.

        Returns:
            Values by field, without groups.
        """
        from eldr_sim.simulator.setup.config.engine_rules import (
            default_fields,  # NumPy: --help does without
        )

        values = self.model_dump(mode=mode)
        usual = default_fields(values)
        for name in {"gpu_memory_utilization", "block_size", *usual}:
            if values[name] == usual.get(name, RUN_FIELDS[name].default):
                del values[name]
        if "topology" not in self.cluster.model_fields_set:
            del values["topology"]
        return values

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy, with validated changes (pydantic's method does not validate).

        Args:
            update: changed values by field.
            deep: ignored; a configuration does not change.

        Returns:
            The new configuration.

        Raises:
            InputError: a field does not exist or is not valid.
        """
        return self.replace(**(update or {}))

    @property
    def effective_output_len(self) -> int | Literal["recorded"]:
        """The output length of every request, tokens: 1 in clusters without decode workers,
        ``recorded`` where each request has the length of its log or trace."""
        if not self.cluster.generates:
            return 1
        if self.requests.output_len is not None:
            return self.requests.output_len
        if self.requests.workload in ANSWER_TOKENS:
            return ANSWER_TOKENS[self.requests.workload]
        return 512 if self.requests.workload in ("task", "language") else "recorded"

    @property
    def n_gpus(self) -> int:
        """The number of GPUs of all workers."""
        return gpus_of(self.pools)

    @cached_property
    def pools(self) -> tuple[WorkerPool, ...]:
        """The pools, in the order in which workers are numbered."""
        named = pools_of(self.cluster.topology)
        return tuple(
            self.pool("decode" if pool.decodes else "prefill", pool).named(
                name,
                "co-located"
                if not self.cluster.n_prefill and isinstance(self.cluster.topology, str)
                else name,
            )
            for names in named.routers
            for name in names
            for pool in [named.root[name]]
        )

    def pool(self, role: str, named: WorkerPool | None = None) -> WorkerPool:
        """Return the settings of a pool's workers.

        Args:
            role: ``prefill`` or ``decode``.
            named: a pool of the topology, with fields that override those of its role.

        Returns:
            Every setting of a worker: of the pool, else of the role, else of the run.
        """
        overrides: dict[str, Any] = getattr(self.cluster, role).model_dump(exclude_none=True)
        if named is not None:
            overrides |= named.model_dump(exclude_none=True)
        values: dict[str, Any] = {
            name: overrides.get(name, self.value(name) if name in GROUP_OF else None)
            for name in WorkerPool.model_fields
        }
        if values["engine"] != self.engine.engine:  # the run's version is another engine's
            values["engine_version"] = overrides.get("engine_version")
        if role == "prefill" and "expert_placement" not in overrides and self.cluster.generates:
            values["expert_placement"] = "linear"
        return WorkerPool(**values | {"workers": overrides.get("workers", 1)})

    @property
    def price_per_hour(self) -> float | None:
        """The price of the cluster per hour, in the unit of ``price``; None unless every pool has
        one."""
        return price_of(self.pools)


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return field values without groups; raises InputError if one is given twice."""
    fields: dict[str, Any] = {}
    for name, value in values.items():
        group = GROUPS.get(name) if isinstance(value, Mapping) else None
        for field, what in value.items() if group is not None else ((name, value),):
            if group is not None and field not in group.model_fields:
                raise InputError(f"{name}.{field}", "no such field", ", ".join(group.model_fields))
            if field in fields:
                raise InputError(field, "given twice", "once, by itself or in its group")
            fields[field] = what
    return fields


def _fields_of(path: str) -> list[str]:
    """Return the parts of a dot path without the group that may lead it."""
    parts = path.split(".")
    group = GROUPS.get(parts[0])
    inside = group is not None and parts[1:2] and parts[1] in group.model_fields
    return parts[1:] if inside else parts


def field_path(path: str) -> str:
    """Return the path of a field without the group that may lead it."""
    return ".".join(_fields_of(path))


def make_config(values: dict[str, Any]) -> RunConfig:
    """Build a configuration from fields by name.

    Args:
        values: fields, each alone or within its group.

    Returns:
        The validated configuration.

    Raises:
        InputError: a field is not valid; the error names the first such field.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:] if not _UNION_TAG.match(str(part)))
        if first["type"] == "extra_forbidden":  # within a mapping, such as a pool's
            raise _unknown(where) from None
        if isinstance(own := first.get("ctx", {}).get("error"), InputError):
            raise own from None
        raise InputError(where, f"{first['input']!r}: {first['msg'].lower()}") from None


#: Parameters of ELDR's policy, which are often taken for fields of a run.
_OF_POLICIES = {
    "tau", "artifact", "signature", "layer_mask", "clustering", "capture_overhead_ms",
    "routing_overhead_ms",
}  # fmt: skip


def _unknown(name: str) -> InputError:
    if name in _OF_POLICIES:
        hint = f"policy.{name}, as in --policy eldr:{name}=..."
        return InputError(name, "is a parameter of the policy", hint)
    near = meant(name)
    allowed = f"{' or '.join(near)}; see eldr-sim options" if near else "see eldr-sim options"
    return InputError(name, "no such field", allowed)


def set_field(values: dict[str, Any], path: str, value: Any) -> None:
    """Set a field in place by its dot path.

    Args:
        values: fields of a configuration.
        path: such as ``decode.gpu``; ``engine_args`` sets all fields that the line names.
        value: the new value.

    Raises:
        InputError: no field has this path.
    """
    *above, name = _fields_of(path)
    for part in above:
        inner: Any = values.get(part) or {}
        if part in DECISION_OF and not isinstance(inner, Mapping):
            inner = parse(inner, part).mapping
        elif part in RUN_FIELDS and isinstance(inner, str | tuple | list):
            spelled = make_config({part: inner}).value(part)
            inner = spelled.model_dump() if isinstance(spelled, BaseModel) else spelled
        elif part in DECISION_OF and not inner:
            inner = parse(RUN_FIELDS[part].default, part).mapping
        if not isinstance(inner, dict):
            raise InputError(path, f"{part!r} has no fields")
        values[part] = values = dict(inner)
    values[name] = value
    if name in ("engine_args", "extra_llm_api_options") and not above and value is not None:
        from eldr_sim.simulator.setup.config.launch import (
            change_launch,  # NumPy: --help does without
        )

        change_launch(values, name, values.pop(name))


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


#: Files that are no configuration of a run: names on their top level, and where they belong.
_OTHER_FILES = (
    ({"sweep"}, "a sweep", "eldr-sim sweep FILE"),
    ({"figures"}, "a study", "eldr-sim study run FILE"),
    ({"apiVersion", "services", "servingEngineSpec", "modelArtifacts"}, "a deployment",
     "eldr-sim run --from-manifest FILE"),
    ({"architectures", "model_type"}, "a model's config.json", "--model FILE"),
)  # fmt: skip

#: pydantic names the branches of a union in the location of an error; users know none of them.
_UNION_TAG = re.compile(r"constrained-|function-|literal\[")


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read field values from YAML, or a result's ``config.json``; raises InputError."""
    path = Path(path)
    values = parse_yaml(read_text(path, "config"), "config", str(path))
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InputError("config", f"{path} does not hold a mapping", "field: value lines")
    for names, what, instead in _OTHER_FILES:
        if names & values.keys():
            raise InputError("config", f"{path} is {what}", instead)
    if isinstance(values.get("load"), dict):
        from eldr_sim.traces.requests.logs.formats import named_format  # of logs

        other = named_format("inference-perf config")
        raise InputError("config", f"{path} is {other.about}", other.way)
    # A result's config.json keeps the fields under "config", beside checksums and versions.
    nested = values.get("config")
    if not isinstance(nested, dict):
        return flat(values)
    found = flat(resolved(nested, path.parent))
    # Without the engine's defaults, which the result states too.
    explicit = make_config(found).explicit_fields("json")
    return {name: value for name, value in found.items() if name in explicit}
