"""The user's cache folder (``docs/formats.md``): what can be made again. Where it cannot be
written, or others may write to it, the work goes on without it, after one warning: compiled code in
it runs as the user."""

import contextlib
import functools
import hashlib
import os
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from eldr_sim.errors import EldrSimWarning, InputError
from eldr_sim.outputs import CACHE, whole_file
from eldr_sim.phases import report_phase

FOLDER_VARIABLE = "ELDR_SIM_CACHE"
SIZE_VARIABLE = "ELDR_SIM_CACHE_SIZE"
BITSETS, FITS, KERNELS, NUMBA = "bitsets", "fits", "kernels", "numba"
TABLES, TRACES = "tables", "traces"
_LIMITED = BITSETS, FITS, KERNELS, TABLES, TRACES  # compiled code is small, and slow to make

#: What each part is for, and what it costs to make again.
PURPOSES = {
    BITSETS: "recorded routing in the form that runs read, made in a second",
    FITS: "signatures of ELDR and other policies, fitted to a trace in seconds",
    KERNELS: "kernel times of models on GPUs, fitted to tables in a tenth of a second",
    NUMBA: "the simulator as machine code, compiled in a minute or two",
    TABLES: "kernel tables taken from an installed aiconfigurator",
    TRACES: "routing drawn for a model that has no recording, in seconds to a minute",
}
#: What lies in each part of the folder, finished or left by a killed process. Nothing else is
#: touched: the variable may name a folder with other things in it.
_OURS = {
    BITSETS: ("*.bits", ".*.bits-*", "*.pickle", ".*.pickle-*"),
    FITS: ("*.npz", ".*.npz-*"),
    KERNELS: ("*.pickle", ".*.pickle-*"),
    NUMBA: ("*/*/*.nbi", "*/*/*.nbc", "*/*/*.nb[ic].tmp.*", "*/*/*.o", "*/*/.*.o-*"),
    TABLES: ("*/*.parquet",),
    TRACES: ("*/experts.npy", "*/gate_scores.npz", "*/manifest.json", "*/requests.parquet"),
}
_DEFAULT_LIMIT = 1 << 30
_ABANDONED_S = 3600.0  # no write to a file pauses for this long
_UNUSED_S = 7 * 24 * 3600.0  # compiled code of another version

_warned = False


@dataclass(frozen=True)
class CacheFile:
    """A file of the cache: its part of the folder, its bytes, and when it was last used."""

    path: Path
    part: str
    size: int
    used_s: float

    @property
    def unfinished(self) -> bool:
        """Whether it is still being written, or its writer was killed."""
        hidden = self.path.name.startswith(".") or self.path.parent.name.startswith(".")
        return hidden or ".tmp." in self.path.name


def folder() -> Path | None:
    """Return the cache folder, which need not exist; None without the variable and a home."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named).absolute()
    from platformdirs import user_cache_path

    try:
        found = user_cache_path("eldr-sim", appauthor=False)
    except RuntimeError:  # no home; older versions of platformdirs return "~/.cache/..."
        return None
    return found if found.is_absolute() else None


def size_limit() -> int:
    """Return how many bytes may be kept; raises InputError if the variable is no number."""
    text = os.environ.get(SIZE_VARIABLE)
    if not text:
        return _DEFAULT_LIMIT
    try:
        limit = int(float(text))
    except (ValueError, OverflowError):
        limit = -1
    if limit < 0:
        raise InputError(SIZE_VARIABLE, repr(text), "a number of bytes, such as 4e9")
    return limit


def files() -> list[CacheFile]:
    """Return what is in the cache, part by part, what was used last first."""
    home = folder()
    found = [] if home is None else [file for part in _OURS for file in _files(home, part)]
    return sorted(found, key=lambda file: (file.part, -file.used_s, file.path))


def _files(home: Path, part: str, within: str = "*") -> list[CacheFile]:
    cached = []
    for pattern in _OURS[part]:
        for path in (home / part).glob(pattern.replace("*", within, 1)):
            if not path.parent.resolve().is_relative_to(home.resolve()):
                continue  # behind a symbolic link: somebody else's
            with contextlib.suppress(OSError):  # another process may have removed it
                facts = path.lstat()
                cached.append(CacheFile(path, part, facts.st_size, facts.st_mtime))
    return cached


def distrusted(place: Path) -> str:
    """Return why nothing in a folder may be used, empty if it may: as for ssh's keys, it and the
    folders above it, up to the home folder, must belong to the user or root, and no other user may
    write to them (a sticky folder above, such as /tmp, or the user's private group may)."""
    if not hasattr(os, "getuid"):  # Windows: a profile's folder is the user's
        return ""
    chains = [(path, *path.parents) for path in dict.fromkeys((place.absolute(), place.resolve()))]
    for above in chains:
        for path in above:
            with contextlib.suppress(OSError):  # not there
                reason = _open_to_others(path, path.stat(), is_above=path != above[0])
                if reason:
                    return reason
            if str(path) == os.path.expanduser("~"):
                break
    return ""


def distrusted_files(place: Path) -> str:
    """Return the same of what lies in a folder, at any depth."""
    if hasattr(os, "getuid"):
        for folder, _, names in os.walk(place):
            for path in (folder, *(f"{folder}/{name}" for name in names)):
                with contextlib.suppress(OSError):  # another process may have removed it
                    if reason := _open_to_others(path, os.lstat(path)):
                        return reason
    return ""


def _open_to_others(path: Path | str, about: os.stat_result, is_above: bool = False) -> str:
    if about.st_uid not in (0, os.getuid()):
        return f"{path} belongs to another user"
    mode = about.st_mode
    by_others = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_private(about.st_gid))
    if by_others and not (is_above and mode & stat.S_ISVTX):
        return f"others may write to {path}: chmod go-w"
    return ""


@functools.cache
def _is_private(group: int) -> bool:
    """Whether a group is the user's own, of no other member."""
    import grp
    import pwd

    try:
        name, about = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return about.gr_name == name and set(about.gr_mem) <= {name}


@contextlib.contextmanager
def closed_to_others() -> Iterator[None]:
    """Make files and folders that others may not write to, whatever the user's umask."""
    umask = os.umask(0o022)
    os.umask(umask | 0o022)
    try:
        yield
    finally:
        os.umask(umask)


def find(part: str, name: str) -> Path | None:
    """Return the path of a cached item, if it exists.

    The item counts as used now. One that another user may write to is not returned.

    Args:
        part: kind of the item: bit sets, fits or drawn traces.
        name: its name.

    Returns:
        The path, or None.
    """
    home = folder()
    if home is None:
        return None
    path = home / part / name
    if reason := distrusted(path.parent):
        warn(reason)
        return None
    with contextlib.suppress(OSError):  # not there, or another user's, which we may still read
        if reason := _open_to_others(path, path.stat()) if hasattr(os, "getuid") else "":
            warn(reason)
            return None
        for file in path.iterdir() if path.is_dir() else (path,):
            os.utime(file)  # few file systems keep times of access
    return path


def keep(part: str, name: str, write: Callable[[BinaryIO], object]) -> Path | None:
    """Write a file of bit sets or a fit, whole or not at all, and make room for it. Returns its
    path; None, after a warning, if it could not be written. ``write``: writes an open file."""
    limit = size_limit()
    home = folder()
    if home is None:
        warn("there is no home folder")
        return None
    path = home / part / name
    if reason := distrusted(path.parent):
        warn(reason)
        return None
    try:
        with closed_to_others(), whole_file(path, CACHE) as temporary, temporary.open("wb") as file:
            write(file)
    except (InputError, OSError) as error:
        warn(error.problem if isinstance(error, InputError) else f"{path}: {error.strerror}")
        return None
    _make_room(path, limit)
    return path


def keep_folder(
    part: str, name: str, write: Callable[[Path], object], doing: str = ""
) -> Path | None:
    """Make a folder of the cache by ``write``, whole or not at all, and make room for it; one made
    meanwhile stays. Returns its path, or None, after a warning.
    ``doing``: the phase to report."""
    limit = size_limit()
    place = writable_folder(part)
    if place is None:
        return None
    path, temporary = place / name, place / f".{name}-{os.getpid()}"
    if doing:
        report_phase(doing)
    try:
        with closed_to_others():
            write(temporary)
        temporary.rename(path)
    except (InputError, OSError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if path.is_dir():
            return path
        warn(error.problem if isinstance(error, InputError) else f"{path}: {error.strerror}")
        return None
    _make_room(path, limit)
    return path


def _make_room(new: Path, limit: int) -> None:
    """Remove files until the limit is kept, but never ``new``: what killed processes left and
    compiled code that was not used for a week, then bit sets, which take a second to make, then of
    the other parts the items used longest ago, each whole. Files being written count. New bit sets
    remove no more than other bit sets: if large they stand above the limit until others come."""
    home = new.parents[1]
    now = time.time()
    items: dict[Path, list[CacheFile]] = {}
    for file in (file for part in _LIMITED for file in _files(home, part)):
        whole = file.path.parent if file.path.parent != home / file.part else file.path
        items.setdefault(whole, []).append(file)
    left = sum(file.size for item in items.values() for file in item)
    old = [file for path in _unused(home / NUMBA, now) for file in _files(home, NUMBA, path.name)]
    last = {path: max(file.used_s for file in item) for path, item in items.items()}
    for path in sorted(items, key=lambda path: (path.parent.name != BITSETS, last[path])):
        unfinished = path.name.startswith(".")
        spared = new.parent.name == BITSETS != path.parent.name
        gone = now - last[path] > _ABANDONED_S if unfinished else left > limit and not spared
        if path != new and gone:
            old += items[path]
            left -= sum(file.size for file in items[path])
    for file in old:
        with contextlib.suppress(OSError):  # another process may have removed it
            _remove(file, home)


def _unused(place: Path, now: float) -> list[Path]:
    """Return the folders of compiled code that no process has used for a week."""
    found = []
    for path in place.glob("*-*"):
        with contextlib.suppress(OSError):  # another process may have removed it
            if now - path.stat().st_mtime > _UNUSED_S:
                found.append(path)
    return found


def _remove(file: CacheFile, home: Path) -> None:
    """Remove a file, and the folders of its part where nothing else is left in them."""
    file.path.unlink()
    above = file.path.parents
    with contextlib.suppress(OSError):  # it is not empty
        for depth in range(above.index(home / file.part)):
            above[depth].rmdir()


@functools.cache
def stamp(modules: tuple[str, ...]) -> str:
    """Return a checksum of modules' sources.

    Args:
        modules: their names, ``room.module`` or ``room.part.module``.

    Returns:
        The SHA-256 of the sources in this order, hexadecimal.
    """
    checksum = hashlib.sha256()
    for name in modules:
        above, _, module = name.rpartition(".")
        package = find_spec(f"eldr_sim.{above}")
        assert package is not None
        for place in package.submodule_search_locations or ():
            checksum.update((Path(place) / f"{module}.py").read_bytes())
    return checksum.hexdigest()


def writable_folder(part: str) -> Path | None:
    """Return a folder of the cache, made if need be; None, after a warning, if it is read-only or
    others may write to it."""
    home = folder()
    if home is None:
        warn("there is no home folder")
        return None
    place = home / part
    if reason := distrusted(place):
        warn(reason)
        return None
    try:
        with closed_to_others():
            place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warn(f"cannot make {place}: {error.strerror}")
        return None
    if not os.access(place, os.W_OK | os.X_OK):
        warn(f"cannot write into {place}")
        return None
    with contextlib.suppress(OSError):
        os.utime(place)  # in use now
    return place


def warn(problem: str) -> None:
    """Warn, once a process, that nothing can be kept, or not all; ``problem``: why."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"nothing can be kept in the cache ({problem}), so every process makes bit sets, fits, "
            f"traces and compiled code for itself; {FOLDER_VARIABLE} names another folder",
            EldrSimWarning,
            stacklevel=3,
        )


def clear() -> list[CacheFile]:
    """Remove what eldr-sim put into the cache; return what is gone. Raises InputError, which names
    a file that could not be removed; others are gone. Mapped files last as long as processes."""
    removed = []
    failure = None
    home = folder() or Path()
    for file in files():
        try:
            _remove(file, home)
        except FileNotFoundError:
            continue
        except OSError as error:
            failure = InputError("cache", f"cannot remove {file.path}: {error.strerror}")
            continue
        removed.append(file)
    for part in _OURS:
        with contextlib.suppress(OSError):  # it is not empty
            (home / part).rmdir()
    if failure is not None:
        raise failure
    return removed
