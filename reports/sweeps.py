"""Section of a sweep: figures against parameters, the Pareto front, every point."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree as ET

import yaml

from eldr_sim.reports.basis import basis
from eldr_sim.reports.charts import Series, interval_chart, xy_chart
from eldr_sim.reports.figures import (
    METRICS,
    MORE_METRICS,
    mean_cell,
    metric_heading,
    parameter_label,
    pareto_chart,
)
from eldr_sim.reports.folders import Folder
from eldr_sim.reports.markup import Cell, add, el, folded, measured, number, plain, table

Row = dict[str, Any]
#: More curves than this are drawn as points, more points without a numeric parameter not at all.
_MOST_CURVES, _MOST_ROWS = 24, 40
#: Figures of a summary that the data set holds as JSON text.
_NESTED = (
    "failed_reasons",
    "lookups_outside_tables",
    "latency_warnings",
    "trace_warnings",
    "provenance",
    "trace",
)


def sweep_section(folder: Folder) -> tuple[str, list[ET.Element]]:
    """Return title and content of a sweep."""
    document = folder.documents["sweep"]
    runs = folder.tables["points"].to_pylist()
    points = folder.tables["aggregate"].to_pylist()
    parameters: list[str] = document["parameters"]
    failed = [run for run in runs if run["status"] != "completed"]
    confidence = f"{100 * document['confidence_level']:g}% interval"
    per_point = len(runs) / max(1, len(points))
    lead = (
        f"{len(points):,} points over {', '.join(parameters)}; {plain(per_point)} "
        f"run{'s' if per_point != 1 else ''} a point"
        + (f", means with {confidence}s over the runs" if per_point > 1 else "")
        + (f"; {len(failed):,} of {len(runs):,} runs failed." if failed else "; no run failed.")
    )
    parts: list[ET.Element] = [el("p", lead, class_="lead")]
    summaries = {run["name"]: _summary(run) for run in reversed(runs) if run not in failed}
    if summaries:
        parts += basis(summaries)
    if failed:
        rows = [[run["name"], run["run"], run["seed"], run["reason"]] for run in failed]
        parts.append(table("Runs that failed", ["point", "run", "seed", "reason"], rows))
    metrics = _metrics(points)
    axes = _Axes(parameters, points)
    charts = el("div", class_="charts")
    add(charts, *(axes.chart(key, label, confidence) for key, label in metrics.items()))
    add(charts, _pareto(axes))
    parts += [charts, _points(points, parameters, metrics, confidence)]
    text = yaml.safe_dump(document["sweep"], sort_keys=False, allow_unicode=True)
    versions = el("p", f"Made with {plain(document['versions'])}.", class_="note")
    parts.append(folded("The sweep, and what it was made with", el("pre", text), versions))
    return f"Sweep over {' and '.join(parameters)}", parts


def _summary(run: Row) -> Row:
    return run | {key: json.loads(run[key]) for key in _NESTED if key in run}


def _metrics(points: Sequence[Row]) -> dict[str, str]:
    """Return headings of the figures to show: those that some point has, the optional if they vary.

    GPU-hours stand in for a cost where no price is known.
    """

    def values(key: str) -> set[float]:
        return {point[key] for point in points if point.get(key) is not None}

    shown = {key: label for key, label in METRICS.items() if values(key)}
    shown |= {key: label for key, label in MORE_METRICS.items() if len(values(key)) > 1}
    if "cost_per_million_output_tokens" in shown:
        shown.pop("gpu_hours_per_million_output_tokens", None)
    return shown


class _Axes:
    """What a sweep's pictures vary: x, colour, and what tells the curves of a colour apart.

    ``x`` is the numeric parameter of most values, colour the first of the others that is not
    numeric, else the first of the others.
    """

    def __init__(self, parameters: Sequence[str], points: Sequence[Row]) -> None:
        self.points = points
        values = {p: list(dict.fromkeys(point[p] for point in points)) for p in parameters}
        varied = [p for p in parameters if len(values[p]) > 1]
        numeric = [p for p in varied if all(_is_number(v) for v in values[p])]
        self.x = max(numeric, key=lambda p: len(values[p]), default=None)
        rest = [p for p in varied if p != self.x]
        words = [p for p in rest if p not in numeric]
        self.colour: str | None = next(iter(words or rest), None)
        self.others = [p for p in rest if p != self.colour]
        self.colours = values[self.colour] if self.colour is not None else [None]
        curves: dict[tuple[Any, ...], list[Row]] = {}
        for point in points:
            key = tuple(point[p] for p in (self.colour, *self.others) if p is not None)
            curves.setdefault(key, []).append(point)
        self.curves = curves
        self.as_lines = len(curves) <= _MOST_CURVES and any(len(c) > 1 for c in curves.values())

    def chart(self, key: str, label: str, interval: str) -> ET.Element:
        """Draw one figure of all points."""
        if self.x is None:
            return self._rows(key, label, interval)
        x = self.x
        series = []
        for name, colour, dash, own in self._groups():
            ordered = sorted(own, key=lambda point: float(point[x]))
            series.append(
                Series(
                    name,
                    [float(point[x]) for point in ordered],
                    [_value(point, key) for point in ordered],
                    [_value(point, f"{key}_low") for point in ordered],
                    [_value(point, f"{key}_high") for point in ordered],
                    line=self.as_lines,
                    colour=colour,
                    dash=dash,
                    tips=None if self.as_lines else [str(point["name"]) for point in ordered],
                )
            )
        heading = metric_heading(label)
        return xy_chart(heading, parameter_label(x), label, series, interval=interval)

    def cloud(self) -> list[tuple[str, int, list[Row]]]:
        """Return (name, colour, points) of every colour."""
        return [
            (
                "" if self.colour is None else plain(value),
                i,
                [p for p in self.points if self.colour is None or p[self.colour] == value],
            )
            for i, value in enumerate(self.colours)
        ]

    def _groups(self) -> list[tuple[str, int, int, list[Row]]]:
        """Return (name, colour, dash, points) of every curve, or of every colour."""
        if not self.as_lines:
            return [(name, colour, 0, own) for name, colour, own in self.cloud()]
        seen: dict[Any, int] = {}
        groups = []
        for key, own in self.curves.items():
            value = key[0] if key else None
            dash = seen.get(value, 0)
            seen[value] = dash + 1
            words = [plain(value)] if key else []
            words += [f"{p} {plain(v)}" for p, v in zip(self.others, key[1:], strict=True)]
            groups.append((", ".join(words), self.colours.index(value), dash, own))
        return groups

    def _rows(self, key: str, label: str, interval: str) -> ET.Element:
        rows = [
            (
                str(point["name"]),
                _value(point, key),
                _value(point, f"{key}_low"),
                _value(point, f"{key}_high"),
            )
            for point in self.points[:_MOST_ROWS]
        ]
        heading = metric_heading(label)
        if len(self.points) > _MOST_ROWS:
            heading += f" (the first {_MOST_ROWS} points)"
        return interval_chart(heading, label, rows, differences=False, interval=interval)


def _pareto(axes: _Axes) -> ET.Element:
    """Draw tokens/s per user against tokens/s per GPU, with the front of all points."""

    def place(point: Row) -> tuple[float, float]:
        tpot, gpus = _value(point, "median_tpot_ms"), _value(point, "gpus")
        return 1e3 / tpot if tpot else math.nan, _value(point, "output_throughput") / gpus

    clouds = [
        (name, colour, [(*place(point), str(point["name"])) for point in own])
        for name, colour, own in axes.cloud()
    ]
    return pareto_chart(clouds)


def _points(
    points: Sequence[Row], parameters: Sequence[str], metrics: dict[str, str], confidence: str
) -> ET.Element:
    several = any(point["runs_completed"] > 1 for point in points)
    rows: list[list[Cell]] = [
        [
            point["point"],
            *(_parameter(point[p]) for p in parameters),
            *(
                mean_cell(point.get(key), point.get(f"{key}_low"), point.get(f"{key}_high"))
                for key in metrics
            ),
            point["runs_completed"],
            point["runs_failed"],
        ]
        for point in points
    ]
    columns = ["point", *parameters, *metrics.values(), "runs", "runs failed"]
    note = f"± half the {confidence} of the mean over runs." if several else None
    return table(f"All {number(len(points))} points", columns, rows, note=note)


def _parameter(value: Any) -> Cell:
    return measured(float(value), plain(value)) if _is_number(value) else plain(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _value(point: Row, key: str) -> float:
    value = point.get(key)
    if value is None:
        return math.nan
    # Student's t knows no bounds of a share.
    return min(max(value, 0.0), 1.0) if key.startswith("slo_attainment") else float(value)
