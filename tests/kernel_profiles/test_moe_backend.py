"""Which kernel computes the experts: what a refusal lists works, and what it asks for, too."""

import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.kernel_profiles.tables.library import shipped_tables

SIZES = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 8192}


def made(model, gpu, **options):
    return build_step_time_model(model, gpu, **SIZES, **options)


@pytest.mark.parametrize("model", ["GPT-OSS-120B", "Qwen3-30B-A3B"])
def test_a_refused_kernel_lists_those_that_have_rows(model):
    with pytest.raises(InputError) as refused:
        made(model, "H100", moe_backend="marlin")
    said = str(refused.value)
    assert f"no rows of marlin's kernel for {model} on H100" in said
    assert "--tables DIR with rows of that kernel: docs/tables.md" in said
    listed = said.split("(allowed: ")[1].split(", or --tables")[0].split(", ")
    assert "auto" in listed
    for backend in listed:
        kernel = made(model, "H100", moe_backend=backend).provenance["moe"]["kernel_source"]
        assert backend == "auto" or backend in kernel.lower()


@pytest.mark.parametrize(
    ("model", "gpu"), [("Kimi-K2.5", "H100"), ("Kimi-K2.5", "B200"), ("GPT-OSS-120B", "L40S")]
)
def test_marlin_has_rows_where_the_page_says(model, gpu):
    found = made(model, gpu, moe_backend="marlin")
    assert "marlin" in found.provenance["moe"]["kernel_source"]


def test_a_table_of_marlin_makes_the_refused_run_possible():
    (name,) = [
        one for one in shipped_tables()
        if one.kind == "moe" and one.gpu == "L40S" and "marlin" in one.metadata.kernel_source
        and one.metadata.shape["expert_intermediate_size"] == 2880
        and one.metadata.shape["n_experts"] == 128
    ]  # fmt: skip
    table = name.load()
    own = type(table)(table.metadata.model_copy(update={"gpu": "H100"}), table.columns)
    found = made("GPT-OSS-120B", "H100", moe_backend="marlin", tables=[own])
    assert "marlin" in found.provenance["moe"]["kernel_source"]
