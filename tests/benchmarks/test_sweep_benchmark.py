"""How well a sweep uses a machine: ELDR's Fig. 11 grid, parallel efficiency, memory per worker.

Run on an idle machine with ``pytest tests/benchmarks/test_sweep_benchmark.py -m slow -s``.
"""

import os
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from eldr_sim.planning.runs.runner import Point, config_key, run_point, run_points
from eldr_sim.planning.runs.sweep import sweep
from eldr_sim.planning.runs.sweep_spec import make_spec, read_spec

from ..paths import ROOT

#: As in other processes, which draw routing.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("drawn_routing")]

SPEC = ROOT / "docs" / "sweep_eldr_figure_11.yaml"
JOBS = 2


def test_eldr_figure_11_grid(tmp_path):
    """Wall time of 6 routers x 5 rates, worker start included; goal 60 s on two cores."""
    start = time.perf_counter()
    result = sweep(SPEC, tmp_path / "out", jobs=JOBS)
    wall = time.perf_counter() - start
    assert result.points["status"].to_pylist().count("completed") == 30
    print(f"\n{result.points.num_rows} runs on {JOBS} processes: {wall:.1f} s")


def test_parallel_efficiency():
    """CPU time of the runs one after the other / (processes x wall time of the parallel sweep).

    The serial sweep runs in this process, warmed up as the workers are not: their start counts
    against the parallel one. The serial wall time is printed beside its CPU time: where they
    differ, the machine is not idle and the figure means nothing.
    """
    configs = [config for point in read_spec(SPEC).points for config in point.configs]
    points = [Point(config_key(config), config) for config in configs]
    run_point(points[0])
    wall, cpu = time.perf_counter(), time.process_time()
    serial = {outcome.key: outcome.summary for outcome in run_points(points, 1)}
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    start = time.perf_counter()
    parallel = {outcome.key: outcome.summary for outcome in run_points(points, JOBS)}
    parallel_wall = time.perf_counter() - start
    assert parallel == serial
    print(
        f"\nserial {wall:.1f} s wall, {cpu:.1f} s CPU; {JOBS} processes {parallel_wall:.1f} s: "
        f"efficiency {cpu / (JOBS * parallel_wall):.1%}"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/PID/smaps")
def test_memory_per_worker():
    """Resident and proportional memory of the workers, and how they share the replay's pages."""
    document = yaml.safe_load(SPEC.read_text())
    document["sweep"]["parameters"]["request_rate"] = [60]
    configs = [config for point in make_spec(document).points for config in point.configs]
    peak: dict[int, dict[str, float]] = {}
    stop = threading.Event()

    def watch():
        while not stop.wait(0.2):
            for pid in _workers():
                try:
                    now = _memory(pid)
                except OSError:
                    continue
                if now["Rss"] > peak.get(pid, {"Rss": 0.0})["Rss"]:
                    peak[pid] = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        list(run_points([Point(config_key(c), c) for c in configs], JOBS))
    finally:
        stop.set()
        watcher.join()
    print()
    for pid, memory in peak.items():
        figures = ", ".join(f"{name} {mib:.0f}" for name, mib in memory.items())
        print(f"worker {pid}, at its peak, MiB: {figures}")


def _workers():
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                status = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            if int(status.rpartition(")")[2].split()[1]) == os.getpid():
                yield int(entry)


def _memory(pid):
    """MiB: all of the process, and of it the bit sets of the replay, which all workers map."""
    totals = {"Rss": 0.0, "Pss": 0.0, "Private_Dirty": 0.0}
    bits = {"replay Rss": 0.0, "replay Pss": 0.0}
    mapped = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if not rest.endswith(" kB"):
            if "-" in line.split()[0]:
                mapped = "memfd:eldr-sim-replay" in line
            continue
        mib = int(rest.split()[0]) / 1024
        if name in totals:
            totals[name] += mib
        if mapped and f"replay {name}" in bits:
            bits[f"replay {name}"] += mib
    return totals | bits
