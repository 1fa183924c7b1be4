"""Pictures as inline SVG: curves and points, intervals, stacked bars.

Colours are classes (``c0`` to ``c7``), so that the style sheet sets them for light, dark and print.
Every mark carries in ``data-tip`` what the page's script shows beside it, by pointer or arrow keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree as ET

from eldr_sim.reports.markup import MISSING, add, el, number, signed
from eldr_sim.reports.scales import Scale, linear

WIDTH, HEIGHT = 480.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 24.0, 32.0, 46.0
#: Colours of the style sheet; later series repeat them with another dash or marker.
N_COLOURS = 8
#: A curve of at most so many points shows them.
_SHOWN_POINTS = 24


@dataclass(frozen=True)
class Series:
    """One curve or cloud of points.

    Attributes
    ----------
    name
        As the legend has it.
    x, y
        Places, shape [n].
    low, high
        Ends of an interval around ``y``, where there is one; NaN where a point has none.
    line
        Join the points.
    colour, dash
        Numbers of the colour and of the dash; from its place among the series when not given.
    tips
        What more to say of each point, a line.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    line: bool = True
    colour: int | None = None
    dash: int | None = None
    tips: Sequence[str] | None = field(default=None, repr=False)


def xy_chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    *,
    interval: str = "95% interval",
    y_zero: bool = True,
    x_zero: bool = False,
    note: str | None = None,
) -> ET.Element:
    """Draw curves or points over two numeric axes.

    Parameters
    ----------
    title
        What the picture shows.
    x_label, y_label
        Axis titles with units.
    series
        What to draw; points that are not finite are left out.
    interval
        What ``low`` and ``high`` are.
    y_zero, x_zero
        Let the axis begin at 0.
    note
        A line under the picture.
    """
    drawn = [_finite(s) for s in series]
    ys = [v for s in drawn for v in s.y]
    # What is never below 0 gets no axis below 0, whatever Student's t makes of few runs.
    floor = 0.0 if y_zero and min(ys, default=0.0) >= 0.0 else -math.inf
    ys += [max(floor, v) for s in drawn for c in (s.low or (), s.high or ()) for v in c]
    x = linear((v for s in drawn for v in s.x), _LEFT, WIDTH - _RIGHT, zero=x_zero)
    y = linear(ys, HEIGHT - _BOTTOM, _TOP, zero=y_zero)
    svg = _canvas(title, x_label, y_label, HEIGHT)
    add(svg, _y_axis(y), _x_axis(x, HEIGHT - _BOTTOM))
    marks = el("g")
    styles = []
    for index, s in enumerate(drawn):
        colour = index if s.colour is None else s.colour
        style = _style(colour, index // N_COLOURS if s.dash is None else s.dash)
        styles.append((s.name, colour, "line" if s.line else "mark", style))
        places = [(x(a), y(b)) for a, b in zip(s.x, s.y, strict=True)]
        if s.low is not None and s.high is not None:
            _draw_interval(svg, s, x, y, style)
        if s.line and len(places) > 1:
            svg.append(el("path", d=_path(places), class_=f"line {style}"))
        shown = not s.line or len(places) <= _SHOWN_POINTS
        counts = all(v == round(v) for v in s.x)
        for i, (px, py) in enumerate(places):
            at = number(round(s.x[i]) if counts else s.x[i])
            text = [s.name] if s.name else []
            text += [f"{x_label}: {at}", f"{y_label}: {number(s.y[i])}"]
            if s.low is not None and s.high is not None and math.isfinite(s.low[i]):
                text.append(f"{interval}: {number(s.low[i])} to {number(s.high[i])}")
            if s.tips is not None and s.tips[i]:
                text.append(s.tips[i])
            marker = colour // N_COLOURS if s.line else colour
            marks.append(_mark(px, py, text, f"mark {style}" if shown else "hit", marker))
    svg.append(marks)
    legend = _legend(styles) if len(drawn) > 1 else None
    return _figure(title, svg, legend, note, bool(ys))


def interval_chart(
    title: str,
    x_label: str,
    rows: Sequence[tuple[str, float, float, float]],
    *,
    differences: bool = True,
    interval: str = "95% interval",
) -> ET.Element:
    """Draw a dot with its interval for each row.

    Parameters
    ----------
    title
        What the picture shows.
    x_label
        Axis title with its unit.
    rows
        (name, value, low, high); ``low`` and ``high`` may be NaN.
    differences
        Values are differences: signed, around a line at 0, dots hollow where the interval holds 0.
    interval
        What ``low`` and ``high`` are.
    """
    height = _TOP + _BOTTOM + 30.0 * max(1, len(rows))
    left = min(180.0, 24.0 + 7.6 * max((len(name) for name, *_ in rows), default=0))
    values = [v for _, *numbers in rows for v in numbers]
    x = linear(values, left, WIDTH - _RIGHT, zero=differences)
    svg = _canvas(title, x_label, "", height)
    add(svg, _x_axis(x, height - _BOTTOM, grid=_TOP - 8))
    if differences:
        svg.append(_line(x(0.0), _TOP - 8, x(0.0), height - _BOTTOM, "zero"))
    show = signed if differences else number
    for i, (name, value, low, high) in enumerate(rows):
        py = _TOP + 30.0 * i + 15.0
        svg.append(el("text", _shorten(name, 22), x=_n(left - 10), y=_n(py + 4), class_="row"))
        if not math.isfinite(value):
            svg.append(el("text", MISSING, x=_n(left), y=_n(py + 4), class_="row start"))
            continue
        text = [name, f"{x_label}: {show(value)}"]
        known = math.isfinite(low)
        clear = not differences or (known and (low > 0.0 or high < 0.0))
        style = f"c{0 if clear else 6}"
        if known:
            text.append(f"{interval}: {show(low)} to {show(high)}")
            svg.append(_line(x(low), py, x(high), py, f"whisker {style}"))
            svg.extend(_line(x(v), py - 5, x(v), py + 5, f"whisker {style}") for v in (low, high))
        svg.append(_mark(x(value), py, text, f"mark {style}" + ("" if clear else " open"), 0))
    return _figure(title, svg, None, None, any(math.isfinite(v) for v in values))


def stacked_bars(
    title: str,
    x_label: str,
    y_label: str,
    bars: Sequence[str],
    parts: Sequence[tuple[str, Sequence[float]]],
    *,
    note: str | None = None,
) -> ET.Element:
    """Draw bars made of parts.

    Parameters
    ----------
    title
        What the picture shows.
    x_label, y_label
        Axis titles with units.
    bars
        Name of each bar.
    parts
        (name, height of the part in each bar).
    note
        A line under the picture.
    """
    totals = [math.fsum(values[i] for _, values in parts) for i in range(len(bars))]
    y = linear(totals, HEIGHT - _BOTTOM, _TOP, zero=True)
    svg = _canvas(title, x_label, y_label, HEIGHT)
    svg.append(_y_axis(y))
    pitch = (WIDTH - _RIGHT - _LEFT) / max(1, len(bars))
    wide = max(1.0, min(64.0, pitch * 0.78))
    every = max(1, math.ceil(max((len(b) for b in bars), default=1) * 8.0 / pitch))
    for i, bar in enumerate(bars):
        middle = _LEFT + pitch * (i + 0.5)
        if i % every == 0:
            label = _shorten(bar, max(3, int(pitch * every / 7)))
            place = {"x": _n(middle), "y": _n(HEIGHT - _BOTTOM + 17)}
            svg.append(el("text", label, **place, class_="tick middle"))
        bottom = 0.0
        for colour, (name, values) in enumerate(parts):
            if values[i] <= 0:
                continue
            top = bottom + values[i]
            share = 100 * values[i] / totals[i]
            text = f"{x_label} {bar}\n{name}: {number(values[i])} ({share:.0f}%)\n"
            svg.append(
                el(
                    "rect",
                    x=_n(middle - wide / 2),
                    y=_n(y(top)),
                    width=_n(wide),
                    height=_n(y(bottom) - y(top)),
                    class_=f"bar {_style(colour)}",
                    data_x=_n(middle),
                    data_y=_n(y(top)),
                    data_tip=f"{text}{y_label}: {number(totals[i])}",
                )
            )
            bottom = top
    legend = [(name, colour, "bar", _style(colour)) for colour, (name, _) in enumerate(parts)]
    return _figure(title, svg, _legend(legend), note, bool(bars))


def _finite(series: Series) -> Series:
    """Return a series without the points that have no place."""
    keep = [
        i
        for i, (x, y) in enumerate(zip(series.x, series.y, strict=True))
        if math.isfinite(x) and math.isfinite(y)
    ]

    def pick(values: Sequence[float] | None) -> list[float] | None:
        return None if values is None else [float(values[i]) for i in keep]

    tips = None if series.tips is None else [series.tips[i] for i in keep]
    return Series(
        series.name,
        pick(series.x) or [],
        pick(series.y) or [],
        pick(series.low),
        pick(series.high),
        series.line,
        series.colour,
        series.dash,
        tips,
    )


def _draw_interval(svg: ET.Element, series: Series, x: Scale, y: Scale, style: str) -> None:
    assert series.low is not None
    assert series.high is not None
    known = [
        (x(a), y(max(low, y.low)), y(min(high, y.high)))
        for a, low, high in zip(series.x, series.low, series.high, strict=True)
        if math.isfinite(low) and math.isfinite(high)
    ]
    if series.line and len(known) > 1:
        outline = [(a, top) for a, _, top in known] + [(a, low) for a, low, _ in reversed(known)]
        svg.append(el("path", d=_path(outline) + "Z", class_=f"band {style}"))
    else:
        svg.extend(_line(a, low, a, high, f"whisker {style}") for a, low, high in known)


def _canvas(title: str, x_label: str, y_label: str, height: float) -> ET.Element:
    axes = f"{y_label} against {x_label}" if y_label else x_label
    svg = el(
        "svg",
        viewBox=f"0 0 {_n(WIDTH)} {_n(height)}",
        role="img",
        tabindex="0",
        aria_label=f"{title}: {axes}. Arrow keys read the values.",
    )
    place = {"x": _n((_LEFT + WIDTH - _RIGHT) / 2), "y": _n(height - 8)}
    svg.append(el("text", x_label, **place, class_="axis middle"))
    if y_label:
        svg.append(el("text", y_label, x="4", y="16", class_="axis"))
    return svg


def _y_axis(scale: Scale) -> ET.Element:
    axis = el("g", class_="grid")
    for tick in scale.ticks:
        at = scale(tick)
        axis.append(_line(_LEFT, at, WIDTH - _RIGHT, at))
        axis.append(el("text", scale.text(tick), x=_n(_LEFT - 8), y=_n(at + 4), class_="tick end"))
    return axis


def _x_axis(scale: Scale, bottom: float, grid: float | None = None) -> ET.Element:
    axis = el("g", class_="grid")
    for tick in scale.ticks:
        at = scale(tick)
        axis.append(_line(at, bottom, at, bottom + 5 if grid is None else grid))
        place = {"x": _n(at), "y": _n(bottom + 17)}
        axis.append(el("text", scale.text(tick), **place, class_="tick middle"))
    axis.append(_line(scale.start, bottom, scale.end, bottom, "base"))
    return axis


def _mark(x: float, y: float, tip: Sequence[str], class_: str, marker: int) -> ET.Element:
    place = {"data_x": _n(x), "data_y": _n(y), "data_tip": "\n".join(tip), "class_": class_}
    if class_ == "hit":
        return el("circle", cx=_n(x), cy=_n(y), r="3", **place)
    return el("path", d=_marker(x, y, marker), **place)


def _marker(x: float, y: float, which: int) -> str:
    """Return a circle, square, triangle or diamond about a place."""
    shape = which % 4
    if shape == 0:
        return f"M{_n(x - 4)} {_n(y)}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z"
    if shape == 1:
        return f"M{_n(x - 3.6)} {_n(y - 3.6)}h7.2v7.2h-7.2Z"
    if shape == 2:
        return f"M{_n(x)} {_n(y - 4.8)}l4.6 8.2h-9.2Z"
    return f"M{_n(x)} {_n(y - 5.2)}l5.2 5.2l-5.2 5.2l-5.2 -5.2Z"


def _legend(entries: Sequence[tuple[str, int, str, str]]) -> ET.Element:
    """Return name and swatch of each (name, colour, shape, style); shapes: line, mark or bar."""
    box = el("ul", class_="legend")
    for name, colour, shape, style in entries:
        path = {"line": "M1 6H21", "bar": "M5 0h12v12h-12Z"}.get(shape) or _marker(11, 6, colour)
        swatch = el("svg", el("path", d=path, class_=f"{shape} {style}"), viewBox="0 0 22 12")
        swatch.set("aria-hidden", "true")
        box.append(el("li", swatch, name))
    return box


def _style(colour: int, dash: int = 0) -> str:
    return f"c{colour % N_COLOURS} d{dash % 3}"


def _figure(
    title: str, svg: ET.Element, legend: ET.Element | None, note: str | None, known: bool
) -> ET.Element:
    body = svg if known else el("p", "Nothing to draw: no value is known.", class_="note")
    below = el("p", note, class_="note") if note else None
    return el("figure", el("figcaption", title), legend, body, below, class_="chart")


def _line(x1: float, y1: float, x2: float, y2: float, class_: str | None = None) -> ET.Element:
    return el("line", x1=_n(x1), y1=_n(y1), x2=_n(x2), y2=_n(y2), class_=class_)


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in places)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0").replace("-0.0", "0")


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
