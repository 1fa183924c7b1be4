"""Step times: sums of kernels, checked against tables, brute force and measured TPOT."""

import pickle
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels import bounds, roofline
from eldr_sim.kernel_profiles.kernels.kernel_latency import (
    CollectiveLatency,
    DecodeAttention,
    GemmLatency,
    PrefillAttention,
)
from eldr_sim.kernel_profiles.kernels.moe_latency import uniform_distinct
from eldr_sim.kernel_profiles.kernels.small_kernels import (
    UNFUSED_TOP_K_S,
    bytes_alone,
    small_kernel_s,
)
from eldr_sim.kernel_profiles.models import list_models, load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.parts import NORMS_S, Parts
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.kernel_profiles.tables.format import LatencyTable, TableMetadata, mla_shape, moe_shape
from eldr_sim.kernel_profiles.tables.library import Engine, find_table, shipped_tables

from ..on_each import on_each
from ..step_times import fixed_s

GPUS = ("H100", "H200", "A100", "B200", "MI300X", "L40S")


def _of_kind(kind):
    return [pytest.param(one, id=one.name) for one in shipped_tables() if one.kind == kind]


def _build(model="Qwen3-30B-A3B", gpu="H100", **options):
    return build_step_time_model(
        model, gpu, **{"max_num_seqs": 64, "max_model_len": 8192} | options
    )


@pytest.fixture(scope="module")
def qwen():
    return _build()


# -- against measurements ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("concurrency", "tpot_ms"), [(4, 6.33), (8, 9.06), (16, 12.65), (32, 17.64), (64, 24.76)]
)
def test_bottom_up_tpot_of_gpt_oss_on_h200(concurrency, tpot_ms):
    """Measured TPOT, TP1, 1k in 1k out, with uniform routing: nothing was fitted to it.

    A public bottom-up sum of the same kernels errs by up to 6.5%; concurrency 8 is its worst.
    """
    model = _build("GPT-OSS-120B", "H200")
    distinct = [float(uniform_distinct(concurrency, 128, 4))] * 36
    step_ms = 1e3 * model.decode_s(distinct, concurrency, mean_context=0.9 * (1024 + 512))
    assert step_ms == pytest.approx(tpot_ms, rel=0.085)


def test_small_gemms_match_published_times():
    """H100, batch up to 128: QKV 10 us, O 10-11, router 5.1-5.4, lm_head 220-250."""
    table = find_table("gemm", "H100", dtype="bfloat16")
    assert table is not None
    gemm = GemmLatency.from_table(table)
    rows = np.array([1, 8, 64, 128])
    assert (
        (gemm.time_s(5120, 2048, rows) * 1e6 > 9.5) & (gemm.time_s(5120, 2048, rows) < 1.1e-5)
    ).all()
    assert (gemm.time_s(2048, 4096, rows) < 1.2e-5).all()
    assert (np.abs(gemm.time_s(128, 2048, rows) * 1e6 - 5.2) < 0.3).all()
    head = gemm.time_s(151936, 2048, rows) * 1e6
    assert ((head > 190) & (head < 255)).all()


# -- tables -----------------------------------------------------------------------------------


@on_each("shipped", _of_kind("gemm"))
def test_gemm_grids_meet_their_rows(shipped):
    table = shipped.load()
    gemm = GemmLatency.from_table(table)
    at = (np.searchsorted(getattr(gemm, c), table.columns[c]) for c in "nkm")
    error = np.log(gemm.seconds[tuple(at)] / table.columns["latency_s"])
    assert abs(error.mean()) < 1e-3  # neither fast nor slow
    assert np.abs(error).mean() < 0.05
    for i in np.random.default_rng(3).integers(len(table), size=50):
        m, n, k, latency = (float(table.columns[c][i]) for c in ("m", "n", "k", "latency_s"))
        predicted = float(gemm.time_s(int(n), int(k), m))
        assert np.log(predicted / latency) == pytest.approx(error[i], abs=1e-6)


def test_gemm_goes_on_past_its_grid_like_the_matrix_grows():
    table = find_table("gemm", "H200", dtype="bfloat16")
    assert table is not None
    gemm = GemmLatency.from_table(table)
    assert gemm.time_s(131072, 4096, 64) == pytest.approx(2 * gemm.time_s(65536, 4096, 64), rel=0.1)


@on_each("shipped", _of_kind("attention_decode"))
def test_decode_attention_meets_its_rows_and_fills_the_rest_sanely(shipped):
    table = shipped.load()
    attention = DecodeAttention.from_table(table)
    batch = table.columns["batch"].astype(float)
    context = table.columns["context"].astype(float)
    (batches, i), (contexts, j) = (np.unique(one, return_inverse=True) for one in (batch, context))
    ratio = attention.time_s(batches, contexts)[i, j] / table.columns["latency_s"]
    assert np.log(ratio).mean() == pytest.approx(0.0, abs=1e-3)  # neither fast nor slow
    assert np.median(ratio) == pytest.approx(1.0, abs=0.01)
    assert (np.diff(attention.seconds, axis=1) >= 0).all()
    # The filled corner keeps to full bandwidth: a table's largest points predict each other.
    whole = attention.time_s(np.array([0.0, 64.0]), np.array([1000.0, 2000.0]))
    assert (whole[0] == 0).all()
    assert (whole[1] > 0).all()


def test_the_filled_corner_predicts_points_that_were_measured():
    """Hide the largest contexts of the large batches, fill, and compare."""
    shape = {"n_heads": 32, "n_kv_heads": 4, "head_dim": 128, "window": 0}
    table = find_table("attention_decode", "H100", shape=shape)
    assert table is not None
    tokens = table.columns["batch"].astype(np.int64) * table.columns["context"]
    hidden = (tokens > 2**17) & (table.columns["batch"] >= 32)
    kept = {name: values[~hidden] for name, values in table.columns.items()}
    attention = DecodeAttention.from_table(LatencyTable(table.metadata, kept))
    assert hidden.sum() >= 5
    for b, c, latency in zip(
        *(table.columns[name][hidden] for name in ("batch", "context", "latency_s")), strict=True
    ):
        predicted = attention.time_s(np.array([float(b)]), np.array([float(c)]))[0, 0]
        if b <= 512:
            assert predicted == pytest.approx(latency, rel=0.15)


@on_each("shipped", _of_kind("attention_prefill"))
def test_prefill_attention_meets_single_prompts(shipped):
    table = shipped.load()
    longest = max(70_000, 2 * int(table.columns["new_tokens"].max()))
    attention = PrefillAttention.from_table(table, longest, 1e-9)
    alone = table.columns["batch"] == 1
    ratio = (
        attention.alone_s[table.columns["new_tokens"][alone]] / table.columns["latency_s"][alone]
    )
    assert np.log(ratio).mean() == pytest.approx(0.0, abs=1e-3)  # neither fast nor slow
    # Engines switch from dense to sparse attention where prompts outgrow what is attended to, and
    # long ones are then faster than shorter ones; the curve rises.
    most = 0.6 if "index_heads" in table.metadata.shape else 0.25
    assert (np.abs(ratio - 1) < most).all()
    assert (np.diff(attention.alone_s) >= 0).all()
    assert (np.diff(attention.share_s) >= 0).all()
    assert attention.share_s[0] == 0
    # Past the last row: the pairs under the causal mask, counted here one by one.
    linear = "n_value_heads" in table.metadata.shape  # a token attends to the state alone
    window = 1 if linear else table.metadata.shape.get("window", 0) or longest
    last = int(table.columns["new_tokens"].max())
    pairs = np.cumsum(np.minimum(np.arange(1, 2 * last + 1), window))
    growth = attention.alone_s[2 * last] / attention.alone_s[last]
    assert growth == pytest.approx(pairs[2 * last - 1] / pairs[last - 1], rel=1e-9)


@on_each("shipped", _of_kind("collective"))
def test_collectives_count_bytes(shipped):
    """At the largest messages no collective beats the links: elements taken for bytes would."""
    curves = CollectiveLatency.from_table(shipped.load()).curves
    gpu = load_gpu(shipped.gpu)
    for (operation, n_gpus), (sizes, seconds) in curves.items():
        moved = (n_gpus - 1) / n_gpus * (2 if operation == "all_reduce" else 1)
        rate = moved * sizes[-1] / seconds[-1]
        least = 0.2 if gpu.intra_node_bandwidth > 1e11 else 0.03  # PCIe goes through the host
        assert least < rate / gpu.intra_node_bandwidth < 1.35  # multicast reduces in the switch
        assert 2e-6 < seconds[0] < 50e-6


def test_h100_collective_floors_match_published_times():
    table = find_table("collective", "H100", dtype="float16")
    assert table is not None
    collectives = CollectiveLatency.from_table(table)
    assert collectives.time_s("all_reduce", 8, 512) == pytest.approx(15.6e-6, rel=0.05)
    assert collectives.time_s("all_gather", 8, 512) == pytest.approx(10e-6, rel=0.05)
    with pytest.raises(InputError, match="all_reduce on 8"):
        collectives.time_s("all_reduce", 3, 512)


# -- the model --------------------------------------------------------------------------------


#: Each model on one GPU, the next model on the next one: all models and all GPUs occur.
PAIRS = [(name, GPUS[n % len(GPUS)]) for n, name in enumerate(list_models())]


@pytest.mark.long
@on_each("name, gpu", PAIRS)
def test_every_model_is_sane_and_monotone(name, gpu):
    _is_sane_and_monotone(name, gpu)


@pytest.mark.slow
@on_each("name, gpu", sorted({*product(list_models(), GPUS)} - {*PAIRS}))
def test_every_model_on_every_gpu_is_sane_and_monotone(name, gpu):
    _is_sane_and_monotone(name, gpu)


def _is_sane_and_monotone(name, gpu):
    model = _build(name, gpu, max_num_seqs=32, max_model_len=4096, max_num_batched_tokens=4096)
    dims = load_model(name)
    assert model.cost.moe_s.shape == (33, dims.n_experts + 1)
    assert fixed_s(model).shape == (33,)
    assert model.cost.attention_s.shape[0] == 33
    assert (model.cost.attention_s.shape[1] - 1) * model.cost.context_stride >= 4096
    for array in (model.cost.moe_s, fixed_s(model), model.cost.attention_s):
        assert np.isfinite(array).all()
        assert (array >= 0).all()
    assert fixed_s(model)[0] == 0
    assert (model.cost.attention_s[0] == 0).all()
    tuned = "vLLM's tuned tiles" in str(model.provenance.get("moe"))  # the next tile may be faster
    assert tuned or (np.diff(model.cost.moe_s[1:, 1:], axis=0) >= -1e-15).all()
    assert (np.diff(model.cost.moe_s[1:, 1:], axis=1) >= -1e-15).all()
    assert (np.diff(model.cost.attention_s, axis=1) >= -1e-15).all()
    assert (np.diff(model.cost.attention_s, axis=0) >= -1e-15).all()
    # No step reads its weights faster than the memory allows. Gathered in half-empty batches,
    # small expert sets may come from the L2 cache, hence the margin.
    distinct = uniform_distinct(32, dims.n_experts, dims.top_k)
    weights = dims.n_moe_layers * distinct * dims.bytes_per_expert
    step = model.decode_s([float(distinct)] * dims.n_moe_layers, 32, 1000)
    assert step > 0.95 * weights / model.gpu.memory_bandwidth
    assert {entry["label"] for entry in model.provenance.values()} >= {model.label}
    for entry in model.provenance.values():
        assert entry["origin"]


def test_a_step_is_the_sum_of_its_parts(qwen):
    knot = 10
    distinct = [20 + layer for layer in range(48)]
    expected = fixed_s(qwen)[16] + qwen.cost.attention_s[16, knot]
    expected += sum(qwen.cost.moe_s[16, d] for d in distinct)
    assert qwen.decode_s(distinct, 16, knot * qwen.cost.context_stride) == pytest.approx(expected)


def test_sliding_layers_stop_growing_with_context():
    model = _build("GPT-OSS-120B", "H100")
    slope = np.diff(model.cost.attention_s[64])
    far = np.arange(len(slope)) * model.cost.context_stride
    full = load_model("GPT-OSS-120B").n_full_layers
    shape = {"n_heads": 64, "n_kv_heads": 8, "head_dim": 64, "window": 0}
    table = find_table("attention_decode", "H100", shape=shape)
    assert table is not None
    growth = DecodeAttention.from_table(table).time_s(np.array([64.0]), np.array([4096.0, 8192.0]))
    expected = full * np.diff(growth[0])[0] / 4096 * model.cost.context_stride
    assert slope[far >= 4096].mean() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("name", "gpu", "label"),
    [
        ("GPT-OSS-20B", "H100", "imported"),
        ("GPT-OSS-20B", "MI300X", "derived"),
        ("Gemma-4-26B-A4B", "H100", "imported"),
        ("Gemma-4-26B-A4B", "L40S", "roofline"),
        ("Qwen3-30B-A3B", "H100", "imported"),
    ],
)
def test_a_cached_token_of_a_prompt_is_read_in_the_full_layers_alone(name, gpu, label):
    """The two bytes of each of its keys and values, at 60% of the peak bandwidth or more."""
    model, built = load_model(name), _build(name, gpu)
    heads = model.global_n_kv_heads if model.global_head_dim else model.n_kv_heads
    width = model.global_head_dim or model.head_dim
    n_bytes = model.n_full_layers * 2 * heads * width * 2
    read = built.cost.prompt_token_s * load_gpu(gpu).memory_bandwidth
    assert n_bytes < read < n_bytes / 0.6
    assert built.provenance["attention"]["label"] == label


def test_shared_experts_have_three_matrices():
    """Gate and up in one, and down: as the rows of their kernels were imported."""
    model = load_model("Qwen1.5-MoE-A2.7B")
    without = model.model_copy(update={"shared_intermediate_size": 0})
    more = _build(model).cost.dense_s - _build(without).cost.dense_s
    gemm = GemmLatency.from_table(find_table("gemm", "H100", dtype="bfloat16"))
    hidden, width, rows = model.hidden_size, model.shared_intermediate_size, np.array([1, 16, 64])
    pair = gemm.time_s(2 * width, hidden, rows) + gemm.time_s(hidden, width, rows)
    activation = small_kernel_s(load_gpu("H100"))  # the MLP's own
    np.testing.assert_allclose(more[rows], model.n_moe_layers * (pair + activation))


@on_each(
    "model, gpu, engine, size",
    [("DeepSeek-R1", "H200", "sglang", 8), ("DeepSeek-R1", "B200", "sglang", 8),
     ("Qwen1.5-MoE-A2.7B", "H100", "sglang", 1),
     ("DeepSeek-R1", "MI300X", "sglang", 8)],
)  # fmt: skip
def test_fused_shared_experts_cost_their_bytes_and_flops(model, gpu, engine, size):
    """Never less than roofline, never more than in series; what is gone is the latency of one
    row's GEMMs, and small kernels, whatever the tokens."""
    layout, layers = Parallelism(tensor_parallel_size=size), load_model(model).n_moe_layers
    series, fused = (
        _build(model, gpu=gpu, engine=Engine(engine), parallelism=layout,
               shared_experts_fused=inside).cost.dense_s
        for inside in (False, True)
    )  # fmt: skip
    without = load_model(model).model_copy(update={"shared_intermediate_size": 0})
    alone = _build(without, gpu=gpu, engine=Engine(engine), parallelism=layout).cost.dense_s
    part, rows = layout.shard(load_model(model)), np.arange(len(series))
    least = sum(
        bounds.linear_s(load_gpu(gpu), n, k, rows, part.dtype_of("mlp"))
        for n, k in part.shared_linears
    )
    assert (fused >= alone + layers * least * (1 - 1e-9)).all()
    assert (fused[1:] < series[1:]).all()
    saved = series[1:] - fused[1:]
    assert saved[0] == pytest.approx(saved[63], rel=0.05)


def test_host_gap_is_added_once_per_step():
    plain, late = _build(host_gap_s=0.0), _build(host_gap_s=0.003)
    np.testing.assert_allclose(fixed_s(late)[1:] - fixed_s(plain)[1:], 0.003)
    assert fixed_s(late)[0] == 0
    gap = late.prefill_s([100, 200], [0, 0]) - plain.prefill_s([100, 200], [0, 0])
    assert gap == pytest.approx(0.003)
    assert late.host_gap_s == 0.003


def _own(kind, shape, **columns):
    metadata = TableMetadata(
        kind=kind, gpu="H100", shape=shape, dtype="bfloat16", kernel_source="mine",
        framework="profile 1", provenance="measured", origin="a test", device="none",
    )  # fmt: skip
    return LatencyTable(metadata, {name: np.array(values) for name, values in columns.items()})


def test_the_host_gap_of_a_table_is_its_median():
    gaps = _own(
        "host_gap", {"n_layers": 48, "hidden_size": 2048}, batch=[1, 8, 64],
        latency_s=[1e-3, 2e-3, 9e-3],
    )  # fmt: skip
    assert _build(tables=[gaps]).host_gap_s == 2e-3


def test_small_batches_take_the_norms_time_and_large_ones_their_bytes():
    plain, bare = (
        _build(),
        _build(tables=[bytes_alone(load_model("Qwen3-30B-A3B"), load_gpu("H100"))]),
    )
    more = plain.cost.dense_s - bare.cost.dense_s
    # Norms of queries and of keys come to the four kernels of a model without them.
    least = 48 * (NORMS_S + 2 * small_kernel_s(load_gpu("H100")))
    assert 0.99 * least < more[1] < least  # a token's bytes take no time to speak of
    assert more[-1] == pytest.approx(0.0, abs=1e-12)


def test_a_step_is_outside_where_the_least_measured_kind_of_layer_ends():
    """Gemma's full layers were measured to 2^18 tokens in a batch, its sliding ones to 2^19."""
    model = build_step_time_model("Gemma-4-26B-A4B", "H100", max_num_seqs=8, max_model_len=4096)
    assert model.attention_tokens_max == 2**18


def test_a_shipped_table_of_an_older_kernel_may_be_given_as_ones_own():
    (older,) = (
        one.load()
        for one in shipped_tables()
        if (one.kind, one.gpu, one.metadata.kernel_source) == ("moe", "H200", "vllm_fused_moe")
        and (one.metadata.shape, one.metadata.dtype) == (moe_shape(2048, 768, 128, 8), "bfloat16")
    )
    newest, given = _build(gpu="H200"), _build(gpu="H200", tables=[older])
    assert given.provenance["moe"]["kernel_source"] == "vllm_fused_moe"
    assert newest.provenance["moe"]["kernel_source"] != "vllm_fused_moe"
    assert (newest.cost.moe_s != given.cost.moe_s).any()


def test_own_tables_take_precedence():
    rows = [(b, min(128, 8 * b)) for b in (1, 2, 4, 8, 16, 32, 64)]
    own = LatencyTable(
        TableMetadata(
            kind="moe",
            gpu="H100",
            shape=moe_shape(2048, 768, 128, 8),
            dtype="bfloat16",
            kernel_source="mine",
            framework="profile 1",
            provenance="measured",
            origin="a test",
            device="none",
        ),
        {
            "batch": np.array([b for b, _ in rows]),
            "distinct_experts": np.array([float(d) for _, d in rows]),
            "routing": np.array(["balanced"] * len(rows), dtype=object),
            "latency_s": np.array([1e-3 * d for _, d in rows]),
        },
    )
    model = _build(tables=[own])
    assert model.cost.moe_s[16, 64] == pytest.approx(0.064)
    assert model.provenance["moe"]["label"] == "measured"
    assert model.moe_batch_max == 64


def test_fp8_linear_layers_take_their_own_table():
    """Tables where every FP8 matrix takes 1 and 3 ms, and the bfloat16 ones keep their times."""
    dims = load_model("MiniMax-M2")
    grid = [(m, n, k) for m in (1, 16384) for n in (32, 65536) for k in (32, 65536)]
    metadata = find_table("gemm", "L40S", dtype="bfloat16").metadata
    columns = {name: np.array([point[i] for point in grid]) for i, name in enumerate("mnk")}

    def built(seconds):
        own = LatencyTable(
            metadata.model_copy(update={"dtype": "fp8_block"}),
            columns | {"latency_s": np.full(len(grid), seconds)},
        )
        return _build("MiniMax-M2", "L40S", tables=(own,))

    grown = fixed_s(built(3e-3))[16] - fixed_s(built(1e-3))[16]
    assert grown == pytest.approx(dims.n_layers * len(dims.attention_linears()) * 2e-3)


@pytest.mark.parametrize(("name", "heads"), [("DeepSeek-V3", 128)])
def test_mla_takes_what_its_modules_were_measured_to_take(name, heads):
    """Projections are priced beside attention; together they are the module's rows."""
    model, dims = _build(name, "H200", max_num_seqs=256, max_model_len=9000), load_model(name)
    assert model.provenance["attention"]["label"] == "imported"
    shape = mla_shape(heads, 7168, 1536, 512)
    decode, prefill = (
        find_table(kind, "H200", shape=shape, dtype=dims.linear_dtype)
        for kind in ("attention_decode", "attention_prefill")
    )
    gemm = GemmLatency.from_table(find_table("gemm", "H200", dtype=dims.linear_dtype))

    def linears(tokens):
        return sum(float(gemm.time_s(n, k, tokens)) for n, k in dims.attention_linears())

    columns = decode.columns
    for batch, context in ((1, 1025), (16, 4097), (64, 1025), (256, 2049)):
        row = (columns["batch"] == batch) & (columns["context"] == context)
        attention = model.parts(batch, batch * context, activated=[8.0] * dims.n_moe_layers)
        module = attention.attention / dims.n_layers + linears(batch)
        assert module == pytest.approx(float(columns["latency_s"][row][0]), rel=0.06)
    columns = prefill.columns
    for tokens in (512, 2048, 8192):
        row = (columns["batch"] == 1) & (columns["new_tokens"] == tokens)
        attention = model.parts(chunks=[(0, tokens)]).attention / dims.n_layers
        module = attention + linears(tokens)
        assert module == pytest.approx(float(columns["latency_s"][row][0]), rel=0.10)


def test_balanced_rows_of_group_limited_gates_are_left_out():
    """DeepSeek-V3's gate keeps balanced tokens to 128 of 256 experts: those read too fast."""
    shape = moe_shape(7168, 2048, 256, 8)
    for gpu in ("H100", "H200", "B200"):
        table = find_table("moe", gpu, shape=shape, dtype="fp8_block")
        assert table is not None
        assert "balanced" not in set(table.columns["routing"])
        assert "expectations" in table.metadata.notes
        read = table.columns["distinct_experts"] * load_model("DeepSeek-V3").bytes_per_expert
        rate = read / table.columns["latency_s"] / load_gpu(gpu).memory_bandwidth
        assert rate[table.columns["batch"] >= 16].max() < 1.1
    kimi = find_table("moe", "H100", shape=moe_shape(7168, 2048, 384, 8), dtype="fp8_block")
    assert kimi is not None
    assert "balanced" in set(kimi.columns["routing"])


def test_what_is_not_measured_is_said():
    imported = _build("Qwen3-30B-A3B", "H100")
    assert imported.warnings == ()
    assert imported.provenance["moe"]["label"] == "imported"
    assert imported.provenance["moe"]["fit_error"]["leave_one_out_mean"] < 0.03
    guessed = _build("DeepSeek-V3", "L40S")
    assert guessed.label == "roofline"
    assert any("moe: no table" in line for line in guessed.warnings)
    derived = _build("Qwen3-30B-A3B", "MI300X", moe_backend="aiter")
    assert derived.label == "derived"
    assert derived.provenance["moe"]["fit_error"]["above_aiter_mean"] > 0.1


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 0},
        {"max_model_len": 0},
        {"max_num_batched_tokens": -1},
        {"host_gap_s": -1e-3},
        {"host_gap_s": float("nan")},
        {"model": "Qwen9"},
        {"gpu": "H900"},
    ],
)
def test_bad_input_is_refused(options):
    with pytest.raises(InputError):
        _build(**options)


def test_decode_refuses_what_is_out_of_its_tables(qwen):
    with pytest.raises(InputError, match="0 to 64"):
        qwen.decode_s([8] * 48, 65, 100)
    with pytest.raises(InputError, match="48"):
        qwen.decode_s([8] * 47, 1, 100)


def test_the_model_survives_a_trip_to_another_process(qwen):
    other = pickle.loads(pickle.dumps(qwen))
    assert other.prefill_s([512, 7], [0, 100]) == qwen.prefill_s([512, 7], [0, 100])
    np.testing.assert_array_equal(other.cost.moe_s, qwen.cost.moe_s)


def test_building_twice_gives_the_same_bits(qwen):
    again = _build()
    for name in ("moe_s", "dense_s", "head_s", "attention_s"):
        np.testing.assert_array_equal(getattr(again.cost, name), getattr(qwen.cost, name))
    assert again.prefill_s([3000], [5]) == qwen.prefill_s([3000], [5])


# -- prefill ----------------------------------------------------------------------------------

requests = st.lists(st.tuples(st.integers(1, 1024), st.integers(0, 4000)), min_size=1, max_size=8)


@given(batch=requests, extra=st.integers(1, 500))
def test_prefill_grows_with_tokens_context_and_requests(qwen, batch, extra):
    tokens, contexts = ([pair[i] for pair in batch] for i in (0, 1))
    base = qwen.prefill_s(tokens, contexts)
    assert qwen.prefill_s([tokens[0] + extra, *tokens[1:]], contexts) >= base
    # A chunk costs the whole prompt less its cached part, and the measured curve is not convex
    # where launches dominate: it falls there by up to 105 us (of 400,000 random pairs).
    assert qwen.prefill_s(tokens, [contexts[0] + extra, *contexts[1:]]) >= base - 1.5e-4
    assert qwen.prefill_s([*tokens, extra], [*contexts, 0]) >= base


@given(prompt=st.integers(2, 8000), cut=st.floats(0.01, 0.99))
def test_chunks_share_the_attention_of_their_prompt(qwen, prompt, cut):
    """A prompt in two chunks costs at least the whole: pairs are the same, fixed parts repeat."""
    first = max(1, min(prompt - 1, int(prompt * cut)))
    whole = qwen.prefill_s([prompt], [0])
    chunked = qwen.prefill_s([first], [0]) + qwen.prefill_s([prompt - first], [first])
    assert chunked >= whole * 0.999
    assert chunked <= 3 * whole


def test_a_cached_prefix_saves_time_but_its_kv_is_still_read(qwen):
    whole = qwen.prefill_s([4096], [0])
    cached = qwen.prefill_s([96], [4000])
    assert qwen.prefill_s([96], [0]) < cached < 0.5 * whole


def test_prefill_by_hand():
    """One request: MoE at the larger of expected experts and skew, GEMMs, attention, lm_head."""
    unknown = load_gpu("L40S").model_copy(update={"name": "without tables"})
    model = _build("Mixtral-8x7B", unknown, host_gap_s=0.0)
    dims, gpu, tokens = model.model, model.gpu, 500
    moe = roofline.moe_latency(gpu, dims)
    layer = float(moe.prefill_s(tokens))
    bandwidth = roofline.GENERIC.bandwidth * gpu.memory_bandwidth
    for n, k in [*dims.attention_linears(), (dims.n_experts, dims.hidden_size)]:
        layer += float(roofline.gemm_s(gpu, n, k, tokens))
    layer += max(8e-6, 2 * (8 * 4096 + 2 * (32 + 2 * 8) * 128) * tokens / bandwidth)
    flops = 4 * 32 * 128 * tokens * (tokens + 1) / 2
    layer += roofline.GENERIC.attention_floor_s
    layer += flops / (roofline.GENERIC.attention_flops * gpu.bf16_flops)
    expected = 32 * layer + float(roofline.gemm_s(gpu, dims.vocab_size, dims.hidden_size, 1))
    expected += 4 * dims.hidden_size * tokens / bandwidth
    assert model.prefill_s([tokens], [0]) == pytest.approx(expected, rel=1e-9)


def test_prefill_of_nothing_takes_no_time(qwen):
    assert qwen.prefill_s([], []) == 0.0


def test_a_prompt_beyond_the_token_budget_is_computed_in_chunks(qwen):
    small = _build(max_num_batched_tokens=2048)
    with pytest.raises(InputError, match=r"tokens: 8000 in a step \(allowed: 2048 or fewer"):
        small.prefill_s([1000] * 8, [0] * 8)
    chunks = small.prefill_s([2048], [0]) + small.prefill_s([952], [2048])
    assert small.prompt_s(3000) == pytest.approx(chunks, rel=1e-12)
    assert qwen.prompt_s(3000) == qwen.prefill_s([3000], [0]) < chunks


def test_parts_of_a_step_are_named_and_sum_up(qwen):
    """A mixed step reads every weight once: it costs less than its two halves apart."""
    every = [qwen.n_experts] * qwen.n_moe_layers
    mixed = qwen.parts(8, 8 * 500, [(100, 400)], every)
    decode, prompt = qwen.parts(8, 8 * 500, activated=every), qwen.parts(chunks=[(100, 400)])
    assert mixed.attention == pytest.approx(decode.attention + prompt.attention)
    assert mixed.dense < decode.dense + prompt.dense
    assert mixed.collectives == mixed.host == 0.0
    assert qwen.decode_s(every, 8, 500) == pytest.approx(sum(decode))
    each = [qwen.decode_s(every, n, 500) for n in range(1, qwen.max_num_seqs + 1)]
    assert qwen.decodes_s(every, 500).tolist() == each
    wrong = [{"batch": -1}, {"batch": 65, "activated": every}, {"batch": 1}]
    wrong += [{"chunks": [(0, 0)]}, {"chunks": [(8000, 4000)]}, {"batch": 1, "activated": [1]}]
    for step in wrong:
        with pytest.raises(InputError):
            qwen.parts(**step)


@pytest.mark.parametrize(
    ("batch", "published_ms"), [(4, 22.05), (8, 25.56), (16, 30.83), (32, 34.30)]
)
def test_deepseek_on_mi300x_takes_what_was_published(batch, published_ms):
    """Median TPOT of DeepSeek-R1 on eight MI300X, 1,024 tokens in and out, SGLang with a tuned GEMM
    (ROCm/aiter pull request 1930): no constant was chosen with it."""
    parallelism = Parallelism(tensor_parallel_size=8)
    steps = _build("DeepSeek-R1", "MI300X", parallelism=parallelism)
    model = load_model("DeepSeek-R1")
    distinct = float(uniform_distinct([batch], model.n_experts, model.top_k)[0])
    parts = steps.parts(batch, batch * 1536, activated=[distinct] * model.n_moe_layers)
    assert 1e3 * sum(parts) == pytest.approx(published_ms, rel=0.15)


@pytest.mark.parametrize(
    ("engine", "unfused", "float32"),
    [(Engine("sglang", "0.5.9"), True, False), (Engine("sglang", "0.5.11"), True, True),
     (Engine("sglang"), False, True), (Engine("vllm"), False, True),
     (Engine("trtllm"), False, False)],
)  # fmt: skip
def test_what_glm_takes_to_choose_experts_goes_by_engine_and_version(engine, unfused, float32):
    """SGLang's top-k in eight kernels, the sum of a shared expert that is not fused, and gates."""
    model, gpu, one = load_model("GLM-4.6"), load_gpu("B200"), np.ones(1)
    others = model.model_copy(update={"float32_gate": False})
    of, plain = (Parts(m, gpu, Parallelism(8), (), 4096, engine=engine) for m in (model, others))
    gates = [model.n_moe_layers * parts._gate_s(one)[0] for parts in (of, plain)]
    assert ("gate" in of.provenance) == float32
    chosen = (of.dense_part_s(one)[0] - gates[0]) - (plain.dense_part_s(one)[0] - gates[1])
    layer_s = UNFUSED_TOP_K_S if unfused else small_kernel_s(gpu) * (engine.name == "sglang")
    assert chosen == pytest.approx(model.n_layers * layer_s, abs=1e-9)


@pytest.mark.parametrize("gpu_name", ["MI300X", "H100"])
def test_norms_that_follow_each_other_are_one_kernel_where_a_step_is_compiled(gpu_name):
    """Seven norms a layer of Gemma: Inductor leaves two of them to vLLM's graphs; SGLang launches
    all, and so does vLLM without compilation, where it rotates and caches in separate kernels."""
    model, gpu = load_model("Gemma-4-26B-A4B"), load_gpu(gpu_name)
    kernel_s = roofline.efficiency_of(gpu).small_kernel_s or small_kernel_s(gpu)
    engines = "vllm", "sglang"
    made = {n: Parts(model, gpu, Parallelism(1), (), 4096, engine=Engine(n)) for n in engines}
    vllm, sglang = (made[n].dense_part_s(np.ones(1)) for n in engines)
    assert sglang - vllm == pytest.approx(5 * model.n_layers * kernel_s)
    eager, others = made["vllm"].launches_s(), made["sglang"].launches_s()
    assert eager - others == pytest.approx(2 * model.n_layers * gpu.launch_s)
    compiled_s = gpu.compiled_launch_s or gpu.launch_s
    kernels = eager / gpu.launch_s - 5 * model.n_layers
    assert made["vllm"].launches_s(compiled=True) == pytest.approx(kernels * compiled_s)
