"""MoE layers whose kernel changes its tile: blocks, tiles, tables that fall with the batch."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels.moe_latency import fit_moe_latency, uniform_distinct
from eldr_sim.kernel_profiles.kernels.roofline import moe_latency
from eldr_sim.kernel_profiles.kernels.tiled_moe import (
    TRITON,
    Tile,
    default_tile,
    expert_blocks,
    first_tokens,
    triton_moe,
    tuned_tiles,
    weight_reads,
    workgroups,
)
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.shipped_data import shipped_json
from eldr_sim.kernel_profiles.sources import mi300x
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.kernel_profiles.tables.format import moe_shape
from eldr_sim.kernel_profiles.tables.library import Engine, find_table

from ..on_each import on_each

SIZES = {"max_num_seqs": 128, "max_model_len": 1024, "max_num_batched_tokens": 2048}


@on_each(
    "tokens, tile",
    [
        (1, (16, 64, 128)),
        (32, (16, 64, 128)),
        (33, (32, 64, 128)),
        (64, (32, 64, 128)),
        (65, (32, 128, 64)),
        (96, (32, 128, 64)),
        (97, (64, 128, 64)),
        (512, (64, 128, 64)),
        (513, (128, 128, 64)),
    ],
)
def test_default_tiles_are_those_of_vllm(tokens, tile):
    assert default_tile(tokens) == Tile(*tile)


def test_local_memory_bounds_the_workgroups():
    # 2 bytes x 128 x (16 + 64) = 20 KiB: three fit into 64 KiB, of 24 KiB two, of 48 KiB one.
    assert [workgroups(Tile(m, 64, 128), 65536) for m in (16, 32)] == [3, 2]
    assert workgroups(Tile(128, 64, 128), 65536) == 1
    assert workgroups(Tile(128, 128, 128), 32768) == 1  # never none


@given(mean=st.floats(1.05, 40.0), block_m=st.sampled_from([16, 32, 64]), seed=st.integers(0, 100))
def test_blocks_are_those_of_geometric_rows(mean, block_m, seed):
    rows = np.random.default_rng(seed).geometric(1 / mean, size=40_000)
    drawn = np.ceil(rows / block_m).mean()
    assert expert_blocks(100 * mean, 100, block_m) == pytest.approx(100 * drawn, rel=0.03)


@given(
    st.integers(2, 40), st.integers(1, 60), st.sampled_from([16, 32]), st.sampled_from([1, 4, 32])
)
def test_reads_are_those_of_blocks_in_groups(experts, mean, block_m, group_m):
    """A twin lays blocks out as the kernel does and counts the groups that touch each expert."""
    rng = np.random.default_rng(experts * 1000 + mean)
    blocks, reads = 0, 0
    for _ in range(400):
        rows = rng.geometric(1 / mean, size=experts)
        of_block = np.repeat(np.arange(experts), -(-rows // block_m))
        group = (np.arange(len(of_block)) + rng.integers(group_m)) // group_m
        blocks += len(of_block)
        reads += len(set(zip(group.tolist(), of_block.tolist(), strict=True)))
    found = weight_reads(np.array(blocks), 400 * experts, group_m)
    assert found == pytest.approx(reads, rel=0.03)
    assert 400 * experts <= found <= blocks
    assert weight_reads(np.array(blocks), 400 * experts, 1) == blocks


def _files():
    found = shipped_json("moe_tiles")["bfloat16"]
    return [(gpu, *map(int, shape.split(","))) for gpu, own in found.items() for shape in own]


@on_each("gpu, experts, columns", _files())
def test_each_batch_takes_the_nearest_entry_of_a_tuned_file(gpu, experts, columns):
    tuned = tuned_tiles(gpu, experts, columns)
    firsts = first_tokens(tuned)
    for tokens in range(1, 5000, 3):
        nearest = min(tuned, key=lambda entry: abs(entry - tokens))  # as vLLM chooses
        at = np.searchsorted(firsts, tokens, side="right") - 1
        assert list(tuned)[at] == nearest
    assert all(tile.block_m >= 16 and tile.group_m >= 1 for tile in tuned.values())


def test_the_tuned_files_are_those_of_vllm():
    """Where vLLM is installed, as new as the facts or newer."""
    vllm = pytest.importorskip("vllm")
    folder = Path(vllm.__file__).parent / "model_executor/layers/fused_moe/configs"
    for gpu, experts, columns in _files():
        device = {"MI300X": "AMD_Instinct_MI300X"}[gpu]
        file = folder / f"E={experts},N={columns},device_name={device}.json"
        entries = json.loads(file.read_text())
        for tokens, tile in tuned_tiles(gpu, experts, columns).items():
            names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
            assert tile == tuple(entries[str(tokens)][name] for name in names)


@given(st.sampled_from(_files()), st.integers(1, 3000), st.integers(1, 160))
def test_a_tuned_layer_reads_no_slower_and_never_less_than_it_must(file, tokens, distinct):
    gpu, experts, columns = file
    fields = {"n_experts": experts, "expert_intermediate_size": columns, "top_k": 1}
    model = load_model("Mixtral-8x7B").model_copy(update=fields)
    rates, distinct = TRITON[gpu], min(distinct, experts, tokens)
    layer = triton_moe(model, rates, 0.0, tuned_tiles(gpu, experts, columns))
    seconds = float(layer.time_s(tokens, distinct)) - rates.floor_s
    assert seconds >= 0.999 * distinct * model.bytes_per_expert / rates.most_bandwidth
    default = triton_moe(model, rates, 0.0)
    assert max(layer.read_s) <= max(default.read_s)


@pytest.mark.parametrize(
    ("model", "options", "tiles"),
    [
        ("Mixtral-8x7B", {"parallelism": Parallelism(tensor_parallel_size=2)}, "tuned tiles"),
        ("Mixtral-8x7B", {}, "tuned tiles"),
        ("Qwen1.5-MoE-A2.7B", {}, "tuned tiles"),
        ("GLM-4.5-Air", {}, "default tiles"),
        ("Qwen3-235B-A22B", {}, "default tiles"),
    ],
)
def test_a_result_says_whose_tiles_ran(model, options, tiles):
    made = build_step_time_model(model, "MI300X", **SIZES, **options)
    assert made.provenance["moe"]["kernel_source"] == f"Triton, vLLM's {tiles}"
    assert ("vLLM 0.32.0" in made.provenance["moe"]["origin"]) == (tiles == "tuned tiles")


def test_the_roofline_of_h100_is_that_of_tuned_kernels():
    """Mixtral-8x7B cut in two, us by tokens, its tuned file timed (vllm pull request 24700)."""
    timed = {
        1: 144.03, 2: 229.28, 4: 351.10, 8: 434.98, 16: 471.49, 24: 478.27, 32: 487.35, 48: 487.85,
        64: 483.14, 96: 494.42, 128: 491.39, 256: 536.77, 512: 662.33, 1024: 833.72, 1536: 1122.93,
    }  # fmt: skip
    layer = moe_latency(load_gpu("H100"), Parallelism(2).shard(load_model("Mixtral-8x7B")))
    tokens = np.array(list(timed))
    errors = layer.time_s(tokens, uniform_distinct(tokens, 8, 2)) * 1e6 / list(timed.values()) - 1
    assert np.median(np.abs(errors)) < 0.06
    assert np.abs(errors).max() < 0.23


def test_a_tuned_shape_has_steps_of_its_own():
    """Mixtral-8x7B's file: 32 rows to a block from 57 tokens on, 64 from 113."""
    layer = triton_moe(
        load_model("Mixtral-8x7B"), TRITON["MI300X"], 0.0, tuned_tiles("MI300X", 8, 14336)
    )
    at = {tokens: float(layer.time_s(tokens, 8)) for tokens in (56, 57, 80, 81)}
    assert at[57] > 1.2 * at[56]
    assert at[81] < 0.85 * at[80]


def test_every_expert_with_one_row_fills_one_block():
    assert expert_blocks(8, 8, 16) == pytest.approx(8)
    assert expert_blocks(0, 0, 16) == 0


def test_a_layer_gets_faster_with_more_tokens_where_its_tile_does():
    layer = triton_moe(load_model("Qwen3-30B-A3B"), TRITON["MI300X"], 3.3e-8)
    at = {tokens: float(layer.time_s(tokens, 80)) for tokens in (32, 33, 64, 65)}
    assert at[33] > 1.3 * at[32]
    assert at[65] < 0.75 * at[64]
    # 3 workgroups for 2: what lies above the floor, per block, is as 2 to 3.
    floor = TRITON["MI300X"].floor_s
    blocks = [expert_blocks(tokens * 8, 80, 32) for tokens in (64, 65)]
    ratio = (at[64] - floor) / blocks[0] / ((at[65] - floor) / blocks[1])
    assert ratio == pytest.approx(1.5)


def test_the_floor_is_that_of_the_published_ratio():
    """ELDR Fig. 2: 16 to 128 distinct experts raise the layer's time 4.7 times at batch 64."""
    layer = triton_moe(load_model("Qwen3-30B-A3B"), TRITON["MI300X"], 0.0)
    blocks = [expert_blocks(512, count, 32) for count in (16, 128)]
    low, high = (TRITON["MI300X"].floor_s + n * layer.read_s[1] for n in (16, 128))
    assert high / low == pytest.approx(4.7, abs=0.01)
    assert float(layer.time_s(64, 128)) == pytest.approx(high * blocks[1] / 128, rel=0.01)


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("name", list(mi300x.PUBLISHED))
def test_a_table_holds_the_falls_of_its_layer(name, published):
    table = mi300x.triton_table(name, published)
    fitted = fit_moe_latency(table)
    points = (table.columns["batch"], table.columns["distinct_experts"])
    np.testing.assert_allclose(fitted.time_s(*points), table.columns["latency_s"], rtol=1e-9)
    if load_model(name).expert_dtype == "bfloat16":
        assert fitted.time_s(65, 80) < 0.9 * fitted.time_s(64, 80)
        rank = fitted.rank_grid_s(np.arange(100.0), 128, prompts=False)
        assert rank[65, 80] < 0.9 * rank[64, 80]
        assert (np.diff(rank, axis=1) >= 0).all()


def test_the_shipped_tables_are_those_of_the_source():
    for name in mi300x.PUBLISHED:
        made = mi300x.triton_table(name, fitted_to_cells=True)
        model = load_model(name)
        shape = moe_shape(
            model.hidden_size, model.expert_intermediate_size, model.n_experts, model.top_k
        )
        found = find_table("moe", "MI300X", shape=shape, kernel="triton")
        assert found is not None
        assert found.metadata == made.metadata
        for column, values in made.columns.items():
            if column != "routing":
                np.testing.assert_allclose(found.columns[column], values, rtol=1e-10)


def test_ranks_share_experts_and_pairs_but_not_the_tile():
    layer = triton_moe(load_model("Qwen3-30B-A3B"), TRITON["MI300X"], 0.0)
    rank = layer.on_rank(4)
    assert rank.n_experts == 32
    # 64 tokens send 128 pairs to the rank: 8 rows to each of 16 experts.
    blocks = expert_blocks(128, 16, 32)
    floor_s = TRITON["MI300X"].floor_s
    assert rank.time_s(64, 16) == pytest.approx(floor_s + blocks * layer.read_s[1])
    assert rank.time_s(65, 16) < rank.time_s(64, 16)


def test_the_backend_chooses_the_kernel():
    def kernel(model, **options):
        made = build_step_time_model(model, "MI300X", **SIZES, **options)
        return made.provenance["moe"]

    assert kernel("Qwen3-30B-A3B")["label"] == "fitted"
    assert "Triton" in kernel("Qwen3-30B-A3B")["kernel_source"]
    assert "AITER" in kernel("Qwen3-30B-A3B", moe_backend="aiter")["kernel_source"]
    mixtral = kernel("Mixtral-8x7B")
    assert (mixtral["label"], "Triton" in mixtral["kernel_source"]) == ("derived", True)
    assert "Triton" not in kernel("Mixtral-8x7B", moe_backend="aiter")["kernel_source"]
    with pytest.raises(InputError, match="moe_backend: no rows of marlin's kernel"):
        kernel("Qwen3-30B-A3B", moe_backend="marlin")


def test_a_step_without_graphs_waits_for_its_launches():
    def model(**options):
        return build_step_time_model("Qwen3-30B-A3B", "MI300X", **SIZES, **options)

    graphs, eager = model(), model(enforce_eager=True)
    short = graphs.parts(chunks=[(0, 100)]), eager.parts(chunks=[(0, 100)])
    # 48 layers of 16 kernels: 5 small ones, 3 GEMMs, attention, 7 of the experts.
    assert sum(short[1]) == pytest.approx(48 * 16 * 77e-6)
    assert sum(short[0]) < sum(short[1])
    assert short[1].moe == short[0].moe
    # A step that computes for longer hides them.
    long = [[(0, 1000)] * 10] * 2
    sizes = SIZES | {"max_num_batched_tokens": 10_000}
    both = [
        build_step_time_model("Qwen3-30B-A3B", "MI300X", **sizes, enforce_eager=eager)
        for eager in (False, True)
    ]
    times = [sum(one.parts(chunks=chunks)) for one, chunks in zip(both, long, strict=True)]
    assert times[0] == times[1] > 48 * 16 * 77e-6
    with pytest.raises(InputError, match="enforce_eager"):
        build_step_time_model("Qwen3-30B-A3B", "L40S", **SIZES, enforce_eager=True)


@pytest.mark.parametrize(
    ("model", "launches"),
    [
        # Two norms, activation, attention, four GEMMs.
        ("Llama-3.1-8B", 32 * 8),
        # Latent attention: two norms, eight more, activation, itself, five GEMMs with their scales;
        # a MoE layer's gate, seven of its experts and their scales, two GEMMs of the shared one.
        ("DeepSeek-V3", 61 * (2 + 8 + 1 + 1 + 5 * 2) + 58 * (1 + 7 + 2 + 2 * 2) + 3 * 2 * 2),
    ],
)
def test_prompts_alone_may_wait_for_their_launches(model, launches):
    graphs, eager, unknown = (
        build_step_time_model(
            model, gpu, **SIZES, prompt_graph_tokens=captured, engine=Engine("sglang")
        )
        for gpu, captured in (("H200", None), ("H200", 0), ("L40S", 0))
    )
    host_s = graphs.cost.host_s
    short = eager.parts(batch=4, context=400.0, chunks=[(0, 10)])
    assert sum(short) == pytest.approx(launches * 90e-6 + host_s)
    assert sum(graphs.parts(batch=4, context=400.0, chunks=[(0, 10)])) < sum(short)
    experts = [8.0] * graphs.n_moe_layers
    alone = [one.parts(batch=4, context=400.0, activated=experts) for one in (graphs, eager)]
    assert alone[0] == alone[1]
    assert unknown.cost.prompt_launch_s == 0
