"""Time of ELDR's offline fit and of one routing decision, at the paper's sizes.

Run on one core: ``OPENBLAS_NUM_THREADS=1 pytest tests/benchmarks/test_fit_benchmark.py -m slow``.
ELDR Sec. 6.2 states under 10 s for the fit and 0.15 ms for a decision at the proxy.
"""

import numpy as np
import pytest

from eldr_sim.policies.base import PolicyContext, RequestInfo, Workers
from eldr_sim.policies.eldr.artifact import fit
from eldr_sim.policies.eldr.router import EldrPolicy
from eldr_sim.traces.routing.calibration import CalibrationSet

pytestmark = pytest.mark.slow

N_WORKERS = 16


def structured(n=1000, n_layers=48, n_experts=128, n_domains=8, top_k=8, seed=0):
    """Synthetic requests: experts of uneven popularity, tastes of domain and of request."""
    r = np.random.default_rng(seed)
    domain = r.integers(n_domains, size=n)
    logits = 0.7 * r.normal(size=(n_layers, n_experts)) + 0.3 * r.normal(
        size=(n, n_layers, n_experts)
    )
    strength = np.linspace(0.1, 0.8, n_layers)[:, None]
    logits += (strength * r.normal(size=(n_domains, n_layers, n_experts)))[domain]
    share = np.exp(logits)
    share *= top_k / share.sum(axis=2, keepdims=True)
    length = r.integers(50, 600, size=(n, 1, 1))
    return CalibrationSet(
        counts=r.poisson(share * length).astype(np.uint16),
        decode_activation=np.minimum(r.poisson(share * 256) / 256, 1).astype(np.float32),
        domain=domain.astype(np.int16),
        domains=[f"domain-{index}" for index in range(n_domains)],
        requests=np.arange(n),
        trace_checksum="",
    )


@pytest.fixture(scope="module")
def calibration():
    return structured()


def test_fit(benchmark, calibration):
    made = benchmark.pedantic(fit, (calibration, N_WORKERS, 0), rounds=3)
    assert made.cluster_sizes.max() <= 63
    assert benchmark.stats["max"] < 10


@pytest.mark.parametrize("repeated", [False, True], ids=["new signature", "known signature"])
def test_select(benchmark, calibration, repeated):
    made = fit(calibration, N_WORKERS, 0)
    policy = EldrPolicy(PolicyContext(N_WORKERS, np.random.default_rng(0), artifact=made))
    signature_id = 0 if repeated else None
    request = RequestInfo(0, 100, 0, signature=calibration.counts[0], signature_id=signature_id)
    workers = Workers.idle(np.random.default_rng(0).integers(0, 30, N_WORKERS))
    assert benchmark(policy.select, request, workers) in range(N_WORKERS)
