"""Forms fitted to profiles, the grid that a run uses, effects and comparisons. No torch needed."""

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.kernels.moe_latency import MoEGrid, fit_grid, fit_moe_latency
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.profile import table_fit as fit
from eldr_sim.kernel_profiles.profile.grid import FORCED, MoEPoint, held_out, moe_levels
from eldr_sim.kernel_profiles.profile.links import fit_transfer
from eldr_sim.kernel_profiles.profile.plots import plot_profile
from eldr_sim.kernel_profiles.profile.records import MAIN, Record, tables_of
from eldr_sim.kernel_profiles.profile.table_fit import differences
from eldr_sim.kernel_profiles.profile.timing import Timing
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.kernel_profiles.tables.format import LatencyTable, moe_shape, table_name

from ..step_times import fixed_s

FACTS = {"device": "a card", "driver_version": "1", "torch": "2", "power.limit": "700 W"}
SHAPE = moe_shape(2048, 768, 128, 8)


def record(kind, row, seconds, *, folder=MAIN, shape=None, dtype="bfloat16"):
    timing = Timing(seconds, 0.9 * seconds, 1.1 * seconds, 10)
    return Record(folder, kind, shape or {}, dtype, "kernel", "torch 2", row, timing)


def moe_table(seconds, *, gpu="H100", folder=MAIN):
    """A whole grid whose times are ``seconds(batch, distinct, skew)``."""
    points = [p for level in moe_levels(128, 8, 1, (1024, 4096)) for p in level]
    records = [
        record(
            "moe",
            {"batch": p.batch, "distinct_experts": p.distinct, "routing": p.routing},
            seconds(p.batch, p.distinct, p.skew),
            folder=folder,
            shape=SHAPE,
        )
        for p in points
    ]
    ((_, table),) = tables_of(records, gpu, FACTS)
    return table


def linear(batch, distinct, skew=0.0):
    return 20e-6 + 3e-6 * distinct + 0.2e-6 * batch * (1 + skew)


def test_the_linear_form_is_recovered():
    report = fit.moe_report(moe_table(linear))
    assert report["linear"]["a_us"] == pytest.approx(20)
    assert report["linear"]["b_us"] == pytest.approx(3)
    assert report["linear"]["c_us"] == pytest.approx(0.2)
    assert report["linear"]["held_out_max"] < 1e-9
    assert report["grid"]["held_out_max"] < 0.05
    assert report["held_out"] == report["points"] // 5


def test_held_out_points_are_never_fitted():
    """Spoiling the held-out points changes no coefficient, and the errors tell."""
    table = moe_table(linear)
    clean = fit.moe_report(table)
    batch, distinct, _ = fit.even_rows(table)
    hidden = held_out([MoEPoint(int(b), int(d)) for b, d in zip(batch, distinct, strict=True)])
    rows = zip(
        table.columns["batch"], table.columns["distinct_experts"], table.columns["routing"],
        strict=True,
    )  # fmt: skip
    out = np.array([r == FORCED and MoEPoint(int(b), int(d)) in hidden for b, d, r in rows])
    assert out.sum() == clean["held_out"]
    spoilt = dict(table.columns)
    spoilt["latency_s"] = np.where(out, 3 * table.columns["latency_s"], table.columns["latency_s"])
    report = fit.moe_report(LatencyTable(table.metadata, spoilt))
    for name in ("a_us", "b_us", "c_us"):
        assert report["linear"][name] == clean["linear"][name]
    for form in ("linear", "max_form", "grid"):
        assert report[form]["held_out_mean"] > 0.5


def test_a_run_follows_the_grid_through_every_even_point():
    def crooked(batch, distinct, skew=0.0):
        return 1e-5 + 1e-6 * distinct**1.3 + 1e-7 * batch * np.sqrt(distinct) + skew

    table = moe_table(crooked)
    model = fit_moe_latency(table)
    assert isinstance(model, MoEGrid)
    batch, distinct, latency = fit.even_rows(table)
    np.testing.assert_allclose(model.time_s(batch, distinct), latency, rtol=1e-12)
    assert model.batch_max == 4096
    # Half way between two batches and two counts: the mean of four corners.
    corners = [crooked(b, d) for b in (64, 96) for d in (64, 80)]
    assert float(model.time_s(80, 72)) == pytest.approx(np.mean(corners))
    # Past the last batch the last slope goes on.
    a, b, c = model.time_s(np.array([1024, 4096, 7168]), 128)
    assert c - b == pytest.approx(b - a)
    grid = model.grid_s(600)
    assert (np.diff(grid[1:, 1:], axis=1) >= 0).all()
    assert not grid[0].any()
    assert not grid[:, 0].any()
    assert (grid[1:, 1:] > 0).all()


def test_a_grid_of_one_batch_has_its_times_at_all():
    at, seconds = np.array([4.0, 32.0, 96.0]), np.array([1e-5, 3e-5, 6e-5])
    model = fit_grid(np.full(3, 8.0), at, seconds, 128, 8)
    for batch in (8, 300):
        np.testing.assert_allclose(model.time_s(batch, at), seconds, rtol=1e-12)


def test_a_grid_serves_a_rank_of_several():
    rank = fit_moe_latency(moe_table(linear)).on_rank(4)
    assert rank.n_experts == 32
    assert float(rank.time_s(8, 16)) == pytest.approx(linear(8, 16), rel=0.05)


def test_skewed_rows_are_measured_and_not_fitted():
    plain, skewed = (
        fit_moe_latency(moe_table(lambda b, d, s, w=w: linear(b, d) * (1 + w * s))) for w in (0, 9)
    )
    np.testing.assert_array_equal(plain.grid_s(64), skewed.grid_s(64))


def test_effects_are_ratios_of_like_points():
    base = moe_table(lambda b, d, s: linear(b, d) * (1 + s))
    warm = moe_table(lambda b, d, s: linear(b, d) * 0.5)
    (entry,) = fit.effects({"": [base], "warm_cache": [warm]}).values()
    assert entry["skew"]["forced_zipf_0.6"]["median"] == pytest.approx(1.6)
    assert entry["skew"]["forced_zipf_1.2"]["max"] == pytest.approx(2.2)
    assert entry["warm_cache"]["points"]["64x128"] == pytest.approx(0.5)
    assert "eager" not in entry


def test_bandwidth_names_what_holds_it_back():
    size = 3 * 2048 * 768 * 2
    good = moe_table(lambda b, d, s: d * size / 3e12)
    (entry,) = fit.bandwidth_report([good], 3e12).values()
    assert entry["share_of_copy_bandwidth"]["min"] == pytest.approx(1)
    assert "held_back_by" not in entry
    slow = moe_table(lambda b, d, s: 200e-6 + d * size / 3e12)
    (entry,) = fit.bandwidth_report([slow], 3e12).values()
    assert entry["share_of_copy_bandwidth"]["max"] < 0.85
    assert "200 us are fixed" in entry["held_back_by"]
    assert "100% of the copy bandwidth" in entry["held_back_by"]


def test_transfer_terms_are_recovered():
    points = {
        (n * size, n): 5e-6 + 2e-6 * n + n * size / 1e10
        for n in (1, 8, 64)
        for size in (4096, 1 << 20)
    }
    fitted = fit_transfer(points)
    assert fitted.setup_s == pytest.approx(5e-6)
    assert fitted.descriptor_s == pytest.approx(2e-6)
    assert fitted.bandwidth == pytest.approx(1e10)
    assert fitted.max_error < 1e-9


def test_a_measured_table_beats_the_imported_one_and_says_so():
    table = moe_table(lambda b, d, s: 2 * linear(b, d))
    model = load_model("Qwen3-30B-A3B")
    step = build_step_time_model(model, "H100", max_num_seqs=64, max_model_len=4096, tables=[table])
    assert step.provenance["moe"]["label"] == "measured"
    assert step.cost.moe_s[64, 128] == pytest.approx(2 * linear(64, 128))


def test_elementwise_and_host_gap_tables_are_used():
    model = load_model("Qwen3-30B-A3B")
    elementwise = {"hidden_size": 2048, "n_heads": 32, "n_kv_heads": 4, "head_dim": 128}
    records = [
        record("elementwise", {"tokens": n}, 1e-6 * n, shape=elementwise) for n in (1, 64, 4096)
    ]
    gap = {"n_layers": 48, "hidden_size": 2048}
    records += [record("host_gap", {"batch": b}, 7e-3, shape=gap) for b in (1, 8)]
    tables = [table for _, table in tables_of(records, "H100", FACTS)]
    size = {"max_num_seqs": 64, "max_model_len": 4096}
    plain = build_step_time_model(model, "H100", host_gap_s=0.0, **size)
    step = build_step_time_model(model, "H100", tables=tables, **size)
    assert step.provenance["norms"]["label"] == step.provenance["host_gap"]["label"] == "measured"
    assert step.host_gap_s == pytest.approx(7e-3)
    # 48 layers at a microsecond a token in place of 8 us a layer and two norms of queries and keys
    assert fixed_s(step)[32] - fixed_s(plain)[32] == pytest.approx(7e-3 + 48 * (32e-6 - 12.16e-6))
    given = build_step_time_model(model, "H100", tables=tables, host_gap_s=1e-3, **size)
    assert given.host_gap_s == 1e-3


def test_gemm_tables_keep_rows_that_are_whole():
    def rows(pairs, ms):
        return [record("gemm", {"m": m, "n": n, "k": k}, 1e-6 * m) for n, k in pairs for m in ms]

    pairs = [(64, 32), (64, 128), (256, 32), (256, 128)]
    records = rows(pairs, (1, 8)) + rows(pairs[:2], (64,)) + rows([(100_000, 32)], (1,))
    ((_, table),) = tables_of(records, "H100", FACTS)
    assert set(table.columns["m"]) == {1, 8}
    assert 100_000 in table.columns["n"]
    assert tables_of(rows(pairs[:3], (1, 8)), "H100", FACTS) == []


def test_tables_tell_their_device_apart_and_round_trip(tmp_path):
    table = moe_table(linear)
    assert table.metadata.provenance == "measured"
    assert table.metadata.driver == "1"
    assert "power.limit 700 W" in table.metadata.notes
    path = tmp_path / table_name(table.metadata)
    table.save(path)
    (picture,) = plot_profile(tmp_path, [path], {"copy_bandwidth": 3e12, "gemm_flops": 8e14})
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_differences_are_found_on_common_points_with_a_reason():
    table = moe_table(linear)
    columns = dict(table.columns)
    even = columns["routing"] == FORCED
    other = {name: values[even].copy() for name, values in columns.items()}
    other["routing"] = np.full(even.sum(), "balanced", dtype=object)
    small = other["distinct_experts"] == 8
    other["latency_s"][small] /= 2
    meta = table.metadata.model_copy(update={"provenance": "imported", "framework": "vllm 1"})
    found = differences(table, 100 << 20, [LatencyTable(meta, other)])
    assert len(found) == even.sum()
    large = [d for d in found if abs(d.ratio - 1) > 0.1]
    assert len(large) == small.sum()
    assert all(d.ratio == pytest.approx(2) and "8 experts" in d.point for d in large)
    assert all("cache" in d.likely for d in large)
    elsewhere = meta.model_copy(update={"gpu": "H200"})
    assert differences(table, 100 << 20, [LatencyTable(elsewhere, other)]) == []


def test_the_shipped_table_of_the_card_is_compared():
    found = differences(moe_table(linear), 50 << 20)
    assert len(found) > 10
    assert {d.kind for d in found} == {"moe"}
    assert any("vllm" in d.other for d in found)


def test_too_few_points_are_refused():
    row = {"batch": 1, "distinct_experts": 8, "routing": FORCED}
    ((_, table),) = tables_of([record("moe", row, 1e-6, shape=SHAPE)], "H100", FACTS)
    with pytest.raises(InputError, match="rows"):
        fit_moe_latency(table)
