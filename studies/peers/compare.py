"""Our kept predictions of published runs beside AISimulate's.

``python -m studies.peers.compare`` joins both with the measurements and writes the tables of
docs/data."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.planning.studies.figures import grouped
from eldr_sim.validation.published import judge
from eldr_sim.validation.published.journal import Found
from eldr_sim.validation.published.runs import PublishedRun, read_runs

from .aisimulate import FROZEN

DATA = Path(__file__).parents[2] / "docs" / "data"


def frozen() -> dict[str, Any]:
    """Return the predictions of AISimulate."""
    return dict(judge.predictions(judge.kept(FROZEN)))


class Errors(NamedTuple):
    """A figure of a row: its error as we predict it and as AISimulate does, %."""

    run: PublishedRun
    figure: str
    ours: float
    theirs: float

    @property
    def cell(self) -> str:
        """Publisher, engine, GPU and model."""
        return f"{self.run.row['publisher']}, {self.run.cell}"


def joined(
    runs: Iterable[PublishedRun], ours: Mapping[str, Found], theirs: Mapping[str, Any]
) -> list[Errors]:
    """Return the errors of every figure that was measured and that both predict."""
    found = []
    for run in runs:
        us, them = ours[run.name], theirs[run.name]
        if isinstance(us, str) or isinstance(them, str):
            continue
        for name in {"tpot", "ttft"} & run.measured.keys():
            errors = (100.0 * (x[name] / run.measured[name] - 1.0) for x in (us, them))
            found.append(Errors(run, name, *errors))
    return found


def both(errors: Sequence[Errors]) -> list[str]:
    """Return rows, and median and 90th percentile of our errors and theirs, of each figure."""
    cells = []
    for name in ("tpot", "ttft"):
        found = np.abs([(x.ours, x.theirs) for x in errors if x.figure == name]).reshape(-1, 2)
        cells.append(str(len(found)))
        for side in found.T:
            told = f"{np.median(side):.1f}; {np.quantile(side, 0.9):.0f}" if len(side) else "-"
            cells.append(told)
    return cells


def by_cell(errors: Sequence[Errors]) -> dict[str, list[Errors]]:
    """Return the errors of each cell."""
    return dict(sorted(grouped(errors, attrgetter("cell")).items()))


def ahead(errors: Sequence[Errors]) -> dict[str, tuple[int, int]]:
    """Return the cells with the smaller median error of ours in each figure, and in both, of those
    that have the figure."""
    won, there = dict[str, list[int]](), ("tpot", "ttft")
    for name in (*there, "both"):
        won[name] = [0, 0]
    for cell in by_cell(errors).values():
        better = []
        for name in there:
            found = np.abs([(x.ours, x.theirs) for x in cell if x.figure == name])
            if len(found):
                ours, theirs = np.median(found, axis=0)
                better.append(bool(ours < theirs))
                won[name] = [won[name][0] + better[-1], won[name][1] + 1]
        if len(better) == len(there):
            won["both"] = [won["both"][0] + all(better), won["both"][1] + 1]
    return {name: (n, of) for name, (n, of) in won.items()}


_HEAD = ("rows of TPOT", "ours, %", "AISimulate", "rows of TTFT", "ours", "AISimulate's")


def tables(errors: Sequence[Errors]) -> dict[str, list[list[str]]]:
    """Return the tables of docs/data by name."""
    groups = {"both predict": list(errors)}
    for used, name in (("never", "never used"), ("in_view", "in view"), ("fit", "we fitted on")):
        groups[name] = [x for x in errors if x.run.used == used]
    groups["not fitted on"] = groups["never used"] + groups["in view"]
    for engine in ("vllm", "sglang", "trtllm"):
        groups[engine] = [x for x in errors if x.run.row["engine"].startswith(engine)]
    cells = by_cell(errors)
    return {
        "peers": [["rows", *_HEAD], *([name, *both(found)] for name, found in groups.items())],
        "peers_cells": [["cell", *_HEAD], *([name, *both(x)] for name, x in cells.items())],
    }


def errors() -> list[Errors]:
    """Return the errors of all rows that both predict."""
    kept = judge.predictions(judge.kept())
    return joined([run for run in read_runs() if run.name in kept], kept, frozen())


def main() -> None:
    """Write the tables, and print in how many cells we are ahead."""
    print(ahead(errors()))
    for name, lines in tables(errors()).items():
        with (DATA / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)


if __name__ == "__main__":
    main()
