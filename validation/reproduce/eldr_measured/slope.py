"""What one more distinct expert costs a step on real hardware, from the measured cells alone.

At one rate, policies differ in the distinct experts of their steps, and in their batches. Where
both batches lie in one tile of the kernel, the difference of two measured TPOTs is that of the
experts (and a little attention, which a smaller batch has less of). The number of distinct experts
is not measured: it is that of our drawn routing, interpolated at the measured batch.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.models import ModelDims, load_model
from eldr_sim.validation.reproduce.eldr_measured.cells import (
    Cell,
    Kernels,
    Pair,
    cells_of,
    ours,
    run_cells,
)
from eldr_sim.validation.reproduce.reproduction import Claim, Reproduction, Runner, percent

#: Last numbers of rows of the tiles of vLLM's default Triton configuration (vLLM 0.21,
#: ``get_default_config``); experts of gpt-oss run in another kernel.
_TILES = (32, 64, 96, 512)
_LOCAL = ("domain", "eldr")
_FOUR_BITS = "mxfp4"


class Point(NamedTuple):
    """A measured cell with the distinct experts of its steps, mean by token over layers."""

    cell: Cell
    batch: float
    tile: int
    experts: float


def _points(pairs: Sequence[Pair]) -> list[Point]:
    """Return the cells of rr, domain and eldr with our experts at their measured batches."""
    found = []
    for cell, _ in pairs:
        if cell.policy not in ("rr", *_LOCAL):
            continue
        same = [
            (other.batch(ours(summary, "tpot_p50")), summary["mean_active_experts_per_token"])
            for other, summary in pairs
            if (other.model, other.dataset, other.policy) == (cell.model, cell.dataset, cell.policy)
        ]
        batches, experts = (np.array(column) for column in zip(*sorted(same), strict=True))
        batch = cell.batch(cell.measured["tpot_p50"])
        at = float(np.interp(np.log(batch), np.log(batches), experts))
        found.append(Point(cell, batch, _tile(cell.model, batch), at))
    return found


def _tile(model: str, batch: float) -> int:
    """Return the number of the tile of a mean batch; one for all where none changes."""
    own = load_model(model).expert_dtype
    return 0 if _FOUR_BITS in own else bisect_left(_TILES, batch)


def _beside(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Return pairs of a cell of rr and one of domain or eldr at its rate."""
    return [
        (one, other)
        for one in points
        for other in points
        if one.cell.policy == "rr"
        and other.cell.policy in _LOCAL
        and (one.cell.model, one.cell.dataset, one.cell.rate)
        == (other.cell.model, other.cell.dataset, other.cell.rate)
    ]


class Slope(NamedTuple):
    """Time of one more distinct expert of a layer, us."""

    us: float
    error: float  #: standard error
    n: int


def _slope(pairs: Sequence[tuple[Point, Point]], n_layers: int) -> Slope | None:
    """Fit differences of TPOT to those of experts, through the origin."""
    if len(pairs) < 3:
        return None
    experts = np.array([other.experts - one.experts for one, other in pairs]) * n_layers
    times = 1e3 * np.array(
        [other.cell.measured["tpot_p50"] - one.cell.measured["tpot_p50"] for one, other in pairs]
    )
    us = float(experts @ times / (experts @ experts))
    rest = times - us * experts
    error = float(np.sqrt(rest @ rest / (len(pairs) - 1) / (experts @ experts)))
    return Slope(us, error, len(pairs))


def _slopes(points: Sequence[Point]) -> dict[tuple[str, int], Slope]:
    """Return the slope of each model and tile, from pairs that lie in one tile."""
    grouped: dict[tuple[str, int], list[tuple[Point, Point]]] = {}
    for one, other in _beside(points):
        if one.tile == other.tile:
            grouped.setdefault((one.cell.model, one.tile), []).append((one, other))
    found = {}
    for (model, tile), own in grouped.items():
        slope_of = _slope(own, load_model(model).n_moe_layers)
        if slope_of is not None:
            found[model, tile] = slope_of
    return found


def _of_bytes(model: ModelDims) -> float:
    """Return the time of an expert's bytes at the memory's peak bandwidth, us."""
    return 1e6 * model.bytes_per_expert / load_gpu("MI300X").memory_bandwidth


def _all(runner: Runner, kernels: Kernels, quick: bool) -> list[Point]:
    return _points(
        [p for name in ("10", "11") for p in run_cells(runner, cells_of(name, kernels, quick))]
    )


def _rows_of(model: str, tile: int) -> str:
    if _FOUR_BITS in load_model(model).expert_dtype:
        return "all"
    return f"{1 if tile == 0 else _TILES[tile - 1] + 1} to {_TILES[tile]}"


def slope(runner: Runner, kernels: Kernels, quick: bool) -> Reproduction:
    """Return the time of one more distinct expert by model and tile, from measured cells."""
    points = _all(runner, kernels, quick)
    rows, claims = [], []
    for (model, tile), found in sorted(_slopes(points).items()):
        least = _of_bytes(load_model(model))
        rows.append(
            {
                "model": model,
                "rows": _rows_of(model, tile),
                "pairs": found.n,
                "us_per_expert": found.us,
                "standard_error_us": found.error,
                "bytes_at_peak_us": least,
                "times_peak": found.us / least,
            }
        )
        claims.append(
            Claim(
                f"{model}, {rows[-1]['rows']} rows: a step takes longer for every distinct expert, "
                "us in a layer (paper: the thesis; no less than its bytes take)",
                least,
                10.0 * least,
                found.us,
                "us",
                0.0,
                f"{found.n} pairs of cells, standard error {found.error:.2f} us",
                stated=False,
                neutral=0.0,
            )
        )

    def draw(figure: Any) -> None:
        models = list(dict.fromkeys(point.cell.model for point in points))
        for axes, model in zip(np.atleast_1d(figure.subplots(1, len(models))), models, strict=True):
            layers = load_model(model).n_moe_layers
            for one, other in _beside([p for p in points if p.cell.model == model]):
                axes.plot(
                    (other.experts - one.experts) * layers,
                    other.cell.measured["tpot_p50"] - one.cell.measured["tpot_p50"],
                    "o" if one.tile == other.tile else "x",
                    color=f"C{one.tile}",
                    markersize=4,
                )
            axes.set(title=model, xlabel="difference in distinct experts, all layers")
        figure.axes[0].set_ylabel("difference in measured TPOT, ms (x: tiles differ)")

    return Reproduction(
        "slope",
        "time of a distinct expert, from measured cells and the experts of our routing",
        rows,
        claims,
        draw,
    )


def locality(runner: Runner, kernels: Kernels, quick: bool) -> Reproduction:
    """Split ELDR's measured gain: fewer distinct experts, and another tile of the kernel.

    The part of locality is the slope of rr's tile times the difference in experts; what is left is
    that of the tile where the tiles differ, and noise and attention where they do not.
    """
    points = _all(runner, kernels, quick)
    slopes = _slopes(points)
    rows = []
    for one, other in _beside(points):
        model, reference = one.cell.model, one.cell.measured["tpot_p50"]
        found = slopes.get((model, one.tile)) or slopes.get((model, other.tile))
        if other.cell.policy != "eldr" or found is None:
            continue
        experts = (other.experts - one.experts) * load_model(model).n_moe_layers
        gain = percent(other.cell.measured["tpot_p50"], reference)
        part = 100.0 * found.us * experts / 1e3 / reference
        rows.append(
            {
                "dataset": one.cell.dataset,
                "model": model,
                "rate": one.cell.rate,
                "batch_rr": one.batch,
                "batch_eldr": other.batch,
                "rows_rr": _rows_of(model, one.tile),
                "rows_eldr": _rows_of(model, other.tile),
                "experts_rr": one.experts,
                "experts_eldr": other.experts,
                "gain_measured_percent": gain,
                "of_locality_points": part,
                "of_the_rest_points": gain - part,
                "tiles_differ": one.tile != other.tile,
            }
        )

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        at = np.arange(len(rows))
        axes.bar(at, [row["of_locality_points"] for row in rows], 0.7, label="locality")
        axes.plot(at, [row["gain_measured_percent"] for row in rows], "k_", label="measured")
        axes.plot(
            [i for i, row in enumerate(rows) if row["tiles_differ"]],
            [row["gain_measured_percent"] for row in rows if row["tiles_differ"]],
            "rx",
            label="measured, tiles differ",
        )
        names = [f"{row['dataset']}\n{row['model']}\n{row['rate']:g}/s" for row in rows]
        axes.set_xticks(at, names, fontsize=4)
        axes.set(ylabel="median TPOT, eldr against rr, %")

    return Reproduction("locality", "locality and tiles in ELDR's measured gain", rows, [], draw)
