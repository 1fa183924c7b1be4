"""The grid of a MoE layer, and routing forced onto its points. No torch needed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.profile.grid import (
    FORCED,
    MoEPoint,
    distinct_range,
    expert_loads,
    forced_logits,
    forced_routing,
    held_out,
    moe_levels,
)

LAYERS = [(128, 8, 1), (128, 4, 1), (64, 8, 1), (8, 2, 1), (128, 8, 4), (6, 6, 1)]


@st.composite
def points(draw):
    """A layer, its ranks, and a point that its batch can reach."""
    ranks = draw(st.sampled_from([1, 2, 4]))
    owned = draw(st.integers(1, 24))
    top_k = draw(st.integers(1, owned))
    batch = draw(st.integers(1, 40))
    low, high = distinct_range(batch, owned * ranks, top_k, ranks)
    point = MoEPoint(batch, draw(st.integers(low, high)), draw(st.sampled_from([0.0, 0.6, 3.0])))
    return owned * ranks, top_k, ranks, point


@given(points(), st.integers(0, 5))
def test_routing_has_exactly_the_experts_of_its_point(layer, seed):
    n_experts, top_k, ranks, point = layer
    rng = np.random.default_rng(seed)
    ids = forced_routing(point, n_experts, top_k, rng, n_ranks=ranks)
    assert ids.shape == (point.batch, top_k)
    assert ids.min() >= 0
    assert ids.max() < n_experts
    assert (np.diff(np.sort(ids, axis=1), axis=1) > 0).all()  # no token picks an expert twice
    own = ids[ids < n_experts // ranks]
    assert len(np.unique(own)) == point.distinct
    if ranks == 1:
        loads = np.sort(np.bincount(ids.ravel())[np.unique(ids)])[::-1]
        wanted = expert_loads(point.batch * top_k, point.distinct, point.batch, point.skew)
        np.testing.assert_array_equal(loads, wanted)


def test_one_rank_gets_its_share_of_the_pairs():
    ids = forced_routing(MoEPoint(64, 32), 128, 8, np.random.default_rng(0), n_ranks=4)
    assert np.count_nonzero(ids < 32) == 64 * 8 // 4


def test_named_experts_are_the_ones_chosen():
    chosen = np.array([7, 3, 11, 5, 2])
    ids = forced_routing(MoEPoint(9, 4), 12, 3, np.random.default_rng(0), experts=chosen)
    assert set(np.unique(ids)) == {7, 3, 11, 5}


@given(
    st.integers(1, 60).flatmap(
        lambda distinct: st.tuples(
            st.just(distinct), st.integers(1, 50), st.floats(0, 1), st.floats(0, 4)
        )
    )
)
def test_loads_fill_their_bounds_and_grow_more_uneven_with_skew(case):
    distinct, batch, share, skew = case
    pairs = distinct + round(share * distinct * (batch - 1))
    loads = expert_loads(pairs, distinct, batch, skew)
    even = expert_loads(pairs, distinct, batch)
    assert loads.sum() == even.sum() == pairs
    assert loads.min() >= 1
    assert loads.max() <= batch
    assert even.max() - even.min() <= 1
    assert (loads**2).sum() >= (even**2).sum()  # even loads have the least sum of squares


def test_a_zipf_load_follows_its_law_where_no_bound_holds():
    loads = expert_loads(1000, 10, 1000, 1.0)
    np.testing.assert_allclose(loads / loads[0], 1 / np.arange(1, 11), atol=0.01)


@pytest.mark.parametrize("distinct", [7, 33])
def test_counts_that_no_routing_reaches_are_refused(distinct):
    with pytest.raises(InputError, match="8 to 32"):
        forced_routing(MoEPoint(4, distinct), 128, 8, np.random.default_rng(0))
    with pytest.raises(InputError, match="pairs"):
        expert_loads(9, 10, 4)


@pytest.mark.parametrize(("n_experts", "top_k", "ranks"), LAYERS)
def test_levels_refine_and_cover_the_whole_grid(n_experts, top_k, ranks):
    levels = moe_levels(n_experts, top_k, ranks, (1024, 4096))
    flat = [point for level in levels for point in level]
    assert len(set(flat)) == len(flat)
    for point in flat:
        low, high = distinct_range(point.batch, n_experts, top_k, ranks)
        assert low <= point.distinct <= high
    first = {p.batch for p in levels[0]}
    assert {1, 4, 16, 64, 256, 1024} <= first
    for level in levels:
        for batch in {p.batch for p in level if p.skew == 0 and p.batch <= 512}:
            low, high = distinct_range(batch, n_experts, top_k, ranks)
            found = {p.distinct for p in flat if p.batch == batch}
            assert {low, high} <= found
    assert {p.skew for p in levels[2]} <= {0.6, 1.2}


def test_a_fifth_is_held_out_and_never_the_end_of_a_row():
    flat = [point for level in moe_levels(128, 8) for point in level]
    hidden = held_out(flat)
    even = [point for point in flat if point.skew == 0]
    assert len(hidden) == len(even) // 5
    for point in hidden:
        row = [other.distinct for other in even if other.batch == point.batch]
        assert min(row) < point.distinct < max(row)
    assert held_out(flat[::-1]) == hidden


def test_logits_force_the_ids():
    rng = np.random.default_rng(3)
    ids = forced_routing(MoEPoint(20, 11, 1.2), 40, 5, rng)
    logits = forced_logits(ids, 40, rng)
    top = np.argsort(-logits, axis=1)[:, :5]
    np.testing.assert_array_equal(np.sort(top, axis=1), np.sort(ids, axis=1))


def test_a_point_names_its_routing():
    assert MoEPoint(4, 8).routing == FORCED
    assert MoEPoint(4, 8, 1.2).routing == "forced_zipf_1.2"
