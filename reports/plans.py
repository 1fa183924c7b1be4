"""Sections of plans: the cheapest cluster within an objective, or the highest rate of clusters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree as ET

from eldr_sim.reports.basis import basis, warning_box
from eldr_sim.reports.charts import interval_chart
from eldr_sim.reports.figures import difference, pareto_chart
from eldr_sim.reports.folders import Folder
from eldr_sim.reports.markup import (
    Cell,
    add,
    el,
    folded,
    measured,
    number,
    plain,
    span,
    table,
)
from eldr_sim.simulator.metrics import table_warnings

Record = Mapping[str, Any]
_BOUNDS = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}


def plan_section(folder: Folder) -> tuple[str, list[ET.Element]]:
    """Return title and content of a plan."""
    document = folder.documents["plan"]
    title, parts = _rates(document) if document["kind"] == "rate" else _cluster(document)
    fields = [[name, plain(value)] for name, value in document["config"].items()]
    made = el("p", f"Made with {plain(document['versions'])}.", class_="note")
    parts.append(
        folded("Whole configuration", table("Configuration", ["field", "value"], fields), made)
    )
    return title, parts


def _objective(document: Record) -> str:
    bounds = ", ".join(f"{_BOUNDS[k]} ≤ {v:g} ms" for k, v in document["slo_ms"].items())
    return f"{bounds} for {100 * document['attainment']:g}% of the requests"


def _basis(document: Record, notes: Sequence[str]) -> list[ET.Element]:
    if document["assumptions"] is None:
        box = warning_box(notes)
        return [] if box is None else [box]
    return basis({"": document["assumptions"]}, table_warnings, notes)


# The cheapest cluster -----------------------------------------------------------------------------


def _cluster(document: Record) -> tuple[str, list[ET.Element]]:
    answer = document["answer"]
    title = "No cluster meets the objective" if answer is None else f"Plan: {_name(answer)}"
    by = "price" if document["cheapest_by"] == "price_per_hour" else "number of GPUs"
    lead = (
        f"The cheapest cluster by {by} that serves {document['request_rate']:g} requests/s of "
        f"{document['config']['model']} with {_objective(document)}, of up to "
        f"{document['max_gpus']} GPUs. {number(document['simulated_runs'])} simulated runs; "
        f"decisions at {100 * document['confidence']:g}% confidence."
    )
    notes = [
        f"{each['policy']} on {each['gpu']}, {note}"
        for each in document["candidates"]
        for note in each["notes"]
    ]
    found = [each["cluster"] for each in document["candidates"] if each["cluster"] is not None]
    labels = sorted({cluster["weakest_provenance"] for cluster in found})
    if len(labels) > 1:
        notes.insert(
            0,
            f"The candidates' step times are {' and '.join(labels)}: differences between them are "
            "also differences between sources.",
        )
    parts: list[ET.Element] = [el("p", lead, class_="lead")]
    if answer is not None:
        parts.append(_answer(document))
    parts += _basis(document, notes)
    if document["margin"] is not None:
        parts.append(_losses(document))
    if found:
        parts.append(_clusters("Cheapest cluster of each policy and GPU", found))
    rows = [
        [each["policy"], each["gpu"], reason]
        for each in document["candidates"]
        if each["cluster"] is None
        for reason in each["reasons"]
    ]
    if rows:
        parts.append(table("Policies and GPUs without a cluster", ["policy", "GPU", "why"], rows))
    if document["savings"]:
        parts += _savings(document["savings"])
    tried = [each for each in document["clusters"] if not each["hopeless"]]
    parts.append(
        add(el("div", class_="charts"), _front(tried, document), _attained(found, document))
    )
    if document["pareto_front"]:
        front = "Pareto front of the clusters that meet the objective"
        parts.append(_clusters(front, document["pareto_front"]))
    parts.append(folded("Every cluster tried", _clusters("Clusters tried", document["clusters"])))
    return title, parts


def _answer(document: Record) -> ET.Element:
    box = el("section", el("h3", "Answer"), class_="answer")
    rows = [("Cluster", _name(document["answer"]) + _price(document["answer"]))]
    runner_up = document["runner_up"]
    rows.append(
        ("Runner-up", "none" if runner_up is None else _name(runner_up) + _price(runner_up))
    )
    margin = document["margin"]
    if margin is not None:
        least = "at least " if margin["highest_rate_is_a_lower_bound"] else ""
        rate = _interval(margin["highest_rate"])
        load = _interval(margin["percent_above_load"], signs=True)
        rows.append(("Margin", f"carries {least}{rate} requests/s: {load}% of the load"))
    rows += [
        (
            "Saving",
            f"{each['policy']} saves {_interval(each['gpus_saved'])} GPUs against "
            f"{each['reference']} on {each['gpu']}",
        )
        for each in document["savings"]
    ]
    listed = el("dl")
    for name, text in rows:
        add(listed, el("dt", name), el("dd", text))
    return add(box, listed)


def _losses(document: Record) -> ET.Element:
    margin = document["margin"]
    cases = [
        ("as planned", document["answer"]),
        ("one decode worker lost", margin["one_decode_worker_lost"]),
        ("one prefill worker lost", margin["one_prefill_worker_lost"]),
    ]
    rows: list[list[Cell]] = [
        [what, "nothing is left that could serve", *[None] * 3]
        if cluster is None
        else [
            what,
            cluster["topology"],
            _interval_cell(cluster["slo_attainment"], 100.0),
            cluster["p99_ttft_ms"],
            cluster["p99_tpot_ms"],
        ]
        for what, cluster in cases
    ]
    columns = ["case", "cluster", "SLO attainment, %", "TTFT p99, ms", "TPOT p99, ms"]
    return table("What the answer bears", columns, rows)


def _clusters(title: str, clusters: Sequence[Record]) -> ET.Element:
    priced = any(cluster["price_per_hour"] is not None for cluster in clusters)
    columns = ["policy", "GPU", "cluster", "GPUs"]
    columns += ["price/hour", "cost per million tokens"] if priced else []
    columns += ["SLO attainment, %", "TTFT p99, ms", "TPOT p99, ms", "tokens/s for a user"]
    columns += ["tokens/s of a GPU", "active experts a layer", "step times", "seeds", "verdict"]
    rows: list[list[Cell]] = []
    for cluster in clusters:
        prices = [cluster["price_per_hour"], cluster["cost_per_million_output_tokens"]]
        rows.append(
            [
                cluster["policy"],
                cluster["gpu"],
                _workers(cluster),
                cluster["gpus"],
                *(prices if priced else []),
                _interval_cell(cluster["slo_attainment"], 100.0),
                cluster["p99_ttft_ms"],
                cluster["p99_tpot_ms"],
                cluster["tokens_per_s_per_user"],
                cluster["tokens_per_s_per_gpu"],
                cluster["mean_active_experts_per_step"],
                cluster["weakest_provenance"],
                cluster["seeds"],
                "hopeless in a short run" if cluster["hopeless"] else cluster["verdict"],
            ]
        )
    return table(title, columns, rows)


def _savings(savings: Sequence[Record]) -> list[ET.Element]:
    rows: list[list[Cell]] = [
        [
            each["policy"],
            each["reference"],
            each["gpu"],
            _interval_cell(each["gpus_saved"]),
            plain(each["gpus_by_seed"]),
            plain(each["reference_gpus_by_seed"]),
        ]
        for each in savings
    ]
    columns = ["policy", "against", "GPU", "GPUs saved [95% interval]"]
    columns += ["GPUs, seed by seed", "GPUs of the reference"]
    return [table("GPUs that a policy saves, paired over seeds", columns, rows)]


def _front(tried: Sequence[Record], document: Record) -> ET.Element:
    """Draw the clusters that meet the objective, by policy and GPU; the front is theirs."""
    meets: dict[str, list[tuple[float, float, str]]] = {}
    for cluster in [*tried, *document["pareto_front"]]:
        if cluster["verdict"] == "meets" and cluster["gpus"] <= document["max_gpus"]:
            point = (
                _nan(cluster["tokens_per_s_per_user"]),
                _nan(cluster["tokens_per_s_per_gpu"]),
                _name(cluster),
            )
            group = meets.setdefault(f"{cluster['policy']} on {cluster['gpu']}", [])
            if point not in group:
                group.append(point)
    return pareto_chart([(name, i, own) for i, (name, own) in enumerate(meets.items())])


def _attained(found: Sequence[Record], document: Record) -> ET.Element:
    rows = [_dot(c, c["slo_attainment"], 100.0) for c in found]
    target = f"SLO attainment, % of the requests (asked for: {100 * document['attainment']:g}%)"
    return interval_chart("Attainment of the cheapest clusters", target, rows, differences=False)


def _name(cluster: Record) -> str:
    where = f"on {cluster['gpu']} under {cluster['policy']}"
    return f"{_workers(cluster)} {where}, {cluster['gpus']} GPUs"


def _workers(cluster: Record) -> str:
    """Return xPyD and what a worker is."""
    size = cluster["tensor_parallel_size"]
    if size == 1:
        return str(cluster["topology"])
    ranks = ", EP" if cluster["enable_expert_parallel"] else ""
    return f"{cluster['topology']} of {size} GPUs each{ranks}"


def _price(cluster: Record) -> str:
    price = cluster["price_per_hour"]
    return "" if price is None else f", {number(float(price))} an hour"


# The highest rate ---------------------------------------------------------------------------------


def _rates(document: Record) -> tuple[str, list[ET.Element]]:
    rates = document["rates"]
    topologies = ", ".join(dict.fromkeys(each["topology"] for each in rates))
    lead = (
        f"The highest rate that {topologies} carries of {document['config']['model']} with "
        f"{_objective(document)}. {number(document['simulated_runs'])} simulated runs."
    )
    rows: list[list[Cell]] = [
        [
            each["policy"],
            each["gpu"],
            each["topology"],
            each["gpus"],
            None if each["highest_rate"] is None else _interval_cell(each["highest_rate"]),
            ", ".join(number(rate) for rate in each["by_seed"]),
            each["reason"],
        ]
        for each in rates
    ]
    columns = ["policy", "GPU", "cluster", "GPUs", "requests/s [95% interval]"]
    columns += ["seed by seed, requests/s", "why none"]
    parts = [el("p", lead, class_="lead"), *_basis(document, ())]
    parts.append(table("Highest rate within the objective", columns, rows))
    charts = el("div", class_="charts")
    carried = [each for each in rates if each["highest_rate"] is not None]
    drawn = [_dot(each, each["highest_rate"]) for each in carried]
    label = "highest rate, requests/s"
    charts.append(interval_chart("Highest rate", label, drawn, differences=False))
    if document["gains"]:
        gained = [_dot(gain, gain["percent"]) for gain in document["gains"]]
        reference = document["gains"][0]["reference"]
        charts.append(interval_chart("Gain", f"difference from {reference}, %", gained))
        cells: list[list[Cell]] = [
            [gain["policy"], gain["reference"], gain["gpu"], difference(*_ends(gain["percent"]))]
            for gain in document["gains"]
        ]
        columns = ["policy", "against", "GPU", "rate, % [95% interval]"]
        parts.append(table("What a policy gains, paired over seeds", columns, cells))
    return f"Highest rate of {topologies}", [*parts, charts]


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def _ends(interval: Record) -> tuple[float, float, float]:
    return _nan(interval["mean"]), _nan(interval["low"]), _nan(interval["high"])


def _dot(of: Record, interval: Record, factor: float = 1.0) -> tuple[str, float, float, float]:
    """Return a row of an interval chart: policy and GPU, and an interval."""
    mean, low, high = _ends(interval)
    return f"{of['policy']} on {of['gpu']}", factor * mean, factor * low, factor * high


def _interval(interval: Record, factor: float = 1.0, signs: bool = False) -> str:
    mean, low, high = (factor * value for value in _ends(interval))
    return span(mean, low, high, signs=signs)


def _interval_cell(interval: Record, factor: float = 1.0) -> Cell:
    return measured(factor * _nan(interval["mean"]), _interval(interval, factor))
