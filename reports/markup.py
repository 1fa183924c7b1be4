"""Elements, tables and numbers of a page.

A page is a tree of :class:`xml.etree.ElementTree.Element`; text becomes HTML only when the tree is
written, so whatever a file holds stays text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any
from xml.etree import ElementTree as ET

#: A cell: text, a number, nothing, or an element.
Cell = str | int | float | ET.Element | None

MISSING = "–"
#: A table of more rows scrolls in its box.
_LONG = 30


def el(tag: str, *children: ET.Element | str | None, **attributes: object) -> ET.Element:
    """Return an element; ``class_`` and ``data_tip`` become ``class`` and ``data-tip``.

    Children and attributes that are None are left out.
    """
    element = ET.Element(tag)
    for name, value in attributes.items():
        if value is not None:
            element.set(name.rstrip("_").replace("_", "-"), str(value))
    return add(element, *children)


def add(element: ET.Element, *children: ET.Element | str | None) -> ET.Element:
    """Append elements and text to an element and return it."""
    for child in children:
        if child is None:
            continue
        if not isinstance(child, str):
            element.append(child)
        elif len(element):
            element[-1].tail = (element[-1].tail or "") + child
        else:
            element.text = (element.text or "") + child
    return element


def to_html(element: ET.Element) -> str:
    """Return the HTML of a tree."""
    return ET.tostring(element, encoding="unicode", method="html")


def number(value: float | int | None) -> str:
    """Return a number for reading: about four significant digits, thousands apart."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if size >= 1000:
        text = f"{value:,.0f}"
    elif size >= 100:
        text = f"{value:.1f}"
    elif size >= 1 or value == 0:
        text = f"{value:.2f}"
    else:
        text = f"{value:.4f}" if size >= 0.001 else f"{value:.2g}"
    return text.replace("-", "−")


def signed(value: float | None, digits: int = 2) -> str:
    """Return a number with its sign."""
    if value is None or math.isnan(value):
        return MISSING
    return f"{value:+.{digits}f}".replace("-", "−")


def decimals(largest: float) -> int:
    """Return how many decimals figures of a size are shown with."""
    return 0 if largest >= 1000 else 1 if largest >= 100 else 2 if largest >= 1 else 4


def span(mean: float, low: float, high: float, *, signs: bool = False) -> str:
    """Return a value with its interval, all with the same decimals; NaN ends are left out."""
    known = [abs(value) for value in (mean, low, high) if math.isfinite(value)]
    if not known or math.isnan(mean):
        return MISSING
    form = f"{'+' if signs else ''},.{decimals(max(known))}f"
    text = f"{mean:{form}}"
    if math.isfinite(low) and math.isfinite(high):
        text += f" [{low:{form}}, {high:{form}}]"
    return text.replace("-", "−")


def measured(value: float | None, text: str) -> ET.Element:
    """Return a cell that shows ``text`` and sorts by ``value``."""
    missing = value is None or math.isnan(value)
    return el("data", text, value="" if missing else repr(value))


def table(
    caption: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, note: str | None = None
) -> ET.Element:
    """Return a table that a click on a heading sorts; it scrolls inside its own box.

    A column of numbers is set to the right. Each number keeps its full value beside the rounded
    one, in ``data-value``: that is what sorts.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    for i in range(len(columns)):
        own = [row[i] for row in cells]
        if any("data-value" in cell.attrib for cell in own):
            for cell in own:
                cell.set("class", "n")
    head = el("tr")
    for column in columns:
        head.append(el("th", el("button", column, type="button"), scope="col", aria_sort="none"))
    body = el("tbody")
    for row in cells:
        if row:
            row[0].tag = "th"
            row[0].set("scope", "row")
        body.append(add(el("tr"), *row))
    drawn = el("table", el("caption", caption), el("thead", head), body, class_="sortable")
    box = el("div", drawn, class_="scroll", tabindex="0", role="region", aria_label=caption)
    size = " long" if len(cells) > _LONG else " narrow" if len(columns) == 2 else ""
    return el("div", box, el("p", note, class_="note") if note else None, class_=f"table{size}")


def _cell(value: Cell) -> ET.Element:
    if isinstance(value, ET.Element):
        cell = el("td", value)
        if value.tag == "data":
            cell.set("data-value", value.get("value", ""))
        return cell
    if isinstance(value, int | float) and not isinstance(value, bool):
        missing = isinstance(value, float) and math.isnan(value)
        return el("td", number(value), data_value="" if missing else repr(value))
    if value is None:
        return el("td", MISSING, data_value="")
    return el("td", number(value) if isinstance(value, bool) else value)


def figures(pairs: Iterable[tuple[str, str, str]]) -> ET.Element:
    """Return headline figures: (name, value, unit or remark)."""
    box = el("dl", class_="headline")
    for name, value, unit in pairs:
        box.append(el("div", el("dt", name), el("dd", el("b", value), " ", el("span", unit))))
    return box


def folded(title: str, *content: ET.Element) -> ET.Element:
    """Return content that a click unfolds."""
    return el("details", el("summary", title), *content)


def bullets(lines: Iterable[str], class_: str | None = None) -> ET.Element:
    """Return a list, a line each."""
    return add(el("ul", class_=class_), *(el("li", line) for line in lines))


def plain(value: Any) -> str:
    """Return a configuration value as a user would type it."""
    if value is None:
        return "not given"
    if isinstance(value, dict):
        return ", ".join(f"{k} {plain(v)}" for k, v in value.items() if v is not None) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(plain(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
