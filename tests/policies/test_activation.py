"""The regression from prefill counts to decode activation, against refits done by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim import cache
from eldr_sim.errors import InputError
from eldr_sim.policies.routing import activation
from eldr_sim.policies.routing.activation import (
    RIDGES,
    ActivationModel,
    cached_activation,
    fit_activation,
)
from eldr_sim.traces.routing.calibration import CalibrationSet, calibration_set
from eldr_sim.traces.routing.format import open_trace

from ..workloads import make_workload


def make_calibration(counts, activation):
    n = len(counts)
    return CalibrationSet(
        counts=counts.astype(np.uint16),
        decode_activation=activation.astype(np.float32),
        domain=np.zeros(n, np.int16),
        domains=["all"],
        requests=np.arange(n),
        trace_checksum="",
    )


def noisy(n=30, n_layers=2, n_experts=7, seed=0):
    r = np.random.default_rng(seed)
    share = r.dirichlet(np.full(n_experts, 0.5), (n, n_layers))
    counts = r.poisson(share * 60) + 1
    return make_calibration(counts, np.clip(share + 0.1 * r.random(share.shape), 0, 1))


def by_hand(calibration, ridge, kept, counts):
    """Ridge regression of the requests ``kept``, in its textbook form, applied to ``counts``.

    The unit of the ridge and the centre of ``q`` are those of all requests, as in the closed form.
    """
    q = calibration.counts / calibration.counts.sum(axis=2, keepdims=True)
    p = calibration.decode_activation.astype(np.float64)
    out = np.empty(counts.shape)
    for layer in range(q.shape[1]):
        centre = q[:, layer].mean(axis=0)
        x, y = q[kept, layer] - centre, p[kept, layer]
        unit = np.square(q[:, layer] - centre).sum() / len(q)
        # With an intercept that is not shrunk.
        wide = np.hstack([x, np.ones((len(x), 1))])
        penalty = np.diag([ridge * unit] * x.shape[1] + [0.0])
        solved = np.linalg.solve(wide.T @ wide + penalty, wide.T @ y)
        at = counts[layer] / counts[layer].sum() - centre
        out[layer] = np.append(at, 1.0) @ solved
    return out


def test_prediction_is_the_textbook_ridge():
    calibration = noisy()
    model = fit_activation(calibration)
    counts = noisy(seed=1).counts[0]
    everyone = np.arange(len(calibration.counts))
    expected = np.clip(by_hand(calibration, model.ridge, everyone, counts), 0, 1)
    np.testing.assert_allclose(model.predict(counts), expected, atol=1e-9)


def test_ridge_and_r2_are_those_of_requests_left_out_one_at_a_time():
    calibration = noisy()
    n = len(calibration.counts)
    p = calibration.decode_activation.astype(np.float64)
    others = [np.delete(np.arange(n), i) for i in range(n)]
    errors = [
        sum(
            np.square(by_hand(calibration, ridge, others[i], calibration.counts[i]) - p[i]).sum()
            for i in range(n)
        )
        for ridge in RIDGES
    ]
    variance = sum(np.square(p[others[i]].mean(axis=0) - p[i]).sum() for i in range(n))
    model = fit_activation(calibration)
    assert model.ridge == RIDGES[int(np.argmin(errors))]
    assert model.r2 == pytest.approx(1 - min(errors) / variance, rel=1e-6)


def test_requests_that_do_not_differ_are_predicted_by_their_mean():
    counts = np.tile(np.arange(1, 6), (4, 2, 1))
    activation = np.tile(np.linspace(0, 1, 5), (4, 2, 1))
    model = fit_activation(make_calibration(counts, activation))
    np.testing.assert_allclose(model.predict(counts[0]), activation[0], atol=1e-6)
    assert model.r2 == 0.0


def test_a_layer_without_tokens_gets_the_mean():
    model = fit_activation(noisy())
    counts = noisy(seed=2).counts[0].astype(np.int64)
    counts[1] = 0
    predicted = model.predict(counts)
    np.testing.assert_allclose(predicted[1], model.mean_activation[1])
    assert not np.allclose(predicted[0], model.mean_activation[0])


@pytest.mark.parametrize("workload", ["task", "language"])
def test_it_predicts_serving_requests_of_the_embedded_trace(workload):
    """What was left out while fitting agrees with requests that were never seen."""
    trace = open_trace("reference-moe")
    calibration = calibration_set(trace, workload=workload)
    model = fit_activation(calibration)
    # In the mix of the workload, as the calibration requests are.
    served = make_workload(trace, workload=workload, request_rate=1, num_requests=150)
    serving = np.unique(served.text)
    truth = trace.decode_activation(serving)
    predicted = np.stack([model.predict(counts) for counts in trace.prompt_counts(serving)])
    assert ((predicted >= 0) & (predicted <= 1)).all()
    error = np.square(predicted - truth).mean()
    explained = 1 - error / np.square(truth - model.mean_activation).mean()
    assert explained > 0.5
    assert model.r2 > 0.5


def test_refuses_what_it_cannot_use():
    with pytest.raises(InputError, match="3 or more"):
        fit_activation(noisy(n=2))
    empty = noisy()
    empty.counts[3, 1] = 0
    with pytest.raises(InputError, match="no prompt token"):
        fit_activation(empty)
    with pytest.raises(InputError, match="2 layers x 7 experts"):
        fit_activation(noisy()).predict(np.ones((2, 8)))


def test_a_fit_is_made_once_on_a_machine(tmp_path, monkeypatch):
    """Of other calibration requests it is another; a file that is damaged is made anew."""
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path))
    calibration, made = noisy(), []

    def counted(calibration):
        made.append(fit_activation(calibration))
        return made[-1]

    monkeypatch.setattr(activation, "fit_activation", counted)
    for fits in (1, 1):
        model = cached_activation(calibration)
        assert len(made) == fits
        for name, value in vars(made[0]).items():
            np.testing.assert_array_equal(getattr(model, name), value)
    cached_activation(noisy(seed=2))
    assert len(made) == 2
    for file in (tmp_path / cache.FITS).glob("*.npz"):
        file.write_bytes(file.read_bytes()[:100])
    cached_activation(calibration)
    assert len(made) == 3
    cached_activation(calibration)
    assert len(made) == 3


@given(
    seed=st.integers(0, 2**32), n=st.integers(1, 9), layers=st.integers(1, 3),
    experts=st.integers(1, 20),
)  # fmt: skip
def test_predictions_are_those_of_sums_over_experts(seed, n, layers, experts):
    """Requests together, or one by one; a layer without tokens gets the mean."""
    r = np.random.default_rng(seed)
    counts = r.poisson(r.gamma(0.3, 5, (n, layers, experts))).astype(np.uint16)
    mean_share, mean = r.random((2, layers, experts))
    weights = r.normal(size=(layers, experts, experts))
    model = ActivationModel(mean_share, mean, weights, 1.0, 0.0)
    expected = np.empty(counts.shape)
    for i, layer, f in np.ndindex(counts.shape):
        selected, total = counts[i, layer].sum(), 0.0
        for e in range(experts):
            if selected:
                share = counts[i, layer, e] / selected - mean_share[layer, e]
                total += share * weights[layer, e, f]
        expected[i, layer, f] = min(max(mean[layer, f] + total, 0.0), 1.0)
    found = model.predict_all(counts)
    assert (found == expected).all()
    assert all((model.predict(one) == row).all() for one, row in zip(counts, found, strict=True))
