"""Fitting a `RoutingModel` to a trace, by matching `moments`.

The moments have no closed form, so they are matched by simulation: draw a twin of the trace (the
same domains and lengths), measure both with the same code, correct every parameter by the
difference in its own moment, and repeat. The directions in which requests vary come from a
principal component analysis of what prompt and generation of a request have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.traces.format import RoutingTrace
from eldr_sim.traces.synthetic.model import BLOCK, RoutingModel
from eldr_sim.traces.synthetic.moments import LAGS, Moments, Requests, measure
from eldr_sim.traces.synthetic.sampler import sample_experts

__all__ = ["fit_routing_model", "requests_of"]

Floats = NDArray[np.float64]

REQUESTS = 1024
"""Most requests to measure, the same share of every domain."""
FACTORS = 32
"""Directions in which requests may vary, besides each expert on its own."""
ROUNDS = 12
"""Twins to draw. Later corrections are smaller, so that the noise of the twins averages out."""


def requests_of(trace: RoutingTrace) -> Requests:
    """Return where all requests of a trace lie."""
    return Requests(
        domain=trace.domain.astype(np.int64),
        first_row=trace.first_row.astype(np.int64),
        prompt_len=trace.prompt_len.astype(np.int64),
        output_len=trace.output_len.astype(np.int64),
    )


def twin_requests(requests: Requests) -> Requests:
    """Return the same requests, their rows one after the other as `sample_experts` draws them."""
    length = requests.prompt_len + requests.output_len
    return replace(requests, first_row=np.cumsum(length) - length)


def _thinned(requests: Requests) -> Requests:
    """Return at most `REQUESTS` of the requests, the same share of every domain."""
    n = len(requests.domain)
    if n <= REQUESTS:
        return requests
    rank = np.empty(n)
    for d in np.unique(requests.domain):
        mine = np.flatnonzero(requests.domain == d)
        rank[mine] = (np.random.default_rng(0).permutation(len(mine)) + 0.5) / len(mine)
    kept = np.sort(np.argsort(rank, kind="stable")[:REQUESTS])
    return Requests(*(getattr(requests, f.name)[kept] for f in fields(Requests)))


def fit_routing_model(
    trace: RoutingTrace,
    *,
    seed: int = 0,
    rounds: int = ROUNDS,
    progress: Callable[[float], None] = lambda share: None,
) -> RoutingModel:
    """Fit a generative model to requests of a trace, of both splits.

    Parameters
    ----------
    trace
        The trace.
    seed
        Seed of the twins and of the model's coupling matrix.
    rounds
        Twins to draw.
    progress
        Called with the share done.

    Raises
    ------
    InputError
        If a domain has fewer than two requests, or the trace no prompt rows.
    """
    trace.require_prompts("synthetic models")
    requests = _thinned(requests_of(trace))
    members = np.bincount(requests.domain, minlength=len(trace.domains))
    if members.min() < 2:
        name = trace.domains[int(members.argmin())]
        raise InputError("trace", f"domain {name!r} has {members.min()} requests", "two or more")
    real = measure(trace.experts, requests, len(trace.domains), trace.n_experts)
    model = _first_guess(trace, requests, real, seed)
    twin = twin_requests(requests)
    for turn in range(rounds):
        progress(turn / rounds)
        experts = sample_experts(
            model, twin.domain, twin.prompt_len, twin.output_len, seed + 1 + turn
        )
        drawn = measure(experts, twin, len(trace.domains), trace.n_experts)
        model = _corrected(model, real, drawn, step=min(1.0, 4 / (turn + 1)))
    progress(1.0)
    return model


def _log_weight(share: Floats) -> Floats:
    """Return the log weights at which experts are chosen by the given shares of the tokens.

    An exponential race over a unit of time picks expert e with chance ``1 - exp(-w_e)``.
    """
    return np.asarray(np.log(-np.log1p(-share)))


def _share(chosen: Floats, tokens: Floats) -> Floats:
    """Return the share of tokens that chose each expert, kept half a token away from 0 and 1."""
    tokens = tokens[:, :, None, None]
    return np.asarray((chosen + 0.5) / (tokens + 1.0))


def _first_guess(trace: RoutingTrace, requests: Requests, real: Moments, seed: int) -> RoutingModel:
    layers = trace.n_layers
    factors, factor_sd, rest = _principal(requests, real)
    overlap = np.nan_to_num(real.self_overlap)
    own_sd = np.sqrt(rest * np.maximum(overlap.mean(axis=0), 1e-4))
    return RoutingModel(
        top_k=trace.top_k,
        domains=list(trace.domains),
        popularity=_log_weight(_share(real.chosen, real.tokens)),
        factors=factors,
        factor_sd=factor_sd,
        own_sd=own_sd,
        steady=0.6,
        drift_tokens=64.0,
        reuse=np.full(layers, 0.5),
        coupling=np.full(layers, 1.0),
        persistence=0.9,
        class_seed=seed,
        facts={
            "model": trace.manifest.model,
            "source": f"fitted to {trace.path.name} ({trace.manifest.provenance}, "
            f"{trace.n_requests} requests, checksum {trace.manifest.checksum[:12]})",
            "prompt_len": round(float(trace.prompt_len.mean())),
            "output_len": round(float(trace.output_len.mean())),
        },
    )


def _principal(requests: Requests, real: Moments) -> tuple[Floats, Floats, float]:
    """Find the directions of log weight in which requests of a domain differ.

    The covariance of the prompt's shares with those of the generation shows what lasts, without
    the counting noise, which is independent in the two. Shares are scaled by the noise of an
    expert, and the directions converted to log weights by the slope of the race's probability.

    Returns
    -------
    factors, factor_sd, rest
        ``[F, L, E]``, for a score of 1; ``[D, F]``; the share of the common variance that lies
        in other directions.
    """
    n, layers, n_experts = real.prompt_share.shape
    n_domains = real.chosen.shape[1]
    share = real.chosen.sum(axis=(0, 1)) / real.tokens.sum()
    share = np.clip(share, 1.0 / real.tokens.sum(), 0.98)
    noise = np.sqrt(share * (1 - share))
    slope = _slope(share)
    scaled = []
    for part in (real.prompt_share, real.decode_share):
        x = part.astype(np.float64)
        for d in range(n_domains):
            mine = requests.domain == d
            x[mine] -= x[mine].mean(axis=0)
        scaled.append((x / noise).reshape(n, -1))
    prompt, decode = scaled
    # Directions within the span of the requests: n x n instead of LE x LE.
    both = prompt + decode
    values, vectors = np.linalg.eigh(both @ both.T / n)
    keep = values > 1e-9 * values[-1]
    basis = (both.T @ (vectors[:, keep] / np.sqrt(values[keep] * n)))[:, ::-1][:, : 8 * FACTORS]
    in_prompt, in_decode = prompt @ basis, decode @ basis
    common = (in_prompt.T @ in_decode + in_decode.T @ in_prompt) / (2 * n)
    strength, rotation = np.linalg.eigh(common)
    best = np.argsort(strength)[::-1][:FACTORS]
    best = best[strength[best] > 0]
    direction = (basis @ rotation[:, best]).T.reshape(len(best), layers, n_experts)
    # A rare expert's slope is small, and its direction mostly noise.
    factors = np.clip(direction * noise / slope, -2.0, 2.0)
    product = (in_prompt @ rotation[:, best]) * (in_decode @ rotation[:, best])
    variance = np.stack([product[requests.domain == d].mean(axis=0) for d in range(n_domains)])
    floor = 0.02 * np.maximum(variance, 0).mean(axis=0)
    total = max(float((prompt * decode).sum()) / n, 1e-12)
    rest = float(np.clip(1 - strength[best].sum() / total, 0.02, 1.0))
    return factors, np.sqrt(np.maximum(variance, floor)), rest


def _corrected(model: RoutingModel, real: Moments, drawn: Moments, step: float) -> RoutingModel:
    """Move every parameter by the difference in its own moment."""
    # Newton's step, linear in what was drawn: the logarithm of a rare expert's share, which depends
    # on a few requests of one twin, is too low on average.
    share = _share(real.chosen, real.tokens)
    gap = (share - _share(drawn.chosen, drawn.tokens)) / _slope(share)
    popularity = model.popularity + step * np.clip(gap, -3.0, 1.0)
    popularity -= popularity.mean(axis=-1, keepdims=True)

    reuse = model.reuse + step * (_odds(real.reuse) - _odds(drawn.reuse))

    coupling, persistence = _coupling(model, real.coupling_bits, drawn.coupling_bits, step)

    want, have = np.nan_to_num(real.self_overlap), np.nan_to_num(drawn.self_overlap)
    by_layer = _ratio(want.sum(axis=(0, 1)), have.sum(axis=(0, 1)), 0.25 * step)
    by_domain = _ratio(want.sum(axis=(0, 2)), have.sum(axis=(0, 2)), 0.25 * step)
    steady, drift_tokens = _decay(model, want.sum(axis=(1, 2)), have.sum(axis=(1, 2)), step)
    return replace(
        model,
        popularity=popularity,
        reuse=np.clip(reuse, -3, 8),
        coupling=coupling,
        persistence=persistence,
        factors=model.factors * by_layer[:, None],
        factor_sd=model.factor_sd * by_domain[:, None],
        own_sd=model.own_sd * by_layer * by_domain[:, None],
        steady=steady,
        drift_tokens=drift_tokens,
    )


def _slope(share: Floats) -> Floats:
    """Return the derivative of the probability ``1 - exp(-w)`` by log w, at a probability."""
    return np.asarray(-np.log1p(-share) * (1 - share))


def _odds(share: Floats) -> Floats:
    share = np.clip(share, 1e-4, 1 - 1e-4)
    return np.asarray(np.log(share / (1 - share)))


def _coupling(model: RoutingModel, want: Floats, have: Floats, step: float) -> tuple[Floats, float]:
    """Correct the strength of classes in each layer and their persistence over layers."""
    if model.n_layers < 2:
        return model.coupling, model.persistence
    # A layer's strength shows in the bits that it shares with both of its neighbours.
    ratio = _ratio(want[0, :-1], have[0, :-1], 0.75 * step)
    both = np.stack([np.append(ratio, ratio[-1]), np.insert(ratio, 0, ratio[0])])
    coupling = np.clip(model.coupling * np.sqrt(both.prod(axis=0)), 0.01, 6.0)
    if model.n_layers < 3:
        return coupling, model.persistence
    # Each layer of distance reduces what two experts share by the square of the persistence.
    bits = [max(float(np.nanmean(row)), 1e-3) for row in (*want, *have)]
    fall = (bits[1] / bits[0]) / (bits[3] / bits[2])
    return coupling, float(np.clip(model.persistence * fall ** (0.5 * step), 0.05, 1.0))


def _ratio(want: Floats, have: Floats, power: float) -> Floats:
    ratio = np.maximum(want, 1e-4) / np.maximum(have, 1e-4)
    return np.asarray(np.clip(ratio, 0.25, 4) ** power)


def _decay(model: RoutingModel, want: Floats, have: Floats, step: float) -> tuple[float, float]:
    """Correct how much of a topic drifts, and how fast, from the overlap by distance."""
    seen = (want > 0) & (have > 0)
    if seen.sum() < 2:
        return model.steady, model.drift_tokens
    at = np.array(LAGS)[seen] * BLOCK
    goal = want[seen] / want[seen][0] / (have[seen] / have[seen][0])
    now = model.steady + (1 - model.steady) * np.exp(-at / model.drift_tokens)
    goal = goal**step * now / now[0]
    best = None
    for steady in np.linspace(0.0, 1.0, 51):
        for tokens in BLOCK * 2.0 ** np.arange(-1, 5.25, 0.25):
            curve = steady + (1 - steady) * np.exp(-at / tokens)
            error = float(
                (np.log(curve / curve[0]) - np.log(goal))
                @ (np.log(curve / curve[0]) - np.log(goal))
            )
            if best is None or error < best[0] - 1e-12:
                best = (error, float(steady), float(tokens))
    assert best is not None
    return best[1], best[2]
