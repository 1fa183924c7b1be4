"""From prefill counts to the experts that decode will use: a probability an expert and step.

``p(l, e)``, the activation pattern of ELDR Sec. 4.2.1, is regressed on ``q(l, e)``, the share of an
expert in all that the prompt's tokens selected at a layer, by ridge regression, a layer at a time,
on the calibration requests::

    p(l) = mean_p(l) + (q(l) - mean_q(l)) weights(l)

An expert's probability thus rests on all experts of its layer. The ridge, one for all layers, is
the one of :data:`RIDGES` with the least squared error over requests left out one at a time."""

import hashlib
import zipfile
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from eldr_sim import cache
from eldr_sim.arrays import Array, Floats
from eldr_sim.errors import InputError
from eldr_sim.jit import njit
from eldr_sim.traces.routing.calibration import CalibrationSet

_MEASURED = 64  #: calibration requests of which steps of several tokens are counted

RIDGES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Strengths of the ridge to try, in units of the mean squared length of ``q(l) - mean_q(l)``: what
one calibration request adds to the matrix that is regularised."""


@dataclass(frozen=True, eq=False)
class ActivationModel:
    """Predicts a request's decode activation from its prefill counts."""

    #: [L, E]: means of ``q`` and ``p`` over the calibration requests.
    mean_share: Floats
    mean_activation: Floats
    #: [L, E, E]: what the share of expert ``i`` adds to the probability of expert ``j``.
    weights: Floats
    ridge: float  #: the strength chosen
    #: Explained share of the variance of ``p`` about its mean, on requests left out of the fit.
    r2: float

    def predict(self, counts: Array) -> Floats:
        """Return the predicted activation, [L, E], in [0, 1], of ``counts`` [L, E] of prompt
        tokens; a layer without any gets the calibration mean. Raises InputError for another
        shape."""
        if counts.shape != self.mean_share.shape:
            seen = "x".join(map(str, counts.shape))
            layers, experts = self.mean_share.shape
            allowed = f"{layers} layers x {experts} experts"
            raise InputError("signature", f"counts of {seen}", allowed)
        found: Floats = self.predict_all(counts[None])[0]
        return found

    def predict_all(self, counts: Array) -> Floats:
        """Return the predictions, [n, L, E], of several requests, each as `predict` does, at a
        fraction of the time: the weights are read once for four."""
        found = np.empty(counts.shape)
        _predict(counts, self.mean_share, self.mean_activation, self.weights, found)
        return found


@njit(inlined=True, restrict=True)
def _add_two(sums: Floats, part: Floats, one: Floats, other: Floats) -> None:
    """Add two rows of weights to the sums of four requests, ``part [4, 2]`` of them."""
    a, b, c, d = sums
    for f in range(one.shape[0]):
        x, y = one[f], other[f]
        a[f] = a[f] + part[0, 0] * x + part[0, 1] * y
        b[f] = b[f] + part[1, 0] * x + part[1, 1] * y
        c[f] = c[f] + part[2, 0] * x + part[2, 1] * y
        d[f] = d[f] + part[3, 0] * x + part[3, 1] * y


@njit()
def _predict(counts: Array, mean_share: Floats, mean: Floats, weights: Floats, p: Floats) -> None:
    """Write to ``p``, [n, L, E]. Products are added expert by expert, whatever the machine."""
    n, n_layers, n_experts = counts.shape
    sums, away = np.empty((4, n_experts)), np.zeros((4, n_experts + 1))
    for layer in range(n_layers):
        own = weights[layer]
        for first in range(0, n, 4):
            last = min(first + 4, n)
            for i in range(first, last):
                selected = np.int64(0)
                for e in range(n_experts):
                    selected += np.int64(counts[i, layer, e])
                for e in range(n_experts):
                    share = counts[i, layer, e] / max(selected, 1) - mean_share[layer, e]
                    away[i - first, e] = share if selected > 0 else 0.0
            sums[:] = 0.0
            for e in range(0, n_experts, 2):
                _add_two(sums, away[:, e : e + 2], own[e], own[min(e + 1, n_experts - 1)])
            for i in range(first, last):
                for e in range(n_experts):
                    p[i, layer, e] = min(max(mean[layer, e] + sums[i - first, e], 0.0), 1.0)


def cached_activation(calibration: CalibrationSet) -> ActivationModel:
    """Return `fit_activation`, which also raises what it says, from the user's cache if it can."""
    key = hashlib.sha256(cache.stamp(("policies.routing.activation",)).encode())
    for seen in (calibration.scores("count"), calibration.decode_activation):
        key.update(f"{seen.dtype} {seen.shape}".encode() + np.ascontiguousarray(seen).data)
    name = f"{key.hexdigest()[:32]}.npz"
    path = cache.find(cache.FITS, name)
    if path is not None and path.exists():
        try:
            with np.load(path) as kept:
                values: dict[str, Any] = {field: kept[field] for field in kept.files}
            return ActivationModel(
                **values | {scalar: float(values[scalar]) for scalar in ("ridge", "r2")}
            )
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
            pass  # it is made anew and replaced
    activation = fit_activation(calibration)
    cache.keep(cache.FITS, name, lambda file: np.savez(file, **asdict(activation)))
    return activation


def fit_activation(calibration: CalibrationSet) -> ActivationModel:
    """Fit the regression on calibration requests; raises InputError with fewer than 3, or one
    without prompt tokens. By the eigenvectors of a layer's ``sum q q^T`` a strength of the ridge
    costs one product, and request ``i`` left out errs by ``residual_i / (1 - leverage_i)``."""
    counts = calibration.scores("count")
    n, n_layers, n_experts = counts.shape
    if n < 3:
        raise InputError("calibration", f"{n} requests", "3 or more, to regress on them")
    selected = counts.sum(axis=2, keepdims=True, dtype=np.float64)
    if not selected.all():
        raise InputError("calibration", "a request has no prompt tokens", "1 or more")
    share = counts / selected
    activation = calibration.decode_activation.astype(np.float64)
    mean_share, mean_activation = share.mean(axis=0), activation.mean(axis=0)
    errors, variance = np.zeros(len(RIDGES)), 0.0
    weights = np.empty((len(RIDGES), n_layers, n_experts, n_experts))
    for layer in range(n_layers):
        q = share[:, layer] - mean_share[layer]
        p = activation[:, layer] - mean_activation[layer]
        values, vectors = np.linalg.eigh(q.T @ q)
        unit = max(float(values.sum()) / n, 1e-12)
        turned = q @ vectors
        onto = turned.T @ p
        for i, ridge in enumerate(RIDGES):
            shrunk = 1.0 / (values + ridge * unit)
            solved = shrunk[:, None] * onto
            leverage = 1.0 / n + np.square(turned) @ shrunk
            errors[i] += np.square((p - turned @ solved) / (1.0 - leverage)[:, None]).sum()
            weights[i, layer] = vectors @ solved
        variance += np.square(p * (n / (n - 1))).sum()
    best = int(np.argmin(np.round(errors / max(variance, 1e-12), 9)))
    r2 = 1.0 - float(errors[best]) / variance if variance > 0 else 0.0
    return ActivationModel(mean_share, mean_activation, weights[best].copy(), RIDGES[best], r2)


def independent_tokens(calibration: CalibrationSet, tokens: int) -> float:
    """Return how many independent tokens activate as many experts as ``tokens`` in a row: fewer, as
    neighbours choose alike; measured on calibration requests, to a 64th; all without a trace."""
    trace = calibration.trace
    if tokens == 1 or trace is None:
        return float(tokens)
    requests = calibration.requests[:_MEASURED]
    first, length = trace.decode_window(requests)
    at = np.concatenate([first + (length - tokens) * i // 4 for i in range(4)])
    rows = (at[:, None] + np.arange(tokens))[np.tile(length, 4) > tokens]
    if not len(rows):
        return float(tokens)
    union = np.bitwise_or.reduce(trace.bits[rows], axis=1)
    counted = float(np.bitwise_count(union).sum()) / len(rows) / trace.n_layers
    share = calibration.decode_activation[:_MEASURED].astype(np.float64)
    low, high = 64, 64 * tokens
    while low < high:
        middle = (low + high) // 2
        expected = float(of_tokens(share, middle / 64).sum()) / len(share) / share.shape[1]
        low, high = (middle + 1, high) if expected < counted else (low, middle)
    return low / 64


def of_tokens(share: Array, tokens: float) -> Array:
    """Return the probability that one of ``tokens`` independent tokens chooses each expert."""
    if tokens == 1.0:
        return share
    idle = 1.0 - (tokens - int(tokens)) * share
    for _ in range(int(tokens)):
        idle = idle * (1.0 - share)
    return 1.0 - idle
