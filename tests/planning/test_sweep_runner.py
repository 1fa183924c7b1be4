"""Points on processes: failures stay with their point, kills too, and nobody is left behind."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.planning.runs import runner
from eldr_sim.planning.runs.run_cache import RunCache
from eldr_sim.planning.runs.runner import Outcome, Point, expected_tokens, run_points
from eldr_sim.simulator.run import prepare_run, simulate
from eldr_sim.simulator.setup import replay as shared_replay
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.replay import replay_of, share, use

from ..waiting import LIMIT_S, wait_until

TINY = {"topology": "1P1D", "num_requests": 8, "output_len": 10, "trace": "reference-moe"}


def tiny(key, **fields):
    return Point(key, make_config(TINY | fields))


def test_a_killed_process_costs_its_own_point_alone(monkeypatch):
    points = [tiny(f"p{rate}", request_rate=rate) for rate in (5, 10, 15, 20)]
    expected = {outcome.key: outcome.summary for outcome in run_points(points, 1)}
    simulated = runner.simulate_summary

    def deadly(config):  # as the OOM killer would
        if config.requests.seed == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return simulated(config)

    monkeypatch.setattr(runner, "simulate_summary", deadly)
    monkeypatch.setattr(runner._Pace, "is_long", lambda *_: True)
    monkeypatch.setattr("eldr_sim.planning.runs.processes.can_fork", lambda: True)
    points.insert(1, tiny("deadly", seed=13))
    points.append(tiny("bad", policy="eldr:artifact=no_such"))
    outcomes = list(run_points(points, 2))
    assert sorted(outcome.key for outcome in outcomes) == sorted(point.key for point in points)
    by_key = {outcome.key: outcome for outcome in outcomes}
    deadly, bad = by_key.pop("deadly"), by_key.pop("bad")
    assert deadly.killed
    assert "killed" in deadly.reason
    assert not bad.killed
    assert bad.reason.startswith("artifact: cannot read no_such")
    assert {key: outcome.summary for key, outcome in by_key.items()} == expected


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="replays are shared on Linux only")
def test_a_shared_replay_gives_what_an_own_one_gives(monkeypatch):
    config = make_config(TINY | {"policy": "oracle"})  # reads the replay, too
    setting = prepare_run(config)
    n_layers = setting.step_time.n_moe_layers
    shared = share(setting.trace, setting.model.top_k, n_layers)
    assert share(setting.trace, setting.model.top_k, n_layers) is shared
    own = simulate(config)
    monkeypatch.setattr(shared_replay, "_mapped", {})
    use(shared)
    (mapped,) = shared_replay._mapped.values()
    serving = np.flatnonzero(~setting.trace.is_calibration)
    assert replay_of(setting.trace, setting.model.top_k, n_layers, serving) is mapped
    again = simulate(config)
    assert again.summary == own.summary
    assert again.requests == own.requests
    assert again.steps == own.steps
    # What is not in it, or another model's, is laid out anew.
    other = np.flatnonzero(setting.trace.is_calibration)[:1]
    assert replay_of(setting.trace, setting.model.top_k, n_layers, other) is not mapped
    assert replay_of(setting.trace, setting.model.top_k, 7, serving).bits.shape[1] == 14


def test_an_exception_is_a_reason_in_one_line(monkeypatch):
    def broken(_config):
        raise RuntimeError("no event left\nat all")

    monkeypatch.setattr("eldr_sim.planning.runs.runner.simulate_summary", broken)
    (outcome,) = run_points([tiny("a")], 1)
    assert (outcome.summary, outcome.reason) == (None, "RuntimeError: no event left at all")


def test_no_points_no_outcomes():
    assert list(run_points([], 2)) == []
    with pytest.raises(InputError, match="jobs: 0"):
        list(run_points([], 0))


def test_expected_tokens_follow_load_and_length():
    config = make_config({"request_rate": 10, "duration": 20, "warmup": 5, "output_len": 100})
    assert expected_tokens(config) == 25_000
    assert expected_tokens(make_config({"num_requests": 7, "output_len": 3})) == 21
    assert expected_tokens(make_config({"request_rate": "inf", "num_requests": 7})) == 7 * 512


SCRIPT = """
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.planning.runs.runner import Point
from eldr_sim.planning.runs.runner import run_points
points = [
    Point(str(i), make_config({"topology": "1P1D", "num_requests": 20, "seed": i,
                               "trace": "reference-moe"}))
    for i in range(2000)
]
for outcome in run_points(points, 2):
    print(outcome.key, flush=True)
"""


def members(group):
    """Processes of a group that still run."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    state, _, pgrp = file.read().rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(pgrp) == group and state != "Z":
                found.append(int(entry))
    return found


@pytest.mark.long
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc to see processes")
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_workers_end_with_their_parent(how):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        for _ in range(4):  # the first runs are made in the parent, then the workers are at work
            process.stdout.readline()
        wait_until(lambda: len(members(process.pid)) >= 3)
        process.send_signal(how)  # the parent alone
        process.wait(LIMIT_S)
        wait_until(lambda: members(process.pid), [])
    finally:
        process.stdout.close()
        if members(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def test_runs_of_a_question_are_made_once_and_told_in_order(monkeypatch):
    ran = []

    def fake(config):
        ran.append(config.requests.seed)
        return {"seed": config.requests.seed}

    monkeypatch.setattr("eldr_sim.planning.runs.runner.simulate_summary", fake)
    seen = []
    runs = RunCache(1, lambda done, asked: seen.append((done, asked)))
    three, one, two = (make_config(TINY | {"seed": seed}) for seed in (3, 1, 2))
    assert [s["seed"] for s in runs.summaries([three, one, three])] == [3, 1, 3]
    assert [s["seed"] for s in runs.summaries([two, three])] == [2, 3]
    assert ran == [3, 1, 2]
    assert seen == [(1, 2), (2, 2), (3, 3)]
    assert [config.requests.seed for config, _ in runs.made()] == [3, 1, 2]
    assert runs.summaries([]) == []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_fails_is_told_by_policy_and_cluster(jobs):
    configs = [
        make_config(TINY | {"policy": policy}) for policy in ("jsq", "eldr:artifact=no_such")
    ]
    with pytest.raises(InputError, match=r"run: .*=no_such on 1P1D: artifact: cannot read"):
        RunCache(jobs).summaries(configs)


def test_searches_go_on_side_by_side(monkeypatch):
    """Round by round: what two searches ask for at the same time is run once, together."""
    batches = []

    def fake_points(points, _jobs):
        batches.append([point.config.requests.seed for point in points])
        yield from (
            Outcome(p.key, {"seed": p.config.requests.seed}, "", 0.0) for p in reversed(points)
        )

    monkeypatch.setattr("eldr_sim.planning.runs.run_cache.run_points", fake_points)

    def search(seeds):
        total = 0
        for seed in seeds:
            (summary,) = yield [make_config(TINY | {"seed": seed})]
            total += summary["seed"]
        return total

    assert RunCache(1).together([search([1, 2]), search([]), search([1, 5, 7])]) == [3, 0, 13]
    assert [batch for batch in batches if batch] == [[1], [2, 5], [7]]
