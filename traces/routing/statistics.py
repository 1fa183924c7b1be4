"""Statistics of a routing trace: load, overlap within domains, reuse, prefill against decode.

All figures are exact for the trace; none is sampled. An untrained model also has a high
prefill-decode correlation, because equal tokens choose equal experts; domain structure shows in
the reduction of distinct experts in batches of one domain."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from eldr_sim.arrays import Floats, Int32s, Ints
from eldr_sim.traces.requests.texts import DOMAIN_MIXES
from eldr_sim.traces.routing.coactivation import ranges
from eldr_sim.traces.routing.copies import expected_copy_share
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.routing.structure import (
    DomainDivergence,
    NextLayer,
    domain_divergence,
    nearest_neighbour_accuracy,
    next_layer_entropy,
)

BATCH_SIZES = (8, 16, 32, 64, 128)  #: batch sizes at which distinct experts are counted

_CHUNK_ROWS = 1 << 13


@dataclass(frozen=True)
class DistinctExperts:
    """Expected distinct experts per layer in a decode step, mean over layers."""

    #: Requests in the batch, all different, each at a random step of its recorded decode.
    batch: int
    group: str  #: domains that mix: ``task``, ``language``, or ``all`` where the trace has neither
    uniform: float  #: under uniform choice: ``E (1 - (1 - k / E)^batch)``
    mixed: float  #: a batch of equal shares of the group's domains
    same_domain: dict[str, float]  #: a batch of one domain, by domain
    #: ``1 - mean(same_domain) / mixed``: what perfect separation by domain would save.
    reduction: float


@dataclass(frozen=True)
class Copies:
    """Expected share of a batch's requests that have a copy in it, see `copies`."""

    batch: int  #: requests in the batch
    #: The workload whose mix it has: ``task``, ``language``, or ``all`` serving requests.
    group: str
    #: ``mixed``, ``one_domain``: where the batch mixes the domains, and where it is of one.
    mixed: float
    one_domain: float


@dataclass(frozen=True)
class TraceStatistics:
    """Figures of a routing trace, from `trace_statistics`."""

    requests: dict[str, dict[str, int]]  #: requests by domain and split
    #: ``prompt_len``, ``output_len``: tokens by domain: ``min``, ``mean``, ``max``.
    prompt_len: dict[str, dict[str, float]]
    output_len: dict[str, dict[str, float]]
    #: Per layer: load of the most loaded expert over the mean, prompt and generated tokens.
    load_max_over_mean: list[float]
    unused_experts: list[int]  #: per layer: experts that no token chose
    #: A batch size and group in which every domain has that many requests; ``all``: those that do.
    distinct_experts: list[DistinctExperts]
    #: Share of a generated token's experts that the generated token before it also chose.
    neighbour_reuse: float
    random_reuse: float  #: the same share for two generated tokens drawn at random from the trace
    uniform_reuse: float  #: the same share under uniform choice, ``k / E``
    #: By domain, over (layer, expert): mean share of prompt tokens with that of generated ones
    #: (ELDR Fig. 3).
    prefill_decode_pearson: dict[str, float]
    #: Entropy of a layer's experts, alone and given those of the layer before.
    next_layer: list[NextLayer]
    domain_divergence: DomainDivergence  #: jensen-Shannon divergence between domains
    #: Share of requests whose nearest other request has their domain; None for one request.
    nearest_neighbour_accuracy: float | None
    #: How often copies of one request meet in a batch, by batch size and workload.
    copies: list[Copies]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return asdict(self)


def trace_statistics(
    trace: RoutingTrace, batch_sizes: Sequence[int] = BATCH_SIZES
) -> TraceStatistics:
    """Measure a trace over all its requests, both splits."""
    every = np.arange(trace.n_requests)
    decode = trace.decode_activation(every).astype(np.float64)
    prompt = None
    load = np.einsum("rle,r->le", decode, trace.output_len.astype(np.float64))
    if trace.has_prompts:
        prompt_counts = trace.prompt_counts(every)
        prompt = prompt_counts / trace.prompt_len[:, None, None]
        load += prompt_counts.sum(axis=0, dtype=np.float64)
    members = _members(trace)

    # Weighted by length: the chance that a random generated token chose the expert.
    weight = trace.output_len / trace.output_len.sum(dtype=np.int64)
    chance = np.einsum("rle,r->le", decode, weight)
    return TraceStatistics(
        requests={
            name: {
                "calibration": int(trace.is_calibration[q].sum()),
                "serving": int((~trace.is_calibration[q]).sum()),
            }
            for name, q in members.items()
        },
        prompt_len={name: _summary(trace.prompt_len[q]) for name, q in members.items()},
        output_len={name: _summary(trace.output_len[q]) for name, q in members.items()},
        load_max_over_mean=[float(x) for x in load.max(axis=1) / load.mean(axis=1)],
        unused_experts=[int(x) for x in (load < 0.5).sum(axis=1)],
        distinct_experts=_distinct_table(trace, decode, members, batch_sizes),
        neighbour_reuse=_neighbour_reuse(trace),
        random_reuse=float((chance**2).sum(axis=1).mean() / trace.top_k),
        uniform_reuse=trace.top_k / trace.n_experts,
        prefill_decode_pearson={}
        if prompt is None
        else {
            name: _pearson(prompt[q].mean(axis=0), decode[q].mean(axis=0))
            for name, q in members.items()
        },
        next_layer=next_layer_entropy(trace),
        domain_divergence=domain_divergence(
            decode * trace.output_len[:, None, None], trace.domain, trace.domains
        ),
        nearest_neighbour_accuracy=nearest_neighbour_accuracy(
            decode if prompt is None else prompt, trace.domain
        ),
        copies=_copies(trace, batch_sizes),
    )


def distinct_experts(trace: RoutingTrace, batch_sizes: Sequence[int]) -> list[DistinctExperts]:
    """Return only the ``distinct_experts`` of `trace_statistics`, which takes less time."""
    decode = trace.decode_activation(np.arange(trace.n_requests)).astype(np.float64)
    return _distinct_table(trace, decode, _members(trace), batch_sizes)


def _members(trace: RoutingTrace) -> dict[str, Ints]:
    """Return the requests of each domain that has any."""
    found = {
        name: np.flatnonzero(trace.domain == domain) for domain, name in enumerate(trace.domains)
    }
    return {name: requests for name, requests in found.items() if len(requests)}


def expected_distinct(groups: Sequence[Floats], takes: Sequence[int]) -> Floats:
    """Return the exact expected number of distinct experts of a random batch, ``[layers]``, of
    ``takes`` different requests from each group, each at a random step.

    An expert is absent if all miss it: the mean over k-subsets of the first j requests of the
    product of their chances to miss it is ``m_j(k) = (j - k) / j m_{j-1}(k) + k / j x_j m_{j-1}(k -
    1)``. ``groups``: of each its `RoutingTrace.decode_activation`."""
    absent = np.ones(groups[0].shape[1:])
    for activation, take in zip(groups, takes, strict=True):
        absent *= mean_products(1.0 - activation, take)[take]
    distinct: Floats = (1.0 - absent).sum(axis=-1)
    return distinct


def mean_products(miss: Floats, largest: int) -> Floats:
    """Return for k = 0..largest the mean product of k of the rows, ``[largest + 1, ...]``."""
    means = np.zeros((largest + 1, *miss.shape[1:]))
    means[0] = 1.0
    for j, row in enumerate(miss, start=1):
        k = np.arange(1, min(j, largest) + 1, dtype=np.float64)[:, None, None]
        top = len(k) + 1
        means[1:top] = (1 - k / j) * means[1:top] + (k / j) * row * means[: top - 1]
    return means


def _distinct_table(
    trace: RoutingTrace, decode: Floats, members: dict[str, Ints], batch_sizes: Sequence[int]
) -> list[DistinctExperts]:
    table = []
    for group, names in domain_groups(trace).items():
        most = min(max(batch_sizes), max(len(members[name]) for name in names))
        means = {
            name: mean_products(1.0 - decode[members[name]], min(most, len(members[name])))
            for name in names
        }
        for batch in batch_sizes:
            enough = [name for name in names if len(members[name]) >= batch]
            # A named workload is all of its domains; others are two or more that have the requests.
            if len(enough) < (min(2, len(names)) if group == "all" else len(names)):
                continue
            same = {name: float((1 - means[name][batch]).sum(axis=-1).mean()) for name in enough}
            absent = np.ones((trace.n_layers, trace.n_experts))
            for i, name in enumerate(enough):
                absent *= means[name][batch // len(enough) + (i < batch % len(enough))]
            mixed = float((1 - absent).sum(axis=-1).mean())
            none = (1 - trace.top_k / trace.n_experts) ** batch
            table.append(
                DistinctExperts(
                    batch=batch,
                    group=group,
                    uniform=trace.n_experts * (1 - none),
                    mixed=mixed,
                    same_domain=same,
                    reduction=1 - float(np.mean(list(same.values()))) / mixed,
                )
            )
    return table


def domain_groups(trace: RoutingTrace) -> dict[str, list[str]]:
    """Return the domains of each named workload that the trace has, or of ``all`` if of none."""
    present = set(np.unique(trace.domain).tolist())
    names = [name for d, name in enumerate(trace.domains) if d in present]
    groups = {name: list(mix) for name, mix in DOMAIN_MIXES.items() if set(mix) <= set(names)}
    return groups or {"all": names}


def _copies(trace: RoutingTrace, batch_sizes: Sequence[int]) -> list[Copies]:
    copies = []
    for group, names in domain_groups(trace).items():
        pools = {name: len(trace.requests_of([name], calibration=False)) for name in names}
        pools = {name: n for name, n in pools.items() if n}
        weight = {name: DOMAIN_MIXES.get(group, pools)[name] for name in pools}
        shares = {name: value / sum(weight.values()) for name, value in weight.items()}
        for batch in batch_sizes:
            mixed, one_domain = expected_copy_share(pools, shares, batch)
            copies.append(Copies(batch, group, mixed, one_domain))
    return copies


def _neighbour_reuse(trace: RoutingTrace) -> float:
    """Compare each generated token with the generated token before it, pair by pair."""
    first, length = trace.recorded_rows(np.arange(trace.n_requests))
    rows = ranges(first + length - trace.output_len + 1, trace.output_len - 1)
    shared = 0
    for start in range(0, len(rows), _CHUNK_ROWS):
        at = rows[start : start + _CHUNK_ROWS]
        both = trace.bits[at] & trace.bits[at - 1]
        shared += int(np.unpackbits(both.view(np.uint8)).sum())
    pairs = len(rows) * trace.n_layers * trace.top_k
    return shared / pairs if pairs else float("nan")


def _summary(values: Int32s) -> dict[str, float]:
    return {"min": int(values.min()), "mean": float(values.mean()), "max": int(values.max())}


def _pearson(x: Floats, y: Floats) -> float:
    x, y = x.ravel() - x.mean(), y.ravel() - y.mean()
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm else float("nan")
