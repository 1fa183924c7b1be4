"""Sections of runs: one alone, or several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from eldr_sim.reports.basis import basis
from eldr_sim.reports.charts import Series, stacked_bars, xy_chart
from eldr_sim.reports.folders import Folder
from eldr_sim.reports.markup import (
    MISSING,
    add,
    el,
    figures,
    folded,
    number,
    plain,
    table,
)

#: Name, key of the summary; the order of the table.
FIGURES = (
    ("Requests in the window", "num_prompts"),
    ("Completed", "completed"),
    ("Failed", "failed"),
    ("SLO attainment, share of requests", "slo_attainment"),
    ("Goodput, requests/s", "request_goodput"),
    ("Request throughput, requests/s", "request_throughput"),
    ("Output throughput, tokens/s", "output_throughput"),
    ("Total throughput, tokens/s", "total_token_throughput"),
    ("Peak requests in flight", "max_concurrent_requests"),
    ("Mean decode batch, requests", "mean_decode_batch"),
    ("Active experts of a step, mean", "mean_active_experts_per_step"),
    ("Active experts of a step, p99", "p99_active_experts_per_step"),
    ("Active experts, busiest GPU, mean", "mean_busiest_rank_experts_per_step"),
    ("Prefix cache hit rate", "prefix_cache_hit_rate"),
    ("Preemptions", "preemptions"),
    ("GPUs", "gpus"),
    ("GPU-hours per million output tokens", "gpu_hours_per_million_output_tokens"),
    ("Cost per million output tokens", "cost_per_million_output_tokens"),
)
_LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2E", "e2el"))
_STATISTICS = ("mean", "p50", "p90", "p99")
#: Phases of a request by the times that bound them, as in the timeline.
_PHASES = (
    ("prefill queue", "sent_s", "prefill_start_s"),
    ("prefill", "prefill_start_s", "prefill_end_s"),
    ("handoff", "prefill_end_s", "transfer_start_s"),
    ("KV transfer", "transfer_start_s", "transfer_end_s"),
    ("decode queue", "transfer_end_s", "decode_start_s"),
    ("first decode step", "decode_start_s", "first_token_s"),
)
_QUANTILES = (*range(101),)
_BINS = 60


def runs_section(folders: Sequence[Folder]) -> tuple[str, list[ET.Element]]:
    """Return title and content of one run, or of several side by side."""
    summaries = {folder.name: folder.documents["summary"] for folder in folders}
    first = next(iter(summaries.values()))
    title = first["label"] if len(folders) == 1 else f"{len(folders)} runs side by side"
    parts: list[ET.Element] = []
    if len(folders) == 1:
        parts.append(el("p", _under_title(first), class_="lead"))
    parts += basis(summaries)
    if len(folders) == 1:
        parts.append(_headline(first))
    else:
        parts.append(_names(summaries))
    parts += [_latencies(summaries), _figures(folders, summaries)]
    failed = _failed(summaries)
    if failed is not None:
        parts.append(failed)
    charts = el("div", class_="charts")
    add(
        charts,
        *_cdfs(folders),
        _active_experts(folders),
        _phases(folders),
        *_waiting(folders),
        _tpot_over_time(folders),
        *(_decode_workers(folder, len(folders) > 1) for folder in folders),
    )
    parts.append(charts)
    parts += _configuration(folders)
    return title, parts


def _under_title(summary: dict[str, Any]) -> str:
    rate = summary["request_rate"]
    load = "recorded arrivals" if rate is None else f"{plain(rate)} requests/s"
    return (
        f"{summary['topology']}; {load}; measured window {number(summary['duration'])} s; "
        + (f"prefill policy {summary['prefill_policy']}; " if summary["prefill_policy"] else "")
        + f"seed {summary['seed']}"
    )


def _headline(summary: dict[str, Any]) -> ET.Element:
    pairs = [
        ("TTFT, median", number(summary["median_ttft_ms"]), "ms"),
        ("TTFT, p99", number(summary["p99_ttft_ms"]), "ms"),
        ("TPOT, median", number(summary["median_tpot_ms"]), "ms"),
        ("TPOT, p99", number(summary["p99_tpot_ms"]), "ms"),
        ("SLO attainment", _percent(summary["slo_attainment"]), "of requests"),
        ("Output", number(summary["output_throughput"]), "tokens/s"),
        ("Active experts", number(summary["mean_active_experts_per_step"]), "a layer and step"),
    ]
    cost = summary["cost_per_million_output_tokens"]
    if cost is None:
        hours = summary["gpu_hours_per_million_output_tokens"]
        pairs.append(("GPU time", number(hours), "GPU-hours per million tokens"))
    else:
        pairs.append(("Cost", number(cost), "per million output tokens"))
    return figures(pairs)


def _names(summaries: dict[str, dict[str, Any]]) -> ET.Element:
    columns = ["run", "policy", "model", "GPU", "topology", "requests/s", "seed"]
    rows = [
        (name, s["policy"], s["model_id"], s["gpu"], s["topology"], s["request_rate"], s["seed"])
        for name, s in summaries.items()
    ]
    return table("Runs", columns, rows)


def _latencies(summaries: dict[str, dict[str, Any]]) -> ET.Element:
    single = len(summaries) == 1
    rows = [
        ([label] if single else [f"{label}, {name}"])
        + [summary[f"{statistic}_{tag}_ms"] for statistic in _STATISTICS]
        for label, tag in _LATENCIES
        for name, summary in summaries.items()
    ]
    first = "latency" if single else "latency, run"
    columns = [first, *(f"{statistic}, ms" for statistic in _STATISTICS)]
    return table("Latencies of completed requests, ms", columns, rows)


def _figures(folders: Sequence[Folder], summaries: dict[str, dict[str, Any]]) -> ET.Element:
    keys = [
        (label, key)
        for label, key in FIGURES
        if any(summary.get(key) is not None for summary in summaries.values())
    ]
    rows = [[label, *(s.get(key) for s in summaries.values())] for label, key in keys]
    columns = ["figure", *(["value"] if len(summaries) == 1 else summaries)]
    levels = dict.fromkeys(service_level(f.documents["config"]["config"]) for f in folders)
    note = f"Service level: {'; '.join(levels)}."
    return table("Throughput, goodput and cost", columns, rows, note=note)


def service_level(config: Mapping[str, Any]) -> str:
    """Return the bounds of a good request in words."""
    bounds = config.get("goodput") or {}
    names = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}
    told = [f"{names[k]} ≤ {v:g} ms" for k, v in bounds.items() if v is not None]
    return ", ".join(told) or "none set, so that every completed request is a good one"


def _failed(summaries: dict[str, dict[str, Any]]) -> ET.Element | None:
    rows = [
        (name, reason, count)
        for name, summary in summaries.items()
        for reason, count in summary["failed_reasons"].items()
    ]
    if not rows:
        return None
    return table("Requests that did not complete", ["run", "reason", "requests"], rows)


def _completed(folder: Folder) -> pa.Table:
    requests = folder.tables["requests"]
    return requests.filter(pc.and_(requests["measured"], pc.is_valid(requests["finish_s"])))


def _column(rows: pa.Table, name: str) -> NDArray[np.float64]:
    """Return a column as floats, NaN where it is null."""
    return np.asarray(rows[name].to_numpy(), np.float64)


def _cdfs(folders: Sequence[Folder]) -> list[ET.Element]:
    charts = []
    for column, name in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("e2el_ms", "E2E latency")):
        series = []
        for folder in folders:
            values = _column(_completed(folder), column)
            values = values[np.isfinite(values)]
            at = np.percentile(values, _QUANTILES).tolist() if len(values) else []
            series.append(
                Series(_of(folders, folder), at, [q / 100 for q in _QUANTILES[: len(at)]])
            )
        title = f"Distribution of {name}"
        charts.append(xy_chart(title, f"{name}, ms", "share of requests at or below", series))
    return charts


def _active_experts(folders: Sequence[Folder]) -> ET.Element:
    series = []
    for folder in folders:
        steps = folder.tables["steps"]
        # Steps that also compute prompt tokens use more experts than their batch explains.
        decoding = pc.and_(pc.equal(steps["role"], "decode"), pc.greater(steps["batch"], 0))
        steps = steps.filter(pc.and_(decoding, pc.equal(steps["tokens"], steps["batch"])))
        batch, active = _column(steps, "batch"), _column(steps, "active_experts")
        sizes, of_size, counts = np.unique(batch, return_inverse=True, return_counts=True)
        order = np.argsort(of_size, kind="stable")
        groups = np.split(active[order], np.cumsum(counts)[:-1]) if len(sizes) else []
        low, high = (
            [float(np.percentile(group, q)) if len(group) >= 5 else np.nan for group in groups]
            for q in (10, 90)
        )
        series.append(
            Series(
                _of(folders, folder),
                sizes.tolist(),
                [float(group.mean()) for group in groups],
                low,
                high,
                tips=[f"{count:,} steps" for count in counts],
            )
        )
    return xy_chart(
        "Active experts against batch",
        "batch of a decode step, requests",
        "distinct experts a MoE layer, mean",
        series,
        interval="p10 to p90",
        note="Steps that decode only. Band: p10 to p90 over the steps of that batch.",
    )


def _phases(folders: Sequence[Folder]) -> ET.Element:
    done = [_completed(folder) for folder in folders]

    def mean_ms(rows: pa.Table, start: str, end: str) -> float:
        spans = _column(rows, end) - _column(rows, start)
        return 1e3 * float(np.nanmean(spans)) if np.isfinite(spans).any() else 0.0

    return stacked_bars(
        "Where the time to first token goes",
        "run",
        "mean time in the phase, ms",
        [folder.name for folder in folders],
        [(name, [mean_ms(rows, start, end) for rows in done]) for name, start, end in _PHASES],
    )


def _waiting(folders: Sequence[Folder]) -> list[ET.Element]:
    """Draw how many requests are in a phase over time, exactly: the mean over each interval."""
    charts = []
    for title, phases in (
        ("Requests waiting for prefill", (_PHASES[0],)),
        ("Requests between prefill and decode", _PHASES[2:5]),
        ("Requests decoding", (("decoding", "decode_start_s", "finish_s"),)),
    ):
        series = []
        for folder in folders:
            requests = folder.tables["requests"]
            edges = _edges(requests)
            level = np.zeros(_BINS)
            for _, start, end in phases:
                level += mean_in_phase(_column(requests, start), _column(requests, end), edges)
            middle = (edges[1:] + edges[:-1]) / 2
            series.append(Series(_of(folders, folder), middle.tolist(), level.tolist()))
        charts.append(
            xy_chart(title, "simulated time, s", "requests, mean of the interval", series)
        )
    return charts


def _edges(requests: pa.Table) -> NDArray[np.float64]:
    finish = _column(requests, "finish_s")
    arrival = _column(requests, "arrival_s")
    last = float(np.nanmax(np.concatenate([finish, arrival, [0.0]])))
    return np.linspace(0.0, last or 1.0, _BINS + 1)


def mean_in_phase(
    start_s: NDArray[np.float64], end_s: NDArray[np.float64], edges_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the mean number of requests in a phase, for each interval of time.

    Parameters
    ----------
    start_s, end_s
        When each request entered and left the phase, s, shape [n]; NaN start: never entered;
        NaN end: still there at the last edge.
    edges_s
        Edges of the intervals, shape [m + 1].

    Returns
    -------
    ndarray
        Shape [m]. The integral of the number in the phase up to a time is the sum of
        ``min(end, t) - min(start, t)`` over requests.
    """
    entered = np.isfinite(start_s)
    start = np.sort(start_s[entered])
    end = np.sort(np.nan_to_num(end_s[entered], nan=np.inf))

    def clipped(values: NDArray[np.float64]) -> NDArray[np.float64]:
        below = np.searchsorted(values, edges_s, side="right")
        sums = np.concatenate([[0.0], np.cumsum(np.where(np.isfinite(values), values, 0.0))])
        return sums[below] + edges_s * (len(values) - below)

    mean: NDArray[np.float64] = np.diff(clipped(end) - clipped(start)) / np.diff(edges_s)
    return np.maximum(mean, 0.0)  # rounding of the sums


def _tpot_over_time(folders: Sequence[Folder]) -> ET.Element:
    series = []
    for index, folder in enumerate(folders):
        requests = folder.tables["requests"]
        finish, tpot = _column(requests, "finish_s"), _column(requests, "tpot_ms")
        known = np.isfinite(tpot)
        finish, tpot = finish[known], tpot[known]
        edges = np.linspace(finish.min(), finish.max() + 1e-9, 41) if len(finish) else np.zeros(2)
        bins = np.digitize(finish, edges) - 1
        used = np.unique(bins)
        middle = [float(edges[b] + edges[b + 1]) / 2 for b in used]
        quantiles = {
            q: [float(np.percentile(tpot[bins == b], q)) for b in used] for q in (50, 90, 10)
        }
        series.append(
            Series(
                _of(folders, folder),
                middle,
                quantiles[50],
                quantiles[10],
                quantiles[90],
                colour=index,
            )
        )
    return xy_chart(
        "TPOT over time",
        "finish time, simulated s",
        "TPOT, ms, median",
        series,
        interval="p10 to p90",
        note="Band: p10 to p90 of the requests that finish in the interval.",
    )


def _decode_workers(folder: Folder, named: bool) -> ET.Element:
    steps = folder.tables["steps"]
    decode = steps.filter(pc.equal(steps["role"], "decode"))
    worker = _column(decode, "worker").astype(int)
    seconds = _column(decode, "end_s") - _column(decode, "start_s")
    workers = np.unique(worker)
    weight = np.bincount(worker, seconds) if len(worker) else np.zeros(0)
    load = np.bincount(worker, seconds * _column(decode, "batch")) if len(worker) else weight
    mean = load[workers] / np.maximum(weight[workers], 1e-12)
    done = _completed(folder)
    served, domain = _column(done, "decode_worker"), np.array(done["domain"].to_pylist(), object)
    domains = sorted(set(domain.tolist()))
    parts = []
    for name in domains:
        own = domain == name
        share = [float(own[served == w].mean()) if (served == w).any() else 0.0 for w in workers]
        parts.append((name, (np.array(share) * mean).tolist()))
    return stacked_bars(
        "Mean batch of each decode worker by domain" + (f": {folder.name}" if named else ""),
        "decode worker",
        "mean batch, requests, by share of domain",
        [str(w) for w in workers],
        parts,
    )


def _configuration(folders: Sequence[Folder]) -> list[ET.Element]:
    configs = [folder.documents["config"]["config"] for folder in folders]
    names = list(dict.fromkeys(key for config in configs for key in config))
    rows = [[name, *(plain(config.get(name)) for config in configs)] for name in names]
    columns = ["field", *(["value"] if len(folders) == 1 else [f.name for f in folders])]
    content = []
    if len(folders) > 1:
        differ = [row for row in rows if len(set(row[1:])) > 1]
        content.append(table("Fields that differ", columns, differ))
    versions = [
        [
            folder.name,
            folder.documents["config"]["trace_checksum"],
            plain(folder.documents["config"]["versions"]),
        ]
        for folder in folders
    ]
    content.append(
        folded(
            "Whole configuration and versions",
            table("Configuration", columns, rows),
            table("Made with", ["run", "checksum of the routing trace", "versions"], versions),
        )
    )
    return content


def _of(folders: Sequence[Folder], folder: Folder) -> str:
    return folder.name if len(folders) > 1 else ""


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.2f}%".replace(".00%", "%")
