"""The page of runs with launch lines: errors by cells, rows that nothing was chosen by first."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import csv

from eldr_sim.outputs import markdown_table, whole_file
from eldr_sim.validation.published.journal import Found
from eldr_sim.validation.published.runs import PublishedRun

#: Rows with more requests in flight on a worker are told apart: servers and clients set the pace.
MANY = 256
_USED = {"never": "never used", "in_view": "a cause was found on them", "fit": "fitted on"}


class Line(NamedTuple):
    """A figure of a row beside its prediction."""

    run: PublishedRun
    metric: str
    measured: float
    predicted: float
    many: bool  #: whether more than `MANY` requests were in flight

    @property
    def error(self) -> float:
        """In %."""
        return 100.0 * (self.predicted / self.measured - 1.0)


def lines_of(runs: Sequence[PublishedRun], found: Mapping[str, Found]) -> Iterator[Line]:
    """Yield what was measured and is predicted."""
    for run in runs:
        what = found[run.name]
        if isinstance(what, dict):
            for metric, measured in run.measured.items():
                if what.get(metric):
                    many = what["in_flight"] > MANY
                    yield Line(run, metric, measured, what[metric], many)


def sizes(errors: Sequence[float]) -> str:
    """Return median and 90th percentile of the sizes of errors, and their signed median, %."""
    if not errors:
        return ""
    found = np.abs(errors)
    return f"{np.median(found):.1f}, {np.quantile(found, 0.9):.1f}, {np.median(errors):+.1f}"


def _table(groups: Mapping[str, Sequence[Line]]) -> list[str]:
    columns = ["rows", *(part for name in ("TPOT", "TTFT", "throughput") for part in ("n", name))]
    cells = []
    for name, lines in groups.items():
        cell = [name]
        for metric in ("tpot", "ttft", "throughput"):
            errors = [line.error for line in lines if line.metric == metric]
            cell += [str(len(errors)), sizes(errors)]
        cells.append(cell)
    return markdown_table(columns, cells)


def _groups(lines: Sequence[Line]) -> dict[str, list[Line]]:
    groups = defaultdict[str, list[Line]](list)
    for used, words in _USED.items():
        of = [line for line in lines if line.run.used == used]
        for many, load in ((False, f"up to {MANY} in flight"), (True, f"more than {MANY}")):
            part = [line for line in of if line.many == many]
            if part:
                groups[f"{words}, {load}"] = part
    return dict(groups)


def headline(runs: Sequence[PublishedRun], found: Mapping[str, Found]) -> list[str]:
    """Return the errors by use and load, the lines of a table."""
    return _table(_groups(list(lines_of(runs, found))))


def write(
    runs: Sequence[PublishedRun], found: Mapping[str, Found], folder: Path, command: str, date: str
) -> None:
    """Write ``runs.md`` and ``runs.csv``: errors by use, by cell, and rows without a prediction."""
    lines = list(lines_of(runs, found))
    text = ["# Runs with their launch lines", "", f"`{command}`, {date}.", ""]
    text += ["Errors in %: median, 90th percentile, signed median.", "", *_table(_groups(lines))]
    cells = defaultdict[str, list[Line]](list)
    for line in lines:
        row = line.run.row
        engine = row["engine"].partition("==")[0]
        model = row["model"].rpartition("/")[2]
        cells[f"{row['publisher']}: {engine}, {row['gpu']}, {model}"].append(line)
    text += ["", "## Cells", "", *_table(dict(sorted(cells.items()))), ""]
    refused = defaultdict[str, list[str]](list)
    for run in runs:
        what = found[run.name]
        if isinstance(what, str):
            refused[what].append(run.name)
        elif run.doubt:
            refused[f"not compared: {run.doubt}"].append(run.name)
    why = [[str(len(names)), names[0], reason] for reason, names in refused.items()]
    text += ["## Not predicted or not compared", "", *markdown_table(["rows", "first", "why"], why)]
    with whole_file(folder / "runs.md") as page:
        page.write_text("\n".join([*text, ""]), encoding="utf-8")
    table = [
        {
            "name": line.run.name, "publisher": line.run.row["publisher"], "used": line.run.used,
            "figure": line.metric, "measured": line.measured, "predicted": line.predicted,
            "error": line.error,
        }
        for line in lines
    ]  # fmt: skip
    if table:
        with whole_file(folder / "runs.csv") as file:
            csv.write_csv(pa.Table.from_pylist(table), file)
