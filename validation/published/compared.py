"""Predictions of a folder of ``validate published`` beside what was measured, for bands."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from eldr_sim.errors import InputError
from eldr_sim.simulator.outcome.error_band import Kind
from eldr_sim.validation.published import record, runs
from eldr_sim.validation.published.journal import OF_RECORD, OF_RUNS, read_journal

_COMMON = (
    "model", "gpu", "request_rate", "max_concurrency", "requests", "input_len", "output_len",
    "length_range", "options",
)  # fmt: skip


class ComparedRow(NamedTuple):
    """A row that was predicted and measured."""

    publisher: str
    kind: Kind
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    #: Model, GPU, engine and load, and how it was launched: runs that differ in the latter alone
    #: are compared with each other.
    common: tuple[str, ...]
    own: str


def compared_rows(folder: Path) -> list[ComparedRow]:
    """Return the rows of both records that a folder has predictions of, without those that a
    constant was fitted on and those in doubt; raises InputError where there are none."""
    compared = []
    predictions = read_journal(folder / OF_RUNS)
    for run in runs.read_runs():
        what = predictions.get(run.name)
        if isinstance(what, dict) and run.measured and run.used != "fit":
            kind = runs.kind_of_run(run, what["in_flight"])
            common = tuple(run.row.get(name, "") for name in _COMMON)
            own = " ".join(run.row[name] for name in ("engine", "launch"))
            compared.append(
                ComparedRow(run.row["publisher"], kind, run.measured, what, common, own)
            )
    older = read_journal(folder / OF_RECORD)
    for row in record.read() if older else ():
        what = None if row.run is None else older.get(row.key)
        if isinstance(what, dict) and row.run is not None and not row.run.excluded:
            by = record.publisher_of(row)
            case = row.run.case
            load = case.concurrency, case.input_len, case.output_len
            common = (row.target, case.gpu, row.labels["engine"], *map(str, load))
            kind = record.kind_of_row(row)
            compared.append(ComparedRow(by, kind, row.measured, what, common, str(case)))
    if not compared:
        raise InputError("folder", f"{folder} has no predictions", "one of validate published")
    return compared
