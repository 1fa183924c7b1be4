"""How fast runs are, start and take memory: one table, which tests/benchmarks/README.md shows.

``python -m tests.benchmarks.speed [--write]`` from the repository's root; some minutes. Each case
alternates with the one that it is compared with, on the same work where that can be; CPU seconds,
the best of some rounds. ``--write`` keeps the table in ``docs/data/speed.csv``. Where
``DYNAMO_PYTHON`` names the Python of an environment for `dynamo_replay`, that is a row, too;
``WHEEL_PYTHON``: of one with a wheel of ``.ci/compiled_wheel.py``, whose first runs are then rows.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.outputs import write_rows
from eldr_sim.policies.base import LOADS, Needs, RouterPolicy
from eldr_sim.simulator.run import build_cluster, offered_load, prepare
from eldr_sim.simulator.setup.config.run_config import make_config
from tests.benchmarks.test_run_benchmark import stream_bandwidth

ROUNDS = 4
PLAIN = {"topology": "8P16D", "policy": "jsq", "request_rate": 100, "duration": 60, "warmup": 15}
LARGE = {"topology": "512P1024D", "request_rate": 6400, "duration": 2, "warmup": 0.5}
EIGHT = {"topology": "4P8D", "policy": "jsq", "request_rate": 50, "num_requests": 1600, "warmup": 1}
EQUAL = {"topology": "8P16D", "policy": "round_robin", "request_rate": 100, "warmup": 1,
         "num_requests": 10_000, "input_len": 512, "output_len": 512}  # fmt: skip
COLOCATED = {"topology": "1C", "data_parallel_size": 8, "enable_expert_parallel": True}


class AskedEachTime(RouterPolicy):
    """Joins the shortest queue, in Python."""

    name = "asked"
    needs = Needs(columns=LOADS)

    def select(self, request: Any, workers: Any) -> int:
        """Return the least loaded worker."""
        return int(np.argmin(workers.loads))


def group(size: int, **fields: Any) -> dict[str, Any]:
    """Return the fields of a decode group of so many engines."""
    decode = {"data_parallel_size": size, "enable_expert_parallel": True}
    if "replica_choice" in fields:
        decode["num_redundant_experts"] = 32
        fields["expert_placement"] = "eplb"
    load = {"request_rate": 6.25 * size, "num_requests": 200 * size, "topology": f"{size // 2}P1D"}
    return EIGHT | load | {"decode": decode} | fields


#: What it is, its fields, and the case that it is compared with; None: the streaming floor.
CASES: list[tuple[str, dict[str, Any], str | None]] = [
    ("plain, 16 decode workers, `jsq`", PLAIN, None),
    ("the same, 512 in and out, `round_robin`", EQUAL, None),
    ("256", PLAIN | {"topology": "128P256D", "request_rate": 1600, "duration": 4}, None),
    ("1,024", PLAIN | LARGE, None),
    ("`eldr`", PLAIN | {"policy": "eldr"}, "plain, 16 decode workers, `jsq`"),
    ("`eldr:refit_s=0`", PLAIN | {"policy": "eldr:refit_s=0"}, "plain, 16 decode workers, `jsq`"),
    ("`marginal_cost`", PLAIN | {"policy": "marginal_cost"}, "plain, 16 decode workers, `jsq`"),
    ("a router in Python", PLAIN | {"policy": f"{__file__}:AskedEachTime"},
     "plain, 16 decode workers, `jsq`"),
    ("plain, 8 decode workers", EIGHT, None),
    ("group of 8, `deepep_ll`", group(8, all2all_backend="deepep_ll"), "plain, 8 decode workers"),
    ("of 32", group(32, all2all_backend="deepep_ll"), "plain, 8 decode workers"),
    ("of 8, `deepep_ht`", group(8, all2all_backend="deepep_ht"), "plain, 8 decode workers"),
    ("of 32, `deepep_ht`", group(32, all2all_backend="deepep_ht"), "plain, 8 decode workers"),
    ("co-located, of 8, `deepep_ll`", EIGHT | COLOCATED | {"all2all_backend": "deepep_ll"},
     "plain, 8 decode workers"),
    ("32 redundant experts, `hash`", group(8, all2all_backend="deepep_ll", replica_choice="hash"),
     "plain, 8 decode workers"),
    *((f"32 redundant experts, `{choice}`",
       group(8, all2all_backend="allgather_alltoall", replica_choice=choice),
       "plain, 8 decode workers") for choice in ("even", "metro")),
]  # fmt: skip


def once(fields: dict[str, Any]) -> tuple[float, int, int]:
    """Run; return CPU seconds, output tokens and bytes of a token's bit set."""
    config = make_config(fields)
    setting = prepare(config)
    cluster = build_cluster(config, setting, *offered_load(config, setting.trace))
    start = time.process_time()
    record = cluster.run()
    took = time.process_time() - start
    return took, int(record.decode_steps["outputs"].sum()), cluster.arrays.bits.shape[1] * 8


def runs() -> list[dict[str, str]]:
    """Return the rows of runs."""
    rows, bandwidth = [], stream_bandwidth()
    fields_of = {name: fields for name, fields, _ in CASES}
    for name, fields, beside in CASES:
        best = {}
        for i in range(ROUNDS):
            for case in (name, beside):
                if case is not None:
                    took, tokens, width = once(fields if case == name else fields_of[case])
                    if i > 0:  # the first one compiles, draws and fits
                        best[case] = min(best.get(case, np.inf), took / tokens)
        floor = width / bandwidth if beside is None else best[beside]
        rows.append(row(name, best[name], floor, beside or "streaming the bits"))
        if fields is EQUAL and (python := os.environ.get("DYNAMO_PYTHON")):
            rows += replays(python, best[name])
    return rows


def replays(python: str, ours: float) -> list[dict[str, str]]:
    """Return the rows of Dynamo's replay, beside our CPU seconds for a token of the same work."""
    script = str(Path(__file__).with_name("dynamo_replay.py"))
    requests, tokens = EQUAL["num_requests"], EQUAL["output_len"]
    rows = []
    for block in (16, 512):
        command = [python, script, str(requests), str(tokens), str(block), str(ROUNDS)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        took = min(map(float, done.stdout.split())) / (requests * tokens)
        rows.append(row(f"Dynamo's replay, KV blocks of {block}", took, ours, CASES[1][0]))
    return rows


def row(name: str, took: float, floor: float, of: str) -> dict[str, str]:
    """Print and return a row: CPU seconds a token, and of what it is compared with."""
    made = {
        "run": name,
        "CPU ns a token": f"{1e9 * took:.0f}",
        "M tokens / CPU-s": f"{1e-6 / took:.1f}",
        "times": f"{took / floor:.2f}",
        "of": of,
    }
    print(*made.values(), sep=" | ", flush=True)
    return made


def cpu_of(*arguments: str, python: str = sys.executable, **environment: str) -> float:
    """Return the CPU seconds of a Python process, whose modules are kept as bytecode.

    As those of an installed package are; in a checkout the first run of several writes it.
    """
    environment = {**os.environ, **environment}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([python, *arguments], check=True, capture_output=True,
                   env=environment)  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def starts() -> list[list[str]]:
    """Return the rows of starts, CPU seconds."""
    run = ("-c", "from eldr_sim.start import main; main()", "run", "--trace", "reference-moe",
           "--num-requests", "20", "--request-rate", "100", "--warmup", "0.01", "--policy", "jsq",
           "--topology")  # fmt: skip
    shared = ("1P1D", "--data-parallel-size", "4", "--enable-expert-parallel")
    imports, made = ("-c", "import eldr_sim.simulator.run"), []
    for name, command in (("import for a run", imports), ("20 requests, warm", (*run, "1P1D"))):
        made.append([name, f"{min(cpu_of(*command) for _ in range(ROUNDS)):.2f}"])
    pythons = {"": sys.executable, ", with compiled code": os.environ.get("WHEEL_PYTHON")}
    for of, python in pythons.items():
        if python:
            with tempfile.TemporaryDirectory() as cache:
                for name, engines in (("on a machine", ("1P1D",)), ("of a group", shared)):
                    took = cpu_of(*run, *engines, python=python, ELDR_SIM_CACHE=cache)
                    made.append([f"the first run {name}{of}", f"{took:.1f}"])
    for row in made:
        print(*row, "CPU-s", sep=" | ", flush=True)
    return made


if __name__ == "__main__":
    started, table = starts(), runs()
    if "--write" in sys.argv:
        data = Path(__file__).parents[2] / "docs" / "data"
        write_rows(data / "speed.csv", table)
        write_rows(
            data / "speed_starts.csv", [{"start": row[0], "CPU-s": row[1]} for row in started]
        )
