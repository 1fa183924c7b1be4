"""Drift of a machine: what a probe says, a calibration under it, a clock that follows it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.validation.live.calibration.engine_calibration import Clock, Drift, exponent


def test_the_exponent_of_a_part_comes_back():
    rng = np.random.default_rng(0)
    factors = np.where(rng.random(400) < 0.5, 1.0, 2.1)
    points = rng.integers(0, 20, 400)
    seconds = (1 + points) * 1e-3 * factors**0.7 * np.exp(0.02 * rng.standard_normal(400))
    equal = [points == point for point in range(20)]
    groups = [(seconds[rows], factors[rows]) for rows in equal]
    assert exponent(groups) == pytest.approx(0.7, abs=0.01)
    assert exponent([(seconds[rows], np.ones(rows.sum())) for rows in equal]) == 0.0


def test_a_probe_that_was_disturbed_once_does_not_count():
    probe = np.array([1.0, 1.0, 9.0, 1.0, 2.0, 2.0, np.nan, 2.0])
    drift = Drift(np.arange(8.0), probe, 1.0)
    np.testing.assert_allclose(drift.factor(np.array([0.0, 2.0, 4.0, 7.0])), [1, 1, 2, 2])
    no_probe = Drift(np.arange(3.0), np.full(3, np.nan), None)
    np.testing.assert_allclose(no_probe.factor(np.array([0.5, 5.0])), 1.0)


def test_half_speed_takes_twice_the_wall_s_time():
    clock = Clock(np.array([0.0, 1.0, 1.0 + 1e-9, 2.0, 4.0]), np.array([1.0, 1.0, 2.0, 2.0, 2.0]))
    np.testing.assert_allclose(clock.own_s(np.array([1.0, 2.0, 4.0])) - clock.own_s(0.0),
                               [1.0, 1.5, 2.5])  # fmt: skip
    assert clock.mean == pytest.approx(4 / 2.5)
    np.testing.assert_array_equal(Clock(np.empty(0), np.empty(0)).own_s(np.arange(3.0)), range(3))


@given(
    st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.3, 3.0)), min_size=2, max_size=30),
    st.lists(st.floats(-5.0, 50.0), min_size=1, max_size=20),
)
def test_the_clock_runs_on_and_comes_back(pieces, moments):
    gaps, factors = (np.array(column) for column in zip(*pieces, strict=True))
    clock, moments = Clock(np.cumsum(gaps), factors), np.sort(moments)
    own = clock.own_s(moments)
    assert (np.diff(own) >= 0).all()
    np.testing.assert_allclose(clock.wall_s(own), moments, atol=1e-9)
