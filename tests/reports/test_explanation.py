"""Explanations: parts that sum to what they explain."""

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eldr_sim.errors import InputError
from eldr_sim.reports.explanation import (
    _at,
    explain_difference,
    explain_request,
    explain_run,
    open_run,
)
from eldr_sim.simulator.results import write_result
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import RunConfig

from ..on_each import on_each

BASE = {"trace": "reference-moe", "num_requests": 80, "request_rate": 40, "output_len": 24}
RUNS = {
    "pd": {"topology": "2P3D"},
    "fewer": {"topology": "2P2D", "policy": "jsq"},
    "colocated": {"topology": "3C"},
    "group": {
        "topology": "1C",
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "all2all_backend": "pplx",
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, changes in RUNS.items():
        write_result(simulate(RunConfig(**BASE | changes)), folder / name)
    return folder


@pytest.fixture(scope="module")
def runs(folders):
    return {name: open_run(folders / name) for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_the_phases_of_a_run_sum_to_its_latency(runs, name):
    explained = explain_run(runs[name])
    rows = {row[0]: row[1] for row in explained.rows}
    together = RUNS[name]["topology"].endswith("C")
    assert any("workers busy" in line for line in explained.lines) == together
    total = rows.pop("all")
    assert sum(rows.values()) == pytest.approx(total)
    summary = runs[name].documents["summary"]
    assert total - rows.get("client's limit", 0.0) == pytest.approx(summary["mean_e2el_ms"])


@pytest.mark.parametrize(("a", "b"), [("pd", "fewer"), ("pd", "colocated"), ("group", "colocated")])
def test_the_parts_of_a_difference_sum_to_it(runs, a, b):
    for part, tag in zip(explain_difference(runs[a], runs[b]), ("ttft", "tpot"), strict=True):
        *parts, whole = part.rows
        assert sum(row[3] for row in parts) == pytest.approx(whole[3], abs=1e-9)
        for name, value in zip((a, b), whole[1:3], strict=True):
            assert value == pytest.approx(runs[name].documents["summary"][f"mean_{tag}_ms"])


def test_a_run_does_not_differ_from_itself(runs):
    for part in explain_difference(runs["pd"], runs["pd"]):
        assert all(row[3] == 0.0 for row in part.rows)


def test_steps_of_decode_workers_alone_are_their_parts(runs):
    """Nothing is left over where a step is what the tables say: MoE, attention, dense layers."""
    _, tpot = explain_difference(runs["pd"], runs["fewer"])
    (rest,) = [row for row in tpot.rows if row[0].startswith("prompts in the step")]
    assert rest[1:3] == pytest.approx([0.0, 0.0], abs=0.01 * tpot.rows[-1][1])


def test_a_table_is_read_between_its_entries():
    table = np.array([[0.0, 1.0, 4.0], [10.0, 11.0, 14.0]])
    found = _at(table, np.array([0.0, 0.5, 1.0, 7.0]), np.array([0.5, 1.0, 1.5, 9.0]))
    assert found == pytest.approx([0.5, 6.0, 12.5, 14.0])


def test_a_request_beside_its_like(runs, run_cli, tmp_path):
    explanation = explain_request(runs["pd"], 7)
    rows = {row[0]: row[1:] for row in explanation.rows}
    assert all(own - like == pytest.approx(gap) for own, like, gap in rows.values())
    table = runs["pd"].tables["requests"]
    ttft = table.column("ttft_ms")[7].as_py()
    assert sum(rows[name][0] for name in rows if "mean of" not in name and name != "decode") == (
        pytest.approx(ttft)
    )
    with pytest.raises(InputError, match=r"request: 80 \(allowed: 0 to 79\)"):
        explain_request(runs["pd"], 80)


def test_a_request_of_a_session_is_that_of_its_number(tmp_path):
    """Its turns come between those of others: requests are numbered session by session."""
    chat = {"workload": "chat", "sessions": 5, "think_time": "1", "output_len": 9, "seed": 4}
    write_result(simulate(RunConfig(**BASE | {"num_requests": None} | chat)), tmp_path / "chat")
    run = open_run(tmp_path / "chat")
    table = run.tables["requests"].to_pandas()
    assert (table.request_id != table.index).any()
    for row in table.itertuples():
        said = explain_request(run, row.request_id).lines[0]
        assert f"Request {row.request_id} of " in said
        assert f" {row.prompt_len} prompt tokens" in said
    missing = min(set(range(99)) - set(table.request_id))
    with pytest.raises(InputError, match=rf"request: {missing} \(allowed: 0 to "):
        explain_request(run, missing)


def test_the_command(run_cli, tmp_path):
    argv = ["run", "--trace", "reference-moe", "--num-prompts", 6, "--output-len", 3]
    for name in "ab":
        assert run_cli(*argv, "--topology", "1P1D", "--out", tmp_path / name)[0] == 0
    code, out, _ = run_cli("explain", tmp_path / "a")
    assert code == 0
    assert "Bottleneck: " in out
    assert run_cli("explain", tmp_path / "a", "--request", 2)[0] == 0
    code, out, _ = run_cli("explain", tmp_path / "a", tmp_path / "b")
    assert code == 0
    assert "part of mean TPOT" in out
    code, _, err = run_cli("explain", tmp_path / "a", tmp_path / "b", "--request", 1)
    assert code == 2
    assert err == "Error: request: --request beside two results (allowed: one result)\n"
    assert run_cli("explain", tmp_path)[0] == 2


def damaged(folder, target, name, how):
    """Copy a run's folder with one of its tables changed."""
    shutil.copytree(folder, target)
    table = pq.read_table(target / f"{name}.parquet")
    pq.write_table(how(table), target / f"{name}.parquet")
    return target


def dropped(*columns):
    return lambda table: table.drop_columns(list(columns))


def unknown(column):
    def change(table):
        at = table.column_names.index(column)
        return table.set_column(at, column, pa.nulls(len(table), table.schema.field(at).type))

    return change


def worded(column):
    def change(table):
        at = table.column_names.index(column)
        return table.set_column(at, column, pa.array(["a"] * len(table)))

    return change


DAMAGE = [
    ("requests", dropped("decode_start_s"), "has no column 'decode_start_s' of numbers"),
    ("requests", dropped("outcome"), "has no column 'outcome' of words"),
    ("requests", lambda table: table.slice(0, 0), "has no rows"),
    ("requests", worded("measured"), "has no column 'measured' of numbers"),
    ("requests", unknown("prompt_len"), "lacks values of 'prompt_len'"),
    ("requests", unknown("finish_s"), "has completed requests without finish_s"),
    ("steps", dropped("active_experts"), "has no column 'active_experts' of numbers"),
    ("steps", worded("start_s"), "has no column 'start_s' of numbers"),
    ("steps", unknown("role"), "lacks values of 'role'"),
    ("steps", unknown("context_tokens"), "has decode steps without context_tokens"),
]


@on_each("name, how, problem", DAMAGE)
def test_a_damaged_folder_is_one_line(folders, tmp_path, run_cli, name, how, problem):
    folder = damaged(folders / "pd", tmp_path / "run", name, how)
    for words in ([], ["--request", "3"], [folders / "fewer"]):
        code, printed, error = run_cli("explain", folder, *words)
        assert (code, printed) == (2, "")
        assert f"{name}.parquet of run {problem}" in error
        assert len(error.splitlines()) == 1


def test_what_cannot_be_read_as_a_run_s_is_one_line_too(folders, tmp_path, run_cli):
    folder = shutil.copytree(folders / "pd", tmp_path / "run")
    document = folder / "config.json"
    document.write_text(document.read_text().replace('"config"', '"other"'))
    code, _, error = run_cli("explain", folder, folders / "fewer")
    assert (code, "KeyError: 'config'" in error) == (2, True)
