"""Further tables, from installed packages that offer them.

A package registers a function under the entry-point group ``eldr_sim.tables``. It is called when a
part of a step has no table; `kernel_profiles.sources.on_demand` is registered so."""

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Protocol

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import GPU
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.tables.format import ATTENTION, LatencyTable
from eldr_sim.kernel_profiles.tables.library import Engine

GROUP = "eldr_sim.tables"


class Provider(Protocol):
    """A function that offers tables."""

    def __call__(
        self, gpu: GPU, model: ModelDims, parallelism: Parallelism, engine: Engine
    ) -> Sequence[LatencyTable] | None:
        """Return tables of a model's part on one GPU, preferred ones first, none if there are none;
        None if the data that it reads is not installed."""


#: Kinds of table by the part of a step that has none (`steps.parts.Parts.missing`), where they
#: are called otherwise.
_KINDS = {"attention": ATTENTION, "linear_attention": ATTENTION, "collectives": ("collective",)}


def provided_tables(
    gpu: GPU, model: ModelDims, parallelism: Parallelism, engine: Engine, missing: Sequence[str]
) -> tuple[LatencyTable, ...] | None:
    """Return what all providers offer for parts without a table, ``missing``: parts that have one
    keep it. None if no provider has its data installed. Raises InputError: a provider that does not
    load."""
    kinds = {kind for part in missing for kind in _KINDS.get(part, (part,))}
    offers = []
    for point in entry_points(group=GROUP):
        try:
            provider: Provider = point.load()
        except Exception as error:  # whatever a foreign module may raise on import
            problem = f"entry point {point.name!r} does not load: {error!r}"
            raise InputError(GROUP, problem) from error
        offers.append(provider(gpu, model, parallelism, engine))
    found = [offer for offer in offers if offer is not None]
    tables = (table for offer in found for table in offer)
    return tuple(table for table in tables if table.metadata.kind in kinds) if found else None
