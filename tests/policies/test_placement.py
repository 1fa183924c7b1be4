"""Expert placement: what holds for every placement, and how far greedy is from the best."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eldr_sim.errors import InputError
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.placement.base import ExpertGroup, Placement, greedy_placement
from eldr_sim.simulator.setup.replay import rank_masks
from eldr_sim.traces.routing.bitsets import pack_bits

from ..random_artifact import random_artifact


@st.composite
def activations(draw):
    n_ranks = draw(st.integers(1, 8))
    room = draw(st.integers(1, 8))
    shape = (*draw(st.lists(st.integers(1, 3), max_size=2)), n_ranks * room)
    return draw(hnp.arrays(float, shape, elements=st.floats(0, 1, width=32))), n_ranks


def loads(activation, placed, n_ranks):
    return np.array([activation[placed == rank].sum() for rank in range(n_ranks)])


def slow_greedy(activation, n_ranks):
    """The rule of ELDR Sec. 5 in words."""
    weights = [round(float(a), 9) for a in activation]
    room = len(weights) // n_ranks
    ranks = [[] for _ in range(n_ranks)]
    placed = [0] * len(weights)
    for expert in sorted(range(len(weights)), key=lambda e: (-weights[e], e)):
        rank = min(
            (r for r in range(n_ranks) if len(ranks[r]) < room),
            key=lambda r: (np.round(np.add.reduce(np.array([0.0, *ranks[r]])), 9), r),
        )
        ranks[rank].append(weights[expert])
        placed[expert] = rank
    return placed


def best_load(activation, n_ranks):
    """The least possible load of the busiest rank, by trying every equal split."""
    if n_ranks == 1:
        return sum(activation)
    room = len(activation) // n_ranks
    first, rest = activation[0], activation[1:]
    return min(
        max(
            first + sum(rest[i] for i in with_first),
            best_load([a for i, a in enumerate(rest) if i not in with_first], n_ranks - 1),
        )
        for with_first in itertools.combinations(range(len(rest)), room - 1)
    )


def linear():
    return registry.placement_policy("linear", PolicyContext(2, np.random.default_rng(0)))


@given(activations())
def test_every_rank_gets_equally_many_experts_of_every_layer(case):
    activation, n_ranks = case
    placed = greedy_placement(activation, n_ranks)
    assert placed.shape == activation.shape
    room = activation.shape[-1] // n_ranks
    for row in placed.reshape(-1, activation.shape[-1]):
        assert np.bincount(row, minlength=n_ranks).tolist() == [room] * n_ranks


@given(activations())
def test_greedy_is_the_rule_of_the_paper(case):
    activation, n_ranks = case
    dyadic = np.round(activation * 1024) / 1024  # sums are exact, so ties are ties for both
    placed = greedy_placement(dyadic, n_ranks)
    width = activation.shape[-1]
    for row, expected in zip(dyadic.reshape(-1, width), placed.reshape(-1, width), strict=True):
        assert slow_greedy(row, n_ranks) == expected.tolist()


@given(hnp.arrays(int, st.integers(1, 5).map(lambda n: 2 * n), elements=st.integers(0, 1023)))
def test_two_experts_a_rank_are_placed_best(activation):
    """Greedy folds: the largest meets the smallest, which is the best split into pairs."""
    n_ranks = len(activation) // 2
    greedy = loads(activation, greedy_placement(activation, n_ranks), n_ranks).max()
    assert greedy == best_load(activation.tolist(), n_ranks)


def test_gap_to_the_best_placement_is_small():
    """Eight to twelve experts of skewed activation: what greedy leaves on the table, measured."""
    rng = np.random.default_rng(0)
    gaps = []
    for n_ranks, room in ((2, 4), (2, 6), (3, 4), (4, 3)):
        for _ in range(20):
            activation = rng.gamma(0.5, size=n_ranks * room)
            greedy = loads(activation, greedy_placement(activation, n_ranks), n_ranks).max()
            gaps.append(greedy / best_load(activation.tolist(), n_ranks) - 1)
    assert min(gaps) >= -1e-9
    assert np.mean(gaps) < 0.02
    assert max(gaps) < 0.2


def test_two_hot_neighbours_are_parted():
    activation = np.array([0.9, 0.8, 0.1, 0.2])
    group = ExpertGroup(engines=(0,), n_layers=1, n_experts=4, n_ranks=2)
    assert linear().place(group).rank.tolist() == [[0, 0, 1, 1]]
    assert greedy_placement(activation, 2).tolist() == [0, 1, 0, 1]


def test_last_bits_do_not_decide():
    tiny = np.array([0.5, 0.5 + 1e-13, 0.3, 0.3 - 1e-13])
    assert greedy_placement(tiny, 2).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("activation", "n_ranks", "message"),
    [
        ([0.5, 0.5, 0.5], 2, "2 ranks cannot hold 3 experts"),
        ([0.5, 0.5], 0, "0 ranks"),
        ([0.5, -0.1], 2, "negative"),
        ([0.5, np.nan], 2, "not finite"),
    ],
)
def test_what_cannot_be_placed_is_refused(activation, n_ranks, message):
    with pytest.raises(InputError, match=message):
        greedy_placement(np.array(activation), n_ranks)


@given(
    workers=st.integers(1, 3),
    layers=st.integers(1, 4),
    n_experts=st.sampled_from([4, 64, 68, 128]),
    n_layers=st.integers(1, 9),
    seed=st.integers(0, 2**32),
)
def test_masks_hold_each_ranks_experts_on_the_replayed_layers(
    workers, layers, n_experts, n_layers, seed
):
    n_ranks = 4
    rng = np.random.default_rng(seed)
    ranks = rng.permuted(
        np.broadcast_to(np.arange(n_experts) % n_ranks, (workers, layers, n_experts)), axis=2
    )
    placements = [Placement.of_ranks(of_worker, n_ranks) for of_worker in ranks]
    masks = rank_masks(placements, n_experts, n_layers).reshape(workers, n_ranks, n_layers, -1)
    for w, rank, layer in np.ndindex(workers, n_ranks, n_layers):
        held = np.flatnonzero(ranks[w, layer % layers] == rank)
        expected = pack_bits(held[None, None].astype(np.uint8), n_experts)[0, 0]
        assert masks[w, rank, layer].tolist() == expected.tolist()


def test_workers_of_fewer_ranks_have_empty_masks():
    ranks = np.arange(8)[None] % 4
    placements = [Placement.of_ranks(ranks, 4), Placement.of_ranks(np.zeros((1, 8), int), 1)]
    masks = rank_masks(placements, 8, 2)
    assert masks.shape == (2, 4, 2)
    assert masks[1].tolist() == [[255, 255], [0, 0], [0, 0], [0, 0]]


def test_instances_of_an_expert_are_all_held():
    placement = Placement(np.array([[0, 1, 0]]), np.array([[0, 1, 1]]), 2)
    assert placement.has_expert(2).tolist() == [[[True, False], [True, True]]]
    twice = Placement(np.array([[0, 0, 1, 0]]), np.array([[0, 0, 1, 1]]), 2)
    assert twice.has_expert(2).tolist() == [[[True, False], [True, True]]]


@given(
    n_experts=st.integers(1, 12),
    per_rank=st.integers(1, 6),
    n_ranks=st.integers(1, 6),
    n_layers=st.integers(1, 2),
)
def test_linear_begins_again_with_redundant_experts(n_experts, per_rank, n_ranks, n_layers):
    """vLLM's order: [all experts, redundant experts], of which each rank has a run."""
    assume(per_rank * n_ranks >= n_experts)
    redundant = per_rank * n_ranks - n_experts
    placement = linear().place(ExpertGroup((0,), n_layers, n_experts, n_ranks, redundant))
    order = [*range(n_experts), *(i % n_experts for i in range(redundant))]
    assert placement.expert.tolist() == [order] * n_layers
    ranks = [rank for rank in range(n_ranks) for _ in range(per_rank)]
    assert placement.rank.tolist() == [ranks] * n_layers
    assert placement.has_expert(n_experts).any(axis=1).all()


@pytest.mark.parametrize(
    ("experts", "ranks", "redundant", "message"),
    [
        (6, 4, 1, "num_redundant_experts: 4 ranks cannot hold 6 experts and 1 redundant"),
        (6, 4, -2, "num_redundant_experts: 4 ranks cannot hold 6 experts and -2 redundant"),
        (6, 4, 0, "n_ranks: 4 ranks cannot hold 6 experts"),
    ],
)
def test_unequal_ranks_are_refused(experts, ranks, redundant, message):
    with pytest.raises(InputError, match=message):
        linear().place(ExpertGroup((0,), 1, experts, ranks, redundant))


def test_eldr_has_no_redundant_experts():
    artifact = random_artifact(2, n_layers=1, n_experts=8)
    context = PolicyContext(2, np.random.default_rng(0), artifact=artifact)
    eldr = registry.placement_policy("eldr", context)
    assert eldr.place(ExpertGroup((1,), 1, 8, 4)).has_expert(8).sum() == 8
    with pytest.raises(InputError, match=r"^num_redundant_experts: 'eldr' places one") as caught:
        eldr.place(ExpertGroup((1,), 1, 8, 4, n_redundant=4))
    assert "\n" not in str(caught.value)


def test_eldr_places_the_cluster_of_a_group():
    artifact = random_artifact(2, n_layers=1, n_experts=8)
    activation = np.array([[[9, 8, 1, 1, 1, 1, 1, 1]], [[1, 1, 1, 1, 1, 1, 8, 9]]]) / 10
    object.__setattr__(artifact, "cluster_activation", activation)
    context = PolicyContext(6, np.random.default_rng(0), artifact=artifact, group_size=3)
    eldr = registry.placement_policy("eldr", context)
    for number, engines in enumerate((range(3), range(3, 6))):
        placed = eldr.place(ExpertGroup(engines, 1, 8, 2)).rank
        assert placed.tolist() == greedy_placement(activation[number], 2).tolist()


def test_eldr_places_the_mean_of_the_clusters_of_a_groups_engines():
    artifact = random_artifact(4, n_layers=1, n_experts=8)
    activation = np.random.default_rng(0).random((4, 1, 8))
    object.__setattr__(artifact, "cluster_activation", activation)
    context = PolicyContext(4, np.random.default_rng(0), artifact=artifact, group_size=2)
    eldr = registry.placement_policy("eldr", context)
    for number, engines in enumerate((range(2), range(2, 4))):
        mean = activation[2 * number : 2 * number + 2].mean(axis=0)
        placed = eldr.place(ExpertGroup(engines, 1, 8, 2)).rank
        assert placed.tolist() == greedy_placement(mean, 2).tolist()


def test_placements_by_name():
    context = PolicyContext(2, np.random.default_rng(0))
    placement = linear().place(ExpertGroup(engines=(1,), n_layers=3, n_experts=8, n_ranks=4))
    assert placement.rank.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]] * 3
    assert placement.expert.tolist() == [list(range(8))] * 3
    with pytest.raises(InputError, match=r"^expert_placement: .*has no clusters"):
        registry.placement_policy("eldr", context)
    with pytest.raises(InputError, match=r"^expert_placement: unknown policy 'jsq'"):
        registry.placement_policy("jsq", context)
