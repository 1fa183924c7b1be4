"""What workers take and how often they turn round, from records written by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from eldr_sim.simulator.control.record import DRAINING, OFF, READY, STARTING, STATE
from eldr_sim.simulator.outcome.scaling_metrics import _events, scaling_figures
from eldr_sim.simulator.outcome.worker_hours import worker_seconds
from eldr_sim.simulator.setup.config.groups import ServiceLevel


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


@pytest.mark.parametrize("level", [ServiceLevel(ttft=1000), ServiceLevel()])
def test_minutes_below_95_are_below_it_and_need_an_slo(level):
    """Of 20 requests a minute, 20, 19 and 18 are good: one of three minutes is below 95%."""
    n, late = 60, (27, 47, 53)
    fields = ("arrival_s", "sent_s", "first_token_s", "finish_s")
    kinds = [("measured", bool), ("output_len", int), *((name, float) for name in fields)]
    requests = np.zeros(n, kinds)
    requests["measured"], requests["output_len"] = True, 2
    requests["arrival_s"] = requests["sent_s"] = 3.0 * np.arange(n)
    requests["first_token_s"] = requests["arrival_s"] + np.where(
        np.isin(np.arange(n), late), 9, 0.5
    )
    requests["finish_s"] = requests["first_token_s"]
    log = SimpleNamespace(
        requests=requests, window=(0.0, 180.0), end_s=180.0, completed=np.ones(n, bool),
        states=np.empty(0, STATE),
    )  # fmt: skip
    pool = SimpleNamespace(
        name="workers", units=(1, 1), engine=SimpleNamespace(start_up_s=1.0),
        price_per_gpu_hour=None,
    )  # fmt: skip
    spec = SimpleNamespace(pools=[pool], names=["workers"])
    found = scaling_figures(log, "static", level, [pool], spec)["scaling"]
    if level.given:
        assert [minute["attainment"] for minute in found["by_minute"]] == [1.0, 0.95, 0.9]
    else:
        assert {minute["attainment"] for minute in found["by_minute"]} == {None}
    assert found["minutes_below_95"] == (1 if level.given else None)
