"""What one more distinct expert costs a step on real hardware, from the measured cells alone.

At one rate, policies differ in the distinct experts of their steps, and in their batches. Where
both batches lie in one tile of the kernel, the difference of two measured TPOTs is that of the
experts (and a little attention, which a smaller batch has less of). The number of distinct experts
is not measured: it is that of our drawn routing, interpolated at the measured batch."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.planning.studies.figures import Claim, Reproduction, Runner, grouped, percent
from studies.eldr_measured.cells import Cell, Kernels, Pair, ours, run_main

#: Last rows of the tiles of vLLM 0.21's default Triton configuration (not gpt-oss's kernel).
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
    points = []
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
        points.append(Point(cell, batch, _tile(cell.model, batch), at))
    return points


def _tile(model: str, batch: float) -> int:
    """Return the number of the tile of a mean batch; one for all where none changes."""
    expert_dtype = load_model(model).expert_dtype
    return 0 if _FOUR_BITS in expert_dtype else bisect_left(_TILES, batch)


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
    tpots = ([point.cell.measured["tpot_p50"] for point in pair] for pair in pairs)
    times = 1e3 * np.array([later - first for first, later in tpots])
    us = float(experts @ times / (experts @ experts))
    rest = times - us * experts
    error = float(np.sqrt(rest @ rest / (len(pairs) - 1) / (experts @ experts)))
    return Slope(us, error, len(pairs))


def _slopes(points: Sequence[Point]) -> dict[tuple[str, int], Slope]:
    """Return the slope of each model and tile, from pairs that lie in one tile."""
    same = [(one, other) for one, other in _beside(points) if one.tile == other.tile]
    slopes = {}
    for key, own in grouped(same, lambda pair: (pair[0].cell.model, pair[0].tile)).items():
        if (slope_of := _slope(own, load_model(key[0]).n_moe_layers)) is not None:
            slopes[key] = slope_of
    return slopes


def _rows_of(model: str, tile: int) -> str:
    if _FOUR_BITS in load_model(model).expert_dtype:
        return "all"
    return f"{1 if tile == 0 else _TILES[tile - 1] + 1} to {_TILES[tile]}"


def slope(runner: Runner, kernels: Kernels, quick: bool) -> Reproduction:
    """Return the time of one more distinct expert by model and tile, from measured cells."""
    points = _points(run_main(runner, kernels, quick))
    rows, claims = [], []
    for (model, tile), found in sorted(_slopes(points).items()):
        # At the memory's peak bandwidth.
        least = 1e6 * load_model(model).bytes_per_expert / load_gpu("MI300X").memory_bandwidth
        rows.append(
            {"model": model, "rows": _rows_of(model, tile), "pairs": found.n}
            | {"us_per_expert": found.us, "standard_error_us": found.error}
            | {"bytes_at_peak_us": least, "times_peak": found.us / least}
        )
        claims.append(
            Claim(f"{model}, {rows[-1]['rows']} rows: a step takes longer for every distinct "
                  "expert, us in a layer (paper: the thesis; no less than its bytes take)",
                  least, 10.0 * least, found.us, "us", 0.0,
                  f"{found.n} pairs of cells, standard error {found.error:.2f} us",
                  stated=False, neutral=0.0)
        )  # fmt: skip

    def draw(figure: Any) -> None:
        models = list(dict.fromkeys(point.cell.model for point in points))
        for axes, model in zip(np.atleast_1d(figure.subplots(1, len(models))), models, strict=True):
            layers = load_model(model).n_moe_layers
            for one, other in _beside([p for p in points if p.cell.model == model]):
                more = (other.experts - one.experts) * layers
                later = other.cell.measured["tpot_p50"] - one.cell.measured["tpot_p50"]
                mark = "o" if one.tile == other.tile else "x"
                axes.plot(more, later, mark, color=f"C{one.tile}", markersize=4)
            axes.set(title=model, xlabel="difference in distinct experts, all layers")
        figure.axes[0].set_ylabel("difference in measured TPOT, ms (x: tiles differ)")

    title = "time of a distinct expert, from measured cells and the experts of our routing"
    return Reproduction("slope", title, rows, claims, draw)


def locality(runner: Runner, kernels: Kernels, quick: bool) -> Reproduction:
    """Split ELDR's measured gain: fewer distinct experts, and another tile of the kernel. The part
    of locality is the slope of rr's tile times the difference in experts; what is left is that of
    the tile where the tiles differ, and noise and attention where they do not."""
    points = _points(run_main(runner, kernels, quick))
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
            {"dataset": one.cell.dataset, "model": model, "rate": one.cell.rate}
            | {"batch_rr": one.batch, "batch_eldr": other.batch}
            | {"rows_rr": _rows_of(model, one.tile), "rows_eldr": _rows_of(model, other.tile)}
            | {"experts_rr": one.experts, "experts_eldr": other.experts}
            | {"gain_measured_percent": gain, "of_locality_points": part}
            | {"of_the_rest_points": gain - part, "tiles_differ": one.tile != other.tile}
        )

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        at = np.arange(len(rows))
        axes.bar(at, [row["of_locality_points"] for row in rows], 0.7, label="locality")
        gained = np.array([row["gain_measured_percent"] for row in rows])
        apart = np.array([row["tiles_differ"] for row in rows], bool)
        axes.plot(at, gained, "k_", label="measured")
        axes.plot(at[apart], gained[apart], "rx", label="measured, tiles differ")
        names = [f"{row['dataset']}\n{row['model']}\n{row['rate']:g}/s" for row in rows]
        axes.set_xticks(at, names, fontsize=8, rotation=90)
        axes.set(ylabel="median TPOT, eldr against rr, %")

    return Reproduction("locality", "locality and tiles in ELDR's measured gain", rows, [], draw)
