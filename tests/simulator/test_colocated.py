"""Co-located workers: what a step of prompts and decodes costs, and whole runs."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.steps.step_cost import step_parts, total_s
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config, parse_topology


@pytest.fixture(scope="module")
def step_time():
    return build_step_time_model(
        "Qwen3-30B-A3B", "H100", max_num_seqs=256, max_model_len=8192,
        max_num_batched_tokens=2048,
    )  # fmt: skip


def step_s(model, batch, tokens, cached, context):
    """Seconds of a step that activates every expert; a chunk of ``tokens`` behind ``cached``."""
    chunks = [np.array([n] * (tokens > 0), np.int64) for n in (cached, tokens)]
    activated = np.full(model.n_moe_layers, model.n_experts)
    rows = batch + (tokens > 0)
    parts = step_parts(model.cost, batch, batch, float(context), *chunks, rows, activated, False)
    return total_s(parts)


def test_a_step_of_prompts_alone_costs_what_a_prefill_worker_pays(step_time):
    """All 128 experts are touched by 1,000 tokens; lm_head has one row in both."""
    uniform = step_time.prefill_s([1000], [0])
    assert step_s(step_time, 0, 1000, 0, 0) == pytest.approx(uniform, rel=1e-6)


@given(
    batch=st.integers(1, 200),
    chunk=st.integers(1, 1500),
    cached=st.integers(0, 4000),
    context=st.integers(1, 4000),
)
def test_a_mixed_step_costs_no_more_than_its_parts_and_no_less_than_either(
    step_time, batch, chunk, cached, context
):
    mixed = step_s(step_time, batch, chunk, cached, batch * context)
    decode = step_s(step_time, batch, 0, 0, batch * context)
    prefill = step_s(step_time, 0, chunk, cached, 0)
    assert max(decode, prefill) <= mixed * (1 + 1e-9)
    assert mixed <= (decode + prefill) * (1 + 1e-9)


def run(**fields):
    return simulate(
        make_config(
            {"topology": "2C", "policy": "jsq", "warmup": 0, "duration": 4, "frontend": "none"}
            | fields
        )
    )


def test_every_request_ends_and_every_prompt_token_is_computed_once():
    result = run(request_rate=20, output_len=32)
    requests, steps = result.requests.to_pandas(), result.steps.to_pandas()
    done = requests[requests.outcome == "completed"]
    assert (requests[requests.measured].outcome == "completed").all()
    assert set(steps.role) == {"decode"}
    assert (done.prefill_worker == done.decode_worker).all()
    assert done.transfer_start_s.isna().all()
    assert (done.prefill_start_s <= done.first_token_s).all()
    assert (done.prefill_end_s == done.first_token_s).all()
    prefilled = int((steps.tokens - steps.batch).sum())
    begun = requests[requests.prefill_start_s.notna()]
    # The last prompt token of each counts as a decode.
    assert (done.prompt_len - 1).sum() <= prefilled <= (begun.prompt_len - 1).sum()
    assert result.summary["topology"] == "2 co-located workers of 1 GPU"
    assert result.summary["gpus"] == 2


def test_chunks_keep_the_token_budget():
    steps = run(
        request_rate=10,
        output_len=64,
        max_num_batched_tokens=40,
        max_num_seqs=24,
        model="Qwen3-30B-A3B",
    ).steps.to_pandas()
    assert (steps.tokens <= 40).all()
    assert (steps.tokens == 40).any()


def test_a_single_request_takes_its_prefill_and_its_decode_steps():
    result = run(num_requests=1, request_rate=1, output_len=5, duration=1)
    (request,) = result.requests.to_pylist()
    steps = result.steps.to_pandas()
    assert len(steps) == 5
    assert steps.tokens.tolist() == [request["prompt_len"], 1, 1, 1, 1]
    assert request["ttft_ms"] == pytest.approx(1e3 * (steps.end_s[0] - steps.start_s[0]))
    # 90 tokens touch nearly all experts, one token 8.
    assert steps.active_experts[0] > 64
    assert (steps.active_experts[1:] == 8).all()


@pytest.mark.parametrize("policy", ["eldr", "marginal_cost"])
def test_policies_that_need_a_prefill_are_refused(policy):
    with pytest.raises(InputError, match="reads expert signatures"):
        run(policy=policy)


def test_prompts_that_begin_alike_are_computed_once():
    fields = {"prompts": "shared", "num_requests": 600, "request_rate": 40, "output_len": 2}
    shared, apart = run(**fields), run(enable_prefix_caching=False, **fields)
    cached = shared.requests["cached_tokens"].to_numpy()
    lengths = shared.requests["prompt_len"].to_numpy()
    assert shared.summary["prefix_cache_hits"] == cached.sum() > 0
    for result, found in ((shared, cached), (apart, np.zeros_like(cached))):
        steps = result.steps.to_pandas()
        assert (steps.tokens - steps.batch).sum() == (lengths - 1 - found).sum()
    assert shared.summary["mean_ttft_ms"] < apart.summary["mean_ttft_ms"]


def test_the_topology_is_read():
    assert parse_topology("8C") == (0, 8)
    assert parse_topology("2p3d") == (2, 3)
    for wrong in ("0C", "C", "1P1C", "8"):
        with pytest.raises(InputError, match="xC"):
            parse_topology(wrong)


def test_short_prompts_pass_a_long_one_whose_chunks_are_bounded(tmp_path):
    """Five prompts of 16,000 tokens, forty of 100: the short ones come sooner, the long later."""
    lines = [{"timestamp": 400 * i, "input_length": 16_000, "output_length": 20} for i in range(5)]
    lines += [{"timestamp": 50 * i, "input_length": 100, "output_length": 20} for i in range(40)]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fields = {
        "trace": "reference-moe", "workload": str(log), "arrivals": "recorded", "topology": "1C",
        "max_num_batched_tokens": 4096,
    }  # fmt: skip
    waited = {}
    for threshold in (None, 512):
        config = make_config(fields | {"long_prefill_token_threshold": threshold})
        rows = simulate(config).record.requests
        ttft = rows["first_token_s"] - rows["arrival_s"]
        waited[threshold] = [float(ttft[rows["prompt_len"] == n].mean()) for n in (100, 16_000)]
    assert waited[512][0] < 0.7 * waited[None][0]
    assert waited[512][1] > waited[None][1]
