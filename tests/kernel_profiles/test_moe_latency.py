"""The separable MoE form: exact where it must be, and true off the diagonal it was fitted on."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import isotonic_regression

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.kernels.moe_latency import (
    MoELatency,
    fit_moe_latency,
    interpolate,
    monotone_fit,
    uniform_distinct,
)
from eldr_sim.kernel_profiles.sources import mi300x
from eldr_sim.kernel_profiles.tables.format import LatencyTable, TableMetadata, moe_shape
from eldr_sim.kernel_profiles.tables.library import shipped_tables

from ..on_each import on_each
from ..paths import SHARED

LATENCY = SHARED / "data" / "latency"
MOE_TABLES = [pytest.param(one, id=one.name) for one in shipped_tables() if one.kind == "moe"]


def _table(rows, routing="balanced", shape=None):
    batch, distinct, latency = (np.array(column) for column in zip(*rows, strict=True))
    return LatencyTable(
        TableMetadata(
            kind="moe",
            gpu="H100",
            shape=shape or moe_shape(2048, 768, 128, 8),
            dtype="bfloat16",
            kernel_source="test",
            framework="test 1",
            provenance="measured",
            origin="a test",
            device="none",
        ),
        {
            "batch": batch.astype(np.int32),
            "distinct_experts": distinct.astype(np.float64),
            "routing": np.array([routing] * len(batch), dtype=object),
            "latency_s": latency.astype(np.float64),
        },
    )


def _diagonal(time, batches=(1, 2, 4, 8, 16, 32, 64, 128, 512, 4096)):
    return [(b, min(128, 8 * b), time(b, min(128, 8 * b))) for b in batches]


@given(a=st.floats(1e-6, 1e-4), e=st.floats(1e-7, 1e-5), r=st.floats(0, 1e-3))
def test_a_truth_of_the_form_is_recovered_from_its_diagonal(a, e, r):
    def truth(batch, distinct):
        return (a + e * distinct) * (1 + r * batch)

    model = fit_moe_latency(_table(_diagonal(truth)))
    batch, distinct = np.meshgrid([1, 3, 16, 100, 256], [16, 19, 40, 127, 128], indexing="ij")
    # Compute may bind where many tokens share few experts: the form then lies above the truth.
    weights_bind = model.expert_s[0] + model.token_s * batch <= truth(batch, distinct)
    np.testing.assert_allclose(
        model.time_s(batch, distinct)[weights_bind], truth(batch, distinct)[weights_bind], rtol=1e-6
    )
    assert weights_bind[:3].all()


def test_compute_binds_where_many_tokens_share_few_experts():
    def truth(batch, distinct):
        return max(2e-5 + 3e-6 * distinct, 2e-5 + 2e-7 * batch)

    batches = (1, 2, 4, 8, 16, 32, 64, 128, 512, 4096, 8192)
    model = fit_moe_latency(_table(_diagonal(truth, batches)))
    assert model.token_s == pytest.approx(2e-7)
    assert model.time_s(8192, 16) == pytest.approx(truth(8192, 16), rel=1e-6)
    assert model.time_s(4, 16) == pytest.approx(truth(4, 16), rel=1e-6)


def test_curved_weights_are_followed_point_by_point():
    rows = _diagonal(lambda b, d: (2e-5 + 1e-6 * d**1.2) * (1 + 1e-4 * b))
    model = fit_moe_latency(_table(rows))
    for batch, distinct, latency in rows:
        assert model.time_s(batch, distinct) == pytest.approx(latency, rel=1e-9)
    assert model.fit_error["rows_max"] < 1e-9
    assert 0 < model.fit_error["leave_one_out_max"] < 0.1


def test_expectations_only_get_a_straight_line():
    rng = np.random.default_rng(7)
    rows = [
        (b, d, (2e-5 + 3e-6 * d + 1e-8 * b) * (1 + 0.01 * rng.standard_normal()))
        for b in (1, 2, 4, 8, 16, 32, 64, 128)
        for d in (uniform_distinct(b, 128, 8), 0.9 * uniform_distinct(b, 128, 8))
    ]
    model = fit_moe_latency(_table(rows, routing="power_law_1.2"))
    assert model.expert_s[101] - model.expert_s[100] == pytest.approx(3e-6, rel=0.05)
    assert model.time_s(64, 100) == pytest.approx(2e-5 + 3e-4 + 64 * 1e-8, rel=0.03)


@given(hnp.arrays(np.float64, st.integers(1, 30), elements=st.floats(1e-6, 1e3)))
def test_the_monotone_fit_is_isotonic_regression_and_has_no_bias(values):
    fit = monotone_fit(values)
    assert (np.diff(fit) >= 0).all()
    logs = isotonic_regression(np.log(values)).x
    np.testing.assert_allclose(np.log(fit), logs, rtol=1e-9, atol=1e-9)
    assert np.log(fit).sum() == pytest.approx(np.log(values).sum(), abs=1e-6)


def test_noise_does_not_make_a_monotone_fit_faster_than_its_rows():
    """A flat kernel under 5% noise: the fit keeps its level, a lower envelope reads 10% low."""
    rows = np.exp(0.05 * np.random.default_rng(3).standard_normal((200, 24)))
    assert np.log(monotone_fit(rows)).mean() == pytest.approx(0.0, abs=0.003)
    np.testing.assert_array_equal(monotone_fit(rows.T, axis=0), monotone_fit(rows).T)
    envelope = np.minimum.accumulate(rows[:, ::-1], axis=1)
    assert np.log(envelope).mean() < -0.05


def test_zeros_and_gaps_stay_out_of_the_monotone_fit():
    fit = monotone_fit([0.0, 4.0, 1.0, np.inf, 9.0])
    np.testing.assert_allclose(fit, [0.0, 2.0, 2.0, np.inf, 9.0])


def test_expectations_of_large_batches_take_the_least_row():
    """Loads of several skews were timed at 512 tokens: what routing costs is not the batch's."""

    def line(batch, distinct):
        return 1e-5 + 1e-6 * distinct + 1e-7 * batch

    small = [(b, min(128, 8 * b), line(b, min(128, 8 * b))) for b in (1, 2, 4, 8, 16, 32, 64, 128)]
    large = [(512, 120, 1.5 * line(512, 120)), (512, 100, 3.0 * line(512, 100))]
    fitted = fit_moe_latency(_table(small + large, routing="power_law_1.2"))
    assert float(fitted.time_s(512, 120)) == pytest.approx(1.5 * line(512, 120), rel=1e-6)


def test_a_rank_by_hand():
    """8 experts of 1 us after 2 us: a rank of 4 reads each as fast and computes half the pairs."""
    whole = MoELatency(
        n_experts=8, top_k=2, expert_s=2e-6 + 1e-6 * np.arange(9.0),
        batch_knots=np.array([0.0, 100.0]), batch_s=np.array([0.0, 5e-6]), token_s=1e-9,
        unbalanced_knots=np.array([1.0, 100.0]), unbalanced_s=np.array([3e-6, 42e-6]),
    )  # fmt: skip
    rank = whole.on_rank(2)
    assert (rank.n_experts, rank.top_k, rank.token_s) == (4, 1.0, 0.5e-9)
    batch, distinct = np.arange(1, 200)[:, None], np.arange(1, 5)
    np.testing.assert_allclose(rank.time_s(batch, distinct), whole.time_s(batch, distinct))
    # The kernels' own 2 us are on every rank, the rest of a skewed load is shared.
    np.testing.assert_allclose(rank.unbalanced_s, [2.5e-6, 22e-6])
    # Steps with prompts read what is touched, and compute what is skewed.
    mixed, skewed = (
        rank.mixed_grid_s(150),
        interpolate(np.arange(151), [1.0, 100.0], [2.5e-6, 22e-6]),
    )
    np.testing.assert_allclose(
        mixed[1:, 1:],
        np.maximum(rank.time_s(np.arange(1, 151)[:, None], distinct), skewed[1:, None]),
    )
    assert (mixed[120, 1:] > rank.grid_s(150)[120, 1:]).all()


def test_interpolation_goes_on_with_the_last_slope():
    knots, values = np.array([0.0, 1.0, 3.0]), np.array([0.0, 1.0, 5.0])
    np.testing.assert_allclose(interpolate([0.5, 2, 3, 4], knots, values), [0.5, 3, 5, 7])


def test_uniform_distinct_matches_a_simulation():
    rng = np.random.default_rng(1)
    for batch, top_k in ((1, 8), (4, 8), (16, 4), (64, 2)):
        draws = [
            len({e for _ in range(batch) for e in rng.permutation(32)[:top_k]}) for _ in range(400)
        ]
        error = 4 * np.std(draws) / 20 + 1e-9
        assert uniform_distinct(batch, 32, top_k) == pytest.approx(np.mean(draws), abs=error)
    assert uniform_distinct(1, 128, 8) == pytest.approx(8)
    assert uniform_distinct(3, 8, 8) == pytest.approx(8)


@pytest.mark.long
@on_each("shipped", MOE_TABLES)
def test_every_shipped_table_gives_a_sane_monotone_model(shipped):
    table = shipped.load()
    model = fit_moe_latency(table)
    grid = model.grid_s(256)
    assert grid.shape == (257, model.n_experts + 1)
    assert (grid[0] == 0).all()
    assert (grid[:, 0] == 0).all()
    inner = grid[1:, 1:]
    assert (inner >= 0).all()
    assert (inner[:, int(model.top_k) - 1 :] > 0).all()
    assert (np.diff(inner, axis=1) >= -1e-15).all()
    tokens = np.arange(1.0, 20_000.0, 50.0)
    prefill = model.prefill_s(tokens)
    reading = model.time_s(tokens, uniform_distinct(tokens, model.n_experts, model.top_k))
    assert (prefill >= reading).all()
    assert len(model.unbalanced_knots) or (prefill == reading).all()
    # Peaks that bind everywhere are all that is left: experts are read, or pairs are computed.
    bound = replace(model, least_expert_s=1.0, least_pair_s=0.25)
    experts = np.arange(model.n_experts + 1.0)
    for batch in (1, 7, 200):
        least = np.maximum(experts, 0.25 * batch * model.top_k)
        np.testing.assert_array_equal(bound.time_s(batch, experts), least)
    if "default tiles" in table.metadata.kernel_source:  # may fall where another tile runs
        inner, prefill = inner[97:], prefill[11:]
    assert (np.diff(inner, axis=0) >= -1e-15).all()
    assert (np.diff(prefill) >= -1e-15).all()


#: Tables whose measured times fall from one number of tokens to a larger one; the model's do not.
NOT_MONOTONE = (
    "h4096_i1024_e512_k10_ep8_nvfp4", "b300_moe_h2048_i384_e128_k8_fp8_block_trtllm",
    "e128_k6_mm2", "e512_k22_mm2_nvfp4", "e288_k8", "h2816_i88_e128", "h2816_i176_e128",
    "h100_moe_h6144_i128_e256_k8_fp8_block_vllm",
)  # fmt: skip


@pytest.mark.long
@on_each("shipped", MOE_TABLES)
def test_every_shipped_table_is_met_where_it_was_measured(shipped):
    """Rows of exact distinct counts: the model follows them but for isolated outliers."""
    table = shipped.load()
    exact = np.array([not str(r).startswith("power_law") for r in table.columns["routing"]])
    if not exact.any():
        pytest.skip("the table has expected distinct counts only")
    model = fit_moe_latency(table)
    columns = {name: values[exact] for name, values in table.columns.items()}
    predicted = model.time_s(columns["batch"], columns["distinct_experts"])
    error = np.abs(predicted / columns["latency_s"] - 1)
    scatters = any(name in shipped.name for name in NOT_MONOTONE)
    assert error.mean() < (0.07 if scatters else 0.05 if table.metadata.gpu == "L40S" else 0.025)
    bias = np.log(predicted / columns["latency_s"]).mean()
    assert bias == pytest.approx(0.0, abs=0.012 if scatters else 0.002)


HELD_OUT = {  # file: (leave one out over d, power-law rows), mean relative error allowed
    "h100_moe_h2048_i768_e128_k8_bfloat16_vllm-0.24.0": (0.03, 0.04),
    "h200_moe_h2048_i768_e128_k8_bfloat16_vllm-0.24.0": (0.03, 0.04),
    "b200_moe_h2048_i768_e128_k8_bfloat16_vllm-0.24.0": (0.03, 0.06),
    "h100_moe_h2880_i2880_e128_k4_w4a16_mxfp4_vllm-0.24.0": (0.04, 0.03),
    "h200_moe_h2880_i2880_e128_k4_w4a16_mxfp4_vllm-0.24.0": (0.04, 0.03),
    "b200_moe_h2880_i2880_e128_k4_w4a16_mxfp4_vllm-0.24.0": (0.03, 0.06),
}


@pytest.mark.parametrize("stem", HELD_OUT)
def test_held_out_errors_of_the_main_tables(stem):
    """Neither a left-out distinct count nor the power-law rows were fitted."""
    table = next(one for one in shipped_tables() if one.name == stem)
    errors = fit_moe_latency(table.load()).fit_error
    left_out, power_law = HELD_OUT[stem]
    assert errors["leave_one_out_mean"] < left_out
    assert errors["power_law_mean"] < power_law


def test_a100_line_matches_the_published_fit():
    """Research fit of the same rows: 18.3 + 5.536 d + 0.178 b microseconds."""
    table = next(t for t in shipped_tables() if t.name.startswith("a100_moe_h2048_i768"))
    model = fit_moe_latency(table.load())
    assert model.expert_s[0] * 1e6 == pytest.approx(18.3, abs=1.5)
    assert np.diff(model.expert_s)[0] * 1e6 == pytest.approx(5.536, rel=0.02)
    assert model.fit_error["rows_mean"] < 0.02
    assert model.fit_error["leave_one_out_mean"] < 0.03


def test_the_form_holds_off_the_diagonal_on_the_public_grid():
    """RTX PRO 6000: fitted on the diagonal alone, scored on the other points of the grid."""
    path = LATENCY / "llmservingsim_rtxpro6000_qwen3_30b_a3b_bf16_moe.csv"
    if not path.is_file():
        pytest.skip(f"no public grid: {path} is missing")
    grid = np.genfromtxt(path, delimiter=",", names=True)
    rows = list(zip(grid["tokens"], grid["activated_experts"], grid["time_us"] * 1e-6, strict=True))
    diagonal = [row for row in rows if row[1] == min(128, 8 * row[0])]
    model = fit_moe_latency(_table(diagonal))
    # 8 experts (75 MB) sit in that GPU's 128 MB L2 cache, so that their rows read low.
    others = [row for row in rows if 16 <= row[1] != min(128, 8 * row[0]) and row[0] <= 128]
    batch, distinct, measured = np.array(others).T
    error = np.abs(model.time_s(batch, distinct) / measured - 1)
    assert len(others) == 15
    assert error.mean() < 0.025
    assert error.max() < 0.08


def test_mi300x_reproduces_the_published_ratio_and_lies_above_aiter():
    model = fit_moe_latency(mi300x.moe_table())
    assert model.time_s(64, 128) / model.time_s(64, 16) == pytest.approx(4.7, abs=0.01)
    # AITER's rows lack top-k, sort and reduce: the layer must cost more, but not much more.
    for batch, microseconds in mi300x.AITER_US.items():
        layer = model.time_s(batch, uniform_distinct(batch, 128, 8)) * 1e6
        assert 0 < layer - microseconds < 36


def test_mi300x_constants_are_those_of_the_source():
    path = LATENCY / "aiter_qwen3_235b_bf16_fmoe.csv"
    if not path.is_file():
        pytest.skip(f"no AITER rows: {path} is missing")
    rows = np.genfromtxt(path, delimiter=",", names=True, dtype=None, encoding="utf-8")
    rows = rows[(rows["cu_num"] == 304) & (rows["inter_dim"] == 384)]
    assert dict(zip(rows["token"].tolist(), rows["us"].tolist(), strict=True)) == mi300x.AITER_US


def test_too_few_rows_and_other_kinds_are_refused():
    with pytest.raises(InputError, match="at least 4"):
        fit_moe_latency(_table(_diagonal(lambda b, d: 1e-5, batches=(1, 2, 4))))
    gemm = next(one for one in shipped_tables() if one.kind == "gemm")
    with pytest.raises(InputError, match="gemm"):
        fit_moe_latency(gemm.load())
