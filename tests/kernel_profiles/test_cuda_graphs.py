"""Steps padded to the sizes of CUDA graphs."""

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.steps.cuda_graphs import grown, pad, padded_sizes
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model


def test_sizes_are_those_that_vllm_captures():
    sizes = padded_sizes(1024, 8192)
    assert len(sizes) == 513
    captured = sorted(set(sizes[1:].tolist()))
    assert captured == [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert all(size == min(c for c in captured if c >= n) for n, size in enumerate(sizes) if n)


@pytest.mark.parametrize(
    ("seqs", "budget", "largest"), [(1, 2048, 2), (20, 2048, 40), (64, 100, 96), (3, 8192, 4)]
)
def test_no_graph_is_larger_than_twice_the_seats_or_the_budget(seqs, budget, largest):
    assert padded_sizes(seqs, budget)[-1] == largest


@pytest.mark.parametrize("experts", [8, 128])
def test_more_rows_activate_as_many_experts_as_drawing_them_does(experts):
    """Uniform routing: n rows of k experts activate E (1 - (1 - k/E)^n) on average."""
    for rows, more in ((1, 2), (5, 8), (17, 24), (250, 256)):
        expected = [experts * (1 - (1 - 2 / experts) ** n) for n in (rows, more)]
        found = grown(np.array([expected[0]]), experts, more / rows)
        assert found[0] == pytest.approx(expected[1])
    assert grown(np.arange(experts + 1.0), experts, 1.0) == pytest.approx(np.arange(experts + 1))


@pytest.fixture(scope="module")
def models():
    def build(padding):
        return build_step_time_model(
            "Qwen3-30B-A3B", "H100", max_num_seqs=40, max_model_len=512,
            max_num_batched_tokens=128, cudagraph_padding=padding,
        )  # fmt: skip

    return {name: build(name) for name in ("none", "dense", "experts")}


def test_a_captured_size_takes_what_it_took(models):
    for batch, chunks in ((8, ()), (40, ()), (16, ((0, 8),)), (0, ((0, 80),)), (20, ((0, 100),))):
        activated = [30.0] * 48
        parts = [
            m.parts(batch, 100.0 * batch, chunks, activated, rows=batch or 1)
            for m in models.values()
        ]
        assert parts[0] == parts[1] == parts[2]


def test_padding_rows_go_through_gemms_and_perhaps_experts(models):
    """17 rows run in the graph of 24: the dense part of 24, attention and lm_head of 17."""
    none, dense, experts = (m.parts(17, 1700.0, (), [60.0] * 48) for m in models.values())
    larger = models["none"].parts(24, 1700.0, (), [60.0] * 48)
    assert (dense.dense, dense.collectives) == (larger.dense, larger.collectives)
    assert (dense.moe, dense.attention, dense.head) == (none.moe, none.attention, none.head)
    assert experts == dense._replace(moe=experts.moe)
    more = 128 * (1 - (1 - 60 / 128) ** (24 / 17))
    wanted = models["none"].parts(24, 1700.0, (), [more] * 48).moe
    assert experts.moe == pytest.approx(wanted)
    assert experts.moe > none.moe


def test_collectives_take_as_long_as_those_of_the_graph(models):
    cost = models["none"].cost
    cost = cost._replace(collectives_s=np.arange(len(cost.dense_s), dtype=float))
    padded = pad(cost, "dense", padded_sizes(64, 2048)).collectives_s
    assert padded[[1, 3, 17, 128]].tolist() == [1, 4, 24, 128]


def test_no_step_gets_shorter(models):
    before, *after = (m.cost for m in models.values())
    for cost in after:
        for name in ("dense_s", "collectives_s", "moe_s", "mixed_moe_s", "uniform_moe_s"):
            assert (getattr(cost, name) >= getattr(before, name) - 1e-12).all()


def test_a_misspelt_padding_is_refused(models):
    with pytest.raises(InputError, match="cudagraph_padding"):
        pad(models["none"].cost, "all", padded_sizes(4, 8))


def test_a_step_without_tokens_replays_no_graph():
    sizes = padded_sizes(64, 2048)
    assert sizes[:6].tolist() == [0, 1, 2, 4, 4, 8]
