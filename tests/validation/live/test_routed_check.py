"""An engine that dies or freezes behind the router: what the check sees, and what it simulates."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eldr_sim.validation.live.engines.load import Load, LoadRequest
from eldr_sim.validation.live.engines.servers import free_port
from eldr_sim.validation.live.engines.setups import Endpoint, Setup
from eldr_sim.validation.live.features import routed as routed_check
from eldr_sim.validation.live.features.feature_setups import replay
from eldr_sim.validation.live.features.routed import Moments, serve_routed

from ...serving.router_scene import accepts
from ...waiting import wait_until
from .test_features import sent_of
from .test_live_client import info

ENGINE = Path(__file__).parents[2] / "serving" / "fake_engine.py"


class Process:
    """An engine that can be killed, frozen and started again at its address."""

    def __init__(self):
        self.port = free_port()
        self.url, self.events, self.starts = f"http://127.0.0.1:{self.port}", "", 0

    def start(self):
        self.starts += 1
        self.child = subprocess.Popen([sys.executable, str(ENGINE), str(self.port), ".02", ".02"])

    def wait(self):
        wait_until(lambda: accepts(self.port))

    def send_signal(self, what):
        self.child.send_signal(what)

    def stop(self):
        self.child.kill()
        self.child.wait()


@pytest.fixture
def setup(tmp_path):
    engines = [Process(), Process()]
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.wait()
    points = [Endpoint(f"engine{i}", "colocated", e.url, tmp_path) for i, e in enumerate(engines)]
    yield Setup("2C", tuple(points), tmp_path, None, engines)
    for engine in engines:
        engine.stop()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["death", "freeze"])
def test_requests_of_an_engine_that_is_struck(setup, live_calibration, monkeypatch, kind):
    """Streams break off with an engine that dies, and go on with one that was only frozen."""
    monkeypatch.setattr(routed_check, "_FREEZE_S", 1.5)
    monkeypatch.setattr(routed_check, "_LIMIT_S", 60.0)
    monkeypatch.setattr(routed_check, "_simulated", lambda _sent, _fields, moments, *_: moments)
    monkeypatch.setitem(routed_check._ROUTER, "health_interval_s", 0.1)
    monkeypatch.setitem(
        routed_check._ROUTER, "health_timeout_s", 0.5
    )  # a busy machine answers late
    # The first one is still on the engine when that dies, whenever that is.
    output_len = [600 if kind == "death" else 20, *[20] * 49]
    load = Load(
        info(), tuple(LoadRequest(f"r{i}", "a", [1], n, i / 20) for i, n in enumerate(output_len))
    )
    outcome, moments = serve_routed(
        load, setup, live_calibration, {"policy": "round_robin"}, kind, Path(), {}
    )
    assert moments.struck_s < moments.known_s < moments.back_s
    if kind == "death":
        assert setup.engines[0].starts == 2
        assert 1 <= outcome.counted["requests lost"] <= 25  # some 4 were on their way there
    else:
        assert moments.back_s - moments.struck_s >= 1.5
        assert outcome.counted["requests lost"] == 0
        assert outcome.counted["slowest TTFT, s"] > 0.2


def test_a_stream_is_lost_and_a_request_without_a_token_goes_on(
    make_live_run, calibrated, tmp_path, monkeypatch
):
    """Two requests, one on each engine; the first engine dies before, or after, its first token."""
    run, _ = make_live_run("colocated", seed=4)
    own = [[i] * n for i, n in enumerate(run.requests["prompt_len"].to_pylist())]
    sent = sent_of(run, own)
    place = run.requests.column_names.index("sent_s")
    table = run.requests.slice(1, 2).set_column(place, "sent_s", [np.array([5.0, 5.001])])
    sent = replace(
        sent, load=Load(sent.load.info, sent.load.requests[1:3]), requests=table, contexts=own[1:3]
    )
    about = {"engine": run.info.engines[0], "max_model_len": run.info.max_model_len, **calibrated}
    trace = run.trace.path if hasattr(run.trace, "path") else tmp_path / "trace"
    again = replay(sent, {"topology": "2C"}, trace=trace, **about)
    assert again.record.requests["decode_worker"].tolist() == [0, 1]
    ttft, e2el = again.times["ttft"][0], again.times["e2el"][0]
    assert 0.0 < ttft < e2el
    for at, lost, resent in ((ttft / 2, 0, 1), ((ttft + e2el) / 2, 1, 0)):
        moments = Moments(5.0 + at, 5.0 + at, 5.0 + at + 1.0)
        found = routed_check._simulated(sent, {}, moments, "death", trace, about).counted
        assert (found["requests lost"], found["sent again"]) == (lost, resent)
    monkeypatch.setattr(routed_check, "_FREEZE_S", 3.0)
    hung = Moments(5.0 + ttft / 2, 5.0 + ttft / 2 + 1.0, 5.0 + ttft / 2 + 4.0)
    found = routed_check._simulated(sent, {}, hung, "freeze", trace, about).counted
    assert (found["requests lost"], found["sent again"]) == (0, 0)
    assert found["slowest TTFT, s"] == pytest.approx(ttft + 3.0, rel=0.01)
    before = Moments(5.0 + 1e-5, 5.5, 8.0)  # it freezes while the request is on its way
    found = routed_check._simulated(sent, {}, before, "freeze", trace, about).counted
    assert (found["requests lost"], found["sent again"]) == (0, 1)
    assert 0.5 < found["slowest TTFT, s"] < 1.0
    peace = routed_check._simulated(sent, {}, None, None, trace, about)
    assert "time to recover, s" not in peace.counted


def test_good_requests_are_whole_and_take_at_most_twice_as_long_as_before():
    ends = np.arange(1.0, 41.0)
    whole = ends != 12.0
    took = np.where((ends > 10) & (ends < 16), 3.0, 1.0)
    moments = Moments(10.0, 10.0, 12.0)
    found = routed_check._recovered(ends, whole, {"e2el": took[whole]}, moments)
    assert found == 6.0  # of those that end from 16 s on, all are good
