"""A GPU's tables from its sibling's: what memory bounds goes with the bandwidth, what FLOPs bound
with these, what links bound with the links."""

from types import SimpleNamespace

import numpy as np
import pytest

from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels import sibling_tables
from eldr_sim.kernel_profiles.kernels.all_to_all import build_all_to_all
from eldr_sim.kernel_profiles.kernels.sibling_tables import FIT_ERROR, gpu_table
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.parts import Parts
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.kernel_profiles.tables.format import (
    LatencyTable,
    attention_shape,
    has_projections,
    mla_shape,
    moe_shape,
)
from eldr_sim.kernel_profiles.tables.library import find_table, shipped_tables

SMALL, LARGE = load_gpu("A100-40GB"), load_gpu("A100")
SLOWER = 2.039 / 1.555
QWEN = load_model("Qwen3-30B-A3B")
MOE = moe_shape(2048, 768, 128, 8)


def _both(kind, **how):
    return find_table(kind, "A100", **how), gpu_table(kind, SMALL, QWEN, **how)


def _more(there, here):
    return here.columns["latency_s"] - there.columns["latency_s"]


def test_the_part_is_the_papers():
    """NVIDIA's data sheet: 40 GB at 1,555 GB/s, 312 TFLOP/s, NVLink 600 GB/s both ways."""
    assert (SMALL.memory_bytes, SMALL.memory_bandwidth) == (40 << 30, 1.555e12)
    other = {"memory_bytes", "memory_bandwidth", "name", "aliases", "sibling", "source"}
    other |= {"rent_usd", "rent_source"}
    assert SMALL.model_dump(exclude=other) == LARGE.model_dump(exclude=other)
    assert load_gpu("NVIDIA A100-SXM4-40GB") is SMALL


def test_moe_rows_take_longer_by_the_time_of_their_bytes_where_memory_bounds_them():
    """By hand: 9.44 MB an expert at 0.85 of the bandwidth, FLOPs at 0.43 of 312 TFLOP/s."""
    there, here = _both("moe", shape=MOE, dtype="bfloat16")
    batch, distinct = there.columns["batch"].astype(float), there.columns["distinct_experts"]
    weights, compute = distinct * 6 * 2048 * 768, batch * 8 * 6 * 2048 * 768 / (0.43 * 312e12)
    slow, fast = (np.maximum(weights / (0.85 * b), compute) for b in (1.555e12, 2.039e12))
    np.testing.assert_allclose(_more(there, here), slow - fast, rtol=1e-9, atol=1e-12)
    ratio = here.columns["latency_s"] / there.columns["latency_s"]
    assert (ratio[batch >= 2048] == 1.0).all()
    assert (ratio[(batch >= 16) & (batch <= 128)] > 1.26).all()
    assert (ratio <= SLOWER).all()


def test_gemms_are_split_row_by_row():
    there, here = _both("gemm", dtype="bfloat16")
    n, k, m = (there.columns[name].astype(float) for name in "nkm")
    moved, compute = 2 * (n * k + m * (n + k)) / 0.8, 2 * m * n * k / (0.74 * 312e12)
    slow, fast = (np.maximum(moved / b, compute) for b in (1.555e12, 2.039e12))
    most = (SLOWER - 1) * there.columns["latency_s"]
    np.testing.assert_allclose(_more(there, here), np.minimum(slow - fast, most), rtol=1e-5)
    assert ((slow - fast) > most).any()  # rows read from the L2 cache in part


def test_decode_attention_reads_its_cache_slower():
    there, here = _both("attention_decode", shape=attention_shape(32, 4, 128, 0))
    read = there.columns["batch"].astype(float) * there.columns["context"] * 2 * 2 * 4 * 128 / 0.8
    most = (SLOWER - 1) * there.columns["latency_s"]
    more = np.minimum(read / 1.555e12 - read / 2.039e12, most)
    np.testing.assert_allclose(_more(there, here), more, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("attention_prefill", {"shape": attention_shape(32, 4, 128, 0)}),
        ("collective", {"dtype": "float16"}),
        ("collective", {"dtype": "bfloat16"}),
    ],
)
def test_compute_and_links_are_the_siblings(kind, how):
    there, here = _both(kind, **how)
    assert here.columns["latency_s"].tolist() == there.columns["latency_s"].tolist()
    assert here.metadata.provenance == "derived"
    assert here.metadata.origin == there.metadata.origin + "; of A100, taken over"


def test_the_rule_predicts_h100_from_h200_as_far_as_it_says():
    """The two siblings that were both measured: same kernel, version and shape, row by row."""
    wide = {"bfloat16"}
    pairs = {}
    for one in shipped_tables():
        meta = one.metadata
        if meta.gpu in ("H100", "H200") and meta.kind in FIT_ERROR and meta.dtype in wide:
            same = (meta.kind, tuple(meta.shape.items()), meta.framework, meta.kernel_source)
            pairs.setdefault(same, {})[meta.gpu] = one
    h100 = load_gpu("H100").model_copy(update={"name": "H100-derived", "sibling": "H200"})
    errors = {kind: [] for kind in FIT_ERROR}
    for (kind, shape, *_), paths in pairs.items():
        plain = kind in ("gemm", "moe") or "n_heads" in dict(shape)
        if len(paths) == 2 and plain and not has_projections(dict(shape)):
            far, measured = (paths[name].load() for name in ("H200", "H100"))
            derived = gpu_table(
                kind, h100, _dims(kind, dict(shape)), shape=dict(shape), dtype="bfloat16",
                extra=[far],
            )  # fmt: skip
            errors[kind].append(_errors(derived, measured))
    for kind, found in errors.items():
        assert np.concatenate(found).mean() == pytest.approx(FIT_ERROR[kind], abs=0.0006)
    assert {kind: len(found) for kind, found in errors.items()} == {
        "moe": 47,
        "gemm": 1,
        "attention_decode": 94,
        "attention_prefill": 94,
    }


H100, H20, H800, PCIE = (load_gpu(name) for name in ("H100", "H20", "H800", "H100-PCIe"))


@pytest.mark.parametrize("tokens", [2048, 8192, 16384])
def test_prompts_go_with_the_flops(tokens):
    """H20 has 148 of H100's 989 TFLOP/s: attention of long prompts takes near 6.7 times as long."""
    shape = attention_shape(32, 4, 128, 0)
    there, here = (gpu_table("attention_prefill", gpu, QWEN, shape=shape) for gpu in (H100, H20))
    at = (there.columns["new_tokens"] == tokens) & (there.columns["batch"] == 1)
    ratio = here.columns["latency_s"][at] / there.columns["latency_s"][at]
    assert 3.5 < ratio[0] <= 989 / 148


def test_mla_modules_go_with_bytes_and_flops():
    """Few tokens read projections and cache, faster on H20; many are computed, slower."""
    model = load_model("DeepSeek-V3").model_copy(update={"n_heads": 16})
    shape = mla_shape(16, 7168, 1536, 512)
    how = {"shape": shape, "dtype": "fp8_block"}
    there, here = (gpu_table("attention_decode", gpu, model, **how) for gpu in (H100, H20))
    ratio = here.columns["latency_s"] / there.columns["latency_s"]
    context, batch = there.columns["context"], there.columns["batch"]
    assert (ratio[(batch == 1) & (context < 1024)] <= 1).all()
    assert (ratio >= 0.99 * 3.35 / 4.0).all()
    there, here = (gpu_table("attention_prefill", gpu, model, **how) for gpu in (H100, H20))
    ratio = here.columns["latency_s"] / there.columns["latency_s"]
    tokens = there.columns["batch"] * there.columns["new_tokens"]
    assert (ratio[tokens > 8192] > 2).all()
    assert ratio.max() > 5


def test_collectives_go_with_the_links_and_nvlinks_kernels_not_with_pcies():
    there, here = (gpu_table("collective", gpu, dtype="float16") for gpu in (H100, H800))
    ratio = here.columns["latency_s"] / there.columns["latency_s"]
    large = there.columns["message_bytes"] > 1 << 26
    assert (ratio[large] > 1.5).all()
    assert ratio.max() <= 450 / 200
    assert gpu_table("collective", PCIE, dtype="float16") is None


def _dims(kind, shape):
    """A model whose layers have a table's shape."""
    if kind == "gemm":
        return None
    if kind == "moe":
        names = ("hidden_size", "expert_intermediate_size", "n_experts", "top_k")
        return QWEN.model_copy(update={name: shape[name] for name in names})
    names = {name: shape[name] for name in ("n_heads", "n_kv_heads", "head_dim")}
    window = {"sliding_window": shape["window"]}
    cache = {"kv_cache_dtype": "fp8" if "kv_bits" in shape else "bfloat16"}
    return QWEN.model_copy(update=names | window | cache)


def _errors(derived, measured):
    axes = [name for name in derived.columns if not name.startswith(("latency", "repeats"))]

    def rows(table):
        points = zip(*(table.columns[name].tolist() for name in axes), strict=True)
        return dict(zip(points, table.columns["latency_s"], strict=True))

    predicted, truth = rows(derived), rows(measured)
    return np.array([abs(predicted[p] / truth[p] - 1) for p in predicted if p in truth])


def test_what_is_not_split_or_not_there_is_not_derived():
    table = find_table("attention_decode", "H100", shape=mla_shape(128, 7168, 1536, 512))
    mla = LatencyTable(table.metadata.model_copy(update={"gpu": "A100"}), table.columns)
    shape = mla.metadata.shape
    assert find_table("attention_decode", "A100", shape=shape, extra=[mla]) is mla
    assert gpu_table("attention_decode", SMALL, shape=shape, extra=[mla]) is None  # of no model
    assert gpu_table("moe", SMALL, QWEN, shape={**MOE, "top_k": 7}) is None
    assert gpu_table("moe", LARGE, QWEN, shape=MOE) is find_table("moe", "A100", shape=MOE)


def test_own_tables_come_first_then_the_siblings_own():
    table = find_table("moe", "A100", shape=MOE)
    changes = {"provenance": "measured", "origin": "mine"}
    own = LatencyTable(table.metadata.model_copy(update=changes), table.columns)
    derived = gpu_table("moe", SMALL, QWEN, shape=MOE, extra=[own])
    assert derived.metadata.origin.startswith("mine; of A100, scaled by")
    assert derived.metadata.provenance == "derived"
    mine = LatencyTable(own.metadata.model_copy(update={"gpu": "A100-40GB"}), table.columns)
    assert gpu_table("moe", SMALL, QWEN, shape=MOE, extra=[own, mine]) is mine


def test_steps_lie_between_the_siblings_and_the_ratio_and_say_derived():
    def build(gpu):
        layout = Parallelism(1, True, 8)
        return build_step_time_model(
            QWEN, gpu, max_num_seqs=64, max_model_len=4096, parallelism=layout
        )

    there, here = build(LARGE), build(SMALL)
    slow, fast = (model.rank_moe(24, 4096).decode_s[1:] for model in (here, there))
    # The fit's fixed time is not one row's, and may fall a little where all rows rise.
    assert ((slow > 0.97 * fast) & (slow < 1.01 * SLOWER * fast)).all()
    for component in ("moe", "gemm", "attention"):
        assert here.provenance[component]["label"] == "derived"
        assert "of A100" in here.provenance[component]["origin"]
    assert not here.warnings


@pytest.mark.parametrize("name", ["H20", "H20-141GB"])
def test_kernels_of_mla_compute_tiles_of_64_heads(name):
    """Without the padding of 16 heads to 64 a kernel is 2.78 times as fast as FlashMLA on H20, for
    16 sequences of 64K (arXiv 2506.01969), and no faster than the memory."""
    h20, model = load_gpu(name), load_model("DeepSeek-R1")

    def seconds(ranks):
        parts = Parts(model, h20, Parallelism(ranks), [], 1024)
        decode = parts.attention[0][1]
        return float(decode.time_s(np.array([16.0]), np.array([65536.0]))[0, 0])

    cached = 16 * 65536
    tile_flops = cached * 64 * 2 * (2 * model.kv_lora_rank + model.qk_rope_head_dim)
    assert 0.6 < tile_flops / (seconds(8) * h20.bf16_flops) < 0.9
    assert seconds(8) == pytest.approx(seconds(2), rel=0.1)
    read_s = cached * model.kv_bytes_per_token_layer() / h20.memory_bandwidth
    assert seconds(8) / 2.78 > read_s
    sparse = load_model("DeepSeek-V3.2")
    prompts = [
        Parts(sparse, gpu, Parallelism(8), [], 8192).attention[0][2]
        for gpu in (h20, load_gpu("H200"))
    ]
    slow, fast = (prompt.share_s[8192] for prompt in prompts)
    assert 3 < slow / fast <= load_gpu("H200").bf16_flops / h20.bf16_flops


def test_dispatch_and_combine_are_the_siblings():
    for backend in ("allgather_reducescatter", "nccl_alltoall"):
        there, here = (build_all_to_all(QWEN, gpu, backend, 8) for gpu in (LARGE, SMALL))
        assert here.combine_s(256, 0) == there.combine_s(256, 0)
        assert (there.label, here.label) == ("imported", "derived")


def test_an_all_reduce_sends_twice_what_an_all_gather_does():
    rows = {
        "message_bytes": np.array([1e9, 1e9]), "n_gpus": np.array([8, 8]),
        "operation": np.array(["all_reduce", "all_gather"]),
    }  # fmt: skip
    table = SimpleNamespace(columns=rows, metadata=SimpleNamespace(kind="collective"))
    h100 = load_gpu("H100")
    reduced, gathered = sibling_tables._message_s(table, h100, h100)
    assert reduced == 2 * gathered
