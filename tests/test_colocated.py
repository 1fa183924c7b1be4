"""Co-located workers: what a mixed step costs, whose experts it reads, and whole runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.step_time import build_step_time_model
from eldr_sim.simulator.config import make_config, parse_topology
from eldr_sim.simulator.replay import make_prompt_replay, prompt_experts
from eldr_sim.simulator.run import simulate
from eldr_sim.traces.bitsets import bit_sets
from eldr_sim.traces.format import open_trace


@pytest.fixture(scope="module")
def trace():
    return open_trace("reference-moe")


@pytest.fixture(scope="module")
def step_time():
    return build_step_time_model(
        "Qwen3-30B-A3B", "H100", max_num_seqs=256, max_model_len=8192, mixed_steps=True,
        max_num_batched_tokens=2048,
    )  # fmt: skip


def mixed_s(model, batch, tokens, contexts, distinct, mean_context):
    """Seconds of a mixed step, put together as the compiled loop does."""
    total = batch + sum(tokens)
    moe = model.n_moe_layers * model.mixed_moe_s[total, distinct]
    knots = np.arange(model.attention_s.shape[1]) * model.context_stride
    attention = np.interp(mean_context, knots, model.attention_s[batch]) if batch else 0.0
    extra = model.mixed_extra_s(batch, tokens, contexts)
    return extra + model.fixed_s[batch] + moe + attention


def test_a_step_of_prompts_alone_costs_what_a_prefill_worker_pays(step_time):
    """All 128 experts are touched by 1,000 tokens; lm_head has one row in both."""
    got = mixed_s(step_time, 0, [1000], [0], 128, 0)
    assert got == pytest.approx(step_time.prefill_s([1000], [0]), rel=1e-6)


@given(
    batch=st.integers(1, 200),
    chunk=st.integers(1, 1500),
    cached=st.integers(0, 4000),
    context=st.integers(1, 4000),
)
def test_a_mixed_step_costs_no_more_than_its_parts_and_no_less_than_either(
    step_time, batch, chunk, cached, context
):
    every = step_time.n_experts
    mixed = mixed_s(step_time, batch, [chunk], [cached], every, context)
    decode = step_time.decode_s([every] * step_time.n_moe_layers, batch, context)
    prefill = mixed_s(step_time, 0, [chunk], [cached], every, 0)
    assert max(decode, prefill) <= mixed * (1 + 1e-9)
    assert mixed <= (decode + prefill) * (1 + 1e-9)


def test_mixed_tables_only_where_asked_for():
    model = build_step_time_model("Qwen3-30B-A3B", "H100", max_num_seqs=8, max_model_len=4096)
    assert model.mixed_moe_s.shape == (1, 129)


@given(
    seed=st.integers(0, 2**32),
    spans=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 300)), min_size=1, max_size=3),
)
def test_experts_of_prompt_tokens_equal_a_union_token_by_token(trace, seed, spans):
    """Model layers 0 to 5 are the trace's own; token p replays prompt row p mod prompt_len."""
    replay = make_prompt_replay(trace, trace.n_layers, np.arange(6))
    ranges, position = [], int(np.random.default_rng(seed).integers(500))
    for request, length in spans:
        ranges.append((request, position, position + length))
        position += length
    sets = bit_sets(trace).reshape(trace.manifest.n_tokens, -1)
    expected = np.zeros(sets.shape[1], np.uint64)
    for request, start, stop in ranges:
        for p in range(start, stop):
            expected |= sets[trace.first_row[request] + p % trace.prompt_len[request]]
    assert (prompt_experts(replay, tuple(ranges)) == expected).all()


def run(**fields):
    return simulate(
        make_config({"topology": "2C", "policy": "jsq", "warmup": 0, "duration": 4} | fields)
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


def test_a_workload_with_shared_prefixes_needs_prefix_caching_off():
    with pytest.raises(InputError, match="enable_prefix_caching"):
        run(prompts="shared")
    run(prompts="shared", enable_prefix_caching=False, request_rate=2, output_len=4)


def test_the_topology_is_read():
    assert parse_topology("8C") == (0, 8)
    assert parse_topology("2p3d") == (2, 3)
    for wrong in ("0C", "C", "1P1C", "8"):
        with pytest.raises(InputError, match="xC"):
            parse_topology(wrong)
