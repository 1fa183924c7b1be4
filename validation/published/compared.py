"""Predictions of a folder of ``validate published`` beside what was measured, for bands."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from eldr_sim.errors import InputError
from eldr_sim.simulator.outcome.error_band import Kind
from eldr_sim.validation.published import record, runs
from eldr_sim.validation.published.journal import read_journal


class ComparedRow(NamedTuple):
    """A row that was predicted and measured."""

    publisher: str
    kind: Kind
    measured: Mapping[str, float]
    predicted: Mapping[str, float]


def compared_rows(folder: Path) -> list[ComparedRow]:
    """Return the rows of both records that a folder has predictions of, without those that a
    constant was fitted on and those in doubt; raises InputError where there are none."""
    found = []
    predictions = read_journal(folder / runs.JOURNAL)
    for run in runs.read_runs():
        what = predictions.get(run.name)
        if isinstance(what, dict) and run.measured and run.used != "fit":
            kind = runs.kind_of_run(run, what["in_flight"])
            found.append(ComparedRow(run.row["publisher"], kind, run.measured, what))
    older = read_journal(folder / record.JOURNAL)
    for row in record.read() if older else ():
        what = None if row.run is None else older.get(row.key)
        if isinstance(what, dict) and row.run is not None and not row.run.excluded:
            by = record.publisher_of(row)
            found.append(ComparedRow(by, record.kind_of_row(row), row.measured, what))
    if not found:
        raise InputError("folder", f"{folder} has no predictions", "one of validate published")
    return found
