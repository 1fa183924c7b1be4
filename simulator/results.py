"""Writing a result: a folder that appears whole or not at all."""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from eldr_sim.errors import InputError
from eldr_sim.lazy import Lazy
from eldr_sim.outputs import whole_folder
from eldr_sim.simulator.outcome.catalogue import Shown
from eldr_sim.simulator.run import Result
from eldr_sim.simulator.setup.config.paths import portable

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:
    pa, pq = Lazy("pyarrow"), Lazy("pyarrow.parquet")

#: The file that the folder of a run, and of most other results, is recognised by.
MARKER = "summary.json"
#: Writes more files into a result's folder.
Extra = Callable[[Path], None]


def check_output(out: Path, force: bool, marker: str = MARKER) -> None:
    """Raise InputError unless a result may be written to ``out``: with ``force`` also in place of
    an empty folder, or one that ``marker`` shows to be a result of its kind."""
    if out.is_symlink() and not out.exists():
        problem = f"{out} is a link to {os.readlink(out)}, which does not exist"
        raise InputError("out", problem, "a new folder")
    if not out.exists():
        return
    if not force:
        raise InputError("out", f"{out} exists", "a new folder, or --force to replace a result")
    if not out.is_dir() or (any(out.iterdir()) and not (out / marker).exists()):
        raise InputError(
            "out",
            f"{out} exists and is not a result with a {marker}",
            "a new folder, or such a result",
        )


@contextmanager
def result_folder(
    out: Path, force: bool, marker: str = MARKER, extras: Sequence[Extra] = ()
) -> Iterator[Path]:
    """Write a result folder completely or not at all.

    Args:
        out: the folder.
        force: whether to replace a folder that holds a result.
        marker: file that identifies a result folder.
        extras: functions that write further files into the folder.

    Yields:
        A temporary folder that becomes ``out`` when the block succeeds.

    Raises:
        InputError: ``out`` exists and may not be replaced (`check_output`), or cannot be written.
    """
    check_output(out, force, marker)
    with whole_folder(out) as folder:
        yield folder
        for write in extras:
            write(folder)


class Written(Shown):
    """A result that is written into a folder, which its file ``marker`` tells from others."""

    marker: ClassVar[str] = MARKER

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Return what stands in the marker."""

    def tables(self) -> dict[str, pa.Table]:
        """Return the tables beside it, by the names of their files."""
        return {}

    def write(
        self, out: str | os.PathLike[str], *, force: bool = False, extras: Sequence[Extra] = ()
    ) -> None:
        """Write the folder that the command writes with ``--out``, whole or not at all.

        Raises InputError as `check_output` does."""
        with result_folder(Path(out), force, self.marker, extras) as folder:
            for name, table in self.tables().items():
                write_table(folder / f"{name}.parquet", table)
            write_json(folder / self.marker, portable(self.record(), out))


def write_result(
    result: Result,
    out: str | os.PathLike[str],
    *,
    force: bool = False,
    extras: Sequence[Extra] = (),
) -> None:
    """Write the four files of a run into a folder, completely or not at all.

    Args:
        result: the run.
        out: the folder.
        force: whether to replace a result (`check_output`).
        extras: functions that write further files into the folder.

    Raises:
        InputError: ``out`` exists and may not be replaced, or cannot be written.
    """
    with result_folder(Path(out), force, extras=extras) as folder:
        write_json(folder / MARKER, result.summary)
        write_json(folder / "config.json", portable(result.config, out))
        write_table(folder / "requests.parquet", result.requests)
        write_tables(folder / "steps.parquet", result.step_tables())


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON; infinite rates become the string ``inf``, as vLLM writes them.

    Args:
        path: the file.
        value: what JSON can hold.
    """
    path.write_text(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table as zstd Parquet."""
    write_tables(path, iter([table]))


def write_tables(path: Path, tables: Iterator[pa.Table]) -> None:
    """Write tables of the same columns, one at least, as one zstd Parquet file."""
    first = next(tables)
    with pq.ParquetWriter(path, first.schema, compression="zstd") as writer:
        for table in chain([first], tables):
            writer.write_table(table)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    return value
