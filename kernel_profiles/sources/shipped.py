"""Which of the tables of NVIDIA's packages ship with this one; others come with ``tables import``.

``python -m eldr_sim.kernel_profiles.sources.shipped DIR`` writes those of ``data/imports.csv``, a
file each: by GPU and model the GPUs of a worker (``e``: experts spread), types of the KV cache,
the engine, its newest version, and the parts (``attention``, ``linear``, ``moe`` or
``all``); :mod:`~eldr_sim.kernel_profiles.tables.library` makes what ships of them.

Expert-parallel rows time vLLM's kernels on a rank that gets the tokens of all (data parallelism 1),
so those of 2, 4 and 8 ranks ship; ranks of larger groups are read from the rows of one GPU, see
:class:`~eldr_sim.kernel_profiles.steps.step_time.RankMoE`."""

import csv
import sys
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import ModelDims, list_models, load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.sources.aiconfigurator_import import import_tables
from eldr_sim.kernel_profiles.sources.marlin import derive_marlin_table
from eldr_sim.kernel_profiles.sources.packages import SYSTEMS, packages
from eldr_sim.kernel_profiles.tables.format import load_table, save_tables


def write_tables(folder: Path) -> list[Path]:
    """Write all models' tables, and each GPU's GEMMs, collectives, dispatch and combine. Of
    bfloat16 and MXFP4 experts the kernels of vLLM's older versions stay, which published runs had;
    of others the newest alone. Returns list of Path: the files, without repeats."""
    written: dict[Path, None] = {}
    newest: dict[tuple[Any, ...], Path] = {}  # they are written newest first
    data = resources.files("eldr_sim.kernel_profiles") / "data" / "imports.csv"
    lines = list(csv.DictReader(data.read_text("utf-8").splitlines()))
    for gpu in SYSTEMS:
        written |= dict.fromkeys(import_tables(gpu, None, folder, version="0.24"))
    for line in lines:
        written |= dict.fromkeys(line_tables(line, folder))
    written |= dict.fromkeys(marlin_tables(folder))
    for path in written:
        metadata = load_table(path).metadata
        engine = metadata.framework.split()[0]
        same = (metadata.kind, metadata.gpu, *metadata.shape.items(), metadata.dtype, engine)
        stay = metadata.dtype in ("bfloat16", "w4a16_mxfp4") and engine == "vllm"
        if metadata.kind == "moe" and not stay:
            newest.setdefault(same, path)
            if newest[same] != path:
                path.unlink()
    return [path for path in written if path.exists()]


def line_tables(line: Mapping[str, str], folder: Path) -> Iterator[Path]:
    """Write the tables of a line of ``imports.csv``; layouts that a model cannot have are left
    out."""
    model = _model(line["model"])
    caches: Any = tuple(line["kv_cache"].split())
    for size in line["gpus"].split():
        layout = Parallelism(int(size.removesuffix("e")), size.endswith("e"))
        try:
            yield from import_tables(
                line["gpu"], model, folder, layout, caches, line["engine"], line["version"],
                line["parts"],
            )  # fmt: skip
        except InputError as error:
            if error.field != "tensor_parallel_size":  # FP8 blocks cannot be cut so
                raise


def marlin_tables(folder: Path) -> list[Path]:
    """Write GPT-OSS's tables of Marlin's kernel on Hopper, derived from those of another layer."""
    derived = []
    for gpu in ("H100", "H200"):
        for name, sizes in (("GPT-OSS-20B", (1,)), ("GPT-OSS-120B", (1, 2, 4, 8))):
            model = load_model(name)
            derived += [derive_marlin_table(gpu, model, Parallelism(size)) for size in sizes]
    return save_tables(derived, folder)


def _model(name: str) -> ModelDims:
    """Return a model of the catalogue, a checkpoint of one by its id, or a model of the
    configurations that lie beside the tables."""
    if "/" in name or name in list_models():
        return load_model(name)
    return load_model(packages()[0].folder.parents[1] / "model_configs" / f"{name}_config.json")


if __name__ == "__main__":
    print(f"Wrote {len(write_tables(Path(sys.argv[1])))} tables")
