"""Loads under which published runs differ from simulated ones are named."""

import pytest

from eldr_sim.simulator.run import simulate_summary
from eldr_sim.simulator.setup.config.run_config import make_config

DENSE = {
    "model": "Llama-3.1-8B", "gpu": "H100", "topology": "1C", "request_rate": "inf",
    "num_requests": 40, "input_len": 64, "output_len": 8,
}  # fmt: skip


def said(word, **fields):
    """Return whether a warning of a run holds a word."""
    return any(word in w for w in simulate_summary(make_config(DENSE | fields))["latency_warnings"])


@pytest.mark.parametrize(
    ("fields", "waves"),
    [
        ({"max_concurrency": 8}, True),
        ({"max_concurrency": 8, "random_range_ratio": 0.5}, False),
        ({"max_concurrency": 1}, False),  # none waits for another
        ({"max_concurrency": 40}, False),  # all are sent at once
        ({"request_rate": 20.0}, False),  # arrivals differ
    ],
)
def test_requests_that_are_all_alike_run_in_waves(fields, waves):
    assert said("run in waves", **fields) == waves


@pytest.mark.parametrize(("together", "many"), [(256, False), (300, True)])
def test_more_requests_in_flight_than_were_compared_are_named(together, many):
    assert said("requests in flight on a worker", max_concurrency=together, num_requests=400,
                output_len=2) == many  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "idle"),
    [
        ({"output_len": 1, "goodput": "tpot:30"}, True),
        ({"output_len": 1, "goodput": "ttft:300"}, False),
        ({"output_len": 2, "goodput": "tpot:30"}, False),
    ],
)
def test_a_bound_on_tpot_of_answers_of_one_token_is_named(fields, idle):
    assert said("has no TPOT", **fields) == idle


@pytest.mark.parametrize(
    ("engine", "old"),
    [
        ("vllm==0.7.4", True), ("vllm==0.9", False), ("vllm", False), ("sglang==0.4.3", True),
        ("sglang==0.4.6", False), ("trtllm==0.17", True), ("trtllm==1.2", False),
    ],
)  # fmt: skip
def test_an_engine_older_than_all_compared_runs_is_named(engine, old):
    assert said("older than all runs", engine=engine) == old
