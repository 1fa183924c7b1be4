"""The command line of plans, over analytic clusters and simulated ones."""

import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest

from eldr_sim.planning.slo import attainment_interval, block_interval

from ..golden_output import check_golden
from ..on_each import on_each
from .analytic import Analytic


@pytest.fixture
def analytic_cli(run_cli, monkeypatch):
    """The command line over analytic clusters."""

    def run(*arguments):
        monkeypatch.setattr("eldr_sim.planning.runs.runner.simulate_summary", Analytic(0.02))
        return run_cli(
            "plan", "--slo", "ttft:500,tpot:30", "--attainment", "0.9", "--policy", "jsq,eldr",
            "--duration", "60", "--output-len", "64", "--seeds", "5", "--jobs", "1", *arguments,
        )  # fmt: skip

    return run


def test_plan_is_golden(analytic_cli):
    code, out, err = analytic_cli(
        "--request-rate", 20, "--gpu", "h100,mi300x", "--max-gpus", 32, "--price",
        "h100=2.5,mi300x=2.0", "--tensor-parallel-size", 1,
    )  # fmt: skip
    assert code == 0
    more = (" so far", " once on this machine")  # a slow or a new machine says more
    said = [line for line in err.splitlines() if not any(text in line for text in more)]
    assert said == [
        "planning: preparing; no limit of time is set, Ctrl-C ends it and nothing is written",
        "planning: simulating, about 161 runs",
        "Warning: nothing here was simulated",
    ]
    question, left_out, _, answer = out.splitlines()[:4]
    assert question.startswith("20 requests/s")
    assert left_out.startswith("Not searched: ")
    assert answer.startswith("Answer: ")
    assert "why none" not in out
    check_golden("plan.txt", out)


def test_shapes_are_listed_when_asked_for(analytic_cli):
    code, out, _ = analytic_cli(
        "--request-rate", 20, "--max-gpus", 32, "--tensor-parallel-size", 1, "--verbose"
    )
    assert code == 0
    assert out.index("Answer: ") < out.index("why none")
    assert "xPyD TP1" in out


def test_plan_of_a_rate_is_golden(analytic_cli):
    code, out, _ = analytic_cli("--topology", "6P10D", "--gpu", "h100,mi300x")
    assert code == 0
    check_golden("plan_rate.txt", out)


def test_no_cluster_is_exit_code_1_and_still_written(analytic_cli, tmp_path):
    code, out, _ = analytic_cli(
        "--request-rate", 20, "--max-gpus", 4, "--out", tmp_path / "plan", "--gpu", "h100"
    )
    assert code == 1
    assert "No cluster meets the objective." in out
    record = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert record["answer"] is None
    assert record["rows"][0]["reasons"]


@on_each(
    "arguments, message",
    [
        (["--request-rate", "20", "--price", "h100"], "price: 'h100' (allowed: GPU=PRICE"),
        (["--request-rate", "20", "--price", "h100=-1"], "price: 'h100=-1'"),
        (["--request-rate", "20", "--price", "h100=x"], "price: 'h100=x'"),
        (["--request-rate", "20", "--price", "h100=1,h100=2"], "price: h100 is given twice"),
        (["--request-rate", "20", "--tensor-parallel-size", "2,2"], "tensor_parallel_size: 2,2 na"),
        (["--gpus", "1000000000000"], "gpus: 1,000,000,000,000 is above the limit"),
        (["--request-rate", "20", "--gpu", "h1000"], "gpu: unknown GPU 'h1000'"),
        (["--request-rate", "20", "--attainment", "1"], "attainment: 1"),
        (["--request-rate", "20", "--slo", "itl:3"], "slo: itl: no such field"),
        (["--request-rate", "20", "--tensor-parallel-size", "two"], "tensor_parallel_size: 'two'"),
        (["--request-rate", "20", "--dp", "4,4"], "data_parallel_size: 4,4 names a value twice"),
        (["--topology", "1P1D", "--dp", "1,4"], "data_parallel_size: 1,4 for one cluster"),
        (["--request-rate", "20", "--dp", "0"], "data_parallel_size: 0 (allowed: 1 or more)"),
        (["--request-rate", "20", "--why-not", "1P2X"], "why_not: '1P2X' (allowed: xPyD"),
        (["--request-rate", "20", "--emit", "."], "emit: . exists"),
        (["--request-rate", "20", "--knobs"], "knobs: there is no split of GPUs"),
        (
            ["--topology", "1P1D", "--why-not", "1C"],
            "why_not: there is no search for the cheapest cluster",
        ),
        (["--request-rate", "20", "--topology", "1P1D"], "topology: together with --request-rate"),
        (["--topology", "1P"], "policy: prefill workers alone"),
        (["--topology", "1P", "--prefill-only"], "prefill_only: together"),
        (["--gpus", "8", "--topology", "1P1D"], "gpus: together with --topology"),
        (["--gpus", "0"], "gpus: 0"),
        (["--request-rate", "20", "--jobs", "0"], "jobs: 0"),
        (["--request-rate", "20", "--seeds", "1"], "seeds: 1"),
        ([], "request_rate: none"),
    ],
)
def test_bad_arguments(analytic_cli, arguments, message):
    code, out, err = analytic_cli(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"Error: {message}")
    assert err.count("\n") == 1


def test_a_simulated_plan_is_the_same_however_many_processes(run_cli, tmp_path):
    arguments = [
        "plan", "--slo", "ttft:200,tpot:12", "--attainment", "0.9", "--request-rate", "60",
        "--policy", "p2c", "--max-gpus", "3", "--tensor-parallel-size", "1", "--duration", "2",
        "--warmup", "1", "--output-len", "16", "--seeds", "2", "--trace", "reference-moe",
    ]  # fmt: skip
    texts = []
    for jobs in ("1", "2"):
        code, out, _ = run_cli(*arguments, "--jobs", jobs, "--out", tmp_path / jobs)
        assert code == 0
        texts.append(out.replace(str(tmp_path / jobs), ""))
    assert texts[0] == texts[1]
    for name in ("plan.json", "points.parquet"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    record = json.loads((tmp_path / "1" / "plan.json").read_text())
    points = pq.read_table(tmp_path / "1" / "points.parquet").to_pandas()
    assert len(points) == record["simulated_runs"]
    answer = record["answer"]
    mine = points[
        (points.topology == answer["topology"])
        & (points.policy == answer["policy"])
        & (points.duration == 2.0)
        & (points.request_rate == 60)
        & (points.seed < answer["seeds"])
    ]
    assert mine.slo_attainment.mean() == pytest.approx(answer["slo_attainment"]["mean"])
    assert answer["slo_attainment"]["low"] >= 0.9


@pytest.fixture
def day(tmp_path):
    """A log of a request a second, and 20 of them for ten seconds two hours after its begin."""
    times = sorted([*range(0, 10_800, 60), *(7200 + i / 20 for i in range(200))])
    lines = [
        {"timestamp_ms": round(1e3 * t), "input_length": 50, "output_length": 4} for t in times
    ]
    path = tmp_path / "day.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


LOG = [
    "plan", "--slo", "ttft:200", "--max-gpus", 2, "-tp", 1, "--gpu", "h100", "--seeds", 2,
    "--jobs", 1, "--trace", "reference-moe", "--policy", "jsq",
]  # fmt: skip


def test_a_days_log_is_planned_at_its_peak(run_cli, day, tmp_path):
    code, out, err = run_cli(*LOG, "--workload", day, "--busiest", "10s", "--out", tmp_path / "out")
    assert code == 0, err
    assert out.startswith("20.1 requests/s within TTFT 200 ms")
    (said,) = re.findall(r"^Measured: (.*)", out, re.M)
    assert said.startswith("201 of 380 requests, the busiest, 7,200-7,210 s of 10,740 s, 20.1/s")
    assert "arrivals and lengths are the log's" in out
    assert "Warning: the measured part" not in err
    record = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert record["request_rate"] == pytest.approx(20.1)
    points = pq.read_table(tmp_path / "out" / "points.parquet")
    assert set(points["num_prompts"].to_pylist()) == {201}


def test_a_long_log_is_told_before_it_is_replayed_whole(run_cli, day, monkeypatch):
    monkeypatch.setattr("eldr_sim.cli.plan._MANY_REQUESTS", 300)
    monkeypatch.setattr("eldr_sim.planning.search.goals.cheapest_cluster", lambda *_, **__: exit(7))
    code, _, err = run_cli(*LOG, "--workload", day)
    assert code == 7
    assert err.startswith("Every run replays all 380 requests of the log, 10,740 s; --busiest 10m")


@pytest.mark.parametrize(
    ("part", "field", "n"), [(["--busiest", "3s"], "busiest", 61), (["--to", "30m"], "log_to", 30)]
)
def test_too_small_a_part_of_a_log_is_told_by_what_was_given(run_cli, day, part, field, n):
    code, _, err = run_cli(*LOG, "--workload", day, *part)
    assert code == 2
    line = err.splitlines()[-1]
    assert line.startswith(f"Error: {field}: {n} requests of the log in the measured window are")


def test_interrupt_leaves_nothing(analytic_cli, tmp_path, monkeypatch):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("eldr_sim.planning.search.goals.cheapest_cluster", interrupted)
    code, _, err = analytic_cli("--request-rate", 20, "--out", tmp_path / "plan")
    assert (code, err.strip()) == (130, "Interrupted: nothing was written.")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def bursts(tmp_path):
    """A gateway's log: 40 requests a second for 25 s, 20 for 50 s, and so on for 110 s."""
    times, now = [], 0.0
    while now < 110.0:
        times.append(now)
        now += 1 / 40 if now % 75 < 25 else 1 / 20
    lines = [
        {"timestamp_ms": round(1e3 * t), "input_length": 1600, "output_length": 4} for t in times
    ]
    path = tmp_path / "gateway.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.long
def test_a_log_is_judged_by_all_of_it_and_not_by_its_valley(run_cli, bursts, tmp_path):
    """One prefill worker keeps up with the valley of 20/s and not with the bursts."""
    valley = [*LOG, "--workload", bursts, "--warmup", 30, "--duration", 30]
    code, out, err = run_cli(*valley, "--out", tmp_path / "valley")
    assert code == 0
    small = json.loads((tmp_path / "valley" / "plan.json").read_text())["answer"]
    assert "Warning: the measured part of the log has 20.0 requests/s, the log 29." in err

    asked = [*LOG, "--workload", bursts, "--max-gpus", 3, "--out", tmp_path / "whole"]
    code, out, err = run_cli(*asked)
    assert code == 0, err
    record = json.loads((tmp_path / "whole" / "plan.json").read_text())
    assert record["answer"]["gpus"] > small["gpus"]
    same = small["topology"]
    one = next(each for each in record["clusters"] if each["topology"] == same)
    assert one["slo_attainment"]["mean"] < 0.99 - 0.16
    assert "Measured: all " in out


def test_blocks_of_a_log_say_how_another_may_differ():
    """Against the ratio estimator written out, and a log whose blocks are alike."""
    seeds = [[(90, 100), (40, 50), (100, 100)], [(80, 100), (50, 50), (100, 100)]]
    found = block_interval(seeds)
    good, every = np.array([170, 90, 200]), np.array([200, 100, 200])
    ratio = 460 / 500
    half = 4.302653 * np.sqrt(1.5 * ((good - ratio * every) ** 2).sum()) / 500
    assert found == pytest.approx((ratio, ratio - half, 1.0), rel=1e-6)
    alike = block_interval([[(99, 100)] * 10])
    assert alike.mean == 0.99
    assert (alike.low, alike.high) == attainment_interval([0.99, 0.99], 1000)[1:]
