"""Prefill workers that gather experts before decode workers of another kind."""

import numpy as np
import pytest

from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config

BASE = {
    "topology": "8P8D",
    "trace": "reference-moe",
    "request_rate": 200.0,
    "num_requests": 150,
    "output_len": 12,
    "prefill_policy": "saturation",
    "prefill": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "expert_gather": "one_sided",
    "goodput": {"ttft": 400.0},
}
METRO = {
    "decode": {"data_parallel_size": 2, "enable_expert_parallel": True,
               "num_redundant_experts": 16, "expert_placement": "eplb"},
    "replica_choice": "metro",
    "policy": "jsq",
}  # fmt: skip


def run(**fields):
    return simulate(make_config(BASE | fields))


@pytest.fixture(scope="module")
def alone():
    return run(topology="8P", output_len=None).record.requests


@pytest.mark.parametrize(
    "decode",
    [
        {"policy": "jsq"},
        METRO | {"policy": "jsq"},
        METRO | {"policy": "eldr:capture_overhead_ms=0"},
    ],
    ids=["jsq", "metro", "eldr-metro"],
)
def test_prompts_are_computed_as_by_prefill_workers_alone(alone, decode):
    """Whatever decodes behind them, and every token comes out."""
    result = run(**decode)
    requests, summary = result.record.requests, result.summary
    assert summary["completed"] == 150
    np.testing.assert_array_equal(requests["prefill_end_s"], alone["prefill_end_s"])
    assert (requests["decode_start_s"] > requests["prefill_end_s"]).all()
    ttft = requests["first_token_s"] - requests["arrival_s"]
    assert summary["slo_attainment"] == pytest.approx((ttft <= 0.4).mean())
    assert 0 < summary["weight_streaming"]["wait_share"] < 1
    steps = result.record.decode_steps
    assert steps["outputs"].sum() == 150 * 12
    if "replica_choice" in decode:
        assert len(result.record.decode_group_steps)


def test_metro_keeps_the_busiest_gpu_of_the_decode_pool_at_fewer_experts():
    hashed, metro = (
        run(**METRO | {"replica_choice": choice}).record.decode_steps["busiest"].sum()
        for choice in ("hash", "metro:overhead_us=0")
    )
    assert metro < hashed
