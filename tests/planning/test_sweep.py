"""Sweeps: each run once whatever interrupts it, and a data set that depends on nothing else."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from io import StringIO

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from scipy import stats

from eldr_sim.cli.console import sweep_bar
from eldr_sim.errors import InputError
from eldr_sim.planning.runs import processes
from eldr_sim.planning.runs import runner as points
from eldr_sim.planning.runs.journal import FILE_NAME
from eldr_sim.planning.runs.sweep import SweepProgress, sweep
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config

from ..paths import GOLDEN
from ..waiting import wait_until

#: A policy that cannot be built where there is no such file.
FAILS = "eldr:artifact=no_such"
OUTPUTS = ("points.parquet", "aggregate.parquet", "aggregate.csv", "sweep.json")
TINY = {"trace": "reference-moe", "topology": "1P1D", "num_requests": 8, "output_len": 10}
SPEC = {
    "config": TINY,
    "sweep": {
        "type": "grid",
        "parameters": {"policy": ["jsq", "eldr", FAILS], "request_rate": [5, 10, 20]},
    },
    "multiRun": {"numRuns": 2},
}


@pytest.fixture
def fake_runs(monkeypatch):
    """Runs that take no time; yields the configurations that were run, in order."""
    ran = []

    def fake(config):
        if config.policies.policy == FAILS:
            raise InputError("policy", "unknown")
        ran.append((config.policies.policy, config.requests.request_rate, config.requests.seed))
        figure = (
            config.requests.request_rate * (1 + len(config.policies.policy))
            + 0.1 * config.requests.seed
        )
        return {
            "policy": config.policies.policy,
            "median_tpot_ms": figure / 3,
            "median_ttft_ms": None
            if config.policies.policy == "jsq" and config.requests.seed
            else figure,
            "failed_reasons": {},
            "completed": config.requests.seed + 1,
            "weakest_provenance": "imported",
            "lookups_outside_tables": {"moe_batch": 3 * (config.requests.request_rate == 20)},
            "latency_warnings": [],
            "decode_steps": 10,
            "num_prompts": 8,
            "max_concurrency": None,
            "in_flight_at_window_start": 0,
            "in_flight_at_window_end": 0,
        }

    monkeypatch.setattr(points, "simulate_summary", fake)
    return ran


def interrupt_after(done):
    """Return a progress function that interrupts a sweep after so many runs."""

    def progress(now):
        if now.done == done:
            raise KeyboardInterrupt

    return progress


@pytest.fixture
def sweep_file(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(SPEC, sort_keys=False))
    return path


def contents(folder):
    return {name: (folder / name).read_bytes() for name in OUTPUTS}


def test_points_hold_what_single_runs_say(tmp_path):
    spec = SPEC | {"sweep": {"type": "grid", "parameters": {"request_rate": [5, 20]}}}
    result = sweep(spec, tmp_path / "out", jobs=1)
    rows = result.points.to_pylist()
    assert [(row["point"], row["run"], row["seed"]) for row in rows] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 1, 1),
    ]
    for row in rows:
        config = make_config(TINY | {"request_rate": row["request_rate"], "seed": row["seed"]})
        summary = simulate(config).summary
        for name, value in summary.items():
            if name == "request_rate":
                continue
            if isinstance(value, dict | list):
                assert json.loads(row[name]) == json.loads(json.dumps(value))
            else:
                assert row[name] == value
        assert set(summary) < set(row)


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_same_bytes_in_this_process_and_on_others(tmp_path, monkeypatch, forked):
    monkeypatch.setattr(points._Pace, "is_long", lambda *_: True)
    monkeypatch.setattr(processes, "can_fork", lambda: forked)
    for jobs in (1, 2):
        result = sweep(SPEC, tmp_path / str(jobs), jobs=jobs)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert not list(tmp_path.glob("*/.*"))
    rows = result.points.to_pylist()
    assert {row["status"] for row in rows if row["policy"] == FAILS} == {"failed"}
    assert all("cannot read no_such" in r["reason"] for r in rows if r["status"] == "failed")
    assert {row["status"] for row in rows if row["policy"] != FAILS} == {"completed"}
    # Paired: one seed, one load, whatever the policy.
    frame = result.points.to_pandas().query("status == 'completed'")
    assert frame.groupby(["request_rate", "seed"]).total_input_tokens.nunique().eq(1).all()


def test_means_and_intervals_are_textbook(fake_runs):
    spec = SPEC | {"multiRun": {"numRuns": 4, "confidenceLevel": 0.9}}
    result = sweep(spec, jobs=1)
    runs = result.points.to_pandas()
    for row in result.aggregate.to_pylist():
        own = runs[runs.point == row["point"]]
        if row["policy"] == FAILS:
            assert (row["runs_completed"], row["runs_failed"]) == (0, 4)
            assert row["median_tpot_ms"] is None
            continue
        assert (row["runs_completed"], row["runs_failed"]) == (4, 0)
        values = own.median_tpot_ms.to_numpy()
        expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.9)
        assert row["median_tpot_ms"] == pytest.approx(np.mean(values))
        assert row["median_tpot_ms_low"] == pytest.approx(expected.low)
        assert row["median_tpot_ms_high"] == pytest.approx(expected.high)
        if row["policy"] == "jsq":  # one run of four has the figure: a mean and no interval
            assert row["median_ttft_ms"] == own.median_ttft_ms.dropna().item()
            assert row["median_ttft_ms_low"] is None


def test_equal_points_are_run_once(fake_runs):
    spec = SPEC | {"sweep": {"type": "grid", "parameters": {"request_rate": [5, 5, 10]}}}
    result = sweep(spec, jobs=1)
    assert len(fake_runs) == len(set(fake_runs)) == 4
    assert result.points.num_rows == 6


@pytest.mark.long
def test_a_cut_anywhere_loses_and_repeats_nothing(tmp_path, fake_runs):
    sweep(SPEC, tmp_path / "whole", jobs=1)
    journal = (tmp_path / "whole" / FILE_NAME).read_bytes()
    expected, everything = contents(tmp_path / "whole"), sorted(fake_runs)
    lines = journal.splitlines(keepends=True)
    edges = np.cumsum([0, *map(len, lines)]).tolist()
    cuts = {edge + shift for edge in edges for shift in (-1, 0, 1, 40)}
    for cut in sorted(c for c in cuts if 0 <= c <= len(journal)):
        folder = tmp_path / "cut"
        folder.mkdir()
        (folder / FILE_NAME).write_bytes(journal[:cut])
        (folder / ".sweep-left-behind").mkdir()
        kept = [json.loads(line) for line, end in zip(lines, edges[1:], strict=True) if end <= cut]
        done = sum(bool(record.get("summary")) for record in kept[1:])
        fake_runs.clear()
        sweep(SPEC, folder, jobs=1, resume=True)
        assert len(fake_runs) == len(everything) - done
        assert set(fake_runs) <= set(everything)
        assert contents(folder) == expected
        keys = [json.loads(line)["key"] for line in (folder / FILE_NAME).open().readlines()[1:]]
        assert len(keys) == len(set(keys)) == 18
        assert {path.name for path in folder.iterdir()} == {*OUTPUTS, FILE_NAME}
        shutil.rmtree(folder)


def test_an_interrupted_sweep_has_no_data_set_and_goes_on(tmp_path, fake_runs):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        sweep(SPEC, out, jobs=1, progress=interrupt_after(5))
    assert [path.name for path in out.iterdir()] == [FILE_NAME]
    before = len(fake_runs)
    seen = []
    sweep(SPEC, out, jobs=1, resume=True, progress=seen.append)
    assert (seen[0].done, seen[-1].done, seen[-1].total, seen[-1].failed) == (5, 18, 18, 6)
    assert len(fake_runs) == 12 > before
    assert len(set(fake_runs)) == 12
    sweep(SPEC, tmp_path / "whole", jobs=1)
    assert contents(out) == contents(tmp_path / "whole")


def test_force_replaces_a_sweep_and_nothing_else(tmp_path, fake_runs):
    out = tmp_path / "sweep"
    sweep(SPEC, out, jobs=1)
    other = SPEC | {"randomSeed": 3}
    assert sweep(other, out, jobs=1, force=True).points["seed"].to_pylist()[0] == 3
    with pytest.raises(InputError, match="force: together with --resume"):
        sweep(SPEC, out, jobs=1, force=True, resume=True)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").write_text("years of work")
    with pytest.raises(InputError, match="exists and is not a sweep"):
        sweep(SPEC, tmp_path / "thesis", jobs=1, force=True)
    assert (tmp_path / "thesis" / "text").read_text() == "years of work"


def test_resume_refuses_another_sweep_and_a_new_one_a_folder_in_use(tmp_path, fake_runs):
    out = tmp_path / "out"
    sweep(SPEC, out, jobs=1)
    before = contents(out)
    with pytest.raises(
        InputError, match=r"holds a sweep, 18 runs done \(allowed: --resume, --force"
    ):
        sweep(SPEC, out, jobs=1)
    with pytest.raises(InputError, match=r"spec.multiRun.numRuns was 2 and is 3"):
        sweep(SPEC | {"multiRun": {"numRuns": 3}}, out, jobs=1, resume=True)
    with pytest.raises(InputError, match=r"spec.randomSeed is new"):
        sweep(SPEC | {"randomSeed": 3}, out, jobs=1, resume=True)
    assert contents(out) == before
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="is not a sweep"):
        sweep(SPEC, tmp_path / "thesis", jobs=1, resume=True)
    assert len(list((tmp_path / "thesis").iterdir())) == 1


def test_two_sweeps_in_one_folder_are_refused(tmp_path, fake_runs):
    out = tmp_path / "out"
    refused = []

    def start_another(progress):
        if progress.done == 3:
            for resume in (False, True):
                with pytest.raises(InputError, match="another sweep is running") as error:
                    sweep(SPEC, out, jobs=1, resume=resume)
                refused.append(str(error.value))

    sweep(SPEC, out, jobs=1, progress=start_another)
    assert len(refused) == 2
    assert len(set(fake_runs)) == len(fake_runs) == 12


def test_a_damaged_journal_is_refused(tmp_path, fake_runs):
    out = tmp_path / "out"
    sweep(SPEC, out, jobs=1)
    lines = (out / FILE_NAME).read_bytes().splitlines(keepends=True)
    lines[4] = lines[4][:50] + b"\n"
    (out / FILE_NAME).write_bytes(b"".join(lines))
    with pytest.raises(InputError, match="line 5 is damaged"):
        sweep(SPEC, out, jobs=1, resume=True)


def test_a_killed_run_is_tried_again_on_resume(tmp_path, fake_runs):
    out = tmp_path / "out"
    sweep(SPEC, out, jobs=1)
    expected = contents(out)
    lines = (out / FILE_NAME).read_text().splitlines()
    record = json.loads(lines[1])
    record |= {"summary": None, "reason": "its process was killed", "killed": True}
    lines[1] = json.dumps(record)
    (out / FILE_NAME).write_text("\n".join(lines) + "\n")
    fake_runs.clear()
    sweep(SPEC, out, jobs=1, resume=True)
    assert len(fake_runs) == 1
    assert contents(out) == expected


def test_bad_backend_leaves_no_folder(tmp_path):
    for arguments in ({"jobs": 0}, {"address": "auto"}, {"backend": "threads"}):
        with pytest.raises(InputError):
            sweep(SPEC, tmp_path / "out", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_that_begins_nothing_leaves_no_folder(tmp_path, fake_runs):
    with pytest.raises(KeyboardInterrupt):
        sweep(SPEC, tmp_path / "out", jobs=1, progress=interrupt_after(0))
    assert list(tmp_path.iterdir()) == []


def test_progress_is_the_share_of_the_expected_tokens(tmp_path, fake_runs):
    """Longest first, and a run of twice the rate is twice the work."""
    spec = {
        "config": {"topology": "1P1D", "duration": 10, "warmup": 0, "output_len": 10},
        "sweep": {"type": "grid", "parameters": {"request_rate": [10, 20, 30, 40]}},
    }
    with pytest.raises(KeyboardInterrupt):
        sweep(spec, tmp_path / "out", jobs=1, progress=interrupt_after(2))
    seen = []
    sweep(spec, tmp_path / "out", jobs=1, resume=True, progress=seen.append)
    assert [now.share for now in seen] == pytest.approx([0.7, 0.9, 1.0])


def test_dry_run_prints_points_and_writes_nothing(run_cli, tmp_path, sweep_file):
    code, out, err = run_cli("sweep", sweep_file, "--dry-run", "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == ("9 points, 18 runs, about 0.0 million output tokens to simulate")
    assert len(out.splitlines()) == 2 + 9
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]


def test_command_prints_means_failures_and_where(run_cli, tmp_path, sweep_file, fake_runs):
    out = tmp_path / "out"
    code, text, err = run_cli("sweep", sweep_file, "--out", out, "--jobs", 1)
    assert code == 0
    golden = GOLDEN / "sweep.txt"
    shown = "".join(line.rstrip() + "\n" for line in text.splitlines())
    assert shown.replace(str(out), "DIR") == golden.read_text()
    assert err.count("Failed: point ") == 6
    assert "Warning: points 2, 5: " in err
    assert f"Failed: point 6 (policy={FAILS}, request_rate=5), seed 0: policy: unknown\n" in err
    code, _, err = run_cli("sweep", sweep_file, "--out", out, "--jobs", 1)
    assert code == 2
    assert err.startswith(f"Error: out: {out} holds a sweep")
    code, _, err = run_cli("sweep", sweep_file)
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("updates", "shown", "time_left"),
    [
        # Half of the work in 100 s, what was done before does not count; 0.3 are left.
        (
            [(0.0, SweepProgress(2, 9, 0, 0.2)), (100.0, SweepProgress(4, 9, 1, 0.7))],
            ["2/9 runs", "-:--:--", "4/9 runs, 1 failed"],
            "0:01:0[01]",
        ),
        # A time is there after the first run, however long that takes.
        (
            [(0.0, SweepProgress(0, 4, 0, 0.0)), (3600.0, SweepProgress(1, 4, 0, 0.25))],
            ["0/4 runs", "1/4 runs"],
            "3:00:0[01]",
        ),
    ],
)
def test_progress_counts_runs_and_time_left(monkeypatch, updates, shown, time_left):
    terminal, clock = StringIO(), [0.0]
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("rich.console.monotonic", lambda: clock[0])
    with sweep_bar("grid") as update:
        for at, progress in updates:
            clock[0] = at
            update(progress)
            wait_until(lambda done=progress.done: f"{done}/" in terminal.getvalue())
    assert all(text in terminal.getvalue() for text in shown)
    assert re.search(time_left, terminal.getvalue())


def test_without_a_terminal_a_sweep_prints_lines(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr("eldr_sim.cli.console.time.monotonic", lambda: clock[0])
    with sweep_bar("grid") as update:
        for clock[0], done in ((0.0, 0), (20.0, 1), (40.0, 2)):
            update(SweepProgress(done, 4, 0, done / 4))
    assert capsys.readouterr().err.splitlines() == [
        "grid: 1/4 runs, 20 s so far, about 60 s left",
        "grid: 2/4 runs, 40 s so far, about 40 s left",
    ]


def test_command_says_how_to_go_on(run_cli, tmp_path, sweep_file, fake_runs, monkeypatch):
    out = tmp_path / "out"
    real, calls = points.simulate_summary, []

    def interrupted(config):
        calls.append(config)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(config)

    monkeypatch.setattr(points, "simulate_summary", interrupted)
    code, text, err = run_cli("sweep", sweep_file, "--out", out, "--jobs", 1)
    assert (code, text) == (130, "")
    assert err.lstrip() == f"Interrupted: {out} keeps 3 ended runs; --resume continues.\n"
    assert run_cli("sweep", sweep_file, "--out", out, "--jobs", 1, "--resume")[0] == 0


def test_a_sweep_without_a_completed_run_fails(run_cli, tmp_path, sweep_file, fake_runs):
    spec = {"config": TINY, "sweep": {"type": "zip", "parameters": {"policy": [FAILS]}}}
    sweep_file.write_text(yaml.safe_dump(spec))
    code, _, err = run_cli("sweep", sweep_file, "--out", tmp_path / "out", "--jobs", 1)
    assert code == 1
    assert err.endswith("No run completed\n")


def test_infinite_rates_come_back_as_numbers(tmp_path):
    spec = {"config": TINY, "sweep": {"type": "grid", "parameters": {"request_rate": [".inf", 5]}}}
    sweep(spec, tmp_path / "out", jobs=1)
    table = pq.read_table(tmp_path / "out" / "points.parquet")
    assert table["request_rate"].to_pylist() == [math.inf, 5.0]
    assert json.loads((tmp_path / "out" / "sweep.json").read_text())["parameters"] == [
        "request_rate"
    ]


def test_start_of_the_command_stays_light():
    code = (
        "import sys; import eldr_sim.cli.sweep; "
        "sys.exit(any(name in sys.modules for name in ('scipy.stats', 'ray')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
