"""Journal of a sweep: one line a completed run, on disk before the next is reported.

``runs.jsonl`` begins with a line that says which sweep it belongs to. A process that is killed may
leave half a line at the end; it is cut off when the sweep goes on, and that run is done again. The
file is locked as long as a sweep is at work, so that a folder has one at a time; the lock dies with
its process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from eldr_sim.errors import InputError
from eldr_sim.planning.runner import Outcome
from eldr_sim.planning.sweep_spec import first_change

FILE_NAME = "runs.jsonl"


class Journal:
    """The outcomes of a sweep by the key of their configuration; see `open_journal`."""

    def __init__(self, file: IO[bytes], outcomes: dict[str, Outcome]) -> None:
        self._file = file
        self.outcomes = outcomes

    def add(self, outcome: Outcome) -> None:
        """Keep an outcome; it is on disk when this returns."""
        self.outcomes[outcome.key] = outcome
        self._file.write(_line(asdict(outcome)))
        _sync(self._file)


@contextmanager
def open_journal(folder: Path, header: dict[str, Any], resume: bool) -> Iterator[Journal]:
    """Open the journal of a sweep's folder, which is made where there is none.

    A folder in which nothing is done yet when the block ends is taken away again.

    Parameters
    ----------
    folder
        The sweep's.
    header
        What the sweep is. All that can be told apart after a round trip through JSON counts.
    resume
        Go on with what is there.

    Raises
    ------
    InputError
        If another process is at work in the folder; if there is something in it and ``resume`` is
        not asked for; if it belongs to another sweep, or is damaged otherwise than at its end.
    """
    try:
        strangers = folder.exists() and not (folder / FILE_NAME).exists() and any(folder.iterdir())
        if strangers:
            raise InputError("out", f"{folder} exists and is no sweep", "a new folder, or a sweep")
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / FILE_NAME).open("ab+")
    except OSError as error:
        raise InputError("out", f"cannot write {folder}: {error.strerror}") from None
    with file:
        _lock(file, folder)
        journal = Journal(file, _read(file, folder, json.loads(json.dumps(header)), resume))
        try:
            yield journal
        finally:
            if not journal.outcomes:
                with suppress(OSError):
                    (folder / FILE_NAME).unlink()
                    folder.rmdir()


def _lock(file: IO[bytes], folder: Path) -> None:
    """Lock a journal until it is closed, be it by the end of the process."""
    import fcntl  # POSIX has it; all other commands do without

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = os.fstat(file.fileno()).st_nlink > 0  # else its owner has just taken it away
    except OSError:
        locked = False
    if not locked:
        raise InputError("out", f"another sweep is at work in {folder}", "a folder of its own")


def _read(file: IO[bytes], folder: Path, header: Any, resume: bool) -> dict[str, Outcome]:
    """Read what is done, and leave the file such that the next line can be written."""
    file.seek(0)
    records = []
    whole = 0  # bytes of whole lines
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            break
        try:
            records.append(json.loads(line))
        except ValueError:
            raise InputError(
                str(folder / FILE_NAME), f"line {number} is damaged", "the file as it was written"
            ) from None
        whole += len(line)
    outcomes = {record["key"]: Outcome(**record) for record in records[1:]}
    if not outcomes:
        file.truncate(0)
        file.write(_line(header))
        _sync(file)
        return {}
    if not resume:
        done = f"{len(outcomes)} run{'s' * (len(outcomes) != 1)} done"
        raise InputError("out", f"{folder} holds a sweep, {done}", "--resume, or a new folder")
    change = first_change(records[0], header)
    if change is not None:
        raise InputError("resume", f"{folder} holds another sweep: {change}", "a new folder")
    file.truncate(whole)
    return outcomes


def _line(value: Any) -> bytes:
    return (json.dumps(value) + "\n").encode()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
