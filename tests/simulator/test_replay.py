"""The layout of decode windows over a model's layers, against one loop over every bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.policies.placement.base import Placement
from eldr_sim.simulator.setup.replay import fit_trace, make_replay, make_replicas, rank_masks
from eldr_sim.traces.routing.writer import write_trace

LAYERS, EXPERTS, TOP_K = 3, 70, 4


@pytest.fixture(scope="module")
def make_trace(tmp_path_factory):
    def make(prompt_len, output_len, n_layers=LAYERS, n_experts=EXPERTS, top_k=TOP_K):
        rng = np.random.default_rng(6)
        n, rows = len(prompt_len), sum(prompt_len) + sum(output_len)
        experts = np.argsort(rng.random((rows, n_layers, n_experts)), axis=-1)[..., :top_k]
        return write_trace(
            tmp_path_factory.mktemp("trace") / "t",
            experts=experts,
            request_id=[f"r{i}" for i in range(n)],
            domain=["x"] * n,
            prompt_len=prompt_len,
            output_len=output_len,
            is_calibration=[False] * n,
            model="a-model",
            n_experts=n_experts,
            domains=["x"],
            captured_by="test",
            source_data="drawn",
            tool_versions={},
            provenance="synthetic",
        )

    return make


@pytest.fixture(scope="module")
def trace(make_trace):
    return make_trace([5, 1, 2, 8], [3, 1, 7, 4])


def experts_in(row, layer):
    words = row.reshape(-1, -(-EXPERTS // 64))[layer]
    return {64 * w + b for w, word in enumerate(words.tolist()) for b in range(64) if word >> b & 1}


@settings(max_examples=40, deadline=None)
@given(
    n_layers=st.integers(LAYERS, 11), requests=st.lists(st.integers(0, 3), min_size=1, max_size=6)
)
def test_replay_against_every_bit(trace, n_layers, requests):
    """Model layer l of row p: trace layer l mod T of the token ``p + shift`` of the window."""
    replay = make_replay(trace, n_layers, np.array(requests))
    tiles = -(-n_layers // LAYERS)
    wanted = sorted(set(requests))
    assert replay.bits.shape[0] == sum(trace.output_len[q] + 1 for q in wanted)
    for q in wanted:
        window = trace.first_row[q] + trace.prompt_len[q] - 1 + np.arange(trace.output_len[q] + 1)
        assert replay.length[q] == len(window)
        for p in range(len(window)):
            row = replay.bits[replay.first_row[q] + p]
            for layer in range(n_layers):
                shift = layer // LAYERS * len(window) // tiles
                token = window[(p + shift) % len(window)]
                expected = set(trace.experts[token, layer % LAYERS].tolist())
                assert experts_in(row, layer) == expected
    for q in set(range(4)) - set(wanted):
        assert (replay.first_row[q], replay.length[q]) == (-1, 0)


def test_windows_are_those_of_the_trace_and_do_not_overlap(trace):
    replay = make_replay(trace, LAYERS, np.arange(4))
    _, length = trace.decode_window(np.arange(4))
    np.testing.assert_array_equal(replay.length, length)
    ends = replay.first_row + replay.length
    np.testing.assert_array_equal(replay.first_row[1:], ends[:-1])
    assert ends[-1] == len(replay.bits)


def test_a_tiled_layer_sees_the_same_tokens_in_another_order(trace):
    """Over a whole window, each tile of a layer has the sets of the first one."""
    replay = make_replay(trace, 3 * LAYERS, np.array([2]))
    width = 2 * LAYERS
    tiles = [replay.bits[:, i * width : (i + 1) * width].tolist() for i in range(3)]
    assert sorted(tiles[0]) == sorted(tiles[1]) == sorted(tiles[2])
    assert tiles[1] == tiles[0][2:] + tiles[0][:2]  # 8 rows, rotated by a third, rounded down
    assert tiles[2] == tiles[0][5:] + tiles[0][:5]


# -- does a trace fit a model ------------------------------------------------------------------


def test_a_trace_that_fits(make_trace):
    model = load_model("Mixtral-8x7B")
    fit_trace(make_trace([2], [2], 1, model.n_experts, model.top_k), model)
    layers = model.n_moe_layers
    fit_trace(make_trace([2], [2], layers, model.n_experts, model.top_k), model)


@pytest.mark.parametrize(
    ("n_experts", "top_k", "more", "message"),
    [
        (9, 2, 0, "trace: a-model has 9 experts and top-2, but Mixtral-8x7B has 8 and top-2"),
        (8, 1, 0, "trace: a-model has 8 experts and top-1, but Mixtral-8x7B has 8 and top-2"),
        (8, 2, 1, "trace: it has 33 MoE layers, Mixtral-8x7B only 32"),
    ],
)
def test_a_trace_that_does_not_fit_says_why(make_trace, n_experts, top_k, more, message):
    model = load_model("Mixtral-8x7B")
    trace = make_trace([2], [2], model.n_moe_layers + more, n_experts, top_k)
    with pytest.raises(InputError) as caught:
        fit_trace(trace, model)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("n_experts", [5, 70])
def test_experts_of_ranks_and_replicas_lie_in_one_way(n_experts):
    """The plane is compiled for it: for another layout, once more."""
    expert = np.tile(np.append(np.arange(n_experts), 0), (2, 1))
    placement = Placement(expert, expert % 3, 3)
    masks = rank_masks([placement] * 2, n_experts, 4)
    replicas = make_replicas([placement] * 2, n_experts, 4)
    assert masks.flags.c_contiguous
    assert replicas.multi.flags.c_contiguous
    assert replicas.many.flags.c_contiguous
