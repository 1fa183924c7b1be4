"""Names of types that many modules take; this one imports nothing that takes time."""

import os
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
AnyPath = str | os.PathLike[str]
Progress = Callable[[float], None]


def no_progress(_share: float) -> None:
    """Ignore progress."""
