"""Expected expert unions against every outcome, against drawn top-k sets, and over time."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.policies.routing.unions import ExpertUnions, log_idle, on_grid


def test_expectation_over_every_outcome():
    """3 requests, 3 experts: all 2^9 outcomes of who selects what, weighted by probability."""
    n, n_experts = 3, 3
    p = on_grid(np.random.default_rng(0).random((n, 1, n_experts)))
    before = after = 0.0
    for outcome in itertools.product([0, 1], repeat=n * n_experts):
        chosen = np.array(outcome).reshape(n, n_experts)
        weight = np.prod(np.where(chosen, p[:, 0], 1 - p[:, 0]))
        before += weight * chosen[:-1].any(axis=0).sum()
        after += weight * chosen.any(axis=0).sum()
    unions = ExpertUnions(2, 1, n_experts)
    for activation in p[:-1]:
        unions.add(1, log_idle(activation))
    np.testing.assert_allclose(unions.activated[1], before, atol=1e-5)
    np.testing.assert_allclose(unions.growth(p[-1])[1], after - before, atol=1e-5)
    # An empty worker gains all that the request selects.
    np.testing.assert_allclose(unions.growth(p[-1])[0], p[-1].sum(), atol=1e-12)


def test_expectation_over_drawn_top_k_sets():
    """A request's experts exclude each other (top-k): the mean union does not care."""
    r = np.random.default_rng(1)
    n, n_experts, top_k, draws = 6, 16, 3, 20_000
    scores = 2.0 * r.normal(size=(n, n_experts))
    noisy = scores + r.gumbel(size=(draws, n, n_experts))
    chosen = np.zeros((draws, n, n_experts), bool)
    np.put_along_axis(chosen, np.argpartition(-noisy, top_k, axis=2)[..., :top_k], True, axis=2)
    union = chosen.any(axis=1).sum(axis=1)
    unions = ExpertUnions(1, 1, n_experts)
    for activation in chosen.mean(axis=0):
        unions.add(0, log_idle(on_grid(activation[None])))
    error = union.std() / np.sqrt(draws)
    assert abs(unions.activated[0, 0] - union.mean()) < 5 * error + n_experts * 2**-12


def test_an_expert_of_every_step_stays_finite():
    always = on_grid(np.ones((1, 4)))
    unions = ExpertUnions(1, 1, 4)
    for _ in range(300):
        unions.add(0, log_idle(always))
    assert unions.activated[0, 0] == 4.0
    assert unions.growth(always)[0, 0] == 0.0
    for _ in range(300):
        unions.remove(0, log_idle(always))
    assert (unions.idle == 1.0).all()


@given(seed=st.integers(0, 2**32), n=st.integers(1, 40))
def test_state_depends_on_who_is_there_and_not_on_who_was(seed, n):
    r = np.random.default_rng(seed)
    known = [log_idle(on_grid(r.beta(0.2, 2.0, (2, 9)))) for _ in range(n)]
    unions, resident = ExpertUnions(2, 2, 9), []
    for index in range(n):
        worker = int(r.integers(2))
        unions.add(worker, known[index])
        resident.append((worker, index))
        if r.random() < 0.5:
            worker, index = resident.pop(int(r.integers(len(resident))))
            unions.remove(worker, known[index])
    fresh = ExpertUnions(2, 2, 9)
    for position in r.permutation(len(resident)):
        worker, index = resident[position]
        fresh.add(worker, known[index])
    assert (unions.idle == fresh.idle).all()
    assert (unions.activated == fresh.activated).all()
    for worker, index in resident:
        unions.remove(worker, known[index])
    assert (unions.idle == 1.0).all()
    assert (unions.activated == 0.0).all()
