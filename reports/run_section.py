"""Sections of runs, alone or side by side."""

from collections.abc import Sequence
from typing import Any

from eldr_sim.kinds import Row
from eldr_sim.reports.basis import basis
from eldr_sim.reports.cells import (
    LATENCIES,
    STATISTICS,
    Table,
    Value,
    bounds_in_words,
    number,
    plain,
    table,
)
from eldr_sim.reports.folders import Folder
from eldr_sim.reports.pictures import Colours
from eldr_sim.reports.run_pictures import run_pictures
from eldr_sim.simulator.outcome.catalogue import LATENCIES as METRICS_OF
from eldr_sim.simulator.outcome.result_parts import headline_of, parts_of

Summaries = dict[str, dict[str, Any]]


def runs_section(folders: Sequence[Folder], colours: Colours) -> dict[str, Any]:
    """Return the content of ``run.html``."""
    summaries = {folder.name: folder.documents["summary"] for folder in folders}
    first = folders[0].documents["summary"]
    single = len(folders) == 1
    return {
        "title": first["label"] if single else f"{len(folders)} runs side by side",
        "basis": basis(summaries),
        "summary": first if single else None,
        "headline": [(f.name, number(f.value), f.unit) for f in headline_of(first)]
        if single
        else (),
        "answer": [line for name, of in summaries.items() for line in _answer(name, of, single)],
        "names": None if single else _names(summaries),
        "latencies": _latencies(summaries),
        "parts": _parts(folders, summaries),
        "pictures": run_pictures(folders, colours),
        "configuration": _configuration(folders),
    }


def _answer(name: str, summary: Row, single: bool) -> list[tuple[str, str]]:
    """Return what limits a run, and how far published runs like it lie from predictions."""
    before = "" if single else f"{name}: "
    lines = []
    if limits := summary.get("limits"):
        lines.append((f"{before}What limits it", f"{limits['bottleneck']}: {limits['because']}."))
    for part in parts_of(summary):
        if part.title.startswith("Error band"):
            figures = [row for row in part.rows if not isinstance(row, str)]
            ends = "; ".join(f"{row.label} {row.value}" for row in figures)
            words = ". ".join(row for row in part.rows if isinstance(row, str))
            text = f"{ends}. {words}" if ends else words
            lines.append((f"{before}{part.title}", text))
    return lines


def _names(summaries: Summaries) -> Table:
    columns = ["run", "policy", "model", "GPU", "topology", "requests/s", "seed"]
    keys = ("policy", "model_id", "gpu", "topology", "request_rate", "seed")
    rows = [[name, *(summary[key] for key in keys)] for name, summary in summaries.items()]
    return table("Runs", columns, rows)


def _latencies(summaries: Summaries) -> Table:
    single = len(summaries) == 1
    rows = [
        [label if single else f"{label}, {name}", *(own[f"{s}_{tag}_ms"] for s in STATISTICS)]
        for tag, label in LATENCIES.items()
        for name, own in summaries.items()
    ]
    first = "latency" if single else "latency, run"
    columns = [first, *(f"{statistic}, ms" for statistic in STATISTICS)]
    return table("Latencies of completed requests, ms", columns, rows)


def _parts(folders: Sequence[Folder], summaries: Summaries) -> list[Table]:
    """Return the parts of the runs' summaries, a column a run; latencies and what figures rest on
    stand elsewhere on the page."""
    by_run = {name: {p.title: p for p in parts_of(own)} for name, own in summaries.items()}
    elsewhere = {"Rests on", "What limits it", *(metric.heading for metric in METRICS_OF.values())}
    titles = dict.fromkeys(title for parts in by_run.values() for title in parts)
    columns = ["figure", *(["value"] if len(summaries) == 1 else summaries)]
    bounds = (f.documents["config"]["config"].get("goodput") or {} for f in folders)
    none = "none, so there is no SLO attainment and no goodput"
    levels = dict.fromkeys(", ".join(bounds_in_words(bound)) or none for bound in bounds)
    tables = []
    for title in titles:
        if title in elsewhere:
            continue
        rows: dict[str, dict[str, Value]] = {}
        for name, parts in by_run.items():
            for row in parts[title].rows if title in parts else ():
                if not isinstance(row, str):
                    what = f"{row.of}: {row.label}" if row.of else row.label.strip()
                    rows.setdefault(what, {})[name] = row.value
        cells = [[what, *(own.get(name) for name in summaries)] for what, own in rows.items()]
        note = f"Service level: {'; '.join(levels)}." if title == "Run" else None
        tables.append(table(title, columns, cells, note=note))
    return tables


def _configuration(folders: Sequence[Folder]) -> dict[str, Table | None]:
    configs = [folder.documents["config"]["config"] for folder in folders]
    names = list(dict.fromkeys(key for config in configs for key in config))
    rows = [[name, *(plain(config.get(name)) for config in configs)] for name in names]
    several = len(folders) > 1
    columns = ["field", *([f.name for f in folders] if several else ["value"])]
    differ = table("Fields that differ", columns, [row for row in rows if len(set(row[1:])) > 1])
    told = {folder.name: folder.documents["config"] for folder in folders}
    versions = [[name, d["trace_checksum"], plain(d["versions"])] for name, d in told.items()]
    made_with = ["run", "checksum of the routing trace", "versions"]
    return {
        "differ": differ if several else None,
        "all": table("Configuration", columns, rows),
        "versions": table("Made with", made_with, versions),
    }
