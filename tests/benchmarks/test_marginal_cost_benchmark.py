"""Time of one decision of ``marginal_cost`` and of the oracle, at 16 and at 256 decoders.

Run on one core: ``OPENBLAS_NUM_THREADS=1 pytest tests/benchmarks/test_marginal_cost_benchmark.py
-m slow``. Sizes: the embedded trace (10 layers) and the 48 layers of Qwen3-30B-A3B, 128 experts.
"""

import itertools

import numpy as np
import pytest

from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.policies.base import PolicyContext, RequestInfo, Workers
from eldr_sim.policies.routing.activation import fit_activation
from eldr_sim.policies.routing.marginal_cost import MarginalCostPolicy, OraclePolicy
from eldr_sim.traces.routing.calibration import CalibrationSet

pytestmark = pytest.mark.slow

N_EXPERTS, TOP_K = 128, 8


def calibration(n_layers, n=200, seed=0):
    r = np.random.default_rng(seed)
    share = r.dirichlet(np.full(N_EXPERTS, 0.3), (n, n_layers)) * TOP_K
    return CalibrationSet(
        counts=r.poisson(share * 100).astype(np.uint16),
        decode_activation=np.minimum(share, 1).astype(np.float32),
        domain=np.zeros(n, np.int16),
        domains=["all"],
        requests=np.arange(n),
        trace_checksum="",
    )


@pytest.fixture(scope="module")
def step_times():
    made = build_step_time_model("Qwen3-30B-A3B", "H100", max_num_seqs=256, max_model_len=4096)
    return made.cost


def build(name, n_workers, known, step_times):
    """A policy with 60 requests on each worker."""
    if name == "oracle":
        activation = calibration(48, 64).decode_activation.astype(np.float64)
        policy = OraclePolicy(
            PolicyContext(
                n_workers,
                np.random.default_rng(0),
                step_times=step_times,
                future=lambda request: activation[request % 64],
            )
        )
        requests = [RequestInfo(i, 100, 0) for i in range(64)]
    else:
        known = calibration(known)
        policy = MarginalCostPolicy(
            PolicyContext(
                n_workers, np.random.default_rng(0), step_times=step_times, calibration=known
            )
        )
        requests = [
            RequestInfo(i, 100, 0, signature=known.counts[i], signature_id=i) for i in range(64)
        ]
    return policy, requests


@pytest.mark.parametrize("n_workers", [16, 256])
@pytest.mark.parametrize(
    ("name", "n_layers"), [("marginal_cost", 10), ("marginal_cost", 48), ("oracle", 48)]
)
def test_select(benchmark, step_times, name, n_layers, n_workers):
    policy, requests = build(name, n_workers, n_layers, step_times)
    loads = np.full(n_workers, 60)
    turn = itertools.cycle(requests)
    for _ in range(2 * len(requests)):
        request = next(turn)
        policy.on_complete(request.request_id, policy.select(request, Workers.idle(loads)))

    def decide():
        request = next(turn)
        policy.on_complete(request.request_id, policy.select(request, Workers.idle(loads)))

    benchmark(decide)


def test_predict(benchmark):
    known = calibration(48)
    model = fit_activation(known)
    assert benchmark(model.predict, known.counts[0]).shape == (48, N_EXPERTS)


def test_fit(benchmark):
    """At the paper's size: 1,000 calibration requests."""
    benchmark.pedantic(fit_activation, (calibration(48, 1000),), rounds=3)
