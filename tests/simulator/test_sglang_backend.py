"""``--backend sglang``: SGLang's scheduler in each worker of the reference model.

What stands around an engine's scheduler is tested with vLLM's stand-in (`test_vllm_backend.py`).
Where SGLang 0.5.9 is installed beside the package, its own scheduler is run."""

import importlib.util
import sys

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.simulator.engine_code import sglang
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config

RUN = {
    "policy": "jsq", "num_requests": 40, "warmup": 0, "output_len": 12, "trace": "reference-moe",
    "engine": "sglang", "topology": "1C", "request_rate": 60,
}  # fmt: skip
#: Where prompts keep decoding out for so long that no sequence ends beside others that decode.
EQUAL = {
    "one step at a time": {"async_scheduling": False},
    "chunks": {"max_num_batched_tokens": 48},
}
#: SGLang notices the end of a sequence a step late: until the first end, all is equal.
UNTIL_AN_END = {
    "two workers": {"topology": "2C", "request_rate": 40},
    "prompts and decoding together": {"max_num_batched_tokens": 64, "enable_mixed_chunk": True},
    "polls": {"scheduler_recv_interval": 4},
    "shared prefixes": {"prefix_len": 64, "request_rate": 40},
    "a worker dies": {"topology": "3C", "fail": ("worker:0@0.3s",), "retry": "migrate"},
}
LIVE = [
    pytest.mark.live,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"
    ),
]


def both(changes):
    """Return a run by compiled rules and by SGLang's scheduler; all tokens came once in both."""
    config = make_config(RUN | changes)
    ours, theirs = simulate(config), simulate(config, backend="sglang")
    assert theirs.summary["completed"] == RUN["num_requests"]
    lengths = [r.requests["output_len"].to_pylist() for r in (ours, theirs)]
    assert lengths[0] == lengths[1]
    return ours, theirs


class TestSglangsOwnScheduler:
    pytestmark = LIVE

    @pytest.mark.parametrize("name", EQUAL)
    def test_it_equals_the_compiled_rules(self, name):
        ours, theirs = both(EQUAL[name])
        for column in ("start_s", "end_s", "batch", "tokens"):
            np.testing.assert_allclose(theirs.steps[column], ours.steps[column], rtol=1e-9)
        np.testing.assert_allclose(
            theirs.requests["finish_s"], ours.requests["finish_s"], rtol=1e-9
        )

    @pytest.mark.parametrize("name", UNTIL_AN_END)
    def test_it_equals_the_compiled_rules_until_a_sequence_ends(self, name):
        ours, theirs = both(UNTIL_AN_END[name])
        end = min(ours.requests["finish_s"].to_pylist())
        columns = [
            [np.array(run.steps[c]) for c in ("worker", "start_s", "batch", "tokens")]
            for run in (ours, theirs)
        ]
        found = [np.column_stack(each)[each[1] < end] for each in columns]
        assert len(found[0]) > 4
        np.testing.assert_allclose(found[1], found[0], rtol=1e-9)

    def test_it_retracts_where_kv_is_scarce(self):
        """It holds single tokens, ours whole blocks: which request it takes may differ."""
        scarce = {"num_gpu_blocks_override": 120, "output_len": 60, "request_rate": 200}
        _, theirs = both(scarce)
        assert theirs.summary["preemptions"] > 0


def test_a_bare_installation_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    sglang.load_sglang.cache_clear()
    with pytest.raises(InputError, match=r"backend: SGLang's scheduler cannot be .*sglang 0\.5\.9"):
        simulate(make_config(RUN), backend="sglang")


@pytest.mark.parametrize(("changes", "field"), [
    ({"engine": "vllm"}, "engine"),
    ({"topology": "1P1D"}, "topology"),
    ({"queue_order": "sjf"}, "queue_order"),
    ({"data_parallel_size": 2, "enable_expert_parallel": True}, "enable_expert_parallel"),
    ({"autoscale": "hpa"}, "autoscale"),
    ({"trace": None, "model": "GPT-OSS-120B"}, "model"),
    ({"speculative_config": {
        "method": "eagle3", "num_speculative_tokens": 2, "acceptance": "mtp-gsm8k",
    }}, "speculative_config"),
])  # fmt: skip
def test_what_the_backend_does_not_run_is_refused_by_name(changes, field):
    with pytest.raises(InputError) as refused:
        simulate(make_config(RUN | changes), backend="sglang")
    assert refused.value.field == field
