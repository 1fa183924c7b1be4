"""A digest of what twelve runs of all kinds yield, column by column, against the one that is kept.

    python tests/digest.py            compare; exit code 1 where anything differs
    python tests/digest.py --update   keep what they yield now

A change of the simulator that means to change no result shows here that it does not. Values are
hashed, not the bytes of files, which depend on other packages' versions, and of a summary the
numbers alone: words may change, and figures that are new do not count. Runs replay the embedded
trace, so what is drawn or fitted by other packages does not count.
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from eldr_sim.simulator.run import Result, simulate
from eldr_sim.simulator.setup.config.run_config import make_config

KEPT = Path(__file__).parent / "golden" / "digest.json"

PLAIN = {
    "trace": "reference-moe", "topology": "2P4D", "policy": "jsq", "num_requests": 600,
    "frontend": "none", "request_rate": 60, "warmup": 1, "output_len": 96,
}  # fmt: skip
#: As many KV blocks as let some requests be preempted.
FEW = {"num_gpu_blocks_override": 160}
GROUP = {"data_parallel_size": 4, "enable_expert_parallel": True, "topology": "1P1D"}
REDUNDANT = GROUP | {"num_redundant_experts": 16, "expert_placement": "eplb"}
PROMPTS = {"policy": "round_robin", "topology": "2P", "output_len": None, "input_len": 3000}
RUNS: dict[str, dict[str, Any]] = {
    "xPyD": {"load_report_delay_ms": 2, "policy": "p2c"} | FEW,
    "xC": {"topology": "3C"} | FEW,
    "xP": PROMPTS,
    "group": GROUP | {"all2all_backend": "deepep_ll"},
    "redundant": REDUNDANT | {"replica_choice": "metro", "topology": "2C"},
    "relocation": REDUNDANT
    | {"eplb_interval": 120, "eplb_window": 60, "replica_choice": "source", "eplb_async": True},
    "streamed": PROMPTS
    | {"topology": "1P", "data_parallel_size": 4, "enable_expert_parallel": True,
       "expert_gather": "collective"},
    "stages": PROMPTS
    | {"pipeline_parallel_size": 4, "input_len": 800, "request_rate": "inf", "warmup": 0,
       "max_num_seqs": 8},
    "front end": {
        "frontend": "xeon-emerald-rapids", "api_servers": 2, "handover": "vllm_nixl",
        "max_concurrency": 60,
    },
    "faults": {
        "events": str(Path(__file__).with_name("digest_events.yaml")),
        "retry": "migrate", "health_delay_ms": 50,
    },
    "prefix cache": {
        "prefix_len": 512, "num_prefixes": 6, "input_len": 400,
        "signal_interval_ms": 20, "policy": "gimbal", "prefill_policy": "gimbal",
    },
    "priority order": {"queue_order": "sjf_aging", "topology": "2C", "max_num_seqs": 8},
}  # fmt: skip


def digest(result: Result) -> dict[str, dict[str, str]]:
    """Return a hash of each column of a result's two tables, and of each figure of its summary."""
    tables = {"requests": result.requests, "steps": result.steps}
    hashes = {
        name: {
            column: _hash(table[column].to_pylist()) for column in table.column_names
        }
        for name, table in tables.items()
    }  # fmt: skip
    figures = {name: list(_numbers(value)) for name, value in result.summary.items()}
    hashes["summary"] = {name: _hash(values) for name, values in figures.items() if values}
    return hashes


def _hash(values: list[Any]) -> str:
    exact = [value.hex() if isinstance(value, float) else value for value in values]
    return blake2b(repr(exact).encode(), digest_size=4).hexdigest()


def _numbers(value: Any) -> Iterator[float]:
    """Give the numbers of a nested value, each with no name; those that are unknown are NaN."""
    if value is None:
        yield math.nan
    elif isinstance(value, (bool, int, float)):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _numbers(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _numbers(inner)


def main(arguments: list[str]) -> int:
    """Compare the digests of all runs, or keep them."""
    kept = json.loads(KEPT.read_text())
    found, differs = {}, 0
    for name, values in RUNS.items():
        begin = time.perf_counter()
        found[name] = digest(simulate(make_config(PLAIN | values)))
        others = [
            f"{part}.{key}"
            for part, hashes in kept[name].items()
            for key, value in hashes.items()
            if found[name][part].get(key) != value
        ]
        differs += len(others)
        more = f" and {len(others) - 8} more" if len(others) > 8 else ""
        said = f"differs: {', '.join(others[:8])}{more}" if others else "equal"
        print(f"{name:16}{time.perf_counter() - begin:5.1f} s  {said}", flush=True)
    if "--update" in arguments:
        lines = [f'"{name}": {_lines(parts)}' for name, parts in found.items()]
        KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return 0
    return 1 if differs else 0


def _lines(parts: dict[str, dict[str, str]]) -> str:
    """Return the hashes of a run, a line each part, so that a change is short to read."""
    inner = [f'  "{part}": {json.dumps(hashes)}' for part, hashes in parts.items()]
    return "{\n" + ",\n".join(inner) + "\n}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
