"""Section of a comparison: policies paired over the same requests."""

from typing import Any

from eldr_sim.planning.intervals import mean_known
from eldr_sim.reports.basis import basis
from eldr_sim.reports.cells import Value, difference, nan, plain, table
from eldr_sim.reports.folders import Folder
from eldr_sim.reports.headings import METRICS, without_unit
from eldr_sim.reports.pictures import Colours, intervals

Row = dict[str, Any]


def comparison_section(folder: Folder, colours: Colours) -> Row:
    """Return the content of ``comparison.html``."""
    summary = folder.documents["summary"]
    runs = folder.tables["runs"].to_pylist()
    config, seeds = summary["config"], summary["seeds"]
    names = list(dict.fromkeys(row["policy"] for row in runs))
    metrics = [metric for metric in METRICS if metric in runs[0]]
    headings = [*(METRICS[metric] for metric in metrics), "failed requests"]
    means: list[list[Value]] = []
    for name in names:
        own = [row for row in runs if row["policy"] == name]
        means.append([name, *(mean_known([row[m] for row in own]) for m in metrics)])
        means[-1].append(sum(row["failed"] for row in own))
    each = [
        [row["policy"], row["seed"], *(row[metric] for metric in metrics), row["failed"]]
        for row in runs
    ]
    of_seeds = f"mean over {seeds} seeds" if seeds > 1 else "one seed"
    fields = [[name, plain(value)] for name, value in config.items()]
    references = dict.fromkeys(d["reference"] for d in summary["differences"])
    return {
        "title": f"Policies compared: {', '.join(names)}",
        "config": config,
        "seeds": seeds,
        "basis": basis(summary["summaries"]) if "summaries" in summary else None,
        "figures": table(f"Figures, {of_seeds}", ["policy", *headings], means),
        "differences": [_differences(summary, name, metrics, colours) for name in references],
        "runs": table("Figures of every run", ["policy", "seed", *headings], each),
        "configuration": table("Configuration", ["field", "value"], fields),
    }


def _differences(summary: Row, reference: str, metrics: list[str], colours: Colours) -> Row:
    """Return the differences from a reference as a table, and a picture for each metric."""
    best = " (best load balancer)" if reference == summary["best_load_balancer"] else ""
    pictures = []
    cells: dict[str, list[Value]] = {}
    for metric in metrics:
        rows = [
            (d["policy"], nan(d["percent"]), nan(d["low"]), nan(d["high"]))
            for d in summary["differences"]
            if (d["reference"], d["metric"]) == (reference, metric)
        ]
        for policy, *ends in rows:
            cells.setdefault(policy, []).append(difference(*ends))
        dots = [(*row, colours("policy", row[0])) for row in rows]
        label = f"difference from {reference}, %"
        pictures.append(intervals(without_unit(METRICS[metric]), label, dots))
    columns = ["policy", *(without_unit(METRICS[metric]) for metric in metrics)]
    title = f"Difference from {reference}{best}, % [95% interval]"
    note = "Paired over seeds, Student's t. Filled dots: the interval leaves 0 out."
    paired = table(title, columns, [[policy, *row] for policy, row in cells.items()], note)
    return {"table": paired, "pictures": pictures}
