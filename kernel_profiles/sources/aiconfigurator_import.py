"""Tables of one GPU, and of one model on it, written from what ``aiconfigurator-core`` measured."""

from pathlib import Path
from typing import get_args

from eldr_sim.kernel_profiles.models import KVDtype, ModelDims
from eldr_sim.kernel_profiles.parallel import SINGLE_GPU, Parallelism
from eldr_sim.kernel_profiles.sources import aiconfigurator_comm as comm
from eldr_sim.kernel_profiles.sources.aiconfigurator import (
    attention_tables,
    gemm_tables,
    moe_tables,
)
from eldr_sim.kernel_profiles.tables.format import save_tables


def import_tables(
    gpu: str,
    model: ModelDims | None,
    out_dir: Path,
    parallelism: Parallelism = SINGLE_GPU,
    kv_dtypes: tuple[KVDtype, ...] = get_args(KVDtype),
    engine: str = "vllm",
) -> list[Path]:
    """Write latency tables of one GPU as format v1.

    Returns list of Path: files written, none if the package holds no rows of the model on this GPU.
    Raises InputError: the package is missing, knows no such GPU, or the model cannot be spread so.

    ``gpu``: one of :data:`~eldr_sim.kernel_profiles.sources.aiconfigurator.SYSTEMS`; ``model``:
    whose MoE and attention tables to write, and the GPU's FP8 GEMMs if its linear layers are of FP8
    blocks; None writes the GPU's bfloat16 GEMMs, collectives, dispatch and combine; ``out_dir``:
    made if missing; tables of the same name are replaced; ``parallelism``: the tables are those of
    one GPU's part; ``kv_dtypes``: of attention tables; ``engine``: ``vllm``, ``sglang`` or
    ``trtllm``.
    """
    if model is None:
        tables = [
            *gemm_tables(gpu, engine=engine),
            *comm.collective_tables(gpu),
            *comm.all_to_all_tables(gpu),
        ]
    else:
        shard = parallelism.shard(model)
        tables = [*moe_tables(gpu, model, parallelism, engine)]
        for kv_dtype in kv_dtypes:
            own = shard.model_copy(update={"kv_cache_dtype": kv_dtype})
            tables += attention_tables(gpu, own, engine)
        if model.linear_dtype != "bfloat16":
            tables += gemm_tables(gpu, model.linear_dtype, engine)
    return save_tables(tables, out_dir)
