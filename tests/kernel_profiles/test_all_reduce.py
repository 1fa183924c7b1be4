"""All-reduces by engine: whose rows, and where one kernel adds the norm."""

import numpy as np
import pytest

from eldr_sim.kernel_profiles.gpus import list_gpus, load_gpu
from eldr_sim.kernel_profiles.kernels.all_reduce import fused_tokens
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.collectives import Collectives
from eldr_sim.kernel_profiles.tables.library import Engine, find_table

ROWS = np.array([1.0, 4.0, 16.0, 64.0])


def collectives(model, gpu, n_gpus, engine, tables=(), **layout):
    parallelism = Parallelism(n_gpus, **layout)
    shard = parallelism.shard(load_model(model))
    return Collectives(shard, load_gpu(gpu), parallelism, tables, engine)


@pytest.mark.parametrize(
    ("engine", "model", "gpu", "n_gpus", "tokens"),
    [
        ("trtllm", "Llama-3.1-70B", "H100", 4, 8 * 2**20 // 2**14),
        ("vllm", "Llama-3.1-70B", "H100", 2, 64 * 2**20 // 2**14),
        ("vllm", "Llama-3.1-70B", "H100", 4, 2 * 2**20 // 2**14),
        ("vllm", "Llama-3.1-70B", "H200", 8, 2**19 // 2**14),
        ("vllm", "Llama-3.1-70B", "B200", 8, 2**20 // 2**14),
        ("vllm", "Llama-3.1-70B", "B300", 8, 4 * 2**20 // 2**14),
        ("vllm", "Llama-3.1-70B", "A100", 4, 0),
        ("vllm", "Llama-3.1-70B", "MI300X", 8, 0),
        ("vllm==0.16.0", "Llama-3.1-70B", "H100", 2, 0),
        ("vllm==0.17", "Llama-3.1-70B", "H100", 2, 64 * 2**20 // 2**14),
        ("vllm==0.18", "Llama-3.1-70B", "B300", 2, 0),
        ("sglang", "Llama-3.1-70B", "H100", 2, 0),
        ("sglang", "MiniMax-M2.5", "B200", 8, 0),
        ("sglang", "Qwen3.5-397B-A17B", "B200", 8, 0),
        ("sglang", "DeepSeek-V3", "H200", 8, 2048),
        ("sglang", "GLM-4.6", "B200", 8, 2048),
        ("sglang", "GPT-OSS-120B", "H20", 8, 0),
        ("sglang", "GPT-OSS-120B", "A100", 8, 0),
    ],
)
def test_engines_fuse_what_their_code_says(engine, model, gpu, n_gpus, tokens):
    name, _, version = engine.partition("==")
    own = load_model(model)
    assert fused_tokens(own, load_gpu(gpu), n_gpus, Engine(name, version)) == tokens


def test_a_fused_all_reduce_takes_the_rows_of_its_kernel():
    fused = collectives("DeepSeek-V3", "B200", 8, Engine("sglang"))
    table = find_table("collective", "B200", dtype="bfloat16", engine=Engine("trtllm"))
    rows = table.columns["n_gpus"] == 8
    sizes, seconds = table.columns["message_bytes"][rows], table.columns["latency_s"][rows]
    at = 14336 * 32
    index = np.searchsorted(sizes, at)
    between = np.interp(at, sizes[index - 1 : index + 1], seconds[index - 1 : index + 1])
    assert fused.step_s(np.array([32.0])) == pytest.approx((1 + 2 * 61) * between, rel=0.05)
    assert "trtllm" in fused.tables[0].metadata.framework


def test_beyond_the_limit_engines_take_their_own():
    new, old = (
        collectives("GPT-OSS-120B", "H200", 8, Engine("vllm", version)) for version in ("", "0.16")
    )
    limit = new.fused_tokens
    beyond = np.array([limit + 1.0, 4 * limit])
    assert new.step_s(beyond) == pytest.approx(old.step_s(beyond))
    assert new.step_s(np.array([1.0])) < old.step_s(np.array([1.0]))


@pytest.mark.parametrize("gpu", list_gpus())
@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_a_step_grows_with_its_tokens_and_one_gpu_sends_nothing(gpu, engine):
    alone = collectives("GPT-OSS-120B", gpu, 1, Engine(engine))
    assert not alone.step_s(ROWS).any()
    assert alone.fused_tokens == 0
    taken = collectives("GPT-OSS-120B", gpu, 2, Engine(engine)).step_s(ROWS)
    assert (taken > 0).all()
    assert (np.diff(taken) >= 0).all()


def test_engines_that_share_experts_do_not_fuse():
    shared = collectives(
        "DeepSeek-V3", "B200", 4, Engine("sglang"), expert_parallel=True, data_parallel_size=2
    )
    assert shared.fused_tokens == 0
