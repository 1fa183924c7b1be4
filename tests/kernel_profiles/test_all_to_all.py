"""Dispatch and combine: who sends what how often, and how long it takes."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels.all_to_all import (
    BACKENDS,
    COPY_PER,
    NETWORK_EFFICIENCY,
    build_all_to_all,
    uniform_copies,
)
from eldr_sim.kernel_profiles.kernels.all_to_all_cost import (
    busiest_all,
    busiest_direct,
    busiest_forwarded,
    combine_s,
    dispatch_s,
)
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.tables.library import find_table

from ..on_each import on_each

DEEPSEEK = load_model("DeepSeek-V3")


def _routed(rng, n_ranks, gpus_per_node, n_experts, top_k, n_tokens):
    """Tokens at home on random ranks, and the ranks of their experts, copy by copy."""
    homes = rng.integers(n_ranks, size=n_tokens)
    chosen = [rng.permutation(n_experts)[:top_k] for _ in homes]
    return [
        (int(home), [int(e) * n_ranks // n_experts for e in experts])
        for home, experts in zip(homes, chosen, strict=True)
    ]


def _counts(routed, n_ranks, gpus_per_node):
    tokens = np.zeros(n_ranks, np.int64)
    pairs = np.zeros((n_ranks, n_ranks), np.int64)
    ranks = np.zeros((n_ranks, n_ranks), np.int64)
    nodes = np.zeros((n_ranks, -(-n_ranks // gpus_per_node)), np.int64)
    for home, owners in routed:
        tokens[home] += 1
        for owner in owners:
            pairs[home, owner] += 1
        for owner in set(owners):
            ranks[home, owner] += 1
        for node in {owner // gpus_per_node for owner in owners}:
            nodes[home, node] += 1
    return tokens, pairs, ranks, nodes


def _links(routed, n_ranks, gpus_per_node, per):
    """Every copy from GPU to GPU, one by one."""
    for home, owners in routed:
        if per == "all":
            for rank in range(n_ranks):
                yield home, rank
        elif per == "expert":
            for owner in owners:
                yield home, owner
        elif per == "rank":
            for owner in set(owners):
                yield home, owner
        else:
            for node in {owner // gpus_per_node for owner in owners}:
                there = node * gpus_per_node + home % gpus_per_node
                yield home, there
                for owner in {o for o in owners if o // gpus_per_node == node}:
                    yield there, owner


def _busiest(links, n_ranks, gpus_per_node):
    moved = np.zeros((2, 2, n_ranks))  # tier, direction
    for sender, receiver in links:
        if sender != receiver:
            far = int(sender // gpus_per_node != receiver // gpus_per_node)
            moved[far, 0, sender] += 1
            moved[far, 1, receiver] += 1
    return moved[0].max(), moved[1].max()


@given(
    st.integers(0, 10_000),
    st.sampled_from([(2, 8), (4, 2), (8, 8), (8, 4), (16, 8), (12, 4)]),
    st.integers(1, 6),
    st.integers(0, 40),
)
def test_copies_are_those_of_a_count_link_by_link(seed, shape, top_k, n_tokens):
    n_ranks, node = shape
    routed = _routed(np.random.default_rng(seed), n_ranks, node, 48, top_k, n_tokens)
    tokens, pairs, ranks, nodes = _counts(routed, n_ranks, node)
    found = {
        "expert": busiest_direct(pairs, node),
        "rank": busiest_direct(ranks, node),
        "node": busiest_forwarded(ranks, nodes, node),
    }
    for per, copies in found.items():
        assert copies == _busiest(_links(routed, n_ranks, node, per), n_ranks, node)
    inside, between = busiest_all(tokens, node)
    received = np.zeros(n_ranks, int)
    for sender, receiver in _links(routed, n_ranks, node, "all"):
        received[receiver] += sender != receiver
    assert inside == received.max()
    own = [tokens[n : n + node].sum() for n in range(0, n_ranks, node)]
    assert between == max((tokens.sum() - mine) / min(node, n_ranks) for mine in own)


def test_uniform_copies_are_the_closed_forms():
    """A token with 8 random of 128 experts reaches 5.339 of 8 ranks and 1.994 of 2 nodes."""
    inside, between = uniform_copies("nccl_alltoall", 128, 8, 8, 8)
    assert inside * 8 / 7 == pytest.approx(5.339, abs=5e-4)
    assert between == 0
    _, between = uniform_copies("deepep_ht", 128, 8, 16, 8)
    assert 2 * between == pytest.approx(1.994, abs=5e-4)
    assert uniform_copies("deepep_ll", 256, 8, 16, 8) == (7 * 0.5, 8 * 0.5)
    assert uniform_copies("allgather_reducescatter", 256, 8, 32, 8) == (31, 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_uniform_copies_are_the_mean_over_all_choices(backend):
    """Every choice of 2 of 8 experts once, from every rank: 4 ranks on 2 nodes."""
    routed = [
        (home, [e * 4 // 8 for e in experts])
        for home in range(4)
        for experts in combinations(range(8), 2)
    ]
    moved = list(_links(routed, 4, 2, COPY_PER[backend]))
    inside, between = uniform_copies(backend, 8, 2, 4, 2)
    each = len(routed) / 4
    if backend == "allgather_reducescatter":
        tokens = np.full(4, int(each))
        assert busiest_all(tokens, 2) == (inside * each, between * each)
    else:
        assert _busiest(moved, 4, 2) == pytest.approx((inside * each, between * each))


@on_each("gpu", ["H100", "A100", "GB200"])
@on_each("backend", BACKENDS)
def test_compiled_times_are_the_plain_ones(backend, gpu):
    found = build_all_to_all(DEEPSEEK, load_gpu(gpu), backend, 16, gpus_per_node=4)
    for inside in (0.0, 1.0, 37.5, 3e3, 1e7):
        for between in (0.0, 2.0, 5e3, 1e7):
            for name, compiled in (("dispatch_s", dispatch_s), ("combine_s", combine_s)):
                plain = getattr(found, name)(inside, between)
                assert compiled(found.cost, inside, between) == pytest.approx(plain, rel=1e-12)
                assert plain >= getattr(found, name)(0.0, 0.0) > 0


def test_rows_are_met_where_the_shape_was_measured():
    table = find_table("all_to_all", "H200", shape={}, library="sglang")
    assert table is not None
    rows = table.columns
    found = build_all_to_all(DEEPSEEK, load_gpu("H200"), "deepep_ll", 8)
    assert found.label == "imported"
    inside, _ = found.uniform_copies(DEEPSEEK)
    shape = (rows["hidden_size"] == 7168) & (rows["n_experts"] == 256) & (rows["top_k"] == 8)
    for phase in ("dispatch", "combine"):
        own = shape & (rows["backend"] == "deepep_ll") & (rows["phase"] == phase)
        assert own.sum() > 8
        for tokens, latency in zip(rows["tokens"][own], rows["latency_s"][own], strict=True):
            predicted = getattr(found, f"{phase}_s")(tokens * inside, 0.0)
            assert predicted == pytest.approx(latency, rel=0.03)


@pytest.mark.parametrize("n_nodes", [2, 4, 8])
def test_the_derived_network_meets_rows_between_nodes(n_nodes):
    """The line rate alone, on rows of DeepEP between H100 nodes that it has not seen."""
    table = find_table("all_to_all", "H100", shape={"n_nodes": n_nodes}, library="sglang")
    assert table is not None
    rows = table.columns
    # vLLM's table has no rows between nodes; of SGLang's, take what lies inside a node.
    near = build_all_to_all(DEEPSEEK, load_gpu("H100"), "deepep_ll", 8 * n_nodes)
    line = build_all_to_all(DEEPSEEK, load_gpu("H100"), "deepep_ll", 8 * n_nodes, library="vllm")
    assert near.provenance["network"]["label"] == "imported"
    assert line.provenance["network"]["label"] == "derived"
    inside, between = near.uniform_copies(DEEPSEEK)
    shape = (rows["backend"] == "deepep_ll") & (rows["n_experts"] == 256)
    error = []
    for phase in ("dispatch", "combine"):
        own = shape & (rows["phase"] == phase) & (rows["tokens"] >= 48)
        floor = getattr(line, f"{phase}_s")(0.0, 0.0) - getattr(near, f"{phase}_s")(0.0, 0.0)
        for tokens, latency in zip(rows["tokens"][own], rows["latency_s"][own], strict=True):
            derived = getattr(line, f"{phase}_s")(0.0, tokens * between) - floor
            error.append(derived / latency - 1)
            imported = getattr(near, f"{phase}_s")(tokens * inside, tokens * between)
            assert imported == pytest.approx(latency, rel=0.05)
    assert np.abs(error).mean() < 0.05
    assert np.abs(error).max() < 0.10


def test_bytes_decide_and_fp8_halves_them():
    bf16 = DEEPSEEK.model_copy(update={"expert_dtype": "bfloat16"})
    whole, half = (build_all_to_all(m, load_gpu("B200"), "deepep_ht", 16) for m in (bf16, DEEPSEEK))
    assert whole.cost.dispatch_bytes == 2 * 7168
    assert half.cost.dispatch_bytes == 7168 + 4 * 56
    assert whole.dispatch_s(0, 1e5) > 1.8 * half.dispatch_s(0, 1e5)
    assert whole.combine_s(0, 1e5) == half.combine_s(0, 1e5)
    rate = 1e5 * 7392 / (half.dispatch_s(0, 1e5) - half.dispatch_s(0, 0))
    assert rate == pytest.approx(NETWORK_EFFICIENCY * load_gpu("B200").nic_bandwidth, rel=0.01)


def test_both_sources_can_be_compared():
    """vLLM's calls take 2 times as long or more at small batches, as its rows say."""
    for backend in ("deepep_ll", "deepep_ht"):
        kernels, calls = (
            build_all_to_all(DEEPSEEK, load_gpu("H200"), backend, 8, library=library)
            for library in ("sglang", "vllm")
        )
        assert "sglang" in kernels.provenance["all_to_all"]["framework"]
        assert "vllm" in calls.provenance["all_to_all"]["framework"]
        assert calls.dispatch_s(56, 0) > 2 * kernels.dispatch_s(56, 0)


def test_labels_and_warnings():
    mixtral = load_model("Mixtral-8x7B")
    roofline = build_all_to_all(mixtral, load_gpu("A100"), "deepep_ll", 8)
    assert roofline.label == "roofline"
    assert len(roofline.warnings) == 1
    assert "DeepEP" in roofline.warnings[0]
    nccl = build_all_to_all(mixtral, load_gpu("A100"), "allgather_reducescatter", 8)
    assert nccl.label == "imported"
    assert build_all_to_all(mixtral, load_gpu("A100"), "nccl_alltoall", 16).label == "derived"
    assert build_all_to_all(mixtral, load_gpu("H100"), "deepep_ll", 4).label == "derived"


def test_what_cannot_be_is_refused():
    h100 = load_gpu("H100")
    with pytest.raises(InputError, match="deepep_ll"):
        build_all_to_all(DEEPSEEK, h100, "deepep", 8)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="whole nodes"):
        build_all_to_all(DEEPSEEK, h100, "deepep_ll", 12)
    with pytest.raises(InputError, match="sglang, vllm"):
        build_all_to_all(DEEPSEEK, h100, "deepep_ll", 8, library="trtllm")  # type: ignore[arg-type]


def test_the_nics_of_a_node_that_is_filled_in_part_share_what_comes():
    """Six ranks on nodes of four: the two of the second node take the first one's tokens."""
    tokens = np.array([1, 2, 3, 4, 5, 6])
    assert busiest_all(tokens, 4) == (20, 10 / 2)
    assert busiest_all(tokens[::-1].copy(), 4) == (20, 18 / 2)
