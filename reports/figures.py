"""The figures that comparisons, sweeps and plans share: their names, units and cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.etree import ElementTree as ET

from eldr_sim.reports.charts import Series, xy_chart
from eldr_sim.reports.markup import Cell, decimals, measured, span

#: Headings by key of the summary.
METRICS = {
    "median_tpot_ms": "TPOT p50, ms",
    "p99_tpot_ms": "TPOT p99, ms",
    "median_ttft_ms": "TTFT p50, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "mean_active_experts_per_step": "active experts a layer",
    "output_throughput": "output tokens/s",
}
#: Headings of those that only some results have.
MORE_METRICS = {
    "slo_attainment": "SLO attainment, share",
    "cost_per_million_output_tokens": "cost per million output tokens",
    "gpu_hours_per_million_output_tokens": "GPU-hours per million output tokens",
}
_UNITS = {
    "request_rate": "requests/s",
    "output_len": "tokens",
    "max_num_batched_tokens": "tokens",
    "max_num_seqs": "requests",
    "max_concurrency": "requests",
    "num_requests": "requests",
    "duration": "s",
    "warmup": "s",
}


def difference(percent: float, low: float, high: float) -> Cell:
    """Return a difference with its interval as a cell that sorts by the difference."""
    return None if math.isnan(percent) else measured(percent, span(percent, low, high, signs=True))


def mean_cell(mean: float | None, low: float | None, high: float | None) -> Cell:
    """Return a mean with half the width of its (symmetric) interval, sorting by the mean."""
    if mean is None or low is None or high is None:
        return mean
    form = f",.{decimals(abs(mean))}f"
    return measured(mean, f"{mean:{form}} ± {(high - low) / 2:{form}}".replace("-", "−"))


def parameter_label(path: str) -> str:
    """Return a parameter's dot path with its unit, where it has one."""
    name = path.rpartition(".")[2]
    unit = "ms" if name.endswith("_ms") or path.startswith("goodput.") else _UNITS.get(name)
    return path if unit is None else f"{path}, {unit}"


def metric_heading(label: str) -> str:
    """Return the heading of a picture: a figure's label without its unit."""
    name = label.removesuffix(", ms").removesuffix(", share")
    return name[:1].upper() + name[1:]


def pareto_chart(
    clouds: Sequence[tuple[str, int, Sequence[tuple[float, float, str]]]],
) -> ET.Element:
    """Draw speed for a user against throughput of a GPU, with the front of all points.

    Parameters
    ----------
    clouds
        (name, colour, points), a point being output tokens per second for a user, the same for a
        GPU, and its name.
    """
    points = sorted({point for *_, own in clouds for point in own}, key=lambda point: point[2])
    front = [points[i] for i in pareto([(x, y) for x, y, _ in points])]
    # The front lies under the points, which say more.
    series = [_cloud("Pareto front", 6, front, line=True)]
    series += [_cloud(name, colour, own, line=False) for name, colour, own in clouds]
    return xy_chart(
        "Throughput of a GPU against speed for a user",
        "output tokens/s for a user (1 / median TPOT)",
        "output tokens/s of a GPU",
        series,
        note="Up and to the right is better; no point beats one of the front in both.",
    )


def _cloud(
    name: str, colour: int, points: Sequence[tuple[float, float, str]], line: bool
) -> Series:
    x, y, tips = zip(*points, strict=True) if points else ((), (), ())
    return Series(name, x, y, line=line, colour=colour, dash=1 if line else 0, tips=tips)


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return which points no other beats in both figures, in ascending order of the first.

    Of equal points the first is kept; points that are not finite are none.
    """
    known = [i for i, point in enumerate(points) if all(math.isfinite(v) for v in point)]
    front: list[int] = []
    for i in sorted(known, key=lambda i: (-points[i][0], -points[i][1], i)):
        if not front or points[i][1] > points[front[-1]][1]:
            front.append(i)
    return front[::-1]
