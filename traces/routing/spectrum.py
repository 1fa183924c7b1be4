"""What requests differ by: the variance between them, its spectrum, and how much a label explains.

A request's profile is the share of its tokens that chose each expert, ``[layers, experts]``. Chance
and drift are not common to its halves: all figures come from the covariance, over requests, of the
first half's profile with the second's, ``C = (X1' X2 + X2' X1) / (2 (n - 1))`` about the means.

Variance
    Trace of C over layers and experts a token: how much more of its experts a token has in common
    with one of the other half of its request than with one of another request.
Components
    Greatest eigenvalues of C, as a share of its trace; effective dimensions: the trace's square
    over the sum of the eigenvalues' squares (participation ratio).
Label
    Share of the trace that the domain explains (one way analysis of variance): ``1 - w``, with w
    the trace of C within domains (``n - domains`` degrees of freedom) over that of C.
Families
    Two requests are of one if the cosine of their profiles about the mean, freed from chance by the
    halves, is `ALIKE` or more. Their effective number is the inverse of the chance that two
    requests, drawn with replacement, are of one: on how many texts figures of grouping rest."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eldr_sim.arrays import Floats, Ints
from eldr_sim.traces.routing.bitsets import count_rows
from eldr_sim.traces.routing.format import RoutingTrace

REQUESTS = 768  #: most requests, taken evenly
TOKENS = 64  #: fewest tokens of a request
COMPONENTS = (1, 4, 16)
ALIKE = 0.8  #: least cosine of two requests of one family
_FEWEST = 8


@dataclass(frozen=True)
class RequestSpectrum:
    """Figures of `request_spectrum`; the module defines them."""

    requests: int  #: requests that they are of
    variance: float  #: variance between requests, in shares of a token's experts
    components: dict[int, float]  #: share of the variance in a number of the greatest components
    dimensions: float  #: effective dimensions
    #: Share that the domain explains; None where there is one domain, or one request a domain.
    label: float | None
    families: float  #: effective number of families

    @property
    def scatter(self) -> float:
        """How far savings of other requests like these may lie off, as a share: one deviation.

        ``1 / sqrt(families)``. Parts of 22 to 176 requests of two recordings scatter by .5 to 1.1
        times as much in what an oracle saves, .6 to 1.4 in what signatures do (studies/synthetic).
        """
        return float(self.families**-0.5)


def request_spectrum(trace: RoutingTrace) -> RequestSpectrum | None:
    """Measure a trace over its requests of `TOKENS` tokens or more; None if they are too few."""
    length = trace.recorded_rows(np.arange(trace.n_requests))[1]
    long = np.flatnonzero(length >= TOKENS)
    if len(long) < _FEWEST:
        return None
    if len(long) > REQUESTS:
        long = long[np.linspace(0, len(long) - 1, REQUESTS).astype(np.int64)]
    return spectrum_of(half_profiles(trace, long), trace.domain[long], trace.top_k)


def half_profiles(trace: RoutingTrace, requests: Ints) -> Floats:
    """Return the profiles of the requests' first and second halves, ``[2, n, layers, experts]``."""
    length = trace.recorded_rows(requests)[1]
    tokens = np.stack([length // 2, length - length // 2])
    return half_counts(trace, requests) / tokens[:, :, None, None]


def half_counts(trace: RoutingTrace, requests: Ints) -> Floats:
    """Return how often each half's tokens chose each expert, ``[2, n, layers, experts]``."""
    first, length = trace.recorded_rows(requests)
    halves = np.empty((2, len(requests), trace.n_layers, trace.n_experts))
    for i, (row, n) in enumerate(zip(first.tolist(), length.tolist(), strict=True)):
        for half, (a, b) in enumerate(((row, row + n // 2), (row + n // 2, row + n))):
            halves[half, i] = count_rows(trace.bits[a:b], trace.n_experts)
    return halves


def spectrum_of(halves: Floats, domain: NDArray[np.integer], top_k: int) -> RequestSpectrum:
    """Measure requests from their halves' profiles, ``[2, n, layers, experts]``."""
    _, n, layers, _ = halves.shape
    flat = halves.reshape(2, n, -1)
    about = flat - flat.mean(axis=1, keepdims=True)
    total = float(np.einsum("ra,ra->", about[0], about[1])) / (n - 1)
    domains, group, size = np.unique(domain, return_inverse=True, return_counts=True)
    label = None
    if 1 < len(domains) < n:
        member = np.eye(len(domains))[group]
        mean = member @ (np.einsum("rd,hra->hda", member, flat) / size[:, None])
        within = float(np.einsum("ra,ra->", flat[0] - mean[0], flat[1] - mean[1]))
        label = 1 - within / (n - len(domains)) / total if total > 0 else None
    values, _ = principal_components(halves)
    spread = float((values**2).sum())
    return RequestSpectrum(
        requests=n,
        variance=total / (layers * top_k),
        components={c: float(values[:c].sum() / total) for c in COMPONENTS if total > 0},
        dimensions=total**2 / spread if spread > 0 else float("nan"),
        label=label,
        families=_families(about),
    )


def principal_components(halves: Floats) -> tuple[Floats, Floats]:
    """Return the eigenvalues of C, ``[k]``, the greatest first, and their unit eigenvectors.

    With Z the 2 n rows of both ``halves`` (`half_profiles`) about their means and M the exchange of
    the halves, ``C = Z' M Z / (2 (n - 1))``: from the 2 n x 2 n matrix of their products, so k is
    at most 2 n."""
    n = halves.shape[1]
    rows = halves.reshape(2, n, -1)
    rows = (rows - rows.mean(axis=1, keepdims=True)).reshape(2 * n, -1)
    value, vector = np.linalg.eigh(rows @ rows.T)
    kept = value > 1e-9 * value.max(initial=0.0)
    root, vector = np.sqrt(value[kept]), vector[:, kept]
    exchanged = np.concatenate([vector[n:], vector[:n]])
    inner = root[:, None] * (vector.T @ exchanged) * root
    found, turn = np.linalg.eigh((inner + inner.T) / 2)
    vectors = turn.T @ ((vector / root).T @ rows)
    return found[::-1] / (2 * max(n - 1, 1)), vectors[::-1]


def _families(about: Floats) -> float:
    cross = about[0] @ about[1].T
    cross = (cross + cross.T) / 2
    own = np.maximum(cross.diagonal(), 0.0)
    length = np.sqrt(own)
    # Less than nothing in common with itself: chance alone, which is like no other.
    alike = (cross >= ALIKE * length[:, None] * length) & (own[:, None] > 0) & (own > 0)
    np.fill_diagonal(alike, True)
    return float(alike.size / alike.sum())
