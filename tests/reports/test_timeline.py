"""The Chrome trace of a run: valid, complete, with matching begins and ends."""

import json
from collections import Counter

import pytest

from eldr_sim.reports.run_pictures import write_timeline
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config


@pytest.fixture(scope="module")
def result():
    return simulate(make_config({"topology": "1P2D", "num_requests": 20, "output_len": 8}))


def test_timeline_is_valid_and_complete(result, tmp_path):
    path = tmp_path / "timeline.json"
    write_timeline(path, result.requests, result.steps)
    events = json.loads(path.read_text())["traceEvents"]
    kinds = Counter(event["ph"] for event in events)
    assert kinds["X"] == result.steps.num_rows
    assert kinds["s"] == kinds["f"] == 20  # one arrow a KV transfer
    assert kinds["b"] == kinds["e"] == 7 * 20  # seven stages a request, the API server first
    for event in events:
        if event["ph"] == "M":
            continue
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
    steps = [event for event in events if event["ph"] == "X"]
    last: dict[tuple[int, int], float] = {}
    for step in sorted(steps, key=lambda e: e["ts"]):
        track = (step["pid"], step["tid"])
        assert step["ts"] >= last.get(track, 0.0) - 2e-3  # steps of a worker do not overlap
        last[track] = step["ts"] + step["dur"]


def test_stages_of_a_request_join(result, tmp_path):
    path = tmp_path / "timeline.json"
    write_timeline(path, result.requests, result.steps)
    events = json.loads(path.read_text())["traceEvents"]
    mine = [e for e in events if e.get("cat") == "request" and e["id"] == 3]
    ends = [e["ts"] for e in mine if e["ph"] == "e"]
    begins = [e["ts"] for e in mine if e["ph"] == "b"]
    assert begins[1:] == ends[:-1]


def test_a_dense_model_has_no_experts_to_count(tmp_path):
    config = {"model": "Qwen3-8B", "topology": "1C", "num_requests": 3, "output_len": 8}
    dense = simulate(make_config(config))
    write_timeline(tmp_path / "timeline.json", dense.requests, dense.steps)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    counters = [event["args"] for event in events if event["ph"] == "C"]
    assert len(counters) == dense.steps.num_rows
    assert {name for args in counters for name in args} == {"batch"}
