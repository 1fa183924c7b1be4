"""Live against simulated: no error where there is none, and each error where it was put."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from eldr_sim.kernel_profiles.tables.format import LatencyTable
from eldr_sim.validation.live.calibration.engine_calibration import EngineCalibration
from eldr_sim.validation.live.report import comparison
from eldr_sim.validation.live.report.comparison import compare_runs, noise_floor
from eldr_sim.validation.live.simulated.simulated_run import simulate_run
from eldr_sim.validation.live.simulated.steps import compositions, durations
from eldr_sim.validation.live.simulated.timestamps import live_timestamps

SETUPS = ["colocated", "1P1D", "1P2D"]


@pytest.fixture(scope="module")
def twins(make_live_run):
    """Recordings that simulations made: two repeats of each set-up."""
    return [
        make_live_run(setup, rate=300.0, repeat=repeat) for setup in SETUPS for repeat in (0, 1)
    ]


def slower(calibrated, kind, factor):
    """The calibration with the times of one kind of table multiplied."""
    made = [
        LatencyTable(t.metadata, {**t.columns, "latency_s": t.columns["latency_s"] * factor})
        if t.metadata.kind == kind
        else t
        for t in calibrated.tables
    ]
    return EngineCalibration(calibrated.info, made)


def with_column(table, name, values):
    index = table.schema.get_field_index(name)
    return table.set_column(
        index, table.schema.field(index), pa.array(values, table.schema.types[index])
    )


def test_a_simulation_of_its_own_recording_has_no_error(twins, live_calibration):
    comparison = compare_runs(twins, live_calibration)
    summary = json.loads(json.dumps(comparison.summary))
    assert len(summary["runs"]) == 6
    for run in summary["runs"]:
        assert run["incomplete"] == 0
        assert run["duration_s"] == pytest.approx(run["simulated_duration_s"])
        assert run["mean_batch"] == pytest.approx(run["simulated_mean_batch"])
        assert run["same_engine_percent"] == 100.0
    assert {row["component"] for row in summary["steps"]} == {"step", "moe", "attention", "rest"}
    for row in summary["steps"]:
        errors = [row[f"{name}_percent"] for name in ("median", "p90", "bias", "median_of_step")]
        assert errors == pytest.approx([0.0] * 4, abs=1e-5), row
    for row in summary["distinct"]:
        assert row["wrong_steps"] == row["wrong_layers"] == row["matched_wrong"] == 0
        assert row["layers"] == 3 * row["steps"] > 100
        assert row["matched_steps"] == row["simulated_steps"] == row["steps"]
    # 6 runs, 3 means over repeats and 3 over loads, of 4 metrics and 4 statistics.
    assert len(summary["requests"]) == 12 * 16
    for row in summary["requests"]:
        assert row["error_percent"] == pytest.approx(0.0, abs=1e-7)
        assert row["noise_percent"] == row["range_percent"] == 0.0
        assert (row["live_ms"] is None) == (row["load"] is None)
    for row in summary["components"]:
        assert row["difference_ms"] == pytest.approx(0.0, abs=1e-7)
    headline = summary["headline"]
    assert headline["decode_step"]["steps"] > 100
    assert headline["tpot_p99"]["noise_percent"] == 0.0


def test_statistics_are_those_of_the_requests(twins, live_calibration):
    comparison = compare_runs(twins[:1], live_calibration)
    run = twins[0][0]
    rows = {
        (row["metric"], row["statistic"]): row
        for row in comparison.summary["requests"]
        if row["repeat"] == 0
    }
    sent = run.requests["sent_s"].to_numpy()
    times = [np.array(t) for t in run.requests["token_s"].to_pylist()]
    ttft = 1e3 * (np.array([t[0] for t in times]) - sent)
    tpot = 1e3 * np.array([(t[-1] - t[0]) / (len(t) - 1) for t in times if len(t) > 1])
    itl = 1e3 * np.concatenate([np.diff(t) for t in times])
    assert rows["ttft", "mean"]["live_ms"] == pytest.approx(ttft.mean())
    assert rows["ttft", "p90"]["live_ms"] == pytest.approx(np.percentile(ttft, 90))
    assert rows["tpot", "p50"]["live_ms"] == pytest.approx(np.percentile(tpot, 50))
    assert rows["itl", "p99"]["live_ms"] == pytest.approx(np.percentile(itl, 99))
    assert rows["ttft", "mean"]["noise_percent"] is None
    assert comparison.requests.num_rows == len(times)
    assert comparison.gaps.num_rows == len(itl)
    sums = {
        (row["of"]): row["live_ms"]
        for row in comparison.summary["components"]
        if row["repeat"] == 0 and row["component"] == "sum"
    }
    assert sums["ttft"] == pytest.approx(rows["ttft", "mean"]["live_ms"])
    assert sums["e2el"] == pytest.approx(rows["e2el", "mean"]["live_ms"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "component"),
    [("moe", "moe"), ("engine_step", "rest"), ("attention_decode", "attention")],
)
def test_a_slower_table_is_an_error_of_its_component(twins, live_calibration, kind, component):
    changed = slower(live_calibration, kind, 1.1)
    rows = {
        row["component"]: row
        for row in compare_runs(twins, changed).summary["steps"]
        if row["setup"] is None and row["group"] == "decode only"
    }
    for name in ("moe", "attention", "rest"):
        expected = 10.0 if name == component else 0.0
        assert rows[name]["bias_percent"] == pytest.approx(expected, abs=1e-5)
        assert rows[name]["p90_percent"] == pytest.approx(expected, abs=1e-5)
    assert 0.0 < rows["step"]["bias_percent"] < 10.0
    assert rows["step"]["bias_percent"] > rows["step"]["median_of_step_percent"] * 0.9


def changed_info(calibrated, **fields):
    return EngineCalibration(calibrated.info.model_copy(update=fields), calibrated.tables)


def components_of(comparison, of):
    return {
        row["component"]: row["difference_ms"]
        for row in comparison.summary["components"]
        if row["of"] == of and row["repeat"] == 0
    }


@pytest.mark.parametrize("setup", ["colocated", "1P1D"])
def test_a_later_egress_is_an_error_of_the_host(make_live_run, live_calibration, setup):
    run, _ = make_live_run(setup, rate=300.0)
    later = changed_info(live_calibration, egress_s=6e-3)
    comparison = compare_runs([(run, simulate_run(run, later))], live_calibration)
    for of in ("ttft", "e2el"):
        found = components_of(comparison, of)
        for name in ("queue", "prefill", "transfer", "decode"):
            assert found[name] == pytest.approx(0.0, abs=1e-7)
        assert [found["host"], found["sum"]] == pytest.approx([5.0, 5.0])
    (tpot,) = (
        row
        for row in comparison.summary["requests"]
        if (row["metric"], row["statistic"], row["repeat"]) == ("tpot", "mean", 0)
    )
    assert tpot["error_percent"] == pytest.approx(0.0, abs=1e-7)


def test_a_slower_transfer_is_an_error_of_the_transfer(make_live_run, live_calibration):
    run, _ = make_live_run("1P1D", n=4, rate=0.1)  # one request at a time
    transfer = replace(live_calibration.info.transfer, setup_s=8e-3)
    later = changed_info(live_calibration, transfer=transfer)
    comparison = compare_runs([(run, simulate_run(run, later))], live_calibration)
    found = components_of(comparison, "e2el")
    assert found.pop("transfer") == pytest.approx(7.0)
    assert found.pop("sum") == pytest.approx(7.0)
    assert list(found.values()) == pytest.approx([0.0] * 4, abs=1e-6)


def test_a_slower_prompt_is_an_error_of_the_prefill(make_live_run, live_calibration):
    run, _ = make_live_run("1P1D", n=4, rate=0.1)
    slow = slower(live_calibration, "attention_prefill", 2.0)
    comparison = compare_runs([(run, simulate_run(run, slow))], live_calibration)
    found = components_of(comparison, "ttft")
    assert found["prefill"] > 0.01
    assert found["prefill"] == pytest.approx(found["sum"])
    assert found["decode"] == pytest.approx(0.0, abs=1e-6)


def test_a_wrong_count_of_experts_is_found(twins, live_calibration):
    run, replayed = twins[2]
    logged = run.steps["distinct"].to_pylist()
    logged[5][1] += 1
    wrong = replace(run, steps=with_column(run.steps, "distinct", logged))
    (row,) = compare_runs([(wrong, replayed)], live_calibration).summary["distinct"]
    assert (row["wrong_steps"], row["wrong_layers"], row["matched_wrong"]) == (1, 1, 1)


def test_a_request_without_all_its_tokens_is_left_out(twins, live_calibration):
    run, replayed = twins[2]
    tokens = run.requests["token_s"].to_pylist()
    tokens[4] = tokens[4][:-1]
    cut = replace(run, requests=with_column(run.requests, "token_s", tokens))
    comparison = compare_runs([(cut, replayed)], live_calibration)
    assert comparison.summary["runs"][0]["incomplete"] == 1
    assert 4 not in comparison.requests["request"].to_pylist()
    for row in comparison.summary["requests"]:
        assert row["abs_error_percent"] == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("setup", SETUPS)
def test_a_step_lasts_until_the_engine_goes_on(make_live_run, live_calibration, setup):
    """Ends that come early hide in the next start, unless the engine had nothing more to do."""
    run, _ = make_live_run(setup, rate=60.0)
    start, end = (run.steps[name].to_numpy() for name in ("start_s", "end_s"))
    early = replace(run, steps=with_column(run.steps, "end_s", start + 0.8 * (end - start)))
    queued = live_timestamps(run, live_calibration.info).queued_s
    columns = [run.steps[name].to_pylist() for name in ("request", "position", "tokens")]
    engine = run.steps["engine"].to_pylist()
    prefills = [name.startswith("prefill") for name in engine]
    steps = compositions(
        zip(*columns, strict=True), run.requests["prompt_len"].to_numpy(), prefills
    )
    taken = durations(early, steps, queued)
    following = {}
    for i in reversed(range(len(start))):
        then = following.get(engine[i])
        went_on = then is not None and start[then] == end[i]
        if not went_on:
            assert taken[i] == pytest.approx(0.8 * (end[i] - start[i]))
        elif engine[i].startswith("decode") or taken[i] > 0.9 * (end[i] - start[i]):
            stays = set(columns[0][i]) & set(columns[0][then])
            assert not stays or taken[i] == pytest.approx(end[i] - start[i])
        else:  # the next prompt came within the last fifth of the step
            assert all(queued[r] > start[i] + 0.8 * (end[i] - start[i]) for r in columns[0][then])
        following[engine[i]] = i
    assert 0.0 < (taken > 0.9 * (end - start)).mean() < 1.0


def test_noise_floor_is_the_mean_difference_of_pairs():
    assert noise_floor([3.0]) is None
    assert noise_floor([100.0, 110.0]) == pytest.approx(100 * 10 / 105)
    assert noise_floor([1.0, 2.0, 4.0]) == pytest.approx(100 * 2.0 / (7 / 3))


def test_repeats_that_differ_make_a_noise_floor(twins, live_calibration):
    (run, replayed), (other, _) = twins[2:4]
    sent = other.requests["sent_s"].to_numpy()
    late = [
        [s + 1.2 * (t - s) for t in times]
        for s, times in zip(sent, other.requests["token_s"].to_pylist(), strict=True)
    ]
    slow = replace(other, requests=with_column(other.requests, "token_s", late))
    comparison = compare_runs([(run, replayed), (slow, replayed)], live_calibration)
    for row in comparison.summary["requests"]:
        assert row["noise_percent"] == pytest.approx(100 * 0.2 / 1.1)
        error = {0: 0.0, 1: 100 * (1 / 1.2 - 1), None: 50 * (1 / 1.2 - 1)}[row["repeat"]]
        assert row["error_percent"] == pytest.approx(error, abs=1e-7)
        assert row["abs_error_percent"] == pytest.approx(abs(error), abs=1e-7)


def test_step_noise_is_the_spread_of_steps_that_are_alike():
    steps = pd.DataFrame(
        {
            "setup": "colocated",
            "role": "colocated",
            "batch": [4] * 20 + [5] * 3,
            "active": [30, 31] * 10 + [30] * 3,
            "layers": 8,
            "live_ms": [10.0] * 10 + [24.0] * 10 + [1.0, 50.0, 99.0],
            "drift": [1.0] * 10 + [2.0] * 10 + [1.0] * 3,  # at half the speed
        }
    )
    found = comparison._step_noise(steps, "live_ms")
    # The median of the twenty is 11; the three of batch 5 are too few to say anything.
    assert found["noise_median_percent"] == pytest.approx(100 / 11)
    assert found["noise_p90_percent"] == pytest.approx(100 / 11)
    assert comparison._step_noise(steps[:5], "live_ms") == dict.fromkeys(found)


def test_prompts_computed_ahead_cost_nothing(make_live_run, live_calibration):
    run, replayed = make_live_run("1P2D", rate=300.0, prefilled=True)
    found = compare_runs([(run, replayed)], live_calibration).summary
    assert all(row["abs_error_percent"] < 1e-6 for row in found["requests"])
    assert all(row["median_percent"] < 1e-6 for row in found["steps"])
    parts = {row["component"]: row for row in found["components"] if row["of"] == "ttft"}
    assert parts["prefill"]["live_ms"] == parts["prefill"]["simulated_ms"] == 0.0
    assert parts["transfer"]["live_ms"] > 0.0
    assert {row["role"] for row in found["steps"]} == {None, "decode"}
