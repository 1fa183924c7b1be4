"""What commands say of their progress where standard error is no terminal."""

import re
import time

import pytest

from eldr_sim.cli import console
from eldr_sim.phases import report_phase

from ..waiting import wait_until


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets, s."""
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(console, "_LINE_EVERY_S", 3600.0)  # of the thread, which has a true clock
    return now


def test_a_search_says_a_line_now_and_then_with_the_time_left(clock, capsys):
    with console.run_counter("planning") as count:
        for run in range(1, 101):
            clock[0] = 20.0 + run  # the processes take 20 s to start, then a run a second
            count(run, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "planning: 1 of about 100 runs, 21 s so far"
    assert lines[1] == "planning: 11 of about 100 runs, 31 s so far, about 89 s left"
    assert len(lines) == 10


def test_waiting_before_the_first_share_does_not_count(clock, capsys):
    """A search that prepares for minutes, then does 2% a second: what is left is known to a
    third."""
    lines = console._Lines("plan")
    lines._over.set()
    lines.say("drawing", None)
    for second in range(190, 240):
        clock[0] = float(second)
        lines.say("drawing", 0.02 * (second - 190))
        told = re.search(r"about (.*) s left", lines._so_far())
        if second >= 193:
            assert float(told[1]) == pytest.approx(240 - second, rel=0.34)
        else:
            assert told is None


def test_a_long_rest_is_said_in_minutes(clock, capsys):
    with console.run_counter("planning") as count:
        for run in range(1, 30):
            clock[0] = 60.0 * run
            count(run, 40)
    lines = capsys.readouterr().err.splitlines()
    assert lines[4] == "planning: 5 of about 40 runs, 300 s so far, about 35 min left"
    assert "left" not in lines[1]


def test_a_short_task_says_nothing(clock, capsys):
    with console.progress_bar("what-if") as update:
        for share in (0.25, 0.5, 1.0):
            clock[0] += 2.0
            update(share)
    assert capsys.readouterr().err == ""
    with console.progress_bar("what-if") as update:
        update(0.5)
        clock[0] += 15.0
        update(0.75)
    assert capsys.readouterr().err == "what-if: 75% done, 15 s so far, about 15 s left\n"


def test_what_is_prepared_says_its_share_and_the_time_left(clock, capsys):
    """Once when it begins, and every ten seconds with its share: from its own start."""
    lines = console._Lines("run")
    lines._over.set()  # no thread: the test looks itself
    lines.say("drawing", None)
    clock[0] = 5.0
    lines.say("compiling", 0.0)
    clock[0] = 15.0
    for share in (0.1, 0.25):
        lines.say("compiling", share)
    assert capsys.readouterr().err.splitlines() == ["run: drawing", "run: compiling"]
    assert lines._so_far() == "compiling: 25% done, 15 s so far, about 30 s left"


def test_nothing_is_said_after_the_end(monkeypatch, capsys):
    monkeypatch.setattr(console, "_LINE_EVERY_S", 1e-4)
    for _ in range(50):
        with console.progress_bar("run"):
            report_phase("drawing")
            wait_until(lambda: "so far" in capsys.readouterr().err)
        capsys.readouterr()
        time.sleep(1e-3)
        assert capsys.readouterr().err == ""


@pytest.mark.long
def test_drawing_routing_tells_its_share_once_for_each_split(monkeypatch, tmp_path):
    from eldr_sim.phases import phases_shown_by
    from eldr_sim.traces.routing.synthetic import drawn

    monkeypatch.setenv("ELDR_SIM_CACHE", str(tmp_path))
    told = []
    monkeypatch.setattr(drawn, "SERVING", 40)
    monkeypatch.setattr(drawn, "CALIBRATION", 8)
    with phases_shown_by(lambda what, share: told.append((what, share))):
        trace = drawn.drawn_trace("Qwen3-30B-A3B", drawn.Shape(2, 128, 8), (("code", 1.0),))
        assert trace.for_calibration.is_calibration.all()
    whats = list(dict.fromkeys(what for what, _ in told))
    assert [what.split()[2] for what in whats] == ["serving", "calibration"]
    for each in whats:
        shares = [share for what, share in told if what == each]
        assert shares[0] is None
        assert shares[1:] == sorted(shares[1:])
        assert shares[-1] == 1.0
    assert trace.bits.size
    assert trace.for_calibration.bits.size
    assert not list((tmp_path / "bitsets").glob("*.bits"))  # the ids are smaller


def test_compiling_tells_its_share_until_the_loop_is_compiled(monkeypatch):
    from types import SimpleNamespace

    from numba.core import event

    from eldr_sim import compiling
    from eldr_sim.phases import phases_shown_by

    def compiled(name):
        data = {"dispatcher": SimpleNamespace(py_func=SimpleNamespace(__name__=name))}
        event.start_event("numba:compile", data)
        event.end_event("numba:compile", data)

    monkeypatch.setattr(compiling, "is_cold", lambda: True)
    told = []
    with phases_shown_by(lambda what, share: told.append(share)):
        compiling.tell_of_compiling()
        for i in range(400):
            compiled(f"f{i}")
        compiled("advance")
        compiled("one of another run")
    assert told[0] is None
    assert told[1:] == sorted(told[1:])
    assert 0.25 < told[100] < 0.5
    assert told[-2:] == [0.99, 1.0]
    assert len(told) == 402


@pytest.mark.long
def test_a_listing_and_an_inspection_tell_their_share():
    from eldr_sim.kernel_profiles.models import load_model
    from eldr_sim.kernel_profiles.support import support
    from eldr_sim.traces.routing.format import open_trace
    from eldr_sim.validation.trace_report import inspect_trace

    shares = []
    assert len(list(support(load_model("Qwen3-30B-A3B"), ["H100", "H200"], shares.append))) > 1
    inspect_trace(open_trace("reference-moe"), shares.append)
    assert shares.count(1.0) == 2
    assert all(0.0 < share <= 1.0 for share in shares)
