"""The routing that a run replays where it names no trace: drawn for its model, kept in the cache.

A recording has few requests or not its domains, a trace of another model other statistics
(studies/synthetic): a run draws requests of the preset nearest to its model, in all its layers, for
its workload's domains."""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from eldr_sim import cache
from eldr_sim.errors import InputError
from eldr_sim.outputs import process_folder
from eldr_sim.phases import report_phase
from eldr_sim.traces.requests.texts import CALIBRATION, OUTPUT_LEN, SERVING
from eldr_sim.traces.routing.format import RoutingTrace, open_trace
from eldr_sim.traces.routing.synthetic.model import RoutingModel
from eldr_sim.traces.routing.synthetic.presets import PRESETS, Band, fitted_path, preset_model

Split = Literal["calibration", "serving"]
#: Modules that say what is drawn: when they change, it is drawn anew.
_SOURCES = (
    "traces.routing.synthetic.drawn", "traces.routing.synthetic.model",
    "traces.routing.synthetic.presets", "traces.requests.prompt_lengths", "traces.requests.texts",
    "traces.routing.synthetic.reshape", "traces.routing.synthetic.sampler",
    "traces.routing.synthetic.synthesize",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What routing has of a model: MoE layers, routed experts a layer, experts a token chooses."""

    n_layers: int
    n_experts: int
    top_k: int


def nearest_preset(model: str, shape: Shape) -> str:
    """Return the preset that a model's routing is drawn from: its own, by name or in another type
    of numbers; else that of the most similar layers: experts and experts a token, by ratio."""
    name = model.removesuffix("-FP8")
    if name in PRESETS:
        return name

    def distance(preset: str) -> float:
        other = PRESETS[preset]
        return abs(math.log(other.n_experts / shape.n_experts)) + abs(
            math.log(other.top_k / shape.top_k)
        )

    return min(PRESETS, key=distance)


def drawn_trace(
    model: str, shape: Shape, domains: tuple[tuple[str, float], ...], *, band: Band = "middle"
) -> RoutingTrace:
    """Draw the routing of a model, or open what was drawn before on this machine; its calibration
    split apart, on request. ``domains``: with weights (`wanted_domains`); ``band``: see
    `presets`."""
    split = partial(_split, model, shape, domains, band=band)
    return replace(split("serving"), calibration_apart=partial(split, "calibration"))


def _split(
    model: str, shape: Shape, domains: tuple[tuple[str, float], ...], split: Split, *, band: Band
) -> RoutingTrace:
    """Draw a split of a model's routing, or open what was drawn before."""
    preset = nearest_preset(model, shape)
    fitted = hashlib.sha256(fitted_path(PRESETS[preset].fitted).read_bytes()).hexdigest()
    what = [preset, band, asdict(shape), domains, split, cache.stamp(_SOURCES), fitted]
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    name = f"{re.sub('[^a-z0-9.]+', '-', model.lower())}-{digest[:16]}"

    doing = f"drawing the {split} routing of {model}, once on this machine"

    def draw(folder: Path) -> None:
        _draw(preset, band, shape, domains, split, folder, progress=partial(report_phase, doing))

    for kept in (cache.find, partial(cache.keep_folder, write=draw, doing=doing)):
        found = kept(cache.TRACES, name)
        if found is not None and found.is_dir():
            try:
                return open_trace(found, verify_checksum=False)
            except InputError:  # a part of it is gone, perhaps cleared by another process
                shutil.rmtree(found, ignore_errors=True)
    own = process_folder("trace") / name
    draw(own)
    return open_trace(own, verify_checksum=False)


def _draw(
    preset: str,
    band: Band,
    shape: Shape,
    domains: tuple[tuple[str, float], ...],
    split: Split,
    folder: Path,
    **more: Any,
) -> None:
    model = preset_model(preset, band=band, **asdict(shape))
    draw_served(model, dict(domains), folder, split=split, **more)


def draw_served(
    model: RoutingModel,
    weights: Mapping[str, float],
    folder: Path,
    output_len: int = OUTPUT_LEN,
    **more: Any,
) -> None:
    """Draw as many requests as the default routing has; ``more``: of `synthesize`."""
    from eldr_sim.traces.routing.synthetic.synthesize import synthesize  # only what is not kept

    shares = [weights.get(name, 0.0) / sum(weights.values()) for name in model.domains]
    synthesize(
        model, folder, requests=SERVING, calibration=CALIBRATION, prompt_len=None,
        output_len=(output_len, output_len), seed=0, shares=shares, force=True, **more,
    )  # fmt: skip
