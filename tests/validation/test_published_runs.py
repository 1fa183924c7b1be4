"""Published runs with launch lines: read, predicted on the path of ``eldr-sim run``, frozen."""

import csv
import json
import shlex
from collections import Counter

import pytest

from eldr_sim.errors import InputError
from eldr_sim.validation.published import freeze, runs

#: The licences that the data's page allows rows of.
LICENCES = {"Apache-2.0", "facts"}
#: Rows that take seconds: GPT-OSS, dense models, and GLM-4.5-Air at few requests in flight.
QUICK = ("gs_133", "gs_299", "156_GPT-OSS")


def equal_to_run(run, tmp_path, run_cli):
    """Whether ``eldr-sim run`` with a row's command predicts what the record does."""
    found = runs.predict(run)
    words = [*shlex.split(run.command())[1:], f"--out={tmp_path / run.name}"]
    code, _, err = run_cli(*words)
    if isinstance(found, str):
        assert code != 0, run.name
        problem = found.partition(": ")[2][:40]
        assert problem in err or found == "no request completed", (found, err)
        return
    assert code == 0, err
    summary = json.loads((tmp_path / run.name / "summary.json").read_text())
    for name in ("ttft", "tpot"):
        if name in found:
            statistic = run.row[f"{name}_statistic"] or "mean"
            assert summary[f"{statistic}_{name}_ms"] == found[name], run.name
    assert summary["output_throughput"] == found["throughput"]


def test_rows_have_source_licence_and_use():
    rows = runs.read_runs()
    assert len(rows) > 300
    assert {row.row["licence"] for row in rows} <= LICENCES
    assert all(row.row["source"] for row in rows)
    used = Counter(row.used for row in rows)
    assert used["never"] > 100
    assert used["in_view"] > 100


def test_what_was_measured_reaches_no_prediction():
    """A row's fields do not change with what was measured."""
    for row in runs.read_runs():
        other = runs.PublishedRun(row.row | dict.fromkeys(runs.MEASURED, "1"))
        try:
            assert other.fields() == row.fields()
        except InputError:
            with pytest.raises(InputError):
                other.fields()


@pytest.mark.parametrize("name", QUICK)
def test_run_predicts_what_the_record_does(name, tmp_path, run_cli):
    (run,) = [row for row in runs.read_runs() if row.name == name]
    equal_to_run(run, tmp_path, run_cli)


@pytest.mark.slow
def test_run_predicts_what_the_record_does_of_200_rows(tmp_path, run_cli):
    rows = [row for row in runs.read_runs() if "described in words" not in row.doubt]
    rows = [row for row in rows if row.row["engine"].partition("==")[0] in runs._ENGINES]
    for run in rows[:: len(rows) // 200][:200]:
        equal_to_run(run, tmp_path, run_cli)


def test_figures_in_doubt_are_not_compared():
    row = {"name": "a", "used": "never", "ttft_ms": "10", "tpot_ms": "5", "output_tok_s": "0"}
    assert runs.PublishedRun(row).measured == {"ttft": 10.0, "tpot": 5.0}
    assert runs.PublishedRun(row | {"ttft_doubt": "cached"}).measured == {"tpot": 5.0}
    assert runs.PublishedRun(row | {"doubt": "drafts"}).measured == {}


@pytest.fixture
def rows_file(tmp_path):
    """Return what writes rows of a small dense model with the figures given."""
    head = "name,publisher,source,licence,used,model,gpu,engine,launch,request_rate,max_concurrency"
    columns = [*head.split(","), "requests", "input_len", "output_len", "ttft_ms", "tpot_ms"]
    one = ["me", "here", "own", "never", "Llama-3.1-8B", "H100", "vllm", "vllm serve x", "inf", "2"]

    def write(**figures):
        path = tmp_path / "rows.csv"
        with path.open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(columns)
            for name, launch in (("a", "vllm serve x"), ("b", figures.pop("launch", one[7]))):
                own = [name, *one[:7], launch, *one[8:], "4", "64", "16"]
                out.writerow([*own, figures.get("ttft", ""), figures.get("tpot", "")])
        return path

    return write


@pytest.fixture
def invoke(run_cli):
    """Return what runs ``eldr-sim validate published``; yields the exit code and all output."""

    def call(*words):
        code, out, err = run_cli("validate", "published", *map(str, words))
        return code, out + err

    return call


def test_frozen_predictions_are_compared_with_later_measurements(rows_file, tmp_path, invoke):
    frozen = tmp_path / "frozen.json"
    code, said = invoke("--rows", rows_file(), "--freeze", frozen, "--jobs", 1)
    assert code == 0, said
    code, said = invoke("--rows", rows_file(ttft="20", tpot="7"), "--compare", frozen)
    assert code == 0, said
    predicted = json.loads(frozen.read_text())["rows"]["a"]["prediction"]
    assert f"{100 * (predicted['tpot'] / 7 - 1):+.1f}" in said
    assert invoke("--rows", rows_file(), "--compare", frozen)[0] == 2  # nothing is measured


def test_a_changed_file_or_launch_or_a_known_measurement_is_refused(rows_file, tmp_path, invoke):
    frozen, measured = tmp_path / "frozen.json", {"ttft": "20", "tpot": "7"}
    invoke("--rows", rows_file(), "--freeze", frozen, "--jobs", 1)
    path = rows_file(**measured, launch="vllm serve x --max-num-seqs 1")
    code, said = invoke("--rows", path, "--compare", frozen)
    assert code == 2
    assert "has another launch line" in said
    content = json.loads(frozen.read_text())
    content["rows"]["a"]["prediction"]["tpot"] = 7.0
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(content))
    code, said = invoke("--rows", rows_file(**measured), "--compare", changed)
    assert code == 2
    assert "was changed" in said
    late = tmp_path / "late.json"
    code, said = invoke("--rows", rows_file(**measured), "--freeze", late, "--jobs", 1)
    assert "have measurements already" in said
    code, said = invoke("--rows", rows_file(**measured), "--compare", late)
    assert code == 2
    assert "was known" in said


def test_the_checksum_is_of_everything_else():
    content = {"version": "1", "rows": {"a": 1}}
    known = freeze.checksum(content)
    assert known == freeze.checksum(content | {"checksum": known})
    assert known != freeze.checksum(content | {"version": "2"})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name\na\n", "lacks"),
        ("name,publisher,source,licence,used,model,gpu,engine,launch\na,,,,often,,,,\n", "used"),
        ("name,publisher,source,licence,used,model,gpu,engine,launch\n,,,,never,,,,\n", "empty"),
    ],
)
def test_bad_rows_are_one_line(tmp_path, text, problem, invoke):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    code, said = invoke("--rows", path, "--out", tmp_path / "out")
    assert code == 2
    assert problem in said
