"""The running judge: errors of kept predictions by cell, and which cells a change moves.

``rows/predicted.json`` holds the predictions of the rows with launch lines and at most 256 requests
in flight on a worker, as `freeze` writes them. A cell is an engine, a GPU and a model."""

import csv
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.validation.published.freeze import checksum
from eldr_sim.validation.published.journal import Found
from eldr_sim.validation.published.runs import PublishedRun

#: A cell moves where its median error changes by more than this many points and this share.
POINTS, SHARE = 2.0, 0.1
_FIGURES = ("tpot", "ttft")
_KEPT = files(__package__) / "rows" / "predicted.json"
#: Rows that are predicted again in every run of the tests: of all three engines, dense and with
#: experts; the routing of larger models takes too long to draw.
WATCHED = (
    "gs_299", "gs_301", "gs_300", "gs_315", "gs_318", "gs_266", "gs_205", "gs_129", "gs_133",
    "157_GPT-OSS",
)  # fmt: skip


class Cell(NamedTuple):
    """An engine, a GPU and a model: rows compared, and the median size of the error of each figure,
    %; None where none was measured."""

    name: str
    rows: int
    tpot: float | None
    ttft: float | None


def kept(path: Traversable = _KEPT) -> dict[str, Any]:
    """Return the kept predictions: ``version``, ``date``, ``checksum``, and ``rows`` by name."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert checksum(found) == found["checksum"], f"{path.name} was changed by hand"
    return found


def predictions(content: Mapping[str, Any]) -> dict[str, Found]:
    """Return the predictions of a file of `freeze`."""
    return {name: row["prediction"] for name, row in content["rows"].items()}


def cells(runs: Iterable[PublishedRun], found: Mapping[str, Found]) -> dict[str, Cell]:
    """Return the errors of predictions by cell, in the order of their names."""
    errors = defaultdict[str, dict[str, list[float]]](lambda: {name: [] for name in _FIGURES})
    counts = defaultdict[str, int](int)
    for run in runs:
        what = found.get(run.name)
        if not isinstance(what, dict) or not any(name in run.measured for name in _FIGURES):
            continue
        cell = run.cell
        counts[cell] += 1
        for name in _FIGURES:
            if name in run.measured and what.get(name):
                errors[cell][name].append(100.0 * abs(what[name] / run.measured[name] - 1.0))
    return {
        name: Cell(name, counts[name], *(_median(errors[name][each]) for each in _FIGURES))
        for name in sorted(errors)
    }


def _median(errors: Sequence[float]) -> float | None:
    return float(np.median(errors)) if errors else None


def moved(before: Mapping[str, Cell], after: Mapping[str, Cell]) -> list[str]:
    """Return a sentence for each cell with an error that changes by more than `POINTS` and `SHARE`,
    or that is there on one side only."""
    said = []
    for name in sorted({*before, *after}):
        if name not in before or name not in after:
            said.append(f"{name}: {'no longer predicted' if name in before else 'new'}")
            continue
        for figure in _FIGURES:
            old, new = getattr(before[name], figure), getattr(after[name], figure)
            if old is None or new is None:
                continue
            if abs(new - old) > max(POINTS, SHARE * old):
                said.append(f"{name}: {figure.upper()} errs by {new:.1f}%, not {old:.1f}%")
    return said


def unsaid(lines: Iterable[str], changelog: str) -> list[str]:
    """Return the moved cells that a changelog does not name."""
    return [line for line in lines if line.partition(":")[0] not in changelog]


def write_table(path: Path, found: Iterable[Cell], date: str) -> None:
    """Write the cells as a table of the docs."""
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow([f"engine, GPU, model ({date})", "rows", "TPOT, %", "TTFT, %"])
        for cell in found:
            figures = ["" if each is None else f"{each:.0f}" for each in (cell.tpot, cell.ttft)]
            lines.writerow([cell.name, cell.rows, *figures])
