"""Files that are good, odd values, and ways to spoil the one with the other; for `fuzz_cases`."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

NUMBERS: list[Any] = [
    0, 1, -1, 2, 3, 7, 16, 0.5, -0.5, 1e-300, 1e300, 1e308, float("nan"), float("inf"),
    -float("inf"), 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63),
]  # fmt: skip
TEXTS: list[Any] = [
    "", " ", "a", "NaN", "inf", "none", "null", "true", "task", "eldr", "jsq", "H100", "é", "日本",
    "\x00", "\n", "a,b", "a=b", ":", "eldr:tau=", "eldr:tau=nan", "eldr:tau=0.2,", "jsq:x=1",
    "../../etc/passwd", "/", ".", "..", "/dev/null", "/proc/self/mem", "x" * 300, "'", '"', "{}",
    "[]", "[1", "{{7*7}}", "=1+1", "1P1D", "0P1D", "1P0D", "1C", "2P", "99999D", "1p1d", "-1C",
    "code=1", "code=1,math=2", "code=-1", "code=1e308,math=1e308", "ttft=1", "tpot=-1", "\ud800",
]  # fmt: skip
ODD: list[Any] = [*NUMBERS, *TEXTS, None, True, [], {}, [1], {"a": 1}, [[]], "9" * 5000]
#: What fits many a place.
PLAIN: list[Any] = [
    1, 2, 3, 4, 8, 16, 100, 0.5, 1.5, 20, True, False, "task", "trace", "jsq", "p2c", "eldr",
    "round_robin", "H100", "MI300X", "1P1D", "2P3D", "1C", "2C", "2P", "sjf", "fcfs", "inf",
    "ideal", "recorded", "shared", "tpot=20", "code=1,math=2", "linear", "eplb", "affinity",
    "fp8", "auto", "prefix_hash", "saturation", "collective", "one_sided", "pplx", "deepep_ll",
    "hash",
]  # fmt: skip


def odd_value(rng: np.random.Generator) -> Any:
    values = ODD if rng.random() < 0.5 else PLAIN
    return values[rng.integers(len(values))]


def odd_text(rng: np.random.Generator) -> str:
    """A value as the shell can pass it: without null bytes."""
    value = odd_value(rng)
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("\0", "").encode("utf-8", "ignore").decode()


# --- Files that are good, before they are spoilt --------------------------------------------------


def good_config() -> dict[str, Any]:
    return {
        "topology": "1P2D", "trace": "reference-moe", "num_requests": 5, "output_len": 4,
        "policy": "jsq", "seed": 1, "request_rate": 10.0, "goodput": {"ttft": 500, "tpot": 20},
        "decode": {"max_num_seqs": 8}, "domain_mix": {"code": 1.0, "math": 2.0},
    }  # fmt: skip


def good_sweep() -> dict[str, Any]:
    return {
        "config": good_config(),
        "sweep": {"type": "grid", "parameters": {"policy": ["jsq", "p2c"], "output_len": [2, 3]}},
        "multiRun": {"numRuns": 2, "confidenceLevel": 0.95},
    }


def good_model() -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 12, "hidden_size": 256, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000,
        "max_position_embeddings": 4096, "moe_intermediate_size": 128, "intermediate_size": 512,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "tie_word_embeddings": False, "layer_types": ["full_attention"] * 12,
    }  # fmt: skip


def good_log() -> list[dict[str, Any]]:
    return [
        {"timestamp": 300 * i, "input_length": 700, "output_length": 3, "hash_ids": [0, i]}
        for i in range(5)
    ]


def good_routing(rng: np.random.Generator, pairs: int = 1) -> dict[str, Any]:
    lengths = np.tile([[3, 2], [2, 4]], (pairs, 1))
    rows = np.repeat(np.arange(4 * pairs), lengths.ravel())
    return {
        "topk": np.argsort(rng.random((len(rows), 3, 8)))[..., :2].astype(np.uint8),
        "request_id": rows // 2, "is_decode": rows % 2 == 1, "domain": np.arange(2 * pairs) % 2,
        "domain_names": np.array(["a", "b"]), "prompt_len": lengths[:, 0],
        "output_len": lengths[:, 1], "E": np.array(8),
    }  # fmt: skip


# --- Ways to spoil them --------------------------------------------------------------------------


def spoil_value(value: Any, rng: np.random.Generator) -> Any:
    """Put something odd somewhere in a document, drop a part, or add one."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = list(value)[rng.integers(len(value))]
        way = rng.integers(10)
        if way == 0:
            return {k: v for k, v in value.items() if k != key}
        if way == 1:
            return value | {str(odd_value(rng)): odd_value(rng)}
        return value | {key: spoil_value(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        i = int(rng.integers(len(value)))
        return [*value[:i], spoil_value(value[i], rng), *value[i + 1 :]]
    return odd_value(rng)


def spoil_bytes(data: bytes, rng: np.random.Generator) -> bytes:
    way = rng.integers(7)
    if way == 0:
        return data[: rng.integers(len(data) + 1)]
    if way == 1:
        return b""
    if way == 2:
        return data + rng.bytes(20)
    broken = bytearray(data or b"\0")
    for _ in range(int(rng.integers(1, 6))):
        broken[rng.integers(len(broken))] = rng.integers(256)
    if way == 3:
        at = int(rng.integers(len(broken)))
        broken[at:at] = b"[" * 50_000
    return bytes(broken)


def _array(value: Any) -> np.ndarray[Any, Any]:
    with suppress(ValueError, TypeError, OverflowError):
        return np.array(value)
    return np.array(str(value))


def spoil_array(array: np.ndarray[Any, Any], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    way = rng.integers(7)
    if way == 0:
        with suppress(ValueError):
            return array.astype(("f4", "i8", "U8", "?", "M8[s]")[rng.integers(5)])
    if way == 1:
        return array[..., None]
    if way == 2:
        return array.ravel()[:1].reshape(())
    if way == 3:
        return array[: len(array) // 2] if array.ndim else array
    if way == 4:
        changed = array.astype(np.int64 if array.dtype.kind in "iub" else array.dtype)
        if changed.size and changed.dtype.kind == "i":
            odd = [-1, 0, 2**62, -(2**63), 2**40, 255, 256]
            changed.ravel()[rng.integers(changed.size)] = odd[rng.integers(len(odd))]
        return changed
    if way == 5:
        return _array(odd_value(rng))
    return array[:0] if array.ndim else array


def spoilt_document(
    make: Callable[[], Any], name: str, lines: bool, rng: Any, folder: Path
) -> Path:
    document = make()
    for _ in range(int(rng.integers(1, 4))):
        document = spoil_value(document, rng)
    if lines and isinstance(document, list):
        text = "\n".join(json.dumps(entry) for entry in document)
    else:
        text = json.dumps(document)
    data = text.encode("utf-8", "replace")
    path = folder / name
    path.write_bytes(spoil_bytes(data, rng) if rng.random() < 0.3 else data)
    return path
