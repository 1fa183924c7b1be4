"""A report's pictures outside its page, as Plotly figures and PNG: specifications with colours that
are variables of the style sheet, here of its light theme."""

import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

from eldr_sim.charts import write_picture
from eldr_sim.errors import PLOT, InputError, needed
from eldr_sim.reports.folders import contents_of, open_folders
from eldr_sim.reports.page import section_of
from eldr_sim.reports.pictures import Colours, Picture

_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_MARKERS = {
    "circle": "o", "square": "s", "triangle-up": "^", "diamond": "D", "cross": "P", "x": "x",
}  # fmt: skip


def pictures_of(path: Path, name: str = "") -> list[Picture]:
    """Return the pictures of a result folder that have something to show. ``name`` stands for the
    folder where a picture names it. Raises InputError if it is no result."""
    (folder,) = open_folders([path])
    folder = replace(folder, name=name or folder.name)
    with contents_of(folder):
        return [p for p in _within(section_of(folder, Colours())) if p.spec["data"]]


def pick(pictures: list[Picture], title: str) -> Picture:
    """Return the first picture with this text in its title, in any case; InputError if none has."""
    for picture in pictures:
        if title.lower() in picture.title.lower():
            return picture
    raise InputError("plot", f"no picture {title!r}", ", ".join(p.title for p in pictures))


def plotly_figure(picture: Picture) -> Any:
    """Return a picture as a `plotly.graph_objects.Figure`."""
    figure = needed("plotly.graph_objects", "plot", PLOT).Figure
    spec = _painted(picture.spec, _palette())
    layout = {"template": "plotly_white", "title": {"text": picture.title}} | spec["layout"]
    layout["height"] = layout.get("height", 300) + 80
    layout["margin"] = {"l": 60, "r": 20, "t": 60, "b": 50}
    return figure(data=spec["data"], layout=layout)


def png_writer(name: str = "") -> Callable[[Path], None]:
    """Return what draws each picture of a result folder into it, as PNG named by its title."""

    def write(folder: Path) -> None:
        for picture in pictures_of(folder, name):
            slug = file = re.sub(r"\W+", "_", picture.title.lower()).strip("_")
            number = 2
            while (path := folder / f"{file}.png").exists():  # against another reference
                file, number = f"{slug}_{number}", number + 1
            write_png(path, picture)

    return write


def write_png(path: Path | IO[bytes], picture: Picture) -> None:
    """Write a picture as PNG, to a path or an open file."""
    spec = _painted(picture.spec, _palette())
    size = (8.0, max(2.5, spec["layout"].get("height", 400) / 80))
    write_picture(path, lambda figure: _draw(figure.subplots(), spec), size, title=picture.title)


def _within(part: Any) -> list[Picture]:
    """Return all pictures in the content of a section, in its order."""
    if isinstance(part, Picture):
        return [part]
    values = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return [picture for value in values for picture in _within(value)]


def _palette() -> dict[str, str]:
    style = (files("eldr_sim.reports") / "assets" / "report.css").read_text(encoding="utf-8")
    return dict(re.findall(r"(--\w+): light-dark\((#\w+),", style))


def _painted(value: Any, palette: dict[str, str]) -> Any:
    """Return a specification with colours for the style sheet's variables."""
    if isinstance(value, dict):
        return {key: _painted(inner, palette) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_painted(inner, palette) for inner in value]
    if isinstance(value, str) and value.startswith("var("):
        return palette[value[4:-1]]
    return value


def _draw(axes: Any, spec: dict[str, Any]) -> None:
    """Draw a specification's traces with matplotlib."""
    layout, heights = spec["layout"], dict[str, float]()
    for trace in spec["data"]:
        name = unescape(trace.get("name", "")) if layout["showlegend"] else None
        if trace["type"] == "bar":
            below = [heights.get(x, 0.0) for x in trace["x"]]
            axes.bar(trace["x"], trace["y"], bottom=below, label=name, **trace["marker"])
            heights |= {x: b + y for x, y, b in zip(trace["x"], trace["y"], below, strict=True)}
        elif "fill" in trace:
            axes.fill(trace["x"], trace["y"], color=trace["fillcolor"], alpha=trace["opacity"])
        else:
            line, marker = trace.get("line", {}), trace["marker"]
            symbol = marker.get("symbol", "circle")
            y = [unescape(y) if isinstance(y, str) else y for y in trace["y"]]
            look = {"color": marker["color"], "markersize": 5, "capsize": 3, "label": name}
            if symbol.endswith("-open"):
                look["markerfacecolor"] = "none"
            axes.errorbar(
                trace["x"],
                y,
                xerr=_ends(trace.get("error_x")),
                yerr=_ends(trace.get("error_y")),
                linestyle=_DASHES[line["dash"]] if "lines" in trace["mode"] else "",
                marker=_MARKERS[symbol.removesuffix("-open")] if "markers" in trace["mode"] else "",
                **look,
            )
    if layout["xaxis"].get("zeroline"):
        axes.axvline(0.0, color="grey", linewidth=0.8)
    for shape in layout.get("shapes", ()):
        axes.axvspan(shape["x0"], shape["x1"], color=shape["fillcolor"], alpha=shape["opacity"])
    for axis, margin in (("x", axes.set_xlim), ("y", axes.set_ylim)):
        about = layout[f"{axis}axis"]
        axes.set(**{f"{axis}label": unescape(about["title"]["text"])})
        if about.get("rangemode") == "tozero" and about.get("type") != "category":
            low, high = axes.get_xlim() if axis == "x" else axes.get_ylim()
            margin(min(low, 0.0), max(high, 0.0))
            if low >= 0.0 or heights:
                margin(0.0, high)
    if layout["yaxis"].get("autorange") == "reversed":
        axes.margins(y=0.2)
        axes.invert_yaxis()


def _ends(error: dict[str, Any] | None) -> list[list[float]] | None:
    """Return how far an interval reaches below and above, or None where there is none."""
    if error is None:
        return None
    return [[end or 0.0 for end in error[side]] for side in ("arrayminus", "array")]
