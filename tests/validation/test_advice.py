"""Advice held against published runs: choices by hand."""

import numpy as np
import pyarrow as pa
import pytest

from eldr_sim.validation.published import advice

#: Measured TPOT of six runs of one card, model and lengths, ms; each twice the streams of the one
#: before, so that throughput grows.
MEASURED = np.array([6.0, 8.0, 12.0, 14.0, 18.0, 40.0])


def table(ours=0.0, other=0.0, **columns):
    """Six runs whose TPOT and TTFT are predicted with these errors, %."""
    n = len(MEASURED)
    figures = {
        "refused": [""] * n, "excluded": [""] * n, "gpu": ["H200"] * n, "model": ["m"] * n,
        "input_len": [1000] * n, "output_len": [101] * n, "gpus": [1] * n,
        "concurrency": 4 * 2 ** np.arange(n),
        "tpot_ms": MEASURED, "ttft_ms": 10 * MEASURED,
        "tpot_error": np.full(n, ours), "ttft_error": np.full(n, ours),
        "tpot_other": np.full(n, other), "ttft_other": np.full(n, other),
    }  # fmt: skip
    return pa.table(figures | columns)


def advised(runs, *args, **kwargs):
    return advice.advise(advice.choices_of(runs), *args, **kwargs)


def rate(run):
    """Output tokens/s of a closed loop: streams over a request's life."""
    return 4 * 2**run * 101 / (MEASURED[run] * (10 + 100) / 1e3)


def test_who_predicts_rightly_chooses_best():
    found = advised(table(), "ours")
    assert found.kept.tolist() == [True] * 4  # 50 ms: no run is beyond
    assert found.served == pytest.approx([1.0] * 4)


def test_errors_cost_the_bound_or_throughput():
    """Within 15 ms: 30% too fast takes the run of 18 ms, 30% too slow that of 8 for 14."""
    fast, slow = (advised(table(error, -error), "ours") for error in (-30.0, 30.0))
    at = 1  # of 15 ms
    assert (fast.kept[at], fast.over[at]) == (False, pytest.approx(18.0 / 15.0))
    assert fast.value[at] == 0.0
    assert slow.kept[at]
    assert slow.served[at] == pytest.approx(rate(1) / rate(3))
    others = advised(table(-30.0, 30.0), "other")
    assert others.served == pytest.approx(slow.served)


def test_a_margin_mends_what_is_too_fast():
    found = advised(table(-25.0), "ours", margin=0.2)
    assert found.kept.all()
    assert not advised(table(-25.0), "ours").kept.all()


def test_questions_have_choices_on_both_sides_of_the_bound():
    """Few choices, or all within the bound: nothing is asked; marked rows are no choices."""
    assert len(advised(table(tpot_ms=np.full(6, 5.0)), "ours").kept) == 0
    assert len(advised(table(excluded=["", "", "", "", "", "contradictory"]), "ours").kept) == 0
    assert advice.rows_of(table(excluded=["x"] * 6)) == []


def test_nothing_predicted_within_the_bound_serves_nothing():
    found = advised(table(400.0), "ours")
    assert not found.kept[0]
    assert (found.served[0], found.value[0]) == (0.0, 0.0)
    assert np.isnan(found.over[0])


def test_rows_say_both_estimators_at_each_margin():
    rows = advice.rows_of(table(0.0, -30.0), ("ours", "theirs"))
    assert [(row["margin"], row["estimator"]) for row in rows[:2]] == [
        ("0%", "ours"),
        ("0%", "theirs"),
    ]
    assert rows[0]["TPOT kept"] == "100% [100%, 100%]"
    assert float(rows[1]["TPOT kept"].split("%")[0]) < 100
