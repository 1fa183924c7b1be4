"""How alike the choices of tokens and requests are, on which the union of a batch depends: over all
recorded tokens, and at most `REQUESTS` requests, taken evenly."""

from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from eldr_sim.arrays import Floats, Ints
from eldr_sim.jit import njit
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.routing.spectrum import half_counts
from eldr_sim.traces.routing.statistics import expected_distinct

REQUESTS = 512
MIXED = (4, 8, 12, 16, 32, 64, 128, 256)
ONE_REQUEST = (8, 16, 32, 64, 128)
QUANTILES = (5, 25, 50, 75, 95)


@dataclass(frozen=True)
class Overlap:
    """Figures of `request_overlap`."""

    #: By layer: load of the busiest expert over the mean; its standard deviation over the mean.
    load_max_over_mean: list[float]
    load_cv: list[float]
    #: Expected distinct experts a layer of one random token of each of a number of requests, exact.
    mixed: dict[int, float]
    #: The same of a number of consecutive tokens of one request; each request counts alike.
    one_request: dict[int, float]
    #: Cosine of the expert counts (of all layers) of two requests: its quantiles, by percent.
    cosine_between: dict[int, float]
    cosine_nearest: float  #: mean over requests of the cosine to the nearest other one
    #: Mean over requests of the cosine of their first and second half's counts.
    cosine_within: float


def request_overlap(trace: RoutingTrace) -> Overlap:
    """Measure a trace."""
    every = np.arange(trace.n_requests)
    if trace.n_requests > REQUESTS:
        every = np.linspace(0, trace.n_requests - 1, REQUESTS).astype(np.int64)
    first, length = trace.recorded_rows(every)
    halves = half_counts(trace, every)
    counts = halves.sum(axis=0)
    load = counts.sum(axis=0)
    share = counts / length[:, None, None]
    both = _unit(halves[:, length > 1])
    within = np.einsum("ra,ra->r", both[0], both[1])
    flat = _unit(counts)
    cosine = flat @ flat.T
    pairs = cosine[np.triu_indices(len(every), 1)]
    np.fill_diagonal(cosine, -np.inf)
    one: dict[int, list[float]] = {}
    ids = trace.experts
    for row, n in zip(first.tolist(), length.tolist(), strict=True):
        own = np.ascontiguousarray(ids[row : row + n], dtype=np.uint16)
        for tokens in ONE_REQUEST:
            if n >= tokens:
                seen = np.zeros(2)
                _windows(own, tokens, trace.n_experts, seen)
                one.setdefault(tokens, []).append(seen[0] / seen[1] / trace.n_layers)
    alone = len(every) < 2
    return Overlap(
        load_max_over_mean=[float(x) for x in load.max(axis=1) / load.mean(axis=1)],
        load_cv=[float(x) for x in load.std(axis=1) / load.mean(axis=1)],
        mixed={b: float(expected_distinct([share], [b]).mean()) for b in MIXED if b <= len(every)},
        one_request={tokens: fmean(each) for tokens, each in one.items()},
        cosine_between={} if alone else {q: float(np.percentile(pairs, q)) for q in QUANTILES},
        cosine_nearest=float("nan") if alone else float(cosine.max(axis=1).mean()),
        cosine_within=float(within.mean()) if len(within) else float("nan"),
    )


def _unit(counts: Floats) -> Floats:
    flat = counts.reshape(*counts.shape[:-2], -1)
    return np.asarray(flat / np.linalg.norm(flat, axis=-1, keepdims=True))


@njit()
def _windows(ids: NDArray[np.unsignedinteger], tokens: int, n_experts: int, out: Ints) -> None:
    """Add up the distinct experts of all layers of windows that overlap by half, and count them."""
    seen = np.full(n_experts, -1, np.int64)
    mark = 0
    start = 0
    while start + tokens <= len(ids):
        for layer in range(ids.shape[1]):
            for t in range(start, start + tokens):
                for slot in range(ids.shape[2]):
                    e = ids[t, layer, slot]
                    if seen[e] != mark:
                        seen[e] = mark
                        out[0] += 1
            mark += 1
        out[1] += 1
        start += max(tokens // 2, 1)
