"""Compiled code that a wheel brings along, so that the first run on a machine compiles nothing.

``.ci/compiled_wheel.py`` adds it to a wheel, for one version of numba and two levels of x86-64.
Wheels without it, and all other processors, compile for the very processor they run on."""

import lzma
import os
import shutil
import tarfile
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

#: Levels of processors, best first: LLVM's name, and what they must have beyond it. Vectors of 512
#: bits, which LLVM uses for none but AMD's: 13% of a plain run's time.
LEVELS = {
    "x86-64-v4": "+avx512bitalg,+avx512ifma,+avx512vbmi,+avx512vbmi2,+avx512vnni,"
    "+avx512vpopcntdq,-prefer-256-bit",
    "x86-64-v3": "",
}
#: What LLVM calls the features that a level's name stands for; the rest come with these.
_NEEDED = {
    "x86-64-v4": ("avx512bw", "avx512cd", "avx512dq", "avx512vl", "bmi2", "fma", "lzcnt", "movbe"),
    "x86-64-v3": ("avx2", "bmi2", "f16c", "fma", "lzcnt", "movbe"),
}


def archive(level: str, package: Path = Path(__file__).parent) -> Path:
    """Return the file of a package with a level's code, as the numba that is installed makes it."""
    return package / "compiled" / f"numba-{version('numba')}-{level}.tar.xz"


@cache
def supported() -> list[str]:
    """Return the levels of this processor, best first; none but on x86-64."""
    has = llvm.get_host_cpu_features()
    found = []
    for name, features in LEVELS.items():
        more = [word[1:] for word in features.split(",") if word.startswith("+")]
        if all(has.get(feature) for feature in (*_NEEDED[name], *more)):
            found.append(name)
    return found


@cache
def level() -> str | None:
    """Return the best level of this processor that the package brings code for; None if it brings
    none, or the variable NUMBA_CPU_NAME names a processor."""
    if "NUMBA_CPU_NAME" in os.environ:
        return None
    brought = [name for name in LEVELS if archive(name).is_file()]  # before LLVM is asked
    return next((name for name in supported() if name in brought), None) if brought else None


def use_level() -> None:
    """Have numba compile, in this process, for the level of the code that was brought along."""
    from numba import config

    if (name := level()) is not None:
        settings: Any = config
        settings.CPU_NAME, settings.CPU_FEATURES = name, LEVELS[name]


def unpack(name: str, place: Path) -> None:
    """Fill an empty folder of the cache with a level's code, whole or not at all. Where that fails
    everything is compiled."""
    scratch = place.with_name(f".{place.name}-{os.getpid()}")
    try:
        with tarfile.open(archive(name)) as file:
            file.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4
            file.extractall(scratch)
        scratch.rename(place)  # another process may have been quicker: then it is not empty
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError):
        shutil.rmtree(scratch, ignore_errors=True)
