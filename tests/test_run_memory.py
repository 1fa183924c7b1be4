"""What a run holds goes with its last reference; nothing waits for the garbage collector."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from eldr_sim.simulator import run as run_module
from eldr_sim.simulator.config import make_config
from eldr_sim.simulator.run import build_cluster, offered_load, prepare, simulate


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("n_prefill", [0, 2])
def test_a_cluster_holds_no_cycle(no_collector, make_cluster, make_workload, n_prefill):
    workload = make_workload(np.arange(30) * 1e-3, 10, 5)
    cluster = make_cluster(workload, n_prefill=n_prefill, n_decode=2, decode_policy="p2c")
    record = cluster.run()
    arrays = cluster.arrays
    held = [weakref.ref(x) for x in (arrays.bits, arrays.events, arrays.engines.sequences)]
    log = weakref.ref(cluster.log)
    del arrays
    assert all(ref() is not None for ref in held)
    del cluster
    assert all(ref() is None for ref in held)
    assert record.completed.all()  # the record needs none of them, only the log
    assert log() is not None
    del record
    assert log() is None


RUN = {"topology": "2P3D", "num_requests": 40, "request_rate": 40, "output_len": 20}


@pytest.mark.parametrize(
    "fields",
    [
        *({"policy": name} for name in ("jsq", "random", "eldr", "marginal_cost", "oracle")),
        {"policy": "eldr", "prompts": "shared"},
        {"policy": "jsq", "topology": "2C"},
    ],
    ids=str,
)
def test_a_run_frees_its_replay(no_collector, monkeypatch, fields):
    made, replay_of = [], run_module.replay_of

    def noted(*arguments):
        replay = replay_of(*arguments)
        made.append(weakref.ref(replay.bits))
        return replay

    monkeypatch.setattr(run_module, "replay_of", noted)
    config = make_config(RUN | fields)
    result = simulate(config)
    assert result.summary["completed"] == 40
    assert len(made) == 1
    assert made[0]() is None

    setting = prepare(config)
    cluster = build_cluster(config, setting, *offered_load(config, setting.trace))
    cluster.advance(0.2)  # a run that is given up halfway
    assert made[1]() is not None
    del cluster
    assert made[1]() is None
