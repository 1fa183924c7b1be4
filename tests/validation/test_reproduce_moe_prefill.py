"""MoE-Prefill's reproduction: closed forms of a step and the engine's, its command."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from studies.moe_prefill import steps
from studies.moe_prefill.evaluation import figures, make_runner
from studies.moe_prefill.results import mean_and_interval
from studies.moe_prefill.settings import CELLS, H100_FP8, async_ep, engine_baselines
from studies.moe_prefill.steps import Strategy, chunks_of, step_s
from studies.moe_prefill.workload import Prompt, write_log

SMALL = "Qwen3-30B-A3B"


@given(budget=st.integers(16, 70_000), context=st.integers(1, 131_072))
def test_steps_compute_whole_prompts(budget, context):
    made = chunks_of(budget, context)
    assert all(sum(n for _, n in chunks) <= budget for chunks in made)
    if context <= budget:
        (chunks,) = made
        assert set(chunks) == {(0, context)}
    else:
        first, count = np.array([chunks[0] for chunks in made]).T
        assert all(len(chunks) == 1 for chunks in made)
        np.testing.assert_array_equal(first[1:], (first + count)[:-1])
        assert (first[0], first[-1] + count[-1]) == (0, context)


def test_gathers_hide_behind_long_steps_and_bound_short_ones():
    layers = load_model(SMALL).n_moe_layers
    times = steps._times(SMALL, steps.load_gpu("H100"), steps.SINGLE_GPU)
    gather_s = steps.plan_stream(load_model(SMALL), steps.load_gpu("H100"), 8).stream.gather_s
    for tokens in (64, 65_536):
        chunks = [(0, 64)] * (tokens // 64)
        parts = times.parts(chunks=chunks)
        computes = parts.attention + parts.dense + parts.collectives + parts.moe
        beside = parts.host + parts.head + computes / layers
        hidden = beside + computes * (layers - 1) / layers
        took = step_s(Strategy("async_ep"), SMALL, "H100", 8, chunks)
        assert took == pytest.approx(max(hidden, beside + (layers - 1) * gather_s), rel=1e-12)
        # Infinite links leave the time of experts in place.
        assert step_s(Strategy("async_ep", links=1e12), SMALL, "H100", 8, chunks) == pytest.approx(
            hidden, rel=1e-9
        )


@pytest.mark.parametrize(
    ("strategy", "engines", "within"),
    # Recorded routing does not load GPUs as evenly as the closed form has it.
    [(Strategy("async_ep"), 4, 1e-3), (Strategy("tp_ep"), 1, 0.1), (Strategy("dp_ep"), 4, 0.2)],
)
def test_a_step_of_the_engine_takes_what_the_closed_form_says(tmp_path, strategy, engines, within):
    prompts = [Prompt("p", 1024, tuple(range(64 * i, 64 * i + 64))) for i in range(4 * engines)]
    write_log(prompts, tmp_path / "log.jsonl")
    fields = {"workload": str(tmp_path / "log.jsonl"), "num_requests": len(prompts)}
    result = simulate(
        make_config(
            {
                "model": SMALL,
                "gpu": "H100",
                "trace": "reference-moe",
                "request_rate": "inf",
                "prefill_policy": "round_robin",
                "frontend": "none",
            }
            # Which does not wait for the host's launches.
            | {"max_num_batched_tokens": 4096, "max_num_seqs": 64}
            | {"max_cudagraph_capture_size": 4096}
            | strategy.fields(4)
            | fields
        )
    )
    made = result.record.prefill_steps
    assert made["chunk_tokens"].sum() == 1024 * len(prompts)
    for step in made:
        expected = step_s(strategy, SMALL, "H100", 4, [(0, 1024)] * int(step["chunks"]))
        assert step["end"] - step["start"] == pytest.approx(expected, rel=within)


def test_the_best_budget_is_no_slower_than_any():
    for strategy in (Strategy("async_ep"), Strategy("pp"), Strategy("dp_ep")):
        best = steps.best(strategy, SMALL, "H100", 4, 512)
        each = [steps.rate(strategy, SMALL, "H100", 4, b, 512) for b in steps.BUDGETS]
        assert best.tokens_per_s == max(one.tokens_per_s for one in each)
        assert best.mfu < 1


def test_cells_have_what_fits():
    assert [async_ep(cell, 8).window for cell in CELLS] == [4, 4, 0, 0]
    assert async_ep(H100_FP8, 1).fields(1) == {"topology": "1P", "offload_window": 4}
    # Blocks of 128 of FP8 experts are not cut by 8 (vLLM refuses it): two workers of 4.
    assert [s.label for s in engine_baselines(H100_FP8, 8)] == ["PP+PP", "TP+EP", "2 x TP4"]
    assert not engine_baselines(H100_FP8, 2)


def test_intervals_by_hand():
    mean, half = mean_and_interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.302653 / np.sqrt(3), rel=1e-6)
    assert mean_and_interval([5.0]) == (5.0, 0.0)


def test_table_1_names_what_differs():
    made = figures(make_runner(True, lambda share: None), True)["table_1"]()
    assert all(claim.ours is not None for claim in made.claims)
    assert made.claims[0].ours == pytest.approx(4.5)  # 36,864 tokens over 8,192
    assert [claim.direction for claim in made.claims] == [
        "contradicts", "no effect", "no effect", "agrees",
    ]  # fmt: skip
    assert made.claims[0].size == "differs"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["figure_9", "figure_10", "figure_11", "figure_12"])
def test_figures_in_quick_mode(name):
    made = figures(make_runner(True, lambda share: None), True)[name]()
    assert len(made.table)
    assert all(claim.ours is not None for claim in made.claims)
