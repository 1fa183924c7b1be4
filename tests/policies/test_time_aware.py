"""Placements by the time of a layer: against all placements, and counted another way."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels.all_to_all import (
    BACKENDS,
    COPY_PER,
    AllToAllCost,
    build_all_to_all,
)
from eldr_sim.kernel_profiles.kernels.all_to_all_cost import combine_s, dispatch_s
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.steps.cost_tables import RankMoE
from eldr_sim.kernel_profiles.steps.step_cost import rank_moe_s
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.placement.base import ExpertGroup, Placement
from eldr_sim.policies.placement.step_swaps import Prices, Steps, layer_s, prices, swap_for_time
from eldr_sim.policies.placement.time_aware import home_ranks
from eldr_sim.traces.routing.calibration import calibration_set
from eldr_sim.traces.routing.format import open_trace
from studies.expert_traffic import Batch, measure

from ..kernel_profiles.test_all_to_all import _busiest as busiest_links
from ..kernel_profiles.test_all_to_all import _links as copies
from ..random_artifact import random_artifact

SLOTS = 4


def priced(read_s=1e-6, pair_s=1e-7, copy_s=1e-7, *, gpus=2, per="node"):
    """A rank's time is linear in activated experts and pairs, the network's in copies."""
    rows = np.arange(3.0)
    table = read_s * np.arange(SLOTS * 2 + 1.0) + pair_s * rows[:, None]
    knots = np.array([0.0, 1e9])
    near, far = (np.array([0.0, 1e9 * c]) for c in (copy_s, 4 * copy_s))
    cost = AllToAllCost(1.0, 1.0, knots, near, knots, near, knots, far, knots, far)
    return Prices(RankMoE(1, rows, table, table), cost, gpus, per == "expert", per == "node",
                  True, True, False)  # fmt: skip


@st.composite
def cases(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n_ranks, n_steps = draw(st.sampled_from([2, 4])), draw(st.integers(1, 3))
    per_rank, top_k = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    n = n_steps * per_rank * n_ranks
    popular = rng.gamma(0.5, size=8) + 0.05
    experts = np.stack(
        [rng.choice(8, top_k, replace=False, p=popular / popular.sum()) for _ in range(n)]
    )
    home = np.tile(np.arange(n_ranks).repeat(per_rank), n_steps)
    cost = priced(*rng.gamma(0.5, size=3) * 1e-6, gpus=draw(st.sampled_from([2, n_ranks])),
                  per=draw(st.sampled_from(["node", "expert"])))  # fmt: skip
    return rng, n_ranks, Steps(experts, home, n_steps, 1.0), cost


def counted_s(ranks, n_ranks, steps, cost):
    """The time of a layer from the traffic that `expert_traffic` counts."""
    node = np.arange(n_ranks) // cost.gpus_per_node
    size = len(steps.home) // steps.n_steps
    total = 0.0
    for s in range(steps.n_steps):
        own = slice(s * size, (s + 1) * size)
        batch = Batch(steps.experts[own, None], steps.home[own])
        choice = registry.replica_choice("source", PolicyContext(1, np.random.default_rng(0)))
        found = measure([batch], Placement.of_ranks(ranks[None], n_ranks), choice, node)
        near, far = found.busiest_inside[0, 0], found.busiest_between[0, 0]
        total += max(
            rank_moe_s(cost.moe, float(p), float(a), False) if p else 0.0
            for p, a in zip(found.pairs[0, 0], found.activated[0, 0], strict=True)
        )
        total += dispatch_s(cost.all_to_all, near, far) + combine_s(cost.all_to_all, near, far)
    return total / steps.n_steps


@settings(max_examples=25)
@given(cases())
def test_a_layers_time_is_that_of_its_traffic(case):
    rng, n_ranks, steps, cost = case
    ranks = rng.permutation(np.arange(8) % n_ranks)
    if cost.per_node:
        assert layer_s(ranks, n_ranks, steps, cost) == pytest.approx(
            counted_s(ranks, n_ranks, steps, cost), rel=1e-9
        )


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_placements_differ_by_what_their_backend_sends(backend, prompts):
    """Copies counted link by link; what goes to all GPUs is the same of any placement."""
    rng, none = np.random.default_rng(0), np.zeros((2, 9))
    sends = build_all_to_all(
        load_model("DeepSeek-V3"), load_gpu("H100"), backend, 4, gpus_per_node=2
    )
    cost = prices(RankMoE(1, np.arange(2.0), none, none), sends, prompts=prompts)
    experts = np.array([rng.choice(8, 3, replace=False) for _ in range(4000)])
    home = np.arange(4000) // 1000
    gathers = backend == "allgather_alltoall" and not prompts
    table, per = sends.gathered if gathers else sends.cost, COPY_PER[backend]
    found = []
    for ranks in np.sort(np.arange(8) % 4), rng.permutation(np.arange(8) % 4):
        routed = zip(home.tolist(), ranks[experts].tolist(), strict=True)
        back = busiest_links(copies(routed, 4, 2, per), 4, 2)
        out = (0.0, 0.0) if gathers else back
        seconds = combine_s(table, *back) + dispatch_s(table, *out)
        found.append((layer_s(ranks, 4, Steps(experts, home, 1, 1.0), cost), seconds))
    (first, wanted), (second, other) = found
    assert second - first == pytest.approx(other - wanted, rel=1e-9, abs=1e-15)
    assert (first == second) == (per == "all")


@settings(max_examples=25)
@given(cases())
def test_swaps_keep_sizes_count_what_they_change_and_never_lengthen_a_layer(case):
    rng, n_ranks, steps, cost = case
    start = rng.permutation(np.arange(8) % n_ranks)
    found = swap_for_time(start, n_ranks, steps, cost)
    assert np.bincount(found, minlength=n_ranks).tolist() == [8 // n_ranks] * n_ranks
    assert layer_s(found, n_ranks, steps, cost) <= layer_s(start, n_ranks, steps, cost)
    # No pair is left that a swap, counted from the beginning, would bring closer than a round does.
    best = min(
        layer_s(np.where(e == a, found[b], np.where(e == b, found[a], found)), n_ranks, steps, cost)
        for a, b in itertools.combinations(range(8), 2)
        for e in [np.arange(8)]
    )
    assert best >= layer_s(found, n_ranks, steps, cost) * (1 - 2e-3)


def test_the_best_of_all_placements_is_found_where_groups_are_planted():
    rng = np.random.default_rng(0)
    groups = rng.permutation(np.arange(8) // 4)
    experts = np.stack(
        [
            rng.choice(np.flatnonzero(groups == g), 2, replace=False)
            for g in rng.integers(2, size=64)
        ]
    )
    steps, cost = Steps(experts, np.arange(64) // 8 % 2, 4, 1.0), priced(copy_s=1e-5, gpus=1)
    every = [
        np.isin(np.arange(8), own).astype(np.int64) for own in itertools.combinations(range(8), 4)
    ]
    times = [layer_s(ranks, 2, steps, cost) for ranks in every]
    found = swap_for_time(np.arange(8) // 4, 2, steps, cost)
    assert layer_s(found, 2, steps, cost) == pytest.approx(min(times))
    planted = [layer_s(ranks, 2, steps, cost) for ranks in (groups, 1 - groups)]
    assert min(planted) == pytest.approx(min(times))


def context(**rest):
    trace = open_trace("reference-moe")
    calibration = calibration_set(trace, workload="task")
    return trace, PolicyContext(4, np.random.default_rng(0), calibration, group_size=4, **rest)


def test_it_needs_times_and_says_so():
    trace, plain = context()
    policy = registry.placement_policy("time_aware", plain)
    with pytest.raises(InputError, match=r"^expert_placement: 'time_aware' needs the times"):
        policy.place(ExpertGroup(range(4), trace.n_layers, trace.n_experts, 4, n_nodes=2))


def test_experts_lie_where_their_requests_are_at_home():
    artifact = random_artifact(4, n_layers=2, n_experts=8)
    of_rank = np.array([[0, 1, 2, 3, 0, 1, 2, 3], [3, 3, 1, 1, 0, 0, 2, 2]])
    activation = 0.1 + 0.8 * (of_rank == np.arange(4)[:, None, None])
    object.__setattr__(artifact, "cluster_activation", activation)
    made = PolicyContext(4, np.random.default_rng(0), artifact=artifact, group_size=4)
    group = ExpertGroup(range(4), 2, 8, 4, n_nodes=2)
    assert home_ranks(made, group).tolist() == of_rank.tolist()
    assert registry.placement_policy("home", made).place(group).rank.tolist() == of_rank.tolist()


@given(st.integers(0, 2**32))
@settings(max_examples=10)
def test_no_exchange_of_experts_is_better_for_homes(seed):
    artifact = random_artifact(4, n_layers=1, n_experts=8, seed=seed % 1000)
    rng = np.random.default_rng(seed)
    activation = rng.random((4, 1, 8))
    object.__setattr__(artifact, "cluster_activation", activation)
    made = PolicyContext(4, rng, artifact=artifact, group_size=4)
    found = home_ranks(made, ExpertGroup(range(4), 1, 8, 4, n_nodes=2))[0]
    own = activation[:, 0]

    def saved(ranks):
        return sum(
            own[ranks[e], e] + own[ranks[e] // 2 * 2 : ranks[e] // 2 * 2 + 2, e].sum()
            for e in range(8)
        )

    for one, other in itertools.combinations(range(8), 2):
        exchanged = found.copy()
        exchanged[[one, other]] = found[[other, one]]
        assert saved(found) >= saved(exchanged) - 1e-6


def test_homes_need_clusters_of_engines():
    with pytest.raises(InputError, match=r"eldr:unit=engine"):
        registry.placement_policy("home", context()[1])
    artifact = random_artifact(1, n_layers=2, n_experts=8)
    one = PolicyContext(4, np.random.default_rng(0), artifact=artifact, group_size=4)
    with pytest.raises(InputError, match=r"1 clusters cannot be at home on 1 x 4 GPUs"):
        registry.placement_policy("home", one).place(ExpertGroup(range(4), 2, 8, 4))
