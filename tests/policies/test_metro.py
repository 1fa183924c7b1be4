"""Choices by activated experts: maximum flow and brute force as oracles, and the paper's claims."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.steps.cost_tables import RankMoE
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.placement.base import ExpertGroup, Placement
from eldr_sim.policies.placement.eplb import balance
from eldr_sim.policies.replicas.metro import walk

ONE_INSTANCE = "metro", "metro_sorted", "optimal"


def times(expert_s=1.0, pair_s=1e-6, knots=9, slots=200):
    """A rank's time: so much an activated expert and a pair."""
    rows = np.arange(float(knots))
    table = rows[:, None] * pair_s + np.arange(slots + 1.0) * expert_s
    return RankMoE(1, rows, table, table)


def policy(name, moe=None):
    context = PolicyContext(1, np.random.default_rng(0), rank_moe=moe or times())
    return registry.replica_choice(name, context)


def instances(name, tokens, placement, **options):
    """Return the ranks that compute each expert with tokens, in turn."""
    slots = policy(name, options.pop("moe", None)).instances(tokens, placement, 0, **options)
    return {
        int(e): placement.rank[0][slots[e][slots[e] >= 0]].tolist() for e in np.flatnonzero(tokens)
    }


def activated(chosen, tokens, n_ranks):
    """Return how many experts each rank activates."""
    count = np.zeros(n_ranks, int)
    for expert, ranks in chosen.items():
        for rank in set(ranks[: tokens[expert]]):
            count[rank] += 1
    return count


@st.composite
def cases(draw, n_experts=24, n_ranks=6):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n_experts, n_ranks = draw(st.integers(1, n_experts)), draw(st.integers(1, n_ranks))
    extra = draw(st.integers(0, 2 * n_experts))
    expert = rng.permutation([*range(n_experts), *rng.integers(n_experts, size=extra)])
    placement = Placement(expert[None], rng.integers(n_ranks, size=(1, len(expert))), n_ranks)
    return rng.integers(0, draw(st.integers(2, 9)), n_experts), placement


def max_flow_bound(tokens, placement):
    """Return METRO's optimum by its own way: maximum flow for a growing capacity of the ranks."""
    active = np.flatnonzero(tokens)
    held = placement.has_expert(len(tokens))[0]  # [ranks, experts]
    n_ranks, n = len(held), len(active)
    source, sink = n + n_ranks, n + n_ranks + 1
    for bound in range(n + 1):
        graph = np.zeros((sink + 1, sink + 1), np.int32)
        graph[source, :n] = 1
        graph[:n, n : n + n_ranks] = held[:, active].T
        graph[n : n + n_ranks, sink] = bound
        if maximum_flow(csr_matrix(graph), source, sink).flow_value == n:
            return bound
    raise AssertionError("every expert has an instance")


@given(cases())
def test_optimal_is_maximum_flow(case):
    tokens, placement = case
    chosen = instances("optimal", tokens, placement)
    count = activated(chosen, tokens, placement.n_ranks)
    assert count.max(initial=0) == max_flow_bound(tokens, placement)
    assert count.sum() == (tokens > 0).sum()  # one instance each


@given(cases(n_experts=6, n_ranks=3))
def test_optimal_is_the_best_of_all_choices(case):
    tokens, placement = case
    held = placement.has_expert(len(tokens))[0]
    homes = [np.flatnonzero(held[:, e]).tolist() for e in np.flatnonzero(tokens)]
    best = min(np.bincount(ranks, minlength=1).max() if ranks else 0 for ranks in product(*homes))
    chosen = instances("optimal", tokens, placement)
    assert activated(chosen, tokens, placement.n_ranks).max(initial=0) == best


@given(cases())
def test_no_choice_activates_fewer_on_the_fullest_rank_than_optimal(case):
    """Each is a feasible solution of min-exp-routing (METRO Sec. IV-A). Nothing orders the others:

    an expert of few tokens may use the luckier of its instances under ``even``.
    """
    tokens, placement = case
    least = activated(instances("optimal", tokens, placement), tokens, placement.n_ranks)
    for name in ("even", "metro", "metro_sorted", "time_aware"):
        count = activated(instances(name, tokens, placement), tokens, placement.n_ranks)
        assert count.max(initial=0) >= least.max(initial=0), name


@given(cases())
def test_how_many_instances_compute(case):
    """The activated instances: one an expert, or as many as the even split has."""
    tokens, placement = case
    active = tokens[tokens > 0]
    for name in ONE_INSTANCE:
        chosen = instances(name, tokens, placement)
        assert activated(chosen, tokens, placement.n_ranks).sum() == len(active), name
        assert all(len(ranks) == 1 for ranks in chosen.values())
    held = placement.instances(len(tokens))[0][tokens > 0]
    lists = instances("even", tokens, placement).values()
    assert [len(ranks) for ranks in lists] == held.tolist()
    used = [min(t, len(ranks)) for t, ranks in zip(active, lists, strict=True)]
    assert sum(used) == np.minimum(active, held).sum()


@pytest.mark.parametrize("name", [*ONE_INSTANCE, "time_aware", "even"])
@given(case=cases(), top_k=st.integers(1, 4), prompts=st.booleans())
def test_every_pair_goes_to_an_instance_of_its_expert(name, case, top_k, prompts):
    """Pairs are kept, and no token comes to a rank that lacks its expert."""
    tokens, placement = case
    n_experts, rng = len(tokens), np.random.default_rng(len(tokens))
    top_k = min(top_k, n_experts)
    experts = np.array([rng.choice(n_experts, top_k, replace=False) for _ in range(30)], np.int64)
    home = np.sort(rng.integers(placement.n_ranks, size=30))
    node = np.zeros(placement.n_ranks, int)
    slots = policy(name).choose(home, experts, placement, 0, node, prompts)
    assert slots.shape == experts.shape
    assert (placement.expert[0][slots] == experts).all()


@given(cases())
def test_steps_with_prompts_split_evenly(case):
    tokens, placement = case
    for name in ONE_INSTANCE:
        assert instances(name, tokens, placement, prompts=True) == instances(
            "even", tokens, placement
        )


@given(cases(), st.randoms(use_true_random=False))
def test_what_experts_and_ranks_are_called_does_not_matter_to_the_optimum(case, random):
    tokens, placement = case
    experts, ranks = list(range(len(tokens))), list(range(placement.n_ranks))
    random.shuffle(experts)
    random.shuffle(ranks)
    other = Placement(
        np.array(experts)[placement.expert], np.array(ranks)[placement.rank], placement.n_ranks
    )
    renamed = np.empty_like(tokens)
    renamed[experts] = tokens
    counts = [
        activated(instances("optimal", t, p), t, p.n_ranks).max(initial=0)
        for t, p in ((tokens, placement), (renamed, other))
    ]
    assert counts[0] == counts[1]


@given(st.integers(2, 300), st.integers(0, 60), st.integers(0, 2**32))
def test_metros_order_meets_every_expert_once(n_experts, layer, seed):
    active = np.random.default_rng(seed).random(n_experts) < 0.5
    start, stride = walk(active, layer)
    order = (start + stride * np.arange(n_experts)) % n_experts
    assert sorted(order) == list(range(n_experts))


def served(ratio=1.5, n_experts=128, n_ranks=8, skew=1.0, seed=0):
    """EPLB's placement of experts with lognormal loads, and the chance of each expert."""
    rng = np.random.default_rng(seed)
    load = np.exp(skew * rng.standard_normal(n_experts))
    redundant = int((ratio - 1) * n_experts)
    placement = balance(load[None], ExpertGroup((), 1, n_experts, n_ranks, redundant))
    return rng, load / load.sum(), placement


def batch(rng, share, n, top_k=8):
    """Return the tokens of each expert, of n tokens with top_k experts each."""
    keys = np.log(share) + rng.gumbel(size=(n, len(share)))
    return np.bincount(np.argsort(-keys, axis=1)[:, :top_k].ravel(), minlength=len(share))


def fullest(name, tokens, placement):
    return activated(instances(name, tokens, placement), tokens, placement.n_ranks).max()


def test_metros_order_is_as_good_as_a_random_one():
    """Its threads race for locks: any order may happen, and ours stands for all."""
    rng, share, placement = served()
    held, apart = placement.has_expert(128)[0], []
    for _ in range(60):
        tokens = batch(rng, share, 32)
        found = []
        for _ in range(20):
            count = np.zeros(8, int)
            for expert in rng.permutation(np.flatnonzero(tokens)):
                homes = np.flatnonzero(held[:, expert])
                count[homes[np.argmin(count[homes])]] += 1
            found.append(count.max())
        apart.append(fullest("metro", tokens, placement) - np.mean(found))
    assert abs(np.mean(apart)) < 3 * np.std(apart) / np.sqrt(len(apart))


def test_the_order_of_the_choices_on_eplbs_placements():
    """Figure 8: optimal, METRO a little above it, EPLB's split far above."""
    mean = {}
    for name in ("optimal", "metro_sorted", "metro", "even"):
        rng, share, placement = served()
        mean[name] = np.mean([fullest(name, batch(rng, share, 32), placement) for _ in range(25)])
    assert mean["optimal"] <= mean["metro_sorted"] <= mean["metro"] < mean["even"]
    assert mean["metro"] / mean["optimal"] < 1.2


@pytest.mark.parametrize("ratio", [1.125, 1.5])
def test_a_saturated_batch_activates_all_instances_or_all_experts(ratio):
    """Then the fullest rank has ratio * N / G experts under an even split, N / G at the optimum."""
    _, _, placement = served(ratio)
    tokens = np.full(128, 50)
    twice = sum(
        len(ranks) - len(set(ranks)) for ranks in instances("even", tokens, placement).values()
    )
    even = activated(instances("even", tokens, placement), tokens, 8)
    assert even.sum() == ratio * 128 - twice  # two instances on one rank are one expert there
    best = activated(instances("optimal", tokens, placement), tokens, 8)
    assert best.sum() == 128
    assert best.max() == max_flow_bound(tokens, placement)
    assert 1 - best.max() / even.max() <= 1 - 1 / ratio + 0.02


def test_with_every_expert_everywhere_the_experts_are_shared_out():
    expert = np.tile(np.arange(20), 4)
    placement = Placement(expert[None], np.arange(4).repeat(20)[None], 4)
    rng = np.random.default_rng(0)
    for _ in range(20):
        tokens = rng.integers(0, 3, 20)
        least = -(-(tokens > 0).sum() // 4)
        for name in ONE_INSTANCE:
            count = activated(instances(name, tokens, placement), tokens, 4)
            assert count.max() == least, name
        even = instances("even", tokens, placement)
        assert activated(even, tokens, 4).sum() == np.minimum(tokens, 4).sum()


def test_time_decides_between_one_instance_and_a_split():
    """Where experts cost, one instance; where pairs cost, as even a split as can be."""
    rng, share, placement = served(seed=3)
    tokens = batch(rng, share, 256)
    memory = instances("time_aware", tokens, placement, moe=times(expert_s=1.0, pair_s=1e-9))
    assert all(len(ranks) == 1 for ranks in memory.values())
    least = activated(instances("optimal", tokens, placement), tokens, 8).max()
    assert activated(memory, tokens, 8).max() <= least + 1

    def most_pairs(chosen):
        pairs = np.zeros(8)
        for expert, ranks in chosen.items():
            for turn in range(tokens[expert]):
                pairs[ranks[turn % len(ranks)]] += 1
        return pairs.max()

    compute = instances("time_aware", tokens, placement, moe=times(expert_s=1e-9, pair_s=1.0))
    assert any(len(ranks) > 1 for ranks in compute.values())
    assert most_pairs(compute) <= most_pairs(instances("even", tokens, placement))


def test_time_aware_needs_times():
    placement = Placement(np.array([[0, 0]]), np.array([[0, 1]]), 2)
    built = registry.replica_choice("time_aware", PolicyContext(1, np.random.default_rng(0)))
    with pytest.raises(InputError, match="time_aware: it needs the times"):
        built.instances(np.array([3]), placement, 0)
