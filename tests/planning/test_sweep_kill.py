"""kill -9 at random moments, and a Ray node lost on the way: nothing lost, nothing done twice."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import yaml

from eldr_sim.planning.runs.journal import FILE_NAME

OUTPUTS = ("points.parquet", "aggregate.parquet", "aggregate.csv", "sweep.json")
#: 120 runs of some 50 ms: a kill finds them anywhere.
SPEC = {
    "config": {"trace": "reference-moe", "topology": "1P2D", "num_requests": 40},
    "sweep": {
        "type": "grid",
        "parameters": {
            "policy": ["jsq", "eldr", "eldr:artifact=no_such"],
            "request_rate": [5, 10, 20, 40],
        },
    },
    "multiRun": {"numRuns": 10},
}


#: The command, and the same killed with all its processes when five runs are on disk.
WHOLE = "from eldr_sim.cli.main import main; main()"
KILLED = f"""
import os, signal
from eldr_sim.planning.runs.journal import Journal

def add(self, outcome, add=Journal.add):
    add(self, outcome)
    if len(self.outcomes) == 5:
        os.killpg(0, signal.SIGKILL)

Journal.add = add
{WHOLE}
"""


def start(path, out, *more, code=WHOLE):
    command = [sys.executable, "-c", code, "sweep", str(path), "--out", str(out)]
    return subprocess.Popen(
        [*command, "--resume", *more],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def left_behind(out):
    """What a killed sweep leaves: runs kept, bytes of half a line, files of the data set."""
    journal = (out / FILE_NAME).read_bytes() if (out / FILE_NAME).exists() else b""
    whole = journal.rfind(b"\n") + 1
    keys = [json.loads(line)["key"] for line in journal[:whole].splitlines()[1:]]
    assert len(keys) == len(set(keys))
    others = sorted(p.name for p in out.iterdir() if p.name != FILE_NAME) if out.exists() else []
    return keys, len(journal) - whole, others


def contents(folder):
    return {name: (folder / name).read_bytes() for name in OUTPUTS}


@pytest.mark.slow
def test_ten_kills_lose_nothing_and_repeat_nothing(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(SPEC))
    assert start(path, tmp_path / "whole").wait() == 0

    out, kept, rng = tmp_path / "out", [], random.Random(7)
    for kill in range(10):
        process = start(path, out, "--jobs", "2")
        # Anywhere from the imports on to the fifteenth run, whatever the machine.
        goal = len(kept) + rng.randrange(15)
        while process.poll() is None and len(left_behind(out)[0]) < goal:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.5))
        ended = process.poll()
        if ended is None:
            os.killpg(process.pid, signal.SIGKILL)
        error = process.communicate()[1].decode()
        now, half, others = left_behind(out)
        assert now[: len(kept)] == kept  # what was kept stays, in its place
        print(
            f"kill {kill}: {'ended before' if ended is not None else 'killed'}, {len(now)} runs "
            f"kept ({len(now) - len(kept)} new), {half} bytes of half a line, others: {others}"
        )
        assert ended in (None, 0), error
        kept = now
    assert start(path, out).wait() == 0
    now, half, others = left_behind(out)
    assert (len(now), half, others) == (120, 0, sorted(OUTPUTS))
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.long
def test_a_kill_loses_nothing_and_repeats_nothing(tmp_path):
    path, out = tmp_path / "sweep.yaml", tmp_path / "out"
    few = {"policy": ["jsq", "eldr:artifact=no_such"], "request_rate": [5, 10, 20, 40]}
    spec = SPEC | {"multiRun": {"numRuns": 3}, "sweep": {"type": "grid", "parameters": few}}
    path.write_text(yaml.safe_dump(spec))
    process = start(path, out, "--jobs", "1", code=KILLED)
    process.communicate()
    kept, _, others = left_behind(out)
    assert (process.returncode, len(kept), others) == (-signal.SIGKILL, 5, [])
    assert start(path, out, "--jobs", "1").wait() == 0
    now, half, others = left_behind(out)
    assert (now[: len(kept)], len(now), half) == (kept, 24, 0)
    assert others == sorted(OUTPUTS)


@pytest.mark.live
def test_a_ray_node_lost_on_the_way_costs_no_point(tmp_path):
    ray = pytest.importorskip("ray", reason="pip install 'eldr-sim[ray]'")
    from ray.cluster_utils import Cluster

    from eldr_sim.planning.runs.sweep import sweep

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    doomed = cluster.add_node(num_cpus=1)
    nodes, seen = set(), []

    def lose_a_node(progress):
        seen.append(progress.done)
        if progress.done >= 20 and len(nodes) == 0:
            nodes.update(node["NodeID"] for node in ray.nodes() if node["Alive"])
            cluster.remove_node(doomed, allow_graceful=False)

    try:
        result = sweep(
            SPEC, tmp_path / "ray", backend="ray", address=cluster.address, progress=lose_a_node
        )
        assert len(nodes) == 2
    finally:
        ray.shutdown()
        cluster.shutdown()
    keys, half, others = left_behind(tmp_path / "ray")
    assert (len(keys), half, others) == (120, 0, sorted(OUTPUTS))
    assert seen == list(range(121))
    assert result.points["status"].to_pylist().count("completed") == 80
    sweep(SPEC, tmp_path / "here", jobs=1)
    assert contents(tmp_path / "ray") == contents(tmp_path / "here")
