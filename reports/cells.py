"""Tables of a page: text and sort key of each cell."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MISSING = "–"


class Cell(NamedTuple):
    """A cell of a table."""

    text: str  #: text shown
    #: Full value as the sort key, empty if missing; None sorts by the text.
    value: str | None = None


#: Value of a cell; see :func:`cell`.
Value = Cell | str | int | float | None


@dataclass(frozen=True)
class Table:
    """A sortable table."""

    caption: str
    columns: Sequence[str]  #: headings
    rows: Sequence[Sequence[Cell]]  #: cells of each row, one per column
    numeric: Sequence[bool]  #: whether each column holds numbers
    note: str | None = None  #: line under the table


def table(
    caption: str, columns: Sequence[str], rows: Iterable[Sequence[Value]], note: str | None = None
) -> Table:
    """Return a table of values; see :class:`Table`."""
    cells = [[cell(value) for value in row] for row in rows]
    numeric = [any(row[i].value is not None for row in cells) for i in range(len(columns))]
    return Table(caption, columns, cells, numeric, note)


def cell(value: Value) -> Cell:
    """Return the cell of a value: a rounded number, or text unchanged."""
    if isinstance(value, Cell):
        return value
    if isinstance(value, str):
        return Cell(value)
    return Cell(number(value)) if isinstance(value, bool) else measured(value, number(value))


def measured(value: float | None, text: str) -> Cell:
    """Return a cell that shows ``text`` and sorts by ``value``."""
    return Cell(text, "" if value is None or math.isnan(value) else repr(value))


def number(value: float | int | None) -> str:
    """Return a number with about four significant digits and thousands separators."""
    if value is None or math.isnan(value):
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if 0 < size < 0.001:
        return f"{value:.2g}".replace("-", "−")
    return f"{value:,.{decimals(size)}f}".replace("-", "−")


def decimals(largest: float) -> int:
    """Return the number of decimals for values of a size."""
    if largest >= 100:
        return 0 if largest >= 1000 else 1
    return 2 if largest >= 1 or not largest else 4


def interval(mean: float, low: float, high: float, *, signs: bool = False) -> str:
    """Return a value with its interval, with equal decimals; NaN ends are left out."""
    known = [abs(value) for value in (mean, low, high) if math.isfinite(value)]
    if not known or math.isnan(mean):
        return MISSING
    form = f"{'+' if signs else ''},.{decimals(max(known))}f"
    text = f"{mean:{form}}"
    if math.isfinite(low) and math.isfinite(high):
        text += f" [{low:{form}}, {high:{form}}]"
    return text.replace("-", "−")


def difference(percent: float, low: float, high: float) -> Cell:
    """Return a difference with its interval as a cell that sorts by the difference."""
    return measured(percent, interval(percent, low, high, signs=True))


def mean_cell(mean: float | None, low: float | None, high: float | None) -> Value:
    """Return a mean with half the width of its (symmetric) interval, sorting by the mean."""
    if mean is None or low is None or high is None:
        return mean
    form = f",.{decimals(abs(mean))}f"
    return measured(mean, f"{mean:{form}} ± {(high - low) / 2:{form}}".replace("-", "−"))


def percent(share: float | None) -> str:
    """Return a share as a percentage."""
    return MISSING if share is None else f"{100 * share:.2f}%".replace(".00%", "%")


def nan(value: float | None) -> float:
    """Return a value, or NaN for None."""
    return math.nan if value is None else value


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
