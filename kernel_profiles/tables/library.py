"""The latency tables that ship with the package: one Parquet file a kind, and an index.

``data/tables/<kind>.parquet`` holds the rows of all tables of a kind, a row group for each GPU;
``index.parquet`` lists each table's rows and metadata. A lookup reads the index
once and then one row group. ``python -m eldr_sim.kernel_profiles.tables.library DIR`` adds the
tables of a folder (as ``profile`` and the makers in ``sources`` write them) to those that ship;
a table of the same name is replaced."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from eldr_sim.kernel_profiles.tables import format
from eldr_sim.lazy import Lazy
from eldr_sim.outputs import whole_file
from eldr_sim.parquet import numbers

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:
    pa, pq = Lazy("pyarrow"), Lazy("pyarrow.parquet")

_INDEX = "index"
_COLUMNS = ("name", "kind", "gpu", "shape", "group", "first", "rows", "columns", "metadata")


class Engine(NamedTuple):
    """The engine to prefer where the kernels of several were measured."""

    name: str = "vllm"  #: as a table's framework begins: ``vllm``, ``sglang`` or ``trtllm``
    version: str = ""  #: rows up to it come before newer ones; empty: the newest

    def before(self, *numbers: int) -> bool:
        """Return `before` of this engine's version."""
        return before(self.version, *numbers)


class ShippedTable(NamedTuple):
    """A table that ships: its name, and where its rows stand."""

    name: str
    kind: format.Kind
    gpu: str
    shape: str  #: as :func:`_shape_key` writes it
    group: int  #: row group of its kind's file
    first: int  #: its first row there
    rows: int
    columns: str  #: its columns, separated by commas
    document: str  #: its metadata, JSON

    @property
    def metadata(self) -> format.TableMetadata:
        """What the table measures, and where it comes from."""
        return _metadata(self.document)

    def load(self) -> format.LatencyTable:
        """Read the table's rows."""
        return _load(self)


@cache
def _metadata(document: str) -> format.TableMetadata:
    return format.TableMetadata.model_validate_json(document)


@lru_cache(maxsize=64)
def _load(table: ShippedTable) -> format.LatencyTable:
    group = _row_group(_folder() / f"{table.kind}.parquet", table.group)
    rows = group.slice(table.first, table.rows)
    columns = {name: numbers(rows.column(name)) for name in table.columns.split(",")}
    return format.LatencyTable(table.metadata, columns)


@lru_cache(maxsize=8)
def _row_group(path: Path, group: int) -> pa.Table:
    with pq.ParquetFile(path) as file:
        return file.read_row_group(group)


def _folder() -> Path:
    return Path(str(resources.files("eldr_sim.kernel_profiles").joinpath("data/tables")))


def _shape_key(shape: Mapping[str, int]) -> str:
    return json.dumps(dict(shape), sort_keys=True)


@lru_cache(maxsize=1)
def shipped_tables() -> tuple[ShippedTable, ...]:
    """Every table that ships with the package, sorted by name."""
    return _read_index(_folder())


def _read_index(folder: Path) -> tuple[ShippedTable, ...]:
    with pq.ParquetFile(folder / f"{_INDEX}.parquet") as file:
        index = file.read().select(_COLUMNS)
    rows = zip(*(column.to_pylist() for column in index.columns), strict=True)
    return tuple(ShippedTable(*row) for row in rows)


_in_use: ContextVar[set[str] | None] = ContextVar("tables in use", default=None)


@contextmanager
def track_table_use() -> Iterator[set[str]]:
    """Yield the names (`table_name`) of the user's tables that are found in this block."""
    used: set[str] = set()
    token = _in_use.set(used)
    try:
        yield used
    finally:
        _in_use.reset(token)


def note_use(names: Iterable[str]) -> None:
    """Count tables as found, whoever notes it."""
    used = _in_use.get()
    if used is not None:
        used.update(names)


def find_table(
    kind: format.Kind,
    gpu: str,
    *,
    shape: Mapping[str, int] | None = None,
    dtype: str | None = None,
    library: str | None = None,
    kernel: str = "",
    engine: Engine | None = None,
    extra: Sequence[format.LatencyTable] = (),
) -> format.LatencyTable | None:
    """The best table for a kernel, or None: the user's own (``extra``) in their order, then the
    strongest provenance, the ``engine``'s own, the newest version (up to its). ``dtype``,
    ``library`` (a framework's name): None accepts any; ``shape``: equal; ``kernel``: part of the
    name of the kernel that ran, such as ``triton``."""
    wanted = dict(shape or {})

    def fits(metadata: format.TableMetadata) -> bool:
        return (
            metadata.kind == kind
            and metadata.gpu == gpu
            and metadata.shape == wanted
            and dtype in (None, metadata.dtype)
            and library in (None, metadata.framework.split()[0])
            and kernel.lower() in metadata.kernel_source.lower()
        )

    for table in extra:
        if fits(table.metadata):
            note_use([format.table_name(table.metadata)])
            return table
    key = (kind, gpu, _shape_key(wanted))
    named = [one for one in shipped_tables() if (one.kind, one.gpu, one.shape) == key]
    candidates = [one for one in named if fits(one.metadata)]
    if not candidates:
        return None
    return max(candidates, key=lambda one: rank(one, engine or Engine())).load()


def version_numbers(version: str) -> list[int]:
    """Return the numbers of a version: 1, 3, 0, 20 of ``1.3.0rc20``."""
    return [int(part) for part in re.findall(r"\d+", version)]


def before(version: str | None, *numbers: int) -> bool:
    """Return whether an engine's version came before another.

    Args:
        version: such as ``0.5.6.post2``; empty or None: the newest.
        numbers: of the other version, such as 0, 5, 7.

    Returns:
        Whether it did; False for the newest.
    """
    return bool(version) and version_numbers(str(version)) < list(numbers)


def rank(table: ShippedTable, engine: Engine) -> tuple[int, int, bool, list[int], str]:
    """Return what orders tables of one kernel: by trust, the engine's before vLLM's before others,
    by version and name. Where all are newer than the engine, the oldest is the nearest."""
    metadata = table.metadata
    version, limit = version_numbers(metadata.framework), version_numbers(engine.version)
    whose = metadata.framework.split()[0]
    own = 2 * (whose == engine.name) + (whose == "vllm")
    within = not (whose == engine.name and limit) or version[: len(limit)] <= limit
    if not within:
        version = [-number for number in version]
    return -format.PROVENANCES.index(metadata.provenance), own, within, version, table.name


def write_library(tables: Iterable[format.LatencyTable], folder: Path) -> int:
    """Write tables as a library: a file a kind and the index; the number of tables. Of tables with
    one name the last stays. The files of other kinds are left alone."""
    named = {format.table_name(table.metadata).removesuffix(".parquet"): table for table in tables}
    index: list[ShippedTable] = []
    by_kind = sorted(named.items(), key=lambda item: (item[1].metadata.kind, item[1].metadata.gpu))
    for kind, of_kind in groupby(by_kind, key=lambda item: item[1].metadata.kind):
        groups = []
        for group, (_, of_gpu) in enumerate(groupby(of_kind, key=lambda i: i[1].metadata.gpu)):
            parts, first = [], 0
            for name, table in sorted(of_gpu):
                about = table.metadata
                what = (name, kind, about.gpu, _shape_key(about.shape))
                said = (",".join(table.columns), about.model_dump_json())
                index.append(ShippedTable(*what, group, first, len(table), *said))
                columns = {key: _column(values) for key, values in table.columns.items()}
                parts.append(pa.table(columns))
                first += len(table)
            groups.append(pa.concat_tables(parts, promote_options="default"))
        schema = pa.unify_schemas([one.schema for one in groups])
        floats = [field.name for field in schema if pa.types.is_floating(field.type)]
        others = [name for name in schema.names if name not in floats]
        with (
            whole_file(folder / f"{kind}.parquet") as temporary,
            pq.ParquetWriter(
                temporary,
                schema,
                compression="zstd",
                compression_level=19,
                use_dictionary=others,
                use_byte_stream_split=floats,
            ) as file,
        ):
            for one in groups:
                file.write_table(_cast(one, schema), row_group_size=max(1, len(one)))
    index.sort(key=lambda table: table.name)
    arrays = [pa.array(values) for values in zip(*index, strict=True)]
    with whole_file(folder / f"{_INDEX}.parquet") as temporary:
        listed = pa.table(arrays, names=list(_COLUMNS))
        pq.write_table(listed, temporary, compression="zstd", compression_level=19)
    return len(index)


def _column(values: Any) -> pa.Array:
    values = np.asarray(values)
    return pa.array(values.tolist() if values.dtype.kind in "OUT" else values)


def _cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Order a table's columns as the schema has them; nulls where it lacks one."""
    missing = [field for field in schema if field.name not in table.column_names]
    for field in missing:
        table = table.append_column(field, pa.nulls(len(table), field.type))
    return table.select(schema.names)


def main(folder: Path) -> None:
    """Add the tables of a folder to those that ship."""
    added = [format.load_table(path) for path in sorted(folder.glob("*.parquet"))]
    count = write_library([*(one.load() for one in shipped_tables()), *added], _folder())
    print(f"Wrote {_folder()}: {count} tables")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
