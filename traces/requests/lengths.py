"""Prompt and output lengths that are asked for, instead of recorded ones, and common prefixes.

Lengths are drawn as ``vllm bench serve --dataset-name random`` draws them
(``vllm/benchmarks/datasets``): whole numbers between ``floor(length (1 - ratio))`` and
``ceil(length (1 + ratio))``, each equally likely, at least 1; a prefix comes on top of the input
length. vLLM takes the tokenizer's special tokens off the input length; there are none here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.traces.streams import stream

if TYPE_CHECKING:
    from eldr_sim.traces.routing.format import RoutingTrace

__all__ = ["check_lengths", "describe_lengths", "draw_lengths", "share_prefixes"]

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
        raise InputError(
            "random_range_ratio", "lengths are recorded", "--input-len or --output-len beside it"
        )
    if num_prefixes > 1 and not prefix_len:
        raise InputError("num_prefixes", "prompts begin alike with --prefix-len", "beside it")


def draw_lengths(length: int, ratio: float, n: int, seed: int, purpose: str) -> NDArray[np.int32]:
    """Draw ``n`` lengths around one.

    Parameters
    ----------
    length
        Tokens, at least 1.
    ratio
        Half the width of the range as a share of the length, 0 to 1.
    n, seed
        How many, and the seed.
    purpose
        Name of the random stream.

    Returns
    -------
    int32 ``[n]``.
    """
    low = max(1, math.floor(length * (1.0 - ratio)))
    high = max(1, math.ceil(length * (1.0 + ratio)))
    if high > _LONGEST:
        raise InputError("output_len", f"got {length} +- {100 * ratio:g}%", f"up to {_LONGEST}")
    return stream(seed, purpose).integers(low, high + 1, n).astype(np.int32)


def share_prefixes(
    request: NDArray[np.int64], num_prefixes: int, seed: int
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    """Give each request one of some prefixes, all equally likely.

    Parameters
    ----------
    request
        int64 ``[n]``: trace request of each request.
    num_prefixes
        Number of different prefixes.
    seed
        Of the draw.

    Returns
    -------
    blocks, indptr, source
        One block a request: the number of its prefix; ``indptr`` as in `Workload`; the trace
        request that the prefix replays, that of the first request with it.
    """
    n = len(request)
    prefix = stream(seed, "prefix").integers(0, num_prefixes, n)
    _, first, number = np.unique(prefix, return_index=True, return_inverse=True)
    return prefix.astype(np.uint64), np.arange(n + 1, dtype=np.int64), request[first][number]


def describe_lengths(
    trace: RoutingTrace,
    request: NDArray[np.int64],
    prompt: NDArray[np.int32],
    output: NDArray[np.int32],
) -> dict[str, Any]:
    """Describe the lengths of all requests, and how far prompts exceed what was recorded."""
    described: dict[str, Any] = {
        name: {
            "mean": round(float(lengths.mean()), 3),
            "p50": float(np.median(lengths)),
            "p99": round(float(np.percentile(lengths, 99)), 3),
        }
        for name, lengths in (("isl", prompt), ("osl", output))
    }
    if trace.has_prompts:
        beyond = np.maximum(prompt.astype(np.int64) - trace.prompt_len[request], 0)
        share = float(beyond.sum() / prompt.sum(dtype=np.int64))
        described["prompt_tokens_beyond_recorded_share"] = round(share, 6)
    return described
