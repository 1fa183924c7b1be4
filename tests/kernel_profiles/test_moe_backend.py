"""Which kernel computes the experts: what a refusal lists works, and what it asks for, too."""

from typing import get_args

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.parallel import MoEBackend, Parallelism
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.kernel_profiles.tables.library import Engine, shipped_tables

SIZES = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 8192}


def made(model, gpu, **options):
    return build_step_time_model(model, gpu, **SIZES, **options)


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize(
    ("model", "gpu"),
    [("GPT-OSS-120B", "B200"), ("GPT-OSS-120B", "A100"), ("Qwen3-30B-A3B", "H100")],
)
def test_a_refusal_lists_those_that_have_rows_and_no_others(model, gpu, size):
    works, refusals = set(), {}
    for backend in get_args(MoEBackend):
        try:
            found = made(model, gpu, moe_backend=backend, parallelism=Parallelism(size, size > 1))
        except InputError as refused:
            refusals[backend] = str(refused)
            continue
        works.add(backend)
        kernel = found.provenance["moe"]["kernel_source"].lower()
        assert backend == "auto" or backend in kernel
    assert "marlin" in refusals
    for backend, said in refusals.items():
        assert f"no rows of {backend}'s kernel for {model} on {gpu}" in said
        listed, _, hint = said.split("(allowed: ")[1].partition(", or --tables")
        assert set(listed.split(", ")) == works
        assert hint.startswith(" DIR with rows of that kernel: docs/tables.md")


@pytest.mark.parametrize(
    ("model", "gpu"), [("Kimi-K2.5", "H100"), ("Kimi-K2.5", "B200"), ("GPT-OSS-120B", "L40S")]
)
def test_marlin_has_rows_where_the_page_says(model, gpu):
    found = made(model, gpu, moe_backend="marlin")
    assert "marlin" in found.provenance["moe"]["kernel_source"]


@pytest.mark.parametrize("gpu", ["H100", "H200"])
@pytest.mark.parametrize(
    ("model", "sizes"), [("GPT-OSS-20B", (1,)), ("GPT-OSS-120B", (1, 2, 4, 8))]
)
def test_marlin_of_gpt_oss_on_hopper_is_derived_and_named(model, sizes, gpu):
    """It is asked for by name alone: ``auto`` takes the imported rows of the later kernel."""
    for size in sizes:
        layout = Parallelism(size)
        usual = made(model, gpu, parallelism=layout)
        found = made(model, gpu, parallelism=layout, moe_backend="marlin")
        said = found.provenance["moe"]
        assert said["label"] == "derived"
        assert "marlin" in said["kernel_source"]
        assert "marlin" not in usual.provenance["moe"]["kernel_source"]
        assert usual.provenance["moe"]["label"] == "imported"
        wide = np.full(found.n_moe_layers, 32 if model.endswith("20B") else 128)
        assert found.decode_s(wide, 64, 100.0) > usual.decode_s(wide, 64, 100.0)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_marlin_of_gpt_oss_20b_cut_over_gpus_is_refused_by_name(size):
    """There are no rows to take a fixed cost from; whole experts, spread, have them."""
    with pytest.raises(InputError) as refused:
        made("GPT-OSS-20B", "H100", parallelism=Parallelism(size), moe_backend="marlin")
    assert f"GPT-OSS-20B on H100, each expert cut over {size} GPUs" in str(refused.value)
    spread = made("GPT-OSS-20B", "H100", parallelism=Parallelism(size, True), moe_backend="marlin")
    assert "marlin" in spread.provenance["moe"]["kernel_source"]
    assert spread.provenance["moe"]["label"] == "derived"


def test_a_table_of_marlin_makes_the_refused_run_possible():
    (name,) = [
        one for one in shipped_tables()
        if one.kind == "moe" and one.gpu == "L40S" and "marlin" in one.metadata.kernel_source
        and one.metadata.shape["expert_intermediate_size"] == 2880
        and one.metadata.shape["n_experts"] == 128
    ]  # fmt: skip
    table = name.load()
    own = type(table)(table.metadata.model_copy(update={"gpu": "B200"}), table.columns)
    found = made("GPT-OSS-120B", "B200", moe_backend="marlin", tables=[own])
    assert "marlin" in found.provenance["moe"]["kernel_source"]


@pytest.mark.parametrize(
    ("gpu", "ranks", "kernel"),
    [("H200", 1, "oaitriton"), ("H200", 2, "fused_moe_triton"), ("B200", 1, "trtllm_moe")],
)
def test_sglang_takes_the_kernels_of_gpt_oss_that_it_chooses(gpu, ranks, kernel):
    """triton_kernels on Hopper without expert parallelism, FlashInfer's on Blackwell."""
    layout = Parallelism(2, ranks > 1)
    found = made("GPT-OSS-120B", gpu, parallelism=layout, engine=Engine("sglang"))
    assert kernel in found.provenance["moe"]["kernel_source"]
