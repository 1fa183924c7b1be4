"""The longest context that a worker accepts: the model's positions, or less."""

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.planning.search.bounds import bounds
from eldr_sim.planning.slo import Objective
from eldr_sim.simulator.run import prepare, simulate
from eldr_sim.simulator.setup.config.groups import parse_slo
from eldr_sim.simulator.setup.config.run_config import make_config

SHORT = {
    "frontend": "none",
    "topology": "1P1D",
    "num_requests": 30,
    "request_rate": 20,
    "output_len": 20,
}


def test_the_default_is_what_the_model_has():
    config = make_config(SHORT)
    longest = load_model(config.engine.model).max_position_embeddings
    setting = prepare(config)
    assert setting.spec.max_model_len == setting.step_time.max_model_len == longest
    assert prepare(config.replace(max_model_len=longest)).spec == setting.spec


def test_beyond_the_model_is_simulated_with_a_warning():
    config = make_config(SHORT | {"num_requests": 5})
    longest = load_model(config.engine.model).max_position_embeddings
    result = simulate(config.replace(max_model_len=2 * longest))
    said = [w for w in result.summary["latency_warnings"] if "max_model_len" in w]
    assert said
    assert str(2 * longest) in said[0]
    assert str(longest) in said[0]
    assert simulate(config).summary["latency_warnings"] == [
        w for w in result.summary["latency_warnings"] if w not in said
    ]
    with pytest.raises(InputError, match="max_model_len"):
        make_config({"max_model_len": 0})


@pytest.mark.parametrize("topology", ["1P1D", "1C"])
def test_longer_requests_end_with_their_reason_and_the_others_are_served(topology):
    config = make_config({**SHORT, "topology": topology})
    lengths = simulate(config).requests.to_pandas()
    assert set(lengths.outcome) == {"completed"}
    total = np.asarray(lengths.prompt_len + lengths.output_len)
    limit = int(np.median(total))
    assert total.min() <= limit < total.max()  # so that the limit parts the requests
    limited = simulate(config.replace(max_model_len=limit)).requests.to_pandas()
    expected = np.where(total > limit, "exceeds_max_model_len", "completed")
    np.testing.assert_array_equal(limited.outcome, expected)


def test_a_plan_says_that_requests_are_too_long():
    objective = Objective(parse_slo(["ttft:500"]))
    config = make_config({**SHORT, "max_model_len": 20})
    found = bounds(config, objective)
    assert found.impossible == "100.0% of the requests are longer than 20 tokens (max_model_len)"
    assert bounds(config.replace(max_model_len=4096), objective).impossible == ""
