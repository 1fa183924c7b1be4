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
import zlib
from importlib.resources import files

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.cli.console import print_summary
from eldr_sim.errors import InputError
from eldr_sim.reports.cells import number
from eldr_sim.reports.figures import pick, pictures_of
from eldr_sim.reports.page import report, write_report
from eldr_sim.reports.run_pictures import mean_in_phase
from eldr_sim.simulator.outcome.catalogue import LATENCIES
from eldr_sim.simulator.outcome.result_parts import parts_of
from eldr_sim.simulator.results import write_json, write_result, write_table
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config

from ..on_each import on_each
from .pages import Page, axes, colours, marks

SHORT = {"topology": "2P3D", "request_rate": 20, "duration": 3, "warmup": 1, "output_len": 20}


@pytest.fixture(scope="module")
def pages(report_folders):
    """Pages of one run, two runs, and all together."""
    both = [report_folders / "jsq", report_folders / "eldr"]
    return {
        "one": Page(report(both[:1])),
        "two": Page(report(both)),
        "all": Page(report(sorted(report_folders.iterdir()))),
    }


@pytest.mark.parametrize("name", ["one", "two", "all"])
def test_page_is_well_formed_and_needs_no_network(pages, name):
    page = pages[name]
    for node in page.root.walk():
        assert node.tag not in {"img", "iframe", "object", "embed", "base", "form"}
        for attribute, value in node.attributes.items():
            assert not attribute.startswith("on"), "scripts live in the scripts"
            if attribute in {"src", "href", "xlink:href", "srcset", "action", "data"}:
                assert value.startswith("#") or value == "data:,"
    for asset in ("report.css", "report.js"):
        text = (files("eldr_sim.reports") / "assets" / asset).read_text()
        assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|import\(", text)
    ids = [n.attributes["id"] for n in page.root.walk() if "id" in n.attributes]
    assert len(ids) == len(set(ids))
    links = [n.attributes["href"][1:] for n in page.root.all("a")]
    assert set(links) <= set(ids)
    assert len(links) == (5 if name == "all" else 0)


def test_only_plotly_and_the_pages_script_may_run(pages):
    root = pages["all"].root
    data = {"type": "application/json"}
    packed, own = [s for s in root.all("script") if s.attributes != data]
    digits = packed.text.replace(",", "<").encode()
    raw = base64.b85decode(digits)
    assert len(raw) == int(packed.attributes["data-bytes"])
    plotly = zlib.decompress(raw).decode()
    assert "plotly.js v" in plotly[:200]
    assert packed.attributes["type"] == "text/plain"
    assert "<" not in packed.text
    assert own.attributes == {}
    assert len(own.text) < 10_000
    scripts = [plotly, own.text]
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    policies = [
        n.attributes["content"]
        for n in root.all("meta")
        if n.attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    (rules,) = [dict(rule.split(" ", 1) for rule in policy.split("; ")) for policy in policies]
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == " ".join(f"'sha256-{digest}'" for digest in hashes)
    assert not {"connect-src", "frame-src", "font-src"} & set(rules)


def test_every_number_of_a_runs_tables_is_the_sources(pages, report_folders):
    summary = json.loads((report_folders / "jsq" / "summary.json").read_text())
    tables = pages["one"].tables()
    head, *rows = tables["Latencies of completed requests, ms"]
    assert [cell.text for cell in head] == ["latency", "mean, ms", "p50, ms", "p90, ms", "p99, ms"]
    for label, *cells in rows:
        tag = label.text.lower()
        for statistic, cell in zip(("mean", "p50", "p90", "p99"), cells, strict=True):
            value = summary[f"{statistic}_{tag}_ms"]
            assert float(cell.attributes["data-value"]) == value
            assert cell.text == number(value)
    figures = {
        row[0].text: float(row[1].attributes["data-value"])
        for part in ("Run", "Memory and cost")
        for row in tables[part][1:]
        if "data-value" in row[1].attributes
    }
    assert figures["Request goodput (req/s)"] == summary["request_goodput"]
    assert figures["SLO attainment"] == summary["slo_attainment"]
    assert figures["Cost per million tokens ($)"] == summary["cost_per_million_output_tokens"]
    fields = {row[0].text: row[1].text for row in tables["Configuration"][1:]}
    config = json.loads((report_folders / "jsq" / "config.json").read_text())["config"]
    assert set(fields) == set(config)
    assert fields["goodput"] == "ttft 500, tpot 40"


def test_a_page_has_every_figure_that_the_terminal_prints(tmp_path, capsys):
    config = {
        **SHORT, "topology": "2C", "workload": "chat", "sessions": 3, "goodput": "ttft:500",
        "kv_tier": "host:8GB,load=20GB/s", "autoscale": "hpa", "price_per_gpu_hour": 2.0,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2,
                               "synthetic_acceptance_length": 1.5},
    }  # fmt: skip
    config = {n: v for n, v in config.items() if n not in ("num_requests", "duration", "warmup")}
    result = simulate(make_config(config))
    write_result(result, tmp_path / "run")
    tables = Page(report([tmp_path / "run"])).tables()
    print_summary(result.summary)
    printed = capsys.readouterr().out
    titles = [part.title for part in parts_of(result.summary)]
    assert {"Sessions", "KV tiers", "Speculative Decoding", "Workers over time"} <= set(titles)
    latencies = {metric.heading for metric in LATENCIES.values()}
    for part in parts_of(result.summary):
        rows = [row for row in part.rows if not isinstance(row, str)]
        assert all(f"{row.label}:" in printed for row in rows)
        if part.title not in {"What limits it", "Rests on", *latencies}:  # elsewhere on the page
            assert [row.label.strip() for row in rows] == [
                r[0].text for r in tables[part.title][1:]
            ]


KINDS = {
    "autoscaled": {"autoscale": "hpa", "topology": "2C"},
    "by a schedule of load": {"autoscale": "keda", "load": "ladder:9,2,6@20"},
    "faults": {"fail": ["decode:0@1.5s+1s"], "retry": "never"},
    "prefill alone": {"topology": "2P", "output_len": 1},
    "sessions": {"workload": "chat", "sessions": 3, "topology": "2C"},
    "dense": {"model": "Llama-3.1-8B", "policy": "jsq"},
    "nothing ends": {"num_requests": 4, "output_len": 1500, "max_model_len": 1600},
}


@pytest.mark.long
@on_each("judged", [False, True])
@on_each("kind", KINDS)
def test_any_run_makes_a_page_with_and_without_an_slo(kind, judged, tmp_path):
    """Without an SLO the page shows no share of requests that met one."""
    fields = SHORT | KINDS[kind]
    if "num_requests" in fields:
        fields = {n: v for n, v in fields.items() if n not in ("duration", "warmup")}
    if kind in ("by a schedule of load", "sessions"):
        fields = {n: v for n, v in fields.items() if n not in ("request_rate", "duration")}
    if judged:
        fields |= {"goodput": {"ttft": 500}}
    result = simulate(make_config(fields))
    write_result(result, tmp_path / "run")
    page = Page(report([tmp_path / "run"]))
    shown = [row[0].text for table in page.tables().values() for row in table[1:] if row]
    assert any("SLO attainment" in text for text in shown) == judged


def test_runs_stand_side_by_side(pages, report_folders):
    tables = pages["two"].tables()
    head, *rows = tables["Decode steps"]
    assert [cell.text for cell in head] == ["figure", "jsq", "eldr"]
    experts = next(row for row in rows if row[0].text == "Mean activated experts per step")
    for cell, name in zip(experts[1:], ("jsq", "eldr"), strict=True):
        summary = json.loads((report_folders / name / "summary.json").read_text())
        assert float(cell.attributes["data-value"]) == summary["mean_active_experts_per_step"]
    differ = tables["Fields that differ"]
    assert [[cell.text for cell in row] for row in differ[1:]] == [["policy", "jsq", "eldr"]]


def test_every_picture_says_its_axes_with_units(pages):
    in_phase = ["simulated time, s", "requests, mean of the interval"]
    units = {
        "Distribution of TTFT": ["TTFT, ms", "share of requests at or below"],
        "Distribution of TPOT": ["TPOT, ms", "share of requests at or below"],
        "Distribution of E2E latency": ["E2E latency, ms", "share of requests at or below"],
        "Activated experts against batch": [
            "batch of a decode step, requests",
            "activated experts a MoE layer, mean",
        ],
        "Components of TTFT": ["run", "mean time in the phase, ms"],
        "Requests waiting for prefill": in_phase,
        "Requests between prefill and decode": in_phase,
        "Requests decoding": in_phase,
        "TPOT over time": ["finish time, simulated s", "TPOT, ms, median"],
        "Mean batch of each decode worker by domain": [
            "decode worker",
            "mean batch, requests, by share of domain",
        ],
    }
    pictures = pages["one"].pictures()
    assert {title: axes(spec) for title, spec in pictures.items()} == units
    for box in pages["one"].root.all("div", "plot"):
        assert box.attributes["tabindex"] == "0"
        assert box.attributes["aria-label"]
    for trace in itertools.chain.from_iterable(spec["data"] for spec in pictures.values()):
        assert trace.get("hoverinfo") == "skip" or "%{y" in trace["hovertemplate"]


def test_pictures_hold_what_the_tables_of_the_run_hold(pages, report_folders):
    pictures = pages["one"].pictures()
    requests = pq.read_table(report_folders / "jsq" / "requests.parquet")
    done = requests.filter(pc.and_(requests["measured"], pc.is_valid(requests["finish_s"])))
    ttft = done["ttft_ms"].to_numpy()
    drawn = marks(pictures["Distribution of TTFT"])
    assert len(drawn) == 101
    for q in (0, 50, 99, 100):
        assert drawn[q][1:3] == pytest.approx((np.percentile(ttft, q), q / 100))
    steps = pq.read_table(report_folders / "jsq" / "steps.parquet").to_pandas()
    decode = steps[(steps["role"] == "decode") & (steps["batch"] > 0)]
    decode = decode[decode["tokens"] == decode["batch"]]
    drawn = {x: (y, said) for _, x, y, said in marks(pictures["Activated experts against batch"])}
    assert set(drawn) == set(decode["batch"])
    for batch, own in decode.groupby("batch"):
        assert drawn[batch][0] == pytest.approx(own["active_experts"].mean())
        assert drawn[batch][1].endswith(f"<br>{len(own):,} steps")
    bars = marks(pictures["Mean batch of each decode worker by domain"])
    for worker, own in steps[steps["role"] == "decode"].groupby("worker"):
        seconds = own["end_s"] - own["start_s"]
        mean = (own["batch"] * seconds).sum() / seconds.sum()
        mine = [(y, said) for _, x, y, said in bars if x == str(worker)]
        assert sum(y for y, _ in mine) == pytest.approx(mean)
        for y, said in mine:
            assert said == pytest.approx([100 * y / mean, mean])


def test_the_warm_up_period_is_shaded_over_time(pages):
    shaded = {
        title: [(shape["x0"], shape["x1"]) for shape in spec["layout"].get("shapes", ())]
        for title, spec in pages["two"].pictures().items()
    }
    over_time = {title for title in shaded if title.startswith("Requests ")} | {"TPOT over time"}
    assert len(over_time) == 4
    assert shaded == {title: [(0, 1.0)] if title in over_time else [] for title in shaded}


def test_a_policy_and_a_domain_have_one_colour_on_the_page(report_folders, tmp_path):
    """One run lacks the first domain; the sweep and the comparison name the same policies."""
    folder = tmp_path / "jsq"
    shutil.copytree(report_folders / "jsq", folder)
    requests = pq.read_table(folder / "requests.parquet")
    first = min(requests["domain"].to_pylist())
    write_table(
        folder / "requests.parquet", requests.filter(pc.not_equal(requests["domain"], first))
    )
    others = ["eldr", "sweep", "plan", "comparison"]
    page = Page(report([folder, *(report_folders / name for name in others)]))
    seen = {}
    for article in page.root.all("article"):
        for title, spec in Page.pictures_of(article):
            names = {name.removesuffix(" on H100"): c for name, c in colours(spec).items()}
            for name, colour in names.items():
                if name not in {"Pareto front", "round_robin"} and "first token" not in title:
                    seen.setdefault(name, set()).add(colour)
    assert {"jsq", "eldr", first} <= set(seen)
    assert {name: len(found) for name, found in seen.items()} == dict.fromkeys(seen, 1)
    assert seen["jsq"] != seen["eldr"]


def test_runs_of_one_policy_have_colours_of_their_own(report_folders, tmp_path):
    shutil.copytree(report_folders / "jsq", tmp_path / "again")
    page = Page(report([report_folders / "jsq", tmp_path / "again"]))
    found = colours(page.pictures()["Distribution of TTFT"])
    assert set(found) == {"jsq", "again"}
    assert len(set(found.values())) == 2


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.one_of(st.none(), st.floats(0, 5)), st.booleans()),
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


@pytest.mark.parametrize(
    "changes",
    [{"topology": "1C"}, {"topology": "2P"},
     {"topology": "1P1D", "conditional_disagg": "noncached:60"}],
)  # fmt: skip
def test_pictures_have_requests_where_they_are(changes, tmp_path):
    """By hand: the mean number in a phase is the time that requests spend there; and TTFT's parts
    sum to it, where some requests stay with their prompts, too. Some are refused."""
    load = {"num_requests": 40, "request_rate": 60, "trace": "reference-moe", "seed": 2}
    config = make_config(load | {"max_model_len": 650, "frontend": "none"} | changes)
    if config.cluster.generates:
        config = config.replace(output_len=560)
    result = simulate(config)
    write_result(result, tmp_path / "run")
    rows = [r for r in result.requests.to_pylist() if r["outcome"] == "completed"]
    assert len(rows) < 40 or not config.cluster.generates
    shown = pictures_of(tmp_path / "run")
    end = max(r["finish_s"] for r in rows)

    def seconds(title):
        (curve,) = (c for c in pick(shown, title).spec["data"] if c.get("name") == "run")
        return sum(curve["y"]) * end / len(curve["y"])

    between = sum((r["decode_start_s"] or r["finish_s"]) - r["prefill_end_s"] for r in rows)
    assert seconds("between prefill and decode") == pytest.approx(between, abs=1e-6)
    waits = sum(r["prefill_start_s"] - r["sent_s"] for r in rows)
    assert seconds("waiting for prefill") == pytest.approx(waits, abs=1e-6)
    parts = pick(shown, "Components of TTFT").spec["data"]
    of = [r["ttft_ms"] for r in rows if r["measured"]]
    assert sum(v for bar in parts for v in bar["y"]) == pytest.approx(sum(of) / len(of))


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
    assert len(list(page.root.all("script"))) == 2 + len(page.pictures())
    assert not list(page.root.all("img"))
    assert next(page.root.all("h1")).text == evil
    assert evil in next(page.root.all("section", "warnings")).text
    workers = page.pictures()["Mean batch of each decode worker by domain"]
    assert {name for name, *_ in marks(workers)} == {evil}
    for trace in workers["data"]:
        assert "<" not in trace["name"], "Plotly reads HTML in text"


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_page_is_under_two_megabytes(pages, name):
    nodes = pages[name].root.walk()
    assert (
        sum(len(child) for node in nodes for child in node.children if isinstance(child, str)) < 2e6
    )


def test_a_page_answers_first(report_folders):
    """What was asked, the answer and its cause, warnings, figures, and what they rest on."""
    html = report([report_folders / "jsq"])
    order = ['class="lead"', 'class="headline"', 'class="answer"', "<table", 'class="basis"']
    places = [html.index(part) for part in order]
    assert places == sorted(places)
    page = Page(html)
    summary = json.loads((report_folders / "jsq" / "summary.json").read_text())
    answer = next(page.root.all("section", "answer")).text
    assert summary["limits"]["bottleneck"] in answer
    assert "rror band" in answer
    label = summary["weakest_provenance"]
    assert f"{label} step times" in next(page.root.all("p", "lead")).text


def test_warnings_come_before_any_table_of_figures(report_folders, tmp_path):
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
    latencies = html.index("Latencies of completed requests")
    assert html.index('class="warnings"') < latencies < html.index('class="basis"')


def test_a_run_in_which_nothing_completes_has_a_page(tmp_path):
    config = {**SHORT, "topology": "1P1D", "num_requests": 3, "output_len": 1_000_000}
    write_result(simulate(make_config({**config, "warmup": 0})), tmp_path / "run")
    page = Page(report([tmp_path / "run"]))
    rows = [[cell.text for cell in row] for row in page.tables()["Run"]]
    assert ["exceeds_max_model_len", "3"] in rows
    assert page.pictures()["Distribution of TTFT"] is None
    assert next(page.root.all("figure")).text.strip().endswith("no value is known.")
    cells = page.tables()["Latencies of completed requests, ms"][1]
    assert cells[1].text == "–"
    assert cells[1].attributes["data-value"] == ""


def test_co_located_workers_have_a_page(tmp_path):
    write_result(simulate(make_config({**SHORT, "topology": "2C"})), tmp_path / "run")
    page = Page(report([tmp_path / "run"]))
    assert "prefill policy" not in next(page.root.all("p", "lead")).text
    assert marks(page.pictures()["Activated experts against batch"])
    assert marks(page.pictures()["Mean batch of each worker by domain"])


@pytest.mark.long
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


@pytest.mark.long
def test_what_is_no_result_is_told_in_one_line(report_folders, tmp_path, run_cli):
    broken = tmp_path / "broken"
    shutil.copytree(report_folders / "jsq", broken)
    data = (broken / "steps.parquet").read_bytes()
    (broken / "steps.parquet").write_bytes(data[: len(data) // 2])
    other = tmp_path / "other"
    shutil.copytree(report_folders / "jsq", other)
    (other / "summary.json").write_text('{"label": "x"}')
    lacking = tmp_path / "lacking"
    shutil.copytree(report_folders / "jsq", lacking)
    summary = json.loads((lacking / "summary.json").read_text())
    del summary["prefill_policy"]  # which nothing but the template asks for
    write_json(lacking / "summary.json", summary)
    empty = tmp_path / "empty"
    empty.mkdir()
    cases = {
        (tmp_path / "absent",): "is not a folder",
        (empty,): "is not a result",
        (report_folders / "jsq" / "summary.json",): "is not a folder",
        (broken,): "cannot read",
        (other,): "has a run's files but not its contents",
        (lacking,): "has a run's files but not its contents",
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
