"""Every number of a run: a huge one is refused in a line, or all figures stay finite."""

import json
import warnings

import pytest

from eldr_sim.errors import InputError
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config import pools
from eldr_sim.simulator.setup.config.groups import GROUPS
from eldr_sim.simulator.setup.config.run_config import make_config

from ..on_each import on_each

BASE = {
    "topology": "1P1D", "trace": "reference-moe", "output_len": 4, "request_rate": 20,
    "policy": "jsq", "num_requests": 10,
}  # fmt: skip
#: Fields that only engines or options other than the base's take.
BESIDE = {
    "schedule_conservativeness": {"engine": "sglang"},
    "scheduler_recv_interval": {"engine": "sglang"},
    "attention_dp_timeout_iters": {"engine": "trtllm"},
    "batch_wait_timeout_iters": {"engine": "trtllm"},
    "recorded_ttft_ms": {"arrivals": "closed", "workload": "chat"},
}
NUMBERS = sorted({name for group in GROUPS.values() for name in pools._numeric(group)})


@on_each("value", [1e308, 10**15, 10**40])
@on_each("name", NUMBERS)
def test_a_huge_number_is_refused_or_its_figures_are_finite(name, value):
    values = BASE | BESIDE.get(name, {}) | {name: value}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            said = json.dumps(simulate(make_config(values)).summary, allow_nan=False)
        except InputError as error:
            said = str(error)
    assert "\n" not in said
    assert "function-" not in said


def test_the_name_of_a_field_is_not_that_of_a_branch():
    for value in (1e30, -1.0, "soon"):
        with pytest.raises(InputError, match=r"^switch_time: "):
            make_config({"switch_time": value})
