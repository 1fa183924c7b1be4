"""Calibration sets: in proportion to the mix, as large as it allows, and never served."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.traces.calibration import calibration_set
from eldr_sim.traces.format import open_trace
from eldr_sim.traces.workload import make_workload
from eldr_sim.traces.writer import write_trace


@pytest.fixture(scope="module")
def trace():
    return open_trace()


def test_task_and_language(trace):
    task = calibration_set(trace, workload="task")
    # legal runs out first: 64 / (3600 / 11668) = 207.4
    assert np.bincount(task.domain, minlength=8).tolist() == [49, 49, 45, 64, 0, 0, 0, 0]
    language = calibration_set(trace, workload="language")
    # English runs out first: 64 / (60.2 / 87.6) = 93.1
    assert np.bincount(language.domain, minlength=8).tolist() == [0, 0, 0, 0, 64, 16, 10, 3]
    log = calibration_set(trace, workload="any/log.csv")
    assert np.bincount(log.domain).tolist() == [64] * 8


def test_contents(trace):
    picked = calibration_set(trace, workload="task")
    n = len(picked.requests)
    assert picked.counts.shape == picked.decode_activation.shape == (n, 6, 128)
    assert picked.domains == trace.domains
    assert picked.trace_checksum == trace.manifest.checksum
    np.testing.assert_array_equal(picked.counts, trace.prompt_counts(picked.requests))
    np.testing.assert_array_equal(picked.domain, trace.domain[picked.requests])
    np.testing.assert_array_equal(
        picked.counts.sum(axis=2), 8 * trace.prompt_len[picked.requests][:, None].repeat(6, 1)
    )
    np.testing.assert_allclose(picked.decode_activation.sum(axis=2), 8, rtol=1e-5)


@given(
    weights=st.lists(st.floats(0.01, 100), min_size=8, max_size=8),
    zero=st.sets(st.integers(0, 7), max_size=6),
)
@settings(max_examples=30, deadline=None)
def test_proportions(weights, zero):
    trace = open_trace(verify_checksum=False)
    mix = {
        name: 0.0 if d in zero else w
        for d, (name, w) in enumerate(zip(trace.domains, weights, strict=True))
    }
    picked = calibration_set(trace, workload="log", domain_mix=mix)
    share = np.array(list(mix.values())) / sum(mix.values())
    counts = np.bincount(picked.domain, minlength=8)
    assert (counts[share == 0] == 0).all()
    assert (counts[share > 0] >= 1).all()
    assert counts.max() >= 63  # the largest share uses its pool up
    total = min(64 / s for s in share if s > 0)
    assert (np.abs(counts - np.where(share > 0, np.maximum(1, total * share), 0)) <= 1.5).all()
    assert len(set(picked.requests.tolist())) == len(picked.requests)
    assert trace.is_calibration[picked.requests].all()


def test_never_served(trace):
    served = make_workload(trace, request_rate=100, num_requests=5000, trace_replay="same_domain")
    fitted = set(calibration_set(trace, workload="task").requests.tolist())
    assert not fitted & set(served.trace_request.tolist())
    assert not fitted & set(served.decode_request.tolist())


def test_domain_without_calibration_requests(tmp_path):
    trace = write_trace(
        tmp_path / "t",
        experts=np.zeros((4, 1, 1), int),
        request_id=["0", "1"],
        domain=["x", "y"],
        prompt_len=[1, 1],
        output_len=[1, 1],
        is_calibration=[True, False],
        model="m",
        n_experts=1,
        domains=["x", "y"],
        captured_by="test",
        source_data="drawn",
        tool_versions={},
        provenance="synthetic",
    )
    with pytest.raises(InputError, match="no calibration request of domain 'y'"):
        calibration_set(trace, workload="log")
    assert calibration_set(trace, workload="log", domain_mix={"x": 1}).requests.tolist() == [0]
