"""Routing models of another shape, strength or set of domains, made of a fitted one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from eldr_sim.arrays import Floats, Ints
from eldr_sim.errors import InputError
from eldr_sim.inputs import within
from eldr_sim.traces.routing.synthetic.model import RoutingModel
from eldr_sim.traces.streams import stream

LONG, MANY = 96, 64  #: tokens of a request that tell a topic's four parts, and topics that are many
#: Topics made of few, two and two: fits to 22 of gpt-oss-20b's requests, so blended, have the
#: variance, dimensions and families of the others (studies/synthetic).
BLENDS = 256
_CENTRES, _LAYERS = 32, 6
_BALANCING_TURNS, _BALANCING_TOPICS = 6, 24


def with_layers(model: RoutingModel, n_layers: int, seed: int = 0) -> RoutingModel:
    """Return a model of another depth: layer ``i`` is ``floor(i L / n_layers)`` of the present L,
    its experts permuted at random, so that layers of one origin have the same statistics but not
    the same experts."""
    if n_layers < 1:
        raise InputError("layers", f"got {n_layers}", "at least 1")
    within("layers", n_layers, 1024)
    if n_layers == model.n_layers:
        return model
    rng = stream(seed, f"synthetic-layers-{n_layers}")
    origin = np.arange(n_layers) * model.n_layers // n_layers
    renamed = np.stack([rng.permutation(model.n_experts) for _ in origin])
    return replace(
        model,
        kinds=np.stack(
            [model.kinds[l][:, e] for l, e in zip(origin, renamed, strict=True)]  # noqa: E741
        ),
        phase=model.phase[:, origin[:, None], renamed],
        topics=model.topics[..., origin[:, None], renamed],
        loadings=model.loadings[:, origin[:, None], renamed],
        reuse=model.reuse[origin],
        facts=_told(model, f"{model.n_layers} layers stretched to {n_layers}"),
    )


def with_experts(model: RoutingModel, n_experts: int, top_k: int, seed: int = 0) -> RoutingModel:
    """Return a model of another width and top-k.

    Wider layers hold the experts of several present layers side by side, each of the same total
    weight; surplus experts are left out at random. Topics are scaled until requests differ as much,
    in shares of a token's experts."""
    for name, value in (("experts", n_experts), ("top_k", top_k)):
        if value < 1:
            raise InputError(name, f"got {value}", "at least 1")
    if top_k > n_experts or n_experts > 65536:
        allowed = "top_k <= experts <= 65536"
        raise InputError("experts", f"got {n_experts} with top_k {top_k}", allowed)
    layers, width = model.n_layers, model.n_experts
    if n_experts == width:
        if top_k == model.top_k:
            return model
        told = _told(model, f"top-{model.top_k} made top-{top_k}")
        return replace(model, top_k=top_k, facts=told)
    beside = math.ceil(n_experts / width)
    rng = stream(seed, f"synthetic-experts-{n_experts}")
    source = (np.arange(layers)[:, None] + np.arange(beside) * max(layers // beside, 1)) % layers
    kept = np.stack([np.sort(rng.permutation(beside * width)[:n_experts]) for _ in range(layers)])
    usual = np.einsum("k,lke->le", model.kind_share, np.exp(model.kinds))
    even = model.kinds - np.log(usual.sum(axis=1))[:, None, None]

    def widened(part: Floats) -> Floats:
        """Return ``[..., layers, n_experts]`` of ``[..., layers, experts]``."""
        joined = part[..., source, :].reshape(*part.shape[:-2], layers, beside * width)
        return np.take_along_axis(
            joined, np.broadcast_to(kept, (*joined.shape[:-1], n_experts)), -1
        )

    wide = replace(
        model,
        top_k=top_k,
        kinds=widened(even.transpose(1, 0, 2)).transpose(1, 0, 2).copy(),
        phase=widened(model.phase),
        topics=widened(model.topics),
        loadings=widened(model.loadings),
        facts=_told(model, f"{width} experts, top-{model.top_k}, made {n_experts}, top-{top_k}"),
    )
    return _as_different(wide, model)


def scaled(
    model: RoutingModel,
    *,
    popularity: float = 1.0,
    kinds: float = 1.0,
    topics: float = 1.0,
    reuse: float = 1.0,
    own: float = 1.0,
    fast: float = 1.0,
    slow: float = 1.0,
    mixes: float = 1.0,
) -> RoutingModel:
    """Return a model with choices that differ more or less; the factors are those of
    `Parameters`."""
    if popularity == kinds == topics == reuse == own == fast == slow == mixes == 1.0:
        return model
    usual = np.log(_first_chance(model))
    mean = np.einsum("k,lke->le", model.kind_share, model.kinds)[:, None]
    ratio = np.maximum(model.topic_kinds, 1e-6) / np.maximum(model.kind_share, 1e-6)
    mixed = model.kind_share * ratio**mixes
    changed = replace(
        model,
        topic_kinds=mixed / mixed.sum(axis=1, keepdims=True),
        kinds=mean + kinds * (model.kinds - mean),
        topics=topics * model.topics,
        own=topics * own * model.own,
        drift_sd=kinds * np.array([fast, slow]) * model.drift_sd,
        reuse=reuse * model.reuse,
    )
    for _ in range(_BALANCING_TURNS):
        gap = popularity * usual - np.log(_first_chance(changed))
        gap -= gap.mean(axis=1, keepdims=True)
        changed = replace(changed, kinds=changed.kinds + gap[:, None])
    return changed


def _first_chance(model: RoutingModel) -> Floats:
    """Return the chance that an expert is chosen first, ``[L, E]``, over some of the topics."""
    some = np.linspace(0, len(model.topics) - 1, min(len(model.topics), _BALANCING_TOPICS))
    chance = np.zeros((model.n_layers, model.n_experts))
    for c in some.astype(int).tolist():
        weight = np.exp(np.clip(model.kinds + model.topics[c].mean(axis=0)[:, None], -20, 20))
        weight /= weight.sum(axis=2, keepdims=True)
        chance += np.einsum("k,lke->le", model.topic_kinds[c], weight) / len(some)
    return np.maximum(chance, 1e-9)


def with_domains(model: RoutingModel, parts: Mapping[str, float], seed: int = 0) -> RoutingModel:
    """Return a model with other domains, which explain given ``parts`` of what requests differ by,
    0 to 1.

    A domain prefers topics that are like one, its centre: chances are proportional to ``exp(k
    cos)`` with the cosine of what both choose, about the mean; ``k`` leaves the rest of the
    variance within domains of the same part, and centres are taken with which all of it remains.

    Topics of requests of fewer than `LONG` tokens are left out where there are `MANY` others; where
    there are few, they are blended two and two, ``(b + c) / sqrt(2)``, with the kinds of one:
    blended kinds would be those of no text, and take a quarter of the variance."""
    for name, value in parts.items():
        if not 0 <= value <= 1:
            raise InputError(name, f"got {value}", "0 to 1")
    rng = stream(seed, "synthetic-domains")
    model = _varied(model, rng)
    profile = _profiles(model, np.arange(len(model.topics)))
    about = profile - profile.mean(axis=0)
    product = about @ about.T
    own = product.diagonal()
    cosine = product / np.sqrt(np.maximum(np.outer(own, own), 1e-12))
    chances = np.empty((len(parts), len(model.topics)))
    wanted = np.array(list(parts.values()))
    for part in np.unique(wanted).tolist():
        mine = np.flatnonzero(wanted == part)
        chances[mine] = _preferences(product, cosine, part, len(mine), rng)
    return replace(
        model,
        domains=list(parts),
        domain_topics=chances,
        topic_tokens=np.ones(len(model.topics), np.int64),  # any length
    )


def with_popularity(model: RoutingModel, domains: Sequence[str], power: float) -> RoutingModel:
    """Return a model with the experts' shares of the load raised to a power in ``domains``.

    What moves the load is added to copies of all topics, which these domains then have."""
    if power == 1.0 or not domains:
        return model
    moved = (scaled(model, popularity=power).kinds - model.kinds)[:, 0]
    theirs = np.isin(model.domains, domains)[:, None]
    chances = model.domain_topics
    return replace(
        model,
        topics=np.concatenate([model.topics, model.topics + moved]),
        topic_kinds=np.concatenate([model.topic_kinds] * 2),
        topic_tokens=np.concatenate([model.topic_tokens] * 2),
        domain_topics=np.concatenate(
            [np.where(theirs, 0.0, chances), np.where(theirs, chances, 0.0)], axis=1
        ),
    )


def _varied(model: RoutingModel, rng: np.random.Generator) -> RoutingModel:
    """Return a model of its long requests' topics, or of blends where those are few."""
    topics, kinds = model.topics, model.topic_kinds
    long = model.topic_tokens >= LONG
    if long.sum() >= MANY:
        return replace(
            model, topics=topics[long], topic_kinds=kinds[long], **_of_no_domain(int(long.sum()))
        )
    if 1 < len(topics) < MANY:
        first = np.arange(BLENDS) % len(topics)
        second = (first + rng.integers(1, len(topics), BLENDS)) % len(topics)
        return replace(
            model,
            topics=(topics[first] + topics[second]) / math.sqrt(2),
            topic_kinds=kinds[first],
            **_of_no_domain(BLENDS),
        )
    return replace(model, **_of_no_domain(len(topics)))


def _of_no_domain(n: int) -> dict[str, Any]:
    return {
        "domains": ["any"],
        "domain_topics": np.full((1, n), 1 / n),
        "topic_tokens": np.ones(n, np.int64),
    }


def _preferences(
    product: Floats, cosine: Floats, part: float, domains: int, rng: np.random.Generator
) -> Floats:
    """Return the chances of topics in domains that are to explain a part, ``[domains, C]``."""
    n = len(product)
    if n == 1 or part == 0:
        return np.full((domains, n), 1 / n)
    own, whole = product.diagonal(), float(product.trace()) / n

    def variance(chance: Floats) -> Floats:
        return np.asarray(chance @ own - np.einsum("dc,dc->d", chance @ product, chance))

    best, least = np.empty(0), math.inf
    for _ in range(_CENTRES):
        centre = rng.choice(n, domains, replace=domains > n)
        low, high = -3.0, 7.0
        while high - low > 1e-3:
            strength = 10 ** ((low + high) / 2)
            chance = np.exp(strength * (cosine[centre] - 1))
            chance /= chance.sum(axis=1, keepdims=True)
            if variance(chance).mean() > (1 - part) * whole:
                low = math.log10(strength)
            else:
                high = math.log10(strength)
        off = abs(float(variance(chance.mean(axis=0, keepdims=True))[0]) / whole - 1)
        if off < least:
            best, least = chance, off
    return best


def _profiles(model: RoutingModel, topics: Ints) -> Floats:
    """Return what requests of topics choose, without drift: ``[topics, some layers * experts]``.

    Experts chosen without replacement are those of an exponential race that lasts until as many as
    a token chooses have come in on average."""
    some = np.unique(np.linspace(0, model.n_layers - 1, _LAYERS).astype(np.int64))
    kinds = model.kinds[some]
    out = np.empty((len(topics), len(some), model.n_experts))
    for i, c in enumerate(topics.tolist()):
        about = model.topics[c].mean(axis=0)[some, None]
        weight = np.exp(np.clip(kinds + about, -20, 20))
        weight /= weight.sum(axis=2, keepdims=True)
        time = np.full((*weight.shape[:2], 1), float(model.top_k))
        for _ in range(6):  # Newton's steps from below: the sum is concave in the time
            left = np.exp(-time * weight)
            slope = np.maximum((weight * left).sum(axis=2, keepdims=True), 1e-9)
            lacking = model.top_k - (1 - left).sum(axis=2, keepdims=True)
            time = np.minimum(time + lacking / slope, 1e5)
        out[i] = np.einsum("k,lke->le", model.topic_kinds[c], 1 - np.exp(-time * weight))
    return out.reshape(len(topics), -1)


def _as_different(model: RoutingModel, as_in: RoutingModel) -> RoutingModel:
    """Return the model with topics scaled until its requests differ as much as those of another."""

    def variance(of: RoutingModel) -> float:
        some = np.linspace(0, len(of.topics) - 1, min(len(of.topics), 32)).astype(np.int64)
        return float(_profiles(of, some).var(axis=0).sum()) / of.top_k

    wanted, low, high = variance(as_in), 0.5, 4.0
    if not wanted:
        return model
    while high / low > 1.01:
        factor = math.sqrt(low * high)
        if variance(replace(model, topics=factor * model.topics)) < wanted:
            low = factor
        else:
            high = factor
    return replace(model, topics=low * model.topics, own=low * model.own)


def _told(model: RoutingModel, change: str) -> dict[str, object]:
    return {**model.facts, "source": f"{model.facts['source']}; {change}"}
