"""What is refused is refused before a routing trace is read or drawn."""

import pytest

from eldr_sim.errors import InputError
from eldr_sim.simulator.setup import prepare
from eldr_sim.simulator.setup.config.run_config import make_config

CO_LOCATED = {"topology": "2C"}
REFUSED = [
    {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
    {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1, "acceptance": "best"}},
    {"acceptance": "glm-5.2"},
    {"moe_backend": "marlin"},
    {"gpu": "abacus"},
    {"model": "Qwen99"},
    {"model": "DeepSeek-R1", "gpu": "A100-80GB"},
    {"enable_elastic_ep": True},
    {"scheduler_recv_interval": 3},
    {"tokenizer_mode": "microbatch_parallel"},
    {"conditional_disagg": "sometimes"},
    {"conditional_disagg": "noncached:64", "policy": "eldr"},
    CO_LOCATED | {"conditional_disagg": "noncached:64"},
    CO_LOCATED | {"prefill": {"max_num_seqs": 4}},
    {"topology": "2P", "output_len": 5},
    {"topology": "2P", "decode": {"max_num_seqs": 4}},
    {"kv_reserve": "arrival", "policy": "eldr"},
    {"num_gpu_blocks_override": 0},
]


@pytest.mark.parametrize("fields", REFUSED, ids=str)
def test_refusals_come_before_routing(fields, monkeypatch):
    """INV-12."""

    def drawn(*_):
        raise AssertionError("routing was drawn")

    monkeypatch.setattr(prepare, "trace_of", drawn)
    with pytest.raises(InputError):
        prepare.prepare(make_config({"topology": "1P1D", "policy": "jsq"} | fields))
