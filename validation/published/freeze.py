"""Predictions that are written down before their measurements are read.

A file of frozen predictions holds each row's launch and load, the prediction or why there is none,
whether the row already had a measurement, the version, the date, and a checksum of all that."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.inputs import read_text
from eldr_sim.outputs import whole_file
from eldr_sim.validation.published.journal import Found
from eldr_sim.validation.published.runs import MEASURED, Line, PublishedRun, lines_of

#: Columns of a row that are no part of what was launched.
_APART = (*MEASURED, "used", "doubt", "ttft_doubt", "note", "licence", "source")


def freeze(
    path: Path, runs: Sequence[PublishedRun], found: Mapping[str, Found], version: str, date: str
) -> str:
    """Write the predictions of rows; returns the checksum."""
    rows = {
        run.name: {
            "launch": _launch(run),
            "measured": any(run.row.get(name) for name in MEASURED),
            "prediction": found[run.name],
        }
        for run in runs
    }
    content: dict[str, Any] = {"version": version, "date": date, "rows": rows}
    content["checksum"] = checksum(content)
    with whole_file(path, "freeze") as file:
        file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return str(content["checksum"])


def checksum(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of everything but the checksum."""
    rest = {name: value for name, value in content.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def compare(path: Path, runs: Sequence[PublishedRun]) -> tuple[dict[str, Any], list[Line]]:
    """Return frozen predictions, and them beside what rows say by now; raises InputError for a file
    that was changed, a row that was launched otherwise or had been measured when it was frozen,
    and where nothing is measured."""
    try:
        content = json.loads(read_text(path, "compare"))
        rows = dict(content["rows"])
        known = content["checksum"]
    except (ValueError, TypeError, KeyError) as error:
        problem = f"{path} is not read: {type(error).__name__}: {error}"
        raise InputError("compare", problem, "a file that --freeze wrote") from None
    if checksum(content) != known:
        raise InputError("compare", f"{path} was changed after it was frozen", "as written")
    frozen = [run for run in runs if run.name in rows]
    for run in frozen:
        row = rows[run.name]
        if row["measured"]:
            problem = f"the measurement of {run.name} was known when it was frozen"
            raise InputError("compare", problem, "rows that were frozen without measurements")
        if row["launch"] != _launch(run):
            raise InputError("compare", f"{run.name} has another launch line now", "as frozen")
    found = {name: row["prediction"] for name, row in rows.items()}
    compared = list(lines_of(frozen, found))
    if not compared:
        raise InputError("compare", f"no row of {path} has a measurement now", "rows with some")
    return content, compared


def _launch(run: PublishedRun) -> dict[str, str]:
    return {k: v for k, v in run.row.items() if k not in _APART and v}
