"""Lanes that go on from the middle of sessions: what warms caches, the barrier, the window."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.simulator.run import Result, simulate
from eldr_sim.simulator.setup.config.run_config import RunConfig

_BLOCK, _N_TURNS = 16, 12


def _session(start: int) -> dict[str, Any]:
    """Return a session whose prompts grow by a block of its own each turn, 2 s between turns."""
    turns = [
        {"t": 2.0 * i, "in": _BLOCK * (i + 4), "out": 8, "api_time": 1.0}
        | {"hash_ids": list(range(start, start + i + 4))}
        for i in range(_N_TURNS)
    ]
    return {"block_size": _BLOCK, "requests": turns}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "weka.jsonl"
    lines = [json.dumps(_session(100 * i)) for i in range(5)]
    path.write_text("\n".join(lines))
    return path


def _run(log: Path, **more: Any) -> Result:
    values = {"workload": str(log), "arrivals": "agentx", "max_active_sessions": 3, "duration": 60}
    config = values | {"topology": "1C", "policy": "jsq", "block_size": _BLOCK, "seed": 3} | more
    return simulate(RunConfig(**config))


def test_window_opens_when_the_last_lane_is_warm(embedded_routing: None, log: Path) -> None:
    record = _run(log).record
    requests, numbers = record.requests, record.numbers
    warming = ~requests["measured"]
    assert (requests["output_len"][warming] == 1).all()
    # One live prompt a lane, and ten more.
    assert np.bincount(numbers[warming] // 11).tolist() == [11, 11, 11]
    start, end = record.window
    assert start == requests["finish_s"][warming].max()
    assert end == pytest.approx(start + 60)
    lanes = requests[~warming]
    assert lanes["arrival_s"].min() == start  # the first that is left of each lane, at once
    assert (lanes["arrival_s"] == start).sum() == 3
    assert lanes["arrival_s"].max() < end


def test_histories_are_in_the_cache_and_lanes_never_rest(embedded_routing: None, log: Path) -> None:
    result = _run(log)
    record, summary = result.record, result.summary
    assert summary["prefix_cache_hit_rate"] <= summary["ideal_prefix_cache_hit_rate"]
    assert summary["sessions"]["turns_begun"] == len(record.requests) - 33  # those warm caches up
    measured = record.requests[record.requests["measured"]]
    first = measured[measured["arrival_s"] == record.window[0]]
    # All of the prompt that the lane has sent before: all blocks but the one that is new.
    assert (first["cached_tokens"] == first["prompt_len"] - _BLOCK).all()
    # A session of 12 turns lasts 11 s and what the answers take: three lanes need more than five.
    assert len(measured) > 5 * _N_TURNS
    for at in np.linspace(record.window[0], record.window[1], 50)[1:-1]:
        gone = measured["finish_s"] <= at
        assert (measured["arrival_s"][~gone] <= at).sum() <= 3
        assert ((measured["arrival_s"] > at - 1.5) & (measured["arrival_s"] <= at + 1.5)).sum() >= 3


def test_sessions_that_come_again_have_prefixes_of_their_own(
    embedded_routing: None, log: Path
) -> None:
    record = _run(log).record
    begins = record.requests["measured"] & (record.requests["prompt_len"] == 4 * _BLOCK)
    assert begins.sum() > 5
    assert (record.requests["cached_tokens"][begins] == 0).all()


def test_what_is_in_flight_behind_the_grace_is_cancelled(embedded_routing: None, log: Path) -> None:
    log.write_text(log.read_text().replace('"out": 8', '"out": 20000'))
    result = _run(log, duration=5)
    assert result.summary["failed_reasons"] == {"cancelled": 3}
    assert result.record.end_s == pytest.approx(result.record.window[1] + 30.0)


def test_idle_time_passes(embedded_routing: None, log: Path) -> None:
    """All lanes idle for 10 s, or one for 300 s: its timers run out together, not each."""
    slow = json.loads(log.read_text().splitlines()[0])
    for i, turn in enumerate(slow["requests"]):
        turn["t"] = 900.0 * i
    log.write_text("\n".join([json.dumps(slow)] * 2))
    rows = _measured(_run(log, max_active_sessions=1, duration=300))
    gaps = rows["arrival_s"][1:] - rows["finish_s"][:-1]
    assert gaps[gaps > 0] == pytest.approx(10.0)  # the next session begins at once
    assert (gaps > 0).sum() > 20
    # Another lane is busy all the time.
    steady = json.loads(log.read_text().splitlines()[0])
    first = steady["requests"][0]
    steady["requests"] = [first | {"t": 6.0 * i} for i in range(1000)]
    log.write_text("\n".join([json.dumps(slow), json.dumps(steady)]))
    rows = _measured(_run(log, max_active_sessions=2, duration=700))
    mine = rows[rows["prompt_len"] > first["in"]]
    gaps = mine["arrival_s"][1:] - mine["finish_s"][:-1]
    assert len(gaps) >= 2
    assert gaps == pytest.approx(300.0)


def _measured(result: Result) -> Any:
    return result.record.requests[result.record.requests["measured"]]


def test_bad_input_is_one_line(embedded_routing: None, log: Path) -> None:
    for field, more in (
        ("max_active_sessions", {"max_active_sessions": None}),
        ("max_active_sessions", {"max_active_sessions": 6}),
        ("request_rate", {"request_rate": 2.0}),
        ("warmup", {"warmup": 3}),
        ("workload", {"max_model_len": 64}),
    ):
        with pytest.raises(InputError) as error:
            _run(log, **more)
        assert error.value.field == field
