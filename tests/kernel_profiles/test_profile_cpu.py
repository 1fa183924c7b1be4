"""A profile of this machine's CPU, end to end, and the kernels it times. Needs torch."""

import functools
import json

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.profile import attention, device, moe, timing
from eldr_sim.kernel_profiles.profile import measurement_plan as plan
from eldr_sim.kernel_profiles.profile.dense import Elementwise
from eldr_sim.kernel_profiles.profile.device import open_device
from eldr_sim.kernel_profiles.profile.grid import MoEPoint, moe_levels
from eldr_sim.kernel_profiles.profile.host_gap import measure_host_gap
from eldr_sim.kernel_profiles.profile.links import measure_collectives, measure_transfers
from eldr_sim.kernel_profiles.profile.measurement_plan import Target
from eldr_sim.kernel_profiles.profile.moe import MoEBench, TorchMoE
from eldr_sim.kernel_profiles.profile.timing import CpuTimer
from eldr_sim.kernel_profiles.profile.weights import ExpertWeights, MoEShape
from eldr_sim.kernel_profiles.tables.format import load_table

torch = pytest.importorskip("torch", reason="the profile extra is not installed")

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


@pytest.fixture
def model_path(tmp_path):
    folder = tmp_path / "tiny-moe"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def few_levels(*layer):
    """The points of a few batches."""
    return [[p for p in level if p.batch in (1, 4, 16, 64)] for level in moe_levels(*layer)]


@pytest.fixture
def hasty(monkeypatch):
    """A timer that takes two samples: these tests check what is done, not how long it takes."""
    timer = functools.partial(CpuTimer, target_s=0.0, min_repeats=2)
    monkeypatch.setattr(device, "CpuTimer", timer)
    monkeypatch.setattr(timing, "MAX_CALLS", 3)
    monkeypatch.setattr(plan, "moe_levels", few_levels)
    return open_device("cpu")


def test_a_cpu_profile_drives_a_run_of_the_same_model(hasty, model_path, tmp_path, run_cli):
    out = tmp_path / "profile"
    arguments = ["profile", "--device", "cpu", "--model", model_path, "--out", out]
    parts = "moe,attention,gemm,elementwise,collectives,moe-vllm"
    code, text, err = run_cli(*arguments, "--only", parts, "--budget", "1s")
    assert code == 0, err
    code, text, err = run_cli(*arguments, "--only", parts, "--budget", "5m", "--resume")
    assert code == 0, err
    assert "held-out error linear" in text
    assert "collectives: need several GPUs, and this is the CPU" in text
    summary = json.loads((out / "profile.json").read_text())
    done = {name: entry for name, entry in summary["coverage"].items() if "moe-vllm" not in name}
    assert all(e["done"] == e["planned"] for n, e in done.items() if n != "collectives")
    tables = {load_table(path).metadata.kind for path in out.glob("*.parquet")}
    wanted = {"moe", "attention_decode", "attention_prefill", "gemm", "elementwise"}
    assert wanted <= tables
    assert list((out / "warm_cache").glob("*.parquet"))
    entry = json.loads((out / "gpu.json").read_text())
    table = load_table(next(out.glob("*_moe_*.parquet")))
    assert table.metadata.gpu == entry["name"]
    assert table.metadata.fit_error["held_out_mean"] > 0
    columns = table.columns
    assert (columns["latency_q1_s"] <= columns["latency_s"]).all()
    assert (columns["latency_s"] <= columns["latency_q3_s"]).all()

    code, text, err = run_cli(
        "run", "--model", model_path, "--gpu", out / "gpu.json", "--tables", out,
        "--topology", "1P1D", "--num-requests", "3", "--output-len", "4", "--request-rate", "1",
        "--out", tmp_path / "result",
    )  # fmt: skip
    assert code == 0, err
    result = json.loads((tmp_path / "result" / "summary.json").read_text())
    assert result["gpu"] == entry["name"]
    assert result["completed"] == 3
    sources = {name: part["label"] for name, part in result["provenance"].items()}
    for part in ("moe", "attention", "gemm", "norms"):
        assert sources[part] == "measured"


@pytest.mark.parametrize(
    ("shape", "batch", "distinct"),
    [
        (MoEShape(64, 48, 12, 3), 1, 3),
        (MoEShape(64, 48, 12, 3), 40, 12),
        (MoEShape(100, 72, 7, 2), 9, 4),
        (MoEShape(64, 48, 12, 3, 2), 17, 5),
        (MoEShape(64, 48, 1, 1), 3, 1),
    ],
)
def test_torch_layers_agree_with_float64(shape, batch, distinct):
    here = open_device("cpu")
    bench = MoEBench(shape, here, TorchMoE(shape, here))
    assert bench.error(MoEPoint(batch, distinct)) < moe.ERROR_BOUND["bfloat16"]


def test_a_wrong_kernel_makes_no_table(monkeypatch):
    shape = MoEShape(64, 48, 12, 3)
    here = open_device("cpu")
    bench = MoEBench(shape, here, TorchMoE(shape, here))
    whole = moe.TorchLayer.__call__
    monkeypatch.setattr(moe.TorchLayer, "__call__", lambda *args: whole(*args) * 1.02)
    with pytest.raises(InputError, match=r"errs by 0\.02"):
        bench.error(MoEPoint(4, 8))


def test_rounds_rotate_through_experts():
    """Within a round no expert is used again before all others of the layer were."""
    shape = MoEShape(64, 48, 16, 2)
    here = open_device("cpu")
    bench = MoEBench(shape, here, TorchMoE(shape, here))
    seen = []
    bench.kernel.layer = lambda batch: (
        lambda x, logits, weights: seen.append(
            frozenset(logits.topk(2, dim=1).indices.unique().tolist())
        )
    )
    bench.weights = bench.weights[:1]
    (calls,) = bench.rounds(MoEPoint(2, 4), seeds=1)
    for call in calls[:4]:
        call()
    assert frozenset.union(*seen) == set(range(16))
    (calls,) = bench.rounds(MoEPoint(2, 4), seeds=1, rotate=False)
    assert len(set(map(id, calls))) == 1


@pytest.mark.parametrize(("tokens", "window"), [(37, 8), (16, 8), (9, 8)])
def test_sliding_prefill_is_attention_under_its_mask(tokens, window):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, tokens, 4, 16, generator=generator)
    key, value = (torch.randn(2, tokens, 2, 16, generator=generator) for _ in range(2))
    near = torch.arange(tokens)
    mask = (near[None] <= near[:, None]) & (near[None] > near[:, None] - window)
    wide = [t.repeat_interleave(2, dim=2).transpose(1, 2) for t in (key, value)]
    expected = attention.attend(query.transpose(1, 2), *wide, mask).transpose(1, 2)
    torch.testing.assert_close(attention.sliding_prefill(query, key, value, window), expected)


def test_decode_attention_reads_no_more_than_the_window():
    shape = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "window": 32}
    assert attention.kv_bytes(shape, 3, 100) == 4 * 3 * 32 * 2 * 16
    assert attention.kv_bytes({**shape, "window": 0}, 3, 100) == 4 * 3 * 100 * 2 * 16


def test_rotary_keeps_lengths_and_stores_keys_and_values(model_path):
    part = Elementwise(load_model(model_path), 5, open_device("cpu"))
    angle = torch.rand(4096, 8)
    part.cos, part.sin = angle.cos(), angle.sin()
    part.head_weight.fill_(1.0)
    turned = part.rotate()
    torch.testing.assert_close(
        turned.float().pow(2).mean(-1), torch.ones(5, 6), rtol=0.02, atol=0.02
    )
    torch.testing.assert_close(part.cache[:, :2], turned[:, 4:])
    torch.testing.assert_close(part.cache[:, 2:], part.qkv[:, 6:])


def test_the_host_gap_is_told_for_the_models_depth(hasty, model_path):
    model = load_model(model_path)
    shape = Target(model).moe
    gaps = measure_host_gap(model, shape, hasty, TorchMoE(shape, hasty))
    for gap in gaps.values():
        assert gap.n_layers == 10
        assert sorted(gap.steps_s) == [2, 8]
        measured = {depth: gap.steps_s[depth] - gap.parts_s[depth] for depth in (2, 8)}
        at_ten = measured[8] + (measured[8] - measured[2]) / 6 * 2  # on the line through both
        assert gap.gap_s == pytest.approx(at_ten)
        assert gap.timing.median_s > 0


def test_quantised_experts_are_not_measured_in_torch():
    here = open_device("cpu")
    with pytest.raises(InputError, match="mxfp4"):
        TorchMoE(MoEShape(64, 64, 4, 2, 1, "mxfp4"), here)
    with pytest.raises(InputError, match="cuda, cpu"):
        open_device("tpu")
    with pytest.raises(InputError, match="threads"):
        open_device("cpu", 0)


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 16), ("fp8_block", 8), ("mxfp4", 4.25)])
def test_expert_bytes_are_those_of_the_storage(dtype, bits):
    shape = MoEShape(256, 128, 2, 1, 1, dtype)
    weights = ExpertWeights.random(shape, "cpu", 0)
    stored = sum(
        tensor[0].numel() * tensor.element_size()
        for matrices in (weights.up, weights.down)
        for tensor in {id(t): t for t in (matrices.stored, matrices.scales)}.values()
    )
    assert shape.expert_bytes == stored == pytest.approx(3 * 256 * 128 * bits / 8, rel=0.01)
    for matrices in (weights.up, weights.down):
        matrix = matrices.dequantized(1)
        assert torch.isfinite(matrix).all()
        assert 0.2 < float(matrix.std()) * np.sqrt(matrices.k) < 3


def test_nixl_moves_bytes_between_two_agents():
    pytest.importorskip("nixl", reason="nixl is not installed")
    grid = [(4096, 1), (1 << 20, 16)]
    times, first_contact = measure_transfers("cpu", grid, repeats=3)
    assert list(times) == grid
    assert all(0 < timing.median_s < 5 for timing in times.values())
    assert first_contact > 0


@pytest.mark.slow
def test_collectives_between_two_processes():
    times = measure_collectives("gloo", 2, (4096, 1 << 20), ("all_reduce", "all_gather"))
    assert set(times) == {(o, s) for o in ("all_reduce", "all_gather") for s in (4096, 1 << 20)}
    assert times["all_reduce", 1 << 20].median_s > 0
