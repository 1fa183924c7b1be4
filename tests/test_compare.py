"""Paired comparison: the interval against textbook arithmetic."""

import math

import numpy as np
import pytest
from scipy import stats

from eldr_sim.planning.intervals import paired_percent


def test_interval_is_students_t_over_paired_differences():
    values, reference = [9.0, 8.5, 9.5, 9.2], [10.0, 10.5, 10.0, 9.8]
    percent = [100 * (v - r) / r for v, r in zip(values, reference, strict=True)]
    mean, low, high = paired_percent(values, reference)
    expected = stats.ttest_1samp(percent, 0.0).confidence_interval(0.95)
    assert mean == pytest.approx(np.mean(percent))
    assert (low, high) == pytest.approx((expected.low, expected.high))


def test_one_seed_has_no_interval():
    mean, low, high = paired_percent([9.0], [10.0])
    assert mean == pytest.approx(-10.0)
    assert math.isnan(low)
    assert math.isnan(high)


def test_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        reference = rng.normal(10.0, 1.0, 5)
        values = reference * (1 - 0.08 + rng.normal(0.0, 0.02, 5))
        _, low, high = paired_percent(values, reference)
        covered += low <= -8.0 <= high
    # 95% of 2,000, three standard deviations of a binomial.
    assert abs(covered - 1900) < 3 * math.sqrt(2000 * 0.95 * 0.05)
