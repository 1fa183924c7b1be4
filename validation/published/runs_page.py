"""The page of runs with launch lines: errors by cells, rows that nothing was chosen by first."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv

from eldr_sim.outputs import markdown_table, whole_file
from eldr_sim.planning.studies.figures import grouped
from eldr_sim.validation.published.journal import Found
from eldr_sim.validation.published.runs import MANY, Line, PublishedRun, lines_of

_USED = {"never": "never used", "in_view": "a cause was found on them", "fit": "fitted on"}


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
    groups = dict[str, list[Line]]()
    for used, words in _USED.items():
        of = [line for line in lines if line.run.used == used]
        for many, load in ((False, f"up to {MANY} in flight"), (True, f"more than {MANY}")):
            part = [line for line in of if line.many == many]
            if part:
                groups[f"{words}, {load}"] = part
    return groups


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
    cells = grouped(lines, lambda line: f"{line.run.row['publisher']}: {line.run.cell}")
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
