"""Whole runs on the embedded trace: what must hold whatever the figures are."""

import math

import numpy as np
import pytest

from eldr_sim.policies.registry import names
from eldr_sim.simulator.run import prepare, simulate
from eldr_sim.simulator.setup.config.run_config import make_config

from ..on_each import on_each
from ..step_times import fixed_s

BASE = {"topology": "2P4D", "duration": 10, "warmup": 3, "output_len": 128, "request_rate": 40}


def run(**values):
    return simulate(make_config(BASE | values))


@on_each("policy", names("decode"))
def test_every_policy_serves_the_same_requests(policy):
    reference = run().requests.to_pandas()
    result = run(policy=policy)
    requests = result.requests.to_pandas()
    measured = requests[requests.measured]
    expected = reference[reference.measured]
    for column in ("request_id", "arrival_s", "domain", "prompt_len", "output_len"):
        assert measured[column].tolist() == expected[column].tolist()
    assert (measured.outcome == "completed").all()
    assert result.summary["completed"] == len(measured) == result.summary["num_prompts"]


def test_stages_of_a_request_follow_each_other():
    requests = run(policy="jsq").requests.to_pandas()
    done = requests[requests.outcome == "completed"]
    stages = ["arrival_s", "sent_s", "prefill_start_s", "prefill_end_s", "transfer_start_s"]
    stages += ["transfer_end_s", "decode_start_s", "first_token_s", "finish_s"]
    times = done[stages].to_numpy()
    assert (np.diff(times, axis=1) >= 0).all()
    assert (done.prefill_end_s > done.prefill_start_s).all()
    assert (done.transfer_end_s > done.transfer_start_s).all()
    assert (done.first_token_s > done.decode_start_s).all()


def test_tokens_of_the_steps_are_those_of_the_requests():
    result = run(num_requests=200, duration=1, warmup=0)
    steps = result.steps.to_pandas()
    requests = result.requests.to_pandas()
    assert steps[steps.role == "decode"].batch.sum() == requests.output_len.sum()
    assert steps[steps.role == "prefill"].tokens.sum() == requests.prompt_len.sum()


def test_step_times_are_those_of_the_latency_model():
    """Each logged decode step lies between the times of the fewest and the most experts."""
    model = prepare(make_config(BASE)).step_time
    steps = run().steps.to_pandas()
    steps = steps[steps.role == "decode"].head(500)
    for step in steps.itertuples():
        # The sum over layers of a time convex or concave in the count is bounded by its ends.
        counts = np.arange(model.n_experts + 1)
        line = np.interp(step.active_experts, counts, model.cost.moe_s[step.batch])
        knots = np.arange(model.cost.attention_s.shape[1]) * model.cost.context_stride
        attention = np.interp(
            step.context_tokens / step.batch, knots, model.cost.attention_s[step.batch]
        )
        expected = model.n_moe_layers * line + attention + fixed_s(model)[step.batch]
        assert step.end_s - step.start_s == pytest.approx(expected, rel=0.03)


def test_locality_lowers_the_active_experts_on_the_embedded_trace():
    """The premise of the paper, on a trace with domains: grouping beats scattering."""
    scattered = run(policy="round_robin").summary
    for policy in ("domain", "eldr"):
        grouped = run(policy=policy).summary
        key = "mean_active_experts_per_step"
        assert grouped[key] < 0.95 * scattered[key]
        assert grouped["median_tpot_ms"] < scattered["median_tpot_ms"]


def test_wide_band_balances_load_as_jsq_does():
    """tau = 1 keeps every worker in the band (ELDR section 4.3.2): pure shortest queue."""
    sets = [
        run(policy=policy).summary["mean_active_experts_per_step"]
        for policy in ("eldr:tau=1", "jsq")
    ]
    assert sets[0] == pytest.approx(sets[1], rel=0.05)


def test_closed_loop_keeps_to_its_concurrency():
    result = run(num_requests=120, warmup=0, max_concurrency=6, request_rate=math.inf)
    assert result.summary["max_concurrent_requests"] == 6
    assert result.summary["completed"] == 120


def test_prompt_longer_than_the_token_budget_is_chunked():
    config = make_config(BASE | {"max_num_batched_tokens": 32, "max_num_seqs": 32})
    result = simulate(config)
    steps = result.steps.to_pandas()
    assert steps[steps.role == "prefill"].tokens.max() <= 32
    assert result.summary["completed"] == result.summary["num_prompts"]


def test_late_load_reports_change_what_the_router_sees():
    fresh = run(policy="jsq").requests.to_pandas()
    stale = run(policy="jsq", load_report_delay_ms=3000).requests.to_pandas()
    assert (fresh.decode_worker.head(300) != stale.decode_worker.head(300)).any()


def test_service_level_and_price_reach_the_summary():
    summary = run(goodput={"tpot": 1e-3}, price_per_gpu_hour=2.5).summary
    assert summary["slo_attainment"] == 0.0
    tokens_per_hour = summary["output_throughput"] * 3600
    assert summary["cost_per_million_output_tokens"] == pytest.approx(
        6 * 2.5 / tokens_per_hour * 1e6
    )
    assert run(goodput={"tpot": 1e6}).summary["slo_attainment"] == 1.0


def test_signatures_cost_the_policies_that_read_them():
    """TTFT grows by what a prefill step and the router take; others pay nothing (Table 1)."""
    costly = {"capture_overhead_ms": 5.0, "routing_overhead_ms": 3.0}
    free = {"capture_overhead_ms": 0.0, "routing_overhead_ms": 0.0}
    for name in ("eldr", "marginal_cost"):
        with_costs, without = (
            run(policy={"name": name, **costs}, request_rate=2).requests.to_pandas()
            for costs in (costly, free)
        )
        prefill = with_costs.prefill_end_s - with_costs.prefill_start_s
        assert (prefill - (without.prefill_end_s - without.prefill_start_s)).median() == (
            pytest.approx(5e-3, abs=1e-6)
        )
        wait = (with_costs.transfer_start_s - with_costs.prefill_end_s).dropna()
        assert (wait >= 3e-3 - 1e-9).all()


def test_overload_is_told():
    """Far more than two decode workers can serve: the queue grows, the run still ends."""
    summary = run(request_rate=400, duration=2, warmup=0, max_num_seqs=2, output_len=512).summary
    assert summary["num_prompts"] == summary["completed"] + summary["failed"]
    assert summary["num_prompts"] > 500
