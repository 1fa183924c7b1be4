"""Random clusters with numba's bounds check: compiled code never reads behind the end of an array.

``python tests/house/bounds.py 300 0`` runs so many clusters from a seed. Each takes a base of
`fuzz_cases` and a random part of all fields of a run, with values that are not their defaults; what
is refused is dropped. Compiled functions with the check lie in a cache folder apart from others,
``ELDR_SIM_CACHE``: to compile them takes minutes, once.
"""

import collections
import os
import random
import sys
import warnings
from typing import Any

if __name__ == "__main__":  # before numba is imported
    os.environ["NUMBA_BOUNDSCHECK"] = "1"

from fuzz_cases import BASES, VALUES, base_of, with_field

from eldr_sim.errors import InputError
from eldr_sim.simulator.run import Result, simulate
from eldr_sim.simulator.setup.config.run_config import make_config

#: What draws from `VALUES` seldom make together.
TOPOLOGIES = ["1P1D", "2P3D", "1C", "3C", "1P", "2P", "1P2A2F"]
MORE: list[dict[str, Any]] = [
    {"workload": "agent", "sessions": 6, "turns": "3", "think_time": "0.02", "tool_time": "0"},
    {"workload": "chat", "sessions": 4, "turns": "2", "new_tokens": "40"},
    {"prefix_len": 64, "num_gpu_blocks_override": 60},
    {"prefix_len": 40, "enable_prefix_caching": False},
    {"model": "Qwen3-8B", "trace": None, "input_len": 200},
    {"engine": "sglang"}, {"engine": "trtllm"}, {},
]  # fmt: skip
POLICIES = {
    "policy": ["jsq", "eldr", "marginal_cost", "seconds", "oracle", "cache_aware", "dynamo_kv",
               "lmetric", "llmd", "preble", "session", "split", "vllm_dp_kv", "gimbal"],
    "prefill_policy": ["least_loaded", "prefix_hash", "saturation", "cache_aware", "dynamo_kv",
                       "llmd", "preble", "seconds", "session", "split"],
    "replica_choice": ["even", "hash", "source", "weighted", "local_first", "metro", "optimal",
                       "time_aware"],
    "conditional_disagg": ["noncached:40", "seconds", "prefill_load:0.9", "isl_bounding:200,0.7"],
}  # fmt: skip
_TRIES = 40


def draw(seed: int) -> dict[str, Any]:
    """Return the fields of a random run, of which some may be refused."""
    rng = random.Random(seed)
    fields = base_of(rng.choice(list(BASES))) | rng.choice(MORE)
    if rng.random() < 0.5:
        fields["topology"] = rng.choice(TOPOLOGIES)
    fields = {name: value for name, value in fields.items() if value is not None}
    for name in rng.sample(list(VALUES), rng.randint(3, 25)):
        fields = with_field(fields, name, rng.choice(VALUES[name]))
    for name, values in POLICIES.items():
        if rng.random() < 0.3:
            fields[name] = rng.choice(values)
    return fields


def run(fields: dict[str, Any]) -> tuple[str, Result | None]:
    """Run a cluster; fields that are refused are deleted. Returns what became of it, and the
    result."""
    for _ in range(_TRIES):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return "done", simulate(make_config(fields))
        except InputError as error:
            field = error.field.split(".")[0].split("[")[0]
            if field not in fields:
                return f"refused: {error}", None
            del fields[field]
    return "refused too often", None


def main(n: int, seed: int) -> int:
    """Run clusters; returns 1 and prints them if some read beyond an array or broke otherwise."""
    counts: collections.Counter[str] = collections.Counter()
    unseen: list[str] = []  # what compiled code raises where Python calls it by its address
    sys.unraisablehook = lambda error: unseen.append(repr(error.exc_value))
    failed = 0
    for number in range(seed * 100_000, seed * 100_000 + n):
        fields = draw(number)
        try:
            told, _ = run(fields)
        except Exception as error:
            told = f"failed: {type(error).__name__}: {error}"
        if unseen:
            told = f"failed: {unseen.pop()}"
            unseen.clear()
        counts[told.split(":")[0]] += 1
        if told.startswith("failed"):
            failed += 1
            print(f"{number} {told} ## {fields}", flush=True)
    print(f"{n} clusters of seed {seed} with bounds check:", dict(counts))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
