"""Locality-band routing against a plain twin, and at the ends of tau."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext, RequestInfo, Workers
from eldr_sim.policies.eldr.router import EldrParameters, EldrPolicy

from ..random_artifact import random_artifact

N_LAYERS, N_EXPERTS, KEPT = 4, 10, 2


def make_artifact(n_decoders, seed=0):
    return random_artifact(n_decoders, N_LAYERS, N_EXPERTS, seed, kept=[3, 1])


def make_policy(artifact, tau=0.1, group_size=1, **parameters):
    n_workers = artifact.n_decoders * group_size
    rng = np.random.default_rng(0)
    return EldrPolicy(
        PolicyContext(n_workers, rng, artifact=artifact, group_size=group_size),
        EldrParameters(tau=tau, **parameters),
    )


def request(signature, signature_id=None):
    return RequestInfo(0, 10, 0, signature=signature, signature_id=signature_id)


def random_counts(seed):
    return np.random.default_rng(seed).poisson(1.5, (N_LAYERS, N_EXPERTS)).astype(np.uint16)


def twin(artifact, counts, loads, tau, min_band, ties):
    """Sec. 4.3.2 word by word, in plain floats; None where rounding could tip the answer."""
    band, similar = band_of(artifact, counts, tau, min_band) or (None, None)
    if band is None:
        return None
    return min(band, key=lambda k: (loads[k], k if ties == "lowest" else -similar[k]))


def band_of(artifact, counts, tau, min_band=1):
    """The band and the similarities; None where rounding could tip the answer."""
    x = np.concatenate([counts[layer] * artifact.idf[layer] for layer in (1, 3)])
    if not x.any():
        return None
    similar = [float(c @ x) / float(np.linalg.norm(x)) for c in artifact.centroids]
    edge = max(similar) - tau
    if any(abs(s - edge) < 1e-5 for s in similar if tau > 0):
        return None
    band = [k for k, s in enumerate(similar) if s >= edge]
    if len(band) < min_band and tau > 0:
        band = sorted(range(len(similar)), key=lambda k: -similar[k])[:min_band]
    return band, similar


@given(
    n=st.integers(1, 16), seed=st.integers(0, 2**32), tau=st.sampled_from([0.0, 0.05, 0.1, 0.4, 1]),
    min_band=st.integers(1, 2), ties=st.sampled_from(["lowest", "similar"]),
    refit_s=st.sampled_from([0.0, 1.0]),
)  # fmt: skip
def test_select_matches_the_rule(n, seed, tau, min_band, ties, refit_s):
    artifact = make_artifact(n, seed)
    policy = make_policy(artifact, tau, min_band=min_band, ties=ties, refit_s=refit_s)
    r = np.random.default_rng(seed)
    for index in range(4):
        counts, loads = random_counts(seed + index), r.integers(0, 4, n)
        expected = twin(artifact, counts, loads, tau, min_band, ties)
        if expected is not None:
            assert policy.select(request(counts), Workers.idle(loads)) == expected


@given(
    n_groups=st.integers(2, 5),
    group_size=st.integers(2, 4),
    seed=st.integers(0, 2**32),
    tau=st.sampled_from([0.0, 0.1, 0.4, 1]),
)
def test_groups_share_a_centroid_and_load_chooses_among_their_engines(
    n_groups, group_size, seed, tau
):
    artifact = make_artifact(n_groups, seed)
    policy = make_policy(artifact, tau, group_size, ties="similar")
    r = np.random.default_rng(seed)
    for index in range(6):
        counts, loads = random_counts(seed + index), r.integers(0, 4, n_groups * group_size)
        found = band_of(artifact, counts, tau)
        if found is None:
            continue
        band, similar = found
        allowed = [w for w in range(n_groups * group_size) if w // group_size in band]
        least = min(loads[allowed])
        tied = [w for w in allowed if loads[w] == least]
        chosen = policy.select(request(counts), Workers.idle(loads))
        assert chosen in tied
        assert chosen // group_size == max((w // group_size for w in tied), key=similar.__getitem__)


def test_engines_of_a_group_take_turns():
    policy = make_policy(make_artifact(3), tau=0.0, group_size=4)
    idle = Workers.idle(np.zeros(12))
    picks = [policy.select(request(random_counts(1), seed), idle) for seed in (1, 2, 1, None, 1)]
    first = picks[0]
    assert first % 4 == 0
    assert picks == [first, first + 1, first + 2, first + 3, first]


def test_one_group_is_the_shortest_queue():
    policy, r = make_policy(make_artifact(1), group_size=5), np.random.default_rng(0)
    shortest = registry.decode_policy("jsq", PolicyContext(5, r))
    zero = np.zeros((N_LAYERS, N_EXPERTS), np.uint16)
    for step in range(60):
        workers = Workers.idle(r.integers(0, 3, 5))
        counts = (random_counts(step), zero, None)[step % 3]
        assert policy.select(request(counts), workers) == shortest.select(request(None), workers)


def test_an_engine_of_a_group_may_have_a_cluster_of_its_own():
    artifact, alone = make_artifact(4), make_policy(make_artifact(4), tau=0.0)
    context = PolicyContext(4, np.random.default_rng(0), artifact=artifact, group_size=2)
    policy = EldrPolicy(context, EldrParameters(tau=0.0, unit="engine"))
    idle = Workers.idle(np.zeros(4))
    picks = [policy.select(request(random_counts(seed)), idle) for seed in range(20)]
    assert picks == [alone.select(request(random_counts(seed)), idle) for seed in range(20)]
    assert len(set(picks)) > 2
    with pytest.raises(InputError, match="made for 4 decode workers, not 2"):
        EldrPolicy(context)


def test_tau_zero_is_the_nearest_centroid_whatever_the_load():
    artifact = make_artifact(8)
    policy = make_policy(artifact, tau=0.0)
    for seed in range(30):
        counts = random_counts(seed)
        nearest = int(np.argmax(policy.similarities(counts[None])))
        loads = np.zeros(8, np.int64)
        loads[nearest] = 1000
        assert policy.select(request(counts), Workers.idle(loads)) == nearest


def test_tau_one_is_the_shortest_queue():
    policy = make_policy(make_artifact(8), tau=1.0)
    r = np.random.default_rng(1)
    for seed in range(30):
        loads = r.permutation(8)
        assert loads[policy.select(request(random_counts(seed)), Workers.idle(loads))] == 0


def test_tau_one_reaches_a_worker_with_nothing_in_common():
    # Similarity exactly 1 to one centroid and 0 to the other: the band of tau = 1 holds both.
    artifact = make_artifact(2)
    centroids = np.zeros((2, KEPT * N_EXPERTS))
    counts = np.zeros((N_LAYERS, N_EXPERTS), np.uint16)
    counts[1, :7] = [3, 1, 4, 1, 5, 9, 2]
    centroids[0] = artifact.signatures(counts[None])[0]
    centroids[1, -1] = 1.0
    object.__setattr__(artifact, "centroids", centroids)
    assert make_policy(artifact, tau=1.0).select(request(counts), Workers.idle([1, 0])) == 1
    assert make_policy(artifact, tau=0.9).select(request(counts), Workers.idle([1, 0])) == 0


def test_an_idle_cluster_routes_by_locality():
    policy = make_policy(make_artifact(8), tau=0.3, ties="similar")
    for seed in range(20):
        counts = random_counts(seed)
        nearest = int(np.argmax(policy.similarities(counts[None])))
        assert policy.select(request(counts), Workers.idle(np.zeros(8))) == nearest


def test_the_first_of_the_least_loaded_gets_a_request():
    policy = make_policy(make_artifact(8), tau=1.0)
    for seed in range(20):
        loads = np.array([1, 0, 2, 0, 0, 3, 1, 1])
        assert policy.select(request(random_counts(seed)), Workers.idle(loads)) == 1


@pytest.mark.parametrize("signature", [None, np.zeros((N_LAYERS, N_EXPERTS), np.uint16)])
def test_a_request_that_says_nothing_joins_the_shortest_queue(signature):
    policy = make_policy(make_artifact(4))
    assert signature is None or policy.bands(signature[None]) == [[]]
    picks = [policy.select(request(signature, 5), Workers.idle([1, 0, 0, 2])) for _ in range(4)]
    assert picks == [1, 2, 1, 2]


def test_remembered_signatures_change_nothing():
    artifact = make_artifact(8)
    remembering, plain = make_policy(artifact, 0.3), make_policy(artifact, 0.3)
    r = np.random.default_rng(2)
    for step in range(200):
        signature_id = step % 7
        counts, loads = random_counts(signature_id), r.integers(0, 6, 8)
        assert remembering.select(
            request(counts, signature_id), Workers.idle(loads)
        ) == plain.select(request(counts), Workers.idle(loads))


def test_registry_builds_eldr_and_it_refuses_a_misfit():
    artifact = make_artifact(4)
    rng = np.random.default_rng(0)
    built = registry.decode_policy(
        "eldr", PolicyContext(4, rng, artifact=lambda *_options: artifact)
    )
    assert built.name == "eldr"
    with pytest.raises(InputError, match="made for 4 decode workers, not 5"):
        registry.decode_policy("eldr", PolicyContext(5, rng, artifact=artifact))
    with pytest.raises(InputError, match="made for 4 decode workers, not 2"):
        registry.decode_policy("eldr", PolicyContext(4, rng, artifact=artifact, group_size=2))
    with pytest.raises(InputError, match="counts of 4x9"):
        built.select(request(np.ones((4, 9))), Workers.idle(np.zeros(4)))
