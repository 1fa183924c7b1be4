"""A generative model of routing: which experts the tokens of a request choose, layer by layer.

A token chooses ``top_k`` distinct experts in each layer, one after the other, each with a
probability proportional to its weight among those left (Plackett-Luce; the ``top_k`` largest of log
weight plus Gumbel noise). The logarithm of an expert's weight is a sum of terms::

    log w(l, e) = kinds[l, kind(t), e]          what kind of token this is, in all layers at once
                + phase[p, l, e]                whether it is of the prompt or generated
                + topic(t, l, e)                what the request is about, part by part
                + own(l, e)                     what it has for itself
                + drift(t, l, e)                what the text is about at the moment
                + reuse[l]                      if the token before chose e in layer l

A share ``prompt_only`` of a prompt's tokens, at random, are of a kind that answers do not have:
they choose the ``top_k`` busiest experts of every layer, whatever the request is about.

A request's topic is one of ``topics``, drawn with its domain's chances from those of requests of
about its length: real requests come in clusters, which turn alike on the way. So a topic is a path:
what it adds in each of some equal parts of a request, blended from one part's middle to the next.
What two requests of a topic do not share is the drift and ``own``, independent by expert. A token's
kind is drawn from its topic's ``topic_kinds``, times ``succession[before, kind]``, and holds in all
layers, since these read the same residual stream.

The drift is ``sum_r a_r(t) loadings[r, l, e]``: a text turns in few directions, all layers with it;
drifting independently, a prompt would foretell the experts of its generation far too well. Each
score ``a_r`` is a sum of two autoregressive processes, over some tokens and over some sentences,
constant over blocks of `DRIFT_BLOCK` tokens."""

import json
import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.arrays import Floats, Ints
from eldr_sim.errors import InputError
from eldr_sim.inputs import check_arrays, reading
from eldr_sim.outputs import whole_file

DRIFT_BLOCK = 4  #: tokens over which the drift is constant

_FORMAT = "eldr-sim routing model 5"


@dataclass(frozen=True, eq=False)
class RoutingModel:
    """Parameters of the generative model, see the module; L layers, E experts, K kinds, C topics of
    P parts, R factors of the drift."""

    top_k: int  #: experts that a token chooses in a layer
    domains: list[str]  #: domain names
    kinds: Floats  #: ``[L, K, E]``: log weight for a token of a kind
    succession: Floats  #: ``[K, K]``: likelihood of a kind after another, over that by chance
    phase: Floats  #: ``[2, L, E]``: what being of the prompt, or generated, adds
    topics: Floats  #: ``[C, P, L, E]``: what a topic adds in each part of a request
    #: ``[C, K]``: share of a topic's tokens that are of each kind; rows sum to 1.
    topic_kinds: Floats
    topic_tokens: Ints  #: ``[C]``: tokens of the request in which a topic was found
    domain_topics: Floats  #: ``[D, C]``: chance of a topic in a domain's requests; rows sum to 1
    loadings: Floats  #: ``[R, L, E]``: directions of the drift
    #: ``[2]``: standard deviation of a process of the drift's scores, and its tokens to 1/e.
    drift_sd: Floats
    drift_tokens: Floats
    reuse: Floats  #: ``[L]``: added for an expert that the token before chose
    own: Floats  #: ``[]``: standard deviation of what a request adds of its own
    prompt_only: Floats  #: ``[]``: share of a prompt's tokens of the kind that only prompts have
    #: ``model``, ``source``, and mean lengths ``prompt_len``, ``output_len`` where none are named.
    facts: dict[str, Any]

    def __post_init__(self) -> None:
        """Check shapes and ranges."""
        n_layers, n_kinds, n_experts = self.kinds.shape
        n_topics = len(self.topics)
        for name, shape in (
            ("succession", (n_kinds, n_kinds)),
            ("phase", (2, n_layers, n_experts)),
            ("topics", (n_topics, *self.topics.shape[1:2], n_layers, n_experts)),
            ("topic_kinds", (n_topics, n_kinds)),
            ("topic_tokens", (n_topics,)),
            ("domain_topics", (len(self.domains), n_topics)),
            ("loadings", (len(self.loadings), n_layers, n_experts)),
            ("drift_sd", (2,)),
            ("drift_tokens", (2,)),
            ("reuse", (n_layers,)),
            ("own", ()),
            ("prompt_only", ()),
        ):
            value = getattr(self, name)
            if value.shape != shape:
                raise InputError(name, f"has shape {list(value.shape)}", str(list(shape)))
        finite = ("kinds", "succession", "phase", "topics", "topic_kinds", "loadings", "drift_sd")
        for name in (*finite, "reuse", "own"):
            if not np.isfinite(getattr(self, name)).all():
                raise InputError(name, "holds a number that is not finite")
        if not 1 <= self.top_k <= n_experts:
            raise InputError("top_k", f"got {self.top_k}", f"1 to {n_experts}, the experts")
        if not np.allclose(self.domain_topics.sum(axis=1), 1.0):
            raise InputError("domain_topics", "chances of a domain do not sum to 1")
        for name in ("succession", "topic_kinds", "domain_topics", "drift_sd", "own"):
            if getattr(self, name).min() < 0:
                raise InputError(name, "holds a number below 0")
        if not 0 <= self.prompt_only <= 1:
            raise InputError("prompt_only", f"got {self.prompt_only}", "0 to 1")
        for name in ("drift_tokens", "topic_tokens"):
            for tokens in getattr(self, name).tolist():
                if not (tokens > 0 and math.isfinite(tokens)):
                    raise InputError(name, f"got {tokens}", "a number above 0")

    @property
    def n_layers(self) -> int:
        """MoE layers."""
        return int(self.kinds.shape[0])

    @property
    def n_experts(self) -> int:
        """Routed experts per layer."""
        return int(self.kinds.shape[2])

    @property
    def kind_share(self) -> Floats:
        """``[K]``: share of the tokens of each kind, topics alike."""
        return np.asarray(self.topic_kinds.mean(axis=0))

    @property
    def one_process(self) -> bool:
        """Whether prompts and answers choose experts by the same law."""
        return self.prompt_only == 0 and not self.phase.any()

    @property
    def busiest(self) -> Ints:
        """``[L, top_k]``: the experts of each layer with the greatest expected load."""
        topic = np.exp(self.topics).mean(axis=(0, 1))[:, None]
        weight = np.exp(self.kinds) * topic
        share = weight / weight.sum(axis=2, keepdims=True)
        load = np.einsum("k,lke->le", self.kind_share, share)
        return np.asarray(np.argsort(-load, axis=1, kind="stable")[:, : self.top_k])

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the model as a NumPy archive, log weights as float16; raises InputError."""
        target = Path(path)
        if target.exists() and not force:
            raise InputError("out", f"{target} exists", "a new file, or --force")
        arrays: dict[str, Any] = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name != "facts"
        }
        for name in ("kinds", "phase", "topics", "loadings"):
            arrays[name] = arrays[name].astype(np.float16)
        for name in ("succession", "topic_kinds"):
            arrays[name] = arrays[name].astype(np.float32)
        arrays["facts"] = json.dumps({"format": _FORMAT, **self.facts}, ensure_ascii=False)
        with whole_file(target) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "RoutingModel":
        """Read a model that `save` wrote; raises InputError if the file is not such a model."""
        names = [f.name for f in fields(cls)]
        with reading(str(path), "is not a routing model", "what trace fit-synthetic writes"):
            with np.load(check_arrays(path, str(path)), allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in names}
            facts = json.loads(str(arrays["facts"]))
            if not isinstance(facts, dict) or facts.pop("format", None) != _FORMAT:
                raise InputError(str(path), "is not a routing model", f"a file of {_FORMAT!r}")
        values: dict[str, Any] = {
            name: value.astype(np.float64) if value.dtype.kind == "f" else value
            for name, value in arrays.items()
        }
        return cls(
            **values
            | {
                "top_k": int(arrays["top_k"]),
                "domains": [str(name) for name in arrays["domains"]],
                "topic_tokens": arrays["topic_tokens"].astype(np.int64),
                "facts": facts,
            }
        )
