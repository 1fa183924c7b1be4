"""MoE-Prefill's router before the engine: its load goes down to nothing, in order, without end."""

import math

import numpy as np
import pytest

from eldr_sim.kernel_profiles.kernels.flops import prefill_work
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.policies.routing.saturation import SaturationPolicy
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from studies.moe_prefill.workload import real_world, write_log

GATHERING = {
    "trace": "reference-moe",
    "topology": "1P",
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "expert_gather": "one_sided",
    "api_servers": 1,  # several finish in another order
}


@pytest.fixture(scope="module", params=[math.inf, 2.0])
def log(tmp_path_factory, request):
    """Documents with siblings, headers, and prompts of several steps; slow ones leave gaps."""
    path = tmp_path_factory.mktemp("log") / "requests.jsonl"
    prompts = real_world(1.0, 0.002, seed=1)
    write_log(prompts, path, request.param)
    return {
        "workload": str(path),
        "num_requests": len(prompts),
        "request_rate": request.param,
        "max_model_len": 131_200,
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 64,
    }


@pytest.fixture
def watched(monkeypatch):
    """Every worker's load: what was added, and what was left when it had nothing to compute."""
    seen = {"left": [], "added": [], "order": [], "most": 0.0, "over": -np.inf}
    select, on_tokens, forget = (
        SaturationPolicy.select,
        SaturationPolicy.on_tokens,
        SaturationPolicy._forget,
    )

    def choose(self, request, workers):
        before = list(self.load)
        worker = select(self, request, workers)
        if worker is not None:
            seen["order"].append(request.request_id)
            seen["added"].append(self.load[worker] - before[worker])
            seen["over"] = max(seen["over"], before[worker] - self.threshold)
            seen["most"] = max(seen["most"], self.load[worker])
        return worker

    def compute(self, worker, tokens):
        ends = sum(sent.end - sent.done for sent in self._queues[worker]) == tokens
        if ends:  # what `on_tokens` would take away, before it sets the rest to 0
            taken = sum(self._work.flops(s.end - s.done, s.done) for s in self._queues[worker])
            seen["left"].append(self.load[worker] - taken)
        on_tokens(self, worker, tokens)

    def drop(self, worker):
        assert not self._queues[worker], "the engine computed less than the router had expected"
        forget(self, worker)

    monkeypatch.setattr(SaturationPolicy, "select", choose)
    monkeypatch.setattr(SaturationPolicy, "on_tokens", compute)
    monkeypatch.setattr(SaturationPolicy, "_forget", drop)
    return seen


@pytest.mark.parametrize("unit", ["flops", "tokens"])
def test_the_load_counts_the_work_of_the_requests_and_ends_at_nothing(log, watched, unit):
    result = simulate(
        make_config(log | GATHERING | {"prefill_policy": f"saturation:margin=1,unit={unit}"})
    )
    requests = result.record.requests
    assert result.summary["completed"] == log["num_requests"]
    assert watched["order"] == sorted(watched["order"])
    work = prefill_work(load_model("Qwen3-30B-A3B"))
    if unit == "tokens":
        work = work._replace(pair_flops=0.0, sliding_pair_flops=0.0)
    computed = requests["prompt_len"] - requests["cached_tokens"]
    flops = [
        work.flops(*pair)
        for pair in zip(computed.tolist(), requests["cached_tokens"].tolist(), strict=True)
    ]
    # The steps' chunks take away what the requests added, and both are what was computed.
    assert sum(watched["added"]) == pytest.approx(sum(flops), rel=1e-9)
    if log["request_rate"] < np.inf:  # the router hears of workers that have nothing left
        assert len(watched["left"]) > 10
        assert np.abs(watched["left"]).max() < 1e-9 * sum(flops)
    steps = result.record.prefill_steps
    assert steps["chunk_tokens"].sum() == computed.sum()


def test_a_threshold_of_nothing_places_all(log, watched):
    """One request a worker at a time, whatever it is."""
    result = simulate(make_config(log | GATHERING | {"prefill_policy": "saturation:threshold=0"}))
    assert result.summary["completed"] == log["num_requests"]
    assert result.record.prefill_steps["chunks"].max() == 1
    assert watched["order"] == sorted(watched["order"])


def test_loads_end_between_the_threshold_and_one_request_more(log, watched):
    simulate(make_config(log | GATHERING | {"prefill_policy": "saturation:threshold=1e14"}))
    assert watched["over"] < 0
    assert watched["most"] <= 1e14 + max(watched["added"])
