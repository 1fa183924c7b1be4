"""Report of a campaign as Markdown: the filters of ``templates/report.md``."""

import json
import re
from collections.abc import Iterable
from typing import Any

from eldr_sim.kinds import Row
from eldr_sim.validation.live.report.comparison import grouped
from eldr_sim.validation.live.simulated.timestamps import COMPONENTS

_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
_CAPTIONS = {
    "cdf": "requests up to a latency, live (a line a repeat) and simulated",
    "steps": "predicted against measured step time, each step from its own composition",
    "components": "components of E2E, simulated less live, with the noise floor",
    "distinct": "decode step time against distinct experts at fixed batches, live and calibrated",
}


def markdown(document: Row) -> str:
    """Return the text of a report, from the content of ``comparison.json`` (`live_report`)."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("eldr_sim.validation.live"),
        autoescape=False,  # Markdown
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "fixed": _fixed,
        "grouped": grouped,
        "json": json.dumps,
        "named": _named,
        "percent": _percent,
        "signed": lambda value: _percent(value, sign=True),
        "spent": _spent,
        "where": _where,
    }
    columns, rows = headline_table(document)
    text = environment.get_template("report.md").render(
        document,
        all_setups=list(dict.fromkeys([*document["setups"], *document["not_run"]])),
        captions=_CAPTIONS,
        goal_columns=columns,
        goals=rows,
        place=lambda setup, load, policy: _place(document, setup, load, policy),
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def headline_table(document: Row) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of the table of goals, as plain text."""
    rows = []
    for row in document["headline"]:
        worst = ""
        if row["worst_load"] is not None:
            where = _place(document, row["setup"], row["worst_load"], row["worst_policy"])
            worst = f"{_percent(row['worst_percent'])} ± {_percent(row['worst_noise_percent'])} "
            worst += f"({where})"
        rows.append(
            [
                row["setup"],
                _named(row["figure"]),
                f"{_percent(row['error_percent'])} ± {_percent(row['noise_percent'])}",
                _percent(row["raw_percent"]),
                worst,
                f"{row['goal_percent']:g}%",
                "" if row["loads"] is None else f"{row['loads_met']} of {row['loads']}",
                row["verdict"],
            ]
        )
    columns = ["set-up", "figure", "error ± noise, means of the loads", "without drift"]
    return [*columns, "worst load: error ± noise", "goal", "loads at or under it", "verdict"], rows


def verdict(document: Row) -> str:
    """Return one sentence: whether all figures are predicted to their goal or the noise."""
    named: dict[str, list[str]] = {}
    for row in document["headline"]:
        named.setdefault(row["verdict"], []).append(f"{row['setup']} {_named(row['figure'])}")
    if "missed" not in named:
        return "Verdict: predicted to the goals, or to within the difference between live runs."
    return f"Verdict: not predicted: {', '.join(named['missed'])}."


def _place(document: Row, setup: str, load: str, policy: str) -> str:
    """Name a load, and the policy where the set-up ran several."""
    return f"{load}, {policy}" if len(document["policies_run"][setup]) > 1 else load


def _named(figure: str) -> str:
    """Return ``TTFT p50`` for ``ttft p50``."""
    first, _, rest = figure.partition(" ")
    return f"{_NAMES.get(first, first)} {rest}"


def _where(rows: Iterable[Row], **values: Any) -> list[Row]:
    """Return the rows that have these values."""
    return [row for row in rows if values.items() <= row.items()]


def _spent(parts: Iterable[Row]) -> list[str]:
    """Return the components in which live requests spent any time."""
    live = {row["component"] for row in parts if row["live_ms"]}
    return [component for component in COMPONENTS if component in live]


def _fixed(value: float | None, digits: int, sign: bool = False) -> str:
    """Return a number with fixed decimals, never -0.0."""
    form = f"{'+' if sign else ''}.{digits}f"
    return "-" if value is None else f"{round(value, digits) + 0.0:{form}}"


def _percent(value: float | None, sign: bool = False) -> str:
    return "-" if value is None else f"{_fixed(value, 1, sign)}%"
