"""EPLB: the published example, a twin in words, the best placement by trying all, conservation."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.placement.base import ExpertGroup
from eldr_sim.policies.placement.eplb import balance, replicate
from eldr_sim.traces.routing.calibration import CalibrationSet

# The example of the README of github.com/deepseek-ai/EPLB, commit d52c72d: the loads of two layers,
# and the experts of 16 slots on 8 GPUs of 2 nodes for 4 groups of experts.
PUBLISHED_LOAD = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
PUBLISHED_EXPERTS = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def group(n_layers, n_experts, n_ranks, n_redundant=0, n_nodes=1, n_expert_groups=1):
    return ExpertGroup((0,), n_layers, n_experts, n_ranks, n_redundant, n_nodes, n_expert_groups)


@st.composite
def cases(draw):
    """Loads that are no ties, and a group that they fit."""
    n_nodes = draw(st.integers(1, 3))
    n_ranks = n_nodes * draw(st.integers(1, 3))
    n_groups = draw(st.integers(1, 6))
    n_experts = n_groups * draw(st.integers(1, 4))
    per_rank = -(-n_experts // n_ranks) + draw(st.integers(0, 3))
    n_layers = draw(st.integers(1, 2))
    load = np.random.default_rng(draw(st.integers(0, 2**32))).gamma(0.5, size=(n_layers, n_experts))
    return load, group(
        n_layers, n_experts, n_ranks, per_rank * n_ranks - n_experts, n_nodes, n_groups
    )


def rank_loads(load, placement):
    """The load of every rank, [layers, ranks], where instances share an expert's load evenly."""
    total = np.zeros((len(load), placement.n_ranks))
    for layer, slot in np.ndindex(placement.expert.shape):
        expert = placement.expert[layer, slot]
        instances = (placement.expert[layer] == expert).sum()
        total[layer, placement.rank[layer, slot]] += load[layer, expert] / instances
    return total


def spread(weights, n_bins):
    """The items of each bin, as the most loaded goes to the least loaded bin that has room."""
    bins = [[] for _ in range(n_bins)]
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        room = [b for b in range(n_bins) if len(bins[b]) < len(weights) // n_bins]
        bins[min(room, key=lambda b: sum(weights[i] for i in bins[b]))].append(item)
    return bins


def twin(load, g):
    """The experts of each slot of one layer, by the README's words."""
    size = g.n_experts // g.n_expert_groups
    groups = [list(range(first, first + size)) for first in range(0, g.n_experts, size)]
    nodes = [list(range(g.n_experts))]
    if g.n_expert_groups % g.n_nodes == 0:
        packed = spread([sum(load[e] for e in members) for members in groups], g.n_nodes)
        nodes = [sorted(e for i in node for e in groups[i]) for node in packed]
    slots = []
    for experts in nodes:
        instances = list(experts)
        for _ in range(g.n_redundant // len(nodes)):
            instances.append(max(experts, key=lambda e: load[e] / instances.count(e)))
        each = [load[e] / instances.count(e) for e in instances]
        for rank in spread(each, g.n_ranks // len(nodes)):
            slots += [instances[i] for i in rank]
    return slots


def test_the_published_example():
    g = group(2, 12, 8, n_redundant=4, n_nodes=2, n_expert_groups=4)
    placement = balance(np.array(PUBLISHED_LOAD), g)
    assert placement.expert.tolist() == PUBLISHED_EXPERTS
    assert placement.rank.tolist() == [[slot // 2 for slot in range(16)]] * 2
    assert [twin(load, g) for load in PUBLISHED_LOAD] == PUBLISHED_EXPERTS


@given(cases())
def test_the_rule_in_words(case):
    load, g = case
    assert balance(load, g).expert.tolist() == [twin(layer, g) for layer in load]


@given(cases())
def test_every_expert_has_an_instance_every_rank_equally_many_and_no_load_is_lost(case):
    load, g = case
    placement = balance(load, g)
    assert placement.expert.shape == placement.rank.shape
    assert placement.expert.shape == (g.n_layers, g.n_experts + g.n_redundant)
    assert placement.has_expert(g.n_experts).any(axis=1).all()
    for ranks in placement.rank:
        counts = np.bincount(ranks, minlength=g.n_ranks)
        assert counts.tolist() == [g.slots_per_rank] * g.n_ranks
    np.testing.assert_allclose(rank_loads(load, placement).sum(axis=1), load.sum(axis=1))


@given(cases())
def test_groups_stay_on_one_node_where_nodes_divide_them(case):
    load, g = case
    placement = balance(load, g)
    if g.n_expert_groups % g.n_nodes == 0:
        node = placement.rank // (g.n_ranks // g.n_nodes)
        of_group = placement.expert // (g.n_experts // g.n_expert_groups)
        for layer in range(g.n_layers):
            pairs = set(zip(of_group[layer].tolist(), node[layer].tolist(), strict=True))
            assert len(pairs) == g.n_expert_groups
    else:
        alone = balance(load, g._replace(n_nodes=1, n_expert_groups=1))
        assert placement.expert.tolist() == alone.expert.tolist()


@given(
    n_experts=st.integers(1, 8),
    n_redundant=st.integers(0, 9),
    loads=st.lists(st.integers(1, 50), min_size=8, max_size=8),
)
def test_copies_make_the_hottest_instance_as_cool_as_can_be(n_experts, n_redundant, loads):
    """The rule is that of D'Hondt's seats, which minimise the largest load per seat."""
    load = np.array([loads[:n_experts]], np.float64)
    instance, count = replicate(load, n_redundant)
    assert np.bincount(instance[0]).tolist() == count[0].tolist()
    assert count.sum() == n_experts + n_redundant
    hottest = (load / count).max()
    # With instances strictly cooler than that, each expert needs more than load / hottest.
    needed = sum(int(np.floor(x / hottest + 1e-9)) + 1 for x in load[0])
    assert needed > n_experts + n_redundant


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**32))
def test_without_redundancy_on_one_node_it_is_longest_processing_time(n_ranks, per_rank, seed):
    load = np.random.default_rng(seed).gamma(0.5, size=(2, n_ranks * per_rank))
    placement = balance(load, group(2, n_ranks * per_rank, n_ranks))
    for row, layer in enumerate(load):
        assert placement.expert[row].reshape(n_ranks, -1).tolist() == spread(layer, n_ranks)


@given(cases(), st.integers(0, 2**32))
def test_permuted_experts_give_the_same_loads(case, seed):
    load, g = case
    g = g._replace(n_expert_groups=1, n_nodes=1)
    order = np.random.default_rng(seed).permutation(g.n_experts)
    before, after = (rank_loads(x, balance(x, g)) for x in (load, load[:, order]))
    np.testing.assert_allclose(np.sort(before), np.sort(after))


def best_load(load, n_slots, n_ranks):
    """The least possible load of the busiest rank, by trying all copies on all equal ranks."""
    best = np.inf
    for copies in itertools.combinations_with_replacement(range(len(load)), n_slots - len(load)):
        instances = [*range(len(load)), *copies]
        each = [load[e] / instances.count(e) for e in instances]
        best = min(best, least_busiest(each, n_ranks))
    return best


def least_busiest(each, n_ranks):
    if n_ranks == 1:
        return sum(each)
    first, *rest = each
    return min(
        max(
            first + sum(rest[i] for i in mates),
            least_busiest([x for i, x in enumerate(rest) if i not in mates], n_ranks - 1),
        )
        for mates in itertools.combinations(range(len(rest)), len(each) // n_ranks - 1)
    )


def test_gap_to_the_best_placement_is_small():
    """Six experts on 8 slots of 2 GPUs: never better than the best, and not far from it."""
    rng = np.random.default_rng(0)
    for shape in (0.5, 2.0):
        load = rng.gamma(shape, size=(100, 6))
        g = group(100, 6, 2, n_redundant=2)
        busiest = rank_loads(load, balance(load, g)).max(axis=1)
        gaps = busiest / [best_load(row.tolist(), 8, 2) for row in load] - 1
        assert gaps.min() >= -1e-9
        assert gaps.mean() < 0.03
        assert gaps.max() < 0.12


def test_two_instances_may_share_a_rank():
    """As in the published algorithm: one expert has nearly all load, and four of the six slots."""
    placement = balance(np.array([[90.0, 1.0, 1.0]]), group(1, 3, 2, n_redundant=3))
    assert placement.expert.tolist() == [[0, 0, 1, 0, 0, 2]]
    assert placement.rank.tolist() == [[0, 0, 0, 1, 1, 1]]
    assert placement.has_expert(3).tolist() == [[[True, True, False], [True, False, True]]]


def test_the_ranks_of_a_large_model_are_balanced():
    load = np.random.default_rng(0).gamma(0.5, size=(58, 256))
    placement = balance(load, group(58, 256, 32, n_redundant=32))
    loads = rank_loads(load, placement)
    assert (loads.max(axis=1) / loads.mean(axis=1)).mean() < 1.01


# -- the policy ----------------------------------------------------------------------------------


def calibration(**values):
    rng = np.random.default_rng(1)
    fields = {
        "counts": rng.integers(0, 9, (5, 2, 8)).astype(np.uint16),
        "decode_activation": rng.random((5, 2, 8), np.float32),
        "domain": np.zeros(5, np.int16),
        "domains": ["all"],
        "requests": np.arange(5),
        "trace_checksum": "",
    }
    return CalibrationSet(**(fields | values))


def eplb(choice="eplb", **values):
    context = PolicyContext(2, np.random.default_rng(0), calibration=calibration(**values))
    return registry.placement_policy(choice, context)


def test_the_load_is_that_of_the_calibration_requests():
    g = group(2, 8, 4, n_redundant=4)
    requests = calibration()
    for choice, load in (
        ("eplb", requests.decode_activation.mean(axis=0, dtype=np.float64)),
        ("eplb:load=prompt", requests.counts.sum(axis=0) / 5),
    ):
        assert eplb(choice).place(g).expert.tolist() == balance(load, g).expert.tolist()
    assert eplb().place(g).expert.tolist() != eplb("eplb:load=prompt").place(g).expert.tolist()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_redundant": 3}, "num_redundant_experts: 4 ranks cannot hold 8 experts and 3"),
        ({"n_ranks": 3}, "n_ranks: 3 ranks cannot hold 8 experts"),
        ({"n_nodes": 3}, "n_nodes: 3 cannot have equal shares of 4 ranks"),
        ({"n_expert_groups": 3}, "n_expert_groups: 3 cannot have equal shares of 8 experts"),
        ({"n_layers": 3}, "expert_placement: 'eplb' knows the load of 2 layers of 8 experts"),
    ],
)
def test_what_cannot_be_placed_is_refused(changed, message):
    with pytest.raises(InputError, match=message):
        eplb().place(group(2, 8, 4)._replace(**changed))


def test_what_it_needs():
    with pytest.raises(InputError, match=r"^expert_placement: 'eplb' needs calibration requests"):
        registry.placement_policy("eplb", PolicyContext(2, np.random.default_rng(0)))
    with pytest.raises(InputError, match=r"expert_placement\.load: .*decode-only"):
        eplb("eplb:load=prompt", counts=None)
    with pytest.raises(InputError, match=r"expert_placement\.load: 'both'"):
        eplb("eplb:load=both")
    with pytest.raises(InputError, match="negative"):
        balance(np.array([[1.0, -1.0]]), group(1, 2, 2))
