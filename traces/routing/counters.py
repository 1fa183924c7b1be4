"""Loads of experts by window of time, without single tokens: what engines' counters hold."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from eldr_sim.arrays import Floats

CountOf: TypeAlias = Literal["experts", "ranks"]


@dataclass(frozen=True, eq=False)
class Counters:
    """Loads by window of time, oldest first."""

    #: float64 [windows, layers, experts or ranks]: token-expert pairs; no layers where only the
    #: balance was logged.
    counts: Floats
    of: CountOf  #: what the last axis counts
    balancedness: Floats  #: [windows]: mean over greatest load of a rank, where it was logged
    source: str  #: which format they were read from
