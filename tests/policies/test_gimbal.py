"""Gimbal's placement: against its programme solved exactly, and what must hold of any input."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from eldr_sim.errors import InputError
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.placement.base import ExpertGroup, greedy_placement
from eldr_sim.policies.placement.gimbal import anchored, linked_experts
from eldr_sim.traces.routing.calibration import calibration_set
from eldr_sim.traces.routing.coactivation import token_rows
from eldr_sim.traces.routing.format import open_trace
from eldr_sim.traces.routing.structure import transitions

ALPHA, BETA = 3.0, 1.0


def objective(load, weight, part):
    """The paper's Eq. 12 for two GPUs; ``weight`` is symmetric, each pair counts once."""
    off = max(abs(row[part == p].sum() - row.sum() / 2) for row in load for p in (0, 1))
    cut = weight[part[:, None] != part].sum() / 2
    return ALPHA * off + BETA * cut


def solve(load, weight):
    """Eq. 3 to 12 by HiGHS: x_j is 1 on GPU 1; s_jk is 1 where a pair is cut; and D."""
    n = load.shape[1]
    pairs = list(itertools.combinations(range(n), 2))
    size = n + len(pairs) + 1
    cost = np.concatenate([np.zeros(n), [BETA * weight[j, k] for j, k in pairs], [ALPHA]])
    rows, low, high = [], [], []

    def add(entries, least, most):
        row = np.zeros(size)
        for at, value in entries:
            row[at] += value
        rows.append(row)
        low.append(least)
        high.append(most)

    add([(j, 1) for j in range(n)], n / 2, n / 2)
    for row in load:
        own = [(j, value) for j, value in enumerate(row)]
        add([*own, (size - 1, -1)], -np.inf, row.sum() / 2)
        add([*own, (size - 1, 1)], row.sum() / 2, np.inf)
    for at, (j, k) in enumerate(pairs):
        add([(n + at, 1), (j, -1), (k, 1)], 0, np.inf)
        add([(n + at, 1), (j, 1), (k, -1)], 0, np.inf)
    bounds = Bounds(np.zeros(size), np.append(np.ones(size - 1), np.inf))
    found = milp(
        cost, constraints=LinearConstraint(np.array(rows), low, high), bounds=bounds,
        integrality=np.append(np.ones(size - 1), 0),
    )  # fmt: skip
    assert found.success
    return found.fun


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32), pairs=st.integers(0, 6))
def test_no_placement_is_better_than_the_programmes(seed, pairs):
    """E = 8 on 2 GPUs, 3 layers of one placement, as the paper's x_j,p has it."""
    rng = np.random.default_rng(seed)
    load, moves = rng.integers(1, 30, (3, 8)), rng.integers(0, 9, (2, 8, 8))
    weight = (moves + moves.swapaxes(1, 2)).sum(axis=0).astype(float)
    parts = [
        np.isin(np.arange(8), part).astype(int) for part in itertools.combinations(range(8), 4)
    ]
    best = min(objective(load, weight, part) for part in parts)
    assert solve(load, weight) == pytest.approx(best, abs=1e-6)
    linked = linked_experts(moves, pairs).max(axis=0, keepdims=True)
    placed = anchored(load.sum(axis=0, keepdims=True), linked, 2, 0)
    assert objective(load, weight, placed.rank[0]) >= best - 1e-9


@given(seed=st.integers(0, 2**32), ranks=st.sampled_from([1, 2, 4]), pairs=st.integers(0, 40))
def test_the_anchor_holds_what_is_linked_and_no_gpu_overflows(seed, ranks, pairs):
    rng = np.random.default_rng(seed)
    load, moves = rng.random((3, 16)), rng.integers(0, 5, (2, 16, 16))
    anchor = int(rng.integers(ranks))
    linked = linked_experts(moves, pairs)
    placed = anchored(load, linked, ranks, anchor)
    assert (placed.slots() == 16 // ranks).all()
    assert (placed.instances(16) == 1).all()
    on_anchor = placed.rank == anchor
    for layer in range(3):
        n_linked = int((linked[layer] > 0).sum())
        held = linked[layer][on_anchor[layer]]
        assert (held > 0).sum() == min(n_linked, 16 // ranks)
        if ranks > 1 and (~on_anchor[layer]).any():
            assert held[held > 0].min(initial=99) >= linked[layer][~on_anchor[layer]].max()
    if pairs == 0:
        np.testing.assert_array_equal(placed.rank, greedy_placement(load, ranks))


def test_transitions_are_counted_within_the_recorded_layers():
    """No pair leads from the last layer to the first, where a replay begins its next tile."""
    trace = open_trace("reference-moe")
    requests = np.flatnonzero(trace.is_calibration)[:2]
    found = transitions(trace, requests, "decode")
    assert found.sum() == trace.output_len[requests].sum() * 9 * 8**2
    assert found.shape == (trace.n_layers - 1, 128, 128)
    expected = np.zeros_like(found)
    for row in token_rows(trace, requests, "decode"):
        ids = np.asarray(trace.experts[row]).astype(int)
        for layer in range(trace.n_layers - 1):
            expected[layer][np.ix_(ids[layer], ids[layer + 1])] += 1
    np.testing.assert_array_equal(found, expected)


@pytest.mark.long
@pytest.mark.parametrize(
    "frequency",
    [pytest.param(0.0, marks=pytest.mark.slow), 0.05, pytest.param(0.43, marks=pytest.mark.slow)],
)
def test_pairs_are_anchored_by_the_share_of_tokens_that_choose_them(frequency):
    """Counted token by token; at the paper's 43% next to none is left."""
    trace = open_trace("reference-moe")
    calibration = calibration_set(trace, workload="trace")
    requests = calibration.requests
    rows = token_rows(trace, requests, "decode")
    ids = np.asarray(trace.experts[rows]).astype(int)
    chose = np.zeros((trace.n_layers, 128, len(rows)), np.float32)
    for layer in range(trace.n_layers):
        chose[layer, ids[:, layer], np.arange(len(rows))[:, None]] = 1
    share = np.stack([a @ b.T for a, b in itertools.pairwise(chose)]) / len(rows)
    wanted = np.zeros((trace.n_layers, 128), bool)
    wanted[:-1] |= ((share >= frequency) & (share > 0)).any(axis=2)
    wanted[1:] |= ((share >= frequency) & (share > 0)).any(axis=1)
    policy = registry.placement_policy(
        f"gimbal:frequency={frequency},tokens=decode",
        PolicyContext(1, np.random.default_rng(0), calibration),
    )
    placed = policy.place(ExpertGroup(range(2), trace.n_layers, 128, 2))
    on_anchor = placed.rank == 0
    few = wanted.sum(axis=1) <= 64
    assert on_anchor[few][wanted[few]].all()
    assert (wanted.sum(axis=1)[~few] > 64).all()
    assert wanted.any() == (frequency < 0.43)


def test_the_policy_places_again_by_the_windows_load():
    trace = open_trace("reference-moe")
    calibration = calibration_set(trace, workload="trace")
    context = PolicyContext(1, np.random.default_rng(0), calibration)
    group = ExpertGroup(range(2), trace.n_layers, 128, 2)
    policy = registry.placement_policy("gimbal:anchor=1,pairs=64", context)
    placed = policy.place(group)
    load = np.random.default_rng(1).integers(0, 1000, (trace.n_layers, 128))
    again = policy.update(group, load, placed)
    linked = linked_experts(calibration.transitions(), 64) > 0
    assert linked.sum() > trace.n_layers * 8
    assert (placed.rank[linked] == 1).all()
    assert (again.rank[linked] == 1).all()
    assert (again.rank != placed.rank).any()
    with pytest.raises(InputError, match=r"no GPU 5 among 2"):
        registry.placement_policy("gimbal:anchor=5", context).place(group)
    with pytest.raises(InputError, match="one instance"):
        policy.place(group._replace(n_redundant=2))
