"""Section of a sweep: metrics against parameters, the Pareto front, every point."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import yaml

from eldr_sim.kinds import Row
from eldr_sim.reports.basis import basis
from eldr_sim.reports.cells import (
    METRICS,
    MORE_METRICS,
    Table,
    Value,
    mean_cell,
    measured,
    number,
    parameter_label,
    plain,
    table,
    without_unit,
)
from eldr_sim.reports.folders import Folder
from eldr_sim.reports.pictures import (
    N_COLOURS,
    Colours,
    Picture,
    Series,
    curves,
    intervals,
    pareto_picture,
)

#: More curves than this are drawn as points; without a numeric parameter, more points are left out.
_MOST_CURVES, _MOST_ROWS = 24, 40
#: Entries of a summary that the data set holds as JSON text.
_NESTED = (
    "failed_reasons", "lookups_outside_tables", "latency_warnings", "latency_notes",
    "trace_warnings", "error_band", "load_growth", "limits", "provenance", "trace",
)  # fmt: skip


def sweep_section(folder: Folder, colours: Colours) -> dict[str, Any]:
    """Return the content of ``sweep.html``."""
    document = folder.documents["sweep"]
    runs = folder.tables["points"].to_pylist()
    points = folder.tables["aggregate"].to_pylist()
    parameters: list[str] = document["parameters"]
    failed = [run for run in runs if run["status"] != "completed"]
    confidence = f"{100 * document['confidence_level']:g}% interval"
    summaries = {run["name"]: _summary(run) for run in reversed(runs) if run not in failed}
    metrics = _metrics(points)
    axes = _Axes(parameters, points, colours)
    failures = [[run["name"], run["run"], run["seed"], run["reason"]] for run in failed]
    return {
        "title": f"Sweep over {' and '.join(parameters)}",
        "basis": basis(summaries) if summaries else None,
        "parameters": parameters,
        "n_points": len(points),
        "n_runs": len(runs),
        "runs_per_point": len(runs) / max(1, len(points)),
        "confidence": confidence,
        "failed": table("Runs that failed", ["point", "run", "seed", "reason"], failures),
        "pictures": [
            *(axes.picture(key, label, confidence) for key, label in metrics.items()),
            _pareto(axes),
        ],
        "points": _points(points, parameters, metrics, confidence),
        "document": yaml.safe_dump(document["sweep"], sort_keys=False, allow_unicode=True),
        "versions": document["versions"],
    }


def _summary(run: Row) -> Row:
    return run | {key: json.loads(run[key]) for key in _NESTED if run.get(key) is not None}


def _metrics(points: Sequence[Row]) -> dict[str, str]:
    """Return headings of the metrics to show: those that a point has, optional ones if they vary.
    GPU-hours replace the cost if no price is known."""

    def values(key: str) -> set[float]:
        return {point[key] for point in points if point.get(key) is not None}

    shown = {key: label for key, label in METRICS.items() if values(key)}
    shown |= {key: label for key, label in MORE_METRICS.items() if len(values(key)) > 1}
    if "cost_per_million_output_tokens" in shown:
        shown.pop("gpu_hours_per_million_output_tokens", None)
    return shown


class _Axes:
    """Which parameters are x (numeric, most values), colour (the first not numeric, or first of the
    others) and style of curves."""

    def __init__(self, parameters: Sequence[str], points: Sequence[Row], colours: Colours) -> None:
        self.points = points
        values = {p: list(dict.fromkeys(point[p] for point in points)) for p in parameters}
        varied = [p for p in parameters if len(values[p]) > 1]
        numeric = [p for p in varied if all(_is_number(v) for v in values[p])]
        self.x = max(numeric, key=lambda p: len(values[p]), default=None)
        rest = [p for p in varied if p != self.x]
        words = [p for p in rest if p not in numeric]
        self.parameter: str | None = next(iter(words or rest), None)
        self.others = [p for p in rest if p != self.parameter]
        self._colours = colours
        self.groups: dict[tuple[Any, ...], list[Row]] = {}
        for point in points:
            key = tuple(point[p] for p in (self.parameter, *self.others) if p is not None)
            self.groups.setdefault(key, []).append(point)
        several = any(len(own) > 1 for own in self.groups.values())
        self.as_lines = len(self.groups) <= _MOST_CURVES and several

    def colour(self, point: Row) -> int:
        """Return the colour number of a point."""
        if self.parameter is None:
            return 0
        return self._colours(self.parameter, plain(point[self.parameter]))

    def clouds(self) -> list[tuple[str, int, list[Row]]]:
        """Return (name, colour, points) of every colour."""
        found: dict[int, list[Row]] = {}
        for point in self.points:
            found.setdefault(self.colour(point), []).append(point)
        named = self.parameter or ""
        return [(plain(own[0][named]) if named else "", c, own) for c, own in found.items()]

    def picture(self, key: str, label: str, interval: str) -> Picture:
        """Draw one metric of all points."""
        if self.x is None:
            return self._rows(key, label, interval)
        x = self.x
        series = []
        for name, colour, style, own in self._series():
            ordered = sorted(own, key=lambda point: float(point[x]))
            at = [float(point[x]) for point in ordered]
            mean, low, high = zip(*(_interval(point, key) for point in ordered), strict=True)
            tips = None if self.as_lines else [str(point["name"]) for point in ordered]
            series.append(Series(name, at, mean, low, high, self.as_lines, colour, style, tips))
        return curves(without_unit(label), parameter_label(x), label, series, interval=interval)

    def _series(self) -> list[tuple[str, int, int, list[Row]]]:
        """Return (name, colour, style, points) of every curve, or of every colour."""
        if not self.as_lines:
            return [(name, colour, colour // N_COLOURS, own) for name, colour, own in self.clouds()]
        seen: Counter[int] = Counter()
        series = []
        for key, own in self.groups.items():
            colour = self.colour(own[0])
            words = [plain(value) for value in key[:1]]
            words += [f"{p} {plain(v)}" for p, v in zip(self.others, key[1:], strict=True)]
            series.append((", ".join(words), colour, seen[colour % N_COLOURS], own))
            seen[colour % N_COLOURS] += 1
        return series

    def _rows(self, key: str, label: str, interval: str) -> Picture:
        shown = self.points[:_MOST_ROWS]
        rows = [(str(point["name"]), *_interval(point, key), self.colour(point)) for point in shown]
        title = without_unit(label)
        if len(shown) < len(self.points):
            title += f" (the first {_MOST_ROWS} points)"
        return intervals(title, label, rows, differences=False, interval=interval)


def _pareto(axes: _Axes) -> Picture:
    """Draw tokens/s per user against tokens/s per GPU, with the Pareto front."""

    def place(point: Row) -> tuple[float, float]:
        tpot, gpus = _value(point, "median_tpot_ms"), _value(point, "gpus")
        return 1e3 / tpot if tpot else math.nan, _value(point, "output_throughput") / gpus

    clouds = [
        (name, colour, 0, [(*place(point), str(point["name"])) for point in own])
        for name, colour, own in axes.clouds()
    ]
    return pareto_picture(clouds)


def _points(
    points: Sequence[Row], parameters: Sequence[str], metrics: dict[str, str], confidence: str
) -> Table:
    several = any(point["runs_completed"] > 1 for point in points)
    rows: list[list[Value]] = []
    for point in points:
        ends = ([point.get(f"{key}{end}") for end in ("", "_low", "_high")] for key in metrics)
        figures = [
            *(_parameter(point[p]) for p in parameters),
            *(mean_cell(*each) for each in ends),
        ]
        runs = point["runs_completed"], point["runs_failed"]
        rows.append([point["point"], *figures, *runs])
    columns = ["point", *parameters, *metrics.values(), "runs", "runs failed"]
    note = f"± half the {confidence} of the mean over runs." if several else None
    return table(f"All {number(len(points))} points", columns, rows, note=note)


def _parameter(value: Any) -> Value:
    return measured(float(value), plain(value)) if _is_number(value) else plain(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _interval(point: Row, key: str) -> tuple[float, float, float]:
    return _value(point, key), _value(point, f"{key}_low"), _value(point, f"{key}_high")


def _value(point: Row, key: str) -> float:
    value = point.get(key)
    if value is None:
        return math.nan
    # Student's t interval of a share may exceed its bounds.
    return min(max(value, 0.0), 1.0) if key.startswith("slo_attainment") else float(value)
