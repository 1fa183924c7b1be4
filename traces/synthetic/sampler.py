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
from eldr_sim.traces.synthetic.model import BLOCK, CLASSES, RoutingModel

__all__ = ["sample_experts"]

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
    domain = np.asarray(domain, dtype=np.int64)
    prompt = np.asarray(prompt_len, dtype=np.int64)
    length = prompt + np.asarray(output_len, dtype=np.int64)
    total = int(length.sum())
    dtype = np.uint8 if model.n_experts <= 256 else np.uint16
    experts = np.empty((total, model.n_layers, model.top_k), dtype=dtype)
    popularity = np.exp(_limited(model.popularity)).astype(np.float32)
    reuse = np.exp(_limited(model.reuse)).astype(np.float32)
    kinds = _class_weights(model)
    decay = np.exp(-BLOCK / model.drift_tokens)
    row = 0
    for request, (d, p, n) in enumerate(zip(domain, prompt, length, strict=True)):
        rng = stream(seed, f"synthetic-request-{request}")
        topic = np.exp(_limited(_topic(model, int(d), int(n), decay, rng))).astype(np.float32)
        # One type for the compiler; ids become narrow afterwards.
        chosen = np.empty((int(n), model.n_layers, model.top_k), np.uint16)
        _sample_request(
            rng,
            topic,
            popularity[:, d],
            reuse,
            kinds,
            model.persistence,
            int(p),
            chosen,
        )
        experts[row : row + int(n)] = chosen
        row += int(n)
        progress(row / total)
    return experts


def _limited(log_weight: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.clip(log_weight, -_LIMIT, _LIMIT)


def _class_weights(model: RoutingModel) -> NDArray[np.float32]:
    """Return the factor by which each class changes the weights, ``[layers, CLASSES, experts]``."""
    shape = (model.n_layers, CLASSES, model.n_experts)
    normal = np.random.default_rng(model.class_seed).standard_normal(shape)
    return np.exp(_limited(model.coupling[:, None, None] * normal)).astype(np.float32)


def _topic(
    model: RoutingModel, domain: int, length: int, decay: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Draw what a request adds to the log weights, ``[blocks, layers, experts]``."""
    blocks, factors = -(-length // BLOCK), len(model.factors)
    steady = rng.standard_normal(factors)
    drift = rng.standard_normal((blocks, factors))
    for b in range(1, blocks):
        drift[b] = decay * drift[b - 1] + np.sqrt(1 - decay**2) * drift[b]
    scores = np.sqrt(model.steady) * steady + np.sqrt(1 - model.steady) * drift
    scores *= model.factor_sd[domain]
    own = rng.standard_normal((model.n_layers, model.n_experts)) * model.own_sd[domain, :, None]
    # Not a matrix product: its sums depend on the machine's BLAS.
    out = np.tile(own, (blocks, 1, 1))
    for f in range(factors):
        out += scores[:, f, None, None] * model.factors[f]
    return out


@njit()
def _sample_request(rng, topic, popularity, reuse, kinds, persistence, prompt, out):  # type: ignore[no-untyped-def]
    """Fill ``out [tokens, layers, top_k]`` with the experts of one request."""
    tokens, layers, top_k = out.shape
    experts = topic.shape[2]
    weight = np.empty(experts, np.float32)
    cumulative = np.empty(experts, np.float64)
    chosen = np.zeros(experts, np.bool_)
    for t in range(tokens):
        phase = 0 if t < prompt else 1
        kind = 0
        for layer in range(layers):
            if layer == 0 or rng.random() >= persistence:
                kind = rng.integers(0, kinds.shape[1])
            for e in range(experts):
                popular = popularity[phase, layer, e] * kinds[layer, kind, e]
                weight[e] = topic[t // BLOCK, layer, e] * popular
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
