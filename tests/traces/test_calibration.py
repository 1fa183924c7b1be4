"""Calibration sets: in proportion to the mix, as large as it allows, and never served."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.policies.eldr.artifact import fit
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.traces.routing.calibration import calibration_set
from eldr_sim.traces.routing.format import open_trace
from eldr_sim.traces.routing.writer import write_trace

from ..workloads import make_workload


@pytest.fixture(scope="module")
def trace():
    return open_trace()


def test_task_and_language(trace):
    task = calibration_set(trace, workload="task")
    # legal runs out first: 131 / (3600 / 11668) = 424.6
    assert np.bincount(task.domain, minlength=8).tolist() == [101, 100, 92, 131, 0, 0, 0, 0]
    language = calibration_set(trace, workload="language")
    # English runs out first: 131 / (60.2 / 87.6) = 190.6
    assert np.bincount(language.domain, minlength=8).tolist() == [0, 0, 0, 0, 131, 32, 20, 7]
    log = calibration_set(trace, workload="any/log.csv")
    # In proportion to the serving split, which has one more of code and math, too.
    assert np.bincount(log.domain).tolist() == [132] * 2 + [131] * 6


def test_requests_that_have_gate_scores(trace):
    """Those of 32 calibration requests a domain: the same mix, of smaller pools."""
    task = calibration_set(trace, workload="task", score="prob")
    # legal runs out first: 32 / (3600 / 11668) = 103.7
    assert np.bincount(task.domain, minlength=8).tolist() == [25, 24, 22, 32, 0, 0, 0, 0]
    assert set(task.requests) <= set(trace.gate_scores.requests)
    assert task.scores("prob").shape == task.counts.shape
    # Softmax probabilities of a token sum to 1.
    np.testing.assert_allclose(
        task.scores("prob").sum(axis=2), trace.prompt_len[task.requests][:, None].repeat(10, 1),
        rtol=1e-4,
    )  # fmt: skip
    assert (task.requests == calibration_set(trace, workload="task", score="logit").requests).all()
    some = trace.gate_scores.requests[trace.domain[trace.gate_scores.requests] != 1]
    partial = replace(trace, gate_scores=replace(trace.gate_scores, requests=some))
    with pytest.raises(InputError, match=r"with gate scores \(prob\) of domain 'math'"):
        calibration_set(partial, workload="task", score="prob")
    with pytest.raises(InputError, match="carries no logit in gate_scores"):
        calibration_set(replace(trace, gate_scores=None), workload="task", score="logit")


def test_contents(trace):
    picked = calibration_set(trace, workload="task")
    n = len(picked.requests)
    assert picked.counts.shape == picked.decode_activation.shape == (n, 10, 128)
    assert picked.domains == trace.domains
    assert picked.trace_checksum == trace.manifest.checksum
    np.testing.assert_array_equal(picked.counts, trace.prompt_counts(picked.requests))
    np.testing.assert_array_equal(picked.domain, trace.domain[picked.requests])
    np.testing.assert_array_equal(
        picked.counts.sum(axis=2), 8 * trace.prompt_len[picked.requests][:, None].repeat(10, 1)
    )
    np.testing.assert_allclose(picked.decode_activation.sum(axis=2), 8, rtol=1e-5)


POOLS = np.arange(57, 65)  # calibration requests by domain


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """Eight domains whose pools of calibration requests differ; a token of prompt and output."""
    n = int(POOLS.sum())
    names = [f"d{i}" for i in range(8)]
    return write_trace(
        tmp_path_factory.mktemp("traces") / "uneven",
        experts=np.zeros((2 * n, 1, 1), int),
        request_id=[str(i) for i in range(n)],
        domain=np.random.default_rng(0).permutation(np.repeat(names, POOLS)).tolist(),
        prompt_len=[1] * n,
        output_len=[1] * n,
        is_calibration=[True] * n,
        model="m",
        n_experts=1,
        domains=names,
        captured_by="test",
        source_data="drawn",
        tool_versions={},
        provenance="synthetic",
    )


@given(
    weights=st.lists(st.floats(0.01, 100), min_size=8, max_size=8),
    zero=st.sets(st.integers(0, 7), max_size=6),
)
@settings(max_examples=30, deadline=None)
def test_proportions(uneven, weights, zero):
    trace = uneven
    mix = {
        name: 0.0 if d in zero else w
        for d, (name, w) in enumerate(zip(trace.domains, weights, strict=True))
    }
    picked = calibration_set(trace, workload="log", domain_mix=mix)
    share = np.array(list(mix.values())) / sum(mix.values())
    counts = np.bincount(picked.domain, minlength=8)
    assert (counts[share == 0] == 0).all()
    assert (counts[share > 0] >= 1).all()
    assert (counts >= POOLS - 1).any()  # one domain uses its pool up
    total = (POOLS[share > 0] / share[share > 0]).min()
    assert (np.abs(counts - np.where(share > 0, np.maximum(1, total * share), 0)) <= 1.5).all()
    assert len(set(picked.requests.tolist())) == len(picked.requests)
    assert trace.is_calibration[picked.requests].all()


def test_never_served(trace):
    served = make_workload(trace, request_rate=100, num_requests=5000, trace_replay="same_domain")
    fitted = set(calibration_set(trace, workload="task").requests.tolist())
    assert not fitted & set(served.text.tolist())
    assert not fitted & set(served.decode_request.tolist())


def test_domain_without_calibration_requests(tmp_path):
    trace = write_trace(
        tmp_path / "t",
        experts=np.zeros((6, 1, 1), int),
        request_id=["0", "1", "2"],
        domain=["x", "y", "x"],
        prompt_len=[1, 1, 1],
        output_len=[1, 1, 1],
        is_calibration=[True, False, False],
        model="m",
        n_experts=1,
        domains=["x", "y"],
        captured_by="test",
        source_data="drawn",
        tool_versions={},
        provenance="synthetic",
    )
    assert calibration_set(trace, workload="log").requests.tolist() == [0]  # y was never fitted
    with pytest.raises(InputError, match="no calibration request of domain 'y'"):
        calibration_set(trace, workload="log", domain_mix={"y": 1})
    assert calibration_set(trace, workload="log", domain_mix={"x": 1}).requests.tolist() == [0]


def test_eldr_serves_a_domain_that_its_calibration_lacks(tmp_path):
    """It routes by signature: requests of y, all unseen, go where their experts are."""
    rng, half, served = np.random.default_rng(0), np.arange(64) < 32, 24
    like = {"x": np.where(half, 4.0, 0.0), "y": np.where(half, 0.0, 4.0), "z": np.zeros(64)}
    names = [["x", "z"][i % 2] for i in range(served)] + [["x", "y", "z"][i % 3] for i in range(36)]
    noise = rng.gumbel(size=(len(names), 12, 2, 64))
    chosen = np.argsort(-(noise + np.stack([like[d] for d in names])[:, None, None]))[..., :8]
    trace = write_trace(
        tmp_path / "t", experts=chosen.reshape(-1, 2, 8), request_id=[f"{i}" for i in range(60)],
        domain=names, prompt_len=[6] * 60, output_len=[6] * 60,
        is_calibration=[i < served for i in range(60)], model="m", n_experts=64,
        domains=["x", "y", "z"], captured_by="test", source_data="drawn", tool_versions={},
        provenance="synthetic",
    )  # fmt: skip
    values = {
        "trace": str(trace.path), "model": "OLMoE-1B-7B", "topology": "1P2D", "workload": "trace",
        "policy": "eldr:tau=0", "num_requests": 90, "output_len": 6, "warmup": 0,
    }  # fmt: skip
    rows = simulate(make_config(values)).requests.to_pandas()
    of = {d: rows.decode_worker[rows.domain == d] for d in ("x", "y")}
    assert len(of["y"]) > 10
    assert len(np.unique(of["y"])) == 1  # one cluster, although no label and no fit named it


def test_few_requests_are_cut_into_as_many_pieces_as_are_asked_for():
    """Pieces of all requests together are the requests, token by token."""
    trace = open_trace("qwen3-30b-a3b")
    whole = calibration_set(trace, workload="trace")
    assert whole.pieces == 1
    cut = calibration_set(trace, workload="trace", at_least=16)
    n = len(whole.requests)
    assert n < 16 <= len(cut.requests) < 16 + n
    assert cut.pieces * n == len(cut.requests)

    def tokens(calibration):
        trace = calibration.trace
        chosen = calibration.counts.sum(axis=0, dtype=np.int64)
        answers = trace.output_len[calibration.requests][:, None, None]
        return chosen + (calibration.decode_activation * answers).sum(axis=0).round()

    assert np.array_equal(tokens(cut), tokens(whole))
    assert np.array_equal(cut.domain, np.repeat(whole.domain, cut.pieces))
    shares = whole.trace.prompt_len / (whole.trace.prompt_len + whole.trace.output_len)
    made = cut.trace.prompt_len / (cut.trace.prompt_len + cut.trace.output_len)
    assert np.allclose(made, np.repeat(shares[whole.requests], cut.pieces), atol=0.05)
    fit(cut, 16, seed=0)
