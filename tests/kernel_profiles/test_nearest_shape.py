"""MoE layers without a table, by the nearest measured shape; norms over the heads of all GPUs."""

import numpy as np
import pytest

from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels import nearest_shape
from eldr_sim.kernel_profiles.kernels.moe_latency import fit_moe_latency, uniform_distinct
from eldr_sim.kernel_profiles.kernels.small_kernels import small_kernel_s, unfused_gate_s
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.parts import Parts
from eldr_sim.kernel_profiles.tables.library import Engine, shipped_tables

_TOKENS = np.array([1.0, 4.0, 16.0, 64.0, 256.0, 2048.0])


@pytest.mark.parametrize(("gpu", "dtype"), [("H200", "bfloat16"), ("B200", "bfloat16"),
                                            ("H100", "fp8_block")])  # fmt: skip
def test_a_shape_left_out_is_met_by_the_nearest(gpu, dtype, monkeypatch):
    tables = [
        t for t in shipped_tables()
        if (t.kind, t.gpu) == ("moe", gpu) and t.metadata.dtype == dtype
        and t.metadata.framework.startswith("vllm") and "trtllm" not in t.metadata.kernel_source
        and "expert_parallel_size" not in t.metadata.shape
    ]  # fmt: skip
    errors = []
    for table in tables[:: max(1, len(tables) // 8)]:
        shape = table.metadata.shape
        others = tuple(t for t in shipped_tables() if t.shape != table.shape)
        monkeypatch.setattr(nearest_shape, "shipped_tables", lambda others=others: others)
        found = nearest_shape.nearest_moe(gpu, shape, dtype, Engine())
        if found is None:
            continue
        distinct = uniform_distinct(_TOKENS, shape["n_experts"], shape["top_k"])
        measured = fit_moe_latency(table.load()).time_s(_TOKENS, distinct)
        errors += list(np.abs(np.log(found[0].time_s(_TOKENS, distinct) / measured)))
    assert len(errors) >= 24
    assert np.median(errors) < 0.12


def test_a_layer_without_a_table_is_not_a_roofline():
    parts = Parts(load_model("GLM-4.6"), load_gpu("B200"), Parallelism(8), (), 4096)
    assert parts.provenance["moe"]["label"] == "derived"
    assert "vllm_fused_moe" in parts.provenance["moe"]["kernel_source"]
    assert parts.missing == ["moe"]  # measured tables would do better


@pytest.mark.parametrize("size", [1, 4])
def test_norms_over_the_heads_of_all_gpus_take_an_all_reduce(size):
    model = load_model("MiniMax-M2.5")
    assert model.qk_norm == "full_width"
    plain = model.model_copy(update={"qk_norm": "per_head"})
    rows = np.array([0.0, 1.0, 64.0])
    of, without = (
        Parts(m, load_gpu("H200"), Parallelism(size), (), 4096).collectives_s(rows)
        for m in (model, plain)
    )
    if size == 1:
        assert not of.any()
    else:
        assert of[0] == 0.0
        assert np.all(of[1:] - without[1:] > model.n_layers * 3e-6)
        assert of[2] < 1.7 * without[2]
        assert of[1] - without[1] > of[2] - without[2]  # 8 bytes: NCCL


def test_a_gate_of_float32_is_slow_until_engines_use_tensor_cores():
    model = load_model("GLM-4.5-Air")
    assert model.float32_gate
    assert not load_model("Qwen3-30B-A3B").float32_gate
    rows = np.array([0.0, 1.0, 64.0, 8192.0])
    old, new, plain = (
        Parts(m, load_gpu("H200"), Parallelism(1), (), 4096, engine=Engine("sglang", version))
        for m, version in ((model, "0.5.10"), (model, ""),
                           (model.model_copy(update={"float32_gate": False}), "0.5.10"))
    )  # fmt: skip
    seconds = [parts.dense_part_s(rows) / model.n_moe_layers for parts in (old, new, plain)]
    assert np.all(np.diff(seconds[0]) > 0.0)
    chosen = [unfused_gate_s(model, load_gpu("H200"), of.engine, fused=False) for of in (old, new)]
    assert 30e-6 < seconds[0][2] - seconds[2][2] - chosen[0] < 60e-6
    assert 8e-6 < seconds[1][2] - seconds[2][2] - chosen[1] < 20e-6
    assert old.provenance["gate"]["label"] == "derived"
    assert "gate" not in plain.provenance


def test_latent_attention_of_vllm_is_not_far_above_another_engines():
    """vLLM 0.24.0's modules took 40 to 50 us a layer too long on four GPUs; attention of the newer
    ones, measured with FP8 projections, stands for bfloat16's."""
    first: dict[tuple[str, str], dict[str, float]] = {}
    for table in shipped_tables():
        if table.kind != "attention_decode" or "kv_lora_rank" not in table.shape:
            continue
        if "index_heads" in table.shape or table.metadata.dtype != "fp8_block":
            continue
        columns = table.load().columns
        least = float(columns["latency_s"][columns["batch"] == 1].min())
        by_engine = first.setdefault((table.gpu, table.shape), {})
        engine = table.metadata.framework.split()[0]
        by_engine[engine] = max(by_engine.get(engine, 0.0), least)
    pairs = [found for found in first.values() if {"vllm", "trtllm"} <= set(found)]
    assert len(pairs) > 20
    assert all(found["vllm"] < 1.45 * found["trtllm"] for found in pairs)
    kimi = Parts(load_model("Kimi-K2.5"), load_gpu("H200"), Parallelism(8), (), 4096)
    assert kimi.provenance["attention"]["label"] == "derived"
    assert "fp8_block projections" in kimi.provenance["attention"]["origin"]


def test_a_cache_counts_before_projections():
    """bfloat16 projections with an FP8 cache (DeepSeek-R1 in NVFP4) take attention of FP8 modules:
    a module with a bfloat16 cache reads twice the bytes."""
    model = load_model("DeepSeek-R1").model_copy(
        update={"linear_dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    )
    fp8, bfloat16 = (
        Parts(model.model_copy(update={"kv_cache_dtype": kind}), load_gpu("B200"),
              Parallelism(8), (), 4096, engine=Engine("trtllm"))
        for kind in ("fp8", "bfloat16")
    )  # fmt: skip
    assert not fp8.warnings
    assert "trtllm" in fp8.provenance["attention"]["framework"]
    (_, decode, _), (_, other, _) = fp8._attention(4096)[0], bfloat16._attention(4096)[0]
    batch, context = np.array([128.0]), np.array([4096.0])
    assert decode.time_s(batch, context) < 0.7 * other.time_s(batch, context)


@pytest.mark.parametrize(("name", "gpu", "inputs"), [
    ("Qwen3-8B-FP8", "H100", 4), ("MiniMax-M2.5", "B200", 2), ("DeepSeek-R1", "H200", 0),
    ("Qwen3-8B-FP8", "L40S", 0),
])  # fmt: skip
def test_block_fp8_linears_quantize_their_inputs_in_kernels(name, gpu, inputs):
    """Not where a table has them: modules of MLA, and TensorRT-LLM's GEMMs (L40S)."""
    model, device = load_model(name), load_gpu(gpu)
    plain = model.model_copy(update={"linear_dtype": "bfloat16"})
    of, without = (
        Parts(m, device, Parallelism(1), (), 1024)._elementwise_s(m, np.array([1.0]))[0]
        for m in (model, plain)
    )
    extra_s = inputs * model.n_layers * small_kernel_s(device)
    assert of - without == pytest.approx(extra_s, abs=1e-9)
