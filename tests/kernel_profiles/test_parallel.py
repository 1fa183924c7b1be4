"""Workers of several GPUs: what each GPU holds, computes and sends, and what is refused."""

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels import roofline
from eldr_sim.kernel_profiles.kernels.all_reduce import CUSTOM_ALL_REDUCE_BYTES, ONE_KERNEL
from eldr_sim.kernel_profiles.kernels.kernel_latency import CollectiveLatency, GemmLatency
from eldr_sim.kernel_profiles.kernels.moe_latency import fit_moe_latency
from eldr_sim.kernel_profiles.models import list_models, load_model
from eldr_sim.kernel_profiles.parallel import SINGLE_GPU, Parallelism
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.kernel_profiles.tables.format import moe_shape
from eldr_sim.kernel_profiles.tables.library import Engine, find_table
from eldr_sim.simulator.setup.memory import kv_blocks

from ..on_each import on_each

LARGE = load_model("Qwen3-235B-A22B")
TP4, EP4 = Parallelism(4), Parallelism(4, True)


def build(model="Qwen3-235B-A22B", gpu="H200", parallelism=EP4, **options):
    limits = {"max_num_seqs": 128, "max_model_len": 4096, "max_num_batched_tokens": 4096}
    return build_step_time_model(model, gpu, parallelism=parallelism, **(limits | options))


# -- what one GPU holds ------------------------------------------------------------------------


@on_each("name", list_models())
def test_one_gpu_holds_everything(name):
    model = load_model(name)
    for alone in (SINGLE_GPU, Parallelism(1, True)):
        assert alone.shard(model) == model
        assert alone.weight_bytes(model) == model.weight_bytes
        assert alone.kv_bytes_per_token(model) == model.kv_bytes_per_token


@pytest.mark.parametrize("parallelism", [Parallelism(2), TP4, Parallelism(8), EP4])
def test_weights_by_hand(parallelism):
    """Qwen3-235B: sharded is 1/N of the whole; gates, norms and copies of KV heads are not."""
    n, h, layers = parallelism.tensor_parallel_size, 4096, 94
    kv_heads = max(1, 4 // n)
    attention = (64 // n + 2 * kv_heads) * 128 * h + h * 64 // n * 128 + 2 * 128
    experts = 128 * 3 * h * 1536 // n
    gate_and_norms = 128 * h + 2 * h
    ends = 2 * (151936 // n) * h + h
    expected = 2 * (layers * (attention + experts + gate_and_norms) + ends)
    assert parallelism.weight_bytes(LARGE) == expected


def test_whole_and_sharded_experts_weigh_the_same():
    assert EP4.weight_bytes(LARGE) == TP4.weight_bytes(LARGE)
    assert 4 * EP4.weight_bytes(LARGE) > LARGE.weight_bytes  # copies
    assert 4 * EP4.weight_bytes(LARGE) < 1.01 * LARGE.weight_bytes


@pytest.mark.parametrize(
    ("name", "size", "share"),
    [
        ("Qwen3-235B-A22B", 2, 1 / 2),
        ("Qwen3-235B-A22B", 4, 1 / 4),
        ("Qwen3-235B-A22B", 8, 1 / 4),  # 4 KV heads: two GPUs hold a copy of each
        ("GPT-OSS-120B", 8, 1 / 8),
        ("DeepSeek-V2-Lite", 4, 1),  # MLA: the compressed cache is whole on every GPU
    ],
)
def test_kv_cache_of_one_gpu(name, size, share):
    model = load_model(name)
    assert Parallelism(size, True).kv_bytes_per_token(model) == share * model.kv_bytes_per_token


def test_a_model_that_fits_only_on_several_gpus():
    h200, h100 = load_gpu("H200"), load_gpu("H100")
    for parallelism in (SINGLE_GPU, Parallelism(2, True)):
        with pytest.raises(InputError, match="more GPUs per worker"):
            kv_blocks(LARGE, h200, 0.9, 16, parallelism)
    blocks = kv_blocks(LARGE, h200, 0.9, 16, EP4)
    left = int(0.9 * h200.memory_bytes) - EP4.weight_bytes(LARGE) - h200.engine_reserved_bytes
    assert blocks == left // (16 * LARGE.kv_bytes_per_token // 4)
    with pytest.raises(InputError, match="gpu"):  # 118 GB of weights on each GPU of 80
        kv_blocks(LARGE, h100, 0.9, 16, EP4)
    assert kv_blocks(LARGE, h100, 0.9, 16, Parallelism(8, True)) > 0


@pytest.mark.parametrize(
    ("name", "parallelism", "message"),
    [
        ("Qwen3-235B-A22B", lambda: Parallelism(0), "1 to 8"),
        ("Qwen3-235B-A22B", lambda: Parallelism(12), "1 to 8, .*or whole nodes"),
        ("Qwen3-235B-A22B", lambda: Parallelism(3), "3 does not divide the 64 attention heads"),
        ("Qwen3-30B-A3B", lambda: Parallelism(7, True), "attention heads"),
        ("DeepSeek-V3", lambda: Parallelism(1, False, 32), "FP8 blocks of 128"),
        ("MiniMax-M2", lambda: Parallelism(8), "FP8 blocks of 128"),
    ],
)
def test_what_cannot_be_spread_is_refused(name, parallelism, message):
    with pytest.raises(InputError, match=message) as caught:
        parallelism().shard(load_model(name))
    assert "\n" not in str(caught.value)


def test_an_engine_of_two_nodes_exchanges_over_its_nics():
    """Its all-reduces are those of a node, and twice a ring of two at the line rate."""
    limits = {"max_num_seqs": 64, "max_model_len": 2048, "engine": Engine("vllm", "0.16")}
    model = load_model("DeepSeek-V3")
    one, two = (build("DeepSeek-V3", "H200", Parallelism(n), **limits) for n in (8, 16))
    message = 2 * 7168 * 32
    ring = 2 * (message / 16 / (42.6e9 / 50e9 * load_gpu("H200").nic_bandwidth) + 5e-6)
    more = two.cost.collectives_s[32] - one.cost.collectives_s[32]
    assert more == pytest.approx((1 + 2 * model.n_layers) * ring)
    assert two.cost.dense_s[32] < one.cost.dense_s[32]
    assert two.provenance["network"]["label"] == "derived"
    assert "network" not in one.provenance


def test_second_copies_may_let_ranks_hold_equally_many():
    """DeepSeek on 48 GPUs with the recipes' 32 copies: 6 experts each."""
    model, wide = load_model("DeepSeek-V3"), Parallelism(1, True, 48)
    with pytest.raises(InputError, match="data_parallel_size: 48 does not divide the 256 experts"):
        wide.check(model)
    wide.check(model, copies=True)
    assert wide.shard(model).n_experts == 256


def test_copies_of_kv_heads_must_come_out_even():
    model = LARGE.model_copy(update={"n_heads": 24, "n_kv_heads": 4})
    with pytest.raises(InputError, match="KV heads"):
        Parallelism(6).check(model)
    assert Parallelism(8).shard(model).n_kv_heads == 1


# -- step times --------------------------------------------------------------------------------


def test_a_worker_of_one_gpu_is_as_before():
    limits = {"max_num_seqs": 64, "max_model_len": 2048}
    alone = build_step_time_model("Qwen3-30B-A3B", "H100", **limits)
    for parallelism in (SINGLE_GPU, Parallelism(1, True)):
        other = build("Qwen3-30B-A3B", "H100", parallelism, **limits, max_num_batched_tokens=16384)
        for name in ("moe_s", "dense_s", "head_s", "attention_s"):
            assert (getattr(other.cost, name) == getattr(alone.cost, name)).all()
        assert other.prefill_s([300, 5], [0, 9]) == alone.prefill_s([300, 5], [0, 9])
        assert "collectives" not in other.provenance


@pytest.mark.parametrize("gpu", ["H200", "B200", "MI300X"])
@pytest.mark.parametrize("expert_parallel", [True, False])
def test_four_gpus_beat_one_but_not_fourfold(gpu, expert_parallel):
    spread = build(gpu=gpu, parallelism=Parallelism(4, expert_parallel))
    alone = build(gpu=gpu, parallelism=SINGLE_GPU)
    every = [spread.cost.moe_s.shape[1] - 1] * 94
    ratio = alone.decode_s([128] * 94, 64, 1000) / spread.decode_s(every, 64, 1000)
    assert 1.5 < ratio < 4
    assert 1.5 < alone.prefill_s([4000], [0]) / spread.prefill_s([4000], [0]) < 4


def test_columns_count_the_experts_of_a_rank():
    assert build().cost.moe_s.shape == (129, 33)
    assert build(parallelism=TP4).cost.moe_s.shape == (129, 129)
    assert (np.diff(build().cost.moe_s, axis=1) >= 0).all()  # the busiest rank is the slowest


def test_collectives_of_a_step_by_hand():
    """Two all-reduces a layer and one for the embedding, then the logits are gathered."""
    spread = build()
    one_kernel = find_table("collective", "H200", dtype="bfloat16", engine=ONE_KERNEL)
    fused = CollectiveLatency.from_table(one_kernel)
    nccl = CollectiveLatency.from_table(find_table("collective", "H200", dtype="float16"))
    gemm = GemmLatency.from_table(find_table("gemm", "H200", dtype="bfloat16"))
    batch, tokens = 64, 2048  # 2,048 tokens are 16.8 MB: beyond the custom kernel
    assert 2 * 4096 * batch < CUSTOM_ALL_REDUCE_BYTES < 2 * 4096 * tokens
    sums = 189 * fused.time_s("all_reduce", 4, 2 * 4096 * batch)
    assert spread.cost.collectives_s[batch] == pytest.approx(float(sums))
    sums = 189 * nccl.time_s("all_reduce", 4, 2 * 4096 * tokens)
    assert spread.cost.collectives_s[tokens] == pytest.approx(float(sums))
    gather = nccl.time_s("all_gather", 4, 2 * 151936 * batch)
    head = gemm.time_s(151936 // 4, 4096, batch)
    assert spread.cost.head_s[batch] == pytest.approx(float(head + gather))


def test_links_of_a_mesh_carry_their_share_only():
    """MI300X: 64 GB/s to each peer; NVSwitch gives any peer all of 450 GB/s."""
    assert load_gpu("MI300X").peer_bandwidth(4) == 3 * 64e9
    assert load_gpu("MI300X").peer_bandwidth(8) == 448e9
    assert load_gpu("H100").peer_bandwidth(2) == load_gpu("H100").peer_bandwidth(8) == 450e9


def test_roofline_collectives_lie_near_the_measured_ones():
    """What stands in where nothing was measured, against H100's tables, 4 GPUs."""
    gpu = load_gpu("H100")
    custom = CollectiveLatency.from_table(find_table("collective", "H100", dtype="bfloat16"))
    nccl = CollectiveLatency.from_table(find_table("collective", "H100", dtype="float16"))
    for n_bytes in (8e3, 64e3, 512e3, 4e6):
        ratio = roofline.all_reduce_s(gpu, 4, n_bytes) / custom.time_s("all_reduce", 4, n_bytes)
        assert 0.55 < ratio < 1.2
    for operation, estimate in (
        ("all_reduce", roofline.all_reduce_s),
        ("all_gather", roofline.all_gather_s),
    ):
        ratio = estimate(gpu, 4, 64e6) / nccl.time_s(operation, 4, 64e6)
        assert 0.85 < ratio < 1.15


# -- the MoE layer of a rank -------------------------------------------------------------------


def _rank_and_whole(gpu, size):
    def table(ranks):
        return find_table("moe", gpu, shape=moe_shape(4096, 1536, 128, 8, ranks), dtype="bfloat16")

    return table(size), fit_moe_latency(table(size)), fit_moe_latency(table(1)).on_rank(size)


@on_each("gpu", ["H100", "H200", "B200"])
@on_each("size", [2, 4, 8])
def test_rank_tables_count_what_one_rank_activates(gpu, size):
    """Balanced routing gives a rank k / R experts a token until all E / R are active."""
    table, fitted, _ = _rank_and_whole(gpu, size)
    balanced = table.columns["routing"] == "balanced"
    batch = table.columns["batch"][balanced]
    expected = np.minimum(128 // size, 8 * batch // size)
    assert table.columns["distinct_experts"][balanced].tolist() == expected.tolist()
    assert (fitted.n_experts, fitted.top_k) == (128 // size, 8 / size)
    assert fitted.fit_error["leave_one_out_mean"] < 0.08


@pytest.mark.parametrize(
    ("gpu", "size", "decode", "prefill"),
    [
        ("H100", 2, 0.04, 0.07),
        ("H100", 4, 0.07, 0.25),
        ("H100", 8, 0.14, 0.43),
        ("H200", 2, 0.03, 0.08),
        ("H200", 4, 0.08, 0.24),
        ("H200", 8, 0.15, 0.42),
        ("B200", 4, 0.06, 0.08),
    ],
)
def test_whole_layer_read_at_the_ranks_count_against_measured_ranks(gpu, size, decode, prefill):
    """Qwen3-235B's balanced rows of one rank: what the fallback misses, up to and past 512 tokens.

    Vendor rows show fixed costs of expert-parallel kernels that no table of a whole layer holds,
    which is why measured ranks take precedence.
    """
    table, _, fallback = _rank_and_whole(gpu, size)
    balanced = table.columns["routing"] == "balanced"
    batch, distinct, latency = (
        table.columns[name][balanced] for name in ("batch", "distinct_experts", "latency_s")
    )
    error = np.abs(fallback.time_s(batch, distinct) / latency - 1)
    assert error[batch <= 512].mean() < decode
    assert error[batch > 512].mean() < prefill


def test_a_rank_reads_its_experts_like_the_whole_layer_and_computes_its_share():
    shape = moe_shape(4096, 1536, 128, 8)
    whole = fit_moe_latency(find_table("moe", "H100", shape=shape, dtype="bfloat16"))
    rank = whole.on_rank(4)
    batch = np.arange(1, 17)[:, None]  # more tokens on one expert would be bound by compute
    np.testing.assert_allclose(
        rank.time_s(batch, np.arange(1, 33)), whole.time_s(batch, np.arange(1, 33)), rtol=1e-12
    )
    compute = (rank.time_s(1e6, 1) - rank.expert_s[0]) / (whole.time_s(1e6, 1) - whole.expert_s[0])
    assert compute == pytest.approx(1 / 4)
    assert whole.on_rank(1) is whole


def test_provenance_names_where_the_ranks_came_from():
    measured, taken = build(), build("Qwen3-30B-A3B", "H200", Parallelism(4, True))
    assert measured.provenance["moe"]["label"] == "imported"
    assert taken.provenance["moe"]["label"] == "derived"
    assert "one of 4 ranks" in taken.provenance["moe"]["origin"]
    assert measured.provenance["collectives"]["label"] == "imported"
    assert build(gpu="MI300X").provenance["collectives"]["label"] == "derived"


@on_each("name", list_models())
def test_stages_together_hold_all_layers(name):
    """The fullest stage also has a layer of those that do not divide."""
    model = load_model(name)
    for stages in (2, 3, 5, 7):
        split = Parallelism(pipeline_parallel_size=stages)
        held, layers = split.kv_bytes_per_token(model), -(-model.n_layers // stages)
        assert held * model.n_layers >= layers * model.kv_bytes_per_token
