"""The aiconfigurator importer: against a package made up here, and against the real one."""

import importlib
import sys

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from eldr_sim.cli.main import cli
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.sources import aiconfigurator
from eldr_sim.kernel_profiles.sources.aiconfigurator import balanced_distinct, expected_distinct
from eldr_sim.kernel_profiles.sources.aiconfigurator_import import import_tables
from eldr_sim.kernel_profiles.tables.format import load_table, mla_shape, moe_shape
from eldr_sim.kernel_profiles.tables.library import shipped_tables, version_numbers

from ..on_each import on_each

TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def _moe_rows(version, source, scale=1.0, **changes):
    row = {
        "framework": "VLLM",
        "version": version,
        "device": "NVIDIA Test",
        "op_name": "moe",
        "kernel_source": source,
        "moe_dtype": "bfloat16",
        "hidden_size": 2048,
        "inter_size": 768,
        "topk": 8,
        "num_experts": 128,
        "moe_tp_size": 1,
        "moe_ep_size": 1,
    }
    return [
        row
        | {"distribution": distribution, "num_tokens": t, "latency": scale * (1.0 + t / 1e3)}
        | changes
        for distribution in ("balanced", "power_law_1.2")
        for t in TOKENS
    ]


def _attention_rows(axis):
    base = {
        "device": "NVIDIA Test",
        "kernel_source": "fa",
        "num_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    return [
        base
        | {"kv_cache_dtype": dtype, "window_size": window, "batch_size": b, axis: t}
        | {"latency": 0.01 + b * t * 1e-6 + (dtype == "fp8") + window}
        for dtype in ("bfloat16", "fp8")
        for window in (0, 128)
        for b in (1, 8)
        for t in (1, 255)
    ]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of the same layout with numbers that are easy to recognise."""
    root = tmp_path / "site" / "aiconfigurator_core"
    info = tmp_path / "site" / "aiconfigurator_core-9.9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: aiconfigurator-core\nVersion: 9.9.9\n"
    )
    root.mkdir()
    (root / "__init__.py").write_text("")

    def write(path, rows):
        file = root / "systems" / "data" / "h100_sxm" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(rows).to_parquet(file)

    write(
        "moe/vllm/0.24.0/moe_perf.parquet",
        _moe_rows("0.24.0", "new")
        + _moe_rows("0.24.0", "new", scale=3.0)  # repeated points: the median counts
        + _moe_rows("0.24.0", "new", moe_ep_size=2, scale=99.0)
        + _moe_rows("0.24.0", "new", moe_tp_size=2, scale=55.0)
        + [
            row
            for row in _moe_rows("0.24.0", "new", moe_ep_size=4)
            if row["distribution"] != "balanced"
        ]
        + _moe_rows("0.24.0", "new", moe_dtype="fp8", scale=99.0)
        + _moe_rows("0.24.0", "new", hidden_size=4096, scale=99.0),
    )
    write(
        "moe/vllm/0.9.0/moe_perf.parquet",
        _moe_rows("0.9.0", "old", scale=5.0) + _moe_rows("0.9.0", "new", scale=7.0),
    )
    write("attention/vllm/0.24.0/generation_attention_perf.parquet", _attention_rows("step"))
    write("attention/vllm/0.24.0/context_attention_perf.parquet", _attention_rows("isl"))
    gemm = {"device": "NVIDIA Test", "kernel_source": "linear", "gemm_dtype": "bfloat16"}
    write(
        "gemm/vllm/0.24.0/gemm_perf.parquet",
        [
            gemm | {"m": m, "n": n, "k": k, "latency": m * n * k * 1e-9}
            for m in (1, 3, 64)  # 3 is not among the rows that are kept
            for n in (32, 64)
            for k in (32, 64)
        ],
    )
    nccl = {"nccl_dtype": "half", "kernel_source": "NCCL", "op_name": "all_reduce", "num_gpus": 8}
    write(
        "comm/nccl/2.9.0/nccl_perf.parquet",
        [nccl | {"device": "x", "message_size": s, "latency": 0.02} for s in (256, 512)],
    )
    monkeypatch.setattr(aiconfigurator, "_SLOWEST", 1000.0)  # the numbers are round ones
    monkeypatch.syspath_prepend(str(root.parent))
    for name in [name for name in sys.modules if name.split(".")[0] == "aiconfigurator_core"]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    yield root
    sys.modules.pop("aiconfigurator_core", None)


def test_a_kernel_that_was_timed_untuned_is_left_out(package, tmp_path, monkeypatch):
    """Reading all 128 experts of Qwen3-30B-A3B takes 0.36 ms."""
    monkeypatch.setattr(aiconfigurator, "_SLOWEST", 4.7)
    file = package / "systems" / "data" / "h100_sxm" / "moe" / "vllm" / "0.23.0"
    file.mkdir()
    rows = [
        row | {"latency": each_ms * min(128, 8 * row["num_tokens"])}
        for kernel, each_ms in (("tuned", 0.004), ("untuned", 0.02))
        for row in _moe_rows("0.23.0", kernel)
    ]
    pd.DataFrame(rows).to_parquet(file / "moe_perf.parquet")
    paths = import_tables("H100", load_model("Qwen3-30B-A3B"), tmp_path / "out")
    kernels = {load_table(path).metadata.kernel_source for path in paths}
    assert "tuned" in kernels
    assert "untuned" not in kernels


def test_latent_experts_take_rows_of_their_own_width(package, tmp_path):
    """Rows of the model's width would read experts that are several times as large."""
    model = load_model("Qwen3-30B-A3B")
    latent = model.model_copy(update={"hidden_size": 8192, "expert_hidden_size": 2048})
    wide = latent.model_copy(update={"hidden_size": 2048, "expert_hidden_size": 512})
    own = import_tables("H100", latent, tmp_path / "own")
    (table,) = (t for p in own if (t := load_table(p)).metadata.framework == "vllm 0.24.0"
                and t.metadata.kind == "moe")  # fmt: skip
    assert table.metadata.shape["hidden_size"] == 2048
    assert table.columns["latency_s"].max() < 99e-3  # those of 4,096 take as long
    others = import_tables("H100", wide, tmp_path / "others")
    assert not [p for p in others if load_table(p).metadata.kind == "moe"]


def test_moe_rows_become_batches_and_distinct_experts(package, tmp_path):
    paths = import_tables("H100", load_model("Qwen3-30B-A3B"), tmp_path / "out")
    tables = {path.name: load_table(path) for path in paths}
    moe = {t.metadata.framework: t for t in tables.values() if t.metadata.kind == "moe"}
    # "old" is a kernel of its own and kept; 0.9.0's rows of "new" are superseded.
    assert {f: t.metadata.kernel_source for f, t in moe.items()} == {
        "vllm 0.24.0": "new",
        "vllm 0.9.0": "old",
    }
    table = moe["vllm 0.24.0"]
    balanced = table.columns["routing"] == "balanced"
    np.testing.assert_array_equal(table.columns["batch"][balanced], TOKENS)
    np.testing.assert_array_equal(
        table.columns["distinct_experts"][balanced], [min(128, 8 * t) for t in TOKENS]
    )
    expected = [2.0 * (1.0 + t / 1e3) * 1e-3 for t in TOKENS]  # median of 1x and 3x, ms to s
    np.testing.assert_allclose(table.columns["latency_s"][balanced], expected)
    assert table.metadata.provenance == "imported"
    assert table.metadata.origin.startswith("aiconfigurator-core 9.9.9: h100_sxm/moe/vllm/0.24.0")
    assert table.metadata.device == "NVIDIA Test"


@pytest.mark.parametrize(
    ("expert_parallel", "scale", "shape", "distinct"),
    [
        (True, 99.0, moe_shape(2048, 768, 128, 8, 2), [min(64, 4 * t) for t in TOKENS]),
        (False, 55.0, moe_shape(2048, 384, 128, 8), [min(128, 8 * t) for t in TOKENS]),
    ],
)
def test_rows_of_one_of_two_gpus(package, tmp_path, expert_parallel, scale, shape, distinct):
    spread = Parallelism(2, expert_parallel)
    (path,) = import_tables("H100", load_model("Qwen3-30B-A3B"), tmp_path / "out", spread)
    table = load_table(path)
    assert table.metadata.shape == shape
    balanced = table.columns["routing"] == "balanced"
    assert table.columns["distinct_experts"][balanced].tolist() == distinct
    expected = [scale * (1.0 + t / 1e3) * 1e-3 for t in TOKENS]
    np.testing.assert_allclose(table.columns["latency_s"][balanced], expected)


def test_ranks_of_drawn_routing_alone_are_left_out(package, tmp_path):
    model = load_model("Qwen3-30B-A3B")
    assert import_tables("H100", model, tmp_path / "out", Parallelism(4, True)) == []


_NEWEST = "vllm 0.24.0"


def _only_moe(package, rows):
    pd.DataFrame(rows).to_parquet(
        package / "systems/data/h100_sxm/moe/vllm/0.24.0/moe_perf.parquet", index=False
    )


def test_rows_from_the_cache_are_left_out(package, tmp_path):
    """8 experts of 9.4 MB in 20 us would be 3.8 TB/s: more than an H100's memory gives."""
    rows = _moe_rows("0.24.0", "new")
    for row in rows:
        row["latency"] = 0.02 if row["num_tokens"] == 1 else 1.0
    _only_moe(package, rows)
    tables = map(load_table, import_tables("H100", load_model("Qwen3-30B-A3B"), tmp_path))
    (table,) = [t for t in tables if (t.metadata.kind, t.metadata.framework) == ("moe", _NEWEST)]
    balanced = table.columns["routing"] == "balanced"
    assert table.columns["batch"][balanced].tolist() == TOKENS[1:]
    assert table.columns["batch"][~balanced].tolist() == TOKENS
    assert "power_law_mean" in table.metadata.fit_error


def test_balanced_rows_of_group_limited_gates_are_left_out(package, tmp_path):
    """All 128 experts (1.2 GB) in 0.2 ms would be 6 TB/s: half of them were read."""
    rows = _moe_rows("0.24.0", "new") + _moe_rows("0.24.0", "new", moe_ep_size=2)
    for row in rows:
        row["latency"] = 0.2 + row["num_tokens"] / 1e4
    _only_moe(package, rows)
    model = load_model("Qwen3-30B-A3B")
    tables = map(load_table, import_tables("H100", model, tmp_path))
    (table,) = [t for t in tables if (t.metadata.kind, t.metadata.framework) == ("moe", _NEWEST)]
    assert set(table.columns["routing"]) == {"power_law_1.2"}
    assert "expectations" in table.metadata.notes
    spread = import_tables("H100", model, tmp_path / "spread", Parallelism(2, True))
    assert [path.name for path in spread if "0.24.0" in path.name and "_moe_" in path.name] == []


def test_mla_modules_of_the_models_heads_and_projections(package, tmp_path):
    row = {"device": "NVIDIA Test", "kernel_source": "fa", "model": "deepseek-ai/DeepSeek-V3"}
    rows = [
        row
        | {"num_heads": heads, "gemm_type": gemm, "kv_cache_dtype": kv, "batch_size": b, "step": 3}
        | {"isl": 1, "latency": 0.1 * b + (heads != 32) + (gemm != "fp8_block") + (kv == "fp8")}
        for heads in (32, 128)
        for gemm in ("bfloat16", "fp8_block")
        for kv in ("bfloat16", "fp8")
        for b in (1, 2, 4)
    ]
    folder = package / "systems/data/h100_sxm/mla/vllm/0.24.0"
    folder.mkdir(parents=True)
    pd.DataFrame(rows).to_parquet(folder / "mla_generation_module_perf.parquet", index=False)
    written = import_tables("H100", load_model("DeepSeek-V3"), tmp_path, Parallelism(4))
    table, fp8 = map(load_table, written)
    assert table.metadata.shape == mla_shape(32, 7168, 1536, 512)
    assert fp8.metadata.shape == mla_shape(32, 7168, 1536, 512, "fp8")
    np.testing.assert_allclose(fp8.columns["latency_s"], table.columns["latency_s"] + 1e-3)
    assert table.metadata.dtype == "fp8_block"
    assert table.columns["context"].tolist() == [4, 4, 4]
    np.testing.assert_allclose(table.columns["latency_s"], [1e-4, 2e-4, 4e-4])
    assert table.metadata.fit_error["leave_one_out_max"] == pytest.approx(0, abs=1e-6)
    assert import_tables("H100", load_model("DeepSeek-V2-Lite"), tmp_path / "lite") == []


def test_dispatch_and_combine_of_both_sources(package, tmp_path):
    shape = {"device": "NVIDIA Test", "hidden_size": 7168, "num_experts": 256}
    bench = shape | {"kernel_source": "deepep", "num_topk": 8, "num_token": 16}
    low = [
        bench | {"node_num": n, "dispatch_avg_t_us": 10.0 * n, "combine_avg_t_us": 20.0 * n}
        for n in (1, 2)
    ]
    high = [
        bench
        | {"node_num": n, "dispatch_sms": sms, "combine_sms": sms}
        | {f"{phase}_transmit_us": 30.0 + sms for phase in ("dispatch", "combine")}
        | {f"{phase}_notify_us": 5.0 for phase in ("dispatch", "combine")}
        for n in (1, 8)
        for sms in (20, 24)
    ]
    calls = shape | {"kernel_source": "deepep", "topk": 8, "num_tokens": 16, "ep_size": 8}
    calls |= {"comm_backend": "deepep_ll", "node_num": 1}
    files = {
        "sglang/0.5.1/wideep_deepep_ll_perf.parquet": low,
        "sglang/0.5.1/wideep_deepep_normal_perf.parquet": high,
        "vllm/0.24.0/moe_a2a_perf.parquet": [
            calls | {"phase": phase, "latency": 50.0} for phase in ("dispatch", "combine")
        ],
    }
    for name, rows in files.items():
        path = package / "systems/data/h100_sxm/comm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(rows).to_parquet(path, index=False)
    tables = [load_table(path) for path in import_tables("H100", None, tmp_path)]
    found = {
        (t.metadata.framework, t.metadata.shape.get("n_nodes", 1)): {
            (str(b), str(p)): (int(n), float(us) * 1e6)
            for b, p, n, us in zip(
                *(t.columns[c] for c in ("backend", "phase", "n_gpus", "latency_s")), strict=True
            )
        }
        for t in tables
        if t.metadata.kind == "all_to_all"
    }
    assert set(found) == {("sglang 0.5.1", 1), ("sglang 0.5.1", 2), ("vllm 0.24.0", 1)}
    one = found["sglang 0.5.1", 1]
    assert one["deepep_ll", "combine"] == (8, pytest.approx(20, rel=1e-6))
    assert one["deepep_ht", "dispatch"] == (8, pytest.approx(55, rel=1e-6))  # 20 SMs, notified
    two = found["sglang 0.5.1", 2]
    assert two["deepep_ll", "dispatch"] == (16, pytest.approx(20, rel=1e-6))
    assert found["vllm 0.24.0", 1]["deepep_ll", "combine"] == (8, pytest.approx(50, rel=1e-6))


def test_attention_steps_become_contexts(package, tmp_path):
    paths = import_tables("H100", load_model("Qwen3-30B-A3B"), tmp_path)
    found = list(map(load_table, paths))
    tables = {t.metadata.kind: t for t in found if "kv_bits" not in t.metadata.shape}
    decode, prefill = tables["attention_decode"], tables["attention_prefill"]
    # A step of 255 cached tokens attends to 256: itself included. A prompt of 255 is just that.
    assert sorted(set(decode.columns["context"].tolist())) == [2, 256]
    assert sorted(set(prefill.columns["new_tokens"].tolist())) == [1, 255]
    # FP8 caches and windows, marked by large latencies, stay out.
    assert decode.columns["latency_s"].max() < 0.02e-3 + 1e-5
    shape = {"n_heads": 32, "n_kv_heads": 4, "head_dim": 128, "window": 0}
    assert decode.metadata.shape == shape
    fp8 = [t for t in found if t.metadata.shape == shape | {"kv_bits": 8}]
    assert fp8
    assert all(t.columns["latency_s"].min() > 0.9e-3 for t in fp8)


def test_gemms_and_collectives(package, tmp_path):
    tables = {t.metadata.kind: t for t in map(load_table, import_tables("H100", None, tmp_path))}
    gemm = tables["gemm"].columns
    assert len(gemm["m"]) == 8
    np.testing.assert_allclose(gemm["latency_s"], gemm["m"] * gemm["n"] * gemm["k"] * 1e-12, 1e-6)
    # message_size counts half-precision elements.
    assert tables["collective"].columns["message_bytes"].tolist() == [512, 1024]
    assert tables["collective"].columns["latency_s"].tolist() == [2e-5, 2e-5]


def test_fp8_models_bring_fp8_gemms(package, tmp_path):
    """Of SGLang: what the package has of vLLM times the launch."""
    model = load_model("Qwen3-30B-A3B").model_copy(update={"linear_dtype": "fp8_block"})
    kinds = [load_table(p).metadata.kind for p in import_tables("H100", model, tmp_path)]
    assert "gemm" not in kinds
    row = {"device": "NVIDIA Test", "kernel_source": "deepgemm", "gemm_dtype": "fp8_block"}
    file = package / "systems/data/h100_sxm/gemm/sglang/0.5.1/gemm_perf.parquet"
    file.parent.mkdir(parents=True)
    pd.DataFrame([row | {"m": 1, "n": 32, "k": 64, "latency": 0.004}]).to_parquet(file)
    tables = [load_table(path) for path in import_tables("H100", model, tmp_path)]
    (gemm,) = [table for table in tables if table.metadata.kind == "gemm"]
    assert (gemm.metadata.dtype, gemm.metadata.framework) == ("fp8_block", "sglang 0.5.1")
    assert gemm.columns["latency_s"].tolist() == pytest.approx([4e-6])


def test_models_without_rows_write_nothing(package, tmp_path):
    assert import_tables("H100", load_model("OLMoE-1B-7B"), tmp_path) == []
    assert list(tmp_path.glob("*.parquet")) == []


@pytest.fixture
def newer(package, tmp_path):
    """The package that goes on with the tables: newer versions, of some operations only. Its
    modules cannot be imported here."""
    root = tmp_path / "site" / "aisimulate_core"
    info = tmp_path / "site" / "aisimulate-0.13.0.dev1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: aisimulate\nVersion: 0.13.0.dev1\n"
    )
    root.mkdir()
    (root / "__init__.py").write_text("import no_such_runtime")

    def write(path, rows):
        file = root / "systems" / "data" / "h100_sxm" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(rows).to_parquet(file)

    write("moe/vllm/0.25.0/moe_perf.parquet", _moe_rows("0.25.0", "new", scale=11.0))
    write("moe/vllm/dev-1aa0e962/moe_perf.parquet", _moe_rows("dev", "new", scale=13.0))
    # A version that has other shapes alone, and one without the file.
    rows = [row | {"num_heads": 7} for row in _attention_rows("step")]
    write("attention/vllm/0.25.0/generation_attention_perf.parquet", rows)
    write("attention/vllm/0.31.0/other_perf.parquet", rows)
    return write


def _imported(folder, kind):
    tables = [load_table(path) for path in sorted(folder.glob(f"*_{kind}_*.parquet"))]
    assert tables
    return tables


def test_the_newer_package_comes_first_and_the_older_stays_readable(newer, tmp_path):
    """The newest version of each kernel; what a version lacks an older one has."""
    model = load_model("Qwen3-30B-A3B")
    import_tables("H100", model, tmp_path / "out")
    moe = [t for t in _imported(tmp_path / "out", "moe") if t.metadata.kernel_source == "new"]
    assert [t.metadata.framework for t in moe] == ["vllm 0.25.0"]
    assert moe[0].metadata.origin.startswith("aisimulate 0.13.0.dev1: h100_sxm/moe/vllm/0.25.0")
    decode = _imported(tmp_path / "out", "attention_decode")
    assert {t.metadata.framework for t in decode} == {"vllm 0.24.0"}
    assert all(t.metadata.origin.startswith("aiconfigurator-core 9.9.9") for t in decode)


def test_a_version_takes_rows_up_to_it(newer, tmp_path):
    model = load_model("Qwen3-30B-A3B")
    for version, newest in (("0.24", "0.24.0"), ("0.9", "0.9.0"), ("0.31", "0.25.0")):
        folder = tmp_path / version
        import_tables("H100", model, folder, version=version, parts="moe")
        found = {t.metadata.framework.split()[1] for t in _imported(folder, "moe")}
        assert max(found, key=version_numbers) == newest


def test_the_command_says_what_it_took_and_what_is_missing(newer, run_cli, tmp_path):
    code, printed, _ = run_cli(
        "tables", "import", "--gpu", "H100-SXM5-80GB", "--model", "Qwen3-30B-A3B", "--engine",
        "vllm==0.24", "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 0
    assert "vllm 0.24.0" in printed
    assert "vllm 0.25.0" not in printed
    assert "Still missing of Qwen3-30B-A3B on H100 under vllm: nothing" in printed
    code, _, error = run_cli(
        "tables", "import", "--gpu", "H100", "--engine", "x", "--out", tmp_path
    )
    assert (code, "vllm==0.24" in error) == (2, True)


def test_a_missing_package_is_named_with_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    with pytest.raises(InputError) as caught:
        import_tables("H100", None, tmp_path)
    assert "pip install 'eldr-sim[aiconfigurator]'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gpus_that_the_package_lacks_are_refused(tmp_path):
    with pytest.raises(InputError, match="MI300X"):
        import_tables("MI300X", None, tmp_path)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "low", "high"),
    [
        (1, 128, 8, 8, 8),  # one token picks top_k experts, whatever the skew
        (2, 128, 8, 15, 16),
        (1, 8, 8, 8, 8),
        (64, 128, 8, 100, 128),
        (4096, 128, 8, 126, 128),
    ],
)
def test_expected_distinct_experts_stay_in_their_bounds(tokens, experts, top_k, low, high):
    for alpha in (1.01, 1.2):
        assert low <= expected_distinct(tokens, experts, top_k, alpha) <= high


@on_each("experts, top_k", [(128, 8), (128, 4), (64, 8), (8, 2)])
@on_each("n_ranks", [1, 2, 4, 8])
@on_each("tokens", [1, 2, 3, 7, 16, 100])
def test_balanced_distinct_experts_of_rank_zero(tokens, experts, top_k, n_ranks):
    """The collector's rule, token by token."""
    stride = -(-experts // top_k)
    spacing = 1 if tokens >= stride else stride / tokens
    chosen = {int(t * spacing + i * stride) % experts for t in range(tokens) for i in range(top_k)}
    expected = sum(expert < experts // n_ranks for expert in chosen)
    assert balanced_distinct(tokens, experts, top_k, n_ranks) == expected


@pytest.mark.parametrize("tokens", [1, 16, 64, 512])
def test_the_busiest_rank_activates_its_share_at_least(tokens):
    for n_ranks in (2, 4):
        whole = expected_distinct(tokens, 128, 8, 1.2)
        busiest = expected_distinct(tokens, 128, 8, 1.2, n_ranks)
        assert whole / n_ranks - 1 <= busiest <= min(whole, 128 / n_ranks)


def test_expected_distinct_experts_are_the_same_every_time():
    assert expected_distinct(16, 128, 8, 1.2) == expected_distinct(16, 128, 8, 1.2)


@pytest.mark.parametrize("gpu", ["H100", "A100"])
def test_the_shipped_tables_are_what_the_real_package_gives(gpu, tmp_path):
    pytest.importorskip("aiconfigurator_core", reason="the optional package is not installed")
    shipped = {f"{one.name}.parquet": one.load() for one in shipped_tables()}
    written = import_tables(gpu, load_model("Qwen3-30B-A3B"), tmp_path)
    written += import_tables(gpu, None, tmp_path)
    assert len(written) == (13 if gpu == "H100" else 6)  # no DeepEP on A100
    for spread in (Parallelism(4), Parallelism(4, True)):
        written += import_tables(gpu, load_model("Qwen3-235B-A22B"), tmp_path, spread)
    for path in written:
        fresh, kept = load_table(path), shipped[path.name]
        assert fresh.metadata.model_copy(update={"date": kept.metadata.date}) == kept.metadata
        for name, values in kept.columns.items():
            np.testing.assert_array_equal(fresh.columns[name], values)


@pytest.mark.usefixtures("package")
def test_a_gpu_without_rows_takes_its_siblings(tmp_path):
    own, of_sibling = (
        CliRunner().invoke(cli, f"tables import --gpu {gpu} --out {tmp_path / gpu}".split())
        for gpu in ("H100", "H20")
    )
    assert own.exit_code == of_sibling.exit_code == 0, of_sibling.output
    assert "the sibling of H20" in of_sibling.output
    names = [sorted(path.name for path in (tmp_path / gpu).iterdir()) for gpu in ("H100", "H20")]
    assert names[0] == names[1]
