"""Clusters of prefill workers alone: a request ends with its prompt."""

from __future__ import annotations

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.simulator.config import make_config
from eldr_sim.simulator.run import simulate

SMALL = {
    "workload": "task",
    "request_rate": 60.0,
    "num_requests": 80,
    "trace": "reference-moe",
    "prefill_policy": "round_robin",
}


def run(**fields):
    return simulate(make_config(SMALL | fields))


@pytest.fixture(scope="module")
def result():
    return run(topology="2P")


def test_prompts_end_when_a_disaggregated_cluster_hands_them_over(result):
    """Prefill workers do the same whatever comes behind them, while their KV blocks last."""
    handed = run(topology="2P2D", output_len=1).record.requests
    requests = result.record.requests
    np.testing.assert_array_equal(requests["prefill_end_s"], handed["prefill_end_s"])
    assert (requests["finish_s"] == requests["prefill_end_s"]).all()
    assert (requests["first_token_s"] == requests["prefill_end_s"]).all()
    assert (requests["decode_worker"] == -1).all()


def test_every_request_ends_once_and_every_prompt_token_is_computed_once(result):
    summary, record = result.summary, result.record
    assert summary["completed"] == 80
    assert summary["total_output_tokens"] == 80
    assert record.prefill_steps["chunk_tokens"].sum() == record.requests["prompt_len"].sum()
    makespan = record.requests["finish_s"].max() - record.requests["arrival_s"][0]
    assert summary["makespan_s"] == pytest.approx(makespan)
    tokens = record.requests["prompt_len"].sum()
    assert summary["prefill_throughput"] == pytest.approx(tokens / summary["duration"])
    assert summary["policy"] is None
    assert result.requests.num_rows == 80
    assert set(result.steps["role"].to_pylist()) == {"prefill"}


def test_cached_tokens_count_as_prefilled_and_not_as_computed():
    summary = run(topology="1P", prompts="shared", num_requests=1500).summary
    hits = summary["prefix_cache_hits"]
    assert hits > 0
    assert summary["prefill_throughput"] * summary["duration"] == pytest.approx(
        summary["computed_prompt_throughput"] * summary["duration"] + hits
    )


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"output_len": 5}, "output_len"), ({"decode": {"gpu": "H200"}}, "decode")],
)
def test_what_says_nothing_of_prompts_is_refused(fields, field):
    with pytest.raises(InputError) as caught:
        run(topology="2P", **fields)
    assert caught.value.field == field
