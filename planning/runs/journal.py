"""Journal of a sweep or a plan: one line per ended run, on disk before progress is reported.

The first line of ``runs.jsonl`` identifies it; an incomplete last line is cut off when it is
resumed, and that run repeated. The file is locked until the process that writes it ends."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from eldr_sim.errors import InputError
from eldr_sim.outputs import keeping, writing
from eldr_sim.planning.runs.runner import Outcome
from eldr_sim.planning.runs.sweep_spec import first_change

FILE_NAME = "runs.jsonl"


class Journal:
    """Outcomes of runs by configuration key; see `open_journal`."""

    def __init__(
        self, file: IO[bytes], header: Any, outcomes: dict[str, Outcome], replaces: Sequence[Path]
    ) -> None:
        self._file, self._header, self._replaces = file, header, replaces
        self.outcomes = outcomes

    def add(self, outcome: Outcome) -> None:
        """Add an outcome; it is on disk when this returns."""
        try:
            if not self.outcomes:
                for path in self._replaces:
                    path.unlink(missing_ok=True)
                self._file.truncate(0)
                self._file.write(_line(self._header))
            self._file.write(_line(asdict(outcome)))
            self.outcomes[outcome.key] = outcome
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            self.outcomes.pop(outcome.key, None)
            raise InputError("out", f"cannot write {self._file.name}: {error.strerror}") from None

    def discard(self) -> None:
        """Forget all outcomes: the folder is removed when the block of the journal ends."""
        self.outcomes.clear()
        self._file.truncate(0)


@contextmanager
def open_journal(
    folder: Path,
    header: dict[str, Any],
    resume: bool,
    what: str = "sweep",
    *,
    replaces: Sequence[Path] = (),
) -> Iterator[Journal]:
    """Open the journal of a folder, and make the folder; remove it again if no run has ended with
    the block.

    ``header``: identity, compared as JSON; ``resume``: continue an existing journal; ``what`` it
    is of; ``replaces``: files that go, with the runs that the folder holds, when the first run
    ends. Raises InputError if another process writes to the folder; if it is not empty and
    ``resume`` is false; if it belongs to another sweep, or is damaged before its last line."""
    with writing(folder):
        strangers = folder.exists() and not (folder / FILE_NAME).exists() and any(folder.iterdir())
        if strangers:
            problem = f"{folder} exists and is not a {what}"
            raise InputError("out", problem, f"a new folder, or a {what}")
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / FILE_NAME).open("ab+")
    with file:
        _lock(file, folder, what)
        header = json.loads(json.dumps(header))
        outcomes = {} if replaces else _read(file, folder, header, resume, what)
        journal = Journal(file, header, outcomes, replaces)
        try:
            with keeping(lambda: _kept(folder, journal)):
                yield journal
        finally:
            if not journal.outcomes and os.fstat(file.fileno()).st_size == 0:
                with suppress(OSError):
                    (folder / FILE_NAME).unlink()
                    folder.rmdir()


def _kept(folder: Path, journal: Journal) -> str:
    done = len(journal.outcomes)
    runs = f"{done} ended run{'s' * (done != 1)}"
    return f"{folder} keeps {runs}; --resume continues." if done else ""


def _lock(file: IO[bytes], folder: Path, what: str) -> None:
    """Lock a journal until it is closed or its process ends; on Windows nothing is locked."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = os.fstat(file.fileno()).st_nlink > 0  # else its owner has just removed it
    except OSError:
        locked = False
    if not locked:
        raise InputError("out", f"another {what} is running in {folder}", "another folder")


def _read(
    file: IO[bytes], folder: Path, header: Any, resume: bool, what: str
) -> dict[str, Outcome]:
    """Read the outcomes, and truncate the file where the next line goes."""
    file.seek(0)
    records: list[Any] = []
    whole = 0  # bytes of complete lines
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            break
        try:
            record = json.loads(line)
            records.append(Outcome(**record) if records else record)
        except (ValueError, TypeError, RecursionError):
            raise InputError(
                str(folder / FILE_NAME), f"line {number} is damaged", "the file as it was written"
            ) from None
        whole += len(line)
    outcomes = {outcome.key: outcome for outcome in records[1:]}
    if not outcomes:
        file.truncate(0)
        return {}
    if not resume:
        done = f"{len(outcomes)} run{'s' * (len(outcomes) != 1)} done"
        ways = (
            "--resume, --force, or a new folder" if what == "sweep" else "--resume, or a new folder"
        )
        raise InputError("out", f"{folder} holds a {what}, {done}", ways)
    change = first_change(records[0], header)
    if change is not None:
        raise InputError("resume", f"{folder} holds another {what}: {change}", "a new folder")
    file.truncate(whole)
    return outcomes


def _line(value: Any) -> bytes:
    return (json.dumps(value) + "\n").encode()
