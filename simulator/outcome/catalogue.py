"""The metric catalogue: tag, heading, unit, meaning and direction of every figure of a result.

Tags are the names in ``summary.json`` and the columns of tables; tags and headings are those of
``vllm bench serve`` where it has them. The figures stand in ``metrics.csv``. Console tables,
comparisons, pages and the table of docs/metrics.md are made from them. To renew that table::

    python -m eldr_sim.simulator.outcome.catalogue docs/metrics.md

`Headline` is a few figures of a result: how Python and notebooks print it."""

import csv
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
        from html import escape

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
    """Return a figure as text.

    Args:
        value: a number, text or None.

    Returns:
        Numbers with four significant digits, ``-`` for None.
    """
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def _shown(headline: Headline) -> Headline:
    rows = headline.rows[:MOST_ROWS]
    return headline._replace(rows=rows, left=headline.left + len(headline.rows) - len(rows))


#: Statistics of a latency: the tag is ``{statistic}_{latency}_ms``.
STATISTICS = ("mean", "median", "std", "p50", "p90", "p99")
_LATENCIES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True)
class Metric:
    """One figure of a result."""

    tag: str  #: its name in ``summary.json`` and its column in tables
    heading: str  #: its name for readers, without the unit
    unit: str  #: empty for shares and ratios
    better: Literal["lower", "higher"] | None  #: which direction is better; None where neither is
    meaning: str  #: its formula in one line of Markdown; docs/metrics.md has the symbols


with (Path(__file__).parent / "metrics.csv").open(encoding="utf-8", newline="") as _file:
    _LISTED = [Metric(**row | {"better": row["better"] or None}) for row in csv.DictReader(_file)]
#: The latencies of requests and tokens, of which the results hold :data:`STATISTICS`.
LATENCIES = {metric.tag: metric for metric in _LISTED if metric.tag in _LATENCIES}
_OTHERS = [metric for metric in _LISTED if metric.tag not in _LATENCIES]
_STATISTICS = [
    replace(
        latency,
        tag=f"{name}_{latency.tag}_ms",
        heading=f"{name.capitalize()} {latency.tag.upper()}",
    )
    for latency in LATENCIES.values()
    for name in STATISTICS
]
#: Every metric by its tag.
METRICS = {metric.tag: metric for metric in (*_STATISTICS, *_OTHERS)}
#: What tables of several runs show.
HEADLINE = (
    "median_tpot_ms", "p99_tpot_ms", "median_ttft_ms", "p99_ttft_ms",
    "mean_active_experts_per_step", "mean_active_experts_per_token", "output_throughput",
)  # fmt: skip
#: The same where requests end with their prompts.
PREFILL_HEADLINE = (
    "median_ttft_ms", "p99_ttft_ms", "prefill_throughput", "computed_prompt_throughput",
    "prefill_mfu", "makespan_s",
)  # fmt: skip


def headline_tags(prefill_only: bool) -> tuple[str, ...]:
    """Return what tables of several runs show."""
    return PREFILL_HEADLINE if prefill_only else HEADLINE


def heading(tag: str) -> str:
    """Return the heading of a metric without its unit, such as ``P99 TPOT``."""
    return METRICS[tag].heading


def unit(tag: str) -> str:
    """Return the unit of a metric; empty for shares and ratios."""
    return METRICS[tag].unit


def label(tag: str) -> str:
    """Return heading and unit of a figure as vLLM prints them.

    Args:
        tag: name of the figure, such as ``p99_tpot_ms``.

    Returns:
        Such as ``P99 TPOT (ms)``.
    """
    metric = METRICS[tag]
    return f"{metric.heading} ({metric.unit})" if metric.unit else metric.heading


def better(tag: str) -> Literal["lower", "higher"] | None:
    """Return which direction of a metric is better; None where neither is."""
    return METRICS[tag].better


_BEGIN, _END = "<!-- catalogue: begin -->", "<!-- catalogue: end -->"


def markdown_table() -> str:
    """Return the catalogue as a Markdown table, the statistics of a latency in one row."""
    rows = [
        (
            f"`{{{','.join(STATISTICS)}}}_{latency.tag}_ms`",
            f"Mean {latency.tag.upper()}, ...",
            latency.unit,
            latency.better or "",
            latency.meaning,
        )
        for latency in LATENCIES.values()
    ]
    rows += [(f"`{m.tag}`", m.heading, m.unit, m.better or "", m.meaning) for m in _OTHERS]
    head = [("field", "heading", "unit", "better", "meaning"), ("---",) * 5]
    return "\n".join("| " + " | ".join(row) + " |" for row in [*head, *rows])


def with_table(page: str) -> str:
    """Return a Markdown page with the table between its two markers renewed."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"no {_BEGIN} ... {_END}")
    return f"{before}{begin}\n{markdown_table()}\n{end}{after}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
