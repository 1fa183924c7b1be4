"""numba's compiler, its results kept in the user's cache folder.

By itself numba keeps them beside the source, which is among the installed files, and refuses to
compile where it cannot keep them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba

import eldr_sim
from eldr_sim.cache import NUMBA, writable_folder

__all__ = ["njit"]

_config: Any = numba.config  # its settings are made when it is imported, which mypy cannot see


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function with ``numba.njit`` and keep the result where that can be.

    That is in ``NUMBA_CACHE_DIR`` if the user has set it, else in `eldr_sim.cache`.

    Parameters
    ----------
    options
        Of ``numba.njit``, but for ``cache``.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        if _config.CACHE_DIR:
            return numba.njit(cache=True, **options)(function)
        place = _place()
        if not place:
            return numba.njit(**options)(function)
        # numba reads this while it decorates: other packages' functions keep their places.
        _config.CACHE_DIR = place
        try:
            return numba.njit(cache=True, **options)(function)
        finally:
            _config.CACHE_DIR = ""

    return decorate


@cache
def _place() -> str:
    """Return the folder of this version's functions; empty where nothing can be kept."""
    place = writable_folder(f"{NUMBA}/{eldr_sim.__version__}")
    return "" if place is None else str(place)
