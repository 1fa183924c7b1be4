"""Balanced and vanilla K-means against exhaustive search."""

from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from eldr_sim.errors import InputError
from eldr_sim.policies.eldr.clustering import assign, kmeans
from eldr_sim.policies.eldr.signature import METHODS, unit_rows


def rng(seed=0):
    return np.random.default_rng(seed)


def points(n, d, seed):
    return unit_rows(rng(seed).gamma(0.4, 1.0, (n, d)))


def planted(sizes, d_each=4, noise=0.05, seed=0):
    """Groups on disjoint blocks of axes, of the given sizes, in random order."""
    r = rng(seed)
    group = r.permutation(np.repeat(np.arange(len(sizes)), sizes))
    rows = r.random((len(group), d_each * len(sizes))) * noise
    for index, g in enumerate(group):
        rows[index, g * d_each : (g + 1) * d_each] += r.random(d_each) * 0.3 + 1.0
    return unit_rows(rows), group


def partitions(n, k):
    """Every assignment of n points to k clusters of at most ceil(n / k)."""
    for labels in product(range(k), repeat=n):
        labels = np.array(labels)
        if np.bincount(labels, minlength=k).max() <= -(-n // k):
            yield labels


def partition_cost(x, labels):
    """Total cosine distance with every cluster's best centroid: n - sum of |member sums|."""
    return len(x) - sum(np.linalg.norm(x[labels == c].sum(axis=0)) for c in set(labels.tolist()))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 2**32))
def test_assignment_is_optimal(n, k, seed):
    x, centroids = points(n, 5, seed), points(k, 5, seed + 1)
    labels, cost = assign(x, centroids, balanced=True)
    distance = 1 - x @ centroids.T
    assert np.bincount(labels, minlength=k).max() <= -(-n // k)
    assert cost == pytest.approx(distance[np.arange(n), labels].sum(), abs=1e-8)
    best = min(distance[np.arange(n), other].sum() for other in partitions(n, k))
    assert cost == pytest.approx(best, abs=1e-8)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 200), st.integers(1, 24), st.integers(0, 2**32))
@example(1000, 16, 0)
@example(90, 89, 1)
def test_assignment_costs_what_the_hungarian_method_finds(n, k, seed):
    k = min(n, k)
    near = rng(seed).gamma(0.2, 3.0, (4, 12))[rng(seed).integers(0, 4, n)]  # points in clusters
    x = unit_rows(near + rng(seed + 1).gamma(0.4, 1.0, (n, 12)))
    centroids = x[rng(seed).choice(n, k, replace=False)]
    labels, cost = assign(x, centroids, balanced=True)
    places = -(-n // k)
    distance = np.rint((1 - x @ centroids.T) * 1e9)
    rows, place = linear_sum_assignment(np.repeat(distance, places, axis=1))
    assert np.bincount(labels, minlength=k).max() <= places
    assert cost * 1e9 == pytest.approx(distance[rows, place // places].sum(), abs=0.5)


@settings(max_examples=25, deadline=None)
@given(st.integers(3, 7), st.integers(1, 3), st.integers(0, 2**32))
def test_clustering_is_a_bounded_local_optimum(n, k, seed):
    x = points(n, 6, seed)
    found = kmeans(x, k, rng(seed))
    assert np.bincount(found.labels, minlength=k).max() <= -(-n // k)
    np.testing.assert_allclose((found.centroids**2).sum(axis=1), 1.0, atol=1e-6)
    # Neither the assignment nor the centroids can be improved alone ...
    assert found.cost == pytest.approx(assign(x, found.centroids, balanced=True)[1], abs=1e-9)
    assert found.cost == pytest.approx(partition_cost(x, found.labels), abs=1e-6)
    # ... and no partition at all beats it by magic.
    assert found.cost >= min(partition_cost(x, labels) for labels in partitions(n, k)) - 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_clustering_finds_the_global_optimum_of_small_sets(seed):
    x = points(8, 4, seed)
    best = min(partition_cost(x, labels) for labels in partitions(8, 2))
    assert kmeans(x, 2, rng(seed), restarts=30).cost == pytest.approx(best, abs=1e-6)


def test_planted_groups_are_recovered():
    x, group = planted([10, 10, 10, 10])
    found = kmeans(x, 4, rng())
    assert {len(set(group[found.labels == c])) for c in range(4)} == {1}
    assert np.bincount(found.labels).tolist() == [10] * 4


def test_a_dense_group_is_split_and_no_cluster_overflows():
    x, group = planted([28, 4, 4, 4])
    found = kmeans(x, 4, rng())
    sizes = np.bincount(found.labels, minlength=4)
    assert sizes.max() <= 10
    assert sum(0 in group[found.labels == c] for c in range(4)) >= 3


def test_centroids_are_the_directions_of_their_members():
    x, _ = planted([9, 7, 8], noise=0.5)
    found = kmeans(x, 3, rng())
    for c in range(3):
        direction = x[found.labels == c].sum(axis=0)
        np.testing.assert_allclose(
            found.centroids[c], direction / np.linalg.norm(direction), atol=1e-6
        )


def test_clusters_are_numbered_by_their_first_point():
    found = kmeans(points(30, 8, 3), 5, rng())
    firsts = [int(np.flatnonzero(found.labels == c)[0]) for c in range(5)]
    assert firsts == sorted(firsts)


def test_one_cluster_and_as_many_as_points():
    x = points(9, 6, 0)
    assert kmeans(x, 1, rng()).labels.tolist() == [0] * 9
    alone = kmeans(x, 9, rng())
    assert sorted(alone.labels.tolist()) == list(range(9))
    assert alone.cost == pytest.approx(0.0, abs=1e-6)


def test_copies_of_one_point_fill_all_clusters():
    x = np.repeat(points(1, 6, 0), 12, axis=0)
    found = kmeans(x, 4, rng())
    assert np.bincount(found.labels).tolist() == [3, 3, 3, 3]
    assert (found.centroids == x[:4]).all()


def test_zero_rows_are_carried_but_move_nothing():
    x, _ = planted([6, 6])
    found = kmeans(x, 2, rng())
    padded = kmeans(np.vstack([x, np.zeros((4, x.shape[1]))]), 2, rng())
    np.testing.assert_array_equal(padded.centroids, found.centroids)
    assert np.bincount(padded.labels).tolist() == [8, 8]


def test_more_zero_rows_than_places_leave_unit_centroids():
    x = np.vstack([points(1, 5, 0), np.zeros((7, 5))])
    found = kmeans(x, 4, rng())
    np.testing.assert_allclose((found.centroids**2).sum(axis=1), 1.0, atol=1e-6)


@given(st.integers(0, 2**32))
@example(122)  # in these two a cluster is left with nothing while the cost still falls
@example(147)
def test_centroids_stay_of_unit_length_among_copies_and_zeros(seed):
    r = rng(seed)
    n, k, d = int(r.integers(5, 14)), int(r.integers(3, 5)), int(r.integers(2, 5))
    x = unit_rows(r.integers(0, 3, (n, d)) * (r.random((n, 1)) < 0.6))
    if x.any():
        found = kmeans(x, k, r, restarts=1)
        np.testing.assert_allclose((found.centroids**2).sum(axis=1), 1.0, atol=1e-6)


def test_result_does_not_depend_on_the_order_of_summation():
    x = points(80, 2000, 5)
    shuffled = rng(9).permutation(2000)
    a, b = kmeans(x, 8, rng(1)), kmeans(x[:, shuffled], 8, rng(1))
    assert a.labels.tolist() == b.labels.tolist()
    assert a.cost == b.cost
    assert (a.centroids[:, shuffled] == b.centroids).all()


def test_refusals():
    x = points(4, 3, 0)
    for k in (0, 5):
        with pytest.raises(InputError, match="clusters"):
            kmeans(x, k, rng())
    with pytest.raises(InputError, match="all are zero"):
        kmeans(np.zeros((4, 3)), 2, rng())
    with pytest.raises(InputError, match=r"clustering: .*'median' \(allowed: balanced, vanilla\)"):
        kmeans(points(4, 3, 0), 2, rng(), "median")


# -- vanilla -----------------------------------------------------------------------------------


@given(st.integers(1, 30), st.integers(1, 6), st.integers(0, 2**32))
def test_nearest_assignment_never_costs_more_than_the_balanced_one(n, k, seed):
    x, centroids = points(n, 5, seed), points(k, 5, seed + 1)
    labels, cost = assign(x, centroids, balanced=False)
    similar = x @ centroids.T
    np.testing.assert_allclose(similar[np.arange(n), labels], similar.max(axis=1), atol=1e-9)
    assert cost == pytest.approx((1 - similar.max(axis=1)).sum(), abs=1e-8)
    assert cost <= assign(x, centroids, balanced=True)[1]


@settings(max_examples=25, deadline=None)
@given(st.integers(3, 7), st.integers(1, 3), st.integers(0, 2**32))
def test_vanilla_is_a_local_optimum(n, k, seed):
    x = points(n, 6, seed)
    found = kmeans(x, k, rng(seed), "vanilla")
    np.testing.assert_allclose((found.centroids**2).sum(axis=1), 1.0, atol=1e-6)
    assert found.cost == assign(x, found.centroids, balanced=False)[1]
    assert found.cost == pytest.approx(partition_cost(x, found.labels), abs=1e-6)
    everything = (np.array(labels) for labels in product(range(k), repeat=n))
    assert found.cost >= min(partition_cost(x, labels) for labels in everything) - 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_vanilla_finds_the_global_optimum_of_small_sets(seed):
    x = points(8, 4, seed)
    best = min(partition_cost(x, np.array(labels)) for labels in product(range(2), repeat=8))
    assert kmeans(x, 2, rng(seed), "vanilla", restarts=30).cost == pytest.approx(best, abs=1e-6)


def test_vanilla_recovers_groups_of_unequal_sizes_where_balanced_is_capped():
    x, group = planted([28, 4, 4, 4])
    vanilla, balanced = kmeans(x, 4, rng(), "vanilla"), kmeans(x, 4, rng(), "balanced")
    assert sorted(np.bincount(vanilla.labels).tolist()) == [4, 4, 4, 28]
    assert {len(set(group[vanilla.labels == c])) for c in range(4)} == {1}
    assert np.bincount(balanced.labels).max() == 10
    # Here, where vanilla finds the optimum; it is a theorem only for equal centroids.
    assert vanilla.cost < balanced.cost


def test_methods_draw_the_same_seeds_and_default_to_balanced():
    x = points(20, 6, 1)
    generators = [rng(5) for _ in METHODS]
    for method, generator in zip(METHODS, generators, strict=True):
        kmeans(x, 4, generator, method)
    assert generators[0].random() == generators[1].random()
    assert (kmeans(x, 4, rng(5)).labels == kmeans(x, 4, rng(5), "balanced").labels).all()


def test_vanilla_keeps_a_centroid_that_holds_nothing():
    x = np.repeat(points(2, 6, 0), [5, 3], axis=0)
    found = kmeans(x, 4, rng(), "vanilla")
    assert np.bincount(found.labels, minlength=4).tolist() == [5, 3, 0, 0]
    np.testing.assert_allclose((found.centroids**2).sum(axis=1), 1.0, atol=1e-6)
    assert found.cost == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_opposite_directions_are_told_apart(method):
    direction = unit_rows(rng(2).normal(size=(1, 8)))
    x = unit_rows(np.repeat(direction, 10, axis=0) + 0.05 * rng(3).normal(size=(10, 8)))
    x[5:] *= -1
    found = kmeans(x, 2, rng(), method, restarts=1)
    assert found.labels.tolist() == [0] * 5 + [1] * 5
