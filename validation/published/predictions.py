"""Published runs beside predictions. A source says how its configurations are simulated, given
these alone: nothing can be fitted on what was measured."""

import csv
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from eldr_sim.simulator.control.record import RunRecord
from eldr_sim.simulator.run import build_cluster
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.traces.workload import Workload

C = TypeVar("C", bound=Hashable)
#: Predicted figures of a configuration, ms, by name.
Figures: TypeAlias = Mapping[str, float | None]


@dataclass(frozen=True)
class PublishedRow(Generic[C]):
    """A published run."""

    case: C  #: its configuration: all that its prediction sees
    labels: Mapping[str, Any]  #: what names it in a table
    measured: Mapping[str, float]  #: figures, ms, by name
    #: Predictions of others: figures by name of the estimator.
    others: Mapping[str, Mapping[str, float]]


def predict(
    rows: Sequence[PublishedRow[C]],
    begin: Callable[[Path], Callable[[C], Figures]],
    progress: Callable[[float], None] = lambda _share: None,
) -> pa.Table:
    """Predict published runs; those of one configuration are simulated once.

    Returns a row a run and figure: labels, ``metric``, ``measured_ms``, ``predicted_ms``, errors in
    %, other estimators' too, and predicted parts, ms. ``begin``: given a folder to work in, returns
    what predicts a configuration's figures, of which parts begin with ``part_``."""
    cases, predictions = list(dict.fromkeys(row.case for row in rows)), {}
    with TemporaryDirectory() as folder:
        figures_of = begin(Path(folder))
        for done, case in enumerate(cases, 1):
            predictions[case] = figures_of(case)
            progress(done / len(cases))
    records: list[dict[str, Any]] = []
    for row in rows:
        figures = predictions[row.case]
        parts = {f"{k.removeprefix('part_')}_ms": v for k, v in figures.items() if "part_" in k}
        for metric, measured in row.measured.items():
            predicted = figures[metric]
            assert predicted is not None
            records.append(
                {
                    **row.labels,
                    "metric": metric,
                    "measured_ms": float(measured),
                    "predicted_ms": predicted,
                    "error": 100.0 * (predicted / measured - 1.0),
                    **{
                        f"{name}_error": 100.0 * (their[metric] / measured - 1.0)
                        for name, their in row.others.items()
                    },
                    **parts,
                }
            )
    return pa.Table.from_pylist(records)


def shipped_rows(name: str) -> Iterator[list[dict[str, str]]]:
    """Yield the lines, one a figure, of each run of a table of the package."""
    text = (files(__package__) / "rows" / f"{name}.csv").read_text(encoding="utf-8")
    lines = list(csv.DictReader(text.splitlines()))
    keys = list(lines[0])[: list(lines[0]).index("metric")]
    for _, run in groupby(lines, key=lambda line: [line[key] for key in keys]):
        yield list(run)


def simulate(fields: Mapping[str, Any], trace: Path | None, workload: Workload) -> RunRecord:
    """Return the run of requests that replay a routing trace; None for a dense model."""
    path = None if trace is None else str(trace)
    common = {"policy": "round_robin", "gpu_memory_utilization": 0.9, "trace": path}
    config = make_config({"num_requests": len(workload), **common, **fields})
    return build_cluster(config, prepare(config), workload, (0.0, np.inf)).run()


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors of a group of rows, %."""

    #: ``group``, ``metric``: name of the group, and of the figure.
    group: str
    metric: str
    #: Of unmarked rows; ``bias`` is the signed mean, ``middle`` the signed median.
    rows: int
    median: float
    p90: float
    bias: float
    middle: float
    #: ``all_rows``, ``all_median``, ``all_p90``: the same of all rows.
    all_rows: int
    all_median: float
    all_p90: float


def errors_of(
    table: pa.Table, groups: Sequence[Sequence[str]] = ((),), column: str = "error"
) -> list[Errors]:
    """Return the errors of groups of rows, each combination of values of ``groups``' columns; rows
    with a reason in ``excluded`` are marked. ``column``: ``error``, or another estimator's."""
    frame = table.to_pandas()
    kept = frame["excluded"] == "" if "excluded" in frame else frame["metric"] != ""
    errors = []
    for by in groups:
        parts = frame.groupby(list(by), sort=True) if by else [((), frame)]
        for key, every in parts:
            values = key if isinstance(key, tuple) else (key,)
            name = ", ".join(f"{k} {v}" for k, v in zip(by, values, strict=True)) or "all"
            for metric, rows in every.groupby("metric", sort=False):
                of, of_all = rows.loc[kept[rows.index], column], rows[column].abs()
                if len(of):
                    errors.append(
                        Errors(
                            name, str(metric), len(of), *_size(of.abs()), float(of.mean()),
                            float(of.median()), len(of_all), *_size(of_all),
                        )
                    )  # fmt: skip
    return errors


def _size(errors: Any) -> tuple[float, float]:
    """Return median and 90th percentile."""
    return float(errors.median()), float(errors.quantile(0.9))
