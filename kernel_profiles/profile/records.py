"""What a measurement leaves behind, and how measurements become latency tables."""

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from eldr_sim.kernel_profiles.profile.timing import Timing
from eldr_sim.kernel_profiles.tables.format import Kind, LatencyTable, TableMetadata, dtypes_of

MAIN = ""  #: folder of the tables that a run uses; the others are for comparison
#: Matrices with more rows (lm_head) are measured with their own k only, and for few tokens.
WIDE = 32768
EAGER, HOT, OTHER = "eager", "warm_cache", "other_kernels"

_NOTES = {
    MAIN: "data rotated past the last-level cache",
    EAGER: "launched one by one, without a graph; data rotated past the last-level cache",
    HOT: "the same data again and again: what the cache holds is read from it",
    OTHER: "another kernel on the same grid; data rotated past the last-level cache",
}


@dataclass(frozen=True)
class Record:
    """One row of one table."""

    folder: str  #: :data:`MAIN`, :data:`EAGER`, :data:`HOT` or :data:`OTHER`
    #: As in `format.TableMetadata`.
    kind: Kind
    shape: Mapping[str, int]
    dtype: str
    kernel_source: str
    framework: str
    row: Mapping[str, Any]  #: the table's columns but the times
    timing: Timing  #: median, quartiles, repeats

    @property
    def table(self) -> tuple[Any, ...]:
        """What rows of one table have in common."""
        shape = tuple(sorted(self.shape.items()))
        return self.folder, self.kind, shape, self.dtype, self.kernel_source, self.framework

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Record":
        """Undo :meth:`to_json`."""
        return cls(**{**values, "timing": Timing(**values["timing"])})


def tables_of(
    records: Iterable[Record], gpu: str, facts: Mapping[str, str]
) -> list[tuple[str, LatencyTable]]:
    """Make latency tables of records: (folder, table), rows in order of their points. A GEMM table
    keeps only such rows (m) as all of its matrices were measured at."""
    groups: dict[tuple[Any, ...], dict[tuple[Any, ...], Record]] = {}
    for record in records:  # a point measured again replaces the earlier figure
        point = tuple(record.row.values())
        groups.setdefault(record.table, {})[point] = record
    tables = []
    for group in groups.values():
        rows = [group[point] for point in sorted(group)]
        if rows[0].kind == "gemm":
            rows = _whole_gemm_rows(rows)
        if rows:
            tables.append((rows[0].folder, _table(rows, gpu, facts)))
    return tables


def _whole_gemm_rows(rows: Sequence[Record]) -> list[Record]:
    matrices: dict[tuple[int, int], set[int]] = {}
    for record in rows:
        row = record.row
        matrices.setdefault((row["n"], row["k"]), set()).add(row["m"])
    # lm_head is measured for few tokens and scaled beyond, see GemmLatency.from_table
    narrow = {pair: found for pair, found in matrices.items() if pair[0] <= WIDE}
    grid = {(n, k) for n, _ in narrow for _, k in matrices}
    if not narrow or grid != set(narrow):
        return []
    whole = set.intersection(*narrow.values())
    return [record for record in rows if record.row["m"] in whole]


def _table(rows: Sequence[Record], gpu: str, facts: Mapping[str, str]) -> LatencyTable:
    first = rows[0]
    columns = {
        name: np.array([record.row[name] for record in rows], dtype)
        for name, dtype in dtypes_of(first.kind).items()
    }
    columns |= Timing.columns([record.timing for record in rows])
    versions = {name: facts[name] for name in ("torch", "triton", "runtime") if name in facts}
    known = {"device", "driver_version", *versions}
    settings = "; ".join(f"{name} {value}" for name, value in facts.items() if name not in known)
    metadata = TableMetadata(
        kind=first.kind,
        gpu=gpu,
        shape=dict(first.shape),
        dtype=first.dtype,
        kernel_source=first.kernel_source,
        framework=first.framework,
        provenance="measured",
        origin="eldr-sim profile",
        device=facts["device"],
        driver=facts.get("driver_version", ""),
        versions=versions,
        date=datetime.date.today().isoformat(),
        notes=f"{_NOTES[first.folder]}; {settings}",
    )
    return LatencyTable(metadata, columns)
