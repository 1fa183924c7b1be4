"""The online refit of ELDR's centroids, beside one written from its description with scipy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from eldr_sim.policies.base import PolicyContext, RequestInfo, Workers
from eldr_sim.policies.eldr import clustering
from eldr_sim.policies.eldr import online as online_module
from eldr_sim.policies.eldr.online import OnlineCentroids, note
from eldr_sim.policies.eldr.router import EldrParameters, EldrPolicy, _least
from eldr_sim.policies.eldr.signature import unit_rows

from ..random_artifact import random_artifact

LAYERS, EXPERTS = 3, 12


def signatures(n, d, seed, groups=4):
    """Unit vectors in groups."""
    r = np.random.default_rng(seed)
    centre = r.gamma(0.3, 1.0, (groups, d))
    return unit_rows(centre[r.integers(groups, size=n)] + 0.4 * r.random((n, d)))


def assigned(distance, balanced):
    n, k = distance.shape
    if not balanced:
        return distance.argmin(axis=1)
    places = np.repeat(np.arange(k), -(-n // k))
    rows, columns = linear_sum_assignment(distance[:, places])
    return places[columns[np.argsort(rows)]]


def twin(points, centroids, balanced, rounds):
    """K-means on the sphere from these centroids, then the Hungarian method by cosine."""
    now = centroids
    labels = assigned(1 - points @ now.T, balanced)
    cost = (1 - points @ now.T)[np.arange(len(points)), labels].sum()
    for _ in range(rounds):
        sums = np.array([points[labels == c].sum(axis=0) for c in range(len(now))])
        length = np.linalg.norm(sums, axis=1, keepdims=True)
        moved = np.where(length > 0, sums / np.maximum(length, 1e-12), now)
        labels = assigned(1 - points @ moved.T, balanced)
        new = (1 - points @ moved.T)[np.arange(len(points)), labels].sum()
        if new >= cost - 1e-9:
            break
        now, cost = moved, new
    old, new = linear_sum_assignment(1 - centroids @ now.T)
    return now[new[np.argsort(old)]]


def spread(points, centroids):
    return (1 - points @ centroids.T).min(axis=1).sum()


@given(
    seed=st.integers(0, 2**32),
    k=st.integers(1, 6),
    method=st.sampled_from(["balanced", "vanilla"]),
    rounds=st.sampled_from([1, 50]),
    named=st.booleans(),
)
def test_refits_are_those_of_the_description(seed, k, method, rounds, named):
    r = np.random.default_rng(seed)
    pool, d = signatures(25, 9, seed), 9
    start = signatures(k, d, seed + 1)
    online = OnlineCentroids(start, 1.0, 5.0, method, rounds)
    expected, log, due = start, [], None
    for now in np.cumsum(r.exponential(0.15, 80)).tolist():
        if due is not None and now >= due:
            at = due + (now - due) // 1.0
            due = at + 1.0
            recent = np.array([pool[which] for when, which in log if when > at - 5.0])
            if len(recent) >= k:
                # From our own centroids before: a rounding that tips one refit must not tip all.
                expected = twin(recent, expected, method == "balanced", rounds)
        online.advance(now)
        served = online.served
        np.testing.assert_allclose(served.centroids, expected, atol=2e-5)
        expected = served.centroids.copy()
        which = int(r.integers(len(pool)))
        rows, _ = online.add([which if named else None], lambda _, which=which: pool[[which]])
        served = online.served
        assert (served.points[rows[0]] == pool[which]).all()
        served.similar[served.n[0]] = served.centroids @ pool[which]
        note(served, rows[0], now)
        log.append((now, which))
        due = now + 5.0 if due is None else due
    assert due > 6.0


def counts_of(seed):
    return np.random.default_rng(seed).poisson(1.5, (LAYERS, EXPERTS)).astype(np.uint16)


def route(policy, n, gap_s, named, seed=0):
    """Route drawn requests, each of which stays for some time; returns the workers."""
    r = np.random.default_rng(seed)
    loads, ends, chosen = np.zeros(policy.artifact.n_decoders, np.int64), [], []
    for index in range(n):
        now = index * gap_s
        while ends and ends[0][0] <= now:
            loads[ends.pop(0)[1]] -= 1
        which = int(r.integers(40))
        info = RequestInfo(
            index, 10, 0, signature=counts_of(which), signature_id=which if named else None
        )
        worker = policy.select(info, Workers.idle(loads)._replace(now_s=now))
        loads[worker] += 1
        ends.append((now + 0.8, worker))
        chosen.append(worker)
    return chosen


def policy_of(**parameters):
    artifact = random_artifact(4, LAYERS, EXPERTS, seed=3)
    context = PolicyContext(4, np.random.default_rng(0), artifact=artifact)
    return EldrPolicy(context, EldrParameters(**parameters))


@pytest.mark.parametrize("tau", [0.0, 0.1])
def test_remembered_signatures_change_nothing(monkeypatch, tau):
    """Whether signatures have a number, and however few of them are remembered."""
    chosen = [route(policy_of(tau=tau), 400, 0.05, named) for named in (True, False)]
    monkeypatch.setattr(online_module, "_REMEMBERED", 8)
    chosen += [route(policy_of(tau=tau), 400, 0.05, named) for named in (True, False)]
    assert chosen[1:] == chosen[:1] * 3
    assert chosen[0] != route(policy_of(tau=tau, refit_s=0.0), 400, 0.05, named=True)


def test_balanced_refits_even_what_the_fit_left_uneven():
    """Centroids of a fit to other texts give one worker most requests; those of a refit do not."""
    last = {}
    for refit_s in (0.0, 1.0):
        chosen = route(policy_of(tau=0.0, refit_s=refit_s), 600, 0.05, named=True)
        last[refit_s] = np.bincount(chosen[200:], minlength=4).max() / 400
    assert last[1.0] < 0.4
    assert last[0.0] > last[1.0] + 0.1


def test_the_first_refit_comes_after_the_window_and_needs_as_many_signatures_as_workers():
    policy = policy_of(window_s=5.0, refit_s=1.0)
    start = policy.artifact.centroids
    idle = Workers.idle(np.zeros(4))

    def at(now_s, seed):
        policy.select(RequestInfo(0, 10, 0, signature=counts_of(seed)), idle._replace(now_s=now_s))
        return (policy._online.served.centroids == start).all()

    assert at(100.0, 0)
    assert at(104.9, 1)
    assert at(105.1, 2)  # one signature, four workers
    assert at(105.9, 3)
    assert at(105.95, 4)
    assert not at(106.2, 5)


@given(st.integers(0, 2**32), st.integers(1, 6), st.booleans(), st.sampled_from([1, 50]))
def test_rounds_are_those_of_matrix_products_to_the_bit(seed, k, balanced, rounds):
    r = np.random.default_rng(seed)
    n = int(r.integers(k, 40))
    points, rows = signatures(n, 9, seed), r.integers(0, n, n)
    similar = points[rows] @ signatures(k, 9, seed + 1).T
    between = np.rint(points @ points.T * 2**32) / 2**32
    summed = r.integers(-1, k, n)  # sums that stand already
    sums = ((np.arange(k)[:, None] == summed) * 1.0) @ between[rows]
    recent = clustering.Recent(rows, similar, summed)
    found = clustering._lloyd(between, sums, recent, np.zeros((n, k), bool), balanced, rounds)
    assert (sums == ((np.arange(k)[:, None] == recent.summed) * 1.0) @ between[rows]).all()
    member = np.zeros((n, k), bool)
    labels, cost = clustering._assigned(similar, balanced)
    for _ in range(rounds):
        joined = labels[:, None] == np.arange(k)
        sums = between[np.ix_(rows, rows)] @ joined
        square = (sums * joined).sum(axis=0)
        moved = np.where(square > 0, sums / np.sqrt(np.maximum(square, 1e-9)), similar)
        labels, new = clustering._assigned(moved, balanced)
        if new >= cost:
            break
        member, similar, cost = np.where(square > 0, joined, member), moved, new
    assert (found[0] == member).all()
    assert (found[1] == similar).all()
    assert found[2] == cost


@given(st.integers(0, 2**32), st.floats(0, 1), st.sampled_from(["lowest", "similar"]))
def test_the_compiled_choice_is_that_of_the_bands_rule(seed, tau, ties):
    r = np.random.default_rng(seed)
    policy = policy_of(tau=tau, ties=ties)
    similar = r.integers(0, 5, 4) / 4
    workers = Workers.idle(r.integers(0, 3, 4))._replace(healthy=r.random(4) < 0.7)
    found = _least(similar, tau, ties == "similar", workers.loads, workers.healthy)
    band = [w for w in policy._band(similar.tolist()) if workers.healthy[w]]
    if not band or not similar.any():
        assert found == -1 or not similar.any()
    else:
        assert found == policy._rule(policy._band(similar.tolist())).pick(workers)
