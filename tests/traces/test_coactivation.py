"""Co-activation against counting pair by pair, and what it must sum to."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.traces.routing.bitsets import pack_bits
from eldr_sim.traces.routing.calibration import CalibrationSet, calibration_set
from eldr_sim.traces.routing.coactivation import affinity_of, coactivation, count_coactivation
from eldr_sim.traces.routing.format import open_trace


@given(
    tokens=st.integers(0, 40),
    layers=st.integers(1, 3),
    n_experts=st.sampled_from([4, 64, 68, 130]),
    seed=st.integers(0, 2**32),
)
def test_pairs_are_counted_one_by_one(tokens, layers, n_experts, seed):
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((tokens, layers, n_experts)), axis=2)[..., :3]
    rows = rng.integers(tokens, size=2 * tokens) if tokens else np.zeros(0, np.int64)
    expected = np.zeros((layers, n_experts, n_experts), np.int64)
    for row in rows:
        for layer in range(layers):
            for a in ids[row, layer]:
                for b in ids[row, layer]:
                    expected[layer, a, b] += 1
    found = count_coactivation(pack_bits(ids, n_experts), rows, n_experts)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(affinity_of(found).sum(axis=2), 2 * expected.diagonal(0, 1, 2))


def test_tokens_of_prompts_and_generated_ones_are_all():
    trace = open_trace("reference-moe")
    requests = np.array([3, 5])
    parts = [coactivation(trace, requests, which) for which in ("prompt", "decode")]
    np.testing.assert_array_equal(sum(parts), coactivation(trace, requests))
    load = parts[1].diagonal(0, 1, 2)
    activation = trace.decode_activation(requests) * trace.output_len[requests][:, None, None]
    np.testing.assert_allclose(load, activation.sum(axis=0), atol=1e-3)
    np.testing.assert_array_equal(
        parts[0].diagonal(0, 1, 2), trace.prompt_counts(requests).sum(axis=0, dtype=np.int64)
    )


def test_calibration_requests_are_counted_once():
    calibration = calibration_set(open_trace("reference-moe"), workload="task")
    found = calibration.coactivation("decode")
    assert calibration.coactivation("decode") is found
    assert not found.flags.writeable
    alone = CalibrationSet(None, calibration.decode_activation, calibration.domain, [], [], "")
    with pytest.raises(InputError, match="no trace to count"):
        alone.coactivation()
