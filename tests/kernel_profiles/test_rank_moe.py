"""A MoE layer on one rank of an expert-parallel group, by its own pairs and experts."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.kernels.kernel_latency import CollectiveLatency
from eldr_sim.kernel_profiles.kernels.moe_latency import fit_moe_latency
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.cost_tables import RankMoE
from eldr_sim.kernel_profiles.steps.step_cost import rank_moe_s
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.kernel_profiles.tables.format import moe_shape
from eldr_sim.kernel_profiles.tables.library import Engine, find_table, shipped_tables

GROUP = Parallelism(1, True, 8)


@pytest.fixture(scope="module")
def qwen():
    return build_step_time_model(
        "Qwen3-235B-A22B",
        "H100",
        max_num_seqs=64,
        max_model_len=4096,
        max_num_batched_tokens=2048,
        parallelism=GROUP,
    )


@pytest.fixture(scope="module")
def whole():
    table = find_table("moe", "H100", shape=moe_shape(4096, 1536, 128, 8), dtype="bfloat16")
    assert table is not None
    return fit_moe_latency(table)


@settings(deadline=None)
@given(pairs=st.floats(0, 400_000), activated=st.floats(0, 40), slots=st.sampled_from([16, 18, 24]))
def test_a_rank_is_a_gpu_with_its_pairs_and_experts(qwen, whole, pairs, activated, slots):
    """Spec: row pairs / k of the table of a GPU that holds all experts."""
    layer = qwen.rank_moe(slots, 300_000)
    found = rank_moe_s(layer, pairs, activated, False)
    count = min(activated, slots)
    near = [whole.time_s(pairs / 8, np.floor(count)), whole.time_s(pairs / 8, np.ceil(count))]
    expected = near[0] + (count - np.floor(count)) * (near[1] - near[0])
    # Knots beyond 1,024 rows lie 2% apart; between them the line errs a little at bends.
    assert found == pytest.approx(float(expected), rel=0.01)
    assert rank_moe_s(layer, pairs, activated, True) >= found


def test_more_pairs_or_experts_never_shorten_a_rank(qwen):
    layer = qwen.rank_moe(20, 40_000)
    pairs = np.unique(np.concatenate([np.arange(200), np.geomspace(200, 100_000, 300)]))
    for prompts in (False, True):
        grid = np.array(
            [[rank_moe_s(layer, p, a, prompts) for a in np.arange(0, 22, 0.5)] for p in pairs]
        )
        assert (grid > 0).all()  # an idle rank launches its kernels, too
        assert (np.diff(grid, axis=0) >= -1e-15).all()
        assert (np.diff(grid, axis=1) >= -1e-15).all()


def test_tables_are_as_wide_as_the_slots_and_nothing_is_read_beyond(qwen):
    layer = qwen.rank_moe(18, 10_000)
    assert layer.decode_s.shape == layer.mixed_s.shape == (len(layer.rows), 19)
    assert layer.rows[-1] >= 10_000 / 8
    # Poison what lies behind: a read beyond the last column would fetch the next row's zero.
    most = rank_moe_s(layer, 4000.0, 18.0, False)
    assert rank_moe_s(layer, 4000.0, 19.0, False) == most
    assert rank_moe_s(layer, 4000.0, 1e6, False) == most
    end = rank_moe_s(layer, 8 * layer.rows[-1], 18.0, False)
    assert end == pytest.approx(layer.decode_s[-1, 18], rel=1e-12)
    slope = layer.decode_s[-1, 18] - layer.decode_s[-2, 18]
    far = rank_moe_s(layer, 8 * (2 * layer.rows[-1] - layer.rows[-2]), 18.0, False)
    assert far == pytest.approx(layer.decode_s[-1, 18] + slope, rel=1e-9)


def test_redundant_slots_go_on_with_the_last_expert_where_only_a_ranks_rows_exist():
    """Rows of one of 8 ranks alone: 16 experts were measured, the rank has slots for 18."""
    own = [
        one.load()
        for one in shipped_tables()
        if one.name.startswith("h100_moe_h4096_i1536_e128_k8_ep8_bfloat16")
    ]
    assert len(own) == 1
    measured = fit_moe_latency(own[0])
    grid = measured.rank_grid_s(np.array([0.0, 64.0, 512.0]), 18, False)
    np.testing.assert_allclose(
        np.diff(grid[:, 15:], axis=1), np.repeat(np.diff(grid[:, 15:17], axis=1), 3, axis=1)
    )
    np.testing.assert_allclose(grid[1, :17], measured.time_s(64, np.arange(17)))


def test_whoever_shares_experts_has_whole_attention_and_no_sum_of_experts():
    """TP 2 x DP 4: heads over 2 GPUs, experts over 8; a gather stands for the second sum."""
    model = load_model("Qwen3-235B-A22B")
    spread = Parallelism(2, True, 4)
    assert (spread.n_gpus, spread.n_expert_ranks) == (8, 8)
    shard = spread.shard(model)
    assert (shard.n_heads, shard.expert_intermediate_size) == (32, 1536)
    assert Parallelism(2, False, 4).shard(model).expert_intermediate_size == 1536 // 8
    experts = model.n_moe_layers * model.bytes_per_expert
    assert (
        spread.weight_bytes(model, 18 * model.n_moe_layers) - spread.weight_bytes(model)
        == 2 * experts
    )
    assert GROUP.weight_bytes(model) == model.weight_bytes - 112 * experts
    limits = {"max_num_seqs": 16, "max_model_len": 2048, "max_num_batched_tokens": 512,
              "engine": Engine("vllm", "0.16")}  # fmt: skip
    alone, shared = (
        build_step_time_model("Qwen3-235B-A22B", "H200", parallelism=p, **limits)
        for p in (Parallelism(2, True), spread)
    )
    nccl = find_table("collective", "H200", dtype="float16")
    custom = find_table("collective", "H200", dtype="bfloat16")
    assert nccl is not None
    assert custom is not None
    message = 2.0 * 4096 * np.arange(1, 513)
    gather = CollectiveLatency.from_table(nccl).time_s("all_gather", 2, message)
    reduce = CollectiveLatency.from_table(custom).time_s("all_reduce", 2, message)
    np.testing.assert_allclose(
        (shared.cost.collectives_s - alone.cost.collectives_s)[1:], 94 * (gather - reduce)
    )
    np.testing.assert_array_equal(shared.cost.dense_s, alone.cost.dense_s)
    assert shared.provenance["moe"]["label"] == "derived"


def test_sizes_that_cannot_be_are_refused(qwen):
    with pytest.raises(InputError, match="slots"):
        qwen.rank_moe(129, 100)
    with pytest.raises(InputError, match="max_pairs"):
        qwen.rank_moe(16, 0)
    with pytest.raises(InputError, match="data_parallel_size"):
        Parallelism(1, True, 0)
    with pytest.raises(InputError, match="data_parallel_size: 3 does not divide the 128 experts"):
        Parallelism(1, True, 3).check(load_model("Qwen3-235B-A22B"))


@pytest.mark.parametrize(("prompts", "slower"), [(False, 1.0), (True, 3.0)])
def test_a_rank_by_hand(prompts, slower):
    """A second for each row's square and expert, three times that in steps with prompts."""
    rows = np.array([0.0, 1.0, 2.0, 4.0, 8.0])
    grid = rows[:, None] ** 2 + np.arange(4.0)
    layer = RankMoE(2, rows, grid, 3.0 * grid)
    for pairs, activated, seconds in (
        (4, 1, 5.0), (2, 2.5, 3.5), (9, 1, 23.0), (12, 3, 43.0), (14, 0, 16 + 0.75 * 48),
        (20, 9, 3 + 64 + 0.5 * 48),
    ):  # fmt: skip
        assert rank_moe_s(layer, pairs, activated, prompts) == pytest.approx(slower * seconds)


def test_a_table_of_ranks_alone_was_measured_with_the_tokens_of_all(qwen):
    """Rows of one of 8 ranks: its eighth of the pairs came from eight times as many tokens."""
    spread = dataclasses.replace(qwen, layer=qwen.layer._replace(tokens_per_row=8))
    few, many = spread.rank_moe(16, 800), qwen.rank_moe(16, 6400)
    np.testing.assert_allclose(few.decode_s[:100], many.decode_s[: 8 * 100 : 8])
