"""Answers at the bad end of the error band, ties within it, and what a plan searches by default."""

import pytest

from eldr_sim.errors import InputError
from eldr_sim.planning.search.axes import Space
from eldr_sim.planning.search.goals import Cheapest, find
from eldr_sim.planning.search.shapes import usual_engines
from eldr_sim.planning.slo import Objective
from eldr_sim.simulator.outcome.error_band import at_bad_end, relative, relative_line
from eldr_sim.simulator.run import simulate_summary
from eldr_sim.simulator.setup.config.groups import ServiceLevel
from eldr_sim.simulator.setup.config.run_config import make_config

DENSE = {
    "model": "Llama-3.1-8B", "gpu": "H100", "topology": "1C", "request_rate": 4.0,
    "num_requests": 60, "input_len": 500, "output_len": 40,
}  # fmt: skip


def test_the_bad_end_divides_bounds_by_the_band():
    band = {"ttft": {"high": 2.0}, "tpot": {"high": 1.25}}
    level = ServiceLevel(ttft=500, tpot=30, e2el=4000)
    assert at_bad_end(level, band) == ServiceLevel(ttft=250, tpot=24, e2el=2000)


def test_a_run_is_judged_by_what_predictions_keep():
    """With the bounds that it was judged by, a run without confidence attains as much."""
    sure = simulate_summary(make_config(DENSE | {"goodput": "tpot:8.5,ttft:40", "confidence": 80}))
    level = sure["judged_by_ms"]
    assert level["tpot"] == pytest.approx(8.5 / sure["error_band"]["tpot"]["high"], abs=1e-3)
    again = simulate_summary(make_config(DENSE | {"goodput": level}))
    plain = simulate_summary(make_config(DENSE | {"goodput": "tpot:8.5,ttft:40"}))
    assert sure["slo_attainment"] == again["slo_attainment"] <= plain["slo_attainment"]
    assert "judged_by_ms" not in plain


def test_confidence_needs_an_objective_and_knows_one_level():
    with pytest.raises(InputError, match="confidence"):
        simulate_summary(make_config(DENSE | {"confidence": 80}))
    with pytest.raises(InputError, match="confidence"):
        make_config(DENSE | {"confidence": 95})


def test_a_plan_with_confidence_buys_no_less():
    """More GPUs or as many, and it says what the answer keeps; ties cost more, but less than
    predictions may err."""
    config = make_config(DENSE | {"request_rate": 30.0, "num_requests": 200})
    objective = Objective(ServiceLevel(tpot=14), 0.9, (2,))
    chosen = {"tensor_parallel_sizes": [1, 2], "max_gpus": 12, "gpus": ["H100", "H200"]}
    plain, sure = (
        find(Space(each, **chosen), Cheapest(objective))
        for each in (config, config.replace(confidence=80))
    )
    assert plain.best is not None
    assert plain.best.cost <= (sure.best.cost if sure.best is not None else float("inf"))
    if sure.best is not None:
        assert any(note.startswith("Judged at the bad end") for note in sure.notes)
    for tie in plain.ties:
        assert tie.config.n_gpus >= plain.best.cost


def test_comparisons_have_a_band_from_pairs():
    for cell in relative().values():
        assert cell["factor"] > 1.0
        assert cell["publishers"] <= cell["pairs"]
    assert "pairs by" in relative_line()


@pytest.mark.parametrize(
    ("model", "gpu", "engines"),
    [
        ("Qwen3-30B-A3B", "H100", [1]), ("Llama-3.1-70B", "H100", [1]),
        ("DeepSeek-R1", "H200", [1, 8]), ("Qwen3-235B-A22B", "H100", [1, 8]),
        ("GLM-5", "H200", [1, 8]), ("Kimi-K2", "B200", [1, 8]), ("GPT-OSS-120B", "H200", [1]),
    ],
)  # fmt: skip
def test_mla_and_large_moe_models_are_planned_as_they_are_deployed(model, gpu, engines):
    assert usual_engines(make_config({"model": model, "gpu": gpu})) == engines
    assert usual_engines(make_config({"model": model, "gpu": gpu, "topology": "1P"})) == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gpu", "rate"),
    [
        ("DeepSeek-R1", "H200", 10.0), ("Qwen3-235B-A22B", "H200", 10.0),
        ("GPT-OSS-120B", "H200", 40.0),
    ],
)  # fmt: skip
def test_a_wider_search_finds_nothing_much_cheaper(model, gpu, rate):
    """By default plans search what people deploy; more engines of a worker save no more than two
    predictions on one GPU may differ by."""
    config = make_config(
        {"model": model, "gpu": gpu, "request_rate": rate, "input_len": 3000, "output_len": 500}
        | {"duration": 30, "warmup": 25}
    )
    objective = Objective(ServiceLevel(ttft=2000, tpot=50), 0.99, (3,))
    plain, wide = (
        find(Space(config, ["round_robin"], data_parallel_sizes=engines), Cheapest(objective))
        for engines in ([], [1, 2, 4, 8, 16])
    )
    assert plain.best is not None
    assert wide.best is not None
    assert plain.best.cost <= wide.best.cost * relative()["tpot"]["factor"]
