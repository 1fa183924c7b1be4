"""Section of a comparison: policies paired over the same requests."""

from __future__ import annotations

import math
from typing import Any
from xml.etree import ElementTree as ET

from eldr_sim.reports.basis import basis
from eldr_sim.reports.charts import interval_chart
from eldr_sim.reports.figures import METRICS, difference, metric_heading
from eldr_sim.reports.folders import Folder
from eldr_sim.reports.markup import Cell, el, folded, plain, table


def comparison_section(folder: Folder) -> tuple[str, list[ET.Element]]:
    """Return title and content of a comparison."""
    summary = folder.documents["summary"]
    runs = folder.tables["runs"].to_pylist()
    config = summary["config"]
    names = list(dict.fromkeys(row["policy"] for row in runs))
    seeds = summary["seeds"]
    parts: list[ET.Element] = [
        el(
            "p",
            f"{config['model']} on {config['gpu']}, {config['topology']}, workload "
            f"{config['workload']}, {_load(config)}; {seeds} seed{'s' if seeds > 1 else ''} from "
            f"{config['seed']} on. Every policy serves the same requests under a seed.",
            class_="lead",
        )
    ]
    if "summaries" in summary:
        parts += basis(summary["summaries"])
    metrics = [metric for metric in METRICS if metric in runs[0]]
    rows: list[list[Cell]] = [
        [
            name,
            *(_mean([r[metric] for r in runs if r["policy"] == name]) for metric in metrics),
            sum(row["failed"] for row in runs if row["policy"] == name),
        ]
        for name in names
    ]
    columns = ["policy", *(METRICS[metric] for metric in metrics)]
    of_seeds = f"mean over {seeds} seeds" if seeds > 1 else "one seed"
    parts.append(table(f"Figures, {of_seeds}", [*columns, "failed requests"], rows))
    differences = summary["differences"]
    for reference in dict.fromkeys(d["reference"] for d in differences):
        own = [d for d in differences if d["reference"] == reference]
        parts += _differences(own, reference, summary["best_load_balancer"], metrics)
    seed_rows = [
        [row["policy"], row["seed"], *(row[metric] for metric in metrics), row["failed"]]
        for row in runs
    ]
    heading = ["policy", "seed", *(METRICS[metric] for metric in metrics), "failed requests"]
    fields = [[name, plain(value)] for name, value in config.items()]
    parts.append(folded("Every run", table("Figures of every run", heading, seed_rows)))
    parts.append(folded("Whole configuration", table("Configuration", ["field", "value"], fields)))
    return f"Policies compared: {', '.join(names)}", parts


def _differences(
    differences: list[dict[str, Any]], reference: str, best: str | None, metrics: list[str]
) -> list[ET.Element]:
    of = f"{reference} (best load balancer)" if reference == best else reference
    charts = el("div", class_="charts")
    cells: dict[str, list[Cell]] = {}
    for metric in metrics:
        own = {d["policy"]: d for d in differences if d["metric"] == metric}
        rows = [(p, _nan(d["percent"]), _nan(d["low"]), _nan(d["high"])) for p, d in own.items()]
        charts.append(
            interval_chart(metric_heading(METRICS[metric]), f"difference from {reference}, %", rows)
        )
        for policy, percent, low, high in rows:
            cells.setdefault(policy, []).append(difference(percent, low, high))
    columns = ["policy", *(metric_heading(METRICS[metric]) for metric in metrics)]
    paired = table(
        f"Difference from {of}, % [95% interval]",
        columns,
        [[policy, *row] for policy, row in cells.items()],
        note="Paired over seeds, Student's t. Filled dots: the interval leaves 0 out.",
    )
    return [paired, charts]


def _load(config: dict[str, Any]) -> str:
    rate = config["request_rate"]
    if rate is None:
        return "the workload's own rate"
    return f"{plain(rate)} requests/s"


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _nan(value: float | None) -> float:
    return math.nan if value is None else value
