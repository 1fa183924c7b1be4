"""What a long command does before its first figures: told by whoever does it, shown by commands."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_listeners: list[Callable[[str], None]] = []

#: Threads with names that begin so hold no lock that a forked process could need.
HARMLESS = "eldr-sim "


def tell(what: str) -> None:
    """Say what begins now, such as ``drawing the routing of Qwen3-30B-A3B``; to nobody, often."""
    for listener in _listeners:
        listener(what)


def heard() -> bool:
    """Whether anybody listens: what takes time to find out need not be otherwise."""
    return bool(_listeners)


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Have what is told in this block shown."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
