"""Tables that a run lacks, imported into the user's cache where a package that has them is
installed."""

from hashlib import blake2b
from pathlib import Path

from eldr_sim import cache
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.sources.aiconfigurator_import import import_tables
from eldr_sim.kernel_profiles.sources.packages import SYSTEMS, packages
from eldr_sim.kernel_profiles.tables.format import LatencyTable, load_tables
from eldr_sim.kernel_profiles.tables.library import Engine


def cached_tables(
    gpu: str, model: ModelDims, parallelism: Parallelism, engine: Engine
) -> tuple[LatencyTable, ...]:
    """Return what the installed packages have of a model on a GPU, of the engine's own kernels,
    then of vLLM's; none without a package or of a GPU that none has."""
    installed = packages()
    if gpu not in SYSTEMS or not installed:
        return ()
    of = [(one.name, one.version) for one in installed], gpu, parallelism, tuple(engine)
    stamp = blake2b(f"{of} {model.model_dump_json()}".encode(), digest_size=8).hexdigest()
    name = f"{model.name.replace('/', '-')}-{gpu.replace(' ', '-')}-{stamp}"
    found = cache.find(cache.TABLES, name)
    if found is None or not found.is_dir():

        def write(folder: Path) -> None:
            folder.mkdir()
            for whose in dict.fromkeys((engine.name, "vllm")):
                version = engine.version if whose == engine.name else ""
                import_tables(
                    gpu, model, folder, parallelism, (model.kv_cache_dtype,), whose, version
                )

        doing = f"importing kernel tables of {model.name} on {gpu}, once on this machine"
        found = cache.keep_folder(cache.TABLES, name, write, doing)
    if found is None or not any(found.glob("*.parquet")):
        return ()
    tables = load_tables(found)
    return tuple(sorted(tables, key=lambda t: t.metadata.framework.split()[0] != engine.name))
