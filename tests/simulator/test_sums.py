"""Exact sums are those of `math.fsum`, percentiles NumPy's; views are what a mask picks."""

import math

import numpy as np
import pytest

from eldr_sim.simulator.control.record import within
from eldr_sim.simulator.outcome.sums import exact_sum, weighted_percentile

from ..on_each import on_each


@on_each("n", [0, 1, 5000, 2**16, 2**17 + 77])
@on_each("spread", [0.0, 1.0, 30.0, 250.0])
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


@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0])
@pytest.mark.parametrize("ties", [False, True])
def test_percentiles_of_long_columns_are_those_of_the_repeated_values(spread, ties):
    rng = np.random.default_rng(int(ties))
    values = rng.normal(size=2**17 + 77) * np.exp(spread * rng.normal(size=2**17 + 77))
    if ties:
        values = values.round(2)
    counts = rng.integers(0, 4, len(values)).astype(np.int32)
    counts[:3], values[:3] = [0, 1, 2**20], [-1e9, 1e9, 0.0]
    q = [0, 0.01, 3, 50, 90, 99.999, 100]
    expected = np.percentile(np.repeat(values, counts), q)
    assert weighted_percentile(values, counts, q) == pytest.approx(expected.tolist(), rel=1e-12)


def test_a_row_of_records_is_a_view():
    log = np.arange(10)
    for inside in (log > 3, log < 3, (log > 2) & (log < 6), log < 0, log >= 0, log % 3 == 0):
        assert within(log, inside).tolist() == log[inside].tolist()
    assert np.shares_memory(within(log, log > 3), log)
    assert within(log[:0], log[:0] > 0).tolist() == []
