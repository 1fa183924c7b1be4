"""Result folders: the command that wrote each, and its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eldr_sim.errors import InputError
from eldr_sim.inputs import parse_json, read_text
from eldr_sim.lazy import Lazy
from eldr_sim.parquet import read_table

if TYPE_CHECKING:
    import pyarrow as pa
else:
    pa = Lazy("pyarrow")

Kind = Literal["run", "comparison", "what-if", "drafts", "autoscalers", "sweep", "plan"]
#: Files that identify the kind of a folder, the most specific first.
_FILES: dict[Kind, tuple[str, ...]] = {
    "plan": ("plan.json", "points.parquet"),
    "sweep": ("sweep.json", "points.parquet", "aggregate.parquet"),
    "what-if": ("what_if.json", "runs.parquet"),
    "comparison": ("summary.json", "runs.parquet"),
    "drafts": ("summary.json", "drafts.parquet"),
    "autoscalers": ("summary.json", "autoscalers.parquet"),
    "run": ("summary.json", "config.json", "requests.parquet", "steps.parquet"),
}
_ALLOWED = "a folder that eldr-sim run, compare, what-if, sweep or plan wrote with --out"
#: Folders of other commands, by a file of theirs, and what to read instead of a report.
_OTHERS = {
    "claims.csv": "holds figures of a study; its pictures and claims.csv are the report",
    "bench.sh": "holds files that launch a plan's answer; a report is made of the plan's --out",
}


@dataclass(frozen=True)
class Folder:
    """A result folder."""

    name: str  #: name of the folder, or its path if two folders have the same name
    kind: Kind  #: kind of the result
    #: ``documents``, ``tables``: JSON and Parquet files by name without suffix.
    documents: dict[str, dict[str, Any]]
    tables: dict[str, pa.Table]


def open_folders(paths: Sequence[Path]) -> list[Folder]:
    """Read result folders; raises InputError if one is no result, is given twice or unreadable."""
    if not paths:
        raise InputError("DIR", "no folder given", _ALLOWED)
    resolved = [path.resolve() for path in paths]
    for path, place in zip(paths, resolved, strict=True):
        if resolved.count(place) > 1:
            raise InputError("DIR", f"{path} is given twice")
    names = [place.name for place in resolved]
    return [
        _open(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(paths, names, strict=True)
    ]


@contextmanager
def contents_of(*folders: Folder) -> Iterator[None]:
    """Raise InputError for what goes wrong in the block: the content is not that of its kind."""
    try:
        yield
    except InputError:
        raise
    except (
        LookupError, TypeError, AttributeError, ArithmeticError, ValueError, pa.ArrowException
    ) as error:  # fmt: skip
        which = " or ".join(folder.name for folder in folders)
        problem = (
            f"{which} has a {folders[0].kind}'s files but not its contents "
            f"({type(error).__name__}: {' '.join(str(error).split())})"
        )
        raise InputError("DIR", problem, "a folder written by this version of eldr-sim") from error


def _open(path: Path, name: str) -> Folder:
    kinds = [k for k, files in _FILES.items() if all((path / file).is_file() for file in files)]
    if not kinds:
        own = f"is not a {'result' if path.is_dir() else 'folder'}"
        other = next((text for file, text in _OTHERS.items() if (path / file).is_file()), own)
        raise InputError("DIR", f"{path} {other}", _ALLOWED)
    files = [path / file for file in _FILES[kinds[0]]]
    documents = {file.stem: _read_json(file) for file in files if file.suffix == ".json"}
    tables = {file.stem: _read_table(file) for file in files if file.suffix == ".parquet"}
    return Folder(name, kinds[0], documents, tables)


def _read_json(path: Path) -> dict[str, Any]:
    value = parse_json(read_text(path, "DIR"), "DIR", str(path))
    if not isinstance(value, dict):
        raise InputError("DIR", f"{path} does not hold a JSON object")
    return value


def _read_table(path: Path) -> pa.Table:
    try:
        return read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise InputError("DIR", f"cannot read {path}: {' '.join(str(error).split())}") from None
