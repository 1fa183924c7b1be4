"""Routing models of another shape, strength or set of domains, made of a fitted one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.inputs import within
from eldr_sim.traces.routing.synthetic.model import Floats, RoutingModel
from eldr_sim.traces.streams import stream

__all__ = ["scaled", "with_domains", "with_experts", "with_layers"]

TOPICS_PER_DOMAIN = 128
"""Topics that `with_domains` gives a domain: requests that share one are nearly alike."""
_BALANCING_TURNS, _BALANCING_TOPICS = 6, 24


def with_layers(model: RoutingModel, n_layers: int, seed: int = 0) -> RoutingModel:
    """Return a model of another depth.

    Layer ``i`` takes the parameters of layer ``floor(i L / n_layers)`` of the present L layers. Its
    experts are permuted at random, so that layers of one origin have the same statistics but not
    the same experts.

    Parameters
    ----------
    model
        The model.
    n_layers
        Layers of the new model.
    seed
        Seed of the permutation.
    """
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
        topics=model.topics[:, origin[:, None], renamed],
        loadings=model.loadings[:, origin[:, None], renamed],
        reuse=model.reuse[origin],
        facts=_told(model, f"{model.n_layers} layers stretched to {n_layers}"),
    )


def with_experts(model: RoutingModel, n_experts: int, top_k: int, seed: int = 0) -> RoutingModel:
    """Return a model of another width.

    Wider layers hold the experts of several present layers side by side: each has its own
    preferences, and a token of one kind and topic favours experts in all of them, as it did. Each
    present layer brings the same total weight. Surplus experts are left out at random.

    Parameters
    ----------
    model
        The model.
    n_experts, top_k
        Experts a layer, and those that a token chooses.
    seed
        Seed of what is left out.
    """
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

    return replace(
        model,
        top_k=top_k,
        kinds=widened(even.transpose(1, 0, 2)).transpose(1, 0, 2).copy(),
        phase=widened(model.phase),
        topics=widened(model.topics),
        loadings=widened(model.loadings),
        facts=_told(model, f"{width} experts, top-{model.top_k}, made {n_experts}, top-{top_k}"),
    )


def scaled(
    model: RoutingModel,
    *,
    popularity: float = 1.0,
    kinds: float = 1.0,
    topics: float = 1.0,
    reuse: float = 1.0,
) -> RoutingModel:
    """Return a model whose choices differ more or less.

    Parameters
    ----------
    model
        The model.
    popularity
        Power to which the experts' shares of all tokens are raised: 0 for an even load.
    kinds
        Factor on what a kind of tokens adds to the log weights, and on the drift.
    topics
        Factor on what a topic adds.
    reuse
        Factor on what is added for an expert that the token before chose.
    """
    if popularity == kinds == topics == reuse == 1.0:
        return model
    usual = np.log(_first_chance(model))
    mean = np.einsum("k,lke->le", model.kind_share, model.kinds)[:, None]
    changed = replace(
        model,
        kinds=mean + kinds * (model.kinds - mean),
        topics=topics * model.topics,
        drift_sd=kinds * model.drift_sd,
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
        weight = np.exp(np.clip(model.kinds + model.topics[c][:, None], -20, 20))
        weight /= weight.sum(axis=2, keepdims=True)
        chance += np.einsum("k,lke->le", model.topic_kinds[c], weight) / len(some)
    return np.maximum(chance, 1e-9)


def with_domains(model: RoutingModel, alike: Mapping[str, float], seed: int = 0) -> RoutingModel:
    """Return a model with other domains, whose requests are alike to a given degree.

    A domain gets a topic ``b`` of the model that its requests have in common; its topics are
    ``a b + sqrt(1 - a^2) c`` with topics ``c`` of the model and ``a`` the domain's likeness, so
    that topics vary as they did. Where the model has fewer than `TOPICS_PER_DOMAIN`, further ``c``
    are the sum of two over the root of 2. The kinds of tokens are mixed likewise, by logarithms of
    shares.

    Parameters
    ----------
    model
        The model.
    alike
        Likeness by name of the domain, 0 (as requests of any domain) to 1 (all of one topic).
    seed
        Seed of which topics.
    """
    for name, value in alike.items():
        if not 0 <= value <= 1:
            raise InputError(name, f"got {value}", "0 to 1")
    n_topics = len(model.topics)
    rng = stream(seed, "synthetic-domains")
    common: list[int] = []
    while len(common) < len(alike):
        common += rng.permutation(n_topics).tolist()
    base = model.kind_share
    share = np.log(np.maximum(model.topic_kinds, 1e-6) / np.maximum(base, 1e-6))
    topics, kinds, domain = [], [], []
    for d, (a, b) in enumerate(zip(alike.values(), common, strict=False)):
        others = np.setdiff1d(np.arange(n_topics), [b]) if n_topics > 1 else np.arange(1)
        single = np.eye(n_topics)[rng.permutation(others)[:TOPICS_PER_DOMAIN]]
        pairs = rng.permutation(list(combinations(others.tolist(), 2)))
        pairs = pairs[: TOPICS_PER_DOMAIN - len(single)].reshape(-1, 2).astype(int)
        double = (np.eye(n_topics)[pairs] / math.sqrt(2)).sum(axis=1)
        part = math.sqrt(1 - a * a) * np.concatenate([single, double])
        part[:, b] += a
        topics.append(np.tensordot(part, model.topics, 1))
        mixed = base * np.exp(part @ share)
        kinds.append(mixed / mixed.sum(axis=1, keepdims=True))
        domain.append(np.full(len(part), d))
    return replace(
        model,
        domains=list(alike),
        topics=np.concatenate(topics),
        topic_kinds=np.concatenate(kinds),
        topic_domain=np.concatenate(domain),
    )


def _told(model: RoutingModel, change: str) -> dict[str, object]:
    return {**model.facts, "source": f"{model.facts['source']}; {change}"}
