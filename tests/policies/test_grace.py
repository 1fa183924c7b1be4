"""GRACE-MoE's placement: its formulas in words, conservation, and what a permutation keeps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.placement.base import EMPTY, ExpertGroup, Placement
from eldr_sim.policies.placement.grace import (
    balance_ranks,
    cluster_hierarchy,
    equal_groups,
    group_layer,
    hot_copies,
    knee,
    replicated,
)
from eldr_sim.policies.placement.grouping import utilization
from eldr_sim.traces.routing.calibration import calibration_set
from eldr_sim.traces.routing.coactivation import affinity_of
from eldr_sim.traces.routing.format import open_trace

from .test_grouping import random_affinity


@st.composite
def loads(draw):
    n_ranks = draw(st.integers(1, 6))
    n_experts = draw(st.integers(n_ranks, 24))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ranks = rng.permutation(np.r_[np.arange(n_ranks), rng.integers(n_ranks, size=n_experts)])
    return np.ceil(100 * rng.gamma(draw(st.sampled_from([0.1, 1.0])), size=len(ranks))), ranks


@given(loads(), st.sampled_from(["dynamic", "fixed"]))
def test_copies_are_the_papers_in_words(case, replication):
    load, ranks = case
    n_ranks = int(ranks.max()) + 1
    found = hot_copies(load, ranks, n_ranks, replication)
    w = [sum(load[ranks == r]) for r in range(n_ranks)]
    if n_ranks == 1:
        assert len(found.experts) == 0
        return
    heaviest = w.index(max(w))
    rho = w[heaviest] / (sum(w) / n_ranks)
    n = min(max(1, int(rho + 1e-9)), n_ranks - 1) if replication == "dynamic" else 1
    order = sorted(np.flatnonzero(ranks == heaviest), key=lambda e: (-load[e], e))
    hot, total = [], 0.0
    for expert in order:
        hot.append(expert)
        total += load[expert]
        if total > w[heaviest] * n / (n + 1) + 1e-6:
            break
    assert found.experts.tolist() == hot
    others = sorted((r for r in range(n_ranks) if r != heaviest), key=lambda r: (w[r], r))
    assert found.ranks.tolist() == others[:n]


@given(loads(), st.sampled_from(["dynamic", "fixed", "none"]))
def test_predicted_loads_sum_to_the_load(case, replication):
    load, ranks = case
    n_ranks = int(ranks.max()) + 1
    found = hot_copies(load, ranks, n_ranks, replication)
    assert found.load.sum() == pytest.approx(load.sum())
    # Eq. 3 as printed creates what the heaviest rank has beside its copied experts.
    w = np.bincount(ranks, weights=load, minlength=n_ranks)
    n, copied = len(found.ranks), load[found.experts].sum()
    if n:
        printed = load.sum() - copied + (n + 1) * (w.max() / (n + 1))
        assert printed - load.sum() == pytest.approx(w.max() - copied)


@given(loads())
def test_dynamic_is_fixed_below_twice_the_mean(case):
    load, ranks = case
    n_ranks = int(ranks.max()) + 1
    w = np.bincount(ranks, weights=load, minlength=n_ranks)
    dynamic, fixed = (hot_copies(load, ranks, n_ranks, how) for how in ("dynamic", "fixed"))
    same = all(np.array_equal(a, b) for a, b in zip(dynamic, fixed, strict=True))
    assert same == (w.max() < 2 * w.mean() or n_ranks <= 2)


@st.composite
def placements(draw):
    n_nodes, gpus = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    n_ranks, layers = n_nodes * gpus, draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    groups = np.stack(
        [rng.permutation(np.r_[np.arange(n_ranks), rng.integers(n_ranks, size=12)])] * layers
    )
    groups = rng.permuted(groups, axis=1)
    load = rng.gamma(0.5, size=groups.shape)
    replication = draw(st.sampled_from(["dynamic", "none"]))
    return groups, load, n_ranks, n_nodes, replication


@given(placements())
def test_balanced_ranks_keep_who_shares_a_gpu_and_a_node(case):
    groups, load, n_ranks, n_nodes, replication = case
    placement = replicated(*case)
    n_experts, gpus = groups.shape[1], n_ranks // n_nodes
    assert (placement.instances(n_experts) >= 1).all()
    for layer in range(len(groups)):
        primary = placement.rank[layer, :n_experts]
        to = dict(zip(groups[layer].tolist(), primary.tolist(), strict=True))
        assert len(set(to.values())) == len(to)
        assert [to[g] for g in groups[layer].tolist()] == primary.tolist()
        nodes = {(g // gpus, r // gpus) for g, r in to.items()}
        assert len(nodes) == n_nodes
        copies = hot_copies(load[layer], groups[layer], n_ranks, replication)
        used = placement.expert[layer] != EMPTY
        pairs = set(zip(placement.expert[layer][used], placement.rank[layer][used], strict=True))
        expected = {(e, to[groups[layer, e]]) for e in range(n_experts)}
        expected |= {(e, to[r]) for e in copies.experts for r in copies.ranks}
        assert pairs == expected
        for rank, predicted in enumerate(copies.load):
            assert placement.load[layer, to[rank]] == predicted


@given(placements())
def test_instances_differ_no_more_over_all_layers_than_in_the_worst_one(case):
    placement = replicated(*case)
    one = balance_ranks(placement, 1)
    slots = one.slots()
    assert np.ptp(slots.sum(axis=0)) <= np.ptp(slots, axis=1).max()


def test_the_knee_is_farthest_above_the_chord():
    x = np.array([0.0, 1.0, 2.0, 4.0])
    assert knee(x, np.array([0.0, 0.8, 0.9, 1.0])) == 1
    assert knee(x, x) == 0
    assert knee(np.zeros(3), np.zeros(3)) == 0


@pytest.mark.parametrize(("n_ranks", "n_nodes"), [(1, 1), (4, 1), (4, 2), (6, 2), (8, 8)])
def test_every_gpu_has_experts_within_the_bounds_of_its_node(n_ranks, n_nodes):
    rng = np.random.default_rng(n_ranks)
    affinity = random_affinity(rng, 50, tokens=900, top_k=4)
    clusters = cluster_hierarchy(affinity, n_ranks, n_nodes, rng)
    gpus = n_ranks // n_nodes
    for ratio in (0.0, 0.25, 1.0):
        ranks = group_layer(affinity, clusters, ratio)
        sizes = np.bincount(ranks, minlength=n_ranks).reshape(n_nodes, gpus)
        for of_node in sizes:
            equal = int(of_node.sum()) // gpus
            away = max(1, int(equal * ratio + 0.5))
            assert of_node.min() >= max(1, equal - away)
            assert of_node.max() <= max(equal + away, -(-int(of_node.sum()) // gpus))
        np.testing.assert_array_equal(ranks // gpus, clusters.node)


CALIBRATION = calibration_set(open_trace("gpt-oss-20b"), workload="trace")


def placed(name, n_ranks, n_nodes, seed=0, **group):
    context = PolicyContext(4, np.random.default_rng(seed), CALIBRATION)
    return registry.placement_policy(name, context).place(
        ExpertGroup((0,), 24, 32, n_ranks, n_nodes=n_nodes, **group)
    )


def test_affinity_keeps_equal_sizes_and_more_tokens_together_than_neighbours():
    affinity = affinity_of(CALIBRATION.coactivation())
    for name in ("affinity", "grace:replication=none"):
        found = placed(name, 4, 2)
        inside = [utilization(a, r) for a, r in zip(affinity, found.rank, strict=True)]
        linear = [utilization(a, np.arange(32) // 8) for a in affinity]
        assert np.mean(inside) > 1.5 * np.mean(linear)
        if name == "affinity":
            assert (found.slots() == 8).all()
    one, again = (equal_groups(affinity[0], 4, 2, np.random.default_rng(0)) for _ in range(2))
    assert one.tobytes() == again.tobytes()
    assert np.bincount(one).tolist() == [8] * 4


def test_one_device_holds_everything_once():
    for name in ("affinity", "grace"):
        found = placed(name, 1, 1)
        assert not found.rank.any()
        assert (found.instances(32) == 1).all()


@pytest.mark.parametrize(
    ("name", "group", "message"),
    [
        ("grace", {"n_redundant": 4}, "num_redundant_experts: 'grace' decides itself"),
        ("affinity", {"n_ranks": 3}, "3 ranks cannot hold 32 experts equally"),
        ("grace", {"n_ranks": 64}, "cannot spread 32 experts over 64 GPUs"),
        ("grace", {"n_layers": 3}, "knows 24 layers of 32 experts"),
        ("grace:ratio=2", {}, "expert_placement.ratio"),
    ],
)
def test_what_cannot_be_placed_is_refused(name, group, message):
    with pytest.raises(InputError, match=message):
        registry.placement_policy(
            name, PolicyContext(1, np.random.default_rng(0), CALIBRATION)
        ).place(ExpertGroup((0,), **({"n_layers": 24, "n_experts": 32, "n_ranks": 4} | group)))


def test_empty_slots_are_no_instances():
    placement = Placement(np.array([[0, 1, 0], [1, 0, EMPTY]]), np.array([[0, 1, 1], [0, 1, 0]]), 2)
    assert placement.instances(2).tolist() == [[2, 1], [1, 1]]
    assert placement.slots().tolist() == [[1, 2], [1, 1]]
    assert placement.has_expert(2)[1].tolist() == [[False, True], [True, False]]


def test_resolution_trades_affinity_for_an_even_load():
    rng = np.random.default_rng(0)
    affinity = random_affinity(rng, 32, tokens=3000, top_k=4)
    load = affinity.sum(axis=1)
    inside, busiest = [], []
    for resolution in (0.0, 1.0, 4.0):
        found = equal_groups(affinity, 4, 2, np.random.default_rng(0), resolution)
        inside.append(utilization(affinity, found))
        busiest.append(np.bincount(found, weights=load).max() / load.sum())
    assert inside[0] > inside[1] > inside[2]
    assert busiest[0] > busiest[1] > busiest[2]
