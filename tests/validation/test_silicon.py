"""Predictions of measured runs: which rows count, that none is fitted on, and their errors."""

import csv
from dataclasses import fields, replace

import numpy as np
import pyarrow as pa
import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.kernel_profiles.tables.format import moe_shape
from eldr_sim.kernel_profiles.tables.library import find_table
from eldr_sim.validation.published import silicon, silicon_rows
from eldr_sim.validation.published.launch_scripts import Script
from eldr_sim.validation.published.predictions import errors_of
from eldr_sim.validation.published.silicon import growth_error, predict_rows, worst_rows
from eldr_sim.validation.published.silicon_rows import (
    MEASURED_MODELS,
    Case,
    MeasuredRun,
    Workers,
    read_rows,
    uncovered_rows,
)

from ..on_each import on_each

COLUMNS = [
    "silicon_data_source",
    "backend",
    "backend_version",
    "model_path",
    "system",
    "mode",
    "isl",
    "osl",
    "tp_size",
    "attention_dp_size",
    "moe_tp_size",
    "moe_ep_size",
    "precision",
    "silicon_ttft_ms",
    "silicon_tpot_ms",
]
POOL = [
    "batch_size", "num_workers", "tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size",
]  # fmt: skip
#: What vLLM's scripts of GPT-OSS say.
GPT_OSS = Script(captured=2048)


@pytest.fixture
def make_csv(tmp_path):
    """Write a file in the package's layout; a row is (system, tp, isl, osl, c, ttft, tpot)."""

    def make(*rows, **other):
        path = tmp_path / "silicon.csv"
        with path.open("w", newline="") as file:
            pools = [f"{pool}_{name}" for pool in ("prefill", "decode") for name in POOL]
            writer = csv.DictWriter(file, COLUMNS + pools)
            writer.writeheader()
            for system, tp, isl, osl, c, ttft, tpot in rows:
                source = f"x; silicon_concurrency={c}; measured=2026-03-27T08:01:51Z"
                values = [
                    source,
                    "vllm",
                    "0.18.0",
                    "openai/gpt-oss-120b",
                    system,
                    "agg",
                    isl,
                    osl,
                    tp,
                ]
                row = dict(zip(COLUMNS, [*values, 1, tp, 1, "fp4", ttft, tpot], strict=True))
                writer.writerow(row | dict.fromkeys(pools, "") | other)
        return path

    return make


def test_rows_are_read_once_and_in_order(make_csv):
    row = ("h200_sxm", 1, 1024, 1024, 8, 60.0, 6.0)
    rows = read_rows(make_csv(("h100_sxm", 2, 1024, 1024, 4, 50.0, 5.0), row, row))
    assert [r.case for r in rows] == [
        Case("H100", 2, 1024, 1024, 4, script=GPT_OSS),
        Case("H200", 1, 1024, 1024, 8, script=GPT_OSS),
    ]
    assert rows[1].ttft_ms == 60.0
    assert rows[1].date == "2026-03-27"
    assert not any(r.excluded for r in rows)


def test_other_models_engines_and_precisions_are_left_out(make_csv):
    for other in ({"model_path": "meta/llama"}, {"backend": "sglang"}, {"precision": "fp8"}):
        path = make_csv(("h100_sxm", 2, 1024, 1024, 4, 50.0, 5.0), **other)
        with pytest.raises(InputError, match="no vllm row"):
            read_rows(path)
        assert not uncovered_rows(MEASURED_MODELS["gpt-oss-120b"], path)


def test_doubtful_rows_are_marked_by_what_was_measured(make_csv):
    rows = read_rows(
        make_csv(
            ("h100_sxm", 4, 1024, 1024, 16, 60.0, 6.0),
            ("h100_sxm", 4, 1024, 1024, 32, 160.0, 16.0),
            ("h100_sxm", 4, 1024, 1024, 64, 110.0, 9.0),  # falls: both neighbours are doubtful
            ("h100_sxm", 4, 1024, 1024, 512, 110.0, 9.0),
            ("h200_sxm", 4, 1024, 100, 4, 200.0, 6.0),  # 200 ms beside 600 ms of decoding
        )
    )
    assert [bool(r.excluded) for r in rows] == [False, True, True, True, True]


def make_row(c, ttft=50.0, tpot=5.0, gpu="H200"):
    return MeasuredRun(Case(gpu, 8, 128, 32, c), ttft, tpot, "0.18.0", "2026-03-27")


def assert_measurements_do_not_matter(rows, **options):
    once = predict_rows(rows, **options)
    rng = np.random.default_rng(0)
    other = [
        replace(r, ttft_ms=float(rng.uniform(1, 1e3)), tpot_ms=9.0, excluded="x") for r in rows
    ]
    again = predict_rows(other, **options)
    assert once["predicted_ms"].to_pylist() == again["predicted_ms"].to_pylist()
    tpot, ttft, slower, _ = once.to_pylist()
    assert [tpot["metric"], ttft["metric"], slower["metric"]] == ["tpot", "ttft", "tpot"]
    assert ttft["error"] == pytest.approx(100 * (ttft["predicted_ms"] / rows[0].ttft_ms - 1))
    assert slower["predicted_ms"] > tpot["predicted_ms"]


@pytest.mark.long
def test_predictions_do_not_see_the_measured_figures(monkeypatch):
    """Nothing is fitted on the scored rows: other measurements, the same predictions."""
    monkeypatch.setattr(silicon_rows, "REQUESTS", 2)
    assert {f.name for f in fields(Case)}.isdisjoint({"ttft_ms", "tpot_ms"})
    assert_measurements_do_not_matter([make_row(1), make_row(4)], moe_kernel="newest")


class TestOtherModels:
    """MiniMax-M2.5 and Qwen3-235B-A22B-FP8, whose configurations and tables the package has."""

    @pytest.fixture(autouse=True)
    def _package(self):
        pytest.importorskip("aiconfigurator_core", reason="needs eldr-sim[aiconfigurator]")

    @pytest.mark.parametrize("name", ["minimax-m2.5", "qwen3-235b", "kimi-k2.5", "llama-70b-fp8"])
    def test_predictions_do_not_see_the_measured_figures(self, name, monkeypatch):
        monkeypatch.setattr(silicon_rows, "REQUESTS", 2)
        rows = [r for r in read_rows(target=MEASURED_MODELS[name]) if r.case.gpu == "H200"]
        case = replace(rows[0].case, input_len=128, output_len=32)
        rows = [replace(rows[0], case=replace(case, concurrency=c)) for c in (1, 4)]
        assert_measurements_do_not_matter(rows, target=MEASURED_MODELS[name])

    def test_every_row_is_predicted_or_has_a_reason(self):
        """Counted here by other means than the reader's."""
        import pandas as pd

        from eldr_sim.validation.published.silicon_rows import package_folder

        frame = pd.read_csv(package_folder() / "systems" / "silicon_sample.csv", dtype=str)
        frame = frame.fillna({"precision": ""})
        for name, target in MEASURED_MODELS.items():
            mine = frame[
                (frame.model_path == target.model_path)
                & (frame.backend == target.backend)
                & (frame.precision == target.precision)
            ]
            refused = uncovered_rows(target)
            covered = len(mine) - refused.total()
            assert 0 < len(read_rows(target=target)) <= covered
            assert bool(refused) == (
                name
                in (
                    "qwen3-32b-fp8", "deepseek-v3-sglang", "qwen3-235b-trtllm",
                    "qwen3-32b-fp8-trtllm",
                )
            )  # fmt: skip

    def test_dense_rows_are_all_340_and_need_no_routing_and_no_import(self, tmp_path):
        """Every vLLM row of a dense model is read, but those of no known concurrency."""
        vllm = {name: t for name, t in MEASURED_MODELS.items() if t.backend == "vllm"}
        dense = {name: t for name, t in vllm.items() if t.dims().is_dense}
        refused = sum(uncovered_rows(target).total() for target in dense.values())
        read = sum(len(read_rows(target=target)) for target in dense.values())
        assert (read, refused) == (337, 3)
        for target in dense.values():
            cases = [row.case for row in read_rows(target=target)]
            assert silicon.case_tables(tmp_path / "none", cases, "newest", target) is None
            for case in sorted({(case.gpu, case.parallelism) for case in cases}, key=str)[:2]:
                steps = build_step_time_model(
                    target.dims(), case[0], parallelism=case[1], max_num_seqs=1, max_model_len=512
                )
                assert steps.provenance["gemm"]["label"] == "imported"
                assert steps.provenance["attention"]["label"] == "imported"
        rows = [r for r in read_rows(target=dense["llama-70b-fp8"]) if r.case.gpu == "H200"][:2]
        assert {row.case.tensor_parallel_size for row in rows} == {1}
        table = predict_rows(rows, target=dense["llama-70b-fp8"])
        assert 0 < table["predicted_ms"][0].as_py() < 100

    def test_tables_are_of_the_cards_and_sizes_asked_for(self, tmp_path):
        from eldr_sim.kernel_profiles.tables.format import load_table

        cut, spread = Case("H200", 4, 1024, 1024, 4), Case("H100", 4, 1024, 1024, 4, True)

        def tables(cases, kernel):
            target = MEASURED_MODELS["minimax-m2.5"]
            folder = silicon.case_tables(tmp_path / kernel, cases, kernel, target)
            return [load_table(path).metadata for path in folder.iterdir()]

        found = tables([cut, spread], "oldest")
        moe = {m.gpu: m for m in found if m.kind == "moe"}
        assert moe["H200"].shape == moe_shape(3072, 384, 256, 8)
        assert moe["H200"].framework == "vllm 0.19.0"
        assert moe["H100"].shape == moe_shape(3072, 1536, 256, 8, 4)
        assert {m.dtype for m in found if m.kind in ("moe", "gemm")} == {"fp8_block"}
        attention = [m.shape for m in found if m.kind == "attention_decode"]
        assert attention == 2 * [{"n_heads": 12, "n_kv_heads": 2, "head_dim": 128, "window": 0}]
        (newest,) = [m for m in tables([cut], "newest") if m.kind == "moe"]
        assert newest.framework == "vllm 0.24.0"

    def test_a_missing_moe_table_is_refused_not_guessed(self, tmp_path):
        case = Case("A100", 2, 1024, 1024, 4)  # the card has no FP8
        with pytest.raises(InputError, match=r"no MoE table of MiniMax-M2\.5 on 2 A100"):
            silicon.case_tables(
                tmp_path / "tables", [case], "newest", MEASURED_MODELS["minimax-m2.5"]
            )

    def test_gpt_oss_kernels_are_not_those_of_others(self):
        with pytest.raises(InputError, match="marlin"):
            predict_rows([make_row(1)], target=MEASURED_MODELS["qwen3-235b"], moe_kernel="marlin")

    def test_fp8_gemms_grow_with_the_matrix(self):
        """Rows that timed the launch would not: vLLM's of the package are as slow for 128 x 128."""
        from eldr_sim.kernel_profiles.kernels.kernel_latency import GemmLatency
        from eldr_sim.kernel_profiles.sources.aiconfigurator import gemm_tables

        for gpu in ("H100", "H200", "B200"):
            (table,) = gemm_tables(gpu, "fp8_block")
            gemm = GemmLatency.from_table(table)
            small, large = (gemm.time_s(n, n, np.array([16.0]))[0] for n in (128, 8192))
            assert small < 10e-6
            assert large > 64e6 / 8e12  # no faster than the fastest memory reads it
            assert large > 3 * small


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"moe_tp_size": 4}, "labels contradict"),
        ({"attention_dp_size": 2}, "labels contradict"),
        ({"attention_dp_size": 2, "moe_tp_size": 1, "moe_ep_size": 4}, "2 or 4 GPUs"),
        ({"mode": "disagg"}, "disaggregated"),
        ({"system": "l40s"}, "this GPU"),
        ({"silicon_data_source": "measured=2026-03-27"}, "concurrency"),
        ({"tp_size": 7, "moe_tp_size": 7}, "no such kernel"),
    ],
)
def test_what_cannot_be_predicted_has_a_reason(make_csv, other, reason):
    path = make_csv(("h200_sxm", 2, 1024, 1024, 4, 50.0, 5.0), **other)
    ((_, why), count), *more = uncovered_rows(MEASURED_MODELS["gpt-oss-120b"], path).items()
    assert reason in why
    assert (count, more) == (1, [])


def test_spread_experts_are_a_setting_of_their_own(make_csv):
    path = make_csv(("h200_sxm", 4, 1024, 1024, 4, 50.0, 5.0), moe_tp_size=1, moe_ep_size=4)
    (row,) = read_rows(path)
    assert row.case == Case("H200", 4, 1024, 1024, 4, expert_parallel=True, script=GPT_OSS)


def test_data_parallel_attention_is_read(make_csv):
    """Four engines of a GPU each that share whole experts."""
    labels = {"tp_size": 1, "attention_dp_size": 4, "moe_tp_size": 1, "moe_ep_size": 4}
    (row,) = read_rows(make_csv(("h200_sxm", 1, 1024, 1024, 8, 50.0, 5.0), **labels))
    assert row.case == Case("H200", 1, 1024, 1024, 8, True, 4, script=GPT_OSS)
    assert row.case.parallelism == Parallelism(1, True, 4)
    assert row.case.kind == "data-parallel attention, experts spread"


@pytest.mark.parametrize("dp", ["2", ""])
def test_experts_may_be_cut_beside_data_parallel_attention(make_csv, dp):
    """NVIDIA's own runs leave the engines out: as many as GPUs have parts of the experts."""
    labels = {"tp_size": 1, "attention_dp_size": dp, "moe_tp_size": 2, "moe_ep_size": 1}
    (row,) = read_rows(make_csv(("h200_sxm", 1, 1024, 1024, 8, 50.0, 5.0), **labels))
    assert row.case.parallelism == Parallelism(1, False, 2)
    assert row.case.kind == "data-parallel attention, experts cut"


def pools(**values):
    """Fields of a disaggregated row: pool_field=value."""
    default = {"num_workers": 1, "batch_size": 1, "tp_size": 1, "attention_dp_size": 1}
    default |= {"moe_tp_size": 1, "moe_ep_size": 1}
    found = {f"{p}_{name}": v for p in ("prefill", "decode") for name, v in default.items()}
    return {"mode": "disagg"} | found | values


def test_pools_of_a_disaggregated_run_are_read(make_csv):
    path = make_csv(
        ("h200_sxm", "", 1024, 1024, 96, 50.0, 5.0),
        **pools(
            prefill_num_workers="2.0", prefill_tp_size=2, prefill_moe_tp_size=2,
            decode_num_workers="3", decode_attention_dp_size=4, decode_moe_ep_size=4,
        ),
    )  # fmt: skip
    (row,) = read_rows(path)
    assert row.case == Case("H200", 1, 1024, 1024, 96, True, 4, 3, Workers(2, 2), script=GPT_OSS)
    assert row.case.prefill.parallelism == Parallelism(2)


@pytest.mark.parametrize(
    ("size", "length", "c", "workers"),
    [(4, 1024, 64, (1, 1)), (2, 1024, 16, (1, 4)), (2, 8192, 384, (2, 1)), (2, 1024, 512, None)],
)
def test_workers_of_gpt_oss_on_gb200_are_those_that_were_configured(
    make_csv, size, length, c, workers
):
    """512 requests on decode workers of 2 GPUs were run with one and with two of them."""
    pytest.importorskip("aiconfigurator_core", reason="needs eldr-sim[aiconfigurator]")
    labels = pools(decode_tp_size=size, decode_moe_tp_size=size, decode_num_workers="")
    path = make_csv(
        ("gb200", "", length, 1024, c, 50.0, 5.0),
        **labels | {"backend": "trtllm", "decode_batch_size": ""},
    )
    target = MEASURED_MODELS["gpt-oss-120b-trtllm"]
    if workers is None:
        ((_, why), _), *_ = uncovered_rows(target, path).items()
        assert "not told apart" in why
    else:
        (row,) = read_rows(path, target)
        assert row.case == Case(
            "GB200", size, length, 1024, c, decode_workers=workers[1], prefill=Workers(workers[0])
        )


def test_without_a_concurrency_the_decode_batches_give_it(make_csv):
    """7 requests a data-parallel rank, 8 ranks; experts not labelled: spread where shared."""
    path = make_csv(
        ("h200_sxm", "", 1024, 1024, 1, 50.0, 5.0),
        silicon_data_source="measured=2026-01-23",
        **pools(
            prefill_tp_size=4, prefill_moe_tp_size=0, prefill_moe_ep_size=0,
            decode_attention_dp_size=8, decode_batch_size=7, decode_moe_tp_size=0,
            decode_moe_ep_size=0,
        ),
    )  # fmt: skip
    (row,) = read_rows(path)
    assert row.case == Case("H200", 1, 1024, 1024, 56, True, 8, 1, Workers(1, 4), script=GPT_OSS)


class TestLaunchScripts:
    """What InferenceX's scripts started where the labels say something else."""

    @pytest.fixture(autouse=True)
    def _package(self):
        pytest.importorskip("aiconfigurator_core", reason="needs eldr-sim[aiconfigurator]")

    def read(self, path, name):
        return [
            (r.case.parallelism, r.case.prefill) for r in read_rows(path, MEASURED_MODELS[name])
        ]

    @pytest.mark.parametrize(
        ("name", "system", "version", "day", "expected"),
        [
            ("minimax-m2.5", "h100_sxm", "0.18.0", "2026-03-28", Parallelism(2, True)),
            ("minimax-m2.5-nvfp4", "b200_sxm", "0.19.0", "2026-04-08", Parallelism(2, True)),
            ("minimax-m2.5-nvfp4", "b200_sxm", "0.19.0", "2026-04-22", Parallelism(1, True, 2)),
            ("kimi-k2.5-nvfp4", "b200_sxm", "0.17.0", "2026-03-27", Parallelism(2)),
        ],
    )
    def test_squared_labels_are_as_many_gpus_as_tp(
        self, make_csv, name, system, version, day, expected
    ):
        target = MEASURED_MODELS[name]
        path = make_csv(
            (system, 2, 1024, 1024, 256, 50.0, 5.0),
            silicon_data_source=f"silicon_concurrency=256; measured={day}",
            model_path=target.model_path, precision=target.precision, backend_version=version,
            attention_dp_size=2, moe_tp_size=1, moe_ep_size=4,
        )  # fmt: skip
        assert self.read(path, name) == [(expected, Workers())]

    @pytest.mark.parametrize(
        ("system", "version", "spread"),
        [("h200_sxm", "0.18.0", True), ("b200_sxm", "0.17.0", True), ("b200_sxm", "0.19.0", False)],
    )
    def test_scripts_that_always_spread_experts(self, make_csv, system, version, spread):
        path = make_csv(
            (system, 4, 1024, 1024, 8, 50.0, 5.0), model_path="MiniMaxAI/MiniMax-M2.5",
            precision="fp8", backend_version=version,
        )  # fmt: skip
        assert self.read(path, "minimax-m2.5") == [(Parallelism(4, spread), Workers())]

    def test_wide_workers_on_gb200_have_data_parallel_attention(self, make_csv):
        labels = {
            "prefill_tp_size": 4, "prefill_moe_ep_size": 4, "decode_tp_size": 16,
            "decode_moe_ep_size": 16, "model_path": "moonshotai/Kimi-K2.5",
        }  # fmt: skip
        row = ("gb200", "", 1024, 1024, 256, 50.0, 5.0)
        wide = self.read(make_csv(row, **pools(**labels)), "kimi-k2.5-nvfp4")
        assert wide == [(Parallelism(1, True, 16), Workers(1, 1, True, 4))]
        labels |= {"decode_tp_size": 4, "decode_moe_ep_size": 4}
        narrow = self.read(make_csv(row, **pools(**labels)), "kimi-k2.5-nvfp4")
        assert narrow == [(Parallelism(4, True), Workers(1, 1, True, 4))]


def test_nvfp4_experts_take_half_a_byte_and_a_scale_for_16(tmp_path):
    """NVIDIA's checkpoints: 4-bit weights, one FP8 scale a group; attention stays bfloat16."""
    pytest.importorskip("aiconfigurator_core", reason="needs eldr-sim[aiconfigurator]")
    model = MEASURED_MODELS["kimi-k2.5-nvfp4"].dims()
    assert (model.name, model.expert_dtype, model.linear_dtype) == (
        "Kimi-K2.5-NVFP4", "nvfp4", "bfloat16",
    )  # fmt: skip
    weights = 3 * 7168 * 2048
    assert model.bytes_per_expert == weights * 9 // 16
    folder = silicon.case_tables(
        tmp_path,
        [Case("GB200", 1, 1024, 1024, 4, True, 16, 1, Workers(1, 1, True, 4))],
        "newest",
        MEASURED_MODELS["kimi-k2.5-nvfp4"],
    )
    from eldr_sim.kernel_profiles.tables.format import load_table

    found = [load_table(path).metadata for path in folder.iterdir()]
    (moe,) = [m for m in found if m.kind == "moe"]  # ranks are read from a GPU with all experts
    assert (moe.shape, moe.dtype) == (moe_shape(7168, 2048, 384, 8), "nvfp4")


def predicted(c, tpot, guess, excluded="", gpu="H200"):
    row = {"gpu": gpu, "tensor_parallel_size": 1, "input_len": 1024, "output_len": 1024}
    row |= {"concurrency": c, "date": "2026-01-01", "excluded": excluded}
    row |= {"expert_parallel": False, "data_parallel_size": 1}
    row |= {"decode_workers": 1, "prefill_workers": 0, "kind": "experts cut"}
    row |= {"measured_ms": tpot, "predicted_ms": guess, "error": 100 * (guess / tpot - 1)}
    return [row | {"metric": metric} for metric in ("tpot", "ttft")]


def test_errors_by_hand():
    rows = [*predicted(4, 10.0, 11.0), *predicted(8, 10.0, 7.0)]
    table = pa.Table.from_pylist([*rows, *predicted(16, 10.0, 30.0, "doubtful")])
    tpot, ttft = errors_of(table)
    assert (tpot.metric, ttft.metric) == ("tpot", "ttft")
    assert (tpot.rows, tpot.all_rows) == (2, 3)
    assert tpot.median == pytest.approx(20.0)
    assert tpot.p90 == pytest.approx(28.0)
    assert tpot.bias == tpot.middle == pytest.approx(-10.0)
    assert tpot.all_median == pytest.approx(30.0)
    by_gpu = errors_of(table, (("gpu",),))
    assert [e.group for e in by_gpu] == ["gpu H200", "gpu H200"]
    assert worst_rows(table, 2)["concurrency"].to_pylist() == [8, 4]
    assert worst_rows(table, 1)["why"].to_pylist() == [""]


def test_growth_compares_with_the_lowest_concurrency():
    table = pa.Table.from_pylist([*predicted(4, 10.0, 20.0), *predicted(8, 20.0, 44.0)])
    assert growth_error(table, "tpot") == pytest.approx(10.0)  # 2.2 x for 2.0 x


@pytest.mark.parametrize(
    ("size", "padded_sides"), [(1, (3072, 2944)), (2, (3072, 1536)), (4, (3072, 768))]
)
def test_marlin_pads_as_vllm_does(size, padded_sides):
    """+9.0% of weights on one GPU, +13.8% on more."""
    from eldr_sim.kernel_profiles.sources.marlin import padded

    assert padded(2880, 2880 // size) == padded_sides
    more = np.prod(padded_sides) * size / 2880**2
    assert more == pytest.approx(1.090 if size == 1 else 1.138, abs=5e-4)
    assert padded(3584, 3072 // size) == (3584, 3072 // size)  # the source's layer


@on_each(
    "version, backend, mode",
    [
        ("", "vllm", "microbatch_parallel"),  # of 2025: vLLM 0.11
        ("0.11.2", "vllm", "microbatch_parallel"),
        ("0.15.1", "vllm", "microbatch_sequential"),
        ("0.18.0", "vllm", "microbatch_sequential"),
        ("nightly-5b8c30d62b754b57", "vllm", "microbatch_sequential"),  # of April 2026
        ("0.27.1", "vllm", "thread_pool"),
        ("0.5.9", "sglang", "thread_pool"),
        ("0.12.0", "dynamo", "thread_pool"),
    ],
)
def test_a_version_tokenises_in_its_own_way(version, backend, mode):
    assert silicon.tokenizer_mode(version, backend) == mode


@pytest.mark.long
def test_forms_change_what_they_say(monkeypatch):
    """A front end delays first tokens, a slower CPU more; uneven routing reads fewer experts."""
    monkeypatch.setattr(silicon_rows, "REQUESTS", 4)
    bare = silicon.Form(routing="uniform", frontend=None)

    def predicted(**changes):
        form = replace(bare, **changes)
        table = predict_rows([make_row(24)], moe_kernel="newest", form=form)
        return table["predicted_ms"].to_pylist()[::-1]

    ttft, tpot = predicted()
    fronted = predicted(frontend="xeon-emerald-rapids")
    slower = predicted(frontend="xeon-emerald-rapids", cpu_slowdown=1.3)
    assert ttft + 2.0 < fronted[0] < slower[0]  # 2 ms are the batch's wait alone
    assert fronted[1] == pytest.approx(tpot, rel=0.05)
    assert predicted(routing="drawn")[1] < 0.98 * tpot
    assert predicted(norms=False)[1] < tpot


class TestMarlin:
    @pytest.fixture(autouse=True)
    def _package(self):
        pytest.importorskip("aiconfigurator_core", reason="needs eldr-sim[aiconfigurator]")

    @pytest.mark.parametrize(
        ("size", "padding", "weights"),
        [(1, False, 2880 * 2880), (1, True, 3072 * 2944), (8, True, 3072 * 8 * 384)],
    )
    def test_carries_the_source_rows_over_at_equal_rows_per_expert(self, size, padding, weights):
        """At 128 and 224 tokens an expert gets 4 rows in both layers; weights as vLLM pads them."""

        from eldr_sim.kernel_profiles.sources.marlin import derive_marlin_table
        from eldr_sim.kernel_profiles.sources.packages import sources

        model = load_model("GPT-OSS-120B")
        table = derive_marlin_table("H200", model, Parallelism(size), padding=padding)
        even = table.columns["routing"] == "balanced"
        time = dict(
            zip(table.columns["batch"][even], table.columns["latency_s"][even], strict=True)
        )
        files = sources("H200", "moe", "vllm", "moe_perf.parquet")
        frame = next(file for file in files if file.version == "0.24.0").rows
        frame = frame[
            frame.kernel_source.str.contains("marlin")
            & (frame.moe_dtype == "w4a16_mxfp4")
            & (frame.moe_tp_size == size)
            & (frame.moe_ep_size == 1)
            & (frame.distribution == "balanced")
        ]
        source = frame.groupby("num_tokens").latency.median() / 1e3
        scale = 128 * weights / (896 * 3584 * 3072)
        grown = np.interp(1.75 * 8192, source.index, source) - np.interp(
            1.75 * 128, source.index, source
        )
        assert time[8192] - time[128] == pytest.approx(scale * grown, rel=1e-9)

    def test_reads_weights_as_fast_as_the_later_kernel_but_computes_slower(self):
        from eldr_sim.kernel_profiles.sources.marlin import derive_marlin_table

        model = load_model("GPT-OSS-120B")
        marlin = derive_marlin_table("H200", model)
        later = find_table("moe", "H200", shape=moe_shape(2880, 2880, 128, 4), dtype="w4a16_mxfp4")

        def time(table, tokens):
            rows = (table.columns["batch"] == tokens) & (table.columns["routing"] == "balanced")
            return float(table.columns["latency_s"][rows][0])

        assert time(marlin, 64) == pytest.approx(time(later, 64), rel=0.2)
        assert time(marlin, 8192) > 2 * time(later, 8192)
        assert marlin.metadata.provenance == "derived"

    def test_what_has_no_rows_is_refused(self):
        from eldr_sim.kernel_profiles.sources.marlin import derive_marlin_table

        with pytest.raises(InputError, match="mxfp4"):
            derive_marlin_table("H200", load_model("Qwen3-30B-A3B"))
        with pytest.raises(InputError, match="Marlin"):
            derive_marlin_table("B200", load_model("GPT-OSS-120B"))
