"""Sections of comparisons, sweeps and plans: every number is the sources'."""

import json
import math
import re
import shutil

import pyarrow.parquet as pq
import pytest

from eldr_sim.errors import InputError
from eldr_sim.planning.runs.sweep import sweep
from eldr_sim.reports.cells import number
from eldr_sim.reports.folders import open_folders
from eldr_sim.reports.page import report
from eldr_sim.simulator.results import write_json

from .pages import Page, axes, marks

SHORT = {"topology": "1P2D", "duration": 2, "warmup": 1, "output_len": 20}


@pytest.fixture(scope="module")
def pages(report_folders):
    """A page of each kind of folder."""
    names = ("comparison", "sweep", "plan", "rates")
    return {name: Page(report([report_folders / name])) for name in names}


def test_comparison_shows_each_difference_with_its_interval(pages, report_folders):
    summary = json.loads((report_folders / "comparison" / "summary.json").read_text())
    page = pages["comparison"]
    (caption,) = (c for c in page.tables() if c.startswith("Difference from round_robin"))
    row = page.tables()[caption][1]
    metrics = [d for d in summary["differences"] if d["policy"] == "jsq"]
    assert len(row) == 1 + len(metrics) == 8
    for cell, difference in zip(row[1:], metrics, strict=True):
        assert float(cell.attributes["data-value"]) == difference["percent"]
        numbers = [float(n) for n in re.findall(r"[+-][\d.]+", cell.text.replace("−", "-"))]
        told = [difference[key] for key in ("percent", "low", "high")]
        assert numbers == pytest.approx(told, abs=0.0051)
    charts = [s for t, s in Page.pictures_of(page.root) if t == "Median TPOT"]
    references = list(dict.fromkeys(d["reference"] for d in summary["differences"]))
    assert [axes(chart) for chart in charts] == [
        [f"difference from {reference}, %"] for reference in references
    ]
    for chart, reference in zip(charts, references, strict=True):
        ((name, percent, y, ends),) = marks(chart)
        (own,) = [
            d
            for d in summary["differences"]
            if (d["reference"], d["metric"]) == (reference, "median_tpot_ms")
        ]
        assert (name, y, percent) == (own["policy"], own["policy"], own["percent"])
        assert ends == [own["low"], own["high"]]
        hollow = chart["data"][0]["marker"].get("symbol") == "circle-open"
        assert hollow == (own["low"] <= 0 <= own["high"])
    runs = pq.read_table(report_folders / "comparison" / "runs.parquet").to_pylist()
    figures = page.tables()["Figures, mean over 2 seeds"]
    for cells in figures[1:]:
        own = [r["median_tpot_ms"] for r in runs if r["policy"] == cells[0].text]
        assert float(cells[1].attributes["data-value"]) == math.fsum(own) / 2


def test_every_number_of_a_sweep_is_the_sources(pages, report_folders):
    page = pages["sweep"]
    aggregate = pq.read_table(report_folders / "sweep" / "aggregate.parquet").to_pylist()
    head, *rows = page.tables()["All 6 points"]
    columns = [cell.text for cell in head]
    assert columns[:5] == ["point", "policy", "request_rate", "Median TPOT (ms)", "P99 TPOT (ms)"]
    assert columns[-2:] == ["runs", "runs failed"]
    for cells, point in zip(rows, aggregate, strict=True):
        row = dict(zip(columns, cells, strict=True))
        assert row["policy"].text == point["policy"]
        assert float(row["request_rate"].attributes["data-value"]) == point["request_rate"]
        for column, key in (
            ("Median TPOT (ms)", "median_tpot_ms"),
            ("Output token throughput (tok/s)", "output_throughput"),
            ("Cost per million tokens ($)", "cost_per_million_output_tokens"),
            ("runs failed", "runs_failed"),
        ):
            assert float(row[column].attributes["data-value"]) == point[key]
        half = 0.1 * point["median_tpot_ms"]
        expected = number(point["median_tpot_ms"])
        expected += "" if point["point"] == 5 else f" ± {half:.2f}"
        assert row["Median TPOT (ms)"].text == expected
    failed = page.tables()["Runs that failed"][1:]
    assert [[cell.text for cell in row] for row in failed] == [
        ["policy=eldr, request_rate=40", "1", "1", "model: no room <for> it"]
    ]


def rounded(value):
    """Return a value as a picture has it."""
    return float(f"{value:.6g}")


def test_a_sweep_is_drawn_over_its_numbers_in_the_colours_of_its_words(pages, report_folders):
    page = pages["sweep"]
    aggregate = pq.read_table(report_folders / "sweep" / "aggregate.parquet").to_pylist()
    chart = page.pictures()["P99 TPOT"]
    assert axes(chart) == ["request_rate, requests/s", "P99 TPOT (ms)"]
    expected = []
    for point in aggregate:
        said = ""
        if point["p99_tpot_ms_low"] is not None:
            ends = [number(point[f"p99_tpot_ms_{end}"]) for end in ("low", "high")]
            said = f"<br>90% interval: {' to '.join(ends)}"
        value = rounded(point["p99_tpot_ms"])
        expected.append((point["policy"], point["request_rate"], value, said))
    assert marks(chart) == expected
    bands = [trace for trace in chart["data"] if trace.get("fill") == "toself"]
    low, high = (
        [rounded(p[f"p99_tpot_ms_{end}"]) for p in aggregate[:3]] for end in ("low", "high")
    )
    assert bands[0]["x"] == [10, 20, 40, 40, 20, 10]
    assert bands[0]["y"] == [*high, *reversed(low)]
    cloud = marks(page.pictures()["Throughput of a GPU against speed for a user"])
    told = [mark for mark in cloud if mark[0] != "Pareto front"]
    assert told == [
        (
            point["policy"],
            rounded(1e3 / point["median_tpot_ms"]),
            rounded(point["output_throughput"] / point["gpus"]),
            f"<br>{point['name']}",
        )
        for point in aggregate
    ]


def test_a_real_sweep_has_a_page(tmp_path):
    spec = {
        "config": SHORT,
        "sweep": {
            "type": "grid",
            "parameters": {"model": ["Qwen3-30B-A3B", "Mixtral-8x7B"], "request_rate": [10, 20]},
        },
        "multiRun": {"numRuns": 2},
    }
    swept = sweep(spec, tmp_path / "sweep", jobs=1)
    page = Page(report([tmp_path / "sweep"]))
    rows = page.tables()["All 4 points"]
    column = [cell.text for cell in rows[0]].index("Median TPOT (ms)")
    told = [row[column].attributes["data-value"] for row in rows[1:]]
    expected = swept.aggregate["median_tpot_ms"].to_pylist()
    assert told == ["" if value is None else repr(value) for value in expected]
    assert [value is None for value in expected] == [False, False, True, True]
    assert len(page.tables()["Runs that failed"]) == 1 + 4


def test_every_number_of_a_plan_is_the_sources(pages, report_folders):
    page = pages["plan"]
    document = json.loads((report_folders / "plan" / "plan.json").read_text())
    assert next(page.root.all("h1")).text == "Plan: 2P3D on H100 under eldr, 5 GPUs"
    answer = next(page.root.all("section", "answer"))
    assert [d.text for d in answer.all("dd")] == [
        "2P3D on H100 under eldr, 5 GPUs, $12.50 an hour",
        "2P4D on H100 under jsq, 6 GPUs, $15.00 an hour: dearer by 20%",
        "carries 24.00 [22.00, 26.00] requests/s: +20.00 [+10.00, +30.00]% of the load",
        "2P2D attains 99.5%, TTFT p99 90.00 ms, TPOT p99 15.40 ms",
        "serves nothing",
        "eldr saves 1.25 [0.50, 2.00] GPUs against jsq on H100 (2 paired seeds)",
    ]
    warned = next(page.root.all("section", "warnings")).text
    assert "step times are derived and published" in warned
    tables = page.tables()
    notes = [item.text for item in page.root.all("li")]
    assert {"eldr on H100: not monotone", "random on H100: too <slow>"} <= set(notes)
    rows = tables["Cheapest cluster of each candidate, lowest price first"]
    assert [cell.text for cell in rows.pop()[:3]] == ["random", "H100", "none"]
    for caption, clusters in (
        (
            "Cheapest cluster of each candidate, lowest price first",
            [document["answer"], document["runner_up"]],
        ),
        ("Pareto front of the clusters that meet the objective", document["pareto_front"]),
        ("Clusters tried", document["clusters"]),
    ):
        head, *rows = tables[caption]
        columns = [cell.text for cell in head]
        for cells, cluster in zip(rows, clusters, strict=True):
            row = dict(zip(columns, cells, strict=True))
            for column, key in (
                ("GPUs", "gpus"),
                ("$/hour", "price_per_hour"),
                ("P99 TPOT (ms)", "p99_tpot_ms"),
                ("Tokens/s/user", "tokens_per_s_per_user"),
                ("Tokens/s/GPU", "tokens_per_s_per_gpu"),
            ):
                assert float(row[column].attributes["data-value"]) == cluster[key]
            assert row["verdict"].text == cluster["verdict"]
            assert row["SLO attainment, %"].text == "99.50 [99.00, 100.00]"
    front = marks(page.pictures()["Throughput of a GPU against speed for a user"])
    assert [said for name, *_, said in front if name == "Pareto front"] == [
        "<br>2P3D on H100 under eldr, 5 GPUs",
        "<br>2P5D on H100 under eldr, 7 GPUs",
    ]
    assert not any("2P2D" in said for *_, said in front), "it misses the objective"


def test_a_plan_without_a_cluster_says_why(report_folders, tmp_path):
    folder = tmp_path / "plan"
    shutil.copytree(report_folders / "plan", folder)
    document = json.loads((folder / "plan.json").read_text())
    document |= dict.fromkeys(("answer", "runner_up", "margin", "assumptions"))
    document |= {"pareto_front": [], "gains": [], "clusters": [], "rows": document["rows"][2:]}
    write_json(folder / "plan.json", document)
    page = Page(report([folder]))
    assert next(page.root.all("h1")).text == "No cluster meets the objective"
    assert "random on H100: too <slow>" in [item.text for item in page.root.all("li")]


def test_a_plan_of_rates_shows_rates_and_gains(pages):
    page = pages["rates"]
    head, *rows = page.tables()["Highest rate of each candidate, mean over seeds"]
    columns = ["policy", "GPU", "cluster", "GPUs", "requests/s [95% interval]", "seed by seed"]
    shown = [[row[[c.text for c in head].index(c)].text for c in columns] for row in rows]
    assert shown == [
        ["eldr", "H100", "2P3D", "5", "1.25 [0.50, 2.00]", "1.00, 1.50"],
        ["jsq", "H100", "2P4D", "6", "none: seed 0 carries none", "–, 1.00"],
    ]
    assert marks(page.pictures()["Highest rate"]) == [
        ("eldr on H100", 1.25, "eldr on H100", [0.5, 2.0])
    ]
    answer = next(page.root.all("section", "answer"))
    assert [d.text for d in answer.all("dd")] == [
        "2P3D on H100 under eldr, 5 GPUs, $12.50 an hour: 1.25 [0.50, 2.00] requests/s",
        "eldr carries +1.25 [+0.50, +2.00]% against jsq on H100 (2 paired seeds)",
    ]


DENSE = ("--model", "Llama-3.1-8B", "--output-len", "10", "--seeds", "1", "--jobs", "1")


@pytest.mark.parametrize(
    ("kind", "command", "told"),
    [
        ("what-if", ("compare", *DENSE, "--num-requests", "10", "--topology", "1C,1P1D"),
         "Changes compared: topology=1C, topology=1P1D"),
        ("drafts", ("compare", *DENSE, "--topology", "1C", "--drafts", "1", "--max-concurrency",
                    "2", "--num-requests", "8", "--speculative-config",
                    '{"method": "eagle3", "num_speculative_tokens": 1}'),
         "drafts at 2 requests in flight"),
        ("autoscalers", ("compare", *DENSE, "--topology", "2C", "--load", "ladder:2,4@3",
                         "--autoscale", "hpa"), "Best fixed fleet"),
    ],
)  # fmt: skip
def test_every_comparison_has_a_page(kind, command, told, run_cli, tmp_path):
    code, _, err = run_cli(*command, "--out", tmp_path / "out")
    assert code == 0, err
    (folder,) = open_folders([tmp_path / "out"])
    assert folder.kind == kind
    page = Page(report([tmp_path / "out"]))
    assert told in page.root.text
    assert len(page.tables()) >= 2


@pytest.mark.parametrize("file", ["claims.csv", "bench.sh", "notes.txt"])
def test_other_folders_say_what_a_report_is_made_of(file, tmp_path):
    (tmp_path / file).touch()
    with pytest.raises(InputError) as error:
        report([tmp_path])
    assert "what-if, sweep or plan" in error.value.allowed
    assert ("is not a result" in error.value.problem) == (file == "notes.txt")
