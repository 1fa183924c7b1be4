"""Time of choosing instances in the loop: a step of 94 layers and 128 experts over 8 GPUs.

``pytest tests/benchmarks/test_replica_choice_benchmark.py -m slow --benchmark-only -s`` prints the
microseconds of a step for each choice, and what they are over the same step without replicas, which
only counts (the floor).
"""

import pytest

from eldr_sim.traces.routing.synthetic.presets import preset_model
from eldr_sim.traces.routing.synthetic.synthesize import synthesize
from studies.metro.routing import Routing, route

pytestmark = pytest.mark.slow

N_STEPS = 20
CHOICES = ("even", "metro", "metro_sorted", "optimal", "time_aware")


@pytest.fixture(scope="module")
def routing(tmp_path_factory):
    model = preset_model("Qwen3-235B-A22B", domains=["code"])
    trace = synthesize(
        model, tmp_path_factory.mktemp("trace") / "t", requests=48, calibration=32,
        prompt_len=(64, 64), output_len=(128, 128), seed=0,
    )  # fmt: skip
    return Routing("preset", "Qwen3-235B-A22B", 8, trace, "code")


@pytest.mark.parametrize("tokens", [32, 256, 1024])
@pytest.mark.parametrize("ratio", [1.0, 1.125, 1.5])
@pytest.mark.parametrize("choice", CHOICES)
def test_step(benchmark, routing, choice, ratio, tokens):
    if ratio == 1.0 and choice != "even":
        pytest.skip("there is nothing to choose")
    batches, placement = routing.batches(tokens, N_STEPS), routing.placement(ratio)
    route(routing, placement, choice, batches)  # compiled
    benchmark.pedantic(route, (routing, placement, choice, batches), rounds=5)
    microseconds = 1e6 * benchmark.stats["min"] / N_STEPS
    print(f"{choice:>12} {ratio:5} {tokens:5} tokens: {microseconds:7.0f} us a step")
