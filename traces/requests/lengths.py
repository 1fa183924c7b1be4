"""Prompt and output lengths of options, instead of recorded ones, drawn as by ``vllm bench
serve --dataset-name random`` (``vllm/benchmarks/datasets``): whole numbers from ``floor(length (1 -
ratio))`` to ``ceil(length (1 + ratio))``, equally likely, at least 1; a prefix comes on top."""

import math
from typing import Any

import numpy as np

from eldr_sim.arrays import Array, Int32s
from eldr_sim.errors import InputError
from eldr_sim.traces.requests.texts import PromptSource
from eldr_sim.traces.streams import stream

_LONGEST = 2**31 - 1


def check_lengths(
    input_len: int | None,
    prefix_len: int,
    num_prefixes: int,
    range_ratios: tuple[float, float],
    has_output_len: bool,
) -> None:
    """Raise InputError if lengths are out of range or contradict each other."""
    for name, value, least in (
        ("input_len", input_len, 1), ("prefix_len", prefix_len, 0),
        ("num_prefixes", num_prefixes, 1),
    ):  # fmt: skip
        if value is not None and not least <= value <= _LONGEST // 2:
            raise InputError(name, f"got {value}", f"{least}..{_LONGEST // 2}")
    if not all(0.0 <= ratio < 1.0 for ratio in range_ratios):
        raise InputError("random_range_ratio", f"got {max(range_ratios):g}", "0 or more, below 1")
    if any(range_ratios) and input_len is None and not has_output_len:
        problem = "the lengths are recorded ones"
        raise InputError("random_range_ratio", problem, "together with --input-len or --output-len")
    if num_prefixes > 1 and not prefix_len:
        raise InputError("num_prefixes", "prompts share no prefix", "together with --prefix-len")


def draw_lengths(length: int, ratio: float, n: int, seed: int, purpose: str) -> Int32s:
    """Draw ``n`` lengths around one, int32 ``[n]``; ``ratio``: half the range as a share of it."""
    low = max(1, math.floor(length * (1.0 - ratio)))
    high = max(1, math.ceil(length * (1.0 + ratio)))
    if high > _LONGEST:
        raise InputError("output_len", f"got {length} +- {100 * ratio:g}%", f"up to {_LONGEST}")
    return stream(seed, purpose).integers(low, high + 1, n).astype(np.int32)


def describe_lengths(
    texts: PromptSource, text: Array, prompt: Array, output: Array
) -> dict[str, Any]:
    """Describe the lengths of all requests, and how far prompts exceed recorded ones."""
    described = told_lengths(prompt, output)
    if texts.has_rows:
        beyond = np.maximum(prompt.astype(np.int64) - texts.prompt_len[text], 0)
        share = float(beyond.sum() / prompt.sum(dtype=np.int64))
        described["prompt_tokens_beyond_recorded_share"] = round(share, 6)
    return described


def told_lengths(prompt: Array, output: Array) -> dict[str, Any]:
    """Return mean, median and 99th percentile of both lengths, tokens."""
    return {
        name: {
            "mean": round(float(lengths.mean()), 3),
            "p50": float(np.median(lengths)),
            "p99": round(float(np.percentile(lengths, 99)), 3),
        }
        for name, lengths in (("isl", prompt), ("osl", output))
    }
