"""GPUs: lookup, and the memory that is left for KV blocks."""

import json
import re

import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import GPU, list_gpus, load_gpu
from eldr_sim.kernel_profiles.models import load_model

from ..on_each import on_each
from ..paths import ROOT


def test_the_gpus_of_the_shipped_tables_exist():
    assert {"H100", "H200", "A100", "B200", "MI300X"} <= set(list_gpus())


@on_each("name", list_gpus())
def test_every_gpu_is_complete_and_sourced(name):
    gpu = load_gpu(name)
    sources = gpu.source, gpu.engine_reserved_source, gpu.defaults_source
    assert all(source and "names no source" not in source for source in sources)
    # No GPU of the list reads its memory in less than 10 ms or more than 100 ms.
    assert 0.01 < gpu.memory_bytes / gpu.memory_bandwidth < 0.1
    # Nor has one a ridge point outside of 30 (H20) to 600 bf16 FLOPs a byte.
    assert 30 < gpu.bf16_flops / gpu.memory_bandwidth < 600
    # Copies from the host cross PCIe 4 or 5 x16, at less than its line rate.
    assert gpu.host_bandwidth < 64e9
    assert (gpu.host_bandwidth > 0) == bool(gpu.host_bandwidth_source)
    assert gpu.fp8_flops == 0 or 1.9 < gpu.fp8_flops / gpu.bf16_flops < 2.1


def test_names_are_forgiving():
    h100 = load_gpu("H100")
    assert load_gpu("h100_sxm") is load_gpu("nvidia h100 80gb hbm3") is h100


def test_vllm_gives_a100_the_smaller_defaults():
    assert (load_gpu("A100").max_num_seqs, load_gpu("A100").max_num_batched_tokens) == (256, 2048)
    assert (load_gpu("H100").max_num_seqs, load_gpu("H100").max_num_batched_tokens) == (1024, 8192)


def test_kv_cache_is_the_budget_less_weights_and_engine():
    gpu, weights = load_gpu("H100"), load_model("Qwen3-30B-A3B").weight_bytes
    expected = int(0.9 * gpu.memory_bytes) - weights - gpu.engine_reserved_bytes
    assert gpu.kv_cache_bytes(weights) == expected
    assert 100_000 < expected / load_model("Qwen3-30B-A3B").kv_bytes_per_token < 150_000


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="weights need 470"):
        load_gpu("H200").kv_cache_bytes(load_model("Qwen3-235B-A22B").weight_bytes)


@pytest.mark.parametrize("utilization", [0.0, -0.1, 1.01, float("nan")])
def test_utilization_out_of_range_is_refused(utilization):
    with pytest.raises(InputError, match="0 < x <= 1"):
        load_gpu("H200").kv_cache_bytes(0, utilization)


def test_unknown_gpus_are_refused_with_the_names_that_exist():
    with pytest.raises(InputError, match="MI300X"):
        load_gpu("H900")


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_num_batched_tokens", 2**63), ("max_num_seqs", 2**31), ("bf16_flops", "inf")],
)
def test_figures_that_no_gpu_has_are_refused(tmp_path, field, value):
    document = json.loads(load_gpu("H100").model_dump_json())
    (tmp_path / "gpu.json").write_text(json.dumps(document | {field: value}))
    with pytest.raises(InputError, match=field):
        load_gpu(str(tmp_path / "gpu.json"))


def test_a_printed_gpu_is_one_to_edit(run_cli, tmp_path):
    """It loads as it is, and without sources; the docs name every field."""
    code, printed, _ = run_cli("gpus", "show", "h100", "--json")
    assert code == 0
    (tmp_path / "mine.json").write_text(printed)
    assert load_gpu(tmp_path / "mine.json") == load_gpu("H100")
    fields = {k: v for k, v in json.loads(printed).items() if not k.endswith("source")}
    (tmp_path / "mine.json").write_text(json.dumps(fields | {"name": "H20"}))
    assert "names no source" in load_gpu(tmp_path / "mine.json").source
    page = (ROOT / "docs" / "formats.md").read_text()
    section = page.partition("## GPU: `gpu.json`")[2].partition("\n## ")[0]
    assert set(GPU.model_fields) <= set(re.findall(r"`(\w+)`", section))


def test_a_gpu_is_shown_in_units_that_are_read(run_cli, tmp_path):
    """Every field that is known, of a file too; an unknown name says which there are."""
    code, printed, _ = run_cli("gpus", "show", "MI300X")
    gpu = load_gpu("MI300X")
    assert code == 0
    assert printed.startswith("MI300X\n")
    assert f"{gpu.memory_bandwidth:,.0f}" in printed
    assert "sibling" not in printed
    (tmp_path / "mine.json").write_text(gpu.model_copy(update={"name": "H20"}).model_dump_json())
    assert run_cli("gpus", "show", tmp_path / "mine.json")[1].startswith("H20\n")
    code, _, error = run_cli("gpus", "show", "H900")
    assert (code, "MI300X" in error) == (2, True)


def test_the_help_says_that_a_file_is_taken(run_cli):
    code, printed, _ = run_cli("run", "--help")
    assert code == 0
    assert "--gpu NAME|PATH" in printed
    code, _, error = run_cli("run", "--gpu", "mine.json", "--num-requests", "1")
    assert (code, "or the path of a gpu.json" in error) == (2, True)


@on_each(
    "written, name",
    [
        ("H100-SXM5-80GB", "H100"),
        ("NVIDIA-H100-80GB-HBM3", "H100"),
        ("nvidia-h100-80gb", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("nvidia-tesla-a100", "A100-40GB"),  # GKE's name, beside nvidia-a100-80gb
        ("nvidia-h100-mega-80gb", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("A100 80GB PCIe", "A100-PCIe"),
        ("H20 141GB", "H20-141GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx-3090", "RTX 3090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("GB200 NVL72", "GB200"),
        ("AMD Instinct MI325X", "MI325X"),
        ("p5.48xlarge", "H100"),
        ("p4d.24xlarge", "A100-40GB"),
        ("a3-ultragpu-8g", "H200"),
        ("Standard_ND96isr_MI300X_v5", "MI300X"),
    ],
)
def test_gpus_are_found_as_drivers_vendors_and_clouds_write_them(written, name):
    assert load_gpu(written).name == name


@on_each("written, near", [("8xH100", "H100"), ("MI350X", "MI355X"), ("RTX 4091", "RTX 4090")])
def test_an_unknown_gpu_suggests_the_nearest(written, near):
    with pytest.raises(InputError, match=rf"did you mean .*{near}"):
        load_gpu(written)


@pytest.mark.parametrize("written", ["H100 64GB", "H200X", "A100 PCIe 20GB", "NVIDIA", ""])
def test_other_gpus_are_not_taken_for_known_ones(written):
    with pytest.raises(InputError, match=r"gpu.json"):
        load_gpu(written)
