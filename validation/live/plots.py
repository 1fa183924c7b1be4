"""Pictures of the live validation as PNG: live runs beside their simulation.

All are drawn from plain arrays. Blue is live, orange simulated; batches are shades of ``cividis``,
which readers with any colour vision can order.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BatchCurve",
    "CdfPanel",
    "ComponentBars",
    "StepScatter",
    "draw_cdfs",
    "draw_components",
    "draw_distinct",
    "draw_steps",
    "save_picture",
]

FloatArray = NDArray[np.float64]

_LIVE, _SIMULATED = "C0", "C1"
_LARGEST_FILE = 80_000  # bytes, where a resolution of 60 dpi or more allows it
_MOST_POINTS = 1500  # of a scatter; more hide each other and make the file large


@dataclass(frozen=True, eq=False)
class CdfPanel:
    """Latencies of the requests of one load.

    Attributes
    ----------
    title
        Names the load.
    live, simulated
        By metric, such as ``TTFT``: of each repeat the requests' milliseconds.
    """

    title: str
    live: Mapping[str, Sequence[FloatArray]]
    simulated: Mapping[str, Sequence[FloatArray]]


@dataclass(frozen=True, eq=False)
class StepScatter:
    """Steps of one kind; arrays of equal length.

    Attributes
    ----------
    title
        Names the kind.
    measured_s, predicted_s
        Seconds.
    size
        Requests in a decode step, tokens of others: the colour.
    size_name
        What ``size`` counts.
    """

    title: str
    measured_s: FloatArray
    predicted_s: FloatArray
    size: FloatArray
    size_name: str


@dataclass(frozen=True)
class ComponentBars:
    """Errors of one load by component.

    Attributes
    ----------
    title
        Names the load.
    error_ms, noise_ms
        By component: simulated less live, and the live runs' own spread; milliseconds a request.
    """

    title: str
    error_ms: Mapping[str, float]
    noise_ms: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class BatchCurve:
    """Decode steps of one batch, and what the calibrated tables say of it.

    Attributes
    ----------
    batch
        Requests in the step.
    distinct, measured_s
        Of each live step: distinct experts, mean over the layers; seconds.
    curve_distinct, curve_s
        Predicted seconds by distinct experts, at the steps' median context.
    """

    batch: int
    distinct: FloatArray
    measured_s: FloatArray
    curve_distinct: FloatArray
    curve_s: FloatArray


def save_picture(path: Path, size: tuple[float, float], draw: Callable[[Any], None]) -> None:
    """Draw a figure of ``size`` inches; write a PNG of 128 colours, coarser where it is large."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    draw(figure)
    for dpi in (100, 80, 60):
        buffer, packed = io.BytesIO(), io.BytesIO()
        figure.savefig(buffer, dpi=dpi, metadata={"Software": None})
        picture = Image.open(buffer).convert("RGB")
        picture = picture.quantize(128, dither=Image.Dither.NONE)
        picture.save(packed, format="PNG", optimize=True)
        if packed.tell() <= _LARGEST_FILE:
            break
    path.write_bytes(packed.getvalue())


def draw_cdfs(figure: Any, panels: Sequence[CdfPanel]) -> None:
    """Draw the share of requests up to a latency: a row a load, a column a metric."""
    metrics = list(panels[0].live)
    grid = figure.subplots(len(panels), len(metrics), squeeze=False, sharey=True)
    for row, panel in zip(grid, panels, strict=True):
        for axes, metric in zip(row, metrics, strict=True):
            sides = ((panel.live, _LIVE, "-", "live"), (panel.simulated, _SIMULATED, "--", ""))
            for of, colour, style, name in sides:
                for repeat, values in enumerate(of[metric]):
                    ordered = np.sort(values)
                    share = np.arange(1, len(ordered) + 1) / max(1, len(ordered))
                    label = None if repeat else name or "simulated"
                    axes.plot(ordered, share, style, color=colour, linewidth=1.0, label=label)
            everything = np.concatenate([*panel.live[metric], *panel.simulated[metric]])
            positive = everything[everything > 0]
            if len(positive) and np.ptp(np.log10(np.percentile(positive, [1, 99]))) > 1.2:
                axes.set_xscale("log")
                _plain_numbers(axes.xaxis, float(np.ptp(positive) / positive.min()))
            axes.set_ylim(0, 1)
            axes.grid(alpha=0.3)
            axes.tick_params(labelsize=7)
        row[0].set_ylabel("share of requests", fontsize=8)
        row[len(metrics) // 2].set_title(panel.title, fontsize=9)
    for axes, metric in zip(grid[-1], metrics, strict=True):
        axes.set_xlabel(f"{metric}, ms")
    grid[0, 0].legend(fontsize=7, loc="lower right")


def draw_steps(figure: Any, kinds: Sequence[StepScatter]) -> None:
    """Draw predicted against measured step time, below it the error; a column a kind of step."""
    grid = figure.subplots(2, len(kinds), squeeze=False, height_ratios=(3, 2), sharex="col")
    for (above, below), kind in zip(grid.T, kinds, strict=True):
        error = 100 * (kind.predicted_s / kind.measured_s - 1)
        shown = _thinned(len(error))
        milli = 1e3 * kind.measured_s[shown], 1e3 * kind.predicted_s[shown]
        points = {"c": kind.size[shown], "cmap": "cividis", "s": 5, "linewidths": 0}
        low, high = min(map(np.min, milli)) / 1.1, max(map(np.max, milli)) * 1.1
        dots = above.scatter(*milli, **points)
        below.scatter(milli[0], error[shown], **points)
        for percent, style in ((0, "-"), (5, "--"), (10, ":")):
            for sign in (1, -1) if percent else (1,):
                factor = 1 + sign * percent / 100
                line = {"color": "black", "linewidth": 0.8, "linestyle": style}
                above.plot([low, high], [factor * low, factor * high], **line)
                below.axhline(sign * percent, **line)
        above.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        bound = max(15.0, min(60.0, float(np.percentile(np.abs(error), 99))))
        below.set(ylim=(-bound, bound), xlabel="measured step, ms")
        absolute = np.abs(error)
        above.set_title(
            f"{kind.title}: {len(error):,} steps\nerror: median {np.median(absolute):.1f}%, "
            f"p90 {np.percentile(absolute, 90):.1f}%",
            fontsize=9,
        )
        figure.colorbar(dots, ax=[above, below], label=kind.size_name)
        for axes in (above, below):
            axes.grid(alpha=0.3)
        for axis in (above.xaxis, above.yaxis):
            _plain_numbers(axis, high / low)
    grid[0, 0].set_ylabel("predicted step, ms")
    grid[1, 0].set_ylabel("error, %\n(lines: ±5, ±10)")


def draw_components(figure: Any, bars: Sequence[ComponentBars]) -> None:
    """Draw the error of each component, a panel a component and a bar a load.

    Whiskers at the end of a bar are the noise floor: one that reaches zero leaves nothing to
    explain.
    """
    components = list(dict.fromkeys(name for each in bars for name in each.error_ms))
    panels = figure.subplots(1, len(components), squeeze=False)[0]
    shades = _shades(len(bars))
    for axes, name in zip(panels, components, strict=True):
        for i, each in enumerate(bars):
            if name in each.error_ms:
                axes.bar(i, each.error_ms[name], color=shades[i])
            if name in each.noise_ms:
                whisker = {"yerr": each.noise_ms[name], "color": _SIMULATED, "capsize": 3}
                axes.errorbar(i, each.error_ms[name], **whisker)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xticks(range(len(bars)), [str(i + 1) for i in range(len(bars))], fontsize=7)
        axes.tick_params(labelsize=7)
        axes.set_title("E2E" if name == "sum" else name, fontsize=9)
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("simulated less live, ms a request", fontsize=8)
    names = ",  ".join(f"{i}: {each.title}" for i, each in enumerate(bars, 1))
    figure.supxlabel(textwrap.fill(names, 150), fontsize=8)


def draw_distinct(figure: Any, curves: Sequence[BatchCurve]) -> None:
    """Draw decode step time against distinct experts, live points over the calibrated curve."""
    axes = figure.subplots()
    shades = _shades(len(curves))
    for shade, curve in zip(shades, curves, strict=True):
        shown = _thinned(len(curve.distinct), _MOST_POINTS // len(curves))
        axes.plot(
            curve.distinct[shown],
            1e3 * curve.measured_s[shown],
            ".",
            color=shade,
            markersize=3,
            alpha=0.4,
        )
        label = f"batch {curve.batch}: {len(curve.distinct):,} steps"
        axes.plot(curve.curve_distinct, 1e3 * curve.curve_s, color=shade, label=label)
    axes.set(
        xlabel="distinct experts of a MoE layer, mean over the layers",
        ylabel="decode step, ms",
        title="Points: live steps. Lines: calibrated tables, at the points' median context",
        ylim=(0, 1.05 * axes.get_ylim()[1]),
    )
    axes.title.set_fontsize(9)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _plain_numbers(axis: Any, ratio: float) -> None:
    """Label a logarithmic axis 1, 2, 5, 10 instead of powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    subs = (1, 1.5, 2, 3, 4, 5, 6, 8) if ratio < 6 else (1, 2, 5) if ratio < 200 else (1,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_formatter(NullFormatter())


def _thinned(count: int, most: int = _MOST_POINTS) -> NDArray[np.intp]:
    """Pick at most ``most`` of ``count`` points, evenly; the same ones every time."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.intp))


def _shades(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["cividis"](x) for x in np.linspace(0.0, 0.85, count)]
