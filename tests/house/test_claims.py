"""The pages say what the data say: verdicts follow from the rule, tables from the data."""

import csv
import importlib.util
import re
from collections import Counter

import pyarrow as pa
import pytest
from pyarrow.csv import write_csv

from eldr_sim.planning.studies.figures import Claim, Reproduction, claims_table
from eldr_sim.policies.choice import SignatureParameters
from eldr_sim.policies.replicas.metro import MetroParameters
from eldr_sim.traces.routing.synthetic.presets import preset_model
from studies.moe_prefill.settings import H100_FP8, SHARING

from ..on_each import on_each
from ..paths import ROOT

DOCS = ROOT / "docs"
SPEC = importlib.util.spec_from_file_location("docs_render", DOCS / "render.py")
render = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(render)
ROWS = render.read()

CLAIM = dict.fromkeys(ROWS[0], "") | {
    "page": "paper", "table": "claims", "where": "Figure 1", "claim": "TPOT", "low": "-10",
    "high": "-5", "stated": "yes", "ours": "-7", "unit": "%", "neutral": "by unit",
    "tolerance": "1", "role": "claim", "command": "eldr-sim run", "date": "2026-11",
}  # fmt: skip


@on_each("page", render.pages())
def test_a_page_has_the_tables_of_the_data(page):
    text = page.read_text(encoding="utf-8")
    assert render.page_with_tables(text, ROWS) == text, "renew it: python docs/render.py"


def test_verdicts_follow_from_the_rule():
    for row in ROWS:
        assert (row["direction"], row["size"]) == render.judged(row), row["claim"]


def test_every_row_is_whole_and_stands_once():
    for row in ROWS:
        assert row["role"] in ("claim", "trend", "input", "error", "other"), row
        assert all(row[key] for key in ("page", "where", "claim", "command", "date")), row
        assert row["ours"] or (row["reason"] and row["role"] in ("claim", "trend")), row
        assert render.home(row["page"]).exists()
        assert not row["low"] or not row["high"] or float(row["low"]) <= float(row["high"]), row
        if row["ours_low"]:
            assert float(row["ours_low"]) <= float(row["ours"]) <= float(row["ours_high"]), row
    keys = [(row["page"], row["where"], row["claim"]) for row in ROWS]
    assert len(set(keys)) == len(keys)


CHARGED = SignatureParameters()
#: Why each figure that a table calls an input is one, read from the code that makes it an input.
INPUTS = {
    ("eldr", "Figure 3"): lambda _: preset_model("Qwen3-30B-A3B").one_process,
    ("eldr", "Table 1"): lambda _: (
        round(CHARGED.capture_overhead_ms + CHARGED.routing_overhead_ms, 2) == 0.87
    ),  # the paper's .71 and .157; its sum is .86
    ("metro", "Figure 11"): lambda row: MetroParameters().overhead_us == float(row["low"]),
    ("moe_prefill", "Figure 10"): lambda row: H100_FP8.name in row["claim"] and SHARING == 0.1,
    ("speculative_runs", ""): lambda row: "synthetic_acceptance_length" in row["command"],
}


@pytest.mark.parametrize("row", [row for row in ROWS if row["role"] == "input"],
                         ids=lambda row: f"{row['page']} {row['where']}")  # fmt: skip
def test_an_input_is_one_by_code(row):
    """A failed claim cannot be hidden as an input."""
    reason = INPUTS.get((row["page"], row["where"])) or INPUTS[row["page"], ""]
    assert reason(row), row["claim"]


@on_each(
    "change, said",
    [
        ({}, "agrees"),
        ({"ours": "-12"}, "direction agrees"),
        ({"ours": "-0.4"}, "no effect"),
        ({"ours": "3"}, "contradicts"),
        ({"role": "input", "ours": "3"}, "input"),
        (
            {"unit": "x", "low": "1.2", "high": "1.5", "ours": "0.9", "tolerance": "0"},
            "contradicts",
        ),
        ({"unit": "us", "low": "20", "high": "30", "ours": "40"}, "size differs"),
        ({"unit": "us", "low": "20", "high": "30", "ours": "25"}, "agrees"),
        ({"neutral": "none", "ours": "3"}, "size differs"),
        ({"role": "trend"}, "agrees"),
        ({"role": "trend", "ours": "-70"}, "size differs"),
        ({"role": "trend", "ours": "3"}, "contradicts"),
        ({"role": "trend", "ours": "-0.4"}, "no effect"),
        ({"tolerance": "5", "ours": "-13.1"}, "direction agrees"),  # 3 points count, no more
        ({"unit": "s", "low": "2", "high": "2", "tolerance": "1", "ours": "1.5"}, "size differs"),
        ({"unit": "s", "low": "2", "high": "2", "tolerance": "1", "ours": "1.7"}, "agrees"),
        ({"tolerance": "", "ours": "3"}, "-"),
        ({"role": "error", "low": "0", "high": "5", "ours": "4"}, "met"),
        ({"role": "error", "low": "0", "high": "5", "ours": "6", "noise": "7"}, "within the noise"),
        ({"role": "error", "low": "0", "high": "5", "ours": "6", "noise": "3"}, "missed"),
        ({"role": "error", "low": "0", "high": "", "ours": "6"}, "-"),
        ({"ours": ""}, "not tested"),
    ],
)
def test_a_verdict_can_fail(change, said):
    row = CLAIM | change
    row["direction"], row["size"] = render.judged(row)
    assert render.verdict(row) == said


#: Rows that no experiment was made for, by page and figure: none; a new one is a decision.
NOT_SETTLED: dict[tuple[str, str], int] = {}
FAILED = [
    row for row in ROWS
    if {"differs", "contradicts", "no effect"} & {row["direction"], row["size"]}
]  # fmt: skip
KINDS = ("run", "inputs", "not settled")


def problem(row):
    """What an experiment lacks: a kind, a result in figures, a sentence, the files it names."""
    kind, _, text = row["experiment"].partition(": ")
    if kind not in KINDS:
        return f"begins with none of {KINDS}"
    if len(text.split()) < 12:
        return "is no sentence"
    if len(set(re.findall(r"\d+(?:\.\d+)?|\.\d+", text))) < 2:
        return "compares no two figures"
    if text == row["reason"] or (kind == "not settled" and not text.startswith("needs ")):
        return "repeats the values, or does not say what it needs"
    files = re.findall(r"(?:docs|studies)/[\w/]+\.(?:csv|md|yaml)", text)
    missing = [name for name in files if not (ROOT / name).exists()]
    return f"names {missing}, which are not there" if missing else ""


def test_what_fails_has_an_experiment():
    found = [(row["page"], row["where"], row["claim"], problem(row)) for row in FAILED]
    assert [row for row in found if row[-1]] == []
    still = Counter(
        (row["page"], row["where"])
        for row in FAILED if row["experiment"].startswith("not settled")
    )  # fmt: skip
    assert still == NOT_SETTLED


def test_what_agrees_has_no_experiment():
    rows = [row["claim"] for row in ROWS if row not in FAILED and row["experiment"]]
    assert rows == []


@on_each("text", [
    "", "by cell: -1.1, -0.2, +0.7, -0.9, +0.1 points", "run: other kernels",
    "run: with kernels of another GPU the effect that the paper measured comes out in full",
    "run: with the kernels of docs/data/no_such_table.csv TPOT falls by 3.1 and not by 2.2 percent",
    "not settled: a timing of 8 GPUs and of 4 GPUs on a node of the paper would tell",
])  # fmt: skip
def test_an_experiment_can_fail(text):
    assert problem(CLAIM | {"experiment": text})


def test_a_size_within_one_percent_agrees():
    """A tolerance is in the row's unit: a share of the value there would call equals different."""
    for row in ROWS:
        if row["role"] in ("claim", "trend") and row["ours"] and row["stated"] == "yes":
            low, high, ours = (float(row[name]) for name in ("low", "high", "ours"))
            near = min(max(ours, low), high)
            if row["tolerance"] and abs(ours - near) < 0.01 * abs(near):
                assert row["size"] == "agrees", (row["page"], row["claim"])


def test_a_page_shows_what_fails_though_nobody_chose_it():
    failed = CLAIM | {"ours": "3", "direction": "contradicts", "size": "differs"}
    hidden = CLAIM | {"claim": "hidden", "direction": "agrees", "size": "agrees"}
    page = "a\n<!-- claims: paper -->\nold\n<!-- end of claims -->\nb\n"
    made = render.page_with_tables(page, [failed, hidden])
    assert "| Figure 1 | TPOT | -10 to -5% | 3% | contradicts |" in made
    assert "hidden" not in made
    assert made.startswith("a\n")
    assert made.endswith("<!-- end of claims -->\nb\n")


def test_what_a_reproduction_wrote_is_taken_over_with_its_verdicts(tmp_path):
    """Known claims by figure and words, unknown ones as new rows, and no other page's."""
    claims = [
        Claim("TPOT", -10.0, -5.0, 4.5, reason="why"),
        Claim("bytes, more than", 1.01, 8.0, 1.0, "x", 0.0, stated=False),
        Claim("a layer gets shorter", -81.0, -81.0, 55.0, "us", neutral=0.0),
        Claim("MFU", 30.0, 30.0, 12.0, neutral=None),
        Claim("charged", 26.0, 26.0, 25.7, "us", given=True),
        Claim("without a value", 1.0, 2.0, None),
    ]
    made = Reproduction("figure_1", "", pa.table({}), claims, lambda _figure: None)
    write_csv(claims_table([made]), tmp_path / "claims.csv")
    stale = CLAIM | {"claim": "said no more"}
    settled = {"direction": "agrees", "size": "differs", "experiment": "run: of the old verdict"}
    rows = [CLAIM | settled, CLAIM | {"page": "other"}, stale]
    render.take(rows, "paper", [tmp_path])
    assert stale not in rows
    assert rows[0]["experiment"] == ""
    assert [row["ours"] for row in rows[:3]] == ["4.5", "-7", "1"]
    assert [row["claim"] for row in [rows[0], *rows[2:]]] == [c.statement for c in claims]
    for row, claim in zip([rows[0], *rows[2:]], claims, strict=True):
        assert render.judged(row) == (claim.direction, claim.size)
        assert row["page"] == "paper"
        assert row["where"] == "Figure 1"


def test_every_table_of_data_is_in_the_index_and_of_one_width():
    with (DOCS / "data" / "index.csv").open(newline="") as file:
        index = list(csv.DictReader(file))
    files = sorted(path.name for path in (DOCS / "data").glob("*.csv") if path.stem != "index")
    assert [row["file"] for row in index] == files
    for row in index:
        assert all(row.values()), row
        assert render.home(row["page"]).exists()
        with (DOCS / "data" / row["file"]).open(newline="") as file:
            assert len({len(line) for line in csv.reader(file)}) == 1, row["file"]


#: Pages of reference may be long.
REFERENCE = {"claims.md", "cli.md", "data.md", "formats.md", "metrics.md", "tables.md"}


@on_each("page", [p for p in render.pages() if p.name not in REFERENCE])
def test_a_page_is_short(page):
    words = len(page.read_text(encoding="utf-8").split())
    assert words <= 1600, f"{words} words"


def test_pictures_are_of_pages_with_percentages(monkeypatch, tmp_path):
    """Not of one whose claims are times, or that we state alone."""
    monkeypatch.setattr(render, "DOCS", tmp_path)
    (tmp_path / "images").mkdir()
    for changes in ({}, {"page": "times", "unit": "ms"}, {"page": "ours", "stated": "no"}):
        row = CLAIM | {"shown": "yes", "direction": "agrees", "size": "agrees"} | changes
        render.picture(row["page"], [row])
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["claims_paper.png"]
