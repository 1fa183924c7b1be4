"""Fitted routing models that come with the package, and presets of known models made of them.

A preset inherits from the nearest fitted model: its layers and experts are reshaped (`reshape`),
and its requests get the eight domains of the workloads. How much of what requests differ by is
their domain's is known of no served model, so each preset is a band:

low
    As the label of all eight recorded domains of gpt-oss-20b explains (25% of the variance between
    requests); of languages nothing is recorded, and here nothing is theirs.
middle
    As recorded of the four domains of the task workload (34%, 152 requests of gpt-oss-20b);
    languages as much less as in ELDR's Fig. 4 (6.5 of 19%: 12%).
high
    As published: batches of one domain activate as many experts fewer than mixed ones as in ELDR's
    Fig. 4 (section 3.4: 17-21% task, 3-10% language), or as near to it as the preset comes.

All else is the recording's that the preset inherits from; no gain of a policy went into the band.
Where the fit is to few requests, ends also differ in how much requests differ (studies/synthetic).

What share of a prompt's tokens is of a kind that answers do not have is unknown as well:
`PROMPT_ONLY`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.traces.requests.texts import DOMAIN_MIXES
from eldr_sim.traces.routing.manifest import ONE_PROCESS
from eldr_sim.traces.routing.synthetic import reshape
from eldr_sim.traces.routing.synthetic.model import RoutingModel

Band = Literal["low", "middle", "high"]  #: where in its band a preset is drawn; see the module

BANDS: tuple[Band, ...] = get_args(Band)

_DATA = Path(__file__).parent / "data"

#: Shares of a prompt's tokens of the kind that only prompts have, between which the truth lies as
#: far as anything is known (studies/synthetic): none, as in the recordings that are fitted, of one
#: phase each; where count-IDF is as good as counts on GPT-OSS (ELDR's section 4.2.3); and what
#: brings both rho near those that ELDR prints for GPT-OSS on Language (.66 and .73 for .63 and
#: .68), about as much as Llama-4-Maverick's prompts differ from their answers.
PROMPT_ONLY = 0.0, 0.10, 0.15

#: Names of the fitted models that come with the package, those of the embedded traces.
FITTED = ("gpt-oss-20b", "qwen3-30b-a3b")


def fitted_model(name: str) -> RoutingModel:
    """Return a fitted model that comes with the package; raises InputError if there is none."""
    if name not in FITTED:
        raise InputError("from", f"{name!r} is not a fitted model", ", ".join(FITTED))
    return RoutingModel.load(fitted_path(name))


def fitted_path(name: str) -> Path:
    """Return the file of a fitted model that comes with the package."""
    return _DATA / f"{name.replace('-', '_')}.npz"


@dataclass(frozen=True)
class Parameters:
    """Changes to a fitted model; see `reshape`."""

    #: Part of what requests differ by that is their domain's, 0 to 1, but of the language mix.
    task: float
    language: float  #: the same for domains of the language mix
    popularity: float = 1.0  #: power to which the experts' shares of the load are raised
    kinds: float = 1.0  #: factor on what the kind of a token adds, and on the drift
    topics: float = 1.0  #: factor on what a request's topic adds, and the request itself
    reuse: float = 1.0  #: factor on what is added for an expert that the token before chose
    own: float = 1.0  #: factor on what each request has by itself, on top of ``topics``
    fast: float = 1.0  #: factor on the drift over some tokens, on top of ``kinds``
    slow: float = 1.0  #: the same for the drift over some sentences
    mixes: float = 1.0  #: power to which a topic's shares of kinds, over the mean's, are raised
    language_popularity: float = 1.0  #: ``popularity`` of the language mix alone
    #: Share of a prompt's tokens of the kind that only prompts have; see `PROMPT_ONLY`.
    prompt_only: float = 0.0

    def __post_init__(self) -> None:
        """Check ranges."""
        for own in fields(self):
            value = getattr(self, own.name)
            most = 1.0 if own.name in ("task", "language", "prompt_only") else math.inf
            if not (math.isfinite(value) and 0 <= value <= most):
                allowed = "0 to 1" if most == 1 else "a finite number, at least 0"
                raise InputError(own.name, f"got {value}", allowed)

    def replaced(self, values: Mapping[str, float]) -> "Parameters":
        """Return the parameters with some replaced; raises InputError."""
        names = [own.name for own in fields(self)]
        for name in values:
            if name not in names:
                raise InputError("set", f"{name!r} is not a parameter", ", ".join(names))
        return replace(self, **values)


@dataclass(frozen=True)
class Preset:
    """Shape of a model, and what it inherits."""

    #: MoE layers, routed experts a layer, experts a token chooses; see kernel_profiles.
    n_layers: int
    n_experts: int
    top_k: int
    fitted: str  #: the fitted model that it inherits from
    parameters: Parameters  #: changes to it, in the middle of the band
    #: ``low``, ``high``: what the ends of the band change of these; nothing where there is no band.
    low: Mapping[str, float] = field(default_factory=dict)
    high: Mapping[str, float] = field(default_factory=dict)
    tuned_to: str = ""  #: what else the parameters were tuned to

    def of(self, band: Band) -> Parameters:
        """Return the parameters at a place of the band."""
        ends: dict[str, Mapping[str, float]] = {"low": self.low, "middle": {}, "high": self.high}
        if band not in ends:
            raise InputError("band", f"{band!r} is none", ", ".join(BANDS))
        return self.parameters.replaced(ends[band])


_DOMAINS: dict[Band, str] = {
    "low": "domains explain 25% of how requests differ in their experts, as recorded of all "
    "domains of gpt-oss-20b; languages 0%",
    "middle": "domains explain 34% of how requests differ in their experts, as recorded of "
    "gpt-oss-20b's task domains; languages 12%",
    "high": "domains explain enough of how requests differ in their experts that grouping by them "
    "saves what ELDR's Fig. 4 shows (17-21% task, 3-10% language, batch 32 to 128)",
}

_LOW = {"task": 0.25, "language": 0.0}
_MIDDLE = {"task": 0.34, "language": 0.12}
#: The domains' part on task and language at each place of the band.
_HIGH = {"task": 0.8, "language": 0.35}

#: Factors on gpt-oss-20b that give the load, the distinct experts, the variance between requests
#: and its dimensions, and how much a prompt's first quarter says about the rest, measured of half
#: of DeepSeek-V2-Lite-Chat's prompts, see studies/synthetic.
_LITE = {
    "popularity": 0.0, "kinds": 0.70, "topics": 0.36, "mixes": 0.45, "own": 2.8, "fast": 1.5,
    "slow": 2.6, "reuse": 0.0,
}  # fmt: skip
_LITE_FIGURES = "load, distinct experts and spread of requests measured of DeepSeek-V2-Lite-Chat"

#: Factors on gpt-oss-20b that give the variation of Mixtral-8x7B's load over experts, whose gates
#: are nearly even: counted tokens of three layers and five domains, see studies/synthetic.
_MIXTRAL = {"popularity": 0.0, "kinds": 0.35, "topics": 0.0, "reuse": 0.0}
_MIXTRAL_COUNTS = "load counted of Mixtral-8x7B by layer and domain (allenai/OLMoE)"

#: What brings round robin's median TPOT on language, over that on task, nearest to the ratios that
#: ELDR's authors measured at five rates (.89 to .96); Qwen3's and Gemma's need no power
#: (studies/eldr_measured). No gain went into it.
_GPT_OSS_LANGUAGE = 1.3

#: Factors on topics at the ends of a band of 22 requests: such fits to gpt-oss-20b's scatter by 12%
#: about a mean 28% above the fit to all (studies/synthetic).
_FEW = 0.87, 1.07


#: Factor on ``own`` of the fit to Qwen3, which borrows gpt-oss-20b's: requests so drawn have 13%
#: more variance than others of gpt-oss-20b's, and 20% less than Qwen3's (studies/synthetic).
_QWEN_OWN = 2.0


def _of_qwen(n_layers: int) -> Preset:
    low, high = {**_LOW, "topics": _FEW[0]}, {**_HIGH, "topics": _FEW[1]}
    parameters = Parameters(**_MIDDLE, own=_QWEN_OWN)
    return Preset(n_layers, 128, 8, "qwen3-30b-a3b", parameters, low, high)


def _of_gpt_oss(n_layers: int, n_experts: int, language_popularity: float = 1.0) -> Preset:
    parameters = Parameters(**_MIDDLE, language_popularity=language_popularity)
    return Preset(n_layers, n_experts, 4, "gpt-oss-20b", parameters, _LOW, _HIGH)


def _of_lite(n_layers: int, n_experts: int, top_k: int) -> Preset:
    parameters = Parameters(**_MIDDLE, **_LITE)
    return Preset(n_layers, n_experts, top_k, "gpt-oss-20b", parameters, _LOW, _HIGH, _LITE_FIGURES)


PRESETS: dict[str, Preset] = {
    "Qwen3-30B-A3B": _of_qwen(48),
    "Qwen3-235B-A22B": _of_qwen(94),
    "Gemma-4-26B-A4B": _of_qwen(30),
    "GPT-OSS-20B": _of_gpt_oss(24, 32),
    "GPT-OSS-120B": _of_gpt_oss(36, 128, _GPT_OSS_LANGUAGE),
    "DeepSeek-V2-Lite": _of_lite(26, 64, 6),
    "DeepSeek-V3": _of_lite(58, 256, 8),
    "Mixtral-8x7B": Preset(
        32, 8, 2, "gpt-oss-20b", Parameters(0.0, 0.0, **_MIXTRAL), tuned_to=_MIXTRAL_COUNTS
    ),
}


def _phases(prompt_only: float) -> str:
    """Return how a preset's prompts differ from its answers."""
    if not prompt_only:
        return ONE_PROCESS
    return (
        f"{prompt_only:.0%} of a prompt's tokens choose as no answer's do (unknown: "
        f"{PROMPT_ONLY[0]:g} to {PROMPT_ONLY[-1]:g})"
    )


def preset_model(
    name: str,
    *,
    n_layers: int | None = None,
    n_experts: int | None = None,
    top_k: int | None = None,
    domains: Sequence[str] | None = None,
    settings: Mapping[str, float] | None = None,
    seed: int = 0,
    band: Band = "middle",
) -> RoutingModel:
    """Make a model of one of `PRESETS`, of another shape or with other `Parameters` where given.

    ``domains``: by default those of ``task`` and ``language``; ``settings``: values of
    `Parameters`, on top of ``band``; ``seed``: of which topics domains have, and of permutations.
    Raises InputError."""
    if name not in PRESETS:
        raise InputError("preset", f"{name!r} is none", ", ".join(PRESETS))
    preset = PRESETS[name]
    parameters = preset.of(band).replaced(settings or {})
    language = DOMAIN_MIXES["language"]
    names = [d for mix in DOMAIN_MIXES.values() for d in mix] if domains is None else list(domains)
    if not names or len(set(names)) < len(names) or not all(names):
        raise InputError("domains", f"got {', '.join(names)!r}", "names, each once")
    wanted = (n_layers or preset.n_layers, n_experts or preset.n_experts, top_k or preset.top_k)
    for option, value in (("layers", n_layers), ("experts", n_experts), ("top_k", top_k)):
        if value is not None and value < 1:
            raise InputError(option, f"got {value}", "at least 1")
    as_is = not settings and wanted == (preset.n_layers, preset.n_experts, preset.top_k)
    apart = ("task", "language", "prompt_only", "language_popularity")
    factors = {k: v for k, v in asdict(parameters).items() if k not in apart}
    model = reshape.scaled(fitted_model(preset.fitted), **factors)
    model = reshape.with_layers(reshape.with_experts(model, *wanted[1:], seed), wanted[0], seed)
    parts = {d: parameters.language if d in language else parameters.task for d in names}
    model = reshape.with_domains(model, parts, seed)
    theirs = [d for d in names if d in language]
    model = reshape.with_popularity(model, theirs, parameters.language_popularity)
    model = replace(model, prompt_only=np.array(parameters.prompt_only))
    tuned = f"; tuned to {preset.tuned_to}" if preset.tuned_to else ""
    changed = "" if as_is else "; changed by hand, tuned to nothing"
    source = (
        f"preset {name}: {model.facts['source']}; {_DOMAINS[band]} (--routing-band {band})"
        f"; {_phases(parameters.prompt_only)}{tuned}{changed}"
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
