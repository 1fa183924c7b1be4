"""No priced time lies below the roofline of its own device: all GPUs, models, parts and tables."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.kernel_profiles.gpus import list_gpus, load_gpu
from eldr_sim.kernel_profiles.kernels import bounds, roofline
from eldr_sim.kernel_profiles.kernels.all_to_all import build_all_to_all
from eldr_sim.kernel_profiles.models import list_models, load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.kernel_profiles.tables.format import LatencyTable
from eldr_sim.kernel_profiles.tables.library import shipped_tables

from ..on_each import on_each

MODELS = (
    "Qwen3-30B-A3B", "GPT-OSS-120B", "DeepSeek-V3", "MiniMax-M2.5", "Qwen3.5-397B-A17B-NVFP4",
    "Llama-3.1-8B-FP8", "DeepSeek-V4-Pro", "Qwen3-235B-A22B-FP8",
)  # fmt: skip
CONTEXT, PROMPT = 6000, 2048


def build(model, gpu, layout, tables=()):
    return build_step_time_model(
        model, gpu, max_num_seqs=64, max_model_len=8192, max_num_batched_tokens=PROMPT,
        parallelism=layout, tables=tables,
    )  # fmt: skip


def peak(gpu):
    return max(gpu.bf16_flops, gpu.fp8_flops, gpu.fp4_flops)


def check(steps, batch):
    """By hand, of one GPU: weights and caches over the bandwidth, products over the peak."""
    gpu = steps.gpu
    own = steps.parallelism.shard(steps.model)
    experts = own.n_experts // steps.parallelism.n_expert_ranks
    activated = np.full(own.n_moe_layers, min(experts, batch * own.top_k), float)
    decode = steps.parts(batch, batch * CONTEXT, activated=activated)
    slack = 1 - 1e-9
    read = activated.sum() * own.bytes_per_expert
    assert decode.moe >= slack * read / gpu.memory_bandwidth
    routed = own.n_moe_layers * own.n_experts * own.bytes_per_expert
    rest = own.weight_bytes - routed - 2 * (own.embedding_params + own.lm_head_params)
    assert decode.dense + decode.attention >= 0.97 * rest / gpu.memory_bandwidth
    cached = own.kv_bytes(CONTEXT) - own.state_bytes
    if not own.index_topk:
        assert decode.attention >= 0.99 * batch * cached / gpu.memory_bandwidth

    prompt = steps.parts(chunks=[(0, PROMPT)])
    multiplied = own.active_params - own.embedding_params - own.lm_head_params
    routed = own.n_moe_layers * own.top_k * own.params_per_expert
    pairs = PROMPT * routed * (1 / steps.parallelism.n_expert_ranks)
    assert prompt.moe >= 0.97 * 2 * pairs / peak(gpu)
    assert prompt.dense >= 0.9 * 2 * PROMPT * (multiplied - routed) / peak(gpu)
    if own.attention == "gqa" and not own.n_sliding_layers:
        flops = own.n_full_layers * 4 * own.n_heads * own.head_dim * PROMPT**2 / 2
        assert prompt.attention >= flops / gpu.bf16_flops
    if own.attention == "mla" and not own.index_topk:
        width = own.qk_nope_head_dim + own.qk_rope_head_dim + own.v_head_dim
        flops = own.n_layers * 2 * own.n_heads * width * PROMPT**2 / 2
        assert prompt.attention >= flops / gpu.bf16_flops
    if steps.parallelism.tensor_parallel_size > 1:
        sent = 2 * own.n_layers * 2 * own.hidden_size * PROMPT
        ranks = steps.parallelism.tensor_parallel_size
        least = sent * (ranks - 1) / ranks / gpu.peer_bandwidth(ranks)
        assert prompt.collectives >= least


@pytest.mark.parametrize("part", [6, pytest.param(2, marks=pytest.mark.slow)])
@on_each("name", list_gpus())
def test_no_known_gpu_beats_its_own_peaks(name, part):
    """INV-14."""
    for at, model in enumerate(MODELS[list_gpus().index(name) % part :: part]):
        layout = Parallelism(8, at % 2 == 1) if at % 4 > 1 else Parallelism(1)
        check(build(model, name, layout), 1 + 7 * at)


PEAKS = st.floats(0.02, 6.0)


@settings(max_examples=12, deadline=None)
@given(
    sibling=st.sampled_from(["H100", "H200", "A100", "B200", "L40S", "MI300X"]),
    model=st.sampled_from(MODELS),
    compute=PEAKS,
    memory=PEAKS,
    links=PEAKS,
    batch=st.integers(1, 64),
    tensor=st.sampled_from([1, 4]),
)
def test_no_gpu_beats_its_own_peaks_by_its_sibling(
    sibling, model, compute, memory, links, batch, tensor
):
    """Whatever a user says of a GPU whose tables are another's."""
    other = load_gpu(sibling)
    gpu = other.model_copy(
        update={
            "name": "mine",
            "sibling": sibling,
            "memory_bandwidth": memory * other.memory_bandwidth,
            "intra_node_bandwidth": links * other.intra_node_bandwidth,
        }
        | {
            name: compute * getattr(other, name)
            for name in ("bf16_flops", "fp8_flops", "fp4_flops")
        }
    )
    check(build(model, gpu, Parallelism(tensor)), batch)


@on_each("name", list_gpus())
def test_no_roofline_reaches_the_peaks(name):
    """Before the bounds that hold every time: a fraction of a peak is below one."""
    gpu = load_gpu(name)
    for model in map(load_model, MODELS):
        if not model.is_dense:
            moe = roofline.moe_latency(gpu, model)
            read_s, token_s = bounds.expert_s(gpu, model)
            assert (np.diff(moe.expert_s) > read_s).all()
            assert moe.token_s > model.top_k * token_s
        least = bounds.attention(gpu, model, sliding=False)
        decode = roofline.decode_attention(gpu, model, sliding=False)
        found, bound = decode.seconds, least.decode_s(decode.batch, decode.context)
        assert (np.diff(found, axis=0) >= np.diff(bound, axis=0)).all()
        assert (found[1:, 1:] - found[1:, :1] > bound[1:, 1:] - bound[1:, :1]).all()
        prompt = roofline.prefill_attention(gpu, model, False, 512)
        assert prompt.share_s[-1] > least.pair_s * bounds.causal_pairs(512.0, least.limit)
    for rows in (1, 8192):
        assert roofline.gemm_s(gpu, 4096, 4096, rows) > bounds.linear_s(
            gpu, 4096, 4096, rows, "bfloat16"
        )
    for time_of in (roofline.all_reduce_s, roofline.all_gather_s):
        sent = (2 if time_of is roofline.all_reduce_s else 1) * 1e9 / 2
        assert time_of(gpu, 2, 1e9) > sent / gpu.peer_bandwidth(2)


def test_no_table_of_the_users_beats_the_peaks():
    """A table says a nanosecond for everything, as one does whose unit was mistaken."""
    of = [one for one in shipped_tables() if one.gpu == "H100" and one.kind != "host_gap"]
    fast = []
    for one in of:
        table = one.load()
        columns = dict(table.columns) | {"latency_s": np.full(len(table), 1e-9)}
        fast.append(LatencyTable(table.metadata, columns))
    for model in ("Qwen3-30B-A3B", "DeepSeek-V3"):
        check(build(model, "H100", Parallelism(8), tuple(fast)), 16)


@pytest.mark.parametrize("backend", ["deepep_ll", "deepep_ht", "nccl_alltoall", "pplx"])
def test_dispatch_is_no_faster_than_links_and_network(backend):
    model = load_model("DeepSeek-V3")
    for name in ("H100", "H800", "H100-PCIe", "B200"):
        gpu = load_gpu(name)
        group = build_all_to_all(model, gpu, backend, 16)
        cost = group.cost
        for copies in (1.0, 100.0, 1e4, 1e6):
            sent = cost.dispatch_bytes * copies
            near = sent / gpu.peer_bandwidth(8)
            assert group.dispatch_s(copies, 0.0) >= near * (1 - 1e-9)
            assert group.dispatch_s(0.0, copies) >= sent / gpu.nic_bandwidth * (1 - 1e-9)


def test_every_model_names_types_whose_peak_is_known():
    for name in list_models():
        model = load_model(name)
        for gpu in map(load_gpu, list_gpus()):
            assert gpu.most_flops(model.expert_dtype) >= gpu.bf16_flops
            assert gpu.most_flops(model.linear_dtype) >= gpu.bf16_flops
