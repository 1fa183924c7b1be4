"""MoE-Prefill's Table 1: rings run chunk by chunk, and tokens sent one by one."""

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels.all_to_all import build_all_to_all
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.steps.weight_streaming import plan_stream
from studies.moe_prefill.tables import STRATEGIES, break_even_tokens, layer_bytes

QWEN, QWEN_FP8 = load_model("Qwen3-235B-A22B"), load_model("Qwen3-235B-A22B-FP8")


def ring_all_gather(parts):
    """Pass parts on until every rank has all; the bytes that each rank sends."""
    n = len(parts)
    have, sent = [{rank} for rank in range(n)], [0] * n
    for turn in range(n - 1):
        for rank in range(n):
            part = (rank - turn) % n
            assert part in have[rank]
            have[(rank + 1) % n].add(part)
            sent[rank] += parts[part]
    assert all(len(owned) == n for owned in have)
    return sent


@pytest.mark.parametrize("n_gpus", [2, 4, 8])
def test_collectives_are_rings(n_gpus):
    """A reduce-scatter is an all-gather run backwards, an all-reduce is both."""
    tokens = 8192
    hidden = np.mean(ring_all_gather([2 * 4096 * tokens // n_gpus] * n_gpus))
    kv = np.mean(ring_all_gather([2 * 2 * 4 * 128 * tokens // n_gpus] * n_gpus))
    experts = np.mean(ring_all_gather([128 // n_gpus * QWEN.bytes_per_expert] * n_gpus))

    def sent(strategy):
        return layer_bytes(strategy, QWEN, n_gpus, tokens)

    assert sent("dp_dp") == 0
    assert sent("dp_tp") == pytest.approx(2 * hidden)
    assert sent("tp_tp") == pytest.approx(2 * 2 * hidden)
    assert sent("sp_tp") == pytest.approx(kv + 2 * hidden)
    assert sent("dp_async") == pytest.approx(experts)
    assert sent("tp_ep") == pytest.approx(sent("dp_ep") + 2 * hidden)
    assert sent("sp_ep") == pytest.approx(sent("dp_ep") + kv)


@pytest.mark.parametrize("copy_per_rank", [False, True])
def test_tokens_sent_one_by_one(copy_per_rank):
    """Dispatch and combine of random tokens between 8 ranks, 16 experts each."""
    rng, n_ranks, tokens = np.random.default_rng(5), 8, 4000
    copies = reached = 0
    for home in rng.integers(n_ranks, size=tokens):
        ranks = (rng.permutation(128)[:8] // 16).tolist()
        reached += len(set(ranks))
        copies += sum(rank != home for rank in (set(ranks) if copy_per_rank else ranks))
    assert reached / tokens == pytest.approx(5.34, abs=0.05)
    by_hand = 2 * copies * 2 * 4096 / n_ranks
    got = layer_bytes("dp_ep", QWEN, n_ranks, tokens, copy_per_rank=copy_per_rank)
    assert got == pytest.approx(by_hand, rel=0.02)
    each = 5.3400 if copy_per_rank else 8
    assert got == pytest.approx(2 * each * 7 / 8 * tokens / 8 * 2 * 4096, rel=1e-3)


def test_the_time_model_sends_the_same_bytes():
    """What dispatch and combine are timed by, for a backend that sends a copy for each expert."""
    group = build_all_to_all(QWEN, load_gpu("H100"), "pplx", 8)
    inside, between = group.uniform_copies(QWEN)
    per_token = (group.cost.dispatch_bytes + group.cost.combine_bytes) * inside
    assert between == 0
    # A token of each rank: 8 of the step.
    assert layer_bytes("dp_ep", QWEN, 8, 8) == pytest.approx(per_token)
    plan = plan_stream(QWEN, load_gpu("H100"), 8)
    assert layer_bytes("dp_async", QWEN, 8, 0) == pytest.approx(plan.layer_bytes * 7 / 8)


def test_pipelines_send_once_a_stage():
    """8 stages of 94 layers: 7 of them send 8,192 hidden states and residuals."""
    stages, tokens = 8, 8192
    sent = [2 * 2 * 4096 * tokens] * (stages - 1) + [0]
    assert layer_bytes("pp_pp", QWEN, stages, tokens) == pytest.approx(sum(sent) / 94)


def test_break_even_by_hand():
    """``3 E m_e / (2 k)`` tokens a GPU; experts in FP8 weigh half, tokens do not."""
    tokens = 3 * 128 * 1536 / (2 * 8)
    assert tokens == 36_864
    for n_gpus in (2, 4, 8):
        assert break_even_tokens(QWEN, n_gpus) == pytest.approx(tokens)
    assert break_even_tokens(QWEN_FP8, 8) == pytest.approx(tokens / 2, rel=1e-3)
    assert break_even_tokens(QWEN, 8, copy_per_rank=True) == pytest.approx(
        tokens * 8 / 5.34, rel=1e-3
    )
    below = layer_bytes("dp_async", QWEN, 8, 0) / layer_bytes("dp_ep", QWEN, 8, 8 * 8192)
    assert below == pytest.approx(4.5)


def test_one_gpu_sends_nothing_and_nonsense_is_refused():
    assert {layer_bytes(strategy, QWEN, 1, 8192) for strategy in STRATEGIES} == {0.0}
    with pytest.raises(InputError, match="strategy"):
        layer_bytes("ep_ep", QWEN, 8, 1)
    with pytest.raises(InputError, match="n_gpus"):
        layer_bytes("dp_ep", QWEN, 3, 1)
    with pytest.raises(InputError, match="2 or more"):
        break_even_tokens(QWEN, 1)
