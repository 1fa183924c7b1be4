"""The engine's step times are those of the step-time model, whatever a step holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.kernel_profiles.step_cost import step_parts, total_s
from eldr_sim.kernel_profiles.step_time import build_step_time_model

SEATS, BUDGET = 6, 24


@pytest.fixture(scope="module")
def model():
    return build_step_time_model(
        "Mixtral-8x7B", "H100", max_num_seqs=SEATS, max_model_len=256,
        max_num_batched_tokens=BUDGET, mixed_steps=True,
    )  # fmt: skip


def expected_s(model, step, first, count, activated, *, colocated, own_experts):
    """Seconds of a step by the model's own functions."""
    batch, tokens = int(step["batch"]), int(step["batch"] + step["chunk_tokens"])
    layers = range(model.n_moe_layers)
    mixed = sum(float(model.mixed_moe_s[tokens, activated[layer]]) for layer in layers)
    if colocated and count:
        knots = np.arange(model.attention_s.shape[1]) * model.context_stride
        mean = step["context"] / max(batch, 1)
        attention = np.interp(mean, knots, model.attention_s[batch]) if batch else 0.0
        fixed = float(model.fixed_s[batch]) if batch else 0.0
        return model.mixed_extra_s(batch, count, first) + fixed + mixed + attention
    seconds = 0.0
    if count:
        seconds += model.prefill_s(count, first, mixed if own_experts else None)
    if batch:
        seconds += model.decode_s(activated, batch, step["context"] / batch)
    return seconds


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n_prefill=st.integers(0, 1),
    prompts=st.booleans(),
    n_blocks=st.sampled_from([30, 1000]),
)
def test_every_step_takes_what_the_model_says(
    model, make_cluster, make_workload, run_watched, seed, n_prefill, prompts, n_blocks
):
    rng = np.random.default_rng(seed)
    n = 12
    workload = make_workload(
        np.cumsum(rng.exponential(0.02, n)), rng.integers(1, 60, n), rng.integers(1, 40, n)
    )
    cluster = make_cluster(
        workload, step_time=model, n_prefill=n_prefill, max_num_seqs=SEATS,
        max_num_batched_tokens=BUDGET, n_blocks=n_blocks, seed=seed, decode_policy="round_robin",
        prefill_policy="round_robin", prompts=prompts or None,
    )  # fmt: skip
    scratch, seen, checked = cluster.arrays.scratch, 0, 0

    def check():
        nonlocal seen, checked
        new = cluster.log[seen : int(cluster.arrays.clock["n_steps"][0])]
        seen += len(new)
        if len(new) != 1:  # a router was asked between two events
            return
        (step,) = new
        colocated, prefill = n_prefill == 0, step["worker"] < n_prefill
        got = expected_s(
            model,
            step,
            scratch.first[: step["chunks"]].tolist(),
            scratch.count[: step["chunks"]].tolist(),
            scratch.activated.tolist(),
            colocated=colocated,
            own_experts=colocated or (prompts and prefill),
        )
        assert step["end"] - step["start"] == pytest.approx(got, rel=1e-9)
        checked += 1

    record = run_watched(cluster, check)
    assert record.completed.all()
    assert checked > seen - 3
    assert seen == len(record.steps)


@given(data=st.data(), n_chunks=st.integers(0, 3))
def test_the_parts_make_the_step(model, data, n_chunks):
    batch = data.draw(st.integers(0 if n_chunks else 1, SEATS))
    first = data.draw(st.lists(st.integers(0, 100), min_size=n_chunks, max_size=n_chunks))
    count = data.draw(st.lists(st.integers(1, 6), min_size=n_chunks, max_size=n_chunks))
    context = data.draw(st.integers(batch, 200 * batch))
    layers = model.n_moe_layers
    activated = data.draw(st.lists(st.integers(2, 8), min_size=layers, max_size=layers))

    def parts(batch, context, rows, uniform, first=first, count=count):
        return step_parts(
            model.cost, batch, float(context), np.array(first, np.int64),
            np.array(count, np.int64), len(first), rows, np.array(activated), uniform,
        )  # fmt: skip

    decode = parts(batch, context, batch, False, [], []) if batch else None
    if batch:
        alone = model.decode_s(activated, batch, context / batch)
        assert total_s(decode) == pytest.approx(alone, rel=1e-12)
        assert total_s(decode) == pytest.approx(sum(decode), rel=1e-12)
        assert decode.host == model.host_gap_s
    if n_chunks:
        uniform, own = (parts(0, 0, n_chunks, choice) for choice in (True, False))
        assert total_s(uniform) == pytest.approx(model.prefill_s(count, first), rel=1e-9)
        assert total_s(own) == pytest.approx(model.prefill_s(count, first, own.moe), rel=1e-9)
        mixed = model.mixed_moe_s[sum(count)]
        assert own.moe == pytest.approx(float(sum(mixed[k] for k in activated)), rel=1e-12)
        assert own.attention == pytest.approx(model.prompt_attention_s(count, first), rel=1e-12)
    if n_chunks and batch:
        both = parts(batch, context, min(batch + 1, SEATS), False)
        extra = model.mixed_extra_s(batch, count, first)
        seconds = extra + model.fixed_s[batch] + both.moe + decode.attention
        if extra > 0.0:
            assert total_s(both) == pytest.approx(seconds, rel=1e-9)
