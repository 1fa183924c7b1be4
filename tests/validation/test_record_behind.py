"""Published runs that cannot have computed their prompts: studies/record/behind.md."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.kernel_profiles.tables.library import Engine
from eldr_sim.validation.published.silicon_rows import MEASURED_MODELS

_TABLE = Path(__file__).parents[2] / "docs" / "data" / "record_bound.csv"


def number(text):
    return float(text.strip().replace(",", ""))


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_kernels_of_prompts_take_longer_than_the_runs_did(gpus):
    """As the page says, in % of the time in which all streams had an answer."""
    model = build_step_time_model(
        MEASURED_MODELS["llama-8b-fp8"].dims(), "H200", max_num_seqs=128, max_model_len=11000,
        max_num_batched_tokens=11000, parallelism=Parallelism(gpus), engine=Engine("vllm", "0.12"),
    )  # fmt: skip
    with _TABLE.open(encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["GPUs"] == str(gpus)]
    for line in lines:
        prompt, output = map(number, line["tokens in and out"].split(", "))
        ttft, tpot = map(number, line["measured TTFT and TPOT"].split(", "))
        parts = model.parts(chunks=[(0, int(prompt))])
        run_ms = ttft + (output - 1) * tpot
        share = 100 * 1e3 * float(line["streams"]) / run_ms
        for name, column in (("dense", "GEMM, % of the run"), ("attention", "attention, %"),
                             ("collectives", "all-reduce, %")):  # fmt: skip
            assert share * getattr(parts, name) == pytest.approx(float(line[column]), abs=0.6)
    assert sum(float(line["GEMM, % of the run"]) > 100 for line in lines) >= 2
