"""Clusters of prefill workers alone: a request ends with its prompt."""

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config

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


def test_tables_of_several_runs_show_the_figures_of_prompts(result):
    from eldr_sim.planning.compare.policies import compare
    from eldr_sim.planning.compare.what_if import what_if

    config = make_config(SMALL | {"topology": "2P", "num_requests": 20})
    found = what_if(config, ["prefill_policy=least_loaded"], n_seeds=1, jobs=1)
    assert "Prefill MFU" in repr(found)
    assert {e.metric for e in found.changes[0].effects} >= {"prefill_throughput", "makespan_s"}
    assert "Makespan" in repr(result)
    with pytest.raises(InputError, match="topology: 2P has no workers"):
        compare(config, ["jsq"], 1)
