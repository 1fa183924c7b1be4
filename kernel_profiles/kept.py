"""What is made from the tables that ship, kept in the cache: to read and to fit them takes a tenth
of a second, at every start."""

import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import numpy as np

from eldr_sim.cache import KERNELS
from eldr_sim.remade import remade

T = TypeVar("T")
_FOLDER = os.path.dirname(__file__)


def kept(asked: Any, make: Callable[[], T]) -> T:
    """Return what ``make`` makes, from the cache where it was made before.

    Args:
        asked: all that it depends on besides the sources and data of ``kernel_profiles``; equal
            where its repr is.
        make: makes it.

    Returns:
        The object, equal to one that is made.
    """
    return remade(KERNELS, repr((asked, _sources())), make)


@cache
def _sources() -> tuple[Any, ...]:
    """Return what tells this package's sources and data from others: sizes and times of files."""
    files = []
    for folder, below, names in os.walk(_FOLDER):
        below[:] = [name for name in below if name != "__pycache__"]
        for name in names:
            about = os.stat(f"{folder}/{name}")
            files.append((folder, name, about.st_size, about.st_mtime_ns))
    return sys.version, np.__version__, sorted(files)
