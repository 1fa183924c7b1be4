"""Prompts whose prefix blocks come with the requests that processes send."""

import json

import numpy as np
import pytest

from eldr_sim import RunConfig
from eldr_sim.errors import InputError
from eldr_sim.simulator.run import offered_load, simulate
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.simulator.simulation import Simulation

CONFIG = RunConfig(
    model="Llama-3.1-8B", topology="2P3D", policy="jsq", request_rate=20.0, num_requests=8, warmup=0
)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A log of conversations that begin alike, of more blocks than there is room for at first."""
    rng, rows = np.random.default_rng(0), []
    for i in range(150):
        family = int(rng.integers(6))
        n = int(rng.integers(3, 40))
        ids = [family * 1000 + j for j in range(n - 2)] + [10**6 + 2 * i, 10**6 + 2 * i + 1]
        rows.append({"timestamp": 40 * i, "input_length": 16 * n, "output_length": 30})
        rows[-1]["hash_ids"] = ids
    path = tmp_path_factory.mktemp("log") / "mooncake.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return f"{path}"


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill_policy": "least_loaded"},
        {"prefill_policy": "prefix_hash"},
        {"prefill_policy": "cache_aware"},
        {"prefill_policy": "dynamo_kv", "signal_interval_ms": 20.0},
        {"topology": "3C", "policy": "llmd"},
        {"prefill_policy": "least_loaded", "kv_tier": ("host:2GB,load=20GB/s",)},
    ],
)
def test_they_are_found_as_those_of_a_log_are(log, changes):
    """The oracle: `simulate` of the log, whose blocks are known beforehand."""
    config = CONFIG.replace(workload=log, num_requests=None, request_rate=None, **changes)
    whole = simulate(config).record.requests
    workload, _ = offered_load(config, prepare(config).trace)
    sim = Simulation(config, arrivals=False, prefixes=True)

    def client():
        for i, at in enumerate(workload.arrival_s.tolist()):
            if at > sim.env.now:
                yield sim.env.at(at)
            names = [("block", int(number)) for number in workload.blocks(i)]
            sim.cluster.submit(prefix=names)

    sim.env.process(client())
    sent = sim.run().record.requests
    assert whole["cached_tokens"].sum() > 5000
    for name in ("prefill_worker", "cached_tokens", "first_token_s", "finish_s"):
        np.testing.assert_array_equal(sent[name], whole[name])


def test_more_requests_than_the_workload_has_keep_their_own():
    """Names that come again stand for equal tokens only after equal ones; a rest is no block."""
    sim = Simulation(CONFIG.replace(topology="1P1D"), arrivals=False, prefixes=True)
    found = []

    def client():
        for i in range(40):
            names = ["same", "other" if i % 2 else f"{i}", *range(100)]
            ended = yield sim.cluster.request(prompt_len=16 * 60 + 5, output_len=2, prefix=names)
            found.append(int(sim.cluster.requests["cached_tokens"][ended.number]))

    sim.env.process(client())
    result = sim.run()
    assert found == [0, 16, *([16, 960] * 19)]
    assert result.summary["prefix_cache_hits"] == sum(found)
    assert result.summary["ideal_prefix_cache_hit_rate"] == result.summary["prefix_cache_hit_rate"]


def test_refusals():
    with pytest.raises(InputError, match="prefixes: arriving requests have no prefixes"):
        Simulation(CONFIG, prefixes=True)
    sim = Simulation(CONFIG, arrivals=False)
    with pytest.raises(InputError, match="prefix: the simulation takes none"):
        sim.cluster.request(prefix=["a"])
