"""Choices of replicas in Python: compiled ones are equal to their numpy twins through that path."""

from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config

from ..on_each import on_each

TWINS = {
    "hash": "HashedPosition", "source": "NearSource", "even": "EvenSplit",
    "local_first": "LocalFirst", "metro:overhead_us=0": "Metro:overhead_us=0",
    "optimal:overhead_us=0": "Optimal:overhead_us=0",
    "time_aware:overhead_us=0": "TimeAware:overhead_us=0",
}  # fmt: skip
RECORDS = (
    "requests", "prefill_steps", "decode_steps", "prefill_group_steps", "decode_group_steps",
    "relocations",
)  # fmt: skip


def run(choice, **values):
    fields = {
        "topology": "4P4D", "num_requests": 4, "output_len": 4, "data_parallel_size": 4,
        "enable_expert_parallel": True, "num_redundant_experts": 32, "expert_placement": "eplb",
        "max_num_batched_tokens": 256, "max_num_seqs": 32, "gpus_per_node": 2,
        "request_rate": 400, "input_len": 40, "replica_choice": choice,
    }  # fmt: skip
    return simulate(make_config(fields | values)).record


PLACES = {
    "apart": ("allgather_reducescatter", {}),
    "moving": ("allgather_reducescatter", {"topology": "4C", "eplb_interval": 3}),
    "together": ("nccl_alltoall", {"topology": "4C"}),
    "to each rank": ("pplx", {}),
}
CASES = [
    (place, word)
    for place, (backend, values) in PLACES.items()
    for word in TWINS
    # METRO's and the optimal choice gather; eplb predicts no load of prefill workers or of moves.
    if backend.startswith("allgather") or not word.startswith(("metro", "optimal", "time_aware"))
    if word != "local_first" or values == {"topology": "4C"}
]


@on_each("place, word", CASES)
def test_a_compiled_choice_is_its_numpy_twin(tmp_path, place, word):
    file, (backend, values) = tmp_path / "twins.py", PLACES[place]
    file.write_text(
        "from eldr_sim.policies.replicas.base import *\n"
        "from eldr_sim.policies.replicas.metro import *\n"
        "from eldr_sim.policies.replicas.weighted import *\n"
    )
    fast = run(word, all2all_backend=backend, **values)
    slow = run(f"{file}:{TWINS[word]}", all2all_backend=backend, **values)
    for name in RECORDS:
        assert getattr(fast, name).tobytes() == getattr(slow, name).tobytes(), name


def test_who_computes_matters():
    found = {run(word).decode_group_steps["moe_s"].tobytes() for word in ("hash", "even", "source")}
    assert len(found) == 3
