"""Published runs with prefill and decode workers: what is predicted, and what it rests on."""

from dataclasses import replace

import pytest

from eldr_sim.validation.published import pd, silicon_rows
from eldr_sim.validation.published.pd import OUTPUT, pd_rows, predict_pd
from eldr_sim.validation.published.predictions import shipped_rows

LATE = [row for row in pd_rows() if row.case.moe_kernel == "newest"]


def test_rows_agree_with_themselves():
    """TPOT that follows from others does, and means lie below their 99th percentiles."""
    runs = list(shipped_rows("pd"))
    for lines in runs:
        figures = {line["metric"]: float(line["measured_ms"]) for line in lines}
        if "mean_tpot" in {line["metric"] for line in lines if line["derived"] == "yes"}:
            tpot = (figures["mean_e2el"] - figures["mean_ttft"]) / (OUTPUT - 1)
            assert figures["mean_tpot"] == pytest.approx(tpot, abs=0.01)
        for name, value in figures.items():
            if name.startswith("p99"):
                assert value > figures[f"mean_{name[4:]}"]
    assert len({lines[0]["run"] for lines in runs}) == len(runs) == 3


@pytest.mark.long
def test_predictions_do_not_see_the_measured_figures_and_name_their_preset(monkeypatch):
    monkeypatch.setattr(silicon_rows, "REQUESTS", 2)
    monkeypatch.setattr(silicon_rows, "_DRAWN_PROMPT", 64)
    monkeypatch.setattr(pd, "RATE", 1.0)
    other = [replace(row, measured=dict.fromkeys(row.measured, 1.0)) for row in LATE]
    one, two = (predict_pd(rows, requests=8).to_pylist() for rows in (LATE, other))
    assert [row["predicted_ms"] for row in one] == [row["predicted_ms"] for row in two]
    assert {row["handover"] for row in one} == {"none", "vllm_nixl"}
    by_preset = {row["handover"]: row for row in one if row["metric"] == "mean_ttft"}
    none, nixl = by_preset["none"], by_preset["vllm_nixl"]
    assert nixl["predicted_ms"] == pytest.approx(none["predicted_ms"] + 110.0, abs=15.0)
    parts = [value for name, value in none.items() if name.endswith("_ms")][2:]
    assert sum(parts) == pytest.approx(none["predicted_ms"])
    assert none["error"] == pytest.approx(100 * (none["predicted_ms"] / none["measured_ms"] - 1))
