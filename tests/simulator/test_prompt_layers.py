"""Prefill workers whose layers are streamed, or lie in stages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.steps.step_time import PipelinePlan
from eldr_sim.kernel_profiles.steps.weight_streaming import Stream, StreamPlan, plan_stream
from eldr_sim.simulator.plane import state
from eldr_sim.simulator.plane.steps.streamed import _pass_stages
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup import streaming as prompt_layout
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.simulator.setup.streaming import PromptLayout, make_prompt_layers

from ..on_each import on_each

BASE = {
    "topology": "1P",
    "workload": "task",
    "trace": "reference-moe",
    "request_rate": 400.0,
    "num_requests": 60,
    "prefill_policy": "round_robin",
}
SHARED = {"data_parallel_size": 2, "enable_expert_parallel": True}


def run(**fields):
    return simulate(make_config(BASE | fields))


def ends(result):
    return result.record.requests["finish_s"]


def free_transfers(model, gpu, n_gpus, **_):
    return StreamPlan(Stream(0.0, 0.0, 0.0, n_gpus == 1), 0, 1, {}, ())


def test_infinite_links_are_as_good_as_all_experts_on_each_gpu(monkeypatch):
    """And engines that gather by themselves are workers of one GPU."""
    monkeypatch.setattr(prompt_layout.weight_streaming, "plan_stream", free_transfers)
    streamed = run(**SHARED, expert_gather="one_sided")
    np.testing.assert_allclose(ends(streamed), ends(run(topology="2P")), rtol=1e-12)
    assert streamed.summary["weight_streaming"]["wait_share"] == pytest.approx(0.0, abs=1e-12)


def test_a_window_of_all_layers_streams_nothing():
    whole = run(offload_window=47)
    np.testing.assert_allclose(ends(whole), ends(run()), rtol=1e-12)
    assert run(offload_window=46).summary["makespan_s"] > whole.summary["makespan_s"]


def test_collectives_wait_for_the_slowest_and_one_sided_gathers_do_not():
    alone, together = (
        run(**SHARED, expert_gather=gather, num_requests=40, request_rate=3.0)
        for gather in ("one_sided", "collective")
    )
    assert (ends(together) >= ends(alone) - 1e-9).all()
    assert ends(together).sum() > ends(alone).sum()
    # A request that comes when nobody computes takes what its gathers take, whoever joins them.
    np.testing.assert_allclose(ends(together)[0], ends(alone)[0], rtol=1e-12)


def test_experts_gathered_as_they_are_needed_take_their_share_of_a_layer(tmp_path):
    """One token needs k experts of every layer but the first; more tokens those that they choose.

    Of the first layer, whose experts lie there, between k and all are activated.
    """
    model = load_model("Qwen3-30B-A3B")
    gather_s = plan_stream(model, load_gpu("H100"), 2).stream.gather_s
    for tokens in (1, 8000):
        path = tmp_path / f"{tokens}.jsonl"
        path.write_text(f'{{"timestamp": 0, "input_length": {tokens}, "output_length": 1}}')
        log = {"workload": str(path), "num_requests": 1, "request_rate": None}
        needed, alone = (
            run(**log, **fields)
            for fields in (SHARED | {"expert_gather": "needed"}, {"topology": "2P"})
        )
        layers = (ends(needed)[0] - ends(alone)[0]) / gather_s
        (active,) = needed.record.prefill_steps["active"]
        if tokens == 1:
            assert layers == pytest.approx((model.n_moe_layers - 1) * model.top_k / model.n_experts)
        assert active - model.n_experts <= layers * model.n_experts * (1 + 1e-9)
        assert layers * model.n_experts * (1 - 1e-9) <= active - model.top_k


@given(
    n_stages=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), min_size=1, max_size=30),
    head=st.integers(0, 5),
)
def test_steps_pass_the_stages_as_a_flow_shop(n_stages, steps, head):
    """By a table of all (step, stage), for steps that come as early as they may, or later."""
    shares = np.arange(1, n_stages + 1) / (n_stages * (n_stages + 1) / 2)
    layout = PromptLayout(None, None, False, PipelinePlan(tuple(shares), 0.5, 0.25, {}), False)
    layers, workers = (
        make_prompt_layers(layout, 1, 1, 8),
        np.zeros(1, state.WORKER).view(np.recarray),
    )
    ends = np.zeros((len(steps), n_stages))
    may_begin = 0.0
    for i, (computes, later) in enumerate(steps):
        workers["chunk_tokens"] = tokens = 8 + i
        at = start = may_begin + later
        for stage in range(n_stages):
            sent = at + (0.5 + 0.25 * tokens if stage else 0.0)
            at = max(sent, ends[i - 1, stage] if i and stage else 0.0) + computes * shares[stage]
            ends[i, stage] = at + (head if stage == n_stages - 1 else 0)
        may_begin = max(ends[i, 0], ends[i + 1 - n_stages, -1] if i + 1 >= n_stages else 0.0)
        got = _pass_stages.py_func(workers, 0, float(start), float(computes), float(head), layers)
        assert got == pytest.approx(may_begin, rel=1e-12)
        assert workers["exit_s"][0] == pytest.approx(ends[i, -1], rel=1e-12)


def test_equal_steps_fill_the_stages():
    """Makespan of a flow shop: the sum of the stage times and one stage time a further stage."""
    shares = (0.25,) * 4
    layout = PromptLayout(None, None, False, PipelinePlan(shares, 0.0, 0.0, {}), False)
    layers, workers = (
        make_prompt_layers(layout, 1, 1, 8),
        np.zeros(1, state.WORKER).view(np.recarray),
    )
    at = 0.0
    for _ in range(10):
        at = _pass_stages.py_func(workers, 0, at, 4.0, 0.0, layers)
    assert workers["exit_s"][0] == pytest.approx(10 * 1.0 + 3 * 1.0)


def test_a_request_alone_takes_its_sends_longer_than_on_one_gpu():
    alone, staged = (run(num_requests=1, **f) for f in ({}, {"pipeline_parallel_size": 4}))
    plan = prepare(make_config(BASE | {"pipeline_parallel_size": 4})).spec.prefill.layout.pipeline
    sends = 3 * (plan.send_s + plan.send_token_s * alone.record.requests["prompt_len"][0])
    assert ends(staged)[0] - ends(alone)[0] == pytest.approx(sends, rel=1e-6)


def test_stages_serve_all_and_give_their_blocks_back():
    fields = {"max_num_batched_tokens": 300, "max_num_seqs": 4, "num_requests": 150}
    staged, plain = run(pipeline_parallel_size=4, **fields), run(**fields)
    assert staged.summary["completed"] == 150
    assert staged.summary["makespan_s"] < plain.summary["makespan_s"]
    few = run(pipeline_parallel_size=4, gpu_memory_utilization=0.24, **fields)
    assert few.summary["kv_blocks_per_worker"] < staged.summary["kv_blocks_per_worker"] / 10
    assert few.summary["completed"] == 150


def test_without_a_kv_cache_prompts_are_computed_whole_or_refused():
    lengths = run(num_requests=60).record.requests["prompt_len"]
    budget = int(np.unique(lengths)[-2])
    result = run(kv_cache_free=True, max_num_batched_tokens=budget, max_num_seqs=4)
    requests, steps = result.record.requests, result.record.prefill_steps
    done = lengths <= budget
    assert result.summary["failed_reasons"] == {"exceeds_token_budget": int((~done).sum())}
    assert steps["chunks"].sum() == done.sum()
    assert steps["chunk_tokens"].max() <= budget
    assert (ends(result)[done] > 0).all()
    assert result.summary["prefix_cache_hits"] == 0
    assert (requests["outcome"][~done] == requests["outcome"][~done][0]).all()


@on_each(
    "fields, field",
    [
        ({"expert_gather": "collective"}, "expert_gather"),
        ({**SHARED, "offload_window": 3}, "offload_window"),
        ({"gather_interference": 0.1}, "gather_interference"),
        ({**SHARED, "expert_gather": "needed", "offload_window": 3}, "offload_window"),
        ({"topology": "1P1D", "kv_cache_free": True}, "kv_cache_free"),
        ({"topology": "1C", "offload_window": 3}, "offload_window"),
        ({"topology": "1P1D", "pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({**SHARED, "pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"tensor_parallel_size": 4, "pipeline_parallel_size": 4}, "pipeline_parallel_size"),
        ({**SHARED, "expert_gather": "collective", "tensor_parallel_size": 2}, "expert_gather"),
    ],
)
def test_refusals(fields, field):
    with pytest.raises(InputError) as caught:
        run(**fields)
    assert caught.value.field == field


@on_each(
    "model, fields, fits",
    [
        # The paper's cells (MoE-Prefill Sec. 8.5) on 80 GB: FP8 needs 4 GPUs, BF16 8.
        ("Qwen3-235B-A22B-FP8", {"data_parallel_size": 2}, False),
        ("Qwen3-235B-A22B-FP8", {"data_parallel_size": 4}, True),
        ("Qwen3-235B-A22B", {"data_parallel_size": 4}, False),
        ("Qwen3-235B-A22B", {"data_parallel_size": 8}, True),
        # Weights gathered from other GPUs alone need room for a layer and its buffers,
        ("Qwen3-235B-A22B-FP8", {"data_parallel_size": 8, "expert_gather": "collective"}, True),
        ("Qwen3-235B-A22B", {"data_parallel_size": 8, "expert_gather": "collective"}, False),
        # from host memory less: one GPU holds the model.
        ("Qwen3-235B-A22B-FP8", {"data_parallel_size": 1, "offload_window": 4}, True),
        ("Qwen3-235B-A22B", {"data_parallel_size": 1, "offload_window": 4}, True),
        ("Qwen3-235B-A22B-FP8", {"pipeline_parallel_size": 2}, False),
        ("Qwen3-235B-A22B-FP8", {"pipeline_parallel_size": 4}, True),
    ],
)
def test_what_fits_on_80_gb(model, fields, fits):
    experts = fields.get("data_parallel_size", 1) > 1
    config = make_config(
        BASE | {"gpu": "H100", "model": model, "enable_expert_parallel": experts} | fields
    )
    if fits:
        assert prepare(config).spec.prefill.n_blocks > 0
    else:
        with pytest.raises(InputError, match="weights need"):
            prepare(config)


def test_stages_share_the_places_of_the_batch():
    """As in vLLM, where a request keeps its place until the last stage returns it."""
    fields = {"pipeline_parallel_size": 4, "max_num_seqs": 6, "request_rate": "inf", "warmup": 0}
    requests = run(num_requests=80, **fields).record.requests
    events = np.concatenate([requests["prefill_start_s"], requests["prefill_end_s"]])
    order = np.lexsort((np.repeat([1, 0], len(requests)), events))  # who leaves goes first
    there = np.cumsum(np.repeat([1, -1], len(requests))[order])
    assert there.max() == 6
