"""Paired comparison: the interval against textbook arithmetic."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from eldr_sim.errors import InputError
from eldr_sim.planning.compare.policies import compare
from eldr_sim.planning.slo import paired_percent
from eldr_sim.simulator.outcome.catalogue import HEADLINE
from eldr_sim.simulator.setup.config.run_config import make_config


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


def test_seeds_without_a_value_on_either_side_are_left_out():
    """A run in which nothing ended has no latency: it is neither 0 nor -100%."""
    assert paired_percent([None, 9.0, 12.0], [10.0, 10.0, None]) == pytest.approx(
        paired_percent([9.0], [10.0]), nan_ok=True
    )
    assert np.isnan(paired_percent([None], [10.0]).mean)
    assert np.isnan(paired_percent([9.0], [0.0]).mean)


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


@pytest.fixture
def fake_runs(monkeypatch):
    """Figures that are the seed's luck times what the policy makes of it."""

    def fake(config):
        factor = {"round_robin": 1.0, "jsq": 0.9, "eldr": 0.8}[config.policies.policy]
        figures = dict.fromkeys(HEADLINE, (10.0 + config.requests.seed) * factor)
        counts = {"num_prompts": 5, "completed": 5, "failed": 0}
        return figures | counts | {"p99_ttft_ms": None, "provenance": {}}

    monkeypatch.setattr("eldr_sim.planning.runs.runner.simulate_summary", fake)


def test_policies_are_paired_with_round_robin_and_the_best_load_balancer(fake_runs):
    found = compare(make_config({"seed": 4}), ["eldr", "jsq"], 3, jobs=1)
    assert found.best_load_balancer == "jsq"
    assert found.runs["policy"].to_pylist() == ["round_robin", "eldr", "jsq"] * 3
    assert found.runs["seed"].to_pylist() == [4, 4, 4, 5, 5, 5, 6, 6, 6]
    told = {(d.name, d.reference, d.metric): d for d in found.differences}
    assert len(told) == len(found.differences) == 4 * len(HEADLINE)
    best = told["eldr", "jsq", "median_tpot_ms"]
    assert best.percent == pytest.approx(100 * (0.8 / 0.9 - 1))
    assert best.high - best.low == pytest.approx(0.0, abs=1e-9)  # the luck is that of both
    assert best.by_seed == pytest.approx((11.2, 12.0, 12.8))
    assert (best.mean, best.reference_mean) == pytest.approx((12.0, 13.5))
    nothing = told["eldr", "jsq", "p99_ttft_ms"]
    assert math.isnan(nothing.percent)
    assert nothing.mean is nothing.reference_mean is None
    assert nothing.record() == {"percent": None, "low": None, "high": None}


def test_a_comparison_writes_itself_whole_and_spares_what_is_none(fake_runs, tmp_path):
    found = compare(make_config({}), ["eldr"], 2, jobs=1)
    found.write(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"summary.json", "runs.parquet"}
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["seeds"] == 2
    with pytest.raises(InputError, match="out: "):
        found.write(tmp_path / "out")
    found.write(tmp_path / "out", force=True)
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "plan.json").write_text("{}")
    with pytest.raises(InputError, match=r"is not a result with a summary\.json"):
        found.write(tmp_path / "plan", force=True)
    assert (tmp_path / "plan" / "plan.json").exists()
