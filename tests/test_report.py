"""Reports: well-formed pages that need no network and say what their sources say."""

import base64
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.planning.sweep import sweep
from eldr_sim.reports.charts import Series, interval_chart, stacked_bars, xy_chart
from eldr_sim.reports.figures import pareto
from eldr_sim.reports.markup import el, number, table, to_html
from eldr_sim.reports.page import report, write_report
from eldr_sim.reports.runs import mean_in_phase
from eldr_sim.reports.scales import linear
from eldr_sim.simulator.config import make_config
from eldr_sim.simulator.results import write_json, write_result, write_table
from eldr_sim.simulator.run import simulate

VOID = {"meta", "link", "br", "hr", "img", "input"}
SHORT = {"topology": "2P3D", "request_rate": 20, "duration": 3, "warmup": 1, "output_len": 20}


class Node:
    """An element of a parsed page."""

    def __init__(self, tag, attributes):
        self.tag, self.attributes, self.children = tag, dict(attributes), []

    @property
    def text(self):
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    def all(self, tag, class_=None):
        for child in self.children:
            if isinstance(child, Node):
                if child.tag == tag and (
                    class_ is None or class_ in child.attributes.get("class", "").split()
                ):
                    yield child
                yield from child.all(tag, class_)


class Page(HTMLParser):
    """Parses strictly: every element is closed, in order."""

    def __init__(self, html):
        super().__init__()
        self.root = Node("document", [])
        self.open = [self.root]
        self.feed(html)
        self.close()
        assert [node.tag for node in self.open] == ["document"]

    def handle_starttag(self, tag, attrs):
        node = Node(tag, attrs)
        assert len(node.attributes) == len(attrs), f"an attribute twice: {attrs}"
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag):
        assert self.open.pop().tag == tag

    def handle_data(self, data):
        self.open[-1].children.append(data)

    def tables(self):
        """Return rows of cells by caption."""
        return {
            next(t.all("caption")).text: [
                [c for c in row.children if isinstance(c, Node)] for row in t.all("tr")
            ]
            for t in self.root.all("table")
        }

    def charts(self):
        """Return figures by caption."""
        return {next(f.all("figcaption")).text: f for f in self.root.all("figure")}


def tips(figure):
    """Return the lines that each mark of a figure says."""
    nodes = itertools.chain.from_iterable(figure.all(tag) for tag in ("path", "circle", "rect"))
    return [n.attributes["data-tip"].split("\n") for n in nodes if "data-tip" in n.attributes]


@pytest.fixture(scope="module")
def pages(report_folders):
    """Pages of one run, two runs, and all together."""
    both = [report_folders / "jsq", report_folders / "eldr"]
    return {
        "one": report(both[:1]),
        "two": report(both),
        "all": report(sorted(report_folders.iterdir())),
        **{name: report([report_folders / name]) for name in ("sweep", "plan", "rates")},
    }


@pytest.mark.parametrize("name", ["one", "two", "sweep", "plan", "rates", "all"])
def test_page_is_well_formed_and_needs_no_network(pages, name):
    page = Page(pages[name])

    def walk(node):
        for child in node.children:
            if isinstance(child, Node):
                yield child
                yield from walk(child)

    for node in walk(page.root):
        assert node.tag not in {"img", "iframe", "object", "embed", "base", "form"}
        for attribute, value in node.attributes.items():
            assert not attribute.startswith("on"), "scripts live in the script"
            if attribute in {"src", "href", "xlink:href", "srcset", "action", "data"}:
                assert value.startswith("#") or value == "data:,"
    for asset in ("report.css", "report.js"):
        text = (files("eldr_sim.reports") / "assets" / asset).read_text()
        addresses = re.findall(r"https?://[^\s\"')]+", text)
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", text)
    ids = [n.attributes["id"] for n in walk(page.root) if "id" in n.attributes]
    assert len(ids) == len(set(ids))
    links = [n.attributes["href"][1:] for n in page.root.all("a")]
    assert set(links) <= set(ids)
    assert len(links) == (5 if name == "all" else 0)


def test_only_the_pages_own_script_may_run(pages):
    page = Page(pages["one"])
    (script,) = page.root.all("script")
    digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
    policies = [
        n.attributes["content"]
        for n in page.root.all("meta")
        if n.attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policies
    assert "default-src 'none'" in policies[0]
    assert f"script-src 'sha256-{digest}'" in policies[0]


def test_every_number_of_a_runs_tables_is_the_sources(pages, report_folders):
    summary = json.loads((report_folders / "jsq" / "summary.json").read_text())
    tables = Page(pages["one"]).tables()
    head, *rows = tables["Latencies of completed requests, ms"]
    assert [cell.text for cell in head] == ["latency", "mean, ms", "p50, ms", "p90, ms", "p99, ms"]
    for label, *cells in rows:
        tag = {"E2E": "e2el"}.get(label.text, label.text.lower())
        for statistic, cell in zip(("mean", "p50", "p90", "p99"), cells, strict=True):
            value = summary[f"{statistic}_{tag}_ms"]
            assert float(cell.attributes["data-value"]) == value
            assert cell.text == number(value)
    figures = {
        row[0].text: float(row[1].attributes["data-value"])
        for row in tables["Throughput, goodput and cost"][1:]
    }
    assert figures["Goodput, requests/s"] == summary["request_goodput"]
    assert figures["SLO attainment, share of requests"] == summary["slo_attainment"]
    assert figures["Cost per million output tokens"] == summary["cost_per_million_output_tokens"]
    fields = {row[0].text: row[1].text for row in tables["Configuration"][1:]}
    config = json.loads((report_folders / "jsq" / "config.json").read_text())["config"]
    assert set(fields) == set(config)
    assert fields["goodput"] == "ttft 500, tpot 40"


def test_runs_stand_side_by_side(pages, report_folders):
    tables = Page(pages["two"]).tables()
    head, *rows = tables["Throughput, goodput and cost"]
    assert [cell.text for cell in head] == ["figure", "jsq", "eldr"]
    experts = next(row for row in rows if row[0].text == "Active experts of a step, mean")
    for cell, name in zip(experts[1:], ("jsq", "eldr"), strict=True):
        summary = json.loads((report_folders / name / "summary.json").read_text())
        assert float(cell.attributes["data-value"]) == summary["mean_active_experts_per_step"]
    differ = tables["Fields that differ"]
    assert [[cell.text for cell in row] for row in differ[1:]] == [["policy", "jsq", "eldr"]]


def test_every_chart_says_its_axes_with_units(pages):
    units = {
        "Distribution of TTFT": ["TTFT, ms", "share of requests at or below"],
        "Distribution of TPOT": ["TPOT, ms", "share of requests at or below"],
        "Distribution of E2E latency": ["E2E latency, ms", "share of requests at or below"],
        "Active experts against batch": [
            "batch of a decode step, requests",
            "distinct experts a MoE layer, mean",
        ],
        "Where the time to first token goes": ["run", "mean time in the phase, ms"],
        "Requests waiting for prefill": ["simulated time, s", "requests, mean of the interval"],
        "Requests between prefill and decode": [
            "simulated time, s",
            "requests, mean of the interval",
        ],
        "Requests decoding": ["simulated time, s", "requests, mean of the interval"],
        "TPOT over time": ["finish time, simulated s", "TPOT, ms, median"],
        "Mean batch of each decode worker by domain": [
            "decode worker",
            "mean batch, requests, by share of domain",
        ],
    }
    charts = Page(pages["one"]).charts()
    assert {
        title: [text.text for text in figure.all("text", "axis")]
        for title, figure in charts.items()
    } == units
    for figure in charts.values():
        assert len(list(figure.all("text", "tick"))) >= 4
        (svg,) = (n for n in figure.children if isinstance(n, Node) and n.tag == "svg")
        assert svg.attributes["tabindex"] == "0"
        assert svg.attributes["aria-label"]


def test_charts_say_what_the_tables_of_the_run_hold(pages, report_folders):
    charts = Page(pages["one"]).charts()
    requests = pq.read_table(report_folders / "jsq" / "requests.parquet")
    done = requests.filter(pc.and_(requests["measured"], pc.is_valid(requests["finish_s"])))
    ttft = done["ttft_ms"].to_numpy()
    told = tips(charts["Distribution of TTFT"])
    assert len(told) == 101
    for q in (0, 50, 99, 100):
        assert told[q][0] == f"TTFT, ms: {number(float(np.percentile(ttft, q)))}"
        assert told[q][1].endswith(f": {number(q / 100)}")
    steps = pq.read_table(report_folders / "jsq" / "steps.parquet").to_pandas()
    decode = steps[(steps["role"] == "decode") & (steps["batch"] > 0)]
    decode = decode[decode["tokens"] == decode["batch"]]
    told = {tip[0]: tip for tip in tips(charts["Active experts against batch"])}
    for batch, own in decode.groupby("batch"):
        tip = told[f"batch of a decode step, requests: {batch}"]
        assert tip[1].endswith(f": {number(float(own['active_experts'].mean()))}")
        assert tip[-1] == f"{len(own):,} steps"
    for worker, own in steps[steps["role"] == "decode"].groupby("worker"):
        seconds = own["end_s"] - own["start_s"]
        mean = float((own["batch"] * seconds).sum() / seconds.sum())
        tip = next(
            t
            for t in tips(charts["Mean batch of each decode worker by domain"])
            if t[0] == f"decode worker {worker}"
        )
        assert tip[-1].endswith(f": {number(mean)}")


@given(
    st.lists(
        st.tuples(
            st.floats(0, 10),
            st.one_of(st.none(), st.floats(0, 5)),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_mean_in_phase_is_the_integral_of_the_number_there(rows):
    start = np.array([s if entered else math.nan for s, _, entered in rows], float)
    end = np.array([math.nan if d is None else s + d for s, d, _ in rows], float)
    edges = np.linspace(0.0, 12.0, 5)
    expected = []
    for low, high in itertools.pairwise(edges):
        total = 0.0
        for s, e in zip(start, end, strict=True):
            if not math.isnan(s):
                until = high if math.isnan(e) else min(e, high)
                total += max(0.0, until - max(s, low))
        expected.append(total / (high - low))
    assert mean_in_phase(start, end, edges) == pytest.approx(expected, abs=1e-9)


@given(
    st.lists(st.floats(-1e9, 1e9, allow_subnormal=False), min_size=1, max_size=5),
    st.booleans(),
)
def test_scale_holds_all_values_between_round_ticks(values, zero):
    scale = linear(values, 50.0, 450.0, zero=zero)
    shown = [*values, 0.0] if zero else values
    slack = 1e-6 * max(1e-300, *(abs(v) for v in shown))
    assert scale.low - slack <= min(shown)
    assert max(shown) <= scale.high + slack
    assert 2 <= len(scale.ticks) <= 9
    assert all(50.0 - 1e-3 <= scale(tick) <= 450.0 + 1e-3 for tick in scale.ticks)
    labels = [scale.text(tick) for tick in scale.ticks]
    assert len(set(labels)) == len(labels)


def test_scale_of_nothing_and_of_one_value():
    assert linear([], 0, 1).ticks
    for value in (0.0, 5.0, -3.0, 1e-9):
        scale = linear([value], 0.0, 1.0)
        assert scale.low < scale.high
        assert scale.low <= value <= scale.high


def test_comparison_shows_each_difference_with_its_interval(pages, report_folders):
    summary = json.loads((report_folders / "comparison" / "summary.json").read_text())
    page = Page(pages["all"])
    (caption,) = (c for c in page.tables() if c.startswith("Difference from round_robin"))
    row = page.tables()[caption][1]
    metrics = [d for d in summary["differences"] if d["policy"] == "jsq"]
    assert len(row) == 1 + len(metrics) == 7
    for cell, difference in zip(row[1:], metrics, strict=True):
        assert float(cell.attributes["data-value"]) == difference["percent"]
        numbers = [float(n) for n in re.findall(r"[+-][\d.]+", cell.text.replace("−", "-"))]
        told = [difference[key] for key in ("percent", "low", "high")]
        assert numbers == pytest.approx(told, abs=0.0051)
    article = next(a for a in page.root.all("article") if "Policies compared" in a.text)
    charts = [f for f in article.all("figure") if next(f.all("figcaption")).text == "TPOT p50"]
    references = list(dict.fromkeys(d["reference"] for d in summary["differences"]))
    assert [[t.text for t in chart.all("text", "axis")] for chart in charts] == [
        [f"difference from {reference}, %"] for reference in references
    ]
    assert [len(tips(chart)) for chart in charts] == [1] * len(references)
    runs = pq.read_table(report_folders / "comparison" / "runs.parquet").to_pylist()
    figures = page.tables()["Figures, mean over 2 seeds"]
    for cells in figures[1:]:
        own = [r["median_tpot_ms"] for r in runs if r["policy"] == cells[0].text]
        assert float(cells[1].attributes["data-value"]) == math.fsum(own) / 2


def test_every_number_of_a_sweep_is_the_sources(pages, report_folders):
    page = Page(pages["sweep"])
    aggregate = pq.read_table(report_folders / "sweep" / "aggregate.parquet").to_pylist()
    head, *rows = page.tables()["All 6 points"]
    columns = [cell.text for cell in head]
    assert columns[:5] == ["point", "policy", "request_rate", "TPOT p50, ms", "TPOT p99, ms"]
    assert columns[-2:] == ["runs", "runs failed"]
    for cells, point in zip(rows, aggregate, strict=True):
        row = dict(zip(columns, cells, strict=True))
        assert row["policy"].text == point["policy"]
        assert float(row["request_rate"].attributes["data-value"]) == point["request_rate"]
        for column, key in (
            ("TPOT p50, ms", "median_tpot_ms"),
            ("output tokens/s", "output_throughput"),
            ("cost per million output tokens", "cost_per_million_output_tokens"),
            ("runs failed", "runs_failed"),
        ):
            assert float(row[column].attributes["data-value"]) == point[key]
        half = 0.1 * point["median_tpot_ms"]
        expected = number(point["median_tpot_ms"])
        expected += "" if point["point"] == 5 else f" ± {half:.2f}"
        assert row["TPOT p50, ms"].text == expected
    failed = page.tables()["Runs that failed"][1:]
    assert [[cell.text for cell in row] for row in failed] == [
        ["policy=eldr, request_rate=40", "1", "1", "model: no room <for> it"]
    ]


def test_a_sweep_is_drawn_over_its_numbers_in_the_colours_of_its_words(pages, report_folders):
    page = Page(pages["sweep"])
    aggregate = pq.read_table(report_folders / "sweep" / "aggregate.parquet").to_pylist()
    chart = page.charts()["TPOT p99"]
    axes = [text.text for text in chart.all("text", "axis")]
    assert axes == ["request_rate, requests/s", "TPOT p99, ms"]
    assert [entry.text for entry in chart.all("li")] == ["jsq", "eldr"]
    expected = []
    for point in aggregate:
        tip = [point["policy"], f"request_rate, requests/s: {point['request_rate']:.0f}"]
        tip.append(f"TPOT p99, ms: {number(point['p99_tpot_ms'])}")
        if point["p99_tpot_ms_low"] is not None:
            ends = [number(point[f"p99_tpot_ms_{end}"]) for end in ("low", "high")]
            tip.append(f"90% interval: {' to '.join(ends)}")
        expected.append(tip)
    assert tips(chart) == expected
    cloud = tips(page.charts()["Throughput of a GPU against speed for a user"])
    told = {tuple(tip) for tip in cloud if tip[0] != "Pareto front"}
    for point in aggregate:
        user, gpu = 1e3 / point["median_tpot_ms"], point["output_throughput"] / point["gpus"]
        assert (
            point["policy"],
            f"output tokens/s for a user (1 / median TPOT): {number(user)}",
            f"output tokens/s of a GPU: {number(gpu)}",
            point["name"],
        ) in told


def test_a_real_sweep_has_a_page(tmp_path):
    config = {**SHORT, "topology": "1P2D", "duration": 2}
    spec = {
        "config": {key: value for key, value in config.items() if key != "request_rate"},
        "sweep": {
            "type": "grid",
            "parameters": {"policy": ["jsq", "no_such_policy"], "request_rate": [10, 20]},
        },
        "multiRun": {"numRuns": 2},
    }
    swept = sweep(spec, tmp_path / "sweep", jobs=1)
    page = Page(report([tmp_path / "sweep"]))
    rows = page.tables()["All 4 points"]
    column = [cell.text for cell in rows[0]].index("TPOT p50, ms")
    told = [row[column].attributes["data-value"] for row in rows[1:]]
    expected = swept.aggregate["median_tpot_ms"].to_pylist()
    assert told == ["" if value is None else repr(value) for value in expected]
    assert [value is None for value in expected] == [False, False, True, True]
    assert len(page.tables()["Runs that failed"]) == 1 + 4


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_pareto_front_is_what_no_point_beats(points):
    floats = [(float(x), float(y)) for x, y in points] + [(math.nan, 100.0)]

    def beaten(p):
        return any(q[0] >= p[0] and q[1] >= p[1] and q != p for q in floats[:-1])

    front = [floats[i] for i in pareto(floats)]
    assert front == sorted({p for p in floats[:-1] if not beaten(p)})


def test_every_number_of_a_plan_is_the_sources(pages, report_folders):
    page = Page(pages["plan"])
    document = json.loads((report_folders / "plan" / "plan.json").read_text())
    assert next(page.root.all("h1")).text == "Plan: 2P3D on H100 under eldr, 5 GPUs"
    answer = next(page.root.all("section", "answer"))
    assert [d.text for d in answer.all("dd")] == [
        "2P3D on H100 under eldr, 5 GPUs, 12.50 an hour",
        "2P4D on H100 under jsq, 6 GPUs, 15.00 an hour",
        "carries 24.00 [22.00, 26.00] requests/s: +20.00 [+10.00, +30.00]% of the load",
        "eldr saves 1.25 [0.50, 2.00] GPUs against jsq on H100",
    ]
    warned = next(page.root.all("section", "warnings")).text
    assert "eldr on H100, not monotone" in warned
    assert "step times are derived and published" in warned
    tables = page.tables()
    reasons = tables["Policies and GPUs without a cluster"][1:]
    assert [[cell.text for cell in row] for row in reasons] == [["random", "H100", "too <slow>"]]
    for caption, clusters in (
        ("Cheapest cluster of each policy and GPU", [document["answer"], document["runner_up"]]),
        ("Pareto front of the clusters that meet the objective", document["pareto_front"]),
        ("Clusters tried", document["clusters"]),
    ):
        head, *rows = tables[caption]
        columns = [cell.text for cell in head]
        for cells, cluster in zip(rows, clusters, strict=True):
            row = dict(zip(columns, cells, strict=True))
            for column, key in (
                ("GPUs", "gpus"),
                ("price/hour", "price_per_hour"),
                ("TPOT p99, ms", "p99_tpot_ms"),
                ("tokens/s for a user", "tokens_per_s_per_user"),
                ("tokens/s of a GPU", "tokens_per_s_per_gpu"),
            ):
                assert float(row[column].attributes["data-value"]) == cluster[key]
            assert row["verdict"].text == cluster["verdict"]
            assert row["SLO attainment, %"].text == "99.5 [99.0, 100.0]"
    front = tips(page.charts()["Throughput of a GPU against speed for a user"])
    assert [tip[-1] for tip in front if tip[0] == "Pareto front"] == [
        "2P3D on H100 under eldr, 5 GPUs",
        "2P5D on H100 under eldr, 7 GPUs",
    ]
    assert not any("2P2D" in tip[-1] for tip in front), "it misses the objective"


def test_a_plan_without_a_cluster_says_why(report_folders, tmp_path):
    folder = tmp_path / "plan"
    shutil.copytree(report_folders / "plan", folder)
    document = json.loads((folder / "plan.json").read_text())
    document |= dict.fromkeys(("answer", "runner_up", "margin", "assumptions"))
    document |= {"pareto_front": [], "savings": [], "clusters": []}
    document["candidates"] = document["candidates"][2:]
    write_json(folder / "plan.json", document)
    page = Page(report([folder]))
    assert next(page.root.all("h1")).text == "No cluster meets the objective"
    assert page.tables()["Policies and GPUs without a cluster"][1][2].text == "too <slow>"


def test_a_plan_of_rates_shows_rates_and_gains(pages):
    page = Page(pages["rates"])
    rows = page.tables()["Highest rate within the objective"][1:]
    assert [cell.text for cell in rows[0]] == [
        *("eldr", "H100", "2P3D", "5", "1.25 [0.50, 2.00]", "1.00, 1.50", "")
    ]
    assert [cell.text for cell in rows[1]][4:] == ["–", "–, 1.00", "seed 0 carries none"]
    assert tips(page.charts()["Highest rate"])[0][-1] == "95% interval: 0.5000 to 2.00"
    assert page.tables()["What a policy gains, paired over seeds"][1][3].text == (
        "+1.25 [+0.50, +2.00]"
    )


def test_text_of_files_stays_text(report_folders, tmp_path):
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
    folder = tmp_path / "<b>run"
    shutil.copytree(report_folders / "jsq", folder)
    requests = pq.read_table(folder / "requests.parquet")
    column = pa.array([evil] * len(requests))
    index = requests.column_names.index("domain")
    write_table(folder / "requests.parquet", requests.set_column(index, "domain", column))
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"label": evil, "latency_warnings": [evil], "failed_reasons": {evil: 1}}
    summary["trace"]["name"] = evil
    write_json(folder / "summary.json", summary)
    page = Page(report([folder]))
    assert len(list(page.root.all("script"))) == 1
    assert not list(page.root.all("img"))
    assert next(page.root.all("h1")).text == evil
    assert evil in next(page.root.all("section", "warnings")).text
    workers = page.charts()["Mean batch of each decode worker by domain"]
    assert all(tip[1].startswith(evil) for tip in tips(workers))


def test_warnings_and_provenance_come_before_any_figure(report_folders, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(report_folders / "jsq", folder)
    summary = json.loads((folder / "summary.json").read_text())
    summary["lookups_outside_tables"]["moe_batch"] = 7
    summary["weakest_provenance"] = "roofline"
    summary["trace"]["output_tokens_beyond_recorded_share"] = 0.5
    write_json(folder / "summary.json", summary)
    html = report([folder, report_folders / "eldr"])
    page = Page(html)
    box = next(page.root.all("section", "warnings"))
    assert f"run: 7 of {summary['decode_steps']} decode steps lie outside" in box.text
    basis = next(page.root.all("section", "basis"))
    assert next(basis.all("b")).text == "roofline"
    for fact in ("10 recorded layers tiled over 48", "Reuse: ", "50.0% of the output tokens"):
        assert fact in basis.text
    assert html.index('class="warnings"') < html.index('class="basis"') < html.index("<table")


def test_a_run_in_which_nothing_completes_has_a_page(tmp_path):
    config = {**SHORT, "topology": "1P1D", "num_requests": 3, "output_len": 1_000_000}
    write_result(simulate(make_config({**config, "warmup": 0})), tmp_path / "run")
    page = Page(report([tmp_path / "run"]))
    rows = page.tables()["Requests that did not complete"]
    assert [cell.text for cell in rows[1]] == ["run", "exceeds_max_model_len", "3"]
    assert "Nothing to draw" in page.charts()["Distribution of TTFT"].text
    cells = page.tables()["Latencies of completed requests, ms"][1]
    assert cells[1].text == "–"
    assert cells[1].attributes["data-value"] == ""


def test_co_located_workers_have_a_page(tmp_path):
    write_result(simulate(make_config({**SHORT, "topology": "2C"})), tmp_path / "run")
    page = Page(report([tmp_path / "run"]))
    assert "prefill policy" not in next(page.root.all("p", "lead")).text
    assert tips(page.charts()["Active experts against batch"])
    assert tips(page.charts()["Mean batch of each decode worker by domain"])


def test_same_input_same_bytes(report_folders, tmp_path):
    here = tmp_path / "here.html"
    folders = [report_folders / name for name in ("jsq", "eldr", "comparison")]
    write_report(folders, here)
    there = tmp_path / "there.html"
    command = [sys.executable, "-m", "eldr_sim.cli.main", "report", *map(str, folders)]
    subprocess.run(
        [*command, "--out", str(there)],
        check=True,
        capture_output=True,
        env={
            "PYTHONHASHSEED": "7",
            "TZ": "Asia/Tokyo",
            "LC_ALL": "C",
            "ELDR_SIM_CACHE": os.environ["ELDR_SIM_CACHE"],
        },
    )
    assert here.read_bytes() == there.read_bytes()


def test_command_says_what_it_wrote_and_keeps_what_is_there(report_folders, tmp_path, run_cli):
    out = tmp_path / "new" / "page.html"
    code, told, err = run_cli("report", report_folders / "jsq", "--out", out)
    assert (code, err) == (0, "")
    assert told.startswith(f"Wrote {out} (")
    out.write_text("mine")
    code, _, err = run_cli("report", report_folders / "jsq", "--out", out)
    assert code == 2
    assert err == f"Error: out: {out} exists (allowed: a new file, or --force to replace it)\n"
    assert out.read_text() == "mine"
    assert run_cli("report", report_folders / "jsq", "--out", out, "--force")[0] == 0
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]


def test_nothing_is_left_when_writing_fails(report_folders, tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(KeyboardInterrupt):
        write_report([report_folders / "jsq"], tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_result_is_told_in_one_line(report_folders, tmp_path, run_cli):
    broken = tmp_path / "broken"
    shutil.copytree(report_folders / "jsq", broken)
    data = (broken / "steps.parquet").read_bytes()
    (broken / "steps.parquet").write_bytes(data[: len(data) // 2])
    other = tmp_path / "other"
    shutil.copytree(report_folders / "jsq", other)
    (other / "summary.json").write_text('{"label": "x"}')
    empty = tmp_path / "empty"
    empty.mkdir()
    cases = {
        (tmp_path / "absent",): "is no folder",
        (empty,): "is no result",
        (report_folders / "jsq" / "summary.json",): "is no folder",
        (broken,): "cannot read",
        (other,): "has a run's files but not its contents",
        (report_folders / "jsq", report_folders / "jsq"): "is given twice",
    }
    for folders, problem in cases.items():
        code, out, err = run_cli("report", *folders, "--out", tmp_path / "page.html")
        assert (code, out) == (2, "")
        assert err.startswith("Error: DIR: ")
        assert problem in err
        assert err.count("\n") == 1
    assert not (tmp_path / "page.html").exists()
    with pytest.raises(InputError, match="is a folder"):
        write_report([report_folders / "jsq"], tmp_path)


def test_table_sorts_by_full_values_and_marks_what_is_missing():
    drawn = table("t", ["name", "x"], [["b", 1234.5678], ["a", None], ["c", math.nan]])
    page = Page(to_html(el("div", drawn)))
    head, *rows = page.tables()["t"]
    assert [cell.attributes["aria-sort"] for cell in head] == ["none", "none"]
    assert [row[1].attributes["data-value"] for row in rows] == ["1234.5678", "", ""]
    assert [row[1].text for row in rows] == ["1,235", "–", "–"]
    assert all(row[1].attributes["class"] == "n" for row in rows)


def test_points_that_are_not_finite_are_left_out():
    series = [Series("a", [1.0, math.nan, 3.0], [1.0, 2.0, math.inf], [0.5, 0, 0], [2.0, 0, 0])]
    chart = xy_chart("t", "x, s", "y, ms", series)
    assert tips(Page(to_html(chart)).root) == [
        ["a", "x, s: 1", "y, ms: 1.00", "95% interval: 0.5000 to 2.00"]
    ]
    chart = interval_chart("t", "x, %", [("a", math.nan, math.nan, math.nan), ("b", 1.0, 0.5, 2)])
    assert [tip[0] for tip in tips(Page(to_html(chart)).root)] == ["b"]
    chart = stacked_bars("t", "x", "y, ms", ["0", "1"], [("a", [0.0, 1.0]), ("b", [0.0, 3.0])])
    told = tips(Page(to_html(chart)).root)
    assert told == [
        ["x 1", "a: 1.00 (25%)", "y, ms: 4.00"],
        ["x 1", "b: 3.00 (75%)", "y, ms: 4.00"],
    ]


# Colours ------------------------------------------------------------------------------------------

# Machado, Oliveira, Fernandes 2009: protanopia, deuteranopia, tritanopia at full severity.
SIGHT = [
    np.eye(3),
    np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
]
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear_rgb(colour):
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(a, b):
    """WCAG 2.2 contrast ratio."""
    light = sorted((XYZ @ linear_rgb(a))[1] for a in (a, b))
    return (light[1] + 0.05) / (light[0] + 0.05)


def lab(rgb):
    ratio = XYZ @ np.clip(rgb, 0, 1) / XYZ.sum(1)
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_colours_are_legible_and_told_apart_by_the_colour_blind(mode):
    css = (files("eldr_sim.reports") / "assets" / "report.css").read_text()
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", css)
    colours = {name: values[mode] for name, *values in pairs}
    for name in ("text", "soft", "accent"):
        for ground in ("page", "card"):
            assert contrast(colours[name], colours[ground]) >= 4.5
    for name in ("warn", "good", "weak"):
        assert contrast(colours[name], colours[f"{name}-page"]) >= 4.5
    series = [colours[f"c{i}"] for i in range(8)]
    assert min(contrast(colour, colours["card"]) for colour in series) >= 3.0
    for matrix in SIGHT:
        seen = [lab(matrix @ linear_rgb(colour)) for colour in series]
        distances = [np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)]
        assert min(distances) >= 20.0


def test_assets_are_small():
    folder = Path(str(files("eldr_sim.reports"))) / "assets"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 30_000
