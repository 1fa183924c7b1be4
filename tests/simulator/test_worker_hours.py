"""What workers take and how often they turn round, from records written by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from eldr_sim.simulator.control.record import DRAINING, OFF, READY, STARTING, STATE
from eldr_sim.simulator.outcome.scaling_metrics import _events
from eldr_sim.simulator.outcome.worker_hours import worker_seconds


def record(*states):
    return SimpleNamespace(states=np.array(list(states), STATE))


def test_hours_count_within_the_window_only():
    """Two workers over 10 s: one goes before the window and comes back in it, one starts late."""
    log = record((2.0, 0, 0, OFF), (13.0, 0, 0, STARTING), (15.0, 0, 0, READY),
                 (18.0, 0, 1, DRAINING), (25.0, 0, 1, OFF))  # fmt: skip
    spent = worker_seconds(log, [2], 10.0, 20.0)[0]
    assert spent[OFF] == pytest.approx(3.0)
    assert spent[STARTING] == pytest.approx(2.0)
    assert spent[READY] == pytest.approx(5.0 + 8.0)
    assert spent[DRAINING] == pytest.approx(2.0)
    assert spent.sum() == pytest.approx(20.0)
    assert worker_seconds(log, [2], 0.0, 2.0)[0, READY] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("start_up_s", "stopped_s", "reversed_"),
    [(100.0, 190.0, 1), (100.0, 200.0, 1), (100.0, 201.0, 0), (1.0, 60.0, 1), (1.0, 61.0, 0)],
)
def test_a_reversal_is_a_stop_within_twice_the_start_up_or_a_minute(
    start_up_s, stopped_s, reversed_
):
    log = record((0.0, 0, 1, STARTING), (start_up_s, 0, 1, READY), (stopped_s, 0, 0, DRAINING))
    spec = SimpleNamespace(pools=[SimpleNamespace(engine=SimpleNamespace(start_up_s=start_up_s))])
    assert _events(log, spec) == {"starts": 1, "stops": 1, "switches": 0, "reversals": reversed_}


def test_a_stop_turns_one_start_round_and_only_of_its_pool():
    log = record((0.0, 0, 1, STARTING), (10.0, 1, 0, DRAINING), (20.0, 0, 0, DRAINING),
                 (30.0, 0, 1, DRAINING))  # fmt: skip
    spec = SimpleNamespace(pools=[SimpleNamespace(engine=SimpleNamespace(start_up_s=1.0))] * 2)
    assert _events(log, spec) == {"starts": 1, "stops": 3, "switches": 0, "reversals": 1}
