"""Tables that a run lacks, imported into the user's cache where a package that has them is
installed: a provider of `kernel_profiles.tables.providers`."""

import shutil
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.tables.library import Engine, find_table

if TYPE_CHECKING:
    from eldr_sim.kernel_profiles.gpus import GPU
    from eldr_sim.kernel_profiles.models import ModelDims
    from eldr_sim.kernel_profiles.parallel import Parallelism
    from eldr_sim.kernel_profiles.tables.format import LatencyTable


#: The code that imports: what another version of it imported is not read.
_IMPORTER = ("kernel_profiles.sources.aiconfigurator",
             "kernel_profiles.sources.aiconfigurator_import")  # fmt: skip


def cached_tables(
    gpu: "GPU", model: "ModelDims", parallelism: "Parallelism", engine: Engine
) -> "tuple[LatencyTable, ...] | None":
    """Return what the installed packages have of a model on a GPU, or on its sibling, and does not
    ship: the engine's own kernels first. None without a package."""
    from eldr_sim.kernel_profiles.sources.packages import SYSTEMS, packages

    installed = packages()
    if not installed:
        return None
    measured = next((name for name in (gpu.name, gpu.sibling) if name in SYSTEMS), None)
    if measured is None:
        return ()
    from eldr_sim import cache
    from eldr_sim.kernel_profiles.sources.aiconfigurator_import import best_tables
    from eldr_sim.kernel_profiles.tables.format import load_tables, table_name

    of = [(one.name, one.version) for one in installed], measured, parallelism, tuple(engine)
    asked = f"{of} {model.model_dump_json()} {cache.stamp(_IMPORTER)}"
    stamp = blake2b(asked.encode(), digest_size=8).hexdigest()
    name = f"{model.name.replace('/', '-')}-{measured.replace(' ', '-')}-{stamp}"
    found = cache.find(cache.TABLES, name)
    if found is None or not found.is_dir():

        def write(folder: Path) -> None:
            folder.mkdir()
            tables = best_tables(measured, model, parallelism, (model.kv_cache_dtype,), engine)
            for n, table in enumerate(tables):  # `load_tables` sorts by name
                table.save(folder / f"{n:03}_{table_name(table.metadata)}")

        doing = f"importing kernel tables of {model.name} on {gpu.name}, once on this machine"
        found = cache.keep_folder(cache.TABLES, name, write, doing)
    if found is None or not any(found.glob("*.parquet")):
        return ()

    def is_shipped(table: "LatencyTable") -> bool:
        about = table.metadata
        shipped = find_table(about.kind, about.gpu, shape=about.shape, dtype=about.dtype)
        return shipped is not None

    try:
        return tuple(table for table in load_tables(found) if not is_shipped(table))
    except InputError:  # a damaged file: all are imported again
        shutil.rmtree(found, ignore_errors=True)
        if found.exists():
            raise
        return cached_tables(gpu, model, parallelism, engine)
