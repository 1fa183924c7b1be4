"""Which tables of ``aiconfigurator-core`` the package ships; others come with ``tables import``.

``python -m eldr_sim.kernel_profiles.sources.shipped DIR`` writes them, a file each;
:mod:`~eldr_sim.kernel_profiles.tables.library` makes what ships of them. Expert-parallel rows time
vLLM's kernels on a rank that gets the tokens of all (data parallelism 1), so those of 2, 4 and 8
ranks ship; ranks of larger groups are read from the rows of one GPU, see
:class:`~eldr_sim.kernel_profiles.steps.step_time.RankMoE`.
"""

import sys
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import KVDtype, load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.sources.aiconfigurator import SYSTEMS
from eldr_sim.kernel_profiles.sources.aiconfigurator_import import import_tables
from eldr_sim.kernel_profiles.tables.format import load_table

_CUT = ((1, False), (2, False), (4, False), (8, False))
_SPREAD = ((2, True), (4, True), (8, True))
_LARGE = {  # GPUs of a worker, experts spread
    "Qwen3-30B-A3B": _CUT[:3],
    "Qwen3-30B-A3B-FP8": _CUT[:2] + _SPREAD[:2],
    "Qwen3-235B-A22B": _CUT + _SPREAD,
    "Qwen3-235B-A22B-FP8": _CUT[:3] + _SPREAD,
    "DeepSeek-V3": _CUT + _SPREAD[1:],
    "Kimi-K2": (_CUT[0], _CUT[3], _SPREAD[2]),
    "Kimi-K2.5": (_CUT[0], *_CUT[2:], _SPREAD[2]),
    "MiniMax-M2.5": _CUT[:3] + _SPREAD[1:],
    "Qwen3-Coder-480B-FP8": (_CUT[0], _CUT[2], *_SPREAD[1:]),
    "GPT-OSS-120B": _CUT,
    "GPT-OSS-20B": _CUT[:1],
    "Mixtral-8x7B": _CUT,
}
_MORE = {
    "Gemma-4-26B-A4B": _CUT[:1],
    "Mixtral-8x22B": (_CUT[0], _CUT[3]),
    "Qwen3-Coder-480B": (_CUT[0], _CUT[3]),
    "Llama-4-Scout": (_CUT[0], *_CUT[2:]),
    "Llama-4-Maverick": (_CUT[0], _CUT[3], _SPREAD[2]),
}
_DENSE = {
    "Llama-3.1-8B-FP8": _CUT,  # attention of any type of weights, and FP8 GEMMs
    "Llama-3.1-70B-FP8": _CUT,
    "Qwen3-14B": _CUT,
}
_WIDE = ("DeepSeek-V3", "Kimi-K2.5", "Qwen3-235B-A22B-FP8", "MiniMax-M2.5", "GPT-OSS-120B")
_SMALL = ("Qwen3-30B-A3B", "Qwen3-30B-A3B-FP8", "GPT-OSS-20B", "GPT-OSS-120B", "Mixtral-8x7B")
MODELS = {
    "H100": _LARGE | _MORE | _DENSE,
    "H200": _LARGE | _MORE | _DENSE,
    "B200": _LARGE | _MORE | _DENSE | {"Llama-3.1-70B-NVFP4": _CUT[:1]},
    "GB200": _LARGE,
    "B300": {name: _LARGE[name] for name in _WIDE},
    "GB300": {name: _LARGE[name] for name in _WIDE},
    "A100": {
        name: _LARGE[name]
        for name in ("Qwen3-30B-A3B", "Qwen3-235B-A22B", "Mixtral-8x7B", "GPT-OSS-120B")
    }
    | {"Llama-3.1-70B": _CUT, "Qwen3-14B": _CUT},
    "L40S": {name: _LARGE[name] for name in _SMALL},
    "RTX PRO 6000": {name: _LARGE[name] for name in _SMALL},
}
"""By GPU and model: GPUs of a worker, and whether the experts are spread over them."""
_FP8_KV = (
    "Qwen3-30B-A3B",
    "Qwen3-235B-A22B",
    "DeepSeek-V3",
    "MiniMax-M2.5",
    "GPT-OSS-120B",
    *_DENSE,
)
_FP8_KV_GPUS = ("H100", "H200", "B200")


def write_tables(folder: Path) -> list[Path]:
    """Write all of :data:`MODELS`, and each GPU's GEMMs, collectives, dispatch and combine. Of
    bfloat16 and MXFP4 experts the kernels of older versions stay, which published runs had; of
    others the newest alone. Returns list of Path: the files, without repeats."""
    written: dict[Path, None] = {}
    newest: dict[tuple[Any, ...], Path] = {}  # they are written newest first
    for gpu in SYSTEMS:
        written |= dict.fromkeys(import_tables(gpu, None, folder))
        for name, layouts in MODELS[gpu].items():
            for size, spread in layouts:
                fp8 = name in _FP8_KV and gpu in _FP8_KV_GPUS
                caches: tuple[KVDtype, ...] = ("bfloat16", "fp8") if fp8 else ("bfloat16",)
                layout = Parallelism(size, spread)
                try:
                    found = import_tables(gpu, load_model(name), folder, layout, caches)
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
