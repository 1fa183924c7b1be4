"""Fitted routing models that come with the package, and presets of known models made of them.

A preset inherits from the real model that is nearest among the fitted ones: its layers and experts
are reshaped (`reshape`), and its requests get the eight domains of the workloads, as much alike as
makes batches of one domain activate as many experts fewer than mixed ones as in the paper's Fig. 4
(ELDR, section 3.4: 17-21% task, 3-10% language, over batch 32 to 128 and three models).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from eldr_sim.errors import InputError
from eldr_sim.traces.domains import DOMAIN_MIXES
from eldr_sim.traces.synthetic.model import RoutingModel
from eldr_sim.traces.synthetic.reshape import scaled, with_domains, with_experts, with_layers

__all__ = [
    "FITTED",
    "PRESETS",
    "Parameters",
    "Preset",
    "fitted_model",
    "fitted_path",
    "preset_model",
]

_DATA = Path(__file__).parent / "data"

FITTED = ("gpt-oss-20b", "qwen3-30b-a3b")
"""Names of the fitted models that come with the package, those of the embedded traces."""


def fitted_model(name: str) -> RoutingModel:
    """Return a fitted model that comes with the package; raises InputError if there is none."""
    if name not in FITTED:
        raise InputError("from", f"{name!r} is no fitted model", ", ".join(FITTED))
    return RoutingModel.load(fitted_path(name))


def fitted_path(name: str) -> Path:
    """Return the file of a fitted model that comes with the package."""
    return _DATA / f"{name.replace('-', '_')}.npz"


@dataclass(frozen=True)
class Parameters:
    """Changes to a fitted model; see `reshape`."""

    task: float
    """How much alike requests of a domain are, 0 to 1; all domains but those of the language
    mix."""
    language: float
    """The same for domains of the language mix."""
    popularity: float = 1.0
    """Power to which the experts' shares of the load are raised."""
    kinds: float = 1.0
    """Factor on what the kind of a token adds, and on the drift."""
    topics: float = 1.0
    """Factor on what a request's topic adds."""
    reuse: float = 1.0
    """Factor on what is added for an expert that the token before chose."""

    def __post_init__(self) -> None:
        """Check ranges."""
        for field in fields(self):
            value = getattr(self, field.name)
            most = 1.0 if field.name in ("task", "language") else math.inf
            if not (math.isfinite(value) and 0 <= value <= most):
                allowed = "0 to 1" if most == 1 else "a finite number, at least 0"
                raise InputError(field.name, f"got {value}", allowed)

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
    """Shape of a model, and what it inherits.

    Attributes
    ----------
    n_layers, n_experts, top_k
        MoE layers, routed experts a layer, experts a token chooses; see kernel_profiles.
    fitted
        The fitted model that it inherits from.
    parameters
        Changes to it.
    tuned_to
        What else than the paper's Fig. 4 the parameters were tuned to.
    """

    n_layers: int
    n_experts: int
    top_k: int
    fitted: str
    parameters: Parameters
    tuned_to: str = ""


_LITE = {"popularity": 0.0, "kinds": 0.75, "topics": 0.1, "reuse": 0.0}
"""Factors on gpt-oss-20b that give the load and the distinct experts measured of
DeepSeek-V2-Lite-Chat on 94,165 prompt tokens, see docs/synthetic.md."""
_LITE_FIGURES = "load and distinct experts measured of DeepSeek-V2-Lite-Chat"

_MIXTRAL = {"popularity": 0.0, "kinds": 0.35, "topics": 0.0, "reuse": 0.0}
"""Factors on gpt-oss-20b that give the variation of Mixtral-8x7B's load over experts, whose gates
are nearly even: counted tokens of three layers and five domains, see docs/synthetic.md."""
_MIXTRAL_COUNTS = "load counted of Mixtral-8x7B by layer and domain (allenai/OLMoE)"

PRESETS: dict[str, Preset] = {
    "Qwen3-30B-A3B": Preset(48, 128, 8, "qwen3-30b-a3b", Parameters(task=0.98, language=0.58)),
    "Qwen3-235B-A22B": Preset(94, 128, 8, "qwen3-30b-a3b", Parameters(task=0.98, language=0.58)),
    "Gemma-4-26B-A4B": Preset(30, 128, 8, "qwen3-30b-a3b", Parameters(task=0.98, language=0.58)),
    "GPT-OSS-20B": Preset(24, 32, 4, "gpt-oss-20b", Parameters(task=0.9, language=0.5)),
    "GPT-OSS-120B": Preset(36, 128, 4, "gpt-oss-20b", Parameters(task=0.9, language=0.5)),
    "DeepSeek-V2-Lite": Preset(
        26, 64, 6, "gpt-oss-20b", Parameters(0.9, 0.6, **_LITE), _LITE_FIGURES
    ),
    "DeepSeek-V3": Preset(58, 256, 8, "gpt-oss-20b", Parameters(0.9, 0.6, **_LITE), _LITE_FIGURES),
    "Mixtral-8x7B": Preset(
        32, 8, 2, "gpt-oss-20b", Parameters(0.0, 0.0, **_MIXTRAL), _MIXTRAL_COUNTS
    ),
}
"""``task`` and ``language`` were found by a search, at full depth and seed 0, for reductions within
the paper's ranges."""


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
    """Make a model of a preset, with changes.

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
        Seed of what is drawn: which topics domains have, and permutations of experts.

    Raises
    ------
    InputError
        If there is no such preset or parameter, or the shape is not possible.
    """
    if name not in PRESETS:
        raise InputError("preset", f"{name!r} is none", ", ".join(PRESETS))
    preset = PRESETS[name]
    parameters = preset.parameters.replaced(settings or {})
    language = DOMAIN_MIXES["language"]
    names = [d for mix in DOMAIN_MIXES.values() for d in mix] if domains is None else list(domains)
    if not names or len(set(names)) < len(names) or not all(names):
        raise InputError("domains", f"got {', '.join(names)!r}", "names, each once")
    wanted = (n_layers or preset.n_layers, n_experts or preset.n_experts, top_k or preset.top_k)
    for field, value in (("layers", n_layers), ("experts", n_experts), ("top_k", top_k)):
        if value is not None and value < 1:
            raise InputError(field, f"got {value}", "at least 1")
    as_is = not settings and wanted == (preset.n_layers, preset.n_experts, preset.top_k)
    factors = {k: v for k, v in asdict(parameters).items() if k not in ("task", "language")}
    model = scaled(fitted_model(preset.fitted), **factors)
    model = with_layers(with_experts(model, *wanted[1:], seed), wanted[0], seed)
    alike = {d: parameters.language if d in language else parameters.task for d in names}
    model = with_domains(model, alike, seed)
    tuned = f"; tuned to {preset.tuned_to}" if preset.tuned_to else ""
    changed = "" if as_is else "; changed by hand, tuned to nothing"
    source = (
        f"preset {name}: {model.facts['source']}; domains alike as in ELDR Fig. 4 (17-21% task, "
        f"3-10% language, batch 32 to 128){tuned}{changed}"
    )
    return replace(
        model,
        facts={
            "model": name if as_is else f"{name}, changed",
            "source": source,
            "prompt_len": 64,
            "output_len": 128,
        },
    )
