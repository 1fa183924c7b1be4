"""A generative model of routing: which experts the tokens of a request choose, layer by layer.

A token chooses ``top_k`` distinct experts in each layer, one after the other, each with a
probability proportional to its weight among those left (Plackett-Luce; the same as the ``top_k``
largest of log weight plus Gumbel noise). So experts ranked first are the likeliest, as in a real
gate. The logarithm of an expert's weight is a sum of terms::

    log w(l, e) = popularity[phase, domain, l, e]              domain unigram, prompt or decode
                + sum over f of score_f(t) factors[f, l, e]    topic of the request
                + own(l, e)                                    the request's own taste
                + reuse[l]                                 if the token before chose e in layer l
                + coupling[l] M[l, class(t, l), e]         what kind of token this is

A score has standard deviation ``factor_sd[domain, f]``. The share ``steady`` of its variance lasts
for the whole request, prompt and generation; the rest drifts from block to block of `BLOCK` tokens
and decays exponentially over ``drift_tokens``. Prompt and generation therefore have in common the
steady part, the own taste, and whatever the popularities of both phases share.

The class of a token is one of `CLASSES`, drawn uniformly for every token; from each layer to the
next it stays with probability ``persistence`` and is drawn again otherwise. ``M`` is a fixed
matrix of independent standard normal numbers. Classes couple the layers: real choices in distant
layers depend on each other too, which a chain from layer to layer would not produce.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.outputs import whole_file
from eldr_sim.traces.streams import stream

__all__ = ["BLOCK", "CLASSES", "RoutingModel"]

BLOCK = 16
"""Tokens over which the topic of a request is constant."""

CLASSES = 8
"""Kinds of tokens."""

_FORMAT = "eldr-sim routing model 1"

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RoutingModel:
    """Parameters of the generative model, see the module.

    Attributes
    ----------
    top_k
        Experts that a token chooses in a layer.
    domains
        Domain names, D of them.
    popularity
        ``[2, D, layers, experts]``: log weight in prompts and in generated tokens.
    factors
        ``[factors, layers, experts]``: what a score of 1 adds to the log weight.
    factor_sd
        ``[D, factors]``: standard deviation of the scores of a domain's requests.
    own_sd
        ``[D, layers]``: standard deviation of a request's own taste, independent by expert.
    steady
        Share of a score's variance that lasts for the whole request, 0 to 1.
    drift_tokens
        Tokens after which the autocorrelation of the rest has fallen to 1/e.
    reuse
        ``[layers]``: added for an expert that the token before chose.
    coupling
        ``[layers]``: standard deviation of what a token's class adds, over experts.
    persistence
        Chance that a token keeps its class in the next layer, 0 to 1.
    class_seed
        Seed of ``M``.
    facts
        Description and origin of the model: ``model``, ``source``, and mean lengths
        ``prompt_len`` and ``output_len`` for traces that name none.
    """

    top_k: int
    domains: list[str]
    popularity: Floats
    factors: Floats
    factor_sd: Floats
    own_sd: Floats
    steady: float
    drift_tokens: float
    reuse: Floats
    coupling: Floats
    persistence: float
    class_seed: int
    facts: dict[str, Any]

    def __post_init__(self) -> None:
        """Check shapes and ranges."""
        n_domains, n_layers, n_experts = self.popularity.shape[1:]
        for name, shape in (
            ("popularity", (2, len(self.domains), n_layers, n_experts)),
            ("factors", (len(self.factors), n_layers, n_experts)),
            ("factor_sd", (n_domains, len(self.factors))),
            ("own_sd", (n_domains, n_layers)),
            ("reuse", (n_layers,)),
            ("coupling", (n_layers,)),
        ):
            value = getattr(self, name)
            if value.shape != shape:
                raise InputError(name, f"has shape {list(value.shape)}", str(list(shape)))
            if not np.isfinite(value).all():
                raise InputError(name, "holds a number that is not finite")
        if not 1 <= self.top_k <= n_experts:
            raise InputError("top_k", f"got {self.top_k}", f"1 to {n_experts}, the experts")
        for name in ("steady", "persistence"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(name, f"got {getattr(self, name)}", "0 to 1")
        if not (self.drift_tokens > 0 and math.isfinite(self.drift_tokens)):
            raise InputError("drift_tokens", f"got {self.drift_tokens}", "a number above 0")

    @property
    def n_layers(self) -> int:
        """MoE layers."""
        return int(self.popularity.shape[2])

    @property
    def n_experts(self) -> int:
        """Routed experts per layer."""
        return int(self.popularity.shape[3])

    def with_layers(self, n_layers: int, seed: int = 0) -> RoutingModel:
        """Return a model of another depth.

        Layer ``i`` takes the parameters of layer ``floor(i L / n_layers)`` of the present L layers.
        Its experts are permuted at random, so that layers of one origin have the same statistics
        but not the same experts.

        Parameters
        ----------
        n_layers
            Layers of the new model.
        seed
            Seed of the permutation.
        """
        if n_layers < 1:
            raise InputError("layers", f"got {n_layers}", "at least 1")
        if n_layers == self.n_layers:
            return self
        rng = stream(seed, f"synthetic-layers-{n_layers}")
        origin = np.arange(n_layers) * self.n_layers // n_layers
        renamed = np.stack([rng.permutation(self.n_experts) for _ in origin])
        return replace(
            self,
            popularity=self.popularity[:, :, origin[:, None], renamed],
            factors=self.factors[:, origin[:, None], renamed],
            own_sd=self.own_sd[:, origin],
            reuse=self.reuse[origin],
            coupling=self.coupling[origin],
            facts={
                **self.facts,
                "source": f"{self.facts['source']}; {self.n_layers} layers stretched to {n_layers}",
            },
        )

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the model as a NumPy archive, whole or not at all.

        Raises
        ------
        InputError
            If the file exists and ``force`` is false, or cannot be written.
        """
        target = Path(path)
        if target.exists() and not force:
            raise InputError("out", f"{target} exists", "a new file, or --force")
        arrays: dict[str, Any] = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name != "facts"
        }
        arrays["facts"] = json.dumps({"format": _FORMAT, **self.facts}, ensure_ascii=False)
        with whole_file(target) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RoutingModel:
        """Read a model that `save` wrote.

        Raises
        ------
        InputError
            If the file cannot be read or is not such a model.
        """
        names = [f.name for f in fields(cls)]
        try:
            with np.load(Path(path), allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in names}
            facts = json.loads(str(arrays["facts"]))
            if not isinstance(facts, dict) or facts.pop("format", None) != _FORMAT:
                raise InputError(str(path), "is no routing model", f"a file of {_FORMAT!r}")
        except OSError as error:
            raise InputError(str(path), error.strerror or "cannot be read") from None
        except (ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
            if isinstance(error, InputError):
                raise
            problem = f"is no routing model: {error}".splitlines()[0]
            raise InputError(str(path), problem, "what trace fit-synthetic writes") from None
        scalars = {
            "top_k": int,
            "steady": float,
            "drift_tokens": float,
            "persistence": float,
            "class_seed": int,
        }
        values: dict[str, Any] = {
            name: scalars[name](arrays[name]) if name in scalars else arrays[name] for name in names
        }
        values["domains"] = [str(name) for name in arrays["domains"]]
        values["facts"] = facts
        return cls(**values)
