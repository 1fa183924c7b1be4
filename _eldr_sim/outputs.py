"""Outputs that appear whole or not at all, whatever interrupts their making."""

import csv
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError

#: What this command has begun to move to its place, with its inode number, in order.
_moved: list[tuple[Path, int]] = []
#: What goes with this process.
_folders: list[tempfile.TemporaryDirectory[str]] = []
#: The field of files in the user's cache, which are not output.
CACHE = "cache"


def forget_written() -> None:
    """Begin a command, which has written nothing."""
    _moved.clear()


def written() -> list[Path]:
    """Return the files and folders that this command has written whole, in order."""
    left = [path for path, inode in _moved if path.exists() and path.stat().st_ino == inode]
    return [at for at in left if not any(at.is_relative_to(own.name) for own in _folders)]


def process_folder(what: str) -> Path:
    """Make a temporary folder that lasts as long as this process: what is in it is not output.
    ``what`` is in it: a part of its name."""
    _folders.append(tempfile.TemporaryDirectory(prefix=f"eldr-sim-{what}-"))
    return Path(_folders[-1].name)


def _move(temporary: Path, out: Path) -> None:
    _moved.append((out, temporary.stat().st_ino))
    os.replace(temporary, out)


@contextmanager
def keeping(say: Callable[[], str]) -> Iterator[None]:
    """Add a note to whatever interrupts the block.

    Args:
        say: called after the interruption; returns what is kept and how to continue, or nothing.

    Yields:
        None.
    """
    try:
        yield
    except BaseException as error:
        if said := say():
            error.add_note(said)
        raise


@contextmanager
def writing(out: Path | str, field: str = "out") -> Iterator[None]:
    """Raise InputError where what the block writes is refused by the file system.

    Args:
        out: what the block writes, for errors.
        field: the option that named it.

    Yields:
        None.
    """
    try:
        yield
    except OSError as error:
        raise InputError(field, f"cannot write {out}: {error.strerror}") from None


def check_place(out: Path, field: str = "out") -> None:
    """Raise InputError where nothing can be written to ``out``, by a try in the first folder above
    it that exists. ``field``: the option that named it."""
    above = next(place for place in Path(out).absolute().parents if place.exists())
    with writing(out, field):
        os.rmdir(tempfile.mkdtemp(prefix=f".{out.name}-", dir=above))


@contextmanager
def whole_file(out: Path, field: str = "out") -> Iterator[Path]:
    """Write a file completely or not at all.

    Args:
        out: the file to replace; its folders are created.
        field: the option that named it, for errors.

    Yields:
        A temporary file, readable by all users, that replaces ``out`` when the block succeeds.

    Raises:
        InputError: ``out`` cannot be written, or the disk is full.
    """
    with writing(out, field):
        out.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{out.name}-", dir=out.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        with _named(out, temporary, field):
            yield temporary
            temporary.chmod(0o644)
            if field == CACHE:
                os.replace(temporary, out)
            else:
                _move(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(out: Path, field: str = "out") -> Iterator[Path]:
    """Write a folder completely or not at all.

    Args:
        out: the folder to replace; folders above it are created.
        field: the option that named it, for errors.

    Yields:
        A temporary folder that replaces ``out`` when the block succeeds.

    Raises:
        InputError: ``out`` cannot be written, or the disk is full.
    """
    with writing(out, field):
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    old: Path | None = None
    try:
        with _named(out, temporary, field):
            yield temporary
            temporary.chmod(0o755)
            if out.exists():
                old = Path(tempfile.mkdtemp(prefix=f".{out.name}-old-", dir=out.parent))
                os.replace(out, old)
            _move(temporary, out)
    finally:
        if old is not None and not out.exists():
            os.replace(old, out)
        for path in (temporary, old):
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _named(out: Path, temporary: Path, field: str) -> Iterator[None]:
    """Name ``out`` where something below the temporary path, or nothing at all, cannot be written.
    What a full disk refuses has no name, and the temporary one says nothing to users."""
    try:
        yield
    except OSError as error:
        name = error.filename
        if name is not None and not Path(os.fsdecode(name)).is_relative_to(temporary):
            raise
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise InputError(field, f"cannot write {out}: {reason}") from None


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV.

    Args:
        path: the file.
        rows: one or more mappings with equal keys, which become the header.
    """
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table.

    Args:
        columns: headings.
        rows: cells of each row.

    Returns:
        Lines without line ends.
    """
    head, *lines = ["| " + " | ".join(map(str, row)) + " |" for row in (columns, *rows)]
    return [head, "|" + "---|" * len(columns), *lines]
