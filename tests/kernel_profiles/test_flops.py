"""FLOPs of prefill against the paper's formulas, and against pairs counted one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels.flops import PrefillWork, mfu, prefill_flops, prefill_work
from eldr_sim.kernel_profiles.kernels.roofline import efficiency_of, prefill_attention
from eldr_sim.kernel_profiles.models import load_model

QWEN = load_model("Qwen3-235B-A22B")  # 94 layers of 4,096: 64 query and 4 KV heads of 128


def test_qwen_by_hand():
    """Every matrix of a layer by its published shape; the paper's A is 20.9e9."""
    attention = 4096 * 128 * (64 + 2 * 4) + 64 * 128 * 4096 + 2 * 128
    layer = attention + 4096 * 128 + 8 * 3 * 4096 * 1536 + 2 * 4096
    active = 94 * layer + 4096
    assert active == pytest.approx(20.9e9, rel=0.003)
    work = prefill_work(QWEN)
    assert work == PrefillWork(2.0 * active, 94 * 4.0 * 64 * 128)
    assert work.token_flops == pytest.approx(41.8e9, rel=0.003)


@pytest.mark.parametrize(("new", "cached"), [(8192, 0), (8192, 24576), (131_072, 0)])
def test_the_papers_formulas(new, cached):
    """Up to the diagonal of the mask: 1 pair of each new token's."""
    f_lin = 2 * 20.946e9 * new
    f_self, f_cross = 2 * 94 * 64 * 128 * new**2, 4 * 94 * 64 * 128 * new * cached
    assert prefill_flops(QWEN, new, cached) == pytest.approx(f_lin + f_self + f_cross, rel=1e-4)


def test_attention_of_long_prompts():
    """At 128K tokens attention makes a prompt 5.8 times as much as its linear layers."""
    n = 131_072
    assert prefill_flops(QWEN, n) / (prefill_work(QWEN).token_flops * n) == pytest.approx(
        5.8, abs=0.05
    )


@pytest.mark.parametrize("name", ["Qwen3-235B-A22B", "GPT-OSS-120B", "Gemma-4-26B-A4B"])
@given(chunks=st.lists(st.integers(0, 9000), min_size=1, max_size=6), cached=st.integers(0, 9000))
def test_chunks_add_up_to_the_whole(name, chunks, cached):
    work = prefill_work(load_model(name))
    total, done = 0.0, cached
    for chunk in chunks:
        total += work.flops(chunk, done)
        done += chunk
    assert total == pytest.approx(work.flops(sum(chunks), cached), rel=1e-12)
    assert work.flops(done) == pytest.approx(work.flops(cached) + total, rel=1e-12)


@given(new=st.integers(0, 40), cached=st.integers(0, 40), window=st.integers(1, 30))
def test_windows_one_pair_at_a_time(new, cached, window):
    work = PrefillWork(token_flops=0.0, pair_flops=1000.0, sliding_pair_flops=1.0, window=window)
    full = near = 0
    for query in range(cached, cached + new):
        for key in range(query + 1):
            full += 1
            near += query - key < window
    assert work.flops(new, cached) == 1000 * full + near


def test_mla_counts_expanded_heads():
    model = load_model("DeepSeek-V3")
    assert prefill_work(model).pair_flops == 61 * 2 * 128 * (128 + 64 + 128)


def test_mfu_by_hand():
    """The paper's peak: 1,979 TFLOP/s of FP8 (1,978 in the tables), A100 without FP8 units."""
    assert load_gpu("H100").peak_flops(fp8=True) == pytest.approx(1979e12, rel=1e-3)
    assert load_gpu("H100").peak_flops(fp8=False) == 989e12
    assert load_gpu("A100").peak_flops(fp8=True) == 312e12
    assert mfu(flops=3e15, seconds=2.0, peak_flops=5e15) == 0.3


@pytest.mark.parametrize("name", ["H100", "H200", "A100-80GB", "B200", "MI300X"])
@pytest.mark.parametrize(("model", "window"), [("Qwen3-235B-A22B", 0), ("GPT-OSS-20B", 128)])
def test_a_roofline_prompt_takes_its_flops_at_the_efficiency_of_its_gpu(name, model, window):
    """Pairs under the mask counted one by one, 4 FLOPs of each head's width a pair."""
    gpu, dims = load_gpu(name), load_model(model)
    attention = prefill_attention(gpu, dims, bool(window), 300)
    pairs = sum(min(at, window or at) for at in range(1, 301))
    heads, _, width = dims.heads(bool(window))
    flops = attention.share_s[300] * efficiency_of(gpu).attention_flops * gpu.bf16_flops
    assert flops == pytest.approx(pairs * 4.0 * heads * width)
    assert attention.alone_s[300] == attention.floor_s + attention.share_s[300]
