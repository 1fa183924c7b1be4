"""What grouping concurrent requests by their experts could gain, of any trace.

A group's distinct experts are those of a step in which each of its requests is at a random step of
its generation (of the first `GENERATED` recorded tokens), all independent: ``sum_e 1 - prod_r (1 -
p_r(l, e))``, mean over layers and groups of equal size; savings are against random groups.
``docs/formats.md`` says what the oracle, signatures and labels are, and rho by prompt tokens (ELDR
Eq. 1)."""

from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from eldr_sim.arrays import Floats, Ints
from eldr_sim.policies.eldr.clustering import kmeans
from eldr_sim.policies.eldr.signature import (
    decode_overlap,
    idf_weights,
    select_layers,
    transformed,
    unit_rows,
)
from eldr_sim.traces.routing.bitsets import count_rows
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.streams import stream

SIZES = (16, 8, 4)  #: workers, and requests of each: the first for which there are requests enough
DRAWS = 3  #: sets of concurrent requests, each drawn without replacement
GENERATED = 128  #: most generated tokens of a request that count
PROMPTS = (16, 32, 64)
_RANDOM = 8
_SURE = 1 - 1e-6  # bound on a probability, so that a product without it is a quotient


@dataclass(frozen=True)
class Saving:
    """What a grouping does, means over draws."""

    saved: float  #: share of the distinct experts of a random group that it saves
    busiest: float  #: distinct experts of its largest group over the mean of all


@dataclass(frozen=True)
class GroupingGain:
    """Figures of `grouping_gain`; the module defines them."""

    #: ``workers``, ``batch``: groups, and requests of each.
    workers: int
    batch: int
    random: float  #: distinct experts a layer of a random group
    random_busiest: float  #: distinct experts of the largest random group over the mean
    #: What these groupings do; None without prompts, or with one domain.
    oracle: Saving
    signature: Saving | None
    label: Saving | None


def grouping_gain(trace: RoutingTrace, size: tuple[int, int] | None = None) -> GroupingGain | None:
    """Measure what grouping could gain, of both splits; None: too few. ``size``: workers and
    requests of each, by default the greatest square of `SIZES`."""
    fits = [(w, w) for w in SIZES if w * w <= trace.n_requests]
    workers, batch = size or (fits[0] if fits else (0, 0))
    if not 0 < workers * batch <= trace.n_requests:
        return None
    gains: dict[str, list[tuple[float, float]]] = {"random": []}
    for draw in range(DRAWS):
        rng = stream(draw, "grouping gain")
        some = np.sort(rng.choice(trace.n_requests, workers * batch, replace=False))
        flat = 1 - np.minimum(_activation(trace, some), _SURE)
        even = np.arange(len(some)) % workers
        orders = [rng.permutation(even) for _ in range(_RANDOM)]
        chance = [group_unions(flat, order, workers) / trace.n_layers for order in orders]
        mean = fmean(float(each.mean()) for each in chance)
        gains["random"].append((mean, fmean(float(u.max() / u.mean()) for u in chance)))
        groupings = {"oracle": oracle(flat, _clusters(1 - flat, workers, rng), workers)}
        if trace.has_prompts:
            counts = trace.prompt_counts(some)
            scores = transformed(counts, "count-idf", idf_weights(counts))
            groupings["signature"] = _clusters(scores.reshape(len(some), -1), workers, rng)
        if len(np.unique(trace.domain)) > 1:
            order = np.lexsort((rng.permutation(len(some)), trace.domain[some]))
            groupings["label"] = np.empty(len(some), np.int64)
            groupings["label"][order] = np.arange(len(some)) // batch
        for name, labels in groupings.items():
            unions = group_unions(flat, labels, workers) / trace.n_layers
            own = (1 - unions.mean() / mean, unions.max() / unions.mean())
            gains.setdefault(name, []).append(own)
    means = {name: np.mean(each, axis=0).tolist() for name, each in gains.items()}
    random, random_busiest = means.pop("random")
    savings = {name: Saving(*pair) for name, pair in means.items()}
    three = savings["oracle"], savings.get("signature"), savings.get("label")
    return GroupingGain(workers, batch, random, random_busiest, *three)


def _activation(trace: RoutingTrace, requests: Ints) -> Floats:
    """Return the shares of the requests' generated tokens that chose each expert, flat."""
    first, length = trace.recorded_rows(requests)
    output = trace.output_len[requests]
    start, count = first + length - output, np.minimum(output, GENERATED)
    spans = zip(start.tolist(), count.tolist(), strict=True)
    shares = [count_rows(trace.bits[a : a + n], trace.n_experts) / n for a, n in spans]
    return np.stack(shares).reshape(len(requests), -1).astype(np.float64)


def group_unions(idle: Floats, group: Ints, n_groups: int) -> Floats:
    """Return the expected distinct experts of each ``group``, over layers. ``idle``: ``[n, layers *
    experts]``: probability that a request's token leaves one out."""
    return np.array([(1 - idle[group == g].prod(axis=0)).sum() for g in range(n_groups)])


def oracle(idle: Floats, group: Ints, n_groups: int) -> Ints:
    """Exchange requests between groups, the best two at a time, while that saves experts; groups
    keep their sizes. A group's idle experts with i replaced by j are ``sum_e P_g / q_i q_j``, P the
    product of its ``q = idle``: one matrix product gives all. ``idle``: ``[n, layers * experts]``,
    above 0; ``group``: ``[n]``, where each begins."""
    group = group.copy()
    n = len(group)
    replaced, own = np.empty((n, n)), np.empty(n)
    stale = np.ones(n, bool)
    while True:
        for g in np.unique(group[stale]).tolist():
            mine = np.flatnonzero(group == g)
            product = idle[mine].prod(axis=0)
            own[mine] = product.sum()
            replaced[mine] = (product / idle[mine]) @ idle.T
        gain = replaced + replaced.T - own[:, None] - own
        gain[group[:, None] == group] = -np.inf
        # The best exchange, and others that touch none of its groups.
        stale[:] = False
        used = np.zeros(n_groups, bool)
        best = np.argsort(-gain.max(axis=1), kind="stable")
        for i in best.tolist():
            j = int(gain[i].argmax())
            if gain[i, j] <= 1e-9:
                break
            g, h = group[i], group[j]
            if not (used[g] or used[h]):
                used[g] = used[h] = True
                group[i], group[j] = h, g
        if not used.any():
            return group
        stale = used[group]


def _clusters(points: Floats, n_clusters: int, rng: np.random.Generator) -> Ints:
    rows = unit_rows(points)
    if not rows.any():
        return np.asarray(np.arange(len(points)) % n_clusters)
    return kmeans(rows, n_clusters, rng, restarts=2).labels


def rho_by_prompt(trace: RoutingTrace) -> tuple[int, dict[int, float]]:
    """Return the requests compared, and rho of signatures, by their tokens; none without 3."""
    first, length = trace.recorded_rows(np.arange(trace.n_requests))
    longest = max(PROMPTS)
    some = np.flatnonzero(length >= 2 * longest)
    if len(some) < 3:
        return len(some), {}
    if len(some) > 512:
        some = some[np.linspace(0, len(some) - 1, 512).astype(np.int64)]
    bits, experts = trace.bits, trace.n_experts

    def counted(a: int, b: int | None) -> NDArray[np.float64]:
        ends = first[some] + (length[some] if b is None else b)
        spans = zip((first[some] + a).tolist(), ends.tolist(), strict=True)
        return np.stack([count_rows(bits[i:j], experts) for i, j in spans]).astype(np.float64)

    later = counted(longest, None) / (length[some] - longest)[:, None, None]
    pairs = decode_overlap(later, stream(0, "rho by prompt"))
    rho = {}
    for tokens in PROMPTS:
        counts = counted(0, tokens)
        scores = transformed(counts, "count-idf", idf_weights(counts))
        rho[tokens] = float(select_layers(scores, pairs, "all").rho[-1])
    return len(some), rho
