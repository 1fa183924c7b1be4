"""Histories of real fleets become events of a run: three formats, one meaning."""

import json
import math
from datetime import UTC, datetime

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim import RunConfig
from eldr_sim.errors import InputError
from eldr_sim.reports.explanation import explain_run, open_run
from eldr_sim.reports.folders import contents_of
from eldr_sim.simulator.results import write_result
from eldr_sim.simulator.run import simulate
from eldr_sim.traces.requests.logs.fleet_events import (
    Change,
    events_of,
    origin_of,
    read_fleet_events,
)

START = 1_763_632_800  # 2025-11-20 10:00:00 UTC
END_S = 100.0


def made(path, content, start_up_s=0.0):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    history = read_fleet_events(path, start_up_s)
    events, named = events_of(history.changes, "worker", 4, START * 10**9, END_S)
    return events, named, history


def csv_of(*rows):
    return "time,worker,event\n" + "".join(f"{START + at},{name},{e}\n" for at, name, e in rows)


def pod_event(at, name, reason, kind="Pod"):
    when = datetime.fromtimestamp(START + at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    about = {"kind": kind, "name": name}
    return {"involvedObject": about, "reason": reason, "lastTimestamp": when}


def series_of(name, *values):
    samples = [[START + 10 * k - 20, f"{value}"] for k, value in enumerate(values) if value != ""]
    return {"metric": {"pod": name, "job": "vllm"}, "values": samples}


def test_three_formats_say_the_same(tmp_path):
    wanted = [
        {"join": "worker:2", "at_s": 0.0, "start_up_s": 60.0},
        {"fail": "worker:0", "at_s": 40.0, "for_s": 30.0},
    ]
    rows = [(-20, "w-1", "start"), (-20, "w-2", "Ready"), (40, "w-1", "OOM-killed"),
            (70, "w-1", "up"), (60, "w-10", "started")]  # fmt: skip
    pods = [
        pod_event(-20, "w-1", "Started"), pod_event(-20, "w-2", "Started"),
        pod_event(40, "w-1", "BackOff"), pod_event(70, "w-1", "Started"),
        pod_event(60, "w-10", "Started"), pod_event(50, "w-2", "Pulled"),
        pod_event(50, "n", "Started", "Node"),
    ]  # fmt: skip
    matrix = [
        series_of("w-1", 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1),
        series_of("w-2", *[1] * 13),
        series_of("w-10", *[""] * 8, *[1] * 5),
    ]
    prometheus = {"status": "success", "data": {"resultType": "matrix", "result": matrix}}
    for name, content in (
        ("a.csv", csv_of(*rows)), ("b.json", {"items": pods}), ("c.json", prometheus)
    ):  # fmt: skip
        events, named, history = made(tmp_path / name, content)
        assert events == wanted, name
        assert named == {"worker:0": "w-1", "worker:1": "w-2", "worker:2": "w-10"}
    _, _, history = made(tmp_path / "b.json", {"items": pods})
    assert history.left_out == {"of reason Pulled": 1, "of a Node": 1}


def test_a_series_that_ends_or_has_a_hole_is_down(tmp_path):
    matrix = {"result": [
        series_of("a", *[1] * 12), series_of("b", 1, 1, 1, 1, "", "", "", "", 1, 1, 1, 1),
        series_of("c", 1, 1, 1, 1),
    ]}  # fmt: skip
    events, *_ = made(tmp_path / "x.json", matrix)
    assert events == [
        {"fail": "worker:1", "at_s": 20.0, "for_s": 40.0}, {"fail": "worker:2", "at_s": 20.0}
    ]  # fmt: skip


def test_starts_take_as_long_as_is_said(tmp_path):
    rows = [(-5, "a", "up"), (30, "a", "restart"), (50, "a", "stop"), (60, "a", "up")]
    events, *_ = made(tmp_path / "x.csv", csv_of(*rows), 12.0)
    assert events == [
        {"fail": "worker:0", "at_s": 30.0, "for_s": 12.0},
        {"drain": "worker:0", "at_s": 50.0, "for_s": 10.0},
    ]
    pods = [pod_event(-5, "a", "Started"), pod_event(20, "a", "Killing"),
            pod_event(30, "a", "Started")]  # fmt: skip
    events, *_ = made(tmp_path / "x.json", pods, 12.0)
    assert events == [
        {"join": "worker:0", "at_s": 0.0, "start_up_s": 7.0},
        {"drain": "worker:0", "at_s": 20.0, "for_s": 22.0},
    ]


STATES = st.sampled_from(["up", "down", "leaves"])
HISTORY = st.lists(st.tuples(st.integers(-50, 150), STATES), min_size=1, max_size=8,
                   unique_by=lambda one: one[0])  # fmt: skip


@given(HISTORY)
def test_a_worker_serves_when_its_history_says_so(history):
    history = sorted(history)
    changes = [Change((START + at) * 10**9, "a", state) for at, state in history]
    events, _ = events_of(changes, "worker", 1, START * 10**9, END_S)
    away = []
    for event in events:
        if "join" in event:
            away.append((-math.inf, event["start_up_s"]))
        else:
            away.append((event["at_s"], event["at_s"] + event.get("for_s", math.inf)))
    for half in range(1, 200, 2):
        at = half / 2
        before = [state for when, state in history if when <= at]
        serves = before[-1] == "up" if before else history[0][1] != "up"
        assert serves == (not any(begin <= at < end for begin, end in away)), at


def test_clocks_that_do_not_match_are_refused():
    dated, plain = Change(START * 10**9, "a", "up"), Change(5 * 10**9, "a", "up")
    assert origin_of(7, [plain], None) == 7
    assert origin_of(START * 10**9, [dated], None) == START * 10**9
    assert origin_of(7, [dated], "2025-11-20T10:00:00Z") == START * 10**9
    for first, change in ((7, dated), (START * 10**9, plain)):
        with pytest.raises(InputError, match="start: times of"):
            origin_of(first, [change], None)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.csv", "a,b\n1,2\n", "columns a, b"), ("x.csv", csv_of(), "no start or end"),
        ("x.csv", csv_of((1, "a", "sneezed")), "line 2: event 'sneezed'"),
        ("x.csv", csv_of((1, "", "up")), "line 2: no worker"),
        ("x.csv", "time,worker,event\nsoon,a,up\n", "line 2: time 'soon'"),
        ("x.json", {"items": [{"kind": "Pod"}]}, "no events of Kubernetes"),
        ("x.json", {"items": 3}, "not hold a list"), ("x.json", [3], "not hold a list"),
        ("x.json", {"result": [{"metric": {}, "values": []}]}, "without a label"),
        ("x.json", {"result": [{"metric": {"pod": "a"}, "values": [[1]]}]}, "not a pair"),
        ("x.json", {"result": []}, "no start or end"), ("x.json", "{", "fleet"),
        ("x.csv", csv_of(*((1, f"w{k}", "up") for k in range(5))), "topology: the file names 5"),
    ],
)  # fmt: skip
def test_what_is_no_history_is_refused(tmp_path, name, content, said):
    with pytest.raises(InputError) as found:
        made(tmp_path / name, content)
    assert said in str(found.value)


def test_an_incident_is_run_again(run_cli, tmp_path):
    log, fleet, events = (tmp_path / name for name in ("log.csv", "fleet.csv", "events.yaml"))
    at = (datetime.fromtimestamp(START + k / 4, UTC).replace(tzinfo=None) for k in range(240))
    lines = [f"{when.isoformat(' ', 'milliseconds')},100,20\n" for when in at]
    log.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
    fleet.write_text(csv_of((-9, "a", "up"), (-9, "b", "up"), (20, "b", "fail"), (35, "b", "up")))
    command = ["trace", "incident", f"{fleet}", "--log", f"{log}", "--topology", "2C"]
    status, said, problem = run_cli(*command, "--out", f"{events}")
    assert status == 0, problem
    assert "worker:1  b" in said
    assert yaml.safe_load(events.read_text()) == [{"fail": "worker:1", "at_s": 20.0, "for_s": 15.0}]
    config = RunConfig(
        model="Llama-3.1-8B", topology="2C", policy="round_robin", workload=f"{log}",
        events=f"{events}", num_requests=None, request_rate=None, warmup=0,
    )  # fmt: skip
    result = simulate(config)
    assert [event["event"] for event in result.summary["faults"]["events"]]
    steps = result.steps.to_pandas()
    times = steps[steps["worker"] == 1]["start_s"]
    assert not times.between(20.1, 34.9).any()
    assert times.between(0, 20).any()
    assert times.between(35, 60).any()
    write_result(result, tmp_path / "run")
    with contents_of(run := open_run(tmp_path / "run")):
        lines = "\n".join(explain_run(run).lines)
    assert "fail worker:1 @20s+15s: throughput" in lines
    wanted = "what-if run --set retry=migrate --set topology=3C"
    assert wanted in lines
    status, _, problem = run_cli(*command, "--out", f"{events}")
    assert status == 2
    assert "out: " in problem
