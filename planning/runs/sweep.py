"""Sweeps: every point is run once, across interruptions. The folder holds ``runs.jsonl``
(`journal`) and, when all have ended, ``points.parquet``, ``aggregate.parquet``, ``.csv`` and
``sweep.json``; their bytes depend neither on interruptions nor on processes."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv

from eldr_sim.errors import InputError
from eldr_sim.parquet import array_of
from eldr_sim.planning.runs import runner
from eldr_sim.planning.runs.journal import Journal, open_journal
from eldr_sim.planning.runs.sweep_spec import SweepSpec, make_spec, read_spec
from eldr_sim.planning.slo import t_interval
from eldr_sim.simulator.outcome.catalogue import HEADLINE, MOST_ROWS, Headline, Shown, label, number
from eldr_sim.simulator.results import write_json, write_table
from eldr_sim.simulator.setup.config.run_config import RunConfig

MARKER = "sweep.json"  #: a folder with this file holds a finished sweep
COMPLETED, FAILED = "completed", "failed"


@dataclass(frozen=True, repr=False)
class SweepResult(Shown):
    """Data set of a sweep."""

    #: A row per point and seed: ``point``, ``name``, ``run``, ``seed``, a column per parameter,
    #: ``status`` (``completed`` or ``failed``), ``reason``, and the metrics, nested ones as JSON
    #: text.
    points: pa.Table
    #: A row per point: ``point``, ``name``, parameters, ``runs_completed``, ``runs_failed``, and
    #: means of numeric metrics with the ends of their intervals as ``_low`` and ``_high`` (null for
    #: one run).
    aggregate: pa.Table
    parameters: list[str]  #: dot paths of the parameters, which name columns of both tables

    def headline(self) -> Headline:
        """Return the means of the headline metrics of the first points."""
        tags = [tag for tag in HEADLINE if tag in self.aggregate.column_names]
        columns = [*self.parameters, *tags, "runs_failed"]
        rows = [
            tuple(number(row[name]) for name in columns)
            for row in self.aggregate.slice(0, MOST_ROWS).select(columns).to_pylist()
        ]
        title = f"{self.aggregate.num_rows} points, {self.points.num_rows} runs"
        left = self.aggregate.num_rows - len(rows)
        heads = (*self.parameters, *map(label, tags), "failed")
        return Headline(title, heads, rows, left)


@dataclass(frozen=True)
class SweepProgress:
    """Progress of a sweep: runs ``done`` of ``total``, and the share of the expected work done."""

    done: int
    total: int
    failed: int
    share: float


def sweep(
    spec: SweepSpec | Mapping[str, Any] | str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    resume: bool = False,
    force: bool = False,
    jobs: int | None = None,
    backend: runner.Backend = "joblib",
    address: str | None = None,
    progress: Callable[[SweepProgress], None] | None = None,
) -> SweepResult:
    """Run all points of a sweep; a failed run is a row with its reason.

    Args:
        spec: a YAML file or its content.
        out: folder for the results; None: nothing is written.
        resume: continue the sweep in ``out``.
        force: replace the sweep in ``out``.
        jobs: number of processes; None: one for each core.
        backend: ``joblib`` or ``ray``.
        address: of a Ray cluster.
        progress: called at the start and after each run.

    Returns:
        A row for each run, with figures or the reason of failure.

    Raises:
        InputError: the sweep, one of its points or the folder is invalid.
    """
    if isinstance(spec, str | os.PathLike):
        spec = read_spec(spec)
    elif not isinstance(spec, SweepSpec):
        spec = make_spec(spec)
    runner.check_backend(jobs, backend, address)
    configs = {
        runner.config_key(config): config for point in spec.points for config in point.configs
    }
    header = {"eldr_sim": version("eldr-sim"), "spec": spec.document}
    folder = None if out is None else Path(out)
    if resume and force:
        raise InputError("force", "together with --resume", "one of the two")
    kept = (
        nullcontext()
        if folder is None
        else open_journal(folder, header, resume, replaces=[folder / MARKER] if force else ())
    )
    with kept as journal:
        outcomes = _run_all(configs, journal, jobs, backend, address, progress)
        result = SweepResult(
            points_table(spec, outcomes),
            aggregate_table(spec, outcomes),
            list(spec.points[0].parameters),
        )
        if folder is not None:
            _write(folder, spec, result)
    return result


def _run_all(
    configs: dict[str, RunConfig],
    journal: Journal | None,
    jobs: int | None,
    backend: runner.Backend,
    address: str | None,
    progress: Callable[[SweepProgress], None] | None,
) -> dict[str, runner.Outcome]:
    """Run the configurations that have no outcome yet, the longest first."""
    outcomes = {} if journal is None else journal.outcomes
    done = {key for key in configs if key in outcomes and not outcomes[key].killed}
    todo = [runner.Point(key, config) for key, config in configs.items() if key not in done]
    todo.sort(key=lambda point: -runner.expected_tokens(point.config))
    tokens = {key: runner.expected_tokens(config) for key, config in configs.items()}

    def report() -> None:
        if progress is not None:
            failed = sum(bool(outcomes[key].reason) for key in done)
            share = math.fsum(tokens[key] for key in done) / math.fsum(tokens.values())
            progress(SweepProgress(len(done), len(configs), failed, share))

    report()
    with closing(runner.run_points(todo, jobs, backend=backend, address=address)) as runs:
        for outcome in runs:
            if journal is None:
                outcomes[outcome.key] = outcome
            else:
                journal.add(outcome)
            done.add(outcome.key)
            report()
    return outcomes


def points_table(spec: SweepSpec, outcomes: Mapping[str, runner.Outcome]) -> pa.Table:
    """Return a row per point and seed; a parameter replaces a metric of its name."""
    rows: list[dict[str, Any]] = []
    for index, point in enumerate(spec.points):
        for run, config in enumerate(point.configs):
            outcome = outcomes[runner.config_key(config)]
            rows.append(
                {
                    **(outcome.summary or {}),
                    "point": index,
                    "name": point.name,
                    "run": run,
                    "seed": config.requests.seed,
                    **point.parameters,
                    "status": FAILED if outcome.summary is None else COMPLETED,
                    "reason": outcome.reason,
                }
            )
    first = ["point", "name", "run", "seed", *spec.points[0].parameters, "status", "reason"]
    return _table(rows, first)


def aggregate_table(spec: SweepSpec, outcomes: Mapping[str, runner.Outcome]) -> pa.Table:
    """Return a row per point: means over its runs with confidence intervals; see `SweepResult`."""
    rows: list[dict[str, Any]] = []
    for index, point in enumerate(spec.points):
        runs = [outcomes[runner.config_key(config)].summary for config in point.configs]
        summaries = [summary for summary in runs if summary is not None]
        row: dict[str, Any] = {}
        for name in dict.fromkeys(name for summary in summaries for name in summary):
            known = _numbers([summary.get(name) for summary in summaries])
            if name in ("seed", *point.parameters) or not known:
                continue
            row[name], low, high = t_interval(known, spec.confidence)
            row[f"{name}_low"] = None if math.isnan(low) else low
            row[f"{name}_high"] = None if math.isnan(high) else high
        row |= {"point": index, "name": point.name, **point.parameters}
        row |= {"runs_completed": len(summaries), "runs_failed": len(runs) - len(summaries)}
        rows.append(row)
    first = ["point", "name", *spec.points[0].parameters, "runs_completed", "runs_failed"]
    return _table(rows, first)


def _numbers(values: Sequence[Any]) -> list[float]:
    return [
        value
        for value in values
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ]


def _table(rows: Sequence[Mapping[str, Any]], first: Sequence[str]) -> pa.Table:
    names = dict.fromkeys([*first, *(name for row in rows for name in row)])
    return pa.table({name: _column([row.get(name) for row in rows]) for name in names})


def _column(values: list[Any]) -> pa.Array:
    """Return a column of numbers or booleans, or of text with other values as JSON."""
    present = [value for value in values if value is not None]
    if any(isinstance(value, bool | str | list | tuple | dict) for value in present) and not all(
        isinstance(value, bool) for value in present
    ):
        values = [
            value if value is None or isinstance(value, str) else json.dumps(value)
            for value in values
        ]
    elif any(isinstance(value, float) for value in present):
        values = [None if value is None else float(value) for value in values]
    # A column without values gets the type of a metric.
    return array_of(values) if present else pa.nulls(len(values), pa.float64())


def _write(folder: Path, spec: SweepSpec, result: SweepResult) -> None:
    """Write the data set, its marker last."""
    (folder / MARKER).unlink(missing_ok=True)
    for stale in folder.glob(".sweep-*"):  # left by a killed process
        shutil.rmtree(stale, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=".sweep-", dir=folder))
    try:
        write_table(temporary / "points.parquet", result.points)
        write_table(temporary / "aggregate.parquet", result.aggregate)
        csv.write_csv(result.aggregate, temporary / "aggregate.csv")
        status = result.points["status"].to_pylist()
        write_json(
            temporary / MARKER,
            {
                "sweep": spec.document,
                "parameters": result.parameters,
                "points": len(spec.points),
                "runs": len(status),
                "failed_runs": status.count(FAILED),
                "confidence_level": spec.confidence,
                "versions": {name: version(name) for name in ("eldr-sim", "numpy", "pyarrow")},
            },
        )
        for name in ("points.parquet", "aggregate.parquet", "aggregate.csv", MARKER):
            os.replace(temporary / name, folder / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
