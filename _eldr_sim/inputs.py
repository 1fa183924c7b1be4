"""Users' files, read within bounds. A file is a regular one (a pipe or a device may never end), its
size is bounded before it is read, what it unpacks to before that is allocated, and what is nested
or repeats itself without end is refused. Arrays may take half of this process's memory. Each raises
``InputError`` in one line."""

from __future__ import annotations

import json
import math
import operator
import os
import re
import stat
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from eldr_sim.errors import InputError

if TYPE_CHECKING:
    import yaml
    from numpy.typing import NDArray

DOCUMENT_LIMIT = 64 * 2**20  #: bytes of a configuration, manifest or result in JSON or YAML
_NODE_LIMIT = 1_000_000  # values of a YAML document, aliases written out
#: YAML's types of plain values; ``!!binary`` and others would make texts that are not seen as such.
_YAML_TAGS = {
    f"tag:yaml.org,2002:{name}"
    for name in ("str", "int", "float", "bool", "null", "seq", "map", "timestamp", "merge", "value")
}
_NPY_HEADER = 64 * 2**10
_NPY_MAGIC = b"\x93NUMPY"


#: Files in which Linux says how much memory a container may use.
_CGROUPS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"
_UNKNOWN_MEMORY = 32 * 2**30  # where the operating system does not say


@cache
def array_limit() -> int:
    """Return the size to which the arrays of a file may unpack.

    Returns:
        Bytes: half of the memory that this process may use, by the machine, its container (cgroup)
        and ``ulimit -v``.
    """
    limits = []
    with suppress(OSError, ValueError, AttributeError):  # not on Windows
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in _CGROUPS:
        with suppress(OSError, ValueError):  # "max": no limit
            limits.append(int(Path(path).read_text()))
    with suppress(ImportError):
        import resource

        limits.append(resource.getrlimit(resource.RLIMIT_AS)[0] // 2)  # libraries take some, too
    return min((size for size in limits if size > 0), default=_UNKNOWN_MEMORY) // 2


def within(field: str, value: float, most: float, unit: str = "") -> None:
    """Refuse a size that would take too much memory.

    Args:
        field: the option or key that sets the size.
        value: the size.
        most: the largest allowed size, in the same unit.
        unit: unit of both, for the error.

    Raises:
        InputError: ``value`` exceeds ``most``.
    """
    if value > most:
        raise InputError(
            field, f"{value:,.15g}{unit} is above the limit", f"at most {most:,}{unit}"
        )


#: Pattern of a time: seconds, or a number of another unit.
TIME = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?(?:s|min|m|h|d)?"
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str, field: str) -> float:
    """Return a duration in seconds.

    Args:
        text: such as ``90``, ``90s``, ``10m``, ``2h`` or ``1d``.
        field: the option or key, for errors.

    Returns:
        Seconds.

    Raises:
        InputError: ``text`` is not a duration.
    """
    text = text.strip().lower()
    if re.fullmatch(TIME, text) is None:
        raise InputError(field, repr(text), "seconds, or a time such as 90s, 10m, 2h or 1d")
    number = text.rstrip("sminhd")
    return float(number) * _UNITS[text[len(number) :]]


def regular_file(path: str | os.PathLike[str], field: str, limit: int | None = None) -> Path:
    """Return the path of a regular, readable file.

    Args:
        path: the file.
        field: the option or key that named it, for errors.
        limit: largest size, bytes; None: any.

    Returns:
        The path.

    Raises:
        InputError: the file does not exist, is not regular, cannot be read, or is too large.
    """
    path = Path(path)
    try:
        about = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(field, _unread(path, field, reason)) from None
    if stat.S_ISDIR(about.st_mode):
        raise InputError(field, _unread(path, field, "Is a directory"))
    if not stat.S_ISREG(about.st_mode):
        raise InputError(field, _of(path, field, "is a pipe or a device"), "a regular file")
    if limit is not None and about.st_size > limit:
        problem = _of(path, field, f"has {about.st_size:,} bytes")
        raise InputError(field, problem, f"at most {limit:,}")
    return path


def _unread(path: Path, field: str, reason: str | None) -> str:
    return f"{reason}" if field == str(path) else f"cannot read {path}: {reason}"


def _of(path: Path, field: str, problem: str) -> str:
    """Name a file in a problem, unless the field is the file."""
    return problem if field == str(path) else f"{path} {problem}"


def read_text(path: str | os.PathLike[str], field: str, limit: int = DOCUMENT_LIMIT) -> str:
    """Return the text of a regular file, decoded as UTF-8.

    Args:
        path: the file.
        field: the option or key that named the file, for errors.
        limit: largest size of the file, bytes.

    Returns:
        The whole text.

    Raises:
        InputError: the file does not exist, is not regular, is too large, or is not UTF-8.
    """
    path = regular_file(path, field, limit)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(field, _unread(path, field, error.strerror)) from None
    except UnicodeDecodeError:
        raise InputError(field, _of(path, field, "is not UTF-8 text")) from None


def parse_json(text: str | bytes, field: str, what: str = "") -> Any:
    """Return the value of a JSON document.

    Args:
        text: the document.
        field: the option or key that named it, for errors.
        what: name of the document in errors, where the field does not name it.

    Returns:
        The parsed value.

    Raises:
        InputError: the text is not JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise InputError(field, f"{what} is nested too deeply".strip()) from None
    except ValueError as error:  # bad JSON, bad UTF-8, numbers of thousands of digits
        raise InputError(field, f"{what} is not valid JSON: {_line(error)}".strip()) from None


def parse_yaml(text: str, field: str, what: str) -> Any:
    """Return the value of a YAML document.

    Args:
        text: the document.
        field: the option or key that named it, for errors.
        what: name of the document in errors.

    Returns:
        The parsed value.

    Raises:
        InputError: the text is not YAML, repeats a key, or expands without end through aliases.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            if _size(node, {}) > _NODE_LIMIT:
                raise InputError(field, f"{what} has over {_NODE_LIMIT:,} values, aliases counted")
            for tag in {each.tag for each in _nodes(node)} - _YAML_TAGS:
                raise InputError(field, f"{what} has a value of YAML type {tag!r}", "plain values")
            for key in _twice(node):
                raise InputError(field, f"{what} has {key!r} twice in one mapping", "each key once")
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise InputError(field, f"{what} is nested too deeply") from None
    except InputError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # also dates that do not exist
        raise InputError(field, f"{what} is not YAML: {_line(error)}") from None


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Return how many values a node has, aliases written out; too many if it holds itself."""
    number = id(node)
    if number not in known:
        known[number] = _NODE_LIMIT + 1  # stands if the node is met inside itself
        parts: list[Any] = node.value if isinstance(node.value, list) else []
        if parts and isinstance(parts[0], tuple):
            parts = [part for pair in parts for part in pair]
        known[number] = 1 + sum(_size(part, known) for part in parts)
    return known[number]


def _nodes(root: yaml.Node) -> Iterator[yaml.Node]:
    """Yield the nodes of a document, each once."""
    todo: list[yaml.Node] = [root]
    seen: set[int] = set()
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        parts: list[Any] = node.value if isinstance(node.value, list) else []
        todo += [part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,))]


def _twice(root: yaml.Node) -> Iterator[str]:
    """Yield keys that stand more than once in a mapping; PyYAML takes the last of them."""
    for node in _nodes(root):
        parts: list[Any] = node.value if isinstance(node.value, list) else []
        if parts and isinstance(parts[0], tuple):
            keys = Counter((key.tag, key.value) for key, _ in parts if isinstance(key.value, str))
            yield from (key for (_, key), n in keys.items() if n > 1)


#: What a .npy file begins with.
_NPY = b"\x93NUMPY"


def check_arrays(path: str | os.PathLike[str], field: str, *, mapped: bool = False) -> Path:
    """Return the path of a ``.npy`` or ``.npz`` file after checking its size.

    Args:
        path: the file.
        field: the option or key that named it, for errors.
        mapped: whether a ``.npy`` file is mapped into memory, and may be of any size.

    Returns:
        The path; a file that is neither is left to numpy to refuse.

    Raises:
        InputError: the arrays would not fit into memory, or the file cannot be read.
    """
    path = regular_file(path, field)
    try:
        with path.open("rb") as file:
            begin = file.read(len(_NPY))  # first: what ends a .zip may stand in an array by chance
            if begin != _NPY and zipfile.is_zipfile(file):
                with zipfile.ZipFile(file) as archive:
                    check_archive(archive, path, field)
                    total = 0
                    for name in archive.namelist():
                        with archive.open(name) as member:
                            total += _promised(member, path, field)
                    _within(total, path, field)
            else:
                file.seek(0)
                size = _promised(file, path, field)
                _within(size, path, field, path.stat().st_size if mapped else array_limit())
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise InputError(field, _unread(path, field, _line(error))) from None
    return path


def check_archive(archive: zipfile.ZipFile, path: Path, field: str) -> None:
    """Raise InputError where the members of an archive together unpack to too much."""
    _within(sum(member.file_size for member in archive.infolist()), path, field)


def parse_array(data: bytes, path: Path, field: str) -> NDArray[Any]:
    """Return the array of a .npy file's bytes; ``path``: of the file that they stand in."""
    import numpy as np

    _within(_promised(BytesIO(data), path, field), path, field, len(data))
    loaded: NDArray[Any] = np.load(BytesIO(data), allow_pickle=False)
    return loaded


@contextmanager
def reading(field: str, said: str = "", allowed: str = "") -> Iterator[None]:
    """Turn errors of reading a file into InputError.

    Args:
        field: the option or key that named the file.
        said: the problem, followed by the first line of the original error; empty: only errors of
            opening the file are turned.
        allowed: what would be valid.

    Yields:
        None.

    Raises:
        InputError: the block raised an error of reading, or of content if ``said`` is given.
    """
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        raise InputError(field, error.strerror or "cannot be read") from None
    except (
        ValueError, LookupError, EOFError, AttributeError, TypeError, ArithmeticError,
        zipfile.BadZipFile, zlib.error, NotImplementedError
    ) as error:  # fmt: skip
        if not said:
            raise
        raise InputError(field, f"{said}: {error}".splitlines()[0], allowed) from None


def load_arrays(path: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a .npz file by name; raises InputError, which names the file."""
    import numpy as np

    with (
        reading(str(path), "not a .npz archive of plain arrays"),
        np.load(check_arrays(path, str(path)), allow_pickle=False) as archive,
    ):
        return {name: archive[name] for name in archive.files}


def _promised(file: IO[bytes], path: Path, field: str) -> int:
    """Return the bytes of the array that a .npy header promises, 0 of another file; raises
    InputError where the header is longer than any."""
    import ast

    head = file.read(12)
    if not head.startswith(_NPY_MAGIC) or len(head) < 12:
        return 0
    short = head[6] == 1
    length = int.from_bytes(head[8 : 10 if short else 12], "little")
    if length > _NPY_HEADER:
        problem = _of(path, field, f"has a header of {length:,} bytes")
        raise InputError(field, problem, f"at most {_NPY_HEADER:,}")
    text = (head[10:] if short else b"") + file.read(length - (2 if short else 0))
    try:
        entry = ast.literal_eval(re.sub(r"(\d)L", r"\1", text.decode("latin1")).strip())
        match = re.match(r"[<>|=]?([a-zA-Z])(\d*)", entry["descr"])
        assert match is not None
        width = int(match[2] or 0) * (4 if match[1] == "U" else 1)
        shape = [operator.index(n) for n in entry["shape"]]
        assert min(shape, default=0) >= 0
        return width * math.prod(shape)
    except Exception:  # of a dozen kinds: the header is whatever the bytes say
        raise InputError(field, _of(path, field, "has a damaged header")) from None


def _within(size: int, path: Path, field: str, limit: int | None = None) -> None:
    limit = array_limit() if limit is None else limit
    if size > limit:
        problem = _of(path, field, f"unpacks to {size:,} bytes")
        raise InputError(field, problem, f"at most {limit:,}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
