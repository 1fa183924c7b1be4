"""What a plan answered, in words, tables and pictures: for its page, and for the terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eldr_sim.reports.basis import basis
from eldr_sim.reports.cells import (
    PLAN_COLUMNS,
    Table,
    Value,
    interval,
    measured,
    nan,
    number,
    plain,
    table,
)
from eldr_sim.reports.folders import Folder
from eldr_sim.reports.pictures import Colours, Picture, intervals, pareto_picture
from eldr_sim.traces.requests.session_shape import rate_unit

Record = Mapping[str, Any]

#: What `figure` of a row is, and how its picture is called.
_FIGURES = {
    "rate": ("requests/s", "Highest rate"),
    "split": ("requests/s", "Highest rate"),
    "fastest": ("prompt tokens/s", "Speed of prompts at once"),
    "day": ("GPU-hours", "What each rule takes"),
}
_TITLES = {
    "cluster": "Cheapest cluster of each candidate, {by} first",
    "rate": "Highest rate of each candidate, mean over seeds",
    "split": "Highest rates of the splits, mean over seeds",
    "fastest": "Fastest token budget of each strategy, {by} first",
    "day": "Cheapest fleet of each rule that meets the objective, mean over seeds",
}
#: Columns that say nothing of a kind: a cluster at its highest rate just attains the target.
_WITHOUT = {
    "rate": {"slo_attainment", "verdict"},
    "split": {"slo_attainment", "verdict"},
    "fastest": {"slo_attainment", "verdict", "p99_ttft_ms", "prefill_throughput"},
    "day": {"verdict"},
}
#: Columns for which a terminal has no room.
_WIDE = {"mean_active_experts_per_step", "mean_active_experts_per_token", "by_seed", "verdict"}


def plan_section(folder: Folder, colours: Colours) -> dict[str, Any]:
    """Return the content of ``plan.html``."""
    document = folder.documents["plan"]
    fields = [[name, plain(value)] for name, value in document["config"].items()]
    assumptions = document["assumptions"]
    tried = document["clusters"]
    return plan_words(document) | {
        "plan": document,
        "basis": basis(
            {} if assumptions is None else {"": assumptions}, lambda _: document["warnings"]
        ),
        "pictures": _pictures(document, colours),
        "shapes": shapes_table(document),
        "tried": _clusters("Clusters tried", document, tried) if tried else None,
        "configuration": table("Configuration", ["field", "value"], fields),
    }


def plan_words(document: Record, *, narrow: bool = False) -> dict[str, Any]:
    """Return what ``plan.json`` says: its title, question, answer and tables. ``narrow``: leave out
    the columns for which a terminal has no room."""
    answer, kind = document["answer"], document["kind"]
    nothing = {"cluster": "No cluster meets the objective", "fastest": "No strategy has memory"}
    nothing["day"] = "No fleet meets the objective"
    title = nothing.get(kind, "No rate is within the objective")
    if answer is not None:
        title = f"Plan: {_name(answer)}"
    by = "lowest price" if document["cheapest_by"] == "price_per_hour" else "fewest GPUs"
    if kind == "fastest":
        by = "cheapest tokens"
    front = document["pareto_front"]
    best = _TITLES[kind].format(by=by)
    meeting = "Pareto front of the clusters that meet the objective"
    return {
        "title": title,
        "question": _question(document),
        "answer": (_answer(document) if answer is not None else [])
        + [(f"Why not {name}", text) for name, text in document.get("why_not", {}).items()],
        "rows": _clusters(best, document, _rows(document), narrow),
        "front": _clusters(meeting, document, front, narrow) if front else None,
        "day": _day_table(document.get("day", ())),
    }


def _day_table(fleets: Sequence[Record]) -> Table | None:
    """Return the ready workers of fleets over the day; None where no fleet changes."""
    if not fleets or not fleets[0]["periods"]:
        return None
    columns, rows = ["from (h:min)", "requests/s"], []
    columns += [f"{fleet['policy']}, {pool}" if len(workers) > 1 else str(fleet["policy"])
                for fleet in fleets
                for workers in [fleet["periods"][0]["workers"]] for pool in workers]  # fmt: skip
    for periods in zip(*(fleet["periods"] for fleet in fleets), strict=False):
        minutes = int(periods[0]["from_s"] // 60)
        counts = [n for period in periods for n in period["workers"].values()]
        clock = f"{minutes // 60}:{minutes % 60:02d}"
        rows.append([clock, periods[0]["requests_per_s"], *(f"{n:.1f}" for n in counts)])
    return table("Ready workers over the day, mean of each period, first seed", columns, rows,
                 "A timetable knows the load in advance; it is the ideal that rules can be held "
                 "against.")  # fmt: skip


def _rows(document: Record) -> list[dict[str, Any]]:
    rows = []
    for row in document["rows"]:
        seeds = {"seeds": len(row["by_seed"])} if row["by_seed"] else {}
        rows.append({**(row["cluster"] or {}), **row, **seeds})
    return rows


def _question(document: Record) -> str:
    kind, max_gpus = document["kind"], document["max_gpus"]
    of = "" if max_gpus is None else f", up to {max_gpus} GPUs"
    if kind == "fastest":
        return f"Prompts at once{of}"
    bounds = ", ".join(f"{name.upper()} {ms:g} ms" for name, ms in document["slo_ms"].items())
    goal = f"within {bounds} for {100 * document['attainment']:g}% of requests"
    if kind in ("cluster", "day"):
        unit = rate_unit(document["config"]["workload"])
        unit += " on average" if kind == "day" else ""
        return f"{document['request_rate']:g} {unit} {goal}{of}"
    return f"Highest rate {goal}{of}"


def _answer(document: Record) -> list[tuple[str, str]]:
    margin, other, kind = document["margin"], document["runner_up"], document["kind"]
    figures = [
        f": {_interval(row['figure'])} {_unit(document)}"
        for row in document["rows"]
        if row["figure"] is not None
    ] or ["", ""]
    lines = [("Answer", _name(document["answer"]) + _price(document["answer"]) + figures[0])]
    if (blocks := document["answer"].get("slo_by_blocks")) is not None:
        mean, low, high = (100.0 * end for end in _ends(blocks))
        told = f"attains {mean:.2f} [{low:.2f}, {high:.2f}]%, the interval over ten blocks of it"
        lines.append(("On the log", told))
    if other is not None:
        lost = _why_it_lost(document["answer"], other) if kind == "cluster" else ""
        lines.append(("Runner-up", _name(other) + _price(other) + figures[1] + lost))
    if ties := document.get("ties"):
        told = "the seeds tell no difference, take the simpler"
        if kind == "cluster":
            told = "the price differs by less than predictions may be off (error band)"
        lines.append(("Tie", f"{'; '.join(map(_name, ties))}: {told}"))
    lines += _paid(document["answer"])
    if margin is not None:
        least = "at least " if margin["highest_rate_is_a_lower_bound"] else ""
        load = _interval(margin["percent_above_load"], signs=True)
        unit = rate_unit(document["config"]["workload"])
        rate = f"{_interval(margin['highest_rate'])} {unit}: {load}% of the load"
        if blocks is not None:
            rate += ", the log's arrivals drawn closer"
        lines.append(("Margin", f"carries {least}{rate}"))
        together = str(document["answer"]["topology"]).endswith("C")
        for role in ("decode", "prefill"):
            lost = margin[f"one_{role}_worker_lost"]
            if role == "decode" or not together:
                which = "" if together else f"{role} "
                lines.append((f"One {which}worker less", _lost(lost)))
        if "chunks" in document["answer"]:  # prefill workers alone
            del lines[-2]
    for gain in document["gains"]:
        against = f"{gain['reference']} on {gain['gpu']} ({len(gain['by_seed'])} paired seeds)"
        if kind == "day":
            taken = _interval(gain["gain"], signs=True)
            seeds = f"{len(gain['by_seed'])} paired seeds"
            lines.append((gain["policy"], f"{taken}% {_unit(document)} ({seeds})"))
            continue
        if kind == "cluster":
            text = f"{gain['policy']} saves {_interval(gain['gain'])} GPUs against {against}"
        else:
            percent = _interval(gain["gain"], signs=True)
            text = f"{gain['policy']} carries {percent}% against {against}"
        lines.append(("Gain", text))
    return lines + list(_sensitivity(document.get("sensitivity", ())))


def _unit(document: Record) -> str:
    kind = document["kind"]
    priced = kind == "day" and document["cheapest_by"] == "price_per_hour"
    return "$" if priced else _FIGURES.get(kind, ("",))[0]


def _why_it_lost(answer: Record, other: Record) -> str:
    """Return what the runner-up has less of than the answer."""
    by = "gpus" if answer["price_per_hour"] is None else "price_per_hour"
    dearer = 100.0 * (other[by] / answer[by] - 1.0)
    if dearer > 0.0:
        return f": {'more GPUs' if by == 'gpus' else 'dearer'} by {dearer:.0f}%"
    held = [each.get("kv_tiers_gb", 0.0) for each in (other, answer)]
    if held[0] > held[1]:
        return ": as cheap, with {:,.4g} GB of KV tiers where the answer has {:,.4g}".format(*held)
    shares = (100.0 * each["slo_attainment"]["mean"] for each in (other, answer))
    return ": as cheap, and attains {:.2f}% where the answer attains {:.2f}%".format(*shares)


def _paid(cluster: Record) -> list[tuple[str, str]]:
    lines, output = [], cluster.get("cost_per_million_output_tokens")
    prompt, kwh = (
        cluster.get(f"{name}_tokens")
        for name in ("price_per_million_prompt", "most_kwh_per_million_output")
    )
    if prompt is not None:
        each = f"${number(prompt)} per million input tokens"
        each += "" if output is None else f", or ${number(output)} per million output tokens"
        lines.append(("Cost", f"{each}, either for the whole cluster"))
    if kwh is not None:
        lines.append(("Energy", f"at most {number(kwh)} kWh per million output tokens"))
    return lines


def _sensitivity(effects: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Yield a line for each input that would have changed the answer, and one of the others."""
    same: dict[str, list[str]] = {}
    for each in effects:
        if each["another_answer"]:
            other = each["answer"]
            text = "no cluster" if other is None else _name(other) + _price(other)
            yield "Sensitivity", f"{each['input']} {each['percent']:+d}%: {text}"
        else:
            same.setdefault(each["input"], []).append(f"{each['percent']:+d}")
    if same:
        kept = ", ".join(f"{name} {' or '.join(signs)}%" for name, signs in same.items())
        yield "Sensitivity", f"the same answer with {kept}"


def _lost(cluster: Record | None) -> str:
    if cluster is None:
        return "serves nothing"
    share = f"{100 * cluster['slo_attainment']['mean']:.1f}%"
    latencies = [
        f", {name.upper()} p99 {number(cluster[f'p99_{name}_ms'])} ms"
        for name in ("ttft", "tpot")
        if cluster[f"p99_{name}_ms"] is not None
    ]
    tail = ", under one seed" if cluster["hopeless"] else ""
    return f"{cluster['topology']} attains {share}{''.join(latencies)}{tail}"


def _clusters(
    title: str, document: Record, clusters: Sequence[Record], narrow: bool = False
) -> Table:
    kind, redundant = (
        document["kind"],
        [cluster.get("num_redundant_experts") for cluster in clusters],
    )
    left = _WITHOUT.get(kind, set()) | (_WIDE if narrow else set())
    if len(set(redundant) - {None}) < 2:  # they are paid for in KV blocks
        left |= {"kv_blocks_per_worker"}
    prompts = any("chunks" in cluster for cluster in clusters)
    if narrow and not prompts:  # a line of the answer says it
        left |= {"price_per_million_prompt_tokens"}
    asked = "figure" if kind in ("rate", "split") else "name"  # says why a cluster has no figure
    columns = [
        key
        for key in PLAN_COLUMNS
        if key not in left
        and (any(cluster.get(key) not in (None, []) for cluster in clusters) or key == asked)
    ]
    heads = PLAN_COLUMNS | {"figure": f"{_unit(document)} [95% interval]"}
    if prompts:
        heads["policy"] = "strategy"
    cells = [[_cell(cluster, key) for key in columns] for cluster in clusters]
    return table(title, [heads[key] for key in columns], cells)


def _cell(cluster: Record, key: str) -> Value:
    value: Any = cluster.get(key)
    if key == "name" and (value is None or cluster.get("without")):
        without = str(cluster.get("without") or "none")
        return without if value is None else str(value)
    if key == "figure" and value is None and cluster.get("cluster"):
        reason = cluster["reasons"][0]
        return reason if cluster["without"] == "beaten" else f"none: {reason}"
    if key == "verdict" and cluster.get("hopeless"):
        return "hopeless under one seed" if value == "misses" else "undecided after one seed"
    if key == "by_seed":
        return ", ".join(map(number, value))
    if key == "slo_attainment" and value is not None:
        mean, *ends = (100.0 * end for end in _ends(value))
        known = " [{:.2f}, {:.2f}]".format(*ends) if ends[0] == ends[0] else ""
        return measured(mean, f"{mean:.2f}{known}")
    if isinstance(value, dict):
        return measured(nan(value["mean"]), _interval(value))
    return value if value is not None else measured(None, "")


def shapes_table(document: Record) -> Table | None:
    """Return what became of every shape of clusters; None where none was searched."""
    rows: list[list[Value]] = []
    for row in document["rows"]:
        for each in row["shapes"]:
            figures = (each[key] for key in ("shape", "least_cost", "estimated_cost"))
            shape = [row["policy"], row["gpu"], *figures]
            rows.append([*shape, each["topology"] or "-", each["reason"]])
    title = "Cluster shapes in search order; each must be cheaper than all before it"
    columns = ["policy", "GPU", "shape", "at least", "estimated", "cheapest", "why none"]
    return table(title, columns, rows) if rows else None


def _pictures(document: Record, colours: Colours) -> list[Picture]:
    """Draw the figures of the rows, what policies gain, and the Pareto front."""
    kind, pictures = document["kind"], []
    key, title = "slo_attainment", "Attainment of the cheapest clusters"
    if kind == "cluster":
        unit = f"SLO attainment, % of the requests (asked for: {100 * document['attainment']:g}%)"
    else:
        unit, title, key = _unit(document), _FIGURES[kind][1], "figure"
    dots = [
        _dot(row, row[key], colours, 100.0 if kind == "cluster" else 1.0)
        for row in _rows(document)
        if row.get(key) is not None
    ]
    if document["pareto_front"]:
        pictures.append(_front(document, colours))
    if dots:
        pictures.append(intervals(title, unit, dots, differences=False))
    if gains := document["gains"]:
        what = {"cluster": "GPUs saved", "day": f"{_unit(document)}, %"}.get(
            kind, "gain in rate, %"
        )
        drawn = [_dot(gain, gain["gain"], colours) for gain in gains]
        pictures.append(intervals("Gain", f"{what}, against {gains[0]['reference']}", drawn))
    return pictures


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
    clouds = [
        (f"{policy} on {gpu}", colours("policy", policy), gpus.index(gpu), own)
        for (policy, gpu), own in meets.items()
    ]
    return pareto_picture(clouds)


def _name(cluster: Record) -> str:
    chunks = f", {cluster['chunks']} tokens a step" if "chunks" in cluster else ""
    n = cluster["gpus"]
    most = "up to " if " to " in cluster["name"] else ""
    where = f"{cluster['name']} on {cluster['gpu']} under {cluster['policy']}"
    return f"{where}{chunks}, {most}{n} GPU{'s' if n > 1 else ''}"


def _price(cluster: Record) -> str:
    price = cluster["price_per_hour"]
    return "" if price is None else f", ${number(float(price))} an hour"


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
