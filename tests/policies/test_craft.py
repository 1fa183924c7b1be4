"""Copies by layer: as many as the budget, where they even most."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.policies.placement.base import ExpertGroup
from eldr_sim.policies.placement.craft import by_layer
from eldr_sim.policies.placement.eplb import balance


def heights(placement):
    return placement.load.max(axis=1) / placement.load.mean(axis=1)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([0, 4, 8, 16]))
def test_the_budget_holds_and_no_layer_is_worse_than_without_copies(seed, budget):
    rng = np.random.default_rng(seed)
    skew = rng.uniform(0.1, 3.0, 6)
    load = np.stack([rng.dirichlet(np.full(16, each)) for each in skew])
    group = ExpertGroup((0,), 6, 16, 4)
    placed = by_layer(load, group, budget)
    instances = placed.instances(16)
    assert (instances >= 1).all()
    assert instances.sum() <= 6 * (16 + budget)
    assert (placed.slots() == placed.slots()[:, :1]).all()
    assert (heights(placed) <= heights(balance(load, group)) + 1e-9).all()
    if budget:
        uniform = balance(load, group._replace(n_redundant=budget))
        assert heights(placed).sum() <= heights(uniform).sum() + 0.2


def test_even_layers_get_none():
    hot = np.ones(16)
    hot[0] = 40.0
    load = np.stack([np.ones(16), hot, np.ones(16)])
    placed = by_layer(load, ExpertGroup((0,), 3, 16, 4), 4)
    assert placed.instances(16).sum(axis=1).tolist() == pytest.approx([16, 28, 16], abs=8)
    assert placed.instances(16)[0].tolist() == [1] * 16
    assert placed.instances(16)[1, 0] > 1
