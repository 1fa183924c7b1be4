"""Trace statistics: against enumeration on tiny traces and published figures of the reference."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.traces.routing.format import open_trace
from eldr_sim.traces.routing.statistics import distinct_experts, expected_distinct, trace_statistics
from eldr_sim.traces.routing.structure import (
    domain_divergence,
    nearest_neighbour_accuracy,
    next_layer_entropy,
)
from eldr_sim.traces.routing.writer import write_trace

from ..on_each import on_each


@pytest.fixture(scope="module")
def reference():
    return trace_statistics(open_trace())


@pytest.fixture(scope="module")
def earlier(earlier_recording):
    return trace_statistics(earlier_recording[0])


def make_trace(out, seed, n=6, domains=("x", "y"), top_k=2, n_experts=5, **changes):
    rng = np.random.default_rng(seed)
    prompt = rng.integers(1, 4, n)
    output = rng.integers(1, 4, n)
    rows = output + (prompt if changes.get("prompt_rows", True) else 0)
    experts = np.argsort(rng.random((int(rows.sum()), 2, n_experts)), axis=-1)
    return write_trace(
        out,
        **changes,
        experts=experts[..., :top_k],
        request_id=[str(i) for i in range(n)],
        domain=[domains[i % len(domains)] for i in range(n)],
        prompt_len=prompt,
        output_len=output,
        is_calibration=np.arange(n) % 2 == 1,
        model="m",
        n_experts=n_experts,
        domains=list(domains),
        captured_by="test",
        source_data="drawn",
        tool_versions={},
        provenance="synthetic",
    )


def enumerate_distinct(trace, pools, takes):
    """Mean over every choice of requests and steps of the distinct experts, [layers]."""
    total, weight = np.zeros(trace.n_layers), 0.0
    picks = [list(itertools.combinations(p, t)) for p, t in zip(pools, takes, strict=True)]
    for pick in itertools.product(*picks):
        requests = [q for part in pick for q in part]
        steps = [range(trace.output_len[q]) for q in requests]
        share = 1 / np.prod([len(s) for s in steps])
        for step in itertools.product(*steps):
            rows = [
                trace.first_row[q] + trace.prompt_len[q] + s
                for q, s in zip(requests, step, strict=True)
            ]
            total += share * np.array(
                [
                    len(set(trace.experts[rows, layer].ravel().tolist()))
                    for layer in range(trace.n_layers)
                ]
            )
        weight += 1
    return total / weight


@given(seed=st.integers(0, 10**6), takes=st.tuples(st.integers(0, 3), st.integers(1, 3)))
@settings(max_examples=15, deadline=None)
def test_expected_distinct_against_enumeration(tmp_path_factory, seed, takes):
    trace = make_trace(tmp_path_factory.mktemp("traces") / "t", seed)
    pools = [np.flatnonzero(trace.domain == d) for d in (0, 1)]
    groups = [trace.decode_activation(p).astype(float) for p in pools]
    np.testing.assert_allclose(
        expected_distinct(groups, takes), enumerate_distinct(trace, pools, takes), rtol=1e-6
    )


def test_small_trace_against_loops(tmp_path):
    trace = make_trace(tmp_path / "t", seed=8)
    found = trace_statistics(trace, batch_sizes=(2, 3, 4))
    assert found.requests == {
        "x": {"calibration": 0, "serving": 3},
        "y": {"calibration": 3, "serving": 0},
    }
    x = trace.prompt_len[::2].tolist()
    assert found.prompt_len["x"] == {
        "min": min(x),
        "mean": pytest.approx(sum(x) / 3),
        "max": max(x),
    }
    loads = [np.bincount(trace.experts[:, layer].ravel(), minlength=5) for layer in range(2)]
    assert found.load_max_over_mean == pytest.approx([n.max() / n.mean() for n in loads])
    assert found.unused_experts == [int((n == 0).sum()) for n in loads]

    assert [(d.batch, d.group) for d in found.distinct_experts] == [(2, "all"), (3, "all")]
    three = found.distinct_experts[1]
    pools = [np.flatnonzero(trace.domain == d) for d in (0, 1)]
    assert three.mixed == pytest.approx(enumerate_distinct(trace, pools, (2, 1)).mean())
    assert three.same_domain["y"] == pytest.approx(
        enumerate_distinct(trace, pools[1:], (3,)).mean()
    )
    assert three.uniform == pytest.approx(5 * (1 - 0.6**3))
    assert three.reduction == pytest.approx(
        1 - (three.same_domain["x"] + three.same_domain["y"]) / 2 / three.mixed
    )

    shares, generated = [], []
    for q in range(6):
        row = trace.first_row[q] + trace.prompt_len[q]
        for r in range(row, row + trace.output_len[q]):
            generated.append(r)
            if r > row:
                shares += [
                    len(
                        set(trace.experts[r, layer].tolist())
                        & set(trace.experts[r - 1, layer].tolist())
                    )
                    / 2
                    for layer in range(2)
                ]
    assert found.neighbour_reuse == pytest.approx(np.mean(shares))
    pairs = [
        len(set(trace.experts[a, layer].tolist()) & set(trace.experts[b, layer].tolist())) / 2
        for a in generated
        for b in generated
        for layer in range(2)
    ]
    assert found.random_reuse == pytest.approx(np.mean(pairs))
    assert found.uniform_reuse == 0.4


def test_identical_tokens(tmp_path):
    trace = write_trace(
        tmp_path / "t",
        experts=np.tile(np.array([[[1, 3]]]), (12, 1, 1)),
        request_id=["a", "b"],
        domain=["x", "x"],
        prompt_len=[3, 3],
        output_len=[3, 3],
        is_calibration=[True, False],
        model="m",
        n_experts=4,
        domains=["x", "unused"],
        captured_by="test",
        source_data="drawn",
        tool_versions={},
        provenance="synthetic",
    )
    found = trace_statistics(trace, batch_sizes=(1, 2))
    assert found.neighbour_reuse == found.random_reuse == 1
    assert found.prefill_decode_pearson == {"x": pytest.approx(1)}
    assert [d.mixed for d in found.distinct_experts] == [2, 2]
    assert found.load_max_over_mean == [2]
    assert found.unused_experts == [2]


# Sampled by another program, 200 batches a figure: by batch, what one domain's batch saves
# against the mix of its own group, task and language, %.
EARLIER_REDUCTION = {
    8: (11.9, 16.9),
    16: (15.7, 20.8),
    32: (15.1, 21.5),
    64: (11.3, 17.8),
    128: (6.4, 11.4),
}
# Of the embedded trace, also by another program.
REDUCTION = {8: (10.3, 17.1), 16: (12.2, 20.4), 32: (11.8, 20.7), 64: (9.0, 17.5), 128: (5.5, 11.9)}
REDUCTION_OF_ALL = {8: 17.7, 16: 21.6, 32: 21.9, 64: 17.6, 128: 11.0}


def reductions(statistics):
    found = {}
    for entry in statistics.distinct_experts:
        found.setdefault(entry.batch, {})[entry.group] = 100 * entry.reduction
    return found


def test_same_domain_reduction_of_the_earlier_recording(earlier):
    for batch, found in reductions(earlier).items():
        task, language = EARLIER_REDUCTION[batch]
        assert found == {
            "task": pytest.approx(task, abs=0.6),
            "language": pytest.approx(language, abs=0.6),
        }
    pearson = earlier.prefill_decode_pearson.values()
    assert min(pearson) == pytest.approx(0.82, abs=0.01)
    assert max(pearson) == pytest.approx(0.99, abs=0.01)
    assert earlier.unused_experts == [0] * 6


def test_same_domain_reduction_of_the_embedded_trace(reference):
    """To the digits that the other program gave, where this one does not sample."""
    found = reductions(reference)
    assert found.keys() == REDUCTION.keys()
    for batch, (task, language) in REDUCTION.items():
        assert found[batch] == {
            "task": pytest.approx(task, abs=0.11),
            "language": pytest.approx(language, abs=0.11),
        }


def test_distinct_experts_alone_are_those_of_the_statistics(tmp_path):
    trace = make_trace(tmp_path / "t", seed=8, n=9, domains=("x", "y"))
    found = distinct_experts(trace, (1, 2, 3))
    assert found
    assert found == trace_statistics(trace, (1, 2, 3)).distinct_experts


def test_same_domain_reduction_against_the_mix_of_all_eight(reference):
    trace = open_trace()
    activation = trace.decode_activation(np.arange(trace.n_requests)).astype(np.float64)
    groups = [activation[trace.domain == d] for d in range(8)]
    for batch, percent in REDUCTION_OF_ALL.items():
        mixed = expected_distinct(groups, [batch // 8] * 8).mean()
        same = [
            distinct
            for entry in reference.distinct_experts
            if entry.batch == batch
            for distinct in entry.same_domain.values()
        ]
        assert len(same) == 8
        assert 100 * (1 - np.mean(same) / mixed) == pytest.approx(percent, abs=0.11)


def test_reference_model(reference):
    """Against figures of another program, to their last digit."""
    uniform = {d.batch: d.uniform for d in reference.distinct_experts}
    assert uniform == {
        8: pytest.approx(51.6, abs=0.05),
        16: pytest.approx(82.4, abs=0.05),
        32: pytest.approx(111.8, abs=0.05),
        64: pytest.approx(125.9, abs=0.05),
        128: pytest.approx(128.0, abs=0.05),
    }
    assert reference.prefill_decode_pearson == {
        name: pytest.approx(value, abs=6e-4)
        for name, value in {
            "code": 0.855, "math": 0.833, "medical": 0.943, "legal": 0.945,
            "en": 0.916, "zh": 0.939, "ru": 0.992, "fr": 0.973,
        }.items()
    }  # fmt: skip
    load = [2.90, 1.95, 2.16, 1.78, 2.49, 1.80, 2.12, 1.92, 2.27, 2.27]
    assert reference.load_max_over_mean == pytest.approx(load, abs=6e-3)
    assert reference.unused_experts == [0] * 10
    assert reference.neighbour_reuse == pytest.approx(0.252, abs=6e-4)
    assert reference.random_reuse == pytest.approx(0.073, abs=6e-4)
    assert reference.uniform_reuse == 0.0625
    assert reference.nearest_neighbour_accuracy == pytest.approx(0.972, abs=6e-4)
    json.dumps(reference.as_dict(), allow_nan=False)


# --- structure: against plain loops -------------------------------------------------------------


def entropy(chance):
    return -sum(p * np.log2(p) for p in chance.values() if p)


def decoded_rows(trace):
    for q in range(trace.n_requests):
        first, length = (int(x[0]) for x in trace.recorded_rows([q]))
        yield from range(first + length - trace.output_len[q], first + length)


@on_each("prompt_rows", [True, False])
@on_each("groups", [None, [1, 2], [1, 1, 1], [2, 1]])
def test_next_layer_entropy_against_loops(tmp_path, groups, prompt_rows):
    trace = make_trace(
        tmp_path / "t", seed=3, n=9, top_k=3, rank_groups=groups, prompt_rows=prompt_rows
    )
    found = {layer.of: layer for layer in next_layer_entropy(trace)}
    assert set(found) == ({"top-1", "any"} if groups and groups[0] == 1 else {"any"})
    for name, take in {"top-1": 1, "any": 3}.items():
        if name not in found:
            continue
        joint = {}
        for row in decoded_rows(trace):
            for a, b in itertools.product(*trace.experts[row, :, :take].tolist()):
                joint[a, b] = joint.get((a, b), 0) + 1
        total = sum(joint.values())
        joint = {pair: n / total for pair, n in joint.items()}
        one, other = ({}, {})
        for (a, b), p in joint.items():
            one[a] = one.get(a, 0) + p
            other[b] = other.get(b, 0) + p
        assert found[name].entropy == [pytest.approx(entropy(other))]
        assert found[name].conditional == [pytest.approx(entropy(joint) - entropy(one))]


def test_domain_divergence_against_loops(tmp_path):
    trace = make_trace(tmp_path / "t", seed=4, n=8)
    counts = np.zeros((8, 2, 5))
    for q in range(8):
        first, length = (int(x[0]) for x in trace.recorded_rows([q]))
        for row in range(first + length - trace.output_len[q], first + length):
            for layer in range(2):
                counts[q, layer, trace.experts[row, layer]] += 1
    found = domain_divergence(counts, trace.domain, trace.domains)
    of_trace = trace_statistics(trace).domain_divergence
    assert of_trace.by_layer == pytest.approx(found.by_layer, abs=1e-6)

    def js(one, other):
        by_layer = []
        for layer in range(2):
            p, q = (
                dict(enumerate(counts[members, layer].sum(axis=0) / counts[members, layer].sum()))
                for members in (one, other)
            )
            middle = {e: (p[e] + q[e]) / 2 for e in p}
            by_layer.append(entropy(middle) - (entropy(p) + entropy(q)) / 2)
        return np.array(by_layer)

    x, y = [0, 2, 4, 6], [1, 3, 5, 7]
    assert found.between["x"]["y"] == pytest.approx(js(x, y).mean(), abs=1e-6)
    assert found.between["y"]["x"] == found.between["x"]["y"]
    assert found.between["x"]["x"] == 0
    assert found.split_half["x"] == pytest.approx(js(x[::2], x[1::2]).mean(), abs=1e-6)
    assert found.by_layer == pytest.approx(js(x, y).tolist(), abs=1e-6)


@given(seed=st.integers(0, 10**6), n=st.integers(2, 7))
@settings(max_examples=20, deadline=None)
def test_nearest_neighbour_against_loops(seed, n):
    rng = np.random.default_rng(seed)
    features = rng.random((n, 2, 3)) + 0.01
    domain = rng.integers(0, 2, n)

    def cosine(a, b):
        a, b = a.ravel(), b.ravel()
        return a @ b / np.sqrt((a @ a) * (b @ b))

    hits = 0
    for i in range(n):
        others = [j for j in range(n) if j != i]
        hits += domain[max(others, key=lambda j: cosine(features[i], features[j]))] == domain[i]
    assert nearest_neighbour_accuracy(features, domain) == pytest.approx(hits / n)


def test_decode_only_statistics(tmp_path):
    """All that does not need prompts equals that of the trace with prompts cut off."""
    whole = make_trace(tmp_path / "whole", seed=6, n=8)
    rows = list(decoded_rows(whole))
    alone = write_trace(
        tmp_path / "alone",
        experts=whole.experts[rows],
        request_id=whole.request_id,
        domain=[whole.domains[d] for d in whole.domain],
        prompt_len=whole.prompt_len,
        output_len=whole.output_len,
        is_calibration=whole.is_calibration,
        model="m",
        n_experts=5,
        domains=whole.domains,
        captured_by="test",
        source_data="drawn",
        tool_versions={},
        provenance="synthetic",
        prompt_rows=False,
    )
    found, want = trace_statistics(alone), trace_statistics(whole)
    assert found.prefill_decode_pearson == {}
    for name in (
        "requests", "prompt_len", "output_len", "distinct_experts", "neighbour_reuse",
        "random_reuse", "next_layer", "domain_divergence", "copies",
    ):  # fmt: skip
        assert getattr(found, name) == getattr(want, name), name


def test_more_than_256_experts(tmp_path):
    """Two bytes an expert, nine words a bit set; every statistic still counts right."""
    trace = make_trace(tmp_path / "t", seed=2, n=6, n_experts=520, top_k=9, rank_groups=[1] * 9)
    assert trace.experts.dtype == np.uint16
    found = trace_statistics(trace, batch_sizes=(2,))
    loads = [np.bincount(trace.experts[:, layer].ravel(), minlength=520) for layer in range(2)]
    assert found.load_max_over_mean == pytest.approx([n.max() / n.mean() for n in loads])
    assert found.unused_experts == [int((n == 0).sum()) for n in loads]
    json.dumps(found.as_dict(), allow_nan=False)
