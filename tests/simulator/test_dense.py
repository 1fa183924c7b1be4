"""Runs of dense models: no expert anywhere, and what queues and arithmetic say."""

import dataclasses

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.planning.search.bounds import bounds
from eldr_sim.planning.slo import Objective
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup import run_routing
from eldr_sim.simulator.setup.config.groups import parse_slo
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.traces.requests import texts
from eldr_sim.traces.requests.texts import wanted_domains
from eldr_sim.traces.routing.synthetic import drawn

from ..on_each import on_each
from ..queueing import md1_wait

BASE = {
    "frontend": "none",
    "model": "Llama-3.1-8B", "gpu": "H100", "topology": "1P2D", "policy": "jsq",
    "request_rate": 20, "num_requests": 60, "output_len": 16,
}  # fmt: skip


def run(**changes):
    return simulate(make_config(BASE | changes))


@pytest.mark.parametrize("topology", ["2C", "1P2D", "2P"])
def test_results_have_no_expert(monkeypatch, topology):
    def never(*_):
        raise AssertionError("a trace is drawn or opened")

    monkeypatch.setattr(run_routing, "drawn_trace", never)
    monkeypatch.setattr(run_routing, "open_trace", never)
    result = run(topology=topology, output_len=None if topology == "2P" else 16)
    assert result.summary["completed"] == 60
    named = {k: v for k, v in result.summary.items() if "active_experts" in k or "busiest" in k}
    assert named
    assert not any(named.values())
    for column in ("active_experts", "busiest_rank_experts"):
        assert result.steps[column].null_count == len(result.steps)
    assert result.summary["trace"]["name"] is result.config["trace_checksum"] is None
    assert result.summary["trace_warnings"] == []


@pytest.mark.parametrize("n_prefill", [0, 2])
def test_a_dense_model_is_one_whose_experts_cost_nothing(
    make_step_time, make_workload, make_cluster, n_prefill
):
    """Bit for bit, under preemption, with prompts in the batch and hand-overs."""
    free = make_step_time(6, n_layers=2, n_experts=70, seed=3, max_tokens=64, max_context=64)
    nothing = {name: 0.0 * getattr(free.cost, name) for name in ("moe_s", "mixed_moe_s")}
    free.cost = free.cost._replace(**nothing, uniform_moe_s=0.0 * free.cost.uniform_moe_s)
    none = {"n_moe_layers": 0, "n_experts": 0}
    slim = {name: np.ascontiguousarray(v[:, :1]) for name, v in nothing.items()}
    dense = dataclasses.replace(free, cost=free.cost._replace(**none, **slim), n_experts=0)
    rng = np.random.default_rng(5)
    workload = make_workload(np.sort(rng.random(80)) / 50, rng.integers(1, 40, 80), 20)
    records = [
        make_cluster(
            workload, step_time=each, n_prefill=n_prefill, n_decode=2, max_num_seqs=6, n_blocks=40,
            prompts=prompts,
        ).run()
        for each, prompts in ((free, True), (dense, False))
    ]  # fmt: skip
    assert records[0].requests["preemptions"].sum() > 0
    for name in records[0].requests.dtype.names:
        if not name.startswith("window_"):
            np.testing.assert_array_equal(records[0].requests[name], records[1].requests[name])
    for pool in ("prefill_steps", "decode_steps"):
        moe, plain = (getattr(record, pool) for record in records)
        for name in ("start", "end", "sequences", "context", "chunk_tokens"):
            np.testing.assert_array_equal(moe[name], plain[name])


def test_prompts_alone_are_an_md1_queue():
    """One prompt a step and Poisson arrivals: the wait of M/D/1, 4 seeds within 6%."""
    config = {"topology": "1P", "output_len": None, "input_len": 1024, "policy": "round_robin",
              "max_num_batched_tokens": 1024, "max_num_seqs": 1, "num_requests": 6000}  # fmt: skip
    step_s = prepare(make_config(BASE | config)).step_time.prompt_s(1024)
    rate, waits = 0.6 / step_s, []
    for seed in range(4):
        requests = run(**config, request_rate=rate, seed=seed).record.requests
        waits.append((requests["first_token_s"] - requests["arrival_s"])[500:].mean() - step_s)
    assert np.mean(waits) == pytest.approx(md1_wait(rate, step_s), rel=0.06)


def test_a_saturated_worker_serves_its_full_steps_and_no_more():
    config = make_config(
        BASE | {"topology": "1C", "request_rate": "inf", "num_requests": 512, "input_len": 1,
                "output_len": 400, "max_num_seqs": 256}
    )  # fmt: skip
    step_s = prepare(config).step_time.decode_s([], 256, 200)
    served = simulate(config).summary["output_throughput"]
    assert served == pytest.approx(256 / step_s, rel=0.03)
    assert served < 256 / prepare(config).step_time.decode_s([], 256, 1)


def test_bounds_count_the_dense_steps():
    config = make_config(BASE | {"topology": "1C", "request_rate": 300, "input_len": 1000,
                                 "output_len": 100})  # fmt: skip
    found = bounds(config, Objective(parse_slo(["tpot:20"]), 0.9))
    steps = prepare(config).step_time
    batch = np.arange(1, steps.max_num_seqs + 1)
    step_s = np.array([steps.decode_s([], int(n), 1000.0) for n in batch])
    busy = 300 * 100 / (batch / step_s)[step_s <= 0.02].max()
    n = steps.max_num_seqs and 8192 // 1000
    busy += 300 * steps.prefill_s([1000] * n, [0] * n) / n
    assert found.n_decode == np.ceil(0.9 * busy) > 1


@on_each(
    "changes, field",
    [
        ({"policy": "eldr"}, "policy"),
        ({"policy": "marginal_cost"}, "policy"),
        ({"policy": "domain"}, "policy"),
        ({"policy": "oracle"}, "policy"),
        ({"trace": "reference-moe"}, "trace"),
        ({"routing_band": "low"}, "routing_band"),
        ({"moe_backend": "triton"}, "moe_backend"),
        ({"expert_placement": "eplb"}, "expert_placement"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "enable_expert_parallel"),
        ({"num_redundant_experts": 4}, "num_redundant_experts"),
        ({"expert_gather": "collective", "topology": "2P", "output_len": 1}, "expert_gather"),
        ({"eplb_interval": 3}, "eplb_interval"),
    ],
)
def test_what_needs_experts_is_refused_in_one_sentence(changes, field):
    with pytest.raises(InputError) as caught:
        run(**changes)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_requests_are_those_of_a_drawn_trace(monkeypatch):
    """A dense and a MoE model serve the same requests of one workload."""
    for module in (texts, drawn):
        monkeypatch.setattr(module, "SERVING", 40)
        monkeypatch.setattr(module, "CALIBRATION", 12)
    for workload in ("task", "language"):
        domains = wanted_domains(workload)
        own = texts.draw_texts.__wrapped__(domains)
        other = drawn.drawn_trace("any", drawn.Shape(2, 32, 4), domains).texts
        assert own.domains == other.domains
        for name in ("domain", "prompt_len", "output_len", "served"):
            np.testing.assert_array_equal(getattr(own, name), getattr(other, name))


@pytest.mark.long
def test_commands_serve_dense_models(tmp_path, run_cli):
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in BASE.items()]
    others = [flag for flag in flags if "policy" not in flag]
    loads = [flag for flag in others if "topology" not in flag and "requests" not in flag]
    loads += ["--num-requests=120"]
    few, slo = (
        ["--seeds=1", "--jobs=1"],
        ["--slo=tpot:50", "--attainment=0.9", "--max-gpus=2", "--seeds=3"],
    )

    def shown(*arguments):
        code, out, error = run_cli(*arguments)
        assert code == 0, error
        return out

    first, second = tmp_path / "a", tmp_path / "b"
    assert "experts" not in shown("run", *flags, "--out", first)
    shown("run", *flags, "--tensor-parallel-size=2", "--out", second)
    differences = shown("explain", first, second)
    assert "dense layers" in differences
    assert "MoE" not in differences
    shown("report", first, "--out", tmp_path / "page.html")
    assert "1P1D" in shown("what-if", first, "--set", "topology=1P1D", *few)
    compared = shown("compare", *others, *few)
    assert "p2c" in compared
    assert "eldr" not in compared
    assert "1C on H100" in shown("plan", *loads, *slo, *few[1:])
    (tmp_path / "sweep.yaml").write_text(
        "config: {model: Qwen3-8B, gpu: H100, num_requests: 20, output_len: 4, topology: 2C}\n"
        "sweep: {type: grid, parameters: {request_rate: [10, 20]}}\nmultiRun: {numRuns: 1}\n"
    )
    shown("sweep", tmp_path / "sweep.yaml", "--out", tmp_path / "sweep", "--jobs=1")
    for table in (["models"], ["gpus", "--model", "Qwen3-32B"]):
        assert "dense" in shown(*table) or table[0] == "gpus"
