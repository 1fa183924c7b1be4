"""Groups of experts against the best of all groupings, and planted ones."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from eldr_sim.errors import InputError
from eldr_sim.policies.placement.grouping import (
    bounded_groups,
    size_deviation,
    spectral_groups,
    swap_experts,
    utilization,
)


def random_affinity(rng, n_experts, tokens=60, top_k=3):
    """Co-activation of tokens that choose among experts of unequal popularity."""
    popular = rng.gamma(1.0, size=n_experts) + 0.05
    chosen = np.zeros((tokens, n_experts))
    for row in chosen:
        row[rng.choice(n_experts, top_k, replace=False, p=popular / popular.sum())] = 1
    affinity = chosen.T @ chosen
    np.fill_diagonal(affinity, 0.0)
    return affinity


def planted(rng, n_groups, size):
    """Tokens stay within groups of equal size; the experts' names are shuffled."""
    groups = rng.permutation(np.arange(n_groups * size) // size)
    affinity = np.where(groups[:, None] == groups, rng.integers(5, 9), 0.0)
    np.fill_diagonal(affinity, 0.0)
    return affinity, groups


def groupings(n_experts, n_groups, low, high):
    for labels in itertools.product(range(n_groups), repeat=n_experts - 1):
        found = np.array([0, *labels])
        sizes = np.bincount(found, minlength=n_groups)
        if low <= sizes.min() and sizes.max() <= high:
            yield found


def partition(groups):
    return {frozenset(np.flatnonzero(groups == d)) for d in set(groups.tolist())}


@pytest.mark.parametrize(("n_experts", "n_groups", "away"), [(8, 2, 0), (8, 2, 2), (9, 3, 1)])
def test_no_heuristic_beats_the_best_grouping(n_experts, n_groups, away):
    rng = np.random.default_rng(n_experts + away)
    equal = n_experts // n_groups
    low, high = equal - away, equal + away
    every = list(groupings(n_experts, n_groups, low, high))
    gaps = []
    for _ in range(6):
        affinity = random_affinity(rng, n_experts)
        best = max(utilization(affinity, g) for g in every)
        found = bounded_groups(
            affinity, spectral_groups(affinity, n_groups, rng), n_groups, low, high
        )
        sizes = np.bincount(found, minlength=n_groups)
        assert low <= sizes.min()
        assert sizes.max() <= high
        swapped = swap_experts(affinity, found, n_groups)
        assert utilization(affinity, found) <= utilization(affinity, swapped) <= best + 1e-12
        assert np.bincount(swapped, minlength=n_groups).tolist() == sizes.tolist()
        gaps.append(best - utilization(affinity, swapped))
    if away == 0:  # swaps see every grouping of equal sizes
        assert np.mean(gaps) < 0.02


def test_equal_groups_of_twelve_lie_below_the_integer_program():
    rng, n, d = np.random.default_rng(5), 12, 2
    affinity = random_affinity(rng, n, tokens=120)
    pairs = list(itertools.combinations(range(n), 2))
    # x[e]: expert e is in group 1; same[p] <= 1 - |x[i] - x[j]|.
    cost = np.r_[np.zeros(n), [-affinity[i, j] for i, j in pairs]]
    rows = []
    for p, (i, j) in enumerate(pairs):
        for sign in (1, -1):
            row = np.zeros(n + len(pairs))
            row[[i, j, n + p]] = sign, -sign, 1
            rows.append(row)
    half = np.r_[np.ones(n), np.zeros(len(pairs))]
    answer = milp(
        cost,
        constraints=[
            LinearConstraint(np.array(rows), -np.inf, 1),
            LinearConstraint(half, n // 2, n // 2),
        ],
        integrality=np.r_[np.ones(n), np.zeros(len(pairs))],
        bounds=Bounds(0, 1),
    )
    assert answer.success
    best = -answer.fun / (affinity.sum() / 2)
    start = bounded_groups(affinity, spectral_groups(affinity, d, rng), d, n // d, n // d)
    found = utilization(affinity, swap_experts(affinity, start, d))
    assert found <= best + 1e-9
    assert found > best - 0.02


@given(n_groups=st.integers(1, 5), size=st.integers(2, 7), seed=st.integers(0, 2**32))
def test_planted_groups_are_found(n_groups, size, seed):
    rng = np.random.default_rng(seed)
    affinity, groups = planted(rng, n_groups, size)
    found = spectral_groups(affinity, n_groups, rng)
    assert partition(found) == partition(groups)
    assert utilization(affinity, found) == 1.0
    assert size_deviation(found, n_groups) == 0.0
    same = bounded_groups(affinity, found, n_groups, size, size)
    assert partition(swap_experts(affinity, same, n_groups)) == partition(groups)


def test_swaps_mend_planted_groups():
    rng = np.random.default_rng(1)
    affinity, groups = planted(rng, 4, 8)
    shuffled = rng.permutation(groups)
    assert partition(swap_experts(affinity, shuffled, 4)) == partition(groups)


@given(
    n_experts=st.integers(2, 20),
    n_groups=st.integers(1, 5),
    low=st.integers(0, 4),
    more=st.integers(0, 8),
    seed=st.integers(0, 2**32),
)
def test_sizes_keep_their_bounds(n_experts, n_groups, low, more, seed):
    rng, high = np.random.default_rng(seed), low + more
    affinity = random_affinity(rng, n_experts, tokens=10, top_k=min(2, n_experts))
    groups = rng.integers(n_groups, size=n_experts)
    if not low * n_groups <= n_experts <= high * n_groups:
        with pytest.raises(InputError, match="group sizes"):
            bounded_groups(affinity, groups, n_groups, low, high)
        return
    found = bounded_groups(affinity, groups, n_groups, low, high)
    sizes = np.bincount(found, minlength=n_groups)
    assert low <= sizes.min()
    assert sizes.max() <= high
    before = np.bincount(groups, minlength=n_groups)
    if low <= before.min() and before.max() <= high:
        np.testing.assert_array_equal(found, groups)


def test_experts_that_nobody_chooses_have_a_group():
    rng = np.random.default_rng(0)
    affinity = np.zeros((6, 6))
    assert spectral_groups(affinity, 3, rng).tolist() == [0, 0, 1, 1, 2, 2]
    affinity[0, 1] = affinity[1, 0] = affinity[2, 3] = affinity[3, 2] = 4
    found = spectral_groups(affinity, 2, rng)
    assert found[0] == found[1] != found[2] == found[3]
    assert utilization(np.zeros((3, 3)), np.zeros(3, np.int64)) == 1.0
    with pytest.raises(InputError, match="7 groups of 6 experts"):
        spectral_groups(affinity, 7, rng)


def test_equal_streams_give_equal_groups_and_signs_do_not_matter(monkeypatch):
    affinity = random_affinity(np.random.default_rng(3), 32, tokens=500)
    one = spectral_groups(affinity, 4, np.random.default_rng(9))
    eigh = np.linalg.eigh

    def turned(matrix):
        values, vectors = eigh(matrix)
        return values, vectors * np.where(np.arange(len(values)) % 2, 1.0, -1.0) * (1 + 1e-13)

    monkeypatch.setattr(np.linalg, "eigh", turned)
    other = spectral_groups(affinity, 4, np.random.default_rng(9))
    np.testing.assert_array_equal(one, other)
