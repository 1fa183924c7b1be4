"""A user's own engine steps beside the predicted time of the same steps."""

from __future__ import annotations

import json
import math

import pytest

from eldr_sim.errors import InputError
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.validation.published.bench import Step, beside, predicted_s, read_steps

from ..on_each import on_each

CONFIG = {"model": "Llama-3.1-8B", "gpu": "H100", "topology": "1C"}


def line(wall_time=0.01, **counts):
    return json.dumps({"version": 1, "dp_rank": 0, "wall_time": wall_time,
                       "scheduled_requests": counts, "queued_requests": {}})  # fmt: skip


@pytest.fixture
def steps_file(tmp_path):
    def write(*lines):
        path = tmp_path / "steps.jsonl"
        path.write_text("\n".join(lines))
        return path

    return write


def test_steps_are_read_and_idle_ones_left_out(steps_file):
    path = steps_file(
        line(num_decode_requests=4, sum_decode_kv_tokens=400), line(0.0), "",
        line(0.02, num_prefill_requests=2, sum_prefill_tokens=30, sum_prefill_kv_tokens=5),
    )  # fmt: skip
    assert read_steps(path) == [Step(0.01, 0, 0, 0, 4, 400), Step(0.02, 2, 30, 5, 0, 0)]
    assert [step.kind for step in read_steps(path)] == ["decoding", "prompts"]


@on_each("text", ["no JSON", "[]", "{}", line("x"), line(-1.0), line(float("inf")), line(0.0), "",
             line(num_decode_requests=-4), line(num_decode_requests=[1])])  # fmt: skip
def test_what_is_no_step_is_refused_in_a_line(steps_file, text):
    with pytest.raises(InputError) as refused:
        read_steps(steps_file(text))
    assert refused.value.field == "steps"


def test_a_step_takes_what_the_simulated_engine_says():
    step_time = prepare(make_config(CONFIG)).spec.pools[-1].engine.step_time
    found = predicted_s(step_time, Step(1.0, 2, 31, 9, 3, 300))
    parts = step_time.parts(3, 300, [(4, 15), (5, 16)])
    assert found == math.fsum(parts)
    assert predicted_s(step_time, Step(1.0, 0, 0, 0, 3, 300)) < found


def test_kinds_are_held_against_each_other():
    config = make_config(CONFIG)
    step_time = prepare(config).spec.pools[-1].engine.step_time
    shapes = [(0, 0, 0, 4, 800), (1, 500, 0, 0, 0), (1, 500, 0, 4, 800)]
    steps = [Step(2.0 * predicted_s(step_time, Step(1.0, *s)), *s) for s in shapes]
    found = list(beside(steps, config))
    assert [(kind, n) for kind, n, _ in found] == [("decoding", 1), ("prompts", 1), ("both", 1)]
    for _, _, (measured, predicted, size, signed) in found:
        assert measured == pytest.approx(2 * predicted)
        assert (size, signed) == pytest.approx((50.0, -50.0))


def test_experts_of_a_decode_step_are_those_of_uniform_routing():
    config = make_config({"model": "Qwen3-30B-A3B", "gpu": "H100", "topology": "1C"})
    step_time = prepare(config).spec.pools[-1].engine.step_time
    few = predicted_s(step_time, Step(1.0, 0, 0, 0, 1, 100))
    many = predicted_s(step_time, Step(1.0, 0, 0, 0, 64, 6400))
    assert few < many < 16 * few
