"""A few figures of a result: how it looks where Python prints it, and in notebooks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

MOST_ROWS = 10  #: rows that are shown of a result


class Headline(NamedTuple):
    """A small table."""

    #: ``title``, ``columns``, ``rows``: the table; of the rows :data:`MOST_ROWS` are shown.
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 0  #: rows that the result has beside these


class Shown(ABC):
    """A result that shows its headline instead of all that it holds."""

    @abstractmethod
    def headline(self) -> Headline:
        """Return a few figures of the result."""

    def __repr__(self) -> str:
        title, columns, rows, left = _shown(self.headline())
        table = [columns, *rows]
        widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        more = [f"... and {left} more"] if left else []
        return "\n".join([f"{type(self).__name__}: {title}", *lines, *more])

    def _repr_html_(self) -> str:
        title, columns, rows, left = _shown(self.headline())
        head = "".join(f"<th>{escape(column)}</th>" for column in columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
        )
        more = f"<p>... and {left} more</p>" if left else ""
        caption = escape(f"{type(self).__name__}: {title}")
        return (
            f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table>{more}"
        )


def number(value: Any) -> str:
    """Return a figure as text: numbers with four digits, ``-`` for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def _shown(headline: Headline) -> Headline:
    rows = headline.rows[:MOST_ROWS]
    return headline._replace(rows=rows, left=headline.left + len(headline.rows) - len(rows))
