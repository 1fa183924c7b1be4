"""Exact sums are those of `math.fsum`; views are what a mask picks."""

import math

import numpy as np
import pytest

from eldr_sim.simulator.outcome.sums import exact_sum, within


@pytest.mark.parametrize("n", [0, 1, 5000, 2**16, 2**17 + 77])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 250.0])
def test_sums_are_those_of_fsum(n, spread):
    rng = np.random.default_rng(n + int(spread))
    values = rng.normal(size=n) * np.exp(spread * rng.normal(size=n).clip(-2.5, 2.5))
    assert exact_sum(values) == math.fsum(values.tolist())
    cancelled = np.concatenate([values, -values[::-1], [1e-300]])
    assert exact_sum(cancelled) == 1e-300


def test_sums_of_the_smallest_and_of_whole_numbers():
    assert exact_sum(np.full(2**17, 5e-324)) == 2**17 * 5e-324
    assert exact_sum(np.full(2**17, 0.1)) == math.fsum([0.1] * 2**17)
    assert exact_sum(np.zeros(2**17)) == 0.0


def test_sums_of_squares_and_of_values_that_count_several_times():
    rng = np.random.default_rng(1)
    values, counts = rng.random(2**17 + 5), rng.integers(0, 9, 2**17 + 5)
    assert exact_sum(values, counts) == math.fsum((values * counts).tolist())
    squares = (values - 0.3) ** 2 * counts
    assert exact_sum(values, counts, 0.3) == math.fsum(squares.tolist())


def test_a_row_of_records_is_a_view():
    log = np.arange(10)
    for inside in (log > 3, log < 3, (log > 2) & (log < 6), log < 0, log >= 0, log % 3 == 0):
        assert within(log, inside).tolist() == log[inside].tolist()
    assert np.shares_memory(within(log, log > 3), log)
    assert within(log[:0], log[:0] > 0).tolist() == []
