"""Expert signatures against plain twins: textbook formulas, scipy and exhaustive pairs."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import pdist
from scipy.stats import spearmanr

from eldr_sim.errors import InputError
from eldr_sim.policies.eldr import signature
from eldr_sim.policies.eldr.signature import (
    TRANSFORMS,
    centred_ranks,
    decode_overlap,
    idf_weights,
    parse_layer_mask,
    sample_pairs,
    score_of,
    select_layers,
    signatures,
    transformed,
    unit_rows,
)

from ..on_each import on_each


def rng(seed=0):
    return np.random.default_rng(seed)


def structured(n=60, n_layers=5, n_experts=12, n_groups=3, informative=(1, 3), seed=0):
    """Counts and decode activation that share a group's taste on the ``informative`` layers.

    On the others each request has a taste of its own, another in decode than in prefill.
    """
    r = rng(seed)
    group = np.arange(n) % n_groups
    taste = r.choice([0.1, 4.0], size=(2, n, n_layers, n_experts))
    for layer in informative:
        taste[:, :, layer] = r.choice([0.1, 4.0], size=(n_groups, n_experts))[group]
    prefill, decode = taste / taste.sum(axis=3, keepdims=True)
    counts = r.poisson(prefill * 80).astype(np.uint16)
    activation = np.minimum(r.poisson(decode * 80) / 80, 1).astype(np.float32)
    return counts, activation, group


# -- unit vectors ------------------------------------------------------------------------------


def test_unit_rows_are_the_direction():
    rows = rng().gamma(0.3, 50.0, (40, 700))
    rows[3] = 0
    unit = unit_rows(rows)
    norm = np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(unit, rows / np.where(norm > 0, norm, 1), rtol=0, atol=1e-6)
    assert not unit[3].any()
    assert unit_rows(np.array([[0.0, 7.0]])).tolist() == [[0.0, 1.0]]


def test_dot_products_of_unit_rows_do_not_depend_on_the_order_of_summation():
    rows = rng(1).gamma(0.3, 50.0, (20, 6144))
    unit = unit_rows(rows)
    shuffled = rng(2).permutation(6144)
    left, right = unit[:10], unit[10:]
    reference = np.array([[math.fsum(a * b) for b in right] for a in left])
    assert (left @ right.T == reference).all()
    assert (left[:, shuffled] @ right[:, shuffled].T == reference).all()
    # The same without rounding does depend on it: the property is not free.
    plain = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    a, b = plain[:10], plain[10:]
    assert (a @ b.T != a[:, shuffled] @ b[:, shuffled].T).any()


# -- IDF and signature -------------------------------------------------------------------------


def test_idf_by_hand():
    counts = np.zeros((3, 2, 2), np.uint16)
    counts[:, 0, 0] = [5, 1, 9]  # in every request
    counts[:, 0, 1] = [0, 7, 0]  # in one
    counts[:, 1, 0] = [2, 0, 2]  # in two; (1, 1) in none
    expected = [[0.0, math.log(4 / 2)], [math.log(4 / 3), math.log(4)]]
    np.testing.assert_allclose(idf_weights(counts), expected, atol=1e-9)


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
def test_signature_matches_its_definition(seed, n, n_layers, n_experts):
    r = rng(seed)
    counts = r.poisson(0.8, (n, n_layers, n_experts)).astype(np.uint16)
    layers = np.sort(r.choice(n_layers, size=r.integers(1, n_layers + 1), replace=False))
    idf = idf_weights(counts)
    made = signatures(counts, idf, layers)
    for request in range(n):
        x = []
        for layer in layers:
            for expert in range(n_experts):
                df = sum(counts[other, layer, expert] > 0 for other in range(n))
                weight = math.log((n + 1) / (df + 1))
                x.append(float(counts[request, layer, expert]) * weight)
        length = math.sqrt(sum(value**2 for value in x))
        expected = [value / length if length else 0.0 for value in x]
        np.testing.assert_allclose(made[request], expected, rtol=0, atol=1e-6)


def test_signature_ignores_the_length_of_the_prompt():
    counts, _, _ = structured()
    idf = idf_weights(counts)
    layers = np.arange(5)
    tripled = signatures(3 * counts.astype(np.uint32), idf, layers)
    np.testing.assert_array_equal(tripled, signatures(counts, idf, layers))


@given(st.sampled_from(TRANSFORMS), st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 3))
def test_every_transform_matches_its_definition(transform, seed, n, n_layers):
    r = rng(seed)
    kind = score_of(transform)
    assert kind == {"gate-prob": "prob", "gate-logit": "logit"}.get(transform, "count")
    counts = r.poisson(0.8, (n, n_layers, 4)).astype(np.uint16)
    scores = {
        "count": counts,
        "prob": r.random((n, n_layers, 4)).astype(np.float32),
        "logit": r.normal(size=(n, n_layers, 4)).astype(np.float32),
    }[kind]
    layers = np.sort(r.choice(n_layers, size=r.integers(1, n_layers + 1), replace=False))
    idf = idf_weights(counts)

    def cell(request, layer, expert):
        score = float(scores[request, layer, expert])
        df = sum(counts[other, layer, expert] > 0 for other in range(n))
        return {
            "count-idf": score * math.log((n + 1) / (df + 1)),
            "sqrt": math.sqrt(abs(score)),
            "binary": 1.0 if score > 0 else 0.0,
        }.get(transform, score)

    made = signatures(scores, idf, layers, transform)
    for request in range(n):
        x = [cell(request, layer, expert) for layer in layers for expert in range(4)]
        length = math.sqrt(sum(value**2 for value in x))
        expected = [value / length if length else 0.0 for value in x]
        np.testing.assert_allclose(made[request], expected, rtol=0, atol=1e-6)


def test_unit_rows_and_their_products_with_signs():
    rows = rng(3).normal(size=(20, 900))
    rows[4] = 0
    unit = unit_rows(rows)
    norm = np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(unit, rows / np.where(norm > 0, norm, 1), rtol=0, atol=1e-6)
    shuffled = rng(4).permutation(900)
    assert (unit[:10] @ unit[10:].T == unit[:10, shuffled] @ unit[10:, shuffled].T).all()
    assert unit_rows(np.array([[-7.0, 0.0]])).tolist() == [[-1.0, 0.0]]


# -- Spearman and pairs ------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(-1, 1)), min_size=2, max_size=40))
def test_rho_is_scipys(pairs):
    a, b = np.array(pairs, dtype=float).T
    x, y = centred_ranks(a), centred_ranks(b)
    rho = signature._scaled(x @ y, x @ x, y @ y)
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        assert rho == 0.0
    else:
        assert rho == pytest.approx(spearmanr(a, b).statistic, abs=1e-12)


@given(st.integers(2, 40), st.integers(1, 300), st.integers(0, 2**32))
def test_pairs_are_of_two_items_and_as_many_as_asked(n, n_pairs, seed):
    i, j = sample_pairs(n, n_pairs, rng(seed))
    every = set(combinations(range(n), 2))
    drawn = list(zip(j.tolist(), i.tolist(), strict=True))
    assert set(drawn) <= every
    assert len(drawn) <= n_pairs
    if n_pairs >= len(every):
        assert sorted(drawn) == sorted(every)


def test_pairs_are_uniform_but_for_those_of_an_item_with_itself():
    i, j = sample_pairs(100, 4000, rng(5))
    assert abs(len(i) - 4000 * 0.99) < 4 * np.sqrt(4000 * 0.01)
    assert ((j >= 0) & (j < i) & (i < 100)).all()
    # Uniform over the triangle: (i / n)^2 is uniform, so its mean is 1/2.
    assert np.mean((i / 100) ** 2) == pytest.approx(0.5, abs=0.03)
    assert len(set(zip(i.tolist(), j.tolist(), strict=True))) < len(i)  # with replacement


# -- layer selection ---------------------------------------------------------------------------


def naive_rho(counts, activation, idf, mask):
    """Eq. 1 from scratch: build the signatures on the mask, take all pair distances, rank."""
    n = len(counts)
    x = (counts * idf)[:, mask].reshape(n, -1)
    p = activation.reshape(n, -1).astype(float)
    return spearmanr(pdist(x, "cosine"), pdist(p, "cosine")).statistic


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_greedy_selection_matches_the_naive_one(seed):
    counts, activation, _ = structured(n=14, n_layers=4, n_experts=9, seed=seed)
    counts[:, :, 0] += 1  # no row of zeros: scipy's cosine distance would be NaN there
    counts[0, :, 1] = 0
    idf = idf_weights(counts) + 0.01
    found = select_layers(counts * idf, decode_overlap(activation, rng()))
    assert found.n_pairs == 14 * 13 // 2
    mask: list[int] = []
    for step, layer in enumerate(found.order):
        left = [c for c in range(4) if c not in mask]
        rho = {c: naive_rho(counts, activation, idf, [*mask, c]) for c in left}
        assert found.rho[step] == pytest.approx(max(rho.values()), abs=2e-3)
        assert rho[int(layer)] == pytest.approx(max(rho.values()), abs=2e-3)
        mask.append(int(layer))
    assert sorted(mask) == list(range(4))


def test_selection_finds_the_informative_layers():
    counts, activation, _ = structured(n=90, informative=(1, 3))
    found = select_layers(counts * (idf_weights(counts) + 0.01), decode_overlap(activation, rng()))
    assert set(found.order[:2].tolist()) == {1, 3}
    assert found.layers.tolist() == [1, 3]
    assert found.n_kept == 2
    assert found.rho[1] > found.rho[-1] + 0.02


def test_first_peak_wins_a_tie():
    counts, activation, _ = structured(n=30, n_layers=3, informative=(0, 1, 2))
    # Layers 1 and 2 repeat layer 0: nothing is gained by keeping them.
    counts[:, 1] = counts[:, 2] = counts[:, 0]
    found = select_layers(counts * (idf_weights(counts) + 0.01), decode_overlap(activation, rng()))
    assert found.order.tolist() == [0, 1, 2]
    assert found.n_kept == 1


def test_selection_needs_pairs_to_rank():
    _, activation, _ = structured(n=2, n_groups=2)
    with pytest.raises(InputError, match="calibration: 2 requests"):
        decode_overlap(activation, rng())


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(TRANSFORMS), st.sets(st.integers(0, 3), min_size=1))
def test_rho_of_any_mask_and_transform_matches_the_naive_one(seed, transform, mask):
    counts, activation, _ = structured(n=14, n_layers=4, n_experts=9, seed=seed)
    counts[:, :, 0] += 1
    if transform == "gate-logit":
        scores = rng(seed).normal(size=counts.shape).astype(np.float32)
    else:
        scores = counts
    features = transformed(scores, transform, idf_weights(counts) + 0.01)
    overlap = decode_overlap(activation, rng())
    found = select_layers(features, overlap, tuple(sorted(mask)))
    assert found.layers.tolist() == sorted(mask)
    assert sorted(found.order.tolist()) == list(range(4))
    for kept in range(1, 5):
        naive = naive_rho(features, activation, 1.0, found.order[:kept].tolist())
        # Equal signatures tie in exact arithmetic, and scipy's cosines tell them apart.
        assert found.rho[kept - 1] == pytest.approx(
            naive, abs=2e-2 if transform == "binary" else 2e-3
        )
    everything = select_layers(features, overlap, "all")
    assert everything.layers.tolist() == [0, 1, 2, 3]
    assert everything.rho[-1] == found.rho[-1] == select_layers(features, overlap).rho[-1]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(TRANSFORMS))
def test_rho_does_not_depend_on_lengths_or_on_the_order_of_anything(seed, transform):
    counts, activation, _ = structured(n=16, n_layers=4, n_experts=9, seed=seed)
    counts[0, :, 1] = 0
    r = rng(seed)

    def selection(counts, activation):
        features = transformed(counts, transform, idf_weights(counts))
        return select_layers(features, decode_overlap(activation, rng()))

    base = selection(counts, activation)
    # Powers of 4: their roots are exact.
    longer = selection(
        counts * (4 ** r.integers(0, 4, (16, 1, 1))).astype(np.uint32),
        activation * np.float32(2) ** r.integers(-3, 3, (16, 1, 1)),
    )
    requests, experts, layers = r.permutation(16), r.permutation(9), r.permutation(4)
    shuffled = selection(counts[requests][:, :, experts], activation[requests][:, :, experts])
    for other in (longer, shuffled):
        assert (other.rho == base.rho).all()
        assert other.order.tolist() == base.order.tolist()
    # Layers in another order: the same curve, unless two layers tie.
    moved = selection(counts[:, layers], activation[:, layers])
    assert moved.rho[-1] == base.rho[-1]
    assert moved.rho[0] == base.rho[0]


# -- layer masks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "mask"),
    [
        ("greedy", "greedy"),
        ("all", "all"),
        ("3", (3,)),
        (3, (3,)),
        (" 5, 0,3", (0, 3, 5)),
        ([2, 1], (1, 2)),
        ((0,), (0,)),
    ],
)
def test_layer_masks(value, mask):
    assert parse_layer_mask(value) == mask


@on_each("value", ["", "best", "1,x", "1,,2", "-1", "1.5", [], [1.5], ["a"], {}, 2.5, "²"])
def test_bad_layer_masks(value):
    with pytest.raises(InputError, match=r"layer_mask: .*allowed: greedy, all, or layer numbers"):
        parse_layer_mask(value)


def test_a_layer_is_named_once_and_exists():
    with pytest.raises(InputError, match="names a layer twice"):
        parse_layer_mask("1,2,1")
    counts, activation, _ = structured(n=10)
    with pytest.raises(InputError, match=r"layer_mask: no layer 5 \(allowed: .* from 0 to 4\)"):
        select_layers(counts * 1.0, decode_overlap(activation, rng()), (1, 5, 7))
