"""What ELDR's authors measured: the cells as published, and what is made of them."""

from dataclasses import replace

import numpy as np
import pytest

from eldr_sim.simulator.setup.config.run_config import make_config
from studies.eldr_measured import evaluation as figures_module
from studies.eldr_measured import slope as slope_module
from studies.eldr_measured.cells import METRICS, cells_of, gains, table_of, tables_of, warmed_up
from studies.eldr_measured.evaluation import _errors, _goals, _orders
from studies.eldr_measured.slope import _slope, _slopes, _tile


@pytest.fixture(scope="module")
def main():
    return [*cells_of("10", "fitted", False), *cells_of("11", "fitted", False)]


def summary_of(cell, factor=1.0):
    """A run of ours that measures what they did, times a factor."""
    seen = {name: factor * cell.measured[metric] for metric, name in METRICS.items()}
    return {
        "streamed_by_prefill": seen,
        "mean_active_experts_per_token": 60.0,
        "policy": cell.fields["policy"],
        "median_tpot_ms": 1.0,
        "median_ttft_ms": 1.0,
        "weakest_provenance": "fitted",
    }


def test_there_are_180_cells_of_three_models_and_six_policies(main):
    assert len(main) == 180
    assert len({(c.model, c.dataset, c.rate, c.policy) for c in main}) == 180
    assert sum(cell.fitted("tpot_p50") for cell in main) == 30
    assert sum(cell.fitted("ttft_p50") for cell in main) == 6
    assert not any(cell.fitted("tpot_p99") for cell in main)


def test_runs_send_as_many_requests_as_the_authors_did(main):
    for cell in main:
        config = make_config(cell.fields)
        assert config.requests.num_requests == 120 * cell.rate
        assert (config.cluster.topology, config.cluster.n_decode, config.cluster.gpu) == (
            "8P16D",
            16,
            "MI300X",
        )
        assert config.pool("prefill").enforce_eager
        assert not config.pool("decode").enforce_eager
    assert {c.fields["num_requests"] for c in cells_of("16", "fitted", False)} == {12_000}


def test_measured_gains_are_those_of_the_artifacts_page(main):
    """Means over rates of p50 and p99, eldr against rr, as its README gives them, %."""
    pairs = [(cell, summary_of(cell)) for cell in main]
    expected = {
        ("task", "Qwen3-30B-A3B"): (-12.8, -5.6),
        ("task", "GPT-OSS-120B"): (-14.5, -3.6),
        ("task", "Gemma-4-26B-A4B"): (-8.6, -3.4),
        ("language", "Qwen3-30B-A3B"): (-9.8, -3.3),
        ("language", "GPT-OSS-120B"): (-5.4, 1.2),
        ("language", "Gemma-4-26B-A4B"): (-7.4, -3.3),
    }
    for (dataset, model), both in expected.items():
        own = [(c, s) for c, s in pairs if (c.dataset, c.model) == (dataset, model)]
        for metric, mean in zip(("tpot_p50", "tpot_p99"), both, strict=True):
            each = [gains(c, s, own, metric)[1] for c, s in own if c.policy == "eldr"]
            assert np.mean(each) == pytest.approx(mean, abs=0.06)


@pytest.mark.parametrize("figure", ["13", "14", "15", "16"])
def test_every_variant_has_a_round_robin_run_beside_it(figure):
    found = cells_of(figure, "fitted", False)
    table = table_of([(cell, summary_of(cell)) for cell in found], "fitted")
    for row in table.to_pylist():
        assert row["tpot_p50_gain"] == pytest.approx(row["tpot_p50_gain_measured"])
        assert (row["tpot_p50_gain"] == 0.0) == (row["policy"] == "rr")
        make_config({"policy": row["run_as"]})
    assert len({c.fields["policy"] for c in found}) == {"13": 3, "14": 3, "15": 5, "16": 2}[figure]


def test_a_simulator_that_measures_the_same_meets_every_goal(main):
    pairs = [(cell, summary_of(cell)) for cell in main]
    goals = _goals(pairs, "fitted")
    assert {goal.size for goal in goals} == {"agrees"}
    assert _orders(pairs) == (30, 30)
    assert len(_errors(pairs, "tpot_p50")) == 150


def test_goals_can_be_missed(main):
    """All cells 20% too slow: absolute goals fail, gains do not. Random too fast: orders fail."""
    pairs = [(cell, summary_of(cell, 1.2)) for cell in main]
    missed = [goal.statement for goal in _goals(pairs, "fitted") if goal.size == "differs"]
    assert all("error of" in statement for statement in missed)
    assert sum("median TPOT" in statement for statement in missed) == 12
    assert _errors(pairs, "tpot_p99") == pytest.approx([20.0] * 180)
    fast = [(c, summary_of(c, 0.5 if c.policy == "random" else 1.0)) for c in main]
    assert _orders(fast)[0] == 0
    # What lies between the two runs of the cluster counts where all pairs do.
    shifted = [(c, summary_of(c, 0.5 if c.policy in ("rr", "eldr") else 1.0)) for c in main]
    assert _orders(shifted)[0] < 15
    assert _orders(shifted, beside=True) == (30, 30)


def test_a_repeat_of_the_measurement_is_not_in_order_everywhere(main, monkeypatch):
    pairs = [(cell, summary_of(cell)) for cell in main]
    assert 20 < figures_module._again(pairs) < 27
    monkeypatch.setattr(figures_module, "_SCATTER", 0.0)
    assert figures_module._again(pairs) == 30


def test_tiles_change_at_33_and_65_rows_but_not_for_gpt_oss():
    batches = (31.9, 32.1, 63.9, 64.1, 96.1)
    assert [_tile("Qwen3-30B-A3B", batch) for batch in batches] == [0, 1, 1, 2, 3]
    assert {_tile("GPT-OSS-120B", batch) for batch in batches} == {0}


def test_a_known_slope_is_found_and_the_rest_is_the_tiles(main, monkeypatch):
    """TPOT = fixed of the tile + 4 us a distinct expert of each of 48 layers, by construction."""
    base = [c for c in main if c.model == "Qwen3-30B-A3B"]
    experts = {"rr": 80.0, "domain": 70.0, "eldr": 65.0}
    points = []
    for cell in base:
        if cell.policy in experts:
            tile = 2 if cell.rate == 80.0 and cell.policy == "rr" else 1
            tpot = (5.0 if tile == 1 else 3.0) + 4e-3 * 48 * (experts[cell.policy] + cell.rate)
            made = replace(cell, measured={"tpot_p50": tpot})
            points.append(slope_module.Point(made, 40.0, tile, experts[cell.policy] + cell.rate))
    found = _slopes(points)
    assert list(found) == [("Qwen3-30B-A3B", 1)]
    assert found["Qwen3-30B-A3B", 1].us == pytest.approx(4.0)
    assert found["Qwen3-30B-A3B", 1].error == pytest.approx(0.0, abs=1e-9)
    assert found["Qwen3-30B-A3B", 1].n == 16  # four rates, two loads, two policies
    assert _slope([], 48) is None
    monkeypatch.setattr(slope_module, "run_main", lambda *_given: [])
    monkeypatch.setattr(slope_module, "_points", lambda _pairs: points)
    rows = slope_module.locality(None, "fitted", False).table.to_pylist()
    for row in rows:
        rest = row["of_the_rest_points"]
        assert rest == pytest.approx(0.0, abs=1e-9) or row["tiles_differ"]
    crossing = [row for row in rows if row["tiles_differ"]]
    assert len(crossing) == 2
    assert all(row["of_the_rest_points"] > 5 for row in crossing)  # 3 ms became 5


def test_derived_tables_are_not_the_shipped_ones():
    assert tables_of("fitted") is None
    assert tables_of("derived") == tables_of("derived")


def test_a_cell_that_is_warmed_up_is_the_cell_but_for_its_load():
    for cell in (*cells_of("10", "fitted", quick=True), *cells_of("11", "fitted", quick=True)):
        warm = make_config(warmed_up(cell).fields).model_dump()
        cold = make_config(cell.fields).model_dump()
        differ = {name for name in warm if warm[name] != cold[name]}
        assert differ == {"load", "warmup", "duration", "num_requests", "request_rate"}
        assert f",{cell.rate:g}," in warm["load"].replace(".0,", ",")


def test_what_a_warm_up_changes_is_told_by_cell(monkeypatch):
    def run(_runner, cells):
        return [(c, summary_of(c, 1.01 if "load" in c.fields else 1.0)) for c in cells]

    monkeypatch.setattr(figures_module, "run_cells", run)
    found = figures_module.warm_up(None, "fitted", quick=False)
    rows = found.table.to_pylist()
    assert len(rows) == 2 * 3 * 3
    for row in rows:
        assert [row[f"{metric}_percent"] for metric in METRICS] == pytest.approx([1.0] * 4)
    assert [claim.size for claim in found.claims] == ["agrees", "agrees"]  # a repeat: 1.94, 3.7


def test_kernels_without_measured_is_one_line(run_cli):
    code, out, err = run_cli("reproduce", "eldr", "--kernels", "derived")
    assert code == 2
    assert err.strip() == "Error: kernels: without --measured (allowed: together with --measured)"
    assert not out
