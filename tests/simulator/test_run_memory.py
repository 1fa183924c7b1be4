"""What a run holds goes with its last reference; nothing waits for the garbage collector."""

import gc
import tracemalloc
import weakref

import numpy as np
import pytest

from eldr_sim.simulator import run as run_module
from eldr_sim.simulator.run import build_cluster, offered_load, prepare, simulate
from eldr_sim.simulator.setup import replay as shared_replay
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.traces.routing.format import open_trace


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("n_prefill", [0, 2])
def test_a_cluster_holds_no_cycle(no_collector, make_cluster, make_workload, n_prefill):
    workload = make_workload(np.arange(30) * 1e-3, 10, 5)
    setup = {"n_prefill": n_prefill, "n_decode": 2, "decode_policy": "p2c"}
    make_cluster(workload, **setup).run()  # where it compiles, numba keeps what it compiled for
    cluster = make_cluster(workload, **setup)
    record = cluster.run()
    arrays = cluster.arrays
    held = [weakref.ref(x) for x in (arrays.bits, arrays.events, arrays.engines.sequences)]
    log = weakref.ref(cluster.log)
    del arrays
    assert all(ref() is not None for ref in held)
    del cluster
    assert all(ref() is None for ref in held)
    assert record.completed.all()  # the record needs none of them, but the log of workers alike
    assert (log() is None) == (n_prefill > 0)
    del record
    assert log() is None


RUN = {"topology": "2P3D", "num_requests": 40, "request_rate": 40, "output_len": 20}


@pytest.mark.long
@pytest.mark.parametrize(
    "fields",
    [
        *({"policy": name} for name in ("jsq", "random", "eldr", "marginal_cost", "oracle")),
        {"policy": "eldr", "prompts": "shared"},
        {"policy": "jsq", "topology": "2C"},
    ],
    ids=str,
)
def test_a_process_keeps_one_replay_and_runs_nothing_else(no_collector, monkeypatch, fields):
    shared_replay._kept.clear()
    made, replay_of = [], run_module.replay_of

    def noted(*arguments):
        replay = replay_of(*arguments)
        made.append(weakref.ref(replay.bits))
        return replay

    monkeypatch.setattr(run_module, "replay_of", noted)
    config = make_config(RUN | fields)
    result = simulate(config)
    assert result.summary["completed"] == 40
    (kept,) = shared_replay._kept.values()
    assert made[0]() is kept.bits

    setting = prepare(config)
    cluster = build_cluster(config, setting, *offered_load(config, setting.trace))
    cluster.advance(0.2)  # a run that is given up halfway
    assert made[1]() is kept.bits
    del cluster, kept
    shared_replay._kept.clear()
    assert made[0]() is None


def test_a_kept_replay_grows_and_gives_way(no_collector, earlier_recording):
    shared_replay._kept.clear()
    trace, other = open_trace(), earlier_recording[0]
    few = shared_replay.replay_of(trace, 8, 12, np.array([0, 1]))
    assert shared_replay.replay_of(trace, 8, 12, np.array([1])) is few
    more = shared_replay.replay_of(trace, 8, 12, np.array([2]))
    assert (np.flatnonzero(more.length) == [0, 1, 2]).all()
    for request in (0, 1):
        a, b = (r.bits[r.first_row[request] :][: r.length[request]] for r in (few, more))
        np.testing.assert_array_equal(a, b)
    bits = weakref.ref(more.bits)
    del few, more, a, b
    shared_replay.replay_of(other, 8, 12, np.array([0]))
    assert bits() is None  # two of them need not be in memory together
    shared_replay._kept.clear()


def peak_bytes(**fields):
    """What a run allocates at most, cluster and records included; the trace is there before."""
    same = {"trace": "reference-moe", "topology": "1P2D", "policy": "jsq", "warmup": 0.1}
    lengths = {"input_len": 16, "output_len": 2, "request_rate": 400}
    config = make_config(same | lengths | {"num_requests": 1000} | fields)
    setting = prepare(config)
    tracemalloc.start()
    build_cluster(config, setting, *offered_load(config, setting.trace)).run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_of_a_request_and_of_a_worker():
    """tests/benchmarks has the figures: a request takes a kilobyte, a worker 155 of them."""
    simulate(make_config(RUN | {"policy": "jsq"}))  # it is compiled
    peak_bytes()  # and what it reads is there
    few = peak_bytes()
    assert 500 < (peak_bytes(num_requests=4000) - few) / 3000 < 1050
    few = peak_bytes(topology="8P16D", num_requests=200)
    many = peak_bytes(topology="32P64D", num_requests=200)
    assert 100_000 < (many - few) / 72 < 160_000
