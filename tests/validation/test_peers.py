"""AISimulate's predictions beside ours: the tables and pages say what the frozen files say."""

import csv
import re

import pytest

from eldr_sim.simulator.run import offered_load
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.validation.published import judge
from eldr_sim.validation.published.runs import read_runs
from studies.peers import compare
from studies.peers.aisimulate import requests

from ..paths import ROOT

DATA = ROOT / "docs" / "data"
ERRORS = compare.errors()


@pytest.mark.parametrize("name", sorted(compare.tables(ERRORS)))
def test_tables_are_of_the_frozen_predictions(name):
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == compare.tables(ERRORS)[name], (
            "renew it: python -m studies.peers.compare"
        )


def test_every_row_is_predicted_or_refused_with_a_reason():
    theirs = compare.frozen()
    assert theirs.keys() == judge.kept()["rows"].keys()
    assert all(theirs.values())


def test_an_error_is_of_its_row():
    run = next(run for run in read_runs() if len(run.measured) > 1 and run.measured.get("ttft"))
    double = {run.name: {name: 2.0 * value for name, value in run.measured.items()}}
    half = {run.name: {name: 0.5 * value for name, value in run.measured.items()}}
    found = compare.joined([run], half, double)
    assert {(x.figure, x.ours, x.theirs) for x in found} == {
        ("tpot", -50.0, 100.0), ("ttft", -50.0, 100.0),
    }  # fmt: skip
    assert compare.ahead(found) == {"tpot": (1, 1), "ttft": (1, 1), "both": (1, 1)}
    assert compare.joined([run], half, {run.name: "refused"}) == []


def test_the_page_says_what_the_tables_say():
    page = (ROOT / "docs" / "validity.md").read_text(encoding="utf-8")
    won = compare.ahead(ERRORS)
    cells = [f"{n} of {of} " for n, of in won.values()]
    assert [cell in page for cell in cells] == [True] * 3, cells
    rows = {row[0]: row for row in compare.tables(ERRORS)["peers"]}
    for name, figures in (("both predict", (1, 4)), ("not fitted on", (1,)), ("never used", (1,))):
        for at in figures:
            count, ours, theirs = rows[name][at : at + 3]
            said = f", {count} rows)" if name == "both predict" else ")"
            assert re.search(rf"{ours} \((AISimulate )?{theirs}{re.escape(said)}", page), name
    theirs = compare.frozen()
    measured = [
        run.name for run in read_runs()
        if run.name in theirs and {"tpot", "ttft"} & run.measured.keys()
    ]  # fmt: skip
    refused = sum(isinstance(theirs[name], str) for name in measured)
    assert f"Of {len(measured)} measured rows it refuses {refused}." in page


def test_requests_share_prefixes_as_ours_do():
    config = make_config({
        "model": "Qwen/Qwen3-8B", "gpu": "H100", "request_rate": "inf", "num_requests": 6,
        "input_len": 700, "output_len": 5, "prefix_len": 1000, "num_prefixes": 2,
    })  # fmt: skip
    load, _ = offered_load(config, None)
    lines = list(requests(load))
    assert all(line["input_length"] == 1700 for line in lines)
    assert all(len(line["hash_ids"]) == 4 for line in lines)
    prefixes = {tuple(line["hash_ids"][:2]) for line in lines}
    assert len(prefixes) == len(set(load.prefix_hash.tolist())) <= 2
    own = [each for line in lines for each in line["hash_ids"][2:]]
    assert len(set(own)) == len(own)
    assert not set(own) & {each for prefix in prefixes for each in prefix}
