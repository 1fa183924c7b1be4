"""What requests differ by: against the covariance itself, and planted variances."""

from dataclasses import replace

import numpy as np
import pytest

from eldr_sim.traces.routing.format import open_trace
from eldr_sim.traces.routing.spectrum import (
    half_profiles,
    principal_components,
    request_spectrum,
    spectrum_of,
)


def covariance(halves):
    first, second = halves.reshape(2, halves.shape[1], -1)
    first, second = first - first.mean(axis=0), second - second.mean(axis=0)
    return (first.T @ second + second.T @ first) / 2 / (len(first) - 1)


@pytest.mark.parametrize("requests", [9, 40])
def test_components_are_those_of_the_covariance(requests):
    rng = np.random.default_rng(requests)
    halves = rng.random((2, requests, 2, 7)) + rng.random((requests, 2, 7))
    exact = covariance(halves)
    values, vectors = principal_components(halves)
    assert vectors @ vectors.T == pytest.approx(np.eye(len(vectors)), abs=1e-9)
    assert (vectors.T * values) @ vectors == pytest.approx(exact, abs=1e-9)
    # Of the eigenvalues only zeros are left out.
    every = np.linalg.eigvalsh(exact)
    assert np.sort(values[np.abs(values) > 1e-9]) == pytest.approx(every[np.abs(every) > 1e-9])
    found = spectrum_of(halves, np.zeros(requests, int), 3)
    assert found.variance == pytest.approx(np.trace(exact) / (2 * 3))
    assert found.dimensions == pytest.approx(np.trace(exact) ** 2 / (every**2).sum())
    assert found.components[4] == pytest.approx(np.sort(every)[-4:].sum() / np.trace(exact))
    assert found.label is None


def planted(rng, n, domain_sd, own_sd, noise_sd, domains=40, cells=(2, 150)):
    """Requests of domains: deviations of known size, and noise that the halves do not share."""
    domain = np.arange(n) % domains
    persistent = domain_sd * rng.standard_normal((domains, *cells))[domain]
    persistent += own_sd * rng.standard_normal((n, *cells))
    return persistent + noise_sd * rng.standard_normal((2, n, *cells)), domain


def test_variance_and_label_are_those_planted():
    # 300 cells each: the variances of 40 domains and 400 requests err by 2 percent at most.
    rng = np.random.default_rng(0)
    halves, domain = planted(rng, 400, 0.6, 0.8, 1.0)
    found = spectrum_of(halves, domain, 4)
    assert found.variance == pytest.approx(300 * (0.36 + 0.64) / 8, rel=0.05)
    assert found.label == pytest.approx(0.36, abs=0.03)
    # A label that has nothing to say, of as few requests a label: no bias by their number.
    assert spectrum_of(halves, rng.permutation(domain), 4).label == pytest.approx(0, abs=0.02)
    # Noise alone: nothing between requests.
    halves, domain = planted(rng, 400, 0.0, 0.0, 1.0)
    assert abs(spectrum_of(halves, domain, 4).variance) < 0.02 * 300 / 8


def test_families_are_those_planted_whatever_their_sizes():
    rng = np.random.default_rng(1)
    share = np.array([0.4, 0.3, 0.1, 0.1, 0.1])
    family = rng.choice(5, 500, p=share)
    profile = rng.standard_normal((5, 4, 50))
    halves = profile[family] + 0.5 * rng.standard_normal((2, 500, 4, 50))
    exact = 1 / ((np.bincount(family) / 500) ** 2).sum()
    found = spectrum_of(halves, np.zeros(500, int), 4)
    assert found.families == pytest.approx(exact, rel=0.02)
    assert found.scatter == pytest.approx(exact**-0.5, rel=0.02)
    # All of their own: as many as requests.
    halves = rng.standard_normal((300, 4, 50)) + 0.3 * rng.standard_normal((2, 300, 4, 50))
    assert spectrum_of(halves, np.zeros(300, int), 4).families == pytest.approx(300)


def test_profiles_are_shares_of_the_halves_tokens():
    trace = open_trace("qwen3-30b-a3b")
    some = np.array([3, 11])
    halves = half_profiles(trace, some)
    for i, q in enumerate(some.tolist()):
        first, length = trace.recorded_rows([q])
        rows = np.array(trace.experts[int(first[0]) : int(first[0] + length[0])])
        n = len(rows) // 2
        for half, own in enumerate((rows[:n], rows[n:])):
            for expert in (0, 17, 127):
                chosen = (own == expert).any(axis=2).mean(axis=0)
                assert halves[half, i, :, expert] == pytest.approx(chosen)


def test_a_recording_has_what_was_found_by_another_program():
    """gpt-oss-20b: a first measurement, on all tokens, gave .106, .42 .68 .91, 4.9 and .26."""
    found = request_spectrum(open_trace("gpt-oss-20b"))
    assert found.variance == pytest.approx(0.106, rel=0.05)
    assert found.components == pytest.approx({1: 0.42, 4: 0.68, 16: 0.91}, abs=0.06)
    assert found.dimensions == pytest.approx(4.9, rel=0.15)
    assert found.label == pytest.approx(0.26, abs=0.02)


def test_few_requests_have_none():
    trace = open_trace("qwen3-30b-a3b")
    assert request_spectrum(trace).requests == 12  # of 64 tokens or more
    few = replace(
        trace, output_len=np.minimum(trace.output_len, 20), prompt_len=trace.prompt_len % 8
    )
    assert request_spectrum(few) is None
