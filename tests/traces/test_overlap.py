"""Figures of `request_overlap` against brute force and closed forms."""

from itertools import combinations

import numpy as np
import pytest

from eldr_sim.traces.routing.overlap import request_overlap
from eldr_sim.traces.routing.writer import write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    rng = np.random.default_rng(0)
    lengths = np.array([[4, 12], [3, 6], [5, 20], [2, 9]])
    ids = np.argsort(rng.random((lengths.sum(), 2, 10)), axis=2)[:, :, :3]
    return write_trace(
        tmp_path_factory.mktemp("trace") / "t",
        experts=ids,
        request_id=list("abcd"),
        domain=["x"] * 4,
        prompt_len=lengths[:, 0],
        output_len=lengths[:, 1],
        is_calibration=[True, False, True, False],
        model="m",
        n_experts=10,
        domains=["x"],
        captured_by="test",
        source_data="test",
        tool_versions={},
        provenance="synthetic",
    )


def rows(trace):
    first, length = trace.recorded_rows(np.arange(trace.n_requests))
    return [np.asarray(trace.experts[a : a + n]) for a, n in zip(first, length, strict=True)]


def counts(ids, experts=10):
    return np.stack([np.bincount(ids[:, layer].ravel(), minlength=experts) for layer in range(2)])


def test_mixed_is_the_mean_over_all_sets_of_requests_and_tokens(trace):
    share = [counts(own) / len(own) for own in rows(trace)]
    sets = [
        (1 - np.prod([1 - share[r] for r in chosen], axis=0)).sum(axis=1).mean()
        for chosen in combinations(range(4), 4)
    ]
    found = request_overlap(trace)
    assert found.mixed == {4: pytest.approx(np.mean(sets))}


def test_windows_of_one_request(trace):
    found = request_overlap(trace)
    for tokens in (8, 16):
        seen = [
            np.mean(
                [
                    len(np.unique(own[a : a + tokens, layer]))
                    for a in range(0, len(own) - tokens + 1, tokens // 2)
                    for layer in range(2)
                ]
            )
            for own in rows(trace)
            if len(own) >= tokens
        ]
        assert found.one_request[tokens] == pytest.approx(np.mean(seen))
    assert list(found.one_request) == [8, 16]


def test_load_and_cosines(trace):
    found = request_overlap(trace)
    every = [counts(own).ravel().astype(float) for own in rows(trace)]
    load = sum(every).reshape(2, 10)
    assert found.load_max_over_mean == pytest.approx(load.max(axis=1) / load.mean(axis=1))
    assert found.load_cv == pytest.approx(load.std(axis=1) / load.mean(axis=1))

    def cosine(a, b):
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    pairs = {(i, j): cosine(every[i], every[j]) for i, j in combinations(range(4), 2)}
    assert found.cosine_between[50] == pytest.approx(np.median(list(pairs.values())))
    nearest = [max(value for pair, value in pairs.items() if r in pair) for r in range(4)]
    assert found.cosine_nearest == pytest.approx(np.mean(nearest))
    halves = [
        cosine(counts(own[: len(own) // 2]).ravel(), counts(own[len(own) // 2 :]).ravel())
        for own in rows(trace)
    ]
    assert found.cosine_within == pytest.approx(np.mean(halves))
