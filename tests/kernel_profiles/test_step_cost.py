"""The engine's step times are those of the step-time model, whatever a step holds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.kernel_profiles.steps.step_cost import chunk_attention_s, step_parts, total_s
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model

from ..watching import new_steps

SEATS, BUDGET = 6, 24


@pytest.fixture(scope="module")
def model():
    return build_step_time_model(
        "Mixtral-8x7B", "H100", max_num_seqs=SEATS, max_model_len=256,
        max_num_batched_tokens=BUDGET,
    )  # fmt: skip


def possible_s(model, step, cached, new, activated, own_experts):
    """Seconds of a step by the model, for each number of sequences that it may be of.

    The log does not say which chunks end the context of a sequence that decodes in the step.
    """
    batch, chunks = int(step["sequences"]), list(zip(cached, new, strict=True))
    counts = activated if own_experts or not chunks else None
    rows = range(max(batch, len(chunks)), batch + len(chunks) + 1)
    return [sum(model.parts(batch, step["context"], chunks, counts, n)) for n in rows if n <= SEATS]


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
        prefill_policy="round_robin", prompts=prompts,
    )  # fmt: skip
    scratch, seen, checked = cluster.arrays.scratch, [0, 0], 0

    def check():
        nonlocal checked
        new = list(new_steps(cluster, seen))
        if len(new) != 1:  # a router was asked between two events
            return
        ((_, step),) = new
        n, took = int(step["chunks"]), step["end"] - step["start"]
        cached, fresh = scratch.cached[:n].tolist(), scratch.new[:n].tolist()
        may = possible_s(model, step, cached, fresh, scratch.activated.tolist(), prompts)
        assert any(took == pytest.approx(seconds, rel=1e-9) for seconds in may)
        checked += 1

    record = run_watched(cluster, check)
    assert record.completed.all()
    assert checked > sum(seen) - 3
    assert sum(seen) >= len(record.prefill_steps) + len(record.decode_steps)


@given(data=st.data(), n_chunks=st.integers(0, 3))
def test_the_parts_make_the_step(model, data, n_chunks):
    batch = data.draw(st.integers(0 if n_chunks else 1, SEATS))
    first = data.draw(st.lists(st.integers(0, 100), min_size=n_chunks, max_size=n_chunks))
    count = data.draw(st.lists(st.integers(1, 6), min_size=n_chunks, max_size=n_chunks))
    context = data.draw(st.integers(batch, 200 * batch))
    layers = model.n_moe_layers
    activated = data.draw(st.lists(st.integers(2, 8), min_size=layers, max_size=layers))
    chunks, cost, tokens = list(zip(first, count, strict=True)), model.cost, batch + sum(count)
    parts = model.parts(batch, context, chunks, activated, min(batch + n_chunks, SEATS))
    layer_s = cost.mixed_moe_s[tokens] if chunks else cost.moe_s[batch]
    assert parts.moe == pytest.approx(float(sum(layer_s[k] for k in activated)), rel=1e-12)
    assert parts.dense == cost.dense_s[tokens]
    assert parts.head == cost.head_s[min(batch + n_chunks, SEATS)]
    assert parts.host == model.host_gap_s
    nothing = np.zeros(0, np.int64)
    apart = 0.0
    if batch:
        apart += model.parts(batch, context, activated=activated).attention
    if chunks:
        alone = model.parts(chunks=chunks)  # its experts are not known
        assert alone.moe == pytest.approx(layers * cost.uniform_moe_s[sum(count)], rel=1e-12)
        apart += alone.attention
    assert parts.attention == pytest.approx(apart, rel=1e-12)
    assert total_s(parts) == pytest.approx(sum(parts), rel=1e-12)
    # Fewer layers stand for all of them in equal parts, fractions are interpolated.
    half = np.full(2, 4.5)
    few = step_parts(cost, max(batch, 1), max(batch, 1), 1.0, nothing, nothing, 1, half, False)
    between = (cost.moe_s[max(batch, 1), 4] + cost.moe_s[max(batch, 1), 5]) / 2
    assert few.moe == pytest.approx(layers * between, rel=1e-12)


def test_a_chunk_reads_all_that_it_attends_to_and_waits_for_the_slowest(make_step_time):
    """Floor 1; a pair in company 0, 2 s for each token of KV; the second chunk alone 30 s."""
    length = np.arange(257.0)
    cost = make_step_time().cost._replace(
        prompt_floor_s=1.0, prompt_token_s=2.0, prompt_share_s=0 * length,
        prompt_alone_s=np.where(length < 100, 0.0, 30.0),
    )  # fmt: skip
    first, count = np.array([7, 96]), np.array([3, 4])
    assert chunk_attention_s(cost, first[:1], count[:1]) == 1 + 2 * (7 + 3)
    assert chunk_attention_s(cost, first, count) == 1 + 2 * (7 + 3) + 2 * (96 + 4)
    cheap = cost._replace(prompt_token_s=0.0)
    assert chunk_attention_s(cheap, first, count) == 1 + 30
