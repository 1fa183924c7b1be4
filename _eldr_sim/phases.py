"""Phases of a long command before its first figures: reported where they happen, then shown."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Called with what is being done and, where it is known, the share of it that is done.
Listener = Callable[[str, float | None], None]
_listeners: list[Listener] = []

#: Threads with names that begin so hold no lock that a forked process could need.
HARMLESS = "eldr-sim "


def report_phase(what: str, share: float | None = None) -> None:
    """Report a phase, such as ``drawing the routing of Qwen3-30B-A3B``, and which share of
    it is done, 0 to 1; without a listener this does nothing."""
    for listener in _listeners:
        listener(what, share)


def has_listener() -> bool:
    """Return whether there is a listener; without one, slow descriptions need not be made."""
    return bool(_listeners)


@contextmanager
def phases_shown_by(listener: Listener) -> Iterator[None]:
    """Pass the phases that are reported in this block to a listener."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
