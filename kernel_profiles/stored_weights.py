"""How weights are stored, and the bytes that they take."""

import math
from typing import Literal

#: How weights are stored. ``int4`` and ``int8_wo`` are widened to bfloat16 before they are
#: multiplied (GPTQ, AWQ), ``nvfp4_wo`` likewise; ``int8`` multiplies in INT8 (W8A8).
WeightDtype = Literal[
    "bfloat16", "fp8", "fp8_block", "mxfp4", "mxfp8", "int4", "int4_g64", "int4_g128",
    "int8", "int8_wo", "nvfp4", "nvfp4_wo",
]  # fmt: skip
FP8_BLOCK = 128  #: FP8 block scaling: one fp32 scale per 128 x 128 weights
#: Bits of a weight, and of its share of the scale of its group, where scales are of groups.
_GROUPED_BITS: dict[WeightDtype, float] = {
    "mxfp4": 4 + 8 / 32,  # a scale byte per 32 weights
    "mxfp8": 8 + 8 / 32,
    "nvfp4": 4 + 8 / 16,  # an FP8 scale per 16
    "nvfp4_wo": 4 + 8 / 16,
    "int4": 4 + 16 / 32,  # a bfloat16 scale per 32: compressed-tensors, Kimi-K2.5
    "int4_g64": 4 + (16 + 4) / 64,
    "int4_g128": 4 + (16 + 4) / 128,  # a float16 scale and a zero point per 128: GPTQ, AWQ
}


def stored_bytes(n: int, k: int, dtype: WeightDtype) -> int:
    """Bytes of an n x k matrix as stored, scales included."""
    if dtype in _GROUPED_BITS:
        return round(n * k * _GROUPED_BITS[dtype] / 8)
    match dtype:
        case "bfloat16":
            return 2 * n * k
        case "fp8_block":
            return n * k + 4 * math.ceil(n / FP8_BLOCK) * math.ceil(k / FP8_BLOCK)
        case "int8" | "int8_wo":
            return n * k + 2 * n  # a scale a channel
        case _:
            return n * k


def stored_width(dtype: str) -> float:
    """Bytes of a weight as stored, scales left out where they are of channels or blocks."""
    grouped = {str(name): bits for name, bits in _GROUPED_BITS.items()}
    return ({"bfloat16": 16.0} | grouped).get(dtype, 8.0) / 8


def is_fp8(dtype: str) -> bool:
    """Whether weights are multiplied at the rate of FP8; INT8's is the same."""
    return dtype in ("fp8", "fp8_block", "mxfp8", "int8")
