"""eldr-sim: a discrete-event simulator of MoE serving that replays real expert routing."""

from importlib.metadata import version

__version__ = version("eldr-sim")
