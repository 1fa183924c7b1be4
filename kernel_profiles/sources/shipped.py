"""Which tables of ``aiconfigurator-core`` the package ships; others come with ``tables import``.

``python -m eldr_sim.kernel_profiles.sources.shipped DIR`` writes those of ``data/imports.csv``, a
file each: by GPU and model the GPUs of a worker (``e``: experts spread) and types of the KV cache;
:mod:`~eldr_sim.kernel_profiles.tables.library` makes what ships of them. Expert-parallel rows time
vLLM's kernels on a rank that gets the tokens of all (data parallelism 1), so those of 2, 4 and 8
ranks ship; ranks of larger groups are read from the rows of one GPU, see
:class:`~eldr_sim.kernel_profiles.steps.step_time.RankMoE`."""

import csv
import sys
from importlib import resources
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.sources.aiconfigurator import SYSTEMS
from eldr_sim.kernel_profiles.sources.aiconfigurator_import import import_tables
from eldr_sim.kernel_profiles.tables.format import load_table


def write_tables(folder: Path) -> list[Path]:
    """Write all models' tables, and each GPU's GEMMs, collectives, dispatch and combine. Of
    bfloat16 and MXFP4 experts the kernels of older versions stay, which published runs had; of
    others the newest alone. Returns list of Path: the files, without repeats."""
    written: dict[Path, None] = {}
    newest: dict[tuple[Any, ...], Path] = {}  # they are written newest first
    data = resources.files("eldr_sim.kernel_profiles") / "data" / "imports.csv"
    lines = list(csv.DictReader(data.read_text("utf-8").splitlines()))
    for gpu in SYSTEMS:
        written |= dict.fromkeys(import_tables(gpu, None, folder))
        for line in (line for line in lines if line["gpu"] == gpu):
            model = load_model(line["model"])
            caches: Any = tuple(line["kv_cache"].split())
            for size in line["gpus"].split():
                layout = Parallelism(int(size.removesuffix("e")), size.endswith("e"))
                try:
                    found = import_tables(gpu, model, folder, layout, caches)
                except InputError as error:
                    if error.field != "tensor_parallel_size":
                        raise
                    continue  # FP8 blocks cannot be cut so
                written |= dict.fromkeys(found)
    for path in written:
        metadata = load_table(path).metadata
        same = (metadata.kind, metadata.gpu, tuple(metadata.shape.items()), metadata.dtype)
        if metadata.kind == "moe" and metadata.dtype not in ("bfloat16", "w4a16_mxfp4"):
            newest.setdefault(same, path)
            if newest[same] != path:
                path.unlink()
    return [path for path in written if path.exists()]


if __name__ == "__main__":
    print(f"Wrote {len(write_tables(Path(sys.argv[1])))} tables")
