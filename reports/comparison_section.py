"""Sections of comparisons: policies, changes, drafts or autoscalers over the same requests."""

from typing import Any

from eldr_sim.kinds import Row
from eldr_sim.planning.slo import mean_known
from eldr_sim.reports.basis import basis
from eldr_sim.reports.cells import (
    METRICS,
    Value,
    difference,
    interval,
    nan,
    plain,
    table,
    without_unit,
)
from eldr_sim.reports.folders import Folder
from eldr_sim.reports.pictures import Colours, intervals
from eldr_sim.simulator.outcome.catalogue import better
from eldr_sim.simulator.outcome.error_band import one_line


def comparison_section(folder: Folder, colours: Colours) -> Row:
    """Return the content of ``comparison.html`` of policies."""
    summary = folder.documents["summary"]
    runs = folder.tables["runs"].to_pylist()
    best = summary["best_load_balancer"]
    return _section(summary, runs, "policy", best, f"{best}, the best load balancer", colours) | {
        "lead": "Every policy serves the same requests under a seed."
    }


def what_if_section(folder: Folder, colours: Colours) -> Row:
    """Return the content of ``comparison.html`` of a base run and changes, one at a time."""
    document, base = folder.documents["what_if"], folder.documents["what_if"]["base"]
    runs = [{"policy": row["change"], **row} for row in folder.tables["runs"].to_pylist()]
    differences = [
        {"policy": change["name"], "reference": base, **effect}
        for change in document["changes"]
        for effect in change["effects"]
    ]
    others = [change["name"] for change in document["changes"] if change["other_requests"]]
    lead = f"Every change is made alone, to {base}, and served under the same seeds."
    if others:
        lead += f" Other requests than those of {base}: {', '.join(others)}."
    summary = document | {"differences": differences}
    return _section(summary, runs, "change", base, base, colours) | {"lead": lead}


def rows_section(folder: Folder, colours: Colours) -> Row:
    """Return the content of ``rows.html``: drafts or autoscalers, a row each."""
    document = folder.documents["summary"]
    if folder.kind == "drafts":
        rows, title = document["drafts"], "Numbers of drafts compared"
        best = max(rows, key=lambda row: float(row["speed_up"]))
        answer = [
            (
                "Fastest",
                f"{best['drafts']} drafts at {best['concurrency']} requests in flight: "
                f"{best['speed_up']:.2f} times the speed without",
            ),
            ("Acceptance", document["acceptance_source"]),
        ]
    else:
        rows = [{"autoscaler": name, **of} for name, of in document["autoscalers"].items()]
        title = "Autoscalers compared"
        answer = [("Best fixed fleet", document["best_fixed"])]
    columns = [name.replace("_", " ") for name in rows[0]]
    fields = [[name, plain(value)] for name, value in document["config"].items()]
    return {
        "title": title,
        "config": document["config"],
        "seeds": document["seeds"],
        "answer": answer,
        "figures": table("Means over seeds", columns, [list(row.values()) for row in rows]),
        "configuration": table("Configuration", ["field", "value"], fields),
    }


def _section(
    summary: Row, runs: list[Row], noun: str, reference: str, told: str, colours: Colours
) -> dict[str, Any]:
    """Return what comparisons have in common. ``noun``: what is compared, ``policy`` of each row of
    ``runs``; ``reference``: what others are held against in the answer, ``told`` in words."""
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
    plural = {"policy": "Policies", "change": "Changes"}[noun]
    return {
        "title": f"{plural} compared: {', '.join(names)}",
        "config": config,
        "seeds": seeds,
        "basis": basis(summary["summaries"]) if "summaries" in summary else None,
        "answer": _winners(summary, metrics, reference, told),
        "figures": table(f"Figures, {of_seeds}", [noun, *headings], means),
        "differences": [_differences(summary, noun, name, metrics, colours) for name in references],
        "runs": table("Figures of every run", [noun, "seed", *headings], each),
        "configuration": table("Configuration", ["field", "value"], fields),
    }


def _winners(summary: Row, metrics: list[str], reference: str, told: str) -> list[tuple[str, str]]:
    """Return the best by the first latencies against the reference, what limits each, and the error
    band."""
    lines = []
    for metric in [m for m in metrics if better(m) == "lower"][:4]:
        own = [
            d
            for d in summary["differences"]
            if (d["reference"], d["metric"]) == (reference, metric) and d["percent"] is not None
        ]
        best = min(own, key=lambda d: float(d["percent"]), default=None)
        text = told
        if best is not None and best["percent"] < 0.0:
            ends = nan(best["percent"]), nan(best["low"]), nan(best["high"])
            text = f"{best['policy']}: {interval(*ends, signs=True)}% against {text}"
            if not best["high"] or best["high"] >= 0.0:
                text += "; the seeds do not show a difference"
        lines.append((f"Lowest {without_unit(METRICS[metric])}", text))
    summaries = summary.get("summaries", {})
    limited: dict[str, list[str]] = {}
    for name, of in summaries.items():
        if limits := of.get("limits"):
            limited.setdefault(limits["bottleneck"], []).append(name)
    lines += [("What limits it", f"{what} ({', '.join(of)})") for what, of in limited.items()]
    bands = {one_line(of["error_band"]): None for of in summaries.values() if of.get("error_band")}
    return lines + [("Error band", text.removeprefix("Error band: ")) for text in bands]


def _differences(
    summary: Row, noun: str, reference: str, metrics: list[str], colours: Colours
) -> Row:
    best = " (best load balancer)" if reference == summary.get("best_load_balancer") else ""
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
        dots = [(*row, colours(noun, row[0])) for row in rows]
        label = f"difference from {reference}, %"
        pictures.append(intervals(without_unit(METRICS[metric]), label, dots))
    columns = [noun, *(without_unit(METRICS[metric]) for metric in metrics)]
    title = f"Difference from {reference}{best}, % [95% interval]"
    note = "Paired over seeds, Student's t. Filled dots: the interval leaves 0 out."
    paired = table(title, columns, [[policy, *row] for policy, row in cells.items()], note)
    return {"table": paired, "pictures": pictures}
