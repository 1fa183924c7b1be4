"""Time that the API server in front of an engine takes: HTTP, its event loop, the tokeniser.

A ``front_end`` table has three curves over the tokens of a prompt that comes as text: ``tokenize``,
one prompt alone on one CPU core; ``event_loop``, what the server's one thread computes for a
request; ``http``, what else its way from the client takes. They are linear between the table's
points and go on with the last slope."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.kept import kept
from eldr_sim.kernel_profiles.tables.format import LatencyTable, TableMetadata, load_table
from eldr_sim.kernel_profiles.tables.library import shipped_tables

NO_FRONT_END = "none"  #: the name that stands for no API servers
PARTS = ("tokenize", "event_loop", "http")  #: the parts of a ``front_end`` table


@dataclass(frozen=True, eq=False)
class FrontEndLatency:
    """Seconds of each part of the front end, by prompt tokens."""

    #: By part: tokens, ascending from 0, and seconds.
    curves: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]
    metadata: TableMetadata  #: of the table
    slowdown: float = 1.0  #: factor of these times over the table's
    template_s: float = 0.0  #: that the event loop compiles a chat template for each request

    @classmethod
    def from_table(cls, table: LatencyTable) -> "FrontEndLatency":
        """Arrange a table's rows by part; below its fewest tokens a part costs what these cost.
        Raises InputError: not a ``front_end`` table, or a part without rows."""
        if table.metadata.kind != "front_end":
            raise InputError("frontend", f"a table of kind {table.metadata.kind!r}", "front_end")
        columns, curves = table.columns, {}
        for part in PARTS:
            rows = columns["part"] == part
            if not rows.any():
                raise InputError("frontend", f"the table has no rows of {part!r}", ", ".join(PARTS))
            order = np.argsort(columns["tokens"][rows])
            tokens = columns["tokens"][rows][order].astype(np.float64)
            seconds = np.maximum.accumulate(columns["latency_s"][rows][order])
            curves[part] = tokens, seconds
        return cls(curves, table.metadata)

    def compiling(self, template_s: float) -> "FrontEndLatency":
        """Return the front end of servers that compile a chat template for each request."""
        return replace(self, template_s=template_s)

    def slower(self, factor: float) -> "FrontEndLatency":
        """Return the front end on a CPU on which all takes ``factor`` times as long."""
        return replace(self, slowdown=self.slowdown * factor)

    def time_s(self, part: str, tokens: ArrayLike) -> NDArray[np.float64]:
        """Seconds of a part for prompts of these lengths, shape as ``tokens``."""
        knots, seconds = self.curves[part]
        wanted = np.asarray(tokens, np.float64)
        found = np.interp(wanted, knots, seconds)
        if len(knots) > 1:
            slope = (seconds[-1] - seconds[-2]) / (knots[-1] - knots[-2])
            found = found + slope * np.maximum(wanted - knots[-1], 0.0)
        if part == "event_loop":
            found = found + self.template_s
        return np.asarray(self.slowdown * found)

    @property
    def provenance(self) -> dict[str, str]:
        """What a result says of it."""
        said = {
            "label": self.metadata.provenance,
            "origin": self.metadata.origin,
            "kernel_source": self.metadata.kernel_source,
        }
        return said if self.slowdown == 1.0 else said | {"slowdown": f"{self.slowdown:g}"}


def list_front_ends() -> list[str]:
    """Return the CPUs with front-end measurements that ship with the package."""
    return [table.gpu for table in shipped_tables() if table.kind == "front_end"]


def _shipped(cpu: str) -> FrontEndLatency | None:
    for table in shipped_tables():
        if table.kind == "front_end" and table.gpu.lower() == cpu:
            return FrontEndLatency.from_table(table.load())
    return None


def load_front_end(name: str) -> FrontEndLatency:
    """Load a shipped front end by its CPU's name, or the table in a file; raises InputError if
    none."""
    if shipped := kept(("front end", name.lower()), lambda: _shipped(name.lower())):
        return shipped
    if not Path(name).is_file():
        written = "a table of eldr-sim profile --frontend"
        known = ", ".join([NO_FRONT_END, *list_front_ends(), written])
        raise InputError("frontend", f"no front end {name!r}", known)
    return FrontEndLatency.from_table(load_table(name))
