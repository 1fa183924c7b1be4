"""Sampler of the experts of requests from a `RoutingModel`.

Every request draws from a stream of its own, so the first requests of a trace are the same
however many follow.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_sim.jit import njit
from eldr_sim.traces.streams import stream
from eldr_sim.traces.synthetic.model import DRIFT_BLOCK, RoutingModel

__all__ = ["sample_experts", "sample_kinds_and_experts"]

_LIMIT = 20.0
"""Bound on the terms of a log weight, at both sides."""
_SMALLEST, _LARGEST = np.float32(1e-30), np.float32(1e30)
"""A weight outside of float32's range would leave nothing to draw from."""


def sample_experts(
    model: RoutingModel,
    domain: ArrayLike,
    prompt_len: ArrayLike,
    output_len: ArrayLike,
    seed: int,
    progress: Callable[[float], None] = lambda share: None,
) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """Draw the experts of every token of some requests.

    Parameters
    ----------
    model
        What to draw from.
    domain
        ``[n]``, index into ``model.domains``.
    prompt_len, output_len
        ``[n]``, tokens, each at least 1.
    seed
        Non-negative integer.
    progress
        Called with the share of the tokens done.

    Returns
    -------
    experts
        uint8 or uint16 ``[tokens, layers, top_k]``, in the order in which they were chosen;
        requests one after the other, prompt before generation.
    """
    topics = [np.flatnonzero(model.topic_domain == d) for d in range(len(model.domains))]
    choice = [
        int(stream(seed, f"synthetic-topic-{i}").choice(topics[int(d)]))
        for i, d in enumerate(np.asarray(domain).tolist())
    ]
    return sample_kinds_and_experts(model, choice, prompt_len, output_len, seed, progress)[1]


def sample_kinds_and_experts(
    model: RoutingModel,
    topic: ArrayLike,
    prompt_len: ArrayLike,
    output_len: ArrayLike,
    seed: int,
    progress: Callable[[float], None] = lambda share: None,
) -> tuple[NDArray[np.int64], NDArray[np.uint8] | NDArray[np.uint16]]:
    """Draw requests of given topics: the kind of every token, and its experts."""
    prompt = np.asarray(prompt_len, dtype=np.int64)
    length = prompt + np.asarray(output_len, dtype=np.int64)
    total = int(length.sum())
    dtype = np.uint8 if model.n_experts <= 256 else np.uint16
    experts = np.empty((total, model.n_layers, model.top_k), dtype=dtype)
    kinds = np.empty(total, np.int64)
    weights = [_weights(part) for part in (model.phase, model.kinds, model.reuse)]
    spread = model.topics.std(axis=0)
    row = 0
    for request, (c, p, n) in enumerate(
        zip(np.asarray(topic).tolist(), prompt.tolist(), length.tolist(), strict=True)
    ):
        rng = stream(seed, f"synthetic-request-{request}")
        # One type for the compiler; ids become narrow afterwards.
        chosen = np.empty((n, model.n_layers, model.top_k), np.uint16)
        _sample_request(
            rng,
            _weights(_topic(model, spread, c, n, rng)),
            *weights,
            model.topic_kinds[c],
            model.succession,
            p,
            kinds[row : row + n],
            chosen,
        )
        experts[row : row + n] = chosen
        row += n
        progress(row / total)
    return kinds, experts


def _weights(log_weight: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.exp(np.clip(log_weight, -_LIMIT, _LIMIT)).astype(np.float32)


def _topic(
    model: RoutingModel,
    spread: NDArray[np.float64],
    topic: int,
    length: int,
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """Draw what topic and drift add to the log weights, ``[blocks, layers, experts]``."""
    cell = spread.shape
    base = model.topics[topic]
    if model.own:
        base = base * np.sqrt(1 - model.own**2) + model.own * spread * rng.standard_normal(cell)
    out = np.tile(base, (-(-length // DRIFT_BLOCK), 1, 1))
    for sd, tokens in zip(model.drift_sd.tolist(), model.drift_tokens.tolist(), strict=True):
        if not sd:
            continue
        drift = rng.standard_normal(out.shape, dtype=np.float32)
        decay = np.exp(-DRIFT_BLOCK / tokens)
        for b in range(1, len(drift)):
            drift[b] = decay * drift[b - 1] + np.sqrt(1 - decay**2) * drift[b]
        out += sd * drift
    return out


@njit()
def _sample_request(rng, topic, phases, kinds, reuse, shares, succession, prompt, kind_of, out):  # type: ignore[no-untyped-def]
    """Fill ``out [tokens, layers, top_k]`` with the experts of one request."""
    tokens, layers, top_k = out.shape
    experts = topic.shape[2]
    weight = np.empty(experts, np.float32)
    cumulative = np.empty(experts, np.float64)
    chosen = np.zeros(experts, np.bool_)
    for t in range(tokens):
        phase = 0 if t < prompt else 1
        total = 0.0
        for kind in range(len(shares)):
            total += shares[kind] * (succession[kind_of[t - 1], kind] if t > 0 else 1.0)
        target = rng.random() * total
        kind = 0
        total = 0.0
        for k in range(len(shares)):
            total += shares[k] * (succession[kind_of[t - 1], k] if t > 0 else 1.0)
            if total > target:
                kind = k
                break
        kind_of[t] = kind
        for layer in range(layers):
            for e in range(experts):
                popular = phases[phase, layer, e] * kinds[layer, kind, e]
                weight[e] = topic[t // DRIFT_BLOCK, layer, e] * popular
            if t > 0:
                for slot in range(top_k):
                    weight[out[t - 1, layer, slot]] *= reuse[layer]
            _choose(rng, weight, cumulative, chosen, out[t, layer])


@njit()
def _choose(rng, weight, cumulative, chosen, out):  # type: ignore[no-untyped-def]
    """Draw distinct experts, each in proportion to its weight among those left.

    Drawing from all experts and discarding those drawn before is the same as drawing from those
    left. After as many vain draws as there are experts to draw, the weights of the drawn are set to
    0, which ends every search.
    """
    experts, top_k = len(weight), len(out)
    total = 0.0
    for e in range(experts):
        weight[e] = min(max(weight[e], _SMALLEST), _LARGEST)
        total += weight[e]
        cumulative[e] = total
    vain = 0
    drawn = 0
    while drawn < top_k:
        if vain == top_k:
            vain = 0
            total = 0.0
            for e in range(experts):
                if not chosen[e]:
                    total += weight[e]
                cumulative[e] = total
        target = rng.random() * total
        low, high = 0, experts - 1
        while low < high:
            middle = (low + high) // 2
            if cumulative[middle] > target:
                high = middle
            else:
                low = middle + 1
        if chosen[low]:
            vain += 1
        else:
            chosen[low] = True
            out[drawn] = low
            drawn += 1
    for slot in range(top_k):
        chosen[out[slot]] = False
