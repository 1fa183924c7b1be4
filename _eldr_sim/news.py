"""What a long command does before its first figures: told where it is done, shown by commands."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Called with what is being done and, where it is known, the share of it that is done.
Listener = Callable[[str, float | None], None]
_listeners: list[Listener] = []

#: Threads with names that begin so hold no lock that a forked process could need.
HARMLESS = "eldr-sim "


def tell(what: str, share: float | None = None) -> None:
    """Say what is being done, such as ``drawing the routing of Qwen3-30B-A3B``, and which share of
    it is done, 0 to 1; often there is no listener."""
    for listener in _listeners:
        listener(what, share)


def heard() -> bool:
    """Return whether there is a listener; what takes time to find out need not be otherwise."""
    return bool(_listeners)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have what is told in this block shown."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
