"""Routing models of any shape from a few parameters, and presets with known models' shapes.

The presets are tuned to the paper's Fig. 4 (ELDR, section 3.4): batches of one domain
activate 17-21% (task) and 3-10% (language) fewer distinct experts than mixed ones, over batch 32
to 128 and three models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.traces.domains import DOMAIN_MIXES
from eldr_sim.traces.synthetic.model import RoutingModel

__all__ = ["PRESETS", "Parameters", "Preset", "preset_model", "random_model"]

_FACTORS = 16
_OWN_SHARE = 0.2
"""Share of a request's individuality that is its own taste; the rest is in common directions."""


@dataclass(frozen=True)
class Parameters:
    """Parameters of a random model; strengths are standard deviations of log weights."""

    skew: float
    """Popularity of an expert with all domains: how uneven the load is."""
    task: float
    """What a domain adds to it; all domains but those of the language mix."""
    language: float
    """The same for domains of the language mix."""
    layer_spread: float = 0.3
    """Standard deviation, over layers, of the logarithm of `task` and `language`."""
    phase_shift: float = 0.3
    """Difference between popularity in prompts and in generated tokens."""
    individuality: float = 0.7
    """What a request adds."""
    steady: float = 0.5
    """Share of the individuality's variance that lasts from the prompt to the last token."""
    drift_tokens: float = 64.0
    """Tokens over which the rest decays."""
    reuse: float = 1.0
    """Added for an expert that the token before chose."""
    coupling: float = 2.0
    """What the class of a token adds."""
    persistence: float = 0.95
    """Chance that a token keeps its class from layer to layer."""

    def __post_init__(self) -> None:
        """Check ranges."""
        for field in fields(self):
            value = getattr(self, field.name)
            lowest = -math.inf if field.name == "reuse" else 0.0
            if not (math.isfinite(value) and value >= lowest):
                raise InputError(field.name, f"got {value}", "a finite number, at least 0")

    def replaced(self, values: Mapping[str, float]) -> Parameters:
        """Return the parameters with some of them replaced.

        Raises
        ------
        InputError
            If there is no such parameter or the value is out of range.
        """
        names = [field.name for field in fields(self)]
        for name in values:
            if name not in names:
                raise InputError("set", f"{name!r} is no parameter", ", ".join(names))
        return replace(self, **values)


@dataclass(frozen=True)
class Preset:
    """Shape of a model, and the parameters that give it the paper's separability.

    Attributes
    ----------
    n_layers, n_experts, top_k
        MoE layers, routed experts a layer, experts a token chooses; see kernel_profiles.
    parameters
        Of its random model.
    """

    n_layers: int
    n_experts: int
    top_k: int
    parameters: Parameters


PRESETS: dict[str, Preset] = {
    "Qwen3-30B-A3B": Preset(48, 128, 8, Parameters(skew=0.4, task=2.17, language=0.9)),
    "Qwen3-235B-A22B": Preset(94, 128, 8, Parameters(skew=0.4, task=2.0, language=0.84)),
    "GPT-OSS-120B": Preset(36, 128, 4, Parameters(skew=0.4, task=1.95, language=0.8)),
    "DeepSeek-V3": Preset(58, 256, 8, Parameters(skew=0.4, task=1.94, language=0.86)),
}
"""Found by a search over ``task`` and ``language``, at full depth and seed 0, for reductions within
the paper's ranges at batch 32, 64 and 128."""


def preset_model(
    name: str,
    *,
    n_layers: int | None = None,
    n_experts: int | None = None,
    top_k: int | None = None,
    domains: Sequence[str] | None = None,
    settings: Mapping[str, float] | None = None,
    seed: int = 0,
) -> RoutingModel:
    """Draw a model of a preset, with changes.

    Parameters
    ----------
    name
        One of `PRESETS`.
    n_layers, n_experts, top_k
        Another shape than the preset's.
    domains
        By default those of the workloads ``task`` and ``language``.
    settings
        Other values of `Parameters`, by name.
    seed
        See `random_model`.

    Raises
    ------
    InputError
        If there is no such preset or parameter, or the shape is not possible.
    """
    if name not in PRESETS:
        raise InputError("preset", f"{name!r} is none", ", ".join(PRESETS))
    preset = PRESETS[name]
    shape = {
        "n_layers": preset.n_layers if n_layers is None else n_layers,
        "n_experts": preset.n_experts if n_experts is None else n_experts,
        "top_k": preset.top_k if top_k is None else top_k,
    }
    as_is = not settings and shape == {key: getattr(preset, key) for key in shape}
    return random_model(
        preset.parameters.replaced(settings or {}),
        **shape,
        domains=[d for mix in DOMAIN_MIXES.values() for d in mix] if domains is None else domains,
        seed=seed,
        facts={
            "model": name if as_is else f"{name}, changed",
            "source": f"preset {name}: tuned to the same-domain reduction of distinct experts of "
            "ELDR Fig. 4 (17-21% task, 3-10% language, batch 32 to 128), not to this model's gates"
            if as_is
            else f"made from preset {name} with other settings, tuned to nothing",
            "prompt_len": 64,
            "output_len": 128,
        },
    )


def random_model(
    parameters: Parameters,
    *,
    n_layers: int,
    n_experts: int,
    top_k: int,
    domains: Sequence[str],
    seed: int,
    facts: Mapping[str, Any],
) -> RoutingModel:
    """Draw a model: the same parameters and seed give the same experts to the same domains.

    Parameters
    ----------
    parameters
        Strengths of the terms.
    n_layers, n_experts, top_k
        Shape.
    domains
        Names; those of the language mix differ by ``parameters.language``, others by ``task``.
    seed
        Non-negative integer.
    facts
        See `RoutingModel`.

    Raises
    ------
    InputError
        If the shape is not possible or a domain is named twice.
    """
    if seed < 0:
        raise InputError("seed", f"got {seed}", "an integer >= 0")
    for name, value in (("layers", n_layers), ("experts", n_experts), ("top_k", top_k)):
        if value < 1:
            raise InputError(name, f"got {value}", "at least 1")
    if top_k > n_experts or n_experts > 65536:
        allowed = "top_k <= experts <= 65536"
        raise InputError("experts", f"got {n_experts} with top_k {top_k}", allowed)
    if not domains or len(set(domains)) < len(domains) or not all(domains):
        raise InputError("domains", f"got {', '.join(domains)!r}", "names, each once")
    p, n = parameters, len(domains)
    rng = np.random.default_rng([seed, n_layers, n_experts])
    cell = (n_layers, n_experts)
    layer = np.exp(p.layer_spread * rng.standard_normal(n_layers) - p.layer_spread**2)
    common = p.skew * _left_skewed(rng, cell)
    shift = p.phase_shift * rng.standard_normal((2, 1, *cell)) / math.sqrt(2)
    strength = np.array(
        [p.language if name in DOMAIN_MIXES["language"] else p.task for name in domains]
    )
    special = np.stack([_left_skewed(rng, cell) for _ in domains])
    special *= strength[:, None, None] * layer[:, None]
    factors = rng.standard_normal((_FACTORS, *cell))
    factors *= p.individuality * math.sqrt((1 - _OWN_SHARE) / _FACTORS)
    return RoutingModel(
        top_k=top_k,
        domains=list(domains),
        popularity=common + special + shift,
        factors=factors,
        factor_sd=np.ones((n, _FACTORS)),
        own_sd=np.full((n, n_layers), p.individuality * math.sqrt(_OWN_SHARE)),
        steady=p.steady,
        drift_tokens=p.drift_tokens,
        reuse=np.full(n_layers, p.reuse),
        coupling=np.full(n_layers, p.coupling),
        persistence=p.persistence,
        class_seed=seed,
        facts=dict(facts),
    )


def _left_skewed(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Draw log popularities of mean 0 and standard deviation 1: logarithms of exponential numbers.

    Balancing losses cut off the top of a real model's load, not the bottom: GPT-OSS-20B's most
    loaded expert has 2 to 4 times the mean, its least loaded a hundredth. Normal numbers of the
    same spread would give the former far more.
    """
    logs = np.log(rng.standard_exponential(shape))
    return np.asarray((logs + np.euler_gamma) / (math.pi / math.sqrt(6)))
