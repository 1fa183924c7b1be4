"""A run ends: with its requests, or with a clear error where these get no further."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from eldr_sim.errors import StalledError
from eldr_sim.simulator.control import progress
from eldr_sim.simulator.control.policy_calls import PrefillReports
from eldr_sim.simulator.plane.kv import kv_cache
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.simulation import Simulation

from ..on_each import on_each

SESSIONS = {
    "trace": "reference-moe", "workload": "agent", "sessions": 6, "request_rate": 50,
    "think_time": "0.2", "tool_time": "0", "turns": "3", "num_gpu_blocks_override": 60,
    "topology": "1P", "engine": "trtllm", "signal_interval_ms": 100,
}  # fmt: skip
HOLDER = """
from eldr_sim.policies.base import Needs, RouterPolicy

class Holder(RouterPolicy):
    name = "holder"
    needs = Needs()

    def select(self, request, workers):
        return None
"""


@on_each("kv_signal", ["exact", "approx:ttl=1,tokens=100,routers=1"])
@on_each("policy", ["llmd", "dynamo_kv", "cache_aware", "saturation"])
def test_small_caches_with_signals_end(policy, kv_signal):
    """Engines note what happens to their blocks where somebody reads it, and only there: notes that
    nobody read filled their room, and the loop waited for ever for more."""
    config = make_config(SESSIONS | {"prefill_policy": policy, "kv_signal": kv_signal})
    outcomes = set(simulate(config).requests.column("outcome").to_pylist())
    assert "exceeds_kv_cache" in outcomes


def test_notes_that_nobody_reads_end_the_run(monkeypatch):
    monkeypatch.setattr(PrefillReports, "collect", lambda _self: None)
    monkeypatch.setattr(progress, "PATIENCE", 1 << 16)
    config = make_config(SESSIONS | {"prefill_policy": "cache_aware"})
    with pytest.raises(StalledError, match=r"no progress since .* requests open: .* waiting"):
        simulate(config)


@pytest.fixture
def holder(tmp_path):
    (tmp_path / "holder.py").write_text(HOLDER)
    return f"{tmp_path}/holder.py:Holder"


def test_time_that_passes_does_not_hide_a_stall(holder, monkeypatch):
    """A process that ticks for ever keeps the event queue full."""
    monkeypatch.setattr(progress, "PATIENCE", 1 << 14)
    small = {"trace": "reference-moe", "num_requests": 20, "output_len": 5, "topology": "2C"}
    simulation = Simulation(make_config(small | {"policy": holder}), arrivals=False)

    def ticks():
        while True:
            yield simulation.env.timeout(0.001)

    simulation.env.process(ticks())
    simulation.cluster.request()
    simulation.advance(until=60.0)  # it ends anyway
    with pytest.raises(StalledError, match=r"at \S+ s with 1 requests open: 1 held by routers"):
        simulation.run()


def test_a_command_that_stalls_says_so_in_a_line():
    code = (
        "from eldr_sim.simulator.control import progress, policy_calls\n"
        "progress.PATIENCE = 1 << 16\n"
        "policy_calls.PrefillReports.collect = lambda self: None\n"
        "from eldr_sim.cli.main import main\n"
        "main()"
    )
    given = {"--" + name.replace("_", "-"): str(value) for name, value in SESSIONS.items()}
    argv = [part for pair in given.items() for part in pair] + ["--prefill-policy", "cache_aware"]

    command = [sys.executable, "-c", code, "run", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("Warning")]
    assert (done.returncode, len(lines)) == (1, 1)
    assert lines[0].startswith("Error: no progress since ")


def test_where_no_pool_caches_prefixes_nothing_is_found():
    """The arrays of caches are empty then, and compiled code reads on behind their ends."""
    workload = SimpleNamespace(
        prompt_len=np.array([64, 64], np.int32), answered=None, prefixes_to_come=False,
        prefix_hash=np.array([3, 3], np.uint64), prefix_indptr=np.array([0, 1, 2]),
        prefix_block_tokens=64,
    )  # fmt: skip
    kv = kv_cache.make_kv_cache(workload, 16, 100, 0)
    assert kv.prefix_block_tokens == 0
    found = np.full(4, -1)
    kv_cache.match(kv, 0, 1, 64, found)
    assert (found == 0).all()


@pytest.mark.long
def test_ctrl_c_is_answered_between_slow_events(holder):
    """The loop comes back after fewer events where they take long, so that Python sees signals."""
    small = {"trace": "reference-moe", "num_requests": 20, "output_len": 5, "topology": "2C"}
    simulation = Simulation(make_config(small | {"policy": holder}), arrivals=False)
    cluster = simulation._cluster

    def ticks():
        while True:
            yield simulation.env.timeout(0.001)

    simulation.env.process(ticks())
    cluster.call_s = 0.0  # every call takes too long
    simulation.cluster.request()
    simulation.advance(until=100.0)
    assert cluster.events_a_call == 1
