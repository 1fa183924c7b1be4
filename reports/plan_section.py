"""Section of a plan: the cheapest cluster within an objective, or the highest rate of a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eldr_sim.reports.basis import Basis, basis
from eldr_sim.reports.cells import (
    Table,
    Value,
    difference,
    interval,
    measured,
    nan,
    number,
    plain,
    table,
)
from eldr_sim.reports.folders import Folder
from eldr_sim.reports.headings import (
    CLUSTER_FIGURES,
    CLUSTER_PRICES,
    PROMPT_CLUSTER_FIGURES,
    bounds_in_words,
)
from eldr_sim.reports.pictures import Colours, Picture, intervals, pareto_picture
from eldr_sim.simulator.outcome.catalogue import label
from eldr_sim.simulator.outcome.metrics import table_warnings

Record = Mapping[str, Any]


def plan_section(folder: Folder, colours: Colours) -> dict[str, Any]:
    """Return the content of ``plan.html``."""
    document = folder.documents["plan"]
    fields = [[name, plain(value)] for name, value in document["config"].items()]
    objective = ""
    if document["kind"] != "fastest":
        bounds = ", ".join(bounds_in_words(document["slo_ms"]))
        objective = f"{bounds} for {100 * document['attainment']:g}% of the requests"
    section = {"rate": _rates, "fastest": _fastest}.get(document["kind"], _cluster)
    return section(document, colours) | {
        "plan": document,
        "objective": objective,
        "configuration": table("Configuration", ["field", "value"], fields),
    }


def _basis(document: Record, notes: Sequence[str]) -> Basis:
    known = document["assumptions"]
    return basis({} if known is None else {"": known}, table_warnings, notes)


# The cheapest cluster -----------------------------------------------------------------------------


def _cluster(document: Record, colours: Colours) -> dict[str, Any]:
    answer, front = document["answer"], document["pareto_front"]
    candidates = document["candidates"]
    notes = [
        f"{each['policy']} on {each['gpu']}, {note}"
        for each in candidates
        for note in each["notes"]
    ]
    found = [each["cluster"] for each in candidates if each["cluster"] is not None]
    labels = sorted({cluster["weakest_provenance"] for cluster in found})
    if len(labels) > 1:
        mixed = f"The candidates' step times are {' and '.join(labels)}: differences between them "
        notes.insert(0, mixed + "are also differences between sources.")
    without = [
        [each["policy"], each["gpu"], reason]
        for each in candidates
        if each["cluster"] is None
        for reason in each["reasons"]
    ]
    why = ["policy", "GPU", "why"]
    meeting = "Pareto front of the clusters that meet the objective"
    return {
        "title": "No cluster meets the objective" if answer is None else f"Plan: {_name(answer)}",
        "answer": _answer(document) if answer is not None else (),
        "basis": _basis(document, notes),
        "losses": _losses(document) if document["margin"] is not None else None,
        "found": _clusters("Cheapest cluster of each policy and GPU", found) if found else None,
        "without": table("Policies and GPUs without a cluster", why, without) if without else None,
        "savings": _savings(document["savings"]) if document["savings"] else None,
        "pictures": [
            *([] if _prompts_alone(document) else [_front(document, colours)]),
            _attained(found, document, colours),
        ],
        "front": _clusters(meeting, front) if front else None,
        "tried": _clusters("Clusters tried", document["clusters"]),
    }


def _answer(document: Record) -> list[tuple[str, str]]:
    """Return the lines of the answer: name and value."""
    rows = [
        (what, "none" if cluster is None else _name(cluster) + _price(cluster))
        for what, cluster in (
            ("Cluster", document["answer"]),
            ("Runner-up", document["runner_up"]),
        )
    ]
    margin = document["margin"]
    if margin is not None:
        least = "at least " if margin["highest_rate_is_a_lower_bound"] else ""
        rate = _interval(margin["highest_rate"])
        load = _interval(margin["percent_above_load"], signs=True)
        rows.append(("Margin", f"carries {least}{rate} requests/s: {load}% of the load"))
    for each in document["savings"]:
        gpus = f"{_interval(each['gpus_saved'])} GPUs"
        against = f"against {each['reference']} on {each['gpu']}"
        rows.append(("Saving", f"{each['policy']} saves {gpus} {against}"))
    return rows


def _prompts_alone(document: Record) -> bool:
    """Whether the clusters of a plan are prefill workers alone."""
    return str(document["config"]["topology"]).upper().endswith("P")


def _losses(document: Record) -> Table:
    margin = document["margin"]
    cases = [
        ("as planned", document["answer"]),
        ("one decode worker lost", margin["one_decode_worker_lost"]),
        ("one prefill worker lost", margin["one_prefill_worker_lost"]),
    ]
    if _prompts_alone(document):
        del cases[1]
    keys = ("slo_attainment", "p99_ttft_ms", "p99_tpot_ms")
    rows: list[list[Value]] = [
        [what, "no worker is left", *[None] * len(keys)]
        if cluster is None
        else [what, cluster["topology"], *(_figure(cluster, key) for key in keys)]
        for what, cluster in cases
    ]
    columns = ["case", "cluster", *(CLUSTER_FIGURES[key] for key in keys)]
    return table("Loss of a worker", columns, rows)


def _clusters(title: str, clusters: Sequence[Record]) -> Table:
    priced = any(cluster["price_per_hour"] is not None for cluster in clusters)
    figures = CLUSTER_FIGURES
    if clusters and "prefill_mfu" in clusters[0]:
        figures = PROMPT_CLUSTER_FIGURES
    shown = {k: v for k, v in figures.items() if priced or k not in CLUSTER_PRICES}
    rows: list[list[Value]] = [
        [
            cluster["policy"],
            cluster["gpu"],
            _workers(cluster),
            *(_figure(cluster, key) for key in shown),
            "hopeless under one seed" if cluster["hopeless"] else cluster["verdict"],
        ]
        for cluster in clusters
    ]
    return table(title, ["policy", "GPU", "cluster", *shown.values(), "verdict"], rows)


def _figure(cluster: Record, key: str) -> Value:
    value: Value = cluster[key]
    return _interval_cell(cluster[key], 100.0) if key == "slo_attainment" else value


def _savings(savings: Sequence[Record]) -> Table:
    rows: list[list[Value]] = [
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
    return table("GPUs that a policy saves, paired over seeds", columns, rows)


def _front(document: Record, colours: Colours) -> Picture:
    """Draw the clusters that meet the objective, by policy and GPU, with their Pareto front."""
    meets: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    tried = [cluster for cluster in document["clusters"] if not cluster["hopeless"]]
    for cluster in [*tried, *document["pareto_front"]]:
        if cluster["verdict"] == "meets" and cluster["gpus"] <= document["max_gpus"]:
            user, gpu = (nan(cluster[f"tokens_per_s_per_{of}"]) for of in ("user", "gpu"))
            point = (user, gpu, _name(cluster))
            group = meets.setdefault((cluster["policy"], cluster["gpu"]), [])
            if point not in group:
                group.append(point)
    gpus = list(dict.fromkeys(gpu for _, gpu in meets))
    return pareto_picture(
        [
            (f"{policy} on {gpu}", colours("policy", policy), gpus.index(gpu), own)
            for (policy, gpu), own in meets.items()
        ]
    )


def _attained(found: Sequence[Record], document: Record, colours: Colours) -> Picture:
    rows = [_dot(c, c["slo_attainment"], colours, 100.0) for c in found]
    target = f"SLO attainment, % of the requests (asked for: {100 * document['attainment']:g}%)"
    return intervals("Attainment of the cheapest clusters", target, rows, differences=False)


def _name(cluster: Record) -> str:
    where = f"on {cluster['gpu']} under {cluster['policy']}"
    return f"{_workers(cluster)} {where}, {cluster['gpus']} GPUs"


def _workers(cluster: Record) -> str:
    """Return xPyD or xC, and the sizes of the workers."""
    size = cluster["tensor_parallel_size"]
    prefill = cluster.get("prefill_tensor_parallel_size", size)  # older plans have none
    budget, ranks = cluster.get("max_num_batched_tokens"), cluster.get("enable_expert_parallel")
    text = str(cluster["topology"])
    if text.endswith("C"):
        prefill = size
    if max(size, prefill) > 1:
        sizes = f"{size} GPUs each" if size == prefill else f"{prefill} and {size} GPUs"
        text += f" of {sizes}" + (", EP" if ranks else "")
    return text + (f", {budget} tokens a step" if budget else "")


def _price(cluster: Record) -> str:
    price = cluster["price_per_hour"]
    return "" if price is None else f", ${number(float(price))} an hour"


# Prompts at once ---------------------------------------------------------------------------------


def _fastest(document: Record, colours: Colours) -> dict[str, Any]:
    rows: list[list[Value]] = []
    dots = []
    for each in document["clusters"]:
        known = each["cluster"] or {}
        rate = each["prefill_throughput"]
        rows.append(
            [
                *(each[key] for key in ("strategy", "gpu")),
                known.get("topology", "refused"),
                *(known.get(key) for key in ("max_num_batched_tokens", "gpus")),
                None if rate is None else _interval_cell(rate),
                each["prefill_mfu"],
                each["price_per_million_tokens"],
                each["weakest_provenance"],
                "; ".join(each["reasons"]),
            ]
        )
        if rate is not None:
            dots.append(_dot({"policy": each["strategy"], "gpu": each["gpu"]}, rate, colours))
    columns = ["strategy", "GPU", "cluster", "tokens a step", "GPUs"]
    columns += [f"{label('prefill_throughput')} [95% interval]", label("prefill_mfu")]
    columns += ["$ per million tokens", "step times", "refused"]
    best = document["clusters"][0] if document["clusters"] else None
    title = "No strategy has memory"
    if best is not None and best["cluster"] is not None:
        title = f"Prompts at once: {best['cluster']['topology']} on {best['gpu']}"
    pictures = [intervals("Prompt tokens a second", "tokens/s", dots, differences=False)]
    return {
        "title": title,
        "basis": _basis(document, ()),
        "clusters": table("Strategies, the cheapest tokens first", columns, rows),
        "pictures": pictures if dots else [],
    }


# The highest rate ---------------------------------------------------------------------------------


def _rates(document: Record, colours: Colours) -> dict[str, Any]:
    rates, gains = document["rates"], document["gains"]
    topologies = ", ".join(dict.fromkeys(each["topology"] for each in rates))
    rows: list[list[Value]] = [
        [
            each["policy"],
            each["gpu"],
            _workers(each),
            each["gpus"],
            None if each["highest_rate"] is None else _interval_cell(each["highest_rate"]),
            ", ".join(number(rate) for rate in each["by_seed"]),
            each["reason"],
        ]
        for each in rates
    ]
    columns = ["policy", "GPU", "cluster", "GPUs", "requests/s [95% interval]"]
    columns += ["seed by seed, requests/s", "why none"]
    drawn = [
        _dot(each, each["highest_rate"], colours)
        for each in rates
        if each["highest_rate"] is not None
    ]
    pictures = [intervals("Highest rate", "highest rate, requests/s", drawn, differences=False)]
    if gains:
        dots = [_dot(gain, gain["percent"], colours) for gain in gains]
        text = f"difference from {gains[0]['reference']}, %"
        pictures.append(intervals("Gain", text, dots))
    gained = [
        [gain["policy"], gain["reference"], gain["gpu"], difference(*_ends(gain["percent"]))]
        for gain in gains
    ]
    against = ["policy", "against", "GPU", "rate, % [95% interval]"]
    title = "Gain of a policy, paired over seeds"
    return {
        "title": f"Highest rate of {topologies}",
        "topologies": topologies,
        "basis": _basis(document, ()),
        "rates": table("Highest rate within the objective", columns, rows),
        "gains": table(title, against, gained) if gains else None,
        "pictures": pictures,
    }


def _ends(of: Record) -> tuple[float, float, float]:
    return nan(of["mean"]), nan(of["low"]), nan(of["high"])


def _dot(
    of: Record, figure: Record, colours: Colours, factor: float = 1.0
) -> tuple[str, float, float, float, int]:
    """Return a row for `intervals`: policy and GPU, interval, colour."""
    mean, low, high = (factor * value for value in _ends(figure))
    colour = colours("policy", of["policy"])
    return f"{of['policy']} on {of['gpu']}", mean, low, high, colour


def _interval(figure: Record, factor: float = 1.0, signs: bool = False) -> str:
    mean, low, high = (factor * value for value in _ends(figure))
    return interval(mean, low, high, signs=signs)


def _interval_cell(figure: Record, factor: float = 1.0) -> Value:
    return measured(factor * nan(figure["mean"]), _interval(figure, factor))
