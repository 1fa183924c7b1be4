"""Pictures of a page as Plotly figures, plain dictionaries with colours that are variables of the
style sheet; the page's script adds the layout. Text is escaped: Plotly reads HTML."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from typing import Any

from eldr_sim.reports.cells import number, six_digits

Spec = dict[str, Any]
_text = partial(escape, quote=False)

#: Colours of the style sheet; further series repeat them with another dash and marker.
N_COLOURS = 8
_DASHES = ("solid", "dash", "dot", "dashdot")
_MARKERS = ("circle", "square", "triangle-up", "diamond", "cross", "x")
#: Most points of a curve that shows them as markers.
_SHOWN_POINTS = 24
#: Four significant digits with thousands separators, in d3's format.
_NUMBER = ",.4~r"


class Colours:
    """Colour numbers, one for each name on the whole page. Names of a kind (policy, domain, phase,
    ...) get colours in order of appearance."""

    def __init__(self) -> None:
        self._names: dict[str, dict[str, int]] = {}

    def __call__(self, kind: str, name: str) -> int:
        """Return the colour number of a name; from ``N_COLOURS`` on, colours repeat."""
        names = self._names.setdefault(kind, {})
        return names.setdefault(name, len(names))


@dataclass(frozen=True)
class Series:
    """One curve or cloud of points."""

    name: str  #: name in the legend
    #: ``x``, ``y``: coordinates, shape [n].
    x: Sequence[float]
    y: Sequence[float]
    #: ``low``, ``high``: ends of an interval around ``y``, or None; NaN for points without one.
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    line: bool = True  #: whether a line joins the points
    colour: int = 0  #: colour number; see :class:`Colours`
    style: int = 0  #: number of the dash or marker that distinguishes series of one colour
    #: Additional hover text of each point.
    tips: Sequence[str] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Picture:
    """A picture of a page."""

    title: str
    axes: str  #: description of the axes
    spec: Spec  #: Plotly's ``data`` and ``layout``; ``data`` is empty without known values
    note: str | None = None  #: line under the picture


def curves(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    *,
    interval: str = "95% interval",
    warmups_s: Sequence[float] = (),
    note: str | None = None,
) -> Picture:
    """Draw curves or points over two numeric axes; points that are not finite are left out.
    ``interval``: name of the interval from ``low`` to ``high``; ``warmups_s``: ends of warm-up
    periods to shade, s, if ``x`` is simulated time."""
    drawn = [_finite(s) for s in series]
    # Values that are never negative get no axis below 0, even if an interval reaches there.
    floor = 0.0 if all(y >= 0 for s in drawn for y in s.y) else -math.inf
    hover = [f"{_text(x_label)}: %{{x:{_NUMBER}}}", f"{_text(y_label)}: %{{y:{_NUMBER}}}"]
    if len(drawn) > 1:
        hover.insert(0, "%{fullData.name}")
    data: list[Spec] = []
    for s in drawn:
        data += _curve(s, "<br>".join(hover), interval, floor) if s.x else []
    layout: Spec = {"showlegend": len(drawn) > 1}
    if warmups_s:
        layout |= _warmups(warmups_s)
    return _picture(title, (x_label, y_label), data, layout, note)


def intervals(
    title: str,
    x_label: str,
    rows: Sequence[tuple[str, float, float, float, int]],
    *,
    differences: bool = True,
    interval: str = "95% interval",
) -> Picture:
    """Draw a dot with its interval for each row: (name, value, low, high, colour number). ``low``
    and ``high`` may be NaN. ``differences``: whether values are differences: signed, with a line at
    0 and hollow dots if the interval contains 0."""
    form = "+,.2f" if differences else _NUMBER
    data: list[Spec] = []
    for name, value, low, high, colour in rows:
        if not math.isfinite(value):
            continue
        is_finite = math.isfinite(low) and math.isfinite(high)
        clear = not differences or (is_finite and (low > 0 or high < 0))
        hover = f"%{{y}}<br>{_text(x_label)}: %{{x:{form}}}"
        dot: Spec = {"type": "scatter", "mode": "markers", "name": _text(name)}
        dot |= {"x": [value], "y": [_text(name)]}
        dot["marker"] = {"color": _colour(colour), "size": 10}
        if not clear:
            dot["marker"]["symbol"] = "circle-open"
        if is_finite:
            ends = {"array": [high - value], "arrayminus": [value - low]}
            dot["error_x"] = {"type": "data", "symmetric": False, "color": _colour(colour), **ends}
            dot["customdata"] = [[low, high]]
            hover += f"<br>{interval}: %{{customdata[0]:{form}}} to %{{customdata[1]:{form}}}"
        data.append(dot | {"hovertemplate": f"{hover}<extra></extra>"})
    layout: Spec = {
        "xaxis": {"rangemode": "tozero" if differences else "normal", "zeroline": differences},
        "yaxis": {"type": "category", "autorange": "reversed"},
        "showlegend": False,
        "height": 120 + 30 * max(2, len(data)),
    }
    return _picture(title, (x_label, ""), data, layout)


def stacked_bars(
    title: str,
    x_label: str,
    y_label: str,
    bars: Sequence[str],
    parts: Sequence[tuple[str, Sequence[float], int]],
) -> Picture:
    """Draw stacked bars; ``parts``: (name, height of the part in each bar, colour number)."""
    totals = [math.fsum(values[i] for _, values, _ in parts) for i in range(len(bars))]
    hover = (
        f"{_text(x_label)} %{{x}}<br>%{{fullData.name}}: %{{y:{_NUMBER}}} "
        f"(%{{customdata[0]:.0f}}%)<br>{_text(y_label)}: %{{customdata[1]:{_NUMBER}}}"
        "<extra></extra>"
    )
    data: list[Spec] = []
    for name, values, colour in parts:
        both = zip(values, totals, strict=True)
        said = [[100 * value / total if total else 0.0, total] for value, total in both]
        bar: Spec = {"type": "bar", "name": _text(name), "x": [_text(each) for each in bars]}
        bar |= {"y": list(values), "customdata": said, "marker": {"color": _colour(colour)}}
        data.append(bar | {"hovertemplate": hover})
    layout: Spec = {"xaxis": {"type": "category"}, "barmode": "stack", "showlegend": True}
    return _picture(title, (x_label, y_label), data if bars else [], layout)


def pareto_picture(
    clouds: Sequence[tuple[str, int, int, Sequence[tuple[float, float, str]]]],
) -> Picture:
    """Draw tokens/s per user against tokens/s per GPU, with the Pareto front. ``clouds``: (name,
    colour, marker, points), a point (tokens/s per user, per GPU, name)."""
    points = sorted({point for *_, own in clouds for point in own}, key=lambda point: point[2])
    front = [points[i] for i in pareto([(x, y) for x, y, _ in points])]
    # The front is drawn first, under the points, in a neutral colour.
    series = [_cloud("Pareto front", -1, 1, front, line=True)]
    series += [_cloud(name, colour, mark, own, False) for name, colour, mark, own in clouds]
    title = "Throughput of a GPU against speed for a user"
    labels = "output tokens/s for a user (1 / median TPOT)", "output tokens/s of a GPU"
    note = "Up and to the right is better; no point beats one of the front in both."
    return curves(title, *labels, series, note=note)


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the Pareto-optimal points, in ascending order of the first coordinate.
    Of equal points the first is kept; points that are not finite are left out."""
    known = [i for i, point in enumerate(points) if all(math.isfinite(v) for v in point)]
    front: list[int] = []
    for i in sorted(known, key=lambda i: (-points[i][0], -points[i][1], i)):
        if not front or points[i][1] > points[front[-1]][1]:
            front.append(i)
    return front[::-1]


def _cloud(
    name: str, colour: int, style: int, points: Sequence[tuple[float, float, str]], line: bool
) -> Series:
    x, y, tips = zip(*points, strict=True) if points else ((), (), ())
    return Series(name, x, y, line=line, colour=colour, style=style, tips=tips)


def _finite(series: Series) -> Series:
    places = zip(series.x, series.y, strict=True)
    keep = [i for i, (x, y) in enumerate(places) if math.isfinite(x) and math.isfinite(y)]
    columns = {name: getattr(series, name) for name in ("x", "y", "low", "high", "tips")}
    picked: Spec = {k: None if v is None else [v[i] for i in keep] for k, v in columns.items()}
    for name in ("x", "y", "low", "high"):
        if picked[name] is not None:  # six digits keep a page small
            picked[name] = list(map(six_digits, picked[name]))
    return replace(series, **picked)


def _curve(s: Series, hover: str, interval: str, floor: float) -> list[Spec]:
    shown = "lines+markers" if len(s.x) <= _SHOWN_POINTS else "lines"
    colour = {"color": _colour(s.colour)}
    trace: Spec = {
        "type": "scatter",
        "mode": shown if s.line else "markers",
        "name": _text(s.name),
        "legendgroup": _text(s.name),
        "x": s.x,
        "y": s.y,
        "line": colour | {"dash": _DASHES[s.style % len(_DASHES)]},
        "marker": colour | {"size": 8, "symbol": _MARKERS[s.style % len(_MARKERS)]},
    }
    tips = s.tips or [""] * len(s.x)
    ends = list(zip(s.low or [math.nan] * len(s.x), s.high or [math.nan] * len(s.x), strict=True))
    finite = [i for i, (low, high) in enumerate(ends) if math.isfinite(low) and math.isfinite(high)]
    said = [""] * len(s.x)
    for i in finite:
        said[i] = f"<br>{interval}: {number(ends[i][0])} to {number(ends[i][1])}"
    both = zip(said, tips, strict=True)
    tips = [a + (f"<br>{_text(b)}" if b else "") for a, b in both]
    trace["hovertemplate"] = hover + ("%{customdata}" if any(tips) else "") + "<extra></extra>"
    if any(tips):
        trace["customdata"] = tips
    drawn = {i: (max(floor, ends[i][0]), ends[i][1]) for i in finite}
    if s.line and len(finite) > 1:
        return [_band(s, drawn), trace]
    if finite:
        above = [drawn[i][1] - y if i in drawn else None for i, y in enumerate(s.y)]
        below = [y - drawn[i][0] if i in drawn else None for i, y in enumerate(s.y)]
        trace["error_y"] = {"type": "data", "symmetric": False, **colour}
        trace["error_y"] |= {"array": above, "arrayminus": below}
    return [trace]


def _band(s: Series, ends: Mapping[int, tuple[float, float]]) -> Spec:
    there, back = list(ends), list(ends)[::-1]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [s.x[i] for i in there + back],
        "y": [ends[i][1] for i in there] + [ends[i][0] for i in back],
        "fill": "toself",
        "fillcolor": _colour(s.colour),
        "line": {"width": 0},
        "opacity": 0.17,
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": _text(s.name),
    }


def _warmups(ends_s: Sequence[float]) -> Spec:
    """Return shapes over the warm-up periods, labelled once."""
    ends = sorted({end for end in ends_s if end > 0})
    shape = {"type": "rect", "yref": "paper", "x0": 0, "y0": 0, "y1": 1, "layer": "below"}
    shape |= {"fillcolor": "var(--soft)", "opacity": 0.13, "line": {"width": 0}}
    name = {"text": "warm-up", "x": 0, "y": 1, "yref": "paper", "showarrow": False}
    name |= {"xanchor": "left", "yanchor": "top"}
    return {"shapes": [shape | {"x1": end} for end in ends], "annotations": [name] if ends else []}


def _picture(
    title: str, labels: tuple[str, str], data: list[Spec], layout: Spec, note: str | None = None
) -> Picture:
    for axis, label in zip(("xaxis", "yaxis"), labels, strict=True):
        layout[axis] = {"title": {"text": _text(label)}} | layout.get(axis, {})
    layout["yaxis"].setdefault("rangemode", "tozero")
    if layout["showlegend"]:
        # The legend is above the picture, with about three names per line.
        names = sum(trace.get("showlegend", True) for trace in data)
        layout["height"] = 320 + 20 * math.ceil(names / 3)
    axes = " against ".join(label for label in reversed(labels) if label)
    return Picture(title, axes, {"data": data, "layout": layout}, note)


def _colour(number: int) -> str:
    return "var(--soft)" if number < 0 else f"var(--c{number % N_COLOURS})"
