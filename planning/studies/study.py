"""A study: figures from a YAML file, each a grid of runs and claims about their results.

.. code-block:: yaml

    title: Does routing by experts pay?
    base: {model: Qwen3-30B-A3B, topology: 8P16D}     # fields of every run
    quick: {duration: 20}                             # fields of shorter runs (--quick)
    seeds: 3                                          # runs of each cell; intervals over them
    names: {P50: median_tpot_ms, rates: [40, 80]}     # names for axes and expressions
    figures:
      main:
        title: TPOT against the request rate
        runs:                                         # an axis: a field's values, names for values,
          request_rate: rates                         # or names for several fields
          policy: {jsq: jsq, eldr: "eldr:tau=0.1"}
        show: [P50]                                   # columns of the table
        picture: {lines: request_rate, y: [P50], by: policy}
        claims:
          - says: median TPOT, eldr against jsq
            paper: [-14, -7]                          # the published range
            value: "gain(P50, 'eldr', 'jsq')"
            why: "distinct experts {gain('mean_active_experts_per_step', 'eldr', 'jsq'):+.1f}%"

``value`` and the braces of ``why`` are expressions (`expressions`). Their functions compare the
values of one axis, ``compare`` (by default ``policy``), and average over another, ``over`` (by
default ``request_rate``); a result is a number, or numbers by the remaining axes:

- ``mean(METRIC, VALUE)``: a figure of ``summary.json``;
- ``gain(METRIC, VALUE, AGAINST)``: its change against another value of the axis, %. ``AGAINST`` may
  be a list, of which the lowest ``BY`` counts: ``gain(METRIC, VALUE, LIST, BY)``;
- ``gains(...)``: the same, not averaged; ``min``, ``max``, ``average``: of several numbers.

``each: [model]`` repeats a claim for every value of axes, which its texts name in braces and by
which ``paper`` may differ."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from os import PathLike
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eldr_sim.charts import bars, lines
from eldr_sim.errors import InputError
from eldr_sim.inputs import parse_yaml, read_text, within
from eldr_sim.planning.runs.run_cache import Summary
from eldr_sim.planning.slo import t_interval
from eldr_sim.planning.studies.expressions import evaluate, fields, parse, text
from eldr_sim.planning.studies.figures import Claim, Reproduction, Runner, figure_of

MOST_RUNS = 100_000  #: runs of a figure
_STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
Ends = float | tuple[float, float]


class _Claim(BaseModel):
    model_config = _STRICT

    says: str
    paper: Ends | dict[str, Ends]
    value: str
    why: str = ""
    each: list[str] = []
    unit: str = "%"
    tolerance: Annotated[float, Field(ge=0)] = 1.0
    stated: bool = True
    given: bool = False
    trend: bool = False
    neutral: float | Literal["by unit"] | None = "by unit"


class _Picture(BaseModel):
    model_config = _STRICT

    lines: str = ""
    bars: str = ""
    y: list[str]
    by: str | list[str] = []
    panel: str | list[str] = []
    label: str = ""


class _Figure(BaseModel):
    model_config = _STRICT

    title: str
    base: dict[str, Any] = {}
    runs: Annotated[dict[str, str | list[Any] | dict[str, Any]], Field(min_length=1)]
    compare: str = "policy"
    over: str = "request_rate"
    show: list[str] = []
    gains: list[str] = []
    against: str = ""
    picture: _Picture | None = None
    claims: list[_Claim] = []


class _Quick(BaseModel):
    model_config = _STRICT

    base: dict[str, Any] = {}
    names: dict[str, Any] = {}
    seeds: int | None = None


class Study(BaseModel):
    """The content of a study's file."""

    model_config = _STRICT

    title: str
    base: dict[str, Any] = {}
    names: dict[str, Any] = {}
    seeds: Annotated[int, Field(ge=1)] = 1
    quick: _Quick = _Quick()
    figures: Annotated[dict[str, _Figure], Field(min_length=1)]

    def named(self, word: str) -> str:
        """Return the figure or column that ``names`` has for a word, else the word."""
        return str(self.names.get(word, word))

    def shortened(self, quick: bool) -> "Study":
        """Return the study with its shorter runs, if ``quick``."""
        if not quick:
            return self
        short = self.quick
        changes = {"base": self.base | short.base, "names": self.names | short.names}
        return self.model_copy(update=changes | {"seeds": short.seeds or self.seeds})

    def known(self, runner: Runner) -> dict[str, Callable[[], Reproduction]]:
        """Return the functions that make each figure, by name; raises InputError for what a figure
        may not say. ``runner``: has the study's ``base``."""
        made = {name: _Grid(name, spec, self) for name, spec in self.figures.items()}
        return {name: _maker(grid, runner) for name, grid in made.items()}


def read_study(path: str | PathLike[str]) -> Study:
    """Read a study from YAML.

    Args:
        path: of the file.

    Returns:
        The study, its fields checked.

    Raises:
        InputError: the file cannot be read, or a field is unknown, missing or of another type."""
    document = parse_yaml(read_text(path, "study"), "study", str(path))
    try:
        return Study.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "study"
        known = ", ".join(Study.model_fields) if len(first["loc"]) < 2 else ""
        problem = "no such field" if first["type"] == "extra_forbidden" else first["msg"]
        raise InputError(where, problem, known) from None


@dataclass(frozen=True)
class _Value:
    """A value of an axis: its name, and the fields that it sets."""

    name: Any
    fields: Mapping[str, Any]


class _Grid:
    """A figure: its cells, and its claims with checked expressions."""

    def __init__(self, name: str, spec: _Figure, study: Study) -> None:
        self.name, self.spec, self.study = name, spec, study
        self.axes = {axis: list(self._values(axis, given)) for axis, given in spec.runs.items()}
        if spec.compare not in self.axes:
            problem = f"no axis {spec.compare!r} to compare"
            raise InputError(f"{name}.compare", problem, ", ".join(self.axes))
        within(f"{name}.runs", math.prod(map(len, self.axes.values())), MOST_RUNS, " runs")
        self.cells = list(product(*self.axes.values()))
        self._check_picture()
        names = {*study.names, *_FUNCTIONS, "average", "min", "max"}
        self.claims = [(claim, self._parsed(claim, names)) for claim in spec.claims]

    def _check_picture(self) -> None:
        """Refuse columns that the figure's table does not have: gains are averaged ``over`` one."""
        picture, named = self.spec.picture, self.study.named
        if picture is None:
            return
        columns = [axis for axis in self.axes if not self.spec.gains or axis != self.spec.over]
        if not self.spec.gains:
            columns += map(named, self.spec.show or ["median_tpot_ms"])
        for field in ("lines", "bars", "by", "panel"):
            given = getattr(picture, field)
            for word in [given] if isinstance(given, str) else given:
                if word and named(word) not in columns:
                    where = f"{self.name}.picture.{field}"
                    raise InputError(where, f"no column {word!r}", ", ".join(columns))

    def _values(self, axis: str, given: Any) -> Iterator[_Value]:
        where = f"{self.name}.runs.{axis}"
        if isinstance(given, str):
            if given not in self.study.names:
                raise InputError(where, f"{given!r} is not a name", ", ".join(self.study.names))
            given = self.study.names[given]
        if not isinstance(given, list | dict) or not given:
            raise InputError(where, f"{given!r}", "a list of values, or names with values")
        if isinstance(given, list):
            given = {value: value for value in given}
        for name, value in given.items():
            yield _Value(name, value if isinstance(value, dict) else {axis: value})

    def _parsed(self, claim: _Claim, names: set[str]) -> Callable[[Mapping[str, Any]], Any]:
        """Return the claim's value and reason as a function of a scope."""
        where = f"{self.name}.claims"
        for axis in claim.each:
            if axis not in self.axes:
                raise InputError(f"{where}.each", f"no axis {axis!r}", ", ".join(self.axes))
        for _, name, _spec in fields(claim.says, f"{where}.says"):
            if name and name not in claim.each:
                allowed = ", ".join(claim.each) or "none: there is no each"
                raise InputError(f"{where}.says", f"unknown name {name!r}", allowed)
        names = {*names, *claim.each}
        value = parse(claim.value, f"{where}.value", names)
        why = [
            (before, parse(inner, f"{where}.why", names) if inner else None, spec)
            for before, inner, spec in fields(claim.why, f"{where}.why")
        ]

        def of(scope: Mapping[str, Any]) -> tuple[float, str]:
            try:
                reason = "".join(
                    before + (text(evaluate(inner, scope), spec) if inner is not None else "")
                    for before, inner, spec in why
                )
                return float(evaluate(value, scope)), reason
            except (KeyError, TypeError, ValueError, IndexError) as error:
                problem = f"{claim.value!r} of {claim.says!r}: {error}"
                raise InputError(f"{where}.value", problem, "one number") from None

        return of

    def make(self, runner: Runner) -> Reproduction:
        """Run the cells under every seed, and hold the claims against the results."""
        spec, study = self.spec, self.study
        seeds = range(study.seeds)
        cases = [dict(spec.base) for _ in self.cells]
        for case, cell in zip(cases, self.cells, strict=True):
            for value in cell:
                case |= value.fields
        if len(seeds) > 1:
            cases = [case | {"seed": seed} for seed in seeds for case in cases]
        summaries = runner.run(cases)
        n = len(self.cells)
        tables = [_Table(self, summaries[i * n : (i + 1) * n]) for i in seeds]
        claims = [
            made for claim, parsed in self.claims for made in self._claims(claim, parsed, tables)
        ]
        rows = tables[0].rows() if len(tables) == 1 else [
            {"seed": seed} | row for seed, table in zip(seeds, tables, strict=True)
            for row in table.rows()
        ]  # fmt: skip
        return Reproduction(self.name, spec.title, rows, claims, self._picture(tables[0].rows()))

    def _claims(
        self,
        claim: _Claim,
        parsed: Callable[[Mapping[str, Any]], tuple[float, str]],
        tables: Sequence["_Table"],
    ) -> Iterator[Claim]:
        for values in product(*(self.axes[axis] for axis in claim.each)):
            labels = {axis: v.name for axis, v in zip(claim.each, values, strict=True)}
            scopes = [parsed(table.scope(labels)) for table in tables]
            ours = t_interval([value for value, _ in scopes])
            paper = claim.paper
            if isinstance(paper, dict):
                key = next((str(v) for v in labels.values() if str(v) in paper), None)
                if key is None:
                    problem = f"no range for {', '.join(map(str, labels.values()))}"
                    raise InputError(f"{self.name}.claims.paper", problem, ", ".join(paper))
                paper = paper[key]
            low, high = paper if isinstance(paper, tuple) else (paper, paper)
            yield Claim(
                claim.says.format(**labels), low, high, ours.mean, claim.unit, claim.tolerance,
                scopes[0][1], claim.stated, claim.neutral, claim.given,
                None if len(tables) == 1 else (ours.low, ours.high), claim.trend,
            )  # fmt: skip

    def _picture(self, rows: list[dict[str, Any]]) -> Callable[[Any], None]:
        said, named = self.spec.picture, self.study.named
        if said is None:
            metrics = [key for key in rows[0] if key not in self.axes]
            return bars(rows, self.spec.compare, tuple(metrics[:3]), _others(self))
        y = tuple(map(named, said.y))
        y = tuple(f"{each}_percent" for each in y) if self.spec.gains else y
        by, panel = (
            named(each) if isinstance(each, str) else tuple(map(named, each))
            for each in (said.by, said.panel)
        )
        if said.lines:
            return lines(rows, named(said.lines), y, by, panel)
        return bars(rows, named(said.bars), y, by, panel, label=said.label)


def _others(grid: _Grid) -> tuple[str, ...]:
    return tuple(axis for axis in grid.axes if axis != grid.spec.compare)


class _Table:
    """The results of a grid under one seed, and the functions of its expressions."""

    def __init__(self, grid: _Grid, summaries: Sequence[Summary]) -> None:
        self.grid, self.summaries = grid, summaries
        names = [tuple(value.name for value in cell) for cell in grid.cells]
        self.index = pd.MultiIndex.from_tuples(names, names=list(grid.axes))

    def column(self, metric: str) -> "pd.Series[Any]":
        """Return a figure of every cell."""
        name = self.grid.study.named(metric)
        try:
            return pd.Series([figure_of(s, name) for s in self.summaries], self.index)
        except (KeyError, TypeError):
            known = ", ".join(self.summaries[0])
            raise InputError(f"{self.grid.name}", f"no figure {name!r} in a run", known) from None

    def rows(self) -> list[dict[str, Any]]:
        """Return the figure's table."""
        spec, named = self.grid.spec, self.grid.study.named
        if not spec.gains:
            shown = {named(m): self.column(m) for m in spec.show or ["median_tpot_ms"]}
            frame = pd.DataFrame(shown).reset_index()
            return [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]
        scope, rows = self.scope({}), []
        for value in self.grid.axes[spec.compare]:
            if value.name == spec.against:
                continue
            found = pd.DataFrame(
                {
                    f"{named(m)}_percent": _series(scope["gain"](m, value.name, spec.against))
                    for m in spec.gains
                }
            )
            kept = found.reset_index().drop(columns="index", errors="ignore").to_dict("records")
            rows += [{spec.compare: value.name} | {str(k): v for k, v in r.items()} for r in kept]
        return rows

    def scope(self, each: Mapping[str, Any]) -> dict[str, Any]:
        """Return what an expression may name; ``each``: values of axes to which it is bound."""
        spec = self.grid.spec

        def cells(metric: str, variant: Any) -> "pd.Series[Any]":
            values = self.column(metric)
            for axis, name in {**each, spec.compare: variant}.items():
                if name not in values.index.get_level_values(axis):
                    known = ", ".join(str(value.name) for value in self.grid.axes[axis])
                    raise InputError(f"{self.grid.name}.{axis}", f"no value {name!r}", known)
                values = (
                    values.xs(name, level=axis)
                    if values.index.nlevels > 1
                    else pd.Series([values[name]], [""])
                )
            return values

        def gains(metric: str, variant: Any, against: Any, by: str = "") -> "pd.Series[Any]":
            if not isinstance(against, list):
                other = cells(metric, against)
            else:
                lowest = pd.DataFrame([cells(by or metric, name) for name in against])
                values = pd.DataFrame([cells(metric, name) for name in against])
                best = lowest.to_numpy().argmin(axis=0)
                other = pd.Series(values.to_numpy()[best, range(len(best))], values.columns)
            return 100.0 * (cells(metric, variant) / other - 1.0)

        def averaged(values: "pd.Series[Any]") -> Any:
            over = [axis for axis in values.index.names if axis not in (spec.over, None)]
            if not over:
                return math.fsum(values) / len(values)
            groups = values.groupby(level=over, sort=False)
            return groups.apply(lambda each: math.fsum(each) / len(each))

        return {
            **self.grid.study.names,
            **each,
            "mean": lambda metric, variant: averaged(cells(metric, variant)),
            "gain": lambda *said: averaged(gains(*said)),
            "gains": gains,
            "average": lambda values: math.fsum(values) / len(values),
            "min": min,
            "max": max,
        }


_FUNCTIONS = ("mean", "gain", "gains")


def _series(value: Any) -> "pd.Series[Any]":
    return value if isinstance(value, pd.Series) else pd.Series([value])


def _maker(grid: _Grid, runner: Runner) -> Callable[[], Reproduction]:
    return lambda: grid.make(runner)
