"""The log of requests that a server appends to."""

import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from eldr_sim.errors import InputError


class RequestLog:
    """A line of JSON for each entry, appended to a file. A full disk ends the log after its last
    whole line, and not the server. ``say``: called with the line that reports it. Raises InputError
    if the file cannot be opened."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        try:
            self._file: IO[bytes] | None = path.open("ab", buffering=0)
        except OSError as error:
            raise InputError("log", f"{path}: {error.strerror}") from None

    def write(self, entry: dict[str, Any]) -> None:
        """Append an entry; nothing once the log has ended."""
        if self._file is None:
            return
        line = (json.dumps(entry) + "\n").encode()
        size = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(size)
            self.close()
            self._say(f"log: {self._path}: {error.strerror}; nothing more is written")

    def close(self) -> None:
        """End the log."""
        if self._file is not None:
            self._file.close()
            self._file = None
