"""Every command says that a bound on TPOT decides nothing where no answer has a second token."""

import json
from pathlib import Path

import pytest
import yaml

from eldr_sim.reports.explorer.points import run_point

RUN = {
    "model": "Llama-3.1-8B", "gpu": "H100", "topology": "1C", "request_rate": 20.0,
    "num_requests": 8, "input_len": 64, "output_len": 1, "goodput": "tpot:30", "frontend": "none",
}  # fmt: skip
OPTIONS = [
    word for name, value in RUN.items() for word in (f"--{name.replace('_', '-')}", str(value))
]
#: Options that a search for the cheapest cluster has no place for.
FOUND = {"topology": None, "goodput": None, "num_requests": None, "duration": 40, "warmup": 1}
TIMED = [
    word
    for name, value in (RUN | FOUND).items()
    if value is not None
    for word in (f"--{name.replace('_', '-')}", str(value))
]


@pytest.mark.parametrize(
    "command",
    [
        ["run", *OPTIONS],
        ["compare", *OPTIONS, "--policies", "jsq", "--seeds", "2", "--jobs", "1"],
        ["what-if", "base.yaml", "--set", "gpu=H200", "--seeds", "2", "--jobs", "1"],
        ["sweep", "sweep.yaml", "--out", "out", "--jobs", "1"],
        ["plan", *TIMED, "--max-gpus", "2", "--slo", "tpot:30", "--seeds", "2", "--jobs", "1"],
    ],
    ids=lambda words: words[0],
)
def test_it_is_said(run_cli, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(yaml.safe_dump(RUN))
    grid = {"type": "grid", "parameters": {"request_rate": [10, 20]}}
    Path("sweep.yaml").write_text(yaml.safe_dump({"config": RUN, "sweep": grid}))
    code, out, err = run_cli(*command)
    assert code == 0, (out, err)
    assert "has no TPOT: the bound of 30 ms is met by all" in err


def test_a_plan_that_is_undecided_does_not_say_that_too_few_requests_were_good(run_cli):
    short = ["8" if word == "40" else word for word in TIMED]
    code, out, err = run_cli("plan", *short, "--max-gpus", "2", "--slo", "tpot:30", "--seeds", "2",
                           "--jobs", "1")  # fmt: skip
    assert code == 1, err
    assert "attains 100.0%, undecided after 2 seeds" in out
    assert "only" not in out


def test_the_explorer_says_it():
    warnings = run_point(json.dumps(RUN), True)["warnings"]
    assert any("has no TPOT" in warning for warning in warnings)
