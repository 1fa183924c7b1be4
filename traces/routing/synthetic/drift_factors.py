"""Directions in which the routing of a text drifts: principal components of its windows. What these
choose beyond their kinds of tokens and their request moves in few directions: four hold 42% of the
variance in gpt-oss-20b and 22% in Qwen3 (studies/synthetic)."""

import numpy as np
from numpy.typing import NDArray

from eldr_sim.arrays import Floats, Ints
from eldr_sim.traces.routing.synthetic.token_kinds import count_groups

FACTORS = 8  #: most directions: 16 and 32 change no statistic
WINDOW = 16  #: tokens of a window
_WINDOWS = 4096  #: most windows to take, evenly
_TURNS = 8
_USUAL = 0.4  #: loading of a direction that is told from the noise of a rare expert's counts


def drift_factors(ids: NDArray[np.uint16], kind: Ints, kind_share: Floats, length: Ints) -> Floats:
    """Find the directions of the drift of some requests, ``[factors, layers, experts]``: change of
    log weight at a score of one deviation; zero without two windows of one request. The root mean
    square of an expert's norm, weighted by load, is 1.

    ``ids``: ``[tokens, layers, top_k]``, requests one after the other, of ``kind`` ``[tokens]``;
    ``kind_share``: ``[kinds, layers, experts]``: share of a kind's tokens that chose an expert;
    ``length``: ``[requests]``."""
    layers, experts = kind_share.shape[1:]
    windows = length // WINDOW
    start = np.repeat(np.cumsum(length) - length, windows)
    place = np.arange(windows.sum()) - np.repeat(np.cumsum(windows) - windows, windows)
    request = np.repeat(np.arange(len(length)), windows)
    some = (windows > 1)[request]
    # Whole pairs of neighbours, so that what lasts from one to the next shows.
    some &= np.arange(len(some)) // 2 % -(-len(some) // _WINDOWS) == 0
    if some.sum() < 3:
        return np.zeros((1, layers, experts))
    first, place, request = (start + WINDOW * place)[some], place[some], request[some]
    n = len(first)
    rows = (first[:, None] + np.arange(WINDOW)).ravel()
    group = np.repeat(np.arange(n), WINDOW)
    counts = count_groups(np.ascontiguousarray(ids[rows]), group, n, experts)
    share = counts.mean(axis=0).ravel() / WINDOW
    mix = np.zeros((n, len(kind_share)))
    np.add.at(mix, (group, kind[rows]), 1)
    beyond = (counts - np.tensordot(mix, kind_share, 1)).reshape(n, -1) / WINDOW
    beyond = _without_mean(beyond, request)
    score = _components(beyond / np.sqrt(share + 0.05 / WINDOW), min(FACTORS, n - 1))
    follows = (request[1:] == request[:-1]) & (place[1:] == place[:-1] + 1)
    # Chance does not last: what neighbours share is the variance of what drifts.
    lasting = (score[1:] * score[:-1])[follows].mean(axis=0) if follows.any() else 1.0
    lasting = np.maximum(lasting / (score**2).mean(axis=0), 0.0)
    unit = score / np.sqrt((score**2).mean(axis=0))
    noise = 1 / (WINDOW * n * _USUAL**2)
    loading = unit.T @ beyond / n / (share + noise) * np.sqrt(lasting)[:, None]
    loading = _scaled(loading, share)
    # Weights are exponential in the score, the shares of rare experts in real windows are not.
    loading = _scaled(loading / np.sqrt(1 + (loading**2).sum(axis=0)), share)
    return np.asarray(loading.reshape(-1, layers, experts))


def _scaled(loading: Floats, share: Floats) -> Floats:
    """Scale loadings so that the mean square of an expert's norm, weighted by load, is 1."""
    size = float(np.sqrt(share @ (loading**2).sum(axis=0) / share.sum()))
    return loading / size if size > 0 else loading


def _without_mean(values: Floats, request: Ints) -> Floats:
    """Subtract the mean of each request, and restore the variance that this takes."""
    found, group, size = np.unique(request, return_inverse=True, return_counts=True)
    mean = np.zeros((len(found), values.shape[1]))
    np.add.at(mean, group, values)
    left = values - (mean / size[:, None])[group]
    return np.asarray(left * np.sqrt(size / np.maximum(size - 1, 1))[group][:, None])


def _components(values: Floats, n: int) -> Floats:
    """Return the scores of the greatest principal components, ``[rows, n]``, by iteration."""
    basis = np.random.default_rng(0).standard_normal((values.shape[1], n))
    for _ in range(_TURNS):
        basis, _ = np.linalg.qr(values.T @ (values @ basis))
    score = values @ basis
    return np.asarray(score @ np.linalg.eigh(score.T @ score)[1][:, ::-1])
