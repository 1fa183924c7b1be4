"""Statistics of requests by which a trace and its synthetic twin are compared, over all prompts and
generated tokens, so that both have the same counting errors."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eldr_sim.arrays import Array, Floats, Ints
from eldr_sim.jit import njit
from eldr_sim.traces.routing.synthetic.token_kinds import count_groups

BLOCK = 16  #: tokens of a block
#: Distances, in blocks of `BLOCK` tokens, at which a request is compared with itself.
LAGS = (1, 2, 4, 8)


@dataclass(frozen=True, eq=False)
class Requests:
    """Rows of the tokens of some requests."""

    domain: Ints  #: ``[n]``, index of the domain
    #: ``[n]``: row of the first prompt token; tokens.
    first_row: Ints
    prompt_len: Ints
    output_len: Ints


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of some requests, from `measure`; D domains, L layers, E experts."""

    chosen: Floats  #: ``[2, D, L, E]``: prompt and generated tokens that chose an expert
    tokens: Floats  #: ``[2, D]``: prompt and generated tokens
    reuse: Floats  #: ``[L]``: share of a token's experts that the token before it chose too
    #: ``[2, L]``: mutual information of two experts drawn from a token's sets one and two layers
    #: apart, less that of sets of two tokens of the request; NaN where there is no such layer.
    coupling_bits: Floats
    #: ``[len(LAGS), D, L]``: how much more two blocks of a request overlap than of two requests of
    #: the domain: the mean of ``sum_e x x'`` over ``sum_e m m``, with ``x`` the deviation of a
    #: block's shares from the domain's ``m``; NaN where no request is long enough.
    self_overlap: Floats
    #: float32 ``[n, L, E]``: share of a request's prompt or generated tokens that chose it.
    prompt_share: NDArray[np.float32]
    decode_share: NDArray[np.float32]

    @property
    def load_max_over_mean(self) -> Floats:
        """``[L]``: load of the most loaded expert over the mean."""
        load = self.chosen.sum(axis=(0, 1))
        return np.asarray(load.max(axis=1) / load.mean(axis=1))


def measure(experts: Array, requests: Requests, n_domains: int, n_experts: int) -> Moments:
    """Measure ``requests`` of a recording ``[tokens, layers, top_k]``."""
    n, (_, layers, top_k) = len(requests.domain), experts.shape
    prompt = np.empty((n, layers, n_experts), np.float32)
    decode = np.empty_like(prompt)
    shared = np.zeros(layers)
    pairs = 0
    joint = np.zeros((2, layers, n_experts, n_experts))
    independent = np.zeros_like(joint)
    spans = list(
        zip(
            requests.first_row.tolist(),
            requests.prompt_len.tolist(),
            requests.output_len.tolist(),
            strict=True,
        )
    )
    for r, (row, p, m) in enumerate(spans):
        own = np.array(experts[row : row + p + m], dtype=np.uint16)
        counts = np.zeros((2, layers, n_experts))
        _count(own, p, counts, shared, joint)
        pairs += p + m - 1
        prompt[r], decode[r] = counts[0] / p, counts[1] / m
        both = counts.sum(axis=0)
        for i in range(2):
            later = both[i + 1 :]
            independent[i, : len(later)] += both[: len(later), :, None] * (later / (p + m))[:, None]
    chosen = np.zeros((2, n_domains, layers, n_experts))
    tokens = np.zeros((2, n_domains))
    for phase, (share, length) in enumerate(
        ((prompt, requests.prompt_len), (decode, requests.output_len))
    ):
        np.add.at(chosen[phase], requests.domain, share * length[:, None, None])
        np.add.at(tokens[phase], requests.domain, length)
    mean = chosen / np.maximum(tokens, 1)[:, :, None, None]
    return Moments(
        chosen=chosen,
        tokens=tokens,
        reuse=shared / max(pairs * top_k, 1),
        coupling_bits=information(joint) - information(independent),
        self_overlap=_self_overlap(experts, spans, requests.domain, mean),
        prompt_share=prompt,
        decode_share=decode,
    )


def information(joint: Floats) -> Floats:
    """Return the mutual information of each ``[E, E]`` table of counts, bits; NaN of none."""
    total = joint.sum(axis=(-2, -1), keepdims=True)
    share = joint / np.where(total > 0, total, np.nan)
    product = share.sum(axis=-1, keepdims=True) * share.sum(axis=-2, keepdims=True)
    ratio = np.divide(share, product, out=np.ones_like(share), where=~(share <= 0))
    return np.asarray((share * np.log2(ratio)).sum(axis=(-2, -1)))


def _self_overlap(
    experts: Array, spans: list[tuple[int, int, int]], domain: Ints, mean: Floats
) -> Floats:
    n_domains, layers, n_experts = mean.shape[1:]
    total = np.zeros((len(LAGS), n_domains, layers))
    pairs = np.zeros((len(LAGS), n_domains, 1))
    for d, (row, p, m) in zip(domain.tolist(), spans, strict=True):
        blocks = (p + m) // BLOCK
        if blocks < 2:
            continue
        own = np.array(experts[row : row + blocks * BLOCK], dtype=np.uint16)
        block = np.arange(len(own)) // BLOCK
        deviation = count_groups(own, block, blocks, n_experts) / BLOCK
        prompt = np.clip(p / BLOCK - np.arange(blocks), 0, 1)[:, None, None]
        deviation -= prompt * mean[0, d] + (1 - prompt) * mean[1, d]
        for i, lag in enumerate(LAGS):
            if blocks > lag:
                total[i, d] += np.einsum("ble,ble->l", deviation[lag:], deviation[:-lag])
                pairs[i, d] += blocks - lag
    square = (mean.mean(axis=0) ** 2).sum(axis=-1)
    scale = np.where(pairs > 0, pairs * np.where(square > 0, square, 1.0), np.nan)
    return np.asarray(total / scale)


@njit()
def _count(experts: Array, prompt: int, counts: Floats, shared: Floats, joint: Floats) -> None:
    """Add up the choices of one request by phase, their repetition, and pairs of layers."""
    tokens, layers, top_k = experts.shape
    for t in range(tokens):
        phase = 0 if t < prompt else 1
        for layer in range(layers):
            for slot in range(top_k):
                e = experts[t, layer, slot]
                counts[phase, layer, e] += 1
                if t > 0:
                    for other in range(top_k):
                        if experts[t - 1, layer, other] == e:
                            shared[layer] += 1
                for i in range(min(2, layers - 1 - layer)):
                    for other in range(top_k):
                        joint[i, layer, e, experts[t, layer + 1 + i, other]] += 1
