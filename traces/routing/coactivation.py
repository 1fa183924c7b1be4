"""How often two experts of a layer are chosen by one token, by which placements group them.

The routing profile of GRACE-MoE (Sec. 4): ``A[i, j]`` counts the tokens that chose both experts,
and ``A[i, i]``, the load of an expert, those that chose it."""

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from eldr_sim.arrays import Array, Floats, Ints, Words
from eldr_sim.errors import InputError
from eldr_sim.jit import lowest, njit
from eldr_sim.traces.routing.format import RoutingTrace

Tokens = Literal["all", "decode", "prompt"]  #: which tokens of requests are counted


def coactivation(trace: RoutingTrace, requests: ArrayLike, tokens: Tokens = "all") -> Ints:
    """Count the tokens that chose each pair of experts, int64 ``[n_layers, n_experts, n_experts]``;
    the diagonal is the load. ``tokens``: ``decode``, ``prompt``, or ``all`` that is recorded.
    Raises InputError for prompts' tokens of a decode-only trace."""
    return count_coactivation(trace.bits, token_rows(trace, requests, tokens), trace.n_experts)


def token_rows(trace: RoutingTrace, requests: ArrayLike, tokens: Tokens = "all") -> Ints:
    """Return the rows of the tokens of requests, one after the other; see `coactivation`."""
    q = np.asarray(requests, dtype=np.int64)
    if tokens == "all":
        first, length = trace.recorded_rows(q)
    elif tokens == "prompt":
        trace.require_prompts("the co-activation of prompt tokens")
        first, length = trace.first_row[q], trace.prompt_len[q].astype(np.int64)
    elif tokens == "decode":
        first, length = trace.decode_window(q)
        first, length = first + trace.has_prompts, trace.output_len[q].astype(np.int64)
    else:
        raise InputError("tokens", f"{tokens!r}", "all, decode, prompt")
    return ranges(first, length)


def ranges(first: Array, n: Array) -> Ints:
    """Return ranges of numbers, each from its first one on, one after the other."""
    each = [np.arange(a, a + k) for a, k in zip(first.tolist(), n.tolist(), strict=True)]
    return np.concatenate(each or [np.zeros(0, np.int64)])


def count_coactivation(bits: Words, rows: Ints, n_experts: int) -> Ints:
    """Count pairs in rows of bit sets, ``[tokens, layers, words]``; see `coactivation`."""
    found = np.zeros((bits.shape[1], n_experts, n_experts), np.int64)
    _add_pairs(bits, rows, np.zeros(64 * bits.shape[2], np.int64), found)
    return found


@njit()
def _add_pairs(bits: Any, rows: Any, chosen: Any, found: Any) -> None:
    """Add the pairs of each row; ``chosen`` has room for a layer's experts."""
    for i in range(rows.shape[0]):
        for layer in range(bits.shape[1]):
            n = 0
            for w in range(bits.shape[2]):
                word = bits[rows[i], layer, w]
                while word != 0:
                    chosen[n] = 64 * w + lowest(word)
                    n += 1
                    word &= word - np.uint64(1)
            for a in range(n):
                for b in range(n):
                    found[layer, chosen[a], chosen[b]] += 1


def affinity_of(pairs: Ints) -> Floats:
    """Return the affinity of different experts: `coactivation` without its diagonal."""
    affinity = pairs.astype(np.float64)
    every = np.arange(pairs.shape[-1])
    affinity[..., every, every] = 0.0
    return affinity
