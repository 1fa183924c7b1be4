"""Parts of request logs: against logs that are cut by hand."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.simulator.outcome.metrics import warnings_of
from eldr_sim.simulator.run import offered_load, simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.traces.requests.logs.log_window import choose_part, part_in_words
from eldr_sim.traces.requests.logs.request_logs import read_request_log

from ..on_each import on_each


def write_log(path, times, prompts=None, outputs=None):
    prompts = np.full(len(times), 100) if prompts is None else prompts
    outputs = np.full(len(times), 5) if outputs is None else outputs
    rows = [f"{t:.6f},{p},{o}" for t, p, o in zip(times, prompts, outputs, strict=True)]
    path.write_text("\n".join(["start,in,out", *rows]) + "\n")
    return path


@pytest.fixture
def gateway(tmp_path):
    """A log of two rates: 40/s for 10 s, then 20/s for 20 s, three times over."""
    times, at = [], 0.0
    while at < 90.0:
        times.append(at)
        at += 1 / 40 if at % 30 < 10 else 1 / 20
    return write_log(tmp_path / "gateway.csv", times)


def configured(log, **fields):
    return make_config(
        {
            "workload": str(log),
            "columns": "time_s=start,input=in,output=out",
            "topology": "2C",
            "trace": "reference-moe",
            **fields,
        }
    )


def offered(log, **fields):
    config = configured(log, **fields)
    return offered_load(config, prepare(config).trace)


@given(
    st.lists(st.integers(0, 2000), min_size=2, max_size=60),
    st.integers(0, 3000),
    st.integers(1, 6000),
    st.integers(0, 2000),
    st.sampled_from([None, 0.5, 3.0]),
)
def test_a_part_is_what_a_log_that_is_cut_by_hand_holds(
    tmp_path_factory, gaps, since, length, warm, rate
):
    """Requests come at hundredths of a second, and parts begin and end between them."""
    times = np.cumsum(gaps) / 100 - gaps[0] / 100
    log = read_request_log(
        write_log(tmp_path_factory.mktemp("log") / "log.csv", times),
        "time_s=start,input=in,output=out",
    )
    since, until, warm = since / 100 + 0.005, (since + length) / 100 + 0.005, warm / 100
    inside = (times >= since) & (times < until)
    if since > times[-1] or not inside.any():
        with pytest.raises(InputError, match=r"log_(from|to): "):
            choose_part(log, since=since, until=until, warmup_s=warm, rate=rate)
        return
    if rate is not None and inside.sum() == 1 and until > times[-1]:
        return  # a single request at the end has no rate
    part = choose_part(log, since=since, until=until, warmup_s=warm, rate=rate)
    replayed, (start, stop) = part.cut(log).arrival_s, part.window
    assert ((replayed >= start) & (replayed < stop)).sum() == inside.sum()
    assert start <= warm + 1e-9
    first = int(np.searchsorted(times, part.replayed[0]))
    assert part.replayed[0] == pytest.approx(max(0.0, since - warm / part.stretch))
    expected = (times[first:] - part.replayed[0]) * part.stretch
    assert replayed == pytest.approx(expected[: len(replayed)], abs=2e-9)
    assert len(replayed) == (times[first:] < until + (until - since)).sum() or until > times[-1]
    if rate is not None and until < times[-1]:
        assert inside.sum() / (stop - start) == pytest.approx(rate)


def test_sessions_of_a_part_go_on_with_requests_of_the_part(tmp_path):
    """Each follows the request that it followed in the log; one that lies before the part, none."""
    rows = [
        {"timestamp": 1000 * at, "request_id": str(at), "input_length": 20, "output_length": 3,
         "hash_ids": [1], "wait_for": [str(at - step) for step in (3, 5) if at >= step]}
        for at in range(20)
    ]  # fmt: skip
    path = tmp_path / "agents.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    log = read_request_log(path)
    part = choose_part(log, since=6.5, until=11.5)
    cut, first = part.cut(log), part.first(log)
    n = len(cut.arrival_s)
    assert (first, n) == (7, 10)
    before = log.parent[first : first + n] - first
    assert (before < -1).any()
    assert (before >= 0).any()
    assert cut.parent.tolist() == np.maximum(before, -1).tolist()
    assert (cut.parent < np.arange(n)).all()
    inside = {(a - first, b - first) for a, b in log.joins.tolist() if first <= b < a < first + n}
    assert set(map(tuple, cut.joins.tolist())) == inside
    assert 0 < len(inside) < len(log.joins)


def test_the_busiest_part_has_the_most_requests(gateway):
    """By brute force over all begins."""
    log = read_request_log(gateway, "time_s=start,input=in,output=out")
    part = choose_part(log, busiest=7.0)
    most = max(
        int(((log.arrival_s >= at) & (log.arrival_s < at + 7.0)).sum()) for at in log.arrival_s
    )
    since, until = part.measured
    assert int(((log.arrival_s >= since) & (log.arrival_s < until)).sum()) == most
    assert until - since == pytest.approx(7.0)


def test_without_a_choice_the_whole_log_is_measured(gateway):
    log = read_request_log(gateway, "time_s=start,input=in,output=out")
    result = simulate(configured(gateway))
    summary = result.summary
    assert summary["completed"] == summary["num_prompts"] == len(log.arrival_s)
    assert result.record.requests["arrival_s"].tolist() == log.arrival_s.tolist()
    assert summary["duration"] == pytest.approx(result.record.requests["finish_s"].max())
    part = summary["trace"]["log_window"]
    assert part["rate"] == part["log_rate"] == pytest.approx(2400 / 90, rel=0.01)
    assert warnings_of(summary) == []


def test_a_valley_is_called_one(gateway):
    """What a plan of old judged without a word: 20 of the log's 90 seconds, at 20/s."""
    for fields in ({"duration": "15s", "warmup": 12}, {"log_from": "12s", "log_to": 27}):
        workload, _ = offered(gateway, **fields)
        part = workload.description["log_window"]
        words = part_in_words(part)
        assert words.startswith(f"{part['measured']:,} of {part['requests']:,} requests, 12-27 s")
        assert "of 90 s, 20.0/s there, 26.7/s on the log" in words
        (warning,) = warnings_of(simulate(configured(gateway, **fields)).summary)
        assert "20.0 requests/s, the log 26.7" in warning
    peak = simulate(configured(gateway, busiest="5s")).summary
    assert peak["trace"]["log_window"]["rate"] == pytest.approx(40, rel=0.02)
    assert warnings_of(peak) == []  # who asks for the peak knows


def test_a_part_late_in_the_log_replays_nothing_long_before_it(gateway):
    """Twelve hours before noon are not simulated: only the warm-up is."""
    workload, window = offered(gateway, log_from=60, log_to=65, warmup=4)
    log = read_request_log(gateway, "time_s=start,input=in,output=out")
    assert window == pytest.approx((4.0, 9.0))
    kept = log.arrival_s[(log.arrival_s >= 56) & (log.arrival_s < 70)]
    assert workload.arrival_s == pytest.approx(kept - 56.0)


def test_a_stretched_part_has_the_rate_and_the_warm_up_asked_for(gateway):
    workload, (start, stop) = offered(gateway, log_from=40, log_to=50, request_rate=80, warmup=2)
    times = workload.arrival_s
    assert start == pytest.approx(2.0)  # seconds of the run, eight of the log
    n = int(((times >= start) & (times < stop)).sum())
    assert n == pytest.approx(200, abs=1)
    assert stop - start == pytest.approx(n / 80)
    at_once, window = offered(gateway, log_from=40, log_to=50, request_rate="inf")
    assert set(at_once.arrival_s) == {0.0}
    assert len(at_once) == pytest.approx(200, abs=1)
    assert window == (0.0, np.inf)


@on_each(
    "fields, message",
    [
        ({"log_from": "1h"}, "log_from: 3600 s, but gateway.csv ends at 89"),
        ({"log_from": 50, "log_to": 40}, "log_to: 40 s is not after 50 s"),
        ({"busiest": "1d"}, "busiest: 86400 s of the 89"),
        ({"busiest": 9, "log_to": 40}, "busiest: given together with log_to"),
        ({"log_to": 40, "duration": 9}, "duration: given together with log_to"),
        ({"log_to": 40, "num_requests": 9}, "num_requests: given together with log_to"),
        (
            {"busiest": 9, "arrivals": "poisson", "request_rate": 9},
            "given together with arrivals that are drawn",
        ),
        ({"busiest": 9, "workload": "task", "columns": None}, "workload task is not a log"),
        ({"busiest": "soon"}, r"busiest: 'soon' \(allowed: seconds, or a time such as 90s"),
        ({"duration": 1e308}, "duration: 1e\\+308"),
    ],
)
def test_a_part_that_there_is_not_is_one_line(gateway, fields, message):
    with pytest.raises(InputError, match=message):
        offered(gateway, **fields)


@given(st.integers(3, 9), st.sampled_from([None, 2, 99]), st.sampled_from([0.5, 3.0]))
def test_n_requests_have_one_gap_fewer_unless_others_follow(tmp_path_factory, n, until, rate):
    """Requests one second apart have a rate of 1/s, however few they are."""
    path = tmp_path_factory.mktemp("even") / "log.csv"
    log = read_request_log(write_log(path, range(n)), "time_s=start,input=in,output=out")
    part = choose_part(log, until=until, rate=rate)
    assert part.stretch == pytest.approx(1.0 / rate)
