"""Routing as benchmarks force it: distinct experts of each step by closed forms, groups too."""

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup import prepare
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.replay import make_replay
from eldr_sim.traces.routing.forced import forced
from eldr_sim.traces.routing.format import open_trace

E, K, LAYERS = 128, 8, 48  # Qwen3-30B-A3B


@pytest.fixture(scope="module")
def real():
    return open_trace("reference-moe")


def run(routing, **changes):
    fields = {
        "topology": "1P2D", "policy": "round_robin", "request_rate": 30.0, "num_requests": 60,
        "warmup": 0.0, "output_len": 24, "trace": "reference-moe", "routing": routing,
    }  # fmt: skip
    return simulate(make_config(fields | changes))


def decode_steps(result):
    steps = result.steps.to_pylist()
    return [s for s in steps if s["role"] == "decode" and s["batch"] > 0]


def test_real_is_the_default():
    assert make_config({}).routing.routing == "real"


def test_uniform_is_uniform_and_dummy_weights_repeat(real):
    uniform, dummy = forced(real, "uniform"), forced(real, "dummy-weights")
    ids = uniform.experts
    assert all(len(set(row)) == K for row in ids[:50].reshape(-1, K).tolist())
    counts = np.bincount(ids.ravel(), minlength=E)
    chance = ids.size / E
    assert ((counts - chance) ** 2 / chance).sum() < E + 5 * np.sqrt(2 * E)  # chi square
    for request in (0, 3):
        rows = slice(*np.cumsum([arr[0] for arr in dummy.recorded_rows([request])]))
        assert (dummy.experts[rows] == dummy.experts[rows.start]).all()
    assert dummy.for_calibration is dummy
    assert uniform.manifest.checksum != real.manifest.checksum != dummy.manifest.checksum
    assert (forced(real, "uniform").experts == ids).all()


@pytest.mark.parametrize(("how", "period"), [("balanced", 16), ("round_robin", 16)])
def test_places_in_a_batch_choose_by_turn(real, how, period):
    made = forced(real, how)
    assert made.period == period
    for layer in range(made.n_layers):
        union = np.unique(made.experts[5 : 5 + period, layer])
        assert len(union) == E  # each expert once
    at = np.arange(3)[:, None]
    turn = {"balanced": at * K + np.arange(K), "round_robin": at + 2 + np.arange(K) * (E // K)}
    assert (made.experts[:3, 2] == turn[how] % E).all()


@pytest.fixture
def whole(real, monkeypatch):
    """A model of as many layers as the trace has, so that none is tiled."""
    load, layers = prepare.load_model, {"n_layers": real.n_layers}
    monkeypatch.setattr(prepare, "load_model", lambda name: load(name).model_copy(update=layers))


@pytest.mark.parametrize("how", ["balanced", "round_robin"])
def test_a_step_of_n_tokens_activates_n_times_k_experts(how, whole):
    seen = set()
    for step in decode_steps(run(how, request_rate=400.0)):
        assert step["active_experts"] == min(E, step["batch"] * K)
        seen.add(step["batch"])
    assert min(seen) < E // K < max(seen)


def test_engines_of_a_group_deal_from_the_same_expert(whole):
    """vllm-project/afd-plugin#156: 2 engines of 16 tokens keep to the experts of one's."""
    group = {"data_parallel_size": 2, "enable_expert_parallel": True}
    steps = decode_steps(run("balanced", topology="1P1D", request_rate=400.0, decode=group))
    largest = {}
    for step in steps:
        largest[step["start_s"]] = max(largest.get(step["start_s"], 0), step["batch"])
    assert {s["active_experts"] == min(E, K * largest[s["start_s"]]) for s in steps} == {True}


def test_a_trace_that_cannot_go_by_turn_is_refused(real):
    with pytest.raises(InputError, match=r"routing: .*layers, requests of"):
        make_replay(forced(real, "balanced"), real.n_layers + 1, np.arange(4))
    with pytest.raises(InputError, match="routing"):
        run("balanced", model="Llama-3.1-8B", trace=None)
