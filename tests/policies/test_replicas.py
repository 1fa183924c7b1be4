"""Replica choices: twins in plain Python, conservation, an even split, and what vLLM's hash is."""

from collections import Counter, defaultdict
from importlib.metadata import EntryPoint
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.stats import chisquare

from eldr_sim.errors import InputError
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.placement.base import ExpertGroup, Placement
from eldr_sim.policies.placement.eplb import balance
from eldr_sim.policies.replicas.base import ReplicaChoice
from eldr_sim.policies.replicas.weighted import draws

NAMES = ("even", "hash", "source", "weighted", "local_first")
LEVELLED = ("lplb", "waterfill", "capped")


def chosen(name, home, experts, placement, layer, node):
    policy = registry.replica_choice(name, PolicyContext(1, np.random.default_rng(0)))
    slots = policy.choose(np.array(home, np.int64), experts, placement, layer, np.array(node))
    assert slots.shape == experts.shape
    return slots


@st.composite
def cases(draw, copies=9):
    """Tokens of several ranks, and a placement of every expert and some copies, in any order."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n_ranks, n_experts = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    layers, layer = 2, draw(st.integers(0, 1))
    extra = draw(st.integers(0, copies))
    slots = [
        rng.permutation([*range(n_experts), *rng.integers(n_experts, size=extra)])
        for _ in range(layers)
    ]
    rank = rng.integers(n_ranks, size=(layers, n_experts + extra))
    load = np.round(rng.gamma(1.0, size=(layers, n_ranks)), int(rng.integers(4)))
    placement = Placement(np.array(slots), rank, n_ranks, load)
    tokens, top_k = draw(st.integers(0, 20)), draw(st.integers(1, n_experts))
    experts = np.array(
        [rng.choice(n_experts, top_k, replace=False) for _ in range(tokens)], np.int64
    ).reshape(tokens, top_k)
    home = rng.integers(n_ranks, size=tokens)
    node = rng.integers(draw(st.integers(1, n_ranks)), size=n_ranks)
    return home, experts, placement, layer, node


def instances_of(placement, layer):
    found = defaultdict(list)
    for slot, expert in enumerate(placement.expert[layer].tolist()):
        found[expert].append(slot)
    return found


def hashes(home):
    """vLLM's hash of each token's position in the batch of its rank."""
    seen = Counter()
    for rank in home.tolist():
        yield seen[rank] * 2654435769 % 2**32
        seen[rank] += 1


def even_twin(home, experts, placement, layer, node):
    instances, seen = instances_of(placement, layer), Counter()
    for row in experts.tolist():
        out = []
        for expert in row:
            out.append(instances[expert][seen[expert] % len(instances[expert])])
            seen[expert] += 1
        yield out


def hash_twin(home, experts, placement, layer, node):
    instances = instances_of(placement, layer)
    for row, value in zip(experts.tolist(), hashes(home), strict=True):
        yield [instances[e][value % len(instances[e])] for e in row]


def source_twin(home, experts, placement, layer, node):
    instances, rank = instances_of(placement, layer), placement.rank[layer]
    for row, own, value in zip(experts.tolist(), home, hashes(home), strict=True):
        out = []
        for e in row:
            on_rank = [s for s in instances[e] if rank[s] == own]
            on_node = [s for s in instances[e] if node[rank[s]] == node[own]]
            near = on_rank or on_node or instances[e]
            out.append(near[value % len(near)])
        yield out


@pytest.mark.parametrize(
    ("name", "twin"), [("even", even_twin), ("hash", hash_twin), ("source", source_twin)]
)
@given(case=cases())
def test_the_rule_in_words(name, twin, case):
    assert chosen(name, *case).tolist() == list(twin(*case))


def test_no_two_rules_are_one():
    rng = np.random.default_rng(0)
    placement = Placement(
        np.tile(np.arange(4), (1, 3)), np.arange(12)[None] % 6, 6, np.ones((1, 6))
    )
    experts = np.array([rng.choice(4, 2, replace=False) for _ in range(60)])
    case = rng.integers(6, size=60), experts, placement, 0, np.arange(6) // 3
    answers = {name: chosen(name, *case).tobytes() for name in NAMES}
    assert len(set(answers.values())) == len(answers)


@pytest.mark.parametrize("name", NAMES + LEVELLED)
@given(case=cases())
def test_every_pair_goes_to_an_instance_of_its_expert(name, case):
    _, experts, placement, layer, _ = case
    assert (placement.expert[layer][chosen(name, *case)] == experts).all()


@given(cases())
def test_even_splits_each_experts_tokens_evenly(case):
    _, _, placement, layer, _ = case
    pairs = np.bincount(chosen("even", *case).ravel(), minlength=placement.expert.shape[1])
    for slots in instances_of(placement, layer).values():
        assert max(pairs[slots]) - min(pairs[slots]) <= 1


@pytest.mark.parametrize("name", ["source", "local_first"])
@given(case=cases())
def test_near_choices_send_no_pair_further_than_they_must(name, case):
    home, experts, placement, layer, node = case
    rank = placement.rank[layer][chosen(name, *case)]
    held = placement.has_expert(placement.expert.max() + 1)[layer]
    for token, column in np.ndindex(experts.shape):
        own, holders = home[token], np.flatnonzero(held[:, experts[token, column]])
        if own in holders:
            assert rank[token, column] == own
        elif node[own] in node[holders]:
            assert node[rank[token, column]] == node[own]


@given(cases(copies=0))
def test_one_instance_each_leaves_no_choice(case):
    slots = [chosen(name, *case).tolist() for name in NAMES + LEVELLED]
    assert all(other == slots[0] for other in slots)


@given(cases())
def test_source_on_one_rank_is_hash(case):
    home, experts, placement, layer, node = case
    alone = Placement(placement.expert, np.zeros_like(placement.rank), placement.n_ranks)
    case = np.zeros_like(home), experts, alone, layer, node
    assert chosen("source", *case).tolist() == chosen("hash", *case).tolist()


@given(cases())
def test_local_first_leaves_no_token_worse_than_weighted(case):
    """Both draw the same number, so each pair that differs comes nearer: for every token."""
    home, _, placement, layer, node = case
    far = {}
    for name in ("weighted", "local_first"):
        rank = placement.rank[layer][chosen(name, *case)]
        at = node[rank]
        far[name] = [len(set(a) - {node[h]}) for a, h in zip(at.tolist(), home, strict=True)]
    assert all(a <= b for a, b in zip(far["local_first"], far["weighted"], strict=True))


@given(cases())
def test_weighted_on_one_node_of_lone_ranks_is_local_first_with_nothing_local(case):
    _, experts, placement, layer, node = case
    elsewhere = np.full(len(experts), placement.n_ranks)  # a rank of its own node, without experts
    node = np.append(node, node.max() + 1)
    case = elsewhere, experts, placement, layer, node
    assert chosen("weighted", *case).tolist() == chosen("local_first", *case).tolist()


def test_draws_follow_the_weights():
    """Chi-square of the draws against the inverse loads, 4 instances, 20,000 tokens."""
    load = np.array([[1.0, 2.0, 4.0, 8.0]])
    placement = Placement(np.zeros((1, 4), np.int64), np.arange(4)[None], 4, load)
    expected = 1 / load[0] / (1 / load[0]).sum()
    for home in (0, 3):
        homes = np.full(20_000, home)
        one = np.zeros((20_000, 1), np.int64)
        counts = np.bincount(chosen("weighted", homes, one, placement, 0, np.arange(4))[:, 0])
        assert chisquare(counts, 20_000 * expected).pvalue > 1e-3


def test_draws_differ_by_rank_position_layer_and_expert():
    home, place = np.repeat(np.arange(4), 8), np.tile(np.arange(8), 4)
    found = np.stack([draws(home, place, layer, np.tile([0, 5, 9], (32, 1))) for layer in range(3)])
    assert len(np.unique(found)) == found.size
    assert found.min() >= 0
    assert found.max() < 1


def test_a_placement_without_loads_cannot_weigh():
    placement = Placement(np.array([[0, 0]]), np.array([[0, 1]]), 2)
    with pytest.raises(InputError, match="replica_choice: it weights instances by the load"):
        chosen("weighted", [0], np.array([[0]]), placement, 0, [0, 0])


@pytest.mark.parametrize("instances", [1, 2, 4, 8])
def test_among_powers_of_two_the_hash_takes_turns(instances):
    """An odd multiplier permutes what is left of a position modulo a power of two."""
    placement = Placement(np.zeros((1, instances), np.int64), np.arange(instances)[None], instances)
    home, experts = np.zeros(64, np.int64), np.zeros((64, 1), np.int64)
    slots = chosen("hash", home, experts, placement, 0, np.zeros(instances, np.int64))[:, 0]
    assert len({(b - a) % instances for a, b in pairwise(slots.tolist())}) == 1
    assert np.bincount(slots).tolist() == [64 // instances] * instances


@pytest.mark.parametrize("instances", [3, 5, 6, 7])
def test_the_hash_is_nearly_even(instances):
    placement = Placement(np.zeros((1, instances), np.int64), np.arange(instances)[None], instances)
    home, experts = np.zeros(9000, np.int64), np.zeros((9000, 1), np.int64)
    slots = chosen("hash", home, experts, placement, 0, np.zeros(instances, np.int64))[:, 0]
    assert np.bincount(slots) * instances / 9000 == pytest.approx(1, abs=0.05)


def test_even_on_eplbs_placement_gives_the_load_that_it_was_made_for():
    rng = np.random.default_rng(0)
    experts = np.array([rng.choice(16, 4, replace=False, p=SKEWED) for _ in range(4000)])
    load = np.bincount(experts.ravel(), minlength=16)[None].astype(np.float64)
    group = ExpertGroup((0,), 1, 16, 4, n_redundant=8)
    placement = balance(load, group)
    home = np.arange(4000) % 4
    rank = placement.rank[0][chosen("even", home, experts, placement, 0, np.zeros(4, np.int64))]
    pairs = np.bincount(rank.ravel(), minlength=4)
    share = load[0] / np.bincount(placement.expert[0])
    predicted = [share[placement.expert[0][placement.rank[0] == r]].sum() for r in range(4)]
    np.testing.assert_allclose(pairs, predicted, atol=group.slots_per_rank)


SKEWED = np.arange(1, 17) ** 1.5 / (np.arange(1, 17) ** 1.5).sum()


@pytest.mark.parametrize("name", NAMES)
def test_an_expert_without_instance_is_named(name):
    placement = Placement(np.array([[0, 2]]), np.array([[0, 1]]), 2, np.ones((1, 2)))
    with pytest.raises(ValueError, match="no instance of expert 1"):
        chosen(name, [0], np.array([[1]]), placement, 0, [0, 0])


def test_choices_by_name(monkeypatch):
    context = PolicyContext(1, np.random.default_rng(0))
    assert set(NAMES) <= set(registry.names("replica"))
    with pytest.raises(InputError, match=r"^replica_choice: unknown policy 'nearest'"):
        registry.replica_choice("nearest", context)

    class Idle(ReplicaChoice):
        name, decision = "idle", "replica"

    monkeypatch.setattr(EntryPoint, "load", lambda _: Idle)
    point = EntryPoint("idle", "somewhere:Idle", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    with pytest.raises(InputError, match=r"has no method choose\(tokens_home, experts, "):
        registry.names("replica")


def fullest(name, case):
    """Return the pairs of the fullest rank."""
    slots = chosen(name, *case)
    placement, layer = case[2], case[3]
    return int(np.bincount(placement.rank[layer][slots].ravel(), minlength=1).max(initial=0))


def least_fullest(experts, placement, layer):
    """Return the linear programme's optimum: the fewest tokens on the fullest rank."""
    tokens = np.bincount(experts.ravel(), minlength=placement.expert[layer].max() + 1)
    of, on = placement.expert[layer], placement.rank[layer]
    n, places = len(of), np.arange(len(of))
    loads = np.zeros((placement.n_ranks, n + 1))
    loads[on, places], loads[:, n] = 1.0, -1.0
    sums = np.zeros((len(tokens), n + 1))
    sums[of, places] = 1.0
    cost = np.r_[np.zeros(n), 1.0]
    return linprog(cost, A_ub=loads, b_ub=np.zeros(len(loads)), A_eq=sums, b_eq=tokens).fun


@given(cases())
def test_lplb_is_the_linear_programmes_optimum_but_for_whole_tokens(case):
    _, experts, placement, layer, _ = case
    best = least_fullest(experts, placement, layer)
    copied = sum(n > 1 for n in Counter(placement.expert[layer].tolist()).values())
    assert best - 1e-6 <= fullest("lplb", case) <= best + copied + 1e-2
    assert fullest("lplb", case) <= fullest("waterfill", case) + copied


def test_waterfill_levels_one_expert_over_what_its_ranks_have():
    # Expert 0 on ranks 0 and 1, experts 1 and 2 on one of them each, with 2 and 6 of 18 tokens.
    placement = Placement(np.array([[0, 0, 1, 2]]), np.array([[0, 1, 0, 1]]), 2)
    experts = np.array([0] * 10 + [1] * 2 + [2] * 6)[:, None]
    slots = chosen("waterfill", [0] * 18, experts, placement, 0, [0, 0])
    assert Counter(slots.ravel().tolist()) == {0: 7, 1: 3, 2: 2, 3: 6}
    assert Counter(slots[:10, 0][:5].tolist()) in ({0: 3, 1: 2}, {0: 4, 1: 1})  # mixed, not blocks


def test_capped_leaves_the_first_instance_only_beyond_its_capacity():
    placement = Placement(np.array([[0, 0, 1, 2]]), np.array([[0, 1, 0, 1]]), 2)
    experts = np.array([0] * 10 + [1] * 2 + [2] * 6)[:, None]
    for word, first in (("capped", 7), ("capped:capacity=1.2", 9), ("capped:capacity=2", 10)):
        slots = chosen(word, [0] * 18, experts, placement, 0, [0, 0])
        assert (slots[:10] == 0).sum() == first, word
