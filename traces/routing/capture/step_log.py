"""Step log of a serving engine: the experts that each step chose, by request and token.

A worker writes two files and flushes them every step: ``<name>.jsonl`` has a header (`Header`),
then a line a step: ``rows``, ``[request, position of the first token, tokens]`` in order, and
``prompts``, token ids of requests new to the worker; ``<name>.ids`` the chosen experts,
little-endian uint8 or uint16 ``[tokens, layers, top_k]``. Rows are on disk before the line that
names them: a log cut off is whole up to its last line. A request's may come in chunks, more than
once (after a preemption) and from several workers: `read_log` joins them by position."""

import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from eldr_sim.arrays import Array
from eldr_sim.errors import InputError

_VERSION = 1


@dataclass(frozen=True)
class Header:
    """Header of a step log: what all steps have in common."""

    model: str  #: folder or hub name that the engine serves
    layers: list[int]  #: decoder layers with a gate
    n_decoder_layers: int  #: decoder layers of the model
    n_experts: int  #: routed experts per layer
    top_k: int  #: experts chosen per token and layer
    engine: str  #: engine, version, dtype and platform
    tool_versions: dict[str, str]  #: versions for a trace's manifest

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of an expert id in the log."""
        return np.dtype("u1" if self.n_experts <= 256 else "<u2")


class StepLog:
    """Writer of one worker process's log: its ``folder``, and what all steps have in common."""

    def __init__(self, folder: str | os.PathLike[str], header: Header) -> None:
        self.header = header
        base = Path(folder)
        base.mkdir(parents=True, exist_ok=True)
        stem = base / f"steps-{uuid.uuid4().hex[:12]}"
        self._ids: IO[bytes] = stem.with_suffix(".ids").open("wb", buffering=0)
        self._lines: IO[str] = stem.with_suffix(".jsonl").open("w", encoding="utf-8")
        self._write({"version": _VERSION, **asdict(header)})

    def step(
        self,
        rows: Sequence[tuple[str, int, int]],
        experts: Array,
        prompts: Mapping[str, Sequence[int]],
    ) -> None:
        """Append a step: ``rows`` of request, position of its first token, tokens; ``experts``,
        integers ``[tokens, layers, top_k]``; and the prompt's token ids of new requests."""
        self._ids.write(np.ascontiguousarray(experts, dtype=self.header.dtype).tobytes())
        self._write({"rows": rows, "prompts": prompts})

    def close(self) -> None:
        """Close the files."""
        self._ids.close()
        self._lines.close()

    def _write(self, line: Any) -> None:
        self._lines.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._lines.flush()


def logged_rows(folder: str | os.PathLike[str]) -> int:
    """Count the tokens logged so far; recomputed ones count twice."""
    total = 0
    for file in Path(folder).glob("steps-*.jsonl"):
        with file.open(encoding="utf-8") as lines:
            header = _header(lines.readline())
        if header is not None:
            bytes_per_row = len(header.layers) * header.top_k * header.dtype.itemsize
            total += file.with_suffix(".ids").stat().st_size // bytes_per_row
    return total


@dataclass
class LoggedRequest:
    """One request of a log."""

    request_id: str  #: its name in the engine
    prompt: list[int]  #: its prompt's token ids
    experts: Array  #: integers ``[tokens, layers, top_k]`` from its first token on
    missing: int  #: tokens before the last one that no step computed


def external_ids(request_id: str) -> list[str]:
    """Return the names that a client may have given a request of vLLM, the likeliest first. vLLM
    adds ``cmpl-`` or ``chatcmpl-``, and behind the prompt's number and eight random hexadecimal
    digits."""
    names = []
    for name in (re.sub(r"-[0-9a-f]{8}$", "", request_id), request_id):
        bare = re.sub(r"^(chatcmpl|cmpl)-", "", name)
        names += [name, bare]
        if name.startswith("cmpl-"):
            names.append(re.sub(r"-0$", "", bare))
    return list(dict.fromkeys(names))


def read_log(folder: str | os.PathLike[str]) -> tuple[Header, list[LoggedRequest]]:
    """Return what the logs of all workers in a folder have in common, and their requests, each
    joined, in the order of their first step. Raises InputError if there is none, one is broken, or
    models differ."""
    base = Path(folder)
    files = sorted(base.glob("steps-*.jsonl"), key=lambda file: (file.stat().st_mtime_ns, file))
    if not files:
        raise InputError("log", f"{base} holds no steps-*.jsonl", "a folder that a capture wrote")
    gathered = Gathered()
    for file in files:
        worker = LogReader(file)
        gathered.read(worker)
        if worker.header is None:
            raise _no_header(file)
    assert gathered.header is not None
    return gathered.header, [gathered.request(name) for name in gathered.names]


#: ``rows`` and ``prompts`` as `StepLog.step` takes them, and the experts of the rows.
Step = tuple[list[tuple[str, int, int]], dict[str, list[int]], Array]


class LogReader:
    """Reader of one worker's log, also while the worker writes it; ``header``: None until read."""

    def __init__(self, file: Path) -> None:
        self.header: Header | None = None
        self.file = file
        self._line = 0
        self._offset = 0
        self._rows = 0

    def steps(self) -> Iterator[Step]:
        """Yield the steps that were logged since the last call; a line without an end is left for
        the next.

        Raises InputError if a file cannot be read or is no log of this version."""
        rows = self.file.with_suffix(".ids")
        try:
            with self.file.open("rb") as lines, rows.open("rb") as ids:
                lines.seek(self._offset)
                for line in lines:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    self._line += 1
                    if self.header is None:
                        self.header = _header(line)
                        if self.header is None:
                            raise _no_header(self.file)
                    else:
                        yield self._step(line, ids, self.header)
        except OSError as error:
            where = error.filename or str(self.file)
            raise InputError(str(where), error.strerror or "cannot be read") from None

    def _step(self, line: bytes, ids: IO[bytes], header: Header) -> Step:
        where = f"{self.file}:{self._line}"
        try:
            step = json.loads(line)
            rows = [(str(name), int(start), int(count)) for name, start, count in step["rows"]]
            new = step["prompts"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(where, f"is not a step: {error}") from None
        shape = (sum(count for _, _, count in rows), len(header.layers), header.top_k)
        row_bytes = shape[1] * shape[2] * header.dtype.itemsize
        ids.seek(self._rows * row_bytes)
        raw = ids.read(shape[0] * row_bytes)
        if len(raw) < shape[0] * row_bytes:
            problem = (
                f"names {self._rows + shape[0]} rows, {self.file.with_suffix('.ids').name} has "
                f"{self._rows + len(raw) // row_bytes}"
            )
            raise InputError(where, problem, "the file as it was written")
        self._rows += shape[0]
        return rows, new, np.frombuffer(raw, header.dtype).reshape(shape)


class Gathered:
    """Requests gathered so far from the logs of one model's workers."""

    def __init__(self) -> None:
        self.header: Header | None = None
        self._prompts: dict[str, list[int]] = {}
        self._parts: dict[str, list[tuple[int, Array]]] = {}

    @property
    def names(self) -> list[str]:
        """The requests in the order of their first step, without vLLM's random suffix."""
        return list(self._parts)

    def read(self, worker: LogReader) -> None:
        """Add what a worker has logged since the last call; raises InputError."""
        for rows, new, experts in worker.steps():
            for name, ids in new.items():
                self._prompts.setdefault(_joint_name(name), ids)
            first = 0
            for name, position, count in rows:
                part = experts[first : first + count]
                self._parts.setdefault(_joint_name(name), []).append((position, part))
                first += count
        self._check(worker)

    def request(self, name: str) -> LoggedRequest:
        """Return one of `names`, joined from all workers."""
        assert self.header is not None
        return _put_together(name, self._prompts.get(name, []), self._parts[name], self.header)

    def forget(self, name: str) -> None:
        """Drop one of `names`."""
        del self._parts[name]
        self._prompts.pop(name, None)

    def _check(self, worker: LogReader) -> None:
        one = worker.header
        if one is None:
            return
        self.header = self.header or one
        shape = ("layers", "n_decoder_layers", "n_experts", "top_k")
        if any(getattr(self.header, key) != getattr(one, key) for key in shape):
            problem = f"is of {one.model}, others of {self.header.model}"
            raise InputError(str(worker.file), problem, "one model")


def _joint_name(request_id: str) -> str:
    """Return the name that all workers of a request have for it."""
    return external_ids(request_id)[0]


def _put_together(
    name: str, prompt: list[int], pieces: list[tuple[int, Array]], header: Header
) -> LoggedRequest:
    length = max(position + len(part) for position, part in pieces)
    experts = np.zeros((length, len(header.layers), header.top_k), dtype=header.dtype)
    seen = np.zeros(length, dtype=bool)
    for position, part in pieces:  # computed again: the later rows replace the earlier ones
        experts[position : position + len(part)] = part
        seen[position : position + len(part)] = True
    return LoggedRequest(name, prompt, experts, int(length - seen.sum()))


def _header(line: str | bytes) -> Header | None:
    """Return the header of a log, None if the line is none of this version."""
    try:
        about = json.loads(line)
        return Header(**about) if about.pop("version") == _VERSION else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _no_header(file: Path) -> InputError:
    return InputError(str(file), "has no header", f"a log of version {_VERSION}")
