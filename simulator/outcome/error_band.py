"""How wrong a prediction may be: bands made from published runs (``error_bands.json``).

``eldr-sim validate bands`` makes the file from predictions and measurements of published runs
(`eldr_sim.validation.published.bands`, which has the method). This module only looks a run up: in
the narrowest cell of runs like it, and says how many runs and publishers the cell rests on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from eldr_sim.kernel_profiles.models import ModelDims
    from eldr_sim.simulator.setup.config.groups import ServiceLevel

METRICS = ("ttft", "tpot", "throughput")
#: Most requests in flight on a worker, by load.
LOADS = ((16, "up to 16"), (256, "17 to 256"), (math.inf, "more than 256"))


class Kind(NamedTuple):
    """What tells runs apart, the widest difference first; cells are nested in this order."""

    load: str
    mode: str
    family: str
    gpu: str
    engine: str
    precision: str


#: Runs whose bands are made apart: of at most 256 requests in flight on a worker, and others.
CROWDS = ("up to 256", "more than 256")
#: From these on a cell holds runs of the same mode, load, family and GPU.
ALIKE = 4


def kind_of(engine: str, gpu: str, model: ModelDims, *, apart: bool, in_flight: float) -> Kind:
    """Return the kind of a run. ``apart``: whether prompts and outputs are computed by different
    workers; ``in_flight``: most requests in flight on a worker."""
    attention = model.attention.upper()
    if model.index_topk:
        attention = "sparse attention"
    elif model.n_linear_layers:
        attention = "linear attention"
    dtype = str(model.linear_dtype if model.is_dense else model.expert_dtype)
    bits = "4" if "4" in dtype else "8" if "8" in dtype else "16"
    return Kind(
        next(name for most, name in LOADS if in_flight <= most),
        "prefill and decode apart" if apart else "co-located",
        f"{attention}, {'dense' if model.is_dense else 'MoE'}",
        gpu,
        engine,
        f"{bits}-bit weights",
    )


@cache
def shipped() -> dict[str, Any]:
    """Return the bands of the package."""
    path = Path(__file__).with_name("error_bands.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def band_of(
    kind: Kind, bands: Mapping[str, Any] | None = None, *, calibrated: bool = False
) -> dict[str, Any]:
    """Return the band of a kind of run, as ``summary.json`` has it. ``calibrated``: whether its
    constants were fitted to runs of the same model and GPU; up to 256 requests in flight it then
    has the band of such runs, and none of throughput, which they do not state.

    Returns: ``level``: share of runs that it should hold; ``compared``: whether a run of the same
    mode, load, family and GPU was ever compared; ``kind``; and by metric ``low`` and ``high``, by
    which a prediction is multiplied; ``rows``, ``publishers`` and ``of``: what it rests on;
    ``held``: the share of runs, of publishers that were left out when bands of this load were made,
    that lay within (None: not measured)."""
    data = shipped() if bands is None else bands
    band: dict[str, Any] = {"level": data["level"], "kind": kind._asdict(), "compared": True}
    crowd = CROWDS[kind.load == LOADS[-1][1]]
    for metric in METRICS:
        cells = data["metrics"][metric]
        depth = next(d for d in range(len(kind), -1, -1) if " | ".join(kind[:d]) in cells)
        cell = cells[" | ".join(kind[:depth])]
        held = data["held"][metric].get(crowd)
        band[metric] = cell | {"of": _named(kind, depth), "held": held}
        if metric != "throughput" and depth < ALIKE:
            band["compared"] = False
    if calibrated and crowd == CROWDS[0]:
        del band["throughput"]
        of = {"of": "calibrated on two runs of their model, GPU and launch"}
        band |= {"compared": True, **{m: c | of for m, c in data["calibrated"].items()}}
    return band | {"made": data["made"]}


def _named(kind: Kind, depth: int) -> str:
    """Return what the runs of a cell have in common."""
    known = (f"{kind.load} in flight", *kind[1:])[:depth]
    return ", ".join(reversed(known)) or "all runs"


def interval(band: Mapping[str, Any], metric: str, value: float) -> tuple[float, float]:
    """Return the ends of the band around a predicted value."""
    return value * band[metric]["low"], value * band[metric]["high"]


def at_bad_end(level: ServiceLevel, band: Mapping[str, Any]) -> ServiceLevel:
    """Return the bounds that predictions keep where measurements at the bad end of the band keep
    ``level``; an end-to-end latency has the wider of the bands of its parts."""
    high = {name: band[name]["high"] for name in ("ttft", "tpot")}
    high["e2el"] = max(high.values())
    bounds = level.model_dump(exclude_none=True)
    return type(level)(**{name: bound / high[name] for name, bound in bounds.items()})


def relative(bands: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return how far the ratio of two predictions of one model, GPU, engine and load may be off,
    by metric: ``factor``, ``pairs`` and ``publishers`` that it rests on; without metrics that have
    no pairs."""
    found: dict[str, Any] = (shipped() if bands is None else bands)["relative"]
    return found


def relative_line() -> str:
    """Return the band of comparisons in a sentence."""
    parts = [
        f"{name.upper()} {100 * (cell['factor'] - 1):.0f}% ({_count(cell['pairs'], 'pair')} by "
        f"{_count(cell['publishers'], 'publisher')})"
        for name, cell in relative().items()
        if name != "throughput"
    ]
    return (
        "Error band of differences: ratios of two published runs of one model, GPU, engine and "
        f"load, launched otherwise, lie in 80% of pairs within {', '.join(parts)} of the "
        "predicted; none of the pairs differ in routing policy"
    )


def in_words(band: Mapping[str, Any]) -> list[str]:
    """Return what a band rests on, in sentences."""
    kind = Kind(**band["kind"])
    said = []
    if not band["compared"]:
        what = f"{kind.engine}, {kind.gpu}, {kind.family}, {kind.load} in flight, {kind.mode}"
        said.append(f"No run like this was ever compared ({what}): wider cells stand in.")
    for metric in METRICS:
        if metric in band:
            cell = band[metric]
            name = metric.upper() if metric != "throughput" else "Throughput"
            said.append(f"{name}: {_rests_on(cell)}")
    if short := _held(band).removeprefix(". "):
        said.append(f"{short}.")
    return said


def _rests_on(cell: Mapping[str, Any]) -> str:
    """Say which runs a cell's band rests on, and where wider cells decide."""
    said = f"{_count(cell['rows'], 'run')} by {_count(cell['publishers'], 'publisher')}"
    said += f" ({cell['of']})"
    return said + ", wider cells decide" * int(cell["publishers"] == 1)


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _held(band: Mapping[str, Any]) -> str:
    """Return a warning where a band held clearly less than it should, of left-out publishers."""
    short = [
        f"{100 * band[metric]['held']:.0f}% of {name}"
        for metric, name in zip(METRICS, ("TTFT", "TPOT", "throughput"), strict=True)
        if metric in band
        and band[metric]["held"] is not None
        and band[metric]["held"] < band["level"] - 0.1
    ]
    return f". Of publishers left out it held only {', '.join(short)}" if short else ""


def one_line(band: Mapping[str, Any]) -> str:
    """Return an error band as a sentence.

    Args:
        band: factors of the predictions by metric, with their basis.

    Returns:
        The sentence, such as ``80% of runs lie within TPOT 0.9 to 1.3 times ...``.
    """
    parts = []
    for metric in METRICS:
        if metric in band:
            cell = band[metric]
            name = metric.upper() if metric != "throughput" else metric
            parts.append(f"{name} {cell['low']:.2g} to {cell['high']:.2g} times")
    said = f"{100 * band['level']:.0f}% of runs lie within {', '.join(parts)} the prediction"
    if not band["compared"]:
        return f"Error band: no run like this was ever compared; of wider cells {said}{_held(band)}"
    return f"Error band: {said}; TPOT of {_rests_on(band['tpot'])}{_held(band)}"
