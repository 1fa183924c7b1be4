"""Parser of a sweep's YAML, in the terms of aiperf, into a list of points.

.. code-block:: yaml

    config:                          # fields of a run, as `eldr-sim run --config` takes them
      topology: 8P16D
      goodput: {ttft: 500}
    sweep:
      type: grid                     # or zip, scenarios
      parameters:                    # any field of a run by its dot path
        policy: [round_robin, eldr]
        request_rate: [20, 40, 60]
        goodput.tpot: [20, 30]
    multiRun: {numRuns: 5, confidenceLevel: 0.95}
    randomSeed: 0

Run ``i`` of every point has seed ``randomSeed + i``, so points are paired: they see the same
requests unless a parameter changes the workload."""

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eldr_sim.errors import InputError
from eldr_sim.inputs import parse_yaml, read_text, within
from eldr_sim.planning.runs.runner import with_seed
from eldr_sim.simulator.setup.config.launch import LAUNCH
from eldr_sim.simulator.setup.config.run_config import RunConfig, get_field, make_config, set_field

_STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
MOST_RUNS = 100_000  #: runs of a sweep
Values = Annotated[list[Any], Field(min_length=1)]


class Grid(BaseModel):
    """Every combination of the values; the last parameter changes fastest."""

    model_config = _STRICT

    type: Literal["grid"]
    parameters: Annotated[dict[str, Values], Field(min_length=1)]

    @property
    def n_points(self) -> int:
        """The number of points, without listing them."""
        return math.prod(len(values) for values in self.parameters.values())

    def changes(self) -> Iterator[tuple[str | None, dict[str, Any]]]:
        """Yield each point's name, if it has one, and its values by dot path."""
        for values in itertools.product(*self.parameters.values()):
            yield None, dict(zip(self.parameters, values, strict=True))


class Zip(BaseModel):
    """First values of all parameters, then second values, and so on."""

    model_config = _STRICT

    type: Literal["zip"]
    parameters: Annotated[dict[str, Values], Field(min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> "Zip":
        lengths = {name: len(values) for name, values in self.parameters.items()}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{name} has {n}" for name, n in lengths.items())
            raise ValueError(f"lists of different lengths: {counts}")
        return self

    @property
    def n_points(self) -> int:
        """Points: the length of each list."""
        return len(next(iter(self.parameters.values())))

    def changes(self) -> Iterator[tuple[str | None, dict[str, Any]]]:
        """Yield each point's name, if it has one, and its values by dot path."""
        for values in zip(*self.parameters.values(), strict=True):
            yield None, dict(zip(self.parameters, values, strict=True))


class Scenario(BaseModel):
    """A named point: its fields are merged into the base configuration."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: Annotated[str, Field(min_length=1)]


class Scenarios(BaseModel):
    """Named points, each with the fields that it changes (nested, or by dot path)."""

    model_config = _STRICT

    type: Literal["scenarios"]
    runs: Annotated[list[Scenario], Field(min_length=1)]

    @property
    def n_points(self) -> int:
        """Points: the runs that are named."""
        return len(self.runs)

    @model_validator(mode="after")
    def _check(self) -> "Scenarios":
        names = [run.name for run in self.runs]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"two scenarios are named {twice[0]!r}")
        return self

    def changes(self) -> Iterator[tuple[str | None, dict[str, Any]]]:
        """Yield each point's name, if it has one, and its values by dot path."""
        for run in self.runs:
            yield run.name, dict(_leaves(run.model_extra or {}))


class MultiRun(BaseModel):
    """Number of seeds of each point, and the confidence level of its intervals."""

    model_config = _STRICT

    numRuns: Annotated[int, Field(ge=1)] = 1
    confidenceLevel: Annotated[float, Field(gt=0, lt=1)] = 0.95


class _Document(BaseModel):
    model_config = _STRICT

    config: dict[str, Any] = {}
    sweep: Annotated[Grid | Zip | Scenarios, Field(discriminator="type")]
    multiRun: MultiRun = MultiRun()
    randomSeed: Annotated[int, Field(ge=0)] | None = None


@dataclass(frozen=True)
class SweepPoint:
    """One point of a sweep."""

    name: str  #: name of the scenario, or the parameters with their values
    parameters: dict[str, Any]  #: value of every parameter by dot path
    configs: list[RunConfig]  #: configuration for each seed


@dataclass(frozen=True)
class SweepSpec:
    """A sweep: its YAML (``document``) and its points."""

    document: dict[str, Any]
    points: list[SweepPoint]
    confidence: float


def read_spec(path: str | os.PathLike[str]) -> SweepSpec:
    """Read a sweep from YAML; raises InputError."""
    return make_spec(parse_yaml(read_text(path, "sweep"), "sweep", str(path)))


def make_spec(document: Any) -> SweepSpec:
    """Expand a sweep; raises InputError if it is none, or a point is not a valid configuration."""
    if not isinstance(document, Mapping) or "sweep" not in document:
        raise InputError("sweep", "the file has no sweep", "sweep: {type: ..., parameters: ...}")
    try:
        parsed = _Document.model_validate(document)
    except ValidationError as error:
        raise _input_error(error) from None
    if parsed.randomSeed is not None and "seed" in parsed.config:
        raise InputError("config.seed", "together with randomSeed", "one of the two")
    seed = parsed.randomSeed
    if seed is None:
        seed = make_config(parsed.config).requests.seed
    within("sweep", parsed.sweep.n_points * parsed.multiRun.numRuns, MOST_RUNS, " runs")
    changes = list(parsed.sweep.changes())
    paths = list(dict.fromkeys(path for _, values in changes for path in values))
    if "seed" in paths:
        problem = "seed is not a parameter"
        raise InputError("sweep", problem, "multiRun: {numRuns: N} and randomSeed")
    points: list[SweepPoint] = []
    for name, values in changes:
        label = name or ", ".join(f"{path}={_text(value)}" for path, value in values.items())
        base = dict(parsed.config)
        try:
            for path, value in values.items():
                set_field(base, path, value)
            config = make_config(base | {"seed": seed})
        except InputError as error:
            raise InputError(
                error.field, f"{error.problem} in point {len(points)} ({label})", error.allowed
            ) from None
        configs = [with_seed(config, i) for i in range(parsed.multiRun.numRuns)]
        shown = {path: get_field(config, path) for path in paths}
        shown |= {path: values[path] for path in LAUNCH if path in values}
        points.append(SweepPoint(label, shown, configs))
    return SweepSpec(dict(document), points, parsed.multiRun.confidenceLevel)


def first_change(old: Any, new: Any, path: str = "") -> str | None:
    """Return where two documents first differ; None if they are equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            inner = f"{path}.{key}" if path else str(key)
            if key not in old:
                return f"{inner} is new"
            if key not in new:
                return f"{inner} is gone"
            change = first_change(old[key], new[key], inner)
            if change is not None:
                return change
        return None
    return None if old == new else f"{path} was {_text(old)} and is {_text(new)}"


def _input_error(error: ValidationError) -> InputError:
    first = error.errors()[0]
    # pydantic puts the sweep's type into the location; for users it is the value of `type`.
    types = {"grid", "zip", "scenarios"}
    where = ".".join(
        str(part) for i, part in enumerate(first["loc"]) if not (i == 1 and part in types)
    )
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return InputError(where, "no such field")
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return InputError("sweep.type", _text(first["input"]), ", ".join(sorted(types)))
    return InputError(where, f"{message}, got {_text(first['input'])}")


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
