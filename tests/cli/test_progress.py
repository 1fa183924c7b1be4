"""What commands say of their progress where standard error is no terminal."""

import pytest

from eldr_sim.cli import console


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets, s."""
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
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
