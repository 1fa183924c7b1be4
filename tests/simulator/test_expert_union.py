"""Unions of bit sets and their counts against Python sets."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.policies.placement.base import Placement
from eldr_sim.simulator.plane.steps.expert_union import (
    add_prompt,
    count_experts,
    make_prompt_rows,
    union_rows,
)
from eldr_sim.simulator.setup.replay import prompt_rows, rank_masks
from eldr_sim.traces.routing.format import bit_sets, open_trace

from .expert_sets import TraceSets, expert_set, prompt_token_experts


def random_bits(rng, rows, n_layers, n_experts):
    words = -(-n_experts // 64)
    bits = np.zeros((rows, n_layers, words), np.uint64)
    for row in bits.reshape(-1, words):
        for expert in rng.integers(n_experts, size=rng.integers(0, 5)).tolist():
            row[expert // 64] |= np.uint64(1) << np.uint64(expert % 64)
    return bits.reshape(rows, -1)


SHAPE = {
    "seed": st.integers(0, 2**32),
    "n_layers": st.integers(1, 5),
    "n_experts": st.sampled_from([1, 5, 64, 65, 130]),
}


@given(n=st.integers(0, 30), **SHAPE)
def test_union_of_rows(seed, n_layers, n_experts, n):
    """INV-9."""
    rng = np.random.default_rng(seed)
    bits = random_bits(rng, 12, n_layers, n_experts)
    rows = rng.integers(12, size=n + 3)  # only the first n count
    union = rng.integers(0, 2**64, bits.shape[1], np.uint64)  # what was there is overwritten
    first = int(rng.integers(n + 1))
    union_rows(bits, rows, 0, first, union)
    union_rows(bits, rows, first, n, union)
    sets = [expert_set(bits[row], n_layers) for row in rows[:n]]
    assert expert_set(union, n_layers) == set().union(*sets)


# -- counts ------------------------------------------------------------------------------------


@given(n_ranks=st.integers(1, 4), trace_layers=st.integers(1, 5), **SHAPE)
def test_counts_by_layer_and_rank(seed, n_layers, n_experts, n_ranks, trace_layers):
    rng = np.random.default_rng(seed)
    (row,) = random_bits(rng, 1, n_layers, n_experts) | random_bits(rng, 1, n_layers, n_experts)
    owner = rng.integers(n_ranks, size=(2, min(trace_layers, n_layers), n_experts))
    masks = rank_masks(
        [Placement.of_ranks(of_worker, n_ranks) for of_worker in owner], owner.shape[-1], n_layers
    )
    activated = np.full(n_layers, -1)
    active, busiest = count_experts(row, masks[1], activated)
    by_rank = np.zeros((n_layers, n_ranks), int)
    for layer, expert in expert_set(row, n_layers):
        by_rank[layer, owner[1, layer % owner.shape[1], expert]] += 1
    assert activated.tolist() == by_rank.max(1).tolist()
    assert (active, busiest) == (by_rank.sum(), by_rank.max(1).sum())


@given(seed=st.integers(0, 2**32), words=st.integers(1, 3), layers=st.integers(1, 4))
def test_one_rank_that_holds_all_counts_as_no_masks(seed, words, layers):
    rng = np.random.default_rng(seed)
    union = rng.integers(0, 2**64, layers * words, np.uint64)
    counts = []
    # With one rank the mask is not read; with two, the other one holds nothing.
    for ranks in (np.zeros((1, 0), np.uint64), np.zeros((2, layers * words), np.uint64)):
        if len(ranks) == 2:
            ranks[1] = ~np.uint64(0)
        activated = np.zeros(layers, np.int64)
        counts.append((count_experts(union, ranks, activated), activated.tolist()))
    by_layer = [sum(int(w).bit_count() for w in layer) for layer in union.reshape(layers, words)]
    assert counts == [((sum(by_layer), sum(by_layer)), by_layer)] * 2


# -- prompts -----------------------------------------------------------------------------------


def random_prompts(rng, trace_layers, n_experts, block_tokens):
    """Four recorded prompts, and three requests of which the last has no prefix blocks."""
    length = rng.integers(1, 9, 4)
    bits = random_bits(rng, int(length.sum()), trace_layers, n_experts)
    return make_prompt_rows(
        bits,
        np.cumsum(length) - length,
        length.astype(np.int32),
        np.array([0, 3, 5, 5]),
        rng.integers(4, size=5).astype(np.int32),
        block_tokens,
    )


@given(
    trace_layers=st.integers(1, 5),
    block_tokens=st.sampled_from([0, 1, 4, 7]),
    request=st.integers(0, 2),
    own=st.integers(0, 3),
    start=st.integers(0, 30),
    n=st.integers(0, 30),
    **SHAPE,
)
def test_prompt_tokens_one_by_one(
    seed, n_layers, n_experts, trace_layers, block_tokens, request, own, start, n
):
    """Tokens of prefix blocks replay the blocks' trace requests, all others their own one."""
    rng = np.random.default_rng(seed)
    trace_layers = min(trace_layers, n_layers)
    prompts = random_prompts(rng, trace_layers, n_experts, block_tokens)
    sets = TraceSets([expert_set(row, trace_layers) for row in prompts.bits], trace_layers)
    (before,) = random_bits(rng, 1, n_layers, n_experts)
    union = before.copy()
    add_prompt(prompts, request, own, start, start + n, union)
    expected = set(expert_set(before, n_layers))
    first, end = prompts.prefix_indptr[request : request + 2].tolist()
    for token in range(start, start + n):
        source = own
        if block_tokens and token // block_tokens < end - first:
            source = int(prompts.prefix_trace_request[first + token // block_tokens])
        expected |= prompt_token_experts(prompts, sets, source, token, n_layers)
    assert expert_set(union, n_layers) == expected


def test_layers_beyond_the_trace_take_other_tokens():
    """A trace of 1 layer under 3: a prompt of 6 rows, whose token p chooses expert p."""
    bits = np.uint64(1) << np.arange(6, dtype=np.uint64)[:, None]
    none = np.zeros(1, np.int64)
    prompts = make_prompt_rows(bits, none, np.array([6], np.int32), none, none.astype(np.int32), 0)
    union = np.zeros(3, np.uint64)
    add_prompt(prompts, 0, 0, 5, 7, union)  # rows 5 and 0, then 2 and 4 rows further on
    assert expert_set(union, 3) == {(0, 5), (0, 0), (1, 1), (1, 2), (2, 3), (2, 4)}


@given(
    seed=st.integers(0, 2**32),
    n_layers=st.integers(1, 3),
    ranges=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 400), st.integers(0, 400)),
        min_size=1,
        max_size=6,
    ),
)
def test_unions_that_are_kept_stay_those_of_their_rows(seed, n_layers, ranges):
    """Blocks of rows are kept as they are asked for; two prompts, of some blocks and a part."""
    rng = np.random.default_rng(seed)
    length = rng.integers(60, 200, 2)
    bits = random_bits(rng, int(length.sum()), 1, 130)
    none = np.zeros(2, np.int64)
    prompts = make_prompt_rows(
        bits, np.cumsum(length) - length, length.astype(np.int32), none, none.astype(np.int32), 0
    )
    for source, start, n in ranges:
        union = np.zeros(n_layers * bits.shape[1], np.uint64)
        add_prompt(prompts, 0, source, start, start + n, union)
        rows = prompts.first_row[source] + np.arange(start, start + n) % length[source]
        if n_layers == 1 and n:
            assert (union == np.bitwise_or.reduce(bits[rows])).all()
        sets = TraceSets([expert_set(row, 1) for row in prompts.bits], 1)
        tokens = range(start, start + min(n, int(length[source])))
        each = [prompt_token_experts(prompts, sets, source, token, n_layers) for token in tokens]
        assert expert_set(union, n_layers) == set().union(*each)


@pytest.fixture(scope="module")
def trace():
    return open_trace("reference-moe")


@given(request=st.integers(0, 5), start=st.integers(0, 500), n=st.integers(1, 300))
def test_prompts_of_a_trace_token_by_token(trace, request, start, n):
    """Layers of the trace are the model's own; token p replays prompt row p mod prompt_len."""
    prompts = prompt_rows(trace)
    union = np.zeros(prompts.bits.shape[1], np.uint64)
    add_prompt(prompts, 0, request, start, start + n, union)
    sets = bit_sets(trace).reshape(trace.manifest.n_tokens, -1)
    rows = trace.first_row[request] + np.arange(start, start + n) % trace.prompt_len[request]
    assert (union == np.bitwise_or.reduce(sets[rows])).all()


def test_prompt_rows_carry_the_prefix_blocks_of_a_workload(trace, make_workload):
    workload = dataclasses.replace(
        make_workload(np.zeros(2), 20, 1),
        prefix_hash=np.arange(2, dtype=np.uint64),
        prefix_indptr=np.array([0, 2, 2]),
        prefix_text=np.array([3, 4], np.int32),
        prefix_block_tokens=8,
    )
    prompts = prompt_rows(trace, workload)
    sets = bit_sets(trace).reshape(trace.manifest.n_tokens, -1)

    def row(source, token):
        return sets[trace.first_row[source] + token % trace.prompt_len[source]]

    for request, token, source in ((0, 7, 3), (0, 8, 4), (0, 16, 5), (1, 7, 5)):
        union = np.zeros(prompts.bits.shape[1], np.uint64)
        add_prompt(prompts, request, 5, token, token + 1, union)
        assert (union == row(source, token)).all()
