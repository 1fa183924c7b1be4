"""Choices of replicas in Python: compiled ones are equal to their numpy twins through that path."""

import pytest

from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config import make_config

TWINS = {
    "hash": "HashedPosition", "source": "NearSource", "even": "EvenSplit",
    "local_first": "LocalFirst", "metro:overhead_us=0": "Metro:overhead_us=0",
    "optimal:overhead_us=0": "Optimal:overhead_us=0",
}  # fmt: skip
RECORDS = (
    "requests", "prefill_steps", "decode_steps", "prefill_group_steps", "decode_group_steps",
    "relocations",
)  # fmt: skip


def run(choice, **values):
    fields = {
        "topology": "4P4D", "num_requests": 6, "output_len": 5, "data_parallel_size": 4,
        "enable_expert_parallel": True, "num_redundant_experts": 32, "expert_placement": "eplb",
        "max_num_batched_tokens": 256, "max_num_seqs": 32, "gpus_per_node": 2,
        "request_rate": 400, "input_len": 40, "replica_choice": choice,
    }  # fmt: skip
    return simulate(make_config(fields | values)).record


@pytest.mark.parametrize(
    ("backend", "values"),
    [
        ("allgather_reducescatter", {}),
        ("allgather_reducescatter", {"topology": "4C", "eplb_interval": 3}),
        ("nccl_alltoall", {"topology": "4C"}),
        ("pplx", {}),
    ],
)
def test_compiled_choices_are_their_numpy_twins(tmp_path, backend, values):
    file = tmp_path / "twins.py"
    file.write_text(
        "from eldr_sim.policies.replicas.base import *\n"
        "from eldr_sim.policies.replicas.metro import *\n"
        "from eldr_sim.policies.replicas.weighted import *\n"
    )
    gathers, seen = backend.startswith("allgather"), set()
    for word, twin in TWINS.items():
        if ("metro" in word or "optimal" in word) and not gathers:
            continue
        if "local" in word and values != {"topology": "4C"}:
            continue  # eplb predicts no load of prefill workers, nor of what it moves
        fast = run(word, all2all_backend=backend, **values)
        slow = run(f"{file}:{twin}", all2all_backend=backend, **values)
        for name in RECORDS:
            assert getattr(fast, name).tobytes() == getattr(slow, name).tobytes(), (word, name)
        seen.add(fast.decode_group_steps["moe_s"].tobytes())
    assert len(seen) > 1  # who computes does matter
