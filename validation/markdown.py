"""Tables of the pages that checks write."""

from collections.abc import Iterable, Sequence


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    head, *lines = ["| " + " | ".join(map(str, row)) + " |" for row in (columns, *rows)]
    return [head, "|" + "---|" * len(columns), *lines]
