"""How fast the simulator runs, against the floor of reading the bit sets once.

Run with ``pytest tests/benchmarks -m slow --benchmark-only -s``. Every figure goes to the table's
``extra_info`` (``--benchmark-json FILE`` keeps it).
"""

import json
import subprocess
import sys
import time

import numpy as np
import pytest
from numba import njit

from eldr_sim.simulator.run import build_cluster, offered_load, prepare
from eldr_sim.simulator.setup.config.run_config import make_config, parse_topology

pytestmark = pytest.mark.slow


@njit
def _read_all(words):
    union = np.uint64(0)
    for i in range(words.shape[0]):
        union |= words[i]
    return union


def stream_bandwidth():
    """Bytes per second at which one core reads an array that no cache holds."""
    words = np.ones(1 << 26, np.uint64)
    _read_all(words[:8])
    best = min(_timed(_read_all, words) for _ in range(5))
    return words.nbytes / best


def _timed(function, *arguments):
    start = time.process_time()
    function(*arguments)
    return time.process_time() - start


def _cluster(topology, policy, seconds):
    """Six and a quarter requests a second and decode worker, for ``seconds`` after a quarter."""
    _, n_decode = parse_topology(topology)
    fields = {"topology": topology, "policy": policy, "request_rate": 6.25 * n_decode}
    config = make_config(fields | {"duration": seconds, "warmup": seconds / 4})
    setting = prepare(config)
    return build_cluster(config, setting, *offered_load(config, setting.trace))


@pytest.mark.parametrize(
    ("topology", "policy", "seconds"),
    [
        *(("8P16D", policy, 120) for policy in ("round_robin", "jsq", "eldr", "marginal_cost")),
        *((topology, "jsq", 8) for topology in ("8P16D", "128P256D", "512P1024D")),
    ],
)
def test_output_tokens_per_cpu_second(benchmark, topology, policy, seconds):
    """512 tokens a request, 48 layers x 128 experts; simulated tokens, and those measured."""
    took, tokens, measured, row_bytes = [], 0, 0, 0

    def setup():
        return (_cluster(topology, policy, seconds),), {}

    def run(cluster):
        nonlocal tokens, measured, row_bytes
        start = time.process_time()
        record = cluster.run()
        took.append(time.process_time() - start)
        tokens = int(record.decode_steps["outputs"].sum())
        measured = int(record.requests["output_len"][record.requests["measured"]].sum())
        row_bytes = cluster.arrays.bits.shape[1] * 8

    benchmark.pedantic(run, setup=setup, rounds=3, warmup_rounds=1)
    cpu = sorted(took[1:])[1]
    floor = tokens * row_bytes / stream_bandwidth()
    benchmark.extra_info.update(
        output_tokens=tokens,
        measured_output_tokens=measured,
        cpu_s=cpu,
        million_tokens_per_cpu_s=tokens / cpu / 1e6,
        million_measured_tokens_per_cpu_s=measured / cpu / 1e6,
        streaming_floor_s=floor,
        times_the_floor=cpu / floor,
    )
    print(
        f"\n{policy} {topology} {seconds} s: {tokens / cpu / 1e6:.2f} M simulated, "
        f"{measured / cpu / 1e6:.2f} M measured tokens/CPU-s, "
        f"{cpu:.2f} s = {cpu / floor:.1f} x streaming floor"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"policy": "eldr", "topology": "8P16D", "request_rate": 100},
        {"policy": "eldr", "topology": "64P128D", "request_rate": 800},
        {"policy": "jsq", "request_rate": 800, "num_requests": 1_000_000, "output_len": 64},
    ],
    ids=["8P16D", "64P128D", "a million requests"],
)
def test_peak_memory_of_a_whole_command(benchmark, fields, tmp_path):
    """Peak resident memory of ``eldr-sim run --out``, imports and result tables included."""
    script = (
        "import json, sys; from pathlib import Path; "
        "from eldr_sim.simulator.setup.config.run_config import make_config; "
        "from eldr_sim.simulator.results import write_result; "
        "from eldr_sim.simulator.run import simulate; "
        "write_result(simulate(make_config(json.loads(sys.argv[1]))), Path(sys.argv[2])); "
        "print(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1])"
    )

    def run():
        command = [sys.executable, "-c", script, json.dumps(fields), str(tmp_path / "result")]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    mib = float(benchmark.pedantic(run, rounds=1)) / 1024
    benchmark.extra_info.update(peak_rss_mib=mib)
    print(f"\n{fields}: peak {mib:.0f} MiB")
