"""What is not measured of a decode step of the models of autumn 2026, by model and GPU.

``python studies/silicon/roofline_shares.py > docs/data/roofline_shares.csv``: 64 sequences at most
on the fewest GPUs that hold the model; a part's share is of a step as its warning says it."""

import csv
import re
import sys
from collections.abc import Iterator

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.models import list_models, load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.step_time import StepTimeModel, build_step_time_model

MODELS = (
    "DeepSeek-V4", "GLM-5.3-Flash", "Kimi-K3", "Kimi-Linear", "Nemotron-3", "MiniMax-M3",
    "Step-3.7", "MiMo-V2", "Qwen3.6", "GLM-4.7-Flash", "Qwen3-Omni", "Qwen3-VL", "Gemma-4-31B",
    "ERNIE-4.5", "Hunyuan", "Granite-4",
)  # fmt: skip
GPUS = ("H200", "B200")


def on_fewest_gpus(
    name: str, gpu: str, max_num_seqs: int, max_model_len: int
) -> StepTimeModel | None:
    """Return the step times of a model on the fewest GPUs, a power of two, that hold it; None if 16
    do not."""
    model = load_model(name)
    for size in (1, 2, 4, 8, 16):
        try:
            load_gpu(gpu).kv_cache_bytes(Parallelism(size).weight_bytes(model))
            return build_step_time_model(
                model, gpu, max_num_seqs=max_num_seqs, max_model_len=max_model_len,
                max_num_batched_tokens=64, parallelism=Parallelism(size),
            )  # fmt: skip
        except InputError:
            continue  # does not fit, or cannot be cut so
    return None


def without_table(built: StepTimeModel) -> list[str]:
    """Return the warnings of parts without a table."""
    return [line for line in built.warnings if "To do better" in line]


def parts_of(name: str, gpu: str) -> str:
    """Return the GPUs of a worker, and the parts without a table with their shares."""
    built = on_fewest_gpus(name, gpu, max_num_seqs=64, max_model_len=8192)
    if built is None:
        return "does not fit"
    size = built.parallelism.tensor_parallel_size
    return f"{size}: " + (", ".join(map(_part, without_table(built))) or "all measured")


def _part(line: str) -> str:
    share = re.search(r"(\d+)% of a decode step", line)
    assert share is not None, line
    kind = "nearest shape" if "nearest measured shape" in line else "roofline"
    return f"{line.partition(':')[0]} {share[1]}% {kind}"


def rows() -> Iterator[list[str]]:
    """Yield a row a model."""
    for name in list_models():
        if name.startswith(MODELS):
            yield [name, *(parts_of(name, gpu) for gpu in GPUS)]


if __name__ == "__main__":
    lines = csv.writer(sys.stdout, lineterminator="\n")
    lines.writerow(["model", *(f"GPUs of a worker and parts, {gpu}" for gpu in GPUS)])
    lines.writerows(rows())
