"""Timing on a GPU, by a made-up device: kernels behind each other, launches ahead of them."""

from types import SimpleNamespace

import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.profile import timing
from eldr_sim.kernel_profiles.profile.measurement_plan import Outcome
from eldr_sim.kernel_profiles.profile.session import Journal, measure

LAUNCH_S, KERNEL_S = 5e-6, 15e-6


class Device:
    """A stream: a graph begins a launch after it was sent, or when the one before has ended."""

    def __init__(self):
        self.host = self.stream = 0.0

    def replay(self, calls):
        self.host += 2e-6
        self.stream = max(self.stream, self.host + LAUNCH_S) + calls * KERNEL_S

    def event(self, enable_timing):
        made = SimpleNamespace(at=0.0)
        made.record = lambda: setattr(made, "at", max(self.stream, self.host))
        made.synchronize = lambda: setattr(self, "host", max(self.stream, self.host))
        made.elapsed_time = lambda end: 1e3 * (end.at - made.at)
        return made


@pytest.mark.parametrize("calls", [1, 2, 20])
def test_launching_a_graph_does_not_count(monkeypatch, calls):
    """Two calls between two events were 2 to 4 us too long each."""
    device = Device()
    cuda = SimpleNamespace(Event=device.event, synchronize=lambda: None)
    monkeypatch.setattr(timing, "require_torch", lambda: SimpleNamespace(cuda=cuda))
    graph = staticmethod(lambda _torch, made: lambda: device.replay(len(made)))
    monkeypatch.setattr(timing.CudaTimer, "_graph", graph)
    found = timing.CudaTimer().time([[lambda: None] * calls], "graph")
    assert found.median_s == pytest.approx(KERNEL_S, rel=0.04)
    assert found.median_s >= KERNEL_S


def session(tmp_path, reference, n=5):
    """Measure tasks that take 20 s each, by a clock that is made up."""
    now = [0.0]
    device = SimpleNamespace(
        is_cpu=True, warm_up=lambda: None, state=lambda: {"clocks.sm": "1980 MHz"}
    )

    def run(_workbench):
        now[0] += 20.0
        return Outcome()

    tasks = [SimpleNamespace(key=f"t{i}", group="g", run=run) for i in range(n)]
    journal = Journal.create(tmp_path / "journal.jsonl", {})
    arguments = tasks, device, journal, 1e9, lambda *_: None, lambda: now[0]
    return journal, lambda: measure(*arguments, reference=reference)


def test_each_point_has_the_state_of_the_device_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr("eldr_sim.kernel_profiles.profile.session.Workbench", workbench)
    journal, go = session(tmp_path, lambda: 1e-3)
    go()
    assert len(journal.outcomes) == 5
    assert {o.note["state"]["clocks.sm"] for o in journal.outcomes.values()} == {"1980 MHz"}


def test_a_run_that_drifts_is_refused_and_what_came_after_the_last_check_is_not_kept(
    tmp_path, monkeypatch
):
    """The reference is measured at first and after each two tasks; the third is 7% slower."""
    monkeypatch.setattr("eldr_sim.kernel_profiles.profile.session.Workbench", workbench)
    times = iter([1.0e-3, 1.01e-3, 1.07e-3])
    journal, go = session(tmp_path, lambda: next(times))
    with pytest.raises(InputError, match=r"1.07 times as long as at first"):
        go()
    assert sorted(journal.outcomes) == ["t0", "t1"]


def workbench(device, tuned):
    return SimpleNamespace(clear=lambda: None)
